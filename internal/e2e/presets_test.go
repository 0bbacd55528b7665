package e2e

import (
	"bytes"
	"compress/gzip"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"waybill/dispatch"
	"waybill/internal/config"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
	"waybill/routes"
)

// presetSecret is the one secret of a preset's role.
func presetSecret(name string) string {
	return "wbsecret-" + strings.ReplaceAll(name, "-", "") + "-0123456789"
}

func bearer(name string) map[string]string {
	return map[string]string{"Authorization": "Bearer " + presetSecret(name)}
}

func basic(user, name string) map[string]string {
	return map[string]string{"Authorization": "Basic " + base64.StdEncoding.EncodeToString([]byte(user+":"+presetSecret(name)))}
}

// presetForms is how each part of each preset authenticates, written down a second time:
// what the service is to get, and nothing besides. nil: a signature; an empty map: refused.
var presetForms = map[string]map[string]string{
	"adyen/api": {"X-Api-Key": presetSecret("adyen")}, "anthropic/batches": {"X-Api-Key": presetSecret("anthropic")}, "anthropic/api": {"X-Api-Key": presetSecret("anthropic")},
	"aws/s3": nil, "aws/dynamodb": nil, "aws/sqs": nil, "aws/sns": nil, "aws/lambda": nil, "aws/ec2": nil,
	"azure-openai/api": {"Api-Key": presetSecret("azure-openai")}, "cloudflare/api": bearer("cloudflare"),
	"datadog/api": {"Dd-Api-Key": presetSecret("datadog-api"), "Dd-Application-Key": presetSecret("datadog-app")},
	"discord/api": {"Authorization": "Bot " + presetSecret("discord")}, "gemini/api": {"X-Goog-Api-Key": presetSecret("gemini")},
	"github/graphql": bearer("github"), "github/rest": bearer("github"), "github/git": basic("x-access-token", "github"),
	"gitlab/api": bearer("gitlab"), "gitlab/git": basic("oauth2", "gitlab"),
	"huggingface/git": basic("waybill", "huggingface"), "huggingface/inference": bearer("huggingface"), "huggingface/hub": bearer("huggingface"),
	"jira/bulk": basic("me@example.com", "jira"), "jira/api": basic("me@example.com", "jira"),
	"kubernetes/api": bearer("kubernetes"), "linear/api": {"Authorization": presetSecret("linear")}, "mistral/api": bearer("mistral"),
	"notion/api": bearer("notion"), "npm/api": bearer("npm"), "openai/batches": bearer("openai"), "openai/responses": bearer("openai"), "openai/api": bearer("openai"), "openrouter/api": bearer("openrouter"),
	"pagerduty/incidents": {"Authorization": "Token token=" + presetSecret("pagerduty")}, "pagerduty/api": {"Authorization": "Token token=" + presetSecret("pagerduty")},
	"paypal/token": {}, "paypal/api": bearer("paypal"), "sendgrid/api": bearer("sendgrid"), "sentry/api": bearer("sentry"),
	"shopify/graphql": {"X-Shopify-Access-Token": presetSecret("shopify")}, "shopify/rest": {"X-Shopify-Access-Token": presetSecret("shopify")},
	"slack/api": bearer("slack"), "square/api": bearer("square"),
	"stripe/v1-post": bearer("stripe"), "stripe/v1-delete": bearer("stripe"), "stripe/api": bearer("stripe"),
	"twilio/api": basic("ACxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", "twilio"), "vercel/api": bearer("vercel"),
}

// reconcileForms are status and form of Waybill's own "outcome unknown", by dialect
// (docs/dialects.md).
var reconcileForms = map[string]struct {
	status int
	body   string
}{
	"default": {424, `"error":{"code":"`}, "openai": {424, `"error":{`}, "anthropic": {424, `"type":"error"`}, "google": {424, `"FAILED_PRECONDITION"`}, "stripe": {424, `"error":{`},
	"github": {422, `"documentation_url"`}, "git": {424, "Outcome unknown"}, "slack": {200, `"ok":false`}, "discord": {424, `"code":0`}, "graphql": {200, `"data":null`},
	"notion": {424, `"object":"error"`}, "huggingface": {424, `"error":"`}, "square": {424, `"errors":[`}, "kubernetes": {424, `"kind":"Status"`},
	"aws-json": {400, `"__type":"waybill#`}, "aws-query": {400, "<ErrorResponse"}, "aws-ec2": {400, "<Response"}, "aws-rest-xml": {400, "<Error>"}, "aws-rest-json": {400, `"message"`},
}

