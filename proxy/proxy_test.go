package proxy

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"net/textproto"
	"net/url"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/outcome"
)

// way is one of the ways a request reaches the front.
type way struct {
	name   string
	scheme string
	h2     bool
	proto  string
}

var ways = []way{
	{"absolute-form", "http", false, "HTTP/1.1"},
	{"CONNECT TLS http/1.1", "https", false, "HTTP/1.1"},
	{"CONNECT TLS h2", "https", true, "HTTP/2.0"},
}

// TestWays sends the same requests on every way: the pipeline gets the same
// submission, and the caller gets the reply unchanged.
func TestWays(t *testing.T) {
	contract.Covers(t, "G12", "L5")
	b := newBed(t)
	big := bytes.Repeat([]byte("0123456789abcdef"), 1<<16)
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			client := b.client(nil, w.h2)
			b.pipe.answer = func(_ context.Context, s *seen) *dispatch.Reply {
				h := http.Header{
					"Waybill-Invocation": {"act_01"}, "Waybill-Outcome": {"rejected;phase=remote_execution;retry=after_correction;code=REMOTE_REJECTED"},
					"Proxy-Status": {"waybill;received-status=401"}, "Set-Cookie": {"a=1", "b=2"}, "X-Upper": {"Kept"},
				}
				return b.pipe.reply(http.StatusUnauthorized, h, s.body)
			}
			for _, body := range [][]byte{nil, []byte("hello"), big} {
				req, _ := http.NewRequest("POST", w.scheme+"://pay.example.test/v1/%2Fx?a=%2e&b", bytes.NewReader(body))
				req.Header.Set("X-Caller", "yes")
				resp, err := client.Do(req)
				if err != nil {
					t.Fatal(err)
				}
				got, err := io.ReadAll(resp.Body)
				if err != nil || !bytes.Equal(got, body) {
					t.Fatalf("body: %d bytes, want %d, %v", len(got), len(body), err)
				}
				if resp.StatusCode != 401 || resp.ContentLength != int64(len(body)) || len(resp.Header["Set-Cookie"]) != 2 || resp.Header.Get("Waybill-Invocation") != "act_01" || resp.Header.Get("Proxy-Status") == "" {
					t.Errorf("%d %v", resp.StatusCode, resp.Header)
				}
				if _, ok := resp.Header["Content-Type"]; ok {
					t.Error("a content type was guessed")
				}
				subs := b.pipe.requests()
				if len(subs) != 1 {
					t.Fatalf("%d submissions", len(subs))
				}
				s := subs[0]
				want := dispatch.Authorities{URL: "pay.example.test", Host: "pay.example.test"}
				if w.scheme == "https" {
					want = dispatch.Authorities{Connect: "pay.example.test:443", SNI: "pay.example.test", Host: "pay.example.test"}
				}
				if s.Authorities != want || s.Scheme != w.scheme || s.RawPath != "/v1/%2Fx" || s.RawQuery != "a=%2e&b" || !s.HasQuery || s.Protocol != w.proto || s.Method != "POST" {
					t.Errorf("submission %+v", s.Submission)
				}
				if s.header.Get("X-Caller") != "yes" || s.ContentLength != int64(len(body)) || (len(body) == 0) != (s.Submission.Body == nil) {
					t.Errorf("header %v, length %d", s.header, s.ContentLength)
				}
				if s.Caller.ID != LocalCaller {
					t.Errorf("caller %q", s.Caller.ID)
				}
				// The client has the whole answer before the handler has finished with it.
				eventually(t, "one clean hand-over", func() bool {
					b.pipe.mu.Lock()
					defer b.pipe.mu.Unlock()
					return len(b.pipe.handed) > 0
				})
				if h := b.pipe.handovers(); len(h) != 1 || h[0] != nil {
					t.Errorf("hand-overs %v", h)
				}
			}
		})
	}
}

// TestUnknownLength: an answer of unknown length is chunked on HTTP/1.1, ends with
// END_STREAM on HTTP/2, and with the connection on HTTP/1.0.
func TestUnknownLength(t *testing.T) {
	b := newBed(t)
	b.pipe.answer = func(context.Context, *seen) *dispatch.Reply {
		r := b.pipe.reply(200, http.Header{"Content-Type": {"text/plain"}}, []byte("piece by piece"))
		r.ContentLength = -1
		return r
	}
	for _, w := range ways {
		resp, err := b.client(nil, w.h2).Get(w.scheme + "://pay.example.test/")
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(resp.Body)
		if string(got) != "piece by piece" || err != nil || resp.ContentLength != -1 {
			t.Errorf("%s: %q %v length %d", w.name, got, err, resp.ContentLength)
		}
	}
	conn := b.dial()
	_, _ = io.WriteString(conn, "GET http://pay.example.test/ HTTP/1.0\r\n\r\n")
	if a := readAnswer(t, bufio.NewReader(conn), "GET"); string(a.body) != "piece by piece" || a.header.Get("Transfer-Encoding") != "" {
		t.Errorf("HTTP/1.0: %+v", a)
	}
}

