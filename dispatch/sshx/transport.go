package sshx

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/ssh"

	"waybill/dispatch"
	"waybill/internal/control"
	"waybill/outcome"
	"waybill/routes"
)

// Config wires a Transport.
type Config struct {
	// Dial makes a TCP connection under the address policy (CONTRACT V3). Its error is
	// always a *dispatch.SetupError.
	Dial func(ctx context.Context, o *dispatch.Order) (net.Conn, error)
	// MaxRest closes connections without a command after this time; 0: 60s.
	MaxRest time.Duration
	Logger  *slog.Logger // nil: none
}

// maxDialing bounds the connections to one target that are being set up: sshd drops
// more at random (MaxStartups).
const maxDialing = 4

// Transport implements dispatch.Transport for commands. It is safe for concurrent use;
// Close ends it.
type Transport struct {
	cfg  Config
	boot string
	next atomic.Uint64

	mu     sync.Mutex
	pools  map[poolKey]*pool
	closed bool
}

type poolKey [sha256.Size]byte

// New returns a Transport.
func New(cfg Config) *Transport {
	if cfg.MaxRest <= 0 {
		cfg.MaxRest = time.Minute
	}
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	return &Transport{cfg: cfg, boot: strconv.FormatInt(time.Now().UnixNano(), 36), pools: make(map[poolKey]*pool)}
}

// pool holds the connections to one target that may be shared.
type pool struct {
	t   *Transport
	max int // sessions on one connection
	// Of target and jump host: see login.curves.
	curves, jumpCurves atomic.Bool

	mu      sync.Mutex
	conns   []*conn
	dialing int
	change  chan struct{} // closed at the next change
}

// keyOf names everything that must be the same for two commands to share a connection
// (CONTRACT E6): target, user, credential, jump host and what host keys are verified
// against, and how the network is reached.
func keyOf(o *dispatch.Order) poolKey {
	s := *o.Exec.SSH
	s.Commands, s.Env, s.Users = nil, nil, nil
	if control.Off("E6-ssh-pool-by-verification") {
		s.KnownHosts, s.Pins = nil, nil
	}
	text, err := json.Marshal(struct {
		Target   routes.Target
		User     string
		Identity string
		SSH      *routes.SSH
		Upstream *routes.Upstream
	}{o.Target, o.Exec.User, o.Identity, &s, o.Upstream})
	if err != nil {
		panic(err) // plain values only
	}
	return sha256.Sum256(text)
}

func (t *Transport) pool(o *dispatch.Order) *pool {
	key := keyOf(o)
	t.mu.Lock()
	defer t.mu.Unlock()
	p := t.pools[key]
	if p == nil {
		p = &pool{t: t, max: o.Exec.SSH.Sessions, change: make(chan struct{})}
		if p.max <= 0 {
			p.max = routes.DefaultSessions
		}
		t.pools[key] = p
	}
	return p
}

// Connect implements dispatch.Transport: it returns a session channel with its
// environment set, on a shared connection or a fresh one.
//
// A connection may have rested as long as it likes (Order.MaxRest): opening the channel
// asks the peer, right before the boundary, whether it is still there.
func (t *Transport) Connect(ctx context.Context, o *dispatch.Order) (dispatch.Conn, error) {
	if o.Exec == nil || len(o.Exec.Signers) == 0 {
		return nil, fail(outcome.CodeSSHHandshakeFailed, "", "no_order", nil)
	}
	p := t.pool(o)
	for {
		c, reused, err := p.acquire(ctx, o)
		if err != nil {
			return nil, err
		}
		s, err := c.open(ctx, o, reused)
		switch {
		case err == nil:
			return s, nil
		case errors.Is(err, errFull):
			continue // another connection takes it
		case reused && lost(err):
			// Whatever broke it broke the others that rest here: the bounded tries (E7) are for
			// fresh connections, not for finding that out one by one.
			p.retire(func(c *conn) bool { return c.active == 0 })
		}
		return nil, err
	}
}

// Dial implements dispatch.Transport.
func (t *Transport) Dial(ctx context.Context, o *dispatch.Order) (net.Conn, error) {
	return t.cfg.Dial(ctx, o)
}

// CloseIdle closes the connections that carry no command.
func (t *Transport) CloseIdle() { t.each(func(c *conn) bool { return c.active == 0 }) }

// Close closes all connections.
func (t *Transport) Close() {
	t.mu.Lock()
	t.closed = true
	t.mu.Unlock()
	t.each(func(*conn) bool { return true })
}

