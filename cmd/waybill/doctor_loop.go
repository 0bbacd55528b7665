package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"waybill/dispatch"
	"waybill/outcome"
)

// doctorHost is reserved (RFC 6761): nobody but the doctor's proxy can find it.
const doctorHost = "doctor.waybill.test"

// doctorBed is a proxy of its own in front of an upstream of its own.
type doctorBed struct {
	dir    string
	secret string
	up     *doctorUpstream
	proxy  *demoProxy
	ca     string // the certificate that clients have to trust
}

// doctorUpstream keeps a ledger of what arrived.
type doctorUpstream struct {
	secret string
	addr   string
	root   []byte
	server *http.Server

	mu   sync.Mutex
	good map[string]int // first segment of the path → requests that held the secret
	bad  map[string]int // … that did not
}

func startDoctorUpstream(secret string) (*doctorUpstream, error) {
	ca, err := newDemoCA(time.Now())
	if err != nil {
		return nil, err
	}
	leaf, err := ca.leaf(doctorHost, time.Now().Add(24*time.Hour))
	if err != nil {
		return nil, err
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	u := &doctorUpstream{secret: secret, addr: l.Addr().String(), root: ca.pem, good: map[string]int{}, bad: map[string]int{}}
	u.server = &http.Server{Handler: u, ErrorLog: log.New(io.Discard, "", 0), ReadHeaderTimeout: 10 * time.Second}
	go func() {
		_ = u.server.Serve(tls.NewListener(l, &tls.Config{Certificates: []tls.Certificate{leaf}, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}}))
	}()
	return u, nil
}

// ServeHTTP implements http.Handler: text for everybody, an empty repository for git.
func (u *doctorUpstream) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	who, _, _ := strings.Cut(strings.TrimPrefix(r.URL.Path, "/"), "/")
	u.mu.Lock()
	if r.Header.Get("Authorization") == "Bearer "+u.secret {
		u.good[who]++
	} else {
		u.bad[who]++
	}
	u.mu.Unlock()
	if !strings.HasSuffix(r.URL.Path, "/info/refs") {
		_, _ = io.WriteString(w, "ok\n")
		return
	}
	pkt := func(s string) string { return fmt.Sprintf("%04x%s", len(s)+4, s) }
	w.Header().Set("Content-Type", "application/x-git-upload-pack-advertisement")
	_, _ = io.WriteString(w, pkt("# service=git-upload-pack\n")+"0000"+
		pkt(strings.Repeat("0", 40)+" capabilities^{}\x00agent=waybill-doctor\n")+"0000")
}

// arrived returns how many requests of a client came with the secret, and without.
func (u *doctorUpstream) arrived(who string) (good, bad int) {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.good[who], u.bad[who]
}

// startBed starts both in a temporary folder. The CA of the data folder is used where
// there is one: it is the one that clients have to trust.
func (d *doctor) startBed(ctx context.Context) (_ *doctorBed, err error) {
	dir, err := os.MkdirTemp("", "waybill-doctor-")
	if err != nil {
		return nil, err
	}
	b := &doctorBed{dir: dir, secret: "doctor-" + newDemoSecret()}
	defer func() {
		if err != nil {
			b.close()
		}
	}()
	if b.up, err = startDoctorUpstream(b.secret); err != nil {
		return nil, err
	}
	data := filepath.Join(dir, "data")
	config := fmt.Sprintf(`version: 1
credentials: {doctor: {from: {file: %q}}}
routes:
  - name: doctor
    match: {host: %s}
    inject: [{header: Authorization, value: "Bearer ${secret}", credential: doctor}]
    upstream: {roots: %q, resolve: {%s: %q}}
`, filepath.Join(dir, "secret"), doctorHost, filepath.Join(dir, "upstream.pem"), doctorHost, b.up.addr)
	if err := os.Mkdir(data, 0o700); err != nil {
		return nil, err
	}
	for name, text := range map[string]string{"secret": b.secret, "upstream.pem": string(b.up.root), "waybill.yaml": config} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			return nil, err
		}
	}
	own := filepath.Join(d.data, "ca")
	if _, err := os.Stat(filepath.Join(own, "ca.pem")); err == nil {
		if _, err := ensureCA(d.data); err == nil { // else it is reported, and a new one is used
			// A link, not a copy: the key stays in one place.
			if err := os.Symlink(own, filepath.Join(data, "ca")); err != nil {
				return nil, err
			}
		}
	}
	b.proxy = &demoProxy{dir: dir, listen: "127.0.0.1:0", meters: listenNothing}
	if err := b.proxy.start(ctx); err != nil {
		return nil, err
	}
	b.ca = filepath.Join(data, "ca", "ca.pem")
	return b, nil
}

