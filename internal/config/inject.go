package config

import (
	"errors"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"

	"waybill/inject"
	"waybill/routes"
)

var (
	injectSchema = schema{
		keys: []string{"header", "basic", "cookie", "query", "body", "sigv4", "client_certificate", "hmac", "value", "credential"},
		hints: map[string]string{
			"bearer": "write header: Authorization and value: \"Bearer ${secret}\"", "mtls": "write client_certificate: true", "tls": "write client_certificate: true",
			"param": "write query: and the name of the parameter", "json": "write body: and a JSON pointer such as /auth/token", "user": "write basic: and the user's name",
			"secret": neverHere, "token": neverHere, "password": neverHere,
		},
	}
	hmacSchema  = schema{keys: []string{"algorithm", "canonical", "encoding", "key", "timestamp", "timestamp_header", "nonce_header"}}
	sigv4Schema = schema{
		keys:  []string{"service", "region", "payload", "access_key_id"},
		hints: map[string]string{"secret_access_key": neverHere, "secret": neverHere},
	}
)

// places are the keys of which an entry has exactly one.
var places = []string{"header", "basic", "cookie", "query", "body", "sigv4", "client_certificate"}

func (r *reader) inject(n *yaml.Node, path string, creds *credentials) []routes.Injection {
	var out []routes.Injection
	count := 0
	listed := r.items(n, path, "[{header: Authorization, value: \"Bearer ${secret}\", credential: name}]", func(n *yaml.Node, path string) {
		count++
		o := r.object(n, path, injectSchema)
		if o == nil {
			return
		}
		before := len(r.problems)
		in := r.injection(o)
		taken := func(key string, same bool) {
			if same {
				n, path, _ := o.get(key)
				r.fail(n, path, "is injected twice", "remove one of them")
			}
		}
		for i := range out {
			for _, name := range in.Fields() {
				if slices.Contains(out[i].Fields(), name) {
					key := "header"
					for _, k := range places {
						if o.has(k) {
							key = k
						}
					}
					taken(key, true)
					break
				}
			}
			for _, key := range []string{"cookie", "query", "body", "client_certificate"} {
				taken(key, o.has(key) && in.Kind == out[i].Kind && in.Name == out[i].Name)
			}
		}
		if s, ok := o.need("credential", "the name of a credential"); ok {
			in.Credential = r.useCredential(o, s, creds, &in)
		}
		if len(r.problems) == before {
			out = append(out, in)
		}
	})
	if listed && count == 0 {
		r.fail(n, path, "is an empty list", "add an entry, or remove the key")
	}
	return out
}

// useCredential finds the credential of an entry.
func (r *reader) useCredential(o *object, s string, creds *credentials, in *routes.Injection) string {
	multiline := in.Kind == routes.InjectClientCertificate || in.Kind == routes.InjectSigV4 && in.SigV4 != nil && in.SigV4.AccessKeyID == ""
	if c := creds.byID[s]; c != nil && (in.Kind == routes.InjectClientCertificate || in.Kind == routes.InjectSigV4) && (c.Spec.Kind == inject.KindOAuth || c.Spec.Kind == inject.KindGitHubApp) {
		n, path, _ := o.get("credential")
		r.fail(n, path, "is a token that "+c.Spec.Kind+" makes: no key and no certificate", "attach it with header: Authorization and value: \"Bearer ${secret}\", or name another credential")
	}
	return r.takeCredential(o, "credential", s, creds, multiline)
}

// takeCredential finds the credential that key of o names, and holds together what it is
// used for: a key of several lines (multiline: PEM, JSON) is used by itself and never put
// into a field.
func (r *reader) takeCredential(o *object, key, s string, creds *credentials, multiline bool) string {
	n, path, _ := o.get(key)
	c := creds.byID[s]
	switch {
	case c != nil:
		c.used = true
		switch {
		case c.uses != 0 && c.Multiline != multiline:
			r.fail(n, path, "is used for a key and for a value of one line", "define two credentials")
		case multiline:
			c.Multiline = true
		}
		c.uses++
	case !creds.broken[s]:
		fix := "define it under credentials:"
		names := make([]string, len(creds.list))
		for i, c := range creds.list {
			names[i] = c.ID
		}
		if near := nearestName(s, names); near != "" {
			fix = "did you mean " + near + "?"
		}
		r.fail(n, path, "there is no such credential", fix)
	}
	return s
}

