package config

import (
	"bytes"
	"crypto/x509"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"net/netip"
	"net/textproto"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"waybill/inject"
	"waybill/outcome"
	"waybill/routes"
)

var (
	routeSchema = schema{
		keys:    []string{"name", "use", "with", "credential", "match", "deny", "inject", "contract", "delivery", "durability", "caller_value", "pass_authorization", "trace_context", "strip", "leak", "redirects", "redirect_from", "dialect", "approval", "callers", "upstream", "limits", "upgrade", "ssh"},
		unbuilt: map[string][]string{},
	}
	matchSchema = schema{
		keys:  []string{"host", "hosts", "ports", "methods", "path", "paths"},
		hints: map[string]string{"port": "write ports: [443]", "method": "write methods: [GET]", "url": "write host: and path:"},
	}
	contractSchema = schema{
		keys: []string{"repeatable", "refused_before_execution", "close_delimited", "end_marker", "idempotency", "conditional", "responses", "retry", "on_repeat", "reconcile", "async", "batch", "marker"},
	}
	upstreamSchema = schema{
		keys:  []string{"scheme", "roots", "roots_only", "pins", "resolve", "allow_private", "allow_plaintext", "refuse_plaintext", "proxy"},
		hints: map[string]string{"insecure": "certificates are always verified; write roots: with the CA of the service", "insecure_skip_verify": "certificates are always verified; write roots: with the CA of the service"},
	}
	limitsSchema = schema{keys: []string{"request", "buffer", "response", "timeout", "idle", "hold", "connect", "tries", "duplicates", "retention", "rate", "burst", "concurrent"}}
)

// homeOf tells where a key that stands in the wrong place belongs.
func homeOf(key string) string {
	for _, s := range []struct {
		name string
		s    schema
	}{
		{"the top level", rootSchema},
		{"a route", routeSchema}, {"match of a route", matchSchema}, {"an entry of inject", injectSchema}, {"ssh of a route", sshSchema}, {"an entry of commands", commandSchema}, {"approval of a route", approvalSchema}, {"an entry of when", approvalRuleSchema}, {"contract of a route", contractSchema}, {"idempotency of a contract", idempotencySchema}, {"retry of a contract", retrySchema},
		{"upstream of a route", upstreamSchema}, {"limits of a route", limitsSchema}, {"listen", listenSchema}, {"from of a credential", sourceSchema},
		{"proxy of upstream", upstreamProxySchema}, {"approvals", approvalsSchema}, {"notify of approvals", notifySchema}, {"reconcile of a contract", reconcileSchema}, {"async of a contract", asyncSchema}, {"batch of a contract", batchSchema},
	} {
		if _, unbuilt := s.s.unbuilt[key]; unbuilt || contains(s.s.keys, key) {
			return s.name
		}
	}
	return ""
}

const anyCaller = "any"

// maxMarker bounds contract.end_marker, in bytes.
const maxMarker = 256

func (r *reader) routes(n *yaml.Node, path string, creds *credentials, callers []Caller) (out []routes.Route, nodes []*yaml.Node, paths []string) {
	names := map[string]string{}
	r.items(n, path, "a list of routes, each beginning with - name:", func(n *yaml.Node, path string) {
		before := len(r.problems)
		for _, it := range r.expand(n, path) {
			o := r.object(it.node, it.path, routeSchema)
			if o == nil {
				continue
			}
			if it.use == nil {
				r.withoutUse(o)
			}
			rt := r.route(o, creds, callers)
			if rt.Name != "" {
				if first, dup := names[rt.Name]; dup {
					n, path, _ := o.get("name")
					r.fail(n, path, "is the name of "+first+" too", "give each route its own name")
				} else {
					names[rt.Name] = it.path
				}
			}
			if it.use != nil {
				if r.uses == nil {
					r.uses = map[string]PresetUse{}
				}
				r.uses[rt.Name] = *it.use
			}
			out, nodes, paths = append(out, rt), append(nodes, o.node), append(paths, it.path)
		}
		r.onceEach(before)
	})
	return out, nodes, paths
}

