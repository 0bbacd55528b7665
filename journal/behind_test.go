package journal

import (
	"bytes"
	"crypto/cipher"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"path/filepath"
	"reflect"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4"
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

// hangingHooks are of a store that hangs ahead of its commit, from hang to release.
func hangingHooks() (h *hooks.Hooks, hang, release func()) {
	hanging, released := make(chan struct{}), make(chan struct{})
	h = &hooks.Hooks{NoSync: true, StoreError: func(uint64) error {
		select {
		case <-hanging:
			<-released
		default:
		}
		return nil
	}}
	return h, func() { close(hanging) }, func() { close(released) }
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
	h, hang, release := hangingHooks()
	j, _ := openWith(t, testOptions(tempDir(t), h))
	hang()
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
	release()
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
	if err := j.maintain([]entry{{key: keyAction(famRecord, id), value: older}}); err != nil {
		t.Fatal(err)
	}
	_, err := j.Verify(bg)
	wantErr(t, err, ErrCorrupt)
}

// emptyStore opens views of a store that nobody writes to.
func emptyStore(t *testing.T) func() *badger.Txn {
	t.Helper()
	db, err := badger.Open(badger.DefaultOptions("").WithInMemory(true).WithMemTableSize(memTableBytes).WithLogger(nil))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return func() *badger.Txn { return db.NewTransaction(false) }
}

// What the store is given is the sum of its groups: read through what it is behind with, and
// read from the store alone afterwards, every key is as if each group had been stored.
func TestPendingIsTheSumOfItsGroups(t *testing.T) {
	open := emptyStore(t)
	rapid.Check(t, func(t *rapid.T) {
		store, want := map[string]string{}, map[string]string{}
		b := newBehind(open)
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
					b.hurry()
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
				behind, v := b.acquire()
				b.release(v)
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
		b.hurry()
		p, _ := b.take()
		apply(p)
		if !maps.Equal(store, want) {
			t.Fatalf("the store has %v, want %v", store, want)
		}
	})
}

// Every key is found, however many there are, and none that came to nothing.
func TestPendingFindsItsKeys(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		p, want := newPending(rapid.IntRange(0, 40).Draw(t, "room")), map[string]*entry{}
		nothing, size := 0, int64(endBytes)
		keys := rapid.IntRange(1, 300).Draw(t, "keys")
		for i := range rapid.IntRange(1, 900).Draw(t, "entries") {
			key := fmt.Sprint("key ", i*i*31%keys)
			e := &entry{key: []byte(key), value: []byte(fmt.Sprint(i))}
			old := want[key]
			switch e.fresh = old == nil; i % 5 {
			case 2, 4:
				e.remove, e.fresh, e.value = true, false, nil
			}
			p.put(e)
			if old != nil && old.fresh && e.remove {
				delete(want, key)
				nothing++
				continue
			}
			c := *e
			c.fresh = old == nil && e.fresh || old != nil && old.fresh
			want[key] = &c
		}
		for i := range keys {
			key := fmt.Sprint("key ", i)
			got := p.find([]byte(key))
			if e := want[key]; !reflect.DeepEqual(got, e) {
				t.Fatalf("%s: %+v, want %+v", key, got, e)
			}
			if got != nil {
				size += got.bytes()
			}
		}
		if p.count() != int64(len(want)) || p.dropped != nothing || p.bytes != size || 2*len(p.entries) > len(p.slots) {
			t.Fatalf("%d of %d entries in %d slots, %d came to nothing, %d bytes; want %d, %d, %d", p.count(), len(p.entries), len(p.slots), p.dropped, p.bytes, len(want), nothing, size)
		}
	})
}

