package e2e

import (
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

// tokenServer plays a token endpoint, GitHub's installation tokens and a KV v2 store; each
// secret that it gives is a canary.
func tokenServer(t *testing.T, secret func(name string) string) *httptest.Server {
	t.Helper()
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		answer := func(v any) { _ = json.NewEncoder(w).Encode(v) }
		switch r.URL.Path {
		case "/token":
			answer(map[string]any{"access_token": secret("oauth"), "token_type": "bearer", "expires_in": 3600, "refresh_token": secret("rotated")})
		case "/refused":
			_ = r.ParseForm()
			w.WriteHeader(http.StatusBadRequest)
			answer(map[string]any{"error": "invalid_grant", "error_description": r.PostForm.Get("refresh_token")})
		case "/app/installations/7/access_tokens":
			w.WriteHeader(http.StatusCreated)
			answer(map[string]any{"token": secret("app"), "expires_at": time.Now().Add(time.Hour).UTC()})
		case "/v1/secret/data/api":
			if r.Header.Get("X-Vault-Token") != secret("file") {
				w.WriteHeader(http.StatusForbidden)
				answer(map[string]any{"errors": []string{r.Header.Get("X-Vault-Token")}})
				return
			}
			answer(map[string]any{"data": map[string]any{"data": map[string]string{"key": secret("store")}, "metadata": map[string]any{"version": 3}}})
		default:
			w.WriteHeader(http.StatusNotFound)
		}
	}))
	t.Cleanup(s.Close)
	return s
}

