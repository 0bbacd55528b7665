package journal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"reflect"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/crypto/chacha20poly1305"

	"waybill/dispatch"
	"waybill/internal/killpoint"
)

const (
	maxGroupRequests = 512
	maxGroupBytes    = 512 << 10
	// maxGroupRecords bounds the witness records of a group, which must fit in one
	// segment.
	maxGroupRecords = 1024
	// headBytes is what the head and a checkpoint add to a transaction.
	headBytes = 512
	// endBytes is what Badger holds back for the entry with which it ends a transaction, its
	// key and 10 more; it counts that one as an entry, too (NewTransaction in its txn.go).
	endBytes = len("!badger!txn") + 10
)

// The places where a crash test can end the process (package killpoint).
const (
	// PointBeforeStore: the group is decided, nothing of it was written.
	PointBeforeStore = "before-store"
	// PointAfterDurable: the group is durable, nobody was told.
	PointAfterDurable = "after-durable"
	// PointBetween: the store does not have it yet; its callers may know of it.
	PointBetween = "between-witness-and-store"
	// PointStored: the store has it in memory, nobody was told.
	PointStored = "stored"
	// PointFlushed: a table has it, what is settled was not said to have changed.
	PointFlushed = "flushed"
	// PointRedone: a start has made some groups again.
	PointRedone = "redone"
	// PointSettled: a start has made the store durable, the witness does not say so.
	PointSettled = "settled"
)

// committer is the state of the one goroutine that writes.
type committer struct {
	head       head
	checkpoint head // the last one that is durable
	// settled is the last group that is durable in the store itself: what is after it
	// can be made again from the witness only.
	settled  settled
	settling atomic.Bool // settle runs in the background
	counted  uint64      // syncs that Metrics was told of
	// open holds the projections of the actions that have not ended, as stored: the
	// ones that will be asked for again. It is a cache of the store.
	open    map[dispatch.ActionID]*projection
	begun   begun
	witness *witness

	behind *behind // what the store does not have yet
	// entries and one are kept between groups: the memory of a group's entries, and of one
	// request's. So are witnessed and named, of what the witness names.
	entries, one     []entry
	witnessed, named []witnessRecord
	keys             []byte // where key puts the next one
	// writers are the goroutines that may be in a system call: the committer, the one that
	// follows with the store, and settle's.
	writers sync.WaitGroup
}

// job is a group on its way to the disk.
type job struct {
	// taken: it is settled who answers the group's requests, the committer or, at the
	// deadline, overdue.
	taken    atomic.Bool
	included []*request
	carry    []*request
	group    loggedGroup
	entries  []entry
	base     head // before it
	// checkpoint is the group of the last one before it.
	checkpoint uint64
}

// stage is a group in the making.
type stage struct {
	head    head
	entries []entry
	bytes   int64
	witness []witnessRecord
	// changed are the projections of this group, and taken its request ids, for the
	// requests that follow in it.
	changed  map[dispatch.ActionID]*projection
	taken    map[string]dispatch.ActionID
	requests int // at most
	events   int
	// checkpoint: it ends with one. A BOOT event marks what its start has walked as walked.
	checkpoint bool
}

// run is the committer's goroutine. One that comes back from the disk after the deadline
// finds that somebody else has ended in its place.
func (j *Journal) run() {
	j.loadBegun()
	if j.commits() {
		j.end()
	}
}

// end is the last that a committer does, or overdue in its place.
func (j *Journal) end() {
	j.c.behind.close()
	close(j.finished)
}

