package client

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"maps"
	"net/http"
	"net/http/httptrace"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"waybill/internal/contract"
	"waybill/outcome"
)

// fakeProxy answers submissions and asks without a network, so that time is synctest's.
type fakeProxy struct {
	answer func(n int, req *http.Request) (*http.Response, error) // n from 1
	seen   []*http.Request
	bodies []string
	asked  []string // path?query of the caller API
	api    func(req *http.Request) *http.Response
}

// RoundTrip plays both ways to the proxy.
func (p *fakeProxy) RoundTrip(req *http.Request) (*http.Response, error) {
	if req.Host == apiHost {
		p.asked = append(p.asked, req.URL.RequestURI())
		if p.api == nil {
			return nil, errors.New("refused")
		}
		return p.api(req), nil
	}
	hooks := httptrace.ContextClientTrace(req.Context())
	hooks.GetConn("")
	hooks.GotConn(httptrace.GotConnInfo{})
	body := ""
	if req.Body != nil {
		raw, _ := io.ReadAll(req.Body)
		_ = req.Body.Close()
		body = string(raw)
	}
	p.seen, p.bodies = append(p.seen, req), append(p.bodies, body)
	return p.answer(len(p.seen), req)
}

// client returns a client of the fake, without jitter.
func (p *fakeProxy) client(t *testing.T, o Options) *Client {
	t.Helper()
	o.Proxy = "http://127.0.0.1:1"
	c, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	c.tunnels, c.direct = p, p
	c.jitter = func(time.Duration) time.Duration { return 0 }
	return c
}

const someAction = "act_01JD0000000000000000000000"

// ownResponse is Waybill's own answer with these facts.
func ownResponse(f outcome.Facts, s outcome.Shape, ev outcome.Evidence) *http.Response {
	env := outcome.NewEnvelope(someAction, f, "", ev)
	a := env.Answer(s)
	return &http.Response{StatusCode: a.Status, Header: a.Header, Body: io.NopCloser(bytes.NewReader(a.Body))}
}

// relayedResponse is an origin's answer with these facts beside it.
func relayedResponse(status int, f outcome.Facts, h http.Header) *http.Response {
	if h == nil {
		h = http.Header{}
	}
	outcome.Annotate(h, someAction, f, outcome.Shape{ReceivedStatus: status}, true)
	return &http.Response{StatusCode: status, Header: h, Body: io.NopCloser(strings.NewReader("origin"))}
}

func request(t *testing.T, ctx context.Context, fields ...string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://pay.example.test/v1/x", strings.NewReader("amount=5"))
	if err != nil {
		t.Fatal(err)
	}
	for i := 0; i+1 < len(fields); i += 2 {
		req.Header.Set(fields[i], fields[i+1])
	}
	return req
}

