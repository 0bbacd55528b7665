package badger

// This file is Waybill's: see README.md.

import (
	"bytes"
	"cmp"
	"errors"
	"math"
	"slices"

	"github.com/dgraph-io/badger/v4/pb"
	"github.com/dgraph-io/badger/v4/table"
	"github.com/dgraph-io/badger/v4/y"
)

// flushApart is handleMemTableFlush for a store with Options.WrittenOnce.
//
// A table of the last level that was never in one above it is right if no level has an older
// value, or a deletion, of one of its keys, which would come to the surface, or would be taken
// for newer, when the levels are merged; and if it overlaps with no table of its level. Both
// hold for keys behind all that tables have of their family, since memtables are flushed one
// after the other and a compaction makes no keys. Deletions are never put there: they have to
// pass all levels to be of use. Everything else goes to level 0 as ever.
func (db *DB) flushApart(mt *memTable) (err error) {
	opts := buildTableOptions(db)
	rest := table.NewTableBuilder(opts)
	defer rest.Close()
	var made []*table.Table // of the last level; one reference of each is ours
	defer func() { err = errors.Join(err, decrRefs(made)) }()
	create := func(b *table.Builder) (*table.Table, error) {
		t, err := table.CreateTable(table.NewFilename(db.lc.reserveFileID(), db.opt.Dir), b)
		return t, y.Wrap(err, "error while creating table")
	}
	var apart *table.Builder // nil: none is being filled
	var last []byte          // the last key in it
	end := func() error {
		if apart == nil {
			return nil
		}
		t, err := create(apart)
		apart.Close()
		apart = nil
		if err == nil {
			made = append(made, t)
		}
		return err
	}
	defer func() {
		if apart != nil {
			apart.Close()
		}
	}()

	it := mt.sl.NewUniIterator(false)
	defer it.Close()
	ranges := db.rangesApart(it)
	for it.Rewind(); it.Valid(); it.Next() {
		key, vs := it.Key(), it.Value()
		if !db.keptApart(ranges, y.ParseKey(key), vs) {
			var vp valuePointer
			if vs.Meta&bitValuePointer > 0 {
				vp.Decode(vs.Value)
			}
			rest.Add(key, vs, vp.Len)
			continue
		}
		// All versions of a key stand in one table.
		if apart != nil && !y.SameKey(key, last) && (apart.ReachedCapacity() || !db.opt.WrittenOnce(y.ParseKey(last), y.ParseKey(key))) {
			if err := end(); err != nil {
				return err
			}
		}
		if apart == nil {
			apart = table.NewTableBuilder(opts)
		}
		apart.Add(key, vs, 0)
		last = append(last[:0], key...)
	}
	if err := end(); err != nil {
		return err
	}
	var top *table.Table
	if rest.Empty() {
		rest.Finish()
	} else {
		if top, err = create(rest); err != nil {
			return err
		}
		defer func() { err = errors.Join(err, top.DecrRef()) }()
	}
	// As after a compaction, their names are durable before the MANIFEST has them.
	if err := db.syncDir(db.opt.Dir); err != nil {
		return y.Wrap(err, "error while syncing the folder of a table")
	}
	if err := db.lc.addFlushed(top, made); err != nil {
		// Whether the MANIFEST names the tables is not known, so their files stay.
		for _, t := range made {
			t.IncrRef()
		}
		if top != nil {
			top.IncrRef()
		}
		return err
	}
	return nil
}

