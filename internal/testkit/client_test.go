package testkit_test

import (
	"bufio"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"waybill/internal/testkit"
)

// relay is a plain forward proxy: CONNECT to any name goes to addr, absolute-form
// requests are answered by itself.
func relay(t *testing.T, addr string) string {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method != http.MethodConnect {
			_, _ = io.WriteString(w, "absolute "+r.RequestURI)
			return
		}
		if strings.HasPrefix(r.Host, "denied.") {
			w.WriteHeader(http.StatusForbidden)
			_, _ = io.WriteString(w, "why")
			return
		}
		up, err := (&net.Dialer{}).DialContext(r.Context(), "tcp", addr)
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = up.Close() }()
		c, rw, err := http.NewResponseController(w).Hijack()
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = c.Close() }()
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n")
		go func() {
			_, _ = io.Copy(up, bufio.NewReader(rw))
			_ = up.Close()
		}()
		_, _ = io.Copy(c, up)
	}))
	t.Cleanup(s.Close)
	return s.Listener.Addr().String()
}

func TestClientsThroughAProxy(t *testing.T) {
	ca := testkit.NewCA(t)
	o := testkit.NewOrigin(t, testkit.OriginConfig{TLS: ca.Server(host), HTTP2: true})
	proxy := relay(t, o.Addr())
	for _, cfg := range []testkit.ClientConfig{{}, {HTTP2: true}, {NoKeepAlive: true}} {
		cfg.Proxy, cfg.Roots = proxy, ca.Pool()
		c := testkit.NewClient(t, cfg)
		r := testkit.Send(t, c, "POST", "https://"+host+"/x", "body", "X-A", "b")
		want := "HTTP/1.1"
		if cfg.HTTP2 {
			want = "HTTP/2.0"
		}
		if r.Status != 200 || string(r.Body) != "ok" || r.Proto != want {
			t.Fatalf("%+v", r)
		}
	}
	c := testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://user:token@" + proxy})
	if r := testkit.Send(t, c, "GET", "http://127.0.0.1:1/loop", ""); string(r.Body) != "absolute http://127.0.0.1:1/loop" {
		t.Fatalf("%q", r.Body)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := testkit.SendContext(ctx, t, c, "GET", "http://127.0.0.1:1/", ""); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}

	tc := testkit.Tunnel(t, proxy, host+":443", ca.Pool(), "Proxy-Authorization: Basic eA==")
	for range 2 {
		if r := tc.Roundtrip(t, "HEAD /y HTTP/1.1\r\nHost: "+host+"\r\n\r\n"); r.Status != 200 || len(r.Body) != 0 {
			t.Fatalf("%+v", r)
		}
	}
	_, r, err := testkit.Connect(t, proxy, "denied.example.test:443")
	if !errors.Is(err, testkit.ErrConnectRefused) || r.Status != 403 || string(r.Body) != "why" {
		t.Fatalf("%v %+v", err, r)
	}
	if as := o.Arrivals(); len(as) != 5 || as[4].Target != "/y" || as[4].OnConn != 2 {
		t.Fatalf("%+v", as)
	}
}
