package routes

import (
	"errors"
	"strconv"
	"strings"
)

// ErrBadJSONPath is returned by ParseJSONPath.
var ErrBadJSONPath = errors.New("no path into JSON")

// maxJSONPath bounds the steps of a path.
const maxJSONPath = 16

// JSONPath is a parsed path into a JSON document: names, [n], and [*] for any element
// of an array. The empty path is the document.
type JSONPath []jsonStep

type jsonStep struct {
	name  string // of a member; else
	index int    // of an element, from 0; -1: any
	array bool
}

// ParseJSONPath reads a path such as data[0].status, items[*].id or ["a.b"].c. It
// returns ErrBadJSONPath.
func ParseJSONPath(s string) (JSONPath, error) {
	var out JSONPath
	for rest, first := s, true; rest != ""; first = false {
		var step jsonStep
		switch {
		case rest[0] == '[':
			end := strings.IndexByte(rest, ']')
			if end < 2 {
				return nil, ErrBadJSONPath
			}
			inner := rest[1:end]
			if inner[0] == '"' {
				// A quoted name may hold any byte but the quote.
				q := strings.IndexByte(rest[2:], '"')
				if q < 1 || len(rest) < q+4 || rest[q+3] != ']' {
					return nil, ErrBadJSONPath
				}
				step.name, rest = rest[2:q+2], rest[q+4:]
				break
			}
			step.array, rest = true, rest[end+1:]
			if inner == "*" {
				step.index = -1
				break
			}
			n, err := strconv.ParseUint(inner, 10, 31)
			if err != nil {
				return nil, ErrBadJSONPath
			}
			step.index = int(n)
		default:
			if !first {
				if rest[0] != '.' {
					return nil, ErrBadJSONPath
				}
				rest = rest[1:]
			}
			end := strings.IndexAny(rest, ".[")
			if end < 0 {
				end = len(rest)
			}
			if end == 0 || strings.ContainsAny(rest[:end], "]\"' {}$*") {
				return nil, ErrBadJSONPath
			}
			step.name, rest = rest[:end], rest[end:]
		}
		if out = append(out, step); len(out) > maxJSONPath {
			return nil, ErrBadJSONPath
		}
	}
	return out, nil
}

// One reports whether the path names one place at most.
func (p JSONPath) One() bool {
	for _, s := range p {
		if s.array && s.index < 0 {
			return false
		}
	}
	return true
}

// Find returns the values at the path of a decoded document, in order. A place that is
// not there gives none.
func (p JSONPath) Find(doc any) []any {
	at := []any{doc}
	for _, s := range p {
		var next []any
		for _, v := range at {
			switch v := v.(type) {
			case map[string]any:
				if e, ok := v[s.name]; ok && !s.array {
					next = append(next, e)
				}
			case []any:
				switch {
				case !s.array:
				case s.index < 0:
					next = append(next, v...)
				case s.index < len(v):
					next = append(next, v[s.index])
				}
			}
		}
		at = next
	}
	return at
}

// Members returns the names of a path that has names only, for one that is written
// into; false for others.
func (p JSONPath) Members() ([]string, bool) {
	out := make([]string, 0, len(p))
	for _, s := range p {
		if s.array {
			return nil, false
		}
		out = append(out, s.name)
	}
	return out, len(out) > 0
}
