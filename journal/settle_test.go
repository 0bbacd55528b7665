package journal

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/journal/internal/hooks"
	"waybill/outcome"
)

// TestSettled: a group is settled when tables hold its version, whoever is first told of it.
func TestSettled(t *testing.T) {
	contract.Covers(t, "M5")
	var s settled
	want := func(group uint64) {
		t.Helper()
		if s.Load() != group {
			t.Errorf("settled is %d, want %d", s.Load(), group)
		}
	}
	s.flushed(7) // what an earlier start left
	s.stored(8, 3)
	s.stored(9, 5)
	s.stored(10, 6)
	want(0)
	s.flushed(9)
	want(5)
	s.flushed(8)
	want(5)
	s.flushed(11) // with a step that was not told yet
	want(6)
	s.stored(11, 9)
	want(9)
	s.reach(4)
	want(9)
	if len(s.steps) != 0 {
		t.Errorf("%d steps are kept", len(s.steps))
	}
}

// scanned reads the witness of a folder that nobody has open.
func scanned(t testing.TB, dir string) (w *witnessState, seal *sealer) {
	t.Helper()
	id, found, err := witnessStore(filepath.Join(dir, nameWitness))
	if err != nil || !found {
		return &witnessState{}, nil // killed before the first header
	}
	key, err := readKey(filepath.Join(dir, nameKey))
	if err != nil {
		t.Fatal(err)
	}
	if seal, err = newSealer(key, id); err != nil {
		t.Fatal(err)
	}
	raw, err := loadSegments(filepath.Join(dir, nameWitness))
	if err != nil {
		t.Fatal(err)
	}
	if w, err = scanWitness(raw, seal); err != nil {
		t.Fatal(err)
	}
	return w, seal
}

// storedHead is the position of the store in dir, by itself.
func storedHead(t testing.TB, dir string, seal *sealer) (h head) {
	t.Helper()
	tamper(t, dir, func(txn *badger.Txn) (err error) {
		h, _, err = (&Journal{seal: seal}).readHead(&snapshot{Txn: txn}, keyHead)
		return err
	})
	return h
}

// TestKillWhileSettling: SIGKILL at each step between a group in the witness and the witness
// that says that the store has it. What is said to be settled is in tables; the next start has
// everything that was acknowledged, and is not quarantined.
func TestKillWhileSettling(t *testing.T) {
	contract.Covers(t, "F1", "M2", "M4", "M5", "T2")
	rng := seeded(t)
	dir := tempDir(t)
	l := newLedger()
	points := []string{
		PointStored + ":1", PointRedone + ":1", PointRedone + ":1", PointSettled + ":1", PointFlushed + ":1",
		fmt.Sprintf("%s:%d", PointStored, 2+rng.IntN(8)), fmt.Sprintf("%s:%d", PointFlushed, 3+rng.IntN(2)), PointRedone + ":1",
		fmt.Sprintf("%s:%d", PointFlushed, 3+rng.IntN(2)), PointSettled + ":1", fmt.Sprintf("%s:%d", PointStored, 2+rng.IntN(20)),
	}
	if long() {
		for range 20 {
			points = append(points, fmt.Sprintf("%s:%d", []string{PointStored, PointFlushed}[rng.IntN(2)], 2+rng.IntN(6)))
		}
	}
	settledLate, lastSegment := 0, uint64(0)
	for i, point := range points {
		runChild(t, l, dir, point, 0)
		crash := filepath.Join(t.TempDir(), "crash")
		copyDir(t, dir, crash)
		w, seal := scanned(t, crash)
		seen, settled := w.last()
		if h := storedHead(t, crash, seal); h.group < settled || h.group > seen.group {
			t.Errorf("kill %d at %s: the store has group %d, settled is %d, the witness has %d", i, point, h.group, settled, seen.group)
		}
		if w.segments[0].number > lastSegment+1 {
			settledLate++ // it retired a segment that it began itself
		}
		lastSegment = w.segments[len(w.segments)-1].number
		if i%2 == 1 && i < len(points)-1 { // the next child finds it as the kill left it
			continue
		}
		j, rec, err := Open(testOptions(crash, nil))
		if err != nil {
			t.Fatalf("kill %d at %s: open: %v", i, point, err)
		}
		if rec.Quarantined || len(rec.Lost) > 0 {
			t.Fatalf("kill %d at %s: %+v", i, point, rec)
		}
		if err := l.check(j); err != nil {
			t.Fatalf("kill %d at %s: %v", i, point, err)
		}
		mustVerify(t, j)
		closeTest(t, j)
		// Reading does not change what the next start finds.
		opt := testOptions(dir, nil)
		opt.ReadOnly = true
		if j, _, err = Open(opt); err != nil {
			t.Fatal(err)
		}
		if err := l.check(j); err != nil {
			t.Fatalf("kill %d at %s: read: %v", i, point, err)
		}
		closeTest(t, j)
	}
	if l.lines < 100 || settledLate == 0 {
		t.Errorf("%d steps, %d times something was settled while it ran: this shows nothing", l.lines, settledLate)
	}
}

