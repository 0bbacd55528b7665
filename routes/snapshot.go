package routes

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"time"

	"waybill/internal/control"
)

// ErrBadRoute is wrapped by the errors of NewSnapshot.
var ErrBadRoute = errors.New("not an acceptable route")

// A Snapshot is one immutable set of routes (CONTRACT D1): an action is bound to it
// before authorisation and keeps it, whatever is loaded afterwards. All methods are
// safe for concurrent use. The routes it hands out are shared and must not be
// changed.
type Snapshot struct {
	routes   []*compiled
	def      Default
	digest   string
	exact    map[string][]*compiled // host → routes that take it, wildcards included, in file order
	wildcard map[string][]*compiled // what follows the first dot → routes, in file order
	ssh      []*compiled            // those for SSH, in file order
}

type compiled struct {
	Route
	index   int
	ports   []endpoint
	methods []string
	paths   []glob

	*compiledSSH // nil: a route for HTTP
}

// endpoint is one combination a route takes before any upgrade: what the caller
// addressed.
type endpoint struct {
	plain bool // http
	port  int
}

// DefaultLimits returns the limits of a route that sets none.
func DefaultLimits() Limits {
	return Limits{
		Request:    32 << 20,
		Buffer:     1 << 20,
		Response:   256 << 20,
		Timeout:    10 * time.Minute,
		Idle:       5 * time.Minute,
		Hold:       2 * time.Minute,
		Connect:    10 * time.Second,
		Tries:      3,
		Duplicates: 10 * time.Minute,
		Retention:  7 * 24 * time.Hour,
	}
}

// WithDefaults returns l with every zero field set to its default.
func (l Limits) WithDefaults() Limits {
	d := DefaultLimits()
	or(&l.Request, d.Request)
	or(&l.Buffer, d.Buffer)
	or(&l.Response, d.Response)
	or(&l.Timeout, d.Timeout)
	or(&l.Idle, d.Idle)
	or(&l.Hold, d.Hold)
	or(&l.Connect, d.Connect)
	or(&l.Tries, d.Tries)
	or(&l.Duplicates, d.Duplicates)
	or(&l.Retention, d.Retention)
	return l
}

func or[T comparable](v *T, def T) {
	var zero T
	if *v == zero {
		*v = def
	}
}

// digestFormat is part of every digest. Change it when the meaning of a field
// changes although its value does not.
const digestFormat = "waybill routes 1"

// NewSnapshot checks and copies routes, fills in default limits and computes the
// digest. Nothing the caller keeps is shared with the snapshot. extraDigest is
// mixed into the digest: it stands for what decides with the routes but is not in
// them (where credentials come from, who the callers are); it may be nil.
//
// NewSnapshot refuses what would make matching ambiguous or wider than written:
// a route without name or host, two routes of one name, hosts that are not
// canonical, CONNECT, TRACE or TRACK as a method, a relaxed route that is not
// repeatable (CONTRACT F1), a refusing route that injects. All problems are
// returned together, each wrapping ErrBadRoute.
func NewSnapshot(routes []Route, def Default, extraDigest []byte) (*Snapshot, error) {
	s := &Snapshot{def: def, exact: map[string][]*compiled{}, wildcard: map[string][]*compiled{}}
	var problems []error
	if def != Deny && def != Tunnel {
		problems = append(problems, fmt.Errorf("%w: unknown default", ErrBadRoute))
	}
	names := map[string]bool{}
	for i := range routes {
		c, err := compile(&routes[i], i)
		if err == nil && names[c.Name] {
			err = errors.New("the name is used twice")
		}
		if err != nil {
			problems = append(problems, fmt.Errorf("%w: %d (%q): %w", ErrBadRoute, i, routes[i].Name, err))
			continue
		}
		names[c.Name] = true
		s.routes = append(s.routes, c)
	}
	if len(problems) > 0 {
		return nil, errors.Join(problems...)
	}
	s.index()
	digest, err := s.computeDigest(extraDigest)
	if err != nil {
		return nil, err
	}
	s.digest = digest
	return s, nil
}

func compile(in *Route, index int) (*compiled, error) {
	c := &compiled{Route: in.clone(), index: index}
	r := &c.Route
	r.Limits = r.Limits.WithDefaults()
	if err := r.check(); err != nil {
		return nil, err
	}
	for _, p := range r.Match.Paths {
		g, err := compileGlob(p)
		if err != nil {
			return nil, err
		}
		c.paths = append(c.paths, g)
	}
	if r.SSH != nil {
		var err error
		c.compiledSSH, err = r.compileSSH()
		return c, err
	}
	c.methods = r.Match.Methods
	c.ports = r.endpoints()
	return c, nil
}

