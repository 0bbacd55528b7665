package dispatch

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"strings"
	"time"

	"waybill/internal/control"
	"waybill/internal/killpoint"
	"waybill/outcome"
	"waybill/routes"
)

// Why an action cannot be reconciled. Nothing was sent.
var (
	// ErrNothingToReconcile: the action is resolved, or nothing was dispatched.
	ErrNothingToReconcile = errors.New("dispatch: nothing to reconcile")
	// ErrActionActive: an attempt of it runs.
	ErrActionActive = errors.New("dispatch: the action is active")
	// ErrNoQuery: its route has no reconcile query.
	ErrNoQuery = errors.New("dispatch: the route has no reconcile query")
)

// QueryError says that the query of an action cannot be made: a value that it names is
// not on record.
type QueryError struct{ Value string }

func (e *QueryError) Error() string {
	return fmt.Sprintf("dispatch: the query needs %s, which is not on record", e.Value)
}

// maxAnswer bounds the answer of a query that is read.
const maxAnswer = 4 << 20

// Reconcile asks the remote side what became of an action, by the query of its route
// (CONTRACT K6), and records what it says. A query that proves nothing is recorded too,
// and leaves the action as it was. Two at once are one query. Errors: those above,
// *QueryError, ErrActionNotFound, and those of the journal.
func (p *Pipeline) Reconcile(ctx context.Context, id ActionID) (Record, error) {
	f := &p.follow
	f.mu.Lock()
	if f.asking == nil {
		f.asking = make(map[ActionID]*asked)
	}
	one := f.asking[id]
	if one == nil {
		one = &asked{done: make(chan struct{})}
		f.asking[id] = one
		f.mu.Unlock()
		// Whoever asked may leave; what the remote side says counts all the same.
		one.err = errQueryBroken
		go func() {
			defer func() {
				f.mu.Lock()
				delete(f.asking, id)
				f.mu.Unlock()
				close(one.done)
			}()
			defer p.survive("a query", id)
			one.rec, one.err = p.reconcile(context.WithoutCancel(ctx), id)
		}()
	} else {
		f.mu.Unlock()
	}
	select {
	case <-one.done:
		return one.rec, one.err
	case <-ctx.Done():
		return Record{}, context.Cause(ctx)
	}
}

// errQueryBroken: the query ended in a panic, which says nothing of the action.
var errQueryBroken = errors.New("dispatch: the query could not be made")

type asked struct {
	done chan struct{}
	rec  Record
	err  error
}

// AskMore reports whether a reconcile query could still say something about it.
func (r *Record) AskMore() bool {
	if !r.Dispatched() || r.Tunnel != nil || r.follows() || r.Settled() {
		return false
	}
	f := r.resolved()
	return f.Outcome == outcome.Unknown || f.Outcome == outcome.Committed && f.Retry == outcome.Reconcile
}

func (p *Pipeline) reconcile(ctx context.Context, id ActionID) (Record, error) {
	rec, err := p.cfg.Journal.Action(ctx, id)
	if err != nil {
		return Record{}, err
	}
	if rec.Pending() {
		return p.poll(ctx, rec)
	}
	switch {
	case rec.running() != nil || !rec.Ended && rec.Dispatched():
		return rec, ErrActionActive
	case !rec.AskMore():
		return rec, ErrNothingToReconcile
	case rec.Bound == nil:
		return rec, ErrNoQuery
	case rec.Bound.Recall != nil && rec.Bound.Recall.Rule != "":
		return p.confirm(ctx, &rec)
	}
	route := p.routeNamed(rec.Bound.Route)
	if route == nil || route.Contract.Reconcile == nil {
		return rec, ErrNoQuery
	}
	seen := p.follow.firstSeen(id)
	q := route.Contract.Reconcile
	path, query, hasQuery, err := p.fill(ctx, &rec, q.Get)
	if err != nil {
		return rec, err
	}
	covers := rec.lastDispatched()
	s := p.query(&rec, LinkReconcile, path, query, hasQuery, q.Headers)
	asked := p.cfg.Clock.Now()
	ans := p.ask(ctx, s, route.Limits.Timeout)
	if ans.notMade {
		return rec, fmt.Errorf("%w: %s", ErrNotWritten, ans.reason)
	}
	return p.reconciled(ctx, &rec, covers, ans.id, judge(q, ans, late(&rec, q, asked, seen)))
}

