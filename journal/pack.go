package journal

import (
	"encoding/binary"
	"encoding/hex"
	"errors"
	"time"
)

// What is stored of an append is the JSON of its events, which is mostly the same names
// again and again. pack replaces the JSON strings that stand in packWords by one or two
// bytes, digests and instants by their bytes, and leaves everything else as it is: it is
// undone byte for byte, so what a frame means is still its JSON. Half of what the journal
// writes, syncs, seals and compacts was names.
//
// Outside of strings JSON has only ASCII from the space on (RFC 8259 section 2), so that
// all other bytes are free to stand for strings there.
const (
	packDigest  = 0x01 // 32 bytes: "sha256:" and their hexadecimal digits
	packInstant = 0x02 // nanoseconds since 1970, 8 bytes: RFC 3339 in UTC
	packSecond  = 0x03 // one byte: a word behind the first 128
	packWord    = 0x80 // and above: a word

	packedVersion = 2 // the version byte of a plaintext whose JSON is packed
)

const digestPrefix = "sha256:"

var errPacked = errors.New("journal: packed text is not well-formed")

// packIndex finds a word's place.
var packIndex = func() map[string]int {
	m := make(map[string]int, len(packWords))
	for i, w := range packWords {
		m[w] = i
	}
	return m
}()

// wordLengths has, for each first byte, a bit for each length of the words that begin
// with it: most strings are no word, and are not looked up.
var wordLengths = func() (m [256]uint64) {
	for _, w := range packWords {
		m[w[0]] |= 1 << len(w)
	}
	return m
}()

// pack appends the packed form of a JSON text as encoding/json writes it. ok is false
// when the text is not such a one; then dst is as it was, but for what lies behind it.
func pack(dst, text []byte) (out []byte, ok bool) {
	out = dst
	for i := 0; i < len(text); {
		c := text[i]
		if c != '"' {
			if c < ' ' || c >= packWord {
				return dst, false
			}
			out = append(out, c)
			i++
			continue
		}
		end := stringEnd(text, i)
		if end < 0 {
			return dst, false
		}
		out = packString(out, text[i:end])
		i = end
	}
	return out, true
}

// stringEnd returns the place behind the string that begins at i, or -1.
func stringEnd(text []byte, i int) int {
	for i++; i < len(text); i++ {
		switch text[i] {
		case '"':
			return i + 1
		case '\\':
			i++
		}
	}
	return -1
}

// packString appends one string, with its quotes.
func packString(out, s []byte) []byte {
	if out, ok := packKnown(out, s[1:len(s)-1]); ok {
		return out
	}
	return append(out, s...)
}

// The years of the instants that are packed: their nanoseconds fit into 64 bits.
const firstPackedYear, lastPackedYear = 1700, 2200

// packKnown appends what is stored instead of a string, given without its quotes. ok is
// false when the string itself is stored; then out is as it was, but for what lies behind it.
func packKnown[T string | []byte](out []byte, in T) (_ []byte, ok bool) {
	if len(in) > 0 && wordLengths[in[0]]>>len(in)&1 != 0 {
		if n, ok := packIndex[string(in)]; ok {
			if n < packWord {
				return append(out, byte(packWord+n)), true
			}
			return append(out, packSecond, byte(n-packWord)), true
		}
	}
	switch {
	case len(in) == len(digestPrefix)+64 && string(in[:len(digestPrefix)]) == digestPrefix:
		var b [32]byte
		bad := byte(0)
		for i := range b {
			hi, lo := lowerHex[in[len(digestPrefix)+2*i]], lowerHex[in[len(digestPrefix)+2*i+1]]
			b[i] = hi<<4 | lo
			bad |= hi | lo
		}
		if bad <= 0xf {
			return append(append(out, packDigest), b[:]...), true
		}
	case len(in) >= len("2006-01-02T15:04:05Z") && len(in) <= len(time.RFC3339Nano) && in[len(in)-1] == 'Z' && in[4] == '-' && in[10] == 'T':
		t, err := time.Parse(time.RFC3339Nano, string(in))
		if err != nil || t.Year() < firstPackedYear || t.Year() > lastPackedYear {
			break
		}
		var again [len(time.RFC3339Nano)]byte
		if string(t.UTC().AppendFormat(again[:0], time.RFC3339Nano)) == string(in) {
			return appendInstant(out, t), true
		}
	}
	return out, false
}

// appendInstant appends what is stored of an instant of those years.
func appendInstant(out []byte, t time.Time) []byte {
	return binary.BigEndian.AppendUint64(append(out, packInstant), uint64(t.UnixNano()))
}

// lowerHex has the values of the lower-case hexadecimal digits, and 0xff.
var lowerHex = func() (t [256]byte) {
	for c := range t {
		t[c] = 0xff
	}
	for v, c := range []byte("0123456789abcdef") {
		t[c] = byte(v)
	}
	return t
}()

