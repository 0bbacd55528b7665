package inject

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"waybill/internal/control"
	"waybill/outcome"
)

// Credential is one configured secret. ID and Label are recorded and shown.
type Credential struct {
	// ID is 1 to 128 printable ASCII characters without space, comma and '@'.
	ID string
	// Label is the operator's name of the version, such as "2026-11": at most 128
	// printable ASCII characters without comma. "": the source names the version.
	Label  string
	Source Source
	// Spec is what Source was made of; nil: of nothing configured.
	Spec *Spec
	// Multiline admits values of several lines: keys and certificates, which are used by
	// themselves and never put into a field.
	Multiline bool
}

// Kind is the kind of its source.
func (c *Credential) Kind() string {
	if c.Source == nil && c.Spec != nil {
		return c.Spec.Kind
	}
	return c.Source.Kind()
}

// Resolved is a credential with its secret, for one action. ID and Version are for
// the record (CONTRACT C2, D1); Version is never derived from the secret.
//
// Version is what an approval binds (D3): the label, or what the source names. Issue
// tells the tokens apart that were made of one version, and changes by itself.
type Resolved struct {
	ID      string
	Version string
	Issue   string
	Secret  Secret
	// Expires is when it ends and Since from when its version is; zero: the source does
	// not say. For the metrics.
	Expires time.Time
	Since   time.Time
}

// Shown is the version as it is recorded, with the issue.
func (r Resolved) Shown() string {
	if r.Issue == "" {
		return r.Version
	}
	return r.Version + "/" + r.Issue
}

// Store resolves credentials by id. It is immutable and safe for concurrent use; a
// nil Store holds none.
type Store struct {
	byID map[string]Credential
	ids  []string
}

// ErrBadCredential is wrapped by the errors of NewStore.
var ErrBadCredential = errors.New("inject: unusable credential definition")

// NewStore checks the definitions – ids are unique and well-formed, every one has
// a source – and fetches nothing. All that is wrong is in the error, by index.
func NewStore(creds []Credential) (*Store, error) {
	s := &Store{byID: make(map[string]Credential, len(creds))}
	var errs []error
	bad := func(i int, what string) {
		errs = append(errs, fmt.Errorf("%w: credentials[%d]: %s", ErrBadCredential, i, what))
	}
	for i, c := range creds {
		switch {
		case !printable(c.ID, false) || c.ID == "":
			bad(i, "the id must be 1 to 128 printable ASCII characters without space, comma and '@'")
			continue
		case !printable(c.Label, true):
			bad(i, "the label must be at most 128 printable ASCII characters without comma")
		case c.Source == nil:
			bad(i, "it has no source")
		}
		if _, twice := s.byID[c.ID]; twice {
			bad(i, "its id is taken")
			continue
		}
		s.byID[c.ID] = c
		s.ids = append(s.ids, c.ID)
	}
	if len(errs) > 0 {
		return nil, errors.Join(errs...)
	}
	slices.Sort(s.ids)
	return s, nil
}

// printable: the lists and pairs that records make of ids and labels stay readable.
func printable(s string, label bool) bool {
	if len(s) > 128 {
		return false
	}
	for i := range len(s) {
		if c := s[i]; c < ' ' || c > '~' || c == ',' || !label && (c == ' ' || c == '@') {
			return false
		}
	}
	return true
}

// IDs returns the ids of all credentials, sorted.
func (s *Store) IDs() []string {
	if s == nil {
		return nil
	}
	return slices.Clone(s.ids)
}

// Kind returns the kind of a credential's source; "" for one that the store does not have.
func (s *Store) Kind(id string) string {
	if s == nil {
		return ""
	}
	c, ok := s.byID[id]
	if !ok {
		return ""
	}
	return c.Kind()
}

