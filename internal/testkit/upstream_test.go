package testkit_test

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"waybill/internal/testkit"
)

const host = "pay.example.test"

// direct is a client that reaches addr under any host name, over TLS with ca.
func direct(t *testing.T, ca *testkit.CA, addr string, h2 bool) *http.Client {
	t.Helper()
	var protos http.Protocols
	protos.SetHTTP1(!h2)
	protos.SetHTTP2(h2)
	tr := &http.Transport{
		Proxy:     nil,
		Protocols: &protos,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, network, addr)
		},
	}
	if ca != nil {
		tr.TLSClientConfig = &tls.Config{RootCAs: ca.Pool(), MinVersion: tls.VersionTLS12}
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{Transport: tr, Timeout: 20 * time.Second}
}

func TestUpstreamScripts(t *testing.T) {
	ca := testkit.NewCA(t)
	const ok = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	for _, secure := range []bool{false, true} {
		var conf *tls.Config
		if secure {
			conf = ca.Server(host)
		}
		for name, tc := range map[string]struct {
			turn    testkit.Turn
			wantErr func(error) bool // nil: an answer with body "ok"
			bodyErr bool
			body    string
		}{
			"answer":          {turn: testkit.Respond(testkit.Write(ok)), body: "ok"},
			"reply":           {turn: testkit.Respond(testkit.Reply(200, "ok", "X-Y", "z")), body: "ok"},
			"close":           {turn: testkit.Respond(testkit.Close()), wantErr: func(err error) bool { return errors.Is(err, io.EOF) }},
			"reset":           {turn: testkit.Respond(testkit.Reset()), wantErr: func(err error) bool { return errors.Is(err, syscall.ECONNRESET) }},
			"cut":             {turn: testkit.Respond(testkit.Write("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nok"), testkit.Close()), bodyErr: true, body: "ok"},
			"close-delimited": {turn: testkit.Respond(testkit.Write("HTTP/1.1 200 OK\r\n\r\nok"), testkit.HalfClose()), body: "ok"},
			"truncated":       {turn: testkit.Respond(testkit.Write("HTTP/1.1 200 OK\r\n\r\nok"), testkit.HalfCloseNoNotify()), body: "ok"},
			"no notify":       {turn: testkit.Respond(testkit.Write("HTTP/1.1 200 OK\r\n\r\nok"), testkit.CloseNoNotify()), body: "ok"},
			"early":           {turn: testkit.Early(testkit.Write(ok), testkit.ReadBody()), body: "ok"},
		} {
			t.Run(name+map[bool]string{true: " tls", false: " plain"}[secure], func(t *testing.T) {
				testkit.CheckGoroutines(t)
				up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: conf, Script: []testkit.Turn{tc.turn}})
				resp, err := testkit.TrySend(t, direct(t, ca, up.Addr(), false), "POST", up.URL(host, "/v1/x?q=1"), "amount=5", "X-Two", "a", "X-Two", "b")
				if tc.wantErr != nil {
					if !tc.wantErr(err) {
						t.Fatalf("unexpected: %v", err)
					}
				} else {
					if err != nil {
						t.Fatal(err)
					}
					if string(resp.Body) != tc.body || (resp.BodyErr != nil) != tc.bodyErr {
						t.Fatalf("body %q, %v", resp.Body, resp.BodyErr)
					}
				}
				a := up.Wait(t, 1)[0]
				if !a.Is("POST", "/v1/x?q=1") || string(a.Body) != "amount=5" || a.BodyBytes != 8 || len(a.BodySHA256) != 64 || !a.HeadComplete || a.Conn != 1 || a.OnConn != 1 {
					t.Fatalf("arrival %+v", a)
				}
				if got := a.Values("x-two"); len(got) != 2 || got[1] != "b" {
					t.Fatalf("fields %q", got)
				}
				if !strings.HasPrefix(string(a.RawHead), "POST /v1/x?q=1 HTTP/1.1\r\n") || !strings.HasSuffix(string(a.RawHead), "\r\n\r\n") {
					t.Fatalf("head %q", a.RawHead)
				}
				if secure && a.ServerName != host {
					t.Fatalf("SNI %q", a.ServerName)
				}
				if a.Answered != (name == "reply") {
					t.Fatalf("answered: %t", a.Answered)
				}
			})
		}
	}
}

