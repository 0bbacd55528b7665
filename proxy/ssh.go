package proxy

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net"
	"net/http"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"golang.org/x/crypto/ssh"

	"waybill/dispatch"
	"waybill/outcome"
)

// ServeSSH accepts callers of the SSH endpoint on ln: CONNECT host:port, behind which
// Waybill is that host to an SSH client, and the caller API. Otherwise it is as Serve.
func (p *Proxy) ServeSSH(ctx context.Context, ln net.Listener) error {
	return p.serve(ctx, &frontListener{Listener: ln, p: p, ssh: true})
}

// handleSSH serves one request on the SSH endpoint's listener.
func (p *Proxy) handleSSH(x *exchange, r *http.Request, presented []string) {
	if r.Method != http.MethodConnect {
		if r.URL.IsAbs() && !isOwnName(x.head.authority) {
			x.unrecorded(x.shape(r), refusal(outcome.CodeUnsupportedAction, "request.target", "ssh_endpoint", "This is the SSH endpoint: it takes CONNECT host:port and the caller API."), false)
			return
		}
		var ok bool
		if x.caller, ok = p.authenticate(presented, x.conn.head); !ok {
			x.unauthenticated(r)
			return
		}
		p.serveAPI(x.w, r)
		return
	}
	caller, known := p.authenticate(presented, x.conn.head)
	if !known && len(presented) > 0 {
		x.unauthenticated(r)
		return
	}
	// Without credentials here the caller may give them inside, as an SSH password.
	x.caller = caller
	t := &tunnel{caller: caller, authority: x.head.target, front: x.conn.head, http10: x.head.http10}
	served := false
	defer func() {
		if !served {
			t.close()
		}
	}()
	host, _, err := net.SplitHostPort(t.authority)
	switch {
	case p.draining.Load():
		x.reply = p.drainingReply()
		p.refuseConnect(x, t)
	case err != nil || host == "":
		x.unrecorded(x.shape(r), refusal(outcome.CodeInvalidTarget, "connect.target", "authority", "The target of CONNECT is not host:port."), true)
	default:
		if c := p.takeOver(x, r, t); c != nil {
			p.serveSSHTunnel(t, c, known)
		}
	}
	served = true
}

// serverVersion is what the endpoint says it is (RFC 4253 §4.2).
const serverVersion = "SSH-2.0-Waybill"

// sshAlgorithms are those that the endpoint offers: nothing with SHA-1, NIST curves,
// CBC or MACs before encryption.
func sshAlgorithms() ssh.Config {
	return ssh.Config{
		KeyExchanges: []string{ssh.KeyExchangeMLKEM768X25519, ssh.KeyExchangeCurve25519, ssh.KeyExchangeDH16SHA512},
		Ciphers:      []string{ssh.CipherChaCha20Poly1305, ssh.CipherAES256GCM, ssh.CipherAES128GCM, ssh.CipherAES256CTR, ssh.CipherAES192CTR, ssh.CipherAES128CTR},
		MACs:         []string{ssh.HMACSHA256ETM, ssh.HMACSHA512ETM},
	}
}

var errNotLetIn = errors.New("proxy: the caller is not known")

// endTap remembers that the caller's connection ended, as opposed to one of its channels.
type endTap struct {
	net.Conn
	ended atomic.Bool
}

// Read implements net.Conn.
func (t *endTap) Read(p []byte) (int, error) {
	n, err := t.Conn.Read(p)
	if err != nil {
		t.ended.Store(true)
	}
	return n, err
}

