package dispatch

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"waybill/internal/contract"
	"waybill/outcome"
)

// A journal that cannot be read – its store has failed, and the process is about to end –
// says of no action that it does not exist.
func TestRetryOfWhatCannotBeRead(t *testing.T) {
	contract.Covers(t, "M7", "F2")
	b := newBench(t)
	b.tr.play = lost
	sent := b.do(t, keyed("keyed-background", "k", "x=1"))
	if r := b.RetryKept(context.Background(), ActionID{1}, 0); r.Envelope.Error.Code != outcome.CodeActionNotFound {
		t.Errorf("an unknown one: %+v", r.Envelope.Error)
	}
	b.j.unreadable = errors.New("the store has failed")
	r := b.RetryKept(context.Background(), sent.ID, 0)
	if e := r.Envelope.Error; r.ID != sent.ID || e.Code != outcome.CodeRetryRefused || e.Outcome != outcome.Unknown || e.Retry != outcome.Reconcile || r.Envelope.Evidence.Reason != "journal_unreadable" {
		t.Errorf("one that was sent: %s %+v, %q", r.ID, e, r.Envelope.Evidence.Reason)
	}
	b.j.unreadable = nil
}

// refusedOnce makes an action whose connection was refused, and a way to repeat it; what
// is sent from then on gets no answer.
func refusedOnce(t *testing.T, b *bench) (first *Reply, retry func(ActionID) *Reply) {
	t.Helper()
	b.tr.connect = func(int) error {
		return &SetupError{Code: outcome.CodeConnectionRefused, Stage: outcome.StageDNS, Reason: "connection_refused"}
	}
	first = b.do(t, post("search.example.test", "/q", "a"))
	wantFacts(t, facts(first), outcome.ConnectionSetup, outcome.NotAttempted, outcome.Backoff, outcome.CodeConnectionRefused)
	b.tr.connect, b.tr.play = nil, lost
	return first, func(id ActionID) *Reply {
		s := post("search.example.test", "/q", "a")
		s.RetryOf = id.String()
		return b.Do(context.Background(), s)
	}
}

// Who was overtaken, and cannot read what the other worker did, does not answer with what
// the action was before that (F2).
func TestOvertakenAndUnreadable(t *testing.T) {
	contract.Covers(t, "F2", "J2", "A9")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		first, retry := refusedOnce(t, b)
		var paused atomic.Bool
		b.tr.made = func() {
			if !paused.Swap(true) {
				time.Sleep(time.Hour / 2) // far beyond the lease
				b.j.mu.Lock()
				b.j.unreadable = errors.New("the store has failed")
				b.j.mu.Unlock()
			}
		}
		slow := make(chan *Reply)
		go func() { slow <- retry(first.ID) }()
		time.Sleep(10 * time.Minute)
		if r := retry(first.ID); r.ID != first.ID || facts(r).Outcome != outcome.Unknown {
			t.Fatalf("the second worker: %+v", facts(r))
		}
		r := <-slow
		if r.ID != first.ID || facts(r).Outcome != outcome.Unknown || !r.Envelope.Evidence.DispatchStarted {
			t.Errorf("the slow worker's caller is told %+v", facts(r))
		}
		b.j.unreadable = nil
	})
}

// Nor does one whose lease is refused, or cannot be recorded, while another worker sent it.
func TestLeaseRefusedAndUnreadable(t *testing.T) {
	contract.Covers(t, "F2", "J1")
	for _, refusal := range []error{ErrLeaseHeld, ErrNotWritten, ErrIndeterminate} {
		t.Run(refusal.Error(), func(t *testing.T) {
			b := newBench(t)
			first, retry := refusedOnce(t, b)
			late := false
			b.j.before = func(batch Batch) error {
				if late || batch.Events[0].Type != LeaseTaken {
					return nil
				}
				// Between this one's look at the action and its lease another one sends it.
				late = true
				if r := retry(first.ID); facts(r).Outcome != outcome.Unknown {
					t.Errorf("the other worker: %+v", facts(r))
				}
				b.j.unreadable = errors.New("the store has failed")
				return refusal
			}
			if r := retry(first.ID); r.ID != first.ID || facts(r).Outcome != outcome.Unknown || facts(r).Retry != outcome.Reconcile {
				t.Errorf("told %+v", facts(r))
			}
			b.j.unreadable = nil
		})
	}
}
