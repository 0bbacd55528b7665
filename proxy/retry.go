package proxy

import (
	"context"
	"io"
	"log/slog"
	"runtime/debug"
	"strconv"
	"time"

	"waybill/dispatch"
	"waybill/outcome"
)

// Retrier is a Pipeline that can repeat an action with the request that was kept of it.
type Retrier interface {
	RetryKept(ctx context.Context, id dispatch.ActionID, wait time.Duration) *dispatch.Reply
}

// retry adds an attempt to an action if its advice allows one, and answers with the action
// as it stands then; its result is fetched as ever (CONTRACT O1, J1). Refused, it answers
// with RETRY_REFUSED or LEASE_HELD and the action's own facts.
func (a *api) retry(rec dispatch.Record) {
	_, _ = io.Copy(io.Discard, io.LimitReader(a.r.Body, 4<<10)) // a body is of no interest
	r, ok := a.p.pipeline.(Retrier)
	if !ok {
		a.fail(refusal(outcome.CodeUnsupportedAction, "request.target", "not_available", "This is not available here."))
		return
	}
	var wait time.Duration
	if v := a.r.Header.Get(fieldTimeout); v != "" {
		n, err := strconv.ParseUint(v, 10, 32)
		if err != nil || n < 1 || n > maxTimeoutSeconds {
			a.fail(refusal(outcome.CodeInvalidRequest, "request.headers.waybill-timeout", "bad_timeout", "Give whole seconds from 1 to 86400."))
			return
		}
		wait = time.Duration(n) * time.Second
	}
	reply := a.attempt(r, rec.ID, wait)
	if reply == nil {
		f := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeInternal}
		env := outcome.NewEnvelope(rec.ID.String(), f, "", rec.Evidence())
		a.envelope(&env, 0)
		return
	}
	_ = reply.Body.Close()
	if env := reply.Envelope; env != nil && env.Error != nil {
		switch env.Error.Code { // what the action's own record does not say
		case outcome.CodeRetryRefused, outcome.CodeLeaseHeld, outcome.CodeActionNotFound:
			a.envelope(env, 0)
			return
		}
		if env.InvocationID != rec.ID.String() {
			a.envelope(env, 0) // it ended before it became an attempt of the action
			return
		}
	}
	now, err := a.p.journal.Action(context.WithoutCancel(a.r.Context()), rec.ID)
	if err != nil {
		now = reply.Record
	}
	a.action(now)
}

// attempt returns nil after a panic: the attempt may have been dispatched, which the handlers'
// own answer to one would deny (CONTRACT M2). The value may quote the request (C2).
func (a *api) attempt(r Retrier, id dispatch.ActionID, wait time.Duration) (reply *dispatch.Reply) {
	defer func() {
		if recover() != nil {
			a.p.log.Error("panic in an attempt", slog.String("action", id.String()), slog.Any("stack", string(debug.Stack())))
			reply = nil
		}
	}()
	return r.RetryKept(a.r.Context(), id, wait)
}
