package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// casesUploads: what becomes of a request whose body somebody does not want, or does
// not finish.
func casesUploads(t *testing.T, b *bed) {
	big := strings.Repeat("0", 8<<20)
	repeats := 5
	if long() {
		repeats = 20
	}
	t.Run("UP-01", func(t *testing.T) {
		contract.Covers(t, "G5", "G12")
		for i, c := range []struct {
			status int
			head   string
			retry  string
		}{{413, "413 Big", rejected}, {401, "401 No", rejected}} {
			path := fmt.Sprintf("/v1/up01/%d", i)
			b.on(payHost, path, testkit.Early(testkit.WriteLast("HTTP/1.1 "+c.head+"\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"), testkit.HalfClose()))
			for n := range repeats {
				resp := b.send(t, http.MethodPost, "https://"+payHost+path, big)
				b.check(t, resp, want{status: c.status, facts: c.retry, relayed: true, host: payHost, path: path, arrivals: n + 1})
			}
		}
		// With RST the answer may be lost on the way: then nothing is known.
		for n := range repeats {
			path := fmt.Sprintf("/v1/up01/rst%d", n)
			b.on(payHost, path, testkit.Early(testkit.WriteLast("HTTP/1.1 413 Big\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"), testkit.Reset()))
			resp := b.send(t, http.MethodPost, "https://"+payHost+path, big)
			w := want{status: resp.Status, facts: rejected, relayed: true, host: payHost, path: path, arrivals: 1}
			switch {
			case resp.Status == 413 && resp.Header.Get("Content-Type") == "":
			case strings.Contains(resp.Header.Get("Waybill-Outcome"), "REMOTE_RESULT_INCOMPLETE"):
				w = want{status: 424, facts: incomplete, host: payHost, path: path, arrivals: 1}
			default:
				w = want{status: 424, facts: lost, host: payHost, path: path, arrivals: 1}
			}
			b.check(t, resp, w)
		}
	})
	t.Run("UP-02", func(t *testing.T) {
		contract.Covers(t, "F1", "G4")
		for _, c := range []struct {
			name   string
			turn   testkit.Turn
			status int
			facts  string
			body   bool // reached the origin
		}{
			{"refused", testkit.Early(testkit.WriteLast("HTTP/1.1 401 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"), testkit.HalfClose()), 401, rejected, false},
			{"refused-keep", testkit.Early(testkit.WriteLast("HTTP/1.1 403 No\r\nContent-Length: 0\r\n\r\n"), testkit.HalfClose()), 403, rejected, false},
			{"continued", testkit.Early(testkit.Write("HTTP/1.1 100 Continue\r\n\r\n"), testkit.ReadBody(), testkit.Reply(200, "ok")), 200, success, true},
			{"silent", testkit.Early(testkit.ReadBody(), testkit.Reply(200, "ok")), 200, success, true},
		} {
			path := "/v1/up02/" + c.name
			b.on(payHost, path, c.turn)
			conn := b.tunnel(t, payHost)
			conn.Send(t, fmt.Sprintf("PUT %s HTTP/1.1\r\nHost: %s\r\nContent-Length: %d\r\nExpect: 100-continue\r\n\r\n", path, payHost, len(big)))
			// Waybill itself asks for the body: the fingerprint covers it (D1).
			first, err := conn.ReadResponse(http.MethodPut)
			if err != nil || first.Status != 100 {
				t.Fatalf("%s: %+v %v", c.name, first, err)
			}
			conn.Send(t, big)
			resp, err := conn.ReadResponse(http.MethodPut)
			if err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			b.check(t, b.hear(resp), want{status: c.status, facts: c.facts, relayed: true, host: payHost, path: path, arrivals: 1})
			a := b.arrivals(payHost, path)[0]
			if !has(a, "Expect") {
				t.Errorf("%s: the origin was not asked before the body was sent", c.name)
			}
			sent := b.ledgers[payHost].Conns()[a.Conn-1].AppBytes
			if body := sent >= int64(len(big)); body != c.body {
				t.Errorf("%s: %d bytes reached the origin", c.name, sent)
			}
			if !c.body && sent != int64(len(a.RawHead)) {
				t.Errorf("%s: %d bytes reached the origin, its head has %d", c.name, sent, len(a.RawHead))
			}
		}
		// A caller that does not ask is answered as before: no wait for the origin.
		b.on(payHost, "/v1/up02/plain", testkit.Respond(testkit.Reply(200, "ok")))
		b.check(t, b.send(t, http.MethodPut, "https://"+payHost+"/v1/up02/plain", "x"), want{status: 200, facts: success, relayed: true, host: payHost, path: "/v1/up02/plain", arrivals: 1})
		if has(b.arrivals(payHost, "/v1/up02/plain")[0], "Expect") {
			t.Error("Expect was added")
		}
	})
	t.Run("UP-03", func(t *testing.T) {
		contract.Covers(t, "D1", "M6")
		i := 0
		for _, head := range []string{
			"Content-Length: 100\r\n\r\n{\"a\":1}",
			"Transfer-Encoding: chunked\r\n\r\n7\r\n{\"a\":1}\r\n",
			"Transfer-Encoding: chunked\r\n\r\n7\r\n{\"a\":",
			"Transfer-Encoding: chunked\r\n\r\n7\r\n{\"a\":1}\r\n0\r\n",
		} {
			for _, inside := range []bool{false, true} {
				for _, how := range []string{"half", "full", "rst"} {
					i++
					path := fmt.Sprintf("/v1/up03/%d", i)
					var c *testkit.Conn
					target := path
					if inside {
						c = b.tunnel(t, payHost)
					} else {
						c = testkit.Dial(t, b.addr)
						target = "http://" + payHost + path
					}
					c.Send(t, "POST "+target+" HTTP/1.1\r\nHost: "+payHost+"\r\n"+head)
					switch how {
					case "half":
						half(t, c)
						resp, err := c.ReadResponse(http.MethodPost)
						if err != nil {
							t.Fatalf("%s: no answer: %v (L7)", path, err)
						}
						b.check(t, b.hear(resp), want{status: 400, facts: badRequest, host: payHost, path: path})
					case "full":
						_ = c.Close()
					case "rst":
						c.Reset()
					}
					testkit.Eventually(t, func() error {
						if n := len(sentTo(b.all(t), path)); n != 1 {
							return fmt.Errorf("%s: %d actions", path, n)
						}
						return nil
					})
					v := sentTo(b.settle(t), path)[0]
					// One that is gone stopped the action itself (F10).
					if v.Outcome != "not_attempted" || v.Phase != "validation" || v.Retry != "after_correction" || v.Code != "INVALID_REQUEST" && (how == "half" || v.Code != "CALLER_CANCELLED") {
						t.Errorf("%s %s: %+v", path, how, v)
					}
					if n := len(b.arrivals(payHost, path)); n != 0 {
						t.Errorf("%s: %d arrivals", path, n)
					}
				}
			}
		}
	})
}

// half ends what the caller sends and lets it read.
func half(t *testing.T, c *testkit.Conn) {
	t.Helper()
	w, ok := c.Conn.(interface{ CloseWrite() error })
	if !ok {
		t.Fatalf("%T cannot be closed in one direction", c.Conn)
	}
	if err := w.CloseWrite(); err != nil {
		t.Fatal(err)
	}
}
