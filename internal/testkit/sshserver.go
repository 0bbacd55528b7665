package testkit

import (
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"
)

// SSHKey makes an Ed25519 key: the private one in OpenSSH's form, and its signer.
// passphrase "" leaves it open.
func SSHKey(t testing.TB, passphrase string) (private []byte, signer ssh.Signer) {
	t.Helper()
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	var block *pem.Block
	if passphrase == "" {
		block, err = ssh.MarshalPrivateKey(key, "")
	} else {
		block, err = ssh.MarshalPrivateKeyWithPassphrase(key, "", []byte(passphrase))
	}
	if err != nil {
		t.Fatal(err)
	}
	if signer, err = ssh.NewSignerFromKey(key); err != nil {
		t.Fatal(err)
	}
	return pem.EncodeToMemory(block), signer
}

// SSHOptions say how a scripted SSH server behaves before it is asked to run anything.
type SSHOptions struct {
	Authorized    ssh.PublicKey // nil: any key
	Certificates  ssh.PublicKey // authority of user certificates that are let in; nil: none
	RefuseAuth    bool
	StallAuth     bool // never answers a key
	CutAuth       bool // breaks the connection instead
	RefuseSession bool
	MaxSessions   int  // on one connection; 0: any number
	RefuseEnv     bool // every env request fails
	HostKeys      []ssh.Signer
	Silent        bool   // accepts and says nothing
	Banner        string // said in place of SSH, then closed
	Forward       bool   // direct-tcpip is served: a jump host
}

// SSHServer is a scripted SSH server on loopback. What it does with a command is in the
// command's first word; see run. Its ledger is the oracle of what ran.
type SSHServer struct {
	Addr    string
	Port    int
	HostKey ssh.Signer
	opts    SSHOptions
	l       net.Listener
	wg      sync.WaitGroup

	mu       sync.Mutex
	ran      map[string]int
	env      map[string]string
	stdin    map[string]string
	conns    map[net.Conn]bool
	accepted int
	live     int
	peak     int
	offered  []string // fingerprints of the keys that were offered
	signals  []string
	release  chan struct{}
}

// NewSSHServer starts a server, which ends with the test.
func NewSSHServer(t testing.TB, opts SSHOptions) *SSHServer {
	t.Helper()
	s := &SSHServer{opts: opts, ran: map[string]int{}, env: map[string]string{}, stdin: map[string]string{}, conns: map[net.Conn]bool{}, release: make(chan struct{})}
	if len(opts.HostKeys) == 0 {
		_, key := SSHKey(t, "")
		s.opts.HostKeys = []ssh.Signer{key}
	}
	s.HostKey = s.opts.HostKeys[0]
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	s.l, s.Addr = l, l.Addr().String()
	s.Port = l.Addr().(*net.TCPAddr).Port //nolint:forcetypeassert // a TCP listener
	s.wg.Go(s.accept)
	t.Cleanup(s.Close)
	return s
}

// KnownHosts is the line for a name at the server's port.
func (s *SSHServer) KnownHosts(host string, port int) string {
	return knownhosts.Line([]string{knownhosts.Normalize(net.JoinHostPort(host, strconv.Itoa(port)))}, s.HostKey.PublicKey()) + "\n"
}

// Close ends the server and its connections.
func (s *SSHServer) Close() {
	_ = s.l.Close()
	s.CutAll()
	s.Release()
	s.wg.Wait()
}

// Release lets commands go on that wait for it.
func (s *SSHServer) Release() {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.release:
	default:
		close(s.release)
	}
}

// CutAll closes every connection without a word.
func (s *SSHServer) CutAll() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for c := range s.conns {
		_ = c.Close()
	}
}

// Ran returns how often a command was asked for.
func (s *SSHServer) Ran(command string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.ran[command]
}

// Env returns the value a variable was last set to.
func (s *SSHServer) Env(name string) (string, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, ok := s.env[name]
	return v, ok
}

// Stdin returns what a command read.
func (s *SSHServer) Stdin(command string) string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stdin[command]
}

// Signals returns the signals that came.
func (s *SSHServer) Signals() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.signals...)
}

// Connections returns how many connections were accepted, and Offered the fingerprints
// of keys that were.
func (s *SSHServer) Connections() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.accepted
}

// Offered returns the fingerprints of the keys that clients offered.
func (s *SSHServer) Offered() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]string(nil), s.offered...)
}

func (s *SSHServer) accept() {
	for {
		c, err := s.l.Accept()
		if err != nil {
			return
		}
		s.mu.Lock()
		s.conns[c] = true
		s.accepted++
		s.mu.Unlock()
		s.wg.Go(func() {
			defer func() {
				_ = c.Close()
				s.mu.Lock()
				delete(s.conns, c)
				s.mu.Unlock()
			}()
			s.serve(c)
		})
	}
}

