package hashicorp

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"waybill/inject"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

// store is the protocol server of testkit with the canaries of this package.
type store struct {
	*testkit.VaultStore
	*httptest.Server
}

func newStore(t *testing.T) *store {
	t.Helper()
	s := &store{VaultStore: &testkit.VaultStore{
		Token: "CANARY-root", RoleID: "role", SecretID: "CANARY-secret-id", Role: "waybill", JWT: "CANARY.jwt.x", Namespace: "team", TTL: 3600, Refusal: "CANARY",
		Value: func(n int) string { return fmt.Sprintf("CANARY-value-%d", n) }, Lease: func(n int) string { return fmt.Sprintf("CANARY-db-%d", n) },
	}}
	s.Server = httptest.NewServer(s.VaultStore)
	t.Cleanup(s.Close)
	t.Setenv("VAULT_TOKEN", "CANARY-environment") // has no say
	t.Setenv("VAULT_ADDR", "http://127.0.0.1:1")
	return s
}

func file(t *testing.T, v string) inject.Source {
	t.Helper()
	return inject.FileSource(testkit.WriteFile(t, "s", []byte(v)))
}

func TestLoginsAndReads(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	s := newStore(t)
	kv := inject.HashicorpSpec{Address: s.URL, Namespace: "team", Mount: "secret", Path: "api", Field: "key"}
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
	before := s.Logins
	s.Change(s.Revoke)
	if _, err := r.fetch(t.Context()); err != nil || s.Logins != before+1 {
		t.Errorf("%v, %d logins", err, s.Logins-before)
	}
}

// What a login and a lease were made with was taken away: both are made anew, also when a
// fetch runs at that moment.
func TestForget(t *testing.T) {
	contract.Covers(t, "C1")
	s := newStore(t)
	src := Source(inject.HashicorpSpec{Address: s.URL, Mount: "database", Path: "creds/ro", Field: "password", Dynamic: true, AppRole: &inject.AppRoleSpec{RoleID: "role"}}, Login{SecretID: file(t, "CANARY-secret-id")}, inject.CacheOptions{})
	value := func() string {
		t.Helper()
		m, err := src.FetchRaw(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		return string(m.Raw)
	}
	if first := value(); first != "CANARY-db-1" || value() != first || s.Logins != 1 {
		t.Fatalf("%d logins", s.Logins)
	}
	src.Forget()
	if got := value(); got != "CANARY-db-2" || s.Logins != 2 || s.Renewed != 0 {
		t.Errorf("%s, %d logins, %d renewals", got, s.Logins, s.Renewed)
	}
	r := &reader{}
	r.mu.Lock()
	r.forget() // does not wait
	r.mu.Unlock()
	if !r.forgotten.Load() {
		t.Error("a fetch that runs keeps what it logged in with for the next one")
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
		s.Change(func() { s.TTL = want.ttl })
		m, err := r.fetch(t.Context())
		if err != nil || string(m.Raw) != want.value || s.Renewed != want.renewed || time.Until(m.Expires) > time.Duration(want.ttl)*time.Second || m.Version != "lease:L"+want.value[len(want.value)-1:] {
			t.Errorf("%d: %v %d %s", i, err, s.Renewed, m.Version)
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
		"missing field": {path: "api", field: "none", token: "CANARY-root", code: outcome.CodeCredentialMissing},
		"denied":        {path: "forbidden", token: "CANARY-root", code: outcome.CodeCredentialRefused},
		"wrong token":   {path: "api", token: "CANARY-wrong", code: outcome.CodeCredentialRefused},
		"sealed":        {path: "api", token: "CANARY-root", broken: answer(503, `{"errors":["Vault is sealed CANARY"]}`), code: outcome.CodeCredentialUnavailable},
		"malformed":     {path: "api", token: "CANARY-root", broken: answer(200, `{"data": CANARY`), code: outcome.CodeCredentialInvalid},
		"unreachable":   {path: "api", token: "CANARY-root", down: true, code: outcome.CodeCredentialUnavailable},
		"redirect": {path: "api", token: "CANARY-root", broken: func(w http.ResponseWriter) bool {
			w.Header().Set("Location", "http://127.0.0.1:1/")
			w.WriteHeader(307)
			return true
		}, code: outcome.CodeCredentialRefused},
		"hangs": {path: "api", token: "CANARY-root", broken: testkit.Hang(300 * time.Millisecond), code: outcome.CodeCredentialUnavailable},
	} {
		s := newStore(t)
		s.Broken = tc.broken
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
