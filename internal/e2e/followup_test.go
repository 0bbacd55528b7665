package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

const shopHost, otherHost = "shop.example.test", "other.example.test"

// shop is an origin that does what is asked and hides it: an order is made and the
// connection closed, the list of orders shows it after a while.
type shop struct {
	*testkit.Upstream
	mu        sync.Mutex
	orders    map[string]string // reference → marker
	mute      bool              // orders are lost before they are made
	jobs      map[string]int    // polls so far
	elsewhere string            // origin of the status resources, "" for its own
}

func newShop(t testing.TB, ca *testkit.CA) *shop {
	s := &shop{orders: map[string]string{}, jobs: map[string]int{}}
	s.Upstream = testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(shopHost), Handler: s.handle})
	return s
}

func (s *shop) handle(a testkit.Arrival) []testkit.Step {
	s.mu.Lock()
	defer s.mu.Unlock()
	path, query, _ := strings.Cut(a.Target, "?")
	jsonReply := func(status int, v any, fields ...string) []testkit.Step {
		b, _ := json.Marshal(v)
		return []testkit.Step{testkit.Reply(status, string(b), append([]string{"Content-Type", "application/json"}, fields...)...)}
	}
	var in struct {
		Ref      string            `json:"ref"`
		Metadata map[string]string `json:"metadata"`
		Items    []struct {
			ID string `json:"id"`
		} `json:"items"`
	}
	_ = json.Unmarshal(a.Body, &in)
	switch {
	case a.Method == http.MethodPost && path == "/v1/orders":
		if !s.mute {
			s.orders[in.Ref] = in.Metadata["waybill"]
		}
		return []testkit.Step{testkit.Close()}
	case a.Method == http.MethodGet && path == "/v1/orders":
		found := []map[string]string{}
		for ref, marker := range s.orders {
			if query == "marker="+marker && marker != "" || query == "ref="+ref {
				found = append(found, map[string]string{"ref": ref, "state": "paid"})
			}
		}
		return jsonReply(200, map[string]any{"data": found})
	case a.Method == http.MethodPost && path == "/v1/jobs":
		s.jobs[in.Ref] = 0
		return []testkit.Step{testkit.Reply(202, "{}", "Location", s.elsewhere+"/v1/jobs/"+in.Ref+"?sig=s3cret")}
	case a.Method == http.MethodGet && strings.HasPrefix(path, "/v1/jobs/"):
		ref := strings.TrimPrefix(path, "/v1/jobs/")
		s.jobs[ref]++
		state := "running"
		if s.jobs[ref] > 2 {
			state = map[bool]string{true: "failed", false: "succeeded"}[strings.HasPrefix(ref, "bad")]
		}
		return jsonReply(200, map[string]any{"status": state, "ref": ref})
	case a.Method == http.MethodPost && path == "/v1/batch":
		out := []map[string]any{}
		for i, it := range in.Items {
			if i < 4 {
				out = append([]map[string]any{{"id": it.ID, "code": map[bool]int{true: 422, false: 201}[i == 1]}}, out...)
			}
		}
		return jsonReply(200, map[string]any{"results": out})
	default:
		return jsonReply(404, map[string]any{})
	}
}

func shopRoute(addr, contractYAML string) string {
	return fmt.Sprintf(`  - name: shop
    match: {host: %s}
    inject: [{header: Authorization, value: "Bearer ${secret}", credential: pay}]
    upstream: {roots: roots.pem, resolve: {%s: "%s"}}
    contract:
%s`, shopHost, shopHost, addr, contractYAML)
}

func shopURL(path string) string { return "https://" + shopHost + path }

// shopRig is a proxy with a route to the shop.
func shopRig(t testing.TB, ca *testkit.CA, s *shop, contractYAML string) *rig {
	r := newRig(t, ca, rigOptions{origins: map[string]string{}, first: shopRoute(s.Addr(), contractYAML)})
	r.start()
	return r
}

func (r *rig) client() *http.Client {
	return testkit.NewClient(r.t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), Timeout: patience})
}

func (r *rig) post(path, body string, fields ...string) *testkit.Response {
	r.t.Helper()
	return testkit.Send(r.t, r.client(), http.MethodPost, shopURL(path), body, append([]string{"Content-Type", "application/json"}, fields...)...)
}

