package routes

import (
	"slices"
	"testing"
	"time"

	"waybill/internal/contract"
)

func sshRoute(commands ...Command) Route {
	return Route{Name: "box", Match: Match{Hosts: []string{"box.test"}}, SSH: &SSH{Users: []string{"deploy"}, Key: "k", Pins: []string{"SHA256:x"}, Commands: commands}}
}

// What a command line means if every shell reads it alike, and nothing otherwise.
func TestSplitCommand(t *testing.T) {
	contract.Covers(t, "V1")
	for in, want := range map[string][]string{
		"uptime": {"uptime"}, "a  b\tc ": {"a", "b", "c"}, `a 'b c' "d e" f\ g`: nil, `a 'b;c' "d|e"`: {"a", "b;c", "d|e"}, `a\;b`: {"a;b"}, "a ''": {"a", ""},
		"": nil, " ": nil, "a;b": nil, "a && b": nil, "a|b": nil, "a $x": nil, "a `b`": nil, "a $(b)": nil, "a >f": nil, "a *": nil, "a ?": nil, "a {b,c}": nil, "a ~": nil,
		"X=1 a": nil, "a X=1": {"a", "X=1"}, "a #b": nil, "a\nb": nil, "a 'b\nc'": nil, `a "b$c"`: nil, `a "b!c"`: nil, "a 'b": nil, `a "b`: nil, `a\`: nil, "a !b": nil, "a =b": nil, "'' a": nil, "a \x00": nil, "a é": nil,
	} {
		got, ok := SplitCommand(in)
		if ok != (want != nil) || ok && !slices.Equal(got, want) {
			t.Errorf("%q: %q %v", in, got, ok)
		}
		if ok {
			if again, ok := SplitCommand(JoinCommand(got)); !ok || !slices.Equal(again, got) {
				t.Errorf("%q does not come back: %q", in, again)
			}
		}
	}
}

// The first rule that takes a command counts, and what none takes is refused; a pattern
// takes neither options nor ways out of a folder that it does not write.
func TestMatchSSH(t *testing.T) {
	contract.Covers(t, "V1", "I8")
	s, err := NewSnapshot([]Route{sshRoute(Command{Exact: "a; b"}, Command{Argv: []string{"scp", "-t", "/srv/**"}}, Command{Argv: []string{"run", "*"}, Repeatable: true},
		Command{Argv: []string{"any", "..."}}, Command{Regexp: `release ([a-z]+)|x`, Reconcile: &Confirm{Command: "test ${1} ${action_id}", CommittedWhen: &Verdict{ExitStatus: []int{0}}, RejectedWhen: &Verdict{ExitStatus: []int{1}, Stdout: "no"}, VisibleAfter: time.Minute}})}, Deny, nil)
	if err != nil {
		t.Fatal(err)
	}
	at := Target{Scheme: "ssh", Host: "box.test", Port: 22}
	for command, rule := range map[string]int{
		"a; b": 0, "a;b": -1, "scp -t /srv/x/y": 1, "scp -t /srv/../etc": -1, "scp -t /srv/a/../../etc": -1, "scp -t /etc": -1, "scp -f /srv/x": -1, "run x": 2, "run 'x y'": 2, "run -x": -1, "run a/b": -1, "run": -1, "run a b": -1,
		"run $(x)": -1, "any": 3, "any -x; y": -1, "any -x 'y z'": 3, "release abc": 4, "release abc;x": -1, "xx": -1, "x": 4, "x\n": -1, "": -1,
	} {
		r, m, miss := s.MatchSSH(at, "deploy", command)
		if (r != nil) != (rule >= 0) || r != nil && m.Index != rule || r == nil && miss.Kind != MissCommand {
			t.Errorf("%q: %v %v", command, m, miss.Kind)
		}
	}
	for _, tc := range []struct {
		host string
		port int
		user string
		kind MissKind
	}{{"else.test", 22, "deploy", MissHost}, {"box.test", 2222, "deploy", MissPort}, {"box.test", 22, "root", MissUser}} {
		if r, _, miss := s.MatchSSH(Target{Scheme: "ssh", Host: tc.host, Port: tc.port}, tc.user, "a; b"); r != nil || miss.Kind != tc.kind {
			t.Errorf("%+v: %v", tc, miss.Kind)
		}
	}
	if r, _ := s.Match("GET", Target{Scheme: "https", Host: "box.test", Port: 443}, "/"); r != nil {
		t.Error("an ssh route takes an HTTP request")
	}
	_, m, _ := s.MatchSSH(at, "deploy", "release abc")
	if got, missing := m.Rule.Reconcile.Render("act_1", m.Captured()); got != "test abc act_1" || missing != "" {
		t.Errorf("confirming command %q, %q", got, missing)
	}
	if got, _ := m.Rule.Reconcile.Render("act_1", map[string]string{"1": "a; reboot"}); got != "test 'a; reboot' act_1" {
		t.Errorf("confirming command %q", got)
	}
	if _, missing := m.Rule.Reconcile.Render("act_1", nil); missing != "${1}" {
		t.Errorf("missing %q", missing)
	}
	for _, tc := range []struct {
		status, want int
		out          string
	}{{0, 1, ""}, {1, 0, ""}, {1, -1, "no"}, {2, 0, "no"}} {
		if got := m.Rule.Reconcile.Judge(tc.status, []byte(tc.out)); got != tc.want {
			t.Errorf("%+v: %d", tc, got)
		}
	}
}

// What decides about commands is in the digest (CONTRACT D1).
func TestSSHDigest(t *testing.T) {
	contract.Covers(t, "D1", "E6")
	digest := func(change func(*Route)) string {
		r := sshRoute(Command{Exact: "a"})
		change(&r)
		s, err := NewSnapshot([]Route{r}, Deny, nil)
		if err != nil {
			t.Fatal(err)
		}
		return s.Digest()
	}
	seen := map[string]bool{digest(func(*Route) {}): true}
	for i, change := range []func(*Route){
		func(r *Route) { r.SSH.Users = []string{"root"} }, func(r *Route) { r.SSH.Key = "l" }, func(r *Route) { r.SSH.Pins = []string{"SHA256:y"} }, func(r *Route) { r.SSH.KnownHosts = []byte("x") },
		func(r *Route) { r.SSH.Env = []string{"LANG"} }, func(r *Route) { r.SSH.Commands[0].Repeatable = true }, func(r *Route) { r.SSH.Commands[0].ExitAuthoritative = true },
		func(r *Route) { r.SSH.Jump = &Jump{Host: "j.test", Port: 22, User: "j", Key: "k"} }, func(r *Route) { r.SSH.Passphrase = "p" }, func(r *Route) { r.SSH.Certificate = "c" },
	} {
		d := digest(change)
		if seen[d] {
			t.Errorf("change %d does not count", i)
		}
		seen[d] = true
	}
}

func FuzzSplitCommand(f *testing.F) {
	for _, s := range []string{"a 'b c'", `a "b" \;`, "x=1 y"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		argv, ok := SplitCommand(s)
		if !ok {
			return
		}
		if again, ok := SplitCommand(JoinCommand(argv)); !ok || !slices.Equal(again, argv) {
			t.Errorf("%q: %q, then %q", s, argv, again)
		}
	})
}
