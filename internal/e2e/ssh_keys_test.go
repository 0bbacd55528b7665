package e2e

import (
	"crypto/rand"
	"crypto/rsa"
	"encoding/pem"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"testing"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// Where the key may come from: a file that a passphrase opens, an ssh-agent, and a key
// with a user certificate. What cannot be used ends the command before it is dispatched
// (CONTRACT C1).
func TestSSHKeySources(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	key, err := rsa.GenerateKey(rand.Reader, 2048)
	if err != nil {
		t.Fatal(err)
	}
	signer, err := ssh.NewSignerFromKey(key)
	if err != nil {
		t.Fatal(err)
	}
	const phrase = "canary-phrase-5d1c"
	locked, err := ssh.MarshalPrivateKeyWithPassphrase(key, "", []byte(phrase))
	if err != nil {
		t.Fatal(err)
	}
	_, host := testkit.SSHKey(t, "")
	_, authority := testkit.SSHKey(t, "")
	private, holder := testkit.SSHKey(t, "")
	cert := &ssh.Certificate{Key: holder.PublicKey(), CertType: ssh.UserCert, ValidPrincipals: []string{"deploy"}, ValidBefore: ssh.CertTimeInfinity}
	if err := cert.SignCert(rand.Reader, authority); err != nil {
		t.Fatal(err)
	}
	ring := agent.NewKeyring()
	if err := ring.Add(agent.AddedKey{PrivateKey: key}); err != nil {
		t.Fatal(err)
	}
	socket := filepath.Join(t.TempDir(), "a")
	l, err := net.Listen("unix", socket)
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
				_ = agent.ServeAgent(ring, c)
				_ = c.Close()
			}()
		}
	}()
	route := func(name, how string) string {
		return fmt.Sprintf("  - name: %[1]s\n    match: {host: %[1]s.test}\n    ssh: {users: [deploy], pins: [%[2]q], commands: [{exact: exit0}], %[3]s}\n    upstream: {resolve: {%[1]s.test: BOX}}\n",
			name, ssh.FingerprintSHA256(host.PublicKey()), how)
	}
	s := newSSHRig(t, sshOptions{
		box: testkit.SSHOptions{Authorized: signer.PublicKey(), Certificates: authority.PublicKey(), HostKeys: []ssh.Signer{host}},
		top: "  locked: {from: {file: locked}}\n  phrase: {from: {file: phrase}}\n  wrong: {from: {file: wrong}}\n  holder: {from: {file: holder}}\n  cert: {from: {file: cert}}\n  foreign: {from: {file: foreign}}\n",
		more: route("opened", "credential: locked, passphrase: phrase") + route("shut", "credential: locked, passphrase: wrong") +
			route("certified", "credential: holder, certificate: cert") + route("alien", "credential: foreign, certificate: cert") +
			route("agent", fmt.Sprintf("agent: %s, agent_key: %q", socket, ssh.FingerprintSHA256(signer.PublicKey()))) +
			route("missing", fmt.Sprintf("agent: %s, agent_key: %q", socket, ssh.FingerprintSHA256(holder.PublicKey()))) +
			route("away", fmt.Sprintf("agent: %s.gone, agent_key: %q", socket, ssh.FingerprintSHA256(signer.PublicKey()))),
	})
	for name, text := range map[string]string{"locked": string(pem.EncodeToMemory(locked)), "phrase": phrase, "wrong": "other", "holder": string(private),
		"foreign": string(s.key), "cert": string(ssh.MarshalAuthorizedKey(cert))} {
		s.write(name, text)
	}
	for _, tc := range []struct {
		host, facts, offered string
	}{
		{"opened", "remote_execution committed never", ssh.FingerprintSHA256(signer.PublicKey())},
		{"agent", "remote_execution committed never", ssh.FingerprintSHA256(signer.PublicKey())},
		{"certified", "remote_execution committed never", ssh.FingerprintSHA256(cert)},
		{"shut", "credential_injection not_attempted after_correction CREDENTIAL_INVALID", ""},
		{"alien", "credential_injection not_attempted after_correction CREDENTIAL_INVALID", ""},
		{"missing", "credential_injection not_attempted after_correction CREDENTIAL_MISSING", ""},
		{"away", "credential_injection not_attempted backoff CREDENTIAL_UNAVAILABLE", ""},
	} {
		t.Run(tc.host, func(t *testing.T) {
			ran, offered := s.box.Ran("exit0"), len(s.box.Offered())
			g := s.sshRun(tc.host+".test", "deploy", "exit0")
			v := s.last()
			now := s.box.Offered()[offered:]
			if facts(v) != tc.facts {
				t.Fatalf("%q\n%s", facts(v), g.stderr)
			}
			if tc.offered == "" {
				if len(now) > 0 || s.box.Ran("exit0") != ran || g.code != 255 || v.DispatchStarted {
					t.Errorf("a target was asked: %v, exit %d", now, g.code)
				}
				return
			}
			if g.code != 0 || s.box.Ran("exit0") != ran+1 || !slices.Contains(now, tc.offered) {
				t.Errorf("exit %d, offered %v, not %s\n%s", g.code, now, tc.offered, g.stderr)
			}
		})
	}
	s.verify()
}
