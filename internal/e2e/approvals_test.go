package e2e

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/killpoint"
	"waybill/internal/testkit"
)

const (
	askHost   = "ask.example.test"
	briefHost = "brief.example.test"
)

// approvalRig is a proxy with two routes that need an approval, before one origin that
// keeps a ledger.
func approvalRig(t *testing.T) (*rig, *testkit.Upstream) {
	t.Helper()
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(askHost, briefHost), Handler: func(a testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Reply(201, "made "+a.Target)}
	}})
	route := func(host, approval string) string {
		return fmt.Sprintf("  - name: %s\n    match: {host: %s}\n    inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: pay}]\n    upstream: {roots: roots.pem, resolve: {%s: %q}}\n    approval: %s\n",
			strings.SplitN(host, ".", 2)[0], host, host, up.Addr(), approval)
	}
	return newRig(t, ca, rigOptions{routes: route(askHost, "{hold: 50ms, expiry: 1h}") + route(briefHost, "{hold: 50ms, expiry: 1s}")}), up
}

// ask posts a request that has to wait and returns its action.
func (r *rig) ask(host, path string) string {
	r.t.Helper()
	c := testkit.NewClient(r.t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), Timeout: patience})
	resp := testkit.Send(r.t, c, http.MethodPost, "https://"+host+path, "amount="+path)
	if resp.Status != http.StatusForbidden || !strings.Contains(resp.Header.Get("Waybill-Outcome"), "not_attempted") || !strings.Contains(string(resp.Body), "APPROVAL_PENDING") {
		r.t.Fatalf("%d %s %s", resp.Status, resp.Header.Get("Waybill-Outcome"), resp.Body)
	}
	return resp.Header.Get("Waybill-Invocation")
}

// settled waits until the action has ended, and returns it.
func (r *rig) settled(id string) (v dispatch.ActionView) {
	r.t.Helper()
	testkit.Eventually(r.t, func() error {
		code, out, errs := r.cli("action", id, "--json")
		var doc struct {
			Action dispatch.ActionView `json:"action"`
		}
		if err := json.Unmarshal([]byte(out), &doc); code != 0 || err != nil {
			return fmt.Errorf("waybill action: %d %s %w", code, errs, err)
		}
		if v = doc.Action; !v.Ended {
			return fmt.Errorf("%s is open", id)
		}
		return nil
	})
	return v
}

func (r *rig) waiting(want int) {
	r.t.Helper()
	code, out, errs := r.cli("approvals", "--json")
	if n := strings.Count(out, "\n"); code != 0 || n != want {
		r.t.Fatalf("waybill approvals: %d, %d wait, want %d: %s%s", code, n, want, out, errs)
	}
}

// The real binary: what waits survives SIGKILL, is shown without secrets, decided once,
// sent once, and not sent when it is denied or too late.
func TestApprovals(t *testing.T) {
	contract.Covers(t, "D3", "D4", "D5", "C2", "H3")
	r, up := approvalRig(t)
	r.start()
	id := r.ask(askHost, "/v1/one")
	late := r.ask(briefHost, "/v1/late")
	raced := r.ask(askHost, "/v1/raced")
	r.kill()
	if got := len(up.Arrivals()); got != 0 {
		t.Fatalf("%d arrived before anybody approved", got)
	}
	r.start()
	code, out, errs := r.cli("approvals", id)
	if code != 0 || !strings.Contains(out, "POST https://"+askHost+"/v1/one") || !strings.Contains(out, "amount=/v1/one") || !strings.Contains(out, "pay@2026-11") {
		t.Fatalf("%d %s%s", code, out, errs)
	}
	testkit.Search(t, r.canary, testkit.InString("waybill approvals", out+errs))

	if code, out, errs := r.cli("approve", id, "--by", "alice", "--reason", "ticket 7"); code != 0 {
		t.Fatalf("approve: %d %s%s", code, out, errs)
	}
	if v := r.settled(id); v.Outcome != "committed" || v.Attempts != 1 || v.Status != 201 {
		t.Errorf("%+v", v)
	}
	if code, out, _ := r.cli("result", id); code != 0 || !strings.Contains(out, "made /v1/one") {
		t.Errorf("result: %d %s", code, out)
	}
	// Approved twice.
	if code, _, errs := r.cli("approve", id, "--by", "bob"); code != 1 || !strings.Contains(errs, "approved by alice") {
		t.Errorf("a second approval: %d %s", code, errs)
	}
	// Too late.
	if v := r.settled(late); v.Code != "APPROVAL_EXPIRED" {
		t.Errorf("%+v", v)
	}
	if code, _, errs := r.cli("approve", late, "--by", "alice"); code != 1 || !strings.Contains(errs, "expired") {
		t.Errorf("an approval after its expiry: %d %s", code, errs)
	}
	// Two at once.
	var wg sync.WaitGroup
	codes := make([]int, 2)
	for i, args := range [][]string{{"approve", raced, "--by", "alice"}, {"deny", raced, "--by", "bob", "--reason", "no"}} {
		wg.Go(func() { codes[i], _, _ = r.cli(args...) })
	}
	wg.Wait()
	v := r.settled(raced)
	if codes[0]+codes[1] != 1 || (codes[0] == 0) != (v.Outcome == "committed") || (codes[1] == 0) != (v.Code == "APPROVAL_DENIED") {
		t.Errorf("codes %v, %+v", codes, v)
	}
	for _, path := range []string{"/v1/one", "/v1/raced", "/v1/late"} {
		want := 0
		if path == "/v1/one" || path == "/v1/raced" && codes[0] == 0 {
			want = 1
		}
		up.RequireCount(t, want, http.MethodPost, path)
	}
	r.waiting(0)
	r.kill()
	r.verify()
	testkit.Search(t, r.canary, testkit.InString("log", r.logs.String()))
}

