package journal

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// logged runs a child on a disk that logs what it is told, until so many steps were
// acknowledged, and ends it.
func logged(t *testing.T, mode string, acks int) *testkit.LogDisk {
	t.Helper()
	d := testkit.NewLogDisk(t, 256)
	out := d.Acks()
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+filepath.Join(d.Dir, "j"), modeEnv+"="+mode)
	var stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = out, &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() { _ = cmd.Wait(); close(done) }()
	late := time.AfterFunc(2*time.Minute, func() { _ = cmd.Process.Kill() })
	d.WaitAcks(acks, done)
	d.Stop()
	_ = cmd.Process.Signal(syscall.SIGKILL)
	<-done
	if !late.Stop() {
		t.Fatalf("the child hung: %s", stderr.String())
	}
	if err := out.Close(); err != nil {
		t.Fatal(err)
	}
	d.Unmount()
	if s := stderr.String(); strings.Contains(s, "panic:") {
		t.Fatalf("the child: %s", s)
	}
	return d
}

// cutAt opens what a loss of power before event p may leave, and holds it against what
// had been acknowledged by then.
func cutAt(t *testing.T, d *testkit.LogDisk, p int, rng *rand.Rand, keep bool) error {
	t.Helper()
	return d.Cut(p, rng, func(dir string, acked []string) error {
		l := newLedger()
		for _, text := range acked {
			for line := range strings.Lines(text) {
				l.add(t, strings.TrimSuffix(line, "\n"))
			}
		}
		at := filepath.Join(dir, "j")
		if _, err := os.Stat(at); err != nil {
			if l.lines > 0 {
				return errors.New("the folder is gone")
			}
			return nil
		}
		// The start that meets the cut may find a folder in the making; then nothing was
		// promised, and the next start makes it whole.
		kept := filepath.Join(os.TempDir(), fmt.Sprintf("waybill-torn-%d-%d", os.Getpid(), p))
		if keep { // opening it changes it: what failed is to be looked at as it was
			if out, err := exec.Command("cp", "-a", "--sparse=always", at, kept).CombinedOutput(); err != nil {
				t.Fatalf("cp: %v: %s", err, out)
			}
		}
		err := l.after(at)
		if err != nil {
			err = fmt.Errorf("the first start: %w", err)
		} else if err = l.after(at); err != nil { // what the first start wrote is no worse
			err = fmt.Errorf("the second start: %w", err)
		}
		if keep && err == nil {
			return os.RemoveAll(kept)
		}
		if keep {
			err = fmt.Errorf("%w (the folder is kept as %s)", err, kept)
		}
		return err
	})
}

// TestTornWrites: a disk that lost power keeps what was flushed, and of what came later any
// part in any order, cut between sectors. Whatever it kept, the journal opens without
// quarantine, and everything that was acknowledged is there: no DISPATCH_STARTED becomes
// not_attempted. The control, without syncs, must lose something.
func TestTornWrites(t *testing.T) {
	contract.Covers(t, "F1", "M2", "M4", "M5", "T5")
	rng := seeded(t)
	runs, cuts := 1, 8
	if long() {
		runs, cuts = 4, 50
	}
	for run := range runs {
		d := logged(t, "", 60+rng.IntN(200))
		t.Logf("run %d: %s", run, d)
		if d.Events() < 50 {
			t.Fatal("hardly anything was written: this run shows nothing")
		}
		for n := range cuts {
			p := 1 + rng.IntN(d.Events())
			if long() && run == 0 { // one run from its end backwards, event by event
				if p = d.Events() - n; p == 0 {
					break
				}
			}
			if err := cutAt(t, d, p, rng, long()); err != nil {
				t.Errorf("run %d, power lost before event %d of %d: %v", run, p, d.Events(), err)
			}
		}
	}
	// The controls: a journal without syncs, and one that says so before it has written.
	for _, mode := range []string{"quick", modeHasty} {
		d := logged(t, mode, 150)
		found := error(nil)
		for range 30 {
			if found = cutAt(t, d, d.Events()/2+rng.IntN(d.Events()/2), rng, false); found != nil {
				break
			}
		}
		t.Logf("control, %s: %s: %v", mode, d, found)
		if found == nil {
			t.Errorf("%s: nothing is lost: this harness could not find a loss", mode)
		}
	}
}