// TestTrailersAnswered relays trailer fields.
func TestTrailersAnswered(t *testing.T) {
	b := newBed(t)
	b.pipe.answer = func(context.Context, *seen) *dispatch.Reply {
		r := b.pipe.reply(200, nil, []byte("body"))
		r.Trailer = http.Header{"X-Checksum": {"abc"}}
		return r
	}
	for _, w := range ways {
		resp, err := b.client(nil, w.h2).Get(w.scheme + "://pay.example.test/")
		if err != nil {
			t.Fatal(err)
		}
		got, _ := io.ReadAll(resp.Body)
		if string(got) != "body" || resp.Trailer.Get("X-Checksum") != "abc" {
			t.Errorf("%s: %q, trailer %v", w.name, got, resp.Trailer)
		}
	}
}

// TestTrailerNamedAsField: a trailer field is not taken for the field of its name, and
// nothing that passed through a writer before is in an answer.
func TestTrailerNamedAsField(t *testing.T) {
	b := newBed(t)
	b.pipe.answer = func(_ context.Context, s *seen) *dispatch.Reply {
		s.Informational(http.StatusEarlyHints, http.Header{"Link": {"</a.css>"}})
		r := b.pipe.reply(200, http.Header{"X-Sum": {"of the head"}, "X-Two": {"1", "2"}}, []byte("body"))
		r.Trailer = http.Header{"X-Sum": {"of the body"}}
		return r
	}
	for _, w := range ways {
		for range 2 {
			resp, err := b.client(nil, w.h2).Get(w.scheme + "://pay.example.test/")
			if err != nil {
				t.Fatal(err)
			}
			got, _ := io.ReadAll(resp.Body)
			if head, tail := resp.Header["X-Sum"], resp.Trailer["X-Sum"]; string(got) != "body" || len(head) != 1 || len(tail) != 1 || head[0] != "of the head" || tail[0] != "of the body" {
				t.Errorf("%s: %q, header %q, trailer %q", w.name, got, head, tail)
			}
			if len(resp.Header["X-Two"]) != 2 || len(resp.Header["Link"]) != 0 {
				t.Errorf("%s: %v", w.name, resp.Header)
			}
		}
	}
}

// TestBodilessFraming is case FR-09: HEAD, 204 and 304 keep their framing, and the
// next answer on the connection is not shifted.
func TestBodilessFraming(t *testing.T) {
	contract.Covers(t, "G12")
	b := newBed(t)
	b.pipe.answer = func(_ context.Context, s *seen) *dispatch.Reply {
		switch s.Method {
		case "HEAD":
			r := b.pipe.reply(200, http.Header{"Content-Length": {"1488324"}, "Content-Type": {"application/zip"}}, nil)
			r.ContentLength = 0
			return r
		case "DELETE":
			return b.pipe.reply(204, nil, nil)
		case "PUT":
			return b.pipe.reply(304, http.Header{"Etag": {`"x"`}}, nil)
		}
		r := b.pipe.reply(200, nil, []byte("the fourth"))
		r.ContentLength = -1
		return r
	}
	conn := b.dial()
	r := bufio.NewReader(conn)
	for _, m := range []string{"HEAD", "DELETE", "PUT", "GET"} {
		fmt.Fprintf(conn, "%s http://pay.example.test/v1/f HTTP/1.1\r\n%s\r\n", m, h11)
		a := readAnswer(t, r, m)
		_, te := a.header["Transfer-Encoding"]
		switch {
		case m == "HEAD" && (a.status != 200 || a.header.Get("Content-Length") != "1488324" || len(a.body) != 0):
		case m == "DELETE" && (a.status != 204 || a.header.Get("Content-Length") != "" || te):
		case m == "PUT" && (a.status != 304 || a.header.Get("Content-Length") != "" || te):
		case m == "GET" && (a.status != 200 || string(a.body) != "the fourth"):
		default:
			continue
		}
		t.Errorf("%s: %+v", m, a)
	}
	// HEAD with an unknown length has neither length nor coding to mislead.
	b.pipe.answer = func(context.Context, *seen) *dispatch.Reply {
		r := b.pipe.reply(200, http.Header{"Content-Type": {"text/plain"}}, nil)
		r.ContentLength = -1
		return r
	}
	fmt.Fprintf(conn, "HEAD http://pay.example.test/v1/f HTTP/1.1\r\n%s\r\n", h11)
	head := readHeadFrom(t, r)
	if strings.Contains(head, "Content-Length") {
		t.Errorf("HEAD: %q", head)
	}
}

