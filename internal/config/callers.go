package config

import (
	"encoding/json"
	"regexp"
	"strings"

	"gopkg.in/yaml.v3"
)

// KubernetesCaller is a service account that is recognised by its projected token.
type KubernetesCaller struct {
	JWKS           []byte // the file's content: public keys only
	Issuer         string
	Audience       string
	ServiceAccount string // namespace/name
}

var (
	kubernetesCallerSchema = schema{keys: []string{"jwks", "issuer", "audience", "service_account"}}
	listenTLSSchema        = schema{keys: []string{"certificate", "key", "client_ca"}}

	subjectForm        = regexp.MustCompile(`^[A-Za-z0-9.]+=.+$`)
	serviceAccountForm = regexp.MustCompile(`^[a-z0-9.-]+/[a-z0-9.-]+$`)
)

// otherCaller reads a caller that has no token of its own.
func (r *reader) otherCaller(o *object, c *Caller) bool {
	count := 0
	for _, key := range []string{"token_sha256", "certificate", "kubernetes"} {
		if o.has(key) {
			count++
		}
	}
	if count > 1 {
		r.fail(o.node, o.path, "is recognised in more than one way", "keep one of token_sha256, certificate and kubernetes; write a second caller for the other")
		return false
	}
	if n, path, ok := o.get("kubernetes"); ok {
		c.Kubernetes = r.kubernetesCaller(n, path)
		return c.Kubernetes != nil
	}
	s, ok := o.text("certificate", "sha256: and a digest, or a subject")
	if !ok {
		return false
	}
	n, path, _ := o.get("certificate")
	if digits, isDigest := strings.CutPrefix(strings.ToLower(s), "sha256:"); isDigest {
		sum, ok := parseHex32(digits)
		if !ok {
			r.fail(n, path, "is no digest", "write sha256: and the output of: openssl x509 -in cert.pem -outform DER | sha256sum")
			return false
		}
		c.CertificateSHA256 = &sum
		return true
	}
	if !subjectForm.MatchString(s) {
		r.fail(n, path, "is neither a digest nor a subject", "write sha256:…, or a subject such as CN=build,O=Example as openssl x509 -noout -subject -nameopt RFC2253 prints it")
		return false
	}
	c.Subject = s
	return true
}

func (r *reader) kubernetesCaller(n *yaml.Node, path string) *KubernetesCaller {
	o := r.object(n, path, kubernetesCallerSchema)
	if o == nil {
		return nil
	}
	k := &KubernetesCaller{}
	before := len(r.problems)
	k.Issuer, _ = o.need("issuer", "the issuer of the cluster's tokens")
	k.Audience, _ = o.need("audience", "the audience of the projected token")
	if s, ok := o.need("service_account", "namespace/name"); ok {
		if n, path, _ := o.get("service_account"); !serviceAccountForm.MatchString(s) {
			r.fail(n, path, "is no service account", "write namespace/name")
		}
		k.ServiceAccount = s
	}
	if file, ok := o.need("jwks", "the path of a JSON Web Key Set"); ok {
		n, path, _ := o.get("jwks")
		name := r.relative(file)
		r.read = append(r.read, name)
		data, err := r.readFile(name)
		var set struct {
			Keys []map[string]json.RawMessage `json:"keys"`
		}
		switch {
		case err != nil:
			r.fail(n, path, "cannot be read: "+err.Error(), "check the path (relative to the folder of this file) and its permissions")
		case json.Unmarshal(data, &set) != nil || len(set.Keys) == 0:
			r.fail(n, path, "the file holds no JSON Web Key Set", "write the output of: kubectl get --raw /openid/v1/jwks")
		}
		for _, key := range set.Keys {
			if key["d"] != nil || key["k"] != nil {
				r.fail(n, path, "the file holds a private key", "write the output of: kubectl get --raw /openid/v1/jwks")
				break
			}
		}
		k.JWKS = data
	}
	if len(r.problems) > before {
		return nil
	}
	return k
}

func (r *reader) listenTLS(n *yaml.Node, path string) *ListenTLS {
	o := r.object(n, path, listenTLSSchema)
	if o == nil {
		return nil
	}
	t := &ListenTLS{}
	if s, ok := o.need("certificate", "the path of a PEM file"); ok {
		t.Certificate = r.relative(s)
	}
	if s, ok := o.need("key", "the path of a PEM file"); ok {
		t.Key = r.relative(s)
	}
	if s, ok := o.text("client_ca", "the path of a PEM file"); ok {
		n, path, _ := o.get("client_ca")
		t.ClientCA = r.rootsPath(n, path, s)
	}
	return t
}

// certificateCallers refuses callers that no listener could recognise.
func (r *reader) certificateCallers(o *object, t *ListenTLS, callers []Caller) {
	if t != nil && t.ClientCA != "" {
		return
	}
	for i := range callers {
		if c := &callers[i]; c.CertificateSHA256 != nil || c.Subject != "" {
			r.fail(o.node, "listen.proxy_tls", "the caller "+quoted(c.Name)+" has a certificate that no listener asks for", "add listen: {proxy_tls: {certificate: …, key: …, client_ca: …}}")
			return
		}
	}
}
