package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"software.sslmate.com/src/go-pkcs12"

	"waybill/internal/contract"
)

// testCAs returns PEM files of throw-away CAs, "ours" first.
func testCAs(t *testing.T, n int) [][]byte {
	t.Helper()
	out := make([][]byte, n)
	for i := range out {
		ca, err := newDemoCA(time.Now())
		if err != nil {
			t.Fatal(err)
		}
		out[i] = ca.pem
	}
	return out
}

func put(t *testing.T, dir, name string, data []byte) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// holds asserts which certificates a bundle has.
func holds(t *testing.T, what, path string, want ...[]byte) {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
	for i, w := range want {
		if !containsAll(data, w) {
			t.Errorf("%s (%s) lacks certificate %d", what, path, i)
		}
	}
	if got := len(certificates(data)); got != len(want) {
		t.Errorf("%s (%s) holds %d certificates, want %d", what, path, got, len(want))
	}
}

func newChildEnv(t *testing.T, ours, system []byte, inherited ...string) *childEnv {
	t.Helper()
	dir := t.TempDir()
	return &childEnv{
		Inherited: inherited, ProxyURL: "http://waybill:wbs_tok@127.0.0.1:7171", NoProxy: "localhost",
		CAFile: put(t, dir, "ca.pem", ours), Dir: t.TempDir(), SystemRoots: system,
	}
}

func build(t *testing.T, e *childEnv) *builtEnv {
	t.Helper()
	b, err := e.build()
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestChildEnvProxy(t *testing.T) {
	ca := testCAs(t, 2)
	e := newChildEnv(t, ca[0], ca[1],
		"PATH=/bin", "NO_PROXY=*", "no_proxy=api.stripe.com", "ALL_PROXY=socks5://other:1", "npm_config_https_proxy=http://other", "NPM_CONFIG_NOPROXY=x",
		"HTTPS_PROXY=http://other:3128", "CLOUDSDK_PROXY_USERNAME=other")
	b := build(t, e)
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy", "GLOBAL_AGENT_HTTP_PROXY", "GLOBAL_AGENT_HTTPS_PROXY"} {
		if b.Set[name] != e.ProxyURL {
			t.Errorf("%s = %q", name, b.Set[name])
		}
	}
	for _, name := range []string{"NO_PROXY", "no_proxy", "GLOBAL_AGENT_NO_PROXY"} {
		if b.Set[name] != "localhost" {
			t.Errorf("%s = %q: an inherited list lets routes slip past", name, b.Set[name])
		}
	}
	if b.Set["NODE_USE_ENV_PROXY"] != "1" || b.Set["CLOUDSDK_PROXY_PORT"] != "7171" || b.Set["CLOUDSDK_PROXY_PASSWORD"] != "wbs_tok" {
		t.Errorf("set: %v", b.Set)
	}
	env := b.Environ(e.Inherited)
	for _, name := range []string{"ALL_PROXY", "npm_config_https_proxy", "NPM_CONFIG_NOPROXY"} {
		if v, ok := lookupOK(env, name); ok {
			t.Errorf("%s=%s is still there and leads around the proxy", name, v)
		}
	}
	if lookup(env, "PATH") != "/bin" {
		t.Error("PATH was lost")
	}
	e.AllProxy = true
	if b := build(t, e); b.Set["ALL_PROXY"] != e.ProxyURL || slices.Contains(b.Unset, "ALL_PROXY") {
		t.Errorf("with --all-proxy: ALL_PROXY = %q, unset %v", b.Set["ALL_PROXY"], b.Unset)
	}
}

