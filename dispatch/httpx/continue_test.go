package httpx

import (
	"net/http"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// TestExpectation: an origin is asked before the body is sent where the caller asked
// (case UP-02), gets none of it if it refuses from the head, and the marker says so (F3).
func TestExpectation(t *testing.T) {
	contract.Covers(t, "F3")
	const body = "0123456789"
	for _, c := range []struct {
		name   string
		turn   testkit.Turn
		status int
		sent   bool
	}{
		{"refused", testkit.Early(testkit.Write("HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n"), testkit.HalfClose()), 401, false},
		{"refused and closed", testkit.Early(testkit.Write("HTTP/1.1 401 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"), testkit.HalfClose()), 401, false},
		{"continued", testkit.Early(testkit.Write("HTTP/1.1 100 Continue\r\n\r\n"), testkit.ReadBody(), testkit.Reply(200, "ok")), 200, true},
		{"silent", testkit.Early(testkit.ReadBody(), testkit.Reply(200, "ok")), 200, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			r := newRig(t)
			up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: r.ca.Server(host), Script: []testkit.Turn{c.turn}})
			out := outgoing(http.MethodPut, "/x", body)
			out.Header.Set("Expect", "100-continue")
			end, _, _ := r.send(order("https", up.Addr()), out)
			if end.Status != c.status || !end.Complete || end.Sent.Complete != c.sent || !end.Sent.Headers {
				t.Errorf("%+v", end)
			}
			a := up.WaitFor(t, "the request", func(all []testkit.Arrival) bool { return len(all) == 1 && (all[0].Complete || !c.sent) })[0]
			if n := up.Conns()[0].AppBytes - int64(len(a.RawHead)); (n != 0) != c.sent || a.Header.Get("Expect") != "100-continue" {
				t.Errorf("%d bytes of the body arrived, Expect %q", n, a.Header.Get("Expect"))
			}
		})
	}
	t.Run("h2", func(t *testing.T) {
		r := newRig(t)
		up := testkit.NewH2Upstream(t, testkit.H2UpstreamConfig{TLS: r.ca.Server(host), Early: true, Script: [][]testkit.H2Step{{testkit.H2Reply(401, "")}}})
		out := outgoing(http.MethodPut, "/x", strings.Repeat(body, 1000))
		out.Header.Set("Expect", "100-continue")
		end, _, _ := r.send(order("https", up.Addr()), out)
		if a := up.Arrivals()[0]; end.Status != 401 || !end.Complete || end.Sent.Complete || a.BodyBytes != 0 {
			t.Errorf("%+v, %d bytes of the body arrived", end, a.BodyBytes)
		}
	})
}
