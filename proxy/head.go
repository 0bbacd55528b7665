package proxy

import (
	"bytes"
	"net/url"
	"strconv"
	"strings"

	"golang.org/x/net/http/httpguts"

	"waybill/internal/control"
	"waybill/outcome"
)

// targetForm is the form of a request target (RFC 9112 §3.2). Zero is invalid.
type targetForm uint8

const (
	formInvalid targetForm = iota
	formOrigin
	formAbsolute
	formAuthority
	formAsterisk
)

// headInfo is what the raw head says that net/http does not pass on, or passes on
// changed: the Host field of an absolute-form request, and the bytes of the target.
type headInfo struct {
	method    string
	target    string // the bytes of the request target
	form      targetForm
	http10    bool
	host      string // the one Host field; "" when there was none
	authority string // of an absolute-form or authority-form target, unchanged
	chunked   bool
	length    int64 // of the body, when not chunked
	upgrade   bool  // WebSocket is asked for: what follows may be no HTTP
}

// violation is why a head was refused. Texts are fixed: nothing of the request is in them.
type violation struct {
	code   outcome.Code
	field  string // CONTRACT B2
	reason string
	detail string
	// head is what was understood before the violation; only whole, valid parts.
	head headInfo
	// credentials is the Proxy-Authorization value when there was exactly one.
	credentials string
}

func refuse(code outcome.Code, field, reason, detail string) *violation {
	return &violation{code: code, field: field, reason: reason, detail: detail}
}

func badRequest(field, reason, detail string) *violation {
	return refuse(outcome.CodeInvalidRequest, field, reason, detail)
}

// maxFields bounds the number of fields of a head.
const maxFields = 500

// maxMethodBytes bounds the length of a method token.
const maxMethodBytes = 32

// The violations that are found byte by byte, before the head is complete.
var (
	errBareLF  = badRequest("request.head", "bare_lf", "A line of the request head ends in LF without CR.")
	errBareCR  = badRequest("request.head", "bare_cr", "The request head holds a CR that does not end a line.")
	errControl = badRequest("request.head", "control_byte", "The request head holds a control byte.")
	errMethod  = badRequest("request.method", "bad_method", "The request line does not begin with a method.")
	errTooBig  = refuse(outcome.CodePayloadLimit, "request.headers", "head_too_large", "The request head is larger than this proxy accepts.")
	errCutHead = badRequest("request.head", "incomplete_head", "The request head did not end in time.")
)

// headScanner finds the end of a head in bytes that arrive piecemeal. It refuses
// what no later byte can make right at once, so that a client that sends garbage
// and waits gets its answer.
type headScanner struct {
	scanned   int // bytes of the buffer already looked at
	lineStart int
	lines     int
	first     headInfo // what the request line says, once it ended
}

// scan continues over buf, which begins with the head. It returns the length of the
// complete head, or 0 when more bytes are needed.
func (s *headScanner) scan(buf []byte, limit int) (int, *violation) {
	for s.scanned < len(buf) {
		i := s.scanned
		if i >= limit {
			return 0, errTooBig
		}
		b := buf[i]
		switch {
		case b == '\n':
			if i == 0 || buf[i-1] != '\r' {
				return 0, errBareLF
			}
			line := buf[s.lineStart : i-1]
			s.scanned, s.lineStart = i+1, i+1
			if len(line) == 0 {
				if s.lines == 0 {
					return 0, errMethod
				}
				return i + 1, nil
			}
			s.lines++
			if s.lines == 1 {
				// A bad request line is refused before the rest of the head is waited for.
				var v *violation
				if s.first, v = checkRequestLine(line); v != nil {
					return 0, v
				}
			}
			if s.lines > maxFields+1 {
				return 0, errTooBig
			}
			continue
		case i > 0 && buf[i-1] == '\r':
			return 0, errBareCR
		case s.lines > 0 && b > 0x20 && b < 0x7f:
			// Most of a head: what follows it in the line without a control byte is passed in
			// one go, up to where the checks above have something to say.
			for i+1 < min(len(buf), limit) && buf[i+1] >= 0x20 && buf[i+1] != 0x7f {
				i++
			}
		case b == '\r' || b == '\t':
		case b < 0x20 || b == 0x7f:
			return 0, errControl
		case s.lines == 0 && !httpguts.IsTokenRune(rune(b)) && bytes.IndexByte(buf[:i], ' ') < 0 && (b != ' ' || i == 0):
			return 0, errMethod
		case s.lines == 0 && i >= maxMethodBytes && bytes.IndexByte(buf[:i+1], ' ') < 0:
			return 0, errMethod
		}
		s.scanned = i + 1
	}
	return 0, nil
}

