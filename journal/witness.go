package journal

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"io/fs"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"waybill/dispatch"
)

// The witness is a series of preallocated segment files of fixed records, written
// with pwrite and fdatasync beside the store. It answers two questions at start-up:
// how far had the journal come, and which actions does a store that is behind not
// know of. FORMAT.md has the layout.
const (
	witnessMagic  = "WBWITN\x00\x01"
	segmentHeader = 4096 // the header has a block of its own: appending never rewrites it
	recordBytes   = 128
	macBytes      = sha256.Size
	defaultSlots  = 8192 // 1 MiB and the header

	recordMagic = 0x5752
	kindEvent   = 1 // an event that crosses or ends: see witnessed
	kindHead    = 2 // a group without one: only the head
)

// witnessRecord is one fixed record.
type witnessRecord struct {
	kind    uint8
	typ     dispatch.EventType
	index   uint16 // within the group's records
	count   uint16 // of the group's records
	attempt uint32
	group   uint64
	// settled is the last group that was durable in the store when this was written.
	// A store that is behind it has lost acknowledged data.
	settled uint64
	seq     uint64 // of the event
	action  dispatch.ActionID
	// head is the store's position after the group.
	headSeq  uint64
	headHash digest
}

// witnessed reports whether an event is named in the witness.
func witnessed(t dispatch.EventType) bool {
	switch t {
	case dispatch.DispatchStarted, dispatch.ResultCommitted, dispatch.AttemptResolved, dispatch.AttemptInterrupted,
		dispatch.ActionRefused, dispatch.TunnelOpened, dispatch.TunnelClosed:
		return true
	case dispatch.EventInvalid, dispatch.ActionAccepted, dispatch.PreflightValidated, dispatch.CredentialAuthorized,
		dispatch.AttemptFailed, dispatch.RequestSent, dispatch.ResponseStarted, dispatch.ResponseComplete,
		dispatch.CallerGone, dispatch.DeliveryFailed, dispatch.ResultDelivered, dispatch.Booted,
		dispatch.SessionOpened, dispatch.SessionClosed:
		return false
	default:
		return false
	}
}

// macer computes the records' MACs. One goroutine at a time.
type macer struct {
	h   hash.Hash
	sum [macBytes]byte
}

func newMacer(key []byte) *macer { return &macer{h: hmac.New(sha256.New, key)} }

// mac binds b to its place: segment number and offset in the file.
func (m *macer) mac(segment uint64, offset int64, b []byte) []byte {
	var place [16]byte
	binary.BigEndian.PutUint64(place[:], segment)
	binary.BigEndian.PutUint64(place[8:], uint64(offset))
	m.h.Reset()
	m.h.Write(place[:])
	m.h.Write(b)
	return m.h.Sum(m.sum[:0])
}

func (m *macer) valid(segment uint64, offset int64, b []byte) bool {
	return hmac.Equal(m.mac(segment, offset, b[:len(b)-macBytes]), b[len(b)-macBytes:])
}

// encode writes the record into b, which is recordBytes long.
func (r *witnessRecord) encode(b []byte, m *macer, segment uint64, offset int64) {
	clear(b[:recordBytes])
	binary.BigEndian.PutUint16(b[0:], recordMagic)
	b[2] = 1 // version
	b[3] = r.kind
	b[4] = uint8(r.typ)
	binary.BigEndian.PutUint16(b[6:], r.index)
	binary.BigEndian.PutUint16(b[8:], r.count)
	binary.BigEndian.PutUint32(b[12:], r.attempt)
	binary.BigEndian.PutUint64(b[16:], r.group)
	binary.BigEndian.PutUint64(b[24:], r.settled)
	binary.BigEndian.PutUint64(b[32:], r.seq)
	copy(b[40:], r.action[:])
	binary.BigEndian.PutUint64(b[56:], r.headSeq)
	copy(b[64:], r.headHash[:])
	copy(b[96:], m.mac(segment, offset, b[:96]))
}

