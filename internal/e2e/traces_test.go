package e2e

import (
	"encoding/hex"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// sink is a collector that keeps what it gets.
type sink struct {
	url string

	mu    sync.Mutex
	raw   []byte
	spans []*otlp.Span
}

func newSink(t *testing.T) *sink {
	s := &sink{}
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var in collector.ExportTraceServiceRequest
		if err != nil || r.URL.Path != "/v1/traces" || proto.Unmarshal(body, &in) != nil {
			t.Errorf("the collector got %s with %d bytes: %v", r.URL.Path, len(body), err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.raw = append(s.raw, body...)
		for _, rs := range in.GetResourceSpans() {
			for _, ss := range rs.GetScopeSpans() {
				s.spans = append(s.spans, ss.GetSpans()...)
			}
		}
	}))
	t.Cleanup(srv.Close)
	s.url = srv.URL
	return s
}

// callersTrace is the traceparent field of the tests' caller; its flags say that nothing
// of it is recorded, which decides nothing here.
const (
	callersTraceID = "0af7651916cd43dd8448eb211c80319c"
	callersSpanID  = "b7ad6b7169203331"
	callersTrace   = "00-" + callersTraceID + "-" + callersSpanID + "-00"
)

// ownTrace is the trace of an action that has no caller's: the ULID of its id.
func ownTrace(t *testing.T, id string) string {
	t.Helper()
	action, err := dispatch.ParseActionID(id)
	if err != nil {
		t.Fatal(err)
	}
	return hex.EncodeToString(action[:])
}

// TestTraces: a span of each action and attempt goes to the collector, below the caller's
// span, with facts and nothing of the request in it (CONTRACT C2); the caller's trace
// context goes upstream only where the route passes it.
func TestTraces(t *testing.T) {
	contract.Covers(t, "C2")
	ca := testkit.NewCA(t)
	reply := func(a testkit.Arrival) []testkit.Step {
		if strings.HasPrefix(a.Target, "/cut") {
			return []testkit.Step{testkit.Close()}
		}
		return []testkit.Step{testkit.Reply(200, "ok")}
	}
	pay := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: reply})
	traced := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server("traced.example.test"), Handler: reply})
	to := newSink(t)
	r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: pay.Addr()},
		routes: "  - name: traced\n    match: {host: traced.example.test}\n    trace_context: pass\n    upstream: {roots: roots.pem, resolve: {traced.example.test: \"" + traced.Addr() + "\"}}\n"})
	r.flags = []string{"--traces", to.url}
	r.start()
	private := testkit.NewCanary(t)
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://" + r.addr, Roots: r.roots()})
	send := func(host, path string) {
		testkit.Send(t, client, http.MethodPost, "https://"+host+path+private.Value()+"?k="+private.Value(), "body "+private.Value(), "Traceparent", callersTrace, "Tracestate", "a=b", "Baggage", "user="+private.Value())
	}
	send(payHost, "/ok/")
	send(payHost, "/cut/")
	send("traced.example.test", "/ok/")
	send("nobody.example.test", "/ok/")
	for _, a := range pay.Arrivals() {
		if len(a.Values("Traceparent"))+len(a.Values("Tracestate"))+len(a.Values("Baggage")) != 0 {
			t.Errorf("a route that strips forwarded the trace context:\n%s", a.RawHead)
		}
	}
	if all := traced.Arrivals(); len(all) != 1 || strings.Join(all[0].Values("Traceparent"), "") != callersTrace || len(all[0].Values("Tracestate")) != 1 || len(all[0].Values("Baggage")) != 1 {
		t.Errorf("a route that passes did not forward the trace context: %d arrivals", len(all))
	}
	r.p.Signal(t, term)
	r.p.Wait(t, patience) // what waits is sent before the end
	to.mu.Lock()
	defer to.mu.Unlock()
	spans := to.spans
	testkit.Search(t, r.canary, testkit.InBytes("spans", to.raw))
	testkit.Search(t, private, testkit.InBytes("spans", to.raw))
	if strings.Contains(string(to.raw), payHost) {
		t.Error("a span names a host")
	}
	attr := func(s *otlp.Span, key string) string {
		for _, kv := range s.GetAttributes() {
			if kv.GetKey() == key {
				return kv.GetValue().GetStringValue()
			}
		}
		return ""
	}
	actions, attempts := map[string]*otlp.Span{}, 0
	for _, s := range spans {
		if s.GetName() == "action" {
			actions[string(s.GetSpanId())] = s
		}
	}
	got := map[string]int{}
	for _, s := range spans {
		if s.GetEndTimeUnixNano() < s.GetStartTimeUnixNano() {
			t.Errorf("%s ends before it begins", s.GetName())
		}
		if hex.EncodeToString(s.GetTraceId()) != callersTraceID {
			t.Errorf("%s is in trace %x, not in its caller's", s.GetName(), s.GetTraceId())
		}
		if s.GetName() == "action" && hex.EncodeToString(s.GetParentSpanId()) != callersSpanID {
			t.Errorf("an action is below span %x, not below its caller's", s.GetParentSpanId())
		}
		if s.GetName() == "attempt" {
			attempts++
			if p := actions[string(s.GetParentSpanId())]; p == nil || string(p.GetTraceId()) != string(s.GetTraceId()) {
				t.Error("an attempt without its action")
			}
		}
		got[s.GetName()+" "+attr(s, "waybill.route")+" "+attr(s, "waybill.phase")+" "+attr(s, "waybill.outcome")]++
	}
	for _, want := range []string{
		"action pay remote_execution committed", "attempt pay remote_execution committed", "action pay remote_execution unknown",
		"attempt pay remote_execution unknown", "action traced remote_execution committed", "action  validation not_attempted",
	} {
		if got[want] != 1 {
			t.Errorf("%d spans %q, want 1: %v", got[want], want, got)
		}
	}
	if len(actions) != 4 || attempts != 3 {
		t.Errorf("%d actions and %d attempts, want 4 and 3: %v", len(actions), attempts, got)
	}
}