func readHeadFrom(t *testing.T, r *bufio.Reader) string {
	t.Helper()
	var b strings.Builder
	for {
		line, err := r.ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		b.WriteString(line)
		if line == "\r\n" {
			return b.String()
		}
	}
}

// TestStreamed: each piece of a streamed answer arrives by itself (case ST-01), the
// head before any, and trailer fields that are known at the end only come last.
func TestStreamed(t *testing.T) {
	b := newBed(t)
	for _, contentType := range []string{"text/event-stream", "application/octet-stream"} {
		for _, w := range ways {
			pr, pw := io.Pipe()
			trailer := http.Header{}
			b.pipe.answer = func(context.Context, *seen) *dispatch.Reply {
				r := b.pipe.reply(200, http.Header{"Content-Type": {contentType}}, nil)
				r.Body, r.ContentLength, r.Streamed, r.Trailer = pr, -1, true, trailer
				return r
			}
			resp, err := b.client(nil, w.h2).Get(w.scheme + "://pay.example.test/") // nothing was written yet
			if err != nil {
				t.Fatal(err)
			}
			for i := range 3 {
				want := fmt.Sprintf("data: %d\n\n", i)
				if _, err := io.WriteString(pw, want); err != nil {
					t.Fatal(err)
				}
				got := make([]byte, len(want))
				if _, err := io.ReadFull(resp.Body, got); err != nil || string(got) != want {
					t.Fatalf("%s: %q %v", w.name, got, err)
				}
			}
			trailer.Set("Waybill-Outcome", "committed;phase=remote_execution;retry=never")
			_ = pw.Close()
			if rest, err := io.ReadAll(resp.Body); len(rest) != 0 || err != nil {
				t.Errorf("%s: %q %v", w.name, rest, err)
			}
			if resp.Trailer.Get("Waybill-Outcome") == "" {
				t.Errorf("%s: trailer %v", w.name, resp.Trailer)
			}
		}
	}
}

// TestBrokenBodyOfAnswer: a result whose body breaks never ends cleanly, so half of it
// is never taken for all of it (CONTRACT G3, H5), and the pipeline hears of it.
func TestBrokenBodyOfAnswer(t *testing.T) {
	contract.Covers(t, "G3")
	b := newBed(t)
	broken := errors.New("chunk is damaged")
	for _, length := range []int64{-1, 10, -2} {
		b.pipe.answer = func(context.Context, *seen) *dispatch.Reply {
			r := b.pipe.reply(200, nil, nil)
			r.Body = io.NopCloser(io.MultiReader(strings.NewReader("half"), errReader{broken}))
			r.ContentLength, r.Streamed = max(length, -1), length == -2
			return r
		}
		for _, w := range ways {
			resp, err := b.client(nil, w.h2).Post(w.scheme+"://pay.example.test/", "text/plain", strings.NewReader("x"))
			if err == nil {
				_, err = io.ReadAll(resp.Body)
			}
			if err == nil {
				t.Errorf("%s, length %d: a broken body ended cleanly", w.name, length)
			}
			eventually(t, "the hand-over", func() bool {
				h := b.pipe.handovers()
				return len(h) == 1 && errors.Is(h[0], broken)
			})
		}
	}
}

// TestHandOver: a caller that is gone is reported as such (CONTRACT H2), and its
// context had ended (F5); neither happens to one that stays.
func TestHandOver(t *testing.T) {
	contract.Covers(t, "H2", "F10")
	b := newBed(t)
	for _, w := range ways {
		left, release := make(chan struct{}), make(chan struct{})
		b.pipe.answer = func(ctx context.Context, _ *seen) *dispatch.Reply {
			<-ctx.Done() // the caller hangs up while the attempt runs
			close(left)
			<-release
			return b.pipe.reply(201, nil, []byte("too late"))
		}
		ctx, cancel := context.WithCancel(context.Background())
		req, _ := http.NewRequestWithContext(ctx, "POST", w.scheme+"://pay.example.test/", strings.NewReader("x"))
		started := make(chan error, 1)
		go func() {
			_, err := b.client(nil, w.h2).Do(req)
			started <- err
		}()
		eventually(t, "the submission", func() bool { return len(b.pipe.requests()) == 1 })
		cancel()
		<-started
		<-left
		close(release)
		eventually(t, w.name+": a hand-over with an error", func() bool {
			h := b.pipe.handovers()
			return len(h) == 1 && h[0] != nil
		})
	}
}

