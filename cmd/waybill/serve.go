package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"waybill/dispatch"
	"waybill/dispatch/httpx"
	"waybill/dispatch/sshx"
	"waybill/inject"
	"waybill/inject/vault"
	"waybill/internal/config"
	"waybill/journal"
	"waybill/metrics"
	"waybill/outcome"
	"waybill/proxy"
)

// Addresses where nothing else is configured (DESIGN section 4).
const (
	defaultProxyListen   = "127.0.0.1:7171"
	defaultMetricsListen = "127.0.0.1:7174"
	// listenNothing as an address switches a listener off.
	listenNothing = "off"
)

// allowAnyFilesystem is the name of a flag; see journal.Options.
const allowAnyFilesystem = "allow-any-filesystem"

// unsafeStorageFlags are for a journal that is thrown away anyway: the temporary
// folder may be on a file system that a real journal must not be on.
var unsafeStorageFlags = []string{"--" + allowAnyFilesystem}

// serverOptions say how a proxy is started. Empty addresses come from the
// configuration, then from the defaults.
type serverOptions struct {
	data          string
	proxy         string
	ssh           string // listenNothing: none
	metrics       string
	logger        *slog.Logger
	anyFilesystem bool
	traces        string // endpoint of an OpenTelemetry collector; "": none
	tracesParent  string // traceOfCaller or traceOfItself; "" counts as the latter
}

// server is a running proxy with everything it needs.
type server struct {
	proxyAddr   string
	sshAddr     string // "": none
	metricsAddr string // "": none
	adminPath   string
	// fatal receives one error when the process must end (CONTRACT M5).
	fatal chan error
	done  chan struct{} // closed when the shutdown begins

	log       *slog.Logger
	journal   *journal.Journal
	audit     *auditor // nil: none
	transport *httpx.Transport
	ssh       *sshx.Transport
	sshCA     *proxy.SSHCA
	pipeline  *dispatch.Pipeline
	front     *proxy.Proxy
	metrics   *metrics.Metrics
	callers   *currentCallers
	vault     *vault.Vault
	admin     *http.Server
	health    *http.Server
	decisions *http.Server // nil: none
	notifier  *notifier    // nil: none
	// stopNotify ends what the notifier still tries; nil without one.
	stopNotify func()
	watch      func()                         // stops watching the configuration
	reloading  sync.Mutex                     // one reload at a time
	sources    atomic.Pointer[config.Sources] // of the last one, good or not
	listeners  listeners                      // as they were at the start
	path       string                         // of the configuration
	started    time.Time
	traces     *traces // nil: none
	data       string
	secure     bool // callers of the proxy speak TLS
	public     bool // the proxy is not on loopback only
	draining   atomic.Bool
	closers    []func() error // in order of start; run backwards when the start fails
	tasks      sync.WaitGroup
}

// currentCallers is the Authenticator that a reload exchanges.
type currentCallers struct{ atomic.Pointer[proxy.Callers] }

// Authenticate implements proxy.Authenticator.
func (c *currentCallers) Authenticate(user, password string, remote net.Addr) (dispatch.Caller, bool) {
	return c.Load().Authenticate(user, password, remote)
}

// Certificate returns the caller of a verified client certificate (CONTRACT V4).
func (c *currentCallers) Certificate(leaf *x509.Certificate) (dispatch.Caller, bool) {
	return c.Load().Certificate(leaf)
}

// Valid reports whether a caller of an open tunnel would still be let in (CONTRACT V4).
func (c *currentCallers) Valid(caller dispatch.Caller) bool { return c.Load().Valid(caller) }

// Required reports whether every caller must authenticate (CONTRACT V4).
func (c *currentCallers) Required() bool { return c.Load().Required() }

