package testkit

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// waitLimit bounds every wait of this package that has no limit of its own.
const waitLimit = 20 * time.Second

// keepBody is how much of a request body an Arrival keeps, in bytes. Its digest
// and length cover all of it.
const keepBody = 1 << 20

// Field is one header field line as it stood on the wire.
type Field struct{ Name, Value string }

// Arrival is one request that reached an origin: the far side's own account, kept
// apart from anything Waybill says (CONTRACT T2). It is made as soon as the first
// byte of a request head was read and grows from there.
type Arrival struct {
	N        int    // from 1, over all connections of the origin
	Conn     int    // from 1: the connection it came on
	OnConn   int    // from 1: its place on that connection
	Stream   uint32 // HTTP/2 stream id; 0 on HTTP/1.1
	Protocol string // "HTTP/1.1", "HTTP/2.0", or what the request line said

	Method    string
	Target    string // request target as sent; :path on HTTP/2
	Authority string // Host field, or :authority
	RawHead   []byte // up to and with the empty line; nil on HTTP/2 and for Origin
	Fields    []Field
	Header    http.Header
	Trailer   http.Header

	Body       []byte // the first MiB of the content, without its framing
	BodyBytes  int64
	BodySHA256 string // hex, of the whole content; set when Complete

	HeadComplete bool // the head was read up to its empty line
	Complete     bool // head and body were read to their framed end
	// Answered: the final answer was written to its end without an error. It is set
	// before the last write, so a peer that holds the answer is never ahead of it; an
	// Origin sets it when its handler has returned.
	Answered   bool
	ServerName string
	Alpn       string
	At         time.Time
	Err        string // why reading stopped early, or ""
}

// Is reports whether the arrival has this method and target; "" matches all.
func (a Arrival) Is(method, target string) bool {
	return (method == "" || a.Method == method) && (target == "" || a.Target == target)
}

// Values returns the values of a field in wire order, compared without case.
func (a Arrival) Values(name string) []string {
	var out []string
	for _, f := range a.Fields {
		if strings.EqualFold(f.Name, name) {
			out = append(out, f.Value)
		}
	}
	return out
}

// ConnInfo is what an origin knows of one connection, requests or none.
type ConnInfo struct {
	N          int
	ServerName string // SNI
	Alpn       string
	TLSErr     string // why the handshake failed, or ""
	Handshaken bool   // TLS is up (or the connection is plain)
	AppBytes   int64  // application bytes received (after TLS)
	Closed     bool
}

// Ledger is the independent record of one origin. Safe for concurrent use. Values
// that it returns are copies.
type Ledger struct {
	mu       sync.Mutex
	arrivals []*Arrival
	digests  map[*Arrival]hash.Hash // of bodies still being read
	conns    []*ConnInfo
	changed  chan struct{}
}

func newLedger() *Ledger {
	return &Ledger{digests: map[*Arrival]hash.Hash{}, changed: make(chan struct{})}
}

// update runs f under the lock and wakes all who wait.
func (l *Ledger) update(f func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	f()
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *Ledger) addConn() *ConnInfo {
	c := &ConnInfo{}
	l.update(func() {
		l.conns = append(l.conns, c)
		c.N = len(l.conns)
	})
	return c
}

func (l *Ledger) add(a *Arrival) *Arrival {
	l.update(func() {
		a.At = time.Now()
		l.arrivals = append(l.arrivals, a)
		a.N = len(l.arrivals)
		for _, b := range l.arrivals {
			if b.Conn == a.Conn {
				a.OnConn++
			}
		}
		l.digests[a] = sha256.New()
	})
	return a
}

func (l *Ledger) addBody(a *Arrival, p []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if room := keepBody - len(a.Body); room > 0 {
		a.Body = append(a.Body, p[:min(room, len(p))]...)
	}
	a.BodyBytes += int64(len(p))
	if d := l.digests[a]; d != nil {
		_, _ = d.Write(p)
	}
}

func (l *Ledger) complete(a *Arrival) {
	l.update(func() {
		a.Complete = true
		if d := l.digests[a]; d != nil {
			a.BodySHA256 = hex.EncodeToString(d.Sum(nil))
			delete(l.digests, a)
		}
	})
}

func (l *Ledger) failed(a *Arrival, err error) {
	l.update(func() {
		if !a.Complete && a.Err == "" && err != nil {
			a.Err = err.Error()
		}
		delete(l.digests, a)
	})
}

func copyArrival(a *Arrival) Arrival {
	c := *a
	c.RawHead = bytes.Clone(a.RawHead)
	c.Body = bytes.Clone(a.Body)
	c.Fields = append([]Field(nil), a.Fields...)
	c.Header = a.Header.Clone()
	c.Trailer = a.Trailer.Clone()
	return c
}

