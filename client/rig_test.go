package client_test

import (
	"crypto/x509"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"waybill/client"
	"waybill/internal/control"
	"waybill/internal/testkit"
)

// The routes of the test configuration. An unlisted host has none.
const (
	payHost    = "pay.example.test"    // not repeatable
	searchHost = "search.example.test" // declared repeatable
	deadHost   = "dead.example.test"   // nobody listens
)

// rig is a data folder, a configuration and a running proxy on an address that
// survives its restarts.
type rig struct {
	t          testing.TB
	dir, data  string
	bin        string
	addr       string
	canary     *testkit.Canary
	mu         sync.Mutex
	p          *testkit.Process
	configPath string
}

func newRig(t testing.TB, ca *testkit.CA, origins map[string]string) *rig {
	t.Helper()
	return newRigWith(t, ca, origins, "")
}

// newRigWith takes further top-level YAML.
func newRigWith(t testing.TB, ca *testkit.CA, origins map[string]string, top string) *rig {
	t.Helper()
	dir, err := os.MkdirTemp("", "wbc") // short: a socket's path has at most 107 bytes
	if err != nil {
		t.Fatal(err)
	}
	r := &rig{t: t, dir: dir, data: filepath.Join(dir, "d"), configPath: filepath.Join(dir, "c.yaml"), canary: testkit.NewCanary(t), addr: testkit.FreeAddr(t)}
	t.Cleanup(func() {
		if r.p != nil {
			r.p.Kill()
		}
		_ = os.RemoveAll(dir)
	})
	build := testkit.BuildOptions{}
	if control.Tags != "" {
		build.Tags = []string{control.Tags}
	}
	r.bin = testkit.BinaryWith(t, build)
	var y strings.Builder
	y.WriteString("version: 1\n" + top + "credentials:\n  pay: {from: {file: secret}, label: test}\nroutes:\n")
	for _, host := range []string{payHost, searchHost, deadHost} {
		addr := origins[host]
		if addr == "" {
			addr = testkit.RefusingAddr(t)
		}
		fmt.Fprintf(&y, "  - name: %s\n    match: {host: %s}\n    upstream: {roots: roots.pem, resolve: {%s: %q}}\n    limits: {timeout: 20s, tries: 1, connect: 2s}\n", strings.SplitN(host, ".", 2)[0], host, host, addr)
		switch host {
		case payHost:
			y.WriteString("    inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: pay}]\n")
		case searchHost:
			y.WriteString("    contract: {repeatable: true}\n")
		}
	}
	r.write("c.yaml", y.String())
	r.write("secret", r.canary.Value())
	r.write("roots.pem", string(ca.PEM()))
	r.start()
	return r
}

func (r *rig) write(name, text string) {
	r.t.Helper()
	if err := os.WriteFile(filepath.Join(r.dir, name), []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

var listening = regexp.MustCompile(`proxy\s+http://(\S+)\n`)

func (r *rig) start() {
	r.t.Helper()
	p := testkit.Start(r.t, testkit.Command{Path: r.bin, Dir: r.dir, ReadyLine: listening,
		Args: []string{"serve", "--config", r.configPath, "--data", r.data, "--proxy", r.addr, "--metrics", "off", "--log-level", "warn", "--allow-any-filesystem"}})
	r.mu.Lock()
	defer r.mu.Unlock()
	r.p = p
}

// kill ends the proxy with SIGKILL.
func (r *rig) kill() {
	r.mu.Lock()
	p := r.p
	r.mu.Unlock()
	p.Kill()
}

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

// client returns a client with short waits; change may be nil.
func (r *rig) client(change func(*client.Options)) *client.Client {
	r.t.Helper()
	o := client.Options{Proxy: "http://" + r.addr, Roots: r.roots(), AskFor: 20 * time.Second, SettleFor: 300 * time.Millisecond}
	if change != nil {
		change(&o)
	}
	c, err := client.New(o)
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

// wire is a TCP middleman between the client and the proxy that can cut connections.
type wire struct {
	ln     net.Listener
	target string
	// Bytes after which the next connection is cut; 0: never. up: from the client.
	cutUp, cutDown atomic.Int64
	cuts           atomic.Int64
	carried        atomic.Int64 // bytes to the client
	mu             sync.Mutex
	open           map[net.Conn]struct{}
	wg             sync.WaitGroup
}

func newWire(t testing.TB, target string) *wire {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	w := &wire{ln: ln, target: target, open: map[net.Conn]struct{}{}}
	w.wg.Add(1)
	go w.accept()
	t.Cleanup(func() {
		_ = ln.Close()
		w.cut()
		w.wg.Wait()
	})
	return w
}

func (w *wire) addr() string { return w.ln.Addr().String() }

func (w *wire) accept() {
	defer w.wg.Done()
	for {
		in, err := w.ln.Accept()
		if err != nil {
			return
		}
		out, err := net.DialTimeout("tcp", w.target, 2*time.Second)
		if err != nil {
			_ = in.Close()
			continue
		}
		w.mu.Lock()
		w.open[in], w.open[out] = struct{}{}, struct{}{}
		w.mu.Unlock()
		up, down := w.cutUp.Swap(0), w.cutDown.Swap(0)
		var both sync.WaitGroup
		end := func() {
			_ = in.Close()
			_ = out.Close()
		}
		copyUntil := func(dst, src net.Conn, limit int64) {
			if limit > 0 {
				if n, _ := io.CopyN(dst, src, limit); n == limit {
					w.cuts.Add(1)
					end()
					return
				}
			} else {
				_, _ = io.Copy(dst, src)
			}
			if c, ok := dst.(*net.TCPConn); ok {
				_ = c.CloseWrite()
			}
		}
		both.Go(func() { copyUntil(out, in, up) })
		both.Go(func() { copyUntil(in, &countedConn{out, &w.carried}, down) })
		w.wg.Go(func() {
			both.Wait()
			end()
			w.mu.Lock()
			delete(w.open, in)
			delete(w.open, out)
			w.mu.Unlock()
		})
	}
}

// countedConn counts what is read.
type countedConn struct {
	net.Conn
	n *atomic.Int64
}

func (c *countedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.n.Add(int64(n))
	return n, err
}

// cut ends all connections, without a word.
func (w *wire) cut() {
	w.mu.Lock()
	defer w.mu.Unlock()
	for c := range w.open {
		if tcp, ok := c.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0)
		}
		_ = c.Close()
	}
}

// long reports whether make test-long runs.
func long() bool { return os.Getenv("WAYBILL_TEST_LONG") != "" }
