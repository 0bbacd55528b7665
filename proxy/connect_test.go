package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/outcome"
)

// recorder keeps the first write, a ClientHello, for the test to send.
type recorder struct {
	net.Conn
	wrote chan []byte
	once  bool
}

func (r *recorder) Write(p []byte) (int, error) {
	if !r.once {
		r.once = true
		r.wrote <- append([]byte(nil), p...)
		return len(p), nil // sent by the test, together with the CONNECT
	}
	return r.Conn.Write(p)
}

// TestPipelinedClientHello is case CL-03: 400 of 400 handshakes succeed when the
// ClientHello comes in the same segment as the CONNECT, and directly after the 200.
func TestPipelinedClientHello(t *testing.T) {
	b := newBed(t)
	const connect = "CONNECT pay.example.test:443 HTTP/1.1\r\nHost: pay.example.test:443\r\n\r\n"
	for i := range 400 {
		c := b.dial()
		rec := &recorder{Conn: c, wrote: make(chan []byte, 1)}
		tc := tls.Client(rec, &tls.Config{RootCAs: b.roots, ServerName: "pay.example.test"})
		done := make(chan error, 1)
		if i%2 == 0 {
			head := &headFirst{recorder: rec}
			tc = tls.Client(head, &tls.Config{RootCAs: b.roots, ServerName: "pay.example.test"})
			go func() { done <- tc.Handshake() }()
			hello := <-rec.wrote
			if _, err := c.Write(append([]byte(connect), hello...)); err != nil {
				t.Fatal(err)
			}
		} else {
			rec.once = true
			_, _ = io.WriteString(c, connect)
			if h := readHead(t, c); !strings.Contains(h, " 200 ") {
				t.Fatal(h)
			}
			go func() { done <- tc.Handshake() }()
		}
		if err := <-done; err != nil {
			t.Fatalf("handshake %d: %v", i, err)
		}
		_ = c.Close()
	}
}

// headFirst takes the proxy's 200 off before TLS begins to read.
type headFirst struct {
	*recorder
	r *bufio.Reader
}

func (h *headFirst) Read(p []byte) (int, error) {
	if h.r == nil {
		h.r = bufio.NewReader(h.recorder.Conn)
		for {
			line, err := h.r.ReadString('\n')
			if err != nil {
				return 0, err
			}
			if line == "\r\n" {
				break
			}
		}
	}
	return h.r.Read(p)
}

// TestConnectVersions: HTTP/1.0 CONNECT is accepted and answered as such, as Python's
// http.client needs.
func TestConnectVersions(t *testing.T) {
	b := newBed(t)
	for version, want := range map[string]string{"HTTP/1.0": "HTTP/1.0 200 ", "HTTP/1.1": "HTTP/1.1 200 "} {
		c := b.dial()
		fmt.Fprintf(c, "CONNECT pay.example.test:443 %s\r\nHost: pay.example.test\r\n\r\n", version)
		if h := readHead(t, c); !strings.HasPrefix(h, want) || strings.Contains(strings.ToLower(h), "content-length") || strings.Contains(strings.ToLower(h), "transfer-encoding") {
			t.Errorf("%q", h)
		}
	}
}

// TestPlaintextInTunnel: fetch in Node 22 and 24 tunnels http:// URLs.
func TestPlaintextInTunnel(t *testing.T) {
	b := newBed(t)
	c := b.connectTo("pay.example.test:80")
	r := bufio.NewReader(c)
	for range 3 {
		fmt.Fprintf(c, "GET /x HTTP/1.1\r\n%s\r\n", h11)
		if a := readAnswer(t, r, "GET"); a.status != 200 {
			t.Fatalf("%+v", a)
		}
		s := b.pipe.requests()
		if len(s) != 1 || s[0].Scheme != "http" || s[0].Authorities != (dispatch.Authorities{Connect: "pay.example.test:80", Host: "pay.example.test"}) {
			t.Errorf("%+v", s)
		}
	}
	// The head check works inside as well, and the refusal belongs to the caller.
	_, _ = io.WriteString(c, "GET /x HTTP/1.1\r\n\r\n")
	if a := readAnswer(t, r, "GET"); a.status != 400 {
		t.Errorf("%+v", a)
	}
	if s := b.pipe.requests(); len(s) != 1 || s[0].Refused == nil || s[0].Authorities.Connect != "pay.example.test:80" {
		t.Errorf("%+v", s)
	}
}

