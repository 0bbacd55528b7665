package routes

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"waybill/internal/contract"
	"waybill/outcome"
)

func mustSnapshot(t testing.TB, def Default, rs ...Route) *Snapshot {
	t.Helper()
	s, err := NewSnapshot(rs, def, nil)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func route(name string, hosts ...string) Route {
	return Route{Name: name, Match: Match{Hosts: hosts}}
}

func https(host string, port int) Target { return Target{"https", host, port} }

func bed(t testing.TB) *Snapshot {
	admin := route("admin", "admin.example.test")
	admin.Deny = true
	noAdminPath := route("no-admin", "pay.example.test")
	noAdminPath.Deny, noAdminPath.Match.Paths = true, []string{"/v1/admin/**"}
	pay := route("pay", "pay.example.test")
	pay.Match.Paths = []string{"/v1/**"}
	pay.Inject = []Injection{{Header: "Authorization", Value: "Bearer ${secret}", Credential: "pay"}}
	getOnly := route("reports", "pay.example.test")
	getOnly.Match.Paths, getOnly.Match.Methods = []string{"/reports/*"}, []string{"GET", "HEAD"}
	wild := route("wild", "*.allowed.test")
	wild.Match.Ports = []int{443, 8443}
	special := route("special", "x.allowed.test")
	special.Match.Ports = []int{9443}
	plain := route("plain", "plain.test")
	plain.Upstream.AllowPlaintext = true
	strict := route("strict", "strict.test")
	strict.Upstream.RefusePlaintext = true
	ip := route("ip", "::1", "10.0.0.7")
	return mustSnapshot(t, Deny, admin, noAdminPath, pay, getOnly, wild, special, plain, strict, ip)
}

func TestMatch(t *testing.T) {
	contract.Covers(t, "V1", "V2")
	s := bed(t)
	for _, tc := range []struct {
		method string
		target Target
		path   string
		want   string // route, or "!" + kind of the miss
	}{
		{"POST", https("pay.example.test", 443), "/v1/charges", "pay"},
		{"POST", https("pay.example.test", 443), "/v1", "pay"},
		{"BREW", https("pay.example.test", 443), "/v1/x", "pay"},
		{"GET", https("pay.example.test", 443), "/v1/@s%2fpkg", "pay"},
		// ID-04: whole labels, other ports are other origins.
		{"GET", https("evilpay.example.test", 443), "/v1/x", "!host"},
		{"GET", https("pay.example.test.evil.test", 443), "/v1/x", "!host"},
		{"GET", https("example.test", 443), "/v1/x", "!host"},
		{"GET", https("pay.example.test", 8443), "/v1/x", "!port"},
		{"GET", https("admin.example.test", 443), "/", "admin"},
		{"GET", https("admin.example.test", 444), "/", "!denied"},
		// ID-06: only the paths of the route.
		{"GET", https("pay.example.test", 443), "/admin", "!path"},
		{"GET", https("pay.example.test", 443), "", "!path"},
		{"OPTIONS", https("pay.example.test", 443), "*", "!path"},
		{"OPTIONS", https("strict.test", 443), "*", "strict"},
		// A refusal takes every reading of its paths, and stands first.
		{"GET", https("pay.example.test", 443), "/v1/admin/x", "no-admin"},
		{"GET", https("pay.example.test", 443), "/v1/%61dmin/x", "no-admin"},
		{"GET", https("pay.example.test", 443), "/v1//admin/x", "no-admin"},
		{"GET", https("pay.example.test", 443), "/v1/admin;a=b", "no-admin"},
		{"GET", https("pay.example.test", 443), "/v1%2Fadmin", "no-admin"},
		{"GET", https("pay.example.test", 443), "/v1/admins", "pay"},
		{"HEAD", https("pay.example.test", 443), "/reports/7", "reports"},
		{"POST", https("pay.example.test", 443), "/reports/7", "!method"},
		{"get", https("pay.example.test", 443), "/reports/7", "!method"},
		// Wildcards: exactly one label, and file order against exact names.
		{"GET", https("a.allowed.test", 443), "/", "wild"},
		{"GET", https("a.allowed.test", 8443), "/", "wild"},
		{"GET", https("a.b.allowed.test", 443), "/", "!host"},
		{"GET", https("allowed.test", 443), "/", "!host"},
		{"GET", https("x.allowed.test", 443), "/", "wild"},
		{"GET", https("x.allowed.test", 9443), "/", "special"},
		{"GET", https("y.allowed.test", 9443), "/", "!port"},
		// ID-07: http is matched as https on 443; never on another port.
		{"GET", Target{"http", "pay.example.test", 80}, "/v1/x", "pay"},
		{"GET", Target{"http", "pay.example.test", 8081}, "/v1/x", "!port"},
		{"GET", Target{"http", "pay.example.test", 443}, "/v1/x", "!plaintext"},
		{"GET", Target{"http", "a.allowed.test", 8443}, "/", "!plaintext"},
		{"GET", Target{"http", "x.allowed.test", 80}, "/", "wild"},
		{"GET", https("pay.example.test", 80), "/v1/x", "!port"},
		{"GET", Target{"http", "plain.test", 80}, "/", "plain"},
		{"GET", https("plain.test", 443), "/", "plain"},
		{"GET", Target{"http", "plain.test", 8080}, "/", "!port"},
		{"GET", Target{"http", "strict.test", 80}, "/", "strict"},
		{"GET", https("::1", 443), "/", "ip"},
		{"GET", https("10.0.0.7", 443), "/", "ip"},
		// HD-04: on no route, in no spelling.
		{"TRACE", https("pay.example.test", 443), "/v1/x", "!method_never"},
		{"TRACK", https("admin.example.test", 443), "/", "!method_never"},
		{"Trace", https("nowhere.test", 443), "/", "!method_never"},
		{"CONNECT", https("pay.example.test", 443), "/v1/x", "!method_never"},
	} {
		r, miss := s.Match(tc.method, tc.target, tc.path)
		got := "!" + miss.Kind.String()
		if r != nil {
			got = r.Name
			if miss != (Miss{}) {
				t.Errorf("%s %v%s: a route and a miss", tc.method, tc.target, tc.path)
			}
		}
		if got != tc.want {
			t.Errorf("%s %v%s: %s, want %s", tc.method, tc.target, tc.path, got, tc.want)
		}
	}
}

func TestDial(t *testing.T) {
	contract.Covers(t, "V2")
	s := bed(t)
	for _, tc := range []struct {
		route string
		in    Target
		out   Target
		ok    bool
	}{
		{"pay", Target{"http", "pay.example.test", 80}, Target{"https", "pay.example.test", 443}, true},
		{"pay", Target{"https", "pay.example.test", 443}, Target{"https", "pay.example.test", 443}, true},
		{"pay", Target{"http", "pay.example.test", 8081}, Target{"http", "pay.example.test", 8081}, false},
		{"plain", Target{"http", "plain.test", 80}, Target{"http", "plain.test", 80}, true},
		{"strict", Target{"http", "strict.test", 80}, Target{"https", "strict.test", 443}, false},
		{"strict", Target{"https", "strict.test", 443}, Target{"https", "strict.test", 443}, true},
	} {
		if out, ok := s.Route(tc.route).Dial(tc.in); out != tc.out || ok != tc.ok {
			t.Errorf("%s.Dial(%v) = %v, %v; want %v, %v", tc.route, tc.in, out, ok, tc.out, tc.ok)
		}
	}
}

func TestMayIntercept(t *testing.T) {
	contract.Covers(t, "V1")
	s := bed(t)
	for _, tc := range []struct {
		host string
		port int
		want bool
	}{
		{"pay.example.test", 443, true}, {"pay.example.test", 80, true}, {"pay.example.test", 8443, false},
		{"admin.example.test", 443, true}, {"strict.test", 80, true}, {"plain.test", 80, true},
		{"a.allowed.test", 8443, true}, {"x.allowed.test", 9443, true}, {"y.allowed.test", 9443, false},
		{"special.test", 443, false}, {"evilpay.example.test", 443, false}, {"a.b.allowed.test", 443, false},
	} {
		if got := s.MayIntercept(tc.host, tc.port); got != tc.want {
			t.Errorf("MayIntercept(%s, %d) = %v", tc.host, tc.port, got)
		}
	}
}

func TestMiss(t *testing.T) {
	contract.Covers(t, "B2")
	s := bed(t)
	locked := route("locked", "locked.test")
	locked.Callers, locked.Match.Methods = []string{"ci"}, []string{"GET"}
	l := mustSnapshot(t, Deny, locked)
	for _, tc := range []struct {
		s              *Snapshot
		method         string
		target         Target
		path           string
		code           outcome.Code
		field, message string
	}{
		{s, "GET", https("nowhere.test", 443), "/", outcome.CodeRouteNotFound, "request.target.host", "No route names this host."},
		{s, "POST", https("pay.example.test", 443), "/reports/1", outcome.CodeRouteNotFound, "request.method", `Route "reports" takes this path, but only with the methods GET, HEAD.`},
		{s, "GET", https("pay.example.test", 443), "/x", outcome.CodeRouteNotFound, "request.target.path", `Route "pay" takes this host, but only the paths /v1/**.`},
		{s, "GET", https("pay.example.test", 1), "/v1/x", outcome.CodeRouteNotFound, "request.target.port", `Route "pay" takes this host, but only at https port 443.`},
		{s, "GET", https("plain.test", 1), "/", outcome.CodeRouteNotFound, "request.target.port", `Route "plain" takes this host, but only at https port 443, http port 80.`},
		{s, "GET", Target{"http", "a.allowed.test", 8443}, "/", outcome.CodeRouteNotFound, "request.target.scheme", `Route "wild" takes this host and port over https only.`},
		{s, "TRACE", https("pay.example.test", 443), "/", outcome.CodeUnsupportedAction, "request.method", "CONNECT, TRACE and TRACK are not forwarded on any route."},
		{s, "GET", https("admin.example.test", 1), "/", outcome.CodeRouteNotFound, "request.target.host", "No route names this host."},
		// L8: as far as the caller may know.
		{l, "POST", https("locked.test", 443), "/", outcome.CodeRouteNotFound, "request.method", "No route takes this request."},
	} {
		r, m := tc.s.Match(tc.method, tc.target, tc.path)
		if r != nil || m.Code() != tc.code || m.Field() != tc.field || m.Detail("") != tc.message {
			t.Errorf("%s %v%s: %v %s %q %q", tc.method, tc.target, tc.path, r, m.Code(), m.Field(), m.Detail(""))
		}
	}
	_, m := l.Match("POST", https("locked.test", 443), "/")
	if got := m.Detail("ci"); !strings.Contains(got, "GET") {
		t.Errorf("Detail for an allowed caller: %q", got)
	}
	if (Miss{}).Detail("") != "" {
		t.Error("no miss has a detail")
	}
}

// The index (one look-up by host) answers as a walk over all routes does.
func TestMatchAgainstWalk(t *testing.T) {
	contract.Covers(t, "V1")
	host := rapid.SampledFrom([]string{"a.test", "b.test", "x.a.test", "y.a.test", "x.y.a.test", "10.0.0.1"})
	pattern := rapid.SampledFrom([]string{"a.test", "b.test", "x.a.test", "*.a.test", "*.test", "*.y.a.test", "10.0.0.1"})
	gen := rapid.Custom(func(t *rapid.T) Route {
		r := Route{Match: Match{
			Hosts:   rapid.SliceOfNDistinct(pattern, 1, 3, rapid.ID).Draw(t, "hosts"),
			Ports:   rapid.SliceOfNDistinct(rapid.SampledFrom([]int{80, 443, 8443}), 0, 2, rapid.ID).Draw(t, "ports"),
			Methods: rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"GET", "POST"}), 0, 2, rapid.ID).Draw(t, "methods"),
			Paths:   rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"/a/**", "/a/*", "/b", "/**"}), 0, 2, rapid.ID).Draw(t, "paths"),
		}}
		r.Upstream.AllowPlaintext = rapid.Bool().Draw(t, "plaintext")
		return r
	})
	rapid.Check(t, func(t *rapid.T) {
		rs := rapid.SliceOfN(gen, 0, 6).Draw(t, "routes")
		for i := range rs {
			rs[i].Name = fmt.Sprint("r", i)
		}
		s, err := NewSnapshot(rs, Deny, nil)
		if err != nil {
			t.Fatal(err)
		}
		target := Target{rapid.SampledFrom([]string{"http", "https"}).Draw(t, "scheme"), host.Draw(t, "host"), rapid.SampledFrom([]int{80, 443, 8443}).Draw(t, "port")}
		method := rapid.SampledFrom([]string{"GET", "POST", "PUT"}).Draw(t, "method")
		path := rapid.SampledFrom([]string{"/", "/a", "/a/x", "/a/x/y", "/b"}).Draw(t, "path")
		want := ""
		for i := range rs {
			if takes(&rs[i], method, target, path) {
				want = rs[i].Name
				break
			}
		}
		got := ""
		if r, _ := s.Match(method, target, path); r != nil {
			got = r.Name
		}
		if got != want {
			t.Fatalf("%s %v%s: %q, a walk gives %q", method, target, path, got, want)
		}
		if got != "" && !s.MayIntercept(target.Host, target.Port) {
			t.Fatalf("%v matches but may not be intercepted", target)
		}
		// A shadowed route is never the answer.
		for _, sh := range s.Shadows() {
			if sh.Route.Name == got {
				t.Fatalf("%s matched although %s is said to shadow it", got, sh.By.Name)
			}
		}
	})
}

