package journal

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/killpoint"
	"waybill/journal/internal/hooks"
	"waybill/outcome"
)

const (
	childEnv = "WAYBILL_JOURNAL_TEST_CHILD" // the journal's folder
	modeEnv  = "WAYBILL_JOURNAL_TEST_MODE"
	// stepsEnv is after how many acknowledged steps the child ends by itself; not set:
	// never.
	stepsEnv = "WAYBILL_JOURNAL_TEST_STEPS"

	modeHasty = "hasty" // says that a step is durable before it is
	modeDeaf  = "deaf"  // says so although Append failed
)

func TestMain(m *testing.M) {
	if dir := os.Getenv(childEnv); dir != "" {
		child(dir, os.Getenv(modeEnv))
		return
	}
	os.Exit(m.Run())
}

// child is the process that gets killed. It prints one line for each durable step
// that was acknowledged to it, and one before each hand-over of a DISPATCH_STARTED.
func child(dir, mode string) {
	h := &hooks.Hooks{SegmentSlots: 300, CheckpointEvery: 64}
	if mode == "quick" {
		h.NoSync = true
	}
	j, rec, err := Open(Options{Dir: dir, AllowAnyFilesystem: true, MinFreeBytes: 16 << 20, SweepInterval: -1, CommitDeadline: 10 * time.Second, Hooks: h})
	if err != nil {
		fmt.Println("OPEN", err)
		os.Exit(3)
	}
	var out sync.Mutex
	limit, _ := strconv.Atoi(os.Getenv(stepsEnv))
	said := 0
	say := func(what string, id dispatch.ActionID) {
		out.Lock()
		defer out.Unlock()
		_, _ = os.Stdout.WriteString(what + " " + id.String() + "\n")
		said++
	}
	ended := func() bool {
		out.Lock()
		defer out.Unlock()
		return limit > 0 && said >= limit
	}
	fmt.Println("OPENED", rec.Unknown, len(rec.Lost))
	// step appends and says so. The two modes are controls: what says so too early, or
	// whatever came of it, must be found out.
	step := func(what string, id dispatch.ActionID, b dispatch.Batch) bool {
		if mode == modeHasty {
			say(what, id)
		}
		if _, err := j.Append(bg, b); err != nil && mode != modeDeaf {
			return false
		}
		if mode != modeHasty {
			say(what, id)
		}
		return true
	}
	var wg sync.WaitGroup
	for w := range 8 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(w), uint64(os.Getpid())))
			for !ended() {
				id := newID()
				b := toDispatch(id, "ci", "", "f")
				if rng.IntN(3) == 0 {
					if !step("ACCEPTED", id, dispatch.Batch{Action: id, Events: b.Events[:2]}) {
						return
					}
					b.Events = b.Events[2:]
				}
				if !step("DISPATCHED", id, b) {
					return
				}
				size := 2 << 10
				if rng.IntN(6) == 0 {
					size = 3 * dispatch.MaxChunkBytes / 2
				}
				data := make([]byte, rng.IntN(size))
				n := 0
				for off := 0; off < len(data); off += dispatch.MaxChunkBytes {
					end := min(off+dispatch.MaxChunkBytes, len(data))
					if _, err := j.Append(bg, dispatch.Batch{Action: id, Chunks: []dispatch.Chunk{{Attempt: 1, Index: n, Last: end == len(data), Data: data[off:end]}}}); err != nil && mode != modeDeaf {
						return
					}
					n++
				}
				if !step("COMMITTED", id, dispatch.Batch{Action: id, Events: []dispatch.Event{evResponse(1, 200), evResult(1, 200, n, data, committed)}}) {
					return
				}
			}
		})
	}
	wg.Wait()
	if j.Cause() == nil {
		if err := j.Close(); err != nil {
			os.Exit(4)
		}
	}
}

// ledger is what the child was told, kept outside of its process.
type ledger struct {
	accepted, dispatched, committed map[dispatch.ActionID]bool
	lines                           int
}

func newLedger() *ledger {
	return &ledger{map[dispatch.ActionID]bool{}, map[dispatch.ActionID]bool{}, map[dispatch.ActionID]bool{}, 0}
}

func (l *ledger) add(t testing.TB, line string) {
	t.Helper()
	what, text, ok := strings.Cut(line, " ")
	if what == "OPENED" || what == "" {
		return
	}
	id, err := dispatch.ParseActionID(text)
	if !ok || err != nil {
		t.Fatalf("the child says %q", line)
	}
	l.lines++
	switch what {
	case "ACCEPTED":
		l.accepted[id] = true
	case "DISPATCHED":
		l.dispatched[id] = true
	case "COMMITTED":
		l.committed[id] = true
	default:
		t.Fatalf("the child says %q", line)
	}
}