// decodeWitness reads a record; ok is false for anything that is not one of this
// journal at this place.
func decodeWitness(b []byte, m *macer, segment uint64, offset int64) (r witnessRecord, ok bool) {
	if len(b) != recordBytes || binary.BigEndian.Uint16(b) != recordMagic || b[2] != 1 || !m.valid(segment, offset, b) {
		return r, false
	}
	r.kind, r.typ = b[3], dispatch.EventType(b[4])
	r.index, r.count = binary.BigEndian.Uint16(b[6:]), binary.BigEndian.Uint16(b[8:])
	r.attempt = binary.BigEndian.Uint32(b[12:])
	r.group, r.settled, r.seq = binary.BigEndian.Uint64(b[16:]), binary.BigEndian.Uint64(b[24:]), binary.BigEndian.Uint64(b[32:])
	copy(r.action[:], b[40:])
	r.headSeq = binary.BigEndian.Uint64(b[56:])
	copy(r.headHash[:], b[64:])
	if r.kind != kindEvent && r.kind != kindHead || r.count == 0 || r.index >= r.count {
		return r, false
	}
	return r, true
}

// segmentInfo is a segment's header: what was true when it was begun.
type segmentInfo struct {
	number uint64
	store  storeID
	slots  uint32
	// prevUsed is the number of slots of the segment before that were found, or
	// left, in use.
	prevUsed uint32
	// base is the store's position at that moment, base.group the last group that
	// store or witness had reached.
	base head
	// lostFirst to lost, if not 0, are the groups of segments before that the store
	// turned out not to have: their records name actions that may be missing.
	lostFirst, lost uint64
}

func (s *segmentInfo) encode(m *macer) []byte {
	b := make([]byte, segmentHeader)
	copy(b, witnessMagic)
	binary.BigEndian.PutUint64(b[8:], s.number)
	copy(b[16:], s.store[:])
	binary.BigEndian.PutUint32(b[32:], s.slots)
	binary.BigEndian.PutUint32(b[36:], s.prevUsed)
	binary.BigEndian.PutUint64(b[40:], s.base.seq)
	binary.BigEndian.PutUint64(b[48:], s.base.group)
	copy(b[56:], s.base.hash[:])
	binary.BigEndian.PutUint64(b[88:], s.lost)
	binary.BigEndian.PutUint64(b[96:], s.lostFirst)
	copy(b[segmentHeader-macBytes:], m.mac(s.number, 0, b[:segmentHeader-macBytes]))
	return b
}

// headerStore reads the store id of a header, before its MAC can be checked.
func headerStore(b []byte) (id storeID, ok bool) {
	if len(b) < segmentHeader || !bytes.HasPrefix(b, []byte(witnessMagic)) {
		return id, false
	}
	copy(id[:], b[16:])
	return id, true
}

func decodeSegmentInfo(b []byte, m *macer, number uint64) (s segmentInfo, ok bool) {
	if len(b) < segmentHeader || !bytes.HasPrefix(b, []byte(witnessMagic)) || !m.valid(number, 0, b[:segmentHeader]) {
		return s, false
	}
	s.number = binary.BigEndian.Uint64(b[8:])
	copy(s.store[:], b[16:])
	s.slots, s.prevUsed = binary.BigEndian.Uint32(b[32:]), binary.BigEndian.Uint32(b[36:])
	s.base.seq, s.base.group = binary.BigEndian.Uint64(b[40:]), binary.BigEndian.Uint64(b[48:])
	copy(s.base.hash[:], b[56:])
	s.lost, s.lostFirst = binary.BigEndian.Uint64(b[88:]), binary.BigEndian.Uint64(b[96:])
	if s.number != number || s.slots == 0 || s.slots > 1<<20 {
		return s, false
	}
	return s, true
}

// segment is one scanned segment.
type segment struct {
	segmentInfo
	used    uint32 // slots up to the last valid record
	records []witnessRecord
	// torn reports invalid bytes after the last valid record: a write that a crash
	// cut short.
	torn bool
}

// witnessState is what the segments say.
type witnessState struct {
	segments []segment // ascending, without a gap; empty: no witness yet
	// unfinished is a segment whose header never became durable: it holds nothing.
	unfinished uint64
}

