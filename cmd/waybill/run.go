package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"waybill/dispatch"
	"waybill/outcome"
)

// runFlags are the flags of "run".
type runFlags struct {
	envFlags
	printEnv, asJSON, quiet bool
	mcpConfig               bool
	name                    string
	wait                    time.Duration
	logLevel                string
	anyFilesystem           bool
}

func newRun(a *app) *cobra.Command {
	var flags runFlags
	cmd := &cobra.Command{
		Use:   "run [flags] -- CMD [ARG…]",
		Short: "Run a program whose requests go through the proxy",
		Long: `Run a program whose requests go through the proxy.

Joins the proxy that runs with this data folder, or starts one for as long as
the program runs. The program gets a session of its own, the proxy variables,
trust in Waybill's CA, and placeholder keys for client libraries that refuse to
start without one; it never gets a secret. Variables from which the
configuration, or that of the running proxy, reads secrets are taken away from it.

The exit code is the program's (128 + n when signal n ended it). Waybill's own
failures: 125 could not prepare, 126 cannot execute, 127 no such program. At the
end a short account of what was sent goes to standard error.`,
		Example: `  waybill run -- curl https://api.example.com/v1/me
  waybill run -- claude`,
		RunE: func(cmd *cobra.Command, args []string) error {
			if flags.mcpConfig {
				return a.mcpConfig()
			}
			if len(args) == 0 && !flags.printEnv {
				return usageError(errors.New("run: no program given; write: waybill run -- CMD ARG…"))
			}
			err := a.runChild(cmd, &flags, args)
			var coded *codedError
			if err != nil && !errors.As(err, &coded) {
				err = &codedError{code: exitRunFailed, err: err}
			}
			return err
		},
	}
	f := cmd.Flags()
	// Everything after CMD is the program's.
	f.SetInterspersed(false)
	flags.register(cmd)
	f.BoolVar(&flags.printEnv, "print-env", false, "print the variables the program would get, with the session token masked, and run nothing")
	f.BoolVar(&flags.mcpConfig, "mcp-config", false, "print the JSON with which an MCP host starts \"waybill mcp\", and run nothing")
	f.BoolVar(&flags.asJSON, "json", false, "print the account as one JSON line on standard error; with --print-env, JSON on standard output")
	f.BoolVarP(&flags.quiet, "quiet", "q", false, "no account at the end")
	f.StringVar(&flags.name, "name", "", "name of the session (default: the program's name)")
	f.DurationVar(&flags.wait, "wait", 30*time.Second, "how long to wait at the end for requests that still run")
	f.StringVar(&flags.logLevel, "log-level", "error", "level of the log of a proxy that run starts: debug, info, warn, error")
	f.BoolVar(&flags.anyFilesystem, allowAnyFilesystem, false, "of a proxy that run starts: see waybill serve --help")
	return cmd
}

// joined is the proxy that the child will use.
type joined struct {
	client *adminClient
	server *server // nil when the proxy was running before
	facts  *configFacts
	since  time.Time // when server was started
}

// mine selects the actions of a run. A proxy that was started for it serves nobody
// else, so there they include those of programs that cannot send the session's token.
func (j *joined) mine(s session) dispatch.Filter {
	if j.server != nil {
		return dispatch.Filter{Since: j.since}
	}
	return dispatch.Filter{Caller: s.caller()}
}

// join finds the running proxy of the data folder, or starts one.
func (a *app) join(ctx context.Context, data string, flags *runFlags) (*joined, error) {
	// Whoever serves, this process holds the variables that the child does not get: it must
	// not read them from /proc either (CONTRACT C2). It must not inherit a lowered core
	// limit: only the memory of this process is protected.
	protectMemory()
	facts, cfgErr := a.loadFacts()
	client, err := a.running(ctx, data)
	if err == nil {
		if cfgErr != nil {
			// The proxy has its configuration, and tells which variables hold its secrets.
			_, _ = fmt.Fprintf(a.stderr, "waybill: %v; joined a running proxy without it\n", cfgErr)
			facts = &configFacts{}
		}
		return &joined{client: client, facts: facts}, nil
	}
	if !errors.Is(err, errNotRunning) {
		return nil, err
	}
	if cfgErr != nil {
		return nil, cfgErr
	}
	level, err := parseLevel(flags.logLevel)
	if err != nil {
		return nil, err
	}
	logger := newLogger(a.stderr, level, "text")
	redirectStandardLog(logger)
	since := time.Now()
	srv, err := startServer(ctx, a, serverOptions{
		data:    data,
		proxy:   "127.0.0.1:0",
		ssh:     "127.0.0.1:0",
		metrics: listenNothing,
		logger:  logger,

		anyFilesystem: flags.anyFilesystem,
	})
	if err != nil {
		return nil, err
	}
	client, err = dialAdmin(ctx, srv.adminPath)
	if err != nil {
		_ = srv.shutdown(ctx)
		return nil, fmt.Errorf("the proxy started, but its admin socket does not answer: %w", err)
	}
	return &joined{client: client, server: srv, facts: facts, since: since}, nil
}

