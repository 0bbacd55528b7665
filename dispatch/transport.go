package dispatch

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"time"

	"waybill/outcome"
	"waybill/routes"
)

// Transport makes connections to origins. Connecting is over before anything of
// the request is written, so its failure proves not_attempted (CONTRACT E1).
// Implementations are safe for concurrent use.
type Transport interface {
	// Connect returns a verified connection, pooled or fresh. Its error is always a
	// *SetupError.
	Connect(ctx context.Context, o *Order) (Conn, error)
	// Dial returns a bare TCP connection for a blind tunnel (V7), under the same
	// address policy (V3). Its error is always a *SetupError.
	Dial(ctx context.Context, o *Order) (net.Conn, error)
	// CloseIdle closes pooled connections.
	CloseIdle()
}

// Pooler is a Transport that can be asked for a connection that it has. There is nothing
// to wait for, and no setup that could fail.
type Pooler interface {
	// Pooled returns nil where Connect would have to make one.
	Pooled(o *Order) Conn
}

// Order says what connection is wanted.
type Order struct {
	Target   routes.Target
	Upstream *routes.Upstream
	// Identity separates pools: a connection that carried one credential never
	// carries another (E6).
	Identity string
	// Certificate is the client certificate of this connection; nil: none. Identity names
	// it: a connection made under one is never used under another (E6).
	Certificate *tls.Certificate
	// ProxyAuthorization is the field value for the route's upstream proxy, a secret; "":
	// none. It goes to the proxy alone.
	ProxyAuthorization string
	// MaxRest is the longest rest after which a pooled connection may still be
	// reused; 0: a fresh connection. A broken write on a reused one is unknown (E3),
	// so operations that are not repeatable ask for little.
	MaxRest time.Duration
	// HTTP1 wants a connection that speaks HTTP/1.1: an upgrade exists there only.
	HTTP1 bool
	// MaxHeaderBytes bounds the response's header section.
	MaxHeaderBytes int64
	// Exec asks for a session of SSH; nil: for HTTP.
	Exec *ExecOrder
}

// Conn is one connection, held by one attempt at a time.
type Conn interface {
	// Info describes the connection for the DISPATCH_STARTED record.
	Info() Dispatch
	// Exchange hands the request over: the dispatch boundary (F1). It is called at
	// most once between Connect and Release, never re-sends (F6), and returns when
	// the exchange has ended one way or the other. It reports progress to sink.
	Exchange(ctx context.Context, out *Outgoing, sink Sink) Ending
	// Release gives the connection back. After an Exchange that did not end
	// completely it is closed.
	Release()
}

// Outgoing is the request as it will be sent. It does not change after it was
// verified (D2).
type Outgoing struct {
	Method    string
	Target    routes.Target
	Authority string // Host field: host[:port], default port left out
	RawPath   string // as matched, byte for byte
	RawQuery  string
	HasQuery  bool
	Header    http.Header
	Body      func() (io.Reader, error) // nil: no body
	Length    int64
	Idle      time.Duration // longest silence of the origin
	MaxBody   int64         // of the response
	// CloseDelimited accepts a body that ends with a plain TCP close (G2).
	CloseDelimited bool
	// Exec is the command of an action over SSH, in place of method, path and fields;
	// nil: an HTTP request.
	Exec *Exec
	// Upgrade is the protocol the request asks for ("websocket"), "": none.
	Upgrade string
}

// Sink receives an answer as it arrives. An error stops the exchange.
type Sink interface {
	Informational(status int, h http.Header)
	Head(status int, h http.Header, length int64) error
	// Body receives the next bytes; it does not keep the slice.
	Body(p []byte) error
}

// Ending says how an exchange ended. Complete is true only with protocol proof (G1).
type Ending struct {
	Sent     Sent
	Status   int // 0: no complete header section of a final answer
	Header   http.Header
	Trailer  http.Header
	Bytes    int64
	Expected *int64
	Framing  string
	Complete bool
	// Code names what went wrong when Complete is false, Reason a fixed token for more.
	Code       outcome.Code
	Reason     string
	Exec       *ExecEnd // of a command
	Proof      string   // of an authoritative refusal (G8)
	StatusLine string   // of a malformed answer, capped
	// Pipe is the connection after a 101 (G4), with what came behind it. Closing it
	// gives the connection back; Release is not called then.
	Pipe io.ReadWriteCloser
	// Err is for the log of the process only; it may quote peers and is never
	// returned or stored (L2, L4).
	Err error
	// SinkErr is the error a Sink returned, if one did.
	SinkErr error
}

// SetupError is a failure before the dispatch boundary (CONTRACT E1, E2).
type SetupError struct {
	Code      outcome.Code
	Stage     outcome.Stage // last completed
	Reason    string        // fixed token
	Detail    string        // one sentence for people, of what is public; "": none
	RCode     string        // of DNS
	AlertID   int           // TLS alert received; 0: none
	AlertName string
	Peer      *outcome.Peer
	// Hop is who failed where not the origin, with the status and Proxy-Status that it
	// answered (CONTRACT G10); "": nobody answered, or the origin's side.
	Hop         string
	HopStatus   int
	ProxyStatus string
	Final       bool  // another try would meet the same refusal
	Err         error // for the log only; may quote peers (L2)
}

// Error names the code and the stage, never what the peer said.
func (e *SetupError) Error() string {
	return fmt.Sprintf("connection setup: %s after stage %q", e.Code, e.Stage)
}

// Unwrap returns the cause.
func (e *SetupError) Unwrap() error { return e.Err }
