package journal

import (
	"encoding/binary"
	"errors"
	"sync"
	"testing"

	"pgregory.net/rapid"

	"waybill/dispatch"
	"waybill/internal/contract"
)

// Whatever order ids come in, one that was added is never said to be absent; a new one that
// is larger than all of them always is.
func TestBegun(t *testing.T) {
	t.Parallel()
	contract.Covers(t, "M7")
	rapid.Check(t, func(t *rapid.T) {
		var b begun
		var ids []dispatch.ActionID
		var clock, newest uint64
		id := func(at uint64) (id dispatch.ActionID) {
			binary.BigEndian.PutUint64(id[:], at)
			newest = max(newest, at)
			return id
		}
		if b.absent(id(1)) {
			t.Fatal("absent, though nobody knows what the store has")
		}
		for range rapid.IntRange(0, 3).Draw(t, "of the store") {
			stored := id(rapid.Uint64Range(1, 1000).Draw(t, "stored"))
			b.raise(stored)
			ids = append(ids, stored)
		}
		b.ready = true
		clock = 500
		for range rapid.IntRange(1, 40).Draw(t, "steps") {
			// Back, or on; then many at once, each up to some time late.
			clock = uint64(max(0, int64(clock)+rapid.Int64Range(-3000, 9000).Draw(t, "clock")))
			late := rapid.Uint64Range(0, 3000).Draw(t, "late")
			for i := range rapid.Uint64Range(1, begunRecent/2).Draw(t, "many") {
				clock++
				next := id(clock - min(clock, i*7919%(late+1)))
				b.add(next)
				ids = append(ids, next)
			}
			for _, known := range ids {
				if b.absent(known) {
					t.Fatalf("%x was added and is said to be absent", known)
				}
			}
			var larger dispatch.ActionID
			binary.BigEndian.PutUint64(larger[:], newest+1)
			if !b.absent(larger) {
				t.Fatalf("a new id is not known to be absent")
			}
		}
		if n := len(b.recent[0]) + len(b.recent[1]); n > 2*begunRecent {
			t.Fatalf("%d ids are kept", n)
		}
	})
}

// An action begins once: in the process that recorded it, after many others, and after a
// start.
func TestBeginsOnce(t *testing.T) {
	t.Parallel()
	contract.Covers(t, "M1", "M7")
	dir := tempDir(t)
	opt := testOptions(dir, nil)
	opt.Hooks.CheckCache = false // the store is asked by nobody else
	j, _ := openWith(t, opt)
	again := func(what string, id dispatch.ActionID) {
		t.Helper()
		before := mustAction(t, j, id)
		if _, err := j.Append(bg, toDispatch(id, "other", "", "f")); !errors.Is(err, dispatch.ErrIllegalTransition) {
			t.Errorf("%s: an action begins again: %v", what, err)
		}
		if got := mustAction(t, j, id); jsonOf(got) != jsonOf(before) {
			t.Errorf("%s: it was %s and is %s", what, jsonOf(before), jsonOf(got))
		}
	}
	whole := func() dispatch.ActionID {
		id := newID()
		mustAppend(t, j, toDispatch(id, "ci", "", "f"))
		mustAppend(t, j, toResult(id, []byte("x")))
		return id
	}
	first := whole()
	again("at once", first)
	var many sync.WaitGroup
	for range 16 {
		many.Go(func() {
			for range begunRecent/8 + 1 {
				// Ended at once: the next start has nothing to close.
				if _, err := j.Append(bg, dispatch.Batch{Action: newID(), Events: []dispatch.Event{evAccepted("ci", ""), evRefused()}}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	many.Wait()
	if j.c.begun.floor == (dispatch.ActionID{}) {
		t.Error("nothing was forgotten")
	}
	again("after many", first)
	latest := whole()
	again("the latest", latest)
	closeTest(t, j)

	opt = testOptions(dir, nil)
	opt.Hooks.CheckCache = false
	j, _ = openWith(t, opt)
	again("after a start", first)
	again("the latest, after a start", latest)
	if !j.c.begun.ready || j.c.begun.floor != latest {
		t.Errorf("ready %v, up to %x, want %x", j.c.begun.ready, j.c.begun.floor, latest)
	}
	mustVerify(t, j)
}