func (j *joined) close(ctx context.Context) error {
	_ = j.client.Close()
	if j.server != nil {
		return j.server.shutdown(ctx)
	}
	return nil
}

func (a *app) runChild(cmd *cobra.Command, flags *runFlags, args []string) error {
	ctx := cmd.Context()
	data, err := a.dataDir()
	if err != nil {
		return err
	}
	if err := makeDataDir(data); err != nil {
		return err
	}
	if flags.printEnv {
		return a.printRunEnv(cmd, flags)
	}
	path, err := findProgram(args[0])
	if err != nil {
		return err
	}
	j, err := a.join(ctx, data, flags)
	if err != nil {
		return err
	}
	code, err := a.runJoined(cmd, flags, data, j, path, args)
	stop, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(flags.wait, time.Second))
	defer cancel()
	if cerr := j.close(stop); cerr != nil && err == nil {
		_, _ = fmt.Fprintf(a.stderr, "waybill: stopping the proxy: %v\n", cerr)
	}
	if err == nil && code != exitOK {
		return exitWith(code)
	}
	return err
}

// runJoined runs the program inside a session and prints the account.
func (a *app) runJoined(cmd *cobra.Command, flags *runFlags, data string, j *joined, path string, args []string) (exitCode, error) {
	ctx := cmd.Context()
	name := flags.name
	if name == "" {
		name = filepath.Base(args[0])
	}
	st, err := j.client.status(ctx)
	if err != nil {
		return 0, err
	}
	j.facts.hide(st)
	s, err := j.client.openSession(ctx, sessionName(name))
	if err != nil {
		return 0, fmt.Errorf("session: %w", err)
	}
	ca, err := ensureCA(data)
	if err != nil {
		return 0, err
	}
	dir, err := sessionDir(data)
	if err != nil {
		return 0, err
	}
	defer func() { _ = os.RemoveAll(dir) }()
	built, err := a.childEnvFor(cmd, &flags.envFlags, j.facts, reachableURL(s.ProxyURL), ca, dir).build()
	if err != nil {
		return 0, fmt.Errorf("environment: %w", err)
	}
	built.Set["WAYBILL_SESSION"] = s.ID
	if st.SSH != "" {
		// "waybill connect" takes the session's credentials from the proxy variables.
		built.Set[sshVariable] = reachable(st.SSH)
	}
	if !flags.quiet {
		for _, w := range built.Warnings {
			_, _ = fmt.Fprintf(a.stderr, "waybill: %s\n", w)
		}
	}
	code, err := a.execChild(j, path, args, built.Environ(a.environ))
	if err != nil {
		return 0, err
	}
	acc, aerr := j.account(ctx, a, s, flags.wait)
	if cerr := j.client.closeSession(ctx, s.ID); aerr == nil && cerr != nil {
		aerr = cerr
	}
	if aerr != nil {
		_, _ = fmt.Fprintf(a.stderr, "waybill: no account of this run: %v\n", aerr)
		return code, nil
	}
	acc.ExitCode, acc.joined = int(code), j.server == nil
	if !flags.quiet {
		err = acc.print(a.stderr, flags.asJSON)
	}
	return code, err
}

// sessionName makes a name that the admin API takes: up to 64 visible ASCII characters.
func sessionName(s string) string {
	s = strings.Map(func(r rune) rune {
		if r <= ' ' || r > '~' {
			return '_'
		}
		return r
	}, s)
	return s[:min(len(s), 64)]
}

