package config

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"waybill/internal/contract"
)

const (
	goodA  = "version: 1\nroutes:\n- name: a\n  match: {host: a.example.test}\n"
	goodB  = "version: 1\nroutes:\n- name: b\n  match: {host: b.example.test}\n"
	broken = "version: 1\nroutes:\n- name: a\n  mathc: {host: a.example.test}\ndefault: tunnel\n"
)

func write(t *testing.T, path, text string) {
	t.Helper()
	// Written beside and renamed, as editors and tools do.
	tmp := path + ".tmp"
	if err := os.WriteFile(tmp, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(tmp, path); err != nil {
		t.Fatal(err)
	}
}

// result is what one load came to.
type result struct {
	config *Config // nil on failure
	err    error
}

// watching loads as often as Watch asks for it.
type watching struct {
	path    string
	results chan result
	last    Sources
	stop    func()
}

func (w *watching) load() {
	c, read, err := LoadSources(w.path)
	w.last = read
	w.results <- result{c, err}
}

func watch(t *testing.T, path string, opt WatchOptions) *watching {
	t.Helper()
	w := &watching{path: path, results: make(chan result, 100)}
	w.load()
	if r := w.next(t); r.err != nil {
		t.Fatal(r.err)
	}
	w.run(t, opt)
	return w
}

func (w *watching) run(t *testing.T, opt WatchOptions) {
	t.Helper()
	if opt.Settle == 0 {
		opt.Settle = 20 * time.Millisecond
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Watch(ctx, opt, func() Sources { return w.last }, w.load) }()
	w.stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Watch: %v", err)
		}
	}
}

func (w *watching) next(t *testing.T) result {
	t.Helper()
	select {
	case r := <-w.results:
		return r
	case <-time.After(20 * time.Second):
		t.Fatal("nothing was loaded again")
		return result{}
	}
}

// onlyRoute returns the name of the one route of a configuration.
func onlyRoute(t *testing.T, c *Config) string {
	t.Helper()
	rs := c.Snapshot.Routes()
	if len(rs) != 1 {
		t.Fatalf("%d routes", len(rs))
	}
	return rs[0].Name
}

// Each content is loaded once, good or bad, and what is wrong with it has a place; a missing
// file is one, too (V1, case CF-01 g).
func TestWatchGoodAndBad(t *testing.T) {
	contract.Covers(t, "V1")
	path := filepath.Join(t.TempDir(), "waybill.yaml")
	write(t, path, goodA)
	w := watch(t, path, WatchOptions{Poll: -1})
	defer w.stop()

	write(t, path, broken)
	r := w.next(t)
	var list Errors
	if !errors.As(r.err, &list) || r.config != nil {
		t.Fatalf("after a bad file: %+v", r)
	}
	if len(list) != 2 || list[1].Line != 4 || list[1].Path != "routes[0].mathc" {
		t.Errorf("the problem has no place: %+v", list[0])
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if r = w.next(t); !errors.Is(r.err, fs.ErrNotExist) {
		t.Fatalf("after the file went: %+v", r)
	}
	write(t, path, goodB)
	if r = w.next(t); r.err != nil || onlyRoute(t, r.config) != "b" {
		t.Fatalf("after a good file: %+v", r)
	}
}

// Who writes to the folder without end – a log beside the configuration does – puts nothing
// off: neither by writes, nor by files that come and go.
func TestWatchBesideALog(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "waybill.yaml")
	write(t, path, goodA)
	w := watch(t, path, WatchOptions{Poll: -1, Settle: 100 * time.Millisecond})
	defer w.stop()
	log, err := os.Create(filepath.Join(dir, "waybill.log"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = log.Close() }()
	over := make(chan struct{})
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for {
			select {
			case <-over:
				return
			case <-time.After(5 * time.Millisecond):
				_, _ = log.WriteString("a line\n")
				_ = os.WriteFile(filepath.Join(dir, "rotated"), nil, 0o600)
				_ = os.Remove(filepath.Join(dir, "rotated"))
			}
		}
	}()
	defer func() { close(over); <-ended }()
	for _, step := range []struct{ text, route string }{{goodB, "b"}, {goodA, "a"}} {
		// In place, as some editors write: there is nothing but writes to see then.
		if err := os.WriteFile(path, []byte(step.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if r := w.next(t); r.err != nil || onlyRoute(t, r.config) != step.route {
			t.Fatalf("%+v", r)
		}
	}
}

// The beginning of a file may be a good file, that allows more than the whole: of one that is
// written in place nothing is loaded before it rests, however long that takes, and however
// often it is looked at.
func TestWatchSlowWriter(t *testing.T) {
	contract.Covers(t, "V1")
	for name, poll := range map[string]time.Duration{"events": -1, "polling": 10 * time.Millisecond} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "waybill.yaml")
			write(t, path, goodA)
			w := watch(t, path, WatchOptions{Poll: poll, Settle: 250 * time.Millisecond})
			defer w.stop()
			f, err := os.OpenFile(path, os.O_WRONLY|os.O_TRUNC, 0)
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = f.Close() }()
			add := func(text string) {
				t.Helper()
				if _, err := f.WriteString(text); err != nil {
					t.Fatal(err)
				}
			}
			add(goodB)
			for end := time.Now().Add(2800 * time.Millisecond); time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
				add("# more\n")
				if len(w.results) > 0 {
					t.Fatal("a file was loaded while it was written")
				}
			}
			add("# the end\n")
			if r := w.next(t); r.err != nil || onlyRoute(t, r.config) != "b" {
				t.Fatalf("%+v", r)
			}
		})
	}
}

