package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// TestAuditSegmentFails: the file of the audit log fails, alone. Requests go on, since the
// log is no third write on their way; the state says that it fails; once it is healed the
// log has every event, without a gap (CONTRACT N5).
func TestAuditSegmentFails(t *testing.T) {
	contract.Covers(t, "N1", "N5", "T5")
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(testkit.Arrival) []testkit.Step { return []testkit.Step{testkit.Reply(200, "ok")} }})
	boot := newRig(t, ca, rigOptions{})
	key := filepath.Join(t.TempDir(), "audit.key")
	code, public, errs := boot.cli("audit", "keygen", "--out", key)
	if code != 0 {
		t.Fatalf("keygen: %d %s", code, errs)
	}
	for _, op := range []string{"write", "sync"} {
		for after, errno := range []syscall.Errno{syscall.EIO, syscall.ENOSPC} {
			if !long() && (op != "sync" || errno != syscall.EIO) {
				continue // the follower waits before it tries again
			}
			t.Run(fmt.Sprintf("%s-%d", op, errno), func(t *testing.T) {
				fs := testkit.NewFailFS(t)
				top := fmt.Sprintf("audit:\n  recipient: %s  folder: %s\n", public, filepath.Join(fs.Dir, "audit"))
				r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: up.Addr()}, top: top})
				r.start()
				client := testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://" + r.addr, Roots: r.roots()})
				n := 0
				send := func() {
					t.Helper()
					n++
					if a := testkit.Send(t, client, http.MethodPost, fmt.Sprintf("https://%s/v1/%d", payHost, n), "a"); a.Status != 200 {
						t.Fatalf("request %d: %d %s", n, a.Status, a.Body)
					}
				}
				status := func() (failing string, lag int) {
					t.Helper()
					code, out, errs := r.cli("audit", "status", "--json")
					var st struct {
						Failing string
						Lag     int
					}
					if err := json.Unmarshal([]byte(out), &st); err != nil || code != 0 && st.Failing == "" {
						t.Fatalf("status: %d %v %s %s", code, err, out, errs)
					}
					return st.Failing, st.Lag
				}
				until := func(what string, ok func() bool) {
					t.Helper()
					for end := time.Now().Add(patience); !ok(); time.Sleep(20 * time.Millisecond) {
						if time.Now().After(end) {
							t.Fatalf("not %s: %s", what, r.p.Stderr())
						}
					}
				}
				send()
				fs.Fail(&testkit.FailRule{Name: "*.audit", Ops: []string{op}, Err: errno, After: after})
				for range 6 {
					send()
				}
				until("failing", func() bool { send(); failing, _ := status(); return failing != "" })
				for range 3 {
					send()
				}
				if fs.Heal() == 0 {
					t.Error("nothing failed")
				}
				until("healed", func() bool { failing, lag := status(); return failing == "" && lag == 0 })
				send()
				r.p.Signal(t, term)
				r.p.Wait(t, patience)
				r.kill()
				fs.Unmount()
				if code, out, errs := r.cli("audit", "verify", "--folder", filepath.Join(fs.Under, "audit"), "--json"); code != 0 {
					t.Fatalf("verify: %d %s %s", code, out, errs)
				}
				code, out, errs := r.cli("audit", "export", "--key", key, "--folder", filepath.Join(fs.Under, "audit"))
				if code != 0 {
					t.Fatalf("export: %d %s", code, errs)
				}
				dispatched, next := 0, uint64(1)
				for dec := json.NewDecoder(strings.NewReader(out)); dec.More(); {
					var l auditLine
					if err := dec.Decode(&l); err != nil {
						t.Fatal(err)
					}
					if l.Gap != nil {
						t.Errorf("a gap: %s", l.Gap.Reason)
					}
					if l.Event == nil {
						continue
					}
					if l.Event.Seq != next {
						t.Fatalf("event %d, want %d", l.Event.Seq, next)
					}
					next++
					if l.Event.Type == dispatch.DispatchStarted.String() {
						dispatched++
					}
				}
				if dispatched != n {
					t.Errorf("%d requests were dispatched, the log has %d", n, dispatched)
				}
			})
		}
	}
}
