package client_test

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"waybill/client"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

func post(t testing.TB, ctx context.Context, url, body string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	return req
}

func text(t testing.TB, resp *client.Response) string {
	t.Helper()
	defer func() { _ = resp.Body.Close() }()
	raw, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

func failed(t testing.TB, err error) *client.Error {
	t.Helper()
	var e *client.Error
	if !errors.As(err, &e) {
		t.Fatalf("no *client.Error: %v", err)
	}
	return e
}

// forms are the two ways to the proxy.
var forms = map[string]func(*client.Options){
	"tunnel":        nil,
	"absolute-form": func(o *client.Options) { o.AbsoluteForm, o.Roots = true, nil },
}

// TestAnswers: what the origin answered comes back whole, with Waybill's facts, and
// what Waybill answered is an error with the whole envelope – by either way to the proxy.
func TestAnswers(t *testing.T) {
	contract.Covers(t, "O5", "L6")
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(a testkit.Arrival) []testkit.Step {
		switch a.Target {
		case "/missing":
			return []testkit.Step{testkit.Reply(404, "no such thing")}
		case "/broken":
			return []testkit.Step{testkit.Reply(500, "oops")}
		case "/silent":
			return []testkit.Step{testkit.Close()}
		}
		return []testkit.Step{testkit.Reply(201, "made "+a.Target, "X-Origin", "yes")}
	}})
	r := newRig(t, ca, map[string]string{payHost: up.Addr()})
	for name, change := range forms {
		t.Run(name, func(t *testing.T) {
			c := r.client(change)
			ctx := t.Context()
			resp, err := c.Do(post(t, ctx, "https://"+payHost+"/v1/x?a=b%20c", "one "+name))
			if err != nil {
				t.Fatal(err)
			}
			if got := text(t, resp); resp.StatusCode != 201 || got != "made /v1/x?a=b%20c" || resp.Header.Get("X-Origin") != "yes" {
				t.Errorf("%d %q", resp.StatusCode, got)
			}
			if !resp.Facts.IsSuccess() || resp.InvocationID == "" || resp.RequestID == "" || resp.Submissions != 1 || resp.Err() != nil {
				t.Errorf("%+v %v", resp.Facts, resp.Err())
			}
			for path, code := range map[string]outcome.Code{"/missing": outcome.CodeRemoteRejected, "/broken": outcome.CodeRemoteError} {
				resp, err := c.Do(post(t, ctx, "https://"+payHost+path, name))
				if err != nil {
					t.Fatal(err)
				}
				_ = text(t, resp)
				if e := failed(t, resp.Err()); e.Facts() != resp.Facts || e.Facts().Code != code || e.Source != client.FromFields || e.Envelope.InvocationID != resp.InvocationID {
					t.Errorf("%s: %+v", path, e)
				}
			}

			// Waybill's own answers.
			_, err = c.Do(post(t, ctx, "https://"+payHost+"/silent", name))
			e := failed(t, err)
			want := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteOutcomeUnknown}
			if e.Facts() != want || e.Source != client.FromBody || e.Status != 424 || !e.Envelope.Evidence.DispatchStarted || e.Envelope.Evidence.Fingerprint == "" {
				t.Errorf("%+v", e)
			}
			a, err := c.Find(ctx, e.RequestID)
			if err != nil || a.InvocationID != e.Envelope.InvocationID || a.Facts() != want {
				t.Errorf("%+v %v", a, err)
			}
			if got, want := asJSON(t, a.Envelope), asJSON(t, &e.Envelope); got != want {
				t.Errorf("on record\n%s\nin the error\n%s", got, want)
			}

			_, err = c.Do(post(t, ctx, "https://elsewhere.example.test/", name))
			if e := failed(t, err); e.Facts().Code != outcome.CodeRouteNotFound || e.Source != client.FromBody {
				t.Errorf("%+v", e)
			}
			if !strings.HasPrefix(err.Error(), "waybill: ROUTE_NOT_FOUND: Not sent: ") {
				t.Error(err)
			}

			// Through an http.Client, as vendors' libraries do it.
			_, err = c.HTTPClient().Do(post(t, ctx, "https://"+payHost+"/silent", "again "+name))
			if e := failed(t, err); e.Facts() != want {
				t.Errorf("%+v", e)
			}
			head, err := http.NewRequestWithContext(ctx, http.MethodHead, "https://elsewhere.example.test/", nil)
			if err != nil {
				t.Fatal(err)
			}
			_, err = c.Do(head)
			if e := failed(t, err); e.Facts().Code != outcome.CodeRouteNotFound || e.Source != client.FromFields {
				t.Errorf("HEAD: %+v", e)
			}
		})
	}
	for _, a := range up.Arrivals() {
		if len(a.Values("Waybill-Request-Id")) > 0 {
			t.Error("a Waybill field reached the origin")
		}
	}
}

