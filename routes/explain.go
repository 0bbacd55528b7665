package routes

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"strconv"
	"strings"
)

// Explanation says what a snapshot would do with a request, before any secret or
// network is touched. It holds names of credentials, never values. The JSON form is
// what "waybill explain --json" prints.
type Explanation struct {
	Snapshot string `json:"snapshot"`
	Method   string `json:"method"`
	// Target is scheme://host:port/path as it would be dialled, without query.
	Target string `json:"target"`
	// Upgraded reports that the request was addressed over http and goes over https.
	Upgraded bool `json:"upgraded,omitempty"`
	// Decision is "forward", "deny", "refuse" (in clear where the route wants https),
	// "tunnel" (default: tunnel) or "no_route".
	Decision string `json:"decision"`
	Route    string `json:"route,omitempty"`
	// Reason says in a sentence why the decision is not "forward".
	Reason     string            `json:"reason,omitempty"`
	Field      string            `json:"field,omitempty"`
	Code       string            `json:"code,omitempty"`
	Inject     []ExplainedHeader `json:"inject,omitempty"`
	Repeatable bool              `json:"repeatable"`
	// OnUnknown is the advice when the outcome stays unknown: "backoff" or "reconcile" (CONTRACT I6).
	OnUnknown string   `json:"on_unknown,omitempty"`
	Callers   []string `json:"callers,omitempty"`
	// Approval says, in a sentence, whether a person has to approve the request (CONTRACT D3).
	Approval string `json:"approval,omitempty"`
	// Resolve is the fixed address of the host, if the route gives one.
	Resolve string `json:"resolve,omitempty"`
	// Proxy is the upstream proxy of the route, "http://proxy.example:3128", without user
	// and password.
	Proxy string `json:"proxy,omitempty"`
}

// ExplainedHeader is one injection by name.
type ExplainedHeader struct {
	Mode       string `json:"mode,omitempty"` // "": a field
	Header     string `json:"header"`         // the field, or where else the secret goes
	Template   string `json:"template,omitempty"`
	Credential string `json:"credential,omitempty"` // "" in what a caller is told
}

// ErrBadURL is returned by Explain for text that is no absolute http(s) URL.
var ErrBadURL = errors.New("not an absolute http or https URL")

// Explain tells what the snapshot makes of a method and an absolute URL. Errors wrap
// ErrBadURL, ErrBadAuthority or ErrBadPath and mean INVALID_TARGET; they do not
// repeat the URL, whose query may hold secrets.
func (s *Snapshot) Explain(method, rawURL string) (Explanation, error) {
	return s.explain(method, rawURL, nil)
}

// ExplainTo is Explain for one caller, by name: it says what that caller would be told,
// and refuses what the caller may not use (CONTRACT V4, L8).
func (s *Snapshot) ExplainTo(caller, method, rawURL string) (Explanation, error) {
	return s.explain(method, rawURL, &caller)
}

// ExplainFor is ExplainTo for the caller's own eyes. What the operator wrote for himself is
// not in it: names of credentials and the forms they are put in, who else may use a route,
// and by which addresses the host is reached; nothing is told of a route that the caller
// may not use (CONTRACT V4, L8).
func (s *Snapshot) ExplainFor(caller, method, rawURL string) (Explanation, error) {
	e, err := s.ExplainTo(caller, method, rawURL)
	e.Callers, e.Resolve, e.Proxy = nil, "", ""
	for i := range e.Inject {
		e.Inject[i].Template, e.Inject[i].Credential = "", ""
	}
	if r := s.Route(e.Route); r != nil && !r.AllowsCaller(caller) {
		e.Route, e.Reason = "", "This caller may not use the route that takes this request."
	}
	return e, err
}

// told is the message to a caller, or to the operator, who is nil: of the nearest route
// the operator may know everything.
func (m Miss) told(caller *string) string {
	switch {
	case caller != nil:
		return m.Detail(*caller)
	case m.Nearest != nil && !m.Nearest.AllowsCaller(""):
		return m.Detail(m.Nearest.Callers[0])
	default:
		return m.Detail("")
	}
}

// barred is the reason for which a caller may not use a route; "": it may.
func (r *Route) barred(caller *string) string {
	if caller == nil || r.AllowsCaller(*caller) {
		return ""
	}
	return "This caller may not use route " + strconv.Quote(r.Name) + "; callers: of the route names who may."
}

