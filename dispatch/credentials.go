package dispatch

import (
	"context"
	"errors"
	"log/slog"
	"net/http"

	"waybill/inject"
	"waybill/outcome"
	"waybill/routes"
)

// authorise obtains the secrets of the route, each once for the action, and attaches
// none: what is decided about them – ids, versions, modes – is in a.credential, for the
// record and for an approval (CONTRACT C2, D1, D3). Called again, it obtains them anew:
// whoever waited in between compares the versions.
func (a *action) authorise(ctx context.Context) *Refusal {
	a.credential, a.resolved, a.identity = nil, make(map[string]inject.Resolved, len(a.route.Inject)), ""
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
		got, ok := a.resolved[in.Credential]
		if !ok {
			if got, err = a.binding.Credentials.Resolve(ctx, in.Credential); err != nil {
				return a.credentialRefusal(in, err)
			}
			a.resolved[in.Credential] = got
		}
		used.ID = join(used.ID, got.ID)
		used.Version = join(used.Version, got.Shown())
		used.Mode = join(used.Mode, mode)
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

// attach sets the secrets that authorise obtained, last of all fields, and seals the
// request (CONTRACT C1, D2, V2).
func (a *action) attach(context.Context) *Refusal {
	for i := range a.route.Inject {
		in := &a.route.Inject[i]
		if err := a.put(in, a.resolved[in.Credential]); err != nil {
			return a.credentialRefusal(in, err)
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
	tmpl, err := p.template(in.Value)
	if err != nil {
		return "", err
	}
	return tmpl.Mode(), nil
}

// put sets one secret.
func (a *action) put(in *routes.Injection, got inject.Resolved) error {
	tmpl, err := a.p.template(in.Value)
	if err != nil {
		return err
	}
	value, err := tmpl.Render(got.Secret)
	if err != nil {
		return err
	}
	// The canonical name, or the field would stand beside what was removed under it.
	a.out.Header[http.CanonicalHeaderKey(in.Header)] = []string{value}
	a.secrets = append(a.secrets, value, string(got.Secret.Expose()))
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
	for id, got := range a.resolved {
		a.binding.Credentials.Suspect(id, got.Issue)
	}
}
