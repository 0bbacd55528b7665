package dispatch

import (
	"fmt"
	"net/http"
	"time"

	"waybill/internal/control"
	"waybill/outcome"
)

// Record is the projection of one action's events (CONTRACT M1, M2). It is a
// value: Apply returns a new one. The zero value is an action nobody knows.
type Record struct {
	ID         ActionID    `json:"id"`
	Caller     string      `json:"caller"`
	RequestID  string      `json:"request_id,omitempty"`
	Method     string      `json:"method,omitempty"`
	Target     string      `json:"target,omitempty"`
	Protocol   string      `json:"protocol,omitempty"`
	Relaxed    bool        `json:"relaxed,omitempty"`
	Bound      *Bound      `json:"bound,omitempty"`
	Credential *Credential `json:"credential,omitempty"`

	// Facts are the action's, projected from all attempts (A9) and the delivery (H2).
	Facts outcome.Facts `json:"facts"`
	// Ended is false while the action may still change by itself.
	Ended    bool      `json:"ended"`
	Attempts []Attempt `json:"attempts,omitempty"`

	// Refusal holds the details of an action that ended before any boundary.
	Refusal    *Ended      `json:"refusal,omitempty"`
	LocalCause string      `json:"local_cause,omitempty"` // F5
	Result     *Result     `json:"result,omitempty"`      // of the attempt that decides
	ResultOf   int         `json:"result_of,omitempty"`   // its attempt
	ResultSeq  uint64      `json:"result_seq,omitempty"`
	Failed     bool        `json:"delivery_failed,omitempty"` // H2
	Delivered  bool        `json:"delivered,omitempty"`       // H6
	Tunnel     *TunnelInfo `json:"tunnel,omitempty"`
	// Reopened: a further attempt was begun after the action had ended (A9, J1).
	Reopened bool `json:"reopened,omitempty"`

	// Generation is the highest lease that was handed out, 0 for none; Lease the one in
	// force (J1). Stopped says why no further attempt is made (J4).
	Generation int    `json:"generation,omitempty"`
	Lease      *Lease `json:"lease,omitempty"`
	Stopped    string `json:"stopped,omitempty"`
	// LatestAt is the latest time on record: windows are not judged by an earlier one.
	LatestAt time.Time `json:"latest_at,omitzero"`
	// Link is set for an action that Waybill started for another one.
	Link *Link `json:"link,omitempty"`
	// Resolutions are what others than the attempt's own answer proved of it (K3), without
	// the queries that proved nothing; Asked counts all queries.
	Resolutions []Resolution `json:"resolutions,omitempty"`
	Asked       int          `json:"asked,omitempty"`
	AskedAt     time.Time    `json:"asked_at,omitzero"`
	// Job is the work that the remote side accepted (A7): of the action that was
	// accepted, and of the one that follows it.
	Job *Job `json:"job,omitempty"`
	// Items are the children of a batch that its answer resolved (F7).
	Items    *Items      `json:"items,omitempty"`
	Upgraded *TunnelInfo `json:"upgraded,omitempty"` // what was carried after a 101
	// Approval is set when a person was asked (D3, D4).
	Approval *ApprovalState `json:"approval,omitempty"`

	AcceptedAt time.Time `json:"accepted_at"`
	EndedAt    time.Time `json:"ended_at,omitzero"`
	FirstSeq   uint64    `json:"first_seq"`
	LastSeq    uint64    `json:"last_seq"`
	Events     int       `json:"events"`
}

// Attempt is the projection of one try (CONTRACT A9, E7).
type Attempt struct {
	N           int           `json:"n"`
	Facts       outcome.Facts `json:"facts"`
	Stage       outcome.Stage `json:"stage,omitempty"`
	Ended       bool          `json:"ended"`
	Dispatch    *Dispatch     `json:"dispatch,omitempty"`
	DispatchSeq uint64        `json:"dispatch_seq,omitempty"` // 0: the boundary was not crossed
	Sent        Sent          `json:"sent,omitzero"`
	Response    *Response     `json:"response,omitempty"`
	Complete    bool          `json:"complete,omitempty"` // REMOTE_RESPONSE_COMPLETE is on record
	End         *Ended        `json:"end,omitempty"`
	Recovered   bool          `json:"recovered,omitempty"`
}

