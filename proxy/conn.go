package proxy

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"waybill/metrics"
)

// connPhase is where in the HTTP/1 byte stream a headConn stands.
type connPhase uint8

const (
	phaseHead    connPhase = iota // before or inside a head: nothing is handed out
	phaseLength                   // inside a body of known length
	phaseChunked                  // inside a chunked body
	phaseHold                     // after the head of a CONNECT or an upgrade: everything is held back
	phaseDead                     // a head was refused: what comes is dropped
	phaseBroken                   // a body was malformed: reads fail
)

// lingerTime is how long a connection whose input was refused is read to no
// purpose before it is closed: closing with unread input makes the kernel send a
// reset, which can destroy the answer on its way (RFC 9112 §9.6).
const lingerTime = 500 * time.Millisecond

// maxRoom bounds what a connection keeps for what it will receive next.
const maxRoom = 8 << 10

// lingerBytes bounds what is read in that time.
const lingerBytes = 4 << 20

// writePiece is the largest single write, so that the stall limit applies to
// progress and not to the size of a result.
const writePiece = 256 << 10

// headConn stands between a caller's connection and net/http. It follows the
// framing of the messages (RFC 9112 §6) so that every head on the connection is
// validated before net/http sees a byte of it. A refused head is replaced by a
// synthetic request that the handler recognises, so that the refusal is answered
// in its turn, by an envelope, and recorded (CONTRACT M6).
//
// Read is called by one goroutine at a time; everything else may be concurrent.
type headConn struct {
	net.Conn
	limits Limits
	tunnel *tunnel // nil on the proxy listener
	ssh    bool    // on the SSH endpoint's listener

	mu      sync.Mutex
	phase   connPhase
	in      []byte // received, not handed out
	room    []byte // the array in which in begins; nil: none yet
	ready   int    // leading bytes of in that may be handed out
	scanner headScanner
	left    int64 // of a body of known length
	chunks  chunkFollower
	heads   []headInfo // accepted, waiting for their handler, in order
	oneHead [1]headInfo
	bad     *violation
	nonce   string // target of the synthetic request, "" until there is one

	userDeadline  time.Time // as set by net/http
	frameDeadline time.Time // ours: of a head that began, or of a stalled body
	writeDeadline time.Time
	reading       bool // a read of Conn goes on
	armed         bool // a deadline of reads was set: armedAt
	armedAt       time.Time
	closed        bool
	used          bool // a head was accepted

	scratch []byte // of the reading goroutine

	closeOnce sync.Once
	closeErr  error
	onClose   func()
}

// checked puts the head check in front of a connection and keeps track of it.
func (p *Proxy) checked(c net.Conn, t *tunnel) *headConn {
	hc := &headConn{Conn: c, limits: p.limits, tunnel: t}
	hc.onClose = func() {
		p.mu.Lock()
		delete(p.conns, hc)
		p.mu.Unlock()
	}
	p.mu.Lock()
	p.conns[hc] = struct{}{}
	p.mu.Unlock()
	return hc
}

// untouched reports whether nothing was ever received on the connection.
func (c *headConn) untouched() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.phase == phaseHead && !c.used && len(c.in) == 0
}

// Read hands out validated heads and the bodies that follow them.
func (c *headConn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	for {
		c.mu.Lock()
		n, err := c.take(p)
		if n > 0 || err != nil {
			c.mu.Unlock()
			return n, err
		}
		// Inside a body bytes go straight to the reader; everywhere else into in.
		dst, direct := p, true
		switch c.phase {
		case phaseLength:
			dst = p[:min(int64(len(p)), c.left)]
		case phaseChunked:
		case phaseHead, phaseHold, phaseDead, phaseBroken:
			if c.scratch == nil {
				c.scratch = make([]byte, 4<<10)
			}
			dst, direct = c.scratch, false
			if c.phase == phaseHold && len(c.in) >= c.limits.HeadBytes {
				// Held bytes are bounded. What is looked for now is only the caller's
				// departure, which a deadline or a close also ends.
				dst = nil
			}
		}
		c.arm()
		c.reading = dst != nil
		c.mu.Unlock()

		if dst == nil {
			return 0, c.waitHeld()
		}
		n, err = c.Conn.Read(dst)

		c.mu.Lock()
		c.reading = false
		if n > 0 {
			if direct {
				n, err = c.follow(dst[:n])
				c.mu.Unlock()
				return n, err
			}
			if c.phase != phaseDead {
				c.received(dst[:n])
			}
			c.mu.Unlock()
			continue
		}
		if err == nil {
			c.mu.Unlock()
			continue
		}
		again := c.readFailed(err)
		c.mu.Unlock()
		if !again {
			return 0, err
		}
	}
}

