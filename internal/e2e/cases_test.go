package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"

	"waybill/dispatch"
	"waybill/internal/testkit"
	"waybill/outcome"
)

// More names of the test bed: see newBed.
const (
	llmHost   = "llm.example.test"
	gitHost   = "git.example.test"
	evilHost  = "evil.example.test"
	storeHost = "store.example.test"
	adminHost = "admin.example.test"
	h2Host    = "h2.example.test"
	downHost  = "down.example.test" // refuses connections
)

// bed is one running process with an origin behind each of its names. What an origin
// does is said for each path, so that many cases share the process.
type bed struct {
	*rig
	ledgers map[string]*testkit.Ledger // by host

	mu      sync.Mutex
	turns   map[string][]testkit.Turn
	h2turns map[string][][]testkit.H2Step
	heard   bytes.Buffer // every answer that a client got (P3)
	roots   string       // of Waybill's CA, a file
	// What callers present to the proxy and put into a query: it may arrive at the
	// origin (query) or nowhere (token), and is told by nobody (C2, L4).
	token, query *testkit.Canary
	sniff        sniffer
}

// newBed starts origins for the names and writes a configuration with a route each:
//
//	pay, h2  Authorization: Bearer, /v1/**; h2 speaks HTTP/2
//	slow     pay's /v1/slow/**, which waits for 1 s only
//	msg      X-Api-Key        llm  X-Api-Key, streamed        git  Basic
//	evil     no secret        store  no secret, drops Authorization
//	admin    denied           down  refuses connections
//
// o adds to it; an origin there replaces the bed's own.
func newBed(t testing.TB, ca *testkit.CA, o rigOptions) *bed {
	t.Helper()
	b := &bed{ledgers: make(map[string]*testkit.Ledger), turns: make(map[string][]testkit.Turn), h2turns: make(map[string][][]testkit.H2Step),
		token: testkit.NewCanary(t), query: testkit.NewCanary(t)}
	addr := make(map[string]string)
	for _, host := range []string{llmHost, gitHost, evilHost, storeHost} {
		addr[host] = b.origin(t, ca, host, o.origins[host])
	}
	origins := map[string]string{payHost: b.origin(t, ca, payHost, o.origins[payHost]), msgHost: b.origin(t, ca, msgHost, o.origins[msgHost])}
	h2 := testkit.NewH2Upstream(t, testkit.H2UpstreamConfig{TLS: ca.Server(h2Host), Handler: func(a testkit.Arrival) []testkit.H2Step {
		return next(b, b.h2turns, h2Host, a.Target, []testkit.H2Step{testkit.H2Reply(200, "ok")})
	}})
	b.ledgers[h2Host] = h2.Ledger
	up := func(host string) string {
		return fmt.Sprintf("    upstream: {roots: roots.pem, resolve: {%s: %q}}\n", host, addr[host])
	}
	key := "    inject: [{header: X-Api-Key, value: \"${secret}\", credential: pay}]\n"
	bearer := "    inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: pay}]\n"
	addr[h2Host], addr[downHost] = h2.Addr(), testkit.RefusingAddr(t)
	first := "  - name: admin\n    match: {host: " + adminHost + "}\n    deny: true\n" +
		"  - name: slow\n    match: {host: " + payHost + ", path: /v1/slow/**}\n" + bearer + "    limits: {timeout: 1s}\n" +
		fmt.Sprintf("    upstream: {roots: roots.pem, resolve: {%s: %q}}\n", payHost, origins[payHost])
	rest := "  - name: h2\n    match: {host: " + h2Host + "}\n" + bearer + up(h2Host) +
		"  - name: llm\n    match: {host: " + llmHost + "}\n    delivery: stream\n" + key + up(llmHost) +
		"  - name: git\n    match: {host: " + gitHost + "}\n    dialect: git\n    inject: [{header: Authorization, value: \"Basic ${basic:x-access-token}\", credential: pay}]\n" + up(gitHost) +
		"  - name: evil\n    match: {host: " + evilHost + "}\n" + up(evilHost) +
		"  - name: down\n    match: {host: " + downHost + "}\n    limits: {tries: 1}\n" + up(downHost) +
		"  - name: store\n    match: {host: " + storeHost + "}\n    strip: [Authorization]\n" + up(storeHost)
	r := newRig(t, ca, rigOptions{origins: origins, first: first, routes: rest + b.moreOrigins(t, ca) + o.routes, top: o.top, payPath: "/v1/**"})
	b.rig = r
	return b
}

