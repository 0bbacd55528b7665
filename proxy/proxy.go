package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"sync"
	"sync/atomic"
	"time"

	"github.com/elazarl/goproxy"

	"waybill/dispatch"
	"waybill/metrics"
	"waybill/outcome"
)

// Pipeline is what the front needs of dispatch.Pipeline.
type Pipeline interface {
	// Do carries one submission; see dispatch.Pipeline.Do. The reply is never nil.
	Do(ctx context.Context, s *dispatch.Submission) *dispatch.Reply
	// Connect decides about a CONNECT. The reply is set for TunnelRefuse only.
	Connect(ctx context.Context, c dispatch.Caller, authority string) (dispatch.TunnelDecision, *dispatch.Reply)
	// Tunnel carries a blind tunnel until it ends. Once the far end is reached it calls
	// established, which accepts the CONNECT and returns the caller's connection. A
	// reply is a refusal that was not written.
	Tunnel(ctx context.Context, c dispatch.Caller, authority string, established func() (net.Conn, error)) *dispatch.Reply
	// Relayed is told that an action's stored answer goes to its caller.
	Relayed(rec *dispatch.Record)
}

// Limits bound what one caller's connection may take. Zero fields get the default.
type Limits struct {
	HeadBytes        int           // of a request head; default 64 KiB
	HeadTimeout      time.Duration // from the first byte of a head to its end; default 30s
	BodyIdle         time.Duration // longest silence inside a request body; default 1m
	WriteStall       time.Duration // longest time without progress of a write to the caller; default 2m
	IdleTimeout      time.Duration // of a connection or tunnel without a request; default 5m
	HandshakeTimeout time.Duration // TLS with the caller; default 15s
	Streams          int           // concurrent requests on one HTTP/2 connection; default 250
}

func (l Limits) withDefaults() Limits {
	set := func(d *time.Duration, v time.Duration) {
		if *d <= 0 {
			*d = v
		}
	}
	if l.HeadBytes <= 0 {
		l.HeadBytes = 64 << 10
	}
	if l.Streams <= 0 {
		l.Streams = 250
	}
	set(&l.HeadTimeout, 30*time.Second)
	set(&l.BodyIdle, time.Minute)
	set(&l.WriteStall, 2*time.Minute)
	set(&l.IdleTimeout, 5*time.Minute)
	set(&l.HandshakeTimeout, 15*time.Second)
	return l
}

// Config wires a Proxy.
type Config struct {
	Pipeline Pipeline
	Journal  Journal
	CA       *CA
	SSHCA    *SSHCA // of the SSH endpoint; nil: ServeSSH is not called
	Callers  Authenticator
	Sessions *Sessions        // for the admin API; nil: no sessions
	Metrics  *metrics.Metrics // nil: none
	Logger   *slog.Logger     // nil: none
	Limits   Limits
	Admin    Admin
	// FollowUp asks and takes what became of actions; nil: not available. Origin is the
	// journal's identity (CONTRACT K4).
	FollowUp FollowUp
	Origin   string
	// TLS is what callers of the proxy listener speak (FrontTLS); nil: plain TCP.
	TLS *tls.Config
}

// Proxy is the front. It is safe for concurrent use.
type Proxy struct {
	pipeline Pipeline
	journal  Journal
	ca       *CA
	sshCA    *SSHCA
	callers  Authenticator
	sessions *Sessions
	metrics  *metrics.Metrics
	log      *slog.Logger
	limits   Limits
	admin    Admin
	followUp FollowUp
	origin   string
	tls      *tls.Config // of the proxy listener

	engine   *goproxy.ProxyHttpServer
	server   *http.Server // of the proxy listener, and of everything inside tunnels
	handover *handoverListener
	api      http.Handler
	start    sync.Once
	base     context.Context // of everything that outlives a handler
	stop     context.CancelFunc

	sshSessions atomic.Int64 // of the SSH endpoint

	inFlight counter // requests in a handler
	hijacked counter // CONNECTs whose connection left net/http

	mu        sync.Mutex
	listeners map[net.Listener]struct{}
	addr      net.Addr
	draining  atomic.Bool
	tunnels   map[*tunnel]struct{}
	conns     map[*headConn]struct{}
}

// ErrAuthenticationRequired is returned by Serve for a listener that others than
// this machine can reach while callers need not authenticate (CONTRACT V4).
var ErrAuthenticationRequired = errors.New("proxy: the listener is not on loopback, so callers must authenticate; configure callers")