// TestGoneReply: with nobody to answer the connection just ends.
func TestGoneReply(t *testing.T) {
	b := newBed(t)
	b.pipe.answer = func(context.Context, *seen) *dispatch.Reply {
		return &dispatch.Reply{Gone: true, HandedOver: b.pipe.handOver}
	}
	conn := b.dial()
	fmt.Fprintf(conn, "GET http://pay.example.test/ HTTP/1.1\r\n%s\r\n", h11)
	closed(t, conn)
	eventually(t, "the hand-over", func() bool { h := b.pipe.handovers(); return len(h) == 1 && h[0] != nil })
}

// TestInformational passes 1xx answers on (CONTRACT G4), before the final one and
// never after it, without fields that are Waybill's or the connection's.
func TestInformational(t *testing.T) {
	contract.Covers(t, "G4", "V6")
	b := newBed(t)
	late := make(chan func(int, http.Header), 1)
	b.pipe.answer = func(_ context.Context, s *seen) *dispatch.Reply {
		if s.Informational == nil {
			return b.pipe.reply(200, nil, []byte("none"))
		}
		s.Informational(100, http.Header{})
		s.Informational(103, http.Header{"Link": {"</s.css>; rel=preload"}, "Waybill-Outcome": {"committed"}, "Connection": {"close"}})
		s.Informational(102, http.Header{})
		s.Informational(101, http.Header{"Upgrade": {"x"}})
		late <- s.Informational
		return b.pipe.reply(200, nil, []byte("final"))
	}
	for _, w := range ways {
		var got []string
		ctx := httptrace.WithClientTrace(context.Background(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
			got = append(got, fmt.Sprintf("%d/%d/%s", code, len(h), h.Get("Link")))
			return nil
		}})
		req, _ := http.NewRequestWithContext(ctx, "GET", w.scheme+"://pay.example.test/", nil)
		resp, err := b.client(nil, w.h2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		if string(body) != "final" || resp.Header.Get("Link") != "" {
			t.Errorf("%s: %q %v", w.name, body, resp.Header)
		}
		if want := "[103/1/</s.css>; rel=preload 102/0/]"; fmt.Sprint(got) != want {
			t.Errorf("%s: informational %v, want %s", w.name, got, want)
		}
		(<-late)(103, http.Header{}) // a straggler must not disturb anything
	}
	conn := b.dial()
	_, _ = io.WriteString(conn, "GET http://pay.example.test/ HTTP/1.0\r\n\r\n")
	if a := readAnswer(t, bufio.NewReader(conn), "GET"); string(a.body) != "none" {
		t.Errorf("HTTP/1.0 has no informational answers: %+v", a)
	}
}

// TestExpectContinue is case UP-02: the body is spooled, so Waybill answers 100.
func TestExpectContinue(t *testing.T) {
	b := newBed(t)
	conn := b.dial()
	r := bufio.NewReader(conn)
	_, _ = io.WriteString(conn, "PUT http://pay.example.test/o HTTP/1.1\r\n"+h11+"Expect: 100-Continue\r\nContent-Length: 2\r\n\r\n")
	if head := readHeadFrom(t, r); !strings.HasPrefix(head, "HTTP/1.1 100 ") {
		t.Fatalf("%q", head)
	}
	_, _ = io.WriteString(conn, "hi")
	if a := readAnswer(t, r, "PUT"); a.status != 200 {
		t.Errorf("%+v", a)
	}
	if s := b.pipe.requests(); len(s) != 1 || string(s[0].body) != "hi" || s[0].header.Get("Expect") == "" {
		t.Errorf("%+v", s)
	}
}

