package journal

import (
	"errors"
	"fmt"
	"hash/maphash"
	"math/bits"
	"sync"
	"time"

	"github.com/dgraph-io/badger/v4"

	"waybill/internal/control"
	"waybill/internal/killpoint"
)

// The store follows the witness in steps of many groups. What a request wrote and took
// back in between, an entry of the index of open actions above all, never reaches it, and
// of a record that was written twice only the last state does: that is less than half of
// the writing, and one transaction where there were hundreds. It costs no durability: the
// witness has every group before its callers hear of it, and a start makes the groups
// again that the store does not have (redo).

const (
	// behindBytes is how much is kept back: from then on the store is given it.
	behindBytes = 512 << 10
	// behindTime is how long: what a quiet journal wrote last is in the store soon.
	behindTime = 250 * time.Millisecond
)

// pending is what the store is given next, as one transaction: the sum of some groups.
// Who has it reads it; only the committer adds to it, under the lock of behind.
type pending struct {
	entries []entry
	// slots say where a key is: at the place of its hash or the next ones, up to a zero,
	// stands one more than its place in entries. At most half of them are used.
	slots   []uint32
	dropped int    // entries without a key: they came to nothing
	bytes   int64  // what a transaction of them has
	group   uint64 // the last one

	once sync.Once
	done chan struct{}
	err  error // read after done
}

// newPending makes room for as many keys as there were last time.
func newPending(keys int) *pending {
	return &pending{slots: newSlots(keys), entries: make([]entry, 0, keys), bytes: int64(endBytes), done: make(chan struct{})}
}

// newSlots returns slots for n keys at least; their number is a power of two.
func newSlots(n int) []uint32 { return make([]uint32, 1<<bits.Len(uint(2*n+63))) }

var keySeed = maphash.MakeSeed()

// slot returns where a key is, or where it would be.
func (p *pending) slot(key []byte) *uint32 {
	mask := uint64(len(p.slots) - 1)
	for i := maphash.Bytes(keySeed, key); ; i++ {
		s := &p.slots[i&mask]
		if *s == 0 || string(p.entries[*s-1].key) == string(key) {
			return s
		}
	}
}

// grow makes room for as many keys again.
func (p *pending) grow() {
	p.slots = newSlots(len(p.entries))
	for i := range p.entries {
		if key := p.entries[i].key; key != nil {
			*p.slot(key) = uint32(i + 1)
		}
	}
}

func (p *pending) empty() bool { return p.group == 0 }

// end says that the store has it, or why it never will.
func (p *pending) end(err error) {
	p.once.Do(func() {
		p.err = err
		close(p.done)
	})
}

// find returns the entry for key, if there is one.
func (p *pending) find(key []byte) *entry {
	if p == nil {
		return nil
	}
	if s := *p.slot(key); s != 0 {
		return &p.entries[s-1]
	}
	return nil
}

// put adds an entry, in the place of an earlier one for its key.
func (p *pending) put(e *entry) {
	s := p.slot(e.key)
	if *s == 0 {
		p.entries = append(p.entries, *e)
		p.bytes += e.bytes()
		if *s = uint32(len(p.entries)); 2*len(p.entries) > len(p.slots) {
			p.grow()
		}
		return
	}
	old := &p.entries[*s-1]
	p.bytes -= old.bytes()
	if e.remove && old.fresh {
		*old = entry{} // found by nobody any more, but stepped over
		p.dropped++
		return
	}
	// Whether the store has the key is as it was when this step met it first.
	fresh := old.fresh
	*old = *e
	old.fresh = fresh
	p.bytes += e.bytes()
}

// fits says whether a transaction of the store holds what is there and these.
func (p *pending) fits(entries []entry, maxBytes, maxCount int64) bool {
	bytes := p.bytes
	for i := range entries {
		bytes += entries[i].bytes()
	}
	return bytes < maxBytes && p.count()+int64(len(entries))+1 < maxCount
}

// add takes a group.
func (p *pending) add(entries []entry, group uint64) {
	p.group = group
	for i := range entries {
		p.put(&entries[i])
	}
}

// count is the number of entries that are written.
func (p *pending) count() int64 { return int64(len(p.entries) - p.dropped) }

// behind is what the store is behind with: filling takes the groups that become durable,
// storing is on its way. Together with view they are the journal's state.
type behind struct {
	mu      sync.Mutex
	filling *pending
	storing *pending // nil: the store has everything before filling
	// view is of the store with everything before storing. All readers share it: Badger makes
	// who opens one wait for every commit that has begun, also one that hangs.
	view    *storeView
	open    func() *badger.Txn
	due     bool  // filling is to be taken now
	failed  error // the store will have nothing more before the next start
	closing bool
	taken   sync.Cond // filling was taken, or never will be
	wake    chan struct{}
	age     *time.Timer
}