// takes is the definition of a match for the test above.
func takes(r *Route, method string, t Target, path string) bool {
	if t.Scheme == "http" && !r.Upstream.AllowPlaintext {
		if t = t.Upgraded(); t.Scheme == "http" {
			return false
		}
	}
	hostOK := false
	for _, h := range r.Match.Hosts {
		hl, tl := strings.Split(h, "."), strings.Split(t.Host, ".")
		if len(hl) != len(tl) {
			continue
		}
		ok := true
		for i := range hl {
			ok = ok && (hl[i] == tl[i] || i == 0 && hl[i] == "*")
		}
		hostOK = hostOK || ok
	}
	portOK := slices.Contains(r.Match.Ports, t.Port) || len(r.Match.Ports) == 0 && t.Port == DefaultPort(t.Scheme)
	methodOK := len(r.Match.Methods) == 0 || slices.Contains(r.Match.Methods, method)
	pathOK := len(r.Match.Paths) == 0
	for _, p := range r.Match.Paths {
		pathOK = pathOK || refMatch(strings.Split(p[1:], "/"), strings.Split(path[1:], "/"))
	}
	return hostOK && portOK && methodOK && pathOK
}

func TestRepeatable(t *testing.T) {
	contract.Covers(t, "G6")
	yes, no := true, false
	for _, tc := range []struct {
		declared *bool
		method   string
		want     bool
	}{
		{nil, "GET", true}, {nil, "HEAD", true}, {nil, "OPTIONS", true},
		{nil, "PUT", false}, {nil, "DELETE", false}, {nil, "POST", false}, {nil, "PATCH", false}, {nil, "PROPFIND", false}, {nil, "get", false}, {nil, "", false},
		{&yes, "POST", true}, {&yes, "PUT", true}, {&yes, "GET", true},
		{&no, "GET", false}, {&no, "HEAD", false}, {&no, "POST", false},
	} {
		r := Route{Contract: Contract{Repeatable: tc.declared}}
		if got := r.Repeatable(tc.method); got != tc.want {
			t.Errorf("%v %s: %v", tc.declared, tc.method, got)
		}
	}
}