// commits is the committer: nobody else assigns sequence numbers. It returns when the
// journal is closed; false: overdue goes on from where it hung.
func (j *Journal) commits() bool {
	var carry []*request
	shared := 0 // requests of the group before
	for {
		group := carry
		if len(group) == 0 {
			select {
			case r := <-j.queue:
				if group = append(group, r); r.relaxed {
					j.unhurried()
				}
			case <-j.closing:
				select {
				case r := <-j.queue:
					group = append(group, r)
				default:
					return j.finalCheckpoint()
				}
			case <-j.poisoned:
				j.drain()
				return true
			}
		}
		bytes := int64(0)
		for _, r := range group {
			bytes += r.size()
		}
		// The running sync is the batching window: take what came meanwhile, wait for
		// nothing. Where many shared the group before and few are here, those who were
		// released by it are on their way: they get a turn each, and no time.
		for turns := 0; ; turns++ {
		fill:
			for len(group) < maxGroupRequests && bytes < maxGroupBytes {
				select {
				case r := <-j.queue:
					group = append(group, r)
					bytes += r.size()
				default:
					break fill
				}
			}
			if turns == 6 || 4*len(group) >= 3*shared {
				break
			}
			runtime.Gosched()
		}
		shared = len(group)
		ours := false
		if carry, ours = j.commit(group); !ours {
			return false
		}
		if j.Cause() != nil {
			for _, r := range carry {
				j.answerQueued(r, dispatch.ErrIndeterminate)
			}
			j.drain()
			return true
		}
	}
}

// relaxedWait is how long relaxed requests wait for others to share their sync with: nobody
// waits for them (F1).
const relaxedWait = time.Millisecond

// unhurried returns after that time, or when somebody comes who does wait.
func (j *Journal) unhurried() {
	t := time.NewTimer(relaxedWait)
	defer t.Stop()
	select {
	case <-t.C:
	case <-j.hurry:
	case <-j.closing:
	case <-j.poisoned:
	}
}

// drain answers everyone after an indeterminate commit, until the journal is closed.
func (j *Journal) drain() {
	for {
		select {
		case r := <-j.queue:
			j.answerQueued(r, dispatch.ErrIndeterminate)
		case <-j.closing:
			for {
				select {
				case r := <-j.queue:
					j.answerQueued(r, dispatch.ErrIndeterminate)
				default:
					return
				}
			}
		}
	}
}

func (j *Journal) answerQueued(r *request, err error) {
	r.take()
	j.answer(r, err)
}

// answer releases one request that left the queue; it is called once for each.
func (j *Journal) answer(r *request, err error) {
	j.budget.release(r.held)
	// A journal that has stopped projects nothing more, and its callers wait for no reader.
	if rec := r.rec; (r.relaxed || len(r.events) > 0) && j.Cause() == nil {
		if err != nil {
			rec = nil
		}
		j.relaxed.done(r.action, r.relaxed, rec)
	}
	if r.relaxed {
		if err != nil {
			// Nobody waits for this answer.
			j.stats.relaxedLost.Add(1)
			j.log.Error("a relaxed batch was not written", slog.String("action", r.action.String()), slog.Any("error", err))
			j.refused(err)
		}
	}
	r.release(err)
}

