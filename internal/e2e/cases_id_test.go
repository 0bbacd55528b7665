package e2e

import (
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// casesIdentity: one name of the destination is routed, dialled, verified and sent the
// secret, however it was written (B1, V2).
func casesIdentity(t *testing.T, b *bed) {
	nowhere := func(t *testing.T, path string) {
		t.Helper()
		for host := range b.ledgers {
			if n := len(b.arrivals(host, path)); n != 0 {
				t.Errorf("%s: %d arrivals at %s", path, n, host)
			}
		}
	}
	t.Run("ID-01", func(t *testing.T) {
		contract.Covers(t, "B1", "B2", "L7")
		i := 0
		for _, c := range []struct{ connect, sni, host, field string }{
			{evilHost, evilHost, payHost, "request.headers.host"},
			{payHost, payHost, evilHost, "request.headers.host"},
			{payHost, payHost, payHost + ":8443", "request.headers.host"},
			{payHost, payHost, payHost + ":80", "request.headers.host"},
			{payHost, payHost, "evil" + payHost, "request.headers.host"},
			{payHost, evilHost, payHost, "tls.server_name"},
			{evilHost, payHost, payHost, "request.headers.host"},
		} {
			for _, alpn := range []string{"http/1.1", "h2"} {
				i++
				path := fmt.Sprintf("/v1/id01/%d", i)
				tcp, refused, err := testkit.Connect(t, b.addr, c.connect+":443")
				if err != nil {
					t.Fatalf("%s: %v %+v", c.connect, err, refused)
				}
				// The certificate is for the CONNECT target: a client that does not look at it is
				// the one that gets further.
				conn := unverified(t, tcp, c.sni, alpn)
				var resp *testkit.Response
				if alpn == "h2" {
					resp = overH2(t, conn, http.MethodGet, path, c.host)
				} else {
					resp = conn.Roundtrip(t, "GET "+path+" HTTP/1.1\r\nHost: "+c.host+"\r\n\r\n")
				}
				s := b.check(t, b.hear(resp), want{status: 400, facts: badTarget})
				if ev := s.Envelope.Evidence; ev.Reason != "authority_mismatch" || ev.Field != c.field {
					t.Errorf("%+v %s: reason %q field %q", c, alpn, ev.Reason, ev.Field)
				}
				nowhere(t, path)
			}
		}
	})
	t.Run("ID-03", func(t *testing.T) {
		contract.Covers(t, "B1", "V2")
		for i, c := range []struct{ url, host string }{
			{evilHost, payHost}, {payHost, evilHost}, {payHost, payHost + ":8080"}, {payHost + ":8080", payHost}, {payHost, payHost + ".evil.test"}, {payHost, "x@" + payHost},
		} {
			path := fmt.Sprintf("/v1/id03/%d", i)
			resp := b.raw(t, testkit.Dial(t, b.addr), "GET http://"+c.url+path+" HTTP/1.1\r\nHost: "+c.host+"\r\n\r\n")
			b.check(t, resp, want{status: 400, facts: badTarget})
			nowhere(t, path)
		}
	})
	t.Run("ID-04", func(t *testing.T) {
		contract.Covers(t, "B1", "V1")
		for i, c := range []struct {
			authority string // of CONNECT, and of the Host field
			status    int
			facts     string
		}{
			{"PAY.Example.TEST:443", 200, success}, {"pay.example.test.:443", 200, success}, {"pay.example.test:443", 200, success}, {"PAY.EXAMPLE.TEST.:443", 200, success},
			{"admin.example.test.:443", 403, denied}, {"ADMIN.example.test:443", 403, denied},
			{"evilpay.example.test:443", 403, noRoute}, {"pay.example.test.evil.test:443", 403, noRoute}, {"pay.example.test:8443", 403, noRoute},
			{"pay.example.test..:443", 400, badTarget}, {"pay..example.test:443", 400, badTarget}, {"p\u0251y.example.test:443", 0, ""},
		} {
			path := fmt.Sprintf("/v1/id04/%d", i)
			if c.status == 0 {
				continue // see ID-04's own loop below: not ASCII
			}
			tcp, resp, err := testkit.Connect(t, b.addr, c.authority)
			if err == nil {
				host, _, _ := net.SplitHostPort(c.authority)
				conn, _, terr := tcp.StartTLS(t, strings.TrimSuffix(host, "."), b.rig.roots(), "http/1.1")
				if terr != nil {
					t.Fatalf("%s: %v", c.authority, terr)
				}
				resp = conn.Roundtrip(t, "GET "+path+" HTTP/1.1\r\nHost: "+c.authority+"\r\n\r\n")
			} else if !errors.Is(err, testkit.ErrConnectRefused) {
				t.Fatalf("%s: %v", c.authority, err)
			}
			s := b.check(t, b.hear(resp), want{status: c.status, facts: c.facts, relayed: c.status == 200})
			if c.status != 200 {
				nowhere(t, path)
				continue
			}
			a := b.arrivals(payHost, path)
			if len(a) != 1 || a[0].ServerName != payHost || a[0].Authority != payHost || s.View.Target != "https://"+payHost+path || s.View.Route != "pay" {
				t.Errorf("%s: %+v %+v", c.authority, a, s.View)
			}
		}
		for _, spelling := range []string{"p\u0251y.example.test", "pay\u3002example.test", "pay.example\uff0etest", "pay%2eexample.test", "pay.example.test%00", "user@pay.example.test", "pay.example.test:0443x", "[pay.example.test]", "0x7f.1", "127.1", "2130706433"} {
			resp := b.raw(t, testkit.Dial(t, b.addr), "GET http://"+spelling+"/v1/id04/x HTTP/1.1\r\nHost: "+spelling+"\r\n\r\n")
			if resp.Status != 400 && resp.Status != 403 || !strings.Contains(resp.Header.Get("Waybill-Outcome"), "not_attempted") {
				t.Errorf("%q: %d %s %s", spelling, resp.Status, resp.Header.Get("Waybill-Outcome"), resp.Body)
			}
		}
		nowhere(t, "/v1/id04/x")
		if m := get(t, b.meters); strings.Contains(m, "example.test") || strings.Contains(m, "/v1/") {
			t.Error("a metric names a host or a path (S2)")
		}
	})
	t.Run("ID-06", func(t *testing.T) {
		contract.Covers(t, "B1", "V2")
		for i, path := range []string{
			"/v1/../admin", "/v1/%2e%2e/admin", "/v1/%2E./admin", "/v1/%252e%252e/admin", "/v1/..;/admin", "/v1\\..\\admin", "/v1/%5c../admin", "//admin",
			"/v1/..%2fadmin", "/v1/./admin", "/v1/%2e/admin", "/v1/..%00/admin", "/v1/.;x/admin", "/v1/..%5cadmin",
		} {
			for _, h2 := range []bool{false, true} {
				var resp *testkit.Response
				if h2 {
					tcp, _, err := testkit.Connect(t, b.addr, payHost+":443")
					if err != nil {
						t.Fatal(err)
					}
					conn, _, err := tcp.StartTLS(t, payHost, b.rig.roots(), "h2")
					if err != nil {
						t.Fatal(err)
					}
					resp = overH2(t, conn, http.MethodGet, path, payHost)
				} else {
					resp = b.tunnel(t, payHost).Roundtrip(t, "GET "+path+" HTTP/1.1\r\nHost: "+payHost+"\r\n\r\n")
				}
				w := want{status: 400, facts: badTarget}
				if path == "//admin" && resp.Status == 403 {
					w = want{status: 403, facts: noRoute}
				}
				b.check(t, b.hear(resp), w)
			}
			if n := b.ledgers[payHost].Where(func(a testkit.Arrival) bool { return strings.Contains(a.Target, "admin") }); len(n) != 0 {
				t.Fatalf("%d %q: %d arrivals", i, path, len(n))
			}
		}
		for _, path := range []string{"/v1/@s%2fpkg", "/v1/a%20b", "/v1/...", "/v1/.hidden", "/v1/x//y", "/v1/a;b=c", "/v1/%C3%A9", "/v1/~u/%7e", "/v1/x?q=/../%2e%2e/", "/v1/x?"} {
			b.check(t, b.raw(t, b.tunnel(t, payHost), "GET "+path+" HTTP/1.1\r\nHost: "+payHost+"\r\n\r\n"), want{status: 200, facts: success, relayed: true})
			if n := b.ledgers[payHost].Count("GET", path); n != 1 {
				t.Errorf("%s: arrived %d times with exactly these bytes", path, n)
			}
		}
	})
	t.Run("ID-07", func(t *testing.T) {
		contract.Covers(t, "V2")
		plain := func(target string) *testkit.Response {
			host, _, _ := strings.Cut(strings.TrimPrefix(target, "http://"), "/")
			return b.raw(t, testkit.Dial(t, b.addr), "GET "+target+" HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
		}
		s := b.check(t, plain("http://"+payHost+"/v1/id07"), want{status: 200, facts: success, relayed: true, host: payHost, path: "/v1/id07", arrivals: 1})
		if a := b.arrivals(payHost, "/v1/id07")[0]; a.ServerName != payHost || len(fields(a, "Authorization")) != 1 || s.View.Target != "https://"+payHost+"/v1/id07" {
			t.Errorf("%+v %s", a, s.View.Target)
		}
		b.check(t, plain("http://"+payHost+":80/v1/id07/80"), want{status: 200, facts: success, relayed: true, host: payHost, path: "/v1/id07/80", arrivals: 1})
		// An origin that speaks plain HTTP sees a ClientHello and nothing else.
		b.check(t, plain("http://"+sniffHost+"/v1/id07"), want{status: 502, facts: "connection_setup not_attempted backoff TLS_HANDSHAKE_FAILED"})
		if got := b.sniffed(); len(got) == 0 || got[0] != 0x16 || strings.Contains(string(got), "HTTP/1.1") {
			t.Errorf("the plain port saw %q", got)
		}
		b.check(t, plain("http://"+wrongNameHost+"/v1/id07"), want{status: 422, facts: badCert, host: wrongNameHost, path: "/v1/id07"})
		b.check(t, plain("http://"+payHost+":8081/v1/id07"), want{status: 403, facts: noRoute})
		b.check(t, plain("http://"+payHost+":443/v1/id07"), want{status: 403, facts: noRoute})
		b.check(t, plain("http://"+tlsOnlyHost+"/v1/id07"), want{status: 400, facts: badTarget})
	})
}

// unverified makes a TLS client that takes any certificate.
func unverified(t *testing.T, tcp *testkit.Conn, sni, alpn string) *testkit.Conn {
	t.Helper()
	c := tls.Client(tcp, &tls.Config{ServerName: sni, InsecureSkipVerify: true, NextProtos: []string{alpn}, MinVersion: tls.VersionTLS12}) //nolint:gosec // it plays a careless client
	if err := c.HandshakeContext(t.Context()); err != nil {
		t.Fatalf("%s: %v", sni, err)
	}
	return testkit.Wrap(c)
}

// sniffer keeps what is sent to a port that speaks no TLS.
type sniffer struct {
	mu  sync.Mutex
	got []byte
}

func (s *sniffer) accept(c *net.TCPConn, _ <-chan struct{}) error {
	buf := make([]byte, 4096)
	n, err := c.Read(buf)
	s.mu.Lock()
	s.got = append(s.got, buf[:n]...)
	s.mu.Unlock()
	if err == nil {
		_, err = c.Write([]byte("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"))
	}
	return errors.Join(errors.New("enough"), err)
}

func (b *bed) sniffed() []byte {
	b.sniff.mu.Lock()
	defer b.sniff.mu.Unlock()
	return b.sniff.got
}