func TestChildEnvBundles(t *testing.T) {
	ca := testCAs(t, 4)
	ours, system, corporate, extra := ca[0], ca[1], ca[2], ca[3]
	dir := t.TempDir()
	home := t.TempDir()
	hashed := filepath.Join(dir, "certs.d")
	if err := os.Mkdir(hashed, 0o700); err != nil {
		t.Fatal(err)
	}
	put(t, hashed, "a.pem", corporate)
	put(t, hashed, "link.0", corporate)
	put(t, hashed, "b.pem", extra)
	put(t, home, ".npmrc", []byte("registry=https://r.example\ncafile = \""+put(t, dir, "npm.pem", extra)+"\"\n"))

	withOurs := put(t, dir, "with-ours.pem", joinPEM(corporate, ours))
	e := newChildEnv(t, ours, system,
		"HOME="+home,
		"REQUESTS_CA_BUNDLE="+put(t, dir, "corporate.pem", []byte(strings.TrimSpace(string(corporate)))), // no newline at the end
		"CURL_CA_BUNDLE="+hashed,
		"GIT_SSL_CAINFO="+withOurs,
		"AWS_CA_BUNDLE="+filepath.Join(dir, "gone.pem"),
		"PIP_CERT="+put(t, dir, "empty.pem", []byte("no certificates")),
		"NODE_EXTRA_CA_CERTS="+put(t, dir, "node.pem", extra),
		"CODEX_CA_CERTIFICATE="+put(t, dir, "codex.pem", corporate),
	)
	b := build(t, e)
	holds(t, "SSL_CERT_FILE", b.Set["SSL_CERT_FILE"], system, ours)
	holds(t, "CARGO_HTTP_CAINFO", b.Set["CARGO_HTTP_CAINFO"], system, ours)
	holds(t, "REQUESTS_CA_BUNDLE", b.Set["REQUESTS_CA_BUNDLE"], corporate, ours)
	holds(t, "CURL_CA_BUNDLE", b.Set["CURL_CA_BUNDLE"], corporate, extra, ours)
	holds(t, "npm_config_cafile", b.Set["npm_config_cafile"], extra, ours)
	holds(t, "NODE_EXTRA_CA_CERTS", b.Set["NODE_EXTRA_CA_CERTS"], extra, ours)
	holds(t, "DENO_CERT", b.Set["DENO_CERT"], ours)
	holds(t, "CODEX_CA_CERTIFICATE", b.Set["CODEX_CA_CERTIFICATE"], corporate, ours)
	if b.Set["GIT_SSL_CAINFO"] != withOurs {
		t.Errorf("GIT_SSL_CAINFO = %s, want the inherited file, which has our CA", b.Set["GIT_SSL_CAINFO"])
	}
	holds(t, "AWS_CA_BUNDLE (unreadable)", b.Set["AWS_CA_BUNDLE"], system, ours)
	holds(t, "PIP_CERT (empty)", b.Set["PIP_CERT"], system, ours)
	if len(b.Warnings) != 2 || !strings.Contains(strings.Join(b.Warnings, "\n"), "AWS_CA_BUNDLE") || !strings.Contains(strings.Join(b.Warnings, "\n"), "PIP_CERT") {
		t.Errorf("warnings: %q, want one each for AWS_CA_BUNDLE and PIP_CERT", b.Warnings)
	}
	for _, name := range replacingCA {
		if b.Set[name] == "" {
			t.Errorf("%s is not set", name)
		}
	}
}

// A nested run must not lose the CA of the run around it.
func TestChildEnvNested(t *testing.T) {
	ca := testCAs(t, 3)
	outer := newChildEnv(t, ca[0], ca[2], "JAVA_TOOL_OPTIONS=-Xmx1g")
	first := build(t, outer)
	inner := newChildEnv(t, ca[1], ca[2], first.Environ(outer.Inherited)...)
	second := build(t, inner)
	holds(t, "SSL_CERT_FILE", second.Set["SSL_CERT_FILE"], ca[2], ca[0], ca[1])
	holds(t, "NODE_EXTRA_CA_CERTS", second.Set["NODE_EXTRA_CA_CERTS"], ca[0], ca[1])
	certs, err := readTrustStore(javaOption(second.Set["JAVA_TOOL_OPTIONS"], "javax.net.ssl.trustStore"), pkcs12.DefaultPassword)
	if err != nil || len(certs) != 3 {
		t.Errorf("trust store for Java holds %d certificates (%v), want 3", len(certs), err)
	}
	if !strings.HasPrefix(second.Set["JAVA_TOOL_OPTIONS"], "-Xmx1g ") {
		t.Errorf("JAVA_TOOL_OPTIONS = %q: inherited options come first, ours win", second.Set["JAVA_TOOL_OPTIONS"])
	}
	rc, err := os.ReadFile(second.Set["WGETRC"])
	if err != nil || strings.Count(string(rc), "ca_certificate") != 1 {
		t.Errorf("wgetrc %q, %v: want one ca_certificate", rc, err)
	}
}

