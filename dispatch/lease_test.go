package dispatch

import (
	"errors"
	"fmt"
	"testing"
	"time"

	"pgregory.net/rapid"

	"waybill/internal/contract"
	"waybill/outcome"
)

// TestEngineDoesWhatDecideAllows: every outcome, advice and operation. A lease is given only
// where Decide repeats, and for nothing else the journal takes a dispatch (O1, O2).
func TestEngineDoesWhatDecideAllows(t *testing.T) {
	contract.Covers(t, "O1", "O2", "J1", "H7")
	allowed := 0
	for _, o := range outcome.Outcomes() {
		for _, retry := range outcome.Retries() {
			for _, code := range append(outcome.Codes(), outcome.CodeNone) {
				for _, repeatable := range []bool{false, true} {
					for _, keyed := range []bool{false, true} {
						f := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: o, Retry: retry, Code: code}
						r := Record{ID: ActionID{1}, Events: 4, Ended: true, Bound: &Bound{Route: "r", Fingerprint: "sha256:x", Repeatable: repeatable}, Facts: f}
						if keyed {
							r.Bound.Key = &Key{Key: "k", Scope: "s", ExpiresAt: testTime.Add(time.Hour)}
						}
						if o == outcome.NotAttempted {
							r.Refusal = &Ended{Facts: f}
						} else {
							r.Attempts = []Attempt{{N: 1, Ended: true, Facts: f, Dispatch: &Dispatch{}, DispatchSeq: 4, End: &Ended{Facts: f}}}
						}
						d := outcome.Decide(outcome.DecideRecord{InvocationID: r.ID.String(), Outcome: o, Retry: retry, Fingerprint: "sha256:x"}, outcome.Operation{Idempotent: repeatable, Fingerprint: "sha256:x"})
						if got := r.Decision(); got != d {
							t.Fatalf("%+v: decides %v, not %v", f, got, d)
						}
						want := d.Step.Repeats() && !notKept(code) && (d.Step != outcome.StepSameKey || keyed)
						err := r.MayRepeat(testTime)
						leased, lerr := Apply(r, &Event{Type: LeaseTaken, At: testTime, Lease: &Lease{Generation: 2, Process: "p", Until: testTime.Add(time.Minute)}}, 5)
						if (err == nil) != want || (lerr == nil) != want {
							t.Errorf("%+v repeatable=%v keyed=%v: %s, may repeat %v, leased %v", f, repeatable, keyed, d.Step, err, lerr)
							continue
						}
						dispatch := &Event{Type: DispatchStarted, Attempt: 2, At: testTime, Dispatch: &Dispatch{Connection: "c", Unresolved: outcome.Reconcile, Generation: 2}}
						if _, derr := Apply(r, dispatch, 5); derr == nil {
							t.Errorf("%+v: dispatched without a lease", f)
						}
						if want {
							allowed++
							if _, derr := Apply(leased, dispatch, 6); derr != nil {
								t.Errorf("%+v: the lease does not let dispatch: %v", f, derr)
							}
							for _, stopped := range []string{StoppedBudget, StoppedKey, StoppedNotKept} {
								r := r
								r.Stopped = stopped
								if r.MayRepeat(testTime) == nil {
									t.Errorf("%+v: repeated after it was stopped by %s", f, stopped)
								}
							}
						}
					}
				}
			}
		}
	}
	if allowed == 0 {
		t.Error("nothing may be repeated at all")
	}
}