// document is an action as the CLI shows it.
func (r *rig) document(id string) (d struct {
	Action   dispatch.ActionView    `json:"action"`
	Envelope outcome.Envelope       `json:"envelope"`
	Items    []dispatch.Child       `json:"items"`
	Events   []dispatch.StoredEvent `json:"events"`
}) {
	r.t.Helper()
	code, out, errs := r.cli("action", id, "--json")
	if code != 0 {
		r.t.Fatalf("waybill action: %d %s", code, errs)
	}
	if err := json.Unmarshal([]byte(out), &d); err != nil {
		r.t.Fatal(err)
	}
	return d
}

const byMarker = `      marker: {json: metadata.waybill}
      reconcile:
        get: /v1/orders?marker=${marker}
        committed_when: {json: {"data[0].state": [paid]}}
        not_found_when: {empty: [data]}
        not_found: rejected
        visible_after: 200ms
        background: false
`

// TestReconcileAfterKill: an order is made, its answer lost, the proxy killed. After the
// restart the query finds the order by its marker, with the route's credential; the
// attempt stays unknown, the guard is lifted, and nothing was sent twice.
func TestReconcileAfterKill(t *testing.T) {
	contract.Covers(t, "K1", "K3", "K6", "K7", "T3", "O3")
	ca := testkit.NewCA(t)
	s := newShop(t, ca)
	r := shopRig(t, ca, s, byMarker)
	resp := r.post("/v1/orders", `{"ref":"a","metadata":{"x":"y"}}`)
	id := resp.Header.Get("Waybill-Invocation")
	if resp.Status != 424 || !strings.HasPrefix(resp.Header.Get("Waybill-Outcome"), "unknown") {
		t.Fatalf("%d %v", resp.Status, resp.Header)
	}
	if again := r.post("/v1/orders", `{"ref":"a","metadata":{"x":"y"}}`); !strings.Contains(string(again.Body), "DUPLICATE_SUSPECTED") {
		t.Fatalf("an equal order was not refused: %d %s", again.Status, again.Body)
	}
	r.kill()
	r.start()
	code, out, errs := r.cli("reconcile", id)
	if code != 0 || !strings.Contains(out, "committed (remote_query)") {
		t.Fatalf("waybill reconcile: %d %s %s", code, out, errs)
	}
	d := r.document(id)
	ev := d.Envelope.Evidence
	if d.Action.Outcome != "committed" || ev.ResponseComplete || ev.Source != outcome.RemoteQuery || ev.Attempts[0].Outcome != outcome.Unknown || len(ev.Resolutions) != 1 {
		t.Errorf("%+v %+v", d.Action, ev)
	}
	q := r.document(ev.Resolutions[0].Query)
	if q.Action.Link == nil || q.Action.Link.Of != id || q.Action.Method != http.MethodGet || q.Envelope.Evidence.LinkedTo != id {
		t.Errorf("the query is no linked action: %+v", q.Action)
	}
	s.RequireCount(t, 1, http.MethodPost, "/v1/orders")
	asked := s.Where(func(a testkit.Arrival) bool { return a.Method == http.MethodGet })
	if len(asked) != 1 || asked[0].Header.Get("Authorization") != "Bearer "+r.canary.Value() || asked[0].Target != "/v1/orders?marker="+id {
		t.Fatalf("%+v", asked)
	}
	// Resolved: the same order may be sent again; and a second attestation contradicts nothing.
	if resp := r.post("/v1/orders", `{"ref":"a","metadata":{"x":"y"}}`); strings.Contains(string(resp.Body), "DUPLICATE_SUSPECTED") {
		t.Errorf("the guard is still up: %s", resp.Body)
	}
	if code, out, _ := r.cli("attest", id, "--outcome", "rejected", "--reason", "no"); code == 0 {
		t.Errorf("committed became rejected: %s", out)
	}
	r.verify()
	r.kill()
	if strings.Contains(r.logs.String(), r.canary.Value()) {
		t.Error("the secret is in the log")
	}
}

