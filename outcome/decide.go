package outcome

import "waybill/internal/control"

// DecideRecord is what Decide reads of an action's record. It has no phase:
// phases are diagnosis, not policy (CONTRACT A11).
type DecideRecord struct {
	InvocationID string
	Outcome      Outcome
	Retry        Retry
	Fingerprint  string // "sha256:…"; "" when there is none, which equals no other
}

// Operation is what is known of the operation that would be repeated.
type Operation struct {
	// Idempotent says that repeating has no further effect: declared by the route,
	// or by default for GET, HEAD and OPTIONS (CONTRACT G6).
	Idempotent bool
	// Fingerprint is that of the request that would be sent.
	Fingerprint string
}

// Step is what the retry engine does next (CONTRACT O1). The zero value is invalid.
type Step uint8

// The steps.
const (
	StepInvalid        Step = iota
	StepFetch               // read the stored result of Decision.InvocationID; nothing is sent
	StepNewAttempt          // a further recorded attempt
	StepStop                // nothing helps but a correction
	StepSameKey             // a further recorded attempt with the same idempotency key
	StepReconcile           // ask what happened; do not repeat
	StepWhenAllowed         // a further attempt once the given time has passed
	StepReturnRecorded      // hand back what is on record
)

var stepNames = [...]string{
	StepFetch: "FETCH", StepNewAttempt: "RETRY_NEW_ATTEMPT", StepStop: "STOP_FOR_CORRECTION", StepSameKey: "RETRY_SAME_KEY",
	StepReconcile: "RECONCILE", StepWhenAllowed: "RETRY_WHEN_ALLOWED", StepReturnRecorded: "RETURN_RECORDED_RESULT",
}

// Steps returns every valid step.
func Steps() []Step { return values[Step](len(stepNames)) }

// String returns the name of CONTRACT O1, or "invalid(n)".
func (s Step) String() string { return name(stepNames[:], int(s)) }

// MarshalText refuses an invalid step with ErrUnknownValue.
func (s Step) MarshalText() ([]byte, error) { return marshal("step", stepNames[:], int(s)) }

// UnmarshalText refuses unknown text with ErrUnknownValue (CONTRACT A8).
func (s *Step) UnmarshalText(text []byte) error {
	i, err := parse("step", stepNames[:], text)
	*s = Step(i)
	return err
}

// Repeats reports whether the step sends the operation again.
func (s Step) Repeats() bool {
	return s == StepNewAttempt || s == StepSameKey || s == StepWhenAllowed
}

// Decision is the answer of Decide.
type Decision struct {
	Step Step `json:"step"`
	// InvocationID is set for StepFetch.
	InvocationID string `json:"invocation_id,omitempty"`
}

// Decide says what may happen next with an action (CONTRACT O1, O2). It is pure
// and total. Limits of rate, number and budget apply after it: they can stop what
// it allows, never allow what it stops (J4); a result that was not kept stops the
// engine even where Decide would repeat (H7).
//
// Where its input is outside the closed enumerations it answers StepReconcile:
// what is not understood permits no repeat and proves no result.
func Decide(rec DecideRecord, op Operation) Decision {
	if rec.Retry == RetryInvalid || int(rec.Retry) >= len(retryNames) {
		return Decision{Step: StepReconcile}
	}
	if rec.Retry == FetchResult {
		return Decision{Step: StepFetch, InvocationID: rec.InvocationID}
	}
	switch rec.Outcome {
	case NotAttempted:
		if rec.Retry == Backoff {
			return Decision{Step: StepNewAttempt}
		}
		return Decision{Step: StepStop}
	case Unknown:
		switch {
		case op.Idempotent:
			return Decision{Step: StepNewAttempt}
		case rec.Retry == SameIdempotencyKey && op.Fingerprint != "" && op.Fingerprint == rec.Fingerprint:
			return Decision{Step: StepSameKey}
		case control.Off("O1-unknown-needs-a-ground"):
			return Decision{Step: StepNewAttempt}
		default:
			return Decision{Step: StepReconcile}
		}
	case Rejected:
		if rec.Retry == Backoff {
			return Decision{Step: StepWhenAllowed}
		}
		return Decision{Step: StepReturnRecorded}
	case Committed:
		return Decision{Step: StepReturnRecorded}
	case OutcomeInvalid:
		return Decision{Step: StepReconcile}
	default:
		return Decision{Step: StepReconcile}
	}
}
