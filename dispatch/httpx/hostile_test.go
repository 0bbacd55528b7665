package httpx

import (
	"context"
	"errors"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

// TestAmbiguousFraming: fields that net/http passes over and other readers obey.
func TestAmbiguousFraming(t *testing.T) {
	contract.Covers(t, "G1", "G2")
	const interim = "HTTP/1.1 103 Early Hints\r\nTransfer-Encoding : x\r\n\r\n"
	for _, c := range []struct {
		name, answer string
		complete     bool
		method       string
	}{
		{name: "coding in HTTP/1.0", answer: "HTTP/1.0 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\nok"},
		{name: "space before the colon of the coding", answer: "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding : chunked\r\n\r\nok"},
		{name: "space before the colon of the length", answer: "HTTP/1.1 200 OK\r\nContent-Length : 9\r\n\r\nok"},
		{name: "folded", answer: "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nX: y\r\n Transfer-Encoding: chunked\r\n\r\nok"},
		{name: "behind an interim answer in one piece", answer: interim + "HTTP/1.1 200 OK\r\nContent-Length : 9\r\n\r\nok"},
		{name: "in the interim answer only", answer: interim + "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok", complete: true},
		{name: "length and coding", answer: "HTTP/1.1 200 OK\r\nContent-Length: 9\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n", complete: true},
		{name: "no body", method: "HEAD", answer: "HTTP/1.1 200 OK\r\nContent-Length : 9\r\n\r\n", complete: true},
		{name: "HTTP/1.0", answer: "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok", complete: true},
	} {
		t.Run(c.name, func(t *testing.T) {
			rig := newRig(t)
			up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: rig.ca.Server(host), Script: []testkit.Turn{testkit.Respond(testkit.Write(c.answer), testkit.Close())}})
			method, body := "POST", "x"
			if c.method != "" {
				method, body = c.method, ""
			}
			end, _, _ := rig.send(order("https", up.Addr()), outgoing(method, "/", body))
			if end.Complete != c.complete || !c.complete && end.Code != outcome.CodeRemoteProtocolError || end.Status != 200 {
				t.Errorf("complete %v code %v status %d framing %q", end.Complete, end.Code, end.Status, end.Framing)
			}
		})
	}
}

// TestHeadWatch: however the bytes arrive, the same is seen.
func TestHeadWatch(t *testing.T) {
	contract.Covers(t, "G1")
	for _, c := range []struct {
		text                 string
		done, coding, spaced bool
		sample               string
	}{
		{"HTTP/1.1 200 OK\r\n\r\n", true, false, false, "HTTP/1.1 200 OK\r\n\r\n"},
		{"HTTP/1.1 200 OK\n\n", true, false, false, "HTTP/1.1 200 OK\n\n"},
		{"HTTP/1.1 100 C\r\n\r\nHTTP/1.1  103 E\r\nTransfer-Encoding : x\r\n\r\nHTTP/1.1 20", false, false, false, "HTTP/1.1 20"},
		{"HTTP/1.1 101 S\r\n\r\nHTTP", true, false, false, "HTTP/1.1 101 S\r\n\r\n"},
		{"HTTP/1.1 1000\r\n\r\nHTTP", true, false, false, "HTTP/1.1 1000\r\n\r\n"},
		{"HTTP/1.1 200 OK\r\ntransfer-ENCODING:chunked\r\n\r\n0\r\n", true, true, false, "HTTP/1.1 200 OK\r\ntransfer-ENCODING:chunked\r\n\r\n"},
		{"HTTP/1.1 200 OK\r\nContent-Length\t: 1\r\n\r\nx", true, false, true, "HTTP/1.1 200 OK\r\nContent-Length\t: 1\r\n\r\n"},
		{"HTTP/1.1 200 OK\r\nX: " + strings.Repeat("y", 600) + "Transfer-Encoding : z\r\n\r\n", true, false, false, ("HTTP/1.1 200 OK\r\nX: " + strings.Repeat("y", 600))[:maxHeadSample]},
		{"HTTP/1.1 200 Content-Length : 1\r\n\r\n", true, false, false, "HTTP/1.1 200 Content-Length : 1\r\n\r\n"},
	} {
		for _, size := range []int{1, 2, 3, 7, len(c.text)} {
			var w headWatch
			for rest := c.text; rest != ""; {
				n := min(size, len(rest))
				w.feed([]byte(rest[:n]))
				rest = rest[n:]
			}
			if w.done != c.done || w.coding != c.coding || w.spaced != c.spaced || string(w.sample) != c.sample {
				t.Errorf("%q by %d: done %v coding %v spaced %v sample %q", c.text, size, w.done, w.coding, w.spaced, w.sample)
			}
		}
	}
}

