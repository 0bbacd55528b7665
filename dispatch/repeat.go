package dispatch

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"mime"
	"net/http"
	"strings"
	"sync"
	"time"

	"waybill/internal/control"
	"waybill/internal/killpoint"
	"waybill/metrics"
	"waybill/outcome"
	"waybill/routes"
)

// maxKeyBytes bounds an idempotency key, as the services do.
const maxKeyBytes = 255

// windowClock judges windows, leases and budgets (CONTRACT I5, J3): it never goes back,
// neither with the system's clock nor behind what is on record, and it runs on while the
// system's clock stands still.
type windowClock struct {
	process string
	base    time.Time
	wall    time.Time // what the system's clock said at since
	since   time.Time // carries the monotonic clock
}

// moments remembers when something was last so of an action, by the monotonic clock.
type moments struct {
	mu sync.Mutex
	at map[ActionID]moment
}

type moment struct {
	at   time.Time // carries the monotonic clock
	keep time.Duration
}

// fewMoments is from where on those that are over are looked for and left out.
const fewMoments = 64

// note is told that it is so now, and for how long somebody may ask.
func (m *moments) note(id ActionID, keep time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if n := len(m.at); n >= fewMoments && n&(n-1) == 0 {
		maps.DeleteFunc(m.at, func(_ ActionID, one moment) bool { return time.Since(one.at) > one.keep })
	}
	if m.at == nil {
		m.at = make(map[ActionID]moment)
	}
	m.at[id] = moment{time.Now(), keep}
}

func (m *moments) since(id ActionID) (age time.Duration, known bool) {
	m.mu.Lock()
	defer m.mu.Unlock()
	one, known := m.at[id]
	return time.Since(one.at), known
}

// endedFor is how long ago an action ended. A clock that jumps while the process runs makes it
// no older (CONTRACT M3, T5); one that was set back makes it younger.
func (p *Pipeline) endedFor(rec *Record) time.Duration {
	if age, known := p.endings.since(rec.ID); known {
		return age
	}
	if w := p.windows(); !rec.EndedAt.After(w.wall) {
		return w.wall.Sub(rec.EndedAt) + time.Since(w.since) // it had ended by then
	}
	return p.cfg.Clock.Now().Sub(rec.EndedAt)
}

func (p *Pipeline) windows() *windowClock {
	p.windowOnce.Do(func() {
		now := p.cfg.Clock.Now()
		w := &windowClock{process: rand.Text(), base: now, wall: now.Round(0), since: time.Now()}
		n := 0
		for rec, err := range p.cfg.Journal.Actions(context.Background(), Filter{Limit: 64}) {
			if n++; err != nil || n > 64 {
				break
			}
			if rec.LatestAt.After(w.base) {
				w.base = rec.LatestAt
			}
		}
		p.window = w
	})
	return p.window
}

func (p *Pipeline) windowNow() time.Time {
	w := p.windows()
	at := w.base.Add(time.Since(w.since))
	if now := p.cfg.Clock.Now(); now.After(at) {
		return now
	}
	return at
}

// conditions notes a precondition that the service enforces, and counts it as a way to
// repeat where the route declares that (CONTRACT I7).
func (a *action) conditions() {
	if a.conditional = routes.Conditional(a.out.Header); a.conditional != "" && a.route.Contract.Conditional {
		a.repeatable = true
	}
}

// repeats finds out whether the submission is a repeat: by Waybill-Retry-Of, or by the
// idempotency key of a configured contract (CONTRACT I2, I3, I9). It sets a.further when
// an attempt is to be added to an earlier action, and a.early when that action's record is
// the answer.
func (a *action) repeats(ctx context.Context) *Refusal {
	var contract *routes.Idempotency
	if !a.repeatable && !control.Off("I1-key-needs-a-contract") {
		contract = a.route.Key(a.s.Method)
	} else if control.Off("I1-key-needs-a-contract") {
		contract = a.route.Contract.Idempotency
	}
	var key *Key
	if contract != nil {
		var refused *Refusal
		if key, refused = a.readKey(contract); refused != nil {
			return refused
		}
	}
	if a.s.RetryOf != "" {
		a.accepted.RequestID = "" // the action has a token of its own
		a.retryOf(ctx, contract, key)
		return nil
	}
	if contract == nil {
		return nil
	}
	if key == nil {
		if contract.Maker == routes.MadeByCallerOrWaybill {
			a.setKey(contract, a.newKey(contract, a.id.String(), "waybill"))
			a.out.Header[contract.Header] = []string{a.key.Key}
		}
		return nil
	}
	rec, err := a.p.cfg.Journal.Keyed(ctx, a.s.Caller.ID, key.Scope, key.Key)
	switch {
	case errors.Is(err, ErrActionNotFound):
		a.setKey(contract, key)
		return nil
	case err != nil:
		return a.unreadable(err)
	}
	return a.holder(rec, contract, key)
}

