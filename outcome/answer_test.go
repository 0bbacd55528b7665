package outcome_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/dunglas/httpsfv"
	"pgregory.net/rapid"

	"waybill/internal/contract"
	"waybill/outcome"
)

// checkAnswer is what holds for every answer that Waybill makes itself, whatever
// the facts and the request (CONTRACT G11, L1, L5, L7).
func checkAnswer(env outcome.Envelope, s outcome.Shape, a outcome.Answer) error {
	f, h := env.Facts(), a.Header
	if a.Status < 200 || slices.Contains([]int{204, 304, 408, 421}, a.Status) {
		return fmt.Errorf("status %d", a.Status)
	}
	// LEASE_HELD is of the caller API and about the attempt to repeat, not about the
	// action (section U): the one 409 that stands beside an unknown outcome.
	if a.Status == 409 && f.Outcome == outcome.Unknown && f.Code != outcome.CodeLeaseHeld {
		return fmt.Errorf("409 for an unknown outcome")
	}
	ra := h.Values("Retry-After")
	if len(ra) > 1 {
		return fmt.Errorf("Retry-After %q", ra)
	}
	if len(ra) == 1 {
		if n, err := strconv.Atoi(ra[0]); err != nil || n < 1 || n > 60 {
			return fmt.Errorf("Retry-After %q", ra[0])
		}
	}
	hints := h.Get("x-should-retry")
	if hints != h.Get("stripe-should-retry") || hints != "" && hints != "false" {
		return fmt.Errorf("hints %q and %q", hints, h.Get("stripe-should-retry"))
	}
	if err := threeWays(f, s, a.Status, len(ra) == 1, hints == "false"); err != nil {
		return err
	}
	if a.Status == 424 && h.Get("Cache-Control") != "no-store" {
		return fmt.Errorf("a 424 may be cached: %q", h.Get("Cache-Control"))
	}

	// The challenge goes with 407 and with nothing else, and 407 never into a tunnel.
	if (a.Status == 407) != (h.Get("Proxy-Authenticate") != "") || a.Status == 407 && s.InsideTunnel {
		return fmt.Errorf("status %d, challenge %q", a.Status, h.Get("Proxy-Authenticate"))
	}
	if closes := h.Get("Connection") == "close"; closes != (a.Status != 407 && (s.Connect || f.Code == outcome.CodeDraining)) {
		return fmt.Errorf("status %d, CONNECT %v, close %v", a.Status, s.Connect, closes)
	}

	// G11: the facts go with the status, and are those of the envelope.
	got := h.Get("Waybill-Outcome")
	if f.Code == outcome.CodeActionNotFound {
		if got != "" {
			return fmt.Errorf("an action that is not known has the outcome %q", got)
		}
	} else if back, err := outcome.ParseOutcome(got); err != nil || back != f {
		return errors.Join(fmt.Errorf("Waybill-Outcome %q: %+v", got, back), err)
	}
	if h.Get("Waybill-Invocation") != env.InvocationID {
		return fmt.Errorf("Waybill-Invocation %q", h.Get("Waybill-Invocation"))
	}
	list, err := httpsfv.UnmarshalList(h.Values("Proxy-Status"))
	if err != nil || len(list) != 1 {
		return errors.Join(fmt.Errorf("Proxy-Status %q", h.Values("Proxy-Status")), err)
	}
	item := list[0].(httpsfv.Item)
	_, hasError := item.Params.Get("error")
	if item.Value != httpsfv.Token("waybill") || hasError != (outcome.Lookup(f.Code).ProxyError != "") {
		return fmt.Errorf("Proxy-Status %q", h.Get("Proxy-Status"))
	}

	// L1.
	if h.Get("Content-Type") != "application/json" {
		return fmt.Errorf("Content-Type %q", h.Get("Content-Type"))
	}
	if s.Method == http.MethodHead {
		if a.Body != nil {
			return fmt.Errorf("an answer to HEAD has a body")
		}
	} else {
		var back outcome.Envelope
		if h.Get("Content-Length") != strconv.Itoa(len(a.Body)) {
			return fmt.Errorf("Content-Length %q, %d bytes", h.Get("Content-Length"), len(a.Body))
		}
		if !f.IsSuccess() || env.Evidence.ResponseComplete {
			if err := json.Unmarshal(a.Body, &back); err != nil {
				return fmt.Errorf("body %s: %w", a.Body, err)
			}
			if back.Facts() != f || back.InvocationID != env.InvocationID {
				return fmt.Errorf("body %s", a.Body)
			}
		}
	}
	for name, values := range h {
		for _, v := range values {
			if name != http.CanonicalHeaderKey(name) || strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r > '~' }) {
				return fmt.Errorf("field %q: %q", name, v)
			}
		}
	}
	return nil
}

