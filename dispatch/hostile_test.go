package dispatch

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"waybill/internal/contract"
	"waybill/metrics"
	"waybill/outcome"
	"waybill/routes"
)

// swap binds the bench to its routes as change leaves them.
func (b *bench) swap(t *testing.T, change func(name string, r *routes.Route)) {
	t.Helper()
	list := testRoutes()
	for i := range list {
		change(list[i].Name, &list[i])
	}
	snap, err := routes.NewSnapshot(list, routes.Deny, nil)
	if err != nil {
		t.Fatal(err)
	}
	b.Swap(&Binding{Snapshot: snap, Credentials: b.Binding().Credentials})
}

// TestCallerLeavesAfterConnect: between the connection and the record (F10).
func TestCallerLeavesAfterConnect(t *testing.T) {
	contract.Covers(t, "F10")
	b := newBench(t)
	ctx, cancel := context.WithCancel(t.Context())
	b.tr.made = cancel
	r := b.Do(ctx, post("pay.example.test", "/v1/x", "a"))
	if !r.Gone || b.tr.count() != 0 {
		t.Errorf("gone=%v, %d handed over", r.Gone, b.tr.count())
	}
	wantFacts(t, b.j.last().Facts, outcome.ConnectionSetup, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodeCallerCancelled)
}

// TestCallerLeavesWhileItIsRecorded: a DISPATCH_STARTED that can become durable is
// followed by its attempt; it does not stay open behind a caller that left (F5, F9).
func TestCallerLeavesWhileItIsRecorded(t *testing.T) {
	contract.Covers(t, "F5", "F9", "M2")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		ctx, cancel := context.WithCancel(context.Background())
		b.j.taken = func(batch Batch) {
			if batch.Events[len(batch.Events)-1].Type == DispatchStarted {
				cancel()
			}
		}
		r := b.Do(ctx, post("pay.example.test", "/v1/x", "a"))
		if facts(r).Outcome == outcome.NotAttempted {
			t.Errorf("%+v", facts(r))
		}
		synctest.Wait()
		if got := b.j.last(); !got.Ended || got.Facts.Outcome != outcome.Committed || b.tr.count() != 1 {
			t.Errorf("left open: ended=%v %+v, %d sent", got.Ended, got.Facts, b.tr.count())
		}
	})
}

// TestCallerLeavesWhileTheEndIsRecorded: the local cause is kept whenever it comes (F5).
func TestCallerLeavesWhileTheEndIsRecorded(t *testing.T) {
	contract.Covers(t, "F5", "H2")
	for _, play := range []func(context.Context, *Outgoing, Sink) Ending{answerWith(200, "ok"), endWith(outcome.CodeRemoteTimeout)} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			b.tr.play = play
			ctx, cancel := context.WithCancel(context.Background())
			b.j.taken = func(batch Batch) {
				if batch.Events[0].Type == RequestSent {
					cancel()
					time.Sleep(time.Second) // the caller's goroutine goes first
				}
			}
			if r := b.Do(ctx, post("pay.example.test", "/v1/x", "a")); !r.Gone {
				t.Fatalf("%+v", facts(r))
			}
			time.Sleep(2 * time.Second)
			if rec := b.j.last(); rec.LocalCause != "CALLER_CANCELLED" || !rec.Ended {
				t.Errorf("local cause %q of %+v", rec.LocalCause, rec.Facts)
			}
		})
	}
}

// TestCallerLeavesWhileTheSecretIsFetched: what the store says then is not the reason.
func TestCallerLeavesWhileTheSecretIsFetched(t *testing.T) {
	contract.Covers(t, "F10", "C1")
	b := newBench(t)
	ctx, cancel := context.WithCancel(t.Context())
	s := post("broken.example.test", "/", "")
	s.Body = io.MultiReader(&doing{cancel}, strings.NewReader(""))
	r := b.Do(ctx, s)
	if !r.Gone || b.tr.tries != 0 {
		t.Errorf("gone=%v, %d tries", r.Gone, b.tr.tries)
	}
	wantFacts(t, b.j.last().Facts, outcome.CredentialInjection, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodeCallerCancelled)
}

// doing does something when it is read, and is empty.
type doing struct{ f func() }

func (d *doing) Read([]byte) (int, error) { d.f(); return 0, io.EOF }

