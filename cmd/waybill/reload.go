package main

import (
	"context"
	"log/slog"
	"time"

	"waybill/dispatch"
	"waybill/internal/config"
	"waybill/internal/control"
	"waybill/proxy"
)

// reload binds new requests to the configuration file as it stands. A file with a
// mistake changes nothing but the log and a metric (CONTRACT V1); requests on
// their way keep the snapshot they were bound to (D1).
func (s *server) reload(a *app) {
	s.reloading.Lock()
	defer s.reloading.Unlock()
	path := a.configPath()
	cfg, _, read, err := loadFileWith(path, a.secretSources())
	s.sources.Store(&read)
	if err != nil {
		err = configError(path, err)
		s.log.Error("configuration not loaded; the last good one stays in force", slog.String("error", configText(err)))
		if control.Off("V1-keeps-last-good") {
			cfg, err = assemble(config.Defaults(), a.secretSources())
		}
	} else if s.public && len(cfg.callers) == 0 {
		// It would let everybody in who can reach the listener.
		err = errPublicWithoutCallers
		s.log.Error("configuration not loaded; the last good one stays in force", slog.Any("error", err))
	}
	if err != nil {
		s.metrics.Reloaded(false, time.Now())
		return
	}
	if changed := s.listeners.differ(cfg); len(changed) > 0 {
		s.log.Warn("listeners are read at a start; they stay as they are until then", slog.Any("settings", changed))
	}
	labelNames(s.metrics, cfg)
	old := s.callers.Load()
	s.callers.Store(&proxy.Callers{Static: cfg.callers, Sessions: old.Sessions, IdentityKey: old.IdentityKey})
	cfg.credentials.Adopt(s.pipeline.Binding().Credentials)
	s.pipeline.Swap(&dispatch.Binding{Snapshot: cfg.snapshot, Credentials: cfg.credentials})
	s.metrics.Reloaded(true, time.Now())
	s.reportSecrets(context.Background(), cfg)
	s.log.Info("configuration loaded", slog.String("snapshot", cfg.snapshot.Digest()), slog.Int("routes", len(cfg.snapshot.Routes())))
}

var errPublicWithoutCallers = fail(exitConfig, "callers: a listener can be reached by others than this machine, so callers have to authenticate (CONTRACT V4)")

// listeners are the settings of a configuration that only a start reads.
type listeners struct {
	proxy, ssh, admin, metrics string
	tls                        config.ListenTLS // the zero value: plain TCP
}

func listenersOf(cfg *loadedConfig) listeners {
	l := listeners{proxy: cfg.proxyListen, ssh: cfg.sshListen, admin: cfg.adminListen, metrics: cfg.metricsListen}
	if cfg.proxyTLS != nil {
		l.tls = *cfg.proxyTLS
	}
	return l
}

// differ names the settings that cfg has otherwise.
func (l listeners) differ(cfg *loadedConfig) (names []string) {
	n := listenersOf(cfg)
	for _, s := range []struct {
		name      string
		different bool
	}{
		{"listen.proxy", l.proxy != n.proxy}, {"listen.proxy_tls", l.tls != n.tls}, {"listen.ssh", l.ssh != n.ssh},
		{"listen.admin", l.admin != n.admin}, {"listen.metrics", l.metrics != n.metrics},
	} {
		if s.different {
			names = append(names, s.name)
		}
	}
	return names
}

// settle is how long a file must rest before it is read: editors and deployment
// tools write in several steps.
const settle = 200 * time.Millisecond

// watchConfig reloads when the content of the file, or of a file it names, changes.
// Without notifications it looks once a minute, and SIGHUP works.
func (s *server) watchConfig(a *app) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	s.tasks.Go(func() {
		// It ends with ctx only: polling is on.
		_ = config.Watch(ctx, config.WatchOptions{Settle: settle}, func() config.Sources { return *s.sources.Load() }, func() { s.reload(a) })
	})
	return cancel
}
