package sshx

import (
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// holdError is how long the end of a connection is held back from the SSH transport.
// Its reader runs ahead of the goroutine that hands packets to channels: within this
// time everything that came before the end has been handed over, so that a channel
// that closes later was not closed by its peer.
const holdError = 50 * time.Millisecond

// tap stands between the connection and the SSH transport.
type tap struct {
	net.Conn
	dead chan struct{} // closed by Close or a failed read, after failed is set

	once   sync.Once
	failed atomic.Bool // a read failed, and the transport was told so
	broke  atomic.Bool // the same, or a read failed because this side had closed
	hold   atomic.Bool // errors are held back: from authentication on
	in     atomic.Int64

	mu      sync.Mutex
	reading bool            // the transport waits for bytes
	asked   []chan struct{} // closed when it next does
}

func newTap(c net.Conn) *tap { return &tap{Conn: c, dead: make(chan struct{})} }

// asks returns a channel that is closed when the transport waits for bytes, now or later.
// It reads on only when it has taken all packets that came before, and never again after
// one that ends the connection or cannot be read: when it asks, what was seen before this
// call was not brought about by such an end.
func (t *tap) asks() <-chan struct{} {
	c := make(chan struct{})
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.reading {
		close(c)
	} else {
		t.asked = append(t.asked, c)
	}
	return c
}

func (t *tap) wait(reading bool) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.reading = reading
	if reading {
		for _, c := range t.asked {
			close(c)
		}
		t.asked = nil
	}
}

// Read implements net.Conn.
func (t *tap) Read(p []byte) (int, error) {
	t.wait(true)
	n, err := t.Conn.Read(p)
	t.in.Add(int64(n))
	if err == nil || n > 0 {
		t.wait(false)
		return n, nil //nolint:nilerr // an error that came with bytes comes again
	}
	own := false // closed on this side: that is no end of the peer
	if t.hold.Load() {
		timer := time.NewTimer(holdError)
		select {
		case <-timer.C:
		case <-t.dead:
			timer.Stop()
			own = true
		}
	}
	t.wait(false)
	t.broke.Store(true)
	if !own {
		t.failed.Store(true)
		t.once.Do(func() { close(t.dead) })
	}
	return 0, err
}

// Close implements net.Conn.
func (t *tap) Close() error {
	t.once.Do(func() { close(t.dead) })
	return t.Conn.Close()
}