// Dispatched reports whether any attempt crossed the boundary, or may have
// without leaving a record (F1, relaxed).
func (r *Record) Dispatched() bool {
	return r.Relaxed || r.Tunnel != nil || r.follows() || r.crossed()
}

// crossed reports whether a DISPATCH_STARTED is on record.
func (r *Record) crossed() bool {
	for i := range r.Attempts {
		if r.Attempts[i].DispatchSeq != 0 {
			return true
		}
	}
	return false
}

// running returns the attempt that has crossed the boundary and not ended, or nil.
func (r *Record) running() *Attempt {
	for i := range r.Attempts {
		if !r.Attempts[i].Ended {
			return &r.Attempts[i]
		}
	}
	return nil
}

// following reports whether the last attempt was answered by a redirect that the next
// one follows (R2): the action had not really ended.
func (r *Record) following() bool {
	n := len(r.Attempts)
	return n > 0 && r.Attempts[n-1].End != nil && r.Attempts[n-1].End.Followed
}

// Unresolved reports whether the action ended with an unknown outcome that later
// evidence may still resolve (K2). A blind tunnel's never is (V7).
func (r *Record) Unresolved() bool {
	return r.Ended && r.Facts.Outcome == outcome.Unknown && r.Tunnel == nil && !r.Pending()
}

// Doubtful reports whether something may still be found out about it: it is unresolved,
// follows a job that has not ended, or was answered with a complete 5xx. The journal has an
// index of these actions.
func (r *Record) Doubtful() bool { return r.Unresolved() || r.Pending() || r.Ended && r.AskMore() }

// Repeatable reports whether the operation was declared or is known to be safe to repeat (G6).
func (r *Record) Repeatable() bool { return r.Bound != nil && r.Bound.Repeatable }

// GuardsRepeats reports whether an equal submission by the same caller is a
// suspected duplicate of this action (CONTRACT O3): ended, not repeatable, and
// unresolved – or a complete 5xx.
func (r *Record) GuardsRepeats() bool {
	if !r.Ended || r.Repeatable() || r.Bound == nil || r.Bound.Fingerprint == "" {
		return false
	}
	if r.Settled() {
		return false
	}
	f := r.resolved()
	if r.itemsOpen() {
		return true
	}
	if a := r.Deciding(); f.Code == outcome.CodeResultContainsSecret && a != nil && a.Response != nil && a.Response.Status >= 500 {
		return true
	}
	if f.Code == outcome.CodeRemoteError && r.Protocol == ProtocolSSH {
		return false // O3 speaks of a 5xx: a command that failed may be run again
	}
	return f.Outcome == outcome.Unknown || f.Code == outcome.CodeRemoteError || f.Code == outcome.CodeResultStoreFailed
}

// attempt returns attempt n, or nil.
func (r *Record) attempt(n int) *Attempt {
	for i := range r.Attempts {
		if r.Attempts[i].N == n {
			return &r.Attempts[i]
		}
	}
	return nil
}

// switched reports whether the action ended with a 101.
func (r *Record) switched() bool {
	a := r.Deciding()
	return r.Ended && a != nil && a.Response != nil && a.Response.Status == http.StatusSwitchingProtocols
}

// Deciding returns the attempt whose facts are the action's, or nil when none was started.
func (r *Record) Deciding() *Attempt {
	var best *Attempt
	for i := range r.Attempts {
		a := &r.Attempts[i]
		if a.End != nil && a.End.Followed && !a.carriedOut() && r.dispatchedAfter(i) || r.spokenFor(i) {
			continue
		}
		if best == nil || weight(a.Facts.Outcome) > weight(best.Facts.Outcome) ||
			weight(a.Facts.Outcome) == weight(best.Facts.Outcome) && a.Facts.Outcome != outcome.Unknown {
			best = a
		}
	}
	return best
}

