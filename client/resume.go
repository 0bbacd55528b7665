package client

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"

	"waybill/outcome"
)

// Fields of an answer that holds chunks of a result.
const (
	fieldLastChunk = "Waybill-Last-Chunk"
	fieldResult    = "Waybill-Result"
)

// resumes bounds how often the body of a result goes on after a broken connection.
const resumes = 5

// errShort is a stored result with fewer or more bytes than its head says.
var errShort = errors.New("client: the stored result has another length than it says")

// resumedBody reads a stored result over broken connections. A stored result never
// changes, so it goes on where it broke.
type resumedBody struct {
	io.ReadCloser
	c       *Client
	ctx     context.Context // of the call of Result
	r       *Response
	length  int64 // of the whole body; -1: not told
	read    int64
	resumed int
	failed  error
}

// Read reads on. Its error, other than io.EOF, is an *Error.
func (b *resumedBody) Read(p []byte) (int, error) {
	for b.failed == nil {
		n, err := b.ReadCloser.Read(p)
		b.read += int64(n)
		switch {
		case errors.Is(err, io.EOF) && (b.length < 0 || b.read == b.length || b.r.Request.Method == http.MethodHead):
			return n, io.EOF
		case err == nil && (b.length < 0 || b.read <= b.length):
			return n, nil
		case err == nil, errors.Is(err, io.EOF):
			err = errShort
		}
		b.goOn(err)
		if n > 0 && b.failed == nil {
			return n, nil
		}
	}
	return 0, b.failed
}

// goOn continues on a new connection, or sets failed.
func (b *resumedBody) goOn(cause error) {
	for ; b.resumed < resumes && !errors.Is(cause, errShort); b.resumed++ {
		if !sleep(b.ctx, firstAsk<<b.resumed) {
			cause = context.Cause(b.ctx)
			break
		}
		body, err := b.c.chunksFrom(b.ctx, b.r.InvocationID, b.read)
		if err != nil {
			cause = err
			continue
		}
		_ = b.ReadCloser.Close()
		b.ReadCloser = body
		b.resumed++
		return
	}
	f := outcome.Facts{Phase: outcome.ResultDelivery, Outcome: b.r.Facts.Outcome, Retry: outcome.FetchResult, Code: outcome.CodeDeliveryFailed}
	if f.Validate() != nil {
		f = b.r.Facts // of an unknown outcome: a complete 502
	}
	e := clientError("", f, "body_broken", "", errors.Join(ErrLost, cause))
	e.Envelope = outcome.NewEnvelope(b.r.InvocationID, f, "", outcome.Evidence{DispatchStarted: true, ReceivedStatus: b.r.StatusCode, Reason: "body_broken"})
	b.failed = e
}

// chunksFrom opens a stored result at a byte: it finds the chunk without reading those
// before it, and drops what of it was read already.
func (c *Client) chunksFrom(ctx context.Context, id string, offset int64) (io.ReadCloser, error) {
	after, at := 0, int64(0)
	for {
		part, err := c.chunk(ctx, http.MethodHead, id, after)
		if err != nil {
			return nil, err
		}
		_ = part.Body.Close()
		if at+part.length > offset || part.complete {
			break
		}
		at += part.length
		after = part.last
	}
	body := &chunkedBody{c: c, ctx: ctx, id: id, after: after}
	if _, err := io.CopyN(io.Discard, body, offset-at); err != nil {
		_ = body.Close()
		return nil, err
	}
	return body, nil
}

// chunkAnswer is one answer with chunks of a result.
type chunkAnswer struct {
	*http.Response
	last     int   // number of its last chunk
	length   int64 // of all its chunks
	complete bool  // they end the result
}

// chunk asks for the chunks after a number.
func (c *Client) chunk(ctx context.Context, method, id string, after int) (*chunkAnswer, error) {
	resp, err := c.api(ctx, method, actionPath(id)+"/result", url.Values{"after_chunk": {strconv.Itoa(after)}}, nil)
	if err != nil {
		return nil, err
	}
	last, err := strconv.Atoi(resp.Header.Get(fieldLastChunk))
	complete := resp.Header.Get(fieldResult) == "complete"
	if resp.StatusCode != http.StatusPartialContent || resp.Header.Get(outcome.HeaderInvocation) != id || err != nil || last < after || last == after && !complete || resp.ContentLength < 0 {
		defer func() { _ = resp.Body.Close() }()
		if resp.StatusCode == http.StatusPartialContent {
			return nil, fmt.Errorf("client: chunks after %d are not understood: %w", after, ErrUnanswered)
		}
		return nil, apiFailure(resp)
	}
	return &chunkAnswer{resp, last, resp.ContentLength, complete}, nil
}

// chunkedBody reads a stored result answer by answer.
type chunkedBody struct {
	c     *Client
	ctx   context.Context // of the call of Result
	id    string
	after int
	part  *chunkAnswer // nil between answers
	whole bool
}

// Read returns io.EOF after the chunk that ends the result.
func (b *chunkedBody) Read(p []byte) (int, error) {
	for {
		if b.part == nil {
			if b.whole {
				return 0, io.EOF
			}
			part, err := b.c.chunk(b.ctx, http.MethodGet, b.id, b.after)
			if err != nil {
				return 0, err
			}
			b.part = part
		}
		n, err := b.part.Body.Read(p)
		if errors.Is(err, io.EOF) {
			b.after, b.whole = b.part.last, b.part.complete
			err = b.Close()
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
}

// Close closes the answer that is being read.
func (b *chunkedBody) Close() error {
	if b.part == nil {
		return nil
	}
	err := b.part.Body.Close()
	b.part = nil
	return err
}
