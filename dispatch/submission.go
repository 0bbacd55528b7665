package dispatch

import (
	"io"
	"net/http"
	"time"

	"waybill/outcome"
)

// Caller is who asks. ID is stable, not secret and safe to record: a name, or a
// keyed hash of what the caller presented, never a token (CONTRACT C2, V4).
type Caller struct {
	ID string
	// Name is what routes' callers lists are matched against; "" for an anonymous
	// caller on loopback.
	Name string
	// Session is the session opened by "waybill run", or "".
	Session string
}

// Authorities are the names of the destination as the caller gave them, before
// anything was normalised. They must all agree (CONTRACT B1, DESIGN 1.2). Empty
// strings are names that were not given.
type Authorities struct {
	Connect string // target of the CONNECT around this request, host:port
	SNI     string // server name of the TLS handshake inside the tunnel
	URL     string // authority of an absolute-form target
	Host    string // Host field or :authority
}

// Submission is one request as the front received it. Header is the pipeline's to
// change. Nothing in it has been checked against a route.
type Submission struct {
	Caller      Caller
	Method      string
	Scheme      string // "http" or "https": how the caller addressed the origin
	Authorities Authorities
	// RawPath and RawQuery are the bytes of the target, unchanged. RawPath starts
	// with "/" (or is "*" for OPTIONS); "" is "/". HasQuery tells "?" from nothing.
	RawPath  string
	RawQuery string
	HasQuery bool
	Header   http.Header
	Protocol string // "HTTP/1.1", "HTTP/2.0"
	// Body is nil when there is none. Its error, other than io.EOF, is an incomplete
	// request. ContentLength is -1 when unknown.
	Body          io.Reader
	ContentLength int64
	// Trailer returns the request's trailer fields after Body was read to its end; may be nil.
	Trailer func() http.Header

	// From the Waybill-* request fields; the front has removed them from Header.
	RequestID  string
	Supersedes string
	// RetryOf names the action that this request, sent again whole, is a further attempt of.
	RetryOf string
	Wait    time.Duration // Waybill-Timeout; 0: as long as the route allows

	// Informational passes a 1xx answer on (G4); may be nil.
	Informational func(status int, h http.Header)

	// Internal is set for a request that Waybill makes by itself, for another action.
	Internal *Internal

	// Exec makes the submission a command over SSH; nil: an HTTP request.
	Exec *ExecRequest

	// Admin lifts the check that an action named in RetryOf is the caller's own.
	Admin bool
	// purpose of a further attempt that no caller sent: "api" or "background".
	purpose string

	// Refused is set when the front already found the request invalid: the pipeline
	// records the refusal and answers it (M6), nothing else.
	Refused *Refusal
}

// Refusal is an ending before any boundary.
type Refusal struct {
	outcome.Facts
	Field  string // path of what the caller can correct, e.g. "request.headers.host" (B2)
	Reason string // fixed token, e.g. "authority_mismatch"
	Detail string // one sentence for people, no request data that could be secret
	// Stage is the last completed stage of connection setup, "" before it.
	Stage outcome.Stage
	// Earlier is the action this one collided with; zero: none.
	Earlier ActionID

	credential string // that could not be used; recorded, never answered (B3)
}

// Reply is the answer to a submission. Exactly one of two kinds: relayed (Result
// of the origin, Envelope nil) or Waybill's own (Envelope set).
type Reply struct {
	ID     ActionID
	Record Record
	// Envelope is set for every failure that Waybill answers itself (G12, L1).
	Envelope *outcome.Envelope

	Status  int
	Header  http.Header // complete, with Waybill-* and Proxy-Status
	Trailer http.Header
	// Body implements io.WriterTo. ContentLength is -1 when unknown. Close is always called.
	Body          io.ReadCloser
	ContentLength int64

	// Gone reports that the caller left: nobody to answer (CALLER_CANCELLED).
	Gone bool
	// Streamed: Body is relayed while it arrives. Each Read returns what is there; an
	// error other than io.EOF ends the caller's answer abnormally (H5). Trailer, if it is
	// not nil, is filled before io.EOF.
	Streamed bool
	// Upgraded carries the origin's connection after a 101: whoever answers the caller
	// copies both ways and closes it. nil: an ordinary answer.
	Upgraded *Upgraded
	// HandedOver must be called once, with the error of writing the answer to the
	// caller or nil (H2). It never blocks on the caller.
	HandedOver func(err error)
	// Final waits for the ending of a command whose output is Streamed, and returns its
	// reply; nil elsewhere.
	Final func() *Reply
	// WaitOver is the answer to a caller whose Body ended with ErrWaitOver; nil where it
	// does not. HandedOver is called with nil then.
	WaitOver func() *Reply
}

// TunnelDecision says what to do with a CONNECT.
type TunnelDecision uint8

// The decisions. Zero is invalid.
const (
	TunnelInvalid   TunnelDecision = iota
	TunnelIntercept                // some route may match: answer 200 and look inside
	TunnelBlind                    // default: tunnel, no route names this host (V7)
	TunnelRefuse                   // see the reply
)
