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
