package testkit

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

const (
	buildLimit  = 10 * time.Minute
	readyLimit  = 60 * time.Second
	keepOutput  = 64 << 20 // bytes of output kept per stream of a process
	defaultMain = "waybill/cmd/waybill"
)

// environment and cacheDir are taken before a test can change them.
var (
	environment = os.Environ()
	cacheDir, _ = os.UserCacheDir()
)

// BuildOptions choose a build of the binary. The zero value is the ordinary one.
type BuildOptions struct {
	Race bool
	Tags []string
	// Package is the import path of the main package; "" is waybill/cmd/waybill.
	Package string
}

type buildResult struct {
	once sync.Once
	path string
	err  error
}

var (
	buildsMu sync.Mutex
	builds   = map[string]*buildResult{}
)

// Binary returns the path of the waybill binary, built once per test process, and
// relinked only when the sources changed.
func Binary(t testing.TB) string { t.Helper(); return BinaryWith(t, BuildOptions{}) }

// BinaryWith returns the path of a build of the binary. The file belongs to the
// test: it is a link in its temp folder.
func BinaryWith(t testing.TB, o BuildOptions) string {
	t.Helper()
	if o.Package == "" {
		o.Package = defaultMain
	}
	name := strings.Map(func(r rune) rune {
		if r == '/' || r == ',' {
			return '-'
		}
		return r
	}, fmt.Sprintf("%s_race=%t_%s", o.Package, o.Race, strings.Join(o.Tags, ",")))
	buildsMu.Lock()
	b := builds[name]
	if b == nil {
		b = &buildResult{}
		builds[name] = b
	}
	buildsMu.Unlock()
	b.once.Do(func() { b.path, b.err = build(name, o) })
	if b.err != nil {
		t.Fatalf("testkit: build of %s: %v", o.Package, b.err)
	}
	own := filepath.Join(t.TempDir(), filepath.Base(o.Package))
	if err := os.Link(b.path, own); err != nil {
		if err := copyFile(own, b.path); err != nil {
			t.Fatalf("testkit: %v", err)
		}
	}
	return own
}

