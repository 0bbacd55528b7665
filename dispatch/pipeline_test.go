package dispatch

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"waybill/internal/contract"
	"waybill/outcome"
	"waybill/routes"
)

func wantFacts(t *testing.T, got outcome.Facts, p outcome.Phase, o outcome.Outcome, r outcome.Retry, c outcome.Code) {
	t.Helper()
	if want := (outcome.Facts{Phase: p, Outcome: o, Retry: r, Code: c}); got != want {
		t.Errorf("facts %v %v %v %v, want %v %v %v %v", got.Phase, got.Outcome, got.Retry, got.Code, p, o, r, c)
	}
	if err := got.Validate(); err != nil {
		t.Errorf("facts do not go together: %v", err)
	}
}

// TestOrder: the record of the dispatch is durable before the hand-over, and the
// result before the answer (CONTRACT F1, H1).
func TestOrder(t *testing.T) {
	contract.Covers(t, "F1", "H1", "M1")
	b := newBench(t)
	r := b.Do(t.Context(), post("pay.example.test", "/v1/charges", "amount=5"))
	b.log.note("answered")
	if r.Status != 200 || readBody(t, r) != "ok" || r.Envelope != nil {
		t.Fatalf("%d %+v", r.Status, r.Envelope)
	}
	want := []string{"durable ACTION_ACCEPTED", "durable PREFLIGHT_VALIDATED", "durable CREDENTIAL_AUTHORIZED", "durable DISPATCH_STARTED", "sent POST /v1/charges",
		"durable REQUEST_SENT", "durable REMOTE_RESPONSE_STARTED", "durable REMOTE_RESPONSE_COMPLETE", "durable RESULT_COMMITTED", "durable chunk 0", "answered"}
	if !slices.Equal(b.log.lines, want) {
		t.Errorf("order\n%s\nwant\n%s", strings.Join(b.log.lines, "\n"), strings.Join(want, "\n"))
	}
	wantFacts(t, facts(r), outcome.RemoteExecution, outcome.Committed, outcome.Never, outcome.CodeNone)
}

// TestNothingIsSentBeforeTheRecordIsDurable holds the journal and looks.
func TestNothingIsSentBeforeTheRecordIsDurable(t *testing.T) {
	contract.Covers(t, "F1")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		release := make(chan struct{})
		b.j.before = func(batch Batch) error {
			if batch.Events[len(batch.Events)-1].Type == DispatchStarted {
				<-release
			}
			return nil
		}
		done := make(chan *Reply)
		go func() { done <- b.Do(context.Background(), post("pay.example.test", "/v1/x", "a")) }()
		synctest.Wait()
		if n := b.tr.count(); n != 0 {
			t.Errorf("%d requests were handed over while DISPATCH_STARTED was not durable", n)
		}
		close(release)
		if r := <-done; r.Status != 200 {
			t.Errorf("status %d", r.Status)
		}
	})
}

// TestNothingIsAnsweredBeforeTheResultIsDurable: H1 at the other end.
func TestNothingIsAnsweredBeforeTheResultIsDurable(t *testing.T) {
	contract.Covers(t, "H1")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		release := make(chan struct{})
		b.j.before = func(batch Batch) error {
			if batch.Events[len(batch.Events)-1].Type == ResultCommitted {
				<-release
			}
			return nil
		}
		done := make(chan *Reply, 1)
		go func() { done <- b.Do(context.Background(), post("pay.example.test", "/v1/x", "a")) }()
		synctest.Wait()
		select {
		case r := <-done:
			t.Error("answered before the result was durable")
			done <- r
		default:
		}
		close(release)
		<-done
	})
}

// TestJournalFailsAtTheBoundary: F9.
func TestJournalFailsAtTheBoundary(t *testing.T) {
	contract.Covers(t, "F9", "M6", "C4")
	for _, c := range []struct {
		err   error
		facts outcome.Facts
		http  int
	}{
		{ErrNotWritten, outcome.Facts{Phase: outcome.ConnectionSetup, Outcome: outcome.NotAttempted, Retry: outcome.Backoff, Code: outcome.CodeJournalUnavailable}, 503},
		{ErrIndeterminate, outcome.Facts{Phase: outcome.ConnectionSetup, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeJournalIndeterminate}, 424},
		{errors.New("input/output error"), outcome.Facts{Phase: outcome.ConnectionSetup, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeJournalIndeterminate}, 424},
	} {
		b := newBench(t)
		b.j.before = func(Batch) error { return c.err }
		r := b.Do(t.Context(), post("pay.example.test", "/v1/x", "a"))
		if facts(r) != c.facts || r.Status != c.http {
			t.Errorf("%v: %+v %d", c.err, facts(r), r.Status)
		}
		if n := b.tr.count(); n != 0 {
			t.Errorf("%v: %d requests were handed over", c.err, n)
		}
		if got := r.Envelope.Evidence.DispatchStarted; got != (c.facts.Outcome == outcome.Unknown) {
			t.Errorf("%v: dispatch_started %v", c.err, got)
		}
	}
	b := newBench(t)
	b.j.admit = ErrNotWritten
	r := b.Do(t.Context(), post("pay.example.test", "/v1/x", "a"))
	wantFacts(t, facts(r), outcome.Validation, outcome.NotAttempted, outcome.Backoff, outcome.CodeJournalUnavailable)
	if b.tr.tries != 0 || r.Header.Get("Retry-After") == "" {
		t.Errorf("tries %d, Retry-After %q", b.tr.tries, r.Header.Get("Retry-After"))
	}
}

// TestCallerLeavesBeforeDispatch: F10.
func TestCallerLeavesBeforeDispatch(t *testing.T) {
	contract.Covers(t, "F10")
	b := newBench(t)
	ctx, cancel := context.WithCancel(t.Context())
	b.tr.connect = func(int) error { cancel(); return nil }
	r := b.Do(ctx, post("pay.example.test", "/v1/x", "a"))
	if !r.Gone || b.tr.count() != 0 {
		t.Errorf("gone=%v, %d handed over", r.Gone, b.tr.count())
	}
	wantFacts(t, b.j.last().Facts, outcome.ConnectionSetup, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodeCallerCancelled)
}

