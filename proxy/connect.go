package proxy

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/elazarl/goproxy"

	"waybill/dispatch"
	"waybill/outcome"
)

// ownName is the name under which callers reach the caller API through the proxy.
const ownName = "waybill.internal"

// tunnel is one accepted CONNECT. Its credentials count for everything inside it.
type tunnel struct {
	caller    dispatch.Caller
	authority string // target of the CONNECT, as the caller wrote it
	own       bool   // the caller API, not an origin
	decision  dispatch.TunnelDecision
	front     *headConn
	http10    bool
	taken     *tunnelConn // after the take-over

	// Set before anything inside is served.
	scheme string // "https", or "http" for plaintext inside the tunnel
	sni    string // of the caller's handshake; "" for none

	// Guarded by Proxy.mu.
	serving bool // a request may have been read
	conn    net.Conn
}

// close closes the caller's connection, if there is one yet.
func (t *tunnel) close() {
	if t.conn != nil {
		_ = t.conn.Close()
	}
}

type tunnelKey struct{}

// connect answers a CONNECT of an authenticated caller. Where anything inside may
// match a route it is accepted, and refused inside if need be: clients show nothing of
// a refused CONNECT but its status line (status-mapping section 9).
func (p *Proxy) connect(x *exchange, r *http.Request) {
	t := &tunnel{caller: x.caller, authority: x.head.target, front: x.conn.head, http10: x.head.http10}
	t.own = isOwnName(t.authority)
	t.decision = dispatch.TunnelIntercept
	switch {
	case p.draining.Load():
		t.decision, x.reply = dispatch.TunnelRefuse, p.drainingReply()
	case !t.own:
		x.submitted = true
		t.decision, x.reply = p.pipeline.Connect(r.Context(), x.caller, t.authority)
	}
	served := false
	defer func() {
		if !served {
			t.close() // a panic: nobody else closes a connection that was taken over
		}
	}()
	switch t.decision {
	case dispatch.TunnelRefuse:
		p.refuseConnect(x, t)
	case dispatch.TunnelIntercept:
		if c := p.takeOver(x, r, t); c != nil {
			p.intercept(t, c)
		}
	case dispatch.TunnelBlind:
		x.reply = p.pipeline.Tunnel(r.Context(), t.caller, t.authority, func() (net.Conn, error) { return p.blind(x, r, t) })
		switch {
		case x.reply != nil && t.conn == nil:
			p.refuseConnect(x, t)
		case t.conn != nil:
			_ = t.conn.Close()
		}
	case dispatch.TunnelInvalid:
		panic("proxy: no decision about a CONNECT")
	default:
		panic("proxy: unknown decision about a CONNECT")
	}
	served = true
}

// takeOver takes the caller's connection from the HTTP server, by way of goproxy,
// beginning with the first byte after the CONNECT head. It returns nil when the
// connection is gone or the proxy shuts down.
func (p *Proxy) takeOver(x *exchange, r *http.Request, t *tunnel) *tunnelConn {
	r = r.WithContext(context.WithValue(r.Context(), tunnelKey{}, t))
	// goproxy gets the raw writer: only that one can be taken over.
	p.engine.ServeHTTP(x.w.ResponseWriter, r)
	x.w.began = true
	c := t.taken
	if c == nil {
		panic(http.ErrAbortHandler) // the connection could not be taken over
	}
	x.leave() // from here on the tunnel counts
	if p.draining.Load() {
		// Shutdown began in between and does not know of this tunnel.
		_ = writeRefusal(c, p.drainingReply(), t.http10)
		linger(c.Conn)
		_ = c.Close()
		return nil
	}
	return c
}

// drainingReply refuses a CONNECT of a proxy that shuts down. It has no record: there
// is no action yet.
func (p *Proxy) drainingReply() *dispatch.Reply {
	f, _ := outcome.Of(outcome.CodeDraining)
	p.metrics.Unrecorded(f.Code)
	env := outcome.NewEnvelope("", f, "", outcome.Evidence{})
	a := env.Answer(outcome.Shape{Method: http.MethodConnect, Connect: true})
	return &dispatch.Reply{Envelope: &env, Status: a.Status, Header: a.Header, Body: io.NopCloser(bytes.NewReader(a.Body)), ContentLength: int64(len(a.Body))}
}

