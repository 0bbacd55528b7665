package e2e

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// dies reads the request to its end and closes without one byte of an answer.
func dies() testkit.Turn { return testkit.Respond(testkit.Close()) }

// casesRepeats: nobody in the stack sends a request a second time on its own (F6),
// and what is answered keeps client libraries from doing it (L7).
func casesRepeats(t *testing.T, b *bed) {
	t.Run("RT-01", func(t *testing.T) {
		contract.Covers(t, "F6", "E3")
		for i, warm := range []bool{true, false} {
			path := fmt.Sprintf("/v1/rt01/charges%d", i)
			b.on(payHost, path, dies())
			if warm {
				b.send(t, http.MethodGet, "https://"+payHost+"/v1/rt01/warm", "")
			}
			resp := b.send(t, http.MethodPost, "https://"+payHost+path, "amount=5")
			s := b.check(t, resp, want{status: 424, facts: lost, host: payHost, path: path, arrivals: 1})
			if ev := s.Envelope.Evidence; ev.ResponseHeadersReceived || ev.ReceivedBytes != nil || ev.ConnectionReused != warm {
				t.Errorf("warm %v: %+v", warm, ev)
			}
			if warm && b.arrivals(payHost, path)[0].Conn != b.arrivals(payHost, "/v1/rt01/warm")[0].Conn {
				t.Error("the warm connection was not used: this run shows nothing")
			}
		}
	})
	t.Run("RT-02", func(t *testing.T) {
		contract.Covers(t, "F6")
		for i, c := range []struct{ field, body string }{
			{"Idempotency-Key", ""}, {"Idempotency-Key", "amount=5"}, {"X-Idempotency-Key", ""}, {"X-Idempotency-Key", "amount=5"},
		} {
			path := fmt.Sprintf("/v1/rt02/charges%d", i)
			b.on(payHost, path, dies())
			b.send(t, http.MethodGet, "https://"+payHost+"/v1/rt02/warm", "")
			resp := b.send(t, http.MethodPost, "https://"+payHost+path, c.body, c.field, "k-"+strconv.Itoa(i))
			s := b.check(t, resp, want{status: 424, facts: lost, host: payHost, path: path, arrivals: 1})
			if !s.Envelope.Evidence.ConnectionReused {
				t.Error("the warm connection was not used: this run shows nothing")
			}
			if got := fields(b.arrivals(payHost, path)[0], c.field); len(got) != 1 {
				t.Errorf("%s arrived as %q", c.field, got)
			}
		}
	})
	t.Run("RT-04", func(t *testing.T) {
		contract.Covers(t, "L7")
		timeout := "remote_execution unknown reconcile REMOTE_TIMEOUT"
		b.on(payHost, "/v1/slow/rt04", testkit.Respond(testkit.Stall()))
		resp := b.send(t, http.MethodPost, "https://"+payHost+"/v1/slow/rt04", "{}")
		b.check(t, resp, want{status: 424, facts: timeout, host: payHost, path: "/v1/slow/rt04", arrivals: 1})
		for _, lib := range libraries {
			// Each end of a request that these libraries take for a reason to repeat it.
			for end, turn := range map[string]testkit.Turn{
				"lost": dies(), "cut": testkit.Respond(testkit.Write("HTTP/1.1 201 Created\r\nContent-Length: 99\r\n\r\nx"), testkit.Close()),
				"502": testkit.Respond(testkit.Reply(502, "bad gateway")), "504": testkit.Respond(testkit.Reply(504, "")), "500": testkit.Respond(testkit.Reply(500, "no")),
				"503": testkit.Respond(testkit.Reply(503, "", "Retry-After", "1")), "409": testkit.Respond(testkit.Reply(409, "{}")), "408": testkit.Respond(testkit.Reply(408, "")),
			} {
				path := "/v1/rt04/" + lib.name + "/" + end
				b.on(payHost, path, turn)
				status := lib.call(t, b, http.MethodPost, "https://"+payHost+path, `{"model":"m"}`)
				if n := len(b.arrivals(payHost, path)); n != 1 {
					t.Errorf("%s repeated a POST after %s: %d arrivals, the last answer was %d (L7)", lib.name, end, n, status)
				}
			}
		}
		// Where nothing left the machine the libraries come again: 3 actions, and no arrival.
		for _, lib := range libraries {
			path := "/v1/rt04/" + lib.name
			if status := lib.call(t, b, http.MethodPost, "https://"+downHost+path, "{}"); status != 502 {
				t.Errorf("%s: %d", lib.name, status)
			}
			if n := len(sentTo(b.all(t), downHost+path)); n != lib.tries {
				t.Errorf("%s came %d times, want %d", lib.name, n, lib.tries)
			}
		}
	})
	t.Run("RT-07", func(t *testing.T) {
		contract.Covers(t, "O3")
		b.on(msgHost, "/api/rt07", dies())
		post := func(more ...string) *testkit.Response {
			return b.send(t, http.MethodPost, "https://"+msgHost+"/api/rt07", "text=hi", more...)
		}
		first := b.check(t, post(), want{status: 424, facts: lost, host: msgHost, path: "/api/rt07", arrivals: 1})
		for i := range 3 {
			// What SDKs change between tries makes no other request of it.
			s := b.check(t, post("X-Stainless-Retry-Count", strconv.Itoa(i), "User-Agent", "ua/"+strconv.Itoa(i), "Traceparent", fmt.Sprintf("00-%032x-%016x-01", i+1, i+1)),
				want{status: 424, facts: duplicate, host: msgHost, path: "/api/rt07", arrivals: 1})
			if s.Envelope.Evidence.EarlierAction != first.ID {
				t.Errorf("names %q, want %s", s.Envelope.Evidence.EarlierAction, first.ID)
			}
		}
		other := b.hear(testkit.Send(t, testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://somebody:else@" + b.addr, Roots: b.rig.roots(), NoKeepAlive: true}),
			http.MethodPost, "https://"+msgHost+"/api/rt07", "text=hi"))
		b.check(t, other, want{status: 424, facts: lost, host: msgHost, path: "/api/rt07", arrivals: 2})
		b.on(msgHost, "/api/rt07", testkit.Respond(testkit.Reply(201, "sent")))
		b.check(t, post("Waybill-Supersedes", first.ID), want{status: 201, facts: success, relayed: true, host: msgHost, path: "/api/rt07", arrivals: 3})
	})
}

