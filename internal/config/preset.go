package config

import (
	"fmt"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"gopkg.in/yaml.v3"

	"waybill/configs"
)

// Preset is what is known of one API, as it ships with Waybill: routes that are used
// with "use: preset/NAME", and the facts on which they rest.
type Preset struct {
	Name     string // of the file, such as "stripe"
	Title    string
	Reviewed string // the day on which the facts were last read, YYYY-MM-DD
	// With are the values that a use has to give, or may.
	With []PresetParameter
	// Credentials are the roles of its secrets; empty: one secret without a role.
	Credentials []string
	// Placeholders are variables of client libraries that refuse to start without a key,
	// and a value of the form they demand.
	Placeholders map[string]string
	Facts        []Fact
	Parts        []string // names of its routes, in order
	Text         string   // the file as it is written
}

// PresetParameter is a value that a use of a preset gives.
type PresetParameter struct {
	Name    string `json:"name"`
	About   string `json:"about"`
	Default string `json:"default,omitempty"` // "": it must be given
	Example string `json:"example,omitempty"`
}

// Fact is one statement about an API, with where it comes from.
type Fact struct {
	About string `json:"about"` // see factWords
	// Mark says how it is known: D the vendor's documentation, S a specification, library or
	// service model of the vendor, M measured with the vendor's library, T a third party
	// that cites the vendor, U not verified. Only D, S and M carry a claim (CONTRACT I10).
	Mark   string `json:"mark"`
	Source string `json:"source"`
	Says   string `json:"says"`
}

// Carries reports whether a claim may rest on the fact.
func (f Fact) Carries() bool { return f.Mark == "D" || f.Mark == "S" || f.Mark == "M" }

// PresetUse says where the settings of a route come from: the preset, but for what was
// written in the file.
type PresetUse struct {
	Preset   string `json:"preset"`   // "preset/stripe"
	Part     string `json:"part"`     // its route, such as "v1"
	Reviewed string `json:"reviewed"` // YYYY-MM-DD
	// Written are the settings that the file gives, such as "limits.timeout". The name, the
	// credential and with: are always the file's.
	Written []string `json:"written,omitempty"`
}

var (
	presetSchema    = schema{keys: []string{"preset", "title", "reviewed", "with", "credentials", "placeholders", "facts", "routes"}}
	parameterSchema = schema{keys: []string{"about", "default", "example"}}
	factSchema      = schema{keys: []string{"about", "mark", "source", "says"}}
)

// factWords are what a fact can be about.
var factWords = []string{"auth", "key", "repeat", "refusals", "natural", "conditional", "async", "batch", "reconcile", "marker", "limits", "answers", "client"}

// claims maps a setting of a contract to what a fact has to be about that carries it.
var claims = map[string]string{
	"idempotency": "key", "repeatable": "repeat", "refused_before_execution": "refusals", "conditional": "conditional",
	"async": "async", "batch": "batch", "reconcile": "reconcile", "marker": "marker", "responses": "answers", "end_marker": "answers", "close_delimited": "answers",
}

const presetPrefix = "preset/"

// Presets returns the presets that ship with Waybill, by name. They are shared and must
// not be changed.
func Presets() []*Preset { return loadPresets() }

// FindPreset returns the preset of that name ("stripe" or "preset/stripe"), or nil.
func FindPreset(name string) *Preset {
	name = strings.TrimPrefix(name, presetPrefix)
	for _, p := range loadPresets() {
		if p.Name == name {
			return p
		}
	}
	return nil
}

var loadPresets = sync.OnceValue(func() []*Preset {
	names, err := fs.Glob(configs.Presets, "presets/*.yaml")
	if err != nil {
		panic(err) // a constant pattern
	}
	var out []*Preset
	for _, file := range names {
		data, err := fs.ReadFile(configs.Presets, file)
		if err != nil {
			panic(err) // it is part of the program
		}
		p, _, err := parsePreset(strings.TrimSuffix(path.Base(file), ".yaml"), data)
		if err != nil {
			panic(err) // TestPresets loads every one
		}
		out = append(out, p)
	}
	return out
})

