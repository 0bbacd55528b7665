package dispatch

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/oklog/ulid/v2"

	"waybill/outcome"
)

// ActionID is the identity of one action, 16 bytes of a ULID. Its text form is
// "act_" + 26 characters. The zero value is no action.
type ActionID ulid.ULID

// ErrBadActionID is returned by ParseActionID.
var ErrBadActionID = errors.New("not an action id (act_ followed by 26 characters)")

// ParseActionID reads the text form. It returns ErrBadActionID.
func ParseActionID(s string) (ActionID, error) {
	body, ok := strings.CutPrefix(s, "act_")
	if !ok {
		return ActionID{}, ErrBadActionID
	}
	id, err := ulid.ParseStrict(body)
	if err != nil || id.String() != body {
		return ActionID{}, ErrBadActionID
	}
	return ActionID(id), nil
}

// String returns the text form.
func (id ActionID) String() string {
	const prefix = "act_"
	var b [len(prefix) + ulid.EncodedSize]byte
	copy(b[:], prefix)
	_ = ulid.ULID(id).MarshalTextTo(b[len(prefix):]) // its only error is a buffer of another size
	return string(b[:])
}

// IsZero reports whether id names no action.
func (id ActionID) IsZero() bool { return id == ActionID{} }

// MarshalText returns the text form.
func (id ActionID) MarshalText() ([]byte, error) { return []byte(id.String()), nil }

// UnmarshalText reads the text form.
func (id *ActionID) UnmarshalText(b []byte) error {
	v, err := ParseActionID(string(b))
	*id = v
	return err
}

// EventType names a transition (CONTRACT M1). The list is closed; zero is
// invalid; values are stored, so they are only ever appended.
type EventType uint8

// The events. Each has at most one detail field in Event, named beside it.
const (
	EventInvalid         EventType = iota
	ActionAccepted                 // Accepted
	PreflightValidated             // Bound
	CredentialAuthorized           // Credential
	AttemptFailed                  // Ended: a try that ended before the boundary (E7); the action goes on
	ActionRefused                  // Ended: the action ended before any boundary was crossed
	DispatchStarted                // Dispatch
	RequestSent                    // Sent
	ResponseStarted                // Response
	ResponseComplete               // Response
	ResultCommitted                // Ended + Result
	AttemptResolved                // Ended: after the boundary, without a stored result (unknown, or G8)
	AttemptInterrupted             // Ended: found open at start-up (M4)
	CallerGone                     // Ended.Reason: local cause, the attempt goes on (F5)
	DeliveryFailed                 // –
	ResultDelivered                // – (H6)
	TunnelOpened                   // Tunnel (V7)
	TunnelClosed                   // Tunnel
	Booted                         // Boot; belongs to no action
	SessionOpened                  // Session; belongs to no action (N4)
	SessionClosed                  // Session; belongs to no action
	LeaseTaken                     // Lease: a further attempt is about to be made (J1)
	LeaseRenewed                   // Lease
	LeaseEnded                     // Lease, Ended: it ended before the boundary; the action keeps what it had (A9)
	RetryStopped                   // Ended.Reason: no further attempt is made (J4, I5)
	Reconciled                     // Resolution: a query asked what became of the action (K6)
	Attested                       // Resolution: an operator says so (K5)
	EvidenceImported               // Resolution: from another journal (K4)
	JobRecorded                    // Job: the remote side does the work later (A7)
	JobPolled                      // Job: it is not done yet
	JobEnded                       // Job + Resolution: how it ended
	ItemsResolved                  // Items: what the answer says of each item of a batch (F7)
	UpgradeClosed                  // Tunnel: the bytes carried after a 101 (G4)
	ApprovalRequested              // Approval: a person is asked (D3, D4); nothing is sent before
	ApprovalDecided                // Decision
	eventTypes
)