func (r *reader) route(o *object, creds *credentials, callers []Caller) (rt routes.Route) {
	if name, ok := o.need("name", "a name"); ok {
		if isName(name) {
			rt.Name = name
		} else {
			n, path, _ := o.get("name")
			r.fail(n, path, "is no usable name", nameFix+"; it is a label of metrics")
		}
	}
	if n, path, ok := o.get("match"); ok {
		rt.Match = r.match(n, path)
	} else {
		r.fail(o.node, join(o.path, "match"), "is missing", "add match: {host: api.example.com}")
	}
	rt.Deny = o.boolean("deny", false)
	if rt.Deny {
		// Whatever else is written would never happen, and somebody may believe it does.
		for _, key := range routeSchema.keys {
			if key != "name" && key != "match" && key != "deny" && o.has(key) {
				r.fail(o.key(key), join(o.path, key), "contradicts deny: true", "remove one of them; a refusing route has name, match and deny only")
			}
		}
		return rt
	}
	jump := ""
	if n, path, ok := o.get("ssh"); ok {
		jump = jumpHost(n)
		defer func() { rt.SSH = r.ssh(o, n, path, &rt, creds) }()
	}
	if n, path, ok := o.get("inject"); ok {
		rt.Inject = r.inject(n, path, creds)
	}
	if n, path, ok := o.get("contract"); ok {
		rt.Contract = r.contract(n, path)
	}
	switch o.enum("delivery", "auto", "buffered", "stream") {
	case 1:
		rt.Delivery = routes.DeliveryBuffered
	case 2:
		rt.Delivery = routes.DeliveryStream
	}
	if o.enum("durability", "strict", "relaxed") == 1 {
		rt.Durability = routes.Relaxed
		if rep := rt.Contract.Repeatable; rep == nil || !*rep {
			n, path, _ := o.get("durability")
			r.fail(n, path, "relaxed gives up the proof that a request was not sent", "add contract: {repeatable: true} if repeating has no further effect, or write strict") // CONTRACT F1
		}
	}
	rt.RejectManaged = o.enum("caller_value", "replace", "reject") == 1
	rt.PassAuthorization = o.boolean("pass_authorization", false)
	rt.PassTrace = o.enum("trace_context", "strip", "pass") == 1
	rt.Strip = o.texts("strip", "a field name", "[Authorization]", func(s string) (string, string, string) {
		return r.fieldName(s)
	})
	rt.Callers = r.routeCallers(o, callers)
	if o.enum("upgrade", "refuse", "tunnel") == 1 {
		rt.Upgrade = routes.UpgradeTunnel
	}
	if o.enum("leak", "redact", "block") == 1 {
		rt.Leak = routes.LeakBlock
	}
	if o.enum("redirects", "relay", "same_origin") == 1 {
		rt.Redirects = routes.RedirectsSameOrigin
	}
	// An empty list is the default: nobody's redirects.
	if n, _, ok := o.get("redirect_from"); ok && (n.Kind != yaml.SequenceNode || len(n.Content) > 0) {
		rt.RedirectFrom = o.texts("redirect_from", "an origin", "[https://api.example.com]", func(s string) (string, string, string) {
			t, err := routes.ParseOrigin(s)
			if err != nil {
				return "", "is no origin", "write https:// and a host, without a path, such as https://api.example.com"
			}
			return t.Origin(), "", ""
		})
	}
	dialects := outcome.Dialects()
	names := make([]string, len(dialects))
	for i, d := range dialects {
		names[i] = d.String()
	}
	rt.Dialect = dialects[o.enum("dialect", names...)]
	if n, path, ok := o.get("upstream"); ok {
		rt.Upstream = r.upstream(n, path, &rt, jump, creds)
	}
	if n, path, ok := o.get("limits"); ok {
		rt.Limits = r.limits(n, path)
	}
	rt.Approval = r.approval(o, &rt)
	r.contradictions(o, &rt)
	r.repeatContradictions(o, &rt)
	return rt
}

