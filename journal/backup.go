package journal

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"time"

	"github.com/dgraph-io/badger/v4"

	"waybill/journal/internal/hooks"
)

// BackupInfo says what a backup holds.
type BackupInfo struct {
	At       time.Time `json:"at"`
	Seq      uint64    `json:"seq"`  // of the last event
	Head     string    `json:"head"` // its hash
	Entries  int       `json:"entries"`
	Segments int       `json:"witness_segments"`
}

// ErrBackup: a backup is incomplete, altered, or sealed with another key.
var ErrBackup = errors.New("journal: backup does not verify")

const (
	backupMagic = "WBJBAK\x00\x02"
	backupChunk = 512 << 10
	// Kinds of records in a backup.
	backupEntry   = 'S'
	backupSegment = 'W'
	backupEnd     = 'E'
)

// keyBackup is the additional data of a backup's chunk: its number, and whether it is
// the last.
func keyBackup(n uint64, last bool) []byte {
	b := binary.BigEndian.AppendUint64([]byte("mbackup"), n)
	if last {
		return append(b, 1)
	}
	return append(b, 0)
}

// backupWriter seals a stream in numbered chunks.
type backupWriter struct {
	w    io.Writer
	seal *sealer
	buf  []byte
	n    uint64
}

func (b *backupWriter) flush(last bool) error {
	v := b.seal.seal(keyBackup(b.n, last), nil, b.buf)
	b.n++
	b.buf = b.buf[:0]
	var head [5]byte
	binary.BigEndian.PutUint32(head[:], uint32(len(v)))
	if last {
		head[4] = 1
	}
	if _, err := b.w.Write(head[:]); err != nil {
		return err
	}
	_, err := b.w.Write(v)
	return err
}

func (b *backupWriter) record(kind byte, key, value []byte) error {
	b.buf = append(b.buf, kind)
	b.buf = binary.BigEndian.AppendUint16(b.buf, uint16(len(key)))
	b.buf = append(b.buf, key...)
	b.buf = binary.BigEndian.AppendUint32(b.buf, uint32(len(value)))
	b.buf = append(b.buf, value...)
	if len(b.buf) >= backupChunk {
		return b.flush(false)
	}
	return nil
}

// Backup writes a copy of the whole journal, as of one moment between two groups, to
// w while the journal runs. It is sealed with the data key, which is not in it: keep
// <Dir>/key elsewhere. Order, number and end of its parts are authenticated, so that
// a part that is missing is noticed by Restore. A stopped or quarantined journal
// is copied as it is.
func (j *Journal) Backup(ctx context.Context, w io.Writer) (BackupInfo, error) {
	info := BackupInfo{At: j.opt.Now().UTC()}
	var txn *snapshot
	var done func()
	var raw []rawSegment
	err := j.between(func() (err error) {
		// What the store does not take is in the witness, and a start makes it again.
		_ = j.caughtUp()
		if txn, done, err = j.storeOnly(); err != nil {
			return err
		}
		raw, err = loadSegments(j.folder.path(nameWitness))
		return err
	})
	if done != nil {
		defer done()
	}
	if err != nil {
		return info, err
	}
	h, _, err := j.readHead(txn, keyHead)
	if err != nil {
		return info, err
	}
	info.Seq, info.Head = h.seq, hex.EncodeToString(h.hash[:])
	if _, err := w.Write(append([]byte(backupMagic), j.seal.id[:]...)); err != nil {
		return info, err
	}
	b := &backupWriter{w: w, seal: j.seal, buf: make([]byte, 0, 2*backupChunk)}
	it := txn.NewIterator(badger.IteratorOptions{PrefetchValues: true, PrefetchSize: 16})
	defer it.Close()
	for it.Rewind(); it.Valid(); it.Next() {
		if ctx.Err() != nil {
			return info, context.Cause(ctx)
		}
		value, err := it.Item().ValueCopy(nil)
		if err != nil {
			return info, &storeError{"read"}
		}
		if err := b.record(backupEntry, it.Item().KeyCopy(nil), value); err != nil {
			return info, err
		}
		info.Entries++
	}
	for i := range raw {
		// The length, then the bytes without the zeros at the end.
		key := binary.BigEndian.AppendUint64(nil, raw[i].number)
		key = binary.BigEndian.AppendUint64(key, uint64(len(raw[i].b)))
		if err := b.record(backupSegment, key, bytes.TrimRight(raw[i].b, "\x00")); err != nil {
			return info, err
		}
		info.Segments++
	}
	end, err := json.Marshal(&info)
	if err != nil {
		return info, err
	}
	if err := b.record(backupEnd, nil, end); err != nil {
		return info, err
	}
	return info, b.flush(true)
}