// begin starts the process.
func (b *bed) begin(wrapper ...string) {
	b.start(wrapper...)
	b.roots = filepath.Join(b.data, "ca", "ca.pem")
}

// origin starts the HTTP/1.1 origin of a host, unless there is one at addr.
func (b *bed) origin(t testing.TB, ca *testkit.CA, host, addr string) string {
	if addr != "" {
		return addr
	}
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(host), EarlyHandler: func(a testkit.Arrival) []testkit.Step {
		turn := next(b, b.turns, host, a.Target, testkit.Respond(testkit.Reply(200, "ok")))
		if turn.Early {
			return turn.Steps
		}
		return append([]testkit.Step{testkit.ReadBody()}, turn.Steps...)
	}})
	b.ledgers[host] = up.Ledger
	return up.Addr()
}

// next takes the next turn that was set for a target; the last one stays.
func next[T any](b *bed, from map[string][]T, host, target string, def T) T {
	path, _, _ := strings.Cut(target, "?")
	b.mu.Lock()
	defer b.mu.Unlock()
	list := from[host+path]
	switch len(list) {
	case 0:
		return def
	case 1:
	default:
		from[host+path] = list[1:]
	}
	return list[0]
}

// on says what the origin of host does with requests for path, one turn each; the
// last one stays. Without it every request gets 200 and "ok".
func (b *bed) on(host, path string, turns ...testkit.Turn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.turns[host+path] = turns
}

// onH2 is on for the HTTP/2 origin.
func (b *bed) onH2(path string, turns ...[]testkit.H2Step) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.h2turns[h2Host+path] = turns
}

// arrivals are the requests for a path that reached the origin of host.
func (b *bed) arrivals(host, path string) []testkit.Arrival {
	return b.ledgers[host].Where(func(a testkit.Arrival) bool {
		p, _, _ := strings.Cut(a.Target, "?")
		return p == path
	})
}

// client is a caller that opens a connection for each request.
func (b *bed) client(t testing.TB, h2 bool) *http.Client {
	return testkit.NewClient(t, testkit.ClientConfig{Proxy: b.addr, Roots: b.rig.roots(), HTTP2: h2, NoKeepAlive: !h2})
}

// hear keeps an answer for the search for the secret.
func (b *bed) hear(resp *testkit.Response) *testkit.Response {
	b.mu.Lock()
	defer b.mu.Unlock()
	fmt.Fprintln(&b.heard, resp.Status, resp.Header, resp.Trailer)
	b.heard.Write(resp.Body)
	return resp
}

// send sends one request over HTTP/1.1.
func (b *bed) send(t testing.TB, method, target, body string, fields ...string) *testkit.Response {
	t.Helper()
	return b.hear(testkit.Send(t, b.client(t, false), method, target, body, fields...))
}

// tunnel opens a raw connection inside a tunnel to host.
func (b *bed) tunnel(t testing.TB, host string) *testkit.Conn {
	t.Helper()
	return testkit.Tunnel(t, b.addr, host+":443", b.rig.roots())
}

// raw sends literal bytes over c and reads the answer.
func (b *bed) raw(t testing.TB, c *testkit.Conn, request string) *testkit.Response {
	t.Helper()
	return b.hear(c.Roundtrip(t, request))
}

// want is what a case requires of one answer.
type want struct {
	status int
	facts  string // "phase outcome retry CODE"; a success has no code
	// host and path say where arrivals are counted; without a host they are not.
	host, path string
	arrivals   int
	// dispatched is how many DISPATCH_STARTED the action has: 1 where the facts' phase
	// is remote_execution or result_delivery, else 0, unless it is set here (P1).
	dispatched *int
	// relayed: the answer is the origin's own.
	relayed bool
}

