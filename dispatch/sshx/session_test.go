package sshx_test

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"waybill/dispatch"
	"waybill/dispatch/sshx"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
	"waybill/routes"
)

// rig is a transport towards scripted servers.
type rig struct {
	t      *testing.T
	tr     *sshx.Transport
	signer ssh.Signer
	addr   map[string]string // host → address
}

func newRig(t *testing.T) *rig {
	r := &rig{t: t, addr: map[string]string{}}
	_, r.signer = testkit.SSHKey(t, "")
	r.tr = sshx.New(sshx.Config{Dial: func(ctx context.Context, o *dispatch.Order) (net.Conn, error) {
		var d net.Dialer
		c, err := d.DialContext(ctx, "tcp", r.addr[o.Target.Host])
		if err != nil {
			return nil, &dispatch.SetupError{Code: outcome.CodeConnectionRefused, Stage: outcome.StageDNS, Err: err}
		}
		return c, nil
	}})
	t.Cleanup(r.tr.Close)
	return r
}

func (r *rig) order(host string, s *testkit.SSHServer) *dispatch.Order {
	r.addr[host] = s.Addr
	return &dispatch.Order{
		Target: routes.Target{Scheme: "ssh", Host: host, Port: 22}, Upstream: &routes.Upstream{}, Identity: "key@1",
		Exec: &dispatch.ExecOrder{User: "deploy", Signers: []ssh.Signer{r.signer}, SSH: &routes.SSH{Key: "key", KnownHosts: []byte(s.KnownHosts(host, 22))}},
	}
}

// memSink keeps output.
type memSink struct {
	mu       sync.Mutex
	accepted bool
	out      map[dispatch.Stream]*bytes.Buffer
	started  chan struct{}
	once     sync.Once
}

func newSink() *memSink {
	return &memSink{out: map[dispatch.Stream]*bytes.Buffer{dispatch.Stdout: {}, dispatch.Stderr: {}}, started: make(chan struct{})}
}

func (s *memSink) Accepted() error { s.accepted = true; return nil }
func (s *memSink) Output(st dispatch.Stream, p []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.out[st].Write(p)
	s.once.Do(func() { close(s.started) })
	return nil
}

func (s *memSink) text(st dispatch.Stream) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.out[st].String()
}

// full implements dispatch.Sink.
type full struct{ *memSink }

func (full) Informational(int, http.Header)     {}
func (full) Head(int, http.Header, int64) error { return nil }
func (full) Body([]byte) error                  { return nil }

func outgoing(command string) *dispatch.Outgoing {
	return &dispatch.Outgoing{Method: "EXEC", MaxBody: 64 << 20, Exec: &dispatch.Exec{User: "deploy", Command: command, Grace: 200 * time.Millisecond}}
}

func (r *rig) exec(o *dispatch.Order, out *dispatch.Outgoing, limit time.Duration) (dispatch.Ending, *memSink) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 10*time.Second)
	defer cancel()
	c, err := r.tr.Connect(ctx, o)
	for range 2 {
		// A shared connection that ended meanwhile: a try of its own, as in the pipeline (E7).
		if e := (*dispatch.SetupError)(nil); !errors.As(err, &e) || e.Code != outcome.CodeConnectionLost {
			break
		}
		c, err = r.tr.Connect(ctx, o)
	}
	if err != nil {
		r.t.Fatalf("connect: %v (%v)", err, errors.Unwrap(err))
	}
	sink := newSink()
	ctx, cancel = context.WithTimeout(r.t.Context(), limit)
	defer cancel()
	end := c.Exchange(ctx, out, full{sink})
	c.Release()
	return end, sink
}

