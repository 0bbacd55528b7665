package inject

import (
	"bytes"
	"context"
	"time"
)

// Material is what a source holds, before it is read as a secret. Its Raw belongs to
// whoever receives it. It never leaves this package's callers as text: see Secret.
type Material struct {
	Raw []byte
	// Version names it and is no secret (CONTRACT C2): a time, a version of the store.
	Version string
	// Issue tells tokens apart that were made of one version: the time of issue of an
	// access token. "": there are none.
	Issue string
	// Expires is when it ends; zero: it does not say.
	Expires time.Time

	since time.Time // from when its version is; zero: see sinceOf
}

func (m Material) clone() Material {
	m.Raw = bytes.Clone(m.Raw)
	return m
}

// RawSource is a Source whose value may have several lines: keys and certificates.
type RawSource interface {
	Source
	FetchRaw(ctx context.Context) (Material, error)
}

// Writer is a Source whose value can be replaced, durably when it returns: where a
// refresh token that rotates is kept.
type Writer interface {
	Source
	Replace(ctx context.Context, value []byte) error
}

// Renewable is a Source that holds something back from its store. Suspect says that
// the value of that issue was refused where it was used; the next Fetch asks anew.
type Renewable interface {
	Source
	Suspect(issue string)
}

// Forgetter is a Source that holds what it fetched, or made of other secrets. After
// Forget it holds nothing: the next Fetch asks anew.
type Forgetter interface {
	Source
	Forget()
}

// ParseMaterial makes a Secret of text with several lines: PEM blocks, JSON. The
// bytes stay as they are. It refuses nothing ("empty"), more than MaxSecretBytes
// ("too_large") and bytes that are neither printable ASCII nor line ends or tabs.
func ParseMaterial(raw []byte) (Secret, error) {
	switch {
	case len(bytes.TrimSpace(raw)) == 0:
		return Secret{}, invalid(ReasonEmpty, 0)
	case len(raw) > MaxSecretBytes:
		return Secret{}, invalid(ReasonTooLarge, 0)
	}
	for i, c := range raw {
		switch {
		case c == '\n' || c == '\r' || c == '\t':
		case c < ' ' || c == 0x7f:
			return Secret{}, invalid(ReasonControlByte, i+1)
		case c > 0x7f:
			return Secret{}, invalid(ReasonNonASCII, i+1)
		}
	}
	return NewSecret(raw), nil
}