// TestGenerations: LS-01, LS-02, LS-03(a), on the journal's own function.
func TestGenerations(t *testing.T) {
	contract.Covers(t, "J1", "J2", "J5", "K2")
	keyed := natural(PreflightValidated)
	keyed.Bound.Key = &Key{Key: "k", Scope: "s", ExpiresAt: testTime.Add(time.Hour)}
	unknown := func(n int) *Event {
		return &Event{Type: AttemptResolved, Attempt: n, At: testTime, Ended: &Ended{Facts: unresolvedFacts(outcome.SameIdempotencyKey)}}
	}
	lease := func(typ EventType, g int, at time.Duration) *Event {
		return &Event{Type: typ, At: testTime.Add(at), Lease: &Lease{Generation: g, Process: "p", Until: testTime.Add(at + time.Second)}}
	}
	send := func(n, g int, at time.Duration) *Event {
		return &Event{Type: DispatchStarted, Attempt: n, At: testTime.Add(at), Dispatch: &Dispatch{Connection: "c", Unresolved: outcome.SameIdempotencyKey, Generation: g, Until: testTime.Add(at + time.Minute)}}
	}
	refused := func(what string, r Record, ev *Event, want error) {
		t.Helper()
		if after, err := Apply(r, ev, r.LastSeq+1); !errors.Is(err, want) || after.LastSeq != r.LastSeq {
			t.Errorf("%s: %v, want %v", what, err, want)
		}
	}
	r := apply2(t, Record{}, natural(ActionAccepted), keyed, natural(CredentialAuthorized), natural(DispatchStarted))
	refused("a lease on a running action", r, lease(LeaseTaken, 2, 0), ErrLeaseHeld)
	r = apply2(t, r, unknown(1))
	refused("a generation twice", r, lease(LeaseTaken, 1, 0), ErrLeaseHeld)
	refused("a generation left out", r, lease(LeaseTaken, 3, 0), ErrLeaseHeld)
	r = apply2(t, r, lease(LeaseTaken, 2, 0))
	refused("a second worker", r, lease(LeaseTaken, 3, time.Millisecond), ErrLeaseHeld)
	refused("expired, nobody else came: renew", r, lease(LeaseRenewed, 2, 2*time.Second), ErrLeaseLost)
	refused("expired, nobody else came: end", r, lease(LeaseEnded, 2, 2*time.Second), ErrLeaseLost)
	refused("expired, nobody else came: dispatch", r, send(2, 2, 2*time.Second), ErrLeaseLost)
	renewed := apply2(t, r, lease(LeaseRenewed, 2, 500*time.Millisecond))
	apply2(t, renewed, send(2, 2, 1200*time.Millisecond))
	// Overtaken (LS-01): everything under the old number is refused, in every state.
	r = apply2(t, r, lease(LeaseTaken, 3, 2*time.Second))
	old := func(what string, r Record) {
		t.Helper()
		refused(what+": dispatch", r, send(9, 2, 2*time.Second), ErrLeaseLost)
		refused(what+": renew", r, lease(LeaseRenewed, 2, 2*time.Second), ErrLeaseLost)
		refused(what+": end", r, lease(LeaseEnded, 2, 2*time.Second), ErrLeaseLost)
		refused(what+": dispatch as the first", r, send(9, 0, 2*time.Second), ErrLeaseLost)
	}
	old("leased by another", r)
	r = apply2(t, r, send(2, 3, 2*time.Second))
	if r.Lease == nil || !r.Lease.Until.Equal(testTime.Add(62*time.Second)) {
		t.Errorf("J5: a dispatched attempt keeps its lease until its deadline: %+v", r.Lease)
	}
	old("running", r)
	refused("while it runs", r, lease(LeaseTaken, 4, 3*time.Second), ErrLeaseHeld)
	complete := natural(ResponseComplete)
	complete.Attempt = 2
	result := &Event{Type: ResultCommitted, Attempt: 2, At: testTime, Ended: &Ended{Facts: outcome.Success()}, Result: &Result{Status: 201}}
	done := apply2(t, r, complete, result)
	old("finished", done)
	refused("a lease on a finished action", done, lease(LeaseTaken, 4, 3*time.Second), ErrRetryRefused)
	// Late evidence of the first attempt is appended under its number, and undoes nothing (J5, K2).
	late := natural(ResponseComplete)
	rejected := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Rejected, Retry: outcome.AfterCorrection, Code: outcome.CodeRemoteRejected}
	after := apply2(t, done, late, &Event{Type: AttemptResolved, Attempt: 1, At: testTime, Ended: &Ended{Facts: rejected}})
	if after.Facts != outcome.Success() || after.Attempts[0].Facts != rejected {
		t.Errorf("late evidence: %+v", after)
	}
	// Another process: what the first one held is void, its numbers are not (LS-02).
	again := apply2(t, r, unknown(2), lease(LeaseTaken, 4, 3*time.Second))
	other := lease(LeaseTaken, 5, 3*time.Second)
	other.Lease.Process = "another"
	if again = apply2(t, again, other); again.Generation != 5 {
		t.Errorf("generation %d", again.Generation)
	}
	refused("the first process", again, send(3, 4, 3*time.Second), ErrLeaseLost)
}