// library is the retry rule of a client library, as its documentation has it.
type library struct {
	name  string
	tries int
	again func(resp *testkit.Response) bool
}

// The rules of libraries that agents use. TestSDK runs the real ones.
var libraries = []library{
	// openai and @anthropic-ai/sdk: x-should-retry decides; else 408, 409, 429 and 5xx.
	{"stainless", 3, func(r *testkit.Response) bool {
		if v := r.Header.Get("X-Should-Retry"); v != "" {
			return v == "true"
		}
		return r.Status == 408 || r.Status == 409 || r.Status == 429 || r.Status >= 500
	}},
	// stripe: stripe-should-retry decides; else 409 and 5xx (it sends a key with each POST).
	{"stripe", 3, func(r *testkit.Response) bool {
		if v := r.Header.Get("Stripe-Should-Retry"); v != "" {
			return v == "true"
		}
		return r.Status == 409 || r.Status >= 500
	}},
}

// call sends a request as the library would, and returns the last status.
func (l *library) call(t *testing.T, b *bed, method, target, body string, more ...string) int {
	t.Helper()
	for n := 1; ; n++ {
		resp := b.send(t, method, target, body, more...)
		if n == l.tries || !l.again(resp) {
			return resp.Status
		}
	}
}

// supervised is a listener in front of a process that is started again and again:
// connections wait until there is one, and end with it, as under a supervisor that
// holds the socket.
type supervised struct {
	ln net.Listener
	mu sync.Mutex
	up *sync.Cond
	to string
}

