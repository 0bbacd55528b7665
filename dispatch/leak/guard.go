// Package leak finds an injected secret in what an upstream answers, and masks it
// (CONTRACT C5, R4). It is pure: no clock, no I/O, no knowledge of routes.
//
// What is found, for every secret of at least MinSecretBytes:
//
//   - the bytes themselves, each of them literal or escaped: percent-encoded in
//     either case and up to three times over ("%2F", "%252f", RFC 3986 §2.1), "+" for
//     a space, as JSON writes it ("\/", "\u002f", RFC 8259 §7) also inside a JSON
//     string inside a JSON string, or as an HTML character reference ("&amp;",
//     "&#38;", "&#x26;"). Escaped and literal bytes may be mixed in any way;
//   - base64 of any text that contains the secret (RFC 4648 §4 and §5, padded or not,
//     at each of the three alignments, and wrapped into lines), its "+", "/", "-" and
//     "_" escaped or not. The characters at both ends that hold bits of the secret and
//     of its neighbours are masked too;
//   - base 16, in either case.
//
// A masked byte becomes '*', so that lengths stay true.
//
// What is not found: a part of the secret (but for the parts of a Part), other encodings (an upstream that holds
// the secret and means to betray it can always invent one), text in other character
// sets than those that contain ASCII, and archives that are content and not a content
// coding.
package leak

import (
	"bytes"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"sync"
)

// MinSecretBytes is the length of the shortest secret that is looked for, in bytes.
// A shorter one would be found by chance, and masking a "1234" inside of a number
// falsifies a result without anybody seeing it. The rendered field value of a short
// secret ("Bearer 1234") is long enough, and is found as a whole.
const MinSecretBytes = 8

const redacted = "[redacted]"

// Guard knows the secrets of one action. It is immutable and safe for concurrent
// use. The nil Guard knows none, finds nothing, and costs nothing. A Guard prints as
// [redacted].
type Guard struct {
	open func() *known // what prints by reflection, unexported fields included, meets a function
}

// known is what a Guard knows.
type known struct {
	sp       *spellingTable
	patterns []pattern
	starts   [256]uint64 // by first byte: the patterns it may begin, by their index modulo 64
	filter   *filter
}

// pattern is one form of a secret: a sequence of symbols, each of which may be
// spelled in several ways.
type pattern struct{ symbols []symbol }

// New returns the Guard of the secrets: the bytes of each credential, and the field
// values rendered from them. It copies them. Secrets shorter than MinSecretBytes are
// left out, and those in which another one is contained as it is, since finding the
// inner one is enough. New returns nil if nothing is left. It takes some microseconds;
// actions under the same credential may share a Guard.
func New(secrets ...[]byte) *Guard {
	kept := make([][]byte, 0, len(secrets))
	for _, s := range secrets {
		if len(s) >= MinSecretBytes {
			kept = append(kept, s)
		}
	}
	slices.SortStableFunc(kept, func(a, b []byte) int { return len(a) - len(b) })
	n := 0
	for _, s := range kept {
		if !slices.ContainsFunc(kept[:n], func(inner []byte) bool { return bytes.Contains(s, inner) }) {
			kept[n] = s
			n++
		}
	}
	if n == 0 {
		return nil
	}
	k := &known{sp: spellings(), patterns: make([]pattern, 0, 5*n)}
	for _, s := range kept[:n] {
		k.add(textSymbols(s))
		for alignment := range 3 {
			k.add(base64Symbols(s, alignment))
		}
		k.add(hexSymbols(s))
	}
	k.filter = newFilter(k.sp, k.patterns)
	return &Guard{open: func() *known { return k }}
}

func (k *known) add(symbols []symbol) {
	bit := uint64(1) << (len(k.patterns) % 64)
	k.patterns = append(k.patterns, pattern{symbols})
	for _, e := range k.sp.edgesOf(k.sp.roots[symbols[0]]) {
		k.starts[e.c] |= bit
	}
}

// MaskHeader masks the values of all fields of h in place, those of trailers and of
// Location (CONTRACT R4) like any other; names are left alone. It returns the number
// of places that were masked.
func (g *Guard) MaskHeader(h http.Header) (masked int) {
	if g == nil {
		return 0
	}
	for _, values := range h {
		for i, v := range values {
			if s, n := g.MaskString(v); n > 0 {
				values[i] = s
				masked += n
			}
		}
	}
	return masked
}

// MaskString masks s, for status lines, evidence and the like, and returns the
// number of places that were masked. A text that will be cut is masked before: a
// part of a secret is not found.
func (g *Guard) MaskString(s string) (string, int) {
	if g == nil || len(s) < MinSecretBytes {
		return s, 0
	}
	w := pool.Get().(*whole)
	defer pool.Put(w)
	w.buf = append(w.buf[:0], s...)
	n := w.mask(g.open(), w.buf)
	if n > 0 {
		s = string(w.buf)
	}
	clear(w.buf)
	return s, n
}

// MaskBytes masks p, a whole text, in place, and returns the number of places that
// were masked.
func (g *Guard) MaskBytes(p []byte) (masked int) {
	if g == nil || len(p) < MinSecretBytes {
		return 0
	}
	w := pool.Get().(*whole)
	defer pool.Put(w)
	return w.mask(g.open(), p)
}

