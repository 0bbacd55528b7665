package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/killpoint"
	"waybill/internal/testkit"
)

// auditLine is what the test reads of waybill audit export.
type auditLine struct {
	Record uint64
	Kind   string
	Seq    uint64
	Action string
	Event  *struct {
		Seq     uint64
		Type    string
		Session *struct{ ID, Name string }
	}
	Gap *struct{ Reason string }
}

// export opens the log with the private key: verified, in order.
func (r *rig) export(key string) (out []auditLine) {
	r.t.Helper()
	code, text, errs := r.cli("audit", "export", "--key", key)
	if code != 0 {
		r.t.Fatalf("waybill audit export: %d %s", code, errs)
	}
	dec := json.NewDecoder(strings.NewReader(text))
	for dec.More() {
		var l auditLine
		if err := dec.Decode(&l); err != nil {
			r.t.Fatal(err)
		}
		out = append(out, l)
	}
	return out
}

// TestAuditLog: the proxy is killed before, in and after the writes of the audit log,
// and at any time. Every start catches up: each event of the journal is in the log,
// once, in order; nothing of it can be read without the private key, and the secret is
// not in it at all (N1, N2, N4, N5, C2, T2).
func TestAuditLog(t *testing.T) {
	contract.Covers(t, "N1", "N2", "N4", "N5", "C2", "T2")
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(a testkit.Arrival) []testkit.Step {
		// It reflects the secret, which is masked, and sets a cookie of its own.
		return []testkit.Step{testkit.Write("HTTP/1.1 200 OK\r\nSet-Cookie: own=confidential-cookie\r\nX-Echo: " + strings.Join(a.Values("Authorization"), "") + "\r\nContent-Length: 2\r\n\r\nok")}
	}})
	keys := t.TempDir() // apart from everything the proxy has
	key := filepath.Join(keys, "audit.key")
	sent := filepath.Join(keys, "checkpoints")
	boot := newRig(t, ca, rigOptions{})
	code, public, errs := boot.cli("audit", "keygen", "--out", key)
	if code != 0 || !strings.HasPrefix(public, "wbaudit1_") {
		t.Fatalf("keygen: %d %s", code, errs)
	}
	top := fmt.Sprintf("audit:\n  recipient: %s  checkpoint: {every: 10, interval: 30s}\n  to: [{file: %s}]\n", public, sent)
	r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: up.Addr()}, top: top})
	query := testkit.NewCanary(t)
	send := func(path string) {
		client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), NoKeepAlive: true})
		// The process may die at any moment: what became of it is in the journal.
		_, _ = testkit.TrySend(t, client, http.MethodPost, "https://"+payHost+path+"?k="+query.Value(), "a")
	}
	// A start writes twice before it is ready: what it catches up with, and a checkpoint.
	for i, point := range []string{"audit-before-write:3", "audit-before-sync:4", "audit-before-sync:3", "audit-after-sync:3", ""} {
		if point == "" {
			r.env = nil
			r.start()
			send("/v1/killed")
			r.kill() // with the last events not followed yet
			continue
		}
		r.env = []string{killpoint.Variable + "=" + point}
		r.start()
		for n := 0; r.p.Running() && n < 400; n++ {
			send(fmt.Sprintf("/v1/%d/%d", i, n))
		}
		if r.p.Running() {
			t.Fatalf("%s was not passed", point)
		}
		r.kill()
		if code, out, errs := r.cli("audit", "verify"); code != 0 && !strings.Contains(errs, "the next start puts it right") {
			t.Fatalf("%s: %d %s %s", point, code, out, errs)
		}
	}
	r.env = nil
	r.start()
	if code, _, errs := r.cli("run", "--quiet", "--name", "agent", "--", "true"); code != 0 {
		t.Fatalf("run: %d %s", code, errs)
	}
	send("/v1/last")
	if code, out, errs := r.cli("audit", "status", "--json"); code != 0 || !strings.Contains(out, `"enabled": true`) {
		t.Fatalf("status: %d %s %s", code, out, errs)
	}
	if code, out, errs := r.cli("audit", "verify"); code != 0 {
		t.Errorf("while it is written: %d %s %s", code, out, errs)
	}
	code, sessions, errs := r.cli("sessions", "--json")
	if code != 0 || !strings.Contains(sessions, `"name":"agent"`) || !strings.Contains(sessions, `"state":"closed"`) {
		t.Errorf("sessions: %d %s %s", code, sessions, errs)
	}
	r.p.Signal(t, syscall.SIGTERM)
	if code := r.p.Wait(t, patience); code != 0 {
		t.Fatalf("it ended with %d", code)
	}
	r.kill()
	r.verify()

	code, out, errs := r.cli("audit", "verify", "--checkpoint", sent, "--json")
	if code != 0 {
		t.Fatalf("verify: %d %s %s", code, out, errs)
	}
	lines := r.export(key)
	next, byAction := uint64(1), map[string]int{}
	opened := 0
	for _, l := range lines {
		switch {
		case l.Gap != nil:
			t.Errorf("a gap: %s", l.Gap.Reason)
		case l.Event != nil:
			if l.Event.Seq != next || l.Seq != next {
				t.Fatalf("record %d is event %d, want %d", l.Record, l.Event.Seq, next)
			}
			next++
			byAction[l.Action]++
			if l.Event.Session != nil {
				opened++
			}
		}
	}
	if opened != 2 {
		t.Errorf("%d events of sessions", opened)
	}
	all := r.actions()
	if len(all) < 6 {
		t.Errorf("%d actions", len(all))
	}
	for i, v := range all {
		if i > 3 && i < len(all)-3 {
			continue
		}
		code, text, errs := r.cli("action", v.InvocationID, "--json")
		var doc struct{ Events []struct{ From string } }
		if code != 0 || json.Unmarshal([]byte(text), &doc) != nil {
			t.Fatalf("action: %d %s", code, errs)
		}
		if len(doc.Events) != byAction[v.InvocationID] {
			t.Errorf("%s has %d events, %d of them in the log", v.InvocationID, len(doc.Events), byAction[v.InvocationID])
		}
		for _, e := range doc.Events {
			if e.From == "" {
				t.Errorf("%s has an event without a source", v.InvocationID)
			}
		}
	}
	code, shown, errs := r.cli("audit", "show", "--key", key, "--action", all[0].InvocationID)
	if code != 0 || strings.Count(shown, "\n") != byAction[all[0].InvocationID] || !strings.Contains(shown, "ACTION_ACCEPTED") {
		t.Errorf("show: %d %s %s", code, shown, errs)
	}
	_, exported, _ := r.cli("audit", "export", "--key", key)
	if strings.Contains(exported, "confidential-cookie") {
		t.Error("field values of an answer are in the log")
	}
	for name, c := range map[string]*testkit.Canary{"secret": r.canary, "query value": query} {
		testkit.Search(t, c, testkit.In(r.data), testkit.InString(name+" in the log", r.logs.String()), testkit.InString(name+" exported", exported), testkit.In(keys))
	}
	// Nothing of the log is on the proxy's side in clear, and nothing there opens it.
	for _, f := range []string{"pay.example.test", "ACTION_ACCEPTED", "wbaudit1_secret"} {
		for _, s := range []string{"audit"} {
			entries, err := os.ReadDir(filepath.Join(r.data, s))
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range entries {
				b, err := os.ReadFile(filepath.Join(r.data, s, e.Name()))
				if err != nil || strings.Contains(string(b), f) {
					t.Errorf("%s holds %s: %v", e.Name(), f, err)
				}
			}
		}
	}
	// Somebody alters one byte.
	segments, err := filepath.Glob(filepath.Join(r.data, "audit", "*.audit"))
	if err != nil || len(segments) == 0 {
		t.Fatal(err)
	}
	b, err := os.ReadFile(segments[0])
	if err != nil {
		t.Fatal(err)
	}
	b[len(b)/2] ^= 1
	if err := os.WriteFile(segments[0], b, 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out, errs := r.cli("audit", "verify"); code != exitJournalDamaged || !strings.Contains(errs, "record ") {
		t.Errorf("altered: %d %s %s", code, out, errs)
	}
}
