package journal

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/journal/internal/hooks"
	"waybill/outcome"
)

// TestBackupOfAHeldRequest: what waited for an approval when the backup was taken may have
// been sent since: a restored journal does not offer it again.
func TestBackupOfAHeldRequest(t *testing.T) {
	contract.Covers(t, "F2", "D3", "M5")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	bound := evBound("f")
	bound.Bound.Approval = true
	now := time.Now()
	asked := dispatch.Event{Type: dispatch.ApprovalRequested, At: now, Approval: &dispatch.Approval{Fingerprint: "sha256:1", ExpiresAt: now.Add(time.Hour), Held: dispatch.Held{Chunks: 1, Bytes: 4}}}
	yes := dispatch.Event{Type: dispatch.ApprovalDecided, At: now, Decision: &dispatch.Decision{Verdict: dispatch.Approved, By: "alice", Via: "admin"}}
	waits, approved := newID(), newID()
	for _, id := range []dispatch.ActionID{waits, approved} {
		mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{evAccepted("ci", ""), bound, asked}, Chunks: []dispatch.Chunk{{Attempt: dispatch.HeldRequest, Last: true, Data: []byte("held")}}})
	}
	mustAppend(t, j, dispatch.Batch{Action: approved, Events: []dispatch.Event{yes}})
	// And what the background was going to repeat.
	refused := keyedBatch(newID(), "k")
	mustAppend(t, j, refused)
	mustAppend(t, j, dispatch.Batch{Action: refused.Action, Events: []dispatch.Event{evResponse(1, 429), evResolved(1, facts(outcome.RemoteExecution, outcome.Rejected, outcome.Backoff, outcome.CodeRemoteRejected))}})
	// What a caller was told that it may repeat, as this action, and may have since (F2).
	later := newID()
	mustAppend(t, j, dispatch.Batch{Action: later, Events: []dispatch.Event{evAccepted("ci", ""), evBound("g"), {Type: dispatch.ActionRefused, At: now, Ended: &dispatch.Ended{
		Facts: facts(outcome.ConnectionSetup, outcome.NotAttempted, outcome.Backoff, outcome.CodeConnectionRefused), Stage: outcome.StageDNS, Source: outcome.TransportObserved}}}})
	never := newID()
	mustAppend(t, j, dispatch.Batch{Action: never, Events: []dispatch.Event{evAccepted("ci", ""), evBound("h"), evRefused()}})
	if rec := mustAction(t, j, later); !rec.LeftToRepeat() || rec.MayRepeat(now) != nil {
		t.Fatalf("%+v", rec.Facts)
	}
	// Nobody adds an attempt to what was approved, since an approval is spent once.
	spent := newID()
	approved2 := evBound("i")
	approved2.Bound.Approval = true
	mustAppend(t, j, dispatch.Batch{Action: spent, Events: []dispatch.Event{evAccepted("ci", ""), approved2, {Type: dispatch.ActionRefused, At: now, Ended: &dispatch.Ended{
		Facts: facts(outcome.ConnectionSetup, outcome.NotAttempted, outcome.Backoff, outcome.CodeConnectionRefused), Stage: outcome.StageDNS, Source: outcome.TransportObserved}}}})
	// An answer that did not arrive hides the leave to repeat until somebody acknowledges it.
	undelivered := keyedBatch(newID(), "k2")
	mustAppend(t, j, undelivered)
	mustAppend(t, j, dispatch.Batch{Action: undelivered.Action, Events: []dispatch.Event{evResponse(1, 429),
		evResult(1, 429, 0, nil, facts(outcome.RemoteExecution, outcome.Rejected, outcome.Backoff, outcome.CodeRemoteRejected)), {Type: dispatch.DeliveryFailed, At: now}}})
	if rec := mustAction(t, j, undelivered.Action); rec.Facts.Retry != outcome.FetchResult || !rec.LeftToRepeat() {
		t.Fatalf("%+v", rec.Facts)
	}
	var file bytes.Buffer
	if _, err := j.Backup(bg, &file); err != nil {
		t.Fatal(err)
	}
	closeTest(t, j)
	key, err := ReadKey(filepath.Join(dir, nameKey))
	if err != nil {
		t.Fatal(err)
	}
	to := filepath.Join(t.TempDir(), "journal")
	if _, err := Restore(bg, bytes.NewReader(file.Bytes()), to, key, nil); err != nil {
		t.Fatal(err)
	}
	reader := testOptions(to, nil)
	reader.ReadOnly = true
	j, _ = openWith(t, reader)
	for _, id := range []dispatch.ActionID{waits, approved} {
		if rec, _ := j.Action(bg, id); rec.Facts.Outcome == outcome.NotAttempted && rec.Ended {
			t.Errorf("read only: %+v", rec.Facts)
		}
	}
	closeTest(t, j)
	j, _ = openWith(t, testOptions(to, nil))
	for _, id := range []dispatch.ActionID{later, refused.Action} {
		if rec, err := j.Action(bg, id); !errors.Is(err, dispatch.ErrQuarantined) {
			t.Errorf("in quarantine: %+v %v", rec.Facts, err)
		}
	}
	if err := j.Acknowledge("this is the last backup"); err != nil {
		t.Fatal(err)
	}
	closeTest(t, j)
	j, _ = openWith(t, testOptions(to, nil))
	for _, id := range []dispatch.ActionID{waits, approved} {
		if rec := mustAction(t, j, id); rec.Facts.Outcome != outcome.Unknown || rec.AwaitsApproval() || !rec.Ended {
			t.Errorf("%+v, awaits %v", rec.Facts, rec.AwaitsApproval())
		}
	}
	for _, id := range []dispatch.ActionID{later, refused.Action, undelivered.Action} {
		if rec := mustAction(t, j, id); rec.Facts.Outcome != outcome.Unknown || rec.Facts.Retry != outcome.Reconcile || rec.KeepsRequest() || rec.MayRepeat(now) == nil && id == later {
			t.Errorf("repeated after a restore: %+v", rec.Facts)
		}
	}
	for _, id := range []dispatch.ActionID{never, spent} {
		if rec := mustAction(t, j, id); rec.Facts.Outcome != outcome.NotAttempted {
			t.Errorf("what nobody may have repeated: %+v", rec.Facts)
		}
	}
	mustVerify(t, j)
	closeTest(t, j)
	// The journal itself goes on with both.
	j = openTest(t, dir, nil)
	for _, id := range []dispatch.ActionID{waits, approved} {
		if rec := mustAction(t, j, id); !rec.AwaitsApproval() {
			t.Errorf("%+v", rec.Facts)
		}
	}
	if rec := mustAction(t, j, refused.Action); !rec.KeepsRequest() {
		t.Errorf("%+v", rec.Facts)
	}
}

