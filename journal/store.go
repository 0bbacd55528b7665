package journal

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"

	"github.com/dgraph-io/badger/v4"
	"github.com/dgraph-io/badger/v4/options"
)

const (
	memTableBytes = 8 << 20
	numMemtables  = 2
	// maxTxnBytes is Badger's limit for one transaction: 15 % of the memtable, and
	// the sum must stay below it.
	maxTxnBytes = memTableBytes * 15 / 100
	// maxStoredValue is the hard limit of one value: far below ValueThreshold, above
	// which Badger would move it to the value log, whose sync errors it drops.
	maxStoredValue = 256<<10 + 4<<10
	// storeMagic marks Badger's manifest as ours: it does not open as another program's.
	storeMagic = 0x5742
)

// storeOptions are Badger's, each for the reason given in the reference
// (journal-durability.md, section 1). TestStoreOptions pins them.
// flushed is told which version tables hold; nil: nobody asks.
func storeOptions(dir string, log badger.Logger, flushed func(version uint64)) badger.Options {
	opt := badger.DefaultOptions(dir).
		WithSyncWrites(false).
		WithMemTableSize(memTableBytes).
		WithNumMemtables(numMemtables).
		WithValueThreshold(1 << 20).
		WithValueLogFileSize(16 << 20).
		WithBlockCacheSize(4 << 20).
		WithIndexCacheSize(4 << 20).
		WithNumCompactors(2).
		WithNumLevelZeroTables(5).
		WithNumLevelZeroTablesStall(12).
		WithCompression(options.None).
		WithDetectConflicts(true).
		WithNumVersionsToKeep(1).
		WithEncryptionKey(nil).
		WithChecksumVerificationMode(options.OnTableRead).
		WithMetricsEnabled(false).
		WithExternalMagic(storeMagic).
		WithLogger(log)
	// A compaction holds a buffer of the size of each table it writes. With
	// tables that double from level to level 64 MiB of results cost 240 MiB of memory;
	// with equal ones, measured the same way, a tenth.
	opt.TableSizeMultiplier = 1
	opt.TableEnds, opt.WrittenOnce = tableEnds, writtenOnce
	opt.NoLog = true // the witness is it: settle.go
	opt.OnFlush = flushed
	return opt
}

// tableEnds gives the families that most bytes are in, events and chunks, tables of their
// own, and no table of others reaches over them. Their keys only grow, so that what is added
// overlaps with nothing that is there: a compaction has nothing of it to write again.
func tableEnds(last, next []byte) bool { return section(last) != section(next) }

// section tells the parts of the order of keys that tables are of.
func section(key []byte) int {
	n := 0
	for _, family := range []byte{famEvent, famChunk, famPiece} {
		if key[0] >= family {
			n++
		}
		if key[0] > family {
			n++
		}
	}
	return n
}

// writtenOnce tells two keys of one of these families: what stands there is written once, or
// again – a chunk as it was, or its new place – and deleted.
func writtenOnce(a, b []byte) bool {
	return a[0] == b[0] && (a[0] == famEvent || a[0] == famChunk || a[0] == famPiece)
}

// storeLogger receives Badger's log lines. Their arguments quote keys and values, so
// only the constant format is passed on. Lines that report lost or unreadable data
// without an error being returned stop the journal.
type storeLogger struct {
	log *slog.Logger
	// fatal remembers the first such line; onFatal, once set, is told at once.
	fatal   atomic.Bool
	onFatal atomic.Pointer[func()]
}

// fatalLines are parts of the formats that mean lost or unreadable data. Badger
// returns no error with them.
var fatalLines = []string{"Ignoring table", "Unable to read", "checksum", "CHECKSUM_MISMATCH", "Error while curlf sync", "MANIFEST cannot be written"}

func (l *storeLogger) line(level slog.Level, format string) {
	format = strings.TrimSpace(format)
	// One call in Badger passes an error's text as the format.
	shown := format
	if !strings.Contains(format, "%") || strings.HasPrefix(format, "CHECKSUM_MISMATCH") {
		shown, _, _ = strings.Cut(format, ":")
	}
	if level >= slog.LevelWarn {
		for _, f := range fatalLines {
			if strings.Contains(format, f) {
				l.log.Error("journal store reports lost data", slog.String("line", shown))
				if !l.fatal.Swap(true) {
					if f := l.onFatal.Load(); f != nil {
						(*f)()
					}
				}
				return
			}
		}
	}
	l.log.Log(context.Background(), level, "journal store", slog.String("line", shown))
}

func (l *storeLogger) Errorf(format string, _ ...any)   { l.line(slog.LevelError, format) }
func (l *storeLogger) Warningf(format string, _ ...any) { l.line(slog.LevelWarn, format) }
func (l *storeLogger) Infof(string, ...any)             {} // progress of compactions
func (l *storeLogger) Debugf(string, ...any)            {}

// get reads one value. found is false when the key is not in this view.
func get(txn *snapshot, key []byte) (value []byte, found bool, err error) {
	if e, ok := txn.pending(key); ok {
		return e.value, !e.remove, nil
	}
	item, err := txn.Get(key)
	if errors.Is(err, badger.ErrKeyNotFound) {
		return nil, false, nil
	}
	if err != nil {
		return nil, false, &storeError{"read"}
	}
	value, err = item.ValueCopy(nil)
	if err != nil {
		return nil, false, &storeError{"read"}
	}
	return value, true, nil
}

// has reports whether key is in this view, and its value's size.
func has(txn *snapshot, key []byte) (size int64, found bool, err error) {
	if e, ok := txn.pending(key); ok {
		return int64(len(e.value)), !e.remove, nil
	}
	item, err := txn.Get(key)
	if errors.Is(err, badger.ErrKeyNotFound) {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, &storeError{"read"}
	}
	return item.ValueSize(), true, nil
}
