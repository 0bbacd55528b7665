package e2e

import (
	"strings"
	"testing"

	"waybill/internal/contract"
)

// A command whose exit status was lost is settled by its confirming command, or stays
// unknown: by the CLI, the caller API and in the background (CONTRACT I8, K6).
func TestSSHReconcile(t *testing.T) {
	contract.Covers(t, "I8", "K6", "K1", "K3")
	s := newSSHRig(t, sshOptions{})
	for _, tc := range []struct {
		command, asked string // asked: the confirming command
		outcome, rule  string // rule or reason
	}{
		{"noexit ask done", "say done ID", "committed", "committed_when"},
		{"noexit ask gone", "say gone ID", "rejected", "rejected_when"},
		{"noexit ask nothing", "say nothing ID", "unknown", "no_rule"},
		{"noexit ask done; reboot", "say 'done; reboot' ID", "unknown", "no_rule"},
		{"noexit early", "probe", "unknown", "not_visible_yet"},
		{"noexit broken", "cut", "unknown", "remote_result_incomplete"},
	} {
		t.Run(tc.command, func(t *testing.T) {
			s.sshRun("box.test", "deploy", tc.command)
			v := s.last()
			if v.Outcome != "unknown" {
				t.Fatalf("%q", facts(v))
			}
			id := v.InvocationID
			code, out, errs := s.cli("reconcile", id)
			want := 0
			if tc.outcome == "unknown" {
				want = 1
			}
			if code != want || !strings.HasPrefix(out, id+" "+tc.outcome) {
				t.Errorf("reconcile: %d %q %s", code, out, errs)
			}
			asked := strings.ReplaceAll(tc.asked, "ID", id)
			if s.box.Ran(asked) != 1 || s.box.Ran(tc.command) != 1 {
				t.Errorf("%q ran %d times, the command %d", asked, s.box.Ran(asked), s.box.Ran(tc.command))
			}
			query := s.last()
			if query.InvocationID == id || query.Caller != v.Caller || query.Route != "box" {
				t.Errorf("the confirming command is no action of its own: %+v", query)
			}
			if ev := s.evidence(query.InvocationID); ev.LinkedTo != id || ev.LinkKind != "reconcile" {
				t.Errorf("it is not linked: %+v", ev)
			}
			ev := s.evidence(id)
			if ev.Queries != 1 || ev.ExitStatus != nil {
				t.Errorf("%+v", ev)
			}
			if tc.outcome == "unknown" {
				if _, text, _ := s.cli("action", id, "--json"); len(ev.Resolutions) > 0 || !strings.Contains(text, tc.rule) {
					t.Errorf("%+v\n%s", ev.Resolutions, text)
				}
				return
			}
			if len(ev.Resolutions) != 1 || ev.Source != "remote_query" || ev.Resolutions[0].Query != query.InvocationID || ev.Resolutions[0].Rule != tc.rule {
				t.Errorf("%s %+v", ev.Source, ev.Resolutions)
			}
		})
	}
	t.Run("a caller cannot run it", func(t *testing.T) {
		// The confirming command of a rule is no pattern for callers (V1).
		if s.sshRun("box.test", "deploy", "probe"); s.last().Code != "ROUTE_NOT_FOUND" || s.box.Ran("probe") != 1 {
			t.Errorf("%q, ran %d times", facts(s.last()), s.box.Ran("probe"))
		}
	})
	t.Run("background", func(t *testing.T) {
		s.sshRun("box.test", "deploy", "cut auto")
		var id string
		for _, v := range s.actions() {
			if strings.HasSuffix(v.Target, "cut …") && s.box.Ran("cut auto") == 1 && s.evidence(v.InvocationID).LinkKind == "" {
				id = v.InvocationID
				break
			}
		}
		until(t, "it is asked", func() bool { return s.evidence(id).Source == "remote_query" })
		if s.box.Ran("exit0") == 0 || s.box.Ran("cut auto") != 1 {
			t.Errorf("asked %d times", s.box.Ran("exit0"))
		}
	})
	s.verify()
}

