package e2e

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/websocket"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// wsOrigin is a WebSocket server: it greets at once, echoes, says the secret when told
// to, closes when told to, and counts handshakes.
func wsOrigin(t *testing.T, ca *testkit.CA, host string) (addr string, handshakes *atomic.Int64) {
	t.Helper()
	handshakes = &atomic.Int64{}
	ln, err := tls.Listen("tcp", "127.0.0.1:0", ca.Server(host))
	if err != nil {
		t.Fatal(err)
	}
	mux := http.NewServeMux()
	mux.Handle("/v1/ws", websocket.Server{Handler: func(c *websocket.Conn) {
		handshakes.Add(1)
		_ = websocket.Message.Send(c, "hello "+fmt.Sprint(len(c.Request().Header["Authorization"])))
		for {
			var m string
			if err := websocket.Message.Receive(c, &m); err != nil {
				return
			}
			switch m {
			case "leak":
				m = "you sent " + c.Request().Header.Get("Authorization") + "!"
			case "bye":
				return
			}
			if err := websocket.Message.Send(c, m); err != nil {
				return
			}
		}
	}})
	mux.HandleFunc("/v1/no", func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "not today", http.StatusForbidden) })
	mux.HandleFunc("/v1/forged", func(w http.ResponseWriter, _ *http.Request) {
		handshakes.Add(1)
		c, _, err := http.NewResponseController(w).Hijack()
		if err != nil {
			return
		}
		_, _ = io.WriteString(c, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Accept: AAAAAAAAAAAAAAAAAAAAAAAAAAA=\r\n\r\nno websocket")
		_ = c.Close()
	})
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: patience}
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { _ = srv.Close() })
	return ln.Addr().String(), handshakes
}

// wsDial makes a handshake through the proxy, inside a tunnel.
func wsDial(t *testing.T, r *rig, host, path string) (*websocket.Conn, error) {
	t.Helper()
	raw := testkit.Tunnel(t, r.addr, host+":443", r.roots())
	cfg, err := websocket.NewConfig("wss://"+host+path, "https://"+host)
	if err != nil {
		t.Fatal(err)
	}
	return websocket.NewClient(cfg, raw)
}

