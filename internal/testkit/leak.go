package testkit

import (
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strings"
	"testing"

	"go.uber.org/goleak"
)

// CheckGoroutines fails the test if, after all its other cleanups, goroutines run
// that did not run when it was called. Call it first in a test that is not
// parallel.
func CheckGoroutines(t testing.TB, opts ...goleak.Option) {
	t.Helper()
	opts = append([]goleak.Option{goleak.IgnoreCurrent()}, opts...)
	t.Cleanup(func() { goleak.VerifyNone(t, opts...) })
}

// FDs counts the open file descriptors of a process; 0 is this one.
func FDs(t testing.TB, pid int) int {
	t.Helper()
	return len(fdLinks(t, pid))
}

// DeletedFiles lists the files a process holds open that have no name any more,
// such as spooled bodies; 0 is this process.
func DeletedFiles(t testing.TB, pid int) []string {
	t.Helper()
	var out []string
	for _, l := range fdLinks(t, pid) {
		if strings.HasSuffix(l, " (deleted)") {
			out = append(out, l)
		}
	}
	return out
}

func fdLinks(t testing.TB, pid int) []string {
	t.Helper()
	if pid == 0 {
		pid = os.Getpid()
	}
	dir := fmt.Sprintf("/proc/%d/fd", pid)
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatalf("testkit: descriptors of process %d: %v", pid, err)
	}
	var out []string
	for _, e := range entries {
		if l, err := os.Readlink(filepath.Join(dir, e.Name())); err == nil {
			out = append(out, l)
		}
	}
	return out
}

// Threads counts the operating system threads of a process.
func Threads(t testing.TB, pid int) int {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		t.Fatalf("testkit: threads of process %d: %v", pid, err)
	}
	return len(entries)
}

// Files lists every file below a folder, sorted, relative to it.
func Files(t testing.TB, dir string) []string {
	t.Helper()
	var out []string
	err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			if os.IsNotExist(err) {
				return nil
			}
			return err
		}
		if !d.IsDir() {
			rel, _ := filepath.Rel(dir, path)
			out = append(out, rel)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("testkit: %v", err)
	}
	sort.Strings(out)
	return out
}

// TempDir gives the test a TMPDIR of its own (for the processes it starts give
// them the returned folder as TMPDIR) and fails it if files are left in there when
// it ends. Not for parallel tests.
func TempDir(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	t.Setenv("TMPDIR", dir)
	t.Cleanup(func() {
		if left := Files(t, dir); len(left) > 0 {
			t.Errorf("testkit: %d temp files left: %v", len(left), left)
		}
	})
	return dir
}

// Settles waits until count returns at most limit, and fails the test after 20 s:
// for figures that fall back when the last connections have closed. what is for
// the message.
func Settles(t testing.TB, what string, limit int, count func() int) {
	t.Helper()
	var n int
	if err := poll(waitLimit, nil, func() error {
		if n = count(); n > limit {
			return fmt.Errorf("%d", n)
		}
		return nil
	}); err != nil {
		t.Errorf("testkit: %d %s, want at most %d", n, what, limit)
	}
}