// TestWaitIsOverBeforeDispatch: a caller that does not wait any more is not told
// unknown of a request that is still here.
func TestWaitIsOverBeforeDispatch(t *testing.T) {
	contract.Covers(t, "F10", "E1")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.tr.made = func() { time.Sleep(3 * time.Second) }
		s := post("pay.example.test", "/v1/x", "a")
		s.Wait = 2 * time.Second
		r := b.Do(context.Background(), s)
		wantFacts(t, facts(r), outcome.ConnectionSetup, outcome.NotAttempted, outcome.Backoff, outcome.CodeConnectionTimeout)
		if r.Envelope.Evidence.Reason != "caller_timeout" || r.Gone || b.tr.count() != 0 || r.Status != 504 {
			t.Errorf("%d %+v, %d sent", r.Status, r.Envelope.Evidence, b.tr.count())
		}
	})
}

// TestRefusalFollowsItsRecord: M6.
func TestRefusalFollowsItsRecord(t *testing.T) {
	contract.Covers(t, "M6")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		release := make(chan struct{})
		b.j.before = func(Batch) error { <-release; return nil }
		done := make(chan *Reply, 1)
		go func() { done <- b.Do(context.Background(), post("nowhere.example.test", "/", "a")) }()
		synctest.Wait()
		select {
		case r := <-done:
			t.Error("a refusal was answered before its record was durable")
			done <- r
		default:
		}
		close(release)
		<-done
	})
}

// TestIndeterminateIsNeverNotAttempted: also when the error says both (F9).
func TestIndeterminateIsNeverNotAttempted(t *testing.T) {
	contract.Covers(t, "F9")
	b := newBench(t)
	b.j.before = func(Batch) error { return errors.Join(ErrIndeterminate, ErrNotWritten) }
	r := b.Do(t.Context(), post("pay.example.test", "/v1/x", "a"))
	wantFacts(t, facts(r), outcome.ConnectionSetup, outcome.Unknown, outcome.Reconcile, outcome.CodeJournalIndeterminate)
	if b.tr.count() != 0 {
		t.Error("handed over")
	}
}

// TestNoEndingIsNotAttempted: whatever code a transport gives its ending, also on a
// relaxed route, where no journal stands in between (F2).
func TestNoEndingIsNotAttempted(t *testing.T) {
	contract.Covers(t, "F2", "A8")
	for _, host := range []string{"pay", "relaxed"} {
		for _, code := range append(outcome.Codes(), outcome.CodeNone) {
			b := newBench(t)
			b.j.lag = true
			b.tr.play = endWith(code)
			r := b.Do(t.Context(), post(host+".example.test", "/v1/x", "a"))
			f := facts(r)
			if f.Outcome != outcome.Unknown && f.Outcome != outcome.Rejected || f.Phase != outcome.RemoteExecution {
				t.Errorf("%s %v: %+v", host, code, f)
			}
			if err := f.Validate(); err != nil {
				t.Errorf("%s %v: %v", host, code, err)
			}
			if !r.Envelope.Evidence.DispatchStarted || r.Envelope.Facts() != f {
				t.Errorf("%s %v: answered %+v", host, code, r.Envelope.Facts())
			}
		}
	}
}

// TestCutSecretStaysOut: what an origin echoes may be cut, and a piece is the secret too.
func TestCutSecretStaysOut(t *testing.T) {
	contract.Covers(t, "C2", "L4")
	long := "LONGCANARY-" + strings.Repeat("0123456789abcdef", 8)
	b := newBench(t)
	t.Setenv("WAYBILL_TEST_SECRET", long)
	line := "HTTP/1.1 1000 Bearer " + long
	b.tr.play = func(context.Context, *Outgoing, Sink) Ending {
		return Ending{Code: outcome.CodeRemoteProtocolError, StatusLine: line[:64]}
	}
	b.Do(t.Context(), post("pay.example.test", "/v1/x", "a"))
	pad := strings.Repeat("x", 440)
	b.tr.play = func(_ context.Context, _ *Outgoing, sink Sink) Ending {
		h := http.Header{"Proxy-Status": {`edge;details="` + pad + long + `"`}}
		_ = sink.Head(200, h, 5)
		return Ending{Status: 200, Header: h, Code: outcome.CodeRemoteResultIncomplete}
	}
	b.Do(t.Context(), post("pay.example.test", "/v1/y", "a"))
	if got := b.tr.sent[0].Header.Get("Authorization"); got != "Bearer "+long {
		t.Fatal("the secret did not arrive")
	}
	all, err := json.Marshal(map[string]any{"events": b.j.events, "records": b.j.records})
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(all), "LONGCANARY") {
		t.Error("the journal holds a piece of a secret")
	}
}

