package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"waybill/outcome"
)

// ErrorOf returns what Waybill said of an answer, as an *Error: for code that only
// holds the *http.Response, such as the one inside a vendor's error. It returns nil
// for a success, for an answer that still streams, and for one that did not come
// through Waybill. The body of an answer that Waybill made itself is read (up to
// 1 MiB) and put back; an origin's is left alone.
func ErrorOf(resp *http.Response) *Error {
	if resp == nil {
		return nil
	}
	f, known, err := answerFacts(resp.Header)
	switch {
	case err != nil || !known || f.Code == outcome.CodeNone:
		return nil
	case relayed(f):
		e := failureOf(resp.StatusCode, resp.Header, nil)
		e.Envelope.Evidence.ReceivedStatus = resp.StatusCode
		return e
	}
	var body []byte
	if resp.Body != nil {
		body, _ = io.ReadAll(io.LimitReader(resp.Body, maxEnvelopeBytes))
		rest := resp.Body
		resp.Body = struct {
			io.Reader
			io.Closer
		}{io.MultiReader(bytes.NewReader(body), rest), rest}
	}
	return failureOf(resp.StatusCode, resp.Header, body)
}

// ownAnswer reads an answer of Waybill's own to its end. A body that breaks off costs
// the evidence, not the facts.
func ownAnswer(resp *http.Response, requestID string) *Error {
	defer func() { _ = resp.Body.Close() }()
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxEnvelopeBytes))
	e := failureOf(resp.StatusCode, resp.Header, body)
	e.RequestID = requestID
	return e
}

// failureOf makes the Error of an answer whose Waybill-Outcome was understood. The
// envelope in the body counts where it says the same as the fields, which no origin
// can set (CONTRACT V6); otherwise the fields are all there is.
func failureOf(status int, h http.Header, body []byte) *Error {
	f, _, _ := answerFacts(h)
	id := h.Get(outcome.HeaderInvocation)
	e := &Error{Status: status, Header: h, Body: body, RetryAfter: retryAfter(h)}
	if env, ok := decodeEnvelope(body); ok && env.Error != nil && env.Facts() == f && env.InvocationID == id {
		e.Envelope, e.Source = env, FromBody
		return e
	}
	e.Source = FromFields
	e.Envelope = outcome.NewEnvelope(id, f, "", outcome.Evidence{DispatchStarted: f.Outcome != outcome.NotAttempted})
	return e
}

func decodeEnvelope(body []byte) (outcome.Envelope, bool) {
	var env outcome.Envelope
	if len(body) == 0 || json.Unmarshal(body, &env) != nil {
		return outcome.Envelope{}, false
	}
	return env, true
}

// response is the failure as the answer that the proxy gave, or would have given: a
// status and hints on which libraries do not repeat what they must not (CONTRACT L7).
func (e *Error) response(req *http.Request) *http.Response {
	status, header, body := e.Status, e.Header.Clone(), e.Body
	if status == 0 {
		a := e.Envelope.Answer(outcome.Shape{Method: req.Method, InsideTunnel: true, RetryAfter: e.RetryAfter})
		status, header, body = a.Status, a.Header, a.Body
	}
	length := int64(len(body))
	if req.Method != http.MethodHead {
		header.Set("Content-Length", strconv.FormatInt(length, 10))
	}
	return &http.Response{
		Status: strconv.Itoa(status) + " " + http.StatusText(status), StatusCode: status,
		Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: header, Body: io.NopCloser(bytes.NewReader(body)), ContentLength: length, Request: req,
	}
}

// connectRefused is a CONNECT that the proxy did not answer with 200. net/http would
// only keep the reason phrase of it.
type connectRefused struct {
	status int
	header http.Header
	body   []byte
}

// Error names the status.
func (e *connectRefused) Error() string {
	return "the proxy refused the tunnel with status " + strconv.Itoa(e.status)
}

// refusedConnect is the transport's hook for answers to CONNECT.
func refusedConnect(ctx context.Context, _ *url.URL, _ *http.Request, resp *http.Response) error {
	if resp.StatusCode == http.StatusOK {
		return nil
	}
	e := &connectRefused{status: resp.StatusCode, header: resp.Header}
	read := make(chan []byte, 1)
	go func() { // ends with the connection, which the transport closes after the error
		body, _ := io.ReadAll(io.LimitReader(resp.Body, maxEnvelopeBytes))
		read <- body
	}()
	ctx, cancel := context.WithTimeout(ctx, connectTimeout)
	defer cancel()
	select {
	case e.body = <-read:
	case <-ctx.Done(): // the fields are enough
	}
	return e
}

// failure is the refusal as an Error: nothing was sent to an origin.
func (e *connectRefused) failure(requestID string) *Error {
	var fail *Error
	if f, known, err := answerFacts(e.header); known && err == nil && !relayed(f) {
		fail = failureOf(e.status, e.header, e.body)
		fail.RequestID = requestID
	} else {
		// Not in Waybill's words.
		f := outcome.Facts{Phase: outcome.ConnectionSetup, Outcome: outcome.NotAttempted, Retry: outcome.Backoff, Code: outcome.CodeProxyTunnelFailed}
		if e.status == http.StatusProxyAuthRequired {
			f = outcome.Facts{Phase: outcome.Validation, Outcome: outcome.NotAttempted, Retry: outcome.AfterCorrection, Code: outcome.CodeCallerUnauthenticated}
		}
		fail = clientError(requestID, f, "tunnel_refused", "", nil)
		fail.Status, fail.Header, fail.Body, fail.RetryAfter = e.status, e.header, e.body, retryAfter(e.header)
	}
	fail.Err = errors.Join(ErrNotSent, e)
	return fail
}
