package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/rsa"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// Where the key may come from: a file in OpenSSH's form or PEM, one that a passphrase
// opens, an ssh-agent, and a key with a user certificate. What cannot be used ends the
// command before it is dispatched (CONTRACT C1).
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
	// The same in PEM: PKCS #1, PKCS #8, encrypted as OpenSSL once did, and SEC 1.
	curve, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	pkcs8, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	sec1, err := x509.MarshalECPrivateKey(curve)
	if err != nil {
		t.Fatal(err)
	}
	old, err := x509.EncryptPEMBlock(rand.Reader, "RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(key), []byte(phrase), x509.PEMCipherAES128) //nolint:staticcheck // keys of that kind are about
	if err != nil {
		t.Fatal(err)
	}
	curveSigner, err := ssh.NewSignerFromKey(curve)
	if err != nil {
		t.Fatal(err)
	}
	curveCert := &ssh.Certificate{Key: curveSigner.PublicKey(), CertType: ssh.UserCert, ValidPrincipals: []string{"deploy"}, ValidBefore: ssh.CertTimeInfinity}
	if err := curveCert.SignCert(rand.Reader, authority); err != nil {
		t.Fatal(err)
	}
	text := func(kind string, der []byte) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}))
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
		top: "  locked: {from: {file: locked}}\n  phrase: {from: {file: phrase}}\n  wrong: {from: {file: wrong}}\n  holder: {from: {file: holder}}\n  cert: {from: {file: cert}}\n  foreign: {from: {file: foreign}}\n  pkcs1: {from: {file: pkcs1}}\n  pkcs8: {from: {file: pkcs8}}\n  old: {from: {file: old}}\n  sec1: {from: {file: sec1}}\n  sec1-cert: {from: {file: sec1-cert}}\n",
		more: route("opened", "credential: locked, passphrase: phrase") + route("shut", "credential: locked, passphrase: wrong") +
			route("certified", "credential: holder, certificate: cert") + route("alien", "credential: foreign, certificate: cert") +
			route("pkcs1", "credential: pkcs1") + route("pkcs8", "credential: pkcs8") + route("old", "credential: old, passphrase: phrase") + route("bare", "credential: old") +
			route("sec1", "credential: sec1, certificate: sec1-cert") +
			route("agent", fmt.Sprintf("agent: %s, agent_key: %q", socket, ssh.FingerprintSHA256(signer.PublicKey()))) +
			route("missing", fmt.Sprintf("agent: %s, agent_key: %q", socket, ssh.FingerprintSHA256(holder.PublicKey()))) +
			route("away", fmt.Sprintf("agent: %s.gone, agent_key: %q", socket, ssh.FingerprintSHA256(signer.PublicKey()))),
	})
	for name, text := range map[string]string{"locked": string(pem.EncodeToMemory(locked)), "phrase": phrase, "wrong": "other", "holder": string(private),
		"foreign": string(s.key), "cert": string(ssh.MarshalAuthorizedKey(cert)), "pkcs1": text("RSA PRIVATE KEY", x509.MarshalPKCS1PrivateKey(key)), "pkcs8": text("PRIVATE KEY", pkcs8),
		"old": string(pem.EncodeToMemory(old)), "sec1": text("EC PRIVATE KEY", sec1), "sec1-cert": string(ssh.MarshalAuthorizedKey(curveCert))} {
		s.write(name, text)
	}
	for _, tc := range []struct {
		host, facts, offered string
	}{
		{"opened", "remote_execution committed never", ssh.FingerprintSHA256(signer.PublicKey())},
		{"agent", "remote_execution committed never", ssh.FingerprintSHA256(signer.PublicKey())},
		{"pkcs1", "remote_execution committed never", ssh.FingerprintSHA256(signer.PublicKey())},
		{"pkcs8", "remote_execution committed never", ssh.FingerprintSHA256(signer.PublicKey())},
		{"old", "remote_execution committed never", ssh.FingerprintSHA256(signer.PublicKey())},
		{"sec1", "remote_execution committed never", ssh.FingerprintSHA256(curveCert)},
		{"bare", "credential_injection not_attempted after_correction CREDENTIAL_INVALID", ""},
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

// A command that shows the private key: its output reaches the caller, and the store,
// masked or not at all (CONTRACT C5).
func TestSSHKeyInOutput(t *testing.T) {
	contract.Covers(t, "C5", "C2")
	s := newSSHRig(t, sshOptions{real: true, more: "  - name: strict\n    match: {host: strict.real.test}\n    ssh: {users: [USER], credential: key, known_hosts: known_hosts, commands: [{regexp: \".*\"}]}\n    leak: block\n    upstream: {resolve: {strict.real.test: \"REAL\"}}\n"})
	shown := "shown before\n" + string(s.key) + "shown after\n"
	var printed []string
	for _, command := range []string{"cat", "cat >&2", "while IFS= read -r l; do echo \"$l\"; sleep 0.02; done",
		// It rests within each line, where a stream that rests lets go of what is too short to tell.
		"while IFS= read -r l; do printf %.10s \"$l\"; sleep 0.1; echo \"${l#??????????}\"; done"} {
		g := s.run(strings.NewReader(shown), nil, "ssh", "-F", s.conf, s.user+"@real.test", command)
		out := g.stdout + g.stderr
		printed = append(printed, out)
		if g.code != 0 || len(out) != len(shown) || !strings.HasPrefix(out, "shown before\n") || !strings.HasSuffix(out, "shown after\n") || strings.Count(out, "*") < 100 {
			t.Errorf("%s: exit %d\n%s", command, g.code, out)
		}
	}
	g := s.run(strings.NewReader(shown), nil, "ssh", "-F", s.conf, s.user+"@strict.real.test", "cat")
	if v := s.last(); g.code != 255 || v.Code != "RESULT_CONTAINS_SECRET" || v.Outcome != "committed" {
		t.Errorf("blocked: exit %d, %q", g.code, facts(v))
	}
	s.verify()
	s.keyNowhere(append(printed, g.stdout, g.stderr)...)
}
