package journal

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// oneFile is a file that fails alone.
type oneFile struct {
	name  string // a pattern
	ops   string // separated by commas
	fresh bool   // it fails while the folder is made
}

// foundWith are rules that found losses in Badger as it comes: a table that a compaction
// could not make, a MANIFEST that was written and not synced (internal/third_party/badger). In the
// short form too.
var foundWith = []testkit.FailRule{
	{Name: "*.sst", Ops: []string{"create"}, After: 1, For: 1}, {Name: "MANIFEST", Ops: []string{"sync"}, For: 1}, {Name: "MANIFEST", Ops: []string{"write"}, After: 1, For: 1},
}

// failingFiles are all files of the folder, each at every call that is made on it.
var failingFiles = []oneFile{
	{"*.wit*", "write", false}, {"*.wit*", "sync", false}, {"*.wit*", "allocate", false}, {"*.wit*", "create", false}, {"*.wit*", "open", false}, {"*.wit*", "read", false},
	{"*.sst", "write,sync", false}, {"*.sst", "create", false}, {"*.sst", "read", false},
	{"*.vlog", "write,sync", false}, {"*.vlog", "create,open", false}, {"MANIFEST*", "write,sync", false}, {"MANIFEST*", "open,read", false}, {"MANIFEST*", "create,rename", true},
	{"KEYREGISTRY*", "write,sync,read", false}, {"KEYREGISTRY*", "create,rename", true}, {"DISCARD", "write,sync,open", false},
	{"key*", "write", true}, {"key*", "sync", true}, {"key*", "rename", true}, {"key", "open,read", false}, {"lock", "write", false}, {"ballast*", "write,allocate,sync,create", true},
}

// TestOneFileFails: one file fails, alone, with EIO or ENOSPC, from some call on or for a
// while. Nothing is acknowledged that is not there once it is healed, nothing that was
// handed over is not_attempted, and the journal is neither quarantined nor in need of
// repair. The control, a process that goes on as if nothing had failed, must lose.
func TestOneFileFails(t *testing.T) {
	contract.Covers(t, "F1", "F9", "M5", "T5")
	rng := seeded(t)
	cases, steps := failingFiles, 700
	if !long() {
		steps = 250 // what is met without a compaction is met by then
		// Those that a run meets for certain, and two of the others.
		cases = []oneFile{{"*.wit*", "write", false}, {"*.wit*", "sync", false}}
		for _, i := range rng.Perm(len(failingFiles))[:2] {
			cases = append(cases, failingFiles[i])
		}
	}
	hits := 0
	// fails runs a child whose files fail by one rule, and reports what came of it.
	fails := func(r testkit.FailRule, fresh bool, steps int) {
		t.Helper()
		fs := testkit.NewFailFS(t)
		dir, under := filepath.Join(fs.Dir, "j"), filepath.Join(fs.Under, "j")
		l := newLedger()
		if !fresh {
			childRun{steps: 40}.run(t, l, dir)
		}
		fs.Fail(&r)
		before := l.lines
		state := childRun{steps: steps}.run(t, l, dir)
		failed := fs.Heal()
		fs.Unmount()
		what := fmt.Sprintf("%s fails at %s with %v after %d calls, for %d (0: all)", r.Name, r.Ops, r.Err, r.After, r.For)
		t.Logf("%s: %d failed, %d steps, %v", what, failed, l.lines-before, state)
		if failed > 0 {
			hits++
		}
		if _, err := os.Stat(under); err != nil && l.lines == 0 {
			return // not even the folder was made
		}
		if err := l.after(under); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
	for _, r := range foundWith {
		r.Err = []syscall.Errno{syscall.EIO, syscall.ENOSPC}[rng.IntN(2)]
		fails(r, false, 700)
	}
	for _, c := range cases {
		errnos := []syscall.Errno{syscall.EIO, syscall.ENOSPC}
		if !long() {
			errnos = errnos[rng.IntN(2):][:1]
		}
		for _, errno := range errnos {
			r := testkit.FailRule{Name: c.name, Ops: strings.Split(c.ops, ","), Err: errno, After: rng.IntN(4), For: rng.IntN(3)}
			switch {
			case !long():
				r.After, r.For = rng.IntN(2), 1+rng.IntN(2)
			case rng.IntN(2) == 0 && !c.fresh:
				r.After = rng.IntN(60) // not at the start
			}
			fails(r, c.fresh, steps)
		}
	}
	if hits < 3 {
		t.Errorf("%d of %d faults were met: this run shows little", hits, len(cases))
	}
	fs := testkit.NewFailFS(t)
	l := newLedger()
	fs.Fail(&testkit.FailRule{Name: "*.wit*", Ops: []string{"write", "sync"}, Err: syscall.EIO, After: 40})
	childRun{mode: modeDeaf, steps: 400}.run(t, l, filepath.Join(fs.Dir, "j"))
	fs.Heal()
	fs.Unmount()
	err := l.after(filepath.Join(fs.Under, "j"))
	t.Logf("control: %v", err)
	if err == nil {
		t.Error("with its errors ignored nothing is lost: this harness could not find a loss")
	}
}
