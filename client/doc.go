// Package client is the Go SDK of Waybill: an http.RoundTripper through the proxy, and
// a small client over the caller API. It makes sure that a Go program loses none of
// the contract on the way (docs/contract.md, O5):
//
//   - A failure is an *Error that holds the whole envelope; errors.As finds it. It is
//     made from the answer's JSON, or, where that has another form (a dialect, an
//     answer to HEAD), from the Waybill-* fields alone. No text is ever parsed.
//   - A call is repeated only when the advice is backoff – after the time that
//     Retry-After gives – or same_idempotency_key, with the key that the request
//     carries or, where Waybill made it, as a further attempt of the action
//     (Waybill-Retry-Of); within Options.Repeats and the caller's deadline. Whoever wants to
//     repeat an action whose outcome is unknown writes UnsafeRepeat(id, reason).
//   - Every submission has a Waybill-Request-Id. When the connection to the proxy is
//     lost on the way, nothing is sent again: the client asks what became of that
//     action, and reports its envelope.
//
// An answer of the origin is a Response, whatever its status: a complete 404 or 500
// is a known result (CONTRACT A5). Response.Err turns one that is no success into an
// *Error for those who want that.
//
// The package opens a new connection to the proxy for every submission. A kept
// connection that dies is one on which net/http sends some requests again by itself
// (CONTRACT F6), and one of which nobody knows whether a request arrived.
//
// Commands over SSH (SSHExec), approvals and jobs (Wait, WaitResult, WaitJob), further
// attempts (Retry) and questions to the remote side (Reconcile) have the same error.
package client