// TestCallerLeavesAfterDispatch: F5, H2. The attempt goes on and its result is kept.
func TestCallerLeavesAfterDispatch(t *testing.T) {
	contract.Covers(t, "F5", "H2")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		release := make(chan struct{})
		b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
			cancel()
			<-release // the caller has its answer by now
			if ctx.Err() != nil {
				t.Error("the attempt ended with its caller")
			}
			return answerWith(201, "made")(ctx, out, sink)
		}
		r := b.Do(ctx, post("pay.example.test", "/v1/x", "a"))
		if !r.Gone || facts(r).Outcome != outcome.Unknown {
			t.Errorf("gone=%v outcome=%v", r.Gone, facts(r).Outcome)
		}
		close(release)
		synctest.Wait()
		rec := b.j.last()
		wantFacts(t, rec.Facts, outcome.ResultDelivery, outcome.Committed, outcome.FetchResult, outcome.CodeDeliveryFailed)
		if ev := rec.Evidence(); ev.LocalCause != "CALLER_CANCELLED" || rec.Result == nil || rec.Result.Status != 201 {
			t.Errorf("evidence %+v result %+v", ev, rec.Result)
		}
	})
}

// TestWaitIsOver: Waybill-Timeout ends the wait and nothing else.
func TestWaitIsOver(t *testing.T) {
	contract.Covers(t, "F5")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		release := make(chan struct{})
		b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
			<-release
			return answerWith(201, "made")(ctx, out, sink)
		}
		s := post("pay.example.test", "/v1/x", "a")
		s.Wait = 2 * time.Second
		start := time.Now()
		r := b.Do(context.Background(), s)
		if d := time.Since(start); d != 2*time.Second {
			t.Errorf("answered after %v", d)
		}
		wantFacts(t, outcomeOf(r), outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteTimeout)
		if r.Status != 424 || r.Gone || !r.Envelope.Evidence.Running {
			t.Errorf("%d gone=%v running=%v", r.Status, r.Gone, r.Envelope.Evidence.Running)
		}
		close(release)
		synctest.Wait()
		if got := b.j.last(); got.Facts.Outcome != outcome.Committed {
			t.Errorf("in the end: %+v", got.Facts)
		}
	})
}

func outcomeOf(r *Reply) outcome.Facts {
	if r.Envelope == nil {
		return outcome.Success()
	}
	return r.Envelope.Facts()
}

// TestResultCannotBeStored: H7, H8, Q13.
func TestResultCannotBeStored(t *testing.T) {
	contract.Covers(t, "H7", "H8")
	for _, fail := range []error{ErrNotWritten, ErrIndeterminate} {
		b := newBench(t)
		b.j.before = func(batch Batch) error {
			if batch.Events[len(batch.Events)-1].Type == ResultCommitted {
				return fail
			}
			return nil
		}
		r := b.Do(t.Context(), post("pay.example.test", "/v1/x", "a"))
		wantFacts(t, outcomeOf(r), outcome.ResultDelivery, outcome.Unknown, outcome.Reconcile, outcome.CodeResultStoreFailed)
		if r.Status != 424 || strings.Contains(readBody(t, r), `"ok"`) || b.tr.count() != 1 {
			t.Errorf("%d, %d handed over", r.Status, b.tr.count())
		}
		if got := b.j.last(); got.Facts.Outcome != outcome.Unknown || !got.GuardsRepeats() {
			t.Errorf("on record: %+v", got.Facts)
		}
	}
	// In the middle of a large body.
	b := newBench(t)
	n := 0
	b.j.before = func(batch Batch) error {
		if len(batch.Chunks) > 0 {
			if n++; n == 3 {
				return ErrNotWritten
			}
		}
		return nil
	}
	b.tr.play = answerWith(200, strings.Repeat("x", 2<<20))
	r := b.Do(t.Context(), post("small.example.test", "/v1/x", "a"))
	wantFacts(t, outcomeOf(r), outcome.ResultDelivery, outcome.Unknown, outcome.Reconcile, outcome.CodeResultStoreFailed)
}

// TestUnresolved: what an exchange without a complete answer becomes (F2, G2, G8, L7).
func TestUnresolved(t *testing.T) {
	contract.Covers(t, "F2", "G8", "L7", "G11", "L5")
	for _, c := range []struct {
		host   string
		code   outcome.Code
		want   outcome.Facts
		status int
	}{
		{"pay", outcome.CodeRemoteOutcomeUnknown, unk(outcome.Reconcile, outcome.CodeRemoteOutcomeUnknown), 424},
		{"pay", outcome.CodeRemoteTimeout, unk(outcome.Reconcile, outcome.CodeRemoteTimeout), 424},
		{"pay", outcome.CodeRemoteResultIncomplete, unk(outcome.Reconcile, outcome.CodeRemoteResultIncomplete), 424},
		{"pay", outcome.CodeRemoteProtocolError, unk(outcome.Reconcile, outcome.CodeRemoteProtocolError), 424},
		{"pay", outcome.CodeResultLimit, unk(outcome.Reconcile, outcome.CodeResultLimit), 424},
		{"search", outcome.CodeRemoteOutcomeUnknown, unk(outcome.Backoff, outcome.CodeRemoteOutcomeUnknown), 502},
		{"search", outcome.CodeRemoteTimeout, unk(outcome.Backoff, outcome.CodeRemoteTimeout), 504},
		{"pay", outcome.CodeRemoteRefused, outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Rejected, Retry: outcome.Backoff, Code: outcome.CodeRemoteRefused}, 503},
		{"pay", outcome.CodeClientCertificateRequired, outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Rejected, Retry: outcome.AfterCorrection, Code: outcome.CodeClientCertificateRequired}, 422},
	} {
		b := newBench(t)
		b.tr.play = endWith(c.code)
		r := b.Do(t.Context(), post(c.host+".example.test", "/v1/x", "a"))
		if facts(r) != c.want || r.Status != c.status || b.tr.count() != 1 {
			t.Errorf("%s %v: %+v %d, %d arrivals", c.host, c.code, facts(r), r.Status, b.tr.count())
		}
		if err := facts(r).Validate(); err != nil {
			t.Error(err)
		}
		if o := r.Header.Get("Waybill-Outcome"); !strings.HasPrefix(o, c.want.Outcome.String()+";") || r.Header.Get("Waybill-Invocation") != r.ID.String() || r.Header.Get("Proxy-Status") == "" {
			t.Errorf("fields %v", r.Header)
		}
		if (c.status == 424) != (r.Header.Get("X-Should-Retry") == "false") && c.status != 422 {
			t.Errorf("%v: x-should-retry %q", c.code, r.Header.Get("X-Should-Retry"))
		}
	}
}

