package journal

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/journal/internal/hooks"
	"waybill/outcome"
)

// What finish lets through the store takes: by then the witness has it, and a group that
// no store takes would keep every later start from making it again.
func TestFinishIsAsStrictAsTheStore(t *testing.T) {
	contract.Covers(t, "M5")
	j := openTest(t, tempDir(t), nil)
	taken, refused := 0, 0
	try := func(what string, entries []entry) {
		t.Helper()
		st := &stage{head: j.c.head, entries: entries}
		if err := j.finish(st); err != nil {
			wantErr(t, err, ErrTooLarge)
			refused++
			return
		}
		taken++
		if err := j.put(st.entries); err != nil {
			t.Errorf("%s: finish takes what the store refuses: %v", what, err)
		}
	}
	if err := j.between(func() error {
		of := func(bytes, n int) (out []entry) {
			for i := range n {
				key := append([]byte("zz"), byte(i>>16), byte(i>>8), byte(i))
				size := bytes/n - len(key) - 12
				if i == 0 {
					size += bytes % n
				}
				out = append(out, entry{key: key, value: make([]byte, size)})
			}
			return out
		}
		most := int(j.db.MaxBatchSize())
		for short := 90; short < 180; short++ { // the head is in between
			try("bytes", of(most-short, 8))
		}
		for short := range 8 {
			n := int(j.db.MaxBatchCount()) - short
			try("count", of(20*n, n))
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if taken == 0 || refused == 0 {
		t.Errorf("%d were taken, %d refused: the limit was not met", taken, refused)
	}
}

// failingStore opens a journal whose store fails when it is told to.
func failingStore(t *testing.T, dir string) (j *Journal, fail func()) {
	t.Helper()
	failing := make(chan struct{})
	h := &hooks.Hooks{NoSync: true, StoreError: func(uint64) error {
		select {
		case <-failing:
			return errors.New("EIO")
		default:
			return nil
		}
	}}
	j, _ = openWith(t, testOptions(dir, h))
	return j, func() { close(failing) }
}

// A store that lacks what somebody was told of is verified as little as it is read; a
// backup of it has the group in its witness.
func TestStoppedBehindTheWitness(t *testing.T) {
	contract.Covers(t, "F2", "M5", "M7")
	dir := tempDir(t)
	j, fail := failingStore(t, dir)
	id := newID()
	mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{evAccepted("ci", "r"), evBound("f"), evCredential()}})
	fail()
	if _, err := j.Append(bg, dispatch.Batch{Action: id, Events: []dispatch.Event{evDispatch(1)}}); err != nil {
		t.Fatal(err)
	}
	<-j.Poisoned()
	if r, err := j.Verify(bg); err == nil {
		t.Errorf("a history without its end is in order: %+v", r)
	}
	for name, err := range map[string]error{
		"request id": second(j.ByRequestID(bg, "ci", "r")), "of nobody": second(j.ByRequestID(bg, "ci", "other")),
		"guard": second(j.Guarding(bg, "ci", "f")), "events": second(j.Events(bg, id)),
	} {
		// Of a guard it may be certain that there is none: nothing of this action has ended.
		if err == nil || errors.Is(err, dispatch.ErrActionNotFound) && name != "guard" || errors.Is(err, dispatch.ErrNotWritten) {
			t.Errorf("%s: %v", name, err)
		}
	}

	var b bytes.Buffer
	if _, err := j.Backup(bg, &b); err != nil {
		t.Fatal(err)
	}
	key, err := ReadKey(filepath.Join(dir, nameKey))
	if err != nil {
		t.Fatal(err)
	}
	wantErr(t, j.Close(), dispatch.ErrIndeterminate)
	copyDir(t, dir, dir+".read")
	restored := dir + ".restored"
	if _, err := Restore(bg, &b, restored, key, nil); err != nil {
		t.Fatal(err)
	}
	opt := testOptions(restored, nil)
	opt.Acknowledge = &Acknowledgement{Reason: "restored"}
	again, _ := openWith(t, opt)
	for what, j := range map[string]*Journal{"restored": again, "restarted": openTest(t, dir, nil), "read": openReading(t, dir+".read")} {
		r := mustAction(t, j, id)
		if r.Facts.Outcome != outcome.Unknown || !r.Ended || !r.Dispatched() {
			t.Errorf("%s: %+v", what, r.Facts)
		}
		mustVerify(t, j)
	}
}

func second[T any](_ T, err error) error { return err }

func openReading(t *testing.T, dir string) *Journal {
	t.Helper()
	opt := testOptions(dir, nil)
	opt.ReadOnly = true
	j, _ := openWith(t, opt)
	return j
}

// A store that reports lost data is not read, whether or not a group was on its way into it.
func TestLostDataIsNotRead(t *testing.T) {
	contract.Covers(t, "M7")
	j := openTest(t, tempDir(t), nil)
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	j.store.Errorf("Ignoring table %d", 1)
	<-j.Poisoned()
	for _, id := range []dispatch.ActionID{id, newID()} {
		if r, err := j.Action(bg, id); err == nil || errors.Is(err, dispatch.ErrActionNotFound) {
			t.Errorf("read from a store that lost data: %+v, %v", r.Facts, err)
		}
	}
}

// An end at which the store fails is not an orderly one, though nothing is lost by it.
func TestCloseSaysThatTheStoreFailed(t *testing.T) {
	contract.Covers(t, "M5")
	dir := tempDir(t)
	h := &hooks.Hooks{NoSync: true}
	last := make(chan struct{})
	h.StoreError = func(uint64) error {
		select {
		case <-last:
			time.Sleep(200 * time.Millisecond) // Close is on its way by then
			return errors.New("EIO")
		default:
			return nil
		}
	}
	j, _ := openWith(t, testOptions(dir, h))
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	close(last)
	wantErr(t, j.Close(), dispatch.ErrIndeterminate)
	if _, err := os.Stat(dir); err != nil {
		t.Fatal(err)
	}
	j, _ = openWith(t, testOptions(dir, nil))
	if r := mustAction(t, j, id); r.Facts.Outcome != outcome.Unknown {
		t.Errorf("%+v", r.Facts)
	}
	mustVerify(t, j)
}

// Figures wait for no store: they are what shows that it hangs.
func TestStatsOfAStoreThatHangs(t *testing.T) {
	contract.Covers(t, "M5")
	hanging, release := make(chan struct{}), make(chan struct{})
	h := &hooks.Hooks{NoSync: true, StoreError: func(uint64) error {
		select {
		case <-hanging:
			<-release
		default:
		}
		return nil
	}}
	j, _ := openWith(t, testOptions(tempDir(t), h))
	close(hanging)
	if _, err := j.Append(bg, toDispatch(newID(), "ci", "", "f")); err != nil {
		t.Fatal(err)
	}
	got := make(chan Stats, 1)
	go func() { got <- j.Stats() }()
	select {
	case s := <-got:
		if s.KeptBytes <= 0 || s.OpenActions != 1 {
			t.Errorf("%+v", s)
		}
	case <-time.After(10 * time.Second):
		t.Error("the figures wait for the store")
	}
	close(release)
}

// A brief projection is what its frames give, so that comparing the two proves nothing; an
// older one put back is found by the events that then belong to none.
func TestOlderBriefProjection(t *testing.T) {
	contract.Covers(t, "F2", "M7")
	j := openTest(t, tempDir(t), nil)
	id := newID()
	stored := func() (v []byte) {
		if err := j.view(func(txn *snapshot) (err error) {
			v, _, err = get(txn, keyAction(famRecord, id))
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return v
	}
	mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{evAccepted("ci", ""), evBound("f"), evCredential()}})
	older := stored()
	mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{evDispatch(1)}})
	mustVerify(t, j)
	if err := j.between(func() error { return j.put([]entry{{key: keyAction(famRecord, id), value: older}}) }); err != nil {
		t.Fatal(err)
	}
	_, err := j.Verify(bg)
	wantErr(t, err, ErrCorrupt)
}
