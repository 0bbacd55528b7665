package config

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/fsnotify/fsnotify"
)

// Sources are the files that one load read, and what it read: by them Watch knows when
// there is something new. The zero value never changes.
type Sources struct {
	files   []string // the configuration's own first
	content digest
}

// WatchOptions tune Watch. The zero value is good.
type WatchOptions struct {
	// Settle is how long content must stay as it is before it is loaded: editors, kubelets
	// and copies over a network write in steps, and the beginning of a file may be a good one
	// that allows more. Default 100ms.
	Settle time.Duration
	// Poll is how often the content is compared although nothing was reported: network
	// file systems report nothing. Default 1m; negative: never.
	Poll time.Duration
}

// Watch calls reload whenever the files of the last load hold something else than what it
// read, and still do after opt.Settle, until ctx ends; then it returns nil. latest returns the
// sources of that load, whether it was good or not, and also changes made before Watch began
// are found. It watches
// the folders of the files and of what they link to, since editors replace files and
// Kubernetes replaces a link above them. Where the system cannot watch files it relies on
// polling; it returns an error only if that is switched off too.
func Watch(ctx context.Context, opt WatchOptions, latest func() Sources, reload func()) error {
	if opt.Settle <= 0 {
		opt.Settle = 100 * time.Millisecond
	}
	if opt.Poll == 0 {
		opt.Poll = time.Minute
	}
	var events <-chan fsnotify.Event
	var lost <-chan error
	fsw, err := fsnotify.NewWatcher()
	if err == nil {
		defer func() { _ = fsw.Close() }()
		events, lost = fsw.Events, fsw.Errors
	} else if opt.Poll < 0 {
		return fmt.Errorf("config: watch: %w", err)
	}
	var poll <-chan time.Time
	if opt.Poll > 0 {
		t := time.NewTicker(opt.Poll)
		defer t.Stop()
		poll = t.C
	}
	folders := folders{watched: map[string]bool{}, names: map[string]bool{}}
	settle := time.NewTimer(time.Hour)
	settle.Stop()
	defer settle.Stop()
	var last time.Time // of the pending look; zero: none
	soon := func(limit time.Duration) {
		// Each event puts the look off, but not for ever: other files of the folder may come
		// and go all the time.
		if at := time.Now().Add(limit); last.IsZero() || at.Before(last) {
			last = at
		}
		settle.Reset(max(0, min(opt.Settle, time.Until(last))))
	}
	var seen *digest // the content that the look before found to be another; nil: it was not
	look := func() {
		last = time.Time{}
		s := latest()
		var now digest
		if len(s.files) > 0 {
			now = digestFiles(s.files[0], s.files[1:])
		}
		switch {
		case len(s.files) == 0 || now == s.content:
			seen = nil
		case seen != nil && now == *seen:
			seen = nil
			reload()
		default:
			seen = &now
		}
		// What happened before a new watch was in place is looked for, too.
		if added := fsw != nil && folders.watch(fsw, latest().files); added || seen != nil {
			soon(opt.Settle)
		}
	}
	look()
	for {
		select {
		case <-ctx.Done():
			return nil
		case ev, ok := <-events:
			if !ok {
				events = nil // what is left is polling
				continue
			}
			// Writing to another file of the folder, a log above all, changes none of ours.
			if ev.Op != fsnotify.Write || folders.names[filepath.Base(ev.Name)] {
				soon(10 * opt.Settle)
			}
		case _, ok := <-lost:
			if !ok {
				lost = nil
				continue
			}
			soon(10 * opt.Settle) // whatever was lost, a queue that overflowed for one: look for ourselves
		case <-settle.C:
			look()
		case <-poll:
			if last.IsZero() {
				look()
			}
		}
	}
}

// maxFolders bounds what links lead to.
const maxFolders = 64

// folders are what is watched.
type folders struct {
	watched map[string]bool
	// names are what files are called in them, and what they link to. Without the folder: one
	// that is reached in two ways is reported by either name.
	names map[string]bool
}

// watch watches the folders that matter now, drops the others and reports whether one was
// added. A folder that cannot be watched is left to polling.
func (f *folders) watch(fsw *fsnotify.Watcher, files []string) (added bool) {
	want := map[string]bool{}
	clear(f.names)
	for _, name := range files {
		// Each link of a chain, also where it leads to nothing for the moment.
		for link := name; ; {
			want[filepath.Dir(link)], f.names[filepath.Base(link)] = true, true
			to, err := os.Readlink(link)
			if err != nil || len(want) > maxFolders {
				break
			}
			if !filepath.IsAbs(to) {
				to = filepath.Join(filepath.Dir(link), to)
			}
			if f.names[filepath.Base(to)] && want[filepath.Dir(to)] {
				break // in a circle
			}
			link = to
		}
		if real, err := filepath.EvalSymlinks(name); err == nil {
			want[filepath.Dir(real)], f.names[filepath.Base(real)] = true, true
		}
	}
	active := fsw.WatchList()
	for dir := range f.watched {
		if want[dir] {
			continue
		}
		if err := fsw.Remove(dir); err == nil || errors.Is(err, fsnotify.ErrNonExistentWatch) {
			delete(f.watched, dir)
		}
	}
	for dir := range want {
		// A folder that was deleted and made again lost its watch: ask, do not remember.
		if f.watched[dir] && slices.Contains(active, dir) {
			continue
		}
		if err := fsw.Add(dir); err == nil {
			f.watched[dir], added = true, true
		}
	}
	return added
}