func unk(r outcome.Retry, c outcome.Code) outcome.Facts {
	return outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: r, Code: c}
}

// TestStatus: what a complete answer means (G5, G6, G10), and that it is relayed (G12).
func TestStatus(t *testing.T) {
	contract.Covers(t, "A5", "A6", "G5", "G6", "G10", "G12")
	const n, ac, bo, rc = outcome.Never, outcome.AfterCorrection, outcome.Backoff, outcome.Reconcile
	com, rej, un := outcome.Committed, outcome.Rejected, outcome.Unknown
	rejd, rerr, gw := outcome.CodeRemoteRejected, outcome.CodeRemoteError, outcome.CodeRemoteGateway
	for _, c := range []struct {
		method, host string
		status       int
		after        string
		o            outcome.Outcome
		r            outcome.Retry
		code         outcome.Code
	}{
		{"POST", "pay", 200, "", com, n, outcome.CodeNone}, {"POST", "pay", 202, "", com, n, outcome.CodeNone},
		{"POST", "pay", 302, "", com, n, outcome.CodeNone}, {"POST", "pay", 307, "", com, n, outcome.CodeNone}, {"GET", "pay", 304, "", com, n, outcome.CodeNone},
		{"POST", "pay", 400, "", rej, ac, rejd}, {"POST", "pay", 401, "", rej, ac, rejd}, {"POST", "pay", 409, "", rej, ac, rejd}, {"POST", "pay", 422, "", rej, ac, rejd},
		{"POST", "pay", 429, "", rej, n, rejd}, {"POST", "pay", 429, "7", rej, n, rejd}, {"POST", "pay", 408, "7", rej, n, rejd}, {"POST", "pay", 425, "7", rej, n, rejd},
		{"GET", "pay", 429, "7", rej, bo, rejd}, {"GET", "pay", 429, "", rej, n, rejd}, {"GET", "pay", 429, "0", rej, n, rejd}, {"GET", "pay", 429, "soon", rej, n, rejd},
		{"GET", "pay", 429, "999999", rej, n, rejd}, {"GET", "pay", 408, "7", rej, bo, rejd},
		{"GET", "pay", 429, "Sun, 06 Nov 1994 08:49:37 GMT", rej, n, rejd},
		{"POST", "search", 429, "7", rej, bo, rejd}, {"POST", "limited", 429, "7", rej, bo, rejd}, {"POST", "limited", 425, "7", rej, n, rejd},
		{"POST", "pay", 500, "", com, rc, rerr}, {"GET", "pay", 500, "7", com, rc, rerr}, {"POST", "pay", 501, "", com, rc, rerr}, {"POST", "pay", 999, "", com, rc, rerr},
		{"POST", "pay", 503, "7", com, rc, rerr}, {"GET", "pay", 503, "7", rej, bo, rejd}, {"GET", "pay", 503, "", com, rc, rerr}, {"POST", "limited", 503, "7", rej, bo, rejd},
		{"POST", "pay", 502, "", un, rc, gw}, {"POST", "pay", 504, "7", un, rc, gw}, {"GET", "pay", 502, "", un, bo, gw}, {"POST", "search", 504, "", un, bo, gw},
	} {
		b := newBench(t)
		fields := []string{"Content-Type", "text/x-own", "X-Own", "kept", "Connection", "X-Hop", "X-Hop", "dropped", "Waybill-Outcome", "committed", "Waybill-Extra", "forged"}
		if c.after != "" {
			fields = append(fields, "Retry-After", c.after)
		}
		b.tr.play = answerWith(c.status, "the origin's own words", fields...)
		s := post(c.host+".example.test", "/v1/x", "a")
		s.Method = c.method
		r := b.Do(t.Context(), s)
		if want := (outcome.Facts{Phase: outcome.RemoteExecution, Outcome: c.o, Retry: c.r, Code: c.code}); facts(r) != want {
			t.Errorf("%s %s %d %q: %+v, want %+v", c.method, c.host, c.status, c.after, facts(r), want)
		}
		if r.Status != c.status || readBody(t, r) != "the origin's own words" || r.Header.Get("X-Own") != "kept" || r.Envelope != nil {
			t.Errorf("%d was not relayed as it came: %d %v", c.status, r.Status, r.Header)
		}
		if r.Header.Get("X-Hop") != "" || r.Header.Get("Connection") != "" || r.Header.Get("Waybill-Extra") != "" || len(r.Header["Waybill-Outcome"]) != 1 {
			t.Errorf("hop-by-hop or forged fields were relayed: %v", r.Header)
		}
	}
}

// TestForgedFieldsAreDropped: V6.
func TestForgedFieldsAreDropped(t *testing.T) {
	contract.Covers(t, "V6", "G10")
	b := newBench(t)
	b.tr.play = answerWith(502, "", "Waybill-Invocation", "act_forged", "Waybill-Outcome", "not_attempted;phase=validation;retry=backoff", "Waybill-Replayed", "act_x", "Proxy-Status", `edge.example;error=connection_refused`)
	r := b.Do(t.Context(), post("pay.example.test", "/v1/x", "a"))
	if r.Header.Get("Waybill-Invocation") != r.ID.String() || r.Header.Get("Waybill-Replayed") != "" || !strings.HasPrefix(r.Header.Get("Waybill-Outcome"), "unknown;") {
		t.Errorf("%v", r.Header)
	}
	// The intermediary's word about its own attempt is kept, with the hop, and proves nothing.
	if ps := strings.Join(r.Header["Proxy-Status"], ", "); !strings.HasPrefix(ps, "edge.example;error=connection_refused") || !strings.Contains(ps, "waybill") {
		t.Errorf("Proxy-Status %q", ps)
	}
	rec := r.Record
	if ev := rec.Evidence(); ev.Hop == "" || ev.ReceivedProxyStatus == "" {
		t.Errorf("evidence %+v", ev)
	}
}

