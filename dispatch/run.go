package dispatch

import (
	"bytes"
	"context"
	"crypto/sha256"
	"errors"
	"hash"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"

	"waybill/internal/control"
	"waybill/internal/killpoint"
	"waybill/metrics"
	"waybill/outcome"
)

// maxMemory bounds what one answer holds in memory before it goes to the journal
// in chunks, so that the final step of any answer fits into one transaction.
const maxMemory = 3 * MaxChunkBytes

// oneRead is as much of an answer as usually comes at once.
const oneRead = 32 << 10

func bodyOf(s *spool) func() (io.Reader, error) {
	return func() (io.Reader, error) { return s.reader(), nil }
}

// run carries the attempt from the boundary to its resolution. It belongs to no
// caller: it ends under the route's own limit (CONTRACT F5).
func (a *action) run(conn Conn) {
	defer a.close()
	defer a.p.survive("behind an attempt", a.id)
	sink := a.newSink()
	if a.out.Exec != nil {
		sink.exec = &execSink{streamed: a.s.Exec.Streamed, stderr: a.p.screen(a.secrets, a.route.Leak)}
		sink.screen.begin(0, nil)
		sink.exec.stderr.begin(0, nil)
		defer close(a.over)
	}
	reply := a.attempt(conn, sink)
	for a.out.Exec == nil && sink.st == nil {
		var again Conn
		if again, reply = a.repeatNow(reply); again == nil {
			break
		}
		sink = a.newSink()
		reply = a.attempt(again, sink)
	}
	defer a.p.later(reply.Record)
	if rec := &reply.Record; !rec.Facts.IsSuccess() && rec.GuardsRepeats() {
		a.p.endings.note(rec.ID, a.route.Limits.Duplicates)
	}
	a.ending = reply
	a.stage(metrics.StageCommit)
	killpoint.At("dispatch-committed")

	if reply.Upgraded == nil {
		a.vacate() // before the answer: its caller may ask for the next at once
	}
	a.mu.Lock()
	a.settled = true
	begun := a.reply != nil
	left, cause, undelivered := a.left, a.cause, a.undelivered
	a.mu.Unlock()
	if begun {
		sink.endStream(reply)
		if left {
			a.lateLeaving(cause)
		}
		if undelivered {
			a.handedOver(a.committed)(errLeft)
		}
		return
	}
	if left = a.publish(reply); left {
		a.p.cfg.Logger.Debug("nobody waits for the answer", slog.String("action", a.id.String()), slog.Any("cause", cause))
		_ = reply.Body.Close()
		a.lateLeaving(cause)
		if !a.detached {
			reply.HandedOver(errLeft)
		}
	}
	if u := reply.Upgraded; u != nil {
		if left {
			_ = u.Close()
		}
		<-u.done // it counts as running until then
	}
}

// survive is deferred where work is done in a goroutine of its own. A panic – of a library
// that met what it did not expect – ends this work and nothing else: of the action is
// known what its records say. The panic's value may quote a request or a peer and goes
// nowhere (CONTRACT C2); nobody recovering, it would be printed, and end every action.
func (p *Pipeline) survive(what string, id ActionID) {
	if recover() != nil {
		p.cfg.Logger.Error("panic in the background", slog.String("work", what), slog.String("action", id.String()), slog.Any("stack", string(debug.Stack())))
	}
}

func (a *action) newSink() *resultSink {
	return &resultSink{a: a, hash: sha256.New(), memory: min(a.route.Limits.Buffer, maxMemory), length: -1, screen: a.p.screen(a.secrets, a.route.Leak)}
}

// errLeft is the hand-over error of an answer that nobody waits for.
var errLeft = errors.New("dispatch: the caller left")

// tell says that there is something for the caller's goroutine, which need not be there.
func (a *action) tell() {
	select {
	case a.news <- struct{}{}:
	default: // it was told already, and finds this, too
	}
}

