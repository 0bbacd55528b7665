package client

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"waybill/outcome"
)

// longestWait is how long one request waits for the end of an action.
const longestWait = 30 * time.Second

// ErrNoJob: the remote side accepted no work that Waybill follows.
var ErrNoJob = errors.New("no job is followed")

// Err returns the *Error that the action amounts to, with its envelope; nil for one that
// succeeded. Of one that still runs it is RESULT_PENDING, or APPROVAL_PENDING.
func (a *Action) Err() error {
	f := a.Facts()
	if f.Code == outcome.CodeNone {
		return nil
	}
	e := &Error{Source: FromRecord, RequestID: a.RequestID}
	if a.Envelope != nil {
		e.Envelope = *a.Envelope
	} else {
		e.Envelope = outcome.NewEnvelope(a.InvocationID, f, "", outcome.Evidence{DispatchStarted: a.DispatchStarted, Route: a.Route})
	}
	return e
}

// Wait returns an action when it has ended: when a person has decided about it and it
// was sent (D4), when the job that it follows is done (A7), when the answer came. It
// outlasts a restart of the proxy, within AskFor. The context ends the waiting, with the
// action as it was last seen – or nil – beside the context's error.
func (c *Client) Wait(ctx context.Context, id string) (*Action, error) {
	var (
		last *Action
		down time.Time // since when the proxy does not answer
	)
	for delay := firstAsk; ; delay = min(2*delay, lastAsk) {
		wait := longestWait
		if deadline, ok := ctx.Deadline(); ok {
			wait = min(wait, time.Until(deadline)-answerMargin)
		}
		var q url.Values
		if n := int64(wait / time.Second); n > 0 {
			q = url.Values{"wait": {strconv.FormatInt(n, 10)}}
		}
		a, err := c.action(ctx, http.MethodGet, actionPath(id), q, nil)
		switch {
		case err == nil && a.Ended:
			return a, nil
		case err == nil:
			last, down = a, time.Time{}
		case ctx.Err() != nil:
			return last, context.Cause(ctx)
		case !errors.Is(err, ErrUnanswered):
			return last, err
		case down.IsZero():
			down = time.Now()
		case time.Since(down) >= c.o.AskFor:
			return last, err
		}
		if !sleep(ctx, delay) {
			return last, context.Cause(ctx)
		}
	}
}

// WaitResult waits for the end of an action and fetches its answer: for one that a person
// has to approve (APPROVAL_PENDING), one that runs on after its caller left, and a job.
// Its error is that of Result; an action that has not ended when the context does is an
// *Error with its envelope, and the context's error in it.
func (c *Client) WaitResult(ctx context.Context, id string) (*Response, error) {
	a, err := c.Wait(ctx, id)
	if err != nil {
		if a != nil && ctx.Err() != nil {
			return nil, &Error{Envelope: *a.Envelope, Source: FromRecord, RequestID: a.RequestID, Err: err}
		}
		return nil, err
	}
	r, err := c.Result(ctx, id)
	if err != nil {
		return nil, err
	}
	r.RequestID = a.RequestID
	return r, nil
}

// WaitJob waits for work that the remote side accepted (202) and does later: for the
// action that follows it, whose outcome is the work's (CONTRACT A7). id is the action
// that was answered, or the one that follows. The error wraps ErrNoJob where nobody
// follows any; the answer's own location is all there is then.
func (c *Client) WaitJob(ctx context.Context, id string) (*Action, error) {
	a, err := c.Action(ctx, id)
	if err != nil {
		return nil, err
	}
	if a.Link != nil && a.Link.Kind == "job" {
		return c.Wait(ctx, id)
	}
	job := a.Envelope.Evidence.Job
	switch {
	case job == nil:
		return nil, fmt.Errorf("client: action %s: %w", id, ErrNoJob)
	case job.Action == "":
		return nil, fmt.Errorf("client: action %s: %w: %s", id, ErrNoJob, job.Reason)
	}
	return c.Wait(ctx, job.Action)
}

// Reconcile lets the proxy ask the remote side what became of an action, with the query
// of the route's contract, and returns the action as it is then: resolved, or still
// unknown (CONTRACT K6; see Err). Nothing is sent again. Where there is no query, or nothing to
// ask, the error is an *Error with the action's envelope and the code RETRY_REFUSED or
// LEASE_HELD.
func (c *Client) Reconcile(ctx context.Context, id string) (*Action, error) {
	return c.followUp(ctx, id, "reconcile")
}

// Retry lets the proxy make a further attempt of an action with the request that was kept
// of it, if the action's own advice and the route's budget allow one (CONTRACT O1, J4),
// and returns the action as it is then; see Err. Refused, it is an *Error with the
// action's envelope (RETRY_REFUSED, evidence.reason says why; LEASE_HELD). A request that was not kept is repeated by
// whoever has it: Do does so by itself where the advice allows it.
func (c *Client) Retry(ctx context.Context, id string) (*Action, error) {
	return c.followUp(ctx, id, "retry")
}

// followUp posts to an action. It is never posted twice: after a loss the action is read.
func (c *Client) followUp(ctx context.Context, id, what string) (*Action, error) {
	h := http.Header{}
	tellDeadline(ctx, h)
	a, err := c.action(ctx, http.MethodPost, actionPath(id)+"/"+what, nil, h)
	var told *Error
	if err == nil || errors.As(err, &told) {
		return a, err
	}
	e := c.afterLoss(ctx, "", id, err)
	if e.Source == FromRecord {
		// What is on record stands, whether the call had a part in it or not.
		if a, aerr := c.Action(ctx, id); aerr == nil && a.Ended && a.Facts().Code == outcome.CodeNone {
			return a, nil
		}
	}
	return nil, e
}
