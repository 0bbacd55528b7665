package hashicorp

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"waybill/inject"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

// store speaks as much of the HTTP API of HashiCorp Vault and OpenBao as is used here,
// written from its documentation: KV v2, dynamic secrets with leases, token, AppRole and
// Kubernetes logins.
type store struct {
	*httptest.Server
	mu      sync.Mutex
	tokens  map[string]bool
	logins  int
	reads   int
	renewed int
	ttl     int
	broken  func(w http.ResponseWriter) bool
}

func newStore(t *testing.T) *store {
	t.Helper()
	s := &store{tokens: map[string]bool{"CANARY-root": true}, ttl: 3600}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	t.Setenv("VAULT_TOKEN", "CANARY-environment") // has no say
	t.Setenv("VAULT_ADDR", "http://127.0.0.1:1")
	return s
}

func (s *store) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	body, _ := io.ReadAll(r.Body)
	if s.broken != nil && s.broken(w) {
		return
	}
	fail := func(status int) {
		w.WriteHeader(status)
		_, _ = io.WriteString(w, `{"errors":["CANARY"]}`)
	}
	var in map[string]any
	_ = json.Unmarshal(body, &in)
	switch path := r.URL.Path; {
	case path == "/v1/auth/approle/login" && in["role_id"] == "role" && in["secret_id"] == "CANARY-secret-id",
		path == "/v1/auth/k8s/login" && in["role"] == "waybill" && in["jwt"] == "CANARY.jwt.x":
		s.logins++
		token := fmt.Sprintf("CANARY-login-%d", s.logins)
		s.tokens[token] = true
		_, _ = fmt.Fprintf(w, `{"auth":{"client_token":%q,"lease_duration":%d,"renewable":true}}`, token, s.ttl)
	case strings.Contains(path, "/login"):
		fail(400)
	case !s.tokens[r.Header.Get("X-Vault-Token")]:
		fail(403)
	case path == "/v1/secret/data/stripe" && r.Header.Get("X-Vault-Namespace") == "team":
		s.reads++
		_, _ = fmt.Fprintf(w, `{"data":{"data":{"key":"CANARY-value-%d","n":5},"metadata":{"version":%d,"created_time":"2026-11-30T12:00:00Z"}}}`, s.reads, 10+s.reads)
	case path == "/v1/secret/data/forbidden":
		fail(403)
	case path == "/v1/database/creds/ro":
		s.reads++
		_, _ = fmt.Fprintf(w, `{"lease_id":"database/creds/ro/L%d","lease_duration":%d,"renewable":true,"data":{"username":"u","password":"CANARY-db-%d"}}`, s.reads, s.ttl, s.reads)
	case path == "/v1/sys/leases/renew":
		s.renewed++
		_, _ = fmt.Fprintf(w, `{"lease_id":%q,"lease_duration":%d,"renewable":true}`, in["lease_id"], s.ttl)
	default:
		fail(404)
	}
}

func file(t *testing.T, v string) inject.Source {
	t.Helper()
	return inject.FileSource(testkit.WriteFile(t, "s", []byte(v)))
}