func asJSON(t testing.TB, v any) string {
	t.Helper()
	raw, err := json.MarshalIndent(v, "", " ")
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}

// TestUnsafeRepeat: an equal request after an unknown outcome is refused, and sent only
// by code that says so (CONTRACT O3).
func TestUnsafeRepeat(t *testing.T) {
	contract.Covers(t, "O3", "O5")
	ca := testkit.NewCA(t)
	var silent atomic.Bool
	silent.Store(true)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(testkit.Arrival) []testkit.Step {
		if silent.Load() {
			return []testkit.Step{testkit.Close()}
		}
		return []testkit.Step{testkit.Reply(201, "made")}
	}})
	r := newRig(t, ca, map[string]string{payHost: up.Addr()})
	c := r.client(nil)
	send := func(opts ...client.CallOption) (*client.Response, error) {
		return c.Do(post(t, t.Context(), "https://"+payHost+"/v1/charge", "amount=5"), opts...)
	}
	_, err := send()
	first := failed(t, err)
	if first.Facts().Retry != outcome.Reconcile {
		t.Fatalf("%+v", first)
	}
	silent.Store(false)
	_, err = send()
	if e := failed(t, err); e.Facts().Code != outcome.CodeDuplicateSuspected || e.Envelope.Evidence.EarlierAction != first.Envelope.InvocationID {
		t.Fatalf("%+v", e)
	}
	up.RequireCount(t, 1, "POST", "")
	// By hand it is not to be had.
	req := post(t, t.Context(), "https://"+payHost+"/v1/charge", "amount=5")
	req.Header.Set("Waybill-Supersedes", first.Envelope.InvocationID)
	if _, err := c.Do(req); !errors.Is(err, client.ErrSupersedes) {
		t.Error(err)
	}
	if _, err := send(client.UnsafeRepeat(first.Envelope.InvocationID, " ")); !errors.Is(err, client.ErrOption) {
		t.Error(err)
	}
	if _, err := send(client.UnsafeRepeat("act_x", "because")); !errors.Is(err, client.ErrOption) {
		t.Error(err)
	}
	up.RequireCount(t, 1, "POST", "")
	resp, err := send(client.UnsafeRepeat(first.Envelope.InvocationID, "looked in the dashboard: there is no such charge"))
	if err != nil {
		t.Fatal(err)
	}
	_ = text(t, resp)
	up.RequireCount(t, 2, "POST", "")
}