// commit writes one group and answers its requests; it returns those that did not
// fit. ours is false when the deadline passed meanwhile and overdue has answered them. A
// crash before it returns costs: nothing for who has been answered; for the
// others the group is there, or not, or torn, and then its blocks say which actions
// may be (FORMAT.md, torn cases).
func (j *Journal) commit(group []*request) (carry []*request, ours bool) {
	started := time.Now()
	c := &j.c
	st := &stage{head: head{seq: c.head.seq, hash: c.head.hash, group: c.head.group + 1}, entries: c.entries[:0], witness: c.witnessed[:0], requests: len(group)}
	defer c.keep(st)
	included := make([]*request, 0, len(group))
	g := Group{}
	j.space.renew(j)
	var lacking error
	if slices.ContainsFunc(group, func(r *request) bool { return r.plan != nil }) {
		lacking = j.caughtUp() // a plan walks over the store: it has to be there
	}
	err := j.committing(func(txn *snapshot) error {
		for i, r := range group {
			if r.state.Load() != stateTaken && !r.take() {
				j.answer(r, nil) // the caller has left: nothing of it is written
				continue
			}
			if r.call != nil {
				j.answer(r, r.call())
				continue
			}
			if r.plan != nil && lacking != nil {
				j.answer(r, fmt.Errorf("%w: %w", dispatch.ErrNotWritten, lacking))
				continue
			}
			fits, err := j.stage(txn, st, r)
			switch {
			case err != nil:
				j.answer(r, err)
			case !fits && len(included) > 0:
				carry = append(carry, group[i:]...)
				return nil
			case !fits:
				j.answer(r, ErrTooLarge)
			default:
				included = append(included, r)
				g.Requests++
				g.Wait = max(g.Wait, started.Sub(r.entered))
			}
		}
		return nil
	})
	if err != nil {
		// The store is closed, or has failed: nothing of the group was looked at.
		for _, r := range group {
			r.take()
			j.answer(r, fmt.Errorf("%w: %w", dispatch.ErrNotWritten, err))
		}
		return nil, true
	}
	if len(included) == 0 {
		return carry, true
	}
	if err := j.finish(st); err != nil {
		// Nothing was handed to the disk: a definite refusal.
		for _, r := range included {
			j.answer(r, fmt.Errorf("%w: %w", dispatch.ErrNotWritten, err))
		}
		return carry, true
	}
	if j.hooks.BeforeCommit != nil {
		j.hooks.BeforeCommit(st.head.group)
	}
	killpoint.At(PointBeforeStore)
	took, ours, err := j.write(st, included, carry)
	if !ours {
		return nil, false
	}
	if err != nil {
		j.stop(err)
		for _, r := range included {
			j.answer(r, fmt.Errorf("%w: %w", dispatch.ErrIndeterminate, err))
		}
		return carry, true
	}
	killpoint.At(PointAfterDurable)
	c.head = st.head
	if st.checkpoint {
		c.checkpoint = c.head
	}
	for id, p := range st.changed {
		if p.rec.Ended {
			delete(c.open, id)
		} else {
			c.open[id] = p
		}
	}
	g.Events, g.Bytes, g.Witness, g.Syncs = st.events, st.bytes, took, int(j.stats.syncs.Load()-c.counted)
	c.counted += uint64(g.Syncs)
	g.Total = time.Since(started)
	j.stats.committed(&g, c.head, len(c.open), len(included))
	j.follow(st)
	j.opt.Metrics.GroupCommitted(g)
	for _, r := range included {
		if len(r.events) > 0 && !r.boot {
			j.opt.Metrics.Applied(r.before, r.rec, r.events)
			j.watch.publish(r.rec)
		}
		j.answer(r, nil)
	}
	// Who was just released gets a chance to come back with the next step before the
	// next group is closed.
	runtime.Gosched()
	return carry, true
}

// keep keeps the memory of a group's entries for the next one, and nothing of what they held.
func (c *committer) keep(st *stage) {
	clear(st.entries)
	if c.entries = st.entries[:0]; cap(c.entries) > maxKeptEntries {
		c.entries = nil
	}
	clear(c.one[:cap(c.one)])
	if cap(c.one) > maxKeptEntries {
		c.one = nil
	}
	c.witnessed = st.witness[:0] // not more than maxGroupRecords
}

// key returns a key in memory of its own, together with others: they are of no use any
// more at about the same time, when the store has them.
func (c *committer) key(key []byte) []byte {
	if cap(c.keys)-len(c.keys) < len(key) {
		c.keys = make([]byte, 0, keysBytes)
	}
	n := len(c.keys)
	c.keys = append(c.keys, key...)
	return c.keys[n:len(c.keys):len(c.keys)]
}

// keysBytes is for the keys of some twenty requests.
const keysBytes = 4 << 10

// maxKeptEntries bounds that memory.
const maxKeptEntries = 4096