func TestAllowsCaller(t *testing.T) {
	open, closed := route("a", "a.test"), route("b", "a.test")
	closed.Callers = []string{"ci", "dev"}
	if !open.AllowsCaller("") || !open.AllowsCaller("x") || closed.AllowsCaller("") || closed.AllowsCaller("x") || !closed.AllowsCaller("dev") {
		t.Error("callers")
	}
}

// fullRoute sets every field of Route; TestDigestCoversEverything fails when a new
// field is forgotten here.
func fullRoute() Route {
	rep := true
	return Route{
		Name:   "full",
		Match:  Match{Hosts: []string{"a.test"}, Ports: []int{443}, Methods: []string{"GET"}, Paths: []string{"/v1/**"}},
		Inject: []Injection{{Header: "Authorization", Value: "Bearer ${secret}", Credential: "c"}},
		Contract: Contract{Repeatable: &rep, RefusedBeforeExecution: []int{429}, KeyInUse: []int{409}, CloseDelimited: true, EndMarker: "[DONE]", Reconcile: fullReconcile(), Async: fullAsync(), Batch: fullBatch(), Marker: fullMarker(),
			Idempotency: &Idempotency{Header: "Idempotency-Key", Scope: "account", Retention: 24 * time.Hour, Margin: time.Minute, InProgress: []int{409}, Mismatch: []int{422},
				Maker: MadeByCallerOrWaybill, RefusalsSpeak: true, Promises: KeyPromises(), Source: "docs", Reviewed: "2026-11-30"},
			Conditional: true, Responses: []Response{{409, outcome.Committed, outcome.Never}}, OnRepeat: RepeatRefuse,
			Retry: &Retry{Attempts: 3, Total: 3, Backoff: 1, Max: 2, IgnoreRetryAfter: true, Background: true}},
		Delivery: DeliveryBuffered, Durability: Relaxed, RejectManaged: true, PassAuthorization: true, PassTrace: true,
		Callers: []string{"ci"}, RedirectFrom: []string{"https://api.example.com"}, Redirects: RedirectsSameOrigin, Leak: LeakBlock, Upgrade: UpgradeTunnel, Strip: []string{"Cookie"},
		Dialect:  outcome.DialectSlack,
		Approval: Approval{Required: true, When: []ApprovalRule{{Methods: []string{"GET"}, Paths: []string{"/v1/**"}, MinBody: 11}}, Hold: 12, Expiry: 13},
		Upstream: Upstream{
			AllowPlaintext: true, RootsPEM: []byte("pem"), RootsOnly: true, Pins: []string{"sha256:00"},
			Resolve: map[string]string{"a.test": "10.0.0.7"}, AllowPrivate: true,
		},
		Limits: Limits{
			Request: 1, Buffer: 2, Response: 3, Timeout: 4, Idle: 5, Hold: 6, Connect: 7, Tries: 8, Duplicates: 9, Retention: 10, Rate: 11, RatePer: time.Second, Burst: 12, Concurrent: 13,
		},
	}
}