// TestLostConnection: the connection to the proxy breaks, or the proxy dies, after the
// request was handed over. Nothing is sent again; the action is asked for.
func TestLostConnection(t *testing.T) {
	contract.Covers(t, "O5", "H2", "H3")
	ca := testkit.NewCA(t)
	gate := testkit.NewGate(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(a testkit.Arrival) []testkit.Step {
		if strings.HasPrefix(a.Target, "/held") {
			return []testkit.Step{testkit.Hold(gate), testkit.Reply(201, "made "+a.Target)}
		}
		return []testkit.Step{testkit.Reply(201, strings.Repeat("long ", 4000))}
	}})
	r := newRig(t, ca, map[string]string{payHost: up.Addr()})
	w := newWire(t, r.addr)
	through := func(change func(*client.Options)) *client.Client {
		return r.client(func(o *client.Options) {
			o.Proxy, o.AbsoluteForm = "http://"+w.addr(), true
			if change != nil {
				change(o)
			}
		})
	}
	type result struct {
		resp *client.Response
		err  error
	}
	async := func(c *client.Client, path string) chan result {
		ch := make(chan result, 1)
		go func() {
			resp, err := c.Do(post(t, t.Context(), "https://"+payHost+path, path))
			ch <- result{resp, err}
		}()
		return ch
	}

	t.Run("cut while it runs", func(t *testing.T) {
		plain, fetching := async(through(nil), "/held/plain"), async(through(func(o *client.Options) { o.FetchLost = true }), "/held/fetch")
		up.Wait(t, 2)
		w.cut()
		gate.Open()
		got := <-plain
		e := failed(t, got.err)
		want := outcome.Facts{Phase: outcome.ResultDelivery, Outcome: outcome.Committed, Retry: outcome.FetchResult, Code: outcome.CodeDeliveryFailed}
		if e.Facts() != want || e.Source != client.FromRecord || !errors.Is(e, client.ErrLost) || e.RequestID == "" {
			t.Fatalf("%+v", e)
		}
		res, err := through(nil).Result(t.Context(), e.Envelope.InvocationID)
		if err != nil {
			t.Fatal(err)
		}
		if got := text(t, res); got != "made /held/plain" || res.StatusCode != 201 {
			t.Errorf("%d %q", res.StatusCode, got)
		}
		got = <-fetching
		if got.err != nil {
			t.Fatal(got.err)
		}
		if body := text(t, got.resp); body != "made /held/fetch" || !got.resp.Fetched || got.resp.Facts.Outcome != outcome.Committed {
			t.Errorf("%q %+v", body, got.resp)
		}
		up.RequireCount(t, 2, "POST", "")
	})

	t.Run("cut in the body", func(t *testing.T) {
		w.cutDown.Store(3000)
		resp, err := through(nil).Do(post(t, t.Context(), "https://"+payHost+"/long", "long"))
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.ReadAll(resp.Body)
		e := failed(t, err)
		if e.Facts().Retry != outcome.FetchResult || e.Facts().Outcome != outcome.Committed || e.Envelope.InvocationID != resp.InvocationID {
			t.Fatalf("%+v", e)
		}
		up.RequireCount(t, 1, "POST", "/long")

		// Fetching goes on where it was cut, as often as it is.
		before := w.cuts.Load()
		w.cutDown.Store(9000)
		res, err := through(nil).Result(t.Context(), resp.InvocationID)
		if err != nil {
			t.Fatal(err)
		}
		first := make([]byte, 6000)
		if _, err := io.ReadFull(res.Body, first); err != nil {
			t.Fatal(err)
		}
		w.cutDown.Store(9)
		if got := string(first) + text(t, res); got != strings.Repeat("long ", 4000) {
			t.Errorf("%d bytes", len(got))
		}
		if n := w.cuts.Load() - before; n != 2 {
			t.Errorf("%d cuts, want 2", n)
		}
		if err := through(nil).Ack(t.Context(), resp.InvocationID); err != nil {
			t.Fatal(err)
		}
		if a, err := through(nil).Action(t.Context(), resp.InvocationID); err != nil || !a.Delivered {
			t.Errorf("%+v %v", a, err)
		}
		up.RequireCount(t, 1, "POST", "/long")
	})

	t.Run("cut before it is whole", func(t *testing.T) {
		w.cutUp.Store(60)
		_, err := through(nil).Do(post(t, t.Context(), "https://"+payHost+"/never", "never"))
		e := failed(t, err)
		if f := e.Facts(); f.Outcome != outcome.Unknown || f.Retry != outcome.Reconcile || !errors.Is(e, client.ErrLost) || e.RequestID == "" {
			t.Fatalf("%+v", e)
		}
		up.RequireCount(t, 0, "POST", "/never")
	})
}