// threeWays is the rule of CONTRACT L7.
func threeWays(f outcome.Facts, s outcome.Shape, status int, retryAfter, stopped bool) error {
	const (
		nothing = iota // nothing to repeat
		wait           // wait and repeat
		first          // reconcile first
	)
	way := nothing
	switch f.Retry {
	case outcome.Never, outcome.AfterCorrection, outcome.FetchResult:
	case outcome.Backoff:
		way = wait
	case outcome.Reconcile:
		way = first
	case outcome.SameIdempotencyKey:
		way = first
		if s.CallerSentKey {
			way = wait
		}
	}
	fail := func(what string) error {
		return fmt.Errorf("%s: status %d, Retry-After %v, x-should-retry: false %v", what, status, retryAfter, stopped)
	}
	switch f.Code {
	case outcome.CodeNone:
		if status != 200 || retryAfter || stopped {
			return fail("a success")
		}
		return nil
	case outcome.CodeLeaseHeld, outcome.CodeResultPending:
		// Of the caller API: they ask to come back. What is hinted at is the action.
		mayRepeat := f.Retry == outcome.Backoff || f.Retry == outcome.SameIdempotencyKey
		if !retryAfter || stopped == mayRepeat {
			return fail("the caller API")
		}
		return nil
	case outcome.CodeRetryRefused:
		way = nothing // this repeat, whatever the action's advice is
	}
	switch way {
	case nothing:
		if waitStatus(status) || status == 424 || retryAfter || !stopped || status < 400 {
			return fail("nothing to repeat")
		}
		if status >= 500 && status != 508 {
			return fail("nothing to repeat")
		}
	case wait:
		if !waitStatus(status) || !retryAfter || stopped {
			return fail("wait and repeat")
		}
		// 502 and 504 beside an unknown outcome: only where a repeat is safe.
		if f.Outcome == outcome.Unknown && (status == 502 || status == 504) && f.Retry != outcome.Backoff {
			return fail("a key is needed")
		}
	case first:
		if status != 424 || retryAfter || !stopped {
			return fail("reconcile first")
		}
	}
	return nil
}

func TestAnswerHoldsTheThreeWayRule(t *testing.T) {
	contract.Covers(t, "L1", "L5", "L7", "G11")
	n := 0
	for _, f := range allFacts() {
		for _, s := range shapes() {
			env := outcome.NewEnvelope(anID, f, "", outcome.Evidence{})
			if f.Code == outcome.CodeActionNotFound {
				env = outcome.NewEnvelope("", f, "", outcome.Evidence{})
			}
			if err := checkAnswer(env, s, env.Answer(s)); err != nil {
				t.Errorf("%+v with %+v: %v", f, s, err)
			}
			n++
		}
	}
	t.Logf("%d answers", n)
}

// TestAnswerOfFactsThatDoNotFit: by A9 an action can keep its code with the advice
// of another attempt; then the advice decides, not the code's usual status.
func TestAnswerOfFactsThatDoNotFit(t *testing.T) {
	contract.Covers(t, "L7", "G11")
	fits := map[outcome.Facts]bool{}
	for _, f := range allFacts() {
		fits[f] = true
	}
	// Five shapes in turn, and four outcomes by six kinds of advice: each meets each.
	turn := []outcome.Shape{{}, {CallerSentKey: true}, {InsideTunnel: true}, {Connect: true, CallerSentKey: true}, {Method: http.MethodHead}}
	n := 0
	for f := range everyFacts {
		if fits[f] || f.Code == outcome.CodeNone || f.Code == outcome.CodeActionNotFound {
			continue
		}
		env, s := outcome.NewEnvelope(anID, f, "", outcome.Evidence{}), turn[n%len(turn)]
		if err := checkAnswer(env, s, env.Answer(s)); err != nil {
			t.Fatalf("%+v with %+v: %v", f, s, err)
		}
		n++
	}
}

func TestAnswerOfAnything(t *testing.T) {
	contract.Covers(t, "L1", "L5", "L7", "G11")
	rapid.Check(t, func(t *rapid.T) {
		env, s := genEnvelope().Draw(t, "envelope"), genShape().Draw(t, "shape")
		before, _ := json.Marshal(env)
		if err := checkAnswer(env, s, env.Answer(s)); err != nil {
			t.Fatal(err)
		}
		if after, _ := json.Marshal(env); string(before) != string(after) {
			t.Fatal("Answer changed the envelope")
		}
	})
}

