package dispatch

import (
	"container/heap"
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"waybill/outcome"
	"waybill/routes"
)

// followUps is what a pipeline knows of unresolved actions and jobs.
type followUps struct {
	mu     sync.Mutex
	asking map[ActionID]*asked
	// seen says when this process first knew that an action is unresolved, on its own
	// clock that does not jump.
	seen map[ActionID]time.Time
}

// maxSeen bounds what is remembered; beyond it an action counts as just seen.
const maxSeen = 100_000

func (f *followUps) firstSeen(id ActionID) time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	if t, ok := f.seen[id]; ok {
		return t
	}
	now := time.Now()
	if f.seen == nil || len(f.seen) >= maxSeen {
		f.seen = make(map[ActionID]time.Time)
	}
	f.seen[id] = now
	return now
}

// again forgets when an action was seen: a further attempt of it began.
func (f *followUps) again(id ActionID) {
	f.mu.Lock()
	delete(f.seen, id)
	f.mu.Unlock()
}

const (
	followWorkers = 4
	// followWindow is how far back a start looks for unresolved actions.
	followWindow = 7 * 24 * time.Hour
	followQueue  = 4096
)

// due is one action and when it is looked at next.
type due struct {
	id   ActionID
	at   time.Time
	slot int
}

type dueHeap []*due

func (h dueHeap) Len() int           { return len(h) }
func (h dueHeap) Less(i, j int) bool { return h[i].at.Before(h[j].at) }
func (h dueHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i]; h[i].slot, h[j].slot = i, j }
func (h *dueHeap) Push(x any) {
	d := x.(*due) //nolint:forcetypeassert // the heap holds nothing else
	d.slot = len(*h)
	*h = append(*h, d)
}

func (h *dueHeap) Pop() any {
	old := *h
	d := old[len(old)-1]
	*h = old[:len(old)-1]
	return d
}

// Follow asks in the background what became of unresolved actions (CONTRACT K6), and
// follows jobs to their end (A7), until ctx ends: those that the journal holds at the
// start, and those that come. How often was asked, and when, is on record: a restart
// begins no budget anew (J3).
func (p *Pipeline) Follow(ctx context.Context) {
	changed := make(chan ActionID, followQueue)
	lost := make(chan struct{}, 1)
	pending := func(rec *Record) bool {
		return rec.Pending() || rec.Ended && rec.Bound != nil && rec.Bound.Recall != nil && rec.AskMore()
	}
	stop := p.cfg.Journal.Watch(func(rec *Record) bool { return rec.Reopened && !rec.Ended || pending(rec) }, func(rec Record) {
		if rec.Reopened && !rec.Ended {
			p.follow.again(rec.ID)
		}
		if !pending(&rec) {
			return
		}
		p.follow.firstSeen(rec.ID)
		select {
		case changed <- rec.ID:
		default:
			select {
			case lost <- struct{}{}:
			default:
			}
		}
	})
	defer stop()
	var workers sync.WaitGroup
	defer workers.Wait()
	work, done := make(chan ActionID), make(chan ActionID)
	for range followWorkers {
		workers.Go(func() {
			for id := range work {
				p.followOne(ctx, id)
				done <- id
			}
		})
	}
	defer close(work)
	p.followAll(ctx, changed, lost, work, done)
}

func (p *Pipeline) followAll(ctx context.Context, changed <-chan ActionID, lost chan struct{}, work chan<- ActionID, done <-chan ActionID) {
	var queue dueHeap
	waiting, busy := make(map[ActionID]*due), make(map[ActionID]bool)
	put := func(rec *Record) {
		at, ok := p.nextLook(rec)
		if !ok || busy[rec.ID] {
			return
		}
		if d := waiting[rec.ID]; d != nil {
			d.at = at
			heap.Fix(&queue, d.slot)
			return
		}
		d := &due{id: rec.ID, at: at}
		waiting[rec.ID] = d
		heap.Push(&queue, d)
	}
	one := func(id ActionID) {
		if rec, err := p.cfg.Journal.Action(ctx, id); err == nil {
			put(&rec)
		}
	}
	scan := func() {
		if !p.followsAnything() {
			return
		}
		since := p.cfg.Clock.Now().Add(-followWindow)
		for rec, err := range p.cfg.Journal.Actions(ctx, Filter{Doubtful: true, Since: since}) {
			if err != nil {
				if !errors.Is(err, ErrQuarantined) && ctx.Err() == nil {
					p.cfg.Logger.Error("unresolved actions cannot be read", slog.Any("err", err))
				}
				break
			}
			p.follow.firstSeen(rec.ID)
			put(&rec)
		}
	}
	scan()
	timer := time.NewTimer(0)
	defer timer.Stop()
	defer func() {
		for len(busy) > 0 {
			delete(busy, <-done)
		}
	}()
	for {
		for len(queue) > 0 && len(busy) < followWorkers && !queue[0].at.After(p.cfg.Clock.Now()) {
			d := heap.Pop(&queue).(*due) //nolint:forcetypeassert // the heap holds nothing else
			delete(waiting, d.id)
			busy[d.id] = true
			work <- d.id
		}
		wait := time.Hour
		if len(queue) > 0 && len(busy) < followWorkers {
			wait = max(queue[0].at.Sub(p.cfg.Clock.Now()), time.Millisecond)
		}
		timer.Reset(wait)
		select {
		case <-ctx.Done():
			return
		case id := <-changed:
			one(id)
		case id := <-done:
			delete(busy, id)
			one(id)
		case <-lost:
			scan()
		case <-timer.C:
		}
	}
}