// carriedOut reports whether a redirect that was followed with another method ended the attempt:
// the next one does not make its request again (R1).
func (a *Attempt) carriedOut() bool { return a.Facts.Code == outcome.CodeResultNotRetained }

// spokenFor reports whether a later attempt's refusal resolves the i-th (A10).
func (r *Record) spokenFor(i int) bool {
	if r.Attempts[i].Facts.Outcome != outcome.Unknown {
		return false
	}
	for _, a := range r.Attempts[i+1:] {
		if a.Facts.Outcome == outcome.Rejected && a.End != nil && a.End.Speaks {
			return true
		}
	}
	return false
}

// dispatchedAfter reports whether an attempt after the i-th crossed the boundary.
func (r *Record) dispatchedAfter(i int) bool {
	for _, a := range r.Attempts[i+1:] {
		if a.DispatchSeq != 0 {
			return true
		}
	}
	return false
}

// weight orders outcomes by what they say of the whole action (CONTRACT A9, A10):
// a committed attempt decides; else an unresolved one; else the last refusal; and
// a try that never crossed the boundary decides only if none did.
func weight(o outcome.Outcome) int {
	switch o {
	case outcome.Committed:
		return 4
	case outcome.Unknown:
		return 3
	case outcome.Rejected:
		return 2
	case outcome.NotAttempted:
		return 1
	case outcome.OutcomeInvalid:
		return 0
	default:
		return 0
	}
}

// resolved returns the facts without the delivery on top.
func (r *Record) resolved() outcome.Facts { return r.settle(r.observed()) }

// observed are the facts as the attempts themselves left them.
func (r *Record) observed() outcome.Facts {
	if r.Refusal != nil && !r.Dispatched() {
		return r.Refusal.Facts
	}
	// A try that never crossed the boundary says nothing about a tunnel or a relaxed
	// action, which may have (F1, F2, V7).
	if a := r.Deciding(); a != nil && (a.Facts.Outcome != outcome.NotAttempted || !r.Dispatched()) {
		return a.Facts
	}
	return r.Facts
}

// unresolvedFacts are those of an attempt that crossed the boundary and has no answer yet.
func unresolvedFacts(advice outcome.Retry) outcome.Facts {
	if advice != outcome.Backoff && advice != outcome.SameIdempotencyKey {
		advice = outcome.Reconcile
	}
	return outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: advice, Code: outcome.CodeRemoteOutcomeUnknown}
}

// Apply is the projection: a pure and total function from a record and an event
// to the next record (CONTRACT M1, M2). Live code, recovery and the verifier all
// use it. An event that is impossible in that state – in the first place
// anything that would turn a crossed boundary back into not_attempted (F2, K2) –
// is refused with ErrIllegalTransition and the record is returned unchanged.
//
// What it took once it must take for ever, with the same outcome: most records are made
// from their events each time they are read (journal/FORMAT.md).
func Apply(r Record, ev *Event, seq uint64) (Record, error) {
	next := r
	next.Attempts = append([]Attempt(nil), r.Attempts...)
	if err := next.take(ev, seq); err != nil {
		return r, err
	}
	return next, nil
}

// ApplyAll is Apply of several events, of which the first has the sequence number first:
// all of them, or none.
func ApplyAll(r Record, events []Event, first uint64) (Record, error) {
	next := r
	next.Attempts = append([]Attempt(nil), r.Attempts...) // the records in between are nobody's
	for i := range events {
		if err := next.take(&events[i], first+uint64(i)); err != nil {
			return r, err
		}
	}
	return next, nil
}

// take changes a record whose attempts nobody else has. After an error it is of no use.
func (r *Record) take(ev *Event, seq uint64) error {
	if err := apply(r, ev, seq); err != nil {
		return err
	}
	if r.FirstSeq == 0 {
		r.FirstSeq = seq
	}
	if ev.At.After(r.LatestAt) {
		r.LatestAt = ev.At
	}
	r.LastSeq = seq
	r.Events++
	return nil
}

