package inject

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"waybill/internal/killpoint"
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

// taken are the variables that TakeEnv took.
var taken = struct {
	mu     sync.Mutex
	values map[string]string
}{values: map[string]string{}}

// TakeEnv takes variables out of this process's environment; EnvSource still has them. A
// library that starts a program – AWS's a credential_process, D-Bus's a launcher – gives it
// that environment, and no secret is the program's business (CONTRACT C2). What AWS's
// libraries log in with stays: they read it themselves.
func TakeEnv(names ...string) {
	taken.mu.Lock()
	defer taken.mu.Unlock()
	for _, name := range names {
		if v, ok := os.LookupEnv(name); ok && !slices.Contains(awsEnv, name) {
			taken.values[name] = v
			_ = os.Unsetenv(name)
		}
	}
}

func lookupEnv(name string) (string, bool) {
	taken.mu.Lock()
	defer taken.mu.Unlock()
	if v, ok := os.LookupEnv(name); ok {
		return v, true
	}
	v, ok := taken.values[name]
	return v, ok
}

// EnvSource reads the environment variable name, as ParseSecret does. A variable
// that is not set is CREDENTIAL_MISSING. Its version is the start of the process.
func EnvSource(name string) Source { return envSource{name} }

func (s envSource) Kind() string { return "env" }

func (s envSource) Fetch(ctx context.Context) (Secret, error) {
	secret, _, err := s.FetchVersion(ctx)
	return secret, err
}

func (s envSource) FetchVersion(ctx context.Context) (Secret, string, error) {
	return parsed(s.FetchRaw(ctx))
}

func (s envSource) FetchRaw(context.Context) (Material, error) {
	v, ok := lookupEnv(s.name)
	if !ok {
		return Material{}, &Error{Code: outcome.CodeCredentialMissing, Reason: ReasonNotSet, Kind: s.Kind()}
	}
	return Material{Raw: []byte(v), Version: "started:" + stamp(started)}, nil
}

// parsed reads material as a secret of one line.
func parsed(m Material, err error) (Secret, string, error) {
	if err != nil {
		return Secret{}, "", err
	}
	secret, err := ParseSecret(m.Raw)
	clear(m.Raw)
	return secret, m.Version, err
}

type fileSource struct {
	path string
	read func(path string) (raw []byte, before, after fs.FileInfo, err error)

	mu      sync.Mutex
	kept    []byte // of the file that was; nil: none
	was     fileState
	version string // of what is kept
	since   time.Time
}

// FileSource reads the file at path, as ParseSecret does, when it changed since the
// last Fetch: a secret that was rotated is used from the next request on. Its version
// is the time of the file's last change.
//
// A file that is not there is CREDENTIAL_MISSING. One that is there but unusable –
// unreadable, no regular file (symbolic links are followed), larger than
// MaxSecretBytes, rewritten again and again while it is read – is
// CREDENTIAL_INVALID.
func FileSource(path string) Source { return &fileSource{path: path, read: readFile} }

func (s *fileSource) Kind() string { return "file" }

func (s *fileSource) Fetch(ctx context.Context) (Secret, error) {
	secret, _, err := s.FetchVersion(ctx)
	return secret, err
}

func (s *fileSource) FetchVersion(ctx context.Context) (Secret, string, error) {
	return parsed(s.FetchRaw(ctx))
}

// rest is how long a file must have rested before it is believed to be the same by
// its times: those of a file system may be that coarse, and a second change within
// one tick would not be seen.
const rest = 2 * time.Second

// FetchRaw asks the file system for the file's state each time, and reads the file
// when that changed: one call instead of five.
func (s *fileSource) FetchRaw(context.Context) (Material, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.kept != nil {
		if state, err := stateAt(s.path); err == nil && state == s.was {
			return Material{Raw: bytes.Clone(s.kept), Version: s.version, since: s.since}, nil
		}
	}
	clear(s.kept)
	s.kept = nil
	// A writer that truncates and rewrites in place can be met half-way: what was
	// read counts only if the file was the same before and after.
	for range 3 {
		now := time.Now()
		raw, before, after, err := s.read(s.path)
		if err != nil {
			return Material{}, err
		}
		version := "mtime:" + stamp(before.ModTime())
		if before.ModTime().Equal(after.ModTime()) && before.Size() == after.Size() && int64(len(raw)) == before.Size() {
			if state := stateOf(before); state == stateOf(after) && state.settled(now) {
				s.kept, s.was, s.version, s.since = bytes.Clone(raw), state, version, before.ModTime().UTC()
			}
			return Material{Raw: raw, Version: version}, nil
		}
		clear(raw)
	}
	return Material{}, invalid(ReasonChanging, 0)
}

// Replace writes the file anew, whole and synced before it gets its name (Writer).
func (s *fileSource) Replace(_ context.Context, value []byte) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	clear(s.kept)
	s.kept = nil
	return ReplaceFile(s.path, value)
}

// ReplaceFile writes a file of mode 0600 (or that of the file which is there) beside
// path, syncs it, gives it the name path and syncs the folder: after a crash the one or
// the other is there, whole; what a crash left beside it is removed by the next call. A
// symbolic link is followed.
func ReplaceFile(path string, value []byte) (err error) {
	if real, err := filepath.EvalSymlinks(path); err == nil {
		path = real
	}
	dir := filepath.Dir(path)
	prefix := "." + filepath.Base(path) + ".new-"
	left, _ := os.ReadDir(dir)
	f, err := os.CreateTemp(dir, prefix+"*") // mode 0600
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			_ = f.Close()
			_ = os.Remove(f.Name())
		}
	}()
	if info, err := os.Stat(path); err == nil {
		if err := f.Chmod(info.Mode().Perm()); err != nil {
			return err
		}
	}
	if _, err := f.Write(value); err != nil {
		return err
	}
	if err := f.Sync(); err != nil {
		return err
	}
	if err := f.Close(); err != nil {
		return err
	}
	killpoint.At("secret-written")
	if err := os.Rename(f.Name(), path); err != nil {
		return err
	}
	for _, e := range left {
		if strings.HasPrefix(e.Name(), prefix) && e.Type().IsRegular() {
			_ = os.Remove(filepath.Join(dir, e.Name()))
		}
	}
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// stamp is a time in UTC to the nanosecond, without characters that need quoting.
func stamp(t time.Time) string { return t.UTC().Format(stampLayout) }

const stampLayout = "20060102T150405.000000000Z"

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
