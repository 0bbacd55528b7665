package routes

import (
	"errors"
	"strings"

	"waybill/internal/control"
)

// ErrBadPath is wrapped by every error of CheckPath.
var ErrBadPath = errors.New("not an acceptable path")

// PathError says why a path was refused. Reason is one of a fixed set of tokens and
// holds nothing of the path. It ends as INVALID_TARGET (CONTRACT B1, case ID-06).
type PathError struct {
	Reason string
}

// Error returns a fixed text with the reason token.
func (e *PathError) Error() string { return "not an acceptable path: " + e.Reason }

// Unwrap returns ErrBadPath.
func (e *PathError) Unwrap() error { return ErrBadPath }

var (
	errPathRelative  = &PathError{"not_absolute"}
	errPathCharacter = &PathError{"forbidden_character"}
	errPathEscape    = &PathError{"bad_escape"}
	errPathNUL       = &PathError{"encoded_nul"}
	errPathBackslash = &PathError{"backslash"}
	errPathDouble    = &PathError{"double_slash"}
	errPathDots      = &PathError{"dot_segment"}
	errPathDeep      = &PathError{"encoded_too_often"}
)

// maxDecodeRounds bounds the work on a path such as "%25252525…": each round is
// linear and honest clients need one, or two behind a gateway.
const maxDecodeRounds = 4

// CheckPath refuses a raw path (without query) that some server on the way could
// read as another path than the one that is matched and sent, byte for byte:
// dot segments in plain, percent-encoded (also repeatedly, also with an encoded or
// backward slash around them, also in overlong UTF-8) or with parameters ("..;"),
// backslashes, a leading "//", control bytes, spaces, "#", "?", bytes outside
// ASCII, broken escapes and an encoded NUL. An encoded slash alone is fine
// ("/@scope%2fpkg"), and so is an encoded dot inside a name ("key%2erb").
//
// The empty path and "*" (of OPTIONS) pass. Errors are *PathError.
func CheckPath(raw string) error {
	if raw == "" || raw == "*" {
		return nil
	}
	if raw[0] != '/' {
		return errPathRelative
	}
	if len(raw) > 1 && raw[1] == '/' {
		return errPathDouble // "//host/…" is a network-path reference to some parsers
	}
	encoded, dots := false, false
	for i := 0; i < len(raw); i++ {
		switch c := raw[i]; {
		case c == '\\':
			return errPathBackslash
		case c <= ' ' || c >= 0x7f || c == '#' || c == '?':
			return errPathCharacter
		case c == '.':
			dots = true
		case c == '%':
			encoded = true
			v, ok := unhex(raw, i)
			if !ok {
				return errPathEscape
			}
			if v == 0 {
				return errPathNUL
			}
		}
	}
	if dots && hasDotSegment(raw) {
		return errPathDots
	}
	if !encoded {
		return nil
	}
	p := raw
	for range maxDecodeRounds {
		next, changed := decodeOnce(p)
		if !changed {
			return nil
		}
		if !control.Off("B1-encoded-dot-segments") && hasDotSegment(next) {
			return errPathDots
		}
		p = next
	}
	if _, changed := decodeOnce(p); changed {
		return errPathDeep
	}
	return nil
}

// unhex reads the escape that begins at s[i] == '%'.
func unhex(s string, i int) (byte, bool) {
	if i+2 >= len(s) {
		return 0, false
	}
	hi, ok1 := hexDigit(s[i+1])
	lo, ok2 := hexDigit(s[i+2])
	return hi<<4 | lo, ok1 && ok2
}

func hexDigit(c byte) (byte, bool) {
	switch {
	case '0' <= c && c <= '9':
		return c - '0', true
	case 'a' <= c && c <= 'f':
		return c - 'a' + 10, true
	case 'A' <= c && c <= 'F':
		return c - 'A' + 10, true
	}
	return 0, false
}

// decodeOnce removes one layer of percent-encoding and folds overlong two-byte
// forms of ASCII ("%c0%ae" for ".") as lenient decoders do. A "%" that begins no
// escape stays, as in such decoders.
func decodeOnce(s string) (string, bool) {
	if strings.IndexByte(s, '%') < 0 {
		return s, false
	}
	out := make([]byte, 0, len(s))
	changed := false
	for i := 0; i < len(s); i++ {
		c := s[i]
		if c == '%' {
			if v, ok := unhex(s, i); ok {
				c, changed = v, true
				i += 2
			}
		}
		if n := len(out); n > 0 && c&0xc0 == 0x80 && out[n-1]&0xfe == 0xc0 {
			out[n-1] = out[n-1]<<6 | c&0x3f
			continue
		}
		out = append(out, c)
	}
	return string(out), changed
}

// hasDotSegment reports whether a segment between slashes of either kind is "." or
// "..", parameters after ";" not counted (RFC 3986 section 3.3 and what servlet
// containers make of it).
func hasDotSegment(p string) bool {
	start := 0
	for i := 0; i <= len(p); i++ {
		if i < len(p) && p[i] != '/' && p[i] != '\\' {
			continue
		}
		seg := p[start:i]
		if k := strings.IndexByte(seg, ';'); k >= 0 {
			seg = seg[:k]
		}
		if seg == "." || seg == ".." {
			return true
		}
		start = i + 1
	}
	return false
}

// reading returns what a lenient server may make of a raw path: fully decoded,
// parameters dropped, slashes turned and merged. Only refusals are matched against
// it (see Match), never what is allowed.
func reading(raw string) string {
	plain := true
	for i := 0; i < len(raw) && plain; i++ {
		plain = raw[i] != '%' && raw[i] != ';' && (raw[i] != '/' || i == 0 || raw[i-1] != '/')
	}
	if plain {
		return raw
	}
	p := raw
	for range maxDecodeRounds {
		next, changed := decodeOnce(p)
		if !changed {
			break
		}
		p = next
	}
	out := make([]byte, 0, len(p))
	for i := 0; i < len(p); i++ {
		c := p[i]
		if c == ';' {
			for i+1 < len(p) && p[i+1] != '/' && p[i+1] != '\\' {
				i++
			}
			continue
		}
		if c == '\\' {
			c = '/'
		}
		if c == '/' && len(out) > 0 && out[len(out)-1] == '/' {
			continue
		}
		out = append(out, c)
	}
	return string(out)
}
