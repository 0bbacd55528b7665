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

// encodeEvents returns the events as they are stored, the version byte that says how, and
// the length of their JSON.
func encodeEvents(events []dispatch.Event) (payload []byte, version byte, size int, err error) {
	r := request{events: events}
	if err := r.encode(); err != nil {
		return nil, 0, 0, err
	}
	return r.frame[frameRoom:], r.version, r.text, nil
}

// cloneEvent returns a deep copy.
func cloneEvent(in *dispatch.Event) dispatch.Event {
	ev := *in
	own(&ev, &room{})
	return ev
}