// whole is what it takes to look through one whole text.
type whole struct {
	scan scanner
	buf  []byte
}

var pool = sync.Pool{New: func() any { return new(whole) }}

func (w *whole) mask(k *known, p []byte) int {
	w.scan.reset(k)
	w.scan.scan(p)
	var m marker
	m.mask(p, 0, w.scan.spans)
	w.scan.reset(nil)
	return m.count
}

// Stream masks a body that comes in pieces. It belongs to one goroutine. The nil
// Stream passes everything on. It prints as [redacted].
type Stream struct{ open func() *stream }

type stream struct {
	scan scanner
	held []byte
	m    marker
}

// Stream returns a Stream for one body. That of the nil Guard is nil.
func (g *Guard) Stream() *Stream {
	if g == nil {
		return nil
	}
	st := &stream{}
	st.scan.reset(g.open())
	return &Stream{open: func() *stream { return st }}
}

// Part returns a Stream for a body that is a part of a larger one (RFC 9110 §14): at its
// beginning the end of a secret is masked, too, once there is enough of it to tell the secret.
func (g *Guard) Part() *Stream {
	s := g.Stream()
	if s != nil {
		s.open().scan.part = true
	}
	return s
}

// FlushPart is Flush at the end of a part: what is held back is masked where it begins a
// secret and there is enough of it to tell, and where all of the part is within a secret,
// of which many such parts would tell the whole.
func (s *Stream) FlushPart(dst []byte) []byte {
	if s == nil {
		return dst
	}
	st := s.open()
	if at := st.scan.told(); at >= 0 {
		first := st.scan.pos - int64(len(st.held))
		st.m.mask(st.held, first, []span{{at, st.scan.pos}})
	}
	return s.Flush(dst)
}

// Write takes the next piece of the body and appends to dst what may be released
// now: everything but a tail that may still be the beginning of a secret. The bytes
// of dst's array behind the result are cleared if a tail is kept. p is not changed
// and not retained; it must not overlap dst.
func (s *Stream) Write(dst, p []byte) []byte {
	if s == nil {
		return append(dst, p...)
	}
	return s.open().write(dst, p)
}

func (s *stream) write(dst, p []byte) []byte {
	if len(p) == 0 {
		return dst
	}
	at := len(dst)
	first := s.scan.pos - int64(len(s.held)) // offset in the body of dst[at]
	dst = append(dst, s.held...)
	dst = append(dst, p...)
	s.scan.scan(p)
	s.m.mask(dst[at:], first, s.scan.spans)
	end := at + int(s.scan.settled()-first)
	if end == len(dst) {
		s.held = s.held[:0]
		return dst
	}
	s.held = append(s.held[:0], dst[end:]...)
	clear(dst[end:])
	return dst[:end]
}

// Flush appends what was held back, at the end of a whole body: it was no secret. A
// body that broke off is not flushed, since what is held back may be most of one.
// The Stream begins anew.
func (s *Stream) Flush(dst []byte) []byte {
	if s == nil {
		return dst
	}
	st := s.open()
	dst = append(dst, st.held...)
	clear(st.held[:cap(st.held)])
	st.held = st.held[:0]
	st.scan.reset(st.scan.known)
	st.m.end = 0
	return dst
}

// Tail returns what is held back at present, valid until the next call. It may be the
// beginning of a secret: whoever lets any of it go decides how much that may be.
func (s *Stream) Tail() []byte {
	if s == nil {
		return nil
	}
	return s.open().held
}

// Held is the number of bytes held back at present.
func (s *Stream) Held() int {
	if s == nil {
		return 0
	}
	return len(s.open().held)
}

// Masked is the number of places masked so far. It does not depend on where the
// body was cut.
func (s *Stream) Masked() int {
	if s == nil {
		return 0
	}
	return s.open().m.count
}

// marker overwrites what was found. Secrets that overlap are one place.
type marker struct {
	count int
	end   int64 // of the last place
}

// mask overwrites spans in buf, whose first byte has the offset first.
func (m *marker) mask(buf []byte, first int64, spans []span) {
	for _, sp := range spans {
		if sp.start >= m.end {
			m.count++
		}
		m.end = max(m.end, sp.end)
		place := buf[sp.start-first : sp.end-first]
		for i := range place {
			place[i] = '*'
		}
	}
}

// A secret in parts is the secret (CONTRACT C2): nothing here prints what it holds.

// Format prints [redacted].
func (g *Guard) Format(f fmt.State, _ rune) { fmt.Fprint(f, redacted) }

// LogValue is [redacted].
func (g *Guard) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText is [redacted].
func (g *Guard) MarshalText() ([]byte, error) { return []byte(redacted), nil }

// Format prints [redacted].
func (s *Stream) Format(f fmt.State, _ rune) { fmt.Fprint(f, redacted) }

// LogValue is [redacted].
func (s *Stream) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText is [redacted].
func (s *Stream) MarshalText() ([]byte, error) { return []byte(redacted), nil }