// serveSSHTunnel is the SSH server behind one CONNECT.
func (p *Proxy) serveSSHTunnel(t *tunnel, c *tunnelConn, known bool) {
	defer func() { _ = c.Close() }()
	if err := p.accept(t, c); err != nil {
		return
	}
	host := authorityHost(t.authority)
	names := []string{strings.ToLower(host)}
	key, err := p.sshCA.HostFor(names...)
	if err != nil {
		p.log.Error("no host key for the SSH endpoint", slog.Any("err", err))
		return
	}
	remote := c.RemoteAddr()
	caller := t.caller
	cfg := &ssh.ServerConfig{
		Config: sshAlgorithms(), ServerVersion: serverVersion, MaxAuthTries: 3, NoClientAuth: true,
		NoClientAuthCallback: func(ssh.ConnMetadata) (*ssh.Permissions, error) {
			if !known {
				return nil, errNotLetIn
			}
			return nil, nil
		},
		PasswordCallback: func(_ ssh.ConnMetadata, password []byte) (*ssh.Permissions, error) {
			who, ok := p.callers.Authenticate("", string(password), remote)
			if !ok {
				return nil, errNotLetIn
			}
			caller = who
			return nil, nil
		},
	}
	cfg.AddHostKey(key)
	cfg.AddHostKey(p.sshCA.HostKey()) // second: for clients that know no certificates
	tap := &endTap{Conn: c}
	_ = c.SetDeadline(time.Now().Add(2 * p.limits.HandshakeTimeout))
	conn, chans, reqs, err := ssh.NewServerConn(tap, cfg)
	if err != nil {
		p.log.Debug("SSH with a caller did not come about", slog.String("authority", t.authority))
		return
	}
	_ = c.SetDeadline(time.Time{})
	f := &sshFront{p: p, t: t, conn: conn, tap: tap, caller: caller}
	go f.global(reqs)
	// A client that opened a connection and does not use it is not kept for ever.
	f.idle = time.AfterFunc(p.limits.IdleTimeout, f.rest)
	defer f.idle.Stop()
	for nc := range chans {
		f.channel(nc)
	}
	_ = conn.Close()
	f.sessions.Wait()
}

// sshFront is one caller's SSH connection.
type sshFront struct {
	p        *Proxy
	t        *tunnel
	conn     *ssh.ServerConn
	tap      *endTap
	caller   dispatch.Caller
	idle     *time.Timer
	sessions sync.WaitGroup

	mu     sync.Mutex
	active int
}

// rest ends a connection on which nothing runs.
func (f *sshFront) rest() {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.active == 0 {
		_ = f.conn.Close()
	}
}

// enter and leave count the sessions. A proxy that shuts down closes connections on
// which nothing runs, now or when the last session has ended.
func (f *sshFront) enter() {
	f.mu.Lock()
	f.active++
	f.mu.Unlock()
	f.p.setServing(f.t)
}

func (f *sshFront) leave() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.active--
	if f.active > 0 {
		return
	}
	f.idle.Reset(f.p.limits.IdleTimeout)
	f.p.mu.Lock()
	f.t.serving = false
	f.p.mu.Unlock()
	if f.p.draining.Load() {
		// The client hangs up by itself once it has what it came for.
		time.AfterFunc(lingerTime, f.rest)
	}
}

// global refuses requests about the connection: remote forwarding among them.
func (f *sshFront) global(reqs <-chan *ssh.Request) {
	for r := range reqs {
		if r.WantReply {
			_ = r.Reply(strings.HasPrefix(r.Type, "keepalive@"), nil)
		}
	}
}

// what is possible here, for every refusal of what is not.
const sshPossible = "This endpoint runs single commands: ssh HOST COMMAND, git over ssh, rsync, and scp -O."

func (f *sshFront) channel(nc ssh.NewChannel) {
	if nc.ChannelType() != "session" {
		// Forwarding has no place for an envelope: the reason is all that clients show.
		reply := f.refuse(context.Background(), refusal(outcome.CodeUnsupportedAction, "request.channel", "forwarding", "Forwarding is not carried. "+sshPossible))
		_ = nc.Reject(ssh.Prohibited, firstLine(reply.Envelope))
		return
	}
	ch, reqs, err := nc.Accept()
	if err != nil {
		return
	}
	f.enter()
	f.p.sshSessions.Add(1)
	f.sessions.Go(func() {
		defer f.leave()
		defer f.p.sshSessions.Add(-1)
		s := &sshSession{f: f, ch: ch, gone: make(chan struct{}), signals: make(chan string, 16)}
		s.serve(reqs)
	})
}

// refuse records what the front itself refuses (CONTRACT M6).
func (f *sshFront) refuse(ctx context.Context, r *dispatch.Refusal) *dispatch.Reply {
	s := f.submission("")
	s.Refused = r
	return f.p.pipeline.Do(context.WithoutCancel(ctx), s)
}

func (f *sshFront) submission(command string) *dispatch.Submission {
	return &dispatch.Submission{
		Caller: f.caller, Method: dispatch.MethodExec, Scheme: "ssh", Protocol: dispatch.ProtocolSSH, Authorities: dispatch.Authorities{Connect: f.t.authority},
		Header: http.Header{}, Exec: &dispatch.ExecRequest{User: f.conn.User(), Command: command},
	}
}

