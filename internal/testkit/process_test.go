package testkit_test

import (
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"waybill/internal/testkit"
)

// sh is a program to start: a shell script.
func sh(t *testing.T, script string) testkit.Command {
	t.Helper()
	return testkit.Command{Path: testkit.RequireTool(t, "sh"), Args: []string{"-c", script}}
}

func TestProcessRunAndOutput(t *testing.T) {
	c := sh(t, `echo out; echo err >&2; echo "$A-$HTTPS_PROXY-$WAYBILL_DATA"; exit 3`)
	c.Env = []string{"A=b"}
	code, stdout, stderr := testkit.Run(t, c)
	if code != 3 || stdout != "out\nb--\n" || stderr != "err\n" {
		t.Fatalf("%d %q %q", code, stdout, stderr)
	}
}

func TestProcessReadiness(t *testing.T) {
	testkit.CheckGoroutines(t)
	file := filepath.Join(t.TempDir(), "ready")
	o := testkit.NewOrigin(t, testkit.OriginConfig{Handler: http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if _, err := os.Stat(file); err != nil {
			w.WriteHeader(http.StatusServiceUnavailable)
		}
	})})
	c := sh(t, `echo "listening on port 12" >&2; : >"$F"; while :; do sleep 60; done`)
	c.Env = []string{"F=" + file}
	c.ReadyFile, c.ReadyURL, c.ReadyLine = file, "http://"+o.Addr()+"/readyz", regexp.MustCompile(`port (\d+)`)
	p := testkit.Start(t, c)
	if m := p.WaitLine(t, c.ReadyLine); m[1] != "12" {
		t.Fatalf("%q", m)
	}
	if testkit.FDs(t, p.PID()) < 3 || testkit.Threads(t, p.PID()) != 1 || !p.Running() || p.ExitCode() != -1 || p.Err() != nil {
		t.Fatal("not a running process")
	}
	p.Kill()
	if p.Running() || p.ExitCode() != -1 || p.Err() == nil {
		t.Fatal("not killed")
	}
	p.Kill()
}

func TestProcessSignalAndWait(t *testing.T) {
	c := sh(t, `trap 'exit 7' TERM; echo ready; while :; do sleep 0.01; done`)
	c.ReadyLine = regexp.MustCompile(`ready`)
	p := testkit.Start(t, c)
	p.Signal(t, syscall.SIGTERM)
	if code := p.Wait(t, 20*time.Second); code != 7 {
		t.Fatal(code)
	}
	<-p.Done()
}

// Nothing that a started program started outlives the test.
func TestKillEndsTheGroup(t *testing.T) {
	for name, script := range map[string]string{
		"leader runs":  `sleep 600 >/dev/null 2>&1 & echo "child $!"; wait`,
		"leader ended": `sleep 600 >/dev/null 2>&1 & echo "child $!"`,
	} {
		t.Run(name, func(t *testing.T) {
			var child int
			t.Run("start", func(t *testing.T) {
				p := testkit.Start(t, sh(t, script))
				m := p.WaitLine(t, regexp.MustCompile(`child (\d+)`))
				child, _ = strconv.Atoi(m[1])
				if name == "leader ended" {
					p.Wait(t, 20*time.Second)
				}
				if err := syscall.Kill(child, 0); err != nil {
					t.Fatal(err)
				}
			})
			testkit.Eventually(t, func() error {
				// Killed; a zombie until its new parent looks.
				b, err := os.ReadFile("/proc/" + strconv.Itoa(child) + "/stat")
				if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) || strings.Contains(string(b), ") Z ") {
					return nil
				}
				return errors.New("child still runs")
			})
		})
	}
}

func TestBinaryIsBuiltOnce(t *testing.T) {
	o := testkit.BuildOptions{Package: "waybill/internal/testkit/testdata/hello"}
	a, b := testkit.BinaryWith(t, o), testkit.BinaryWith(t, o)
	if a == b {
		t.Fatal("not a file of its own")
	}
	sa, err := os.Stat(a)
	if err != nil {
		t.Fatal(err)
	}
	sb, err := os.Stat(b)
	if err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(sa, sb) && (!sa.ModTime().Equal(sb.ModTime()) || sa.Size() != sb.Size()) {
		t.Fatal("built twice")
	}
	if _, out, _ := testkit.Run(t, testkit.Command{Path: a}); out != "hello\n" {
		t.Fatalf("%q", out)
	}
	o.Tags = []string{"testkit_tag"}
	if _, out, _ := testkit.Run(t, testkit.Command{Path: testkit.BinaryWith(t, o)}); out != "hello\ntagged\n" {
		t.Fatalf("%q", out)
	}
}

func TestSettlesAndFiles(t *testing.T) {
	dir := testkit.TempDir(t)
	f, err := os.CreateTemp("", "spool")
	if err != nil {
		t.Fatal(err)
	}
	if got := testkit.Files(t, dir); len(got) != 1 {
		t.Fatalf("%q", got)
	}
	if err := os.Remove(f.Name()); err != nil {
		t.Fatal(err)
	}
	if got := testkit.DeletedFiles(t, 0); len(got) != 1 || !strings.Contains(got[0], "spool") {
		t.Fatalf("%q", got)
	}
	before := testkit.FDs(t, 0)
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	n := 3
	testkit.Settles(t, "things", 0, func() int { n--; return n })
	// What an earlier test left may open and close others meanwhile.
	testkit.Settles(t, "descriptors", before-1, func() int { return testkit.FDs(t, 0) })
	if got := testkit.DeletedFiles(t, 0); len(got) != 0 {
		t.Fatalf("descriptor not closed: %q", got)
	}
	if c, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", testkit.FreeAddr(t)); err == nil {
		_ = c.Close()
		t.Fatal("somebody listens on a free address")
	}
}

func TestRequireTool(t *testing.T) {
	if testkit.RequireTool(t, "sh") == "" {
		t.Fatal("no path")
	}
	f := &fatalT{fakeT: fakeT{TB: t}}
	func() {
		defer func() { _ = recover() }()
		testkit.RequireTool(f, "h2load-of-no-machine")
	}()
	if len(f.log) != 1 || !strings.Contains(f.log[0], "apt-get install") {
		t.Fatalf("%q", f.log)
	}
}

type fatalT struct{ fakeT }

func (f *fatalT) Fatalf(s string, a ...any) { f.Errorf(s, a...); panic("fatal") }