func (a *action) setKey(_ *routes.Idempotency, key *Key) {
	a.key = key
	a.advice = outcome.ByContract(a.repeatable, true)
}

func (a *action) newKey(c *routes.Idempotency, key, maker string) *Key {
	in, scope := "header:"+c.Header, c.Scope
	if c.Field != "" {
		in = "body:" + c.Field
	}
	if scope == "" {
		scope = a.route.Name
	}
	return &Key{Key: key, In: in, Scope: scope + " " + a.out.Target.Origin(), Maker: maker, ExpiresAt: a.p.windowNow().Add(c.Window()), Source: c.Source, Reviewed: c.Reviewed}
}

// readKey returns the key that the caller sent, nil for none.
func (a *action) readKey(c *routes.Idempotency) (*Key, *Refusal) {
	at, v := "request.headers."+strings.ToLower(c.Header), ""
	if c.Field != "" {
		at, v = "request.body."+c.Field, a.bodyKey(c.Field)
	} else {
		values := a.out.Header[c.Header]
		if len(values) > 1 {
			return nil, refusal(outcome.CodeInvalidRequest, at, "repeated", "The field may stand once only.")
		}
		v = strings.TrimSpace(strings.Join(values, ""))
	}
	if v == "" {
		return nil, nil //nolint:nilnil // no key and no refusal
	}
	for i := range len(v) {
		if v[i] < ' ' || v[i] > '~' || len(v) > maxKeyBytes {
			return nil, refusal(outcome.CodeInvalidRequest, at, "bad_idempotency_key", "An idempotency key has 1 to 255 printable ASCII characters.")
		}
	}
	return a.newKey(c, v, "caller"), nil
}

// bodyKey reads a string of a JSON body; "" when there is none.
func (a *action) bodyKey(path string) string {
	media, _, err := mime.ParseMediaType(a.out.Header.Get("Content-Type"))
	if a.body == nil || err != nil || media != "application/json" && !strings.HasSuffix(media, "+json") {
		return ""
	}
	var v any
	if json.NewDecoder(a.body.reader()).Decode(&v) != nil {
		return ""
	}
	for name := range strings.SplitSeq(path, ".") {
		m, ok := v.(map[string]any)
		if !ok {
			return ""
		}
		v = m[name]
	}
	s, _ := v.(string)
	return s
}

