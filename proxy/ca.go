package proxy

import (
	"container/list"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/hex"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"math/big"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

const (
	caValidity   = 10 * 365 * 24 * time.Hour
	leafValidity = 30 * 24 * time.Hour
	// backdate allows for clocks of sandboxes that are behind.
	backdate = time.Hour
	// renewBefore is how long before its end a cached leaf is made anew.
	renewBefore = 7 * 24 * time.Hour
	maxLeaves   = 1024
	// maxCommonName is ub-common-name of RFC 5280 appendix A.1.
	maxCommonName = 64
)

// ErrCA is wrapped by every refusal to load a certification authority. A damaged or
// half-present one is never replaced silently: clients trust the old certificate.
var ErrCA = errors.New("proxy: certification authority")

// CA is the certification authority whose leaves intercepted callers see. Its key
// never leaves the process. Safe for concurrent use.
type CA struct {
	cert *x509.Certificate
	pem  []byte
	key  *ecdsa.PrivateKey
	now  func() time.Time

	mu     sync.Mutex
	leaves map[string]*list.Element // by host, of *leaf
	order  *list.List               // most recently used first
}

type leaf struct {
	host string
	cert *tls.Certificate
}

// LoadOrCreateCA reads ca.pem and ca-key.pem in dir, or makes both when neither
// exists (dir with mode 0700, ca.pem 0644, ca-key.pem 0600). It wraps ErrCA when
// one is missing, unreadable, expired, or does not belong to the other, and when
// others may read the key.
func LoadOrCreateCA(dir string) (*CA, error) {
	certPath, keyPath := filepath.Join(dir, "ca.pem"), filepath.Join(dir, "ca-key.pem")
	certPEM, certErr := os.ReadFile(certPath)
	keyPEM, keyErr := os.ReadFile(keyPath)
	switch {
	case certErr == nil && keyErr == nil:
		st, err := os.Stat(keyPath)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", ErrCA, err)
		}
		if st.Mode().Perm()&0o077 != 0 {
			return nil, fmt.Errorf("%w: %s is readable by others; set its mode to 0600", ErrCA, keyPath)
		}
		return parseCA(certPEM, keyPEM)
	case errors.Is(certErr, fs.ErrNotExist) && errors.Is(keyErr, fs.ErrNotExist):
		return createCA(dir, certPath, keyPath)
	case certErr != nil:
		return nil, fmt.Errorf("%w: %w", ErrCA, certErr)
	default:
		return nil, fmt.Errorf("%w: %w", ErrCA, keyErr)
	}
}

func newCA(cert *x509.Certificate, certPEM []byte, key *ecdsa.PrivateKey) *CA {
	return &CA{cert: cert, pem: certPEM, key: key, now: time.Now, leaves: make(map[string]*list.Element), order: list.New()}
}

func parseCA(certPEM, keyPEM []byte) (*CA, error) {
	cb, _ := pem.Decode(certPEM)
	kb, _ := pem.Decode(keyPEM)
	if cb == nil || kb == nil {
		return nil, fmt.Errorf("%w: ca.pem or ca-key.pem is not PEM", ErrCA)
	}
	cert, err := x509.ParseCertificate(cb.Bytes)
	if err != nil {
		return nil, fmt.Errorf("%w: ca.pem: %w", ErrCA, err)
	}
	parsed, err := x509.ParsePKCS8PrivateKey(kb.Bytes)
	if err != nil {
		// The cause is not wrapped: nothing of a key file belongs in an error (CONTRACT C2).
		return nil, fmt.Errorf("%w: ca-key.pem is not a PKCS #8 key", ErrCA)
	}
	key, ok := parsed.(*ecdsa.PrivateKey)
	if !ok || !key.PublicKey.Equal(cert.PublicKey) {
		return nil, fmt.Errorf("%w: ca-key.pem is not the key of ca.pem", ErrCA)
	}
	if !cert.IsCA || cert.KeyUsage&x509.KeyUsageCertSign == 0 {
		return nil, fmt.Errorf("%w: ca.pem is not a CA certificate", ErrCA)
	}
	if time.Now().After(cert.NotAfter) {
		return nil, fmt.Errorf("%w: ca.pem has expired; remove ca.pem and ca-key.pem to make a new one, and trust that", ErrCA)
	}
	return newCA(cert, certPEM, key), nil
}