func (r *reader) injection(o *object) (in routes.Injection) {
	var written []string
	for _, key := range places {
		if o.has(key) {
			written = append(written, key)
		}
	}
	switch {
	case len(written) == 0:
		o.need("header", "a field name") // reports that it is missing
	case len(written) > 1:
		r.fail(o.key(written[1]), join(o.path, written[1]), "stands beside "+written[0], "write an entry for each place")
		return in
	case o.has("hmac") && written[0] != "header":
		r.fail(o.key("hmac"), join(o.path, "hmac"), "goes with header: only", "write header: with the field of the signature")
		return in
	}
	valued := true // takes a template
	switch {
	case o.has("header"):
		if s, ok := o.text("header", "a field name"); ok {
			n, path, _ := o.get("header")
			h, wrong, fix := r.fieldName(s)
			if wrong != "" {
				r.fail(n, path, wrong, fix)
			}
			in.Header = h
		}
		if o.has("hmac") {
			in.Kind, in.HMAC = routes.InjectHMAC, r.hmac(o)
			valued = false
		}
	case o.has("basic"):
		valued = false
		if s, ok := o.text("basic", "the user's name"); ok {
			in.Header, in.Value = "Authorization", "Basic ${basic:"+s+"}"
			if _, err := inject.ParseTemplate(in.Value); err != nil {
				n, path, _ := o.get("basic")
				r.fail(n, path, "is no user name for Basic", "use printable ASCII without a colon, \"$\" and braces")
			}
		}
	case o.has("cookie"):
		in.Kind = routes.InjectCookie
		in.Name = r.placeName(o, "cookie", "a cookie's name", "write the name of the cookie", func(s string) error { return inject.CheckCookieName(s) })
	case o.has("query"):
		in.Kind = routes.InjectQuery
		in.Name = r.placeName(o, "query", "a parameter's name", "write the name of the parameter, as it is after decoding", func(s string) error {
			if len(s) > 64 || !printableASCII(s) {
				return errBadName
			}
			return nil
		})
	case o.has("body"):
		in.Kind = routes.InjectBody
		in.Name = r.placeName(o, "body", "a JSON pointer", "write a JSON pointer to a member, such as /auth/token", func(s string) error {
			_, err := inject.ParsePointer(s)
			return err
		})
	case o.has("sigv4"):
		in.Kind, in.SigV4 = routes.InjectSigV4, r.sigv4(o)
		valued = false
	case o.has("client_certificate"):
		in.Kind = routes.InjectClientCertificate
		valued = false
		if !o.boolean("client_certificate", true) {
			n, path, _ := o.get("client_certificate")
			r.fail(n, path, "injects nothing", "write true, or remove the entry")
		}
	}
	switch {
	case in.Kind == routes.InjectHMAC:
		r.hmacValue(o, &in)
	case !valued:
		if o.has("value") {
			r.fail(o.key("value"), join(o.path, "value"), "has no meaning beside "+written[0], "remove it")
		}
	case in.Kind != routes.InjectHeader && len(written) > 0 && !o.has("value"):
		in.Value = "${secret}"
	default:
		if s, ok := o.need("value", "a template such as \"Bearer ${secret}\""); ok {
			if _, err := inject.ParseTemplate(s); err != nil {
				n, path, _ := o.get("value")
				wrong, fix := templateProblem(err)
				r.fail(n, path, wrong, fix)
			}
			in.Value = s
		}
	}
	return in
}

var errBadName = errors.New("config: no usable name")

func (r *reader) placeName(o *object, key, what, fix string, check func(string) error) string {
	s, ok := o.text(key, what)
	if ok && check(s) != nil {
		n, path, _ := o.get(key)
		r.fail(n, path, "is no usable name", fix)
	}
	return s
}

func (r *reader) hmac(o *object) *routes.HMAC {
	n, path, _ := o.get("hmac")
	h := &routes.HMAC{}
	m := r.object(n, path, hmacSchema)
	if m == nil {
		return h
	}
	h.Algorithm = word(m, "algorithm", "sha256", "sha512", "sha1")
	h.Encoding = word(m, "encoding", "hex", "base64", "base64url")
	h.Key = word(m, "key", "text", "hex", "base64")
	h.Timestamp = word(m, "timestamp", "unix", "unix_ms", "rfc3339", "http")
	h.Canonical, _ = m.need("canonical", "a template of what is signed, such as \"${timestamp}.${body}\"")
	for key, into := range map[string]*string{"timestamp_header": &h.TimestampHeader, "nonce_header": &h.NonceHeader} {
		if s, ok := m.text(key, "a field name"); ok {
			name, wrong, fix := r.fieldName(s)
			if wrong != "" {
				n, path, _ := m.get(key)
				r.fail(n, path, wrong, fix)
			}
			*into = name
		}
	}
	return h
}

func word(o *object, key string, words ...string) string { return words[o.enum(key, words...)] }