func illegal(ev *Event, why string) error {
	return fmt.Errorf("%s: %s: %w", ev.Type, why, ErrIllegalTransition)
}

func apply(r *Record, ev *Event, seq uint64) error {
	known := r.Events > 0
	if !known && ev.Type != ActionAccepted && ev.Type != AttemptInterrupted {
		return illegal(ev, "first event of an action")
	}
	if r.Tunnel != nil && ev.Type != TunnelClosed && ev.Type != AttemptInterrupted {
		return illegal(ev, "a tunnel has no attempts (V7)")
	}
	if r.follows() && !ofFollower(ev.Type) {
		return illegal(ev, "an action that follows a job has no attempts (A7)")
	}
	switch ev.Type {
	case ActionAccepted:
		return applyAccepted(r, ev, known)
	case PreflightValidated:
		if ev.Bound == nil || r.Bound != nil || r.Ended || r.Dispatched() && !r.Relaxed {
			return illegal(ev, "action is bound, ended or dispatched")
		}
		r.Bound = ev.Bound
		r.openFacts(outcome.CredentialInjection)
		return nil
	case CredentialAuthorized:
		if ev.Credential == nil || r.Bound == nil || r.Ended || r.crossed() {
			// After the boundary it would turn the facts back to not_attempted (F2).
			return illegal(ev, "action is not bound, ended or dispatched")
		}
		r.Credential = ev.Credential
		r.openFacts(outcome.ConnectionSetup)
		return nil
	case AttemptFailed:
		return applyFailed(r, ev)
	case ActionRefused:
		return applyRefused(r, ev)
	case DispatchStarted:
		return applyDispatch(r, ev, seq)
	case RequestSent, ResponseStarted, ResponseComplete:
		return applyMarker(r, ev)
	case ResultCommitted, AttemptResolved:
		return applyResolved(r, ev, seq)
	case AttemptInterrupted:
		return applyInterrupted(r, ev, seq, known)
	case CallerGone:
		if ev.Ended == nil || ev.Ended.Reason == "" {
			return illegal(ev, "no local cause")
		}
		r.LocalCause = ev.Ended.Reason
		return nil
	case DeliveryFailed:
		if r.Result == nil || !r.Ended {
			return illegal(ev, "no result to deliver")
		}
		if !r.Delivered {
			r.Failed = true
		}
		r.project()
		return nil
	case ResultDelivered:
		if r.Result == nil || !r.Ended {
			return illegal(ev, "no result to deliver")
		}
		r.Delivered, r.Failed = true, false
		r.project()
		return nil
	case TunnelOpened, TunnelClosed:
		return applyTunnel(r, ev)
	case UpgradeClosed:
		if ev.Tunnel == nil || r.Upgraded != nil || !r.switched() {
			return illegal(ev, "no connection was upgraded")
		}
		r.Upgraded = ev.Tunnel
		return nil
	case LeaseTaken, LeaseRenewed, LeaseEnded:
		return applyLease(r, ev)
	case RetryStopped:
		return applyStopped(r, ev)
	case Reconciled, Attested, EvidenceImported:
		return applyEvidence(r, ev, seq)
	case JobRecorded, JobPolled, JobEnded:
		return applyJob(r, ev, seq)
	case ItemsResolved:
		return applyItems(r, ev)
	case ApprovalRequested:
		return applyAsked(r, ev)
	case ApprovalDecided:
		return applyDecided(r, ev)
	case Booted, SessionOpened, SessionClosed, EventInvalid, eventTypes:
		return illegal(ev, "not an event of an action")
	default:
		return illegal(ev, "unknown event")
	}
}

func applyAccepted(r *Record, ev *Event, known bool) error {
	if known || ev.Accepted == nil {
		return illegal(ev, "action exists")
	}
	a := ev.Accepted
	r.Link = a.Link
	r.Caller, r.RequestID, r.Method, r.Target, r.Protocol, r.Relaxed = a.Caller, a.RequestID, a.Method, a.Target, a.Protocol, a.Relaxed
	r.AcceptedAt = ev.At
	r.openFacts(outcome.Validation)
	return nil
}

