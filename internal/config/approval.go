package config

import (
	"strconv"
	"strings"
	"time"

	"gopkg.in/yaml.v3"

	"waybill/routes"
)

var (
	approvalSchema = schema{
		keys:  []string{"when", "hold", "expiry"},
		hints: map[string]string{"required": "write approval: required, or approval: {when: …}", "methods": "write when: [{methods: [DELETE]}]", "path": "write when: [{path: /v1/**}]", "paths": "write when: [{paths: [/v1/**]}]"},
	}
	approvalRuleSchema = schema{keys: []string{"methods", "path", "paths", "body_over"}}
)

// approval reads approval: none, required, or a mapping with rules (CONTRACT D3, D4).
func (r *reader) approval(o *object, rt *routes.Route) routes.Approval {
	var a routes.Approval
	v, path, ok := o.get("approval")
	if !ok {
		return a
	}
	n, ok := r.deref(v, path)
	if !ok {
		return a
	}
	if n.Kind != yaml.MappingNode {
		a.Required = o.enum("approval", "none", "required") == 1
	} else if inner := r.object(n, path, approvalSchema); inner != nil {
		a.Required = true
		a.Hold = inner.duration("hold", time.Millisecond, day)
		a.Expiry = inner.duration("expiry", time.Second, 30*day)
		if when, at, ok := inner.get("when"); ok {
			a.When = r.approvalRules(when, at)
		}
	}
	if !a.Required {
		return a
	}
	if rt.Durability == routes.Relaxed {
		r.fail(n, path, "an approval needs records that are waited for", "remove durability: relaxed, or the approval")
	}
	if rt.Upgrade == routes.UpgradeTunnel {
		r.fail(n, path, "an approval covers one request, not what a tunnel would carry", "remove upgrade: tunnel, or the approval")
	}
	if rt.Redirects == routes.RedirectsSameOrigin {
		r.fail(n, path, "an approval covers one request, not the ones a redirect would add", "remove redirects: same_origin, or the approval")
	}
	return a
}

func (r *reader) approvalRules(n *yaml.Node, path string) []routes.ApprovalRule {
	var out []routes.ApprovalRule
	count := 0
	listed := r.items(n, path, "[{methods: [DELETE]}]", func(n *yaml.Node, path string) {
		count++
		o := r.object(n, path, approvalRuleSchema)
		if o == nil {
			return
		}
		var u routes.ApprovalRule
		u.Methods = r.methods(o)
		u.Paths = r.pathPatterns(o)
		if o.has("body_over") {
			u.MinBody = o.size("body_over", 0, 1<<40) + 1
		}
		if !o.has("methods") && !o.has("path") && !o.has("paths") && !o.has("body_over") {
			r.fail(n, path, "has no condition", "write methods, path, paths or body_over; for every request write approval: required")
			return
		}
		out = append(out, u)
	})
	if listed && count == 0 {
		r.fail(n, path, "is an empty list", "write a rule, or approval: required for every request")
	}
	return out
}

// pathPatterns reads path: or paths:.
func (r *reader) pathPatterns(o *object) []string {
	check := func(s string) (string, string, string) {
		if err := routes.CheckGlob(s); err != nil {
			return "", "is no path pattern: " + strings.TrimPrefix(err.Error(), routes.ErrBadGlob.Error()+": "), "begin with /, use * inside a segment and ** for any number of segments"
		}
		return s, "", ""
	}
	switch one, many := o.has("path"), o.has("paths"); {
	case one && many:
		o.r.fail(o.key("paths"), join(o.path, "paths"), "path and paths are both written", "keep one of them")
	case one:
		if s, ok := o.text("path", "a path pattern"); ok {
			n, path, _ := o.get("path")
			p, wrong, fix := check(s)
			if wrong == "" {
				return []string{p}
			}
			r.fail(n, path, wrong, fix)
		}
	case many:
		return o.texts("paths", "a path pattern", "[/v1/**]", check)
	}
	return nil
}

// callerLimits reads what one caller may do on the route (CONTRACT V4).
func (r *reader) callerLimits(o *object, l *routes.Limits) {
	number := func(key string) int {
		n, path, ok := o.get(key)
		if !ok {
			return 0
		}
		v, _ := r.integer(n, path, 1, 1_000_000)
		return v
	}
	l.Burst, l.Concurrent = number("burst"), number("concurrent")
	if s, ok := o.text("rate", "a rate such as 10/s"); ok {
		n, path, _ := o.get("rate")
		count, unit, _ := strings.Cut(s, "/")
		per := map[string]time.Duration{"s": time.Second, "m": time.Minute, "h": time.Hour}[unit]
		v, err := strconv.Atoi(count)
		if err != nil || per == 0 || v < 1 || v > 1_000_000 || strconv.Itoa(v) != count {
			r.fail(n, path, "is no rate", "write a whole number and /s, /m or /h, such as 10/s")
			return
		}
		l.Rate, l.RatePer = v, per
	}
	if l.Burst > 0 && l.Rate == 0 && !o.has("rate") {
		n, path, _ := o.get("burst")
		r.fail(n, path, "is the burst of a rate that is not written", "add rate: 10/s, or remove burst")
	}
}
