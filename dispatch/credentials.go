package dispatch

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"log/slog"
	"mime"
	"net/http"
	"strings"
	"time"

	"waybill/inject"
	"waybill/inject/sigv4"
	"waybill/outcome"
	"waybill/routes"
)

// authorise obtains the secrets of the route, each once for the action, and attaches
// none: what is decided about them – ids, versions, modes – is in a.credential, for the
// record and for an approval (CONTRACT C2, D1, D3). Called again, it obtains them anew:
// whoever waited in between compares the versions.
func (a *action) authorise(ctx context.Context) *Refusal {
	a.credential, a.resolved, a.identity = nil, nil, ""
	if refused := a.checkBody(ctx); refused != nil {
		return refused
	}
	var used Credential
	for i := range a.route.Inject {
		in := &a.route.Inject[i]
		if a.out.Target.Scheme != "https" && !a.route.Upstream.AllowPlaintext {
			return refusal(outcome.CodeInjectionUnsupported, "", "plaintext", "A secret is never sent in clear.")
		}
		mode, err := a.p.mode(in)
		if err != nil {
			return a.credentialRefusal(in, err)
		}
		// Two injections of one action never mix two versions of a credential.
		got := a.resolvedOf(in.Credential)
		if got.ID == "" {
			start := time.Now()
			got, err = a.binding.Credentials.Resolve(ctx, in.Credential)
			a.p.measureFetch(in.Credential, &got, err, time.Since(start))
			if err != nil {
				return a.credentialRefusal(in, err)
			}
			a.resolved = append(a.resolved, got)
		}
		used.ID = join(used.ID, got.ID)
		used.Version = join(used.Version, got.Shown())
		used.Mode = join(used.Mode, mode)
	}
	if refused := a.authoriseProxy(ctx); refused != nil {
		return refused
	}
	if used.ID != "" {
		a.credential = &used
		a.identity = used.ID + "@" + used.Version
	}
	if used.ID == "" || a.route.PassAuthorization {
		// What the caller presents to the origin may authenticate the connection itself
		// (Negotiate, NTLM): it is not shared with another caller (V4, RFC 9110 §3.3).
		a.identity += " caller " + a.s.Caller.ID
	}
	return nil
}

// resolvedOf is what authorise obtained; zero: nothing, or not yet.
func (a *action) resolvedOf(credential string) inject.Resolved {
	for i := range a.resolved {
		if a.resolved[i].ID == credential {
			return a.resolved[i]
		}
	}
	return inject.Resolved{}
}

// authoriseProxy obtains the credential of the upstream proxy. It is no part of the
// request: no field of it holds it, and no approval covers it.
func (a *action) authoriseProxy(ctx context.Context) *Refusal {
	a.proxyAuthorization, a.proxyVersion = "", ""
	p := a.route.Upstream.Proxy
	if p == nil || p.Credential == "" {
		return nil
	}
	in := &routes.Injection{Credential: p.Credential}
	start := time.Now()
	got, err := a.binding.Credentials.Resolve(ctx, p.Credential)
	a.p.measureFetch(p.Credential, &got, err, time.Since(start))
	if err != nil {
		return a.credentialRefusal(in, err)
	}
	tmpl, err := a.p.template("Basic ${basic:" + p.User + "}")
	if err != nil {
		return a.credentialRefusal(in, err)
	}
	value, err := tmpl.Render(got.Secret)
	if err != nil {
		return a.credentialRefusal(in, err)
	}
	a.proxyAuthorization, a.proxyVersion = value, got.ID+"@"+got.Shown()
	return nil
}

// attach sets the secrets that authorise obtained, last of all, and seals the request
// (CONTRACT C1, D2, V2). Signatures come after everything that they cover.
func (a *action) attach(context.Context) *Refusal {
	for _, signing := range []bool{false, true} {
		for i := range a.route.Inject {
			in := &a.route.Inject[i]
			if in.Signs() != signing {
				continue
			}
			if err := a.put(in, a.resolvedOf(in.Credential)); err != nil {
				return a.credentialRefusal(in, err)
			}
		}
	}
	if a.credential != nil {
		a.add(Event{Type: CredentialAuthorized, Credential: a.credential})
	}
	a.seal = a.sealNow()
	return nil
}

// mode is how an injection attaches its secret, for the record (C2).
func (p *Pipeline) mode(in *routes.Injection) (string, error) {
	switch in.Kind {
	case routes.InjectHeader:
		tmpl, err := p.template(in.Value)
		if err != nil {
			return "", err
		}
		return tmpl.Mode(), nil
	case routes.InjectCookie:
		return inject.ModeCookie, nil
	case routes.InjectQuery:
		return inject.ModeQuery, nil
	case routes.InjectBody:
		return inject.ModeBody, nil
	case routes.InjectHMAC:
		return inject.ModeHMAC, nil
	case routes.InjectSigV4:
		return inject.ModeSigV4, nil
	case routes.InjectClientCertificate:
		return inject.ModeClientCertificate, nil
	}
	return "", inject.NewError(outcome.CodeInjectionUnsupported, inject.ReasonMode, nil)
}

