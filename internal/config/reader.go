package config

import (
	"fmt"
	"strconv"
	"strings"

	"gopkg.in/yaml.v3"
)

const (
	// maxFileBytes bounds a configuration file: far above what people write.
	maxFileBytes = 4 << 20
	// maxNodes bounds the nodes that are looked at, so that aliases of aliases cost no
	// more than a large file does.
	maxNodes = 200_000
	// maxItems bounds one list of values: they are walked when a request is matched.
	maxItems = 4096
	// maxProblems bounds a report.
	maxProblems = 100
)

// reader walks one document and collects problems.
type reader struct {
	file     string
	problems []Problem
	warnings []Problem
	nodes    int
	full     bool
	readFile func(path string) ([]byte, error)
	read     []string              // other files the configuration depends on, as opened
	foreign  map[*yaml.Node]string // nodes that stand in a preset, with its name
	uses     map[string]PresetUse  // by the name of the route
}

func (r *reader) fail(n *yaml.Node, path, what, fix string) {
	if r.full {
		return
	}
	if len(r.problems) == maxProblems {
		r.full = true
		what, fix = "there are more problems than are shown", "correct these first"
	}
	r.problems = append(r.problems, r.problem(n, path, what, fix))
}

func (r *reader) warn(n *yaml.Node, path, what, fix string) {
	if len(r.warnings) < maxProblems {
		r.warnings = append(r.warnings, r.problem(n, path, what, fix))
	}
}

func (r *reader) problem(n *yaml.Node, path, what, fix string) Problem {
	if path == "" {
		path = "document"
	}
	p := Problem{File: r.file, Line: 1, Column: 1, Path: path, What: what, Fix: fix}
	if f := r.foreign[n]; f != "" {
		p.File = f
	}
	if n != nil && n.Line > 0 {
		p.Line, p.Column = n.Line, max(n.Column, 1)
	}
	return p
}

// deref follows aliases and counts.
func (r *reader) deref(n *yaml.Node, path string) (*yaml.Node, bool) {
	for i := 0; n.Kind == yaml.AliasNode; i++ {
		if i > 10 || n.Alias == nil {
			r.fail(n, path, "is an alias of an alias", "write the value out")
			return nil, false
		}
		n = n.Alias
	}
	if r.nodes++; r.nodes > maxNodes {
		r.fail(n, path, "the document has too many values", "use fewer aliases, or fewer routes")
		r.full = true
		return nil, false
	}
	return n, true
}

func kindName(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a mapping"
	case yaml.SequenceNode:
		return "a list"
	case yaml.ScalarNode:
		switch n.ShortTag() {
		case "!!null":
			return "empty"
		case "!!bool":
			return "a boolean"
		case "!!int":
			return "a number"
		case "!!float":
			return "a number with a fraction"
		case "!!timestamp":
			return "a date"
		case "!!str":
			return "text"
		}
		return "a tagged value"
	case yaml.DocumentNode, yaml.AliasNode:
	}
	return "something else"
}

// object is one mapping whose keys were checked.
type object struct {
	r      *reader
	node   *yaml.Node
	path   string
	fields map[string]field
}

type field struct{ key, value *yaml.Node }

// schema lists the keys of one kind of mapping.
type schema struct {
	keys []string
	// unbuilt are keys of the documented surface that this version does not have, with
	// the values that may be written all the same, because they say what happens anyway.
	unbuilt map[string][]string
	// hints answer keys that people write although they do not exist.
	hints map[string]string
}

// object reads a mapping. It returns nil when n is none. Unknown and duplicate keys
// are reported here.
func (r *reader) object(n *yaml.Node, path string, s schema) *object {
	n, ok := r.deref(n, path)
	if !ok {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		r.fail(n, path, "must be a mapping, is "+kindName(n), "write keys and values, such as "+s.keys[0]+": …")
		return nil
	}
	r.checkTag(n, path)
	o := &object{r: r, node: n, path: path, fields: map[string]field{}}
	r.pairs(n, path, func(key string, k, v *yaml.Node) {
		at := join(path, key)
		_, unbuilt := s.unbuilt[key]
		switch {
		case unbuilt:
			r.checkUnbuilt(v, at, s.unbuilt[key])
		case !contains(s.keys, key):
			r.unknownKey(k, path, key, s)
		default:
			o.fields[key] = field{k, v}
		}
	})
	return o
}

