package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"

	"waybill/dispatch"
	"waybill/outcome"
)

// seen is what the scripted pipeline got of one request.
type seen struct {
	dispatch.Submission
	body    []byte
	bodyErr error
	trailer http.Header
	header  http.Header
}

// scripted is a Pipeline whose answers a test writes.
type scripted struct {
	mu       sync.Mutex
	subs     []seen
	connects []string
	handed   []error
	relayed  []dispatch.ActionID

	// answer is called with each request that is not refused; nil: 200 "ok".
	answer func(ctx context.Context, s *seen) *dispatch.Reply
	// decide is called with each CONNECT; nil: intercept.
	decide func(authority string) (dispatch.TunnelDecision, *dispatch.Reply)
	tunnel func(ctx context.Context, authority string, established func() (net.Conn, error)) *dispatch.Reply
}

func newID() dispatch.ActionID { return dispatch.ActionID(ulid.Make()) }

type bytesBody struct{ *bytes.Reader }

func (bytesBody) Close() error { return nil }

func (p *scripted) reply(status int, h http.Header, body []byte) *dispatch.Reply {
	if h == nil {
		h = http.Header{}
	}
	return &dispatch.Reply{ID: newID(), Status: status, Header: h, Body: bytesBody{bytes.NewReader(body)}, ContentLength: int64(len(body)), HandedOver: p.handOver}
}

func (p *scripted) handOver(err error) {
	p.mu.Lock()
	p.handed = append(p.handed, err)
	p.mu.Unlock()
}

// own is an answer of Waybill's own.
func (p *scripted) own(r *dispatch.Refusal, s outcome.Shape) *dispatch.Reply {
	id := newID()
	env := outcome.NewEnvelope(id.String(), r.Facts, r.Detail, outcome.Evidence{Field: r.Field, Reason: r.Reason})
	ans := env.Answer(s)
	n, _ := strconv.Atoi(ans.Header.Get("Content-Length"))
	return &dispatch.Reply{ID: id, Envelope: &env, Status: ans.Status, Header: ans.Header, Body: bytesBody{bytes.NewReader(ans.Body)}, ContentLength: int64(n), HandedOver: p.handOver}
}

func (p *scripted) Do(ctx context.Context, s *dispatch.Submission) *dispatch.Reply {
	got := seen{Submission: *s, header: s.Header.Clone()}
	if s.Body != nil {
		got.body, got.bodyErr = io.ReadAll(s.Body)
		if s.Trailer != nil {
			got.trailer = s.Trailer()
		}
	}
	if s.Refused == nil && got.bodyErr != nil {
		got.Refused = refusal(outcome.CodeInvalidRequest, "request.body", "body_incomplete", "")
	}
	p.mu.Lock()
	p.subs = append(p.subs, got)
	p.mu.Unlock()
	if got.Refused != nil {
		return p.own(got.Refused, outcome.Shape{Method: s.Method, InsideTunnel: s.Authorities.Connect != ""})
	}
	if p.answer != nil {
		return p.answer(ctx, &got)
	}
	return p.reply(http.StatusOK, http.Header{"Content-Type": {"text/plain"}}, []byte("ok"))
}

func (p *scripted) Connect(_ context.Context, _ dispatch.Caller, authority string) (dispatch.TunnelDecision, *dispatch.Reply) {
	p.mu.Lock()
	p.connects = append(p.connects, authority)
	p.mu.Unlock()
	if p.decide != nil {
		return p.decide(authority)
	}
	return dispatch.TunnelIntercept, nil
}

func (p *scripted) Tunnel(ctx context.Context, _ dispatch.Caller, authority string, established func() (net.Conn, error)) *dispatch.Reply {
	return p.tunnel(ctx, authority, established)
}

func (p *scripted) Relayed(rec *dispatch.Record) {
	p.mu.Lock()
	p.relayed = append(p.relayed, rec.ID)
	p.mu.Unlock()
}

// requests returns what was submitted, and forgets it.
func (p *scripted) requests() []seen {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := p.subs
	p.subs = nil
	return out
}

func (p *scripted) handovers() []error {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := p.handed
	p.handed = nil
	return out
}

// syncBuffer is a log that a test reads while it is written.
type syncBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// bed is a running proxy.
type bed struct {
	t        testing.TB
	p        *Proxy
	pipe     *scripted
	journal  *fakeJournal
	sessions *Sessions
	addr     string
	log      *syncBuffer
	roots    *x509.CertPool
}

type bedOption func(*Config)

