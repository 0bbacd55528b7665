package dispatch

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"time"

	"waybill/internal/control"
	"waybill/outcome"
	"waybill/routes"
)

// errStreamBroken ends a streamed answer whose origin broke off: whoever relays it
// must end the caller's stream abnormally (CONTRACT H5).
var errStreamBroken = errors.New("dispatch: the streamed answer is incomplete")

// streamCacheBytes bounds the chunks of one stream that are held in memory for its
// reader; one that lags behind reads them from the journal.
const streamCacheBytes = 1 << 20

// stream is an answer that is relayed while it arrives (CONTRACT H4, H5): chunks that
// are durable, in order, and how it ended. One goroutine writes, one reads.
type stream struct {
	a        *action
	expected int64 // declared length, -1: none

	mu      sync.Mutex
	change  chan struct{} // closed at the next change
	cache   [][]byte      // the newest chunks
	size    int           // bytes in cache
	count   int           // chunks published
	bytes   int64         // bytes published
	held    []byte        // the end of a body of declared length, kept until it is committed (H9)
	ended   bool
	err     error
	trailer http.Header // of a complete answer
}

// errStreamShort ends a streamed answer that is complete by its end marker, with fewer
// bytes than its head declared (G13): the caller cannot have it whole this way.
var errStreamShort = errors.New("dispatch: the streamed answer is shorter than declared")

func newStream(a *action, expected int64) *stream {
	return &stream{a: a, expected: expected, change: make(chan struct{})}
}

func (s *stream) changed() {
	close(s.change)
	s.change = make(chan struct{})
}

// publish releases a chunk that is durable. The chunk that completes a declared
// length waits for the completeness marker: with Content-Length its last byte is
// what tells the caller that the answer is whole (H9).
func (s *stream) publish(data []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.bytes += int64(len(data))
	if s.expected >= 0 && s.bytes >= s.expected && !control.Off("H5-end-waits-for-the-marker") {
		s.held = data
		return
	}
	s.push(data)
}

func (s *stream) push(data []byte) {
	s.cache = append(s.cache, data)
	s.size += len(data)
	s.count++
	for s.size > streamCacheBytes && len(s.cache) > 1 {
		s.size -= len(s.cache[0])
		s.cache[0] = nil
		s.cache = s.cache[1:]
	}
	s.changed()
}

// finish ends the stream: cleanly with err nil, after the result is durable, else
// abnormally, behind one last event where the caller reads events. last makes it from
// the end of what was released.
func (s *stream) finish(err error, trailer http.Header, last func(tail []byte) []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	switch {
	case err == nil && s.expected >= 0 && s.bytes != s.expected:
		err = errStreamShort
	case err == nil && s.held != nil:
		s.push(s.held)
	case err != nil && last != nil:
		var tail []byte
		if n := len(s.cache); n > 0 {
			tail = s.cache[n-1]
		}
		if event := last(tail); len(event) > 0 {
			s.push(event)
		}
	}
	s.trailer, s.ended, s.err = trailer, true, err
	s.changed()
}

