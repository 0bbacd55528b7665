package httpx

import (
	"context"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
	"waybill/routes"
)

func through(addr string) *dispatch.Order {
	h, p, _ := net.SplitHostPort(addr)
	port, _ := strconv.Atoi(p)
	return &dispatch.Order{Target: routes.Target{Scheme: "https", Host: host, Port: 443}, MaxRest: time.Minute,
		Upstream: &routes.Upstream{Proxy: &routes.Proxy{Scheme: "http", Host: h, Port: port}}}
}

// Every way in which a proxy can fail is before dispatch, of that hop, and at its exact
// stage (CONTRACT E1, E2, G10).
func TestProxyFailures(t *testing.T) {
	contract.Covers(t, "E1", "E2", "E5", "G7", "G10", "V3", "C2")
	r := newRig(t)
	password := "proxy-password-of-this-test"
	authorization := "Basic " + base64.StdEncoding.EncodeToString([]byte("waybill:"+password))
	wrong := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: testkit.NewCA(t).Server(host)})
	answers := func(text string) func() *dispatch.Order {
		return func() *dispatch.Order { return through(testkit.NewConnectProxy(t, nil, "", text).Addr()) }
	}
	for _, c := range []struct {
		name, reason string
		order        func() *dispatch.Order
		code         outcome.Code
		stage        outcome.Stage
		status       int
		proxyStatus  string
		final        bool
		noHop        bool
	}{
		{name: "407", order: answers("HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic\r\nProxy-Status: p; error=http_request_denied\r\nContent-Length: 0\r\n\r\n"),
			code: outcome.CodeProxyTunnelFailed, stage: outcome.StageTCPConnect, reason: "proxy_credentials", status: 407, proxyStatus: "p; error=http_request_denied", final: true},
		{name: "403 that repeats the password", order: answers("HTTP/1.1 403 Forbidden\r\nProxy-Status: p; details=\"" + password + "\"\r\n\r\n"),
			code: outcome.CodeProxyTunnelFailed, stage: outcome.StageTCPConnect, reason: "proxy_refused", status: 403, final: true},
		{name: "503 after an interim answer", order: answers("HTTP/1.1 103 Early Hints\r\n\r\nHTTP/1.1 503 Service Unavailable\r\n\r\n"),
			code: outcome.CodeProxyTunnelFailed, stage: outcome.StageTCPConnect, reason: "proxy_status", status: 503},
		{name: "no HTTP", order: answers("hello\r\n\r\n"), code: outcome.CodeProxyTunnelFailed, stage: outcome.StageTCPConnect, reason: "proxy_answer"},
		{name: "endless head", order: answers("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("x", 20<<10) + "\r\n\r\n"), code: outcome.CodeProxyTunnelFailed, stage: outcome.StageTCPConnect, reason: "proxy_answer"},
		{name: "bytes of its own", order: answers("HTTP/1.1 200 OK\r\n\r\nHTTP/1.1 201 Created\r\n\r\n"), code: outcome.CodeProxyTunnelFailed, stage: outcome.StageTCPConnect, reason: "proxy_bytes_after_answer"},
		{name: "another origin behind it", order: func() *dispatch.Order { return through(testkit.NewConnectProxy(t, nil, wrong.Addr(), "").Addr()) },
			code: outcome.CodeTLSCertificateInvalid, stage: outcome.StageProxyTunnel, reason: "unknown_authority", noHop: true},
		{name: "nobody there", order: func() *dispatch.Order { return through("127.0.0.1:1") }, code: outcome.CodeConnectionRefused, stage: outcome.StageDNS, reason: "proxy_connection_refused"},
		{name: "metadata address", order: func() *dispatch.Order { return through("169.254.169.254:80") }, code: outcome.CodeDestinationProhibited, stage: outcome.StageDNS, reason: "proxy_special_address"},
		{name: "name of a private address", order: func() *dispatch.Order { return through("proxy.example.test:3128") }, code: outcome.CodeDestinationProhibited, stage: outcome.StageDNS, reason: "proxy_private_address"},
		{name: "target is a metadata address", order: func() *dispatch.Order {
			o := through("127.0.0.1:1")
			o.Target.Host = "169.254.169.254"
			return o
		}, code: outcome.CodeDestinationProhibited, reason: "special_address", noHop: true},
		{name: "untrusted https proxy", order: func() *dispatch.Order {
			o := through(testkit.NewConnectProxy(t, testkit.NewCA(t).Server("127.0.0.1"), "", "").Addr())
			o.Upstream.Proxy.Scheme = "https"
			return o
		}, code: outcome.CodeProxyTunnelFailed, stage: outcome.StageTCPConnect, reason: "proxy_unknown_authority", final: true},
		{name: "403 that repeats it in base 16", order: answers("HTTP/1.1 403 Forbidden\r\nProxy-Status: p; details=\"" + hex.EncodeToString([]byte(password)) + "\"\r\n\r\n"),
			code: outcome.CodeProxyTunnelFailed, stage: outcome.StageTCPConnect, reason: "proxy_refused", status: 403, final: true},
		{name: "403 that repeats it percent-encoded", order: answers("HTTP/1.1 403 Forbidden\r\nProxy-Status: p; details=\"" + percent(password) + "\"\r\n\r\n"),
			code: outcome.CodeProxyTunnelFailed, stage: outcome.StageTCPConnect, reason: "proxy_refused", status: 403, final: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r.tr.cfg.Resolver = fixedResolver("10.1.2.3")
			o := c.order()
			o.ProxyAuthorization = authorization
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
			defer cancel()
			_, err := r.tr.Connect(ctx, o)
			var s *dispatch.SetupError
			if !errors.As(err, &s) {
				t.Fatalf("%v", err)
			}
			if s.Code != c.code || s.Stage != c.stage || s.Reason != c.reason || s.HopStatus != c.status || s.ProxyStatus != c.proxyStatus || s.Final != c.final || (s.Hop == "") != c.noHop {
				t.Errorf("%+v", s)
			}
		})
	}
}

