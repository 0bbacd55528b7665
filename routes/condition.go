package routes

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"slices"
)

// Condition is a test of a complete answer: its status, and values of its JSON body.
// All that is written must hold.
type Condition struct {
	Status  []int      `json:",omitempty"` // empty: any 2xx
	JSON    []JSONTest `json:",omitempty"`
	Present []string   `json:",omitempty"` // paths where something other than null stands
	Empty   []string   `json:",omitempty"` // paths of an empty array or object; nothing there at all is not enough
}

// JSONTest holds when one of the values at Path, as text, is one of Equals.
type JSONTest struct {
	Path   string
	Equals []string
}

// Document is a decoded JSON body.
type Document struct {
	Value any
	OK    bool // false: the body is no JSON document, and no test of it holds
}

// ParseDocument decodes one JSON document; whatever else stands behind it makes it none.
func ParseDocument(body []byte) Document {
	dec := json.NewDecoder(bytes.NewReader(body))
	dec.UseNumber()
	var v any
	if dec.Decode(&v) != nil {
		return Document{}
	}
	if _, err := dec.Token(); !errors.Is(err, io.EOF) {
		return Document{}
	}
	return Document{Value: v, OK: true}
}

// Holds reports whether the condition holds for a complete answer.
func (c *Condition) Holds(status int, doc Document) bool {
	if len(c.Status) == 0 && status/100 != 2 || len(c.Status) > 0 && !slices.Contains(c.Status, status) {
		return false
	}
	return c.HoldsFor(doc)
}

// HoldsFor tests the values only.
func (c *Condition) HoldsFor(doc Document) bool {
	if len(c.JSON)+len(c.Present)+len(c.Empty) > 0 && !doc.OK {
		return false
	}
	for _, t := range c.JSON {
		if !slices.ContainsFunc(find(doc, t.Path), func(v any) bool {
			text, ok := ScalarText(v)
			return ok && slices.Contains(t.Equals, text)
		}) {
			return false
		}
	}
	for _, p := range c.Present {
		if !slices.ContainsFunc(find(doc, p), func(v any) bool { return v != nil }) {
			return false
		}
	}
	for _, p := range c.Empty {
		if !slices.ContainsFunc(find(doc, p), func(v any) bool {
			switch v := v.(type) {
			case []any:
				return len(v) == 0
			case map[string]any:
				return len(v) == 0
			}
			return false
		}) {
			return false
		}
	}
	return true
}

func find(doc Document, path string) []any {
	p, err := ParseJSONPath(path)
	if err != nil {
		return nil
	}
	return p.Find(doc.Value)
}

// ScalarText is a string, a number as it was written, true, false or null as text;
// false for arrays and objects.
func ScalarText(v any) (string, bool) {
	switch v := v.(type) {
	case string:
		return v, true
	case json.Number:
		return v.String(), true
	case bool:
		if v {
			return "true", true
		}
		return "false", true
	case nil:
		return "null", true
	}
	return "", false
}

// AnyHolds reports whether one of the conditions holds.
func AnyHolds(list []Condition, status int, doc Document) bool {
	return slices.ContainsFunc(list, func(c Condition) bool { return c.Holds(status, doc) })
}

// tellsNothing are statuses of an answer that says nothing about another operation:
// the query itself was not answered.
var tellsNothing = []int{401, 403, 407, 408, 421, 425, 429, 431}

// TellsNothing reports whether a status of a query's answer is about the query alone.
func TellsNothing(status int) bool { return status >= 500 || slices.Contains(tellsNothing, status) }

func (c *Condition) check() error {
	for _, s := range c.Status {
		if s < 200 || s > 499 || TellsNothing(s) {
			return errors.New("a condition names a status that tells nothing")
		}
	}
	paths := append(slices.Clone(c.Present), c.Empty...)
	for _, t := range c.JSON {
		if len(t.Equals) == 0 {
			return errors.New("a condition compares with nothing")
		}
		paths = append(paths, t.Path)
	}
	for _, p := range paths {
		if _, err := ParseJSONPath(p); err != nil {
			return err
		}
	}
	return nil
}

func checkConditions(lists ...[]Condition) error {
	for _, l := range lists {
		for i := range l {
			if err := l[i].check(); err != nil {
				return err
			}
		}
	}
	return nil
}

func cloneConditions(in []Condition) []Condition {
	out := cloneSlice(in)
	for i := range out {
		c := &out[i]
		c.Status, c.Present, c.Empty, c.JSON = cloneSlice(c.Status), cloneSlice(c.Present), cloneSlice(c.Empty), cloneSlice(c.JSON)
		for k := range c.JSON {
			c.JSON[k].Equals = cloneSlice(c.JSON[k].Equals)
		}
	}
	return out
}
