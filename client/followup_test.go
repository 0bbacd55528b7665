package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"testing/synctest"
	"time"

	"waybill/internal/contract"
	"waybill/outcome"
)

const otherAction = "act_01JD0000000000000000000001"

var (
	unknownFacts = outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteTimeout}
	keyedFacts   = outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.SameIdempotencyKey, Code: outcome.CodeRemoteTimeout}
)

func answerOf(id string, f outcome.Facts, ev outcome.Evidence) *http.Response {
	env := outcome.NewEnvelope(id, f, "", ev)
	a := env.Answer(outcome.Shape{Method: http.MethodPost, InsideTunnel: true})
	return &http.Response{StatusCode: a.Status, Header: a.Header, Body: io.NopCloser(bytes.NewReader(a.Body))}
}

// shownAction is the API's document of an action.
func shownAction(id string, f outcome.Facts, ended bool, ev outcome.Evidence) *http.Response {
	ev.ResponseComplete = ev.ResponseComplete || f.IsSuccess()
	raw, err := json.Marshal(map[string]any{
		"action": map[string]any{"invocation_id": id, "request_id": "mine", "phase": f.Phase, "outcome": f.Outcome, "retry": f.Retry, "code": f.Code, "ended": ended,
			"dispatch_started": f.Outcome != outcome.NotAttempted, "link": map[string]string{"kind": "job", "of": otherAction}},
		"envelope": outcome.NewEnvelope(id, f, "", ev),
		"items":    []map[string]any{{"index": 0, "id": "a", "phase": f.Phase, "outcome": f.Outcome, "retry": f.Retry}},
	})
	if err != nil {
		panic(err)
	}
	return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(bytes.NewReader(raw))}
}

// TestKeyOfWaybill: a key that the proxy made is not in the request. It is sent again only
// as a further attempt of its action – sent by itself it would get another key, and take
// effect twice – and what the call reports is never less than what that action is.
func TestKeyOfWaybill(t *testing.T) {
	contract.Covers(t, "O5", "F2")
	ev := outcome.Evidence{DispatchStarted: true, Idempotency: &outcome.Idempotency{Key: "k1", Maker: "waybill"}}
	refusedAs := func(retry outcome.Retry, o outcome.Outcome, p outcome.Phase) outcome.Facts {
		return outcome.Facts{Phase: p, Outcome: o, Retry: retry, Code: outcome.CodeRetryRefused}
	}
	limited := outcome.Facts{Phase: outcome.Validation, Outcome: outcome.NotAttempted, Retry: outcome.Backoff, Code: outcome.CodeRateLimited}
	for name, c := range map[string]struct {
		then   func() (*http.Response, error)
		api    func(*http.Request) *http.Response
		sent   int
		facts  outcome.Facts // zero: an answer
		action string
		is     error
	}{
		"answered": {then: func() (*http.Response, error) { return relayedResponse(201, outcome.Success(), nil), nil }, sent: 2},
		"refused": {then: func() (*http.Response, error) {
			return answerOf(someAction, refusedAs(outcome.SameIdempotencyKey, outcome.Unknown, outcome.RemoteExecution), ev), nil
		}, sent: 2, facts: refusedAs(outcome.SameIdempotencyKey, outcome.Unknown, outcome.RemoteExecution), action: someAction},
		"answered by others": {then: func() (*http.Response, error) {
			return answerOf(someAction, refusedAs(outcome.Never, outcome.Committed, outcome.ResultDelivery), ev), nil
		}, api: func(*http.Request) *http.Response { return relayedResponse(201, outcome.Success(), nil) }, sent: 2},
		"another, not sent":    {then: func() (*http.Response, error) { return answerOf(otherAction, limited, outcome.Evidence{}), nil }, sent: 4, facts: keyedFacts, action: someAction},
		"lost, and known":      {then: func() (*http.Response, error) { return nil, io.ErrUnexpectedEOF }, api: func(*http.Request) *http.Response { return shownAction(someAction, unknownFacts, true, ev) }, sent: 2, facts: unknownFacts, action: someAction, is: ErrLost},
		"lost, and unanswered": {then: func() (*http.Response, error) { return nil, io.ErrUnexpectedEOF }, sent: 2, facts: outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteOutcomeUnknown}, action: someAction, is: ErrUnanswered},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				p := &fakeProxy{answer: func(n int, _ *http.Request) (*http.Response, error) {
					if n == 1 {
						return answerOf(someAction, keyedFacts, ev), nil
					}
					return c.then()
				}, api: c.api}
				resp, err := p.client(t, Options{Repeats: 3}).Do(request(t, t.Context()), RequestID("mine"))
				if len(p.seen) != c.sent {
					t.Fatalf("sent %d times, %v", len(p.seen), err)
				}
				for n, req := range p.seen {
					if got := req.Header.Get("Waybill-Retry-Of"); (n == 0) != (got == "") || n > 0 && got != someAction {
						t.Errorf("submission %d: Retry-Of %q", n+1, got)
					}
					if n > 0 && req.Header.Get("Waybill-Request-Id") == "mine" {
						t.Error("a request id was used twice")
					}
				}
				if c.facts == (outcome.Facts{}) {
					if err != nil || resp.StatusCode != 201 || resp.InvocationID != someAction || resp.RequestID != "mine" {
						t.Errorf("%+v %v", resp, err)
					}
					return
				}
				var e *Error
				if !errors.As(err, &e) || e.Facts() != c.facts || e.Envelope.InvocationID != c.action || e.RequestID != "mine" || c.is != nil && !errors.Is(err, c.is) {
					t.Fatalf("%+v", err)
				}
				if (e.Last != nil) != (name == "another, not sent") {
					t.Errorf("%+v", e.Last)
				}
			})
		})
	}
}