// take hands out what can be handed out without reading. 0, nil: more is needed.
func (c *headConn) take(p []byte) (int, error) {
	if c.ready == 0 && c.phase == phaseHead && len(c.in) > 0 {
		c.nextHead()
	}
	if c.ready > 0 {
		n := copy(p, c.in[:c.ready])
		c.ready -= n
		c.drop(n)
		return n, nil
	}
	switch c.phase {
	case phaseLength:
		n := copy(p, c.in[:min(int64(len(c.in)), c.left)])
		c.drop(n)
		c.left -= int64(n)
		if c.left == 0 {
			c.endBody()
		}
		return n, nil
	case phaseChunked:
		n, done, err := c.chunks.feed(c.in[:min(len(c.in), len(p))])
		copy(p, c.in[:n])
		c.drop(n)
		if err != nil {
			c.phase = phaseBroken
		}
		if done {
			c.endBody()
		}
		if n > 0 {
			return n, nil
		}
		return 0, err
	case phaseBroken:
		return 0, errBadChunk
	case phaseDead:
		c.in = nil
		return 0, nil
	case phaseHead, phaseHold:
		return 0, nil
	default:
		return 0, nil
	}
}

// follow takes body bytes that were read straight into the reader's slice and
// returns how many of them belong to the body; the rest begins the next message.
func (c *headConn) follow(p []byte) (int, error) {
	if c.phase == phaseLength {
		c.left -= int64(len(p))
		if c.left == 0 {
			c.endBody()
		}
		return len(p), nil
	}
	n, done, err := c.chunks.feed(p)
	switch {
	case err != nil:
		c.phase = phaseBroken
		if n > 0 {
			err = nil
		}
	case done:
		c.endBody()
		c.in = append(c.in, p[n:]...)
	}
	return n, err
}

func (c *headConn) endBody() { c.phase, c.frameDeadline = phaseHead, time.Time{} }

func (c *headConn) drop(n int) {
	// What was said is not kept: heads hold credentials.
	clear(c.in[:n])
	c.in = c.in[n:]
	if len(c.in) == 0 {
		c.in = nil
	}
}

// received appends to in, and begins it in the array that it had before.
func (c *headConn) received(p []byte) {
	if len(c.in) > 0 {
		c.in = append(c.in, p...)
		return
	}
	c.in = append(c.room[:0], p...)
	if c.room = nil; cap(c.in) <= maxRoom {
		c.room = c.in[:0]
	}
}

// nextHead looks for a complete head at the start of in.
func (c *headConn) nextHead() {
	// RFC 9112 §2.2: an empty line before a request line is ignored.
	for c.scanner.scanned == 0 && len(c.in) > 0 && c.in[0] == '\r' {
		if len(c.in) == 1 {
			return
		}
		if c.in[1] != '\n' {
			c.refuseHead(errBareCR)
			return
		}
		c.drop(2)
	}
	end, v := c.scanner.scan(c.in, c.limits.HeadBytes)
	if v != nil {
		c.refuseHead(v)
		return
	}
	if end == 0 {
		return
	}
	_, rest, _ := bytes.Cut(c.in[:end], crlf)
	h, v := checkFields(c.scanner.first, rest, c.tunnel != nil)
	if v != nil {
		c.refuseHead(v)
		return
	}
	c.scanner, c.frameDeadline = headScanner{}, time.Time{}
	c.ready, c.used = end, true
	if len(c.heads) == 0 {
		c.heads = c.oneHead[:0]
	}
	c.heads = append(c.heads, h)
	switch {
	case h.method == "CONNECT":
		c.phase = phaseHold
	case h.chunked:
		c.phase, c.chunks = phaseChunked, chunkFollower{}
	case h.length > 0:
		c.phase, c.left = phaseLength, h.length
	case h.upgrade:
		c.phase = phaseHold
	}
}

// refuseHead replaces everything that was received by the synthetic request.
func (c *headConn) refuseHead(v *violation) {
	bad := *v
	if bad.credentials == "" {
		bad.credentials = looseCredentials(c.in)
	}
	c.bad = &bad
	// 128 random bits nobody was told: no earlier or later request of this
	// connection can name them.
	var nonce [16]byte
	_, _ = rand.Read(nonce[:]) // crypto/rand.Read never fails
	c.nonce = "/" + hex.EncodeToString(nonce[:])
	method := "GET"
	if bad.head.method == "HEAD" {
		method = "HEAD" // its answer has no body
	}
	c.in = []byte(method + " " + c.nonce + " HTTP/1.1\r\nHost: waybill.internal\r\nConnection: close\r\n\r\n")
	c.ready = len(c.in)
	c.phase, c.frameDeadline = phaseDead, time.Time{}
}