// contradictions are settings that are fine alone.
func (r *reader) contradictions(o *object, rt *routes.Route) {
	injected := map[string]bool{}
	for i := range rt.Inject {
		for _, name := range rt.Inject[i].Fields() {
			injected[name] = true
		}
	}
	r.injectionContradictions(o, rt)
	for _, h := range rt.Strip {
		if injected[h] {
			n, path, _ := o.get("strip")
			r.fail(n, path, quoted(h)+" is injected on this route and replaced anyway", "remove it from strip")
		} else if rt.PassAuthorization && (h == "Authorization" || h == "Cookie") {
			n, path, _ := o.get("strip")
			r.fail(n, path, quoted(h)+" is stripped and passed at once", "remove it from strip, or remove pass_authorization")
		}
	}
	if n, path, ok := o.get("pass_authorization"); ok && rt.PassAuthorization && injected["Authorization"] {
		r.fail(n, path, "contradicts the injection of Authorization", "remove pass_authorization; the injected value replaces the caller's")
	}
	if rt.Upstream.AllowPlaintext && len(rt.Inject) > 0 {
		// CONTRACT V2: in clear only where the route says so in words. These are the words;
		// nobody should find them in a file without being told.
		up, path, _ := o.get("upstream")
		names := make([]string, 0, len(rt.Inject))
		for _, in := range rt.Inject {
			names = append(names, in.Credential)
		}
		r.warn(up, path+".allow_plaintext", "the credential "+strings.Join(names, ", ")+" may travel unencrypted on this route", "remove allow_plaintext unless the network up to the service is trusted")
	}
}

func (r *reader) match(n *yaml.Node, path string) routes.Match {
	var m routes.Match
	o := r.object(n, path, matchSchema)
	if o == nil {
		return m
	}
	switch one, many := o.has("host"), o.has("hosts"); {
	case one && many:
		r.fail(o.key("hosts"), join(path, "hosts"), "host and hosts are both written", "keep one of them")
	case one:
		if s, ok := o.text("host", "a host name"); ok {
			n, path, _ := o.get("host")
			if h, wrong, fix := r.hostPattern(n, path, s); wrong != "" {
				r.fail(n, path, wrong, fix)
			} else {
				m.Hosts = []string{h}
			}
		}
	case many:
		n, path, _ := o.get("hosts")
		m.Hosts = o.texts("hosts", "a host name", "[api.example.com]", func(s string) (string, string, string) { return r.hostPattern(n, path, s) })
	default:
		r.fail(o.node, join(path, "host"), "is missing", "add host: api.example.com (a route is for named hosts only)")
	}
	m.Ports = o.integers("ports", "[443]", 1, 65535)
	m.Methods = r.methods(o)
	m.Paths = r.pathPatterns(o)
	return m
}

func (r *reader) hostPattern(n *yaml.Node, path, s string) (canonical, wrong, fix string) {
	h, err := routes.ParseHostPattern(s)
	if err == nil {
		if suffix, wild := strings.CutPrefix(h, "*."); wild && !strings.Contains(suffix, ".") {
			r.warn(n, path, quoted(s)+" names every host directly below a top-level name", "name the hosts, unless the whole name is yours")
		}
		return h, "", ""
	}
	var ae *routes.AuthorityError
	wrong = "is no host name"
	if errors.As(err, &ae) {
		wrong += " (" + ae.Reason + ")"
	}
	switch {
	case strings.Contains(s, "://"):
		fix = "write the host only, without a scheme"
	case strings.Contains(s, "/"):
		fix = "write the host only; the path belongs in path:"
	case s == "*":
		fix = "name the hosts; what no route names is decided by default:"
	case strings.Contains(s, "*"):
		fix = "write *. at the beginning only; it stands for exactly one label"
	case strings.Count(s, ":") == 1:
		fix = "write the host only; the port belongs in ports:"
	default:
		fix = "write a name such as api.example.com, *.example.com, or an IP address"
	}
	return "", wrong, fix
}

