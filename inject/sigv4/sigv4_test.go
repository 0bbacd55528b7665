package sigv4

import (
	"errors"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"waybill/inject"
	"waybill/internal/contract"
	"waybill/outcome"
)

const (
	exampleKey    = "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY" // AWS's documentation
	exampleBucket = "examplebucket.s3.amazonaws.com"
)

var exampleTime = time.Date(2013, 5, 24, 0, 0, 0, 0, time.UTC)

// The examples of the documentation of S3 ("Signature Calculations for the Authorization
// Header").
func TestDocumentedSignatures(t *testing.T) {
	contract.Covers(t, "C1")
	for query, want := range map[string]string{
		"lifecycle":           "fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543",
		"max-keys=2&prefix=J": "34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7",
	} {
		r := &inject.Signable{Method: "GET", Scheme: "https", Host: exampleBucket, Path: "/", Query: query, Header: http.Header{"Via": {"1.1 waybill"}, "User-Agent": {"x"}}}
		got, err := Sign(inject.NewSecret([]byte(exampleKey)), Spec{Service: "s3", Region: "us-east-1", AccessKeyID: "AKIAIOSFODNN7EXAMPLE"}, r, 0, exampleTime)
		if err != nil {
			t.Fatal(err)
		}
		auth := got.Fields["Authorization"]
		if !strings.HasSuffix(auth, "Signature="+want) || !strings.Contains(auth, "SignedHeaders=host;x-amz-content-sha256;x-amz-date,") {
			t.Errorf("%s: %s", query, auth)
		}
		if len(got.Secrets) < 3 || got.Secrets[0] != exampleKey {
			t.Error("the secrets are not named")
		}
	}
}

func TestPayloads(t *testing.T) {
	contract.Covers(t, "C1")
	for _, tc := range []struct {
		payload, asked, scheme string
		want                   string // what stands for the body; "": refused
	}{
		{"auto", "", "https", "digest"}, {"signed", "", "http", "digest"}, {"unsigned", "", "https", "UNSIGNED-PAYLOAD"}, {"unsigned", "", "http", ""},
		{"auto", "UNSIGNED-PAYLOAD", "https", "UNSIGNED-PAYLOAD"}, {"auto", "UNSIGNED-PAYLOAD", "http", ""}, {"signed", "UNSIGNED-PAYLOAD", "https", "digest"},
		{"auto", "STREAMING-UNSIGNED-PAYLOAD-TRAILER", "https", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"}, {"signed", "STREAMING-UNSIGNED-PAYLOAD-TRAILER", "https", ""},
		{"auto", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "https", ""}, {"unsigned", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER", "https", ""},
		{"auto", strings.Repeat("0", 64), "https", "digest"}, // a digest that is wrong is made anew
	} {
		h := http.Header{}
		if tc.asked != "" {
			h.Set("X-Amz-Content-Sha256", tc.asked)
		}
		r := &inject.Signable{Method: "PUT", Scheme: tc.scheme, Host: exampleBucket, Path: "/a%20b", Header: h, Body: func() (io.Reader, error) { return strings.NewReader("Welcome to Amazon S3."), nil }}
		got, err := Sign(inject.NewSecret([]byte(exampleKey)), Spec{Service: "s3", Region: "us-east-1", Payload: tc.payload, AccessKeyID: "AKID"}, r, 21, exampleTime)
		want := tc.want
		if want == "digest" {
			want = "44ce7dd67c959e0d3524ffac1771dfbba87d2b6b4b4e99e42034a8b803f8b072"
		}
		if (want == "") != (err != nil) || got.Fields["X-Amz-Content-Sha256"] != want {
			t.Errorf("%+v: %v %v", tc, got.Fields["X-Amz-Content-Sha256"], err)
		}
		var e *inject.Error
		if err != nil && (!errors.As(err, &e) || e.Code != outcome.CodeInjectionUnsupported) {
			t.Errorf("%+v: %v", tc, err)
		}
	}
}

func TestKeys(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	for text, want := range map[string]string{
		`{"Version":1,"AccessKeyId":"A","SecretAccessKey":"CANARY","SessionToken":"T","Expiration":"2013-05-25T00:00:00Z"}` + "\n": "",
		`{"AccessKeyId":"A","SecretAccessKey":"CANARY","Expiration":"2013-05-23T00:00:00Z"}`:                                       inject.ReasonExpired,
		`{"AccessKeyId":"A"}`: inject.ReasonMalformed, `CANARY`: inject.ReasonMalformed,
	} {
		err := checkSecret(inject.NewSecret([]byte(text)), Spec{}, exampleTime)
		var e *inject.Error
		if want == "" && err != nil || want != "" && (!errors.As(err, &e) || e.Reason != want || strings.Contains(err.Error(), "CANARY")) {
			t.Errorf("%q: %v", text, err)
		}
	}
	if err := checkSecret(inject.NewSecret([]byte(`{"x":1}`)), Spec{AccessKeyID: "A"}, exampleTime); err == nil {
		t.Error("JSON is taken for a bare key")
	}
}

// checkSecret reports whether a secret can be used with the spec.
func checkSecret(secret inject.Secret, s Spec, now time.Time) error {
	_, err := read(secret, s.AccessKeyID, now)
	return err
}