// openFacts are those of an action that has not been dispatched yet: provably
// not attempted (M2), unless it is relaxed (F1).
func (r *Record) openFacts(phase outcome.Phase) {
	if r.follows() {
		r.Facts = unresolvedFacts(outcome.Reconcile)
		return
	}
	if r.Relaxed {
		// Relaxed needs a repeatable route, so the advice is to back off and repeat.
		r.Facts = unresolvedFacts(outcome.Backoff)
		return
	}
	r.Facts = outcome.Facts{Phase: phase, Outcome: outcome.NotAttempted, Retry: outcome.FetchResult}
}

func applyFailed(r *Record, ev *Event) error {
	if ev.Ended == nil || ev.Attempt < 1 || r.Bound == nil {
		return illegal(ev, "no attempt")
	}
	if ev.Ended.Outcome != outcome.NotAttempted {
		return illegal(ev, "a try that ended before the boundary is not_attempted")
	}
	if r.attempt(ev.Attempt) != nil {
		return illegal(ev, "attempt exists")
	}
	if r.Ended && !r.Dispatched() && r.Lease == nil {
		return illegal(ev, "action ended")
	}
	r.Attempts = append(r.Attempts, Attempt{N: ev.Attempt, Facts: ev.Ended.Facts, Stage: ev.Ended.Stage, Ended: true, End: ev.Ended})
	return nil
}

func applyRefused(r *Record, ev *Event) error {
	switch {
	case ev.Ended == nil || ev.Ended.Outcome != outcome.NotAttempted:
		return illegal(ev, "a refusal is not_attempted")
	case r.Tunnel != nil || r.crossed():
		return illegal(ev, "the boundary was crossed (F2)")
	case r.Ended:
		return illegal(ev, "action ended")
	}
	r.Refusal = ev.Ended
	if !r.Relaxed {
		// A relaxed action stays unknown on record, whatever its process knew (F1).
		r.Facts = ev.Ended.Facts
	}
	r.Ended, r.EndedAt = true, ev.At
	return nil
}

func applyDispatch(r *Record, ev *Event, seq uint64) error {
	switch {
	case ev.Dispatch == nil || ev.Attempt < 1:
		return illegal(ev, "no attempt")
	case r.Bound == nil:
		return illegal(ev, "action is not bound (D1)")
	case r.Refusal != nil && r.Lease == nil:
		return illegal(ev, "action was refused: an answer not_attempted may have been given")
	}
	// First of all: who was overtaken counts attempts that are another's by now (J2).
	if err := r.checkGeneration(ev); err != nil {
		return err
	}
	switch {
	case r.attempt(ev.Attempt) != nil:
		return illegal(ev, "one attempt is one hand-over (F6)")
	case r.Ended && r.knownDone():
		return fmt.Errorf("%s: later evidence says that it is done: %w", ev.Type, ErrRetryRefused)
	case r.Ended && !r.following() && r.Lease != nil && r.repeatOver(ev.At) != nil:
		return fmt.Errorf("%s: %w", ev.Type, r.repeatOver(ev.At))
	case r.running() != nil:
		return illegal(ev, "another attempt is active (J1)")
	}
	if r.Ended && !r.following() {
		r.Reopened = true
	}
	if l := r.Lease; l != nil && ev.Dispatch.Until.After(l.Until) {
		held := *l
		held.Until = ev.Dispatch.Until // J5
		r.Lease = &held
	}
	if err := r.spend(ev); err != nil {
		return err
	}
	r.Attempts = append(r.Attempts, Attempt{N: ev.Attempt, Facts: unresolvedFacts(ev.Dispatch.Unresolved), Stage: ev.Dispatch.Stage, Dispatch: ev.Dispatch, DispatchSeq: seq})
	r.Ended, r.EndedAt = false, time.Time{}
	r.project()
	return nil
}