// check holds the rules that make a route safe to match; texts for people who wrote
// a configuration file are in internal/config.
func (r *Route) check() error {
	if r.Name == "" || !printable(r.Name) {
		return errors.New("it needs a name of printable characters")
	}
	if len(r.Match.Hosts) == 0 {
		return errors.New("it names no host")
	}
	for _, h := range r.Match.Hosts {
		if canonical, err := ParseHostPattern(h); err != nil || canonical != h {
			return errors.New("a host is not in canonical form")
		}
	}
	for _, p := range r.Match.Ports {
		if p < 1 || p > 65535 {
			return errors.New("a port is outside 1 to 65535")
		}
	}
	for _, m := range r.Match.Methods {
		if !IsMethod(m) || neverForwarded(m) {
			return errors.New("a method is no method, or one that is never forwarded")
		}
	}
	if err := r.checkInjections(); err != nil {
		return err
	}
	for h, addr := range r.Upstream.Resolve {
		if canonical, err := ParseHost(bracketed(h)); err != nil || canonical != h {
			return errors.New("a name to resolve is not in canonical form")
		}
		if _, err := netip.ParseAddr(addr); err == nil {
			continue
		}
		if _, err := netip.ParseAddrPort(addr); err != nil {
			return errors.New("a fixed address is no address")
		}
	}
	for _, list := range [][]string{r.Callers, r.Strip, r.Upstream.Pins} {
		for _, v := range list {
			if v == "" || !printable(v) {
				return errors.New("a list has an entry that is empty or not printable")
			}
		}
	}
	rep := r.Contract.Repeatable
	switch {
	case r.Deny && len(r.Inject) > 0:
		return errors.New("it refuses and injects")
	case r.Durability == Relaxed && (rep == nil || !*rep):
		return errors.New("relaxed durability needs contract.repeatable: true")
	case r.Upstream.AllowPlaintext && r.Upstream.RefusePlaintext:
		return errors.New("it allows and refuses plaintext")
	case r.Upstream.RootsOnly && len(r.Upstream.RootsPEM) == 0:
		return errors.New("roots_only without roots trusts nobody")
	case r.Delivery > DeliveryStream || r.Redirects > RedirectsSameOrigin || r.Leak > LeakBlock || r.Upgrade > UpgradeTunnel || r.Durability > Relaxed || !r.Dialect.Valid():
		return errors.New("an enumeration has an unknown value")
	}
	if r.SSH != nil && r.Deny {
		return errors.New("a route for commands does not refuse: what no rule takes is refused")
	}
	if p := r.Upstream.Proxy; p != nil {
		if err := p.check(&r.Upstream); err != nil {
			return err
		}
		if r.SSH != nil {
			return errors.New("commands do not go through an HTTP proxy")
		}
	}
	if err := r.checkContract(); err != nil {
		return err
	}
	if err := r.Contract.checkFollowUp(); err != nil {
		return err
	}
	if err := r.checkApproval(); err != nil {
		return err
	}
	l := r.Limits
	if min(l.Request, l.Buffer, l.Response) < 0 || l.Tries < 0 ||
		min(l.Timeout, l.Idle, l.Hold, l.Connect, l.Duplicates, l.Retention) < 0 ||
		min(l.Rate, l.Burst, l.Concurrent) < 0 || l.Rate > 0 && l.RatePer < time.Duration(l.Rate) {
		return errors.New("a limit is negative")
	}
	return nil
}

