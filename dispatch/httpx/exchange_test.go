package httpx

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/net/http2"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
	"waybill/routes"
)

const host = "pay.example.test"

// record is a Sink that keeps what arrives.
type record struct {
	mu      sync.Mutex
	interim []int
	status  int
	header  http.Header
	body    bytes.Buffer
	fail    error
}

func (r *record) Informational(status int, _ http.Header) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.interim = append(r.interim, status)
}

func (r *record) Head(status int, h http.Header, _ int64) error {
	r.status, r.header = status, h
	return nil
}

func (r *record) Body(p []byte) error {
	if r.fail != nil {
		return r.fail
	}
	r.body.Write(p)
	return nil
}

type rig struct {
	t  *testing.T
	ca *testkit.CA
	tr *Transport
}

func newRig(t *testing.T) *rig {
	ca := testkit.NewCA(t)
	tr := New(Config{SystemRoots: ca.Pool()})
	t.Cleanup(tr.Close)
	return &rig{t: t, ca: ca, tr: tr}
}

func order(scheme, addr string) *dispatch.Order {
	port := 443
	if scheme == "http" {
		port = 80
	}
	return &dispatch.Order{Target: routes.Target{Scheme: scheme, Host: host, Port: port},
		Upstream: &routes.Upstream{Resolve: map[string]string{host: addr}, AllowPlaintext: scheme == "http"}, MaxRest: time.Minute}
}

func outgoing(method, path, body string) *dispatch.Outgoing {
	o := &dispatch.Outgoing{Method: method, Target: routes.Target{Scheme: "https", Host: host, Port: 443}, Authority: host, RawPath: path,
		Header: http.Header{"User-Agent": {""}}, Idle: 10 * time.Second, MaxBody: 1 << 20}
	if body != "" || method == http.MethodPost {
		o.Length = int64(len(body))
		o.Body = func() (io.Reader, error) { return bytes.NewReader([]byte(body)), nil } // as a spool in memory does
	}
	return o
}

// send connects, exchanges and releases.
func (r *rig) send(o *dispatch.Order, out *dispatch.Outgoing) (dispatch.Ending, *record, dispatch.Dispatch) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 20*time.Second)
	defer cancel()
	out.Target = o.Target
	c, err := r.tr.Connect(ctx, o)
	if err != nil {
		r.t.Fatalf("connect: %v (%v)", err, errors.Unwrap(err))
	}
	info := c.Info()
	sink := &record{}
	end := c.Exchange(ctx, out, sink)
	c.Release()
	return end, sink, info
}

