package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"
)

// defaultNoProxy keeps traffic between programs of one machine off the proxy.
// Names of it that a route takes are left out.
var defaultNoProxy = []string{"localhost", "127.0.0.1", "::1"}

// noProxyFor returns the value of NO_PROXY: never the inherited one. flag is
// --no-proxy, or nil.
func noProxyFor(flag *string, routed func(host string) bool) string {
	if flag != nil {
		return *flag
	}
	names := slices.DeleteFunc(slices.Clone(defaultNoProxy), routed)
	return strings.Join(names, ",")
}

// envFlags are what "run" and "env" have in common.
type envFlags struct {
	noProxy  string
	allProxy bool
}

func (f *envFlags) register(cmd *cobra.Command) {
	cmd.Flags().StringVar(&f.noProxy, "no-proxy", "", "value of NO_PROXY; an inherited one is never used (default \"localhost,127.0.0.1,::1\" without the names that a route takes)")
	cmd.Flags().BoolVar(&f.allProxy, "all-proxy", false, "set ALL_PROXY too: programs then CONNECT to any port")
}

// childEnvFor prepares the builder.
func (a *app) childEnvFor(cmd *cobra.Command, f *envFlags, facts *configFacts, proxyURL, caFile, dir string) *childEnv {
	var flag *string
	if cmd.Flags().Changed("no-proxy") {
		flag = &f.noProxy
	}
	return &childEnv{
		Inherited:    a.environ,
		ProxyURL:     proxyURL,
		NoProxy:      noProxyFor(flag, facts.routed),
		AllProxy:     f.allProxy,
		CAFile:       caFile,
		Dir:          dir,
		Secrets:      facts.secretVars,
		Placeholders: withPresets(placeholderValues(facts.injects, facts.tunnel), facts.placeholders),
		SystemRoots:  systemRoots(),
	}
}

func newEnv(a *app) *cobra.Command {
	var (
		flags         envFlags
		shell         string
		asJSON, login bool
	)
	cmd := &cobra.Command{
		Use:   "env",
		Short: "Print the variables that send a shell's programs through the proxy",
		Long: `Print the variables that send a shell's programs through the proxy and make
them trust its CA. "waybill run" sets the same for one program, without leaving
anything behind.`,
		Example: `  eval "$(waybill env)"
  waybill env --shell fish | source`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if shell == "" {
				shell = shellOf(a.getenv("SHELL"))
			}
			print, ok := shells[shell]
			if !ok {
				return fail(exitUsage, "--shell %s: is one of %s", shell, strings.Join(slices.Sorted(maps.Keys(shells)), ", "))
			}
			built, err := a.buildShellEnv(cmd, &flags, login)
			if err != nil {
				return err
			}
			for _, w := range built.Warnings {
				_, _ = fmt.Fprintf(a.stderr, "waybill: %s\n", w)
			}
			if asJSON {
				return printJSON(a.stdout, map[string]any{"set": built.Set, "unset": append([]string{}, built.Unset...)})
			}
			return print(a.stdout, built)
		},
	}
	flags.register(cmd)
	f := cmd.Flags()
	f.StringVar(&shell, "shell", "", "sh, fish or powershell (default: by $SHELL)")
	f.BoolVar(&login, "session", false, "open a session of its own; needs a running proxy, and ends with it")
	f.BoolVar(&asJSON, "json", false, "print JSON: {\"set\": {…}, \"unset\": […]}")
	_ = cmd.RegisterFlagCompletionFunc("shell", cobra.FixedCompletions(slices.Sorted(maps.Keys(shells)), cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// buildShellEnv finds the address: of the running proxy, else of the configuration.
func (a *app) buildShellEnv(cmd *cobra.Command, flags *envFlags, login bool) (*builtEnv, error) {
	data, err := a.dataDir()
	if err != nil {
		return nil, err
	}
	if err := makeDataDir(data); err != nil {
		return nil, err
	}
	proxyURL, facts, err := a.shellProxy(cmd.Context(), data, login)
	if err != nil {
		return nil, err
	}
	ca, err := ensureCA(data)
	if err != nil {
		return nil, err
	}
	// These files outlive the command: the shell goes on using them.
	dir := filepath.Join(data, "env")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fail(exitFailure, "folder for trust bundles: %w", err)
	}
	built, err := a.childEnvFor(cmd, flags, facts, proxyURL, ca, dir).build()
	if err != nil {
		return nil, fail(exitFailure, "environment: %w", err)
	}
	return built, nil
}

func (a *app) shellProxy(ctx context.Context, data string, login bool) (string, *configFacts, error) {
	facts, cfgErr := a.loadFacts()
	client, err := a.running(ctx, data)
	switch {
	case err == nil:
		defer func() { _ = client.Close() }()
		if cfgErr != nil {
			facts = &configFacts{}
		}
		st, err := client.status(ctx)
		if err != nil {
			return "", nil, err
		}
		facts.hide(st)
		if login || facts.callersAuthenticate {
			s, err := client.openSession(ctx, "env")
			if err != nil {
				return "", nil, err
			}
			return reachableURL(s.ProxyURL), facts, nil
		}
		return st.proxyURL(), facts, nil
	case !errors.Is(err, errNotRunning):
		return "", nil, err
	case cfgErr != nil:
		return "", nil, fmt.Errorf("no proxy runs, and its address is not known: %w", cfgErr)
	case login || facts.callersAuthenticate:
		return "", nil, fail(exitUnavailable, "callers have to authenticate, and no proxy runs that could open a session; start it first: waybill serve")
	}
	_, _ = fmt.Fprintf(a.stderr, "waybill: no proxy runs yet; start it with \"waybill serve\"\n")
	return "http://" + reachable(facts.proxyListen), facts, nil
}

// reachable is the address at which programs of this machine reach a listener: one
// that listens on every address is reached on loopback.
func reachable(addr string) string {
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		return addr
	}
	if ip, err := netip.ParseAddr(host); host == "" || err == nil && ip.IsUnspecified() {
		host = "127.0.0.1"
	}
	return net.JoinHostPort(host, port)
}

