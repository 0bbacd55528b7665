package dispatch

import (
	"context"
	"crypto/sha256"
	"errors"
	"slices"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/outcome"
)

// hops plays one redirect per request, then an answer.
func hops(status int, locations ...string) func(context.Context, *Outgoing, Sink) Ending {
	n := 0
	return func(ctx context.Context, out *Outgoing, sink Sink) Ending {
		if n < len(locations) {
			n++
			return answerWith(status, "moved", "Location", locations[n-1])(ctx, out, sink)
		}
		return answerWith(200, "here")(ctx, out, sink)
	}
}

// TestFollowWithinTheOrigin: R2. Each hop is an attempt of its own with its own record
// before its hand-over; nothing leaves the origin.
func TestFollowWithinTheOrigin(t *testing.T) {
	contract.Covers(t, "R1", "R2", "F1", "F6")
	for _, c := range []struct {
		name      string
		method    string
		status    int
		locations []string
		sent      []string // what arrives at the origin
		answer    int
	}{
		{"302 of a GET", "GET", 302, []string{"/v1/y?q=1"}, []string{"GET /v1/x", "GET /v1/y"}, 200},
		{"relative", "GET", 301, []string{"y"}, []string{"GET /v1/x", "GET /v1/y"}, 200},
		{"absolute, same origin", "GET", 302, []string{"https://hop.example.test/v1/y"}, []string{"GET /v1/x", "GET /v1/y"}, 200},
		{"303 of a POST", "POST", 303, []string{"/v1/y"}, []string{"POST /v1/x", "GET /v1/y"}, 200},
		{"302 of a POST", "POST", 302, []string{"/v1/y"}, []string{"POST /v1/x", "GET /v1/y"}, 200},
		{"307 of a POST", "POST", 307, []string{"/v1/y"}, []string{"POST /v1/x", "POST /v1/y"}, 200},
		{"two hops", "GET", 308, []string{"/v1/y", "/v1/z"}, []string{"GET /v1/x", "GET /v1/y", "GET /v1/z"}, 200},
		{"another origin", "GET", 302, []string{"https://evil.example.test/v1/y"}, []string{"GET /v1/x"}, 302},
		{"another port", "GET", 302, []string{"https://hop.example.test:8443/v1/y"}, []string{"GET /v1/x"}, 302},
		{"downgrade", "GET", 302, []string{"http://hop.example.test/v1/y"}, []string{"GET /v1/x"}, 302},
		{"out of the route", "GET", 302, []string{"/admin"}, []string{"GET /v1/x"}, 302},
		{"dot segments", "GET", 302, []string{"/v1/../admin"}, []string{"GET /v1/x"}, 302},
		{"not a redirect", "GET", 300, []string{"/v1/y"}, []string{"GET /v1/x"}, 300},
	} {
		b := newBench(t)
		b.tr.play = hops(c.status, c.locations...)
		s := post("hop.example.test", "/v1/x", "amount=5", "Content-Type", "text/plain")
		s.Method = c.method
		if c.method == "GET" {
			s.Body, s.ContentLength = nil, 0
		}
		r := b.Do(t.Context(), s)
		var sent []string
		for i, out := range b.tr.sent {
			sent = append(sent, out.Method+" "+out.RawPath)
			if out.Header.Get("Authorization") != "Bearer "+testSecret || out.Target.Host != "hop.example.test" {
				t.Errorf("%s: hop %d went to %v", c.name, i, out.Target)
			}
			if (out.Method == "GET") != (b.tr.bodies[i] == "") || out.Method == "GET" && c.method == "POST" && out.Header.Get("Content-Type") != "" {
				t.Errorf("%s: hop %d has body %q", c.name, i, b.tr.bodies[i])
			}
		}
		if !slices.Equal(sent, c.sent) || r.Status != c.answer || facts(r) != outcome.Success() {
			t.Errorf("%s: sent %v, answer %d %+v", c.name, sent, r.Status, facts(r))
		}
		dispatched, arrivals := 0, 0
		for _, l := range b.log.lines {
			switch {
			case l == "durable DISPATCH_STARTED":
				dispatched++
			case strings.HasPrefix(l, "sent "):
				if arrivals++; arrivals > dispatched {
					t.Errorf("%s: hop %d was handed over before its record: %v", c.name, arrivals, b.log.lines)
				}
			}
		}
		if dispatched != len(c.sent) || len(r.Record.Attempts) != len(c.sent) {
			t.Errorf("%s: %d records for %d hand-overs", c.name, dispatched, len(c.sent))
		}
	}
}

