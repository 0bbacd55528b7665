package e2e

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/internal/killpoint"
	"waybill/internal/testkit"
)

// kills is how often TestKill kills: 25 in make test, 200 in make test-long.
func kills() int {
	if long() {
		return 200
	}
	return 25
}

// answer is what a client was told about one path.
type answer struct {
	status  int
	outcome string // Waybill-Outcome, "" for none
}

// load is a set of clients that post to paths nobody posted to before.
type load struct {
	mu      sync.Mutex
	answers map[string]answer
	next    atomic.Int64
}

// run posts from n clients until stop is closed or the proxy is gone.
func (l *load) run(t testing.TB, r *rig, n int, host string, stop <-chan struct{}) *sync.WaitGroup {
	var wg sync.WaitGroup
	roots := r.roots()
	for i := range n {
		wg.Go(func() {
			c := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: roots, HTTP2: i%4 == 0, Timeout: 10 * time.Second})
			defer c.CloseIdleConnections()
			for broken := 0; broken < 2; {
				select {
				case <-stop:
					return
				default:
				}
				path := fmt.Sprintf("/v1/k/%06d", l.next.Add(1))
				resp, err := testkit.TrySend(t, c, http.MethodPost, "https://"+host+path, "amount="+path)
				if err != nil {
					broken++ // the proxy died: what became of path is in its journal
					continue
				}
				l.mu.Lock()
				l.answers[path] = answer{resp.Status, resp.Header.Get("Waybill-Outcome")}
				l.mu.Unlock()
			}
		})
	}
	return &wg
}

// mixed is an origin whose effects are certain and whose answers are not: it
// counts every request it has read, and then answers, answers late, cuts its
// answer or says nothing.
func mixed(t testing.TB, ca *testkit.CA, host string) *testkit.Upstream {
	return testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(host), Handler: func(a testkit.Arrival) []testkit.Step {
		switch a.N % 16 {
		case 3:
			return []testkit.Step{testkit.Close()}
		case 7:
			return []testkit.Step{testkit.Write("HTTP/1.1 201 Created\r\nContent-Length: 100\r\n\r\n{\"id\":"), testkit.Close()}
		case 11:
			return []testkit.Step{testkit.Reply(500, "no")}
		case 13:
			return []testkit.Step{testkit.Write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"), testkit.Write(fmt.Sprintf("%x\r\n%s\r\n", 40000, strings.Repeat("a", 40000))), testkit.WriteLast("0\r\n\r\n")}
		default:
			return []testkit.Step{testkit.Reply(201, "made "+a.Target)}
		}
	}})
}

// check compares what the journal says after a restart with the origin's ledger
// and with what clients were told before the kill (CONTRACT T2).
func (l *load) check(t testing.TB, r *rig, ledger *testkit.Ledger, seed uint64) (unknown int) {
	t.Helper()
	all := r.actions()
	said := make(map[string][]string, len(all))
	for _, v := range all {
		i := strings.Index(v.Target, "/v1/k/")
		if i < 0 {
			continue
		}
		path := v.Target[i:]
		said[path] = append(said[path], v.Outcome)
		if len(said[path]) > 1 {
			t.Errorf("seed %d: %s has %d actions", seed, path, len(said[path]))
		}
		if !v.Ended {
			t.Errorf("seed %d: %s is still open after the restart (M4)", seed, path)
		}
		if v.DispatchStarted && v.Outcome == "not_attempted" {
			t.Errorf("seed %d: %s was dispatched and says not_attempted (F2)", seed, path)
		}
		if v.Outcome == "unknown" {
			unknown++
		}
	}
	seen := make(map[string]testkit.Arrival)
	for _, a := range ledger.Arrivals() {
		if a.Target == "" {
			continue
		}
		if _, twice := seen[a.Target]; twice {
			t.Errorf("seed %d: %s arrived twice (F6)", seed, a.Target)
		}
		seen[a.Target] = a
		switch out := said[a.Target]; {
		case len(out) == 0:
			t.Errorf("seed %d: %s arrived and the journal does not know it (F1)", seed, a.Target)
		case out[0] == "not_attempted":
			t.Errorf("seed %d: %s arrived and the journal says not_attempted (F2)", seed, a.Target)
		}
	}
	for path, out := range said {
		a, arrived := seen[path]
		if out[0] == "committed" && (!arrived || !a.Answered) {
			t.Errorf("seed %d: %s is committed, and the origin did not finish it (arrived %v)", seed, path, arrived)
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	for path, a := range l.answers {
		told, _, _ := strings.Cut(a.outcome, ";")
		switch {
		case told == "":
			t.Errorf("seed %d: %s was answered %d without an outcome (L5)", seed, path, a.status)
		case len(said[path]) == 0 && strings.Contains(a.outcome, "JOURNAL_INDETERMINATE"):
			// Its record may be lost or not, and nothing was handed over (F9): that it did not
			// arrive is checked above.
		case len(said[path]) == 0 && told != "not_attempted":
			t.Errorf("seed %d: %s was told %s and is not on record", seed, path, told)
		case len(said[path]) > 0 && said[path][0] != told && !(told == "unknown" && said[path][0] != "not_attempted"):
			t.Errorf("seed %d: %s was told %s, and now it is %s", seed, path, told, said[path][0])
		}
		if _, arrived := seen[path]; arrived && told == "not_attempted" {
			t.Errorf("seed %d: %s arrived and its caller was told not_attempted", seed, path)
		}
	}
	return unknown
}

// TestKill: the real binary under load from 16 clients is killed at random moments;
// the origin's ledger is the oracle.
func TestKill(t *testing.T) {
	contract.Covers(t, "T2", "F1", "F2", "F6", "M2", "M4")
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // moments, not secrets
	ca := testkit.NewCA(t)
	up := mixed(t, ca, payHost)
	r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: up.Addr()}})
	l := &load{answers: make(map[string]answer)}
	for range kills() {
		r.start()
		stop := make(chan struct{})
		wg := l.run(t, r, 16, payHost, stop)
		time.Sleep(time.Duration(20+rnd.IntN(250)) * time.Millisecond) // the moment of the kill is the input of this test
		r.kill()
		close(stop)
		wg.Wait()
	}
	r.start()
	unknown := l.check(t, r, up.Ledger, seed)
	r.verify()
	t.Logf("%d kills, %d requests, %d arrivals, %d unknown", kills(), l.next.Load(), len(up.Arrivals()), unknown)
	if unknown == 0 || len(up.Arrivals()) < kills() {
		t.Error("the kills hit nothing: this run shows nothing")
	}
}

