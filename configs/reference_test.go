package configs_test

import (
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"

	"waybill/configs"
)

var update = flag.Bool("update", false, "write docs/configuration.md")

// ordered is a JSON object that keeps its order: that of the schema is that of the reference.
type ordered struct {
	keys []string
	m    map[string]json.RawMessage
}

func (o *ordered) UnmarshalJSON(data []byte) error {
	if err := json.Unmarshal(data, &o.m); err != nil {
		return err
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	if _, err := dec.Token(); err != nil {
		return err
	}
	for dec.More() {
		k, err := dec.Token()
		if err != nil {
			return err
		}
		o.keys = append(o.keys, k.(string))
		var skip json.RawMessage
		if err := dec.Decode(&skip); err != nil {
			return err
		}
	}
	return nil
}

// node is what the reference shows of a schema.
type node struct {
	Ref         string `json:"$ref"`
	Description string
	Type        any
	Enum        []any
	Const       any
	Default     any
	Minimum     *float64
	Maximum     *float64
	Properties  *ordered
	Required    []string
	Items       *node
	OneOf       []*node
	AnyOf       []*node
	Additional  json.RawMessage  `json:"additionalProperties"`
	Defs        map[string]*node `json:"$defs"`
	Patterns    map[string]*node `json:"patternProperties"`
}

type reference struct {
	defs map[string]*node
	out  strings.Builder
	todo []string // definitions that get a section
	done map[string]bool
}

func defName(ref string) string { return strings.TrimPrefix(ref, "#/$defs/") }

// kind says in words what a value looks like; definitions with keys are linked.
func (r *reference) kind(n *node) string {
	if n.Ref != "" {
		name := defName(n.Ref)
		def := r.defs[name]
		if def.keyed() {
			if !r.done[name] {
				r.done[name] = true
				r.todo = append(r.todo, name)
			}
			return "[" + name + "](#" + strings.ToLower(strings.ReplaceAll(name, ".", "")) + ")"
		}
		if len(def.OneOf)+len(def.AnyOf) > 0 || def.Items != nil || len(def.Enum) > 0 {
			return r.kind(def)
		}
		return name
	}
	if n.Const != nil {
		return fmt.Sprintf("`%v`", n.Const)
	}
	if len(n.Enum) > 0 {
		var values []string
		for _, v := range n.Enum {
			values = append(values, fmt.Sprintf("`%v`", v))
		}
		return strings.Join(values, ", ")
	}
	if alts := slices.Concat(n.OneOf, n.AnyOf); len(alts) > 0 && n.Properties == nil {
		var kinds []string
		for _, a := range alts {
			if k := r.kind(a); k != "" && !slices.Contains(kinds, k) {
				kinds = append(kinds, k)
			}
		}
		return strings.Join(kinds, " or ")
	}
	switch n.Type {
	case "array":
		if n.Items != nil {
			return "list of " + r.kind(n.Items)
		}
		return "list"
	case "object":
		for _, v := range n.Patterns {
			return "map to " + r.kind(v)
		}
		var values node
		if len(n.Additional) > 0 && json.Unmarshal(n.Additional, &values) == nil && n.Properties == nil {
			if k := r.kind(&values); k != "" {
				return "map from names to " + k
			}
		}
		return "map"
	case "integer", "number":
		switch {
		case n.Minimum != nil && n.Maximum != nil:
			return fmt.Sprintf("number %v to %v", *n.Minimum, *n.Maximum)
		case n.Minimum != nil:
			return fmt.Sprintf("number from %v", *n.Minimum)
		}
		return "number"
	case "string":
		return "text"
	case "boolean":
		return "`true`, `false`"
	}
	if list, ok := n.Type.([]any); ok {
		return strings.TrimSuffix(fmt.Sprintln(list...), "\n")
	}
	return ""
}

func (n *node) keyed() bool {
	if n.Properties != nil {
		return true
	}
	return slices.ContainsFunc(slices.Concat(n.OneOf, n.AnyOf), func(a *node) bool { return a.Properties != nil })
}

func (r *reference) table(t *testing.T, path string, n *node) {
	for _, part := range append([]*node{n}, slices.Concat(n.OneOf, n.AnyOf)...) {
		if part.Properties == nil || part != n && n.Properties != nil { // conditions on keys that are listed already
			continue
		}
		fmt.Fprintf(&r.out, "| key | value | default | |\n| --- | --- | --- | --- |\n")
		for _, key := range part.Properties.keys {
			var v node
			if err := json.Unmarshal(part.Properties.m[key], &v); err != nil {
				t.Fatalf("%s.%s: %v", path, key, err)
			}
			def := ""
			if v.Default != nil {
				b, _ := json.Marshal(v.Default)
				def = "`" + strings.Trim(string(b), `"`) + "`"
			}
			text := v.Description
			if text == "" && v.Ref != "" {
				text = r.defs[defName(v.Ref)].Description
			}
			if text == "" {
				t.Errorf("%s.%s has no description in the schema", path, key)
			}
			if slices.Contains(part.Required, key) {
				text = strings.TrimSpace("**Required.** " + text)
			}
			kind := r.kind(&v)
			if v.Properties != nil { // keys without a definition of their own
				name := strings.TrimPrefix(path+"."+key, ".")
				r.defs[name] = &v
				kind = r.kind(&node{Ref: "#/$defs/" + name})
			}
			cell := func(s string) string { return strings.ReplaceAll(s, "|", "\\|") }
			fmt.Fprintf(&r.out, "| `%s` | %s | %s | %s |\n", key, cell(kind), def, cell(text))
		}
		r.out.WriteString("\n")
	}
}

// TestReference holds docs/configuration.md against the schema.
func TestReference(t *testing.T) {
	var root node
	if err := json.Unmarshal(configs.ConfigSchema, &root); err != nil {
		t.Fatal(err)
	}
	r := &reference{defs: root.Defs, done: map[string]bool{}}
	r.out.WriteString(`# Configuration: every key

<!-- Written from configs/waybill.schema.json by "go test ./configs -update". Do not edit. -->

The file is strict: unknown keys, duplicates and wrong kinds are errors, all of them at once ("waybill check"). It is read again
when it changes and on SIGHUP; one with a mistake leaves the last good one in force. [full.yaml](../configs/full.yaml) shows every
key in use, [waybill.schema.json](../configs/waybill.schema.json) is for editors.

A *duration* is written as 500ms, 30s, 5m, 1h30m, 7d; a *size* as 512B, 64KiB, 1MiB, 2GiB; a *name* is up to 64 letters, digits, dots,
dashes and underscores.

## The file

`)
	r.table(t, "", &root)
	for len(r.todo) > 0 {
		name := r.todo[0]
		r.todo = r.todo[1:]
		def := r.defs[name]
		fmt.Fprintf(&r.out, "## %s\n\n", name)
		if def.Description != "" {
			r.out.WriteString(def.Description + "\n\n")
		}
		r.table(t, name, def)
	}
	got := strings.TrimRight(r.out.String(), "\n") + "\n"
	const path = "../docs/configuration.md"
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil { //nolint:gosec // a document
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if string(want) != got {
		t.Errorf("%s is not what the schema says; run: go test ./configs -update", path)
	}
	for name, def := range root.Defs {
		if def.keyed() && !r.done[name] {
			t.Errorf("the reference does not reach %s", name)
		}
	}
}