// TestWaybillFields: they are read, checked and never forwarded (DESIGN section 4).
func TestWaybillFields(t *testing.T) {
	contract.Covers(t, "B2")
	b := newBed(t)
	act := newID().String()
	for _, c := range []struct {
		fields, field, reason string
	}{
		{"Waybill-Request-Id: job-1\r\nWaybill-Timeout: 30\r\nWaybill-Supersedes: " + act + "\r\nWaybill-Retry-Of: " + act + "\r\nWaybill-Outcome: committed\r\nWaybill-X: y\r\n", "", ""},
		{"Waybill-Request-Id:\r\n", "request.headers.waybill-request-id", "bad_request_id"},
		{"Waybill-Request-Id: a b\r\n", "request.headers.waybill-request-id", "bad_request_id"},
		{"Waybill-Request-Id: \xff\r\n", "request.headers.waybill-request-id", "bad_request_id"},
		{"Waybill-Request-Id: " + strings.Repeat("x", 129) + "\r\n", "request.headers.waybill-request-id", "bad_request_id"},
		{"Waybill-Request-Id: a\r\nWaybill-Request-Id: b\r\n", "request.headers.waybill-request-id", "repeated"},
		{"Waybill-Timeout: 0\r\n", "request.headers.waybill-timeout", "bad_timeout"},
		{"Waybill-Timeout: 86401\r\n", "request.headers.waybill-timeout", "bad_timeout"},
		{"Waybill-Timeout: 1.5\r\n", "request.headers.waybill-timeout", "bad_timeout"},
		{"Waybill-Timeout: +5\r\n", "request.headers.waybill-timeout", "bad_timeout"},
		{"Waybill-Supersedes: act_1\r\n", "request.headers.waybill-supersedes", "bad_action_id"},
		{"Waybill-Retry-Of: act_1\r\n", "request.headers.waybill-retry-of", "bad_action_id"},
		{"Waybill-Retry-Of: " + act + "\r\nWaybill-Retry-Of: " + act + "\r\n", "request.headers.waybill-retry-of", "repeated"},
	} {
		conn := b.dial()
		_, _ = io.WriteString(conn, "GET http://pay.example.test/ HTTP/1.1\r\n"+h11+c.fields+"\r\n")
		a := readAnswer(t, bufio.NewReader(conn), "GET")
		subs := b.pipe.requests()
		if len(subs) != 1 {
			t.Fatalf("%q: %d submissions", c.fields, len(subs))
		}
		s := subs[0]
		for k := range s.header {
			if strings.HasPrefix(strings.ToLower(k), "waybill-") {
				t.Errorf("%q: %s is forwarded", c.fields, k)
			}
		}
		if c.field == "" {
			if a.status != 200 || s.RequestID != "job-1" || s.Wait != 30*time.Second || s.Supersedes != act || s.RetryOf != act {
				t.Errorf("%d %+v", a.status, s.Submission)
			}
			continue
		}
		if env := a.envelope(t); env.Evidence.Field != c.field || env.Evidence.Reason != c.reason || s.Refused == nil {
			t.Errorf("%q: %s", c.fields, a.body)
		}
	}
}

// TestUserinfoStaysOut: a password in a URL is refused and not passed on (case LK-03).
func TestUserinfoStaysOut(t *testing.T) {
	b := newBed(t)
	for _, wire := range []string{
		"GET http://user:hunter2@pay.example.test/x HTTP/1.1\r\n" + h11 + "\r\n",
		"GET http://pay.example.test/x HTTP/1.1\r\nHost: user:hunter2@pay.example.test\r\n\r\n",
	} {
		conn := b.dial()
		_, _ = io.WriteString(conn, wire)
		a := readAnswer(t, bufio.NewReader(conn), "GET")
		if a.status != 400 || bytes.Contains(a.body, []byte("hunter2")) {
			t.Errorf("%d %s", a.status, a.body)
		}
		for _, s := range b.pipe.requests() {
			if s.Refused == nil || strings.Contains(fmt.Sprintf("%+v", s), "hunter2") {
				t.Errorf("%+v", s)
			}
		}
	}
	if strings.Contains(b.log.String(), "hunter2") {
		t.Error("in the log")
	}
}

// TestPanicIsAnswered: a panic of the pipeline becomes INTERNAL; what it claims is
// unknown, since the request may have been dispatched (CONTRACT L7, M2).
func TestPanicIsAnswered(t *testing.T) {
	contract.Covers(t, "L7")
	b := newBed(t)
	b.pipe.answer = func(context.Context, *seen) *dispatch.Reply { panic("secret-in-a-panic") }
	for _, w := range ways {
		resp, err := b.client(nil, w.h2).Post(w.scheme+"://pay.example.test/", "text/plain", strings.NewReader("x"))
		if err != nil {
			t.Fatalf("%s: %v", w.name, err)
		}
		body, _ := io.ReadAll(resp.Body)
		env := answer{resp.StatusCode, resp.Header, body, ""}.envelope(t)
		if resp.StatusCode != 424 || env.Error.Code != outcome.CodeInternal || env.Error.Outcome != outcome.Unknown || env.Error.Retry != outcome.Reconcile {
			t.Errorf("%s: %d %s", w.name, resp.StatusCode, body)
		}
	}
	if l := b.log.String(); strings.Contains(l, "secret-in-a-panic") || !strings.Contains(l, "panic in a handler") {
		t.Errorf("log: %s", l)
	}
}

// TestHTTP2Limits: a header list beyond the limit gets the envelope.
func TestHTTP2Limits(t *testing.T) {
	b := newBed(t)
	client := b.client(nil, true)
	req, _ := http.NewRequest("GET", "https://pay.example.test/", nil)
	for i := range 40 {
		req.Header.Set(fmt.Sprintf("X-%d", i), strings.Repeat("a", 2000))
	}
	resp, err := client.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	body, _ := io.ReadAll(resp.Body)
	if env := (answer{resp.StatusCode, resp.Header, body, ""}).envelope(t); resp.StatusCode != 413 || env.Error.Code != outcome.CodePayloadLimit {
		t.Errorf("%d %s", resp.StatusCode, body)
	}
	// The connection goes on.
	if resp, err := client.Get("https://pay.example.test/"); err != nil || resp.StatusCode != 200 {
		t.Errorf("%v %v", resp, err)
	}
}

