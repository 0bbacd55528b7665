package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// casesStreams: a stream arrives as it is sent, and one that ends too early does not
// end cleanly (H4, H5, H9, G13).
func casesStreams(t *testing.T, b *bed) {
	post := func(t *testing.T, h2 bool, url string) *http.Response {
		t.Helper()
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := b.client(t, h2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = resp.Body.Close() })
		return resp
	}
	t.Run("ST-01", func(t *testing.T) {
		contract.Covers(t, "H5", "H9")
		for i, host := range []string{llmHost, payHost} { // marked as a stream, and found by its content type
			for j, h2 := range []bool{false, true} {
				path := fmt.Sprintf("/v1/st01/%d%d", i, j)
				first, second := testkit.NewGate(t), testkit.NewGate(t)
				sent := make(chan time.Time, 1)
				b.on(host, path, testkit.Respond(testkit.Write(eventHead), testkit.Do(func(testkit.Arrival) { sent <- time.Now() }), testkit.Write(chunk("data: 1\n\n")), testkit.Hold(first),
					testkit.Write(chunk("data: 2\n\n")), testkit.Hold(second), testkit.WriteLast("0\r\n\r\n")))
				resp := post(t, h2, "https://"+host+path)
				buf := make([]byte, 64)
				n, err := resp.Body.Read(buf)
				if took := time.Since(<-sent); string(buf[:n]) != "data: 1\n\n" || err != nil || took > time.Second {
					t.Errorf("%s h2=%v: %q %v after %v", host, h2, buf[:n], err, took)
				}
				id := resp.Header.Get("Waybill-Invocation")
				if s := b.tell(t, id); s.View.Outcome != "unknown" || s.View.Ended {
					t.Errorf("%s: %+v while the stream runs", host, s.View)
				}
				first.Open()
				n, err = resp.Body.Read(buf)
				if string(buf[:n]) != "data: 2\n\n" || err != nil {
					t.Errorf("%s h2=%v: %q %v", host, h2, buf[:n], err)
				}
				second.Open()
				if rest, err := readAll(resp.Body); rest != "" || err != nil {
					t.Errorf("%s h2=%v: %q %v", host, h2, rest, err)
				}
				s := b.tell(t, id)
				if text(s.Envelope.Facts()) != success {
					t.Errorf("%s h2=%v: %s", host, h2, text(s.Envelope.Facts()))
				}
				b.crossings(t, s, want{facts: success, host: host, path: path, arrivals: 1})
				if got := b.api(t, "/v1/actions/"+id+"/result"); got.Status != 200 || string(got.Body) != "data: 1\n\ndata: 2\n\n" {
					t.Errorf("stored: %d %q", got.Status, got.Body)
				}
			}
		}
	})
	t.Run("ST-02", func(t *testing.T) {
		contract.Covers(t, "H5", "G13", "G3", "F6")
		two := eventHead + chunk("data: 1\n\n") + chunk("data: 2\n\n")
		for i, c := range []struct {
			host  string
			turn  testkit.Turn
			facts string
			clean bool
			why   string
		}{
			{llmHost, testkit.Respond(testkit.Write(two), testkit.Close()), incomplete, false, ""},
			{llmHost, testkit.Respond(testkit.Write(two), testkit.Reset()), incomplete, false, ""},
			{llmHost, testkit.Respond(testkit.Write(two), testkit.WriteLast("0\r\n\r\n")), success, true, ""},
			{markedHost, testkit.Respond(testkit.Write(two), testkit.WriteLast("0\r\n\r\n")), incomplete, false, "end_marker_missing"},
			{markedHost, testkit.Respond(testkit.Write(two), testkit.WriteLast(chunk("data: [DONE]\n\n")+"0\r\n\r\n")), success, true, ""},
			{payHost, testkit.Respond(testkit.Write(two), testkit.Close()), incomplete, false, ""},
		} {
			for j, h2 := range []bool{false, true} {
				path := fmt.Sprintf("/v1/st02/%d%d", i, j)
				b.on(c.host, path, c.turn)
				resp := post(t, h2, "https://"+c.host+path)
				body, err := readAll(resp.Body)
				if (err == nil) != c.clean || !strings.HasPrefix(body, "data: 1\n\ndata: 2\n\n") {
					t.Errorf("%d h2=%v: %q %v", i, h2, body, err)
				}
				id := resp.Header.Get("Waybill-Invocation")
				testkit.Eventually(t, func() error {
					if !b.tell(t, id).View.Ended {
						return fmt.Errorf("%s still runs", id)
					}
					return nil
				})
				s := b.tell(t, id)
				if text(s.Envelope.Facts()) != c.facts || s.Envelope.Evidence.Reason != c.why {
					t.Errorf("%d h2=%v: %s %q", i, h2, text(s.Envelope.Facts()), s.Envelope.Evidence.Reason)
				}
				b.crossings(t, s, want{facts: c.facts, host: c.host, path: path, arrivals: 1})
			}
		}
	})
	t.Run("ST-03", func(t *testing.T) {
		contract.Covers(t, "B1", "L7")
		for i, upgrade := range []string{"websocket", "WebSocket", "h2c, websocket", "foo/1"} {
			path := fmt.Sprintf("/v1/st03/%d", i)
			c := b.tunnel(t, llmHost)
			resp := b.raw(t, c, "GET "+path+" HTTP/1.1\r\nHost: "+llmHost+"\r\nConnection: Upgrade\r\nUpgrade: "+upgrade+"\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n")
			s := b.check(t, resp, want{status: 422, facts: noAction, host: llmHost, path: path})
			if s.Envelope.Evidence.Field != "request.headers.upgrade" {
				t.Errorf("field %q", s.Envelope.Evidence.Field)
			}
			// The connection is still HTTP.
			if after := b.raw(t, c, "GET "+path+"/after HTTP/1.1\r\nHost: "+llmHost+"\r\n\r\n"); after.Status != 200 || string(after.Body) != "ok" {
				t.Errorf("%q: after it %d %q", upgrade, after.Status, after.Body)
			}
		}
	})
}