// The process is killed around the decision: approved and not sent is sent at the next
// start, once; sent, or perhaps sent, never again (CONTRACT M2, T2).
func TestApprovalKilled(t *testing.T) {
	contract.Covers(t, "D3", "D4", "M2", "T2")
	for _, c := range []struct {
		point    string
		arrivals int
		outcome  string
	}{
		{"approval-decided", 1, "committed"},
		{"dispatch-before-record", 1, "committed"},
		{"dispatch-recorded", 0, "unknown"},
		{"dispatch-exchanged", 1, "unknown"},
	} {
		t.Run(c.point, func(t *testing.T) {
			r, up := approvalRig(t)
			r.start()
			id := r.ask(askHost, "/v1/kill")
			r.kill()
			r.env = []string{killpoint.Variable + "=" + c.point}
			r.start()
			_, _, _ = r.cli("approve", id, "--by", "alice") // the process may die before it answers
			r.p.Wait(t, patience)
			r.env = nil
			r.start()
			if v := r.settled(id); v.Outcome != c.outcome || v.Attempts != 1 {
				t.Errorf("%+v", v)
			}
			if code, _, _ := r.cli("approve", id, "--by", "bob"); code != 1 {
				t.Errorf("approved again: %d", code)
			}
			r.kill()
			r.start()
			up.RequireCount(t, c.arrivals, http.MethodPost, "/v1/kill")
			r.waiting(0)
		})
	}
}

var goodReload = regexp.MustCompile(`(?m)^waybill_config_reloads_total\{result="success"\} [1-9]`)

// TestApprovalIsUnusable: what changed while the card was open – the secret's version, the
// configuration – makes the approval unusable: nothing is sent, and the new request needs
// an approval of its own (CONTRACT D2, D3).
func TestApprovalIsUnusable(t *testing.T) {
	contract.Covers(t, "D2", "D3")
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(askHost)})
	r := newRig(t, ca, rigOptions{
		top:    "  turning: {from: {file: turning}}\n",
		routes: fmt.Sprintf("  - name: ask\n    match: {host: %s}\n    inject: [{header: X-Key, value: \"${secret}\", credential: turning}]\n    upstream: {roots: roots.pem, resolve: {%s: %q}}\n    approval: {hold: 50ms}\n", askHost, askHost, up.Addr()),
	})
	replace := func(name, text string) {
		r.write(name+".new", text)
		if err := os.Rename(filepath.Join(r.dir, name+".new"), filepath.Join(r.dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	replace("turning", "version-one-of-the-secret")
	r.start()
	config, err := os.ReadFile(r.config)
	if err != nil {
		t.Fatal(err)
	}
	for name, change := range map[string]func(){
		"secret": func() { replace("turning", "version-two-of-the-secret") },
		"configuration": func() {
			replace("c.yaml", strings.Replace(string(config), "approval: {hold: 50ms}", "approval: {hold: 60ms}", 1))
			r.p.Signal(t, syscall.SIGHUP)
			testkit.Eventually(t, func() error {
				if !goodReload.MatchString(get(t, r.meters)) {
					return errors.New("not reloaded")
				}
				return nil
			})
		},
	} {
		id := r.ask(askHost, "/v1/"+name)
		change()
		// Approving says so at once, or the action ends so; either way nothing is sent.
		code, out, errs := r.cli("approve", id, "--by", "alice")
		if v := r.settled(id); v.Code != "SNAPSHOT_MISMATCH" || v.Outcome != "not_attempted" || v.DispatchStarted {
			t.Errorf("%s: approve said %d %s%s, then %+v", name, code, out, errs, v)
		}
		if code, _, _ := r.cli("approve", id, "--by", "bob"); code != 1 {
			t.Errorf("%s: approved again: %d", name, code)
		}
	}
	if n := len(up.Arrivals()); n != 0 {
		t.Errorf("%d arrived under an approval of another request", n)
	}
	id := r.ask(askHost, "/v1/anew")
	if code, out, errs := r.cli("approve", id, "--by", "alice"); code != 0 {
		t.Errorf("approve: %d %s%s", code, out, errs)
	}
	if v := r.settled(id); v.Outcome != "committed" {
		t.Errorf("%+v", v)
	}
	up.RequireCount(t, 1, http.MethodPost, "/v1/anew")
}
