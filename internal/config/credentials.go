package config

import (
	"crypto/sha256"
	"encoding/hex"
	"path/filepath"
	"strings"

	"gopkg.in/yaml.v3"

	"waybill/inject"
)

type credential struct {
	inject.Credential
	key   *yaml.Node
	place string // the variable's name or the file's path
	used  bool
}

type credentials struct {
	list []*credential
	byID map[string]*credential
	// broken are ids whose entry has a problem of its own: references to them are not
	// reported as well.
	broken map[string]bool
}

var neverHere = "secrets are never written in this file; write from: {file: /path} or from: {env: NAME}"

var credentialSchema = schema{
	keys: []string{"from", "label"},
	hints: map[string]string{
		"value": neverHere, "secret": neverHere, "token": neverHere, "password": neverHere, "key": neverHere,
		"file": "write from: {file: …}", "env": "write from: {env: …}",
	},
}

var sourceSchema = schema{
	keys: []string{"env", "file"},
	unbuilt: map[string][]string{
		"command": nil, "exec": nil, "vault": nil, "keyring": nil, "aws": nil, "gcp": nil, "azure": nil, "onepassword": nil, "oauth": nil, "github_app": nil,
	},
	hints: map[string]string{"value": neverHere, "literal": neverHere, "secret": neverHere},
}

func (r *reader) credentials(n *yaml.Node, path string) *credentials {
	cs := &credentials{byID: map[string]*credential{}, broken: map[string]bool{}}
	n, ok := r.deref(n, path)
	if !ok {
		return cs
	}
	if n.Kind != yaml.MappingNode || !r.checkTag(n, path) {
		if n.Kind != yaml.MappingNode {
			r.fail(n, path, "must be a mapping, is "+kindName(n), "write a name for each credential, such as stripe: {from: {file: /run/secrets/stripe}}")
		}
		return cs
	}
	r.pairs(n, path, func(id string, k, v *yaml.Node) {
		at := join(path, id)
		if !isName(id) {
			r.fail(k, at, "is no usable name", nameFix)
			cs.broken[id] = true
			return
		}
		before := len(r.problems)
		c := r.credential(id, v, at)
		if c == nil || len(r.problems) > before {
			cs.broken[id] = true
			return
		}
		c.key = k
		cs.list = append(cs.list, c)
		cs.byID[id] = c
	})
	return cs
}

func (r *reader) credential(id string, n *yaml.Node, path string) *credential {
	if d, ok := r.deref(n, path); !ok {
		return nil
	} else if d.Kind == yaml.ScalarNode {
		r.fail(d, path, "must be a mapping with from:", neverHere)
		return nil
	}
	o := r.object(n, path, credentialSchema)
	if o == nil {
		return nil
	}
	c := &credential{Credential: inject.Credential{ID: id}}
	if label, ok := o.text("label", "a version label in quotes"); ok {
		if n, path, _ := o.get("label"); len(label) > 128 || !printableASCII(label) || strings.Contains(label, ",") {
			r.fail(n, path, "is no usable label", "use at most 128 printable ASCII characters without a comma; it is shown and recorded")
		} else {
			c.Label = label
		}
	}
	from, fromPath, ok := o.get("from")
	if !ok {
		r.fail(o.node, join(path, "from"), "is missing", "add from: {file: /path} or from: {env: NAME}")
		return nil
	}
	if d, ok := r.deref(from, fromPath); ok && d.Kind == yaml.ScalarNode {
		r.fail(d, fromPath, "must be a mapping", neverHere)
		return nil
	}
	before := len(r.problems)
	src := r.object(from, fromPath, sourceSchema)
	if src == nil || len(r.problems) > before {
		return nil
	}
	if len(src.fields) != 1 {
		r.fail(src.node, fromPath, "must name exactly one source", "write one of env, file")
		return nil
	}
	if name, ok := src.text("env", "the name of an environment variable"); ok {
		if !isEnvName(name) {
			n, path, _ := src.get("env")
			r.fail(n, path, "is no name of an environment variable", "write the name only, without $; letters, digits and _")
			return nil
		}
		c.place, c.Source = name, inject.EnvSource(name)
	}
	if file, ok := src.text("file", "a path"); ok {
		if strings.ContainsAny(file, "\n\r") {
			n, path, _ := src.get("file")
			r.fail(n, path, "is no path", "write the path of a file; its content stays there")
			return nil
		}
		c.place = r.relative(file)
		c.Source = inject.FileSource(c.place)
	}
	if c.Source == nil {
		return nil
	}
	return c
}

// relative resolves a file name against the folder of the configuration file.
func (r *reader) relative(file string) string {
	if filepath.IsAbs(file) {
		return filepath.Clean(file)
	}
	return filepath.Join(filepath.Dir(r.file), file)
}

const nameFix = "use at most 64 letters, digits, dots, hyphens and underscores, beginning with a letter or digit"

func isName(s string) bool {
	for i := 0; i < len(s); i++ {
		c := s[i]
		word := 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9'
		if !word && (i == 0 || c != '.' && c != '-' && c != '_') {
			return false
		}
	}
	return s != "" && len(s) <= 64
}

func isEnvName(s string) bool {
	for i := 0; i < len(s); i++ {
		c := s[i]
		if !('a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || c == '_' || i > 0 && '0' <= c && c <= '9') {
			return false
		}
	}
	return s != "" && len(s) <= 256
}

func printableASCII(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] < ' ' || s[i] > '~' {
			return false
		}
	}
	return true
}

var emptySHA256 = sha256.Sum256(nil)

func parseHex32(s string) (sum [32]byte, ok bool) {
	b, err := hex.DecodeString(s)
	if err != nil || len(b) != len(sum) {
		return sum, false
	}
	copy(sum[:], b)
	return sum, true
}
