package e2e

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/killpoint"
	"waybill/internal/testkit"
	"waybill/outcome"
)

// sshRig is a proxy with an SSH endpoint towards a scripted server ("box.test") and, if
// asked for, a real one ("real.test").
type sshRig struct {
	*rig
	key    []byte
	signer ssh.Signer
	box    *testkit.SSHServer
	real   *testkit.SSHD
	conf   string // ssh_config
	user   string // of the real server
	ssh    string // address of the endpoint
}

type sshOptions struct {
	box    testkit.SSHOptions
	real   bool
	top    string // further top-level YAML
	limits string // of the box's route
	more   string // further keys of it, and routes; BOX is its address, REAL and USER those of the real server
	known  string // in place of the box's line
	env    []string
	files  map[string]string // beside the configuration
}

var listeningSSH = regexp.MustCompile(`(?s)proxy\s+http://(\S+)\s+metrics\s+(http://\S+)\s+admin\s+unix:\S+\s+ssh\s+(\S+)\n`)

func newSSHRig(t testing.TB, o sshOptions) *sshRig {
	t.Helper()
	s := &sshRig{user: "nobody"}
	s.key, s.signer = testkit.SSHKey(t, "")
	if o.box.Authorized == nil {
		o.box.Authorized = s.signer.PublicKey()
	}
	s.box = testkit.NewSSHServer(t, o.box)
	known := o.known
	if known == "" {
		known = s.box.KnownHosts("box.test", 22)
	}
	if o.limits == "" {
		o.limits = "{timeout: 4s}"
	}
	routes := fmt.Sprintf(`  - name: box
    match: {host: box.test}
    ssh:
      users: [deploy]
      credential: key
      known_hosts: known_hosts
      env: [LANG, WAYBILL_ACTION_ID]
      commands:
        - {argv: [safe, "..."], repeatable: true}
        - {exact: "exitnoclose authoritative", exit_status: authoritative, grace: 300ms}
        - exact: wait confirmed
          reconcile: {command: "say ${action_id}", committed_when: {exit_status: [0]}}
        - regexp: "noexit ask (.*)"
          reconcile: {command: "say ${1} ${action_id}", committed_when: {exit_status: [0], stdout: "^done act_"}, rejected_when: {exit_status: [0], stdout: "^gone act_"}, visible_after: 1ms, background: false}
        - exact: noexit early
          reconcile: {command: probe, rejected_when: {exit_status: [127]}, visible_after: 1h, background: false}
        - exact: noexit broken
          reconcile: {command: cut, committed_when: {stdout: half}, background: false}
        - exact: cut auto
          reconcile: {command: exit0, committed_when: {exit_status: [0]}, every: 50ms}
        - {regexp: "(exit|say|cat|wait|sig|hang|flood|signal|noexit|cut|status|close|eof|no|canary).*", grace: 500ms}
        - {argv: [execrefused]}
    upstream: {resolve: {box.test: "%s"}}
    limits: %s
%s`, s.box.Addr, o.limits, o.more)
	if o.real {
		s.real = testkit.StartSSHD(t, s.signer.PublicKey())
		s.user = s.real.User
		known += s.real.KnownHosts("*.real.test,real.test", 22)
		routes += fmt.Sprintf(`  - name: real
    match: {host: real.test}
    ssh:
      users: [%s]
      credential: key
      known_hosts: known_hosts
      env: [LANG, WAYBILL_ACTION_ID, GIT_PROTOCOL]
      commands: [{regexp: "(?s).*"}]
    upstream: {resolve: {real.test: "%s"}}
`, s.user, s.real.Addr)
	}
	routes = strings.ReplaceAll(routes, "BOX", s.box.Addr)
	if s.real != nil {
		routes = strings.NewReplacer("REAL", s.real.Addr, "USER", s.user).Replace(routes)
	}
	s.rig = newRig(t, testkit.NewCA(t), rigOptions{routes: routes, top: "  key: {from: {file: key}}\n" + o.top})
	s.rig.env = o.env
	s.write("key", string(s.key))
	s.write("known_hosts", known)
	for name, text := range o.files {
		s.write(name, text)
	}
	s.startSSH()
	return s
}

