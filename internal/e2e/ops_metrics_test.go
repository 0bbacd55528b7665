package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/metrics"
)

// sample is one line of /metrics.
type sample struct {
	name   string
	labels map[string]string
	value  float64
}

var (
	sampleLine = regexp.MustCompile(`^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? (\S+)$`)
	labelPair  = regexp.MustCompile(`([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"`)
)

func scrape(t testing.TB, url string) (text string, out []sample) {
	t.Helper()
	text = get(t, url)
	for line := range strings.Lines(text) {
		m := sampleLine.FindStringSubmatch(strings.TrimSpace(line))
		if m == nil {
			continue
		}
		v, err := strconv.ParseFloat(m[3], 64)
		if err != nil {
			t.Fatal(err)
		}
		s := sample{name: m[1], labels: map[string]string{}, value: v}
		for _, l := range labelPair.FindAllStringSubmatch(m[2], -1) {
			s.labels[l[1]] = l[2]
		}
		out = append(out, s)
	}
	return text, out
}

func sum(samples []sample, name string, labels map[string]string) (total float64) {
	for _, s := range samples {
		fits := s.name == name
		for k, v := range labels {
			fits = fits && s.labels[k] == v
		}
		if fits {
			total += s.value
		}
	}
	return total
}

// TestMetricsOfTheBinary sends what goes well, what fails and what is hostile through
// the real program, and holds /metrics against its journal (CONTRACT S1, S2, M6). The
// dashboard, the recording rules and the alerts may then only ask for what is there.
func TestMetricsOfTheBinary(t *testing.T) {
	contract.Covers(t, "S1", "S2")
	ca := testkit.NewCA(t)
	origin := testkit.NewOrigin(t, testkit.OriginConfig{TLS: ca.Server(payHost, msgHost, searchHost), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch {
		case strings.HasPrefix(r.URL.Path, "/lost"):
			panic(http.ErrAbortHandler)
		case strings.HasPrefix(r.URL.Path, "/fail"):
			w.WriteHeader(http.StatusInternalServerError)
		case strings.HasPrefix(r.URL.Path, "/echo"):
			_, _ = fmt.Fprint(w, r.Header.Get("Authorization"))
		}
	})})
	r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: origin.Addr(), msgHost: origin.Addr(), searchHost: origin.Addr()},
		top:    "  absent: {from: {file: never-made}}\n",
		routes: "  - name: absent\n    match: {host: absent.example.test}\n    inject: [{header: Authorization, value: \"${secret}\", credential: absent}]\n  - name: tries\n    match: {host: down.example.test}\n    upstream: {resolve: {down.example.test: \"127.0.0.1:1\"}}\n    limits: {tries: 2}\n"})
	r.start()
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots()})
	for i, url := range []string{
		"https://" + payHost + "/v1/a", "https://" + payHost + "/fail", "https://" + payHost + "/lost/1", "https://" + payHost + "/lost/1", "https://" + payHost + "/echo", "https://" + searchHost + "/lost/2",
		"https://" + msgHost + "/ok", "https://absent.example.test/", "https://down.example.test/", "http://nowhere-canary.example.test/",
	} {
		testkit.Send(t, client, http.MethodPost, url, "body", "Waybill-Request-Id", "rid-canary-"+strconv.Itoa(i))
	}
	// Names nobody configured, as many as a hostile caller likes to make up.
	for i := range 50 {
		testkit.Send(t, client, "POST", fmt.Sprintf("http://h%d-canary.example.test:%d/p-canary-%d?q-canary=%d", i, 1000+i, i, i), "x", "X-Canary", "v-canary")
		testkit.Send(t, client, fmt.Sprintf("M%d-CANARY", i), "https://"+payHost+"/x", "")
	}
	all := r.actions()
	testkit.Eventually(t, func() error { // the last attempts are recorded after their answers
		all = r.actions()
		for _, v := range all {
			if !v.Ended {
				return errors.New("an action still runs")
			}
		}
		return nil
	})
	text, samples := scrape(t, r.meters)

	byOutcome := map[string]float64{}
	unknown := 0.0
	for _, v := range all {
		byOutcome[v.Outcome]++
		if v.Outcome == "unknown" {
			unknown++
		}
	}
	for _, o := range slices.Sorted(maps.Keys(byOutcome)) {
		if got := sum(samples, "waybill_actions_total", map[string]string{"outcome": o}); got != byOutcome[o] {
			t.Errorf("%s: the metrics count %v, the journal has %v", o, got, byOutcome[o])
		}
	}
	if got := sum(samples, "waybill_actions_total", nil); int(got) != len(all) {
		t.Errorf("the metrics count %v actions, the journal has %d", got, len(all))
	}
	if got := sum(samples, "waybill_unresolved_actions", nil); unknown < 2 || got != unknown {
		t.Errorf("%v unresolved, the journal has %v unknown", got, unknown)
	}
	for name, labels := range map[string]map[string]string{
		"waybill_duplicate_guard_hits_total": {"route": "pay"}, "waybill_leak_guard_hits_total": {"route": "pay", "result": "masked"},
		"waybill_connection_failures_total": {"route": "tries", "code": "CONNECTION_REFUSED", "stage": "dns"}, "waybill_credential_errors_total": {"credential": "absent", "code": "CREDENTIAL_MISSING"},
		"waybill_attempts_total": {"route": "msg", "connection": "fresh"}, "waybill_journal_free_bytes": {}, "waybill_journal_writable": {}, "waybill_caller_connections_total": {"endpoint": "proxy"},
		"waybill_journal_events_total": {"type": "DISPATCH_STARTED"}, "waybill_action_duration_seconds_count": {"route": "pay"}, "waybill_journal_written_bytes_total": {},
	} {
		if sum(samples, name, labels) < 1 {
			t.Errorf("%s%v is not counted", name, labels)
		}
	}
	// S2: nothing of what callers sent, no host and no id is in it, and it stays small.
	for _, s := range []string{"canary", "CANARY", "example.test", "act_", "rid-", "/v1", "127.0.0.1"} {
		if strings.Contains(text, s) {
			t.Errorf("%q is in /metrics", s)
		}
	}
	routes := []string{"pay", "msg", "search", "plain", "absent", "tries", metrics.NoRoute}
	series := 0
	for _, s := range samples {
		if route, ok := s.labels["route"]; ok && !slices.Contains(routes, route) {
			t.Errorf("%s has the route %q", s.name, route)
		}
		if strings.HasPrefix(s.name, "waybill_") && s.labels["le"] == "" {
			series++
		}
	}
	if series > 500 {
		t.Errorf("%d series", series)
	}
	testkit.Search(t, r.canary, testkit.InString("metrics", text))

	// What is unresolved is so after a restart.
	r.kill()
	r.start()
	if _, again := scrape(t, r.meters); sum(again, "waybill_unresolved_actions", nil) != unknown {
		t.Errorf("%v unresolved after a restart, want %v", sum(again, "waybill_unresolved_actions", nil), unknown)
	}
	r.verify()

	t.Run("queries", func(t *testing.T) { checkQueries(t, samples) })
}