// TestNotFoundNeedsTime: that the remote side knows nothing of an order means something
// only when the order would show by now; and attestations name their operator.
func TestNotFoundNeedsTime(t *testing.T) {
	contract.Covers(t, "K6", "K5", "K1", "K2")
	ca := testkit.NewCA(t)
	s := newShop(t, ca)
	s.mute = true
	r := shopRig(t, ca, s, strings.Replace(byMarker, "200ms", "400ms", 1))
	id := r.post("/v1/orders", `{"ref":"a"}`).Header.Get("Waybill-Invocation")
	if code, out, _ := r.cli("reconcile", id, "--json"); code != 1 || !strings.Contains(out, `"unknown"`) {
		t.Fatalf("not found at once: %d %s", code, out)
	}
	testkit.Eventually(t, func() error {
		if code, out, errs := r.cli("reconcile", id); code != 0 || !strings.Contains(out, "rejected (remote_query)") {
			return fmt.Errorf("%d %s %s", code, out, errs)
		}
		return nil
	})
	d := r.document(id)
	if d.Action.Outcome != "rejected" || d.Envelope.Evidence.Queries < 2 || d.Action.DispatchStarted != true {
		t.Errorf("%+v", d.Action)
	}
	// Another one, which a person settles.
	other := r.post("/v1/orders", `{"ref":"b"}`).Header.Get("Waybill-Invocation")
	if code, _, errs := r.cli("attest", other, "--outcome", "not_attempted", "--reason", "x"); code != 2 {
		t.Errorf("not_attempted: %d %s", code, errs)
	}
	if code, out, errs := r.cli("attest", other, "--outcome", "committed", "--reason", "seen in the dashboard", "--operator", "ada"); code != 0 || !strings.Contains(out, "operator_attested") {
		t.Fatalf("%d %s %s", code, out, errs)
	}
	ev := r.document(other).Envelope.Evidence
	if ev.ResponseComplete || ev.Source != outcome.OperatorAttested || ev.Resolutions[0].Operator != "ada" || ev.Resolutions[0].Reason != "seen in the dashboard" {
		t.Errorf("%+v", ev)
	}
	// The caller cannot attest: it is for the admin socket.
	if resp := testkit.Send(t, r.client(), http.MethodPost, "http://waybill.internal/v1/actions/"+other+"/attest", `{"outcome":"rejected","operator":"me","reason":"x"}`); resp.Status < 400 {
		t.Errorf("a caller attested: %d", resp.Status)
	}
	r.verify()
}

// TestBackgroundReconcile: the proxy asks by itself, also about what an earlier process left.
func TestBackgroundReconcile(t *testing.T) {
	contract.Covers(t, "K6")
	ca := testkit.NewCA(t)
	s := newShop(t, ca)
	r := shopRig(t, ca, s, `      reconcile:
        get: /v1/orders?ref=${request.json.ref}
        committed_when: {json: {"data[0].state": paid}}
        every: 300ms
`)
	first := r.post("/v1/orders", `{"ref":"one"}`).Header.Get("Waybill-Invocation")
	r.settles(first, "committed")
	second := r.post("/v1/orders", `{"ref":"two"}`).Header.Get("Waybill-Invocation")
	r.kill()
	r.start()
	r.settles(second, "committed")
	s.RequireCount(t, 2, http.MethodPost, "/v1/orders")
}

func (r *rig) settles(id, want string) {
	r.t.Helper()
	testkit.Eventually(r.t, func() error {
		for _, v := range r.actions() {
			if v.InvocationID == id && v.Outcome == want {
				return nil
			}
		}
		return errors.New(id + " is not " + want)
	})
}

const jobsYAML = "      async: {every: 20ms, max_every: 40ms}\n"