// build makes the binary in a folder that all test processes of this checkout share,
// one at a time. The go command leaves an up-to-date file alone; a new one is moved
// over the old one, whose links stay what they were. Another checkout has a folder of
// its own: its binary is another one.
func build(name string, o BuildOptions) (string, error) {
	root := cacheDir
	if root == "" {
		root = os.TempDir()
	}
	sum := sha256.Sum256([]byte(moduleRoot()))
	dir := filepath.Join(root, "waybill-testkit", hex.EncodeToString(sum[:6]))
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", err
	}
	lock, err := os.OpenFile(filepath.Join(dir, name+".lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return "", err
	}
	defer func() { _ = lock.Close() }()
	if err := syscall.Flock(int(lock.Fd()), syscall.LOCK_EX); err != nil {
		return "", err
	}
	path := filepath.Join(dir, name)
	// The build works on a copy beside it: a link that a running test holds must
	// never be written through.
	work := path + ".new"
	_ = os.Remove(work)
	if err := copyFile(work, path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return "", err
	}
	// As it ships: the image's and the archive's builds find it in the build cache.
	args, env := []string{"build", "-o", work, "-trimpath"}, append(slices.Clone(environment), "CGO_ENABLED=0")
	if o.Race {
		args, env = []string{"build", "-o", work, "-race"}, environment
	}
	if len(o.Tags) > 0 {
		args = append(args, "-tags", strings.Join(o.Tags, ","))
	}
	ctx, cancel := context.WithTimeout(context.Background(), buildLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", append(args, o.Package)...)
	cmd.Env = env
	if out, err := cmd.CombinedOutput(); err != nil {
		return "", fmt.Errorf("%w\n%s", err, out)
	}
	return path, os.Rename(work, path)
}

// moduleRoot is the folder of the go.mod above the folder of the running test, "" when
// there is none.
func moduleRoot() string {
	dir, err := os.Getwd()
	if err != nil {
		return ""
	}
	for ; ; dir = filepath.Dir(dir) {
		if _, err := os.Stat(filepath.Join(dir, "go.mod")); err == nil {
			return dir
		}
		if dir == filepath.Dir(dir) {
			return ""
		}
	}
}

func copyFile(to, from string) error {
	in, err := os.Open(from)
	if err != nil {
		return err
	}
	defer func() { _ = in.Close() }()
	st, err := in.Stat()
	if err != nil {
		return err
	}
	out, err := os.OpenFile(to, os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o700)
	if err != nil {
		return err
	}
	if _, err := io.Copy(out, in); err != nil {
		_ = out.Close()
		return err
	}
	if err := out.Close(); err != nil {
		return err
	}
	return os.Chtimes(to, st.ModTime(), st.ModTime())
}

// Command says what to start.
type Command struct {
	Path string   // of the binary; see Binary
	Args []string // without the program's name
	// Env is added to CleanEnv ("NAME=value").
	Env   []string
	Dir   string
	Stdin io.Reader

	// Readiness: all that are set must hold before Start returns. With none, Start
	// returns at once.
	ReadyURL  string         // answers 200
	ReadyFile string         // exists (a socket, too)
	ReadyLine *regexp.Regexp // was printed on stdout or stderr
	// Limit bounds the wait for readiness; 0 is 60 s.
	Limit time.Duration
}

// CleanEnv is the environment of this test run without proxy variables, CA
// variables and WAYBILL_*: what a started program gets (PATH, HOME, TMPDIR, …).
func CleanEnv() []string {
	var out []string
	for _, kv := range environment {
		name, _, _ := strings.Cut(kv, "=")
		upper := strings.ToUpper(name)
		if strings.HasSuffix(upper, "_PROXY") || strings.HasPrefix(upper, "WAYBILL_") ||
			upper == "SSL_CERT_FILE" || upper == "SSL_CERT_DIR" || upper == "CURL_CA_BUNDLE" ||
			upper == "REQUESTS_CA_BUNDLE" || upper == "NODE_EXTRA_CA_CERTS" || upper == "GIT_SSL_CAINFO" || upper == "GODEBUG" {
			continue
		}
		out = append(out, kv)
	}
	return out
}

// Process is a program that a test started, in a process group of its own.
type Process struct {
	cmd            *exec.Cmd
	stdout, stderr *output
	done           chan struct{}
	err            error // of Wait; valid when done is closed
}

// Start starts a program and waits until it is ready; a program that ends or is
// not ready in time fails the test. Its group is killed when the test ends.
func Start(t testing.TB, c Command) *Process {
	t.Helper()
	p := start(t, c)
	p.WaitReady(t, c)
	return p
}

func start(t testing.TB, c Command) *Process {
	t.Helper()
	cmd := exec.Command(c.Path, c.Args...)
	cmd.Env = append(CleanEnv(), c.Env...)
	cmd.Dir = c.Dir
	cmd.Stdin = c.Stdin
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	// A grandchild that keeps the pipes open must not keep Wait from returning.
	cmd.WaitDelay = 5 * time.Second
	p := &Process{cmd: cmd, stdout: newOutput(), stderr: newOutput(), done: make(chan struct{})}
	cmd.Stdout, cmd.Stderr = p.stdout, p.stderr
	if err := cmd.Start(); err != nil {
		t.Fatalf("testkit: start of %s: %v", c.Path, err)
	}
	go func() {
		p.err = cmd.Wait()
		close(p.done)
	}()
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("testkit: output of %s (process %d)\nstdout: %s\nstderr: %s", filepath.Base(c.Path), p.PID(), tail(p.Stdout()), tail(p.Stderr()))
		}
	})
	return p
}

func tail(s string) string {
	const keep = 8 << 10
	if len(s) > keep {
		return "…" + s[len(s)-keep:]
	}
	return s
}

// Run starts a program, waits until it ends and returns its exit code (-1: ended
// by a signal) and output. It is killed, and the test fails, after 2 minutes.
func Run(t testing.TB, c Command) (code int, stdout, stderr string) {
	t.Helper()
	p := start(t, c)
	return p.Wait(t, 2*time.Minute), p.Stdout(), p.Stderr()
}

// WaitReady waits until the readiness conditions of c hold; Start has done so.
func (p *Process) WaitReady(t testing.TB, c Command) {
	t.Helper()
	limit := c.Limit
	if limit == 0 {
		limit = readyLimit
	}
	client := &http.Client{
		Timeout:   2 * time.Second,
		Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true},
	}
	err := poll(limit, p.done, func() error {
		if c.ReadyLine != nil && p.Line(c.ReadyLine) == nil {
			return fmt.Errorf("no line like %q", c.ReadyLine)
		}
		if c.ReadyFile != "" {
			if _, err := os.Stat(c.ReadyFile); err != nil {
				return err
			}
		}
		if c.ReadyURL != "" {
			req, err := http.NewRequestWithContext(context.Background(), http.MethodGet, c.ReadyURL, nil)
			if err != nil {
				return err
			}
			resp, err := client.Do(req)
			if err != nil {
				return err
			}
			_ = resp.Body.Close()
			if resp.StatusCode != http.StatusOK {
				return fmt.Errorf("%s: status %d", c.ReadyURL, resp.StatusCode)
			}
		}
		return nil
	})
	if err == nil {
		return
	}
	select {
	case <-p.done:
		t.Fatalf("testkit: %s ended before it was ready (exit code %d): %v", filepath.Base(c.Path), p.ExitCode(), err)
	default:
		t.Fatalf("testkit: %s not ready within %s: %v", filepath.Base(c.Path), limit, err)
	}
}

