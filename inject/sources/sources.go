// Package sources makes the source of each configured credential. It is where the heavy
// libraries of stores come in: inject itself stays light.
package sources

import (
	"fmt"
	"slices"
	"time"

	"waybill/inject"
	"waybill/inject/awssm"
	"waybill/inject/githubapp"
	"waybill/inject/hashicorp"
	"waybill/inject/keyring"
	"waybill/inject/oauth"
	"waybill/inject/onepassword"
	"waybill/inject/vault"
)

// Environment is what sources need of the process.
type Environment struct {
	// Vault is Waybill's own; nil: its secrets count as locked.
	Vault *vault.Vault
	// Hide are environment variables that no command gets, besides those that secrets are
	// read from.
	Hide []string
	// Refreshed, if set, is told each time that a credential which is issued for a time was
	// made anew, or could not be.
	Refreshed func(credential string, ok bool)
}

// remoteRefresh is how long a value of a store is used that names no end.
const remoteRefresh = 5 * time.Minute

// Build sets the sources of credentials that have a spec and none yet. It asks nobody:
// what is wrong with a store shows when a secret is fetched.
func Build(creds []inject.Credential, env Environment) error {
	var secret []string
	for i := range creds {
		if creds[i].Spec != nil {
			secret = append(secret, creds[i].Spec.EnvNames()...)
		}
	}
	inject.TakeEnv(secret...) // programs that libraries start get the environment of this process
	hide := append(slices.Clone(env.Hide), secret...)
	inject.HideEnv(hide...) // commands that an earlier configuration made, too
	b := builder{env: env, hide: hide}
	for i := range creds {
		if creds[i].Source != nil || creds[i].Spec == nil {
			continue
		}
		b.issued = nil
		if id := creds[i].ID; env.Refreshed != nil {
			b.issued = func(ok bool) { env.Refreshed(id, ok) }
		}
		src, err := b.source(creds[i].Spec)
		if err != nil {
			return fmt.Errorf("credentials.%s: %w", creds[i].ID, err)
		}
		creds[i].Source = src
	}
	return nil
}

type builder struct {
	env  Environment
	hide []string

	issued func(ok bool) // of the credential that is being built
}

// told are the options of a source whose values are issued for a time.
func (b *builder) told(o inject.CacheOptions) inject.CacheOptions {
	o.Done = b.issued
	return o
}

func (b *builder) source(s *inject.Spec) (inject.Source, error) {
	remote := inject.CacheOptions{Timeout: s.Timeout, Refresh: s.Refresh}
	if remote.Refresh == 0 {
		remote.Refresh = remoteRefresh
	}
	inner := func(s *inject.Spec) (inject.Source, error) {
		if s == nil {
			return nil, nil //nolint:nilnil // an optional secret
		}
		return b.source(s)
	}
	switch s.Kind {
	case inject.KindEnv:
		return inject.EnvSource(s.Env), nil
	case inject.KindFile:
		return inject.FileSource(s.File), nil
	case inject.KindCommand:
		return inject.CommandSource(s.Command, b.hide, inject.CacheOptions{Timeout: s.Timeout, Refresh: s.Refresh}), nil
	case inject.KindKubernetes:
		return inject.KubernetesSource(s.Kubernetes.Folder, s.Kubernetes.Key), nil
	case inject.KindVault:
		v := b.env.Vault
		if v == nil {
			v = vault.Open("", nil)
		}
		return v.Source(s.Vault), nil
	case inject.KindKeyring:
		return keyring.Source(*s.Keyring, remote), nil
	case inject.KindOAuth:
		secret, err := inner(s.OAuth.ClientSecret)
		if err != nil {
			return nil, err
		}
		refresh, err := inner(s.OAuth.RefreshToken)
		if err != nil {
			return nil, err
		}
		return oauth.Source(*s.OAuth, oauth.Options{ClientSecret: secret, RefreshToken: refresh, Cache: b.told(remote)}), nil
	case inject.KindGitHubApp:
		key, err := b.source(s.GitHubApp.PrivateKey)
		if err != nil {
			return nil, err
		}
		return githubapp.Source(*s.GitHubApp, key, b.told(remote)), nil
	case inject.KindHashicorp:
		var login hashicorp.Login
		var err error
		if login.Token, err = inner(s.Hashicorp.Token); err != nil {
			return nil, err
		}
		if s.Hashicorp.AppRole != nil {
			if login.SecretID, err = inner(s.Hashicorp.AppRole.SecretID); err != nil {
				return nil, err
			}
		}
		if s.Hashicorp.Dynamic {
			remote = b.told(remote)
		}
		return hashicorp.Source(*s.Hashicorp, login, remote), nil
	case inject.KindAWS:
		return awssm.Source(*s.AWS, remote), nil
	case inject.KindOnePassword:
		token, err := b.source(s.OnePassword.Token)
		if err != nil {
			return nil, err
		}
		return onepassword.Source(*s.OnePassword, token, remote), nil
	}
	return nil, fmt.Errorf("the source %s is not part of this version", s.Kind)
}
