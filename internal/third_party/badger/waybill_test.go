package badger

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4/options"
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
	opt.TableMoves = func(first, last []byte) bool { return first[0] == last[0] && (first[0] == 'e' || first[0] == 'r') }
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

// below compacts level n into the next one, once.
func below(t *testing.T, db *DB, n int) error {
	t.Helper()
	return db.lc.doCompact(1, compactionPriority{level: n, score: 3, adjusted: 3, t: db.lc.levelTargets()})
}

// at returns the tables of a level by their id, each with the families it begins and ends with.
func at(db *DB, n int) map[uint64]string {
	out := make(map[uint64]string)
	for _, table := range db.lc.levels[n].tables {
		out[table.ID()] = string([]byte{table.Smallest()[0], table.Biggest()[0]})
	}
	return out
}

// A table of keys that are written once is handed on as it is where it overlaps with nothing
// and holds nothing that would be left out; every other one is written again. What is read
// stays the same, also after the store was opened again.
func TestTableMoves(t *testing.T) {
	db := openQuiet(t)
	base := db.lc.levelTargets().baseLevel
	if base != len(db.lc.levels)-1 {
		t.Fatalf("base level %d", base)
	}
	// Into the level above the last one, as when there is more.
	fill := func(f func(txn *Txn) error) {
		t.Helper()
		flushed(t, db, f)
		targets := db.lc.levelTargets()
		targets.baseLevel = base - 1
		if err := db.lc.doCompact(0, compactionPriority{level: 0, score: 3, adjusted: 3, t: targets}); err != nil {
			t.Fatal(err)
		}
	}
	check := func(want map[string]string) {
		t.Helper()
		if err := db.View(func(txn *Txn) error {
			for key, value := range want {
				item, err := txn.Get([]byte(key))
				if value == "" {
					if !errors.Is(err, ErrKeyNotFound) {
						return fmt.Errorf("%s: %v", key, err)
					}
					continue
				}
				if err != nil {
					return fmt.Errorf("%s: %w", key, err)
				}
				if got, err := item.ValueCopy(nil); err != nil || string(got) != value {
					return fmt.Errorf("%s: %q %v", key, got, err)
				}
			}
			return nil
		}); err != nil {
			t.Error(err)
		}
	}
	set := func(keys ...string) func(txn *Txn) error {
		return func(txn *Txn) error {
			for _, k := range keys {
				if err := txn.Set([]byte(k), []byte("of "+k)); err != nil {
					return err
				}
			}
			return nil
		}
	}
	// moved compacts until nothing is left above, and returns how many tables kept their file.
	moved := func() (kept int) {
		t.Helper()
		for len(db.lc.levels[base-1].tables) > 0 {
			before := at(db, base-1)
			if err := below(t, db, base-1); err != nil {
				t.Fatal(err)
			}
			for id := range at(db, base) {
				if _, ok := before[id]; ok {
					kept++
				}
			}
		}
		return kept
	}
	fill(set("c1", "e1", "e2", "g1", "r1"))
	if n := len(at(db, base-1)); n != 4 {
		t.Fatalf("%d tables", n)
	}
	if n := moved(); n != 2 {
		t.Errorf("%d tables were moved: of e and r", n)
	}
	fill(set("e3", "r2", "e0")) // e0 to e3 overlaps with e1
	if n := moved(); n != 1 {
		t.Errorf("%d tables were moved: of r", n)
	}
	// A deletion, of what is below and of what is not there.
	fill(func(txn *Txn) error { return errors.Join(txn.Delete([]byte("e2")), txn.Delete([]byte("r9"))) })
	if n := moved(); n != 0 {
		t.Errorf("%d tables with deletions were moved", n)
	}
	want := map[string]string{"e2": "", "r9": ""}
	for _, k := range []string{"c1", "e0", "e1", "e3", "g1", "r1", "r2"} {
		want[k] = "of " + k
	}
	check(want)
	opt := db.opt
	if err := db.Close(); err != nil {
		t.Fatal(err)
	}
	var err error
	if db, err = Open(opt); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	check(want)
	if err := db.VerifyChecksum(); err != nil {
		t.Error(err)
	}
}

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
