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
	"waybill/routes"
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

type watching struct {
	*Watcher
	results chan Result
	stop    func()
}

func watch(t *testing.T, path string, opt WatchOptions) *watching {
	t.Helper()
	c, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	w := &watching{results: make(chan Result, 100)}
	opt.Settle = 20 * time.Millisecond
	w.Watcher = NewWatcher(c, opt, func(r Result) { w.results <- r })
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	w.stop = func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	}
	return w
}

func (w *watching) next(t *testing.T) Result {
	t.Helper()
	select {
	case r := <-w.results:
		return r
	case <-time.After(20 * time.Second):
		t.Fatal("no reload was reported")
		return Result{}
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

// V1, case CF-01 g: a bad reload keeps the last good snapshot and says so.
func TestReloadKeepsLastGood(t *testing.T) {
	contract.Covers(t, "V1", "D1")
	path := filepath.Join(t.TempDir(), "waybill.yaml")
	write(t, path, goodA)
	w := watch(t, path, WatchOptions{Poll: -1})
	defer w.stop()
	first := w.Current()
	bound := first.Snapshot // an action in flight holds it

	write(t, path, broken)
	r := w.next(t)
	var list Errors
	if r.Trigger != TriggerFile || !errors.As(r.Err, &list) || r.Config != first || r.Previous != first || r.Changed() || w.Current() != first {
		t.Fatalf("after a bad file: %+v", r)
	}
	if len(list) != 2 || list[1].Line != 4 || list[1].Path != "routes[0].mathc" {
		t.Errorf("the problem has no place: %+v", list[0])
	}
	if got, _ := w.Current().Snapshot.Match("GET", routes.Target{Scheme: "https", Host: "a.example.test", Port: 443}, "/"); got == nil {
		t.Error("the last good snapshot no longer matches")
	}
	if w.Current().Snapshot.Default() != routes.Deny {
		t.Error("a bad file widened access")
	}

	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if r = w.next(t); !errors.Is(r.Err, fs.ErrNotExist) || w.Current() != first {
		t.Fatalf("after the file went: %+v", r)
	}

	write(t, path, goodB)
	r = w.next(t)
	if r.Err != nil || !r.Changed() || onlyRoute(t, r.Config) != "b" || w.Current() != r.Config || r.Previous != first {
		t.Fatalf("after a good file: %+v", r)
	}
	if bound.Digest() != first.Digest || onlyRoute(t, first) != "a" {
		t.Error("the snapshot of an action in flight changed")
	}
}

func TestReloadOnRequest(t *testing.T) {
	contract.Covers(t, "V1")
	path := filepath.Join(t.TempDir(), "waybill.yaml")
	write(t, path, goodA)
	c, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	var reported []Result
	w := NewWatcher(c, WatchOptions{}, func(r Result) { reported = append(reported, r) })
	if r := w.Reload(); r.Err != nil || r.Changed() || r.Trigger != TriggerRequest {
		t.Errorf("unchanged: %+v", r)
	}
	write(t, path, broken)
	if r := w.Reload(); r.Err == nil || r.Config != r.Previous || onlyRoute(t, w.Current()) != "a" {
		t.Errorf("broken: %+v", r)
	}
	write(t, path, goodB+"listen: {proxy: 127.0.0.1:1, admin: unix:/x}\n")
	if r := w.Reload(); r.Err != nil || !r.Changed() || !slices.Equal(r.RestartNeeded(), []string{"listen.proxy", "listen.admin"}) {
		t.Errorf("good: %+v %v", r, r.RestartNeeded())
	}
	if len(reported) != 3 {
		t.Errorf("%d reports", len(reported))
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
	for i, step := range []struct{ text, route string }{{goodB, "b"}, {broken, "b"}, {goodA, "a"}, {goodB, "b"}} {
		before, err := os.Readlink(filepath.Join(dir, "..data"))
		if err != nil {
			t.Fatal(err)
		}
		generation("..x"+string(rune('0'+i)), step.text)
		if err := os.RemoveAll(filepath.Join(dir, before)); err != nil {
			t.Fatal(err)
		}
		if r := w.next(t); (r.Err != nil) != (step.text == broken) || onlyRoute(t, w.Current()) != step.route {
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
	if r := w.next(t); r.Err != nil || onlyRoute(t, w.Current()) != "b" {
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
	first := w.Current()
	if !slices.Equal(first.Files, []string{ca}) {
		t.Errorf("Files = %v", first.Files)
	}
	write(t, ca, string(pem)+string(pem))
	if r := w.next(t); r.Err != nil || !r.Changed() {
		t.Fatalf("other roots: %+v", r)
	}
	if err := os.Remove(ca); err != nil {
		t.Fatal(err)
	}
	if r := w.next(t); r.Err == nil || r.Changed() {
		t.Fatalf("missing roots: %+v", r)
	}
	write(t, ca, "# a comment more\n"+string(pem))
	if r := w.next(t); r.Err != nil || r.Config.Digest != first.Digest {
		t.Fatalf("the same roots again: %+v", r)
	}
}

// What happened between Load and Run is noticed, equal content is not reported, and
// Reload works beside Run.
func TestWatchChangeBeforeRun(t *testing.T) {
	path := filepath.Join(t.TempDir(), "waybill.yaml")
	write(t, path, goodA)
	c, err := Load(path)
	if err != nil {
		t.Fatal(err)
	}
	write(t, path, goodB)
	results := make(chan Result, 10)
	w := &watching{results: results, Watcher: NewWatcher(c, WatchOptions{Settle: time.Millisecond, Poll: -1}, func(r Result) { results <- r })}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- w.Run(ctx) }()
	if r := w.next(t); r.Err != nil || onlyRoute(t, r.Config) != "b" {
		t.Fatalf("%+v", r)
	}
	write(t, path, goodB) // the same bytes: no reload
	write(t, path+".other", "noise")
	write(t, path, goodA)
	if r := w.next(t); r.Err != nil || onlyRoute(t, r.Config) != "a" {
		t.Fatalf("%+v", r)
	}
	if r := w.Reload(); r.Err != nil || r.Changed() {
		t.Fatalf("%+v", r)
	}
	w.next(t)
	cancel()
	if err := <-done; err != nil {
		t.Fatal(err)
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
	if r := w.next(t); r.Err != nil || onlyRoute(t, w.Current()) != "b" {
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