// sshSession is one channel of a caller.
type sshSession struct {
	f       *sshFront
	ch      ssh.Channel
	env     []dispatch.EnvVar
	pty     []byte
	size    int
	begun   bool
	gone    chan struct{} // closed when the caller closed the channel, or is gone
	signals chan string
	run     sync.WaitGroup

	outMu   sync.Mutex
	midLine bool // the last byte on stderr ended no line
}

// Bounds of a session's environment.
const (
	maxEnvVars  = 128
	maxEnvBytes = 64 << 10
	maxPtyBytes = 4 << 10
)

// serve takes the client's requests. One session runs one command (RFC 4254 §6.5).
func (s *sshSession) serve(reqs <-chan *ssh.Request) {
	ctx, cancel := context.WithCancel(s.f.p.base)
	defer cancel()
	for r := range reqs {
		ok := false
		switch r.Type {
		case "env":
			var m struct{ Name, Value string }
			if ssh.Unmarshal(r.Payload, &m) == nil && len(s.env) < maxEnvVars && s.size+len(m.Name)+len(m.Value) <= maxEnvBytes && !s.begun {
				s.env = append(s.env, dispatch.EnvVar{Name: m.Name, Value: m.Value})
				s.size += len(m.Name) + len(m.Value)
				ok = true
			}
		case "exec":
			var m struct{ Command string }
			if ok = !s.begun && ssh.Unmarshal(r.Payload, &m) == nil; ok {
				s.begin(func() { s.exec(ctx, m.Command) })
			}
		case "shell":
			if ok = !s.begun; ok {
				s.begin(func() {
					s.refuse(ctx, "shell", "An interactive shell is not carried. "+sshPossible)
				})
			}
		case "subsystem":
			var m struct{ Name string }
			if ok = !s.begun && ssh.Unmarshal(r.Payload, &m) == nil; ok {
				text := "Subsystems are not carried. " + sshPossible
				if m.Name == "sftp" {
					text = "SFTP is not carried. Use scp -O, which speaks the older protocol that is, or rsync. " + sshPossible
				}
				s.begin(func() { s.refuse(ctx, "subsystem", text) })
			}
		case "signal":
			var m struct{ Name string }
			if ok = ssh.Unmarshal(r.Payload, &m) == nil; ok {
				select {
				case s.signals <- m.Name:
				default: // nobody takes that many
				}
			}
		case "pty-req":
			// Passed on with the command, as it came; without one a shell is refused.
			if ok = !s.begun && len(r.Payload) <= maxPtyBytes; ok {
				s.pty = bytes.Clone(r.Payload)
			}
		case "x11-req", "auth-agent-req@openssh.com":
			// The client says so, and goes on with the command without it.
		}
		if r.WantReply {
			_ = r.Reply(ok, nil)
		}
	}
	close(s.gone)
	// Before dispatch that stops the action (F10), afterwards it only ends the wait (F5).
	cancel()
	s.run.Wait()
}

func (s *sshSession) begin(f func()) {
	s.begun = true
	s.run.Go(func() {
		defer s.recovered()
		f()
	})
}

// recovered ends a session whose handler panicked with nothing that could be taken for a
// success. The value may quote a command and goes nowhere (C2).
func (s *sshSession) recovered() {
	if recover() == nil {
		return
	}
	s.f.p.log.Error("panic in an SSH session", slog.String("stack", string(debug.Stack())))
	_ = s.end()
}

// refuse answers what is not carried.
func (s *sshSession) refuse(ctx context.Context, reason, detail string) {
	reply := s.f.refuse(ctx, refusal(outcome.CodeUnsupportedAction, "request.command", reason, detail))
	reply.HandedOver(s.fail(reply.Envelope))
}

