package sshx

import (
	"context"
	"errors"
	"net"
	"slices"
	"strconv"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/ssh"

	"waybill/dispatch"
	"waybill/internal/control"
	"waybill/outcome"
	"waybill/routes"
)

// clientVersion is what Waybill says it is (RFC 4253 §4.2).
const clientVersion = "SSH-2.0-Waybill"

// Algorithms returns the lists for both sides of Waybill: nothing with SHA-1, NIST
// curves, CBC or MACs before encryption.
func Algorithms() ssh.Config {
	return ssh.Config{
		KeyExchanges: []string{ssh.KeyExchangeMLKEM768X25519, ssh.KeyExchangeCurve25519, ssh.KeyExchangeDH16SHA512},
		Ciphers:      []string{ssh.CipherChaCha20Poly1305, ssh.CipherAES256GCM, ssh.CipherAES128GCM, ssh.CipherAES256CTR, ssh.CipherAES192CTR, ssh.CipherAES128CTR},
		MACs:         []string{ssh.HMACSHA256ETM, ssh.HMACSHA512ETM},
	}
}

// dial makes one connection, through the jump host where there is one. The context
// bounds everything up to authentication.
func (t *Transport) dial(ctx context.Context, p *pool, o *dispatch.Order) (*conn, error) {
	s := o.Exec.SSH
	trust, err := ParseTrust(s.KnownHosts, s.Pins)
	if err != nil {
		return nil, fail(outcome.CodeSSHHostKeyRejected, "", "bad_known_hosts", err)
	}
	c := &conn{p: p, over: make(chan struct{}), id: "ssh-" + t.boot + "-" + strconv.FormatUint(t.next.Add(1), 36)}
	var raw net.Conn
	stage := outcome.StageTCPConnect
	if j := s.Jump; j != nil {
		var done func()
		var shown string
		raw, done, shown, err = t.jump(ctx, p, o, trust)
		if err != nil {
			return nil, err
		}
		trust = trust.without(shown)
		c.jump, stage = done, outcome.StageProxyTunnel
	} else if raw, err = t.cfg.Dial(ctx, o); err != nil {
		return nil, err
	}
	address := ""
	if a := raw.RemoteAddr(); a != nil && s.Jump == nil {
		address = a.String()
	}
	c.tap = newTap(raw)
	l := &login{host: o.Target.Host, port: o.Target.Port, user: o.Exec.User, signers: o.Exec.Signers, trust: trust, stage: stage, curves: &p.curves}
	var chans <-chan ssh.NewChannel
	var reqs <-chan *ssh.Request
	if c.ssh, chans, reqs, err = l.handshake(ctx, c.tap); err != nil {
		if c.jump != nil {
			c.jump()
		}
		return nil, err
	}
	c.peer = &outcome.Peer{Address: address, Protocol: "ssh-2.0", HostKey: l.fingerprint}
	go ssh.DiscardRequests(reqs)
	go refuseChannels(chans)
	go func() {
		_ = c.ssh.Wait() // its error is of no interest: the tap knows how it ended
		close(c.over)
	}()
	go c.watch(s.Keepalive)
	return c, nil
}

// refuseChannels refuses whatever a server opens: agent and port forwarding.
func refuseChannels(chans <-chan ssh.NewChannel) {
	for nc := range chans {
		_ = nc.Reject(ssh.Prohibited, "not carried")
	}
}

// jump reaches the target through the jump host, and returns the fingerprint of the key
// by which that one is known.
func (t *Transport) jump(ctx context.Context, p *pool, o *dispatch.Order, trust *Trust) (net.Conn, func(), string, error) {
	j := o.Exec.SSH.Jump
	order := &dispatch.Order{Target: routes.Target{Scheme: "ssh", Host: j.Host, Port: j.Port}, Upstream: o.Upstream}
	raw, err := t.cfg.Dial(ctx, order)
	if err != nil {
		return nil, nil, "", err
	}
	l := &login{host: j.Host, port: j.Port, user: j.User, signers: o.Exec.Jump, trust: trust, stage: outcome.StageTCPConnect, jump: true, curves: &p.jumpCurves}
	sc, chans, reqs, err := l.handshake(ctx, newTap(raw))
	if err != nil {
		return nil, nil, "", err
	}
	client := ssh.NewClient(sc, chans, reqs)
	stop := context.AfterFunc(ctx, func() { _ = client.Close() })
	conn, err := client.Dial("tcp", o.Target.Authority())
	if !stop() && err == nil {
		_ = conn.Close()
		err = ctx.Err()
	}
	if err != nil {
		_ = client.Close()
		return nil, nil, "", fail(outcome.CodeProxyTunnelFailed, outcome.StageTCPConnect, "jump_tunnel", err)
	}
	return conn, func() { _ = client.Close() }, l.fingerprint, nil
}

