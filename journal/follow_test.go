package journal

import (
	"errors"
	"fmt"
	"math"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
)

// Frames are every acknowledged event, once, in order of sequence.
func TestFrames(t *testing.T) {
	contract.Covers(t, "M3", "N5")
	j := openTest(t, tempDir(t), nil)
	for i := range 40 {
		id := newID()
		mustAppend(t, j, toDispatch(id, "ci", "", fmt.Sprint(i)))
		mustAppend(t, j, toResult(id, []byte("x")))
	}
	base, head, err := j.Range()
	if err != nil || base != 0 || head != j.Stats().Seq {
		t.Fatalf("%d %d %v", base, head, err)
	}
	seq, frames := uint64(0), 0
	for {
		got, err := j.Frames(bg, seq, 7)
		if err != nil {
			t.Fatal(err)
		}
		if len(got) == 0 {
			break
		}
		for i := range got {
			f := &got[i]
			if f.First != seq+1 || f.Last != f.First+uint64(len(f.Events))-1 || f.Events[0].Seq != f.First {
				t.Fatalf("after %d: %d to %d with %d events", seq, f.First, f.Last, len(f.Events))
			}
			hash, found, err := j.HashAt(f.Last)
			if err != nil || !found || hash != f.Hash {
				t.Fatalf("hash at %d: %v %v", f.Last, found, err)
			}
			if len(f.Events) > 1 {
				if _, found, err := j.HashAt(f.First); err != nil || found {
					t.Fatalf("a frame ends at %d: %v", f.First, err)
				}
			}
			seq = f.Last
			frames++
		}
	}
	if seq != head || frames != 81 { // a BOOT
		t.Errorf("%d events of %d in %d frames", seq, head, frames)
	}
	if got, err := j.Frames(bg, math.MaxUint64, 1); err != nil || len(got) != 0 {
		t.Errorf("after the end: %v %v", got, err)
	}
}

// Retention waits for a follower; beyond the size it does not wait for ever.
func TestRetentionHold(t *testing.T) {
	contract.Covers(t, "N5")
	opt := testOptions(tempDir(t), nil)
	opt.Retention = time.Hour
	j, _ := openWith(t, opt)
	now := time.Now()
	step := func(n int, at time.Time) {
		for range n {
			id := newID()
			mustAppend(t, j, toDispatch(id, "ci", "", "f"))
			mustAppend(t, j, toResult(id, make([]byte, 1<<10)))
		}
		if _, err := j.Retain(at); err != nil {
			t.Fatal(err)
		}
	}
	passed := uint64(0)
	j.Hold(func() uint64 { return passed })
	for i := range 6 {
		step(5, now.Add(time.Duration(i)*time.Hour))
	}
	base, head, err := j.Range()
	if err != nil || base != 0 {
		t.Errorf("the base moved to %d of %d before the follower passed: %v", base, head, err)
	}
	if got, err := j.Frames(bg, 0, 1); err != nil || len(got) != 1 || got[0].First != 1 {
		t.Errorf("the first event is gone: %v", err)
	}
	passed = head / 2
	step(1, now.Add(7*time.Hour))
	if base, _, _ = j.Range(); base == 0 || base > passed {
		t.Errorf("base %d, passed %d", base, passed)
	}
	mustVerify(t, j)

	j.opt.Retention, j.opt.MaxBytes, passed = 0, 64<<10, base
	for range 10 {
		step(20, now.Add(8*time.Hour))
	}
	if s := j.Stats(); s.KeptBytes > 2*j.opt.MaxBytes || s.Base <= passed {
		t.Errorf("disk use is not bounded: %d bytes kept, base %d, hold %d", s.KeptBytes, s.Base, passed)
	}
	mustVerify(t, j)
}

func TestSessionsOnRecord(t *testing.T) {
	contract.Covers(t, "N4")
	dir := tempDir(t)
	opt := testOptions(dir, nil)
	opt.Retention = time.Hour
	j, _ := openWith(t, opt)
	const a, b = "ses_0123456789abcdef", "ses_fedcba9876543210"
	at := time.Now().UTC().Truncate(time.Millisecond)
	record := func(typ dispatch.EventType, id string, at time.Time) error {
		return j.RecordSession(bg, dispatch.Event{Type: typ, At: at, Session: &dispatch.Session{ID: id, Name: "agent", Caller: "session:" + id}})
	}
	for _, id := range []string{a, b} {
		if err := record(dispatch.SessionOpened, id, at); err != nil {
			t.Fatal(err)
		}
	}
	act := newID()
	mustAppend(t, j, toDispatch(act, "session:"+a, "", "f"))
	mustAppend(t, j, toResult(act, []byte("x")))
	mustAppend(t, j, toDispatch(newID(), "session:"+a, "", "f"))
	mustAppend(t, j, toDispatch(newID(), "caller:ci", "", "f"))
	if err := record(dispatch.SessionClosed, a, at.Add(time.Minute)); err != nil {
		t.Fatal(err)
	}
	for name, err := range map[string]error{
		"opened twice": record(dispatch.SessionOpened, b, at), "closed twice": record(dispatch.SessionClosed, a, at),
		"not an id": record(dispatch.SessionOpened, "ses_x", at), "not of a session": record(dispatch.Booted, b, at),
	} {
		if !errors.Is(err, dispatch.ErrNotWritten) {
			t.Errorf("%s: %v", name, err)
		}
	}
	check := func(j *Journal) {
		t.Helper()
		views, err := dispatch.SessionViews(bg, j, dispatch.SessionQuery{Callers: true})
		if err != nil || len(views) != 3 {
			t.Fatalf("%v: %+v", err, views)
		}
		if v := views[0]; v.ID != b || v.State != dispatch.SessionOpen || v.Actions != 0 || !v.OpenedAt.Equal(at) {
			t.Errorf("%+v", v)
		}
		if v := views[1]; v.ID != a || v.State != dispatch.SessionEnded || v.Actions != 2 || v.ByOutcome["committed"] != 1 || v.ByOutcome["unknown"] != 1 || !v.ClosedAt.Equal(at.Add(time.Minute)) || v.ByRoute["pay"] != 2 {
			t.Errorf("%+v", v)
		}
		if v := views[2]; v.Caller != "caller:ci" || v.State != dispatch.NoSession || v.Actions != 1 || v.LastActionAt.IsZero() {
			t.Errorf("%+v", v)
		}
		if r := mustVerify(t, j); r.SessionEvents != 3 {
			t.Errorf("%d events of sessions", r.SessionEvents)
		}
	}
	check(j)
	closeTest(t, j)
	j, _ = openWith(t, opt)
	check(j)
	views, err := dispatch.SessionViews(bg, j, dispatch.SessionQuery{Limit: 1, Valid: func(string) bool { return false }})
	if err != nil || len(views) != 1 || views[0].State != dispatch.SessionExpired {
		t.Errorf("%v %+v", err, views)
	}
	// Retention takes what ended before the base, and leaves what is open.
	for i := range 3 {
		if _, err := j.Retain(time.Now().Add(time.Duration(i) * 40 * time.Minute)); err != nil {
			t.Fatal(err)
		}
		mustAppend(t, j, dispatch.Batch{Action: newID(), Events: []dispatch.Event{evAccepted("ci", ""), evRefused()}})
	}
	if _, err := j.Retain(time.Now().Add(10 * time.Hour)); err != nil {
		t.Fatal(err)
	}
	recs, err := j.Sessions(bg)
	if err != nil || len(recs) != 1 || recs[0].ID != b {
		t.Errorf("%v %+v", err, recs)
	}
	mustVerify(t, j)
}
