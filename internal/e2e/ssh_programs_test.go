package e2e

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"golang.org/x/crypto/ssh"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// debianPython is the interpreter that has Debian's packages; python3 in the PATH may be
// another one.
const debianPython = "/usr/bin/python3"

// documented is the first block of that language in docs/ssh.md: what people copy is
// what runs here.
func documented(t testing.TB, language string) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/ssh.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?ms)^```" + language + "\n(.*?)^```$").FindSubmatch(text)
	if m == nil {
		t.Fatalf("docs/ssh.md has no block of %s", language)
	}
	return string(m[1])
}

// inPath lets programs find the binary under its name, and the data folder.
func (s *sshRig) inPath() []string {
	s.t.Helper()
	bin := filepath.Join(s.dir, "bin")
	if err := os.MkdirAll(bin, 0o700); err != nil {
		s.t.Fatal(err)
	}
	if err := os.Symlink(s.bin, filepath.Join(bin, "waybill")); err != nil && !os.IsExist(err) {
		s.t.Fatal(err)
	}
	return []string{"PATH=" + bin + ":" + os.Getenv("PATH"), "WAYBILL_CONFIG=" + s.config, "WAYBILL_DATA=" + s.data, "WAYBILL_SSH=" + s.ssh, "HOME=" + s.dir, "LC_ALL=C.UTF-8"}
}

// keyNowhere ends the proxy and searches everything for the private key: all folders of
// the test but the credential's own file, and what programs printed (CONTRACT C2).
func (s *sshRig) keyNowhere(printed ...string) {
	s.t.Helper()
	if s.p.Running() {
		testkit.Search(s.t, s.keyCanary(), testkit.InString("environment", fmt.Sprint(s.environ())))
		s.kill()
	}
	file := filepath.Join(s.dir, "key")
	testkit.RequireFound(s.t, s.keyCanary(), testkit.In(file))
	if err := os.Remove(file); err != nil {
		s.t.Fatal(err)
	}
	where := []testkit.Where{testkit.In(s.dir), testkit.InString("log", s.logs.String()), testkit.InString("printed", strings.Join(printed, "\n"))}
	if s.real != nil {
		where = append(where, testkit.In(s.real.Dir), testkit.InString("sshd", s.real.Log()))
	}
	testkit.Search(s.t, s.keyCanary(), where...)
}

// keyCanary is a line of the private key that no public part has.
func (s *sshRig) keyCanary() *testkit.Canary {
	return testkit.CanaryOf(strings.Split(string(s.key), "\n")[4])
}

// lines counts the lines of a file at the target.
func (s *sshRig) lines(name string) int {
	s.t.Helper()
	data, err := os.ReadFile(filepath.Join(s.real.Dir, name))
	if err != nil && !os.IsNotExist(err) {
		s.t.Fatal(err)
	}
	return bytes.Count(data, []byte("\n"))
}

const paramikoChecks = `
import sys, threading, json

def all(transport, command, stdin=b""):
    channel, out, err = run(transport, command, stdin)
    got = {}
    readers = [threading.Thread(target=lambda k=k, f=f: got.__setitem__(k, f.read())) for k, f in (("out", out), ("err", err))]
    for r in readers: r.start()
    for r in readers: r.join()
    return channel.recv_exit_status(), got["out"], got["err"]

user, folder = sys.argv[1:]
t = connect("real.test", user)
done = {}
done["echo"] = all(t, "echo out; echo err >&2; exit 3") == (3, b"out\n", b"err\n")
status, out, err = all(t, "echo once >>" + folder + "/ledger; cat; head -c 3000000 /dev/zero >&2", bytes(range(256)) * 4000)
done["binary"] = status == 0 and out == bytes(range(256)) * 4000 and err == bytes(3000000)
status, out, err = all(t, "echo once >>" + folder + "/lost; kill -9 $PPID")
done["lost"] = status == -1 and err.startswith(b"waybill: REMOTE_RESULT_INCOMPLETE act_")
status, out, err = all(t, "echo once >>" + folder + "/lost; kill -9 $PPID")
done["again"] = status == -1 and err.startswith(b"waybill: DUPLICATE_SUSPECTED act_")
status, out, err = all(t, "kill -TERM $$")
done["signal"] = status == -1
try:
    paramiko.SFTPClient.from_transport(t)
    done["sftp"] = False
except Exception:
    done["sftp"] = True
try:
    t.open_channel("direct-tcpip", ("127.0.0.1", 1), ("127.0.0.1", 1), timeout=10)
    done["forwarding"] = False
except paramiko.ChannelException as e:
    done["forwarding"] = True
channels = [run(t, "echo %d; exit %d" % (i, i)) for i in range(20)]
done["parallel"] = [(o.read(), c.recv_exit_status()) for c, o, _ in channels] == [(b"%d\n" % i, i) for i in range(20)]
t.close()
# The client that most programs use, with a password that nobody asks for.
class Policy(paramiko.MissingHostKeyPolicy):
    def missing_host_key(self, client, hostname, key): assert key.get_name() == "ssh-ed25519"
c = paramiko.SSHClient()
c.set_missing_host_key_policy(Policy())
c.connect("real.test", username=user, password="-", look_for_keys=False, allow_agent=False, sock=paramiko.ProxyCommand("waybill connect real.test 22"))
done["client"] = c.exec_command("echo hello")[1].read() == b"hello\n"
c.close()
print(json.dumps({k: v for k, v in done.items() if not v}))
`