// TestKillPoints: SIGKILL at each named place between two durable transitions.
func TestKillPoints(t *testing.T) {
	contract.Covers(t, "T1", "T2", "F1", "F2", "M2", "M4", "H1")
	for _, c := range []struct {
		point   string
		arrived string // whether the request is at the origin: "no", "yes", or "maybe"
		outcome string // after the restart; "" no record
	}{
		{"dispatch-before-record", "no", ""},
		{"journal-before-store", "no", ""},
		// Durable is enough to go on, to the end: the store, which follows, has none of it.
		{"journal-between-witness-and-store", "yes", "committed"},
		{"journal-after-durable", "no", "unknown"},
		{"dispatch-recorded", "no", "unknown"},
		{"dispatch-exchanged", "yes", "unknown"},
		{"dispatch-committed", "yes", "committed"},
		{"dispatch-delivered", "yes", "committed"},
	} {
		t.Run(c.point, func(t *testing.T) {
			ca := testkit.NewCA(t)
			up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost)})
			r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: up.Addr()}})
			point := c.point
			if of, ok := strings.CutPrefix(point, "journal-"); ok {
				// A start passes it, too, and how often is not certain.
				point = "dispatch-before-record>" + of
			}
			r.env = []string{killpoint.Variable + "=" + point}
			r.start()
			r.actions() // reads the store: it is not behind with a group of the start
			client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), NoKeepAlive: true})
			resp, err := testkit.TrySend(t, client, http.MethodPost, "https://"+payHost+"/v1/k/000001", "amount=5")
			r.p.Wait(t, patience)
			if err == nil && c.point != "dispatch-delivered" && c.point != "journal-between-witness-and-store" {
				t.Fatalf("answered %d: the process did not die at %s", resp.Status, c.point)
			}
			r.env = nil
			r.start()
			all := byTarget(r.actions(), "/v1/k/000001")
			switch {
			case c.outcome == "" && len(all) != 0:
				t.Errorf("on record: %+v", all)
			case c.outcome != "" && (len(all) != 1 || all[0].Outcome != c.outcome || !all[0].Ended):
				t.Errorf("on record: %+v, want %s", all, c.outcome)
			}
			if n := up.Count("", ""); n > 1 || c.arrived == "no" && n > 0 || c.arrived == "yes" && n == 0 {
				t.Errorf("%d arrivals, want %s", n, c.arrived)
			}
			r.verify()
			if c.outcome == "unknown" {
				// The repeat that a naive client makes now is refused (O3, RT-05).
				again := testkit.Send(t, testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), NoKeepAlive: true}), http.MethodPost, "https://"+payHost+"/v1/k/000001", "amount=5")
				if again.Status != 424 || !strings.Contains(again.Header.Get("Waybill-Outcome"), "DUPLICATE_SUSPECTED") {
					t.Errorf("the repeat: %d %s", again.Status, again.Header.Get("Waybill-Outcome"))
				}
			}
		})
	}
}
