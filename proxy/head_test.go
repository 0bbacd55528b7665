package proxy

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httputil"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

const h11 = "Host: pay.example.test\r\n"

// TestSmugglingHeads sends each head over a real socket: one envelope with the
// expected code and reason, a record of the refusal, and the connection closed. No
// head reaches the pipeline as a request, and nothing after it is read as one.
func TestSmugglingHeads(t *testing.T) {
	contract.Covers(t, "B1", "B2", "L1", "M6")
	b := newBed(t)
	for _, c := range testkit.SmugglingHeads() {
		for _, place := range []string{"first", "second"} {
			t.Run(c.Name+"/"+place, func(t *testing.T) {
				conn := b.dial()
				r := bufio.NewReader(conn)
				wire := c.Wire
				if place == "second" {
					// Pipelined behind a good request: it is answered in its turn.
					wire = "POST http://pay.example.test/good HTTP/1.1\r\n" + h11 + "Content-Length: 2\r\n\r\nhi" + wire
				}
				if _, err := io.WriteString(conn, wire); err != nil {
					t.Fatal(err)
				}
				if place == "second" {
					if a := readAnswer(t, r, "POST"); a.status != 200 || string(a.body) != "ok" {
						t.Fatalf("the good request got %d %q", a.status, a.body)
					}
				}
				a := readAnswer(t, r, "GET")
				env := a.envelope(t)
				if env.Error.Code.String() != c.Code || env.Evidence.Reason != c.Reason {
					t.Errorf("got %s %q, want %s %q", env.Error.Code, env.Evidence.Reason, c.Code, c.Reason)
				}
				if want := outcome.Lookup(env.Error.Code).Status; a.status != want {
					t.Errorf("status %d, want %d", a.status, want)
				}
				if env.Evidence.Field == "" || env.InvocationID == "" || a.header.Get("Waybill-Invocation") != env.InvocationID {
					t.Errorf("field %q, invocation %q", env.Evidence.Field, env.InvocationID)
				}
				if a.header.Get("Connection") != "close" {
					t.Error("no Connection: close")
				}
				closed(t, r)
				subs := b.pipe.requests()
				if place == "second" {
					if len(subs) != 2 || string(subs[0].body) != "hi" {
						t.Fatalf("%d submissions", len(subs))
					}
					subs = subs[1:]
				}
				if len(subs) != 1 || subs[0].Refused == nil || subs[0].Body != nil {
					t.Fatalf("%d submissions; a refused head must reach the pipeline as a refusal only", len(subs))
				}
			})
		}
	}
}

// TestHeadTooLarge: the limit is answered by PAYLOAD_LIMIT, not by net/http.
func TestHeadTooLarge(t *testing.T) {
	contract.Covers(t, "B1")
	b := newBed(t)
	for name, wire := range map[string]string{
		"bytes":  "GET http://pay.example.test/ HTTP/1.1\r\n" + h11 + "X: " + strings.Repeat("a", 70<<10) + "\r\n\r\n",
		"target": "GET http://pay.example.test/" + strings.Repeat("a", 70<<10) + " HTTP/1.1\r\n" + h11 + "\r\n",
		"fields": "GET http://pay.example.test/ HTTP/1.1\r\n" + h11 + strings.Repeat("X: a\r\n", 600) + "\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			conn := b.dial()
			go func() { _, _ = io.WriteString(conn, wire) }()
			a := readAnswer(t, bufio.NewReader(conn), "GET")
			if env := a.envelope(t); a.status != 413 || env.Error.Code != outcome.CodePayloadLimit {
				t.Errorf("%d %s", a.status, env.Error.Code)
			}
		})
	}
}

