package keyring

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"waybill/inject"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

// The library speaks to a Secret Service over a real message bus.
func TestKeyring(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	ring := testkit.NewSecretService(t)
	name, addr, _ := strings.Cut(ring.Env, "=")
	t.Setenv(name, addr)
	fetch := func(account string, timeout time.Duration) (inject.Secret, error) {
		return Source(inject.KeyringSpec{Service: "api", Account: account}, inject.CacheOptions{Timeout: timeout}).Fetch(t.Context())
	}
	if err := (System{}).Set("api", "me", "CANARY-ring"); err != nil {
		t.Fatal(err)
	}
	if v, err := (System{}).Get("api", "me"); err != nil || v != "CANARY-ring" {
		t.Errorf("read back: %v", err)
	}
	ring.Set("api", "broken", "CANARY\x00ring")
	m, err := Source(inject.KeyringSpec{Service: "api", Account: "me"}, inject.CacheOptions{}).FetchRaw(t.Context())
	if err != nil || string(m.Raw) != "CANARY-ring" || !strings.HasPrefix(m.Version, "read:") {
		t.Fatalf("%v %s", err, m.Version)
	}
	want := func(name string, err error, code outcome.Code) {
		t.Helper()
		var e *inject.Error
		if !errors.As(err, &e) || e.Code != code || strings.Contains(fmt.Sprintf("%v %v", err, errors.Unwrap(err)), "CANARY") {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err = fetch("none", 0)
	want("missing", err, outcome.CodeCredentialMissing)
	_, err = fetch("broken", 0)
	want("malformed", err, outcome.CodeCredentialInvalid)
	ring.Delay(300 * time.Millisecond)
	_, err = fetch("me", 50*time.Millisecond)
	want("nobody answers the prompt", err, outcome.CodeCredentialUnavailable)
	ring.Delay(0)
	ring.Lock(true)
	_, err = fetch("me", 0)
	want("locked", err, outcome.CodeCredentialUnavailable)
	ring.Lock(false)
	if s, err := fetch("me", 0); err != nil || string(s.Expose()) != "CANARY-ring" {
		t.Errorf("unlocked again: %v", err)
	}
	ring.Stop()
	testkit.Eventually(t, func() error {
		_, err := fetch("me", 0)
		var e *inject.Error
		if !errors.As(err, &e) || e.Code != outcome.CodeCredentialUnavailable {
			return fmt.Errorf("no bus: %w", err)
		}
		return nil
	})
}