// TestEndings is the table of journal-durability section 7: what a peer does, and
// what may be concluded from it.
func TestEndings(t *testing.T) {
	contract.Covers(t, "E4", "F3", "G1", "G2", "G3", "G7", "F2")
	const head = "HTTP/1.1 200 OK\r\n"
	for _, c := range []struct {
		name     string
		steps    []testkit.Step
		code     outcome.Code
		status   int
		framing  string
		line     string
		plain    bool
		fin      bool // the route accepts a plain close
		method   string
		respBody string
	}{
		{name: "complete", steps: []testkit.Step{testkit.Reply(201, "ok")}, status: 201, framing: "content_length", respBody: "ok"},
		{name: "chunked", steps: []testkit.Step{testkit.Write(head + "Transfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n")}, status: 200, framing: "chunked", respBody: "ok"},
		{name: "no content", steps: []testkit.Step{testkit.Write("HTTP/1.1 204 No Content\r\n\r\n")}, status: 204, framing: "no_body"},
		{name: "head", method: "HEAD", steps: []testkit.Step{testkit.Write(head + "Content-Length: 1488324\r\n\r\n")}, status: 200, framing: "no_body"},
		{name: "closed without a byte", steps: []testkit.Step{testkit.Close()}, code: outcome.CodeRemoteOutcomeUnknown},
		{name: "reset without a byte", steps: []testkit.Step{testkit.Reset()}, code: outcome.CodeRemoteOutcomeUnknown},
		{name: "cut in the status line", steps: []testkit.Step{testkit.Write("HTTP/1.1 20"), testkit.Close()}, code: outcome.CodeRemoteOutcomeUnknown},
		{name: "cut in the header section", steps: []testkit.Step{testkit.Write(head + "Content-Le"), testkit.Close()}, code: outcome.CodeRemoteOutcomeUnknown},
		{name: "cut after a whole field line", steps: []testkit.Step{testkit.Write(head + "Content-Length: 2\r\n"), testkit.Close()}, code: outcome.CodeRemoteOutcomeUnknown},
		{name: "1xx, then closed", steps: []testkit.Step{testkit.Write("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"), testkit.Close()}, code: outcome.CodeRemoteOutcomeUnknown},
		{name: "short body", steps: []testkit.Step{testkit.Write(head + "Content-Length: 100\r\n\r\n{\"id\":\"a\"}"), testkit.Close()}, code: outcome.CodeRemoteResultIncomplete, status: 200},
		{name: "reset in the body", steps: []testkit.Step{testkit.Write(head + "Content-Length: 100\r\n\r\n{\"id\":\"a\"}"), testkit.Reset()}, code: outcome.CodeRemoteResultIncomplete, status: 200},
		{name: "no last chunk", steps: []testkit.Step{testkit.Write(head + "Transfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n"), testkit.Close()}, code: outcome.CodeRemoteResultIncomplete, status: 200},
		{name: "bad chunk", steps: []testkit.Step{testkit.Write(head + "Transfer-Encoding: chunked\r\n\r\nzz\r\nabcd\r\n0\r\n\r\n")}, code: outcome.CodeRemoteResultIncomplete, status: 200},
		{name: "last chunk without its end", steps: []testkit.Step{testkit.Write(head + "Transfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n0\r\n"), testkit.Close()}, code: outcome.CodeRemoteResultIncomplete, status: 200},
		{name: "close-delimited, close_notify", steps: []testkit.Step{testkit.Write(head + "\r\nwhole"), testkit.Close()}, status: 200, framing: "close_notify", respBody: "whole"},
		{name: "close-delimited, bare FIN under TLS", steps: []testkit.Step{testkit.Write(head + "\r\nhalf"), testkit.CloseNoNotify()}, code: outcome.CodeRemoteResultIncomplete, status: 200},
		{name: "close-delimited, bare FIN under TLS, route accepts", steps: []testkit.Step{testkit.Write(head + "\r\nhalf"), testkit.CloseNoNotify()}, fin: true, code: outcome.CodeRemoteResultIncomplete, status: 200},
		{name: "close-delimited, plain", plain: true, steps: []testkit.Step{testkit.Write(head + "\r\nhalf"), testkit.Close()}, code: outcome.CodeRemoteResultIncomplete, status: 200},
		{name: "close-delimited, plain, route accepts", plain: true, fin: true, steps: []testkit.Step{testkit.Write(head + "\r\nwhole"), testkit.Close()}, status: 200, framing: "tcp_close", respBody: "whole"},
		{name: "status 000", steps: []testkit.Step{testkit.Write("HTTP/1.1 000 Weird\r\nContent-Length: 2\r\n\r\nok")}, code: outcome.CodeRemoteProtocolError, line: "HTTP/1.1 000"},
		{name: "status 099", steps: []testkit.Step{testkit.Write("HTTP/1.1 099 Weird\r\nContent-Length: 2\r\n\r\nok")}, code: outcome.CodeRemoteProtocolError, line: "HTTP/1.1 099"},
		{name: "status 1000", steps: []testkit.Step{testkit.Write("HTTP/1.1 1000 Weird\r\nContent-Length: 2\r\n\r\nok")}, code: outcome.CodeRemoteProtocolError, line: "HTTP/1.1 1000"},
		{name: "status 999", steps: []testkit.Step{testkit.Write("HTTP/1.1 999 Weird\r\nContent-Length: 2\r\n\r\nok")}, status: 999, framing: "content_length", respBody: "ok"},
		{name: "101 that nobody asked for", steps: []testkit.Step{testkit.Write("HTTP/1.1 101 Switching\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n")}, code: outcome.CodeRemoteProtocolError, line: "HTTP/1.1 101"},
		{name: "no HTTP", steps: []testkit.Step{testkit.Write("SSH-2.0-OpenSSH_9.2\r\n"), testkit.Stall()}, code: outcome.CodeRemoteProtocolError},
		{name: "differing lengths", steps: []testkit.Step{testkit.Write(head + "Content-Length: 2\r\nContent-Length: 3\r\n\r\nok")}, code: outcome.CodeRemoteProtocolError, line: "HTTP/1.1 200"},
		{name: "negative length", steps: []testkit.Step{testkit.Write(head + "Content-Length: -2\r\n\r\nok")}, code: outcome.CodeRemoteProtocolError, line: "HTTP/1.1 200"},
		{name: "unknown coding", steps: []testkit.Step{testkit.Write(head + "Transfer-Encoding: gzip\r\n\r\nok")}, code: outcome.CodeRemoteProtocolError, line: "HTTP/1.1 200"},
		{name: "endless header", steps: []testkit.Step{testkit.Write(head + "X: " + strings.Repeat("a", 2<<20)), testkit.Stall()}, code: outcome.CodeRemoteProtocolError, line: "HTTP/1.1 200"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			rig := newRig(t)
			cfg := testkit.UpstreamConfig{Script: []testkit.Turn{testkit.Respond(c.steps...)}}
			scheme := "http"
			if !c.plain {
				scheme, cfg.TLS = "https", rig.ca.Server(host)
			}
			up := testkit.NewUpstream(t, cfg)
			method := c.method
			if method == "" {
				method = http.MethodPost
			}
			body := "amount=5"
			if method == "HEAD" {
				body = ""
			}
			out := outgoing(method, "/v1/charges", body)
			out.CloseDelimited = c.fin
			end, sink, _ := rig.send(order(scheme, up.Addr()), out)
			if end.Code != c.code || end.Status != c.status || end.Framing != c.framing && end.Complete || end.StatusLine != c.line {
				t.Fatalf("code %v status %d framing %q line %q (err %v); want %v %d %q %q", end.Code, end.Status, end.Framing, end.StatusLine, end.Err, c.code, c.status, c.framing, c.line)
			}
			if end.Complete != (c.code == outcome.CodeNone) {
				t.Errorf("complete = %v with code %v", end.Complete, end.Code)
			}
			if end.Complete && sink.body.String() != c.respBody {
				t.Errorf("body %q, want %q", sink.body.String(), c.respBody)
			}
			up.RequireCount(t, 1, method, "/v1/charges")
			if !end.Sent.Headers || !end.Sent.Complete {
				t.Errorf("markers %+v", end.Sent)
			}
		})
	}
}