// Every field of a route, however deep, changes the digest, and no later change of
// what the caller kept reaches the snapshot.
func TestDigestCoversEverything(t *testing.T) {
	contract.Covers(t, "D1")
	digest := func(r Route, def Default, extra []byte) string {
		t.Helper()
		s, err := NewSnapshot([]Route{r}, def, extra)
		if err != nil {
			t.Fatal(err)
		}
		return s.Digest()
	}
	base := digest(fullRoute(), Deny, nil)
	if len(base) != len("sha256:")+64 || !strings.HasPrefix(base, "sha256:") {
		t.Fatalf("digest %q", base)
	}
	if digest(fullRoute(), Deny, nil) != base {
		t.Fatal("the digest is not a function of the routes")
	}
	if digest(fullRoute(), Tunnel, nil) == base || digest(fullRoute(), Deny, []byte("x")) == base {
		t.Error("the default or the extra bytes do not count")
	}
	seen := map[string]string{base: "nothing changed"}
	unset := map[string]bool{"Deny": true, "Upstream.RefusePlaintext": true, "Contract.Idempotency.Field": true} // contradict another field of fullRoute
	var walk func(path string, at func(*Route) reflect.Value)
	walk = func(path string, at func(*Route) reflect.Value) {
		full := fullRoute()
		v := at(&full)
		switch path {
		case "SSH", "Upstream.Proxy":
			return // contradict what else is set: see TestSSHDigest, TestUpstreamProxyInTheDigest
		case "Inject[0].Kind", "Inject[0].Name", "Inject[0].HMAC", "Inject[0].SigV4":
			return // what goes with one kind excludes the others: TestInjectionsAreInTheDigest
		}
		if v.IsZero() && !unset[path] {
			t.Errorf("fullRoute does not set %s", path)
			return
		}
		change := func(f func(reflect.Value)) {
			r := fullRoute()
			f(at(&r))
			switch path { // keep the route acceptable
			case "Deny":
				r.Inject = nil
			case "Upstream.RefusePlaintext":
				r.Upstream.AllowPlaintext = false
			case "Upstream.RootsPEM":
				r.Upstream.RootsOnly = false
			case "Contract.Repeatable":
				r.Durability = Strict
			case "Contract.Idempotency.Field":
				r.Contract.Idempotency.Header = ""
				r.Contract.Idempotency.Maker = MadeByCaller
			case "Contract.Responses[0].Outcome":
				r.Contract.Responses[0].Outcome = outcome.Rejected
			case "Contract.Responses[0].Retry":
				r.Contract.Responses[0].Retry = outcome.Reconcile
			}
			d := digest(r, Deny, nil)
			if was, dup := seen[d]; dup {
				t.Errorf("changing %s gives the same digest as: %s", path, was)
			}
			seen[d] = path
		}
		switch v.Kind() {
		case reflect.Struct:
			for i := range v.NumField() {
				name := v.Type().Field(i).Name
				if path != "" {
					name = path + "." + name
				}
				walk(name, func(r *Route) reflect.Value { return at(r).Field(i) })
			}
		case reflect.Slice:
			if path != "Match.Hosts" {
				change(func(v reflect.Value) { v.SetZero() })
			}
			if v.Type().Elem().Kind() == reflect.Struct {
				walk(path+"[0]", func(r *Route) reflect.Value { return at(r).Index(0) })
				return
			}
			change(func(v reflect.Value) { bump(v.Index(0)) })
		case reflect.Map:
			change(func(v reflect.Value) { v.SetZero() })
			change(func(v reflect.Value) { v.Interface().(map[string]string)["a.test"] = "10.0.0.8" })
			change(func(v reflect.Value) { v.Interface().(map[string]string)["b.test"] = "10.0.0.7" })
		case reflect.Pointer:
			change(func(v reflect.Value) { v.SetZero() })
			if slices.Contains([]string{"Contract.Reconcile", "Contract.Async", "Contract.Batch", "Contract.Marker"}, path) {
				// Their fields hold each other up; see that each counts at least as a whole.
				for i := range v.Elem().NumField() {
					if name := v.Elem().Type().Field(i).Name; v.Elem().Field(i).IsZero() {
						t.Errorf("fullRoute does not set %s.%s", path, name)
					} else if v.Elem().Field(i).Kind() == reflect.Bool && name != "NotFoundRejects" {
						change(func(v reflect.Value) { bump(v.Elem().Field(i)) })
					}
				}
				return
			}
			if v.Type().Elem().Kind() == reflect.Struct {
				for i := range v.Elem().NumField() {
					walk(path+"."+v.Elem().Type().Field(i).Name, func(r *Route) reflect.Value { return at(r).Elem().Field(i) })
				}
				return
			}
			change(func(v reflect.Value) { bump(v.Elem()) })
		case reflect.Uint8: // enumerations: back to zero, which is their default
			change(func(v reflect.Value) { v.SetZero() })
		default:
			change(bump)
		}
	}
	walk("", func(r *Route) reflect.Value { return reflect.ValueOf(r).Elem() })
	if len(seen) < 35 {
		t.Errorf("only %d different digests: the walk missed fields", len(seen))
	}
}

