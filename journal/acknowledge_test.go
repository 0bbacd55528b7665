package journal

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/dgraph-io/badger/v4"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/journal/internal/hooks"
	"waybill/outcome"
)

// TestAcknowledge: the operator's way out of quarantine (M5). What only the witness
// names is unknown afterwards, over several of its segments; what is on record stays;
// the reason is in the chain; the journal works and verifies, also after more starts.
func TestAcknowledge(t *testing.T) {
	contract.Covers(t, "M5", "F2")
	for _, gone := range []bool{false, true} {
		for _, written := range []bool{false, true} {
			dir := tempDir(t)
			h := func() *hooks.Hooks { return &hooks.Hooks{NoSync: true, SegmentSlots: 16} }
			j := openTest(t, dir, h())
			kept, half := newID(), newID()
			mustAppend(t, j, toDispatch(kept, "ci", "k", "fk"))
			mustAppend(t, j, toResult(kept, []byte("kept")))
			mustAppend(t, j, toDispatch(half, "ci", "h", "fh"))
			closeTest(t, j)
			old := filepath.Join(t.TempDir(), "old")
			copyDir(t, filepath.Join(dir, nameStore), old)
			j = openTest(t, dir, h())
			var lost []dispatch.ActionID
			for range 30 {
				id := newID()
				lost = append(lost, id)
				mustAppend(t, j, toDispatch(id, "ci", "", "f"))
				mustAppend(t, j, toResult(id, []byte("lost")))
			}
			wantErr(t, j.Acknowledge("nothing to do"), ErrNotQuarantined)
			closeTest(t, j)
			if gone {
				if err := os.RemoveAll(filepath.Join(dir, nameStore)); err != nil {
					t.Fatal(err)
				}
			} else {
				copyDir(t, old, filepath.Join(dir, nameStore))
			}

			opt := testOptions(dir, h())
			j, r := openWith(t, opt)
			if !r.Quarantined {
				t.Fatal("not in quarantine")
			}
			_, err := j.Action(bg, newID())
			wantErr(t, err, dispatch.ErrQuarantined)
			for _, bad := range []string{"", " ", "a\nb", strings.Repeat("x", 501), "\xff"} {
				wantErr(t, j.Acknowledge(bad), ErrReason)
			}
			const reason = "restored the volume of Tuesday, ticket 4711"
			if written {
				if err := j.Acknowledge(reason); err != nil {
					t.Fatal(err)
				}
				closeTest(t, j)
			} else {
				closeTest(t, j)
				opt = testOptions(dir, h())
				opt.Acknowledge = &Acknowledgement{Reason: reason}
			}
			opt.Hooks = h()
			j, r = openWith(t, opt)
			if r.Quarantined || r.Acknowledged == nil || r.Acknowledged.Reason != reason || len(r.Lost) == 0 {
				t.Fatalf("%+v", r)
			}
			if err := j.Admit(); err != nil {
				t.Error(err)
			}
			for _, id := range lost {
				if rec, err := j.Action(bg, id); err == nil && rec.Facts.Outcome != outcome.Unknown {
					t.Errorf("%s: %v", id, rec.Facts)
				} else if err != nil && !gone {
					t.Errorf("%s: %v", id, err)
				}
			}
			if !gone {
				if rec := mustAction(t, j, kept); rec.Facts.Outcome != outcome.Committed {
					t.Errorf("%v", rec.Facts)
				}
				if rec := mustAction(t, j, half); rec.Facts.Outcome != outcome.Unknown {
					t.Errorf("%v", rec.Facts)
				}
			}
			found := 0
			if err := j.view(func(txn *snapshot) error {
				it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{famEvent}})
				defer it.Close()
				for it.Rewind(); it.Valid(); it.Next() {
					v, err := it.Item().ValueCopy(nil)
					if err != nil {
						return err
					}
					plain, _, ok := j.seal.open(it.Item().KeyCopy(nil), v, hashBytes)
					if a := acknowledgementIn(plain); ok && a != nil && a.Reason == reason && a.WitnessSeq > a.Seq {
						found++
					}
				}
				return nil
			}); err != nil || found != 1 {
				t.Errorf("the reason is on record %d times, %v", found, err)
			}
			for range 3 {
				for range 10 {
					id := newID()
					mustAppend(t, j, toDispatch(id, "ci", "", "f"))
					mustAppend(t, j, toResult(id, []byte("new")))
				}
				mustVerify(t, j)
				closeTest(t, j)
				if j, r = openWith(t, testOptions(dir, h())); r.Quarantined || r.Acknowledged != nil {
					t.Fatalf("%+v", r)
				}
			}
			mustVerify(t, j)
		}
	}
}

// TestAcknowledgementIsBound: one that was given for another state is not used.
func TestAcknowledgementIsBound(t *testing.T) {
	contract.Covers(t, "M5")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	closeTest(t, j)
	old := filepath.Join(t.TempDir(), "old")
	copyDir(t, filepath.Join(dir, nameStore), old)
	j = openTest(t, dir, nil)
	for range 3 {
		mustAppend(t, j, toDispatch(newID(), "ci", "", "f"))
	}
	closeTest(t, j)
	whole := filepath.Join(t.TempDir(), "whole")
	copyDir(t, filepath.Join(dir, nameStore), whole)
	copyDir(t, old, filepath.Join(dir, nameStore))
	j = openTest(t, dir, nil)
	if err := j.Acknowledge("for this state"); err != nil {
		t.Fatal(err)
	}
	closeTest(t, j)
	copyDir(t, whole, filepath.Join(dir, nameStore))
	j = openTest(t, dir, nil) // whole again: nothing to leave
	mustAppend(t, j, toDispatch(newID(), "ci", "", "f"))
	closeTest(t, j)
	copyDir(t, old, filepath.Join(dir, nameStore))
	if _, r := openWith(t, testOptions(dir, nil)); !r.Quarantined {
		t.Error("an acknowledgement of another state was used")
	}
}