// TestCredentialCanaries: every source and every way of attaching, in success and in
// failure, at debug level – the secret is where it belongs and nowhere else (C1-C4, V2).
func TestCredentialCanaries(t *testing.T) {
	contract.Covers(t, "B3", "C1", "C2", "C3", "C4", "C5", "D2", "E6", "L4", "V2")
	ca := testkit.NewCA(t)
	names := []string{"file", "env", "command", "own", "mounted", "oauth", "rotated", "refresh", "app", "store", "aws"}
	// One canary is in all of them, so that one search finds any; the end tells them apart.
	canary := testkit.NewCanary(t)
	mark := func(name string) string { return "-0" + name + "0" }
	secret := func(name string) string { return canary.Value() + mark(name) }
	tokens := tokenServer(t, secret)
	// A query percent-encodes, a cookie takes no comma and no quote: the canary has neither.
	ways := []struct{ host, inject, credential string }{
		{"w0", `{header: X-Api-Key, value: "${secret}", credential: file}`, "file"},
		{"w1", `{basic: agent, credential: env}`, "env"},
		{"w2", `{cookie: sid, credential: command}`, "command"},
		{"w3", `{query: api_key, credential: own}`, "own"},
		{"w4", `{body: /auth/token, credential: mounted}`, "mounted"},
		{"w5", `{header: Authorization, value: "Bearer ${secret}", credential: oauth}`, "oauth"},
		{"w6", `{header: Authorization, value: "Bearer ${secret}", credential: app}`, "app"},
		{"w7", `{header: X-Store, value: "${secret}", credential: store}`, "store"},
		{"w8", `{header: X-Signature, value: "v1=${signature}", credential: file, hmac: {canonical: "${method}${target}${body}"}}`, "file"},
		{"w9", `{sigv4: {service: s3, region: eu-west-1, access_key_id: AKID}, credential: aws}`, "aws"},
		{"w10", `{client_certificate: true, credential: mtls}`, ""},
	}
	failures := []struct {
		host, credential string
		code             outcome.Code
	}{
		{"f0", "gone", outcome.CodeCredentialMissing}, {"f1", "refused", outcome.CodeCredentialRefused}, {"f2", "failing", outcome.CodeCredentialUnavailable},
		{"f3", "unset", outcome.CodeCredentialMissing}, {"f4", "no-right", outcome.CodeCredentialRefused}, {"f5", "away", outcome.CodeCredentialUnavailable}, {"f6", "lines", outcome.CodeCredentialInvalid},
	}
	var hosts []string
	for _, w := range ways {
		hosts = append(hosts, w.host+".example.test")
	}
	for _, f := range failures {
		hosts = append(hosts, f.host+".example.test")
	}
	reply := func(a testkit.Arrival) []testkit.Step {
		if strings.Contains(a.Target, "/cut") {
			return []testkit.Step{testkit.Write("HTTP/1.1 201 Created\r\nContent-Length: 99\r\n\r\n" + a.Target), testkit.Close()}
		}
		return []testkit.Step{testkit.Reply(200, string(a.RawHead)+string(a.Body))} // it repeats what it got
	}
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(hosts...), Handler: reply})
	mutual := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.RequireClient(ca.Server(hosts...)), Handler: reply})
	wrong := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server("elsewhere.example.test"), Handler: reply})
	var y strings.Builder
	route := func(host, addr, inject string) {
		fmt.Fprintf(&y, "  - name: %s\n    match: {host: %s.example.test}\n    upstream: {roots: roots.pem, resolve: {%s.example.test: \"%s\"}}\n    inject: [%s]\n", host, host, host, addr, inject)
	}
	for _, w := range ways {
		addr := up.Addr()
		if w.host == "w10" {
			addr = mutual.Addr()
		}
		route(w.host, addr, w.inject)
	}
	for _, f := range failures {
		route(f.host, up.Addr(), `{header: X-Key, value: "${secret}", credential: `+f.credential+`}`)
	}
	route("other", wrong.Addr(), `{header: X-Key, value: "${secret}", credential: file}`)
	r := newRig(t, ca, rigOptions{routes: y.String(), top: `  file: {from: {file: f-secret}}
  env: {from: {env: E_SECRET}}
  command: {from: {command: [cat, c-secret]}}
  own: {from: {vault: own}}
  mounted: {from: {kubernetes: {folder: mount, key: token}}}
  oauth: {from: {oauth: {token_url: "` + tokens.URL + `/token", client_id: c, client_secret: {file: f-secret}, refresh_token: {vault: refresh}}}}
  app: {from: {github_app: {app_id: "1", installation_id: "7", private_key: {file: app.pem}, api: "` + tokens.URL + `"}}}
  store: {from: {hashicorp_vault: {address: "` + tokens.URL + `", mount: secret, path: api, field: key, token: {file: f-secret}}}}
  aws: {from: {file: a-secret}}
  mtls: {from: {file: pair.pem}}
  gone: {from: {file: nowhere}}
  refused: {from: {oauth: {token_url: "` + tokens.URL + `/refused", client_id: c, refresh_token: {vault: refresh}}}}
  failing: {from: {command: [sh, -c, "cat c-secret; cat c-secret >&2; exit 1"]}}
  unset: {from: {vault: unset}}
  no-right: {from: {hashicorp_vault: {address: "` + tokens.URL + `", mount: secret, path: api, field: key, token: {file: a-secret}}}}
  away: {from: {onepassword: {host: "http://127.0.0.1:1", vault: v, item: i, field: f, token: {file: f-secret}}}}
  lines: {from: {command: [sh, -c, "cat c-secret; echo; cat c-secret"]}}
`})
	r.write("f-secret", secret("file")+"\n")
	r.write("c-secret", secret("command"))
	r.write("a-secret", secret("aws"))
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	pemKey := pem.EncodeToMemory(&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)})
	r.write("app.pem", string(pemKey))
	certPath, keyPath := testkit.WriteCert(t, ca.Client("agent"))
	pair := ""
	for _, p := range []string{certPath, keyPath} {
		b, err := os.ReadFile(p)
		if err != nil {
			t.Fatal(err)
		}
		pair += string(b)
	}
	r.write("pair.pem", pair)
	if err := os.MkdirAll(filepath.Join(r.dir, "mount", "..1"), 0o700); err != nil {
		t.Fatal(err)
	}
	r.write("mount/..1/token", secret("mounted"))
	for _, l := range [][2]string{{"..1", "..data"}, {"..data/token", "token"}} {
		if err := os.Symlink(l[0], filepath.Join(r.dir, "mount", l[1])); err != nil {
			t.Fatal(err)
		}
	}
	r.env = []string{"E_SECRET=" + secret("env")}
	r.write("key.txt", "AGE-SECRET-KEY-1GFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPQ4EGAEX\n")
	cli := func(stdin string, args ...string) string {
		t.Helper()
		code, out, errs := testkit.Run(t, testkit.Command{Path: r.bin, Args: args, Env: append([]string{"WAYBILL_CONFIG=" + r.config, "WAYBILL_DATA=" + r.data}, r.environ()...), Dir: r.dir, Stdin: strings.NewReader(stdin)})
		if code != 0 {
			t.Fatalf("%v: %d %s", args, code, errs)
		}
		return out + errs
	}
	said := cli("", "vault", "init", "--identity", filepath.Join(r.dir, "key.txt"))
	said += cli(secret("own"), "vault", "set", "own")
	said += cli(secret("refresh"), "vault", "set", "refresh")
	r.start()
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://" + r.addr, Roots: r.roots()})
	var answers strings.Builder
	send := func(host, path string) *testkit.Response {
		resp := testkit.Send(t, client, http.MethodPost, "https://"+host+".example.test"+path, `{"amount": 5}`, "Content-Type", "application/json", "Cookie", "sid=placeholder", "Authorization", "Bearer placeholder")
		fmt.Fprintln(&answers, resp.Status, resp.Header)
		answers.Write(resp.Body)
		return resp
	}
	for _, w := range ways {
		for _, path := range []string{"/v1/ok", "/v1/cut"} {
			resp := send(w.host, path)
			if path == "/v1/ok" && resp.Status != 200 {
				t.Errorf("%s: %d %s", w.inject, resp.Status, resp.Body)
			}
		}
	}
	for _, f := range failures {
		resp := send(f.host, "/v1/never")
		if got := resp.Header.Get("Waybill-Outcome"); !strings.Contains(got, "phase=credential_injection") || !strings.Contains(string(resp.Body), f.code.String()) || strings.Contains(string(resp.Body), f.credential+"\"") {
			t.Errorf("%s: %d %s %s", f.credential, resp.Status, got, resp.Body)
		}
	}
	send("other", "/v1/never") // a wrong certificate: nothing is offered to it
	said += cli("", "vault", "list") + cli("", "vault", "lock")
	if resp := send("w3", "/v1/never"); !strings.Contains(string(resp.Body), "VAULT_LOCKED") || resp.Status != http.StatusForbidden {
		t.Errorf("locked: %d %s", resp.Status, resp.Body)
	}
	if !strings.Contains(get(t, r.meters), "\nwaybill_vault_locked 1\n") {
		t.Error("the metrics do not say that the vault is locked")
	}
	said += cli("", "vault", "unlock")
	if resp := send("w3", "/v1/again"); resp.Status != 200 {
		t.Errorf("unlocked again: %d %s", resp.Status, resp.Body)
	}
	metrics := get(t, r.meters)
	for _, want := range []string{"\nwaybill_vault_locked 0\n", `waybill_credential_refreshes_total{credential="oauth",result="success"}`, `waybill_credential_refreshes_total{credential="refused",result="failure"}`} {
		if !strings.Contains(metrics, want) {
			t.Errorf("the metrics do not have %q", want)
		}
	}
	_, list, _ := r.cli("actions", "--json")
	for _, v := range byTarget(r.actions(), "") {
		_, one, _ := r.cli("action", v.InvocationID)
		list += one
		break // one for people; --json has them all
	}
	r.kill()
	// The secret arrived where it belongs …
	arrived := map[string]string{}
	for _, u := range []*testkit.Upstream{up, mutual, wrong} {
		for _, a := range u.Arrivals() {
			arrived[strings.Split(strings.Join(a.Values("Host"), ""), ".")[0]] += string(a.RawHead) + string(a.Body)
			if strings.Contains(a.Target, "never") {
				t.Errorf("%s was sent", a.Target)
			}
		}
	}
	for _, w := range ways {
		switch {
		case w.host == "w8" || w.host == "w9" || w.credential == "": // signatures and certificates hold no secret
			testkit.Search(t, canary, testkit.InString(w.host, arrived[w.host]))
		case w.host == "w1": // base64
			testkit.RequireFound(t, canary, testkit.InString(w.host, arrived[w.host]))
		default:
			testkit.RequireFound(t, canary, testkit.InString(w.host, arrived[w.host]))
			if !strings.Contains(arrived[w.host], mark(w.credential)) {
				t.Errorf("%s got another secret", w.host)
			}
		}
		for _, other := range names {
			if other != w.credential && strings.Contains(arrived[w.host], mark(other)) {
				t.Errorf("%s got the secret %s", w.host, other)
			}
		}
	}
	if mutual.Count("", "") == 0 {
		t.Error("nothing arrived over mutual TLS")
	}
	// … and is nowhere else; the vault in the data folder is one of the places.
	for name, c := range map[string]*testkit.Canary{"secrets": canary, "app key": testkit.CanaryOf(strings.Split(string(pemKey), "\n")[5]),
		"client key": testkit.CanaryOf(strings.Split(pair[strings.Index(pair, "PRIVATE KEY"):], "\n")[2])} {
		t.Run(name, func(t *testing.T) {
			places := []testkit.Where{testkit.In(r.data)}
			if name != "secrets" {
				places = nil // what is read by the process only: its own output is enough
			}
			testkit.Search(t, c, append(places, testkit.InString("log", r.logs.String()), testkit.InString("answers", answers.String()), testkit.InString("metrics", metrics),
				testkit.InString("actions", list), testkit.InString("commands", said))...)
		})
	}
	// The rotated refresh token is stored: the old one is not used again after a restart.
	r.start()
	out := cli("", "vault", "list", "--json")
	var doc struct {
		Secrets []struct {
			Name   string
			Serial int
		}
	}
	if err := json.Unmarshal([]byte(out), &doc); err != nil {
		t.Fatal(err)
	}
	for _, s := range doc.Secrets {
		if s.Name == "refresh" && s.Serial != 2 {
			t.Errorf("the refresh token was stored %d times", s.Serial)
		}
	}
}

