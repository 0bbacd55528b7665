package client

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"log/slog"
	"math/rand/v2"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"waybill/internal/control"
	"waybill/outcome"
)

// Names of the fields that callers send.
const (
	fieldRequestID  = "Waybill-Request-Id"
	fieldSupersedes = "Waybill-Supersedes"
	fieldRetryOf    = "Waybill-Retry-Of"
	fieldTimeout    = "Waybill-Timeout"
)

// fieldJob names the action that follows a job.
const fieldJob = "Waybill-Job"

const (
	// maxEnvelopeBytes bounds what is read of an answer of Waybill's own.
	maxEnvelopeBytes = 1 << 20
	connectTimeout   = 10 * time.Second
	// firstWait is the wait before the first repeat where no time is given; it doubles.
	firstWait = 200 * time.Millisecond
	// answerMargin is how much earlier than the caller's own deadline the proxy is asked
	// to answer, so that the answer – with the id – still arrives.
	answerMargin = 200 * time.Millisecond
)

// Client sends requests through the proxy and reads the caller API. It is safe for
// concurrent use; its zero value is not usable.
type Client struct {
	o     Options
	proxy *url.URL // without user
	auth  string   // Proxy-Authorization, "" for none

	tunnels http.RoundTripper // CONNECT, for https
	direct  http.RoundTripper // to the proxy's listener: absolute-form, and the caller API
	jitter  func(time.Duration) time.Duration
}

// New returns a Client. Its errors wrap ErrOption and hold no value of an option.
func New(o Options) (*Client, error) {
	u, err := o.proxyURL()
	if err != nil {
		return nil, err
	}
	c := &Client{o: o.complete(), auth: basic(u), jitter: func(d time.Duration) time.Duration { return rand.N(d/4 + 1) }}
	plain := *u
	plain.User, plain.Path = nil, ""
	c.proxy = &plain
	dialer := &net.Dialer{Timeout: connectTimeout}
	transport := func(proxy *url.URL) *http.Transport {
		t := &http.Transport{
			DialContext:         dialer.DialContext,
			TLSClientConfig:     &tls.Config{RootCAs: c.o.Roots, MinVersion: tls.VersionTLS12},
			TLSHandshakeTimeout: connectTimeout,
			DisableKeepAlives:   true, // one connection, one submission: see the package comment
			DisableCompression:  true,
		}
		if proxy != nil {
			t.Proxy = http.ProxyURL(proxy)
		}
		return t
	}
	tunnels := transport(u)
	tunnels.OnProxyConnectResponse = refusedConnect
	c.tunnels, c.direct = tunnels, transport(nil)
	return c, nil
}