// TestGoodHeads: what is merely unusual goes through, unchanged.
func TestGoodHeads(t *testing.T) {
	b := newBed(t)
	for name, c := range map[string]struct {
		wire string
		ok   func(s seen) bool
	}{
		"HTTP/1.0": {"GET http://pay.example.test/x HTTP/1.0\r\n\r\n", func(s seen) bool {
			return s.Authorities.URL == "pay.example.test" && s.Authorities.Host == "" && s.RawPath == "/x"
		}},
		"leading empty lines": {"\r\n\r\nGET http://pay.example.test/x HTTP/1.1\r\n" + h11 + "\r\n", func(s seen) bool { return s.RawPath == "/x" }},
		"no path":             {"GET http://pay.example.test HTTP/1.1\r\n" + h11 + "\r\n", func(s seen) bool { return s.RawPath == "" && !s.HasQuery }},
		"query only":          {"GET http://pay.example.test?a=b HTTP/1.1\r\n" + h11 + "\r\n", func(s seen) bool { return s.RawPath == "" && s.HasQuery && s.RawQuery == "a=b" }},
		"empty query":         {"GET http://pay.example.test/? HTTP/1.1\r\n" + h11 + "\r\n", func(s seen) bool { return s.RawPath == "/" && s.HasQuery && s.RawQuery == "" }},
		"bytes of the path":   {"GET http://pay.example.test/v1/@s%2fpkg;a=%2E?x=%zz HTTP/1.1\r\n" + h11 + "\r\n", func(s seen) bool { return s.RawPath == "/v1/@s%2fpkg;a=%2E" && s.RawQuery == "x=%zz" }},
		"dot segments":        {"GET http://pay.example.test/v1/../x\\y HTTP/1.1\r\n" + h11 + "\r\n", func(s seen) bool { return s.RawPath == "/v1/../x\\y" }},
		"two slashes":         {"GET http://pay.example.test//admin HTTP/1.1\r\n" + h11 + "\r\n", func(s seen) bool { return s.RawPath == "//admin" }},
		"Host disagrees": {"GET http://evil.example.test/x HTTP/1.1\r\n" + h11 + "\r\n", func(s seen) bool {
			return s.Authorities.URL == "evil.example.test" && s.Authorities.Host == "pay.example.test"
		}},
		"https URL": {"GET HTTPS://pay.example.test:8443/x HTTP/1.1\r\nHost: pay.example.test:8443\r\n\r\n", func(s seen) bool { return s.Scheme == "https" && s.Authorities.URL == "pay.example.test:8443" }},
		"chunked with trailer": {"POST http://pay.example.test/x HTTP/1.1\r\n" + h11 + "Transfer-Encoding: Chunked\r\n\r\n2;x=y\r\nhi\r\n0\r\nX-Sum: 1\r\nAuthorization: no\r\n\r\n", func(s seen) bool {
			return string(s.body) == "hi" && s.trailer.Get("X-Sum") == "1" && len(s.trailer) == 1 && s.ContentLength == -1
		}},
		"obs-text":        {"GET http://pay.example.test/x HTTP/1.1\r\n" + h11 + "X: \xff\xfe\r\n\r\n", func(s seen) bool { return s.header.Get("X") == "\xff\xfe" }},
		"GET with a body": {"GET http://pay.example.test/x HTTP/1.1\r\n" + h11 + "Content-Length: 2\r\n\r\nhi", func(s seen) bool { return string(s.body) == "hi" && s.ContentLength == 2 }},
		"length 0":        {"POST http://pay.example.test/x HTTP/1.1\r\n" + h11 + "Content-Length: 0\r\n\r\n", func(s seen) bool { return s.Submission.Body == nil && s.ContentLength == 0 }},
	} {
		t.Run(name, func(t *testing.T) {
			conn := b.dial()
			// In pieces, so that no boundary of a read is special.
			for _, piece := range pieces(c.wire, 7) {
				if _, err := io.WriteString(conn, piece); err != nil {
					t.Fatal(err)
				}
			}
			a := readAnswer(t, bufio.NewReader(conn), "GET")
			subs := b.pipe.requests()
			if a.status != 200 || len(subs) != 1 || subs[0].Refused != nil || !c.ok(subs[0]) {
				t.Errorf("status %d %s: %+v", a.status, a.body, subs)
			}
		})
	}
}

func pieces(s string, n int) []string {
	var out []string
	for len(s) > n {
		out, s = append(out, s[:n]), s[n:]
	}
	return append(out, s)
}

