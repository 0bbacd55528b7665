package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"iter"

	"log/slog"
	"net"
	"strings"
	"sync"
	"testing"

	"waybill/dispatch"
	"waybill/dispatch/httpx"
	"waybill/inject"
	"waybill/internal/testkit"
	"waybill/metrics"
	"waybill/routes"
)

// weightless is a journal that projects, and keeps what has not ended.
type weightless struct {
	dispatch.Journal
	metrics *metrics.Metrics
	mu      sync.Mutex
	seq     uint64
	open    map[dispatch.ActionID]dispatch.Record
}

func (j *weightless) Append(_ context.Context, b dispatch.Batch) (dispatch.Receipt, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	rec, known := j.open[b.Action]
	before := &rec
	if !known {
		before = nil
	}
	next := rec
	next.ID = b.Action
	for i := range b.Events {
		var err error
		j.seq++
		if next, err = dispatch.Apply(next, &b.Events[i], j.seq); err != nil {
			return dispatch.Receipt{}, err
		}
	}
	dispatch.Measure(j.metrics, before, &next, b.Events)
	if j.open[b.Action] = next; next.Ended {
		delete(j.open, b.Action)
	}
	return dispatch.Receipt{Record: next}, nil
}

func (*weightless) Admit() error { return nil }

func (*weightless) Actions(context.Context, dispatch.Filter) iter.Seq2[dispatch.Record, error] {
	return func(func(dispatch.Record, error) bool) {}
}

func (*weightless) Guarding(context.Context, string, string) (dispatch.Record, error) {
	return dispatch.Record{}, dispatch.ErrActionNotFound
}

func (*weightless) Redirecting(context.Context, string, string) (dispatch.Record, error) {
	return dispatch.Record{}, dispatch.ErrActionNotFound
}

// echoing is an origin that answers each request with the same bytes.
func echoing(b *testing.B, pki *testkit.CA, answer []byte) net.Listener {
	b.Helper()
	ln, err := tls.Listen("tcp", "127.0.0.1:0", pki.Server("pay.example.test"))
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = ln.Close() })
	go func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				r := bufio.NewReader(c)
				for drop(r, []byte("Content-Length: ")) == nil {
					if _, err := c.Write(answer); err != nil {
						return
					}
				}
			}()
		}
	}()
	return ln
}

// drop reads one message with a length, and allocates nothing.
func drop(r *bufio.Reader, name []byte) error {
	n := 0
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return err
		}
		if len(line) == 2 {
			_, err = r.Discard(n)
			return err
		}
		if v, ok := bytes.CutPrefix(line, name); ok {
			n = 0
			for _, c := range v[:len(v)-2] {
				n = n*10 + int(c-'0')
			}
		}
	}
}

// BenchmarkIntercepted carries requests of 256 bytes, whose answers have 1 KiB, through
// an intercepted tunnel, past a journal that costs nothing: what is measured is the rest
// of the way. Caller and origin are raw, so that what is allocated is Waybill's.
func BenchmarkIntercepted(b *testing.B) {
	pki := testkit.NewCA(b)
	ln := echoing(b, pki, fmt.Appendf(nil, "HTTP/1.1 200 OK\r\nDate: Tue, 01 Dec 2026 10:00:00 GMT\r\nContent-Type: application/json\r\nContent-Length: 1024\r\n\r\n%s", strings.Repeat("x", 1024)))
	snap, err := routes.NewSnapshot([]routes.Route{{
		Name: "pay", Match: routes.Match{Hosts: []string{"pay.example.test"}},
		Inject:   []routes.Injection{{Header: "Authorization", Value: "Bearer ${secret}", Credential: "key"}},
		Upstream: routes.Upstream{RootsPEM: pki.PEM(), RootsOnly: true, Resolve: map[string]string{"pay.example.test": ln.Addr().String()}},
	}}, routes.Deny, nil)
	if err != nil {
		b.Fatal(err)
	}
	creds, err := inject.NewStore([]inject.Credential{{ID: "key", Label: "1", Source: inject.EnvSource("WAYBILL_BENCH_SECRET")}})
	if err != nil {
		b.Fatal(err)
	}
	b.Setenv("WAYBILL_BENCH_SECRET", "bench-secret-0123456789abcdef0123456789abcdef")
	tr := httpx.New(httpx.Config{})
	b.Cleanup(tr.Close)
	m := metrics.New("bench", "")
	m.SetRoutes([]string{"pay"})
	m.SetCredentials([]string{"key"})
	journal := &weightless{metrics: m, open: make(map[dispatch.ActionID]dispatch.Record)}
	logger := slog.New(slog.NewTextHandler(io.Discard, nil))
	pipeline := dispatch.New(dispatch.Config{Journal: journal, Transport: tr, Metrics: m, Logger: logger, Binding: &dispatch.Binding{Snapshot: snap, Credentials: creds}})
	bed := newBed(b, func(c *Config) { c.Pipeline, c.Logger, c.Metrics = pipeline, logger, m })
	request := fmt.Appendf(nil, "POST /v1/charges HTTP/1.1\r\nHost: pay.example.test\r\nUser-Agent: bench\r\nContent-Type: application/json\r\nContent-Length: 256\r\n\r\n%s", strings.Repeat("x", 256))
	var dials sync.Mutex
	b.ReportAllocs()
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		dials.Lock()
		c := bed.tlsInside(bed.connectTo("pay.example.test:443", basic("agent", "t")), "pay.example.test", "http/1.1")
		dials.Unlock()
		r := bufio.NewReader(c)
		for pb.Next() {
			if _, err := c.Write(request); err != nil {
				b.Error(err)
				return
			}
			if line, err := r.Peek(12); err != nil || string(line) != "HTTP/1.1 200" {
				b.Errorf("%q, %v", line, err)
				return
			}
			if err := drop(r, []byte("Content-Length: ")); err != nil {
				b.Error(err)
				return
			}
		}
	})
}
