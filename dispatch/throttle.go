package dispatch

import (
	"context"
	"fmt"
	"sync"
	"time"

	"waybill/internal/control"
	"waybill/metrics"
	"waybill/outcome"
)

// throttle bounds what one caller does on one route (CONTRACT V4, code RATE_LIMITED):
// how many requests in a time, and how many at once. Nothing of it outlives the
// process: it protects, it proves nothing.
type throttle struct {
	mu   sync.Mutex
	uses map[use]*usage
}

type use struct{ caller, route string }

type usage struct {
	// full is when the allowance will be whole again (the theoretical arrival time of the
	// generic cell rate algorithm, ITU-T I.371).
	full time.Time
	busy int
}

// maxUses is from when on what is idle is forgotten.
const maxUses = 4096

// take counts a request in, or returns how long to wait before the next try.
func (t *throttle) take(u use, l *limitsOf, now time.Time) (wait time.Duration, ok bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.uses) >= maxUses {
		for k, v := range t.uses {
			if v.busy == 0 && !v.full.After(now) {
				delete(t.uses, k)
			}
		}
	}
	g := t.uses[u]
	if g == nil {
		g = &usage{}
		if t.uses == nil {
			t.uses = make(map[use]*usage)
		}
		t.uses[u] = g
	}
	if l.concurrent > 0 && g.busy >= l.concurrent {
		return time.Second, false
	}
	if l.rate > 0 {
		each := l.per / time.Duration(l.rate)
		full := g.full
		if full.Before(now) {
			full = now
		}
		full = full.Add(each)
		if over := full.Sub(now) - each*time.Duration(max(l.burst, 1)); over > 0 {
			return over, false
		}
		g.full = full
	}
	g.busy++
	return 0, true
}

func (t *throttle) release(u use) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if g := t.uses[u]; g != nil && g.busy > 0 {
		g.busy--
	}
}

type limitsOf struct {
	rate, burst, concurrent int
	per                     time.Duration
}

// limit refuses a request beyond the route's limits for its caller. It comes before the
// body is read. What Waybill itself asks for an action counts for nobody.
func (a *action) limit(context.Context) *Refusal {
	l := a.route.Limits
	if l.Rate == 0 && l.Concurrent == 0 || a.s.Internal != nil || control.Off("V4-limits-per-caller") {
		return nil
	}
	u := use{a.s.Caller.ID, a.route.Name}
	wait, ok := a.p.throttle.take(u, &limitsOf{rate: l.Rate, burst: l.Burst, concurrent: l.Concurrent, per: l.RatePer}, a.now())
	if ok {
		a.slot = &u
		return nil
	}
	a.retryAfter = wait
	counted := metrics.LimitCallerRate
	reason, detail := "rate", fmt.Sprintf("This route takes %d requests in %s from one caller.", l.Rate, l.RatePer)
	if wait == time.Second && (l.Rate == 0 || a.p.throttle.full(u, l.Concurrent)) {
		counted = metrics.LimitCallerConcurrency
		reason, detail = "concurrent", fmt.Sprintf("This route takes %d requests at once from one caller.", l.Concurrent)
	}
	a.p.cfg.Metrics.Limited(counted)
	return refusal(outcome.CodeRateLimited, "", reason, detail)
}

// vacate gives the place among the concurrent ones free, once. It belongs to the
// goroutine that has the action.
func (a *action) vacate() {
	if a.slot != nil {
		a.p.throttle.release(*a.slot)
		a.slot = nil
	}
}

func (t *throttle) full(u use, concurrent int) bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	g := t.uses[u]
	return concurrent > 0 && g != nil && g.busy >= concurrent
}
