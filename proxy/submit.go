package proxy

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/elazarl/goproxy"

	"waybill/dispatch"
	"waybill/internal/control"
	"waybill/outcome"
)

// Names of the fields callers send (DESIGN section 4), in canonical form.
const (
	fieldRequestID  = "Waybill-Request-Id"
	fieldSupersedes = "Waybill-Supersedes"
	fieldRetryOf    = "Waybill-Retry-Of"
	fieldTimeout    = "Waybill-Timeout"
)

const (
	maxRequestIDBytes = 128
	maxTimeoutSeconds = 86400
)

// forward is goproxy's one request handler: it hands the request to the pipeline and
// turns the reply into a response. It always returns one, so that goproxy itself
// never sends anything.
func (p *Proxy) forward(r *http.Request, _ *goproxy.ProxyCtx) (*http.Request, *http.Response) {
	x := exchangeOf(r)
	s := x.submission(r)
	return r, x.response(r, x.do(r, s))
}

// submission builds what the pipeline gets. Nothing is normalised here: names and
// bytes go on as the caller gave them (CONTRACT B1, case ID-06).
func (x *exchange) submission(r *http.Request) *dispatch.Submission {
	s := &dispatch.Submission{
		Caller: x.caller, Method: r.Method, Header: r.Header, Protocol: r.Proto, ContentLength: r.ContentLength,
	}
	s.Refused = x.destination(r, s)
	if r.Body != nil && r.Body != http.NoBody && r.ContentLength != 0 {
		s.Body = r.Body
		s.Trailer = func() http.Header { return plainTrailer(x.origin.Trailer) }
	} else {
		s.ContentLength = 0
	}
	if v := takeWaybillFields(r.Header, s); v != nil && s.Refused == nil {
		s.Refused = v
	}
	return s
}

// destination sets scheme, authorities, path and query from the raw target.
func (x *exchange) destination(r *http.Request, s *dispatch.Submission) *dispatch.Refusal {
	target, authority := x.head.target, x.head.authority
	if x.conn.head == nil {
		target = r.RequestURI // HTTP/2: ":path", unchanged
		s.Authorities.Host = r.Host
		if hosts := r.Header["Host"]; len(hosts) > 0 {
			// RFC 9113 §8.3.1: a Host field must not differ from ":authority".
			delete(r.Header, "Host")
			if len(hosts) > 1 || !strings.EqualFold(hosts[0], r.Host) {
				return refusal(outcome.CodeInvalidTarget, "request.headers.host", "authority_mismatch", "The Host field and :authority disagree.")
			}
		}
	} else {
		s.Authorities.Host = x.head.host
		s.Authorities.URL = authority
	}
	s.Scheme = "http"
	if x.tunnel != nil {
		s.Scheme, s.Authorities.Connect, s.Authorities.SNI = x.tunnel.scheme, x.tunnel.authority, x.tunnel.sni
	}
	if scheme, rest, ok := strings.Cut(target, "://"); ok && x.head.form == formAbsolute {
		scheme = strings.ToLower(scheme)
		if x.tunnel != nil && scheme != x.tunnel.scheme {
			return refusal(outcome.CodeInvalidTarget, "request.target", "scheme_mismatch", "The URL's scheme is not that of the tunnel it came through.")
		}
		s.Scheme = scheme
		target = rest[len(authority):]
	}
	s.RawPath, s.RawQuery, s.HasQuery = strings.Cut(target, "?")
	for _, a := range []string{s.Authorities.URL, s.Authorities.Host} {
		if strings.ContainsAny(a, "@\\") {
			// Never recorded: what stands before the @ is a secret (case LK-03).
			s.Authorities = dispatch.Authorities{Connect: s.Authorities.Connect, SNI: s.Authorities.SNI}
			return refusal(outcome.CodeInvalidTarget, "request.target", "userinfo", "The host must not carry a user name or password; Waybill adds credentials.")
		}
	}
	if r.Method == http.MethodConnect {
		return refusal(outcome.CodeUnsupportedAction, "request.method", "nested_connect", "A tunnel inside a tunnel is not carried.")
	}
	return nil
}

