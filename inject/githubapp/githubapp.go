// Package githubapp makes installation tokens of a GitHub App: a JWT signed with the
// app's key (RS256, RFC 7515) is exchanged for a token of one installation.
package githubapp

import (
	"bytes"
	"context"
	"crypto"
	"crypto/rand"
	"crypto/rsa"
	"crypto/sha256"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"waybill/inject"
	"waybill/outcome"
)

const defaultAPI = "https://api.github.com"

// Source returns the source of installation tokens; key holds the private key (PEM).
func Source(spec inject.GitHubAppSpec, key inject.Source, o inject.CacheOptions) *inject.Cached {
	if o.Margin == 0 {
		o.Margin = time.Minute
	}
	return inject.NewCached(inject.KindGitHubApp, func(ctx context.Context) (inject.Material, error) { return token(ctx, spec, key) }, o)
}

func token(ctx context.Context, spec inject.GitHubAppSpec, key inject.Source) (inject.Material, error) {
	none := inject.Material{}
	got, err := inject.FetchRaw(ctx, key)
	if err != nil {
		return none, err
	}
	defer clear(got.Raw)
	now := time.Now()
	assertion, err := sign(got.Raw, spec.AppID, now)
	if err != nil {
		return none, err
	}
	client, err := inject.HTTPClient(spec.RootsFile, 0)
	if err != nil {
		return none, inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonUnreadable, nil)
	}
	body, err := json.Marshal(struct {
		Repositories []string          `json:"repositories,omitempty"`
		Permissions  map[string]string `json:"permissions,omitempty"`
	}{spec.Repositories, spec.Permissions})
	if err != nil {
		return none, inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	api := spec.API
	if api == "" {
		api = defaultAPI
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, strings.TrimRight(api, "/")+"/app/installations/"+url.PathEscape(spec.InstallationID)+"/access_tokens", bytes.NewReader(body))
	if err != nil {
		return none, inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	req.Header.Set("Authorization", "Bearer "+assertion)
	req.Header.Set("Accept", "application/vnd.github+json")
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("X-GitHub-Api-Version", "2022-11-28")
	resp, err := client.Do(req)
	if err != nil {
		if ctx.Err() != nil {
			return none, ctx.Err()
		}
		return none, inject.NewError(outcome.CodeCredentialUnavailable, inject.ReasonUnreachable, nil)
	}
	defer func() { _ = resp.Body.Close() }()
	switch {
	case resp.StatusCode == http.StatusTooManyRequests, resp.StatusCode >= 500:
		return none, inject.NewError(outcome.CodeCredentialUnavailable, inject.ReasonUnreachable, nil)
	case resp.StatusCode >= 400:
		return none, inject.NewError(outcome.CodeCredentialRefused, inject.ReasonDenied, nil)
	case resp.StatusCode != http.StatusCreated:
		return none, inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	var answer struct {
		Token     string    `json:"token"`
		ExpiresAt time.Time `json:"expires_at"`
	}
	text, err := io.ReadAll(io.LimitReader(resp.Body, 1<<20))
	if err != nil {
		return none, inject.NewError(outcome.CodeCredentialUnavailable, inject.ReasonUnreachable, nil)
	}
	defer clear(text)
	if json.Unmarshal(text, &answer) != nil || answer.Token == "" || answer.ExpiresAt.IsZero() {
		return none, inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	return inject.Material{Raw: []byte(answer.Token), Version: got.Version, Issue: "issued:" + now.UTC().Format("20060102T150405.000Z"), Expires: answer.ExpiresAt}, nil
}

// sign makes the app's JWT. GitHub wants at most ten minutes, and takes a minute of
// another clock for granted.
func sign(text []byte, issuer string, now time.Time) (string, error) {
	bad := inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	block, _ := pem.Decode(text)
	if block == nil {
		return "", bad
	}
	defer clear(block.Bytes)
	key, err := x509.ParsePKCS1PrivateKey(block.Bytes)
	if err != nil {
		any, err := x509.ParsePKCS8PrivateKey(block.Bytes)
		if err != nil {
			return "", bad
		}
		var ok bool
		if key, ok = any.(*rsa.PrivateKey); !ok {
			return "", bad
		}
	}
	part := func(v any) string {
		b, err := json.Marshal(v)
		if err != nil {
			panic(err) // strings and numbers only
		}
		return base64.RawURLEncoding.EncodeToString(b)
	}
	signed := part(map[string]string{"alg": "RS256", "typ": "JWT"}) + "." +
		part(map[string]any{"iss": issuer, "iat": now.Add(-time.Minute).Unix(), "exp": now.Add(9 * time.Minute).Unix()})
	sum := sha256.Sum256([]byte(signed))
	sig, err := rsa.SignPKCS1v15(rand.Reader, key, crypto.SHA256, sum[:])
	if err != nil {
		return "", bad
	}
	return signed + "." + base64.RawURLEncoding.EncodeToString(sig), nil
}