func applyMarker(r *Record, ev *Event) error {
	a := r.attempt(ev.Attempt)
	if a == nil || a.DispatchSeq == 0 {
		return illegal(ev, "attempt was not dispatched")
	}
	if ev.Type == RequestSent {
		if ev.Sent == nil {
			return illegal(ev, "no markers")
		}
		a.Sent = *ev.Sent
		return nil
	}
	if ev.Response == nil || a.Complete {
		return illegal(ev, "no response, or complete already")
	}
	a.Response = ev.Response
	a.Complete = ev.Type == ResponseComplete
	return nil
}

func applyResolved(r *Record, ev *Event, seq uint64) error {
	a := r.attempt(ev.Attempt)
	switch {
	case a == nil || a.DispatchSeq == 0:
		return illegal(ev, "attempt was not dispatched")
	case ev.Ended == nil || ev.Ended.Outcome == outcome.OutcomeInvalid:
		return illegal(ev, "no facts")
	case ev.Ended.Outcome == outcome.NotAttempted && !control.Off("F2-never-not-attempted-again"):
		return illegal(ev, "the boundary was crossed (F2)")
	case a.Ended && a.Facts.Outcome != outcome.Unknown:
		return illegal(ev, "attempt is resolved (K2)")
	case ev.Type == ResultCommitted && (ev.Result == nil || !a.Complete && !control.Off("G1-committed-needs-completeness")):
		return illegal(ev, "no complete response (G1, H1)")
	case ev.Type == ResultCommitted && r.ResultOf == ev.Attempt:
		return illegal(ev, "the attempt's result is on record (H7)")
	case ev.Type == AttemptResolved && ev.Ended.Outcome == outcome.Committed && !a.Complete:
		return illegal(ev, "committed without a complete response (G1)")
	}
	a.Facts, a.End, a.Ended = ev.Ended.Facts, ev.Ended, true
	r.settleLease(a)
	if ev.Type == ResultCommitted && r.Deciding() == a {
		r.Result, r.ResultOf, r.ResultSeq = ev.Result, ev.Attempt, seq
		r.Failed, r.Delivered = false, false
	}
	if r.running() == nil {
		// Late evidence about an earlier attempt does not end a running one (J5).
		r.Ended, r.EndedAt = true, ev.At
	}
	r.project()
	return nil
}

func applyInterrupted(r *Record, ev *Event, seq uint64, known bool) error {
	if ev.Ended == nil {
		return illegal(ev, "no facts")
	}
	if !known {
		// The witness names an action whose records were lost (M5): all that can be
		// said is that it may have been dispatched.
		if ev.Ended.Outcome != outcome.Unknown || ev.Attempt < 1 {
			return illegal(ev, "a lost action is unknown")
		}
		r.AcceptedAt = ev.At
		r.lose(ev, seq)
		return nil
	}
	if ev.Ended.Reason == reasonRollback {
		// As above, of an action whose earlier records are there: without it, a lost
		// DISPATCH_STARTED would leave it provably not attempted.
		if ev.Ended.Outcome != outcome.Unknown || ev.Attempt < 1 || r.attempt(ev.Attempt) != nil {
			return illegal(ev, "a lost attempt is unknown, and not on record")
		}
		r.lose(ev, seq)
		return nil
	}
	if r.Ended {
		return illegal(ev, "action ended")
	}
	if r.Dispatched() != (ev.Ended.Outcome == outcome.Unknown) || !r.Dispatched() && ev.Ended.Outcome != outcome.NotAttempted {
		return illegal(ev, "an interrupted action is unknown once dispatched, not_attempted before (M2)")
	}
	for i := range r.Attempts {
		a := &r.Attempts[i]
		if !a.Ended {
			a.Facts, a.End, a.Ended, a.Recovered = ev.Ended.Facts, ev.Ended, true, true
			r.settleLease(a)
		}
	}
	if !r.Dispatched() || r.Relaxed && r.Deciding() == nil {
		r.Refusal = ev.Ended
		r.Facts = ev.Ended.Facts
	}
	r.Ended, r.EndedAt = true, ev.At
	r.project()
	return nil
}

