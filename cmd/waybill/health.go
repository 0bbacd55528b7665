package main

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

func newHealth(a *app) *cobra.Command {
	var (
		addr    string
		live    bool
		asJSON  bool
		timeout time.Duration
	)
	cmd := &cobra.Command{
		Use:   "health",
		Short: "Ask a running proxy whether it is ready",
		Long: `Ask a running proxy whether it is ready: configuration loaded, journal writable,
listeners up, not draining. For the health check of a container and for scripts;
it needs no shell and no other program.

The exit code is 0 when it is, 7 when it is not or does not answer.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			err := a.health(cmd.Context(), addr, live, timeout)
			var coded *codedError
			switch {
			case err == nil && asJSON:
				return printJSON(a.stdout, healthDocument{OK: true})
			case err == nil:
				_, err = io.WriteString(a.stdout, "ok\n")
			case asJSON && errors.As(err, &coded) && coded.code == exitUnavailable:
				if perr := printJSON(a.stdout, healthDocument{Reason: err.Error()}); perr != nil {
					return perr
				}
			}
			return err
		},
	}
	cmd.Flags().StringVar(&addr, "metrics", "", "`address` of the proxy's metrics and health listener (default listen.metrics, else "+defaultMetricsListen+")")
	cmd.Flags().BoolVar(&live, "live", false, "ask only whether the process is alive")
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().DurationVar(&timeout, "timeout", 3*time.Second, "how long to wait")
	return cmd
}

// healthDocument is what "health --json" prints.
type healthDocument struct {
	OK     bool   `json:"ok"`
	Reason string `json:"reason,omitempty"`
}

func (a *app) health(ctx context.Context, addr string, live bool, timeout time.Duration) error {
	if addr == "" {
		addr = defaultMetricsListen
		// A configuration that cannot be read is the proxy's to report, not this command's.
		if cfg, err := a.loadConfig(); err == nil {
			addr = firstOf(cfg.metricsListen, defaultMetricsListen)
		}
	}
	if addr == listenNothing {
		return fail(exitUsage, "--metrics off: there is no listener to ask")
	}
	if host, port, err := net.SplitHostPort(addr); err == nil {
		// A listener on every address answers on this machine's own.
		if ip := net.ParseIP(host); host == "" || ip != nil && ip.IsUnspecified() {
			addr = net.JoinHostPort("127.0.0.1", port)
		}
	}
	path := "/readyz"
	if live {
		path = "/livez"
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+addr+path, http.NoBody)
	if err != nil {
		return fail(exitUsage, "--metrics %s: is no address; write HOST:PORT", addr)
	}
	// Never through a proxy: least of all through the one that is asked.
	client := &http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}}
	resp, err := client.Do(req)
	if err != nil {
		return fail(exitUnavailable, "not healthy: %s does not answer", addr)
	}
	defer func() { _ = resp.Body.Close() }()
	text, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<10))
	if resp.StatusCode != http.StatusOK {
		return fail(exitUnavailable, "not healthy: %s", strings.TrimSpace(string(text)))
	}
	return nil
}
