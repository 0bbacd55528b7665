package testkit

import (
	"fmt"
	"net"
	"os"
	"os/user"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"
)

// SSHD is a real OpenSSH server on loopback, a process of its own, that lets the user
// of the test in.
type SSHD struct {
	Addr  string
	Port  int
	User  string
	Dir   string // its configuration, and where commands may leave things
	known string
	p     *Process
}

// StartSSHD starts a server that takes the key. It ends with the test.
func StartSSHD(t testing.TB, authorized ssh.PublicKey) *SSHD {
	t.Helper()
	who, err := user.Current()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	s := &SSHD{User: who.Username, Dir: dir, Addr: FreeAddr(t)}
	_, port, err := net.SplitHostPort(s.Addr)
	if err != nil {
		t.Fatal(err)
	}
	if s.Port, err = strconv.Atoi(port); err != nil {
		t.Fatal(err)
	}
	key, signer := SSHKey(t, "")
	s.known = strings.TrimSpace(string(ssh.MarshalAuthorizedKey(signer.PublicKey())))
	write := func(name string, data []byte) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, data, 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	host := write("host", key)
	keys := write("authorized_keys", ssh.MarshalAuthorizedKey(authorized))
	if os.Geteuid() == 0 {
		if err := os.MkdirAll("/run/sshd", 0o755); err != nil {
			t.Fatal(err)
		}
	}
	// bash reads the user's .bashrc when sshd starts it, unless a shell started it: what is
	// in there is no part of a test.
	conf := write("sshd_config", fmt.Appendf(nil, `Port %d
ListenAddress 127.0.0.1
HostKey %s
AuthorizedKeysFile %s
StrictModes no
UsePAM no
PidFile none
PasswordAuthentication no
PermitRootLogin prohibit-password
AcceptEnv LANG WAYBILL_ACTION_ID GIT_PROTOCOL
SetEnv SHLVL=1
Subsystem sftp internal-sftp
LogLevel VERBOSE
`, s.Port, host, keys))
	s.p = Start(t, Command{Path: "/usr/sbin/sshd", Args: []string{"-D", "-e", "-f", conf}, Dir: dir})
	for deadline := time.Now().Add(10 * time.Second); ; {
		c, err := net.Dial("tcp", s.Addr)
		if err == nil {
			_ = c.Close()
			return s
		}
		if time.Now().After(deadline) || !s.p.Running() {
			t.Fatalf("sshd does not listen: %v\n%s", err, s.p.Stderr())
		}
		time.Sleep(10 * time.Millisecond)
	}
}

// KnownHosts is the line for a name at a port.
func (s *SSHD) KnownHosts(host string, port int) string {
	if port != 22 {
		host = fmt.Sprintf("[%s]:%d", host, port)
	}
	return host + " " + s.known + "\n"
}

// Log is what the server wrote.
func (s *SSHD) Log() string { return s.p.Stderr() }
