package journal

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/journal/internal/hooks"
	"waybill/outcome"
)

// image makes a journal with n acknowledged actions, every second of them with a
// result, and returns a copy of its folder taken while it is open: what a crash
// leaves.
func image(t testing.TB, n int) (dir string, l *ledger) {
	t.Helper()
	live := tempDir(t)
	j := openTest(t, live, nil)
	l = newLedger()
	for i := range n {
		id := newID()
		mustAppend(t, j, toDispatch(id, "ci", fmt.Sprint("r", i), "f"))
		l.dispatched[id] = true
		if i%2 == 1 {
			mustAppend(t, j, toResult(id, []byte("result")))
			l.committed[id] = true
		}
		if i == n/2 {
			settleTest(t, j)
		}
	}
	dir = filepath.Join(t.TempDir(), "image")
	copyDir(t, live, dir)
	closeTest(t, j)
	return dir, l
}

// reopen opens a copy of the image after damage, and says what came of it. Whatever
// the damage, the history must not be shorter without being said so.
func reopen(dir string, l *ledger) (result string, err error) {
	j, rec, err := Open(testOptions(dir, nil))
	if err != nil {
		if errors.Is(err, ErrCorrupt) || errors.Is(err, ErrKey) {
			return "refused", nil
		}
		return "", fmt.Errorf("open: %w", err)
	}
	defer func() { _ = j.Close() }()
	for id := range l.dispatched {
		r, err := j.Action(bg, id)
		if errors.Is(err, dispatch.ErrQuarantined) && rec.Quarantined || errors.Is(err, ErrCorrupt) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("%s: %w", id, err)
		}
		if r.Facts.Outcome == outcome.NotAttempted {
			return "", fmt.Errorf("%s is not_attempted", id)
		}
	}
	if rec.Quarantined {
		if err := j.Admit(); !errors.Is(err, dispatch.ErrQuarantined) || !errors.Is(err, dispatch.ErrNotWritten) {
			return "", fmt.Errorf("quarantined, but admits: %w", err)
		}
		return "quarantined", nil
	}
	missing := 0
	for id := range l.committed {
		if r, err := j.Action(bg, id); err != nil || r.Facts != committed {
			missing++
		}
	}
	if missing > 1 || missing > len(rec.Lost)+rec.Unknown {
		return "", fmt.Errorf("%d results are missing, %d were said to be lost, %d to be unknown", missing, len(rec.Lost), rec.Unknown)
	}
	return "opened", nil
}

func newestFile(t testing.TB, pattern string) string {
	t.Helper()
	best, size := "", int64(-1)
	for _, f := range glob(t, pattern) {
		if n := usedBytes(t, f); n >= size {
			best, size = f, n
		}
	}
	if best == "" {
		t.Fatalf("no %s", pattern)
	}
	return best
}

func TestBitFlips(t *testing.T) {
	contract.Covers(t, "M5")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 2))
	dir, l := image(t, 30)
	copied := filepath.Join(t.TempDir(), "damaged")
	tab := newestFile(t, filepath.Join(dir, nameStore, "*.sst"))
	wit := newestFile(t, filepath.Join(dir, nameWitness, "*.wit"))
	used := map[string]int64{tab: usedBytes(t, tab), wit: usedBytes(t, wit)}
	results := map[string]int{}
	try := func(name, file string, offset int64, damage func(path string)) {
		copyDir(t, dir, copied)
		rel, err := filepath.Rel(dir, file)
		if err != nil {
			t.Fatal(err)
		}
		damage(filepath.Join(copied, rel))
		res, err := reopen(copied, l)
		if err != nil {
			t.Errorf("%s at %d of %d in %s: %v", name, offset, used[file], rel, err)
		}
		results[name+" "+filepath.Ext(file)+" "+res]++
	}
	for range 14 {
		at := rng.Int64N(used[tab])
		try("flip", tab, at, func(p string) { flip(t, p, at) })
	}
	for _, at := range []int64{0, 3, 9, 60, 200, used[tab] / 2, used[tab] - 3} {
		try("flip", tab, at, func(p string) { flip(t, p, at) })
	}
	for range 6 {
		at := rng.Int64N(used[wit])
		try("flip", wit, at, func(p string) { flip(t, p, at) })
	}
	for _, at := range []int64{0, 9, 20, segmentHeader - 1, segmentHeader + 5, used[wit] - 1} {
		try("flip", wit, at, func(p string) { flip(t, p, at) })
	}
	for _, f := range []string{tab, wit} {
		block := (used[f] / 2) &^ 4095
		try("zero", f, block, func(p string) { zero(t, p, block, 4096) })
		try("cut", f, used[f]/2, func(p string) {
			if err := os.Truncate(p, used[f]/2); err != nil {
				t.Fatal(err)
			}
		})
		try("remove", f, 0, func(p string) {
			if err := os.Remove(p); err != nil {
				t.Fatal(err)
			}
		})
	}
	key := filepath.Join(dir, nameKey)
	for at := range int64(keyFileBytes) {
		if at%9 == 0 {
			try("flip", key, at, func(p string) { flip(t, p, at) })
		}
	}
	t.Logf("%v", results)
	if results["flip .sst refused"]+results["flip .sst quarantined"] == 0 || results["flip .wit refused"] == 0 || results["flip  opened"] != 0 {
		t.Errorf("damage was not noticed: %v", results)
	}
}

