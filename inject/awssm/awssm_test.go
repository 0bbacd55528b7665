package awssm

import (
	"encoding/json"
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
	"waybill/outcome"
)

// The server speaks as much of the JSON protocol of AWS Secrets Manager as is used here,
// written from its documentation.
func TestSecretsManager(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	t.Setenv("AWS_ACCESS_KEY_ID", "AKIDEXAMPLE")
	t.Setenv("AWS_SECRET_ACCESS_KEY", "CANARY-aws")
	t.Setenv("AWS_CONFIG_FILE", "/nowhere")
	t.Setenv("AWS_SHARED_CREDENTIALS_FILE", "/nowhere")
	t.Setenv("AWS_EC2_METADATA_DISABLED", "true")
	status, kind, body := 200, "", ""
	var asked map[string]string
	s := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		asked = nil
		_ = json.Unmarshal(b, &asked)
		if r.Header.Get("X-Amz-Target") != "secretsmanager.GetSecretValue" || !strings.Contains(r.Header.Get("Authorization"), "/eu-west-1/secretsmanager/aws4_request") {
			w.WriteHeader(400)
			return
		}
		if status == 0 {
			time.Sleep(300 * time.Millisecond)
			return
		}
		w.Header().Set("Content-Type", "application/x-amz-json-1.1")
		if kind != "" {
			w.Header().Set("X-Amzn-ErrorType", kind)
		}
		w.WriteHeader(status)
		_, _ = io.WriteString(w, body)
	}))
	defer s.Close()
	fetch := func(field string, timeout time.Duration) (inject.Material, error) {
		return Source(inject.AWSSpec{Secret: "prod/api", Region: "eu-west-1", Field: field, Endpoint: s.URL, Stage: "AWSCURRENT"}, inject.CacheOptions{Timeout: timeout}).FetchRaw(t.Context())
	}
	whole := `{"ARN":"arn:x","Name":"prod/api","VersionId":"11111111-2222","SecretString":"{\"key\":\"CANARY-value\"}"}`
	body = whole
	m, err := fetch("key", 0)
	if err != nil || string(m.Raw) != "CANARY-value" || m.Version != "v11111111-2222" || asked["SecretId"] != "prod/api" || asked["VersionStage"] != "AWSCURRENT" {
		t.Fatalf("%v %s %v", err, m.Version, asked)
	}
	if m, err = fetch("", 0); err != nil || string(m.Raw) != `{"key":"CANARY-value"}` {
		t.Errorf("whole: %v", err)
	}
	for name, tc := range map[string]struct {
		status     int
		kind, body string
		field      string
		code       outcome.Code
	}{
		"missing":       {400, "ResourceNotFoundException", `{"message":"CANARY"}`, "", outcome.CodeCredentialMissing},
		"missing field": {200, "", whole, "none", outcome.CodeCredentialMissing},
		"denied":        {400, "AccessDeniedException", `{"message":"CANARY"}`, "", outcome.CodeCredentialRefused},
		"undecryptable": {400, "DecryptionFailure", `{"message":"CANARY"}`, "", outcome.CodeCredentialInvalid},
		"malformed":     {200, "", `{"SecretString": CANARY`, "", outcome.CodeCredentialInvalid},
		"down":          {500, "InternalServiceError", `{"message":"CANARY"}`, "", outcome.CodeCredentialUnavailable},
		"hangs":         {0, "", "", "", outcome.CodeCredentialUnavailable},
	} {
		status, kind, body = tc.status, tc.kind, tc.body
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