func printable(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

func bracketed(host string) string {
	if strings.IndexByte(host, ':') >= 0 {
		return "[" + host + "]"
	}
	return host
}

// IsMethod reports whether s is a method in the form a route may name: a token of
// upper-case letters, digits, "-" and "_" (methods are case-sensitive, RFC 9110
// section 9.1; none in use has small letters).
func IsMethod(s string) bool {
	for i := 0; i < len(s); i++ {
		c := s[i]
		if !('A' <= c && c <= 'Z' || i > 0 && ('0' <= c && c <= '9' || c == '-' || c == '_')) {
			return false
		}
	}
	return s != ""
}

// neverForwarded lists the methods that no route takes: TRACE and TRACK echo the
// request, injected secret included (case HD-04), and CONNECT is the proxy's own.
// The comparison ignores case, so that a lenient origin cannot be talked into it.
func neverForwarded(method string) bool {
	return strings.EqualFold(method, "CONNECT") || strings.EqualFold(method, "TRACE") || strings.EqualFold(method, "TRACK")
}

// clone copies everything a route points to; empty becomes nil, so that two ways of
// writing "none" have one digest.
func (r *Route) clone() Route {
	c := *r
	if control.Off("D1-snapshot-copies") {
		return c
	}
	c.Match.Hosts = cloneSlice(r.Match.Hosts)
	c.Match.Ports = cloneSlice(r.Match.Ports)
	c.Match.Methods = cloneSlice(r.Match.Methods)
	c.Match.Paths = cloneSlice(r.Match.Paths)
	c.Inject = cloneInjections(r.Inject)
	c.Strip = cloneSlice(r.Strip)
	c.Callers = cloneSlice(r.Callers)
	c.RedirectFrom = cloneSlice(r.RedirectFrom)
	c.Contract.clone()
	c.Contract.cloneFollowUp()
	c.Approval = r.Approval.clone()
	c.Upstream.RootsPEM = cloneSlice(r.Upstream.RootsPEM)
	c.Upstream.Pins = cloneSlice(r.Upstream.Pins)
	if p := r.Upstream.Proxy; p != nil {
		q := *p
		q.RootsPEM = cloneSlice(p.RootsPEM)
		c.Upstream.Proxy = &q
	}
	c.SSH = r.SSH.clone()
	c.Upstream.Resolve = nil
	if len(r.Upstream.Resolve) > 0 {
		c.Upstream.Resolve = make(map[string]string, len(r.Upstream.Resolve))
		for k, v := range r.Upstream.Resolve {
			c.Upstream.Resolve[k] = v
		}
	}
	return c
}

func cloneSlice[T any](s []T) []T {
	if len(s) == 0 {
		return nil
	}
	return slices.Clone(s)
}

// endpoints lists what the route takes. Without ports in the configuration that is
// https on 443, and http on 80 where plaintext is allowed. A route that does not
// allow plaintext takes http on port 80 as https on 443 (see Upgraded) if it takes
// 443 – to carry it upgraded, or to refuse it by name.
func (r *Route) endpoints() []endpoint {
	var out []endpoint
	tls443 := len(r.Match.Ports) == 0
	for _, p := range r.Match.Ports {
		out = append(out, endpoint{false, p})
		if r.Upstream.AllowPlaintext {
			out = append(out, endpoint{true, p})
		}
		tls443 = tls443 || p == 443
	}
	if len(r.Match.Ports) == 0 {
		out = append(out, endpoint{false, 443})
	}
	if r.Upstream.AllowPlaintext && len(r.Match.Ports) == 0 || !r.Upstream.AllowPlaintext && tls443 {
		out = append(out, endpoint{true, 80})
	}
	return out
}

func (s *Snapshot) index() {
	for _, c := range s.routes {
		if c.SSH != nil {
			s.ssh = append(s.ssh, c)
			continue
		}
		for _, h := range c.Match.Hosts {
			if suffix, ok := strings.CutPrefix(h, "*."); ok {
				s.wildcard[suffix] = appendOnce(s.wildcard[suffix], c)
			} else {
				s.exact[h] = appendOnce(s.exact[h], c)
			}
		}
	}
	// The list of an exact host holds its wildcards too, in file order, so that one
	// look-up gives all candidates.
	for h, list := range s.exact {
		_, suffix, ok := strings.Cut(h, ".")
		if wild := s.wildcard[suffix]; ok && len(wild) > 0 {
			s.exact[h] = mergeOrdered(list, wild)
		}
	}
}

// mergeOrdered merges two lists in file order; a route in both is kept once.
func mergeOrdered(a, b []*compiled) []*compiled {
	out := append(slices.Clone(a), b...)
	slices.SortFunc(out, func(x, y *compiled) int { return cmp.Compare(x.index, y.index) })
	return slices.Compact(out)
}

func appendOnce(list []*compiled, c *compiled) []*compiled {
	if len(list) > 0 && list[len(list)-1] == c {
		return list
	}
	return append(list, c)
}

func (r *Route) takesHost(host string) bool {
	for _, h := range r.Match.Hosts {
		if hostMatches(h, host) {
			return true
		}
	}
	return false
}

// hostMatches compares whole labels: a wildcard stands for exactly one.
func hostMatches(pattern, host string) bool {
	suffix, ok := strings.CutPrefix(pattern, "*.")
	if !ok {
		return pattern == host
	}
	_, rest, cut := strings.Cut(host, ".")
	return cut && rest == suffix
}

// TakesHost reports whether the route names host (canonical), exactly or by a
// wildcard.
func (r *Route) TakesHost(host string) bool { return r.takesHost(host) }

func (s *Snapshot) computeDigest(extra []byte) (string, error) {
	routes := make([]*Route, len(s.routes))
	for i, c := range s.routes {
		routes[i] = &c.Route
	}
	// encoding/json walks every exported field, sorts maps and is unambiguous for the
	// checked, printable strings above: a field added to Route cannot be forgotten here.
	text, err := json.Marshal(struct {
		Format  string
		Default Default
		Routes  []*Route
		Extra   []byte
	}{digestFormat, s.def, routes, extra})
	if err != nil {
		return "", fmt.Errorf("routes: digest: %w", err)
	}
	sum := sha256.Sum256(text)
	return "sha256:" + hex.EncodeToString(sum[:]), nil
}

// Digest returns "sha256:" and 64 hex digits over everything that decides: the
// routes in their order with names, matches, injections, contracts, upstreams
// (roots and pins included), limits and callers, the default, and the extra bytes
// given to NewSnapshot (CONTRACT D1).
func (s *Snapshot) Digest() string { return s.digest }

// Default says what happens to a request that matches no route (CONTRACT V1).
func (s *Snapshot) Default() Default { return s.def }

// Routes returns the routes in file order, limits filled in. The slice is the
// caller's, the routes are not to be changed.
func (s *Snapshot) Routes() []*Route {
	out := make([]*Route, len(s.routes))
	for i, c := range s.routes {
		out[i] = &c.Route
	}
	return out
}

// Route returns the route of that name, or nil.
func (s *Snapshot) Route(name string) *Route {
	for _, c := range s.routes {
		if c.Name == name {
			return &c.Route
		}
	}
	return nil
}

func (s *Snapshot) candidates(host string) []*compiled {
	if list, ok := s.exact[host]; ok {
		return list
	}
	if len(s.wildcard) > 0 {
		if _, rest, ok := strings.Cut(host, "."); ok {
			return s.wildcard[rest]
		}
	}
	return nil
}

// Match returns the first route in file order that takes the request, or nil and
// the reason. t is the canonical target as the caller addressed it (http included;
// what is dialled then is Route.Dial), rawPath the unchanged path without query that
// CheckPath accepted; "" is "/".
//
// CONNECT, TRACE and TRACK never match. A refusing route (Deny) also takes a path
// that a lenient server could read as one of its paths – percent-decoded,
// parameters dropped, slashes merged – so that "/v1/%61dmin" and "/v1//admin" do
// not slip past a refusal of "/v1/admin" to a wider route below it.
func (s *Snapshot) Match(method string, t Target, rawPath string) (*Route, Miss) {
	if neverForwarded(method) {
		return nil, Miss{Kind: MissMethodNever}
	}
	list := s.candidates(t.Host)
	for _, c := range list {
		if c.takesEndpoint(t) && c.takesPath(rawPath) && c.takesMethod(method) {
			return &c.Route, Miss{}
		}
	}
	return nil, nearest(list, t, rawPath)
}

func (c *compiled) takesEndpoint(t Target) bool {
	for _, e := range c.ports {
		if e.port == t.Port && e.plain == (t.Scheme == "http") {
			return true
		}
	}
	return false
}

func (c *compiled) takesMethod(method string) bool {
	if len(c.methods) == 0 {
		return true
	}
	for _, m := range c.methods {
		if m == method {
			return true
		}
	}
	return false
}

func (c *compiled) takesPath(raw string) bool {
	if len(c.paths) == 0 {
		return true
	}
	for i := range c.paths {
		if c.paths[i].match(raw) {
			return true
		}
	}
	if c.Deny {
		if lenient := reading(raw); lenient != raw {
			for i := range c.paths {
				if c.paths[i].match(lenient) {
					return true
				}
			}
		}
	}
	return false
}

// MayIntercept reports whether some route, refusing ones included, could take a
// request to host at port: by https, or by http inside the tunnel, as Node's fetch
// sends it to port 80.
func (s *Snapshot) MayIntercept(host string, port int) bool {
	for _, c := range s.candidates(host) {
		for _, e := range c.ports {
			if e.port == port {
				return true
			}
		}
	}
	return false
}

// Dial returns the target that is dialled and verified for a request addressed to
// t on this route: t itself, or its upgrade to https. It returns false where the
// request must be refused instead (INVALID_TARGET, CONTRACT V2): it came in clear
// and the route refuses plaintext, or allows none and has no upgrade for this port.
func (r *Route) Dial(t Target) (Target, bool) {
	if t.Scheme != "http" || r.Upstream.AllowPlaintext {
		return t, true
	}
	up := t.Upgraded()
	return up, up.Scheme == "https" && !r.Upstream.RefusePlaintext
}

// Repeatable reports whether an operation on this route may be repeated without
// further effect: as the contract declares it, else by method – GET, HEAD and
// OPTIONS only (CONTRACT G6). Method names are case-sensitive.
func (r *Route) Repeatable(method string) bool {
	if r.Contract.Repeatable != nil {
		return *r.Contract.Repeatable
	}
	return method == "GET" || method == "HEAD" || method == "OPTIONS"
}

// AllowsCaller reports whether a caller of that name may use the route (CONTRACT
// V4). An anonymous caller has the name "" and may use only routes that name nobody.
func (r *Route) AllowsCaller(name string) bool {
	return len(r.Callers) == 0 || name != "" && slices.Contains(r.Callers, name)
}

// Shadow is a route that is never reached, since an earlier one takes everything it
// takes.
type Shadow struct {
	Route *Route
	By    *Route
	Index int // of Route, in file order
}

// maxShadowWork bounds the comparisons of path patterns in Shadows: far more than
// any set of routes that people keep needs.
const maxShadowWork = 1 << 22

// Shadows returns the routes that are never reached, in file order. It may miss one
// (that several routes throw a shadow on together, or in a very large set); it never
// returns one that could be reached.
func (s *Snapshot) Shadows() []Shadow {
	var out []Shadow
	work := maxShadowWork
	for _, b := range s.routes {
		if b.SSH != nil {
			continue // by its commands, which are not compared
		}
		// Whatever shadows b also takes its first host.
		var list []*compiled
		if suffix, wild := strings.CutPrefix(b.Match.Hosts[0], "*."); wild {
			list = s.wildcard[suffix]
		} else {
			list = s.candidates(b.Match.Hosts[0])
		}
		for _, a := range list {
			if a.index >= b.index || work < 0 {
				break
			}
			work -= 1 + len(a.Match.Hosts)*len(b.Match.Hosts) + len(a.paths)*len(b.paths)
			if a.shadows(b) {
				out = append(out, Shadow{Route: &b.Route, By: &a.Route, Index: b.index})
				break
			}
		}
	}
	return out
}

func (c *compiled) shadows(b *compiled) bool {
	for _, hb := range b.Match.Hosts {
		if !slices.ContainsFunc(c.Match.Hosts, func(ha string) bool {
			return ha == hb || !strings.HasPrefix(hb, "*.") && hostMatches(ha, hb)
		}) {
			return false
		}
	}
	for _, e := range b.ports {
		if !slices.Contains(c.ports, e) {
			return false
		}
	}
	if len(c.methods) > 0 {
		if len(b.methods) == 0 {
			return false
		}
		for _, m := range b.methods {
			if !slices.Contains(c.methods, m) {
				return false
			}
		}
	}
	if len(c.paths) == 0 {
		return true
	}
	if len(b.paths) == 0 {
		return false // b also takes "*" (of OPTIONS), which no pattern does
	}
	for i := range b.paths {
		if !slices.ContainsFunc(c.paths, func(g glob) bool { return g.covers(&b.paths[i]) }) {
			return false
		}
	}
	// A refusal further down also takes lenient readings that an earlier pattern does not.
	return !b.Deny || c.Deny
}

// nearest finds the route that came furthest along the conditions, which are
// ordered: port, path, method. Refusing routes are never the nearest thing that is
// allowed.
func nearest(list []*compiled, t Target, rawPath string) Miss {
	m := Miss{Kind: MissHost}
	if len(list) > 0 {
		m.Kind = MissDenied
	}
	rank := func(k MissKind) int {
		switch k {
		case MissPort, MissPlaintext:
			return 1
		case MissPath:
			return 2
		case MissMethod:
			return 3
		case MissNone, MissHost, MissMethodNever, MissDenied, MissUser, MissCommand:
		}
		return 0
	}
	for _, c := range list {
		if c.Deny {
			continue
		}
		kind := MissMethod // the last condition, since the route did not match
		switch {
		case !c.takesEndpoint(t) && t.Scheme == "http" && c.takesEndpoint(Target{Scheme: "https", Host: t.Host, Port: t.Port}):
			kind = MissPlaintext
		case !c.takesEndpoint(t):
			kind = MissPort
		case !c.takesPath(rawPath):
			kind = MissPath
		}
		if rank(kind) > rank(m.Kind) {
			m = Miss{Kind: kind, Nearest: &c.Route}
		}
	}
	return m
}