// startServer starts a proxy. When it returns an error, nothing of it runs.
// Reads of the configuration come first, the journal second and listeners last:
// what an earlier process left open is closed on record before anybody can ask
// (CONTRACT M4).
func startServer(ctx context.Context, a *app, opts serverOptions) (srv *server, err error) {
	s := &server{fatal: make(chan error, 1), done: make(chan struct{}), log: opts.logger, data: opts.data, path: a.configPath(), started: time.Now()}
	defer func() {
		if err != nil {
			for i := len(s.closers) - 1; i >= 0; i-- {
				_ = s.closers[i]()
			}
		}
	}()
	if err := checkDebugSettings(a.getenv("GODEBUG")); err != nil {
		return nil, err
	}
	ignoreEnvironment(s.log)
	s.vault = openVault(opts.data)
	a.vault = s.vault
	// No credential is fetched before there are metrics.
	a.refreshed = func(credential string, ok bool) { s.metrics.CredentialRefreshed(credential, ok) }
	cfg, err := a.loadConfig()
	if err != nil {
		return nil, err
	}
	if err := makeDataDir(opts.data); err != nil {
		return nil, err
	}
	s.unlockVault()
	if s.adminPath, err = a.adminPath(opts.data, cfg.adminListen); err != nil {
		return nil, err
	}
	build := readBuildInfo()
	s.metrics = newMetrics(build, cfg)
	measureVault(s.metrics, s.vault)
	if err := s.openTraces(ctx, opts.traces, opts.tracesParent, build); err != nil {
		return nil, err
	}
	if err := s.openJournal(opts, build, cfg); err != nil {
		return nil, err
	}
	ca, sessions, err := s.openIdentity(cfg)
	if err != nil {
		return nil, err
	}
	if err := s.openAudit(cfg); err != nil {
		return nil, err
	}
	if s.sshCA, err = ensureSSHCA(opts.data); err != nil {
		return nil, err
	}
	if s.notifier, err = s.newNotifier(cfg.approvals); err != nil {
		return nil, err
	}
	s.openPipeline(cfg, ca)
	var front *tls.Config
	if t := cfg.proxyTLS; t != nil {
		if front, err = proxy.FrontTLS(t.Certificate, t.Key, t.ClientCA); err != nil {
			return nil, fail(exitConfig, "listen.proxy_tls: %w", err)
		}
	}
	s.secure = front != nil
	s.front = proxy.New(proxy.Config{
		TLS:      front,
		Pipeline: s.pipeline, Journal: s.journal, CA: ca, SSHCA: s.sshCA, Callers: s.callers, Sessions: sessions,
		Metrics: s.metrics, Logger: s.log, Admin: s.adminConfig(build),
		FollowUp: s.pipeline, Origin: s.journal.ID(),
	})
	s.metrics.WatchConnections(s.connectionState)
	if err := s.listen(ctx, opts, cfg); err != nil {
		return nil, err
	}
	if err := s.resumeApprovals(ctx); err != nil {
		return nil, err
	}
	s.announceAgain(ctx)
	s.metrics.Reloaded(true, time.Now())
	s.reportSecrets(ctx, cfg)
	s.listeners = listenersOf(cfg)
	s.sources.Store(&cfg.sources)
	s.watch = s.watchConfig(a)
	s.tasks.Go(s.watchJournal)
	s.tasks.Go(s.followUp)
	return s, nil
}

// reportSecrets logs which secrets of this machine cannot be used now. Nothing stops for
// it: they may come later, and other routes work (CONTRACT C1, case LK-02).
func (s *server) reportSecrets(ctx context.Context, cfg *loadedConfig) {
	for _, e := range cfg.credentials.Check(ctx, onThisMachine) {
		s.log.Warn("a secret cannot be used", slog.String("credential", e.ID), slog.String("source", e.Kind), slog.String("code", e.Code.String()), slog.String("reason", e.Reason), slog.Int("byte", e.Position))
	}
}

// onThisMachine tells the sources that are read without asking anybody.
func onThisMachine(kind string) bool {
	return kind == inject.KindEnv || kind == inject.KindFile || kind == inject.KindKubernetes
}

