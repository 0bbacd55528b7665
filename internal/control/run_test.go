package control

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"time"

	"waybill/internal/contract"
)

// entry is one line of docs/controls.txt.
type entry struct {
	Group   string // letter of the rule group that must go red
	Name    string // of the protection
	Package string // "./dispatch", from the module's root
	Run     string // as for go test -run
	Line    int
}

func (e entry) String() string {
	return fmt.Sprintf("%s %s %s %s", e.Group, e.Name, e.Package, e.Run)
}

var (
	groupForm   = regexp.MustCompile(`^[A-Z]$`)
	nameForm    = regexp.MustCompile(`^([A-Z][0-9]+)(-[a-z0-9]+)+$`)
	packageForm = regexp.MustCompile(`^\./[a-z0-9_/]+$`)
)

// parseEntries reads the text of docs/controls.txt and returns all its errors.
func parseEntries(text string) ([]entry, error) {
	var (
		out  []entry
		errs []error
		seen = map[string]bool{}
	)
	for i, line := range strings.Split(text, "\n") {
		line = strings.TrimSpace(line)
		if line == "" || strings.HasPrefix(line, "#") {
			continue
		}
		fail := func(format string, args ...any) {
			errs = append(errs, fmt.Errorf("docs/controls.txt:%d: "+format, append([]any{i + 1}, args...)...))
		}
		f := strings.Fields(line)
		if len(f) != 4 {
			fail("want GROUP NAME PACKAGE REGEXP, got %d words", len(f))
			continue
		}
		e := entry{Group: f[0], Name: f[1], Package: f[2], Run: f[3], Line: i + 1}
		if !groupForm.MatchString(e.Group) {
			fail("%q is no letter of a rule group", e.Group)
		}
		if m := nameForm.FindStringSubmatch(e.Name); m == nil {
			fail("%q is no name of a control: a rule, then words, as F1-durable-before-send", e.Name)
		} else if _, ok := contract.Lookup(m[1]); !ok {
			fail("%s: %s is no rule of docs/contract.md", e.Name, m[1])
		}
		if !packageForm.MatchString(e.Package) {
			fail("%q is no package of the module, as ./dispatch", e.Package)
		}
		if _, err := regexp.Compile(e.Run); err != nil {
			fail("%v", err)
		}
		if seen[e.String()] {
			fail("%s stands twice", e)
		}
		seen[e.String()] = true
		out = append(out, e)
	}
	return out, errors.Join(errs...)
}

// runner runs controls. Every package's test binary is built once, with the tag;
// every run with the protections on is made once. It is safe for concurrent use.
type runner struct {
	root    string        // of the module
	dir     string        // for binaries and claims
	timeout time.Duration // of one run of the tests

	mu        sync.Mutex
	binaries  map[string]func() (binary, error)
	baselines map[string]func() ([]contract.Claim, error)
	n         int
}

func newRunner(root, dir string, timeout time.Duration) *runner {
	return &runner{root: root, dir: dir, timeout: timeout,
		binaries: map[string]func() (binary, error){}, baselines: map[string]func() ([]contract.Claim, error){}}
}

// Run returns nil if the tests of e pass with the protection on, and a test that
// claims a rule of e.Group fails with it off. Otherwise the error says what
// happened instead.
func (r *runner) Run(ctx context.Context, e entry) error {
	claims, err := r.baseline(ctx, e.Package, e.Run)
	if err != nil {
		return fmt.Errorf("with every protection on: %w", err)
	}
	var claimants []string
	for _, c := range claims {
		if strings.HasPrefix(c.Rule, e.Group) {
			_, test, _ := strings.Cut(c.Test, " ")
			claimants = append(claimants, test)
		}
	}
	if len(claimants) == 0 {
		return fmt.Errorf("none of the tests %s of %s claims a rule of group %s (contract.Covers)", e.Run, e.Package, e.Group)
	}
	bin, err := r.binary(ctx, e.Package)
	if err != nil {
		return err
	}
	res := r.exec(ctx, bin, e.Package, e.Run, e.Name, "")
	switch {
	case res.timedOut:
		return fmt.Errorf("with %s off the tests hang; a control must fail:\n%s", e.Name, res.tail())
	case res.err == nil:
		return fmt.Errorf("with %s off the tests stay green: nothing tests this protection, or the code does not ask for it", e.Name)
	case len(res.failed) == 0:
		return fmt.Errorf("with %s off the test process ended with %w, but no test failed:\n%s", e.Name, res.err, res.tail())
	}
	for _, test := range claimants {
		if slices.Contains(res.failed, test) {
			return nil
		}
	}
	return fmt.Errorf("with %s off %s failed, but of group %s only %s claim a rule", e.Name,
		strings.Join(res.failed, ", "), e.Group, strings.Join(claimants, ", "))
}

// binary is the test binary of a package.
type binary struct {
	path  string
	flags []string
}