func zero(t testing.TB, path string, offset, n int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	if _, err := f.WriteAt(make([]byte, n), offset); err != nil {
		t.Fatal(err)
	}
}

// Damage in flushed tables: after an orderly end.
func TestTableFlips(t *testing.T) {
	contract.Covers(t, "M5")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	l := newLedger()
	for i := range 50 {
		id := newID()
		mustAppend(t, j, toDispatch(id, "ci", "", "f"))
		l.dispatched[id] = true
		if i%2 == 0 {
			mustAppend(t, j, toResult(id, []byte("x")))
			l.committed[id] = true
		}
	}
	closeTest(t, j)
	copied := filepath.Join(t.TempDir(), "damaged")
	for _, f := range append(glob(t, filepath.Join(dir, nameStore, "*.sst")), filepath.Join(dir, nameStore, "MANIFEST")) {
		size := int64(len(readAll(t, f)))
		for i := range int64(6) {
			at := i * (size - 1) / 5
			copyDir(t, dir, copied)
			flip(t, filepath.Join(copied, nameStore, filepath.Base(f)), at)
			if res, err := reopen(copied, l); err != nil {
				t.Errorf("%s at %d of %d: %v", filepath.Base(f), at, size, err)
			} else {
				t.Logf("%s at %d: %s", filepath.Base(f), at, res)
			}
		}
	}
}