// holder decides what becomes of a submission whose key an earlier action holds.
func (a *action) holder(rec Record, c *routes.Idempotency, key *Key) *Refusal {
	now := a.p.windowNow()
	rec = rec.At(now)
	refuse := func(code outcome.Code, reason, detail string) *Refusal {
		field := "request.headers." + strings.ToLower(c.Header)
		if c.Field != "" {
			field = "request.body." + c.Field
		}
		r := refusal(code, field, reason, detail)
		r.Earlier = rec.ID
		return r
	}
	inProgress := func() *Refusal {
		return refuse(outcome.CodeInvocationInProgress, "key_in_progress", "A request with this key is on its way; ask again for its result.")
	}
	same := rec.Bound.Fingerprint == a.print
	active := !rec.Ended || rec.LeaseActive(a.p.windows().process, now)
	switch {
	case !active && a.released(&rec, c, same, now):
		key.Replaces = rec.ID.String()
		a.setKey(c, key)
		return nil
	case !same && !control.Off("I3-same-key-same-request"):
		return refuse(outcome.CodeIdempotencyMismatch, "key_of_another_request", "The key was sent with another request: method, target, content type and the bytes of the body must be the same, as a new multipart boundary or another order of JSON members are not.")
	case active:
		return inProgress()
	}
	switch err := rec.MayRepeat(now); {
	case err == nil && rec.tooEarly(now):
		return a.recordedAnswer(rec, refuse)
	case err == nil:
		a.further, a.purpose = &rec, "caller"
		a.key = rec.Bound.Key
		a.advice = outcome.ByContract(a.repeatable, true)
		return nil
	case errors.Is(err, ErrLeaseHeld):
		return inProgress()
	case rec.Facts.Outcome != outcome.Unknown:
		return a.recordedAnswer(rec, refuse)
	case errors.Is(err, ErrBudgetSpent):
		rec = a.p.stop(rec, StoppedBudget)
		a.early = a.recordedReply(rec)
		return nil
	case !now.Before(rec.later(rec.Bound.Key.ExpiresAt)) || errors.Is(err, ErrKeyExpired):
		a.p.stop(rec, StoppedKey)
		return refuse(outcome.CodeIdempotencyExpired, "key_expired", "The service may have forgotten the key; what the earlier request did must be found out first.")
	default:
		r := refuse(outcome.CodeDuplicateSuspected, "duplicate", "The request with this key has an outcome that is not settled, and repeating it is not safe.")
		r.Field = "request.headers.waybill-supersedes"
		return r
	}
}

// released reports whether an ended action gives its key to a new one.
func (a *action) released(rec *Record, c *routes.Idempotency, same bool, now time.Time) bool {
	named := a.s.Supersedes == rec.ID.String()
	switch rec.Facts.Outcome {
	case outcome.Rejected:
		// The service did nothing, and there is no answer to give again: somebody found that
		// out afterwards, or no answer was kept.
		d := rec.Deciding()
		found := len(rec.Resolutions) > 0 || d != nil && d.End != nil && (d.End.Source == outcome.OperatorAttested || d.End.Source == outcome.RemoteQuery)
		return same && (named || found || rec.Result == nil && rec.Facts.Retry == outcome.AfterCorrection) || !same && a.forgotten(rec, c, now)
	case outcome.Committed:
		return !same && a.forgotten(rec, c, now)
	case outcome.Unknown:
		// Visibly unsafe, as the caller wanted it (O3); inside the window the key is safe.
		return same && named && rec.MayRepeat(now) != nil
	case outcome.NotAttempted:
		return true
	case outcome.OutcomeInvalid:
		return false
	default:
		return false
	}
}

// forgotten reports whether the service's retention is wholly over.
func (a *action) forgotten(rec *Record, c *routes.Idempotency, now time.Time) bool {
	return !now.Before(rec.Bound.Key.ExpiresAt.Add(2 * c.Margin))
}

// tooEarly reports whether a refusal named a time that has not come yet (CONTRACT G5).
func (r *Record) tooEarly(now time.Time) bool {
	d := r.Deciding()
	return r.Facts.Outcome == outcome.Rejected && d != nil && d.End != nil && now.Before(r.EndedAt.Add(d.End.RetryAfter))
}

// recordedAnswer hands out what is on record, or says that it is there (CONTRACT I9).
func (a *action) recordedAnswer(rec Record, refuse func(outcome.Code, string, string) *Refusal) *Refusal {
	if a.route.Contract.OnRepeat == routes.RepeatRefuse {
		return refuse(outcome.CodeInvocationExists, "key_finished", "The request with this key has been carried out; fetch its result.")
	}
	a.early = a.recordedReply(rec)
	return nil
}