// login is one handshake with its progress.
type login struct {
	host    string
	port    int
	user    string
	signers []ssh.Signer
	trust   *Trust
	stage   outcome.Stage // completed before it
	jump    bool
	// curves: host keys on NIST curves are offered too, since the host had no other. It is
	// set here, for the next try (CONTRACT E7).
	curves *atomic.Bool

	fingerprint string
	verified    atomic.Bool
	refused     atomic.Bool // the server said no to what was offered
}

// handshake makes transport, host verification and authentication. It closes the
// connection when it fails.
func (l *login) handshake(ctx context.Context, t *tap) (ssh.Conn, <-chan ssh.NewChannel, <-chan *ssh.Request, error) {
	cfg := &ssh.ClientConfig{
		Config:        Algorithms(),
		User:          l.user,
		ClientVersion: clientVersion,
		Auth:          []ssh.AuthMethod{ssh.PublicKeys(l.signers...)},
		AuthCallback: func(c *ssh.ClientAuthContext) (ssh.AuthMethod, error) {
			// Called after each method that did not do; "none" is the first. A method also fails
			// with its connection, and that is no refusal.
			if ctx.Err() != nil || t.failed.Load() {
				return nil, nil
			}
			if slices.Contains(c.TriedMethods, "publickey") || !slices.Contains(c.AllowedMethods, "publickey") {
				l.refused.Store(true)
			}
			return nil, nil
		},
		HostKeyAlgorithms: l.trust.algorithms(l.host, l.port, l.curves.Load()),
		HostKeyCallback: func(_ string, _ net.Addr, key ssh.PublicKey) error {
			if err := l.trust.check(l.host, l.port, key); err != nil && !control.Off("G7-host-key-verified") {
				return err
			}
			if !l.verified.Swap(true) {
				t.hold.Store(true) // a refusal that comes before the end is seen before it
				plain := key
				if cert, ok := key.(*ssh.Certificate); ok {
					plain = cert.Key
				}
				l.fingerprint = ssh.FingerprintSHA256(plain)
			}
			return nil
		},
	}
	// The library's own timeout does not cover the handshake.
	stop := context.AfterFunc(ctx, func() { _ = t.Close() })
	c, chans, reqs, err := ssh.NewClientConn(t, net.JoinHostPort(l.host, strconv.Itoa(l.port)), cfg)
	if !stop() && err == nil {
		_ = c.Close()
		err = ctx.Err()
	}
	if err != nil {
		_ = t.Close()
		return nil, nil, nil, l.failed(ctx, t, err)
	}
	return c, chans, reqs, nil
}

// failed classifies a handshake by how far it came (CONTRACT E2).
func (l *login) failed(ctx context.Context, t *tap, err error) *dispatch.SetupError {
	prefix := ""
	if l.jump {
		prefix = "jump_"
	}
	stage := l.stage
	if l.verified.Load() && !l.jump {
		stage = outcome.StageSSHHostKey
	}
	var (
		host *hostKeyError
		algo *ssh.AlgorithmNegotiationError
	)
	switch {
	case errors.As(err, &host):
		e := fail(outcome.CodeSSHHostKeyRejected, outcome.StageSSHTransport, prefix+host.reason, err)
		if l.jump {
			e.Stage = l.stage
		}
		e.Detail = host.detail
		return e
	case l.refused.Load(), l.verified.Load() && ctx.Err() == nil && !t.failed.Load():
		e := fail(outcome.CodeSSHAuthFailed, stage, prefix+"auth_refused", err)
		e.Detail = "The destination refused the user " + strconv.Quote(l.user) + " with the key " + ssh.FingerprintSHA256(l.signers[0].PublicKey()) + "."
		return e
	case errors.As(err, &algo):
		if algo.What == "host key" {
			l.curves.Store(true)
		}
		return fail(outcome.CodeSSHHandshakeFailed, stage, prefix+"no_common_algorithm", err)
	case ctx.Err() != nil:
		return fail(outcome.CodeSSHHandshakeFailed, stage, prefix+"handshake_timeout", err)
	case t.failed.Load():
		return fail(outcome.CodeSSHHandshakeFailed, stage, prefix+"handshake_cut", err)
	default:
		return fail(outcome.CodeSSHHandshakeFailed, stage, prefix+"handshake_failed", err)
	}
}

// watch asks a silent peer whether it is there, and closes the connection of one that
// is not.
func (c *conn) watch(every time.Duration) {
	if every <= 0 {
		every = routes.DefaultKeepalive
	}
	tick := time.NewTicker(every)
	defer tick.Stop()
	defer c.lost()
	seen := c.tap.in.Load()
	answer := make(chan error, 1)
	asked := false
	misses := 0
	for {
		select {
		case <-c.tap.dead:
			return
		case err := <-answer:
			asked, misses = false, 0
			if err != nil {
				return
			}
		case <-tick.C:
			now := c.tap.in.Load()
			if now != seen {
				seen, misses = now, 0
				continue
			}
			if asked {
				if misses++; misses >= 3 {
					return
				}
				continue
			}
			asked = true
			go func() {
				_, _, err := c.ssh.SendRequest("keepalive@openssh.com", true, nil)
				answer <- err
			}()
		}
	}
}