func TestRollback(t *testing.T) {
	contract.Covers(t, "M5", "M7", "F2")
	dir := tempDir(t)
	old := filepath.Join(t.TempDir(), "old")
	j := openTest(t, dir, nil)
	ended, open, accepted := newID(), newID(), newID()
	mustAppend(t, j, toDispatch(ended, "ci", "r1", "f"))
	mustAppend(t, j, toResult(ended, []byte("x")))
	mustAppend(t, j, toDispatch(open, "ci", "", "f"))
	mustAppend(t, j, dispatch.Batch{Action: accepted, Events: []dispatch.Event{evAccepted("ci", ""), evBound("f")}})
	settleTest(t, j)
	copyDir(t, filepath.Join(dir, nameStore), old)
	mustAppend(t, j, dispatch.Batch{Action: accepted, Events: []dispatch.Event{evDispatch(1)}})
	mustAppend(t, j, toResult(open, []byte("x")))
	late := newID()
	mustAppend(t, j, toDispatch(late, "ci", "r2", "f"))
	closeTest(t, j)
	copyDir(t, old, filepath.Join(dir, nameStore))

	for range 2 { // quarantine writes nothing: it is the same at every start
		j, rec := openWith(t, testOptions(dir, nil))
		if !rec.Quarantined || rec.Reason == "" || rec.Boot != "" || !j.Stats().Quarantined {
			t.Fatalf("recovery %+v", rec)
		}
		if r := mustAction(t, j, ended); r.Facts != committed {
			t.Errorf("an ended action: %+v", r.Facts)
		}
		if _, r, err := j.OpenResult(bg, ended); err != nil {
			t.Errorf("its result: %v", err)
		} else if _, err := io.ReadAll(r); err != nil {
			t.Errorf("its result: %v", err)
		}
		for name, id := range map[string]dispatch.ActionID{"open": open, "accepted": accepted, "absent": late, "never heard of": newID()} {
			if _, err := j.Action(bg, id); !errors.Is(err, dispatch.ErrQuarantined) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if _, err := j.ByRequestID(bg, "ci", "r2"); !errors.Is(err, dispatch.ErrQuarantined) {
			t.Errorf("by request id: %v", err)
		}
		if _, err := j.Guarding(bg, "ci", "f"); !errors.Is(err, dispatch.ErrQuarantined) {
			t.Errorf("guarding: %v", err)
		}
		_, err := j.Append(bg, toDispatch(newID(), "ci", "", "f"))
		wantErr(t, err, dispatch.ErrQuarantined, dispatch.ErrNotWritten)
		wantErr(t, j.Admit(), dispatch.ErrQuarantined, dispatch.ErrNotWritten)
		if rep, err := j.Verify(bg); !errors.Is(err, dispatch.ErrQuarantined) || !errors.Is(err, ErrCorrupt) || rep.Broken == nil || rep.Broken.Seq != rec.Seq+1 {
			t.Errorf("verify: %v, want event %d", err, rec.Seq+1)
		}
		var last error
		n := 0
		for _, err := range j.Actions(bg, dispatch.Filter{}) {
			last = err
			n++
		}
		if n != 4 || !errors.Is(last, dispatch.ErrQuarantined) {
			t.Errorf("the list has %d entries and ends with %v", n, last)
		}
		closeTest(t, j)
	}
	// A store that is gone altogether is behind as well.
	if err := os.RemoveAll(filepath.Join(dir, nameStore)); err != nil {
		t.Fatal(err)
	}
	j, rec := openWith(t, testOptions(dir, nil))
	if !rec.Quarantined {
		t.Errorf("an empty store beside a witness: %+v", rec)
	}
	_, err := j.Action(bg, ended)
	wantErr(t, err, dispatch.ErrQuarantined)
	closeTest(t, j)
}

func TestWitnessGone(t *testing.T) {
	contract.Covers(t, "M5")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	mustAppend(t, j, toDispatch(newID(), "ci", "", "f"))
	closeTest(t, j)
	if err := os.RemoveAll(filepath.Join(dir, nameWitness)); err != nil {
		t.Fatal(err)
	}
	_, _, err := Open(testOptions(dir, nil))
	wantErr(t, err, ErrCorrupt)
}

// tearLast damages the entries of the last group that the witness in dir has, as a write
// does that was cut short.
func tearLast(t testing.TB, dir string, seal *sealer) {
	t.Helper()
	segments := glob(t, filepath.Join(dir, nameWitness, "*.wit"))
	path := segments[len(segments)-1]
	n, _ := segmentNumber(filepath.Base(path))
	s, err := scanSegment(readAll(t, path), newMacer(seal.witness), n)
	if err != nil || len(s.groups) == 0 {
		t.Fatalf("no group to tear: %v", err)
	}
	flip(t, path, s.groups[len(s.groups)-1].payloadOffset()+20)
}

// A power cut takes from the store what it pleases of the groups since it was settled.
// The witness makes all of them again, whole and in order.
func TestRedo(t *testing.T) {
	contract.Covers(t, "F1", "M2", "M5", "T5")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 3))
	dir := tempDir(t)
	l := newLedger()
	j := openTest(t, dir, nil)
	redone := 0
	for round := range 5 {
		for i := range 2 + rng.IntN(5) {
			id := newID()
			mustAppend(t, j, toDispatch(id, "ci", fmt.Sprint(round, "-", i), "f"))
			l.dispatched[id] = true
			if rng.IntN(2) == 0 {
				mustAppend(t, j, toResult(id, make([]byte, rng.IntN(3000))))
				l.committed[id] = true
			}
		}
		crash, intact := filepath.Join(t.TempDir(), "crash"), filepath.Join(t.TempDir(), "intact")
		copyDir(t, dir, crash)
		raw, err := loadSegments(filepath.Join(crash, nameWitness))
		if err != nil {
			t.Fatal(err)
		}
		w, err := scanWitness(raw, j.seal)
		if err != nil {
			t.Fatal(err)
		}
		_, settled := w.last()
		var keys [][]byte
		var heads [][]byte
		last := &w.segments[len(w.segments)-1]
		for i := range last.groups {
			g := &last.groups[i]
			if g.number <= settled {
				t.Fatalf("group %d of this start is settled at %d", g.number, settled)
			}
			off := g.payloadOffset()
			entries, err := decodeEntries(raw[len(raw)-1].b[off : off+int64(g.payload)])
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range entries {
				if string(e.key) == string(keyHead) {
					heads = append(heads, e.value)
				} else {
					keys = append(keys, e.key)
				}
			}
		}
		copyDir(t, crash, intact)
		tamper(t, crash, func(txn *badger.Txn) error {
			for _, k := range keys {
				if rng.IntN(2) == 0 {
					if err := txn.Delete(k); err != nil {
						return err
					}
				}
			}
			return txn.Set(keyHead, heads[rng.IntN(len(heads))])
		})
		again, rec := openWith(t, testOptions(crash, nil))
		if rec.Quarantined || len(rec.Lost) != 0 || rec.Redone != len(last.groups) {
			t.Fatalf("round %d: %+v, want %d groups", round, rec, len(last.groups))
		}
		redone += rec.Redone
		if err := l.check(again); err != nil {
			t.Errorf("round %d: %v", round, err)
		}
		mustVerify(t, again)
		closeTest(t, again)
		// A second look finds nothing to do but the last groups, which are not settled.
		again, rec = openWith(t, testOptions(crash, nil))
		if rec.Redone > 4 || rec.Unknown+rec.NotAttempted != 0 {
			t.Errorf("round %d, again: %+v", round, rec)
		}
		closeTest(t, again)
		// The control: the same damage where the log is not there to make up for it.
		tamper(t, intact, func(txn *badger.Txn) error { return txn.Set(keyHead, heads[0]) })
		if err := os.RemoveAll(filepath.Join(intact, nameWitness)); err != nil {
			t.Fatal(err)
		}
		if _, _, err := Open(testOptions(intact, nil)); !errors.Is(err, ErrCorrupt) {
			t.Errorf("round %d: a store without its witness: %v", round, err)
		}
		closeTest(t, j)
		j = openTest(t, dir, nil)
	}
	if redone == 0 {
		t.Error("nothing was made again")
	}
}

// A rollback beyond what the witness can name (M5): after an acknowledgement, what was
// open in the store is unknown, for its DISPATCH_STARTED may be among what is gone.
func TestRollbackBeyondTheNames(t *testing.T) {
	contract.Covers(t, "M5", "F2")
	dir := tempDir(t)
	h := func() *hooks.Hooks { return &hooks.Hooks{NoSync: true, SegmentSlots: 24, CheckpointEvery: 6} }
	j := openTest(t, dir, h())
	accepted := newID()
	mustAppend(t, j, dispatch.Batch{Action: accepted, Events: []dispatch.Event{evAccepted("ci", ""), evBound("f")}})
	old := filepath.Join(t.TempDir(), "old")
	settleTest(t, j)
	copyDir(t, filepath.Join(dir, nameStore), old)
	mustAppend(t, j, dispatch.Batch{Action: accepted, Events: []dispatch.Event{evCredential(), evDispatch(1)}})
	mustAppend(t, j, toResult(accepted, []byte("x")))
	for range 2 {
		for range 30 {
			id := newID()
			mustAppend(t, j, toDispatch(id, "ci", "", "f"))
			mustAppend(t, j, toResult(id, []byte("x")))
		}
		settleTest(t, j) // what is settled can be retired
	}
	closeTest(t, j)
	first := glob(t, filepath.Join(dir, nameWitness, "*.wit"))[0]
	if filepath.Base(first) == segmentName(1) {
		t.Fatal("no segment was retired: the test proves nothing")
	}
	copyDir(t, old, filepath.Join(dir, nameStore))
	opt := testOptions(dir, h())
	opt.Acknowledge = &Acknowledgement{Reason: "rolled back"}
	j, r := openWith(t, opt)
	if r.Acknowledged == nil {
		t.Fatalf("%+v", r)
	}
	if rec := mustAction(t, j, accepted); rec.Facts.Outcome != outcome.Unknown || !rec.Ended {
		t.Errorf("%+v", rec.Facts)
	}
	mustVerify(t, j)
}

