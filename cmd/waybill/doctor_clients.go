package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"
)

// clientProbe is one program that may be on this machine.
type clientProbe struct {
	name    string
	program string // "": this one
	needs   string // a further program without which it cannot be tried
	files   [][2]string
	args    func(url string) []string
	// absent: the exit code that says the program has not got the library in question.
	absent int
	// around and distrust say what to do when it went around the proxy, or came there
	// and sent nothing through.
	around, distrust string
}

const pythonProbe = `import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=15).status)`

const requestsProbe = `import sys
try:
    import requests
except ImportError:
    sys.exit(77)
print(requests.get(sys.argv[1], timeout=15).raise_for_status() or "ok")`

const nodeProbe = `fetch(process.argv[1]).then(r => { console.log(r.status); process.exit(r.ok ? 0 : 1) },
	e => { console.error(process.version + ": " + String(e.cause && (e.cause.code || e.cause.message) || e.message)); process.exit(1) })`

const javaProbe = `public class Probe {
	public static void main(String[] a) throws Exception {
		java.net.HttpURLConnection c = (java.net.HttpURLConnection) new java.net.URI(a[0]).toURL().openConnection();
		c.setConnectTimeout(10000);
		c.setReadTimeout(15000);
		System.exit(c.getResponseCode() == 200 ? 0 : 1);
	}
}`

var clientProbes = []clientProbe{
	{
		name: "curl", program: "curl", args: func(u string) []string { return []string{"-fsS", "--max-time", "15", "-o", os.DevNull, u} },
		around: "look into ~/.curlrc for proxy and noproxy", distrust: "look into ~/.curlrc for cacert and capath; CURL_CA_BUNDLE names the bundle",
	},
	{
		name: "wget", program: "wget", args: func(u string) []string { return []string{"-q", "-T", "15", "-t", "1", "-O", os.DevNull, u} },
		around: "look into /etc/wgetrc for https_proxy and use_proxy", distrust: "WGETRC names the file that sets ca_certificate; a system-wide /etc/wgetrc may set another",
	},
	{
		name: "git", program: "git", args: func(u string) []string { return []string{"ls-remote", u + "repo.git"} },
		around: "git config --show-origin --get-regexp 'http.*proxy': a setting there wins over the variables", distrust: "git config --show-origin --get-regexp 'http.*sslcainfo': a setting there wins over GIT_SSL_CAINFO",
	},
	{
		name: "python", program: "python3", args: func(u string) []string { return []string{"-c", pythonProbe, u} },
		around: "urllib reads https_proxy and no_proxy; see whether a sitecustomize changes them", distrust: "SSL_CERT_FILE names the bundle; a Python with an OpenSSL of its own may ignore it",
	},
	{
		name: "python-requests", program: "python3", args: func(u string) []string { return []string{"-c", requestsProbe, u} }, absent: 77,
		around: "look into ~/.netrc and for trust_env=False", distrust: "REQUESTS_CA_BUNDLE names the bundle",
	},
	{
		name: "node", program: "node", args: func(u string) []string { return []string{"-e", nodeProbe, u} },
		around:   "fetch reads the variables since Node 24 (22.21) with NODE_USE_ENV_PROXY=1; with an older one use undici's EnvHttpProxyAgent",
		distrust: "NODE_EXTRA_CA_CERTS names the certificate; NODE_OPTIONS=--use-openssl-ca hides it",
	},
	{
		name: "java", program: "java", needs: "javac", files: [][2]string{{"Probe.java", javaProbe}}, args: func(u string) []string { return []string{"Probe.java", u} },
		around: "Java takes its proxy from JAVA_TOOL_OPTIONS; a program may set another", distrust: "JAVA_TOOL_OPTIONS names the trust store; a program may set another",
	},
	{
		name: "go", args: func(u string) []string { return []string{"doctor-client", u} },
		around: "Go reads HTTPS_PROXY and NO_PROXY at a program's start", distrust: "SSL_CERT_FILE names the bundle",
	},
}

// newDoctorClient is the Go client among the clients.
func newDoctorClient() *cobra.Command {
	return &cobra.Command{
		Use: "doctor-client URL", Hidden: true, Args: cobra.ExactArgs(1), Short: "Send one request as a Go program does",
		RunE: func(cmd *cobra.Command, args []string) error {
			req, err := http.NewRequestWithContext(cmd.Context(), http.MethodGet, args[0], http.NoBody)
			if err != nil {
				return fail(exitUsage, "%w", err)
			}
			resp, err := http.DefaultClient.Do(req)
			if err != nil {
				return fail(exitFailure, "%w", err)
			}
			defer func() { _ = resp.Body.Close() }()
			_, _ = io.Copy(io.Discard, resp.Body)
			if resp.StatusCode != http.StatusOK {
				return fail(exitFailure, "status %d", resp.StatusCode)
			}
			return nil
		},
	}
}

// checkClients lets every client that is found here send a request, two at a time:
// each through a relay of its own, with the variables that "run" sets.
func (d *doctor) checkClients(ctx context.Context, b *doctorBed) {
	results := make([]finding, len(clientProbes))
	slots := make(chan struct{}, 2)
	var wg sync.WaitGroup
	for i, c := range clientProbes {
		wg.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			results[i] = d.tryClient(ctx, b, c)
		})
	}
	wg.Wait()
	for _, f := range results {
		d.add(f.Check, f.Status, f.Fix, "%s", f.What)
	}
}

