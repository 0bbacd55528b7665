package e2e

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	collector "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	otlp "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/protobuf/proto"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// TestTraces: a span of each action and attempt goes to the collector, with facts and
// nothing of the request in it (CONTRACT C2); the caller's trace context goes upstream only
// where the route passes it.
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
	var mu sync.Mutex
	var raw []byte
	var spans []*otlp.Span
	sink := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		var in collector.ExportTraceServiceRequest
		if err != nil || r.URL.Path != "/v1/traces" || proto.Unmarshal(body, &in) != nil {
			t.Errorf("the collector got %s with %d bytes: %v", r.URL.Path, len(body), err)
		}
		mu.Lock()
		defer mu.Unlock()
		raw = append(raw, body...)
		for _, rs := range in.GetResourceSpans() {
			for _, ss := range rs.GetScopeSpans() {
				spans = append(spans, ss.GetSpans()...)
			}
		}
	}))
	defer sink.Close()
	r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: pay.Addr()},
		routes: "  - name: traced\n    match: {host: traced.example.test}\n    trace_context: pass\n    upstream: {roots: roots.pem, resolve: {traced.example.test: \"" + traced.Addr() + "\"}}\n"})
	r.flags = []string{"--traces", sink.URL}
	r.start()
	private := testkit.NewCanary(t)
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://" + r.addr, Roots: r.roots()})
	const context = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	send := func(host, path string) {
		testkit.Send(t, client, http.MethodPost, "https://"+host+path+private.Value()+"?k="+private.Value(), "body "+private.Value(), "Traceparent", context, "Tracestate", "a=b", "Baggage", "user="+private.Value())
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
	if all := traced.Arrivals(); len(all) != 1 || strings.Join(all[0].Values("Traceparent"), "") != context || len(all[0].Values("Tracestate")) != 1 || len(all[0].Values("Baggage")) != 1 {
		t.Errorf("a route that passes did not forward the trace context: %d arrivals", len(all))
	}
	r.p.Signal(t, term)
	r.p.Wait(t, patience) // what waits is sent before the end
	mu.Lock()
	defer mu.Unlock()
	testkit.Search(t, r.canary, testkit.InBytes("spans", raw))
	testkit.Search(t, private, testkit.InBytes("spans", raw))
	if strings.Contains(string(raw), payHost) {
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
