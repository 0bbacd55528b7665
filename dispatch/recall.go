package dispatch

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"

	"waybill/internal/control"
	"waybill/outcome"
	"waybill/routes"
)

// Internal is a request that Waybill makes by itself: the query about an action, or a
// look at a job. It goes the way of every submission; nothing is widened for it: route,
// caller and credential are those that the caller itself would have had (V4).
type Internal struct {
	Link Link
	// From is the origin that named the target. Another origin gets no credential unless
	// its route allows that (CONTRACT R3, A7).
	From string
	// Route and Rule are those of the command that a confirming command asks about.
	Route, Rule string
}

const (
	// maxRecalled bounds one value that is kept, maxItems and maxItemID the items of a batch.
	maxRecalled = 1 << 10
	maxItems    = 500
	maxItemID   = 128
	// maxInspected bounds a body that is read for values, items or a marker.
	maxInspected = 4 << 20
)

// internal checks a request of Waybill's own: a safe one, to the origin that the action
// went to, or without a credential.
func (a *action) internal(context.Context) *Refusal {
	in := a.s.Internal
	if in == nil {
		return nil
	}
	a.accepted.Link = &in.Link
	if !a.repeatable {
		// The route may say that even a GET has effects (G6).
		return refusal(outcome.CodeUnsupportedAction, "request.method", "query_not_safe", "The route says that this request is not safe to repeat, so Waybill does not make it by itself.")
	}
	if in.From != "" && in.From != a.out.Target.Origin() && len(a.route.Inject) > 0 && !control.Off("R3-job-on-another-origin") && !contains(a.route.RedirectFrom, in.From) {
		return refusal(outcome.CodeRedirectCrossOrigin, "request.target", "cross_origin_job",
			"The status resource is on another origin, and its route does not name the accepting origin in redirect_from.")
	}
	return nil
}

func contains(list []string, s string) bool {
	for _, v := range list {
		if v == s {
			return true
		}
	}
	return false
}

// remember writes the marker into the request (K7) and keeps what the contract's
// templates need of it: neither query values nor bodies are on record. The fingerprint is
// taken: it is that of what the caller sent, so that a repeat is recognised (O3).
func (a *action) remember(context.Context) *Refusal {
	c := &a.route.Contract
	if a.s.Internal != nil || !c.Links() && c.Marker == nil {
		return nil
	}
	r := &Recall{CallerName: a.s.Caller.Name}
	var doc *routes.Document
	body := func() routes.Document {
		if doc == nil {
			d := routes.Document{}
			if raw, ok := a.inspected(); ok {
				d = routes.ParseDocument(raw)
			}
			doc = &d
		}
		return *doc
	}
	if c.Batch != nil {
		r.Items = a.itemsOf(c.Batch, body)
	}
	for _, v := range recalled(c) {
		if text, ok := a.valueOf(v, body); ok && text != "" && len(text) <= maxRecalled && !a.sensitive(text) {
			if r.Values == nil {
				r.Values = make(map[string]string)
			}
			r.Values[v.String()] = text
		}
	}
	if c.Marker != nil {
		r.Marker = a.mark7(c.Marker)
	}
	a.recall = r
	return nil
}

// sensitive reports whether a value is one that must not be kept: nothing of a secret is
// known yet, but what the caller sent as its own credential is.
func (a *action) sensitive(text string) bool {
	for _, name := range []string{"Authorization", "Cookie", "Proxy-Authorization"} {
		for _, v := range a.s.Header[name] {
			if v != "" && strings.Contains(v, text) && len(text) >= tellable {
				return true
			}
		}
	}
	return false
}

// recalled lists the values of the request that the contract's templates name.
func recalled(c *routes.Contract) []routes.Value {
	var out []routes.Value
	add := func(text string) {
		t, err := routes.ParseValueTemplate(text)
		if err != nil {
			return
		}
		for _, v := range t.Values() {
			if v.OfRequest() {
				out = append(out, v)
			}
		}
	}
	if c.Reconcile != nil {
		add(c.Reconcile.Get)
	}
	if c.Async != nil && c.Async.Get != "" {
		add(c.Async.Get)
	}
	return out
}

// inspected is the body as it will be sent, where it is small and not encoded.
func (a *action) inspected() ([]byte, bool) {
	if a.body == nil || a.body.length > maxInspected || a.out.Header.Get("Content-Encoding") != "" {
		return nil, false
	}
	raw, err := io.ReadAll(a.body.reader())
	return raw, err == nil
}

