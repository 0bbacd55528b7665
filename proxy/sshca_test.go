package proxy_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/crypto/ssh"

	"waybill/internal/contract"
	"waybill/proxy"
)

// The CA and the host key are made once, kept, and never taken from files that others
// may read (CONTRACT C2, G7).
func TestSSHCA(t *testing.T) {
	contract.Covers(t, "C2", "G7")
	dir := filepath.Join(t.TempDir(), "ssh")
	load := func() *proxy.SSHCA {
		t.Helper()
		ca, err := proxy.LoadOrCreateSSHCA(dir)
		if err != nil {
			t.Fatal(err)
		}
		return ca
	}
	// Several processes at the first start: one CA, one host key.
	all := make([]*proxy.SSHCA, 8)
	var wg sync.WaitGroup
	for i := range all {
		wg.Go(func() { all[i] = load() })
	}
	wg.Wait()
	first := load()
	for _, ca := range all {
		if ca.KnownHostsLine() != first.KnownHostsLine() || ca.HostKeyLine() != first.HostKeyLine() {
			t.Fatal("two processes have two CAs or host keys")
		}
	}
	if known, err := os.ReadFile(filepath.Join(dir, proxy.SSHKnownHostsFile)); err != nil || string(known) != first.KnownHostsLine()+"\n" || !strings.HasPrefix(first.KnownHostsLine(), "@cert-authority * ") {
		t.Errorf("%q %v", known, err)
	}
	key, err := first.HostFor("box.test")
	if err != nil {
		t.Fatal(err)
	}
	cert, ok := key.PublicKey().(*ssh.Certificate)
	if !ok || cert.CertType != ssh.HostCert || len(cert.ValidPrincipals) != 1 || cert.ValidPrincipals[0] != "box.test" || !bytes.Equal(cert.Key.Marshal(), first.HostKey().PublicKey().Marshal()) {
		t.Errorf("%+v", cert)
	}
	entries, err := os.ReadDir(dir)
	if err != nil || len(entries) != 4 {
		t.Errorf("%v %v", entries, err)
	}
	for _, name := range []string{"ssh_ca", "ssh_host_ed25519_key"} {
		path := filepath.Join(dir, name)
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if st, err := os.Stat(path); err != nil || st.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", name, st.Mode(), err)
		}
		if err := os.Chmod(path, 0o640); err != nil { //nolint:gosec // what is refused
			t.Fatal(err)
		}
		if _, err := proxy.LoadOrCreateSSHCA(dir); !errors.Is(err, proxy.ErrCA) {
			t.Errorf("%s with mode 0640: %v", name, err)
		}
		if err := os.WriteFile(path, bytes.Replace(raw, []byte("b3BlbnNzaC1rZXk"), []byte("b3BlbnNzaC1rZXx"), 1), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chmod(path, 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := proxy.LoadOrCreateSSHCA(dir); !errors.Is(err, proxy.ErrCA) || strings.Contains(err.Error(), string(bytes.Split(raw, []byte("\n"))[3])) {
			t.Errorf("damaged %s: %v", name, err)
		}
		if err := os.WriteFile(path, raw, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if again := load(); again.HostKeyLine() != first.HostKeyLine() {
		t.Error("the host key changed")
	}
	// A CA that got lost is not replaced in silence: clients trust the old one.
	if err := os.Remove(filepath.Join(dir, "ssh_ca")); err != nil {
		t.Fatal(err)
	}
	if _, err := proxy.LoadOrCreateSSHCA(dir); !errors.Is(err, proxy.ErrCA) {
		t.Errorf("without its key: %v", err)
	}
}
