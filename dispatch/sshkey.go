package dispatch

import (
	"bytes"
	"context"
	"crypto/ecdsa"
	"crypto/ed25519"
	"crypto/rsa"
	"encoding/pem"
	"errors"
	"io"
	"net"
	"time"

	"golang.org/x/crypto/ssh"
	"golang.org/x/crypto/ssh/agent"

	"waybill/outcome"
	"waybill/routes"
)

// sshKey makes the signers of one key. What it holds in secret goes into a.secrets,
// so that no output shows it (CONTRACT C5).
func (a *action) sshKey(ctx context.Context, used *Credential, key, passphrase, certificate, socket, fingerprint string) ([]ssh.Signer, *Refusal) {
	note := func(id, version string) {
		used.ID, used.Version = join(used.ID, id), join(used.Version, version)
	}
	var cert *ssh.Certificate
	if certificate != "" {
		got, err := a.binding.Credentials.Resolve(ctx, certificate)
		if err != nil {
			return nil, a.credentialRefusal(&routes.Injection{Credential: certificate}, err)
		}
		pub, _, _, _, err := ssh.ParseAuthorizedKey(got.Secret.Expose())
		c, ok := pub.(*ssh.Certificate)
		if err != nil || !ok || c.CertType != ssh.UserCert {
			return nil, badKey("bad_certificate", "The certificate is no OpenSSH user certificate.")
		}
		note(got.ID, got.Shown())
		cert = c
	}
	if socket != "" {
		s, refused := agentKey(ctx, socket, fingerprint)
		if refused != nil {
			return nil, refused
		}
		note("agent", fingerprint)
		return certified(s, cert)
	}
	got, err := a.binding.Credentials.Resolve(ctx, key)
	if err != nil {
		return nil, a.credentialRefusal(&routes.Injection{Credential: key}, err)
	}
	text := got.Secret.Expose()
	defer clear(text)
	var pass []byte
	if passphrase != "" {
		p, err := a.binding.Credentials.Resolve(ctx, passphrase)
		if err != nil {
			return nil, a.credentialRefusal(&routes.Injection{Credential: passphrase}, err)
		}
		pass = p.Secret.Expose()
		a.secrets = append(a.secrets, string(pass))
		note(p.ID, p.Shown())
	}
	raw, err := parsePrivateKey(text, pass)
	if err != nil {
		// The library's text may quote what it read: the kind of failure only (C2).
		var missing *ssh.PassphraseMissingError
		if errors.As(err, &missing) {
			return nil, badKey("passphrase_missing", "The private key is encrypted and the route names no passphrase.")
		}
		return nil, badKey("bad_private_key", "The private key cannot be read, or the passphrase is not the right one.")
	}
	s, err := ssh.NewSignerFromKey(raw)
	if err != nil {
		return nil, badKey("bad_private_key", "The private key is of a kind that is not supported.")
	}
	note(got.ID, got.Shown())
	a.secrets = append(a.secrets, keySecrets(text, raw)...)
	return certified(s, cert)
}

func parsePrivateKey(text, pass []byte) (any, error) {
	raw, err := ssh.ParseRawPrivateKey(text)
	var missing *ssh.PassphraseMissingError
	if errors.As(err, &missing) && len(pass) > 0 {
		return ssh.ParseRawPrivateKeyWithPassphrase(text, pass)
	}
	return raw, err
}

func certified(s ssh.Signer, cert *ssh.Certificate) ([]ssh.Signer, *Refusal) {
	if cert == nil {
		return []ssh.Signer{s}, nil
	}
	c, err := ssh.NewCertSigner(cert, s)
	if err != nil {
		return nil, badKey("certificate_mismatch", "The certificate belongs to another key.")
	}
	return []ssh.Signer{c}, nil
}

func badKey(reason, detail string) *Refusal {
	f, _ := outcome.Of(outcome.CodeCredentialInvalid)
	return &Refusal{Facts: f, Reason: reason, Detail: detail}
}