// left reports whether a group that segment i holds is on a branch that a later start
// left: the store turned out not to have it.
func (w *witnessState) left(i int, group uint64) bool {
	for k := i + 1; k < len(w.segments); k++ {
		if s := &w.segments[k]; s.lost > 0 && group >= s.lostFirst && group <= s.lost {
			return true
		}
	}
	return false
}

// at returns the position that the witness recorded for a group, unless the group is
// on a branch that was left.
func (w *witnessState) at(group uint64) (h head, ok bool) {
	for i := range w.segments {
		if w.left(i, group) {
			continue
		}
		for k := range w.segments[i].records {
			if r := &w.segments[i].records[k]; r.group == group {
				return head{seq: r.headSeq, hash: r.headHash, group: group}, true
			}
		}
	}
	return head{}, false
}

// last returns the position that the witness had reached: the last group's, or that
// of the last segment's header.
func (w *witnessState) last() (h head, settled uint64) {
	for i := len(w.segments) - 1; i >= 0; i-- {
		s := &w.segments[i]
		if n := len(s.records); n > 0 {
			r := &s.records[n-1]
			return head{seq: r.headSeq, hash: r.headHash, group: r.group}, r.settled
		}
		if s.base.group > 0 || i == 0 {
			return s.base, s.base.group
		}
	}
	return head{}, 0
}

const segmentPrefix, segmentSuffix = "w-", ".wit"

func segmentName(n uint64) string { return fmt.Sprintf("%s%016x%s", segmentPrefix, n, segmentSuffix) }

func segmentNumber(name string) (uint64, bool) {
	s, ok := strings.CutPrefix(name, segmentPrefix)
	if s, ok = cutSuffix(s, segmentSuffix, ok); !ok || len(s) != 16 {
		return 0, false
	}
	n, err := strconv.ParseUint(s, 16, 64)
	return n, err == nil && n > 0
}

func cutSuffix(s, suffix string, ok bool) (string, bool) {
	if !ok {
		return s, false
	}
	return strings.CutSuffix(s, suffix)
}

// listSegments returns the numbers of the segments of dir, ascending.
func listSegments(dir string) ([]uint64, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("journal: witness: %w", err)
	}
	var out []uint64
	for _, e := range entries {
		if n, ok := segmentNumber(e.Name()); ok {
			out = append(out, n)
		}
	}
	slices.Sort(out)
	return out, nil
}

// witnessStore reads the store id from the first segment that has one. found is
// false when there is no segment with a header.
func witnessStore(dir string) (id storeID, found bool, err error) {
	numbers, err := listSegments(dir)
	if err != nil {
		return id, false, err
	}
	for _, n := range numbers {
		f, err := os.Open(filepath.Join(dir, segmentName(n)))
		if err != nil {
			return id, false, fmt.Errorf("journal: witness: %w", err)
		}
		b := make([]byte, segmentHeader)
		_, err = f.ReadAt(b, 0)
		_ = f.Close()
		if err != nil {
			continue
		}
		if id, ok := headerStore(b); ok {
			return id, true, nil
		}
		if bytes.HasPrefix(b, []byte(witnessMagic[:6])) && b[7] > witnessMagic[7] {
			return id, false, ErrFormat
		}
	}
	return id, false, nil
}

// rawSegment is a segment as it was read.
type rawSegment struct {
	number uint64
	b      []byte
}

// loadSegments reads all segments of dir.
func loadSegments(dir string) ([]rawSegment, error) {
	numbers, err := listSegments(dir)
	if err != nil {
		return nil, err
	}
	out := make([]rawSegment, 0, len(numbers))
	for _, n := range numbers {
		b, err := os.ReadFile(filepath.Join(dir, segmentName(n)))
		if err != nil {
			return nil, fmt.Errorf("journal: witness: %w", err)
		}
		out = append(out, rawSegment{n, b})
	}
	return out, nil
}

