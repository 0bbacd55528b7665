package inject

import (
	"crypto/hmac"
	"crypto/md5"  //nolint:gosec // Content-MD5 of services that ask for it
	"crypto/sha1" //nolint:gosec // HMAC-SHA1 of services that ask for it
	"crypto/sha256"
	"crypto/sha512"
	"encoding/base64"
	"encoding/hex"
	"hash"
	"io"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"waybill/outcome"
)

// Signable is a request as it will be sent.
type Signable struct {
	Method, Scheme, Host, Path, Query string
	Header                            http.Header
	Body                              func() (io.Reader, error) // nil: none
}

// HMACSpec says what a signature covers and how it is written (RFC 2104).
type HMACSpec struct {
	Algorithm string // "sha256" (default), "sha512", "sha1"
	// Canonical is the text that is signed: literal text and the placeholders ${method},
	// ${scheme}, ${host}, ${path}, ${query}, ${sorted_query}, ${target} (path and query),
	// ${timestamp}, ${nonce}, ${body}, ${body_sha256}, ${body_sha256_base64},
	// ${body_md5_base64} and ${header:Name}.
	Canonical string
	Encoding  string // "hex" (default), "base64", "base64url"
	Key       string // "text" (default), "hex", "base64"
	Timestamp string // "unix" (default), "unix_ms", "rfc3339", "http"
	Value     string // of the field: ${signature}, ${timestamp}, ${nonce} and literal text
}

// Signer makes HMAC signatures. It is immutable.
type Signer struct {
	spec      HMACSpec
	canonical []string // literal, placeholder, literal, …
	value     []string
}

// Signed is what a Signer made for one request. Value is the field.
type Signed struct{ Value, Signature, Timestamp, Nonce string }

var canonicalNames = []string{"method", "scheme", "host", "path", "query", "sorted_query", "target", "timestamp", "nonce", "body", "body_sha256", "body_sha256_base64", "body_md5_base64"}

// NewSigner checks a spec. Its error is an *Error with INJECTION_UNSUPPORTED.
func NewSigner(s HMACSpec) (*Signer, error) {
	for _, d := range []struct {
		v    *string
		list []string
	}{
		{&s.Algorithm, []string{"sha256", "sha512", "sha1"}}, {&s.Encoding, []string{"hex", "base64", "base64url"}},
		{&s.Key, []string{"text", "hex", "base64"}}, {&s.Timestamp, []string{"unix", "unix_ms", "rfc3339", "http"}},
	} {
		if *d.v == "" {
			*d.v = d.list[0]
		}
		if !slices.Contains(d.list, *d.v) {
			return nil, unsupported(ReasonMode, 0)
		}
	}
	out := &Signer{spec: s}
	var err error
	if out.canonical, err = splitPlaceholders(s.Canonical, func(name string) bool {
		header, isHeader := strings.CutPrefix(name, "header:")
		return slices.Contains(canonicalNames, name) || isHeader && isToken(header)
	}); err != nil {
		return nil, err
	}
	signed := false
	if out.value, err = splitPlaceholders(s.Value, func(name string) bool {
		signed = signed || name == "signature"
		return name == "signature" || name == "timestamp" || name == "nonce"
	}); err != nil {
		return nil, err
	}
	if len(out.canonical) < 2 || !signed {
		return nil, unsupported(ReasonNoPlaceholder, 0)
	}
	for i := range len(s.Value) {
		if s.Value[i] < ' ' || s.Value[i] > '~' {
			return nil, unsupported(ReasonTemplate, i+1)
		}
	}
	return out, nil
}

func unsupported(reason string, position int) *Error {
	return &Error{Code: outcome.CodeInjectionUnsupported, Reason: reason, Position: position}
}

func isToken(s string) bool {
	for i := range len(s) {
		if !isTokenByte(s[i]) {
			return false
		}
	}
	return s != ""
}

// splitPlaceholders returns literals at even and placeholders at odd places.
func splitPlaceholders(s string, known func(name string) bool) ([]string, error) {
	if len(s) > maxTemplate {
		return nil, unsupported(ReasonTooLarge, maxTemplate)
	}
	var out []string
	for rest := s; ; {
		at := strings.Index(rest, "${")
		if at < 0 {
			return append(out, rest), nil
		}
		end := strings.IndexByte(rest[at:], '}')
		if end < 0 || !known(rest[at+2:at+end]) {
			return nil, unsupported(ReasonPlaceholder, len(s)-len(rest)+at+1)
		}
		out = append(out, rest[:at], rest[at+2:at+end])
		rest = rest[at+end+1:]
	}
}