// stage adds one request to the group, or none of it. fits is false when the group
// has to be closed before it.
func (j *Journal) stage(txn *snapshot, st *stage, r *request) (fits bool, err error) {
	if r.maint != nil || r.plan != nil {
		if !r.recovering {
			if err := j.space.write(j); err != nil {
				return false, err
			}
		}
		entries := r.maint
		if r.plan != nil {
			if entries, err = r.plan(txn, st); err != nil {
				return false, err
			}
		}
		if fits = st.fits(entries, nil); fits {
			st.merge(r, entries, nil, nil, st.head)
		}
		return fits, nil
	}
	if r.boot {
		key := keyEvent(st.head.seq + 1)
		entries := []entry{{key: key, value: r.frame[:len(r.frame)+chacha20poly1305.Overhead]}}
		if r.also != nil {
			entries = append(entries, r.also(st.head.seq+1)...)
		}
		if !st.fits(entries, nil) {
			return false, nil
		}
		st.checkpoint = st.checkpoint || r.also == nil
		h := st.head
		entries[0].value = r.seal(j.seal, key, &h.hash, j.boot)
		h.seq, h.hash = h.seq+uint64(len(r.events)), chain(key, entries[0].value)
		st.merge(r, entries, nil, nil, h)
		return true, nil
	}
	old, err := j.before(txn, st, r)
	if err != nil {
		return false, fmt.Errorf("%w: %w", dispatch.ErrNotWritten, err)
	}
	next := &projection{}
	if old != nil {
		next.rec = old.rec
		r.before = &old.rec
	}
	next.rec.ID = r.action
	h := st.head
	records := j.c.named[:0]
	defer func() { j.c.named = records[:0] }()
	if next.rec, err = dispatch.ApplyAll(next.rec, r.events, h.seq+1); err != nil {
		if old != nil {
			r.rec = &old.rec
		}
		return false, err
	}
	for i := range r.events {
		h.seq++
		if ev := &r.events[i]; witnessed(ev.Type) {
			records = append(records, witnessRecord{kind: kindEvent, typ: ev.Type, attempt: uint32(max(ev.Attempt, 0)), seq: h.seq, action: r.action})
		}
	}
	if err := j.admissible(txn, st, r, old, &next.rec); err != nil {
		return false, err
	}
	entries := j.c.one[:0]
	defer func() { j.c.one = entries[:0] }()
	if len(r.events) > 0 {
		first := st.head.seq + 1
		if old != nil {
			next.frames = append(make([]uint64, 0, len(old.frames)+1), old.frames...)
		}
		next.frames = append(next.frames, first)
		var room [1 + (1+briefFrames)*binary.MaxVarintLen64]byte
		var places, rec []byte
		if next.shorten(old, r.text); next.brief {
			places = next.places(room[:0])
		} else if places, rec, err = next.parts(); err != nil {
			return false, fmt.Errorf("%w: projection cannot be encoded", dispatch.ErrNotWritten)
		}
		if n := len(places) + len(rec); n > maxStoredValue-sealOverhead {
			return false, fmt.Errorf("%w: projection of %d bytes", ErrTooLarge, n)
		}
		pkey := j.c.key(keyAction(famRecord, r.action))
		// The frame is sealed at last, in place: a request that does not fit comes again.
		entries = append(entries, entry{key: j.c.key(keyEvent(first)), value: r.frame[:len(r.frame)+chacha20poly1305.Overhead]}, entry{key: pkey, value: j.seal.seal(pkey, nil, places, rec)})
		entries = j.indexes(entries, r, old, next)
	}
	if entries, err = j.placed(txn, st, entries, r); err != nil {
		return false, fmt.Errorf("%w: %w", dispatch.ErrNotWritten, err)
	}
	entries = releaseHeld(entries, r.action, old, next)
	for i := range r.events {
		if ev := &r.events[i]; ev.Type == dispatch.ResultCommitted {
			m := &manifest{Bytes: ev.Result.Bytes, Chunks: ev.Result.Chunks, Digest: ev.Result.Digest}
			if !ev.Result.ExpiresAt.IsZero() {
				m.Expires = max(ev.Result.ExpiresAt.UnixMilli(), 1)
				entries = append(entries, entry{key: j.c.key(keyExpiry(m.Expires, r.action, ev.Attempt))})
			}
			mkey := j.c.key(keyManifest(r.action, ev.Attempt))
			entries = append(entries, entry{key: mkey, value: j.seal.sealManifest(mkey, m)})
		}
	}
	if !st.fits(entries, records) {
		return false, nil
	}
	r.rec = &next.rec
	if len(r.events) > 0 {
		e := &entries[0]
		e.value = r.seal(j.seal, e.key, &st.head.hash, j.boot)
		h.hash = chain(e.key, e.value)
	} else {
		next = nil
	}
	st.merge(r, entries, next, records, h)
	if old == nil {
		j.c.begun.add(r.action)
	}
	return true, nil
}