// TestRepeatsOnAdviceOnly goes through every valid combination of facts, as Waybill's
// own answer, as one of another form, and beside an origin's: the client sends again on
// backoff, and on same_idempotency_key when the request carries the key – and on
// nothing else, whatever status and fields tempt it to (CONTRACT O5).
func TestRepeatsOnAdviceOnly(t *testing.T) {
	contract.Covers(t, "O5", "O1")
	all := []outcome.Facts{outcome.Success()}
	for _, code := range outcome.Codes() {
		all = append(all, outcome.Lookup(code).Facts()...)
	}
	repeated := 0
	for _, f := range all {
		if f.Code == outcome.CodeActionNotFound {
			continue // not an answer to a submission
		}
		for _, key := range []bool{false, true} {
			for _, form := range []string{"json", "dialect"} {
				synctest.Test(t, func(t *testing.T) {
					p := &fakeProxy{answer: func(int, *http.Request) (*http.Response, error) {
						var resp *http.Response
						if relayed(f) {
							resp = relayedResponse(503, f, nil)
						} else {
							resp = ownResponse(f, outcome.Shape{CallerSentKey: true}, outcome.Evidence{})
						}
						// A dialect's status and hints may say anything.
						if form == "dialect" {
							resp.StatusCode, resp.Body = 503, io.NopCloser(strings.NewReader("<Error>SlowDown</Error>"))
							resp.Header.Set("X-Should-Retry", "true")
							resp.Header.Set("Retry-After", "1")
						}
						return resp, nil
					}}
					req := request(t, t.Context())
					if key {
						req.Header.Set("Idempotency-Key", "k1")
					}
					resp, err := p.client(t, Options{Repeats: 2}).Do(req)
					want := 1
					// A key is a ground for what may have been dispatched; LEASE_LOST, of an attempt
					// only, can stand with any advice (A9).
					if f.Retry == outcome.Backoff || f.Retry == outcome.SameIdempotencyKey && key && f.Outcome == outcome.Unknown {
						want = 3
						repeated++
					}
					if len(p.seen) != want {
						t.Errorf("%v key=%v %s: sent %d times, want %d", f, key, form, len(p.seen), want)
					}
					ids := map[string]bool{}
					for i, r := range p.seen {
						if p.bodies[i] != "amount=5" || key && r.Header.Get("Idempotency-Key") != "k1" {
							t.Errorf("%v: submission %d is another request", f, i+1)
						}
						if id := r.Header.Get("Waybill-Request-Id"); id == "" || ids[id] {
							t.Errorf("%v: submission %d has request id %q", f, i+1, id)
						} else {
							ids[id] = true
						}
					}
					var e *Error
					switch {
					case relayed(f) && (err != nil || resp.Facts != f):
						t.Errorf("%v: %v", f, err)
					case !relayed(f) && (!errors.As(err, &e) || e.Facts() != f || e.Envelope.InvocationID != someAction):
						t.Errorf("%v: %+v", f, err)
					case e != nil && (e.Source == FromFields) != (form == "dialect"):
						t.Errorf("%v %s: from %v", f, form, e.Source)
					}
				})
			}
		}
	}
	if repeated == 0 {
		t.Error("nothing was repeated: this shows nothing")
	}
}