// TestHostileTraceParents: a field that names no span makes a trace of the action's own, as
// --traces-parent none does for every field; the request is carried all the same.
func TestHostileTraceParents(t *testing.T) {
	contract.Covers(t, "C2")
	ca := testkit.NewCA(t)
	pay := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(testkit.Arrival) []testkit.Step { return []testkit.Step{testkit.Reply(200, "ok")} }})
	hostile := [][]string{
		{strings.Repeat("A", 8000)}, {""}, {"00-" + strings.Repeat("0", 32) + "-" + callersSpanID + "-01"}, {"00-" + callersTraceID + "-" + strings.Repeat("0", 16) + "-01"},
		{strings.ToUpper(callersTrace)}, {callersTrace + "-more"}, {"ff" + callersTrace[2:]}, {callersTrace, callersTrace}, {callersTrace[:54]}, {callersTrace + "," + callersTrace},
		{"00-\xff\xfe" + callersTrace[5:]},
	}
	for _, mode := range []string{"caller", "none"} {
		to := newSink(t)
		r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: pay.Addr()}})
		r.flags = []string{"--traces", to.url, "--traces-parent", mode}
		r.start()
		client := testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://" + r.addr, Roots: r.roots()})
		want := map[string]string{} // trace by action
		send := func(i int, fields ...string) string {
			var kv []string
			for _, f := range fields {
				kv = append(kv, "Traceparent", f)
			}
			a := testkit.Send(t, client, http.MethodPost, "https://"+payHost+"/v1/"+mode+strconv.Itoa(i), "body", kv...)
			if a.Status != 200 {
				t.Fatalf("%q: %d %s", fields, a.Status, a.Body)
			}
			return a.Header.Get("Waybill-Invocation")
		}
		for i, fields := range hostile {
			id := send(i, fields...)
			want[id] = ownTrace(t, id)
		}
		id := send(len(hostile), callersTrace)
		if want[id] = callersTraceID; mode == "none" {
			want[id] = ownTrace(t, id)
		}
		r.p.Signal(t, term)
		r.p.Wait(t, patience)
		to.mu.Lock()
		for _, s := range to.spans {
			for _, kv := range s.GetAttributes() {
				if id := kv.GetValue().GetStringValue(); kv.GetKey() == "waybill.action" && s.GetName() == "action" {
					if hex.EncodeToString(s.GetTraceId()) != want[id] || (len(s.GetParentSpanId()) != 0) != (want[id] == callersTraceID) {
						t.Errorf("--traces-parent %s: %s is in trace %x below %x, want trace %s", mode, id, s.GetTraceId(), s.GetParentSpanId(), want[id])
					}
					delete(want, id)
				}
			}
		}
		to.mu.Unlock()
		if len(want) != 0 {
			t.Errorf("--traces-parent %s: no span of %v", mode, want)
		}
	}
}