// reconciled records what a query says.
func (p *Pipeline) reconciled(ctx context.Context, rec *Record, covers int, query ActionID, res Resolution) (Record, error) {
	id := rec.ID
	res.Covers, res.Query, res.At = covers, query.String(), p.cfg.Clock.Now()
	killpoint.At("reconcile-asked")
	receipt, err := p.cfg.Journal.Append(ctx, Batch{Action: id, Events: []Event{{Type: Reconciled, At: p.cfg.Clock.Now(), Resolution: &res}}})
	if err != nil {
		return *rec, err
	}
	p.cfg.Logger.Info("reconciled", slog.String("action", id.String()), slog.String("query", res.Query), slog.String("outcome", res.Outcome.String()), slog.String("rule", res.Rule), slog.Any("reason", res.Reason))
	return receipt.Record, nil
}

// routeNamed is the route of that name in force now.
func (p *Pipeline) routeNamed(name string) *routes.Route {
	for _, r := range p.binding.Load().Snapshot.Routes() {
		if r.Name == name {
			return r
		}
	}
	return nil
}

// fill renders a template with what is on record of the action.
func (p *Pipeline) fill(ctx context.Context, rec *Record, text string) (path, query string, hasQuery bool, err error) {
	t, err := routes.ParseValueTemplate(text)
	if err != nil {
		return "", "", false, err
	}
	var body *routes.Document
	var header http.Header
	load := func() {
		if body != nil {
			return
		}
		body = &routes.Document{}
		res, r, err := p.cfg.Journal.OpenResult(ctx, rec.ID)
		if err != nil {
			return
		}
		defer func() { _ = r.Close() }()
		header = http.Header(res.Header)
		if raw, err := io.ReadAll(io.LimitReader(r, maxAnswer)); err == nil {
			if raw, ok := decoded(header, raw); ok {
				*body = routes.ParseDocument(raw)
			}
		}
	}
	path, query, hasQuery, missing := t.Render(func(v routes.Value) (string, bool) {
		switch v.From {
		case "action":
			return rec.ID.String(), true
		case "key":
			if rec.Bound == nil || rec.Bound.Key == nil {
				return "", false
			}
			return rec.Bound.Key.Key, true
		case "marker":
			if rec.Bound == nil || rec.Bound.Recall == nil {
				return "", false
			}
			return rec.Bound.Recall.Marker, rec.Bound.Recall.Marker != ""
		case "response.header":
			load()
			if len(header[v.Name]) != 1 {
				return "", false
			}
			return header[v.Name][0], true
		case "response.json":
			load()
			return jsonText(*body, v.Name)
		}
		if rec.Bound == nil || rec.Bound.Recall == nil {
			return "", false
		}
		value, ok := rec.Bound.Recall.Values[v.String()]
		return value, ok
	})
	if missing != nil {
		return "", "", false, &QueryError{Value: missing.String()}
	}
	return path, query, hasQuery, nil
}

// query is the submission of a query to the origin of the action, as its caller.
func (p *Pipeline) query(rec *Record, kind LinkKind, path, query string, hasQuery bool, headers map[string]string) *Submission {
	scheme, rest, _ := strings.Cut(rec.Target, "://")
	authority, _, _ := strings.Cut(rest, "/")
	s := &Submission{
		Caller: Caller{ID: rec.Caller}, Method: http.MethodGet, Scheme: scheme, Authorities: Authorities{Host: authority},
		RawPath: path, RawQuery: query, HasQuery: hasQuery, Header: make(http.Header), Protocol: "HTTP/1.1",
		Internal: &Internal{Link: Link{Kind: kind, Of: rec.ID.String()}},
	}
	if rec.Bound != nil && rec.Bound.Recall != nil {
		s.Caller.Name = rec.Bound.Recall.CallerName
	}
	for k, v := range headers {
		s.Header.Set(k, v)
	}
	if s.Header.Get("Accept") == "" {
		s.Header.Set("Accept", "application/json")
	}
	return s
}

// answered is what came of a query.
type answered struct {
	id      ActionID
	status  int // 0: no complete answer
	header  http.Header
	doc     routes.Document
	reason  string // why there is none
	notMade bool   // the proxy itself could not take it on; nothing is recorded of it
	final   bool   // another query would fare no better
}