// A store behind by exactly the last group, which was torn and which nobody was told
// of: its actions are unknown, the journal goes on.
func TestLostGroup(t *testing.T) {
	contract.Covers(t, "M5", "M2", "F2", "F9")
	rejected := facts(outcome.RemoteExecution, outcome.Rejected, outcome.Backoff, outcome.CodeRemoteRejected)
	for name, c := range map[string]struct {
		before []dispatch.Batch
		last   dispatch.Batch
		want   outcome.Outcome
		absent bool
	}{
		"new action": {last: toDispatch(dispatch.ActionID{}, "ci", "r", "f"), want: outcome.Unknown},
		"accepted before": {
			before: []dispatch.Batch{{Events: []dispatch.Event{evAccepted("ci", ""), evBound("f"), evCredential()}}},
			last:   dispatch.Batch{Events: []dispatch.Event{evDispatch(1)}}, want: outcome.Unknown,
		},
		"second attempt": {
			before: []dispatch.Batch{toDispatch(dispatch.ActionID{}, "ci", "", "f"), {Events: []dispatch.Event{evResponse(1, 429), evResolved(1, rejected)}}},
			last:   dispatch.Batch{Events: []dispatch.Event{evLease(2), evRepeat(2, 2)}}, want: outcome.Unknown,
		},
		"result": {
			before: []dispatch.Batch{toDispatch(dispatch.ActionID{}, "ci", "", "f")},
			last:   toResult(dispatch.ActionID{}, []byte("x")), want: outcome.Unknown,
		},
		"refusal, accepted before": {
			before: []dispatch.Batch{{Events: []dispatch.Event{evAccepted("ci", ""), evBound("f")}}},
			last:   dispatch.Batch{Events: []dispatch.Event{evRefused()}}, want: outcome.NotAttempted,
		},
		"refusal": {last: dispatch.Batch{Events: []dispatch.Event{evAccepted("ci", ""), evRefused()}}, want: outcome.Unknown},
		"nothing the witness names": {
			last: dispatch.Batch{Events: []dispatch.Event{evAccepted("ci", "")}}, absent: true,
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := tempDir(t)
			old := filepath.Join(t.TempDir(), "old")
			j := openTest(t, dir, nil)
			id := newID()
			for _, b := range c.before {
				b.Action = id
				mustAppend(t, j, b)
			}
			copyDir(t, filepath.Join(dir, nameStore), old)
			c.last.Action = id
			mustAppend(t, j, c.last)
			crash := filepath.Join(t.TempDir(), "crash")
			copyDir(t, dir, crash)
			copyDir(t, old, filepath.Join(crash, nameStore))
			want := mustAction(t, j, id)
			closeTest(t, j)
			// Whole, the group is on record, as if nothing had happened to the store.
			whole := filepath.Join(t.TempDir(), "whole")
			copyDir(t, crash, whole)
			tearLast(t, crash, j.seal)
			j, rec := openWith(t, testOptions(whole, nil))
			if got := mustAction(t, j, id); rec.Redone == 0 || len(rec.Lost) != 0 || got.FirstSeq != want.FirstSeq || want.Ended && got.Facts != want.Facts {
				t.Errorf("not torn: %+v, %+v, want %+v", rec, got.Facts, want.Facts)
			}
			mustVerify(t, j)
			closeTest(t, j)

			// Read only: the same answers without a write.
			opt := testOptions(crash, nil)
			opt.ReadOnly = true
			check := func(j *Journal) {
				t.Helper()
				rec, err := j.Action(bg, id)
				if c.absent {
					wantErr(t, err, dispatch.ErrActionNotFound)
					return
				}
				if err != nil || rec.Facts.Outcome != c.want || !rec.Ended {
					t.Errorf("%+v, %v; want %s", rec.Facts, err, c.want)
				}
			}
			j, _ = openWith(t, opt)
			check(j)
			closeTest(t, j)
			// A crash between the new segment and the events about the loss.
			opt = testOptions(crash, &hooks.Hooks{NoSync: true, StoreError: func(uint64) error { return errors.New("stop") }})
			if j, _, err := Open(opt); err == nil {
				_ = j.Close()
				t.Fatal("the start must have failed")
			}
			for i := range 3 {
				j, rec := openWith(t, testOptions(crash, nil))
				if rec.Quarantined {
					t.Fatalf("start %d: quarantined: %s", i, rec.Reason)
				}
				if i > 0 && (len(rec.Lost) != 0 || rec.Unknown != 0) {
					t.Errorf("start %d finds it again: %+v", i, rec)
				}
				check(j)
				mustVerify(t, j)
				mustAppend(t, j, toDispatch(newID(), "ci", "", "f"))
				if i == 0 {
					for _, err := range j.Actions(bg, dispatch.Filter{}) {
						if err != nil {
							t.Error(err)
						}
					}
				}
				// End every start's own action, so that the next finds nothing open.
				for rec := range j.Actions(bg, dispatch.Filter{OpenOnly: true}) {
					mustAppend(t, j, dispatch.Batch{Action: rec.ID, Events: []dispatch.Event{evResolved(1, unknown)}})
				}
				closeTest(t, j)
			}
		})
	}
}

