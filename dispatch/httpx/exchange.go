package httpx

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"regexp"
	"sync"
	"sync/atomic"
	"time"

	"waybill/dispatch"
	"waybill/internal/control"
	"waybill/outcome"
)

// conn is one connection with its tap. It is held by one attempt at a time, also
// on HTTP/2, so that what the tap sees belongs to that attempt.
type conn struct {
	t      *Transport
	key    poolKey
	id     string
	cc     *http.ClientConn
	tap    *tap
	stage  outcome.Stage
	peer   *outcome.Peer
	reused bool
	since  time.Time // of its rest; under Transport.mu

	began    bool        // an Exchange was made, ever
	fresh    atomic.Bool // an Exchange was made since Connect
	reusable atomic.Bool // the last Exchange ended completely
	pooled   atomic.Bool // given back; proven may put it into the pool
	shut     sync.Once
}

func (c *conn) Info() dispatch.Dispatch {
	return dispatch.Dispatch{Connection: c.id, Reused: c.reused, Stage: c.stage, Peer: c.peer}
}

func (c *conn) close() { c.shut.Do(func() { _ = c.cc.Close() }) }

// proven is called by the tap when the read loop waits with nothing buffered.
func (c *conn) proven() {
	if c.pooled.CompareAndSwap(true, false) {
		c.t.give(c)
	}
}

// Release gives the connection back (dispatch.Conn).
func (c *conn) Release() {
	used := c.fresh.Swap(false)
	if used && !c.reusable.Swap(false) || c.cc.Err() != nil {
		c.close()
		return
	}
	c.pooled.Store(true)
	if c.tap.rest() {
		c.proven()
	}
}

// Why an exchange was stopped from this side.
var (
	errIdle    = errors.New("httpx: the origin was silent for too long")
	errInterim = errors.New("httpx: too many interim answers")
	errOrigin  = errors.New("httpx: the request is for another origin than the connection")
)

// maxInterim bounds the 1xx answers of one exchange (FR-06).
const maxInterim = 64

var bodyBuffers = sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}

// Exchange crosses the dispatch boundary (dispatch.Conn).
func (c *conn) Exchange(ctx context.Context, out *dispatch.Outgoing, sink dispatch.Sink) (end dispatch.Ending) {
	c.fresh.Store(true)
	if out.Target != c.key.target && !control.Off("V2-origin-checked-at-hand-over") {
		// ClientConn looks at neither scheme nor host: what it is given it sends (V2).
		return dispatch.Ending{Code: outcome.CodeRemoteOutcomeUnknown, Err: errOrigin}
	}
	first := !c.began
	c.began = true
	c.tap.mark()
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	x := &exchange{c: c, sink: sink}
	if out.Idle > 0 {
		x.watchSilence(out.Idle, cancel)
		defer x.stopWatching()
	}
	x.trace = httptrace.ClientTrace{WroteHeaders: x.wroteHeaders, WroteRequest: x.wroteRequest, Got1xxResponse: x.got1xx}
	body := &x.body
	defer func() {
		v := c.tap.view()
		if v.wrote > 0 && v.writeErr == nil && (body.memory != nil || body.read.Load() >= out.Length) {
			// The answer, or its end, may be here before net/http says that the
			// request is out.
			x.awaitWrote()
			v = c.tap.view()
		}
		end.Sent = dispatch.Sent{Headers: x.headers.Load() && v.wrote > 0, Complete: x.whole.Load() && v.wrote > 0 && v.writeErr == nil && body.taken() >= out.Length}
		c.reusable.Store(end.Complete && v.writeErr == nil)
	}()

	// Opaque is written as it is: the path sent is the path matched.
	x.url = url.URL{Scheme: out.Target.Scheme, Host: out.Authority, Opaque: out.RawPath, RawQuery: out.RawQuery, ForceQuery: out.HasQuery}
	req, err := request(httptrace.WithClientTrace(ctx, &x.trace), out, &x.url, body, !c.tap.h2)
	if err != nil {
		return dispatch.Ending{Code: outcome.CodeRemoteOutcomeUnknown, Err: err}
	}
	resp, err := c.cc.RoundTrip(req)
	if err != nil {
		return c.noResponse(ctx, err, first)
	}
	defer func() {
		if end.Pipe == nil {
			_ = resp.Body.Close()
		}
	}()
	if resp.StatusCode == http.StatusSwitchingProtocols && out.Upgrade != "" {
		return c.switched(out, resp, sink)
	}
	if resp.StatusCode < 200 {
		// 0xx is no HTTP status (RFC 9110 §15); a 101 was not asked for.
		return dispatch.Ending{Code: outcome.CodeRemoteProtocolError, StatusLine: c.statusLine(), Err: fmt.Errorf("status %d", resp.StatusCode)}
	}
	return c.readBody(ctx, out, resp, sink)
}

// wroteWait bounds the wait for a marker that is diagnosis (F3).
const wroteWait = 50 * time.Millisecond