// New returns a Proxy. Pipeline, Journal, CA and Callers are needed.
func New(cfg Config) *Proxy {
	p := &Proxy{
		pipeline: cfg.Pipeline, journal: cfg.Journal, ca: cfg.CA, sshCA: cfg.SSHCA, callers: cfg.Callers, sessions: cfg.Sessions, metrics: cfg.Metrics,
		log: cfg.Logger, limits: cfg.Limits.withDefaults(), admin: cfg.Admin, followUp: cfg.FollowUp, origin: cfg.Origin, tls: cfg.TLS,
		handover:  newHandoverListener(),
		listeners: make(map[net.Listener]struct{}),
		tunnels:   make(map[*tunnel]struct{}),
		conns:     make(map[*headConn]struct{}),
	}
	if p.log == nil {
		p.log = slog.New(slog.DiscardHandler)
	}
	p.base, p.stop = context.WithCancel(context.Background())
	p.api = http.HandlerFunc(p.serveAPI)
	p.engine = p.newEngine()
	var protocols http.Protocols
	protocols.SetHTTP1(true)
	protocols.SetHTTP2(true) // over TLS, inside tunnels; never on the proxy listener itself
	p.server = &http.Server{
		Handler:   http.HandlerFunc(p.handle),
		Protocols: &protocols,
		HTTP2:     &http.HTTP2Config{MaxConcurrentStreams: p.limits.Streams, WriteByteTimeout: p.limits.WriteStall, SendPingTimeout: p.limits.IdleTimeout},
		// How long the first byte may take. From the first byte on the head has its own
		// time, in headConn, which also knows how to answer when it is over.
		ReadHeaderTimeout: p.limits.IdleTimeout,
		IdleTimeout:       p.limits.IdleTimeout,
		// headConn and handle refuse what is larger than HeadBytes, with an envelope;
		// net/http, which has none, gets to refuse only what is far beyond it.
		MaxHeaderBytes: 4*p.limits.HeadBytes + 64<<10,
		ErrorLog:       newServerLog(p.log),
		ConnContext:    connContext,
		// "OPTIONS *" is answered here too, not by net/http behind our back.
		DisableGeneralOptionsHandler: true,
	}
	return p
}

// newEngine returns the goproxy instance with every default overridden that would
// dial, trust, log or answer by itself (DESIGN section 3).
func (p *Proxy) newEngine() *goproxy.ProxyHttpServer {
	e := goproxy.NewProxyHttpServer()
	refuseDial := func(context.Context, string, string) (net.Conn, error) { return nil, errNoDial }
	// Nothing is ever sent through goproxy: the pipeline does that. What still tried
	// would fail here instead of bypassing routes, address policy and journal.
	e.Tr = &http.Transport{DialContext: refuseDial, DialTLSContext: refuseDial, DisableKeepAlives: true, DisableCompression: true}
	e.ConnectDial = func(string, string) (net.Conn, error) { return nil, errNoDial }
	e.ConnectDialWithReq = nil
	e.Verbose = false
	e.Logger = engineLog{p.log}
	e.KeepHeader = true
	e.KeepDestinationHeaders = true // response has put the fields there
	e.KeepAcceptEncoding = true
	e.NonproxyHandler = p.api
	e.OnRequest().HandleConnectFunc(func(host string, _ *goproxy.ProxyCtx) (*goproxy.ConnectAction, string) {
		return &goproxy.ConnectAction{Action: goproxy.ConnectHijack, Hijack: p.hijack}, host
	})
	e.OnRequest().DoFunc(p.forward)
	return e
}

var errNoDial = errors.New("proxy: goproxy is not to dial")

// Serve accepts callers on ln until ln fails, ctx ends, or Shutdown is called, and
// closes it. It returns nil after Shutdown or the end of ctx. It may be called for
// several listeners. ErrAuthenticationRequired.
func (p *Proxy) Serve(ctx context.Context, ln net.Listener) error {
	if p.tls != nil {
		ln = tls.NewListener(ln, p.tls)
	}
	return p.serve(ctx, &frontListener{Listener: ln, p: p})
}

func (p *Proxy) serve(ctx context.Context, front *frontListener) error {
	ln := front.Listener
	if !loopbackListener(ln.Addr()) {
		if r, ok := p.callers.(interface{ Required() bool }); !ok || !r.Required() {
			_ = ln.Close()
			return ErrAuthenticationRequired
		}
	}
	p.mu.Lock()
	if p.draining.Load() {
		p.mu.Unlock()
		_ = ln.Close()
		return nil
	}
	p.listeners[front] = struct{}{}
	if p.addr == nil && !front.ssh {
		p.addr = ln.Addr()
	}
	p.mu.Unlock()
	p.start.Do(func() {
		go func() { _ = p.server.Serve(p.handover) }() // ends with Shutdown
	})
	unhook := context.AfterFunc(ctx, func() { _ = front.Close() })
	defer unhook()
	err := p.server.Serve(front)
	p.mu.Lock()
	delete(p.listeners, front)
	p.mu.Unlock()
	if p.draining.Load() || ctx.Err() != nil || errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return fmt.Errorf("proxy: serve: %w", err)
}