// eofConn notes whether a read of the TCP connection has met its end.
type eofConn struct {
	net.Conn
	eof atomic.Bool
}

func (c *eofConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err != nil {
		c.eof.Store(true)
	}
	return n, err
}

// crypto/tls reports a TCP close at a record boundary as a clean io.EOF. Only below
// it can a close_notify be told from truncation (CONTRACT G2): with close_notify,
// the end of the TCP stream is never read.
func TestCloseNotifyCanBeToldFromTruncation(t *testing.T) {
	ca := testkit.NewCA(t)
	for _, version := range []uint16{tls.VersionTLS12, tls.VersionTLS13} {
		for name, tc := range map[string]struct {
			step   testkit.Step
			notify bool
		}{
			"close":            {testkit.Close(), true},
			"half close":       {testkit.HalfClose(), true},
			"close, no notify": {testkit.CloseNoNotify(), false},
			"half, no notify":  {testkit.HalfCloseNoNotify(), false},
		} {
			t.Run(name+" "+tls.VersionName(version), func(t *testing.T) {
				up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(host), Script: []testkit.Turn{
					testkit.Respond(testkit.Write("HTTP/1.1 200 OK\r\n\r\nok"), tc.step),
				}})
				raw := &eofConn{Conn: testkit.Dial(t, up.Addr()).Conn}
				c := tls.Client(raw, &tls.Config{ServerName: host, RootCAs: ca.Pool(), MinVersion: version, MaxVersion: version})
				if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: h\r\n\r\n"); err != nil {
					t.Fatal(err)
				}
				data, err := io.ReadAll(c)
				if err != nil || !strings.HasSuffix(string(data), "ok") {
					t.Fatalf("%q %v", data, err)
				}
				if raw.eof.Load() == tc.notify {
					t.Fatalf("end of TCP read: %t", raw.eof.Load())
				}
			})
		}
	}
}

func TestUpstreamRecordsPartialRequests(t *testing.T) {
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{})
	c := testkit.Dial(t, up.Addr())
	c.Send(t, "POST /v1/x HTTP/1.1\r\nHost: h\r\nContent-Length: 9\r\n\r\nhalf")
	as := up.WaitFor(t, "half a body", func(as []testkit.Arrival) bool {
		return len(as) == 1 && as[0].BodyBytes > 0 || len(as) == 1 && as[0].HeadComplete
	})
	if as[0].Complete {
		t.Fatal("complete too early")
	}
	c.Reset()
	as = up.WaitFor(t, "the end", func(as []testkit.Arrival) bool { return as[0].Err != "" })
	if as[0].Complete || as[0].BodyBytes > 4 {
		t.Fatalf("arrival %+v", as[0])
	}
	d := testkit.Dial(t, up.Addr())
	d.Send(t, "POST /v1/")
	_ = d.Close()
	as = up.WaitFor(t, "a head cut short", func(as []testkit.Arrival) bool { return len(as) == 2 && as[1].Err != "" })
	if as[1].HeadComplete || string(as[1].RawHead) != "POST /v1/" {
		t.Fatalf("arrival %+v", as[1])
	}
	e := testkit.Dial(t, up.Addr())
	_ = e.Close()
	testkit.Eventually(t, func() error {
		if conns := up.Conns(); len(conns) != 3 || !conns[2].Closed || conns[2].AppBytes != 0 {
			return errors.New("third connection not seen as empty")
		}
		return nil
	})
	if n := len(up.Arrivals()); n != 2 {
		t.Fatalf("%d arrivals", n)
	}
}