// paramiko, which knows no host certificates: by the example of docs/ssh.md, whose
// commands run once, with the outcomes that an ssh client gets (CONTRACT G9, L6, O3).
func TestSSHParamiko(t *testing.T) {
	contract.Covers(t, "G9", "L6", "O3", "C2")
	s := newSSHRig(t, sshOptions{real: true})
	s.write("client.py", documented(t, "python")+paramikoChecks)
	g := s.run(nil, s.inPath(), debianPython, filepath.Join(s.dir, "client.py"), s.user, s.real.Dir)
	if g.code != 0 || strings.TrimSpace(g.stdout) != "{}" {
		t.Fatalf("%d: not as expected: %s\n%s", g.code, g.stdout, g.stderr)
	}
	if s.lines("ledger") != 1 || s.lines("lost") != 1 {
		t.Errorf("ran %d and %d times", s.lines("ledger"), s.lines("lost"))
	}
	n := map[string]int{}
	for _, v := range s.actions() {
		n[facts(v)]++
	}
	for f, want := range map[string]int{"remote_execution unknown reconcile REMOTE_RESULT_INCOMPLETE": 1, "validation not_attempted reconcile DUPLICATE_SUSPECTED": 1,
		"validation not_attempted after_correction UNSUPPORTED_ACTION": 2, "remote_execution committed reconcile REMOTE_ERROR": 21, "remote_execution committed never": 3} {
		if n[f] != want {
			t.Errorf("%d of %q: %v", n[f], f, n)
		}
	}
	s.verify()
	s.keyNowhere(g.stdout, g.stderr)
}

// Clients that make a success of a missing exit status are given one: whatever is no end
// of a command with status 0 does not look like one (CONTRACT L6, G3).
func TestSSHOtherClients(t *testing.T) {
	contract.Covers(t, "L6", "G3", "G9")
	s := newSSHRig(t, sshOptions{})
	code, line, errs := s.cli("ssh-config", "--host-key")
	if code != 0 {
		t.Fatal(errs)
	}
	key, _, _, _, err := ssh.ParseAuthorizedKey([]byte(strings.TrimPrefix(line, "* ")))
	if err != nil {
		t.Fatal(err)
	}
	connect := "waybill connect box.test 22"
	if err := os.MkdirAll(filepath.Join(s.dir, ".ssh"), 0o700); err != nil {
		t.Fatal(err)
	}
	s.write(".ssh/known_hosts", "box.test "+strings.TrimPrefix(line, "* "))
	for name, args := range map[string][]string{
		"plink":    {"-batch", "-hostkey", ssh.FingerprintSHA256(key), "-proxycmd", connect, "deploy@box.test"},
		"dbclient": {"-J", connect, "deploy@box.test"},
	} {
		program := testkit.RequireTool(t, name)
		for command, want := range map[string]struct {
			exit  int
			facts string
		}{
			"exit0":       {0, "remote_execution committed never"},
			"exit 4":      {4, "remote_execution committed reconcile REMOTE_ERROR"},
			"noexit":      {255, "remote_execution unknown reconcile REMOTE_RESULT_INCOMPLETE"},
			"status-cut":  {255, "remote_execution unknown reconcile REMOTE_RESULT_INCOMPLETE"},
			"execrefused": {255, "remote_execution rejected after_correction EXEC_REFUSED"},
			"reboot":      {255, "validation not_attempted after_correction ROUTE_NOT_FOUND"},
		} {
			if strings.Contains(want.facts, "unknown") {
				command += " for " + name // else the second is a suspected duplicate
			}
			g := s.run(strings.NewReader(""), s.inPath(), program, append(args, command)...)
			v := s.last()
			told := strings.Contains(g.stderr, "waybill: "+v.Code+" "+v.InvocationID+": ")
			if g.code != want.exit || facts(v) != want.facts || told != (want.exit == 255) {
				t.Errorf("%s, %q: exit %d, %q\n%s", name, command, g.code, facts(v), g.stderr)
			}
		}
	}
	// One that says with an error that none came is not told another's status.
	session, err := s.dial("box.test:22", "deploy").NewSession()
	if err != nil {
		t.Fatal(err)
	}
	var missing *ssh.ExitMissingError
	if err := session.Run("cut"); !errors.As(err, &missing) {
		t.Errorf("%v", err)
	}
}

const ansiblePlay = `
- hosts: all
  tasks:
    - shell: 'echo "{{ ansible_facts.system }}" >> {{ there }}/{{ name }}'
    - command: test -s {{ there }}/{{ name }}
      changed_when: false
    - command: sh -c 'exit 3'
      register: r
      failed_when: r.rc != 3
    - copy: {src: payload, dest: '{{ there }}/{{ name }}.copy', mode: '0600'}
    - fetch: {src: '{{ there }}/{{ name }}.copy', dest: '{{ name }}.back', flat: true}
    - script: script.sh {{ there }}/{{ name }}
    - raw: cat {{ there }}/{{ name }}
      register: cat
    - assert: {that: "cat.stdout_lines == ['Linux', 'script']"}
`