// TestHandOverChecksTheOrigin: a request never leaves on a connection to another
// origin, whoever confused the two (V2).
func TestHandOverChecksTheOrigin(t *testing.T) {
	contract.Covers(t, "V2", "E6")
	rig := newRig(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: rig.ca.Server(host), Handler: func(testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Reply(200, "ok")}
	}})
	for _, change := range []func(*dispatch.Outgoing){
		func(o *dispatch.Outgoing) { o.Target.Host = "evil.example.test" },
		func(o *dispatch.Outgoing) { o.Target.Scheme = "http" },
		func(o *dispatch.Outgoing) { o.Target.Port = 8443 },
	} {
		c, err := rig.tr.Connect(t.Context(), order("https", up.Addr()))
		if err != nil {
			t.Fatal(err)
		}
		out := outgoing("POST", "/v1/charges", "x")
		change(out)
		end := c.Exchange(t.Context(), out, &record{})
		c.Release()
		if end.Complete || end.Code != outcome.CodeRemoteOutcomeUnknown || !errors.Is(end.Err, errOrigin) {
			t.Errorf("%+v", end)
		}
	}
	up.RequireCount(t, 0, "", "")
}

// TestCertificateAlertLater: the alert proves a refusal only as the end of the
// handshake (G8); behind an answered request it proves nothing.
func TestCertificateAlertLater(t *testing.T) {
	contract.Covers(t, "G8")
	rig := newRig(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: rig.ca.RequireClient(rig.ca.Server(host))})
	o := order("https", up.Addr())
	for _, c := range []struct {
		change func(*conn)
		want   outcome.Code
	}{
		{func(*conn) {}, outcome.CodeClientCertificateRequired},
		{func(c *conn) { c.began = true }, outcome.CodeRemoteOutcomeUnknown},
		{func(c *conn) { c.peer.TLSVersion = "TLS 1.2" }, outcome.CodeRemoteOutcomeUnknown},
	} {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
		got, err := rig.tr.Connect(ctx, o)
		if err != nil {
			t.Fatal(err)
		}
		c.change(got.(*conn))
		end := got.Exchange(ctx, outgoing(http.MethodPost, "/", "x"), &record{})
		got.Release()
		cancel()
		if end.Code != c.want || (end.Proof != "") != (c.want == outcome.CodeClientCertificateRequired) {
			t.Errorf("%v %q, want %v", end.Code, end.Proof, c.want)
		}
	}
}