// An entry that is taken back before the store was given it never gets there: of an action
// that is over, the index of open ones has had nothing.
func TestWhatCameToNothingIsNotStored(t *testing.T) {
	id := newID()
	open := entry{key: keyAction(famOpen, id), fresh: true}
	gone := entry{key: open.key, remove: true}
	b := newBehind(emptyStore(t))
	group := uint64(0)
	add := func(entries ...entry) {
		group++
		b.add(entries, group, 1<<20, 1<<20)
	}
	take := func() *pending {
		b.hurry()
		p, _ := b.take()
		return p
	}
	other := []byte("other")
	add(open, entry{key: other, value: []byte("1")})
	add(gone, entry{key: other, value: []byte("2")})
	if p := take(); p.count() != 1 || p.find(open.key) != nil {
		t.Errorf("%d entries, the index has %v", p.count(), p.find(open.key))
	}
	b.stored()
	// Where the store may have it already, the removal has to follow, whatever comes between.
	add(open)
	p := take()
	add(gone)
	if e := b.filling.find(open.key); p.count() != 1 || e == nil || !e.remove {
		t.Errorf("%d entries, then %+v", p.count(), e)
	}
	add(open)
	add(gone)
	if e := b.filling.find(open.key); e == nil || !e.remove {
		t.Errorf("taken back twice: %+v", e)
	}
}

// What does not fit into one transaction of the store waits until there is room; a store
// that has failed holds nobody up.
func TestNoMoreThanATransaction(t *testing.T) {
	value := make([]byte, 1000)
	for _, limit := range []struct{ bytes, count int64 }{{4000, 1 << 20}, {1 << 20, 4}} {
		b := newBehind(emptyStore(t))
		added := make(chan uint64)
		go func() {
			for n := range uint64(8) {
				b.add([]entry{{key: keyEvent(n + 1), value: value}}, n+1, limit.bytes, limit.count)
				added <- n + 1
			}
			close(added)
		}()
		last := uint64(0)
		wait := func() {
			for {
				select {
				case n, ok := <-added:
					if !ok {
						last = 9
						return
					}
					last = n
				case <-time.After(100 * time.Millisecond):
					return
				}
			}
		}
		wait()
		p, _ := b.take() // what is full is due
		if last == 0 || last > 3 || p == nil || p.bytes >= limit.bytes || p.count()+1 >= limit.count {
			t.Fatalf("%d groups, %+v", last, p)
		}
		b.stored()
		wait()
		if last > 6 {
			t.Fatalf("%d groups", last)
		}
		b.fail(errors.New("EIO"))
		for range added {
		}
	}
}

// stuck makes a store whose commits hang: none of its tables can be written, so that its
// memtables fill up.
func stuck(t *testing.T, deadline time.Duration) *Journal {
	t.Helper()
	dir := tempDir(t)
	opt := testOptions(dir, &hooks.Hooks{NoSync: true})
	opt.CommitDeadline = deadline
	j, _, err := Open(opt)
	if err != nil {
		t.Fatal(err)
	}
	for i := range 200 {
		if err := os.Mkdir(filepath.Join(dir, nameStore, fmt.Sprintf("%06d.sst", i)), 0o700); err != nil && !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		}
	}
	return j
}

// A store that hangs in its commit holds up nobody beyond the deadline: who appends is
// answered, figures are given, and the journal can be closed, so that the process ends.
func TestCommitOfTheStoreHangs(t *testing.T) {
	contract.Covers(t, "M5", "F9")
	j := stuck(t, 2*time.Second)
	id, other := newID(), newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	mustAppend(t, j, toDispatch(other, "ci", "", "f"))
	const patience = 20 * time.Second
	within := func(what string, f func() error) error {
		t.Helper()
		done := make(chan error, 1)
		go func() { done <- f() }()
		select {
		case err := <-done:
			return err
		case <-time.After(patience):
			t.Fatalf("%s waits for a store that hangs", what)
			return nil
		}
	}
	data := make([]byte, 200<<10)
	stopped := false
	for i := 0; i < 600 && !stopped; i++ {
		err := within("an append", func() error {
			_, err := j.Append(bg, dispatch.Batch{Action: id, Chunks: []dispatch.Chunk{{Attempt: 1, Index: i, Data: data}}})
			return err
		})
		p, v := j.c.behind.acquire()
		j.c.behind.release(v)
		if p[1] != nil && i%16 == 0 {
			_ = within("a relaxed append", func() error {
				_, err := j.Append(bg, dispatch.Batch{Action: other, Events: []dispatch.Event{evResponse(1, 200)}, Relaxed: true})
				return err
			})
		}
		stopped = err != nil
	}
	if !stopped {
		t.Fatal("the store never hung")
	}
	<-j.Poisoned()
	_ = within("the status", func() error { j.Stats(); return nil })
	if err := within("a read", func() error { return second(j.Action(bg, id)) }); err == nil || errors.Is(err, dispatch.ErrActionNotFound) {
		t.Errorf("read: %v", err)
	}
	_ = within("a backup", func() error { return second(j.Backup(bg, io.Discard)) })
	wantErr(t, within("the end", j.Close), dispatch.ErrIndeterminate)
}

