package config

import (
	"net"
	"net/url"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"waybill/inject"
)

var (
	kubernetesSchema  = schema{keys: []string{"folder", "key"}}
	keyringSchema     = schema{keys: []string{"service", "account"}, hints: map[string]string{"password": neverHere}}
	hashicorpSchema   = schema{keys: []string{"address", "namespace", "roots", "mount", "path", "field", "dynamic", "token", "approle", "kubernetes"}}
	appRoleSchema     = schema{keys: []string{"mount", "role_id", "secret_id"}}
	kubeAuthSchema    = schema{keys: []string{"mount", "role", "jwt_file"}}
	awsSchema         = schema{keys: []string{"secret", "region", "field", "endpoint", "stage"}, hints: map[string]string{"access_key_id": "credentials for AWS come from the environment, as for every AWS program"}}
	onePasswordSchema = schema{keys: []string{"host", "token", "vault", "item", "field"}}
	oauthSchema       = schema{keys: []string{"token_url", "client_id", "client_secret", "refresh_token", "rotates", "scopes", "audience", "client_auth", "roots"}}
	gitHubAppSchema   = schema{keys: []string{"app_id", "installation_id", "private_key", "api", "repositories", "permissions", "roots"}}
)

// plainSources are those that a secret which another source needs may come from.
var plainSources = []string{"env", "file", "command", "vault", "kubernetes", "keyring"}

// source reads one source. inner: it is needed by another one, and is no maker of tokens.
func (r *reader) source(n *yaml.Node, path string, inner bool) *inject.Spec {
	if d, ok := r.deref(n, path); ok && d.Kind == yaml.ScalarNode {
		r.fail(d, path, "must be a mapping", neverHere)
		return nil
	}
	before := len(r.problems)
	src := r.object(n, path, sourceSchema)
	if src == nil || len(r.problems) > before {
		return nil
	}
	if len(src.fields) != 1 {
		r.fail(src.node, path, "must name exactly one source", "write one of "+strings.Join(sourceSchema.keys, ", "))
		return nil
	}
	s := &inject.Spec{}
	for key := range src.fields {
		s.Kind = key
	}
	if inner && !contains(plainSources, s.Kind) {
		r.fail(src.key(s.Kind), join(path, s.Kind), "cannot stand inside another source", "write one of "+strings.Join(plainSources, ", "))
		return nil
	}
	from, at, _ := src.get(s.Kind)
	switch s.Kind {
	case inject.KindEnv:
		name, ok := src.text("env", "the name of an environment variable")
		if ok && !isEnvName(name) {
			r.fail(from, at, "is no name of an environment variable", "write the name only, without $; letters, digits and _")
		}
		s.Env = name
	case inject.KindFile:
		file, ok := src.text("file", "a path")
		if ok && strings.ContainsAny(file, "\n\r") {
			r.fail(from, at, "is no path", "write the path of a file; its content stays there")
		}
		s.File = r.relative(file)
	case inject.KindCommand:
		s.Command = r.command(from, at)
	case inject.KindVault:
		name, ok := src.text("vault", "the name of a secret in Waybill's vault")
		if ok && !isName(name) {
			r.fail(from, at, "is no usable name", nameFix)
		}
		s.Vault = name
	case inject.KindKubernetes:
		s.Kubernetes = r.kubernetes(from, at)
	case inject.KindKeyring:
		if o := r.object(from, at, keyringSchema); o != nil {
			s.Keyring = &inject.KeyringSpec{}
			s.Keyring.Service, _ = o.need("service", "the name of the service")
			s.Keyring.Account, _ = o.need("account", "the name of the account")
		}
	case inject.KindHashicorp:
		s.Hashicorp = r.hashicorp(from, at)
	case inject.KindAWS:
		if o := r.object(from, at, awsSchema); o != nil {
			s.AWS = &inject.AWSSpec{}
			s.AWS.Secret, _ = o.need("secret", "the name or the ARN of the secret")
			s.AWS.Region, _ = o.need("region", "a region, such as eu-west-1")
			s.AWS.Field, _ = o.text("field", "a key of the JSON object")
			s.AWS.Stage, _ = o.text("stage", "a staging label, such as AWSCURRENT")
			s.AWS.Endpoint = o.endpoint("endpoint", false)
		}
	case inject.KindOnePassword:
		if o := r.object(from, at, onePasswordSchema); o != nil {
			s.OnePassword = &inject.OnePasswordSpec{Host: o.endpoint("host", true), Token: o.inner("token", true)}
			s.OnePassword.Vault, _ = o.need("vault", "the name or the id of the vault")
			s.OnePassword.Item, _ = o.need("item", "the title or the id of the item")
			s.OnePassword.Field, _ = o.need("field", "the label or the id of the field")
		}
	case inject.KindOAuth:
		s.OAuth = r.oauth(from, at)
	case inject.KindGitHubApp:
		s.GitHubApp = r.gitHubApp(from, at)
	}
	if len(r.problems) > before {
		return nil
	}
	return s
}