func loopbackListener(a net.Addr) bool {
	if t, ok := a.(*net.TCPAddr); ok {
		return t.IP.IsLoopback()
	}
	_, unix := a.(*net.UnixAddr)
	return unix
}

// Addr returns the address of the first listener that Serve was called with, or nil.
func (p *Proxy) Addr() net.Addr {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.addr
}

// Shutdown stops accepting, closes what is idle, lets every request that was read be
// answered (GOAWAY on HTTP/2, Connection: close on HTTP/1), and waits for tunnels.
// When ctx ends first it closes the rest and returns ctx's error. The pipeline should
// drain at the same time, so that requests that still come in are answered with
// DRAINING.
func (p *Proxy) Shutdown(ctx context.Context) error {
	p.mu.Lock()
	p.draining.Store(true)
	listeners := make([]net.Listener, 0, len(p.listeners))
	for ln := range p.listeners {
		listeners = append(listeners, ln)
	}
	waiting := make([]*tunnel, 0, len(p.tunnels))
	for t := range p.tunnels {
		if !t.serving {
			waiting = append(waiting, t)
		}
	}
	fresh := make([]*headConn, 0, len(p.conns))
	for c := range p.conns {
		if c.untouched() {
			fresh = append(fresh, c)
		}
	}
	p.mu.Unlock()
	for _, ln := range listeners {
		_ = ln.Close()
	}
	for _, c := range fresh {
		_ = c.Close() // net/http would give each five more seconds to say something
	}
	// Keep-alive goes off before http.Server shuts down: a server that shuts down
	// drops a request it has just read, without an answer (L7).
	p.server.SetKeepAlivesEnabled(false)
	for _, t := range waiting {
		t.close() // no request was read yet
	}
	err := p.inFlight.wait(ctx)
	_ = p.handover.Close()
	if serr := p.server.Shutdown(ctx); err == nil {
		err = serr
	}
	if herr := p.hijacked.wait(ctx); err == nil {
		err = herr
	}
	if err != nil {
		_ = p.server.Close()
		p.mu.Lock()
		for t := range p.tunnels {
			t.close()
		}
		p.mu.Unlock()
	}
	p.stop()
	if err != nil {
		return fmt.Errorf("proxy: shutdown: %w", err)
	}
	return nil
}

// counter counts what Shutdown waits for. The zero value counts zero.
type counter struct {
	mu   sync.Mutex
	n    int
	zero chan struct{} // closed when n is zero; nil: nobody waits
}

func (c *counter) add(delta int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.n += delta
	if c.n == 0 && c.zero != nil {
		close(c.zero)
		c.zero = nil
	}
}

func (c *counter) count() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.n
}

func (c *counter) wait(ctx context.Context) error {
	c.mu.Lock()
	if c.n == 0 {
		c.mu.Unlock()
		return nil
	}
	if c.zero == nil {
		c.zero = make(chan struct{})
	}
	zero := c.zero
	c.mu.Unlock()
	select {
	case <-zero:
		return nil
	case <-ctx.Done():
		return ctx.Err()
	}
}

// handle serves every request: from the proxy listener and from inside tunnels.
func (p *Proxy) handle(w http.ResponseWriter, r *http.Request) {
	st, ok := r.Context().Value(connKey{}).(*connState)
	if !ok {
		panic("proxy: a connection without state")
	}
	x := &exchange{p: p, origin: r, conn: st, tunnel: st.tunnel}
	x.w = &x.own.answer
	x.w.ResponseWriter = w
	if x.tunnel != nil {
		x.caller = x.tunnel.caller
	}
	p.inFlight.add(1)
	defer x.leave()
	defer x.recovered(r)
	if st.head != nil {
		if v := st.head.violationFor(r.RequestURI); v != nil {
			x.violated(r, v)
			return
		}
		if x.head, ok = st.head.popHead(); !ok {
			panic("proxy: a request without a checked head")
		}
	} else if headerBytes(r) > p.limits.HeadBytes {
		v := *errTooBig
		v.head.method = r.Method
		x.refused(r, &v)
		return
	}
	r = r.WithContext(context.WithValue(r.Context(), exchangeKey{}, x))
	presented := takeProxyCredentials(r.Header)
	if x.tunnel != nil {
		// What was presented inside the tunnel is dropped (HD-03): the credentials of the
		// CONNECT count, for as long as they do.
		if !p.stillValid(x.caller) {
			x.unauthenticated(r)
			return
		}
		p.inside(x, r)
		return
	}
	if !r.URL.IsAbs() && r.Method != http.MethodConnect && len(presented) == 0 {
		// Addressed to Waybill itself: ordinary credentials will do.
		presented = r.Header["Authorization"]
	}
	if st.head.ssh {
		p.handleSSH(x, r, presented)
		return
	}
	x.caller, ok = p.authenticate(presented, st.head)
	if !ok {
		x.unauthenticated(r)
		return
	}
	switch {
	case r.Method == http.MethodConnect:
		p.connect(x, r)
	case r.URL.IsAbs() && isOwnName(x.head.authority):
		p.serveAPI(x.w, r)
	default:
		p.engine.ServeHTTP(x.w, r)
	}
}

