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

// SSHCA certifies the host keys that callers of the SSH endpoint see, so that one
// @cert-authority line is all they have to trust. Its key never leaves the process; the
// host key behind the certificates is made anew at each start. Safe for concurrent use.
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
	// SSHKnownHostsFile holds the @cert-authority line.
	SSHKnownHostsFile = "known_hosts"
)

// LoadOrCreateSSHCA reads the CA of the SSH endpoint in dir, or makes one when there is
// none: ssh_ca (mode 0600), ssh_ca.pub and known_hosts. It wraps ErrCA when the key is
// unreadable, others may read it, or only its public part is there.
func LoadOrCreateSSHCA(dir string) (*SSHCA, error) {
	path := filepath.Join(dir, sshCAKeyFile)
	raw, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		if _, err := os.Stat(filepath.Join(dir, sshCAPublicFile)); err == nil {
			return nil, fmt.Errorf("%w: %s is missing beside its public part; put it back, or remove that to make a new one", ErrCA, path)
		}
		if raw, err = createSSHCA(dir, path); err != nil {
			return nil, err
		}
	case err != nil:
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	if st, err := os.Stat(path); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	} else if st.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%w: %s is readable by others; set its mode to 0600", ErrCA, path)
	}
	signer, err := ssh.ParsePrivateKey(raw)
	clear(raw)
	if err != nil {
		// The cause is not wrapped: nothing of a key file belongs in an error (CONTRACT C2).
		return nil, fmt.Errorf("%w: %s is no private key", ErrCA, path)
	}
	_, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	host, err := ssh.NewSignerFromKey(key)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	ca := &SSHCA{signer: signer, host: host, now: time.Now, certs: make(map[string]sshHost)}
	known := filepath.Join(dir, SSHKnownHostsFile)
	if have, err := os.ReadFile(known); err != nil || !bytes.Equal(have, []byte(ca.KnownHostsLine()+"\n")) {
		if err := writeBeside(known, []byte(ca.KnownHostsLine()+"\n"), 0o644); err != nil {
			return nil, fmt.Errorf("%w: %w", ErrCA, err)
		}
	}
	return ca, nil
}

func createSSHCA(dir, path string) ([]byte, error) {
	pub, key, err := ed25519.GenerateKey(rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	block, err := ssh.MarshalPrivateKey(key, "waybill ssh ca")
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	public, err := ssh.NewPublicKey(pub)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	raw := pem.EncodeToMemory(block)
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	// The key first: a public part without it is refused, a key without that is whole.
	if err := writeBeside(path, raw, 0o600); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	if err := writeBeside(filepath.Join(dir, sshCAPublicFile), ssh.MarshalAuthorizedKey(public), 0o644); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrCA, err)
	}
	return raw, nil
}

// writeBeside writes a file whole: synced under another name, then renamed.
func writeBeside(path string, data []byte, mode fs.FileMode) error {
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
	return os.Rename(f.Name(), path)
}

// KnownHostsLine is the line by which an SSH client trusts every host behind the
// endpoint.
func (c *SSHCA) KnownHostsLine() string {
	return "@cert-authority * " + strings.TrimSpace(string(ssh.MarshalAuthorizedKey(c.signer.PublicKey()))) + " waybill"
}

// maxSSHHosts bounds the certificates that are kept.
const maxSSHHosts = 1024

// HostFor returns the host key with a certificate for the names.
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