// TestWaits: the exact times between submissions.
func TestWaits(t *testing.T) {
	contract.Covers(t, "O5")
	backoff, _ := outcome.Of(outcome.CodeConnectionRefused)
	refusedWith := func(after time.Duration) func(int, *http.Request) (*http.Response, error) {
		return func(int, *http.Request) (*http.Response, error) {
			return ownResponse(backoff, outcome.Shape{RetryAfter: after}, outcome.Evidence{}), nil
		}
	}
	rejected := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Rejected, Retry: outcome.Backoff, Code: outcome.CodeRemoteRejected}
	relayedWith := func(after string) func(int, *http.Request) (*http.Response, error) {
		return func(int, *http.Request) (*http.Response, error) {
			h := http.Header{}
			if after == "date" {
				after = time.Now().Add(7 * time.Second).UTC().Format(http.TimeFormat)
				defer func() { after = "date" }()
			}
			if after != "" {
				h.Set("Retry-After", after)
			}
			return relayedResponse(429, rejected, h), nil
		}
	}
	for name, c := range map[string]struct {
		answer   func(int, *http.Request) (*http.Response, error)
		o        Options
		deadline time.Duration
		sent     int
		took     time.Duration
	}{
		"Retry-After":              {refusedWith(5 * time.Second), Options{Repeats: 3}, 0, 4, 15 * time.Second},
		"at most MaxWait":          {refusedWith(20 * time.Second), Options{MaxWait: 19 * time.Second}, 0, 1, 0},
		"none given":               {relayedWith(""), Options{}, 0, 5, (200 + 400 + 800 + 1600) * time.Millisecond},
		"seconds of the origin":    {relayedWith("2"), Options{Repeats: 1}, 0, 2, 2 * time.Second},
		"a date of the origin":     {relayedWith("date"), Options{Repeats: 1}, 0, 2, 7 * time.Second},
		"longer than MaxWait":      {relayedWith("3600"), Options{}, 0, 1, 0},
		"not a time":               {relayedWith("soon"), Options{Repeats: 1}, 0, 2, 200 * time.Millisecond},
		"never":                    {refusedWith(time.Second), Options{Repeats: -1}, 0, 1, 0},
		"not beyond the deadline":  {refusedWith(4 * time.Second), Options{Repeats: 9}, 10 * time.Second, 3, 8 * time.Second},
		"deadline before any wait": {refusedWith(4 * time.Second), Options{Repeats: 9}, 3 * time.Second, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx := t.Context()
				if c.deadline > 0 {
					var cancel context.CancelFunc
					ctx, cancel = context.WithTimeout(ctx, c.deadline)
					defer cancel()
				}
				p := &fakeProxy{answer: c.answer}
				start := time.Now()
				resp, err := p.client(t, c.o).Do(request(t, ctx))
				if len(p.seen) != c.sent || time.Since(start) != c.took {
					t.Errorf("sent %d times in %v, want %d in %v", len(p.seen), time.Since(start), c.sent, c.took)
				}
				if resp == nil && err == nil {
					t.Error("neither an answer nor an error")
				}
				if c.deadline > 0 {
					want := []string{"9", "5", "1"}
					if c.deadline == 3*time.Second {
						want = []string{"2"}
					}
					for i, r := range p.seen {
						if got := r.Header.Get("Waybill-Timeout"); got != want[i] {
							t.Errorf("submission %d: Waybill-Timeout %q, want %q", i+1, got, want[i])
						}
					}
				}
			})
		})
	}
	t.Run("the caller leaves while it waits", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			p := &fakeProxy{answer: refusedWith(30 * time.Second)}
			start := time.Now()
			time.AfterFunc(3*time.Second, cancel)
			_, err := p.client(t, Options{}).Do(request(t, ctx))
			var e *Error
			if !errors.As(err, &e) || e.Facts() != backoff || len(p.seen) != 1 || time.Since(start) != 3*time.Second {
				t.Errorf("%v after %v", err, time.Since(start))
			}
		})
	})
	t.Run("a body that is read once is sent once", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			p := &fakeProxy{answer: refusedWith(time.Second)}
			req := request(t, t.Context())
			req.GetBody = nil
			_, err := p.client(t, Options{}).Do(req)
			if len(p.seen) != 1 || err == nil {
				t.Errorf("sent %d times, %v", len(p.seen), err)
			}
		})
	})
}

// TestSameKey: the repeat carries the key that the evidence names, or there is none.
func TestSameKey(t *testing.T) {
	contract.Covers(t, "O5")
	f := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.SameIdempotencyKey, Code: outcome.CodeRemoteTimeout}
	for name, c := range map[string]struct {
		fields []string
		key    string // in the evidence
		sent   int
	}{
		"in the usual field":        {[]string{"Idempotency-Key", "k1"}, "k1", 2},
		"in a field of its own":     {[]string{"X-Request-Token", "k1"}, "k1", 2},
		"another key":               {[]string{"Idempotency-Key", "k2"}, "k1", 1},
		"a key that Waybill added":  {nil, "k1", 2}, // as a further attempt: TestKeyOfWaybill
		"none named, usual field":   {[]string{"X-Idempotency-Key", "k1"}, "", 2},
		"none named, unknown field": {[]string{"X-Request-Token", "k1"}, "", 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var ev outcome.Evidence
				if c.key != "" {
					ev.Idempotency = &outcome.Idempotency{Key: c.key}
				}
				p := &fakeProxy{answer: func(n int, _ *http.Request) (*http.Response, error) {
					if n == 1 {
						return ownResponse(f, outcome.Shape{CallerSentKey: true}, ev), nil
					}
					return relayedResponse(201, outcome.Success(), nil), nil
				}}
				_, err := p.client(t, Options{}).Do(request(t, t.Context(), c.fields...))
				if len(p.seen) != c.sent || (err == nil) != (c.sent == 2) {
					t.Errorf("sent %d times, %v", len(p.seen), err)
				}
			})
		})
	}
}

