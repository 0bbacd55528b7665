package e2e

import (
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// TestStoresAreAskedThemselves: what opens a store – client secrets, refresh tokens,
// tokens, keys of AWS, the assertion of a GitHub App – goes to the store that the
// configuration names, over TLS that is verified for it, and nowhere else: not to where a
// variable of the environment leads, not after a redirect, not to a host with another
// certificate (CONTRACT V2, C2; docs/security.md: the environment is not trusted).
func TestStoresAreAskedThemselves(t *testing.T) {
	t.Parallel()
	contract.Covers(t, "V2", "C2", "G7")
	ca := testkit.NewCA(t)
	k := newSources(t, ca)
	// The trap's certificate is good for the authority that the variables name.
	trap := testkit.NewTrap(t, ca.Server("127.0.0.1", "localhost"), "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}")
	away := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		http.Redirect(w, r, "http://"+trap.Addr()+"/stolen", http.StatusTemporaryRedirect)
	}))
	t.Cleanup(away.Close)
	secure, redirects := "https://"+trap.Addr(), away.URL
	y, routes := k.yaml, ""
	var names []string
	route := func(name, from string) {
		y += "  " + name + ": {from: " + from + ", timeout: 5s}\n"
		names = append(names, name)
		routes += "  - name: " + name + "\n    match: {host: " + name + ".stores.test}\n    upstream: {roots: roots.pem, resolve: {" + name + ".stores.test: \"127.0.0.1:1\"}}\n    inject: [{header: X-Key, value: \"${secret}\", credential: " + name + "}]\n"
	}
	for how, url := range map[string]string{"tls": secure, "moved": redirects} {
		route("oauth-"+how, `{oauth: {token_url: "`+url+`/token", client_id: c, client_secret: {file: s-client}}}`)
		route("refresh-"+how, `{oauth: {token_url: "`+url+`/token", client_id: c, client_auth: body, client_secret: {file: s-client}, refresh_token: {vault: refresh}}}`)
		route("app-"+how, `{github_app: {app_id: "1", installation_id: "7", private_key: {file: app.pem}, api: "`+url+`"}}`)
		route("token-"+how, `{hashicorp_vault: {address: "`+url+`", mount: secret, path: api, token: {file: s-root}}}`)
		route("approle-"+how, `{hashicorp_vault: {address: "`+url+`", mount: secret, path: api, approle: {role_id: role, secret_id: {file: s-secretid}}}}`)
		route("jwt-"+how, `{hashicorp_vault: {address: "`+url+`", mount: secret, path: api, kubernetes: {role: r, jwt_file: s-connect}}}`)
		route("aws-"+how, `{aws: {secret: prod/api, region: eu-west-1, endpoint: "`+url+`"}}`)
		route("onepassword-"+how, `{onepassword: {host: "`+url+`", vault: v, item: i, field: f, token: {file: s-connect}}}`)
	}
	// Without endpoint: it is AWS's own, which cannot be reached from here; a variable that
	// names another one has no say.
	route("aws-own", `{aws: {secret: prod/api, region: eu-west-1}}`)
	for _, s := range allSources { // the control: with all these variables each works
		routes += "  - name: good-" + s + "\n    match: {host: good-" + s + ".stores.test}\n    upstream: {roots: roots.pem, resolve: {good-" + s + ".stores.test: \"127.0.0.1:1\"}}\n    inject: [" + (combo{s, "header"}).inject() + "]\n"
	}
	r := newRig(t, ca, rigOptions{top: y, routes: routes})
	roots := r.dir + "/roots.pem"
	k.install(r)
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy", "all_proxy"} {
		r.env = append(r.env, name+"=http://"+trap.Addr())
	}
	for _, name := range []string{"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SECRETS_MANAGER", "AWS_ENDPOINT_URL_STS", "VAULT_ADDR", "BAO_ADDR", "OP_CONNECT_HOST"} {
		r.env = append(r.env, name+"=http://"+trap.Addr())
	}
	r.env = append(r.env, "SSL_CERT_FILE="+roots, "AWS_CA_BUNDLE="+roots, "VAULT_CACERT="+roots, "VAULT_SKIP_VERIFY=true", "VAULT_PROXY_ADDR=http://"+trap.Addr(), "VAULT_TOKEN="+k.secret("root"))
	r.start()
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://" + r.addr, Roots: r.roots()})
	for _, name := range names {
		resp := testkit.Send(t, client, http.MethodPost, "https://"+name+".stores.test/v1/x", "a")
		if got := resp.Header.Get("Waybill-Outcome"); !strings.Contains(got, "not_attempted;phase=credential_injection") {
			t.Errorf("%s: %d %s %s", name, resp.Status, got, resp.Body)
		}
	}
	for _, s := range allSources {
		resp := testkit.Send(t, client, http.MethodPost, "https://good-"+s+".stores.test/v1/x", "a")
		if got := resp.Header.Get("Waybill-Outcome"); !strings.Contains(got, "CONNECTION_REFUSED") { // the secret was there; its origin is not
			t.Errorf("%s: %d %s %s", s, resp.Status, got, resp.Body)
		}
	}
	// "check --credentials" fetches as the proxy does.
	if code, out, errs := r.cli("check", "--credentials"); code != 3 || !strings.Contains(out+errs, "credentials.aws-own") {
		t.Errorf("check --credentials: %d %s %s", code, out, errs)
	}
	r.kill()
	if got := trap.Got(); got != "" {
		t.Errorf("the trap got %d bytes of requests", len(got))
	}
	for _, c := range []*testkit.Canary{k.canary, k.appKey} {
		testkit.Search(t, c, testkit.InString("trap", trap.Got()+trap.Wire()), testkit.InString("log", r.logs.String()))
	}
	if trap.Conns() == 0 {
		t.Error("nobody came to the trap: it proves nothing")
	}
	if _, err := os.Stat(roots); err != nil {
		t.Fatal(err)
	}
}