var eventNames = [...]string{
	ActionAccepted: "ACTION_ACCEPTED", PreflightValidated: "PREFLIGHT_VALIDATED", CredentialAuthorized: "CREDENTIAL_AUTHORIZED",
	AttemptFailed: "ATTEMPT_FAILED", ActionRefused: "ACTION_REFUSED", DispatchStarted: "DISPATCH_STARTED", RequestSent: "REQUEST_SENT",
	ResponseStarted: "REMOTE_RESPONSE_STARTED", ResponseComplete: "REMOTE_RESPONSE_COMPLETE", ResultCommitted: "RESULT_COMMITTED",
	AttemptResolved: "ATTEMPT_RESOLVED", AttemptInterrupted: "ATTEMPT_INTERRUPTED", CallerGone: "CALLER_GONE",
	DeliveryFailed: "DELIVERY_FAILED", ResultDelivered: "RESULT_DELIVERED", TunnelOpened: "TUNNEL_OPENED", TunnelClosed: "TUNNEL_CLOSED",
	Booted: "BOOT", SessionOpened: "SESSION_OPENED", SessionClosed: "SESSION_CLOSED",
	LeaseTaken: "LEASE_TAKEN", LeaseRenewed: "LEASE_RENEWED", LeaseEnded: "LEASE_ENDED", RetryStopped: "RETRY_STOPPED",
	Reconciled: "RECONCILED", Attested: "ATTESTED", EvidenceImported: "EVIDENCE_IMPORTED",
	JobRecorded: "JOB_RECORDED", JobPolled: "JOB_POLLED", JobEnded: "JOB_ENDED", ItemsResolved: "ITEMS_RESOLVED",
	UpgradeClosed:     "UPGRADE_CLOSED",
	ApprovalRequested: "APPROVAL_REQUESTED", ApprovalDecided: "APPROVAL_DECIDED",
}

// EventTypes returns every valid event type.
func EventTypes() []EventType {
	out := make([]EventType, 0, int(eventTypes)-1)
	for t := EventInvalid + 1; t < eventTypes; t++ {
		out = append(out, t)
	}
	return out
}

// String returns the wire form, or "invalid(n)".
func (t EventType) String() string {
	if t > EventInvalid && t < eventTypes {
		return eventNames[t]
	}
	return fmt.Sprintf("invalid(%d)", uint8(t))
}

// MarshalText refuses an invalid type with outcome.ErrUnknownValue.
func (t EventType) MarshalText() ([]byte, error) {
	if t > EventInvalid && t < eventTypes {
		return []byte(eventNames[t]), nil
	}
	return nil, fmt.Errorf("dispatch: event type %d: %w", t, outcome.ErrUnknownValue)
}

// UnmarshalText refuses unknown text with outcome.ErrUnknownValue (CONTRACT A8).
func (t *EventType) UnmarshalText(b []byte) error {
	for i, n := range eventNames {
		if i > 0 && n == string(b) {
			*t = EventType(i)
			return nil
		}
	}
	return fmt.Errorf("dispatch: event type: %w", outcome.ErrUnknownValue)
}

// Event is one transition of one action. Sequence, chain and boot are the
// journal's; everything else is set by the pipeline. Times are for people,
// order comes from Seq (CONTRACT M3). It never holds secret material (C2),
// query values or header values.
type Event struct {
	Type    EventType `json:"type"`
	Attempt int       `json:"attempt,omitempty"` // from 1; 0: of the action as a whole
	At      time.Time `json:"at"`

	Accepted   *Accepted   `json:"accepted,omitempty"`
	Bound      *Bound      `json:"bound,omitempty"`
	Credential *Credential `json:"credential,omitempty"`
	Ended      *Ended      `json:"ended,omitempty"`
	Dispatch   *Dispatch   `json:"dispatch,omitempty"`
	Sent       *Sent       `json:"sent,omitempty"`
	Response   *Response   `json:"response,omitempty"`
	Result     *Result     `json:"result,omitempty"`
	Tunnel     *TunnelInfo `json:"tunnel,omitempty"`
	Boot       *Boot       `json:"boot,omitempty"`
	Session    *Session    `json:"session,omitempty"`
	Lease      *Lease      `json:"lease,omitempty"`
	Resolution *Resolution `json:"resolution,omitempty"`
	Job        *Job        `json:"job,omitempty"`
	Items      *Items      `json:"items,omitempty"`
	Approval   *Approval   `json:"approval,omitempty"`
	Decision   *Decision   `json:"decision,omitempty"`
}

// Accepted is what was asked for.
type Accepted struct {
	Caller    string `json:"caller"`               // caller id, never a token
	RequestID string `json:"request_id,omitempty"` // Waybill-Request-Id
	Method    string `json:"method,omitempty"`
	Target    string `json:"target,omitempty"` // scheme://host[:port]/path without query values
	Protocol  string `json:"protocol,omitempty"`
	// Relaxed says that this action's records are not waited for: it projects to
	// unknown from here on (F1).
	Relaxed bool `json:"relaxed,omitempty"`
	// Link is set for an action that Waybill started for another one.
	Link *Link `json:"link,omitempty"`
}

