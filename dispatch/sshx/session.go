package sshx

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"hash"
	"io"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/ssh"

	"waybill/dispatch"
	"waybill/internal/control"
	"waybill/internal/killpoint"
	"waybill/outcome"
)

// errFull says that a shared connection takes no further session.
var errFull = errors.New("sshx: the connection has as many sessions as its server allows")

// session is one channel, for one command.
type session struct {
	c      *conn
	ch     ssh.Channel
	reused bool
	stage  outcome.Stage
	unset  []string // variables that the server did not take

	mu     sync.Mutex
	status *int
	signal *exitSignal
	exited chan struct{} // closed when either came
	closed chan struct{} // closed when the channel is

	clean bool // the channel was closed by both sides
}

// exitSignal is the payload of RFC 4254 §6.10.
type exitSignal struct {
	Name     string
	Core     bool
	Message  string
	Language string
}

// open opens a session channel and sets the environment: the last of connection setup
// (CONTRACT E5). On failure the place on the connection is given back.
func (c *conn) open(ctx context.Context, o *dispatch.Order, reused bool) (*session, error) {
	type opened struct {
		ch   ssh.Channel
		reqs <-chan *ssh.Request
		err  error
	}
	result := make(chan opened, 1)
	go func() {
		ch, reqs, err := c.ssh.OpenChannel("session", nil)
		result <- opened{ch, reqs, err}
	}()
	var got opened
	select {
	case got = <-result:
	case <-ctx.Done():
		c.release(false)
		go func() {
			if late := <-result; late.err == nil {
				go ssh.DiscardRequests(late.reqs)
				_ = late.ch.Close()
			}
		}()
		return nil, fail(outcome.CodeSSHChannelRefused, outcome.StageSSHAuth, "channel_timeout", ctx.Err())
	}
	var refused *ssh.OpenChannelError
	switch {
	case got.err == nil:
	case errors.As(got.err, &refused):
		if c.full() {
			c.release(true)
			return nil, errFull
		}
		c.release(false)
		return nil, fail(outcome.CodeSSHChannelRefused, outcome.StageSSHAuth, rejection(refused.Reason), got.err)
	default:
		// The connection ended before anything of the command was sent on it.
		c.release(false)
		c.lost()
		return nil, fail(outcome.CodeConnectionLost, outcome.StageSSHAuth, "connection_lost", got.err)
	}
	s := &session{c: c, ch: got.ch, reused: reused, stage: outcome.StageSSHChannel, exited: make(chan struct{}), closed: make(chan struct{})}
	go s.listen(got.reqs)
	if err := s.prepare(ctx, o.Exec); err != nil {
		s.Release()
		return nil, err
	}
	return s, nil
}

// full lowers the number of sessions of a connection that carries others already, and
// reports whether it does.
func (c *conn) full() bool {
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	if c.active <= 1 {
		return false
	}
	c.max = max(1, c.active-1)
	return true
}

func rejection(r ssh.RejectionReason) string {
	switch r {
	case ssh.Prohibited:
		return "prohibited"
	case ssh.ConnectionFailed:
		return "connect_failed"
	case ssh.UnknownChannelType:
		return "unknown_channel_type"
	case ssh.ResourceShortage:
		return "resource_shortage"
	default:
		return "channel_refused"
	}
}

// prepare asks for the terminal and sets the environment. What the server does not take
// is left out.
func (s *session) prepare(ctx context.Context, x *dispatch.ExecOrder) error {
	env := x.Env
	if len(env) == 0 && x.Pty == nil {
		return nil
	}
	stop := context.AfterFunc(ctx, func() { _ = s.ch.Close() })
	defer stop()
	if x.Pty != nil {
		if _, err := s.ch.SendRequest("pty-req", true, x.Pty); err != nil {
			return fail(outcome.CodeConnectionLost, outcome.StageSSHChannel, "connection_lost", err)
		}
	}
	for _, v := range env {
		ok, err := s.ch.SendRequest("env", true, ssh.Marshal(struct{ Name, Value string }{v.Name, v.Value}))
		if err != nil {
			return fail(outcome.CodeConnectionLost, outcome.StageSSHChannel, "connection_lost", err)
		}
		if !ok {
			s.unset = append(s.unset, v.Name)
		}
	}
	s.stage = outcome.StageSSHEnv
	return nil
}

