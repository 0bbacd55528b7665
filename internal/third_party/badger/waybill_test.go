package badger

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/dgraph-io/badger/v4/options"
	"github.com/dgraph-io/badger/v4/skl"
	"github.com/dgraph-io/badger/v4/y"
)

// Tests of what Waybill changed that its own packages cannot reach; see README.md.

// families ends tables as Waybill's journal does.
func families(last, next []byte) bool {
	large := func(b byte) bool { return b == 'e' || b == 'r' }
	return last[0] != next[0] && (large(last[0]) || large(next[0]))
}

func openQuiet(t *testing.T) *DB {
	t.Helper()
	opt := DefaultOptions(t.TempDir()).WithMemTableSize(8 << 20).WithNumCompactors(0).WithCompression(options.None).WithLoggingLevel(ERROR).
		WithNumLevelZeroTables(2).WithNumLevelZeroTablesStall(6)
	opt.TableEnds = families
	db, err := Open(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// flushed writes one table of level 0.
func flushed(t *testing.T, db *DB, f func(txn *Txn) error) {
	t.Helper()
	mt, err := db.newMemTable()
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Update(f); err != nil {
		t.Fatal(err)
	}
	db.lock.Lock()
	old := db.mt
	db.mt = mt
	db.lock.Unlock()
	if err := db.handleMemTableFlush(old, nil); err != nil {
		t.Fatal(err)
	}
	old.DecrRef() // and its log
}

// sequence writes one key of each family, in order.
func sequence() func(txn *Txn) error {
	n := 0
	return func(txn *Txn) error {
		n++
		for _, family := range "cegortu" {
			if err := txn.Set([]byte(fmt.Sprintf("%c-%05d", family, n)), make([]byte, 100)); err != nil {
				return err
			}
		}
		return nil
	}
}

// within compacts level 0 into itself, as happens when nothing below takes its tables.
func within(t *testing.T, db *DB) error {
	t.Helper()
	for _, table := range db.lc.levels[0].tables {
		table.CreatedAt = time.Now().Add(-time.Minute)
	}
	return db.lc.doCompact(0, compactionPriority{level: 0, score: 2, adjusted: 0.5, t: db.lc.levelTargets()})
}

// A compaction within level 0 makes one table of all, however many families there are: it
// is there to have fewer.
func TestWithinLevelZero(t *testing.T) {
	db := openQuiet(t)
	step := sequence()
	for range 4 {
		flushed(t, db, step)
	}
	if err := within(t, db); err != nil {
		t.Fatal(err)
	}
	if n := len(db.lc.levels[0].tables); n != 1 {
		t.Errorf("%d tables", n)
	}
	if err := within(t, db); !errors.Is(err, errFillTables) {
		t.Errorf("again: %v", err)
	}
}

// A key that was deleted after such a compaction stays so, also when a restart puts the
// table that says so in front of it, by its number.
func TestDeletedAfterLevelZero(t *testing.T) {
	db := openQuiet(t)
	step := sequence()
	for range 4 {
		flushed(t, db, step)
	}
	if err := within(t, db); err != nil {
		t.Fatal(err)
	}
	flushed(t, db, func(txn *Txn) error { return errors.Join(step(txn), txn.Delete([]byte("o-00001"))) })
	tables := db.lc.levels[0].tables
	newest := 0
	for i, table := range tables {
		if table.MaxVersion() > tables[newest].MaxVersion() {
			newest = i
		}
	}
	first := tables[newest]
	db.lc.levels[0].tables = append(append(tables[:0:0], first), append(tables[:newest:newest], tables[newest+1:]...)...)
	// What nobody can ask for any more goes: the read marks have to be behind it.
	if err := db.Update(func(txn *Txn) error { return txn.Set([]byte("z"), nil) }); err != nil {
		t.Fatal(err)
	}
	if err := db.View(func(*Txn) error { return nil }); err != nil {
		t.Fatal(err)
	}
	time.Sleep(50 * time.Millisecond)
	if err := db.lc.doCompact(0, compactionPriority{level: 0, score: 3, adjusted: 3, t: db.lc.levelTargets()}); err != nil {
		t.Fatal(err)
	}
	if err := db.View(func(txn *Txn) error {
		if _, err := txn.Get([]byte("o-00001")); !errors.Is(err, ErrKeyNotFound) {
			return fmt.Errorf("a deleted key: %v", err)
		}
		_, err := txn.Get([]byte("o-00002"))
		return err
	}); err != nil {
		t.Error(err)
	}
}

// Below it tables end with their families, and lose nothing.
func TestTableEnds(t *testing.T) {
	db := openQuiet(t)
	step := sequence()
	for range 3 {
		flushed(t, db, step)
	}
	if err := db.lc.doCompact(0, compactionPriority{level: 0, score: 3, adjusted: 3, t: db.lc.levelTargets()}); err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, level := range db.lc.levels[1:] {
		for _, table := range level.tables {
			n++
			if a, b := table.Smallest()[0], table.Biggest()[0]; a != b && (a <= 'e' && b >= 'e' || a <= 'r' && b >= 'r') {
				t.Errorf("a table from %q to %q", a, b)
			}
		}
	}
	if n != 5 {
		t.Errorf("%d tables", n)
	}
	if err := db.View(func(txn *Txn) error {
		for i := range 3 {
			for _, family := range "cegortu" {
				if _, err := txn.Get([]byte(fmt.Sprintf("%c-%05d", family, i+1))); err != nil {
					return err
				}
			}
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// apart makes a store whose families e and r are written once.
func apart(opt *Options) {
	section := func(b byte) (n int) {
		for _, f := range []byte{'e', 'r'} {
			if b >= f {
				n++
			}
			if b > f {
				n++
			}
		}
		return n
	}
	opt.TableEnds = func(last, next []byte) bool { return section(last[0]) != section(next[0]) }
	opt.WrittenOnce = func(a, b []byte) bool { return a[0] == b[0] && (a[0] == 'e' || a[0] == 'r') }
	opt.BaseTableSize = 1 << 10 // what is little goes to level 0
}

func openApart(t *testing.T) *DB {
	t.Helper()
	db := openQuiet(t)
	apart(&db.opt)
	return db
}

// in returns the first keys' families of a level's tables.
func in(db *DB, n int) string {
	var out []byte
	for _, table := range db.lc.levels[n].tables {
		out = append(out, table.Smallest()[0])
	}
	return string(out)
}

// ordered checks that no two tables of a level below the first overlap.
func ordered(t *testing.T, db *DB) {
	t.Helper()
	for _, l := range db.lc.levels[1:] {
		if err := l.validate(); err != nil {
			t.Error(err)
		}
	}
}

// What a memtable has of a family that is written once goes to the last level, if it is behind
// all that is there of it; deletions and what lies before that do not.
func TestFlushApart(t *testing.T) {
	db := openApart(t)
	last := len(db.lc.levels) - 1
	set := func(keys ...string) func(txn *Txn) error {
		return func(txn *Txn) error {
			for _, k := range keys {
				if err := txn.Set([]byte(k), bytes.Repeat([]byte(k), 150)); err != nil {
					return err
				}
			}
			return nil
		}
	}
	for i, step := range []struct {
		f         func(txn *Txn) error
		top, last string
	}{
		{set("c1", "e1", "e2", "g1", "r5", "u1"), "c", "er"},
		{set("e3"), "c", "eer"},
		{set("r4", "r6", "r7"), "cr", "eerr"}, // r4 lies before r5
		{func(txn *Txn) error { return txn.Delete([]byte("e9")) }, "cre", "eerr"},
		{set("e8", "e99"), "cree", "eeerr"},                                              // e8 lies before a deletion
		{func(txn *Txn) error { return txn.Set([]byte("e999"), nil) }, "creee", "eeerr"}, // too little
	} {
		flushed(t, db, step.f)
		if top, last := in(db, 0), in(db, last); top != step.top || last != step.last {
			t.Errorf("step %d: level 0 has %q, the last one %q", i, top, last)
		}
		ordered(t, db)
	}
}

// Whatever is written, deleted, flushed, compacted and opened again, in any order: what is
// read is what was written last, and no two tables of a level overlap.
func TestFlushApartRandom(t *testing.T) {
	t.Parallel()
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewSource(seed))
	for round := range 5 {
		db := openApart(t)
		opt := db.opt
		opt.BaseLevelSize = 64 << 10 // so that more levels than the last are in use
		db.opt = opt
		model := map[string]string{}
		next := map[byte]int{}
		write := func(txn *Txn) error {
			for range 1 + rnd.Intn(60) {
				family := "cegortu"[rnd.Intn(7)]
				n := rnd.Intn(40)
				if once := family == 'e' || family == 'r'; once {
					n = next[family]
					switch rnd.Intn(12) {
					case 0: // late: between others
						n -= min(n, rnd.Intn(20))
					default:
						next[family] += 2
					}
				}
				key := fmt.Sprintf("%c-%06d", family, n)
				value := fmt.Sprintf("%s %0*d", key, 1+rnd.Intn(3000), 0)
				if old, ok := model[key]; ok && (family == 'e' || family == 'r') {
					value = old // given one value only
				}
				if rnd.Intn(6) == 0 {
					keys := slices.Sorted(maps.Keys(model))
					if len(keys) == 0 {
						continue
					}
					gone := keys[rnd.Intn(len(keys))]
					if gone[0] == 'e' || gone[0] == 'r' {
						// Never again: n only grows, and what lies late may have been it.
						buried[gone] = true
					}
					delete(model, gone)
					if err := txn.Delete([]byte(gone)); err != nil {
						return err
					}
					continue
				}
				if buried[key] {
					continue
				}
				model[key] = value
				if err := txn.Set([]byte(key), []byte(value)); err != nil {
					return err
				}
			}
			return nil
		}
		clear(buried)
		check := func(when string) {
			t.Helper()
			ordered(t, db)
			if err := db.View(func(txn *Txn) error {
				it := txn.NewIterator(DefaultIteratorOptions)
				defer it.Close()
				n := 0
				for it.Rewind(); it.Valid(); it.Next() {
					v, err := it.Item().ValueCopy(nil)
					if err != nil {
						return err
					}
					if want, ok := model[string(it.Item().Key())]; !ok || want != string(v) {
						return fmt.Errorf("%s is there: %v, %.20q", it.Item().Key(), ok, v)
					}
					n++
				}
				if n != len(model) {
					return fmt.Errorf("%d keys of %d", n, len(model))
				}
				for key, want := range model {
					item, err := txn.Get([]byte(key))
					if err != nil {
						return fmt.Errorf("%s: %w", key, err)
					}
					if v, err := item.ValueCopy(nil); err != nil || string(v) != want {
						return fmt.Errorf("%s: %v, %.20q", key, err, v)
					}
				}
				for key := range buried {
					if _, err := txn.Get([]byte(key)); !errors.Is(err, ErrKeyNotFound) {
						return fmt.Errorf("%s was deleted: %v", key, err)
					}
				}
				return nil
			}); err != nil {
				t.Fatalf("round %d, %s: %v", round, when, err)
			}
		}
		for step := range 60 {
			if len(db.lc.levels[0].tables) > 3 { // more would wait for a compactor, of which there is none
				if err := db.lc.doCompact(0, compactionPriority{level: 0, score: 3, adjusted: 3, t: db.lc.levelTargets()}); err != nil {
					t.Fatal(err)
				}
			}
			switch k := rnd.Intn(10); {
			case k < 6:
				flushed(t, db, write)
				check(fmt.Sprintf("step %d, written", step))
			case k < 9:
				level := rnd.Intn(len(db.lc.levels) - 1)
				err := db.lc.doCompact(1, compactionPriority{level: level, score: 3, adjusted: 3, t: db.lc.levelTargets()})
				if err != nil && !errors.Is(err, errFillTables) {
					t.Fatal(err)
				}
				check(fmt.Sprintf("step %d, level %d compacted", step, level))
			default:
				if err := db.Close(); err != nil {
					t.Fatal(err)
				}
				var err error
				if db, err = Open(opt); err != nil {
					t.Fatal(err)
				}
				check(fmt.Sprintf("step %d, opened again", step))
			}
		}
		if err := db.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// smallApart are the options of a store that is full of levels soon.
func smallApart(t *testing.T) Options {
	t.Helper()
	opt := DefaultOptions(t.TempDir()).WithMemTableSize(1 << 20).WithValueThreshold(32 << 10).WithCompression(options.None).WithLoggingLevel(ERROR).
		WithNumCompactors(2).WithNumLevelZeroTables(2).WithNumLevelZeroTablesStall(6).WithBaseLevelSize(512 << 10)
	apart(&opt)
	opt.BaseTableSize, opt.TableSizeMultiplier = 128<<10, 1
	opt.NoLog = true
	return opt
}

func openSmall(t *testing.T, opt Options) *DB {
	t.Helper()
	db, err := Open(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func key(family byte, n int) []byte { return fmt.Appendf(nil, "%c-%08d", family, n) }

// Many lives that are shorter than a compactor's first wait: what they replace and delete
// is discarded all the same.
func TestShortLivesDiscard(t *testing.T) {
	opt := smallApart(t)
	value := bytes.Repeat([]byte{1}, 8<<10)
	for life := 1; life <= 30; life++ {
		db := openSmall(t, opt)
		if err := db.Update(func(txn *Txn) error {
			err := errors.Join(txn.Set([]byte("mhead"), value), txn.Set(key('e', life), value), txn.Set(key('t', life), value))
			if life > 1 {
				err = errors.Join(err, txn.Delete(key('e', life-1)), txn.Delete(key('t', life-1)))
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(db.Flush(), db.Close()); err != nil {
			t.Fatal(err)
		}
	}
	db := openSmall(t, opt)
	total := int64(0)
	for _, l := range db.lc.levels {
		total += l.getTotalSize()
	}
	if total > 200<<10 { // three values are there, and what the last lives left
		t.Errorf("%d KiB of tables", total>>10)
	}
}

// A few deletions, scattered over a large family, do not write it again each time.
func TestScatteredDeletions(t *testing.T) {
	t.Parallel()
	db := openSmall(t, smallApart(t))
	value := bytes.Repeat([]byte{1}, 8<<10)
	next := 0
	more := func(n int, f func(txn *Txn) error) {
		t.Helper()
		for range n {
			if err := db.Update(func(txn *Txn) error { next++; return txn.Set(key('r', next), value) }); err != nil {
				t.Fatal(err)
			}
		}
		if err := db.Update(f); err != nil {
			t.Fatal(err)
		}
		if err := db.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	more(2000, func(*Txn) error { return nil })
	before := db.lc.nextFileID.Load()
	for round := range 10 {
		more(40, func(txn *Txn) error {
			return errors.Join(txn.Delete(key('r', 1+round)), txn.Delete(key('r', 1990-round)), txn.Set(key('t', round), nil))
		})
		time.Sleep(150 * time.Millisecond)
	}
	// 3 MiB in tables of 128 KiB, each round two in level 0, and their compactions; the family has 130.
	if made := db.lc.nextFileID.Load() - before; made > 150 {
		t.Errorf("%d tables were made", made)
	}
}

// What is deleted of families that are written once gives its space back, however little else
// there is to carry the deletions down.
func TestFlushApartGivesBack(t *testing.T) {
	t.Parallel()
	db := openSmall(t, smallApart(t))
	const live, size, all = 400, 8 << 10, 4000
	early := db.NewTransaction(false) // what is deleted meanwhile may not be dropped
	defer early.Discard()
	value := bytes.Repeat([]byte{1}, size)
	for n := 1; n <= all; n += 4 {
		if err := db.Update(func(txn *Txn) error {
			for i := n; i < n+4; i++ {
				if err := errors.Join(txn.Set(key('r', i), value), txn.Set(key('t', i), nil)); err != nil {
					return err
				}
				if i > live {
					if err := errors.Join(txn.Delete(key('r', i-live)), txn.Delete(key('t', i-live))); err != nil {
						return err
					}
				}
			}
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		if n%40 == 1 {
			time.Sleep(5 * time.Millisecond) // a compactor begins 20 times a second
		}
		if n == all/2+1 {
			time.Sleep(1500 * time.Millisecond) // time enough to do it all the same
			early.Discard()
		}
	}
	if err := db.Flush(); err != nil {
		t.Fatal(err)
	}
	total := func() (n int64) {
		for _, l := range db.lc.levels {
			n += l.getTotalSize()
		}
		return n
	}
	for end := time.Now().Add(20 * time.Second); total() > 3*live*size; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d KiB of tables for %d KiB of values", total()>>10, live*size>>10)
		}
	}
	ordered(t, db)
	if err := db.View(func(txn *Txn) error {
		for n := 1; n <= all; n++ {
			if _, err := txn.Get(key('r', n)); (err == nil) != (n > all-live) {
				return fmt.Errorf("%s: %v", key('r', n), err)
			}
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// buried are keys that were deleted for good.
var buried = map[string]bool{}

// blocksEnd is where the blocks of a table's file end: behind them are its index, their
// lengths and their checksum.
func blocksEnd(t *testing.T, name string) int64 {
	t.Helper()
	data, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	end := len(data)
	for range 2 { // the checksum, the index: each before its length
		end -= 4 + int(binary.BigEndian.Uint32(data[end-4:]))
	}
	return int64(end)
}

// overwrite changes a file as a disk would behind everybody's back.
func overwrite(t *testing.T, name string, at int64, change func(b []byte)) {
	t.Helper()
	f, err := os.OpenFile(name, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	b := make([]byte, 4)
	if _, err := f.ReadAt(b, at); err != nil {
		t.Fatal(err)
	}
	change(b)
	if _, err := f.WriteAt(b, at); err != nil {
		t.Fatal(err)
	}
}

// VerifyChecksum tells of a block whose end cannot be told, and does not panic for it.
func TestVerifyUnreadableBlock(t *testing.T) {
	db := openQuiet(t)
	flushed(t, db, sequence())
	if err := db.VerifyChecksum(); err != nil {
		t.Fatal(err)
	}
	name := db.lc.levels[0].tables[0].Filename()
	overwrite(t, name, blocksEnd(t, name)-4, func(length []byte) { binary.BigEndian.PutUint32(length, 1<<30) })
	if err := db.VerifyChecksum(); err == nil {
		t.Error("a block without an end verifies")
	}
}

// without opens dir without logs; told, if not nil, is called when a memtable is in a table.
func without(t *testing.T, dir string, told func(version uint64)) *DB {
	t.Helper()
	opt := DefaultOptions(dir).WithMemTableSize(1 << 20).WithValueThreshold(100 << 10).WithNumCompactors(0).WithCompression(options.None).
		WithLoggingLevel(ERROR).WithNumMemtables(2).WithNumLevelZeroTablesStall(100)
	opt.NoLog, opt.OnFlush = true, told
	db, err := Open(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

// numbered commits a transaction of three keys that begin with its number.
func numbered(db *DB, n int) error {
	return db.Update(func(txn *Txn) error {
		for _, family := range "abc" {
			if err := txn.Set([]byte(fmt.Sprintf("%c-%06d", family, n)), make([]byte, 2000)); err != nil {
				return err
			}
		}
		return nil
	})
}

// left copies what a kill would leave of dir now, but for the value log, which is empty: the
// MANIFEST first, since what it names is there before and stays.
func left(t *testing.T, dir string) (crash string) {
	t.Helper()
	crash = t.TempDir()
	files, err := filepath.Glob(filepath.Join(dir, "*.*"))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range append([]string{filepath.Join(dir, "MANIFEST"), filepath.Join(dir, "KEYREGISTRY")}, files...) {
		if filepath.Ext(name) == ".vlog" {
			continue
		}
		b, err := os.ReadFile(name)
		if err == nil {
			err = os.WriteFile(filepath.Join(crash, filepath.Base(name)), b, 0o600)
		}
		if err != nil {
			t.Error(err)
		}
	}
	return crash
}

// killed returns how many of the transactions of numbered are in what a kill of the process
// would leave of dir now. They must be the first ones, and whole.
func killed(t *testing.T, dir string) int {
	t.Helper()
	db := without(t, left(t, dir), nil)
	defer db.Close()
	var n [3]int
	if err := db.View(func(txn *Txn) error {
		it := txn.NewIterator(IteratorOptions{})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			family := it.Item().Key()[0] - 'a'
			n[family]++
			if want := fmt.Sprintf("%c-%06d", 'a'+family, n[family]); string(it.Item().Key()) != want {
				return fmt.Errorf("%s is missing, but %s is there", want, it.Item().Key())
			}
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	if n[0] != n[1] || n[0] != n[2] {
		t.Errorf("a part of a transaction is there: %v", n)
	}
	return n[0]
}

// Without logs a kill leaves what tables hold: no less than OnFlush was told and Flush waited
// for, and of every transaction all or nothing.
func TestNoLog(t *testing.T) {
	dir := t.TempDir()
	var db *DB
	told := uint64(0) // by the goroutine that flushes
	calls := 0
	db = without(t, dir, func(version uint64) {
		if version <= told {
			t.Errorf("told of version %d after %d", version, told)
		}
		told = version
		calls++
		// A transaction is a version here, the first one is 1.
		if n := killed(t, dir); uint64(n) < version {
			t.Errorf("told of version %d, a kill leaves %d", version, n)
		}
	})
	const each = 400
	for n := 1; n <= each; n++ {
		if err := numbered(db, n); err != nil {
			t.Fatal(err)
		}
		if n == each/2 {
			if err := db.Flush(); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n := killed(t, dir); n < each/2 || n == each {
		t.Errorf("half of %d is flushed, the last are in memory, a kill leaves %d", each, n)
	}
	if err := db.Flush(); err != nil {
		t.Fatal(err)
	}
	if n := killed(t, dir); n != each || told != each || calls < 2 {
		t.Errorf("flushed, a kill leaves %d of %d; told of %d in %d calls", n, each, told, calls)
	}
	before := calls
	if err := db.Flush(); err != nil || calls != before {
		t.Errorf("nothing is there to flush: %v, %d calls more", err, calls-before)
	}
	// While others write.
	done := make(chan error, 1)
	go func() {
		for n := each + 1; n <= 2*each; n++ {
			if err := numbered(db, n); err != nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for running := true; running; {
		if err := db.Flush(); err != nil {
			t.Error(err)
		}
		select {
		case err := <-done:
			if err != nil {
				t.Error(err)
			}
			running = false
		case <-time.After(20 * time.Millisecond):
		}
	}
	if logs, err := filepath.Glob(filepath.Join(dir, "*.mem")); err != nil || len(logs) > 0 {
		t.Errorf("there are logs: %v, %v", logs, err)
	}
	if err := db.Close(); err != nil {
		t.Error(err)
	}
	if n := killed(t, dir); n != 2*each {
		t.Errorf("closed, it has %d of %d", n, 2*each)
	}
}

// The memory of a memtable that was written out is the next one's. What was read from it
// before is not changed by that, nor is what an open iterator still has to read.
func TestMemoryIsUsedAgain(t *testing.T) {
	db := without(t, t.TempDir(), nil)
	const keys = 200
	key := func(i int) []byte { return fmt.Appendf(nil, "k-%05d", i) }
	fill := func(b byte) {
		t.Helper()
		for i := range keys {
			if err := db.Update(func(txn *Txn) error { return txn.Set(key(i), bytes.Repeat([]byte{b}, 500)) }); err != nil {
				t.Fatal(err)
			}
		}
	}
	arena := func() *skl.Skiplist { db.lock.RLock(); defer db.lock.RUnlock(); return db.mt.sl }
	check := func(what string, v []byte, b byte) {
		t.Helper()
		if !bytes.Equal(v, bytes.Repeat([]byte{b}, 500)) {
			t.Errorf("%s: %d bytes, %.8q", what, len(v), v)
		}
	}
	fill('a')
	memory := arena().Memory()
	// Both ways through get: the version is the one that is asked for, or an earlier one.
	var read [][]byte
	for _, version := range []uint64{keys, math.MaxUint64} {
		for _, i := range []int{0, keys - 1} {
			vs, err := db.get(y.KeyWithTs(key(i), version))
			if err != nil {
				t.Fatal(err)
			}
			read = append(read, vs.Value)
		}
	}
	flush := func() {
		t.Helper()
		if err := db.Flush(); err != nil {
			t.Fatal(err)
		}
	}
	flush() // the next memtable has memory of its own
	fill('b')
	flush() // and the one after it that of the first
	fill('c')
	if &arena().Memory()[0] != &memory[0] {
		t.Error("the memory of the first memtable is not used again")
	}
	for i, v := range read {
		check(fmt.Sprintf("read %d", i), v, 'a')
	}

	// An iterator keeps its memtable.
	txn := db.NewTransaction(false)
	defer txn.Discard()
	opt := DefaultIteratorOptions
	opt.PrefetchValues = false
	it := txn.NewIterator(opt)
	it.Rewind()
	for _, b := range []byte("defg") {
		flush()
		fill(b)
		if &arena().Memory()[0] == &memory[0] {
			t.Error("the memory of a memtable is used again that somebody reads")
		}
	}
	n := 0
	for ; it.Valid(); it.Next() {
		v, err := it.Item().ValueCopy(nil)
		if err != nil {
			t.Fatal(err)
		}
		check(string(it.Item().Key()), v, 'c')
		n++
	}
	if n != keys {
		t.Errorf("%d of %d keys", n, keys)
	}
	it.Close()
	for _, b := range []byte("hi") {
		flush()
		fill(b)
	}
	for i := range keys {
		if err := db.View(func(txn *Txn) error {
			item, err := txn.Get(key(i))
			if err != nil {
				return err
			}
			v, err := item.ValueCopy(nil)
			check(string(key(i)), v, 'i')
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
}

// Readers of memtables, of their iterators and of tables see whole values, of the key that they
// asked for, while memtables are written out and their memory is used again.
func TestReadersWhileMemoryIsUsedAgain(t *testing.T) {
	t.Parallel()
	opt := DefaultOptions(t.TempDir()).WithMemTableSize(1 << 20).WithValueThreshold(100 << 10).WithNumCompactors(2).WithCompression(options.None).
		WithLoggingLevel(ERROR).WithNumMemtables(2).WithChecksumVerificationMode(options.OnTableRead)
	opt.BaseTableSize, opt.TableSizeMultiplier, opt.NoLog = 512<<10, 1, true
	opt.WrittenOnce = func(a, b []byte) bool { return a[0] == 'w' && b[0] == 'w' }
	db, err := Open(opt)
	if err != nil {
		t.Fatal(err)
	}
	const keys = 400
	value := func(k int, r *rand.Rand) []byte {
		size := 16 + r.Intn(3000)
		if r.Intn(50) == 0 {
			size = 20 << 10
		}
		seed := byte(r.Intn(256))
		v := bytes.Repeat([]byte{byte(k) ^ seed}, size)
		binary.BigEndian.PutUint64(v, uint64(k))
		v[8] = seed
		return v
	}
	check := func(what string, key, v []byte) {
		k := 0
		if _, err := fmt.Sscanf(string(key[2:]), "%d", &k); err != nil || len(v) < 16 || binary.BigEndian.Uint64(v) != uint64(k) ||
			!bytes.Equal(v[9:], bytes.Repeat([]byte{byte(k) ^ v[8]}, len(v)-9)) {
			t.Errorf("%s of %q: %d bytes, %.24q, %v", what, key, len(v), v, err)
		}
	}
	over := time.Now().Add(2 * time.Second)
	goOn := func() bool { return time.Now().Before(over) && !t.Failed() }
	var wg sync.WaitGroup
	var writes atomic.Int64
	for w := range 2 {
		wg.Go(func() {
			r := rand.New(rand.NewSource(int64(w)))
			for goOn() {
				err := db.Update(func(txn *Txn) error {
					for range 5 {
						k := 2*r.Intn(keys/2) + w
						if err := txn.Set(fmt.Appendf(nil, "k-%05d", k), value(k, r)); err != nil {
							return err
						}
					}
					n := int(writes.Add(1))
					return txn.Set(fmt.Appendf(nil, "w-%09d", n), value(n, r))
				})
				if err != nil {
					t.Error(err)
				}
			}
		})
	}
	all := func(opt IteratorOptions, pause func()) error {
		return db.View(func(txn *Txn) error {
			it := txn.NewIterator(opt)
			defer it.Close()
			for it.Rewind(); it.Valid() && !t.Failed(); it.Next() {
				pause()
				key := it.Item().KeyCopy(nil)
				if err := it.Item().Value(func(v []byte) error { check("iterator", key, v); return nil }); err != nil {
					return err
				}
			}
			return nil
		})
	}
	for g := range 3 {
		wg.Go(func() {
			r := rand.New(rand.NewSource(int64(100 + g)))
			for goOn() {
				opt := IteratorOptions{PrefetchValues: r.Intn(2) == 0, Reverse: r.Intn(2) == 0, PrefetchSize: 3}
				pause := func() {
					if r.Intn(40) == 0 {
						time.Sleep(time.Millisecond)
					}
				}
				if r.Intn(20) == 0 {
					if err := all(opt, pause); err != nil {
						t.Error(err)
					}
					continue
				}
				key := fmt.Appendf(nil, "k-%05d", r.Intn(keys))
				if err := db.View(func(txn *Txn) error {
					item, err := txn.Get(key)
					if err != nil {
						return err
					}
					return item.Value(func(v []byte) error { check("get", key, v); return nil })
				}); err != nil && !errors.Is(err, ErrKeyNotFound) {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	if err := db.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := db.VerifyChecksum(); err != nil {
		t.Error(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	if db, err = Open(opt); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close() }()
	if err := all(DefaultIteratorOptions, func() {}); err != nil {
		t.Error(err)
	}
}

// Memory that nobody asks for again goes.
func TestMemoryIsGivenBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var pool skl.Pool
		list := func() *byte {
			s := pool.NewSkiplist(1 << 20)
			defer s.DecrRef()
			return &s.Memory()[0]
		}
		first := list()
		for range 3 {
			time.Sleep(4 * time.Second) // each time it waits anew
			if list() != first {
				t.Error("it is gone already")
			}
		}
		time.Sleep(6 * time.Second)
		if list() == first {
			t.Error("it is still there")
		}
	})
}

// Logs of a program that kept them are replayed and removed.
func TestNoLogFindsLogs(t *testing.T) {
	dir := t.TempDir()
	opt := DefaultOptions(dir).WithMemTableSize(1 << 20).WithValueThreshold(100 << 10).WithNumCompactors(0).WithLoggingLevel(ERROR)
	db, err := Open(opt)
	if err != nil {
		t.Fatal(err)
	}
	const all = 100
	for n := 1; n <= all; n++ {
		if err := numbered(db, n); err != nil {
			t.Fatal(err)
		}
	}
	crash := left(t, dir)
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	logs, err := filepath.Glob(filepath.Join(crash, "*.mem"))
	if err != nil || len(logs) == 0 {
		t.Fatalf("no log: %v", err)
	}
	told := make(chan uint64, 10)
	db = without(t, crash, func(version uint64) { told <- version })
	if err := numbered(db, all+1); err != nil {
		t.Fatal(err)
	}
	if err := db.Flush(); err != nil {
		t.Fatal(err)
	}
	close(told)
	last := uint64(0)
	for v := range told {
		last = v
	}
	if logs, err = filepath.Glob(filepath.Join(crash, "*.mem")); err != nil || len(logs) > 0 {
		t.Errorf("logs are left: %v, %v", logs, err)
	}
	if n := killed(t, crash); n != all+1 || last != all+1 {
		t.Errorf("it has %d of %d, told of %d", n, all+1, last)
	}
}

// A table that cannot be made is an error of Flush, and is made later all the same.
func TestFlushFails(t *testing.T) {
	dir := t.TempDir()
	db := without(t, dir, nil)
	if err := numbered(db, 1); err != nil {
		t.Fatal(err)
	}
	name := filepath.Join(dir, fmt.Sprintf("%06d.sst", db.lc.nextFileID.Load()))
	if err := os.WriteFile(name, []byte("in its place"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := db.Flush(); err == nil {
		t.Error("a table that cannot be made is no error")
	}
	if n := killed(t, dir); n != 0 {
		t.Errorf("a kill leaves %d", n)
	}
	for end := time.Now().Add(10 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if err := db.Flush(); err == nil {
			break
		} else if time.Now().After(end) {
			t.Fatal(err)
		}
	}
	if n := killed(t, dir); n != 1 {
		t.Errorf("a kill leaves %d of 1", n)
	}
}

// A damaged table is refused, wherever the damage is, and does not end the process.
func TestDamagedTable(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	opt := DefaultOptions(dir).WithMemTableSize(8 << 20).WithNumCompactors(0).WithCompression(options.None).WithLogger(nil).
		WithChecksumVerificationMode(options.OnTableRead)
	db, err := Open(opt)
	if err != nil {
		t.Fatal(err)
	}
	if err := db.Update(sequence()); err != nil {
		t.Fatal(err)
	}
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	whole := left(t, dir)
	name := filepath.Join(whole, "000001.sst")
	intact, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	try := func(what string, b []byte) {
		t.Helper()
		if err := os.WriteFile(name, b, 0o600); err != nil {
			t.Fatal(err)
		}
		opt.Dir, opt.ValueDir = whole, whole
		db, err := Open(opt)
		if err == nil {
			t.Errorf("%s: it opens", what)
			_ = db.Close()
		}
	}
	for i := 0; i < len(intact); i += 5 { // each takes some milliseconds
		b := slices.Clone(intact)
		b[i] ^= 1 << (i % 8)
		try(fmt.Sprintf("a bit of byte %d of %d is wrong", i, len(b)), b)
	}
	for i := range 40 {
		try(fmt.Sprintf("%d bytes are left of %d", len(intact)*i/40, len(intact)), intact[:len(intact)*i/40])
	}
}
