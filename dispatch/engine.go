package dispatch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	mrand "math/rand/v2"
	"net/http"
	"slices"
	"sync"
	"time"

	"waybill/internal/control"
	"waybill/outcome"
	"waybill/routes"
)

// keptRequest is the head of a request that is kept for background repeats; the body
// follows it. It is stored sealed, like results, and holds no injected secret.
type keptRequest struct {
	Version   int         `json:"v"`
	CallerID  string      `json:"caller"`
	Caller    string      `json:"caller_name,omitempty"`
	Session   string      `json:"session,omitempty"`
	Method    string      `json:"method"`
	Scheme    string      `json:"scheme"`
	Authority string      `json:"authority"`
	Path      string      `json:"path"`
	Query     string      `json:"query,omitempty"`
	HasQuery  bool        `json:"has_query,omitempty"`
	Protocol  string      `json:"protocol"`
	Header    http.Header `json:"header"`
	HasBody   bool        `json:"has_body,omitempty"`
	Length    int64       `json:"length"` // ContentLength of the submission
}

// keeping returns the request as it is to be kept, nil where the route keeps none. An
// error means that it is too large.
func (a *action) keeping() ([]byte, error) {
	r := a.route.Contract.Retry
	if r == nil || !r.Background || a.s.Exec != nil || a.further != nil || a.out.Upgrade != "" {
		return nil, nil // the answer to a handshake is a connection, and nobody would be there for it
	}
	h, _ := canonical(a.s.Header)
	for _, name := range managed(a.route) {
		delete(h, name) // a placeholder at best (C2)
	}
	for _, name := range hopByHop {
		delete(h, name)
	}
	k := keptRequest{Version: 1, CallerID: a.s.Caller.ID, Caller: a.s.Caller.Name, Session: a.s.Caller.Session, Method: a.s.Method, Scheme: a.addressed.Scheme,
		Authority: a.addressed.Authority(), Path: a.s.RawPath, Query: a.s.RawQuery, HasQuery: a.s.HasQuery, Protocol: a.s.Protocol, Header: h, HasBody: a.body != nil, Length: a.s.ContentLength}
	head, err := json.Marshal(k)
	if err != nil {
		return nil, fmt.Errorf("dispatch: kept request: %w", err)
	}
	var b bytes.Buffer
	b.Write(head)
	b.WriteByte('\n')
	if a.body != nil {
		if _, err := io.Copy(&b, a.body.reader()); err != nil {
			return nil, fmt.Errorf("dispatch: kept request: %w", err)
		}
	}
	if b.Len() > MaxKeptBytes {
		return nil, errBodyLimit
	}
	return b.Bytes(), nil
}

// keep takes the request as the caller sent it, before a marker or a secret is in it (C2).
func (a *action) keep(context.Context) *Refusal {
	var err error
	if a.kept, err = a.keeping(); err != nil {
		return refusal(outcome.CodePayloadLimit, "request", "request_too_large_to_keep", "The route keeps requests for repeats, and this one is too large.")
	}
	return nil
}

// keptWith returns the request to be kept with these events: only what may have been sent
// is ever repeated.
func (a *action) keptWith(events []Event) []byte {
	if a.kept != nil && slices.ContainsFunc(events, func(ev Event) bool { return ev.Type == DispatchStarted }) {
		return a.kept
	}
	return nil
}

// readKept turns a kept request into one that repeats the action it belongs to.
func readKept(raw []byte, id ActionID) (*Submission, error) {
	head, body, found := bytes.Cut(raw, []byte("\n"))
	var k keptRequest
	if err := json.Unmarshal(head, &k); err != nil || !found || k.Version != 1 {
		return nil, errors.New("dispatch: kept request cannot be read")
	}
	s := &Submission{Caller: Caller{ID: k.CallerID, Name: k.Caller, Session: k.Session}, Method: k.Method, Scheme: k.Scheme, Authorities: Authorities{URL: k.Authority, Connect: k.Authority},
		RawPath: k.Path, RawQuery: k.Query, HasQuery: k.HasQuery, Header: k.Header, Protocol: k.Protocol, ContentLength: k.Length, RetryOf: id.String()}
	if k.HasBody {
		s.Body = bytes.NewReader(body)
	}
	return s, nil
}

