package testkit

import "strings"

// A SmugglingHead is a request that two readers could take for different things, with
// the one answer that it gets: a refusal, and the end of the connection (RFC 9112).
type SmugglingHead struct {
	Name   string
	Wire   string // to a proxy
	Reason string // evidence.reason
	Code   string
}

const goodHost = "Host: pay.example.test\r\n"

// SmugglingHeads returns the table. Every head is for pay.example.test; so is what
// some of them hide behind it.
func SmugglingHeads() []SmugglingHead {
	return []SmugglingHead{
		{"CL.TE", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG", "te_and_length", "INVALID_REQUEST"},
		{"TE.CL", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n8\r\nSMUGGLED\r\n0\r\n\r\n", "te_and_length", "INVALID_REQUEST"},
		{"TE identity", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Transfer-Encoding: identity\r\n\r\n", "unknown_te", "INVALID_REQUEST"},
		{"TE xchunked", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Transfer-Encoding: xchunked\r\n\r\n", "unknown_te", "INVALID_REQUEST"},
		{"TE chunked, identity", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Transfer-Encoding: chunked, identity\r\n\r\n", "unknown_te", "INVALID_REQUEST"},
		{"TE gzip, chunked", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Transfer-Encoding: gzip, chunked\r\n\r\n", "unknown_te", "INVALID_REQUEST"},
		{"TE quoted", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Transfer-Encoding: \"chunked\"\r\n\r\n", "unknown_te", "INVALID_REQUEST"},
		{"TE empty", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Transfer-Encoding:\r\n\r\n", "unknown_te", "INVALID_REQUEST"},
		{"TE twice", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n", "unknown_te", "INVALID_REQUEST"},
		{"TE vertical tab", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Transfer-Encoding: \x0bchunked\r\n\r\n", "control_byte", "INVALID_REQUEST"},
		{"TE on 1.0", "POST http://pay.example.test/ HTTP/1.0\r\n" + goodHost + "Transfer-Encoding: chunked\r\n\r\n", "te_in_http10", "INVALID_REQUEST"},
		{"TE space before colon", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Transfer-Encoding : chunked\r\n\r\n", "space_before_colon", "INVALID_REQUEST"},
		{"TE folded", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Transfer-Encoding:\r\n chunked\r\n\r\n", "obs_fold", "INVALID_REQUEST"},
		{"first field folded", "GET http://pay.example.test/ HTTP/1.1\r\n X: y\r\n" + goodHost + "\r\n", "obs_fold", "INVALID_REQUEST"},
		{"CL differ", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Content-Length: 1\r\nContent-Length: 2\r\n\r\n", "duplicate_length", "INVALID_REQUEST"},
		{"CL twice", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Content-Length: 1\r\nContent-Length: 1\r\n\r\nx", "duplicate_length", "INVALID_REQUEST"},
		{"CL list", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Content-Length: 1, 1\r\n\r\nx", "bad_length", "INVALID_REQUEST"},
		{"CL sign", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Content-Length: +1\r\n\r\nx", "bad_length", "INVALID_REQUEST"},
		{"CL minus", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Content-Length: -1\r\n\r\n", "bad_length", "INVALID_REQUEST"},
		{"CL hex", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Content-Length: 0x1\r\n\r\nx", "bad_length", "INVALID_REQUEST"},
		{"CL underscore", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Content-Length: 1_0\r\n\r\nx", "bad_length", "INVALID_REQUEST"},
		{"CL empty", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Content-Length:\r\n\r\n", "bad_length", "INVALID_REQUEST"},
		{"CL huge", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Content-Length: 99999999999999999999\r\n\r\n", "bad_length", "INVALID_REQUEST"},
		{"CL space before colon", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Content-Length : 1\r\n\r\nx", "space_before_colon", "INVALID_REQUEST"},
		{"bare LF", "GET http://pay.example.test/ HTTP/1.1\nHost: pay.example.test\n\n", "bare_lf", "INVALID_REQUEST"},
		{"bare LF in a field", "GET http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "X: a\nY: b\r\n\r\n", "bare_lf", "INVALID_REQUEST"},
		{"bare CR", "GET http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "X: a\rY: b\r\n\r\n", "bare_cr", "INVALID_REQUEST"},
		{"CR before CRLF", "GET http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "X: a\r\r\n\r\n", "bare_cr", "INVALID_REQUEST"},
		{"NUL in a value", "GET http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "X: a\x00b\r\n\r\n", "control_byte", "INVALID_REQUEST"},
		{"NUL in a name", "GET http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "X\x00: a\r\n\r\n", "control_byte", "INVALID_REQUEST"},
		{"no colon", "GET http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Garbage\r\n\r\n", "no_colon", "INVALID_REQUEST"},
		{"empty name", "GET http://pay.example.test/ HTTP/1.1\r\n" + goodHost + ": a\r\n\r\n", "bad_field_name", "INVALID_REQUEST"},
		{"name not a token", "GET http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "X(y): a\r\n\r\n", "bad_field_name", "INVALID_REQUEST"},
		{"no Host", "GET http://pay.example.test/ HTTP/1.1\r\n\r\n", "missing_host", "INVALID_REQUEST"},
		{"two Hosts", "GET http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Host: evil.example.test\r\n\r\n", "duplicate_host", "INVALID_REQUEST"},
		{"equal Hosts", "GET http://pay.example.test/ HTTP/1.1\r\n" + goodHost + goodHost + "\r\n", "duplicate_host", "INVALID_REQUEST"},
		{"Host with a space", "GET http://pay.example.test/ HTTP/1.1\r\nHost: pay.example.test evil\r\n\r\n", "malformed_host", "INVALID_TARGET"},
		{"Host not ASCII", "GET http://pay.example.test/ HTTP/1.1\r\nHost: p\xc3\xa4y.example.test\r\n\r\n", "malformed_host", "INVALID_TARGET"},
		{"method not a token", "GE(T http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "\r\n", "bad_method", "INVALID_REQUEST"},
		{"method too long", strings.Repeat("A", 40) + " http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "\r\n", "bad_method", "INVALID_REQUEST"},
		{"leading space", " GET http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "\r\n", "bad_method", "INVALID_REQUEST"},
		{"TLS to the plain port", "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "control_byte", "INVALID_REQUEST"},
		{"HTTP/0.9", "GET /\r\n", "bad_version", "INVALID_REQUEST"},
		{"HTTP/2.0", "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "bad_version", "INVALID_REQUEST"},
		{"HTTP/1.2", "GET http://pay.example.test/ HTTP/1.2\r\n" + goodHost + "\r\n", "bad_version", "INVALID_REQUEST"},
		{"version in lower case", "GET http://pay.example.test/ http/1.1\r\n" + goodHost + "\r\n", "bad_version", "INVALID_REQUEST"},
		{"two spaces", "GET  http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "\r\n", "bad_version", "INVALID_REQUEST"},
		{"space in the target", "GET http://pay.example.test/a b HTTP/1.1\r\n" + goodHost + "\r\n", "bad_version", "INVALID_REQUEST"},
		{"target not ASCII", "GET http://pay.example.test/\xc3\xa4 HTTP/1.1\r\n" + goodHost + "\r\n", "bad_byte", "INVALID_TARGET"},
		{"fragment", "GET http://pay.example.test/#x HTTP/1.1\r\n" + goodHost + "\r\n", "fragment", "INVALID_TARGET"},
		{"bad escape", "GET http://pay.example.test/%zz HTTP/1.1\r\n" + goodHost + "\r\n", "malformed_target", "INVALID_TARGET"},
		{"other scheme", "GET ftp://pay.example.test/ HTTP/1.1\r\n" + goodHost + "\r\n", "target_form", "INVALID_TARGET"},
		{"no scheme", "GET pay.example.test/ HTTP/1.1\r\n" + goodHost + "\r\n", "target_form", "INVALID_TARGET"},
		{"empty authority", "GET http:///x HTTP/1.1\r\n" + goodHost + "\r\n", "empty_authority", "INVALID_TARGET"},
		{"asterisk with GET", "GET * HTTP/1.1\r\n" + goodHost + "\r\n", "asterisk_form", "INVALID_TARGET"},
		{"CONNECT with a path", "CONNECT pay.example.test:443/x HTTP/1.1\r\n" + goodHost + "\r\n", "target_form", "INVALID_TARGET"},
		{"CONNECT with a URL", "CONNECT https://pay.example.test/ HTTP/1.1\r\n" + goodHost + "\r\n", "target_form", "INVALID_TARGET"},
		{"CONNECT without port", "CONNECT pay.example.test HTTP/1.1\r\n" + goodHost + "\r\n", "port_missing", "INVALID_TARGET"},
		{"CONNECT port 0", "CONNECT pay.example.test:0 HTTP/1.1\r\n" + goodHost + "\r\n", "bad_port", "INVALID_TARGET"},
		{"CONNECT port too high", "CONNECT pay.example.test:65536 HTTP/1.1\r\n" + goodHost + "\r\n", "bad_port", "INVALID_TARGET"},
		{"CONNECT with user", "CONNECT a@pay.example.test:443 HTTP/1.1\r\n" + goodHost + "\r\n", "target_form", "INVALID_TARGET"},
		{"CONNECT with body", "CONNECT pay.example.test:443 HTTP/1.1\r\n" + goodHost + "Content-Length: 5\r\n\r\nhello", "connect_with_body", "INVALID_REQUEST"},
		{"CONNECT chunked", "CONNECT pay.example.test:443 HTTP/1.1\r\n" + goodHost + "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", "connect_with_body", "INVALID_REQUEST"},
		{"unknown expectation", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Expect: 200-ok\r\nContent-Length: 1\r\n\r\nx", "unknown_expectation", "INVALID_REQUEST"},
		{"framing trailer", "POST http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Transfer-Encoding: chunked\r\nTrailer: Content-Length\r\n\r\n0\r\n\r\n", "forbidden_trailer", "INVALID_REQUEST"},
		{"0.CL with Expect", "GET http://pay.example.test/ HTTP/1.1\r\n" + goodHost + "Expect: 100-continue, 100-continue\r\nContent-Length: 30\r\n\r\nGET / HTTP/1.1\r\nHost: evil\r\n\r\n", "unknown_expectation", "INVALID_REQUEST"},
	}
}