// Every way a command ends, by a server that plays it (CONTRACT G9, F4, T3).
func TestEndings(t *testing.T) {
	r := newRig(t)
	s := testkit.NewSSHServer(t, testkit.SSHOptions{})
	o := r.order("box.test", s)
	status := func(n int) *int { return &n }
	for _, tc := range []struct {
		command  string
		complete bool
		code     outcome.Code
		status   *int
		signal   string
		stdout   string
		closed   bool
		reason   string
	}{
		{"exit0", true, outcome.CodeNone, status(0), "", "hi\n", true, ""},
		{"exit 3", true, outcome.CodeNone, status(3), "", "step1 done\n", true, ""},
		{"status-first", true, outcome.CodeNone, status(0), "", "late\n", true, ""},
		{"close-only", true, outcome.CodeNone, status(0), "", "hi\n", true, ""},
		{"close-and-leave", true, outcome.CodeNone, status(0), "", "hi\n", true, ""},
		{"signal", true, outcome.CodeNone, nil, "KILL", "", true, ""},
		{"no-such-program", true, outcome.CodeNone, status(127), "", "", true, ""},
		{"eofnoclose", true, outcome.CodeNone, status(0), "", "made\n", false, ""},
		{"status-eof-cut", true, outcome.CodeNone, status(0), "", "whole", false, ""},
		{"noexit", false, outcome.CodeRemoteResultIncomplete, nil, "", "created id=7", false, "no_exit_status"},
		{"cut", false, outcome.CodeRemoteResultIncomplete, nil, "", "half", false, "connection_lost"},
		{"status-cut", false, outcome.CodeRemoteResultIncomplete, status(0), "", "half", false, "connection_lost"},
		{"exitnoclose", false, outcome.CodeRemoteResultIncomplete, status(0), "", "made\n", false, "output_open"},
		{"cut-before-reply", false, outcome.CodeRemoteOutcomeUnknown, nil, "", "", false, "connection_lost"},
		{"execrefused", false, outcome.CodeExecRefused, nil, "", "", false, "exec_refused"},
		{"no-reply", false, outcome.CodeRemoteTimeout, nil, "", "", false, "no_reply"},
		{"hang", false, outcome.CodeRemoteTimeout, nil, "", "started\n", false, "deadline"},
	} {
		t.Run(tc.command, func(t *testing.T) {
			contract.Covers(t, "F4", "G9", "E3")
			before := s.Ran(tc.command)
			end, sink := r.exec(o, outgoing(tc.command), 1500*time.Millisecond)
			e := end.Exec
			if e == nil {
				e = &dispatch.ExecEnd{}
			}
			if end.Complete != tc.complete || end.Code != tc.code || end.Reason != tc.reason || e.Closed != tc.closed || e.ExitSignal != tc.signal {
				t.Errorf("complete %v code %s reason %q closed %v signal %q", end.Complete, end.Code, end.Reason, e.Closed, e.ExitSignal)
			}
			if (e.ExitStatus == nil) != (tc.status == nil) || e.ExitStatus != nil && *e.ExitStatus != *tc.status {
				t.Errorf("exit status %v", e.ExitStatus)
			}
			if got := sink.text(dispatch.Stdout); got != tc.stdout {
				t.Errorf("stdout %q", got)
			}
			if n := s.Ran(tc.command) - before; n != 1 {
				t.Errorf("the server was asked %d times", n)
			}
		})
	}
}