// TestHeadsInsideTLS: the head check stands inside the tunnel too.
func TestHeadsInsideTLS(t *testing.T) {
	contract.Covers(t, "B1")
	b := newBed(t)
	for _, c := range []struct{ wire, reason string }{
		{"GET /x HTTP/1.1\nHost: pay.example.test\n\n", "bare_lf"},
		{"CONNECT a:443 HTTP/1.1\r\nHost: a\r\n\r\n", "nested_connect"},
		{"POST /x HTTP/1.1\r\n" + h11 + "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n", "te_and_length"},
	} {
		tc := b.tlsInside(b.connectTo("pay.example.test:443"), "pay.example.test", "http/1.1")
		_, _ = io.WriteString(tc, c.wire)
		r := bufio.NewReader(tc)
		if env := readAnswer(t, r, "GET").envelope(t); env.Evidence.Reason != c.reason {
			t.Errorf("%q: %q", c.wire, env.Evidence.Reason)
		}
		closed(t, r)
		if s := b.pipe.requests(); len(s) != 1 || s[0].Refused == nil {
			t.Errorf("%+v", s)
		}
	}
}

// required makes every caller authenticate.
func required(c *Config) {
	c.Callers.(*Callers).Static = []StaticCaller{
		{Name: "ci", TokenSHA256: sha256.Sum256([]byte("p@ss%:x"))},
		{Name: "other", TokenSHA256: sha256.Sum256([]byte("second"))},
	}
}

// TestChallenge is case CL-02: a 407 that every client can answer, on the same
// connection, and no record without a caller (CONTRACT M6).
func TestChallenge(t *testing.T) {
	contract.Covers(t, "V4", "M6")
	b := newBed(t, required)
	for name, head := range map[string]string{
		"CONNECT":       "CONNECT pay.example.test:443 HTTP/1.1\r\nHost: pay.example.test:443\r\n",
		"absolute-form": "GET http://pay.example.test/ HTTP/1.1\r\n" + h11,
	} {
		t.Run(name, func(t *testing.T) {
			c := b.dial()
			r := bufio.NewReader(c)
			for _, wrong := range []string{"", basic("ci", "wrong"), basic("ci", ""), "Proxy-Authorization: Basic !!!\r\n", "Proxy-Authorization: Digest x\r\n", basic("ci", "p@ss%:x") + basic("ci", "p@ss%:x")} {
				_, _ = io.WriteString(c, head+wrong+"\r\n")
				a := readAnswer(t, r, "GET") // a 407 to CONNECT has a body
				if a.status != 407 || !strings.HasPrefix(a.header.Get("Proxy-Authenticate"), "Basic realm=") || a.header.Get("Content-Length") == "" || a.header.Get("Connection") == "close" {
					t.Fatalf("%q: %+v", wrong, a)
				}
				if env := a.envelope(t); env.Error.Code != outcome.CodeCallerUnauthenticated || env.InvocationID != "" {
					t.Errorf("%s", a.body)
				}
			}
			if s := b.pipe.requests(); len(s) != 0 || len(b.pipe.connects) != 0 {
				t.Errorf("the pipeline saw %v", s)
			}
			_, _ = io.WriteString(c, head+basic("anything", "p@ss%:x")+"\r\n")
			if h := readHeadFrom(t, r); !strings.HasPrefix(h, "HTTP/1.1 200 ") {
				t.Errorf("%q", h)
			}
			b.pipe.requests()
			b.pipe.connects = nil
		})
	}
	if l := b.log.String(); strings.Contains(l, "p@ss") || strings.Contains(l, "wrong") {
		t.Errorf("log: %s", l)
	}
}