// TestProxyDies: SIGKILL while the action runs; the client waits for the next start.
func TestProxyDies(t *testing.T) {
	contract.Covers(t, "O5", "M4")
	ca := testkit.NewCA(t)
	gate := testkit.NewGate(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Hold(gate), testkit.Reply(201, "made")}
	}})
	r := newRig(t, ca, map[string]string{payHost: up.Addr()})
	c := r.client(nil)
	ch := make(chan error, 1)
	go func() {
		_, err := c.Do(post(t, t.Context(), "https://"+payHost+"/v1/x", "x"))
		ch <- err
	}()
	up.Wait(t, 1)
	r.kill()
	r.start()
	e := failed(t, <-ch)
	if f := e.Facts(); f.Outcome != outcome.Unknown || f.Retry != outcome.Reconcile || e.Source != client.FromRecord || !e.Envelope.Evidence.Recovered {
		t.Fatalf("%+v", e)
	}
	up.RequireCount(t, 1, "", "")

	// Without a proxy nothing leaves, and the error says so.
	r.kill()
	_, err := r.client(func(o *client.Options) { o.Repeats = -1 }).Do(post(t, t.Context(), "https://"+payHost+"/v1/y", "y"))
	if e := failed(t, err); !errors.Is(e, client.ErrNotSent) || e.Facts().Outcome != outcome.NotAttempted {
		t.Fatalf("%+v", e)
	}
}

// TestCallerLeaves: a caller that leaves does not undo what was dispatched.
func TestCallerLeaves(t *testing.T) {
	contract.Covers(t, "F5", "O5")
	ca := testkit.NewCA(t)
	gate, late := testkit.NewGate(t), testkit.NewGate(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(a testkit.Arrival) []testkit.Step {
		if a.Target == "/late" {
			return []testkit.Step{testkit.Hold(late), testkit.Reply(201, "made")}
		}
		return []testkit.Step{testkit.Hold(gate), testkit.Reply(201, "made")}
	}})
	r := newRig(t, ca, map[string]string{payHost: up.Addr()})
	c := r.client(nil)
	ctx, cancel := context.WithCancel(t.Context())
	ch := make(chan error, 1)
	go func() {
		_, err := c.Do(post(t, ctx, "https://"+payHost+"/v1/x", "x"), client.RequestID("leaving-1"))
		ch <- err
	}()
	up.Wait(t, 1)
	cancel()
	e := failed(t, <-ch)
	if !errors.Is(e, context.Canceled) || e.Facts().Code != outcome.CodeCallerCancelled || e.Facts().Outcome != outcome.Unknown || e.RequestID != "leaving-1" {
		t.Fatalf("%+v", e)
	}
	a, err := c.Find(t.Context(), "leaving-1")
	if err != nil || a.Ended {
		t.Fatalf("%+v %v", a, err)
	}
	if _, err := c.Result(t.Context(), a.InvocationID); failed(t, err).Facts().Code != outcome.CodeResultPending {
		t.Error(err)
	}
	gate.Open()
	a, err = c.Wait(t.Context(), a.InvocationID)
	if err != nil || a.Outcome != outcome.Committed {
		t.Fatalf("%+v %v", a, err)
	}
	res, err := c.Result(t.Context(), a.InvocationID)
	if err != nil {
		t.Fatal(err)
	}
	if got := text(t, res); got != "made" {
		t.Error(got)
	}

	// A deadline is told to the proxy, which answers in time and with the action's id.
	short, cancelShort := context.WithTimeout(t.Context(), 1900*time.Millisecond)
	defer cancelShort()
	_, err = c.Do(post(t, short, "https://"+payHost+"/late", "z"))
	e = failed(t, err)
	if e.Facts().Code != outcome.CodeRemoteTimeout || e.Source != client.FromBody || e.Envelope.InvocationID == "" || short.Err() != nil {
		t.Errorf("%+v", e)
	}
	if a, err := c.Find(t.Context(), e.RequestID); err != nil || a.InvocationID != e.Envelope.InvocationID || a.Ended {
		t.Errorf("%+v %v", a, err)
	}
}

