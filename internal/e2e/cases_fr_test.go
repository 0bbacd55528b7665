package e2e

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// casesFraming: only a complete answer resolves an action, it is passed on byte for
// byte, and an incomplete one is never shown as a result (G1 to G4, G12).
func casesFraming(t *testing.T, b *bed) {
	t.Run("FR-01", func(t *testing.T) {
		contract.Covers(t, "G2", "G3", "H10")
		b.on(payHost, "/v1/fr01", testkit.Respond(testkit.Write("HTTP/1.1 201 Created\r\nContent-Length: 100\r\n\r\n{\"id\":\"a\"}"), testkit.Close()))
		resp := b.send(t, http.MethodPost, "https://"+payHost+"/v1/fr01", "x=1")
		s := b.check(t, resp, want{status: 424, facts: incomplete, host: payHost, path: "/v1/fr01", arrivals: 1})
		ev := s.Envelope.Evidence
		if ev.ReceivedStatus != 201 || ev.ReceivedBytes == nil || *ev.ReceivedBytes != 10 || ev.ExpectedBytes == nil || *ev.ExpectedBytes != 100 || ev.ResponseComplete || !ev.ResponseHeadersReceived {
			t.Errorf("%+v", ev)
		}
		if !strings.Contains(resp.Header.Get("Proxy-Status"), "received-status=201") {
			t.Errorf("Proxy-Status %q", resp.Header.Get("Proxy-Status"))
		}
		got := b.hear(b.api(t, "/v1/actions/"+s.ID+"/result"))
		if got.Status != 424 || bytes.Contains(got.Body, []byte(`"id"`)) || text(s.Envelope.Facts()) != incomplete {
			t.Errorf("the result: %d %q", got.Status, got.Body)
		}
	})
	t.Run("FR-02", func(t *testing.T) {
		contract.Covers(t, "G2", "G3", "H5")
		half := testkit.Respond(testkit.Write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n"), testkit.Close())
		for i, h2 := range []bool{false, true} {
			buffered, streamed := fmt.Sprintf("/v1/fr02/%d", i), fmt.Sprintf("/v1/fr02s/%d", i)
			b.on(payHost, buffered, half)
			resp := b.hear(testkit.Send(t, b.client(t, h2), http.MethodPost, "https://"+payHost+buffered, "x=1"))
			b.check(t, resp, want{status: 424, facts: incomplete, host: payHost, path: buffered, arrivals: 1})

			b.on(llmHost, streamed, half)
			resp = b.hear(testkit.Send(t, b.client(t, h2), http.MethodPost, "https://"+llmHost+streamed, "x=1"))
			if resp.BodyErr == nil {
				t.Errorf("h2=%v: %d %q ended cleanly", h2, resp.Status, resp.Body)
			}
			s := b.tell(t, resp.Header.Get("Waybill-Invocation"))
			if text(s.Envelope.Facts()) != incomplete {
				t.Errorf("h2=%v: %s", h2, text(s.Envelope.Facts()))
			}
			b.crossings(t, s, want{facts: incomplete, host: llmHost, path: streamed, arrivals: 1})
			if got := b.api(t, "/v1/actions/"+s.ID+"/result"); got.Status != 424 {
				t.Errorf("h2=%v: the result is %d %q", h2, got.Status, got.Body)
			}
		}
	})
	t.Run("FR-04", func(t *testing.T) {
		contract.Covers(t, "G1", "C2")
		b.on(payHost, "/v1/fr04/a", testkit.Respond(func(x *testkit.Exchange) error {
			x.MarkAnswered(true)
			// In one write, and once more: what follows a complete answer is no answer.
			if err := testkit.Write("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok debug: Authorization was " + strings.Join(x.Arrival().Values("Authorization"), ""))(x); err != nil {
				return err
			}
			return testkit.Write("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwrong")(x)
		}, testkit.Stall()))
		b.on(payHost, "/v1/fr04/b", testkit.Respond(testkit.Reply(200, "its own")))
		resp := b.send(t, http.MethodGet, "https://"+payHost+"/v1/fr04/a", "")
		s := b.check(t, resp, want{status: 200, facts: success, relayed: true, host: payHost, path: "/v1/fr04/a", arrivals: 1})
		if string(resp.Body) != "ok" || *s.Envelope.Evidence.ReceivedBytes != 2 {
			t.Errorf("%q %+v", resp.Body, s.Envelope.Evidence)
		}
		resp = b.send(t, http.MethodGet, "https://"+payHost+"/v1/fr04/b", "")
		b.check(t, resp, want{status: 200, facts: success, relayed: true, host: payHost, path: "/v1/fr04/b", arrivals: 1})
		if string(resp.Body) != "its own" || b.arrivals(payHost, "/v1/fr04/a")[0].Conn == b.arrivals(payHost, "/v1/fr04/b")[0].Conn {
			t.Errorf("%q: the poisoned connection was used again", resp.Body)
		}
	})
	t.Run("FR-06", func(t *testing.T) {
		contract.Covers(t, "G4")
		b.on(payHost, "/v1/fr06", testkit.Respond(
			testkit.Write("HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </b>\r\n\r\n"), testkit.Reply(201, "ok")))
		for n, h2 := range []bool{false, true} {
			var hints []string
			trace := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
				hints = append(hints, fmt.Sprint(code, h.Get("Link")))
				return nil
			}})
			resp, err := testkit.SendContext(trace, t, b.client(t, h2), http.MethodPost, "https://"+payHost+"/v1/fr06", "x=1")
			if err != nil {
				t.Fatal(err)
			}
			s := b.check(t, b.hear(resp), want{status: 201, facts: success, relayed: true, host: payHost, path: "/v1/fr06", arrivals: n + 1})
			if fmt.Sprint(hints) != "[103</a> 103</b>]" || string(resp.Body) != "ok" {
				t.Errorf("h2=%v: %v %q", h2, hints, resp.Body)
			}
			if got := b.api(t, "/v1/actions/"+s.ID+"/result"); got.Status != 201 || string(got.Body) != "ok" || got.Header.Get("Link") != "" {
				t.Errorf("h2=%v: the result is %d %v %q", h2, got.Status, got.Header, got.Body)
			}
		}
		for i, flood := range []string{"HTTP/1.1 103 Early Hints\r\n\r\n", "HTTP/1.1 100 Continue\r\n\r\n", "HTTP/1.1 102 Processing\r\nX: " + strings.Repeat("a", 4000) + "\r\n\r\n"} {
			path := fmt.Sprintf("/v1/fr06/flood%d", i)
			b.on(payHost, path, testkit.Respond(testkit.Write(strings.Repeat(flood, 10_000)), testkit.Stall()))
			b.check(t, b.send(t, http.MethodPost, "https://"+payHost+path, "x=1"), want{status: 424, facts: malformed, host: payHost, path: path, arrivals: 1})
		}
		b.on(payHost, "/v1/slow/fr06", testkit.Respond(testkit.Write("HTTP/1.1 103 Early Hints\r\n\r\n"), testkit.Stall()))
		b.check(t, b.send(t, http.MethodPost, "https://"+payHost+"/v1/slow/fr06", "x=1"),
			want{status: 424, facts: "remote_execution unknown reconcile REMOTE_TIMEOUT", host: payHost, path: "/v1/slow/fr06", arrivals: 1})
	})
	t.Run("FR-07", func(t *testing.T) {
		contract.Covers(t, "G2", "L7")
		for _, status := range []string{"000", "099", "1000", "20", "2x0", "-200", "101"} {
			path := "/v1/fr07/" + status
			b.on(payHost, path, testkit.Respond(testkit.Write("HTTP/1.1 "+status+" Weird\r\nContent-Length: 2\r\n\r\nok"), testkit.Close()))
			s := b.check(t, b.send(t, http.MethodPost, "https://"+payHost+path, "x=1"), want{status: 424, facts: malformed, host: payHost, path: path, arrivals: 1})
			if line := s.Envelope.Evidence.StatusLine; len(status) > 2 && status[0] != '-' && status != "2x0" && !strings.HasPrefix(line, "HTTP/1.1 "+status) {
				t.Errorf("%s: the status line is told as %q", status, line)
			}
		}
		b.on(payHost, "/v1/fr07/nothttp", testkit.Respond(testkit.Write("SSH-2.0-OpenSSH_9.2p1 Debian\r\n\r\n"), testkit.Close()))
		b.check(t, b.send(t, http.MethodPost, "https://"+payHost+"/v1/fr07/nothttp", "x=1"), want{status: 424, facts: malformed, host: payHost, path: "/v1/fr07/nothttp", arrivals: 1})
		// 600 to 999 are read as a 5xx (RFC 9110 section 15).
		for _, status := range []string{"600", "799", "999"} {
			path := "/v1/fr07/" + status
			b.on(payHost, path, testkit.Respond(testkit.Write("HTTP/1.1 "+status+" Weird\r\nContent-Length: 2\r\n\r\nok")))
			var n int
			_, _ = fmt.Sscan(status, &n)
			resp := b.send(t, http.MethodPost, "https://"+payHost+path, "x=1")
			b.check(t, resp, want{status: n, facts: failed, relayed: true, host: payHost, path: path, arrivals: 1})
			if string(resp.Body) != "ok" {
				t.Errorf("%s: %q", status, resp.Body)
			}
		}
	})
	t.Run("FR-09", func(t *testing.T) {
		contract.Covers(t, "G1", "G12")
		path := "/v1/fr09"
		b.onH2(path, []testkit.H2Step{testkit.H2Head(200, true, "content-length", "1488324")}, []testkit.H2Step{testkit.H2Head(204, true)},
			[]testkit.H2Step{testkit.H2Head(304, true, "etag", `"x"`)}, []testkit.H2Step{testkit.H2Head(200, false), testkit.H2Data([]byte("nolen"), true)})
		// One connection of the caller: an answer that were shifted would show.
		c := b.tunnel(t, h2Host)
		for n, r := range []struct {
			method         string
			status         int
			length, te     string
			body           string
			transferCoding []string
		}{{method: "HEAD", status: 200, length: "1488324"}, {method: "DELETE", status: 204}, {method: "PUT", status: 304}, {method: "GET", status: 200, body: "nolen"}} {
			c.Send(t, r.method+" "+path+" HTTP/1.1\r\nHost: "+h2Host+"\r\nContent-Length: 0\r\n\r\n")
			resp, err := c.ReadResponse(r.method)
			if err != nil {
				t.Fatalf("%s: %v", r.method, err)
			}
			b.check(t, b.hear(resp), want{status: r.status, facts: success, relayed: true, host: h2Host, path: path, arrivals: n + 1})
			length := resp.Header.Get("Content-Length")
			if r.method == "GET" && length == "5" {
				length = "" // stored whole before it is relayed, so that its length is known
			}
			if length != r.length || string(resp.Body) != r.body || resp.BodyErr != nil || resp.Status == 204 && resp.Header.Get("Transfer-Encoding") != "" {
				t.Errorf("%s: %d %v %q %v", r.method, resp.Status, resp.Header, resp.Body, resp.BodyErr)
			}
		}
	})
	t.Run("FR-10", func(t *testing.T) {
		contract.Covers(t, "F6", "G12")
		wire := []byte(gzipped)
		b.on(payHost, "/v1/fr10", testkit.Respond(testkit.Write("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 22\r\n\r\n"), func(x *testkit.Exchange) error {
			x.MarkAnswered(true)
			_, err := x.Conn.Write(wire)
			return err
		}))
		resp := b.raw(t, b.tunnel(t, payHost), "GET /v1/fr10 HTTP/1.1\r\nHost: "+payHost+"\r\n\r\n")
		s := b.check(t, resp, want{status: 200, facts: success, relayed: true, host: payHost, path: "/v1/fr10", arrivals: 1})
		sum := sha256.Sum256(wire)
		if !bytes.Equal(resp.Body, wire) || resp.Header.Get("Content-Encoding") != "gzip" || resp.Header.Get("Content-Length") != "22" || s.Envelope.Evidence.ResponseDigest != "sha256:"+hex.EncodeToString(sum[:]) {
			t.Errorf("%v %x %s", resp.Header, resp.Body, s.Envelope.Evidence.ResponseDigest)
		}
		a := b.arrivals(payHost, "/v1/fr10")[0]
		for _, name := range []string{"Accept-Encoding", "User-Agent", "Content-Length", "Transfer-Encoding"} {
			if has(a, name) {
				t.Errorf("%s was added: %q", name, fields(a, name))
			}
		}
		got := b.hear(b.api(t, "/v1/actions/"+s.ID+"/result"))
		if got.Status != 200 || !bytes.Equal(got.Body, wire) || got.Header.Get("Content-Encoding") != "gzip" {
			t.Errorf("stored: %d %v %x", got.Status, got.Header, got.Body)
		}
	})
}

// readAll reads a body that may break off.
func readAll(r io.Reader) (string, error) {
	data, err := io.ReadAll(r)
	return string(data), err
}
