package e2e

import (
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/dns/dnsmessage"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// rebindInner marks the process that runs in a network and a mount namespace of its own.
const rebindInner = "WAYBILL_E2E_REBIND"

// The public address of the origin, and that of somebody else. Both are on the loopback
// device of the test's own network.
const (
	rebindRight = "93.184.216.34"
	rebindOther = "93.184.216.35"
)

// TestRebinding: a name of a route is answered with one address now and with another the
// next time. The address that was judged is the one that is dialled, each connection is
// judged anew, and neither loopback, nor cloud metadata, nor another public address gets
// the credential (CONTRACT V2, V3, EG-01).
func TestRebinding(t *testing.T) {
	contract.Covers(t, "V2", "V3", "E1", "C2")
	if os.Getenv(rebindInner) == "" {
		testkit.Binary(t) // built outside: the namespace has no network
		for _, tool := range []string{"unshare", "mount", "ip"} {
			testkit.RequireTool(t, tool)
		}
		resolv := testkit.WriteFile(t, "resolv.conf", []byte("nameserver 127.0.0.1\noptions attempts:1 timeout:2\n"))
		if err := os.Chmod(resolv, 0o644); err != nil {
			t.Fatal(err)
		}
		self, err := os.Executable()
		if err != nil {
			t.Fatal(err)
		}
		script := `set -e
mount --make-rprivate /
mount --bind "$1" "$(readlink -f /etc/resolv.conf)"
ip link set lo up
for a in ` + rebindRight + " " + rebindOther + ` 169.254.169.254 10.9.8.7; do ip addr add $a/32 dev lo; done
exec "$2" -test.run '^TestRebinding$' -test.count 1 -test.v`
		cmd := exec.CommandContext(t.Context(), "unshare", "--net", "--mount", "sh", "-c", script, "sh", resolv, self)
		cmd.Env = append(os.Environ(), rebindInner+"=1")
		out, err := cmd.CombinedOutput()
		if err != nil || !strings.Contains(string(out), "--- PASS: TestRebinding") {
			t.Fatalf("%v\n%s", err, out)
		}
		return
	}
	const host = "rebind.example.test"
	ca := testkit.NewCA(t)
	good := ca.Server(host)
	right := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: good, Addr: rebindRight + ":443", Handler: func(testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Reply(200, "ok", "Connection", "close"), testkit.Close()} // the next request dials
	}})
	traps := map[string]*testkit.Trap{}
	for _, a := range []string{"127.0.0.1", "169.254.169.254", "10.9.8.7"} { // with a certificate that would be accepted
		traps[a] = testkit.NewTrapAt(t, a+":443", good, "")
	}
	traps[rebindOther] = testkit.NewTrapAt(t, rebindOther+":443", ca.Server("elsewhere.example.test"), "")
	dns := newRebinder(t, "127.0.0.1:53")
	r := newRig(t, ca, rigOptions{routes: "  - name: rebind\n    match: {host: " + host + "}\n    upstream: {roots: roots.pem}\n    limits: {tries: 1}\n    inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: pay}]\n"})
	r.start()
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), Timeout: patience})
	send := func(i int) *testkit.Response {
		return testkit.Send(t, client, http.MethodPost, fmt.Sprintf("https://%s/v1/%d", host, i), "a")
	}
	for i, c := range []struct {
		first, then string // of one request's look-ups
		code        string // "": it arrives
	}{
		{rebindRight, rebindRight, ""},
		{rebindRight, "127.0.0.1", ""}, // a second look-up of the same request would lead away
		{"127.0.0.1", rebindRight, "DESTINATION_PROHIBITED"},
		{rebindRight, "169.254.169.254", ""},
		{"169.254.169.254", rebindRight, "DESTINATION_PROHIBITED"},
		{"10.9.8.7", rebindRight, "DESTINATION_PROHIBITED"},
		{rebindRight + " 127.0.0.1", rebindRight, "DESTINATION_PROHIBITED"}, // one bad address refuses the answer
		{"127.0.0.1 " + rebindRight, rebindRight, "DESTINATION_PROHIBITED"},
		{rebindOther, rebindRight, "TLS_CERTIFICATE_INVALID"},
		{rebindRight, rebindRight, ""},
	} {
		dns.answer(c.first, c.then)
		before := len(right.Arrivals())
		resp := send(i)
		arrived := len(right.Arrivals()) - before
		if c.code == "" && (resp.Status != 200 || arrived != 1) || c.code != "" && (arrived != 0 || !strings.Contains(string(resp.Body), `"`+c.code+`"`) || !strings.Contains(resp.Header.Get("Waybill-Outcome"), "not_attempted")) {
			t.Errorf("%s, then %s: %d %.300s, %d arrived", c.first, c.then, resp.Status, resp.Body, arrived)
		}
		if dns.asked() == 0 {
			t.Errorf("%s, then %s: the name was not looked up", c.first, c.then)
		}
	}
	r.kill()
	for a, trap := range traps {
		if a != rebindOther && trap.Conns() != 0 {
			t.Errorf("%s was dialled %d times", a, trap.Conns())
		}
		testkit.Search(t, r.canary, testkit.InString(a, trap.Got()+trap.Wire()))
		if trap.Got() != "" {
			t.Errorf("%s received a request", a)
		}
	}
	if traps[rebindOther].Conns() != 1 {
		t.Errorf("%d connections to the other public address", traps[rebindOther].Conns())
	}
	testkit.RequireFound(t, r.canary, testkit.InBytes("origin", right.Arrivals()[0].RawHead))
	testkit.Search(t, r.canary, testkit.InString("log", r.logs.String()), testkit.In(filepath.Join(r.data, "journal")))
}