// hijack is called by goproxy with the connection of an accepted CONNECT.
func (p *Proxy) hijack(r *http.Request, _ net.Conn, _ *goproxy.ProxyCtx) {
	t, ok := r.Context().Value(tunnelKey{}).(*tunnel)
	if !ok {
		return // only takeOver leads here
	}
	c := p.adopt(t, t.front)
	c.tunnel = t
	p.mu.Lock()
	t.taken = c
	p.mu.Unlock()
}

// blind accepts the CONNECT of a blind tunnel (CONTRACT V7).
func (p *Proxy) blind(x *exchange, r *http.Request, t *tunnel) (net.Conn, error) {
	c := p.takeOver(x, r, t)
	if c == nil {
		return nil, net.ErrClosed
	}
	p.setServing(t)
	if err := p.accept(t, c); err != nil {
		return nil, err
	}
	return c, nil
}

// accept answers a CONNECT with 200, in the caller's version of HTTP.
func (p *Proxy) accept(t *tunnel, c *tunnelConn) error {
	version := "HTTP/1.1"
	if t.http10 {
		version = "HTTP/1.0"
	}
	_ = c.SetWriteDeadline(time.Now().Add(p.limits.WriteStall))
	_, err := io.WriteString(c.Conn, version+" 200 Connection established\r\n\r\n")
	_ = c.SetWriteDeadline(time.Time{})
	return err
}

func (p *Proxy) setServing(t *tunnel) {
	p.mu.Lock()
	t.serving = true
	p.mu.Unlock()
}

// intercept accepts the tunnel and serves HTTP inside it: TLS when the first byte is
// that of a handshake record, plaintext otherwise (some clients tunnel http:// too).
func (p *Proxy) intercept(t *tunnel, c *tunnelConn) {
	if err := p.accept(t, c); err != nil {
		_ = c.Close()
		return
	}
	_ = c.SetReadDeadline(time.Now().Add(p.limits.IdleTimeout))
	first, err := c.peek()
	if err != nil {
		_ = c.Close() // the caller opened a tunnel and did not use it
		return
	}
	if first != tlsHandshakeRecord {
		t.scheme = "http"
		_ = c.SetReadDeadline(time.Time{})
		p.serveInside(t, p.checked(c, t))
		return
	}
	t.scheme = "https"
	tc, err := p.handshake(t, c)
	if err != nil {
		_ = c.Close()
		return
	}
	if tc.ConnectionState().NegotiatedProtocol == "h2" {
		p.serveInside(t, tc) // net/http speaks HTTP/2 on it, by its ALPN
		return
	}
	p.serveInside(t, p.checked(tc, t))
}

// tlsHandshakeRecord is the content type of a TLS record that begins a handshake.
const tlsHandshakeRecord = 0x16

// serveInside hands the connection to the HTTP server, which closes it.
func (p *Proxy) serveInside(t *tunnel, c net.Conn) {
	p.setServing(t)
	if !p.handover.hand(c) {
		_ = c.Close()
	}
}

// handshake does TLS with the caller, with a leaf for the host of the CONNECT. The
// server name the caller asks for is kept and compared later, inside, where a refusal
// can be read (case ID-01).
func (p *Proxy) handshake(t *tunnel, c *tunnelConn) (*tls.Conn, error) {
	host := authorityHost(t.authority)
	offered := false
	cfg := &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: []string{"h2", "http/1.1"},
		GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
			leaf, err := p.ca.LeafFor(host)
			offered = err == nil
			return leaf, err
		},
		// A ticket would carry a session into a tunnel to another host.
		SessionTicketsDisabled: true,
	}
	cfg.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		cfg.CurvePreferences = keyExchanges(c.RemoteAddr(), hello.SupportedCurves)
		return cfg, nil
	}
	tc := tls.Server(c, cfg)
	ctx, cancel := context.WithTimeout(p.base, p.limits.HandshakeTimeout)
	defer cancel()
	_ = c.SetDeadline(time.Now().Add(p.limits.HandshakeTimeout))
	if err := tc.HandshakeContext(ctx); err != nil {
		p.handshakeFailed(t, offered, err)
		return nil, err
	}
	_ = c.SetDeadline(time.Time{})
	t.sni = tc.ConnectionState().ServerName
	return tc, nil
}

