package audit

import (
	"bytes"
	"crypto/ecdh"
	"crypto/hpke"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
)

// ErrKey is wrapped by errors about keys. Their texts hold no part of a private key.
var ErrKey = errors.New("audit: key")

const (
	publicPrefix  = "wbaudit1_"
	privatePrefix = "wbaudit1_secret_"
	keyBytes      = 32
	checkBytes    = 4
)

// PublicKey is what the log is sealed to: an HPKE key (X25519, RFC 9180).
type PublicKey struct{ k hpke.PublicKey }

// PrivateKey opens what was sealed to its public key. It is kept where the proxy is
// not. It does not print itself.
type PrivateKey struct{ k hpke.PrivateKey }

func kem() hpke.KEM { return hpke.DHKEM(ecdh.X25519()) }

// GenerateKey makes a pair.
func GenerateKey() (*PrivateKey, error) {
	k, err := kem().GenerateKey()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	return &PrivateKey{k}, nil
}

// Public returns the public key of the pair.
func (k *PrivateKey) Public() *PublicKey { return &PublicKey{k.k.PublicKey()} }

// String hides the key.
func (k *PrivateKey) String() string { return "[redacted]" }

// GoString hides the key.
func (k *PrivateKey) GoString() string { return "[redacted]" }

// Secret returns the text form of the private key, for the one file that holds it.
func (k *PrivateKey) Secret() (string, error) {
	b, err := k.k.Bytes()
	if err != nil {
		return "", fmt.Errorf("%w: %w", ErrKey, err)
	}
	return encodeKey(privatePrefix, b), nil
}

// String returns the text form.
func (k *PublicKey) String() string { return encodeKey(publicPrefix, k.k.Bytes()) }

// ParsePublicKey reads the text form.
func ParsePublicKey(s string) (*PublicKey, error) {
	if strings.HasPrefix(s, privatePrefix) {
		return nil, fmt.Errorf("%w: this is the private key; the public one begins with %s and is printed by keygen", ErrKey, publicPrefix)
	}
	b, err := decodeKey(publicPrefix, s)
	if err != nil {
		return nil, err
	}
	return publicKey(b)
}

func publicKey(b []byte) (*PublicKey, error) {
	k, err := kem().NewPublicKey(b)
	if err != nil {
		return nil, fmt.Errorf("%w: not a public key", ErrKey)
	}
	return &PublicKey{k}, nil
}

// ParsePrivateKey reads the text form; lines that begin with # are comments.
func ParsePrivateKey(s string) (*PrivateKey, error) {
	text := ""
	for line := range strings.Lines(s) {
		if line = strings.TrimSpace(line); line != "" && !strings.HasPrefix(line, "#") {
			if text != "" {
				return nil, fmt.Errorf("%w: more than one line", ErrKey)
			}
			text = line
		}
	}
	b, err := decodeKey(privatePrefix, text)
	if err != nil {
		return nil, err
	}
	k, err := kem().NewPrivateKey(b)
	if err != nil {
		return nil, fmt.Errorf("%w: not a private key", ErrKey)
	}
	return &PrivateKey{k}, nil
}

func encodeKey(prefix string, b []byte) string {
	sum := sha256.Sum256(append([]byte(prefix), b...))
	return prefix + base64.RawURLEncoding.EncodeToString(append(bytes.Clone(b), sum[:checkBytes]...))
}

func decodeKey(prefix, s string) ([]byte, error) {
	rest, ok := strings.CutPrefix(s, prefix)
	b, err := base64.RawURLEncoding.Strict().DecodeString(rest)
	if !ok || err != nil || len(b) != keyBytes+checkBytes {
		return nil, fmt.Errorf("%w: not a key that begins with %s and has %d characters", ErrKey, prefix, len(prefix)+48)
	}
	sum := sha256.Sum256(append([]byte(prefix), b[:keyBytes]...))
	if !bytes.Equal(sum[:checkBytes], b[keyBytes:]) {
		return nil, fmt.Errorf("%w: a character is wrong", ErrKey)
	}
	return b[:keyBytes], nil
}

// sealInfo binds sealed records to their use (RFC 9180 section 5.1).
var sealInfo = []byte("waybill audit log v1")

func kdf() hpke.KDF   { return hpke.HKDFSHA256() }
func aead() hpke.AEAD { return hpke.ExportOnly() }
