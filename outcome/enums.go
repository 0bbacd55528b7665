package outcome

import (
	"errors"
	"fmt"

	"waybill/internal/control"
)

// ErrUnknownValue is wrapped by every decoding error of a closed enumeration
// (CONTRACT A8): a value that this build does not know is refused, never guessed.
var ErrUnknownValue = errors.New("unknown value")

// Phase says where Waybill stopped (CONTRACT A2). It is diagnosis, not policy:
// no retry decision reads it (A11). The zero value is invalid.
type Phase uint8

// The phases, in the order in which a request passes them.
const (
	PhaseInvalid Phase = iota
	Validation
	CredentialInjection
	ConnectionSetup
	RemoteExecution
	ResultDelivery
)

// Outcome says what is known about the remote side (CONTRACT A3). The zero value
// is invalid.
type Outcome uint8

// The outcomes.
const (
	OutcomeInvalid Outcome = iota
	NotAttempted
	Rejected
	Committed
	Unknown
)

// Retry says what automation may do now (CONTRACT A4). The zero value is invalid.
type Retry uint8

// The advice.
const (
	RetryInvalid Retry = iota
	Never
	AfterCorrection
	Backoff
	SameIdempotencyKey
	Reconcile
	FetchResult
)

var (
	phaseNames   = [...]string{Validation: "validation", CredentialInjection: "credential_injection", ConnectionSetup: "connection_setup", RemoteExecution: "remote_execution", ResultDelivery: "result_delivery"}
	outcomeNames = [...]string{NotAttempted: "not_attempted", Rejected: "rejected", Committed: "committed", Unknown: "unknown"}
	retryNames   = [...]string{Never: "never", AfterCorrection: "after_correction", Backoff: "backoff", SameIdempotencyKey: "same_idempotency_key", Reconcile: "reconcile", FetchResult: "fetch_result"}
)

// Phases returns every valid phase.
func Phases() []Phase { return values[Phase](len(phaseNames)) }

// Outcomes returns every valid outcome.
func Outcomes() []Outcome { return values[Outcome](len(outcomeNames)) }

// Retries returns every valid retry advice.
func Retries() []Retry { return values[Retry](len(retryNames)) }

func values[T ~uint8](n int) []T {
	out := make([]T, 0, n-1)
	for i := 1; i < n; i++ {
		out = append(out, T(i))
	}
	return out
}

func valid(names []string, i int) bool { return i > 0 && i < len(names) }

func name(names []string, i int) string {
	if valid(names, i) {
		return names[i]
	}
	return fmt.Sprintf("invalid(%d)", i)
}

func marshal(kind string, names []string, i int) ([]byte, error) {
	if valid(names, i) {
		return []byte(names[i]), nil
	}
	return nil, fmt.Errorf("outcome: %s %d: %w", kind, i, ErrUnknownValue)
}

func parse(kind string, names []string, text []byte) (int, error) {
	for i, n := range names {
		if i > 0 && n == string(text) {
			return i, nil
		}
	}
	if control.Off("A8-unknown-value-refused") {
		return 1, nil
	}
	return 0, fmt.Errorf("outcome: %s: %w", kind, ErrUnknownValue)
}

// String returns the wire form, or "invalid(n)".
func (p Phase) String() string { return name(phaseNames[:], int(p)) }

// MarshalText refuses an invalid phase with ErrUnknownValue (CONTRACT A8).
func (p Phase) MarshalText() ([]byte, error) { return marshal("phase", phaseNames[:], int(p)) }

// UnmarshalText refuses unknown text with ErrUnknownValue (CONTRACT A8).
func (p *Phase) UnmarshalText(text []byte) error {
	i, err := parse("phase", phaseNames[:], text)
	*p = Phase(i)
	return err
}

// String returns the wire form, or "invalid(n)".
func (o Outcome) String() string { return name(outcomeNames[:], int(o)) }

// MarshalText refuses an invalid outcome with ErrUnknownValue (CONTRACT A8).
func (o Outcome) MarshalText() ([]byte, error) { return marshal("outcome", outcomeNames[:], int(o)) }

// UnmarshalText refuses unknown text with ErrUnknownValue (CONTRACT A8).
func (o *Outcome) UnmarshalText(text []byte) error {
	i, err := parse("outcome", outcomeNames[:], text)
	*o = Outcome(i)
	return err
}

// String returns the wire form, or "invalid(n)".
func (r Retry) String() string { return name(retryNames[:], int(r)) }

// MarshalText refuses an invalid advice with ErrUnknownValue (CONTRACT A8).
func (r Retry) MarshalText() ([]byte, error) { return marshal("retry", retryNames[:], int(r)) }

// UnmarshalText refuses unknown text with ErrUnknownValue (CONTRACT A8).
func (r *Retry) UnmarshalText(text []byte) error {
	i, err := parse("retry", retryNames[:], text)
	*r = Retry(i)
	return err
}
