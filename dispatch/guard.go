package dispatch

import (
	"bytes"
	"net/http"
	"strconv"
	"strings"

	"waybill/dispatch/leak"
	"waybill/internal/control"
)

// maxHeld bounds the bytes of an encoded answer that are held back because nobody
// knows yet whether they are safe. Beyond it the result is blocked.
const maxHeld = 8 << 20

// screen keeps the action's secrets out of its own answer (CONTRACT C5), before
// anything is stored or relayed. The zero screen lets everything pass.
type screen struct {
	guard *leak.Guard
	block bool // leak: block

	stream    *leak.Stream    // of a body that can be masked in place
	inspector *leak.Inspector // of an encoded one
	held      bytes.Buffer    // of an encoded one: not known to be safe
	released  int64
	scratch   []byte
	part      bool // the body is a part of a larger one
	early     int  // bytes of the stream's tail that are out already

	masked int    // places
	reason string // why the result is blocked; "": it is not
}

// found counts masked places and blocks where the route wants that.
func (s *screen) found(n int) {
	s.masked += n
	if n > 0 && s.block {
		s.stop("secret_in_answer")
	}
}

func (s *screen) stop(reason string) {
	if s.reason == "" {
		s.reason = reason
	}
	s.held.Reset()
}

// interim masks the fields of a 1xx answer in place and reports whether it may be
// passed on. It is called while the answer is on its way, from another goroutine than
// the rest, and changes nothing of the screen.
func (s *screen) interim(h http.Header) bool { return s.guard.MaskHeader(h) == 0 || !s.block }

// header masks the fields of a head or a trailer in place.
func (s *screen) header(h http.Header) { s.found(s.guard.MaskHeader(h)) }

// begin takes the head of the final answer. A body that is a part of a larger one can be put
// together with others: what it has of a secret at its ends is masked, and what cannot be
// searched by itself – an encoded part, several parts – is blocked.
func (s *screen) begin(status int, h http.Header) {
	if s.guard == nil {
		return
	}
	s.header(h)
	list, encoded := leak.ContentEncoding(h)
	part, single := partOf(status, h)
	s.part = part && !control.Off("C5-parts")
	switch {
	case s.part && (encoded || !single):
		s.stop("not_inspected")
		return
	case s.part:
		s.stream = s.guard.Part()
		return
	case !encoded:
		s.stream = s.guard.Stream()
		return
	}
	i, err := s.guard.Inspector(list)
	switch {
	case err != nil:
		s.stop("content_coding")
	case i.Opaque():
		// Nothing can be said of a coding that is not known (C5).
		_, _ = i.Close()
		s.stop("content_coding")
	default:
		s.inspector = i
	}
}

// body returns what may be stored and relayed after the next bytes came. The slice is
// valid until the next call.
func (s *screen) body(p []byte) []byte {
	switch {
	case s.guard == nil:
		return p
	case s.reason != "":
		return nil
	case s.stream != nil:
		before := s.stream.Masked()
		s.scratch = s.stream.Write(s.scratch[:0], p)
		if s.found(s.stream.Masked() - before); s.reason != "" {
			return nil
		}
		return s.unseen(s.scratch)
	}
	found, err := s.inspector.Write(p)
	if s.judge(found, err); s.reason != "" {
		return nil
	}
	s.held.Write(p)
	if n := s.inspector.Safe() - s.released; n > 0 {
		return s.release(int(n))
	}
	if s.held.Len() > maxHeld {
		s.stop("not_inspected")
	}
	return nil
}

// unseen leaves out what rested let go of.
func (s *screen) unseen(p []byte) []byte {
	n := min(s.early, len(p))
	s.early -= n
	return p[n:]
}

// rested returns what is let go of a body that rests: a beginning of a secret that is too short
// to tell. The search goes on behind it.
func (s *screen) rested() []byte {
	if s.reason != "" {
		return nil
	}
	tail := s.stream.Tail()
	if len(tail) >= tellable || len(tail) <= s.early {
		return nil
	}
	p := tail[s.early:]
	s.early = len(tail)
	return p
}

// partOf says whether a body is a part of a larger one, cut at some byte (RFC 9110 §14.4, §15.3.7),
// and whether it is a single one. Ranges of other units are of whole things.
func partOf(status int, h http.Header) (part, single bool) {
	ranges := h["Content-Range"]
	switch {
	case status == http.StatusPartialContent && len(ranges) != 1, len(ranges) > 1:
		return true, false // multipart/byteranges, or nobody knows what
	case status/100 != 2 || len(ranges) == 0:
		return false, false
	}
	unit, span, _ := strings.Cut(strings.TrimSpace(ranges[0]), " ")
	if !strings.EqualFold(unit, "bytes") {
		return false, false
	}
	// One that is all there is: "bytes=0-" is asked for by those that resume.
	span, size, _ := strings.Cut(span, "/")
	first, last, _ := strings.Cut(span, "-")
	n, err := strconv.ParseInt(size, 10, 64)
	return err != nil || first != "0" || last != strconv.FormatInt(n-1, 10), true
}

func (s *screen) judge(found bool, err error) {
	switch {
	case found:
		s.stop("secret_in_answer")
	case err != nil:
		s.stop("not_inspected")
	}
}

func (s *screen) release(n int) []byte {
	out := s.held.Next(n)
	s.released += int64(len(out))
	return out
}

// end returns the rest of a whole body. What was held back of a body that broke off
// stays held back: it may be most of a secret. cut: it broke off behind its end marker,
// and counts as whole; what may be a piece of a secret is masked.
func (s *screen) end(complete, cut bool) []byte {
	var rest []byte
	if s.inspector != nil {
		found, err := s.inspector.Close()
		s.judge(found, err)
		if complete && s.reason == "" {
			rest = s.release(s.held.Len())
		}
		return rest
	}
	if s.stream != nil && complete && s.reason == "" {
		if s.part {
			before := s.stream.Masked()
			rest = s.stream.FlushPart(s.scratch[:0])
			if s.found(s.stream.Masked() - before); s.reason != "" {
				return nil
			}
			return rest
		}
		rest = s.stream.Flush(s.scratch[:0])
		if cut && len(rest) >= tellable {
			for i := range rest {
				rest[i] = '*'
			}
			if s.found(1); s.reason != "" {
				return nil
			}
		}
	}
	return s.unseen(rest)
}
