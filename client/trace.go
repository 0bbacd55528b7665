package client

import (
	"context"
	"sync"

	"waybill/outcome"
)

// Call is what one submission came to.
type Call struct {
	InvocationID string
	RequestID    string
	Facts        outcome.Facts
	// Err is the failure, or nil for an origin's complete answer.
	Err *Error
}

// Trace collects what is known of each submission that is made with a context, for
// callers of a vendor's library that hides answers and errors. Safe for concurrent use.
type Trace struct {
	mu    sync.Mutex
	calls []Call
}

type traceKey struct{}

// WithTrace returns a context whose submissions are collected.
func WithTrace(ctx context.Context) (context.Context, *Trace) {
	t := &Trace{}
	return context.WithValue(ctx, traceKey{}, t), t
}

func traceOf(ctx context.Context) *Trace {
	t, _ := ctx.Value(traceKey{}).(*Trace)
	return t
}

func (t *Trace) add(r *Response, e *Error) {
	if t == nil {
		return
	}
	c := Call{Err: e}
	if e != nil {
		c.InvocationID, c.RequestID, c.Facts = e.Envelope.InvocationID, e.RequestID, e.Facts()
	} else {
		c.InvocationID, c.RequestID, c.Facts = r.InvocationID, r.RequestID, r.Facts
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.calls = append(t.calls, c)
}

// Calls returns the submissions so far, in the order in which they ended.
func (t *Trace) Calls() []Call {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]Call(nil), t.calls...)
}

// Last returns the last submission; false when there was none.
func (t *Trace) Last() (Call, bool) {
	calls := t.Calls()
	if len(calls) == 0 {
		return Call{}, false
	}
	return calls[len(calls)-1], true
}
