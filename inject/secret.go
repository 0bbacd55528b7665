package inject

import (
	"errors"
	"fmt"
	"log/slog"

	"waybill/internal/control"
)

// Redacted is what every formatting of a Secret gives.
const Redacted = "[redacted]"

// ErrNoSecretCodec is returned by every attempt to encode a Secret in a form that
// could be read back, or to decode one: secrets come from sources only.
var ErrNoSecretCodec = errors.New("inject: a secret has no encoded form")

// Secret holds one secret value (CONTRACT C3). The zero value holds none.
//
// It prints as "[redacted]" through fmt with every verb, log, slog, text, JSON, XML
// and YAML, alone or inside other values; gob and other binary encodings refuse it.
// The bytes are captured by a closure, so that printers which walk values by
// reflection, unexported fields included, meet a function and no bytes. Secrets
// cannot be compared with == or be map keys. A Secret may be copied and used
// concurrently; copies share the value. Zero is not for concurrent use.
type Secret struct {
	// open returns the bytes themselves, which leave this package as copies only; nil: none.
	open func() []byte
}

// NewSecret copies b. It checks nothing: see ParseSecret.
func NewSecret(b []byte) Secret {
	own := append([]byte(nil), b...)
	return Secret{open: func() []byte { return own }}
}

// Expose returns a copy of the value: the only way out. What it returns goes into
// the request that is sent and into the search for reflections, never into an
// error, log, event, metric or file (CONTRACT C2). It is nil for the zero value.
func (s Secret) Expose() []byte {
	return append([]byte(nil), s.bytes()...)
}

// bytes is the value itself, for a look at it.
func (s Secret) bytes() []byte {
	if s.open == nil {
		return nil
	}
	return s.open()
}

// IsZero reports whether there is no value.
func (s Secret) IsZero() bool { return len(s.bytes()) == 0 }

// Zero overwrites the value in memory, for all copies of s. What Expose returned
// before is not reached.
func (s Secret) Zero() { clear(s.bytes()) }

// String returns "[redacted]".
func (s Secret) String() string {
	if control.Off("C3-secret-redacted") {
		return string(s.Expose())
	}
	return Redacted
}

// GoString returns "[redacted]".
func (s Secret) GoString() string { return s.String() }

// Format writes "[redacted]" for every verb, flag, width and precision.
func (s Secret) Format(f fmt.State, _ rune) { _, _ = f.Write([]byte(s.String())) }

// LogValue is "[redacted]" for slog.
func (s Secret) LogValue() slog.Value { return slog.StringValue(s.String()) }

// MarshalText returns "[redacted]"; JSON, XML and others use it, too.
func (s Secret) MarshalText() ([]byte, error) { return []byte(s.String()), nil }

// MarshalJSON returns the string "[redacted]".
func (s Secret) MarshalJSON() ([]byte, error) { return []byte(`"` + s.String() + `"`), nil }

// MarshalYAML returns "[redacted]": the Marshaler interface of YAML libraries.
func (s Secret) MarshalYAML() (any, error) { return s.String(), nil }

// GobEncode refuses with ErrNoSecretCodec.
func (s Secret) GobEncode() ([]byte, error) { return nil, ErrNoSecretCodec }

// GobDecode refuses with ErrNoSecretCodec.
func (s Secret) GobDecode([]byte) error { return ErrNoSecretCodec }

// MarshalBinary refuses with ErrNoSecretCodec.
func (s Secret) MarshalBinary() ([]byte, error) { return nil, ErrNoSecretCodec }

// UnmarshalText refuses with ErrNoSecretCodec: a configuration holds no secrets.
func (s *Secret) UnmarshalText([]byte) error { return ErrNoSecretCodec }

// UnmarshalJSON refuses with ErrNoSecretCodec.
func (s *Secret) UnmarshalJSON([]byte) error { return ErrNoSecretCodec }

// UnmarshalBinary refuses with ErrNoSecretCodec.
func (s *Secret) UnmarshalBinary([]byte) error { return ErrNoSecretCodec }

// MaxSecretBytes bounds a secret, without its trailing line end.
const MaxSecretBytes = 64 << 10

// ParseSecret makes a Secret of what a source holds. Exactly one trailing LF or
// CRLF is cut (editors and echo add it); whatever else could not be sent as it is,
// or was hardly meant, is refused with CREDENTIAL_INVALID, a reason and at most the
// position of a byte (CONTRACT C1, C2): nothing left ("empty"), more than
// MaxSecretBytes ("too_large"), a byte order mark ("byte_order_mark"), a control
// byte, NUL and DEL included ("control_byte"), a byte outside ASCII ("non_ascii"),
// a space at either end ("outer_space").
func ParseSecret(raw []byte) (Secret, error) {
	b := raw
	if n := len(b); n > 0 && b[n-1] == '\n' {
		b = b[:n-1]
		if n > 1 && b[n-2] == '\r' {
			b = b[:n-2]
		}
	}
	if err := checkBytes(b); err != nil {
		return Secret{}, err
	}
	return NewSecret(b), nil
}

// checkBytes refuses what a secret must not hold. A nil result is a nil error.
func checkBytes(b []byte) error {
	if control.Off("C1-secret-bytes-checked") {
		return nil
	}
	switch {
	case len(b) == 0:
		return invalid(ReasonEmpty, 0)
	case len(b) > MaxSecretBytes:
		return invalid(ReasonTooLarge, 0)
	}
	for _, mark := range []string{"\xef\xbb\xbf", "\xfe\xff", "\xff\xfe"} {
		if len(b) >= len(mark) && string(b[:len(mark)]) == mark {
			return invalid(ReasonByteOrderMark, 1)
		}
	}
	for i, c := range b {
		switch {
		case c < ' ' || c == 0x7f:
			return invalid(ReasonControlByte, i+1)
		case c > 0x7f:
			return invalid(ReasonNonASCII, i+1)
		}
	}
	switch {
	case b[0] == ' ':
		return invalid(ReasonOuterSpace, 1)
	case b[len(b)-1] == ' ':
		return invalid(ReasonOuterSpace, len(b))
	}
	return nil
}