// The other way round: the store has a group that the witness does not. Nothing is
// lost.
func TestWitnessBehindByOne(t *testing.T) {
	contract.Covers(t, "M5")
	dir := tempDir(t)
	old := filepath.Join(t.TempDir(), "old")
	j := openTest(t, dir, nil)
	mustAppend(t, j, toDispatch(newID(), "ci", "", "f"))
	copyDir(t, filepath.Join(dir, nameWitness), old)
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	settleTest(t, j)
	crash := filepath.Join(t.TempDir(), "crash")
	copyDir(t, dir, crash)
	copyDir(t, old, filepath.Join(crash, nameWitness))
	mustAppend(t, j, toResult(id, []byte("x")))
	settleTest(t, j)
	crash2 := filepath.Join(t.TempDir(), "crash2")
	copyDir(t, dir, crash2)
	copyDir(t, old, filepath.Join(crash2, nameWitness))
	closeTest(t, j)

	j, rec := openWith(t, testOptions(crash, nil))
	if rec.Quarantined || len(rec.Lost) != 0 || rec.Unknown != 2 {
		t.Errorf("%+v", rec)
	}
	if r := mustAction(t, j, id); r.Facts.Outcome != outcome.Unknown {
		t.Errorf("%+v", r.Facts)
	}
	mustVerify(t, j)
	closeTest(t, j)
	// Behind by more is a witness that lost what it had synced.
	_, _, err := Open(testOptions(crash2, nil))
	wantErr(t, err, ErrCorrupt)
}

// tamper changes the store behind the journal's back, as somebody who holds the
// folder could.
func tamper(t testing.TB, dir string, f func(txn *badger.Txn) error) {
	t.Helper()
	db, err := badger.Open(storeOptions(filepath.Join(dir, nameStore), &storeLogger{log: testOptionsLogger()}, nil))
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Update(f); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
}