// commonMethods are the registered ones that people use (RFC 9110, 5789, 4918).
var commonMethods = []string{"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "PROPFIND", "PROPPATCH", "MKCOL", "COPY", "MOVE", "LOCK", "UNLOCK", "REPORT", "SEARCH", "QUERY", "PURGE"}

func (r *reader) methods(o *object) []string {
	n, path, ok := o.get("methods")
	if !ok {
		return nil
	}
	list := o.texts("methods", "a method", "[GET, POST]", func(s string) (string, string, string) {
		upper := strings.ToUpper(s)
		switch {
		case s == "*":
			return s, "", ""
		case upper == "CONNECT" || upper == "TRACE" || upper == "TRACK":
			return "", quoted(s) + " is never forwarded", "remove it; TRACE and TRACK would show the injected secret to the caller"
		case !routes.IsMethod(s) && routes.IsMethod(upper):
			return "", "methods are written in capitals", "write " + upper
		case !routes.IsMethod(s) || len(s) > 32:
			return "", "is no method", "write names such as GET or POST"
		}
		if !contains(commonMethods, s) {
			if near := nearestName(s, commonMethods); near != "" {
				r.warn(n, path, quoted(s)+" is an uncommon method", "did you mean "+near+"?")
			}
		}
		return s, "", ""
	})
	if contains(list, "*") {
		if len(list) > 1 {
			r.fail(n, path, "\"*\" stands for every method", "keep \"*\" alone, or remove it")
		}
		return nil
	}
	return list
}

func (r *reader) fieldName(s string) (canonical, wrong, fix string) {
	if err := inject.CheckHeader(s); err != nil {
		var ie *inject.Error
		if errors.As(err, &ie) && ie.Reason == inject.ReasonHeaderKept {
			return "", quoted(s) + " belongs to the connection, to proxies or to Waybill", "choose a field of the service, such as Authorization"
		}
		return "", "is no field name", "write a name such as Authorization or X-Api-Key"
	}
	return textproto.CanonicalMIMEHeaderKey(s), "", ""
}

// templateProblem says what is wrong without showing the template, into which
// somebody may have written the secret itself.
func templateProblem(err error) (wrong, fix string) {
	reason := ""
	var ie *inject.Error
	if errors.As(err, &ie) {
		reason = ie.Reason
		if ie.Position > 0 {
			wrong = fmt.Sprintf(" (character %d)", ie.Position)
		}
	}
	const form = "write \"Bearer ${secret}\", \"${secret}\" or \"Basic ${basic:user}\""
	switch reason {
	case inject.ReasonNoPlaceholder:
		return "has no place for the secret" + wrong, form + "; the secret itself stays out of this file"
	case inject.ReasonPlaceholder:
		return "has an unknown placeholder" + wrong, form
	case inject.ReasonOuterSpace:
		return "begins or ends with a space" + wrong, "remove it"
	}
	return "is no template of a field value" + wrong, form
}

func (r *reader) contract(n *yaml.Node, path string) routes.Contract {
	var c routes.Contract
	o := r.object(n, path, contractSchema)
	if o == nil {
		return c
	}
	if o.has("repeatable") {
		v := o.boolean("repeatable", false)
		c.Repeatable = &v
	}
	c.RefusedBeforeExecution = o.integers("refused_before_execution", "[429]", 400, 599)
	for _, s := range c.RefusedBeforeExecution {
		if s == 502 || s == 504 {
			// CONTRACT G10: by themselves they say that the origin gave no answer.
			n, path, _ := o.get("refused_before_execution")
			r.fail(n, path, fmt.Sprintf("%d is an intermediary's answer and says nothing about the service", s), "remove it")
		}
	}
	r.repeats(o, &c)
	r.followUp(o, &c)
	c.CloseDelimited = o.boolean("close_delimited", false)
	if s, ok := o.text("end_marker", "text such as \"[DONE]\""); ok {
		if c.EndMarker = s; s == "" || len(s) > maxMarker || strings.TrimSpace(s) != s || strings.ContainsAny(s, "\r\n") {
			n, path, _ := o.get("end_marker")
			r.fail(n, path, "is no usable end marker", "write one line of at most 256 bytes that begins and ends with no blank, such as \"[DONE]\"")
		}
	}
	return c
}

func (r *reader) routeCallers(o *object, callers []Caller) []string {
	n, path, ok := o.get("callers")
	if !ok {
		return nil
	}
	list := o.texts("callers", "a caller's name", "[any]", func(s string) (string, string, string) {
		if !isName(s) {
			return "", "is no usable name", nameFix
		}
		return s, "", ""
	})
	if contains(list, anyCaller) {
		if len(list) > 1 {
			r.fail(n, path, "any stands for every caller", "keep any alone, or remove it")
		}
		return nil
	}
	names := make([]string, len(callers))
	for i, c := range callers {
		names[i] = c.Name
	}
	for _, s := range list {
		if contains(names, s) {
			continue
		}
		fix := "add it under callers:, or correct the name"
		if near := nearestName(s, names); near != "" {
			fix = "did you mean " + near + "?"
		}
		r.warn(n, path, "no caller "+quoted(s)+" is configured; only a session of that name could use the route", fix)
	}
	return list
}

func (r *reader) upstream(n *yaml.Node, path string, rt *routes.Route, jump string, creds *credentials) routes.Upstream {
	var u routes.Upstream
	o := r.object(n, path, upstreamSchema)
	if o == nil {
		return u
	}
	if o.enum("scheme", "https", "http") == 1 {
		n, path, _ := o.get("scheme")
		r.fail(n, path, "http is not available in this version", "write allow_plaintext: true; requests to http:// are then sent as they are")
	}
	u.AllowPlaintext = o.boolean("allow_plaintext", false)
	u.RefusePlaintext = o.boolean("refuse_plaintext", false)
	if u.AllowPlaintext && u.RefusePlaintext {
		r.fail(o.key("refuse_plaintext"), join(path, "refuse_plaintext"), "contradicts allow_plaintext: true", "remove one of them")
	}
	u.AllowPrivate = o.boolean("allow_private", false)
	if file, ok := o.text("roots", "the path of a PEM file"); ok {
		n, path, _ := o.get("roots")
		u.RootsPEM = r.roots(n, path, file)
	}
	u.RootsOnly = o.boolean("roots_only", false)
	if u.RootsOnly && !o.has("roots") {
		r.fail(o.key("roots_only"), join(path, "roots_only"), "without roots nobody is trusted", "add roots:, or remove roots_only")
	}
	u.Pins = o.texts("pins", "a digest such as sha256:…", "[\"sha256:…\"]", func(s string) (string, string, string) {
		digits, ok := strings.CutPrefix(strings.ToLower(s), "sha256:")
		if b, err := hex.DecodeString(digits); !ok || err != nil || len(b) != 32 {
			return "", "is no pin", "write sha256: and 64 hex digits of the SHA-256 of a certificate's SubjectPublicKeyInfo"
		}
		return "sha256:" + digits, "", ""
	})
	if n, path, ok := o.get("resolve"); ok {
		u.Resolve = r.resolve(n, path, rt, jump)
	}
	u.Proxy = r.upstreamProxy(o, &u, creds)
	return u
}

// roots reads trust anchors. The certificates alone are kept, so that comments and
// line ends of the file do not count.
func (r *reader) roots(n *yaml.Node, path, file string) []byte {
	name := r.relative(file)
	r.read = append(r.read, name)
	data, err := r.readFile(name)
	if err != nil {
		r.fail(n, path, "cannot be read: "+err.Error(), "check the path (relative to the folder of this file) and its permissions")
		return nil
	}
	var out bytes.Buffer
	for count := 1; ; count++ {
		block, rest := pem.Decode(data)
		if block == nil {
			break
		}
		data = rest
		if strings.Contains(block.Type, "PRIVATE KEY") {
			r.fail(n, path, "the file holds a private key", "point to the certificates only")
			return nil
		}
		if block.Type != "CERTIFICATE" {
			r.fail(n, path, fmt.Sprintf("block %d of the file is no certificate", count), "point to a file of CERTIFICATE blocks")
			return nil
		}
		if _, err := x509.ParseCertificate(block.Bytes); err != nil {
			r.fail(n, path, fmt.Sprintf("certificate %d of the file cannot be read", count), "export it again in PEM form")
			return nil
		}
		if err := pem.Encode(&out, &pem.Block{Type: block.Type, Bytes: block.Bytes}); err != nil {
			r.fail(n, path, "cannot be encoded again", "export it again in PEM form")
			return nil
		}
	}
	if out.Len() == 0 {
		r.fail(n, path, "the file holds no certificate", "point to a file of CERTIFICATE blocks in PEM form")
		return nil
	}
	return out.Bytes()
}

// resolve reads the fixed addresses of the route's hosts, and of its jump host.
func (r *reader) resolve(n *yaml.Node, path string, rt *routes.Route, jump string) map[string]string {
	n, ok := r.deref(n, path)
	if !ok {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		r.fail(n, path, "must be a mapping, is "+kindName(n), "write {api.example.com: 10.0.0.7}")
		return nil
	}
	r.checkTag(n, path)
	out := map[string]string{}
	r.pairs(n, path, func(key string, k, v *yaml.Node) {
		at := join(path, key)
		host, err := routes.ParseHostPattern(key)
		if err != nil || strings.HasPrefix(host, "*.") {
			r.fail(k, at, "is no host name", "write one exact host for each address")
			return
		}
		if len(rt.Match.Hosts) > 0 && !rt.TakesHost(host) && host != jump {
			r.fail(k, at, "is a host that this route does not match", "correct the name, or add it to match")
			return
		}
		if _, dup := out[host]; dup {
			r.fail(k, at, "is the same host as an earlier key", "keep one of them")
			return
		}
		s, ok := r.text(v, at, "an address such as 10.0.0.7 or 10.0.0.7:8443")
		if !ok {
			return
		}
		if addr, ok := fixedAddress(s); ok {
			out[host] = addr
		} else {
			r.fail(v, at, "is no IP address", "write an address such as 10.0.0.7, \"::1\", 10.0.0.7:8443 or \"[::1]:8443\"")
		}
	})
	if len(out) == 0 {
		return nil
	}
	return out
}

func fixedAddress(s string) (string, bool) {
	if ip, err := netip.ParseAddr(s); err == nil {
		return ip.String(), ip.Zone() == ""
	}
	if ap, err := netip.ParseAddrPort(s); err == nil {
		return ap.String(), ap.Addr().Zone() == "" && ap.Port() != 0
	}
	return "", false
}

const day = 24 * time.Hour

func (r *reader) limits(n *yaml.Node, path string) routes.Limits {
	var l routes.Limits
	o := r.object(n, path, limitsSchema)
	if o == nil {
		return l
	}
	l.Request = o.size("request", 1, 1<<40)
	l.Buffer = o.size("buffer", 1<<10, 1<<30)
	l.Response = o.size("response", 1, 1<<40)
	l.Timeout = o.duration("timeout", time.Millisecond, day)
	l.Idle = o.duration("idle", time.Millisecond, day)
	l.Hold = o.duration("hold", time.Millisecond, day)
	l.Connect = o.duration("connect", time.Millisecond, 10*time.Minute)
	if n, path, ok := o.get("tries"); ok {
		l.Tries, _ = r.integer(n, path, 1, 10)
	}
	l.Duplicates = o.duration("duplicates", time.Millisecond, 30*day)
	l.Retention = o.duration("retention", time.Millisecond, 3660*day)
	r.callerLimits(o, &l)
	return l
}