// Everything is decided on what the store is behind with: it takes nothing at all here.
func TestDecidedBeforeStored(t *testing.T) {
	contract.Covers(t, "F2", "I2", "M7")
	for _, storing := range []bool{false, true} {
		h, hang, release := hangingHooks()
		h.CheckCache = true
		opt := testOptions(tempDir(t), h)
		opt.CommitDeadline = time.Minute
		j, _ := openWith(t, opt)
		hang()
		appended := func(what string, want error, b dispatch.Batch) dispatch.Receipt {
			t.Helper()
			r, err := j.Append(bg, b)
			if want == nil && err != nil || !errors.Is(err, want) {
				t.Errorf("%s: %v", what, err)
			}
			if storing {
				j.c.behind.hurry()
			}
			return r
		}
		a, b, c := newID(), newID(), newID()
		body := make([]byte, 1000)
		chunk := []dispatch.Chunk{{Attempt: 1, Index: 0, Last: true, Data: body}}
		rejected := facts(outcome.RemoteExecution, outcome.Rejected, outcome.Backoff, outcome.CodeRemoteRejected)
		appended("dispatch", nil, toDispatch(a, "ci", "r", "f"))
		if r := appended("a request id that is taken", dispatch.ErrRequestIDTaken, toDispatch(b, "ci", "r", "f")); r.Earlier != a {
			t.Errorf("earlier is %s", r.Earlier)
		}
		if r := appended("the same, relaxed", dispatch.ErrRequestIDTaken, dispatch.Batch{Action: b, Events: []dispatch.Event{evAccepted("ci", "r")}, Relaxed: true}); r.Earlier != a {
			t.Errorf("earlier is %s", r.Earlier)
		}
		appended("a second dispatch", dispatch.ErrIllegalTransition, dispatch.Batch{Action: a, Events: []dispatch.Event{evDispatch(1)}})
		appended("a chunk", nil, dispatch.Batch{Action: a, Chunks: chunk})
		appended("its result", nil, dispatch.Batch{Action: a, Events: []dispatch.Event{evResponse(1, 200), evResult(1, 200, 1, body, committed)}})
		appended("a chunk behind the manifest", dispatch.ErrIllegalTransition, dispatch.Batch{Action: a, Chunks: chunk})
		appended("another", nil, toDispatch(c, "ci", "", "f"))
		appended("unknown", nil, dispatch.Batch{Action: c, Events: []dispatch.Event{evResolved(1, unknown)}})
		appended("rejected after all", nil, dispatch.Batch{Action: c, Events: []dispatch.Event{evResponse(1, 429), evResolved(1, rejected)}})
		appended("repeated", nil, dispatch.Batch{Action: c, Events: []dispatch.Event{evLease(2), evRepeat(2, 2)}})
		_, got, err := j.OpenResult(bg, a)
		if err != nil {
			t.Fatal(err)
		}
		if read, err := io.ReadAll(got); err != nil || !bytes.Equal(read, body) {
			t.Errorf("the result: %d bytes, %v", len(read), err)
		}
		release()
		mustVerify(t, j)
	}
}

// A plan walks over the store: it is refused where the store lacks what it would walk over.
func TestPlanOfAStoreThatFailed(t *testing.T) {
	contract.Covers(t, "M5", "M7")
	failing := make(chan struct{})
	h := &hooks.Hooks{NoSync: true, StoreError: func(uint64) error {
		select {
		case <-failing:
			time.Sleep(300 * time.Millisecond) // the plan is on its way by then
			return errors.New("EIO")
		default:
			return nil
		}
	}}
	j, _ := openWith(t, testOptions(tempDir(t), h))
	close(failing)
	if _, err := j.Append(bg, toDispatch(newID(), "ci", "", "f")); err != nil {
		t.Fatal(err)
	}
	ran := false
	err := j.planned(func(*snapshot, *stage) ([]entry, error) {
		ran = true
		return nil, nil
	})
	if ran || err == nil {
		t.Errorf("it ran: %v, %v", ran, err)
	}
}