// TestChallengeWithEarlyBytes: what was sent for a tunnel that was refused is never
// read as requests.
func TestChallengeWithEarlyBytes(t *testing.T) {
	b := newBed(t, required)
	c := b.dial()
	_, _ = io.WriteString(c, "CONNECT pay.example.test:443 HTTP/1.1\r\nHost: pay.example.test:443\r\n\r\nGET http://pay.example.test/ HTTP/1.1\r\n"+h11+basic("ci", "p@ss%:x")+"\r\n")
	r := bufio.NewReader(c)
	a := readAnswer(t, r, "GET")
	if a.status != 407 {
		t.Fatalf("%+v", a)
	}
	// The early bytes may arrive after the answer was begun; then they are a request of
	// their own right, with its own credentials. Usually they are here already.
	if a.header.Get("Connection") == "close" {
		closed(t, r)
		if s := b.pipe.requests(); len(s) != 0 {
			t.Errorf("%+v", s)
		}
	}
}

// TestUnknownCallerOfBadHead: a refused head without credentials leaves no record.
func TestUnknownCallerOfBadHead(t *testing.T) {
	contract.Covers(t, "M6")
	b := newBed(t, required)
	for wire, recorded := range map[string]bool{
		"GET http://pay.example.test/ HTTP/1.1\r\n\r\n":                                          false,
		"GET http://pay.example.test/ HTTP/1.1\r\n" + basic("ci", "wrong") + "\r\n":              false,
		"GET http://pay.example.test/ HTTP/1.1\r\n" + basic("ci", "p@ss%:x") + "\r\n":            true,
		"GET http://pay.example.test/ HTTP/1.1\r\n" + basic("ci", "p@ss%:x") + "X: a\rb\r\n\r\n": true,
	} {
		c := b.dial()
		_, _ = io.WriteString(c, wire)
		r := bufio.NewReader(c)
		a := readAnswer(t, r, "GET")
		env := a.envelope(t)
		if a.status != 400 || env.Error.Code != outcome.CodeInvalidRequest || (env.InvocationID != "") != recorded || a.header.Get("Connection") != "close" {
			t.Errorf("%q: %+v", wire, a)
		}
		closed(t, r)
		if s := b.pipe.requests(); (len(s) == 1) != recorded {
			t.Errorf("%q: %+v", wire, s)
		} else if recorded && s[0].Caller.ID != "caller:ci" {
			t.Errorf("%q: caller %q", wire, s[0].Caller.ID)
		}
	}
}

// TestRefusedConnect follows status-mapping section 9: code and action in the reason
// phrase, Proxy-Status, JSON body, Connection: close, and closed.
func TestRefusedConnect(t *testing.T) {
	contract.Covers(t, "L5")
	b := newBed(t)
	var want outcome.Envelope
	deny := func(string) (dispatch.TunnelDecision, *dispatch.Reply) {
		f := refusal(outcome.CodeRouteNotFound, "connect.target", "no_route", "")
		r := b.pipe.own(f, outcome.Shape{Method: "CONNECT", Connect: true})
		want = *r.Envelope
		return dispatch.TunnelRefuse, r
	}
	blind := func(string) (dispatch.TunnelDecision, *dispatch.Reply) { return dispatch.TunnelBlind, nil }
	b.pipe.tunnel = func(context.Context, string, func() (net.Conn, error)) *dispatch.Reply {
		_, r := deny("")
		return r
	}
	for name, decide := range map[string]func(string) (dispatch.TunnelDecision, *dispatch.Reply){"refused": deny, "tunnel refused": blind} {
		for _, version := range []string{"HTTP/1.0", "HTTP/1.1"} {
			t.Run(name+" "+version, func(t *testing.T) {
				b.pipe.decide = decide
				c := b.dial()
				fmt.Fprintf(c, "CONNECT nowhere.example.test:443 %s\r\nHost: nowhere.example.test:443\r\n\r\n\x16\x03\x01", version)
				r := bufio.NewReader(c)
				peek, _ := r.Peek(8)
				a := readAnswer(t, r, "GET")
				if string(peek) != version || a.status != 403 || a.reason != "ROUTE_NOT_FOUND "+want.InvocationID || a.header.Get("Connection") != "close" || a.header.Get("Proxy-Status") == "" {
					t.Errorf("%q %+v", peek, a)
				}
				if env := a.envelope(t); env.InvocationID != want.InvocationID {
					t.Errorf("%s", a.body)
				}
				closed(t, r)
				if h := b.pipe.handovers(); len(h) != 1 || h[0] != nil {
					t.Errorf("hand-overs %v", h)
				}
			})
		}
	}
}