var errSSHRefused = errors.New("refused")

func (s *SSHServer) serve(c net.Conn) {
	switch {
	case s.opts.Silent:
		_, _ = io.Copy(io.Discard, c)
		return
	case s.opts.Banner != "":
		_, _ = io.WriteString(c, s.opts.Banner)
		return
	}
	cfg := &ssh.ServerConfig{PublicKeyCallback: func(m ssh.ConnMetadata, k ssh.PublicKey) (*ssh.Permissions, error) {
		s.mu.Lock()
		s.offered = append(s.offered, ssh.FingerprintSHA256(k))
		s.mu.Unlock()
		if s.opts.StallAuth {
			<-s.release
		}
		if s.opts.CutAuth {
			_ = c.Close()
		}
		if s.opts.RefuseAuth || s.opts.StallAuth || s.opts.CutAuth {
			return nil, errSSHRefused
		}
		if cert, ok := k.(*ssh.Certificate); ok && s.opts.Certificates != nil {
			checker := ssh.CertChecker{IsUserAuthority: func(auth ssh.PublicKey) bool { return string(auth.Marshal()) == string(s.opts.Certificates.Marshal()) }}
			return checker.Authenticate(m, cert)
		}
		if s.opts.Authorized != nil && string(k.Marshal()) != string(s.opts.Authorized.Marshal()) {
			return nil, errSSHRefused
		}
		return nil, nil
	}}
	for _, k := range s.opts.HostKeys {
		cfg.AddHostKey(k)
	}
	conn, chans, reqs, err := ssh.NewServerConn(c, cfg)
	if err != nil {
		return
	}
	defer func() { _ = conn.Close() }()
	go ssh.DiscardRequests(reqs)
	var sessions sync.WaitGroup
	var mu sync.Mutex
	open := 0
	for nc := range chans {
		if nc.ChannelType() == "direct-tcpip" && s.opts.Forward {
			sessions.Go(func() { forward(nc) })
			continue
		}
		mu.Lock()
		full := s.opts.MaxSessions > 0 && open >= s.opts.MaxSessions
		if !full {
			open++
		}
		mu.Unlock()
		if s.opts.RefuseSession || full || nc.ChannelType() != "session" {
			_ = nc.Reject(ssh.Prohibited, "no more sessions")
			continue
		}
		ch, requests, err := nc.Accept()
		if err != nil {
			return
		}
		sessions.Go(func() {
			s.session(c, ch, requests)
			mu.Lock()
			open--
			mu.Unlock()
		})
	}
	sessions.Wait()
}

func forward(nc ssh.NewChannel) {
	var m struct {
		Host   string
		Port   uint32
		Origin string
		From   uint32
	}
	if ssh.Unmarshal(nc.ExtraData(), &m) != nil {
		_ = nc.Reject(ssh.ConnectionFailed, "malformed")
		return
	}
	up, err := net.Dial("tcp", net.JoinHostPort(m.Host, strconv.Itoa(int(m.Port))))
	if err != nil {
		_ = nc.Reject(ssh.ConnectionFailed, "no")
		return
	}
	ch, reqs, err := nc.Accept()
	if err != nil {
		_ = up.Close()
		return
	}
	go ssh.DiscardRequests(reqs)
	go func() {
		_, _ = io.Copy(up, ch)
		_ = up.Close()
	}()
	_, _ = io.Copy(ch, up)
	_ = ch.Close()
}

func (s *SSHServer) session(c net.Conn, ch ssh.Channel, requests <-chan *ssh.Request) {
	signals := make(chan string, 8)
	var commands sync.WaitGroup
	for r := range requests {
		switch r.Type {
		case "env":
			var m struct{ Name, Value string }
			_ = ssh.Unmarshal(r.Payload, &m)
			s.mu.Lock()
			if !s.opts.RefuseEnv {
				s.env[m.Name] = m.Value
			}
			s.mu.Unlock()
			_ = r.Reply(!s.opts.RefuseEnv, nil)
		case "signal":
			var m struct{ Name string }
			_ = ssh.Unmarshal(r.Payload, &m)
			s.mu.Lock()
			s.signals = append(s.signals, m.Name)
			s.mu.Unlock()
			signals <- m.Name
		case "exec":
			var m struct{ Command string }
			_ = ssh.Unmarshal(r.Payload, &m)
			s.mu.Lock()
			s.ran[m.Command]++
			s.live++
			s.peak = max(s.peak, s.live)
			s.mu.Unlock()
			word, rest, _ := strings.Cut(m.Command, " ")
			if word == "execrefused" {
				_ = r.Reply(false, nil)
				_ = ch.Close()
				continue
			}
			if word == "cut-before-reply" {
				_ = c.Close()
				continue
			}
			if word == "no-reply" {
				continue
			}
			_ = r.Reply(true, nil)
			commands.Go(func() {
				s.run(c, ch, word, rest, m.Command, signals)
				s.mu.Lock()
				s.live--
				s.mu.Unlock()
			})
		default:
			if r.WantReply {
				_ = r.Reply(false, nil)
			}
		}
	}
	commands.Wait()
}