// Bound ties the action to one snapshot and one route (CONTRACT D1).
type Bound struct {
	Route       string `json:"route"`
	Snapshot    string `json:"snapshot"`
	Fingerprint string `json:"fingerprint"`
	Repeatable  bool   `json:"repeatable,omitempty"`
	BodyBytes   int64  `json:"body_bytes"`
	// Key is the idempotency key under a configured contract, nil without one (I2).
	Key *Key `json:"key,omitempty"`
	// Budget bounds repeats; nil: Waybill makes none by itself (J3).
	Budget *Budget `json:"budget,omitempty"`
	// Conditional is the precondition that the service enforces, as evidence (I7).
	Conditional string `json:"conditional,omitempty"`
	// Recall is what the route's follow-up needs of the request; nil: nothing.
	Recall *Recall `json:"recall,omitempty"`
	// Approval: nothing of this action is dispatched before a person approved it (D3);
	// Apply refuses it.
	Approval bool `json:"approval,omitempty"`
}

// Credential is what was decided about secrets, never a secret (CONTRACT C2).
type Credential struct {
	ID      string `json:"id"`
	Version string `json:"version,omitempty"`
	Mode    string `json:"mode"`
}

// Ended says how a try, an attempt or the action ended.
type Ended struct {
	outcome.Facts
	Stage  outcome.Stage `json:"stage,omitempty"`
	Reason string        `json:"reason,omitempty"` // fixed token
	Field  string        `json:"field,omitempty"`  // B2
	// Followed: the answer was a redirect within the origin that a further attempt
	// followed; then that one decides (R2).
	Followed bool `json:"followed,omitempty"`
	// Route is the one that was chosen, of an action that was refused before it was bound.
	Route string `json:"route,omitempty"`
	// Credential is the one that could not be used: for operators, never for callers (B3).
	Credential string `json:"credential,omitempty"`
	// EarlierAction names the action this one collided with.
	EarlierAction string         `json:"earlier_action,omitempty"`
	Peer          *outcome.Peer  `json:"peer,omitempty"`
	Source        outcome.Source `json:"source,omitempty"`
	Proof         string         `json:"proof,omitempty"`       // G8
	StatusLine    string         `json:"status_line,omitempty"` // of a malformed answer, capped
	// Hop is the proxy whose answer this was, with its status and Proxy-Status (G10).
	Hop         string `json:"hop,omitempty"`
	HopStatus   int    `json:"hop_status,omitempty"`
	ProxyStatus string `json:"proxy_status,omitempty"`
	// RetryAfter is the time that a complete answer gave (G5).
	RetryAfter time.Duration `json:"retry_after,omitempty"`
	// Speaks: the contract says that this refusal resolves the earlier attempts, too (A10).
	Speaks bool `json:"speaks,omitempty"`
}

type plainEnded Ended

// MarshalJSON leaves facts out that are wholly zero – those of CALLER_GONE are, since
// the attempt goes on – and refuses half-set ones (CONTRACT A8).
func (e Ended) MarshalJSON() ([]byte, error) {
	if e.Facts != (outcome.Facts{}) {
		return json.Marshal(plainEnded(e))
	}
	// The outer fields hide those of Facts, and are left out.
	return json.Marshal(struct {
		plainEnded
		Phase   *struct{} `json:"phase,omitempty"`
		Outcome *struct{} `json:"outcome,omitempty"`
		Retry   *struct{} `json:"retry,omitempty"`
		Code    *struct{} `json:"code,omitempty"`
	}{plainEnded: plainEnded(e)})
}

// Dispatch is the connection that carries the attempt.
type Dispatch struct {
	Connection string        `json:"connection"`
	Reused     bool          `json:"reused,omitempty"`
	Stage      outcome.Stage `json:"stage,omitempty"`
	Peer       *outcome.Peer `json:"peer,omitempty"`
	// Unresolved is the advice for as long as no answer resolves the attempt
	// ("by contract", I6).
	Unresolved outcome.Retry `json:"unresolved"`
	// Generation is that of the lease under which the attempt was made; 0 is 1 (J1).
	Generation int `json:"generation,omitempty"`
	// Until is the attempt's own deadline, up to which it keeps its lease (J5).
	Until time.Time `json:"until,omitzero"`
	// Credential is that of a further attempt: its version may have changed since.
	Credential *Credential `json:"credential,omitempty"`
	// Approved is the fingerprint of the approval that this attempt spends (D3, D5); "":
	// none was needed.
	Approved string `json:"approved,omitempty"`
}

// Sent are the request markers of CONTRACT F3.
type Sent struct {
	Headers  bool `json:"headers"`
	Complete bool `json:"complete"`
}