// RetryKept adds an attempt to an action with the request that was kept of it (POST
// /v1/actions/{id}/retry, "waybill retry"). Whose action it is the caller of this has
// checked. The reply is never nil; where nothing was kept it is RETRY_REFUSED, and the
// request can be sent again with Waybill-Retry-Of.
func (p *Pipeline) RetryKept(ctx context.Context, id ActionID, wait time.Duration) *Reply {
	return p.retryKept(ctx, id, wait, "api")
}

func (p *Pipeline) retryKept(ctx context.Context, id ActionID, wait time.Duration, purpose string) *Reply {
	shape := outcome.Shape{Method: http.MethodPost, InsideTunnel: true}
	rec, err := p.cfg.Journal.Action(ctx, id)
	switch {
	case errors.Is(err, ErrActionNotFound):
		f := outcome.Facts{Code: outcome.CodeActionNotFound}
		return ownReply(ActionID{}, Record{}, outcome.NewEnvelope("", f, "", outcome.Evidence{}), shape)
	case err != nil:
		p.cfg.Logger.Error("journal cannot be read", slog.String("action", id.String()), slog.Any("err", err))
		return p.retryUnreadable(id, shape)
	}
	now := p.windowNow()
	rec = rec.At(now)
	switch err := rec.MayRepeat(now); {
	case errors.Is(err, ErrLeaseHeld), err == nil && rec.LeaseActive(p.windows().process, now):
		return p.leaseHeld(rec, shape)
	case errors.Is(err, ErrBudgetSpent):
		return p.retryRefused(p.stop(rec, StoppedBudget), StoppedBudget, "", shape)
	case errors.Is(err, ErrKeyExpired):
		return p.retryRefused(p.stop(rec, StoppedKey), StoppedKey, "", shape)
	case err != nil:
		return p.retryRefused(rec, StoppedRejection, "", shape)
	}
	raw, err := p.cfg.Journal.KeptRequest(ctx, id)
	if err != nil {
		if !errors.Is(err, ErrNoRequest) {
			p.cfg.Logger.Error("kept request cannot be read", slog.String("action", id.String()), slog.Any("err", err))
		}
		return p.retryRefused(rec, "request_not_kept", "The request was not kept; send it again with Waybill-Retry-Of: "+id.String()+".", shape)
	}
	s, err := readKept(raw, id)
	if err != nil {
		p.cfg.Logger.Error("kept request cannot be read", slog.String("action", id.String()))
		return p.retryRefused(rec, "request_not_kept", "", shape)
	}
	s.Wait, s.purpose = wait, purpose
	return p.Do(ctx, s)
}

// delay is how long to wait before the next attempt (CONTRACT J4): backoff with jitter,
// and at least the time that the service named.
func delay(rec *Record, r *routes.Retry, now time.Time) time.Duration {
	d := r.Backoff << min(rec.CurrentGeneration()-1, 20)
	if d <= 0 || d > r.Max {
		d = r.Max
	}
	d = d/2 + mrand.N(d/2+1)
	if n := len(rec.Attempts); n > 0 && !r.IgnoreRetryAfter {
		if end := rec.Attempts[n-1].End; end != nil {
			d = max(d, end.RetryAfter-now.Sub(rec.EndedAt))
		}
	}
	return max(d, 0)
}

// fits reports whether an attempt after the delay is still within budget and window; the
// reason of the one that is not.
func fits(rec *Record, at time.Time) (string, bool) {
	if b := rec.Bound.Budget; b != nil && !at.Before(b.Until) {
		return StoppedBudget, false
	}
	if rec.Decision().Step == outcome.StepSameKey && !at.Before(rec.Bound.Key.ExpiresAt) {
		return StoppedKey, false
	}
	return "", true
}