// startSSH starts the proxy, always at the same address once it has one.
func (s *sshRig) startSSH() {
	s.t.Helper()
	addr := s.ssh
	if addr == "" {
		addr = testkit.FreeAddr(s.t)
	}
	s.rig.flags = []string{"--ssh", addr}
	s.rig.start()
	m := s.p.WaitLine(s.t, listeningSSH)
	s.ssh = m[3]
	code, out, errs := s.cli("ssh-config", "--ssh", s.ssh)
	if code != 0 {
		s.t.Fatalf("ssh-config: %d %s", code, errs)
	}
	s.write("ssh_config", out)
	s.conf = filepath.Join(s.dir, "ssh_config")
}

// got is what a program did.
type got struct {
	code           int
	stdout, stderr string
	took           time.Duration
}

// run runs a program of this machine.
func (s *sshRig) run(stdin io.Reader, env []string, name string, args ...string) got {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Stdin, cmd.Dir = stdin, s.dir
	cmd.Env = append(testkit.CleanEnv(), append(s.environ(), env...)...)
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	begin := time.Now()
	err := cmd.Run()
	g := got{stdout: out.String(), stderr: errs.String(), took: time.Since(begin)}
	if err != nil {
		g.code = cmd.ProcessState.ExitCode()
	}
	return g
}

func (s *sshRig) sshRun(host, user, command string, more ...string) got {
	s.t.Helper()
	args := append([]string{"-F", s.conf}, more...)
	return s.run(strings.NewReader(""), nil, "ssh", append(args, user+"@"+host, command)...)
}

// last is the newest action.
func (s *sshRig) last() dispatch.ActionView {
	s.t.Helper()
	all := s.actions()
	if len(all) == 0 {
		s.t.Fatal("no action")
	}
	return all[0]
}

// envelope reads an action's evidence through the command.
func (s *sshRig) evidence(id string) outcome.Evidence {
	s.t.Helper()
	code, out, errs := s.cli("action", id, "--json")
	if code != 0 {
		s.t.Fatalf("waybill action: %d %s", code, errs)
	}
	var doc struct {
		Envelope outcome.Envelope `json:"envelope"`
	}
	if err := json.Unmarshal([]byte(out), &doc); err != nil {
		s.t.Fatal(err)
	}
	return doc.Envelope.Evidence
}

func facts(v dispatch.ActionView) string {
	return strings.TrimSuffix(strings.Join([]string{v.Phase, v.Outcome, v.Retry, v.Code}, " "), " ")
}

