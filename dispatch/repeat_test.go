package dispatch

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"waybill/internal/contract"
	"waybill/outcome"
	"waybill/routes"
)

func keyContract() *routes.Idempotency {
	return &routes.Idempotency{Header: "Idempotency-Key", Scope: "account", Retention: time.Hour, Margin: time.Minute, InProgress: []int{409}, Mismatch: []int{422},
		Promises: routes.KeyPromises(), Source: "test", Reviewed: "2026-11-30"}
}

// repeatRoutes are the routes of this file's tests.
func repeatRoutes() []routes.Route {
	with := func(f func(*routes.Idempotency)) *routes.Idempotency {
		k := keyContract()
		f(k)
		return k
	}
	budget := func(background bool) *routes.Retry {
		return &routes.Retry{Attempts: 3, Total: 10 * time.Minute, Backoff: time.Second, Max: time.Minute, Background: background}
	}
	yes := true
	route := func(name string, c routes.Contract) routes.Route {
		return routes.Route{Name: name, Match: routes.Match{Hosts: []string{name + ".example.test"}}, Contract: c, Limits: routes.Limits{Request: routes.MaxKeptRequest, Connect: time.Second, Tries: 1},
			Inject: []routes.Injection{{Header: "Authorization", Value: "Bearer ${secret}", Credential: "pay"}}}
	}
	// A parameter belongs to one request: Waybill repeats none of these for who waits.
	bound := route("bound-background", routes.Contract{RefusedBeforeExecution: []int{429}, Retry: budget(true)})
	bound.Inject = []routes.Injection{{Kind: routes.InjectQuery, Name: "key", Value: "${secret}", Credential: "pay"}}
	return []routes.Route{
		bound,
		route("keyed", routes.Contract{Idempotency: keyContract()}),
		route("keyed-refuse", routes.Contract{Idempotency: keyContract(), OnRepeat: routes.RepeatRefuse}),
		route("keyed-body", routes.Contract{Idempotency: with(func(k *routes.Idempotency) { k.Header, k.Field = "", "meta.key" })}),
		route("keyed-made", routes.Contract{Idempotency: with(func(k *routes.Idempotency) { k.Maker = routes.MadeByCallerOrWaybill })}),
		route("keyed-speaks", routes.Contract{RefusedBeforeExecution: []int{503}, Idempotency: with(func(k *routes.Idempotency) { k.RefusalsSpeak = true })}),
		route("keyed-unreviewed", routes.Contract{Idempotency: with(func(k *routes.Idempotency) { k.Reviewed = "" })}),
		route("keyed-retry", routes.Contract{Idempotency: keyContract(), Retry: budget(false)}),
		route("keyed-background", routes.Contract{Idempotency: keyContract(), Retry: budget(true)}),
		route("background", routes.Contract{RefusedBeforeExecution: []int{429}, Retry: budget(true)}),
		route("repeat-retry", routes.Contract{Repeatable: &yes, Retry: budget(false)}),
		route("precondition", routes.Contract{Conditional: true}),
		route("meaning", routes.Contract{Responses: []routes.Response{{Status: 409, Outcome: outcome.Committed, Retry: outcome.Never}, {Status: 500, Outcome: outcome.Unknown}}}),
		route("refuses-first", routes.Contract{RefusedBeforeExecution: []int{429}, Idempotency: keyContract()}),
	}
}

// script plays one ending after the other; the last one stays.
func script(turns ...func(context.Context, *Outgoing, Sink) Ending) func(context.Context, *Outgoing, Sink) Ending {
	var mu sync.Mutex
	n := 0
	return func(ctx context.Context, out *Outgoing, sink Sink) Ending {
		mu.Lock()
		turn := turns[min(n, len(turns)-1)]
		n++
		mu.Unlock()
		return turn(ctx, out, sink)
	}
}

var lost = endWith(outcome.CodeRemoteOutcomeUnknown)

// keyed posts with a key.
func keyed(host, key, body string, more ...string) *Submission {
	return post(host+".example.test", "/v1/x", body, append([]string{"Idempotency-Key", key}, more...)...)
}

func (b *bench) do(t *testing.T, s *Submission) *Reply {
	t.Helper()
	r := b.Do(context.Background(), s)
	if r.Envelope != nil {
		_ = r.Body.Close()
	}
	return r
}

