package testkit

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/textproto"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// maxHead bounds a request head that Upstream reads, in bytes.
const maxHead = 1 << 20

// errStop ends the connection without being a failure of the script.
var errStop = errors.New("script ended the connection")

// Step is one thing an Upstream does with a connection. An error ends it.
type Step func(x *Exchange) error

// Turn is what happens with one request of a connection.
type Turn struct {
	// Early runs the steps as soon as the head is complete, before any of the body
	// is read (see ReadBody). Otherwise they run after the whole request was read.
	Early bool
	Steps []Step
}

// Respond is a turn that starts when the request was read to its end.
func Respond(steps ...Step) Turn { return Turn{Steps: steps} }

// Early is a turn that starts when the request head was read.
func Early(steps ...Step) Turn { return Turn{Early: true, Steps: steps} }

// Exchange is what a Step works on: one request on one connection.
type Exchange struct {
	// Conn writes application bytes (through TLS where there is TLS).
	Conn net.Conn
	// TCP is the connection below TLS.
	TCP *net.TCPConn

	up       *Upstream
	br       *bufio.Reader
	arrival  *Arrival
	bodyRead bool
}

// Arrival returns the request as far as it was read.
func (x *Exchange) Arrival() Arrival { return x.up.snapshot(x.arrival) }

// Done is closed when the test ends: nothing may wait longer.
func (x *Exchange) Done() <-chan struct{} { return x.up.done }

// MarkAnswered notes in the ledger that the final answer is written completely. Call
// it just before the last write, so that the ledger never lags behind the peer, and
// take it back if that write fails.
func (x *Exchange) MarkAnswered(yes bool) { x.up.update(func() { x.arrival.Answered = yes }) }

// Write sends literal bytes.
func Write(s string) Step {
	return func(x *Exchange) error { _, err := io.WriteString(x.Conn, s); return err }
}

// WriteBytes sends literal bytes, one write per part, so that TLS carries each part
// in its own record.
func WriteBytes(parts ...[]byte) Step {
	return func(x *Exchange) error {
		for _, p := range parts {
			if _, err := x.Conn.Write(p); err != nil {
				return err
			}
		}
		return nil
	}
}

// Big sends n bytes of 'a'.
func Big(n int64) Step {
	return func(x *Exchange) error {
		block := bytes.Repeat([]byte("a"), 64<<10)
		for n := n; n > 0; {
			k := min(n, int64(len(block)))
			if _, err := x.Conn.Write(block[:k]); err != nil {
				return err
			}
			n -= k
		}
		return nil
	}
}

// Reply sends a complete, well-formed final response with Content-Length and marks
// the arrival as answered. A HEAD request, 204 and 304 get no body. fields are
// name, value pairs.
func Reply(status int, body string, fields ...string) Step {
	return func(x *Exchange) error {
		var b bytes.Buffer
		fmt.Fprintf(&b, "HTTP/1.1 %d %s\r\n", status, http.StatusText(status))
		for i := 0; i+1 < len(fields); i += 2 {
			fmt.Fprintf(&b, "%s: %s\r\n", fields[i], fields[i+1])
		}
		if status != http.StatusNoContent && status != http.StatusNotModified {
			fmt.Fprintf(&b, "Content-Length: %d\r\n", len(body))
		}
		b.WriteString("\r\n")
		if x.Arrival().Method != http.MethodHead && status != http.StatusNoContent && status != http.StatusNotModified {
			b.WriteString(body)
		}
		x.MarkAnswered(true)
		_, err := x.Conn.Write(b.Bytes())
		if err != nil {
			x.MarkAnswered(false)
		}
		return err
	}
}

// WriteLast is Write for the bytes that complete a final answer: the arrival is
// marked as answered.
func WriteLast(s string) Step {
	return func(x *Exchange) error {
		x.MarkAnswered(true)
		err := Write(s)(x)
		if err != nil {
			x.MarkAnswered(false)
		}
		return err
	}
}

// Hold waits at the gate until the test opens it.
func Hold(g *Gate) Step {
	return func(x *Exchange) error {
		if !g.Pass(x.Done()) {
			return errStop
		}
		return nil
	}
}

// Stall waits until the peer closes the connection or the test ends, then ends it.
// Bytes that arrive meanwhile are read and dropped.
func Stall() Step {
	return func(x *Exchange) error {
		_, _ = io.Copy(io.Discard, x.br)
		return errStop
	}
}