// rebinder is a name server that answers every look-up of an address by turns.
type rebinder struct {
	mu          sync.Mutex
	first, then []netip.Addr
	n           int // look-ups of an A record since answer
}

func newRebinder(t *testing.T, addr string) *rebinder {
	t.Helper()
	conn, err := net.ListenPacket("udp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	d := &rebinder{}
	go func() {
		buf := make([]byte, 1500)
		for {
			n, from, err := conn.ReadFrom(buf)
			if err != nil {
				return
			}
			if out, err := d.reply(buf[:n]); err == nil {
				_, _ = conn.WriteTo(out, from)
			}
		}
	}()
	return d
}

func (d *rebinder) answer(first, then string) {
	d.mu.Lock()
	defer d.mu.Unlock()
	list := func(s string) (out []netip.Addr) {
		for _, a := range strings.Fields(s) {
			out = append(out, netip.MustParseAddr(a))
		}
		return out
	}
	d.first, d.then, d.n = list(first), list(then), 0
}

func (d *rebinder) asked() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.n
}

func (d *rebinder) reply(query []byte) ([]byte, error) {
	var p dnsmessage.Parser
	head, err := p.Start(query)
	if err != nil {
		return nil, err
	}
	q, err := p.Question()
	if err != nil {
		return nil, err
	}
	b := dnsmessage.NewBuilder(nil, dnsmessage.Header{ID: head.ID, Response: true, Authoritative: true, RecursionDesired: head.RecursionDesired, RecursionAvailable: true})
	if err := b.StartQuestions(); err != nil {
		return nil, err
	}
	if err := b.Question(q); err != nil {
		return nil, err
	}
	if err := b.StartAnswers(); err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	if q.Type == dnsmessage.TypeA {
		addrs := d.first
		if d.n > 0 {
			addrs = d.then
		}
		d.n++
		for _, a := range addrs {
			if err := b.AResource(dnsmessage.ResourceHeader{Name: q.Name, Class: q.Class, TTL: 0}, dnsmessage.AResource{A: a.As4()}); err != nil {
				return nil, err
			}
		}
	}
	return b.Finish()
}
