package onepassword

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

func TestConnect(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	store := &testkit.ConnectStore{Token: "CANARY-connect", Fields: map[string]string{"credential": "CANARY-value"}, Refusal: "CANARY"}
	s := httptest.NewServer(store)
	defer s.Close()
	fetch := func(vault, item, field, token string, timeout time.Duration) (inject.Material, error) {
		return Source(inject.OnePasswordSpec{Host: s.URL, Vault: vault, Item: item, Field: field}, inject.FileSource(testkit.WriteFile(t, "t", []byte(token))), inject.CacheOptions{Timeout: timeout}).FetchRaw(t.Context())
	}
	for _, at := range [][3]string{{"Automation", "API", "credential"}, {"v1", "i1", "f-credential"}} {
		m, err := fetch(at[0], at[1], at[2], "CANARY-connect", 0)
		if err != nil || string(m.Raw) != "CANARY-value" || m.Version != "v7" {
			t.Errorf("%v: %v %s", at, err, m.Version)
		}
	}
	answer := func(status int, body string) func(http.ResponseWriter) bool {
		return func(w http.ResponseWriter) bool {
			w.WriteHeader(status)
			_, _ = io.WriteString(w, body)
			return true
		}
	}
	for name, tc := range map[string]struct {
		vault, item, field, token string
		broken                    func(http.ResponseWriter) bool
		code                      outcome.Code
	}{
		"missing vault": {"none", "API", "credential", "CANARY-connect", nil, outcome.CodeCredentialMissing},
		"missing item":  {"Automation", "none", "credential", "CANARY-connect", nil, outcome.CodeCredentialMissing},
		"missing field": {"Automation", "API", "none", "CANARY-connect", nil, outcome.CodeCredentialMissing},
		"empty field":   {"Automation", "API", "empty", "CANARY-connect", nil, outcome.CodeCredentialMissing},
		"two vaults":    {"Twice", "API", "credential", "CANARY-connect", nil, outcome.CodeCredentialInvalid},
		"denied":        {"Automation", "API", "credential", "CANARY-wrong", nil, outcome.CodeCredentialRefused},
		"down":          {"Automation", "API", "credential", "CANARY-connect", answer(502, "CANARY"), outcome.CodeCredentialUnavailable},
		"malformed":     {"Automation", "API", "credential", "CANARY-connect", answer(200, "CANARY"), outcome.CodeCredentialInvalid},
		"redirect":      {"Automation", "API", "credential", "CANARY-connect", answer(302, "CANARY"), outcome.CodeCredentialInvalid},
		"hangs":         {"Automation", "API", "credential", "CANARY-connect", testkit.Hang(300 * time.Millisecond), outcome.CodeCredentialUnavailable},
	} {
		store.Change(func() { store.Broken = tc.broken })
		timeout := 5 * time.Second
		if name == "hangs" {
			timeout = 50 * time.Millisecond
		}
		_, err := fetch(tc.vault, tc.item, tc.field, tc.token, timeout)
		var e *inject.Error
		if !errors.As(err, &e) || e.Code != tc.code || strings.Contains(fmt.Sprintf("%v %v", err, errors.Unwrap(err)), "CANARY") {
			t.Errorf("%s: %v", name, err)
		}
	}
	s.Close()
	_, err := fetch("v1", "i1", "f1", "CANARY-connect", 0)
	var e *inject.Error
	if !errors.As(err, &e) || e.Code != outcome.CodeCredentialUnavailable {
		t.Errorf("unreachable: %v", err)
	}
}
