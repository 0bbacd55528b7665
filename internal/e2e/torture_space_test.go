package e2e

import (
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// readiness is what /readyz says.
func readiness(t testing.TB, r *rig) (int, string) {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}, Timeout: patience}
	resp, err := c.Get(strings.TrimSuffix(r.meters, "/metrics") + "/readyz")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(b)
}

// TestDiskFull: JR-02, M5, H8. The disk of the journal fills up under a running
// proxy, to the last block; the same process refuses new work before anything is
// sent, ends what was sent, gives out what is stored, starts again while the disk is
// full, and goes on by itself when there is room.
func TestDiskFull(t *testing.T) {
	contract.Covers(t, "M5", "T5", "H8")
	d := testkit.NewDisk(t, 640)
	ca := testkit.NewCA(t)
	gates := map[string]*testkit.Gate{"/v1/slow/1": testkit.NewGate(t), "/v1/slow/2": testkit.NewGate(t)}
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(a testkit.Arrival) []testkit.Step {
		if g := gates[a.Target]; g != nil {
			return []testkit.Step{testkit.Hold(g), testkit.Reply(201, "late")}
		}
		return []testkit.Step{testkit.Reply(201, "made")}
	}})
	r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: up.Addr()}})
	r.data = filepath.Join(d.Dir, "d")
	r.start()
	pid := r.p.PID()
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), NoKeepAlive: true})
	post := func(path string) *testkit.Response {
		t.Helper()
		resp, err := testkit.TrySend(t, client, http.MethodPost, "https://"+payHost+path, "amount="+path)
		if err != nil {
			t.Fatalf("%s: %v: the process is running: %v", path, err, r.p.Running())
		}
		return resp
	}
	type answered struct {
		path string
		resp *testkit.Response
	}
	answers := make(chan answered, len(gates))
	slow := func(path string) {
		go func() {
			resp, _ := testkit.TrySend(t, client, http.MethodPost, "https://"+payHost+path, "amount="+path)
			answers <- answered{path, resp}
		}()
	}
	ended := func(path string) {
		t.Helper()
		gates[path].Open()
		select {
		case a := <-answers:
			if a.path != path || a.resp == nil || a.resp.Status != 201 || !strings.HasPrefix(a.resp.Header.Get("Waybill-Outcome"), "committed") {
				t.Errorf("what was dispatched before the disk was full: %+v", a)
			}
		case <-time.After(patience):
			t.Fatalf("%s is not answered", path)
		}
	}
	refused := func(path string) {
		t.Helper()
		var resp *testkit.Response
		testkit.Eventually(t, func() error { // the figure is up to 100 ms old
			code, text := readiness(t, r)
			if code == http.StatusOK {
				return io.ErrNoProgress
			}
			if !strings.Contains(text, "space") {
				t.Errorf("/readyz: %q", text)
			}
			return nil
		})
		resp = post(path)
		if o := resp.Header.Get("Waybill-Outcome"); resp.Status != 503 || !strings.HasPrefix(o, "not_attempted;") || !strings.Contains(o, "JOURNAL_UNAVAILABLE") || resp.Header.Get("Retry-After") == "" {
			t.Errorf("%s on a full disk: %d %q", path, resp.Status, o)
		}
		up.RequireCount(t, 0, "", path)
		if r.p.PID() != pid || !r.p.Running() {
			t.Fatal("the process is another, or gone")
		}
	}

	first := post("/v1/before")
	if first.Status != 201 {
		t.Fatalf("%d", first.Status)
	}
	slow("/v1/slow/1")
	slow("/v1/slow/2")
	testkit.Eventually(t, func() error {
		if up.Count("", "/v1/slow/1") == 1 && up.Count("", "/v1/slow/2") == 1 {
			return nil
		}
		return io.ErrNoProgress
	})
	d.Fill(100 << 20) // below the floor
	refused("/v1/full/1")
	ended("/v1/slow/1")
	d.Fill(0) // below everything
	refused("/v1/full/2")
	ended("/v1/slow/2")
	if code, out, errs := r.cli("result", first.Header.Get("Waybill-Invocation")); code != 0 || !strings.Contains(out, "made") {
		t.Errorf("a stored result on a full disk: %d %q %q", code, out, errs)
	}
	r.verify()

	// A start on a full disk.
	r.kill()
	d.Fill(0)
	if code, _, errs := r.cli("serve", "--proxy", "127.0.0.1:0", "--metrics", "off", "--allow-any-filesystem"); code != 7 || !strings.Contains(errs, "space") {
		t.Errorf("a start without any room: %d %s", code, errs)
	}
	d.Empty()
	d.Fill(70 << 20)
	r.start()
	pid = r.p.PID()
	client = testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), NoKeepAlive: true})
	refused("/v1/full/3")
	if all := byTarget(r.actions(), "/v1/before"); len(all) != 1 || all[0].Outcome != "committed" {
		t.Errorf("on record: %+v", all)
	}

	d.Empty()
	testkit.Eventually(t, func() error {
		if code, text := readiness(t, r); code != http.StatusOK {
			return io.ErrNoProgress
		} else if strings.Contains(text, "space") {
			t.Errorf("/readyz: %q", text)
		}
		return nil
	})
	if resp := post("/v1/after"); resp.Status != 201 || r.p.PID() != pid {
		t.Errorf("with room again: %d", resp.Status)
	}
	r.verify()
}

// TestPowerCut: JR-06, F1, T2. The power goes while 8 clients post; what the origin saw
// and what clients were told is on record afterwards.
func TestPowerCut(t *testing.T) {
	contract.Covers(t, "F1", "F2", "M4", "T5")
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // moments, not secrets
	rounds := 2
	if long() {
		rounds = 25
	}
	d := testkit.NewDisk(t, 448)
	ca := testkit.NewCA(t)
	up := mixed(t, ca, payHost)
	r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: up.Addr()}})
	r.data = filepath.Join(d.Dir, "d")
	l := &load{answers: make(map[string]answer)}
	for range rounds {
		r.start()
		stop := make(chan struct{})
		before := l.next.Load()
		wg := l.run(t, r, 8, payHost, stop)
		testkit.Eventually(t, func() error {
			if n := l.next.Load() - before; n < 20 {
				return fmt.Errorf("%d requests so far", n)
			}
			return nil
		})
		time.Sleep(time.Duration(rnd.IntN(300)) * time.Millisecond) // the moment of the cut is the input of this test
		d.CutUnder(r.p.PID())
		close(stop)
		r.kill()
		wg.Wait()
		d.Unmount()
		d.Mount()
	}
	r.start()
	unknown := l.check(t, r, up.Ledger, seed)
	r.verify()
	r.kill()
	t.Logf("%d cuts, %d requests, %d unknown", rounds, l.next.Load(), unknown)
	if l.next.Load() < int64(20*rounds) {
		t.Error("hardly anything was sent: this run shows nothing")
	}
}