// lose records an attempt that only the witness names. Its own sequence stands for
// that of the lost DISPATCH_STARTED: not zero, so the boundary counts as crossed.
func (r *Record) lose(ev *Event, seq uint64) {
	r.Attempts = append(r.Attempts, Attempt{N: ev.Attempt, DispatchSeq: seq, Facts: ev.Ended.Facts, End: ev.Ended, Ended: true, Recovered: true})
	if r.running() == nil {
		r.Ended, r.EndedAt = true, ev.At
	}
	r.project()
}

func applyTunnel(r *Record, ev *Event) error {
	if ev.Tunnel == nil || (ev.Type == TunnelOpened) != (r.Tunnel == nil) || r.Ended || r.crossed() {
		return illegal(ev, "no tunnel, or out of order")
	}
	r.Tunnel = ev.Tunnel
	// What passes through a blind tunnel is not seen: unknown for ever (V7).
	r.Facts = unresolvedFacts(outcome.Reconcile)
	if ev.Type == TunnelClosed {
		r.Ended, r.EndedAt = true, ev.At
	}
	return nil
}

// project sets the action's facts from its attempts and its delivery.
func (r *Record) project() {
	if r.Result != nil {
		// The result of an attempt that no longer decides is not the action's: an
		// earlier refusal's body must not stand for a later unknown (A10, H10).
		if a := r.Deciding(); a == nil || a.N != r.ResultOf {
			r.Result, r.ResultOf, r.ResultSeq, r.Failed, r.Delivered = nil, 0, 0, false, false
		}
	}
	f := r.resolved()
	// A stored answer that resolves nothing (REMOTE_GATEWAY) keeps its facts: the
	// advice for what is unknown outweighs the one to fetch it.
	if r.Failed && !r.Delivered && r.Result != nil && f.Outcome != outcome.Unknown {
		f.Phase, f.Retry, f.Code = outcome.ResultDelivery, outcome.FetchResult, outcome.CodeDeliveryFailed
	}
	r.Facts = r.advise(f)
}

// Interrupt returns the event that closes an action found open at start-up
// (CONTRACT M4), or false when it is not open. It is pure; now is for people.
func Interrupt(r *Record, now time.Time) (Event, bool) {
	if r.Ended || r.AwaitsApproval() {
		// An approval survives a restart, and with it the request it is about (D4).
		return Event{}, false
	}
	end := &Ended{Source: outcome.TransportObserved, Reason: "process_ended"}
	ev := Event{Type: AttemptInterrupted, At: now, Ended: end}
	if !r.Dispatched() || control.Off("M2-open-and-dispatched-is-unknown") {
		end.Facts = outcome.Facts{Phase: r.Facts.Phase, Outcome: outcome.NotAttempted, Retry: outcome.Never, Code: outcome.CodeInternal}
		return ev, true
	}
	end.Facts = unresolvedFacts(outcome.Reconcile)
	if r.Relaxed {
		end.Facts = unresolvedFacts(outcome.Backoff)
	}
	a := r.running()
	if a == nil {
		a = r.Deciding()
	}
	if a != nil {
		ev.Attempt = a.N
		if a.Dispatch != nil {
			end.Facts = unresolvedFacts(a.Dispatch.Unresolved)
		}
		if a.Response != nil {
			end.Facts.Code = outcome.CodeRemoteResultIncomplete
		}
	}
	return ev, true
}

// reasonRollback marks the events of LostAction.
const reasonRollback = "journal_rollback"

// LostAction returns the event for an action that only the witness names (M5).
func LostAction(attempt int, now time.Time) Event {
	f := unresolvedFacts(outcome.Reconcile)
	return Event{Type: AttemptInterrupted, Attempt: max(attempt, 1), At: now, Ended: &Ended{Facts: f, Source: outcome.TransportObserved, Reason: reasonRollback}}
}
