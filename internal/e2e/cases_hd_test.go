package e2e

import (
	"encoding/base64"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// casesHeaders: the secret goes out once, the caller's placeholder and its token for
// the proxy do not (DESIGN 1.3, V2).
func casesHeaders(t *testing.T, b *bed) {
	get := func(t *testing.T, host, path, lines string) testkit.Arrival {
		t.Helper()
		resp := b.raw(t, b.tunnel(t, host), "GET "+path+" HTTP/1.1\r\nHost: "+host+"\r\n"+lines+"\r\n")
		b.check(t, resp, want{status: 200, facts: success, relayed: true, host: host, path: path, arrivals: 1})
		return b.arrivals(host, path)[0]
	}
	bearer := "Bearer " + b.canary.Value()
	t.Run("HD-01", func(t *testing.T) {
		contract.Covers(t, "V2")
		a := get(t, payHost, "/v1/hd01", "authorization: Bearer dummy\r\nAUTHORIZATION: Bearer two\r\nCookie: session=dummy\r\n")
		if got := fields(a, "Authorization"); len(got) != 1 || got[0] != bearer || strings.Contains(string(a.RawHead), "dummy") || strings.Contains(string(a.RawHead), "two") {
			t.Error("not exactly one Authorization with the secret, and nothing of the placeholders")
		}
		a = get(t, msgHost, "/v1/hd01", "Authorization: Bearer dummy\r\nx-api-key: dummy\r\nX-API-Key: two\r\n")
		if got := fields(a, "X-Api-Key"); len(got) != 1 || got[0] != b.canary.Value() || has(a, "Authorization") {
			t.Error("not exactly one X-Api-Key with the secret, or the caller's Authorization went along")
		}
		// A route without a secret is the caller's own affair.
		a = get(t, evilHost, "/v1/hd01", "Authorization: Bearer own\r\n")
		if got := fields(a, "Authorization"); len(got) != 1 || got[0] != "Bearer own" {
			t.Errorf("%q", got)
		}
		// Over HTTP/2, towards the caller and towards the origin.
		for host, path := range map[string]string{payHost: "/v1/hd01/h2", h2Host: "/v1/hd01/h2"} {
			resp := b.hear(testkit.Send(t, b.client(t, true), http.MethodGet, "https://"+host+path, "", "Authorization", "Bearer dummy", "authorization", "Bearer two"))
			b.check(t, resp, want{status: 200, facts: success, relayed: true, host: host, path: path, arrivals: 1})
			if got := fields(b.arrivals(host, path)[0], "Authorization"); len(got) != 1 || got[0] != bearer {
				t.Errorf("%s: not exactly one Authorization", host)
			}
		}
	})
	t.Run("HD-02", func(t *testing.T) {
		contract.Covers(t, "V2")
		for i, nominated := range []string{"keep-alive, Authorization", "authorization", "Host", "Content-Length, Host", "close, X-Api-Key", "Idempotency-Key, X-Mine", ",, ,Authorization,"} {
			path := fmt.Sprintf("/v1/hd02/%d", i)
			a := get(t, payHost, path, "Connection: "+nominated+"\r\nAuthorization: Bearer dummy\r\nX-Mine: 1\r\nIdempotency-Key: k\r\n")
			if got := fields(a, "Authorization"); len(got) != 1 || got[0] != bearer {
				t.Errorf("%q: not exactly one Authorization with the secret", nominated)
			}
			if a.Authority != payHost || has(a, "Connection") || has(a, "Keep-Alive") {
				t.Errorf("%q: %v", nominated, fieldNames(a))
			}
			if mine := strings.Contains(nominated, "X-Mine"); has(a, "X-Mine") == mine || has(a, "Idempotency-Key") == mine {
				t.Errorf("%q: a nominated field went along, or another was dropped: %v", nominated, fieldNames(a))
			}
			a = get(t, msgHost, path, "Connection: "+nominated+", X-Api-Key\r\n")
			if got := fields(a, "X-Api-Key"); len(got) != 1 || got[0] != b.canary.Value() {
				t.Errorf("%q: not exactly one X-Api-Key with the secret", nominated)
			}
		}
	})
	t.Run("HD-03", func(t *testing.T) {
		contract.Covers(t, "C2", "V4")
		auth := "Basic " + base64.StdEncoding.EncodeToString([]byte("agent:"+b.token.Value()))
		lines := "Proxy-Connection: keep-alive\r\nKeep-Alive: timeout=5\r\nTE: trailers\r\nTrailer: X-T\r\nConnection: TE, Upgrade\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABkAAQAAP__\r\n"
		clean := func(host, path string, resp *testkit.Response) {
			t.Helper()
			s := b.check(t, b.hear(resp), want{status: 200, facts: success, relayed: true, host: host, path: path, arrivals: 1})
			a := b.arrivals(host, path)[0]
			for _, name := range fieldNames(a) {
				if strings.HasPrefix(name, "proxy-") || name == "keep-alive" || name == "te" || name == "trailer" || name == "upgrade" || name == "connection" {
					t.Errorf("%s: %s went along", path, name)
				}
			}
			if !strings.HasPrefix(s.View.Caller, "basic:") && s.View.Caller != "local" {
				t.Errorf("caller %q", s.View.Caller)
			}
		}
		tcp, _, err := testkit.Connect(t, b.addr, payHost+":443", "Proxy-Authorization: "+auth, "Proxy-Connection: keep-alive")
		if err != nil {
			t.Fatal(err)
		}
		c, _, err := tcp.StartTLS(t, payHost, b.rig.roots(), "http/1.1")
		if err != nil {
			t.Fatal(err)
		}
		clean(payHost, "/v1/hd03/tunnel", c.Roundtrip(t, "GET /v1/hd03/tunnel HTTP/1.1\r\nHost: "+payHost+"\r\nProxy-Authorization: "+auth+"\r\nProxy-Authentication-Info: x\r\n"+lines+"\r\n"))
		clean(payHost, "/v1/hd03/plain", testkit.Dial(t, b.addr).Roundtrip(t, "GET http://"+payHost+"/v1/hd03/plain HTTP/1.1\r\nHost: "+payHost+"\r\nProxy-Authorization: "+auth+"\r\n"+lines+"\r\n"))
		clean(payHost, "/v1/hd03/inner", b.tunnel(t, payHost).Roundtrip(t, "GET /v1/hd03/inner HTTP/1.1\r\nHost: "+payHost+"\r\nProxy-Authorization: Basic inner\r\n"+lines+"\r\n"))
		for host, l := range b.ledgers {
			for _, a := range l.Arrivals() {
				testkit.Search(t, b.token, testkit.InString(host, string(a.RawHead)))
			}
		}
	})
	t.Run("HD-04", func(t *testing.T) {
		contract.Covers(t, "B1")
		for i, c := range []struct {
			method, lines string
			status        int
			facts         string
		}{
			{"TRACE", "", 422, noAction}, {"TRACK", "", 422, noAction}, {"TRACE", "Max-Forwards: 0\r\n", 422, noAction}, {"TRACK", "Max-Forwards: 0\r\n", 422, noAction},
			{"OPTIONS", "Max-Forwards: 0\r\n", 422, noAction}, {"trace", "", 422, noAction}, {"Track", "", 422, noAction},
		} {
			for _, host := range []string{payHost, evilHost} {
				path := fmt.Sprintf("/v1/hd04/%d", i)
				resp := b.raw(t, b.tunnel(t, host), c.method+" "+path+" HTTP/1.1\r\nHost: "+host+"\r\n"+c.lines+"\r\n")
				b.check(t, resp, want{status: c.status, facts: c.facts, host: host, path: path})
			}
		}
		b.check(t, b.raw(t, b.tunnel(t, payHost), "OPTIONS /v1/hd04/o HTTP/1.1\r\nHost: "+payHost+"\r\nMax-Forwards: 5\r\n\r\n"), want{status: 200, facts: success, relayed: true, host: payHost, path: "/v1/hd04/o", arrivals: 1})
		if got := fields(b.arrivals(payHost, "/v1/hd04/o")[0], "Max-Forwards"); len(got) != 1 || got[0] != "4" {
			t.Errorf("Max-Forwards %q", got)
		}
	})
}