// Both streams at once, binary, beyond every window; and beyond the limit.
func TestFlood(t *testing.T) {
	contract.Covers(t, "G9")
	r := newRig(t)
	s := testkit.NewSSHServer(t, testkit.SSHOptions{})
	const n = 10 << 20
	o := r.order("box.test", s)
	end, sink := r.exec(o, outgoing(fmt.Sprint("flood ", n)), time.Minute)
	if !end.Complete || sink.out[dispatch.Stdout].Len() != n || sink.out[dispatch.Stderr].Len() != n || end.Exec.StdoutBytes != n {
		t.Errorf("%v: %d, %d bytes", end.Complete, sink.out[dispatch.Stdout].Len(), sink.out[dispatch.Stderr].Len())
	}
	for i, b := range sink.out[dispatch.Stderr].Bytes() {
		if b != byte(2*i) {
			t.Fatalf("stderr differs at %d", i)
		}
	}
	out := outgoing(fmt.Sprint("flood ", n))
	out.MaxBody = 1 << 20
	end, sink = r.exec(o, out, time.Minute)
	if end.Complete || end.Code != outcome.CodeResultLimit || !end.Exec.Truncated || end.Exec.ExitStatus == nil || end.Exec.StdoutBytes != n || sink.out[dispatch.Stdout].Len()+sink.out[dispatch.Stderr].Len() != 1<<20 {
		t.Errorf("beyond the limit: %+v", end.Exec)
	}
}

// Standard input, environment and signals reach the command; an input that breaks off
// does not look like one that ended.
func TestInput(t *testing.T) {
	contract.Covers(t, "E5", "F5")
	r := newRig(t)
	s := testkit.NewSSHServer(t, testkit.SSHOptions{})
	o := r.order("box.test", s)
	o.Exec.Env = []dispatch.EnvVar{{Name: "LANG", Value: "C"}}
	out := outgoing("cat")
	text := strings.Repeat("\x00binary\xff", 100_000)
	out.Exec.Stdin = strings.NewReader(text)
	end, sink := r.exec(o, out, time.Minute)
	if v, _ := s.Env("LANG"); !end.Complete || sink.text(dispatch.Stdout) != text || !end.Sent.Complete || !end.Exec.StdinStreamed || v != "C" {
		t.Errorf("%+v, LANG=%q", end.Exec, v)
	}
	ch := make(chan string, 1)
	ch <- "TERM"
	out = outgoing("sig")
	out.Exec.Signals = ch
	end, sink = r.exec(o, out, 5*time.Second)
	if !end.Complete || !strings.Contains(sink.text(dispatch.Stdout), "got TERM") {
		t.Errorf("signal: %+v %q", end, sink.text(dispatch.Stdout))
	}
	out = outgoing("cat")
	broken := errors.New("the caller left")
	out.Exec.Stdin = io.MultiReader(strings.NewReader("half of it"), iotestErr{broken})
	end, _ = r.exec(o, out, 500*time.Millisecond)
	if end.Complete || end.Code != outcome.CodeRemoteTimeout || end.Exec.StdinEnded {
		t.Errorf("broken input: %+v", end)
	}
}

type iotestErr struct{ err error }

func (e iotestErr) Read([]byte) (int, error) { return 0, e.err }

