package dispatch

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"waybill/internal/control"
	"waybill/outcome"
)

// Why a further attempt is refused. All wrap ErrIllegalTransition: the journal finds them
// in the transaction that would have written the event, and nothing is written.
var (
	// ErrLeaseHeld: another attempt of the action is active or about to be (CONTRACT J1).
	ErrLeaseHeld = fmt.Errorf("%w: lease is held", ErrIllegalTransition)
	// ErrLeaseLost: the worker's generation was overtaken, or its lease ran out (CONTRACT J2).
	ErrLeaseLost = fmt.Errorf("%w: lease is lost", ErrIllegalTransition)
	// ErrRetryRefused: Decide does not allow a repeat of the action (CONTRACT O1), or it was stopped.
	ErrRetryRefused = fmt.Errorf("%w: no repeat is allowed", ErrIllegalTransition)
	// ErrKeyExpired wraps ErrRetryRefused: the window of the action's key is over (CONTRACT I5).
	ErrKeyExpired = fmt.Errorf("%w: the key's window is over", ErrRetryRefused)
	// ErrBudgetSpent wraps ErrRetryRefused: attempts or time of the budget are used up (CONTRACT J4).
	ErrBudgetSpent = fmt.Errorf("%w: the retry budget is spent", ErrRetryRefused)
)

// Reasons of RETRY_STOPPED.
const (
	StoppedBudget    = "budget_exhausted" // J4
	StoppedKey       = "key_expired"      // I5
	StoppedNotKept   = "result_not_kept"  // H7
	StoppedContract  = "contract_changed" // the route no longer allows what the record says
	StoppedRejection = "refused_by_decide"
)

// Lease is a worker's exclusive right to add the next attempt to an action (CONTRACT
// J1). Generations of an action count from 1, the attempt it began with; each lease has
// the next one, and none is used twice.
type Lease struct {
	Generation int `json:"generation"`
	// Process names the process that holds it: what an earlier process held is void, since
	// the journal belongs to one at a time.
	Process string `json:"process,omitempty"`
	// For says who wanted it: "caller", "api", "background" or "deadline".
	For   string    `json:"for,omitempty"`
	Until time.Time `json:"until"`
}

// Key is what is recorded of an idempotency key before it is first sent (CONTRACT I2).
// The key itself is the caller's or Waybill's, and no secret.
type Key struct {
	Key   string `json:"key"`
	In    string `json:"in"`    // "header:Idempotency-Key" or "body:meta.key"
	Scope string `json:"scope"` // the contract's scope and the origin
	Maker string `json:"maker"` // "caller" or "waybill"
	// ExpiresAt is the earliest safe expiry: from then on the service may have forgotten
	// the key (CONTRACT I5).
	ExpiresAt time.Time `json:"expires_at"`
	// Source and Reviewed say what the contract rests on (CONTRACT I10).
	Source   string `json:"source,omitempty"`
	Reviewed string `json:"reviewed,omitempty"`
	// Replaces names the action that had the key before and gave it up.
	Replaces string `json:"replaces,omitempty"`
}

// Budget bounds the repeats of one action (CONTRACT J3): it is written once, with the
// binding, and a restart changes nothing of it.
type Budget struct {
	Attempts int       `json:"attempts"` // generations, the first included
	Until    time.Time `json:"until"`
	// Background: Waybill goes on without a caller; the request is kept.
	Background bool `json:"background,omitempty"`
}

// CurrentGeneration is the highest generation that was handed out; 1 for an action that
// was never repeated.
func (r *Record) CurrentGeneration() int { return max(r.Generation, 1) }

// leased reports whether the lease of a generation is in force at a time.
func (r *Record) leased(generation int, at time.Time) bool {
	if control.Off("J2-generation-checked") {
		return true
	}
	return r.Lease != nil && r.Lease.Generation == generation && r.Generation == generation && at.Before(r.Lease.Until)
}

// LeaseActive reports whether somebody may be adding an attempt right now.
func (r *Record) LeaseActive(process string, at time.Time) bool {
	return r.Lease != nil && r.Lease.Process == process && at.Before(r.Lease.Until)
}

// later is the time by which windows are judged: a clock that went back opens none again
// (CONTRACT I5).
func (r *Record) later(at time.Time) time.Time {
	if r.LatestAt.After(at) {
		return r.LatestAt
	}
	return at
}

// Decision is what Decide says of a repeat of this very request.
func (r *Record) Decision() outcome.Decision {
	var print string
	if r.Bound != nil {
		print = r.Bound.Fingerprint
	}
	return outcome.Decide(outcome.DecideRecord{InvocationID: r.ID.String(), Outcome: r.Facts.Outcome, Retry: r.Facts.Retry, Fingerprint: print},
		outcome.Operation{Idempotent: r.Repeatable(), Fingerprint: print})
}

