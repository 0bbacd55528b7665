package journal

import (
	"encoding/binary"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dgraph-io/badger/v4"

	"waybill/dispatch"
	"waybill/outcome"
)

// Records expire by age and by size. The chain then begins at a base: a position that
// only moves forward. Of what is before it there are left, whole, the actions that
// never expire: open ones, and those whose outcome is unknown and not resolved.
//
// Age is counted from marks: positions with the retention clock of the moment. That
// clock follows the monotonic clock; at a start it advances by at most sweepGrace. So
// no jump of the wall clock expires anything (T5); time in which no proxy ran counts
// for one day at most.

// mark is one position on the retention clock.
type mark struct {
	head
	at time.Time
	// written are the bytes handed to the store until then, dropped those of dropped
	// results whose records were still there: estimates, kept across starts.
	written, dropped int64
}

var (
	keyBase    = []byte("mbase")
	prefixMark = []byte("mt")
)

const (
	// markBytes is the plaintext of a mark without its position: version, milliseconds,
	// bytes written, bytes dropped.
	markBytes = 1 + 8 + 8 + 8
	// expireBatch is how many actions one maintenance step removes.
	expireBatch = 64
	// marksPerSpan is how finely age and size are divided.
	marksPerSpan = 32
)

func keyMark(seq uint64) []byte {
	return binary.BigEndian.AppendUint64(append(make([]byte, 0, 10), prefixMark...), seq)
}

func (m *mark) encode() []byte {
	b := append(make([]byte, 0, markBytes+64), plainVersion)
	b = binary.BigEndian.AppendUint64(b, uint64(m.at.UnixMilli()))
	b = binary.BigEndian.AppendUint64(b, uint64(m.written))
	b = binary.BigEndian.AppendUint64(b, uint64(m.dropped))
	return append(b, encodeHead(m.head)...)
}

func decodeMark(b []byte) (m mark, err error) {
	if len(b) < markBytes || b[0] != plainVersion {
		return m, errDecode
	}
	m.at = time.UnixMilli(int64(binary.BigEndian.Uint64(b[1:])))
	m.written, m.dropped = int64(binary.BigEndian.Uint64(b[9:])), int64(binary.BigEndian.Uint64(b[17:]))
	m.head, err = decodeHead(b[markBytes:])
	return m, err
}

// marks returns every mark, oldest first.
func (j *Journal) marks() (out []mark, err error) {
	err = j.view(func(txn *snapshot) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: prefixMark, PrefetchValues: true, PrefetchSize: 64})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			key := it.Item().KeyCopy(nil)
			v, err := it.Item().ValueCopy(nil)
			if err != nil {
				return &storeError{"read"}
			}
			plain, _, ok := j.seal.open(key, v, 0)
			var m mark
			if ok {
				m, err = decodeMark(plain)
			}
			if !ok || err != nil {
				return &CorruptError{What: "a mark of retention does not open", Key: key}
			}
			out = append(out, m)
		}
		return nil
	})
	return out, err
}

// base returns where the chain begins: the mark that became the base, or the genesis.
func (j *Journal) base(txn *snapshot) (m mark, err error) {
	v, found, err := get(txn, keyBase)
	if err != nil {
		return m, err
	}
	if !found {
		m.hash = j.seal.genesis()
		return m, nil
	}
	plain, _, ok := j.seal.open(keyBase, v, 0)
	if ok {
		m, err = decodeMark(plain)
	}
	if !ok || err != nil {
		return m, &CorruptError{What: "the base of the chain does not open", Key: keyBase}
	}
	return m, nil
}

// retention is the clock and the count that Retain goes by.
type retention struct {
	mu      sync.Mutex // one maintenance at a time
	base    time.Time  // the clock's value at started
	started time.Time
	last    mark         // last and counted change under counters.mu too
	counted int64        // counters.bytes at the last mark
	dropped atomic.Int64 // bytes of dropped results whose records are still there
}

// now is the retention clock.
func (r *retention) now() time.Time { return r.base.Add(time.Since(r.started)) }

