package proxy

import (
	"errors"

	"golang.org/x/net/http/httpguts"
)

// errBadChunk is what a request body ends with when its chunked framing is broken
// (RFC 9112 §7.1): an incomplete body, never a clean end (CONTRACT G2 for requests).
var errBadChunk = errors.New("proxy: malformed chunked framing in the request body")

const (
	maxChunkDigits  = 15   // net/http takes 16; 15 keep the size in an int64
	maxChunkExt     = 1024 // of one chunk line; net/http takes 4096
	maxTrailerBytes = 3072 // net/http needs the trailer section inside its 4096 byte buffer
)

// chunkState is where in a chunked body the follower stands.
type chunkState uint8

const (
	chunkSize chunkState = iota
	chunkExt
	chunkSizeLF
	chunkData
	chunkDataCR
	chunkDataLF
	trailerStart
	trailerName
	trailerValue
	trailerLF
	chunkEndLF
)

// chunkFollower follows a chunked body without changing it, to know where the next
// head begins. It accepts a subset of what net/http accepts. The zero value is at
// the start of a body.
type chunkFollower struct {
	state  chunkState
	size   int64 // of the chunk; then what is left of it
	digits int
	used   int // bytes of the extension, or of the trailer section
}

// feed follows p and returns how many of its bytes belong to the body, and whether
// the body ended with them. After errBadChunk the follower is of no further use.
func (f *chunkFollower) feed(p []byte) (n int, done bool, err error) {
	for n < len(p) {
		if f.state == chunkData {
			k := min(int64(len(p)-n), f.size)
			n += int(k)
			f.size -= k
			if f.size == 0 {
				f.state = chunkDataCR
			}
			continue
		}
		done, err = f.step(p[n])
		if err != nil {
			return n, false, err
		}
		n++
		if done {
			return n, true, nil
		}
	}
	return n, false, nil
}

// step takes one byte outside chunk data.
func (f *chunkFollower) step(b byte) (done bool, err error) {
	switch f.state {
	case chunkSize:
		return false, f.stepSize(b)
	case chunkExt:
		if b == '\r' {
			f.state = chunkSizeLF
			return false, nil
		}
		f.used++
		if f.used > maxChunkExt || !fieldValueByte(b) {
			return false, errBadChunk
		}
		return false, nil
	case chunkSizeLF:
		f.state = chunkData
		if f.size == 0 {
			f.state, f.used = trailerStart, 0
		}
		f.digits = 0
		return false, expect(b, '\n')
	case chunkDataCR:
		f.state = chunkDataLF
		return false, expect(b, '\r')
	case chunkDataLF:
		f.state, f.used = chunkSize, 0
		return false, expect(b, '\n')
	case trailerStart, trailerName, trailerValue, trailerLF, chunkEndLF:
		return f.stepTrailer(b)
	case chunkData:
		return false, errBadChunk // feed consumes data itself
	default:
		return false, errBadChunk
	}
}

func (f *chunkFollower) stepSize(b byte) error {
	switch {
	case b >= '0' && b <= '9':
		b -= '0'
	case b >= 'a' && b <= 'f':
		b -= 'a' - 10
	case b >= 'A' && b <= 'F':
		b -= 'A' - 10
	case f.digits > 0 && b == '\r':
		f.state = chunkSizeLF
		return nil
	case f.digits > 0 && b == ';':
		f.state, f.used = chunkExt, 0
		return nil
	default:
		return errBadChunk
	}
	if f.digits == 0 {
		f.size = 0
	}
	f.digits++
	if f.digits > maxChunkDigits {
		return errBadChunk
	}
	f.size = f.size<<4 | int64(b)
	return nil
}

func (f *chunkFollower) stepTrailer(b byte) (bool, error) {
	f.used++
	if f.used > maxTrailerBytes {
		return false, errBadChunk
	}
	switch f.state {
	case trailerStart:
		if b == '\r' {
			f.state = chunkEndLF
			return false, nil
		}
		f.state = trailerName
		return false, token(b)
	case trailerName:
		if b == ':' {
			f.state = trailerValue
			return false, nil
		}
		return false, token(b)
	case trailerValue:
		if b == '\r' {
			f.state = trailerLF
			return false, nil
		}
		if !fieldValueByte(b) {
			return false, errBadChunk
		}
		return false, nil
	case trailerLF:
		f.state = trailerStart
		return false, expect(b, '\n')
	case chunkEndLF:
		return b == '\n', expect(b, '\n')
	case chunkSize, chunkExt, chunkSizeLF, chunkData, chunkDataCR, chunkDataLF:
		return false, errBadChunk // step keeps these to itself
	default:
		return false, errBadChunk
	}
}

func expect(b, want byte) error {
	if b != want {
		return errBadChunk
	}
	return nil
}

func token(b byte) error {
	if !httpguts.IsTokenRune(rune(b)) {
		return errBadChunk
	}
	return nil
}

// fieldValueByte reports whether b may stand in a field value (RFC 9110 §5.5).
func fieldValueByte(b byte) bool { return b == '\t' || b >= 0x20 && b != 0x7f }
