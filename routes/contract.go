package routes

import (
	"errors"
	"net/http"
	"slices"
	"strings"
	"time"

	"waybill/outcome"
)

// KeyMaker says who chooses an idempotency key. Zero is MadeByCaller.
type KeyMaker uint8

// The makers.
const (
	MadeByCaller KeyMaker = iota
	MadeByCallerOrWaybill
)

// KeyPromises are the four things that a service must promise before its key makes an
// unknown outcome repeatable (CONTRACT I1, I10).
func KeyPromises() []string { return []string{"accepts", "compares", "keeps", "returns"} }

// Idempotency is the reviewed promise of a service to bind a key to one logical
// operation (CONTRACT I1, I2, I5, I10).
type Idempotency struct {
	// Header is the canonical name of the request field that carries the key, or Field
	// the dotted path of a string in a JSON body. Exactly one of them.
	Header string `json:",omitempty"`
	Field  string `json:",omitempty"`
	// Scope names within what a key is unique at the service; "" is the route's name.
	Scope string `json:",omitempty"`
	// Retention is how long the service keeps a key, as published; Margin is taken off.
	Retention time.Duration `json:",omitempty"`
	Margin    time.Duration `json:",omitempty"`
	// InProgress are statuses that mean "a request with this key is being worked on" (G5).
	InProgress []int `json:",omitempty"`
	// Mismatch are statuses that mean "this key came with another request".
	Mismatch []int    `json:",omitempty"`
	Maker    KeyMaker `json:",omitempty"`
	// RefusalsSpeak: a refusal of a repeat under the key resolves the whole operation,
	// since the service looks at the key first (CONTRACT A10).
	RefusalsSpeak bool `json:",omitempty"`
	// Promises are those of KeyPromises that the service makes; Source says where that is
	// written, Reviewed (YYYY-MM-DD) when somebody read it (I10).
	Promises []string `json:",omitempty"`
	Source   string   `json:",omitempty"`
	Reviewed string   `json:",omitempty"`
}

// Configured reports whether the contract may be relied upon (CONTRACT I10): it states
// all four promises, for how long, where that is written and when it was read.
func (i *Idempotency) Configured() bool { return i != nil && i.Missing() == "" }

// Missing names what a contract lacks before it counts as configured, "" for nothing.
func (i *Idempotency) Missing() string {
	var lacks []string
	for _, p := range KeyPromises() {
		if !slices.Contains(i.Promises, p) {
			lacks = append(lacks, "promises: "+p)
		}
	}
	if i.Retention <= i.Margin {
		lacks = append(lacks, "retention")
	}
	if i.Source == "" {
		lacks = append(lacks, "source")
	}
	if i.Reviewed == "" {
		lacks = append(lacks, "reviewed")
	}
	return strings.Join(lacks, ", ")
}

// Window is how long after a key was first sent it may be sent again (CONTRACT I5).
func (i *Idempotency) Window() time.Duration { return i.Retention - i.Margin }

// Response overrides what a complete answer with a status means (CONTRACT G5).
type Response struct {
	Status  int
	Outcome outcome.Outcome
	Retry   outcome.Retry `json:",omitempty"` // zero: what the contract says of an unknown outcome (I6)
}

// Retry is the budget of the retry engine on a route (CONTRACT J3, J4). It can stop
// what Decide allows and never allow what Decide stops.
type Retry struct {
	// Attempts bounds the generations of one action, the first included; 0: no repeats by
	// Waybill itself.
	Attempts int
	Total    time.Duration // from acceptance to the last repeat
	Backoff  time.Duration // before the second attempt; doubled for each further one
	Max      time.Duration // longest wait that Waybill chooses by itself
	// IgnoreRetryAfter repeats by the backoff alone. A refusal that names no time is never
	// repeated by itself either way.
	IgnoreRetryAfter bool `json:",omitempty"`
	// Background goes on when no caller waits, and after a restart; the sealed request is
	// kept until the action is resolved.
	Background bool `json:",omitempty"`
}

// OnRepeat says how a submission is answered whose key and fingerprint are those of a
// finished action (CONTRACT I9). Zero is RepeatRecorded.
type OnRepeat uint8

// The answers.
const (
	RepeatRecorded OnRepeat = iota
	RepeatRefuse
)

// DefaultMargin is taken off a retention that names no margin (CONTRACT I5).
const DefaultMargin = 5 * time.Minute

// MaxKeptRequest bounds the body of a request that is kept for background repeats, in bytes.
const MaxKeptRequest = 512 << 10