func TestUpstreamChunksTrailersAndKeepAlive(t *testing.T) {
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{})
	c := testkit.Dial(t, up.Addr())
	for range 2 {
		r := c.Roundtrip(t, "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n3;x=y\r\nabc\r\n2\r\nde\r\n0\r\nX-T: v\r\n\r\n")
		if r.Status != 200 || string(r.Body) != "ok" {
			t.Fatalf("%+v", r)
		}
	}
	as := up.Wait(t, 2)
	if string(as[1].Body) != "abcde" || as[1].Trailer.Get("X-T") != "v" || as[1].Conn != 1 || as[1].OnConn != 2 || !as[1].Answered {
		t.Fatalf("%+v", as[1])
	}
	up.RequireCount(t, 2, "POST", "/")
	c.Send(t, "POST / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n")
	up.WaitFor(t, "a bad chunk", func(as []testkit.Arrival) bool { return len(as) == 3 && as[2].Err != "" })
}

func TestGateHoldsAndReleases(t *testing.T) {
	g := testkit.NewGate(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{Script: []testkit.Turn{
		testkit.Respond(testkit.Write("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n"), testkit.Hold(g), testkit.WriteLast("ok")),
	}})
	c := testkit.Dial(t, up.Addr())
	c.Send(t, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
	g.Await(t)
	if up.Arrivals()[0].Answered {
		t.Fatal("answered before the gate opened")
	}
	g.Open()
	r, err := c.ReadResponse("GET")
	if err != nil || string(r.Body) != "ok" {
		t.Fatalf("%v %v", r, err)
	}
	if !up.Arrivals()[0].Answered {
		t.Fatal("not marked as answered")
	}
}

// A script that is held, or that stalls, must not outlive its test.
func TestCloseEndsHeldScripts(t *testing.T) {
	for name, step := range map[string]testkit.Step{"hold": testkit.Hold(testkit.NewGate(t)), "stall": testkit.Stall(), "big": testkit.Big(1 << 30), "half": testkit.HalfClose()} {
		t.Run(name, func(t *testing.T) {
			testkit.CheckGoroutines(t)
			up := testkit.NewUpstream(t, testkit.UpstreamConfig{Handler: func(testkit.Arrival) []testkit.Step { return []testkit.Step{step} }})
			c := testkit.Dial(t, up.Addr())
			c.Send(t, "GET / HTTP/1.1\r\nHost: h\r\n\r\n")
			up.Wait(t, 1)
			up.Close()
		})
	}
}

func TestUpstreamRefusedCertificateIsNoArrival(t *testing.T) {
	ca, other := testkit.NewCA(t), testkit.NewCA(t)
	for name, cert := range map[string]tls.Certificate{"expired": ca.Expired(host), "wrong name": ca.Leaf("other.example.test"), "self-signed": ca.SelfSigned(host), "other authority": other.Leaf(host)} {
		t.Run(name, func(t *testing.T) {
			up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: testkit.ServerConfig(cert)})
			if _, err := testkit.TrySend(t, direct(t, ca, up.Addr(), false), "GET", up.URL(host, "/"), ""); err == nil {
				t.Fatal("certificate accepted")
			}
			testkit.Eventually(t, func() error {
				if cs := up.Conns(); len(cs) != 1 || !cs[0].Closed {
					return errors.New("connection not ended")
				}
				return nil
			})
			if cs := up.Conns(); cs[0].TLSErr == "" || cs[0].AppBytes != 0 || len(up.Arrivals()) != 0 {
				t.Fatalf("%+v", cs[0])
			}
		})
	}
}

func TestRequireClientCertificate(t *testing.T) {
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.RequireClient(ca.Server(host))})
	c := direct(t, ca, up.Addr(), false)
	if _, err := testkit.TrySend(t, c, "GET", up.URL(host, "/"), ""); err == nil || !strings.Contains(err.Error(), "certificate required") {
		t.Fatalf("without a certificate: %v", err)
	}
	c.Transport.(*http.Transport).TLSClientConfig.Certificates = []tls.Certificate{ca.Client("me")}
	if r := testkit.Send(t, c, "GET", up.URL(host, "/"), ""); r.Status != 200 {
		t.Fatal(r.Status)
	}
	if up.Count("GET", "/") != 1 {
		t.Fatal("ledger")
	}
}