// TestH2Endings: frames that prove and frames that do not (CONTRACT G8).
func TestH2Endings(t *testing.T) {
	contract.Covers(t, "G8", "G2", "F6")
	for _, c := range []struct {
		name  string
		steps []testkit.H2Step
		code  outcome.Code
		proof string
	}{
		{"complete", []testkit.H2Step{testkit.H2Reply(200, "ok")}, outcome.CodeNone, ""},
		{"refused", []testkit.H2Step{testkit.H2Refuse()}, outcome.CodeRemoteRefused, "RST_STREAM REFUSED_STREAM"},
		{"goaway below", []testkit.H2Step{testkit.H2GoAwayBelow(http2.ErrCodeNo), testkit.H2Close()}, outcome.CodeRemoteRefused, "GOAWAY last_stream_id=0"},
		{"goaway below with an error", []testkit.H2Step{testkit.H2GoAwayBelow(http2.ErrCodeEnhanceYourCalm), testkit.H2Close()}, outcome.CodeRemoteRefused, "GOAWAY last_stream_id=0"},
		{"goaway including", []testkit.H2Step{testkit.H2GoAwayIncluding(http2.ErrCodeNo), testkit.H2Close()}, outcome.CodeRemoteOutcomeUnknown, ""},
		{"other reset", []testkit.H2Step{testkit.H2Reset(http2.ErrCodeInternal)}, outcome.CodeRemoteOutcomeUnknown, ""},
		{"closed", []testkit.H2Step{testkit.H2Close()}, outcome.CodeRemoteOutcomeUnknown, ""},
		{"refused after the head", []testkit.H2Step{testkit.H2Head(200, false), testkit.H2Refuse()}, outcome.CodeRemoteResultIncomplete, ""},
		{"cut body", []testkit.H2Step{testkit.H2Head(200, false), testkit.H2Data([]byte("half"), false), testkit.H2Close()}, outcome.CodeRemoteResultIncomplete, ""},
		{"short of its length", []testkit.H2Step{testkit.H2Head(200, false, "content-length", "10"), testkit.H2Data([]byte("half"), true)}, outcome.CodeRemoteResultIncomplete, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			rig := newRig(t)
			up := testkit.NewH2Upstream(t, testkit.H2UpstreamConfig{TLS: rig.ca.Server(host), Script: [][]testkit.H2Step{c.steps}})
			end, _, info := rig.send(order("https", up.Addr()), outgoing("POST", "/v1/charges", "amount=5"))
			if end.Code != c.code || end.Proof != c.proof || end.Complete != (c.code == outcome.CodeNone) {
				t.Fatalf("code %v proof %q complete %v err %v; want %v %q", end.Code, end.Proof, end.Complete, end.Err, c.code, c.proof)
			}
			if info.Peer.Protocol != "h2" {
				t.Errorf("protocol %q", info.Peer.Protocol)
			}
			// One hand-over is one arrival: the library repeats nothing.
			up.RequireCount(t, 1, "POST", "/v1/charges")
		})
	}
}