// stillValid asks, where the Authenticator can tell, whether a tunnel's caller would
// still be let in.
func (p *Proxy) stillValid(c dispatch.Caller) bool {
	v, ok := p.callers.(interface{ Valid(dispatch.Caller) bool })
	return !ok || v.Valid(c)
}

// inside serves a request that came through an intercepted tunnel: it gets the
// absolute URL it would have had outside, and goes the same way (DESIGN section 3).
func (p *Proxy) inside(x *exchange, r *http.Request) {
	if x.tunnel.own {
		p.serveAPI(x.w, r)
		return
	}
	u := &x.own.url
	*u = *r.URL
	u.Scheme, u.Host = x.tunnel.scheme, x.tunnel.authority
	r.URL = u
	p.engine.ServeHTTP(x.w, r)
}

// headerBytes estimates the size of an HTTP/2 header list as RFC 9113 §6.5.2 counts it.
func headerBytes(r *http.Request) int {
	n := len(r.Method) + len(r.RequestURI) + len(r.Host) + 4*32
	for k, vs := range r.Header {
		for _, v := range vs {
			n += len(k) + len(v) + 32
		}
	}
	return n
}

type exchangeKey struct{}

// exchange is one request on its way through the front.
type exchange struct {
	p      *Proxy
	origin *http.Request // net/http's own, which gets the trailer fields
	conn   *connState
	tunnel *tunnel // nil outside
	head   headInfo
	caller dispatch.Caller
	w      *answerWriter

	submitted bool            // the pipeline has seen the request
	reply     *dispatch.Reply // of the pipeline
	handed    bool            // HandedOver was called
	broken    error           // the reply's body failed
	body      *callerBody     // nil: none
	left      bool            // not counted in flight any more

	// own is what nearly every exchange needs, in one piece of memory.
	own struct {
		answer   answerWriter
		informer informer
		url      url.URL
		context  callerContext
		request  callerBody
		reply    replyBody
	}
}

// leave ends counting the exchange in flight, once.
func (x *exchange) leave() {
	if !x.left {
		x.left = true
		x.p.inFlight.add(-1)
	}
}

func exchangeOf(r *http.Request) *exchange {
	x, _ := r.Context().Value(exchangeKey{}).(*exchange)
	return x
}

// answerWriter remembers whether an answer has begun and how writing it went.
type answerWriter struct {
	http.ResponseWriter
	began bool
	err   error
}

// WriteHeader begins the answer, unless status is informational.
func (w *answerWriter) WriteHeader(status int) {
	if status >= http.StatusOK || status == http.StatusSwitchingProtocols {
		w.began = true
	}
	w.ResponseWriter.WriteHeader(status)
}

// Write writes to the caller.
func (w *answerWriter) Write(p []byte) (int, error) {
	w.began = true
	n, err := w.ResponseWriter.Write(p)
	if err != nil && w.err == nil {
		w.err = err
	}
	return n, err
}

// FlushError sends what is buffered, so that a caller that is gone shows as an error.
func (w *answerWriter) FlushError() error {
	w.began = true
	err := http.NewResponseController(w.ResponseWriter).Flush()
	if err != nil && w.err == nil {
		w.err = err
	}
	return err
}

// Flush is FlushError for those who do not ask.
func (w *answerWriter) Flush() { _ = w.FlushError() }

// Unwrap is for http.ResponseController.
func (w *answerWriter) Unwrap() http.ResponseWriter { return w.ResponseWriter }

// answer writes an answer of Waybill's own.
func (w *answerWriter) answer(a outcome.Answer) {
	h := w.Header()
	for k := range h {
		delete(h, k)
	}
	for k, v := range a.Header {
		h[k] = v
	}
	w.WriteHeader(a.Status)
	_, _ = w.Write(a.Body) // the error is kept in w.err
}