// tampered journals: what Open, with nothing to walk, may not see, Verify must.
func TestVerifyNamesTheFirstBrokenRecord(t *testing.T) {
	contract.Covers(t, "M5", "M1")
	base := tempDir(t)
	j := openTest(t, base, nil)
	ids := make([]dispatch.ActionID, 6)
	firsts := make([]uint64, 6)
	oldProjection := map[string][]byte{}
	for i := range ids {
		ids[i] = newID()
		r := mustAppend(t, j, toDispatch(ids[i], "ci", fmt.Sprint("r", i), "f"))
		firsts[i] = r.Record.FirstSeq
		if i == 2 {
			if err := j.view(func(txn *snapshot) error {
				v, _, err := get(txn, keyAction(famRecord, ids[i]))
				oldProjection["v"] = v
				return err
			}); err != nil {
				t.Fatal(err)
			}
		}
		mustAppend(t, j, toResult(ids[i], []byte("result")))
	}
	mustAppend(t, j, dispatch.Batch{Action: ids[5], Events: []dispatch.Event{{Type: dispatch.DeliveryFailed, At: time.Now()}}})
	closeTest(t, j)

	value := func(txn *badger.Txn, key []byte) []byte {
		v, found, err := get(&snapshot{Txn: txn}, key)
		if err != nil || !found {
			t.Fatalf("no %x: %v", key, err)
		}
		return v
	}
	for name, c := range map[string]struct {
		change func(txn *badger.Txn) error
		seq    uint64
		action dispatch.ActionID
		chain  bool // only the chain tells
	}{
		"event altered": {change: func(txn *badger.Txn) error {
			v := value(txn, keyEvent(firsts[2]))
			v[len(v)-1] ^= 1
			return txn.Set(keyEvent(firsts[2]), v)
		}, seq: firsts[2]},
		"event removed": {change: func(txn *badger.Txn) error { return txn.Delete(keyEvent(firsts[3])) }, seq: firsts[3], chain: true},
		"events exchanged": {change: func(txn *badger.Txn) error {
			a, b := value(txn, keyEvent(firsts[1])), value(txn, keyEvent(firsts[4]))
			return errors.Join(txn.Set(keyEvent(firsts[1]), b), txn.Set(keyEvent(firsts[4]), a))
		}, seq: firsts[1]},
		"last event removed": {change: func(txn *badger.Txn) error { return txn.Delete(keyEvent(firsts[5] + 6)) }, seq: firsts[5] + 6, chain: true},
		"older projection":   {change: func(txn *badger.Txn) error { return txn.Set(keyAction(famRecord, ids[2]), oldProjection["v"]) }, action: ids[2]},
		"projection of another": {change: func(txn *badger.Txn) error {
			return txn.Set(keyAction(famRecord, ids[2]), value(txn, keyAction(famRecord, ids[3])))
		}, action: ids[2]},
		"projection removed": {change: func(txn *badger.Txn) error { return txn.Delete(keyAction(famRecord, ids[2])) }},
		"chunk altered": {change: func(txn *badger.Txn) error {
			return txn.Set(keyChunk(ids[4], 1, 0), value(txn, keyChunk(ids[3], 1, 0)))
		}, action: ids[4]},
		"chunk removed":             {change: func(txn *badger.Txn) error { return txn.Delete(keyChunk(ids[4], 1, 0)) }, action: ids[4]},
		"manifest removed":          {change: func(txn *badger.Txn) error { return txn.Delete(keyManifest(ids[4], 1)) }, action: ids[4]},
		"request id freed":          {change: func(txn *badger.Txn) error { return txn.Delete(keyRequest(j.seal.mac(macRequest, "ci", "r3"))) }, action: ids[3]},
		"request id of another":     {change: func(txn *badger.Txn) error { return txn.Set(keyRequest(j.seal.mac(macRequest, "ci", "r3")), ids[1][:]) }, action: ids[3]},
		"open entry from nowhere":   {change: func(txn *badger.Txn) error { return txn.Set(keyAction(famOpen, newID()), nil) }},
		"index by time lost":        {change: func(txn *badger.Txn) error { return txn.Delete(keyTime(firsts[0], ids[0])) }, action: ids[0]},
		"head of another place":     {change: func(txn *badger.Txn) error { return txn.Set(keyHead, value(txn, keyCheckpoint)) }},
		"identity removed":          {change: func(txn *badger.Txn) error { return txn.Delete(keyStore) }},
		"event beyond the last one": {change: func(txn *badger.Txn) error { return txn.Set(keyEvent(firsts[5]+7), value(txn, keyEvent(firsts[5]+6))) }, seq: firsts[5] + 7},
	} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "tampered")
			copyDir(t, base, dir)
			tamper(t, dir, c.change)
			verify := func(h *hooks.Hooks) (Report, error) {
				opt := testOptions(dir, h)
				return verifyOffline(bg, opt)
			}
			rep, err := verify(nil)
			if !errors.Is(err, ErrCorrupt) || rep.Broken == nil {
				t.Fatalf("not noticed: %v", err)
			}
			if c.seq != 0 && rep.Broken.Seq != c.seq || !c.action.IsZero() && rep.Broken.Action != c.action {
				t.Errorf("names %v, want event %d, action %s", err, c.seq, c.action)
			}
			if strings.Contains(err.Error(), "example.test") {
				t.Errorf("the error quotes a record: %v", err)
			}
			// The control: without the chain, the test must not notice.
			if _, err := verify(&hooks.Hooks{NoSync: true, NoChain: true, NoWitness: true}); c.chain && err != nil && !strings.Contains(err.Error(), "projection") && !strings.Contains(err.Error(), "event is missing") {
				t.Errorf("with the chain off: %v", err)
			}
		})
	}
}

// The control of the chain: a journal whose last event was removed, head and
// projection with it, is taken for whole only when nothing is compared or walked.
func TestChainControl(t *testing.T) {
	contract.Covers(t, "M5", "M3")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	mustAppend(t, j, toDispatch(newID(), "ci", "", "f"))
	id := newID()
	r := mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	// What is not settled would be made again.
	settleTest(t, j)
	mustAppend(t, j, toDispatch(newID(), "ci", "", "f"))
	crash := filepath.Join(t.TempDir(), "crash")
	copyDir(t, dir, crash) // not closed: no checkpoint behind the events
	closeTest(t, j)
	tamper(t, crash, func(txn *badger.Txn) error {
		return errors.Join(txn.Delete(keyEvent(r.Record.FirstSeq)), txn.Delete(keyAction(famRecord, id)), txn.Delete(keyAction(famOpen, id)))
	})
	_, _, err := Open(testOptions(crash, nil))
	var broken *CorruptError
	if !errors.As(err, &broken) || broken.Seq != r.Record.FirstSeq {
		t.Errorf("a hole: %v, want event %d", err, r.Record.FirstSeq)
	}
	j, _, err = Open(testOptions(crash, &hooks.Hooks{NoSync: true, NoChain: true}))
	if err != nil {
		t.Fatalf("with the walk off the hole must go unnoticed, or the test proves nothing: %v", err)
	}
	_ = j.Close()
}