// put attaches one secret. Whatever holds it, or was made of it, goes into a.secrets.
func (a *action) put(in *routes.Injection, got inject.Resolved) error {
	switch in.Kind {
	case routes.InjectHMAC:
		return a.putHMAC(in, got)
	case routes.InjectSigV4:
		return a.putSigV4(in, got)
	case routes.InjectClientCertificate:
		return a.putCertificate(got)
	case routes.InjectHeader, routes.InjectCookie, routes.InjectQuery, routes.InjectBody:
	}
	tmpl, err := a.p.template(in.Value)
	if err != nil {
		return err
	}
	value, err := tmpl.Render(got.Secret)
	if err != nil {
		return err
	}
	a.secrets = append(a.secrets, value, string(got.Secret.Expose()))
	switch in.Kind {
	case routes.InjectHeader:
		// The canonical name, or the field would stand beside what was removed under it.
		a.out.Header[http.CanonicalHeaderKey(in.Header)] = []string{value}
	case routes.InjectCookie:
		line, err := inject.SetCookie(a.out.Header["Cookie"], in.Name, value)
		if err != nil {
			return err
		}
		a.out.Header["Cookie"] = []string{line}
		a.secrets = append(a.secrets, in.Name+"="+value)
	case routes.InjectQuery:
		a.out.RawQuery, a.out.HasQuery = inject.AppendQuery(a.out.RawQuery, in.Name, value), true
		a.secrets = append(a.secrets, inject.AppendQuery("", in.Name, value))
	case routes.InjectBody:
		return a.putBody(in, value)
	case routes.InjectHMAC, routes.InjectSigV4, routes.InjectClientCertificate:
	}
	return nil
}

// describesBytes are the fields that hold digests of a body which is changed.
var describesBytes = []string{"Content-Md5", "Digest", "Content-Digest", "Repr-Digest"}

// putBody sets a member of a JSON body. The body is in memory from here on: no file
// ever holds the secret (CONTRACT C2).
func (a *action) putBody(in *routes.Injection, value string) error {
	path, err := inject.ParsePointer(in.Name)
	if err != nil {
		return err
	}
	text, err := a.jsonBody()
	if err != nil {
		return err
	}
	if text, err = inject.SetJSON(text, path, value); err != nil {
		return err
	}
	a.body.close()
	a.body = &spool{mem: text, length: int64(len(text)), digest: sha256.Sum256(text)}
	a.out.Length, a.out.Body = a.body.length, bodyOf(a.body)
	for _, name := range describesBytes {
		delete(a.out.Header, name)
	}
	return nil
}

// jsonBody returns the request's body when it is JSON that a secret can be put into.
func (a *action) jsonBody() ([]byte, error) {
	media, _, err := mime.ParseMediaType(a.out.Header.Get("Content-Type"))
	if err != nil || media != "application/json" && !strings.HasSuffix(media, "+json") || len(a.out.Header["Content-Encoding"]) > 0 || a.body == nil || a.body.length > inject.MaxBody {
		return nil, inject.NewError(outcome.CodeInjectionUnsupported, inject.ReasonBody, nil)
	}
	return io.ReadAll(a.body.reader())
}

func (a *action) signable() *inject.Signable {
	s := &inject.Signable{Method: a.out.Method, Scheme: a.out.Target.Scheme, Host: a.out.Authority, Path: a.out.RawPath, Query: a.out.RawQuery, Header: a.out.Header}
	if a.out.Body != nil {
		s.Body = a.out.Body
	}
	return s
}

func (a *action) putHMAC(in *routes.Injection, got inject.Resolved) error {
	h := in.HMAC
	signer, err := inject.NewSigner(inject.HMACSpec{Algorithm: h.Algorithm, Canonical: h.Canonical, Encoding: h.Encoding, Key: h.Key, Timestamp: h.Timestamp, Value: in.Value})
	if err != nil {
		return err
	}
	signed, err := signer.Sign(got.Secret, a.signable(), a.now(), rand.Text())
	if err != nil {
		return err
	}
	a.out.Header[http.CanonicalHeaderKey(in.Header)] = []string{signed.Value}
	if h.TimestampHeader != "" {
		a.out.Header[http.CanonicalHeaderKey(h.TimestampHeader)] = []string{signed.Timestamp}
	}
	if h.NonceHeader != "" {
		a.out.Header[http.CanonicalHeaderKey(h.NonceHeader)] = []string{signed.Nonce}
	}
	a.secrets = append(a.secrets, string(got.Secret.Expose()), signed.Value, signed.Signature)
	return nil
}