// reachableURL is reachable for the URL of a session.
func reachableURL(s string) string {
	u, err := url.Parse(s)
	if err != nil {
		return s
	}
	u.Host = reachable(u.Host)
	return u.String()
}

// shells print a built environment.
var shells = map[string]func(io.Writer, *builtEnv) error{
	"sh": func(w io.Writer, b *builtEnv) error {
		return eachVar(w, b, "unset %s\n", "export %s=%s\n", func(s string) string {
			return "'" + strings.ReplaceAll(s, "'", `'\''`) + "'"
		})
	},
	"fish": func(w io.Writer, b *builtEnv) error {
		return eachVar(w, b, "set -e %s\n", "set -gx %s %s\n", func(s string) string {
			return "'" + strings.NewReplacer(`\`, `\\`, "'", `\'`).Replace(s) + "'"
		})
	},
	"powershell": func(w io.Writer, b *builtEnv) error {
		return eachVar(w, b, "Remove-Item -ErrorAction SilentlyContinue Env:%s\n", "$env:%s = %s\n", func(s string) string {
			return "'" + strings.ReplaceAll(s, "'", "''") + "'"
		})
	},
}

func eachVar(w io.Writer, b *builtEnv, unset, set string, quote func(string) string) error {
	for _, name := range b.Unset {
		if _, err := fmt.Fprintf(w, unset, name); err != nil {
			return err
		}
	}
	for _, name := range slices.Sorted(maps.Keys(b.Set)) {
		if _, err := fmt.Fprintf(w, set, name, quote(b.Set[name])); err != nil {
			return err
		}
	}
	return nil
}

func shellOf(path string) string {
	switch filepath.Base(path) {
	case "fish":
		return "fish"
	case "pwsh", "powershell":
		return "powershell"
	default:
		return "sh"
	}
}

// maskToken hides the password of a proxy URL for output that people copy around.
func maskToken(value, proxyURL string) string {
	u, err := url.Parse(proxyURL)
	if err != nil || u.User == nil {
		return value
	}
	token, ok := u.User.Password()
	if !ok || token == "" {
		return value
	}
	return strings.ReplaceAll(value, token, "***")
}