// checkRequestLine reads the request line (RFC 9112 §3), without its CRLF.
func checkRequestLine(line []byte) (headInfo, *violation) {
	var h headInfo
	method, rest, ok := strings.Cut(string(line), " ")
	target, version, ok2 := strings.Cut(rest, " ")
	if !ok || len(method) > maxMethodBytes || !httpguts.ValidHeaderFieldName(method) {
		return h, errMethod
	}
	switch {
	case !ok2:
		return h, badRequest("request.version", "bad_version", "The request line names no HTTP version.")
	case version == "HTTP/1.0":
		h.http10 = true
	case version != "HTTP/1.1":
		return h, badRequest("request.version", "bad_version", "Only HTTP/1.1 and HTTP/1.0 are understood here.")
	}
	h.method = method
	form, authority, v := checkTarget(method, target)
	if v != nil {
		v.head = h
		return h, v
	}
	h.target, h.form, h.authority = target, form, authority
	return h, nil
}

func badTarget(reason, detail string) *violation {
	return refuse(outcome.CodeInvalidTarget, "request.target", reason, detail)
}

// checkTarget tells the form of a target and returns the bytes of its authority.
// What it accepts is accepted by url.ParseRequestURI, as net/http calls it.
func checkTarget(method, target string) (targetForm, string, *violation) {
	if target == "" {
		return formInvalid, "", badTarget("empty_target", "The request line names no target.")
	}
	for i := range len(target) {
		if b := target[i]; b <= 0x20 || b >= 0x7f {
			return formInvalid, "", badTarget("bad_byte", "The request target holds a byte that must be percent-encoded.")
		} else if b == '#' {
			return formInvalid, "", badTarget("fragment", "A request target has no fragment.")
		}
	}
	if method == "CONNECT" {
		return checkAuthorityForm(target)
	}
	if target == "*" {
		if method != "OPTIONS" {
			return formInvalid, "", badTarget("asterisk_form", "The target \"*\" goes with OPTIONS only.")
		}
		return formAsterisk, "", nil
	}
	form, authority := formOrigin, ""
	if target[0] != '/' {
		scheme, rest, ok := strings.Cut(target, "://")
		if !ok || !strings.EqualFold(scheme, "http") && !strings.EqualFold(scheme, "https") {
			return formInvalid, "", badTarget("target_form", "Send an absolute http:// or https:// URL, or a path.")
		}
		form, authority = formAbsolute, rest
		if i := strings.IndexAny(rest, "/?"); i >= 0 {
			authority = rest[:i]
		}
		if authority == "" {
			return formInvalid, "", badTarget("empty_authority", "The URL names no host.")
		}
	}
	if form == formOrigin && strings.IndexByte(target, '%') < 0 {
		return form, authority, nil // all that could be malformed in a path is its encoding
	}
	if _, err := url.ParseRequestURI(target); err != nil {
		return formInvalid, "", badTarget("malformed_target", "The request target is not a valid URL.")
	}
	return form, authority, nil
}