// What becomes of commands, told to a real ssh client: its exit code, the first line of
// its stderr, the record (CONTRACT G9, L6; cases SH-*).
func TestSSHOutcomes(t *testing.T) {
	t.Parallel()
	s := newSSHRig(t, sshOptions{})
	for _, tc := range []struct {
		command string
		code    int
		facts   string
		stdout  string
		runs    int
		status  string // in the evidence; "": none
	}{
		{"exit0", 0, "remote_execution committed never", "hi\n", 1, "0"},
		{"exit 3", 3, "remote_execution committed reconcile REMOTE_ERROR", "step1 done\n", 1, "3"},
		{"no-such-binary", 127, "remote_execution committed reconcile REMOTE_ERROR", "", 1, "127"},
		{"signal", 255, "remote_execution committed reconcile REMOTE_ERROR", "", 1, ""},
		{"noexit", 255, "remote_execution unknown reconcile REMOTE_RESULT_INCOMPLETE", "created id=7", 1, ""},
		{"cut", 255, "remote_execution unknown reconcile REMOTE_RESULT_INCOMPLETE", "half", 1, ""},
		{"status-cut", 255, "remote_execution unknown reconcile REMOTE_RESULT_INCOMPLETE", "half", 1, "0"},
		{"exitnoclose", 255, "remote_execution unknown reconcile REMOTE_RESULT_INCOMPLETE", "made\n", 1, "0"},
		{"exitnoclose authoritative", 0, "remote_execution committed never", "made\n", 1, "0"}, // with a word on stderr
		{"eofnoclose", 0, "remote_execution committed never", "made\n", 1, "0"},
		{"cut-before-reply", 255, "remote_execution unknown reconcile REMOTE_OUTCOME_UNKNOWN", "", 1, ""},
		{"hang", 255, "remote_execution unknown reconcile REMOTE_TIMEOUT", "started\n", 1, ""},
		{"execrefused", 255, "remote_execution rejected after_correction EXEC_REFUSED", "", 1, ""},
		{"reboot", 255, "validation not_attempted after_correction ROUTE_NOT_FOUND", "", 0, ""},
		{"safe; reboot", 255, "validation not_attempted after_correction ROUTE_NOT_FOUND", "", 0, ""},
	} {
		t.Run(tc.command, func(t *testing.T) {
			contract.Covers(t, "G9", "F4", "L6", "F8", "T3", "V1")
			g := s.sshRun("box.test", "deploy", tc.command)
			v := s.last()
			if g.code != tc.code || g.stdout != tc.stdout || facts(v) != tc.facts || s.box.Ran(tc.command) != tc.runs {
				t.Errorf("exit %d, stdout %q, %q, ran %d times\n%s", g.code, g.stdout, facts(v), s.box.Ran(tc.command), g.stderr)
			}
			if g.took > 15*time.Second {
				t.Errorf("it took %v", g.took)
			}
			ev := s.evidence(v.InvocationID)
			status := ""
			if ev.ExitStatus != nil {
				status = fmt.Sprint(*ev.ExitStatus)
			}
			if status != tc.status {
				t.Errorf("evidence: exit_status %q", status)
			}
			if incomplete := strings.Contains(g.stderr, "waybill: "+v.InvocationID+": the output above is incomplete"); incomplete != strings.HasSuffix(tc.command, "authoritative") {
				t.Errorf("incomplete output that counts is told: %v\n%s", incomplete, g.stderr)
			}
			if tc.code == 255 && v.Code != "REMOTE_ERROR" {
				line, rest, _ := strings.Cut(g.stderr, "\n")
				if want := "waybill: " + v.Code + " " + v.InvocationID + ": "; !strings.HasPrefix(line, want) {
					t.Errorf("the first line is %q, not %q…", line, want)
				}
				var env outcome.Envelope
				if err := json.Unmarshal([]byte(strings.SplitN(rest, "\n", 2)[0]), &env); err != nil || env.InvocationID != v.InvocationID || env.Error.Code.String() != v.Code {
					t.Errorf("no envelope: %v %q", err, rest)
				}
			}
			if tc.command == "signal" && (ev.ExitSignal != "KILL" || strings.Contains(fmt.Sprint(ev), "hunter2")) {
				t.Errorf("%+v", ev)
			}
		})
	}
	t.Run("evidence", func(t *testing.T) {
		contract.Covers(t, "E2", "E6", "H10")
		for _, v := range s.actions() {
			if v.Target != "ssh://deploy@box.test status-cut" {
				continue
			}
			ev := s.evidence(v.InvocationID)
			if ev.Peer == nil || ev.Peer.HostKey != ssh.FingerprintSHA256(s.box.HostKey.PublicKey()) || ev.OutputComplete == nil || *ev.OutputComplete || *ev.StdoutBytes != 4 || ev.ChannelClosed == nil || *ev.ChannelClosed {
				t.Errorf("%+v", ev)
			}
			code, out, _ := s.cli("result", v.InvocationID)
			if code == 0 || strings.Contains(out, "half") {
				t.Errorf("a partial output is given out as a result: %d %q", code, out)
			}
			return
		}
		t.Error("no such action")
	})
	s.verify()
}