// TestKeyFinished: IK-01, IK-07: the recorded result, marked, and nothing is dispatched.
func TestKeyFinished(t *testing.T) {
	contract.Covers(t, "I3", "I9", "I2")
	b := newBench(t)
	b.tr.play = answerWith(201, "made")
	first := b.do(t, keyed("keyed", "k1", "amount=5"))
	wantFacts(t, facts(first), outcome.RemoteExecution, outcome.Committed, outcome.Never, outcome.CodeNone)
	k := first.Record.Bound.Key
	if k == nil || k.Key != "k1" || k.In != "header:Idempotency-Key" || k.Maker != "caller" || !strings.HasPrefix(k.Scope, "account ") || time.Until(k.ExpiresAt) > 59*time.Minute || time.Until(k.ExpiresAt) < 58*time.Minute {
		t.Errorf("I2, I5: %+v", k)
	}
	if readBody(t, first) != "made" {
		t.Error("the first answer")
	}
	for i := range 3 {
		again := b.do(t, keyed("keyed", "k1", "amount=5", "User-Agent", fmt.Sprint("ua/", i), "X-Stainless-Retry-Count", fmt.Sprint(i)))
		if again.Status != 201 || readBody(t, again) != "made" || again.Header.Get(outcome.HeaderReplayed) != first.ID.String() || again.Header.Get(outcome.HeaderInvocation) != first.ID.String() {
			t.Errorf("IK-07: %d %v", again.Status, again.Header)
		}
	}
	for _, body := range []string{"amount=9", "amount=5 "} {
		r := b.do(t, keyed("keyed", "k1", body))
		wantFacts(t, facts(r), outcome.Validation, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodeIdempotencyMismatch)
		if r.Status != 422 || r.Envelope.Evidence.EarlierAction != first.ID.String() {
			t.Errorf("IK-01: %d %+v", r.Status, r.Envelope.Evidence)
		}
	}
	// Another operation on the same path, with a body that is equal by chance, is not
	// answered with the first one's result.
	other := b.do(t, keyed("keyed", "k1", "amount=5", "X-Amz-Target", "Pay.Refund"))
	wantFacts(t, facts(other), outcome.Validation, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodeIdempotencyMismatch)
	if b.tr.count() != 1 {
		t.Errorf("%d dispatches", b.tr.count())
	}
	// Another caller, another origin: another key.
	s := keyed("keyed", "k1", "amount=9")
	s.Caller.ID = "other"
	if r := b.do(t, s); r.Status != 201 || r.Header.Get(outcome.HeaderReplayed) != "" {
		t.Errorf("another caller's key: %d", r.Status)
	}
	if r := b.do(t, keyed("keyed-refuse", "k1", "amount=5")); r.Status != 201 {
		t.Errorf("on_repeat: refuse, first: %d", r.Status)
	}
	r := b.do(t, keyed("keyed-refuse", "k1", "amount=5"))
	wantFacts(t, facts(r), outcome.Validation, outcome.NotAttempted, outcome.FetchResult, outcome.CodeInvocationExists)
}

// TestKeyNeedsAContract: without a reviewed promise a key is an ordinary field (I1, I4, I10).
func TestKeyNeedsAContract(t *testing.T) {
	contract.Covers(t, "I1", "I4", "I10")
	b := newBench(t)
	b.tr.play = lost
	for _, host := range []string{"keyed-unreviewed", "key"} {
		r := b.do(t, keyed(host, "k1", "a"))
		wantFacts(t, facts(r), outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteOutcomeUnknown)
		if r.Record.Bound.Key != nil || r.Status != 424 {
			t.Errorf("%s: a key without a contract counts: %d", host, r.Status)
		}
		r = b.do(t, keyed(host, "k1", "a"))
		wantFacts(t, facts(r), outcome.Validation, outcome.NotAttempted, outcome.Reconcile, outcome.CodeDuplicateSuspected)
	}
	b.tr.play = answerWith(200, "ok")
	b.do(t, post("keyed.example.test", "/v1/plain", "a"))
	b.do(t, post("keyed-made.example.test", "/v1/made", "a"))
	last := len(b.tr.sent) - 1
	if v := b.tr.sent[last-1].Header.Get("Idempotency-Key"); v != "" {
		t.Errorf("I4: a key %q was added where only the caller makes one", v)
	}
	if v := b.tr.sent[last].Header.Get("Idempotency-Key"); !strings.HasPrefix(v, "act_") || b.j.last().Bound.Key.Key != v || b.j.last().Bound.Key.Maker != "waybill" {
		t.Errorf("the made key is %q", v)
	}
}

// TestKeyUnresolved: inside the window a further attempt of the same action with the same
// key; the others meanwhile are told so (IK-03, IK-04, I6).
func TestKeyUnresolved(t *testing.T) {
	contract.Covers(t, "I3", "I6", "I9", "J1", "A9", "A10")
	b := newBench(t)
	b.tr.play = script(lost, lost, answerWith(401, "no"), answerWith(201, "made"))
	first := b.do(t, keyed("keyed", "k3", "x=1"))
	wantFacts(t, facts(first), outcome.RemoteExecution, outcome.Unknown, outcome.SameIdempotencyKey, outcome.CodeRemoteOutcomeUnknown)
	if first.Status != 503 || first.Header.Get("Retry-After") == "" || first.Envelope.Evidence.Idempotency == nil || first.Envelope.Evidence.Idempotency.RemoteContract != "configured" {
		t.Errorf("L1, L7: %d %v %+v", first.Status, first.Header, first.Envelope.Evidence.Idempotency)
	}
	for i, want := range []outcome.Outcome{outcome.Unknown, outcome.Unknown, outcome.Committed} {
		r := b.do(t, keyed("keyed", "k3", "x=1"))
		if r.ID != first.ID || facts(r).Outcome != want || len(r.Record.Attempts) != i+2 || r.Record.Generation != i+2 {
			t.Fatalf("attempt %d: %s %+v", i+2, r.ID, r.Record)
		}
		if i == 1 && (r.Envelope == nil || r.Status != 503 || r.Record.Attempts[2].Facts.Outcome != outcome.Rejected) {
			t.Errorf("A10: the refusal of a repeat was relayed as the action's answer: %d", r.Status)
		}
		if want == outcome.Committed && readBody(t, r) != "made" {
			t.Error("the answer of the repeat")
		}
	}
	for i, o := range b.tr.sent {
		if o.Header.Get("Idempotency-Key") != "k3" || b.tr.bodies[i] != "x=1" {
			t.Errorf("I3: attempt %d sent %q %q", i+1, o.Header.Get("Idempotency-Key"), b.tr.bodies[i])
		}
	}
	if r := b.do(t, keyed("keyed", "k3", "x=1")); r.Header.Get(outcome.HeaderReplayed) == "" || b.tr.count() != 4 {
		t.Errorf("afterwards: %d %v", r.Status, r.Header)
	}
}