// publish gives the waiting caller its answer and reports whether it had left.
func (a *action) publish(reply *Reply) (left bool) {
	a.mu.Lock()
	a.reply = reply
	left = a.left
	a.mu.Unlock()
	a.tell()
	return left
}

// attempt makes the exchange and resolves it. A panic on the way – of a library that
// met what it did not expect – ends this attempt and nothing else: what is known is
// that it was dispatched. The panic's value may quote the request or the peer and goes
// nowhere (C2); in a goroutine of its own it would be printed and end every action.
func (a *action) attempt(conn Conn, sink *resultSink) (reply *Reply) {
	end := &Ending{Code: outcome.CodeRemoteOutcomeUnknown}
	released := false
	defer func() {
		if recover() == nil {
			return
		}
		a.p.cfg.Logger.Error("panic in an attempt", slog.String("action", a.id.String()), slog.Any("stack", string(debug.Stack())))
		switch {
		case !released:
			conn.Release()
		case end.Pipe != nil:
			_ = end.Pipe.Close()
		}
		_ = sink.drain()
		sink.screen.end(false, false)
		a.events = nil
		f := unresolvedFacts(outcome.Reconcile)
		f.Code = outcome.CodeInternal
		a.add(Event{Type: AttemptResolved, Attempt: a.tries, Ended: a.ended(f, end, outcome.TransportObserved)})
		reply = a.commitUnresolved(f)
	}()
	ctx, cancel := context.WithTimeout(context.Background(), a.route.Limits.Timeout)
	defer cancel()
	out := a.out // a.out stays what it was: the caller's goroutine may look at it
	for {
		ending := conn.Exchange(ctx, out, sink)
		end = &ending
		released = true
		if end.Pipe == nil {
			conn.Release()
		}
		killpoint.At("dispatch-exchanged")
		next := a.follow(out, end)
		if next == nil {
			break
		}
		c, err := a.again(ctx, out, next, end, sink)
		if err != nil {
			a.p.cfg.Logger.Error("dispatch record is indeterminate", slog.String("action", a.id.String()), slog.Any("err", err))
			a.events = nil
			return a.commitUnresolved(unresolvedFacts(a.advice))
		}
		if c == nil {
			break
		}
		conn, released, out = c, false, next
		sink.restart()
	}
	a.stage(metrics.StageRemote)
	if end.Err != nil {
		// The text of a library error may quote the peer: kind only (L2).
		a.p.cfg.Logger.Debug("exchange ended early", slog.String("action", a.id.String()), slog.String("code", end.Code.String()), slog.Any("status", end.Status), slog.Any("bytes", end.Bytes))
	}
	if a.out.Exec != nil {
		return a.resolveExec(end, sink)
	}
	reply = a.resolve(end, sink)
	if reply.Upgraded == nil && end.Pipe != nil {
		_ = end.Pipe.Close()
	}
	if rec := &reply.Record; rec.Ended && rec.Facts.Outcome == outcome.Unknown && (rec.Facts.Retry == outcome.Backoff || rec.Facts.Retry == outcome.SameIdempotencyKey) && rec.notKept() {
		// An earlier attempt decides, but this one's result was had (H7).
		reply = a.stopped(reply, StoppedNotKept)
	}
	return reply
}

