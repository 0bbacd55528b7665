package config

import (
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"

	"gopkg.in/yaml.v3"
)

// openValues are keys whose values say how a route behaves and cannot be secret.
var openValues = []string{
	"version", "default", "delivery", "durability", "redirects", "approval", "leak", "caller_value", "dialect", "upgrade", "scheme",
	"allow_private", "allow_plaintext", "repeatable", "deny", "on_repeat", "scope", "retention", "max_size", "methods", "trace_context",
	"request", "buffer", "response", "timeout", "idle", "hold", "duplicates", "tries",
}

// openValue is the form such a value has; anything else under these keys is hidden, too.
var openValue = regexp.MustCompile(`^([A-Z]{3,7}|[a-z_]{1,16}|[0-9]{1,6}(ms|s|m|h|d|B|KiB|MiB|GiB)?)$`)

// Names returns every text of a configuration file that Outline hides: what somebody
// chose – names, hosts, paths, values – and no word of this program. Those of a file that
// cannot be read, or is no YAML, are none.
func Names(path string, known func(key string) bool) []string {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil
	}
	var doc yaml.Node
	if yaml.Unmarshal(data, &doc) != nil {
		return nil
	}
	o := outliner{known: known, names: map[string]string{}}
	for _, n := range doc.Content {
		o.node(n, "")
	}
	return o.hidden
}

// Outline returns the shape of a configuration file for a report to others: keys that
// known accepts and the values of openValues; everything else, names of routes, hosts,
// credentials and files included, is replaced (CONTRACT C2). A file that is no YAML
// gives an error that quotes nothing of it.
func Outline(path string, known func(key string) bool) (string, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return "", err
	}
	var doc yaml.Node
	if err := yaml.Unmarshal(data, &doc); err != nil {
		return "", fmt.Errorf("the configuration is not YAML")
	}
	o := outliner{known: known, names: map[string]string{}}
	for _, n := range doc.Content {
		o.node(n, "")
	}
	var b strings.Builder
	enc := yaml.NewEncoder(&b)
	enc.SetIndent(2)
	if err := enc.Encode(&doc); err != nil {
		return "", fmt.Errorf("the configuration cannot be written as an outline")
	}
	return b.String(), nil
}

type outliner struct {
	known func(string) bool
	names map[string]string // the same name gets the same stand-in
	// hidden are the texts that were replaced.
	hidden []string
}

// node hides what is in n; key is the one under which it stands.
func (o *outliner) node(n *yaml.Node, key string) {
	n.HeadComment, n.LineComment, n.FootComment, n.Anchor = "", "", "", ""
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i+1 < len(n.Content); i += 2 {
			k, v := n.Content[i], n.Content[i+1]
			o.node(v, k.Value)
			k.HeadComment, k.LineComment, k.FootComment, k.Anchor = "", "", "", ""
			if k.Kind != yaml.ScalarNode || !o.known(k.Value) {
				o.hide(k)
			}
		}
	case yaml.SequenceNode:
		for _, c := range n.Content {
			o.node(c, key)
		}
	case yaml.ScalarNode:
		if !slices.Contains(openValues, key) || !openValue.MatchString(n.Value) {
			o.hide(n)
		}
	default: // an alias would lead to the text of its anchor
		o.hide(n)
	}
}

// hide replaces a node by a stand-in.
func (o *outliner) hide(n *yaml.Node) {
	id := fmt.Sprintf("%d %s", n.Kind, n.Value)
	name, ok := o.names[id]
	if !ok {
		name = fmt.Sprintf("hidden%d", len(o.names)+1)
		o.names[id] = name
		if n.Kind == yaml.ScalarNode {
			o.hidden = append(o.hidden, n.Value)
		}
	}
	*n = yaml.Node{Kind: yaml.ScalarNode, Value: name}
}
