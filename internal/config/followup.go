package config

import (
	"errors"
	"fmt"
	"net/textproto"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"waybill/routes"
)

var (
	reconcileSchema = schema{
		keys:  []string{"get", "headers", "committed_when", "rejected_when", "not_found_when", "not_found", "visible_after", "background", "every", "max_every", "tries"},
		hints: map[string]string{"url": "write get: and a path on the same origin", "post": "a query is a GET; write get:"},
	}
	asyncSchema     = schema{keys: []string{"status", "accepted_when", "from", "get", "headers", "job_id", "pending_when", "committed_when", "rejected_when", "every", "max_every", "timeout", "polls"}}
	batchSchema     = schema{keys: []string{"format", "items", "item_id", "answer", "results", "result_id", "result_status", "committed_when", "rejected_when", "atomic"}}
	markerSchema    = schema{keys: []string{"header", "query", "json", "form"}}
	conditionSchema = schema{keys: []string{"status", "json", "present", "empty"}}
)

const valuesFix = "write ${action}, ${marker}, ${key}, ${request.json.PATH}, ${request.query.NAME}, ${request.form.NAME}, ${request.header.NAME}, ${request.segment.N}, ${response.json.PATH} or ${response.header.NAME}"

// followUp reads how to find out what became of an operation (CONTRACT K6, A7, F7, K7).
func (r *reader) followUp(o *object, c *routes.Contract) {
	before := len(r.problems)
	if n, path, ok := o.get("marker"); ok {
		c.Marker = r.marker(n, path)
	}
	if n, path, ok := o.get("reconcile"); ok {
		c.Reconcile = r.reconcile(n, path, c)
	}
	if n, path, ok := o.get("async"); ok {
		c.Async = r.async(n, path)
	}
	if n, path, ok := o.get("batch"); ok {
		c.Batch = r.batch(n, path)
	}
	if c.Marker != nil && c.Reconcile == nil && len(r.problems) == before {
		r.warn(o.key("marker"), join(o.path, "marker"), "nothing searches for the marker", "add reconcile: {get: …${marker}…}, or remove it")
	}
}

func (r *reader) template(o *object, key string) string {
	s, ok := o.text(key, "a path such as /v1/orders/${request.json.id}")
	if !ok {
		return ""
	}
	n, path, _ := o.get(key)
	if _, err := routes.ParseValueTemplate(s); err != nil {
		fix := valuesFix
		if !strings.HasPrefix(s, "/") {
			fix = "write a path and query that begin with /; it goes to the origin of the operation"
		}
		r.fail(n, path, "is no template of a query", fix)
		return ""
	}
	return s
}

func (r *reader) reconcile(n *yaml.Node, path string, c *routes.Contract) *routes.Reconcile {
	o := r.object(n, path, reconcileSchema)
	if o == nil {
		return nil
	}
	before := len(r.problems)
	q := &routes.Reconcile{}
	if !o.has("get") {
		r.fail(o.node, join(path, "get"), "is missing", "add get: /path/of/${request.json.id}")
	} else if q.Get = r.template(o, "get"); q.Get != "" {
		t, _ := routes.ParseValueTemplate(q.Get)
		n, path, _ := o.get("get")
		if len(t.Values()) == 0 {
			r.fail(n, path, "names no recorded value and would ask the same for every action", valuesFix)
		}
		for _, v := range t.Values() {
			switch {
			case v.From == "marker" && c.Marker == nil:
				r.fail(n, path, "names a marker, and the contract sets none", "add marker: {json: metadata.waybill}, or name another value")
			case v.From == "key" && c.Idempotency == nil:
				r.fail(n, path, "names a key, and the contract has no idempotency", "add idempotency:, or name another value")
			}
		}
	}
	q.Headers = r.fixedHeaders(o)
	q.CommittedWhen, q.RejectedWhen, q.NotFoundWhen = r.conditions(o, "committed_when"), r.conditions(o, "rejected_when"), r.conditions(o, "not_found_when")
	if !o.has("committed_when") && !o.has("rejected_when") && !o.has("not_found_when") {
		r.fail(o.node, join(path, "committed_when"), "is missing", "add committed_when:, rejected_when: or not_found_when:; without a rule no answer means anything")
	}
	q.NotFoundRejects = o.enum("not_found", "unknown", "rejected") == 1
	q.VisibleAfter = o.duration("visible_after", time.Millisecond, day)
	if q.NotFoundRejects {
		n, path, _ := o.get("not_found")
		switch {
		case !o.has("not_found_when"):
			r.fail(n, path, "has no rule", "add not_found_when: {status: [404]}")
		case !o.has("visible_after"):
			r.fail(n, path, "needs the longest time until an effect shows", "add visible_after: 30s, or write not_found: unknown")
		}
	}
	q.Manual = !o.boolean("background", true)
	q.Every, q.MaxEvery = o.duration("every", 10*time.Millisecond, day), o.duration("max_every", 10*time.Millisecond, day)
	if n, path, ok := o.get("tries"); ok {
		q.Tries, _ = r.integer(n, path, 1, 100)
	}
	if len(r.problems) > before {
		return nil
	}
	return q
}