// TestIncompleteHead: a head that does not end is answered, not dropped.
func TestIncompleteHead(t *testing.T) {
	b := newBed(t, func(c *Config) { c.Limits.HeadTimeout = 100 * time.Millisecond })
	for name, half := range map[string]func(*net.TCPConn){
		"timeout":    func(*net.TCPConn) {},
		"half-close": func(c *net.TCPConn) { _ = c.CloseWrite() },
	} {
		t.Run(name, func(t *testing.T) {
			conn := b.dial()
			_, _ = io.WriteString(conn, "GET http://pay.example.test/ HTTP/1.1\r\nHost: pay")
			half(conn)
			r := bufio.NewReader(conn)
			a := readAnswer(t, r, "GET")
			if env := a.envelope(t); a.status != 400 || env.Evidence.Reason != "incomplete_head" {
				t.Errorf("%d %s", a.status, a.body)
			}
			closed(t, r)
		})
	}
}

// TestBrokenBodies: bad framing inside a body is an incomplete request, refused and
// answered, never a clean end (case UP-03).
func TestBrokenBodies(t *testing.T) {
	contract.Covers(t, "B1")
	b := newBed(t)
	const head = "POST http://pay.example.test/x HTTP/1.1\r\n" + h11 + "Transfer-Encoding: chunked\r\n\r\n"
	for name, c := range map[string]struct {
		wire string
		fin  bool
	}{
		"short length":          {"POST http://pay.example.test/x HTTP/1.1\r\n" + h11 + "Content-Length: 100\r\n\r\n{\"a\":1}", true},
		"no last chunk":         {head + "7\r\n{\"a\":1}\r\n", true},
		"cut in a chunk":        {head + "7\r\n{\"a\"", true},
		"no digits":             {head + "\r\n", false},
		"bad digit":             {head + "g\r\n", false},
		"sign":                  {head + "+2\r\nhi\r\n0\r\n\r\n", false},
		"0x":                    {head + "0x2\r\nhi\r\n0\r\n\r\n", false},
		"space after the size":  {head + "2 \r\nhi\r\n0\r\n\r\n", false},
		"bare LF":               {head + "2\nhi\n0\n\n", false},
		"too long a chunk":      {head + "2\r\nhiX\r\n0\r\n\r\n", false},
		"size overflows":        {head + "ffffffffffffffff1\r\n", false},
		"bare CR in extension":  {head + "2;a\rb\r\nhi\r\n0\r\n\r\n", false},
		"LF in extension":       {head + "2;a\nb\r\nhi\r\n0\r\n\r\n", false},
		"trailer without name":  {head + "0\r\n: x\r\n\r\n", false},
		"trailer space":         {head + "0\r\nX : x\r\n\r\n", false},
		"trailer folded":        {head + "0\r\nX: x\r\n y\r\n\r\n", false},
		"smuggled after a 0":    {head + "0\r\nGET /admin HTTP/1.1\r\nHost: x\r\n\r\n", false},
		"endless extension":     {head + "2;" + strings.Repeat("a", 2000) + "\r\nhi\r\n0\r\n\r\n", false},
		"endless trailer":       {head + "0\r\n" + strings.Repeat("X: aaaaaaaaaaaaaaaa\r\n", 300) + "\r\n", false},
		"control in a trailer":  {head + "0\r\nX: a\x01\r\n\r\n", false},
		"CR without LF at end":  {head + "0\r\n\rX", false},
		"data without its CRLF": {head + "2\r\nhi0\r\n\r\n", false},
	} {
		t.Run(name, func(t *testing.T) {
			conn := b.dial()
			if _, err := io.WriteString(conn, c.wire); err != nil {
				t.Fatal(err)
			}
			if c.fin {
				_ = conn.CloseWrite()
			}
			r := bufio.NewReader(conn)
			a := readAnswer(t, r, "POST")
			if env := a.envelope(t); a.status != 400 || env.Error.Code != outcome.CodeInvalidRequest || env.Evidence.Field != "request.body" || a.header.Get("Connection") != "close" {
				t.Errorf("%d %v %s", a.status, a.header, a.body)
			}
			closed(t, r)
			if subs := b.pipe.requests(); len(subs) != 1 || subs[0].bodyErr == nil {
				t.Errorf("%d submissions: a broken body must end with an error, and nothing after it is a request", len(subs))
			}
		})
	}
}