// recordedReply is the recorded answer of an earlier action, marked as such. Nothing is
// dispatched and nothing recorded: it is as if the result were fetched (CONTRACT H3, I9).
func (a *action) recordedReply(rec Record) *Reply {
	a.id = rec.ID
	a.p.cfg.Metrics.Replayed(rec.routeName())
	res, body, err := a.p.cfg.Journal.OpenResult(context.Background(), rec.ID)
	var reply *Reply
	switch {
	case err == nil:
		_ = body.Close()
		reply = &Reply{ID: rec.ID, Record: rec, Status: res.Status, Header: rec.ResultHeader(&res), Trailer: http.Header(res.Trailer).Clone(), ContentLength: res.Bytes,
			Body: &storedBody{open: func() (io.ReadCloser, error) {
				_, body, err := a.p.cfg.Journal.OpenResult(context.Background(), rec.ID)
				return body, err
			}}}
		reply.HandedOver = a.handedOver(true)
		a.p.Relayed(&rec)
	case errors.Is(err, ErrResultDropped):
		// Never executed again for its answer's sake (H7).
		f := outcome.Facts{Phase: outcome.ResultDelivery, Outcome: rec.Facts.Outcome, Retry: outcome.Never, Code: outcome.CodeResultExpired}
		reply = a.answer(rec, f, "")
	default:
		f := rec.Shown()
		if known := f.Outcome == outcome.Committed || f.Outcome == outcome.Rejected; known && (f.IsSuccess() || outcome.Lookup(f.Code).Answering == outcome.AnswerRelayed) {
			// Later evidence resolved it, say: there is no answer, and nothing to wait for.
			f = outcome.Facts{Phase: outcome.ResultDelivery, Outcome: f.Outcome, Retry: outcome.Never, Code: outcome.CodeResultNotRetained}
			if !errors.Is(err, ErrNoResult) {
				f.Retry, f.Code = outcome.Reconcile, outcome.CodeInternal
			}
		}
		reply = a.answer(rec, f, "")
	}
	reply.Header.Set(outcome.HeaderReplayed, rec.ID.String())
	a.p.cfg.Logger.Info("recorded answer", slog.String("action", rec.ID.String()), slog.String("route", a.route.Name))
	return reply
}

// retryOf checks a submission that names the action it repeats (DESIGN section 4).
func (a *action) retryOf(ctx context.Context, c *routes.Idempotency, key *Key) {
	id, err := ParseActionID(a.s.RetryOf)
	var rec Record
	if err == nil {
		rec, err = a.p.cfg.Journal.Action(ctx, id)
	}
	if err == nil && !a.s.Admin && rec.Caller != a.s.Caller.ID {
		err = ErrActionNotFound // another's is as good as none (V4)
	}
	switch {
	case errors.Is(err, ErrActionNotFound) || errors.Is(err, ErrBadActionID):
		f := outcome.Facts{Code: outcome.CodeActionNotFound}
		a.early = ownReply(ActionID{}, Record{}, outcome.NewEnvelope("", f, "", outcome.Evidence{}), a.shape(&Record{}, f))
		return
	case err != nil:
		a.early = a.p.retryUnreadable(id, a.shape(&Record{ID: id}, outcome.Facts{}))
		return
	}
	now := a.p.windowNow()
	rec = rec.At(now)
	refuse := func(reason, detail string) {
		a.early = a.p.retryRefused(rec, reason, detail, a.shape(&rec, rec.Facts))
	}
	b := rec.Bound
	switch {
	case b == nil || b.Route != a.route.Name || b.Fingerprint != a.print:
		refuse("request_changed", "A further attempt sends the same request: method, target, content type and the bytes of the body.")
		return
	case rec.Repeatable() && !a.repeatable:
		refuse(StoppedContract, "The route no longer says that the request is safe to repeat.")
		return
	case b.Key != nil && (c == nil || a.newKey(c, "", "").In != b.Key.In || a.newKey(c, "", "").Scope != b.Key.Scope):
		refuse(StoppedContract, "The route no longer says that the service keeps the key.")
		return
	case b.Key != nil && key != nil && key.Key != b.Key.Key, b.Key == nil && key != nil:
		refuse("key_changed", "A further attempt carries the same idempotency key.")
		return
	}
	switch err := rec.MayRepeat(now); {
	case errors.Is(err, ErrLeaseHeld), err == nil && rec.LeaseActive(a.p.windows().process, now):
		a.early = a.p.leaseHeld(rec, a.shape(&rec, rec.Facts))
		return
	case errors.Is(err, ErrBudgetSpent):
		rec = a.p.stop(rec, StoppedBudget)
		refuse(StoppedBudget, "")
		return
	case errors.Is(err, ErrKeyExpired):
		rec = a.p.stop(rec, StoppedKey)
		refuse(StoppedKey, "")
		return
	case err != nil:
		refuse(StoppedRejection, "")
		return
	case rec.tooEarly(now):
		refuse("too_early", "The service named a time before which it is not to be asked again.")
		return
	}
	a.further, a.key = &rec, b.Key
	if a.purpose = a.s.purpose; a.purpose == "" {
		a.purpose = "caller"
	}
	a.advice = outcome.ByContract(a.repeatable, b.Key != nil)
	if b.Key != nil && c.Header != "" {
		a.out.Header[c.Header] = []string{b.Key.Key}
	}
}

