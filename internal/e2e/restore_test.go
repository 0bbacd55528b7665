package e2e

import (
	"net/http"
	"path/filepath"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// exitJournalDamaged is the exit code of commands that meet a damaged journal or one in
// quarantine (docs/cli.md).
const exitJournalDamaged = 6

// TestRestoredJournalIsListed: what a restored journal holds can be read before anybody
// acknowledges it, with and without a running proxy, and the list says that it may not
// be all (M5, M7).
func TestRestoredJournalIsListed(t *testing.T) {
	contract.Covers(t, "M5", "M7")
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost)})
	r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: up.Addr()}})
	r.start()
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), NoKeepAlive: true})
	if resp := testkit.Send(t, client, http.MethodPost, "https://"+payHost+"/v1/kept", "a"); resp.Status != 200 {
		t.Fatalf("%d", resp.Status)
	}
	backup := filepath.Join(r.dir, "backup")
	if code, _, errs := r.cli("journal", "backup", backup); code != 0 {
		t.Fatalf("backup: %d %s", code, errs)
	}
	r.kill()
	key := filepath.Join(r.data, "journal", "key")
	restored := filepath.Join(r.dir, "r")
	if code, _, errs := r.cli("journal", "restore", backup, "--data", restored, "--key", key); code != 0 {
		t.Fatalf("restore: %d %s", code, errs)
	}
	r.data = restored
	for _, running := range []bool{false, true} {
		if running {
			r.start()
		}
		if code, out, errs := r.cli("journal", "verify"); code != exitJournalDamaged || strings.Contains(errs, "damaged") || !strings.Contains(errs, "quarantine") || !strings.Contains(errs, "restored from a backup") {
			t.Errorf("running %v: verify: %d\n%s\n%s", running, code, out, errs)
		}
		for _, args := range [][]string{{"actions"}, {"actions", "--json"}} {
			code, out, errs := r.cli(args...)
			if code != exitJournalDamaged || !strings.Contains(out, "/v1/kept") || !strings.Contains(errs, "acknowledge") {
				t.Errorf("running %v, %v: %d\n%s\n%s", running, args, code, out, errs)
			}
		}
	}
}