// resolve turns an ending into durable records and then into the answer
// (CONTRACT H1: finish, append, store, deliver).
func (a *action) resolve(end *Ending, sink *resultSink) *Reply {
	reason := sink.applyMarker(end)
	ended := sink.settle(end)
	stored := errors.Join(ended, sink.drain())
	a.evidence(end, sink)
	a.events = append(a.events, a.late...)
	var facts outcome.Facts
	switch {
	case end.SinkErr != nil:
		return a.storeFailed(end, end.SinkErr)
	case stored != nil:
		return a.storeFailed(end, stored)
	case !end.Complete:
		facts = endingFacts(end, a.advice)
		ended := a.ended(facts, end, outcome.TransportObserved)
		ended.Reason = reason
		a.add(Event{Type: AttemptResolved, Attempt: a.tries, Ended: ended})
		return a.commitUnresolved(facts)
	}
	a.suspect(end.Status)
	facts = a.meaning(end)
	if blocked := sink.screen.reason; blocked != "" {
		// The outcome is kept, the result is not (C5).
		facts.Phase, facts.Retry, facts.Code = outcome.ResultDelivery, outcome.Never, outcome.CodeResultContainsSecret
		ended := a.ended(facts, end, outcome.RemoteResponse)
		ended.Reason = blocked
		a.add(Event{Type: AttemptResolved, Attempt: a.tries, Ended: ended})
		return a.commitUnresolved(facts)
	}
	if end.Pipe != nil {
		return a.upgraded(end, sink)
	}
	if end.Status/100 == 3 {
		oneLocation(sink.header)
	}
	chunks := sink.pending()
	result := sink.finish(end, len(chunks))
	result.ExpiresAt = a.now().Add(a.route.Limits.Retention)
	// As it is relayed, masks included: that is where the caller will go.
	if to := relayedRedirect(end.Status, sink.header["Location"], a.out.Target); to != "" {
		result.RedirectTo, result.RedirectFrom = to, a.out.Target.Origin()
	}
	a.guardJob(a.acceptJob(end, sink, facts), result)
	a.resolveItems(end, sink, facts)
	a.add(Event{Type: ResultCommitted, Attempt: a.tries, Ended: a.ended(facts, end, outcome.RemoteResponse), Result: result})
	a.noteLeaving()
	// An answer that is read back from the journal must be there: a relaxed append
	// returns before (F1 waives the wait, not the answer). So must a redirect be that
	// the caller may follow at once (R3), and the marker that ends a stream (H9).
	relaxed := a.accepted.Relaxed && sink.stored == 0 && sink.st == nil && result.RedirectTo == "" || control.Off("H1-durable-before-answer")
	receipt, err := a.p.cfg.Journal.Append(context.Background(), Batch{Action: a.id, Events: a.events, Chunks: chunks, Relaxed: relaxed})
	if err != nil {
		return a.storeFailed(end, err)
	}
	rec := a.current(receipt, facts)
	if rec.ResultOf != a.tries && !rec.Relaxed {
		// An earlier attempt decides (A10): this answer is not the action's, and whoever saw
		// its status alone would take it for that.
		why := "The answer to the repeat resolves that attempt only."
		if rec.Facts.Code == outcome.CodeResultNotRetained {
			why = "The request was carried out and answered with a redirect; what that led to does not take it back."
		}
		reply := a.answer(rec, rec.Facts, why)
		a.log(rec, reply.Status)
		return reply
	}
	a.committed = true
	a.p.Relayed(&rec)
	reply := a.relay(rec, result, sink)
	a.log(rec, reply.Status)
	return reply
}

// evidence adds the markers of the exchange as far as it came (F3).
func (a *action) evidence(end *Ending, sink *resultSink) {
	sent := end.Sent
	a.add(Event{Type: RequestSent, Attempt: a.tries, Sent: &sent})
	if end.Status == 0 {
		return
	}
	r := a.response(end, sink.screen)
	a.add(Event{Type: ResponseStarted, Attempt: a.tries, Response: r})
	if end.Complete {
		whole := *r
		whole.Digest, whole.Redacted = sink.digest(), sink.screen.masked
		a.add(Event{Type: ResponseComplete, Attempt: a.tries, Response: &whole})
	}
}

func (a *action) response(end *Ending, scr *screen) *Response {
	r := &Response{Status: end.Status, Bytes: end.Bytes, ExpectedBytes: end.Expected, Framing: end.Framing}
	// Encoded secrets are looked for before it is cut, pieces of plain ones afterwards (C5).
	all, masked := scr.guard.MaskString(strings.Join(end.Header["Proxy-Status"], ", "))
	if ps := capped(all, 512); ps != "" && masked == 0 && !a.tells(ps) {
		// An intermediary's word about its own attempt (G10).
		r.ProxyStatus = ps
		r.Hop = "intermediary"
	} else if end.Status == http.StatusBadGateway || end.Status == http.StatusGatewayTimeout {
		r.Hop = "intermediary"
	}
	return r
}