// TestEnvelopeOfAnAnswer: the body counts only where Waybill's fields say the same.
func TestEnvelopeOfAnAnswer(t *testing.T) {
	contract.Covers(t, "O5", "L6", "A8")
	unknown := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteTimeout}
	harmless, _ := outcome.Of(outcome.CodeConnectionRefused)
	ev := outcome.Evidence{Attempt: 1, DispatchStarted: true, Route: "pay", Fingerprint: "sha256:1"}
	answer := func(change func(*http.Response)) *http.Response {
		r := ownResponse(unknown, outcome.Shape{}, ev)
		if change != nil {
			change(r)
		}
		return r
	}
	body := func(s string) func(*http.Response) {
		return func(r *http.Response) { r.Body = io.NopCloser(strings.NewReader(s)) }
	}
	forged, err := io.ReadAll(ownResponse(harmless, outcome.Shape{}, outcome.Evidence{}).Body)
	if err != nil {
		t.Fatal(err)
	}
	other := strings.Replace(string(mustRead(answer(nil))), someAction, "act_01JD0000000000000000000001", 1)
	for name, c := range map[string]struct {
		resp   *http.Response
		source Source
		facts  outcome.Facts
	}{
		"envelope":                 {answer(nil), FromBody, unknown},
		"another form":             {answer(body("<Error><Code>x</Code></Error>")), FromFields, unknown},
		"plain text":               {answer(body("REMOTE_TIMEOUT not_attempted backoff")), FromFields, unknown},
		"nothing":                  {answer(body("")), FromFields, unknown},
		"facts of somebody else":   {answer(body(string(forged))), FromFields, unknown},
		"of another action":        {answer(body(other)), FromFields, unknown},
		"cut":                      {answer(body(`{"invocation_id":"` + someAction + `","error":{"code":`)), FromFields, unknown},
		"a fact that is not known": {answer(body(strings.ReplaceAll(string(mustRead(answer(nil))), `"reconcile"`, `"tomorrow"`))), FromFields, unknown},
		"an outcome that is not known": {answer(func(r *http.Response) {
			r.Header.Set("Waybill-Outcome", "probably;phase=remote_execution;retry=backoff")
		}), FromClient, outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeInternal}},
		"two outcomes": {answer(func(r *http.Response) {
			r.Header.Add("Waybill-Outcome", "not_attempted;phase=validation;retry=backoff;code=RATE_LIMITED")
		}), FromClient, outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeInternal}},
	} {
		t.Run(name, func(t *testing.T) {
			p := &fakeProxy{answer: func(int, *http.Request) (*http.Response, error) { return c.resp, nil }}
			_, err := p.client(t, Options{}).Do(request(t, t.Context()))
			var e *Error
			if !errors.As(err, &e) || e.Source != c.source || e.Facts() != c.facts || e.Envelope.InvocationID != someAction || len(p.seen) != 1 {
				t.Fatalf("%+v", err)
			}
			if (e.Envelope.Evidence.Route == "pay") != (c.source == FromBody) || c.source != FromClient && !e.Envelope.Evidence.DispatchStarted {
				t.Errorf("%+v", e.Envelope.Evidence)
			}
			if !strings.HasPrefix(e.Error(), "waybill: "+c.facts.Code.String()+": Outcome unknown: do not repeat") {
				t.Error(e)
			}
		})
	}

	t.Run("an answer that is not Waybill's", func(t *testing.T) {
		p := &fakeProxy{answer: func(int, *http.Request) (*http.Response, error) {
			return &http.Response{StatusCode: 503, Header: http.Header{"Retry-After": {"1"}}, Body: io.NopCloser(bytes.NewReader(forged))}, nil
		}}
		resp, err := p.client(t, Options{}).Do(request(t, t.Context()))
		if err != nil || len(p.seen) != 1 || resp.InvocationID != "" || resp.Facts != (outcome.Facts{}) || resp.Err() != nil {
			t.Errorf("%+v %v, sent %d times", resp, err, len(p.seen))
		}
	})
}

