package dispatch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"

	"waybill/outcome"
	"waybill/routes"
)

// ProtocolSSH is the protocol of actions that are commands.
const ProtocolSSH = "SSH-2.0"

// MethodExec is the method of actions that are commands, as records show it.
const MethodExec = "EXEC"

// Variables of a command's environment that are meant for Waybill. None is passed on.
const (
	EnvSupersedes = "WAYBILL_SUPERSEDES" // O3
	EnvRequestID  = "WAYBILL_REQUEST_ID"
	EnvTimeout    = "WAYBILL_TIMEOUT" // seconds
)

// EnvVar is one variable of a command's environment.
type EnvVar struct{ Name, Value string }

// ExecRequest is a command as a caller asks for it. With it in a Submission the action
// is a command: Authorities.Connect names the target, Body is a standard input that is
// given whole, and Header is not used.
type ExecRequest struct {
	User    string
	Command string // as the remote shell gets it
	// Env is what the caller set. Strict refuses variables that the route does not
	// allow; otherwise they are left out, as sshd does.
	Env    []EnvVar
	Strict bool
	// Stdin is a standard input that arrives while the command runs; nil: none, or the
	// Body. Its io.EOF is a clean end. It must end, or fail, after the reply's hand-over.
	Stdin io.Reader
	// Signals are passed on while the command runs; nil: none.
	Signals <-chan string
	// Pty is the payload of the caller's request for a terminal (RFC 4254 §6.2), passed on
	// as it came; nil: none was asked for.
	Pty []byte
	// Streamed relays output while it arrives (Reply.Streamed).
	Streamed bool
}

// Stream is an output stream of a command.
type Stream byte

// The streams, by their numbers in stored output.
const (
	Stdout Stream = 1
	Stderr Stream = 2
)

// OutputMediaType is the form of a command's stored output: frames, each a head of
// eight bytes – the stream, three zeros, the length in big-endian – and its bytes. No
// frame crosses the border of a chunk, so that reading can resume at any chunk (H4).
const OutputMediaType = "application/vnd.waybill.ssh-output"

const (
	frameHead = 8
	// MaxFrameBytes bounds the bytes of one frame.
	MaxFrameBytes = 32 << 10
)

// ErrBadFrame is returned by ReadFrame for what is no frame.
var ErrBadFrame = errors.New("dispatch: not a frame of a command's output")

// ReadFrame reads the next frame. buf is used where it is large enough. io.EOF is the
// end between two frames.
func ReadFrame(r io.Reader, buf []byte) (Stream, []byte, error) {
	var head [frameHead]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(head[4:])
	s := Stream(head[0])
	if s != Stdout && s != Stderr || head[1]|head[2]|head[3] != 0 || n > MaxFrameBytes {
		return 0, nil, ErrBadFrame
	}
	if cap(buf) < int(n) {
		buf = make([]byte, n)
	}
	buf = buf[:n]
	if _, err := io.ReadFull(r, buf); err != nil {
		return 0, nil, io.ErrUnexpectedEOF
	}
	return s, buf, nil
}

// appendFrames appends p as frames.
func appendFrames(dst []byte, s Stream, p []byte) []byte {
	for len(p) > 0 {
		n := min(len(p), MaxFrameBytes)
		dst = append(dst, byte(s), 0, 0, 0)
		dst = binary.BigEndian.AppendUint32(dst, uint32(n)) //nolint:gosec // at most MaxFrameBytes
		dst = append(dst, p[:n]...)
		p = p[n:]
	}
	return dst
}

// wholeFrames returns the length of the frames at the start of b that fit into limit.
func wholeFrames(b []byte, limit int) int {
	n := 0
	for len(b)-n >= frameHead {
		next := n + frameHead + int(binary.BigEndian.Uint32(b[n+4:]))
		if next > limit || next > len(b) {
			break
		}
		n = next
	}
	return n
}

// Exec is a command as it will be handed over. It does not change after it was
// verified (D2); what Stdin will bring is not known then, and marked so.
type Exec struct {
	User    string
	Command string
	Stdin   io.Reader // arrives while the command runs; nil: none, or Outgoing.Body
	Signals <-chan string
	// Terminal: the command gets one, whose size and modes are the caller's.
	Terminal bool
	// Grace is how long output may stay open in silence after the exit status (G9).
	Grace time.Duration
}