// TestLeaseEndsWithItsReason: what comes to light between a lease and its dispatch counts: a
// query may have told somebody that nothing was done, who then began anew (K2); and the
// service may have forgotten the key (I5). A budget that the lease itself used up stops nothing.
func TestLeaseEndsWithItsReason(t *testing.T) {
	contract.Covers(t, "I5", "K2", "J1")
	keyed := natural(PreflightValidated)
	keyed.Bound.Key = &Key{Key: "k", Scope: "s", ExpiresAt: testTime.Add(time.Hour)}
	keyed.Bound.Budget = &Budget{Attempts: 2, Until: testTime.Add(time.Hour)}
	leased := func(at time.Duration) Record {
		r := apply2(t, Record{}, natural(ActionAccepted), keyed, natural(CredentialAuthorized), natural(DispatchStarted),
			&Event{Type: AttemptResolved, Attempt: 1, At: testTime, Ended: &Ended{Facts: unresolvedFacts(outcome.SameIdempotencyKey)}})
		return apply2(t, r, &Event{Type: LeaseTaken, At: testTime.Add(at), Lease: &Lease{Generation: 2, Process: "p", Until: testTime.Add(at + time.Minute)}})
	}
	send := func(at time.Duration) *Event {
		return &Event{Type: DispatchStarted, Attempt: 2, At: testTime.Add(at), Dispatch: &Dispatch{Connection: "c", Unresolved: outcome.SameIdempotencyKey, Generation: 2}}
	}
	found := func(o outcome.Outcome) *Event {
		return &Event{Type: Reconciled, At: testTime, Resolution: &Resolution{Facts: resolutionFacts(o), Source: outcome.RemoteQuery, Covers: 1}}
	}
	for _, o := range []outcome.Outcome{outcome.Rejected, outcome.Committed} {
		r := apply2(t, leased(0), found(o))
		if _, err := Apply(r, send(time.Second), r.LastSeq+1); !errors.Is(err, ErrRetryRefused) {
			t.Errorf("%s by a query, and sent all the same: %v", o, err)
		}
	}
	r := leased(time.Hour - time.Second)
	if _, err := Apply(r, send(time.Hour), r.LastSeq+1); !errors.Is(err, ErrKeyExpired) {
		t.Errorf("sent with a key that may be forgotten: %v", err)
	}
	apply2(t, r, send(time.Hour-time.Millisecond))
	apply2(t, leased(0), found(outcome.Unknown), &Event{Type: RetryStopped, At: testTime, Ended: &Ended{Reason: StoppedBudget}}, send(time.Second))
}

// worker is one of several that repeat an action in the model test.
type worker struct {
	process    string
	generation int
	attempt    int
}

