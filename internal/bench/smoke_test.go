package bench

import (
	"context"
	"encoding/json"
	"math"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"waybill/internal/testkit"
)

// startTestOrigin runs an origin in this process.
func startTestOrigin(t *testing.T, r *rig, ca *authority) {
	t.Helper()
	leaf, err := ca.leaf(originHost, "localhost")
	if err != nil {
		t.Fatal(err)
	}
	if r.origin, err = StartOrigin(leaf, r.authorization()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.origin.Close)
}

// TestSmoke runs one tiny scenario of each mode against the real binary: what the
// origin counted, what the journal counted and what the clients counted agree.
func TestSmoke(t *testing.T) {
	r, ca, err := newRig(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	startTestOrigin(t, r, ca)
	r.waybill = testkit.Binary(t)
	r.flags = []string{"--allow-any-filesystem"} // of the test's folder
	run, err := r.startWaybill(t.Context(), "w", "", false, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(run.stop)
	for _, s := range []Scenario{{Mode: Intercepted, Bytes: 1 << 10, Clients: 2}, {Mode: Absolute, Bytes: 1 << 10, Clients: 2}, {Mode: Intercepted, Bytes: 2000, Clients: 2, NewConn: true}} {
		target := originHost + ":443"
		if s.Mode == Absolute {
			target = originHost + ":80"
		}
		const requests = 20
		got, err := Load{
			Scenario: s, Proxy: run.proxy, Authority: target, RootCA: run.ca, Window: time.Minute, Requests: requests,
			PID: run.measure, Metrics: run.metrics, Origin: r.origin.Stats,
		}.Run(t.Context())
		if err != nil {
			t.Fatalf("%s: %v", s.Name(), err)
		}
		if got.Requests != requests || got.Upstream != requests || got.Errors != 0 {
			t.Errorf("%s: %d requests answered, %d upstream, %d errors (%s); want %d, %d, 0", s.Name(), got.Requests, got.Upstream, got.Errors, got.FirstError, requests, requests)
		}
		// Two durable steps an action (DESIGN section 6).
		if got.Appends != 2*requests || got.Commits < 1 || got.Commits > got.Appends {
			t.Errorf("%s: %v appends in %v commits, want %d appends", s.Name(), got.Appends, got.Commits, 2*requests)
		}
		if got.P50 <= 0 || got.P99 < got.P50 || got.RSS < 1<<20 || got.Rate() <= 0 || got.Window >= time.Minute {
			t.Errorf("%s: %+v", s.Name(), got)
		}
	}
	if n := r.origin.Count().Refused; n != 0 {
		t.Errorf("%d requests came without the injected field", n)
	}
}

// TestLoadSeesWhatFails: a proxy that does not inject, one that cuts bodies and one
// that answers with an error are errors and no requests.
func TestLoadSeesWhatFails(t *testing.T) {
	for name, h := range map[string]http.HandlerFunc{
		"an error":   func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusBadGateway) },
		"a cut body": func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(make([]byte, 99)) },
		"a drop":     func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) },
	} {
		srv := httptest.NewServer(h)
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Second)
		_, err := Load{Scenario: Scenario{Mode: Absolute, Bytes: 100, Clients: 1}, Proxy: srv.Listener.Addr().String(), Authority: "x.test:80", Window: 10 * time.Millisecond}.Run(ctx)
		cancel()
		srv.Close()
		if err == nil || !strings.Contains(err.Error(), "no request succeeded") {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, bad := range []Load{{}, {Scenario: Scenario{Clients: 1}, Window: time.Hour}, {Scenario: Scenario{Mode: "x", Clients: 1}, Authority: "a:1", Window: 1}, {Scenario: Scenario{Mode: Absolute, Clients: 1}, Authority: "a", Window: 1}} {
		if _, err := bad.Run(t.Context()); err == nil {
			t.Errorf("%+v is accepted", bad)
		}
	}
}