// TestFrameParser: split anywhere, HEADERS with CONTINUATION, frames of other streams.
func TestFrameParser(t *testing.T) {
	contract.Covers(t, "G8")
	frame := func(kind, flags byte, stream uint32, payload string) string {
		n := len(payload)
		return string([]byte{byte(n >> 16), byte(n >> 8), byte(n), kind, flags, byte(stream >> 24), byte(stream >> 16), byte(stream >> 8), byte(stream)}) + payload
	}
	refuse := "\x00\x00\x00\x07"
	away := func(last byte) string { return "\x00\x00\x00" + string([]byte{last}) + "\x00\x00\x00\x00debug data" }
	for _, c := range []struct {
		name                     string
		in                       string
		refused, goaway, headers bool
	}{
		{"refused", frame(4, 0, 0, "") + frame(3, 0, 3, refuse), true, false, false},
		{"another stream", frame(3, 0, 1, refuse) + frame(1, 4, 1, "x"), false, false, false},
		{"reserved bit", frame(3, 0, 1<<31|3, refuse), true, false, false},
		{"another code", frame(3, 0, 3, "\x00\x00\x00\x08"), false, false, false},
		{"short reset", frame(3, 0, 3, "\x07"), false, false, false},
		{"payload that looks like a frame", frame(0, 0, 3, frame(3, 0, 3, refuse)+frame(7, 0, 0, away(0))), false, false, false},
		{"padding of a goaway that looks like a frame", frame(7, 0, 0, away(3)+frame(3, 0, 3, refuse)), false, false, false},
		{"headers and continuation", frame(1, 0, 3, "x") + frame(9, 4, 3, frame(3, 0, 3, refuse)), false, false, true},
		{"goaway below", frame(7, 0, 0, away(1)), false, true, false},
		{"goaway at", frame(7, 0, 0, away(3)), false, false, false},
		{"graceful, then below", frame(7, 0, 0, "\x7f\xff\xff\xff\x00\x00\x00\x00") + frame(7, 0, 0, away(1)), false, true, false},
		{"refused behind a head", frame(1, 4, 3, "x") + frame(3, 0, 3, refuse), true, false, true},
	} {
		for _, size := range []int{1, 5, 9, 10, 1 << 20} {
			tp := &tap{h2: true}
			tp.out.skip = len(preface)
			tp.out.feed([]byte(preface+frame(4, 0, 0, "")+frame(1, 4, 3, "x")), tp.frameOut)
			for rest := c.in; rest != ""; {
				n := min(size, len(rest))
				tp.in.feed([]byte(rest[:n]), tp.frameIn)
				rest = rest[n:]
			}
			if tp.stream != 3 || tp.refused != c.refused || tp.goaway != c.goaway || tp.headers != c.headers {
				t.Errorf("%s by %d: stream %d refused %v goaway %v headers %v", c.name, size, tp.stream, tp.refused, tp.goaway, tp.headers)
			}
		}
	}
}

// held is a TLS connection that holds a whole record: it reads without the wire.
type held struct{ net.Conn }

func (held) Read(p []byte) (int, error) { return copy(p, "HTTP/1.1 200 OK\r\n"), nil }

// TestRecordsBehindTheAnswer: bytes that wait inside TLS are bytes that wait, and such
// a connection is never offered to another request (FR-04).
func TestRecordsBehindTheAnswer(t *testing.T) {
	contract.Covers(t, "E6")
	near, far := net.Pipe()
	t.Cleanup(func() { _, _ = near.Close(), far.Close() })
	offered := 0
	tp := &tap{Conn: held{near}, raw: &rawConn{Conn: near}, idle: func() { offered++ }}
	tp.raw.wire = tp.wire
	tp.mark()
	if tp.rest() {
		t.Error("at rest before the reader waits")
	}
	if n, err := tp.Read(make([]byte, 64)); n != 0 || !errors.Is(err, errUnsolicited) || offered != 0 {
		t.Errorf("%d bytes, %v, offered %d times", n, err, offered)
	}
	// The reader wants the wire: nothing is held.
	tp = &tap{Conn: near, raw: &rawConn{Conn: near}, idle: func() { offered++ }}
	tp.raw.wire = tp.wire
	tp.Conn = tp.raw
	tp.mark()
	tp.rest()
	go func() { _ = far.Close() }()
	if _, err := tp.Read(make([]byte, 64)); err == nil || offered != 1 {
		t.Errorf("%v, offered %d times", err, offered)
	}
}