// TestRepeatThatDidNothing: a call whose last submission was not attempted, and an earlier
// one is unknown, is unknown (CONTRACT A9).
func TestRepeatThatDidNothing(t *testing.T) {
	contract.Covers(t, "O5", "A9", "F2")
	repeatable := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Backoff, Code: outcome.CodeRemoteTimeout}
	refused, _ := outcome.Of(outcome.CodeConnectionRefused)
	for _, relay := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			first := answerOf(someAction, repeatable, outcome.Evidence{DispatchStarted: true})
			f := repeatable
			if relay {
				f.Code = outcome.CodeRemoteGateway
				first = relayedResponse(502, f, nil)
			}
			p := &fakeProxy{answer: func(n int, _ *http.Request) (*http.Response, error) {
				if n == 1 {
					return first, nil
				}
				return answerOf(otherAction, refused, outcome.Evidence{}), nil
			}}
			ctx, trace := WithTrace(t.Context())
			_, err := p.client(t, Options{Repeats: 2}).Do(request(t, ctx), RequestID("mine"))
			var e *Error
			if !errors.As(err, &e) || e.Facts() != f || e.Envelope.InvocationID != someAction || e.RequestID != "mine" || e.Last == nil || e.Last.Facts() != refused || e.Last.RequestID != "mine-3" || len(p.seen) != 3 {
				t.Fatalf("relayed %t: %+v, sent %d times", relay, err, len(p.seen))
			}
			if got := len(trace.Calls()); got != 3 {
				t.Errorf("%d calls traced", got)
			}
		})
	}
}