// TestNetHTTPProxy measures the comparison that is part of this program.
func TestNetHTTPProxy(t *testing.T) {
	r, ca, err := newRig(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	startTestOrigin(t, r, ca)
	args, err := r.goArgs()
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	server, client := net.Pipe()
	done := make(chan error, 1)
	go func() { done <- NetHTTPProxy(ctx, args, server) }()
	var addr string
	if err := firstLine(&addr)(client); err != nil {
		t.Fatal(err)
	}
	for _, m := range []Mode{Intercepted, Absolute} {
		target := map[Mode]string{Intercepted: originHost + ":443", Absolute: originHost + ":80"}[m]
		s, err := Load{Scenario: Scenario{Mode: m, Bytes: 70 << 10, Clients: 3}, Proxy: addr, Authority: target, RootCA: r.proxyCA, Window: time.Minute, Requests: 30, Origin: r.origin.Stats}.Run(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		if s.Requests != 30 || s.Upstream != 30 || s.Errors != 0 || s.Connections > 3 {
			t.Errorf("%s: %+v", m, s)
		}
	}
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

// TestOriginRefusesWithoutTheField: a proxy that does not inject cannot look fast.
func TestOriginRefusesWithoutTheField(t *testing.T) {
	r, ca, err := newRig(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	startTestOrigin(t, r, ca)
	resp, err := http.Post("http://"+r.origin.Plain+bodyPath+"10", "application/json", strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusUnauthorized || r.origin.Count() != (OriginStats{Connections: 1, Requests: 1, Refused: 1}) {
		t.Errorf("status %d, %+v", resp.StatusCode, r.origin.Count())
	}
}

// sampleReport has two rounds of the base and of Waybill.
func sampleReport() *Report {
	s := Scenario{Mode: Intercepted, Bytes: 1 << 10, Clients: 1}
	sample := func(requests int64, cpu time.Duration) Sample {
		return Sample{Requests: requests, InWindow: requests, Window: time.Second, P50: time.Millisecond, P99: 2 * time.Millisecond, Mean: time.Millisecond, CPU: cpu,
			Peak: 50 << 20, Commits: float64(requests) / 2, Appends: 2 * float64(requests)}
	}
	return &Report{
		Rounds: 2, Size: Quick, Window: time.Second, Command: "make bench QUICK='1'",
		Systems: []SystemReport{{Name: Base, RestRSS: 8 << 20}, {Name: "waybill", RestRSS: 70 << 20}, {Name: "squid", Absent: "not installed"}},
		Results: []Result{
			{Scenario: s, Name: s.Name(), System: Base, Rounds: []Sample{sample(1000, time.Second), sample(100, time.Second/10)}},
			{Scenario: s, Name: s.Name(), System: "waybill", Rounds: []Sample{sample(500, time.Second), sample(50, time.Second/10)}},
			{Scenario: s, Name: s.Name(), System: "nethttp", Failed: "broke"},
		},
		Syncs:   []SyncCount{{Mode: Intercepted, Clients: 1, Requests: 100, Calls: map[string]int64{"fdatasync": 200, "msync": 100}}},
		Disk:    &Disk{Sync: time.Millisecond, Sequential: 1 << 20, Group: map[int]float64{1: 100, 16: 1000, 64: 2000}},
		Journal: []JournalAlone{{Waiters: 16, Appends: 500}},
	}
}

func TestReport(t *testing.T) {
	r := sampleReport()
	if got := r.Ratio(r.Results[0].Name, "waybill", Base, rate); got != .5 {
		t.Errorf("ratio %v, want .5", got)
	}
	if got := r.Ratio(r.Results[0].Name, "waybill", Base, cpu); got != 2 {
		t.Errorf("CPU ratio %v, want 2", got)
	}
	if got := r.Ratio("absent", "waybill", Base, rate); !math.IsNaN(got) {
		t.Errorf("ratio of nothing: %v", got)
	}
	verdict := map[string]bool{}
	targets := r.Targets()
	for i := range targets {
		verdict[targets[i].What] = targets[i].Met()
	}
	for what, want := range map[string]bool{
		"intercepted, 1 KiB, 1 clients: strict × base":                   true,
		"intercepted, 1 clients: syncs per request (strace)":             false, // 3
		"intercepted, 1 KiB, 1 client: added latency in sync latencies":  true,
		"the journal alone, 16 waiters: × a bare file with group commit": true,
		"at rest: resident MiB":                                          false,
	} {
		got, ok := verdict[what]
		if !ok || got != want {
			t.Errorf("%s: met %v, present %v; want %v", what, got, ok, want)
		}
	}
	var text, page, doc strings.Builder
	r.Text(&text)
	r.Markdown(&page)
	if err := r.JSON(&doc); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"0.50", "not measured: not installed", "failed: broke", "missed", "make bench QUICK='1'"} {
		if !strings.Contains(page.String(), want) || want != "make bench QUICK='1'" && !strings.Contains(text.String(), want) {
			t.Errorf("%q is missing in:\n%s\n%s", want, text.String(), page.String())
		}
	}
	var back Report
	if err := json.Unmarshal([]byte(doc.String()), &back); err != nil || len(back.Results) != 3 || back.Results[1].Rounds[0].Requests != 500 {
		t.Errorf("JSON does not come back: %v", err)
	}
}

// TestGuardIsMeasured: the pair of systems that shows what the leak guard costs differs
// in nothing but a control that exists, runs with 64 KiB only, and has a target.
func TestGuardIsMeasured(t *testing.T) {
	list, err := os.ReadFile("../../docs/controls.txt")
	if err != nil {
		t.Fatal(err)
	}
	if !regexp.MustCompile(`(?m)^C +` + guardControl + ` `).Match(list) {
		t.Errorf("docs/controls.txt does not know %s", guardControl)
	}
	large := Scenario{Mode: Intercepted, Bytes: guardBytes, Clients: 16}
	r := &Report{Rounds: 1}
	for _, sys := range guardSystems(&rig{}) {
		if sys.absent() == "" || !sys.only(large) || sys.only(Scenario{Mode: Intercepted, Bytes: 1 << 10, Clients: 16}) {
			t.Errorf("%s: absent %q", sys.Name, sys.absent())
		}
		s := Sample{Requests: 1000, InWindow: 1000, Window: time.Second}
		if sys.Name == withGuard {
			s.InWindow = 850
		}
		r.Results = append(r.Results, Result{Scenario: large, Name: large.Name(), System: sys.Name, Rounds: []Sample{s}})
	}
	for _, target := range r.Targets() {
		if strings.Contains(target.What, "leak guard") {
			if target.Met() || target.Got != .85 || target.Want != .9 {
				t.Errorf("%+v", target)
			}
			return
		}
	}
	t.Error("no target")
}

func TestProbes(t *testing.T) {
	got := parseAppends("goos: linux\nBenchmarkAppend/waiters=16-2  \t 5000\t 210 ns/op\t 0.15 syncs/append\t 4700 appends/s\nBenchmarkAction/waiters=1-2 1 1 ns/op\n")
	if len(got) != 1 || got[0] != (JournalAlone{Waiters: 16, Appends: 4700, Syncs: .15}) {
		t.Errorf("%+v", got)
	}
	mounts := "dev / ext4 rw\nshm /dev/shm tmpfs rw\nnas /srv/data nfs rw\n"
	for dir, want := range map[string]string{"/dev/shm/x": "tmpfs", "/dev/shmx": "ext4", "/srv/data": "nfs", "/tmp": "ext4"} {
		if got := filesystem(mounts, dir); got != want {
			t.Errorf("%s is on %s, want %s", dir, got, want)
		}
	}
	f, err := preallocated(t.TempDir()+"/f", 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	rate, err := groupCommit(f, 1<<20, 8, 20*time.Millisecond)
	if err != nil || rate <= 0 {
		t.Errorf("%v appends/s, %v", rate, err)
	}
	for v, want := range map[float64]string{0: "0", 0.001234: "0.0012", .5: "0.50", 12.34: "12.3", 1234.5: "1234", math.NaN(): "–", math.Inf(1): "–"} {
		if got := number(v); got != want {
			t.Errorf("number(%v) = %q, want %q", v, got, want)
		}
	}
}