// next returns chunk i as soon as it is there; io.EOF after the last of a complete
// answer; the error of a broken one.
func (s *stream) next(ctx context.Context, i int) ([]byte, error) {
	for {
		s.mu.Lock()
		switch first := s.count - len(s.cache); {
		case i < first:
			s.mu.Unlock()
			return s.a.p.cfg.Journal.Chunk(ctx, s.a.id, s.a.tries, i)
		case i < s.count:
			data := s.cache[i-first]
			s.mu.Unlock()
			return data, nil
		case s.ended:
			err := s.err
			s.mu.Unlock()
			if err == nil {
				err = io.EOF
			}
			return nil, err
		}
		change := s.change
		s.mu.Unlock()
		select {
		case <-change:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// streamBody is what the front reads. Each Read returns what is there.
type streamBody struct {
	s     *stream
	ctx   context.Context //nolint:containedctx // the caller's, for as long as the body is read
	i     int
	chunk []byte
	// trailer is the reply's, nil where there is none. It belongs to whoever reads: the
	// front looks at it while the answer still arrives.
	trailer http.Header
	// until is when the reader waits no longer, zero: it has no such time; see bounded.
	until  time.Time
	cancel context.CancelFunc
}

// ErrWaitOver is returned by a streamed body when the time is over that its caller wanted
// to wait; the attempt goes on (F5), and Reply.WaitOver is the answer to it.
var ErrWaitOver = errors.New("dispatch: the caller waits no longer")

// bounded makes the body of a caller that wants to wait until then.
func (b *streamBody) bounded(until time.Time) *streamBody {
	if !until.IsZero() {
		b.until = until
		b.ctx, b.cancel = context.WithDeadline(b.ctx, until)
	}
	return b
}

func (b *streamBody) Read(p []byte) (int, error) {
	for len(b.chunk) == 0 {
		data, err := b.s.next(b.ctx, b.i)
		if err != nil && !b.until.IsZero() && errors.Is(context.Cause(b.ctx), context.DeadlineExceeded) {
			if b.s.a.waitOver() {
				return 0, ErrWaitOver
			}
			// It has ended: what is left is there, or will be at once.
			b.ctx, b.until = b.s.a.caller, time.Time{}
			continue
		}
		if errors.Is(err, io.EOF) && b.trailer != nil {
			maps.Copy(b.trailer, b.s.ending())
		}
		if err != nil {
			return 0, err
		}
		b.i++
		b.chunk = data
	}
	n := copy(p, b.chunk)
	b.chunk = b.chunk[n:]
	return n, nil
}

func (b *streamBody) Close() error {
	if b.cancel != nil {
		b.cancel()
	}
	return nil
}

// waitOver records that the caller waits no longer, and reports whether the action was
// still running.
func (a *action) waitOver() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.settled {
		return false
	}
	a.left, a.cause, a.undelivered = true, "CALLER_TIMEOUT", true
	return true
}

// ending returns the trailer fields of a complete answer.
func (s *stream) ending() http.Header {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.trailer
}

// streams reports whether the answer is relayed while it arrives (CONTRACT H5).
func (s *resultSink) streams() bool {
	r := s.a.route
	switch {
	case s.a.detached:
		return false // nobody is there to read while it arrives
	case s.length == 0:
		// The head alone would be the whole answer, before the marker (H9).
		return false
	case s.screen.reason != "":
		// Withheld already: not even its head is relayed (C5).
		return false
	case r.Delivery == routes.DeliveryBuffered, s.status/100 != 2, s.a.s.Method == http.MethodHead, s.status == http.StatusNoContent:
		return false
	case s.a.s.Protocol == "HTTP/1.0" && s.length < 0:
		// Such a caller cannot tell an abnormal end from the end (RFC 9112 §6.3).
		return false
	case r.Delivery == routes.DeliveryStream:
		return true
	default:
		return eventStream(s.header)
	}
}

// outgrows reports whether an answer that is larger than the buffer is streamed.
func (s *resultSink) outgrows() bool {
	return !s.a.detached && s.stored == 0 && s.a.route.Delivery == routes.DeliveryAuto && s.status/100 == 2 && !(s.a.s.Protocol == "HTTP/1.0" && s.length < 0)
}

func eventStream(h http.Header) bool {
	media, _, _ := strings.Cut(h.Get("Content-Type"), ";")
	return strings.EqualFold(strings.TrimSpace(media), "text/event-stream")
}

// begin releases the head of a streamed answer and starts storing its chunks. The
// head says unknown: nothing is known of the end (H9).
func (s *resultSink) begin() {
	a := s.a
	s.startPump()
	f := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.FetchResult}
	rec := a.begun(f)
	h := s.header.Clone()
	shape := a.shape(&rec, f)
	shape.ReceivedStatus = s.status
	outcome.Annotate(h, a.id.String(), f, shape, false)
	body := &streamBody{s: s.st, ctx: a.caller}
	reply := &Reply{ID: a.id, Record: rec, Status: s.status, Header: h, ContentLength: s.length, Streamed: true, Body: body, HandedOver: a.streamHandedOver}
	if a.takesTrailers() {
		body.trailer = make(http.Header)
		reply.Trailer = body.trailer
	}
	if left := a.publish(reply); left {
		// Nobody will read it (H2).
		a.mu.Lock()
		a.undelivered = true
		a.mu.Unlock()
	}
}

func (s *resultSink) startPump() {
	s.st = newStream(s.a, s.length)
	s.pumped = make(chan struct{})
	s.room = sync.NewCond(&s.mu)
	go s.pump()
}

// takesTrailers reports whether the caller's protocol has room for the outcome after
// the body: HTTP/2, or HTTP/1.1 with TE: trailers (RFC 9110 §6.5.1). HTTP/1.0 has
// no chunked coding, and needs its Content-Length to see an abnormal end.
func (a *action) takesTrailers() bool {
	switch {
	case strings.HasPrefix(a.s.Protocol, "HTTP/2"):
		return true
	case a.s.Protocol == "HTTP/1.0":
		return false
	}
	for _, line := range a.s.Header["Te"] {
		for te := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(te), "trailers") {
				return true
			}
		}
	}
	return false
}

// errPump is what a panic while storing is told as; its value goes nowhere (C2).
var errPump = errors.New("dispatch: storing a streamed answer ended abnormally")

// pump stores what has come, chunk by chunk, and releases each once it is durable.
// What comes meanwhile waits for the next chunk, at most one of full size.
func (s *resultSink) pump() {
	defer close(s.pumped)
	defer func() {
		if recover() != nil {
			s.a.p.cfg.Logger.Error("panic in a stream", slog.String("action", s.a.id.String()), slog.Any("stack", string(debug.Stack())))
			s.fail(errPump)
		}
	}()
	for {
		s.mu.Lock()
		for s.waiting.Len() == 0 && !s.closed {
			s.room.Wait()
		}
		if s.waiting.Len() == 0 {
			s.mu.Unlock()
			return
		}
		data := bytes.Clone(s.cut(&s.waiting))
		s.room.Broadcast()
		s.mu.Unlock()
		if control.Off("H4-stored-before-relayed") {
			s.st.publish(data)
		}
		if err := s.store(data); err != nil {
			s.fail(err)
			return
		}
		if !control.Off("H4-stored-before-relayed") {
			s.st.publish(data)
		}
	}
}

