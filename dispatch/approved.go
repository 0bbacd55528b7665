package dispatch

import (
	"strings"
	"time"
	"unicode/utf8"

	"waybill/internal/control"
	"waybill/outcome"
)

// HeldRequest is the attempt number under which the journal keeps a request that waits
// for an approval, as Chunks: it belongs to no attempt.
const HeldRequest = 0

// Approval asks a person about one request (CONTRACT D3, D4, D5).
type Approval struct {
	// Fingerprint is that of everything that will be sent but the secret (D5). It is
	// another one than Bound.Fingerprint, which recognises repeats.
	Fingerprint string      `json:"fingerprint"`
	ExpiresAt   time.Time   `json:"expires_at"`
	Credential  *Credential `json:"credential,omitempty"`
	Held        Held        `json:"held"`
}

// Held counts the chunks of a held request. Its content is sealed, and removed when
// the approval was spent or the action has ended.
type Held struct {
	Chunks int    `json:"chunks"`
	Bytes  int64  `json:"bytes"`
	Digest string `json:"digest"` // of the request's body, "" without one
}

// Verdict is how an approval was decided. "" is undecided.
type Verdict string

// The verdicts.
const (
	Approved Verdict = "approved"
	Denied   Verdict = "denied"
	Expired  Verdict = "expired" // nobody decided in time
)

// Decision says who decided, how and when (CONTRACT D4). Event.At is when.
type Decision struct {
	Verdict Verdict `json:"verdict"`
	By      string  `json:"by"`               // the person's name as given; "waybill" for Expired
	Via     string  `json:"via"`              // "admin", "webhook", "clock"
	Reason  string  `json:"reason,omitempty"` // the person's words; the caller sees them
}

// Bounds of a decision's texts, in bytes.
const (
	maxDecider = 128
	maxReason  = 500
)

func (d *Decision) valid() bool {
	switch d.Verdict {
	case Approved, Denied, Expired:
	default:
		return false
	}
	return d.By != "" && len(d.By) <= maxDecider && len(d.Reason) <= maxReason && d.Via != "" && plainLine(d.By) && plainLine(d.Reason)
}

// plainLine reports whether s is text of one line that a terminal shows as it is.
func plainLine(s string) bool {
	return utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool {
		return r < ' ' || 0x7f <= r && r < 0xa0 || r == '\u2028' || r == '\u2029' || 0x202a <= r && r <= 0x202e || 0x2066 <= r && r <= 0x2069
	})
}

// ApprovalState is the projection of an approval.
type ApprovalState struct {
	Approval
	AskedAt   time.Time `json:"asked_at"`
	Decision  *Decision `json:"decision,omitempty"`
	DecidedAt time.Time `json:"decided_at,omitzero"`
	// Spent is the attempt that used it; 0: none. It is used once (D3).
	Spent int `json:"spent,omitempty"`
}

// AwaitsApproval reports whether a person was asked and nothing was sent yet: the
// action is open until it is decided, dispatched or expired, also across restarts.
func (r *Record) AwaitsApproval() bool {
	return r.Approval != nil && !r.Ended && !r.crossed()
}

// PendingApproval reports whether the decision is still to come.
func (r *Record) PendingApproval() bool { return r.AwaitsApproval() && r.Approval.Decision == nil }

// HeldChunks is how many chunks of the held request the journal still has to keep.
func (r *Record) HeldChunks() int {
	if !r.AwaitsApproval() {
		return 0
	}
	return r.Approval.Held.Chunks
}

func applyAsked(r *Record, ev *Event) error {
	a := ev.Approval
	switch {
	case a == nil || a.Fingerprint == "" || a.ExpiresAt.IsZero() || a.Held.Chunks < 1:
		return illegal(ev, "no approval")
	case r.Bound == nil || !r.Bound.Approval:
		return illegal(ev, "action is not bound, or needs no approval")
	case r.Approval != nil:
		return illegal(ev, "a person was asked already: a changed value is a new action (D2)")
	case r.Ended || r.Relaxed || r.Dispatched():
		return illegal(ev, "action ended or dispatched")
	}
	r.Approval = &ApprovalState{Approval: *a, AskedAt: ev.At}
	r.openFacts(outcome.CredentialInjection)
	return nil
}

func applyDecided(r *Record, ev *Event) error {
	switch {
	case ev.Decision == nil || !ev.Decision.valid():
		return illegal(ev, "no decision")
	case r.Approval == nil:
		return illegal(ev, "nobody was asked")
	case r.Approval.Decision != nil && !control.Off("D4-decided-once"):
		return illegal(ev, "it is decided already (D4)")
	case !r.AwaitsApproval():
		return illegal(ev, "action ended or dispatched")
	}
	next := *r.Approval
	next.Decision, next.DecidedAt = ev.Decision, ev.At
	r.Approval = &next
	return nil
}

// spend is the last guard of an approval, in the commit that makes the dispatch
// durable: whatever path leads here, without an approval of this very request, or with
// one that was used, nothing is dispatched (CONTRACT D3).
func (r *Record) spend(ev *Event) error {
	if !r.Bound.Approval || control.Off("D3-approval-spent-once") {
		return nil
	}
	a := r.Approval
	switch {
	case a == nil || a.Decision == nil || a.Decision.Verdict != Approved:
		return illegal(ev, "it is not approved (D3)")
	case a.Spent != 0 || r.crossed():
		return illegal(ev, "the approval was spent (D3)")
	case ev.Dispatch.Approved != a.Fingerprint:
		return illegal(ev, "the approval is of another request (D3)")
	case (a.Credential == nil) != (r.Credential == nil) || a.Credential != nil && !a.Credential.covers(r.Credential):
		return illegal(ev, "the approval is of another credential (D3)")
	}
	next := *a
	next.Spent = ev.Attempt
	r.Approval = &next
	return nil
}

// covers reports whether used is the approved credential, in the versions that were
// approved; used names the issues of short-lived tokens, too.
func (c *Credential) covers(used *Credential) bool {
	if c.ID != used.ID || c.Mode != used.Mode {
		return false
	}
	want, got := strings.Split(c.Version, ","), strings.Split(used.Version, ",")
	if len(want) != len(got) {
		return false
	}
	for i, v := range want {
		if got[i] != v && !strings.HasPrefix(got[i], v+"/") {
			return false
		}
	}
	return true
}

// ApprovalWord is one word for people and programs: "pending", "approved", "denied",
// "expired", "spent", or "closed" for a request that ended in another way.
func (r *Record) ApprovalWord() string {
	a := r.Approval
	switch {
	case a == nil:
		return ""
	case a.Spent != 0:
		return "spent"
	case a.Decision != nil && (a.Decision.Verdict != Approved || !r.Ended):
		return string(a.Decision.Verdict)
	case r.Ended:
		return "closed"
	}
	return "pending"
}

func (r *Record) approvalEvidence() *outcome.Approval {
	a := r.Approval
	if a == nil {
		return nil
	}
	out := &outcome.Approval{State: r.ApprovalWord(), Fingerprint: a.Fingerprint, ExpiresAt: a.ExpiresAt.UTC().Format(time.RFC3339)}
	if a.Decision != nil {
		out.Reason = a.Decision.Reason
	}
	return out
}