func newBed(t testing.TB, opts ...bedOption) *bed {
	t.Helper()
	dir := t.TempDir()
	ca, err := LoadOrCreateCA(filepath.Join(dir, "ca"))
	if err != nil {
		t.Fatal(err)
	}
	sessions, err := OpenSessions(filepath.Join(dir, "sessions.json"))
	if err != nil {
		t.Fatal(err)
	}
	b := &bed{t: t, pipe: &scripted{}, journal: newFakeJournal(), sessions: sessions, log: &syncBuffer{}, roots: x509.NewCertPool()}
	b.roots.AddCert(ca.Certificate())
	cfg := Config{
		Pipeline: b.pipe, Journal: b.journal, CA: ca, Sessions: sessions,
		Callers: &Callers{Sessions: sessions, IdentityKey: []byte("test key")},
		Logger:  slog.New(slog.NewTextHandler(b.log, &slog.HandlerOptions{Level: slog.LevelDebug})),
		Limits:  Limits{HeadTimeout: 5 * time.Second},
	}
	for _, o := range opts {
		o(&cfg)
	}
	b.p = New(cfg)
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	b.addr = ln.Addr().String()
	served := make(chan error, 1)
	go func() { served <- b.p.Serve(context.Background(), ln) }()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := b.p.Shutdown(ctx); err != nil {
			t.Errorf("shutdown: %v", err)
		}
		if err := <-served; err != nil {
			t.Errorf("serve: %v", err)
		}
	})
	return b
}

// dial opens a raw connection to the proxy.
func (b *bed) dial() *net.TCPConn {
	b.t.Helper()
	c, err := net.Dial("tcp", b.addr)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = c.Close() })
	_ = c.SetDeadline(time.Now().Add(20 * time.Second))
	return c.(*net.TCPConn)
}

// client returns an HTTP client that goes through the proxy.
func (b *bed) client(user *url.Userinfo, h2 bool) *http.Client {
	proto := &http.Protocols{}
	proto.SetHTTP1(!h2)
	proto.SetHTTP2(h2)
	tr := &http.Transport{
		Proxy:           http.ProxyURL(&url.URL{Scheme: "http", Host: b.addr, User: user}),
		TLSClientConfig: &tls.Config{RootCAs: b.roots}, Protocols: proto, DisableCompression: true,
	}
	b.t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

// answer is a response read from a raw connection.
type answer struct {
	status int
	header http.Header
	body   []byte
	reason string
}

func readAnswer(t testing.TB, r *bufio.Reader, method string) answer {
	t.Helper()
	resp, err := http.ReadResponse(r, &http.Request{Method: method})
	if err != nil {
		t.Fatalf("no response: %v", err)
	}
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatalf("body: %v", err)
	}
	if resp.Close {
		resp.Header.Set("Connection", "close") // ReadResponse takes it away
	}
	return answer{resp.StatusCode, resp.Header, body, strings.TrimSpace(strings.TrimPrefix(resp.Status, strconv.Itoa(resp.StatusCode)))}
}

// envelope decodes the body; it fails the test when it is none.
func (a answer) envelope(t testing.TB) outcome.Envelope {
	t.Helper()
	var env outcome.Envelope
	if ct := a.header.Get("Content-Type"); ct != "application/json" {
		t.Fatalf("status %d with content type %q is no envelope: %q", a.status, ct, a.body)
	}
	if err := json.Unmarshal(a.body, &env); err != nil {
		t.Fatalf("envelope %q: %v", a.body, err)
	}
	if env.Error == nil {
		t.Fatalf("envelope without error: %q", a.body)
	}
	return env
}

// closed fails unless the peer closes the connection.
func closed(t testing.TB, r io.Reader) {
	t.Helper()
	if n, err := io.Copy(io.Discard, r); n != 0 || err != nil && !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("connection is not closed cleanly: %d more bytes, %v", n, err)
	}
}

// connectTo opens a tunnel on a raw connection.
func (b *bed) connectTo(authority string, extra ...string) net.Conn {
	b.t.Helper()
	c := b.dial()
	fmt.Fprintf(c, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n%s\r\n", authority, authority, strings.Join(extra, ""))
	a := readHead(b.t, c)
	if !strings.Contains(a, " 200 ") {
		b.t.Fatalf("CONNECT: %q", a)
	}
	return c
}

// readHead reads exactly one response head, byte by byte.
func readHead(t testing.TB, c net.Conn) string {
	t.Helper()
	var head []byte
	var one [1]byte
	for !bytes.HasSuffix(head, []byte("\r\n\r\n")) {
		if _, err := io.ReadFull(c, one[:]); err != nil {
			t.Fatalf("head %q: %v", head, err)
		}
		head = append(head, one[0])
	}
	return string(head)
}

func (b *bed) tlsInside(c net.Conn, sni string, protos ...string) *tls.Conn {
	b.t.Helper()
	tc := tls.Client(c, &tls.Config{RootCAs: b.roots, ServerName: sni, NextProtos: protos})
	if err := tc.Handshake(); err != nil {
		b.t.Fatalf("handshake: %v", err)
	}
	return tc
}

func basic(user, password string) string {
	return "Proxy-Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+password)) + "\r\n"
}

// eventually waits for a condition that other goroutines bring about.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	deadline := time.Now().Add(10 * time.Second)
	for !ok() {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
		time.Sleep(2 * time.Millisecond)
	}
}

func openFiles(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		return 0 // not Linux: only goroutines are counted
	}
	return len(entries)
}

func settled(f func() int) int {
	n := f()
	for range 100 {
		runtime.GC()
		time.Sleep(10 * time.Millisecond)
		m := f()
		if m == n {
			return n
		}
		n = m
	}
	return n
}

var discard = slog.New(slog.DiscardHandler)