// A link whose target is away for a while, and one that leads to another link.
func TestWatchBrokenLink(t *testing.T) {
	a, b, c := t.TempDir(), t.TempDir(), t.TempDir()
	real := filepath.Join(c, "real.yaml")
	write(t, real, goodA)
	path, middle := filepath.Join(a, "waybill.yaml"), filepath.Join(b, "middle")
	for from, to := range map[string]string{path: middle, middle: real} {
		if err := os.Symlink(to, from); err != nil {
			t.Fatal(err)
		}
	}
	w := watch(t, path, WatchOptions{Poll: -1})
	defer w.stop()
	if err := os.Remove(real); err != nil {
		t.Fatal(err)
	}
	if r := w.next(t); r.err == nil {
		t.Fatal("a missing target was loaded")
	}
	write(t, real, goodB)
	if r := w.next(t); r.err != nil || onlyRoute(t, r.config) != "b" {
		t.Fatalf("%+v", r)
	}
	other := filepath.Join(c, "other.yaml")
	write(t, other, goodA)
	if err := os.Symlink(other, middle+".tmp"); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(middle+".tmp", middle); err != nil {
		t.Fatal(err)
	}
	if r := w.next(t); r.err != nil || onlyRoute(t, r.config) != "a" {
		t.Fatalf("%+v", r)
	}
}