// The facts that recur.
const (
	success    = "remote_execution committed never"
	lost       = "remote_execution unknown reconcile REMOTE_OUTCOME_UNKNOWN"
	incomplete = "remote_execution unknown reconcile REMOTE_RESULT_INCOMPLETE"
	malformed  = "remote_execution unknown reconcile REMOTE_PROTOCOL_ERROR"
	failed     = "remote_execution committed reconcile REMOTE_ERROR"
	rejected   = "remote_execution rejected after_correction REMOTE_REJECTED"
	refused    = "remote_execution rejected backoff REMOTE_REFUSED"
	badTarget  = "validation not_attempted after_correction INVALID_TARGET"
	badRequest = "validation not_attempted after_correction INVALID_REQUEST"
	noRoute    = "validation not_attempted after_correction ROUTE_NOT_FOUND"
	denied     = "validation not_attempted never POLICY_DENIED"
	noAction   = "validation not_attempted after_correction UNSUPPORTED_ACTION"
	duplicate  = "validation not_attempted reconcile DUPLICATE_SUSPECTED"
	badCert    = "connection_setup not_attempted after_correction TLS_CERTIFICATE_INVALID"
	crossed    = "validation not_attempted after_correction REDIRECT_CROSS_ORIGIN"
)

func text(f outcome.Facts) string {
	s := f.Phase.String() + " " + f.Outcome.String() + " " + f.Retry.String()
	if f.Code != outcome.CodeNone {
		s += " " + f.Code.String()
	}
	return s
}

// story is an action as the journal tells it.
type story struct {
	ID       string
	View     dispatch.ActionView
	Envelope outcome.Envelope
	Events   []dispatch.StoredEvent
}

// count counts the events of a type.
func (s *story) count(e dispatch.EventType) int {
	n := 0
	for i := range s.Events {
		if s.Events[i].Event.Type == e {
			n++
		}
	}
	return n
}

// admin reads a resource of the admin API.
func (b *bed) admin(t testing.TB, path string) []byte {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true, DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", filepath.Join(b.data, "admin.sock"))
	}}, Timeout: patience}
	resp, err := c.Get("http://waybill.internal" + path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil || resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %d %s %v", path, resp.StatusCode, body, err)
	}
	return body
}

// adminJSON reads a resource of the admin API into v.
func (b *bed) adminJSON(t testing.TB, path string, v any) {
	t.Helper()
	if err := json.Unmarshal(b.admin(t, path), v); err != nil {
		t.Fatalf("%s: %v", path, err)
	}
}

// tell reads an action with its events.
func (b *bed) tell(t testing.TB, id string) *story {
	t.Helper()
	s := &story{ID: id}
	shown := struct {
		Action   *dispatch.ActionView `json:"action"`
		Envelope *outcome.Envelope    `json:"envelope"`
	}{&s.View, &s.Envelope}
	b.adminJSON(t, "/v1/actions/"+id, &shown)
	b.adminJSON(t, "/v1/actions/"+id+"/events", &s.Events)
	return s
}

var invocation = regexp.MustCompile(`^act_[0-9A-Z]{26}$`)

// check holds an answer and the action behind it to what a case requires and to what
// holds in every case: P1, P4, P5 and the hint fields of L7.
func (b *bed) check(t testing.TB, resp *testkit.Response, w want) *story {
	t.Helper()
	id := resp.Header.Get("Waybill-Invocation")
	if !invocation.MatchString(id) {
		t.Fatalf("%d %v %q: no invocation id (P4)", resp.Status, resp.Header, resp.Body)
	}
	if resp.Status != w.status {
		t.Errorf("%s: status %d, want %d: %s", id, resp.Status, w.status, resp.Body)
	}
	f, err := outcome.ParseOutcome(resp.Header.Get("Waybill-Outcome"))
	if err != nil || text(f) != w.facts {
		t.Errorf("%s: %s, want %s (%v)", id, text(f), w.facts, err)
	}
	hints(t, resp, f, w.relayed)
	s := b.tell(t, id)
	if got := text(s.Envelope.Facts()); got != w.facts || s.View.Outcome != f.Outcome.String() {
		t.Errorf("%s: the journal says %s %s, want %s", id, got, s.View.Outcome, w.facts)
	}
	if !w.relayed {
		b.own(t, resp, s, w.facts)
	}
	b.crossings(t, s, w)
	return s
}

