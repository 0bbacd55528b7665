package inject

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"waybill/internal/contract"
	"waybill/outcome"
)

// A file that rests is read once and looked at each time; every kind of change is
// seen at the next request.
func TestFileIsReadWhenItChanged(t *testing.T) {
	contract.Covers(t, "C1")
	path := filepath.Join(t.TempDir(), "s")
	past := time.Now().Add(-time.Hour)
	reads := 0
	src := FileSource(path).(*fileSource)
	src.read = func(p string) ([]byte, fs.FileInfo, fs.FileInfo, error) {
		reads++
		return readFile(p)
	}
	write := func(v string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(v), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(path, past, past); err != nil {
			t.Fatal(err)
		}
	}
	want := func(v string, n int) {
		t.Helper()
		m, err := src.FetchRaw(t.Context())
		if err != nil || string(m.Raw) != v || reads != n {
			t.Fatalf("%v, %d reads instead of %d, or another value", err, reads, n)
		}
		clear(m.Raw) // what is handed out is the caller's own
	}
	write("one-secret")
	want("one-secret", 1)
	want("one-secret", 2) // it changed a moment ago: a further change might not show
	// Time passes: what was read then rests.
	src.kept, src.was = []byte("one-secret"), stateNow(t, path)
	want("one-secret", 2)
	want("one-secret", 2)
	write("two-secret") // same size, same time of modification
	want("two-secret", 3)
	src.kept, src.was = []byte("two-secret"), stateNow(t, path)
	other := filepath.Join(filepath.Dir(path), "other")
	if err := os.WriteFile(other, []byte("new-secret"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(other, past, past); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(other, path); err != nil {
		t.Fatal(err)
	}
	want("new-secret", 4)
	src.kept, src.was = []byte("new-secret"), stateNow(t, path)
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	var e *Error
	if _, err := src.FetchRaw(t.Context()); !errors.As(err, &e) || e.Code != outcome.CodeCredentialMissing {
		t.Errorf("a file that is gone: %v", err)
	}
	if err := src.Replace(t.Context(), []byte("put-secret")); err != nil {
		t.Fatal(err)
	}
	want("put-secret", 6)
	if s := stateNow(t, path); s.settled(time.Now()) || !s.settled(time.Now().Add(time.Hour)) {
		t.Error("a file counts as resting too early, or never")
	}
}

func stateNow(t *testing.T, path string) fileState {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return stateOf(info)
}

func BenchmarkFileSource(b *testing.B) {
	path := filepath.Join(b.TempDir(), "s")
	if err := os.WriteFile(path, []byte("a-secret-of-some-length"), 0o600); err != nil {
		b.Fatal(err)
	}
	for _, cached := range []bool{false, true} {
		b.Run("cached="+strconv.FormatBool(cached), func(b *testing.B) {
			src := FileSource(path).(*fileSource)
			info, err := os.Stat(path)
			if err != nil {
				b.Fatal(err)
			}
			for b.Loop() {
				if cached && src.kept == nil {
					src.kept, src.was, src.version = []byte("a-secret-of-some-length"), stateOf(info), "mtime:"+stamp(info.ModTime())
				}
				if _, err := src.FetchRaw(context.Background()); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}

// A hundred who wait cause one fetch; a value is renewed before it ends, and one that
// has ended is never used (C1).
func TestCached(t *testing.T) {
	contract.Covers(t, "C1")
	synctest.Test(t, func(t *testing.T) {
		var n atomic.Int64
		fail := atomic.Bool{}
		c := NewCached("test", func(ctx context.Context) (Material, error) {
			i := n.Add(1)
			select {
			case <-time.After(3 * time.Second):
			case <-ctx.Done():
				return Material{}, ctx.Err()
			}
			if fail.Load() {
				return Material{}, NewError(outcome.CodeCredentialUnavailable, ReasonUnreachable, nil)
			}
			at := time.Now()
			return Material{Raw: []byte("token-" + strconv.FormatInt(i, 10)), Issue: strconv.FormatInt(i, 10), Expires: at.Add(1000 * time.Second)}, nil
		}, CacheOptions{})
		want := func(v string) {
			t.Helper()
			m, err := c.FetchRaw(t.Context())
			if err != nil || string(m.Raw) != v {
				t.Fatalf("%v, or not %s", err, v)
			}
		}
		var all sync.WaitGroup
		for range 100 {
			all.Go(func() { want("token-1") })
		}
		all.Wait()
		if n.Load() != 1 {
			t.Fatalf("%d fetches for a hundred callers", n.Load())
		}
		time.Sleep(791 * time.Second) // of 990
		want("token-1")
		if n.Load() != 1 {
			t.Error("renewed too early")
		}
		time.Sleep(2 * time.Second)
		start := time.Now()
		want("token-1") // nobody waits for the renewal
		if time.Since(start) != 0 {
			t.Error("a renewal held a caller up")
		}
		time.Sleep(4 * time.Second)
		want("token-2")

		// The refused token is given up once, whoever says so, and not each time.
		for range 10 {
			c.Suspect("2")
		}
		c.Suspect("1")
		want("token-3")
		c.Suspect("3")
		want("token-3")

		// A renewal that fails keeps what is still good, and not a moment longer.
		fail.Store(true)
		time.Sleep(980 * time.Second)
		want("token-3")
		time.Sleep(11 * time.Second)
		var e *Error
		if _, err := c.FetchRaw(t.Context()); !errors.As(err, &e) || e.Code != outcome.CodeCredentialUnavailable {
			t.Errorf("a token that ended: %v", err)
		}
		before := n.Load()
		for range 50 {
			if _, err := c.FetchRaw(t.Context()); err == nil {
				t.Error("a token that ended is used")
			}
		}
		if n.Load() != before {
			t.Error("each caller asks a store that just failed")
		}
		fail.Store(false)
		time.Sleep(2 * time.Second)
		m, err := c.FetchRaw(t.Context())
		if err != nil || m.Issue == "3" {
			t.Errorf("%v %s", err, m.Issue)
		}

		// A caller that leaves stops its wait and not the fetch.
		c.Suspect(m.Issue)
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if _, err := c.FetchRaw(ctx); !errors.As(err, &e) || e.Reason != ReasonTimeout || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%v", err)
		}
		before = n.Load()
		if _, err := c.FetchRaw(t.Context()); err != nil || n.Load() != before {
			t.Errorf("%v, %d fetches", err, n.Load()-before)
		}
	})
}

// A store that hangs, panics, or gives something that has ended is an error in time.
func TestCachedFailures(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	synctest.Test(t, func(t *testing.T) {
		for name, tc := range map[string]struct {
			f    func(context.Context) (Material, error)
			code outcome.Code
			why  string
		}{
			"hangs":  {func(ctx context.Context) (Material, error) { <-ctx.Done(); return Material{}, ctx.Err() }, outcome.CodeCredentialUnavailable, ReasonTimeout},
			"panics": {func(context.Context) (Material, error) { panic("CANARY") }, outcome.CodeCredentialInvalid, ReasonSource},
			"old": {func(context.Context) (Material, error) {
				return Material{Raw: []byte("x"), Expires: time.Now().Add(-time.Second)}, nil
			}, outcome.CodeCredentialUnavailable, ReasonExpired},
		} {
			start := time.Now()
			_, err := NewCached("test", tc.f, CacheOptions{Timeout: 7 * time.Second}).FetchRaw(t.Context())
			var e *Error
			if !errors.As(err, &e) || e.Code != tc.code || e.Reason != tc.why {
				t.Errorf("%s: %v", name, err)
			}
			if took := time.Since(start); took > 7*time.Second {
				t.Errorf("%s: %v", name, took)
			}
		}
	})
}
