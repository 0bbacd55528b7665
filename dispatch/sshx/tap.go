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
	hold   atomic.Bool // errors are held back: from authentication on
	in     atomic.Int64
}

func newTap(c net.Conn) *tap { return &tap{Conn: c, dead: make(chan struct{})} }

// Read implements net.Conn.
func (t *tap) Read(p []byte) (int, error) {
	n, err := t.Conn.Read(p)
	t.in.Add(int64(n))
	if err != nil && n == 0 {
		if t.hold.Load() {
			timer := time.NewTimer(holdError)
			select {
			case <-timer.C:
			case <-t.dead:
				timer.Stop()
				return 0, err // closed on this side: that is no end of the peer
			}
		}
		t.failed.Store(true)
		t.once.Do(func() { close(t.dead) })
		return 0, err
	}
	return n, nil //nolint:nilerr // an error that came with bytes comes again
}

// Close implements net.Conn.
func (t *tap) Close() error {
	t.once.Do(func() { close(t.dead) })
	return t.Conn.Close()
}
