package inject

import (
	"bytes"
	"context"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"time"

	"waybill/outcome"
)

// CommandSource runs a program whose standard output is the secret: once, and again
// after o.Refresh if there is one. No shell reads the arguments. The program gets the
// environment without the variables in hide and those of HideEnv, no standard input, and its standard error
// goes nowhere: it may quote secrets. It and what it started are ended after the
// time-out.
//
// A program that is not there is CREDENTIAL_INVALID, one that fails or takes too long
// CREDENTIAL_UNAVAILABLE. The version is the time at which it ran.
func CommandSource(argv, hide []string, o CacheOptions) *Cached {
	return NewCached(KindCommand, func(ctx context.Context) (Material, error) { return runCommand(ctx, argv, hide) }, o)
}

// hidden are the variables that no command gets, whenever it was configured: a reload
// keeps the sources that it finds unchanged, and what a later configuration reads is in
// the environment of this process from its start.
var hidden struct {
	mu    sync.Mutex
	names []string
}

// HideEnv keeps variables from every command that runs from now on (CONTRACT C2).
func HideEnv(names ...string) {
	hidden.mu.Lock()
	defer hidden.mu.Unlock()
	hidden.names = append(hidden.names, names...)
	slices.Sort(hidden.names)
	hidden.names = slices.Compact(hidden.names)
}

func hiddenEnv() []string {
	hidden.mu.Lock()
	defer hidden.mu.Unlock()
	return slices.Clone(hidden.names)
}

func runCommand(ctx context.Context, argv, hide []string) (Material, error) {
	out := &boundedBuffer{limit: maxRaw}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdout, cmd.Env = out, childEnv(os.Environ(), append(hiddenEnv(), hide...))
	cmd.WaitDelay = time.Second // for output that something it started still holds open
	ownGroup(cmd)
	ran := time.Now()
	err := cmd.Run()
	defer clear(out.b.Bytes())
	fail := func(code outcome.Code, reason string, cause error) (Material, error) {
		return Material{}, &Error{Code: code, Reason: reason, Kind: KindCommand, cause: cause}
	}
	var exit *exec.ExitError
	switch {
	case out.over:
		return fail(outcome.CodeCredentialInvalid, ReasonTooLarge, nil)
	case ctx.Err() != nil:
		return fail(outcome.CodeCredentialUnavailable, ReasonTimeout, ctx.Err())
	case errors.Is(err, exec.ErrNotFound), errors.Is(err, fs.ErrNotExist), errors.Is(err, fs.ErrPermission):
		return fail(outcome.CodeCredentialInvalid, ReasonUnreadable, err)
	case errors.As(err, &exit), err != nil:
		return fail(outcome.CodeCredentialUnavailable, ReasonCommand, nil)
	}
	return Material{Raw: bytes.Clone(out.b.Bytes()), Version: "ran:" + stamp(ran)}, nil
}

// childEnv is the environment without some variables (CONTRACT C2).
func childEnv(env, hide []string) []string {
	out := make([]string, 0, len(env))
next:
	for _, kv := range env {
		name, _, _ := strings.Cut(kv, "=")
		for _, h := range hide {
			if name == h {
				continue next
			}
		}
		out = append(out, kv)
	}
	return out
}

type boundedBuffer struct {
	b     bytes.Buffer
	limit int
	over  bool
}

func (b *boundedBuffer) Write(p []byte) (int, error) {
	if b.b.Len()+len(p) > b.limit {
		b.over = true
		return 0, errors.New("inject: output too large")
	}
	return b.b.Write(p)
}

// KubernetesSource reads a key of a secret that is mounted as a folder. The kubelet
// swaps the link ..data when the secret changes, all keys at once; its target is the
// version.
func KubernetesSource(folder, key string) Source {
	return &kubernetesSource{file: FileSource(folder + "/" + key).(*fileSource), link: folder + "/..data"} //nolint:forcetypeassert // FileSource's own
}

type kubernetesSource struct {
	file *fileSource
	link string
}

func (s *kubernetesSource) Kind() string { return KindKubernetes }

func (s *kubernetesSource) Fetch(ctx context.Context) (Secret, error) {
	secret, _, err := parsed(s.FetchRaw(ctx))
	return secret, err
}

func (s *kubernetesSource) FetchRaw(ctx context.Context) (Material, error) {
	for range 3 {
		before, _ := os.Readlink(s.link)
		m, err := s.file.FetchRaw(ctx)
		if err != nil {
			return m, err
		}
		if after, _ := os.Readlink(s.link); after == before {
			if before != "" {
				m.Version = "data:" + strings.TrimLeft(before, ".")
			}
			return m, nil
		}
		clear(m.Raw)
	}
	return Material{}, invalid(ReasonChanging, 0)
}