// Backup opens the journal in dir for reading and writes a backup of it. It fails
// with ErrLocked while another process holds the journal.
func Backup(ctx context.Context, dir string, w io.Writer) (BackupInfo, error) {
	j, _, err := Open(Options{Dir: dir, ReadOnly: true, AllowAnyFilesystem: true})
	if err != nil {
		return BackupInfo{}, err
	}
	info, err := j.Backup(ctx, w)
	return info, errors.Join(err, j.Close())
}

// ReadKey reads a data key: a journal's key file, or 64 hexadecimal digits.
func ReadKey(path string) ([]byte, error) { return readKey(path) }

// Restore makes the journal's folder dir of a backup. dir must not exist, and appears
// complete, durable and verified, or not at all. The journal starts in quarantine
// (CONTRACT M5): nothing inside it can tell what happened after the backup, so that an
// action it does not know is unknown, and new work waits for Acknowledge.
func Restore(ctx context.Context, from io.Reader, dir string, key []byte, log *slog.Logger) (info BackupInfo, err error) {
	if log == nil {
		log = slog.New(slog.DiscardHandler)
	}
	if _, err := os.Lstat(dir); err == nil {
		return info, fmt.Errorf("journal: %s: %w; a restore never replaces anything", dir, fs.ErrExist)
	} else if !errors.Is(err, fs.ErrNotExist) {
		return info, fmt.Errorf("journal: %w", err)
	}
	tmp := dir + ".restoring"
	if err := os.RemoveAll(tmp); err != nil {
		return info, fmt.Errorf("journal: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, os.RemoveAll(tmp))
		}
	}()
	for _, d := range []string{tmp, filepath.Join(tmp, nameWitness), filepath.Join(tmp, nameStore)} {
		if err := os.Mkdir(d, 0o700); err != nil {
			return info, fmt.Errorf("journal: %w", err)
		}
	}
	if info, err = restoreInto(ctx, bufio.NewReaderSize(from, 1<<20), tmp, key, log); err != nil {
		return info, err
	}
	if _, err := verifyOffline(ctx, Options{Dir: tmp, Key: key, Hooks: &hooks.Hooks{}}); err != nil {
		return info, fmt.Errorf("%w: %w", ErrBackup, err)
	}
	mark, err := json.Marshal(&info)
	if err != nil {
		return info, err
	}
	f := &folder{dir: tmp, sync: true}
	if err := f.put(nameRestored, mark); err != nil {
		return info, fmt.Errorf("journal: %w", err)
	}
	if err := os.Rename(tmp, dir); err != nil {
		return info, fmt.Errorf("journal: %w", err)
	}
	return info, syncDir(filepath.Dir(dir))
}

