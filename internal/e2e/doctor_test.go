package e2e

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

type doctorFinding struct{ Check, Status, What, Fix string }

// found returns the findings of a check that have a status and hold a text.
func found(all []doctorFinding, check, status, text string) (out []doctorFinding) {
	for _, f := range all {
		if f.Check == check && f.Status == status && strings.Contains(f.What, text) {
			out = append(out, f)
		}
	}
	return out
}

func doctorOf(t *testing.T, r *rig, wantCode int, args ...string) ([]doctorFinding, string) {
	t.Helper()
	code, out, errs := r.cli(append([]string{"doctor", "--json", "--allow-any-filesystem", "--timeout", "60s"}, args...)...)
	var doc struct {
		OK       bool
		Findings []doctorFinding
	}
	if err := json.Unmarshal([]byte(out), &doc); err != nil || code != wantCode || doc.OK != (code == 0) {
		t.Fatalf("doctor: exit code %d (want %d), %v\n%s\n%s", code, wantCode, err, out, errs)
	}
	for _, f := range doc.Findings {
		if f.What == "" || f.Fix == "" && (f.Status == "warn" || f.Status == "fail") {
			t.Errorf("a finding without a text or a fix: %+v", f)
		}
	}
	return doc.Findings, out + errs
}

// TestDoctorStatusBugreport asks a running proxy and its machine, with secrets in every
// place where one may stand: clients that go around the proxy, or do not trust it, are
// told apart (CL-05); nothing that is printed or bundled holds a secret (CONTRACT C2).
func TestDoctorStatusBugreport(t *testing.T) {
	contract.Covers(t, "C2")
	ca := testkit.NewCA(t)
	pay := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(a testkit.Arrival) []testkit.Step {
		if strings.HasPrefix(a.Target, "/cut") {
			return []testkit.Step{testkit.Close()}
		}
		return []testkit.Step{testkit.Reply(200, "ok")}
	}})
	own := [3]string{testkit.FreeAddr(t), testkit.FreeAddr(t), testkit.FreeAddr(t)}
	r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: pay.Addr()}, top: "listen: {proxy: \"" + own[0] + "\", metrics: \"" + own[1] + "\", ssh: \"" + own[2] + "\"}\n"})
	other, path, env := testkit.NewCanary(t), testkit.NewCanary(t), testkit.NewCanary(t)
	bin := filepath.Join(r.dir, "bin")
	if err := os.Mkdir(bin, 0o700); err != nil {
		t.Fatal(err)
	}
	curl, err := exec.LookPath("curl")
	if err != nil {
		t.Fatal(err) // scripts/test-deps.sh installs it
	}
	r.write("foreign.pem", string(testkit.NewCA(t).PEM()))
	script := func(name, text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(bin, name), []byte("#!/bin/sh\n"+text+"\n"), 0o700); err != nil { //nolint:gosec // a program
			t.Fatal(err)
		}
	}
	script("curl", `exec `+curl+` "$@"`)
	script("wget", `echo around >&2; exit 0`)
	script("git", `[ "$1" = config ] && exit 1; exec `+curl+` -fsS --cacert `+filepath.Join(r.dir, "foreign.pem")+` "$2"`)
	r.env = []string{"PATH=" + bin, "HTTPS_PROXY=http://" + url.UserPassword("user", other.Value()).String() + "@192.0.2.7:3128", "OPENAI_API_KEY=" + env.Value(), "HOME=" + r.dir}
	r.start()

	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://" + r.addr, Roots: r.roots()})
	for _, p := range []string{"/ok/", "/cut/"} {
		testkit.Send(t, client, http.MethodPost, "https://"+payHost+p+path.Value()+"?k="+path.Value(), "body "+path.Value(), "X-Mine", path.Value())
	}

	findings, printed := doctorOf(t, r, 1)
	for _, want := range []doctorFinding{
		{Check: "client:curl", Status: "ok", What: "trusts its CA"},
		{Check: "client:go", Status: "ok", What: "trusts its CA"},
		{Check: "client:wget", Status: "fail", What: "saw none"},
		{Check: "client:git", Status: "fail", What: "does not trust the Waybill CA"},
		{Check: "client:java", Status: "skip", What: "not here"},
		{Check: "loop", Status: "ok", What: "no trace of the secret"},
		{Check: "variables", Status: "warn", What: "192.0.2.7:3128"},
		{Check: "proxy", Status: "warn", What: "1 action with unknown outcome"},
		{Check: "ports", Status: "ok", What: "the running proxy answers"},
		{Check: "sync", Status: "ok", What: "a sync takes"},
		{Check: "ca", Status: "ok", What: "valid until"},
		{Check: "credentials", Status: "ok", What: "1 credential"},
	} {
		if got := found(findings, want.Check, want.Status, want.What); len(got) == 0 && want.Check != "sync" {
			t.Errorf("no finding %+v in\n%s", want, printed)
		}
	}
	code, text, _ := r.cli("doctor", "--no-clients", "--allow-any-filesystem")
	if code != 0 || !strings.Contains(text, "fix: ") || !strings.Contains(text, "0 failed") {
		t.Errorf("doctor as text: %d\n%s", code, text)
	}

	code, status, errs := r.cli("status", "--json")
	var st struct {
		Running, Ready               bool
		Version, Proxy, Snapshot     string
		Unresolved                   int
		ApprovalsWaiting             int `json:"approvals_waiting"`
		Routes                       int
		Journal                      struct{ State string }
		Audit                        struct{ Enabled bool }
		UptimeSeconds                *int64 `json:"uptime_seconds"`
		Admin, Data, Metrics, NotAny string
	}
	if err := json.Unmarshal([]byte(status), &st); err != nil || code != 0 {
		t.Fatalf("status: %d %v %s", code, err, errs)
	}
	if !st.Running || !st.Ready || st.Proxy != r.addr || st.Unresolved != 1 || st.ApprovalsWaiting != 0 || st.Journal.State != "writable" || st.Routes != 4 || st.UptimeSeconds == nil || !strings.HasPrefix(st.Snapshot, "sha256:") {
		t.Errorf("status: %+v\n%s", st, status)
	}
	code, status2, _ := r.cli("status")
	if code != 0 || !strings.Contains(status2, "ready") || !strings.Contains(status2, "1 action without a known outcome") {
		t.Errorf("status as text: %d\n%s", code, status2)
	}

	file := filepath.Join(r.dir, "b.tar.gz")
	code, told, errs := r.cli("bugreport", "-o", file)
	if code != 0 {
		t.Fatalf("bugreport: %d %s %s", code, told, errs)
	}
	bundle := untar(t, file)
	var all bytes.Buffer
	for name, data := range bundle {
		all.WriteString(name + "\n")
		all.Write(data)
	}
	for _, name := range []string{"status.json", "doctor.json", "metrics.txt", "configuration.yaml", "actions.jsonl", "version.json"} {
		if len(bundle[name]) == 0 {
			t.Errorf("no %s in the bundle", name)
		}
	}
	if n := strings.Count(string(bundle["actions.jsonl"]), "DISPATCH_STARTED"); n != 2 {
		t.Errorf("%d actions with their events, not 2:\n%s", n, bundle["actions.jsonl"])
	}
	for _, private := range []string{payHost, "X-Api-Key", r.dir, "192.0.2.7", `route="pay"`} {
		if strings.Contains(all.String(), private) {
			t.Errorf("the bundle holds %q", private)
		}
	}
	if st, err := os.Stat(file); err != nil || st.Mode().Perm() != 0o600 {
		t.Errorf("mode of the bundle: %v %v", st.Mode(), err)
	}
	if code, _, _ := r.cli("bugreport", "-o", file, "--no-clients"); code != 1 {
		t.Errorf("an existing file: exit code %d, want 1", code)
	}
	r.kill()
	for name, c := range map[string]*testkit.Canary{"secret": r.canary, "other proxy": other, "variable": env, "request": path} {
		t.Run(name, func(t *testing.T) {
			where := []testkit.Where{testkit.InString("doctor", printed+text), testkit.InString("bugreport", told+errs), testkit.InBytes("bundle", all.Bytes()), testkit.InString("status", status+status2)}
			testkit.Search(t, c, where...)
		})
	}

	// Nothing runs now.
	if code, _, errs := r.cli("status"); code != 7 || !strings.Contains(errs, "waybill serve") {
		t.Errorf("status of nothing: %d %s", code, errs)
	}
	r.env = []string{"PATH=" + bin, "HOME=" + r.dir}
	taken, err := net.Listen("tcp", own[0])
	if err != nil {
		t.Fatal(err)
	}
	fixes := func(check, text, fix string) {
		t.Helper()
		findings, out := doctorOf(t, r, 1, "--no-clients")
		f := found(findings, check, "fail", text)
		if len(f) != 1 || !strings.Contains(f[0].Fix, fix) {
			t.Errorf("%s: no failure with %q and the fix %q in\n%s", check, text, fix, out)
		}
		testkit.Search(t, r.canary, testkit.InString("doctor", out))
	}
	fixes("ports", own[0], "listen.proxy")
	_ = taken.Close()
	// Each fault alone, and healed again.
	fault := func(do, heal func() error, check, text, fix string) {
		t.Helper()
		if err := do(); err != nil {
			t.Fatal(err)
		}
		fixes(check, text, fix)
		if err := heal(); err != nil {
			t.Fatal(err)
		}
	}
	secret, key := filepath.Join(r.dir, "secret"), filepath.Join(r.data, "ca", "ca-key.pem")
	fault(func() error { return os.Chmod(r.data, 0o755) }, func() error { return os.Chmod(r.data, 0o700) }, "data", "0755", "chmod 700") //nolint:gosec // the fault
	fault(func() error { return os.Rename(secret, secret+".away") }, func() error { return os.Rename(secret+".away", secret) }, "credentials", "pay", "put it where")
	fault(func() error { return os.Chmod(key, 0o644) }, func() error { return os.Chmod(key, 0o600) }, "ca", "readable by others", "both files") //nolint:gosec // the fault
	good, err := os.ReadFile(r.config)
	if err != nil {
		t.Fatal(err)
	}
	fault(func() error { return os.WriteFile(r.config, append(good, "nonsense: 1\n"...), 0o600) }, func() error { return os.WriteFile(r.config, good, 0o600) }, "config", "nonsense", "waybill check")
	if findings, out := doctorOf(t, r, 0, "--no-clients"); len(found(findings, "ports", "ok", "is free")) != len(own) {
		t.Errorf("healed:\n%s", out)
	}
}