// TestJobIsFollowed: a 202 commits the submission only; its job is an action of its own
// with its own end, also across a kill; the status resource's signature is not shown.
func TestJobIsFollowed(t *testing.T) {
	contract.Covers(t, "A7", "R3")
	ca := testkit.NewCA(t)
	s := newShop(t, ca)
	r := shopRig(t, ca, s, strings.Replace(jobsYAML, "20ms, max_every: 40ms", "300ms, max_every: 300ms", 1))
	for ref, want := range map[string]string{"good": "committed", "bad": "rejected"} {
		resp := r.post("/v1/jobs", `{"ref":"`+ref+`"}`)
		job := resp.Header.Get("Waybill-Job")
		if resp.Status != 202 || job == "" || !strings.HasPrefix(resp.Header.Get("Waybill-Outcome"), "committed") {
			t.Fatalf("%d %v", resp.Status, resp.Header)
		}
		fetched := testkit.Send(t, r.client(), http.MethodGet, "http://waybill.internal/v1/actions/"+job+"/result", "")
		if fetched.Status != 202 || !strings.Contains(string(fetched.Body), "RESULT_PENDING") {
			t.Errorf("a running job: %d %s", fetched.Status, fetched.Body)
		}
		if ref == "bad" {
			r.kill()
			r.start()
		}
		waited := testkit.Send(t, r.client(), http.MethodGet, "http://waybill.internal/v1/actions/"+job+"?wait=20", "")
		if waited.Status != 200 || !strings.Contains(string(waited.Body), `"outcome":"`+want+`"`) {
			t.Fatalf("%s: %d %s", ref, waited.Status, waited.Body)
		}
		d := r.document(job)
		parent := r.document(resp.Header.Get("Waybill-Invocation"))
		if d.Action.Outcome != want || d.Action.Link.Kind != dispatch.LinkJob || d.Envelope.Evidence.LinkedTo != resp.Header.Get("Waybill-Invocation") || parent.Action.Outcome != "committed" || parent.Envelope.Evidence.Job.ID != ref {
			t.Errorf("%+v\n%+v", d.Action, parent.Envelope.Evidence.Job)
		}
		if shown, _ := json.Marshal(parent.Envelope); strings.Contains(string(shown), "s3cret") {
			t.Errorf("the envelope shows the signature: %s", shown)
		}
		result := testkit.Send(t, r.client(), http.MethodGet, "http://waybill.internal/v1/actions/"+job+"/result", "")
		if result.Status != 200 || !strings.Contains(string(result.Body), `"ref":"`+ref+`"`) {
			t.Errorf("the job's answer: %d %s", result.Status, result.Body)
		}
	}
	s.RequireCount(t, 2, http.MethodPost, "/v1/jobs")
	r.verify()
}

// TestJobElsewhereGetsNoCredential: a status resource on another origin whose route would
// inject is not asked for, nor can the caller be led there.
func TestJobElsewhereGetsNoCredential(t *testing.T) {
	contract.Covers(t, "A7", "R3", "V2")
	ca := testkit.NewCA(t)
	s := newShop(t, ca)
	other := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(otherHost), Handler: func(testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Reply(200, `{"status":"succeeded"}`)}
	}})
	s.elsewhere = "https://" + otherHost
	r := newRig(t, ca, rigOptions{origins: map[string]string{}, first: shopRoute(s.Addr(), jobsYAML) + fmt.Sprintf(`  - name: other
    match: {host: %s}
    inject: [{header: Authorization, value: "Bearer ${secret}", credential: pay}]
    upstream: {roots: roots.pem, resolve: {%s: "%s"}}
`, otherHost, otherHost, other.Addr())})
	r.start()
	resp := r.post("/v1/jobs", `{"ref":"x"}`)
	job := resp.Header.Get("Waybill-Job")
	testkit.Eventually(t, func() error {
		if n := len(other.Arrivals()); n != 0 {
			t.Fatalf("%d requests reached the other origin", n)
		}
		if d := r.document(job); d.Envelope.Evidence.Job == nil || d.Envelope.Evidence.Job.State != "lost" || d.Action.Outcome != "unknown" {
			return fmt.Errorf("%+v", d.Action)
		}
		return nil
	})
	follow := testkit.Send(t, r.client(), http.MethodGet, "https://"+otherHost+"/v1/jobs/x?sig=s3cret", "")
	if !strings.Contains(string(follow.Body), "REDIRECT_CROSS_ORIGIN") {
		t.Errorf("the caller was led there: %d %s", follow.Status, follow.Body)
	}
	if n := len(other.Arrivals()); n != 0 {
		t.Errorf("%d requests reached the other origin", n)
	}
}