func TestAnswerNeverSaysMoreThanIsKnown(t *testing.T) {
	contract.Covers(t, "A3", "L7")
	broken := []outcome.Envelope{
		{InvocationID: anID, Error: &outcome.Error{}},
		{InvocationID: anID, Error: &outcome.Error{Code: 222, Phase: outcome.Validation, Outcome: outcome.NotAttempted, Retry: outcome.Backoff}},
		{InvocationID: anID, Error: &outcome.Error{Code: outcome.CodeInternal, Outcome: outcome.NotAttempted}},
		{InvocationID: anID, Error: &outcome.Error{Code: outcome.CodeNone, Phase: outcome.RemoteExecution, Outcome: outcome.Committed, Retry: outcome.Never}},
		outcome.NewEnvelope(anID, outcome.Facts{}, "", outcome.Evidence{}),
		outcome.NewEnvelope(anID, outcome.Facts{Phase: 9, Outcome: outcome.NotAttempted, Retry: outcome.Backoff, Code: outcome.CodeDraining}, "", outcome.Evidence{}),
	}
	want := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeInternal}
	for i, env := range broken {
		a := env.Answer(outcome.Shape{})
		got, err := outcome.ParseOutcome(a.Header.Get("Waybill-Outcome"))
		if err != nil || got != want || a.Status != 424 {
			t.Errorf("%d: %d %+v, %v", i, a.Status, got, err)
		}
		var back outcome.Envelope
		if err := json.Unmarshal(a.Body, &back); err != nil || back.Facts() != want {
			t.Errorf("%d: %s: %v", i, a.Body, err)
		}
	}
	// Evidence that cannot be encoded costs the evidence, not the answer.
	f, _ := outcome.Of(outcome.CodeRemoteRefused)
	env := outcome.NewEnvelope(anID, f, "", outcome.Evidence{Attempts: []outcome.Attempt{{N: 1}}})
	if a := env.Answer(outcome.Shape{}); a.Status != 503 || !json.Valid(a.Body) {
		t.Errorf("%d %q", a.Status, a.Body)
	}
	// An action without a code that is no success still runs (H10).
	env = outcome.NewEnvelope(anID, outcome.Facts{Phase: outcome.ConnectionSetup, Outcome: outcome.NotAttempted, Retry: outcome.FetchResult}, "", outcome.Evidence{Running: true})
	if a := env.Answer(outcome.Shape{}); a.Status != 202 || env.Error.Code != outcome.CodeResultPending {
		t.Errorf("%d %+v", a.Status, env.Error)
	}
}

// TestAnswerExample is the answer of CONTRACT L1 and L8, word for word.
func TestAnswerExample(t *testing.T) {
	contract.Covers(t, "L1", "L5", "L7", "L8")
	f := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteTimeout}
	env := outcome.NewEnvelope(anID, f, "The request was sent, no answer came within 30s.", outcome.Evidence{
		Attempt: 1, Source: outcome.TransportObserved, DispatchStarted: true, RequestHeadersSent: true, RequestComplete: true,
	})
	a := env.Answer(outcome.Shape{Method: http.MethodPost, NextHop: "api.example.com:443", NextProtocol: "h2"})
	want := http.Header{
		"Content-Type":        {"application/json"},
		"Content-Length":      {strconv.Itoa(len(a.Body))},
		"Cache-Control":       {"no-store"},
		"Proxy-Status":        {`waybill;error=http_response_timeout;next-hop="api.example.com:443";next-protocol=h2`},
		"X-Should-Retry":      {"false"},
		"Stripe-Should-Retry": {"false"},
		"Waybill-Invocation":  {anID},
		"Waybill-Outcome":     {"unknown;phase=remote_execution;retry=reconcile;code=REMOTE_TIMEOUT"},
	}
	if a.Status != 424 || a.Reason != "REMOTE_TIMEOUT "+anID || fmt.Sprint(a.Header) != fmt.Sprint(want) {
		t.Errorf("%d %s\n%v, want\n%v", a.Status, a.Reason, a.Header, want)
	}
	msg := "Outcome unknown: do not repeat; reconcile " + anID + ". The request was sent, no answer came within 30s."
	body := `{"invocation_id":"` + anID + `","error":{"code":"REMOTE_TIMEOUT","phase":"remote_execution","outcome":"unknown","retry":"reconcile","message":"` + msg + `"},` +
		`"message":"` + msg + `","evidence":{"attempt":1,"source":"transport_observed","dispatch_started":true,"request_headers_sent":true,"request_complete":true,` +
		`"response_headers_received":false,"response_complete":false}}` + "\n"
	if string(a.Body) != body {
		t.Errorf("%s\nwant\n%s", a.Body, body)
	}
}