// readFailed handles an error of the connection and reports whether reading goes
// on: a head that was begun and will not end is answered too.
func (c *headConn) readFailed(err error) bool {
	if c.phase != phaseHead || len(c.in) == 0 {
		return false
	}
	timedOut := errors.Is(err, os.ErrDeadlineExceeded)
	if timedOut && (c.frameDeadline.IsZero() || time.Now().Before(c.frameDeadline)) {
		// The deadline was net/http's own: it stops its background read this way.
		return false
	}
	if timedOut || errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		c.refuseHead(errCutHead)
		return true
	}
	return false
}

// arm sets the deadline of reads: the earlier of net/http's and ours.
func (c *headConn) arm() {
	switch c.phase {
	case phaseHead:
		if len(c.in) > 0 && c.frameDeadline.IsZero() {
			c.frameDeadline = time.Now().Add(c.limits.HeadTimeout)
		}
	case phaseLength, phaseChunked:
		c.frameDeadline = time.Now().Add(c.limits.BodyIdle)
	case phaseHold, phaseDead, phaseBroken:
		c.frameDeadline = time.Time{}
	}
	d := c.userDeadline
	if !c.frameDeadline.IsZero() && (d.IsZero() || d.After(time.Now())) {
		// What was begun has a time of its own. A deadline that is past already is
		// net/http asking for its reader back, and is obeyed.
		d = c.frameDeadline
	}
	if c.armed && d == c.armedAt {
		return
	}
	c.armed, c.armedAt = true, d
	_ = c.Conn.SetReadDeadline(d) // a connection without deadlines is closed already
}

// waitHeld waits, with nothing more to hold, for the deadline that net/http sets
// when it wants its reader back. It polls: this state needs a caller that sends
// more than a whole head's worth before it was answered.
func (c *headConn) waitHeld() error {
	const step = 20 * time.Millisecond
	for {
		c.mu.Lock()
		d, closed := c.userDeadline, c.closed || c.phase != phaseHold
		c.mu.Unlock()
		if closed {
			return net.ErrClosed
		}
		if !d.IsZero() && !time.Now().Before(d) {
			return os.ErrDeadlineExceeded
		}
		time.Sleep(step)
	}
}

// SetReadDeadline keeps net/http's deadline apart from those of the framing. While nothing
// is read it is only kept, and set by the next read: net/http changes it several times
// between two of them.
func (c *headConn) SetReadDeadline(t time.Time) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.userDeadline = t
	if c.reading {
		c.arm()
	}
	return nil
}

// SetDeadline sets both deadlines.
func (c *headConn) SetDeadline(t time.Time) error {
	if err := c.SetReadDeadline(t); err != nil {
		return err
	}
	return c.SetWriteDeadline(t)
}

// SetWriteDeadline sets the deadline of writes; zero: each piece has its own.
func (c *headConn) SetWriteDeadline(t time.Time) error {
	c.mu.Lock()
	c.writeDeadline = t
	c.mu.Unlock()
	return c.Conn.SetWriteDeadline(t)
}

// Write gives each piece its own stall limit, so that a caller that stopped
// reading does not hold a result and a goroutine for ever.
func (c *headConn) Write(p []byte) (int, error) {
	written := 0
	for {
		piece := p[written:min(len(p), written+writePiece)]
		c.mu.Lock()
		own := c.writeDeadline.IsZero()
		c.mu.Unlock()
		if own {
			_ = c.Conn.SetWriteDeadline(time.Now().Add(c.limits.WriteStall))
		}
		n, err := c.Conn.Write(piece)
		written += n
		if err != nil || written >= len(p) {
			return written, err
		}
	}
}

// CloseWrite half-closes, as net/http does before it closes with unread input.
func (c *headConn) CloseWrite() error { return closeWrite(c.Conn) }

func closeWrite(c net.Conn) error {
	if cw, ok := c.(interface{ CloseWrite() error }); ok {
		return cw.CloseWrite()
	}
	return nil
}

// Close closes, after lingering where input was refused.
func (c *headConn) Close() error {
	c.closeOnce.Do(func() {
		c.mu.Lock()
		dead := c.phase == phaseDead || c.phase == phaseBroken
		c.closed = true
		c.mu.Unlock()
		if dead {
			linger(c.Conn)
		}
		c.closeErr = c.Conn.Close()
		if c.onClose != nil {
			c.onClose()
		}
	})
	return c.closeErr
}

// linger half-closes and reads to no purpose for a short time.
func linger(c net.Conn) {
	if closeWrite(c) != nil {
		return
	}
	_ = c.SetReadDeadline(time.Now().Add(lingerTime))
	_, _ = io.Copy(io.Discard, io.LimitReader(c, lingerBytes))
}

