// Package sigv4 signs requests to AWS (Signature Version 4) with the signer of
// aws-sdk-go-v2. It owns the rules of payloads; it promises that no error holds a key.
package sigv4

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"io"
	"net/http"
	"net/url"
	"strings"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws"
	v4 "github.com/aws/aws-sdk-go-v2/aws/signer/v4"

	"waybill/inject"
	"waybill/outcome"
)

// Spec says what is signed for.
type Spec struct {
	Service, Region string
	// Payload is "auto", "signed" or "unsigned"; "" is auto.
	Payload string
	// AccessKeyID goes with a secret that is the bare secret key; "": the secret is JSON as
	// a credential_process prints it: AccessKeyId, SecretAccessKey, SessionToken, Expiration.
	AccessKeyID string
}

// What X-Amz-Content-Sha256 may hold besides a digest.
const (
	unsigned         = "UNSIGNED-PAYLOAD"
	unsignedTrailer  = "STREAMING-UNSIGNED-PAYLOAD-TRAILER"
	signedStreaming  = "STREAMING-AWS4-"
	fieldContentHash = "X-Amz-Content-Sha256"
)

// Signed is what Sign made: the fields to set, and every secret that is in them or was
// used for them.
type Signed struct {
	Fields  map[string]string
	Secrets []string
}

// Sign signs r, whose body is length bytes long, at the time now. Only fields that
// belong to the service are signed: what hops add or change is left out.
//
// A body that the caller's library cut into chunks and signed with its placeholder
// (STREAMING-AWS4-…) cannot be signed again: INJECTION_UNSUPPORTED. One with an unsigned
// trailer (STREAMING-UNSIGNED-PAYLOAD-TRAILER) and UNSIGNED-PAYLOAD are kept over https.
func Sign(secret inject.Secret, s Spec, r *inject.Signable, length int64, now time.Time) (Signed, error) {
	keys, err := read(secret, s.AccessKeyID, now)
	if err != nil {
		return Signed{}, err
	}
	hash, err := payload(s, r)
	if err != nil {
		return Signed{}, err
	}
	query, err := url.ParseQuery(r.Query)
	if err != nil || query.Has("X-Amz-Signature") || query.Has("Signature") {
		return Signed{}, cannot() // pre-signed by somebody else, or not to be put in order
	}
	req := &http.Request{Method: r.Method, Host: r.Host, ContentLength: length, Header: http.Header{}, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		// Opaque: the path is signed byte for byte as it is sent.
		URL: &url.URL{Scheme: r.Scheme, Host: r.Host, Opaque: "//" + r.Host + r.Path, RawQuery: r.Query}}
	for name, values := range r.Header {
		if strings.HasPrefix(name, "X-Amz-") || name == "Content-Type" || name == "Content-Md5" {
			req.Header[name] = values
		}
	}
	for _, name := range []string{"X-Amz-Date", "X-Amz-Security-Token", fieldContentHash} {
		delete(req.Header, name)
	}
	if s.Service == "s3" || strings.HasPrefix(s.Service, "s3-") || len(hash) != 64 || r.Header.Get(fieldContentHash) != "" {
		req.Header.Set(fieldContentHash, hash)
	}
	signer := v4.NewSigner(func(o *v4.SignerOptions) {
		o.DisableURIPathEscaping = s.Service == "s3" || strings.HasPrefix(s.Service, "s3-")
	})
	if err := signer.SignHTTP(context.Background(), keys, req, hash, s.Service, s.Region, now); err != nil {
		return Signed{}, cannot()
	}
	out := Signed{Fields: map[string]string{}, Secrets: []string{keys.SecretAccessKey, keys.SessionToken}}
	for _, name := range []string{"Authorization", "X-Amz-Date", "X-Amz-Security-Token", fieldContentHash} {
		if v := req.Header.Get(name); v != "" {
			out.Fields[name] = v
		}
	}
	if _, signature, ok := strings.Cut(out.Fields["Authorization"], "Signature="); ok {
		out.Secrets = append(out.Secrets, signature)
	}
	return out, nil
}

func cannot() error {
	return inject.NewError(outcome.CodeInjectionUnsupported, inject.ReasonSigning, nil)
}

// payload decides what stands for the body in the signature.
func payload(s Spec, r *inject.Signable) (string, error) {
	asked := r.Header.Get(fieldContentHash)
	switch {
	case strings.HasPrefix(asked, signedStreaming):
		return "", cannot()
	case asked == unsignedTrailer:
		if s.Payload == "signed" || r.Scheme != "https" {
			return "", cannot()
		}
		return unsignedTrailer, nil
	case s.Payload == "unsigned", asked == unsigned && s.Payload != "signed":
		if r.Scheme != "https" {
			return "", cannot()
		}
		return unsigned, nil
	}
	h := sha256.New()
	if r.Body != nil {
		body, err := r.Body()
		if err != nil {
			return "", cannot()
		}
		if _, err := io.Copy(h, body); err != nil {
			return "", cannot()
		}
	}
	return hex.EncodeToString(h.Sum(nil)), nil
}

// read takes the keys out of a secret.
func read(secret inject.Secret, id string, now time.Time) (aws.Credentials, error) {
	text := secret.Expose()
	defer clear(text)
	bad := func(reason string) (aws.Credentials, error) {
		return aws.Credentials{}, inject.NewError(outcome.CodeCredentialInvalid, reason, nil)
	}
	text = bytes.TrimSpace(text)
	if id != "" {
		if len(text) == 0 || bytes.ContainsAny(text, " {\"\n") {
			return bad(inject.ReasonMalformed)
		}
		return aws.Credentials{AccessKeyID: id, SecretAccessKey: string(text)}, nil
	}
	var c struct {
		AccessKeyId, SecretAccessKey, SessionToken string //nolint:revive,staticcheck // AWS's own names
		Expiration                                 time.Time
	}
	if json.Unmarshal(text, &c) != nil || c.AccessKeyId == "" || c.SecretAccessKey == "" {
		return bad(inject.ReasonMalformed)
	}
	if !c.Expiration.IsZero() && !c.Expiration.After(now) {
		return bad(inject.ReasonExpired)
	}
	return aws.Credentials{AccessKeyID: c.AccessKeyId, SecretAccessKey: c.SecretAccessKey, SessionToken: c.SessionToken}, nil
}