// ExecOrder says what session is wanted.
type ExecOrder struct {
	SSH     *routes.SSH
	User    string
	Signers []ssh.Signer // of the target
	Jump    []ssh.Signer // of the jump host
	Env     []EnvVar     // set before the boundary (E5)
	Pty     []byte       // as ExecRequest.Pty
}

// ExecSink receives a command's output. The sink of an action that is a command is one.
type ExecSink interface {
	// Accepted says that the server took the request to start the command.
	Accepted() error
	// Output receives the next bytes of a stream; it does not keep the slice. Calls do
	// not overlap.
	Output(s Stream, p []byte) error
}

// ExecEnd is what is known of a command's run: evidence, whatever it resolves (G9).
type ExecEnd struct {
	Accepted bool `json:"accepted"`
	// ExitStatus is nil when none came.
	ExitStatus *int   `json:"exit_status,omitempty"`
	ExitSignal string `json:"exit_signal,omitempty"` // without "SIG"
	CoreDumped bool   `json:"core_dumped,omitempty"`
	// SignalMessage is the server's text, scrubbed and cut.
	SignalMessage string `json:"signal_message,omitempty"`
	// OutputEnded: both streams came to their end.
	OutputEnded bool `json:"output_ended"`
	// Closed: the server closed the channel itself.
	Closed bool `json:"closed"`
	// Truncated: the output outgrew the route's limit and was not kept from there on.
	Truncated    bool   `json:"truncated,omitempty"`
	StdoutBytes  int64  `json:"stdout_bytes"`
	StderrBytes  int64  `json:"stderr_bytes"`
	StdoutDigest string `json:"stdout_digest,omitempty"`
	StderrDigest string `json:"stderr_digest,omitempty"`
	// StdinBytes and StdinDigest are of what was handed over; StdinStreamed: it came while
	// the command ran, so that no fingerprint covers it; StdinEnded: its end was passed on.
	StdinBytes    int64  `json:"stdin_bytes,omitempty"`
	StdinDigest   string `json:"stdin_digest,omitempty"`
	StdinStreamed bool   `json:"stdin_streamed,omitempty"`
	StdinEnded    bool   `json:"stdin_ended,omitempty"`
	// RefusedEnv are variables that the server did not take.
	RefusedEnv []string `json:"refused_env,omitempty"`
}

// Exited reports whether an exit status or signal came.
func (e *ExecEnd) Exited() bool { return e != nil && (e.ExitStatus != nil || e.ExitSignal != "") }

// show puts the run into the evidence (L3). Only what a finished run has is shown of one
// that was found after a crash.
func (e *ExecEnd) show(ev *outcome.Evidence) {
	ev.ReceivedStatus = 0
	if e.StdoutDigest == "" && !e.Exited() && e.StdoutBytes+e.StderrBytes == 0 && !e.OutputEnded {
		return
	}
	whole, closed, out, err := e.OutputEnded && !e.Truncated, e.Closed, e.StdoutBytes, e.StderrBytes
	ev.ExitStatus, ev.ExitSignal, ev.OutputComplete, ev.ChannelClosed, ev.Truncated = e.ExitStatus, e.ExitSignal, &whole, &closed, e.Truncated
	ev.StdoutBytes, ev.StderrBytes, ev.StdoutDigest, ev.StderrDigest = &out, &err, e.StdoutDigest, e.StderrDigest
	switch {
	case e.StdinStreamed:
		ev.Stdin = "streamed"
	case e.StdinBytes > 0:
		ev.Stdin = "whole"
	}
	ev.StdinDigest = e.StdinDigest
}

// Clone returns a deep copy.
func (e *ExecEnd) Clone() *ExecEnd {
	if e == nil {
		return nil
	}
	c := *e
	if e.ExitStatus != nil {
		v := *e.ExitStatus
		c.ExitStatus = &v
	}
	c.RefusedEnv = slices.Clone(e.RefusedEnv)
	return &c
}