// exec carries one command.
func (s *sshSession) exec(ctx context.Context, command string) {
	f := s.f
	if !f.p.stillValid(f.caller) {
		reply := f.refuse(ctx, refusal(outcome.CodeCallerUnauthenticated, "", "unauthenticated", "The session, or its caller, is not let in any more."))
		_ = s.fail(reply.Envelope)
		return
	}
	sub := f.submission(command)
	sub.Exec.Env, sub.Exec.Pty, sub.Exec.Streamed, sub.Exec.Signals = s.env, s.pty, true, s.signals
	sub.Exec.Stdin = &callerStdin{s: s}
	sub.Refused = takeWaybillEnv(s.env, sub)
	reply := f.p.pipeline.Do(ctx, sub)
	if reply.Body != nil {
		defer func() { _ = reply.Body.Close() }()
	}
	if reply.Envelope != nil {
		reply.HandedOver(s.fail(reply.Envelope))
		return
	}
	err := s.relay(reply.Body)
	if errors.Is(err, dispatch.ErrWaitOver) && reply.WaitOver != nil {
		reply.HandedOver(nil)
		_ = s.fail(reply.WaitOver().Envelope)
		return
	}
	if err != nil && ctx.Err() != nil {
		reply.HandedOver(err) // the caller is gone; the attempt is not
		_ = s.ch.Close()
		return
	}
	final := reply
	if reply.Final != nil {
		final = reply.Final()
	}
	if final.Envelope != nil {
		reply.HandedOver(s.fail(final.Envelope))
		return
	}
	if err == nil {
		err = s.finish(reply.ID.String(), &final.Record)
	} else {
		_ = s.end()
	}
	reply.HandedOver(err)
}

// relay copies the frames of a command's output to the caller's two streams.
func (s *sshSession) relay(body io.Reader) error {
	return dispatch.SplitOutput(body, s.ch, stderrWriter{s})
}

type stderrWriter struct{ s *sshSession }

// Write implements io.Writer.
func (w stderrWriter) Write(p []byte) (int, error) {
	if len(p) > 0 {
		w.s.outMu.Lock()
		w.s.midLine = p[len(p)-1] != '\n'
		w.s.outMu.Unlock()
	}
	return w.s.ch.Stderr().Write(p)
}

// fail tells a failure: a first line with code and action, the envelope, and an end that
// is no success (CONTRACT L6).
func (s *sshSession) fail(env *outcome.Envelope) error {
	err := s.note(string(failureText(env)))
	if cerr := s.end(); err == nil {
		err = cerr
	}
	return err
}

// failedStatus is the exit status for clients that make a success of none: that by which
// ssh itself tells that it is not the command's.
const failedStatus = 255

// noStatusFails are the clients that make a failure of a missing exit status: 255 (ssh),
// -1 (paramiko), an error (Go). Others, among them PuTTY, dbclient and all that use
// libssh2, exit with 0 then.
var noStatusFails = []string{"SSH-2.0-OpenSSH", "SSH-2.0-paramiko", "SSH-2.0-Go"}

// end closes a channel for which there is no end of a command to pass on.
func (s *sshSession) end() error {
	version := string(s.f.conn.ClientVersion())
	if !slices.ContainsFunc(noStatusFails, func(p string) bool { return strings.HasPrefix(version, p) }) {
		_, _ = s.ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{failedStatus}))
	}
	_ = s.ch.CloseWrite()
	if err := s.ch.Close(); !errors.Is(err, io.EOF) {
		return err
	}
	return nil
}

// note writes lines of Waybill's own on standard error, the first at the beginning of one.
func (s *sshSession) note(text string) error {
	s.outMu.Lock()
	if s.midLine {
		text = "\n" + text
	}
	s.outMu.Unlock()
	_, err := io.WriteString(s.ch.Stderr(), text)
	return err
}

func firstLine(env *outcome.Envelope) string {
	if env == nil || env.Error == nil {
		return "waybill: INTERNAL"
	}
	line := "waybill: " + env.Error.Code.String()
	if env.InvocationID != "" {
		line += " " + env.InvocationID
	}
	return line + ": " + env.Error.Message
}

func failureText(env *outcome.Envelope) []byte {
	var b bytes.Buffer
	b.WriteString(firstLine(env))
	b.WriteByte('\n')
	if raw, err := json.Marshal(env); err == nil {
		b.Write(raw)
		b.WriteByte('\n')
	}
	return b.Bytes()
}