// TestWorkersModel: workers that take leases, stop, go on late, lose their process and see
// clocks jump, in any order. The oracle counts dispatches by itself: never two of one
// generation, never one by a worker that was overtaken, never more than the budget, and
// nothing that ended a budget gives it back (J1-J4, I5).
func TestWorkersModel(t *testing.T) {
	contract.Covers(t, "J1", "J2", "J3", "J4", "I5", "F2", "T4")
	rapid.Check(t, func(t *rapid.T) {
		budget := rapid.IntRange(1, 5).Draw(t, "budget")
		bound := natural(PreflightValidated)
		start := testTime
		bound.Bound.Key = &Key{Key: "k", Scope: "s", ExpiresAt: start.Add(20 * time.Minute)}
		bound.Bound.Budget = &Budget{Attempts: budget, Until: start.Add(15 * time.Minute)}
		var r Record
		seq := uint64(0)
		apply := func(ev *Event) error {
			seq++
			next, err := Apply(r, ev, seq)
			r = next
			return err
		}
		for _, ev := range []*Event{natural(ActionAccepted), bound, natural(CredentialAuthorized), natural(DispatchStarted)} {
			if err := apply(ev); err != nil {
				t.Fatal(err)
			}
		}
		if err := apply(&Event{Type: AttemptResolved, Attempt: 1, At: start, Ended: &Ended{Facts: unresolvedFacts(outcome.SameIdempotencyKey)}}); err != nil {
			t.Fatal(err)
		}
		now, latest := start, start
		process, processes := "p0", 0
		workers := make([]worker, 4)
		highest := 1                        // generation that was handed out
		dispatched := map[int]bool{1: true} // generations that crossed the boundary
		running := 0
		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				w := &workers[rapid.IntRange(0, 3).Draw(t, "worker")]
				g := r.CurrentGeneration() + 1
				if rapid.IntRange(0, 5).Draw(t, "stale") == 0 {
					g = rapid.IntRange(1, 6).Draw(t, "generation")
				}
				err := apply(&Event{Type: LeaseTaken, At: now, Lease: &Lease{Generation: g, Process: process, Until: now.Add(time.Minute)}})
				if err == nil {
					if g <= highest {
						t.Fatalf("generation %d was handed out again (J1)", g)
					}
					if g > budget || !latest.Before(start.Add(15*time.Minute)) {
						t.Fatalf("generation %d of a budget of %d at %s (J3)", g, budget, latest.Sub(start))
					}
					highest = g
					*w = worker{process: process, generation: g, attempt: len(r.Attempts) + 1}
				}
			},
			"dispatch": func(t *rapid.T) {
				w := workers[rapid.IntRange(0, 3).Draw(t, "worker")]
				n := w.attempt // of one that holds no lease: none, and refused like a foreign number
				if rapid.Bool().Draw(t, "fresh number") {
					n = len(r.Attempts) + 1
				}
				if err := apply(&Event{Type: DispatchStarted, Attempt: n, At: now, Dispatch: &Dispatch{Connection: "c", Unresolved: outcome.SameIdempotencyKey, Generation: w.generation}}); err == nil {
					switch {
					case w.generation == 0:
						t.Fatal("dispatched without a lease (J1)")
					case dispatched[w.generation]:
						t.Fatalf("generation %d was dispatched twice", w.generation)
					case w.generation != highest:
						t.Fatalf("generation %d was dispatched after %d was handed out (J2)", w.generation, highest)
					case running != 0:
						t.Fatalf("attempt %d runs already (J1)", running)
					}
					dispatched[w.generation], running = true, n
				}
			},
			"give up": func(t *rapid.T) {
				w := workers[rapid.IntRange(0, 3).Draw(t, "worker")]
				f := outcome.Facts{Phase: outcome.ConnectionSetup, Outcome: outcome.NotAttempted, Retry: outcome.Backoff, Code: outcome.CodeConnectionRefused}
				_ = apply(&Event{Type: LeaseEnded, At: now, Lease: &Lease{Generation: w.generation, Process: w.process}, Ended: &Ended{Facts: f}})
			},
			"resolve": func(t *rapid.T) {
				if running == 0 {
					return
				}
				if err := apply(&Event{Type: AttemptResolved, Attempt: running, At: now, Ended: &Ended{Facts: unresolvedFacts(outcome.SameIdempotencyKey)}}); err != nil {
					t.Fatal(err)
				}
				running = 0
			},
			"crash": func(t *rapid.T) {
				processes++
				process = fmt.Sprint("p", processes)
				if ev, open := Interrupt(&r, now); open {
					if err := apply(&ev); err != nil {
						t.Fatal(err)
					}
				}
				running = 0 // the workers stay: they may be another host's
			},
			"clock": func(t *rapid.T) {
				now = now.Add(time.Duration(rapid.Int64Range(-int64(10*time.Minute), int64(10*time.Minute)).Draw(t, "jump")))
			},
			"stop": func(t *rapid.T) {
				if rapid.IntRange(0, 9).Draw(t, "rarely") == 0 {
					_ = apply(&Event{Type: RetryStopped, At: now, Ended: &Ended{Reason: StoppedBudget}})
				}
			},
			"": func(t *rapid.T) {
				if r.LatestAt.After(latest) {
					latest = r.LatestAt
				}
				if r.Facts.Outcome != outcome.Unknown || !r.crossed() {
					t.Fatalf("F2: %+v", r.Facts)
				}
				if n := len(dispatched); n > budget && n > 1 {
					t.Fatalf("%d dispatches of a budget of %d", n, budget)
				}
				if b := r.Bound.Budget; b.Attempts != budget || !b.Until.Equal(start.Add(15*time.Minute)) || r.CurrentGeneration() != highest {
					t.Fatalf("J3: %+v, generation %d after %d", b, r.CurrentGeneration(), highest)
				}
				if r.Stopped != "" && (r.MayRepeat(now) == nil || r.Facts.Retry != outcome.Reconcile && r.Ended) {
					t.Fatalf("J4: %+v", r.Facts)
				}
			},
		})
	})
}
