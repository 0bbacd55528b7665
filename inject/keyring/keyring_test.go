package keyring

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/zalando/go-keyring"

	"waybill/inject"
	"waybill/internal/contract"
	"waybill/outcome"
)

// The library's own mock stands for the keyring: a desktop session cannot be started here.
func TestKeyring(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	fetch := func(account string) (inject.Material, error) {
		return Source(inject.KeyringSpec{Service: "api", Account: account}, inject.CacheOptions{}).FetchRaw(context.Background())
	}
	keyring.MockInit()
	if err := (System{}).Set("api", "me", "CANARY-ring"); err != nil {
		t.Fatal(err)
	}
	m, err := fetch("me")
	if err != nil || string(m.Raw) != "CANARY-ring" || !strings.HasPrefix(m.Version, "read:") {
		t.Errorf("%v %s", err, m.Version)
	}
	want := func(err error, code outcome.Code) {
		t.Helper()
		var e *inject.Error
		if !errors.As(err, &e) || e.Code != code || strings.Contains(err.Error(), "CANARY") {
			t.Errorf("%v", err)
		}
	}
	_, err = fetch("none")
	want(err, outcome.CodeCredentialMissing)
	keyring.MockInitWithError(errors.New("CANARY: locked"))
	_, err = fetch("me")
	want(err, outcome.CodeCredentialUnavailable)
}