// sessionDir makes the folder for one session's trust bundles. Folders that
// killed runs left behind hold no secrets but the path of our CA; they are
// removed after a day.
func sessionDir(data string) (string, error) {
	parent := filepath.Join(data, "run")
	if err := os.MkdirAll(parent, 0o700); err != nil {
		return "", fmt.Errorf("folder for trust bundles: %w", err)
	}
	if old, err := os.ReadDir(parent); err == nil {
		for _, e := range old {
			if info, err := e.Info(); err == nil && time.Since(info.ModTime()) > 24*time.Hour {
				_ = os.RemoveAll(filepath.Join(parent, e.Name()))
			}
		}
	}
	dir, err := os.MkdirTemp(parent, "s-")
	if err != nil {
		return "", fmt.Errorf("folder for trust bundles: %w", err)
	}
	return dir, nil
}

// findProgram tells "does not exist" from "cannot be executed", as shells do.
func findProgram(name string) (string, error) {
	path, err := exec.LookPath(name)
	switch {
	case errors.Is(err, exec.ErrNotFound), noFile(err):
		return "", fail(exitNoSuchCommand, "run: %s: no such program", name)
	case err != nil:
		return "", fail(exitCannotExecute, "run: %w", err)
	}
	return path, nil
}

// forwarded are the signals that are passed on to the child.
var forwarded = []os.Signal{syscall.SIGHUP, syscall.SIGINT, syscall.SIGQUIT, syscall.SIGTERM, syscall.SIGUSR1, syscall.SIGUSR2, syscall.SIGWINCH}

// execChild runs the program and returns its exit code.
func (a *app) execChild(j *joined, path string, args []string, env []string) (exitCode, error) {
	child := exec.Command(path, args[1:]...)
	child.Args[0] = args[0]
	child.Env = env
	child.Stdin, child.Stdout, child.Stderr = a.stdin, a.stdout, a.stderr

	signals := make(chan os.Signal, 16)
	signal.Notify(signals, forwarded...)
	defer signal.Stop(signals)
	if err := child.Start(); err != nil {
		return 0, fail(exitCannotExecute, "run: %w", err)
	}
	done := make(chan error, 1)
	go func() { done <- child.Wait() }()
	var fatal <-chan error
	if j.server != nil {
		fatal = j.server.fatal
	}
	for {
		select {
		case sig := <-signals:
			// The terminal sends these to the whole foreground group, the child included.
			if (sig == syscall.SIGINT || sig == syscall.SIGQUIT || sig == syscall.SIGWINCH) && inForeground() {
				continue
			}
			_ = child.Process.Signal(sig)
		case err := <-fatal:
			// Requests are refused from here on; what the child does with that is its matter.
			_, _ = fmt.Fprintf(a.stderr, "waybill: the journal stopped, further requests are refused: %v\n", err)
			fatal = nil
		case err := <-done:
			var exit *exec.ExitError
			switch {
			case err == nil:
				return exitOK, nil
			case errors.As(err, &exit):
				if ws, ok := exit.Sys().(syscall.WaitStatus); ok && ws.Signaled() {
					return exitSignalBase + exitCode(ws.Signal()), nil
				}
				return exitCode(exit.ExitCode()), nil
			default:
				return 0, fmt.Errorf("run: %w", err)
			}
		}
	}
}

// account is what a run sent.
type account struct {
	Session    string           `json:"session"`
	ExitCode   int              `json:"exit_code"`
	Actions    int              `json:"actions"`
	ByOutcome  map[string]int   `json:"by_outcome"`
	Running    int              `json:"running"`    // still running when the account was made
	Unresolved []unresolvedItem `json:"unresolved"` // outcome unknown
	Refused    []refusedGroup   `json:"refused"`    // not attempted or rejected, by what refused them

	joined bool // a proxy that serves others, too
}

// unresolvedItem is an action that needs a look.
type unresolvedItem struct {
	InvocationID string `json:"invocation_id"`
	Method       string `json:"method"`
	Target       string `json:"target"`
	Retry        string `json:"retry"`
	Code         string `json:"code"`
}