// retryRefused answers for a further attempt that is not made: with the action's own
// facts (table U). Nothing changed, so nothing is recorded.
func (p *Pipeline) retryRefused(rec Record, reason, detail string, shape outcome.Shape) *Reply {
	f := rec.Shown()
	f.Code = outcome.CodeRetryRefused
	ev := rec.Evidence()
	ev.Reason = reason
	return ownReply(rec.ID, rec, outcome.NewEnvelope(rec.ID.String(), f, detail, ev), shape)
}

// retryUnreadable refuses to repeat an action of which the journal cannot say anything: it
// may have been sent, and is not absent (CONTRACT M7, F2).
func (p *Pipeline) retryUnreadable(id ActionID, shape outcome.Shape) *Reply {
	return p.retryRefused(unreadRecord(id), "journal_unreadable", "", shape)
}

func unreadRecord(id ActionID) Record {
	return Record{ID: id, Facts: outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile}, Ended: true}
}

// reread is the action as the journal has it now, an unknown one where that cannot be read.
func (p *Pipeline) reread(id ActionID) Record {
	rec, err := p.cfg.Journal.Action(context.Background(), id)
	if err != nil {
		p.cfg.Logger.Error("journal cannot be read", slog.String("action", id.String()), slog.Any("err", err))
		return unreadRecord(id)
	}
	return rec
}

func (p *Pipeline) leaseHeld(rec Record, shape outcome.Shape) *Reply {
	p.cfg.Metrics.Lease(metrics.LeaseRefused)
	f := rec.Shown()
	f.Code = outcome.CodeLeaseHeld
	return ownReply(rec.ID, rec, outcome.NewEnvelope(rec.ID.String(), f, "", rec.Evidence()), shape)
}

// stop records that no further attempt is made, and why (CONTRACT J4, I5, H7). It returns
// the record after it, or the one before when that could not be written.
func (p *Pipeline) stop(rec Record, reason string) Record {
	if rec.Stopped != "" {
		return rec
	}
	ev := Event{Type: RetryStopped, At: p.windowNow(), Ended: &Ended{Reason: reason}}
	receipt, err := p.cfg.Journal.Append(context.Background(), Batch{Action: rec.ID, Events: []Event{ev}})
	if err != nil {
		p.cfg.Logger.Warn("the end of repeats cannot be recorded", slog.String("action", rec.ID.String()), slog.Any("err", err))
		return rec
	}
	return receipt.Record
}

// leaseTime is how long a further attempt may take up to its dispatch.
func leaseTime(l *routes.Limits) time.Duration {
	return (l.Connect + time.Second) * time.Duration(max(l.Tries, 1))
}

