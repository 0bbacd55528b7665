package journal

import (
	"sync"

	"waybill/dispatch"
)

// watchers pass every durable step on, in order of sequence. Each has a buffer of
// its own and loses what does not fit: nothing here ever holds the committer up.
type watchers struct {
	mu     sync.Mutex
	closed bool
	all    map[*watcher]struct{}
}

type watcher struct {
	want func(*dispatch.Record) bool // nil: all
	ch   chan dispatch.Record
	quit chan struct{}
	done chan struct{}
}

const watchBuffer = 256

// Watch implements dispatch.Journal. stop returns when f will not be called any
// more; it must not be called from f.
func (j *Journal) Watch(want func(*dispatch.Record) bool, f func(dispatch.Record)) (stop func()) {
	w := &watcher{want: want, ch: make(chan dispatch.Record, watchBuffer), quit: make(chan struct{}), done: make(chan struct{})}
	ws := &j.watch
	ws.mu.Lock()
	if ws.closed {
		ws.mu.Unlock()
		return func() {}
	}
	if ws.all == nil {
		ws.all = make(map[*watcher]struct{})
	}
	ws.all[w] = struct{}{}
	ws.mu.Unlock()
	go func() {
		defer close(w.done)
		for {
			select {
			case <-w.quit:
				return
			case r := <-w.ch:
				select {
				case <-w.quit:
					return
				default:
					f(r)
				}
			}
		}
	}()
	return func() { ws.stop(w) }
}

func (ws *watchers) stop(w *watcher) {
	ws.mu.Lock()
	if _, ok := ws.all[w]; ok {
		delete(ws.all, w)
		close(w.quit)
	}
	ws.mu.Unlock()
	<-w.done
}

// publish is the committer's.
func (ws *watchers) publish(r *dispatch.Record) {
	ws.mu.Lock()
	defer ws.mu.Unlock()
	for w := range ws.all {
		if w.want != nil && !w.want(r) {
			continue
		}
		select {
		case w.ch <- *r:
		default: // slow: this one is lost to it
		}
	}
}

func (ws *watchers) close() {
	ws.mu.Lock()
	ws.closed = true
	all := ws.all
	ws.all = nil
	for w := range all {
		close(w.quit)
	}
	ws.mu.Unlock()
	for w := range all {
		<-w.done
	}
}