func TestAnswerDetails(t *testing.T) {
	contract.Covers(t, "L5", "L7")
	of := func(c outcome.Code) outcome.Envelope {
		f, ok := outcome.Of(c)
		if !ok {
			f = outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: c}
		}
		return outcome.NewEnvelope(anID, f, "", outcome.Evidence{ReceivedStatus: 201})
	}
	for _, c := range []struct {
		code  outcome.Code
		shape outcome.Shape
		field string
		want  string
	}{
		{outcome.CodeDNSNoSuchName, outcome.Shape{}, "Proxy-Status", `waybill;error=dns_error;rcode="NXDOMAIN";received-status=201`},
		{outcome.CodeDNSError, outcome.Shape{RCode: "SERVFAIL", ReceivedStatus: 99}, "Proxy-Status", `waybill;error=dns_error;rcode="SERVFAIL"`},
		{outcome.CodeClientCertificateRequired, outcome.Shape{ReceivedStatus: 1}, "Proxy-Status", `waybill;error=tls_alert_received;alert-id=116;alert-message=certificate_required`},
		{outcome.CodeTLSHandshakeFailed, outcome.Shape{AlertName: "bad name", ReceivedStatus: 1}, "Proxy-Status", `waybill;error=tls_alert_received;alert-message="bad name"`},
		{outcome.CodeRemoteResultIncomplete, outcome.Shape{NextProtocol: "http/1.1"}, "Proxy-Status", `waybill;error=http_response_incomplete;next-protocol=http/1.1;received-status=201`},
		{outcome.CodeRemoteTimeout, outcome.Shape{ProxyError: "connection_write_timeout", ReceivedStatus: 502}, "Proxy-Status", `waybill;error=connection_write_timeout;received-status=502`},
		{outcome.CodeRemoteTimeout, outcome.Shape{ProxyError: "made_up", NextHop: "ü", NextProtocol: "\xff", Details: "a \"b\" \\"}, "Proxy-Status", `waybill;error=http_response_timeout;next-protocol=:/w==:;received-status=201;details="a \"b\" \\"`},
		{outcome.CodeActionNotFound, outcome.Shape{ProxyError: "dns_error", ReceivedStatus: 1}, "Proxy-Status", `waybill`},
		{outcome.CodeCallerUnauthenticated, outcome.Shape{}, "Proxy-Authenticate", `Basic realm="waybill"`},
		{outcome.CodeCallerUnauthenticated, outcome.Shape{Realm: "a\"b\r\nc\\é"}, "Proxy-Authenticate", `Basic realm="a\"bc\\"`},
		{outcome.CodeCallerUnauthenticated, outcome.Shape{Connect: true}, "Connection", ""},
		{outcome.CodeRouteNotFound, outcome.Shape{Connect: true}, "Connection", "close"},
		{outcome.CodeDraining, outcome.Shape{}, "Connection", "close"},
		{outcome.CodeRateLimited, outcome.Shape{RetryAfter: 0}, "Retry-After", "1"},
		{outcome.CodeRateLimited, outcome.Shape{RetryAfter: -time.Hour}, "Retry-After", "1"},
		{outcome.CodeRateLimited, outcome.Shape{RetryAfter: 2001 * time.Millisecond}, "Retry-After", "3"},
		{outcome.CodeRateLimited, outcome.Shape{RetryAfter: 60 * time.Second}, "Retry-After", "60"},
		{outcome.CodeRateLimited, outcome.Shape{RetryAfter: 1<<63 - 1}, "Retry-After", "60"},
	} {
		env := of(c.code)
		if got := env.Answer(c.shape).Header.Get(c.field); got != c.want {
			t.Errorf("%s with %+v: %s: %q, want %q", c.code, c.shape, c.field, got, c.want)
		}
	}
	env := of(outcome.CodeRouteNotFound)
	if got := env.Answer(outcome.Shape{Connect: true}).Reason; got != "ROUTE_NOT_FOUND "+anID {
		t.Errorf("reason phrase %q", got)
	}
	env.InvocationID = "act_\r\nX: y"
	if a := env.Answer(outcome.Shape{Connect: true}); a.Reason != "ROUTE_NOT_FOUND" || a.Header.Get("Waybill-Invocation") != "" {
		t.Errorf("an id splits the head: %q %q", a.Reason, a.Header)
	}
}