// TestCallerAPIRefusals: what the proxy does not know is no permission (CONTRACT M7).
func TestCallerAPIRefusals(t *testing.T) {
	contract.Covers(t, "M7", "O5")
	r := newRig(t, testkit.NewCA(t), nil)
	c := r.client(func(o *client.Options) { o.Repeats = 1 })
	if _, err := c.Action(t.Context(), "act_01JD0000000000000000000000"); !errors.Is(err, client.ErrNotFound) {
		t.Error(err)
	}
	if _, err := c.Find(t.Context(), "nobody"); !errors.Is(err, client.ErrNotFound) {
		t.Error(err)
	}
	_, err := c.Do(post(t, t.Context(), "https://"+deadHost+"/", ""))
	e := failed(t, err)
	if e.Facts().Code != outcome.CodeConnectionRefused || len(e.Earlier) != 1 || !strings.HasSuffix(e.RequestID, "-2") {
		t.Errorf("%+v", e)
	}
	n := 0
	for a, err := range c.Actions(t.Context(), client.Filter{Code: outcome.CodeConnectionRefused}) {
		if err != nil {
			t.Fatal(err)
		}
		if a.DispatchStarted || a.Outcome != outcome.NotAttempted {
			t.Errorf("%+v", a)
		}
		n++
	}
	if n != 2 {
		t.Errorf("%d actions", n)
	}
	if _, err := c.Result(t.Context(), e.Envelope.InvocationID); failed(t, err).Facts().Code != outcome.CodeConnectionRefused {
		t.Error(err)
	}
	if err := c.Ack(t.Context(), e.Envelope.InvocationID); err == nil {
		t.Error("acknowledged a result that does not exist")
	}
}

// TestRefusedConnect: the answer to a refused CONNECT, of which net/http shows the
// reason phrase only, is the same envelope (CONTRACT L6).
func TestRefusedConnect(t *testing.T) {
	contract.Covers(t, "L6", "O5", "V4")
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost)})
	const token = "client-test-token"
	r := newRigWith(t, ca, map[string]string{payHost: up.Addr()}, fmt.Sprintf("callers: [{name: ci, token_sha256: %x}]\n", sha256.Sum256([]byte(token))))
	for name, change := range forms {
		_, err := r.client(change).Do(post(t, t.Context(), "https://"+payHost+"/", "x"))
		e := failed(t, err)
		if f, _ := outcome.Of(outcome.CodeCallerUnauthenticated); e.Facts() != f || e.Source != client.FromBody || e.Status != 407 || e.Envelope.Evidence.Reason != "unauthenticated" {
			t.Errorf("%s: %+v", name, e)
		}
		if errors.Is(err, client.ErrNotSent) != (name == "tunnel") {
			t.Errorf("%s: %v", name, err)
		}
		if _, err := r.client(change).Find(t.Context(), "x"); failed(t, err).Facts().Code != outcome.CodeCallerUnauthenticated {
			t.Error(err)
		}
		if strings.Contains(err.Error(), token) {
			t.Error("the token is in the error")
		}
		known := r.client(func(o *client.Options) {
			if change != nil {
				change(o)
			}
			o.Proxy = "http://ci:" + token + "@" + r.addr
		})
		resp, err := known.Do(post(t, t.Context(), "https://"+payHost+"/", name))
		if err != nil {
			t.Fatal(err)
		}
		_ = text(t, resp)
		if a, err := known.Find(t.Context(), resp.RequestID); err != nil || a.InvocationID != resp.InvocationID {
			t.Errorf("%+v %v", a, err)
		}
	}
	up.RequireCount(t, len(forms), "", "")
	// A library that hides transport errors gets the refusal as an answer.
	c := r.client(func(o *client.Options) { o.AnswerFailures = true })
	resp, err := c.HTTPClient().Do(post(t, t.Context(), "https://"+payHost+"/", "x"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	if e := client.ErrorOf(resp); resp.StatusCode != 407 || e == nil || e.Facts().Code != outcome.CodeCallerUnauthenticated {
		t.Errorf("%d %+v", resp.StatusCode, e)
	}
}

// TestUntrustedProxy: without Waybill's CA nothing is sent, and the error says what to do.
func TestUntrustedProxy(t *testing.T) {
	contract.Covers(t, "O5")
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost)})
	r := newRig(t, ca, map[string]string{payHost: up.Addr()})
	c := r.client(func(o *client.Options) { o.Roots = ca.Pool() })
	_, err := c.Do(post(t, t.Context(), "https://"+payHost+"/", "x"))
	e := failed(t, err)
	if !errors.Is(e, client.ErrNotSent) || e.Facts().Retry != outcome.AfterCorrection || e.Facts().Outcome != outcome.NotAttempted || len(e.Earlier) != 0 {
		t.Errorf("%+v", e)
	}
	up.RequireCount(t, 0, "", "")
}

