package journal

import (
	"bytes"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"pgregory.net/rapid"

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

// What the store is given is the sum of its groups: read through what it is behind with, and
// read from the store alone afterwards, every key is as if each group had been stored.
func TestPendingIsTheSumOfItsGroups(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		store, want := map[string]string{}, map[string]string{}
		b := newBehind()
		group := uint64(0)
		apply := func(p *pending) {
			if p == nil {
				return
			}
			n, bytes := int64(0), int64(endBytes)
			for i := range p.entries {
				e := &p.entries[i]
				if e.key == nil {
					continue
				}
				n, bytes = n+1, bytes+e.bytes()
				if e.remove {
					delete(store, string(e.key))
				} else {
					store[string(e.key)] = string(e.value)
				}
			}
			if n != p.count() || bytes != p.bytes {
				t.Fatalf("it counts %d entries of %d bytes: %d of %d", p.count(), p.bytes, n, bytes)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"group": func(t *rapid.T) {
				var entries []entry
				for range rapid.IntRange(1, 4).Draw(t, "n") {
					key := rapid.SampledFrom([]string{"a", "b", "c", "d"}).Draw(t, "key")
					_, there := want[key]
					if rapid.Bool().Draw(t, "remove") {
						delete(want, key)
						entries = append(entries, entry{key: []byte(key), remove: true})
						continue
					}
					value := fmt.Sprint(group, len(entries))
					want[key] = value
					entries = append(entries, entry{key: []byte(key), value: []byte(value), fresh: !there && rapid.Bool().Draw(t, "fresh")})
				}
				group++
				b.add(entries, group, 1<<20, 1<<20)
			},
			"take": func(*rapid.T) {
				if b.storing == nil {
					b.take()
				}
			},
			"stored": func(*rapid.T) {
				if p := b.storing; p != nil {
					apply(p)
					b.stored()
					p.end(nil)
				}
			},
			"": func(t *rapid.T) {
				behind, _ := b.both()
				for _, key := range []string{"a", "b", "c", "d"} {
					got, found := store[key]
					for _, p := range behind {
						if e := p.find([]byte(key)); e != nil {
							got, found = string(e.value), !e.remove
							break
						}
					}
					if value, there := want[key]; found != there || found && got != value {
						t.Fatalf("%s is %q (%v), want %q (%v)", key, got, found, value, there)
					}
				}
			},
		})
		apply(b.storing)
		b.stored()
		p, _ := b.take()
		apply(p)
		if !maps.Equal(store, want) {
			t.Fatalf("the store has %v, want %v", store, want)
		}
	})
}

// An entry that is taken back before the store was given it never gets there: of an action
// that is over, the index of open ones has had nothing.
func TestWhatCameToNothingIsNotStored(t *testing.T) {
	id := newID()
	open := entry{key: keyAction(famOpen, id), fresh: true}
	b := newBehind()
	b.add([]entry{open, {key: []byte("other"), value: []byte("1")}}, 1, 1<<20, 1<<20)
	b.add([]entry{{key: open.key, remove: true}, {key: []byte("other"), value: []byte("2")}}, 2, 1<<20, 1<<20)
	p, _ := b.take()
	if p.count() != 1 || p.find(open.key) != nil {
		t.Errorf("%d entries, the index has %v", p.count(), p.find(open.key))
	}
	// Where the store may have it already, the removal has to follow.
	b.add([]entry{open}, 3, 1<<20, 1<<20)
	b.stored()
	p, _ = b.take()
	b.add([]entry{{key: open.key, remove: true}}, 4, 1<<20, 1<<20)
	if e := b.filling.find(open.key); p.count() != 1 || e == nil || !e.remove {
		t.Errorf("%d entries, then %+v", p.count(), e)
	}
}

// A relaxed batch waits for no store: what it is behind with is read where it is.
func TestRelaxedWaitsForNoStore(t *testing.T) {
	contract.Covers(t, "F1", "M7")
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
	defer sync.OnceFunc(func() { close(release) })()
	close(hanging)
	id := newID()
	if _, err := j.Append(bg, dispatch.Batch{Action: id, Events: []dispatch.Event{evAccepted("ci", "r"), evBound("f"), evCredential()}}); err != nil {
		t.Fatal(err)
	}
	got := make(chan answer, 1)
	go func() {
		r, err := j.Append(bg, dispatch.Batch{Action: id, Events: []dispatch.Event{evDispatch(1)}, Relaxed: true})
		got <- answer{r, err}
	}()
	select {
	case r := <-got:
		if r.err != nil || len(r.Record.Attempts) != 1 || r.Record.Attempts[0].DispatchSeq == 0 {
			t.Errorf("%+v, %v", r.Record, r.err)
		}
	case <-time.After(10 * time.Second):
		t.Error("it waits for the store")
	}
}

// Who did not fit into the group that became indeterminate is answered like the others.
func TestCarriedIsAnswered(t *testing.T) {
	contract.Covers(t, "F9")
	hold := heldHooks()
	var left atomic.Int32
	hold.WitnessError = func(uint64) error {
		if left.Add(-1) == 0 {
			return errors.New("EIO")
		}
		return nil
	}
	j, _ := openWith(t, testOptions(tempDir(t), &hold.Hooks))
	// Each is named four times in the witness: two hundred and fifty-six fill a group.
	rejected := facts(outcome.RemoteExecution, outcome.Rejected, outcome.Backoff, outcome.CodeRemoteRejected)
	events := []dispatch.Event{evAccepted("ci", ""), evBound("f"), evCredential(), evDispatch(1), evResponse(1, 429),
		evResolved(1, rejected), evLease(2), evRepeat(2, 2), evResponse(2, 429), evResolved(2, rejected)}
	hold.hold()
	answers := []<-chan answer{appendAsync(j, toDispatch(newID(), "ci", "", "f"))}
	hold.waitHeld(t)
	for i := range 400 {
		answers = append(answers, appendAsync(j, dispatch.Batch{Action: newID(), Events: events}))
		waitQueued(t, j, i+1)
	}
	left.Store(2) // the held group is written, the next is not
	hold.letGo()
	for i, a := range answers {
		select {
		case r := <-a:
			if (i == 0) != (r.err == nil) || i > 0 && !errors.Is(r.err, dispatch.ErrIndeterminate) {
				t.Fatalf("%d: %v", i, r.err)
			}
		case <-time.After(10 * time.Second):
			t.Fatalf("%d is not answered", i)
		}
	}
	wantErr(t, j.Close(), dispatch.ErrIndeterminate)
}