// aimExec finds the one canonical target of a command (CONTRACT B1).
func (a *action) aimExec(context.Context) *Refusal {
	x := a.s.Exec
	a.s.Method, a.accepted.Method = MethodExec, MethodExec
	a.s.Protocol, a.accepted.Protocol = ProtocolSSH, ProtocolSSH
	host, port, err := routes.ParseAuthority(a.s.Authorities.Connect, routes.DefaultSSHPort)
	if err != nil {
		var bad *routes.AuthorityError
		reason := "authority"
		if errors.As(err, &bad) {
			reason = bad.Reason
		}
		return refusal(outcome.CodeInvalidTarget, "connect.target", reason, "The destination is not a plain host name or address.")
	}
	a.addressed = routes.Target{Scheme: "ssh", Host: host, Port: port}
	a.out = &Outgoing{Method: MethodExec, Target: a.addressed, Authority: authority(a.addressed), Exec: &Exec{User: x.User, Command: x.Command, Stdin: x.Stdin, Signals: x.Signals, Terminal: x.Pty != nil}}
	a.accepted.Target = shownCommand(a.out)
	switch {
	case a.s.RetryOf != "":
		// To ignore it would run a new action where a further attempt was asked for.
		return refusal(outcome.CodeUnsupportedAction, "request.headers.waybill-retry-of", "not_available", "A command has no further attempts; run it again, and name the earlier action in "+EnvSupersedes+".")
	case !routes.IsSSHUser(x.User):
		a.out.Exec.User = ""
		a.accepted.Target = shownCommand(a.out)
		return refusal(outcome.CodeInvalidRequest, "request.user", "bad_user", "The remote user is missing, or its name is not usable.")
	case x.Command == "":
		return refusal(outcome.CodeInvalidRequest, "request.command", "no_command", "The command is empty.")
	case len(x.Command) > routes.MaxCommandBytes || strings.IndexByte(x.Command, 0) >= 0:
		return refusal(outcome.CodeInvalidRequest, "request.command", "bad_command", "The command is too long, or holds a NUL byte.")
	}
	return nil
}

// shownCommand is a command as it may be recorded: of the command line the first word,
// since what follows may hold a secret (CONTRACT C2).
func shownCommand(out *Outgoing) string {
	s := "ssh://"
	if out.Exec.User != "" {
		s += out.Exec.User + "@"
	}
	s += out.Authority
	word, rest, more := strings.Cut(strings.TrimLeft(out.Exec.Command, " \t"), " ")
	if i := strings.IndexFunc(word, func(r rune) bool { return r <= ' ' || r > '~' || r == '=' }); i >= 0 || len(word) > 64 {
		return s
	}
	if word != "" {
		s += " " + word
		if more && rest != "" {
			s += " …"
		}
	}
	return s
}

// chooseExec binds the route and its rule for the command (CONTRACT V1, V4, I8).
func (a *action) chooseExec(context.Context) *Refusal {
	x := a.s.Exec
	r, match, miss := a.binding.Snapshot.MatchSSH(a.addressed, x.User, x.Command)
	if in := a.s.Internal; in != nil {
		a.accepted.Link = &in.Link
		r, match = confirmingMatch(a.binding.Snapshot, in, a.addressed, x)
	}
	if r == nil {
		return refusal(miss.Code(), miss.Field(), miss.Kind.String(), miss.Detail(a.s.Caller.Name))
	}
	a.route = r
	if !r.AllowsCaller(a.s.Caller.Name) {
		return refusal(outcome.CodePolicyDenied, "", "caller_not_allowed", "This caller may not use the route.")
	}
	env, refused := allowedEnv(r.SSH, x)
	if refused != nil {
		return refused
	}
	a.command = match
	a.out.Exec.Grace = match.Rule.Grace
	if a.out.Exec.Grace <= 0 {
		a.out.Exec.Grace = routes.DefaultGrace
	}
	a.out.MaxBody = r.Limits.Response
	a.execEnv = env
	a.repeatable = match.Rule.Repeatable
	a.advice = outcome.ByContract(a.repeatable, false)
	if match.Rule.Reconcile != nil {
		a.recallCommand(match)
	}
	return nil
}

