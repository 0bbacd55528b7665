package routes

import (
	"errors"
	"net/textproto"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// ErrBadValueTemplate is wrapped by the errors of ParseValueTemplate.
var ErrBadValueTemplate = errors.New("no template of a query")

// ValueTemplate is the path and query of a reconcile query or status resource, with
// places for recorded values: "/v1/orders/${request.json.order_id}".
type ValueTemplate struct {
	parts []templatePart
}

type templatePart struct {
	text  string
	value *Value // nil: text
	query bool   // the value stands behind the "?"
}

// Value names one recorded value (CONTRACT K6).
type Value struct {
	From string // "action", "key", "marker", "request.segment", "request.query", "request.header", "request.json", "request.form", "response.header", "response.json"
	Name string // of the field, or a path
}

// String is the name as it is written between "${" and "}".
func (v Value) String() string {
	if v.Name == "" {
		return v.From
	}
	return v.From + "." + v.Name
}

// OfRequest reports whether the value has to be kept before dispatch.
func (v Value) OfRequest() bool { return strings.HasPrefix(v.From, "request.") || v.From == "key" }

var (
	bareValues  = []string{"action", "key", "marker"}
	namedValues = []string{"request.segment", "request.query", "request.header", "request.json", "request.form", "response.header", "response.json"}
	// secretFields never become part of a URL.
	secretFields = []string{"Authorization", "Cookie", "Proxy-Authorization", "X-Api-Key", "Api-Key", "X-Goog-Api-Key", "Set-Cookie"}
)

// ParseValue reads a name such as request.json.id. It wraps ErrBadValueTemplate.
func ParseValue(s string) (Value, error) {
	if slices.Contains(bareValues, s) {
		return Value{From: s}, nil
	}
	for _, from := range namedValues {
		name, ok := strings.CutPrefix(s, from+".")
		if !ok || name == "" || len(name) > 256 {
			continue
		}
		switch {
		case strings.HasSuffix(from, ".json"):
			p, err := ParseJSONPath(name)
			if err != nil || !p.One() {
				return Value{}, errors.Join(ErrBadValueTemplate, err)
			}
		case strings.HasSuffix(from, ".header"):
			name = textproto.CanonicalMIMEHeaderKey(name)
			if slices.Contains(secretFields, name) || !printable(name) || strings.ContainsAny(name, " :/") {
				return Value{}, ErrBadValueTemplate
			}
		case from == "request.segment":
			if n, err := strconv.ParseUint(name, 10, 8); err != nil || n < 1 {
				return Value{}, ErrBadValueTemplate
			}
		}
		return Value{From: from, Name: name}, nil
	}
	return Value{}, ErrBadValueTemplate
}

// ParseValueTemplate reads an origin-form target ("/path?query") with ${…} places. It
// wraps ErrBadValueTemplate.
func ParseValueTemplate(s string) (*ValueTemplate, error) {
	if !strings.HasPrefix(s, "/") || strings.HasPrefix(s, "//") || strings.ContainsAny(s, "#\\ ") || !printable(s) || len(s) > 4096 {
		return nil, ErrBadValueTemplate
	}
	t := &ValueTemplate{}
	inQuery := false
	text := func(s string) {
		if s != "" {
			t.parts = append(t.parts, templatePart{text: s})
			inQuery = inQuery || strings.Contains(s, "?")
		}
	}
	for s != "" {
		before, rest, found := strings.Cut(s, "${")
		text(before)
		if !found {
			break
		}
		name, after, closed := strings.Cut(rest, "}")
		if !closed {
			return nil, ErrBadValueTemplate
		}
		v, err := ParseValue(name)
		if err != nil {
			return nil, err
		}
		t.parts = append(t.parts, templatePart{value: &v, query: inQuery})
		s = after
	}
	return t, nil
}

// Values returns the values that the template names, each once.
func (t *ValueTemplate) Values() []Value {
	var out []Value
	for _, p := range t.parts {
		if p.value != nil && !slices.Contains(out, *p.value) {
			out = append(out, *p.value)
		}
	}
	return out
}

// Render fills the template. Each value is percent-encoded for its place, so that it
// stays one segment of the path or one value of the query. missing is the first value
// that get does not have, or has empty.
func (t *ValueTemplate) Render(get func(Value) (string, bool)) (path, query string, hasQuery bool, missing *Value) {
	var b strings.Builder
	for _, p := range t.parts {
		if p.value == nil {
			b.WriteString(p.text)
			continue
		}
		v, ok := get(*p.value)
		if !ok || v == "" || !p.query && (v == "." || v == "..") {
			return "", "", false, p.value
		}
		if p.query {
			b.WriteString(strings.ReplaceAll(url.QueryEscape(v), "+", "%20"))
		} else {
			b.WriteString(url.PathEscape(v))
		}
	}
	path, query, hasQuery = strings.Cut(b.String(), "?")
	return path, query, hasQuery, nil
}
