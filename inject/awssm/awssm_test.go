package awssm

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"waybill/inject"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

func TestSecretsManager(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	t.Setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "CANARY-aws")
	t.Setenv("AWS_CONFIG_FILE", "/nowhere")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	whole := `{"key":"CANARY-value"}`
	store := &testkit.SecretsManager{Region: "eu-west-1", Secrets: map[string]string{"prod/api": whole}}
	s := httptest.NewServer(store)
	defer s.Close()
	fetch := func(field string, timeout time.Duration) (inject.Material, error) {
		return Source(inject.AWSSpec{Secret: "prod/api", Region: "eu-west-1", Field: field, Endpoint: s.URL, Stage: "AWSCURRENT"}, inject.CacheOptions{Timeout: timeout}).FetchRaw(t.Context())
	}
	m, err := fetch("key", 0)
	if err != nil || string(m.Raw) != "CANARY-value" || m.Version != "v11111111-2222" || store.Last()["SecretId"] != "prod/api" || store.Last()["VersionStage"] != "AWSCURRENT" {
		t.Fatalf("%v %s %v", err, m.Version, store.Last())
	}
	if m, err = fetch("", 0); err != nil || string(m.Raw) != whole {
		t.Errorf("whole: %v", err)
	}
	// The environment logs in and does not lead elsewhere (CONTRACT V2): neither endpoint nor proxy.
	led := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		t.Errorf("the environment led to %s", r.URL)
	}))
	defer led.Close()
	for _, v := range []string{"AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_SECRETS_MANAGER", "HTTPS_PROXY", "HTTP_PROXY"} {
		t.Setenv(v, led.URL)
	}
	if m, err = fetch("key", 0); err != nil || string(m.Raw) != "CANARY-value" {
		t.Errorf("with an endpoint in the environment: %v", err)
	}
	own, err := Source(inject.AWSSpec{Secret: "prod/api", Region: "eu-west-1"}, inject.CacheOptions{Timeout: 200 * time.Millisecond}).FetchRaw(t.Context())
	if err == nil {
		t.Errorf("AWS's own endpoint answered a test: %s", own.Version)
	}
	for name, tc := range map[string]struct {
		status     int
		kind, body string
		field      string
		code       outcome.Code
	}{
		"missing":       {400, "ResourceNotFoundException", `{"message":"CANARY"}`, "", outcome.CodeCredentialMissing},
		"missing field": {0, "", "", "none", outcome.CodeCredentialMissing},
		"denied":        {400, "AccessDeniedException", `{"message":"CANARY"}`, "", outcome.CodeCredentialRefused},
		"undecryptable": {400, "DecryptionFailure", `{"message":"CANARY"}`, "", outcome.CodeCredentialInvalid},
		"malformed":     {200, "", `{"SecretString": CANARY`, "", outcome.CodeCredentialInvalid},
		"down":          {500, "InternalServiceError", `{"message":"CANARY"}`, "", outcome.CodeCredentialUnavailable},
		"hangs":         {-1, "", "", "", outcome.CodeCredentialUnavailable},
	} {
		store.Change(func() {
			store.Broken = func(w http.ResponseWriter) bool {
				switch tc.status {
				case 0:
					return false
				case -1:
					return testkit.Hang(300 * time.Millisecond)(w)
				}
				w.Header().Set("Content-Type", "application/x-amz-json-1.1")
				if tc.kind != "" {
					w.Header().Set("X-Amzn-ErrorType", tc.kind)
				}
				w.WriteHeader(tc.status)
				_, _ = io.WriteString(w, tc.body)
				return true
			}
		})
		timeout := 5 * time.Second
		if name == "hangs" {
			timeout = 50 * time.Millisecond
		}
		_, err := fetch(tc.field, timeout)
		var e *inject.Error
		if !errors.As(err, &e) || e.Code != tc.code || strings.Contains(fmt.Sprintf("%v %v", err, errors.Unwrap(err)), "CANARY") {
			t.Errorf("%s: %v", name, err)
		}
	}
	s.Close()
	_, err = fetch("", 0)
	var e *inject.Error
	if !errors.As(err, &e) || e.Code != outcome.CodeCredentialUnavailable {
		t.Errorf("unreachable: %v", err)
	}
}
