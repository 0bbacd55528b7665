package config

import (
	"strings"

	"gopkg.in/yaml.v3"

	"waybill/routes"
)

var upstreamProxySchema = schema{
	keys: []string{"url", "user", "credential", "roots", "allow_private"},
	hints: map[string]string{
		"password": "write credential: with the name of a credential that holds the password", "host": "write url: http://proxy.example.com:3128", "port": "write url: http://proxy.example.com:3128",
	},
}

const proxyURLFix = "write http:// or https://, a host and a port, such as http://proxy.example.com:3128"

// upstreamProxy reads proxy: none, a URL, or a mapping with url:.
func (r *reader) upstreamProxy(o *object, u *routes.Upstream, creds *credentials) *routes.Proxy {
	v, path, ok := o.get("proxy")
	if !ok {
		return nil
	}
	n, ok := r.deref(v, path)
	if !ok {
		return nil
	}
	p := &routes.Proxy{}
	if n.Kind != yaml.MappingNode {
		s, ok := r.textOr(n, path, "none, a URL or a mapping", proxyURLFix)
		if !ok || s == "none" || !r.proxyURL(n, path, s, p) {
			return nil
		}
	} else if !r.proxyMapping(n, path, p, creds) {
		return nil
	}
	if u.AllowPlaintext {
		r.fail(n, path, "does not go with allow_plaintext: the proxy would see everything, secrets included", "remove one of them")
	}
	return p
}

func (r *reader) proxyMapping(n *yaml.Node, path string, p *routes.Proxy, creds *credentials) bool {
	o := r.object(n, path, upstreamProxySchema)
	if o == nil {
		return false
	}
	s, ok := o.need("url", "a URL such as http://proxy.example.com:3128")
	if at, path, has := o.get("url"); ok && has {
		ok = r.proxyURL(at, path, s, p)
	}
	if user, has := o.text("user", "a user name"); has {
		if at, path, _ := o.get("user"); user == "" || strings.ContainsAny(user, ":${}") || !printableASCII(user) {
			r.fail(at, path, "is no usable user name", "use printable ASCII characters without a colon")
		}
		p.User = user
	}
	if name, has := o.text("credential", "the name of a credential"); has {
		p.Credential = r.takeCredential(o, "credential", name, creds, false)
	}
	switch {
	case o.has("user") && !o.has("credential"):
		r.fail(o.key("user"), join(path, "user"), "is a user without a password", "add credential: with the name of a credential that holds the password")
	case o.has("credential") && !o.has("user"):
		r.fail(o.key("credential"), join(path, "credential"), "is a password without a user", "add user:")
	}
	if file, has := o.text("roots", "the path of a PEM file"); has {
		at, path, _ := o.get("roots")
		if p.RootsPEM = r.roots(at, path, file); p.Scheme == "http" {
			r.fail(at, path, "has no meaning for a proxy that is spoken to over http", "write url: https://…, or remove roots")
		}
	}
	if p.Credential != "" && p.Scheme == "http" {
		at, path, _ := o.get("credential")
		r.warn(at, path, "the proxy's password travels unencrypted up to the proxy", "write url: https://…, unless the network up to the proxy is trusted")
	}
	p.AllowPrivate = o.boolean("allow_private", false)
	return ok
}

func (r *reader) proxyURL(n *yaml.Node, path, s string, p *routes.Proxy) bool {
	if strings.Contains(s, "@") {
		r.fail(n, path, "holds a user or a password", "write proxy: {url: http://host:port, user: NAME, credential: ID}; "+neverHere)
		return false
	}
	t, err := routes.ParseOrigin(strings.TrimSuffix(s, "/"))
	if err != nil {
		r.fail(n, path, "is no URL of an HTTP proxy", proxyURLFix)
		return false
	}
	p.Scheme, p.Host, p.Port = t.Scheme, t.Host, t.Port
	return true
}