func untar(t *testing.T, file string) map[string][]byte {
	t.Helper()
	f, err := os.Open(file)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	out := map[string][]byte{}
	for r := tar.NewReader(z); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		if out[filepath.Base(h.Name)], err = io.ReadAll(r); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRunSaysWhatToRepair: the last lines of run name what was not sent, and which
// credential was missing, to the operator and not to the program (CONTRACT B3, C1).
func TestRunSaysWhatToRepair(t *testing.T) {
	contract.Covers(t, "B3", "C1")
	ca := testkit.NewCA(t)
	r := newRig(t, ca, rigOptions{top: "  absent-key: {from: {file: nowhere}}\n", routes: "  - {name: keyless, match: {host: keyless.example.test}, inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: absent-key}]}\n"})
	code, out, errs := r.cli("run", "--allow-any-filesystem", "--", "sh", "-c", "for i in 1 2; do curl -s https://keyless.example.test/; done; curl -s https://nobody.example.test/")
	if code != 0 {
		t.Fatalf("run: %d\n%s\n%s", code, out, errs)
	}
	for _, want := range []string{"3 requests: 3 not_attempted", "2 not sent  CREDENTIAL_MISSING  route keyless, credential absent-key (see: waybill check), retry: after_correction", "1 not sent  "} {
		if !strings.Contains(errs, want) {
			t.Errorf("no %q in\n%s", want, errs)
		}
	}
	if strings.Contains(out, "absent-key") {
		t.Errorf("the program was told the credential's name:\n%s", out)
	}
	code, out, _ = r.cli("run", "--json", "--allow-any-filesystem", "--", "true")
	if code != 0 || out != "" {
		t.Errorf("run of nothing: %d %q", code, out)
	}
}
