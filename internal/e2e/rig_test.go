package e2e

import (
	"bufio"
	"bytes"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/control"
	"waybill/internal/testkit"
)

// The names that the test configuration knows; each is mapped to an origin.
const (
	payHost    = "pay.example.test"
	msgHost    = "msg.example.test"
	plainHost  = "plain.example.test"
	searchHost = "search.example.test"
)

// rig is one data folder, one configuration and, most of the time, one process.
type rig struct {
	t      testing.TB
	dir    string
	data   string
	config string
	bin    string
	env    []string
	flags  []string
	ca     *testkit.CA
	canary *testkit.Canary
	p      *testkit.Process
	addr   string // of the proxy
	meters string // URL of /metrics
	logs   bytes.Buffer
}

type rigOptions struct {
	origins map[string]string // host → address
	first   string            // routes that come before the others, YAML
	routes  string            // further routes, YAML
	payPath string            // the paths of the route pay; "": all
	top     string            // further top-level YAML
	race    bool
}

// newRig writes the configuration; start starts the process.
func newRig(t testing.TB, ca *testkit.CA, o rigOptions) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "wb") // short: a socket's path has at most 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, dir: dir, data: filepath.Join(dir, "d"), config: filepath.Join(dir, "c.yaml"), ca: ca, canary: testkit.NewCanary(t)}
	t.Cleanup(func() {
		if r.p != nil {
			r.p.Kill()
		}
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	build := testkit.BuildOptions{Race: o.race}
	if control.Tags != "" {
		build.Tags = []string{control.Tags}
	}
	r.bin = testkit.BinaryWith(t, build)
	r.write("secret", r.canary.Value())
	r.write("roots.pem", string(ca.PEM()))
	var y strings.Builder
	y.WriteString("version: 1\ncredentials:\n  pay: {from: {file: secret}, label: \"2026-11\"}\n" + o.top + "routes:\n" + o.first)
	route := func(host, more string) {
		addr := o.origins[host]
		if addr == "" {
			addr = "127.0.0.1:1"
		}
		path := ""
		if host == payHost && o.payPath != "" {
			path = fmt.Sprintf(", path: %q", o.payPath)
		}
		fmt.Fprintf(&y, "  - name: %s\n    match: {host: %s%s}\n    upstream: {roots: roots.pem, resolve: {%s: \"%s\"}%s}\n%s", strings.SplitN(host, ".", 2)[0], host, path, host, addr, plaintext(host), more)
	}
	bearer := "    inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: pay}]\n"
	route(payHost, bearer+"    limits: {timeout: 60s, retention: 1h}\n")
	route(msgHost, "    inject: [{header: X-Api-Key, value: \"${secret}\", credential: pay}]\n")
	route(searchHost, "    contract: {repeatable: true}\n")
	route(plainHost, "")
	y.WriteString(o.routes)
	r.write("c.yaml", y.String())
	return r
}

func plaintext(host string) string {
	if host == plainHost {
		return ", allow_plaintext: true"
	}
	return ""
}

func (r *rig) write(name, text string) {
	r.t.Helper()
	if err := os.WriteFile(filepath.Join(r.dir, name), []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

var listening = regexp.MustCompile(`(?s)proxy\s+https?://(\S+)\s+metrics\s+(http://\S+)\s+admin\s+unix:\S+\n`)

// start starts the proxy, under a wrapper if one is given (strace and its arguments).
func (r *rig) start(wrapper ...string) {
	r.t.Helper()
	args := append([]string{"serve", "--config", r.config, "--data", r.data, "--proxy", "127.0.0.1:0", "--metrics", "127.0.0.1:0", "--log-level", "debug", "--allow-any-filesystem"}, r.flags...)
	c := testkit.Command{Path: r.bin, Args: args, Env: r.environ(), Dir: r.dir, ReadyLine: listening}
	if len(wrapper) > 0 {
		c.Path, c.Args = wrapper[0], append(append(append([]string{}, wrapper[1:]...), r.bin), args...)
	}
	r.p = testkit.Start(r.t, c)
	m := r.p.WaitLine(r.t, listening)
	r.addr, r.meters = m[1], m[2]
}

// environ is what the process gets: a control that is off in the tests is off in it too.
func (r *rig) environ() []string {
	if off := os.Getenv(control.Env); off != "" {
		return append([]string{control.Env + "=" + off}, r.env...)
	}
	return r.env
}

// kill ends the process with SIGKILL and keeps its log for the canary search.
func (r *rig) kill() {
	r.p.Kill()
	r.logs.WriteString(r.p.Stderr())
	r.logs.WriteString(r.p.Stdout())
}

// roots are what a client of the proxy trusts.
func (r *rig) roots() *x509.CertPool {
	r.t.Helper()
	pem, err := os.ReadFile(filepath.Join(r.data, "ca", "ca.pem"))
	if err != nil {
		r.t.Fatal(err)
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(pem) {
		r.t.Fatal("no certificate in ca.pem")
	}
	return pool
}

// cli runs the binary as a user would.
func (r *rig) cli(args ...string) (int, string, string) {
	r.t.Helper()
	return testkit.Run(r.t, testkit.Command{Path: r.bin, Args: args, Env: append([]string{"WAYBILL_CONFIG=" + r.config, "WAYBILL_DATA=" + r.data}, r.env...), Dir: r.dir})
}

// actions lists what the journal says, through the running proxy or from the folder.
func (r *rig) actions() []dispatch.ActionView {
	r.t.Helper()
	code, out, errs := r.cli("actions", "--json")
	if code != 0 {
		r.t.Fatalf("waybill actions: %d %s", code, errs)
	}
	var all []dispatch.ActionView
	s := bufio.NewScanner(strings.NewReader(out))
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		var v dispatch.ActionView
		if err := json.Unmarshal(s.Bytes(), &v); err != nil {
			r.t.Fatalf("%q: %v", s.Text(), err)
		}
		all = append(all, v)
	}
	return all
}

// byTarget finds the actions whose target ends with path.
func byTarget(all []dispatch.ActionView, path string) []dispatch.ActionView {
	var out []dispatch.ActionView
	for _, v := range all {
		if strings.HasSuffix(v.Target, path) {
			out = append(out, v)
		}
	}
	return out
}

// verify runs the product's own check of its journal.
func (r *rig) verify() {
	r.t.Helper()
	if code, out, errs := r.cli("journal", "verify"); code != 0 {
		r.t.Fatalf("waybill journal verify: %d %s %s", code, out, errs)
	}
}

// long reports whether make test-long runs.
func long() bool { return os.Getenv("WAYBILL_TEST_LONG") != "" }

const patience = 20 * time.Second

// get reads a URL without any proxy.
func get(t testing.TB, url string) string {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}, Timeout: patience}
	resp, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %d %v", url, resp.StatusCode, err)
	}
	return string(body)
}