// allowedEnv returns the caller's variables that the route takes, by name.
func allowedEnv(s *routes.SSH, x *ExecRequest) ([]EnvVar, *Refusal) {
	var env []EnvVar
	for _, v := range x.Env {
		if strings.HasPrefix(v.Name, "WAYBILL_") {
			continue // for Waybill, or nobody
		}
		if !s.AllowsEnv(v.Name) || !routes.IsEnvName(v.Name) || strings.IndexByte(v.Value, 0) >= 0 {
			if x.Strict {
				return nil, refusal(outcome.CodeInvalidRequest, "request.env", "variable_not_allowed", "The route does not allow one of the variables; its list is "+strings.Join(s.Env, ", ")+".")
			}
			continue
		}
		// The last one wins, as in a shell.
		env = slices.DeleteFunc(env, func(e EnvVar) bool { return e.Name == v.Name })
		env = append(env, v)
	}
	slices.SortFunc(env, func(p, q EnvVar) int { return strings.Compare(p.Name, q.Name) })
	return env, nil
}

// spoolExec takes in a standard input that is given whole, and makes the fingerprint
// (CONTRACT D1): target, user, command, environment, and that input. One that arrives
// while the command runs is named as such.
func (a *action) spoolExec(ctx context.Context) *Refusal {
	if a.out.Exec.Stdin != nil && a.route.NeedsApproval(a.s.Method, a.s.RawPath, math.MaxInt64) { // as long as it may get
		if r := a.wholeStdin(ctx); r != nil {
			return r
		}
	}
	if a.out.Exec.Stdin == nil && a.s.Body != nil {
		if r := a.spoolBody(); r != nil {
			return r
		}
		a.out.Body = bodyOf(a.body)
	}
	a.print = execFingerprint(a.out, a.execEnv, a.body)
	return nil
}

// Bounds of an input that arrives by a channel and is waited for: a person approves all
// that will be sent (CONTRACT D5).
const (
	maxWholeStdin = 1 << 20
	stdinWait     = 5 * time.Second
)

// wholeStdin takes in an input that would arrive while the command runs.
func (a *action) wholeStdin(ctx context.Context) *Refusal {
	type input struct {
		data []byte
		err  error
	}
	in, stdin := make(chan input, 1), a.out.Exec.Stdin
	go func() { // ends with the caller's session at the latest
		data, err := io.ReadAll(io.LimitReader(stdin, maxWholeStdin+1))
		in <- input{data, err}
	}()
	late := time.NewTimer(stdinWait)
	defer late.Stop()
	select {
	case <-ctx.Done():
		return a.cancelled(outcome.Validation)
	case <-late.C:
		return refusal(outcome.CodeUnsupportedAction, "request.stdin", "stdin_streamed", "A person approves all that will be sent, and the standard input did not end; close it (ssh -n, or </dev/null).")
	case got := <-in:
		switch {
		case got.err != nil && gone(ctx):
			return a.cancelled(outcome.Validation)
		case got.err != nil:
			return refusal(outcome.CodeInvalidRequest, "request.stdin", reasonBodyBroken, "The standard input ended before it was complete.")
		case len(got.data) > maxWholeStdin:
			return refusal(outcome.CodePayloadLimit, "request.stdin", "held_limit", "The standard input of a command that waits for an approval has at most 1 MiB.")
		}
		a.out.Exec.Stdin, a.s.Exec.Stdin = nil, nil
		if len(got.data) > 0 {
			a.s.Body, a.s.ContentLength = bytes.NewReader(got.data), int64(len(got.data))
		}
		return nil
	}
}

func execFields(out *Outgoing, env []EnvVar) []string {
	f := []string{out.Target.Host, strconv.Itoa(out.Target.Port), out.Exec.User, out.Exec.Command, strconv.FormatBool(out.Exec.Stdin != nil), strconv.FormatBool(out.Exec.Terminal), strconv.Itoa(len(env))}
	for _, v := range env {
		f = append(f, v.Name, v.Value)
	}
	return f
}

func execFingerprint(out *Outgoing, env []EnvVar, body *spool) string {
	f := newFields()
	f.add("waybill ssh fingerprint 1")
	f.add(execFields(out, env)...)
	if body != nil {
		f.digest(body.digest)
	}
	return f.text()
}

// sealExec is sealOf for a command (CONTRACT D2, D5).
func sealExec(out *Outgoing, env []EnvVar, body *spool, identity, snapshot string) [sha256.Size]byte {
	f := newFields()
	f.add("waybill ssh seal 1", snapshot, identity, strconv.FormatInt(out.Length, 10))
	f.add(execFields(out, env)...)
	if body != nil {
		f.digest(body.digest)
	}
	return f.sum()
}