func TestAnswerRelayedIsAnnotated(t *testing.T) {
	contract.Covers(t, "L5", "G11", "G12", "V6")
	f, _ := outcome.Of(outcome.CodeRemoteError)
	for _, c := range []struct {
		received []string
		want     string
	}{
		{nil, `waybill;next-hop="h:443";received-status=500`},
		{[]string{"Cache/1.0;details=\"x\"", "edge; received-status=500"}, `Cache/1.0;details="x", edge;received-status=500, waybill;next-hop="h:443";received-status=500`},
		{[]string{`"a cdn"`}, `"a cdn", waybill;next-hop="h:443";received-status=500`},
		{[]string{"not ; valid ="}, `waybill;next-hop="h:443";received-status=500`},
		{[]string{"good", "bad,"}, `waybill;next-hop="h:443";received-status=500`},
		{[]string{"(inner list)"}, `waybill;next-hop="h:443";received-status=500`},
		{[]string{"good, 42"}, `waybill;next-hop="h:443";received-status=500`},
		{[]string{`waybill;error=connection_refused, "WayBill", other`}, `other, waybill;next-hop="h:443";received-status=500`},
		{[]string{""}, `waybill;next-hop="h:443";received-status=500`},
	} {
		h := http.Header{"Proxy-Status": c.received, "Waybill-Outcome": {"committed;phase=remote_execution;retry=never"}, "Waybill-Invocation": {"forged", "twice"}, "X-Other": {"kept"}}
		outcome.Annotate(h, anID, f, outcome.Shape{NextHop: "h:443", ReceivedStatus: 500, ProxyError: "connection_refused", RCode: "x"}, false)
		if got := h.Values("Proxy-Status"); len(got) != 1 || got[0] != c.want {
			t.Errorf("%q: %q, want %q", c.received, got, c.want)
		}
		if got := h.Values("Waybill-Outcome"); !slices.Equal(got, []string{"committed;phase=remote_execution;retry=reconcile;code=REMOTE_ERROR"}) {
			t.Errorf("Waybill-Outcome %q", got)
		}
		if got := h.Values("Waybill-Invocation"); !slices.Equal(got, []string{anID}) {
			t.Errorf("Waybill-Invocation %q", got)
		}
		if len(h) != 4 || h.Get("X-Other") != "kept" {
			t.Errorf("other fields changed: %v", h)
		}
	}
	for _, name := range outcome.MemberFields() {
		if !outcome.IsMemberField(name) || !outcome.IsMemberField(strings.ToLower(name)) {
			t.Errorf("%s is not Waybill's", name)
		}
	}
	for _, name := range []string{"Waybill", "Proxy-Status", "X-Waybill-Outcome", "x-should-retry", ""} {
		if outcome.IsMemberField(name) {
			t.Errorf("%s is Waybill's", name)
		}
	}
	if !outcome.IsMemberField("WAYBILL-anything-new") {
		t.Error("a new field could be forged")
	}
}

// TestAnswerRelayedHints is the shaping step of relayed answers (L7): for every
// status, with and without hints of the remote side.
func TestAnswerRelayedHints(t *testing.T) {
	contract.Covers(t, "L7", "G12")
	for status := 200; status <= 999; status++ {
		for _, unsafe := range []bool{false, true} {
			for _, given := range []string{"", "true", "false"} {
				for _, stripe := range []string{"", "true"} {
					h := http.Header{}
					if given != "" {
						h.Set("x-should-retry", given)
					}
					if stripe != "" {
						h.Set("stripe-should-retry", stripe)
					}
					outcome.Annotate(h, anID, outcome.Success(), outcome.Shape{ReceivedStatus: status}, unsafe)
					shaped := unsafe && given == "" && (status == 408 || status == 409 || status >= 500)
					wantHint, wantStripe := given, stripe
					if shaped {
						wantHint = "false"
						if stripe == "" {
							wantStripe = "false"
						}
					}
					if h.Get("x-should-retry") != wantHint || h.Get("stripe-should-retry") != wantStripe || h.Get("Retry-After") != "" {
						t.Errorf("%d, unsafe %v, given %q and %q: %v", status, unsafe, given, stripe, h)
					}
				}
			}
		}
	}
	f, _ := outcome.Of(outcome.CodeRemoteInProgress)
	for _, c := range []struct{ given, want string }{{"", "2"}, {"90", "90"}, {"Fri, 31 Dec 1999 23:59:59 GMT", "Fri, 31 Dec 1999 23:59:59 GMT"}} {
		h := http.Header{}
		if c.given != "" {
			h.Set("Retry-After", c.given)
		}
		outcome.Annotate(h, anID, f, outcome.Shape{ReceivedStatus: 409, RetryAfter: 2 * time.Second}, false)
		if h.Get("Retry-After") != c.want || h.Get("x-should-retry") != "" {
			t.Errorf("given %q: %v", c.given, h)
		}
	}
}