// MayRepeat reports why no further attempt may be added to the action, nil when one may:
// Decide first, then what limits it (CONTRACT O1, J4, H7). It is pure; now is a time of
// the journal.
func (r *Record) MayRepeat(now time.Time) error {
	err := r.mayLease(now)
	if err == nil && r.notKept() {
		return ErrRetryRefused
	}
	return err
}

// mayLease is MayRepeat as Apply asks it. What it has once allowed it must allow for ever: the
// verifier asks it again.
func (r *Record) mayLease(now time.Time) error {
	now = r.later(now)
	if r.Bound == nil || r.Tunnel != nil || r.Bound.Approval {
		return ErrRetryRefused // an approval is spent once: a repeat is a new action (D3)
	}
	if !r.Ended {
		return ErrLeaseHeld
	}
	switch d := r.Decision(); {
	case r.Stopped == StoppedBudget:
		return ErrBudgetSpent
	case r.Stopped == StoppedKey:
		return ErrKeyExpired
	case r.Stopped != "":
		return ErrRetryRefused
	case control.Off("O1-engine-asks-decide"):
	case !d.Step.Repeats():
		return ErrRetryRefused
	case d.Step == outcome.StepSameKey && (r.Bound.Key == nil || !now.Before(r.Bound.Key.ExpiresAt)):
		return ErrKeyExpired
	}
	if notKept(r.resolved().Code) {
		return ErrRetryRefused
	}
	if b := r.Bound.Budget; b != nil && !control.Off("J3-budget-in-the-record") && (r.CurrentGeneration() >= b.Attempts || !now.Before(b.Until)) {
		return ErrBudgetSpent
	}
	return nil
}

// repeatOver reports why a lease that was taken must not be used any more: what came to
// light meanwhile resolves the action – somebody may have been told so and have gone on –,
// or the window of its key is over (CONTRACT I5, K2). A budget was spent with the lease.
func (r *Record) repeatOver(at time.Time) error {
	if control.Off("O1-engine-asks-decide") {
		return nil
	}
	now := *r
	now.Stopped = ""
	now.project()
	switch d := now.Decision(); {
	case !d.Step.Repeats():
		return ErrRetryRefused
	case d.Step == outcome.StepSameKey && (r.Bound.Key == nil || !r.later(at).Before(r.Bound.Key.ExpiresAt)):
		return ErrKeyExpired
	}
	return nil
}

// notKept reports whether an attempt's result was had and not kept, whichever attempt decides.
func (r *Record) notKept() bool {
	return slices.ContainsFunc(r.Attempts, func(a Attempt) bool { return notKept(a.Facts.Code) })
}

// notKept tells endings whose result Waybill had and did not keep: they are never
// re-created by executing again (CONTRACT H7).
func notKept(c outcome.Code) bool {
	return c == outcome.CodeResultLimit || c == outcome.CodeResultStoreFailed || c == outcome.CodeResultContainsSecret
}

func applyLease(r *Record, ev *Event) error {
	l := ev.Lease
	if l == nil || r.Bound == nil || r.Tunnel != nil {
		return illegal(ev, "no lease, or nothing to lease")
	}
	switch {
	case ev.Type == LeaseTaken:
		switch {
		case !r.Ended || r.running() != nil:
			return fmt.Errorf("%s: an attempt is active: %w", ev.Type, ErrLeaseHeld)
		case l.Generation != r.CurrentGeneration()+1 && !control.Off("J1-one-generation"):
			return fmt.Errorf("%s: generation %d after %d: %w", ev.Type, l.Generation, r.CurrentGeneration(), ErrLeaseHeld)
		case r.LeaseActive(l.Process, ev.At):
			return fmt.Errorf("%s: %w", ev.Type, ErrLeaseHeld)
		}
		if err := r.mayLease(ev.At); err != nil {
			return fmt.Errorf("%s: %w", ev.Type, err)
		}
		held := *l
		r.Generation, r.Lease = l.Generation, &held
	case ev.Type == LeaseRenewed:
		if !r.leased(l.Generation, ev.At) {
			return fmt.Errorf("%s: %w", ev.Type, ErrLeaseLost)
		}
		held := *r.Lease
		held.Until = l.Until
		r.Lease = &held
	default: // LeaseEnded
		if !r.leased(l.Generation, ev.At) || r.running() != nil {
			return fmt.Errorf("%s: %w", ev.Type, ErrLeaseLost)
		}
		if ev.Ended != nil && !r.Dispatched() && r.Refusal != nil {
			if ev.Ended.Outcome != outcome.NotAttempted {
				return illegal(ev, "a try that ended before the boundary is not_attempted")
			}
			r.Refusal = ev.Ended
			r.EndedAt = ev.At
		}
		r.Lease = nil
		r.project()
	}
	return nil
}