func (r *reader) fixedHeaders(o *object) map[string]string {
	n, path, ok := o.get("headers")
	if !ok {
		return nil
	}
	if n, ok = r.deref(n, path); !ok {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		r.fail(n, path, "must be a mapping, is "+kindName(n), "write {Accept: application/json}")
		return nil
	}
	r.checkTag(n, path)
	out := map[string]string{}
	r.pairs(n, path, func(key string, k, v *yaml.Node) {
		name, wrong, fix := r.fieldName(key)
		if wrong != "" {
			r.fail(k, join(path, key), wrong, fix)
			return
		}
		if name == "Authorization" || name == "Cookie" || name == "Proxy-Authorization" {
			r.fail(k, join(path, key), "a secret does not stand in this file", "credentials are injected by the route that takes the query")
			return
		}
		s, ok := r.text(v, join(path, key), "text")
		if !ok {
			return
		}
		if strings.ContainsAny(s, "\r\n\x00") {
			r.fail(v, join(path, key), "is no field value", "write one line")
			return
		}
		out[name] = s
	})
	if len(out) == 0 {
		return nil
	}
	return out
}

func (r *reader) async(n *yaml.Node, path string) *routes.Async {
	o := r.object(n, path, asyncSchema)
	if o == nil {
		return nil
	}
	before := len(r.problems)
	a := &routes.Async{Status: o.integers("status", "[202]", 200, 299)}
	if o.has("from") && o.has("get") {
		r.fail(o.key("get"), join(path, "get"), "from and get are both written", "keep one of them")
	}
	if o.has("from") {
		a.From = o.texts("from", "a place of the answer", "[location]", func(s string) (string, string, string) {
			switch lower := strings.ToLower(s); {
			case lower == routes.FromLocation, lower == routes.FromOperationLocation, lower == routes.FromAzure:
				return lower, "", ""
			case strings.HasPrefix(s, routes.FromJSON):
				if p, err := routes.ParseJSONPath(s[len(routes.FromJSON):]); err == nil && p.One() && len(p) > 0 {
					return s, "", ""
				}
			}
			return "", "is no place of a status resource", "write location, operation-location, azure-asyncoperation or json:links.status"
		})
	}
	if o.has("get") {
		a.Get = r.template(o, "get")
	}
	a.JobID = r.jsonPath(o, "job_id")
	a.Headers = r.fixedHeaders(o)
	a.AcceptedWhen = r.conditions(o, "accepted_when")
	a.PendingWhen, a.CommittedWhen, a.RejectedWhen = r.conditions(o, "pending_when"), r.conditions(o, "committed_when"), r.conditions(o, "rejected_when")
	if o.has("pending_when") && !o.has("committed_when") {
		r.fail(o.key("pending_when"), join(path, "pending_when"), "says when a job runs, and nothing says when it is done", "add committed_when:, or remove all three for the usual forms")
	}
	a.Every, a.MaxEvery = o.duration("every", 10*time.Millisecond, day), o.duration("max_every", 10*time.Millisecond, day)
	a.Timeout = o.duration("timeout", time.Millisecond, 30*day)
	if n, path, ok := o.get("polls"); ok {
		a.Polls, _ = r.integer(n, path, 1, 10000)
	}
	if len(r.problems) > before {
		return nil
	}
	return a
}