func createCA(dir, certPath, keyPath string) (*CA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	ski, err := keyID(&key.PublicKey)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	tmpl := &x509.Certificate{
		SerialNumber: serial(),
		// The key id in the name tells two CAs of one machine apart in a trust store.
		Subject:               pkix.Name{Organization: []string{"Waybill"}, CommonName: "Waybill CA " + hex.EncodeToString(ski[:4])},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(caValidity),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
		SubjectKeyId:          ski,
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, tmpl, &key.PublicKey, key)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	pk, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	certPEM := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	// The key first: a crash in between leaves a key without a certificate, which the
	// next start refuses instead of showing callers a CA nobody wrote down.
	if err := writeFile(keyPath, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: pk}), 0o600); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	if err := writeFile(certPath, certPEM, 0o644); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	return newCA(cert, certPEM, key), nil
}

func keyID(pub *ecdsa.PublicKey) ([]byte, error) {
	raw, err := pub.Bytes()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	sum := sha256.Sum256(raw)
	return sum[:20], nil // RFC 7093 §2, method 1
}

func serial() *big.Int {
	var b [16]byte
	_, _ = rand.Read(b[:]) // crypto/rand.Read never fails
	b[0] = b[0]&0x7f | 0x40
	return new(big.Int).SetBytes(b[:])
}

// CertPEM returns the CA's certificate, for callers to trust.
func (ca *CA) CertPEM() []byte { return append([]byte(nil), ca.pem...) }

// Certificate returns the CA's certificate; it must not be changed. An upstream
// chain that ends in it must be refused (case CA-02).
func (ca *CA) Certificate() *x509.Certificate { return ca.cert }

// LeafFor returns a certificate for host: a DNS name, or an IP literal without
// brackets, in any case, with or without a trailing dot. Leaves are cached.
func (ca *CA) LeafFor(host string) (*tls.Certificate, error) {
	host = strings.TrimSuffix(strings.ToLower(host), ".")
	ca.mu.Lock()
	defer ca.mu.Unlock()
	if e, ok := ca.leaves[host]; ok {
		l := e.Value.(*leaf)
		if ca.now().Add(renewBefore).Before(l.cert.Leaf.NotAfter) {
			ca.order.MoveToFront(e)
			return l.cert, nil
		}
		ca.order.Remove(e)
		delete(ca.leaves, host)
	}
	// Made under the lock: it takes a tenth of a millisecond, and many connections to
	// one new host then share one leaf.
	cert, err := ca.sign(host)
	if err != nil {
		return nil, err
	}
	ca.leaves[host] = ca.order.PushFront(&leaf{host: host, cert: cert})
	if ca.order.Len() > maxLeaves {
		oldest := ca.order.Back()
		ca.order.Remove(oldest)
		delete(ca.leaves, oldest.Value.(*leaf).host)
	}
	return cert, nil
}

func (ca *CA) sign(host string) (*tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	ski, err := keyID(&key.PublicKey)
	if err != nil {
		return nil, err
	}
	now := ca.now()
	tmpl := &x509.Certificate{
		SerialNumber:          serial(),
		Subject:               pkix.Name{Organization: []string{"Waybill"}},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(leafValidity - backdate),
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
		BasicConstraintsValid: true,
		SubjectKeyId:          ski,
		AuthorityKeyId:        ca.cert.SubjectKeyId,
	}
	if tmpl.NotAfter.After(ca.cert.NotAfter) {
		tmpl.NotAfter = ca.cert.NotAfter
	}
	if tmpl.NotBefore.Before(ca.cert.NotBefore) {
		tmpl.NotBefore = ca.cert.NotBefore
	}
	if ip, err := netip.ParseAddr(host); err == nil {
		tmpl.IPAddresses = append(tmpl.IPAddresses, ip.AsSlice())
	} else {
		tmpl.DNSNames = []string{host}
	}
	if len(host) <= maxCommonName {
		tmpl.Subject.CommonName = host
	}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, ca.cert, &key.PublicKey, ca.key)
	if err != nil {
		return nil, fmt.Errorf("%w: leaf: %w", ErrCA, err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, fmt.Errorf("%w: leaf: %w", ErrCA, err)
	}
	return &tls.Certificate{Certificate: [][]byte{der}, PrivateKey: key, Leaf: parsed}, nil
}
