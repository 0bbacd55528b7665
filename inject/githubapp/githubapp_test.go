package githubapp

import (
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"errors"
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

// The assertion is one that GitHub takes, the token the installation's; failures have
// their codes. The server is written from GitHub's REST documentation.
func TestInstallationToken(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	status, body, got := http.StatusCreated, `{"token":"CANARY-installation","expires_at":"`+time.Now().Add(time.Hour).UTC().Format(time.RFC3339)+`"}`, ""
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		got = r.Method + " " + r.URL.Path + " " + string(b)
		parts := strings.Split(strings.TrimPrefix(r.Header.Get("Authorization"), "Bearer "), ".")
		var claims struct {
			Iss      string
			Iat, Exp int64
		}
		payload, _ := base64.RawURLEncoding.DecodeString(parts[1])
		sig, _ := base64.RawURLEncoding.DecodeString(parts[2])
		sum := sha256.Sum256([]byte(parts[0] + "." + parts[1]))
		now := time.Now().Unix()
		if json.Unmarshal(payload, &claims) != nil || claims.Iss != "123" || claims.Iat > now || claims.Exp > now+600 || claims.Exp < now || rsa.VerifyPKCS1v15(&key.PublicKey, crypto.SHA256, sum[:], sig) != nil {
			w.WriteHeader(http.StatusUnauthorized)
			return
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}))
	defer s.Close()
	spec := inject.GitHubAppSpec{AppID: "123", InstallationID: "45", API: s.URL, Repositories: []string{"widgets"}, Permissions: map[string]string{"contents": "read"}}
	fetch := func(block *pem.Block) (inject.Material, error) {
		return Source(spec, inject.FileSource(testkit.WriteFile(t, "key", pem.EncodeToMemory(block))), inject.CacheOptions{}).FetchRaw(t.Context())
	}
	good := &pem.Block{Type: "PRIVATE KEY", Bytes: pkcs8}
	for _, b := range []*pem.Block{good, {Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(key)}} {
		m, err := fetch(b)
		if err != nil || string(m.Raw) != "CANARY-installation" || !strings.HasPrefix(m.Version, "mtime:") || m.Issue == "" {
			t.Errorf("%s: %v", b.Type, err)
		}
	}
	if got != `POST /app/installations/45/access_tokens {"repositories":["widgets"],"permissions":{"contents":"read"}}` {
		t.Error(got)
	}
	other, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range map[string]struct {
		key    *pem.Block
		status int
		body   string
		code   outcome.Code
	}{
		"another key": {&pem.Block{Type: "RSA PRIVATE KEY", Bytes: x509.MarshalPKCS1PrivateKey(other)}, 201, body, outcome.CodeCredentialRefused},
		"no key":      {&pem.Block{Type: "RSA PRIVATE KEY", Bytes: []byte("CANARY")}, 201, body, outcome.CodeCredentialInvalid},
		"missing":     {good, 404, "CANARY", outcome.CodeCredentialRefused},
		"down":        {good, 502, "CANARY", outcome.CodeCredentialUnavailable},
		"malformed":   {good, 201, "CANARY", outcome.CodeCredentialInvalid},
		"no end":      {good, 201, `{"token":"CANARY"}`, outcome.CodeCredentialInvalid},
	} {
		status, body = tc.status, tc.body
		_, err := fetch(tc.key)
		var e *inject.Error
		if !errors.As(err, &e) || e.Code != tc.code || strings.Contains(err.Error(), "CANARY") {
			t.Errorf("%s: %v", name, err)
		}
	}
	s.Close()
	_, err = fetch(good)
	var e *inject.Error
	if !errors.As(err, &e) || e.Code != outcome.CodeCredentialUnavailable {
		t.Errorf("unreachable: %v", err)
	}
}
