package dispatch

import (
	"context"
	"net/http"
	"strconv"
	"testing"
	"testing/synctest"
	"time"

	"waybill/internal/contract"
	"waybill/outcome"
)

func TestLimitsPerCallerAndRoute(t *testing.T) {
	contract.Covers(t, "V4", "L7")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		from := func(caller string) *Submission {
			s := post("few.example.test", "/", caller)
			s.Caller.ID = caller
			return s
		}
		limited := func(r *Reply, reason string) time.Duration {
			t.Helper()
			f := r.Record.Facts
			after, err := strconv.Atoi(r.Header.Get("Retry-After"))
			if r.Status != http.StatusTooManyRequests || f.Code != outcome.CodeRateLimited || f.Retry != outcome.Backoff || f.Outcome != outcome.NotAttempted || err != nil {
				t.Fatalf("%d %+v", r.Status, f)
			}
			if got := r.Envelope.Evidence.Reason; got != reason {
				t.Errorf("reason %q, want %q", got, reason)
			}
			return time.Duration(after) * time.Second
		}
		// Two at first, then one every six seconds; nobody else's allowance is touched.
		for range 2 {
			if r := b.Do(t.Context(), from("ann")); r.Status != 200 {
				t.Fatal(r.Status)
			}
		}
		wait := limited(b.Do(t.Context(), from("ann")), "rate")
		if wait != 6*time.Second {
			t.Errorf("told to wait %s", wait)
		}
		if r := b.Do(t.Context(), from("ben")); r.Status != 200 {
			t.Errorf("another caller: %d", r.Status)
		}
		if r := b.Do(t.Context(), post("search.example.test", "/", "ann")); r.Status != 200 {
			t.Errorf("another route: %d", r.Status)
		}
		time.Sleep(wait)
		if r := b.Do(t.Context(), from("ann")); r.Status != 200 {
			t.Errorf("after the wait: %d", r.Status)
		}
		time.Sleep(time.Minute)
		// One at once.
		gate := make(chan struct{})
		b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
			<-gate
			return answerWith(200, "ok")(ctx, out, sink)
		}
		done := submit(b, t.Context(), from("ann"))
		limited(b.Do(t.Context(), from("ann")), "concurrent")
		close(gate)
		if r := <-done; r.Status != 200 {
			t.Error(r.Status)
		}
		synctest.Wait()
		if r := b.Do(t.Context(), from("ann")); r.Status != 200 {
			t.Errorf("when the first is over: %d", r.Status)
		}
	})
}