// querySchedule is how the action's query is made; nil: there is none.
func (p *Pipeline) querySchedule(rec *Record) *routes.Reconcile {
	if rec.Bound.Recall.Rule != "" {
		return p.confirmSchedule(rec)
	}
	if route := p.routeNamed(rec.Bound.Route); route != nil {
		return route.Contract.Reconcile
	}
	return nil
}

// followsAnything reports whether any route asks for follow-up work.
func (p *Pipeline) followsAnything() bool {
	for _, r := range p.binding.Load().Snapshot.Routes() {
		if r.Contract.Reconcile != nil || r.Contract.Async != nil || r.Confirms() {
			return true
		}
	}
	return false
}

// nextLook says when an action is looked at next; false: not any more.
func (p *Pipeline) nextLook(rec *Record) (time.Time, bool) {
	now := p.cfg.Clock.Now()
	if rec.Pending() {
		if rec.Job.Next.After(now.Add(24 * time.Hour)) {
			return now, true // the clock went back
		}
		return rec.Job.Next, true
	}
	if !rec.Ended || rec.Bound == nil || rec.Bound.Recall == nil || !rec.AskMore() {
		return time.Time{}, false
	}
	q := p.querySchedule(rec)
	if q == nil || q.Manual || rec.Asked >= q.Tries {
		return time.Time{}, false
	}
	from := rec.EndedAt
	if rec.Asked > 0 {
		from = rec.AskedAt
	}
	at := from.Add(backoff(q.Every, q.MaxEvery, rec.Asked))
	if at.After(now.Add(q.MaxEvery)) {
		at = now.Add(q.Every) // the clock went back
	}
	return at, true
}

// backoff doubles from every to most.
func backoff(every, most time.Duration, n int) time.Duration {
	d := every
	for range n {
		if d >= most/2 {
			return most
		}
		d *= 2
	}
	return min(d, most)
}

// followPause is how long an action rests whose query the proxy itself could not take on.
const followPause = time.Second

func (p *Pipeline) followOne(ctx context.Context, id ActionID) {
	defer p.survive("following an action", id)
	_, err := p.Reconcile(ctx, id)
	var incomplete *QueryError
	switch {
	case err == nil, ctx.Err() != nil, errors.Is(err, ErrNothingToReconcile), errors.Is(err, ErrActionActive):
		return
	case errors.As(err, &incomplete):
		p.unanswerable(ctx, id, incomplete)
		return
	}
	p.cfg.Logger.Debug("an action could not be followed", slog.String("action", id.String()), slog.Any("err", err))
	t := time.NewTimer(followPause)
	defer t.Stop()
	select {
	case <-t.C:
	case <-ctx.Done():
	}
}

// unanswerable records that a query cannot be made, so that it is not tried for ever.
func (p *Pipeline) unanswerable(ctx context.Context, id ActionID, q *QueryError) {
	now := p.cfg.Clock.Now()
	res := Resolution{Facts: unresolvedFacts(outcome.Reconcile), Source: outcome.RemoteQuery, Reason: "value_not_on_record", Rule: q.Value, At: now}
	if _, err := p.cfg.Journal.Append(ctx, Batch{Action: id, Events: []Event{{Type: Reconciled, At: now, Resolution: &res}}}); err != nil {
		p.cfg.Logger.Debug("a query that cannot be made is not recorded", slog.String("action", id.String()), slog.Any("err", err))
	}
}