// TestH2Head: an answer to HEAD, too, is complete only when the peer has ended its stream
// (CONTRACT G1). net/http gives it out as a whole one however the stream ended.
func TestH2Head(t *testing.T) {
	contract.Covers(t, "G1", "G2")
	head := func(end bool) testkit.H2Step { return testkit.H2Head(200, end, "content-length", "10") }
	for _, c := range []struct {
		name     string
		steps    []testkit.H2Step
		complete bool
	}{
		{"with the head", []testkit.H2Step{head(true)}, true},
		{"with an empty frame", []testkit.H2Step{head(false), testkit.H2Data(nil, true)}, true},
		{"with trailers", []testkit.H2Step{head(false), testkit.H2Trailers("x-sum", "1")}, true},
		{"and a reset that says no more than that", []testkit.H2Step{head(true), testkit.H2Reset(http2.ErrCodeNo)}, true},
		{"behind an interim answer", []testkit.H2Step{testkit.H2Head(103, false), head(true)}, true},
		{"reset", []testkit.H2Step{head(false), testkit.H2Reset(http2.ErrCodeInternal)}, false},
		{"reset without an error", []testkit.H2Step{head(false), testkit.H2Reset(http2.ErrCodeNo)}, false},
		{"refused", []testkit.H2Step{head(false), testkit.H2Refuse()}, false},
		{"closed", []testkit.H2Step{head(false), testkit.H2Close()}, false},
		{"content", []testkit.H2Step{head(false), testkit.H2Data([]byte("0123456789"), true)}, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			rig := newRig(t)
			up := testkit.NewH2Upstream(t, testkit.H2UpstreamConfig{TLS: rig.ca.Server(host), Script: [][]testkit.H2Step{c.steps}})
			end, _, _ := rig.send(order("https", up.Addr()), outgoing("HEAD", "/v1/charges", ""))
			code, framing := outcome.CodeNone, "end_stream"
			if !c.complete {
				code, framing = outcome.CodeRemoteResultIncomplete, "stream_not_ended"
			}
			if end.Complete != c.complete || end.Code != code || end.Framing != framing || end.Status != 200 {
				t.Errorf("complete %v code %v framing %q status %d err %v", end.Complete, end.Code, end.Framing, end.Status, end.Err)
			}
			up.RequireCount(t, 1, "HEAD", "/v1/charges")
		})
	}
}

// TestClientCertificateRequired: the alert that comes after our first bytes in TLS 1.3.
func TestClientCertificateRequired(t *testing.T) {
	contract.Covers(t, "G8")
	rig := newRig(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: rig.ca.RequireClient(rig.ca.Server(host))})
	end, _, _ := rig.send(order("https", up.Addr()), outgoing("POST", "/v1/charges", "amount=5"))
	if end.Code != outcome.CodeClientCertificateRequired || end.Proof == "" {
		t.Fatalf("code %v proof %q err %v", end.Code, end.Proof, end.Err)
	}
	up.RequireCount(t, 0, "", "")
}