// TestVaultInTheKeyring: a vault whose key is in the operating system's keyring opens by
// itself when the proxy starts, and stays locked while the keyring does (CONTRACT C1).
func TestVaultInTheKeyring(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	ca := testkit.NewCA(t)
	ring, canary := testkit.NewSecretService(t), testkit.NewCanary(t)
	const host = "vault.example.test"
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(host)})
	r := newRig(t, ca, rigOptions{
		top:    "  own: {from: {vault: own}}\n",
		routes: "  - name: own\n    match: {host: " + host + "}\n    upstream: {roots: roots.pem, resolve: {" + host + ": \"" + up.Addr() + "\"}}\n    inject: [{header: X-Key, value: \"${secret}\", credential: own}]\n",
	})
	r.env = []string{ring.Env}
	said := r.must("", "vault", "init", "--keyring") + r.must(canary.Value(), "vault", "set", "own")
	ask := func(want int, text string) {
		t.Helper()
		client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), Timeout: patience})
		if resp := testkit.Send(t, client, http.MethodPost, "https://"+host+"/v1/x", "a"); resp.Status != want || !strings.Contains(string(resp.Body), text) {
			t.Errorf("%d %.300s, want %d %s", resp.Status, resp.Body, want, text)
		}
	}
	r.start()
	ask(200, "ok")
	r.kill()
	ring.Lock(true)
	r.start()
	ask(http.StatusForbidden, "VAULT_LOCKED")
	if code, _, errs := r.cli("vault", "unlock"); code == 0 {
		t.Errorf("a locked keyring opened the vault: %s", errs)
	}
	ring.Lock(false)
	said += r.must("", "vault", "unlock")
	ask(200, "ok")
	r.kill()
	if n := up.Count("", ""); n != 2 {
		t.Errorf("%d arrived", n)
	}
	testkit.RequireFound(t, canary, testkit.InBytes("origin", up.Arrivals()[0].RawHead))
	testkit.Search(t, canary, testkit.InString("log", r.logs.String()), testkit.InString("commands", said), testkit.In(filepath.Join(r.data, "vault")))
}
