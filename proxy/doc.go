// Package proxy is Waybill's front: the proxy listener, CONNECT and interception,
// the caller API, the admin API, the callers' identity and the interception CA.
// It is the only importer of goproxy.
//
// What it promises: a request that reaches dispatch.Pipeline is exactly the one
// message the caller framed (RFC 9112 §6; a raw head check in front of net/http
// refuses what the two could read differently); its path and query are the bytes
// the caller sent; every name of the destination the caller gave is passed on
// unchanged, so that they can be compared (CONTRACT B1); the caller is known
// before anything of a request is looked at (V4); proxy credentials stop here and
// are in no log; and every request that was read gets an HTTP answer, never a
// silent close (L7).
//
// What it assumes: the pipeline decides everything about routes, secrets,
// dispatch and records. This package holds no policy beyond the syntax of
// messages and who is asking.
//
// Departures from RFCs, on purpose:
//   - RFC 9112 §3.2.2: the Host field of an absolute-form request is not ignored;
//     it is passed on and must agree with the target.
//   - RFC 9112 §2.2, §5.2, §6.3: a lone LF, obs-fold, repeated equal
//     Content-Length fields and Transfer-Encoding together with Content-Length are
//     refused, not repaired.
//   - RFC 9110 §10.1.1: 100 (Continue) is sent by Waybill itself, because the body
//     is spooled before the request is bound (D1); the origin is then asked in its
//     turn, before it gets the body. An unknown expectation is INVALID_REQUEST (400),
//     not 417.
package proxy