// presetHead are all fields in which any API takes credentials.
var presetHead = []string{"Authorization", "X-Api-Key", "Api-Key", "X-Goog-Api-Key", "Private-Token", "Job-Token", "Deploy-Token", "X-Auth-Email", "X-Auth-Key", "X-Auth-User-Service-Key",
	"X-Shopify-Access-Token", "Dd-Api-Key", "Dd-Application-Key", "X-Sentry-Auth", "X-Amz-Security-Token", "Cookie"}

// presetOthers are the further forms that an API accepts, besides Authorization and Cookie.
var presetOthers = map[string][]string{
	"gitlab": {"Private-Token", "Job-Token", "Deploy-Token"}, "cloudflare": {"X-Auth-Email", "X-Auth-Key", "X-Auth-User-Service-Key"},
	"sentry": {"X-Sentry-Auth"}, "aws": {"X-Amz-Security-Token"},
}

const callersOwn = "waybill-placeholder-not-a-key"

// scripted is every service at once: it does what is asked, and loses the answer when the
// request says so.
type scripted struct {
	*testkit.Upstream
	mu    sync.Mutex
	keys  map[string]string // what was done under a key
	polls map[string]int
	// versions are the fields anthropic-version of polls, and the keys with which they came.
	versions []string
	found    []string // keys of incidents
}

func (s *scripted) handle(a testkit.Arrival) []testkit.Step {
	s.mu.Lock()
	defer s.mu.Unlock()
	path, query, _ := strings.Cut(a.Target, "?")
	reply := func(status int, body string, fields ...string) []testkit.Step {
		fields = append([]string{"Content-Type", "application/json"}, fields...)
		if strings.Contains(a.Header.Get("Accept-Encoding"), "gzip") { // as the vendors' libraries ask for
			var b bytes.Buffer
			z := gzip.NewWriter(&b)
			_, _ = z.Write([]byte(body))
			_ = z.Close()
			body, fields = b.String(), append(fields, "Content-Encoding", "gzip")
		}
		return []testkit.Step{testkit.Reply(status, body, fields...)}
	}
	key := a.Header.Get("Idempotency-Key")
	known := key != "" && s.keys[key] == string(a.Body)
	if key != "" && !known {
		s.keys[key] = string(a.Body)
	}
	switch {
	case a.Header.Get("X-Test") == "lose" && !known:
		if path == "/incidents" {
			var in struct {
				Incident map[string]any `json:"incident"`
			}
			_ = json.Unmarshal(a.Body, &in)
			s.found = append(s.found, fmt.Sprint(in.Incident["incident_key"]))
		}
		return []testkit.Step{testkit.Close()}
	case path == "/incidents" && a.Method == http.MethodGet:
		_, marker, _ := strings.Cut(query, "incident_key=")
		if slices.Contains(s.found, marker) {
			return reply(200, `{"incidents":[{"id":"P1"}]}`)
		}
		return reply(200, `{"incidents":[]}`)
	case path == "/v1/batches" && a.Method == http.MethodPost:
		return reply(200, `{"id":"batch_1","status":"validating"}`)
	case path == "/v1/messages/batches" && a.Method == http.MethodPost:
		return reply(200, `{"id":"msgbatch_1","processing_status":"in_progress"}`)
	case path == "/v1/responses" && a.Method == http.MethodPost && strings.Contains(string(a.Body), `"background":true`):
		return reply(200, `{"id":"resp_1","status":"queued"}`)
	case path == "/v1/responses" && a.Method == http.MethodPost:
		return reply(200, `{"id":"resp_0","status":"completed"}`)
	case path == "/v1/batches/batch_1", path == "/openai/operations/1", path == "/v1/messages/batches/msgbatch_1", path == "/v1/responses/resp_1":
		if strings.Contains(path, "messages") {
			s.versions = append(s.versions, a.Header.Get("Anthropic-Version")+" "+a.Header.Get("X-Api-Key"))
		}
		// The states that the service goes through; the last one is the end.
		states := map[string][]string{
			"/v1/batches/batch_1": {"in_progress", "finalizing", "completed"}, "/openai/operations/1": {"in_progress", "in_progress", "Succeeded"},
			"/v1/messages/batches/msgbatch_1": {"in_progress", "canceling", "ended"}, "/v1/responses/resp_1": {"queued", "in_progress", "completed"},
		}[path]
		s.polls[path]++
		return reply(200, fmt.Sprintf(`{"id":%q,%q:%q}`, path[strings.LastIndexByte(path, '/')+1:], map[bool]string{true: "processing_status", false: "status"}[strings.Contains(path, "messages")], states[min(s.polls[path], len(states))-1]))
	case strings.HasPrefix(path, "/openai/") && a.Header.Get("X-Test") == "later":
		return reply(202, "{}", "Operation-Location", "/openai/operations/1")
	case strings.HasSuffix(path, "/issue/bulk"):
		return reply(201, `{"issues":[{"id":"10001"},{"id":"10002"}],"errors":[]}`)
	}
	return reply(200, `{"done":"`+key+`"}`)
}