// fail ends storing: nothing further is taken.
func (s *resultSink) fail(err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.failed, s.closed = err, true
	s.waiting.Reset()
	s.room.Broadcast()
}

// queue hands bytes to the pump and waits while a full chunk is waiting already.
func (s *resultSink) queue(p []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for s.waiting.Len() >= MaxChunkBytes && s.failed == nil {
		s.room.Wait()
	}
	if s.failed != nil {
		return s.failed
	}
	s.waiting.Write(p)
	s.room.Broadcast()
	return nil
}

// drain waits until everything that came is stored, and returns why not.
func (s *resultSink) drain() error {
	if s.st == nil {
		return nil
	}
	s.mu.Lock()
	s.closed = true
	s.room.Broadcast()
	s.mu.Unlock()
	<-s.pumped
	return s.failed
}

// endStream ends the caller's stream as the records say (H5, H9). env is nil for a
// complete answer.
func (s *resultSink) endStream(reply *Reply) {
	if reply.Envelope == nil && s.a.committed { // this very stream, not another attempt's answer
		trailer := http.Header{outcome.HeaderOutcome: {outcome.FormatOutcome(reply.Record.Facts)}}
		maps.Copy(trailer, s.trailer)
		s.st.finish(nil, trailer, nil)
		return
	}
	s.st.finish(errStreamBroken, nil, func(tail []byte) []byte {
		if reply.Envelope == nil {
			return nil
		}
		return s.lastEvent(reply.Envelope, tail)
	})
}

// lastEvent tells a reader of events what happened, in the form of the route's
// dialect. In an encoded stream there is no place for it – nor in one of declared
// length, which it could fill up to a clean end.
func (s *resultSink) lastEvent(env *outcome.Envelope, tail []byte) []byte {
	if !eventStream(s.header) || s.header.Get("Content-Encoding") != "" || s.length >= 0 {
		return nil
	}
	return env.LastEvent(outcome.Shape{Dialect: s.a.dialect()}, tail)
}

// streamHandedOver records that a streamed result did not reach its caller (H2). While
// the attempt runs it only notes that the caller left (F5).
func (a *action) streamHandedOver(err error) {
	if err == nil || errors.Is(err, errStreamBroken) {
		return
	}
	a.mu.Lock()
	ended := a.settled
	if !ended {
		a.left, a.cause, a.undelivered = true, "CALLER_CANCELLED", true
	}
	a.mu.Unlock()
	if ended {
		a.handedOver(a.committed)(err)
	}
}

// framingMarker is the framing of a body that broke off after its end marker.
const framingMarker = "end_marker"

// maxTail is how much of a body's end is kept to look for an end marker.
const maxTail = 4 << 10

// keepTail remembers the last bytes of the body as it came: what the screen holds back
// counts for the end marker, too.
func (s *resultSink) keepTail(p []byte) {
	if s.a.route.Contract.EndMarker == "" {
		return
	}
	if len(p) >= maxTail {
		s.tail = append(s.tail[:0], p[len(p)-maxTail:]...)
		return
	}
	if over := len(s.tail) + len(p) - maxTail; over > 0 {
		s.tail = append(s.tail[:0], s.tail[over:]...)
	}
	s.tail = append(s.tail, p...)
}

// marked reports whether the body's last line that is not blank holds the end marker
// of the route's contract (CONTRACT G13). An encoded body shows nothing.
func (s *resultSink) marked(marker string) bool {
	if s.header.Get("Content-Encoding") != "" {
		return false
	}
	tail := bytes.TrimRight(s.tail, " \t\r\n")
	return bytes.Contains(tail[bytes.LastIndexByte(tail, '\n')+1:], []byte(marker))
}

// applyMarker lets the end marker that the route's contract names deny completeness
// after framing, or give it before (CONTRACT G13). It returns the reason of a denial.
func (s *resultSink) applyMarker(end *Ending) string {
	marker := s.a.route.Contract.EndMarker
	if marker == "" || end.Status/100 != 2 || s.a.s.Method == http.MethodHead || control.Off("G13-end-marker") {
		return ""
	}
	if end.Status == http.StatusNoContent || end.Status == http.StatusResetContent {
		return "" // no body by definition (RFC 9110 §15.3.5, §15.3.6)
	}
	switch has := s.marked(marker); {
	case end.Complete && !has:
		end.Complete, end.Code = false, outcome.CodeRemoteResultIncomplete
		return "end_marker_missing"
	case !end.Complete && has && end.Code == outcome.CodeRemoteResultIncomplete && end.SinkErr == nil:
		end.Complete, end.Code, end.Framing = true, outcome.CodeNone, framingMarker
	}
	return ""
}
