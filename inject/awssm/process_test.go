package awssm_test

import (
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"waybill/inject"
	"waybill/inject/sources"
	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// TestCredentialProcessSeesNoSecret: the program with which AWS's library logs in gets no
// variable that a secret is read from; the secret itself is still there (CONTRACT C2).
func TestCredentialProcessSeesNoSecret(t *testing.T) {
	contract.Covers(t, "C2")
	const canary = "canary-of-another-credential"
	dir := t.TempDir()
	file := func(name, text string) string {
		t.Helper()
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o700); err != nil { //nolint:gosec // a program among them
			t.Fatal(err)
		}
		return path
	}
	seen := filepath.Join(dir, "seen")
	process := file("login", "#!/bin/sh\nenv >"+seen+"\necho '{\"Version\": 1, \"AccessKeyId\": \"AKIDEXAMPLE\", \"SecretAccessKey\": \"of-the-process\"}'\n")
	for name, v := range map[string]string{
		"WAYBILL_TEST_API_KEY": canary, "WAYBILL_TEST_CLIENT_SECRET": canary, "WAYBILL_TEST_OTHER": "seen",
		"AWS_ACCESS_KEY_ID": "", "AWS_SECRET_ACCESS_KEY": "", "AWS_EC2_METADATA_DISABLED": "true", "AWS_PROFILE": "",
		"AWS_CONFIG_FILE": file("config", "[default]\ncredential_process = "+process+"\n"), "AWS_SHARED_CREDENTIALS_FILE": filepath.Join(dir, "none"),
	} {
		t.Setenv(name, v)
	}
	s := httptest.NewServer(&testkit.SecretsManager{Region: "eu-west-1", Secrets: map[string]string{"prod/api": "of-the-store"}})
	defer s.Close()
	creds := []inject.Credential{
		{ID: "stored", Spec: &inject.Spec{Kind: inject.KindAWS, AWS: &inject.AWSSpec{Secret: "prod/api", Region: "eu-west-1", Endpoint: s.URL}}},
		{ID: "env", Spec: &inject.Spec{Kind: inject.KindEnv, Env: "WAYBILL_TEST_API_KEY"}},
		{ID: "inner", Spec: &inject.Spec{Kind: inject.KindOAuth, OAuth: &inject.OAuthSpec{TokenURL: s.URL, ClientSecret: &inject.Spec{Kind: inject.KindEnv, Env: "WAYBILL_TEST_CLIENT_SECRET"}}}},
	}
	if err := sources.Build(creds, sources.Environment{}); err != nil {
		t.Fatal(err)
	}
	store, err := inject.NewStore(creds)
	if err != nil {
		t.Fatal(err)
	}
	for id, want := range map[string]string{"stored": "of-the-store", "env": canary} {
		if r, err := store.Resolve(t.Context(), id); err != nil || string(r.Secret.Expose()) != want {
			t.Errorf("%s: %v", id, err)
		}
	}
	env, err := os.ReadFile(seen)
	if err != nil || !strings.Contains(string(env), "WAYBILL_TEST_OTHER=seen") {
		t.Fatalf("the program did not run: %v %s", err, env)
	}
	if strings.Contains(string(env), canary) {
		t.Errorf("it sees the secret of another credential")
	}
}