// TestRepeatThatWasRefused: a refusal settles the submission that it answers, and not an
// earlier one of the call that may have taken effect – as between the attempts of one action
// (CONTRACT A10). A result decides.
func TestRepeatThatWasRefused(t *testing.T) {
	contract.Covers(t, "O5", "A10", "F2", "V7")
	repeatable := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Backoff, Code: outcome.CodeRemoteTimeout}
	gateway := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Backoff, Code: outcome.CodeRemoteGateway}
	rejected := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Rejected, Retry: outcome.AfterCorrection, Code: outcome.CodeRemoteRejected}
	failed := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Committed, Retry: outcome.Reconcile, Code: outcome.CodeRemoteError}
	closed, _ := outcome.Of(outcome.CodeRemoteRefused)
	relayed := func(id string, status int, f outcome.Facts) *http.Response {
		r := relayedResponse(status, f, nil)
		r.Header.Set(outcome.HeaderInvocation, id)
		return r
	}
	streamed := func() *http.Response {
		r := relayed(otherAction, 200, outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.FetchResult})
		r.Trailer = http.Header{outcome.HeaderOutcome: {outcome.FormatOutcome(rejected)}}
		return r
	}
	for name, c := range map[string]struct {
		first func() *http.Response // nil: a time-out
		then  func() *http.Response
		key   bool          // in the request
		open  bool          // the call's outcome is the first submission's
		last  outcome.Facts // of Error.Last, or of the answer
		body  string
		sent  int
	}{
		"refused":           {then: func() *http.Response { return relayed(otherAction, 404, rejected) }, open: true, last: rejected, body: "origin", sent: 2},
		"gateway, refused":  {first: func() *http.Response { return relayedResponse(502, gateway, nil) }, then: func() *http.Response { return relayed(otherAction, 404, rejected) }, open: true, last: rejected, body: "origin", sent: 2},
		"refused by frames": {then: func() *http.Response { return answerOf(otherAction, closed, outcome.Evidence{DispatchStarted: true}) }, open: true, last: closed, sent: 3},
		"a part of a refusal": {then: func() *http.Response {
			r := relayed(otherAction, 404, rejected)
			r.Body = io.NopCloser(io.MultiReader(strings.NewReader("ori"), iotest.ErrReader(io.ErrUnexpectedEOF)))
			return r
		}, open: true, last: rejected, sent: 2},
		"a stream, refused in the end": {then: streamed, open: true, last: rejected, sent: 2},
		"not through Waybill": {then: func() *http.Response {
			return &http.Response{StatusCode: 404, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("who?"))}
		}, open: true, last: outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeInternal}, body: "who?", sent: 2},
		"the action itself is refused": {key: true, then: func() *http.Response { return relayed(someAction, 404, rejected) }, last: rejected, body: "origin", sent: 2},
		"a result":                     {then: func() *http.Response { return relayed(otherAction, 500, failed) }, last: failed, body: "origin", sent: 2},
		"a success":                    {then: func() *http.Response { return relayed(otherAction, 204, outcome.Success()) }, last: outcome.Success(), body: "origin", sent: 2},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := repeatable
				if c.first != nil {
					f = gateway
				}
				if c.key {
					f.Retry = outcome.SameIdempotencyKey
				}
				p := &fakeProxy{answer: func(n int, _ *http.Request) (*http.Response, error) {
					switch {
					case n > 1:
						return c.then(), nil
					case c.first != nil:
						return c.first(), nil
					}
					return answerOf(someAction, f, outcome.Evidence{DispatchStarted: true}), nil
				}}
				req := request(t, t.Context())
				if c.key {
					req.Header.Set("Idempotency-Key", "k1")
				}
				resp, err := p.client(t, Options{Repeats: 2}).Do(req, RequestID("mine"))
				body := []byte(nil)
				if err == nil {
					// What a stream was, its end says.
					body, err = io.ReadAll(resp.Body)
				}
				if len(p.seen) != c.sent {
					t.Fatalf("sent %d times, %v", len(p.seen), err)
				}
				if !c.open {
					if err != nil || resp.Facts != c.last || string(body) != c.body {
						t.Errorf("%+v %v", resp, err)
					}
					return
				}
				var e *Error
				if !errors.As(err, &e) || e.Facts() != f || e.Envelope.InvocationID != someAction || e.RequestID != "mine" || e.Last == nil {
					t.Fatalf("%+v %v", resp, err)
				}
				if e.Last.Facts() != c.last || c.body != "" && string(e.Last.Body) != c.body || strings.HasPrefix(string(e.Last.Body), "ori") && c.body == "" {
					t.Errorf("last: %+v %q", e.Last, e.Last.Body)
				}
			})
		})
	}
}