// repeatNow makes the next attempt of the running action for a caller that waits, if
// Decide and the budget allow it (CONTRACT O1). It returns the connection of an attempt
// whose dispatch is on record; nil when reply is the answer. What it returns as reply
// always follows the records.
func (a *action) repeatNow(reply *Reply) (Conn, *Reply) {
	r := a.route.Contract.Retry
	if r == nil {
		return nil, reply
	}
	for {
		rec := reply.Record
		if a.s.purpose != "" || rec.Bound == nil || rec.Bound.Budget == nil || a.waiterLeft() || a.bound() {
			return nil, reply // a signature is for one time
		}
		now := a.p.windowNow()
		err := rec.MayRepeat(now)
		wait := delay(&rec, r, now)
		if err == nil {
			if reason, ok := fits(&rec, now.Add(wait)); !ok {
				return nil, a.stopped(reply, reason)
			}
		}
		switch {
		case errors.Is(err, ErrBudgetSpent):
			return nil, a.stopped(reply, StoppedBudget)
		case errors.Is(err, ErrKeyExpired):
			return nil, a.stopped(reply, StoppedKey)
		case err != nil || !a.pauseFor(wait):
			return nil, reply
		}
		a.further, a.purpose = &rec, "deadline"
		l := &Lease{Generation: rec.CurrentGeneration() + 1, Process: a.p.windows().process, For: a.purpose, Until: a.p.windowNow().Add(leaseTime(&a.route.Limits))}
		receipt, err := a.p.cfg.Journal.Append(context.Background(), Batch{Action: a.id, Events: []Event{{Type: LeaseTaken, At: a.p.windowNow(), Lease: l}}})
		if err != nil {
			return nil, reply // somebody else goes on with it, or nobody can
		}
		a.adopt(receipt.Record, l.Generation)
		ctx, cancel := context.WithTimeout(context.Background(), leaseTime(&a.route.Limits))
		conn, failed := a.connect(ctx)
		if failed == nil {
			failed = a.record(ctx, conn)
		}
		cancel()
		_ = reply.Body.Close()
		if failed == nil {
			return conn, nil
		}
		reply = failed
	}
}

// stopped records why there is no further attempt and gives the answer the advice that
// follows from it (CONTRACT J4).
func (a *action) stopped(reply *Reply, reason string) *Reply {
	rec := a.p.stop(reply.Record, reason)
	if reply.Envelope == nil {
		shape := a.shape(&rec, rec.Facts)
		shape.ReceivedStatus = reply.Status
		reply.Record = rec
		reply.Header.Del("Proxy-Status")
		outcome.Annotate(reply.Header, a.id.String(), rec.Facts, shape, true)
		reply.Header.Del("Retry-After") // nothing is to be waited for any more
		return reply
	}
	_ = reply.Body.Close()
	return a.answer(rec, rec.Facts, "")
}

func (a *action) waiterLeft() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.left
}

// pauseFor waits, unless the caller leaves or the pipeline drains.
func (a *action) pauseFor(d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return !a.waiterLeft()
	case <-a.leaving:
		return false
	case <-a.p.ending:
		return false
	}
}

// background goes on with actions for which nobody waits (CONTRACT O1, J3): those of
// routes with retry.background, also after a restart.
type background struct {
	p       *Pipeline
	mu      sync.Mutex
	due     map[ActionID]*time.Timer
	slots   chan struct{}
	stopped bool
}

// backgroundSlots bounds the repeats that run at once without a caller.
const backgroundSlots = 4

