package httpx

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/binary"
	"errors"
	"hash"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"waybill/dispatch"
	"waybill/internal/control"
	"waybill/outcome"
	"waybill/routes"
)

// Config wires a Transport. The zero value of every field has a usable default.
type Config struct {
	// Resolver resolves names; nil: the system's.
	Resolver interface {
		LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
	}
	// Dial makes TCP connections to an address that has been judged; nil: net.Dialer.
	Dial func(ctx context.Context, network, address string) (net.Conn, error)
	// SystemRoots are the trust anchors of routes without roots; nil: the system's.
	SystemRoots *x509.CertPool
	// OwnCA is the SHA-256 of the interception CA's SubjectPublicKeyInfo: an origin
	// certificate under it is refused. nil: no such check.
	OwnCA *[sha256.Size]byte
	// MaxIdlePerKey bounds the pool of one origin and credential; 0: 256.
	MaxIdlePerKey int
	// MaxRest closes pooled connections after this time; 0: 60 s.
	MaxRest time.Duration
	// ContinueWait is how long a request with Expect: 100-continue waits for the origin
	// before its body is sent all the same (RFC 9110 §10.1.1); 0: 1 s.
	ContinueWait time.Duration
	Logger       *slog.Logger
}

const (
	maxResponseHeaderBytes = 1 << 20
	bufferBytes            = 16 << 10
)

// Transport implements dispatch.Transport over TCP and TLS. It is safe for
// concurrent use; Close ends it.
type Transport struct {
	cfg Config
	h1  *http.Transport
	h2  *http.Transport

	next atomic.Uint64
	boot string

	mu     sync.Mutex
	idle   map[poolKey][]*conn // most recent last
	tls    map[[sha256.Size]byte]*tls.Config
	reqs   map[*routes.Upstream][sha256.Size]byte
	closed bool
	sweep  *time.Timer
}

// poolKey separates everything that must not share a connection (CONTRACT E6).
type poolKey struct {
	target       routes.Target
	requirements [sha256.Size]byte
	identity     string
	http1        bool // no HTTP/2 was offered
}

type preparedKey struct{}

// New returns a Transport.
func New(cfg Config) *Transport {
	if cfg.Resolver == nil {
		cfg.Resolver = net.DefaultResolver
	}
	if cfg.Dial == nil {
		d := &net.Dialer{KeepAlive: 15 * time.Second}
		cfg.Dial = d.DialContext
	}
	if cfg.SystemRoots == nil {
		if pool, err := x509.SystemCertPool(); err == nil {
			cfg.SystemRoots = pool
		}
	}
	if cfg.MaxIdlePerKey == 0 {
		cfg.MaxIdlePerKey = 256
	}
	if cfg.MaxRest == 0 {
		cfg.MaxRest = time.Minute
	}
	if cfg.ContinueWait == 0 {
		cfg.ContinueWait = time.Second
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	t := &Transport{cfg: cfg, idle: make(map[poolKey][]*conn), tls: make(map[[sha256.Size]byte]*tls.Config), reqs: make(map[*routes.Upstream][sha256.Size]byte),
		boot: strconv.FormatInt(time.Now().UnixNano()&(1<<40-1), 36)}
	prepared := func(ctx context.Context, _, _ string) (net.Conn, error) {
		c, ok := ctx.Value(preparedKey{}).(net.Conn)
		if !ok {
			return nil, errors.New("httpx: no prepared connection")
		}
		return c, nil
	}
	base := func() *http.Transport {
		return &http.Transport{DialContext: prepared, Proxy: nil, DisableCompression: true, MaxResponseHeaderBytes: maxResponseHeaderBytes,
			ExpectContinueTimeout: cfg.ContinueWait, WriteBufferSize: bufferBytes, ReadBufferSize: bufferBytes, Protocols: new(http.Protocols), MaxIdleConnsPerHost: 1}
	}
	t.h1, t.h2 = base(), base()
	t.h1.Protocols.SetHTTP1(true)
	t.h2.Protocols.SetUnencryptedHTTP2(true)
	return t
}

// requirements returns the digest of a route's requirements, made once: routes do not
// change after they were loaded.
func (t *Transport) requirements(u *routes.Upstream) [sha256.Size]byte {
	t.mu.Lock()
	sum, ok := t.reqs[u]
	t.mu.Unlock()
	if ok {
		return sum
	}
	sum = requirements(u)
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.reqs) >= 4096 {
		clear(t.reqs) // reloads leave old routes behind
	}
	t.reqs[u] = sum
	return sum
}

