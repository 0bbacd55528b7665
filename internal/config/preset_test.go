package config

import (
	"errors"
	"fmt"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/routes"
)

// presetFile is a file that uses presets, with every credential they may need.
func presetFile(uses ...string) string {
	var b strings.Builder
	b.WriteString("version: 1\ncredentials:\n")
	for _, p := range Presets() {
		roles := []string{""}
		for i, role := range p.Credentials {
			roles = slices.Insert(roles[:i], i, "-"+role)
		}
		for _, role := range roles {
			if role != "" || len(p.Credentials) == 0 {
				fmt.Fprintf(&b, "  %s%s: {from: {env: X}}\n", p.Name, role)
			}
		}
	}
	b.WriteString("routes:\n" + strings.Join(uses, ""))
	return b.String()
}

// plainUse is the shortest use of a preset.
func plainUse(p *Preset) string {
	s := "  - use: preset/" + p.Name + "\n"
	for i, q := range p.With {
		if i == 0 {
			s += "    with:\n"
		}
		if q.Default == "" {
			s += "      " + q.Name + ": " + q.Example + "\n"
		}
	}
	return strings.ReplaceAll(s, "    with:\n  -", "  -")
}

// Every preset loads, by itself and with all others, without a warning of its own; what it
// claims rests on a fact that carries it, and a key counts (CONTRACT I10).
func TestPresets(t *testing.T) {
	contract.Covers(t, "I10", "K7")
	var all []string
	for _, p := range Presets() {
		use := plainUse(p)
		if strings.HasSuffix(use, "with:\n") {
			use = strings.TrimSuffix(use, "    with:\n") // every value has a default
		}
		all = append(all, use)
		if p.Title == "" || p.Reviewed == "" || len(p.Facts) == 0 || !slices.ContainsFunc(p.Facts, func(f Fact) bool { return f.About == "auth" }) {
			t.Errorf("%s: no title, date or fact about auth", p.Name)
		}
		for name, v := range p.Placeholders {
			if !strings.Contains(strings.ToLower(v), "waybill") {
				t.Errorf("%s: the placeholder %s cannot be recognised", p.Name, name)
			}
		}
	}
	c, err := Parse("waybill.yaml", []byte(presetFile(all...)))
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range c.Warnings {
		t.Errorf("%s", w)
	}
	for _, r := range c.Snapshot.Routes() {
		use, ok := c.Presets[r.Name]
		if !ok || len(use.Written) > 0 {
			t.Errorf("%s: %+v", r.Name, use)
		}
		k := &r.Contract
		if k.Idempotency != nil && !k.Idempotency.Configured() {
			t.Errorf("%s: the key does not count: it lacks %s", r.Name, k.Idempotency.Missing())
		}
		if len(r.Inject) == 0 && !r.Deny {
			t.Errorf("%s injects nothing", r.Name)
		}
	}
}

// A claim that no fact carries is no part of a preset: neither one without a fact, nor
// one whose fact is somebody else's word.
func TestClaimsNeedFacts(t *testing.T) {
	contract.Covers(t, "I10")
	text := func(mark, claim string) string {
		return "preset: x\ntitle: X\nreviewed: 2026-11-30\nfacts: [{about: refusals, mark: " + mark + ", source: s, says: w}]\n" +
			"routes: [{name: api, match: {host: x.example.com}, contract: {" + claim + "}}]\n"
	}
	for _, mark := range []string{"D", "S", "M"} {
		if _, _, err := parsePreset("x", []byte(text(mark, "refused_before_execution: [429]"))); err != nil {
			t.Errorf("%s: %v", mark, err)
		}
	}
	for _, bad := range []string{text("U", "refused_before_execution: [429]"), text("T", "refused_before_execution: [429]"), text("D", "repeatable: true"), text("D", "batch: {items: a}")} {
		_, _, err := parsePreset("x", []byte(bad))
		var list Errors
		if !errors.As(err, &list) || list[0].File != "preset/x" || !strings.Contains(list[0].What, "no fact carries") {
			t.Errorf("%s\ngave %v", bad, err)
		}
	}
}