// listen takes the server's requests on the channel, in order.
func (s *session) listen(reqs <-chan *ssh.Request) {
	for r := range reqs {
		s.mu.Lock()
		first := s.status == nil && s.signal == nil
		switch r.Type {
		case "exit-status":
			var m struct{ Status uint32 }
			if first && ssh.Unmarshal(r.Payload, &m) == nil {
				v := int(m.Status)
				s.status = &v
				close(s.exited)
			}
		case "exit-signal":
			var m exitSignal
			if first && ssh.Unmarshal(r.Payload, &m) == nil && m.Name != "" {
				s.signal = &m
				close(s.exited)
			}
		}
		s.mu.Unlock()
		if r.WantReply {
			_ = r.Reply(false, nil)
		}
	}
	close(s.closed)
}

// Info implements dispatch.Conn.
func (s *session) Info() dispatch.Dispatch {
	peer := *s.c.peer
	return dispatch.Dispatch{Connection: s.c.id, Reused: s.reused, Stage: s.stage, Peer: &peer}
}

// Release implements dispatch.Conn.
func (s *session) Release() {
	_ = s.ch.Close()
	// A channel that the server still holds counts there: the connection is not used again.
	s.c.release(s.clean)
}

// Waits for a peer that does not say what became of a channel.
const proofWait = 250 * time.Millisecond

// run is one exchange.
type run struct {
	s    *session
	out  *dispatch.Outgoing
	sink dispatch.ExecSink

	mu        sync.Mutex // of the sink, and the fields below
	end       *dispatch.ExecEnd
	digest    [3]hash.Hash // by stream; 0: stdin
	kept      int64
	sinkErr   error
	sinkFail  chan struct{}
	readers   sync.WaitGroup
	outputEnd chan struct{}
	moved     atomic.Int64 // changes with every piece of output
	taking    atomic.Int64 // pieces that are being stored
}

// Exchange implements dispatch.Conn (CONTRACT F4, G9).
func (s *session) Exchange(ctx context.Context, out *dispatch.Outgoing, sink dispatch.Sink) dispatch.Ending {
	x, ok := sink.(dispatch.ExecSink)
	if !ok || out.Exec == nil {
		return dispatch.Ending{Code: outcome.CodeInternal}
	}
	r := &run{s: s, out: out, sink: x, end: &dispatch.ExecEnd{RefusedEnv: s.unset}, sinkFail: make(chan struct{}), outputEnd: make(chan struct{})}
	for i := range r.digest {
		r.digest[i] = sha256.New()
	}
	ending := r.drive(ctx)
	r.mu.Lock()
	defer r.mu.Unlock()
	ending.SinkErr = r.sinkErr
	ending.Exec = r.end.Clone()
	e := ending.Exec
	ending.Bytes = e.StdoutBytes + e.StderrBytes
	ending.Sent.Complete = e.StdinEnded
	if e.Accepted {
		e.StdoutDigest, e.StderrDigest = digestText(r.digest[dispatch.Stdout]), digestText(r.digest[dispatch.Stderr])
	}
	if e.StdinBytes > 0 {
		e.StdinDigest = digestText(r.digest[0])
	}
	e.StdinStreamed = out.Exec.Stdin != nil
	s.mu.Lock()
	e.ExitStatus = s.status
	if s.signal != nil {
		e.ExitSignal, e.CoreDumped, e.SignalMessage = s.signal.Name, s.signal.Core, s.signal.Message
	}
	s.mu.Unlock()
	if e.Truncated && ending.Complete {
		ending.Complete, ending.Code = false, outcome.CodeResultLimit
	}
	return ending
}

func digestText(h hash.Hash) string { return "sha256:" + hex.EncodeToString(h.Sum(nil)) }

func (r *run) drive(ctx context.Context) dispatch.Ending {
	s := r.s
	sent := dispatch.Sent{Headers: true}
	type reply struct {
		ok  bool
		err error
	}
	answered := make(chan reply, 1)
	go func() {
		ok, err := s.ch.SendRequest("exec", true, ssh.Marshal(struct{ Command string }{r.out.Exec.Command}))
		answered <- reply{ok, err}
	}()
	select {
	case a := <-answered:
		switch {
		case a.err != nil:
			// The peer may have executed it (F2, E3).
			return dispatch.Ending{Sent: sent, Code: outcome.CodeRemoteOutcomeUnknown, Reason: "connection_lost", Err: a.err}
		case !a.ok:
			s.clean = true
			return dispatch.Ending{Sent: sent, Code: outcome.CodeExecRefused, Reason: "exec_refused", Proof: "SSH_MSG_CHANNEL_FAILURE"}
		}
	case <-ctx.Done():
		return dispatch.Ending{Sent: sent, Code: outcome.CodeRemoteTimeout, Reason: "no_reply", Err: ctx.Err()}
	}
	killpoint.At("sshx-exec-accepted")
	r.end.Accepted = true
	if err := r.sink.Accepted(); err != nil {
		r.sinkErr = err
		return dispatch.Ending{Sent: sent, Code: outcome.CodeRemoteResultIncomplete}
	}
	r.readers.Go(func() { r.read(dispatch.Stdout, s.ch) })
	r.readers.Go(func() { r.read(dispatch.Stderr, s.ch.Stderr()) })
	go func() {
		r.readers.Wait()
		close(r.outputEnd)
	}()
	done := make(chan struct{})
	defer close(done)
	go r.feed(done)
	if r.out.Exec.Signals != nil {
		go r.pass(done)
	}
	end := r.wait(ctx)
	end.Sent = sent
	return end
}