// TestOneDispatchForAKey: sixteen submissions under one key at once (IK-03).
func TestOneDispatchForAKey(t *testing.T) {
	contract.Covers(t, "I9", "I2")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		connected := make(chan struct{})
		b.tr.connect = func(int) error { <-connected; return nil }
		release := make(chan struct{})
		b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
			<-release
			return answerWith(201, "made")(ctx, out, sink)
		}
		replies := make(chan *Reply, 16)
		for range 16 {
			go func() { replies <- b.Do(context.Background(), keyed("keyed", "k2", "x=1")) }()
		}
		synctest.Wait()
		close(connected) // all have looked for the key and found none
		synctest.Wait()
		for range 15 {
			r := <-replies
			wantFacts(t, facts(r), outcome.Validation, outcome.NotAttempted, outcome.Backoff, outcome.CodeInvocationInProgress)
			if r.Status != 409 || r.Header.Get("Retry-After") == "" || r.Envelope.Evidence.EarlierAction == "" {
				t.Errorf("%d %v", r.Status, r.Header)
			}
		}
		if r := b.do(t, keyed("keyed", "k2", "x=1")); facts(r).Code != outcome.CodeInvocationInProgress {
			t.Errorf("while it runs: %+v", facts(r))
		}
		if r := b.do(t, keyed("keyed", "k2", "x=2")); facts(r).Code != outcome.CodeIdempotencyMismatch {
			t.Errorf("while it runs, another request: %+v", facts(r))
		}
		close(release)
		if r := <-replies; r.Status != 201 {
			t.Errorf("the one: %d", r.Status)
		}
		if r := b.do(t, keyed("keyed", "k2", "x=1")); r.Header.Get(outcome.HeaderReplayed) == "" {
			t.Errorf("after it: %v", r.Header)
		}
		if b.tr.count() != 1 {
			t.Errorf("%d dispatches", b.tr.count())
		}
	})
}

// TestKeyExpires: after the earliest safe expiry a repeat is refused, also by a clock that
// was set back (I5).
func TestKeyExpires(t *testing.T) {
	contract.Covers(t, "I5", "J3")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		clock := &fixedClock{at: time.Now()}
		b.cfg.Clock = clock
		b.tr.play = lost
		first := b.do(t, keyed("keyed", "k", "x=1"))
		time.Sleep(58 * time.Minute) // the system's clock stands still, time does not
		if r := b.do(t, keyed("keyed", "k", "x=1")); r.ID != first.ID || len(r.Record.Attempts) != 2 {
			t.Fatalf("inside the window: %+v", facts(r))
		}
		time.Sleep(2 * time.Minute)
		clock.at = clock.at.Add(-24 * time.Hour)
		if rec := first.Record.At(b.windowNow()); rec.Facts.Retry != outcome.Reconcile {
			t.Errorf("the advice after the window: %+v", rec.Facts)
		}
		r := b.do(t, keyed("keyed", "k", "x=1"))
		wantFacts(t, facts(r), outcome.Validation, outcome.NotAttempted, outcome.Reconcile, outcome.CodeIdempotencyExpired)
		if r.Status != 424 || b.tr.count() != 2 {
			t.Errorf("%d, %d dispatches", r.Status, b.tr.count())
		}
		rec, _ := b.j.Action(context.Background(), first.ID)
		if rec.Facts.Retry != outcome.Reconcile || rec.Facts.Outcome != outcome.Unknown || rec.Stopped != StoppedKey {
			t.Errorf("the action: %+v %q", rec.Facts, rec.Stopped)
		}
		// Visibly unsafe: a new action with the key.
		s := keyed("keyed", "k", "x=1")
		s.Supersedes = first.ID.String()
		if r := b.do(t, s); r.ID == first.ID || facts(r).Outcome != outcome.Unknown || r.Record.Bound.Key.Replaces != first.ID.String() {
			t.Errorf("superseded: %+v", facts(r))
		}
	})
}

// TestKeyInTheBody: a key in a JSON body, and one that Waybill made.
func TestKeyInTheBody(t *testing.T) {
	contract.Covers(t, "I2", "I3")
	b := newBench(t)
	b.tr.play = script(lost, answerWith(201, "made"))
	body := `{"meta":{"key":"b1"},"amount":5}`
	send := func(body string) *Reply {
		return b.do(t, post("keyed-body.example.test", "/v1/x", body, "Content-Type", "application/json"))
	}
	first := send(body)
	if k := first.Record.Bound.Key; k == nil || k.Key != "b1" || k.In != "body:meta.key" || facts(first).Retry != outcome.SameIdempotencyKey {
		t.Fatalf("%+v %+v", first.Record.Bound, facts(first))
	}
	if r := send(`{"meta":{"key":"b1"},"amount":6}`); facts(r).Code != outcome.CodeIdempotencyMismatch || r.Envelope.Evidence.Field != "request.body.meta.key" {
		t.Errorf("%+v", facts(r))
	}
	if r := send(body); r.Status != 201 || r.ID != first.ID {
		t.Errorf("%d", r.Status)
	}
	if r := send(`{"amount":7}`); r.Record.Bound.Key != nil {
		t.Errorf("a key out of nowhere: %+v", r.Record.Bound.Key)
	}
	for _, bad := range []string{"a\x7f", strings.Repeat("k", 256)} {
		if r := b.do(t, keyed("keyed", bad, "x")); facts(r).Code != outcome.CodeInvalidRequest {
			t.Errorf("%q: %+v", bad[:2], facts(r))
		}
	}
	s := keyed("keyed", "one", "x")
	s.Header.Add("Idempotency-Key", "two")
	if r := b.do(t, s); facts(r).Code != outcome.CodeInvalidRequest || r.Envelope.Evidence.Field != "request.headers.idempotency-key" {
		t.Errorf("two keys: %+v", facts(r))
	}
	// Waybill's own key is answered like "reconcile first" (L7) and works with Retry-Of.
	b.tr.play = script(lost, answerWith(201, "made"))
	made := b.do(t, post("keyed-made.example.test", "/v1/y", "x"))
	if facts(made).Retry != outcome.SameIdempotencyKey || made.Status != 424 {
		t.Errorf("L7: %+v %d", facts(made), made.Status)
	}
	if r := b.do(t, post("keyed-made.example.test", "/v1/y", "x")); facts(r).Code != outcome.CodeDuplicateSuspected {
		t.Errorf("an equal request without the key: %+v", facts(r))
	}
	again := post("keyed-made.example.test", "/v1/y", "x")
	again.RetryOf = made.ID.String()
	r := b.do(t, again)
	n := len(b.tr.sent)
	if r.ID != made.ID || r.Status != 201 || b.tr.sent[n-1].Header.Get("Idempotency-Key") != b.tr.sent[n-2].Header.Get("Idempotency-Key") {
		t.Errorf("Retry-Of: %d %+v", r.Status, facts(r))
	}
}

