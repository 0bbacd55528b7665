package e2e

import (
	"net/http"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// exitJournalStopped is the exit code of a process whose journal is not sure of a
// write (docs/cli.md).
const exitJournalStopped = 8

// TestSyncFails: JR-03, F9, M5. The first write, or sync, of the dispatch record fails with EIO:
// nothing is handed over, the answer does not contradict what the disk may hold, the
// process ends with its own exit code, and the next start agrees with the answer.
func TestSyncFails(t *testing.T) {
	contract.Covers(t, "F9", "M5", "T1")
	strace := testkit.RequireTool(t, "strace")
	for _, syscall := range []string{"pwrite64", "fdatasync"} {
		t.Run(syscall, func(t *testing.T) {
			ca := testkit.NewCA(t)
			up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost)})
			r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: up.Addr()}})
			r.start()
			client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), NoKeepAlive: true})
			if resp := testkit.Send(t, client, http.MethodPost, "https://"+payHost+"/v1/before", "a"); resp.Status != 200 {
				t.Fatalf("%d", resp.Status)
			}
			tracer := testkit.Start(t, testkit.Command{Path: strace, Args: []string{"-f", "-o", "/dev/null", "-e", "trace=" + syscall, "-e", "inject=" + syscall + ":error=EIO", "-p", strconv.Itoa(r.p.PID())}})
			tracer.WaitLine(t, regexp.MustCompile(`attached`))
			resp, err := testkit.TrySend(t, client, http.MethodPost, "https://"+payHost+"/v1/during", "a")
			if err != nil {
				t.Fatalf("a silent close: %v", err)
			}
			if o := resp.Header.Get("Waybill-Outcome"); resp.Status != 424 || !strings.HasPrefix(o, "unknown;") || !strings.Contains(o, "JOURNAL_INDETERMINATE") || resp.Header.Get("Retry-After") != "" {
				t.Errorf("%d %q", resp.Status, o)
			}
			if code := r.p.Wait(t, patience); code != exitJournalStopped {
				t.Errorf("exit code %d", code)
			}
			up.RequireCount(t, 0, "", "/v1/during")
			r.start()
			for _, v := range byTarget(r.actions(), "/v1/during") {
				if v.Outcome != "unknown" || !v.Ended {
					t.Errorf("after the restart: %+v", v)
				}
			}
			r.verify()
			again := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), NoKeepAlive: true})
			if resp := testkit.Send(t, again, http.MethodPost, "https://"+payHost+"/v1/after", "a"); resp.Status != 200 {
				t.Errorf("after the restart: %d", resp.Status)
			}
		})
	}
}
