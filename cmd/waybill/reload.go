package main

import (
	"crypto/sha256"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/fsnotify/fsnotify"

	"waybill/dispatch"
	"waybill/proxy"
)

// reload binds new requests to the configuration file as it stands. A file with a
// mistake changes nothing but the log and a metric (CONTRACT V1); requests on
// their way keep the snapshot they were bound to (D1).
func (s *server) reload(a *app) {
	cfg, err := a.loadConfig()
	switch {
	case err != nil:
		s.log.Error("configuration not loaded; the last good one stays in force", slog.Any("error", err))
	case s.public && len(cfg.callers) == 0:
		// It would let everybody in who can reach the listener.
		err = errPublicWithoutCallers
		s.log.Error("configuration not loaded; the last good one stays in force", slog.Any("error", err))
	}
	if err != nil {
		s.metrics.Reloaded(false, time.Now())
		return
	}
	old := s.callers.Load()
	s.callers.Store(&proxy.Callers{Static: cfg.callers, Sessions: old.Sessions, IdentityKey: old.IdentityKey})
	s.pipeline.Swap(&dispatch.Binding{Snapshot: cfg.snapshot, Credentials: cfg.credentials})
	s.metrics.Reloaded(true, time.Now())
	s.log.Info("configuration loaded", slog.String("snapshot", cfg.snapshot.Digest()), slog.Int("routes", len(cfg.snapshot.Routes())))
}

var errPublicWithoutCallers = fail(exitConfig, "callers: a listener can be reached by others than this machine, so callers have to authenticate (CONTRACT V4)")

// settle is how long a file must rest before it is read: editors and deployment
// tools write in several steps.
const settle = 200 * time.Millisecond

// watchConfig reloads when the file's content changes. The folder is watched, not
// the file: editors replace it, and Kubernetes swaps a link beside it. Without
// notifications SIGHUP still works.
func (s *server) watchConfig(a *app) (stop func()) {
	w, err := fsnotify.NewWatcher()
	if err == nil {
		if err = w.Add(filepath.Dir(s.config)); err != nil {
			_ = w.Close()
		}
	}
	if err != nil {
		s.log.Warn("the configuration file is not watched; reload with SIGHUP", slog.Any("error", err))
		return func() {}
	}
	last := contentOf(s.config)
	s.tasks.Go(func() {
		timer := time.NewTimer(settle)
		timer.Stop()
		defer timer.Stop()
		for {
			select {
			case _, ok := <-w.Events:
				if !ok {
					return
				}
				timer.Reset(settle)
			case err, ok := <-w.Errors:
				if !ok {
					return
				}
				s.log.Warn("watching the configuration file", slog.Any("error", err))
			case <-timer.C:
				if now := contentOf(s.config); now != last {
					last = now
					s.reload(a)
				}
			}
		}
	})
	return func() { _ = w.Close() }
}

// contentOf is a digest of a file; the zero value while it cannot be read.
func contentOf(path string) [sha256.Size]byte {
	data, err := os.ReadFile(path)
	if err != nil {
		return [sha256.Size]byte{}
	}
	return sha256.Sum256(data)
}