// parsePreset reads a preset and its routes, which are checked where they are used. The
// error is Errors.
func parsePreset(name string, data []byte) (*Preset, []*yaml.Node, error) {
	r := &reader{file: presetPrefix + name}
	p := &Preset{Name: name, Text: string(data)}
	var parts []*yaml.Node
	if doc := r.document(data); doc != nil {
		parts = r.preset(doc, p)
	}
	if len(r.problems) > 0 {
		sortProblems(r.problems)
		return nil, nil, Errors(r.problems)
	}
	return p, parts, nil
}

func (r *reader) preset(n *yaml.Node, p *Preset) []*yaml.Node {
	o := r.object(n, "", presetSchema)
	if o == nil {
		return nil
	}
	if s, ok := o.need("preset", "the name of the file"); ok && s != p.Name {
		n, path, _ := o.get("preset")
		r.fail(n, path, "is not the name of the file", "write "+p.Name)
	}
	p.Title, _ = o.need("title", "the name of the API")
	p.Reviewed = o.date("reviewed")
	if n, path, ok := o.get("with"); ok {
		r.pairs(n, path, func(key string, _, v *yaml.Node) {
			if w := r.object(v, join(path, key), parameterSchema); w != nil {
				q := PresetParameter{Name: key}
				q.About, _ = w.need("about", "what it is")
				q.Default, _ = w.text("default", "a value")
				q.Example, _ = w.text("example", "a value")
				p.With = append(p.With, q)
			}
		})
	}
	p.Credentials = o.texts("credentials", "a role", "[api, app]", func(s string) (string, string, string) { return s, "", "" })
	if n, path, ok := o.get("placeholders"); ok {
		p.Placeholders = map[string]string{}
		r.pairs(n, path, func(key string, k, v *yaml.Node) {
			if !isEnvName(key) {
				r.fail(k, join(path, key), "is no name of a variable", "write the name that the library reads")
			}
			if s, ok := r.text(v, join(path, key), "a placeholder"); ok {
				p.Placeholders[key] = s
			}
		})
	}
	if n, path, ok := o.get("facts"); ok {
		r.items(n, path, "a list of facts", func(n *yaml.Node, path string) { p.Facts = append(p.Facts, r.fact(n, path)) })
	}
	var parts []*yaml.Node
	if n, path, ok := o.get("routes"); ok {
		r.items(n, path, "a list of routes", func(n *yaml.Node, path string) {
			if name := r.part(n, path, p); name != "" {
				p.Parts, parts = append(p.Parts, name), append(parts, n)
			}
		})
	}
	if len(parts) == 0 && len(r.problems) == 0 {
		r.fail(n, "routes", "is missing", "add a route")
	}
	return parts
}

func (r *reader) fact(n *yaml.Node, path string) (f Fact) {
	o := r.object(n, path, factSchema)
	if o == nil {
		return f
	}
	if o.has("about") {
		f.About = factWords[o.enum("about", factWords...)]
	} else {
		o.need("about", "what it is about")
	}
	marks := []string{"U", "T", "S", "M", "D"}
	f.Mark = marks[o.enum("mark", marks...)]
	f.Source, _ = o.need("source", "where it is written")
	f.Says, _ = o.need("says", "what it says")
	return f
}

// part reads the name of a route of a preset, and holds its claims against the facts.
func (r *reader) part(n *yaml.Node, path string, p *Preset) string {
	o := r.object(n, path, routeSchema)
	if o == nil {
		return ""
	}
	name, ok := o.need("name", "a name")
	if ok && (!isName(name) || slices.Contains(p.Parts, name)) {
		n, path, _ := o.get("name")
		r.fail(n, path, "is no name, or one that is taken", nameFix)
	}
	c, path, ok := o.get("contract")
	if !ok {
		return name
	}
	r.pairs(c, path, func(key string, k, _ *yaml.Node) {
		about, is := claims[key]
		if is && !slices.ContainsFunc(p.Facts, func(f Fact) bool { return f.About == about && f.Carries() }) {
			r.fail(k, join(path, key), "is a claim that no fact carries", "add a fact about "+about+" with the mark D, S or M, or remove it")
		}
	})
	return name
}