// acceptHead runs the check as headConn does; it returns the head and its length.
func acceptHead(wire []byte) (headInfo, int, bool) {
	var s headScanner
	end, v := s.scan(wire, 64<<10)
	if v != nil || end == 0 {
		return headInfo{}, 0, false
	}
	h, v := checkHead(wire[:end], false)
	return h, end, v == nil
}

// FuzzRequestHead holds the head check to its promise: what it accepts is accepted by
// net/http, with the same method, target and framing; and the handler runs.
func FuzzRequestHead(f *testing.F) {
	for _, c := range testkit.SmugglingHeads() {
		f.Add([]byte(c.Wire))
	}
	for _, s := range []string{
		"GET http://a/ HTTP/1.1\r\nHost: a\r\n\r\n", "POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 3\r\n\r\nabc", "CONNECT a:443 HTTP/1.0\r\n\r\n",
		"POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\n\r\n0\r\nX: y\r\n\r\n", "OPTIONS * HTTP/1.1\r\nHost: a\r\n\r\n",
		"PRI / HTTP/1.1\r\nHost: a\r\n\r\n", "GET / HTTP/1.0\r\nExpect: 100-continue\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
	} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, wire []byte) {
		h, end, ok := acceptHead(wire)
		if !ok {
			return
		}
		req, err := http.ReadRequest(bufio.NewReader(bytes.NewReader(wire[:end])))
		if err != nil {
			t.Fatalf("accepted a head that net/http refuses: %v\n%q", err, wire[:end])
		}
		if req.Method != h.method || req.RequestURI != h.target || req.ProtoAtLeast(1, 1) == h.http10 {
			t.Fatalf("read differently: %+v\n%q", h, wire[:end])
		}
		if h.chunked != (len(req.TransferEncoding) == 1) || !h.chunked && req.ContentLength != h.length || h.chunked && req.ContentLength != -1 {
			t.Fatalf("framed differently: %+v, net/http: %d %v\n%q", h, req.ContentLength, req.TransferEncoding, wire[:end])
		}
		served(t, wire[:end])
	})
}

// served gives a head to net/http's server and fails unless its handler runs.
func served(t *testing.T, head []byte) {
	t.Helper()
	client, server := net.Pipe()
	defer func() { _ = client.Close() }()
	var ran atomic.Bool
	done := make(chan struct{})
	srv := &http.Server{
		DisableGeneralOptionsHandler: true, MaxHeaderBytes: 1 << 20, ErrorLog: newServerLog(discard),
		Handler: http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
			ran.Store(true)
			_ = client.Close() // or the server would wait for the body
			panic(http.ErrAbortHandler)
		}),
		ConnState: func(_ net.Conn, s http.ConnState) {
			if s == http.StateClosed {
				close(done)
			}
		},
	}
	l := newHandoverListener()
	defer func() { _ = l.Close() }()
	go func() { _ = srv.Serve(l) }()
	l.hand(server)
	go func() { _, _ = io.Copy(io.Discard, client) }()
	_, _ = client.Write(head)
	<-done
	if !ran.Load() {
		t.Fatalf("net/http answered this head by itself:\n%q", head)
	}
}

// FuzzChunkFraming: what the follower takes for a whole body is a whole body for
// net/http, with the same end.
func FuzzChunkFraming(f *testing.F) {
	for _, s := range []string{
		"0\r\n\r\n", "2\r\nhi\r\n0\r\n\r\n", "a;x=y\r\n0123456789\r\n0\r\nX: y\r\nZ:\r\n\r\nGET / HTTP/1.1\r\n", "2\nhi\n0\n\n", "1\r\na\r\n00\r\n\r\n", "2 \r\nhi\r\n0\r\n\r\n",
	} {
		f.Add([]byte(s), uint8(3))
	}
	f.Fuzz(func(t *testing.T, wire []byte, step uint8) {
		n, done := followAll(wire, int(step)+1)
		if n2, done2 := followAll(wire, len(wire)+1); n2 != n || done2 != done {
			t.Fatalf("the end depends on the reads: %d %v, %d %v\n%q", n, done, n2, done2, wire)
		}
		if !done {
			return
		}
		head := "POST / HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n"
		src := bytes.NewReader(append([]byte(head), wire...))
		br := bufio.NewReader(src)
		req, err := http.ReadRequest(br)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.Copy(io.Discard, req.Body); err != nil {
			// net/http also bounds the share of framing in a body; that is a body error,
			// answered as such, and no disagreement about where the body ends.
			if strings.Contains(err.Error(), "non-data") {
				return
			}
			t.Fatalf("net/http refuses what was accepted: %v\n%q", err, wire[:n])
		}
		if rest := src.Len() + br.Buffered(); rest != len(wire)-n {
			t.Fatalf("ends differ: %d left, want %d\n%q", rest, len(wire)-n, wire)
		}
	})
}