func (b *doctorBed) close() {
	if b.proxy != nil {
		_ = b.proxy.stop(10 * time.Second)
	}
	if b.up != nil {
		_ = b.up.server.Close()
	}
	_ = os.RemoveAll(b.dir)
}

// checkLoop sends a request the whole way, and then lets each client do it.
func (d *doctor) checkLoop(ctx context.Context) {
	b, err := d.startBed(ctx)
	if err != nil {
		d.add("loop", findingFail, "see what the start says; \"waybill demo\" starts in the same way", "no proxy could be started for the test: %s", err.Error())
		return
	}
	defer b.close()
	if err := b.loop(ctx, d.limit); err != nil {
		d.add("loop", findingFail, "waybill bugreport; this is a fault of Waybill, or of something between two programs on loopback", "%s", err.Error())
		return
	}
	d.add("loop", findingOK, "", "a request went through a proxy to an upstream on loopback: secret added there, result committed, no trace of the secret on disk")
	d.checkClients(ctx, b)
}

// loop sends one request and holds every witness against it.
func (b *doctorBed) loop(ctx context.Context, limit time.Duration) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	ca, err := os.ReadFile(b.ca)
	if err != nil {
		return err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	client := &http.Client{Transport: &http.Transport{
		Proxy:           http.ProxyURL(&url.URL{Scheme: "http", Host: b.proxy.listen}),
		TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12}, DisableKeepAlives: true,
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "https://"+doctorHost+"/loop/", http.NoBody)
	if err != nil {
		return err
	}
	resp, err := client.Do(req)
	if err != nil {
		return fmt.Errorf("no answer: %w", err)
	}
	body, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	_ = resp.Body.Close()
	if err != nil || resp.StatusCode != http.StatusOK {
		var failure struct {
			Error struct{ Code, Message string } `json:"error"`
		}
		_ = json.Unmarshal(body, &failure)
		return fmt.Errorf("the answer has status %d %s %s", resp.StatusCode, failure.Error.Code, failure.Error.Message)
	}
	if good, bad := b.up.arrived("loop"); good != 1 || bad != 0 {
		return fmt.Errorf("the upstream got %d requests with the secret and %d without, not 1 and 0", good, bad)
	}
	n := 0
	for v, err := range b.proxy.admin.Actions(ctx, dispatch.Filter{}) {
		if err != nil {
			return err
		}
		if n++; v.Outcome != outcome.Committed.String() {
			return fmt.Errorf("the record says %s, not committed", v.Outcome)
		}
	}
	if n != 1 {
		return fmt.Errorf("%d actions are on record, not 1", n)
	}
	found, err := b.proxy.filesWithSecret(b.secret)
	if err != nil {
		return err
	}
	if len(found) > 0 {
		return fmt.Errorf("the test's secret is in %s", strings.Join(found, ", "))
	}
	return nil
}

// relay stands between one client and the proxy and counts connections: it tells a
// client that went around the proxy from one that does not trust it.
type relay struct {
	l     net.Listener
	to    string
	count atomic.Int64
}

func startRelay(to string) (*relay, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	r := &relay{l: l, to: to}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			r.count.Add(1)
			go r.carry(c)
		}
	}()
	return r, nil
}

func (r *relay) carry(c net.Conn) {
	defer func() { _ = c.Close() }()
	p, err := net.Dial("tcp", r.to)
	if err != nil {
		return
	}
	go func() {
		_, _ = io.Copy(p, c)
		_ = p.(*net.TCPConn).CloseWrite()
	}()
	_, _ = io.Copy(c, p)
	_ = p.Close()
}

func (r *relay) close() { _ = r.l.Close() }