// authoriseExec is authorise for a command: it obtains and reads the keys, so that one
// that cannot be used ends the action here (CONTRACT C1).
func (a *action) authoriseExec(ctx context.Context) *Refusal {
	s := a.route.SSH
	var used Credential
	a.credential, a.secrets, a.identity, a.jumpSigners = nil, nil, "", nil
	target, refused := a.sshKey(ctx, &used, s.Key, s.Passphrase, s.Certificate, s.Agent, s.AgentKey)
	if refused != nil {
		return refused
	}
	a.signers = target
	if j := s.Jump; j != nil {
		if a.jumpSigners, refused = a.sshKey(ctx, &used, j.Key, j.Passphrase, j.Certificate, "", ""); refused != nil {
			return refused
		}
	}
	used.Mode = "ssh-key"
	if s.Agent != "" {
		used.Mode = "ssh-agent"
	}
	a.credential = &used
	a.identity = "ssh " + a.out.Exec.User + " " + used.ID + "@" + used.Version
	return nil
}

// attachExec seals the command (CONTRACT D2).
func (a *action) attachExec(context.Context) *Refusal {
	a.add(Event{Type: CredentialAuthorized, Credential: a.credential})
	if a.route.SSH.MarksAction() {
		a.execMarker = &EnvVar{routes.EnvActionID, a.id.String()}
	}
	a.seal = a.sealNow()
	return nil
}

// execOrder is what the transport is asked for.
func (a *action) execOrder() *ExecOrder {
	env := slices.Clone(a.execEnv)
	if a.execMarker != nil {
		env = append(env, *a.execMarker)
	}
	return &ExecOrder{Pty: a.s.Exec.Pty, SSH: a.route.SSH, User: a.out.Exec.User, Signers: a.signers, Jump: a.jumpSigners, Env: env}
}

// execFacts says what a command's ending means (CONTRACT G9, A5, F8) and whether it
// counts as complete.
func (a *action) execFacts(end *Ending) (f outcome.Facts, complete bool) {
	e := end.Exec
	complete = end.Complete
	if !complete && a.command.Rule.ExitAuthoritative && e.Exited() {
		// The route's contract names the exit status as authoritative (G13).
		complete = true
	}
	if !complete {
		return endingFacts(end, a.advice), false
	}
	if e.ExitStatus != nil && *e.ExitStatus == 0 {
		return outcome.Success(), true
	}
	return outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Committed, Retry: outcome.Reconcile, Code: outcome.CodeRemoteError}, true
}

// execSink is what a resultSink needs for a command's output.
type execSink struct {
	accepted bool
	streamed bool
	frames   []byte

	mu      sync.Mutex // of both screens: output comes while a timer may run
	stderr  *screen    // the sink's own is that of stdout
	idle    *time.Timer
	settled bool
	failed  error // of a flush
}

// A command may wait for an answer to what it wrote, so what may be the beginning of a
// secret is not held back for long: flushAfter is how long the streams must rest. What
// is long enough to tell is no beginning by chance, and stays.
const flushAfter = 20 * time.Millisecond

// Accepted implements ExecSink.
func (s *resultSink) Accepted() error {
	s.exec.accepted = true
	if s.exec.streamed {
		s.beginExec()
	}
	return nil
}

// Output implements ExecSink.
func (s *resultSink) Output(stream Stream, p []byte) error {
	x := s.exec
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.failed != nil {
		return x.failed
	}
	if err := s.takeOutput(stream, s.screenOf(stream).body(p)); err != nil {
		return err
	}
	if s.screen.stream.Held()+x.stderr.stream.Held() > 0 {
		if x.idle == nil {
			x.idle = time.AfterFunc(flushAfter, s.flushIdle)
		} else {
			x.idle.Reset(flushAfter)
		}
	}
	return nil
}

func (s *resultSink) screenOf(stream Stream) *screen {
	if stream == Stderr {
		return s.exec.stderr
	}
	return s.screen
}

// flushIdle releases what is held back of streams that rest.
func (s *resultSink) flushIdle() {
	x := s.exec
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.settled || x.failed != nil {
		return
	}
	for _, stream := range []Stream{Stdout, Stderr} {
		if p := s.screenOf(stream).rested(); len(p) > 0 {
			if err := s.takeOutput(stream, p); err != nil {
				x.failed = err
			}
		}
	}
}