func (r *reader) command(n *yaml.Node, path string) []string {
	var argv []string
	if d, ok := r.deref(n, path); ok && d.Kind == yaml.ScalarNode {
		r.fail(d, path, "must be a list: no shell reads it", "write [program, argument, …]")
		return nil
	}
	r.items(n, path, "[pass, show, api/stripe]", func(n *yaml.Node, path string) {
		if s, ok := r.textOr(n, path, "text", "put it in quotes"); ok {
			argv = append(argv, s)
		}
	})
	if len(argv) == 0 {
		r.fail(n, path, "names no program", "write [program, argument, …]")
	}
	return argv
}

func (r *reader) kubernetes(n *yaml.Node, path string) *inject.KubernetesSpec {
	o := r.object(n, path, kubernetesSchema)
	if o == nil {
		return nil
	}
	k := &inject.KubernetesSpec{}
	if f, ok := o.need("folder", "the path at which the secret is mounted"); ok {
		k.Folder = r.relative(f)
	}
	if k.Key, _ = o.need("key", "a key of the secret"); strings.ContainsAny(k.Key, "/\n") || k.Key == ".." || k.Key == "." {
		n, path, _ := o.get("key")
		r.fail(n, path, "is no key of a secret", "write the name of one file in the folder")
	}
	return k
}

func (r *reader) hashicorp(n *yaml.Node, path string) *inject.HashicorpSpec {
	o := r.object(n, path, hashicorpSchema)
	if o == nil {
		return nil
	}
	h := &inject.HashicorpSpec{Address: o.endpoint("address", true), RootsFile: o.rootsFile(), Dynamic: o.boolean("dynamic", false)}
	h.Namespace, _ = o.text("namespace", "a namespace")
	h.Mount, _ = o.need("mount", "the mount of the engine, such as secret")
	h.Path, _ = o.need("path", "the path below the mount")
	h.Field, _ = o.text("field", "a key of the secret")
	ways := 0
	for _, way := range []string{"token", "approle", "kubernetes"} {
		if o.has(way) {
			ways++
		}
	}
	if ways != 1 {
		r.fail(o.node, path, "needs exactly one way to log in", "write one of token, approle, kubernetes")
		return h
	}
	h.Token = o.inner("token", false)
	if n, at, ok := o.get("approle"); ok {
		if m := r.object(n, at, appRoleSchema); m != nil {
			h.AppRole = &inject.AppRoleSpec{SecretID: m.inner("secret_id", true)}
			h.AppRole.Mount, _ = m.text("mount", "the mount of the method")
			h.AppRole.RoleID, _ = m.need("role_id", "the role id")
		}
	}
	if n, at, ok := o.get("kubernetes"); ok {
		if m := r.object(n, at, kubeAuthSchema); m != nil {
			h.Kubernetes = &inject.KubernetesAuthSpec{}
			h.Kubernetes.Mount, _ = m.text("mount", "the mount of the method")
			h.Kubernetes.Role, _ = m.need("role", "the role")
			if f, ok := m.text("jwt_file", "a path"); ok {
				h.Kubernetes.JWTFile = r.relative(f)
			}
		}
	}
	return h
}

