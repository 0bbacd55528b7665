package config

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/fsnotify/fsnotify"

	"waybill/internal/control"
)

// Trigger says what caused a reload.
type Trigger string

// The triggers.
const (
	TriggerRequest Trigger = "request" // Reload was called, as on SIGHUP
	TriggerFile    Trigger = "file"    // the content of a file changed
)

// Result is what one reload came to.
type Result struct {
	Trigger Trigger
	// Config is the configuration in use afterwards: the new one, or on failure the
	// last good one (CONTRACT V1).
	Config *Config
	// Previous is the configuration that was in use before.
	Previous *Config
	// Err is nil on success. Errors, if the file could be read.
	Err error
}

// Changed reports whether the reload brought another snapshot.
func (r Result) Changed() bool { return r.Err == nil && r.Config.Digest != r.Previous.Digest }

// RestartNeeded names the settings that differ but are only read at start.
func (r Result) RestartNeeded() []string {
	var out []string
	a, b := r.Previous.Listen, r.Config.Listen
	for _, f := range []struct {
		name      string
		different bool
	}{
		{"listen.proxy", a.Proxy != b.Proxy || (a.ProxyTLS == nil) != (b.ProxyTLS == nil) || a.ProxyTLS != nil && *a.ProxyTLS != *b.ProxyTLS}, {"listen.ssh", a.SSH != b.SSH}, {"listen.admin", a.Admin != b.Admin}, {"listen.metrics", a.Metrics != b.Metrics},
	} {
		if f.different {
			out = append(out, f.name)
		}
	}
	return out
}

// WatchOptions tune a Watcher. The zero value is good.
type WatchOptions struct {
	// Settle is how long a file must be quiet before it is read: editors and kubelets
	// write in steps. Default 100ms.
	Settle time.Duration
	// Poll is how often the content is compared although nothing was reported: network
	// file systems report nothing. Default 1m; negative: never.
	Poll time.Duration
}

// Watcher reloads one configuration file and keeps the last good configuration when
// the new one is not acceptable (CONTRACT V1). It watches the folders of the file,
// of what the file links to and of the files it names, since editors replace files
// and Kubernetes replaces a link above them.
type Watcher struct {
	path    string
	opt     WatchOptions
	report  func(Result)
	current atomic.Pointer[Config]

	mu    sync.Mutex // one reload at a time; held while report runs
	files []string   // what the last attempt read besides path, good or bad
	seen  digest     // the content of the last attempt, exactly as it was parsed
}

// NewWatcher returns a watcher for a configuration that Load returned. report is
// called after every reload, one at a time, and must not call Reload. Nothing is
// watched until Run, which notices changes made since Load.
func NewWatcher(initial *Config, opt WatchOptions, report func(Result)) *Watcher {
	if opt.Settle <= 0 {
		opt.Settle = 100 * time.Millisecond
	}
	if opt.Poll == 0 {
		opt.Poll = time.Minute
	}
	w := &Watcher{path: initial.Path, opt: opt, report: report, files: initial.Files, seen: initial.content}
	w.current.Store(initial)
	return w
}

// Current returns the configuration in use.
func (w *Watcher) Current() *Config { return w.current.Load() }

// Reload reads the file now and reports, whether the content changed or not. It
// returns what it reported.
func (w *Watcher) Reload() Result {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.reload(TriggerRequest)
}

// check reloads if the content is another than that of the last attempt. A change
// made while a file is read is found by the next check, since what was parsed and
// what was digested are the same bytes.
func (w *Watcher) check() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if digestFiles(w.path, w.files) != w.seen {
		w.reload(TriggerFile)
	}
}

func (w *Watcher) reload(trigger Trigger) Result {
	res := Result{Trigger: trigger, Previous: w.Current()}
	next := load(w.path)
	w.files, w.seen = next.files, next.content
	switch {
	case next.err == nil:
		res.Config = next.config
	case control.Off("V1-keeps-last-good"):
		res.Config, res.Err = Defaults(), next.err
	default:
		res.Config, res.Err = res.Previous, next.err
	}
	w.current.Store(res.Config)
	w.report(res)
	return res
}

// Run watches until ctx ends and then returns nil. Where the system cannot watch
// files it relies on polling; it returns an error only if that is switched off too.
func (w *Watcher) Run(ctx context.Context) error {
	var events <-chan fsnotify.Event
	var lost <-chan error
	fsw, err := fsnotify.NewWatcher()
	if err == nil {
		defer fsw.Close()
		events, lost = fsw.Events, fsw.Errors
	} else if w.opt.Poll < 0 {
		return fmt.Errorf("config: watch: %w", err)
	}
	var poll <-chan time.Time
	if w.opt.Poll > 0 {
		t := time.NewTicker(w.opt.Poll)
		defer t.Stop()
		poll = t.C
	}
	watched := map[string]bool{}
	look := func() {
		w.check()
		if fsw != nil && w.watchFolders(fsw, watched) {
			w.check() // what happened before the new watch was in place
		}
	}
	look()

	settle := time.NewTimer(time.Hour)
	settle.Stop()
	defer settle.Stop()
	var latest time.Time // of the pending look; zero: none
	soon := func() {
		// Each event puts the look off, but not for ever: other files of the folder may be
		// written all the time.
		if latest.IsZero() {
			latest = time.Now().Add(10 * w.opt.Settle)
		}
		settle.Reset(max(0, min(w.opt.Settle, time.Until(latest))))
	}
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-events:
			soon()
		case err := <-lost:
			_ = err // whatever was lost, a queue that overflowed for one: look for ourselves
			soon()
		case <-settle.C:
			latest = time.Time{}
			look()
		case <-poll:
			look()
		}
	}
}

// watchFolders watches the folders that matter now, drops the others and reports
// whether one was added. A folder that cannot be watched is left to polling.
func (w *Watcher) watchFolders(fsw *fsnotify.Watcher, watched map[string]bool) (added bool) {
	w.mu.Lock()
	files := append([]string{w.path}, w.files...)
	w.mu.Unlock()
	want := map[string]bool{}
	for _, f := range files {
		want[filepath.Dir(f)] = true
		if real, err := filepath.EvalSymlinks(f); err == nil {
			want[filepath.Dir(real)] = true
		}
	}
	active := fsw.WatchList()
	for dir := range watched {
		if want[dir] {
			continue
		}
		if err := fsw.Remove(dir); err == nil || errors.Is(err, fsnotify.ErrNonExistentWatch) {
			delete(watched, dir)
		}
	}
	for dir := range want {
		// A folder that was deleted and made again lost its watch: ask, do not remember.
		if watched[dir] && slices.Contains(active, dir) {
			continue
		}
		if err := fsw.Add(dir); err == nil {
			watched[dir], added = true, true
		}
	}
	return added
}