// pairs calls f for each entry of a mapping in file order, once for each key.
func (r *reader) pairs(n *yaml.Node, path string, f func(key string, k, v *yaml.Node)) {
	seen := map[string]*yaml.Node{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		if k.Kind != yaml.ScalarNode || k.Style&yaml.TaggedStyle != 0 {
			r.fail(k, path, "a key must be plain text", "remove the alias, tag or collection")
			continue
		}
		if k.ShortTag() == "!!merge" {
			r.fail(k, path, "merge keys are not supported", "write the values out")
			continue
		}
		if k.Style == 0 && yaml11Bool(k.Value) {
			r.fail(k, join(path, k.Value), "an unquoted "+k.Value+" is a boolean to many YAML readers", "put it in quotes")
			continue
		}
		if first := seen[k.Value]; first != nil {
			r.fail(k, join(path, k.Value), fmt.Sprintf("the key is written twice, first in line %d", first.Line), "keep one of them")
			continue
		}
		seen[k.Value] = k
		if r.nodes++; r.nodes > maxNodes {
			r.fail(k, path, "the document has too many values", "use fewer aliases, or fewer routes")
			r.full = true
			return
		}
		f(k.Value, k, v)
	}
}

func (r *reader) unknownKey(k *yaml.Node, path, key string, s schema) {
	what := "unknown key"
	if h := s.hints[key]; h != "" {
		r.fail(k, join(path, key), what, h)
		return
	}
	all := append([]string(nil), s.keys...)
	for u := range s.unbuilt {
		all = append(all, u)
	}
	if n := nearestName(key, all); n != "" {
		r.fail(k, join(path, key), what, "did you mean "+n+"?")
		return
	}
	if home := homeOf(key); home != "" {
		r.fail(k, join(path, key), what+" here", "it belongs under "+home)
		return
	}
	r.fail(k, join(path, key), what, "remove it; the keys here are "+strings.Join(s.keys, ", "))
}

// checkUnbuilt takes a documented setting that this version does not have: its
// default may be written, anything else is refused rather than ignored.
func (r *reader) checkUnbuilt(v *yaml.Node, path string, allowed []string) {
	n, ok := r.deref(v, path)
	if !ok {
		return
	}
	if n.Kind == yaml.ScalarNode && contains(allowed, n.Value) && n.Style&yaml.TaggedStyle == 0 {
		return
	}
	if n.Kind == yaml.SequenceNode && len(n.Content) == 0 && contains(allowed, "[]") {
		return
	}
	fix := "remove the key"
	if len(allowed) > 0 {
		fix += ", or write " + path[strings.LastIndexByte(path, '.')+1:] + ": " + strings.Join(allowed, " or ")
	}
	r.fail(v, path, "is not available in this version", fix)
}

// checkTag refuses explicit tags such as !!binary or !include.
func (r *reader) checkTag(n *yaml.Node, path string) bool {
	if n.Style&yaml.TaggedStyle != 0 {
		r.fail(n, path, "has a tag", "remove it; tags have no meaning here")
		return false
	}
	return true
}

func join(path, key string) string {
	key = shownKey(key)
	if path == "" {
		return key
	}
	return path + "." + key
}

// shownKey keeps a key readable in a path, whatever it is.
func shownKey(key string) string {
	plain := key != "" && len(key) <= 64
	for i := 0; i < len(key) && plain; i++ {
		c := key[i]
		plain = 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || '0' <= c && c <= '9' || strings.IndexByte("_-.:", c) >= 0
	}
	if plain {
		return key
	}
	if len(key) > 64 {
		key = key[:64] + "…"
	}
	return strconv.QuoteToASCII(key)
}