// TestAuthorities: all names of the destination agree, or nothing is dialled (B1, Q14).
func TestAuthorities(t *testing.T) {
	contract.Covers(t, "B1", "B2", "B4", "V1")
	for _, c := range []struct {
		name   string
		scheme string
		a      Authorities
		path   string
		code   outcome.Code
		field  string
	}{
		{"tunnel and Host", "https", Authorities{Connect: "evil.example.test:443", SNI: "evil.example.test", Host: "pay.example.test"}, "/v1/x", outcome.CodeInvalidTarget, "request.headers.host"},
		{"mirror image", "https", Authorities{Connect: "pay.example.test:443", SNI: "pay.example.test", Host: "evil.example.test"}, "/v1/x", outcome.CodeInvalidTarget, "request.headers.host"},
		{"SNI", "https", Authorities{Connect: "pay.example.test:443", SNI: "evil.example.test", Host: "pay.example.test"}, "/v1/x", outcome.CodeInvalidTarget, "tls.server_name"},
		{"URL and Host", "http", Authorities{URL: "pay.example.test", Host: "evil.example.test"}, "/v1/x", outcome.CodeInvalidTarget, "request.headers.host"},
		{"another port", "http", Authorities{URL: "pay.example.test", Host: "pay.example.test:8080"}, "/v1/x", outcome.CodeInvalidTarget, "request.headers.host"},
		{"Host without the tunnel's port", "https", Authorities{Connect: "pay.example.test:8443", Host: "pay.example.test"}, "/v1/x", outcome.CodeInvalidTarget, "request.headers.host"},
		{"no name", "https", Authorities{}, "/v1/x", outcome.CodeInvalidTarget, "request.headers.host"},
		{"userinfo", "http", Authorities{URL: "u:p@pay.example.test", Host: "pay.example.test"}, "/v1/x", outcome.CodeInvalidTarget, "request.target"},
		{"scheme", "ftp", Authorities{URL: "pay.example.test"}, "/v1/x", outcome.CodeInvalidTarget, "request.target.scheme"},
		{"dot segments", "https", Authorities{Connect: "pay.example.test:443", Host: "pay.example.test"}, "/v1/%2e%2e/admin", outcome.CodeInvalidTarget, "request.target.path"},
		{"unknown host", "https", Authorities{Connect: "evilpay.example.test:443", Host: "evilpay.example.test"}, "/v1/x", outcome.CodeRouteNotFound, "request.target.host"},
		{"suffix", "https", Authorities{Connect: "pay.example.test.evil.test:443", Host: "pay.example.test.evil.test"}, "/v1/x", outcome.CodeRouteNotFound, "request.target.host"},
		{"other path", "https", Authorities{Connect: "pay.example.test:443", Host: "pay.example.test"}, "/admin", outcome.CodeRouteNotFound, "request.target.path"},
		{"other port", "http", Authorities{URL: "pay.example.test:8081", Host: "pay.example.test:8081"}, "/v1/x", outcome.CodeRouteNotFound, "request.target.port"},
		{"denied", "https", Authorities{Connect: "admin.example.test:443", Host: "admin.example.test."}, "/", outcome.CodePolicyDenied, "request.target"},
		{"not for this caller", "https", Authorities{Connect: "own.example.test:443", Host: "own.example.test"}, "/", outcome.CodePolicyDenied, ""},
	} {
		b := newBench(t)
		s := post("x", c.path, "a")
		s.Scheme, s.Authorities = c.scheme, c.a
		r := b.Do(t.Context(), s)
		if r.Envelope == nil || r.Envelope.Error.Code != c.code || r.Envelope.Evidence.Field != c.field {
			t.Errorf("%s: %+v", c.name, r.Envelope)
			continue
		}
		if b.tr.tries != 0 || b.j.last().Credential != nil || b.j.last().Facts.Outcome != outcome.NotAttempted {
			t.Errorf("%s: something was dialled or a secret was read", c.name)
		}
		if err := r.Envelope.Facts().Validate(); err != nil {
			t.Errorf("%s: %v", c.name, err)
		}
	}
	for _, a := range []Authorities{
		{Connect: "PAY.Example.TEST:443", SNI: "pay.example.test", Host: "pay.example.test."},
		{Connect: "pay.example.test:443", Host: "pay.example.test:443"},
		{Connect: "pay.example.test.:443", SNI: "pay.example.test", Host: "PAY.example.test"},
	} {
		b := newBench(t)
		s := post("x", "/v1/x", "a")
		s.Authorities = a
		if r := b.Do(t.Context(), s); r.Status != 200 {
			t.Errorf("%+v: %d", a, r.Status)
		} else if out := b.tr.sent[0]; out.Authority != "pay.example.test" || out.Target.Host != "pay.example.test" {
			t.Errorf("%+v: sent to %q", a, out.Authority)
		}
	}
}

// TestPlaintextIsUpgraded: ID-07, V2.
func TestPlaintextIsUpgraded(t *testing.T) {
	contract.Covers(t, "V2")
	b := newBench(t)
	s := post("pay.example.test", "/v1/x", "a")
	s.Scheme, s.Authorities = "http", Authorities{URL: "pay.example.test", Host: "pay.example.test"}
	if r := b.Do(t.Context(), s); r.Status != 200 {
		t.Fatalf("%d", r.Status)
	}
	if o := b.tr.orders[0]; o.Target.Scheme != "https" || o.Target.Port != 443 {
		t.Errorf("dialled %+v", o.Target)
	}
	if b.tr.sent[0].Authority != "pay.example.test" {
		t.Errorf("Host %q", b.tr.sent[0].Authority)
	}
}

