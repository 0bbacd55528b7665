package proxy

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestLeaves is case CA-01: every leaf is accepted by a strict verifier, literals get
// an IP SAN, long names work.
func TestLeaves(t *testing.T) {
	dir := t.TempDir()
	ca, err := LoadOrCreateCA(dir)
	if err != nil {
		t.Fatal(err)
	}
	root := ca.Certificate()
	if !root.IsCA || !root.BasicConstraintsValid || !root.MaxPathLenZero || len(root.SubjectKeyId) == 0 || root.KeyUsage&x509.KeyUsageCertSign == 0 {
		t.Errorf("CA %+v", root)
	}
	pool := x509.NewCertPool()
	pool.AddCert(root)
	long := strings.Repeat("a", 30) + "." + strings.Repeat("b", 30) + ".example.test"
	for _, host := range []string{"pay.example.test", "127.0.0.1", "::1", long, "with_underscore.example.test", "localhost"} {
		leaf, err := ca.LeafFor(host)
		if err != nil {
			t.Fatalf("%s: %v", host, err)
		}
		c := leaf.Leaf
		if _, err := c.Verify(x509.VerifyOptions{Roots: pool, DNSName: host, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}); err != nil {
			t.Errorf("%s: %v", host, err)
		}
		switch {
		case len(c.SubjectKeyId) == 0, !bytes.Equal(c.AuthorityKeyId, root.SubjectKeyId), c.IsCA, c.KeyUsage != x509.KeyUsageDigitalSignature:
			t.Errorf("%s: %+v", host, c)
		case strings.Contains(host, ":") || host == "127.0.0.1":
			if len(c.IPAddresses) != 1 || len(c.DNSNames) != 0 {
				t.Errorf("%s: SAN %v %v", host, c.IPAddresses, c.DNSNames)
			}
		case len(host) > 64 && c.Subject.CommonName != "":
			t.Errorf("%s: CN %q", host, c.Subject.CommonName)
		}
		now := time.Now()
		if now.Sub(c.NotBefore) < 50*time.Minute && c.NotBefore.After(root.NotBefore) || c.NotAfter.Sub(c.NotBefore) > 30*24*time.Hour || c.NotAfter.After(root.NotAfter) {
			t.Errorf("%s: from %s to %s", host, c.NotBefore, c.NotAfter)
		}
		for _, e := range c.Extensions {
			if e.Id.String() == "2.5.29.15" && !e.Critical {
				t.Errorf("%s: keyUsage is not critical", host)
			}
		}
		openssl(t, dir, host, c)
	}
}

// openssl verifies the leaf as the strictest client does.
func openssl(t *testing.T, dir, host string, c *x509.Certificate) {
	t.Helper()
	tool, err := exec.LookPath("openssl")
	if err != nil {
		return // the checks above cover the same fields
	}
	file := filepath.Join(dir, "leaf.pem")
	if err := os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c.Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command(tool, "verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", filepath.Join(dir, "ca.pem"), file).CombinedOutput()
	if err != nil {
		t.Errorf("%s: %v\n%s", host, err, out)
	}
}

// TestCAOnDisk: modes, reuse, and everything that is refused instead of replaced.
func TestCAOnDisk(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "ca")
	ca, err := LoadOrCreateCA(dir)
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]os.FileMode{"ca.pem": 0o644, "ca-key.pem": 0o600, ".": 0o700} {
		st, err := os.Stat(filepath.Join(dir, name))
		if err != nil || st.Mode().Perm() != want {
			t.Errorf("%s: %v %v, want %o", name, st.Mode(), err, want)
		}
	}
	again, err := LoadOrCreateCA(dir)
	if err != nil || !again.Certificate().Equal(ca.Certificate()) || !bytes.Equal(again.CertPEM(), ca.CertPEM()) {
		t.Fatalf("not the same CA: %v", err)
	}
	other := filepath.Join(t.TempDir(), "ca")
	if _, err := LoadOrCreateCA(other); err != nil {
		t.Fatal(err)
	}
	read := func(path string) []byte {
		raw, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return raw
	}
	key, cert := filepath.Join(dir, "ca-key.pem"), filepath.Join(dir, "ca.pem")
	goodKey, goodCert := read(key), read(cert)
	for name, damage := range map[string]func(){
		"key missing":           func() { _ = os.Remove(key) },
		"certificate missing":   func() { _ = os.Remove(cert) },
		"other key":             func() { _ = os.WriteFile(key, read(filepath.Join(other, "ca-key.pem")), 0o600) },
		"key is garbage":        func() { _ = os.WriteFile(key, []byte("SECRETBYTES"), 0o600) },
		"key is damaged":        func() { _ = os.WriteFile(key, bytes.Replace(goodKey, []byte("M"), []byte("N"), 1), 0o600) },
		"cert is garbage":       func() { _ = os.WriteFile(cert, []byte("x"), 0o644) },
		"key readable by group": func() { _ = os.Chmod(key, 0o640) },
	} {
		damage()
		_, err := LoadOrCreateCA(dir)
		if !errors.Is(err, ErrCA) || strings.Contains(fmt.Sprint(err), "SECRETBYTES") {
			t.Errorf("%s: %v", name, err)
		}
		for path, raw := range map[string][]byte{key: goodKey, cert: goodCert} {
			if err := os.WriteFile(path, raw, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		_ = os.Chmod(key, 0o600)
	}
}

// TestLeafCache: one leaf a host, whatever its spelling; renewed in time; bounded.
func TestLeafCache(t *testing.T) {
	ca, err := LoadOrCreateCA(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	get := func(host string) *tls.Certificate {
		c, err := ca.LeafFor(host)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	first := get("pay.example.test")
	if get("PAY.Example.TEST.") != first {
		t.Error("spellings have leaves of their own")
	}
	for i := range maxLeaves + 10 {
		get("pay.example.test") // stays: it is used
		get(fmt.Sprintf("h%d.example.test", i))
	}
	if n := ca.order.Len(); n > maxLeaves || len(ca.leaves) != n {
		t.Errorf("%d leaves are kept, %d are listed", len(ca.leaves), n)
	}
	if get("pay.example.test") != first {
		t.Error("a leaf in use was dropped")
	}
	ca.now = func() time.Time { return time.Now().Add(leafValidity - renewBefore) }
	if get("pay.example.test") == first {
		t.Error("a leaf near its end is still used")
	}
}