// own checks Waybill's own answer: the envelope of L1.
func (b *bed) own(t testing.TB, resp *testkit.Response, s *story, facts string) {
	t.Helper()
	if ct := resp.Header.Get("Content-Type"); ct != "application/json" {
		t.Errorf("%s: content type %q", s.ID, ct)
	}
	var env outcome.Envelope
	if err := json.Unmarshal(resp.Body, &env); err != nil {
		t.Fatalf("%s: no envelope: %v %q", s.ID, err, resp.Body)
	}
	if text(env.Facts()) != facts || env.InvocationID != s.ID || env.Error == nil || env.Error.Message == "" || env.Message != env.Error.Message {
		t.Errorf("%s: envelope %s", s.ID, resp.Body)
	}
	if env.Evidence.DispatchStarted != s.View.DispatchStarted {
		t.Errorf("%s: dispatch_started is %v in the answer and %v on record", s.ID, env.Evidence.DispatchStarted, s.View.DispatchStarted)
	}
}

// hints checks the fields by which client libraries decide (L5, L7).
func hints(t testing.TB, resp *testkit.Response, f outcome.Facts, relayed bool) {
	t.Helper()
	status := resp.Header.Values("Proxy-Status")
	if len(status) == 0 || !strings.Contains(strings.Join(status, ","), "waybill") {
		t.Errorf("Proxy-Status %q", status)
	}
	if relayed {
		if !strings.Contains(strings.Join(status, ","), "received-status="+strconv.Itoa(resp.Status)) {
			t.Errorf("Proxy-Status %q of a relayed %d", status, resp.Status)
		}
		return
	}
	if f.Code == outcome.CodeNone {
		return
	}
	after, no := resp.Header.Get("Retry-After"), resp.Header.Get("X-Should-Retry") == "false" && resp.Header.Get("Stripe-Should-Retry") == "false"
	if f.Retry == outcome.Backoff {
		if n, err := strconv.Atoi(after); err != nil || n < 1 || n > 60 || resp.Header.Get("X-Should-Retry") == "false" {
			t.Errorf("Retry-After %q, X-Should-Retry %q with the advice %s", after, resp.Header.Get("X-Should-Retry"), f.Retry)
		}
		return
	}
	if after != "" || !no {
		t.Errorf("Retry-After %q, hints %v with the advice %s", after, no, f.Retry)
	}
}

// crossings compares the arrivals at the origin with the action's records (P1, P5).
func (b *bed) crossings(t testing.TB, s *story, w want) {
	t.Helper()
	dispatched := 0
	if strings.HasPrefix(w.facts, "remote_execution") || strings.HasPrefix(w.facts, "result_delivery") {
		dispatched = 1
	}
	if w.dispatched != nil {
		dispatched = *w.dispatched
	}
	if n := s.count(dispatch.DispatchStarted); n != dispatched {
		t.Errorf("%s: %d DISPATCH_STARTED, want %d", s.ID, n, dispatched)
	}
	if w.host == "" {
		return
	}
	if n := len(b.arrivals(w.host, w.path)); n != w.arrivals {
		t.Errorf("%s: %d arrivals of %s%s, want %d", s.ID, n, w.host, w.path, w.arrivals)
	}
}

var actionsTotal = regexp.MustCompile(`(?m)^waybill_actions_total\{[^}]*\} (\d+)`)

// metricsSum is the sum over all labels of waybill_actions_total.
func (b *bed) metricsSum(t testing.TB) int {
	sum := 0
	for _, m := range actionsTotal.FindAllStringSubmatch(get(t, b.meters), -1) {
		n, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatal(err)
		}
		sum += n
	}
	return sum
}

// settle waits until no action runs, and returns them all.
func (b *bed) settle(t testing.TB) []dispatch.ActionView {
	t.Helper()
	var all []dispatch.ActionView
	testkit.Eventually(t, func() error {
		all = b.all(t)
		for i := range all {
			if !all[i].Ended {
				return fmt.Errorf("%s %s still runs", all[i].InvocationID, all[i].Target)
			}
		}
		return nil
	})
	return all
}

// all lists every action, newest first.
func (b *bed) all(t testing.TB) []dispatch.ActionView {
	t.Helper()
	var all []dispatch.ActionView
	dec := json.NewDecoder(bytes.NewReader(b.admin(t, "/v1/actions")))
	for dec.More() {
		var v dispatch.ActionView
		if err := dec.Decode(&v); err != nil {
			t.Fatal(err)
		}
		all = append(all, v)
	}
	return all
}

// sentTo finds the actions whose target has this path, whatever its query.
func sentTo(all []dispatch.ActionView, path string) []dispatch.ActionView {
	var out []dispatch.ActionView
	for _, v := range all {
		if target, _, _ := strings.Cut(v.Target, "?"); strings.HasSuffix(target, path) {
			out = append(out, v)
		}
	}
	return out
}