// Kubernetes mounts a ConfigMap as waybill.yaml -> ..data/waybill.yaml and swaps the
// link ..data: the file itself never sees an event.
func TestWatchKubernetesSwap(t *testing.T) {
	contract.Covers(t, "V1")
	dir := t.TempDir()
	generation := func(name, text string) {
		t.Helper()
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, name, "waybill.yaml"), text)
		if err := os.Symlink(name, filepath.Join(dir, "..data_tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..data_tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	generation("..1", goodA)
	path := filepath.Join(dir, "waybill.yaml")
	if err := os.Symlink("..data/waybill.yaml", path); err != nil {
		t.Fatal(err)
	}
	w := watch(t, path, WatchOptions{Poll: -1})
	defer w.stop()
	for i, step := range []struct{ text, route string }{{goodB, "b"}, {broken, ""}, {goodA, "a"}, {goodB, "b"}} {
		before, err := os.Readlink(filepath.Join(dir, "..data"))
		if err != nil {
			t.Fatal(err)
		}
		generation("..x"+string(rune('0'+i)), step.text)
		if err := os.RemoveAll(filepath.Join(dir, before)); err != nil {
			t.Fatal(err)
		}
		if r := w.next(t); (r.err != nil) != (step.text == broken) || r.err == nil && onlyRoute(t, r.config) != step.route {
			t.Fatalf("step %d: %+v", i, r)
		}
	}
}

// A link to a file in another folder: that folder is watched as well.
func TestWatchLinkedFile(t *testing.T) {
	dir, other := t.TempDir(), t.TempDir()
	real := filepath.Join(other, "real.yaml")
	write(t, real, goodA)
	path := filepath.Join(dir, "waybill.yaml")
	if err := os.Symlink(real, path); err != nil {
		t.Fatal(err)
	}
	w := watch(t, path, WatchOptions{Poll: -1})
	defer w.stop()
	write(t, real, goodB)
	if r := w.next(t); r.err != nil || onlyRoute(t, r.config) != "b" {
		t.Fatalf("%+v", r)
	}
}

// Roots are part of the configuration: another certificate is another snapshot, and
// a missing file that comes later is noticed.
func TestWatchRoots(t *testing.T) {
	contract.Covers(t, "D1")
	pem, err := os.ReadFile("testdata/ca.pem")
	if err != nil {
		t.Fatal(err)
	}
	dir, cas := t.TempDir(), t.TempDir()
	ca := filepath.Join(cas, "ca.pem")
	write(t, ca, string(pem))
	path := filepath.Join(dir, "waybill.yaml")
	write(t, path, goodA+"  upstream: {roots: "+ca+"}\n")
	w := watch(t, path, WatchOptions{Poll: -1})
	defer w.stop()
	first, err := Load(path)
	if err != nil || !slices.Equal(first.Files, []string{ca}) {
		t.Fatalf("Files = %v, %v", first.Files, err)
	}
	write(t, ca, string(pem)+string(pem))
	if r := w.next(t); r.err != nil || r.config.Digest == first.Digest {
		t.Fatalf("other roots: %+v", r)
	}
	if err := os.Remove(ca); err != nil {
		t.Fatal(err)
	}
	if r := w.next(t); r.err == nil {
		t.Fatalf("missing roots: %+v", r)
	}
	write(t, ca, "# a comment more\n"+string(pem))
	if r := w.next(t); r.err != nil || r.config.Digest != first.Digest {
		t.Fatalf("the same roots again: %+v", r)
	}
}

// What happened between the load and Watch is noticed, and equal content is not loaded again.
func TestWatchChangeBefore(t *testing.T) {
	path := filepath.Join(t.TempDir(), "waybill.yaml")
	write(t, path, goodA)
	w := &watching{path: path, results: make(chan result, 10)}
	w.load()
	w.next(t)
	write(t, path, goodB)
	w.run(t, WatchOptions{Settle: time.Millisecond, Poll: -1})
	defer func() { w.stop() }()
	if r := w.next(t); r.err != nil || onlyRoute(t, r.config) != "b" {
		t.Fatalf("%+v", r)
	}
	write(t, path, goodB) // the same bytes
	write(t, path+".other", "noise")
	write(t, path, goodA)
	if r := w.next(t); r.err != nil || onlyRoute(t, r.config) != "a" {
		t.Fatalf("%+v", r)
	}
}

// A folder that is swapped above the watched one raises no event: polling finds it.
func TestWatchPolls(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"one": goodA, "two": goodB} {
		if err := os.Mkdir(filepath.Join(dir, name), 0o700); err != nil {
			t.Fatal(err)
		}
		write(t, filepath.Join(dir, name, "waybill.yaml"), text)
	}
	link := filepath.Join(dir, "current")
	if err := os.Symlink("one", link); err != nil {
		t.Fatal(err)
	}
	w := watch(t, filepath.Join(link, "waybill.yaml"), WatchOptions{Poll: 20 * time.Millisecond})
	defer w.stop()
	if err := os.Symlink("two", link+".tmp"); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(link+".tmp", link); err != nil {
		t.Fatal(err)
	}
	if r := w.next(t); r.err != nil || onlyRoute(t, r.config) != "b" {
		t.Fatalf("%+v", r)
	}
}

func TestLoadErrors(t *testing.T) {
	contract.Covers(t, "V1")
	dir := t.TempDir()
	if _, err := Load(filepath.Join(dir, "none.yaml")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("missing: %v", err)
	}
	if _, err := Load(dir); err == nil || !strings.Contains(err.Error(), "regular") {
		t.Errorf("folder: %v", err)
	}
	big := filepath.Join(dir, "big.yaml")
	if err := os.WriteFile(big, make([]byte, maxFileBytes+1), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := Load(big); !errors.Is(err, ErrTooLarge) {
		t.Errorf("large: %v", err)
	}
	if _, err := Parse("big.yaml", make([]byte, maxFileBytes+1)); err == nil {
		t.Error("large text is parsed")
	}
}
