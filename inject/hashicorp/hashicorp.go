// Package hashicorp reads secrets of HashiCorp Vault and OpenBao with the API client of
// HashiCorp: the KV v2 engine, and engines that give leases, which are renewed.
package hashicorp

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/hashicorp/vault/api"
	"github.com/hashicorp/vault/api/auth/approle"
	"github.com/hashicorp/vault/api/auth/kubernetes"

	"waybill/inject"
	"waybill/outcome"
)

// Login are the sources of what the store is logged in with; those that the spec does
// not name are nil.
type Login struct{ Token, SecretID inject.Source }

// Source returns the source of the secret that spec names.
func Source(spec inject.HashicorpSpec, login Login, o inject.CacheOptions) *inject.Cached {
	r := &reader{spec: spec, login: login}
	o.Forget = r.forget
	return inject.NewCached(inject.KindHashicorp, r.fetch, o)
}

type reader struct {
	spec  inject.HashicorpSpec
	login Login

	mu     sync.Mutex
	client *api.Client
	until  time.Time // of the client's token
	lease  *api.Secret

	forgotten atomic.Bool // the login is no good for the next fetch
}

// forget drops login and lease: at once, or if a fetch runs, before the next.
func (r *reader) forget() {
	r.forgotten.Store(true)
	if r.mu.TryLock() {
		r.heed()
		r.mu.Unlock()
	}
}

// heed does what forget asked for. r.mu is held.
func (r *reader) heed() {
	if r.forgotten.Swap(false) {
		r.client, r.lease = nil, nil
	}
}

func (r *reader) fetch(ctx context.Context) (inject.Material, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.heed()
	m, err := r.once(ctx)
	var answer *api.ResponseError
	if errors.As(err, &answer) && answer.StatusCode == http.StatusForbidden && r.login.Token == nil && r.client != nil {
		// The token may have been revoked: one more login tells.
		r.client, r.lease = nil, nil
		m, err = r.once(ctx)
	}
	if err != nil {
		return inject.Material{}, failure(ctx, err)
	}
	return m, nil
}

func (r *reader) once(ctx context.Context) (inject.Material, error) {
	if r.client == nil || !time.Now().Before(r.until) {
		if err := r.connect(ctx); err != nil {
			r.client = nil
			return inject.Material{}, err
		}
	}
	if r.spec.Dynamic {
		return r.dynamic(ctx)
	}
	s, err := r.client.KVv2(r.spec.Mount).Get(ctx, r.spec.Path)
	if err != nil {
		return inject.Material{}, err
	}
	if s.Data == nil || s.VersionMetadata == nil {
		return inject.Material{}, api.ErrSecretNotFound // deleted: its metadata are left
	}
	raw, err := pick(s.Data, r.spec.Field)
	return inject.Material{Raw: raw, Version: "v" + strconv.Itoa(s.VersionMetadata.Version)}, err
}