// checkAuthorityForm reads the target of a CONNECT: host ":" port (RFC 9112 §3.2.3).
func checkAuthorityForm(target string) (targetForm, string, *violation) {
	if strings.ContainsAny(target, "/?@\\%") {
		return formInvalid, "", badTarget("target_form", "CONNECT takes host:port and nothing else.")
	}
	i := strings.LastIndexByte(target, ':')
	if i <= 0 || strings.HasSuffix(target, "]") {
		return formInvalid, "", badTarget("port_missing", "CONNECT takes host:port; the port is missing.")
	}
	if port, err := strconv.ParseUint(target[i+1:], 10, 16); err != nil || port == 0 || target[i+1] == '+' {
		return formInvalid, "", badTarget("bad_port", "The port is not a number from 1 to 65535.")
	}
	u, err := url.ParseRequestURI("http://" + target)
	if err != nil || u.Host != target {
		return formInvalid, "", badTarget("malformed_target", "CONNECT takes host:port and nothing else.")
	}
	return formAuthority, target, nil
}

// checkHead validates a complete head, request line to empty line, and returns its
// framing (RFC 9112 §6). Everything it accepts is accepted by net/http with the same
// framing; a fuzz target and a differential test hold it to that. inTunnel refuses
// CONNECT.
func checkHead(head []byte, inTunnel bool) (headInfo, *violation) {
	line, rest, _ := bytes.Cut(head, crlf)
	h, v := checkRequestLine(line)
	if v != nil {
		return h, v
	}
	return checkFields(h, rest, inTunnel)
}

// checkFields is checkHead behind the request line.
func checkFields(h headInfo, rest []byte, inTunnel bool) (headInfo, *violation) {
	f, v := readFields(rest, &h)
	if v == nil {
		v = f.check(&h, inTunnel)
	}
	if v != nil {
		// The shared values above are never changed: each refusal carries its own head.
		c := *v
		c.head, c.credentials = h, f.credentials()
		return h, &c
	}
	return h, nil
}

var crlf = []byte("\r\n")

// fields are the fields of a head that decide framing and destination.
type fields struct {
	length, te, host, expect, trailer, proxyAuth []string
}

func (f *fields) credentials() string {
	if len(f.proxyAuth) == 1 {
		return f.proxyAuth[0]
	}
	return ""
}

// readFields reads the field lines after the request line, up to the empty line.
func readFields(head []byte, h *headInfo) (fields, *violation) {
	var f fields
	// One copy of all that is looked at; what is kept of it is copied again, since a head
	// holds credentials.
	rest := string(head)
	for {
		line, after, ok := strings.Cut(rest, "\r\n")
		if !ok || len(line) == 0 {
			return f, nil
		}
		rest = after
		if line[0] == ' ' || line[0] == '\t' {
			return f, badRequest("request.headers", "obs_fold", "A header field is folded over two lines.")
		}
		n, value, ok := strings.Cut(line, ":")
		if !ok {
			return f, badRequest("request.headers", "no_colon", "A header line has no colon.")
		}
		if !httpguts.ValidHeaderFieldName(n) {
			reason := "bad_field_name"
			if t := strings.TrimRight(n, " \t"); len(t) < len(n) {
				reason = "space_before_colon"
			}
			return f, badRequest("request.headers", reason, "The name of a header field is not a token directly before its colon.")
		}
		v := strings.Trim(value, " \t")
		if !httpguts.ValidHeaderFieldValue(v) {
			return f, badRequest("request.headers", "control_byte", "The value of a header field holds a control byte.")
		}
		switch {
		case strings.EqualFold(n, "Content-Length"):
			f.length = append(f.length, v)
		case strings.EqualFold(n, "Transfer-Encoding"):
			f.te = append(f.te, v)
		case strings.EqualFold(n, "Host"):
			v = strings.Clone(v)
			f.host = append(f.host, v)
			h.host = v
		case strings.EqualFold(n, "Expect"):
			f.expect = append(f.expect, v)
		case strings.EqualFold(n, "Trailer"):
			f.trailer = append(f.trailer, v)
		case strings.EqualFold(n, "Proxy-Authorization"):
			f.proxyAuth = append(f.proxyAuth, strings.Clone(v))
		case strings.EqualFold(n, "Upgrade"):
			h.upgrade = h.upgrade || strings.Contains(strings.ToLower(v), "websocket")
		}
	}
}