func bump(v reflect.Value) {
	switch v.Kind() {
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.String:
		if s := v.String(); IsMethod(s) {
			v.SetString("POST")
		} else {
			v.SetString("x" + s[:0] + strings.TrimPrefix(s, "/"))
			if strings.HasPrefix(s, "/") {
				v.SetString(s[:3] + "/x")
			}
		}
	case reflect.Int, reflect.Int64:
		v.SetInt(v.Int() + 1)
	case reflect.Uint8:
		v.SetUint(v.Uint() + 1)
	default:
		panic("bump: " + v.Kind().String())
	}
}

func TestSnapshotIsImmutable(t *testing.T) {
	contract.Covers(t, "D1")
	r := fullRoute()
	in := []Route{r}
	s, err := NewSnapshot(in, Deny, nil)
	if err != nil {
		t.Fatal(err)
	}
	before := fmt.Sprintf("%+v %v", *s.Routes()[0], *s.Routes()[0].Contract.Repeatable)
	// Everything a caller could still hold is changed.
	in[0].Name = "other"
	r.Match.Hosts[0], r.Match.Ports[0], r.Match.Methods[0], r.Match.Paths[0] = "evil.test", 1, "POST", "/**"
	r.Inject[0].Credential, r.Callers[0], r.Strip[0] = "other", "other", "other"
	r.Upstream.Pins[0], r.Upstream.RootsPEM[0], r.Upstream.Resolve["a.test"] = "other", 'X', "127.0.0.1"
	r.Contract.RefusedBeforeExecution[0], r.Contract.KeyInUse[0] = 500, 500
	*r.Contract.Repeatable = false
	s.Routes()[0] = nil
	if after := fmt.Sprintf("%+v %v", *s.Routes()[0], *s.Routes()[0].Contract.Repeatable); after != before {
		t.Errorf("the snapshot changed:\n%s\n%s", before, after)
	}
	if got, _ := s.Match("GET", https("a.test", 443), "/v1/x"); got == nil || got.Name != "full" {
		t.Error("the snapshot no longer matches what it was made for")
	}
	if got, _ := s.Match("GET", https("evil.test", 443), "/v1/x"); got != nil {
		t.Error("a host was added to a snapshot")
	}
	if !s.Route("full").Repeatable("POST") {
		t.Error("the declaration changed")
	}
}

