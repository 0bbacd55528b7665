package dispatch

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"

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
	trailer http.Header
}

func newStream(a *action, expected int64) *stream {
	return &stream{a: a, expected: expected, change: make(chan struct{}), trailer: make(http.Header)}
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
// abnormally, behind one last event where the caller reads events.
func (s *stream) finish(err error, f outcome.Facts, last []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && s.held != nil {
		s.push(s.held)
	}
	if err != nil && len(last) > 0 {
		s.push(last)
	}
	s.trailer.Set(outcome.HeaderOutcome, outcome.FormatOutcome(f))
	s.ended, s.err = true, err
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
}

func (b *streamBody) Read(p []byte) (int, error) {
	for len(b.chunk) == 0 {
		data, err := b.s.next(b.ctx, b.i)
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

func (b *streamBody) Close() error { return nil }

// streams reports whether the answer is relayed while it arrives (CONTRACT H5).
func (s *resultSink) streams() bool {
	r := s.a.route
	switch {
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
	return s.stored == 0 && s.a.route.Delivery == routes.DeliveryAuto && s.status/100 == 2 && !(s.a.s.Protocol == "HTTP/1.0" && s.length < 0)
}

func eventStream(h http.Header) bool {
	media, _, _ := strings.Cut(h.Get("Content-Type"), ";")
	return strings.EqualFold(strings.TrimSpace(media), "text/event-stream")
}

// begin releases the head of a streamed answer and starts storing its chunks. The
// head says unknown: nothing is known of the end (H9).
func (s *resultSink) begin() {
	a := s.a
	s.st = newStream(a, s.length)
	s.pumped = make(chan struct{})
	s.room = sync.NewCond(&s.mu)
	go s.pump()
	f := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.FetchResult}
	rec := a.begun(f)
	h := s.header.Clone()
	shape := a.shape(&rec, f)
	shape.ReceivedStatus = s.status
	outcome.Annotate(h, a.id.String(), f, shape, false)
	reply := &Reply{ID: a.id, Record: rec, Status: s.status, Header: h, ContentLength: s.length, Streamed: true,
		Body: &streamBody{s: s.st, ctx: a.caller}, HandedOver: a.streamHandedOver}
	if a.takesTrailers() {
		reply.Trailer = s.st.trailer
	}
	a.publish(reply)
}

// takesTrailers reports whether the caller's protocol has room for the outcome after
// the body: HTTP/2, or HTTP/1.1 with TE: trailers (RFC 9110 §6.5.1).
func (a *action) takesTrailers() bool {
	if strings.HasPrefix(a.s.Protocol, "HTTP/2") {
		return true
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

// pump stores what has come, chunk by chunk, and releases each once it is durable.
// What comes meanwhile waits for the next chunk, at most one of full size.
func (s *resultSink) pump() {
	defer close(s.pumped)
	for {
		s.mu.Lock()
		for s.waiting.Len() == 0 && !s.closed {
			s.room.Wait()
		}
		if s.waiting.Len() == 0 {
			s.mu.Unlock()
			return
		}
		data := bytes.Clone(s.waiting.Next(MaxChunkBytes))
		s.room.Broadcast()
		s.mu.Unlock()
		if control.Off("H4-stored-before-relayed") {
			s.st.publish(data)
		}
		err := s.store(data)
		s.mu.Lock()
		if err != nil {
			s.failed = err
			s.waiting.Reset()
			s.closed = true
			s.room.Broadcast()
			s.mu.Unlock()
			return
		}
		s.mu.Unlock()
		if !control.Off("H4-stored-before-relayed") {
			s.st.publish(data)
		}
	}
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
	if reply.Envelope == nil {
		s.st.finish(nil, reply.Record.Facts, nil)
		return
	}
	s.st.finish(errStreamBroken, reply.Envelope.Facts(), s.lastEvent(reply.Envelope))
}

// lastEvent tells a reader of events what happened, in the form of the route's
// dialect. In an encoded stream there is no place for it.
func (s *resultSink) lastEvent(env *outcome.Envelope) []byte {
	if !eventStream(s.header) || s.header.Get("Content-Encoding") != "" {
		return nil
	}
	return env.LastEvent(outcome.Shape{Dialect: s.a.dialect()}, s.tail)
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

// maxTail is how much of a body's end is kept to look for an end marker.
const maxTail = 4 << 10

// keepTail remembers the last bytes of the body.
func (s *resultSink) keepTail(p []byte) {
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
	switch has := s.marked(marker); {
	case end.Complete && !has:
		end.Complete, end.Code = false, outcome.CodeRemoteResultIncomplete
		return "end_marker_missing"
	case !end.Complete && has && end.Code == outcome.CodeRemoteResultIncomplete && end.SinkErr == nil:
		end.Complete, end.Code, end.Framing = true, outcome.CodeNone, "end_marker"
	}
	return ""
}
