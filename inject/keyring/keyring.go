// Package keyring reads secrets from the operating system's keyring (Secret Service,
// Keychain, Credential Manager) with zalando/go-keyring.
package keyring

import (
	"context"
	"errors"
	"time"

	"github.com/zalando/go-keyring"

	"waybill/inject"
	"waybill/outcome"
)

// System is the keyring of the operating system, for package vault.
type System struct{}

// Get returns an entry.
func (System) Get(service, account string) (string, error) { return keyring.Get(service, account) }

// Set writes an entry.
func (System) Set(service, account, value string) error { return keyring.Set(service, account, value) }

// Source reads an entry. There is no version in a keyring: it is the time at which it
// was read. An entry that is not there is CREDENTIAL_MISSING; a keyring that cannot be
// asked, or is locked, CREDENTIAL_UNAVAILABLE.
func Source(spec inject.KeyringSpec, o inject.CacheOptions) *inject.Cached {
	return inject.NewCached(inject.KindKeyring, func(ctx context.Context) (inject.Material, error) {
		type answer struct {
			v   string
			err error
		}
		// The library knows no context: what waits for a person to unlock the keyring is
		// left behind.
		done := make(chan answer, 1)
		go func() {
			defer func() {
				if recover() != nil {
					done <- answer{err: keyring.ErrUnsupportedPlatform}
				}
			}()
			v, err := keyring.Get(spec.Service, spec.Account)
			done <- answer{v, err}
		}()
		select {
		case a := <-done:
			switch {
			case errors.Is(a.err, keyring.ErrNotFound):
				return inject.Material{}, inject.NewError(outcome.CodeCredentialMissing, inject.ReasonNotSet, nil)
			case a.err != nil:
				return inject.Material{}, inject.NewError(outcome.CodeCredentialUnavailable, inject.ReasonUnreachable, nil)
			}
			return inject.Material{Raw: []byte(a.v), Version: "read:" + time.Now().UTC().Format("20060102T150405Z")}, nil
		case <-ctx.Done():
			return inject.Material{}, ctx.Err()
		}
	}, o)
}