// TestStoreWithLogs: a folder as versions left it whose store had logs – settled was what was
// in a log that was synced – opens, and has none afterwards.
func TestStoreWithLogs(t *testing.T) {
	contract.Covers(t, "F1", "M4", "M5")
	dir, crash := tempDir(t), filepath.Join(t.TempDir(), "crash")
	j := openTest(t, dir, nil)
	ids := make([]dispatch.ActionID, 30)
	for i := range ids {
		ids[i] = newID()
		mustAppend(t, j, toDispatch(ids[i], "ci", fmt.Sprint("r", i), "f"))
		if i%2 == 1 {
			mustAppend(t, j, toResult(ids[i], []byte("x")))
		}
		if i == len(ids)/2 {
			settleTest(t, j)
		}
	}
	copyDir(t, dir, crash)
	closeTest(t, j)
	w, _ := scanned(t, crash)
	_, settled := w.last()
	if settled == 0 {
		t.Fatal("nothing is settled: this shows nothing")
	}
	for name, upTo := range map[string]uint64{"killed": ^uint64(0), "without power": settled} {
		t.Run(name, func(t *testing.T) {
			// The same groups in a store with a log, and in no table.
			made, old := filepath.Join(t.TempDir(), "made"), filepath.Join(t.TempDir(), "old")
			copyDir(t, crash, made)
			if err := os.RemoveAll(filepath.Join(made, nameStore)); err != nil {
				t.Fatal(err)
			}
			opt := storeOptions(filepath.Join(made, nameStore), &storeLogger{log: testOptionsLogger()}, nil)
			opt.NoLog = false
			db, err := badger.Open(opt)
			if err != nil {
				t.Fatal(err)
			}
			for i := range w.segments {
				f, err := os.Open(filepath.Join(made, nameWitness, segmentName(w.segments[i].number)))
				if err != nil {
					t.Fatal(err)
				}
				for k := range w.segments[i].groups {
					g := &w.segments[i].groups[k]
					if g.number > upTo {
						break
					}
					entries, err := g.entries(f)
					if err == nil {
						err = (&Journal{db: db}).put(entries)
					}
					if err != nil {
						t.Fatal(err)
					}
				}
				_ = f.Close()
			}
			copyDir(t, made, old)
			if err := db.Close(); err != nil {
				t.Fatal(err)
			}
			if len(glob(t, filepath.Join(old, nameStore, "*.mem"))) == 0 || len(glob(t, filepath.Join(old, nameStore, "*.sst"))) != 0 {
				t.Fatal("it is not as it was")
			}
			j, rec := openWith(t, testOptions(old, nil))
			if rec.Quarantined || rec.Redone == 0 || len(rec.Lost) != 0 || rec.Unknown != len(ids)/2 {
				t.Errorf("%+v", rec)
			}
			for range 2 { // and as a kill leaves it then
				for i, id := range ids {
					want := outcome.Unknown
					if i%2 == 1 {
						want = outcome.Committed
					}
					if r := mustAction(t, j, id); r.Facts.Outcome != want {
						t.Errorf("%d: %+v", i, r.Facts)
					}
				}
				mustVerify(t, j)
				if logs := glob(t, filepath.Join(old, nameStore, "*.mem")); len(logs) > 0 {
					t.Errorf("logs are left: %v", logs)
				}
				again := filepath.Join(t.TempDir(), "again")
				copyDir(t, old, again)
				closeTest(t, j)
				old = again
				j, rec = openWith(t, testOptions(old, nil))
				if rec.Quarantined || len(rec.Lost) != 0 {
					t.Errorf("again: %+v", rec)
				}
			}
			closeTest(t, j)
		})
	}
}

// TestUnsettledIsBounded: what a start would have to make again stays within some segments,
// also when the store's memory is not full, and a start settles all of it.
func TestUnsettledIsBounded(t *testing.T) {
	contract.Covers(t, "M4", "M5")
	dir, crash := tempDir(t), filepath.Join(t.TempDir(), "crash")
	h := &hooks.Hooks{NoSync: true}
	h.SegmentSlots = 64
	j, _ := openWith(t, testOptions(dir, h))
	first := j.c.settled.Load()
	for end := time.Now().Add(20 * time.Second); j.c.settled.Load() == first; {
		if time.Now().After(end) {
			t.Fatal("nothing is settled")
		}
		mustAppend(t, j, toDispatch(newID(), "ci", "", "f"))
	}
	copyDir(t, dir, crash)
	closeTest(t, j)
	again, rec := openWith(t, testOptions(crash, nil))
	if rec.Redone == 0 || again.c.settled.Load() < first+uint64(rec.Redone) {
		t.Errorf("%d groups were made again, settled is %d after %d", rec.Redone, again.c.settled.Load(), first)
	}
	mustVerify(t, again)
	closeTest(t, again)
}