// TestHTTP2Host: a Host field beside :authority must not differ from it (RFC 9113
// §8.3.1); it never reaches the pipeline as a field.
func TestHTTP2Host(t *testing.T) {
	contract.Covers(t, "B1")
	b := newBed(t)
	for host, refused := range map[string]bool{"pay.example.test": false, "evil.example.test": true} {
		tc := b.tlsInside(b.connectTo("pay.example.test:443"), "pay.example.test", "h2")
		status := http2Get(t, tc, hpack.HeaderField{Name: "host", Value: host})
		s := b.pipe.requests()
		if len(s) != 1 || (s[0].Refused != nil) != refused || (status == "400") != refused || s[0].header.Get("Host") != "" {
			t.Errorf("%s: %s %+v", host, status, s)
		}
	}
}

// http2Get sends one request frame by frame, since an honest client would not send
// such fields, and returns the status.
func http2Get(t *testing.T, c net.Conn, extra ...hpack.HeaderField) string {
	t.Helper()
	fr := http2.NewFramer(c, c)
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for _, f := range append([]hpack.HeaderField{
		{Name: ":method", Value: "GET"}, {Name: ":scheme", Value: "https"}, {Name: ":authority", Value: "pay.example.test"}, {Name: ":path", Value: "/x"},
	}, extra...) {
		_ = enc.WriteField(f) // a buffer takes everything
	}
	_, err := io.WriteString(c, http2.ClientPreface)
	if err == nil {
		err = fr.WriteSettings()
	}
	if err == nil {
		err = fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: true})
	}
	for err == nil {
		var f http2.Frame
		if f, err = fr.ReadFrame(); err != nil {
			break
		}
		h, ok := f.(*http2.HeadersFrame)
		if !ok {
			continue
		}
		fields, err := hpack.NewDecoder(4096, nil).DecodeFull(h.HeaderBlockFragment())
		if err != nil || len(fields) == 0 || fields[0].Name != ":status" {
			t.Fatalf("%v %v", fields, err)
		}
		return fields[0].Value
	}
	t.Fatal(err)
	return ""
}

