package audit

import (
	"bytes"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"waybill/internal/killpoint"
)

// Names in the folder.
const (
	nameLock       = "lock"
	nameSigner     = "signing.key"
	nameCheckpoint = "checkpoint" // the last one, for Verify
	segmentSuffix  = ".audit"
)

// The places where a crash test can end the process.
const (
	PointBeforeWrite = "audit-before-write"
	PointBeforeSync  = "audit-before-sync"
	PointAfterSync   = "audit-after-sync"
	PointBeforeCut   = "audit-before-cut" // the cut is on record, nothing is removed
)

// ErrLocked: another process writes this log.
var ErrLocked = errors.New("audit: the log is held by another process")

// Options say how a log is kept. Dir and Recipient are required.
type Options struct {
	Dir       string     // made with mode 0700; its parent must exist
	Recipient *PublicKey // events are sealed to it

	CheckpointEvery    int           // records between checkpoints; 0: 1,000
	CheckpointInterval time.Duration // a checkpoint is due this long after a record; 0: 10 minutes
	SegmentBytes       int64         // a segment that is larger is followed by another; 0: 16 MiB
	SegmentAge         time.Duration // or older; 0: one day
	Retention          time.Duration // of finished segments; 0: for good
	MaxBytes           int64         // of all segments: the oldest go; 0: no limit

	Now    func() time.Time // nil: time.Now; for people and retention, never for order
	NoSync bool             // for tests: worthless after a power cut
}

func (o *Options) withDefaults() {
	if o.CheckpointEvery <= 0 {
		o.CheckpointEvery = 1000
	}
	if o.CheckpointInterval <= 0 {
		o.CheckpointInterval = 10 * time.Minute
	}
	if o.SegmentBytes <= 0 {
		o.SegmentBytes = 16 << 20
	}
	if o.SegmentAge <= 0 {
		o.SegmentAge = 24 * time.Hour
	}
	if o.Now == nil {
		o.Now = time.Now
	}
}

// cursor is how far the log is in the journal, and the hash that the journal had there.
type cursor struct {
	seq   uint64
	frame digest
}

// Log is the writer of a log. It is not safe for concurrent use.
type Log struct {
	opt    Options
	lock   *os.File
	signer ed25519.PrivateKey
	id     logID

	segments []uint64 // numbers on disk, ascending; the last is written
	file     *os.File
	head     header // of the last segment
	size     int64  // of the last segment, synced
	count    uint64 // records so far
	hash     digest // what the next record is chained to: the last record, or the header
	record   digest // hash of the last record
	at       cursor

	checkpointed uint64 // records at the last checkpoint, that record included
	due          time.Time
	clockBase    time.Time // the retention clock at clockStart
	clockStart   time.Time
	broken       bool // the file may hold more than size: it is cut before the next write
	found        []Gap
	last         *Checkpoint
}

// OpenLog opens the log of a folder for writing, or begins one. What a crash left
// unfinished at the end is cut off: nothing counted on it. ErrLocked.
func OpenLog(opt Options) (l *Log, err error) {
	opt.withDefaults()
	if opt.Recipient == nil {
		return nil, fmt.Errorf("%w: no public key", ErrKey)
	}
	if err := os.Mkdir(opt.Dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("audit: %w", err)
	}
	st, err := os.Stat(opt.Dir)
	if err != nil {
		return nil, fmt.Errorf("audit: %w", err)
	}
	if !st.IsDir() || st.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("audit: %s must be a folder of mode 0700, is %v", opt.Dir, st.Mode())
	}
	l = &Log{opt: opt}
	if l.lock, err = lockFolder(opt.Dir); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			_ = l.Close()
		}
	}()
	if l.signer, err = l.loadSigner(); err != nil {
		return nil, err
	}
	if err := l.scan(); err != nil {
		return nil, err
	}
	return l, nil
}

func lockFolder(dir string) (*os.File, error) {
	f, err := os.OpenFile(filepath.Join(dir, nameLock), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("audit: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: %s", ErrLocked, dir)
		}
		return nil, fmt.Errorf("audit: lock: %w", err)
	}
	return f, nil
}

// loadSigner reads the key that signs checkpoints, or makes one.
func (l *Log) loadSigner() (ed25519.PrivateKey, error) {
	path := filepath.Join(l.opt.Dir, nameSigner)
	b, err := os.ReadFile(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		_, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			return nil, fmt.Errorf("audit: signing key: %w", err)
		}
		return key, l.put(nameSigner, key.Seed())
	case err != nil:
		return nil, fmt.Errorf("audit: signing key: %w", err)
	case len(b) != ed25519.SeedSize:
		return nil, fmt.Errorf("audit: %s is damaged; without it the next start makes another, and the log says so", path)
	}
	return ed25519.NewKeyFromSeed(b), nil
}