// TestFollowUps: what Retry and Reconcile report is the action, whatever happens to the
// call: never that nothing was attempted.
func TestFollowUps(t *testing.T) {
	contract.Covers(t, "O5", "L6", "F2", "M7")
	refused := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRetryRefused}
	lost := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteOutcomeUnknown}
	down := func() *http.Response {
		return &http.Response{StatusCode: 502, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("down"))}
	}
	for what, call := range map[string]func(*Client, context.Context, string) (*Action, error){"retry": (*Client).Retry, "reconcile": (*Client).Reconcile} {
		for name, c := range map[string]struct {
			post, get func() *http.Response
			facts     outcome.Facts // of the action, or of the error
			is        error
			fails     bool
		}{
			"done":          {post: func() *http.Response { return shownAction(someAction, outcome.Success(), true, outcome.Evidence{}) }, facts: outcome.Success()},
			"still unknown": {post: func() *http.Response { return shownAction(someAction, unknownFacts, true, outcome.Evidence{}) }, facts: unknownFacts},
			"refused": {post: func() *http.Response {
				return answerOf(someAction, refused, outcome.Evidence{Reason: "no_reconcile_query"})
			}, facts: refused, fails: true},
			"no such": {post: func() *http.Response {
				return answerOf("", outcome.Facts{Code: outcome.CodeActionNotFound}, outcome.Evidence{})
			}, facts: outcome.Facts{Code: outcome.CodeActionNotFound}, is: ErrNotFound, fails: true},
			"lost, resolved": {post: down, get: func() *http.Response { return shownAction(someAction, outcome.Success(), true, outcome.Evidence{}) }, facts: outcome.Success()},
			"lost, unknown":  {post: down, get: func() *http.Response { return shownAction(someAction, unknownFacts, true, outcome.Evidence{}) }, facts: unknownFacts, is: ErrLost, fails: true},
			"not understood": {post: func() *http.Response {
				return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("{"))}
			}, get: down, facts: lost, is: ErrUnanswered, fails: true},
			"lost, unanswered": {post: down, get: down, facts: lost, is: ErrUnanswered, fails: true},
		} {
			t.Run(what+", "+name, func(t *testing.T) {
				synctest.Test(t, func(t *testing.T) {
					posts := 0
					p := &fakeProxy{api: func(req *http.Request) *http.Response {
						if req.Method == http.MethodPost {
							posts++
							if req.URL.Path != "/v1/actions/"+someAction+"/"+what || req.Header.Get("Waybill-Timeout") != "59" {
								t.Errorf("%s %v", req.URL, req.Header)
							}
							return c.post()
						}
						return c.get()
					}}
					ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
					defer cancel()
					a, err := call(p.client(t, Options{}), ctx, someAction)
					if posts != 1 {
						t.Errorf("posted %d times", posts)
					}
					var e *Error
					switch {
					case !c.fails:
						if err != nil {
							t.Fatal(err)
						}
						if a.Facts() != c.facts || a.Envelope == nil || len(a.Items) != 1 || a.Items[0].Outcome != c.facts.Outcome || (a.Err() == nil) != c.facts.IsSuccess() {
							t.Errorf("%+v %v", a, err)
						}
						if errors.As(a.Err(), &e) && (e.Facts() != c.facts || e.Source != FromRecord || e.RequestID != "mine") {
							t.Errorf("%+v", e)
						}
					case !errors.As(err, &e) || e.Facts() != c.facts || c.is != nil && !errors.Is(err, c.is) || c.is != ErrNotFound && e.Envelope.InvocationID != someAction: //nolint:errorlint // a row of the table
						t.Errorf("%+v", err)
					}
				})
			})
		}
	}
}

// TestWaiting: Wait asks the proxy to wait, outlasts a restart, and ends with the context.
func TestWaiting(t *testing.T) {
	contract.Covers(t, "O5", "A7")
	running := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.FetchResult, Code: outcome.CodeResultPending}
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		p := &fakeProxy{}
		p.api = func(req *http.Request) *http.Response {
			since := time.Since(start)
			switch {
			case since < 5*time.Second:
				time.Sleep(3 * time.Second)
			case since < 20*time.Second:
				return &http.Response{StatusCode: 502, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("down"))}
			case since > 40*time.Second:
				return shownAction(someAction, outcome.Success(), true, outcome.Evidence{})
			}
			return shownAction(someAction, running, false, outcome.Evidence{})
		}
		c := p.client(t, Options{})
		a, err := c.Wait(t.Context(), someAction)
		if err != nil || !a.Ended || time.Since(start) > 42*time.Second || !slices.Contains(p.asked, "/v1/actions/"+someAction+"?wait=30") {
			t.Errorf("%+v %v after %v, asked %q", a, err, time.Since(start), p.asked)
		}
		start = time.Now().Add(-30 * time.Second)
		ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		if a, err = c.Wait(ctx, someAction); !errors.Is(err, context.DeadlineExceeded) || a == nil || a.Facts() != running {
			t.Errorf("%+v %v", a, err)
		}
		start = time.Now().Add(-30 * time.Second)
		ctx, cancel = context.WithTimeout(t.Context(), 3*time.Second)
		defer cancel()
		_, err = c.WaitResult(ctx, someAction)
		var e *Error
		if !errors.As(err, &e) || e.Facts() != running || e.Envelope.InvocationID != someAction || !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%+v", err)
		}
		// Down for good.
		p.api = nil
		begun := time.Now()
		if _, err = c.Wait(t.Context(), someAction); !errors.Is(err, ErrUnanswered) || time.Since(begun) < DefaultAskFor || time.Since(begun) > DefaultAskFor+2*lastAsk {
			t.Errorf("%v after %v", err, time.Since(begun))
		}
	})
}