// unlockVault opens the vault if that needs nobody.
func (s *server) unlockVault() {
	method, err := s.vault.Method()
	if errors.Is(err, vault.ErrNone) {
		return
	}
	if err == nil {
		err = s.vault.Unlock("", "")
	}
	switch {
	case err == nil:
		s.log.Info("vault unlocked", slog.String("method", method))
	case errors.Is(err, vault.ErrLocked):
		s.log.Warn("the vault is locked: what needs it is refused until \"waybill vault unlock\"")
	default:
		s.log.Error("the vault cannot be opened", slog.String("problem", vaultProblem(err)))
	}
}

func (s *server) openJournal(opts serverOptions, build buildInfo, cfg *loadedConfig) error {
	j, found, err := journal.Open(journal.Options{
		Dir: filepath.Join(opts.data, "journal"), Build: strings.TrimSpace(build.Version + " " + build.Revision), Config: cfg.snapshot.Digest(),
		Retention: cfg.journal.Retention, MaxBytes: cfg.journal.MaxSize,
		AllowAnyFilesystem: opts.anyFilesystem, Metrics: journalMetrics{s.metrics, s.traces}, Logger: s.log,
	})
	if errors.Is(err, journal.ErrLocked) {
		return fail(exitUnavailable, "data folder %s: %w; one proxy at a time: use the running one, or another --data", opts.data, err)
	}
	if err != nil {
		return journalError(opts.data, err)
	}
	s.journal = j
	s.metrics.WatchJournal(s.journalState)
	s.metrics.Recovered(outcome.Unknown, found.Unknown+len(found.Lost))
	s.metrics.Recovered(outcome.NotAttempted, found.NotAttempted)
	s.metrics.Quarantined(found.Quarantined)
	if found.Quarantined {
		s.log.Error("the journal is behind its witness: reads work, new work is refused", slog.String("reason", found.Reason))
	}
	s.closers = append(s.closers, j.Close)
	return nil
}

// openIdentity opens what says who is who: the interception CA, sessions and
// configured callers.
func (s *server) openIdentity(cfg *loadedConfig) (*proxy.CA, *proxy.Sessions, error) {
	ca, err := proxy.LoadOrCreateCA(filepath.Join(s.data, "ca"))
	if err != nil {
		return nil, nil, fail(exitConfig, "%w", err)
	}
	sessions, err := proxy.OpenSessions(filepath.Join(s.data, "sessions.json"))
	if err != nil {
		return nil, nil, fail(exitConfig, "%w; remove the file to end all sessions", err)
	}
	key, err := identityKey(filepath.Join(s.data, "identity.key"))
	if err != nil {
		return nil, nil, fail(exitConfig, "identity key: %w", err)
	}
	s.callers = &currentCallers{}
	s.callers.Store(&proxy.Callers{Static: cfg.callers, Sessions: sessions, IdentityKey: key})
	return ca, sessions, nil
}

func (s *server) openPipeline(cfg *loadedConfig, ca *proxy.CA) {
	own := spkiDigest(ca.Certificate())
	s.transport = httpx.New(httpx.Config{OwnCA: &own, Logger: s.log})
	s.closers = append(s.closers, func() error { s.transport.Close(); return nil })
	s.ssh = sshx.New(sshx.Config{Dial: s.transport.Dial, Logger: s.log})
	s.closers = append(s.closers, func() error { s.ssh.Close(); return nil })
	var tell func(dispatch.ApprovalView)
	if s.notifier != nil {
		tell = s.notifier.tell
	}
	var begun func(dispatch.ActionID, string)
	if s.traces.listens() {
		begun = s.traces.begun
	}
	s.pipeline = dispatch.New(dispatch.Config{
		OnApproval: tell, OnTrace: begun,
		Journal: s.journal, Transport: s.transport, SSH: s.ssh, Metrics: s.metrics, Logger: s.log,
		Binding: &dispatch.Binding{Snapshot: cfg.snapshot, Credentials: cfg.credentials},
		// Of this instance: two proxies behind each other are no loop (RFC 9110 §7.6.3).
		Pseudonym: "waybill-" + hex.EncodeToString(own[:4]),
	})
	stop, err := s.pipeline.Background(context.Background())
	if err != nil {
		s.log.Error("unresolved actions are not repeated in the background", slog.Any("err", err))
		return
	}
	s.closers = append(s.closers, func() error { stop(); return nil })
}