func (r *reader) batch(n *yaml.Node, path string) *routes.Batch {
	o := r.object(n, path, batchSchema)
	if o == nil {
		return nil
	}
	before := len(r.problems)
	b := &routes.Batch{Atomic: o.boolean("atomic", false)}
	b.Lines = o.enum("format", "json", "json_lines") == 1
	switch o.enum("answer", "json", "json_lines", "multistatus") {
	case 1:
		b.ResultLines = true
	case 2:
		b.Multistatus = true
	}
	b.Items, b.ItemID = r.jsonPath(o, "items"), r.jsonPath(o, "item_id")
	b.Results, b.ResultID, b.Status = r.jsonPath(o, "results"), r.jsonPath(o, "result_id"), r.jsonPath(o, "result_status")
	b.CommittedWhen, b.RejectedWhen = r.conditions(o, "committed_when"), r.conditions(o, "rejected_when")
	if b.Lines && b.Items != "" {
		r.fail(o.key("items"), join(path, "items"), "contradicts format: json_lines", "remove it; each line is an item")
	}
	if !b.Atomic && !b.Multistatus && b.Status == "" && len(b.CommittedWhen) == 0 {
		r.fail(o.node, join(path, "result_status"), "is missing", "add result_status: or committed_when:, so that a result says something about its item; or atomic: true")
	}
	for _, l := range [][]routes.Condition{b.CommittedWhen, b.RejectedWhen} {
		for _, c := range l {
			if len(c.Status) > 0 {
				r.fail(o.node, join(path, "committed_when"), "tests a status; an item has none", "use json:, present: or empty:, or result_status:")
			}
		}
	}
	if len(r.problems) > before {
		return nil
	}
	return b
}

func (r *reader) marker(n *yaml.Node, path string) *routes.Marker {
	o := r.object(n, path, markerSchema)
	if o == nil {
		return nil
	}
	before := len(r.problems)
	m := &routes.Marker{}
	if len(o.fields) != 1 && len(r.problems) == before {
		r.fail(o.node, path, fmt.Sprintf("names %d places", len(o.fields)), "name one of header:, query:, json: and form:")
		return nil
	}
	if s, ok := o.text("header", "a field name"); ok {
		name, wrong, fix := r.fieldName(s)
		n, path, _ := o.get("header")
		switch {
		case wrong != "":
			r.fail(n, path, wrong, fix)
		case name == "Authorization" || name == "Cookie":
			r.fail(n, path, "is a field of credentials", "choose one that the service keeps, such as X-Request-Id")
		}
		m.Header = textproto.CanonicalMIMEHeaderKey(name)
	}
	m.Query, _ = o.text("query", "the name of a parameter")
	m.Form, _ = o.text("form", "the name of a form field")
	m.JSON = r.jsonPath(o, "json")
	if m.JSON != "" {
		p, err := routes.ParseJSONPath(m.JSON)
		if _, ok := p.Members(); err != nil || !ok {
			n, path, _ := o.get("json")
			r.fail(n, path, "is no place to write to", "write names joined by dots, such as metadata.waybill")
		}
	}
	if len(r.problems) > before {
		return nil
	}
	return m
}

func (r *reader) jsonPath(o *object, key string) string {
	s, ok := o.text(key, "a path such as data.id")
	if !ok {
		return ""
	}
	p, err := routes.ParseJSONPath(s)
	if err != nil || !p.One() {
		n, path, _ := o.get(key)
		r.fail(n, path, "is no path into JSON", "write names and indexes, such as data[0].id")
		return ""
	}
	return s
}