func restoreInto(ctx context.Context, r io.Reader, dir string, key []byte, log *slog.Logger) (info BackupInfo, err error) {
	damaged := func(what string) (BackupInfo, error) { return info, fmt.Errorf("%w: %s", ErrBackup, what) }
	head := make([]byte, len(backupMagic)+16)
	if _, err := io.ReadFull(r, head); err != nil {
		return damaged("too short")
	}
	switch {
	case !bytes.HasPrefix(head, []byte(backupMagic[:7])):
		return damaged("not a backup of a journal")
	case head[7] < backupMagic[7]:
		return info, ErrOldFormat
	case head[7] != backupMagic[7]:
		return info, ErrFormat
	}
	seal, err := newSealer(key, storeID(head[len(backupMagic):]))
	if err != nil {
		return info, fmt.Errorf("%w: %w", ErrKey, err)
	}
	f := &folder{dir: dir, sync: true}
	b := append([]byte(keyMagic), key...)
	if err := f.put(nameKey, append(b, keySum(b)...)); err != nil {
		return info, fmt.Errorf("journal: %w", err)
	}
	db, err := openStore(f.path(nameStore), &storeLogger{log: log}, nil)
	if err != nil {
		return info, err
	}
	defer func() {
		if cerr := db.Close(); err == nil && cerr != nil {
			err = &storeError{"close"}
		}
	}()
	batch := db.NewWriteBatch()
	defer batch.Cancel()
	entries, segments, ended := 0, 0, false
	for n := uint64(0); !ended; n++ {
		if ctx.Err() != nil {
			return info, context.Cause(ctx)
		}
		var h [5]byte
		if _, err := io.ReadFull(r, h[:]); err != nil {
			return damaged("it ends too early")
		}
		size, last := binary.BigEndian.Uint32(h[:]), h[4] == 1
		if size > 4*backupChunk+maxSegmentBytes {
			return damaged("a part of impossible size")
		}
		v := make([]byte, size)
		if _, err := io.ReadFull(r, v); err != nil {
			return damaged("it ends too early")
		}
		plain, _, ok := seal.open(keyBackup(n, last), v, 0)
		if !ok {
			return damaged(fmt.Sprintf("part %d is altered, out of place, or sealed with another key", n))
		}
		for len(plain) > 0 {
			kind, key, value, rest, ok := nextBackup(plain)
			if !ok {
				return damaged("a part does not decode")
			}
			plain = rest
			switch kind {
			case backupEntry:
				if batch.Set(bytes.Clone(key), bytes.Clone(value)) != nil {
					return info, &storeError{"restore"}
				}
				entries++
			case backupSegment:
				if len(key) != 16 {
					return damaged("a part does not decode")
				}
				size := binary.BigEndian.Uint64(key[8:])
				if size > maxSegmentBytes || size < uint64(len(value)) {
					return damaged("a part does not decode")
				}
				full := make([]byte, size)
				copy(full, value)
				if err := f.put(filepath.Join(nameWitness, segmentName(binary.BigEndian.Uint64(key))), full); err != nil {
					return info, fmt.Errorf("journal: %w", err)
				}
				segments++
			case backupEnd:
				if json.Unmarshal(value, &info) != nil {
					return damaged("a part does not decode")
				}
			default:
				return info, ErrFormat
			}
		}
		ended = last
	}
	if entries != info.Entries || segments != info.Segments || info.At.IsZero() {
		return damaged("it does not hold what it counts")
	}
	if batch.Flush() != nil {
		return info, &storeError{"restore"}
	}
	return info, f.syncDir(f.path(nameWitness))
}

// maxSegmentBytes bounds a witness segment.
const maxSegmentBytes = segmentHeader + (1<<16)*unitBytes

func nextBackup(b []byte) (kind byte, key, value, rest []byte, ok bool) {
	if len(b) < 3 {
		return 0, nil, nil, nil, false
	}
	kind = b[0]
	n := int(binary.BigEndian.Uint16(b[1:]))
	b = b[3:]
	if len(b) < n+4 {
		return 0, nil, nil, nil, false
	}
	key, b = b[:n], b[n:]
	m := int(binary.BigEndian.Uint32(b))
	b = b[4:]
	if len(b) < m {
		return 0, nil, nil, nil, false
	}
	return kind, key, b[:m], b[m:], true
}
