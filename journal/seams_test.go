package journal

import (
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/journal/internal/hooks"
)

type answer struct {
	dispatch.Receipt
	err error
}

func appendAsync(j *Journal, b dispatch.Batch) <-chan answer {
	ch := make(chan answer, 1)
	go func() {
		rc, err := j.Append(bg, b)
		ch <- answer{rc, err}
	}()
	return ch
}

// holder stops the committer when a group is complete.
type holder struct {
	hooks.Hooks
	arm  chan struct{}
	held chan struct{}
	free chan struct{}
}

func heldHooks() *holder {
	h := &holder{arm: make(chan struct{}, 1), held: make(chan struct{}, 1), free: make(chan struct{})}
	h.NoSync = true
	h.BeforeCommit = func(uint64) {
		select {
		case <-h.arm:
			h.held <- struct{}{}
			<-h.free
		default:
		}
	}
	return h
}

func (h *holder) hold() { h.arm <- struct{}{} }

func (h *holder) waitHeld(t testing.TB) {
	t.Helper()
	select {
	case <-h.held:
	case <-time.After(10 * time.Second):
		t.Fatal("the committer did not come")
	}
}

func (h *holder) letGo() { h.free <- struct{}{} }

// waitQueued returns when n requests are in the queue.
func waitQueued(t testing.TB, j *Journal, n int) {
	t.Helper()
	for range 10000 {
		if len(j.queue) >= n {
			return
		}
		time.Sleep(time.Millisecond)
	}
	t.Fatal("the queue does not fill")
}
