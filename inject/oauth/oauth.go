// Package oauth makes access tokens from a token endpoint (RFC 6749 §4.4 and §6) with
// golang.org/x/oauth2. It promises that a refresh token which the server rotated is
// stored durably before the access token that came with it is used, that nothing of an
// answer is in an error, and that a token endpoint's "no" is told from its absence.
package oauth

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"net/url"
	"sync"
	"time"

	"golang.org/x/oauth2"
	"golang.org/x/oauth2/clientcredentials"

	"waybill/inject"
	"waybill/internal/control"
	"waybill/internal/killpoint"
	"waybill/outcome"
)

// Options wire a source.
type Options struct {
	ClientSecret inject.Source // nil: a public client
	RefreshToken inject.Source // nil: client credentials
	Cache        inject.CacheOptions
}

// Source returns the source of access tokens.
func Source(spec inject.OAuthSpec, o Options) *inject.Cached {
	m := &maker{spec: spec, o: o}
	if o.Cache.Refresh == 0 {
		o.Cache.Refresh = 5 * time.Minute // of a token that does not say how long it lives
	}
	return inject.NewCached(inject.KindOAuth, m.token, o.Cache)
}

type maker struct {
	spec inject.OAuthSpec
	o    Options

	mu sync.Mutex // one grant at a time, whoever asks
	// unsaved is a refresh token that the server gave and the store did not take yet. The
	// one before it may be spent, so nothing else is of use.
	unsaved []byte
}

func (m *maker) token(ctx context.Context) (inject.Material, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	client, err := inject.HTTPClient(m.spec.RootsFile, 0)
	if err != nil {
		return inject.Material{}, inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonUnreadable, nil)
	}
	secret, version := "", "client:"+m.spec.ClientID
	if m.o.ClientSecret != nil {
		got, err := inject.FetchRaw(ctx, m.o.ClientSecret)
		if err != nil {
			return inject.Material{}, err
		}
		s, err := inject.ParseSecret(got.Raw)
		if err != nil {
			return inject.Material{}, err
		}
		secret, version = string(s.Expose()), got.Version
	}
	style := oauth2.AuthStyleInHeader
	if m.spec.InBody || secret == "" {
		style = oauth2.AuthStyleInParams
	}
	octx := context.WithValue(ctx, oauth2.HTTPClient, client)
	var tok *oauth2.Token
	if m.o.RefreshToken == nil {
		params := url.Values{}
		if m.spec.Audience != "" {
			params.Set("audience", m.spec.Audience)
		}
		c := clientcredentials.Config{ClientID: m.spec.ClientID, ClientSecret: secret, TokenURL: m.spec.TokenURL, Scopes: m.spec.Scopes, EndpointParams: params, AuthStyle: style}
		tok, err = c.Token(octx)
	} else {
		tok, err = m.refresh(octx, secret, style)
	}
	if err != nil {
		return inject.Material{}, failure(ctx, err)
	}
	if tok.AccessToken == "" {
		return inject.Material{}, inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	return inject.Material{Raw: []byte(tok.AccessToken), Version: version, Issue: "issued:" + time.Now().UTC().Format("20060102T150405.000Z"), Expires: tok.Expiry}, nil
}

// refresh uses the refresh token and stores its successor.
func (m *maker) refresh(ctx context.Context, secret string, style oauth2.AuthStyle) (*oauth2.Token, error) {
	if m.unsaved != nil {
		if err := m.save(ctx); err != nil {
			return nil, err
		}
	}
	got, err := inject.FetchRaw(ctx, m.o.RefreshToken)
	if err != nil {
		return nil, err
	}
	s, err := inject.ParseSecret(got.Raw)
	if err != nil {
		return nil, err
	}
	old := s.Expose()
	defer clear(old)
	c := oauth2.Config{ClientID: m.spec.ClientID, ClientSecret: secret, Endpoint: oauth2.Endpoint{TokenURL: m.spec.TokenURL, AuthStyle: style}, Scopes: m.spec.Scopes}
	tok, err := c.TokenSource(ctx, &oauth2.Token{RefreshToken: string(old)}).Token()
	if err != nil {
		return nil, err
	}
	if m.spec.Rotates && tok.RefreshToken != "" && !bytes.Equal([]byte(tok.RefreshToken), old) {
		m.unsaved = []byte(tok.RefreshToken)
		killpoint.At("oauth-rotated")
		if err := m.save(ctx); err != nil && !control.Off("C1-rotation-durable-before-use") {
			return nil, err
		}
	}
	return tok, nil
}

func (m *maker) save(ctx context.Context) error {
	w, ok := m.o.RefreshToken.(inject.Writer)
	if !ok {
		return inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonNotStored, nil)
	}
	if err := w.Replace(context.WithoutCancel(ctx), m.unsaved); err != nil {
		return inject.NewError(outcome.CodeCredentialUnavailable, inject.ReasonNotStored, nil)
	}
	clear(m.unsaved)
	m.unsaved = nil
	killpoint.At("oauth-stored")
	return nil
}

// failure classifies by what came back, never by text (RFC 6749 §5.2).
func failure(ctx context.Context, err error) error {
	var own *inject.Error
	var answer *oauth2.RetrieveError
	var network *url.Error
	switch {
	case errors.As(err, &own):
		return own
	case ctx.Err() != nil:
		return inject.NewError(outcome.CodeCredentialUnavailable, inject.ReasonTimeout, ctx.Err())
	case errors.As(err, &answer) && answer.Response != nil:
		return Refused(answer.Response.StatusCode)
	case errors.As(err, &network):
		return inject.NewError(outcome.CodeCredentialUnavailable, inject.ReasonUnreachable, nil)
	}
	return inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
}

// Refused is the error of a token endpoint's answer with that status.
func Refused(status int) error {
	switch {
	case status == http.StatusTooManyRequests, status == http.StatusRequestTimeout, status >= 500:
		return inject.NewError(outcome.CodeCredentialUnavailable, inject.ReasonUnreachable, nil)
	case status >= 400:
		return inject.NewError(outcome.CodeCredentialRefused, inject.ReasonDenied, nil)
	}
	return inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
}
