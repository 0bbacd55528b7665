package dispatch

import (
	"context"
	"testing"
	"testing/synctest"
	"time"
)

// TestRunners: an attempt's goroutine takes the next one, survives one that panics, and
// stays no longer than it is needed.
func TestRunners(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		waiting := func() int {
			synctest.Wait()
			b.runners.mu.Lock()
			defer b.runners.mu.Unlock()
			return b.runners.waiting
		}
		for i := range 3 {
			play := answerWith(200, "ok")
			if i == 1 {
				play = func(context.Context, *Outgoing, Sink) Ending { panic("a library") }
			}
			b.tr.play = play
			b.Do(t.Context(), post("pay.example.test", "/v1/x", string(rune('a'+i))))
			if n := waiting(); n != 1 {
				t.Fatalf("%d wait after %d attempts", n, i+1)
			}
		}
		time.Sleep(runnerRest)
		if n := waiting(); n != 0 {
			t.Errorf("%d wait for nothing", n)
		}
		b.tr.play = answerWith(200, "ok")
		b.Do(t.Context(), post("pay.example.test", "/v1/y", "{}"))
		if n := waiting(); n != 1 {
			t.Errorf("%d wait", n)
		}
		if err := b.Drain(t.Context()); err != nil || waiting() != 0 {
			t.Errorf("%d wait behind the end, %v", waiting(), err)
		}
	})
}
