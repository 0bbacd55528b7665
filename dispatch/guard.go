package dispatch

import (
	"bytes"
	"net/http"

	"waybill/dispatch/leak"
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

// begin takes the head of the final answer.
func (s *screen) begin(h http.Header) {
	if s.guard == nil {
		return
	}
	s.header(h)
	list, encoded := leak.ContentEncoding(h)
	if !encoded {
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
		return s.scratch
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
	return rest
}