// refusal is an ending in validation that the caller can correct (CONTRACT B1, B2).
func refusal(code outcome.Code, field, reason, detail string) *dispatch.Refusal {
	f := outcome.Facts{Phase: outcome.Validation, Outcome: outcome.NotAttempted, Retry: outcome.AfterCorrection, Code: code}
	return &dispatch.Refusal{Facts: f, Field: field, Reason: reason, Detail: detail}
}

// takeWaybillFields reads the fields meant for Waybill and removes every one that
// begins with its name, so that none is forwarded.
func takeWaybillFields(h http.Header, s *dispatch.Submission) *dispatch.Refusal {
	var bad *dispatch.Refusal
	fail := func(name, reason, detail string) {
		if bad == nil {
			bad = refusal(outcome.CodeInvalidRequest, "request.headers."+strings.ToLower(name), reason, detail)
		}
	}
	one := func(name string) (string, bool) {
		vs := h[name]
		if len(vs) > 1 {
			fail(name, "repeated", "The field may stand once only.")
			return "", false
		}
		return strings.Join(vs, ""), len(vs) == 1
	}
	if v, ok := one(fieldRequestID); ok {
		if !visible(v) || len(v) > maxRequestIDBytes {
			fail(fieldRequestID, "bad_request_id", "A request id has 1 to 128 visible ASCII characters.")
		} else {
			s.RequestID = v
		}
	}
	if v, ok := one(fieldSupersedes); ok {
		if _, err := dispatch.ParseActionID(v); err != nil {
			fail(fieldSupersedes, "bad_action_id", "Name one action, act_ and 26 characters.")
		} else {
			s.Supersedes = v
		}
	}
	if v, ok := one(fieldTimeout); ok {
		n, err := strconv.ParseUint(v, 10, 32)
		if err != nil || n < 1 || n > maxTimeoutSeconds || strings.HasPrefix(v, "+") {
			fail(fieldTimeout, "bad_timeout", "Give whole seconds from 1 to 86400.")
		} else {
			s.Wait = time.Duration(n) * time.Second
		}
	}
	if v, ok := one(fieldRetryOf); ok {
		if _, err := dispatch.ParseActionID(v); err != nil {
			fail(fieldRetryOf, "bad_action_id", "Name one action, act_ and 26 characters.")
		} else {
			s.RetryOf = v
		}
	}
	for k := range h {
		if outcome.IsMemberField(k) {
			delete(h, k)
		}
	}
	return bad
}

func visible(s string) bool {
	for _, c := range []byte(s) {
		if c <= ' ' || c > '~' {
			return false
		}
	}
	return s != ""
}

// notInTrailers are fields that decide framing, routing, authentication or meaning
// and therefore never count when they come as trailers (RFC 9110 §6.5.1).
var notInTrailers = []string{
	"Authorization", "Cache-Control", "Connection", "Content-Encoding", "Content-Length", "Content-Range", "Content-Type", "Cookie",
	"Expect", "Host", "Keep-Alive", "Max-Forwards", "Proxy-Authorization", "Proxy-Connection", "Range", "Te", "Trailer", "Transfer-Encoding", "Upgrade",
}

func plainTrailer(t http.Header) http.Header {
	out := make(http.Header, len(t))
	for k, v := range t {
		if len(v) > 0 && !slices.Contains(notInTrailers, k) && !outcome.IsMemberField(k) {
			out[k] = v
		}
	}
	return out
}

// do runs the submission and passes informational answers on while it runs.
func (x *exchange) do(r *http.Request, s *dispatch.Submission) *dispatch.Reply {
	ctx := x.callerContext(r, s)
	relay := &x.own.informer
	relay.w = x.w.ResponseWriter
	if r.ProtoAtLeast(1, 1) && s.Refused == nil {
		s.Informational = relay.pass
	}
	defer relay.stop()
	x.submitted = s.Refused == nil
	x.reply = x.p.pipeline.Do(ctx, s)
	return x.reply
}

// callerContext returns the context that ends when the caller leaves (F10, F5), or the
// answer was written: the reply's body may depend on it.
func (x *exchange) callerContext(r *http.Request, s *dispatch.Submission) context.Context {
	ctx := &x.own.context
	ctx.Context = r.Context()
	switch {
	case s.Refused != nil:
		s.Body = nil // the refusal is recorded whoever is left to hear it (M6)
	case s.Body == nil:
		ctx.whole.Store(true)
	default:
		x.body = &x.own.request
		x.body.r, x.body.ctx = s.Body, ctx
		s.Body = x.body
	}
	return ctx
}