// listen opens the three listeners and serves them.
func (s *server) listen(ctx context.Context, opts serverOptions, cfg *loadedConfig) error {
	proxyAddr := firstOf(opts.proxy, cfg.proxyListen, defaultProxyListen)
	metricsAddr := firstOf(opts.metrics, cfg.metricsListen, defaultMetricsListen)
	admin, err := listenAdmin(s.adminPath)
	if err != nil {
		return err
	}
	s.closers = append(s.closers, admin.Close)
	front, err := listenTCP("--proxy", proxyAddr)
	if err != nil {
		return err
	}
	s.closers = append(s.closers, front.Close)
	s.proxyAddr = front.Addr().String()
	if s.public = !config.IsLoopback(s.proxyAddr); s.public && !s.callers.Required() {
		return fail(exitConfig, "--proxy %s: others than this machine can reach it, so callers have to authenticate (CONTRACT V4); add callers to the configuration, or listen on 127.0.0.1", proxyAddr)
	}
	endpoint, err := s.listenSSH(opts, cfg)
	if err != nil {
		return err
	}

	s.admin = s.front.AdminServer()
	s.admin.Handler = vaultAdmin(s.vault, func() { s.pipeline.Binding().Credentials.ForgetVault() }, s.metrics, s.log, s.admin.Handler)
	s.admin.Handler = journalAdmin(s.journal, s.log, s.admin.Handler)
	if metricsAddr != listenNothing {
		l, err := listenTCP("--metrics", metricsAddr)
		if err != nil {
			return err
		}
		s.closers = append(s.closers, l.Close)
		s.metricsAddr = l.Addr().String()
		s.health = s.front.AdminServer() // for its log and time-outs
		s.health.Handler = proxy.HealthHandler(s.metrics.Handler(), nil, s.ready)
		s.health.WriteTimeout = time.Minute
		s.serve("metrics", func() error { return s.health.Serve(l) })
	}
	if err := s.listenDecisions(cfg.approvals); err != nil {
		return err
	}
	s.serve("admin", func() error { return s.admin.Serve(admin) })
	s.serve("proxy", func() error { return s.front.Serve(context.WithoutCancel(ctx), front) })
	if endpoint != nil {
		s.serve("ssh", func() error { return s.front.ServeSSH(context.WithoutCancel(ctx), endpoint) })
	}
	return nil
}

// listenSSH opens the SSH endpoint, nil for none. Where the default address is taken and
// no route is for SSH, that is no reason not to start.
func (s *server) listenSSH(opts serverOptions, cfg *loadedConfig) (net.Listener, error) {
	addr := firstOf(opts.ssh, cfg.sshListen, defaultSSHListen)
	if addr == listenNothing {
		return nil, nil //nolint:nilnil // no listener and no error
	}
	l, err := listenTCP("--ssh", addr)
	if err != nil {
		if addr == defaultSSHListen && !cfg.snapshot.HasSSH() {
			s.log.Warn("no SSH endpoint: its address is taken", slog.String("address", addr))
			return nil, nil //nolint:nilnil // no listener and no error
		}
		return nil, err
	}
	s.closers = append(s.closers, l.Close)
	s.sshAddr = l.Addr().String()
	if !config.IsLoopback(s.sshAddr) {
		if !s.callers.Required() {
			return nil, fail(exitConfig, "--ssh %s: others than this machine can reach it, so callers have to authenticate (CONTRACT V4); add callers to the configuration, or listen on 127.0.0.1", addr)
		}
		s.public = true
	}
	return l, nil
}