// What is written beside use: counts, at its own depth, and nothing else changes.
func TestPresetOverrides(t *testing.T) {
	parse := func(uses string) *Config {
		t.Helper()
		c, err := Parse("waybill.yaml", []byte(presetFile(uses)))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	plain := parse("  - use: preset/stripe\n")
	c := parse(`  - use: preset/stripe/v1-post
    name: pay
    credential: npm
    limits: {timeout: 5m}
    match: {hosts: [stripe.example.com]}
    contract: {idempotency: {margin: 2h}}
`)
	want := []string{"contract.idempotency.margin", "limits", "match.hosts"}
	if u := c.Presets["pay"]; u.Preset != "preset/stripe" || u.Part != "v1-post" || !reflect.DeepEqual(u.Written, want) {
		t.Errorf("use %+v", u)
	}
	old, now := plain.Snapshot.Route("stripe-v1-post"), c.Snapshot.Route("pay")
	if now.Limits.Timeout.Minutes() != 5 || now.Match.Hosts[0] != "stripe.example.com" || len(now.Match.Hosts) != 1 || now.Inject[0].Credential != "npm" ||
		now.Contract.Idempotency.Margin.Hours() != 2 {
		t.Errorf("%+v", now)
	}
	// With what was written taken back, it is the preset's route.
	again := *now
	again.Name, again.Limits, again.Match, again.Contract.Idempotency, again.Inject = old.Name, old.Limits, old.Match, old.Contract.Idempotency, old.Inject
	if !reflect.DeepEqual(&again, old) {
		t.Errorf("%+v\nis not\n%+v", again, old)
	}
	k := *now.Contract.Idempotency
	k.Margin = old.Contract.Idempotency.Margin
	if !reflect.DeepEqual(k, *old.Contract.Idempotency) || !slices.Equal(now.Match.Methods, old.Match.Methods) {
		t.Errorf("more than what was written changed: %+v", now)
	}
	// One part, under a name of its own; several uses of one preset.
	c = parse("  - {use: preset/github/git, name: code}\n  - {use: preset/github/rest, credential: gitlab}\n  - {use: preset/datadog, credential: {app: npm}}\n")
	var names []string
	for _, r := range c.Snapshot.Routes() {
		names = append(names, r.Name)
	}
	if !slices.Equal(names, []string{"code", "github-rest", "datadog"}) {
		t.Errorf("routes %v", names)
	}
	dd := c.Snapshot.Route("datadog")
	if dd.Inject[0].Credential != "datadog-api" || dd.Inject[1].Credential != "npm" || dd.Match.Hosts[0] != "api.datadoghq.com" {
		t.Errorf("%+v", dd)
	}
	// A preset is a way of writing: the digest is that of the routes written out.
	if a, b := parse("  - use: preset/vercel\n"), parse("  - {name: vercel, match: {host: api.vercel.com}, inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: vercel}]}\n"); a.Digest != b.Digest {
		t.Error("a preset has another digest than its routes written out")
	}
	if r := parse("  - {use: preset/paypal, match: {host: api-m.sandbox.paypal.com}, limits: {timeout: 1m}}\n").Snapshot.Route("paypal-token"); !r.Deny || r.Match.Hosts[0] != "api-m.sandbox.paypal.com" {
		t.Errorf("%+v", r)
	}
	if got := parse("  - {use: preset/gitlab, with: {host: git.example.com}}\n").Snapshot.Route("gitlab-git"); got.Match.Hosts[0] != "git.example.com" || got.Limits.Request == routes.DefaultLimits().Request {
		t.Errorf("%+v", got)
	}
}

// A mistake is told once, in the file in which it stands.
func TestPresetMistakes(t *testing.T) {
	for uses, want := range map[string]string{
		"  - use: preset/strip\n":                                                                               `use: there is no such preset; did you mean preset/stripe?`,
		"  - use: stripe\n":                                                                                     `use: there is no such preset; did you mean preset/stripe?`,
		"  - use: preset/github/graph\n":                                                                        `use: the preset has no such part; write preset/github/ and one of graphql, rest, git`,
		"  - {use: preset/jira, with: {user: me@example.com}}\n":                                                `with.site: is missing: the name of the site`,
		"  - {use: preset/vercel, with: {host: x}}\n":                                                           `with.host: is no value of the preset; the preset takes no values`,
		"  - {use: preset/gitlab, with: {host: \"a b\"}}\n":                                                     `with.host: is no usable value`,
		"  - {use: preset/datadog, credential: npm}\n":                                                          `credential: the preset has more than one secret; write {api: name, app: name}`,
		"  - {use: preset/datadog, credential: {x: npm}}\n":                                                     `credential.x: is no secret of the preset; its secrets are api, app`,
		"  - {use: preset/github, limits: {timeout: 5}}\n":                                                      `limits.timeout: must be`,
		"  - {use: preset/github, limts: {}}\n":                                                                 `limts: unknown key; did you mean limits?`,
		"  - {use: preset/github, credential: nobody}\n":                                                        `there is no such credential`,
		"  - {use: preset/jira, with: {site: 'a/b', user: me@example.com}}\n":                                   `match.host: is no host name`,
		"  - {name: x, match: {host: x.example.com}, with: {a: b}}\n":                                           `with: goes with use: only`,
		"  - {name: x, match: {host: x.example.com}, credential: npm}\n":                                        `credential: goes with use: only`,
		"  - {use: preset/openai, durability: relaxed}\n":                                                       `durability: relaxed gives up the proof`,
		"  - {use: preset/shopify, with: {store: \"*\"}}\n":                                                     `store: is no usable value`,
		"  - {use: preset/vercel, name: a}\n  - {use: preset/npm, name: a, with: {host: npm.example.com}}\n":    `name: is the name of routes[0] too`,
		"  - {use: preset/stripe/v1-post, contract: {idempotency: {margin: 25h}}}\n":                            `margin: leaves nothing of the retention`,
		"  - {use: preset/cloudflare, inject: [{header: X-Auth-Key, value: \"${secret}\", credential: npm}]}\n": `strip: "X-Auth-Key" is injected on this route`,
	} {
		_, err := Parse("waybill.yaml", []byte(presetFile(uses)))
		var list Errors
		if !errors.As(err, &list) {
			t.Errorf("%s was accepted", uses)
			continue
		}
		if len(list) != 1 || !strings.Contains(list[0].String(), want) {
			t.Errorf("%s\ngave %v\nwant %s", uses, err, want)
		}
		file := "waybill.yaml"
		if strings.Contains(want, "strip:") {
			file = "preset/cloudflare" // there it stands
		}
		if list[0].File != file || list[0].Line < 1 {
			t.Errorf("%s\nat %s:%d", uses, list[0].File, list[0].Line)
		}
	}
}

// docs/presets.md has the table that the presets give. Run with -update to write it.
func TestPresetDocs(t *testing.T) {
	const file, begin, end = "../../docs/presets.md", "<!-- table -->\n", "<!-- end of table -->\n"
	data, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, ok := strings.Cut(string(data), begin)
	_, tail, ok2 := strings.Cut(rest, end)
	if !ok || !ok2 {
		t.Fatal("the table has no place")
	}
	want := head + begin + presetTable(t) + end + tail
	if *update {
		if err := os.WriteFile(file, []byte(want), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	if string(data) != want {
		t.Errorf("%s is not what the presets say; run go test ./internal/config -run TestPresetDocs -update", file)
	}
}

func presetTable(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	b.WriteString("| preset | part | secret goes to | repeat with the same key | followed, asked, told apart | dialect |\n| --- | --- | --- | --- | --- | --- |\n")
	for _, p := range Presets() {
		use := strings.TrimSuffix(plainUse(p), "    with:\n")
		c, err := Parse("waybill.yaml", []byte(presetFile(use)))
		if err != nil {
			t.Fatal(err)
		}
		for i, r := range c.Snapshot.Routes() {
			name := ""
			if i == 0 {
				name = "`" + p.Name + "`"
			}
			var places, more []string
			for j := range r.Inject {
				in := &r.Inject[j]
				place := in.Place()
				if in.Value != "" {
					place += ": " + in.Value
				}
				places = append(places, "`"+place+"`")
			}
			if r.Deny {
				places = []string{"refused"}
			}
			k := &r.Contract
			key := "–"
			if k.Idempotency != nil {
				key = "`" + k.Idempotency.Header + k.Idempotency.Field + "`, " + FormatDuration(k.Idempotency.Window()) + " ([source](" + k.Idempotency.Source + "), " + k.Idempotency.Reviewed + ")"
			}
			if k.Repeatable != nil && *k.Repeatable {
				key = "repeatable without a key"
			}
			for what, has := range map[string]bool{"jobs": k.Async != nil, "items": k.Batch != nil, "query": k.Reconcile != nil, "marker": k.Marker != nil} {
				if has {
					more = append(more, what)
				}
			}
			slices.Sort(more)
			if len(more) == 0 {
				more = []string{"–"}
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s | `%s` |\n", name, p.Parts[i], strings.Join(places, ", "), key, strings.Join(more, ", "), r.Dialect)
		}
	}
	b.WriteString("\n| preset | about | mark | says | source |\n| --- | --- | --- | --- | --- |\n")
	for _, p := range Presets() {
		for i, f := range p.Facts {
			name := ""
			if i == 0 {
				name = "`" + p.Name + "`, reviewed " + p.Reviewed
			}
			fmt.Fprintf(&b, "| %s | %s | %s | %s | %s |\n", name, f.About, f.Mark, f.Says, f.Source)
		}
	}
	return b.String()
}