// of are the requests that the test sent to a part, without the polls and queries that
// Waybill makes meanwhile.
func (s *scripted) of(p presetPart) []testkit.Arrival {
	return s.Where(func(a testkit.Arrival) bool {
		return a.Method == p.verb && "https://"+a.Authority+a.Target == p.url
	})
}

// presetPart is one route of one preset, as the test uses it.
type presetPart struct {
	name  string // preset/part
	route *routes.Route
	url   string
	verb  string
}

// usePresets writes a configuration with every part of every preset, each to the same
// scripted service.
func usePresets(t *testing.T, ca *testkit.CA) (*rig, *scripted, []presetPart) {
	t.Helper()
	example := func(p *config.Preset, indent string) string {
		w := ""
		for _, q := range p.With {
			if q.Default == "" {
				w += indent + "  " + q.Name + ": " + q.Example + "\n"
			}
		}
		if w != "" {
			w = indent + "with:\n" + w
		}
		return w
	}
	credentials, uses := "", ""
	files := map[string]string{}
	for _, p := range config.Presets() {
		names := []string{p.Name}
		if len(p.Credentials) > 0 {
			names = nil
			for _, role := range p.Credentials {
				names = append(names, p.Name+"-"+role)
			}
		}
		for _, n := range names {
			credentials += "  " + n + ": {from: {file: secret-" + n + "}}\n"
			files["secret-"+n] = presetSecret(n)
		}
		for _, part := range p.Parts {
			uses += "  - use: preset/" + p.Name + "/" + part + "\n" + example(p, "    ")
		}
	}
	aws, err := json.Marshal(map[string]any{"Version": 1, "AccessKeyId": "AKIDEXAMPLE", "SecretAccessKey": presetSecret("aws"), "SessionToken": "session-of-the-proxy"})
	if err != nil {
		t.Fatal(err)
	}
	files["secret-aws"] = string(aws)
	first, err := config.Parse("c.yaml", []byte("version: 1\ncredentials:\n"+credentials+"routes:\n"+uses))
	if err != nil {
		t.Fatal(err)
	}
	var hosts []string
	var parts []presetPart
	for _, r := range first.Snapshot.Routes() {
		u := first.Presets[r.Name]
		hosts = append(hosts, r.Match.Hosts[0])
		path, verb := "/x/y", http.MethodPost
		if len(r.Match.Paths) > 0 {
			path = strings.NewReplacer("/**", "/x/y", "/*", "/z").Replace(r.Match.Paths[0])
		}
		if len(r.Match.Methods) > 0 {
			verb = r.Match.Methods[0]
		}
		if u.Preset == "preset/stripe" && u.Part == "api" {
			path = "/v2/x/y" // /v1 is the other part's
		}
		parts = append(parts, presetPart{strings.TrimPrefix(u.Preset, "preset/") + "/" + u.Part, r, "https://" + r.Match.Hosts[0] + path, verb})
	}
	slices.Sort(hosts)
	s := &scripted{keys: map[string]string{}, polls: map[string]int{}}
	s.Upstream = testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(slices.Compact(hosts)...), Handler: s.handle})
	y := ""
	for _, p := range config.Presets() {
		for _, part := range p.Parts {
			r := first.Snapshot.Route(partRoute(first, p.Name, part))
			y += "  - use: preset/" + p.Name + "/" + part + "\n" + example(p, "    ")
			if r.Deny {
				continue
			}
			y += fmt.Sprintf("    upstream: {roots: roots.pem, resolve: {%q: %q}}\n", r.Match.Hosts[0], s.Addr())
			if r.Contract.Async != nil {
				y += "    contract: {async: {every: 10ms, max_every: 20ms}}\n"
			}
		}
	}
	rg := newRig(t, ca, rigOptions{top: credentials, routes: y})
	for name, text := range files {
		rg.write(name, text)
	}
	rg.start()
	return rg, s, parts
}