// read takes one stream to its end, so that neither holds the other up.
func (r *run) read(stream dispatch.Stream, from io.Reader) {
	buf := make([]byte, dispatch.MaxFrameBytes)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			r.take(stream, buf[:n])
		}
		if err != nil {
			return
		}
	}
}

func (r *run) take(stream dispatch.Stream, p []byte) {
	r.taking.Add(1)
	r.mu.Lock()
	defer func() {
		r.mu.Unlock()
		r.moved.Add(1)
		r.taking.Add(-1)
	}()
	r.digest[stream].Write(p)
	if stream == dispatch.Stdout {
		r.end.StdoutBytes += int64(len(p))
	} else {
		r.end.StderrBytes += int64(len(p))
	}
	if r.end.Truncated || r.sinkErr != nil {
		return // taken, so that the command goes on, and not kept
	}
	if left := r.out.MaxBody - r.kept; int64(len(p)) > left {
		r.end.Truncated = true
		p = p[:left]
	}
	r.kept += int64(len(p))
	if err := r.sink.Output(stream, p); err != nil {
		r.sinkErr = err
		close(r.sinkFail)
	}
}

// feed hands standard input over. Its end is passed on only if it was one: what the
// command reads must not look whole when it is not.
func (r *run) feed(done <-chan struct{}) {
	src := r.out.Exec.Stdin
	if src == nil && r.out.Body != nil {
		body, err := r.out.Body()
		if err != nil {
			return
		}
		src = body
	}
	if src != nil {
		buf := make([]byte, dispatch.MaxFrameBytes)
		for {
			n, err := src.Read(buf)
			select {
			case <-done:
				return
			default:
			}
			if n > 0 {
				m, werr := r.s.ch.Write(buf[:n])
				r.mu.Lock()
				r.end.StdinBytes += int64(m)
				r.digest[0].Write(buf[:m])
				r.mu.Unlock()
				if werr != nil {
					return // the command reads no more
				}
			}
			if err == io.EOF { // itself: a wrapped one is no clean end
				break
			}
			if err != nil {
				return
			}
		}
	}
	if r.s.ch.CloseWrite() == nil {
		r.mu.Lock()
		r.end.StdinEnded = true
		r.mu.Unlock()
	}
}

// pass hands the caller's signals over (RFC 4254 §6.9).
func (r *run) pass(done <-chan struct{}) {
	for {
		select {
		case name, ok := <-r.out.Exec.Signals:
			if !ok {
				return
			}
			if _, err := r.s.ch.SendRequest("signal", false, ssh.Marshal(struct{ Name string }{name})); err != nil {
				return
			}
		case <-done:
			return
		}
	}
}

// Ways in which a command ends, as evidence.Framing shows them.
const (
	framingClosed  = "channel_close"
	framingNoClose = "eof_and_status"
)