func TestSetupErrors(t *testing.T) {
	contract.Covers(t, "E1", "E2", "E5", "V2")
	rig := newRig(t)
	server := func(mod func(*testkit.UpstreamConfig)) string {
		cfg := testkit.UpstreamConfig{TLS: rig.ca.Server(host)}
		mod(&cfg)
		up := testkit.NewUpstream(t, cfg)
		t.Cleanup(func() { up.RequireCount(t, 0, "", "") })
		return up.Addr()
	}
	other := testkit.NewCA(t)
	for _, c := range []struct {
		name   string
		addr   string
		code   outcome.Code
		stage  outcome.Stage
		reason string
	}{
		{"refused", testkit.RefusingAddr(t), outcome.CodeConnectionRefused, outcome.StageDNS, "connection_refused"},
		{"expired", server(func(c *testkit.UpstreamConfig) { c.TLS = testkit.ServerConfig(rig.ca.Expired(host)) }), outcome.CodeTLSCertificateInvalid, outcome.StageTCPConnect, "expired"},
		{"wrong name", server(func(c *testkit.UpstreamConfig) { c.TLS = rig.ca.Server("evil.example.test") }), outcome.CodeTLSCertificateInvalid, outcome.StageTCPConnect, "wrong_name"},
		{"self-signed", server(func(c *testkit.UpstreamConfig) { c.TLS = testkit.ServerConfig(rig.ca.SelfSigned(host)) }), outcome.CodeTLSCertificateInvalid, outcome.StageTCPConnect, "unknown_authority"},
		{"unknown authority", server(func(c *testkit.UpstreamConfig) { c.TLS = other.Server(host) }), outcome.CodeTLSCertificateInvalid, outcome.StageTCPConnect, "unknown_authority"},
		{"not TLS", server(func(c *testkit.UpstreamConfig) {
			c.TLS = nil
			c.OnAccept = func(c *net.TCPConn, _ <-chan struct{}) error {
				_, _ = io.WriteString(c, "HTTP/1.1 400 Bad Request\r\n\r\n")
				return errors.New("done")
			}
		}), outcome.CodeTLSHandshakeFailed, outcome.StageTCPConnect, "not_tls"},
		{"closed in the handshake", server(func(c *testkit.UpstreamConfig) {
			c.OnAccept = func(*net.TCPConn, <-chan struct{}) error { return errors.New("close") }
		}), outcome.CodeConnectionLost, outcome.StageTCPConnect, "handshake_cut"},
		{"silent in the handshake", server(func(c *testkit.UpstreamConfig) {
			c.OnAccept = func(_ *net.TCPConn, done <-chan struct{}) error { <-done; return errors.New("close") }
		}), outcome.CodeConnectionTimeout, outcome.StageTCPConnect, "handshake_timeout"},
	} {
		t.Run(c.name, func(t *testing.T) {
			ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
			if c.code == outcome.CodeConnectionTimeout {
				ctx, cancel = context.WithTimeout(t.Context(), 200*time.Millisecond)
			}
			defer cancel()
			_, err := rig.tr.Connect(ctx, order("https", c.addr))
			var s *dispatch.SetupError
			if !errors.As(err, &s) || s.Code != c.code || s.Stage != c.stage || s.Reason != c.reason {
				t.Fatalf("%+v, want %v after %q: %q", s, c.code, c.stage, c.reason)
			}
		})
	}
}

// TestReuse: one connection serves one origin, one set of requirements and one
// credential, and only while it is proven to be between messages.
func TestReuse(t *testing.T) {
	contract.Covers(t, "E6", "E3")
	rig := newRig(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: rig.ca.Server(host), Handler: func(testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Reply(200, "ok")}
	}})
	o := order("https", up.Addr())
	_, _, first := rig.send(o, outgoing("POST", "/1", "x"))
	testkit.Eventually(t, func() error { return idle(rig, 1) })
	_, _, second := rig.send(o, outgoing("POST", "/2", "x"))
	if !second.Reused || second.Connection != first.Connection || second.Peer.LeafDigest == "" || second.Peer.LeafDigest != first.Peer.LeafDigest {
		t.Errorf("not reused, or without its peer: %+v then %+v", first, second)
	}
	testkit.Eventually(t, func() error { return idle(rig, 1) })
	for name, change := range map[string]func(*dispatch.Order){
		"other credential": func(o *dispatch.Order) { o.Identity = "k@2" },
		"other pins":       func(o *dispatch.Order) { o.Upstream.Pins = []string{testkit.Pin(rig.ca.Cert)} },
		"other roots":      func(o *dispatch.Order) { o.Upstream.RootsPEM = rig.ca.PEM() },
		"no rest allowed":  func(o *dispatch.Order) { o.MaxRest = 0 },
	} {
		o := order("https", up.Addr())
		change(o)
		if _, _, info := rig.send(o, outgoing("POST", "/3", "x")); info.Reused {
			t.Errorf("%s: reused", name)
		}
	}
	bad := order("https", up.Addr())
	bad.Upstream.Pins = []string{"sha256:" + strings.Repeat("0", 64)}
	if _, err := rig.tr.Connect(t.Context(), bad); err == nil {
		t.Error("a connection without the pinned key was accepted")
	}
}