// Before the boundary: what the caller sees, and that nothing ran (CONTRACT E1, E2).
func TestSSHSetup(t *testing.T) {
	for _, tc := range []struct {
		name   string
		opts   sshOptions
		facts  string
		stage  outcome.Stage
		detail string
		status int
	}{
		{"auth", sshOptions{box: testkit.SSHOptions{RefuseAuth: true}}, "connection_setup not_attempted after_correction SSH_AUTH_FAILED", outcome.StageSSHHostKey, `user "deploy"`, 422},
		{"session", sshOptions{box: testkit.SSHOptions{RefuseSession: true}}, "connection_setup not_attempted backoff SSH_CHANNEL_REFUSED", outcome.StageSSHAuth, "", 502},
		{"silent", sshOptions{box: testkit.SSHOptions{Silent: true}, limits: "{connect: 1s}"}, "connection_setup not_attempted backoff SSH_HANDSHAKE_FAILED", outcome.StageTCPConnect, "", 502},
		{"http", sshOptions{box: testkit.SSHOptions{Banner: "HTTP/1.1 400 Bad Request\r\n\r\n"}}, "connection_setup not_attempted backoff SSH_HANDSHAKE_FAILED", outcome.StageTCPConnect, "", 502},
		{"unknown", sshOptions{known: "else.test ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFy8epLkCNiBTx2/bwgvQ4Byb0yBDnimvOBT1e9gRfXb\n"}, "connection_setup not_attempted after_correction SSH_HOST_KEY_REJECTED", outcome.StageSSHTransport, "SHA256:", 422},
		{"changed", sshOptions{known: "box.test ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIFy8epLkCNiBTx2/bwgvQ4Byb0yBDnimvOBT1e9gRfXb\n"}, "connection_setup not_attempted after_correction SSH_HOST_KEY_REJECTED", outcome.StageSSHTransport,
			"The host key changed: the host shows ssh-ed25519 SHA256:", 422},
	} {
		t.Run(tc.name, func(t *testing.T) {
			contract.Covers(t, "E1", "E2", "E8", "L7")
			s := newSSHRig(t, tc.opts)
			g := s.sshRun("box.test", "deploy", "exit0")
			v := s.last()
			if g.code != 255 || facts(v) != tc.facts || !strings.Contains(g.stderr, tc.detail) || v.DispatchStarted || s.box.Ran("exit0") != 0 {
				t.Errorf("%d %q\n%s", g.code, facts(v), g.stderr)
			}
			if ev := s.evidence(v.InvocationID); ev.Stage != tc.stage {
				t.Errorf("stage %q", ev.Stage)
			}
			// The same by the API, with a status that says whether to wait and repeat (L7).
			if status, body := s.post(map[string]any{"target": "box.test", "user": "deploy", "command": "exit0"}, ""); status != tc.status || (body["retry_after"] != "") != (tc.status == 502) || s.box.Ran("exit0") != 0 {
				t.Errorf("API: %d %v", status, body)
			}
			if tc.name == "silent" && (g.took > 5*time.Second || len(s.box.Offered()) > 0) {
				t.Errorf("%v, %d keys offered", g.took, len(s.box.Offered()))
			}
		})
	}
}

// What is not carried is refused with what is (item 6), and recorded.
func TestSSHUnsupported(t *testing.T) {
	contract.Covers(t, "B1", "B2", "M6")
	s := newSSHRig(t, sshOptions{})
	base := []string{"-F", s.conf}
	for name, args := range map[string][]string{
		"shell":     append(base, "deploy@box.test"),
		"pty shell": append(base, "-tt", "deploy@box.test"),
		"subsystem": append(base, "-s", "deploy@box.test", "sftp"),
		"forward":   append(base, "-W", "127.0.0.1:1", "deploy@box.test"),
	} {
		g := s.run(strings.NewReader(""), nil, "ssh", args...)
		v := s.last()
		if g.code != 255 || facts(v) != "validation not_attempted after_correction UNSUPPORTED_ACTION" || !strings.Contains(g.stderr, "UNSUPPORTED_ACTION") || !strings.Contains(g.stderr, "ssh HOST COMMAND") {
			t.Errorf("%s: %d %q\n%s", name, g.code, facts(v), g.stderr)
		}
		if name == "subsystem" && !strings.Contains(g.stderr, "scp -O") {
			t.Errorf("no word of scp -O: %s", g.stderr)
		}
	}
	// What a client asks for beside a command: its agent is not forwarded, nor a port.
	for name, args := range map[string][]string{"agent": {"-A"}, "port": {"-R", "127.0.0.1:0:127.0.0.1:1"}, "x11": {"-X"}} {
		g := s.run(strings.NewReader(""), []string{"SSH_AUTH_SOCK=" + filepath.Join(s.dir, "none"), "DISPLAY=:9"}, "ssh", append(append(base, args...), "deploy@box.test", "exit 7")...)
		if g.code != 7 || name == "port" && !strings.Contains(g.stderr, "forwarding failed") {
			t.Errorf("%s: %+v", name, g)
		}
	}
	// It may have sent the command before it reads the refusal.
	if g := s.sshRun("box.test", "deploy", "exit 8", "-o", "ExitOnForwardFailure=yes", "-R", "127.0.0.1:0:127.0.0.1:1"); g.code != 255 {
		t.Errorf("a client that insists on forwarding: %+v", g)
	}
	// With a command a terminal is not needed: it runs without.
	if g := s.sshRun("box.test", "deploy", "exit0", "-tt"); g.code != 0 || !strings.Contains(g.stdout, "hi") {
		t.Errorf("command with -t: %+v", g)
	}
}

