package e2e

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/knownhosts"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// Inside "waybill run" the same ssh_config leads to the proxy of that run, with the
// session's credentials: nobody has to know where it listens (CONTRACT V4).
func TestSSHInRun(t *testing.T) {
	contract.Covers(t, "V4")
	s := newSSHRig(t, sshOptions{})
	code, out, errs := s.cli("ssh-config")
	if code != 0 {
		t.Fatalf("%d %s", code, errs)
	}
	conf := filepath.Join(s.dir, "any")
	s.write("any", out)
	in := func(command string) got {
		return s.run(nil, s.inPath()[:3], s.bin, "run", "--allow-any-filesystem", "--", "ssh", "-n", "-F", conf, "deploy@box.test", command)
	}
	if g := in("exit 5"); g.code != 5 || s.box.Ran("exit 5") != 1 {
		t.Fatalf("at the running proxy: %+v", g)
	}
	if v := s.last(); !strings.HasPrefix(v.Caller, "session:") {
		t.Errorf("the caller is %q", v.Caller)
	}
	s.kill()
	if g := in("exit 6"); g.code != 6 || s.box.Ran("exit 6") != 1 {
		t.Fatalf("at a proxy of its own: %+v", g)
	}
	if v := s.last(); !strings.HasPrefix(v.Caller, "session:") || v.Code != "REMOTE_ERROR" {
		t.Errorf("%q by %q", facts(v), v.Caller)
	}
}

// dial is a Go client behind the CONNECT of the endpoint, which trusts its CA.
func (s *sshRig) dial(target, user string) *ssh.Client {
	s.t.Helper()
	c, err := net.Dial("tcp", s.ssh)
	if err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = c.Close() })
	_, _ = fmt.Fprintf(c, "CONNECT %[1]s HTTP/1.1\r\nHost: %[1]s\r\n\r\n", target)
	var head []byte // and nothing of what follows it
	for one := make([]byte, 1); !bytes.HasSuffix(head, []byte("\r\n\r\n")); head = append(head, one...) {
		if _, err := c.Read(one); err != nil {
			s.t.Fatal(err)
		}
	}
	if !bytes.HasPrefix(head, []byte("HTTP/1.1 200 ")) {
		s.t.Fatalf("%q", head)
	}
	check, err := knownhosts.New(filepath.Join(s.data, "ssh", "known_hosts"))
	if err != nil {
		s.t.Fatal(err)
	}
	conn, chans, reqs, err := ssh.NewClientConn(c, target, &ssh.ClientConfig{User: user, HostKeyCallback: check, HostKeyAlgorithms: []string{ssh.CertAlgoED25519v01}, Timeout: patience})
	if err != nil {
		s.t.Fatal(err)
	}
	return ssh.NewClient(conn, chans, reqs)
}

// A signal of the caller reaches the command; a channel that the caller closes ends
// nothing at the target (CONTRACT F5, item 4 of what a command can be told).
func TestSSHSignal(t *testing.T) {
	contract.Covers(t, "F5", "G9")
	s := newSSHRig(t, sshOptions{limits: "{timeout: 30s}"})
	client := s.dial("box.test:22", "deploy")
	session, err := client.NewSession()
	if err != nil {
		t.Fatal(err)
	}
	out, err := session.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := session.Start("sig"); err != nil {
		t.Fatal(err)
	}
	r := bufio.NewReader(out)
	if line, err := r.ReadString('\n'); line != "ready\n" {
		t.Fatalf("%q %v", line, err)
	}
	if err := session.Signal(ssh.SIGUSR1); err != nil {
		t.Fatal(err)
	}
	rest, err := io.ReadAll(r)
	if err != nil || string(rest) != "got USR1\n" || session.Wait() != nil {
		t.Errorf("%q %v", rest, err)
	}
	// The caller closes the channel, and keeps its connection.
	if session, err = client.NewSession(); err != nil {
		t.Fatal(err)
	}
	if err := session.Start("wait closed"); err != nil {
		t.Fatal(err)
	}
	until(t, "it runs", func() bool { return s.box.Ran("wait closed") == 1 })
	_ = session.Close()
	id := s.last().InvocationID
	if !s.evidence(id).Running {
		t.Error("the action ended with the caller's channel")
	}
	s.box.Release()
	if v := s.settled(id); v.Outcome != "committed" {
		t.Errorf("%q", facts(v))
	}
	if len(s.box.Signals()) != 1 {
		t.Errorf("signals %v", s.box.Signals())
	}
}

