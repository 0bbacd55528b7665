package config

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"waybill/outcome"
	"waybill/routes"
)

var (
	idempotencySchema = schema{
		keys:  []string{"header", "field", "scope", "retention", "margin", "in_progress", "mismatch", "maker", "refusals_speak", "promises", "source", "reviewed"},
		hints: map[string]string{"key": "write header: Idempotency-Key, or field: and the name in a JSON body", "ttl": "write retention: 24h", "window": "write retention: 24h"},
	}
	retrySchema    = schema{keys: []string{"attempts", "total", "backoff", "max", "retry_after", "background"}}
	responseSchema = schema{keys: []string{"outcome", "retry"}}
)

var (
	bodyField  = regexp.MustCompile(`^[A-Za-z_][A-Za-z0-9_-]*(\.[A-Za-z_][A-Za-z0-9_-]*){0,7}$`)
	reviewDate = regexp.MustCompile(`^[0-9]{4}-[0-9]{2}-[0-9]{2}$`)
)

// repeats reads what is known about repeating: keys, preconditions, budgets (CONTRACT
// section I, J4).
func (r *reader) repeats(o *object, c *routes.Contract) {
	if n, path, ok := o.get("idempotency"); ok {
		c.Idempotency = r.idempotency(n, path)
	}
	c.Conditional = o.boolean("conditional", false)
	if n, path, ok := o.get("responses"); ok {
		c.Responses = r.responses(n, path)
	}
	if n, path, ok := o.get("retry"); ok {
		c.Retry = r.retry(n, path)
	}
	if o.enum("on_repeat", "recorded", "refuse") == 1 {
		c.OnRepeat = routes.RepeatRefuse
	}
	if k := c.Idempotency; k != nil && c.Repeatable != nil && *c.Repeatable {
		r.fail(o.key("idempotency"), join(o.path, "idempotency"), "contradicts repeatable: true", "keep one of them: a key is for operations that must not happen twice")
	}
	if o.has("on_repeat") && c.Idempotency == nil {
		r.fail(o.key("on_repeat"), join(o.path, "on_repeat"), "says what a repeated key gets, and there is no idempotency", "add idempotency:, or remove on_repeat")
	}
}

func (r *reader) idempotency(n *yaml.Node, path string) *routes.Idempotency {
	o := r.object(n, path, idempotencySchema)
	if o == nil {
		return nil
	}
	k := &routes.Idempotency{}
	switch {
	case o.has("header") == o.has("field"):
		r.fail(o.node, path, "needs header or field, and only one of them", "write header: Idempotency-Key, or field: idempotency_key for a JSON body")
	case o.has("header"):
		if s, ok := o.text("header", "a field name"); ok {
			at, path, _ := o.get("header")
			if h, wrong, fix := r.fieldName(s); wrong != "" {
				r.fail(at, path, wrong, fix)
			} else {
				k.Header = h
			}
		}
	default:
		if s, ok := o.text("field", "the name of a field of the body"); ok {
			if k.Field = s; !bodyField.MatchString(s) {
				at, path, _ := o.get("field")
				r.fail(at, path, "is no path into a JSON body", "write names joined by dots, such as idempotency_key or meta.key")
			}
		}
	}
	if s, ok := o.text("scope", "a word such as account"); ok {
		if k.Scope = s; !isName(s) {
			at, path, _ := o.get("scope")
			r.fail(at, path, "is no usable name", nameFix)
		}
	}
	k.Retention = o.duration("retention", time.Millisecond, 3660*day)
	k.Margin = o.duration("margin", time.Millisecond, 30*day)
	if !o.has("margin") {
		k.Margin = min(routes.DefaultMargin, k.Retention/10)
	}
	if o.has("margin") && o.has("retention") && k.Margin >= k.Retention && k.Retention > 0 {
		at, path, _ := o.get("margin")
		r.fail(at, path, "leaves nothing of the retention", "write less than "+FormatDuration(k.Retention))
	}
	k.InProgress = o.integers("in_progress", "[409]", 400, 599)
	k.Mismatch = o.integers("mismatch", "[422]", 400, 599)
	for _, s := range k.Mismatch {
		for _, p := range k.InProgress {
			if s == p {
				at, path, _ := o.get("mismatch")
				r.fail(at, path, fmt.Sprintf("%d stands in in_progress too", s), "one status cannot mean both; remove it from one of them")
			}
		}
	}
	if o.enum("maker", "caller", "caller_or_waybill") == 1 {
		if k.Maker = routes.MadeByCallerOrWaybill; k.Header == "" && o.has("field") {
			at, path, _ := o.get("maker")
			r.fail(at, path, "Waybill adds keys to headers, never to a body", "write caller")
		}
	}
	k.RefusalsSpeak = o.boolean("refusals_speak", false)
	k.Promises = o.texts("promises", "a promise", "["+strings.Join(routes.KeyPromises(), ", ")+"]", func(s string) (string, string, string) {
		if !contains(routes.KeyPromises(), s) {
			return "", "is no promise about a key", "write of " + strings.Join(routes.KeyPromises(), ", ")
		}
		return s, "", ""
	})
	if s, ok := o.text("source", "where the promise is written"); ok {
		k.Source = s
	}
	if at, path, ok := o.get("reviewed"); ok {
		// An unquoted date is a timestamp of YAML; it is meant as written.
		if d, ok := r.deref(at, path); ok {
			k.Reviewed = d.Value
			if _, err := time.Parse(time.DateOnly, k.Reviewed); err != nil || d.Kind != yaml.ScalarNode || !reviewDate.MatchString(k.Reviewed) {
				r.fail(at, path, "is no date", "write the day of the review, such as 2026-11-30")
				k.Reviewed = ""
			}
		}
	}
	if missing := k.Missing(); missing != "" {
		// CONTRACT I10: loaded, and not relied upon.
		r.warn(o.node, path, "does not count as configured, and keys stay ordinary fields: it lacks "+missing,
			"state what the service promises (promises: ["+strings.Join(routes.KeyPromises(), ", ")+"]), for how long (retention), where that is written (source) and when you read it (reviewed)")
	}
	return k
}