// ansiblePatterns are those that docs/ssh.md names for Ansible.
func ansiblePatterns(t *testing.T) string {
	t.Helper()
	text, err := os.ReadFile("../../docs/ssh.md")
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile(`(?m)^    commands: (\[.*\])$`).FindSubmatch(text)
	if m == nil {
		t.Fatal("docs/ssh.md has no patterns for Ansible")
	}
	// And those of the raw tasks here, whose command lines are passed as they are.
	return strings.TrimSuffix(string(m[1]), "]") + `, {regexp: "cat /.*"}, {regexp: "echo once >>.*"}]`
}

// Ansible, by the settings and patterns of docs/ssh.md and by scp -O: facts, modules, scripts and
// files; what it does at the target happens once, and a lost command is not run again.
func TestSSHAnsible(t *testing.T) {
	if !long() {
		return // make test-long has Ansible
	}
	contract.Covers(t, "G9", "L6", "O3", "C2")
	testkit.RequireTool(t, "ansible-playbook")
	s := newSSHRig(t, sshOptions{real: true, more: "  - name: ansible\n    match: {host: ansible.real.test}\n    ssh: {users: [USER], credential: key, known_hosts: known_hosts, commands: " + ansiblePatterns(t) +
		"}\n    upstream: {resolve: {ansible.real.test: \"REAL\"}}\n"})
	payload := bytes.Repeat([]byte{0, 255, '\r', '\n', 26, 4, 3}, 50_000)
	s.write("payload", string(payload))
	s.write("script.sh", "#!/bin/sh\necho script >>\"$1\"\n")
	s.write("play.yaml", ansiblePlay)
	s.write("inventory", fmt.Sprintf("ansible.real.test ansible_user=%s ansible_python_interpreter=%s there=%s\n", s.user, debianPython, s.real.Dir))
	if err := os.Symlink(s.conf, filepath.Join(s.dir, "waybill_ssh_config")); err != nil {
		t.Fatal(err)
	}
	settings := documented(t, "ini")
	var printed []string
	play := func(cfg string, args ...string) got {
		t.Helper()
		s.write("ansible.cfg", cfg)
		g := s.run(nil, append(s.inPath(), "ANSIBLE_CONFIG="+filepath.Join(s.dir, "ansible.cfg"), "ANSIBLE_REMOTE_TEMP="+filepath.Join(s.real.Dir, "tmp"), "ANSIBLE_NOCOLOR=1"),
			"ansible-playbook", append([]string{"-i", "inventory"}, args...)...)
		printed = append(printed, g.stdout, g.stderr)
		return g
	}
	for name, cfg := range map[string]string{
		"piped":   settings,
		"plain":   strings.Replace(settings, "pipelining = True", "pipelining = False", 1),
		"scp":     strings.Replace(settings, "transfer_method = piped", "transfer_method = scp\nscp_extra_args = -O", 1),
		"persist": strings.Replace(settings, "ssh_args = ", "ssh_args = -o ControlMaster=auto -o ControlPersist=30s ", 1),
	} {
		before := len(s.actions())
		g := play(cfg, "-e", "name="+name, "play.yaml")
		if g.code != 0 {
			t.Errorf("%s: %d\n%s%s", name, g.code, g.stdout, g.stderr)
			continue
		}
		if n := s.lines(name); n != 2 {
			t.Errorf("%s: %d effects", name, n)
		}
		for _, file := range []string{filepath.Join(s.real.Dir, name+".copy"), filepath.Join(s.dir, name+".back")} {
			if data, err := os.ReadFile(file); err != nil || !bytes.Equal(data, payload) {
				t.Errorf("%s: %d bytes, %v", file, len(data), err)
			}
		}
		all := s.actions()
		t.Logf("%s: %d actions in %v", name, len(all)-before, g.took)
		for _, v := range all[:len(all)-before] {
			if v.Outcome != "committed" {
				t.Errorf("%s: %q %s", name, facts(v), v.Target)
			}
		}
	}
	s.write("lost.yaml", "- hosts: all\n  gather_facts: false\n  tasks:\n    - raw: echo once >>{{ there }}/lost; kill -9 $PPID\n")
	for _, code := range []string{"REMOTE_RESULT_INCOMPLETE", "DUPLICATE_SUSPECTED"} {
		g := play(settings, "lost.yaml")
		if v := s.last(); g.code == 0 || v.Code != code || !strings.Contains(g.stdout, "UNREACHABLE") || !strings.Contains(g.stdout, "waybill: "+code+" "+v.InvocationID) || s.lines("lost") != 1 {
			t.Errorf("%q, ran %d times, exit %d\n%s%s", facts(v), s.lines("lost"), g.code, g.stdout, g.stderr)
		}
	}
	s.verify()
	s.keyNowhere(printed...)
}