// TestOutgoingHeader: HD-01 to HD-04, and what is added.
func TestOutgoingHeader(t *testing.T) {
	contract.Covers(t, "B1")
	send := func(host string, fields ...string) (*bench, *Reply) {
		b := newBench(t)
		return b, b.Do(t.Context(), post(host+".example.test", "/v1/x", "a", fields...))
	}
	b, _ := send("pay", "Authorization", "Bearer dummy", "Authorization", "Bearer two", "Cookie", "s=1", "Connection", "keep-alive, Authorization, X-Nominated", "X-Nominated", "1",
		"Proxy-Authorization", "Basic aW5uZXI=", "Proxy-Connection", "keep-alive", "Keep-Alive", "timeout=5", "Te", "trailers", "Waybill-Anything", "1", "Accept", "a/b", "Expect", "100-continue")
	h := b.tr.sent[0].Header
	if got := h["Authorization"]; len(got) != 1 || got[0] != "Bearer "+testSecret {
		t.Errorf("Authorization %d values, or not the injected one", len(got))
	}
	for _, gone := range []string{"Cookie", "Connection", "X-Nominated", "Proxy-Authorization", "Proxy-Connection", "Keep-Alive", "Te", "Waybill-Anything", "Host", "Content-Length"} {
		if _, there := h[gone]; there {
			t.Errorf("%s was forwarded", gone)
		}
	}
	if h.Get("Accept") != "a/b" || h.Get("Via") != "1.1 waybill-test" || len(h["Accept-Encoding"]) != 0 {
		t.Errorf("%v", h["Via"])
	}
	if h.Get("Expect") != "100-continue" {
		t.Error("the caller asked first, and the origin is not asked (UP-02)")
	}
	for name, change := range map[string]func(*Submission){
		"nothing to wait with": func(s *Submission) { s.Body, s.ContentLength = strings.NewReader(""), 0 },
		"no body":              func(s *Submission) { s.Body, s.ContentLength = nil, 0 },
		"HTTP/1.0":             func(s *Submission) { s.Protocol = "HTTP/1.0" },
	} {
		b, s := newBench(t), post("pay.example.test", "/v1/x", "a", "Expect", "100-continue")
		change(s)
		if b.Do(t.Context(), s); b.tr.count() != 1 || b.tr.sent[0].Header.Get("Expect") != "" {
			t.Errorf("%s: Expect was forwarded", name)
		}
	}
	b, _ = send("key", "Authorization", "Bearer dummy")
	if h := b.tr.sent[0].Header; h.Get("X-Api-Key") != testSecret || h.Get("Authorization") != "" {
		t.Error("X-Api-Key route: the agent's Authorization went along")
	}
	b, _ = send("search", "Authorization", "Bearer own")
	if b.tr.sent[0].Header.Get("Authorization") != "Bearer own" {
		t.Error("a route that injects nothing took the caller's Authorization away")
	}
	for _, c := range []struct {
		host   string
		fields []string
		code   outcome.Code
	}{
		{"strict", []string{"Authorization", "Bearer dummy"}, outcome.CodeHeaderForbidden},
		{"pay", []string{"Upgrade", "websocket", "Connection", "Upgrade"}, outcome.CodeUnsupportedAction},
		{"pay", []string{"Via", "1.1 a, 1.1 waybill-test"}, outcome.CodeLoopDetected},
	} {
		b, r := send(c.host, c.fields...)
		if r.Envelope == nil || r.Envelope.Error.Code != c.code || b.tr.tries != 0 || b.j.last().Credential != nil {
			t.Errorf("%v: %+v", c.fields, r.Envelope)
		}
	}
	if b, _ := send("pay", "Upgrade", "h2c", "Connection", "Upgrade, HTTP2-Settings", "Http2-Settings", "AAM"); len(b.tr.sent) != 1 || b.tr.sent[0].Header.Get("Http2-Settings") != "" {
		t.Error("an offer of h2c is left out, not refused")
	}
	for _, m := range []string{"TRACE", "TRACK", "CONNECT"} {
		b := newBench(t)
		s := post("pay.example.test", "/v1/x", "")
		s.Method = m
		if r := b.Do(t.Context(), s); r.Status != 422 || b.tr.tries != 0 {
			t.Errorf("%s: %d", m, r.Status)
		}
	}
	for v, want := range map[string]string{"0": "", "5": "4", "x": ""} {
		b := newBench(t)
		s := post("pay.example.test", "/v1/x", "", "Max-Forwards", v)
		s.Method, s.Body = "OPTIONS", nil
		b.Do(t.Context(), s)
		if (want == "") != (b.tr.count() == 0) || want != "" && b.tr.sent[0].Header.Get("Max-Forwards") != want {
			t.Errorf("Max-Forwards %s", v)
		}
	}
}

// TestCredentialRefusals: C1.
func TestCredentialRefusals(t *testing.T) {
	contract.Covers(t, "C1", "B3")
	b := newBench(t)
	r := b.Do(t.Context(), post("broken.example.test", "/", "a"))
	wantFacts(t, facts(r), outcome.CredentialInjection, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodeCredentialMissing)
	if body := readBody(t, r); strings.Contains(body, "gone") || strings.Contains(body, "NOT_SET") || b.tr.tries != 0 {
		t.Errorf("%s", body)
	}
}