func (s *resultSink) takeOutput(stream Stream, p []byte) error {
	s.exec.frames = appendFrames(s.exec.frames[:0], stream, p)
	return s.take(s.exec.frames)
}

// settleExec takes what the screens held back.
func (s *resultSink) settleExec(end *Ending) error {
	x := s.exec
	x.mu.Lock()
	defer x.mu.Unlock()
	x.settled = true
	if x.idle != nil {
		x.idle.Stop()
	}
	out := end.Exec == nil || end.Exec.OutputEnded && !end.Exec.Truncated
	err := errors.Join(x.failed, s.takeOutput(Stdout, s.screen.end(out, false)))
	err = errors.Join(err, s.takeOutput(Stderr, s.exec.stderr.end(out, false)))
	if s.screen.reason == "" {
		s.screen.reason = s.exec.stderr.reason
	}
	s.screen.masked += s.exec.stderr.masked
	return err
}

// beginExec releases a command's output while it arrives (CONTRACT H5).
func (s *resultSink) beginExec() {
	a := s.a
	s.startPump()
	f := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.FetchResult}
	body := (&streamBody{s: s.st, ctx: a.caller}).bounded(a.waits)
	reply := &Reply{ID: a.id, Record: a.begun(f), ContentLength: -1, Streamed: true, Body: body, HandedOver: a.streamHandedOver, Final: a.final,
		WaitOver: func() *Reply { return a.leave(context.Background()) }}
	if left := a.publish(reply); left {
		a.mu.Lock()
		a.undelivered = true
		a.mu.Unlock()
	}
}

// final waits for the ending of an action whose output is streamed.
func (a *action) final() *Reply {
	<-a.over
	return a.ending
}

// cut takes the next chunk from a buffer: whole frames, where it holds frames.
func (s *resultSink) cut(b *bytes.Buffer) []byte {
	if s.exec == nil {
		return b.Next(MaxChunkBytes)
	}
	return b.Next(wholeFrames(b.Bytes(), MaxChunkBytes))
}

// startedExec is what a crash finds of a command that was accepted.
func (s *resultSink) startedExec() *ExecEnd {
	if s.exec == nil {
		return nil
	}
	return &ExecEnd{Accepted: s.exec.accepted}
}

// resolveExec is resolve for a command.
func (a *action) resolveExec(end *Ending, sink *resultSink) *Reply {
	if end.Exec == nil {
		end.Exec = &ExecEnd{}
	}
	settled := sink.settleExec(end)
	stored := errors.Join(settled, sink.drain())
	facts, complete := a.execFacts(end)
	a.execEvidence(end, sink, complete)
	a.events = append(a.events, a.late...)
	switch {
	case end.SinkErr != nil:
		return a.storeFailed(end, end.SinkErr)
	case stored != nil:
		return a.storeFailed(end, stored)
	}
	blocked := sink.screen.reason
	switch {
	case complete && blocked != "":
		facts.Phase, facts.Retry, facts.Code = outcome.ResultDelivery, outcome.Never, outcome.CodeResultContainsSecret
		ended := a.ended2(facts, end, outcome.RemoteResponse)
		ended.Reason = blocked
		a.add(Event{Type: AttemptResolved, Attempt: a.tries, Ended: ended})
		return a.commitUnresolved(facts)
	case !complete:
		// What came stays readable chunk by chunk, labelled incomplete (H10).
		if blocked == "" {
			for _, c := range sink.pending() {
				if len(c.Data) == 0 {
					continue
				}
				if err := sink.store(c.Data); err != nil {
					return a.storeFailed(end, err)
				}
			}
		}
		a.add(Event{Type: AttemptResolved, Attempt: a.tries, Ended: a.ended2(facts, end, outcome.TransportObserved)})
		return a.commitUnresolved(facts)
	}
	chunks := sink.pending()
	result := sink.finish(end, len(chunks))
	result.Exec, result.Status = a.execOf(end, sink), 200 // of a fetch
	result.Header = map[string][]string{"Content-Type": {OutputMediaType}}
	result.ExpiresAt = a.now().Add(a.route.Limits.Retention)
	a.add(Event{Type: ResultCommitted, Attempt: a.tries, Ended: a.ended2(facts, end, outcome.RemoteResponse), Result: result})
	a.noteLeaving()
	relaxed := a.accepted.Relaxed && sink.stored == 0 && sink.st == nil
	receipt, err := a.p.cfg.Journal.Append(context.Background(), Batch{Action: a.id, Events: a.events, Chunks: chunks, Relaxed: relaxed})
	if err != nil {
		return a.storeFailed(end, err)
	}
	rec := a.current(receipt, facts)
	a.committed = true
	reply := &Reply{ID: a.id, Record: rec, ContentLength: result.Bytes, HandedOver: a.handedOver(true)}
	if sink.stored == 0 {
		reply.Body = bytesBody(sink.buf.Bytes())
	} else {
		reply.Body = &storedBody{open: func() (io.ReadCloser, error) {
			_, body, err := a.p.cfg.Journal.OpenResult(context.Background(), a.id)
			return body, err
		}}
	}
	a.log(rec, 0)
	return reply
}