// scanWitness reads what the segments say. Damage that no crash can have made is a
// *CorruptError.
func scanWitness(raw []rawSegment, seal *sealer) (*witnessState, error) {
	m := newMacer(seal.witness)
	w := &witnessState{}
	for i := range raw {
		n, b := raw[i].number, raw[i].b
		s, err := scanSegment(b, m, n)
		if err != nil {
			if i == len(raw)-1 && !hasRecords(b, m, n) {
				// A crash between making the file and its header: nothing was ever in it.
				w.unfinished = n
				continue
			}
			return nil, err
		}
		if s.store != seal.id {
			return nil, &CorruptError{What: "witness segment " + strconv.FormatUint(n, 10) + " belongs to another journal"}
		}
		if k := len(w.segments); k > 0 {
			prev := &w.segments[k-1]
			if prev.number+1 != n {
				return nil, &CorruptError{What: "witness segment " + strconv.FormatUint(prev.number+1, 10) + " is missing"}
			}
			if prev.used != s.prevUsed {
				return nil, &CorruptError{What: "witness segment " + strconv.FormatUint(prev.number, 10) + " is damaged", Seq: prev.base.seq}
			}
		}
		w.segments = append(w.segments, s)
	}
	return w, nil
}

func hasRecords(b []byte, m *macer, number uint64) bool {
	for off := segmentHeader; off+recordBytes <= len(b); off += recordBytes {
		if _, ok := decodeWitness(b[off:off+recordBytes], m, number, int64(off)); ok {
			return true
		}
	}
	return false
}

// scanSegment reads one segment. A crash can leave the last group incomplete in any
// pattern of sectors, and nothing else: an invalid record before the last group's
// first slot is damage.
func scanSegment(b []byte, m *macer, number uint64) (segment, error) {
	damaged := func(seq uint64) error {
		return &CorruptError{What: "witness segment " + strconv.FormatUint(number, 10) + " is damaged", Seq: seq}
	}
	info, ok := decodeSegmentInfo(b, m, number)
	if !ok || len(b) != segmentHeader+int(info.slots)*recordBytes {
		return segment{}, damaged(0)
	}
	s := segment{segmentInfo: info}
	firstInvalid := uint32(math.MaxUint32) // first slot that is neither valid nor zero, or a gap
	lastSeq := info.base.seq
	for slot := range info.slots {
		off := segmentHeader + int(slot)*recordBytes
		raw := b[off : off+recordBytes]
		r, ok := decodeWitness(raw, m, number, int64(off))
		if !ok {
			if firstInvalid == math.MaxUint32 {
				firstInvalid = slot
			}
			if !isZero(raw) {
				s.torn = true
			}
			continue
		}
		if firstInvalid != math.MaxUint32 && uint32(r.index) < slot-firstInvalid {
			// The group of this record began after the invalid slot: that one was
			// durable once.
			return segment{}, damaged(lastSeq + 1)
		}
		if n := len(s.records); n > 0 && r.group < s.records[n-1].group || r.group <= info.base.group {
			return segment{}, damaged(lastSeq + 1)
		}
		s.records = append(s.records, r)
		s.used = slot + 1
		lastSeq = r.headSeq
	}
	return s, nil
}

func isZero(b []byte) bool {
	for _, c := range b {
		if c != 0 {
			return false
		}
	}
	return true
}

// witness writes the current segment. All methods belong to the committer's
// goroutines: one call at a time, except prepareSpare's goroutine.
type witness struct {
	dir   string
	sync  bool
	store storeID
	m     *macer
	slots uint32

	file *os.File
	info segmentInfo
	used uint32
	buf  []byte

	// kept are the finished segments still on disk, with the highest sequence in each.
	kept []keptSegment

	spare     chan error // result of the preparation that runs; nil: none runs
	spareDone bool
}

type keptSegment struct {
	number uint64
	maxSeq uint64
}

const spareName = "spare"