func (r *reader) oauth(n *yaml.Node, path string) *inject.OAuthSpec {
	o := r.object(n, path, oauthSchema)
	if o == nil {
		return nil
	}
	s := &inject.OAuthSpec{TokenURL: o.endpoint("token_url", true), ClientSecret: o.inner("client_secret", false), RefreshToken: o.inner("refresh_token", false),
		RootsFile: o.rootsFile(), InBody: o.enum("client_auth", "basic", "body") == 1}
	s.ClientID, _ = o.need("client_id", "the id of the client")
	s.Audience, _ = o.text("audience", "the audience that the server wants")
	s.Scopes = o.texts("scopes", "a scope", "[read]", func(v string) (string, string, string) {
		if strings.ContainsAny(v, " \"\\") || !printableASCII(v) {
			return "", "is no scope", "write each scope by itself" // RFC 6749 §3.3
		}
		return v, "", ""
	})
	s.Rotates = o.boolean("rotates", s.RefreshToken != nil)
	n, at, _ := o.get("refresh_token")
	switch {
	case !o.has("client_secret") && !o.has("refresh_token"):
		r.fail(o.node, join(path, "client_secret"), "is missing", "add client_secret: {file: …}, or refresh_token: for tokens of a user")
	case s.RefreshToken != nil && s.Rotates && s.RefreshToken.Kind != inject.KindFile && s.RefreshToken.Kind != inject.KindVault:
		r.fail(n, at, "cannot be replaced there when the server rotates it: the new one would be lost", "keep it in file: or vault:, or write rotates: false if the server never does")
	case s.RefreshToken == nil && s.Rotates:
		n, path, _ := o.get("rotates")
		r.fail(n, path, "goes with refresh_token: only", "remove it")
	}
	return s
}

func (r *reader) gitHubApp(n *yaml.Node, path string) *inject.GitHubAppSpec {
	o := r.object(n, path, gitHubAppSchema)
	if o == nil {
		return nil
	}
	g := &inject.GitHubAppSpec{PrivateKey: o.inner("private_key", true), API: o.endpoint("api", false), RootsFile: o.rootsFile()}
	for key, into := range map[string]*string{"app_id": &g.AppID, "installation_id": &g.InstallationID} {
		v, ok := o.need(key, "the id, in quotes")
		if ok && (len(v) > 64 || strings.ContainsAny(v, " /?#") || !printableASCII(v)) {
			n, path, _ := o.get(key)
			r.fail(n, path, "is no id", "write the id that the settings of the app show")
		}
		*into = v
	}
	g.Repositories = o.texts("repositories", "a repository's name", "[widgets]", func(v string) (string, string, string) { return v, "", "" })
	if n, at, ok := o.get("permissions"); ok {
		g.Permissions = map[string]string{}
		if d, ok := r.deref(n, at); ok && d.Kind == yaml.MappingNode {
			r.pairs(d, at, func(key string, k, v *yaml.Node) {
				level, _ := r.text(v, join(at, key), "read or write")
				g.Permissions[key] = level
			})
		} else if ok {
			r.fail(d, at, "must be a mapping, is "+kindName(d), "write {contents: read}")
		}
	}
	return g
}

// inner reads the source of a secret that this source needs.
func (o *object) inner(key string, required bool) *inject.Spec {
	n, path, ok := o.get(key)
	if !ok {
		if required {
			o.r.fail(o.node, join(o.path, key), "is missing", "add "+key+": {file: /path}")
		}
		return nil
	}
	return o.r.source(n, path, true)
}

func (o *object) rootsFile() string {
	file, ok := o.text("roots", "the path of a PEM file")
	if !ok {
		return ""
	}
	n, path, _ := o.get("roots")
	return o.r.rootsPath(n, path, file)
}

// rootsPath checks a file of trust anchors and makes it part of the configuration.
func (r *reader) rootsPath(n *yaml.Node, path, file string) string {
	r.roots(n, path, file)
	return r.relative(file)
}

// endpoint reads the URL of a store: https, or http on this machine.
func (o *object) endpoint(key string, required bool) string {
	var s string
	var ok bool
	if required {
		s, ok = o.need(key, "an https URL")
	} else {
		s, ok = o.text(key, "an https URL")
	}
	if !ok {
		return ""
	}
	n, path, _ := o.get(key)
	u, err := url.Parse(s)
	switch {
	case err != nil || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" || u.Scheme != "https" && u.Scheme != "http":
		o.r.fail(n, path, "is no URL of a service", "write https:// and a host, without user, query and fragment")
	case u.Scheme == "http" && !thisMachine(u.Hostname()):
		o.r.fail(n, path, "would send secrets in clear", "write https://; http is for this machine only")
	}
	return s
}

func thisMachine(host string) bool {
	if host == "localhost" {
		return true
	}
	ip := net.ParseIP(host)
	return ip != nil && ip.IsLoopback()
}

// bounds of the time-out and of the refresh of a source.
const (
	maxSourceTimeout = 2 * time.Minute
	maxRefresh       = 30 * day
)