// keySecrets are the texts of a private key by which a copy of it would be known: its
// lines, and the private numbers in any encoding that is looked for.
func keySecrets(text []byte, raw any) []string {
	var out []string
	if block, _ := pem.Decode(text); block != nil {
		for i, line := range bytes.Split(text, []byte("\n")) {
			line = bytes.TrimRight(line, "\r")
			// The first line of an OpenSSH key is the same for all keys of its kind.
			if i > 1 && len(line) >= 32 && !bytes.HasPrefix(line, []byte("-----")) {
				out = append(out, string(line))
			}
		}
	}
	switch k := raw.(type) {
	case *ed25519.PrivateKey:
		out = append(out, string(k.Seed()))
	case ed25519.PrivateKey:
		out = append(out, string(k.Seed()))
	case *rsa.PrivateKey:
		out = append(out, string(k.D.Bytes()))
		for _, p := range k.Primes {
			out = append(out, string(p.Bytes()))
		}
	case *ecdsa.PrivateKey:
		if b, err := k.Bytes(); err == nil {
			out = append(out, string(b))
		}
	}
	return out
}

// agentTime bounds one exchange with an agent.
const agentTime = 10 * time.Second

// agentKey finds a key of an ssh-agent. Nothing is kept open: each signature asks anew.
func agentKey(ctx context.Context, socket, fingerprint string) (ssh.Signer, *Refusal) {
	fail := func(code outcome.Code, reason, detail string) (ssh.Signer, *Refusal) {
		f, _ := outcome.Of(code)
		return nil, &Refusal{Facts: f, Reason: reason, Detail: detail}
	}
	s := &agentSigner{socket: socket}
	conn, err := s.dial(ctx)
	if err != nil {
		return fail(outcome.CodeCredentialUnavailable, "agent_unreachable", "The ssh-agent cannot be reached.")
	}
	defer func() { _ = conn.Close() }()
	keys, err := agent.NewClient(conn).List()
	if err != nil {
		return fail(outcome.CodeCredentialUnavailable, "agent_unreachable", "The ssh-agent does not answer.")
	}
	for _, k := range keys {
		pub, err := ssh.ParsePublicKey(k.Blob)
		if err == nil && ssh.FingerprintSHA256(pub) == fingerprint {
			s.pub = pub
			return s, nil
		}
	}
	return fail(outcome.CodeCredentialMissing, "agent_key_missing", "The ssh-agent does not hold the key, or is locked.")
}

// agentSigner signs by way of an ssh-agent.
type agentSigner struct {
	socket string
	pub    ssh.PublicKey
}

func (s *agentSigner) dial(ctx context.Context) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, agentTime)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", s.socket)
	if err == nil {
		_ = c.SetDeadline(time.Now().Add(agentTime))
	}
	return c, err
}

// PublicKey implements ssh.Signer.
func (s *agentSigner) PublicKey() ssh.PublicKey { return s.pub }

// Sign implements ssh.Signer.
func (s *agentSigner) Sign(rand io.Reader, data []byte) (*ssh.Signature, error) {
	return s.SignWithAlgorithm(rand, data, "")
}

// SignWithAlgorithm implements ssh.AlgorithmSigner.
func (s *agentSigner) SignWithAlgorithm(_ io.Reader, data []byte, algorithm string) (*ssh.Signature, error) {
	conn, err := s.dial(context.Background())
	if err != nil {
		return nil, err
	}
	defer func() { _ = conn.Close() }()
	var flags agent.SignatureFlags
	switch algorithm {
	case ssh.KeyAlgoRSASHA256:
		flags = agent.SignatureFlagRsaSha256
	case ssh.KeyAlgoRSASHA512:
		flags = agent.SignatureFlagRsaSha512
	}
	return agent.NewClient(conn).SignWithFlags(s.pub, data, flags)
}

var _ ssh.AlgorithmSigner = (*agentSigner)(nil)