// TestClientCertificate: the certificate of the order is presented, belongs to its own
// pool, and a server that wants one and gets none refuses (E6, G8).
func TestClientCertificate(t *testing.T) {
	contract.Covers(t, "E6", "G8")
	rig := newRig(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: rig.ca.RequireClient(rig.ca.Server(host)), Handler: func(testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Reply(200, "ok")}
	}})
	with := func(name string) *dispatch.Order {
		o := order("https", up.Addr())
		cert := rig.ca.Client(name)
		o.Certificate, o.Identity = &cert, "k@1 certificate "+name
		return o
	}
	a := with("a")
	if end, _, _ := rig.send(a, outgoing("POST", "/1", "x")); end.Status != 200 || !end.Complete {
		t.Fatalf("%+v", end)
	}
	testkit.Eventually(t, func() error { return idle(rig, 1) })
	if _, _, info := rig.send(a, outgoing("POST", "/2", "x")); !info.Reused {
		t.Error("not reused under the same certificate")
	}
	testkit.Eventually(t, func() error { return idle(rig, 1) })
	b := with("b")
	b.Upstream = a.Upstream
	if _, _, info := rig.send(b, outgoing("POST", "/3", "x")); info.Reused {
		t.Error("reused under another certificate")
	}
	// The configuration that is kept for the route holds no certificate of somebody else.
	none := order("https", up.Addr())
	none.Upstream, none.Identity = a.Upstream, "k@1"
	conn, err := rig.tr.Connect(t.Context(), none)
	if err == nil {
		end := conn.Exchange(t.Context(), outgoing("POST", "/4", "x"), &record{})
		conn.Release()
		if end.Status != 0 || end.Code != outcome.CodeClientCertificateRequired {
			t.Errorf("without a certificate: %+v", end)
		}
	}
	if n := up.Count("POST", "/4"); n != 0 {
		t.Error("a request without the certificate arrived")
	}
}

// TestFullPoolKeepsTheFreshest: connections that rested too long to be reused do not
// keep fresh ones out.
func TestFullPoolKeepsTheFreshest(t *testing.T) {
	rig := newRig(t)
	rig.tr.cfg.MaxIdlePerKey = 2
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: rig.ca.Server(host), Handler: func(testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Reply(200, "ok")}
	}})
	o, fresh := order("https", up.Addr()), order("https", up.Addr())
	fresh.MaxRest = 0
	fresh.Upstream = o.Upstream
	var last dispatch.Dispatch
	for i := range 4 {
		_, _, last = rig.send(fresh, outgoing("POST", "/1", "x"))
		testkit.Eventually(t, func() error { return errors.Join(idle(rig, min(i+1, 2)), rests(rig, last.Connection)) })
	}
	if _, _, info := rig.send(o, outgoing("POST", "/2", "x")); info.Connection != last.Connection {
		t.Errorf("took %s, the freshest is %s", info.Connection, last.Connection)
	}
}

// rests reports whether a connection is in the pool: it is put there behind the answer.
func rests(r *rig, id string) error {
	r.tr.mu.Lock()
	defer r.tr.mu.Unlock()
	for _, list := range r.tr.idle {
		if slices.ContainsFunc(list, func(c *conn) bool { return c.id == id }) {
			return nil
		}
	}
	return errors.New("the connection is not in the pool")
}

func idle(r *rig, n int) error {
	if got := r.tr.Idle(); got != n {
		return errors.New("pool has another size")
	}
	return nil
}

// TestOwnAuthorityIsNoOrigin: CA-02 (d).
func TestOwnAuthorityIsNoOrigin(t *testing.T) {
	contract.Covers(t, "G7")
	ca := testkit.NewCA(t)
	sum := spki(ca.Cert)
	tr := New(Config{SystemRoots: ca.Pool(), OwnCA: &sum})
	t.Cleanup(tr.Close)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(host)})
	_, err := tr.Connect(t.Context(), order("https", up.Addr()))
	var s *dispatch.SetupError
	if !errors.As(err, &s) || s.Code != outcome.CodeTLSCertificateInvalid || s.Reason != "interception_ca" {
		t.Fatalf("%+v", s)
	}
}