func contains(list []string, s string) bool {
	for _, v := range list {
		if v == s {
			return true
		}
	}
	return false
}

// get returns a field that is present.
func (o *object) get(key string) (*yaml.Node, string, bool) {
	f, ok := o.fields[key]
	return f.value, join(o.path, key), ok
}

// has reports whether the key is written.
func (o *object) has(key string) bool {
	_, ok := o.fields[key]
	return ok
}

// key returns the node of a written key, for problems about its being there.
func (o *object) key(key string) *yaml.Node { return o.fields[key].key }

// text reads a string. what names it in messages ("a host name").
func (r *reader) text(n *yaml.Node, path, what string) (string, bool) {
	return r.textOr(n, path, what, "put it in quotes")
}

// textOr is text with another advice for a number, a date and the like.
func (r *reader) textOr(n *yaml.Node, path, what, fix string) (string, bool) {
	n, ok := r.deref(n, path)
	if !ok {
		return "", false
	}
	if n.Kind != yaml.ScalarNode {
		r.fail(n, path, "must be "+what+", is "+kindName(n), "write one value")
		return "", false
	}
	if !r.checkTag(n, path) {
		return "", false
	}
	plain := n.Style&(yaml.DoubleQuotedStyle|yaml.SingleQuotedStyle|yaml.LiteralStyle|yaml.FoldedStyle) == 0
	switch tag := n.ShortTag(); {
	case tag == "!!null":
		r.fail(n, path, "has no value", "give "+what+", or remove the key")
	case tag != "!!str":
		r.fail(n, path, "must be "+what+", is "+kindName(n), fix)
	case plain && yaml11Bool(n.Value):
		// YAML 1.1 readers take it for a boolean, this one for text: nobody should have to
		// know which one reads the file.
		r.fail(n, path, "must be "+what+"; unquoted "+n.Value+" is a boolean to many YAML readers", "put it in quotes")
	case n.Value == "":
		r.fail(n, path, "is empty", "give "+what+", or remove the key")
	default:
		return n.Value, true
	}
	return "", false
}

func yaml11Bool(s string) bool {
	switch strings.ToLower(s) {
	case "y", "n", "yes", "no", "on", "off", "true", "false":
		return true
	}
	return false
}

func (o *object) text(key, what string) (string, bool) {
	n, path, ok := o.get(key)
	if !ok {
		return "", false
	}
	return o.r.text(n, path, what)
}

// need is text for a key that must be there.
func (o *object) need(key, what string) (string, bool) {
	if !o.has(key) {
		o.r.fail(o.node, join(o.path, key), "is missing", "add "+key+": with "+what)
		return "", false
	}
	return o.text(key, what)
}

func (o *object) boolean(key string, def bool) bool {
	n, path, ok := o.get(key)
	if !ok {
		return def
	}
	n, ok = o.r.deref(n, path)
	if !ok {
		return def
	}
	if n.Kind == yaml.ScalarNode && o.r.checkTag(n, path) && n.ShortTag() == "!!bool" && (n.Value == "true" || n.Value == "false") {
		return n.Value == "true"
	}
	if n.Kind == yaml.ScalarNode && n.Style&yaml.TaggedStyle != 0 {
		return def
	}
	o.r.fail(n, path, "must be true or false, is "+kindName(n), "write true or false, small and without quotes")
	return def
}

// enum reads one of a closed list of words and returns its index, or 0.
func (o *object) enum(key string, words ...string) int {
	n, path, ok := o.get(key)
	if !ok {
		return 0
	}
	s, ok := o.r.text(n, path, "one of "+strings.Join(words, ", "))
	if !ok {
		return 0
	}
	for i, w := range words {
		if s == w {
			return i
		}
	}
	fix := "write one of " + strings.Join(words, ", ")
	if near := nearestName(s, words); near != "" {
		fix = "did you mean " + near + "?"
	}
	o.r.fail(n, path, "is none of the known values", fix)
	return 0
}

