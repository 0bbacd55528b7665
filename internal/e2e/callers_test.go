package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// serviceAccountToken is a projected token as a cluster makes it.
func serviceAccountToken(t *testing.T, key *ecdsa.PrivateKey, change func(*jwt.Claims)) string {
	t.Helper()
	s, err := jose.NewSigner(jose.SigningKey{Algorithm: jose.ES256, Key: jose.JSONWebKey{Key: key, KeyID: "k1"}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	now := time.Now()
	c := jwt.Claims{Issuer: "https://cluster.example.test", Subject: "system:serviceaccount:agents:runner", Audience: jwt.Audience{"waybill"},
		Expiry: jwt.NewNumericDate(now.Add(time.Hour)), IssuedAt: jwt.NewNumericDate(now)}
	change(&c)
	token, err := jwt.Signed(s).Claims(c).Serialize()
	if err != nil {
		t.Fatal(err)
	}
	return token
}

// Callers are recognised by token, client certificate and service account, on a TLS
// listener; each sees its own actions and results alone, and nothing that is nearly right
// is let in (CONTRACT V4).
func TestCallerKinds(t *testing.T) {
	contract.Covers(t, "V4")
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Reply(201, "made")}
	}})
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	other, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	jwks, err := json.Marshal(jose.JSONWebKeySet{Keys: []jose.JSONWebKey{{Key: key.Public(), KeyID: "k1", Algorithm: "ES256", Use: "sig"}}})
	if err != nil {
		t.Fatal(err)
	}
	build, ops, stranger := ca.Client("build"), ca.Client("ops"), ca.Client("stranger")
	subject := func(c tls.Certificate) string {
		leaf, err := x509.ParseCertificate(c.Certificate[0])
		if err != nil {
			t.Fatal(err)
		}
		return leaf.Subject.String()
	}
	leafSum := sha256.Sum256(build.Certificate[0])
	sum := sha256.Sum256([]byte("tok-of-ci"))
	certFile, keyFile := testkit.WriteCert(t, ca.Leaf("127.0.0.1"))
	r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: up.Addr()}, top: fmt.Sprintf(`listen: {proxy_tls: {certificate: %q, key: %q, client_ca: roots.pem}}
callers:
  - {name: ci, token_sha256: %s}
  - {name: build, certificate: "sha256:%s"}
  - {name: ops, certificate: %q}
  - {name: runner, kubernetes: {jwks: jwks.json, issuer: "https://cluster.example.test", audience: waybill, service_account: agents/runner}}
`, certFile, keyFile, hex.EncodeToString(sum[:]), hex.EncodeToString(leafSum[:]), subject(ops))})
	r.write("jwks.json", string(jwks))
	r.start()
	roots := r.roots()
	roots.AppendCertsFromPEM(ca.PEM())
	client := func(bearer string, certs ...tls.Certificate) (through, direct *http.Client) {
		cfg := &tls.Config{RootCAs: roots, Certificates: certs}
		tr := &http.Transport{Proxy: http.ProxyURL(&url.URL{Scheme: "https", Host: r.addr}), TLSClientConfig: cfg, ProxyConnectHeader: http.Header{}}
		if bearer != "" {
			tr.ProxyConnectHeader.Set("Proxy-Authorization", "Bearer "+bearer)
		}
		plain := &http.Transport{TLSClientConfig: cfg.Clone()}
		t.Cleanup(tr.CloseIdleConnections)
		t.Cleanup(plain.CloseIdleConnections)
		return &http.Client{Transport: tr, Timeout: patience}, &http.Client{Transport: plain, Timeout: patience}
	}
	good := func(*jwt.Claims) {}
	type person struct {
		name, bearer string
		certs        []tls.Certificate
		id           string
		direct       *http.Client
	}
	people := []*person{
		{name: "ci", bearer: "tok-of-ci"}, {name: "build", certs: []tls.Certificate{build}}, {name: "ops", certs: []tls.Certificate{ops}},
		{name: "runner", bearer: serviceAccountToken(t, key, good)},
	}
	for _, who := range people {
		var through *http.Client
		through, who.direct = client(who.bearer, who.certs...)
		resp := testkit.Send(t, through, http.MethodPost, "https://"+payHost+"/v1/"+who.name, "x")
		if who.id = resp.Header.Get("Waybill-Invocation"); resp.Status != 201 || who.id == "" {
			t.Fatalf("%s: %d %s", who.name, resp.Status, resp.Body)
		}
	}
	for _, who := range people {
		for _, whose := range people {
			for _, what := range []string{"", "/result"} {
				req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "https://"+r.addr+"/v1/actions/"+whose.id+what, http.NoBody)
				if err != nil {
					t.Fatal(err)
				}
				if who.bearer != "" {
					req.Header.Set("Authorization", "Bearer "+who.bearer)
				}
				resp, err := who.direct.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				body, _ := io.ReadAll(resp.Body)
				_ = resp.Body.Close()
				if own := who == whose; own != (resp.StatusCode < 300) || !own && (resp.StatusCode != 404 || strings.Contains(string(body), whose.name)) {
					t.Errorf("%s asks for %s of %s: %d %s", who.name, what, whose.name, resp.StatusCode, body)
				}
			}
		}
	}
	arrived := len(up.Arrivals())
	for name, c := range map[string]struct {
		bearer string
		certs  []tls.Certificate
	}{
		"nothing":                 {},
		"unknown certificate":     {"", []tls.Certificate{stranger}},
		"another CA":              {"", []tls.Certificate{testkit.NewCA(t).Client("ops")}},
		"wrong token, known cert": {"tok", []tls.Certificate{build}},
		"another key":             {serviceAccountToken(t, other, good), nil},
		"another account":         {serviceAccountToken(t, key, func(c *jwt.Claims) { c.Subject = "system:serviceaccount:agents:other" }), nil},
		"another audience":        {serviceAccountToken(t, key, func(c *jwt.Claims) { c.Audience = jwt.Audience{"api"} }), nil},
		"another issuer":          {serviceAccountToken(t, key, func(c *jwt.Claims) { c.Issuer = "https://evil.example.test" }), nil},
		"expired":                 {serviceAccountToken(t, key, func(c *jwt.Claims) { c.Expiry = jwt.NewNumericDate(time.Now().Add(-time.Hour)) }), nil},
		"without an end":          {serviceAccountToken(t, key, func(c *jwt.Claims) { c.Expiry = nil }), nil},
	} {
		through, _ := client(c.bearer, c.certs...)
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+payHost+"/v1/nobody", strings.NewReader("x"))
		if err != nil {
			t.Fatal(err)
		}
		if resp, err := through.Do(req); err == nil {
			_ = resp.Body.Close()
			t.Errorf("%s: %d", name, resp.StatusCode)
		}
	}
	if got := len(up.Arrivals()); got != arrived {
		t.Errorf("%d of nobody's requests arrived", got-arrived)
	}
	for _, who := range people {
		if who.bearer != "" && strings.Contains(r.logs.String(), who.bearer) {
			t.Errorf("the log shows the token of %s", who.name)
		}
	}
}