// TestBlindTunnel is CONTRACT V7's front part: bytes pass unseen, early ones included.
func TestBlindTunnel(t *testing.T) {
	b := newBed(t)
	b.pipe.decide = func(string) (dispatch.TunnelDecision, *dispatch.Reply) { return dispatch.TunnelBlind, nil }
	ended := make(chan struct{})
	b.pipe.tunnel = func(_ context.Context, authority string, established func() (net.Conn, error)) *dispatch.Reply {
		defer close(ended)
		c, err := established()
		if err != nil {
			t.Errorf("established: %v", err)
			return nil
		}
		_, _ = io.Copy(c, c) // an echo at the far end
		return nil
	}
	c := b.dial()
	_, _ = io.WriteString(c, "CONNECT other.example.test:443 HTTP/1.1\r\nHost: other.example.test:443\r\n\r\nearly")
	if h := readHead(t, c); !strings.Contains(h, " 200 ") {
		t.Fatal(h)
	}
	_, _ = io.WriteString(c, " late")
	got := make([]byte, 10)
	if _, err := io.ReadFull(c, got); err != nil || string(got) != "early late" {
		t.Fatalf("%q %v", got, err)
	}
	if n := b.p.hijacked.count(); n != 1 {
		t.Errorf("%d tunnels counted", n)
	}
	_ = c.CloseWrite()
	<-ended
	closed(t, c)
	eventually(t, "the tunnel is over", func() bool { return b.p.hijacked.count() == 0 })
}

// TestCallerLeavesBeforeTunnel: a caller that hangs up while the far end is dialled
// ends the wait (F10).
func TestCallerLeavesBeforeTunnel(t *testing.T) {
	b := newBed(t)
	b.pipe.decide = func(string) (dispatch.TunnelDecision, *dispatch.Reply) { return dispatch.TunnelBlind, nil }
	dialling, left := make(chan struct{}), make(chan struct{})
	b.pipe.tunnel = func(ctx context.Context, _ string, _ func() (net.Conn, error)) *dispatch.Reply {
		close(dialling)
		<-ctx.Done()
		close(left)
		return b.pipe.own(refusal(outcome.CodeInvalidRequest, "", "", ""), outcome.Shape{})
	}
	c := b.dial()
	_, _ = io.WriteString(c, "CONNECT other.example.test:443 HTTP/1.1\r\nHost: other.example.test:443\r\n\r\n")
	<-dialling
	_ = c.Close()
	<-left
}

// TestHeldBytesAreBounded: a caller that floods before it was answered is not
// buffered without end, and still gets its answer.
func TestHeldBytesAreBounded(t *testing.T) {
	b := newBed(t)
	full, release := make(chan struct{}), make(chan struct{})
	b.pipe.decide = func(string) (dispatch.TunnelDecision, *dispatch.Reply) {
		close(full)
		<-release
		return dispatch.TunnelRefuse, b.pipe.own(refusal(outcome.CodeRouteNotFound, "connect.target", "no_route", ""), outcome.Shape{Method: "CONNECT", Connect: true})
	}
	c := b.dial()
	_, _ = io.WriteString(c, "CONNECT other.example.test:443 HTTP/1.1\r\nHost: other.example.test:443\r\n\r\n")
	<-full
	go func() { _, _ = c.Write(bytes.Repeat([]byte("x"), 8<<20)) }()
	time.Sleep(50 * time.Millisecond) // let some of it arrive; the bound holds at any time
	close(release)
	if a := readAnswer(t, bufio.NewReader(c), "GET"); a.status != 403 {
		t.Errorf("%+v", a)
	}
}