// serve runs one listener; its unexpected end is the end of the process.
func (s *server) serve(name string, f func() error) {
	s.tasks.Go(func() {
		if err := f(); err != nil && !errors.Is(err, http.ErrServerClosed) && !s.draining.Load() {
			s.die(fail(exitFailure, "%s listener: %w", name, err))
		}
	})
}

func (s *server) die(err error) {
	select {
	case s.fatal <- err:
	default: // one reason is enough
	}
}

// watchJournal ends the process when a commit became indeterminate: nothing
// further can be recorded, and only a start can read what is on disk (CONTRACT M5).
func (s *server) watchJournal() {
	select {
	case <-s.journal.Poisoned():
		s.die(fail(exitJournalStopped, "%w; start again: what is on disk is read at the start", s.journal.Cause()))
	case <-s.done:
	}
}

func listenTCP(flag, addr string) (net.Listener, error) {
	l, err := net.Listen("tcp", addr)
	if err != nil {
		return nil, fail(exitConfig, "%s %s: %w", flag, addr, err)
	}
	return l, nil
}

// listenAdmin opens the admin socket with mode 0600. The journal's lock is held by
// now, so a socket that is there was left behind.
func listenAdmin(path string) (net.Listener, error) {
	if conn, err := net.DialTimeout("unix", path, time.Second); err == nil {
		_ = conn.Close()
		return nil, fail(exitConfig, "--admin unix:%s: another process listens there", path)
	}
	if err := os.Remove(path); err != nil && !noFile(err) {
		return nil, fail(exitConfig, "--admin unix:%s: %w", path, err)
	}
	l, err := listenPrivate(path)
	if err != nil {
		return nil, fail(exitConfig, "--admin unix:%s: %w (a socket's path has at most 107 bytes; choose a shorter --data, or --admin unix:PATH)", path, err)
	}
	return l, nil
}

// shutdown drains: running requests are answered, new ones refused with DRAINING.
// When ctx ends first, what still runs is left to the next start (CONTRACT M4).
func (s *server) shutdown(ctx context.Context) error {
	s.draining.Store(true)
	s.metrics.Draining(true)
	close(s.done)
	s.watch()
	var drained, closed error
	var both sync.WaitGroup
	both.Go(func() { drained = s.pipeline.Drain(ctx) })
	both.Go(func() { closed = s.front.Shutdown(ctx) })
	both.Wait()
	short, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
	defer cancel()
	if s.admin.Shutdown(short) != nil {
		_ = s.admin.Close() // someone is tailing
	}
	if s.stopNotify != nil {
		s.stopNotify()
	}
	if s.decisions != nil && s.decisions.Shutdown(short) != nil {
		_ = s.decisions.Close()
	}
	if s.health != nil && s.health.Shutdown(short) != nil {
		_ = s.health.Close()
	}
	s.tasks.Wait()
	s.ssh.Close()
	s.transport.Close()
	s.audit.close()
	jerr := s.journal.Close()
	s.traces.close(s.log)
	if drained != nil {
		drained = errors.New("requests still ran; the next start records what is known of them")
	}
	return errors.Join(drained, closed, jerr)
}

// serveFlags are the flags of "serve".
type serveFlags struct {
	memoryLimit         string
	proxy, ssh, metrics string
	logLevel, logFormat string
	drain               time.Duration
	anyFilesystem       bool
	traces              string
	tracesParent        string
}