// checkQueries holds the dashboard, the recording rules and the alerts against what the
// binary exports: every metric and every label must be there. What exists only after an
// event that this test does not cause must at least be declared.
func checkQueries(t *testing.T, samples []sample) {
	promtool := testkit.RequireTool(t, "promtool")
	known := map[string]map[string]bool{} // name → labels
	add := func(name string, labels ...string) {
		if known[name] == nil {
			known[name] = map[string]bool{"job": true, "instance": true}
		}
		for _, l := range labels {
			known[name][l] = true
		}
	}
	for _, s := range samples {
		add(s.name, slices.Collect(maps.Keys(s.labels))...)
	}
	exported := len(known)
	for name, labels := range declared() {
		for _, suffix := range []string{"", "_bucket", "_sum", "_count"} {
			if suffix == "" || known[name+suffix] == nil {
				add(name+suffix, append(labels, "le")...)
			}
		}
	}
	add("up")
	if exported < 60 {
		t.Fatalf("only %d names are exported", exported)
	}
	root := "../.."
	dashboard, err := os.ReadFile(filepath.Join(root, "deploy/grafana/waybill.json"))
	if err != nil {
		t.Fatal(err)
	}
	var d struct {
		Panels []struct {
			Title   string
			Type    string
			Targets []struct{ Expr string }
		}
	}
	if err := json.Unmarshal(dashboard, &d); err != nil {
		t.Fatal(err)
	}
	type query struct{ where, expr string }
	var queries []query
	for _, p := range d.Panels {
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %q asks for nothing", p.Title)
		}
		for _, target := range p.Targets {
			queries = append(queries, query{p.Title, target.Expr})
		}
	}
	if len(d.Panels) < 20 || d.Panels[1].Title != "Actions by phase and outcome" {
		t.Error("phase and outcome come first (S1)")
	}
	// promtool judges their syntax, as rules.
	var rules strings.Builder
	rules.WriteString("groups:\n- name: dashboard\n  rules:\n")
	for i, q := range queries {
		expr := strings.NewReplacer("$__rate_interval", "1m", "$__range", "1h").Replace(q.expr)
		fmt.Fprintf(&rules, "  - record: dashboard:panel%d:x\n    expr: %q\n", i, expr)
	}
	file := filepath.Join(t.TempDir(), "dashboard.yaml")
	if err := os.WriteFile(file, []byte(rules.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(root, "deploy/prometheus")
	for _, args := range [][]string{{"check", "rules", file}, {"check", "rules", dir + "/recording.rules.yaml", dir + "/alerts.rules.yaml"}, {"test", "rules", dir + "/rules_test.yaml"}} {
		if out, err := exec.Command(promtool, args...).CombinedOutput(); err != nil {
			t.Errorf("promtool %v: %v\n%s", args[:2], err, out)
		}
	}

	ruleFiles := ""
	for _, name := range []string{"recording.rules.yaml", "alerts.rules.yaml"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		ruleFiles += string(b)
	}
	for _, m := range regexp.MustCompile(`(?m)^      - record: (\S+)`).FindAllStringSubmatch(ruleFiles, -1) {
		add(m[1], "route", "code", "phase", "outcome", "stage")
	}
	for _, block := range regexp.MustCompile(`(?m)^      - (?:record|alert): `).Split(ruleFiles, -1)[1:] {
		name, rest, _ := strings.Cut(block, "\n")
		_, expr, _ := strings.Cut(rest, "expr:")
		for _, end := range []string{"\n        for:", "\n        labels:", "\n        annotations:", "\n# "} {
			expr, _, _ = strings.Cut(expr, end)
		}
		queries = append(queries, query{name, expr})
	}
	metric := regexp.MustCompile(`\b((?:waybill|process|go|up)(?:_[a-z0-9_]+)?|[a-z_]+:waybill_[a-z0-9_:]+)\b(\{[^}]*\})?`)
	matcher := regexp.MustCompile(`([a-z_]+)\s*(?:=~|!~|!=|=)\s*"`)
	asked := 0
	for _, q := range queries {
		for _, m := range metric.FindAllStringSubmatch(strings.ReplaceAll(q.expr, "\n", " "), -1) {
			labels, ok := known[m[1]]
			if !ok {
				t.Errorf("%s asks for %s, which is not exported", q.where, m[1])
				continue
			}
			asked++
			for _, l := range matcher.FindAllStringSubmatch(m[2], -1) {
				if !labels[l[1]] {
					t.Errorf("%s: %s has no label %s", q.where, m[1], l[1])
				}
			}
		}
	}
	if asked < 60 {
		t.Errorf("only %d metrics were found in the queries", asked)
	}
	// Every alert has its runbook and its test.
	tests, err := os.ReadFile(filepath.Join(dir, "rules_test.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	alerts := regexp.MustCompile(`(?m)^      - alert: (\S+)`).FindAllStringSubmatch(ruleFiles, -1)
	if len(alerts) < 10 {
		t.Errorf("only %d alerts", len(alerts))
	}
	for _, a := range alerts {
		if _, err := os.Stat(filepath.Join(root, "docs/runbooks", a[1]+".md")); err != nil {
			t.Error(err)
		}
		if !strings.Contains(ruleFiles, "docs/runbooks/"+a[1]+".md") || !strings.Contains(string(tests), "alertname: "+a[1]+"\n        exp_alerts:\n          - exp_labels") {
			t.Errorf("%s has no runbook_url, or no test in which it fires", a[1])
		}
	}
}

// declared lists the collectors of the product with their labels.
func declared() map[string][]string {
	r, ok := metrics.New("", "").Gatherer().(*prometheus.Registry)
	if !ok {
		return nil
	}
	ch := make(chan *prometheus.Desc, 1000)
	r.Describe(ch)
	close(ch)
	out := map[string][]string{}
	desc := regexp.MustCompile(`fqName: "([^"]+)".*variableLabels: \{([^}]*)\}`)
	for d := range ch {
		if m := desc.FindStringSubmatch(d.String()); m != nil {
			out[m[1]] = strings.Split(m[2], ",")
		}
	}
	return out
}