// ReadBody reads the rest of the request; for early turns.
func ReadBody() Step {
	return func(x *Exchange) error { return x.readBody() }
}

// ReadBodyBytes reads n content bytes of a body with Content-Length, and leaves
// the rest unread; for early turns.
func ReadBodyBytes(n int64) Step {
	return func(x *Exchange) error {
		_, err := io.CopyN(bodySink{x}, x.br, n)
		return err
	}
}

// Close ends the connection in good order: close_notify where there is TLS, then
// FIN. (With request bytes still unread the kernel sends RST instead of FIN, as
// it does for every server; see HalfClose.)
func Close() Step { return func(*Exchange) error { return errStop } }

// CloseNoNotify ends the TCP connection without the close_notify of TLS: what
// truncation looks like (CONTRACT G2). On a plain connection it is Close.
func CloseNoNotify() Step {
	return func(x *Exchange) error { _ = x.TCP.Close(); return errStop }
}

// Reset ends the connection with RST.
func Reset() Step {
	return func(x *Exchange) error {
		_ = x.TCP.SetLinger(0)
		_ = x.TCP.Close()
		return errStop
	}
}

// HalfClose sends close_notify (where there is TLS) and FIN, then reads until the
// peer closes too.
func HalfClose() Step {
	return func(x *Exchange) error {
		if c, ok := x.Conn.(*tls.Conn); ok {
			_ = c.CloseWrite()
		}
		_ = x.TCP.CloseWrite()
		_, _ = io.Copy(io.Discard, x.br)
		return errStop
	}
}

// HalfCloseNoNotify sends FIN without close_notify, then reads until the peer
// closes too.
func HalfCloseNoNotify() Step {
	return func(x *Exchange) error {
		_ = x.TCP.CloseWrite()
		_, _ = io.Copy(io.Discard, x.br)
		return errStop
	}
}

// Do runs a function of the test's own, for side effects of the origin.
func Do(f func(a Arrival)) Step {
	return func(x *Exchange) error { f(x.Arrival()); return nil }
}

// UpstreamConfig says what an Upstream is. Exactly one of Script, ScriptConn,
// Handler and EarlyHandler is set; with none, every request gets 200 and "ok".
type UpstreamConfig struct {
	// TLS makes it an https origin; nil is plain TCP.
	TLS *tls.Config
	// Script is played on every connection from its start, one turn per request;
	// after the last one the connection is closed.
	Script []Turn
	// ScriptConn gives the script of the conn-th connection, from 1.
	ScriptConn func(conn int) []Turn
	// Handler gives the steps for each request that was read to its end.
	Handler func(a Arrival) []Step
	// EarlyHandler gives the steps for each request whose head was read.
	EarlyHandler func(a Arrival) []Step
	// OnAccept runs before TLS on every new connection; an error closes it. It may
	// hold (a peer that accepts TCP and says nothing), write or reset. May be nil.
	OnAccept func(c *net.TCPConn, done <-chan struct{}) error
	// Addr is the address to listen on; "" is 127.0.0.1:0.
	Addr string
}

// Upstream is a scripted HTTP/1.1 origin on loopback. It reads requests itself,
// byte by byte, so that nothing is corrected or hidden on the way to its ledger.
type Upstream struct {
	*Ledger
	cfg  UpstreamConfig
	ln   net.Listener
	done chan struct{}
	wg   sync.WaitGroup
	stop sync.Once
	// serveConn serves one connection to its end.
	serveConn func(tcp *net.TCPConn, info *ConnInfo)

	connMu sync.Mutex
	open   map[net.Conn]struct{}
}

// NewUpstream starts an origin; it ends with the test.
func NewUpstream(t testing.TB, cfg UpstreamConfig) *Upstream {
	t.Helper()
	set := 0
	for _, b := range []bool{cfg.Script != nil, cfg.ScriptConn != nil, cfg.Handler != nil, cfg.EarlyHandler != nil} {
		if b {
			set++
		}
	}
	switch {
	case set > 1:
		t.Fatal("testkit: UpstreamConfig wants one of Script, ScriptConn, Handler, EarlyHandler")
	case set == 0:
		cfg.Handler = func(Arrival) []Step { return []Step{Reply(200, "ok")} }
	}
	u := &Upstream{Ledger: newLedger(), cfg: cfg, ln: listen(t, cfg.Addr), done: make(chan struct{}), open: map[net.Conn]struct{}{}}
	u.serveConn = u.serve
	u.wg.Add(1)
	go u.accept()
	t.Cleanup(u.Close)
	return u
}