// binary builds the tests of a package with the tag.
func (r *runner) binary(ctx context.Context, pkg string) (binary, error) {
	r.mu.Lock()
	build, ok := r.binaries[pkg]
	if !ok {
		r.n++
		// The name is the one that go test would give, since tests may look at it.
		out := filepath.Join(r.dir, fmt.Sprintf("bin%d", r.n), path.Base(pkg)+".test")
		build = sync.OnceValues(func() (binary, error) {
			// As make builds the binary, so that what it took is there.
			cmd := exec.CommandContext(ctx, "go", "test", "-c", "-vet=off", "-trimpath", "-ldflags=-w", "-tags", "waybill_controls", "-o", out, pkg)
			cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
			cmd.Dir = r.root
			if msg, err := cmd.CombinedOutput(); err != nil {
				return binary{}, fmt.Errorf("the tests of %s do not build: %w\n%s", pkg, err, msg)
			}
			text, err := os.ReadFile(out)
			if err != nil {
				return binary{}, fmt.Errorf("%s has no tests: %w", pkg, err)
			}
			bin := binary{path: out}
			// A property that fails by intention is not worth a file in the source tree, nor a long search for
			// its smallest example. The flags exist only where the library is linked in.
			if bytes.Contains(text, []byte("rapid.nofailfile")) {
				bin.flags = []string{"-rapid.nofailfile", "-rapid.shrinktime=1s"}
			}
			return bin, nil
		})
		r.binaries[pkg] = build
	}
	r.mu.Unlock()
	return build()
}

// baseline runs the tests with every protection on and returns what they claim.
func (r *runner) baseline(ctx context.Context, pkg, run string) ([]contract.Claim, error) {
	r.mu.Lock()
	key := pkg + " " + run
	base, ok := r.baselines[key]
	if !ok {
		r.n++
		claims := filepath.Join(r.dir, fmt.Sprintf("claims%d", r.n))
		base = sync.OnceValues(func() ([]contract.Claim, error) {
			bin, err := r.binary(ctx, pkg)
			if err != nil {
				return nil, err
			}
			if err := os.Mkdir(claims, 0o700); err != nil {
				return nil, err
			}
			res := r.exec(ctx, bin, pkg, run, "", claims)
			switch {
			case res.timedOut:
				return nil, fmt.Errorf("the tests %s hang:\n%s", run, res.tail())
			case res.err != nil:
				return nil, fmt.Errorf("the tests %s fail: %w\n%s", run, res.err, res.tail())
			case res.passed == 0:
				return nil, fmt.Errorf("no test of %s matches %s", pkg, run)
			}
			found, err := contract.ReadClaims(claims)
			if err != nil {
				return nil, nil //nolint:nilerr // no claim at all: Run says which group misses one
			}
			return found, nil
		})
		r.baselines[key] = base
	}
	r.mu.Unlock()
	return base()
}

// result is how one run of a test binary ended.
type result struct {
	err      error    // of the process
	timedOut bool     // the tests did not end in time
	failed   []string // tests and subtests
	passed   int
	output   []byte
}

// tail is the end of the output, for messages.
func (r result) tail() string {
	out := r.output
	if len(out) > 4000 {
		out = out[len(out)-4000:]
	}
	return string(out)
}

var verdictLine = regexp.MustCompile(`(?m)^\s*--- (FAIL|PASS): (\S+) \(`)

// exec runs the tests as go test does, in the folder of their package, with the
// protection named off switched off. claims is where they leave their claims, or "".
func (r *runner) exec(ctx context.Context, bin binary, pkg, run, off, claims string) result {
	// The process is ended from outside only if its own time-out does not end it.
	ctx, cancel := context.WithTimeout(ctx, r.timeout+15*time.Second)
	defer cancel()
	args := append([]string{"-test.v", "-test.count=1", "-test.run=" + run, "-test.timeout=" + r.timeout.String()}, bin.flags...)
	cmd := exec.CommandContext(ctx, bin.path, args...)
	cmd.Dir = filepath.Join(r.root, filepath.FromSlash(pkg))
	cmd.WaitDelay = 5 * time.Second
	for _, kv := range os.Environ() {
		if !strings.HasPrefix(kv, Env+"=") && !strings.HasPrefix(kv, contract.DirEnv+"=") && !strings.HasPrefix(kv, contract.ExecutedEnv+"=") {
			cmd.Env = append(cmd.Env, kv)
		}
	}
	cmd.Env = append(cmd.Env, Env+"="+off, contract.DirEnv+"="+claims)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	res := result{err: cmd.Run(), output: out.Bytes()}
	res.timedOut = ctx.Err() != nil || bytes.Contains(res.output, []byte("panic: test timed out after "))
	for _, m := range verdictLine.FindAllSubmatch(res.output, -1) {
		if string(m[1]) == "PASS" {
			res.passed++
		} else {
			res.failed = append(res.failed, string(m[2]))
		}
	}
	return res
}
