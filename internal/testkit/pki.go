package testkit

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// CA is a certificate authority of one test. Its keys are P-256.
type CA struct {
	Cert *x509.Certificate
	key  *ecdsa.PrivateKey
	t    testing.TB
}

// LeafSpec describes a certificate. The zero value of a field is the ordinary one.
type LeafSpec struct {
	Names     []string // DNS names and IP addresses
	NotBefore time.Time
	NotAfter  time.Time
	Client    bool // for client authentication, too
	// SelfSigned signs it with its own key, as nobody's child.
	SelfSigned bool
}

// NewCA makes a certificate authority.
func NewCA(t testing.TB) *CA {
	t.Helper()
	key := newKey(t)
	tmpl := &x509.Certificate{
		SerialNumber:          serial(t),
		Subject:               pkix.Name{CommonName: "testkit CA"},
		NotBefore:             time.Now().Add(-time.Hour),
		NotAfter:              time.Now().Add(24 * time.Hour),
		IsCA:                  true,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
	}
	return &CA{Cert: sign(t, tmpl, tmpl, key, key), key: key, t: t}
}

func newKey(t testing.TB) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatalf("testkit: key: %v", err)
	}
	return key
}

func serial(t testing.TB) *big.Int {
	t.Helper()
	n, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		t.Fatalf("testkit: serial: %v", err)
	}
	return n
}

func sign(t testing.TB, tmpl, parent *x509.Certificate, key, signer *ecdsa.PrivateKey) *x509.Certificate {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, tmpl, parent, &key.PublicKey, signer)
	if err != nil {
		t.Fatalf("testkit: certificate: %v", err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		t.Fatalf("testkit: certificate: %v", err)
	}
	return cert
}

// Leaf makes a server certificate that is valid for the names (DNS or IP).
func (ca *CA) Leaf(names ...string) tls.Certificate { return ca.Issue(LeafSpec{Names: names}) }

// Expired makes a server certificate whose validity ended an hour ago.
func (ca *CA) Expired(names ...string) tls.Certificate {
	now := time.Now()
	return ca.Issue(LeafSpec{Names: names, NotBefore: now.Add(-48 * time.Hour), NotAfter: now.Add(-time.Hour)})
}

// SelfSigned makes a server certificate that no authority signed.
func (ca *CA) SelfSigned(names ...string) tls.Certificate {
	return ca.Issue(LeafSpec{Names: names, SelfSigned: true})
}

// Client makes a client certificate.
func (ca *CA) Client(name string) tls.Certificate {
	return ca.Issue(LeafSpec{Names: []string{name}, Client: true})
}

// Issue makes the certificate that spec describes. Leaf is set, the chain holds
// the leaf alone.
func (ca *CA) Issue(spec LeafSpec) tls.Certificate {
	t := ca.t
	t.Helper()
	key := newKey(t)
	tmpl := &x509.Certificate{
		SerialNumber:          serial(t),
		Subject:               pkix.Name{CommonName: "testkit leaf"},
		NotBefore:             spec.NotBefore,
		NotAfter:              spec.NotAfter,
		BasicConstraintsValid: true,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}
	if tmpl.NotBefore.IsZero() {
		tmpl.NotBefore = time.Now().Add(-time.Hour)
	}
	if tmpl.NotAfter.IsZero() {
		tmpl.NotAfter = time.Now().Add(24 * time.Hour)
	}
	if spec.Client {
		tmpl.ExtKeyUsage = append(tmpl.ExtKeyUsage, x509.ExtKeyUsageClientAuth)
		tmpl.Subject.CommonName = spec.Names[0]
	}
	for _, n := range spec.Names {
		if ip := net.ParseIP(n); ip != nil {
			tmpl.IPAddresses = append(tmpl.IPAddresses, ip)
			continue
		}
		tmpl.DNSNames = append(tmpl.DNSNames, n)
	}
	parent, signer := ca.Cert, ca.key
	if spec.SelfSigned {
		tmpl.Subject.CommonName = "testkit self-signed"
		parent, signer = tmpl, key
	}
	leaf := sign(t, tmpl, parent, key, signer)
	return tls.Certificate{Certificate: [][]byte{leaf.Raw}, PrivateKey: key, Leaf: leaf}
}

// Server is a server configuration with a certificate valid for the names.
func (ca *CA) Server(names ...string) *tls.Config { return ServerConfig(ca.Leaf(names...)) }

// ServerConfig is a server configuration for HTTP/1.1 with this certificate.
func ServerConfig(cert tls.Certificate) *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"http/1.1"}, MinVersion: tls.VersionTLS12}
}

// RequireClient returns a copy of cfg that asks for a client certificate of this
// authority and refuses a connection without one. In TLS 1.3 the client learns
// that after its handshake, from an alert (CONTRACT G8).
func (ca *CA) RequireClient(cfg *tls.Config) *tls.Config {
	cfg = cfg.Clone()
	cfg.ClientAuth = tls.RequireAndVerifyClientCert
	cfg.ClientCAs = ca.Pool()
	return cfg
}

// Pool holds the authority's certificate.
func (ca *CA) Pool() *x509.CertPool {
	pool := x509.NewCertPool()
	pool.AddCert(ca.Cert)
	return pool
}

// PEM is the authority's certificate in PEM.
func (ca *CA) PEM() []byte {
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.Cert.Raw})
}

// File writes the authority's certificate into the test's temp folder and returns
// the path.
func (ca *CA) File() string {
	ca.t.Helper()
	return WriteFile(ca.t, "ca.pem", ca.PEM())
}

// WriteCert writes a certificate and its key as PEM files into the test's temp
// folder and returns their paths.
func WriteCert(t testing.TB, cert tls.Certificate) (certPath, keyPath string) {
	t.Helper()
	der, err := x509.MarshalPKCS8PrivateKey(cert.PrivateKey)
	if err != nil {
		t.Fatalf("testkit: key: %v", err)
	}
	var chain []byte
	for _, c := range cert.Certificate {
		chain = append(chain, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: c})...)
	}
	return WriteFile(t, "cert.pem", chain), WriteFile(t, "key.pem", pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}))
}

// Pin is the "sha256:<hex>" digest of a certificate's SubjectPublicKeyInfo.
func Pin(cert *x509.Certificate) string {
	d := sha256.Sum256(cert.RawSubjectPublicKeyInfo)
	return "sha256:" + hex.EncodeToString(d[:])
}

// WriteFile writes a file with mode 0600 into a new temp folder of the test and
// returns its path.
func WriteFile(t testing.TB, name string, data []byte) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatalf("testkit: %v", err)
	}
	return path
}