func TestChildEnvWget(t *testing.T) {
	ca := testCAs(t, 3)
	home, dir := t.TempDir(), t.TempDir()
	put(t, home, ".wgetrc", []byte("tries = 3\nhttps_proxy = http://other:3128\nCA-Certificate = "+put(t, dir, "corporate.pem", ca[2])+"\nuse_proxy = off"))
	b := build(t, newChildEnv(t, ca[0], ca[1], "HOME="+home))
	rc, err := os.ReadFile(b.Set["WGETRC"])
	if err != nil {
		t.Fatal(err)
	}
	if text := string(rc); !strings.Contains(text, "tries = 3\n") || strings.Contains(text, "proxy") {
		t.Errorf("wgetrc:\n%s\nwant the person's own settings, without a way around the proxy", text)
	}
	_, path, _ := strings.Cut(strings.TrimSpace(string(rc[strings.LastIndex(strings.TrimSpace(string(rc)), "\n")+1:])), " = ")
	holds(t, "ca_certificate", path, ca[2], ca[0])
}

// The child never sees a variable from which Waybill reads a secret; a placeholder
// takes its place where a client library insists on one.
func TestChildEnvSecrets(t *testing.T) {
	contract.Covers(t, "C2")
	ca := testCAs(t, 2)
	e := newChildEnv(t, ca[0], ca[1], "OPENAI_API_KEY=canary-real", "STRIPE_LIVE=canary-real", "ANTHROPIC_API_KEY=the-users-own")
	e.Secrets = []string{"OPENAI_API_KEY", "STRIPE_LIVE", "NOT_SET"}
	e.Placeholders = placeholderValues(func(string) bool { return false }, false)
	b := build(t, e)
	env := b.Environ(e.Inherited)
	if all := strings.Join(env, "\n"); strings.Contains(all, "canary-real") {
		t.Error("the child's environment holds a secret of Waybill's")
	}
	if v := lookup(env, "OPENAI_API_KEY"); v != "sk-"+placeholderToken {
		t.Errorf("OPENAI_API_KEY = %q", v)
	}
	if v := lookup(env, "ANTHROPIC_API_KEY"); v != "the-users-own" {
		t.Errorf("ANTHROPIC_API_KEY = %q: placeholders are for unset variables", v)
	}
	if _, ok := lookupOK(env, "STRIPE_LIVE"); ok {
		t.Error("STRIPE_LIVE is set")
	}
}

func TestPlaceholders(t *testing.T) {
	routed := func(host string) bool { return host == "api.github.com" }
	if v := placeholderValues(routed, false); v["GH_TOKEN"] == "" || v["OPENAI_API_KEY"] == "" || v["HF_TOKEN"] != "" {
		t.Errorf("default deny: %v", v)
	}
	if v := placeholderValues(routed, true); v["GH_TOKEN"] == "" || v["OPENAI_API_KEY"] != "" {
		t.Errorf("default tunnel: %v; a placeholder would shadow the program's own login", v)
	}
	for name, v := range placeholderValues(func(string) bool { return true }, false) {
		if !strings.Contains(v, placeholderToken) {
			t.Errorf("%s = %q is not recognisable as a placeholder", name, v)
		}
	}
}

func TestNoProxy(t *testing.T) {
	routed := func(host string) bool { return host == "127.0.0.1" }
	if got := noProxyFor(nil, routed); got != "localhost,::1" {
		t.Errorf("NO_PROXY = %q: a routed name must not slip past", got)
	}
	empty := ""
	if got := noProxyFor(&empty, routed); got != "" {
		t.Errorf("--no-proxy '' gives %q", got)
	}
}

func TestShellQuoting(t *testing.T) {
	b := &builtEnv{Set: map[string]string{"A": `it's \ "x" $HOME`}, Unset: []string{"B"}}
	for shell, want := range map[string]string{
		"sh":         "unset B\nexport A='it'\\''s \\ \"x\" $HOME'\n",
		"fish":       "set -e B\nset -gx A 'it\\'s \\\\ \"x\" $HOME'\n",
		"powershell": "Remove-Item -ErrorAction SilentlyContinue Env:B\n$env:A = 'it''s \\ \"x\" $HOME'\n",
	} {
		var out strings.Builder
		if err := shells[shell](&out, b); err != nil || out.String() != want {
			t.Errorf("%s: %q, %v; want %q", shell, out.String(), err, want)
		}
	}
}