// TestStoredOutput: half a frame, or what is none, is never the whole output.
func TestStoredOutput(t *testing.T) {
	contract.Covers(t, "O5", "G3")
	const whole = "\x01\x00\x00\x00\x00\x00\x00\x03abc\x02\x00\x00\x00\x00\x00\x00\x01x\x01\x00\x00\x00\x00\x00\x00\x01d"
	for n := range len(whole) + 1 {
		var out, errs bytes.Buffer
		err := splitOutput(strings.NewReader(whole[:n]), &out, &errs)
		ends := slices.Contains([]int{0, 11, 20, 29}, n)
		if (err == nil) != ends || n == len(whole) && (out.String() != "abcd" || errs.String() != "x") {
			t.Errorf("%d bytes: %q %q %v", n, out.String(), errs.String(), err)
		}
	}
	for _, bad := range []string{"\x03\x00\x00\x00\x00\x00\x00\x00", "\x01\x00\x01\x00\x00\x00\x00\x00", "\x01\x00\x00\x00\x00\x01\x00\x00"} {
		if err := splitOutput(strings.NewReader(bad), io.Discard, io.Discard); !errors.Is(err, errFrame) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	// A stream that breaks between two frames, with an error that wraps io.EOF.
	broken := &Error{Err: errors.Join(ErrLost, io.EOF)}
	if err := splitOutput(io.MultiReader(strings.NewReader(whole[:11]), failing{broken}), io.Discard, io.Discard); err == nil {
		t.Error("a broken stream was taken as whole")
	}
}

// TestCommandNotRead: a command that ran, and whose output cannot be read, is a failed
// delivery with the action's id (CONTRACT F2, H2).
func TestCommandNotRead(t *testing.T) {
	contract.Covers(t, "O5", "F2", "H2")
	for name, body := range map[string]string{
		"long":           `{"invocation_id":"` + someAction + `","result":"/v1/actions/x/result","evidence":{"dispatch_started":true,"response_complete":true}}`,
		"not understood": `{"invocation_id":`, "another": `{"invocation_id":"` + otherAction + `","evidence":{"dispatch_started":true,"response_complete":true}}`,
	} {
		sent := 0
		p := &fakeProxy{api: func(req *http.Request) *http.Response {
			if !strings.HasSuffix(req.URL.RequestURI(), execPath) {
				return &http.Response{StatusCode: 502, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("down"))}
			}
			sent++
			r := relayedResponse(200, outcome.Success(), nil)
			r.Body = io.NopCloser(strings.NewReader(body))
			return r
		}}
		_, err := p.client(t, Options{}).SSHExec(t.Context(), Command{Target: "box.test", User: "deploy", Command: "x"})
		want := outcome.Facts{Phase: outcome.ResultDelivery, Outcome: outcome.Committed, Retry: outcome.FetchResult, Code: outcome.CodeDeliveryFailed}
		var e *Error
		if !errors.As(err, &e) || e.Facts() != want || e.Envelope.InvocationID != someAction || e.RequestID == "" || sent != 1 {
			t.Errorf("%s: %+v", name, err)
		}
	}
}

type failing struct{ err error }

func (f failing) Read([]byte) (int, error) { return 0, f.err }

// TestSinceIsExact: a filter's time goes to the proxy as it is, as the commands send it.
func TestSinceIsExact(t *testing.T) {
	at := time.Date(2026, 11, 30, 12, 0, 0, 123456789, time.FixedZone("", 3600))
	got, err := time.Parse(time.RFC3339, (&Filter{Since: at}).query().Get("since"))
	if err != nil || !got.Equal(at) {
		t.Errorf("%v %v", got, err)
	}
}