func sendStatus(ch ssh.Channel, status int) {
	_, _ = ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{uint32(status)})) //nolint:gosec // small
}

// run plays a command: its first word says how.
func (s *SSHServer) run(c net.Conn, ch ssh.Channel, word, rest, whole string, signals <-chan string) {
	say := func(text string) { _, _ = io.WriteString(ch, text) }
	finish := func(status int) {
		_ = ch.CloseWrite()
		sendStatus(ch, status)
		_ = ch.Close()
	}
	switch word {
	case "exit0":
		say("hi\n")
		finish(0)
	case "exit":
		say("step1 done\n")
		_, _ = io.WriteString(ch.Stderr(), "failed\n")
		n, _ := strconv.Atoi(rest)
		finish(n)
	case "status-first": // as sshd does now and then
		sendStatus(ch, 0)
		say("late\n")
		_ = ch.CloseWrite()
		_ = ch.Close()
	case "close-only": // no EOF of its own
		say("hi\n")
		sendStatus(ch, 0)
		_ = ch.Close()
	case "close-and-leave": // and the connection ends at once
		say("hi\n")
		sendStatus(ch, 0)
		_ = ch.Close()
		_ = c.(*net.TCPConn).CloseWrite()
	case "noexit":
		say("created id=7")
		_ = ch.Close()
	case "cut":
		say("half")
		s.settle()
		_ = c.Close()
	case "status-cut": // the stream breaks after the status
		say("half")
		sendStatus(ch, 0)
		s.settle()
		_ = c.Close()
	case "status-eof-cut": // both ends, but no close
		say("whole")
		_ = ch.CloseWrite()
		sendStatus(ch, 0)
		s.settle()
		_ = c.Close()
	case "exitnoclose":
		say("made\n")
		sendStatus(ch, 0)
	case "eofnoclose":
		say("made\n")
		_ = ch.CloseWrite()
		sendStatus(ch, 0)
	case "signal":
		_, _ = ch.SendRequest("exit-signal", false, ssh.Marshal(struct {
			Name     string
			Core     bool
			Message  string
			Language string
		}{"KILL", true, "oom SECRET=hunter2 \x1b[31m" + strings.Repeat("x", 500), ""}))
		_ = ch.Close()
	case "flood": // N bytes to each stream at once
		n, _ := strconv.Atoi(rest)
		var both sync.WaitGroup
		both.Go(func() { _, _ = io.CopyN(ch, bytePattern(1), int64(n)) })
		both.Go(func() { _, _ = io.CopyN(ch.Stderr(), bytePattern(2), int64(n)) })
		both.Wait()
		finish(0)
	case "cat":
		var b strings.Builder
		_, err := io.Copy(io.MultiWriter(ch, &b), ch)
		s.mu.Lock()
		s.stdin[whole] = b.String()
		s.mu.Unlock()
		if err != nil {
			_ = c.Close()
			return
		}
		finish(0)
	case "say":
		say(rest)
		finish(0)
	case "wait": // until Release
		say("started\n")
		<-s.release
		say("done\n")
		finish(0)
	case "sig": // until a signal comes
		say("ready\n")
		name := <-signals
		_, _ = fmt.Fprintf(ch, "got %s\n", name)
		finish(0)
	case "hang":
		say("started\n")
		<-s.release
		_ = c.Close()
	default:
		_, _ = io.WriteString(ch.Stderr(), "sh: not found\n")
		finish(127)
	}
}

// settle gives the other side time to read what was sent, so that it is not lost with
// the connection.
func (s *SSHServer) settle() { time.Sleep(100 * time.Millisecond) }

// bytePattern is a stream of bytes, all values among them.
type patternReader struct {
	n    int
	step int
}

func bytePattern(step int) io.Reader { return &patternReader{step: step} }

func (p *patternReader) Read(b []byte) (int, error) {
	for i := range b {
		b[i] = byte(p.n * p.step)
		p.n++
	}
	return len(b), nil
}