// account waits for the session's running actions and sums up.
func (j *joined) account(ctx context.Context, a *app, s session, wait time.Duration) (*account, error) {
	deadline := time.Now().Add(wait)
	interrupted := make(chan os.Signal, 1)
	signal.Notify(interrupted, syscall.SIGINT, syscall.SIGTERM)
	defer signal.Stop(interrupted)
	told := false
	for {
		acc := &account{Session: s.ID, ByOutcome: map[string]int{}, Unresolved: []unresolvedItem{}, Refused: []refusedGroup{}}
		for v, err := range j.client.Actions(ctx, j.mine(s)) {
			if err != nil {
				return nil, err
			}
			acc.add(v)
		}
		if acc.Running == 0 || time.Now().After(deadline) {
			return acc, acc.nameCredentials(ctx, j.client)
		}
		if !told {
			told = true
			_, _ = fmt.Fprintf(a.stderr, "waybill: waiting up to %v for %s that still %s (interrupt to stop waiting)\n", wait, plural(acc.Running, "request"), verb(acc.Running, "runs", "run"))
		}
		select {
		case <-interrupted:
			return acc, nil
		case <-ctx.Done():
			return acc, nil
		case <-time.After(200 * time.Millisecond):
		}
	}
}

func verb(n int, one, many string) string {
	if n == 1 {
		return one
	}
	return many
}

func (c *account) add(v dispatch.ActionView) {
	c.Actions++
	if !v.Ended {
		c.Running++
	}
	c.ByOutcome[v.Outcome]++
	c.addRefused(v)
	if v.Outcome == outcome.Unknown.String() {
		c.Unresolved = append(c.Unresolved, unresolvedItem{InvocationID: v.InvocationID, Method: v.Method, Target: v.Target, Retry: v.Retry, Code: v.Code})
	}
}

// maxUnresolvedLines is how many unknowns the account spells out for people.
const maxUnresolvedLines = 10

func (c *account) print(w io.Writer, asJSON bool) error {
	if asJSON {
		return printLine(w, c)
	}
	p := &errWriter{w: w}
	if c.Actions == 0 {
		if c.joined {
			// Java, for one, cannot send the session's token: its requests are another caller's.
			p.printf("waybill: no request came with this session's token (waybill actions lists those of all callers)\n")
			return p.err
		}
		p.printf("waybill: no request went through the proxy\n")
		return p.err
	}
	var parts []string
	for _, o := range outcome.Outcomes() {
		if n := c.ByOutcome[o.String()]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, o))
		}
	}
	p.printf("waybill: %s: %s\n", plural(c.Actions, "request"), strings.Join(parts, ", "))
	if c.Running > 0 {
		p.printf("  %d still running\n", c.Running)
	}
	c.printRefused(p)
	for i, u := range c.Unresolved {
		if i == maxUnresolvedLines {
			p.printf("  … and %d more: waybill actions --outcome unknown\n", len(c.Unresolved)-i)
			break
		}
		p.printf("  unknown  %s  %s %s  %s, retry: %s\n", u.InvocationID, printable(u.Method), printable(u.Target), u.Code, u.Retry)
	}
	if len(c.Unresolved) > 0 {
		p.printf("  what is known: waybill action ID\n")
	}
	return p.err
}

// printRunEnv prints what a program would get, without starting anything.
func (a *app) printRunEnv(cmd *cobra.Command, flags *runFlags) error {
	built, err := a.buildShellEnv(cmd, &flags.envFlags, false)
	if err != nil {
		return err
	}
	proxyURL := built.Set["HTTPS_PROXY"]
	for name, v := range built.Set {
		built.Set[name] = maskToken(v, proxyURL)
	}
	if flags.asJSON {
		return printJSON(a.stdout, map[string]any{"set": built.Set, "unset": append([]string{}, built.Unset...)})
	}
	p := &errWriter{w: a.stdout}
	for _, name := range slices.Sorted(maps.Keys(built.Set)) {
		p.printf("%s=%s\n", name, built.Set[name])
	}
	for _, name := range built.Unset {
		p.printf("# unset %s\n", name)
	}
	return p.err
}

// parseLevel reads --log-level.
func parseLevel(s string) (slog.Level, error) {
	var l slog.Level
	switch s {
	case "debug", "info", "warn", "error":
		return l, l.UnmarshalText([]byte(s))
	default:
		return 0, fail(exitUsage, "--log-level %s: is one of debug, info, warn, error", s)
	}
}