// ask carries one query through the pipeline and reads its answer.
func (p *Pipeline) ask(ctx context.Context, s *Submission, limit time.Duration) answered {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	reply := p.Do(ctx, s)
	raw, err := io.ReadAll(io.LimitReader(reply.Body, maxAnswer+1))
	_ = reply.Body.Close()
	reply.HandedOver(nil)
	a := answered{id: reply.ID}
	if env := reply.Envelope; env != nil {
		a.failed(env)
		return a
	}
	switch {
	case err != nil:
		a.reason = "answer_incomplete" // G2
		return a
	case len(raw) > maxAnswer:
		a.reason = "answer_too_large"
		return a
	}
	raw, ok := decoded(reply.Header, raw)
	if !ok {
		a.reason = "answer_encoded"
		return a
	}
	a.status, a.header, a.doc = reply.Status, reply.Header, routes.ParseDocument(raw)
	return a
}

// failed takes why there is no answer.
func (a *answered) failed(env *outcome.Envelope) {
	a.reason = "query_failed"
	if env.Error == nil {
		return
	}
	a.reason = strings.ToLower(env.Error.Code.String())
	switch env.Error.Code {
	case outcome.CodeDraining, outcome.CodeJournalUnavailable, outcome.CodeJournalIndeterminate, outcome.CodeRateLimited:
		a.notMade = true
	}
	a.final = env.Error.Outcome == outcome.NotAttempted && env.Error.Retry != outcome.Backoff && env.Error.Phase == outcome.Validation
}

// late reports whether an effect of the last attempt would show by now. Both the clock and
// this process's own time must say so: a clock that jumps makes no operation unseen (M3).
func late(rec *Record, q *routes.Reconcile, asked, seen time.Time) bool {
	if control.Off("K6-visibility-delay") {
		return true
	}
	return asked.Sub(rec.EndedAt) >= q.VisibleAfter && time.Since(seen) >= q.VisibleAfter
}

// judge maps the answer of a query to an outcome (CONTRACT K6). late: what was done shows
// by now. What no rule takes, or two take differently, proves nothing.
func judge(q *routes.Reconcile, ans answered, late bool) Resolution {
	res := Resolution{Facts: unresolvedFacts(outcome.Reconcile), Source: outcome.RemoteQuery, Status: ans.status, Reason: ans.reason}
	switch {
	case ans.status == 0:
		return res
	case routes.TellsNothing(ans.status):
		res.Reason = "status_tells_nothing"
		return res
	}
	committed := routes.AnyHolds(q.CommittedWhen, ans.status, ans.doc)
	rejected := routes.AnyHolds(q.RejectedWhen, ans.status, ans.doc)
	absent := routes.AnyHolds(q.NotFoundWhen, ans.status, ans.doc)
	switch {
	case committed && (rejected || absent), rejected && absent:
		res.Reason = "rules_contradict"
	case committed:
		res.Facts, res.Rule = resolutionFacts(outcome.Committed), "committed_when"
	case rejected:
		res.Facts, res.Rule = resolutionFacts(outcome.Rejected), "rejected_when"
	case absent && !late:
		res.Rule, res.Reason = "not_found_when", "not_visible_yet"
	case absent && q.NotFoundRejects:
		res.Facts, res.Rule = resolutionFacts(outcome.Rejected), "not_found_when"
	case absent:
		res.Rule, res.Reason = "not_found_when", "not_found"
	default:
		res.Reason = "no_rule"
	}
	return res
}

// Attestation is an operator's word about an action (CONTRACT K5).
type Attestation struct {
	Outcome  outcome.Outcome `json:"outcome"` // committed or rejected
	Operator string          `json:"operator"`
	Reason   string          `json:"reason"`
}

// maxWords bounds what an operator writes, in bytes.
const maxWords = 1 << 10