// loadRetention sets the retention clock; wall is the sweeper's idea of now.
func (j *Journal) loadRetention(wall time.Time) error {
	all, err := j.marks()
	if err != nil {
		return err
	}
	r := &j.retention
	r.base, r.started = wall, time.Now()
	if n := len(all); n > 0 {
		r.last = all[n-1]
		r.dropped.Add(r.last.dropped)
		if limit := r.last.at.Add(sweepGrace); r.base.After(limit) {
			r.base = limit
		}
		if r.base.Before(r.last.at) {
			r.base = r.last.at
		}
	}
	return j.view(func(txn *snapshot) error {
		b, err := j.base(txn)
		j.stats.mu.Lock()
		j.stats.base = b.seq
		j.stats.mu.Unlock()
		return err
	})
}

// written is the estimate of the bytes that were handed to the store since the
// journal was made. What a crash leaves uncounted is less than a mark's distance.
func (j *Journal) written() int64 {
	j.stats.mu.Lock()
	defer j.stats.mu.Unlock()
	bytes, r := j.stats.bytes, &j.retention
	return r.last.written + bytes - r.counted
}

// kept is the part of written that is after base, without dropped results.
func (j *Journal) kept(base *mark) int64 {
	return j.written() - base.written - j.retention.dropped.Load()
}

// keptBytes is the part of written that is after the base. An estimate waits for no store
// (view): whoever looks at a journal whose store hangs is to see that.
func (j *Journal) keptBytes() (n int64) {
	txn, done, err := j.storeOnly()
	if err != nil {
		return 0
	}
	defer done()
	b, _ := j.base(txn)
	return max(j.kept(&b), 0)
}

// Retained is what Retain did.
type Retained struct {
	Actions int    // removed
	Results int    // dropped for the size, before their time
	Base    uint64 // the chain begins after this event
}

// Retain applies Options.Retention and Options.MaxBytes as of the retention clock's
// now. It works in small steps that go through the committer like everything else; a
// crash between two of them leaves work for the next call.
func (j *Journal) Retain(now time.Time) (done Retained, err error) {
	if j.opt.Retention <= 0 && j.opt.MaxBytes <= 0 {
		return done, nil
	}
	j.retention.mu.Lock()
	defer j.retention.mu.Unlock()
	if err := j.mark(now); err != nil {
		return done, err
	}
	var base mark
	if err := j.view(func(txn *snapshot) (err error) {
		base, err = j.base(txn)
		return err
	}); err != nil {
		return done, err
	}
	if limit := j.opt.MaxBytes; limit > 0 && j.kept(&base) > limit/8*7 {
		// Results go before any record does, but those in the newest half of the limit
		// stay: somebody may be about to fetch them.
		all, err := j.marks()
		if err != nil {
			return done, err
		}
		upTo := base.seq
		for i := range all {
			if j.written()-all[i].written >= limit/2 {
				upTo = max(upTo, all[i].seq)
			}
		}
		if done.Results, err = j.shrink(&base, limit/4*3, upTo); err != nil {
			return done, err
		}
	}
	all, err := j.marks()
	if err != nil {
		return done, err
	}
	target, hold := base, j.held()
	for i := range all {
		if all[i].seq <= hold && j.opt.Retention > 0 && !all[i].at.After(now.Add(-j.opt.Retention)) && all[i].seq > target.seq {
			target = all[i]
		}
	}
	move := func(to mark) error {
		if to.seq > base.seq {
			if err := j.moveBase(to, all); err != nil {
				return err
			}
			base = to
		}
		n, err := j.expire(base.seq, now)
		done.Actions += n
		if err == nil {
			err = j.expireSessions(base.seq, now)
		}
		return err
	}
	err = move(target)
	if limit := j.opt.MaxBytes; limit > 0 && j.kept(&base) > limit {
		for i := range all {
			// Disk use is bounded even where a follower does not get on: it will find a gap,
			// and say so.
			if all[i].seq > hold && j.kept(&base) <= limit+limit/4 {
				break
			}
			if err == nil && all[i].seq > base.seq && j.kept(&base) > limit/8*7 {
				err = move(all[i])
			}
		}
	}
	done.Base = base.seq
	j.stats.mu.Lock()
	j.stats.expired += uint64(done.Actions)
	j.stats.dropped += uint64(done.Results)
	j.stats.base = done.Base
	j.stats.mu.Unlock()
	if done.Actions > 0 || done.Results > 0 {
		j.log.Info("journal: retention", slog.Int("actions", done.Actions), slog.Int("results", done.Results), slog.Uint64("base", done.Base))
	}
	return done, err
}