// TestAuthoritiesAreTruthful is the front's part of cases ID-01 and ID-03: every name
// of the destination is passed on as given, so that the pipeline can compare them.
func TestAuthoritiesAreTruthful(t *testing.T) {
	contract.Covers(t, "B1")
	b := newBed(t)
	for _, w := range ways {
		req, _ := http.NewRequest("GET", w.scheme+"://evil.example.test/x", nil)
		req.Host = "pay.example.test"
		resp, err := b.client(nil, w.h2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		s := b.pipe.requests()
		want := dispatch.Authorities{URL: "evil.example.test", Host: "pay.example.test"}
		if w.scheme == "https" {
			want = dispatch.Authorities{Connect: "evil.example.test:443", SNI: "evil.example.test", Host: "pay.example.test"}
		} else if len(s) == 1 && s[0].Authorities.URL == "pay.example.test" {
			// net/http's client puts req.Host into an absolute-form target; see the raw table.
			want.URL = "pay.example.test"
		}
		if len(s) != 1 || s[0].Authorities != want {
			t.Errorf("%s: %+v, want %+v", w.name, s, want)
		}
	}
	// SNI differs from the CONNECT target.
	tc := b.tlsAny(b.connectTo("evil.example.test:443"), "pay.example.test")
	fmt.Fprintf(tc, "GET /x HTTP/1.1\r\n%s\r\n", h11)
	readAnswer(t, bufio.NewReader(tc), "GET")
	if s := b.pipe.requests(); len(s) != 1 || s[0].Authorities != (dispatch.Authorities{Connect: "evil.example.test:443", SNI: "pay.example.test", Host: "pay.example.test"}) {
		t.Errorf("%+v", s)
	}
	// An absolute-form target inside a tunnel counts too.
	tc = b.tlsInside(b.connectTo("pay.example.test:443"), "pay.example.test")
	fmt.Fprintf(tc, "GET https://evil.example.test/x HTTP/1.1\r\n%s\r\n", h11)
	readAnswer(t, bufio.NewReader(tc), "GET")
	if s := b.pipe.requests(); len(s) != 1 || s[0].Authorities.URL != "evil.example.test" || s[0].RawPath != "/x" {
		t.Errorf("%+v", s)
	}
}

// tlsAny does TLS whatever name the certificate has.
func (b *bed) tlsAny(c net.Conn, sni string) *tls.Conn {
	b.t.Helper()
	tc := tls.Client(c, &tls.Config{InsecureSkipVerify: true, ServerName: sni})
	if err := tc.Handshake(); err != nil {
		b.t.Fatal(err)
	}
	return tc
}

// TestEngineDefaults pins every default of goproxy that is overridden (DESIGN
// section 3, case CL-01): nothing is dialled, trusted, read from the environment or
// logged by it.
func TestEngineDefaults(t *testing.T) {
	for _, v := range []string{"HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY"} {
		t.Setenv(v, "http://127.0.0.1:1")
	}
	b := newBed(t)
	e := b.p.engine
	for _, u := range []string{"http://pay.example.test/", "https://pay.example.test/"} {
		req, _ := http.NewRequest("GET", u, nil)
		if _, err := e.Tr.RoundTrip(req); !errors.Is(err, errNoDial) {
			t.Errorf("Tr sends: %v", err)
		}
	}
	if e.Tr.Proxy != nil || e.Tr.TLSClientConfig != nil && e.Tr.TLSClientConfig.InsecureSkipVerify {
		t.Error("Tr has goproxy's defaults")
	}
	if _, err := e.ConnectDial("tcp", b.addr); !errors.Is(err, errNoDial) || e.ConnectDialWithReq != nil {
		t.Error("CONNECT can be dialled by goproxy")
	}
	if e.Verbose || !e.KeepHeader || !e.KeepAcceptEncoding || e.AllowHTTP2 {
		t.Error("goproxy changes requests, speaks or logs")
	}
	e.Logger.Printf("[%03d] WARN: Error dialing to %s: %s", 1, "canary-host", "canary-error")
	if strings.Contains(b.log.String(), "canary") || !strings.Contains(b.log.String(), "goproxy") {
		t.Errorf("log: %s", b.log.String())
	}
	newServerLog(b.p.log).Print("http: TLS handshake error from canary-addr: canary")
	if l := b.log.String(); strings.Contains(l, "canary") || !strings.Contains(l, "tls_handshake") {
		t.Errorf("log: %s", l)
	}
	// No Accept-Encoding is added, none is removed (case FR-10).
	for _, ae := range []string{"", "br"} {
		req, _ := http.NewRequest("GET", "http://pay.example.test/", nil)
		if ae != "" {
			req.Header.Set("Accept-Encoding", ae)
		}
		resp, err := b.client(nil, false).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		if s := b.pipe.requests(); s[0].header.Get("Accept-Encoding") != ae {
			t.Errorf("Accept-Encoding %q became %q", ae, s[0].header.Get("Accept-Encoding"))
		}
	}
}

// TestProxyFieldsStop is case HD-03: nothing of the proxy's credentials goes on, on
// any layer, and the token is in no log.
func TestProxyFieldsStop(t *testing.T) {
	contract.Covers(t, "C2")
	b := newBed(t)
	user := url.UserPassword("agent", "toktok")
	for _, w := range ways {
		req, _ := http.NewRequest("GET", w.scheme+"://pay.example.test/", nil)
		if w.scheme == "https" {
			req.Header.Set("Proxy-Authorization", "Basic inner")
		}
		resp, err := b.client(user, w.h2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		if resp.StatusCode != 200 {
			t.Errorf("%s: %d: credentials inside a tunnel are dropped, not judged", w.name, resp.StatusCode)
		}
		_ = resp.Body.Close()
		s := b.pipe.requests()
		if len(s) != 1 || !strings.HasPrefix(s[0].Caller.ID, "basic:") {
			t.Fatalf("%s: %+v", w.name, s)
		}
		for k := range s[0].header {
			if strings.HasPrefix(k, "Proxy-Auth") {
				t.Errorf("%s: %s is passed on", w.name, k)
			}
		}
		if strings.Contains(fmt.Sprintf("%+v", s[0]), "toktok") {
			t.Error("the token is in the submission")
		}
	}
	if l := b.log.String(); strings.Contains(l, "toktok") || strings.Contains(l, "dG9r") {
		t.Errorf("log: %s", l)
	}
}

// TestKeepAliveLeavesNothing: 1,000 requests through one intercepted keep-alive
// connection leave goroutines and descriptors where they were.
func TestKeepAliveLeavesNothing(t *testing.T) {
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			b := newBed(t)
			client := b.client(nil, w.h2)
			get := func() {
				resp, err := client.Post(w.scheme+"://pay.example.test/", "text/plain", strings.NewReader("x"))
				if err != nil {
					t.Fatal(err)
				}
				_, _ = io.Copy(io.Discard, resp.Body)
				_ = resp.Body.Close()
			}
			get()
			goroutines, files := settled(runtime.NumGoroutine), openFiles(t)
			for range 1000 {
				get()
			}
			if n := settled(runtime.NumGoroutine); n > goroutines {
				t.Errorf("%d goroutines, %d before", n, goroutines)
			}
			if n := openFiles(t); n > files {
				t.Errorf("%d descriptors, %d before", n, files)
			}
			b.pipe.requests()
		})
	}
}