func TestIndeterminateCommit(t *testing.T) {
	contract.Covers(t, "F9", "M5")
	for _, where := range []string{"store", "witness", "deadline", "witness deadline"} {
		t.Run(where, func(t *testing.T) {
			dir := tempDir(t)
			hold := heldHooks()
			h := &hold.Hooks
			failing := make(chan struct{})
			fail := func(uint64) error {
				select {
				case <-failing:
					return errors.New("EIO")
				default:
					return nil
				}
			}
			opt := testOptions(dir, h)
			release := make(chan struct{})
			switch where {
			case "store":
				h.StoreError = fail
			case "witness":
				h.WitnessError = fail
			case "witness deadline":
				opt.CommitDeadline = 300 * time.Millisecond
				h.WitnessError = func(uint64) error {
					select {
					case <-failing:
						<-release
					default:
					}
					return nil
				}
			case "deadline":
				opt.CommitDeadline = 300 * time.Millisecond
				h.StoreError = func(uint64) error {
					select {
					case <-failing:
						<-release
					default:
					}
					return nil
				}
			}
			m := &countMetrics{}
			opt.Metrics = m
			j, _ := openWith(t, opt)
			good := newID()
			mustAppend(t, j, toDispatch(good, "ci", "", "f"))
			hold.hold()
			a := newID()
			inGroup := appendAsync(j, toDispatch(a, "ci", "", "f"))
			hold.waitHeld(t)
			b := newID()
			waiting := appendAsync(j, toDispatch(b, "ci", "", "f"))
			waitQueued(t, j, 1)
			close(failing)
			hold.letGo()
			first, second := <-inGroup, <-waiting
			if strings.HasPrefix(where, "witness") {
				for name, r := range map[string]answer{"in the group": first, "waiting": second} {
					if !errors.Is(r.err, dispatch.ErrIndeterminate) || errors.Is(r.err, dispatch.ErrNotWritten) {
						t.Errorf("%s: %v", name, r.err)
					}
				}
			} else {
				// Durable before the store failed. So may be what came behind it: nobody waits for
				// the store.
				if first.err != nil {
					t.Errorf("in the group: %v", first.err)
				}
				if second.err != nil && !errors.Is(second.err, dispatch.ErrIndeterminate) && !errors.Is(second.err, dispatch.ErrNotWritten) {
					t.Errorf("waiting: %v", second.err)
				}
			}
			known := second.err == nil
			select {
			case <-j.Poisoned():
			case <-time.After(5 * time.Second):
				t.Fatal("not poisoned")
			}
			// Who comes later is refused before any write (F9).
			_, err := j.Append(bg, toDispatch(newID(), "ci", "", "f"))
			wantErr(t, err, dispatch.ErrNotWritten)
			if errors.Is(err, dispatch.ErrIndeterminate) {
				t.Error("a later append is definite")
			}
			wantErr(t, j.Admit(), dispatch.ErrNotWritten)
			if j.Cause() == nil || !j.Stats().Stopped || m.stopped.Load() != 1 {
				t.Error("the stop is not visible")
			}
			r, err := j.Action(bg, good)
			switch {
			case strings.HasPrefix(where, "witness") && (err != nil || r.Facts.Outcome != outcome.Unknown):
				t.Errorf("reads: %+v, %v", r.Facts, err)
			case !strings.HasPrefix(where, "witness") && (err == nil || errors.Is(err, dispatch.ErrActionNotFound)):
				// It lacks what somebody was told of, and says so of everything.
				t.Errorf("a store that failed is read: %+v, %v", r.Facts, err)
			}
			close(release)
			wantErr(t, j.Close(), dispatch.ErrIndeterminate)

			// The next start: whatever became durable is unknown, nothing contradicts. Close
			// does not wait for ever: on a slow machine the files may still be closing.
			for end := time.Now().Add(20 * time.Second); time.Now().Before(end); time.Sleep(10 * time.Millisecond) {
				probe, _, err := Open(testOptions(dir, nil))
				if err == nil {
					closeTest(t, probe)
				}
				if !errors.Is(err, ErrLocked) {
					break
				}
			}
			j, rec := openWith(t, testOptions(dir, nil))
			if rec.Quarantined {
				t.Fatalf("quarantined: %s", rec.Reason)
			}
			if r, err := j.Action(bg, a); err == nil && r.Facts.Outcome != outcome.Unknown || err != nil && (!strings.HasPrefix(where, "witness") || !errors.Is(err, dispatch.ErrActionNotFound)) {
				t.Errorf("the one in the group: %+v, %v", r.Facts, err)
			}
			if r, err := j.Action(bg, b); known && (err != nil || r.Facts.Outcome != outcome.Unknown) || !known && !errors.Is(err, dispatch.ErrActionNotFound) {
				t.Errorf("the waiting one: %+v, %v", r.Facts, err)
			}
			mustVerify(t, j)
		})
	}
}

func TestCallerLeaves(t *testing.T) {
	contract.Covers(t, "F9")
	hold := heldHooks()
	j := openTest(t, tempDir(t), &hold.Hooks)
	hold.hold()
	ctx, cancel := context.WithCancel(bg)
	taken, queued := newID(), newID()
	errs := make(chan error, 2)
	go func() {
		_, err := j.Append(ctx, toDispatch(taken, "ci", "", "f"))
		errs <- err
	}()
	hold.waitHeld(t)
	ctx2, cancel2 := context.WithCancel(bg)
	errs2 := make(chan error, 1)
	go func() {
		_, err := j.Append(ctx2, toDispatch(queued, "ci", "", "f"))
		errs2 <- err
	}()
	waitQueued(t, j, 1)
	cancel()
	cancel2()
	if err := <-errs; !errors.Is(err, dispatch.ErrIndeterminate) || !errors.Is(err, context.Canceled) {
		t.Errorf("taken up: %v", err)
	}
	if err := <-errs2; !errors.Is(err, dispatch.ErrNotWritten) || errors.Is(err, dispatch.ErrIndeterminate) {
		t.Errorf("queued: %v", err)
	}
	hold.letGo()
	mustAppend(t, j, toDispatch(newID(), "ci", "", "f"))
	if r := mustAction(t, j, taken); r.Facts.Outcome != outcome.Unknown { // it became durable after all
		t.Errorf("%+v", r.Facts)
	}
	_, err := j.Action(bg, queued)
	wantErr(t, err, dispatch.ErrActionNotFound)
	if j.Cause() != nil {
		t.Error("a caller that leaves does not stop the journal")
	}
	mustVerify(t, j)
}