// popHead returns the head of the request whose handler runs now. net/http calls
// the handler once for each head, in order.
func (c *headConn) popHead() (headInfo, bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.heads) == 0 {
		return headInfo{}, false
	}
	h := c.heads[0]
	c.heads[0] = headInfo{}
	c.heads = c.heads[1:]
	if len(c.heads) == 0 {
		c.heads = nil
	}
	return h, true
}

// violationFor returns the violation that a synthetic request stands for, or nil
// for every other request.
func (c *headConn) violationFor(requestURI string) *violation {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.nonce == "" || requestURI != c.nonce || len(c.heads) > 0 {
		return nil
	}
	return c.bad
}

// resume ends holding back after a CONNECT or an upgrade that was answered without it. It
// reports whether the caller had sent something already: those bytes were meant
// for the tunnel, so the connection must not go on (they would be read as requests).
func (c *headConn) resume() (sentEarly bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.phase != phaseHold {
		return false
	}
	sentEarly = len(c.in) > 0
	if sentEarly {
		c.phase, c.in = phaseDead, nil
		return true
	}
	c.phase = phaseHead
	return false
}

// release gives the connection out after a Hijack, with the bytes that were held back.
func (c *headConn) release() *tunnelConn {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.arm() // what was set last counts for those who read it now
	held := c.in
	c.in, c.room = nil, nil
	return &tunnelConn{Conn: c.Conn, held: held, onClose: func() { _ = c.Close() }}
}

// tunnelConn is the caller's connection inside a tunnel, beginning with the first
// byte after the CONNECT head (case CL-03).
type tunnelConn struct {
	net.Conn
	held    []byte
	tunnel  *tunnel
	once    sync.Once
	onClose func()
}

// Read hands out what was held back, then reads the connection.
func (c *tunnelConn) Read(p []byte) (int, error) {
	if len(c.held) > 0 {
		n := copy(p, c.held)
		c.held = c.held[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}

// peek returns the first byte of the tunnel without taking it.
func (c *tunnelConn) peek() (byte, error) {
	if len(c.held) == 0 {
		var one [1]byte
		if _, err := io.ReadFull(c.Conn, one[:]); err != nil {
			return 0, err
		}
		c.held = one[:]
	}
	return c.held[0], nil
}

// CloseWrite half-closes.
func (c *tunnelConn) CloseWrite() error { return closeWrite(c.Conn) }

// Close closes once and reports it.
func (c *tunnelConn) Close() error {
	var err error
	c.once.Do(func() {
		err = c.Conn.Close()
		if c.onClose != nil {
			c.onClose()
		}
	})
	return err
}

// frontListener wraps the connections of the proxy listener.
type frontListener struct {
	net.Listener
	p    *Proxy
	ssh  bool // the SSH endpoint
	once sync.Once
}

// Close closes once: http.Server closes its listeners again when it shuts down.
func (l *frontListener) Close() error {
	var err error
	l.once.Do(func() { err = l.Listener.Close() })
	return err
}

// Accept returns the next connection, behind the head check.
func (l *frontListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	hc := l.p.checked(c, nil)
	if hc.ssh = l.ssh; hc.ssh {
		l.p.metrics.CallerConnected(metrics.EndpointSSH)
	} else {
		l.p.metrics.CallerConnected(metrics.EndpointProxy)
	}
	return hc, nil
}

// handoverListener hands connections from inside tunnels to net/http.
type handoverListener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

func newHandoverListener() *handoverListener {
	return &handoverListener{conns: make(chan net.Conn), done: make(chan struct{})}
}

// hand gives c to net/http; false when nobody accepts any more.
func (l *handoverListener) hand(c net.Conn) bool {
	select {
	case <-l.done:
		return false
	default:
	}
	select {
	case l.conns <- c:
		return true
	case <-l.done:
		return false
	}
}

// Accept returns the next connection that was handed over.
func (l *handoverListener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Close ends Accept.
func (l *handoverListener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

// Addr is of no use to anybody.
func (l *handoverListener) Addr() net.Addr { return &net.UnixAddr{Name: "tunnel", Net: "unix"} }

// connKey is the context key of a request's connState.
type connKey struct{}

// connState is what is known of the connection a request came in on.
type connState struct {
	head   *headConn // HTTP/1 only
	tunnel *tunnel   // inside a tunnel only
}

// connContext is http.Server.ConnContext.
func connContext(ctx context.Context, c net.Conn) context.Context {
	st := &connState{}
	switch c := c.(type) {
	case *headConn:
		st.head, st.tunnel = c, c.tunnel
	case *tls.Conn:
		if tc, ok := c.NetConn().(*tunnelConn); ok {
			st.tunnel = tc.tunnel
		}
	}
	return context.WithValue(ctx, connKey{}, st)
}