// newSegmentFile makes a file of the right length, its blocks allocated and written,
// so that a later fdatasync has no metadata to write and ENOSPC cannot happen.
func newSegmentFile(path string, slots uint32, sync bool) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	size := int64(segmentHeader) + int64(slots)*recordBytes
	if err = unix.Fallocate(int(f.Fd()), 0, 0, size); errors.Is(err, unix.EOPNOTSUPP) {
		err = nil // the zeros below allocate as well
	}
	zeros := make([]byte, 64<<10)
	for off := int64(0); err == nil && off < size; off += int64(len(zeros)) {
		_, err = f.WriteAt(zeros[:min(int64(len(zeros)), size-off)], off)
	}
	if err == nil && sync {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

// begin starts a new segment with the given header.
func (w *witness) begin(info segmentInfo) error {
	spare := filepath.Join(w.dir, spareName)
	if w.spare != nil {
		if err := <-w.spare; err != nil {
			return err
		}
		w.spare, w.spareDone = nil, true
	}
	if !w.spareDone {
		if err := newSegmentFile(spare, info.slots, w.sync); err != nil {
			return err
		}
	}
	w.spareDone = false
	path := filepath.Join(w.dir, segmentName(info.number))
	if err := os.Rename(spare, path); err != nil {
		return err
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0o600)
	if err != nil {
		return err
	}
	if _, err := f.WriteAt(info.encode(w.m), 0); err != nil {
		_ = f.Close()
		return err
	}
	if w.sync {
		if err := unix.Fdatasync(int(f.Fd())); err != nil {
			_ = f.Close()
			return err
		}
		if err := syncDir(w.dir); err != nil {
			_ = f.Close()
			return err
		}
	}
	if w.file != nil {
		if err := w.file.Close(); err != nil {
			_ = f.Close()
			return err
		}
	}
	w.file, w.info, w.used = f, info, 0
	return nil
}

// prepareSpare makes the next segment's file in the background.
func (w *witness) prepareSpare() {
	if w.spare != nil || w.spareDone {
		return
	}
	ch := make(chan error, 1)
	w.spare = ch
	path, slots, sync := filepath.Join(w.dir, spareName), w.slots, w.sync
	go func() { ch <- newSegmentFile(path, slots, sync) }()
}

// room reports whether n records fit in the current segment.
func (w *witness) room(n int) bool { return int(w.used)+n <= int(w.info.slots) }

// write appends a group's records to the current segment, which has room for them,
// and returns when they are durable.
func (w *witness) write(records []witnessRecord) error {
	if cap(w.buf) < len(records)*recordBytes {
		w.buf = make([]byte, max(len(records), 64)*recordBytes)
	}
	b := w.buf[:len(records)*recordBytes]
	start := int64(segmentHeader) + int64(w.used)*recordBytes
	for i := range records {
		off := i * recordBytes
		records[i].encode(b[off:off+recordBytes], w.m, w.info.number, start+int64(off))
	}
	if _, err := w.file.WriteAt(b, start); err != nil {
		return err
	}
	if w.sync {
		if err := unix.Fdatasync(int(w.file.Fd())); err != nil {
			return err
		}
	}
	w.used += uint32(len(records))
	if w.used > w.info.slots/2 {
		w.prepareSpare()
	}
	return nil
}

// rotate begins the next segment at position base and retires old ones: those whose
// every sequence is before keepFrom.
func (w *witness) rotate(base head, keepFrom uint64) error {
	w.kept = append(w.kept, keptSegment{w.info.number, base.seq})
	if err := w.begin(segmentInfo{number: w.info.number + 1, store: w.store, slots: w.slots, prevUsed: w.used, base: base}); err != nil {
		return err
	}
	return w.retire(keepFrom)
}

// minKept is the number of finished segments that are kept in any case: what a
// rollback is recognised by, and can be named from, should reach back some time.
const minKept = 4

func (w *witness) retire(keepFrom uint64) error {
	for len(w.kept) > minKept && w.kept[0].maxSeq < keepFrom {
		if err := os.Remove(filepath.Join(w.dir, segmentName(w.kept[0].number))); err != nil {
			return err
		}
		w.kept = w.kept[1:]
	}
	return nil
}

func (w *witness) close() error {
	if w.spare != nil {
		<-w.spare //nolint:errcheck // whether the next segment could be made does not matter any more
	}
	if w.file == nil {
		return nil
	}
	return w.file.Close()
}