func TestOnAcceptAndStopAccepting(t *testing.T) {
	g := testkit.NewGate(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{OnAccept: func(c *net.TCPConn, done <-chan struct{}) error {
		g.Pass(done)
		_ = c.SetLinger(0)
		return errors.New("no")
	}})
	c := testkit.Dial(t, up.Addr())
	g.Await(t)
	g.Open()
	if _, reset := c.ReadAll(); !reset {
		t.Fatal("no reset")
	}
	up.StopAccepting()
	for _, addr := range []string{up.Addr(), testkit.RefusingAddr(t)} {
		if _, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", addr); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("%v", err)
		}
	}
}

func TestOrigin(t *testing.T) {
	ca := testkit.NewCA(t)
	for want, h2 := range map[string]bool{"HTTP/1.1": false, "HTTP/2.0": true} {
		t.Run(want, func(t *testing.T) {
			testkit.CheckGoroutines(t)
			o := testkit.NewOrigin(t, testkit.OriginConfig{TLS: ca.Server(host), HTTP2: h2})
			c := direct(t, ca, o.Addr(), h2)
			var wg sync.WaitGroup
			for range 8 {
				wg.Go(func() {
					if r, err := testkit.TrySend(t, c, "POST", o.URL(host, "/p"), "body"); err != nil || r.Status != 200 {
						t.Errorf("%v %v", r, err)
					}
				})
			}
			wg.Wait()
			for _, a := range o.Wait(t, 8) {
				if a.Protocol != want || string(a.Body) != "body" || a.ServerName != host || a.Authority == "" {
					t.Fatalf("%+v", a)
				}
			}
		})
	}
}

