package journal

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/journal/internal/hooks"
	"waybill/outcome"
)

// actionsOf appends n ended actions with results of size bytes.
func actionsOf(t testing.TB, j *Journal, n, size int) (ids []dispatch.ActionID) {
	t.Helper()
	for i := range n {
		id := newID()
		ids = append(ids, id)
		b := toDispatch(id, "ci", id.String(), fmt.Sprint("f", i))
		mustAppend(t, j, b)
		mustAppend(t, j, toResult(id, bytes.Repeat([]byte{byte(i)}, size)))
	}
	return ids
}

func gone(t testing.TB, j *Journal, ids ...dispatch.ActionID) (n int) {
	t.Helper()
	for _, id := range ids {
		if _, err := j.Action(bg, id); err != nil {
			wantErr(t, err, dispatch.ErrActionNotFound)
			n++
		}
	}
	return n
}

// TestRetentionByAge: records go when they are old enough, with everything that was
// theirs; what is open or unknown stays, whole; the chain begins at the base and
// verifies, at run time and after a start.
func TestRetentionByAge(t *testing.T) {
	contract.Covers(t, "M1", "M4", "H6")
	dir := tempDir(t)
	opt := testOptions(dir, &hooks.Hooks{NoSync: true, SegmentSlots: 64})
	opt.Retention = 30 * 24 * time.Hour
	j, _ := openWith(t, opt)
	old := actionsOf(t, j, 200, 3000)
	open, lost := newID(), newID()
	mustAppend(t, j, dispatch.Batch{Action: open, Events: []dispatch.Event{evAccepted("ci", "open"), evBound("fo")}})
	mustAppend(t, j, toDispatch(lost, "ci", "lost", "fl"))
	mustAppend(t, j, dispatch.Batch{Action: lost, Events: []dispatch.Event{evResolved(1, unknown)}})
	refused := newID()
	mustAppend(t, j, dispatch.Batch{Action: refused, Events: []dispatch.Event{evAccepted("ci", ""), evRefused()}})
	// Refused with a time to wait, its request kept for repeats; the attempt before left a part.
	kept := keyedBatch(newID(), "kept")
	mustAppend(t, j, kept)
	mustAppend(t, j, dispatch.Batch{Action: kept.Action, Chunks: []dispatch.Chunk{{Attempt: 1, Data: []byte("a part")}}})
	mustAppend(t, j, dispatch.Batch{Action: kept.Action, Events: []dispatch.Event{evResolved(1, facts(outcome.RemoteExecution, outcome.Unknown, outcome.SameIdempotencyKey, outcome.CodeRemoteResultIncomplete))}})
	mustAppend(t, j, dispatch.Batch{Action: kept.Action, Events: []dispatch.Event{evLease(2), evRepeat(2, 2)}})
	full := toResult(kept.Action, []byte("busy"))
	for i := range full.Events {
		full.Events[i].Attempt = 2
	}
	full.Chunks[0].Attempt = 2
	mustAppend(t, j, full)
	waiting := keyedBatch(newID(), "waiting")
	mustAppend(t, j, waiting)
	mustAppend(t, j, dispatch.Batch{Action: waiting.Action, Events: []dispatch.Event{evResponse(1, 429), evResolved(1, facts(outcome.RemoteExecution, outcome.Rejected, outcome.Backoff, outcome.CodeRemoteRejected))}})
	old = append(old, kept.Action, waiting.Action)
	now := time.Now()
	retain := func(at time.Time) Retained {
		t.Helper()
		r, err := j.Retain(at)
		if err != nil {
			t.Fatal(err)
		}
		mustVerify(t, j)
		return r
	}
	if r := retain(now); r.Actions != 0 {
		t.Errorf("%+v", r)
	}
	young := actionsOf(t, j, 20, 100)
	if r := retain(now.Add(29 * 24 * time.Hour)); r.Actions != 0 || gone(t, j, old...) != 0 {
		t.Errorf("%+v", r)
	}
	r := retain(now.Add(31 * 24 * time.Hour))
	if r.Actions != len(old)+1 || gone(t, j, old...) != len(old) || gone(t, j, refused) != 1 || gone(t, j, young...) != 0 || gone(t, j, open, lost) != 0 {
		t.Errorf("%+v, %d of %d old and %d young are gone", r, gone(t, j, old...), len(old), gone(t, j, young...))
	}
	if ids, err := j.KeptActions(bg); err != nil || len(ids) != 0 {
		t.Errorf("requests of removed actions are kept: %v %v", ids, err)
	}
	_, err := j.ByRequestID(bg, "ci", old[0].String())
	wantErr(t, err, dispatch.ErrActionNotFound)
	if rec, err := j.Guarding(bg, "ci", "fl"); err != nil || rec.ID != lost {
		t.Errorf("an unknown action does not guard any more: %v", err)
	}
	left := 0
	if err := j.view(func(txn *snapshot) error {
		it := txn.NewIterator(badger.IteratorOptions{})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			for _, id := range old {
				if bytes.Contains(it.Item().Key(), id[:]) {
					left++
				}
			}
		}
		return nil
	}); err != nil || left != 0 {
		t.Errorf("%d keys of removed actions are left, %v", left, err)
	}
	// What stayed can go on.
	mustAppend(t, j, dispatch.Batch{Action: open, Events: []dispatch.Event{evDispatch(1)}})
	for range 2 {
		closeTest(t, j)
		opt.Hooks = &hooks.Hooks{NoSync: true, CheckCache: true}
		var rec *Recovery
		if j, rec = openWith(t, opt); rec.Quarantined || rec.Walked > 100 {
			t.Errorf("%+v", rec)
		}
		if rep := mustVerify(t, j); rep.Base != r.Base || rep.Actions != 22 {
			t.Errorf("%+v", rep)
		}
	}
	// Far later everything goes but what is unknown.
	retain(now.Add(40 * 24 * time.Hour))
	later := retain(now.Add(90 * 24 * time.Hour))
	if gone(t, j, young...) != len(young) || gone(t, j, open, lost) != 0 || later.Base <= r.Base {
		t.Errorf("%+v", later)
	}
	// A frame before the base that is taken away is still noticed.
	if err := j.maintain([]entry{{key: keyEvent(mustAction(t, j, lost).FirstSeq), remove: true}}); err != nil {
		t.Fatal(err)
	}
	if _, err := j.Verify(bg); err == nil {
		t.Error("a missing event of a kept action is not noticed")
	}
}