// TestBatchItems: four of five items are resolved by the answer, the fifth stays unknown
// and guards; advice is each item's own.
func TestBatchItems(t *testing.T) {
	contract.Covers(t, "F7")
	ca := testkit.NewCA(t)
	s := newShop(t, ca)
	r := shopRig(t, ca, s, "      batch: {items: items, item_id: id, results: results, result_id: id, result_status: code}\n")
	body := `{"items":[{"id":"a"},{"id":"b"},{"id":"c"},{"id":"d"},{"id":"e"}]}`
	resp := r.post("/v1/batch", body)
	d := r.document(resp.Header.Get("Waybill-Invocation"))
	want := []string{"a committed never", "b rejected after_correction", "c committed never", "d committed never", "e unknown reconcile"}
	var got []string
	for _, c := range d.Items {
		got = append(got, fmt.Sprintf("%s %s %s", c.ID, c.Outcome, c.Retry))
	}
	if strings.Join(got, ",") != strings.Join(want, ",") || d.Action.Outcome != "committed" || d.Envelope.Evidence.Items.Unknown != 1 {
		t.Errorf("%q\n%+v", got, d.Envelope.Evidence.Items)
	}
	list := testkit.Send(t, r.client(), http.MethodGet, "http://waybill.internal/v1/actions/"+d.Action.InvocationID+"/items", "")
	var items []dispatch.Child
	if err := json.Unmarshal(list.Body, &items); err != nil || len(items) != 5 {
		t.Errorf("%v %s", err, list.Body)
	}
	if code, out, _ := r.cli("action", d.Action.InvocationID); code != 0 || !strings.Contains(out, "items") {
		t.Errorf("%d %s", code, out)
	}
	if again := r.post("/v1/batch", body); !strings.Contains(string(again.Body), "DUPLICATE_SUSPECTED") {
		t.Errorf("the whole was sent again although an item is unknown: %d", again.Status)
	}
}

// TestImportedEvidence: what one journal proves settles the same action in a copy of it
// that has it as unknown, with its origin and place there, and is taken once.
func TestImportedEvidence(t *testing.T) {
	contract.Covers(t, "K4", "K2")
	ca := testkit.NewCA(t)
	s := newShop(t, ca)
	r := shopRig(t, ca, s, "      repeatable: false\n")
	id := r.post("/v1/orders", `{"ref":"a"}`).Header.Get("Waybill-Invocation")
	aid, err := dispatch.ParseActionID(id)
	if err != nil {
		t.Fatal(err)
	}
	d := r.document(id)
	e := dispatch.Evidence{Version: 1, Origin: "journal:0102", Action: aid, Seq: 41, Outcome: outcome.Committed, Source: outcome.RemoteResponse, Fingerprint: d.Envelope.Evidence.Fingerprint, Status: 201}
	file := func(e dispatch.Evidence) string {
		b, err := json.Marshal(e)
		if err != nil {
			t.Fatal(err)
		}
		r.write("e.json", string(b))
		return filepath.Join(r.dir, "e.json")
	}
	wrong := e
	wrong.Fingerprint = "sha256:other"
	if code, out, _ := r.cli("journal", "import", file(wrong)); code == 0 {
		t.Errorf("evidence about another request was taken: %s", out)
	}
	if code, out, errs := r.cli("journal", "import", file(e)); code != 0 || !strings.Contains(out, "committed") {
		t.Fatalf("%d %s %s", code, out, errs)
	}
	if code, _, errs := r.cli("journal", "import", file(e)); code != 0 {
		t.Errorf("a second time: %s", errs)
	}
	after := r.document(id)
	res := after.Envelope.Evidence.Resolutions
	if len(res) != 1 || res[0].Origin != "journal:0102" || res[0].OriginSequence != 41 || res[0].Sequence <= d.Envelope.Evidence.DispatchSequence || after.Envelope.Evidence.ResponseComplete {
		t.Errorf("%+v", res)
	}
	if last := after.Events[len(after.Events)-1]; last.Type != dispatch.EvidenceImported {
		t.Errorf("it is not the last event: %v", last.Type)
	}
	refused := e
	refused.Outcome, refused.Seq = outcome.Rejected, 42
	if code, out, _ := r.cli("journal", "import", file(refused)); code == 0 {
		t.Errorf("committed became rejected: %s", out)
	}
	if code, out, errs := r.cli("journal", "evidence", id); code != 0 || !strings.Contains(out, `"origin"`) {
		t.Errorf("%d %s %s", code, out, errs)
	}
	r.verify()
}