// fits reports whether the group has room for what a request writes.
func (st *stage) fits(entries []entry, records []witnessRecord) bool {
	return st.bytes+bytesOf(entries)+headBytes < maxTxnBytes && len(st.entries)+len(entries) <= 12000 && len(st.witness)+len(records) <= maxGroupRecords
}

func bytesOf(entries []entry) (n int64) {
	for i := range entries {
		n += entries[i].bytes()
	}
	return n
}

// merge adds what a request wrote to the group, which has room for it.
func (st *stage) merge(r *request, entries []entry, p *projection, records []witnessRecord, h head) {
	st.bytes += bytesOf(entries)
	st.events += int(h.seq - st.head.seq)
	st.head = h
	st.entries = append(st.entries, entries...)
	st.witness = append(st.witness, records...)
	if p != nil {
		if st.changed == nil {
			st.changed = make(map[dispatch.ActionID]*projection, st.requests)
		}
		st.changed[r.action] = p
	}
	if r.request != nil {
		if st.taken == nil {
			st.taken = make(map[string]dispatch.ActionID)
		}
		st.taken[string(r.request)] = r.action
	}
	if r.key != nil {
		if st.taken == nil {
			st.taken = make(map[string]dispatch.ActionID)
		}
		st.taken[string(r.key)] = r.action
	}
}

// before returns what current does for the action of a request. For one that begins an
// action the store is asked only where begun does not know that there is nothing.
func (j *Journal) before(txn *snapshot, st *stage, r *request) (*projection, error) {
	if len(r.events) == 0 || r.events[0].Type != dispatch.ActionAccepted || !j.c.begun.absent(r.action) {
		return j.current(txn, st, r.action)
	}
	if j.hooks.CheckCache {
		if p, err := j.current(txn, st, r.action); p != nil || err != nil {
			panic("journal: an action is on record that is said to be absent")
		}
	}
	return nil, nil //nolint:nilnil // no projection and no error: there is none
}

// current returns the action's projection as of this point of the group, or nil.
func (j *Journal) current(txn *snapshot, st *stage, id dispatch.ActionID) (*projection, error) {
	if p := st.changed[id]; p != nil {
		return p, nil
	}
	cached := j.c.open[id]
	if cached != nil && !j.hooks.CheckCache {
		return cached, nil
	}
	p, err := j.readProjection(txn, id)
	if err != nil {
		return nil, err
	}
	if j.hooks.CheckCache && (cached != nil) != (p != nil && !p.rec.Ended) || cached != nil && !equalProjection(cached, p) {
		panic("journal: cache of open actions differs from the store")
	}
	return p, nil
}

// equalProjection compares what is stored, not how it is held.
func equalProjection(a, b *projection) bool {
	x, errX := encodeProjection(a)
	y, errY := encodeProjection(b)
	return errX == nil && errY == nil && reflect.DeepEqual(x, y)
}