// unpack returns the JSON text. Its error quotes nothing.
func unpack(b []byte) ([]byte, error) {
	out := make([]byte, 0, 3*len(b))
	for i := 0; i < len(b); {
		c := b[i]
		i++
		word := -1
		switch {
		case c == '"':
			end := stringEnd(b, i-1)
			if end < 0 {
				return nil, errPacked
			}
			out = append(out, b[i-1:end]...)
			i = end
		case c == packDigest:
			if len(b)-i < 32 {
				return nil, errPacked
			}
			out = append(append(out, '"'), digestPrefix...)
			out = append(hex.AppendEncode(out, b[i:i+32]), '"')
			i += 32
		case c == packInstant:
			if len(b)-i < 8 {
				return nil, errPacked
			}
			t := time.Unix(0, int64(binary.BigEndian.Uint64(b[i:]))).UTC()
			out = append(t.AppendFormat(append(out, '"'), time.RFC3339Nano), '"')
			i += 8
		case c == packSecond:
			if i == len(b) {
				return nil, errPacked
			}
			word = packWord + int(b[i])
			i++
		case c >= packWord:
			word = int(c) - packWord
		case c < ' ':
			return nil, errPacked
		default:
			out = append(out, c)
		}
		if word >= len(packWords) {
			return nil, errPacked
		}
		if word >= 0 {
			out = append(append(append(out, '"'), packWords[word]...), '"')
		}
	}
	return out, nil
}

// packWords is part of the format: words are only ever appended, up to 384. None needs
// escaping in JSON, or has 64 bytes. The first 128 take one byte.
var packWords = [...]string{
	// Of every request.
	"type", "at", "attempt", "ACTION_ACCEPTED", "accepted", "caller", "local", "method", "POST", "GET", "target", "protocol", "HTTP/1.1", "HTTP/2.0",
	"PREFLIGHT_VALIDATED", "bound", "route", "snapshot", "fingerprint", "repeatable", "body_bytes", "CREDENTIAL_AUTHORIZED", "credential", "id", "version", "mode",
	"DISPATCH_STARTED", "dispatch", "connection", "reused", "stage", "tls_handshake", "tcp_connect", "peer", "address", "server_name", "http/1.1", "h2", "tls_version",
	"TLS 1.3", "TLS 1.2", "leaf_digest", "chain_digest", "unresolved", "reconcile", "never", "backoff", "same_idempotency_key",
	"REQUEST_SENT", "sent", "headers", "complete", "REMOTE_RESPONSE_STARTED", "response", "status", "bytes", "expected_bytes", "framing", "content_length", "chunked", "http2",
	"REMOTE_RESPONSE_COMPLETE", "digest", "RESULT_COMMITTED", "ended", "phase", "remote_execution", "outcome", "committed", "retry", "code", "source", "remote_response",
	"result", "header", "Content-Length", "Content-Type", "Date", "application/json", "chunks", "expires_at", "trailer", "expires_ms",
	"validation", "credential_injection", "connection_setup", "result_delivery", "not_attempted", "rejected", "unknown", "transport_observed", "reason", "field",
	"ATTEMPT_FAILED", "ACTION_REFUSED", "ATTEMPT_RESOLVED", "ATTEMPT_INTERRUPTED", "CALLER_GONE", "RESULT_DELIVERED", "DELIVERY_FAILED",
	"request_id", "relaxed", "key", "in", "scope", "maker", "budget", "attempts", "until", "generation", "proof", "redacted", "exec", "header_raw", "trailer_raw",
	"PUT", "DELETE", "PATCH", "HEAD", "header:bearer", "hop", "proxy_status", "retry_after", "earlier_action", "dropped", "redirect_to", "redirect_from", "facts",
	// Two bytes from here on.
	"Server", "Cache-Control", "Vary", "Etag", "X-Request-Id", "Connection", "Last-Modified", "Location", "Content-Encoding", "Strict-Transport-Security",
	"application/json; charset=utf-8", "text/event-stream", "text/event-stream; charset=utf-8", "text/plain; charset=utf-8", "no-cache", "no-store", "gzip", "nosniff", "X-Content-Type-Options",
	"link", "kind", "of", "reviewed", "replaces", "background", "conditional", "recall", "values", "caller_name", "marker", "items", "count", "ids", "atomic", "untracked", "rule", "approval",
	"followed", "host_key", "proxy", "status_line", "hop_status", "speaks", "approved", "exit_status", "exit_signal", "core_dumped", "signal_message", "output_ended", "closed", "truncated",
	"stdout_bytes", "stderr_bytes", "stdout_digest", "stderr_digest", "stdin_bytes", "stdin_digest", "stdin_streamed", "stdin_ended", "refused_env",
	"tunnel", "authority", "bytes_out", "bytes_in", "blocked", "boot", "build", "config", "session", "name", "lease", "process", "for", "resolution", "covers", "query", "operator",
	"origin", "origin_seq", "seq", "job", "resource", "shown", "action", "state", "polls", "poll", "since", "next", "from", "list", "index", "held", "decision", "verdict", "by", "via",
	"TUNNEL_OPENED", "TUNNEL_CLOSED", "BOOT", "SESSION_OPENED", "SESSION_CLOSED", "LEASE_TAKEN", "LEASE_RENEWED", "LEASE_ENDED", "RETRY_STOPPED", "RECONCILED", "ATTESTED",
	"EVIDENCE_IMPORTED", "JOB_RECORDED", "JOB_POLLED", "JOB_ENDED", "ITEMS_RESOLVED", "UPGRADE_CLOSED", "APPROVAL_REQUESTED", "APPROVAL_DECIDED",
	"remote_query", "operator_attested", "dns", "proxy_tunnel", "ssh_transport", "ssh_host_key", "ssh_auth", "ssh_channel", "ssh_env", "after_correction", "fetch_result", "close_delimited",
	"channel_close", "switching_protocols", "SSH-2.0", "EXEC", "eof_and_status", "end_marker",
}
