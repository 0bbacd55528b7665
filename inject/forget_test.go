package inject

import (
	"context"
	"errors"
	"strconv"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/outcome"
)

// What was made of the vault's secrets is dropped when it is locked: values that are held,
// and one whose fetch began before. Other sources keep theirs.
func TestForgetVault(t *testing.T) {
	contract.Covers(t, "C1")
	var n, other int
	var locked error
	began, hold := make(chan struct{}, 1), make(chan struct{})
	close(hold)
	make1 := func(context.Context) (Material, error) {
		n++
		mine, err := n, locked // what the vault said when the fetch began
		select {
		case began <- struct{}{}:
		default:
		}
		<-hold
		return Material{Raw: []byte("token-" + strconv.Itoa(mine))}, err
	}
	oauth := &Spec{Kind: KindOAuth, OAuth: &OAuthSpec{ClientSecret: &Spec{Kind: KindVault, Vault: "a"}}}
	forgot := 0
	s, err := NewStore([]Credential{
		{ID: "made", Spec: oauth, Source: NewCached(KindOAuth, make1, CacheOptions{Forget: func() { forgot++ }})},
		{ID: "other", Spec: &Spec{Kind: KindCommand, Command: []string{"x"}}, Source: NewCached(KindCommand, func(context.Context) (Material, error) {
			other++
			return Material{Raw: []byte("o")}, nil
		}, CacheOptions{})},
	})
	if err != nil {
		t.Fatal(err)
	}
	get := func(id string) string {
		t.Helper()
		r, err := s.Resolve(t.Context(), id)
		if err != nil {
			var e *Error
			if !errors.As(err, &e) {
				t.Fatal(err)
			}
			return e.Code.String()
		}
		return string(r.Secret.Expose())
	}
	if first := get("made"); first != "token-1" || get("made") != first || get("other") != "o" {
		t.Fatal("nothing is held")
	}
	locked = NewError(outcome.CodeVaultLocked, ReasonLocked, nil)
	s.ForgetVault()
	if got := get("made"); got != "VAULT_LOCKED" || forgot != 1 {
		t.Fatalf("after the lock: %s, told %d times", got, forgot)
	}
	locked = nil
	s.ForgetVault() // unlocked: the failure is not answered any longer
	if got := get("made"); got != "token-3" {
		t.Errorf("after the unlock: %s", got)
	}
	// A fetch that began before the lock is for those who wait for it, and for nobody later.
	s.ForgetVault()
	hold = make(chan struct{})
	for len(began) > 0 {
		<-began
	}
	done := make(chan string)
	go func() { done <- get("made") }()
	select {
	case <-began:
	case <-time.After(20 * time.Second):
		t.Fatal("it is not asked for anew")
	}
	locked = NewError(outcome.CodeVaultLocked, ReasonLocked, nil)
	s.ForgetVault()
	close(hold)
	select {
	case got := <-done:
		if got != "token-4" {
			t.Errorf("who waited got %s", got)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("who waited still waits")
	}
	if got := get("made"); got != "VAULT_LOCKED" {
		t.Errorf("a token came out of a fetch from before the lock: %s", got)
	}
	if get("other"); other != 1 {
		t.Errorf("a source that does not need the vault was asked %d times", other)
	}
	(*Store)(nil).ForgetVault()
}
