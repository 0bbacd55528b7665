package e2e

import (
	"archive/tar"
	"compress/gzip"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

// failingSource is a source that gives no secret, and what the caller is told.
type failingSource struct {
	name, from, more string
	code             outcome.Code
}

// failingSources are all the ways in which sources fail: nothing there, no right, nobody
// there, nothing that can be read, no answer in time.
func failingSources(k *sources) []failingSource {
	missing, refused, invalid, away := outcome.CodeCredentialMissing, outcome.CodeCredentialRefused, outcome.CodeCredentialInvalid, outcome.CodeCredentialUnavailable
	const lines = "cat s-command; echo; cat s-command"
	out := []failingSource{
		{"env-missing", "{env: E_NOWHERE}", "", missing},
		{"env-malformed", "{env: E_LINES}", "", invalid},
		{"file-missing", "{file: nowhere}", "", missing},
		{"file-denied", "{file: mount}", "", invalid}, // a folder: root reads every file
		{"file-malformed", "{file: pair.pem}", "", invalid},
		{"command-missing", "{command: [./no-such-program]}", "", invalid},
		{"command-denied", `{command: [sh, -c, "cat s-command; cat s-command >&2; exit 1"]}`, "", away},
		{"command-malformed", `{command: [sh, -c, "` + lines + `"]}`, "", invalid},
		{"command-slow", `{command: [sh, -c, "cat s-command; exec sleep 30"]}`, ", timeout: 100ms", away},
		{"vault-missing", "{vault: unset}", "", missing},
		{"kubernetes-missing", "{kubernetes: {folder: mount, key: none}}", "", missing},
		{"kubernetes-malformed", "{kubernetes: {folder: mount, key: pem}}", "", invalid},
		{"keyring-missing", "{keyring: {service: api, account: nobody}}", "", missing},
		{"keyring-malformed", "{keyring: {service: api, account: lines}}", "", invalid},
		{"hashicorp-missing", `{hashicorp_vault: {address: "` + k.hashicorp + `", mount: secret, path: none, token: {file: s-root}}}`, "", missing},
		{"hashicorp-no-field", `{hashicorp_vault: {address: "` + k.hashicorp + `", mount: secret, path: api, field: none, token: {file: s-root}}}`, "", missing},
		{"lease-login", `{hashicorp_vault: {address: "` + k.hashicorp + `", mount: database, path: creds/ro, dynamic: true, approle: {role_id: role, secret_id: {file: s-connect}}}}`, "", refused},
		{"aws-missing", `{aws: {secret: none, region: eu-west-1, endpoint: "` + k.aws + `"}}`, "", missing},
		{"onepassword-missing", `{onepassword: {host: "` + k.onepassword + `", vault: Automation, item: none, field: f, token: {file: s-connect}}}`, "", missing},
		{"oauth-secret", `{oauth: {token_url: "` + k.tokens + `/oauth", client_id: c, client_secret: {file: nowhere}}}`, "", missing},
		{"refresh-token", `{oauth: {token_url: "` + k.tokens + `/refresh", client_id: c, refresh_token: {vault: unset}}}`, "", missing},
		{"app-key", `{github_app: {app_id: "1", installation_id: "7", private_key: {file: s-file}, api: "` + k.tokens + `"}}`, "", invalid},
	}
	remote := map[string]func(url string) string{
		"hashicorp": func(u string) string {
			return `{hashicorp_vault: {address: "` + u + `", mount: secret, path: api, token: {file: s-root}}}`
		},
		"lease": func(u string) string {
			return `{hashicorp_vault: {address: "` + u + `", mount: database, path: creds/ro, dynamic: true, approle: {role_id: role, secret_id: {file: s-secretid}}}}`
		},
		"aws": func(u string) string { return `{aws: {secret: prod/api, region: eu-west-1, endpoint: "` + u + `"}}` },
		"onepassword": func(u string) string {
			return `{onepassword: {host: "` + u + `", vault: v, item: i, field: f, token: {file: s-connect}}}`
		},
		"oauth": func(u string) string {
			return `{oauth: {token_url: "` + u + `", client_id: c, client_secret: {file: s-client}}}`
		},
		"refresh": func(u string) string {
			return `{oauth: {token_url: "` + u + `", client_id: c, client_secret: {file: s-client}, refresh_token: {vault: refresh}}}`
		},
		"app": func(u string) string {
			return `{github_app: {app_id: "1", installation_id: "7", private_key: {file: app.pem}, api: "` + u + `"}}`
		},
	}
	// A redirect is followed by none: with it would go what the store is asked with.
	moved := map[string]outcome.Code{"hashicorp": away, "lease": away, "aws": refused, "onepassword": invalid, "oauth": invalid, "refresh": invalid, "app": invalid}
	for _, name := range slices.Sorted(maps.Keys(remote)) {
		for how, code := range map[string]outcome.Code{"denied": refused, "down": away, "malformed": invalid, "slow": away, "moved": moved[name]} {
			more := ""
			if how == "slow" {
				more = ", timeout: 150ms"
			}
			out = append(out, failingSource{name + "-" + how, remote[name](k.bad + "/" + how), more, code})
		}
		out = append(out, failingSource{name + "-unreachable", remote[name]("http://127.0.0.1:1"), "", away})
	}
	return out
}

// TestCredentialCanaries: every source with every way of attaching, in success and in
// every failure, at debug level – the secret is where it belongs and nowhere else: not in
// logs, errors, the data folder, metrics, answers of the API and of the commands, a
// bugreport, an explanation, an exported audit log (C1-C5, L4, V2).
func TestCredentialCanaries(t *testing.T) {
	contract.Covers(t, "B3", "C1", "C2", "C3", "C4", "C5", "D2", "E6", "L4", "N2", "V2")
	ca := testkit.NewCA(t)
	k := newSources(t, ca)
	all, failures := combos(), failingSources(k)
	reply := func(a testkit.Arrival) []testkit.Step {
		if strings.Contains(a.Target, "/cut") {
			return []testkit.Step{testkit.Write("HTTP/1.1 201 Created\r\nContent-Length: 99\r\n\r\n" + a.Target), testkit.Close()}
		}
		return []testkit.Step{testkit.Reply(200, string(a.RawHead)+string(a.Body))} // it repeats what it got
	}
	cfg := ca.Server("*.canary.test")
	mutual := ca.RequireClient(cfg)
	cfg.GetConfigForClient = func(h *tls.ClientHelloInfo) (*tls.Config, error) {
		if strings.Contains(h.ServerName, "-mtls.") {
			return mutual, nil
		}
		return nil, nil //nolint:nilnil // the one that asks
	}
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: cfg, Handler: reply})
	var routes, credentials strings.Builder
	route := func(name, inject string) {
		fmt.Fprintf(&routes, "  - name: %s\n    match: {host: %s.canary.test}\n    upstream: {roots: roots.pem, resolve: {%s.canary.test: %q}}\n    inject: [%s]\n", name, name, name, up.Addr(), inject)
	}
	for _, c := range all {
		route(c.name(), c.inject())
	}
	for _, f := range failures {
		route(f.name, `{header: X-Key, value: "${secret}", credential: key-of-`+f.name+`}`)
		fmt.Fprintf(&credentials, "  key-of-%s: {from: %s%s}\n", f.name, f.from, f.more)
	}
	boot := newRig(t, ca, rigOptions{})
	auditKey := filepath.Join(boot.dir, "audit.key")
	public := strings.Fields(boot.must("", "audit", "keygen", "--out", auditKey))[0]
	r := newRig(t, ca, rigOptions{routes: routes.String(), top: k.yaml + credentials.String() + "audit: {recipient: " + public + "}\n"})
	said := k.install(r)
	said += r.must("", "check") + r.must("", "explain", "POST", "https://file-header.canary.test/v1/ok")
	r.start()
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://" + r.addr, Roots: r.roots()})
	var answers strings.Builder
	var mu sync.Mutex
	send := func(host, path string) *testkit.Response {
		resp := testkit.Send(t, client, http.MethodPost, "https://"+host+".canary.test"+path, `{"amount": 5}`, "Content-Type", "application/json", "Cookie", "sid=placeholder", "Authorization", "Bearer placeholder")
		mu.Lock()
		defer mu.Unlock()
		fmt.Fprintln(&answers, resp.Status, resp.Header)
		answers.Write(resp.Body)
		return resp
	}
	var pool sync.WaitGroup
	work := make(chan func())
	for range 6 {
		pool.Go(func() {
			for f := range work {
				f()
			}
		})
	}
	for _, c := range all {
		work <- func() {
			for _, path := range []string{"/v1/ok", "/v1/cut"} {
				if resp := send(c.name(), path); path == "/v1/ok" && resp.Status != 200 {
					t.Errorf("%s: %d %s", c.name(), resp.Status, resp.Body)
				}
			}
		}
	}
	for _, f := range failures {
		work <- func() {
			resp := send(f.name, "/v1/never")
			body := string(resp.Body)
			if got := resp.Header.Get("Waybill-Outcome"); !strings.Contains(got, "phase=credential_injection") || !strings.Contains(body, f.code.String()) || strings.Contains(body, "key-of-") {
				t.Errorf("%s: %d %s %.200s, want %s", f.name, resp.Status, got, body, f.code)
			}
		}
	}
	close(work)
	pool.Wait()
	said += r.must("", "vault", "list") + r.must("", "vault", "lock")
	// Locked: what is in the vault, and what was made of it.
	for _, name := range []string{"vault-query", "refresh-header"} {
		if resp := send(name, "/v1/never"); !strings.Contains(string(resp.Body), "VAULT_LOCKED") || resp.Status != http.StatusForbidden {
			t.Errorf("locked: %s: %d %s", name, resp.Status, resp.Body)
		}
	}
	if resp := send("oauth-header", "/v1/again"); resp.Status != 200 {
		t.Errorf("a token that has nothing to do with the vault: %d %s", resp.Status, resp.Body)
	}
	if !strings.Contains(get(t, r.meters), "\nwaybill_vault_locked 1\n") {
		t.Error("the metrics do not say that the vault is locked")
	}
	said += r.must("", "vault", "unlock")
	for _, name := range []string{"vault-query", "refresh-header"} {
		if resp := send(name, "/v1/again"); resp.Status != 200 {
			t.Errorf("unlocked again: %s: %d %s", name, resp.Status, resp.Body)
		}
	}
	metrics := get(t, r.meters)
	for _, want := range []string{"\nwaybill_vault_locked 0\n", `waybill_credential_refreshes_total{credential="oauth",result="success"}`, `waybill_credential_refreshes_total{credential="key-of-oauth-denied",result="failure"}`} {
		if !strings.Contains(metrics, want) {
			t.Errorf("the metrics do not have %q", want)
		}
	}
	list := r.must("", "actions", "--json")
	for i, v := range r.actions() {
		if i < 3 { // for people; --json has them all
			list += r.must("", "action", v.InvocationID)
		}
		if i%9 == 0 { // the caller's own view, and the result
			for _, path := range []string{"", "/result"} {
				resp := testkit.Send(t, client, http.MethodGet, "http://waybill.internal/v1/actions/"+v.InvocationID+path, "")
				fmt.Fprintln(&answers, resp.Status, resp.Header, string(resp.Body))
			}
		}
	}
	bundle := filepath.Join(r.dir, "report.tar.gz")
	said += r.must("", "bugreport", "--no-clients", "-o", bundle) + r.must("", "status") + r.must("", "explain", "POST", "https://vault-query.canary.test/v1/x?q=1", "--json")
	r.p.Signal(t, syscall.SIGTERM) // the audit log catches up
	r.p.Wait(t, patience)
	r.kill()
	exported := r.must("", "audit", "export", "--key", auditKey)
	if !strings.Contains(exported, "CREDENTIAL_AUTHORIZED") {
		t.Error("the exported audit log says nothing of credentials")
	}

	// The secret arrived where it belongs …
	arrived := map[string]string{}
	for _, a := range up.Arrivals() {
		name, _, _ := strings.Cut(a.Authority, ".")
		arrived[name] += string(a.RawHead) + string(a.Body)
		if strings.Contains(a.Target, "never") {
			t.Errorf("%s %s was sent", name, a.Target)
		}
	}
	mark := regexp.MustCompile(`-0[a-z]+0`)
	for _, c := range all {
		got := arrived[c.name()]
		switch c.way {
		case "hmac", "sigv4", "mtls": // signatures and certificates hold no secret
			testkit.Search(t, k.canary, testkit.InString(c.name(), got))
			if got == "" {
				t.Errorf("%s: nothing arrived", c.name())
			}
		default:
			testkit.RequireFound(t, k.canary, testkit.InString(c.name(), got))
		}
		for _, m := range mark.FindAllString(got, -1) {
			if m != "-0"+c.source+"0" {
				t.Errorf("%s got the secret %s", c.name(), m)
			}
		}
	}
	// … and is nowhere else; the vault in the data folder is one of the places.
	unpacked := unpack(t, bundle)
	for name, c := range map[string]*testkit.Canary{"secrets": k.canary, "app key": k.appKey, "client key": k.pemKey} {
		t.Run(name, func(t *testing.T) {
			testkit.Search(t, c, testkit.InString("log", r.logs.String()), testkit.InString("answers", answers.String()), testkit.InString("metrics", metrics), testkit.InString("actions", list),
				testkit.InString("commands", said), testkit.InString("audit", exported), testkit.InString("bugreport", unpacked), testkit.In(r.data))
		})
	}
	// The rotated refresh token is stored: the old one is not used again after a restart.
	r.start()
	var doc struct {
		Secrets []struct {
			Name   string
			Serial int
		}
	}
	if err := json.Unmarshal([]byte(r.must("", "vault", "list", "--json")), &doc); err != nil {
		t.Fatal(err)
	}
	for _, s := range doc.Secrets {
		if s.Name == "refresh" && s.Serial < 2 {
			t.Errorf("the refresh token was stored %d times", s.Serial)
		}
	}
}

// unpack returns all that is in a gzipped tar archive.
func unpack(t *testing.T, file string) string {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return all.String()
		}
		if err != nil {
			t.Fatal(err)
		}
		all.WriteString(h.Name + "\n")
		if _, err := io.Copy(&all, r); err != nil { //nolint:gosec // our own archive
			t.Fatal(err)
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