// DefaultRetry returns the budget of a route that writes retry: without details.
func DefaultRetry() Retry {
	return Retry{Attempts: 3, Total: 10 * time.Minute, Backoff: time.Second, Max: time.Minute}
}

// Key returns the key contract that holds for a method, or nil: one that is configured
// (I10), on an operation that is not repeatable anyway.
func (r *Route) Key(method string) *Idempotency {
	if k := r.Contract.Idempotency; k.Configured() && !r.Repeatable(method) {
		return k
	}
	return nil
}

// Conditional reports what server-enforced precondition a request carries (CONTRACT
// I7): "if_match" for If-Match with entity tags, "if_none_match" for If-None-Match: *,
// else "". Each makes the service refuse a second execution.
func Conditional(h http.Header) string {
	if v := h.Values("If-Match"); len(v) > 0 && strings.Contains(strings.Join(v, ","), `"`) && !strings.Contains(strings.Join(v, ","), "W/") {
		return "if_match"
	}
	if v := h.Values("If-None-Match"); len(v) == 1 && strings.TrimSpace(v[0]) == "*" {
		return "if_none_match"
	}
	return ""
}

// SafeWay reports whether any operation of the route can be repeated safely at all: what
// a retry budget needs (CONTRACT I6).
func (r *Route) SafeWay() bool {
	c := &r.Contract
	if c.Repeatable != nil && *c.Repeatable || c.Idempotency.Configured() || c.Conditional || len(c.RefusedBeforeExecution) > 0 {
		return true
	}
	if c.Repeatable != nil {
		return false
	}
	return len(r.Match.Methods) == 0 || slices.ContainsFunc(r.Match.Methods, r.Repeatable)
}

func (r *Route) checkContract() error {
	c := &r.Contract
	if k := c.Idempotency; k != nil {
		switch {
		case (k.Header == "") == (k.Field == ""):
			return errors.New("an idempotency contract needs a header or a body field")
		case k.Maker > MadeByCallerOrWaybill || k.Maker == MadeByCallerOrWaybill && k.Header == "":
			return errors.New("keys are made for a header only, not for a body field")
		case k.Retention < 0 || k.Margin < 0:
			return errors.New("an idempotency window is negative")
		case !printable(k.Header + k.Field + k.Scope + k.Source + k.Reviewed + strings.Join(k.Promises, "")):
			return errors.New("an idempotency contract has text that is not printable")
		}
	}
	if b := c.Retry; b != nil {
		switch {
		case b.Attempts < 1 || b.Total <= 0 || b.Backoff <= 0 || b.Max < b.Backoff:
			return errors.New("a retry budget is incomplete")
		case !r.SafeWay():
			return errors.New("a retry budget needs a safe way to repeat (CONTRACT I6)")
		case b.Background && r.Limits.Request > MaxKeptRequest:
			return errors.New("background repeats need limits.request of at most 512 KiB")
		}
	}
	for i, v := range c.Responses {
		if v.Status < 200 || v.Status > 599 || i > 0 && c.Responses[i-1].Status >= v.Status {
			return errors.New("responses are not final statuses in order")
		}
		ok := v.Outcome == outcome.Committed && (v.Retry == outcome.Never || v.Retry == outcome.Reconcile) ||
			v.Outcome == outcome.Rejected && (v.Retry == outcome.Never || v.Retry == outcome.AfterCorrection || v.Retry == outcome.Backoff) ||
			v.Outcome == outcome.Unknown && v.Retry == outcome.RetryInvalid
		if !ok {
			return errors.New("a response has an outcome and an advice that do not go together")
		}
	}
	if c.OnRepeat > RepeatRefuse {
		return errors.New("an enumeration has an unknown value")
	}
	return nil
}

func (c *Contract) clone() {
	c.RefusedBeforeExecution = cloneSlice(c.RefusedBeforeExecution)
	c.KeyInUse = cloneSlice(c.KeyInUse)
	if c.Repeatable != nil {
		v := *c.Repeatable
		c.Repeatable = &v
	}
	if c.Idempotency != nil {
		k := *c.Idempotency
		k.InProgress, k.Mismatch, k.Promises = cloneSlice(k.InProgress), cloneSlice(k.Mismatch), cloneSlice(k.Promises)
		c.Idempotency = &k
	}
	if c.Retry != nil {
		v := *c.Retry
		c.Retry = &v
	}
	c.Responses = cloneSlice(c.Responses)
}

// Response returns what the contract says of a status.
func (c *Contract) Response(status int) (Response, bool) {
	for _, r := range c.Responses {
		if r.Status == status {
			return r, true
		}
	}
	return Response{}, false
}
