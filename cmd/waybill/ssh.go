package main

import (
	"bufio"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"waybill/dispatch"
	"waybill/outcome"
	"waybill/proxy"
)

// defaultSSHListen is the address of the SSH endpoint where nothing else is configured
// (DESIGN section 4).
const defaultSSHListen = "127.0.0.1:7172"

// sshVariable names the SSH endpoint for "waybill connect": host:port, or a URL with the
// caller's credentials.
const sshVariable = "WAYBILL_SSH"

// sshFolder is the part of the data folder that holds the SSH CA.
func sshFolder(data string) string { return filepath.Join(data, "ssh") }

// ensureSSHCA makes the SSH CA of a data folder if it has none.
func ensureSSHCA(data string) (*proxy.SSHCA, error) {
	ca, err := proxy.LoadOrCreateSSHCA(sshFolder(data))
	if err != nil {
		return nil, fail(exitConfig, "%w", err)
	}
	return ca, nil
}

func newSSHConfig(a *app) *cobra.Command {
	var addr, pattern string
	var known, hostKey, asJSON bool
	cmd := &cobra.Command{
		Use:   "ssh-config",
		Short: "Print an ssh_config by which ssh, git, rsync and scp -O run through the proxy",
		Long: `Print an ssh_config block, and as a comment the one line that makes any SSH client
trust the host keys behind the endpoint. Makes the SSH CA if there is none.

  waybill ssh-config > waybill_ssh_config
  ssh -F waybill_ssh_config deploy@box.example.com uptime
  GIT_SSH_COMMAND="ssh -F waybill_ssh_config" git fetch
  rsync -e "ssh -F waybill_ssh_config" …
  scp -O -F waybill_ssh_config file deploy@box.example.com:

No private key is used or needed: Waybill logs in with the route's key.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			data, err := a.dataDir()
			if err != nil {
				return err
			}
			if err := makeDataDir(data); err != nil {
				return err
			}
			ca, err := ensureSSHCA(data)
			if err != nil {
				return err
			}
			line := ca.KnownHostsLine()
			if known {
				_, err := fmt.Fprintln(a.stdout, line)
				return err
			}
			if hostKey {
				_, err := fmt.Fprintln(a.stdout, ca.HostKeyLine())
				return err
			}
			exe, err := os.Executable()
			if err != nil {
				return fail(exitFailure, "ssh-config: %w", err)
			}
			endpoint := a.sshEndpoint(cmd.Context(), addr, "")
			how := "--fallback " // what "waybill run" or the caller's token says goes first
			if addr != "" {
				how = "--ssh "
			}
			block := sshConfig(exe, how+endpoint.addr, pattern, filepath.Join(sshFolder(data), proxy.SSHKnownHostsFile))
			if asJSON {
				return printJSON(a.stdout, struct {
					KnownHosts string `json:"known_hosts"`
					HostKey    string `json:"host_key"`
					Endpoint   string `json:"endpoint"`
					Config     string `json:"config"`
				}{line, ca.HostKeyLine(), endpoint.addr, block})
			}
			_, err = fmt.Fprintf(a.stdout, "# Waybill's SSH endpoint. Clients with a known_hosts of their own need one line there:\n# %s\n"+
				"# those that know no certificates (paramiko, plink) the host key itself:\n# %s\n%s", line, ca.HostKeyLine(), block)
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&addr, "ssh", "", "`address` of the SSH endpoint (default $"+sshVariable+", else that of the running proxy, else listen.ssh)")
	f.StringVar(&pattern, "host", "*", "the Host `pattern` of the block")
	f.BoolVar(&known, "known-hosts", false, "print the @cert-authority line only")
	f.BoolVar(&hostKey, "host-key", false, "print the host key only, for clients that know no certificates")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	cmd.MarkFlagsMutuallyExclusive("known-hosts", "host-key", "json")
	return cmd
}

// sshConfig is the block for OpenSSH.
func sshConfig(exe, endpoint, pattern, known string) string {
	quote := func(s string) string { return `"` + s + `"` }
	// In ProxyCommand % begins a token, and a shell reads the line.
	command := "'" + strings.ReplaceAll(strings.ReplaceAll(exe, "%", "%%"), "'", `'\''`) + "' connect " + endpoint + " %h %p"
	return "Host " + pattern + `
  ProxyCommand ` + command + `
  UserKnownHostsFile ` + quote(known) + `
  GlobalKnownHostsFile /dev/null
  StrictHostKeyChecking yes
  HostKeyAlgorithms ssh-ed25519-cert-v01@openssh.com
  UpdateHostKeys no
  PubkeyAuthentication no
  IdentityAgent none
  PreferredAuthentications password
  NumberOfPasswordPrompts 1
  ForwardAgent no
  ForwardX11 no
  SendEnv ` + dispatch.EnvSupersedes + " " + dispatch.EnvRequestID + " " + dispatch.EnvTimeout + `
`
}

// sshEndpoint is where the SSH endpoint is, and what the caller presents there.
type sshEndpoint struct {
	addr string
	auth string // of Proxy-Authorization; "": nothing
}

// sshEndpoint finds the endpoint, and what is presented there.
func (a *app) sshEndpoint(ctx context.Context, flag, fallback string) sshEndpoint {
	addr := a.sshAddress(ctx, flag, fallback)
	return sshEndpoint{addr: addr, auth: a.sshAuth(addr)}
}

// sshAddress finds the endpoint: flag, WAYBILL_SSH, fallback, the running proxy, the
// configuration, the default.
func (a *app) sshAddress(ctx context.Context, flag, fallback string) string {
	named := ""
	if u := a.proxyVariable(sshVariable); u != nil {
		named = u.Host
	}
	if addr := firstOf(flag, named, fallback); addr != "" {
		return addr
	}
	if data, err := a.dataDir(); err == nil {
		if client, err := a.running(ctx, data); err == nil {
			defer func() { _ = client.Close() }()
			if st, err := client.status(ctx); err == nil && st.SSH != "" {
				return reachable(st.SSH)
			}
		}
	}
	if cfg, _, err := loadFile(a.configPath(), nil); err == nil && cfg.sshListen != "" {
		return reachable(cfg.sshListen)
	}
	return defaultSSHListen
}

// sshAuth finds the credentials for the endpoint at addr: of WAYBILL_SSH, else of the proxy
// variables. They go over the network in clear, so a variable's are for the host that it
// names (CONTRACT V2): HTTPS_PROXY is often another proxy. Those of a session of "waybill
// run" are for the endpoint that run named, too.
func (a *app) sshAuth(addr string) string {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return ""
	}
	session, ours := a.getenv("WAYBILL_SESSION"), a.proxyVariable(sshVariable)
	for _, name := range []string{sshVariable, "HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy"} {
		u := a.proxyVariable(name)
		if u == nil || u.User == nil {
			continue
		}
		ofSession := session != "" && u.User.Username() == session && ours != nil && ours.Host == addr
		if strings.EqualFold(u.Hostname(), host) || ofSession {
			password, _ := u.User.Password()
			return "Basic " + base64.StdEncoding.EncodeToString([]byte(u.User.Username()+":"+password))
		}
	}
	return ""
}

// proxyVariable is the URL in a variable; nil: there is none.
func (a *app) proxyVariable(name string) *url.URL {
	v := a.getenv(name)
	if name == sshVariable && !strings.Contains(v, "://") {
		v = "http://" + v
	}
	u, err := url.Parse(v)
	if err != nil || u.Host == "" {
		return nil
	}
	return u
}

func newConnect(a *app) *cobra.Command {
	var addr, fallback string
	cmd := &cobra.Command{
		Use:   "connect HOST PORT",
		Short: "The ProxyCommand of an SSH client: a tunnel through the SSH endpoint",
		Long: `Open a tunnel to HOST PORT through the SSH endpoint and connect it to standard
input and output: ssh -o ProxyCommand='waybill connect %h %p'. See waybill
ssh-config for a whole configuration.

A caller that has to authenticate puts its token into WAYBILL_SSH
(http://any:TOKEN@127.0.0.1:7172); inside "waybill run" the session's is used.`,
		Args: cobra.ExactArgs(2),
		RunE: func(cmd *cobra.Command, args []string) error {
			port, err := strconv.ParseUint(args[1], 10, 16)
			if err != nil || port == 0 {
				return fail(exitUsage, "connect: %s is no port", args[1])
			}
			if strings.ContainsAny(args[0], " \t\r\n/@") || args[0] == "" {
				return fail(exitUsage, "connect: %q is no host", args[0])
			}
			return a.connect(cmd.Context(), a.sshEndpoint(cmd.Context(), addr, fallback), net.JoinHostPort(strings.Trim(args[0], "[]"), args[1]))
		},
	}
	cmd.Flags().StringVar(&addr, "ssh", "", "`address` of the SSH endpoint (default $"+sshVariable+", else that of the running proxy, else listen.ssh)")
	cmd.Flags().StringVar(&fallback, "fallback", "", "`address` of the SSH endpoint where $"+sshVariable+" names none")
	return cmd
}

// connectTime bounds the time until the tunnel is open.
const connectTime = 20 * time.Second

func (a *app) connect(ctx context.Context, e sshEndpoint, target string) error {
	d := net.Dialer{Timeout: connectTime}
	conn, err := d.DialContext(ctx, "tcp", e.addr)
	if err != nil {
		return fail(exitUnavailable, "no SSH endpoint at %s: %w; is waybill serve running?", e.addr, err)
	}
	defer func() { _ = conn.Close() }()
	_ = conn.SetDeadline(time.Now().Add(connectTime))
	head := "CONNECT " + target + " HTTP/1.1\r\nHost: " + target + "\r\n"
	if e.auth != "" {
		head += "Proxy-Authorization: " + e.auth + "\r\n"
	}
	if _, err := io.WriteString(conn, head+"\r\n"); err != nil {
		return fail(exitUnavailable, "SSH endpoint at %s: %w", e.addr, err)
	}
	r := bufio.NewReader(conn)
	resp, err := http.ReadResponse(r, &http.Request{Method: http.MethodConnect})
	if err != nil {
		return fail(exitUnavailable, "SSH endpoint at %s: no answer to CONNECT: %w", e.addr, err)
	}
	if resp.StatusCode != http.StatusOK {
		return refusedTunnel(resp)
	}
	_ = conn.SetDeadline(time.Time{})
	go func() {
		_, _ = io.Copy(conn, a.stdin)
		if half, ok := conn.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite()
		}
	}()
	_, err = io.Copy(a.stdout, r)
	if err != nil && !errors.Is(err, net.ErrClosed) {
		return fail(exitFailure, "tunnel to %s: %w", target, err)
	}
	return nil
}

// refusedTunnel tells what the endpoint said.
func refusedTunnel(resp *http.Response) error {
	var env outcome.Envelope
	body, _ := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	_ = resp.Body.Close()
	if json.Unmarshal(body, &env) == nil && env.Error != nil {
		return fail(exitUnavailable, "%s %s: %s", env.Error.Code, env.InvocationID, env.Error.Message)
	}
	return fail(exitUnavailable, "the SSH endpoint answered CONNECT with %s", resp.Status)
}
