package proxy

import (
	"errors"
	"net"
	"os"
	"testing"
	"testing/synctest"
	"time"
)

// countedConn counts the deadlines of reads that are set.
type countedConn struct {
	net.Conn
	set int
}

func (c *countedConn) SetReadDeadline(t time.Time) error {
	c.set++
	return c.Conn.SetReadDeadline(t)
}

// TestReadDeadlines: a deadline holds for the read that waits and for the next one, and
// for who reads the connection after it was given out.
func TestReadDeadlines(t *testing.T) {
	begin := func(t *testing.T) (*headConn, *countedConn) {
		t.Helper()
		near, far := net.Pipe()
		t.Cleanup(func() { _, _ = near.Close(), far.Close() })
		counted := &countedConn{Conn: near}
		return &headConn{Conn: counted, limits: Limits{}.withDefaults()}, counted
	}
	timesOut := func(t *testing.T, c net.Conn, after time.Duration) {
		t.Helper()
		start := time.Now()
		if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(start) != after {
			t.Errorf("%v after %v, want %v", err, time.Since(start), after)
		}
	}
	for name, run := range map[string]func(*testing.T){
		"before the read": func(t *testing.T) {
			c, counted := begin(t)
			_ = c.SetReadDeadline(time.Now().Add(time.Hour))
			_ = c.SetReadDeadline(time.Time{})
			_ = c.SetReadDeadline(time.Now().Add(time.Minute))
			timesOut(t, c, time.Minute)
			if counted.set != 1 {
				t.Errorf("%d deadlines were set for one read", counted.set)
			}
		},
		"during the read": func(t *testing.T) {
			c, _ := begin(t)
			_ = c.SetReadDeadline(time.Now().Add(time.Hour))
			time.AfterFunc(time.Second, func() { _ = c.SetReadDeadline(time.Unix(1, 0)) }) // as net/http stops its reader
			timesOut(t, c, time.Second)
			_ = c.SetReadDeadline(time.Now().Add(time.Minute))
			timesOut(t, c, time.Minute)
		},
		"after it was given out": func(t *testing.T) {
			c, _ := begin(t)
			_ = c.SetReadDeadline(time.Unix(1, 0))
			timesOut(t, c, 0)
			_ = c.SetDeadline(time.Time{}) // as net/http does when it is taken over
			out := c.release()
			_ = out.SetReadDeadline(time.Now().Add(time.Minute))
			timesOut(t, out, time.Minute)

			c, _ = begin(t)
			_ = c.SetReadDeadline(time.Unix(1, 0))
			timesOut(t, c, 0)
			_ = c.SetDeadline(time.Time{})
			out = c.release()
			time.AfterFunc(time.Hour, func() { _ = out.Conn.Close() })
			if _, err := out.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
				t.Error("a deadline that was taken back is still there")
			}
		},
	} {
		t.Run(name, func(t *testing.T) { synctest.Test(t, run) })
	}
}