// requirements digests everything that decides which peer is acceptable (E6).
func requirements(u *routes.Upstream) [sha256.Size]byte {
	h := sha256.New()
	put(h, u.RootsPEM)
	pins := slices.Sorted(slices.Values(u.Pins))
	for _, p := range pins {
		put(h, []byte(p))
	}
	var flags byte
	for i, f := range []bool{u.RootsOnly, u.AllowPrivate, u.AllowPlaintext} {
		if f {
			flags |= 1 << i
		}
	}
	put(h, []byte{flags})
	keys := make([]string, 0, len(u.Resolve))
	for k := range u.Resolve {
		keys = append(keys, k)
	}
	slices.Sort(keys)
	for _, k := range keys {
		put(h, []byte(k))
		put(h, []byte(u.Resolve[k]))
	}
	putProxy(func(b []byte) { put(h, b) }, u.Proxy)
	return [sha256.Size]byte(h.Sum(nil))
}

func put(h hash.Hash, b []byte) {
	var n [8]byte
	binary.BigEndian.PutUint64(n[:], uint64(len(b)))
	h.Write(n[:])
	h.Write(b)
}

func (t *Transport) keyOf(o *dispatch.Order) poolKey {
	if control.Off("E6-pool-by-requirements") {
		return poolKey{target: o.Target}
	}
	return poolKey{target: o.Target, requirements: t.requirements(o.Upstream), identity: o.Identity, http1: o.HTTP1}
}

// Pooled returns a pooled connection that rested no longer than o.MaxRest; nil: there is
// none.
func (t *Transport) Pooled(o *dispatch.Order) dispatch.Conn {
	if c := t.take(t.keyOf(o), o.MaxRest); c != nil {
		return c
	}
	return nil
}

// Connect returns a pooled connection that rested no longer than o.MaxRest, or a
// fresh one. Errors are *dispatch.SetupError.
func (t *Transport) Connect(ctx context.Context, o *dispatch.Order) (dispatch.Conn, error) {
	key := t.keyOf(o)
	if c := t.take(key, o.MaxRest); c != nil {
		return c, nil
	}
	tcp, err := t.Dial(ctx, o)
	if err != nil {
		return nil, err
	}
	c := &conn{t: t, key: key, id: t.boot + "-" + strconv.FormatUint(t.next.Add(1), 36), stage: outcome.StageTCPConnect}
	if o.Upstream.Proxy != nil {
		c.stage = outcome.StageProxyTunnel
	}
	c.tap = &tap{Conn: tcp}
	var state *tls.ConnectionState
	if o.Target.Scheme == "https" {
		cfg, err := t.clientTLS(o.Target.Host, o.Upstream, key.requirements)
		if err != nil {
			_ = tcp.Close()
			return nil, err
		}
		if o.Certificate != nil {
			// Always this one: chosen by the authorities that a server names, it might be none.
			cfg = cfg.Clone()
			cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return o.Certificate, nil }
		}
		if o.HTTP1 {
			cfg = cfg.Clone()
			cfg.NextProtos = []string{"http/1.1"}
		}
		raw := &rawConn{Conn: tcp}
		secured, err := t.handshake(ctx, raw, cfg, o.Target.Host)
		if err != nil {
			var s *dispatch.SetupError
			if errors.As(err, &s) {
				s.Stage = c.stage // E2
			}
			return nil, err
		}
		cs := secured.ConnectionState()
		state = &cs
		c.stage = outcome.StageTLSHandshake
		c.tap = &tap{Conn: secured, raw: raw, h2: cs.NegotiatedProtocol == "h2"}
	}
	c.peer = peerOf(tcp.RemoteAddr().String(), state)
	if p := o.Upstream.Proxy; p != nil {
		c.peer.Proxy = p.Origin() // Address is the proxy's
	}
	c.tap.idle = c.proven
	if c.tap.raw != nil {
		c.tap.raw.wire = c.tap.wire
	}
	tr := t.h1
	if c.tap.h2 {
		tr = t.h2
		c.tap.out.skip = len(preface)
	}
	c.cc, err = tr.NewClientConn(context.WithValue(ctx, preparedKey{}, net.Conn(c.tap)), "http", net.JoinHostPort(o.Target.Host, strconv.Itoa(o.Target.Port)))
	if err != nil {
		_ = c.tap.Close()
		return nil, fail(outcome.CodeConnectionLost, c.stage, "connection_cut", err)
	}
	return c, nil
}