// lease takes the next generation of the action that this submission repeats, durably,
// before anything is done for it (CONTRACT J1). From then on the attempt is that action's.
func (a *action) lease() *Reply {
	rec := a.further
	now := a.p.windowNow()
	l := &Lease{Generation: rec.CurrentGeneration() + 1, Process: a.p.windows().process, For: a.purpose, Until: now.Add(leaseTime(&a.route.Limits))}
	receipt, err := a.p.cfg.Journal.Append(context.Background(), Batch{Action: rec.ID, Events: []Event{{Type: LeaseTaken, At: now, Lease: l}}})
	killpoint.At("lease-taken")
	switch {
	case err == nil:
	case errors.Is(err, ErrLeaseHeld) || errors.Is(err, ErrRetryRefused):
		// Somebody was faster: the record that the journal has now says what is to be done.
		a.further = nil
		earlier := a.p.reread(rec.ID)
		if a.s.RetryOf != "" {
			if errors.Is(err, ErrLeaseHeld) {
				return a.p.leaseHeld(earlier, a.shape(&earlier, earlier.Facts))
			}
			return a.p.retryRefused(earlier, StoppedRejection, "", a.shape(&earlier, earlier.Facts))
		}
		r := refusal(outcome.CodeInvocationInProgress, "", "key_in_progress", "A request with this key is on its way; ask again for its result.")
		r.Earlier = earlier.ID
		return a.refuse(r)
	default:
		// Whether the lease is on record or not: nothing is handed over here. What the action
		// is by now another worker may have decided (F2).
		a.p.cfg.Logger.Error("lease cannot be recorded", slog.String("action", rec.ID.String()), slog.Any("err", err))
		now := a.p.reread(rec.ID)
		return a.p.retryRefused(now, "journal_unavailable", "", a.shape(&now, now.Facts))
	}
	a.adopt(receipt.Record, l.Generation)
	return nil
}

// adopt makes what follows an attempt of rec.
func (a *action) adopt(rec Record, generation int) {
	a.further, a.generation = &rec, generation
	if a.id != rec.ID { // a caller who leaves may be reading it
		a.id = rec.ID
		a.trace()
	}
	a.recorded = true
	a.accepted.Relaxed = false
	a.base = 0
	for i := range rec.Attempts {
		a.base = max(a.base, rec.Attempts[i].N)
	}
	a.tries, a.followed, a.late, a.setup = a.base, 0, nil, nil
	a.events = nil
}

// refuseFurther ends a further attempt before the boundary: it is not_attempted, the
// action keeps its outcome, evidence and code (CONTRACT A9).
func (a *action) refuseFurther(r *Refusal) *Reply {
	a.tried(r)
	end := &Ended{Facts: r.Facts, Reason: r.Reason, Field: r.Field, Stage: r.Stage, Credential: r.credential}
	a.events = append(a.events, Event{Type: LeaseEnded, At: a.p.windowNow(), Lease: &Lease{Generation: a.generation, Process: a.p.windows().process}, Ended: end})
	receipt, err := a.p.cfg.Journal.Append(context.Background(), Batch{Action: a.id, Events: a.events})
	a.events = nil
	switch {
	case errors.Is(err, ErrLeaseLost):
		return a.leaseLost(r.Phase, r.Detail)
	case err != nil:
		a.p.cfg.Logger.Error("the end of an attempt cannot be recorded", slog.String("action", a.id.String()), slog.Any("err", err))
		return a.asRecorded("The further attempt ended before it was sent; the action is what it was.")
	}
	rec := receipt.Record.At(a.p.windowNow())
	detail := r.Detail
	if detail == "" && rec.Facts.Code != r.Code {
		detail = "The further attempt ended before it was sent: " + r.Code.String() + "."
	}
	reply := a.answer(rec, rec.Facts, detail)
	reply.Gone = r.Code == outcome.CodeCallerCancelled
	a.log(rec, reply.Status)
	return reply
}

// tried adds the attempt that a refusal ended, unless connect noted it already.
func (a *action) tried(r *Refusal) {
	kept := a.events[:0:0]
	last := 0
	for i := range a.events {
		if a.events[i].Type == AttemptFailed {
			kept, last = append(kept, a.events[i]), a.events[i].Attempt
		}
	}
	a.events = kept
	if a.tries == a.base {
		a.tries++
	}
	if last != a.tries {
		f := r.Facts
		a.add(Event{Type: AttemptFailed, Attempt: a.tries, Ended: &Ended{Facts: f, Stage: r.Stage, Reason: r.Reason, Source: outcome.TransportObserved}})
	}
}