// storeView is a read transaction of several readers.
type storeView struct {
	*badger.Txn
	users int // under the lock of behind
}

// newBehind is called while nobody writes to the store.
func newBehind(open func() *badger.Txn) *behind {
	b := &behind{filling: newPending(0), open: open, view: &storeView{open(), 1}, wake: make(chan struct{}, 1)}
	b.taken.L = &b.mu
	b.age = time.AfterFunc(time.Hour, b.hurry)
	b.age.Stop()
	return b
}

// hurry makes the store take what there is.
func (b *behind) hurry() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.now()
}

// now is hurry for who has the lock.
func (b *behind) now() {
	b.due = true
	select {
	case b.wake <- struct{}{}:
	default:
	}
}

// acquire returns what a reader has to look through before the store, newest first, and a
// view of the store that has everything that is in neither: one moment of the journal, but
// for what is added to the first. It waits for no store; nil: the journal is closed. Whoever
// has a view must release it.
func (b *behind) acquire() (p [2]*pending, v *storeView) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.view != nil {
		b.view.users++
	}
	return [2]*pending{b.filling, b.storing}, b.view
}

func (b *behind) release(v *storeView) {
	b.mu.Lock()
	defer b.mu.Unlock()
	v.left()
}

// left is told of one user less.
func (v *storeView) left() {
	if v.users--; v.users == 0 {
		v.Discard()
	}
}

// add takes a durable group. It waits while what there is and the group do not fit into one
// transaction of the store.
func (b *behind) add(entries []entry, group uint64, maxBytes, maxCount int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.failed == nil && !b.filling.empty() && !b.filling.fits(entries, maxBytes, maxCount) {
		b.now()
		b.taken.Wait()
	}
	p := b.filling
	if p.empty() {
		b.age.Reset(behindTime)
	}
	p.add(entries, group)
	if p.bytes >= behindBytes {
		b.now()
	}
}

// take hands over what is due; nil when nothing is. last: nothing will follow.
func (b *behind) take() (p *pending, last bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.filling.empty() || b.failed != nil || !b.due && !b.closing {
		return nil, b.closing
	}
	b.due = false
	b.storing, b.filling = b.filling, newPending(len(b.filling.entries))
	b.age.Stop()
	b.taken.Broadcast()
	return b.storing, b.closing
}

// stored is told that the store has what it took last. It returns the version of the store
// that has it; 0: it is closed.
func (b *behind) stored() (version uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.storing = nil
	if b.view == nil {
		return 0
	}
	b.view.left()
	b.view = &storeView{b.open(), 1} // no commit runs: this one has ended, and the next waits for the lock
	return b.view.ReadTs()
}

// fail says that the store gets nothing more: not what it was given, and not what waits.
func (b *behind) fail(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.failed == nil {
		b.failed = err
	}
	if b.storing != nil {
		b.storing.end(b.failed)
	}
	b.filling.end(b.failed)
	b.taken.Broadcast()
}

// close lets the goroutine that follows end when it has given the store what there is.
func (b *behind) close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closing = true
	b.age.Stop()
	b.now()
}

// shut is called before the store is closed: nobody reads it any more.
func (b *behind) shut() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.view != nil {
		b.view.left()
		b.view = nil
	}
}

// wait returns when the store has every group that was added so far.
func (b *behind) wait() error {
	b.mu.Lock()
	p, err := b.filling, b.failed
	if p.empty() {
		p = b.storing
	} else {
		b.now()
	}
	b.mu.Unlock()
	switch {
	case err != nil:
		return err
	case p == nil:
		return nil
	}
	<-p.done
	return p.err
}

// broken says why the store will have nothing more.
func (b *behind) broken() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.failed
}

// caughtUp waits until the store has every group whose callers were told of it. What it
// holds before that must not be read without what it is behind with: an action that was
// handed over could look as if it had not been. Its error is final: the store will not
// have the group before the next start makes it again (CONTRACT M7).
func (j *Journal) caughtUp() error {
	if b := j.c.behind; b != nil {
		if err := b.wait(); err != nil {
			return fmt.Errorf("%w: %w", errStoreFailed, err)
		}
	}
	return j.storeIntact()
}

// storeIntact says whether the store may be read at all.
func (j *Journal) storeIntact() error {
	if j.store.fatal.Load() {
		return fmt.Errorf("%w: it reports lost data", errStoreFailed)
	}
	return nil
}

