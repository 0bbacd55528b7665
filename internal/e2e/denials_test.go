package e2e

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

// TestDenialsAreExplained: a refusal names its code, the field to correct and what would be
// allowed nearest to it, as far as that caller may know; "waybill explain --caller" says
// the same to a person. Limits are of one caller on one route (CONTRACT B2, L8, V1, V4).
func TestDenialsAreExplained(t *testing.T) {
	contract.Covers(t, "B1", "B2", "L8", "V1", "V4")
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server("*.deny.test")})
	hash := func(token string) string {
		sum := sha256.Sum256([]byte(token))
		return hex.EncodeToString(sum[:])
	}
	route := func(name, match, more string) string {
		return fmt.Sprintf("  - name: %s\n    match: {host: %s.deny.test%s}\n    upstream: {roots: roots.pem, resolve: {%s.deny.test: %q}}\n%s", name, name, match, name, up.Addr(), more)
	}
	r := newRig(t, ca, rigOptions{
		top: "callers:\n  - {name: ci, token_sha256: " + hash("token-of-ci") + "}\n  - {name: dev, token_sha256: " + hash("token-of-dev") + "}\n",
		routes: route("docs", ", methods: [GET, HEAD], path: /v1/**", "    callers: [ci]\n") + route("open", ", methods: [GET], paths: [/v1/**, /v2/*]", "") +
			"  - name: shut\n    match: {host: shut.deny.test}\n    deny: true\n" +
			"  - name: tls\n    match: {host: tls.deny.test}\n    upstream: {refuse_plaintext: true}\n" +
			route("few", "", "    limits: {rate: 2/h, burst: 2}\n"),
	})
	r.start()
	clients := map[string]*http.Client{}
	for _, who := range []string{"ci", "dev"} {
		clients[who] = testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://" + url.UserPassword("x", "token-of-"+who).String() + "@" + r.addr, Roots: r.roots(), Timeout: patience})
	}
	type explained struct {
		Decision, Reason, Code, Field, Route string
	}
	for _, c := range []struct{ who, method, url, code, field, nearest string }{
		{"ci", "GET", "https://nowhere.deny.test/", "ROUTE_NOT_FOUND", "request.target.host", "No route names this host."},
		{"ci", "POST", "https://docs.deny.test/v1/x", "ROUTE_NOT_FOUND", "request.method", "only with the methods GET, HEAD"},
		{"dev", "POST", "https://docs.deny.test/v1/x", "ROUTE_NOT_FOUND", "request.method", "No route takes this request."}, // of ci's route dev learns nothing
		{"dev", "GET", "https://docs.deny.test/v1/x", "POLICY_DENIED", "", "This caller may not use"},
		{"dev", "GET", "https://open.deny.test/v3/x", "ROUTE_NOT_FOUND", "request.target.path", "only the paths /v1/**, /v2/*"},
		{"ci", "GET", "https://open.deny.test:8443/v1/x", "ROUTE_NOT_FOUND", "request.target.port", "only at https port 443"},
		{"ci", "GET", "https://shut.deny.test/v1/x", "POLICY_DENIED", "request.target", ""},
		{"ci", "GET", "http://tls.deny.test/v1/x", "INVALID_TARGET", "request.target.scheme", ""},
	} {
		name := c.who + " " + c.method + " " + c.url
		resp := testkit.Send(t, clients[c.who], c.method, c.url, "")
		var env outcome.Envelope
		if err := json.Unmarshal(resp.Body, &env); err != nil || env.Error == nil {
			t.Errorf("%s: %d %v %s", name, resp.Status, err, resp.Body)
			continue
		}
		if env.Error.Code.String() != c.code || env.Evidence.Field != c.field || !strings.Contains(env.Error.Message, c.nearest) || env.Error.Outcome != outcome.NotAttempted {
			t.Errorf("%s: %d %s", name, resp.Status, resp.Body)
		}
		code, out, errs := r.cli("explain", c.method, c.url, "--caller", c.who, "--json")
		var e explained
		if err := json.Unmarshal([]byte(out), &e); err != nil || code != 1 {
			t.Errorf("explain %s: %d %v %s %s", name, code, err, out, errs)
			continue
		}
		if e.Code != c.code || e.Field != c.field || !strings.Contains(e.Reason, strings.TrimSuffix(c.nearest, ".")) {
			t.Errorf("%s: explain says %+v, the caller was told %s", name, e, resp.Body)
		}
		if strings.HasPrefix(c.code, "ROUTE") && !strings.Contains(env.Error.Message, e.Reason) {
			t.Errorf("%s: explain says %q, the caller was told %q", name, e.Reason, env.Error.Message)
		}
	}
	// A limit that one caller spent is not another's, and nothing of what is refused arrives.
	for i, want := range []int{200, 200, http.StatusTooManyRequests} {
		resp := testkit.Send(t, clients["ci"], http.MethodGet, fmt.Sprintf("https://few.deny.test/v1/%d", i), "")
		if resp.Status != want || want != 200 && (!strings.Contains(string(resp.Body), "RATE_LIMITED") || resp.Header.Get("Retry-After") == "") {
			t.Errorf("%d: %d %v %s", i, resp.Status, resp.Header, resp.Body)
		}
	}
	if resp := testkit.Send(t, clients["dev"], http.MethodGet, "https://few.deny.test/v1/dev", ""); resp.Status != 200 {
		t.Errorf("another caller: %d %s", resp.Status, resp.Body)
	}
	// A request that has passed this proxy already is not sent on its way again.
	one := testkit.Send(t, clients["ci"], http.MethodGet, "https://open.deny.test/v1/via", "")
	arrived := up.Arrivals()
	via := strings.Join(arrived[len(arrived)-1].Values("Via"), ", ")
	if one.Status != 200 || via == "" {
		t.Fatalf("%d, Via %q", one.Status, via)
	}
	if resp := testkit.Send(t, clients["ci"], http.MethodGet, "https://open.deny.test/v1/loop", "", "Via", via); resp.Status != http.StatusLoopDetected || !strings.Contains(string(resp.Body), "LOOP_DETECTED") {
		t.Errorf("a loop: %d %s", resp.Status, resp.Body)
	}
	if n := len(up.Arrivals()); n != 4 {
		t.Errorf("%d arrived, want the four that were allowed", n)
	}
}
