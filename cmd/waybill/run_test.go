package main

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
)

// runBed is a data folder, a configuration with one route, and an upstream that
// the route's host resolves to.
type runBed struct {
	t      *testing.T
	dir    string
	env    []string
	mu     sync.Mutex
	seen   []string // "METHOD path authorization"
	server *httptest.Server
	hold   chan struct{} // requests for /hold wait for it
}

const (
	runHost   = "api.example.test"
	runSecret = "canary-run-41c9"
)

func newRunBed(t *testing.T, extra string) *runBed {
	t.Helper()
	b := &runBed{t: t, dir: t.TempDir(), hold: make(chan struct{})}
	ca, err := newDemoCA(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	cert, err := ca.leaf(runHost, time.Now().Add(time.Hour))
	if err != nil {
		t.Fatal(err)
	}
	b.server = httptest.NewUnstartedServer(http.HandlerFunc(b.answer))
	b.server.TLS = &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}
	b.server.StartTLS()
	t.Cleanup(b.server.Close)

	put(t, b.dir, "upstream.pem", ca.pem)
	put(t, b.dir, "waybill.yaml", fmt.Appendf(nil, `version: 1
credentials:
  api: {from: {env: RUN_TEST_SECRET}, label: test}
routes:
  - name: api
    match: {host: %s, methods: [GET, POST]}
    inject: [{header: Authorization, value: "Bearer ${secret}", credential: api}]
    upstream: {roots: %q, resolve: {%s: %q}}
default: deny
%s`, runHost, filepath.Join(b.dir, "upstream.pem"), runHost, b.server.Listener.Addr(), extra))
	b.env = append(slices.DeleteFunc(os.Environ(), func(kv string) bool {
		name, _, _ := strings.Cut(kv, "=")
		return ignored(name) || strings.HasPrefix(name, "WAYBILL_") || slices.Contains(replacingCA, name) || slices.Contains(addingCA, name)
	}), "HOME="+b.dir, "WAYBILL_DATA="+filepath.Join(b.dir, "data"), "WAYBILL_CONFIG="+filepath.Join(b.dir, "waybill.yaml"), "RUN_TEST_SECRET="+runSecret, "GIT_TERMINAL_PROMPT=0")
	return b
}

func (b *runBed) answer(w http.ResponseWriter, r *http.Request) {
	_, _ = io.Copy(io.Discard, r.Body)
	b.mu.Lock()
	b.seen = append(b.seen, r.Method+" "+r.URL.Path+" "+r.Header.Get("Authorization"))
	b.mu.Unlock()
	switch {
	case r.URL.Path == "/hold":
		<-b.hold
	case r.URL.Path == "/cut":
		conn, _, err := http.NewResponseController(w).Hijack()
		if err == nil {
			_ = conn.Close()
		}
		return
	case strings.HasSuffix(r.URL.Path, "/info/refs"):
		w.Header().Set("Content-Type", "text/plain") // git's plain file protocol
		_, _ = fmt.Fprintf(w, "%s\trefs/heads/main\n", strings.Repeat("a", 40))
		return
	case strings.HasSuffix(r.URL.Path, "/HEAD"):
		_, _ = io.WriteString(w, "ref: refs/heads/main\n")
		return
	}
	_, _ = io.WriteString(w, "hello")
}

func (b *runBed) arrivals() []string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Clone(b.seen)
}

// ran is how a command ended.
type ran struct {
	code           int
	stdout, stderr string
}

// waybill runs the program.
func (b *runBed) waybill(args ...string) ran {
	b.t.Helper()
	cmd := b.command(args...)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	err := cmd.Run()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		b.t.Fatalf("waybill %v: %v", args, err)
	}
	return ran{cmd.ProcessState.ExitCode(), out.String(), errOut.String()}
}