// What fails before the boundary, with the last completed stage (CONTRACT E1, E2, G7).
func TestSetupFailures(t *testing.T) {
	_, other := testkit.SSHKey(t, "")
	for _, tc := range []struct {
		name   string
		opts   testkit.SSHOptions
		change func(o *dispatch.Order, s *testkit.SSHServer)
		code   outcome.Code
		stage  outcome.Stage
		reason string
		detail string
		keys   bool // a key may be offered
	}{
		{name: "silent", opts: testkit.SSHOptions{Silent: true}, code: outcome.CodeSSHHandshakeFailed, stage: outcome.StageTCPConnect, reason: "handshake_timeout"},
		{name: "http", opts: testkit.SSHOptions{Banner: "HTTP/1.1 400 Bad Request\r\n\r\n"}, code: outcome.CodeSSHHandshakeFailed, stage: outcome.StageTCPConnect, reason: "handshake_cut"},
		{name: "stalled", opts: testkit.SSHOptions{StallAuth: true}, code: outcome.CodeSSHHandshakeFailed, stage: outcome.StageSSHHostKey, reason: "handshake_timeout", keys: true},
		{name: "cut", opts: testkit.SSHOptions{CutAuth: true}, code: outcome.CodeSSHHandshakeFailed, stage: outcome.StageSSHHostKey, reason: "handshake_cut", keys: true},
		{name: "auth", opts: testkit.SSHOptions{RefuseAuth: true}, code: outcome.CodeSSHAuthFailed, stage: outcome.StageSSHHostKey, reason: "auth_refused", detail: `user "deploy"`, keys: true},
		{name: "session", opts: testkit.SSHOptions{RefuseSession: true}, code: outcome.CodeSSHChannelRefused, stage: outcome.StageSSHAuth, reason: "prohibited", keys: true},
		{name: "unknown host", change: func(o *dispatch.Order, _ *testkit.SSHServer) { o.Exec.SSH.KnownHosts = []byte("# nothing\n") },
			code: outcome.CodeSSHHostKeyRejected, stage: outcome.StageSSHTransport, reason: "host_key_unknown", detail: "SHA256:"},
		{name: "changed key", change: func(o *dispatch.Order, _ *testkit.SSHServer) {
			o.Exec.SSH.KnownHosts = []byte(knownhosts.Line([]string{"box.test"}, other.PublicKey()))
		}, code: outcome.CodeSSHHostKeyRejected, stage: outcome.StageSSHTransport, reason: "host_key_changed", detail: "(line 1)"},
		{name: "revoked", change: func(o *dispatch.Order, s *testkit.SSHServer) {
			o.Exec.SSH.KnownHosts = []byte(s.KnownHosts("box.test", 22) + "@revoked " + s.KnownHosts("box.test", 22))
		}, code: outcome.CodeSSHHostKeyRejected, stage: outcome.StageSSHTransport, reason: "host_key_revoked"},
		{name: "wrong pin", change: func(o *dispatch.Order, _ *testkit.SSHServer) {
			o.Exec.SSH.KnownHosts, o.Exec.SSH.Pins = nil, []string{ssh.FingerprintSHA256(other.PublicKey())}
		}, code: outcome.CodeSSHHostKeyRejected, stage: outcome.StageSSHTransport, reason: "host_key_unknown"},
		{name: "no jump host", change: func(o *dispatch.Order, s *testkit.SSHServer) {
			o.Exec.SSH.Jump = &routes.Jump{Host: "box.test", Port: 22, User: "jump", Key: "key"}
			o.Exec.Jump = o.Exec.Signers
		}, code: outcome.CodeProxyTunnelFailed, stage: outcome.StageTCPConnect, reason: "jump_tunnel", keys: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			contract.Covers(t, "E1", "E2", "G7")
			r := newRig(t)
			s := testkit.NewSSHServer(t, tc.opts)
			o := r.order("box.test", s)
			if tc.change != nil {
				tc.change(o, s)
			}
			ctx, cancel := context.WithTimeout(t.Context(), 700*time.Millisecond)
			defer cancel()
			if tc.reason != "handshake_timeout" {
				ctx = t.Context()
			}
			c, err := r.tr.Connect(ctx, o)
			if err == nil {
				c.Release()
				t.Fatal("connected")
			}
			var e *dispatch.SetupError
			if !errors.As(err, &e) || e.Code != tc.code || e.Stage != tc.stage || e.Reason != tc.reason || !strings.Contains(e.Detail, tc.detail) {
				t.Errorf("%+v", e)
			}
			if n := len(s.Offered()); !tc.keys && n > 0 {
				t.Errorf("%d keys were offered to a host that was not verified", n)
			}
		})
	}
}