// check applies the rules on framing and destination and sets the framing in h.
func (f *fields) check(h *headInfo, inTunnel bool) *violation {
	if v := f.checkHost(h); v != nil {
		return v
	}
	if v := f.checkFraming(h); v != nil {
		return v
	}
	// net/http answers an unknown expectation by itself, before any handler.
	if len(f.expect) > 1 || len(f.expect) == 1 && !strings.EqualFold(f.expect[0], "100-continue") {
		return badRequest("request.headers.expect", "unknown_expectation", "The only expectation that is understood is 100-continue.")
	}
	if h.chunked {
		for _, v := range f.trailer {
			for _, key := range strings.Split(v, ",") {
				switch strings.ToLower(strings.TrimSpace(key)) {
				case "transfer-encoding", "trailer", "content-length":
					return badRequest("request.headers.trailer", "forbidden_trailer", "A framing field cannot be a trailer field.")
				}
			}
		}
	}
	if h.method != "CONNECT" {
		return nil
	}
	if inTunnel {
		return refuse(outcome.CodeUnsupportedAction, "request.method", "nested_connect", "A tunnel inside a tunnel is not carried.")
	}
	if h.chunked || h.length != 0 {
		return badRequest("request.headers.content-length", "connect_with_body", "A CONNECT request has no body.")
	}
	return nil
}

func (f *fields) checkHost(h *headInfo) *violation {
	if len(f.host) > 1 {
		h.host = ""
		return badRequest("request.headers.host", "duplicate_host", "The request has more than one Host field.")
	}
	if len(f.host) == 0 {
		if !h.http10 {
			return badRequest("request.headers.host", "missing_host", "An HTTP/1.1 request needs a Host field.")
		}
		return nil
	}
	if !httpguts.ValidHostHeader(f.host[0]) {
		h.host = ""
		return refuse(outcome.CodeInvalidTarget, "request.headers.host", "malformed_host", "The Host field is not host or host:port.")
	}
	return nil
}

func (f *fields) checkFraming(h *headInfo) *violation {
	if len(f.te) > 0 {
		const field = "request.headers.transfer-encoding"
		switch {
		case h.http10:
			return badRequest(field, "te_in_http10", "HTTP/1.0 has no transfer codings.")
		case len(f.length) > 0 && !control.Off("B1-te-and-length"):
			return badRequest(field, "te_and_length", "The request has both Transfer-Encoding and Content-Length.")
		case len(f.te) > 1 || !strings.EqualFold(f.te[0], "chunked"):
			return badRequest(field, "unknown_te", "The only transfer coding that is understood is chunked.")
		}
		h.chunked, h.length = true, -1
		return nil
	}
	if len(f.length) == 0 {
		return nil
	}
	const field = "request.headers.content-length"
	if len(f.length) > 1 {
		return badRequest(field, "duplicate_length", "The request has more than one Content-Length field.")
	}
	s := f.length[0]
	if s == "" || strings.Trim(s, "0123456789") != "" {
		return badRequest(field, "bad_length", "The Content-Length is not a number.")
	}
	n, err := strconv.ParseInt(s, 10, 64)
	if err != nil {
		return badRequest(field, "bad_length", "The Content-Length is too large.")
	}
	h.length = n
	return nil
}

// looseCredentials finds the Proxy-Authorization value of a head that is refused
// and may be incomplete: the caller is asked for, not the request. More than one
// gives none.
func looseCredentials(buf []byte) string {
	found := ""
	for line := range bytes.Lines(buf) {
		name, value, ok := bytes.Cut(line, []byte(":"))
		if !ok || !bytes.EqualFold(bytes.TrimSpace(name), []byte("Proxy-Authorization")) || !bytes.HasSuffix(line, []byte("\n")) {
			continue
		}
		if found != "" {
			return ""
		}
		found = string(bytes.TrimSpace(value))
	}
	return found
}