// addFlushed makes the tables of one memtable part of the store, all of them or none. top, if
// there is one, goes to level 0, and waits for room there as addLevel0Table does.
func (s *levelsController) addFlushed(top *table.Table, last []*table.Table) error {
	var changes []*pb.ManifestChange
	for _, t := range last {
		changes = append(changes, newCreateChange(t.ID(), s.lastLevel().level, t.KeyID(), t.CompressionType()))
	}
	if top != nil {
		changes = append(changes, newCreateChange(top.ID(), 0, top.KeyID(), top.CompressionType()))
	}
	if len(changes) == 0 {
		return nil
	}
	if err := s.kv.manifest.addChanges(changes, s.kv.opt); err != nil {
		return err
	}
	if len(last) > 0 {
		if err := s.lastLevel().replaceTables(nil, last); err != nil {
			return err
		}
	}
	if top == nil {
		return nil
	}
	return s.placeLevel0Table(top)
}

// tablesPresent are the tables of a moment, each with a reference.
type tablesPresent struct {
	top []*table.Table // of level 0
	all []*table.Table
}

// present returns all tables. What a compaction hands down meanwhile is seen at least once:
// it is added below before it is taken away above.
func (s *levelsController) present() (p tablesPresent) {
	for i, l := range s.levels {
		l.RLock()
		for _, t := range l.tables {
			t.IncrRef()
			p.all = append(p.all, t)
		}
		l.RUnlock()
		if i == 0 {
			p.top = p.all[:len(p.all):len(p.all)]
		}
	}
	return p
}

// rangeApart is what a memtable has of a family from a key on.
type rangeApart struct {
	from  []byte
	tries int  // looks at all tables that found from
	free  bool // from was found
	bytes int
}

const (
	// maxTries bounds the looks at all tables for one family of one memtable. It takes as many
	// as there are keys that lie before the last one of an earlier memtable, which are those of
	// what ran at the same time.
	maxTries = 1024
	// minApart is how much is worth a table that is never merged with others.
	minApart = 512 << 10
)

// rangesApart returns for each family from where on it goes to the last level.
func (db *DB) rangesApart(it y.Iterator) (out []rangeApart) {
	once := db.opt.WrittenOnce
	present := db.lc.present()
	defer func() {
		for _, t := range present.all {
			// One that a compaction has replaced meanwhile goes now; at the next start at the latest.
			_ = t.DecrRef()
		}
	}()
	for it.Rewind(); it.Valid(); it.Next() {
		key, vs := y.ParseKey(it.Key()), it.Value()
		if !onceOnly(vs) || !once(key, key) {
			continue
		}
		if n := len(out); n == 0 || !once(out[n-1].from, key) {
			out = append(out, rangeApart{from: append([]byte(nil), key...)})
		}
		r := &out[len(out)-1]
		if !r.free && r.tries < maxTries {
			r.tries++
			if r.free = present.before(key, once); r.free {
				r.from = append(r.from[:0], key...)
			}
		}
		if r.free {
			r.bytes += len(key) + len(vs.Value)
		}
	}
	return slices.DeleteFunc(out, func(r rangeApart) bool { return !r.free || r.bytes < db.opt.minApart() })
}

func (opt *Options) minApart() int { return int(min(minApart, opt.BaseTableSize/4)) }

// onceOnly reports whether an entry is a value as WrittenOnce has it.
func onceOnly(vs y.ValueStruct) bool {
	return !isDeletedOrExpired(vs.Meta, vs.ExpiresAt) && vs.Meta&(bitValuePointer|bitMergeEntry) == 0
}

// keptApart reports whether the entry goes to the last level.
func (db *DB) keptApart(ranges []rangeApart, key []byte, vs y.ValueStruct) bool {
	for i := range ranges {
		if from := ranges[i].from; db.opt.WrittenOnce(from, key) {
			return bytes.Compare(key, from) >= 0 && onceOnly(vs)
		}
	}
	return false
}

// before reports whether all that the tables have of the key's family stands before it, and
// whether a table that holds the rest of the family overlaps with none below level 0.
func (p *tablesPresent) before(key []byte, once func(a, b []byte) bool) bool {
	for i, t := range p.all {
		first, last := y.ParseKey(t.Smallest()), y.ParseKey(t.Biggest())
		switch {
		case bytes.Compare(last, key) < 0:
		case bytes.Compare(first, key) > 0:
			if once(first, key) {
				return false
			}
		case i >= len(p.top) || !beforeIn(t, key, once):
			return false
		}
	}
	return true
}