// A repeat of an open unknown is refused until it names it (CONTRACT O3).
func TestSSHSupersedes(t *testing.T) {
	contract.Covers(t, "O3", "I8")
	s := newSSHRig(t, sshOptions{})
	s.sshRun("box.test", "deploy", "noexit")
	first := s.last()
	g := s.sshRun("box.test", "deploy", "noexit")
	if v := s.last(); v.Code != "DUPLICATE_SUSPECTED" || s.box.Ran("noexit") != 1 || !strings.Contains(g.stderr, "WAYBILL_SUPERSEDES") || s.evidence(v.InvocationID).EarlierAction != first.InvocationID {
		t.Errorf("%q\n%s", facts(v), g.stderr)
	}
	s.sshRun("box.test", "deploy", "noexit", "-o", "SetEnv=WAYBILL_SUPERSEDES="+first.InvocationID)
	if v := s.last(); v.Code != "REMOTE_RESULT_INCOMPLETE" || s.box.Ran("noexit") != 2 {
		t.Errorf("%q", facts(v))
	}
	// A command that failed with a status may be run again at once.
	for range 2 {
		s.sshRun("box.test", "deploy", "exit 4")
	}
	if s.box.Ran("exit 4") != 2 {
		t.Errorf("ran %d times", s.box.Ran("exit 4"))
	}
	// And so may one that is declared repeatable, while its outcome is open.
	for range 2 {
		s.sshRun("box.test", "deploy", "safe thing")
	}
	if v := s.last(); s.box.Ran("safe thing") != 2 {
		t.Errorf("%q: ran %d times", facts(v), s.box.Ran("safe thing"))
	}
	if _, ok := s.box.Env("WAYBILL_SUPERSEDES"); ok {
		t.Error("a variable for Waybill was passed on")
	}
	if id, _ := s.box.Env("WAYBILL_ACTION_ID"); id != s.last().InvocationID {
		t.Errorf("the marker is %q", id)
	}
}