// leaseLost records that the worker was overtaken before it sent anything (CONTRACT J2,
// A9): under a number of its own, since the other one goes on counting.
func (a *action) leaseLost(phase outcome.Phase, detail string) *Reply {
	a.p.cfg.Metrics.Lease(metrics.LeaseLost)
	for range 8 {
		rec, err := a.p.cfg.Journal.Action(context.Background(), a.id)
		if err != nil {
			break
		}
		n := 0
		for i := range rec.Attempts {
			n = max(n, rec.Attempts[i].N)
		}
		retry := rec.Facts.Retry
		if retry == outcome.RetryInvalid {
			retry = outcome.Reconcile
		}
		f := outcome.Facts{Phase: phase, Outcome: outcome.NotAttempted, Retry: retry, Code: outcome.CodeLeaseLost}
		ev := Event{Type: AttemptFailed, Attempt: n + 1, At: a.now(), Ended: &Ended{Facts: f, Reason: "lease_lost"}}
		if _, err := a.p.cfg.Journal.Append(context.Background(), Batch{Action: a.id, Events: []Event{ev}}); err == nil || !errors.Is(err, ErrIllegalTransition) {
			break
		}
	}
	a.p.cfg.Logger.Warn("a further attempt lost its lease", slog.String("action", a.id.String()), slog.Int("generation", a.generation))
	if detail == "" {
		detail = "The further attempt was overtaken and nothing of it was sent."
	}
	return a.asRecorded(detail)
}

// asRecorded answers with what the journal says of the action now: nothing was handed
// over here, but another worker, or whoever sends what a person approved, may have carried
// the action on (A9, F2). The answer is never a 202, which clients take for the result (L7).
func (a *action) asRecorded(detail string) *Reply {
	rec, err := a.p.cfg.Journal.Action(context.Background(), a.id)
	if err != nil {
		// What the action was before is no answer: the other may have sent it since.
		f, _ := outcome.Of(outcome.CodeJournalIndeterminate)
		return a.unrecorded(f, "journal_unreadable")
	}
	rec = rec.At(a.p.windowNow())
	switch {
	case rec.Ended && rec.Facts.Outcome != outcome.Unknown && (rec.Result != nil || rec.Facts.IsSuccess()):
		return a.recordedReply(rec)
	case rec.AwaitsApproval():
		return a.stillPending(rec)
	case !rec.Ended && a.generation > 0:
		return a.p.leaseHeld(rec, a.shape(&rec, rec.Facts))
	}
	return a.answer(rec, rec.Facts, detail)
}

// lostKey answers a submission whose key another one took first, in the very transaction
// that would have sent it (CONTRACT I9).
func (a *action) lostKey(earlier ActionID) *Reply {
	code, reason, detail := outcome.CodeInvocationInProgress, "key_in_progress", "A request with this key is on its way; ask again for its result."
	if rec, err := a.p.cfg.Journal.Action(context.Background(), earlier); err == nil && rec.Bound != nil && rec.Bound.Fingerprint != a.print {
		code, reason, detail = outcome.CodeIdempotencyMismatch, "key_of_another_request", "The key was sent with another request."
	}
	r := refusal(code, "", reason, detail)
	r.Earlier = earlier
	return a.refuse(r)
}

// bound is what PREFLIGHT_VALIDATED says: key, window and budget stand in it before the
// first byte leaves (CONTRACT I2, J3).
func (a *action) binds() *Bound {
	b := &Bound{Route: a.route.Name, Snapshot: a.binding.Snapshot.Digest(), Fingerprint: a.print, Repeatable: a.repeatable, BodyBytes: a.out.Length,
		Key: a.key, Conditional: a.conditional, Recall: a.recall, Approval: a.asks}
	if r := a.route.Contract.Retry; r != nil && a.s.Exec == nil && !a.asks && (a.repeatable || a.key != nil || len(a.route.Contract.RefusedBeforeExecution) > 0) {
		b.Budget = &Budget{Attempts: r.Attempts, Until: a.p.windowNow().Add(r.Total), Background: r.Background && a.out.Upgrade == ""}
	}
	return b
}

// sameCredential reports whether a further attempt goes to the same account (CONTRACT I1).
// Versions change; ids stand for accounts.
func (a *action) sameCredential() bool {
	was, is := a.further.Credential, a.credential
	if !a.further.crossed() || was == nil && is == nil {
		return true
	}
	return was != nil && is != nil && was.ID == is.ID
}