// Dial returns a bare TCP connection, or a tunnel through the route's proxy, under the
// address policy.
func (t *Transport) Dial(ctx context.Context, o *dispatch.Order) (net.Conn, error) {
	if o.Upstream.Proxy != nil {
		return t.throughProxy(ctx, o)
	}
	addrs, err := t.resolve(ctx, o)
	if err != nil {
		return nil, err
	}
	return t.dialTCP(ctx, addrs)
}

func (t *Transport) clientTLS(host string, u *routes.Upstream, req [sha256.Size]byte) (*tls.Config, error) {
	h := sha256.New()
	put(h, []byte(host))
	put(h, req[:])
	key := [sha256.Size]byte(h.Sum(nil))
	t.mu.Lock()
	cfg, ok := t.tls[key]
	t.mu.Unlock()
	if ok {
		return cfg, nil
	}
	cfg, err := t.tlsConfig(host, u)
	if err != nil {
		return nil, err
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	if len(t.tls) >= 1024 {
		clear(t.tls) // a cache: rebuilt from the routes
	}
	t.tls[key] = cfg
	return cfg, nil
}

func (t *Transport) take(key poolKey, maxRest time.Duration) *conn {
	if maxRest <= 0 {
		return nil
	}
	now := time.Now()
	var stale []*conn
	defer func() {
		for _, c := range stale {
			c.close()
		}
	}()
	t.mu.Lock()
	defer t.mu.Unlock()
	list := t.idle[key]
	for len(list) > 0 {
		c := list[len(list)-1]
		if now.Sub(c.since) > min(maxRest, t.cfg.MaxRest) {
			break // the others rested longer
		}
		list = list[:len(list)-1]
		if c.cc.Err() == nil && c.cc.Available() > 0 {
			t.setIdle(key, list)
			c.reused = true
			return c
		}
		stale = append(stale, c)
	}
	t.setIdle(key, list)
	return nil
}

func (t *Transport) setIdle(key poolKey, list []*conn) {
	if len(list) == 0 {
		delete(t.idle, key)
		return
	}
	t.idle[key] = list
}

// give puts a connection that is proven to be between messages into the pool.
func (t *Transport) give(c *conn) {
	t.mu.Lock()
	list := t.idle[c.key]
	out := c // what leaves the pool
	if !t.closed && c.cc.Err() == nil {
		out = nil
		if len(list) >= t.cfg.MaxIdlePerKey {
			// The one that rested longest goes: some of them have rested too long for any
			// operation that is not repeatable, and would keep the fresh ones out.
			out = list[0]
			list = append(list[:0], list[1:]...)
		}
		c.since = time.Now()
		t.idle[c.key] = append(list, c)
		if t.sweep == nil {
			t.sweep = time.AfterFunc(t.cfg.MaxRest, t.expire)
		}
	}
	t.mu.Unlock()
	if out != nil {
		out.close()
	}
}

// expire closes what rested too long or died.
func (t *Transport) expire() {
	now := time.Now()
	var old []*conn
	t.mu.Lock()
	for key, list := range t.idle {
		keep := list[:0]
		for _, c := range list {
			if now.Sub(c.since) > t.cfg.MaxRest || c.cc.Err() != nil {
				old = append(old, c)
			} else {
				keep = append(keep, c)
			}
		}
		clear(list[len(keep):])
		t.setIdle(key, keep)
	}
	t.sweep = nil
	if len(t.idle) > 0 && !t.closed {
		t.sweep = time.AfterFunc(t.cfg.MaxRest/2, t.expire)
	}
	t.mu.Unlock()
	for _, c := range old {
		c.close()
	}
}

// CloseIdle closes every pooled connection.
func (t *Transport) CloseIdle() {
	t.mu.Lock()
	idle := t.idle
	t.idle = make(map[poolKey][]*conn)
	t.mu.Unlock()
	for _, list := range idle {
		for _, c := range list {
			c.close()
		}
	}
}

// Close closes the pool; connections in use are closed when they are released.
func (t *Transport) Close() {
	t.mu.Lock()
	t.closed = true
	if t.sweep != nil {
		t.sweep.Stop()
	}
	t.mu.Unlock()
	t.CloseIdle()
}

// Idle returns the number of pooled connections.
func (t *Transport) Idle() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for _, list := range t.idle {
		n += len(list)
	}
	return n
}
