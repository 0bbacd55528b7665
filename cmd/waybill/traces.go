package main

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"waybill/dispatch"
	"waybill/internal/telemetry"
)

// traces makes spans of what the journal made durable: the pipeline knows nothing of
// them. The nil traces makes none.
type traces struct {
	out *telemetry.Exporter

	mu      sync.Mutex
	started map[attemptKey]time.Time // attempts that run
	// parents are the callers' spans of actions that have not ended. They are in memory
	// only: an action that a restart finds open is a trace of its own.
	parents map[dispatch.ActionID]telemetry.Parent
}

type attemptKey struct {
	action  dispatch.ActionID
	attempt int
}

// maxStarted bounds what is remembered of attempts, and of actions, whose end is never seen.
const maxStarted = 1 << 16

// Whose trace a span belongs to (--traces-parent).
const (
	traceOfCaller = "caller"
	traceOfItself = "none"
)

// openTraces starts the exporter; endpoint "" is none. parent is traceOfCaller or
// traceOfItself.
func (s *server) openTraces(ctx context.Context, endpoint, parent string, build buildInfo) error {
	if endpoint == "" {
		return nil
	}
	var last time.Time
	var mu sync.Mutex
	out, err := telemetry.Start(ctx, endpoint, build.Version, func() {
		mu.Lock()
		defer mu.Unlock()
		if time.Since(last) > time.Minute {
			last = time.Now()
			s.log.Warn("traces cannot be exported")
		}
	})
	if err != nil {
		return fail(exitUsage, "--traces: %w", err)
	}
	s.traces = &traces{out: out, started: map[attemptKey]time.Time{}}
	if parent == traceOfCaller {
		s.traces.parents = map[dispatch.ActionID]telemetry.Parent{}
	}
	s.closers = append(s.closers, func() error { s.traces.close(s.log); return nil })
	return nil
}

// close sends what waits, within three seconds.
func (t *traces) close(log *slog.Logger) {
	if t == nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	if t.out.Close(ctx) != nil {
		log.Warn("the last traces were not exported")
	}
}

// listens reports whether the callers' traceparent fields are of interest.
func (t *traces) listens() bool { return t != nil && t.parents != nil }

// begun takes the traceparent field of an action, or of a further attempt of it.
func (t *traces) begun(id dispatch.ActionID, field string) {
	parent, ok := telemetry.ParseParent(field)
	if !ok {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.parents) >= maxStarted {
		// Those of refusals that left no record stay behind (M6): any one makes room.
		for other := range t.parents {
			delete(t.parents, other)
			break
		}
	}
	t.parents[id] = parent
}

// parent is the caller's span of an action; with ended it is forgotten.
func (t *traces) parent(id dispatch.ActionID, ended bool) telemetry.Parent {
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.parents[id]
	if ended {
		delete(t.parents, id)
	}
	return p
}

// applied looks at what was just made durable. It never waits for the exporter.
func (t *traces) applied(before, after *dispatch.Record, events []dispatch.Event) {
	if t == nil {
		return
	}
	v := after.View()
	for i := range events {
		if e := &events[i]; e.Attempt > 0 {
			t.attempt(after, v.Route, e)
		}
	}
	if after.Ended && (before == nil || !before.Ended) {
		t.out.Record(telemetry.Span{
			Action: after.ID, Parent: t.parent(after.ID, true), ID: v.InvocationID, Route: v.Route, Phase: v.Phase, Outcome: v.Outcome, Retry: v.Retry, Code: v.Code,
			Start: after.AcceptedAt, End: after.EndedAt,
		})
	}
}

func (t *traces) attempt(after *dispatch.Record, route string, e *dispatch.Event) {
	key := attemptKey{after.ID, e.Attempt}
	ends := false
	for i := range after.Attempts {
		if a := &after.Attempts[i]; a.N == e.Attempt && a.Ended && endsAttempt(e.Type) {
			ends = true
			t.mu.Lock()
			start, ok := t.started[key]
			delete(t.started, key)
			t.mu.Unlock()
			if !ok {
				start = after.AcceptedAt
			}
			t.out.Record(telemetry.Span{
				Action: after.ID, Parent: t.parent(after.ID, false), ID: after.ID.String(), Attempt: e.Attempt, Route: route, Phase: a.Facts.Phase.String(), Outcome: a.Facts.Outcome.String(),
				Code: a.Facts.Code.String(), Stage: string(a.Stage), Start: start, End: e.At,
			})
		}
	}
	if ends {
		return
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if _, ok := t.started[key]; !ok && e.Type == dispatch.DispatchStarted && len(t.started) < maxStarted {
		t.started[key] = e.At
	}
}

// endsAttempt reports whether an event of this type ends its attempt.
func endsAttempt(typ dispatch.EventType) bool {
	switch typ { //nolint:exhaustive // the others do not
	case dispatch.AttemptFailed, dispatch.ActionRefused, dispatch.ResultCommitted, dispatch.AttemptResolved, dispatch.AttemptInterrupted, dispatch.LeaseEnded:
		return true
	}
	return false
}