// TestResumeSkips: a large result goes on from the chunk it had reached; what was read
// is not sent again (CONTRACT H4).
func TestResumeSkips(t *testing.T) {
	contract.Covers(t, "H4", "O5")
	ca := testkit.NewCA(t)
	const size = 6 << 20
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Write(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", size)), testkit.Big(size - 4), testkit.WriteLast("end\n")}
	}})
	r := newRig(t, ca, map[string]string{payHost: up.Addr()})
	w := newWire(t, r.addr)
	c := r.client(func(o *client.Options) { o.Proxy, o.AbsoluteForm = "http://"+w.addr(), true })
	resp, err := c.Do(post(t, t.Context(), "https://"+payHost+"/big", "x"))
	if err != nil {
		t.Fatal(err)
	}
	if got := text(t, resp); len(got) != size || !resp.Final().IsSuccess() {
		t.Fatalf("%d bytes, %+v", len(got), resp.Final())
	}
	w.cutDown.Store(size - 4096)
	before := w.carried.Load()
	res, err := c.Result(t.Context(), resp.InvocationID)
	if err != nil {
		t.Fatal(err)
	}
	got := text(t, res)
	if len(got) != size || got[:size-4] != strings.Repeat("a", size-4) || got[size-4:] != "end\n" || w.cuts.Load() != 1 {
		t.Errorf("%d bytes, %d cuts", len(got), w.cuts.Load())
	}
	// Twice the size would be no resume; what is on its way when the connection is cut counts too.
	if n := w.carried.Load() - before; n > size+size/4*3 {
		t.Errorf("%d bytes were carried for a result of %d", n, size)
	}
	up.RequireCount(t, 1, "", "")
}

// TestStreams: the outcome of a streamed answer follows it; one that breaks off is an
// error with what is on record (CONTRACT H5, H9).
func TestStreams(t *testing.T) {
	contract.Covers(t, "H9", "O5")
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(a testkit.Arrival) []testkit.Step {
		head := testkit.Write("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
		if a.Target == "/broken" {
			return []testkit.Step{head, testkit.Close()}
		}
		return []testkit.Step{head, testkit.WriteLast("9\r\ndata: 2\n\n\r\n0\r\n\r\n")}
	}})
	r := newRig(t, ca, map[string]string{payHost: up.Addr()})
	for name, change := range forms {
		c := r.client(change)
		resp, err := c.Do(post(t, t.Context(), "https://"+payHost+"/events", name))
		if err != nil {
			t.Fatal(err)
		}
		if resp.Facts.Outcome != outcome.Unknown || resp.Err() != nil {
			t.Errorf("%s: the head says %+v", name, resp.Facts)
		}
		if got := text(t, resp); got != "data: 1\n\ndata: 2\n\n" || !resp.Final().IsSuccess() {
			t.Errorf("%s: %q %+v", name, got, resp.Final())
		}
		resp, err = c.Do(post(t, t.Context(), "https://"+payHost+"/broken", name))
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.ReadAll(resp.Body)
		want := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteResultIncomplete}
		if e := failed(t, err); e.Facts() != want || e.Source != client.FromRecord || e.Envelope.InvocationID != resp.InvocationID {
			t.Errorf("%s: %+v", name, e)
		}
	}
	for _, a := range up.Arrivals() {
		if len(a.Values("Waybill-Request-Id")) > 0 {
			t.Error("a Waybill field reached the origin")
		}
	}
}