// What is trusted: hashed names, ports, wildcards, several keys, authorities, pins.
func TestTrusted(t *testing.T) {
	contract.Covers(t, "E6", "G7")
	_, ca := testkit.SSHKey(t, "")
	_, host := testkit.SSHKey(t, "")
	_, other := testkit.SSHKey(t, "")
	cert := func(principals []string, until time.Duration) ssh.Signer {
		c := &ssh.Certificate{Key: host.PublicKey(), CertType: ssh.HostCert, ValidPrincipals: principals, ValidAfter: uint64(time.Now().Add(-time.Hour).Unix()), ValidBefore: uint64(time.Now().Add(until).Unix())} //nolint:gosec // times
		if err := c.SignCert(rand.Reader, ca); err != nil {
			t.Fatal(err)
		}
		s, err := ssh.NewCertSigner(c, host)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	line := func(names []string, k ssh.Signer) string { return knownhosts.Line(names, k.PublicKey()) + "\n" }
	for _, tc := range []struct {
		name  string
		keys  []ssh.Signer
		known string
		pins  []string
		port  int
		ok    bool
	}{
		{"hashed", []ssh.Signer{host}, line([]string{knownhosts.HashHostname("box.test")}, host), nil, 22, true},
		{"hashed other", []ssh.Signer{host}, line([]string{knownhosts.HashHostname("box2.test")}, host), nil, 22, false},
		{"port", []ssh.Signer{host}, line([]string{"[box.test]:2222"}, host), nil, 2222, true},
		{"port missing", []ssh.Signer{host}, line([]string{"box.test"}, host), nil, 2222, false},
		{"wildcard", []ssh.Signer{host}, line([]string{"*.test"}, host), nil, 22, true},
		{"negated", []ssh.Signer{host}, line([]string{"*.test", "!box.test"}, host), nil, 22, false},
		{"second line", []ssh.Signer{host}, line([]string{"box.test"}, other) + line([]string{"box.test"}, host), nil, 22, true},
		{"authority", []ssh.Signer{cert([]string{"box.test"}, time.Hour)}, "@cert-authority *.test " + strings.SplitN(line([]string{"x"}, ca), " ", 2)[1], nil, 22, true},
		{"authority, other name", []ssh.Signer{cert([]string{"else.test"}, time.Hour)}, "@cert-authority *.test " + strings.SplitN(line([]string{"x"}, ca), " ", 2)[1], nil, 22, false},
		{"authority, expired", []ssh.Signer{cert([]string{"box.test"}, -time.Minute)}, "@cert-authority *.test " + strings.SplitN(line([]string{"x"}, ca), " ", 2)[1], nil, 22, false},
		{"pin", []ssh.Signer{host}, "", []string{ssh.FingerprintSHA256(host.PublicKey())}, 22, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t)
			s := testkit.NewSSHServer(t, testkit.SSHOptions{HostKeys: tc.keys})
			o := r.order("box.test", s)
			o.Target.Port = tc.port
			o.Exec.SSH.KnownHosts, o.Exec.SSH.Pins = []byte(tc.known), tc.pins
			c, err := r.tr.Connect(t.Context(), o)
			if (err == nil) != tc.ok {
				t.Fatal(err)
			}
			if err == nil {
				if p := c.Info().Peer; p.HostKey != ssh.FingerprintSHA256(host.PublicKey()) || p.Protocol != "ssh-2.0" {
					t.Errorf("%+v", p)
				}
				c.Release()
			}
		})
	}
}