// exchange is one Exchange as net/http tells of it.
type exchange struct {
	c     *conn
	sink  dispatch.Sink
	trace httptrace.ClientTrace
	url   url.URL
	body  sentBody

	headers, whole atomic.Bool
	interim        int

	// Under mu.
	mu    sync.Mutex
	over  bool          // net/http said that the request is written, or is not
	wrote chan struct{} // closed with over; nil: nobody waits for it

	// Of the watch over silence, under mu.
	timer   *time.Timer
	silence time.Duration
	cancel  context.CancelCauseFunc
	done    bool
}

func (x *exchange) wroteHeaders() { x.headers.Store(true) }

func (x *exchange) wroteRequest(i httptrace.WroteRequestInfo) {
	x.whole.Store(i.Err == nil)
	x.mu.Lock()
	defer x.mu.Unlock()
	if !x.over && x.wrote != nil {
		close(x.wrote)
	}
	x.over = true
}

func (x *exchange) got1xx(code int, h textproto.MIMEHeader) error {
	if x.interim++; x.interim > maxInterim {
		return errInterim
	}
	x.sink.Informational(code, http.Header(h))
	return nil
}

func (x *exchange) awaitWrote() {
	x.mu.Lock()
	over := x.over
	if !over {
		x.wrote = make(chan struct{})
	}
	x.mu.Unlock()
	if over {
		return
	}
	late := time.NewTimer(wroteWait)
	defer late.Stop()
	select {
	case <-x.wrote:
	case <-late.C:
	}
}

// sentBody counts what is taken of a request body to be written: net/http counts a
// request as written whose body an origin did not want (Expect), too.
type sentBody struct {
	io.Reader
	read atomic.Int64

	// memory is the body itself, where net/http gets that; nil: it gets this. It is looked
	// at once net/http has said that the request is written, and then reads no more.
	memory *bytes.Reader
}

// inOneWrite is the longest body that goes out together with the head: net/http writes
// what it knows to be in memory into one buffer, and the head by itself ahead of anything
// else. It leaves most of bufferBytes to the head.
const inOneWrite = bufferBytes / 2

// taken is how much of the body was taken to be written, after it was.
func (b *sentBody) taken() int64 {
	if b.memory != nil {
		return b.memory.Size() - int64(b.memory.Len())
	}
	return b.read.Load()
}

func (b *sentBody) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	b.read.Add(int64(n))
	return n, err
}

func request(ctx context.Context, out *dispatch.Outgoing, u *url.URL, sent *sentBody, http1 bool) (*http.Request, error) {
	if u.Opaque == "" {
		u.Opaque = "/"
	}
	req := (&http.Request{
		Method:        out.Method,
		URL:           u,
		Proto:         "HTTP/1.1",
		ProtoMajor:    1,
		ProtoMinor:    1,
		Header:        out.Header,
		Host:          out.Authority,
		ContentLength: out.Length,
	}).WithContext(ctx)
	expects := out.Header.Get("Expect") != ""
	if out.Body != nil && out.Upgrade == "" {
		body, err := out.Body()
		if err != nil {
			return nil, err
		}
		sent.Reader = body
		req.Body = io.NopCloser(sent)
		if memory, ok := body.(*bytes.Reader); ok && http1 && memory.Size() <= inOneWrite && !expects {
			sent.memory, req.Body = memory, io.NopCloser(memory)
		}
		if out.Length == 0 {
			sent.memory, req.Body = nil, http.NoBody
		}
	}
	// net/http sends a body that was refused by the head to keep the connection; an
	// upload for nothing costs more than a connection.
	req.Close = req.ContentLength > 0 && expects
	return req, nil
}

// watchSilence cancels with errIdle when no byte passes for d.
func (x *exchange) watchSilence(d time.Duration, cancel context.CancelCauseFunc) {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.silence, x.cancel = d, cancel
	x.timer = time.AfterFunc(d, x.listen)
}

func (x *exchange) listen() {
	x.mu.Lock()
	defer x.mu.Unlock()
	if x.done {
		return
	}
	if rest := x.silence - x.c.tap.silence(time.Now()); rest > 0 {
		x.timer.Reset(rest)
		return
	}
	x.cancel(errIdle)
}

func (x *exchange) stopWatching() {
	x.mu.Lock()
	defer x.mu.Unlock()
	x.done = true
	x.timer.Stop()
}

// late reports whether the exchange was stopped by a time limit.
func late(ctx context.Context) bool {
	cause := context.Cause(ctx)
	return errors.Is(cause, errIdle) || errors.Is(cause, context.DeadlineExceeded)
}