// grown reports whether enough was written since the last mark that the size has to
// be looked at before the next sweep.
func (j *Journal) grown() bool {
	if j.opt.MaxBytes <= 0 || !j.retention.mu.TryLock() {
		return false
	}
	defer j.retention.mu.Unlock()
	j.stats.mu.Lock()
	defer j.stats.mu.Unlock()
	return j.stats.bytes-j.retention.counted >= j.opt.MaxBytes/marksPerSpan
}

// mark writes a mark when enough happened since the last.
func (j *Journal) mark(now time.Time) error {
	r := &j.retention
	written := j.written()
	j.stats.mu.Lock()
	bytes, at := j.stats.bytes, j.stats.head
	j.stats.mu.Unlock()
	if at.seq <= r.last.seq {
		return nil
	}
	old := j.opt.Retention > 0 && now.Sub(r.last.at) >= j.opt.Retention/marksPerSpan
	grown := j.opt.MaxBytes > 0 && bytes-r.counted >= j.opt.MaxBytes/marksPerSpan
	if !old && !grown && r.last.seq > 0 {
		return nil
	}
	m := mark{head: at, at: now, written: written, dropped: r.dropped.Load()}
	key := keyMark(m.seq)
	if err := j.maintain([]entry{{key: key, value: j.seal.seal(key, nil, m.encode())}}); err != nil {
		return err
	}
	j.stats.mu.Lock()
	r.last, r.counted = m, bytes
	j.stats.mu.Unlock()
	return nil
}

// shrink drops results that were committed up to the event upTo, oldest action first,
// until no more than limit is kept.
func (j *Journal) shrink(base *mark, limit int64, upTo uint64) (dropped int, err error) {
	var from []byte
	for j.kept(base) > limit {
		var due []expired
		if err := j.view(func(txn *snapshot) error {
			it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{famManifest}})
			defer it.Close()
			for it.Seek(append([]byte{famManifest}, from...)); it.Valid() && len(due) < expireBatch; it.Next() {
				key := it.Item().KeyCopy(nil)
				from = append(key[1:], 0)
				if len(key) != 21 {
					continue
				}
				id, attempt := dispatch.ActionID(key[1:17]), int(binary.BigEndian.Uint32(key[17:]))
				m, err := j.readManifest(txn, id, attempt)
				if err != nil {
					return err
				}
				if m == nil || m.Dropped || m.Bytes == 0 {
					continue
				}
				p, err := j.readProjection(txn, id)
				if err != nil {
					return err
				}
				if p != nil && p.rec.ResultSeq <= upTo {
					due = append(due, expired{key: keyExpiry(m.Expires, id, attempt), id: id, attempt: attempt})
				}
			}
			return nil
		}); err != nil || len(due) == 0 {
			return dropped, err
		}
		for _, e := range due {
			bytes, did, err := j.drop(e)
			if err != nil {
				return dropped, err
			}
			if did {
				dropped++
				j.opt.Metrics.Dropped(1, bytes)
			}
			if j.kept(base) <= limit {
				break
			}
		}
	}
	return dropped, nil
}

// moveBase makes a mark the base. The checkpoint, from which a start walks, moves
// behind it in the same transaction.
func (j *Journal) moveBase(to mark, all []mark) error {
	entries := []entry{{key: keyBase, value: j.seal.seal(keyBase, nil, to.encode())}}
	for i := range all {
		if all[i].seq < to.seq {
			entries = append(entries, entry{key: keyMark(all[i].seq), remove: true})
		}
	}
	return j.planned(func(_ *snapshot, st *stage) ([]entry, error) {
		st.checkpoint = true
		return entries, nil
	})
}

// expirable reports whether an action may be removed when the chain begins after
// base: it has ended, nothing of it is later, its outcome is known, and its idempotency
// key is over by the retention clock: without the record a repeat under that key would
// be sent as a new action (CONTRACT I9).
func expirable(p *projection, base uint64, now time.Time) bool {
	return p != nil && p.rec.Ended && p.rec.Facts.Outcome != outcome.Unknown && p.rec.LastSeq <= base &&
		!(p.rec.HoldsKey() && now.Before(p.rec.Bound.Key.ExpiresAt))
}