// TestFollowedAttemptDecides: what became of the last hop is what became of the action.
func TestFollowedAttemptDecides(t *testing.T) {
	contract.Covers(t, "R1", "R2", "F2", "A9")
	send := func(b *bench) *Reply {
		s := post("hop.example.test", "/v1/x", "amount=5")
		return b.Do(t.Context(), s)
	}
	b := newBench(t)
	n := 0
	b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
		if n++; n == 1 {
			return answerWith(307, "", "Location", "/v1/y")(ctx, out, sink)
		}
		return endWith(outcome.CodeRemoteOutcomeUnknown)(ctx, out, sink)
	}
	r := send(b)
	wantFacts(t, facts(r), outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteOutcomeUnknown)
	if last := b.j.last(); r.Status != 424 || !last.GuardsRepeats() {
		t.Errorf("%d", r.Status)
	}

	// A hop that cannot be connected to: the redirect itself is the answer.
	b = newBench(t)
	b.tr.connect = func(n int) error {
		if n == 2 {
			return &SetupError{Code: outcome.CodeConnectionRefused, Stage: outcome.StageDNS, Reason: "connection_refused"}
		}
		return nil
	}
	b.tr.play = hops(307, "/v1/y")
	r = send(b)
	if r.Status != 307 || facts(r) != outcome.Success() || b.tr.count() != 1 || len(r.Record.Attempts) != 2 || r.Record.Attempts[1].Facts.Outcome != outcome.NotAttempted {
		t.Errorf("%d %+v %+v", r.Status, facts(r), r.Record.Attempts)
	}

	// A journal that refuses the hop's record, and one that is not sure of it.
	for _, c := range []struct {
		err    error
		status int
	}{{ErrNotWritten, 307}, {ErrIndeterminate, 424}} {
		b = newBench(t)
		b.j.before = func(batch Batch) error {
			if e := batch.Events; len(e) > 0 && e[len(e)-1].Type == DispatchStarted && e[len(e)-1].Attempt == 2 || errors.Is(c.err, ErrIndeterminate) && len(e) > 0 && e[0].Attempt == 2 {
				return c.err
			}
			return nil
		}
		b.tr.play = hops(307, "/v1/y")
		if r = send(b); r.Status != c.status || b.tr.count() != 1 {
			t.Errorf("%v: %d, %d sent", c.err, r.Status, b.tr.count())
		}
	}

	// Endless redirects end.
	b = newBench(t)
	b.tr.play = answerWith(307, "", "Location", "/v1/x")
	if r = send(b); r.Status != 307 || b.tr.count() != maxFollowed+1 {
		t.Errorf("%d after %d requests", r.Status, b.tr.count())
	}
}

// TestRedirectToAnotherMethod: a POST that was answered with a redirect to a GET was carried out.
// What the GET comes to takes nothing back, and nobody is told to send the POST again.
func TestRedirectToAnotherMethod(t *testing.T) {
	contract.Covers(t, "R1", "G5", "A9", "A10", "O1")
	carriedOut := outcome.Facts{Phase: outcome.ResultDelivery, Outcome: outcome.Committed, Retry: outcome.Never, Code: outcome.CodeResultNotRetained}
	for name, c := range map[string]struct {
		status int
		play   func(context.Context, *Outgoing, Sink) Ending
		want   outcome.Facts
	}{
		"found":         {303, answerWith(200, "made"), outcome.Success()},
		"gone":          {303, answerWith(404, "none"), carriedOut},
		"gone, 301":     {301, answerWith(404, "none"), carriedOut},
		"gone, 302":     {302, answerWith(404, "none"), carriedOut},
		"refused":       {303, endWith(outcome.CodeRemoteRefused), carriedOut},
		"busy":          {303, answerWith(429, "", "Retry-After", "1"), carriedOut},
		"unknown":       {303, endWith(outcome.CodeRemoteOutcomeUnknown), carriedOut},
		"broken":        {303, answerWith(500, "oh"), outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Committed, Retry: outcome.Reconcile, Code: outcome.CodeRemoteError}},
		"the same, 307": {307, answerWith(404, "none"), outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Rejected, Retry: outcome.AfterCorrection, Code: outcome.CodeRemoteRejected}},
	} {
		b := newBench(t)
		b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
			if out.RawPath == "/v1/x" {
				return answerWith(c.status, "", "Location", "/v1/y")(ctx, out, sink)
			}
			return c.play(ctx, out, sink)
		}
		r := b.Do(t.Context(), post("hop.example.test", "/v1/x", "amount=5"))
		posts := 0
		for _, out := range b.tr.sent {
			if out.Method == "POST" && out.RawPath == "/v1/x" {
				posts++
			}
		}
		rec := b.j.last()
		if facts(r) != c.want || rec.Facts != c.want || posts != 1 {
			t.Errorf("%s: answered %+v, recorded %+v, %d times sent", name, facts(r), rec.Facts, posts)
		}
		if c.want == carriedOut && (r.Status != 410 || r.Header.Get("Retry-After") != "" || rec.MayRepeat(testTime) == nil) {
			t.Errorf("%s: %d %v, to be repeated: %v", name, r.Status, r.Header, rec.MayRepeat(testTime) == nil)
		}
	}
	// Killed between the two: what is on record is enough.
	b := newBench(t)
	b.tr.play = hops(303, "/v1/y")
	b.Do(t.Context(), post("hop.example.test", "/v1/x", "amount=5"))
	var rec Record
	for _, ev := range b.j.events[b.j.last().ID] {
		if ev.Type == RequestSent && ev.Attempt == 2 {
			break
		}
		var err error
		if rec, err = Apply(rec, &ev.Event, ev.Seq); err != nil {
			t.Fatal(err)
		}
	}
	ev, open := Interrupt(&rec, testTime)
	after, err := Apply(rec, &ev, rec.LastSeq+1)
	if !open || err != nil || after.Facts != carriedOut {
		t.Errorf("%v %v %+v", open, err, after.Facts)
	}
}

// TestFollowedDigest: an answer that is followed is on record with the digest of its whole
// body, also of an end that might have become a secret.
func TestFollowedDigest(t *testing.T) {
	contract.Covers(t, "R1", "G1")
	body := "moved " + testSecret[:9]
	b := newBench(t)
	b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
		if out.RawPath == "/v1/x" {
			return answerWith(302, body, "Location", "/v1/y")(ctx, out, sink)
		}
		return answerWith(200, "here")(ctx, out, sink)
	}
	s := post("hop.example.test", "/v1/x", "")
	s.Method, s.Body = "GET", nil
	last := b.Do(t.Context(), s).Record
	if sum := sha256.Sum256([]byte(body)); len(last.Attempts) != 2 || last.Attempts[0].Response.Digest != sumText(sum) {
		t.Errorf("%+v", last.Attempts)
	}
}