// On the loopback interface a handshake does without the key exchange that is to last, elsewhere
// it is the library's choice.
func TestKeyExchanges(t *testing.T) {
	b := newBed(t)
	tc := b.tlsInside(b.connectTo("pay.example.test:443"), "pay.example.test")
	if id := tc.ConnectionState().CurveID; id != tls.X25519 {
		t.Errorf("%v", id)
	}
	_ = tc.Close()
	for text, own := range map[string]bool{"127.0.0.1": true, "::1": true, "::ffff:127.0.0.9": true, "192.0.2.1": false, "::": false, "fe80::1": false} {
		if got := keyExchanges(&net.TCPAddr{IP: net.ParseIP(text)}, []tls.CurveID{tls.X25519MLKEM768, tls.X25519}); (got != nil) != own {
			t.Errorf("%s: %v", text, got)
		}
	}
	if got := keyExchanges(&net.UnixAddr{Name: "@"}, []tls.CurveID{tls.X25519}); got != nil {
		t.Errorf("%v", got)
	}
	// One that wants nothing else gets it.
	only := tls.Client(b.connectTo("pay.example.test:443"), &tls.Config{RootCAs: b.roots, ServerName: "pay.example.test", CurvePreferences: []tls.CurveID{tls.X25519MLKEM768}})
	if err := only.Handshake(); err != nil || only.ConnectionState().CurveID != tls.X25519MLKEM768 {
		t.Errorf("%v, %v", only.ConnectionState().CurveID, err)
	}
	_ = only.Close()
}

// TestUntrustedCA: a caller that does not trust our CA is told so in the log.
func TestUntrustedCA(t *testing.T) {
	b := newBed(t)
	tc := tls.Client(b.connectTo("pay.example.test:443"), &tls.Config{ServerName: "pay.example.test"})
	if err := tc.Handshake(); err == nil {
		t.Fatal("trusted")
	}
	_ = tc.Close()
	eventually(t, "the hint", func() bool { return strings.Contains(b.log.String(), "does not trust the Waybill CA") })
}

// TestHandshakeTimeout: a caller that begins TLS and stops does not stay.
func TestHandshakeTimeout(t *testing.T) {
	b := newBed(t, func(c *Config) { c.Limits.HandshakeTimeout = 50 * time.Millisecond })
	c := b.connectTo("pay.example.test:443")
	_, _ = io.WriteString(c, "\x16\x03\x01\x02\x00")
	_, err := io.Copy(io.Discard, c)
	var ne net.Error
	if errors.As(err, &ne) && ne.Timeout() {
		t.Error("still open")
	}
	eventually(t, "the log line", func() bool { return strings.Contains(b.log.String(), "timed out") })
}

// TestUpgradesReachThePipeline: an upgrade is the pipeline's to refuse (case ST-03);
// nothing here answers 101.
func TestUpgradesReachThePipeline(t *testing.T) {
	b := newBed(t)
	b.pipe.answer = func(_ context.Context, s *seen) *dispatch.Reply {
		// Even a reply that looks like a handshake must not switch protocols.
		return b.pipe.reply(http.StatusOK, http.Header{"Connection": {"Upgrade"}, "Upgrade": {"websocket"}}, []byte("no"))
	}
	c := b.dial()
	r := bufio.NewReader(c)
	for range 2 {
		_, _ = io.WriteString(c, "GET http://pay.example.test/ HTTP/1.1\r\n"+h11+"Connection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\n\r\n")
		if a := readAnswer(t, r, "GET"); a.status != 200 || string(a.body) != "no" || a.header.Get("Upgrade") != "" {
			t.Errorf("%+v", a)
		}
		if s := b.pipe.requests(); len(s) != 1 || s[0].header.Get("Upgrade") != "websocket" {
			t.Errorf("%+v", s)
		}
	}
}