// Host keys on NIST curves are offered to hosts that have no other, at a further try; a
// key that is known by name is asked for at once (CONTRACT E7).
func TestCurves(t *testing.T) {
	contract.Covers(t, "E7", "G7")
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	host, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	_, other := testkit.SSHKey(t, "")
	pin := []string{ssh.FingerprintSHA256(host.PublicKey())}
	for _, tc := range []struct {
		name, known string
		pins        []string
		keys        []ssh.Signer
		codes       []outcome.Code // of each try
	}{
		{"known", knownhosts.Line([]string{"box.test"}, host.PublicKey()), nil, []ssh.Signer{host}, []outcome.Code{outcome.CodeNone}},
		{"known among others", knownhosts.Line([]string{"box.test"}, host.PublicKey()), nil, []ssh.Signer{other, host}, []outcome.Code{outcome.CodeNone}},
		{"pinned", "", pin, []ssh.Signer{host}, []outcome.Code{outcome.CodeSSHHandshakeFailed, outcome.CodeNone}},
		{"unknown", "# nothing\n", nil, []ssh.Signer{host}, []outcome.Code{outcome.CodeSSHHandshakeFailed, outcome.CodeSSHHostKeyRejected}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			r := newRig(t)
			o := r.order("box.test", testkit.NewSSHServer(t, testkit.SSHOptions{HostKeys: tc.keys}))
			o.Exec.SSH.KnownHosts, o.Exec.SSH.Pins = []byte(tc.known), tc.pins
			for i, want := range tc.codes {
				c, err := r.tr.Connect(t.Context(), o)
				code := outcome.CodeNone
				if e := (*dispatch.SetupError)(nil); errors.As(err, &e) {
					code = e.Code
				}
				if code != want {
					t.Errorf("try %d: %v", i+1, err)
				}
				if err == nil {
					c.Release()
				}
			}
		})
	}
}

// Connections are shared by target and credential, never across what they were verified
// against, and one that breaks follows E3.
func TestReuse(t *testing.T) {
	contract.Covers(t, "E3", "E6")
	r := newRig(t)
	s := testkit.NewSSHServer(t, testkit.SSHOptions{MaxSessions: 3})
	o := r.order("box.test", s)
	for range 3 {
		if end, _ := r.exec(o, outgoing("exit0"), 5*time.Second); !end.Complete {
			t.Fatalf("%+v", end)
		}
	}
	if n := s.Connections(); n != 1 {
		t.Errorf("%d connections for three commands", n)
	}
	for _, change := range []func(o *dispatch.Order){
		func(o *dispatch.Order) { o.Identity = "key@2" },
		func(o *dispatch.Order) { o.Exec.User = "root" },
		func(o *dispatch.Order) {
			o.Exec.SSH = &routes.SSH{Key: "key", KnownHosts: append([]byte("# reviewed\n"), o.Exec.SSH.KnownHosts...)}
		},
	} {
		before := s.Connections()
		p, x := *o, *o.Exec
		p.Exec = &x
		change(&p)
		if end, _ := r.exec(&p, outgoing("exit0"), 5*time.Second); !end.Complete || s.Connections() != before+1 {
			t.Errorf("shared: %+v", end)
		}
	}
	// More at once than a connection takes: others are made, and none is refused.
	var all sync.WaitGroup
	for range 12 {
		all.Go(func() {
			if end, _ := r.exec(o, outgoing("wait"), 10*time.Second); !end.Complete {
				t.Errorf("%+v", end)
			}
		})
	}
	for s.Ran("wait") < 12 {
		time.Sleep(time.Millisecond)
	}
	s.Release()
	all.Wait()
	// A connection that broke at rest: a failed try, then a fresh one.
	s.CutAll()
	ok := false
	for range 2 { // the first finds out for all of them
		c, err := r.tr.Connect(t.Context(), o)
		var e *dispatch.SetupError
		if errors.As(err, &e) && e.Code == outcome.CodeConnectionLost {
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		ok = true
		c.Release()
		break
	}
	if !ok {
		t.Error("no fresh connection after a broken one")
	}
}

// A peer that fell silent is asked whether it is there: what runs on its connection is
// unknown long before its deadline, and what comes next makes a connection of its own.
func TestKeepalive(t *testing.T) {
	contract.Covers(t, "E3", "G9")
	r := newRig(t)
	s := testkit.NewSSHServer(t, testkit.SSHOptions{})
	var silent atomic.Bool // nothing passes any more, and nobody is told
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			up, err := net.Dial("tcp", s.Addr)
			if err != nil {
				return
			}
			for _, pair := range [][2]net.Conn{{c, up}, {up, c}} {
				go func() {
					mine := !silent.Load()
					buf := make([]byte, 4096)
					for {
						n, err := pair[0].Read(buf)
						if err != nil {
							_ = pair[1].Close()
							return
						}
						if mine && silent.Load() {
							continue
						}
						_, _ = pair[1].Write(buf[:n])
					}
				}()
			}
		}
	}()
	o := r.order("box.test", s)
	r.addr["box.test"] = l.Addr().String()
	o.Exec.SSH.Keepalive = 50 * time.Millisecond
	c, err := r.tr.Connect(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	sink := newSink()
	go func() {
		<-sink.started
		silent.Store(true)
	}()
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	begin := time.Now()
	end := c.Exchange(ctx, outgoing("wait here"), full{sink})
	c.Release()
	if end.Complete || end.Code != outcome.CodeRemoteResultIncomplete || end.Reason != "connection_lost" || time.Since(begin) > 30*time.Second {
		t.Errorf("%+v after %v", end, time.Since(begin))
	}
	if end, _ := r.exec(o, outgoing("exit0"), 5*time.Second); !end.Complete || s.Connections() != 2 {
		t.Errorf("%+v, %d connections", end, s.Connections())
	}
}

