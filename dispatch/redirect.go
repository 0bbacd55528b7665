package dispatch

import (
	"context"
	"errors"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/net/idna"

	"waybill/internal/control"
	"waybill/outcome"
	"waybill/routes"
)

// redirectWindow is how long a relayed redirect to another origin is remembered
// (CONTRACT R3): longer than any client takes to follow one. It begins anew whenever the
// redirect is relayed from the store (H3, I9), and with the process, which does not know when
// another one did that – as long as the store may have had it then.
const redirectWindow = time.Hour

// Relayed is told that the action's stored answer goes to its caller.
func (p *Pipeline) Relayed(rec *Record) {
	if rec.RedirectKey() != "" {
		p.relays.note(rec.ID, redirectWindow)
	}
}

// relayedWithin reports whether the action's answer may have been relayed that recently.
func (p *Pipeline) relayedWithin(d time.Duration, rec *Record) bool {
	age, known := p.relays.since(rec.ID)
	if !known {
		age = time.Since(p.began)
		if r := rec.Result; r != nil && p.cfg.Clock.Now().Sub(r.ExpiresAt) > d && p.cfg.Clock.Now().Sub(rec.EndedAt) > d {
			return false
		}
	}
	return age <= d
}

// locationOf resolves a Location field against the target it answers (RFC 9110
// §10.2.2, RFC 3986 §5.2). ok is false for one that names no http(s) origin of its
// own; same reports a reference without an authority, which cannot leave the origin.
func locationOf(location string, base routes.Target) (t routes.Target, path, query string, hasQuery, same, ok bool) {
	// Browsers take tabs out (WHATWG URL, basic URL parser, step 3).
	ref, _, _ := strings.Cut(strings.TrimSpace(strings.ReplaceAll(location, "\t", "")), "#")
	scheme, named := base.Scheme, false
	if i := strings.Index(ref, ":"); i > 0 && !strings.ContainsAny(ref[:i], "/?\\") {
		scheme, named, ref = strings.ToLower(ref[:i]), true, ref[i+1:]
		if scheme != "http" && scheme != "https" {
			return routes.Target{}, "", "", false, false, false
		}
	}
	// Browsers read backslashes as slashes here, and any number of them before the host;
	// with a scheme curl takes one for two, and browsers none, where it is not the base's.
	rest := strings.TrimLeft(ref, "/\\")
	switch slashes := len(ref) - len(rest); {
	case slashes >= 2, named && slashes == 1, named && scheme != base.Scheme:
		ref = rest
	case named:
		return routes.Target{}, "", "", false, false, false
	default:
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
		// What no route names as it stands, a client may still turn into one that does.
		host, port, err = routes.ParseAuthority(mended(auth), routes.DefaultPort(scheme))
	}
	if err != nil {
		return routes.Target{}, "", "", false, false, false
	}
	path, query, hasQuery = strings.Cut(ref[end:], "?")
	if path == "" {
		path = "/"
	}
	return routes.Target{Scheme: scheme, Host: host, Port: port}, path, query, hasQuery, false, true
}

// mended does to an authority what clients do before they ask for it: percent-decoding,
// IDNA mapping, plain numbers of ports and addresses (WHATWG URL, host parsing).
func mended(auth string) string {
	host, port := auth, ""
	if i := strings.LastIndexByte(auth, ':'); i >= 0 && !strings.ContainsAny(auth[i:], "]") {
		host, port = auth[:i], strings.TrimLeft(auth[i+1:], "0")
	}
	host = unescaped(host)
	if a, err := idna.Lookup.ToASCII(host); err == nil {
		host = a
	}
	if ip, ok := addressOf(host); ok {
		host = ip.String()
	}
	if port == "" {
		return host
	}
	return host + ":" + port
}

// addressOf reads IPv4 addresses in all spellings that inet_aton takes.
func addressOf(host string) (netip.Addr, bool) {
	parts := strings.Split(strings.TrimSuffix(host, "."), ".")
	if len(parts) > 4 {
		return netip.Addr{}, false
	}
	var v uint64
	for i, p := range parts {
		bits := 8
		if i == len(parts)-1 {
			bits = 8 * (5 - len(parts))
		}
		n, err := strconv.ParseUint(strings.ToLower(p), 0, bits)
		if err != nil || strings.ContainsAny(p, "_oObB") {
			return netip.Addr{}, false
		}
		v = v<<bits | n
	}
	return netip.AddrFrom4([4]byte{byte(v >> 24), byte(v >> 16), byte(v >> 8), byte(v)}), true
}