// listen opens a loopback listener.
func listen(t testing.TB, addr string) net.Listener {
	t.Helper()
	if addr == "" {
		addr = "127.0.0.1:0"
	}
	var lc net.ListenConfig
	ln, err := lc.Listen(context.Background(), "tcp", addr)
	if err != nil {
		t.Fatalf("testkit: listen on %s: %v", addr, err)
	}
	return ln
}

// Addr is the address it listens on, "127.0.0.1:port".
func (u *Upstream) Addr() string { return u.ln.Addr().String() }

// Port is the port it listens on.
func (u *Upstream) Port() int { return u.ln.Addr().(*net.TCPAddr).Port }

// URL is the origin under the given host name (for a proxy that maps the name to
// Addr), with a path such as "/v1/x".
func (u *Upstream) URL(host, path string) string {
	return originURL(u.cfg.TLS != nil, host, u.Port(), path)
}

func originURL(secure bool, host string, port int, path string) string {
	scheme := "http"
	if secure {
		scheme = "https"
	}
	return scheme + "://" + net.JoinHostPort(host, strconv.Itoa(port)) + path
}

// StopAccepting closes the listener, so that new connections are refused; open
// connections go on.
func (u *Upstream) StopAccepting() { _ = u.ln.Close() }

// Close ends the origin with all its connections and waits for its goroutines.
func (u *Upstream) Close() {
	u.stop.Do(func() {
		close(u.done)
		_ = u.ln.Close()
		u.CloseConns()
	})
	u.wg.Wait()
}

// CloseConns closes all open connections below TLS; the origin goes on accepting.
func (u *Upstream) CloseConns() {
	u.connMu.Lock()
	defer u.connMu.Unlock()
	for c := range u.open {
		_ = c.Close()
	}
}

func (u *Upstream) accept() {
	defer u.wg.Done()
	for {
		c, err := u.ln.Accept()
		if err != nil {
			return
		}
		u.connMu.Lock()
		select {
		case <-u.done:
			u.connMu.Unlock()
			_ = c.Close()
			return
		default:
		}
		u.open[c] = struct{}{}
		u.connMu.Unlock()
		info := u.addConn()
		u.wg.Add(1)
		go func() {
			defer u.wg.Done()
			u.serveConn(c.(*net.TCPConn), info)
			_ = c.Close()
			u.connMu.Lock()
			delete(u.open, c)
			u.connMu.Unlock()
			u.update(func() { info.Closed = true })
		}()
	}
}

// handshake brings TLS up where cfg has it, and notes it in the ledger.
func (l *Ledger) handshake(tcp *net.TCPConn, cfg *tls.Config, info *ConnInfo) (net.Conn, error) {
	if cfg == nil {
		l.update(func() { info.Handshaken = true })
		return tcp, nil
	}
	c := tls.Server(tcp, cfg)
	ctx, cancel := context.WithTimeout(context.Background(), waitLimit)
	defer cancel()
	err := c.HandshakeContext(ctx)
	st := c.ConnectionState()
	l.update(func() {
		info.ServerName, info.Alpn = st.ServerName, st.NegotiatedProtocol
		info.Handshaken = err == nil
		if err != nil {
			info.TLSErr = err.Error()
		}
	})
	return c, err
}

// counted counts application bytes into the ledger's connection.
type counted struct {
	net.Conn
	l    *Ledger
	info *ConnInfo
}

func (c counted) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.l.mu.Lock()
	c.info.AppBytes += int64(n)
	// In TLS 1.3 a client refuses our certificate after the server's handshake has
	// ended: its alert comes with the first read.
	var alert *net.OpError
	if errors.As(err, &alert) && alert.Op == "remote error" && c.info.TLSErr == "" {
		c.info.TLSErr = err.Error()
	}
	c.l.mu.Unlock()
	return n, err
}