// Through a jump host the target's own key is verified, and the target's name is
// resolved there.
func TestJump(t *testing.T) {
	contract.Covers(t, "E2", "E6")
	r := newRig(t)
	target := testkit.NewSSHServer(t, testkit.SSHOptions{})
	bastion := testkit.NewSSHServer(t, testkit.SSHOptions{Forward: true})
	o := r.order("bastion.test", bastion)
	o.Target = routes.Target{Scheme: "ssh", Host: "127.0.0.1", Port: target.Port}
	o.Exec.SSH = &routes.SSH{Key: "key", KnownHosts: []byte(bastion.KnownHosts("bastion.test", 22) + target.KnownHosts("127.0.0.1", target.Port)),
		Jump: &routes.Jump{Host: "bastion.test", Port: 22, User: "jump", Key: "key"}}
	o.Exec.Jump = o.Exec.Signers
	end, sink := r.exec(o, outgoing("exit0"), 5*time.Second)
	if !end.Complete || sink.text(dispatch.Stdout) != "hi\n" || target.Ran("exit0") != 1 || bastion.Ran("exit0") != 0 {
		t.Errorf("%+v", end)
	}
	o.Exec.SSH.KnownHosts = []byte(bastion.KnownHosts("bastion.test", 22))
	_, err := r.tr.Connect(t.Context(), o)
	var e *dispatch.SetupError
	if !errors.As(err, &e) || e.Code != outcome.CodeSSHHostKeyRejected || e.Reason != "host_key_unknown" {
		t.Errorf("%v", err)
	}
	// A pinned jump host that answers in the target's place is found out.
	o.Exec.SSH.KnownHosts, o.Exec.SSH.Pins = nil, []string{ssh.FingerprintSHA256(bastion.HostKey.PublicKey())}
	o.Target.Port = bastion.Port
	if _, err = r.tr.Connect(t.Context(), o); !errors.As(err, &e) || e.Code != outcome.CodeSSHHostKeyRejected || e.Reason != "host_key_unknown" {
		t.Errorf("the jump host passes for the target: %v", err)
	}
}

func FuzzParseTrust(f *testing.F) {
	_, k := testkit.SSHKey(f, "")
	f.Add([]byte(knownhosts.Line([]string{"box.test"}, k.PublicKey())), "SHA256:x")
	f.Add([]byte("@cert-authority * ssh-ed25519 AAAA\n|1|a|b ssh-rsa x"), "")
	f.Fuzz(func(t *testing.T, data []byte, pin string) {
		if tr, err := sshx.ParseTrust(data, []string{pin}); err == nil && tr == nil {
			t.Error("no trust and no error")
		}
	})
}

