package dispatch

import (
	"sync"
	"time"
)

// runners are the goroutines that carry attempts, one after the other. A fresh goroutine
// begins with a small stack, and an attempt needs more than that: one that waits here for
// the next attempt has grown its own already. The zero value is ready.
type runners struct {
	mu      sync.Mutex
	work    chan carried
	waiting int
	// end is closed some time after it was made, and lets go who waits by then: nobody
	// stays here when there is nothing to do.
	end   chan struct{}
	timer *time.Timer // closes end
	over  bool
}

// carried is an action behind its boundary, with its connection.
type carried struct {
	a    *action
	conn Conn
}

const (
	// maxRunners bounds those that wait.
	maxRunners = 256
	runnerRest = time.Second
)

// start carries the attempt on in another goroutine. It does not wait for one.
func (r *runners) start(a *action, conn Conn) {
	r.mu.Lock()
	if r.work == nil {
		r.work = make(chan carried)
	}
	r.mu.Unlock()
	select {
	case r.work <- carried{a, conn}:
	default:
		go r.carry(a, conn)
	}
}

func (r *runners) carry(a *action, conn Conn) {
	for {
		a.run(conn) // which survives what panics in it
		end := r.rest()
		if end == nil {
			return
		}
		a, conn = nil, nil // nothing of an action is kept while waiting
		select {
		case c := <-r.work:
			a, conn = c.a, c.conn
			r.leave()
		case <-end:
			r.leave()
			return
		}
	}
}

// rest counts the calling goroutine as waiting until end; nil: there are enough.
func (r *runners) rest() (end <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.over || r.waiting >= maxRunners {
		return nil
	}
	r.waiting++
	if r.end == nil {
		end := make(chan struct{})
		r.end = end
		r.timer = time.AfterFunc(runnerRest, func() {
			r.mu.Lock()
			defer r.mu.Unlock()
			if r.end == end {
				close(end)
				r.end = nil
			}
		})
	}
	return r.end
}

// dismiss lets go who waits, and lets nobody wait any more.
func (r *runners) dismiss() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.over = true
	if r.end != nil {
		r.timer.Stop()
		close(r.end)
		r.end = nil
	}
}

func (r *runners) leave() {
	r.mu.Lock()
	r.waiting--
	r.mu.Unlock()
}