// finish passes a complete ending on: exit status or signal, EOF, close. Where the status
// counts although the output is not whole, standard error says so.
func (s *sshSession) finish(id string, rec *dispatch.Record) error {
	d := rec.Deciding()
	if d == nil || d.Response == nil || d.Response.Exec == nil {
		return s.end()
	}
	e := d.Response.Exec
	if !e.OutputEnded || e.Truncated {
		if err := s.note("waybill: " + id + ": the output above is incomplete; the exit status is the command's own\n"); err != nil {
			return err
		}
	}
	var err error
	switch {
	case e.ExitStatus != nil:
		_, err = s.ch.SendRequest("exit-status", false, ssh.Marshal(struct{ Status uint32 }{uint32(*e.ExitStatus)})) //nolint:gosec // it came as uint32
	case e.ExitSignal != "":
		_, err = s.ch.SendRequest("exit-signal", false, ssh.Marshal(struct {
			Name     string
			Core     bool
			Message  string
			Language string
		}{e.ExitSignal, e.CoreDumped, e.SignalMessage, ""}))
	}
	// After the status: there are clients that hang up at the end of the output.
	if werr := s.ch.CloseWrite(); err == nil {
		err = werr
	}
	if cerr := s.ch.Close(); err == nil && !errors.Is(cerr, io.EOF) {
		err = cerr
	}
	return err
}

// callerStdin is the caller's standard input. A connection that ends is no end of it:
// the library shows both as io.EOF.
type callerStdin struct{ s *sshSession }

var errCallerLeft = errors.New("proxy: the caller left in the middle of its input")

// Read implements io.Reader.
func (c *callerStdin) Read(p []byte) (int, error) {
	n, err := c.s.ch.Read(p)
	if err == nil {
		return n, nil
	}
	if c.s.f.tap.ended.Load() {
		return n, errCallerLeft
	}
	select {
	case <-c.s.gone: // closed without an end of the input
		return n, errCallerLeft
	default:
	}
	return n, err
}

// takeWaybillEnv reads the variables that are meant for Waybill.
func takeWaybillEnv(env []dispatch.EnvVar, s *dispatch.Submission) *dispatch.Refusal {
	h := http.Header{}
	for _, v := range env {
		switch v.Name {
		case dispatch.EnvSupersedes:
			h.Set(fieldSupersedes, v.Value)
		case dispatch.EnvRequestID:
			h.Set(fieldRequestID, v.Value)
		case dispatch.EnvTimeout:
			h.Set(fieldTimeout, v.Value)
		}
	}
	return takeWaybillFields(h, s)
}

// execBody is the JSON of POST /v1/ssh/exec.
type execBody struct {
	Target      string            `json:"target"`
	User        string            `json:"user"`
	Command     string            `json:"command"`
	Argv        []string          `json:"argv"`
	Stdin       *string           `json:"stdin"`
	StdinBase64 []byte            `json:"stdin_base64"`
	Env         map[string]string `json:"env"`
	Timeout     int               `json:"timeout"` // seconds the caller waits
	RequestID   string            `json:"request_id"`
	Supersedes  string            `json:"supersedes"`
}

// execResult is what it answers for a command that ran.
type execResult struct {
	InvocationID string           `json:"invocation_id"`
	Outcome      string           `json:"outcome"`
	ExitStatus   *int             `json:"exit_status,omitempty"`
	ExitSignal   string           `json:"exit_signal,omitempty"`
	Stdout       *string          `json:"stdout,omitempty"`
	StdoutBase64 []byte           `json:"stdout_base64,omitempty"` // where it is no UTF-8
	Stderr       *string          `json:"stderr,omitempty"`
	StderrBase64 []byte           `json:"stderr_base64,omitempty"`
	Result       string           `json:"result,omitempty"` // where the output is fetched that is too long for here
	Error        *outcome.Error   `json:"error,omitempty"`  // REMOTE_ERROR for a non-zero status or a signal
	Message      string           `json:"message,omitempty"`
	Evidence     outcome.Evidence `json:"evidence"`
}

const (
	// maxExecBody bounds the JSON; the input in it has its own limit, the route's.
	maxExecBody = 64 << 20
	// maxInlineOutput bounds the output that stands in the answer.
	maxInlineOutput = 8 << 20
)