// TestRemoteKeyAnswers: 409 "in use" on a keyed call only, refusals that speak for the key,
// and overrides (IK-05, A10, G5).
func TestRemoteKeyAnswers(t *testing.T) {
	contract.Covers(t, "G5", "A10")
	b := newBench(t)
	b.tr.play = script(lost, answerWith(409, "in use"))
	b.do(t, keyed("keyed", "k5", "x"))
	r := b.do(t, keyed("keyed", "k5", "x"))
	if len(r.Record.Attempts) != 2 || r.Record.Attempts[1].Facts.Code != outcome.CodeRemoteInProgress || facts(r).Outcome != outcome.Unknown || facts(r).Retry != outcome.SameIdempotencyKey {
		t.Errorf("IK-05: %+v", r.Record.Attempts)
	}
	r = b.do(t, keyed("keyed", "k6", "another"))
	if r.Status != 409 || r.Header.Get("Retry-After") == "" {
		t.Errorf("IK-05, first attempt: relayed %d %v", r.Status, r.Header)
	}
	wantFacts(t, facts(r), outcome.RemoteExecution, outcome.Unknown, outcome.SameIdempotencyKey, outcome.CodeRemoteInProgress)
	r = b.do(t, post("keyed.example.test", "/v1/x", "keyless"))
	wantFacts(t, facts(r), outcome.RemoteExecution, outcome.Rejected, outcome.AfterCorrection, outcome.CodeRemoteRejected)

	for host, want := range map[string]outcome.Outcome{"keyed": outcome.Unknown, "keyed-speaks": outcome.Rejected} {
		b.tr.play = script(lost, answerWith(400, "bad"))
		b.do(t, keyed(host, "k7", "x7"))
		if r := b.do(t, keyed(host, "k7", "x7")); facts(r).Outcome != want || len(r.Record.Attempts) != 2 {
			t.Errorf("A10 %s: %+v", host, facts(r))
		}
		b.tr.play = script(lost, answerWith(401, "who"))
		b.do(t, keyed(host, "k8", "x8"))
		if r := b.do(t, keyed(host, "k8", "x8")); facts(r).Outcome != outcome.Unknown {
			t.Errorf("A10 %s: a 401 speaks of the caller, not of the key: %+v", host, facts(r))
		}
		b.tr.play = script(lost, answerWith(503, "busy", "Retry-After", "5"))
		b.do(t, keyed(host, "k9", "x9"))
		if r := b.do(t, keyed(host, "k9", "x9")); facts(r).Outcome == outcome.Rejected {
			t.Errorf("A10 %s: a 503 speaks of the service, not of the key: %+v", host, facts(r))
		}
	}
	b.tr.play = answerWith(409, "there already")
	r = b.do(t, post("meaning.example.test", "/v1/a", "x"))
	if wantFacts(t, facts(r), outcome.RemoteExecution, outcome.Committed, outcome.Never, outcome.CodeNone); r.Status != 409 {
		t.Errorf("%d", r.Status)
	}
	b.tr.play = answerWith(500, "who knows")
	r = b.do(t, post("meaning.example.test", "/v1/b", "x"))
	wantFacts(t, facts(r), outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteGateway)
}

// TestPrecondition: If-Match is evidence, and a repeat contract only where it is declared (I7).
func TestPrecondition(t *testing.T) {
	contract.Covers(t, "I7")
	b := newBench(t)
	b.tr.play = lost
	for i, c := range []struct {
		host, field, value, evidence string
		retry                        outcome.Retry
	}{
		{"precondition", "If-Match", `"v1"`, "if_match", outcome.Backoff},
		{"precondition", "If-None-Match", "*", "if_none_match", outcome.Backoff},
		{"precondition", "If-Match", "*", "", outcome.Reconcile},
		{"precondition", "If-Match", `W/"v1"`, "", outcome.Reconcile},
		{"precondition", "X-Other", "1", "", outcome.Reconcile},
		{"keyed", "If-Match", `"v1"`, "if_match", outcome.Reconcile},
	} {
		s := post(c.host+".example.test", "/v1/x", fmt.Sprint(i), c.field, c.value)
		s.Method = http.MethodPut
		r := b.do(t, s)
		if facts(r).Retry != c.retry || r.Envelope.Evidence.Conditional != c.evidence {
			t.Errorf("%s %s: %+v %q", c.field, c.value, facts(r), r.Envelope.Evidence.Conditional)
		}
	}
	// The repeat's 412 does not resolve the first attempt.
	b.tr.play = script(lost, answerWith(412, "changed"))
	s := func() *Submission {
		s := post("precondition.example.test", "/v1/412", "x", "If-Match", `"v1"`)
		s.Method = http.MethodPut
		return s
	}
	first := b.do(t, s())
	again := s()
	again.RetryOf = first.ID.String()
	if r := b.do(t, again); facts(r).Outcome != outcome.Unknown || len(r.Record.Attempts) != 2 {
		t.Errorf("%+v", facts(r))
	}
}

