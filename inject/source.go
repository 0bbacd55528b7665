package inject

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"syscall"
	"time"

	"waybill/outcome"
)

// Source is where a secret comes from. Fetch returns the current value, or an
// error that holds no part of it; an *Error keeps its code, a timeout becomes
// CREDENTIAL_UNAVAILABLE, any other error CREDENTIAL_INVALID. Fetch may be called
// concurrently.
type Source interface {
	Fetch(ctx context.Context) (Secret, error)
	// Kind is a fixed name such as "env" or "file".
	Kind() string
}

// VersionedSource is a Source that can name the version of what it fetched, by
// something that is no secret and not derived from one (CONTRACT C2): a time, a
// version number of the store.
type VersionedSource interface {
	Source
	FetchVersion(ctx context.Context) (s Secret, version string, err error)
}

// started stands for the version of the environment, which does not change while
// the process runs.
var started = time.Now()

type envSource struct{ name string }

// EnvSource reads the environment variable name, as ParseSecret does. A variable
// that is not set is CREDENTIAL_MISSING. Its version is the start of the process.
func EnvSource(name string) Source { return envSource{name} }

func (s envSource) Kind() string { return "env" }

func (s envSource) Fetch(ctx context.Context) (Secret, error) {
	secret, _, err := s.FetchVersion(ctx)
	return secret, err
}

func (s envSource) FetchVersion(context.Context) (Secret, string, error) {
	v, ok := os.LookupEnv(s.name)
	if !ok {
		return Secret{}, "", &Error{Code: outcome.CodeCredentialMissing, Reason: ReasonNotSet, Kind: s.Kind()}
	}
	secret, err := ParseSecret([]byte(v))
	return secret, "started:" + stamp(started), err
}

type fileSource struct {
	path string
	read func(path string) (raw []byte, before, after fs.FileInfo, err error)
}

// FileSource reads the file at path, as ParseSecret does, at every Fetch: a secret
// that was rotated is used from the next request on. Its version is the time of
// the file's last change.
//
// A file that is not there is CREDENTIAL_MISSING. One that is there but unusable –
// unreadable, no regular file (symbolic links are followed), larger than
// MaxSecretBytes, rewritten again and again while it is read – is
// CREDENTIAL_INVALID.
func FileSource(path string) Source { return fileSource{path, readFile} }

func (s fileSource) Kind() string { return "file" }

func (s fileSource) Fetch(ctx context.Context) (Secret, error) {
	secret, _, err := s.FetchVersion(ctx)
	return secret, err
}

func (s fileSource) FetchVersion(context.Context) (Secret, string, error) {
	// A writer that truncates and rewrites in place can be met half-way: what was
	// read counts only if the file was the same before and after.
	for range 3 {
		raw, before, after, err := s.read(s.path)
		if err != nil {
			return Secret{}, "", err
		}
		if before.ModTime().Equal(after.ModTime()) && before.Size() == after.Size() && int64(len(raw)) == before.Size() {
			secret, err := ParseSecret(raw)
			clear(raw)
			return secret, "mtime:" + stamp(before.ModTime()), err
		}
		clear(raw)
	}
	return Secret{}, "", invalid(ReasonChanging, 0)
}

// stamp is a time in UTC to the nanosecond, without characters that need quoting.
func stamp(t time.Time) string { return t.UTC().Format("20060102T150405.000000000Z") }

// maxRaw is a secret of the largest size with its line end.
const maxRaw = MaxSecretBytes + 2

// readFile reads a file, and says what it was before and after.
func readFile(path string) (raw []byte, before, after fs.FileInfo, err error) {
	// O_NONBLOCK: opening a pipe without a writer must not hang.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK|syscall.O_CLOEXEC, 0)
	if err != nil {
		return nil, nil, nil, openError(err)
	}
	defer func() { _ = f.Close() }()
	if before, err = f.Stat(); err != nil {
		return nil, nil, nil, unreadable(err)
	}
	switch {
	case !before.Mode().IsRegular():
		return nil, nil, nil, invalid(ReasonNotAFile, 0)
	case before.Size() > maxRaw:
		return nil, nil, nil, invalid(ReasonTooLarge, 0)
	}
	if raw, err = io.ReadAll(io.LimitReader(f, maxRaw+1)); err != nil {
		clear(raw)
		return nil, nil, nil, unreadable(err)
	}
	if after, err = f.Stat(); err != nil {
		clear(raw)
		return nil, nil, nil, unreadable(err)
	}
	return raw, before, after, nil
}

func openError(err error) *Error {
	switch {
	// ENOTDIR: a part of the path is a file, so nothing is there.
	case errors.Is(err, fs.ErrNotExist), errors.Is(err, syscall.ENOTDIR):
		return &Error{Code: outcome.CodeCredentialMissing, Reason: ReasonNotSet, Kind: "file", cause: err}
	// A socket, or a device that is not there, cannot be opened at all.
	case errors.Is(err, syscall.ENXIO), errors.Is(err, syscall.ENODEV):
		return &Error{Code: outcome.CodeCredentialInvalid, Reason: ReasonNotAFile, Kind: "file", cause: err}
	}
	return unreadable(err)
}

func unreadable(err error) *Error {
	return &Error{Code: outcome.CodeCredentialInvalid, Reason: ReasonUnreadable, Kind: "file", cause: err}
}