// TestRelaxedLargeResult: the answer is read back only after it is there.
func TestRelaxedLargeResult(t *testing.T) {
	contract.Covers(t, "H1")
	b := newBench(t)
	b.j.lag = true
	big := strings.Repeat("0123456789abcdef", 1<<17) // 2 MiB
	b.tr.play = answerWith(200, big)
	r := b.Do(t.Context(), post("relaxed.example.test", "/", "a"))
	if got, err := io.ReadAll(r.Body); err != nil || string(got) != big {
		t.Errorf("%d bytes, %v", len(got), err)
	}
}

// TestSlowCallerHoldsNothingUp: a caller that does not read a 1xx answer (G4) delays
// neither the attempt nor its record (F5).
func TestSlowCallerHoldsNothingUp(t *testing.T) {
	contract.Covers(t, "F5", "G4")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		stuck := make(chan struct{})
		s := post("pay.example.test", "/v1/x", "a")
		s.Informational = func(int, http.Header) { <-stuck }
		b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
			for range 100 {
				sink.Informational(103, http.Header{"Link": {"</a>"}})
			}
			return answerWith(201, "made")(ctx, out, sink)
		}
		done := make(chan *Reply, 1)
		go func() { done <- b.Do(context.Background(), s) }()
		synctest.Wait()
		if got := b.j.last(); got.Facts.Outcome != outcome.Committed {
			t.Errorf("while the caller is stuck: %+v", got.Facts)
		}
		close(stuck)
		if r := <-done; r.Status != 201 {
			t.Errorf("%d", r.Status)
		}
	})
}

// TestInformationalIsFiltered: what is passed on is what may be (G4, V6).
func TestInformationalIsFiltered(t *testing.T) {
	contract.Covers(t, "G4", "V6")
	b := newBench(t)
	var got []int
	s := post("pay.example.test", "/v1/x", "a")
	s.Informational = func(status int, h http.Header) {
		got = append(got, status)
		if len(h) != 1 || h.Get("Link") == "" {
			t.Errorf("%d: %v", status, h)
		}
	}
	b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
		for _, status := range []int{100, 101, 103, 200} {
			sink.Informational(status, http.Header{"Link": {"</a>"}, "Connection": {"X"}, "X": {"1"}, "waybill-outcome ": {"committed"}})
		}
		return answerWith(201, "made")(ctx, out, sink)
	}
	if r := b.Do(t.Context(), s); r.Status != 201 || !slices.Equal(got, []int{103}) {
		t.Errorf("%d %v", r.Status, got)
	}
}

// TestPanicEndsOneAttempt: unknown, recorded, answered; the process goes on and the
// value is told nobody.
func TestPanicEndsOneAttempt(t *testing.T) {
	contract.Covers(t, "F2", "C2")
	b := newBench(t)
	b.tr.play = func(context.Context, *Outgoing, Sink) Ending { panic(testSecret) }
	r := b.Do(t.Context(), post("pay.example.test", "/v1/x", "a"))
	wantFacts(t, facts(r), outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeInternal)
	if got := b.j.last(); !got.Ended || !got.GuardsRepeats() || r.Status != 424 {
		t.Errorf("%d %+v", r.Status, got.Facts)
	}
}

// TestLostJournalIsNotRelaxed: an answer that is made without the journal says of the
// action what is so.
func TestLostJournalIsNotRelaxed(t *testing.T) {
	contract.Covers(t, "L3", "F2")
	b := newBench(t)
	b.j.before = func(batch Batch) error {
		if batch.Events[0].Type == RequestSent {
			b.j.unreadable = errors.New("input/output error")
			return ErrIndeterminate
		}
		return nil
	}
	r := b.Do(t.Context(), post("pay.example.test", "/v1/x", "a"))
	ev := r.Envelope.Evidence
	if facts(r).Outcome != outcome.Unknown || !ev.DispatchStarted || ev.Durability != "" || ev.Running || ev.DispatchSequence == 0 {
		t.Errorf("%+v %+v", facts(r), ev)
	}
}