func (s *Snapshot) explain(method, rawURL string, caller *string) (Explanation, error) {
	t, path, err := parseURL(rawURL)
	if err != nil {
		return Explanation{}, err
	}
	e := Explanation{Snapshot: s.digest, Method: method, Target: t.Scheme + "://" + t.Authority() + path}
	r, miss := s.Match(method, t, path)
	switch {
	case r == nil && miss.Kind != MissMethodNever && s.def == Tunnel && t.Scheme == "https" && !s.MayIntercept(t.Host, t.Port):
		e.Decision = "tunnel"
		e.Reason = "No route names this host; with default: tunnel the connection passes without interception, secret or stored result."
		return e, nil
	case r == nil:
		e.Decision, e.Reason, e.Field, e.Code = "no_route", miss.told(caller), miss.Field(), miss.Code().String()
		return e, nil
	}
	e.Route, e.Callers = r.Name, r.Callers
	if r.Deny {
		e.Decision, e.Code, e.Field = "deny", "POLICY_DENIED", "request.target"
		e.Reason = "Route " + strconv.Quote(r.Name) + " refuses this request."
		return e, nil
	}
	if why := r.barred(caller); why != "" {
		e.Decision, e.Code, e.Reason = "deny", "POLICY_DENIED", why
		return e, nil
	}
	dial, ok := r.Dial(t)
	if !ok {
		e.Decision, e.Code, e.Field = "refuse", "INVALID_TARGET", "request.target.scheme"
		e.Reason = "Route " + strconv.Quote(r.Name) + " takes https only and does not upgrade http."
		return e, nil
	}
	e.Decision = "forward"
	e.Upgraded = dial.Scheme != t.Scheme
	e.Target = dial.Scheme + "://" + dial.Authority() + path
	e.Repeatable = r.Repeatable(method)
	e.Approval = r.explainApproval(method, path)
	e.OnUnknown = "reconcile"
	if e.Repeatable {
		e.OnUnknown = "backoff"
	}
	e.Resolve = r.Upstream.Resolve[dial.Host]
	if r.Upstream.Proxy != nil {
		e.Proxy = r.Upstream.Proxy.Origin()
	}
	for i := range r.Inject {
		in := &r.Inject[i]
		x := ExplainedHeader{Header: in.Place(), Template: in.Value, Credential: in.Credential}
		if in.Kind != InjectHeader {
			x.Mode = in.Word()
		}
		e.Inject = append(e.Inject, x)
	}
	return e, nil
}

// parseURL cuts an absolute URL at the bytes, as the proxy does with an
// absolute-form target: net/url would normalise what must stay as it is.
func parseURL(raw string) (Target, string, error) {
	scheme, rest, ok := strings.Cut(raw, "://")
	scheme = lowerASCII(scheme)
	if !ok || DefaultPort(scheme) == 0 {
		return Target{}, "", ErrBadURL
	}
	rest, _, _ = strings.Cut(rest, "#") // a fragment never leaves the client
	authority, path := rest, ""
	if i := strings.IndexAny(rest, "/?"); i >= 0 {
		authority, path = rest[:i], rest[i:]
	}
	path, _, _ = strings.Cut(path, "?")
	if path == "" {
		path = "/"
	}
	host, port, err := ParseAuthority(authority, DefaultPort(scheme))
	if err != nil {
		return Target{}, "", err
	}
	if err := CheckPath(path); err != nil {
		return Target{}, "", err
	}
	if _, err := url.Parse(raw); err != nil {
		return Target{}, "", ErrBadURL
	}
	return Target{Scheme: scheme, Host: host, Port: port}, path, nil
}

// WriteText prints the explanation for people.
func (e Explanation) WriteText(w io.Writer) error {
	var b strings.Builder
	line := func(k, v string) {
		if v != "" {
			fmt.Fprintf(&b, "%-12s %s\n", k, v)
		}
	}
	line("request", e.Method+" "+e.Target)
	if e.Upgraded {
		line("", "(addressed over http, carried over https)")
	}
	line("decision", e.Decision)
	line("route", e.Route)
	line("why", e.Reason)
	line("code", e.Code)
	line("field", e.Field)
	for _, in := range e.Inject {
		what := in.Header
		if in.Template != "" {
			what += ": " + in.Template
		}
		if in.Mode == "hmac" || in.Mode == "sigv4" {
			what += " (" + in.Mode + ")"
		}
		line("inject", what+"   (credential "+in.Credential+")")
	}
	if e.Decision == "forward" {
		if len(e.Inject) == 0 {
			line("inject", "nothing")
		}
		line("repeatable", strconv.FormatBool(e.Repeatable))
		line("on unknown", e.OnUnknown)
	}
	line("approval", e.Approval)
	line("callers", strings.Join(e.Callers, ", "))
	line("resolve", e.Resolve)
	line("proxy", e.Proxy)
	line("snapshot", e.Snapshot)
	_, err := io.WriteString(w, b.String())
	return err
}
