package e2e

import (
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

func copyTree(t testing.TB, from, to string) {
	t.Helper()
	if err := os.RemoveAll(to); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", "-a", "--sparse=always", from, to).CombinedOutput(); err != nil {
		t.Fatalf("cp: %v: %s", err, out)
	}
}

// quarantined checks what a proxy in quarantine shows and refuses.
func quarantined(t testing.TB, r *rig, up *testkit.Upstream) {
	t.Helper()
	if code, text := readiness(t, r); code == http.StatusOK || !strings.Contains(text, "quarantine") {
		t.Errorf("/readyz: %d %q", code, text)
	}
	if m := get(t, r.meters); !strings.Contains(m, "waybill_journal_quarantined 1") {
		t.Error("the metric does not show the quarantine")
	}
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), NoKeepAlive: true})
	resp := testkit.Send(t, client, http.MethodPost, "https://"+payHost+"/v1/quarantine", "a")
	if o := resp.Header.Get("Waybill-Outcome"); resp.Status != 503 || !strings.Contains(o, "JOURNAL_UNAVAILABLE") {
		t.Errorf("in quarantine: %d %q", resp.Status, o)
	}
	up.RequireCount(t, 0, "", "/v1/quarantine")
	if code, out, _ := r.cli("journal", "stats"); code != 0 || !strings.Contains(out, "quarantined              true") {
		t.Errorf("waybill journal stats: %d %s", code, out)
	}
}

// works sends one request that must be executed.
func works(t testing.TB, r *rig, up *testkit.Upstream, path string) {
	t.Helper()
	if code, text := readiness(t, r); code != http.StatusOK {
		t.Errorf("/readyz: %d %q", code, text)
	}
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), NoKeepAlive: true})
	if resp := testkit.Send(t, client, http.MethodPost, "https://"+payHost+path, "a"); resp.Status != 201 {
		t.Errorf("%s: %d %s", path, resp.Status, resp.Header.Get("Waybill-Outcome"))
	}
	up.RequireCount(t, 1, "", path)
}

// TestQuarantine: JR-04, M5. An older copy of the store is put back: the proxy starts,
// shows it, dispatches nothing, and goes on when an operator says so – through the
// running proxy and a restart, or without one.
func TestQuarantine(t *testing.T) {
	contract.Covers(t, "M5", "M7", "F2")
	for _, running := range []bool{true, false} {
		ca := testkit.NewCA(t)
		up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(testkit.Arrival) []testkit.Step { return []testkit.Step{testkit.Reply(201, "made")} }})
		r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: up.Addr()}})
		r.start()
		works(t, r, up, "/v1/first")
		r.kill()
		r.start() // which puts what the kill left to the witness into the store
		r.kill()
		store, old := filepath.Join(r.data, "journal", "store"), filepath.Join(r.dir, "old")
		copyTree(t, store, old)
		r.start()
		for _, p := range []string{"/v1/lost/1", "/v1/lost/2", "/v1/lost/3"} {
			works(t, r, up, p)
		}
		if code, _, errs := r.cli("journal", "acknowledge", "--reason", "nothing is wrong"); code == 0 || !strings.Contains(errs, "not in quarantine") {
			t.Errorf("acknowledged a whole journal: %d %s", code, errs)
		}
		// Behind what a later start found settled: a rollback within one run is made up for
		// from the witness.
		r.kill()
		r.start()
		r.kill()
		copyTree(t, old, store)

		if code, out, errs := r.cli("journal", "verify"); code != 6 {
			t.Errorf("waybill journal verify: %d %s %s", code, out, errs)
		}
		r.start()
		quarantined(t, r, up)
		if code, _, _ := r.cli("journal", "acknowledge"); code != 2 {
			t.Errorf("acknowledged without a reason: %d", code)
		}
		if !running {
			r.kill()
		}
		if code, out, errs := r.cli("journal", "acknowledge", "--reason", "volume of yesterday, see ticket 12"); code != 0 {
			t.Errorf("waybill journal acknowledge: %d %s %s", code, out, errs)
		}
		if running {
			quarantined(t, r, up)
			r.kill()
		}
		r.start()
		works(t, r, up, "/v1/after")
		unknown := 0
		for _, v := range r.actions() {
			if v.Outcome == "unknown" && v.Ended {
				unknown++
			}
		}
		if unknown != 3 {
			t.Errorf("%d actions are unknown: %+v", unknown, r.actions())
		}
		r.verify()
		r.kill()
		r.start()
		works(t, r, up, "/v1/after/2")
		r.verify()
	}
}