// put writes a small file: complete and durable under its name, or not at all.
func (l *Log) put(name string, b []byte) error {
	path := filepath.Join(l.opt.Dir, name)
	f, err := os.OpenFile(path+".new", os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	_, err = f.Write(b)
	if err == nil {
		err = l.sync(f)
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err == nil {
		err = l.syncDir()
	}
	if err != nil {
		return fmt.Errorf("audit: %s: %w", name, err)
	}
	return nil
}

func (l *Log) sync(f *os.File) error {
	if l.opt.NoSync {
		return nil
	}
	return f.Sync()
}

func (l *Log) syncDir() error {
	if l.opt.NoSync {
		return nil
	}
	d, err := os.Open(l.opt.Dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	return err
}

func segmentName(n uint64) string { return fmt.Sprintf("%016x%s", n, segmentSuffix) }

func (l *Log) path(n uint64) string { return filepath.Join(l.opt.Dir, segmentName(n)) }

// listSegments returns the numbers of the segments, ascending.
func listSegments(dir string) (out []uint64, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return nil, fmt.Errorf("audit: %w", err)
	}
	for _, e := range entries {
		s, ok := strings.CutSuffix(e.Name(), segmentSuffix)
		if n, err := strconv.ParseUint(s, 16, 64); ok && err == nil && segmentName(n) == e.Name() {
			out = append(out, n)
		}
	}
	slices.Sort(out)
	return out, nil
}

// scan finds the end of the log: the last segment's last whole record at which the
// cursor may stand.
func (l *Log) scan() (err error) {
	if l.segments, err = listSegments(l.opt.Dir); err != nil {
		return err
	}
	now := l.opt.Now()
	l.clockBase, l.clockStart = now, time.Now()
	if len(l.segments) == 0 {
		_, _ = rand.Read(l.id[:]) // never fails since Go 1.24
		l.hash = genesis(l.id)
		l.record = l.hash
		return l.begin()
	}
	n := l.segments[len(l.segments)-1]
	b, err := os.ReadFile(l.path(n))
	if err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	h, ok := decodeHeader(b)
	if !ok {
		// A crash while the segment was begun: nothing was ever in it. Otherwise it is
		// damage, which is kept for Verify to find.
		if len(b) > headerBytes {
			return fmt.Errorf("audit: segment %d has a damaged head; \"waybill audit verify\" says more. Move the folder away to begin another log", n)
		}
		if err := os.Remove(l.path(n)); err != nil {
			return fmt.Errorf("audit: %w", err)
		}
		return l.scan()
	}
	l.head, l.id = h, h.log
	l.count, l.hash, l.record, l.at = h.first-1, h.hash, h.record, cursor{h.seq, h.frame}
	if limit := h.clock.Add(l.opt.SegmentAge + 24*time.Hour); l.clockBase.After(limit) {
		l.clockBase = limit // a jump of the clock expires nothing
	}
	l.clockBase = later(l.clockBase, h.clock)
	l.size = headerBytes
	end, torn := tail(b, &h)
	for off := headerBytes; off < end; {
		r, n, ok := decodeRecord(b[off:])
		if !ok {
			break
		}
		off += n
		l.count, l.hash, l.record = r.index, r.hash, r.hash
		if r.kind == KindCheckpoint {
			l.checkpointed = r.index
		}
		l.at, l.size = cursor{r.seq, r.frame}, int64(off)
	}
	if l.file, err = os.OpenFile(l.path(n), os.O_RDWR, 0); err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	if !torn {
		// No crash leaves this: it stays as it is, and another segment goes on.
		l.found = append(l.found, Gap{Reason: GapDamaged, From: l.at.seq, To: l.at.seq, At: now.UTC()})
		return l.begin()
	}
	l.broken = int64(len(b)) > l.size
	if l.count > l.checkpointed {
		l.due = time.Now().Add(l.opt.CheckpointInterval)
	}
	if !bytes.Equal(h.to, l.opt.Recipient.k.Bytes()) || !bytes.Equal(h.signer, l.signer.Public().(ed25519.PublicKey)) {
		return l.begin()
	}
	return nil
}

func later(a, b time.Time) time.Time {
	if b.After(a) {
		return b
	}
	return a
}

// tail returns where the log's end is in the last segment: behind the last record,
// before anything invalid, at which a cursor may stand. torn is false when a later
// write follows behind something invalid: no crash leaves that.
func tail(b []byte, h *header) (end int, torn bool) {
	off, prev, index := headerBytes, h.hash, h.first
	end = off
	for off < len(b) {
		r, n, ok := decodeRecord(b[off:])
		if !ok || r.prev != prev || r.index != index {
			break
		}
		off += n
		prev, index = r.hash, index+1
		if r.kind != KindEvent || r.last {
			end = off
		}
	}
	for ; off < len(b); off++ {
		if r, _, ok := decodeRecord(b[off:]); ok && r.start {
			return end, false // what is before a write was synced
		}
	}
	return end, true
}

// clock is the time that retention goes by.
func (l *Log) clock() time.Time { return l.clockBase.Add(time.Since(l.clockStart)) }

// trim cuts off what a failed write left behind the end.
func (l *Log) trim() error {
	if !l.broken {
		return nil
	}
	err := l.file.Truncate(l.size)
	if err == nil {
		err = l.sync(l.file)
	}
	if err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	l.broken = false
	return nil
}

// begin starts a segment behind what is synced.
func (l *Log) begin() error {
	if err := l.trim(); err != nil {
		return err
	}
	number := uint64(1)
	if n := len(l.segments); n > 0 {
		number = l.segments[n-1] + 1
	}
	h := header{
		number: number, log: l.id, first: l.count + 1, prev: l.hash, record: l.record, seq: l.at.seq, frame: l.at.frame,
		to: l.opt.Recipient.k.Bytes(), signer: l.signer.Public().(ed25519.PublicKey), created: l.opt.Now(), clock: l.clock(),
	}
	f, err := os.OpenFile(l.path(number), os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err == nil {
		_, err = f.WriteAt(h.encode(), 0)
		if err == nil {
			err = l.sync(f)
		}
		if err == nil {
			err = l.syncDir()
		}
		if err != nil {
			_ = f.Close()
			_ = os.Remove(l.path(number)) // or the next start finds it: it holds nothing
		}
	}
	if err != nil {
		return fmt.Errorf("audit: new segment: %w", err)
	}
	if l.file != nil {
		_ = l.file.Close() // everything in it is synced
	}
	l.segments = append(l.segments, number)
	l.file, l.head, l.size, l.hash, l.broken = f, h, headerBytes, h.hash, false
	return nil
}

// entry is a record to be written.
type entry struct {
	kind  Kind
	seq   uint64
	frame digest
	last  bool
	plain []byte // of an event: to be sealed; else the body
}

// append writes records as one: when it returns nil they are durable, and the cursor
// stands behind them. A crash before that leaves any part of them, which the next
// start cuts off, and writes again. After an error the same entries may be tried again.
func (l *Log) append(entries []entry) error {
	if len(entries) == 0 {
		return nil
	}
	if l.size >= l.opt.SegmentBytes || l.count >= l.head.first && l.clock().Sub(l.head.clock) >= l.opt.SegmentAge {
		if err := l.begin(); err != nil {
			return err
		}
	}
	if err := l.trim(); err != nil {
		return err
	}
	sealer, err := newBatch(l.opt.Recipient)
	if err != nil {
		return err
	}
	var b []byte
	count, hash, at, checkpointed := l.count, l.hash, l.at, l.checkpointed
	for i := range entries {
		e := &entries[i]
		r := record{kind: e.kind, index: count + 1, seq: e.seq, frame: e.frame, last: e.last, start: i == 0, prev: hash}
		if e.kind == KindEvent {
			sealer.seal(&r, l.id, e.plain)
		} else {
			r.body = e.plain
		}
		b = r.encode(b)
		count, hash, at = r.index, r.hash, cursor{r.seq, r.frame}
		if e.kind == KindCheckpoint {
			checkpointed = r.index
		}
	}
	l.broken = true // until it is known to be durable
	killpoint.At(PointBeforeWrite)
	if _, err := l.file.WriteAt(b, l.size); err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	killpoint.At(PointBeforeSync)
	if err := l.sync(l.file); err != nil {
		// What the kernel did with the pages is not known: they are written again.
		return fmt.Errorf("audit: %w", err)
	}
	killpoint.At(PointAfterSync)
	if l.count == l.checkpointed {
		l.due = time.Now().Add(l.opt.CheckpointInterval)
	}
	l.size += int64(len(b))
	l.count, l.hash, l.record, l.at, l.checkpointed, l.broken = count, hash, hash, at, checkpointed, false
	return nil
}

// checkpointDue reports whether there is something to check and it is time.
func (l *Log) checkpointDue() bool {
	n := l.count - l.checkpointed
	return n > 0 && (n >= uint64(l.opt.CheckpointEvery) || !l.due.IsZero() && !time.Now().Before(l.due))
}

// checkpoint writes a signed checkpoint of what is in the log and returns it.
func (l *Log) checkpoint() (*Checkpoint, error) {
	c := &Checkpoint{Log: fmt.Sprintf("%x", l.id[:]), Records: l.count, Head: l.record, Seq: l.at.seq, At: l.opt.Now().UTC()}
	c.sign(l.signer)
	body, err := json.Marshal(c)
	if err != nil {
		return nil, fmt.Errorf("audit: checkpoint: %w", err)
	}
	if err := l.append([]entry{{kind: KindCheckpoint, seq: l.at.seq, frame: l.at.frame, plain: body}}); err != nil {
		return nil, err
	}
	l.last = c
	return c, l.put(nameCheckpoint, append(body, '\n'))
}

// retain removes finished segments that are too old or too many, after it has said
// so in the log: what is missing without that was removed by somebody else.
func (l *Log) retain() (removed int, err error) {
	if l.opt.Retention <= 0 && l.opt.MaxBytes <= 0 || len(l.segments) < 2 {
		return 0, nil
	}
	sizes, total := make([]int64, len(l.segments)), int64(0)
	for i, n := range l.segments {
		st, err := os.Stat(l.path(n))
		if err != nil {
			return 0, fmt.Errorf("audit: retention: %w", err)
		}
		sizes[i] = st.Size()
		total += sizes[i]
	}
	upTo := 0
	var next header // of the segment behind those that go
	for i := range len(l.segments) - 1 {
		h, err := readHeader(l.path(l.segments[i+1]))
		if err != nil {
			return 0, err
		}
		old := l.opt.Retention > 0 && l.clock().Sub(h.clock) > l.opt.Retention
		large := l.opt.MaxBytes > 0 && total > l.opt.MaxBytes
		if !old && !large {
			break
		}
		upTo, next = i+1, h
		total -= sizes[i]
	}
	if upTo == 0 {
		return 0, nil
	}
	cut := Cut{Records: next.first - 1, Segments: next.number - 1, Head: next.record, At: l.opt.Now().UTC()}
	body, err := json.Marshal(&cut)
	if err != nil {
		return 0, fmt.Errorf("audit: retention: %w", err)
	}
	if err := l.append([]entry{{kind: KindCut, seq: l.at.seq, frame: l.at.frame, plain: body}}); err != nil {
		return 0, err
	}
	if _, err := l.checkpoint(); err != nil {
		return 0, err
	}
	killpoint.At(PointBeforeCut)
	for range upTo {
		if err := os.Remove(l.path(l.segments[0])); err != nil {
			return removed, fmt.Errorf("audit: retention: %w", err)
		}
		l.segments = l.segments[1:]
		removed++
	}
	return removed, l.syncDir()
}

func readHeader(path string) (header, error) {
	f, err := os.Open(path)
	if err != nil {
		return header{}, fmt.Errorf("audit: %w", err)
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, headerBytes)
	if _, err := f.ReadAt(b, 0); err != nil {
		return header{}, fmt.Errorf("audit: %w", err)
	}
	h, ok := decodeHeader(b)
	if !ok {
		return h, fmt.Errorf("audit: %s has a damaged head", filepath.Base(path))
	}
	return h, nil
}

// bytesOnDisk is the size of all segments.
func (l *Log) bytesOnDisk() (n int64) {
	for _, s := range l.segments {
		if st, err := os.Stat(l.path(s)); err == nil {
			n += st.Size()
		}
	}
	return n
}

// Close gives the folder back.
func (l *Log) Close() error {
	var err error
	if l.file != nil {
		err = l.file.Close()
	}
	if l.lock != nil {
		err = errors.Join(err, l.lock.Close())
	}
	return err
}

// signerText is the public key that signs checkpoints.
func signerText(l *Log) string {
	return base64.StdEncoding.EncodeToString(l.signer.Public().(ed25519.PublicKey))
}

// frameEnds returns the places in a segment at which the cursor stood.
func frameEnds(path string) (out []cursor, err error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("audit: %w", err)
	}
	for off := headerBytes; off < len(b); {
		r, n, ok := decodeRecord(b[off:])
		if !ok {
			break
		}
		off += n
		if r.kind == KindEvent && r.last {
			out = append(out, cursor{r.seq, r.frame})
		}
	}
	return out, nil
}