// valueOf reads one value of the request.
func (a *action) valueOf(v routes.Value, body func() routes.Document) (string, bool) {
	switch v.From {
	case "request.segment":
		n, _ := strconv.Atoi(v.Name)
		segments := strings.Split(strings.TrimPrefix(a.out.RawPath, "/"), "/")
		if n < 1 || n > len(segments) {
			return "", false
		}
		text, err := url.PathUnescape(segments[n-1])
		return text, err == nil
	case "request.query":
		return oneOf(a.out.RawQuery, v.Name)
	case "request.header":
		values := a.out.Header[v.Name]
		if len(values) != 1 {
			return "", false
		}
		return values[0], true
	case "request.form":
		raw, ok := a.inspected()
		if !ok || !isForm(a.out.Header) {
			return "", false
		}
		return oneOf(string(raw), v.Name)
	case "request.json":
		return jsonText(body(), v.Name)
	}
	return "", false
}

// oneOf is the value of a parameter that stands there once.
func oneOf(query, name string) (string, bool) {
	q, err := url.ParseQuery(query)
	if err != nil || len(q[name]) != 1 {
		return "", false
	}
	return q[name][0], true
}

func jsonText(doc routes.Document, path string) (string, bool) {
	p, err := routes.ParseJSONPath(path)
	if err != nil || !doc.OK {
		return "", false
	}
	found := p.Find(doc.Value)
	if len(found) != 1 || found[0] == nil {
		return "", false
	}
	return routes.ScalarText(found[0])
}

func mediaType(h http.Header) string {
	m, _, err := mime.ParseMediaType(h.Get("Content-Type"))
	if err != nil {
		return ""
	}
	return m
}

func isForm(h http.Header) bool { return mediaType(h) == "application/x-www-form-urlencoded" }

func isJSON(h http.Header) bool {
	m := mediaType(h)
	return m == "application/json" || strings.HasSuffix(m, "+json")
}

// signs are fields whose value covers the body or the target: a marker would break them.
var signs = []string{"Content-Md5", "Digest", "Content-Digest", "Repr-Digest", "Signature", "X-Amz-Content-Sha256", "X-Signature", "X-Hub-Signature-256"}

// mark7 writes the action's id where the contract says (CONTRACT K7) and returns it, or
// "" where there is no place for it: then a query that needs it cannot be made, and says so.
func (a *action) mark7(m *routes.Marker) string {
	id := a.id.String()
	if a.further != nil {
		id = a.further.ID.String() // a repeat carries the marker of its action
	}
	if m.Header != "" {
		a.out.Header[m.Header] = []string{id}
		return id
	}
	for _, name := range signs {
		if len(a.out.Header[name]) > 0 {
			return ""
		}
	}
	if m.Query != "" {
		if _, taken := url.ParseQuery(a.out.RawQuery); taken != nil || strings.Contains(a.out.RawQuery, url.QueryEscape(m.Query)+"=") {
			return ""
		}
		if a.out.RawQuery != "" {
			a.out.RawQuery += "&"
		}
		a.out.RawQuery += url.QueryEscape(m.Query) + "=" + id
		a.out.HasQuery = true
		return id
	}
	raw, ok := a.inspected()
	if !ok {
		return ""
	}
	var marked []byte
	switch {
	case m.JSON != "" && isJSON(a.out.Header):
		marked, ok = markJSON(raw, m.JSON, id)
	case m.Form != "" && isForm(a.out.Header):
		marked, ok = markForm(raw, m.Form, id)
	default:
		return ""
	}
	if !ok || int64(len(marked)) > a.route.Limits.Request {
		return ""
	}
	body, err := spoolBody(bytes.NewReader(marked), int64(len(marked)), int64(len(marked)), int64(len(marked)), "")
	if err != nil {
		return ""
	}
	a.body.close()
	a.body = body
	a.out.Length = body.length
	a.out.Body = bodyOf(body)
	return id
}

func markForm(raw []byte, name, id string) ([]byte, bool) {
	q, err := url.ParseQuery(string(raw))
	if err != nil || len(q[name]) > 0 {
		return nil, false
	}
	out := bytes.Clone(raw)
	if len(out) > 0 {
		out = append(out, '&')
	}
	return append(out, url.QueryEscape(name)+"="+id...), true
}