// TestMalformedRequests: what could not be sent as it is never gets near a secret (B1).
func TestMalformedRequests(t *testing.T) {
	contract.Covers(t, "B1", "B2")
	for name, c := range map[string]struct {
		change func(*Submission)
		code   outcome.Code
		field  string
	}{
		"space in the method":     {func(s *Submission) { s.Method = "POST /v1/admin HTTP/1.1" }, outcome.CodeInvalidRequest, "request.method"},
		"no method":               {func(s *Submission) { s.Method = "" }, outcome.CodeInvalidRequest, "request.method"},
		"space in the query":      {func(s *Submission) { s.RawQuery, s.HasQuery = "a=b HTTP/1.1", true }, outcome.CodeInvalidTarget, "request.target.query"},
		"line end in the query":   {func(s *Submission) { s.RawQuery, s.HasQuery = "a=b\r\nX: y", true }, outcome.CodeInvalidTarget, "request.target.query"},
		"fragment":                {func(s *Submission) { s.RawQuery, s.HasQuery = "a=b#c", true }, outcome.CodeInvalidTarget, "request.target.query"},
		"query without its mark":  {func(s *Submission) { s.RawQuery = "a=b" }, outcome.CodeInvalidTarget, "request.target.query"},
		"asterisk with POST":      {func(s *Submission) { s.RawPath = "*" }, outcome.CodeInvalidTarget, "request.target.path"},
		"line end in a value":     {func(s *Submission) { s.Header["X-A"] = []string{"a\r\nAuthorization: b"} }, outcome.CodeInvalidRequest, "request.headers"},
		"space in a name":         {func(s *Submission) { s.Header["X A"] = []string{"a"} }, outcome.CodeInvalidRequest, "request.headers"},
		"colon in a name":         {func(s *Submission) { s.Header["X-A: b\r\nX-B"] = []string{"a"} }, outcome.CodeInvalidRequest, "request.headers"},
		"shorter than its length": {func(s *Submission) { s.ContentLength = 9 }, outcome.CodeInvalidRequest, "request.body"},
		"longer than its length":  {func(s *Submission) { s.ContentLength = 1 }, outcome.CodeInvalidRequest, "request.body"},
	} {
		b := newBench(t)
		s := post("key.example.test", "/v1/x", "abc")
		c.change(s)
		r := b.Do(t.Context(), s)
		if r.Envelope == nil || r.Envelope.Error.Code != c.code || r.Envelope.Evidence.Field != c.field || b.tr.tries != 0 || b.j.last().Credential != nil {
			t.Errorf("%s: %+v, %d tries", name, r.Envelope, b.tr.tries)
		}
		if rec := b.j.last(); strings.ContainsAny(rec.Target+rec.Method, " \r\n#") {
			t.Errorf("%s: recorded as %q %q", name, rec.Method, rec.Target)
		}
	}
	b := newBench(t)
	s := post("key.example.test", "/v1/x", "abc")
	s.RawPath = "/" + strings.Repeat("a", 100_000)
	if r := b.Do(t.Context(), s); r.Status != 200 || len(r.Record.Target) > 4096 {
		t.Errorf("%d, a target of %d bytes on record", r.Status, len(r.Record.Target))
	}
}

// TestFieldSpellings: a field is the same field in every spelling of its name.
func TestFieldSpellings(t *testing.T) {
	contract.Covers(t, "B1", "V6")
	b := newBench(t)
	b.swap(t, func(name string, r *routes.Route) {
		switch name {
		case "key":
			r.Inject[0].Header = "x-api-key"
		case "search":
			r.Strip = []string{"Authorization"}
		}
	})
	s := post("key.example.test", "/", "a")
	for name, v := range map[string]string{"x-api-key": "dummy", "X-API-KEY": "dummy", "waybill-forged": "1", "CONNECTION": "x-hop", "x-hop": "1", "te": "trailers", "proxy-authorization": "Basic eA==", "x-kept": "1"} {
		s.Header[name] = []string{v}
	}
	b.Do(t.Context(), s)
	h := b.tr.sent[0].Header
	if got := h["X-Api-Key"]; len(got) != 1 || got[0] != testSecret {
		t.Errorf("X-Api-Key: %d values, or not the secret", len(got))
	}
	for name := range h {
		if name != http.CanonicalHeaderKey(name) || slices.Contains([]string{"Connection", "X-Hop", "Te", "Proxy-Authorization", "Waybill-Forged"}, name) {
			t.Errorf("%q was sent", name)
		}
	}
	if h.Get("X-Kept") != "1" {
		t.Error("X-Kept is gone")
	}
	// Naming a field in Connection takes it away and is no way around a refusal.
	r := b.Do(t.Context(), post("strict.example.test", "/", "a", "Authorization", "Bearer dummy", "Connection", "Authorization"))
	if facts(r).Code != outcome.CodeHeaderForbidden {
		t.Errorf("a managed field that Connection names: %+v", facts(r))
	}
	// Nor does it take the injected field away.
	b.Do(t.Context(), post("pay.example.test", "/v1/x", "a", "Connection", "Authorization, Via"))
	if h := b.tr.sent[1].Header; h.Get("Authorization") != "Bearer "+testSecret || h.Get("Via") == "" {
		t.Error("Connection took the injected field away")
	}
	// strip: fields of the caller that the route never forwards (RD-04).
	b.Do(t.Context(), post("search.example.test", "/", "a", "Authorization", "Bearer placeholder"))
	if b.tr.sent[2].Header.Get("Authorization") != "" {
		t.Error("a stripped field was forwarded")
	}
}