func TestLoginsAndReads(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	s := newStore(t)
	kv := inject.HashicorpSpec{Address: s.URL, Namespace: "team", Mount: "secret", Path: "stripe", Field: "key"}
	for i, tc := range []struct {
		change func(*inject.HashicorpSpec)
		login  Login
	}{
		{func(h *inject.HashicorpSpec) { h.Token = &inject.Spec{} }, Login{Token: file(t, "CANARY-root")}},
		{func(h *inject.HashicorpSpec) { h.AppRole = &inject.AppRoleSpec{RoleID: "role"} }, Login{SecretID: file(t, "CANARY-secret-id\n")}},
		{func(h *inject.HashicorpSpec) {
			h.Kubernetes = &inject.KubernetesAuthSpec{Mount: "k8s", Role: "waybill", JWTFile: testkit.WriteFile(t, "jwt", []byte("CANARY.jwt.x"))}
		}, Login{}},
	} {
		spec := kv
		tc.change(&spec)
		m, err := Source(spec, tc.login, inject.CacheOptions{}).FetchRaw(t.Context())
		if err != nil || string(m.Raw) != fmt.Sprintf("CANARY-value-%d", i+1) || m.Version != fmt.Sprintf("v%d", 11+i) {
			t.Errorf("%d: %v %s", i, err, m.Version)
		}
	}
	// A revoked login is made again, once.
	r := &reader{spec: kv, login: Login{SecretID: file(t, "CANARY-secret-id")}}
	r.spec.AppRole = &inject.AppRoleSpec{RoleID: "role"}
	if _, err := r.fetch(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.mu.Lock()
	s.tokens = map[string]bool{}
	before := s.logins
	s.mu.Unlock()
	if _, err := r.fetch(t.Context()); err != nil || s.logins != before+1 {
		t.Errorf("%v, %d logins", err, s.logins-before)
	}
}

// A lease is renewed for as long as the store gives the whole of it.
func TestLeases(t *testing.T) {
	contract.Covers(t, "C1")
	s := newStore(t)
	r := &reader{spec: inject.HashicorpSpec{Address: s.URL, Mount: "database", Path: "creds/ro", Field: "password", Dynamic: true}, login: Login{Token: file(t, "CANARY-root")}}
	for i, want := range []struct {
		value   string
		ttl     int
		renewed int
	}{{"CANARY-db-1", 3600, 0}, {"CANARY-db-1", 3600, 1}, {"CANARY-db-2", 60, 2}, {"CANARY-db-2", 60, 3}} {
		s.mu.Lock()
		s.ttl = want.ttl
		s.mu.Unlock()
		m, err := r.fetch(t.Context())
		if err != nil || string(m.Raw) != want.value || s.renewed != want.renewed || time.Until(m.Expires) > time.Duration(want.ttl)*time.Second || m.Version != "lease:L"+want.value[len(want.value)-1:] {
			t.Errorf("%d: %v %d %s", i, err, s.renewed, m.Version)
		}
	}
}

func TestFailures(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	answer := func(status int, body string) func(http.ResponseWriter) bool {
		return func(w http.ResponseWriter) bool {
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body)
			return true
		}
	}
	for name, tc := range map[string]struct {
		path, field, token string
		broken             func(http.ResponseWriter) bool
		down               bool
		code               outcome.Code
	}{
		"missing":       {path: "none", token: "CANARY-root", code: outcome.CodeCredentialMissing},
		"missing field": {path: "stripe", field: "none", token: "CANARY-root", code: outcome.CodeCredentialMissing},
		"denied":        {path: "forbidden", token: "CANARY-root", code: outcome.CodeCredentialRefused},
		"wrong token":   {path: "stripe", token: "CANARY-wrong", code: outcome.CodeCredentialRefused},
		"sealed":        {path: "stripe", token: "CANARY-root", broken: answer(503, `{"errors":["Vault is sealed CANARY"]}`), code: outcome.CodeCredentialUnavailable},
		"malformed":     {path: "stripe", token: "CANARY-root", broken: answer(200, `{"data": CANARY`), code: outcome.CodeCredentialInvalid},
		"unreachable":   {path: "stripe", token: "CANARY-root", down: true, code: outcome.CodeCredentialUnavailable},
		"redirect": {path: "stripe", token: "CANARY-root", broken: func(w http.ResponseWriter) bool {
			w.Header().Set("Location", "http://127.0.0.1:1/")
			w.WriteHeader(307)
			return true
		}, code: outcome.CodeCredentialRefused},
		"hangs": {path: "stripe", token: "CANARY-root", broken: func(http.ResponseWriter) bool { time.Sleep(300 * time.Millisecond); return true }, code: outcome.CodeCredentialUnavailable},
	} {
		s := newStore(t)
		s.broken = tc.broken
		if tc.down {
			s.Close()
		}
		o := inject.CacheOptions{}
		if name == "hangs" {
			o.Timeout = 50 * time.Millisecond
		}
		src := Source(inject.HashicorpSpec{Address: s.URL, Namespace: "team", Mount: "secret", Path: tc.path, Field: tc.field, Token: &inject.Spec{}}, Login{Token: file(t, tc.token)}, o)
		_, err := src.Fetch(t.Context())
		var e *inject.Error
		if !errors.As(err, &e) || e.Code != tc.code && !(name == "redirect" && e.Code != outcome.CodeNone) || strings.Contains(fmt.Sprintf("%v %v", err, errors.Unwrap(err)), "CANARY") {
			t.Errorf("%s: %v", name, err)
		}
	}
}