// callerContext is net/http's context of the request, which ends with the connection and
// with the handler, from when the body is whole on. As long as the body is on its way a
// caller that leaves shows as a body that breaks off: that is an incomplete request (case
// UP-03), not a cancelled one, so until then it does not end. Whoever asks for Done must
// ask again when the body is there.
type callerContext struct {
	context.Context //nolint:containedctx // it is one
	whole           atomic.Bool
}

// Done is nil while the body is on its way.
func (c *callerContext) Done() <-chan struct{} {
	if !c.whole.Load() {
		return nil
	}
	return c.Context.Done()
}

// Err is nil while the body is on its way.
func (c *callerContext) Err() error {
	if !c.whole.Load() {
		return nil
	}
	return c.Context.Err()
}

// callerBody is a request body that reports its clean end.
type callerBody struct {
	r      io.Reader
	ctx    *callerContext
	broken atomic.Bool // it ended before its end
}

// Read reads the caller's body. Its error, other than io.EOF, is an incomplete request.
func (b *callerBody) Read(p []byte) (int, error) {
	n, err := b.r.Read(p)
	if err == io.EOF { // itself: a wrapped one is no clean end
		b.ctx.whole.Store(true)
	} else if err != nil {
		b.broken.Store(true)
	}
	return n, err
}

// cut reports whether the body broke off; then nothing on its connection is a request.
func (b *callerBody) cut() bool { return b != nil && b.broken.Load() }

// informer passes 1xx answers on until the final one (CONTRACT G4).
type informer struct {
	w    http.ResponseWriter
	mu   sync.Mutex
	over bool
}