// TestRetentionClock: a jump of the wall clock by ten years, either way, between any
// two starts expires nothing that a day would not.
func TestRetentionClock(t *testing.T) {
	contract.Covers(t, "M3", "T5")
	dir := tempDir(t)
	opt := testOptions(dir, nil)
	opt.Retention = 30 * 24 * time.Hour
	wall := time.Now()
	opt.Now = func() time.Time { return wall }
	var all []dispatch.ActionID
	const years = 10 * 365 * 24 * time.Hour
	for i, jump := range []time.Duration{0, years, -2 * years, years, years, -years, 0} {
		wall = wall.Add(jump)
		opt.Hooks = &hooks.Hooks{NoSync: true, CheckCache: true}
		j, _ := openWith(t, opt)
		all = append(all, actionsOf(t, j, 5, 10)...)
		wall = wall.Add(-jump / 2) // while it runs
		if r, err := j.Retain(j.retention.now()); err != nil || r.Actions != 0 {
			t.Errorf("start %d: %+v %v", i, r, err)
		}
		if n := gone(t, j, all...); n != 0 {
			t.Errorf("start %d: %d actions are gone", i, n)
		}
		mustVerify(t, j)
		closeTest(t, j)
	}
}

// diskUsage is what the files of a folder occupy.
func diskUsage(t testing.TB, dir string) (n int64) {
	t.Helper()
	if err := filepath.WalkDir(dir, func(path string, _ fs.DirEntry, err error) error {
		if err != nil {
			return nil // compactions remove files
		}
		if st, err := os.Lstat(path); err == nil {
			n += st.Sys().(*syscall.Stat_t).Blocks * 512
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return n
}

// TestRetentionBySize: under endless load the disk stays bounded; results go before
// records; what is unknown never goes.
func TestRetentionBySize(t *testing.T) {
	contract.Covers(t, "M1", "H6", "H7")
	limit, load := int64(2<<20), int64(12<<20)
	if os.Getenv("WAYBILL_TEST_LONG") != "" {
		limit, load = 4<<20, 160<<20
	}
	bound := 4*limit + 48<<20
	dir := tempDir(t)
	opt := testOptions(dir, &hooks.Hooks{NoSync: true, SegmentSlots: 256})
	opt.MaxBytes = limit
	j, _ := openWith(t, opt)
	lost := newID()
	mustAppend(t, j, toDispatch(lost, "ci", "lost", "fl"))
	mustAppend(t, j, dispatch.Batch{Action: lost, Events: []dispatch.Event{evResolved(1, unknown)}})
	var written, peak int64
	var results, records int
	var ids []dispatch.ActionID
	for round := 0; written < load; round++ {
		ids = append(ids, actionsOf(t, j, 10, 60<<10)...)
		written += 10 * 60 << 10
		if !j.grown() {
			continue
		}
		r, err := j.Retain(time.Now())
		if err != nil {
			t.Fatal(err)
		}
		if results == 0 && r.Actions > 0 {
			t.Error("records went before results")
		}
		results += r.Results
		records += r.Actions
		if kept := j.Stats().KeptBytes; kept > limit*9/8 {
			t.Errorf("%d MiB are kept", kept>>20)
		}
		peak = max(peak, diskUsage(t, filepath.Join(dir, nameStore)))
	}
	mustVerify(t, j)
	if _, _, err := j.OpenResult(bg, ids[0]); err == nil {
		t.Error("the oldest result is still there")
	}
	if _, body, err := j.OpenResult(bg, ids[len(ids)-1]); err != nil || body == nil {
		t.Errorf("the newest result: %v", err)
	}
	// Many small records: now those have to go.
	for records == 0 && len(ids) < 40000 {
		for range 400 {
			id := newID()
			ids = append(ids, id)
			mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{evAccepted("ci", id.String()), evBound("f"), evRefused()}})
		}
		r, err := j.Retain(time.Now())
		if err != nil {
			t.Fatal(err)
		}
		records += r.Actions
	}
	peak = max(peak, diskUsage(t, filepath.Join(dir, nameStore)))
	t.Logf("%d MiB of results written, %d results dropped, %d of %d records removed, at most %d MiB on disk, limit %d MiB", written>>20, results, records, len(ids), peak>>20, int64(limit)>>20)
	if results == 0 || records == 0 || peak > bound || gone(t, j, lost) != 0 {
		t.Errorf("%d results, %d records, %d MiB on disk", results, records, peak>>20)
	}
	mustVerify(t, j)
	closeTest(t, j)
	opt.Hooks = &hooks.Hooks{NoSync: true, CheckCache: true}
	j, _ = openWith(t, opt)
	mustVerify(t, j)
}

// A record that holds an idempotency key stays for as long as the service may know the
// key, however little room there is: without it a repeat would be a new action.
func TestRetentionKeepsKeys(t *testing.T) {
	contract.Covers(t, "I5", "I9")
	opt := testOptions(tempDir(t), &hooks.Hooks{NoSync: true})
	opt.MaxBytes = 64 << 10
	j, _ := openWith(t, opt)
	keyed := func(key string, window time.Duration) dispatch.ActionID {
		b := keyedBatch(newID(), key)
		b.Events[1].Bound.Key.ExpiresAt = time.Now().Add(window)
		mustAppend(t, j, b)
		mustAppend(t, j, toResult(b.Action, []byte("done")))
		return b.Action
	}
	inside, over := keyed("inside", time.Hour), keyed("over", -time.Minute)
	removed := 0
	for n := 0; removed == 0 && n < 100; n++ {
		for range 100 {
			id := newID()
			mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{evAccepted("ci", id.String()), evBound("f"), evRefused()}})
		}
		r, err := j.Retain(time.Now())
		if err != nil {
			t.Fatal(err)
		}
		removed += r.Actions
	}
	if removed == 0 || gone(t, j, over) != 1 {
		t.Fatalf("%d removed; the action whose key is over is still there", removed)
	}
	if gone(t, j, inside) != 0 {
		t.Error("an action was removed while its key counts")
	}
	again := keyedBatch(newID(), "inside")
	if receipt, err := j.Append(bg, again); !errors.Is(err, dispatch.ErrKeyTaken) || receipt.Earlier != inside {
		t.Errorf("the key again: %v, %s", err, receipt.Earlier)
	}
	mustVerify(t, j)
}