func partRoute(c *config.Config, preset, part string) string {
	for name, u := range c.Presets {
		if u.Preset == "preset/"+preset && u.Part == part {
			return name
		}
	}
	return ""
}

// TestPresetsAgainstScriptedServices: every part of every preset attaches its secret in its
// own form and nothing of the caller's, claims what its facts carry, and speaks its
// dialect; one that has no key contract does not repeat under a key (I1, I4, I10, L9).
func TestPresetsAgainstScriptedServices(t *testing.T) {
	contract.Covers(t, "I1", "I4", "I10", "L9", "K7", "A7", "F7", "C2")
	ca := testkit.NewCA(t)
	r, s, parts := usePresets(t, ca)
	c := r.client()
	if len(parts) != len(presetForms) {
		t.Errorf("%d parts, %d are known here", len(parts), len(presetForms))
	}
	ask := func(p presetPart, body string, more ...string) *testkit.Response {
		preset, _, _ := strings.Cut(p.name, "/")
		fields := []string{"Content-Type", "application/json", "Authorization", "Bearer " + callersOwn, "Cookie", "token=" + callersOwn}
		for name := range presetForms[p.name] {
			if name != "Authorization" {
				fields = append(fields, name, callersOwn)
			}
		}
		for _, name := range presetOthers[preset] {
			fields = append(fields, name, callersOwn)
		}
		return testkit.Send(t, c, p.verb, p.url, body, append(fields, more...)...)
	}
	for i, p := range parts {
		form, known := presetForms[p.name]
		if !known {
			t.Errorf("%s is not known here", p.name)
			continue
		}
		t.Run(strings.ReplaceAll(p.name, "/", "."), func(t *testing.T) {
			before := len(s.of(p))
			resp := ask(p, `{"n":1}`)
			if p.route.Deny {
				if len(s.of(p)) != before || !strings.Contains(string(resp.Body), "POLICY_DENIED") {
					t.Errorf("%d %s", resp.Status, resp.Body)
				}
				return
			}
			if resp.Status/100 != 2 || len(s.of(p)) != before+1 {
				t.Fatalf("%d %s", resp.Status, resp.Body)
			}
			checkForm(t, s.of(p)[before], form)
			checkRepeats(t, s, p, func(body string, more ...string) *testkit.Response { return ask(p, body, more...) }, fmt.Sprintf("key-%d", i))
		})
	}
	t.Run("follow-up", func(t *testing.T) { checkFollowUps(t, r, s, parts, ask) })
	r.kill()
	secrets := r.logs.String()
	for _, p := range config.Presets() {
		if strings.Contains(secrets, presetSecret(p.Name)) {
			t.Errorf("the log holds the secret of %s", p.Name)
		}
	}
	if err := filepath.WalkDir(r.data, func(path string, d os.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		data, err := os.ReadFile(path)
		if strings.Contains(string(data), "wbsecret-") {
			t.Errorf("%s holds a secret", path)
		}
		return err
	}); err != nil {
		t.Error(err)
	}
}