func (t *Transport) each(which func(*conn) bool) {
	t.mu.Lock()
	pools := make([]*pool, 0, len(t.pools))
	for _, p := range t.pools {
		pools = append(pools, p)
	}
	t.mu.Unlock()
	for _, p := range pools {
		p.retire(which)
	}
}

// lost reports whether a connection broke.
func lost(err error) bool {
	var e *dispatch.SetupError
	return errors.As(err, &e) && e.Code == outcome.CodeConnectionLost
}

// retire closes connections and keeps new sessions off them. which is asked under p.mu.
func (p *pool) retire(which func(*conn) bool) {
	p.mu.Lock()
	var out []*conn
	for _, c := range p.conns {
		if which(c) {
			c.retired = true
			out = append(out, c)
		}
	}
	p.mu.Unlock()
	for _, c := range out {
		c.close()
	}
}

func (p *pool) changed() {
	close(p.change)
	p.change = make(chan struct{})
}

// acquire returns a connection with room for one more session, which counts from now on.
func (p *pool) acquire(ctx context.Context, o *dispatch.Order) (c *conn, reused bool, err error) {
	for {
		p.mu.Lock()
		for _, c := range p.conns {
			if !c.retired && !c.gone() && c.active < c.max {
				c.active++
				p.mu.Unlock()
				return c, true, nil
			}
		}
		if p.dialing < maxDialing {
			p.dialing++
			p.mu.Unlock()
			break
		}
		change := p.change
		p.mu.Unlock()
		select {
		case <-change:
		case <-ctx.Done():
			return nil, false, fail(outcome.CodeConnectionLimit, "", "setup_queue", ctx.Err())
		}
	}
	c, err = p.t.dial(ctx, p, o)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.dialing--
	p.changed()
	if err != nil {
		return nil, false, err
	}
	c.active, c.max = 1, p.max
	p.conns = append(p.conns, c)
	return c, false, nil
}

// conn is one authenticated connection.
type conn struct {
	p    *pool
	id   string
	ssh  ssh.Conn
	tap  *tap
	over chan struct{} // closed when the library is done with it
	peer *outcome.Peer
	jump func() // closes the jump host's connection; may be nil

	// Under pool.mu.
	active  int
	max     int
	retired bool // takes no further session
	idle    *time.Timer
}

func (c *conn) gone() bool {
	select {
	case <-c.tap.dead:
		return true
	default:
		return false
	}
}

func (c *conn) close() {
	_ = c.ssh.Close()
	_ = c.tap.Close()
	if c.jump != nil {
		c.jump()
	}
}

// release gives a session's place back. keep false: the connection is not used again.
func (c *conn) release(keep bool) {
	p := c.p
	p.mu.Lock()
	c.active--
	if !keep {
		c.retired = true
	}
	drop := c.active == 0 && (c.retired || c.gone())
	if drop {
		p.forget(c)
	} else if c.active == 0 {
		if c.idle != nil {
			c.idle.Stop()
		}
		c.idle = time.AfterFunc(p.t.cfg.MaxRest, c.rested)
	}
	p.changed()
	p.mu.Unlock()
	if drop {
		c.close()
	}
}

func (c *conn) rested() {
	p := c.p
	p.mu.Lock()
	drop := c.active == 0
	if drop {
		c.retired = true
		p.forget(c)
	}
	p.mu.Unlock()
	if drop {
		c.close()
	}
}

func (p *pool) forget(c *conn) {
	for i, o := range p.conns {
		if o == c {
			p.conns = append(p.conns[:i:i], p.conns[i+1:]...)
			return
		}
	}
}

// lost takes a connection that ended out of the pool.
func (c *conn) lost() {
	c.p.mu.Lock()
	c.retired = true
	c.p.forget(c)
	c.p.changed()
	c.p.mu.Unlock()
	c.close()
}

// Open returns the number of connections, for the metrics.
func (t *Transport) Open() int {
	t.mu.Lock()
	defer t.mu.Unlock()
	n := 0
	for _, p := range t.pools {
		p.mu.Lock()
		n += len(p.conns)
		p.mu.Unlock()
	}
	return n
}

func fail(code outcome.Code, stage outcome.Stage, reason string, err error) *dispatch.SetupError {
	return &dispatch.SetupError{Code: code, Stage: stage, Reason: reason, Err: err}
}