// expire removes what may go of the part before the base.
func (j *Journal) expire(base uint64, now time.Time) (removed int, err error) {
	from := keyTime(0, dispatch.ActionID{})
	for {
		var ids []dispatch.ActionID
		end := true
		if err := j.view(func(txn *snapshot) error {
			it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{famTime}})
			defer it.Close()
			for it.Seek(from); it.Valid(); it.Next() {
				key := it.Item().KeyCopy(nil)
				if len(key) != 25 || binary.BigEndian.Uint64(key[1:]) > base {
					return nil
				}
				from = append(key, 0)
				p, err := j.readProjection(txn, dispatch.ActionID(key[9:]))
				if err != nil {
					return err
				}
				if !expirable(p, base, now) {
					continue
				}
				if ids = append(ids, p.rec.ID); len(ids) == expireBatch {
					end = false
					return nil
				}
			}
			return nil
		}); err != nil {
			return removed, err
		}
		if len(ids) > 0 {
			n, err := j.remove(ids, base, now)
			if removed += n; err != nil {
				return removed, err
			}
		}
		if end {
			return removed, j.expireBoots(base)
		}
	}
}

// remove takes actions away: first the chunks, in portions, then everything else of
// each in one transaction.
func (j *Journal) remove(ids []dispatch.ActionID, base uint64, now time.Time) (removed int, err error) {
	for _, id := range ids {
		var results []expired
		chunks := false
		if err := j.view(func(txn *snapshot) error {
			prefix := append([]byte{famManifest}, id[:]...)
			it := txn.NewIterator(badger.IteratorOptions{Prefix: prefix})
			defer it.Close()
			for it.Rewind(); it.Valid(); it.Next() {
				attempt := int(binary.BigEndian.Uint32(it.Item().Key()[17:]))
				m, err := j.readManifest(txn, id, attempt)
				if err != nil {
					return err
				}
				if m != nil && !m.Dropped {
					results = append(results, expired{key: keyExpiry(m.Expires, id, attempt), id: id, attempt: attempt})
				}
			}
			prefix = append([]byte{famChunk}, id[:]...)
			c := txn.NewIterator(badger.IteratorOptions{Prefix: prefix})
			defer c.Close()
			c.Rewind()
			chunks = c.Valid()
			return nil
		}); err != nil {
			return 0, err
		}
		for _, e := range results {
			if _, _, err := j.drop(e); err != nil {
				return 0, err
			}
		}
		if chunks { // of attempts without a result, too
			if err := j.removeKeys(append([]byte{famChunk}, id[:]...), nil); err != nil {
				return 0, err
			}
		}
	}
	var freed int64
	err = j.planned(func(txn *snapshot, st *stage) (out []entry, err error) {
		removed, freed = 0, 0
		for _, id := range ids {
			if st.changed[id] != nil {
				continue // something of it is in this very group
			}
			p, err := j.readProjection(txn, id)
			if err != nil {
				return nil, err
			}
			if !expirable(p, base, now) {
				continue
			}
			gone, bytes, err := j.everything(txn, p)
			if err != nil {
				return nil, err
			}
			out = append(out, gone...)
			freed += bytes
			removed++
		}
		return out, nil
	})
	if err != nil {
		return 0, err
	}
	j.retention.dropped.Add(-freed)
	return removed, nil
}