// checkForm holds the fields that arrived against what the service is to get.
func checkForm(t *testing.T, a testkit.Arrival, form map[string]string) {
	t.Helper()
	if strings.Contains(string(a.RawHead), callersOwn) {
		t.Errorf("the caller's placeholder arrived:\n%s", strings.ReplaceAll(string(a.RawHead), "\r", ""))
	}
	want := len(form)
	if form == nil {
		auth := a.Header.Get("Authorization")
		if !strings.HasPrefix(auth, "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/") || !strings.Contains(auth, "/eu-west-1/") || a.Header.Get("X-Amz-Security-Token") != "session-of-the-proxy" || a.Header.Get("X-Amz-Date") == "" {
			t.Errorf("signature %q %v", auth, a.Header)
		}
		if strings.Contains(string(a.RawHead), "wbsecret-") {
			t.Error("the key itself arrived")
		}
		return
	}
	for name, v := range form {
		if got := a.Values(name); len(got) != 1 || got[0] != v {
			t.Errorf("%s: %q, want %q", name, got, v)
		}
	}
	has := 0
	for _, name := range presetHead {
		has += len(a.Values(name))
	}
	if has != want {
		t.Errorf("%d fields of credentials arrived, want %d:\n%s", has, want, a.RawHead)
	}
}

// checkRepeats loses an answer, and asks again with the same key, as a library would.
func checkRepeats(t *testing.T, s *scripted, p presetPart, ask func(body string, more ...string) *testkit.Response, key string) {
	t.Helper()
	dialect := reconcileForms[p.route.Dialect.String()]
	const body = `{"incident":{"title":"t"},"issueUpdates":[],"n":2}`
	before := len(s.of(p))
	lost := ask(body, "X-Test", "lose", "Idempotency-Key", key)
	if !strings.HasPrefix(lost.Header.Get("Waybill-Outcome"), "unknown") {
		t.Fatalf("a lost answer: %d %v", lost.Status, lost.Header)
	}
	again := ask(body, "X-Test", "lose", "Idempotency-Key", key)
	sent := s.of(p)[before:]
	switch {
	case p.route.Key(p.verb) != nil:
		// Under the contract the repeat is a further attempt of the same action with the same key,
		// and a third one gets what is on record.
		if again.Status != 200 || len(sent) != 2 || again.Header.Get("Waybill-Invocation") != lost.Header.Get("Waybill-Invocation") {
			t.Fatalf("repeat with the key: %d %s, %d requests", again.Status, again.Body, len(sent))
		}
		for _, a := range sent {
			if a.Header.Get("Idempotency-Key") != key || string(a.Body) != body {
				t.Errorf("sent %v %s", a.Header, a.Body)
			}
		}
		third := ask(body, "X-Test", "lose", "Idempotency-Key", key)
		if string(third.Body) != string(again.Body) || third.Header.Get("Waybill-Replayed") == "" || len(s.of(p)) != before+2 {
			t.Errorf("a third: %d %v", third.Status, third.Header)
		}
		other := ask(`{"n":3}`, "Idempotency-Key", key)
		if !strings.Contains(string(other.Body), "IDEMPOTENCY_MISMATCH") && !strings.Contains(strings.Join(other.Header.Values("Proxy-Status"), " "), "IDEMPOTENCY_MISMATCH") {
			t.Errorf("another body under the key: %d %s", other.Status, other.Body)
		}
	case p.route.Repeatable(p.verb):
		if len(sent) != 2 {
			t.Errorf("a repeatable request was sent %d times", len(sent))
		}
	default:
		// No promise: the key is an ordinary field, and the repeat is stopped before anything is sent.
		if len(sent) != 1 || sent[0].Header.Get("Idempotency-Key") != key {
			t.Errorf("%d requests, want one with the caller's field", len(sent))
		}
		if !strings.HasPrefix(again.Header.Get("Waybill-Outcome"), "not_attempted") {
			t.Errorf("the repeat: %v", again.Header)
		}
		if lost.Status != dialect.status || !strings.Contains(strings.ReplaceAll(string(lost.Body), `": `, `":`), dialect.body) {
			t.Errorf("dialect %s: %d %s", p.route.Dialect, lost.Status, lost.Body)
		}
		if lost.Header.Get("Retry-After") != "" || lost.Header.Get("X-Should-Retry") != "false" {
			t.Errorf("a library may repeat: %v", lost.Header)
		}
	}
}