func (a *action) putSigV4(in *routes.Injection, got inject.Resolved) error {
	s := in.SigV4
	signed, err := sigv4.Sign(got.Secret, sigv4.Spec{Service: s.Service, Region: s.Region, Payload: s.Payload, AccessKeyID: s.AccessKeyID}, a.signable(), a.out.Length, a.now())
	if err != nil {
		return err
	}
	for name, value := range signed.Fields {
		a.out.Header[http.CanonicalHeaderKey(name)] = []string{value}
	}
	a.secrets = append(a.secrets, signed.Secrets...)
	return nil
}

// putCertificate makes the certificate part of the connection that is asked for, and
// of the pool it comes from (CONTRACT E6). The key is never sent, so that no answer can
// hold it.
func (a *action) putCertificate(got inject.Resolved) error {
	c, err := inject.ClientCertificate(got.Secret)
	if err != nil {
		return err
	}
	a.certificate = &c
	sum := sha256.Sum256(c.Certificate[0])
	a.identity += " certificate sha256:" + hex.EncodeToString(sum[:])
	return nil
}

// takeover removes what the caller put where the route injects: parameters here, fields
// in outgoingHeader, so that nothing of them is in the fingerprint or beside the secret.
func (a *action) takeover() *Refusal {
	for i := range a.route.Inject {
		in := &a.route.Inject[i]
		switch in.Kind {
		case routes.InjectQuery:
			rest, found := inject.StripQuery(a.out.RawQuery, in.Name)
			if found && a.route.RejectManaged {
				return refusal(outcome.CodeHeaderForbidden, "request.target.query", "managed_parameter", "This route sets a parameter of the query itself; send the request without it.")
			}
			if a.out.RawQuery = rest; found && rest == "" {
				a.out.HasQuery = false
			}
		case routes.InjectCookie:
			if a.route.RejectManaged && a.route.PassAuthorization && inject.HasCookie(a.out.Header["Cookie"], in.Name) {
				return refusal(outcome.CodeHeaderForbidden, "request.headers.cookie", "managed_field", "This route sets a cookie itself; send the request without it.")
			}
		case routes.InjectHeader, routes.InjectBody, routes.InjectHMAC, routes.InjectSigV4, routes.InjectClientCertificate:
		}
	}
	return nil
}

// checkBody refuses, before any secret is touched, a body that the route's secret
// cannot be put into, and on a rejecting route one that has a value there (CONTRACT B1).
func (a *action) checkBody(context.Context) *Refusal {
	for i := range a.route.Inject {
		in := &a.route.Inject[i]
		if in.Kind != routes.InjectBody {
			continue
		}
		path, err := inject.ParsePointer(in.Name)
		if err != nil {
			return a.credentialRefusal(in, err)
		}
		text, err := a.jsonBody()
		if err == nil {
			_, err = inject.SetJSON(text, path, "")
		}
		if err != nil {
			return &Refusal{Facts: outcome.Facts{Phase: outcome.CredentialInjection, Outcome: outcome.NotAttempted, Retry: outcome.AfterCorrection, Code: outcome.CodeInjectionUnsupported},
				Field: "request.body", Reason: inject.ReasonBody, Detail: "This route puts a secret into the JSON object of the body; send one, uncompressed, with Content-Type: application/json."}
		}
		if a.route.RejectManaged && inject.HasJSON(text, path) {
			return refusal(outcome.CodeHeaderForbidden, "request.body", "managed_member", "This route sets a member of the body itself; send the request without it.")
		}
	}
	return nil
}

// credentialRefusal turns an error of package inject into the end of the action. The
// operator is told which credential it was; the caller is not (CONTRACT B3).
func (a *action) credentialRefusal(in *routes.Injection, err error) *Refusal {
	code, reason := outcome.CodeCredentialInvalid, "credential_invalid"
	kind := ""
	var e *inject.Error
	if errors.As(err, &e) {
		code, reason, kind = e.Code, e.Reason, e.Kind
	}
	f, ok := outcome.Of(code)
	if !ok || f.Phase != outcome.CredentialInjection {
		f, _ = outcome.Of(outcome.CodeCredentialInvalid)
	}
	// No text of the error: it names places, and a library's may quote what it read.
	a.p.cfg.Logger.Warn("credential not usable", slog.String("action", a.id.String()), slog.String("route", a.route.Name), slog.String("credential", in.Credential),
		slog.String("source", kind), slog.String("code", f.Code.String()), slog.String("reason", reason))
	return &Refusal{Facts: f, Reason: reason, credential: in.Credential}
}

// suspect tells the sources of short-lived tokens that the origin did not accept one.
func (a *action) suspect(status int) {
	if status != http.StatusUnauthorized {
		return
	}
	for i := range a.resolved {
		a.binding.Credentials.Suspect(a.resolved[i].ID, a.resolved[i].Issue)
	}
}