// TestSecretStaysOut: C2. The secret is in the request and in nothing else.
func TestSecretStaysOut(t *testing.T) {
	contract.Covers(t, "C2", "L4")
	var logs bytes.Buffer
	b := newBench(t)
	b.cfg.Logger = slog.New(slog.NewJSONHandler(&logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	b.tr.play = func(context.Context, *Outgoing, Sink) Ending {
		return Ending{Code: outcome.CodeRemoteProtocolError, StatusLine: "HTTP/1.1 1000 Bearer " + testSecret, Err: errors.New(testSecret)}
	}
	s := post("pay.example.test", "/v1/x", "a")
	s.RawQuery, s.HasQuery = "api_key=CANARY-query&x=1&CANARY-bare", true
	r := b.Do(t.Context(), s)
	if got := b.tr.sent[0].Header.Get("Authorization"); got != "Bearer "+testSecret {
		t.Fatal("the secret did not arrive")
	}
	b.tr.play = answerWith(502, "", "Proxy-Status", `edge;details="`+testSecret+`"`)
	r2 := b.Do(t.Context(), post("pay.example.test", "/v1/y", "a"))
	all, err := json.Marshal(map[string]any{"events": b.j.events, "records": b.j.records})
	if err != nil {
		t.Fatal(err)
	}
	rec := r2.Record
	env, _ := json.Marshal(rec.Envelope())
	for name, text := range map[string]string{"log": logs.String(), "answer": readBody(t, r), "envelope": string(env)} {
		if strings.Contains(text, "CANARY") {
			t.Errorf("%s holds a secret", name)
		}
	}
	// The relayed header of the stored result is the origin's; everything else is ours.
	if strings.Contains(strings.ReplaceAll(string(all), `edge;details=\"`+testSecret, ""), "CANARY") {
		t.Error("the journal holds a secret")
	}
}

// TestTries: E7, E8. Every try is on record, bounded, and none was dispatched.
func TestTries(t *testing.T) {
	contract.Covers(t, "E1", "E7", "E8", "E2")
	refused := &SetupError{Code: outcome.CodeConnectionRefused, Stage: outcome.StageDNS, Reason: "connection_refused"}
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.tr.connect = func(int) error { return refused }
		r := b.Do(context.Background(), post("pay.example.test", "/v1/x", "a"))
		wantFacts(t, facts(r), outcome.ConnectionSetup, outcome.NotAttempted, outcome.Backoff, outcome.CodeConnectionRefused)
		ev := r.Envelope.Evidence
		if b.tr.tries != 3 || len(ev.Attempts) != 3 || ev.Attempts[2].N != 3 || ev.Stage != outcome.StageDNS || ev.DispatchStarted {
			t.Errorf("tries %d, evidence %+v", b.tr.tries, ev)
		}
		if !strings.Contains(r.Envelope.Message, "3 tries") || !strings.Contains(r.Envelope.Message, "none was dispatched") || r.Status != 502 {
			t.Errorf("%d %q", r.Status, r.Envelope.Message)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.tr.connect = func(n int) error {
			if n == 1 {
				return refused
			}
			return &SetupError{Code: outcome.CodeTLSCertificateInvalid, Stage: outcome.StageTCPConnect, Reason: "expired"}
		}
		r := b.Do(context.Background(), post("pay.example.test", "/v1/x", "a"))
		wantFacts(t, facts(r), outcome.ConnectionSetup, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodeTLSCertificateInvalid)
		if b.tr.tries != 2 || r.Status != 422 || r.Envelope.Evidence.Attempts[0].Code != outcome.CodeConnectionRefused {
			t.Errorf("tries %d %+v", b.tr.tries, r.Envelope.Evidence.Attempts)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.tr.connect = func(n int) error {
			if n == 1 {
				return refused
			}
			return nil
		}
		r := b.Do(context.Background(), post("pay.example.test", "/v1/x", "a"))
		if a := r.Record.Attempts; r.Status != 200 || len(a) != 2 || a[0].DispatchSeq != 0 || a[1].DispatchSeq == 0 || a[1].N != 2 {
			t.Errorf("%d %+v", r.Status, a)
		}
	})
}

// TestGuard: the duplicate guard (O3, Q11).
func TestGuard(t *testing.T) {
	contract.Covers(t, "O3")
	clock := &fixedClock{at: testTime}
	b := newBench(t)
	b.cfg.Clock = clock
	again := func(mod func(*Submission)) *Reply {
		s := post("pay.example.test", "/v1/x", "amount=5", "Content-Type", "text/plain; charset=utf-8", "User-Agent", fmt.Sprint(len(b.log.lines)))
		if mod != nil {
			mod(s)
		}
		return b.Do(t.Context(), s)
	}
	b.tr.play = endWith(outcome.CodeRemoteOutcomeUnknown)
	first := again(nil)
	refused := again(nil)
	wantFacts(t, facts(refused), outcome.Validation, outcome.NotAttempted, outcome.Reconcile, outcome.CodeDuplicateSuspected)
	if ev := refused.Envelope.Evidence; ev.EarlierAction != first.ID.String() || refused.Status != 424 || b.tr.count() != 1 || refused.Header.Get("X-Should-Retry") != "false" {
		t.Fatalf("%d %+v, %d sent", refused.Status, ev, b.tr.count())
	}
	for name, mod := range map[string]func(*Submission){
		"other caller": func(s *Submission) { s.Caller.ID = "other" },
		"other body":   func(s *Submission) { s.Body, s.ContentLength = strings.NewReader("amount=6"), 8 },
		"other path":   func(s *Submission) { s.RawPath = "/v1/y" },
		"other query":  func(s *Submission) { s.RawQuery, s.HasQuery = "a=1", true },
		"other type":   func(s *Submission) { s.Header.Set("Content-Type", "text/html") },
		"other method": func(s *Submission) { s.Method = "PUT" },
		// What SDKs of services with one path for all say of their operation.
		"other operation": func(s *Submission) { s.Header.Set("X-Amz-Target", "DynamoDB_20120810.DeleteItem") },
		"other action":    func(s *Submission) { s.Header.Set("Soapaction", `"urn:b"`) },
		"other source":    func(s *Submission) { s.Header.Set("X-Amz-Copy-Source", "/b/k") },
		"other part":      func(s *Submission) { s.Header.Set("Content-Range", "bytes 8-15/16") },
		"other account":   func(s *Submission) { s.Header.Set("Stripe-Account", "acct_B") },
	} {
		if r := again(mod); facts(r).Code != outcome.CodeRemoteOutcomeUnknown {
			t.Errorf("%s: %v", name, facts(r).Code)
		}
	}
	// What they change between their tries, and what comes anew with each.
	for _, noise := range [][2]string{
		{"X-Stainless-Retry-Count", "1"}, {"Amz-Sdk-Request", "attempt=2; max=3"}, {"Amz-Sdk-Invocation-Id", "b"}, {"X-Amz-Date", "20261201T000001Z"}, {"Authorization", "AWS4-HMAC-SHA256 other"},
		{"Traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}, {"X-Request-Id", "2"}, {"Date", "Tue, 01 Dec 2026 00:00:01 GMT"}, {"Idempotency-Key", "another"}, {"Content-Type", "text/plain; charset=UTF-8"},
	} {
		if r := again(func(s *Submission) { s.Header.Set(noise[0], noise[1]) }); facts(r).Code != outcome.CodeDuplicateSuspected {
			t.Errorf("with %s: %v", noise[0], facts(r).Code)
		}
	}
	if r := again(func(s *Submission) { s.Supersedes = "act_01ARZ3NDEKTSV4RRFFQ69G5FAV" }); facts(r).Code != outcome.CodeDuplicateSuspected {
		t.Errorf("superseding another action: %v", facts(r).Code)
	}
	second := again(func(s *Submission) { s.Supersedes = first.ID.String() })
	if facts(second).Code != outcome.CodeRemoteOutcomeUnknown {
		t.Fatalf("superseding: %v", facts(second).Code)
	}
	if r := again(func(s *Submission) { s.Supersedes = first.ID.String() }); facts(r).Code != outcome.CodeDuplicateSuspected || r.Envelope.Evidence.EarlierAction != second.ID.String() {
		t.Errorf("superseding the first again: %v", facts(r).Code)
	}
	clock.at = testTime.Add(-10 * 365 * 24 * time.Hour)
	if r := again(nil); facts(r).Code != outcome.CodeDuplicateSuspected {
		t.Errorf("a clock that jumped back opened the guard: %v", facts(r).Code)
	}
	// One that jumped forward, while the process runs, makes nothing older: not what it remembers
	// of its own, not what was there when it began.
	for _, there := range []bool{false, true} {
		clock.at = testTime
		p := b.Pipeline
		if there {
			p = New(b.cfg)
			p.windows()
		}
		clock.at = testTime.Add(10 * 365 * 24 * time.Hour)
		s := post("pay.example.test", "/v1/x", "amount=5", "Content-Type", "text/plain")
		if r := p.Do(t.Context(), s); facts(r).Code != outcome.CodeDuplicateSuspected {
			t.Errorf("a clock that jumped forward opened the guard (ended before the process began: %v): %v", there, facts(r).Code)
		}
	}
	// Nor what ended since then.
	clock.at = testTime.Add(time.Hour)
	again(func(s *Submission) { s.RawPath = "/v1/z" })
	clock.at = testTime.Add(10 * 365 * 24 * time.Hour)
	if r := again(func(s *Submission) { s.RawPath = "/v1/z" }); facts(r).Code != outcome.CodeDuplicateSuspected {
		t.Errorf("a clock that jumped forward opened the guard of a young action: %v", facts(r).Code)
	}
	synctest.Test(t, func(t *testing.T) {
		for _, restarted := range []bool{false, true} {
			b := newBench(t)
			b.tr.play = endWith(outcome.CodeRemoteOutcomeUnknown)
			p := b.Pipeline
			for after, want := range []outcome.Code{outcome.CodeRemoteOutcomeUnknown, outcome.CodeDuplicateSuspected, outcome.CodeRemoteOutcomeUnknown} {
				if r := p.Do(t.Context(), post("pay.example.test", "/v1/x", "amount=5")); facts(r).Code != want {
					t.Errorf("%d minutes later (restarted: %v): %v", 6*after, restarted, facts(r).Code)
				}
				time.Sleep(6 * time.Minute)
				if restarted {
					p = New(b.cfg)
				}
			}
		}
	})
	// Complete 5xx count; refusals, successes and repeatable operations do not.
	for _, c := range []struct {
		host, method string
		status       int
		code         outcome.Code
	}{{"pay", "POST", 500, outcome.CodeDuplicateSuspected}, {"pay", "POST", 502, outcome.CodeDuplicateSuspected}, {"pay", "POST", 400, outcome.CodeRemoteRejected}, {"pay", "POST", 200, outcome.CodeNone}, {"pay", "GET", 500, outcome.CodeRemoteError}, {"search", "POST", 500, outcome.CodeRemoteError}} {
		b := newBench(t)
		b.tr.play = answerWith(c.status, "")
		for i := range 2 {
			s := post(c.host+".example.test", "/v1/x", "a")
			s.Method = c.method
			if r := b.Do(t.Context(), s); i == 1 && facts(r).Code != c.code {
				t.Errorf("%s %s %d again: %v", c.host, c.method, c.status, facts(r).Code)
			}
		}
	}
}

// TestParallelEqualCalls: actions that still run are no duplicates.
func TestParallelEqualCalls(t *testing.T) {
	contract.Covers(t, "O3")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		release := make(chan struct{})
		b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
			<-release
			return answerWith(200, "ok")(ctx, out, sink)
		}
		replies := make(chan *Reply)
		for range 2 {
			go func() { replies <- b.Do(context.Background(), post("pay.example.test", "/v1/x", "a")) }()
		}
		synctest.Wait()
		close(release)
		for range 2 {
			if r := <-replies; r.Status != 200 {
				t.Errorf("%d", r.Status)
			}
		}
	})
}