// HTTPClient returns an http.Client whose requests go through c.RoundTrip. It follows
// no redirect: a redirect is a result, and following it another action (CONTRACT R1).
func (c *Client) HTTPClient() *http.Client {
	return &http.Client{Transport: c, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// Response is an origin's complete answer, relayed or fetched.
type Response struct {
	*http.Response
	// InvocationID is the action; "" when the answer did not come through Waybill (a
	// blind tunnel, another proxy), about which nothing is claimed (CONTRACT V7).
	InvocationID string
	// RequestID is the Waybill-Request-Id of the submission that was answered.
	RequestID string
	// Facts are Waybill's; zero without an InvocationID. In a streamed answer they are
	// those of its beginning: Final has the others.
	Facts outcome.Facts
	// Job is the action that follows the work which the answer only accepted, or "": its
	// outcome is that of the work (CONTRACT A7). See WaitJob.
	Job string
	// Replayed is the earlier action whose recorded result this is (CONTRACT I9), or "".
	Replayed string
	// Fetched: the answer was lost on the way and read from the journal (Options.FetchLost).
	Fetched bool
	// Submissions counts what was sent for the call, this one included; 0 for Result.
	Submissions int
}

// Final returns the facts after the body was read to its end: those of the trailer
// that a streamed answer has (CONTRACT H9), else Facts.
func (r *Response) Final() outcome.Facts {
	if v := r.Trailer[outcome.HeaderOutcome]; len(v) == 1 {
		if f, err := outcome.ParseOutcome(v[0]); err == nil {
			return f
		}
	}
	return r.Facts
}

// Err returns the *Error that an answer amounts to for those to whom a complete 4xx or
// 5xx is a failure; nil for a success, and where nothing is known. It is nil, too, for a
// stored answer whose delivery had failed: here it is; its status says the rest.
func (r *Response) Err() error {
	if r.Facts.Code == outcome.CodeDeliveryFailed {
		return nil
	}
	if e := ErrorOf(r.Response); e != nil {
		e.RequestID = r.RequestID
		return e
	}
	return nil
}

// Do sends a request and returns the origin's complete answer, or an *Error (errors
// about options apart, see ErrOption and ErrSupersedes). The caller closes the body of
// the answer. A body that ends early fails with an *Error, too: its advice is to fetch
// the result. The request is not changed; its body is repeated only if it has GetBody,
// as those made by http.NewRequest from bytes and strings do.
func (c *Client) Do(req *http.Request, opts ...CallOption) (*Response, error) {
	cl, err := callOf(req, opts)
	if err != nil {
		closeBody(req)
		return nil, err
	}
	resp, fail := c.do(req, cl)
	if fail != nil {
		return nil, fail
	}
	return resp, nil
}

// RoundTrip implements http.RoundTripper. It is Do for requests that go through an
// http.Client, whose errors wrap the *Error; options come with the context
// (WithOptions). Like Do it repeats what the advice allows: Options.Repeats.
func (c *Client) RoundTrip(req *http.Request) (*http.Response, error) {
	cl, err := callOf(req, nil)
	if err != nil {
		closeBody(req)
		return nil, err
	}
	resp, fail := c.do(req, cl)
	switch {
	case fail == nil:
		return resp.Response, nil
	case c.o.AnswerFailures:
		return fail.response(req), nil
	default:
		return nil, fail
	}
}

func closeBody(req *http.Request) {
	if req.Body != nil {
		_ = req.Body.Close()
	}
}

// do submits, and repeats where the advice allows it (CONTRACT O1, O5).
func (c *Client) do(req *http.Request, cl *call) (*Response, *Error) {
	ctx := req.Context()
	if cl.supersedes != "" {
		c.o.Logger.Warn("unsafe repeat", slog.String("supersedes", cl.supersedes), slog.String("reason", cl.reason), slog.String("request_id", cl.requestID))
	}
	var (
		earlier []string
		open    []*Error // the submissions whose outcome is not known
	)
	for n := 1; ; n++ {
		resp, fail := c.submit(req, cl, n)
		if fail != nil && cl.retryOf != "" && fail.Facts().Code == outcome.CodeRetryRefused {
			resp, fail = c.recorded(ctx, fail)
		}
		if fail != nil {
			fail.Earlier = earlier
			if gone := ctx.Err(); gone != nil && !errors.Is(fail, gone) {
				// The proxy's last word can still arrive after the caller has given up.
				fail.Err = errors.Join(fail.Err, gone)
			}
		} else {
			resp.Submissions = n
		}
		traceOf(ctx).add(resp, fail)
		wait, again := c.again(req, cl, n, resp, fail)
		if !again || !sleep(ctx, wait) {
			return settled(open, resp, fail)
		}
		f := factsOf(resp, fail)
		switch {
		case f.Outcome != outcome.Unknown:
		case fail == nil: // an origin's answer that proves nothing
			e := failureOf(resp.StatusCode, resp.Header, nil)
			e.RequestID, e.Earlier = resp.RequestID, earlier
			open = append(open, e)
		default:
			open = append(open, fail)
			if cl.retryOf == "" && f.Retry == outcome.SameIdempotencyKey && !c.carriesKey(req, fail) {
				cl.retryOf, cl.retryID = fail.Envelope.InvocationID, cl.submissionID(n)
			}
		}
		c.o.Logger.Info("repeating", slog.String("request_id", cl.submissionID(n)), slog.String("code", f.Code.String()), slog.String("retry", f.Retry.String()), slog.Duration("after", wait))
		if resp != nil {
			_ = resp.Body.Close()
		}
		earlier = append(slices.Clone(earlier), cl.submissionID(n))
	}
}

// settled is what a call comes to whose last submission ended like this, and that has
// submissions before it whose outcome is not known.
func settled(open []*Error, resp *Response, fail *Error) (*Response, *Error) {
	f := factsOf(resp, fail)
	if resp != nil {
		if body, ok := resp.Body.(*deliveredBody); ok && f.Outcome == outcome.Unknown {
			body.open = open // a streamed answer: what it is follows it (CONTRACT H9)
		}
	}
	id := ""
	if fail != nil {
		id = fail.Envelope.InvocationID
	} else {
		id = resp.InvocationID
	}
	e := unsettled(open, f, id)
	if e == nil {
		return resp, fail
	}
	if fail == nil {
		fail = lastOf(resp)
		fail.Earlier = append(slices.Clone(e.Earlier), e.RequestID)
	}
	e.Last = fail
	return nil, e
}

// unsettled returns the last of the open submissions that an answer with these facts
// leaves as it is, or nil. It weighs a call's submissions as an action's attempts are
// weighed: a refusal is that of its own submission, and what came before it may have
// taken effect (CONTRACT A10); one that did nothing says nothing of the others (A9); a
// result decides. A refusal of a further attempt of the same action is different: it has
// the facts of the action.
func unsettled(open []*Error, f outcome.Facts, id string) *Error {
	if control.Off("A9-repeat-hides-nothing") {
		return nil
	}
	switch f.Outcome {
	case outcome.Committed, outcome.Unknown:
		return nil
	case outcome.NotAttempted, outcome.Rejected, outcome.OutcomeInvalid:
	}
	for _, e := range slices.Backward(open) {
		if f.Outcome != outcome.Rejected || id == "" || e.Envelope.InvocationID != id {
			return e
		}
	}
	return nil
}

// lastOf is an origin's answer as Error.Last. A body that breaks off is not kept: a part
// is not shown as the whole (CONTRACT G3).
func lastOf(resp *Response) *Error {
	defer func() { _ = resp.Body.Close() }()
	e := failureOf(resp.StatusCode, resp.Header, nil)
	e.RequestID, e.Envelope.Evidence.ReceivedStatus = resp.RequestID, resp.StatusCode
	if body, err := io.ReadAll(io.LimitReader(resp.Body, maxEnvelopeBytes)); err == nil {
		e.Body = body
	}
	return e
}

// recorded gives out the stored answer of an action that got one by other means before
// its further attempt was asked for; else the refusal stands.
func (c *Client) recorded(ctx context.Context, fail *Error) (*Response, *Error) {
	if f := fail.Facts(); f.Outcome != outcome.Committed && f.Outcome != outcome.Rejected {
		return nil, fail
	}
	r, err := c.Result(ctx, fail.Envelope.InvocationID)
	if err != nil {
		return nil, fail
	}
	r.RequestID, r.Replayed = fail.RequestID, r.InvocationID
	return r, nil
}

func factsOf(resp *Response, fail *Error) outcome.Facts {
	if fail != nil {
		return fail.Facts()
	}
	return resp.Facts
}

// again says whether the call may be sent once more, and after what time. What it
// allows is never more than the advice does; limits apply after it (CONTRACT J4).
func (c *Client) again(req *http.Request, cl *call, n int, resp *Response, fail *Error) (time.Duration, bool) {
	f := factsOf(resp, fail)
	if cl.retryOf != "" && f.Code == outcome.CodeRetryRefused && fail != nil && fail.Envelope.Evidence.Reason != "too_early" {
		return 0, false // the proxy has decided
	}
	if !permitted(f, c.carriesKey(req, fail) || c.keyOnRecord(req, cl, fail)) || n > c.o.Repeats || req.Context().Err() != nil {
		return 0, false
	}
	if req.Body != nil && req.Body != http.NoBody && req.GetBody == nil {
		return 0, false // it can be read once only
	}
	wait := firstWait << min(n-1, 10)
	wait += c.jitter(wait)
	if given := retryAfter(headerOf(resp, fail)); given > 0 {
		wait = max(wait, given)
	}
	if wait > c.o.MaxWait {
		return 0, false
	}
	if deadline, ok := req.Context().Deadline(); ok && time.Until(deadline) <= wait {
		return 0, false
	}
	return wait, true
}

// permitted asks the retry engine (CONTRACT O1). Automation repeats on two kinds of
// advice and on no other (O5).
func permitted(f outcome.Facts, carriesKey bool) bool {
	if control.Off("O5-repeats-on-advice-only") {
		return f.Outcome == outcome.Unknown || f.Outcome == outcome.NotAttempted
	}
	const same = "the same request" // the client repeats nothing else
	op := outcome.Operation{Idempotent: f.Retry == outcome.Backoff}
	if carriesKey {
		op.Fingerprint = same
	}
	switch f.Retry {
	case outcome.Backoff, outcome.SameIdempotencyKey:
		return outcome.Decide(outcome.DecideRecord{Outcome: f.Outcome, Retry: f.Retry, Fingerprint: same}, op).Step.Repeats()
	case outcome.Never, outcome.AfterCorrection, outcome.Reconcile, outcome.FetchResult:
		return false
	default:
		return false
	}
}

// carriesKey reports whether the request itself carries the remote idempotency key, so
// that sending it again is a repeat with the same key.
func (c *Client) carriesKey(req *http.Request, fail *Error) bool {
	if fail != nil && fail.Envelope.Evidence.Idempotency != nil && fail.Envelope.Evidence.Idempotency.Key != "" {
		key := fail.Envelope.Evidence.Idempotency.Key
		for _, values := range req.Header {
			if slices.Contains(values, key) {
				return true
			}
		}
		return false
	}
	return slices.ContainsFunc(c.o.KeyHeaders, func(name string) bool { return req.Header.Get(name) != "" })
}

// keyOnRecord reports whether the key is one that Waybill made: it is not in the request,
// and only as a further attempt of its action (Waybill-Retry-Of) is the request sent with
// that key once more. Sent by itself it would get another one, and take effect again.
func (c *Client) keyOnRecord(req *http.Request, cl *call, fail *Error) bool {
	if cl.retryOf != "" {
		return true
	}
	if fail == nil || fail.Envelope.InvocationID == "" || fail.Envelope.Evidence.Idempotency == nil || fail.Envelope.Evidence.Idempotency.Key == "" {
		return false
	}
	return !slices.ContainsFunc(c.o.KeyHeaders, func(name string) bool { return req.Header.Get(name) != "" })
}

func headerOf(resp *Response, fail *Error) http.Header {
	if fail != nil {
		return fail.Header
	}
	return resp.Header
}

// retryAfter reads Retry-After in both of its forms (RFC 9110 §10.2.3); 0: none.
func retryAfter(h http.Header) time.Duration {
	v := strings.TrimSpace(h.Get("Retry-After"))
	if n, err := strconv.ParseUint(v, 10, 31); err == nil {
		return time.Duration(n) * time.Second
	}
	if t, err := http.ParseTime(v); err == nil {
		return max(0, time.Until(t))
	}
	return 0
}

// sleep waits; it reports whether the context did not end it.
func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// submit sends the request once and finds out what became of it.
func (c *Client) submit(req *http.Request, cl *call, n int) (*Response, *Error) {
	id := cl.reportedID(n)
	var asked, carried atomic.Bool // for a connection; and there is one that can carry the request
	ctx := httptrace.WithClientTrace(req.Context(), &httptrace.ClientTrace{
		GetConn: func(string) { asked.Store(true) },
		GotConn: func(httptrace.GotConnInfo) { carried.Store(true) },
	})
	out, err := c.outgoing(req.WithContext(ctx), cl, n)
	if err != nil {
		f := outcome.Facts{Phase: outcome.Validation, Outcome: outcome.NotAttempted, Retry: outcome.AfterCorrection, Code: outcome.CodeInvalidRequest}
		return nil, clientError(id, f, "body_not_repeatable", "The body of the request could not be read again.", err)
	}
	via := c.direct
	if out.URL.Scheme == "https" {
		via = c.tunnels
	}
	resp, err := via.RoundTrip(out)
	switch {
	case err == nil:
		return c.received(req, resp, id)
	case !asked.Load() && req.Context().Err() == nil:
		f := outcome.Facts{Phase: outcome.Validation, Outcome: outcome.NotAttempted, Retry: outcome.AfterCorrection, Code: outcome.CodeInvalidRequest}
		return nil, clientError(id, f, "bad_request", "The request cannot be written as HTTP.", errors.Join(ErrNotSent, err))
	case !carried.Load():
		return nil, notSent(req.Context(), id, err)
	default:
		return c.lost(req.Context(), id, cl.retryOf, err)
	}
}

// outgoing makes the request that goes to the proxy.
func (c *Client) outgoing(req *http.Request, cl *call, n int) (*http.Request, error) {
	out := req.Clone(req.Context())
	if n > 1 && req.Body != nil && req.Body != http.NoBody {
		body, err := req.GetBody()
		if err != nil {
			return nil, err
		}
		out.Body = body
	}
	out.GetBody = nil // net/http must have no way to send it again (CONTRACT F6)
	h := out.Header
	if h == nil {
		h = http.Header{}
		out.Header = h
	}
	h[fieldRequestID] = []string{cl.submissionID(n)}
	switch {
	case cl.retryOf != "":
		h[fieldRetryOf] = []string{cl.retryOf}
	case cl.supersedes != "":
		h[fieldSupersedes] = []string{cl.supersedes}
	}
	if len(h["Te"]) == 0 {
		h["Te"] = []string{"trailers"} // the outcome of a streamed answer comes after it (H9)
	}
	if len(h[fieldTimeout]) == 0 {
		tellDeadline(req.Context(), h)
	}
	if out.URL.Scheme == "https" && !c.o.AbsoluteForm {
		return out, nil
	}
	// Absolute-form (RFC 9112 §3.2.2), on a connection to the proxy's listener.
	if out.Host == "" {
		out.Host = out.URL.Host
	}
	path := out.URL.EscapedPath()
	if out.URL.Opaque != "" {
		path = out.URL.Opaque
	}
	if !strings.HasPrefix(path, "/") {
		path = "/" + path
	}
	out.URL = &url.URL{
		Scheme: "http", Host: c.proxy.Host, Opaque: out.URL.Scheme + "://" + out.URL.Host + path,
		RawQuery: out.URL.RawQuery, ForceQuery: out.URL.ForceQuery,
	}
	if c.auth != "" {
		h["Proxy-Authorization"] = []string{c.auth}
	}
	return out, nil
}

// tellDeadline asks the proxy to answer, with the id, before the caller's deadline.
func tellDeadline(ctx context.Context, h http.Header) {
	if deadline, ok := ctx.Deadline(); ok {
		if left := time.Until(deadline) - answerMargin; left >= time.Second {
			h[fieldTimeout] = []string{strconv.FormatInt(int64(left/time.Second), 10)}
		}
	}
}

// notSent is a submission for which no connection came about: a boundary that was not
// crossed, whatever the error's text says (CONTRACT E1).
func notSent(ctx context.Context, id string, cause error) *Error {
	var refused *connectRefused
	if errors.As(cause, &refused) {
		return refused.failure(id)
	}
	f := outcome.Facts{Phase: outcome.ConnectionSetup, Outcome: outcome.NotAttempted, Retry: outcome.Backoff, Code: outcome.CodeConnectionLost}
	reason, detail := "proxy_unreachable", "The connection to the proxy could not be made."
	var cert *tls.CertificateVerificationError
	switch {
	case ctx.Err() != nil:
		f.Retry, f.Code = outcome.AfterCorrection, outcome.CodeCallerCancelled
		reason, detail, cause = "caller_gone", "", context.Cause(ctx)
	case errors.As(cause, &cert):
		f.Retry, f.Code = outcome.AfterCorrection, outcome.CodeTLSCertificateInvalid
		reason, detail = "proxy_certificate", "The certificate inside the tunnel is not trusted; give the client Waybill's CA, ca/ca.pem of the data folder."
	}
	return clientError(id, f, reason, detail, errors.Join(ErrNotSent, cause))
}

// received sorts an answer by Waybill's fields, never by its status or body.
func (c *Client) received(req *http.Request, resp *http.Response, id string) (*Response, *Error) {
	facts, known, err := answerFacts(resp.Header)
	switch {
	case err != nil:
		defer func() { _ = resp.Body.Close() }()
		// A value that this build does not know permits nothing (CONTRACT A8).
		f := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeInternal}
		fail := clientError(id, f, "outcome_not_understood", "The proxy's answer has a Waybill-Outcome that this client does not understand.", err)
		fail.Status, fail.Header = resp.StatusCode, resp.Header
		fail.Envelope.InvocationID = resp.Header.Get(outcome.HeaderInvocation)
		return nil, fail
	case known && !relayed(facts):
		return nil, ownAnswer(resp, id)
	}
	resp.Request = req
	r := &Response{Response: resp, RequestID: id, Facts: facts, Replayed: resp.Header.Get(outcome.HeaderReplayed), Job: resp.Header.Get(fieldJob)}
	if known {
		r.InvocationID = resp.Header.Get(outcome.HeaderInvocation)
		resp.Body = &deliveredBody{ReadCloser: resp.Body, c: c, ctx: req.Context(), r: r}
	}
	return r, nil
}

// answerFacts reads Waybill-Outcome. known is false for an answer that does not have
// the field: it is not Waybill's, or ACTION_NOT_FOUND.
func answerFacts(h http.Header) (f outcome.Facts, known bool, err error) {
	v := h[outcome.HeaderOutcome]
	if len(v) == 0 {
		return f, false, nil
	}
	f, err = outcome.ParseOutcome(strings.Join(v, ", "))
	return f, err == nil, err
}

// deliveredBody turns a body that breaks off into an *Error: what was answered is on
// record and can be fetched (CONTRACT H2, H3).
type deliveredBody struct {
	io.ReadCloser
	c      *Client
	ctx    context.Context // of the request whose answer this is
	r      *Response
	open   []*Error // earlier submissions of the call whose outcome is not known
	failed error
}

// Read reads the answer. Its error, other than io.EOF, is an *Error.
func (b *deliveredBody) Read(p []byte) (int, error) {
	if b.failed != nil {
		return 0, b.failed
	}
	n, err := b.ReadCloser.Read(p)
	switch {
	case err == nil:
	case !errors.Is(err, io.EOF):
		b.failed = b.broken(err)
		err = b.failed
	default:
		// A stream that turned out to be a refusal: the call's outcome is not its.
		if f := b.r.Final(); f.Outcome != outcome.Unknown {
			if e := unsettled(b.open, f, b.r.InvocationID); e != nil {
				e.Last = failureOf(b.r.StatusCode, http.Header{outcome.HeaderOutcome: b.r.Trailer[outcome.HeaderOutcome], outcome.HeaderInvocation: {b.r.InvocationID}}, nil)
				e.Last.RequestID = b.r.RequestID
				b.failed = e
				err = e
			}
		}
	}
	return n, err
}

func (b *deliveredBody) broken(cause error) *Error {
	f := b.r.Facts
	if f.Outcome != outcome.Committed && f.Outcome != outcome.Rejected {
		return b.c.afterLoss(b.ctx, b.r.RequestID, b.r.InvocationID, cause)
	}
	// The head said so, and it follows its durable record (H1).
	f = outcome.Facts{Phase: outcome.ResultDelivery, Outcome: f.Outcome, Retry: outcome.FetchResult, Code: outcome.CodeDeliveryFailed}
	e := clientError(b.r.RequestID, f, "body_broken", "", errors.Join(ErrLost, cause))
	e.Envelope = outcome.NewEnvelope(b.r.InvocationID, f, "", outcome.Evidence{DispatchStarted: true, ResponseHeadersReceived: true, ReceivedStatus: b.r.StatusCode, Reason: "body_broken"})
	return e
}
