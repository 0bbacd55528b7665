package routes

import (
	"errors"
	"net/http"
	"slices"
	"unicode/utf8"
)

// InjectionKind says where a secret goes. Zero is InjectHeader.
type InjectionKind uint8

// The kinds.
const (
	InjectHeader            InjectionKind = iota // Header: Value
	InjectCookie                                 // Name=Value in the Cookie field
	InjectQuery                                  // Name=Value in the query
	InjectBody                                   // Value at the JSON pointer Name of the body
	InjectHMAC                                   // Header: Value with a signature made with the secret
	InjectSigV4                                  // AWS Signature Version 4
	InjectClientCertificate                      // the certificate and key of the TLS connection
	injectionKinds
)

// Injection attaches one secret. Value is a template such as "Bearer ${secret}" or
// "Basic ${basic:user}"; with InjectHMAC it holds "${signature}".
type Injection struct {
	Kind       InjectionKind `json:",omitzero"`
	Header     string        // canonical field name; InjectHeader and InjectHMAC only
	Value      string
	Credential string
	Name       string `json:",omitzero"` // of the cookie or parameter; the JSON pointer (RFC 6901)
	HMAC       *HMAC  `json:",omitzero"`
	SigV4      *SigV4 `json:",omitzero"`
}

// HMAC says what is signed and how (InjectHMAC). The words are those of package inject,
// which checks them.
type HMAC struct {
	Algorithm string // "sha256", "sha512", "sha1"
	Canonical string // template of the text that is signed
	Encoding  string // of the signature: "hex", "base64", "base64url"
	Key       string // how the secret spells the key: "text", "hex", "base64"
	Timestamp string // "unix", "unix_ms", "rfc3339", "http"
	// TimestampHeader and NonceHeader are fields that are set with what was signed; "": none.
	TimestampHeader string
	NonceHeader     string
}

// SigV4 says how a request to AWS is signed (InjectSigV4).
type SigV4 struct {
	Service string
	Region  string
	// Payload is "signed" (the body is digested), "unsigned" (UNSIGNED-PAYLOAD, over https
	// only) or "auto": what the caller's own X-Amz-Content-Sha256 asks for, else signed.
	Payload string
	// AccessKeyID is set when the secret is the bare secret key; "": the secret is JSON.
	AccessKeyID string
}

// Fields returns the canonical names of the fields that the injection sets, none of
// which a caller may supply.
func (in *Injection) Fields() []string {
	switch in.Kind {
	case InjectHeader:
		return []string{http.CanonicalHeaderKey(in.Header)}
	case InjectHMAC:
		out := []string{http.CanonicalHeaderKey(in.Header)}
		for _, name := range []string{in.HMAC.TimestampHeader, in.HMAC.NonceHeader} {
			if name != "" {
				out = append(out, http.CanonicalHeaderKey(name))
			}
		}
		return out
	case InjectSigV4:
		return []string{"Authorization", "X-Amz-Date", "X-Amz-Security-Token"}
	case InjectCookie, InjectQuery, InjectBody, InjectClientCertificate, injectionKinds:
	}
	return nil
}

// Signs reports whether the injection covers target or body: the request it was made
// for is the only one it fits.
func (in *Injection) Signs() bool { return in.Kind == InjectHMAC || in.Kind == InjectSigV4 }

// Word is the name of the kind as the configuration has it.
func (in *Injection) Word() string {
	switch in.Kind {
	case InjectHeader:
		return "header"
	case InjectCookie:
		return "cookie"
	case InjectQuery:
		return "query"
	case InjectBody:
		return "body"
	case InjectHMAC:
		return "hmac"
	case InjectSigV4:
		return "sigv4"
	case InjectClientCertificate:
		return "client_certificate"
	case injectionKinds:
	}
	return "invalid"
}

// Place is where the secret goes, for people: "Authorization", "cookie sid".
func (in *Injection) Place() string {
	switch in.Kind {
	case InjectHeader, InjectHMAC:
		return in.Header
	case InjectCookie, InjectQuery, InjectBody:
		return in.Word() + " " + in.Name
	case InjectSigV4:
		return "Authorization"
	case InjectClientCertificate, injectionKinds:
	}
	return in.Word()
}

func (in *Injection) check() error {
	if in.Credential == "" || !utf8.ValidString(in.Header+in.Value+in.Credential+in.Name) || in.Kind >= injectionKinds {
		return errors.New("an injection is incomplete")
	}
	ok := false
	switch in.Kind {
	case InjectHeader:
		ok = in.Header != "" && in.Name == ""
	case InjectCookie, InjectQuery, InjectBody:
		ok = in.Header == "" && in.Name != ""
	case InjectHMAC:
		ok = in.Header != "" && in.HMAC != nil
	case InjectSigV4:
		ok = in.Header == "" && in.SigV4 != nil
	case InjectClientCertificate:
		ok = in.Header == "" && in.Name == "" && in.Value == ""
	case injectionKinds:
	}
	if !ok || (in.HMAC != nil) != (in.Kind == InjectHMAC) || (in.SigV4 != nil) != (in.Kind == InjectSigV4) {
		return errors.New("an injection does not fit its kind")
	}
	return nil
}

// checkInjections holds the combinations that cannot work, whatever is injected.
func (r *Route) checkInjections() error {
	taken := map[string]bool{}
	signs := ""
	for i := range r.Inject {
		in := &r.Inject[i]
		if err := in.check(); err != nil {
			return err
		}
		places := in.Fields()
		switch in.Kind {
		case InjectCookie, InjectQuery, InjectBody, InjectClientCertificate:
			places = []string{in.Word() + " " + in.Name}
		case InjectHeader, InjectHMAC, InjectSigV4, injectionKinds:
		}
		for _, place := range places {
			if taken[place] {
				return errors.New("two injections set the same place")
			}
			taken[place] = true
		}
		switch {
		case taken["Cookie"] && r.Injects(InjectCookie):
			return errors.New("a cookie is injected into a field that is injected whole")
		case in.Signs() && signs != "":
			return errors.New("two injections sign the request")
		case in.Signs():
			signs = in.Word()
		case in.Kind == InjectClientCertificate && r.Upstream.AllowPlaintext:
			return errors.New("a client certificate needs https")
		}
		if r.Redirects == RedirectsSameOrigin && (in.Signs() || in.Kind == InjectQuery || in.Kind == InjectBody) {
			return errors.New("a redirect is followed with fields and certificates only")
		}
	}
	if signs != "" && r.PassAuthorization && slices.Contains(r.injectedFields(), "Authorization") {
		return errors.New("the caller's Authorization and an injected one exclude each other")
	}
	return nil
}

func (r *Route) injectedFields() []string {
	var out []string
	for i := range r.Inject {
		out = append(out, r.Inject[i].Fields()...)
	}
	return out
}

// Injects reports whether the route injects something of the kind.
func (r *Route) Injects(kind InjectionKind) bool {
	return slices.ContainsFunc(r.Inject, func(in Injection) bool { return in.Kind == kind })
}

func cloneInjections(list []Injection) []Injection {
	out := cloneSlice(list)
	for i := range out {
		if h := out[i].HMAC; h != nil {
			c := *h
			out[i].HMAC = &c
		}
		if v := out[i].SigV4; v != nil {
			c := *v
			out[i].SigV4 = &c
		}
	}
	return out
}