func TestH2Upstream(t *testing.T) {
	ca := testkit.NewCA(t)
	big := strings.Repeat("b", 300<<10)
	send := func(t *testing.T, up *testkit.H2Upstream, method string) (*testkit.Response, error) {
		t.Helper()
		// Transport replays some refused requests by itself; the first request of a
		// connection with a body that cannot be rewound is sent once.
		req, err := http.NewRequestWithContext(t.Context(), method, up.URL(host, "/v1/x"), io.LimitReader(strings.NewReader("amount=5"), 8))
		if err != nil {
			t.Fatal(err)
		}
		if method == http.MethodHead {
			req.Body = nil
		}
		resp, err := direct(t, ca, up.Addr(), true).Do(req)
		if err != nil {
			return nil, err
		}
		defer func() { _ = resp.Body.Close() }()
		r := &testkit.Response{Status: resp.StatusCode, Header: resp.Header}
		r.Body, r.BodyErr = io.ReadAll(resp.Body)
		r.Trailer = resp.Trailer
		return r, nil
	}
	for name, tc := range map[string]struct {
		method   string
		steps    []testkit.H2Step
		fails    string // regular expression for the client's error, "" for an answer
		body     string
		cut      bool
		answered bool
		status   int
	}{
		"reply":     {steps: []testkit.H2Step{testkit.H2Reply(200, "ok")}, body: "ok", answered: true},
		"big":       {steps: []testkit.H2Step{testkit.H2Reply(200, big)}, body: big, answered: true},
		"bodyless":  {method: "HEAD", steps: []testkit.H2Step{testkit.H2Head(200, true, "content-length", "1488324")}, answered: true},
		"trailers":  {steps: []testkit.H2Step{testkit.H2Head(103, false, "link", "</a>"), testkit.H2Head(200, false), testkit.H2Data([]byte("ok"), false), testkit.H2Trailers("x-t", "v")}, body: "ok", answered: true},
		"refuse":    {steps: []testkit.H2Step{testkit.H2Refuse()}, fails: "REFUSED_STREAM"},
		"reset":     {steps: []testkit.H2Step{testkit.H2Reset(http2.ErrCodeInternal)}, fails: "INTERNAL_ERROR"},
		"goaway0":   {steps: []testkit.H2Step{testkit.H2GoAwayBelow(http2.ErrCodeNo), testkit.H2Close()}, fails: "GOAWAY"},
		"goaway1":   {steps: []testkit.H2Step{testkit.H2GoAwayIncluding(http2.ErrCodeNo), testkit.H2Close()}, fails: "GOAWAY"},
		"close":     {steps: []testkit.H2Step{testkit.H2Close()}, fails: "EOF"},
		"no notify": {steps: []testkit.H2Step{testkit.H2CloseNoNotify()}, fails: "EOF"},
		"rst":       {steps: []testkit.H2Step{testkit.H2ConnReset()}, fails: "reset|EOF|broken pipe"}, // whoever of reader and writer meets it first
		"cut body":  {steps: []testkit.H2Step{testkit.H2Head(200, false, "content-length", "9"), testkit.H2Data([]byte("half"), false), testkit.H2Reset(http2.ErrCodeCancel)}, body: "half", cut: true},
	} {
		t.Run(name, func(t *testing.T) {
			testkit.CheckGoroutines(t)
			up := testkit.NewH2Upstream(t, testkit.H2UpstreamConfig{TLS: ca.Server(host), Script: [][]testkit.H2Step{tc.steps}})
			method := tc.method
			if method == "" {
				method = "POST"
			}
			r, err := send(t, up, method)
			if tc.fails != "" {
				if err == nil || !regexp.MustCompile(tc.fails).MatchString(err.Error()) {
					t.Fatalf("error %v, want %s", err, tc.fails)
				}
			} else {
				if err != nil {
					t.Fatal(err)
				}
				if r.Status != 200 || string(r.Body) != tc.body || (r.BodyErr != nil) != tc.cut {
					t.Fatalf("%d, %d bytes, %v", r.Status, len(r.Body), r.BodyErr)
				}
				if name == "trailers" && r.Trailer.Get("X-T") != "v" {
					t.Fatalf("trailer %v", r.Trailer)
				}
			}
			as := up.Wait(t, 1)
			if len(as) != 1 || !as[0].Is(method, "/v1/x") || as[0].Stream != 1 || as[0].Protocol != "HTTP/2.0" || !strings.HasPrefix(as[0].Authority, host) {
				t.Fatalf("%+v", as)
			}
			if method == "POST" && string(as[0].Body) != "amount=5" {
				t.Fatalf("body %q", as[0].Body)
			}
			if as[0].Answered != tc.answered {
				t.Fatalf("answered %t", as[0].Answered)
			}
		})
	}
}

func TestH2UpstreamScriptByRequest(t *testing.T) {
	ca := testkit.NewCA(t)
	g := testkit.NewGate(t)
	up := testkit.NewH2Upstream(t, testkit.H2UpstreamConfig{TLS: ca.Server(host), Script: [][]testkit.H2Step{
		{testkit.H2Hold(g), testkit.H2Reply(201, "")}, {testkit.H2Reply(202, "")},
	}})
	c := direct(t, ca, up.Addr(), true)
	first := make(chan int, 1)
	go func() {
		r, err := testkit.TrySend(t, c, "POST", up.URL(host, "/a"), "x")
		if err != nil {
			t.Error(err)
			first <- 0
			return
		}
		first <- r.Status
	}()
	g.Await(t)
	for range 2 {
		if r := testkit.Send(t, c, "POST", up.URL(host, "/b"), "x"); r.Status != 202 {
			t.Fatal(r.Status)
		}
	}
	g.Open()
	if s := <-first; s != 201 {
		t.Fatal(s)
	}
	if as := up.Wait(t, 3); as[2].Conn != 1 || as[2].Stream != 5 {
		t.Fatalf("%+v", as[2])
	}
}
