package proxy

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"waybill/dispatch"
	"waybill/internal/control"
	"waybill/metrics"
)

// The fields of a signed webhook, both ways (the Standard Webhooks form).
const (
	WebhookID        = "Webhook-Id"
	WebhookTimestamp = "Webhook-Timestamp" // seconds since 1970
	WebhookSignature = "Webhook-Signature" // "v1," and base64; several are separated by blanks
)

const (
	// webhookWindow is how far a timestamp may be from this machine's clock.
	webhookWindow = 5 * time.Minute
	// maxRemembered bounds the ids that are kept against replays, for twice the window.
	maxRemembered = 10_000
	maxWebhookID  = 128
)

// MinWebhookKey is the least length of a webhook's key, in bytes.
const MinWebhookKey = 24

// ErrWebhookKey is returned for a key that is too short, or is no base64 after "whsec_".
var ErrWebhookKey = errors.New("proxy: a webhook's key has at least 24 bytes; after whsec_ it is base64")

// WebhookKey reads a key as it is kept: its bytes, or base64 after "whsec_".
func WebhookKey(text []byte) ([]byte, error) {
	key := text
	if rest, ok := strings.CutPrefix(string(text), "whsec_"); ok {
		b, err := base64.StdEncoding.DecodeString(rest)
		if err != nil {
			return nil, ErrWebhookKey
		}
		key = b
	}
	if len(key) < MinWebhookKey {
		return nil, ErrWebhookKey
	}
	return key, nil
}

// SignWebhook returns the signature field over id, timestamp and body: HMAC-SHA256 of
// "id.timestamp.body".
func SignWebhook(key []byte, id string, at time.Time, body []byte) string {
	return "v1," + base64.StdEncoding.EncodeToString(webhookMAC(key, id, strconv.FormatInt(at.Unix(), 10), body))
}

func webhookMAC(key []byte, id, timestamp string, body []byte) []byte {
	mac := hmac.New(sha256.New, key)
	_, _ = io.WriteString(mac, id+"."+timestamp+".") // a hash never fails
	_, _ = mac.Write(body)
	return mac.Sum(nil)
}

// DecisionMessage is the body of POST /v1/decisions: a person's word on one request,
// named by its action and its fingerprint (CONTRACT D3, D4).
type DecisionMessage struct {
	InvocationID string           `json:"invocation_id"`
	Fingerprint  string           `json:"fingerprint"`
	Verdict      dispatch.Verdict `json:"verdict"` // "approved" or "denied"
	By           string           `json:"by"`
	Reason       string           `json:"reason,omitempty"`
}

// decisionProblem is what a refused message is answered with.
type decisionProblem struct {
	Problem string `json:"problem"`
	Message string `json:"message"`
}

// Decisions is the endpoint that takes signed decisions. Safe for concurrent use.
type Decisions struct {
	// Key returns the key at the time of a message.
	Key    func() ([]byte, error)
	Who    Approver
	Logger *slog.Logger
	// Metrics counts the answers; nil: nobody does.
	Metrics *metrics.Metrics
	// Now is the clock; nil: the system's.
	Now func() time.Time

	mu   sync.Mutex
	seen map[string]time.Time // id → its timestamp
}