func (o *object) date(key string) string {
	n, path, ok := o.get(key)
	if !ok {
		o.r.fail(o.node, join(o.path, key), "is missing", "add "+key+": with a day, such as 2026-11-30")
		return ""
	}
	if _, err := time.Parse(time.DateOnly, n.Value); err != nil || n.Kind != yaml.ScalarNode {
		o.r.fail(n, path, "is no date", "write a day, such as 2026-11-30")
		return ""
	}
	return n.Value
}

// routeItem is one route as it is to be read.
type routeItem struct {
	node *yaml.Node
	path string
	use  *PresetUse // nil: written out in the file
}

// expand turns an entry of routes: into the routes it stands for: itself, or those of the
// preset that it uses, with what is written beside use: in their place.
func (r *reader) expand(n *yaml.Node, path string) []routeItem {
	d, ok := r.deref(n, path)
	if !ok {
		return nil
	}
	if d.Kind != yaml.MappingNode || valueOf(d, "use") == nil {
		return []routeItem{{node: n, path: path}}
	}
	before := len(r.problems)
	o := r.object(d, path, routeSchema)
	if o == nil || len(r.problems) > before {
		return nil
	}
	s, ok := o.text("use", "preset/ and a name")
	if !ok {
		return nil
	}
	u, at, _ := o.get("use")
	name, part, one := strings.Cut(strings.TrimPrefix(s, presetPrefix), "/")
	p := FindPreset(name)
	if p == nil || !strings.HasPrefix(s, presetPrefix) {
		r.fail(u, at, "there is no such preset", presetFix(name))
		return nil
	}
	if one && !slices.Contains(p.Parts, part) {
		r.fail(u, at, "the preset has no such part", "write "+presetPrefix+name+"/ and one of "+strings.Join(p.Parts, ", "))
		return nil
	}
	x := &expansion{r: r, file: presetPrefix + name, values: map[string]*yaml.Node{}}
	x.with(o, p)
	x.credentials(o, p)
	base := p.Name
	if s, ok := o.text("name", "a name"); ok {
		base = s
	}
	if len(r.problems) > before {
		return nil
	}
	_, parts, err := parsePreset(p.Name, []byte(p.Text)) // nodes of its own for each use
	if err != nil {
		panic(err) // it was read before
	}
	var out []routeItem
	for i, node := range parts {
		if one && p.Parts[i] != part {
			continue
		}
		full := base
		if len(parts) > 1 && !(one && o.has("name")) {
			full += "-" + p.Parts[i]
		}
		use := &PresetUse{Preset: presetPrefix + p.Name, Part: p.Parts[i], Reviewed: p.Reviewed}
		out = append(out, routeItem{x.merge(o, x.copy(node), full, use), path, use})
	}
	return out
}

func presetFix(name string) string {
	var names []string
	for _, p := range Presets() {
		names = append(names, p.Name)
	}
	if near := nearestName(name, names); near != "" {
		return "did you mean " + presetPrefix + near + "?"
	}
	return "write " + presetPrefix + " and a name that waybill presets lists"
}

// expansion is one use of a preset.
type expansion struct {
	r      *reader
	file   string
	values map[string]*yaml.Node // what stands for ${…}
}

var presetValue = regexp.MustCompile(`\$\{(with\.[a-z_]+|credential(?:\.[a-z_]+)?)\}`)