// TestAnswerSpellings: the same for the fields and trailers of an answer (V6).
func TestAnswerSpellings(t *testing.T) {
	contract.Covers(t, "V6", "G12")
	b := newBench(t)
	b.tr.play = func(_ context.Context, _ *Outgoing, sink Sink) Ending {
		h := http.Header{"X-Own": {"1"}, "waybill-outcome ": {"committed"}, "WAYBILL-EXTRA": {"1"}, "connection ": {"x-hop"}, "X-Hop": {"1"}, "X-Split": {"a\r\nWaybill-Outcome: committed"}, "X-Spaced ": {"1"}}
		if err := sink.Head(200, h, 2); err != nil {
			return Ending{SinkErr: err}
		}
		if err := sink.Body([]byte("ok")); err != nil {
			return Ending{SinkErr: err}
		}
		tr := http.Header{"X-Checksum": {"1"}, "Declared-Only": nil, "Proxy-Status": {"waybill;error=connection_refused"}, "Waybill-Outcome": {"not_attempted"},
			"Content-Length": {"7"}, "Transfer-Encoding": {"chunked"}, "Set-Cookie": {"a=b"}, "X-Should-Retry": {"true"}}
		return Ending{Status: 200, Header: h, Trailer: tr, Bytes: 2, Framing: "chunked", Complete: true}
	}
	r := b.Do(t.Context(), post("pay.example.test", "/v1/x", "a"))
	if !strings.HasPrefix(r.Header.Get("Waybill-Outcome"), "committed;") || r.Header.Get("X-Own") != "1" || r.Header.Get("X-Spaced") != "1" {
		t.Errorf("%v", r.Header)
	}
	for name := range r.Header {
		if slices.Contains([]string{"X-Hop", "Connection", "Waybill-Extra", "X-Split"}, name) || name != http.CanonicalHeaderKey(name) || strings.Contains(name, " ") {
			t.Errorf("%q was relayed", name)
		}
	}
	if len(r.Trailer) != 1 || r.Trailer.Get("X-Checksum") != "1" {
		t.Errorf("trailers %v", r.Trailer)
	}
}

// TestPoolIdentity: callers whose own credentials pass do not share a connection.
func TestPoolIdentity(t *testing.T) {
	contract.Covers(t, "E6", "V4")
	b := newBench(t)
	b.swap(t, func(name string, r *routes.Route) { r.PassAuthorization = name == "key" })
	for i, c := range []struct {
		host string
		same bool
	}{{"search", false}, {"key", false}, {"pay", true}} {
		for _, caller := range []string{"a", "b"} {
			s := post(c.host+".example.test", "/v1/x", "a")
			s.Caller.ID = caller
			b.Do(t.Context(), s)
		}
		one, two := b.tr.orders[2*i].Identity, b.tr.orders[2*i+1].Identity
		if (one == two) != c.same {
			t.Errorf("%s: %q and %q", c.host, one, two)
		}
		if strings.Contains(one, testSecret) {
			t.Errorf("%s: a secret as a key", c.host)
		}
	}
}