// wait follows the channel to its end. What makes it complete (CONTRACT G9): both
// streams ended, a status or signal, and the channel closed by the server – or the
// close missing beyond the grace time, or because the connection ended after both.
//
// The library closes the streams and the channel itself when the connection ends, and
// which of them is seen first is chance: each counts only once it is proven that it came
// from the peer.
func (r *run) wait(ctx context.Context) dispatch.Ending {
	s := r.s
	broken := func(code outcome.Code, reason string) dispatch.Ending {
		return dispatch.Ending{Code: code, Reason: reason}
	}
	outputEnded := func(is bool) {
		r.mu.Lock()
		r.end.OutputEnded = is
		r.mu.Unlock()
	}
	whole := func(framing string) dispatch.Ending {
		r.mu.Lock()
		r.end.OutputEnded, r.end.Closed = true, framing == framingClosed
		r.mu.Unlock()
		s.clean = framing == framingClosed
		return dispatch.Ending{Complete: true, Framing: framing}
	}
	var (
		exited, ended, closed bool
		both                  <-chan struct{} // closed when the connection went on after status and both ends
		grace                 <-chan time.Time
		timer                 *time.Timer
		moved                 int64
	)
	exitedC, endedC, closedC := s.exited, r.outputEnd, s.closed
	defer func() {
		if timer != nil {
			timer.Stop()
		}
	}()
	for {
		if exited && ended && both == nil {
			both = s.c.tap.asks()
		}
		if closed && ended {
			if !exited {
				select {
				case <-s.exited: // it came just before the close
					exited = true
					continue
				default:
				}
			}
			switch how := s.c.proven(ctx); {
			case how == proofLate:
				outputEnded(false)
				return broken(outcome.CodeRemoteTimeout, "deadline")
			case how == proofStands && !exited:
				return broken(outcome.CodeRemoteResultIncomplete, "no_exit_status")
			case how == proofStands:
				return whole(framingClosed)
			case how == proofEnded && exited && isClosed(both):
				return whole(framingNoClose)
			case control.Off("G9-lost-is-not-closed"):
				return whole(framingClosed)
			default:
				outputEnded(false)
				return broken(outcome.CodeRemoteResultIncomplete, "connection_lost")
			}
		}
		select {
		case <-exitedC:
			exited, exitedC = true, nil
			moved = r.moved.Load()
			timer = time.NewTimer(r.out.Exec.Grace)
			grace = timer.C
		case <-endedC:
			ended, endedC = true, nil
			outputEnded(!s.c.tap.failed.Load())
		case <-closedC:
			closed, closedC = true, nil
		case <-grace:
			// Silence counts: output that still comes, or waits to be stored, moves on.
			if now := r.moved.Load(); !ended && (now != moved || r.taking.Load() > 0) {
				moved = now
				timer.Reset(r.out.Exec.Grace)
				continue
			}
			if closed {
				grace = nil // only what is buffered here is still read
				continue
			}
			if ended {
				switch s.c.proven(ctx) {
				case proofStands:
					return whole(framingNoClose)
				case proofLate:
					outputEnded(false)
					return broken(outcome.CodeRemoteTimeout, "deadline")
				case proofEnded, proofNone:
					grace = nil // the connection ended; the channel closes at once
				}
				continue
			}
			if control.Off("G9-grace-is-not-the-end") {
				return whole(framingNoClose)
			}
			return broken(outcome.CodeRemoteResultIncomplete, "output_open")
		case <-r.sinkFail:
			return broken(outcome.CodeRemoteResultIncomplete, "not_stored")
		case <-ctx.Done():
			outputEnded(false) // nobody has proven that it was the peer's end
			return broken(outcome.CodeRemoteTimeout, "deadline")
		}
	}
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// proof is what is known of the ends of streams and channels that were seen.
type proof uint8

const (
	proofNone   proof = iota // the peer broke the protocol, or this side closed the connection
	proofEnded               // the connection ended by itself, and may have done so before
	proofStands              // they are the peer's
	proofLate                // there was no time to find out
)

// proven says whether the ends that were seen so far came from the peer, as opposed to
// the connection ending by a message or an error of the protocol, at which the library
// closes every channel in the same way.
//
// They did if the connection went on afterwards: its transport asked for more (see
// tap.asks), and it answers, or is silent, or ended by itself only then. A message that
// ends the connection in one piece with an orderly close cannot be told from one without
// a close, since the transport has read it before anybody sees the close: that proves
// nothing.
func (c *conn) proven(ctx context.Context) proof {
	asks := c.tap.asks()
	select {
	case <-asks:
	case <-c.tap.dead:
	case <-ctx.Done():
		return proofLate
	}
	wentOn := isClosed(asks)
	if wentOn {
		answer := make(chan error, 1)
		go func() {
			_, _, err := c.ssh.SendRequest("keepalive@openssh.com", true, nil)
			answer <- err
		}()
		timer := time.NewTimer(proofWait)
		defer timer.Stop()
		select {
		case err := <-answer:
			if err == nil {
				return proofStands
			}
		case <-c.tap.dead:
		case <-timer.C:
			return proofStands // the library closes the connection at once with its channels
		case <-ctx.Done():
			return proofLate
		}
	}
	how := c.ended(ctx)
	if how == proofEnded && wentOn {
		return proofStands
	}
	return how
}

// ended says how a connection ended that is over: by itself, or since the peer broke the
// protocol above the transport. The library closes the connection then, as this side does,
// and a read fails after that.
func (c *conn) ended(ctx context.Context) proof {
	timer := time.NewTimer(proofWait)
	defer timer.Stop()
	select {
	case <-c.over:
	case <-timer.C:
		return proofNone
	case <-ctx.Done():
		return proofLate
	}
	if c.tap.failed.Load() || !c.tap.broke.Load() {
		return proofEnded
	}
	return proofNone
}