// EnvNames returns the environment variables that secrets are read from, sorted:
// children of Waybill must not inherit them (CONTRACT C2).
func (s *Store) EnvNames() []string {
	var out []string
	if s != nil {
		for _, c := range s.byID {
			if e, ok := c.Source.(envSource); ok {
				out = append(out, e.name)
			}
			if c.Spec != nil {
				out = append(out, c.Spec.EnvNames()...)
			}
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// Adopt takes over the sources of an earlier store whose definitions are the same, with
// what they hold: a reload starts no command again, asks no store, and two renewals of
// one token never run at once. It is called before s is used.
func (s *Store) Adopt(earlier *Store) {
	if s == nil || earlier == nil {
		return
	}
	for id, c := range s.byID {
		was, ok := earlier.byID[id]
		if ok && c.Spec != nil && was.Spec != nil && c.Label == was.Label && c.Spec.Place() == was.Spec.Place() && c.Spec.Kind == was.Spec.Kind {
			c.Source = was.Source
			s.byID[id] = c
		}
	}
}

// Check fetches every credential and returns what is wrong with those that cannot
// be used now, by id. A start or a reload reports it and goes on: the file may come
// later, and routes with other credentials work (CONTRACT C1). which chooses by the kind
// of the source; nil: all.
func (s *Store) Check(ctx context.Context, which func(kind string) bool) []*Error {
	var out []*Error
	for _, id := range s.IDs() {
		if c := s.byID[id]; which != nil && !which(c.Kind()) {
			continue
		}
		r, err := s.Resolve(ctx, id)
		r.Secret.Zero()
		var e *Error
		if errors.As(err, &e) {
			out = append(out, e)
		}
	}
	return out
}

// Resolve fetches the secret of a credential. The error is always an *Error. An id
// that the store does not have is CREDENTIAL_MISSING and not repeated in it
// (CONTRACT B3).
func (s *Store) Resolve(ctx context.Context, id string) (Resolved, error) {
	var c Credential
	ok := false
	if s != nil {
		c, ok = s.byID[id]
	}
	if !ok {
		e := &Error{Code: outcome.CodeCredentialMissing, Reason: ReasonUnknown}
		if control.Off("B3-reference-not-echoed") {
			e.ID = id
		}
		return Resolved{}, e
	}
	var secret Secret
	var version, issue string
	var expires, since time.Time
	var err error
	switch src := c.Source.(type) {
	case RawSource:
		var m Material
		if m, err = src.FetchRaw(ctx); err == nil {
			version, issue, expires, since = m.Version, m.Issue, m.Expires, m.since
			if c.Multiline {
				secret, err = ParseMaterial(m.Raw)
			} else {
				secret, err = ParseSecret(m.Raw)
			}
			clear(m.Raw)
		}
	case VersionedSource:
		secret, version, err = src.FetchVersion(ctx)
	default:
		secret, err = c.Source.Fetch(ctx)
	}
	if version == "" {
		version = c.Source.Kind() + ":unversioned"
	}
	if err == nil {
		// Whatever the source, nothing leaves here that could not be sent.
		b := secret.bytes()
		if !c.Multiline {
			err = checkBytes(b)
		}
		if err == nil && (holdsSecret(c.Label, b) || holdsSecret(version, b) || holdsSecret(issue, b)) {
			err = invalid(ReasonLabel, 0)
		}
	}
	if err != nil {
		secret.Zero()
		return Resolved{}, named(err, c)
	}
	version = printableVersion(version)
	if since.IsZero() {
		since = sinceOf(version)
	}
	if c.Label != "" {
		version = c.Label
	}
	return Resolved{ID: c.ID, Version: version, Issue: printableVersion(issue), Secret: secret, Expires: expires, Since: since}, nil
}

// sinceOf reads the time out of a file's version; zero for all others.
func sinceOf(version string) time.Time {
	text, ok := strings.CutPrefix(version, "mtime:")
	if !ok {
		return time.Time{}
	}
	at, err := time.Parse(stampLayout, text)
	if err != nil {
		return time.Time{}
	}
	return at
}

// printableVersion keeps what a store calls its version fit for a record.
func printableVersion(s string) string {
	if printable(s, false) {
		return s
	}
	b := []byte(s[:min(len(s), 128)])
	for i, c := range b {
		if c <= ' ' || c > '~' || c == ',' {
			b[i] = '_'
		}
	}
	return string(b)
}

// Suspect says that what a credential resolved to was refused where it was used: a
// source that makes tokens makes a new one for the next Resolve. The refused one is
// named by its issue, so that many who say so cause one renewal.
func (s *Store) Suspect(id, issue string) {
	if s == nil || issue == "" {
		return
	}
	if r, ok := s.byID[id].Source.(Renewable); ok {
		r.Suspect(issue)
	}
}

// ForgetVault drops everything that is held of Waybill's own vault: values that were made
// of its secrets, such as access tokens, and what other stores gave to a login that is kept
// in it. It is called when the vault is locked. Actions that have their secret go on.
func (s *Store) ForgetVault() {
	if s == nil || control.Off("C1-lock-drops-what-was-made") {
		return
	}
	for _, c := range s.byID {
		if f, ok := c.Source.(Forgetter); ok && c.Spec != nil && c.Spec.NeedsVault() {
			f.Forget()
		}
	}
}

// holdsSecret finds the mistake of writing the secret where its label belongs. A
// short secret may be part of a label by chance; only the same text counts then.
func holdsSecret(label string, secret []byte) bool {
	if len(secret) < 8 {
		return label == string(secret)
	}
	return len(label) >= len(secret) && bytes.Contains([]byte(label), secret)
}

// named makes an *Error of a source's error and puts the credential into it. The
// text of a foreign error is not kept: it may quote what it read.
func named(err error, c Credential) *Error {
	var e *Error
	if errors.As(err, &e) {
		out := *e
		out.ID, out.Kind = c.ID, c.Source.Kind()
		return &out
	}
	out := &Error{Code: outcome.CodeCredentialInvalid, Reason: ReasonSource, ID: c.ID, Kind: c.Source.Kind()}
	var timeout interface{ Timeout() bool }
	switch {
	case errors.Is(err, context.Canceled):
		out.Code, out.Reason, out.cause = outcome.CodeCredentialUnavailable, ReasonTimeout, context.Canceled
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &timeout) && timeout.Timeout():
		out.Code, out.Reason, out.cause = outcome.CodeCredentialUnavailable, ReasonTimeout, context.DeadlineExceeded
	}
	return out
}
