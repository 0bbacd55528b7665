package telemetry

import (
	"encoding/hex"

	"go.opentelemetry.io/otel/trace"
)

// Parent is a span of the caller's: what a traceparent field names. The zero Parent is none.
type Parent struct {
	Trace [16]byte
	Span  [8]byte
}

// IsZero reports whether there is none.
func (p Parent) IsZero() bool { return p == Parent{} }

// Lengths of the field and of its parts (W3C Trace Context §3.2.2).
const (
	traceparentLength = 55
	traceAt, spanAt   = 3, 36
)

// ParseParent reads a traceparent field (W3C Trace Context §3.2). Of a later version it
// reads what version 00 has (§4.3). It reports false for anything else: the field is the
// caller's, and a bad one counts as none. The flags decide nothing: a caller cannot keep
// its actions out of the traces.
func ParseParent(s string) (Parent, bool) {
	var p Parent
	if len(s) < traceparentLength || s[2] != '-' || s[spanAt-1] != '-' || s[52] != '-' {
		return p, false
	}
	for _, part := range []string{s[:2], s[traceAt : spanAt-1], s[spanAt:52], s[53:traceparentLength]} {
		if !lowerHex(part) {
			return p, false
		}
	}
	switch version := s[:2]; {
	case version == "ff", version == "00" && len(s) != traceparentLength, len(s) > traceparentLength && s[traceparentLength] != '-':
		return p, false
	}
	_, _ = hex.Decode(p.Trace[:], []byte(s[traceAt:spanAt-1])) // lowerHex looked at it
	_, _ = hex.Decode(p.Span[:], []byte(s[spanAt:52]))
	if !trace.TraceID(p.Trace).IsValid() || !trace.SpanID(p.Span).IsValid() {
		return Parent{}, false
	}
	return p, true
}

func lowerHex(s string) bool {
	for i := range len(s) {
		if c := s[i]; (c < '0' || c > '9') && (c < 'a' || c > 'f') {
			return false
		}
	}
	return true
}