func followAll(wire []byte, step int) (int, bool) {
	var f chunkFollower
	total := 0
	for total < len(wire) {
		n, done, err := f.feed(wire[total:min(len(wire), total+step)])
		total += n
		if done || err != nil {
			return total, done
		}
	}
	return total, false
}

// FuzzConnectTarget: an accepted CONNECT target is host:port for net/http too, and
// the host gets a leaf that names it.
func FuzzConnectTarget(f *testing.F) {
	for _, s := range []string{"a:443", "[::1]:443", "127.0.0.1:8443", "A.Example.Test.:1", "a:", ":443", "[::1]", "[fe80::1%25eth0]:443", "a:443:443", "x@y:1", "a_b.c:443"} {
		f.Add(s)
	}
	dir := f.TempDir()
	ca, err := LoadOrCreateCA(dir)
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, target string) {
		form, authority, v := checkTarget("CONNECT", target)
		if v != nil {
			return
		}
		if form != formAuthority || authority != target {
			t.Fatalf("%q became %q", target, authority)
		}
		req, err := http.ReadRequest(bufio.NewReader(strings.NewReader("CONNECT " + target + " HTTP/1.1\r\nHost: a\r\n\r\n")))
		if err != nil || req.URL.Host != target || req.RequestURI != target {
			t.Fatalf("net/http reads %q otherwise: %v", target, err)
		}
		if _, err := ca.LeafFor(authorityHost(target)); err != nil && !strings.Contains(err.Error(), "x509") {
			t.Fatalf("%q: %v", target, err)
		}
	})
}

// TestFollowerAgainstWriter: bodies that net/http's own writer makes are followed.
func TestFollowerAgainstWriter(t *testing.T) {
	for n := range 40 {
		var b bytes.Buffer
		w := httputil.NewChunkedWriter(&b)
		for i := range n {
			_, _ = fmt.Fprintf(w, "%0*d", i%300+1, i)
		}
		_ = w.Close()
		b.WriteString("\r\n")
		want := b.Len()
		b.WriteString("GET / HTTP/1.1\r\n")
		for _, step := range []int{1, 2, 3, 17, 4096} {
			if got, done := followAll(b.Bytes(), step); !done || got != want {
				t.Fatalf("%d chunks in steps of %d: %d %v, want %d", n, step, got, done, want)
			}
		}
	}
}

// TestHeadScannerByPieces: what is found in a head does not depend on how much of it is
// looked at in one go.
func TestHeadScannerByPieces(t *testing.T) {
	const head = "GET /v1/x?a=b HTTP/1.1\r\nHost: pay.example.test\r\nX:\t1 2\r\n\r\nrest"
	wires := []string{head}
	for i := range head {
		for _, c := range []string{"\r", "\n", "\t", " ", ":", "\x00", "\x1f", "\x7f", "\x80", "\xff", ""} {
			wires = append(wires, head[:i]+c+head[i+1:])
		}
	}
	for _, wire := range wires {
		for _, limit := range []int{len(wire) + 1, len(head) - 5, 30, 3} {
			var whole, pieces headScanner
			end, v := whole.scan([]byte(wire), limit)
			end2, v2 := 0, (*violation)(nil)
			for n := 1; n <= len(wire) && end2 == 0 && v2 == nil; n++ {
				end2, v2 = pieces.scan([]byte(wire[:n]), limit)
			}
			same := v == v2 || v != nil && v2 != nil && v.reason == v2.reason && v.code == v2.code
			if end != end2 || !same || v == nil && whole != pieces {
				t.Fatalf("limit %d: %d %+v at once, %d %+v byte by byte\n%q", limit, end, v, end2, v2, wire)
			}
		}
	}
}