func (x *expansion) with(o *object, p *Preset) {
	given := map[string]*yaml.Node{}
	n, path, ok := o.get("with")
	if ok {
		d, ok := x.r.deref(n, path)
		if !ok {
			return
		}
		if d.Kind != yaml.MappingNode {
			x.r.fail(d, path, "must be a mapping, is "+kindName(d), "write {name: value}")
			return
		}
		x.r.pairs(d, path, func(key string, k, v *yaml.Node) {
			if !slices.ContainsFunc(p.With, func(q PresetParameter) bool { return q.Name == key }) {
				fix := "the preset takes no values"
				var names []string
				for _, q := range p.With {
					names = append(names, q.Name)
				}
				if len(names) > 0 {
					fix = "the preset takes " + strings.Join(names, ", ")
				}
				x.r.fail(k, join(path, key), "is no value of the preset", fix)
				return
			}
			s, ok := x.r.text(v, join(path, key), "text")
			if ok && (len(s) > 200 || !printableASCII(s) || strings.ContainsAny(s, "${}* ")) {
				x.r.fail(v, join(path, key), "is no usable value", "write printable ASCII without blanks, $, braces and *; a wildcard goes into match: {host: …} of the route")
				return
			}
			if d, derefed := x.r.deref(v, join(path, key)); ok && derefed {
				given[key] = d
			}
		})
	}
	for _, q := range p.With {
		switch {
		case given[q.Name] != nil:
			x.values["with."+q.Name] = given[q.Name]
		case q.Default != "":
			x.values["with."+q.Name] = &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: q.Default}
		case n == nil || valueOf(n, q.Name) == nil: // else it is reported
			x.r.fail(o.node, join(join(o.path, "with"), q.Name), "is missing: "+q.About, "add with: {"+q.Name+": "+q.Example+"}")
		}
	}
}

func (x *expansion) credentials(o *object, p *Preset) {
	text := func(s string) *yaml.Node { return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s} }
	n, path, written := o.get("credential")
	if len(p.Credentials) == 0 {
		x.values["credential"] = text(p.Name)
		if s, ok := o.text("credential", "the name of a credential"); ok {
			x.values["credential"] = text(s)
			x.values["credential"].Line, x.values["credential"].Column = n.Line, n.Column
		}
		return
	}
	for _, role := range p.Credentials {
		x.values["credential."+role] = text(p.Name + "-" + role)
	}
	if !written {
		return
	}
	d, ok := x.r.deref(n, path)
	if !ok {
		return
	}
	if d.Kind != yaml.MappingNode {
		x.r.fail(d, path, "the preset has more than one secret", "write {"+strings.Join(p.Credentials, ": name, ")+": name}")
		return
	}
	x.r.pairs(d, path, func(key string, k, v *yaml.Node) {
		if !slices.Contains(p.Credentials, key) {
			x.r.fail(k, join(path, key), "is no secret of the preset", "its secrets are "+strings.Join(p.Credentials, ", "))
			return
		}
		if s, ok := x.r.text(v, join(path, key), "the name of a credential"); ok {
			x.values["credential."+key] = text(s)
			x.values["credential."+key].Line, x.values["credential."+key].Column = v.Line, v.Column
		}
	})
}

// copy copies nodes of the preset, with the values of this use in their places.
func (x *expansion) copy(n *yaml.Node) *yaml.Node {
	c := *n
	if x.r.foreign == nil {
		x.r.foreign = map[*yaml.Node]string{}
	}
	x.r.foreign[&c] = x.file
	if n.Kind == yaml.ScalarNode {
		c.Value = presetValue.ReplaceAllStringFunc(n.Value, func(s string) string {
			v := x.values[s[2:len(s)-1]]
			if v == nil {
				return s // left for the checks to refuse
			}
			if v.Line > 0 { // written in the file: a problem with it is one there
				c.Line, c.Column = v.Line, v.Column
				delete(x.r.foreign, &c)
			}
			return v.Value
		})
	}
	c.Content = make([]*yaml.Node, len(n.Content))
	for i := range n.Content {
		c.Content[i] = x.copy(n.Content[i])
	}
	return &c
}

// alternatives are keys of which only one is written.
var alternatives = [][]string{{"host", "hosts"}, {"path", "paths"}, {"from", "get"}, {"header", "field"}}