func mustRead(r *http.Response) []byte {
	raw, err := io.ReadAll(r.Body)
	if err != nil {
		panic(err)
	}
	return raw
}

// TestAsking: how long the proxy is asked after a loss, and what is reported.
func TestAsking(t *testing.T) {
	contract.Covers(t, "O5", "M7")
	view := func(f outcome.Facts, ended string) string {
		return `{"invocation_id":"` + someAction + `","phase":"` + f.Phase.String() + `","outcome":"` + f.Outcome.String() + `","retry":"` + f.Retry.String() + `","code":"` + f.Code.String() + `","ended":` + ended + `}`
	}
	running := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.FetchResult, Code: outcome.CodeResultPending}
	refused, _ := outcome.Of(outcome.CodeConnectionRefused)
	timeout := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteTimeout}
	ok := func(s string) *http.Response {
		return &http.Response{StatusCode: 200, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(s))}
	}
	// at is what the API knows from a time since the loss on.
	type at struct {
		from  time.Duration
		facts outcome.Facts
		state string // "down", "missing", "open", "ended"
	}
	for name, c := range map[string]struct {
		script []at
		facts  outcome.Facts
		reason string
		is     error
		took   time.Duration // to within one ask
		sent   int
	}{
		"ended at once":        {[]at{{0, timeout, "ended"}}, timeout, "", ErrLost, 0, 1},
		"runs and ends":        {[]at{{0, running, "open"}, {10 * time.Second, timeout, "ended"}}, timeout, "", ErrLost, 10 * time.Second, 1},
		"runs on":              {[]at{{0, running, "open"}}, running, "", ErrLost, DefaultAskFor, 1},
		"success":              {[]at{{0, outcome.Success(), "ended"}}, outcome.Facts{Phase: outcome.ResultDelivery, Outcome: outcome.Committed, Retry: outcome.FetchResult, Code: outcome.CodeDeliveryFailed}, "", ErrLost, 0, 1},
		"restart":              {[]at{{0, timeout, "down"}, {5 * time.Second, timeout, "ended"}}, timeout, "", ErrLost, 5 * time.Second, 1},
		"down for good":        {[]at{{0, timeout, "down"}}, outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteOutcomeUnknown}, "proxy_unanswered", ErrUnanswered, DefaultAskFor, 1},
		"never heard of it":    {[]at{{0, timeout, "missing"}}, outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteOutcomeUnknown}, "action_not_found", ErrNotFound, DefaultSettleFor, 1},
		"on its way":           {[]at{{0, timeout, "missing"}, {2 * time.Second, timeout, "ended"}}, timeout, "", ErrLost, 2 * time.Second, 1},
		"refused by the way":   {[]at{{0, refused, "ended"}}, refused, "", ErrLost, 0, 2},
		"down, then not known": {[]at{{0, timeout, "down"}, {5 * time.Second, timeout, "missing"}}, outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteOutcomeUnknown}, "action_not_found", ErrNotFound, 5*time.Second + DefaultSettleFor, 1},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				start := time.Now()
				now := func() at {
					cur := c.script[0]
					for _, s := range c.script {
						if time.Since(start) >= s.from {
							cur = s
						}
					}
					return cur
				}
				p := &fakeProxy{answer: func(int, *http.Request) (*http.Response, error) { return nil, io.EOF }}
				p.api = func(req *http.Request) *http.Response {
					s := now()
					switch s.state {
					case "down":
						return &http.Response{StatusCode: 502, Header: http.Header{}, Body: io.NopCloser(strings.NewReader("down"))}
					case "missing":
						return ok("")
					}
					ended := "false"
					if s.state == "ended" {
						ended = "true"
					}
					if strings.HasSuffix(req.URL.Path, "/actions") {
						return ok(view(s.facts, ended) + "\n")
					}
					env := outcome.NewEnvelope(someAction, s.facts, "", outcome.Evidence{ResponseComplete: true})
					raw, err := json.Marshal(env)
					if err != nil {
						panic(err)
					}
					return ok(`{"action":` + view(s.facts, ended) + `,"envelope":` + string(raw) + `}`)
				}
				_, err := p.client(t, Options{Repeats: 1}).Do(request(t, t.Context()))
				var e *Error
				if !errors.As(err, &e) || e.Facts() != c.facts || e.Envelope.Evidence.Reason != c.reason || !errors.Is(err, c.is) || !errors.Is(err, ErrLost) || !errors.Is(err, io.EOF) {
					t.Fatalf("%+v", err)
				}
				if len(p.seen) != c.sent {
					t.Errorf("sent %d times, want %d", len(p.seen), c.sent)
				}
				if took := time.Since(start); took < c.took || took > c.took+lastAsk {
					t.Errorf("took %v, want %v", took, c.took)
				}
				if e.RequestID != p.seen[len(p.seen)-1].Header.Get("Waybill-Request-Id") {
					t.Errorf("request id %q", e.RequestID)
				}
				if want := "/v1/actions?limit=1&request_id=" + p.seen[0].Header.Get("Waybill-Request-Id"); !slices.Contains(p.asked, want) {
					t.Errorf("asked %q, want %q", p.asked, want)
				}
			})
		})
	}
}