func (l *Ledger) snapshot(a *Arrival) Arrival {
	l.mu.Lock()
	defer l.mu.Unlock()
	return copyArrival(a)
}

// Arrivals returns all arrivals so far, in order, complete or not.
func (l *Ledger) Arrivals() []Arrival {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]Arrival, len(l.arrivals))
	for i, a := range l.arrivals {
		out[i] = copyArrival(a)
	}
	return out
}

// Count counts the arrivals with this method and target; "" matches all.
func (l *Ledger) Count(method, target string) int {
	return len(l.Where(func(a Arrival) bool { return a.Is(method, target) }))
}

// Where returns the arrivals that match.
func (l *Ledger) Where(match func(Arrival) bool) []Arrival {
	var out []Arrival
	for _, a := range l.Arrivals() {
		if match(a) {
			out = append(out, a)
		}
	}
	return out
}

// Conns returns all connections that were accepted so far.
func (l *Ledger) Conns() []ConnInfo {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]ConnInfo, len(l.conns))
	for i, c := range l.conns {
		out[i] = *c
	}
	return out
}

// Wait returns the arrivals as soon as at least n have come completely, and fails
// the test after 20 s.
func (l *Ledger) Wait(t testing.TB, n int) []Arrival {
	t.Helper()
	return l.WaitFor(t, fmt.Sprintf("%d complete arrivals", n), func(as []Arrival) bool {
		k := 0
		for _, a := range as {
			if a.Complete {
				k++
			}
		}
		return k >= n
	})
}

// WaitFor returns the arrivals as soon as ok holds for them, and fails the test
// after 20 s. what is for the message.
func (l *Ledger) WaitFor(t testing.TB, what string, ok func([]Arrival) bool) []Arrival {
	t.Helper()
	limit := time.NewTimer(waitLimit)
	defer limit.Stop()
	for {
		l.mu.Lock()
		changed := l.changed
		l.mu.Unlock()
		as := l.Arrivals()
		if ok(as) {
			return as
		}
		select {
		case <-changed:
		case <-limit.C:
			t.Fatalf("testkit: no %s within %s; %d arrivals, %d connections", what, waitLimit, len(as), len(l.Conns()))
		}
	}
}

// RequireCount fails the test unless exactly n arrivals have this method and
// target ("" matches all).
func (l *Ledger) RequireCount(t testing.TB, n int, method, target string) {
	t.Helper()
	if got := l.Count(method, target); got != n {
		t.Fatalf("testkit: %d arrivals of %q %q, want %d", got, method, target, n)
	}
}

// Gate holds a script at one place until the test lets it go on.
type Gate struct {
	reached, open         chan struct{}
	reachedOnce, openOnce sync.Once
}

// NewGate returns a closed gate; it is opened when the test ends.
func NewGate(t testing.TB) *Gate {
	g := &Gate{reached: make(chan struct{}), open: make(chan struct{})}
	t.Cleanup(g.Open)
	return g
}

// Reached is closed when the first script has come to the gate.
func (g *Gate) Reached() <-chan struct{} { return g.reached }

// Await waits until a script has come to the gate, and fails the test after 20 s.
func (g *Gate) Await(t testing.TB) {
	t.Helper()
	select {
	case <-g.reached:
	case <-time.After(waitLimit):
		t.Fatalf("testkit: gate not reached within %s", waitLimit)
	}
}

// Open lets all scripts pass, now and later. It may be called more than once.
func (g *Gate) Open() { g.openOnce.Do(func() { close(g.open) }) }

// Pass marks the gate as reached and waits until it is open or done is closed;
// it reports whether it was opened.
func (g *Gate) Pass(done <-chan struct{}) bool {
	g.reachedOnce.Do(func() { close(g.reached) })
	select {
	case <-g.open:
		return true
	case <-done:
		return false
	}
}

// Eventually polls ok every 5 ms until it returns nil, and fails the test with its
// last error after 20 s. For conditions that nobody announces; where a channel or
// a Gate exists, use that.
func Eventually(t testing.TB, ok func() error) {
	t.Helper()
	if err := poll(waitLimit, nil, ok); err != nil {
		t.Fatalf("testkit: still not so after %s: %v", waitLimit, err)
	}
}

// poll calls ok until it returns nil, limit has passed or stop is closed, and
// returns the last error.
func poll(limit time.Duration, stop <-chan struct{}, ok func() error) error {
	end := time.NewTimer(limit)
	defer end.Stop()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		err := ok()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-stop:
			return err
		case <-end.C:
			return err
		}
	}
}
