package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/spf13/cobra"

	"waybill/client"
	"waybill/internal/config"
)

// mcpFlags are the flags of "mcp".
type mcpFlags struct {
	http          string
	tokenFile     string
	session       string
	wait          time.Duration
	logLevel      string
	anyFilesystem bool
}

func newMCP(a *app) *cobra.Command {
	var flags mcpFlags
	cmd := &cobra.Command{
		Use:   "mcp",
		Short: "Offer requests through the proxy as MCP tools",
		Long: `Offer requests through the proxy as MCP tools, over standard input and output, or
over HTTP on loopback with a token (--http).

Joins the proxy that runs with this data folder, or starts one for as long as the
command runs. A failure carries the whole envelope, whose first sentence says what
may be done now. Cancelling a call is not an undo: what was sent goes on, and its
result can be fetched – also by the next "waybill mcp" with the same --session.

"waybill run --mcp-config" prints what an MCP host wants to be told.`,
		Example: `  waybill mcp
  waybill mcp --http 127.0.0.1:7175`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.mcp(cmd.Context(), &flags) },
	}
	f := cmd.Flags()
	f.StringVar(&flags.http, "http", "", "serve streamable HTTP on this loopback `address` instead of standard input and output (port 0: any free one)")
	f.StringVar(&flags.tokenFile, "token-file", "", "`file` with the token for --http; made when missing (default <data>/mcp/token)")
	f.StringVar(&flags.session, "session", "mcp", "`name` of the session: the same name sees the actions of earlier runs")
	f.DurationVar(&flags.wait, "wait", 30*time.Second, "how long to wait at the end for requests that still run, of a proxy that mcp starts")
	f.StringVar(&flags.logLevel, "log-level", "error", "level of the log of a proxy that mcp starts: debug, info, warn, error; it goes to standard error")
	f.BoolVar(&flags.anyFilesystem, allowAnyFilesystem, false, "of a proxy that mcp starts: see waybill serve --help")
	return cmd
}

// mcp runs until the host closes the pipe, or a signal comes.
func (a *app) mcp(ctx context.Context, flags *mcpFlags) (err error) {
	if !plainName(flags.session) {
		return fail(exitUsage, "--session: 1 to 64 letters, digits, dots, dashes and underscores")
	}
	if flags.http != "" && !config.IsLoopback(flags.http) {
		return fail(exitUsage, "--http %s: only a loopback address is served; others than this machine could reach it", flags.http)
	}
	// A host that closed its end must not kill this process, which may be the proxy: a
	// write to it fails instead.
	signal.Ignore(syscall.SIGPIPE)
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGTERM, syscall.SIGINT, syscall.SIGHUP)
	defer stop()
	data, err := a.dataDir()
	if err != nil {
		return err
	}
	if err := makeDataDir(data); err != nil {
		return err
	}
	j, err := a.join(ctx, data, &runFlags{logLevel: flags.logLevel, anyFilesystem: flags.anyFilesystem})
	if err != nil {
		return err
	}
	defer func() {
		end, cancel := context.WithTimeout(context.WithoutCancel(ctx), max(flags.wait, time.Second))
		defer cancel()
		if cerr := j.close(end); cerr != nil && err == nil {
			_, _ = fmt.Fprintf(a.stderr, "waybill: stopping the proxy: %v\n", cerr)
		}
	}()
	c, err := a.mcpClient(ctx, j, data, flags.session)
	if err != nil {
		return err
	}
	tools := &mcpTools{client: c, caller: sessionName(flags.session), snapshot: a.loadSnapshot, progressEvery: 2 * time.Second}
	served := make(chan error, 1)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		if flags.http != "" {
			served <- a.mcpHTTP(ctx, tools, flags, data)
		} else {
			served <- tools.server().Run(ctx, &mcp.IOTransport{Reader: io.NopCloser(a.stdin), Writer: writeOnly{a.stdout}})
		}
	}()
	var fatal <-chan error
	if j.server != nil {
		fatal = j.server.fatal
	}
	select {
	case err = <-served:
	case err = <-fatal:
		cancel()
		if serr := <-served; serr != nil && !errors.Is(serr, context.Canceled) {
			_, _ = fmt.Fprintf(a.stderr, "waybill: mcp: %v\n", serr)
		}
		return err
	}
	if err == nil || ctx.Err() != nil || brokenPipe(err) {
		return nil
	}
	var coded *codedError
	if errors.As(err, &coded) {
		return err
	}
	return fail(exitFailure, "mcp: %w", err)
}

// brokenPipe reports whether the host is gone: the ordinary end of a server on a pipe.
func brokenPipe(err error) bool {
	return errors.Is(err, io.EOF) || errors.Is(err, syscall.EPIPE) || errors.Is(err, mcp.ErrConnectionClosed) || errors.Is(err, io.ErrClosedPipe)
}