// Attest records it. What is known already is not taken back: ErrIllegalTransition.
func (p *Pipeline) Attest(ctx context.Context, id ActionID, at Attestation) (Record, error) {
	if at.Outcome != outcome.Committed && at.Outcome != outcome.Rejected || at.Operator == "" || at.Reason == "" || len(at.Operator) > 128 || len(at.Reason) > maxWords {
		return Record{}, fmt.Errorf("%w: an attestation names an outcome (committed or rejected), an operator and a reason", ErrIllegalTransition)
	}
	now := p.cfg.Clock.Now()
	res := &Resolution{Facts: resolutionFacts(at.Outcome), Source: outcome.OperatorAttested, Operator: at.Operator, Reason: at.Reason, At: now}
	return p.attach(ctx, id, Event{Type: Attested, At: now, Resolution: res})
}

// Evidence is what one journal knows of an action, for another one (CONTRACT K4).
type Evidence struct {
	Version int             `json:"version"` // 1
	Origin  string          `json:"origin"`  // the journal's identity
	Action  ActionID        `json:"action"`
	Seq     uint64          `json:"seq"` // its place in that journal
	Outcome outcome.Outcome `json:"outcome"`
	Source  outcome.Source  `json:"source"`
	// Fingerprint of the request: evidence about another request is refused.
	Fingerprint string `json:"fingerprint,omitempty"`
	Status      int    `json:"status,omitempty"`
	Operator    string `json:"operator,omitempty"`
	Reason      string `json:"reason,omitempty"`
}

// EvidenceVersion is that of Evidence.
const EvidenceVersion = 1

// ExportEvidence returns what a record proves, or false when it proves nothing that
// another journal could use.
func ExportEvidence(rec *Record, origin string) (Evidence, bool) {
	f := rec.resolved()
	if f.Outcome != outcome.Committed && f.Outcome != outcome.Rejected {
		return Evidence{}, false
	}
	ev := rec.Evidence()
	out := Evidence{Version: EvidenceVersion, Origin: origin, Action: rec.ID, Seq: rec.LastSeq, Outcome: f.Outcome, Source: ev.Source, Fingerprint: ev.Fingerprint, Status: ev.ReceivedStatus}
	if res := rec.settlement(); res != nil && f == res.Facts {
		out.Seq, out.Operator, out.Reason, out.Status = res.Seq, res.Operator, res.Reason, res.Status
	}
	return out, out.Source != ""
}

// Import records evidence from another journal: behind what is on record, never between
// (CONTRACT K4). The same piece twice is taken once.
func (p *Pipeline) Import(ctx context.Context, e Evidence) (Record, error) {
	if e.Version != EvidenceVersion || e.Action.IsZero() || e.Origin == "" || len(e.Origin) > 128 || e.Seq == 0 || len(e.Operator) > 128 || len(e.Reason) > maxWords ||
		e.Outcome != outcome.Committed && e.Outcome != outcome.Rejected {
		return Record{}, fmt.Errorf("%w: evidence names its journal, its place there, an action and an outcome (committed or rejected)", ErrIllegalTransition)
	}
	rec, err := p.cfg.Journal.Action(ctx, e.Action)
	if err != nil {
		return Record{}, err
	}
	if rec.Bound != nil && e.Fingerprint != "" && rec.Bound.Fingerprint != e.Fingerprint {
		return rec, fmt.Errorf("%w: the evidence is about another request", ErrIllegalTransition)
	}
	for i := range rec.Resolutions {
		if r := &rec.Resolutions[i]; r.Origin == e.Origin && r.OriginSeq == e.Seq {
			return rec, nil
		}
	}
	now := p.cfg.Clock.Now()
	res := &Resolution{Facts: resolutionFacts(e.Outcome), Source: e.Source, Origin: e.Origin, OriginSeq: e.Seq, Status: e.Status, Operator: e.Operator, Reason: e.Reason, At: now}
	return p.attach(ctx, e.Action, Event{Type: EvidenceImported, At: now, Resolution: res})
}

func (p *Pipeline) attach(ctx context.Context, id ActionID, ev Event) (Record, error) {
	rec, err := p.cfg.Journal.Action(ctx, id)
	if err != nil {
		return Record{}, err
	}
	if rec.running() != nil {
		return rec, ErrActionActive
	}
	ev.Resolution.Covers = rec.lastDispatched()
	receipt, err := p.cfg.Journal.Append(context.WithoutCancel(ctx), Batch{Action: id, Events: []Event{ev}})
	if err != nil {
		return rec, err
	}
	return receipt.Record, nil
}