// TestBytesAfterTheAnswer: FR-04. They are no answer to the next request, and no
// line of a log.
func TestBytesAfterTheAnswer(t *testing.T) {
	contract.Covers(t, "C2")
	lines := &lockedBuffer{}
	old := log.Writer()
	log.SetOutput(lines)
	t.Cleanup(func() { log.SetOutput(old) })
	rig := newRig(t)
	canary := testkit.NewCanary(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: rig.ca.Server(host), Handler: func(a testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Write("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n" + a.Target[1:3] + "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nxx debug " + canary.Value())}
	}})
	o := order("https", up.Addr())
	for _, path := range []string{"/aa", "/bb", "/cc", "/dd", "/ee"} {
		end, sink, _ := rig.send(o, outgoing("GET", path, ""))
		if !end.Complete || sink.body.String() != path[1:] {
			t.Fatalf("%s: complete %v, body %q", path, end.Complete, sink.body.String())
		}
	}
	if strings.Contains(lines.String(), canary.Value()) {
		t.Log("net/http prints unsolicited bytes to the standard logger; serve routes it away")
	}
}

// lockedBuffer is written to by goroutines of net/http.
type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// TestInterimAnswers: 1xx are passed on, bounded, and resolve nothing.
func TestInterimAnswers(t *testing.T) {
	contract.Covers(t, "G4")
	rig := newRig(t)
	hints := "HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: rig.ca.Server(host), Handler: func(a testkit.Arrival) []testkit.Step {
		if a.Target == "/endless" {
			return []testkit.Step{testkit.Write(strings.Repeat(hints, 10000)), testkit.Stall()}
		}
		return []testkit.Step{testkit.Write(hints + hints), testkit.Reply(201, "ok")}
	}})
	end, sink, _ := rig.send(order("https", up.Addr()), outgoing("POST", "/two", "x"))
	if !end.Complete || end.Status != 201 || len(sink.interim) != 2 || sink.interim[0] != 103 {
		t.Errorf("%+v interim %v", end, sink.interim)
	}
	end, _, _ = rig.send(order("https", up.Addr()), outgoing("POST", "/endless", "x"))
	if end.Code != outcome.CodeRemoteProtocolError || end.Complete {
		t.Errorf("10000 interim answers: %v", end.Code)
	}
}

// TestSilenceAndLimits: idle limit, total limit, size limit, a sink that fails.
func TestSilenceAndLimits(t *testing.T) {
	contract.Covers(t, "F2", "H8")
	rig := newRig(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: rig.ca.Server(host), Handler: func(a testkit.Arrival) []testkit.Step {
		switch a.Target {
		case "/stall":
			return []testkit.Step{testkit.Stall()}
		case "/half":
			return []testkit.Step{testkit.Write("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"), testkit.Stall()}
		case "/declared":
			return []testkit.Step{testkit.Write("HTTP/1.1 200 OK\r\nContent-Length: 9999999\r\n\r\n"), testkit.Stall()}
		default:
			return []testkit.Step{testkit.Write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + strings.Repeat("400\r\n"+strings.Repeat("a", 1024)+"\r\n", 100) + "0\r\n\r\n")}
		}
	}})
	o := order("https", up.Addr())
	for _, c := range []struct {
		path   string
		code   outcome.Code
		status int
	}{{"/stall", outcome.CodeRemoteTimeout, 0}, {"/half", outcome.CodeRemoteTimeout, 200}, {"/declared", outcome.CodeResultLimit, 200}, {"/long", outcome.CodeResultLimit, 200}} {
		out := outgoing("POST", c.path, "x")
		out.Idle, out.MaxBody = 150*time.Millisecond, 50_000
		end, _, _ := rig.send(o, out)
		if end.Code != c.code || end.Status != c.status || end.Complete {
			t.Errorf("%s: %v %d (%v)", c.path, end.Code, end.Status, end.Err)
		}
	}
	c, err := rig.tr.Connect(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	boom := errors.New("store")
	end := c.Exchange(t.Context(), outgoing("POST", "/long", "x"), &record{fail: boom})
	c.Release()
	if end.Complete || !errors.Is(end.SinkErr, boom) {
		t.Errorf("failing sink: %+v", end)
	}
}