// dynamic renews the lease that is there, or reads anew.
func (r *reader) dynamic(ctx context.Context) (inject.Material, error) {
	now := time.Now()
	if r.lease != nil && r.lease.Renewable {
		s, err := r.client.Sys().RenewWithContext(ctx, r.lease.LeaseID, 0)
		// A lease at the end of its longest life is renewed for less and less.
		if err == nil && s != nil && s.LeaseDuration > 2 && 2*s.LeaseDuration >= r.lease.LeaseDuration {
			raw, err := pick(r.lease.Data, r.spec.Field)
			return inject.Material{Raw: raw, Version: leaseVersion(r.lease), Expires: now.Add(time.Duration(s.LeaseDuration) * time.Second)}, err
		}
	}
	r.lease = nil
	s, err := r.client.Logical().ReadWithContext(ctx, strings.Trim(r.spec.Mount, "/")+"/"+strings.Trim(r.spec.Path, "/"))
	if err != nil {
		return inject.Material{}, err
	}
	if s == nil || s.Data == nil {
		return inject.Material{}, api.ErrSecretNotFound
	}
	if s.LeaseID == "" || s.LeaseDuration <= 0 {
		return inject.Material{}, inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	raw, err := pick(s.Data, r.spec.Field)
	if err != nil {
		return inject.Material{}, err
	}
	r.lease = s
	return inject.Material{Raw: raw, Version: leaseVersion(s), Expires: now.Add(time.Duration(s.LeaseDuration) * time.Second)}, nil
}

// leaseVersion is the last part of the lease's id: it names the lease and opens nothing.
func leaseVersion(s *api.Secret) string {
	id := s.LeaseID
	return "lease:" + id[strings.LastIndexByte(id, '/')+1:]
}

func pick(data map[string]any, field string) ([]byte, error) {
	text, err := json.Marshal(data)
	if err != nil {
		return nil, inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	defer clear(text)
	return inject.Field(text, field)
}

// connect makes a client and logs in. The environment of the process has no say.
func (r *reader) connect(ctx context.Context) error {
	hc, err := inject.HTTPClient(r.spec.RootsFile, 0)
	if err != nil {
		return inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonUnreadable, nil)
	}
	c, err := api.NewClient(&api.Config{Address: r.spec.Address, HttpClient: hc, DisableRedirects: true})
	if err != nil {
		return inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	c.ClearToken()
	c.ClearNamespace()
	if r.spec.Namespace != "" {
		c.SetNamespace(r.spec.Namespace)
	}
	r.until = time.Now().Add(time.Minute)
	var method api.AuthMethod
	switch {
	case r.login.Token != nil:
		token, err := text(ctx, r.login.Token)
		if err != nil {
			return err
		}
		c.SetToken(token)
		r.client = c
		return nil
	case r.spec.AppRole != nil:
		id, err := text(ctx, r.login.SecretID)
		if err != nil {
			return err
		}
		var opts []approle.LoginOption
		if r.spec.AppRole.Mount != "" {
			opts = append(opts, approle.WithMountPath(r.spec.AppRole.Mount))
		}
		method, err = approle.NewAppRoleAuth(r.spec.AppRole.RoleID, &approle.SecretID{FromString: id}, opts...)
		if err != nil {
			return inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
		}
	default:
		k := r.spec.Kubernetes
		file := k.JWTFile
		if file == "" {
			file = "/var/run/secrets/kubernetes.io/serviceaccount/token"
		}
		jwt, err := text(ctx, inject.FileSource(file))
		if err != nil {
			return err
		}
		opts := []kubernetes.LoginOption{kubernetes.WithServiceAccountToken(jwt)}
		if k.Mount != "" {
			opts = append(opts, kubernetes.WithMountPath(k.Mount))
		}
		if method, err = kubernetes.NewKubernetesAuth(k.Role, opts...); err != nil {
			return inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
		}
	}
	s, err := c.Auth().Login(ctx, method)
	if err != nil {
		return err
	}
	if s == nil || s.Auth == nil || s.Auth.ClientToken == "" {
		return inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	if d := time.Duration(s.Auth.LeaseDuration) * time.Second; d > 0 {
		r.until = time.Now().Add(d * 4 / 5)
	} else {
		r.until = time.Now().Add(time.Hour)
	}
	r.client = c
	return nil
}

func text(ctx context.Context, s inject.Source) (string, error) {
	m, err := inject.FetchRaw(ctx, s)
	if err != nil {
		return "", err
	}
	secret, err := inject.ParseSecret(m.Raw)
	return string(secret.Expose()), err
}

func failure(ctx context.Context, err error) error {
	var own *inject.Error
	var answer *api.ResponseError
	unreachable := inject.NewError(outcome.CodeCredentialUnavailable, inject.ReasonUnreachable, nil)
	switch {
	case errors.As(err, &own):
		return own
	case ctx.Err() != nil:
		return ctx.Err()
	case errors.Is(err, api.ErrSecretNotFound):
		return inject.NewError(outcome.CodeCredentialMissing, inject.ReasonNotSet, nil)
	case errors.As(err, &answer):
		switch {
		case answer.StatusCode == http.StatusNotFound:
			return inject.NewError(outcome.CodeCredentialMissing, inject.ReasonNotSet, nil)
		case answer.StatusCode == http.StatusTooManyRequests, answer.StatusCode >= 500:
			return unreachable
		}
		return inject.NewError(outcome.CodeCredentialRefused, inject.ReasonDenied, nil)
	}
	var syntax *json.SyntaxError
	var kind *json.UnmarshalTypeError
	if errors.As(err, &syntax) || errors.As(err, &kind) {
		return inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil)
	}
	return unreachable
}
