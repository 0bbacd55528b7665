package e2e

import (
	"bufio"
	"encoding/binary"
	"fmt"
	"io"
	"net"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/crypto/ssh"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// sshAuditUnknown are algorithms that are newer than the oldest ssh-audit in use: nothing
// is said against them but that they are not known.
var sshAuditUnknown = []string{ssh.KeyExchangeMLKEM768X25519, "kex-strict-s-v00@openssh.com", "kex-strict-c-v00@openssh.com", "ext-info-c", "ext-info-s"}

var (
	sshAuditLine  = regexp.MustCompile(`^\((kex|key|enc|mac)\) (\S+)`)
	sshAuditLevel = regexp.MustCompile(`\[(warn|fail)\] (.*)$`)
)

// sshAudit runs ssh-audit on a server, and returns the algorithms it saw by kind, and what
// it finds bad in them.
func sshAudit(t *testing.T, addr string) (seen map[string][]string, bad []string) {
	t.Helper()
	host, port, err := net.SplitHostPort(addr)
	if err != nil {
		t.Fatal(err)
	}
	// Its exit status tells how bad the worst finding is; the findings are what is judged.
	_, out, errs := testkit.Run(t, testkit.Command{Path: testkit.RequireTool(t, "ssh-audit"), Args: []string{"-n", "-t", "3", "-p", port, host}, Env: []string{"PYTHONIOENCODING=utf-8"}})
	seen = map[string][]string{}
	name := ""
	for line := range strings.Lines(out) {
		if m := sshAuditLine.FindStringSubmatch(line); m != nil {
			name = m[2]
			seen[m[1]] = append(seen[m[1]], name)
		} else if strings.HasPrefix(line, "(") || strings.HasPrefix(line, "#") {
			name = ""
		}
		m := sshAuditLevel.FindStringSubmatch(strings.TrimRight(line, "\r\n"))
		switch {
		case m == nil:
		case m[1] == "warn" && strings.Contains(m[2], "unknown algorithm") && slices.Contains(sshAuditUnknown, name):
		case m[1] == "warn" && strings.Contains(m[2], "post-quantum") && seen["kex"][0] == ssh.KeyExchangeMLKEM768X25519:
			// What precedes it protects against that.
		default:
			bad = append(bad, name+" "+m[0])
		}
	}
	for _, kind := range []string{"kex", "key", "enc", "mac"} {
		if len(seen[kind]) == 0 {
			t.Fatalf("ssh-audit saw nothing of kind %s:\n%s%s", kind, out, errs)
		}
	}
	return seen, bad
}

// listen serves connections on loopback until the test ends.
func listen(t *testing.T, serve func(net.Conn)) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer func() { _ = c.Close() }()
				_ = c.SetDeadline(time.Now().Add(patience))
				serve(c)
			}()
		}
	}()
	return l.Addr().String()
}

// hello is what a client says first: its version and its KEXINIT (RFC 4253 §4.2, §7.1).
func hello(c net.Conn) ([]byte, error) {
	if _, err := io.WriteString(c, "SSH-2.0-audited\r\n"); err != nil {
		return nil, err
	}
	r := bufio.NewReader(c)
	version, err := r.ReadBytes('\n')
	if err != nil {
		return nil, err
	}
	var head [4]byte
	if _, err := io.ReadFull(r, head[:]); err != nil {
		return nil, err
	}
	packet := make([]byte, min(binary.BigEndian.Uint32(head[:]), 1<<16))
	if _, err := io.ReadFull(r, packet); err != nil {
		return nil, err
	}
	return slices.Concat(version, head[:], packet), nil
}

// ssh-audit finds nothing bad in what Waybill offers to callers, nor in what it offers
// to targets, whatever they are known by (CONTRACT G7).
func TestSSHAudit(t *testing.T) {
	contract.Covers(t, "G7")
	_, plain := testkit.SSHKey(t, "")
	known := func(host, line string) string {
		return fmt.Sprintf("  - name: %[1]s\n    match: {host: %[1]s.test}\n    ssh: {users: [deploy], %[2]s, commands: [{exact: exit0}], credential: key}\n    upstream: {resolve: {%[1]s.test: CLIENT}}\n    limits: {tries: 1}\n", host, line)
	}
	hellos := make(chan []byte, 8)
	client := listen(t, func(c net.Conn) {
		if b, err := hello(c); err == nil {
			hellos <- b
		}
	})
	pin := "pins: [\"" + ssh.FingerprintSHA256(plain.PublicKey()) + "\"]"
	s := newSSHRig(t, sshOptions{more: strings.ReplaceAll(known("pinned", pin)+known("other", "known_hosts: other")+known("authority", "known_hosts: authority"), "CLIENT", client), files: map[string]string{
		"other": "else.test " + string(ssh.MarshalAuthorizedKey(plain.PublicKey())), "authority": "@cert-authority *.test " + string(ssh.MarshalAuthorizedKey(plain.PublicKey())),
	}})

	t.Run("server", func(t *testing.T) {
		seen, bad := sshAudit(t, listen(t, func(c net.Conn) {
			up, err := net.Dial("tcp", s.ssh)
			if err != nil {
				return
			}
			defer func() { _ = up.Close() }()
			_, _ = io.WriteString(up, "CONNECT box.test:22 HTTP/1.1\r\nHost: box.test:22\r\n\r\n")
			r := bufio.NewReader(up)
			for { // the head of the answer
				if line, err := r.ReadString('\n'); err != nil || line == "\r\n" {
					break
				}
			}
			go func() {
				_, _ = io.Copy(up, c)
				_ = up.Close()
			}()
			_, _ = io.Copy(c, r)
		}))
		if len(bad) > 0 {
			t.Errorf("ssh-audit finds: %s", strings.Join(bad, "\n"))
		}
		if want := []string{ssh.CertAlgoED25519v01, ssh.KeyAlgoED25519}; !slices.Equal(seen["key"], want) {
			t.Errorf("host keys %v", seen["key"])
		}
	})
	for _, host := range []string{"pinned", "other", "authority"} {
		t.Run("client, "+host, func(t *testing.T) {
			s.sshRun(host+".test", "deploy", "exit0")
			var said []byte
			select {
			case said = <-hellos:
			case <-time.After(patience):
				t.Fatal("Waybill said nothing")
			}
			// What a client offers is judged by the same table: it is said again to ssh-audit.
			if _, bad := sshAudit(t, listen(t, func(c net.Conn) {
				_, _ = c.Write(said)
				_, _ = io.Copy(io.Discard, io.LimitReader(c, 32)) // until it has answered
			})); len(bad) > 0 {
				t.Errorf("ssh-audit finds: %s", strings.Join(bad, "\n"))
			}
		})
	}
	t.Run("what it can find", func(t *testing.T) {
		// The library's defaults are not clean: the audit sees that.
		if _, bad := sshAudit(t, s.box.Addr); len(bad) == 0 {
			t.Error("ssh-audit finds nothing bad in a server with SHA-1 and NIST curves")
		}
	})
}