// markJSON inserts a member at a path of names, and leaves every other byte as it was.
// Members of the path that are missing are made; one that is there and is no object, or
// the last one being there already, leaves no place.
func markJSON(raw []byte, path, id string) ([]byte, bool) {
	p, err := routes.ParseJSONPath(path)
	if err != nil || !routes.ParseDocument(raw).OK {
		return nil, false
	}
	names, ok := p.Members()
	if !ok {
		return nil, false
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	at, depth, empty, ok := descend(dec, raw, names)
	if !ok {
		return nil, false
	}
	var ins bytes.Buffer
	rest := names[depth:]
	for i, n := range rest {
		key, err := json.Marshal(n)
		if err != nil {
			return nil, false
		}
		ins.Write(key)
		ins.WriteByte(':')
		if i < len(rest)-1 {
			ins.WriteByte('{')
		}
	}
	ins.WriteString(strconv.Quote(id))
	ins.WriteString(strings.Repeat("}", len(rest)-1))
	if !empty {
		ins.WriteByte(',')
	}
	out := append(bytes.Clone(raw[:at]), ins.Bytes()...)
	return append(out, raw[at:]...), true
}

// descend walks to the innermost object of the path that is there. at is the offset
// behind its brace, depth the number of names that led there.
func descend(dec *json.Decoder, raw []byte, names []string) (at int64, depth int, empty, ok bool) {
	t, err := dec.Token()
	if err != nil || t != json.Delim('{') {
		return 0, 0, false, false
	}
	at = dec.InputOffset()
	empty = !dec.More()
	// Find the next name in this object; names that stand twice leave no place.
	found := int64(-1)
	var sub json.RawMessage
	for dec.More() {
		key, err := dec.Token()
		if err != nil {
			return 0, 0, false, false
		}
		var v json.RawMessage
		if err := dec.Decode(&v); err != nil {
			return 0, 0, false, false
		}
		if key == names[depth] {
			if found >= 0 {
				return 0, 0, false, false
			}
			found, sub = dec.InputOffset()-int64(len(v)), v
		}
	}
	if found < 0 {
		return at, depth, empty, true
	}
	if depth == len(names)-1 || len(sub) == 0 || sub[0] != '{' {
		return 0, 0, false, false
	}
	inner, d, e, ok := descend(json.NewDecoder(bytes.NewReader(sub)), sub, names[depth+1:])
	return found + inner, depth + 1 + d, e, ok
}

// itemsOf lists the items of a batch (F7).
func (a *action) itemsOf(b *routes.Batch, body func() routes.Document) *ItemList {
	list := &ItemList{Atomic: b.Atomic}
	var items []any
	if b.Lines {
		raw, ok := a.inspected()
		if !ok {
			return untracked(list, "body_not_inspected")
		}
		docs, ok := jsonLines(raw)
		if !ok {
			return untracked(list, "not_json_lines")
		}
		items = docs
	} else {
		p, err := routes.ParseJSONPath(b.Items)
		doc := body()
		if err != nil || !doc.OK {
			return untracked(list, "not_json")
		}
		found := p.Find(doc.Value)
		array, ok := first(found).([]any)
		if !ok {
			return untracked(list, "no_items")
		}
		items = array
	}
	if len(items) > maxItems {
		return untracked(list, "too_many_items")
	}
	list.Count = len(items)
	if b.ItemID == "" {
		return list
	}
	seen := make(map[string]bool)
	for _, it := range items {
		id, ok := jsonText(routes.Document{Value: it, OK: true}, b.ItemID)
		if !ok || id == "" || len(id) > maxItemID || seen[id] {
			return untracked(list, "items_without_distinct_ids")
		}
		seen[id] = true
		list.IDs = append(list.IDs, id)
	}
	return list
}

func untracked(list *ItemList, why string) *ItemList {
	list.Count, list.IDs, list.Untracked = 0, nil, why
	return list
}

func first(list []any) any {
	if len(list) != 1 {
		return nil
	}
	return list[0]
}

// jsonLines decodes one JSON value a line; blank lines do not count.
func jsonLines(raw []byte) ([]any, bool) {
	var out []any
	for line := range bytes.Lines(raw) {
		line = bytes.TrimSpace(line)
		if len(line) == 0 {
			continue
		}
		doc := routes.ParseDocument(line)
		if !doc.OK {
			return nil, false
		}
		out = append(out, doc.Value)
	}
	return out, true
}