// conditions reads one test of an answer, or a list of which one has to hold.
func (r *reader) conditions(o *object, key string) []routes.Condition {
	n, path, ok := o.get(key)
	if !ok {
		return nil
	}
	if n, ok = r.deref(n, path); !ok {
		return nil
	}
	var out []routes.Condition
	one := func(n *yaml.Node, path string) {
		if c, ok := r.condition(n, path); ok {
			out = append(out, c)
		}
	}
	if n.Kind != yaml.SequenceNode {
		one(n, path)
		return out
	}
	count := 0
	r.items(n, path, "{status: [200]}", func(n *yaml.Node, path string) {
		count++
		one(n, path)
	})
	if count == 0 {
		r.fail(n, path, "is an empty list", "add a test, or remove the key")
	}
	return out
}

func (r *reader) condition(n *yaml.Node, path string) (routes.Condition, bool) {
	var c routes.Condition
	o := r.object(n, path, conditionSchema)
	if o == nil {
		return c, false
	}
	before := len(r.problems)
	if len(o.fields) == 0 {
		r.fail(o.node, path, "tests nothing", "write {status: [200]} or {json: {status: paid}}")
	}
	c.Status = o.integers("status", "[200]", 200, 499)
	for _, s := range c.Status {
		if routes.TellsNothing(s) {
			n, path, _ := o.get("status")
			r.fail(n, path, fmt.Sprintf("%d is about the query itself and tells nothing about the operation", s), "remove it")
		}
	}
	paths := func(key string) []string {
		return o.texts(key, "a path into JSON", "[data[0]]", func(s string) (string, string, string) {
			if _, err := routes.ParseJSONPath(s); err != nil {
				return "", "is no path into JSON", "write names and indexes, such as data[0].id or data[*].id"
			}
			return s, "", ""
		})
	}
	c.Present, c.Empty = paths("present"), paths("empty")
	if n, path, ok := o.get("json"); ok {
		c.JSON = r.jsonTests(n, path)
	}
	return c, len(r.problems) == before
}

func (r *reader) jsonTests(n *yaml.Node, path string) []routes.JSONTest {
	n, ok := r.deref(n, path)
	if !ok {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		r.fail(n, path, "must be a mapping, is "+kindName(n), "write {data.status: paid}")
		return nil
	}
	r.checkTag(n, path)
	var out []routes.JSONTest
	r.pairs(n, path, func(key string, k, v *yaml.Node) {
		at := join(path, key)
		if _, err := routes.ParseJSONPath(key); err != nil {
			r.fail(k, at, "is no path into JSON", "write names and indexes, such as data[0].id or data[*].id")
			return
		}
		t := routes.JSONTest{Path: key}
		values := []*yaml.Node{v}
		if d, ok := r.deref(v, at); ok && d.Kind == yaml.SequenceNode {
			values = d.Content
		}
		for _, v := range values {
			s, err := scalar(v)
			if err != nil {
				r.fail(v, at, "must be text, a number, true or false", "write the value as it stands in the answer")
				return
			}
			t.Equals = append(t.Equals, s)
		}
		if len(t.Equals) == 0 {
			r.fail(v, at, "is an empty list", "write at least one value")
			return
		}
		out = append(out, t)
	})
	return out
}

var errScalar = errors.New("no scalar")

// scalar is a value as text: of a number as it is written, of a boolean its word.
func scalar(n *yaml.Node) (string, error) {
	if n.Kind != yaml.ScalarNode || n.Style&yaml.TaggedStyle != 0 {
		return "", errScalar
	}
	switch n.ShortTag() {
	case "!!str", "!!int", "!!float":
		return n.Value, nil
	case "!!bool":
		return strings.ToLower(n.Value), nil
	}
	return "", errScalar
}