// beforeIn looks into a table that begins before the key and ends behind it.
func beforeIn(t *table.Table, key []byte, once func(a, b []byte) bool) bool {
	it := t.NewIterator(0)
	defer it.Close()
	it.Seek(y.KeyWithTs(key, math.MaxUint64))
	// There is at least the last one, unless it cannot be read.
	return it.Valid() && !once(y.ParseKey(it.Key()), key)
}

// What a store deletes of the families that are written once has to reach the last level to
// give its space back, and what usually carries it there, the rest, may be a hundredth of
// what is in the last level. So that does not count in the targets of the levels above, and
// tables that hold deletions of such a family go down whatever else their level has.

// withoutApart lowers the targets of all levels but the last. The base level stays as it
// was: with the last level as base each compaction of level 0 would read all of it.
func (s *levelsController) withoutApart(t *targets) {
	if s.kv.opt.WrittenOnce == nil {
		return
	}
	last := s.lastLevel()
	last.RLock()
	rest := last.totalSize - last.onceSize
	last.RUnlock()
	for i := len(s.levels) - 2; i > 0; i-- {
		rest /= int64(s.kv.opt.LevelSizeMultiplier)
		t.targetSz[i] = min(t.targetSz[i], max(rest, s.kv.opt.BaseLevelSize))
	}
}

// countOnce is addSize's and subtractSize's, under their lock.
func (s *levelHandler) countOnce(t *table.Table, n int) {
	if s.isOnce(t) {
		s.onceSize += int64(n) * t.Size()
		if t.StaleDataSize() > 0 {
			s.onceStale += n
		}
	}
}

// isOnce reports whether a table below level 0 holds one family that is written once.
func (s *levelHandler) isOnce(t *table.Table) bool {
	once := s.db.opt.WrittenOnce
	return once != nil && s.level > 0 && once(y.ParseKey(t.Smallest()), y.ParseKey(t.Biggest()))
}

// isOnceStale reports whether it holds deletions, too: those that a compaction kept count as
// stale.
func (s *levelHandler) isOnceStale(t *table.Table) bool { return s.isOnce(t) && t.StaleDataSize() > 0 }

func (s *levelHandler) hasOnceStale() bool {
	s.RLock()
	defer s.RUnlock()
	return s.onceStale > 0
}

// deletes is 0 for a table of which deletions are a fiftieth or more, else 1.
func deletes(t *table.Table) int {
	if 50*int64(t.StaleDataSize()) >= t.Size() {
		return 0
	}
	return 1
}

// staleFirst puts the tables that hold deletions to a good part before all others. By age
// alone one that new deletions are merged into again and again never has its turn: it is
// always among the youngest.
func (s *levelsController) staleFirst(tables []*table.Table) {
	if s.kv.opt.WrittenOnce == nil {
		return
	}
	slices.SortStableFunc(tables, func(a, b *table.Table) int {
		return cmp.Compare(deletes(a), deletes(b))
	})
}

// pays reports whether what a table deletes of the next level is worth writing that again: an
// eighth of it; and, in the last level, nothing that somebody still reads. There it would stay,
// with what it deletes, until something else is merged into it.
func (s *levelsController) pays(t *table.Table, next *levelHandler) bool {
	if next.isLastLevel() && t.MaxVersion() > s.kv.orc.discardAtOrBelow() {
		return false
	}
	keys := uint64(0)
	left, right := next.overlappingTables(levelHandlerRLocked{}, getKeyRange(t))
	for _, below := range next.tables[left:right] {
		keys += uint64(below.KeyCount())
	}
	return 8*uint64(t.StaleDataSize())/uint64(len(t.Smallest())+8) >= keys
}