// TestConnectionsLeaveNothing: connections that are opened, misused and dropped are
// gone afterwards.
func TestConnectionsLeaveNothing(t *testing.T) {
	b := newBed(t)
	once := func() {
		c := b.connectTo("pay.example.test:443")
		_ = c.Close() // a tunnel that is not used
		c = b.connectTo("pay.example.test:443")
		_, _ = io.WriteString(c, "\x16\x03\x01garbage")
		_ = c.Close()
		c = b.dial()
		_, _ = io.WriteString(c, "GARBAGE\r\n\r\n")
		_, _ = io.Copy(io.Discard, c)
		_ = c.Close()
		c = b.tlsInside(b.connectTo("pay.example.test:443"), "pay.example.test")
		fmt.Fprintf(c, "GET / HTTP/1.1\r\n%s\r\n", h11)
		readAnswer(t, bufio.NewReader(c), "GET")
		_ = c.Close()
	}
	once()
	eventually(t, "no tunnels", func() bool { return b.p.hijacked.count() == 0 })
	goroutines, files := settled(runtime.NumGoroutine), openFiles(t)
	for range 20 {
		once()
	}
	eventually(t, "no tunnels", func() bool { return b.p.hijacked.count() == 0 })
	if n := settled(runtime.NumGoroutine); n > goroutines {
		t.Errorf("%d goroutines, %d before", n, goroutines)
	}
	if n := openFiles(t); n > files {
		t.Errorf("%d descriptors, %d before", n, files)
	}
}

// TestShutdown: requests in flight are answered, idle connections end, new ones are
// not accepted, and tunnels are counted.
func TestShutdown(t *testing.T) {
	for _, w := range ways {
		t.Run(w.name, func(t *testing.T) {
			b := newBed(t)
			started, release := make(chan struct{}), make(chan struct{})
			var once sync.Once
			b.pipe.answer = func(context.Context, *seen) *dispatch.Reply {
				once.Do(func() { close(started) })
				<-release
				return b.pipe.reply(200, nil, []byte("in flight"))
			}
			idle := b.dial() // no request yet
			unused := b.connectTo("pay.example.test:443")
			got := make(chan string, 1)
			go func() {
				resp, err := b.client(nil, w.h2).Get(w.scheme + "://pay.example.test/")
				if err != nil {
					got <- err.Error()
					return
				}
				body, err := io.ReadAll(resp.Body)
				got <- fmt.Sprint(string(body), err)
			}()
			<-started
			down := make(chan error, 1)
			go func() {
				ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
				defer cancel()
				down <- b.p.Shutdown(ctx)
			}()
			closed(t, unused)
			if c, err := net.DialTimeout("tcp", b.addr, time.Second); err == nil {
				// Accepted by the kernel before the listener closed, then reset.
				_ = c.Close()
			}
			select {
			case err := <-down:
				t.Fatalf("shut down with a request in flight: %v", err)
			case <-time.After(50 * time.Millisecond):
			}
			close(release)
			if s := <-got; s != "in flight<nil>" {
				t.Errorf("the request in flight got %q", s)
			}
			if err := <-down; err != nil {
				t.Errorf("shutdown: %v", err)
			}
			closed(t, idle)
			if n := b.p.hijacked.count(); n != 0 {
				t.Errorf("%d tunnels left", n)
			}
		})
	}
}

// TestShutdownGivesUp: what does not end in time is closed, and said so.
func TestShutdownGivesUp(t *testing.T) {
	b := newBed(t)
	release := make(chan struct{})
	t.Cleanup(func() { close(release) })
	var in atomic.Bool
	b.pipe.answer = func(context.Context, *seen) *dispatch.Reply {
		in.Store(true)
		<-release
		return b.pipe.reply(200, nil, nil)
	}
	c := b.connectTo("pay.example.test:80")
	fmt.Fprintf(c, "GET / HTTP/1.1\r\n%s\r\n", h11)
	eventually(t, "the request", in.Load)
	ctx, cancel := context.WithTimeout(context.Background(), 50*time.Millisecond)
	defer cancel()
	if err := b.p.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("shutdown: %v", err)
	}
	closed(t, c)
}

// TestServeNeedsAuthentication is CONTRACT V4: others than this machine are not let
// in while callers need not say who they are.
func TestServeNeedsAuthentication(t *testing.T) {
	contract.Covers(t, "V4")
	b := newBed(t)
	ln, err := net.Listen("tcp", "0.0.0.0:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := b.p.Serve(context.Background(), ln); !errors.Is(err, ErrAuthenticationRequired) {
		t.Errorf("serve: %v", err)
	}
	if _, err := ln.Accept(); err == nil {
		t.Error("the listener is still open")
	}
}