// TestRetryOf: a further attempt by the caller's own hand, and every reason against one.
func TestRetryOf(t *testing.T) {
	contract.Covers(t, "O1", "J1", "A9")
	b := newBench(t)
	retry := func(s *Submission, id ActionID) *Reply {
		s.RetryOf = id.String()
		return b.do(t, s)
	}
	refused := func(what string, r *Reply, of *Reply, code outcome.Code, reason string) {
		t.Helper()
		f := facts(of)
		if r.ID != of.ID || r.Envelope == nil || r.Envelope.Error.Code != code || r.Envelope.Error.Outcome != f.Outcome || reason != "" && r.Envelope.Evidence.Reason != reason {
			t.Errorf("%s: %s %+v %q", what, r.ID, r.Envelope.Error, r.Envelope.Evidence.Reason)
		}
	}
	search := func(body string) *Submission { return post("search.example.test", "/q", body) }
	pay := func(body string) *Submission { return post("pay.example.test", "/v1/x", body) }

	b.tr.play = lost
	unknown := b.do(t, search("a"))
	if facts(unknown).Retry != outcome.Backoff {
		t.Fatalf("%+v", facts(unknown))
	}
	refused("another request", retry(search("b"), unknown.ID), unknown, outcome.CodeRetryRefused, "request_changed")
	other := search("a")
	other.Caller.ID = "eve"
	if r := retry(other, unknown.ID); r.Envelope.Error.Code != outcome.CodeActionNotFound || r.Status != 404 {
		t.Errorf("V4: %+v", r.Envelope.Error)
	}
	if r := retry(search("a"), ActionID{1}); r.Envelope.Error.Code != outcome.CodeActionNotFound {
		t.Errorf("M7: %+v", r.Envelope.Error)
	}
	b.tr.play = answerWith(200, "found")
	if r := retry(search("a"), unknown.ID); r.ID != unknown.ID || r.Status != 200 || len(r.Record.Attempts) != 2 || readBody(t, r) != "found" {
		t.Errorf("%d %+v", r.Status, facts(r))
	}
	done, _ := b.j.Action(context.Background(), unknown.ID)
	refused("finished", retry(search("a"), unknown.ID), &Reply{ID: unknown.ID, Record: done}, outcome.CodeRetryRefused, StoppedRejection)

	b.tr.play = lost
	reconcile := b.do(t, pay("a"))
	refused("reconcile", retry(pay("a"), reconcile.ID), reconcile, outcome.CodeRetryRefused, StoppedRejection)

	// One that never left may be tried again, and its record tells both tries.
	b.tr.connect = func(int) error {
		return &SetupError{Code: outcome.CodeConnectionRefused, Stage: outcome.StageDNS, Reason: "connection_refused"}
	}
	down := b.do(t, search("down"))
	wantFacts(t, facts(down), outcome.ConnectionSetup, outcome.NotAttempted, outcome.Backoff, outcome.CodeConnectionRefused)
	r := retry(search("down"), down.ID)
	if facts(r) != facts(down) || r.ID != down.ID || len(r.Record.Attempts) != 2*3 {
		t.Errorf("%+v, %d tries", facts(r), len(r.Record.Attempts))
	}
	b.tr.connect, b.tr.play = nil, answerWith(200, "up")
	if r := retry(search("down"), down.ID); r.Status != 200 || facts(r) != outcome.Success() || !r.Record.Attempts[len(r.Record.Attempts)-1].Ended {
		t.Errorf("%d %+v", r.Status, facts(r))
	}
	// A9: an unknown action whose repeat does not get away stays unknown, with its code.
	b.tr.play = lost
	kept := b.do(t, search("kept"))
	b.tr.connect = func(int) error {
		return &SetupError{Code: outcome.CodeConnectionRefused, Stage: outcome.StageDNS, Reason: "connection_refused"}
	}
	if r := retry(search("kept"), kept.ID); facts(r) != facts(kept) || len(r.Record.Attempts) != 4 || r.Record.Attempts[3].Facts.Code != outcome.CodeConnectionRefused || r.Record.Lease != nil {
		t.Errorf("A9: %+v", r.Record)
	}
	for id, rec := range b.j.records {
		if rec.Dispatched() && rec.Facts.Outcome == outcome.NotAttempted {
			t.Errorf("F2: %s", id)
		}
	}
}

// TestBudget: a waiting caller's repeats, and what the answer says when they are used up (J4).
func TestBudget(t *testing.T) {
	contract.Covers(t, "J3", "J4", "O1", "E7")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.tr.play = script(lost, lost, answerWith(201, "made"))
		start := time.Now()
		r := b.do(t, keyed("keyed-retry", "k1", "x"))
		if r.Status != 201 || len(r.Record.Attempts) != 3 || r.Record.Generation != 3 || readBody(t, r) != "made" {
			t.Errorf("%d %+v", r.Status, r.Record)
		}
		if d := time.Since(start); d < 1500*time.Millisecond || d > 3*time.Second {
			t.Errorf("waited %s", d)
		}
		b.tr.play = lost
		r = b.do(t, keyed("keyed-retry", "k2", "x"))
		wantFacts(t, facts(r), outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteOutcomeUnknown)
		if g := r.Envelope.Evidence.RetryBudget; r.Status != 424 || g == nil || !g.Exhausted || g.Used != 3 || g.Attempts != 3 || len(r.Envelope.Evidence.Attempts) != 3 {
			t.Errorf("J4: %d %+v", r.Status, g)
		}
		n := b.tr.count()
		again := b.do(t, keyed("keyed-retry", "k2", "x"))
		if again.ID != r.ID || facts(again) != facts(r) || b.tr.count() != n {
			t.Errorf("after the budget: %+v, %d dispatches", facts(again), b.tr.count()-n)
		}
		s := keyed("keyed-retry", "k2", "x")
		s.RetryOf = r.ID.String()
		if again = b.do(t, s); again.Envelope.Error.Code != outcome.CodeRetryRefused || again.Envelope.Evidence.Reason != StoppedBudget || b.tr.count() != n {
			t.Errorf("%+v", again.Envelope.Error)
		}
		// A refusal with a time is repeated after it, and relayed with the last advice.
		b.tr.play = answerWith(429, "slow down", "Retry-After", "7")
		start = time.Now()
		r = b.do(t, post("repeat-retry.example.test", "/v1/x", "x"))
		if d := time.Since(start); r.Status != 429 || len(r.Record.Attempts) != 3 || d < 14*time.Second || facts(r).Retry != outcome.AfterCorrection || readBody(t, r) != "slow down" {
			t.Errorf("%d after %s: %+v", r.Status, d, facts(r))
		}
		// Nothing that Decide does not allow.
		b.tr.play = answerWith(500, "oops")
		if r = b.do(t, post("repeat-retry.example.test", "/v1/y", "x")); len(r.Record.Attempts) != 1 || r.Status != 500 {
			t.Errorf("a complete 500 was repeated: %d attempts", len(r.Record.Attempts))
		}
	})
}

