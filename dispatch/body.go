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

// spoolBody reads r to its end. It returns errBodyLimit, errSpool, or the reader's
// own error for a body that broke off.
func spoolBody(r io.Reader, memory, limit int64, dir string) (*spool, error) {
	s := &spool{}
	h := sha256.New()
	var mem bytes.Buffer
	n, err := io.Copy(&mem, io.TeeReader(io.LimitReader(r, min(memory, limit)+1), h))
	s.length = n
	if err != nil {
		return nil, err
	}
	switch {
	case n > limit:
		return nil, errBodyLimit
	case n <= memory:
		s.mem = mem.Bytes()
	default:
		if err := s.overflow(&mem, io.TeeReader(r, h), limit, dir); err != nil {
			return nil, err
		}
	}
	h.Sum(s.digest[:0])
	return s, nil
}

func (s *spool) overflow(mem *bytes.Buffer, r io.Reader, limit int64, dir string) error {
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
	if _, err := f.Write(mem.Bytes()); err != nil {
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