func (r *reader) retry(n *yaml.Node, path string) *routes.Retry {
	o := r.object(n, path, retrySchema)
	if o == nil {
		return nil
	}
	b := routes.DefaultRetry()
	if n, path, ok := o.get("attempts"); ok {
		if v, ok := r.integer(n, path, 1, 100); ok {
			b.Attempts = v
		}
	}
	set := func(d *time.Duration, key string, low, high time.Duration) {
		if v := o.duration(key, low, high); v > 0 {
			*d = v
		}
	}
	set(&b.Total, "total", time.Millisecond, 30*day)
	set(&b.Backoff, "backoff", time.Millisecond, time.Hour)
	b.Max = max(b.Max, b.Backoff)
	set(&b.Max, "max", time.Millisecond, day)
	if b.Max < b.Backoff {
		at, path, _ := o.get("max")
		r.fail(at, path, "is shorter than the first wait", "write at least "+FormatDuration(b.Backoff))
		b.Max = b.Backoff
	}
	b.IgnoreRetryAfter = o.enum("retry_after", "honour", "ignore") == 1
	b.Background = o.boolean("background", false)
	return &b
}

func (r *reader) responses(n *yaml.Node, path string) []routes.Response {
	n, ok := r.deref(n, path)
	if !ok {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		r.fail(n, path, "must be a mapping, is "+kindName(n), "write {409: {outcome: committed}}")
		return nil
	}
	out := map[int]routes.Response{}
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], n.Content[i+1]
		at := join(path, shownKey(k.Value))
		status, err := strconv.Atoi(k.Value)
		if err != nil || k.Kind != yaml.ScalarNode || status < 200 || status > 599 || strconv.Itoa(status) != k.Value {
			r.fail(k, at, "is no final status", "write a number from 200 to 599")
			continue
		}
		if _, dup := out[status]; dup {
			r.fail(k, at, "is written twice", "keep one of them")
			continue
		}
		o := r.object(v, at, responseSchema)
		if o == nil {
			continue
		}
		if !o.has("outcome") {
			r.fail(o.node, join(at, "outcome"), "is missing", "write committed, rejected or unknown")
			continue
		}
		resp := routes.Response{}
		switch o.enum("outcome", "committed", "rejected", "unknown") {
		case 0:
			resp.Outcome = outcome.Committed
			resp.Retry = []outcome.Retry{outcome.Never, outcome.Reconcile}[o.enum("retry", "never", "reconcile")]
		case 1:
			resp.Outcome = outcome.Rejected
			resp.Retry = []outcome.Retry{outcome.AfterCorrection, outcome.Never, outcome.Backoff}[o.enum("retry", "after_correction", "never", "backoff")]
		case 2:
			resp.Outcome = outcome.Unknown
			if o.has("retry") {
				r.fail(o.key("retry"), join(at, "retry"), "goes by the contract where the outcome is unknown", "remove it")
			}
		}
		resp.Status = status
		out[status] = resp
	}
	var list []routes.Response
	for _, status := range slices.Sorted(maps.Keys(out)) {
		list = append(list, out[status])
	}
	return list
}

// repeatContradictions are settings of a whole route that cannot be true together.
func (r *reader) repeatContradictions(o *object, rt *routes.Route) {
	c := &rt.Contract
	n, path, ok := o.get("contract")
	if !ok {
		return
	}
	if c.Retry != nil {
		if !rt.SafeWay() {
			r.fail(n, join(path, "retry"), "is a budget for repeats, and nothing on this route can be repeated safely",
				"remove it, or state a safe way: repeatable: true, a complete idempotency contract, conditional: true or refused_before_execution") // CONTRACT I6
		}
		if c.Retry.Background {
			switch {
			case rt.Durability == routes.Relaxed:
				r.fail(n, join(path, "retry.background"), "needs durable records", "remove durability: relaxed, or background")
			case rt.Limits.Request == 0:
				rt.Limits.Request = routes.MaxKeptRequest
			case rt.Limits.Request > routes.MaxKeptRequest:
				r.fail(n, join(path, "retry.background"), "keeps whole requests, and limits.request is more than can be kept", "write limits: {request: "+FormatSize(routes.MaxKeptRequest)+"} or less")
			}
		}
	}
	if k := c.Idempotency; k != nil && k.Header != "" {
		for _, in := range rt.Inject {
			if in.Header == k.Header {
				r.fail(n, join(path, "idempotency.header"), quoted(k.Header)+" is injected on this route", "a secret is no key; correct one of them")
			}
		}
		if contains(rt.Strip, k.Header) {
			r.fail(n, join(path, "idempotency.header"), quoted(k.Header)+" is stripped on this route and never arrives", "remove it from strip")
		}
	}
}