// exec serves POST /v1/ssh/exec: one command, for callers without an SSH client.
func (a *api) exec() {
	x := exchangeOf(a.r)
	bad := func(field, reason, detail string) {
		a.fail(refusal(outcome.CodeInvalidRequest, field, reason, detail))
	}
	media, _, _ := strings.Cut(a.r.Header.Get("Content-Type"), ";")
	if !strings.EqualFold(strings.TrimSpace(media), "application/json") {
		// A page of another site can send a form, but no JSON (V5).
		bad("request.headers.content-type", "not_json", "Send application/json.")
		return
	}
	dec := json.NewDecoder(http.MaxBytesReader(a.w, a.r.Body, maxExecBody))
	dec.DisallowUnknownFields()
	var b execBody
	if err := dec.Decode(&b); err != nil || dec.More() {
		bad("request.body", "bad_json", "The body is one JSON object with target, user, command or argv, and optionally stdin or stdin_base64, env, timeout, request_id and supersedes.")
		return
	}
	switch {
	case (b.Command == "") == (len(b.Argv) == 0):
		bad("request.command", "command_or_argv", "Give either command or argv.")
		return
	case b.Stdin != nil && b.StdinBase64 != nil:
		bad("request.stdin", "two_inputs", "Give either stdin or stdin_base64.")
		return
	case b.Timeout < 0 || b.Timeout > maxTimeoutSeconds:
		bad("request.timeout", "bad_timeout", "Give whole seconds from 1 to 86400.")
		return
	}
	s := &dispatch.Submission{
		Caller: x.caller, Method: dispatch.MethodExec, Scheme: "ssh", Protocol: dispatch.ProtocolSSH, Authorities: dispatch.Authorities{Connect: b.Target},
		Header: http.Header{}, Exec: &dispatch.ExecRequest{User: b.User, Command: b.Command, Strict: true},
	}
	if len(b.Argv) > 0 {
		s.Exec.Command = dispatch.JoinCommand(b.Argv)
	}
	for name, value := range b.Env {
		s.Exec.Env = append(s.Exec.Env, dispatch.EnvVar{Name: name, Value: value})
	}
	stdin := b.StdinBase64
	if b.Stdin != nil {
		stdin = []byte(*b.Stdin)
	}
	if stdin != nil {
		s.Body, s.ContentLength = bytes.NewReader(stdin), int64(len(stdin))
	}
	h := http.Header{}
	for _, k := range []string{fieldRequestID, fieldSupersedes, fieldTimeout, fieldRetryOf} {
		if v := a.r.Header[k]; v != nil {
			h[k] = v
		}
	}
	for k, v := range map[string]string{fieldRequestID: b.RequestID, fieldSupersedes: b.Supersedes} {
		if v != "" {
			h.Set(k, v)
		}
	}
	if b.Timeout > 0 {
		h.Set(fieldTimeout, strconv.Itoa(b.Timeout))
	}
	s.Refused = takeWaybillFields(h, s)
	x.submitted = true
	reply := a.p.pipeline.Do(a.r.Context(), s)
	x.reply = reply
	if reply.Body != nil {
		defer func() { _ = reply.Body.Close() }()
	}
	if reply.Envelope != nil {
		a.envelope(reply.Envelope, time.Second)
		x.handOver(x.w.err)
		return
	}
	a.execResult(x, reply)
}

func (a *api) execResult(x *exchange, reply *dispatch.Reply) {
	rec := &reply.Record
	env := rec.Envelope()
	res := execResult{InvocationID: reply.ID.String(), Outcome: rec.Facts.Outcome.String(), Error: env.Error, Message: env.Message, Evidence: env.Evidence,
		ExitStatus: env.Evidence.ExitStatus, ExitSignal: env.Evidence.ExitSignal}
	if reply.ContentLength > maxInlineOutput {
		res.Result = "/v1/actions/" + reply.ID.String() + "/result"
	} else {
		var out, errs bytes.Buffer
		if err := dispatch.SplitOutput(reply.Body, &out, &errs); err != nil {
			a.unreadable(reply.ID.String(), err)
			x.handOver(err)
			return
		}
		res.Stdout, res.StdoutBase64 = textOrBytes(out.Bytes())
		res.Stderr, res.StderrBase64 = textOrBytes(errs.Bytes())
	}
	h := a.w.Header()
	outcome.Annotate(h, reply.ID.String(), rec.Facts, outcome.Shape{InsideTunnel: true}, !rec.Repeatable())
	if res.Error != nil && rec.Facts.Retry != outcome.Backoff {
		h.Set("X-Should-Retry", "false") // L7: a 200 is no permission to repeat
		h.Set("Stripe-Should-Retry", "false")
	}
	a.json(http.StatusOK, res)
	err := x.w.FlushError()
	if err == nil {
		err = x.w.err
	}
	x.handOver(err)
}

func textOrBytes(b []byte) (*string, []byte) {
	if utf8.Valid(b) {
		s := string(b)
		return &s, nil
	}
	return nil, b
}