// A client that leaves stops nothing that was started; the result is there (F5, H2).
func TestSSHCallerLeaves(t *testing.T) {
	contract.Covers(t, "F5", "H2", "H3")
	s := newSSHRig(t, sshOptions{limits: "{timeout: 30s}"})
	cmd := exec.Command("ssh", "-F", s.conf, "deploy@box.test", "wait here")
	cmd.Env = append(testkit.CleanEnv(), s.environ()...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	line := make([]byte, len("started\n"))
	if _, err := io.ReadFull(out, line); err != nil {
		t.Fatal(err)
	}
	_ = cmd.Process.Kill()
	_ = cmd.Wait()
	until(t, "the leaving is noticed", func() bool { return s.p.Running() && s.evidence(s.last().InvocationID).Running })
	s.box.Release()
	until(t, "the action ends", func() bool { return s.last().Ended })
	v := s.last()
	if v.Outcome != "committed" || s.box.Ran("wait here") != 1 {
		t.Errorf("%q", facts(v))
	}
	code, text, errs := s.cli("result", v.InvocationID)
	if code != 0 || text != "started\ndone\n" {
		t.Errorf("result: %d %q %s", code, text, errs)
	}
}

func until(t testing.TB, what string, f func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !f(); {
		if time.Now().After(deadline) {
			t.Fatalf("it never came: %s", what)
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// SIGKILL at each point of a command's way: the target's ledger is the oracle (T2).
func TestSSHKillPoints(t *testing.T) {
	for _, tc := range []struct {
		point   string
		outcome string
		ran     int
	}{
		{"dispatch-before-record", "", 0},
		{"dispatch-recorded", "unknown", 0},
		{"sshx-exec-accepted", "unknown", 1},
		{"dispatch-exchanged", "unknown", 1},
		{"dispatch-committed", "committed", 1},
	} {
		t.Run(tc.point, func(t *testing.T) {
			contract.Covers(t, "T2", "F1", "F2", "F4", "M4")
			s := newSSHRig(t, sshOptions{env: []string{killpoint.Variable + "=" + tc.point}})
			g := s.sshRun("box.test", "deploy", "exit0")
			if g.code == 0 && tc.outcome != "committed" {
				t.Errorf("the client saw a success: %+v", g)
			}
			until(t, "the process is dead", func() bool { return !s.p.Running() })
			if n := s.box.Ran("exit0"); n != tc.ran {
				t.Errorf("it ran %d times", n)
			}
			s.rig.env = nil
			s.startSSH()
			all := s.actions()
			switch {
			case tc.outcome == "" && len(all) > 0 && all[0].DispatchStarted:
				t.Errorf("%q", facts(all[0]))
			case tc.outcome != "" && (len(all) != 1 || all[0].Outcome != tc.outcome || !all[0].DispatchStarted):
				t.Errorf("%+v", all)
			}
			s.verify()
		})
	}
}

// The real thing: OpenSSH on both ends, and the programs that people use over it.
func TestSSHRealClients(t *testing.T) {
	contract.Covers(t, "G9", "E5", "C2", "H4")
	s := newSSHRig(t, sshOptions{real: true})
	at := s.user + "@real.test"
	gitSSH := []string{"GIT_SSH_COMMAND=ssh -F " + s.conf, "GIT_CONFIG_GLOBAL=/dev/null", "HOME=" + s.dir}
	ok := func(g got) got {
		t.Helper()
		if g.code != 0 {
			t.Fatalf("exit %d\n%s%s\n%s", g.code, g.stdout, g.stderr, s.real.Log())
		}
		return g
	}
	g := s.sshRun("real.test", s.user, "echo out; echo err >&2; printf '%s' \"$WAYBILL_ACTION_ID\"; exit 3")
	if v := s.last(); g.code != 3 || g.stderr != "err\n" || g.stdout != "out\n"+v.InvocationID {
		t.Errorf("%+v", g)
	}
	binary := bytes.Repeat([]byte{0, 255, '\r', '\n', 26, 4, 3}, 50_000)
	if g := s.run(bytes.NewReader(binary), nil, "ssh", "-F", s.conf, at, "cat"); g.code != 0 || g.stdout != string(binary) {
		t.Errorf("cat: %d, %d bytes %s", g.code, len(g.stdout), g.stderr)
	}
	// An input that arrives while the command runs is digested, and marked so.
	if ev := s.evidence(s.last().InvocationID); ev.Stdin != "streamed" || ev.StdinDigest != digest(binary) {
		t.Errorf("%+v", ev)
	}
	// A background child keeps the channel open (SH-02).
	if g := s.sshRun("real.test", s.user, "echo made; sleep 20 &"); g.code != 255 || g.took > 8*time.Second || s.last().Code != "REMOTE_RESULT_INCOMPLETE" {
		t.Errorf("background child: %d after %v, %q", g.code, g.took, facts(s.last()))
	}
	if ev := s.evidence(s.last().InvocationID); ev.ExitStatus == nil || *ev.ExitStatus != 0 {
		t.Errorf("%+v", ev)
	}

	// git: clone, commit, push.
	repo, work := filepath.Join(s.real.Dir, "r.git"), filepath.Join(s.dir, "work")
	ok(s.run(nil, nil, "git", "init", "-q", "--bare", "-b", "main", repo))
	ok(s.run(nil, gitSSH, "git", "clone", "-q", "ssh://"+at+repo, work))
	if err := os.WriteFile(filepath.Join(work, "f"), binary, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, args := range [][]string{{"add", "f"}, {"-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "x"}, {"push", "-q", "origin", "HEAD:main"}, {"fetch", "-q"}} {
		ok(s.run(nil, gitSSH, "git", append([]string{"-C", work}, args...)...))
	}
	if out := ok(s.run(nil, nil, "git", "-C", repo, "cat-file", "-s", "main:f")).stdout; strings.TrimSpace(out) != fmt.Sprint(len(binary)) {
		t.Errorf("pushed %q", out)
	}
	// rsync and scp -O, both ways.
	src, back := filepath.Join(s.dir, "src"), filepath.Join(s.dir, "back")
	if err := os.WriteFile(src, binary, 0o600); err != nil {
		t.Fatal(err)
	}
	far := filepath.Join(s.real.Dir, "far")
	same := func(path string) {
		t.Helper()
		if data, err := os.ReadFile(path); err != nil || !bytes.Equal(data, binary) {
			t.Errorf("%s: %d bytes, %v", path, len(data), err)
		}
	}
	ok(s.run(nil, nil, "rsync", "-e", "ssh -F "+s.conf, src, at+":"+far+"1"))
	same(far + "1")
	ok(s.run(nil, nil, "rsync", "-e", "ssh -F "+s.conf, at+":"+far+"1", back+"1"))
	same(back + "1")
	ok(s.run(nil, nil, "scp", "-O", "-q", "-F", s.conf, src, at+":"+far+"2"))
	same(far + "2")
	ok(s.run(nil, nil, "scp", "-O", "-q", "-F", s.conf, at+":"+far+"2", back+"2"))
	same(back + "2")
	// scp of today speaks SFTP, and is told how to go on.
	if g := s.run(nil, nil, "scp", "-F", s.conf, src, at+":"+far+"3"); g.code == 0 || !strings.Contains(g.stderr, "scp -O") {
		t.Errorf("scp: %d %s", g.code, g.stderr)
	}

	// The key is in its file and nowhere else.
	s.keyNowhere()
}

// Many commands at once share connections, as many as the server's session limit asks
// for, and no more than it lets log in at a time: by the API, and by real clients.
func TestSSHParallel(t *testing.T) {
	contract.Covers(t, "J1", "E6")
	s := newSSHRig(t, sshOptions{real: true})
	n, clients := 40, 10
	if long() {
		n, clients = 200, 200
	}
	var wg sync.WaitGroup
	begin := time.Now()
	for i := range n {
		wg.Go(func() {
			status, body := s.post(map[string]any{"target": "real.test:22", "user": s.user, "argv": []string{"echo", fmt.Sprint("number ", i)}}, "")
			if status != http.StatusOK || body["stdout"] != fmt.Sprintf("number %d\n", i) || body["exit_status"] != 0.0 {
				t.Errorf("%d %v", status, body)
			}
		})
	}
	wg.Wait()
	t.Logf("%d commands at once by the API: %v", n, time.Since(begin))
	begin = time.Now()
	for i := range clients {
		wg.Go(func() {
			if g := s.sshRun("real.test", s.user, fmt.Sprintf("echo client %d; exit %d", i, i%200)); g.code != i%200 || g.stdout != fmt.Sprintf("client %d\n", i) {
				t.Errorf("%+v", g)
			}
		})
	}
	wg.Wait()
	t.Logf("%d ssh clients at once: %v", clients, time.Since(begin))
	all := s.actions()
	if len(all) != n+clients {
		t.Errorf("%d actions", len(all))
	}
	for _, v := range all {
		if v.Outcome != "committed" {
			t.Errorf("%q", facts(v))
		}
	}
	s.verify()
}

// post sends POST /v1/ssh/exec. "retry_after" in what it returns is that field.
func (s *sshRig) post(body any, token string) (int, map[string]any) {
	s.t.Helper()
	raw, err := json.Marshal(body)
	if err != nil {
		s.t.Fatal(err)
	}
	req, err := http.NewRequest(http.MethodPost, "http://"+s.ssh+"/v1/ssh/exec", bytes.NewReader(raw))
	if err != nil {
		s.t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	if token != "" {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	c := &http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}, Timeout: time.Minute}
	resp, err := c.Do(req)
	if err != nil {
		s.t.Error(err)
		return 0, nil
	}
	defer func() { _ = resp.Body.Close() }()
	out := map[string]any{}
	if err := json.NewDecoder(resp.Body).Decode(&out); err != nil {
		s.t.Error(err)
	}
	out["retry_after"] = resp.Header.Get("Retry-After")
	return resp.StatusCode, out
}

// The same operation without an SSH client.
func TestSSHExecAPI(t *testing.T) {
	contract.Covers(t, "B1", "D1", "H3", "L7")
	s := newSSHRig(t, sshOptions{})
	code := func(body map[string]any) string {
		if e, ok := body["error"].(map[string]any); ok {
			return fmt.Sprint(e["code"])
		}
		return ""
	}
	box := func(m map[string]any) map[string]any {
		m["target"], m["user"] = "box.test:22", "deploy"
		return m
	}
	for _, tc := range []struct {
		name   string
		body   map[string]any
		status int
		code   string
		stdout any
		exit   any
	}{
		{"command", box(map[string]any{"command": "exit0"}), 200, "", "hi\n", 0.0},
		{"argv", box(map[string]any{"argv": []string{"say", "a b", "$HOME;'x'"}}), 200, "", "'a b' '$HOME;'\\''x'\\'''", 0.0},
		{"stdin", box(map[string]any{"command": "cat", "stdin": "in\x00put"}), 200, "", "in\x00put", 0.0},
		{"status", box(map[string]any{"command": "exit 3"}), 200, "REMOTE_ERROR", "step1 done\n", 3.0},
		{"env", box(map[string]any{"command": "exit0", "env": map[string]string{"LANG": "C"}}), 200, "", "hi\n", 0.0},
		{"env refused", box(map[string]any{"command": "exit0", "env": map[string]string{"LD_PRELOAD": "x"}}), 400, "INVALID_REQUEST", nil, nil},
		{"unknown", box(map[string]any{"command": "noexit"}), 424, "REMOTE_RESULT_INCOMPLETE", nil, nil},
		{"repeat", box(map[string]any{"command": "noexit"}), 424, "DUPLICATE_SUSPECTED", nil, nil},
		{"no route", box(map[string]any{"command": "reboot"}), 403, "ROUTE_NOT_FOUND", nil, nil},
		{"both", box(map[string]any{"command": "exit0", "argv": []string{"exit0"}}), 400, "INVALID_REQUEST", nil, nil},
		{"key", box(map[string]any{"command": "exit0", "comand": "x"}), 400, "INVALID_REQUEST", nil, nil},
		{"target", map[string]any{"target": "box.test/x", "user": "deploy", "command": "exit0"}, 400, "INVALID_TARGET", nil, nil},
		{"user", map[string]any{"target": "box.test", "user": "-o", "command": "exit0"}, 400, "INVALID_REQUEST", nil, nil},
	} {
		status, body := s.post(tc.body, "")
		if status != tc.status || code(body) != tc.code || body["stdout"] != tc.stdout || body["exit_status"] != tc.exit {
			t.Errorf("%s: %d %v", tc.name, status, body)
		}
	}
	req, err := http.NewRequest(http.MethodPost, "http://"+s.ssh+"/v1/ssh/exec", strings.NewReader(`{"target":"box.test","user":"deploy","command":"exit 9"}`))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("Waybill-Retry-Of", s.last().InvocationID)
	resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = resp.Body.Close()
	if resp.StatusCode != http.StatusUnprocessableEntity || s.box.Ran("exit 9") != 0 {
		t.Errorf("a further attempt of a command: %d, ran %d times", resp.StatusCode, s.box.Ran("exit 9"))
	}
	if v, _ := s.box.Env("LANG"); v != "C" {
		t.Error("LANG was not set")
	}
}

// Callers authenticate at CONNECT or with an SSH password, and see their own actions only.
func TestSSHCallers(t *testing.T) {
	contract.Covers(t, "V4")
	const token = "token-of-the-caller-ci-123456"
	s := newSSHRig(t, sshOptions{top: "callers:\n  - {name: ci, token_sha256: " + sha256Hex(token) + "}\n"})
	if g := s.sshRun("box.test", "deploy", "exit0", "-o", "BatchMode=yes"); g.code != 255 || s.box.Ran("exit0") != 0 || len(s.actions()) != 0 {
		t.Errorf("without credentials: %+v", g)
	}
	g := s.run(strings.NewReader(""), []string{"WAYBILL_SSH=http://x:" + token + "@" + s.ssh}, "ssh", "-F", s.conf, "deploy@box.test", "exit0")
	if v := s.last(); g.code != 0 || v.Caller != "caller:ci" {
		t.Errorf("%+v, %s", g, v.Caller)
	}
	askpass := filepath.Join(s.dir, "askpass")
	if err := os.WriteFile(askpass, []byte("#!/bin/sh\necho "+token+"\n"), 0o700); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	g = s.run(strings.NewReader(""), []string{"SSH_ASKPASS=" + askpass, "SSH_ASKPASS_REQUIRE=force"}, "ssh", "-F", s.conf, "deploy@box.test", "exit 5")
	if v := s.last(); g.code != 5 || v.Caller != "caller:ci" {
		t.Errorf("%+v, %s", g, v.Caller)
	}
	g = s.run(strings.NewReader(""), []string{"WAYBILL_SSH=http://x:wrong@" + s.ssh}, "ssh", "-F", s.conf, "deploy@box.test", "exit 6")
	if g.code != 255 || !strings.Contains(g.stderr, "CALLER_UNAUTHENTICATED") || s.box.Ran("exit 6") != 0 {
		t.Errorf("wrong token: %+v", g)
	}
	if status, _ := s.post(map[string]any{"target": "box.test", "user": "deploy", "command": "exit 7"}, ""); status == 200 || s.box.Ran("exit 7") != 0 {
		t.Errorf("API without credentials: %d", status)
	}
	if status, _ := s.post(map[string]any{"target": "box.test", "user": "deploy", "command": "exit 8"}, token); status != 200 {
		t.Errorf("API: %d", status)
	}
	if _, samples := scrape(t, s.meters); sum(samples, "waybill_caller_connections_total", map[string]string{"endpoint": "ssh"}) < 4 {
		t.Error("connections to the SSH endpoint are not counted")
	}
}

func sha256Hex(s string) string { sum := sha256.Sum256([]byte(s)); return hex.EncodeToString(sum[:]) }