// TestBudgetEndsWithTheCaller: who leaves is not repeated for, unless the route wants that.
func TestBudgetEndsWithTheCaller(t *testing.T) {
	contract.Covers(t, "O1", "J3")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.tr.play = lost
		ctx, cancel := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel()
		b.Do(ctx, keyed("keyed-retry", "k1", "x"))
		time.Sleep(time.Minute)
		synctest.Wait()
		if b.tr.count() != 1 {
			t.Errorf("%d dispatches for a caller that left", b.tr.count())
		}
		stop, err := b.Background(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		defer stop()
		b.tr.play = script(lost, lost, answerWith(201, "made"))
		ctx2, cancel2 := context.WithTimeout(context.Background(), 200*time.Millisecond)
		defer cancel2()
		r := b.Do(ctx2, keyed("keyed-background", "k2", "x"))
		time.Sleep(time.Minute)
		synctest.Wait()
		rec, _ := b.j.Action(context.Background(), r.ID)
		if rec.Facts != outcome.Success() || len(rec.Attempts) != 3 {
			t.Errorf("background: %+v", rec)
		}
		if len(b.j.kept) != 0 {
			t.Error("the request is still kept")
		}
		for _, s := range b.tr.sent[1:] {
			if s.Header.Get("Authorization") != "Bearer "+testSecret || s.Header.Get("Idempotency-Key") != "k2" {
				t.Errorf("sent %v", s.Header)
			}
		}
	})
}

// TestResultOfARepeatIsHadOnce: a repeat whose result was had and not kept ends the repeats, though
// an earlier attempt decides what is known (H7); what the caller is told is on record.
func TestResultOfARepeatIsHadOnce(t *testing.T) {
	contract.Covers(t, "H7", "A4", "A10", "O1")
	limit := endWith(outcome.CodeResultLimit)
	broken := func(context.Context, *Outgoing, Sink) Ending {
		return Ending{Status: 200, Code: outcome.CodeResultStoreFailed, SinkErr: errors.New("no room")}
	}
	for name, second := range map[string]func(context.Context, *Outgoing, Sink) Ending{"too large": limit, "no room": broken} {
		for _, host := range []string{"keyed", "keyed-retry", "repeat-retry"} {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				b.tr.play = script(lost, second, answerWith(200, "again"))
				r := b.do(t, keyed(host, "k", "x"))
				if host == "keyed" {
					r = b.do(t, keyed(host, "k", "x"))
				}
				rec, _ := b.j.Action(context.Background(), r.ID)
				if n := b.tr.count(); n != 2 || len(rec.Attempts) != 2 {
					t.Fatalf("%s, %s: %d sent, %d attempts", name, host, n, len(rec.Attempts))
				}
				if rec.MayRepeat(testTime) == nil || rec.Facts.Outcome != outcome.Unknown || rec.Facts.Retry != outcome.Reconcile || facts(r) != rec.Facts {
					t.Errorf("%s, %s: recorded %+v, answered %+v", name, host, rec.Facts, facts(r))
				}
				// Killed before the stop was on record.
				bare := rec
				bare.Stopped = ""
				if bare.project(); bare.MayRepeat(time.Now()) == nil {
					t.Errorf("%s, %s: may be repeated after a restart", name, host)
				}
				if r := b.do(t, keyed(host, "k", "x")); host != "repeat-retry" && b.tr.count() != 2 {
					t.Errorf("%s, %s: sent again: %+v", name, host, facts(r))
				}
			})
		}
	}
}

