package inject

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/outcome"
)

// A file that is rewritten in place is never read half-way: the read is repeated,
// and refused when the file does not come to rest.
func TestFileChangingWhileRead(t *testing.T) {
	contract.Covers(t, "C1")
	path := filepath.Join(t.TempDir(), "s")
	write := func(v string, at int64) {
		if err := os.WriteFile(path, []byte(v), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, time.Unix(at, 0), time.Unix(at, 0)); err != nil {
			t.Fatal(err)
		}
	}
	write("old-secret", 1)
	for unrest := range 4 {
		reads := 0
		src := &fileSource{path: path, read: func(p string) ([]byte, fs.FileInfo, fs.FileInfo, error) {
			reads++
			_, before, _, err := readFile(p)
			if err != nil {
				return nil, nil, nil, err
			}
			if reads <= unrest {
				write("new-secret"[:3+reads], int64(10*unrest+reads))
			} else if unrest > 0 {
				write("new-secret", int64(10*unrest))
				_, before, _, err = readFile(p)
				if err != nil {
					return nil, nil, nil, err
				}
			}
			raw, _, after, err := readFile(p)
			return raw, before, after, err
		}}
		s, err := src.Fetch(t.Context())
		var e *Error
		switch {
		case unrest == 3:
			if !errors.As(err, &e) || e.Code != outcome.CodeCredentialInvalid || e.Reason != ReasonChanging || !s.IsZero() || reads != 3 {
				t.Errorf("%v after %d reads", err, reads)
			}
		case err != nil || reads != unrest+1:
			t.Errorf("%v after %d reads", err, reads)
		case unrest > 0 && string(s.Expose()) != "new-secret":
			t.Error("half a secret")
		}
	}
}

// Closing a source leaves no descriptor: every path of readFile closes the file.
func TestReadFileCloses(t *testing.T) {
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "s"), []byte("v"), 0o600); err != nil {
		t.Fatal(err)
	}
	count := func() int {
		e, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			t.Fatal(err)
		}
		return len(e)
	}
	before := count()
	for range 50 {
		_, _ = FileSource(filepath.Join(dir, "s")).Fetch(t.Context())
		_, _ = FileSource(dir).Fetch(t.Context())
		_, _ = FileSource(filepath.Join(dir, "none")).Fetch(t.Context())
	}
	if after := count(); after > before+5 {
		t.Errorf("%d descriptors, then %d", before, after)
	}
}