func (d *doctor) tryClient(ctx context.Context, b *doctorBed, c clientProbe) finding {
	f := finding{Check: "client:" + c.name, Status: findingSkip}
	path, err := os.Executable()
	if c.program != "" {
		path, err = lookPathIn(d.a.getenv("PATH"), c.program)
	}
	if err != nil {
		f.What = c.program + " is not here"
		return f
	}
	if c.needs != "" {
		if _, err := lookPathIn(d.a.getenv("PATH"), c.needs); err != nil {
			f.What = c.program + " is here, but not " + c.needs + ", without which it cannot be tried"
			return f
		}
	}
	broken := func(err error) finding {
		f.Status, f.What, f.Fix = findingFail, "the test could not be prepared: "+err.Error(), "make room in the temporary folder"
		return f
	}
	dir := filepath.Join(b.dir, "client-"+c.name)
	if err := os.Mkdir(dir, 0o700); err != nil {
		return broken(err)
	}
	for _, file := range c.files {
		if err := os.WriteFile(filepath.Join(dir, file[0]), []byte(file[1]), 0o600); err != nil {
			return broken(err)
		}
	}
	r, err := startRelay(b.proxy.listen)
	if err != nil {
		return broken(err)
	}
	defer r.close()
	env := &childEnv{Inherited: d.a.environ, ProxyURL: "http://" + r.l.Addr().String(), NoProxy: strings.Join(defaultNoProxy, ","), CAFile: b.ca, Dir: dir, SystemRoots: systemRoots()}
	if d.cfg != nil {
		env.Secrets = d.cfg.credentials.EnvNames()
	}
	built, err := env.build()
	if err != nil {
		return broken(err)
	}
	said, err := d.runClient(ctx, path, c, dir, built.Environ(d.a.environ))
	var exit *exec.ExitError
	if c.absent != 0 && errors.As(err, &exit) && exit.ExitCode() == c.absent {
		f.What = "its library is not here"
		return f
	}
	good, bad := b.up.arrived(c.name)
	f.Status = findingFail
	switch {
	case good > 0 && err == nil:
		f.Status, f.What = findingOK, path+" goes through the proxy and trusts its CA"
		if c.program == "" {
			f.What = "a Go program goes through the proxy and trusts its CA"
		}
	case good > 0:
		f.What, f.Fix = "its request went through, but it ended with "+err.Error()+said, "run it by hand: waybill run -- "+c.name
	case bad > 0:
		f.What, f.Fix = "its request arrived without the secret", c.around
	case errors.Is(err, context.DeadlineExceeded):
		f.What, f.Fix = fmt.Sprintf("it did not end within %v%s", d.limit, said), "try again with a longer --timeout; "+c.around
	case r.count.Load() == 0:
		f.What, f.Fix = "the proxy saw none of its requests: it went around the proxy"+said, c.around
	default:
		f.What, f.Fix = "it came to the proxy, but sent no request through: it does not trust the Waybill CA"+said, c.distrust
	}
	return f
}

// runClient returns what the client said last, as " (text)".
func (d *doctor) runClient(ctx context.Context, path string, c clientProbe, dir string, env []string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, d.limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, c.args("https://"+doctorHost+"/"+c.name+"/")...)
	if c.program == "" {
		cmd.Args[0] = "waybill"
	}
	cmd.Dir = dir
	cmd.Env = append(env, "GIT_TERMINAL_PROMPT=0", "LC_ALL=C")
	// Its children, too: a wrapper script must not outlive the test.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = 2 * time.Second
	out := &headBuffer{max: 16 << 10}
	cmd.Stdout, cmd.Stderr = io.Discard, out
	err := cmd.Run()
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return lastWords(out.Bytes()), err
}

// headBuffer keeps the beginning.
type headBuffer struct {
	bytes.Buffer
	max int
}

// Write implements io.Writer.
func (b *headBuffer) Write(p []byte) (int, error) {
	b.Buffer.Write(p[:min(len(p), max(0, b.max-b.Len()))])
	return len(p), nil
}

// lastWords is the last line of what a client printed, made short; one about
// certificates goes first, since curl ends with advice.
func lastWords(out []byte) string {
	last := ""
	for line := range strings.Lines(string(out)) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "Picked up JAVA_TOOL_OPTIONS") {
			if last = line; strings.Contains(line, "certificate") {
				break
			}
		}
	}
	if last == "" {
		return ""
	}
	if len(last) > 160 {
		last = last[:160] + "…"
	}
	return " (" + printable(last) + ")"
}

// lookPathIn is exec.LookPath for the PATH of an environment.
func lookPathIn(path, name string) (string, error) {
	for _, dir := range filepath.SplitList(path) {
		if !filepath.IsAbs(dir) {
			continue
		}
		if st, err := os.Stat(filepath.Join(dir, name)); err == nil && st.Mode().IsRegular() && st.Mode()&0o111 != 0 {
			return filepath.Join(dir, name), nil
		}
	}
	return "", exec.ErrNotFound
}