func (u *Upstream) serve(tcp *net.TCPConn, info *ConnInfo) {
	if u.cfg.OnAccept != nil {
		if err := u.cfg.OnAccept(tcp, u.done); err != nil {
			return
		}
	}
	conn, err := u.handshake(tcp, u.cfg.TLS, info)
	if err != nil {
		return
	}
	defer func() { _ = conn.Close() }()
	br := bufio.NewReaderSize(counted{conn, u.Ledger, info}, 64<<10)

	script := u.cfg.Script
	if u.cfg.ScriptConn != nil {
		script = u.cfg.ScriptConn(info.N)
	}
	scripted := u.cfg.Script != nil || u.cfg.ScriptConn != nil
	for turn := 0; !scripted || turn < len(script); turn++ {
		x := &Exchange{Conn: conn, TCP: tcp, up: u, br: br}
		if err := x.readHead(info); err != nil {
			return
		}
		early := u.cfg.EarlyHandler != nil || scripted && script[turn].Early
		if !early {
			if err := x.readBody(); err != nil {
				return
			}
		}
		var steps []Step
		switch {
		case scripted:
			steps = script[turn].Steps
		case u.cfg.EarlyHandler != nil:
			steps = u.cfg.EarlyHandler(x.Arrival())
		default:
			steps = u.cfg.Handler(x.Arrival())
		}
		for _, s := range steps {
			if err := s(x); err != nil {
				return
			}
		}
		// An early turn that left the body unread cannot tell where the next request
		// begins: its connection ends here.
		if !x.bodyRead {
			return
		}
	}
}

// readHead reads one request head. The arrival is in the ledger from its first
// byte on.
func (x *Exchange) readHead(info *ConnInfo) error {
	if _, err := x.br.Peek(1); err != nil {
		return err
	}
	u := x.up
	x.arrival = u.add(&Arrival{Conn: info.N, ServerName: info.ServerName, Alpn: info.Alpn})
	var raw []byte
	for !bytes.HasSuffix(raw, []byte("\r\n\r\n")) && !bytes.HasSuffix(raw, []byte("\n\n")) {
		b, err := x.br.ReadByte()
		if err == nil && len(raw) == maxHead {
			err = errors.New("head too large")
		}
		if err != nil {
			u.update(func() { x.arrival.RawHead = raw })
			u.failed(x.arrival, err)
			return err
		}
		raw = append(raw, b)
	}
	lines := strings.Split(strings.TrimRight(string(raw), "\r\n"), "\n")
	first := strings.SplitN(strings.TrimRight(lines[0], "\r"), " ", 3)
	var fields []Field
	h := http.Header{}
	for _, line := range lines[1:] {
		name, value, ok := strings.Cut(strings.TrimRight(line, "\r"), ":")
		if !ok {
			continue
		}
		f := Field{name, strings.Trim(value, " \t")}
		fields = append(fields, f)
		h[textproto.CanonicalMIMEHeaderKey(f.Name)] = append(h[textproto.CanonicalMIMEHeaderKey(f.Name)], f.Value)
	}
	u.update(func() {
		a := x.arrival
		a.RawHead, a.Fields, a.Header, a.HeadComplete = raw, fields, h, true
		a.Method = first[0]
		if len(first) == 3 {
			a.Target, a.Protocol = first[1], first[2]
		}
		a.Authority = h.Get("Host")
	})
	return nil
}

type bodySink struct{ x *Exchange }

func (s bodySink) Write(p []byte) (int, error) {
	s.x.up.addBody(s.x.arrival, p)
	return len(p), nil
}

func (x *Exchange) readBody() error {
	if x.bodyRead {
		return nil
	}
	u := x.up
	a := x.Arrival()
	err := func() error {
		if strings.EqualFold(a.Header.Get("Transfer-Encoding"), "chunked") {
			return x.readChunks()
		}
		v := a.Header.Get("Content-Length")
		if v == "" {
			return nil
		}
		n, err := strconv.ParseInt(v, 10, 64)
		if err != nil || n < 0 {
			return errors.New("invalid Content-Length")
		}
		_, err = io.CopyN(bodySink{x}, x.br, n-a.BodyBytes)
		return err
	}()
	if err != nil {
		u.failed(x.arrival, err)
		return err
	}
	x.bodyRead = true
	u.complete(x.arrival)
	return nil
}

func (x *Exchange) readChunks() error {
	line := func() (string, error) {
		s, err := x.br.ReadString('\n')
		return strings.TrimRight(s, "\r\n"), err
	}
	for {
		s, err := line()
		if err != nil {
			return err
		}
		size, _, _ := strings.Cut(s, ";")
		n, err := strconv.ParseUint(strings.TrimSpace(size), 16, 62)
		if err != nil {
			return errors.New("invalid chunk size")
		}
		if n == 0 {
			break
		}
		if _, err := io.CopyN(bodySink{x}, x.br, int64(n)); err != nil {
			return err
		}
		if s, err := line(); err != nil || s != "" {
			return errors.Join(errors.New("chunk without its end"), err)
		}
	}
	trailer := http.Header{}
	for {
		s, err := line()
		if err != nil {
			return err
		}
		if s == "" {
			x.up.update(func() { x.arrival.Trailer = trailer })
			return nil
		}
		name, value, _ := strings.Cut(s, ":")
		trailer.Add(name, strings.TrimSpace(value))
	}
}