// merge puts what the file writes into a route of the preset.
func (x *expansion) merge(o *object, part *yaml.Node, name string, use *PresetUse) *yaml.Node {
	at, _, ok := o.get("name")
	if !ok {
		at, _, _ = o.get("use")
	}
	out := &yaml.Node{Kind: yaml.MappingNode, Tag: "!!map", Line: o.node.Line, Column: o.node.Column}
	scalar := func(s string) *yaml.Node {
		return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Style: yaml.DoubleQuotedStyle, Value: s, Line: at.Line, Column: at.Column}
	}
	out.Content = append(out.Content, scalar("name"), scalar(name))
	own := map[string]field{}
	for key, f := range o.fields {
		// A part that refuses has nothing but a match to change.
		if !contains([]string{"use", "with", "credential", "name"}, key) && (valueOf(part, "deny") == nil || key == "match") {
			own[key] = f
		}
	}
	for i := 0; i+1 < len(part.Content); i += 2 {
		key := part.Content[i].Value
		if f, written := own[key]; !written && key != "name" {
			out.Content = append(out.Content, part.Content[i], part.Content[i+1])
		} else if written && contains([]string{"match", "contract", "upstream", "limits"}, key) {
			own[key] = field{f.key, x.mergeMapping(part.Content[i+1], f.value, key, key == "contract", use)}
		}
	}
	for _, key := range slices.Sorted(maps.Keys(own)) {
		out.Content = append(out.Content, own[key].key, own[key].value)
		if !slices.ContainsFunc(use.Written, func(s string) bool { return strings.HasPrefix(s, key+".") }) {
			use.Written = append(use.Written, key)
		}
	}
	slices.Sort(use.Written)
	return out
}

// mergeMapping adds to a mapping of the file what the preset says and the file does not.
func (x *expansion) mergeMapping(p, u *yaml.Node, path string, deep bool, use *PresetUse) *yaml.Node {
	for i := 0; u.Kind == yaml.AliasNode && u.Alias != nil && i < 10; i++ {
		u = u.Alias
	}
	if p.Kind != yaml.MappingNode || u.Kind != yaml.MappingNode {
		use.Written = append(use.Written, path)
		return u
	}
	out := *u
	out.Content = nil
	taken := map[string]bool{}
	for i := 0; i+1 < len(u.Content); i += 2 {
		key, v := u.Content[i].Value, u.Content[i+1]
		taken[key] = true
		for _, group := range alternatives {
			for _, other := range group {
				taken[other] = taken[other] || contains(group, key)
			}
		}
		if mine := valueOf(p, key); deep && mine != nil {
			v = x.mergeMapping(mine, v, path+"."+key, false, use)
		} else {
			use.Written = append(use.Written, path+"."+key)
		}
		out.Content = append(out.Content, u.Content[i], v)
	}
	for i := 0; i+1 < len(p.Content); i += 2 {
		if !taken[p.Content[i].Value] {
			out.Content = append(out.Content, p.Content[i], p.Content[i+1])
		}
	}
	return &out
}

// valueOf is a value of a mapping, or nil.
func valueOf(n *yaml.Node, key string) *yaml.Node {
	for i := 0; n.Kind == yaml.MappingNode && i+1 < len(n.Content); i += 2 {
		if n.Content[i].Kind == yaml.ScalarNode && n.Content[i].Value == key {
			return n.Content[i+1]
		}
	}
	return nil
}

// withoutUse refuses what goes with use: only.
func (r *reader) withoutUse(o *object) {
	for key, fix := range map[string]string{"with": "remove it, or write use: and a preset", "credential": "write it in an entry of inject, or write use: and a preset"} {
		if o.has(key) {
			r.fail(o.key(key), join(o.path, key), "goes with use: only", fix)
		}
	}
}

// onceEach drops the repetitions of a problem that several routes of one preset have.
func (r *reader) onceEach(before int) {
	seen := map[string]bool{}
	r.problems = append(r.problems[:before], slices.DeleteFunc(slices.Clone(r.problems[before:]), func(p Problem) bool {
		key := fmt.Sprint(p)
		dup := seen[key]
		seen[key] = true
		return dup
	})...)
}