// noResponse classifies an exchange without a final header section. Only what the
// tap saw counts; the text of an error never does. first: no exchange went before on
// this connection.
func (c *conn) noResponse(ctx context.Context, err error, first bool) dispatch.Ending {
	v := c.tap.view()
	end := dispatch.Ending{Code: outcome.CodeRemoteOutcomeUnknown, Err: err}
	alert, alerted := remoteAlert(v.readErr)
	switch {
	case c.tap.h2 && v.refused && !v.headers:
		end.Code, end.Proof = outcome.CodeRemoteRefused, "RST_STREAM REFUSED_STREAM"
	case c.tap.h2 && v.goaway && !v.headers:
		end.Code, end.Proof = outcome.CodeRemoteRefused, fmt.Sprintf("GOAWAY last_stream_id=%d", v.lastStream)
	case alerted && alert == alertCertificateRequired && v.read == 0 && first && c.peer.TLSVersion == tls13:
		// The end of the handshake as the peer sees it. Later on the connection the alert
		// may follow a request that was read (G8).
		end.Code, end.Proof = outcome.CodeClientCertificateRequired, "TLS alert certificate_required"
	case late(ctx):
		end.Code = outcome.CodeRemoteTimeout
	case errors.Is(err, errInterim):
		end.Code = outcome.CodeRemoteProtocolError
	case c.tap.h2:
		// A reset or a lost connection before the header section (G2).
	case v.headDone || v.readErr == nil && v.writeErr == nil && v.read > 0:
		// A whole head that does not parse, one that is too long, or no HTTP at all.
		end.Code, end.StatusLine = outcome.CodeRemoteProtocolError, c.statusLine()
	}
	return end
}

// malformedStatus is as much of a status line as is told: the reason phrase and a
// line that is no HTTP are the peer's free text, which may echo a secret (C2).
var malformedStatus = regexp.MustCompile(`^HTTP/[0-9](\.[0-9])? [0-9]{1,6}`)

// statusLine returns version and status of the current head, "" when it has none.
func (c *conn) statusLine() string { return string(malformedStatus.Find(c.tap.sample())) }

// readBody reads the answer to its end and says whether the end was proven (G1).
func (c *conn) readBody(ctx context.Context, out *dispatch.Outgoing, resp *http.Response, sink dispatch.Sink) dispatch.Ending {
	end := dispatch.Ending{Status: resp.StatusCode, Header: resp.Header}
	bodyless := out.Method == http.MethodHead || resp.StatusCode == http.StatusNoContent || resp.StatusCode == http.StatusNotModified
	if resp.ContentLength >= 0 && !bodyless {
		n := resp.ContentLength
		end.Expected = &n
	}
	if err := sink.Head(resp.StatusCode, resp.Header, resp.ContentLength); err != nil {
		end.Code, end.SinkErr = outcome.CodeResultStoreFailed, err
		return end
	}
	if end.Expected != nil && *end.Expected > out.MaxBody {
		end.Code = outcome.CodeResultLimit
		return end
	}
	buf := bodyBuffers.Get().(*[]byte) //nolint:forcetypeassert // the pool holds nothing else
	most := 0
	defer func() {
		// What came may hold a secret: it does not wait here for the next answer.
		clear((*buf)[:most])
		bodyBuffers.Put(buf)
	}()
	for {
		n, err := resp.Body.Read(*buf)
		most = max(most, n)
		if n > 0 {
			end.Bytes += int64(n)
			if end.Bytes > out.MaxBody {
				end.Code = outcome.CodeResultLimit
				return end
			}
			if serr := sink.Body((*buf)[:n]); serr != nil {
				end.Code, end.SinkErr = outcome.CodeResultStoreFailed, serr
				return end
			}
		}
		if err == nil {
			continue
		}
		if err != io.EOF { // the clean end is io.EOF itself; a wrapped one is some other end (G1)
			end.Code, end.Err = outcome.CodeRemoteResultIncomplete, err
			if late(ctx) {
				end.Code = outcome.CodeRemoteTimeout
			}
			return end
		}
		break
	}
	if v := c.tap.view(); !c.tap.h2 && !bodyless && (v.spaced || v.coding && !resp.ProtoAtLeast(1, 1)) {
		// net/http passes over such a field, and other readers obey it: nobody knows where
		// the body ends (RFC 9112 §5.1, §6.1; G1).
		end.Code = outcome.CodeRemoteProtocolError
		return end
	}
	end.Framing, end.Complete = c.framing(out, resp, bodyless)
	if !end.Complete {
		end.Code = outcome.CodeRemoteResultIncomplete
		return end
	}
	end.Trailer = resp.Trailer
	return end
}

// framing names how the body ended and whether that proves completeness
// (RFC 9112 §6.3, RFC 9113 §8.1, CONTRACT G1, G2).
func (c *conn) framing(out *dispatch.Outgoing, resp *http.Response, bodyless bool) (string, bool) {
	switch {
	case c.tap.h2 && out.Method == http.MethodHead:
		// net/http reads no body then, and does not say how the stream ended: a reset behind
		// the head looks the same, and so does content, at which it resets the stream.
		if v := c.tap.view(); !v.ended || v.data {
			return "stream_not_ended", false
		}
		return "end_stream", true
	case c.tap.h2:
		return "end_stream", true
	case bodyless:
		return "no_body", true
	case len(resp.TransferEncoding) > 0 && resp.TransferEncoding[0] == "chunked":
		return "chunked", true
	case resp.ContentLength >= 0:
		return "content_length", true
	}
	v := c.tap.view()
	switch {
	case v.closeNotify:
		return "close_notify", true
	case v.cleanFIN && out.CloseDelimited:
		return "tcp_close", true
	default:
		return "close_without_proof", control.Off("G2-close-needs-proof")
	}
}