// Sign signs r at the time now with a nonce that the caller chose at random.
func (s *Signer) Sign(key Secret, r *Signable, now time.Time, nonce string) (Signed, error) {
	k := key.Expose()
	defer func() { clear(k) }()
	switch s.spec.Key {
	case "hex":
		raw, err := hex.DecodeString(string(k))
		if err != nil || len(raw) == 0 {
			return Signed{}, invalid(ReasonMalformed, 0)
		}
		clear(k)
		k = raw
	case "base64":
		raw, err := decodeBase64(string(k))
		if err != nil || len(raw) == 0 {
			return Signed{}, invalid(ReasonMalformed, 0)
		}
		clear(k)
		k = raw
	}
	out := Signed{Timestamp: s.stamp(now), Nonce: nonce}
	mac := hmac.New(s.hash(), k)
	for i, part := range s.canonical {
		if i%2 == 0 {
			mac.Write([]byte(part))
			continue
		}
		if err := s.write(mac, part, r, &out); err != nil {
			return Signed{}, err
		}
	}
	sum := mac.Sum(nil)
	switch s.spec.Encoding {
	case "hex":
		out.Signature = hex.EncodeToString(sum)
	case "base64":
		out.Signature = base64.StdEncoding.EncodeToString(sum)
	case "base64url":
		out.Signature = base64.RawURLEncoding.EncodeToString(sum)
	}
	var b strings.Builder
	for i, part := range s.value {
		switch {
		case i%2 == 0:
			b.WriteString(part)
		case part == "signature":
			b.WriteString(out.Signature)
		case part == "timestamp":
			b.WriteString(out.Timestamp)
		default:
			b.WriteString(out.Nonce)
		}
	}
	out.Value = b.String()
	return out, nil
}

func decodeBase64(s string) ([]byte, error) {
	s = strings.TrimRight(s, "=")
	if strings.ContainsAny(s, "-_") {
		return base64.RawURLEncoding.DecodeString(s)
	}
	return base64.RawStdEncoding.DecodeString(s)
}

func (s *Signer) hash() func() hash.Hash {
	switch s.spec.Algorithm {
	case "sha512":
		return sha512.New
	case "sha1":
		return sha1.New
	}
	return sha256.New
}

func (s *Signer) stamp(now time.Time) string {
	switch s.spec.Timestamp {
	case "unix_ms":
		return strconv.FormatInt(now.UnixMilli(), 10)
	case "rfc3339":
		return now.UTC().Format(time.RFC3339)
	case "http":
		return now.UTC().Format(http.TimeFormat)
	}
	return strconv.FormatInt(now.Unix(), 10)
}

func (s *Signer) write(w io.Writer, name string, r *Signable, out *Signed) error {
	text := ""
	switch name {
	case "method":
		text = r.Method
	case "scheme":
		text = r.Scheme
	case "host":
		text = r.Host
	case "path":
		text = r.Path
	case "query":
		text = r.Query
	case "sorted_query":
		pairs := strings.Split(r.Query, "&")
		slices.Sort(pairs)
		text = strings.Join(pairs, "&")
	case "target":
		if text = r.Path; r.Query != "" {
			text += "?" + r.Query
		}
	case "timestamp":
		text = out.Timestamp
	case "nonce":
		text = out.Nonce
	case "body":
		return copyBody(w, r)
	case "body_sha256", "body_sha256_base64":
		h := sha256.New()
		if err := copyBody(h, r); err != nil {
			return err
		}
		if text = hex.EncodeToString(h.Sum(nil)); name != "body_sha256" {
			text = base64.StdEncoding.EncodeToString(h.Sum(nil))
		}
	case "body_md5_base64":
		h := md5.New() //nolint:gosec // see the import
		if err := copyBody(h, r); err != nil {
			return err
		}
		text = base64.StdEncoding.EncodeToString(h.Sum(nil))
	default:
		field, _ := strings.CutPrefix(name, "header:")
		text = strings.Join(r.Header.Values(field), ", ")
	}
	_, err := io.WriteString(w, text)
	return err
}

func copyBody(w io.Writer, r *Signable) error {
	if r.Body == nil {
		return nil
	}
	body, err := r.Body()
	if err == nil {
		_, err = io.Copy(w, body)
	}
	if err != nil {
		return &Error{Code: outcome.CodeInjectionUnsupported, Reason: ReasonSigning, cause: err}
	}
	return nil
}