// admissible checks what Apply does not know: the request id, the space, and that a
// result's chunks are where its manifest will say.
func (j *Journal) admissible(txn *snapshot, st *stage, r *request, old *projection, rec *dispatch.Record) error {
	if r.request != nil {
		holder, held := st.taken[string(r.request)]
		if !held {
			v, found, err := get(txn, r.request)
			if err != nil {
				return fmt.Errorf("%w: %w", dispatch.ErrNotWritten, err)
			}
			if found {
				if len(v) != len(holder) {
					return fmt.Errorf("%w: %w", dispatch.ErrNotWritten, &CorruptError{What: "index of request ids", Key: r.request})
				}
				holder, held = dispatch.ActionID(v), true
			}
		}
		if held {
			r.earlier = holder
			return dispatch.ErrRequestIDTaken
		}
	}
	if err := j.takeKey(txn, st, r, old, rec); err != nil {
		return err
	}
	if !r.recovering {
		// What ends an action is written as long as it can be, down to the hard floor;
		// what begins one, or crosses the boundary, needs room for its end (M5, H8).
		if err := j.space.write(j); err != nil {
			return err
		}
		for i := range r.events {
			if t := r.events[i].Type; t == dispatch.ActionAccepted || t == dispatch.DispatchStarted || t == dispatch.TunnelOpened {
				if err := j.space.check(j); err != nil {
					return err
				}
				break
			}
		}
	}
	if err := j.admissibleHeld(txn, st, r, old, rec); err != nil {
		return err
	}
	for _, p := range r.parts {
		if p.attempt == dispatch.HeldRequest {
			continue
		}
		a := attemptOf(rec, p.attempt)
		if a == nil || a.DispatchSeq == 0 {
			return fmt.Errorf("%w: chunk of an attempt that was not dispatched", dispatch.ErrIllegalTransition)
		}
	}
	for i := range r.parts {
		// A chunk behind a manifest is never replaced. Whoever is written a manifest has ended.
		if old == nil {
			continue
		}
		if a := attemptOf(&old.rec, r.parts[i].attempt); a == nil || !a.Ended {
			continue
		}
		if _, found, err := has(txn, keyManifest(r.action, r.parts[i].attempt)); err != nil {
			return fmt.Errorf("%w: %w", dispatch.ErrNotWritten, err)
		} else if found || st.hasManifest(r.action, r.parts[i].attempt) {
			return fmt.Errorf("%w: the attempt's result is on record", dispatch.ErrIllegalTransition)
		}
	}
	for i := range r.events {
		if ev := &r.events[i]; ev.Type == dispatch.ResultCommitted {
			if err := j.complete(txn, st, r, ev); err != nil {
				return err
			}
		}
	}
	return nil
}

// hasManifest reports whether this group already holds the manifest.
func (st *stage) hasManifest(id dispatch.ActionID, attempt int) bool {
	if st.changed[id] == nil {
		return false
	}
	key := string(keyManifest(id, attempt))
	for i := range st.entries {
		if string(st.entries[i].key) == key {
			return true
		}
	}
	return false
}

func attemptOf(r *dispatch.Record, n int) *dispatch.Attempt {
	for i := range r.Attempts {
		if r.Attempts[i].N == n {
			return &r.Attempts[i]
		}
	}
	return nil
}

// complete checks that the chunks a result counts are stored, or in this batch:
// every number once, the bytes adding up. Their content is verified when read.
func (j *Journal) complete(txn *snapshot, st *stage, r *request, ev *dispatch.Event) error {
	res := ev.Result
	if res.Chunks < 0 || res.Bytes < 0 {
		return fmt.Errorf("%w: result with negative counts", dispatch.ErrNotWritten)
	}
	here := make(map[int]part, len(r.parts))
	for _, p := range r.parts {
		if p.attempt != ev.Attempt {
			continue
		}
		if p.index >= res.Chunks {
			return fmt.Errorf("%w: a chunk beyond the result's last", dispatch.ErrNotWritten)
		}
		here[p.index] = p
	}
	total := int64(0)
	for i := range res.Chunks {
		if p, ok := here[i]; ok {
			if p.last != (i == res.Chunks-1) {
				return fmt.Errorf("%w: last chunk is not marked, or another is", dispatch.ErrNotWritten)
			}
			total += int64(p.bytes)
			continue
		}
		size, found, err := chunkSize(txn, keyChunk(r.action, ev.Attempt, i))
		if err != nil {
			return fmt.Errorf("%w: %w", dispatch.ErrNotWritten, err)
		}
		if !found {
			if size, found = st.chunkSize(keyChunk(r.action, ev.Attempt, i)); !found {
				return fmt.Errorf("%w: chunk %d of the result is missing", dispatch.ErrNotWritten, i)
			}
		}
		total += chunkBytes(size)
	}
	if total != res.Bytes {
		return fmt.Errorf("%w: the chunks hold %d bytes, the result counts %d", dispatch.ErrNotWritten, total, res.Bytes)
	}
	return nil
}