// TestUpgradeTunnel carries WebSockets through the real binary: the secret is in the
// handshake, a 101 is final for it (G4), and what passes is counted, not judged.
func TestUpgradeTunnel(t *testing.T) {
	contract.Covers(t, "G4", "C5", "C2")
	t.Parallel()
	ca := testkit.NewCA(t)
	const host, strict = "ws.example.test", "strict.example.test"
	addr, handshakes := wsOrigin(t, ca, host)
	strictAddr, _ := wsOrigin(t, ca, strict)
	route := func(name, host, addr, more string) string {
		return fmt.Sprintf("  - name: %s\n    match: {host: %s}\n    upgrade: tunnel\n    inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: pay}]\n    upstream: {roots: roots.pem, resolve: {%s: %q}}\n%s",
			name, host, host, addr, more)
	}
	r := newRig(t, ca, rigOptions{first: route("ws", host, addr, "    limits: {idle: 2s, timeout: 1s}\n") + route("strict", strict, strictAddr, "    leak: block\n")})
	r.start()
	b := &bed{rig: r}
	ended := func(path string, n int) []dispatch.ActionView {
		t.Helper()
		var got []dispatch.ActionView
		testkit.Eventually(t, func() error {
			got = got[:0]
			for _, v := range byTarget(r.actions(), path) {
				if v.Outcome != "committed" {
					continue
				}
				if s := b.tell(t, v.InvocationID); s.count(dispatch.UpgradeClosed) != 1 {
					return errors.New("a connection is not closed")
				}
				got = append(got, v)
			}
			if len(got) != n {
				return fmt.Errorf("%d actions, want %d", len(got), n)
			}
			return nil
		})
		return got
	}

	c, err := wsDial(t, r, host, "/v1/ws")
	if err != nil {
		t.Fatal(err)
	}
	say := func(c *websocket.Conn, say, want string) {
		t.Helper()
		_ = c.SetDeadline(time.Now().Add(patience))
		if say != "" {
			if err := websocket.Message.Send(c, say); err != nil {
				t.Fatal(err)
			}
		}
		var got string
		if err := websocket.Message.Receive(c, &got); err != nil || got != want {
			t.Fatalf("%q: %q %v, want %q", say, got, err, want)
		}
	}
	say(c, "", "hello 1")
	// A message that ends like the beginning of the secret arrives all the same, and what
	// goes on as the secret is masked behind it.
	value := r.canary.Value()
	say(c, "plan "+value[:3], "plan "+value[:3])
	say(c, "plan "+value[:1], "plan "+value[:1])
	big := strings.Repeat("x", 200<<10)
	say(c, big, big)
	say(c, "leak", "you sent Bearer "+strings.Repeat("*", len(value))+"!")
	say(c, "still there", "still there")
	if err := websocket.Message.Send(c, "bye"); err != nil {
		t.Fatal(err)
	}
	if _, err := io.Copy(io.Discard, c); err != nil && !errors.Is(err, net.ErrClosed) {
		t.Logf("the end: %v", err)
	}
	v := ended("/v1/ws", 1)[0]
	if v.Outcome != "committed" || v.Phase != "remote_execution" || v.Retry != "never" || v.Code != "" {
		t.Errorf("%+v", v)
	}
	s := b.tell(t, v.InvocationID)
	if e := s.Envelope.Evidence; e.Carried == nil || e.Carried.BytesIn < int64(len(big)) || e.Carried.BytesOut < int64(len(big)) || e.Redacted != 1 || e.Framing != "switching_protocols" || e.ReceivedStatus != 101 {
		t.Errorf("evidence %+v", e)
	}
	if n := s.count(dispatch.DispatchStarted); n != 1 || handshakes.Load() != 1 {
		t.Errorf("%d dispatches, %d handshakes", n, handshakes.Load())
	}
	if m := get(t, r.meters); !strings.Contains(m, `waybill_leak_guard_hits_total{result="masked",route="ws"} 1`) {
		t.Error("the masked secret is not counted (C5)")
	}
	// There is nothing to fetch of a connection.
	if code, out, _ := r.cli("result", v.InvocationID); code == 0 || strings.Contains(out, "hello") {
		t.Errorf("waybill result: %d %q", code, out)
	}

	// Long silence ends it; the timeout of the route is that of the handshake alone.
	if c, err = wsDial(t, r, host, "/v1/ws?quiet"); err != nil {
		t.Fatal(err)
	}
	say(c, "", "hello 1")
	_ = c.SetDeadline(time.Now().Add(patience))
	start := time.Now()
	var m string
	if err := websocket.Message.Receive(c, &m); err == nil {
		t.Errorf("got %q", m)
	} else if d := time.Since(start); d < 1500*time.Millisecond {
		t.Errorf("ended after %v", d)
	}

	// Refused by the origin: an ordinary answer, on a connection that goes on.
	raw := testkit.Tunnel(t, r.addr, host+":443", r.roots())
	const handshake = " HTTP/1.1\r\nHost: " + host + "\r\nConnection: keep-alive, Upgrade\r\nUpgrade: websocket\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Extensions: permessage-deflate\r\n\r\n"
	for range 50 { // one connection: what ends the holding back of one must not end that of the next
		if resp := raw.Roundtrip(t, "GET /v1/no"+handshake); resp.Status != 403 || !strings.Contains(string(resp.Body), "not today") {
			t.Errorf("%d %q", resp.Status, resp.Body)
		}
	}
	// What follows a handshake that was refused is no request, however it looks.
	before := len(r.actions())
	raw.Roundtrip(t, "GET /v1/no"+handshake+"GET /v1/smuggled HTTP/1.1\r\nHost: "+host+"\r\n\r\n")
	if got := byTarget(r.actions(), "/v1/smuggled"); len(got) != 0 || len(r.actions()) != before+1 {
		t.Errorf("what followed was read as a request: %+v", got)
	}
	// A 101 that does not answer this handshake is no answer.
	raw = testkit.Tunnel(t, r.addr, host+":443", r.roots())
	if resp := raw.Roundtrip(t, "GET /v1/forged"+handshake); resp.Status == 101 {
		t.Errorf("a forged 101 was relayed")
	}
	if got := byTarget(r.actions(), "/v1/forged"); len(got) != 1 || got[0].Outcome != "unknown" || got[0].Code != "REMOTE_PROTOCOL_ERROR" {
		t.Errorf("forged: %+v", got)
	}
	// Only WebSocket, only as a GET.
	for _, req := range []string{"POST /v1/ws" + strings.Replace(handshake, "\r\n\r\n", "\r\nContent-Length: 2\r\n\r\nhi", 1), "GET /v1/ws" + strings.Replace(handshake, "Upgrade: websocket", "Upgrade: websocket, foo", 1)} {
		raw = testkit.Tunnel(t, r.addr, host+":443", r.roots())
		if resp := raw.Roundtrip(t, req); resp.Status != 422 || !strings.Contains(string(resp.Body), "UNSUPPORTED_ACTION") {
			t.Errorf("%.20q: %d %s", req, resp.Status, resp.Body)
		}
	}

	// leak: block ends the connection with the secret unsaid.
	if c, err = wsDial(t, r, strict, "/v1/ws"); err != nil {
		t.Fatal(err)
	}
	say(c, "", "hello 1")
	if err := websocket.Message.Send(c, "leak"); err != nil {
		t.Fatal(err)
	}
	_ = c.SetDeadline(time.Now().Add(patience))
	if err := websocket.Message.Receive(c, &m); err == nil {
		t.Errorf("got %q", m)
	}

	testkit.Eventually(t, func() error {
		if m := get(t, r.meters); !strings.Contains(m, `waybill_leak_guard_hits_total{result="blocked",route="strict"} 1`) {
			return errors.New("the blocked connection is not counted (C5)")
		}
		return nil
	})

	// SIGTERM waits for a connection that is open, and the end is on record.
	if c, err = wsDial(t, r, host, "/v1/ws"); err != nil {
		t.Fatal(err)
	}
	say(c, "", "hello 1")
	_ = c.Close()
	ended("/v1/ws", 3)
	r.p.Signal(t, syscall.SIGTERM)
	if code := r.p.Wait(t, patience); code != 0 {
		t.Errorf("exit status %d", code)
	}
	testkit.Search(t, r.canary, testkit.In(r.data), testkit.InString("log", r.p.Stderr()))
	r.verify()
}