// everything is what the store holds of an action but its chunks; bytes are those of
// its results that were dropped.
func (j *Journal) everything(txn *snapshot, p *projection) (out []entry, bytes int64, err error) {
	rec, id := &p.rec, p.rec.ID
	gone := func(key []byte) { out = append(out, entry{key: key, remove: true}) }
	for _, f := range p.frames {
		gone(keyEvent(f))
	}
	gone(keyAction(famRecord, id))
	gone(keyAction(famOpen, id))
	gone(keyAction(famDoubt, id))
	gone(keyTime(rec.FirstSeq, id))
	gone(keyCaller(j.seal.mac(macCaller, rec.Caller), rec.FirstSeq, id))
	if rec.RequestID != "" {
		key := keyRequest(j.seal.mac(macRequest, rec.Caller, rec.RequestID))
		if v, found, err := get(txn, key); err != nil {
			return nil, 0, err
		} else if found && string(v) == string(id[:]) {
			gone(key)
		}
	}
	if rec.HoldsKey() {
		key := j.keyOf(rec)
		if v, found, err := get(txn, key); err != nil {
			return nil, 0, err
		} else if found && string(v) == string(id[:]) {
			gone(key)
		}
	}
	if rec.Bound != nil && rec.Bound.Budget != nil && rec.Bound.Budget.Background {
		for i := range (maxKept + dispatch.MaxChunkBytes - 1) / dispatch.MaxChunkBytes {
			if _, found, err := has(txn, keyKept(id, i)); err != nil {
				return nil, 0, err
			} else if found {
				gone(keyKept(id, i))
			}
		}
	}
	of := func(prefix []byte) {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: prefix})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			if got, ok := trailingID(it.Item().Key()); ok && got == id {
				gone(it.Item().KeyCopy(nil))
			}
		}
	}
	if rec.Bound != nil && rec.Bound.Fingerprint != "" {
		of(prefixLatest(famGuard, j.seal.mac(macGuard, rec.Caller, rec.Bound.Fingerprint)))
	}
	if to := rec.RedirectKey(); to != "" {
		of(prefixLatest(famRedirect, j.seal.mac(macGoto, rec.Caller, to)))
	}
	it := txn.NewIterator(badger.IteratorOptions{Prefix: append([]byte{famManifest}, id[:]...)})
	defer it.Close()
	for it.Rewind(); it.Valid(); it.Next() {
		key := it.Item().KeyCopy(nil)
		attempt := int(binary.BigEndian.Uint32(key[17:]))
		m, err := j.readManifest(txn, id, attempt)
		if err != nil {
			return nil, 0, err
		}
		gone(key)
		if m != nil {
			gone(keyExpiry(m.Expires, id, attempt))
			bytes += m.Bytes
		}
	}
	return out, bytes, nil
}

// expireBoots removes the frames of starts before the base.
func (j *Journal) expireBoots(base uint64) error {
	return j.removeKeys([]byte{famEvent}, func(key, value []byte) (remove, more bool, err error) {
		if binary.BigEndian.Uint64(key[1:]) > base {
			return false, false, nil
		}
		plain, _, ok := j.seal.open(key, value, hashBytes)
		if !ok {
			return false, false, &CorruptError{What: "event does not open: altered", Seq: binary.BigEndian.Uint64(key[1:])}
		}
		_, id, err := frameCount(plain)
		if err != nil {
			return false, false, &CorruptError{What: "event does not decode", Seq: binary.BigEndian.Uint64(key[1:])}
		}
		return id.IsZero(), true, nil
	})
}

// removeKeys removes the keys under prefix, in portions: all of them, or those that
// which says, up to where it says that there are no more.
func (j *Journal) removeKeys(prefix []byte, which func(key, value []byte) (remove, more bool, err error)) error {
	from := prefix
	for {
		var gone []entry
		full := false
		if err := j.view(func(txn *snapshot) error {
			it := txn.NewIterator(badger.IteratorOptions{Prefix: prefix, PrefetchValues: which != nil, PrefetchSize: 16})
			defer it.Close()
			for it.Seek(from); it.Valid(); it.Next() {
				key := it.Item().KeyCopy(nil)
				remove := true
				if which != nil {
					v, err := it.Item().ValueCopy(nil)
					if err != nil {
						return &storeError{"read"}
					}
					more := false
					if remove, more, err = which(key, v); err != nil || !more {
						return err
					}
				}
				from = append(key[:len(key):len(key)], 0)
				if remove {
					var err error
					if gone, err = removal(gone, it.Item()); err != nil {
						return err
					}
					if len(gone) >= sweepChunks {
						full = true
						return nil
					}
				}
			}
			return nil
		}); err != nil {
			return err
		}
		if len(gone) > 0 {
			if err := j.maintain(gone); err != nil {
				return err
			}
		}
		if !full {
			return nil
		}
	}
}

// planned writes what plan finds when its turn in a group comes: nothing can change
// between its reading and its writing.
func (j *Journal) planned(plan func(*snapshot, *stage) ([]entry, error)) error {
	return j.submitMaintenance(&request{done: make(chan struct{}), entered: time.Now(), plan: plan})
}