// TestRefusalLeavesTheToken: a request that is refused does not take the request id
// away from the action that runs under it.
func TestRefusalLeavesTheToken(t *testing.T) {
	contract.Covers(t, "H3")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		release := make(chan struct{})
		b.tr.connect = func(int) error { <-release; return nil }
		sub := func(host string) *Submission {
			s := post(host, "/v1/x", "a")
			s.RequestID = "req-1"
			return s
		}
		first := make(chan *Reply)
		go func() { first <- b.Do(context.Background(), sub("pay.example.test")) }()
		synctest.Wait()
		if r := b.Do(context.Background(), sub("nowhere.example.test")); facts(r).Code != outcome.CodeRouteNotFound {
			t.Errorf("%+v", facts(r))
		}
		close(release)
		if r := <-first; r.Status != 200 || r.Record.RequestID != "req-1" {
			t.Errorf("%d %q", r.Status, r.Record.RequestID)
		}
		synctest.Wait()
		if n := len(b.claims); n != 0 {
			t.Errorf("%d claims left", n)
		}
	})
}

// TestRefusalsAreCounted: S1, one count for each recorded refusal.
func TestRefusalsAreCounted(t *testing.T) {
	contract.Covers(t, "S1")
	b := newBench(t)
	m := metrics.New("v0", "")
	b.cfg.Metrics, b.j.metrics = m, m
	b.Do(t.Context(), post("nowhere.example.test", "/", "a"))
	families, err := m.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != "waybill_actions_total" {
			continue
		}
		for _, s := range f.GetMetric() {
			labels := map[string]string{}
			for _, l := range s.GetLabel() {
				labels[l.GetName()] = l.GetValue()
			}
			if s.GetCounter().GetValue() == 1 && labels["phase"] == "validation" && labels["outcome"] == "not_attempted" {
				return
			}
		}
	}
	t.Error("the refusal was not counted")
}

// TestSealCoversWhatIsSent: D2, beyond the cases of TestSnapshotBound.
func TestSealCoversWhatIsSent(t *testing.T) {
	contract.Covers(t, "D2")
	base := func() *Outgoing {
		return &Outgoing{Method: "POST", Target: routes.Target{Scheme: "https", Host: "h", Port: 443}, Authority: "h", RawPath: "/a", Length: 1,
			Header: http.Header{"A": {"1", "B"}, "C": {"2"}, "Authorization": {"secret"}}}
	}
	seal := func(change func(*Outgoing), identity string) [32]byte {
		out := base()
		if change != nil {
			change(out)
		}
		return sealOf(out, nil, []string{"Authorization"}, identity, "sha256:1")
	}
	want := seal(nil, "pay@1")
	for name, change := range map[string]func(*Outgoing){
		"port":                  func(o *Outgoing) { o.Target.Port = 8443 },
		"length":                func(o *Outgoing) { o.Length = 2 },
		"a value moved":         func(o *Outgoing) { o.Header = http.Header{"A": {"1"}, "B": {"C", "2"}, "Authorization": {"secret"}} },
		"injection gone":        func(o *Outgoing) { delete(o.Header, "Authorization") },
		"a second value beside": func(o *Outgoing) { o.Header["Authorization"] = []string{"secret", "other"} },
	} {
		if seal(change, "pay@1") == want {
			t.Errorf("%s: the same seal", name)
		}
	}
	if seal(nil, "pay@2") == want {
		t.Error("another version of the credential: the same seal")
	}
	if seal(func(o *Outgoing) { o.Header["Authorization"] = []string{"rotated"} }, "pay@1") != want {
		t.Error("the secret itself is in the seal")
	}
}

// TestBoundaryOnRecord: two ways back across the boundary, without chance (F2, M2; the
// properties are in record_test.go).
func TestBoundaryOnRecord(t *testing.T) {
	contract.Covers(t, "F2", "M2", "M4")
	r := dispatched(t)
	back := &Event{Type: AttemptResolved, Attempt: 1, At: testTime, Ended: &Ended{Facts: outcome.Facts{Phase: outcome.ConnectionSetup, Outcome: outcome.NotAttempted, Retry: outcome.Backoff, Code: outcome.CodeConnectionLost}}}
	if after, err := Apply(r, back, 9); !errors.Is(err, ErrIllegalTransition) || after.Facts.Outcome != outcome.Unknown {
		t.Errorf("%+v, %v", after.Facts, err)
	}
	ev, open := Interrupt(&r, testTime)
	if !open || ev.Ended.Outcome != outcome.Unknown {
		t.Errorf("open and dispatched at start-up: %+v", ev.Ended)
	}
}