// Background starts repeating unresolved actions of routes with retry.background, those
// that an earlier process left included, until the returned function is called. It is
// called once.
func (p *Pipeline) Background(ctx context.Context) (stop func(), err error) {
	b := &background{p: p, due: make(map[ActionID]*time.Timer), slots: make(chan struct{}, backgroundSlots)}
	ids, err := p.cfg.Journal.KeptActions(ctx)
	if err != nil {
		return nil, fmt.Errorf("dispatch: kept requests: %w", err)
	}
	p.engine.Store(b)
	for _, id := range ids {
		if rec, err := p.cfg.Journal.Action(ctx, id); err == nil {
			b.schedule(rec)
		}
	}
	return func() {
		p.engine.Store(nil)
		b.mu.Lock()
		defer b.mu.Unlock()
		b.stopped = true
		for _, t := range b.due {
			t.Stop()
		}
	}, nil
}

// later hands an action to the background engine, if there is one and the action wants it.
func (p *Pipeline) later(rec Record) {
	if b := p.engine.Load(); b != nil {
		b.schedule(rec)
	}
}

// schedule plans the next attempt, or records that there is none.
func (b *background) schedule(last Record) {
	if !last.Ended || last.Bound == nil || last.Bound.Budget == nil || !last.Bound.Budget.Background || !last.crossed() {
		return
	}
	now, rec := b.p.windowNow(), last // of its own from here on: most records never come here
	route := b.p.binding.Load().Snapshot.Route(rec.Bound.Route)
	if route == nil || route.Contract.Retry == nil || !route.Contract.Retry.Background {
		return // the configuration has changed; the action waits for a caller
	}
	rec = rec.At(now)
	err := rec.MayRepeat(now)
	if err == nil && rec.leftToCaller() {
		b.after(rec.Bound.Budget.Until.Sub(now), rec.ID, b.expire)
		return
	}
	wait := delay(&rec, route.Contract.Retry, now)
	if err == nil {
		if reason, ok := fits(&rec, now.Add(wait)); !ok {
			b.p.stop(rec, reason)
			return
		}
	}
	switch {
	case errors.Is(err, ErrBudgetSpent):
		b.p.stop(rec, StoppedBudget)
		return
	case errors.Is(err, ErrKeyExpired):
		b.p.stop(rec, StoppedKey)
		return
	case err != nil:
		return
	}
	b.after(wait, rec.ID, b.run)
}

// after calls f later, unless something is planned for the action.
func (b *background) after(wait time.Duration, id ActionID, f func(ActionID)) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.stopped || b.due[id] != nil {
		return
	}
	b.due[id] = time.AfterFunc(wait, func() { f(id) })
}

// begin takes what is planned for the action; false: the engine was stopped meanwhile.
func (b *background) begin(id ActionID) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.due, id)
	return !b.stopped
}

// expire records that the budget of an action is over that was left to its caller (J4); its
// request is kept no longer.
func (b *background) expire(id ActionID) {
	defer b.p.survive("a budget's end", id)
	if !b.begin(id) {
		return
	}
	if rec, err := b.p.cfg.Journal.Action(context.Background(), id); err == nil {
		b.schedule(rec)
	}
}

// leftToCaller reports whether only the caller, or a person, repeats the action: it was refused,
// and whoever heard that may send the request again. Nothing would tell that one from ours, unless
// a key does or two are as good as one (CONTRACT O1: one of the two decides).
func (r *Record) leftToCaller() bool {
	return r.Facts.Outcome == outcome.Rejected && !r.Repeatable() && r.Bound.Key == nil && !control.Off("O1-one-repeats")
}

func (b *background) run(id ActionID) {
	b.slots <- struct{}{}
	defer func() { <-b.slots }()
	defer b.p.survive("a repeat", id)
	if !b.begin(id) {
		return
	}
	reply := b.p.retryKept(context.Background(), id, 0, "background")
	_ = reply.Body.Close()
	if rec, err := b.p.cfg.Journal.Action(context.Background(), id); err == nil {
		b.schedule(rec)
	}
}