// keyExchanges are those of a handshake with a caller that offers some; nil: the library's own
// choice. That begins with one that whoever records the connection today cannot break with a
// quantum computer later, and takes nearly twice as long. What stays on the loopback interface
// crosses no network where somebody could record it.
func keyExchanges(caller net.Addr, offered []tls.CurveID) []tls.CurveID {
	if a, ok := caller.(*net.TCPAddr); ok && a.IP.IsLoopback() && slices.Contains(offered, tls.X25519) {
		return []tls.CurveID{tls.X25519, tls.CurveP256, tls.CurveP384, tls.CurveP521}
	}
	return nil
}

// handshakeFailed translates a handshake that dies right after our certificate: to
// this side it is an EOF, an alert or a bad record, and never says what it means.
func (p *Proxy) handshakeFailed(t *tunnel, offered bool, err error) {
	var timeout net.Error
	switch {
	case errors.As(err, &timeout) && timeout.Timeout():
		p.log.Warn("TLS handshake with a caller timed out", slog.String("caller", t.caller.ID), slog.String("authority", t.authority))
	case offered:
		p.log.Warn("a caller ended the TLS handshake after it saw our certificate: it does not trust the Waybill CA",
			slog.String("caller", t.caller.ID), slog.String("authority", t.authority), slog.String("hint", "let the program trust ca.pem of the data folder; \"waybill env\" prints the variables"))
	default:
		p.log.Warn("TLS handshake with a caller failed", slog.String("caller", t.caller.ID), slog.String("authority", t.authority))
	}
}

// refuseConnect answers a CONNECT that is not carried and closes the connection:
// Node's agent keeps a refused socket, and its process, alive otherwise.
func (p *Proxy) refuseConnect(x *exchange, t *tunnel) {
	conn, _, err := http.NewResponseController(x.w.ResponseWriter).Hijack()
	if err != nil {
		x.handOver(err)
		panic(http.ErrAbortHandler)
	}
	x.w.began = true
	x.handOver(writeRefusal(conn, x.reply, t.http10))
	linger(t.front.Conn)
	_ = conn.Close()
}

// writeRefusal writes a refused CONNECT: the code and the action in the reason
// phrase, which is all that many clients show, and the whole envelope.
func writeRefusal(c net.Conn, reply *dispatch.Reply, http10 bool) error {
	var b bytes.Buffer
	version := "HTTP/1.1"
	if http10 {
		version = "HTTP/1.0"
	}
	reason := http.StatusText(reply.Status)
	if reply.Envelope != nil && reply.Envelope.Error != nil {
		reason = strings.TrimSpace(reply.Envelope.Error.Code.String() + " " + reply.Envelope.InvocationID)
	}
	fmt.Fprintf(&b, "%s %03d %s\r\n", version, reply.Status, asciiOnly(reason))
	var body []byte
	var err error
	if reply.Body != nil {
		body, err = io.ReadAll(io.LimitReader(reply.Body, 1<<20))
		_ = reply.Body.Close()
	}
	h := reply.Header.Clone()
	if h == nil {
		h = http.Header{}
	}
	for _, k := range notForwarded {
		delete(h, k)
	}
	h.Set("Connection", "close")
	h.Set("Content-Length", strconv.Itoa(len(body)))
	h.Set("Date", time.Now().UTC().Format(http.TimeFormat))
	_ = h.Write(&b) // a buffer takes everything
	b.WriteString("\r\n")
	b.Write(body)
	_ = c.SetWriteDeadline(time.Now().Add(lingerTime * 10))
	if _, werr := c.Write(b.Bytes()); werr != nil {
		return werr
	}
	return err
}

func asciiOnly(s string) string {
	return strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return -1
		}
		return r
	}, s)
}

// authorityHost returns the host of host:port or host, without brackets.
func authorityHost(authority string) string {
	if h, _, err := net.SplitHostPort(authority); err == nil {
		return h
	}
	return strings.TrimSuffix(strings.TrimPrefix(authority, "["), "]")
}

// isOwnName reports whether an authority names the caller API, on a default port.
func isOwnName(authority string) bool {
	host, port, err := net.SplitHostPort(authority)
	if err != nil {
		host, port = authority, ""
	}
	return strings.EqualFold(strings.TrimSuffix(host, "."), ownName) && (port == "" || port == "80" || port == "443")
}
