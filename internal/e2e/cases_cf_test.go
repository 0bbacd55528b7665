package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
)

var failedReloads = regexp.MustCompile(`waybill_config_reloads_total\{result="failure"\} (\d+)`)

// TestCaseCF01: a mistake in the route file opens no door, at start and at a reload.
func TestCaseCF01(t *testing.T) {
	t.Run("CF-01", func(t *testing.T) {
		contract.Covers(t, "V1", "D1")
		ca := testkit.NewCA(t)
		b := newBed(t, ca, rigOptions{})
		good, err := os.ReadFile(b.config)
		if err != nil {
			t.Fatal(err)
		}
		bin := b.bin
		place := `(?m)^(waybill: )?%s:[0-9]+:[0-9]+ .*%s`
		for i, c := range []struct{ name, text, field string }{
			{"unknown-key", strings.Replace(string(good), "    deny: true\n", "    deny_path: true\n", 1), `routes\[0\].*deny_path`},
			{"unknown-top", "version: 1\ndeny_all: true\n", "deny_all"},
			{"two-documents", "version: 1\nroutes: []\n---\nversion: 1\ndefault: tunnel\n", "document"},
			{"key-twice", "version: 1\ndefault: deny\ndefault: tunnel\n", "default"},
			{"key-twice-deep", strings.Replace(string(good), "    deny: true\n", "    deny: true\n    deny: false\n", 1), "deny"},
			{"string-for-list", strings.Replace(string(good), "{host: "+adminHost+"}", "{host: "+adminHost+", methods: GET}", 1), "methods"},
			{"unquoted-no", strings.Replace(string(good), "{host: "+adminHost+"}", "{host: "+adminHost+", methods: [NO]}", 1), ""},
			{"boolean-as-name", strings.Replace(string(good), "name: admin", "name: no", 1), ""},
			{"yes-for-true", strings.Replace(string(good), "    deny: true\n", "    deny: yes please\n", 1), "deny"},
			{"empty", "", ""},
			{"only-comments", "# nothing\n", ""},
			{"no-version", "default: deny\n", "version"},
		} {
			file := filepath.Join(b.dir, c.name+".yaml")
			b.write(c.name+".yaml", c.text)
			runs := [][]string{{"check", "--config", file}}
			if i%3 == 0 { // they share the reader: some show that serve uses it
				runs = append(runs, []string{"serve", "--config", file, "--data", b.data + c.name, "--proxy", "127.0.0.1:0", "--metrics", "off", "--allow-any-filesystem"})
			}
			for _, args := range runs {
				code, out, errs := testkit.Run(t, testkit.Command{Path: bin, Args: args, Dir: b.dir})
				if code != 3 {
					t.Errorf("%s %s: exit code %d %s %s", args[0], c.name, code, out, errs)
					continue
				}
				if !regexp.MustCompile(fmt.Sprintf(place, regexp.QuoteMeta(file), c.field)).MatchString(errs) {
					t.Errorf("%s %s: no file, line and field: %s", args[0], c.name, errs)
				}
			}
		}
		// Two routes for the same requests: the first one counts.
		b.write("twice.yaml", "version: 1\nroutes:\n  - name: open\n    match: {host: a.example.test}\n  - name: shut\n    match: {host: a.example.test}\n    deny: true\n")
		if code, out, errs := testkit.Run(t, testkit.Command{Path: bin, Args: []string{"explain", "--config", filepath.Join(b.dir, "twice.yaml"), "GET", "https://a.example.test/"}, Dir: b.dir}); code != 0 || !strings.Contains(out, "open") {
			t.Errorf("two routes: %d %s %s", code, out, errs)
		}

		b.begin()
		hold := testkit.NewGate(t)
		b.on(payHost, "/v1/cf01", testkit.Respond(testkit.Hold(hold), testkit.Reply(200, "bound before")))
		type result struct {
			resp *testkit.Response
			err  error
		}
		running := make(chan result, 1)
		client := b.client(t, false)
		go func() {
			resp, err := testkit.TrySend(t, client, http.MethodPost, "https://"+payHost+"/v1/cf01", "x=1")
			running <- result{resp, err}
		}()
		hold.Await(t)
		reloads := func() string {
			m := failedReloads.FindStringSubmatch(get(t, b.meters))
			if m == nil {
				t.Fatal("no metric of failed reloads")
			}
			return m[1]
		}
		ok := func(path string) *story {
			return b.check(t, b.send(t, http.MethodGet, "https://"+payHost+path, ""), want{status: 200, facts: success, relayed: true, host: payHost, path: path, arrivals: 1})
		}
		before, was := ok("/v1/cf01/before"), reloads()
		// A broken file: the last good snapshot stays.
		b.write("c.yaml", strings.Replace(string(good), "    deny: true\n", "    deny_path: true\n", 1)+"default: tunnel\n")
		b.p.Signal(t, syscall.SIGHUP)
		testkit.Eventually(t, func() error {
			if reloads() == was {
				return fmt.Errorf("the failed reload was not counted")
			}
			return nil
		})
		after := ok("/v1/cf01/after")
		if before.Envelope.Evidence.Snapshot == "" || after.Envelope.Evidence.Snapshot != before.Envelope.Evidence.Snapshot {
			t.Errorf("snapshot %q, was %q", after.Envelope.Evidence.Snapshot, before.Envelope.Evidence.Snapshot)
		}
		if !strings.Contains(b.p.Stderr(), "deny_path") {
			t.Error("the log does not name the mistake")
		}
		b.check(t, b.send(t, http.MethodGet, "https://"+adminHost+"/", ""), want{status: 403, facts: denied})
		// A good file that denies pay: new requests are bound to it, the running one is not.
		b.write("c.yaml", strings.Replace(string(good), "  - name: admin\n    match: {host: "+adminHost+"}\n", "  - name: admin\n    match: {hosts: ["+adminHost+", "+payHost+"]}\n", 1))
		b.p.Signal(t, syscall.SIGHUP)
		testkit.Eventually(t, func() error {
			resp := b.send(t, http.MethodGet, "https://"+payHost+"/v1/cf01/denied", "")
			if resp.Status != 403 {
				return fmt.Errorf("still %d", resp.Status)
			}
			b.check(t, resp, want{status: 403, facts: denied})
			return nil
		})
		hold.Open()
		got := <-running
		if got.err != nil || got.resp.Status != 200 || string(got.resp.Body) != "bound before" {
			t.Fatalf("the running request: %+v %v", got.resp, got.err)
		}
		s := b.check(t, b.hear(got.resp), want{status: 200, facts: success, relayed: true, host: payHost, path: "/v1/cf01", arrivals: 1})
		if s.Envelope.Evidence.Snapshot != before.Envelope.Evidence.Snapshot || s.count(dispatch.PreflightValidated) != 1 {
			t.Errorf("bound to %q, want %q", s.Envelope.Evidence.Snapshot, before.Envelope.Evidence.Snapshot)
		}
		b.finish(t)
	})
}