// check holds the journal against the ledger.
func (l *ledger) check(j *Journal) error {
	for id := range l.accepted {
		if _, err := j.Action(bg, id); err != nil {
			return fmt.Errorf("accepted %s: %w", id, err)
		}
	}
	for id := range l.dispatched {
		rec, err := j.Action(bg, id)
		if errors.Is(err, dispatch.ErrQuarantined) {
			continue
		}
		if err != nil {
			return fmt.Errorf("dispatched %s: %w", id, err)
		}
		if rec.Facts.Outcome == outcome.NotAttempted || !rec.Dispatched() {
			return fmt.Errorf("dispatched %s is %s", id, rec.Facts.Outcome)
		}
	}
	for id := range l.committed {
		rec, err := j.Action(bg, id)
		if errors.Is(err, dispatch.ErrQuarantined) {
			continue
		}
		if err != nil || rec.Facts != committed {
			return fmt.Errorf("committed %s is %+v, %w", id, rec.Facts, err)
		}
		_, r, err := j.OpenResult(bg, id)
		if err != nil {
			return fmt.Errorf("committed %s: %w", id, err)
		}
		if _, err := io.Copy(io.Discard, r); err != nil {
			return fmt.Errorf("committed %s: %w", id, err)
		}
	}
	// Nothing is said to be committed that the child did not at least hand over.
	for rec, err := range j.Actions(bg, dispatch.Filter{Outcome: outcome.Committed}) {
		if err != nil {
			break
		}
		if !l.dispatched[rec.ID] {
			return fmt.Errorf("%s is committed and was never dispatched", rec.ID)
		}
	}
	return nil
}

// runChild runs the child until it dies: by itself at a kill point, or by SIGKILL
// after some lines.
func runChild(t testing.TB, l *ledger, dir, point string, after int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(bg, 60*time.Second)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+dir, killpoint.Variable+"="+point)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	n := 0
	killed := false
	for sc := bufio.NewScanner(stdout); sc.Scan(); {
		l.add(t, sc.Text())
		if n++; point == "" && n >= after && !killed {
			killed = true
			_ = cmd.Process.Kill()
		}
	}
	_ = cmd.Wait()
	if ctx.Err() != nil {
		t.Fatalf("the child was not killed at %q after %d lines: %s", point, n, stderr.String())
	}
	if s := stderr.String(); strings.Contains(s, "panic") || strings.Contains(s, "DATA RACE") {
		t.Fatalf("the child: %s", s)
	}
}

func TestKill(t *testing.T) {
	contract.Covers(t, "F1", "M2", "M4", "H4")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 1))
	dir := tempDir(t)
	l := newLedger()
	points := []string{"", "", "", ""}
	for _, p := range []string{PointBeforeStore, PointBetween, PointAfterDurable} {
		points = append(points, fmt.Sprintf("%s:%d", p, 1+rng.IntN(20)))
	}
	// The first start too: nothing but the key may be there.
	points = append(points, fmt.Sprintf("%s:1", []string{PointBeforeStore, PointBetween, PointAfterDurable}[rng.IntN(3)]))
	rng.Shuffle(len(points), func(a, b int) { points[a], points[b] = points[b], points[a] })
	for i, p := range points {
		if strings.HasSuffix(p, ":1") {
			points[0], points[i] = points[i], points[0]
			break
		}
	}
	lost := 0
	for i, point := range points {
		runChild(t, l, dir, point, 1+rng.IntN(100))
		j, rec, err := Open(testOptions(dir, nil))
		if err != nil {
			t.Fatalf("kill %d at %q: open: %v", i, point, err)
		}
		lost += len(rec.Lost)
		if rec.Quarantined {
			t.Fatalf("kill %d at %q: quarantined: %s", i, point, rec.Reason)
		}
		if err := l.check(j); err != nil {
			t.Fatalf("kill %d at %q: %v", i, point, err)
		}
		if _, err := j.Verify(bg); err != nil {
			t.Fatalf("kill %d at %q: verify: %v", i, point, err)
		}
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if l.lines < 30 {
		t.Errorf("only %d acknowledged steps in %d kills", l.lines, len(points))
	}
	t.Logf("%d acknowledged steps, %d lost attempts closed as unknown, %d kills", l.lines, lost, len(points))
}

// The kill test must be able to find a loss: acknowledged steps that are not in the
// store any more, with the witness not there to tell.
func TestKillControl(t *testing.T) {
	contract.Covers(t, "M5")
	dir := tempDir(t)
	l := newLedger()
	runChild(t, l, dir, "", 20)
	old := filepath.Join(filepath.Dir(dir), "old")
	copyDir(t, filepath.Join(dir, nameStore), old)
	runChild(t, l, dir, "", 60)
	copyDir(t, old, filepath.Join(dir, nameStore))

	intact := filepath.Join(filepath.Dir(dir), "copy")
	copyDir(t, dir, intact)
	j, rec := openWith(t, testOptions(dir, nil))
	if !rec.Quarantined {
		t.Errorf("a rolled-back store is not quarantined: %+v", rec)
	}
	if err := l.check(j); err != nil && !errors.Is(err, dispatch.ErrQuarantined) {
		t.Errorf("in quarantine: %v", err)
	}
	closeTest(t, j)
	// The protection off: the rolled-back store is taken for the whole history, and
	// the ledger must tell.
	opt := testOptions(intact, &hooks.Hooks{NoSync: true, NoWitness: true})
	j, rec = openWith(t, opt)
	if rec.Quarantined {
		t.Error("quarantined without a witness")
	}
	if err := l.check(j); err == nil {
		t.Error("with the witness off the harness finds nothing: it could not find a loss")
	}
}
