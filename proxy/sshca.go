package proxy

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/binary"
	"encoding/pem"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"golang.org/x/crypto/ssh"
)

// SSHCA certifies the host key that callers of the SSH endpoint see, so that one
// @cert-authority line is all they have to trust. Clients that know no certificates
// (paramiko, plink, libssh2) trust the key itself, which is the same behind every name.
// Neither private key leaves the process. Safe for concurrent use.
type SSHCA struct {
	signer ssh.Signer
	host   ssh.Signer
	now    func() time.Time

	mu    sync.Mutex
	certs map[string]sshHost
}

type sshHost struct {
	signer ssh.Signer
	renew  time.Time
}

const (
	sshHostValidity = 24 * time.Hour
	sshHostRenew    = 12 * time.Hour
)

// Names of the files of an SSHCA in its folder.
const (
	sshCAKeyFile    = "ssh_ca"
	sshCAPublicFile = "ssh_ca.pub"
	sshHostKeyFile  = "ssh_host_ed25519_key"
	// SSHKnownHostsFile holds the @cert-authority line.
	SSHKnownHostsFile = "known_hosts"
)

// LoadOrCreateSSHCA reads the CA of the SSH endpoint and its host key in dir, or makes
// what is missing: ssh_ca and ssh_host_ed25519_key (mode 0600), ssh_ca.pub and
// known_hosts. It wraps ErrCA when a key is unreadable, others may read it, or only the
// CA's public part is there.
func LoadOrCreateSSHCA(dir string) (*SSHCA, error) {
	path, public := filepath.Join(dir, sshCAKeyFile), filepath.Join(dir, sshCAPublicFile)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		if _, err := os.Stat(public); err == nil {
			return nil, fmt.Errorf("%w: %s is missing beside its public part; put it back, or remove that to make a new one", ErrCA, path)
		}
	}
	signer, err := loadOrCreateSSHKey(path, "waybill ssh ca")
	if err != nil {
		return nil, err
	}
	host, err := loadOrCreateSSHKey(filepath.Join(dir, sshHostKeyFile), "waybill ssh host key")
	if err != nil {
		return nil, err
	}
	ca := &SSHCA{signer: signer, host: host, now: time.Now, certs: make(map[string]sshHost)}
	for path, text := range map[string][]byte{
		public:                                ssh.MarshalAuthorizedKey(signer.PublicKey()),
		filepath.Join(dir, SSHKnownHostsFile): []byte(ca.KnownHostsLine() + "\n"),
	} {
		if have, err := os.ReadFile(path); err == nil && bytes.Equal(have, text) {
			continue
		}
		if err := writeBeside(path, text, 0o644); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrCA, err)
		}
	}
	return ca, nil
}

// loadOrCreateSSHKey reads a private key, or makes one where there is none: the first of
// several processes decides.
func loadOrCreateSSHKey(path, comment string) (ssh.Signer, error) {
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		if err = createSSHKey(path, comment); err == nil {
			raw, err = os.ReadFile(path)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	defer clear(raw)
	if st, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	} else if st.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%w: %s is readable by others; set its mode to 0600", ErrCA, path)
	}
	signer, err := ssh.ParsePrivateKey(raw)
	if err != nil {
		// The cause is not wrapped: nothing of a key file belongs in an error (CONTRACT C2).
		return nil, fmt.Errorf("%w: %s is no private key", ErrCA, path)
	}
	return signer, nil
}

// createSSHKey writes a new key, unless somebody else did meanwhile.
func createSSHKey(path, comment string) error {
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return err
	}
	block, err := ssh.MarshalPrivateKey(key, comment)
	if err != nil {
		return err
	}
	raw := pem.EncodeToMemory(block)
	defer clear(raw)
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return err
	}
	err = placeBeside(path, raw, 0o600, os.Link)
	if errors.Is(err, fs.ErrExist) {
		return nil
	}
	return err
}

// writeBeside writes a file whole: synced under another name, then renamed.
func writeBeside(path string, data []byte, mode fs.FileMode) error {
	return placeBeside(path, data, mode, os.Rename)
}

// placeBeside is writeBeside with another way to the name: os.Link takes none that is
// there.
func placeBeside(path string, data []byte, mode fs.FileMode, place func(from, to string) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".new-*") // mode 0600
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }()
	_, werr := f.Write(data)
	err = errors.Join(werr, f.Chmod(mode), f.Sync(), f.Close())
	if err != nil {
		return err
	}
	return place(f.Name(), path)
}

// KnownHostsLine is the line by which an SSH client trusts every host behind the
// endpoint.
func (c *SSHCA) KnownHostsLine() string {
	return "@cert-authority * " + strings.TrimSpace(string(ssh.MarshalAuthorizedKey(c.signer.PublicKey()))) + " waybill"
}

// HostKeyLine is the line for a client that knows no certificates: the host key behind
// the endpoint, whatever the name.
func (c *SSHCA) HostKeyLine() string {
	return "* " + strings.TrimSpace(string(ssh.MarshalAuthorizedKey(c.host.PublicKey())))
}

// HostKey is the key of HostKeyLine.
func (c *SSHCA) HostKey() ssh.Signer { return c.host }

// maxSSHHosts bounds the certificates that are kept.
const maxSSHHosts = 1024

// HostFor returns that key with a certificate for the names.
func (c *SSHCA) HostFor(names ...string) (ssh.Signer, error) {
	key := strings.Join(names, ",")
	c.mu.Lock()
	defer c.mu.Unlock()
	now := c.now()
	if h, ok := c.certs[key]; ok && now.Before(h.renew) {
		return h.signer, nil
	}
	var serial [8]byte
	_, _ = rand.Read(serial[:]) // crypto/rand.Read never fails
	cert := &ssh.Certificate{
		Key: c.host.PublicKey(), Serial: binary.BigEndian.Uint64(serial[:]), CertType: ssh.HostCert, KeyId: "waybill", ValidPrincipals: names,
		ValidAfter: uint64(now.Add(-backdate).Unix()), ValidBefore: uint64(now.Add(sshHostValidity).Unix()), //nolint:gosec // times after 1970
	}
	if err := cert.SignCert(rand.Reader, c.signer); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	signer, err := ssh.NewCertSigner(cert, c.host)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	if len(c.certs) >= maxSSHHosts {
		clear(c.certs)
	}
	c.certs[key] = sshHost{signer, now.Add(sshHostRenew)}
	return signer, nil
}