// TestAnsweredFailures: a RoundTripper that answers its failures never shows a library
// something it would repeat where the advice does not allow it (CONTRACT L7).
func TestAnsweredFailures(t *testing.T) {
	contract.Covers(t, "O5")
	synctest.Test(t, func(t *testing.T) {
		p := &fakeProxy{answer: func(int, *http.Request) (*http.Response, error) { return nil, io.EOF }}
		c := p.client(t, Options{AnswerFailures: true})
		ctx, trace := WithTrace(WithOptions(t.Context(), RequestID("vendor-1")))
		resp, err := c.HTTPClient().Do(request(t, ctx))
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		if resp.StatusCode != 424 || resp.Header.Get("X-Should-Retry") != "false" || resp.Header.Get("Retry-After") != "" {
			t.Errorf("%d %v", resp.StatusCode, resp.Header)
		}
		if e := ErrorOf(resp); e == nil || e.Facts().Retry != outcome.Reconcile {
			t.Errorf("%+v", e)
		}
		last, ok := trace.Last()
		if !ok || last.RequestID != "vendor-1" || !errors.Is(last.Err, ErrLost) || len(trace.Calls()) != 1 {
			t.Errorf("%+v", last)
		}
	})
}

// TestOptions: what cannot be used is refused before anything is sent, without its value.
func TestOptions(t *testing.T) {
	contract.Covers(t, "O5")
	for _, o := range []Options{
		{}, {Proxy: "127.0.0.1:7171"}, {Proxy: "https://127.0.0.1:7171"}, {Proxy: "http://user:tok3n@127.0.0.1:7171/path"},
		{Proxy: "http://user:tok3n@/"}, {Proxy: "http://user:tok3n@10.0.0.7:7171", AbsoluteForm: true},
	} {
		if _, err := New(o); !errors.Is(err, ErrOption) || strings.Contains(err.Error(), "tok3n") {
			t.Errorf("%+v: %v", o, err)
		}
	}
	p := &fakeProxy{answer: func(int, *http.Request) (*http.Response, error) {
		return relayedResponse(200, outcome.Success(), nil), nil
	}}
	c := p.client(t, Options{})
	for name, opt := range map[string]CallOption{
		"no reason": UnsafeRepeat(someAction, " "), "no action": UnsafeRepeat("act_1", "because"), "space": RequestID("a b"), "empty": RequestID(""), "long": RequestID(strings.Repeat("a", 121)),
	} {
		if _, err := c.Do(request(t, t.Context()), opt); !errors.Is(err, ErrOption) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := c.Do(request(t, t.Context(), "Waybill-Supersedes", someAction)); !errors.Is(err, ErrSupersedes) {
		t.Error(err)
	}
	if len(p.seen) != 0 {
		t.Error("something was sent")
	}
	req := request(t, t.Context(), "Waybill-Request-Id", "mine", "Waybill-Timeout", "7")
	// What cannot be written as HTTP is the caller's to correct, and no failing network.
	real, err := New(Options{Proxy: "http://127.0.0.1:1", AbsoluteForm: true})
	if err != nil {
		t.Fatal(err)
	}
	_, err = real.Do(request(t, t.Context(), "Bad Name", "x"))
	var e *Error
	if !errors.As(err, &e) || e.Facts().Code != outcome.CodeInvalidRequest || e.Facts().Outcome != outcome.NotAttempted || len(e.Earlier) != 0 {
		t.Errorf("%+v", err)
	}

	before := maps.Clone(req.Header)
	if _, err := c.Do(req, UnsafeRepeat(someAction, "looked")); err != nil {
		t.Fatal(err)
	}
	h := p.seen[0].Header
	if h.Get("Waybill-Request-Id") != "mine" || h.Get("Waybill-Supersedes") != someAction || h.Get("Waybill-Timeout") != "7" {
		t.Errorf("%v", h)
	}
	if !maps.EqualFunc(before, req.Header, slices.Equal) {
		t.Error("the caller's request was changed")
	}

	if _, err := FromEnvironment(func(string) string { return "" }); !errors.Is(err, ErrOption) {
		t.Error(err)
	}
	o, err := FromEnvironment(func(name string) string { return map[string]string{"https_proxy": "http://127.0.0.1:1"}[name] })
	if err != nil || o.Proxy != "http://127.0.0.1:1" || o.Roots != nil {
		t.Errorf("%+v %v", o, err)
	}
	if _, err := FromEnvironment(func(name string) string {
		return map[string]string{"HTTPS_PROXY": "http://127.0.0.1:1", "SSL_CERT_FILE": "/nonexistent"}[name]
	}); !errors.Is(err, ErrOption) {
		t.Error(err)
	}
}

// FuzzErrorOf: whatever an answer looks like, what it is said to mean is what Waybill's
// fields say, and nothing that they do not allow is ever repeated.
func FuzzErrorOf(f *testing.F) {
	for _, code := range []outcome.Code{outcome.CodeRemoteTimeout, outcome.CodeConnectionRefused, outcome.CodeRemoteRejected} {
		facts := outcome.Lookup(code).Facts()[0]
		env := outcome.NewEnvelope(someAction, facts, "", outcome.Evidence{})
		a := env.Answer(outcome.Shape{})
		f.Add(a.Status, outcome.FormatOutcome(facts), someAction, a.Body, "1")
	}
	f.Add(503, "unknown;phase=remote_execution;retry=backoff", "x", []byte("{}"), "Wed, 21 Oct 2026 07:28:00 GMT")
	f.Add(200, "", "", []byte(`{"invocation_id":"act_1","error":{"code":"RATE_LIMITED"}}`), "-1")
	f.Fuzz(func(t *testing.T, status int, field, id string, body []byte, after string) {
		h := http.Header{"Waybill-Invocation": {id}, "Retry-After": {after}}
		if field != "" {
			h["Waybill-Outcome"] = []string{field}
		}
		resp := &http.Response{StatusCode: status, Header: h, Body: io.NopCloser(bytes.NewReader(body))}
		e := ErrorOf(resp)
		want, err := outcome.ParseOutcome(field)
		switch {
		case err != nil || want.Code == outcome.CodeNone:
			if e != nil {
				t.Errorf("%q: %+v", field, e)
			}
			return
		case e == nil || e.Facts() != want && e.Facts().Code != outcome.CodeActionNotFound:
			t.Errorf("%q: %+v", field, e)
			return
		}
		if rest, err := io.ReadAll(resp.Body); err != nil || !bytes.Equal(rest, body) {
			t.Errorf("the body was not put back: %q %v", rest, err)
		}
		if permitted(e.Facts(), false) && e.Facts().Retry != outcome.Backoff {
			t.Errorf("%q may be repeated", field)
		}
		if e.RetryAfter < 0 || e.Error() == "" {
			t.Errorf("%v %q", e.RetryAfter, e.Error())
		}
	})
}