// A relaxed batch waits for no store: what it is behind with is read where it is.
func TestRelaxedWaitsForNoStore(t *testing.T) {
	contract.Covers(t, "F1", "M7")
	h, hang, release := hangingHooks()
	j, _ := openWith(t, testOptions(tempDir(t), h))
	defer release()
	hang()
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
	t.Run("error", func(t *testing.T) { testCarried(t, func() error { return errors.New("EIO") }) })
	t.Run("deadline", func(t *testing.T) {
		release := make(chan struct{})
		defer close(release)
		testCarried(t, func() error { <-release; return nil })
	})
}

func testCarried(t *testing.T, fail func() error) {
	hold := heldHooks()
	var left atomic.Int32
	hold.WitnessError = func(uint64) error {
		if left.Add(-1) == 0 {
			return fail()
		}
		return nil
	}
	opt := testOptions(tempDir(t), &hold.Hooks)
	opt.CommitDeadline = time.Second
	j, _ := openWith(t, opt)
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

// Tables of the large families hold nothing else: what is added overlaps with nothing that
// is there, and compactions do not write it again.
func TestTablesOfTheirOwn(t *testing.T) {
	j := openTest(t, tempDir(t), nil)
	value := make([]byte, 100<<10)
	for n := range 400 { // three times what memory holds
		id := newID()
		entries := []entry{{key: keyEvent(uint64(1<<40 + n)), value: value[:40<<10]}, {key: keyChunk(id, 1, 0), value: value[:60<<10]}, {key: keyTime(uint64(1<<40+n), id)}}
		if err := j.maintain(entries); err != nil {
			t.Fatal(err)
		}
	}
	if err := j.caughtUp(); err != nil {
		t.Fatal(err)
	}
	own, below := 0, 0
	for end := time.Now().Add(20 * time.Second); own < 4 && time.Now().Before(end); time.Sleep(20 * time.Millisecond) {
		own, below = 0, 0
		for _, table := range j.db.Tables() {
			if table.Level == 0 {
				continue // as it was in memory
			}
			below++
			first, last := table.Left[0], table.Right[0]
			for _, family := range []byte{famEvent, famChunk} {
				if first <= family && family <= last && first != last {
					t.Errorf("a table of level %d from %q to %q", table.Level, first, last)
				}
			}
			if first == last && (first == famEvent || first == famChunk) {
				own++
			}
		}
	}
	if own < 4 {
		t.Errorf("%d of %d tables below the first level are of one family", own, below)
	}
}

// opening calls then when the nth value from now on is opened.
type opening struct {
	cipher.AEAD
	left atomic.Int32
	then func()
}

func (o *opening) Open(dst, nonce, sealed, ad []byte) ([]byte, error) {
	if o.left.Add(-1) == 0 {
		o.then()
	}
	return o.AEAD.Open(dst, nonce, sealed, ad)
}

// Whoever reads while retention takes an action away finds it, or does not: what it saw in
// part is looked at again, and is no damage.
func TestReadWhileItGoes(t *testing.T) {
	contract.Covers(t, "H7", "M7")
	j := openTest(t, tempDir(t), nil)
	o := &opening{AEAD: j.seal.aead}
	j.seal.aead = o
	for n := int32(1); n <= 4; n++ {
		id := newID()
		mustAppend(t, j, toDispatch(id, "ci", "", "f"))
		mustAppend(t, j, toResult(id, []byte("x")))
		var p *projection
		if err := j.view(func(s *snapshot) (err error) {
			p, err = j.readProjection(s, id)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		o.then = func() {
			if err := j.planned(func(txn *snapshot, _ *stage) ([]entry, error) {
				out, _, err := j.everything(txn, p)
				return out, err
			}); err != nil {
				t.Error(err)
			}
		}
		o.left.Store(n) // the projection, its frames, the manifest
		_, body, err := j.OpenResult(bg, id)
		if err == nil {
			_ = body.Close()
		}
		if err != nil && !errors.Is(err, dispatch.ErrActionNotFound) {
			t.Errorf("gone at %d: %v", n, err)
		}
		o.left.Store(0)
	}
}