// writeOnly keeps the SDK from closing standard output.
type writeOnly struct{ io.Writer }

// Close does nothing.
func (writeOnly) Close() error { return nil }

// plainName reports whether s can be the name of a file and of a session.
func plainName(s string) bool {
	return s != "" && len(s) <= 64 && s != "." && s != ".." &&
		strings.Trim(s, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-") == ""
}

// mcpSession is what is kept of a session, so that a host that starts the command anew
// finds the results of its earlier actions (CONTRACT H2, V4). The file is as secret as
// the data folder it lies in.
type mcpSession struct {
	ID    string `json:"id"`
	Token string `json:"token"`
}

// errProxyTLS says that there is no way to the proxy: the client speaks plain HTTP to it.
var errProxyTLS = fail(exitConfig, "mcp: callers of this proxy speak TLS (listen.proxy_tls), which mcp does not; give it a configuration without that, and a data folder of its own: waybill mcp --config FILE --data FOLDER")

// mcpClient opens the session, or takes up the one of an earlier run.
func (a *app) mcpClient(ctx context.Context, j *joined, data, name string) (*client.Client, error) {
	status, err := j.client.status(ctx)
	if err != nil {
		return nil, err
	}
	if status.ProxyTLS {
		return nil, errProxyTLS // the session's token would go to it in clear
	}
	dir := filepath.Join(data, "mcp")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fail(exitConfig, "folder for sessions: %w", err)
	}
	path := filepath.Join(dir, name+".json")
	var s mcpSession
	if raw, err := os.ReadFile(path); err == nil && json.Unmarshal(raw, &s) == nil && s.Token != "" {
		c, err := a.newProxyClient(data, status.Proxy, s)
		if err != nil {
			return nil, err
		}
		if sessionOpen(ctx, c) {
			return c, nil
		}
	}
	opened, err := j.client.openSession(ctx, sessionName(name))
	if err != nil {
		return nil, fmt.Errorf("session: %w", err)
	}
	s = mcpSession{ID: opened.ID, Token: opened.Token}
	raw, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	if err := writePrivate(path, raw); err != nil {
		return nil, fail(exitConfig, "session: %w", err)
	}
	return a.newProxyClient(data, status.Proxy, s)
}

// sessionOpen reports whether the proxy still takes the session. A proxy that does not
// answer closes none.
func sessionOpen(ctx context.Context, c *client.Client) bool {
	for _, err := range c.Actions(ctx, client.Filter{Limit: 1}) {
		var e *client.Error
		return !errors.As(err, &e)
	}
	return true
}

// newProxyClient goes to a loopback proxy in absolute form, to another one through
// tunnels under its CA.
func (a *app) newProxyClient(data, addr string, s mcpSession) (*client.Client, error) {
	addr = reachable(addr)
	o := client.Options{Proxy: "http://" + s.ID + ":" + s.Token + "@" + addr, Repeats: 2}
	if o.AbsoluteForm = config.IsLoopback(addr); !o.AbsoluteForm {
		ca, err := ensureCA(data)
		if err != nil {
			return nil, err
		}
		roots, err := client.FromEnvironment(func(name string) string {
			return map[string]string{"HTTPS_PROXY": o.Proxy, "SSL_CERT_FILE": ca}[name]
		})
		if err != nil {
			return nil, fail(exitConfig, "mcp: %w", err)
		}
		o.Roots = roots.Roots
	}
	c, err := client.New(o)
	if err != nil {
		return nil, fail(exitFailure, "mcp: %w", err)
	}
	return c, nil
}

// writePrivate replaces a file with mode 0600.
func writePrivate(path string, data []byte) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".mcp-*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, err = f.Write(data)
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return err
	}
	return os.Rename(f.Name(), path)
}

// mcpConfig prints what common MCP hosts take: the command that they start.
func (a *app) mcpConfig() error {
	self, err := os.Executable()
	if err != nil {
		return fail(exitFailure, "--mcp-config: %w", err)
	}
	args := []string{"mcp"}
	data, err := a.dataDir()
	if err != nil {
		return err
	}
	conf, err := filepath.Abs(a.configPath())
	if err != nil {
		return fail(exitFailure, "--mcp-config: %w", err)
	}
	args = append(args, "--config", conf, "--data", data)
	if a.adminFlag != "" {
		args = append(args, "--admin", a.adminFlag)
	}
	type server struct {
		Command string   `json:"command"`
		Args    []string `json:"args"`
	}
	return printJSON(a.stdout, map[string]any{"mcpServers": map[string]server{"waybill": {Command: self, Args: args}}})
}