// TestBackupUnderLoad: a backup of a proxy under load is restored elsewhere, reads
// whole, is quarantined, and goes on when that was acknowledged.
func TestBackupUnderLoad(t *testing.T) {
	contract.Covers(t, "M5", "M7")
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(a testkit.Arrival) []testkit.Step { return []testkit.Step{testkit.Reply(201, "made "+a.Target)} }})
	r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: up.Addr()}})
	r.start()
	l := &load{answers: make(map[string]answer)}
	stop := make(chan struct{})
	wg := l.run(t, r, 8, payHost, stop)
	time.Sleep(300 * time.Millisecond) // load is the input of this test
	file := filepath.Join(r.dir, "b.wbj")
	code, out, errs := r.cli("journal", "backup", file)
	if code != 0 {
		t.Errorf("waybill journal backup: %d %s %s", code, out, errs)
	}
	time.Sleep(100 * time.Millisecond)
	close(stop)
	wg.Wait()
	if code, _, _ := r.cli("journal", "backup", file); code != 2 {
		t.Errorf("a backup was overwritten: %d", code)
	}
	key := filepath.Join(r.dir, "key")
	copyTree(t, filepath.Join(r.data, "journal", "key"), key)
	r.kill()
	offline := filepath.Join(r.dir, "offline.wbj")
	if code, out, errs := r.cli("journal", "backup", offline); code != 0 {
		t.Errorf("without a proxy: %d %s %s", code, out, errs)
	}
	if b, err := os.ReadFile(file); err != nil || strings.Contains(string(b), payHost) || strings.Contains(string(b), r.canary.Value()) {
		t.Errorf("the backup is readable: %v", err)
	}

	if code, _, errs := r.cli("journal", "restore", file, "--key", key); code != 2 || !strings.Contains(errs, "replaces") {
		t.Errorf("restored over a journal: %d %s", code, errs)
	}
	before := len(r.actions())
	for _, f := range []string{file, offline} {
		r.data = filepath.Join(r.dir, "r"+filepath.Base(f))
		if code, _, errs := r.cli("journal", "restore", f); code != 2 {
			t.Errorf("without a key: %d %s", code, errs)
		}
		if code, out, errs := r.cli("journal", "restore", f, "--key", key); code != 0 {
			t.Fatalf("waybill journal restore: %d %s %s", code, out, errs)
		}
		r.start()
		quarantined(t, r, up)
		if code, _, errs := r.cli("action", "act_01M8Q04N0T8CHH5XH4HWHM0YW1"); code == 0 || code == 4 {
			t.Errorf("an action that is not known after a restore: %d %s", code, errs)
		}
		r.kill()
		if code, out, errs := r.cli("journal", "acknowledge", "--reason", "the machine burnt"); code != 0 {
			t.Errorf("waybill journal acknowledge: %d %s %s", code, out, errs)
		}
		r.start()
		works(t, r, up, "/v1/after/"+filepath.Base(f))
		all := r.actions()
		for _, v := range all {
			if !v.Ended || v.DispatchStarted && v.Outcome == "not_attempted" {
				t.Errorf("%+v", v)
			}
		}
		if f == offline && len(all) != before+1 || len(all) < 2 {
			t.Errorf("%s: %d actions, %d before", f, len(all), before)
		}
		r.verify()
		r.kill()
	}
}
