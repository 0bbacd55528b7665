package dispatch

import (
	"context"
	"crypto/sha256"
	"errors"
	"slices"
	"strings"
	"time"

	"waybill/internal/control"
	"waybill/outcome"
	"waybill/routes"
)

// redirectWindow is how long a relayed redirect to another origin is remembered
// (CONTRACT R3): longer than any client takes to follow one.
const redirectWindow = time.Hour

// locationOf resolves a Location field against the target it answers (RFC 9110
// §10.2.2, RFC 3986 §5.2). ok is false for one that names no http(s) origin of its
// own; same reports a reference without an authority, which cannot leave the origin.
func locationOf(location string, base routes.Target) (t routes.Target, path, query string, hasQuery, same, ok bool) {
	ref, _, _ := strings.Cut(strings.TrimSpace(location), "#")
	scheme := base.Scheme
	if i := strings.Index(ref, ":"); i > 0 && !strings.ContainsAny(ref[:i], "/?") {
		scheme, ref = strings.ToLower(ref[:i]), ref[i+1:]
		if scheme != "http" && scheme != "https" || !strings.HasPrefix(ref, "//") {
			return routes.Target{}, "", "", false, false, false
		}
	}
	// Browsers read backslashes as slashes here.
	if len(ref) >= 2 && (ref[0] == '/' || ref[0] == '\\') && (ref[1] == '/' || ref[1] == '\\') {
		ref = ref[2:]
	} else {
		return base, "", "", false, true, true
	}
	end := strings.IndexAny(ref, "/?\\")
	if end < 0 {
		end = len(ref)
	}
	auth := ref[:end]
	if at := strings.LastIndexByte(auth, '@'); at >= 0 {
		auth = auth[at+1:]
	}
	host, port, err := routes.ParseAuthority(auth, routes.DefaultPort(scheme))
	if err != nil {
		return routes.Target{}, "", "", false, false, false
	}
	path, query, hasQuery = strings.Cut(ref[end:], "?")
	if path == "" {
		path = "/"
	}
	return routes.Target{Scheme: scheme, Host: host, Port: port}, path, query, hasQuery, false, true
}

// redirectKey names a location without telling it: it may hold a signature.
func redirectKey(t routes.Target, path, query string, hasQuery bool) string {
	h := sha256.New()
	mark := ""
	if hasQuery {
		mark = "?"
	}
	if path == "" {
		path = "/"
	}
	field(h, "waybill redirect 1", t.Scheme, t.Authority(), path, mark, query)
	return digestText(h)
}

// relayedRedirect returns the key of the other origin that a complete 3xx sends its
// caller to, "" for none (CONTRACT R3). http is another origin than https (R4).
func relayedRedirect(status int, location []string, from routes.Target) string {
	if status < 300 || status > 399 || len(location) != 1 {
		return ""
	}
	t, path, query, hasQuery, same, ok := locationOf(location[0], from)
	if !ok || same || t == from {
		return ""
	}
	return redirectKey(t, path, query, hasQuery)
}

// RedirectKey is the location that the action's relayed answer sends its caller to on
// another origin, as a digest; "" for none. The journal finds the action by it.
func (r *Record) RedirectKey() string {
	if r.Result == nil {
		return ""
	}
	return r.Result.RedirectTo
}

// followsRedirect refuses a request that follows a redirect which Waybill relayed from
// another origin, where its own route would attach a credential (CONTRACT R3): the
// redirecting origin would choose what is done with it.
func (a *action) followsRedirect(ctx context.Context) *Refusal {
	if len(a.route.Inject) == 0 || control.Off("R3-no-credential-across-origins") {
		return nil
	}
	key := redirectKey(a.addressed, a.s.RawPath, a.s.RawQuery, a.s.HasQuery)
	rec, err := a.p.cfg.Journal.Redirecting(ctx, a.s.Caller.ID, key)
	switch {
	case errors.Is(err, ErrActionNotFound):
		return nil
	case err != nil:
		return a.unreadable(err)
	case a.now().Sub(rec.EndedAt) > redirectWindow:
		return nil
	case rec.Result != nil && slices.Contains(a.route.RedirectFrom, rec.Result.RedirectFrom):
		return nil
	}
	r := refusal(outcome.CodeRedirectCrossOrigin, "request.target", "cross_origin_redirect",
		"The request follows a redirect from another origin, and this route does not name that origin in redirect_from.")
	r.Earlier = rec.ID
	return r
}