func newServe(a *app) *cobra.Command {
	var flags serveFlags
	cmd := &cobra.Command{
		Use:   "serve",
		Short: "Run the proxy",
		Long: `Run the proxy until SIGTERM or SIGINT.

SIGHUP, or a change of the configuration file, loads it again; a file with a
mistake leaves the last good configuration in force, and the log says why. SIGTERM
and SIGINT refuse new requests, wait for the running ones (--drain) and end; a
second one ends at once.

Proxy and trust variables of the environment (HTTPS_PROXY, SSL_CERT_FILE, …) are
ignored: where requests go, and whom they trust, is in the configuration only.

Exit codes: 3 configuration or environment refused, do not restart; 6 journal
damaged, do not restart; 8 the journal stopped after a write whose result is not
known, restart.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.serve(cmd.Context(), &flags) },
	}
	f := cmd.Flags()
	f.StringVar(&flags.proxy, "proxy", "", "`address` of the proxy (default listen.proxy, else "+defaultProxyListen+"; port 0: any free one)")
	f.StringVar(&flags.ssh, "ssh", "", "`address` of the SSH endpoint (default listen.ssh, else "+defaultSSHListen+"; off: none)")
	f.StringVar(&flags.metrics, "metrics", "", "`address` of /metrics, /livez and /readyz (default listen.metrics, else "+defaultMetricsListen+"; off: none)")
	f.StringVar(&flags.logLevel, "log-level", "info", "debug, info, warn or error")
	f.StringVar(&flags.logFormat, "log-format", "text", "text or json; the log goes to standard error")
	f.StringVar(&flags.memoryLimit, "memory-limit", memoryAuto, "memory this process may take, as 128MiB: auto is the control group's limit (cgroup v1 or v2; a GOMEMLIMIT of the environment goes first), off none")
	f.StringVar(&flags.traces, "traces", "", "`URL` of an OpenTelemetry collector (OTLP over HTTP), as http://127.0.0.1:4318, that gets a span of each action and attempt: facts and names of routes only (default: none)")
	f.StringVar(&flags.tracesParent, "traces-parent", traceOfCaller, "whose trace the spans are in: caller is that of the request's traceparent field, where it has a valid one; none is one of its own for each action")
	f.DurationVar(&flags.drain, "drain", 30*time.Second, "how long SIGTERM waits for running requests")
	f.BoolVar(&flags.anyFilesystem, allowAnyFilesystem, false, "keep the journal on a file system that may forget what it acknowledged (tmpfs, overlayfs, NFS); for trying things out")
	_ = cmd.RegisterFlagCompletionFunc("log-level", cobra.FixedCompletions([]string{"debug", "info", "warn", "error"}, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("log-format", cobra.FixedCompletions([]string{"text", "json"}, cobra.ShellCompDirectiveNoFileComp))
	_ = cmd.RegisterFlagCompletionFunc("traces-parent", cobra.FixedCompletions([]string{traceOfCaller, traceOfItself}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

func (a *app) serve(ctx context.Context, flags *serveFlags) error {
	level, err := parseLevel(flags.logLevel)
	if err != nil {
		return err
	}
	if flags.logFormat != "text" && flags.logFormat != "json" {
		return fail(exitUsage, "--log-format %s: is one of text, json", flags.logFormat)
	}
	if flags.tracesParent != traceOfCaller && flags.tracesParent != traceOfItself {
		return fail(exitUsage, "--traces-parent %s: is one of caller, none", flags.tracesParent)
	}
	noCoreDumps()
	protectMemory()
	logger := newLogger(a.stderr, level, flags.logFormat)
	redirectStandardLog(logger)
	if err := limitMemory(flags.memoryLimit, a.getenv, logger); err != nil {
		return err
	}

	// Signals are taken before anything starts: none is lost, and none kills a start
	// half way.
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer signal.Stop(signals)

	data, err := a.dataDir()
	if err != nil {
		return err
	}
	s, err := startServer(ctx, a, serverOptions{data: data, proxy: flags.proxy, ssh: flags.ssh, metrics: flags.metrics, logger: logger, anyFilesystem: flags.anyFilesystem, traces: flags.traces, tracesParent: flags.tracesParent})
	if err != nil {
		return err
	}
	if err := s.announce(a); err != nil {
		return errors.Join(err, s.shutdown(ctx))
	}
	for {
		select {
		case sig := <-signals:
			if sig == syscall.SIGHUP {
				s.reload(a)
				continue
			}
			logger.Info("draining", slog.String("signal", sig.String()), slog.Duration("limit", flags.drain))
			return s.drain(ctx, flags.drain, signals)
		case err := <-s.fatal:
			logger.Error("stopping", slog.Any("error", err))
			// Whoever waits gets an answer: that its outcome is not known.
			if serr := s.drain(ctx, fatalDrainLimit, signals); serr != nil {
				logger.Error("stopping", slog.Any("error", serr))
			}
			return err
		case <-ctx.Done():
			return s.drain(context.WithoutCancel(ctx), flags.drain, signals)
		}
	}
}

// fatalDrainLimit is how long callers get to read their answers when the process
// cannot go on.
const fatalDrainLimit = 5 * time.Second

// drain shuts down; a further signal ends the waiting.
func (s *server) drain(ctx context.Context, limit time.Duration, signals <-chan os.Signal) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	done := make(chan struct{})
	defer close(done)
	go func() {
		for {
			select {
			case sig := <-signals:
				if sig != syscall.SIGHUP {
					cancel()
					return
				}
			case <-done:
				return
			}
		}
	}()
	if err := s.shutdown(ctx); err != nil {
		return fail(exitFailure, "stopping: %w", err)
	}
	s.log.Info("stopped")
	return nil
}

// announce says where the proxy listens: once for people, on standard output, and
// once in the log.
func (s *server) announce(a *app) error {
	metricsAddr := s.metricsAddr
	if metricsAddr == "" {
		metricsAddr = listenNothing
	}
	s.log.Info("listening", slog.String("proxy", s.proxyAddr), slog.String("ssh", firstOf(s.sshAddr, listenNothing)), slog.String("admin", s.adminPath), slog.String("metrics", metricsAddr), slog.String("data", s.data), slog.String("snapshot", s.pipeline.Binding().Snapshot.Digest()))
	p := &errWriter{w: a.stdout}
	scheme := "http"
	if s.secure {
		scheme = "https"
	}
	p.printf("proxy    %s://%s\n", scheme, s.proxyAddr)
	if s.metricsAddr != "" {
		p.printf("metrics  http://%s/metrics\n", s.metricsAddr)
	}
	p.printf("admin    unix:%s\n", s.adminPath)
	if s.sshAddr != "" {
		p.printf("ssh      %s\n", s.sshAddr)
	}
	return p.err
}

func firstOf(values ...string) string {
	for _, v := range values {
		if v != "" {
			return v
		}
	}
	return ""
}

// ready is /readyz: about configuration, journal and listeners, never about a
// remote side. /livez is about the process alone.
func (s *server) ready() error {
	if s.draining.Load() {
		return errors.New("draining")
	}
	return s.journal.Admit()
}

// status is what GET /v1/status tells.
func (s *server) status(build buildInfo) any {
	return proxyStatus{
		Version: build.Version, PID: os.Getpid(), Proxy: s.proxyAddr, ProxyTLS: s.secure, SSH: s.sshAddr, Metrics: s.metricsAddr, Data: s.data,
		Snapshot: s.pipeline.Binding().Snapshot.Digest(), Draining: s.draining.Load(),
		moreStatus: s.moreStatus(),
	}
}

// adminConfig is what the admin API tells beyond actions.
func (s *server) adminConfig(build buildInfo) proxy.Admin {
	return proxy.Admin{
		Status:        func() any { return s.status(build) },
		JournalStats:  func(context.Context) (any, error) { return statsOf(s.journal) },
		JournalVerify: func(ctx context.Context) (any, error) { return verifyRunning(ctx, s.journal) },
		AuditStatus:   s.auditStatus,
	}
}