// indexes adds the index entries that this step changes. They are a function of the
// two projections, so that Verify can tell which ones must exist.
func (j *Journal) indexes(entries []entry, r *request, old, next *projection) []entry {
	rec := &next.rec
	if old == nil {
		entries = append(entries, entry{key: j.c.key(keyTime(rec.FirstSeq, r.action))})
		if rec.Caller != "" {
			entries = append(entries, entry{key: j.c.key(keyCaller(r.caller, rec.FirstSeq, r.action))})
		}
	}
	if r.request != nil {
		entries = append(entries, entry{key: r.request, value: append([]byte(nil), r.action[:]...)})
	}
	entries = j.keyEntries(entries, r, old, next)
	wasOpen := old != nil && !old.rec.Ended
	switch {
	case !rec.Ended && !wasOpen:
		entries = append(entries, entry{key: j.c.key(keyAction(famOpen, r.action)), fresh: true})
	case rec.Ended && wasOpen:
		entries = append(entries, entry{key: j.c.key(keyAction(famOpen, r.action)), remove: true})
	}
	wasDoubtful, doubtful := old != nil && old.rec.Doubtful(), rec.Doubtful()
	switch {
	case doubtful && !wasDoubtful:
		entries = append(entries, entry{key: j.c.key(keyAction(famDoubt, r.action)), fresh: true})
	case !doubtful && wasDoubtful:
		entries = append(entries, entry{key: j.c.key(keyAction(famDoubt, r.action)), remove: true})
	}
	if rec.GuardsRepeats() && (old == nil || !old.rec.GuardsRepeats()) {
		// By the sequence of its ending, so that the latest ending is found first. Never
		// removed: a stale entry is harmless, the projection is read again.
		mac := j.seal.mac(macGuard, rec.Caller, rec.Bound.Fingerprint)
		j.absence.add(&mac)
		entries = append(entries, entry{key: j.c.key(keyLatest(famGuard, mac, rec.LastSeq, r.action))})
	}
	if to := rec.RedirectKey(); to != "" && (old == nil || old.rec.RedirectKey() != to) {
		mac := j.seal.mac(macGoto, rec.Caller, to)
		j.absence.add(&mac)
		entries = append(entries, entry{key: j.c.key(keyLatest(famRedirect, mac, rec.LastSeq, r.action))})
	}
	return entries
}

// finish adds what every group ends with, and checks that the store will take it as one
// transaction. An error means that nothing was written.
func (j *Journal) finish(st *stage) error {
	hv := encodeHead(st.head)
	st.entries = append(st.entries, entry{key: keyHead, value: j.seal.seal(keyHead, nil, hv)})
	every := uint64(checkpointEvery)
	if j.hooks.CheckpointEvery > 0 {
		every = j.hooks.CheckpointEvery
	}
	st.checkpoint = st.checkpoint || st.head.seq-j.c.checkpoint.seq >= every || j.c.witness != nil && j.c.witness.crowded(j.c.checkpoint.group)
	if st.checkpoint {
		st.entries = append(st.entries, entry{key: keyCheckpoint, value: j.seal.seal(keyCheckpoint, nil, hv)})
	}
	bytes := int64(endBytes)
	for i := range st.entries {
		e := &st.entries[i]
		if len(e.value) > maxStoredValue {
			return ErrTooLarge
		}
		bytes += e.bytes()
	}
	// Badger's own limits, which its transaction would name only after the witness has it: then
	// no start could make the group again.
	if bytes >= j.db.MaxBatchSize() || int64(len(st.entries))+1 >= j.db.MaxBatchCount() {
		return ErrTooLarge
	}
	return nil
}