// PID is the process id; it is the id of its process group, too.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Running reports whether the process has not ended.
func (p *Process) Running() bool {
	select {
	case <-p.done:
		return false
	default:
		return true
	}
}

// Kill ends the process and its whole group with SIGKILL and waits for its end. Of
// an ended process it ends what is left of the group.
func (p *Process) Kill() {
	if p.Running() {
		_ = syscall.Kill(-p.PID(), syscall.SIGKILL)
		<-p.done
		return
	}
	// What the ended process left behind in its group still carries its id, which is
	// not given to another process while they live. If a process of that id exists,
	// the group was empty and the id is somebody else's now.
	if errors.Is(syscall.Kill(p.PID(), 0), syscall.ESRCH) {
		_ = syscall.Kill(-p.PID(), syscall.SIGKILL)
	}
}

// Signal sends a signal to the process alone.
func (p *Process) Signal(t testing.TB, sig os.Signal) {
	t.Helper()
	if err := p.cmd.Process.Signal(sig); err != nil {
		t.Fatalf("testkit: signal %v: %v", sig, err)
	}
}

// Wait waits for the end of the process and returns its exit code, -1 if a signal
// ended it. After limit it is killed and the test fails.
func (p *Process) Wait(t testing.TB, limit time.Duration) int {
	t.Helper()
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-p.done:
	case <-timer.C:
		p.Kill()
		t.Fatalf("testkit: process %d did not end within %s", p.PID(), limit)
	}
	return p.ExitCode()
}

// ExitCode is the exit code of an ended process, -1 if a signal ended it or it
// still runs.
func (p *Process) ExitCode() int {
	if p.Running() {
		return -1
	}
	return p.cmd.ProcessState.ExitCode()
}

// Err is what waiting for the ended process returned; nil while it runs.
func (p *Process) Err() error {
	if p.Running() {
		return nil
	}
	return p.err
}

// Stdout is what the process has printed so far.
func (p *Process) Stdout() string { return p.stdout.String() }

// Stderr is what the process has printed so far.
func (p *Process) Stderr() string { return p.stderr.String() }

// Line returns the submatches of the first place in stdout or stderr that matches,
// or nil.
func (p *Process) Line(re *regexp.Regexp) []string {
	if m := re.FindStringSubmatch(p.Stdout()); m != nil {
		return m
	}
	return re.FindStringSubmatch(p.Stderr())
}

// WaitLine waits for a place in stdout or stderr that matches, and returns its
// submatches. It fails the test after 60 s, or when the process ends without it.
func (p *Process) WaitLine(t testing.TB, re *regexp.Regexp) []string {
	t.Helper()
	var m []string
	err := poll(readyLimit, p.done, func() error {
		if m = p.Line(re); m == nil {
			return fmt.Errorf("no output like %q", re)
		}
		return nil
	})
	if err != nil {
		if m = p.Line(re); m == nil { // printed last, then ended
			t.Fatalf("testkit: %v", err)
		}
	}
	return m
}

// output keeps what a process prints.
type output struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func newOutput() *output { return &output{} }

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if room := keepOutput - o.b.Len(); room > 0 {
		o.b.Write(p[:min(room, len(p))])
	}
	return len(p), nil
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.b.String()
}

// FreeAddr returns a loopback address that was free a moment ago. Where a program
// can listen on port 0 and say where it is, let it.
func FreeAddr(t testing.TB) string {
	t.Helper()
	ln := listen(t, "")
	defer func() { _ = ln.Close() }()
	return ln.Addr().String()
}

// RefusingAddr returns a loopback address at which connections are refused for as
// long as the test runs: its port is bound, but nobody listens.
func RefusingAddr(t testing.TB) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatalf("testkit: socket: %v", err)
	}
	t.Cleanup(func() { _ = syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatalf("testkit: bind: %v", err)
	}
	sa, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatalf("testkit: getsockname: %v", err)
	}
	return net.JoinHostPort("127.0.0.1", fmt.Sprint(sa.(*syscall.SockaddrInet4).Port))
}