// TestEarlyAnswer: UP-01. An origin that answers and stops reading does not lose its answer.
func TestEarlyAnswer(t *testing.T) {
	contract.Covers(t, "G1", "F3")
	rig := newRig(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: rig.ca.Server(host), EarlyHandler: func(testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Write("HTTP/1.1 413 Big\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"), testkit.HalfClose()}
	}})
	big := strings.Repeat("x", 8_000_000)
	for range 20 {
		end, _, _ := rig.send(order("https", up.Addr()), outgoing("POST", "/up", big))
		if !end.Complete || end.Status != 413 {
			t.Fatalf("%v %d %v", end.Code, end.Status, end.Err)
		}
	}
}

// TestPathGoesOutAsItIs: the path sent is the path matched, byte for byte.
func TestPathGoesOutAsItIs(t *testing.T) {
	for _, h2 := range []bool{false, true} {
		rig := newRig(t)
		origin := testkit.NewOrigin(t, testkit.OriginConfig{TLS: rig.ca.Server(host), HTTP2: h2})
		for _, path := range []string{"/v1/@s%2fpkg", "/v1/a%2Fb", "/v1/~x;y=1,2", "/v1/%e2%82%ac", "/v1/a:b@c", "/v1/a!$&'()*+", "/"} {
			out := outgoing("GET", path, "")
			out.RawQuery, out.HasQuery = "q=%2f&r=a+b", true
			if end, _, _ := rig.send(order("https", origin.Addr()), out); !end.Complete {
				t.Fatalf("%s: %v %v", path, end.Code, end.Err)
			}
			all := origin.Arrivals()
			if got := all[len(all)-1].Target; got != path+"?q=%2f&r=a+b" {
				t.Errorf("h2=%v: sent %q, matched %q", h2, got, path)
			}
		}
	}
}

type countedConn struct {
	net.Conn
	writes *atomic.Int32
}

func (c countedConn) Write(p []byte) (int, error) {
	c.writes.Add(1)
	return c.Conn.Write(p)
}

// TestOneWrite: a request with a small body in memory leaves in one piece, and the markers
// say what went out (F3).
func TestOneWrite(t *testing.T) {
	contract.Covers(t, "F3")
	r := newRig(t)
	var writes atomic.Int32
	var d net.Dialer
	r.tr = New(Config{SystemRoots: r.ca.Pool(), Dial: func(ctx context.Context, network, address string) (net.Conn, error) {
		c, err := d.DialContext(ctx, network, address)
		return countedConn{c, &writes}, err
	}})
	t.Cleanup(r.tr.Close)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{Handler: func(testkit.Arrival) []testkit.Step { return []testkit.Step{testkit.Reply(200, "ok")} }})
	o := order("http", up.Addr()) // TLS would make records of it
	r.send(o, outgoing("GET", "/", ""))
	for _, n := range []int{1, 256, inOneWrite, inOneWrite + 1} {
		// It is given back once its reader waits.
		testkit.Eventually(t, func() error { return idle(r, 1) })
		before := writes.Load()
		end, _, info := r.send(o, outgoing("POST", "/", strings.Repeat("x", n)))
		if !end.Complete || !end.Sent.Headers || !end.Sent.Complete || !info.Reused {
			t.Errorf("%d: %+v", n, end)
		}
		if got := writes.Load() - before; (got == 1) != (n <= inOneWrite) {
			t.Errorf("%d bytes: %d writes", n, got)
		}
	}
}

// TestAwaitWrote: who waits for the mark that a request is out gets it whether it came
// before or after, and twice does no harm.
func TestAwaitWrote(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		x := &exchange{}
		x.wroteRequest(httptrace.WroteRequestInfo{})
		x.wroteRequest(httptrace.WroteRequestInfo{})
		if x.awaitWrote(); time.Since(start) != 0 || !x.whole.Load() {
			t.Error("it was there already")
		}
		x = &exchange{}
		time.AfterFunc(wroteWait/2, func() { x.wroteRequest(httptrace.WroteRequestInfo{}) })
		if x.awaitWrote(); time.Since(start) != wroteWait/2 || !x.whole.Load() {
			t.Error("it came meanwhile", time.Since(start))
		}
		x.wroteRequest(httptrace.WroteRequestInfo{Err: io.ErrClosedPipe})
		start, x = time.Now(), &exchange{}
		if x.awaitWrote(); time.Since(start) != wroteWait || x.whole.Load() {
			t.Error("it never came", time.Since(start))
		}
	})
}