// percent encodes every byte.
func percent(s string) string {
	var b strings.Builder
	for i := range len(s) {
		fmt.Fprintf(&b, "%%%02X", s[i])
	}
	return b.String()
}

type fixedResolver string

func (f fixedResolver) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) {
	return []netip.Addr{netip.MustParseAddr(string(f))}, nil
}

// A tunnel carries HTTP/2 to the verified origin, is pooled for its own proxy alone, and
// a dead one after dispatch is as unknown as any connection (CONTRACT E3, E6).
func TestProxyTunnel(t *testing.T) {
	contract.Covers(t, "E5", "E6", "V2", "G10", "F2")
	r := newRig(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: r.ca.Server(host), Handler: func(a testkit.Arrival) []testkit.Step {
		if a.Target == "/cut" {
			return []testkit.Step{testkit.Close()}
		}
		return []testkit.Step{testkit.Reply(201, "ok")}
	}})
	one, two := testkit.NewConnectProxy(t, nil, up.Addr(), ""), testkit.NewConnectProxy(t, r.ca.Server("127.0.0.1"), up.Addr(), "")
	first := through(one.Addr())
	second := through(two.Addr())
	second.Upstream.Proxy.Scheme = "https"
	second.ProxyAuthorization = "Basic dTpw"
	for i, c := range []struct {
		o      *dispatch.Order
		reused bool
	}{{first, false}, {first, true}, {second, false}, {second, true}} {
		if c.reused {
			time.Sleep(100 * time.Millisecond) // net/http says a moment after an answer that its connection is free
		}
		end, _, info := r.send(c.o, outgoing("POST", "/v1/things", "body"))
		if !end.Complete || end.Status != 201 || info.Reused != c.reused || info.Stage != outcome.StageTLSHandshake || info.Peer.Proxy != c.o.Upstream.Proxy.Origin() || info.Peer.ServerName != host {
			t.Errorf("%d: %+v %+v %+v", i, end, info, info.Peer)
		}
	}
	if h := one.Heads(); len(h) != 1 || h[0] != "CONNECT "+host+":443 HTTP/1.1\r\nHost: "+host+":443\r\n\r\n" {
		t.Errorf("%q", h)
	}
	if h := two.Heads(); len(h) != 1 || !strings.Contains(h[0], "\r\nProxy-Authorization: Basic dTpw\r\n") {
		t.Errorf("%q", h)
	}
	first.MaxRest = 0
	if end, _, _ := r.send(first, outgoing("POST", "/cut", "body")); end.Complete || end.Code != outcome.CodeRemoteOutcomeUnknown {
		t.Errorf("%+v", end)
	}
}
