package vault

import (
	"context"
	"errors"
	"strconv"

	"waybill/inject"
	"waybill/outcome"
)

// Source is the secret of that name. It can be replaced (inject.Writer). Its version is
// the number of its values so far.
func (v *Vault) Source(name string) inject.Writer { return source{v, name} }

type source struct {
	v    *Vault
	name string
}

func (s source) Kind() string { return inject.KindVault }

func (s source) Fetch(ctx context.Context) (inject.Secret, error) {
	m, err := s.FetchRaw(ctx)
	if err != nil {
		return inject.Secret{}, err
	}
	return inject.ParseSecret(m.Raw)
}

func (s source) FetchRaw(context.Context) (inject.Material, error) {
	value, serial, err := s.v.Get(s.name)
	if err != nil {
		return inject.Material{}, failure(err)
	}
	return inject.Material{Raw: value, Version: "vault:" + strconv.FormatUint(serial, 10)}, nil
}

func (s source) Replace(_ context.Context, value []byte) error {
	if err := s.v.Set(s.name, value); err != nil {
		return failure(err)
	}
	return nil
}

// failure: there being no vault, or no such secret in it, is for a person to correct,
// and so is a locked one (CONTRACT C1).
func failure(err error) error {
	switch {
	case errors.Is(err, ErrLocked):
		return inject.NewError(outcome.CodeVaultLocked, inject.ReasonLocked, ErrLocked)
	case errors.Is(err, ErrNotFound), errors.Is(err, ErrNone):
		return inject.NewError(outcome.CodeCredentialMissing, inject.ReasonNotSet, nil)
	case errors.Is(err, ErrDamaged):
		return inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonMalformed, ErrDamaged)
	}
	return inject.NewError(outcome.CodeCredentialInvalid, inject.ReasonUnreadable, nil)
}