// follow hands a durable group on to the store. Its callers need not wait for that: the
// store is not synced, so that it adds nothing to what survives, and nobody reads it
// without what it is behind with.
func (j *Journal) follow(st *stage) {
	j.c.behind.add(st.entries, st.head.group, j.db.MaxBatchSize(), j.db.MaxBatchCount())
}

// storer is the goroutine that follows. A store that fails, or hangs, stops the journal:
// its groups are durable, and the next start makes them again.
func (j *Journal) storer() {
	b := j.c.behind
	for range b.wake {
		for {
			p, last := b.take()
			if p == nil {
				if last {
					return
				}
				break
			}
			if err := j.storePending(p); err != nil {
				b.fail(err) // first: whoever sees the stop reads no more
				j.stop(err)
				return
			}
			if version := b.stored(); version > 0 {
				j.c.settled.stored(version, p.group)
			}
			p.end(nil)
		}
	}
}

func (j *Journal) storePending(p *pending) error {
	deadline := time.AfterFunc(j.opt.CommitDeadline, func() {
		err := errors.New("journal: the commit deadline passed")
		j.c.behind.fail(err)
		j.stop(err)
	})
	defer deadline.Stop()
	killpoint.At(PointBetween)
	if j.hooks.StoreError != nil {
		if err := j.hooks.StoreError(p.group); err != nil {
			return err
		}
	}
	if err := j.put(p.entries); err != nil {
		return err
	}
	if j.store.fatal.Load() {
		return errors.New("journal: the store reports lost data")
	}
	killpoint.At(PointStored)
	return nil
}

// snapshot is a read transaction. The committer's, and one of peek, see key by key what
// the store is behind with, too; others wait for the store first (view). Its iterators see
// the store only.
type snapshot struct {
	*badger.Txn
	behind [2]*pending // newest first
	// adding is held to look at the first, while somebody may add to it; nil: nobody does.
	adding *sync.Mutex
}

// pending returns the entry that stands before the store's own; found is false when the
// store's is valid.
func (s *snapshot) pending(key []byte) (e entry, found bool) {
	if s.adding != nil {
		s.adding.Lock()
		defer s.adding.Unlock()
	}
	for _, p := range s.behind {
		if e := p.find(key); e != nil {
			return *e, true
		}
	}
	return entry{}, false
}

// committing runs f on the journal's state, the groups included that the store does not
// have yet. Only the committer may call it: nobody else may read what it adds to.
func (j *Journal) committing(f func(*snapshot) error) error {
	if err := j.storeIntact(); err != nil {
		return err
	}
	s, done, err := j.moment()
	if err != nil {
		return err
	}
	defer done()
	return f(s)
}

// moment returns the journal's state of now, and what to call when it is not read any more.
// It waits for nothing, and does not ask whether the store is intact.
func (j *Journal) moment() (s *snapshot, done func(), err error) {
	if j.db.IsClosed() {
		return nil, nil, ErrClosed
	}
	b := j.c.behind
	if b == nil {
		txn := j.db.NewTransaction(false)
		return &snapshot{Txn: txn}, txn.Discard, nil
	}
	p, v := b.acquire()
	if v == nil {
		return nil, nil, ErrClosed
	}
	return &snapshot{Txn: v.Txn, behind: p}, func() { b.release(v) }, nil
}

// peek runs f on the journal's state, as committing does for the committer: f reads single
// keys, and waits for no store. What is added meanwhile it may see in part – an action that
// retention takes away – so that what then looks damaged is looked at again, all at one
// moment. f may run twice.
func (j *Journal) peek(f func(*snapshot) error) error {
	b := j.c.behind
	if b == nil {
		return j.view(f)
	}
	if err := b.broken(); err != nil {
		return fmt.Errorf("%w: %w", errStoreFailed, err)
	}
	if err := j.storeIntact(); err != nil {
		return err
	}
	s, done, err := j.moment()
	if err != nil {
		return err
	}
	s.adding = &b.mu
	err = f(s)
	done()
	if damaged := (*CorruptError)(nil); errors.As(err, &damaged) {
		return j.view(f)
	}
	return err
}

// view runs f in a read transaction, which holds everything that anybody was told of.
func (j *Journal) view(f func(*snapshot) error) error {
	if !control.Off("M7-reads-wait-for-the-store") {
		if err := j.caughtUp(); err != nil {
			return err
		}
	}
	s, done, err := j.storeOnly()
	if err != nil {
		return err
	}
	defer done()
	return f(s)
}

// storeOnly is a moment of what the store has by itself.
func (j *Journal) storeOnly() (s *snapshot, done func(), err error) {
	if s, done, err = j.moment(); err == nil {
		s.behind = [2]*pending{}
	}
	return s, done, err
}
