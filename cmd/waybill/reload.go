package main

import (
	"context"
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
// their way keep the snapshot they were bound to (D1). It returns what was loaded, or
// nil.
func (s *server) reload(a *app) *loadedConfig {
	cfg, err := a.loadConfig()
	switch {
	case err != nil:
		s.log.Error("configuration not loaded; the last good one stays in force", slog.String("error", configText(err)))
	case s.public && len(cfg.callers) == 0:
		// It would let everybody in who can reach the listener.
		err = errPublicWithoutCallers
		s.log.Error("configuration not loaded; the last good one stays in force", slog.Any("error", err))
	}
	if err != nil {
		s.metrics.Reloaded(false, time.Now())
		return nil
	}
	labelNames(s.metrics, cfg)
	old := s.callers.Load()
	s.callers.Store(&proxy.Callers{Static: cfg.callers, Sessions: old.Sessions, IdentityKey: old.IdentityKey})
	cfg.credentials.Adopt(s.pipeline.Binding().Credentials)
	s.pipeline.Swap(&dispatch.Binding{Snapshot: cfg.snapshot, Credentials: cfg.credentials})
	s.metrics.Reloaded(true, time.Now())
	s.reportSecrets(context.Background(), cfg)
	s.log.Info("configuration loaded", slog.String("snapshot", cfg.snapshot.Digest()), slog.Int("routes", len(cfg.snapshot.Routes())))
	return cfg
}

var errPublicWithoutCallers = fail(exitConfig, "callers: a listener can be reached by others than this machine, so callers have to authenticate (CONTRACT V4)")

// settle is how long a file must rest before it is read: editors and deployment
// tools write in several steps.
const settle = 200 * time.Millisecond

// watchConfig reloads when the content of the file, or of a file it names, changes.
// Folders are watched, not files: editors replace a file, and Kubernetes swaps a
// link beside it. Without notifications SIGHUP still works.
func (s *server) watchConfig(a *app, files []string) (stop func()) {
	w, err := fsnotify.NewWatcher()
	if err == nil {
		if err = watchFolders(w, files); err != nil {
			_ = w.Close()
		}
	}
	if err != nil {
		s.log.Warn("the configuration is not watched; reload with SIGHUP", slog.Any("error", err))
		return func() {}
	}
	last := contentOf(files)
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
				s.log.Warn("watching the configuration", slog.Any("error", err))
			case <-timer.C:
				now := contentOf(files)
				if now == last {
					continue
				}
				if cfg := s.reload(a); cfg != nil {
					files = cfg.files
					// A folder that cannot be watched is no reason to stop watching the others.
					if err := watchFolders(w, files); err != nil {
						s.log.Warn("watching the configuration", slog.Any("error", err))
					}
					now = contentOf(files)
				}
				last = now
			}
		}
	})
	return func() { _ = w.Close() }
}

// watchFolders adds the files' folders; a second time is no error.
func watchFolders(w *fsnotify.Watcher, files []string) error {
	for _, f := range files {
		if err := w.Add(filepath.Dir(f)); err != nil {
			return err
		}
	}
	return nil
}

// contentOf is a digest of files; one that cannot be read counts as a state of its own.
func contentOf(files []string) [sha256.Size]byte {
	h := sha256.New()
	for _, f := range files {
		data, err := os.ReadFile(f)
		sum := sha256.Sum256(data)
		if err != nil {
			sum = [sha256.Size]byte{}
		}
		h.Write(sum[:])
	}
	return [sha256.Size]byte(h.Sum(nil))
}
