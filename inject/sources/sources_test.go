package sources

import (
	"slices"
	"strings"
	"testing"

	"waybill/inject"
	"waybill/internal/contract"
)

// TestCommandsSeeNoSecret: a command that a reload kept gets no variable that only the
// later configuration reads a secret from; nor one that AWS's libraries log in with (C2).
func TestCommandsSeeNoSecret(t *testing.T) {
	contract.Covers(t, "C2")
	const canary = "canary-of-a-later-configuration"
	t.Setenv("WAYBILL_TEST_LATER_SECRET", canary)
	t.Setenv("AWS_SECRET_ACCESS_KEY", canary)
	store := func(specs ...*inject.Spec) *inject.Store {
		t.Helper()
		var list []inject.Credential
		for i, s := range specs {
			list = append(list, inject.Credential{ID: "c" + string(rune('0'+i)), Spec: s})
		}
		if err := Build(list, Environment{}); err != nil {
			t.Fatal(err)
		}
		s, err := inject.NewStore(list)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	command := &inject.Spec{Kind: inject.KindCommand, Command: []string{"sh", "-c", "env | grep canary-of-a-later | wc -l | tr -d ' \\n'"}}
	seen := func(s *inject.Store) string {
		t.Helper()
		r, err := s.Resolve(t.Context(), "c0")
		if err != nil {
			return err.Error()
		}
		return string(r.Secret.Expose())
	}
	if got := seen(store(command)); got != "2" {
		t.Fatalf("%s variables are seen where nothing hides them", got)
	}
	first := store(command)
	later := store(command, &inject.Spec{Kind: inject.KindEnv, Env: "WAYBILL_TEST_LATER_SECRET"}, &inject.Spec{Kind: inject.KindAWS, AWS: &inject.AWSSpec{Secret: "s", Region: "r"}})
	later.Adopt(first)
	if got := seen(later); got != "0" {
		t.Errorf("the command of the earlier configuration sees %s of them", got)
	}
	if names := strings.Join(later.EnvNames(), " "); !slices.Contains(later.EnvNames(), "AWS_SESSION_TOKEN") || !strings.Contains(names, "WAYBILL_TEST_LATER_SECRET") {
		t.Errorf("a program of \"waybill run\" gets them: %s", names)
	}
}