// TestRotationUnderLoad: a secret that rotates while 64 requests are in flight loses none
// of them, and no request mixes two versions.
func TestRotationUnderLoad(t *testing.T) {
	contract.Covers(t, "C1", "D1")
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server("turn.example.test")})
	r := newRig(t, ca, rigOptions{top: "  turn: {from: {file: turning}}\n", routes: "  - name: turn\n    match: {host: turn.example.test}\n    upstream: {roots: roots.pem, resolve: {turn.example.test: \"" + up.Addr() + "\"}}\n" +
		"    inject: [{header: X-One, value: \"${secret}\", credential: turn}, {cookie: two, credential: turn}]\n"})
	turn := func(i int) {
		r.write("turning.new", "version-"+strconv.Itoa(1000+i))
		if err := os.Rename(filepath.Join(r.dir, "turning.new"), filepath.Join(r.dir, "turning")); err != nil {
			t.Error(err)
		}
	}
	turn(0)
	r.start()
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://" + r.addr, Roots: r.roots()})
	stop := make(chan struct{})
	var turns sync.WaitGroup
	turns.Go(func() {
		for i := 1; ; i++ {
			select {
			case <-stop:
				return
			default:
				turn(i)
			}
		}
	})
	var all sync.WaitGroup
	for w := range 64 {
		all.Go(func() {
			for i := range 3 {
				req, err := http.NewRequest(http.MethodPost, fmt.Sprintf("https://turn.example.test/%d/%d", w, i), strings.NewReader("x"))
				if err != nil {
					t.Error(err)
					return
				}
				resp, err := client.Do(req)
				if err != nil {
					t.Error(err)
					return
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
				if resp.StatusCode != http.StatusOK {
					t.Errorf("%d %s", resp.StatusCode, resp.Header.Get("Waybill-Outcome"))
				}
			}
		})
	}
	all.Wait()
	close(stop)
	turns.Wait()
	seen := map[string]bool{}
	for _, a := range up.Arrivals() {
		one, two := strings.Join(a.Values("X-One"), ""), strings.TrimPrefix(strings.Join(a.Values("Cookie"), ""), "two=")
		if one != two || !strings.HasPrefix(one, "version-1") && !strings.HasPrefix(one, "version-") {
			t.Errorf("one request with %q and %q", one, two)
		}
		seen[one] = true
	}
	if n := len(up.Arrivals()); n != 3*64 || len(seen) < 2 {
		t.Errorf("%d of %d arrived, %d versions", n, 3*64, len(seen))
	}
}