// TestRequestID: a token names one action, running or ended (DESIGN section 4).
func TestRequestID(t *testing.T) {
	contract.Covers(t, "H3")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		release := make(chan struct{})
		b.tr.connect = func(int) error { <-release; return nil }
		sub := func(caller string) *Submission {
			s := post("pay.example.test", "/v1/x", "a")
			s.Caller.ID, s.RequestID = caller, "req-1"
			return s
		}
		first := make(chan *Reply)
		go func() { first <- b.Do(context.Background(), sub("a")) }()
		synctest.Wait()
		r := b.Do(context.Background(), sub("a"))
		// It has no record yet that could be fetched.
		wantFacts(t, facts(r), outcome.Validation, outcome.NotAttempted, outcome.Backoff, outcome.CodeInvocationInProgress)
		close(release)
		one := <-first
		if r.Envelope.Evidence.EarlierAction != one.ID.String() {
			t.Errorf("names %s, not %s", r.Envelope.Evidence.EarlierAction, one.ID)
		}
		if r := b.Do(context.Background(), sub("a")); facts(r).Code != outcome.CodeInvocationExists || r.Envelope.Evidence.EarlierAction != one.ID.String() || r.Status != 422 {
			t.Errorf("after its end: %+v", facts(r))
		}
		if r := b.Do(context.Background(), sub("b")); r.Status != 200 {
			t.Errorf("another caller's token: %d", r.Status)
		}
		if n := b.tr.count(); n != 2 {
			t.Errorf("%d sent", n)
		}
	})
}