// TestBackup: a copy taken under load is one moment of the journal; restored it
// verifies, is in quarantine, and goes on after an acknowledgement.
func TestBackup(t *testing.T) {
	contract.Covers(t, "M5", "M7")
	dir := tempDir(t)
	j := openTest(t, dir, &hooks.Hooks{NoSync: true, SegmentSlots: 64})
	before := newID()
	mustAppend(t, j, toDispatch(before, "ci", "before", "f"))
	mustAppend(t, j, toResult(before, bytes.Repeat([]byte("kept"), 50000)))
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				id := newID()
				if _, err := j.Append(bg, toDispatch(id, "ci", "", "f")); err != nil {
					t.Error(err)
					return
				}
				if _, err := j.Append(bg, toResult(id, []byte("x"))); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	var file bytes.Buffer
	info, err := j.Backup(bg, &file)
	if err != nil || info.Seq == 0 {
		t.Fatalf("%+v %v", info, err)
	}
	close(stop)
	wg.Wait()
	after := newID()
	for _, id := range []dispatch.ActionID{newID(), newID(), after} {
		mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	}
	closeTest(t, j)
	key, err := ReadKey(filepath.Join(dir, nameKey))
	if err != nil {
		t.Fatal(err)
	}
	if bytes.Contains(file.Bytes(), []byte("kept")) || bytes.Contains(file.Bytes(), before[:]) || bytes.Contains(file.Bytes(), key) {
		t.Error("the backup is readable")
	}

	to := filepath.Join(t.TempDir(), "journal")
	again, err := Restore(bg, bytes.NewReader(file.Bytes()), to, key, nil)
	if err != nil || again != info {
		t.Fatalf("%+v %+v %v", again, info, err)
	}
	_, err = Restore(bg, bytes.NewReader(file.Bytes()), to, key, nil)
	wantErr(t, err, fs.ErrExist)
	j, r := openWith(t, testOptions(to, nil))
	if !r.Quarantined || r.Seq != info.Seq {
		t.Fatalf("%+v", r)
	}
	_, err = j.Action(bg, after)
	wantErr(t, err, dispatch.ErrQuarantined)
	wantErr(t, j.Admit(), dispatch.ErrQuarantined)
	if rec := mustAction(t, j, before); rec.Facts.Outcome != outcome.Committed {
		t.Errorf("%v", rec.Facts)
	}
	if err := j.Acknowledge("the machine is gone; this is its last backup"); err != nil {
		t.Fatal(err)
	}
	closeTest(t, j)
	for range 2 {
		if j, r = openWith(t, testOptions(to, nil)); r.Quarantined || len(r.Lost) != 0 {
			t.Fatalf("%+v", r)
		}
		mustAppend(t, j, toDispatch(newID(), "ci", "", "f"))
		mustVerify(t, j)
		_, body, err := j.OpenResult(bg, before)
		if err != nil {
			t.Fatal(err)
		}
		if n, err := io.Copy(io.Discard, body); err != nil || n != 200000 {
			t.Errorf("%d bytes, %v", n, err)
		}
		closeTest(t, j)
	}

	// Beside a witness that is newer, a store that was put back is noticed without the
	// restore's mark; one that has gone on by itself is another history.
	beside := filepath.Join(t.TempDir(), "journal")
	if _, err := Restore(bg, bytes.NewReader(file.Bytes()), beside, key, nil); err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(beside, nameRestored)); err != nil {
		t.Fatal(err)
	}
	copyDir(t, filepath.Join(dir, nameWitness), filepath.Join(beside, nameWitness))
	if _, r := openWith(t, testOptions(beside, nil)); !r.Quarantined || r.WitnessSeq <= r.Seq {
		t.Errorf("a newer witness was not noticed: %+v", r)
	}
	copyDir(t, filepath.Join(dir, nameWitness), filepath.Join(to, nameWitness))
	if j, r, err := Open(testOptions(to, nil)); err == nil {
		if !r.Quarantined {
			t.Errorf("the witness of another history was not noticed: %+v", r)
		}
		closeTest(t, j)
	}

	for _, c := range []struct {
		name string
		b    []byte
		key  []byte
		err  error
	}{
		{"cut", file.Bytes()[:file.Len()-1], key, ErrBackup},
		{"cut at a part", file.Bytes()[:24], key, ErrBackup},
		{"empty", nil, key, ErrBackup},
		{"another file", bytes.Repeat([]byte("x"), 4096), key, ErrBackup},
		{"another key", file.Bytes(), bytes.Repeat([]byte{1}, KeyBytes), ErrBackup},
		{"newer", append([]byte("WBJBAK\x00\x03"), file.Bytes()[8:]...), key, ErrFormat},
		{"older", append([]byte("WBJBAK\x00\x01"), file.Bytes()[8:]...), key, ErrOldFormat},
		{"a flipped bit", flipped(file.Bytes(), file.Len()/2), key, ErrBackup},
		{"another store", flipped(file.Bytes(), 12), key, ErrBackup},
	} {
		to := filepath.Join(t.TempDir(), "journal")
		_, err := Restore(bg, bytes.NewReader(c.b), to, c.key, nil)
		if err == nil {
			t.Errorf("%s: restored", c.name)
			continue
		}
		wantErr(t, err, c.err)
		if left, _ := os.ReadDir(filepath.Dir(to)); len(left) != 0 {
			t.Errorf("%s: left %v", c.name, left)
		}
	}
}

func flipped(b []byte, at int) []byte {
	out := bytes.Clone(b)
	out[at] ^= 4
	return out
}
