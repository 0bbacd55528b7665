package journal

import (
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/outcome"
)

// What is stored of an action with few events is where they are. It reads the same as a
// record that was written out, a crash leaves it unknown all the same, and damage of its
// events is damage of it, never an absence.
func TestBriefProjection(t *testing.T) {
	contract.Covers(t, "M2", "M5", "M7", "F1")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	stored := func(id dispatch.ActionID) (size int, brief bool) {
		t.Helper()
		if err := j.view(func(txn *snapshot) error {
			key := keyAction(famRecord, id)
			v, _, err := get(txn, key)
			if err != nil {
				return err
			}
			plain, _, _ := j.seal.open(key, v, 0)
			p, err := decodeProjection(plain)
			if err == nil {
				size, brief = len(plain), p.brief
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return size, brief
	}
	same := func(what string, want dispatch.Record) {
		t.Helper()
		got := mustAction(t, j, want.ID)
		if !equalProjection(&projection{rec: got}, &projection{rec: want}) {
			t.Errorf("%s: read %+v, want %+v", what, got, want)
		}
	}

	open := mustAppend(t, j, toDispatch(newID(), "ci", "r1", "f1")).Record
	if size, brief := stored(open.ID); !brief || size > 32 {
		t.Errorf("of an action that goes on %d bytes are stored, brief %v", size, brief)
	}
	same("open", open)

	// Of one that has ended, too; what is added to it later writes it out in the end.
	ended := mustAppend(t, j, toDispatch(newID(), "ci", "r2", "f2")).Record
	ended = mustAppend(t, j, toResult(ended.ID, []byte("result"))).Record
	if size, brief := stored(ended.ID); !brief || size > 32 {
		t.Errorf("of an action that has ended %d bytes are stored, brief %v", size, brief)
	}
	same("ended", ended)
	for n := 3; n <= briefFrames+1; n++ {
		ended = mustAppend(t, j, dispatch.Batch{Action: ended.ID, Events: []dispatch.Event{{Type: dispatch.DeliveryFailed, At: time.Now()}}}).Record
		if _, brief := stored(ended.ID); brief != (n <= briefFrames) {
			t.Errorf("ended, with %d frames: brief %v", n, brief)
		}
		same(fmt.Sprint("ended, ", n, " frames"), ended)
	}

	// Bounds: of one frame, and of their number.
	large := newID()
	b := toDispatch(large, "ci", "r3", "f3")
	b.Events[0].Accepted.Target = "https://example.test/" + strings.Repeat("x", briefBytes)
	same("large", mustAppend(t, j, b).Record)
	if _, brief := stored(large); brief {
		t.Error("a large record is to be made from its events")
	}
	many := newID()
	mustAppend(t, j, dispatch.Batch{Action: many, Events: []dispatch.Event{evAccepted("ci", "r4"), evBound("f4"), evCredential()}})
	for n := 1; n <= briefFrames+1; n++ {
		if _, brief := stored(many); brief != (n <= briefFrames) {
			t.Errorf("with %d frames: brief %v", n, brief)
		}
		rec := mustAppend(t, j, dispatch.Batch{Action: many, Events: []dispatch.Event{{Type: dispatch.AttemptFailed, Attempt: n, At: time.Now(), Ended: &dispatch.Ended{
			Facts: outcome.Facts{Phase: outcome.ConnectionSetup, Outcome: outcome.NotAttempted, Retry: outcome.Backoff, Code: outcome.CodeConnectionLost}, Source: outcome.TransportObserved}}}}).Record
		same(fmt.Sprint(n, " tries"), rec)
	}
	mustVerify(t, j)

	crash, damaged := filepath.Join(t.TempDir(), "crash"), filepath.Join(t.TempDir(), "damaged")
	settleTest(t, j)
	mustAppend(t, j, toDispatch(newID(), "ci", "", "f5"))
	copyDir(t, dir, crash)
	copyDir(t, dir, damaged)
	closeTest(t, j)

	j, rec := openWith(t, testOptions(crash, nil))
	if rec.Unknown != 3 || rec.NotAttempted != 1 {
		t.Errorf("after a crash %d are unknown and %d not attempted, want 3 and 1", rec.Unknown, rec.NotAttempted)
	}
	if got := mustAction(t, j, open.ID); got.Facts.Outcome != outcome.Unknown || !got.Ended || len(got.Attempts) != 1 || got.Attempts[0].DispatchSeq == 0 {
		t.Errorf("after a crash the action that was dispatched is %+v", got)
	}
	mustVerify(t, j)
	closeTest(t, j)

	tamper(t, damaged, func(txn *badger.Txn) error {
		v, _, err := get(&snapshot{Txn: txn}, keyEvent(open.FirstSeq))
		if err != nil {
			return err
		}
		v[len(v)-1] ^= 1
		return txn.Set(keyEvent(open.FirstSeq), v)
	})
	_, _, err := Open(testOptions(damaged, nil))
	var broken *CorruptError
	if !errors.As(err, &broken) || broken.Seq != open.FirstSeq {
		t.Errorf("with a damaged event: %v, want event %d", err, open.FirstSeq)
	}
}