// TestSnapshotBound: an action uses the configuration it was bound to (D1), and
// what is sent is what was bound (D2).
func TestSnapshotBound(t *testing.T) {
	contract.Covers(t, "D1", "D2")
	b := newBench(t)
	old := b.Binding()
	b.tr.connect = func(int) error {
		other, err := routes.NewSnapshot([]routes.Route{{Name: "other", Match: routes.Match{Hosts: []string{"pay.example.test"}}, Deny: true}}, routes.Deny, nil)
		if err != nil {
			t.Error(err)
		}
		b.Swap(&Binding{Snapshot: other, Credentials: old.Credentials})
		return nil
	}
	r := b.Do(t.Context(), post("pay.example.test", "/v1/x", "a"))
	if r.Status != 200 || r.Record.Bound.Snapshot != old.Snapshot.Digest() || r.Record.Bound.Route != "pay" {
		t.Errorf("%d %+v", r.Status, r.Record.Bound)
	}
	if r := b.Do(t.Context(), post("pay.example.test", "/v1/x", "b")); facts(r).Code != outcome.CodePolicyDenied {
		t.Errorf("the new snapshot does not hold: %v", facts(r).Code)
	}

	for name, change := range map[string]func(a *action){
		"header": func(a *action) { a.out.Header.Set("X-New", "1") },
		"secret": func(a *action) { a.out.Header.Set("Authorization", "Bearer of-somebody-else") },
		"path":   func(a *action) { a.out.RawPath = "/v1/other" },
		"query":  func(a *action) { a.out.RawQuery, a.out.HasQuery = "x=1", true },
		"host":   func(a *action) { a.out.Target.Host = "evil.example.test" },
		"method": func(a *action) { a.out.Method = "DELETE" },
		"body":   func(a *action) { a.body.mem[0] = 'X' },
	} {
		b := newBench(t)
		a := &action{p: b.Pipeline, s: post("pay.example.test", "/v1/x", "amount=5"), id: b.newID(), start: testTime}
		a.accepted = Accepted{Caller: "local", Method: "POST"}
		if !b.enter() {
			t.Fatal("draining")
		}
		if r := a.prepare(t.Context()); r != nil {
			t.Fatalf("%s: %+v", name, r.Envelope)
		}
		conn, _ := a.connect(t.Context())
		change(a)
		r := a.record(t.Context(), conn)
		a.close()
		if r == nil {
			t.Errorf("%s: a changed request was recorded for dispatch", name)
			continue
		}
		wantFacts(t, facts(r), outcome.Validation, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodeSnapshotMismatch)
	}
}

// TestBodies: spooled in memory or in an unlinked file, whole or not at all (UP-03).
func TestBodies(t *testing.T) {
	contract.Covers(t, "B1", "D1")
	big := strings.Repeat("0123456789abcdef", 1<<16) // 1 MiB
	b := newBench(t)
	r := b.Do(t.Context(), post("small.example.test", "/", big))
	if r.Status != 200 || b.tr.bodies[0] != big || b.tr.sent[0].Length != int64(len(big)) {
		t.Errorf("%d, %d bytes", r.Status, len(b.tr.bodies[0]))
	}
	unknown := post("small.example.test", "/", big[:100_000])
	unknown.ContentLength = -1
	if r := b.Do(t.Context(), unknown); r.Status != 200 || b.tr.bodies[1] != big[:100_000] {
		t.Errorf("chunked: %d", r.Status)
	}
	entries, err := os.ReadDir(b.cfg.SpoolDir)
	if err != nil || len(entries) != 0 {
		t.Errorf("left in the spool: %v %v", entries, err)
	}
	for name, s := range map[string]*Submission{
		"declared too long": post("tiny.example.test", "/", "123456789"),
		"too long":          func() *Submission { s := post("tiny.example.test", "/", "123456789"); s.ContentLength = -1; return s }(),
	} {
		if r := b.Do(t.Context(), s); facts(r).Code != outcome.CodePayloadLimit || r.Status != 413 || r.Envelope.Evidence.Field != "request.body" {
			t.Errorf("%s: %+v", name, facts(r))
		}
	}
	cut := post("pay.example.test", "/v1/x", "")
	cut.Body, cut.ContentLength = io.MultiReader(strings.NewReader(`{"a":1}`), &failing{}), 100
	sent := b.tr.count()
	if r := b.Do(t.Context(), cut); facts(r).Code != outcome.CodeInvalidRequest || facts(r).Phase != outcome.Validation || b.tr.count() != sent {
		t.Errorf("a cut body: %+v", facts(r))
	}
}

type failing struct{}

func (*failing) Read([]byte) (int, error) { return 0, io.ErrUnexpectedEOF }

// TestLargeResult: stored in chunks before it is delivered, memory bounded.
func TestLargeResult(t *testing.T) {
	contract.Covers(t, "H1")
	b := newBench(t)
	big := strings.Repeat("0123456789abcdef", 5<<16) // 5 MiB
	b.tr.play = answerWith(200, big)
	r := b.Do(t.Context(), post("small.example.test", "/", "a"))
	var got bytes.Buffer
	if _, err := r.Body.(io.WriterTo).WriteTo(&got); err != nil || got.String() != big || r.ContentLength != int64(len(big)) {
		t.Errorf("%d bytes, %v", got.Len(), err)
	}
	if res := r.Record.Result; res.Bytes != int64(len(big)) || res.Chunks != len(b.j.chunks[r.ID]) || res.Chunks != 20 {
		t.Errorf("%+v, %d chunks", res, len(b.j.chunks[r.ID]))
	}
}

// TestDelivery: H2 through HandedOver.
func TestDelivery(t *testing.T) {
	contract.Covers(t, "H2")
	b := newBench(t)
	r := b.Do(t.Context(), post("pay.example.test", "/v1/x", "a"))
	r.HandedOver(nil)
	if b.j.last().Facts.Phase != outcome.RemoteExecution {
		t.Error("a plain hand-over changed the facts")
	}
	r.HandedOver(errors.New("broken pipe"))
	wantFacts(t, b.j.last().Facts, outcome.ResultDelivery, outcome.Committed, outcome.FetchResult, outcome.CodeDeliveryFailed)
}

// TestRelaxed: F1's waiver says what it is.
func TestRelaxed(t *testing.T) {
	contract.Covers(t, "F1")
	b := newBench(t)
	r := b.Do(t.Context(), post("relaxed.example.test", "/", "a"))
	if r.Status != 200 || !b.j.last().Relaxed {
		t.Errorf("%d %+v", r.Status, b.j.last())
	}
	b.tr.connect = func(int) error {
		return &SetupError{Code: outcome.CodeDestinationProhibited, Stage: outcome.StageDNS, Reason: "private_address"}
	}
	r = b.Do(t.Context(), post("relaxed.example.test", "/", "b"))
	wantFacts(t, facts(r), outcome.ConnectionSetup, outcome.NotAttempted, outcome.Never, outcome.CodeDestinationProhibited)
	if b.j.last().Relaxed {
		t.Error("a refusal before dispatch is recorded durably, not relaxed")
	}
}

func TestDraining(t *testing.T) {
	b := newBench(t)
	if err := b.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	r := b.Do(t.Context(), post("pay.example.test", "/v1/x", "a"))
	wantFacts(t, facts(r), outcome.Validation, outcome.NotAttempted, outcome.Backoff, outcome.CodeDraining)
	if r.Status != http.StatusServiceUnavailable || b.tr.tries != 0 {
		t.Errorf("%d", r.Status)
	}
}