// The library ends streams and channels itself when a connection ends, at a message of the
// peer, too: what was not received is not taken for received, whichever is seen first
// (CONTRACT G9).
func TestConnectionEnds(t *testing.T) {
	contract.Covers(t, "G9", "F2", "T3")
	for _, tc := range []struct {
		name     string
		segment  string // in one write, after the command was accepted
		then     func(c *rawConn)
		complete bool
		framing  string
		reason   string // "": one of two
		times    int
	}{
		{name: "status, disconnect", segment: "status disconnect", reason: "connection_lost", times: 300},
		{name: "output, status, disconnect", segment: "data status disconnect", reason: "connection_lost", times: 100},
		{name: "disconnect", segment: "data disconnect", reason: "connection_lost", times: 50},
		{name: "status, a broken packet", segment: "status malformed", reason: "connection_lost", times: 200},
		{name: "end, a broken packet", segment: "eof status malformed", reason: "connection_lost", times: 100},
		// The grace time ends about when the connection does.
		{name: "status, later disconnect", segment: "status", then: func(c *rawConn) {
			time.Sleep(5 * time.Millisecond)
			_ = c.send(disconnect())
		}, times: 100},
		// An orderly end in one piece with a disconnect cannot be told from the first.
		{name: "all, disconnect", segment: "data eof status close disconnect", reason: "connection_lost", times: 100},
		{name: "end, status, disconnect", segment: "data eof status disconnect", reason: "connection_lost", times: 100},
		{name: "all, then disconnect", segment: "data eof status close", then: func(c *rawConn) {
			_, _ = c.next(msgGlobalRequest) // Waybill has seen the close, and asks
			_ = c.send(disconnect())
		}, complete: true, framing: "channel_close", times: 100},
		{name: "all, then a broken packet", segment: "data eof status close", then: func(c *rawConn) {
			_, _ = c.next(msgGlobalRequest)
			_ = c.packets("malformed").flush()
		}, reason: "connection_lost", times: 20},
		{name: "all, answered", segment: "data status eof close", then: func(c *rawConn) {
			_, _ = c.next(msgGlobalRequest)
			_ = c.send([]byte{msgRequestFailure})
		}, complete: true, framing: "channel_close", times: 50},
		{name: "all, silent", segment: "data status eof close", complete: true, framing: "channel_close", times: 3},
		{name: "all, closed", segment: "data eof status close", then: (*rawConn).fin, complete: true, framing: "channel_close", times: 20},
		{name: "end, status, closed", segment: "data eof status", then: (*rawConn).fin, complete: true, framing: "eof_and_status", times: 20},
		{name: "status, closed", segment: "data status", then: (*rawConn).fin, reason: "connection_lost", times: 20},
	} {
		t.Run(tc.name, func(t *testing.T) {
			if tc.framing == "" || tc.times >= 50 {
				t.Parallel() // the others need what came to be seen within the time of the hold
			}
			r := newRig(t)
			s := newRawServer(t, "box.test", func(c *rawConn) {
				if c.packets("success "+tc.segment).flush() == nil && tc.then != nil {
					tc.then(c)
				}
				c.gone()
			})
			o := r.rawOrder("box.test", s)
			for i := range tc.times {
				out := outgoing("make")
				if tc.reason == "" && !tc.complete {
					out.Exec.Grace = 5 * time.Millisecond
				}
				end, _ := r.exec(o, out, 10*time.Second)
				r.tr.CloseIdle() // the server takes one command on a connection
				if end.Complete != tc.complete || end.Framing != tc.framing || !tc.complete && end.Code != outcome.CodeRemoteResultIncomplete || tc.reason != "" && end.Reason != tc.reason {
					t.Fatalf("time %d: complete %v code %s reason %q framing %q", i+1, end.Complete, end.Code, end.Reason, end.Framing)
				}
				if e := end.Exec; e.Closed != (tc.framing == "channel_close") || e.OutputEnded != tc.complete {
					t.Fatalf("time %d: %+v", i+1, e)
				}
			}
		})
	}
}