func TestNewSnapshotRefuses(t *testing.T) {
	contract.Covers(t, "V1")
	change := func(f func(*Route)) Route {
		r := route("r", "a.test")
		f(&r)
		return r
	}
	no := false
	for name, rs := range map[string][]Route{
		"zero route":         {{}},
		"no host":            {route("r")},
		"no name":            {route("", "a.test")},
		"twice":              {route("r", "a.test"), route("r", "b.test")},
		"host not canonical": {route("r", "A.test")},
		"root dot":           {route("r", "a.test.")},
		"wildcard alone":     {route("r", "*")},
		"port":               {change(func(r *Route) { r.Match.Ports = []int{0} })},
		"trace":              {change(func(r *Route) { r.Match.Methods = []string{"TRACE"} })},
		"connect":            {change(func(r *Route) { r.Match.Methods = []string{"CONNECT"} })},
		"small letters":      {change(func(r *Route) { r.Match.Methods = []string{"get"} })},
		"glob":               {change(func(r *Route) { r.Match.Paths = []string{"v1/**"} })},
		"deny and inject": {change(func(r *Route) {
			r.Deny, r.Inject = true, []Injection{{Header: "A", Value: "${secret}", Credential: "c"}}
		})},
		"injection without credential": {change(func(r *Route) { r.Inject = []Injection{{Header: "A", Value: "${secret}", Credential: ""}} })},
		"relaxed":                      {change(func(r *Route) { r.Durability = Relaxed })},
		"relaxed, declared unsafe":     {change(func(r *Route) { r.Durability, r.Contract.Repeatable = Relaxed, &no })},
		"plaintext both ways":          {change(func(r *Route) { r.Upstream.AllowPlaintext, r.Upstream.RefusePlaintext = true, true })},
		"roots_only":                   {change(func(r *Route) { r.Upstream.RootsOnly = true })},
		"resolve host":                 {change(func(r *Route) { r.Upstream.Resolve = map[string]string{"A": "10.0.0.1"} })},
		"resolve address":              {change(func(r *Route) { r.Upstream.Resolve = map[string]string{"a.test": "b.test"} })},
		"negative limit":               {change(func(r *Route) { r.Limits.Timeout = -time.Second })},
		"unknown delivery":             {change(func(r *Route) { r.Delivery = 9 })},
		"unknown dialect":              {change(func(r *Route) { r.Dialect = 99 })},
		"empty caller":                 {change(func(r *Route) { r.Callers = []string{""} })},
	} {
		if s, err := NewSnapshot(rs, Deny, nil); !errors.Is(err, ErrBadRoute) || s != nil {
			t.Errorf("%s: %v, %v", name, s, err)
		}
	}
	if _, err := NewSnapshot(nil, Default(9), nil); !errors.Is(err, ErrBadRoute) {
		t.Errorf("unknown default: %v", err)
	}
	s := mustSnapshot(t, Deny)
	if r, m := s.Match("GET", https("a.test", 443), "/"); r != nil || m.Kind != MissHost || s.MayIntercept("a.test", 443) {
		t.Error("an empty snapshot takes something")
	}
}