// OriginConfig says what an Origin is.
type OriginConfig struct {
	TLS     *tls.Config // nil: plain
	HTTP2   bool        // offer h2 by ALPN (with TLS)
	Handler http.Handler
	Addr    string // "" is 127.0.0.1:0
}

// Origin is a well-behaved origin: net/http with a ledger.
type Origin struct {
	*Ledger
	ln     net.Listener
	secure bool
	srv    *http.Server
	done   chan struct{}
	once   sync.Once
}

type originConnKey struct{}

// NewOrigin starts a well-behaved origin; it ends with the test. A nil handler
// answers 200 and "ok".
func NewOrigin(t testing.TB, cfg OriginConfig) *Origin {
	t.Helper()
	if cfg.Handler == nil {
		cfg.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	}
	o := &Origin{Ledger: newLedger(), ln: listen(t, cfg.Addr), secure: cfg.TLS != nil, done: make(chan struct{})}
	var protos http.Protocols
	protos.SetHTTP1(true)
	protos.SetHTTP2(cfg.HTTP2)
	o.srv = &http.Server{
		Handler:           o.record(cfg.Handler),
		ErrorLog:          discardLog,
		Protocols:         &protos,
		ReadHeaderTimeout: time.Minute,
		ConnContext: func(ctx context.Context, _ net.Conn) context.Context {
			return context.WithValue(ctx, originConnKey{}, o.addConn())
		},
	}
	go func() {
		defer close(o.done)
		if cfg.TLS != nil {
			o.srv.TLSConfig = cfg.TLS.Clone()
			o.srv.TLSConfig.NextProtos = nil // set from Protocols
			_ = o.srv.ServeTLS(o.ln, "", "")
			return
		}
		_ = o.srv.Serve(o.ln)
	}()
	t.Cleanup(o.Close)
	return o
}

// Close ends the origin with all its connections.
func (o *Origin) Close() {
	o.once.Do(func() { _ = o.srv.Close() })
	<-o.done
}

// Addr is the address it listens on, "127.0.0.1:port".
func (o *Origin) Addr() string { return o.ln.Addr().String() }

// Port is the port it listens on.
func (o *Origin) Port() int { return o.ln.Addr().(*net.TCPAddr).Port }

// URL is the origin under the given host name, with a path such as "/v1/x".
func (o *Origin) URL(host, path string) string { return originURL(o.secure, host, o.Port(), path) }

func (o *Origin) record(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		info, _ := r.Context().Value(originConnKey{}).(*ConnInfo)
		a := &Arrival{
			Protocol: r.Proto, Method: r.Method, Target: r.RequestURI, Authority: r.Host,
			Header: r.Header.Clone(), HeadComplete: true,
		}
		for name, vs := range r.Header {
			for _, v := range vs {
				a.Fields = append(a.Fields, Field{name, v})
			}
		}
		o.update(func() {
			info.Handshaken = true
			if r.TLS != nil {
				info.ServerName, info.Alpn = r.TLS.ServerName, r.TLS.NegotiatedProtocol
			}
			a.Conn, a.ServerName, a.Alpn = info.N, info.ServerName, info.Alpn
		})
		o.add(a)
		body := &recordedBody{ReadCloser: r.Body, o: o, a: a, r: r}
		r.Body = body
		next.ServeHTTP(w, r)
		_, _ = io.Copy(io.Discard, body)
		o.update(func() { a.Answered = true })
	})
}

// recordedBody notes what is read of a request body.
type recordedBody struct {
	io.ReadCloser
	o    *Origin
	a    *Arrival
	r    *http.Request
	once sync.Once
}

func (b *recordedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	if n > 0 {
		b.o.addBody(b.a, p[:n])
	}
	if err != nil {
		b.once.Do(func() {
			if errors.Is(err, io.EOF) {
				b.o.update(func() { b.a.Trailer = b.r.Trailer.Clone() })
				b.o.complete(b.a)
				return
			}
			b.o.failed(b.a, err)
		})
	}
	return n, err
}