// finish holds the whole run to what holds in every case: the process is the one that
// was started and has not panicked (P6), the secret is nowhere (P3), the arrivals at
// the origins are the records' (P1, P5), and the metrics count what is on record (P7).
func (b *bed) finish(t *testing.T) {
	pid := b.p.PID()
	all := b.settle(t)
	if sum := b.metricsSum(t); sum != len(all) {
		t.Errorf("the metrics count %d actions, the journal has %d (P7)", sum, len(all))
	}
	if !b.p.Running() || b.p.PID() != pid {
		t.Error("the process has ended (P6)")
	}
	said := make(map[string]int) // host/path → attempts that were dispatched
	for i := range all {
		v := &all[i]
		if v.Outcome == "not_attempted" && v.DispatchStarted {
			t.Errorf("%s: dispatched and not_attempted (P5)", v.InvocationID)
		}
		if !v.DispatchStarted {
			continue
		}
		u, err := url.Parse(v.Target)
		if err != nil {
			t.Fatal(err)
		}
		key := v.Target
		if i := strings.Index(key, "://"); i >= 0 {
			key = u.Hostname() + key[i+3+len(u.Host):]
		}
		key, _, _ = strings.Cut(key, "?")
		said[key] += b.tell(t, v.InvocationID).count(dispatch.DispatchStarted)
	}
	seen := make(map[string]int)
	for host, l := range b.ledgers {
		for _, a := range l.Arrivals() {
			path, _, _ := strings.Cut(a.Target, "?")
			seen[host+path]++
		}
	}
	for key, n := range seen {
		if said[key] != n {
			t.Errorf("%s: %d arrivals, %d DISPATCH_STARTED (P1)", key, n, said[key])
		}
	}
	for key, n := range said {
		if seen[key] != n {
			t.Errorf("%s: %d DISPATCH_STARTED, %d arrivals (P1)", key, n, seen[key])
		}
	}
	b.verify()
	metrics := get(t, b.meters)
	_, list, _ := b.cli("actions", "--json")
	b.kill()
	log := b.logs.String()
	for _, word := range []string{"panic", "fatal error:", "goroutine 1 ["} {
		if i := strings.Index(log, word); i >= 0 {
			t.Errorf("the log has %q: %s", word, log[max(0, i-200):min(len(log), i+1000)])
		}
	}
	testkit.Search(t, b.canary, testkit.In(b.data), testkit.InString("log", log), testkit.InString("answers", b.heard.String()),
		testkit.InString("metrics", metrics), testkit.InString("actions", list))
	for _, c := range []*testkit.Canary{b.token, b.query} {
		testkit.Search(t, c, testkit.In(b.data), testkit.InString("log", log), testkit.InString("metrics", metrics), testkit.InString("actions", list))
	}
	t.Logf("%d actions, %d origins", len(all), len(b.ledgers))
}

// fields are the lines of one field as the origin saw them.
func fields(a testkit.Arrival, name string) []string { return a.Values(name) }

// names are the field names that arrived, in lower case.
func fieldNames(a testkit.Arrival) []string {
	var out []string
	for _, f := range a.Fields {
		out = append(out, strings.ToLower(f.Name))
	}
	return out
}

// has reports whether a field arrived.
func has(a testkit.Arrival, name string) bool {
	return slices.Contains(fieldNames(a), strings.ToLower(name))
}

// TestCases runs the cases from practice against one process. The groups share it,
// so that at the end what holds in every case is held against all of them.
func TestCases(t *testing.T) {
	ca := testkit.NewCA(t)
	b := newBed(t, ca, rigOptions{})
	b.begin()
	for _, g := range []struct {
		name string
		run  func(*testing.T, *bed)
	}{
		{"RT", casesRepeats}, {"H2", casesH2}, {"FR", casesFraming}, {"UP", casesUploads}, {"ID", casesIdentity},
		{"HD", casesHeaders}, {"RD", casesRedirects}, {"CA", casesCertificates}, {"CL", casesClients}, {"ST", casesStreams}, {"DL", casesDelivery}, {"LK", casesLeaks},
		{"heads", casesHeads},
	} {
		t.Run(g.name, func(t *testing.T) { g.run(t, b) })
	}
	b.finish(t)
}