func (a *action) ended(f outcome.Facts, end *Ending, src outcome.Source) *Ended {
	e := &Ended{Facts: f, Source: src, Proof: end.Proof}
	if end.Complete {
		e.RetryAfter, _ = retryAfter(end.Header, a.now())
		e.RetryAfter = max(e.RetryAfter, 0)
		a.said(e, end.Status)
	}
	if end.StatusLine != "" && !a.tells(end.StatusLine) {
		e.StatusLine = end.StatusLine
	}
	return e
}

// tellable is the length from which a piece of a secret counts as the secret.
const tellable = 8

// tells reports whether text of the origin holds a secret of this action, or a piece
// of one: what the origin sent may be cut (C2).
func (a *action) tells(text string) bool {
	for _, s := range a.secrets {
		if s == "" {
			continue
		}
		if strings.Contains(text, s) {
			return true
		}
		for i := 0; i+tellable <= len(text); i++ {
			if strings.Contains(s, text[i:i+tellable]) {
				return true
			}
		}
	}
	return false
}

func capped(s string, n int) string {
	if len(s) > n {
		return s[:n]
	}
	return s
}

// noteLeaving records that the caller left after dispatch (CONTRACT F5).
func (a *action) noteLeaving() {
	a.mu.Lock()
	left, cause := a.left, a.cause
	a.mu.Unlock()
	if left && !a.noted {
		a.noted = true
		a.add(Event{Type: CallerGone, Ended: &Ended{Reason: cause}})
	}
}

// lateLeaving records a caller that left while the ending was being recorded.
func (a *action) lateLeaving(cause string) {
	if a.noted {
		return
	}
	a.noted = true
	ev := Event{Type: CallerGone, At: a.now(), Ended: &Ended{Reason: cause}}
	if _, err := a.p.cfg.Journal.Append(context.Background(), Batch{Action: a.id, Events: []Event{ev}, Relaxed: true}); err != nil {
		a.p.cfg.Logger.Warn("a caller's leaving cannot be recorded", slog.String("action", a.id.String()), slog.Any("err", err))
	}
}

// current is the projection after the last append; a relaxed append does not wait
// for it, so its facts are the ones that were handed over.
func (a *action) current(r Receipt, f outcome.Facts) Record {
	if r.Record.Events > 0 {
		return r.Record.At(a.p.windowNow())
	}
	rec := Record{ID: a.id, Caller: a.s.Caller.ID, RequestID: a.accepted.RequestID, Method: a.s.Method, Target: a.accepted.Target, Relaxed: true,
		Facts: f, Ended: true, AcceptedAt: a.start, EndedAt: a.now(),
		Bound: &Bound{Route: a.route.Name, Snapshot: a.binding.Snapshot.Digest(), Fingerprint: a.print, Repeatable: a.repeatable}}
	return rec
}

// commitUnresolved makes an ending without a stored result durable and answers it.
func (a *action) commitUnresolved(f outcome.Facts) *Reply {
	a.noteLeaving()
	receipt, err := a.p.cfg.Journal.Append(context.Background(), Batch{Action: a.id, Events: a.events, Relaxed: a.accepted.Relaxed})
	var rec Record
	if err != nil {
		// DISPATCH_STARTED is on record: after a restart the action is unknown, and
		// so it is here. The refusals of G8 are forgotten with their record.
		a.p.cfg.Logger.Error("ending cannot be recorded", slog.String("action", a.id.String()), slog.Any("err", err))
		rec = a.fallback(unresolvedFacts(a.advice))
	} else {
		rec = a.current(receipt, f)
	}
	reply := a.answer(rec, rec.Facts, "")
	a.log(rec, reply.Status)
	return reply
}

