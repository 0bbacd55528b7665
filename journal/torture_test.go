package journal

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/journal/internal/hooks"
)

// long reports whether the long forms run (make torture).
func long() bool { return os.Getenv("WAYBILL_TEST_LONG") != "" }

// seeded returns the source of a test's choices and prints its seed; with
// WAYBILL_TEST_SEED it repeats a run.
func seeded(t testing.TB) *rand.Rand {
	t.Helper()
	seed := uint64(time.Now().UnixNano())
	if s := os.Getenv("WAYBILL_TEST_SEED"); s != "" {
		n, err := strconv.ParseUint(s, 10, 64)
		if err != nil {
			t.Fatalf("WAYBILL_TEST_SEED: %v", err)
		}
		seed = n
	}
	t.Logf("seed %d", seed)
	return rand.New(rand.NewPCG(seed, 2)) //nolint:gosec // choices of a test
}

// childRun is a child that may stand under strace.
type childRun struct {
	wrapper []string // program and arguments before the child
	mode    string
	steps   int           // after which the child ends by itself; 0: never
	at      int           // lines after which then is called; 0: never
	then    func(pid int) // may end the child
}

// run returns how the child ended; lines go to l.
func (c childRun) run(t testing.TB, l *ledger, dir string) *os.ProcessState {
	t.Helper()
	args := append(append([]string{}, c.wrapper...), os.Args[0])
	cmd := exec.Command(args[0], args[1:]...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Env = append(os.Environ(), childEnv+"="+dir, modeEnv+"="+c.mode, stepsEnv+"="+strconv.Itoa(c.steps))
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	group := -cmd.Process.Pid
	const silence = time.Minute // on a machine that has much else to do
	late := time.AfterFunc(silence, func() { _ = syscall.Kill(group, syscall.SIGKILL) })
	n := 0
	for sc := bufio.NewScanner(stdout); sc.Scan(); {
		if late.Stop() {
			late.Reset(silence)
		}
		if strings.HasPrefix(sc.Text(), "OPEN ") {
			continue // a refusal to start is an answer
		}
		l.add(t, sc.Text())
		if n++; c.at > 0 && n == c.at {
			c.then(cmd.Process.Pid)
			_ = syscall.Kill(group, syscall.SIGKILL)
		}
	}
	_ = cmd.Wait()
	_ = syscall.Kill(group, syscall.SIGKILL)
	if !late.Stop() {
		t.Fatalf("the child hung after %d lines: %s", n, stderr.String())
	}
	if s := stderr.String(); strings.Contains(s, "DATA RACE") || strings.Contains(s, "panic:") {
		t.Fatalf("the child: %s", s)
	}
	return cmd.ProcessState
}

// after opens what a child left, and holds it against the ledger. Quarantine counts
// as a loss here: none of these faults may cause one.
func (l *ledger) after(dir string) error {
	// Synced, since a cut may follow.
	j, r, err := Open(testOptions(dir, &hooks.Hooks{}))
	if err != nil {
		return fmt.Errorf("open: %w", err)
	}
	if r.Quarantined {
		err = errors.New(r.Reason)
	}
	if err == nil {
		err = l.check(j)
	}
	if err == nil {
		_, err = j.Verify(bg)
	}
	return errors.Join(err, j.Close())
}

// TestPowerCut: everything that was acknowledged before the power went is there
// afterwards. The control, without syncs, must lose something.
func TestPowerCut(t *testing.T) {
	contract.Covers(t, "F1", "M5", "T5")
	rng := seeded(t)
	rounds := 2
	if long() {
		rounds = 40
	}
	d := testkit.NewDisk(t, 320)
	cut := func(mode string, round int) error {
		dir := filepath.Join(d.Dir, fmt.Sprint(mode, round))
		l := newLedger()
		for range 2 { // the second start finds what the first left
			childRun{mode: mode, at: 20 + rng.IntN(300), then: d.CutUnder}.run(t, l, dir)
			d.Unmount()
			d.Mount()
			if mode != "" {
				break
			}
			if err := l.after(dir); err != nil {
				return fmt.Errorf("%d steps were acknowledged: %w", l.lines, err)
			}
		}
		err := l.after(dir)
		if rerr := os.RemoveAll(dir); rerr != nil {
			t.Error(rerr)
		}
		return err
	}
	for round := range rounds {
		if err := cut("", round); err != nil {
			t.Errorf("round %d: %v", round, err)
		}
	}
	for round := range 5 {
		if err := cut("quick", round); err != nil {
			t.Logf("control: %v", err)
			return
		}
	}
	t.Error("without syncs nothing is lost: this harness could not find a loss")
}

// killedAt are the system calls at which a kill finds a window.
var killedAt = []string{"ftruncate", "openat", "renameat", "unlinkat", "fdatasync", "msync", "pwrite64", "io_submit", "io_getevents"}

// makesDurable are the calls that make a group durable: of one request, and of several.
const makesDurable = "fdatasync,io_submit"

// TestKillAtSystemCalls: SIGKILL at the Nth call of each kind, start included; N up
// to where the run ends by itself in the long form, a choice of them in the short one.
func TestKillAtSystemCalls(t *testing.T) {
	contract.Covers(t, "T2", "F1", "M4", "T5")
	strace := testkit.RequireTool(t, "strace")
	rng := seeded(t)
	kills := 0
	for _, call := range killedAt {
		dir := tempDir(t)
		l := newLedger()
		deadline := time.Now().Add(60 * time.Second) // in the long form
		for n, tries := 1, 0; ; tries++ {
			if !long() {
				if tries == 2 {
					break
				}
				n = 1 + rng.IntN(8)
			}
			state := childRun{
				wrapper: []string{strace, "-f", "-qq", "-o", "/dev/null", "-e", "trace=" + call, "-e", fmt.Sprintf("inject=%s:signal=SIGKILL:when=%d", call, n)},
				steps:   60,
			}.run(t, l, dir)
			if err := l.after(dir); err != nil {
				t.Fatalf("killed at %s number %d: %v", call, n, err)
			}
			if state.ExitCode() != 0 {
				kills++
			} else if long() {
				t.Logf("%s: the run ends by itself at %d", call, n)
				break
			}
			if long() && time.Now().After(deadline) {
				t.Logf("%s: up to %d", call, n)
				break
			}
			n++
		}
	}
	t.Logf("%d kills", kills)
	if kills < 3 {
		t.Error("the kills hit nothing: this run shows nothing")
	}
	// The control: a journal that says so before it has written.
	for n := 20; n < 40; n++ {
		dir := tempDir(t)
		l := newLedger()
		childRun{
			wrapper: []string{strace, "-f", "-qq", "-o", "/dev/null", "-e", "trace=" + makesDurable, "-e", fmt.Sprintf("inject=%s:signal=SIGKILL:when=%d", makesDurable, n)},
			mode:    modeHasty, steps: 400,
		}.run(t, l, dir)
		if err := l.after(dir); err != nil {
			t.Logf("control: killed at sync number %d: %v", n, err)
			return
		}
	}
	t.Error("with hasty acknowledgements nothing is lost: this harness could not find a loss")
}

// TestSyncErrors: a sync that fails, at each call, with each error, from the Nth on:
// nothing is acknowledged after it, and the next start agrees with everything before.
func TestSyncErrors(t *testing.T) {
	contract.Covers(t, "F9", "M5", "T5")
	strace := testkit.RequireTool(t, "strace")
	rng := seeded(t)
	stopped := 0
	for _, call := range []string{"msync", "fsync", "fdatasync", "io_submit"} {
		for _, errno := range []string{"EIO", "ENOSPC"} {
			dir := tempDir(t)
			l := newLedger()
			whens := []int{1 + rng.IntN(40)}
			switch call {
			case "fsync": // only where files are made
				whens = []int{1 + rng.IntN(6)}
			case "fdatasync": // and of a group that one request waits for
				whens = []int{1 + rng.IntN(5)}
			}
			if long() {
				for range 12 {
					whens = append(whens, 1+rng.IntN(60))
				}
			}
			steps := 400
			if call == "msync" {
				steps = 100 // nothing of today's store waits for one: such a run goes to its end
			}
			for _, when := range whens {
				state := childRun{
					wrapper: []string{strace, "-f", "-qq", "-o", "/dev/null", "-e", "trace=" + call, "-e", fmt.Sprintf("inject=%s:error=%s:when=%d+", call, errno, when)},
					steps:   steps,
				}.run(t, l, dir)
				if err := l.after(dir); err != nil {
					t.Fatalf("%s fails with %s from number %d on: %v", call, errno, when, err)
				}
				if state.ExitCode() != 0 || l.lines < steps {
					stopped++
				}
			}
		}
	}
	if stopped < 4 {
		t.Errorf("only %d of the errors stopped anything: this run shows little", stopped)
	}
	// The control: a process that goes on as if the sync had not failed.
	dir := tempDir(t)
	l := newLedger()
	childRun{
		wrapper: []string{strace, "-f", "-qq", "-o", "/dev/null", "-e", "trace=" + makesDurable, "-e", "inject=" + makesDurable + ":error=EIO:when=20+"},
		mode:    modeDeaf, steps: 400,
	}.run(t, l, dir)
	if err := l.after(dir); err == nil {
		t.Error("with its errors ignored nothing is lost: this harness could not find a loss")
	} else {
		t.Logf("control: %v", err)
	}
}