// Response describes the answer as far as it came. Header fields are not in it.
type Response struct {
	Status        int    `json:"status"`
	Bytes         int64  `json:"bytes,omitempty"`
	ExpectedBytes *int64 `json:"expected_bytes,omitempty"`
	Framing       string `json:"framing,omitempty"`
	Digest        string `json:"digest,omitempty"` // of the body as it came; masked, where a secret was in it (C2)
	// Redacted is the number of places at which a secret was masked (C5).
	Redacted    int    `json:"redacted,omitempty"`
	Hop         string `json:"hop,omitempty"`
	ProxyStatus string `json:"proxy_status,omitempty"`
	// Exec is what is known of a command's run; nil: an HTTP answer.
	Exec *ExecEnd `json:"exec,omitempty"`
}

// Result is the manifest of a stored result (CONTRACT H1, H4). Header holds the
// end-to-end fields that are relayed; it is stored sealed and never logged.
type Result struct {
	Status  int                 `json:"status"`
	Header  map[string][]string `json:"header,omitempty"`
	Trailer map[string][]string `json:"trailer,omitempty"`
	Bytes   int64               `json:"bytes"`
	Chunks  int                 `json:"chunks"`
	Digest  string              `json:"digest"` // "sha256:…" of the body as stored
	// RedirectTo is Record.RedirectKey, RedirectFrom the origin that redirected (R3).
	RedirectTo   string `json:"redirect_to,omitempty"`
	RedirectFrom string `json:"redirect_from,omitempty"`
	// ExpiresAt is when retention may drop the body; zero: never. Times are advisory (M3).
	ExpiresAt time.Time `json:"expires_at,omitzero"`
	// Exec is how the command ended; nil: an HTTP answer. The body is then its output, in
	// the form of OutputMediaType.
	Exec *ExecEnd `json:"exec,omitempty"`
}

// resultJSON is Result with the fields whose values are not UTF-8 beside it: obs-text
// (RFC 9110 section 5.5) is relayed as it came (G12), and JSON would replace it.
type resultJSON struct {
	plainResult
	HeaderRaw  map[string][][]byte `json:"header_raw,omitempty"`
	TrailerRaw map[string][][]byte `json:"trailer_raw,omitempty"`
}

type plainResult Result

// MarshalJSON keeps every byte of the field values.
func (r Result) MarshalJSON() ([]byte, error) {
	j := resultJSON{plainResult: plainResult(r)}
	j.Header, j.HeaderRaw = splitFields(r.Header)
	j.Trailer, j.TrailerRaw = splitFields(r.Trailer)
	return json.Marshal(j)
}

// UnmarshalJSON reads what MarshalJSON wrote.
func (r *Result) UnmarshalJSON(b []byte) error {
	var j resultJSON
	if err := json.Unmarshal(b, &j); err != nil {
		return err
	}
	*r = Result(j.plainResult)
	r.Header = joinFields(r.Header, j.HeaderRaw)
	r.Trailer = joinFields(r.Trailer, j.TrailerRaw)
	return nil
}

func splitFields(in map[string][]string) (text map[string][]string, raw map[string][][]byte) {
	for name, values := range in {
		if !slices.ContainsFunc(values, func(v string) bool { return !utf8.ValidString(v) }) {
			continue
		}
		if raw == nil {
			raw, text = make(map[string][][]byte), maps.Clone(in)
		}
		delete(text, name)
		for _, v := range values {
			raw[name] = append(raw[name], []byte(v))
		}
	}
	if raw == nil {
		return in, nil
	}
	return text, raw
}

func joinFields(text map[string][]string, raw map[string][][]byte) map[string][]string {
	if len(raw) > 0 && text == nil {
		text = make(map[string][]string, len(raw))
	}
	for name, values := range raw {
		text[name] = nil
		for _, v := range values {
			text[name] = append(text[name], string(v))
		}
	}
	return text
}

// TunnelInfo describes a blind tunnel (CONTRACT V7), or what was carried after an
// upgrade: it claims nothing about the origin.
type TunnelInfo struct {
	Authority string `json:"authority,omitempty"`
	BytesOut  int64  `json:"bytes_out,omitempty"`
	BytesIn   int64  `json:"bytes_in,omitempty"`
	// Redacted is the number of places at which a secret was masked (C5).
	Redacted int `json:"redacted,omitempty"`
	// Blocked: the connection was ended over it (leak: block).
	Blocked bool `json:"blocked,omitempty"`
}

// Boot marks a start of the process.
type Boot struct {
	ID      string `json:"id"`
	Build   string `json:"build"`
	Config  string `json:"config,omitempty"` // snapshot digest
	Version int    `json:"version"`          // of the journal format
}