// fallback is what the records prove when the last append failed.
func (a *action) fallback(f outcome.Facts) Record {
	rec, err := a.p.cfg.Journal.Action(context.Background(), a.id)
	if err != nil || rec.Events == 0 {
		rec = a.begun(f)
	}
	// The attempt is over, whatever the records say of it until the next start.
	rec.Facts, rec.Ended, rec.EndedAt = f, true, a.now()
	return rec
}

// storeFailed answers for a result that could not be made durable (CONTRACT H8):
// it is not delivered, and the records support no more than unknown.
func (a *action) storeFailed(end *Ending, cause error) *Reply {
	a.p.cfg.Metrics.StoreFailed()
	a.p.cfg.Logger.Error("result cannot be stored", slog.String("action", a.id.String()), slog.Any("status", end.Status), slog.Any("bytes", end.Bytes), slog.Any("err", cause))
	f := outcome.Facts{Phase: outcome.ResultDelivery, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeResultStoreFailed}
	kept := a.events[:0:0]
	for _, ev := range a.events {
		if ev.Type != ResultCommitted {
			kept = append(kept, ev)
		}
	}
	a.events = kept
	a.add(Event{Type: AttemptResolved, Attempt: a.tries, Ended: a.ended(f, end, outcome.TransportObserved)})
	return a.commitStoreFailed(f)
}

func (a *action) commitStoreFailed(f outcome.Facts) *Reply {
	a.noteLeaving()
	rec := a.fallback(f)
	if r, err := a.p.cfg.Journal.Append(context.Background(), Batch{Action: a.id, Events: a.events, Relaxed: a.accepted.Relaxed}); err == nil {
		rec = a.current(r, f)
	}
	reply := a.answer(rec, f, "")
	a.log(rec, reply.Status)
	return reply
}

// relay is the origin's complete answer (CONTRACT G12).
func (a *action) relay(rec Record, result *Result, sink *resultSink) *Reply {
	h := shared(result.Header, 3) // Waybill's own
	f := rec.Facts
	shape := a.shape(&rec, f)
	shape.ReceivedStatus = result.Status
	outcome.Annotate(h, a.id.String(), f, shape, !a.repeatable && a.key == nil)
	rec.annotateJob(h)
	r := &Reply{ID: a.id, Record: rec, Status: result.Status, Header: h, Trailer: http.Header(result.Trailer).Clone(), ContentLength: result.Bytes}
	switch {
	case a.s.Method == http.MethodHead:
		// Content-Length describes what GET would have had; it is relayed as a field.
		r.ContentLength, r.Body = -1, bytesBody(nil)
	case sink.stored == 0:
		r.Body = bytesBody(sink.buf.Bytes())
	default:
		r.Body = &storedBody{open: func() (io.ReadCloser, error) {
			_, body, err := a.p.cfg.Journal.OpenResult(context.Background(), a.id)
			return body, err
		}}
	}
	r.HandedOver = a.handedOver(true)
	return r
}

// handedOver records that a result could not be handed to the caller (CONTRACT H2).
// Success is not recorded: only an acknowledgement confirms delivery (H6).
func (a *action) handedOver(hasResult bool) func(error) {
	return func(err error) {
		killpoint.At("dispatch-delivered")
		if err == nil || !hasResult || control.Off("H2-failed-delivery-recorded") {
			return
		}
		ev := Event{Type: DeliveryFailed, At: a.now()}
		if _, aerr := a.p.cfg.Journal.Append(context.Background(), Batch{Action: a.id, Events: []Event{ev}, Relaxed: true}); aerr != nil {
			a.p.cfg.Logger.Warn("failed delivery cannot be recorded", slog.String("action", a.id.String()), slog.Any("err", aerr))
		}
	}
}