// What the configuration makes of a command is shown without a target, and without the
// command line (CONTRACT V1, I8).
func TestSSHExplain(t *testing.T) {
	contract.Covers(t, "I8", "V1", "C2")
	s := newSSHRig(t, sshOptions{})
	for _, tc := range []struct {
		args []string
		code int
		want []string
	}{
		{[]string{"deploy@box.test", "noexit", "ask", "x;y"}, 0, []string{"decision     run", "pattern      regexp noexit ask (.*) (commands[3])", "key          credential key", "LANG, and WAYBILL_ACTION_ID by Waybill",
			"not repeatable", "if unknown   say 'x;y' ${action_id}", "when asked", "connection lost, or no exit status", "REMOTE_RESULT_INCOMPLETE"}},
		{[]string{"deploy@box.test:22", "safe thing"}, 0, []string{"repeatable, output may stay open for 2s", "backoff"}},
		{[]string{"deploy@box.test", "exitnoclose authoritative"}, 0, []string{"the exit status is authoritative, output may stay open for 300ms"}},
		{[]string{"deploy@box.test", "reboot s3cret"}, 1, []string{"decision     no_route", "ROUTE_NOT_FOUND", "only the commands"}},
		{[]string{"root@box.test", "exit0"}, 1, []string{"only as deploy"}},
		{[]string{"box.test", "exit0"}, 2, []string{"name the remote user"}},
		{[]string{"deploy@box.test"}, 2, []string{"give the target and the command"}},
	} {
		code, out, errs := s.cli(append([]string{"explain", "ssh"}, tc.args...)...)
		if code != tc.code || strings.Contains(out+errs, "s3cret") {
			t.Errorf("%q: %d %s%s", tc.args, code, out, errs)
		}
		for _, w := range tc.want {
			if !strings.Contains(out+errs, w) {
				t.Errorf("%q: no %q in\n%s%s", tc.args, w, out, errs)
			}
		}
	}
	code, out, errs := s.cli("explain", "--json", "ssh", "deploy@box.test", "noexit early")
	if code != 0 || !strings.Contains(out, `"confirm": "probe"`) || !strings.Contains(out, `"at": "exit status 0"`) || strings.Contains(out, "early\n") {
		t.Errorf("%d %s%s", code, out, errs)
	}
	if _, samples := scrape(t, s.meters); sum(samples, "waybill_caller_connections_total", map[string]string{"endpoint": "ssh"}) != 0 {
		t.Error("a connection is counted that nobody made")
	}
	s.sshRun("box.test", "deploy", "exit0")
	if _, samples := scrape(t, s.meters); sum(samples, "waybill_caller_connections_total", map[string]string{"endpoint": "ssh"}) != 1 || sum(samples, "waybill_caller_connections_total", map[string]string{"endpoint": "proxy"}) != 0 {
		t.Error("the connection of an SSH client is not counted where it came")
	}
}

// The configuration of docs/ssh.md is good, and takes what it says.
func TestSSHDocumented(t *testing.T) {
	s := newSSHRig(t, sshOptions{})
	s.write("c.yaml", strings.Replace(documented(t, "yaml"), "/run/secrets/deploy_key", "key", 1))
	if code, out, errs := s.cli("check"); code != 0 {
		t.Errorf("check: %d %s%s", code, out, errs)
	}
	for command, want := range map[string]int{"uptime": 0, "git-upload-pack '/srv/r.git'": 0, "systemctl restart app-web": 0, "git-receive-pack '/srv/r.git'": 1, "systemctl restart db": 1} {
		if code, out, errs := s.cli("explain", "ssh", "deploy@box.example.com", command); code != want {
			t.Errorf("%s: %d %s%s", command, code, out, errs)
		}
	}
}

// A command that a person has to approve: nothing runs before, it runs once, with the
// input that was approved, and its result is fetched (CONTRACT D3, D5).
func TestSSHApproval(t *testing.T) {
	contract.Covers(t, "D3", "D5", "H3")
	s := newSSHRig(t, sshOptions{more: "    approval: {hold: 50ms, expiry: 1h}\n"})
	g := s.run(strings.NewReader("amount=7\n"), nil, "ssh", "-F", s.conf, "deploy@box.test", "cat order")
	v := s.last()
	if g.code != 255 || v.Code != "APPROVAL_PENDING" || v.Outcome != "not_attempted" || !strings.Contains(g.stderr, "APPROVAL_PENDING") || s.box.Ran("cat order") != 0 {
		t.Fatalf("%d %q\n%s", g.code, facts(v), g.stderr)
	}
	code, out, errs := s.cli("approvals", v.InvocationID)
	if code != 0 || !strings.Contains(out, "EXEC ssh://deploy@box.test") || !strings.Contains(out, "cat order") || !strings.Contains(out, "amount=7") {
		t.Errorf("what is approved is not shown: %d %s%s", code, out, errs)
	}
	if code, _, errs := s.cli("approve", v.InvocationID); code != 0 {
		t.Fatalf("approve: %d %s", code, errs)
	}
	if done := s.settled(v.InvocationID); done.Outcome != "committed" {
		t.Errorf("%q", facts(done))
	}
	if code, _, _ := s.cli("approve", v.InvocationID); code == 0 {
		t.Error("it was approved twice")
	}
	if s.box.Ran("cat order") != 1 || s.box.Stdin("cat order") != "amount=7\n" {
		t.Errorf("ran %d times, with %q", s.box.Ran("cat order"), s.box.Stdin("cat order"))
	}
	if code, out, errs := s.cli("result", v.InvocationID); code != 0 || out != "amount=7\n" {
		t.Errorf("result: %d %q %s", code, out, errs)
	}
	g = s.sshRun("box.test", "deploy", "exit0")
	if v := s.last(); g.code != 255 || v.Code != "APPROVAL_PENDING" {
		t.Fatalf("%d %q\n%s", g.code, facts(v), g.stderr)
	}
	if code, _, errs := s.cli("deny", s.last().InvocationID); code != 0 {
		t.Fatalf("deny: %d %s", code, errs)
	}
	if s.box.Ran("exit0") != 0 {
		t.Error("what was denied ran")
	}
	s.verify()
}