func TestLimitsDefaults(t *testing.T) {
	s := mustSnapshot(t, Deny, route("r", "a.test"))
	if got := s.Route("r").Limits; got != DefaultLimits() {
		t.Errorf("%+v", got)
	}
	v := reflect.ValueOf(DefaultLimits())
	none := map[string]bool{"Rate": true, "RatePer": true, "Burst": true, "Concurrent": true} // zero is no limit (V4)
	for i := range v.NumField() {
		if v.Field(i).IsZero() != none[v.Type().Field(i).Name] {
			t.Errorf("no default for %s", v.Type().Field(i).Name)
		}
	}
	if s.Route("nobody") != nil {
		t.Error("a route that is not there")
	}
}

func TestShadows(t *testing.T) {
	mk := func(f func(*Route)) *Route {
		r := route("r", "a.test")
		f(&r)
		return &r
	}
	any := mk(func(*Route) {})
	get := mk(func(r *Route) { r.Match.Methods = []string{"GET"} })
	v1 := mk(func(r *Route) { r.Match.Paths = []string{"/v1/**"} })
	v1x := mk(func(r *Route) { r.Match.Paths = []string{"/v1/x", "/v1/*/y"} })
	wild := mk(func(r *Route) { r.Match.Hosts = []string{"*.test"} })
	plain := mk(func(r *Route) { r.Upstream.AllowPlaintext = true })
	plain8 := mk(func(r *Route) { r.Upstream.AllowPlaintext, r.Match.Ports = true, []int{8443} })
	tls8 := mk(func(r *Route) { r.Match.Ports = []int{8443} })
	deny := mk(func(r *Route) { r.Deny, r.Match.Paths = true, []string{"/v1/x"} })
	for i, tc := range []struct {
		a, b *Route
		want bool
	}{
		{any, get, true}, {get, any, false}, {get, get, true}, {any, v1, true}, {v1, any, false}, {v1, v1x, true}, {v1x, v1, false},
		{wild, any, true}, {any, wild, false}, {any, plain, true}, {plain, any, true}, {tls8, plain8, false}, {plain8, tls8, true},
		{any, tls8, false}, {v1, deny, false}, {any, deny, true},
	} {
		a, b := *tc.a, *tc.b
		a.Name, b.Name = "a", "b"
		s := mustSnapshot(t, Deny, route("other", "o.test"), a, b)
		got := s.Shadows()
		if (len(got) == 1) != tc.want || len(got) == 1 && (got[0].Route.Name != "b" || got[0].By.Name != "a" || got[0].Index != 2) {
			t.Errorf("%d: Shadows = %v", i, got)
		}
	}
}

