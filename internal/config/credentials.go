package config

import (
	"crypto/sha256"
	"encoding/hex"
	"path/filepath"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"waybill/inject"
)

type credential struct {
	inject.Credential
	key  *yaml.Node
	used bool
	uses int
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
	keys: []string{"from", "label", "timeout", "refresh"},
	hints: map[string]string{
		"value": neverHere, "secret": neverHere, "token": neverHere, "password": neverHere, "key": neverHere,
		"file": "write from: {file: …}", "env": "write from: {env: …}",
	},
}

var sourceSchema = schema{
	keys:    []string{"env", "file", "command", "vault", "kubernetes", "keyring", "hashicorp_vault", "aws", "onepassword", "oauth", "github_app"},
	unbuilt: map[string][]string{"gcp": nil, "azure": nil},
	hints: map[string]string{
		"value": neverHere, "literal": neverHere, "secret": neverHere, "exec": "write command: [program, argument, …]",
		"hashicorp": "write hashicorp_vault:", "openbao": "write hashicorp_vault:; OpenBao speaks the same protocol", "aws_secrets_manager": "write aws:", "1password": "write onepassword:",
	},
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
	spec := r.source(from, fromPath, false)
	timeout, refresh := o.duration("timeout", time.Millisecond, maxSourceTimeout), o.duration("refresh", time.Second, maxRefresh)
	if spec == nil {
		return nil
	}
	spec.Timeout, spec.Refresh = timeout, refresh
	switch spec.Kind {
	case inject.KindEnv, inject.KindFile:
		for _, key := range []string{"timeout", "refresh"} {
			if n, path, ok := o.get(key); ok {
				r.fail(n, path, "has no meaning for "+spec.Kind+": it is looked at for every request", "remove it")
			}
		}
		if spec.Kind == inject.KindEnv {
			c.Source = inject.EnvSource(spec.Env)
		} else {
			c.Source = inject.FileSource(spec.File)
		}
	}
	c.Spec = spec
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