func applyStopped(r *Record, ev *Event) error {
	if ev.Ended == nil || ev.Ended.Reason == "" || !r.Ended || r.Bound == nil || r.Stopped != "" {
		return illegal(ev, "no reason, or the action runs or was stopped")
	}
	r.Stopped = ev.Ended.Reason
	r.project()
	return nil
}

// checkGeneration is the last check before the boundary (CONTRACT J2): the first attempt,
// and one that follows a redirect, go on under the generation that runs; every other one
// needs the lease of its own.
func (r *Record) checkGeneration(ev *Event) error {
	g := max(ev.Dispatch.Generation, 1)
	if r.Ended && r.following() && g == r.CurrentGeneration() {
		return nil
	}
	switch {
	case !r.Ended && g == r.CurrentGeneration():
		return nil
	case r.leased(g, ev.At):
		return nil
	default:
		return fmt.Errorf("%s: generation %d: %w", ev.Type, g, ErrLeaseLost)
	}
}

// settleLease lets go of the lease under which a dispatched attempt ended (CONTRACT J5).
func (r *Record) settleLease(a *Attempt) {
	if r.Lease != nil && a.Dispatch != nil && a.Dispatch.Generation == r.Lease.Generation && (a.End == nil || !a.End.Followed) {
		r.Lease = nil
	}
}

// advise changes the advice of an action that was stopped (CONTRACT J4, I5).
func (r *Record) advise(f outcome.Facts) outcome.Facts {
	if r.Stopped == "" {
		return f
	}
	switch {
	case f.Outcome == outcome.Unknown && f.Retry != outcome.FetchResult:
		f = reconciled(f)
	case (f.Outcome == outcome.NotAttempted || f.Outcome == outcome.Rejected) && f.Retry == outcome.Backoff:
		f.Retry = outcome.AfterCorrection
	}
	return f
}

// At returns the record as it stands at a time: once the window of its key is over, the
// advice is to reconcile (CONTRACT I5).
func (r Record) At(now time.Time) Record {
	if f := r.Facts; r.Ended && f.Outcome == outcome.Unknown && f.Retry == outcome.SameIdempotencyKey && (r.Bound == nil || r.Bound.Key == nil || !r.later(now).Before(r.Bound.Key.ExpiresAt)) {
		r.Facts = reconciled(f)
	}
	return r
}

// reconciled is an unknown that is not to be repeated any more. REMOTE_IN_PROGRESS goes with
// its key (table U).
func reconciled(f outcome.Facts) outcome.Facts {
	if f.Retry = outcome.Reconcile; f.Validate() != nil {
		f.Code = outcome.CodeRemoteOutcomeUnknown
	}
	return f
}

// LeftToRepeat reports whether the action had ended without effect and a further attempt could be
// added to it, or was about to be: what is known of it may have become more than that since.
// A delivery that failed is no matter: an acknowledgement takes it back.
func (r *Record) LeftToRepeat() bool {
	if !r.Ended || r.Bound == nil {
		return false
	}
	then := *r
	then.Facts = r.advise(r.resolved())
	if o := then.Facts.Outcome; o != outcome.NotAttempted && o != outcome.Rejected {
		return false
	}
	return r.Lease != nil || then.mayLease(r.EndedAt) == nil
}

// KeepsRequest reports whether the sealed request is still needed: of an action that the
// background engine may repeat.
func (r *Record) KeepsRequest() bool {
	if r.Bound == nil || r.Bound.Budget == nil || !r.Bound.Budget.Background || !r.crossed() {
		return false
	}
	return !r.Ended || r.Stopped == "" && r.Decision().Step.Repeats()
}

// HoldsKey reports whether the action's key is taken: it may have reached the service.
func (r *Record) HoldsKey() bool { return r.Bound != nil && r.Bound.Key != nil && r.crossed() }

// repeatEvidence is what the records say of repeating (CONTRACT L1, J4, I7).
func (r *Record) repeatEvidence(ev *outcome.Evidence) {
	ev.Generation = r.Generation
	if r.Bound == nil {
		return
	}
	ev.Conditional = r.Bound.Conditional
	if k := r.Bound.Key; k != nil {
		scope, _, _ := strings.Cut(k.Scope, " ")
		ev.Idempotency = &outcome.Idempotency{Key: k.Key, Scope: scope, Fingerprint: r.Bound.Fingerprint, RemoteContract: "configured", Maker: k.Maker, ExpiresAt: k.ExpiresAt.UTC().Format(time.RFC3339Nano)}
	}
	if b := r.Bound.Budget; b != nil {
		ev.RetryBudget = &outcome.RetryBudget{Attempts: b.Attempts, Used: r.CurrentGeneration(), Until: b.Until.UTC().Format(time.RFC3339Nano), Exhausted: r.Stopped == StoppedBudget}
	}
}