// resultSink takes the answer in: in memory up to a limit, then chunk by chunk into
// the journal, so that memory stays bounded (CONTRACT H1, H4).
type resultSink struct {
	a       *action
	screen  *screen
	hash    hash.Hash // of what is stored
	text    string    // its digest, once it was asked for
	wire    hash.Hash // of what came of an answer that may be followed before it is settled; nil: of no other
	memory  int64
	status  int
	header  http.Header
	trailer http.Header
	length  int64 // declared, -1: none

	buf    bytes.Buffer
	lent   bool // the screen's scratch is the room behind buf
	stored int  // chunks in the journal
	total  int64
	tail   []byte // the end of the body as it came, for end markers

	exec *execSink // of a command; nil: of an HTTP answer

	// A streamed answer; nil: a buffered one. The fields below are its pump's, under mu.
	st      *stream
	pumped  chan struct{} // closed when the pump has ended
	mu      sync.Mutex
	room    *sync.Cond
	waiting bytes.Buffer
	closed  bool
	failed  error
}

func (s *resultSink) Informational(status int, h http.Header) {
	// 100 was answered when the body was spooled.
	if s.a.s.Informational == nil || status <= http.StatusSwitchingProtocols || status >= http.StatusOK {
		return
	}
	out := relayedHeader(h)
	if !s.screen.interim(out) {
		return
	}
	s.a.mu.Lock()
	if len(s.a.interims) < maxInterims { // else the caller does not keep up; nothing depends on a 1xx
		s.a.interims = append(s.a.interims, interim{status, out})
	}
	s.a.mu.Unlock()
	s.a.tell()
}

func (s *resultSink) Head(status int, h http.Header, length int64) error {
	s.status, s.header, s.length = status, relayedHeader(h), length
	s.screen.begin(status, s.header)
	if status/100 == 3 {
		s.wire = sha256.New()
	}
	if s.streams() {
		s.begin()
		return nil
	}
	if length > 0 && s.a.s.Method != http.MethodHead {
		// Of a longer one as much as comes before it leaves the buffer.
		s.buf.Grow(int(min(length, s.memory+oneRead)))
	}
	return nil
}

func (s *resultSink) Body(p []byte) error {
	if s.wire != nil {
		s.wire.Write(p)
	}
	s.keepTail(p)
	s.lend(len(p))
	return s.take(s.screen.body(p))
}

// digest is that of what is stored of a complete answer: of the body as it came, but where
// a secret was in it. Whoever knows the rest could try secrets out on it (C2, C5).
func (s *resultSink) digest() string {
	switch {
	case s.screen.reason != "":
		return ""
	case s.wire != nil && s.screen.masked == 0:
		return digestText(s.wire)
	}
	if s.text == "" {
		s.text = digestText(s.hash)
	}
	return s.text
}

// lend lets the screen put what may be seen where it will be kept: behind what is in the
// buffer, whose Write finds it there. n bytes come; 0: only what is held back.
func (s *resultSink) lend(n int) {
	if s.screen.stream == nil || s.exec != nil {
		return
	}
	if s.st != nil {
		if s.lent {
			s.screen.scratch, s.lent = nil, false
		}
		return
	}
	s.buf.Grow(n + s.screen.stream.Held())
	s.screen.scratch, s.lent = s.buf.AvailableBuffer(), true
}

// settle takes what the screen held back, and the trailer of a complete answer.
func (s *resultSink) settle(end *Ending) error {
	if end.Complete {
		s.trailer = relayedTrailer(end.Trailer)
		s.screen.header(s.trailer)
	}
	s.lend(0)
	return s.take(s.screen.end(end.Complete, end.Framing == framingMarker))
}

// take stores or queues bytes that may be seen.
func (s *resultSink) take(p []byte) error {
	if len(p) == 0 {
		return nil
	}
	s.hash.Write(p)
	s.text = ""
	s.total += int64(len(p))
	if s.st != nil {
		return s.queue(p)
	}
	s.buf.Write(p)
	if int64(s.buf.Len()) <= s.memory {
		return nil
	}
	if s.exec == nil && s.outgrows() {
		// Auto: what does not fit into the buffer is streamed (H5).
		// With p, which the screen wrote behind it; what comes next it has to put elsewhere.
		held := s.buf
		s.buf, s.screen.scratch, s.lent = bytes.Buffer{}, nil, false
		s.begin()
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.failed == nil { // nothing is waiting yet
			s.waiting = held
			s.room.Broadcast()
		}
		return s.failed
	}
	for s.buf.Len() > MaxChunkBytes {
		if err := s.store(s.cut(&s.buf)); err != nil {
			return err
		}
	}
	return nil
}