func (i *informer) pass(status int, h http.Header) {
	// 100 answers Waybill's own expectation: the caller got its own from Waybill. 101
	// ends HTTP on the connection and is never passed on here.
	if status <= http.StatusSwitchingProtocols || status >= http.StatusOK {
		return
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.over {
		return
	}
	out := i.w.Header()
	for k, v := range h {
		if !outcome.IsMemberField(k) && !slices.Contains(notForwarded, http.CanonicalHeaderKey(k)) {
			out[k] = v
		}
	}
	i.w.WriteHeader(status)
	for k := range out {
		delete(out, k)
	}
}

// stop ends passing on; afterwards the final answer owns the writer.
func (i *informer) stop() {
	i.mu.Lock()
	i.over = true
	i.mu.Unlock()
}

// notForwarded are fields of one connection (RFC 9110 §7.6.1). net/http frames
// answers itself; Connection has its own rule.
var notForwarded = []string{"Connection", "Keep-Alive", "Proxy-Connection", "Te", "Trailer", "Transfer-Encoding", "Upgrade"}

// response turns a reply into what goproxy writes. Its fields are those of x.w already,
// which is spared a copy of each. goproxy's body is a replyBody, which also takes care of
// the hand-over.
func (x *exchange) response(r *http.Request, reply *dispatch.Reply) *http.Response {
	if reply.Gone && reply.Status == 0 {
		x.handOver(context.Canceled)
		panic(http.ErrAbortHandler)
	}
	if reply.Upgraded != nil {
		x.upgrade(reply)
	}
	h := x.w.Header()
	clear(h)
	maps.Copy(h, reply.Header)
	closing := slices.ContainsFunc(h["Connection"], func(v string) bool { return strings.EqualFold(strings.TrimSpace(v), "close") })
	for _, k := range notForwarded {
		delete(h, k)
	}
	if closing || x.noUpgrade() || x.body.cut() && x.conn.head != nil {
		h["Connection"] = []string{"close"}
	}
	if _, ok := h["Content-Type"]; !ok {
		h["Content-Type"] = nil // or net/http would guess one (G12)
	}
	if reply.ContentLength >= 0 && r.Method != http.MethodHead && reply.Body != nil && reply.Status != http.StatusNotModified {
		h["Content-Length"] = []string{strconv.FormatInt(reply.ContentLength, 10)}
	}
	trailer := reply.Trailer
	if !r.ProtoAtLeast(1, 1) {
		trailer = nil // no chunked coding: the length is what shows an abnormal end (H5)
	}
	if len(trailer) > 0 || reply.Streamed && trailer != nil {
		delete(h, "Content-Length") // trailers need the chunked coding in HTTP/1.1
	}
	if reply.Status == http.StatusNoContent {
		delete(h, "Content-Length") // RFC 9110 §8.6
	}
	body := &x.own.reply
	*body = replyBody{x: x, r: reply.Body}
	if r.Context().Err() != nil {
		body.gone = context.Canceled
	}
	return &http.Response{
		Status: http.StatusText(reply.Status), StatusCode: reply.Status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: http.Header{}, Body: body, ContentLength: reply.ContentLength, Trailer: trailer, Request: r,
	}
}

// replyBody writes a reply's body to the caller in one go and reports the hand-over.
type replyBody struct {
	x      *exchange
	r      io.ReadCloser // may be nil
	gone   error         // the caller had left before the answer began
	closed bool
}

// Read is not used: io.Copy prefers WriteTo.
func (b *replyBody) Read(p []byte) (int, error) {
	if b.r == nil {
		return 0, io.EOF
	}
	n, err := b.r.Read(p)
	if err != nil && !errors.Is(err, io.EOF) {
		b.abort(err)
	}
	return n, err
}

// WriteTo writes the body and flushes, so that a caller that is gone shows as an
// error (CONTRACT H2). When the body itself breaks the caller's answer ends
// abnormally: it never looks complete (H5).
func (b *replyBody) WriteTo(w io.Writer) (int64, error) {
	var n int64
	var err error
	switch wt, ok := b.r.(io.WriterTo); {
	case b.r == nil:
	case b.x.reply.Streamed:
		n, err = b.stream(w)
	case ok:
		n, err = wt.WriteTo(w)
	default:
		n, err = io.Copy(w, onlyReader{b.r})
	}
	if err != nil && (b.x.w.err == nil || b.x.reply.Streamed) {
		// Of a stream that was not written whole nothing may look like its end (H5).
		b.abort(err)
	}
	if err == nil {
		err = b.x.w.FlushError()
	}
	// They are sent. A trailer that goproxy adds now is not one of them.
	clear(b.x.w.Header())
	if err == nil {
		err = b.gone
	}
	b.x.handOver(err)
	return n, err
}

type onlyReader struct{ io.Reader }

// streamBuffers are the pieces in which streamed answers are relayed.
var streamBuffers = sync.Pool{New: func() any { return new([32 << 10]byte) }}

// stream relays each piece as it comes, without waiting for more; the head goes out
// first, before there is any (CONTRACT H5).
func (b *replyBody) stream(w io.Writer) (int64, error) {
	buf, ok := streamBuffers.Get().(*[32 << 10]byte)
	if !ok {
		panic("proxy: the pool holds nothing else")
	}
	defer streamBuffers.Put(buf)
	if err := b.x.w.FlushError(); err != nil {
		return 0, err
	}
	var total int64
	for {
		n, rerr := b.r.Read(buf[:])
		if n > 0 {
			written, err := w.Write(buf[:n])
			total += int64(written)
			if err == nil {
				err = b.x.w.FlushError()
			}
			if err != nil {
				return total, err
			}
		}
		if rerr == io.EOF { // itself: a wrapped one is no clean end
			return total, nil
		}
		if rerr != nil {
			return total, rerr
		}
	}
}

func (b *replyBody) abort(err error) {
	b.x.broken = err
	b.x.handOver(err)
	if control.Off("G3-broken-body-ends-abnormally") {
		return
	}
	panic(http.ErrAbortHandler)
}

// Close closes the reply's body once.
func (b *replyBody) Close() error {
	if b.closed || b.r == nil {
		return nil
	}
	b.closed = true
	return b.r.Close()
}

// handOver tells the pipeline how handing the answer over went, once.
func (x *exchange) handOver(err error) {
	if x.handed || x.reply == nil {
		return
	}
	x.handed = true
	if control.Off("H2-failed-delivery-is-told") {
		err = nil
	}
	if x.reply.HandedOver != nil {
		x.reply.HandedOver(err)
	}
}

// recovered is deferred around every handler. A panic of ours becomes an INTERNAL
// envelope as long as no answer has begun (CONTRACT L7: never a silent close); what
// it claims is what is known: nothing was submitted, or the outcome is unknown.
func (x *exchange) recovered(r *http.Request) {
	v := recover()
	if v == nil {
		return
	}
	x.handOver(errors.New("proxy: the handler ended abnormally"))
	if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(http.ErrAbortHandler)
	}
	// The value may quote a request and is not logged; the stack names places only.
	x.p.log.Error("panic in a handler", slog.String("stack", string(debug.Stack())))
	if x.w.began {
		panic(http.ErrAbortHandler)
	}
	f := outcome.Facts{Phase: outcome.Validation, Outcome: outcome.NotAttempted, Retry: outcome.Never, Code: outcome.CodeInternal}
	id := ""
	if x.submitted {
		f = outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeInternal}
	}
	if x.reply != nil && !x.reply.ID.IsZero() {
		id = x.reply.ID.String()
	}
	x.p.metrics.Unrecorded(f.Code)
	env := outcome.NewEnvelope(id, f, "", outcome.Evidence{})
	if x.noUpgrade() {
		x.w.Header().Set("Connection", "close")
	}
	x.w.answer(env.Answer(x.shape(r)))
}