func (r *reader) hmacValue(o *object, in *routes.Injection) {
	in.Value = "${signature}"
	if s, ok := o.text("value", "a template such as \"v1=${signature}\""); ok {
		in.Value = s
	}
	h := in.HMAC
	spec := inject.HMACSpec{Algorithm: h.Algorithm, Canonical: h.Canonical, Encoding: h.Encoding, Key: h.Key, Timestamp: h.Timestamp, Value: in.Value}
	if h.Canonical == "" {
		return // reported
	}
	spec.Value = "${signature}"
	if _, err := inject.NewSigner(spec); err != nil {
		n, path, _ := o.get("hmac")
		r.fail(n, path+".canonical", "signs nothing of the request, or has an unknown placeholder", "use ${method}, ${scheme}, ${host}, ${path}, ${query}, ${sorted_query}, ${target}, ${timestamp}, ${nonce}, ${body}, ${body_sha256}, ${body_sha256_base64}, ${body_md5_base64} and ${header:Name}")
		return
	}
	spec.Value = in.Value
	if _, err := inject.NewSigner(spec); err != nil {
		n, path, _ := o.get("value")
		r.fail(n, path, "has no place for the signature, or an unknown placeholder", "use ${signature}, ${timestamp} and ${nonce}")
	}
	for name, uses := range map[string]bool{"timestamp_header": strings.Contains(h.Canonical, "${timestamp}"), "nonce_header": strings.Contains(h.Canonical, "${nonce}")} {
		what := strings.TrimSuffix(name, "_header")
		_, path, _ := o.get("hmac")
		m, _ := r.deref(o.fields["hmac"].value, path)
		told := h.TimestampHeader != ""
		if what == "nonce" {
			told = h.NonceHeader != ""
		}
		if uses && !told && !strings.Contains(in.Value, "${"+what+"}") {
			r.fail(m, join(path, name), "is missing: the "+what+" is signed and not sent", "add "+name+":, or put ${"+what+"} into value")
		}
	}
}

func (r *reader) sigv4(o *object) *routes.SigV4 {
	n, path, _ := o.get("sigv4")
	s := &routes.SigV4{}
	m := r.object(n, path, sigv4Schema)
	if m == nil {
		return s
	}
	plain := func(key, what string, required bool) string {
		var v string
		var ok bool
		if required {
			v, ok = m.need(key, what)
		} else {
			v, ok = m.text(key, what)
		}
		if ok && (len(v) > 128 || strings.ContainsAny(v, " /,=\"{}$") || !printableASCII(v)) {
			n, path, _ := m.get(key)
			r.fail(n, path, "is no usable value", "write "+what)
		}
		return v
	}
	s.Service = plain("service", "the signing name of the service, such as s3", true)
	s.Region = plain("region", "a region, such as eu-west-1", true)
	s.AccessKeyID = plain("access_key_id", "the id of the access key", false)
	s.Payload = word(m, "payload", "auto", "signed", "unsigned")
	return s
}

// injectionContradictions are combinations of what is injected with the rest of a route.
func (r *reader) injectionContradictions(o *object, rt *routes.Route) {
	n, path, ok := o.get("inject")
	if !ok {
		return
	}
	signs := ""
	whole := false
	for i := range rt.Inject {
		in := &rt.Inject[i]
		whole = whole || slices.Contains(in.Fields(), "Cookie")
		if in.Signs() && signs != "" {
			r.fail(n, path, "signs the request twice ("+signs+", "+in.Word()+")", "keep one of them")
		} else if in.Signs() {
			signs = in.Word()
		}
		if rt.Redirects == routes.RedirectsSameOrigin && (in.Signs() || in.Kind == routes.InjectQuery || in.Kind == routes.InjectBody) {
			n, path, _ := o.get("redirects")
			r.fail(n, path, "same_origin does not go with the injection "+in.Word()+": what is injected belongs to one request", "write relay: the caller follows, with an injection of its own")
		}
		if in.Kind == routes.InjectClientCertificate && rt.Upstream.AllowPlaintext {
			n, path, _ := o.get("upstream")
			r.fail(n, join(path, "allow_plaintext"), "does not go with a client certificate, which needs https", "remove one of them")
		}
		if in.Kind == routes.InjectSigV4 && in.SigV4.Payload == "unsigned" && rt.Upstream.AllowPlaintext {
			r.fail(n, path, "an unsigned payload needs https", "remove upstream.allow_plaintext, or write payload: signed")
		}
	}
	if whole && rt.Injects(routes.InjectCookie) {
		r.fail(n, path, "sets the field Cookie whole and a cookie in it", "keep one of them")
	}
}