func (a *action) ended2(f outcome.Facts, end *Ending, src outcome.Source) *Ended {
	e := a.ended(f, end, src)
	e.Reason = end.Reason
	return e
}

// execOf is the evidence of a run, without text that tells a secret (CONTRACT C2).
func (a *action) execOf(end *Ending, sink *resultSink) *ExecEnd {
	e := *end.Exec
	e.RefusedEnv = slices.Clone(e.RefusedEnv)
	if msg, masked := sink.screen.guard.MaskString(e.SignalMessage); masked > 0 || a.tells(msg) {
		e.SignalMessage = ""
	}
	e.SignalMessage = scrubbed(e.SignalMessage)
	if sink.screen.masked > 0 || sink.screen.reason != "" {
		// Whoever knows the rest could try secrets out on them (C5).
		e.StdoutDigest, e.StderrDigest = "", ""
	}
	return &e
}

// maxSignalMessage bounds the text that comes with a signal, in bytes.
const maxSignalMessage = 128

// scrubbed keeps printable ASCII of a text, cut. What looks like a variable's setting
// is left out: servers have been seen to send the environment.
func scrubbed(s string) string {
	s = capped(s, maxSignalMessage)
	s = strings.Map(func(r rune) rune {
		if r < ' ' || r > '~' {
			return ' '
		}
		return r
	}, s)
	words := strings.Fields(s)
	words = slices.DeleteFunc(words, func(w string) bool { return strings.ContainsRune(w, '=') })
	return strings.Join(words, " ")
}

// execEvidence adds the markers of the run as far as it came (F3).
func (a *action) execEvidence(end *Ending, sink *resultSink, complete bool) {
	sent := end.Sent
	a.add(Event{Type: RequestSent, Attempt: a.tries, Sent: &sent})
	e := a.execOf(end, sink)
	if !e.Accepted {
		return
	}
	r := &Response{Bytes: e.StdoutBytes + e.StderrBytes, Framing: end.Framing, Redacted: sink.screen.masked, Exec: e}
	a.add(Event{Type: ResponseStarted, Attempt: a.tries, Response: r})
	if complete {
		whole := *r
		whole.Digest = digestText(sink.hash)
		a.add(Event{Type: ResponseComplete, Attempt: a.tries, Response: &whole})
	}
}

// resultFields are the fields of a fetched result that say how the command ended.
func (e *ExecEnd) resultFields(h http.Header) {
	if e.ExitStatus != nil {
		h.Set("Waybill-Exit-Status", strconv.Itoa(*e.ExitStatus))
	}
	if e.ExitSignal != "" {
		h.Set("Waybill-Exit-Signal", e.ExitSignal)
	}
	h.Set("Waybill-Output-Complete", strconv.FormatBool(e.OutputEnded && !e.Truncated))
}

// SplitOutput copies stored output to its two streams. ErrBadFrame, io.ErrUnexpectedEOF,
// and errors of the reader and the writers.
func SplitOutput(r io.Reader, stdout, stderr io.Writer) error {
	buf := make([]byte, MaxFrameBytes)
	for {
		s, p, err := ReadFrame(r, buf)
		if err == io.EOF { //nolint:errorlint // itself: a wrapped one is no clean end
			return nil
		}
		if err != nil {
			return err
		}
		w := stdout
		if s == Stderr {
			w = stderr
		}
		if _, err := w.Write(p); err != nil {
			return err
		}
	}
}

// JoinCommand makes the command line whose words are argv, quoted for a POSIX shell.
func JoinCommand(argv []string) string { return routes.JoinCommand(argv) }
