package dispatch

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"os"
)

// errBodyLimit is returned by spoolBody when the body is longer than the route allows.
var errBodyLimit = errors.New("dispatch: request body over the route's limit")

// errSpool is returned by spoolBody when the temporary file fails.
var errSpool = errors.New("dispatch: request body cannot be spooled")

// spool is a request body held whole before anything is decided about it: in
// memory, then in an unlinked temporary file (DESIGN 1.1). It is immutable once
// made. The nil spool is no body.
type spool struct {
	mem    []byte
	file   *os.File
	length int64
	digest [sha256.Size]byte
}

// maxExpected bounds the memory that a body gets before it is there.
const maxExpected = 64 << 10

// spoolBody reads r to its end. expected is the length that it will have; negative:
// nobody knows. It returns errBodyLimit, errSpool, or the reader's own error for a body
// that broke off.
func spoolBody(r io.Reader, expected, memory, limit int64, dir string) (*spool, error) {
	s := &spool{}
	most := min(memory, limit)
	if expected < 0 {
		expected = 511
	}
	mem, whole, err := readUpTo(r, min(expected, most, maxExpected), most)
	s.length = int64(len(mem))
	switch {
	case err != nil:
		return nil, err
	case whole:
		s.mem, s.digest = mem, sha256.Sum256(mem)
		return s, nil
	case s.length > limit:
		return nil, errBodyLimit
	}
	h := sha256.New()
	h.Write(mem)
	if err := s.overflow(mem, io.TeeReader(r, h), limit, dir); err != nil {
		return nil, err
	}
	h.Sum(s.digest[:0])
	return s, nil
}

// readUpTo reads r to its end, or one byte more than most. It begins with memory for
// expected bytes.
func readUpTo(r io.Reader, expected, most int64) (b []byte, whole bool, err error) {
	b = make([]byte, 0, expected+1) // one more, to meet the end
	for {
		n, err := r.Read(b[len(b):min(int64(cap(b)), most+1)])
		b = b[:len(b)+n]
		switch {
		case err == io.EOF && int64(len(b)) <= most:
			return b, true, nil
		case err != nil && err != io.EOF:
			return nil, false, err
		case int64(len(b)) > most:
			return b, false, nil
		case len(b) == cap(b):
			b = append(b, 0)[:len(b)]
		}
	}
}

func (s *spool) overflow(mem []byte, r io.Reader, limit int64, dir string) error {
	f, err := os.CreateTemp(dir, "body-*")
	if err != nil {
		return fmt.Errorf("%w: %w", errSpool, err)
	}
	// The name goes at once; the file lives as long as the descriptor.
	if err := os.Remove(f.Name()); err != nil {
		_ = f.Close()
		return fmt.Errorf("%w: %w", errSpool, err)
	}
	s.file = f
	fail := func(err error) error {
		s.close()
		return err
	}
	if _, err := f.Write(mem); err != nil {
		return fail(fmt.Errorf("%w: %w", errSpool, err))
	}
	w := &spoolWriter{f: f}
	n, err := io.Copy(w, io.LimitReader(r, limit-s.length+1))
	s.length += n
	switch {
	case w.err != nil:
		return fail(fmt.Errorf("%w: %w", errSpool, w.err))
	case err != nil:
		return fail(err)
	case s.length > limit:
		return fail(errBodyLimit)
	}
	return nil
}

// spoolWriter tells a failing disk from a failing caller.
type spoolWriter struct {
	f   *os.File
	err error
}

func (w *spoolWriter) Write(p []byte) (int, error) {
	n, err := w.f.Write(p)
	w.err = err
	return n, err
}

// reader returns a new reader over the whole body.
func (s *spool) reader() io.Reader {
	if s.file != nil {
		return io.NewSectionReader(s.file, 0, s.length)
	}
	return bytes.NewReader(s.mem)
}

// intact reads the body again and compares it with the digest taken when it was
// received (CONTRACT D2).
func (s *spool) intact() bool {
	if s.file == nil {
		return sha256.Sum256(s.mem) == s.digest
	}
	h := sha256.New()
	if _, err := io.Copy(h, s.reader()); err != nil {
		return false
	}
	return [sha256.Size]byte(h.Sum(nil)) == s.digest
}

func (s *spool) close() {
	if s != nil && s.file != nil {
		_ = s.file.Close()
	}
}
