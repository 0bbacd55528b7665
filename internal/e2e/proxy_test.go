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

// The real binary behind a proxy: the origin is reached and verified through it, the
// proxy gets its own secret and nothing of the injected one, and its refusal is no
// attempt (CONTRACT G10, E2, V2).
func TestUpstreamProxy(t *testing.T) {
	contract.Covers(t, "G10", "E1", "E2", "E6", "V2", "C2")
	const host, deniedHost = "behind.example.test", "denied.example.test"
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(host, deniedHost), Handler: func(testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Reply(201, "made")}
	}})
	opens := testkit.NewConnectProxy(t, nil, up.Addr(), "")
	denies := testkit.NewConnectProxy(t, nil, "", "HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Status: corp; error=http_request_denied\r\nContent-Length: 0\r\n\r\n")
	password := testkit.NewCanary(t)
	route := func(host string, p *testkit.ConnectProxy) string {
		return fmt.Sprintf("  - name: %s\n    match: {host: %s}\n    inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: pay}]\n    upstream: {roots: roots.pem, proxy: {url: \"http://%s\", user: waybill, credential: corp}}\n",
			strings.SplitN(host, ".", 2)[0], host, p.Addr())
	}
	r := newRig(t, ca, rigOptions{top: "  corp: {from: {file: corp}, label: \"1\"}\n", routes: route(host, opens) + route(deniedHost, denies)})
	r.write("corp", password.Value())
	r.start()
	c := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), Timeout: patience})
	if resp := testkit.Send(t, c, http.MethodPost, "https://"+host+"/v1/one", "x"); resp.Status != 201 {
		t.Fatalf("%d %s", resp.Status, resp.Body)
	}
	resp := testkit.Send(t, c, http.MethodPost, "https://"+deniedHost+"/v1/two", "x")
	body := string(resp.Body)
	for _, want := range []string{`"PROXY_TUNNEL_FAILED"`, `"not_attempted"`, `"hop":"upstream_proxy"`, `"hop_status":407`, `"received_proxy_status":"corp; error=http_request_denied"`, `"stage":"tcp_connect"`} {
		if !strings.Contains(strings.ReplaceAll(body, ": ", ":"), want) && !strings.Contains(body, want) {
			t.Errorf("no %s in %d %s", want, resp.Status, body)
		}
	}
	if n := len(denies.Heads()); n != 1 {
		t.Errorf("%d tries after a 407", n)
	}
	sent := "Proxy-Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte("waybill:"+password.Value()))
	if h := opens.Heads(); len(h) != 1 || !strings.Contains(h[0], sent) {
		t.Errorf("CONNECT without the proxy's credential")
	}
	up.RequireCount(t, 1, http.MethodPost, "/v1/one")
	if got := up.Arrivals()[0].Header.Get("Proxy-Authorization"); got != "" {
		t.Error("the origin got the proxy's credential")
	}
	code, out, errs := r.cli("actions", "--json")
	if code != 0 {
		t.Fatal(errs)
	}
	r.kill()
	r.verify()
	testkit.Search(t, r.canary, testkit.InString("proxy", opens.Seen()+denies.Seen()), testkit.InString("answer", body), testkit.InString("log", r.logs.String()))
	testkit.Search(t, password, testkit.InString("answer", body), testkit.InString("actions", out), testkit.InString("log", r.logs.String()), testkit.In(r.data))
}
