package proxy

import (
	"encoding/json"
	"errors"
	"strings"
	"time"

	"github.com/go-jose/go-jose/v4"
	"github.com/go-jose/go-jose/v4/jwt"
)

// ServiceAccount recognises one Kubernetes service account by its projected token,
// without asking the cluster: signature by a key of the set, issuer, audience, subject
// and time. A token that was revoked before its end is not noticed.
type ServiceAccount struct {
	keys              jose.JSONWebKeySet
	issuer, audience  string
	namespace, person string // of the account
}

// tokenAlgorithms are those that clusters sign with; "none" and shared keys are not in it.
var tokenAlgorithms = []jose.SignatureAlgorithm{jose.RS256, jose.RS384, jose.RS512, jose.PS256, jose.ES256, jose.ES384, jose.ES512}

const (
	maxTokenBytes = 16 << 10
	tokenLeeway   = 30 * time.Second
)

// NewServiceAccount reads a JSON Web Key Set of public keys (RFC 7517). account is
// "namespace/name".
func NewServiceAccount(jwks []byte, issuer, audience, account string) (*ServiceAccount, error) {
	s := &ServiceAccount{issuer: issuer, audience: audience}
	if err := json.Unmarshal(jwks, &s.keys); err != nil || len(s.keys.Keys) == 0 {
		return nil, errors.New("proxy: it is no JSON Web Key Set")
	}
	for i := range s.keys.Keys {
		if k := &s.keys.Keys[i]; !k.Valid() || !k.IsPublic() {
			return nil, errors.New("proxy: the key set holds a key that is not public")
		}
	}
	var ok bool
	if s.namespace, s.person, ok = strings.Cut(account, "/"); !ok || s.namespace == "" || s.person == "" || issuer == "" || audience == "" {
		return nil, errors.New("proxy: a service account needs namespace/name, issuer and audience")
	}
	return s, nil
}

// accepts reports whether token is one of this account, good at now.
func (s *ServiceAccount) accepts(token string, now time.Time) bool {
	if len(token) > maxTokenBytes || strings.Count(token, ".") != 2 {
		return false
	}
	t, err := jwt.ParseSigned(token, tokenAlgorithms)
	if err != nil || len(t.Headers) != 1 {
		return false
	}
	for i := range s.keys.Keys {
		k := &s.keys.Keys[i]
		if id := t.Headers[0].KeyID; id != "" && k.KeyID != "" && id != k.KeyID || k.Use != "" && k.Use != "sig" {
			continue
		}
		var c jwt.Claims
		if t.Claims(k, &c) != nil {
			continue
		}
		// Without an end it is a legacy token of a Secret, good for ever: not taken.
		return c.Expiry != nil && c.Subject == "system:serviceaccount:"+s.namespace+":"+s.person &&
			c.ValidateWithLeeway(jwt.Expected{Issuer: s.issuer, AnyAudience: jwt.Audience{s.audience}, Time: now}, tokenLeeway) == nil
	}
	return false
}