func (x *exchange) shape(r *http.Request) outcome.Shape {
	own := !r.URL.IsAbs() && r.Method != http.MethodConnect
	return outcome.Shape{Method: r.Method, InsideTunnel: x.tunnel != nil || own, Connect: r.Method == http.MethodConnect}
}

// unrecorded answers a refusal that has no record: there is no caller to keep it for
// (CONTRACT M6). It is counted. closing ends the connection after the answer.
func (x *exchange) unrecorded(s outcome.Shape, f *dispatch.Refusal, closing bool) {
	x.p.metrics.Unrecorded(f.Code)
	env := outcome.NewEnvelope("", f.Facts, f.Detail, outcome.Evidence{Field: f.Field, Reason: f.Reason})
	a := env.Answer(s)
	if closing {
		a.Header.Set("Connection", "close")
	}
	x.w.answer(a)
}

// unauthenticated answers a caller nobody knows. The connection stays open, since git
// and others answer the challenge on it (case CL-02) – except where the caller has
// sent bytes meant for the tunnel already.
func (x *exchange) unauthenticated(r *http.Request) {
	early := x.conn.head != nil && x.conn.head.resume()
	f := refusal(outcome.CodeCallerUnauthenticated, "request.headers.proxy-authorization", "unauthenticated", "")
	s := x.shape(r)
	if s.InsideTunnel {
		f.Field = "request.headers.authorization"
	}
	x.unrecorded(s, f, early)
}

// violated answers a head that was refused, in place of the synthetic request r. It
// is recorded when it is known whose it was.
func (x *exchange) violated(r *http.Request, v *violation) {
	known := true
	if x.tunnel == nil {
		var presented []string
		if v.credentials != "" {
			presented = []string{v.credentials}
		}
		x.caller, known = x.p.authenticate(presented, x.conn.head)
	}
	if !known {
		x.unrecorded(outcome.Shape{Method: r.Method, InsideTunnel: true}, refusal(v.code, v.field, v.reason, v.detail), true)
		return
	}
	x.refused(r, v)
}

// refused records and answers a request that this package found invalid.
func (x *exchange) refused(r *http.Request, v *violation) {
	s := &dispatch.Submission{Caller: x.caller, Method: v.head.method, Scheme: "http", Header: http.Header{}, Protocol: r.Proto}
	if x.tunnel != nil {
		s.Scheme, s.Authorities.Connect, s.Authorities.SNI = x.tunnel.scheme, x.tunnel.authority, x.tunnel.sni
	}
	s.Refused = refusal(v.code, v.field, v.reason, v.detail)
	resp := x.response(r, x.do(r, s))
	if x.conn.head != nil {
		// What follows on this connection cannot be trusted to begin where it seems to.
		x.w.Header()["Connection"] = []string{"close"}
	}
	x.w.WriteHeader(resp.StatusCode)
	_, _ = io.Copy(x.w, resp.Body) // its error goes to the hand-over
	_ = resp.Body.Close()
}