// unescaped decodes percent-encoding once; what is none stays.
func unescaped(s string) string {
	b := make([]byte, 0, len(s))
	for i := 0; i < len(s); i++ {
		if s[i] == '%' && i+2 < len(s) {
			if n, err := strconv.ParseUint(s[i+1:i+3], 16, 8); err == nil {
				b = append(b, byte(n))
				i += 2
				continue
			}
		}
		b = append(b, s[i])
	}
	return string(b)
}

// visibleOf is what all clients agree on in a path or a query: they encode more or less
// of it, and read bytes outside ASCII in several ways.
func visibleOf(s string) string {
	if plainQuery(s) && strings.IndexByte(s, '%') < 0 {
		return s
	}
	return strings.Map(func(r rune) rune {
		if r <= ' ' || r >= 0x7f {
			return -1
		}
		return r
	}, unescaped(s))
}

// resolvedPath removes dot segments, as every client does (RFC 3986 §5.2.4), and empty ones.
func resolvedPath(path string) string {
	if n := len(path); n > 1 && path[0] == '/' && path[n-1] != '/' && plainQuery(path) && !strings.ContainsAny(path, "%\\") && !strings.Contains(path, "//") && !strings.Contains(path, "/.") {
		return path // as nearly every one is
	}
	var out []string
	for seg := range strings.SplitSeq(strings.ReplaceAll(visibleOf(path), "\\", "/"), "/") {
		switch seg {
		case "", ".":
		case "..":
			out = out[:max(len(out)-1, 0)]
		default:
			out = append(out, seg)
		}
	}
	return "/" + strings.Join(out, "/")
}

// redirectKey names a location without telling it: it may hold a signature. Locations
// that one client or another makes the same request of have the same key; scheme and
// default port are left out, since a client may upgrade to https by itself (HSTS).
func redirectKey(t routes.Target, path, query string) string {
	f := newFields()
	if t.Port == routes.DefaultPort("http") {
		t.Port = routes.DefaultPort("https")
	}
	f.add("waybill redirect 2", t.Authority(), resolvedPath(path), visibleOf(query))
	return f.text()
}

// oneLocation leaves the one Location in the head of a redirect that is remembered:
// clients differ in which of several they follow (RFC 9110 §10.2.2), and in the host of
// one with a backslash before an "@", which is no URI and is not relayed at all.
func oneLocation(h http.Header) {
	list := h["Location"]
	if len(list) == 0 {
		return
	}
	ref, named := strings.ReplaceAll(strings.TrimSpace(list[0]), "\t", ""), false
	if i := strings.IndexByte(ref, ':'); i >= 0 && !strings.ContainsAny(ref[:i], "/?\\") {
		ref, named = ref[i+1:], true
	}
	rest := strings.TrimLeft(ref, "/\\")
	if !named && len(ref)-len(rest) < 2 {
		rest = "" // a path
	}
	ref = rest
	if end := strings.IndexAny(ref, "/?#"); end >= 0 {
		ref = ref[:end]
	}
	if back := strings.IndexByte(ref, '\\'); back >= 0 && strings.IndexByte(ref[back:], '@') >= 0 {
		delete(h, "Location")
		return
	}
	h["Location"] = list[:1]
}

// relayedRedirect returns the key of the other origin that a complete 3xx sends its
// caller to, "" for none (CONTRACT R3). http is another origin than https (R4).
func relayedRedirect(status int, location []string, from routes.Target) string {
	if status < 300 || status > 399 || len(location) != 1 {
		return ""
	}
	t, path, query, _, same, ok := locationOf(location[0], from)
	if !ok || same || t == from {
		return ""
	}
	return redirectKey(t, path, query)
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
	key := redirectKey(a.addressed, a.s.RawPath, a.s.RawQuery)
	rec, err := a.p.cfg.Journal.Redirecting(ctx, a.s.Caller.ID, key)
	switch {
	case errors.Is(err, ErrActionNotFound):
		return nil
	case err != nil:
		return a.unreadable(err)
	case !a.p.relayedWithin(redirectWindow, &rec):
		return nil
	case rec.Result != nil && (slices.Contains(a.route.RedirectFrom, rec.Result.RedirectFrom) || rec.Result.RedirectFrom == a.addressed.Origin()):
		return nil
	}
	r := refusal(outcome.CodeRedirectCrossOrigin, "request.target", "cross_origin_redirect",
		"The request follows a redirect from another origin, and this route does not name that origin in redirect_from.")
	r.Earlier = rec.ID
	return r
}
