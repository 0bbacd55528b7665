package e2e

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// signature is the Standard Webhooks form, written anew: id.timestamp.body.
func signature(key, id, stamp string, body []byte) string {
	mac := hmac.New(sha256.New, []byte(key))
	fmt.Fprintf(mac, "%s.%s.%s", id, stamp, body)
	return "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
}

// An endpoint is told of an approval, signed and again after a failure, and holds nobody
// up; a signed answer decides that one request, once (CONTRACT D3, D4).
func TestApprovalWebhook(t *testing.T) {
	contract.Covers(t, "D3", "D4", "C2")
	type hook struct {
		head http.Header
		body []byte
	}
	told, release := make(chan hook, 8), make(chan struct{})
	tries := 0
	endpoint := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		<-release // until the caller has its answer
		if tries++; tries == 1 {
			w.WriteHeader(http.StatusInternalServerError)
		}
		told <- hook{r.Header.Clone(), body}
	}))
	t.Cleanup(endpoint.Close)
	free, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	addr := free.Addr().String()
	_ = free.Close()

	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(askHost), Handler: func(testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Reply(201, "made")}
	}})
	outKey, inKey := testkit.NewCanary(t), testkit.NewCanary(t)
	r := newRig(t, ca, rigOptions{
		top: fmt.Sprintf("  out: {from: {file: out}}\n  in: {from: {file: in}}\napprovals:\n  notify: {url: %q, key: out}\n  decisions: {listen: %q, key: in}\n", endpoint.URL+"/hook", addr),
		routes: fmt.Sprintf("  - name: ask\n    match: {host: %s}\n    inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: pay}]\n    upstream: {roots: roots.pem, resolve: {%s: %q}}\n    approval: {hold: 50ms}\n",
			askHost, askHost, up.Addr()),
	})
	r.write("out", outKey.Value())
	r.write("in", inKey.Value())
	r.start()
	id := r.ask(askHost, "/v1/one?card=4242")
	close(release)
	first, second := <-told, <-told
	if first.head.Get("Webhook-Id") != second.head.Get("Webhook-Id") || !bytes.Equal(first.body, second.body) {
		t.Errorf("a repeat is another message: %s %s", first.body, second.body)
	}
	if got := second.head.Get("Webhook-Signature"); got != signature(outKey.Value(), second.head.Get("Webhook-Id"), second.head.Get("Webhook-Timestamp"), second.body) {
		t.Errorf("signature %s", got)
	}
	var msg struct {
		Type string
		Data dispatch.ApprovalView
	}
	if err := json.Unmarshal(second.body, &msg); err != nil || msg.Type != "approval.requested" || msg.Data.InvocationID != id || msg.Data.Fingerprint == "" || strings.Contains(string(second.body), "4242") {
		t.Fatalf("%v %s", err, second.body)
	}

	decide := func(hookID string, at time.Time, key, fingerprint, verdict string) (int, string) {
		t.Helper()
		body, err := json.Marshal(map[string]string{"invocation_id": id, "fingerprint": fingerprint, "verdict": verdict, "by": "alice in chat", "reason": "ticket 7"})
		if err != nil {
			t.Fatal(err)
		}
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "http://"+addr+"/v1/decisions", bytes.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		stamp := strconv.FormatInt(at.Unix(), 10)
		req.Header.Set("Webhook-Id", hookID)
		req.Header.Set("Webhook-Timestamp", stamp)
		if key != "" {
			req.Header.Set("Webhook-Signature", "v1,AAAA "+signature(key, hookID, stamp, body))
		}
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		text, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(text)
	}
	now, mark := time.Now(), msg.Data.Fingerprint
	for i, c := range []struct {
		id, key, print, verdict string
		at                      time.Time
		status                  int
		problem                 string
	}{
		{"m1", "", mark, "approved", now, 401, "unsigned"},
		{"m1", outKey.Value(), mark, "approved", now, 401, "signature"},
		{"m1", inKey.Value(), mark, "approved", now.Add(-6 * time.Minute), 401, "timestamp"},
		{"m1", inKey.Value(), mark, "approved", now.Add(6 * time.Minute), 401, "timestamp"},
		{"m1", inKey.Value(), "", "approved", now, 400, "bad_decision"},
		{"m1", inKey.Value(), mark, "expired", now, 400, "bad_decision"},
		{"m2", inKey.Value(), "sha256:00", "approved", now, 409, "other_request"},
	} {
		if status, text := decide(c.id, c.at, c.key, c.print, c.verdict); status != c.status || !strings.Contains(text, `"`+c.problem+`"`) {
			t.Errorf("%d: %d %s", i, status, text)
		}
	}
	r.waiting(1)
	if got := len(up.Arrivals()); got != 0 {
		t.Fatalf("%d arrived undecided", got)
	}
	if status, text := decide("m3", now, inKey.Value(), mark, "approved"); status != 200 || !strings.Contains(text, `"by":"alice in chat"`) || !strings.Contains(text, `"via":"webhook"`) {
		t.Fatalf("%d %s", status, text)
	}
	if v := r.settled(id); v.Outcome != "committed" || v.Attempts != 1 {
		t.Errorf("%+v", v)
	}
	if status, text := decide("m3", now, inKey.Value(), mark, "approved"); status != 409 || !strings.Contains(text, `"replayed"`) {
		t.Errorf("a replay: %d %s", status, text)
	}
	if status, text := decide("m4", now, inKey.Value(), mark, "denied"); status != 409 || !strings.Contains(text, `"closed"`) {
		t.Errorf("a second decision: %d %s", status, text)
	}
	if got := len(up.Arrivals()); got != 1 {
		t.Errorf("%d arrived", got)
	}
	metrics := get(t, r.meters)
	for _, want := range []string{`webhook_deliveries_total{delivery="failed"} 1`, `webhook_deliveries_total{delivery="delivered"} 1`, `webhook_deliveries_total{delivery="given_up"} 0`,
		`webhook_decisions_total{answer="taken"} 1`, `webhook_decisions_total{answer="unsigned"} 1`, `webhook_decisions_total{answer="signature"} 1`, `webhook_decisions_total{answer="timestamp"} 2`,
		`webhook_decisions_total{answer="bad_decision"} 2`, `webhook_decisions_total{answer="other_request"} 1`, `webhook_decisions_total{answer="replayed"} 1`, `webhook_decisions_total{answer="closed"} 1`} {
		if !strings.Contains(metrics, "\nwaybill_approval_"+want+"\n") {
			t.Errorf("the metrics do not say %s", want)
		}
	}
	r.kill()
	r.verify()
	for _, c := range []*testkit.Canary{r.canary, outKey, inKey} {
		testkit.Search(t, c, testkit.InString("log", r.logs.String()), testkit.InBytes("webhook", second.body), testkit.In(r.data))
	}
}