// TestRefusalIsLeftToItsCaller: who was told that a refused request may be sent again sends it.
// Without a key nothing would tell that from a repeat of Waybill's own, now or after a restart
// (O1): it makes none.
func TestRefusalIsLeftToItsCaller(t *testing.T) {
	contract.Covers(t, "O1", "A4", "J3")
	busy := answerWith(429, "", "Retry-After", "5")
	for _, c := range []struct {
		name, host string
		drain      bool // within the pause before the next attempt
	}{{"what is injected belongs to one request", "bound-background", false}, {"the proxy ends", "background", true}} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			stop, err := b.Background(context.Background())
			if err != nil {
				t.Fatal(err)
			}
			b.tr.play = script(busy, answerWith(201, "made"), answerWith(201, "made twice"))
			if c.drain {
				time.AfterFunc(time.Second, func() { _ = b.Drain(context.Background()) })
			}
			r := b.Do(context.Background(), post(c.host+".example.test", "/v1/x", "amount=5"))
			if r.Status != 429 || facts(r).Retry != outcome.Backoff || r.Header.Get("Retry-After") == "" || b.tr.count() != 1 {
				t.Fatalf("%s: %d %v, %d sent", c.name, r.Status, r.Header, b.tr.count())
			}
			time.Sleep(time.Minute)
			stop()
			b2 := New(b.cfg)
			if stop, err = b2.Background(context.Background()); err != nil {
				t.Fatal(err)
			}
			time.Sleep(time.Minute)
			stop()
			if n := b.tr.count(); n != 1 {
				t.Errorf("%s: %d sent beside what its caller sends", c.name, n)
			}
			if c.drain { // A person still can.
				if r := b2.RetryKept(context.Background(), r.ID, time.Minute); facts(r) != outcome.Success() || b.tr.count() != 2 {
					t.Errorf("%s: by hand: %+v, %d sent", c.name, facts(r), b.tr.count())
				}
			} else { // Until the budget is over.
				if stop, err = b2.Background(context.Background()); err != nil {
					t.Fatal(err)
				}
				time.Sleep(15 * time.Minute)
				synctest.Wait()
				stop()
				if rec, _ := b.j.Action(context.Background(), r.ID); rec.Stopped != StoppedBudget || rec.Facts.Retry != outcome.AfterCorrection || len(b.j.kept) != 0 || b.tr.count() != 1 {
					t.Errorf("%s: %q, %+v, %d kept, %d sent", c.name, rec.Stopped, rec.Facts, len(b.j.kept), b.tr.count())
				}
			}
			_ = b2.Drain(context.Background())
		})
	}
}

// TestKeptRequest: what is kept holds no secret, survives the process, and goes when it is
// not needed (C2, J3).
func TestKeptRequest(t *testing.T) {
	contract.Covers(t, "J3", "C2", "M4")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.tr.play = lost
		ctx, cancel := context.WithTimeout(context.Background(), time.Millisecond)
		defer cancel()
		r := b.Do(ctx, keyed("keyed-background", "k", "x=1", "Authorization", "Bearer placeholder"))
		synctest.Wait()
		raw := string(b.j.kept[r.ID])
		if raw == "" || strings.Contains(raw, testSecret) || strings.Contains(raw, "placeholder") || !strings.HasSuffix(raw, "\nx=1") {
			t.Fatalf("kept %q", raw)
		}
		// Another process: the lease that the first one may hold is void, the budget is not new.
		b2 := New(b.cfg)
		b.tr.play = lost
		stop, err := b2.Background(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		stop()
		rec, _ := b.j.Action(context.Background(), r.ID)
		if len(rec.Attempts) != 3 || rec.Stopped != StoppedBudget || rec.Facts.Retry != outcome.Reconcile || len(b.j.kept) != 0 {
			t.Errorf("%d attempts, %q, %+v, %d kept", len(rec.Attempts), rec.Stopped, rec.Facts, len(b.j.kept))
		}
		if r := b2.RetryKept(context.Background(), rec.ID, 0); r.Envelope.Error.Code != outcome.CodeRetryRefused {
			t.Errorf("%+v", r.Envelope.Error)
		}
	})
}

// TestLeaseLostBeforeDispatch: a worker that is overtaken while it connects sends nothing (J2, A9).
func TestLeaseLostBeforeDispatch(t *testing.T) {
	contract.Covers(t, "J2", "A9", "T4")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.tr.play = lost
		first := b.do(t, keyed("keyed", "k", "x"))
		var paused atomic.Bool
		b.tr.made = func() {
			if !paused.Swap(true) {
				time.Sleep(time.Hour / 2) // far beyond the lease
			}
		}
		slow := make(chan *Reply)
		go func() { slow <- b.Do(context.Background(), keyed("keyed", "k", "x")) }()
		time.Sleep(10 * time.Second)
		b.tr.play = answerWith(201, "made")
		if r := b.do(t, keyed("keyed", "k", "x")); r.Status != 201 || r.ID != first.ID {
			t.Fatalf("the second worker: %d %+v", r.Status, facts(r))
		}
		r := <-slow
		rec, _ := b.j.Action(context.Background(), first.ID)
		if b.tr.count() != 2 || r.Envelope == nil && r.Status != 201 {
			t.Errorf("%d dispatches; the slow one was told %d", b.tr.count(), r.Status)
		}
		if r.Status != 201 || readBody(t, r) != "made" || r.Header.Get(outcome.HeaderReplayed) != first.ID.String() {
			t.Errorf("the slow worker's caller gets %d", r.Status)
		}
		last := rec.Attempts[len(rec.Attempts)-1]
		if last.Facts.Code != outcome.CodeLeaseLost || last.Facts.Outcome != outcome.NotAttempted || rec.Facts != outcome.Success() || facts(r) != outcome.Success() {
			t.Errorf("%+v, the action %+v, told %+v", last.Facts, rec.Facts, facts(r))
		}
	})
}

// TestOvertakenWhileTheOtherRuns: the answer of who was overtaken is not a 202, which its
// client would take for the result (L7).
func TestOvertakenWhileTheOtherRuns(t *testing.T) {
	contract.Covers(t, "J2", "L7", "A9")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.tr.play = lost
		first := b.do(t, keyed("keyed", "k", "x"))
		var paused atomic.Bool
		b.tr.made = func() {
			if !paused.Swap(true) {
				time.Sleep(10 * time.Second)
			}
		}
		slow := make(chan *Reply)
		go func() { slow <- b.Do(context.Background(), keyed("keyed", "k", "x")) }()
		time.Sleep(5 * time.Second)
		b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
			time.Sleep(20 * time.Second)
			return answerWith(201, "made")(ctx, out, sink)
		}
		other := make(chan *Reply)
		go func() { other <- b.Do(context.Background(), keyed("keyed", "k", "x")) }()
		r := <-slow
		if r.ID != first.ID || r.Status != 409 || r.Envelope.Error.Code != outcome.CodeLeaseHeld || r.Envelope.Error.Outcome != outcome.Unknown {
			t.Errorf("%d %+v", r.Status, r.Envelope.Error)
		}
		if r := <-other; r.Status != 201 || b.tr.count() != 2 {
			t.Errorf("%d, %d dispatches", r.Status, b.tr.count())
		}
	})
}