func supervise(t *testing.T) *supervised {
	t.Helper()
	ln, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // ends with the test
	if err != nil {
		t.Fatal(err)
	}
	s := &supervised{ln: ln}
	s.up = sync.NewCond(&s.mu)
	var wg sync.WaitGroup
	t.Cleanup(func() { s.set("closed"); _ = ln.Close(); wg.Wait() })
	wg.Go(func() {
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			wg.Go(func() { s.carry(c) })
		}
	})
	return s
}

// set says where the process listens; "" while there is none.
func (s *supervised) set(addr string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.to = addr
	s.up.Broadcast()
}

func (s *supervised) carry(c net.Conn) {
	defer func() { _ = c.Close() }()
	s.mu.Lock()
	for s.to == "" {
		s.up.Wait()
	}
	to := s.to
	s.mu.Unlock()
	up, err := net.DialTimeout("tcp", to, 5*time.Second)
	if err != nil {
		return
	}
	defer func() { _ = up.Close() }()
	go func() { _, _ = io.Copy(up, c); _ = up.(*net.TCPConn).CloseWrite() }()
	_, _ = io.Copy(c, up)
}

// TestCaseRT05: curl sends two POSTs over one connection and the proxy is killed while
// the second is in flight. curl repeats it by itself, to the restarted proxy, which
// knows that the first one may have had its effect.
func TestCaseRT05(t *testing.T) {
	t.Run("RT-05", func(t *testing.T) {
		contract.Covers(t, "M2", "M4", "O3", "T2")
		curl := testkit.RequireTool(t, "curl")
		ca := testkit.NewCA(t)
		b := newBed(t, ca, rigOptions{})
		b.begin()
		hold := testkit.NewGate(t)
		b.on(payHost, "/v1/b", testkit.Respond(testkit.Hold(hold), testkit.Close()))
		front := supervise(t)
		front.set(b.addr)
		done := make(chan struct{})
		var code int
		var out, errs string
		go func() {
			defer close(done)
			code, out, errs = testkit.Run(t, testkit.Command{Path: curl, Args: []string{"-sS", "-i", "--http1.1", "-m", "60", "-x", "http://" + front.ln.Addr().String(),
				"--cacert", b.roots, "-d", "x=1", "https://" + payHost + "/v1/a", "https://" + payHost + "/v1/b"}})
		}()
		hold.Await(t)
		front.set("")
		b.kill()
		b.begin()
		front.set(b.addr)
		<-done
		if code != 0 || strings.Count(out, "HTTP/1.1 424") != 1 || !strings.Contains(out, "DUPLICATE_SUSPECTED") {
			t.Errorf("curl: %d %s %s", code, out, errs)
		}
		all := sentTo(b.settle(t), "/v1/b")
		if len(all) != 2 {
			t.Fatalf("%d actions for /v1/b: curl did not repeat it, or it was repeated more than once: %+v", len(all), all)
		}
		// Newest first.
		repeat, first := b.tell(t, all[0].InvocationID), b.tell(t, all[1].InvocationID)
		if text(first.Envelope.Facts()) != lost || !first.Envelope.Evidence.Recovered {
			t.Errorf("the first: %s %+v", text(first.Envelope.Facts()), first.Envelope.Evidence)
		}
		if text(repeat.Envelope.Facts()) != duplicate || repeat.Envelope.Evidence.EarlierAction != first.ID || repeat.count(dispatch.DispatchStarted) != 0 {
			t.Errorf("the repeat: %s %+v", text(repeat.Envelope.Facts()), repeat.Envelope.Evidence)
		}
		if n := len(b.arrivals(payHost, "/v1/b")); n != 1 {
			t.Errorf("%d arrivals", n)
		}
		b.verify()
	})
}