// restart empties the sink for the answer of a further attempt.
func (s *resultSink) restart() {
	s.hash.Reset()
	s.buf.Reset()
	s.screen.end(false, false)
	s.screen = s.a.p.screen(s.a.secrets, s.a.route.Leak)
	s.status, s.header, s.length, s.stored, s.total, s.tail, s.text, s.wire = 0, nil, -1, 0, 0, nil, "", nil
}

// store appends one chunk. The first one carries the markers so far, so that a
// crash leaves a record of the answer's head (JR-07).
func (s *resultSink) store(data []byte) error {
	a := s.a
	// Waited for on relaxed routes too: it is read back from the journal.
	b := Batch{Action: a.id, Chunks: []Chunk{{Attempt: a.tries, Index: s.stored, Data: data}}}
	if s.stored == 0 {
		// An answer has begun, so the head of the request went out (F3).
		b.Events = []Event{
			{Type: RequestSent, Attempt: a.tries, At: a.now(), Sent: &Sent{Headers: true}},
			{Type: ResponseStarted, Attempt: a.tries, At: a.now(), Response: &Response{Status: s.status, Bytes: int64(len(data)), Exec: s.startedExec()}},
		}
	}
	if _, err := a.p.cfg.Journal.Append(context.Background(), b); err != nil {
		return err
	}
	s.stored++
	return nil
}

// pending returns the chunks that the final append carries.
func (s *resultSink) pending() []Chunk {
	rest := s.buf.Bytes()
	var out []Chunk
	for i := s.stored; len(rest) > 0; i++ {
		n := min(len(rest), MaxChunkBytes)
		if s.exec != nil {
			n = wholeFrames(rest, MaxChunkBytes)
		}
		out = append(out, Chunk{Attempt: s.a.tries, Index: i, Data: rest[:n]})
		rest = rest[n:]
	}
	if s.st != nil {
		// Which chunk of a stream is its last is known only now: an empty one says so.
		return []Chunk{{Attempt: s.a.tries, Index: s.stored, Last: true}}
	}
	if len(out) > 0 {
		out[len(out)-1].Last = true
	}
	return out
}

// finish describes the result, of which pending chunks are still to be stored.
func (s *resultSink) finish(end *Ending, pending int) *Result {
	return &Result{Status: end.Status, Header: s.header, Trailer: s.trailer, Bytes: s.total, Chunks: s.stored + pending, Digest: s.digest()}
}

// bytesBody is a whole answer in memory.
func bytesBody(b []byte) io.ReadCloser {
	m := &memoryBody{}
	m.Reset(b)
	return m
}

type memoryBody struct{ bytes.Reader }

func (*memoryBody) Close() error { return nil }

// storedBody reads a whole answer from the journal when it is first read.
type storedBody struct {
	open func() (io.ReadCloser, error)
	body io.ReadCloser
	err  error
}

func (b *storedBody) start() error {
	if b.body == nil && b.err == nil {
		b.body, b.err = b.open()
	}
	return b.err
}

func (b *storedBody) Read(p []byte) (int, error) {
	if err := b.start(); err != nil {
		return 0, err
	}
	return b.body.Read(p)
}

// WriteTo copies with one buffer of a chunk's size.
func (b *storedBody) WriteTo(w io.Writer) (int64, error) {
	if err := b.start(); err != nil {
		return 0, err
	}
	if wt, ok := b.body.(io.WriterTo); ok {
		return wt.WriteTo(w)
	}
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{b.body}, make([]byte, 64<<10))
}

func (b *storedBody) Close() error {
	if b.body != nil {
		return b.body.Close()
	}
	return nil
}