func (b *runBed) command(args ...string) *exec.Cmd {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute) // outlives the cleanups, which stop it in good order
	b.t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, "waybill", args...)
	cmd.Env, cmd.Dir = b.env, b.dir
	return cmd
}

// serve starts the proxy and waits for it; stop ends it in good order.
func (b *runBed) serve(args ...string) (stop func()) {
	b.t.Helper()
	cmd := b.command(append([]string{"serve", "--proxy", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--" + allowAnyFilesystem}, args...)...)
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = io.Discard, &log
	if err := cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	deadline := time.After(demoStartLimit)
	for {
		c, err := dialAdmin(b.t.Context(), filepath.Join(b.dir, "data", "admin.sock"))
		if err == nil {
			_, err = c.status(b.t.Context())
			_ = c.Close()
		}
		if err == nil {
			break
		}
		select {
		case err := <-exited:
			b.t.Fatalf("serve ended: %v\n%s", err, log.String())
		case <-deadline:
			b.t.Fatalf("serve did not start:\n%s", log.String())
		case <-time.After(20 * time.Millisecond):
		}
	}
	var once sync.Once
	stop = func() {
		once.Do(func() {
			_ = cmd.Process.Signal(syscall.SIGTERM)
			select {
			case err := <-exited:
				if err != nil {
					b.t.Errorf("serve ended with %v\n%s", err, log.String())
				}
			case <-time.After(20 * time.Second):
				_ = cmd.Process.Kill()
				<-exited
				b.t.Errorf("serve did not stop\n%s", log.String())
			}
			if strings.Contains(log.String(), runSecret) {
				b.t.Errorf("the log holds the secret:\n%s", log.String())
			}
		})
	}
	b.t.Cleanup(stop)
	return stop
}

// actions reads the journal as scripts do.
func (b *runBed) actions(args ...string) []dispatch.ActionView {
	b.t.Helper()
	r := b.waybill(append([]string{"actions", "--json"}, args...)...)
	if r.code != 0 {
		b.t.Fatalf("actions: %d %s", r.code, r.stderr)
	}
	var out []dispatch.ActionView
	for line := range strings.Lines(r.stdout) {
		var v dispatch.ActionView
		if err := json.Unmarshal([]byte(line), &v); err != nil {
			b.t.Fatalf("actions --json: %v in %q", err, line)
		}
		out = append(out, v)
	}
	return out
}

// nodeClient speaks to the proxy by hand: older versions of Node read no proxy
// variables, but NODE_EXTRA_CA_CERTS they do.
const nodeClient = `
const http = require('http'), tls = require('tls');
const p = new URL(process.env.HTTPS_PROXY);
const auth = 'Basic ' + Buffer.from(decodeURIComponent(p.username) + ':' + decodeURIComponent(p.password)).toString('base64');
http.request({host: p.hostname, port: p.port, method: 'CONNECT', path: 'api.example.test:443', headers: {'Proxy-Authorization': auth}})
  .on('connect', (res, socket) => {
    const s = tls.connect({socket, servername: 'api.example.test', ALPNProtocols: ['http/1.1']}, () => s.write('GET /node HTTP/1.1\r\nHost: api.example.test\r\nConnection: close\r\n\r\n'));
    let all = ''; s.on('data', d => all += d); s.on('end', () => process.stdout.write(all.split('\r\n\r\n')[1]));
    s.on('error', e => { console.error(e.message); process.exit(9) });
  }).on('error', e => { console.error(e.message); process.exit(9) }).end();
`

// The variables of run really route real clients, and each trusts the CA by its
// own variable (case CL-05). The secret reaches the upstream and nobody else. More of
// them run against a proxy of its own in TestClientMatrix of internal/e2e.
func TestRunRealClients(t *testing.T) {
	contract.Covers(t, "V4", "C2")
	for _, joined := range []bool{false, true} {
		t.Run(fmt.Sprintf("joined=%t", joined), func(t *testing.T) {
			b := newRunBed(t, "")
			if joined {
				b.serve()
			}
			for _, c := range []struct {
				name, path, want string
				args             []string
			}{
				{"curl", "/curl", "hello", []string{"curl", "-sS", "-m", "10", "https://" + runHost + "/curl"}},
				{"git", "/r.git/info/refs", strings.Repeat("a", 40) + "\trefs/heads/main", []string{"git", "ls-remote", "https://" + runHost + "/r.git"}},
				{"node", "/node", "hello", []string{"node", "-e", nodeClient}},
			} {
				if joined && c.name != "curl" && c.name != "git" {
					continue // how the proxy was started makes no difference to the others
				}
				before := len(b.arrivals())
				start := time.Now()
				r := b.waybill(append([]string{"run", "--" + allowAnyFilesystem, "--"}, c.args...)...)
				if took := time.Since(start); took > 5*time.Second {
					t.Logf("%s took %v: %s", c.name, took, r.stderr)
				}
				if r.code != 0 || !strings.Contains(r.stdout, c.want) {
					t.Errorf("%s: exit %d, stdout %q, stderr %s", c.name, r.code, r.stdout, r.stderr)
					continue
				}
				if !strings.Contains(r.stderr, "committed") {
					t.Errorf("%s: the account says %q", c.name, r.stderr)
				}
				if strings.Contains(r.stdout+r.stderr, runSecret) {
					t.Errorf("%s: the secret came back", c.name)
				}
				arrived := b.arrivals()[before:]
				if !slices.Contains(arrived, "GET "+c.path+" Bearer "+runSecret) {
					t.Errorf("%s: the upstream saw %q", c.name, arrived)
				}
			}
			for _, v := range b.actions() {
				if !strings.HasPrefix(v.Caller, "session:ses_") {
					t.Errorf("%s %s belongs to caller %q, not to a session", v.Method, v.Target, v.Caller)
				}
			}
		})
	}
}

func TestRunEnvironmentAndExitCode(t *testing.T) {
	contract.Covers(t, "C2")
	b := newRunBed(t, "")
	b.env = append(b.env, "NO_PROXY=*", "OPENAI_API_KEY=the-users-own")
	run := func(args ...string) ran {
		return b.waybill(append([]string{"run", "--" + allowAnyFilesystem}, args...)...)
	}

	r := run("--", "env")
	if r.code != 0 {
		t.Fatalf("run -- env: %d %s", r.code, r.stderr)
	}
	env := strings.Split(r.stdout, "\n")
	if strings.Contains(r.stdout, runSecret) || lookup(env, "RUN_TEST_SECRET") != "" {
		t.Error("the child sees a variable from which Waybill reads a secret")
	}
	if lookup(env, "OPENAI_API_KEY") != "the-users-own" || !strings.Contains(lookup(env, "ANTHROPIC_API_KEY"), placeholderToken) {
		t.Error("placeholders are for unset variables only")
	}
	if lookup(env, "NO_PROXY") != "localhost,127.0.0.1,::1" || !strings.Contains(lookup(env, "HTTPS_PROXY"), "@127.0.0.1:") {
		t.Errorf("NO_PROXY=%s HTTPS_PROXY=%s", lookup(env, "NO_PROXY"), lookup(env, "HTTPS_PROXY"))
	}
	if !strings.Contains(r.stderr, "no request went through the proxy") {
		t.Errorf("account: %q", r.stderr)
	}
	if left, err := os.ReadDir(filepath.Join(b.dir, "data", "run")); err != nil || len(left) != 0 {
		t.Errorf("the session's folder was left behind: %v, %v", left, err)
	}

	if r := run("-q", "--", "sh", "-c", "exit 23"); r.code != 23 || r.stderr != "" {
		t.Errorf("exit code %d (stderr %q), want the child's 23", r.code, r.stderr)
	}
	if r := run("-q", "--", "sh", "-c", "kill -KILL $$"); r.code != 128+int(syscall.SIGKILL) {
		t.Errorf("exit code %d after SIGKILL of the child", r.code)
	}
	// Flags after the program are the program's.
	if r := run("-q", "sh", "-c", "echo $1", "--", "--json"); r.stdout != "--json\n" {
		t.Errorf("stdout %q", r.stdout)
	}
	r = run("--json", "--", "curl", "-s", "-d", "x=1", "-m", "10", "https://"+runHost+"/cut")
	var acc account
	if err := json.Unmarshal([]byte(r.stderr), &acc); err != nil {
		t.Fatalf("account %q: %v", r.stderr, err)
	}
	if acc.Actions != 1 || acc.ByOutcome["unknown"] != 1 || len(acc.Unresolved) != 1 || acc.Unresolved[0].Retry != "reconcile" || acc.Running != 0 {
		t.Errorf("account %+v, want one unknown to reconcile", acc)
	}
	if got := b.actions("--outcome", "unknown"); len(got) != 1 || got[0].InvocationID != acc.Unresolved[0].InvocationID {
		t.Errorf("actions --outcome unknown: %+v", got)
	}

	// Print and run nothing; the token is nobody's business.
	r = b.waybill("run", "--print-env")
	if r.code != 0 || !strings.Contains(r.stdout, "NODE_USE_ENV_PROXY=1\n") || !strings.Contains(r.stdout, "# unset RUN_TEST_SECRET\n") || strings.Contains(r.stdout, "wbs_") {
		t.Errorf("run --print-env: %d\n%s%s", r.code, r.stdout, r.stderr)
	}
}

// What the running proxy reads secrets from is taken away from a program, whatever the
// configuration that run, or env, finds itself (CONTRACT C2).
func TestRunHidesTheRunningProxysVariables(t *testing.T) {
	contract.Covers(t, "C2")
	b := newRunBed(t, "")
	b.serve()
	b.env = append(b.env, "RUN_TEST_OTHER=of-the-other", "RUN_TEST_KEPT=kept")
	for name, own := range map[string]string{
		"other":  "version: 1\ncredentials:\n  own: {from: {env: RUN_TEST_OTHER}}\nroutes:\n  - {name: a, match: {host: a.example.test}, inject: [{header: X-Key, value: \"${secret}\", credential: own}]}\n",
		"broken": "version: 1\ntyop: 1\n",
		"none":   "",
	} {
		t.Run(name, func(t *testing.T) {
			config := filepath.Join(b.dir, name+".yaml")
			if own != "" {
				put(t, b.dir, name+".yaml", []byte(own))
			}
			r := b.waybill("run", "--config", config, "--", "env")
			env := strings.Split(r.stdout, "\n")
			if r.code != 0 || strings.Contains(r.stdout, runSecret) || lookup(env, "RUN_TEST_SECRET") != "" {
				t.Errorf("the child sees a variable from which the running proxy reads a secret: %d\n%s", r.code, r.stderr)
			}
			if lookup(env, "RUN_TEST_KEPT") != "kept" || (lookup(env, "RUN_TEST_OTHER") == "") != (name == "other") {
				t.Error("the variables of the own configuration, and no others, are taken away, too")
			}
			if warned := strings.Contains(r.stderr, "joined a running proxy without it"); warned != (name != "other") {
				t.Errorf("standard error: %s", r.stderr)
			}
			if r := b.waybill("env", "--shell", "sh", "--config", config); r.code != 0 || !strings.Contains(r.stdout, "unset RUN_TEST_SECRET\n") {
				t.Errorf("env: %d\n%s%s", r.code, r.stdout, r.stderr)
			}
		})
	}
}

// A bug report, which is for others, names none of them.
func TestBugreportNamesNoVariable(t *testing.T) {
	b := newRunBed(t, "")
	b.serve()
	r := b.waybill("bugreport", "--no-clients", "-o", "-")
	z, err := gzip.NewReader(strings.NewReader(r.stdout))
	if err != nil {
		t.Fatalf("%d %v %s", r.code, err, r.stderr)
	}
	all, err := io.ReadAll(z)
	if err != nil || !bytes.Contains(all, []byte("status.json")) || bytes.Contains(all, []byte("RUN_TEST_SECRET")) {
		t.Errorf("the bundle: %v\n%s", err, all)
	}
}

// A signal to waybill reaches the child, and the child's end decides.
func TestRunForwardsSignals(t *testing.T) {
	b := newRunBed(t, "")
	cmd := b.command("run", "--"+allowAnyFilesystem, "-q", "--", "sh", "-c", "trap 'echo got; exit 7' TERM; echo ready; while :; do sleep 0.05; done")
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ready := make([]byte, len("ready\n"))
	if _, err := io.ReadFull(out, ready); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	rest, _ := io.ReadAll(out)
	_ = cmd.Wait()
	if code := cmd.ProcessState.ExitCode(); code != 7 || string(rest) != "got\n" {
		t.Errorf("exit code %d, output %q", code, rest)
	}
}

// An eval of "waybill env" routes a shell's programs (case CL-05), and the reading
// commands say the same with and without a running proxy.
func TestEnvAndReading(t *testing.T) {
	b := newRunBed(t, "")
	stop := b.serve()
	sh := b.command()
	sh.Path, sh.Args = "/bin/sh", []string{"sh", "-c", `eval "$(waybill env --shell sh)" && curl -sS -m 10 -d a=1 https://` + runHost + `/from-env`}
	if out, err := sh.CombinedOutput(); err != nil || string(out) != "hello" {
		t.Fatalf("%v: %s", err, out)
	}
	live := b.actions()
	if len(live) != 1 || live[0].Outcome != "committed" || live[0].Route != "api" || !live[0].DispatchStarted || live[0].Attempts != 1 {
		t.Fatalf("actions: %+v", live)
	}
	id := live[0].InvocationID
	read := func() []ran {
		return []ran{
			b.waybill("actions"), b.waybill("action", id), b.waybill("action", id, "--json"),
			b.waybill("result", id), b.waybill("result", id, "--json"),
			b.waybill("action", "act_01ARZ3NDEKTSV4RRFFQ69G5FAV"), b.waybill("actions", "--route", "other", "--json"),
		}
	}
	running := read()
	if v := b.waybill("journal", "verify"); v.code != 0 || !strings.Contains(v.stdout, "the journal is whole") {
		t.Errorf("journal verify, running: %d %s%s", v.code, v.stdout, v.stderr)
	}
	stop()
	stopped := read()
	for i := range running {
		if running[i].code != stopped[i].code || running[i].stdout != stopped[i].stdout {
			t.Errorf("reading command %d: running %+v\nstopped %+v", i, running[i], stopped[i])
		}
	}
	if running[3].stdout != "hello" || running[5].code != int(exitNotFound) || !strings.Contains(running[1].stdout, "DISPATCH_STARTED") {
		t.Errorf("result %+v, unknown id %+v, action %s", running[3], running[5], running[1].stdout)
	}
	out := filepath.Join(b.dir, "out")
	if r := b.waybill("result", id, "-o", out); r.code != 0 {
		t.Errorf("result -o: %+v", r)
	}
	if data, err := os.ReadFile(out); err != nil || string(data) != "hello" {
		t.Errorf("result -o wrote %q, %v", data, err)
	}
	if r := b.waybill("result", "-i", id); !strings.HasPrefix(r.stdout, "HTTP/1.1 200 OK\r\n") || !strings.HasSuffix(r.stdout, "\r\n\r\nhello") {
		t.Errorf("result -i: %q", r.stdout)
	}
	if v := b.waybill("journal", "verify", "--json"); v.code != 0 {
		t.Errorf("journal verify, stopped: %d %s%s", v.code, v.stdout, v.stderr)
	}
	if v := b.waybill("journal", "stats"); v.code != 0 {
		t.Errorf("journal stats, stopped: %d %s%s", v.code, v.stdout, v.stderr)
	}
}

// An action without a result gives its envelope and exit code 5, never a body.
func TestResultOfUnknown(t *testing.T) {
	contract.Covers(t, "H10")
	b := newRunBed(t, "")
	stop := b.serve()
	b.waybill("run", "-q", "--", "curl", "-s", "-m", "10", "-d", "x=1", "https://"+runHost+"/cut")
	got := b.actions()
	if len(got) != 1 || got[0].Outcome != "unknown" {
		t.Fatalf("actions: %+v", got)
	}
	check := func(state string) {
		r := b.waybill("result", got[0].InvocationID)
		if r.code != int(exitNoResult) || r.stdout != "" || !strings.Contains(r.stderr, `"REMOTE_OUTCOME_UNKNOWN"`) {
			t.Errorf("%s: result of an unknown: %+v", state, r)
		}
	}
	check("running")
	stop()
	check("stopped")
}

// The proxy's own environment decides nothing (case CL-01); a reload with a
// mistake leaves the last good configuration in force (CONTRACT V1).
func TestServeEnvironmentAndReload(t *testing.T) {
	contract.Covers(t, "V1", "D1")
	b := newRunBed(t, "")
	clean := b.env
	b.env = append(slices.Clone(clean), "HTTPS_PROXY=http://127.0.0.1:1", "HTTP_PROXY=http://127.0.0.1:1", "SSL_CERT_FILE=/dev/null", "NO_PROXY=")
	b.serve()
	b.env = clean
	get := func(path string) ran {
		return b.waybill("run", "-q", "--", "curl", "-sS", "-m", "10", "-w", "%{http_code}", "https://"+runHost+path)
	}
	if r := get("/one"); r.stdout != "hello200" {
		t.Fatalf("with a hostile environment: %+v", r)
	}
	config := filepath.Join(b.dir, "waybill.yaml")
	good, err := os.ReadFile(config)
	if err != nil {
		t.Fatal(err)
	}
	snapshot := func() string {
		c, err := dialAdmin(t.Context(), filepath.Join(b.dir, "data", "admin.sock"))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = c.Close() }()
		st, err := c.status(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return st.Snapshot
	}
	first := snapshot()
	put(t, b.dir, "waybill.yaml", append(slices.Clone(good), "tyop: 1\n"...))
	time.Sleep(4 * settle) // nothing may happen: there is no event to wait for
	if r := get("/two"); r.stdout != "hello200" || snapshot() != first {
		t.Errorf("after a bad reload: %+v", r)
	}
	put(t, b.dir, "waybill.yaml", bytes.Replace(good, []byte("methods: [GET, POST]"), []byte("methods: [POST]"), 1))
	deadline := time.Now().Add(10 * time.Second)
	for snapshot() == first {
		if time.Now().After(deadline) {
			t.Fatal("a change of the file was not loaded")
		}
		time.Sleep(20 * time.Millisecond)
	}
	if r := get("/three"); !strings.HasSuffix(r.stdout, "403") {
		t.Errorf("after a good reload: %+v", r)
	}
}

func TestServeRefuses(t *testing.T) {
	contract.Covers(t, "V4", "C2")
	b := newRunBed(t, "")
	if r := b.waybill("serve", "--proxy", "0.0.0.0:0", "--metrics", "off", "--"+allowAnyFilesystem); r.code != int(exitConfig) || !strings.Contains(r.stderr, "authenticate") {
		t.Errorf("a public listener without callers: %+v", r)
	}
	clean := b.env
	b.env = append(slices.Clone(clean), "GODEBUG=netdns=go,http2debug=2")
	if r := b.waybill("serve", "--proxy", "127.0.0.1:0", "--metrics", "off"); r.code != int(exitConfig) || !strings.Contains(r.stderr, "http2debug") {
		t.Errorf("GODEBUG=http2debug: %+v", r)
	}
	b.env = clean
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = l.Close() }()
	if r := b.waybill("serve", "--proxy", l.Addr().String(), "--metrics", "off", "--"+allowAnyFilesystem); r.code != int(exitConfig) || !strings.Contains(r.stderr, "address already in use") {
		t.Errorf("a taken port: %+v", r)
	}
	stop := b.serve()
	if r := b.waybill("serve", "--proxy", "127.0.0.1:0", "--metrics", "off", "--"+allowAnyFilesystem); r.code != int(exitUnavailable) || !strings.Contains(r.stderr, "one proxy at a time") {
		t.Errorf("a second proxy in one data folder: %+v", r)
	}
	stop()
	if err := os.Chmod(filepath.Join(b.dir, "data"), 0o755); err != nil {
		t.Fatal(err)
	}
	if r := b.waybill("serve", "--proxy", "127.0.0.1:0", "--metrics", "off"); r.code != int(exitConfig) || !strings.Contains(r.stderr, "chmod 700") {
		t.Errorf("a data folder that others may enter: %+v", r)
	}
}

// SIGTERM waits for running requests; their callers are answered (DESIGN section 1).
func TestServeDrains(t *testing.T) {
	b := newRunBed(t, "")
	stop := b.serve("--drain", "15s")
	curl := b.command("run", "-q", "--", "curl", "-sS", "-m", "15", "-d", "x=1", "https://"+runHost+"/hold")
	var out bytes.Buffer
	curl.Stdout = &out
	if err := curl.Start(); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(10 * time.Second)
	for len(b.arrivals()) == 0 && time.Now().Before(deadline) {
		time.Sleep(10 * time.Millisecond)
	}
	stopped := make(chan struct{})
	go func() { stop(); close(stopped) }()
	time.Sleep(100 * time.Millisecond)
	select {
	case <-stopped:
		t.Error("the proxy stopped while a request ran")
	default:
	}
	close(b.hold)
	<-stopped
	_ = curl.Wait()
	if out.String() != "hello" {
		t.Errorf("the caller got %q", out.String())
	}
	if got := b.actions(); len(got) != 1 || got[0].Outcome != "committed" {
		t.Errorf("actions: %+v", got)
	}
}

// An indeterminate commit ends the process with its own exit code, after the
// callers that wait were answered (CONTRACT M5, F9). The fault is injected below
// the real program: the sync calls of its journal fail from some moment on.
func TestServeJournalStops(t *testing.T) {
	contract.Covers(t, "F9")
	strace, err := exec.LookPath("strace")
	if err != nil {
		t.Log("strace is not installed here: the fault cannot be injected")
		return
	}
	b := newRunBed(t, "")
	exe, err := exec.LookPath("waybill")
	if err != nil {
		t.Fatal(err)
	}
	cmd := b.command()
	cmd.Path = strace
	cmd.Args = []string{"strace", "-f", "-qq", "-o", filepath.Join(b.dir, "trace"), "-e", "trace=fdatasync", "-e", "inject=fdatasync:error=EIO:when=9+",
		exe, "serve", "--proxy", "127.0.0.1:0", "--metrics", "off", "--" + allowAnyFilesystem}
	var log bytes.Buffer
	cmd.Stdout, cmd.Stderr = io.Discard, &log
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	var admin *adminClient
	var addr string
	for deadline := time.Now().Add(demoStartLimit); addr == ""; time.Sleep(20 * time.Millisecond) {
		if admin, err = dialAdmin(t.Context(), filepath.Join(b.dir, "data", "admin.sock")); err == nil {
			st, _ := admin.status(t.Context())
			addr = st.Proxy
		}
		if time.Now().After(deadline) {
			t.Fatalf("serve did not start: %s", log.String())
		}
	}
	proxyURL := func(*http.Request) (*url.URL, error) { return &url.URL{Scheme: "http", Host: addr}, nil }
	client := &http.Client{Transport: &http.Transport{Proxy: proxyURL, DisableKeepAlives: true}, Timeout: 10 * time.Second}
	// Requests until it ends. Each is answered, with an outcome, or not taken at all.
	deadline := time.After(30 * time.Second)
	for i, ended := 0, false; !ended; i++ {
		resp, err := client.Post(fmt.Sprintf("http://%s/stop/%d", runHost, i), "text/plain", strings.NewReader("x"))
		if err == nil {
			if resp.Header.Get("Waybill-Outcome") == "" {
				t.Errorf("status %d without an outcome", resp.StatusCode)
			}
			_ = resp.Body.Close()
		}
		select {
		case <-exited:
			ended = true
		case <-deadline:
			t.Fatalf("the journal fails and the process goes on:\n%s", log.String())
		case <-time.After(2 * time.Millisecond):
		}
	}
	if code := cmd.ProcessState.ExitCode(); code != int(exitJournalStopped) {
		t.Fatalf("exit code %d, want %d\n%s", code, exitJournalStopped, log.String())
	}
	// What is on disk is read at the next start, and nothing that arrived is called
	// not attempted.
	b.serve()
	arrived := map[string]bool{}
	for _, s := range b.arrivals() {
		arrived[strings.Fields(s)[1]] = true
	}
	for _, v := range b.actions() {
		u, err := url.Parse(v.Target)
		if err != nil {
			t.Fatal(err)
		}
		if arrived[u.Path] && v.Outcome == "not_attempted" {
			t.Errorf("%s arrived and is %s", v.Target, v.Outcome)
		}
		delete(arrived, u.Path)
	}
	if len(arrived) > 0 {
		t.Errorf("arrived and not on record: %v", arrived)
	}
}

// tail shows changes as they happen, and ends when the proxy does.
func TestTail(t *testing.T) {
	b := newRunBed(t, "")
	stop := b.serve()
	tail := b.command("tail", "--json")
	out, err := tail.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := tail.Start(); err != nil {
		t.Fatal(err)
	}
	lines := make(chan dispatch.ActionView, 100)
	go func() {
		defer close(lines)
		dec := json.NewDecoder(out)
		for {
			var v dispatch.ActionView
			if dec.Decode(&v) != nil {
				return
			}
			lines <- v
		}
	}()
	// Whether tail listens yet cannot be seen from outside; so ask until it shows.
	var got dispatch.ActionView
	for i := 0; got.InvocationID == "" && i < 50; i++ {
		b.waybill("run", "-q", "--", "curl", "-sS", "-m", "10", "https://"+runHost+"/tail")
		for quiet := false; !quiet && got.InvocationID == ""; {
			select {
			case v := <-lines:
				if v.Ended {
					got = v
				}
			case <-time.After(200 * time.Millisecond):
				quiet = true
			}
		}
	}
	if got.Outcome != "committed" || got.Route != "api" {
		t.Errorf("tail showed %+v", got)
	}
	stop()
	_ = tail.Wait()
	for range lines {
		continue
	}
}

func TestReachable(t *testing.T) {
	for in, want := range map[string]string{
		"0.0.0.0:7171": "127.0.0.1:7171", "[::]:7171": "127.0.0.1:7171", ":7171": "127.0.0.1:7171", "10.0.0.7:7171": "10.0.0.7:7171", "[::1]:1": "[::1]:1",
	} {
		if got := reachable(in); got != want {
			t.Errorf("%s is reached at %s, not %s", in, got, want)
		}
	}
	if got := reachableURL("http://ses_1:wbs_2@[::]:7171"); got != "http://ses_1:wbs_2@127.0.0.1:7171" {
		t.Error(got)
	}
}