func TestExplain(t *testing.T) {
	contract.Covers(t, "B2")
	s := bed(t)
	for _, tc := range []struct{ method, url, decision, target, want string }{
		{"POST", "https://pay.example.test/v1/x?token=CANARY", "forward", "https://pay.example.test:443/v1/x", "inject       Authorization: Bearer ${secret}   (credential pay)"},
		{"POST", "http://PAY.example.test./v1/x", "forward", "https://pay.example.test:443/v1/x", "carried over https"},
		{"GET", "https://pay.example.test/v1/x#f", "forward", "https://pay.example.test:443/v1/x", "on unknown   backoff"},
		{"POST", "https://pay.example.test/v1/x", "forward", "https://pay.example.test:443/v1/x", "on unknown   reconcile"},
		{"GET", "https://admin.example.test", "deny", "https://admin.example.test:443/", "POLICY_DENIED"},
		{"GET", "http://strict.test/", "refuse", "http://strict.test:80/", "INVALID_TARGET"},
		{"GET", "https://pay.example.test/x", "no_route", "https://pay.example.test:443/x", "ROUTE_NOT_FOUND"},
		{"TRACE", "https://pay.example.test/v1/x", "no_route", "https://pay.example.test:443/v1/x", "UNSUPPORTED_ACTION"},
		{"GET", "https://[::1]/", "forward", "https://[::1]:443/", "inject       nothing"},
	} {
		e, err := s.Explain(tc.method, tc.url)
		if err != nil {
			t.Errorf("%s %s: %v", tc.method, tc.url, err)
			continue
		}
		var b strings.Builder
		if err := e.WriteText(&b); err != nil {
			t.Fatal(err)
		}
		if e.Decision != tc.decision || e.Target != tc.target || !strings.Contains(b.String(), tc.want) || strings.Contains(b.String(), "CANARY") || e.Snapshot != s.Digest() {
			t.Errorf("%s %s:\n%+v\n%s", tc.method, tc.url, e, b.String())
		}
	}
	for _, tc := range []struct {
		url string
		is  error
	}{
		{"/v1/x", ErrBadURL}, {"ftp://a.test/", ErrBadURL}, {"", ErrBadURL}, {"https://CANARY@a.test/", ErrBadAuthority},
		{"https:///x", ErrBadAuthority}, {"https://a.test/../x", ErrBadPath}, {"https://a.test//x", ErrBadPath}, {"https://a.test/%zz", ErrBadPath},
	} {
		if e, err := s.Explain("GET", tc.url); !errors.Is(err, tc.is) || strings.Contains(err.Error(), "CANARY") || e.Decision != "" {
			t.Errorf("%q: %v", tc.url, err)
		}
	}
	tun := mustSnapshot(t, Tunnel, route("r", "a.test"))
	if e, err := tun.Explain("GET", "https://b.test/"); err != nil || e.Decision != "tunnel" {
		t.Errorf("%+v %v", e, err)
	}
	if e, err := tun.Explain("GET", "http://b.test/"); err != nil || e.Decision != "no_route" {
		t.Errorf("%+v %v", e, err)
	}
}

func BenchmarkMatch(b *testing.B) {
	var rs []Route
	for i := range 500 {
		r := route(fmt.Sprint("r", i), fmt.Sprintf("h%d.test", i))
		r.Match.Paths, r.Match.Methods = []string{"/v1/**"}, []string{"POST"}
		rs = append(rs, r)
	}
	s, err := NewSnapshot(rs, Deny, nil)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportAllocs()
	for b.Loop() {
		if r, _ := s.Match("POST", https("h400.test", 443), "/v1/charges/ch_1/refunds"); r == nil {
			b.Fatal("no match")
		}
	}
}

func BenchmarkParseAuthority(b *testing.B) {
	b.ReportAllocs()
	for b.Loop() {
		if _, _, err := ParseAuthority("api.stripe.com:443", 443); err != nil {
			b.Fatal(err)
		}
	}
}
