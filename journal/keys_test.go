package journal

import (
	"context"
	"errors"
	"sync"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/outcome"
)

func evKeyed(key string) dispatch.Event {
	ev := evBound("f-" + key)
	ev.Bound.Key = &dispatch.Key{Key: key, In: "header:Idempotency-Key", Scope: "account https://a", Maker: "caller", ExpiresAt: time.Now().Add(time.Hour)}
	ev.Bound.Budget = &dispatch.Budget{Attempts: 3, Until: time.Now().Add(time.Hour), Background: true}
	return ev
}

func keyedBatch(id dispatch.ActionID, key string) dispatch.Batch {
	return dispatch.Batch{Action: id, Events: []dispatch.Event{evAccepted("ci", ""), evKeyed(key), evCredential(), evDispatch(1)}, Request: []byte("the request of " + key)}
}

// TestKeyIsTakenOnce: of many actions that want a key one is written, the others learn its
// name; a kept request is there for as long as it is needed, also after a restart.
func TestKeyIsTakenOnce(t *testing.T) {
	contract.Covers(t, "I2", "I9", "J3")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	ctx := context.Background()
	var (
		wg     sync.WaitGroup
		mu     sync.Mutex
		won    []dispatch.ActionID
		losers []dispatch.ActionID
	)
	for range 16 {
		wg.Go(func() {
			id := newID()
			receipt, err := j.Append(ctx, keyedBatch(id, "k"))
			mu.Lock()
			defer mu.Unlock()
			switch {
			case err == nil:
				won = append(won, id)
			case errors.Is(err, dispatch.ErrKeyTaken) && errors.Is(err, dispatch.ErrNotWritten):
				losers = append(losers, receipt.Earlier)
			default:
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if len(won) != 1 || len(losers) != 15 {
		t.Fatalf("%d took the key", len(won))
	}
	id := won[0]
	for _, l := range losers {
		if l != id {
			t.Errorf("told %s, not %s", l, id)
		}
	}
	if rec, err := j.Keyed(ctx, "ci", "account https://a", "k"); err != nil || rec.ID != id {
		t.Errorf("%s %v", rec.ID, err)
	}
	for _, c := range [][3]string{{"eve", "account https://a", "k"}, {"ci", "account https://b", "k"}, {"ci", "account https://a", "l"}} {
		if _, err := j.Keyed(ctx, c[0], c[1], c[2]); !errors.Is(err, dispatch.ErrActionNotFound) {
			t.Errorf("%v: %v", c, err)
		}
	}
	unknown := facts(outcome.RemoteExecution, outcome.Unknown, outcome.SameIdempotencyKey, outcome.CodeRemoteOutcomeUnknown)
	mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{evResolved(1, unknown)}})
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = openTest(t, dir, nil)
	if raw, err := j.KeptRequest(ctx, id); err != nil || string(raw) != "the request of k" {
		t.Errorf("%q %v", raw, err)
	}
	if ids, err := j.KeptActions(ctx); err != nil || len(ids) != 1 || ids[0] != id {
		t.Errorf("%v %v", ids, err)
	}
	// Generations survive (LS-02), the committer checks them, and twenty workers get one lease.
	var leases int
	for range 20 {
		wg.Go(func() {
			_, err := j.Append(ctx, dispatch.Batch{Action: id, Events: []dispatch.Event{evLease(2)}})
			mu.Lock()
			defer mu.Unlock()
			if err == nil {
				leases++
			} else if !errors.Is(err, dispatch.ErrLeaseHeld) {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	if leases != 1 {
		t.Errorf("%d leases of one generation", leases)
	}
	if _, err := j.Append(ctx, dispatch.Batch{Action: id, Events: []dispatch.Event{evRepeat(2, 1)}}); !errors.Is(err, dispatch.ErrLeaseLost) {
		t.Errorf("an old generation: %v", err)
	}
	mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{evRepeat(2, 2)}})
	done := toResult(id, []byte("x"))
	for i := range done.Events {
		done.Events[i].Attempt = 2
	}
	done.Chunks[0].Attempt = 2
	mustAppend(t, j, done)
	if _, err := j.KeptRequest(ctx, id); !errors.Is(err, dispatch.ErrNoRequest) {
		t.Errorf("kept after it was resolved: %v", err)
	}
	// Where the window of a key is over, readers see what follows from that (I5).
	over := keyedBatch(newID(), "over")
	over.Events[1].Bound.Key.ExpiresAt = time.Now().Add(-time.Second)
	mustAppend(t, j, over)
	mustAppend(t, j, dispatch.Batch{Action: over.Action, Events: []dispatch.Event{evResolved(1, unknown)}})
	if rec := mustAction(t, j, over.Action); rec.Facts.Retry != outcome.Reconcile {
		t.Errorf("the window is over, and the advice is %s", rec.Facts.Retry)
	}
	for rec, err := range j.Actions(ctx, dispatch.Filter{}) {
		if err != nil || rec.ID == over.Action && rec.Facts.Retry != outcome.Reconcile {
			t.Errorf("%s %v", rec.Facts.Retry, err)
		}
	}
	// A key that its holder gave up goes to the one that names it.
	other := keyedBatch(newID(), "k")
	if _, err := j.Append(ctx, other); !errors.Is(err, dispatch.ErrKeyTaken) {
		t.Errorf("taken from a finished action: %v", err)
	}
	other.Events[1].Bound.Key.Replaces = id.String()
	mustAppend(t, j, other)
	if rec, err := j.Keyed(ctx, "ci", "account https://a", "k"); err != nil || rec.ID != other.Action {
		t.Errorf("%s %v", rec.ID, err)
	}
}