// put writes entries into the store, as one transaction; those without a key came to nothing.
func (j *Journal) put(entries []entry) error {
	txn := j.db.NewTransaction(true)
	defer txn.Discard()
	for i := range entries {
		e := &entries[i]
		var err error
		if e.key == nil {
			continue
		}
		if e.remove {
			err = txn.Delete(e.key)
		} else {
			err = txn.Set(e.key, e.value)
		}
		if err != nil {
			return &storeError{"prepare"}
		}
	}
	if err := txn.Commit(); err != nil {
		return &storeError{"commit"}
	}
	return nil
}

// write makes the group durable in the witness. Any error is indeterminate. ours is false
// when it took longer than the deadline: then the requests have their answers.
func (j *Journal) write(st *stage, included, carry []*request) (took time.Duration, ours bool, err error) {
	c := &j.c
	w := &job{group: loggedGroup{number: st.head.group, settled: c.settled.Load(), head: st.head, records: st.witness}, entries: st.entries,
		base: c.head, checkpoint: c.checkpoint.group, included: included, carry: carry}
	start := time.Now()
	deadline := time.AfterFunc(j.opt.CommitDeadline, func() { j.overdue(w) })
	err = j.record(w)
	deadline.Stop()
	return time.Since(start), w.taken.CompareAndSwap(false, true), err
}

// overdue takes the place of a committer that hangs in a system call: nobody waits longer
// than the deadline for it. What it may still write only the next start can tell (M5).
func (j *Journal) overdue(w *job) {
	if !w.taken.CompareAndSwap(false, true) {
		return
	}
	err := errors.New("journal: the commit deadline passed")
	j.stop(err)
	for _, r := range w.included {
		j.answer(r, fmt.Errorf("%w: %w", dispatch.ErrIndeterminate, err))
	}
	for _, r := range w.carry {
		j.answerQueued(r, dispatch.ErrIndeterminate)
	}
	j.drain()
	j.end()
}

// record makes a group durable in the witness.
func (j *Journal) record(job *job) (err error) {
	if w := j.c.witness; w != nil {
		n := 0
		for i := range job.entries {
			n += job.entries[i].logged()
		}
		if units := groupUnits(len(job.group.named()), n); !w.room(units) {
			err = w.rotate(job.base, job.group.settled, units)
			if err == nil {
				err = w.retire(job.group.settled, job.checkpoint)
			}
			j.settleSoon(job.base.group)
		}
		if err == nil {
			err = w.write(&job.group, job.entries, len(job.included) == 1)
		}
		if err != nil {
			err = fmt.Errorf("journal: witness: %w", err)
		}
	}
	if err == nil && j.hooks.WitnessError != nil {
		err = j.hooks.WitnessError(job.group.number)
	}
	return err
}

// finalCheckpoint is the last write of an orderly end: the next start has nothing to
// walk. It is false when overdue has taken over.
func (j *Journal) finalCheckpoint() bool {
	c := &j.c
	if j.Cause() != nil || c.checkpoint.group == c.head.group || j.opt.ReadOnly || j.recovery.Quarantined {
		return true
	}
	if j.space.write(j) != nil {
		return true // a table needs room; the next start makes the groups again
	}
	// Behind it the next start finds one group to make again.
	if err := j.settle(c.head.group); err != nil {
		j.stop(err)
		return true
	}
	hv := encodeHead(head{seq: c.head.seq, hash: c.head.hash, group: c.head.group + 1})
	r := &request{done: make(chan struct{}), entered: time.Now(), maint: []entry{{key: keyCheckpoint, value: j.seal.seal(keyCheckpoint, nil, hv)}}}
	if _, ours := j.commit([]*request{r}); !ours {
		return false
	}
	if r.err == nil {
		c.checkpoint = c.head
	}
	return true
}