// A caller that waits no longer is told that the command runs, and fetches its result
// later: by the API on both listeners, and as an ssh client (CONTRACT F5, H3).
func TestSSHWaits(t *testing.T) {
	contract.Covers(t, "F5", "H3", "H10")
	s := newSSHRig(t, sshOptions{limits: "{timeout: 30s}"})
	fetch := func(base, id string) (int, string) {
		t.Helper()
		c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: patience}
		resp, err := c.Get(base + "/v1/actions/" + id + "/result")
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		var out, errs bytes.Buffer
		if resp.StatusCode != http.StatusOK {
			_, _ = io.Copy(&out, resp.Body)
		} else if err := dispatch.SplitOutput(resp.Body, &out, &errs); err != nil {
			t.Error(err)
		}
		return resp.StatusCode, out.String()
	}
	ids := map[string]string{} // by base
	for name, base := range map[string]string{"ssh": "http://" + s.ssh, "proxy": "http://" + s.addr} {
		raw := fmt.Sprintf(`{"target": "box.test", "user": "deploy", "command": "wait %s", "timeout": 1, "request_id": "req-%s"}`, name, name)
		req, err := http.NewRequest(http.MethodPost, base+"/v1/ssh/exec", strings.NewReader(raw))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		begin := time.Now()
		resp, err := (&http.Transport{DisableKeepAlives: true}).RoundTrip(req)
		if err != nil {
			t.Fatal(err)
		}
		var env struct {
			ID    string `json:"invocation_id"`
			Error struct {
				Outcome string `json:"outcome"`
				Retry   string `json:"retry"`
			} `json:"error"`
		}
		err = json.NewDecoder(resp.Body).Decode(&env)
		_ = resp.Body.Close()
		v := s.last()
		if err != nil || resp.StatusCode < 400 || env.Error.Outcome != "unknown" || env.ID != v.InvocationID || time.Since(begin) > 10*time.Second || s.box.Ran("wait "+name) != 1 {
			t.Errorf("%s: %d %+v after %v (%v)", name, resp.StatusCode, env, time.Since(begin), err)
		}
		if status, body := fetch(base, env.ID); status != http.StatusAccepted || !strings.Contains(body, "RESULT_PENDING") {
			t.Errorf("%s, while it runs: %d %q", name, status, body)
		}
		ids[base] = env.ID
	}
	g := s.sshRun("box.test", "deploy", "wait ssh client", "-o", "SetEnv=WAYBILL_TIMEOUT=1")
	v := s.last()
	if g.code != 255 || g.stdout != "started\n" || !strings.HasPrefix(g.stderr, "waybill: ") || !strings.Contains(g.stderr, v.InvocationID) || g.took > 10*time.Second || !s.evidence(v.InvocationID).Running {
		t.Errorf("%+v", g)
	}
	s.box.Release()
	for base, id := range ids {
		if v := s.settled(id); v.Outcome != "committed" {
			t.Errorf("%q", facts(v))
		}
		if status, body := fetch(base, id); status != http.StatusOK || body != "started\ndone\n" {
			t.Errorf("%d %q", status, body)
		}
	}
	if v := s.settled(v.InvocationID); v.Outcome != "committed" {
		t.Errorf("%q", facts(v))
	}
	s.verify()
}

// Through a real jump host: its own login and host key, the target's behind it; what
// fails says which of the two it was (CONTRACT E2, G7).
func TestSSHJump(t *testing.T) {
	contract.Covers(t, "E2", "G7")
	route := func(name, port, jump string) string {
		return fmt.Sprintf("  - name: %[1]s\n    match: {host: 127.0.0.1, ports: [%[2]s]}\n    ssh: {users: [%[1]s], credential: key, known_hosts: known_hosts, commands: [{exact: exit0}], jump: {host: %[3]s, user: USER, credential: key}}\n    upstream: {resolve: {%[3]s: \"REAL\"}}\n", name, port, jump)
	}
	box := testkit.NewSSHServer(t, testkit.SSHOptions{})
	port := fmt.Sprint(box.Port)
	s := newSSHRig(t, sshOptions{real: true, more: route("through", port, "jump.real.test") + route("stranger", port, "other.test") + route("nobody", "1", "jump.real.test")})
	f, err := os.OpenFile(filepath.Join(s.dir, "known_hosts"), os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	_, err = f.WriteString(box.KnownHosts("127.0.0.1", box.Port))
	if cerr := f.Close(); err != nil || cerr != nil {
		t.Fatal(err, cerr)
	}
	s.kill()
	s.startSSH()
	for _, tc := range []struct {
		user, port, facts, text string
		runs                    int
	}{
		{"through", port, "remote_execution committed never", "", 1},
		{"stranger", port, "connection_setup not_attempted after_correction SSH_HOST_KEY_REJECTED", "other.test", 0},
		{"nobody", "1", "connection_setup not_attempted backoff PROXY_TUNNEL_FAILED", "", 0},
	} {
		before := box.Ran("exit0")
		g := s.sshRun("127.0.0.1", tc.user, "exit0", "-p", tc.port)
		if v := s.last(); facts(v) != tc.facts || box.Ran("exit0")-before != tc.runs || (g.code == 0) != (tc.runs == 1) || !strings.Contains(g.stderr, tc.text) {
			t.Errorf("%s: exit %d, %q, ran %d times\n%s", tc.user, g.code, facts(v), box.Ran("exit0")-before, g.stderr)
		}
	}
	s.verify()
}