func TestTwoProcesses(t *testing.T) {
	contract.Covers(t, "M5")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), childEnv+"="+dir)
	start := time.Now()
	out, err := cmd.CombinedOutput()
	if err == nil || time.Since(start) > 5*time.Second {
		t.Errorf("a second process: %v after %s", err, time.Since(start))
	}
	if !strings.Contains(string(out), fmt.Sprintf("process %d", os.Getpid())) {
		t.Errorf("it does not name the holder: %s", out)
	}
	_, _, err = Open(testOptions(dir, nil))
	wantErr(t, err, ErrLocked)
	_, err = Verify(bg, dir, nil)
	wantErr(t, err, ErrLocked)
	mustAction(t, j, id)
	mustVerify(t, j)
	closeTest(t, j)
	if _, err := Verify(bg, dir, nil); err != nil {
		t.Errorf("offline verify after the end: %v", err)
	}
}

// Callers are told when a group is durable, while the store is still to follow. Nobody
// reads the store before it has: an action that was dispatched never looks as if it had
// not been, and the next start has it from the witness.
func TestStoreFollows(t *testing.T) {
	contract.Covers(t, "F1", "M5", "M7", "F9")
	dir := tempDir(t)
	var slow atomic.Bool
	entered, release := make(chan struct{}, 1), make(chan struct{})
	h := &hooks.Hooks{NoSync: true, StoreError: func(uint64) error {
		if slow.Load() {
			entered <- struct{}{}
			<-release
		}
		return nil
	}}
	j, _ := openWith(t, testOptions(dir, h))
	id := newID()
	mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{evAccepted("ci", "r"), evBound("f"), evCredential()}})
	slow.Store(true)
	if _, err := j.Append(bg, dispatch.Batch{Action: id, Events: []dispatch.Event{evDispatch(1)}}); err != nil {
		t.Fatal(err)
	}
	<-entered
	// As a crash here would leave it.
	crash := filepath.Join(t.TempDir(), "crash")
	copyDir(t, dir, crash)

	counted := make(chan error, 1)
	go func() {
		n, err := j.Count()
		if err == nil && (n.Actions != 2 || n.Open != 2) {
			err = fmt.Errorf("it counts %+v", n)
		}
		counted <- err
	}()
	// Others go on meanwhile, and so does this one; what is asked for by its name is read
	// where it is.
	other := newID()
	if _, err := j.Append(bg, toDispatch(other, "ci", "q", "g")); err != nil {
		t.Fatal(err)
	}
	for _, id := range []dispatch.ActionID{id, other} {
		if r := mustAction(t, j, id); r.Facts.Outcome != outcome.Unknown || r.Attempts[0].DispatchSeq == 0 {
			t.Errorf("read: %+v", r)
		}
	}
	if got, err := j.ByRequestID(bg, "ci", "q"); err != nil || got != other {
		t.Errorf("by its request id: %v, %v", got, err)
	}
	early := ""
	select {
	case err := <-counted:
		early = fmt.Sprintf("counted before the store had it: %v", err)
	case <-time.After(100 * time.Millisecond):
	}
	slow.Store(false)
	close(release)
	if early != "" {
		t.Fatal(early)
	}
	// It may have begun before the other one was there.
	if err := <-counted; err != nil && !strings.Contains(err.Error(), "Actions:1 Open:1") {
		t.Error(err)
	}
	if n, err := j.Count(); err != nil || n.Actions != 2 || n.Open != 2 {
		t.Errorf("it counts %+v, %v", n, err)
	}
	mustVerify(t, j)
	closeTest(t, j)

	j, rec := openWith(t, testOptions(crash, nil))
	if rec.Redone == 0 || rec.Unknown != 1 {
		t.Errorf("after the crash: %+v", rec)
	}
	if r := mustAction(t, j, id); r.Facts.Outcome != outcome.Unknown || !r.Ended {
		t.Errorf("after the crash: %+v", r.Facts)
	}
	mustVerify(t, j)
}

// A power cut in a group without events – a checkpoint, a mark of retention – loses nothing
// of anybody's, and no start after it refuses what it left.
func TestTornWithoutEvents(t *testing.T) {
	contract.Covers(t, "M5", "T5")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	settleTest(t, j) // as closing it will have done
	crash := filepath.Join(t.TempDir(), "crash")
	copyDir(t, dir, crash)
	seal := j.seal
	closeTest(t, j) // its last group is a checkpoint
	if err := os.RemoveAll(filepath.Join(crash, nameWitness)); err != nil {
		t.Fatal(err)
	}
	copyDir(t, filepath.Join(dir, nameWitness), filepath.Join(crash, nameWitness))
	tearLast(t, crash, seal)
	for i := range 4 { // an end without an append in between settles nothing
		j, rec := openWith(t, testOptions(crash, nil))
		if rec.Quarantined || len(rec.Lost) != 0 || (i == 0) != (rec.Unknown == 1) {
			t.Errorf("start %d: %+v", i, rec)
		}
		if r := mustAction(t, j, id); r.Facts.Outcome != outcome.Unknown || !r.Ended {
			t.Errorf("start %d: %+v", i, r.Facts)
		}
		mustVerify(t, j)
		closeTest(t, j)
	}
}