// checkFollowUps runs what a preset knows of jobs, items and queries.
func checkFollowUps(t *testing.T, r *rig, s *scripted, parts []presetPart, ask func(presetPart, string, ...string) *testkit.Response) {
	t.Helper()
	part := func(name string) presetPart {
		return parts[slices.IndexFunc(parts, func(p presetPart) bool { return p.name == name })]
	}
	for name, want := range map[string]int{"openai/batches": 200, "openai/responses": 200, "anthropic/batches": 200, "azure-openai/api": 202} {
		resp := ask(part(name), `{"job":1,"background":true}`, "X-Test", "later", "Accept-Encoding", "gzip, deflate")
		job := resp.Header.Get("Waybill-Job")
		if resp.Status != want || job == "" {
			t.Errorf("%s: %d %v", name, resp.Status, resp.Header)
			continue
		}
		end := r.await(job)
		if end.Action.Outcome != "committed" {
			t.Errorf("the job of %s: %+v", name, end.Action)
		}
	}
	// The poll says which version of the API it speaks, and has the credential of its route.
	s.mu.Lock()
	versions := slices.Compact(slices.Clone(s.versions))
	s.mu.Unlock()
	if want := "2023-06-01 " + presetSecret("anthropic"); len(versions) != 1 || versions[0] != want {
		t.Errorf("polls of a batch came with %q", versions)
	}
	// A response that is complete at once has the status of one that is not: it is no job.
	if resp := ask(part("openai/responses"), `{"input":"x"}`, "Accept-Encoding", "gzip"); resp.Status != 200 || resp.Header.Get("Waybill-Job") != "" {
		t.Errorf("a foreground response: %d %v", resp.Status, resp.Header)
	}
	bulk := ask(part("jira/bulk"), `{"issueUpdates":[{"fields":{}},{"fields":{}}]}`, "Accept-Encoding", "gzip")
	items := r.document(bulk.Header.Get("Waybill-Invocation")).Items
	if len(items) != 2 || items[0].Outcome != outcome.Committed || items[1].Outcome != outcome.Committed {
		t.Errorf("items of a bulk create: %+v", items)
	}
	cut := ask(part("jira/bulk"), `{"issueUpdates":[{"fields":{}},{"fields":{}},{"fields":{}}]}`)
	for _, it := range r.document(cut.Header.Get("Waybill-Invocation")).Items {
		if it.Outcome != outcome.Unknown {
			t.Errorf("an item of a bulk create that was not answered in full: %+v", it)
		}
	}
	lost := ask(part("pagerduty/incidents"), `{"incident":{"type":"incident","title":"again"}}`, "X-Test", "lose")
	id := lost.Header.Get("Waybill-Invocation")
	if code, out, errs := r.cli("reconcile", id); code != 0 || !strings.Contains(out, "committed (remote_query)") {
		if d := r.document(id); d.Action.Outcome != "committed" { // or the background was first
			t.Errorf("waybill reconcile: %d %s %s %v", code, out, errs, s.found)
		}
	}
	if !slices.Contains(s.found, id) {
		t.Errorf("no incident has the action's id %s as its key: %v", id, s.found)
	}
}

// await waits for the end of a job.
func (r *rig) await(id string) (d struct{ Action dispatch.ActionView }) {
	r.t.Helper()
	resp := testkit.Send(r.t, r.client(), http.MethodGet, "http://waybill.internal/v1/actions/"+id+"?wait=15", "")
	if resp.Status != 200 {
		r.t.Errorf("%d %s", resp.Status, resp.Body)
	}
	d.Action = r.document(id).Action
	return d
}