// integer reads a plain decimal number.
func (r *reader) integer(n *yaml.Node, path string, low, high int) (int, bool) {
	n, ok := r.deref(n, path)
	if !ok {
		return 0, false
	}
	fix := fmt.Sprintf("write a whole number from %d to %d, without quotes", low, high)
	if n.Kind != yaml.ScalarNode || n.ShortTag() != "!!int" {
		r.fail(n, path, "must be a whole number, is "+kindName(n), fix)
		return 0, false
	}
	if !r.checkTag(n, path) {
		return 0, false
	}
	v, err := strconv.Atoi(n.Value)
	if err != nil || strconv.Itoa(v) != n.Value { // 0x1F, 0o17, 1_000, +1, 007
		r.fail(n, path, "is not a plain decimal number", fix)
		return 0, false
	}
	if v < low || v > high {
		r.fail(n, path, "is out of range", fix)
		return 0, false
	}
	return v, true
}

// items walks a list that must not be empty.
func (r *reader) items(n *yaml.Node, path, example string, f func(n *yaml.Node, path string)) bool {
	n, ok := r.deref(n, path)
	if !ok {
		return false
	}
	if n.Kind != yaml.SequenceNode {
		r.fail(n, path, "must be a list, is "+kindName(n), "write "+example)
		return false
	}
	if !r.checkTag(n, path) {
		return false
	}
	for i, item := range n.Content {
		if r.full {
			return false
		}
		f(item, fmt.Sprintf("%s[%d]", path, i))
	}
	return true
}

// texts reads a list of distinct strings. Each is passed through check, which
// returns its canonical form and, if it is not acceptable, what is wrong and what to
// do about it.
func (o *object) texts(key, what, example string, check func(string) (canonical, wrong, fix string)) []string {
	n, path, ok := o.get(key)
	if !ok {
		return nil
	}
	var out []string
	seen := map[string]bool{}
	count := 0
	listed := o.r.items(n, path, example, func(n *yaml.Node, path string) {
		if count++; o.tooMany(n, path, count) {
			return
		}
		s, ok := o.r.text(n, path, what)
		if !ok {
			return
		}
		c, wrong, fix := check(s)
		switch {
		case wrong != "":
			o.r.fail(n, path, wrong, fix)
		case seen[c]:
			o.r.fail(n, path, "is listed twice", "remove one of them")
		default:
			seen[c] = true
			out = append(out, c)
		}
	})
	if listed && count == 0 {
		o.r.fail(n, path, "is an empty list", "name at least one, or remove the key (without it there is no restriction)")
	}
	return out
}

// tooMany reports the first item beyond maxItems, and says so for the later ones.
func (o *object) tooMany(n *yaml.Node, path string, count int) bool {
	if count == maxItems+1 {
		o.r.fail(n, path, fmt.Sprintf("the list has more than %d entries", maxItems), "use a wildcard, or several routes")
	}
	return count > maxItems
}

func (o *object) integers(key, example string, low, high int) []int {
	n, path, ok := o.get(key)
	if !ok {
		return nil
	}
	var out []int
	seen := map[int]bool{}
	count := 0
	listed := o.r.items(n, path, example, func(n *yaml.Node, path string) {
		if count++; o.tooMany(n, path, count) {
			return
		}
		v, ok := o.r.integer(n, path, low, high)
		switch {
		case !ok:
		case seen[v]:
			o.r.fail(n, path, "is listed twice", "remove one of them")
		default:
			seen[v] = true
			out = append(out, v)
		}
	})
	if listed && count == 0 {
		o.r.fail(n, path, "is an empty list", "name at least one, or remove the key")
	}
	return out
}

// quoted shows a value of the file in a message. It is never used where a secret
// could stand.
func quoted(s string) string {
	if len(s) > 60 {
		s = s[:60] + "…"
	}
	return strconv.QuoteToASCII(s)
}
