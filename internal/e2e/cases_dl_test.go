package e2e

import (
	"context"
	"crypto/sha256"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// casesDelivery: a result that did not reach its caller is fetched, not made again
// (H2, H3, F5).
func casesDelivery(t *testing.T, b *bed) {
	t.Run("DL-01", func(t *testing.T) {
		contract.Covers(t, "F5", "H2", "H3")
		// once reports whether the news that the caller left was faster than the answer.
		once := func(path string, h2 bool) bool {
			late := testkit.NewGate(t)
			b.on(payHost, path, testkit.Respond(testkit.Hold(late), testkit.Reply(201, `{"id":"ch"}`, "Location", "/v1/charges/ch")))
			ctx, cancel := context.WithCancel(t.Context())
			go func() {
				late.Await(t)
				cancel() // the caller's patience is over while the origin works
			}()
			resp, err := testkit.SendContext(ctx, t, b.client(t, h2), http.MethodPost, "https://"+payHost+path, "x=1", "Idempotency-Key", "k9")
			// What Waybill says to one who leaves may still meet it at the door.
			if err == nil && (resp.Status != 424 || ctx.Err() == nil) {
				t.Fatalf("answered %d", resp.Status)
			}
			// The attempt goes on under the route's own limit, and its result is stored.
			late.Open()
			var id string
			reached := false
			testkit.Eventually(t, func() error {
				all := sentTo(b.all(t), path)
				if len(all) != 1 {
					return fmt.Errorf("%d actions", len(all))
				}
				id = all[0].InvocationID
				switch got := text(b.tell(t, id).Envelope.Facts()); {
				case got == success:
					// The answer can be on its way before the news of the caller's leaving is read.
					reached = true
				case got != "result_delivery committed fetch_result DELIVERY_FAILED":
					return fmt.Errorf("%s", got)
				}
				return nil
			})
			if reached {
				return false
			}
			s := b.tell(t, id)
			// That the caller left is on record too, unless the answer was faster than the news.
			if gone := s.count(dispatch.CallerGone); s.count(dispatch.DeliveryFailed) != 1 || gone > 1 || (gone == 1) != (s.Envelope.Evidence.LocalCause == "CALLER_CANCELLED") {
				t.Errorf("%d CALLER_GONE, %+v", gone, s.Envelope.Evidence)
			}
			for range 2 {
				got := b.hear(b.api(t, "/v1/actions/"+id+"/result"))
				if got.Status != 201 || string(got.Body) != `{"id":"ch"}` || got.Header.Get("Location") != "/v1/charges/ch" || got.Header.Get("Waybill-Invocation") != id {
					t.Errorf("the result: %d %v %q", got.Status, got.Header, got.Body)
				}
			}
			b.crossings(t, s, want{facts: "result_delivery", host: payHost, path: path, arrivals: 1})
			// Whoever has it says so, once or twice (H6); the attempt was made once.
			for range 2 {
				if code, out, errs := b.cli("ack", id, "--json"); code != 0 || !strings.Contains(out, `"delivered": true`) {
					t.Errorf("waybill ack: %d %s %s", code, out, errs)
				}
			}
			if got := text(b.tell(t, id).Envelope.Facts()); got != success {
				t.Errorf("acknowledged: %s", got)
			}
			return true
		}
		for i, h2 := range []bool{false, true} {
			for try := 0; !once(fmt.Sprintf("/v1/dl01/%d-%d", i, try), h2); try++ {
				if try == 10 {
					t.Fatal("the answer was faster every time")
				}
			}
		}
	})
}

// gzipped is a body whose compressed bytes are passed on as they are.
const gzipped = "\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03\xcb\xcf\x06\x00\x47\xdd\xdc\x79\x02\x00\x00\x00"

// TestCaseDL03: a stored result is the same at every read, for its owner only, across
// a restart and until it expires.
func TestCaseDL03(t *testing.T) {
	t.Run("DL-03", func(t *testing.T) {
		contract.Covers(t, "H3", "V4", "M7")
		ca := testkit.NewCA(t)
		brief := "  - name: brief\n    match: {host: brief.example.test}\n    limits: {retention: 1s}\n    upstream: {roots: roots.pem, resolve: {brief.example.test: \"%s\"}}\n"
		up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server("brief.example.test")})
		b := newBed(t, ca, rigOptions{routes: fmt.Sprintf(brief, up.Addr())})
		b.begin()
		path := "/v1/dl03"
		b.on(payHost, path, testkit.Respond(testkit.WriteLast("HTTP/1.1 201 Created\r\nLocation: /v1/charges/7\r\nSet-Cookie: a=b\r\nSet-Cookie: c=d\r\nContent-Encoding: gzip\r\nX-Two: 1\r\nX-Two: 2\r\nConnection: X-Hop\r\nX-Hop: 1\r\nTransfer-Encoding: chunked\r\n\r\n"+
			chunk(gzipped[:7])+chunk(gzipped[7:])+"0\r\nX-Sum: 9\r\n\r\n")))
		owner := func() *http.Client {
			return testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://owner:pass@" + b.addr, Roots: b.rig.roots(), NoKeepAlive: true})
		}
		resp := b.hear(testkit.Send(t, owner(), http.MethodPost, "https://"+payHost+path, "x=1"))
		s := b.check(t, resp, want{status: 201, facts: success, relayed: true, host: payHost, path: path, arrivals: 1})
		fetch := func(c *http.Client, id string) *testkit.Response {
			return b.hear(testkit.Send(t, c, http.MethodGet, "http://waybill.internal/v1/actions/"+id+"/result", ""))
		}
		same := func(when string) {
			t.Helper()
			got := fetch(owner(), s.ID)
			if got.Status != 201 || string(got.Body) != gzipped || sha256.Sum256(got.Body) != sha256.Sum256(resp.Body) {
				t.Errorf("%s: %d %q", when, got.Status, got.Body)
			}
			for _, name := range []string{"Location", "Set-Cookie", "Content-Encoding", "X-Two"} {
				if fmt.Sprint(got.Header[name]) != fmt.Sprint(resp.Header[name]) || len(got.Header[name]) == 0 {
					t.Errorf("%s: %s is %q, was %q", when, name, got.Header[name], resp.Header[name])
				}
			}
			if got.Header.Get("X-Hop") != "" || got.Header.Get("Waybill-Invocation") != s.ID || got.Header.Get("Waybill-Outcome") != resp.Header.Get("Waybill-Outcome") {
				t.Errorf("%s: %v", when, got.Header)
			}
		}
		same("at once")
		same("again")
		// Another caller is told what it would be told of an id that does not exist.
		other := testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://other:pass@" + b.addr, NoKeepAlive: true})
		theirs, nobody := fetch(other, s.ID), fetch(other, "act_01ARZ3NDEKTSV4RRFFQ69G5FAV")
		if theirs.Status != 404 || !strings.Contains(string(theirs.Body), "ACTION_NOT_FOUND") || string(theirs.Body) != string(nobody.Body) || fmt.Sprint(theirs.Header["Waybill-Outcome"]) != fmt.Sprint(nobody.Header["Waybill-Outcome"]) {
			t.Errorf("another caller: %d %q, nobody's: %d %q", theirs.Status, theirs.Body, nobody.Status, nobody.Body)
		}
		expiring := b.hear(testkit.Send(t, owner(), http.MethodPost, "https://brief.example.test/v1/x", "x=1")).Header.Get("Waybill-Invocation")
		if got := fetch(owner(), expiring); got.Status != 200 {
			t.Errorf("before it expires: %d", got.Status)
		}
		time.Sleep(1100 * time.Millisecond) // retention is a time; nobody announces its end
		b.p.Signal(t, term)
		b.p.Wait(t, patience)
		b.begin()
		same("after a restart")
		testkit.Eventually(t, func() error {
			got := fetch(owner(), expiring)
			if got.Status == 200 {
				return fmt.Errorf("still there")
			}
			if got.Status != 410 || !strings.Contains(string(got.Body), "RESULT_EXPIRED") || !strings.HasPrefix(got.Header.Get("Waybill-Outcome"), "committed;phase=result_delivery;retry=never") {
				t.Errorf("expired: %d %v %q", got.Status, got.Header, got.Body)
			}
			return nil
		})
		if n := len(b.arrivals(payHost, path)) + up.Count("", ""); n != 2 {
			t.Errorf("%d arrivals", n)
		}
		b.verify()
	})
}