// TestKeyOfAResolvedAction: an action that a person resolved has no answer to give again,
// and nothing to wait for.
func TestKeyOfAResolvedAction(t *testing.T) {
	contract.Covers(t, "I9", "H7", "L7")
	b := newBench(t)
	b.tr.play = lost
	first := b.do(t, keyed("keyed", "k", "x"))
	if _, err := b.Attest(t.Context(), first.ID, Attestation{Outcome: outcome.Committed, Operator: "alice", Reason: "it is in the books"}); err != nil {
		t.Fatal(err)
	}
	r := b.do(t, keyed("keyed", "k", "x"))
	if r.ID != first.ID || r.Status != 410 || r.Envelope.Error == nil || r.Envelope.Error.Code != outcome.CodeResultNotRetained || r.Envelope.Error.Outcome != outcome.Committed || b.tr.count() != 1 {
		t.Errorf("%d %+v", r.Status, r.Envelope.Error)
	}
}

// TestResolvedWhileItRepeats: what a query finds out while a further attempt is under way
// decides, and its caller gets no 200 or 202 of Waybill's own for it.
func TestResolvedWhileItRepeats(t *testing.T) {
	contract.Covers(t, "A9", "A10", "K2", "L7")
	for name, play := range map[string]func(context.Context, *Outgoing, Sink) Ending{"lost": lost, "refused": answerWith(400, "bad"), "not sent": nil} {
		t.Run(name, func(t *testing.T) {
			b := newBench(t)
			b.tr.play = lost
			first := b.do(t, keyed("keyed", "k", "x"))
			found := Event{Type: Reconciled, At: time.Now(), Resolution: &Resolution{Facts: outcome.Success(), Source: outcome.RemoteQuery, Covers: 1}}
			note := func() {
				if _, err := b.j.Append(context.Background(), Batch{Action: first.ID, Events: []Event{found}}); err != nil {
					t.Error(err)
				}
			}
			if b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending { note(); return play(ctx, out, sink) }; play == nil {
				b.tr.made = note
			}
			r := b.do(t, keyed("keyed", "k", "x"))
			if r.ID != first.ID || r.Status != 410 || facts(r) != outcome.Success() || r.Envelope.Error == nil || r.Envelope.Error.Outcome != outcome.Committed {
				t.Errorf("%d %+v", r.Status, r.Envelope)
			}
			if want := 2; play == nil && b.tr.count() != 1 || play != nil && b.tr.count() != want {
				t.Errorf("%d sent", b.tr.count())
			}
		})
	}
}

// TestTwentyWorkers: LS-03(b): one gets the lease, the others are told that it is held.
func TestTwentyWorkers(t *testing.T) {
	contract.Covers(t, "J1")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.tr.play = lost
		first := b.do(t, keyed("keyed", "k", "x"))
		release := make(chan struct{})
		b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
			<-release
			return answerWith(201, "made")(ctx, out, sink)
		}
		replies := make(chan *Reply, 20)
		for range 20 {
			go func() {
				s := keyed("keyed", "k", "x")
				s.RetryOf = first.ID.String()
				replies <- b.Do(context.Background(), s)
			}()
		}
		synctest.Wait()
		for range 19 {
			if r := <-replies; r.Envelope == nil || r.Envelope.Error.Code != outcome.CodeLeaseHeld || r.Status != 409 || r.Header.Get("Retry-After") == "" {
				t.Errorf("%d %+v", r.Status, facts(r))
			}
		}
		close(release)
		if r := <-replies; r.Status != 201 || r.Record.Generation != 2 || b.tr.count() != 2 {
			t.Errorf("%d, generation %d, %d dispatches", r.Status, r.Record.Generation, b.tr.count())
		}
	})
}

// TestFurtherAttemptNeverSaysNotAttempted: whatever the journal does on the way of a
// repeat, an action that crossed the boundary is not told as not_attempted (F2).
func TestFurtherAttemptNeverSaysNotAttempted(t *testing.T) {
	contract.Covers(t, "F2", "F9", "A9")
	for _, failing := range []EventType{LeaseTaken, DispatchStarted, AttemptFailed, ResultCommitted, AttemptResolved} {
		for _, how := range []error{ErrNotWritten, ErrIndeterminate, ErrLeaseHeld, ErrLeaseLost, ErrRetryRefused, errors.New("disk on fire")} {
			b := newBench(t)
			b.tr.play = lost
			first := b.do(t, keyed("keyed", "k", "x"))
			for _, refusing := range []bool{false, true} {
				b.tr.connect = nil
				if refusing {
					b.tr.connect = func(int) error { return &SetupError{Code: outcome.CodeConnectionRefused, Reason: "connection_refused"} }
				}
				b.tr.play = answerWith(201, "made")
				b.j.before = func(batch Batch) error {
					for _, ev := range batch.Events {
						if ev.Type == failing {
							return how
						}
					}
					return nil
				}
				s := keyed("keyed", "k", "x")
				s.RetryOf = first.ID.String()
				r := b.do(t, s)
				b.j.before = nil
				if r.ID == first.ID && facts(r).Outcome == outcome.NotAttempted || r.Envelope != nil && r.Envelope.InvocationID == first.ID.String() && r.Envelope.Error != nil && r.Envelope.Error.Outcome == outcome.NotAttempted {
					t.Errorf("%s %v: %+v", failing, how, r.Envelope.Error)
				}
			}
			b.tr.connect = nil
		}
	}
}