// ServeHTTP implements http.Handler.
func (d *Decisions) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	refuse := func(status int, problem, message string) {
		remote, _, err := net.SplitHostPort(r.RemoteAddr)
		if err != nil {
			remote = r.RemoteAddr
		}
		d.Metrics.SignedDecision(metrics.SignedDecision(problem))
		d.Logger.Warn("decision refused", slog.String("problem", problem), slog.String("remote", remote))
		answerJSON(w, status, decisionProblem{problem, message})
	}
	if r.URL.EscapedPath() != "/v1/decisions" || r.URL.RawQuery != "" {
		answerJSON(w, http.StatusNotFound, decisionProblem{"no_such_resource", "There is POST /v1/decisions only."})
		return
	}
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		answerJSON(w, http.StatusMethodNotAllowed, decisionProblem{"method", "There is POST /v1/decisions only."})
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, maxDecisionBytes))
	if err != nil {
		refuse(http.StatusRequestEntityTooLarge, "too_large", "A decision has at most 16 KiB.")
		return
	}
	id, unsigned := d.verify(r.Header, body)
	switch unsigned {
	case "":
	case "no_key":
		refuse(http.StatusServiceUnavailable, unsigned, "The key of decisions cannot be used now.")
		return
	default:
		// One status for all: who cannot sign learns nothing.
		refuse(http.StatusUnauthorized, unsigned, "The message is not signed with the key of this endpoint, or its timestamp is more than five minutes off.")
		return
	}
	var in DecisionMessage
	dec := json.NewDecoder(strings.NewReader(string(body)))
	dec.DisallowUnknownFields()
	action, perr := dispatch.ActionID{}, error(nil)
	if err = dec.Decode(&in); err == nil {
		if _, more := dec.Token(); !errors.Is(more, io.EOF) {
			err = errors.New("more than one value")
		}
		action, perr = dispatch.ParseActionID(in.InvocationID)
	}
	if err != nil || perr != nil || in.Fingerprint == "" || in.Verdict != dispatch.Approved && in.Verdict != dispatch.Denied {
		refuse(http.StatusBadRequest, "bad_decision", `Send {"invocation_id": "act_…", "fingerprint": "sha256:…", "verdict": "approved" or "denied", "by": "name", "reason": "…"}.`)
		return
	}
	problem, forget := d.remember(id)
	switch problem {
	case "":
	case "replayed":
		refuse(http.StatusConflict, problem, "A message of this id was taken already.")
		return
	default:
		refuse(http.StatusServiceUnavailable, problem, "Too many decisions came within ten minutes.")
		return
	}
	rec, err := d.Who.Decide(r.Context(), action, in.Fingerprint, dispatch.Decision{Verdict: in.Verdict, By: in.By, Via: "webhook", Reason: in.Reason})
	status, ans := decided(&rec, err)
	switch status {
	case http.StatusNotFound:
		ans = DecisionAnswer{Problem: "no_approval", Message: "No approval is known under this id."}
	case http.StatusInternalServerError:
		forget() // nothing is known to be decided: the same message may come again
		d.Logger.Error("decision not recorded", slog.String("action", action.String()), slog.Any("err", err))
		status, ans = http.StatusServiceUnavailable, DecisionAnswer{Problem: "not_recorded", Message: "The decision could not be recorded; send it again."}
	}
	answer := metrics.DecisionTaken
	if status != http.StatusOK {
		answer = metrics.SignedDecision(ans.Problem)
	}
	d.Metrics.SignedDecision(answer)
	answerJSON(w, status, ans)
}

// verify returns the id of a message that is signed with the key, and of now.
func (d *Decisions) verify(h http.Header, body []byte) (id, problem string) {
	one := func(name string) string {
		if v := h[name]; len(v) == 1 {
			return v[0]
		}
		return ""
	}
	id, stamp, signatures := one(WebhookID), one(WebhookTimestamp), one(WebhookSignature)
	if id == "" || len(id) > maxWebhookID || !visible(id) || stamp == "" || signatures == "" || len(signatures) > 1024 {
		return "", "unsigned"
	}
	key, err := d.Key()
	if err != nil {
		return "", "no_key"
	}
	want, match := webhookMAC(key, id, stamp, body), false
	for s := range strings.FieldsSeq(signatures) {
		text, ok := strings.CutPrefix(s, "v1,")
		got, err := base64.StdEncoding.DecodeString(text)
		if ok && err == nil && hmac.Equal(got, want) {
			match = true
		}
	}
	if !match && !control.Off("D4-decision-signed") {
		return "", "signature"
	}
	seconds, err := strconv.ParseInt(stamp, 10, 64)
	if age := d.now().Sub(time.Unix(seconds, 0)); err != nil || age > webhookWindow || age < -webhookWindow {
		return "", "timestamp"
	}
	return id, ""
}

func (d *Decisions) now() time.Time {
	if d.Now != nil {
		return d.Now()
	}
	return time.Now()
}

// remember takes an id, once. An approval is decided once whatever is forgotten here, at
// a restart for example: this tells a repeat from a decision.
func (d *Decisions) remember(id string) (problem string, forget func()) {
	now := d.now()
	d.mu.Lock()
	defer d.mu.Unlock()
	if _, twice := d.seen[id]; twice && !control.Off("D4-decision-replayed") {
		return "replayed", nil
	}
	if len(d.seen) >= maxRemembered {
		for k, at := range d.seen {
			if now.Sub(at) > 2*webhookWindow {
				delete(d.seen, k)
			}
		}
		if len(d.seen) >= maxRemembered {
			return "too_many", nil
		}
	}
	if d.seen == nil {
		d.seen = make(map[string]time.Time)
	}
	d.seen[id] = now
	return "", func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		delete(d.seen, id)
	}
}

func answerJSON(w http.ResponseWriter, status int, v any) {
	text, err := json.Marshal(v)
	if err != nil {
		status, text = http.StatusInternalServerError, []byte("{}")
	}
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_, _ = w.Write(append(text, '\n'))
}
