package journal

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"hash"
	"hash/crc32"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"

	"golang.org/x/sys/unix"

	"waybill/dispatch"
)

// The witness is the log that groups are made durable in: a series of preallocated
// segment files, written with pwrite and fdatasync before the store, which is not
// synced itself. It answers three questions at start-up: what did the store lose of
// what was acknowledged, how far had the journal come, and which actions does a store
// that is behind not know of. FORMAT.md has the layout.
const (
	witnessMagic  = "WBWITN\x00\x02"
	segmentHeader = 4096 // the header has a block of its own: appending never rewrites it
	unitBytes     = 512  // blocks begin at multiples of a sector
	macBytes      = sha256.Size
	defaultSlots  = 8192 // units: 4 MiB and the header

	blockMagic  = "WBGR"
	blockHead   = 1 // before a group's entries
	blockTail   = 2 // the same again behind them: one damaged sector loses no group
	blockFixed  = 128
	recordBytes = 32

	kindEvent = 1 // an event that crosses or ends: see witnessed
	kindHead  = 2 // a group without one: only the head
)

// witnessRecord is what the witness names of one event, or of a group without one.
type witnessRecord struct {
	kind    uint8
	typ     dispatch.EventType
	attempt uint32
	group   uint64
	// settled is the last group that was durable in the store itself when this was
	// written. A store that is behind it has lost more than a crash can explain.
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
		dispatch.SessionOpened, dispatch.SessionClosed, dispatch.ApprovalRequested, dispatch.ApprovalDecided,
		dispatch.LeaseTaken, dispatch.LeaseRenewed, dispatch.LeaseEnded, dispatch.RetryStopped, dispatch.Reconciled, dispatch.Attested, dispatch.EvidenceImported,
		dispatch.JobRecorded, dispatch.JobPolled, dispatch.JobEnded, dispatch.ItemsResolved, dispatch.UpgradeClosed:
		return false
	default:
		return false
	}
}

// macer computes the records' MACs. One goroutine at a time.
type macer struct {
	h     hash.Hash
	place [16]byte
	sum   [macBytes]byte
}

func newMacer(key []byte) *macer { return &macer{h: hmac.New(sha256.New, key)} }

// mac binds b to its place: segment number and offset in the file.
func (m *macer) mac(segment uint64, offset int64, b []byte) []byte {
	binary.BigEndian.PutUint64(m.place[:], segment)
	binary.BigEndian.PutUint64(m.place[8:], uint64(offset))
	m.h.Reset()
	m.h.Write(m.place[:])
	m.h.Write(b)
	return m.h.Sum(m.sum[:0])
}

func (m *macer) valid(segment uint64, offset int64, b []byte) bool {
	return hmac.Equal(m.mac(segment, offset, b[:len(b)-macBytes]), b[len(b)-macBytes:])
}

// loggedGroup is one group as it stands in a segment: its block, and where its
// entries are.
type loggedGroup struct {
	number, settled uint64
	head            head
	start, units    uint32 // in its segment
	payload         uint32 // bytes of the entries; 0: none are in the log
	check           uint64 // of the payload
	records         []witnessRecord
	// intact: the payload was read and is what was written.
	intact bool
}

// blockUnits is the length of a block that names n events.
func blockUnits(n int) uint32 {
	return uint32((blockFixed + n*recordBytes + macBytes + unitBytes - 1) / unitBytes)
}

// payloadUnits is the length of n bytes of entries.
func payloadUnits(n int) uint32 { return uint32((n + unitBytes - 1) / unitBytes) }

// groupUnits is what a group takes.
func groupUnits(records, payload int) uint32 { return 2*blockUnits(records) + payloadUnits(payload) }

// unitOffset is where a unit stands in its file.
func unitOffset(unit uint32) int64 { return segmentHeader + int64(unit)*unitBytes }

// payloadOffset is where a group's entries stand in its file.
func (g *loggedGroup) payloadOffset() int64 { return unitOffset(g.start + blockUnits(len(g.named()))) }

// named are the records that stand for events: the block holds these.
func (g *loggedGroup) named() []witnessRecord {
	if len(g.records) == 1 && g.records[0].kind == kindHead {
		return nil
	}
	return g.records
}

// checksum finds torn and damaged payloads. It is no protection against somebody who
// writes to the folder: what is sealed is so in the payload too.
func checksum(b []byte) uint64 {
	return uint64(crc32.Checksum(b, castagnoli))<<32 | uint64(crc32.ChecksumIEEE(b))
}

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// encode writes a block of the group into b, which is as long as the block.
func (g *loggedGroup) encode(b []byte, kind uint8, m *macer, segment uint64, unit uint32) {
	clear(b)
	named := g.named()
	copy(b, blockMagic)
	b[4], b[5] = 1, kind
	binary.BigEndian.PutUint32(b[8:], g.start)
	binary.BigEndian.PutUint32(b[12:], g.units)
	binary.BigEndian.PutUint64(b[16:], segment)
	binary.BigEndian.PutUint64(b[24:], g.number)
	binary.BigEndian.PutUint64(b[32:], g.settled)
	binary.BigEndian.PutUint64(b[40:], g.head.seq)
	copy(b[48:], g.head.hash[:])
	binary.BigEndian.PutUint32(b[80:], g.payload)
	binary.BigEndian.PutUint32(b[84:], uint32(len(named)))
	binary.BigEndian.PutUint64(b[88:], g.check)
	for i := range named {
		r := b[blockFixed+i*recordBytes:]
		binary.BigEndian.PutUint64(r, named[i].seq)
		copy(r[8:], named[i].action[:])
		binary.BigEndian.PutUint32(r[24:], named[i].attempt)
		r[28] = uint8(named[i].typ)
	}
	copy(b[len(b)-macBytes:], m.mac(segment, unitOffset(unit), b[:len(b)-macBytes]))
}

// decodeBlock reads the block that stands at unit of a segment's units; ok is false for
// anything that is not one of this segment at this place.
func decodeBlock(units []byte, unit uint32, m *macer, segment uint64) (g loggedGroup, kind uint8, ok bool) {
	b := units[int(unit)*unitBytes:]
	if string(b[:4]) != blockMagic || b[4] != 1 || binary.BigEndian.Uint64(b[16:]) != segment {
		return g, 0, false
	}
	kind = b[5]
	n := int(binary.BigEndian.Uint32(b[84:]))
	if n > maxGroupRecords || int(blockUnits(n))*unitBytes > len(b) {
		return g, 0, false
	}
	b = b[:int(blockUnits(n))*unitBytes]
	if !m.valid(segment, unitOffset(unit), b) {
		return g, 0, false
	}
	g.start, g.units = binary.BigEndian.Uint32(b[8:]), binary.BigEndian.Uint32(b[12:])
	g.number, g.settled = binary.BigEndian.Uint64(b[24:]), binary.BigEndian.Uint64(b[32:])
	g.head = head{seq: binary.BigEndian.Uint64(b[40:]), group: g.number}
	copy(g.head.hash[:], b[48:])
	g.payload, g.check = binary.BigEndian.Uint32(b[80:]), binary.BigEndian.Uint64(b[88:])
	for i := range n {
		r := b[blockFixed+i*recordBytes:]
		w := witnessRecord{kind: kindEvent, typ: dispatch.EventType(r[28]), attempt: binary.BigEndian.Uint32(r[24:]), seq: binary.BigEndian.Uint64(r)}
		copy(w.action[:], r[8:])
		g.records = append(g.records, w)
	}
	if n == 0 {
		g.records = []witnessRecord{{kind: kindHead, seq: g.head.seq}}
	}
	for i := range g.records {
		r := &g.records[i]
		r.group, r.settled, r.headSeq, r.headHash = g.number, g.settled, g.head.seq, g.head.hash
	}
	at := g.start
	if kind == blockTail {
		at = g.start + g.units - blockUnits(n)
	}
	// The MAC says that this program wrote it; the sums keep a reader within bounds.
	ok = (kind == blockHead || kind == blockTail) && at == unit && g.units == groupUnits(n, int(g.payload)) &&
		int64(g.start)+int64(g.units) <= int64(len(units)/unitBytes)
	return g, kind, ok
}

// segmentInfo is a segment's header: what was true when it was begun.
type segmentInfo struct {
	number uint64
	store  storeID
	slots  uint32 // units
	// prevUsed is the number of units of the segment before that were found, or
	// left, in use.
	prevUsed uint32
	// base is the store's position at that moment, base.group the last group that
	// store or witness had reached.
	base head
	// lostFirst to lost, if not 0, are the groups of segments before that the store
	// turned out not to have: their records name actions that may be missing.
	lostFirst, lost uint64
	// settled is the last group that was durable in the store when the segment was begun.
	settled uint64
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
	binary.BigEndian.PutUint64(b[104:], s.settled)
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
	s.lost, s.lostFirst, s.settled = binary.BigEndian.Uint64(b[88:]), binary.BigEndian.Uint64(b[96:]), binary.BigEndian.Uint64(b[104:])
	if s.number != number || s.slots == 0 || s.slots > 1<<16 {
		return s, false
	}
	return s, true
}

// segment is one scanned segment.
type segment struct {
	segmentInfo
	used    uint32 // units up to the end of the last group
	groups  []loggedGroup
	records []witnessRecord // of all groups
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

// last returns the position that the witness had reached – the last group's, or that
// of the last segment's header – and the last group that is durable in the store.
func (w *witnessState) last() (h head, settled uint64) {
	if n := len(w.segments); n > 0 {
		// The latest word: an operator may have gone back behind an earlier one.
		s := &w.segments[n-1]
		settled = s.settled
		if k := len(s.groups); k > 0 {
			settled = s.groups[k-1].settled
		}
	}
	for i := len(w.segments) - 1; i >= 0; i-- {
		s := &w.segments[i]
		if n := len(s.groups); n > 0 {
			return s.groups[n-1].head, settled
		}
		if s.base.group > 0 || i == 0 {
			return s.base, settled
		}
	}
	return head{}, settled
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
		if bytes.HasPrefix(b, []byte(witnessMagic[:6])) && b[7] < witnessMagic[7] {
			return id, false, ErrOldFormat
		}
	}
	return id, false, nil
}

// rawSegment is a segment's file; b is its content, read when it is nil.
type rawSegment struct {
	number uint64
	b      []byte
	path   string
}

// listed returns the segments of dir without reading them.
func listed(dir string) ([]rawSegment, error) {
	numbers, err := listSegments(dir)
	if err != nil {
		return nil, err
	}
	out := make([]rawSegment, 0, len(numbers))
	for _, n := range numbers {
		out = append(out, rawSegment{number: n, path: filepath.Join(dir, segmentName(n))})
	}
	return out, nil
}

// loadSegments reads all segments of dir.
func loadSegments(dir string) ([]rawSegment, error) {
	out, err := listed(dir)
	for i := range out {
		if err == nil {
			out[i].b, err = os.ReadFile(out[i].path)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("journal: witness: %w", err)
	}
	return out, nil
}

// read returns the segment's bytes, in buf if they have to be read.
func (r *rawSegment) read(buf *[]byte) ([]byte, error) {
	if r.b != nil {
		return r.b, nil
	}
	f, err := os.Open(r.path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if st.Size() > maxSegmentBytes {
		return nil, &CorruptError{What: "witness segment " + strconv.FormatUint(r.number, 10) + " is damaged"}
	}
	if int64(cap(*buf)) < st.Size() {
		*buf = make([]byte, st.Size())
	}
	b := (*buf)[:st.Size()]
	_, err = io.ReadFull(f, b)
	return b, err
}

// scanWitness reads what the segments say. Damage that no crash can have made is a
// *CorruptError.
func scanWitness(raw []rawSegment, seal *sealer) (*witnessState, error) {
	m := newMacer(seal.witness)
	w := &witnessState{}
	var buf []byte
	for i := range raw {
		n := raw[i].number
		b, err := raw[i].read(&buf)
		if err != nil {
			return nil, fmt.Errorf("journal: witness: %w", err)
		}
		s, err := scanSegment(b, m, n)
		if err != nil {
			if i == len(raw)-1 && !hasGroups(b, m, n) {
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

func hasGroups(b []byte, m *macer, number uint64) bool {
	if len(b) < segmentHeader {
		return false
	}
	units := b[segmentHeader : len(b)-(len(b)-segmentHeader)%unitBytes]
	for u := range uint32(len(units) / unitBytes) {
		if _, _, ok := decodeBlock(units, u, m, number); ok {
			return true
		}
	}
	return false
}

// scanSegment reads one segment. A crash can leave the last group incomplete in any
// pattern of sectors, and nothing else: a group that cannot be read before one that can
// be is damage. Behind the last group stands anything: the file was another segment's.
func scanSegment(b []byte, m *macer, number uint64) (segment, error) {
	damaged := func(seq uint64) error {
		return &CorruptError{What: "witness segment " + strconv.FormatUint(number, 10) + " is damaged", Seq: seq}
	}
	info, ok := decodeSegmentInfo(b, m, number)
	if !ok || len(b) != segmentHeader+int(info.slots)*unitBytes {
		return segment{}, damaged(0)
	}
	s := segment{segmentInfo: info}
	units := b[segmentHeader:]
	lastSeq, lastGroup := info.base.seq, info.base.group
	for u := uint32(0); u < info.slots; {
		g, kind, ok := decodeBlock(units, u, m, number)
		if !ok {
			u++
			continue
		}
		// Either its head, where the group before ends; or, the head being lost, its tail.
		// Anything else lies behind a group that is gone.
		if g.start != s.used || kind == blockHead && u != g.start || g.number <= lastGroup || g.settled >= g.number || g.head.seq < lastSeq {
			return segment{}, damaged(lastSeq + 1)
		}
		at := int(g.payloadOffset()) - segmentHeader
		g.intact = checksum(units[at:at+int(g.payload)]) == g.check
		s.groups = append(s.groups, g)
		s.records = append(s.records, g.records...)
		s.used = g.start + g.units
		lastSeq, lastGroup = g.head.seq, g.number
		u = s.used
	}
	return s, nil
}

// witness writes the current segment. All methods belong to the committer: one call at
// a time, except prepareSpare's goroutine.
type witness struct {
	dir   string
	sync  bool
	store storeID
	m     *macer
	slots uint32

	file *os.File
	// direct is the same file, opened to be written past the page cache; nil: its file
	// system does not say that it can.
	direct *os.File
	// async is for groups that several wait for; nil: there is none, or it was not tried.
	async   *asyncWrites
	noAsync bool
	info    segmentInfo
	used    uint32
	buf     []byte // as long as the longest of the last groups
	pages   []byte // of whole pages, for direct
	// syncs counts the system calls that made something durable.
	syncs *atomic.Uint64

	most    int64 // see maxFinished
	retires bool  // what earlier segments name is on record
	// kept are the finished segments still on disk, with the last group of each.
	kept []keptSegment

	spare  chan error // result of the preparation that runs; nil: none runs
	spares []string   // files that can be the next segment, by name
}

type keptSegment struct {
	number uint64
	last   head
	units  uint32
}

// spareName is what files are called that wait to be a segment again. The first one is made
// ahead where none waits; the others were segments, of which the store catches up with several
// at once where much is written. Making one costs as much writing as it will take.
func spareName(i int) string {
	if i == 0 {
		return "spare"
	}
	return "spare-" + strconv.Itoa(i)
}

const maxSpares = 6

// newSegmentFile makes a file of the right length, its blocks allocated and written,
// so that a later fdatasync has no metadata to write and ENOSPC cannot happen.
func newSegmentFile(path string, units uint32, sync bool) error {
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	size := unitOffset(units)
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

// usable reports whether a file can be the next segment as it is: long enough, and its
// blocks allocated.
func usable(path string, units uint32) bool {
	var st unix.Stat_t
	return unix.Lstat(path, &st) == nil && st.Mode&unix.S_IFMT == unix.S_IFREG && st.Size == unitOffset(units) && st.Blocks*512 >= st.Size
}

// begin starts a new segment with the given header. What stands in its file behind the
// header is another segment's, or nothing: blocks name their segment.
func (w *witness) begin(info segmentInfo) error {
	spare, err := w.nextSpare(info.slots)
	if err != nil {
		return err
	}
	path := filepath.Join(w.dir, segmentName(info.number))
	if err := os.Rename(spare, path); err != nil {
		return err
	}
	// Before the header: under its former name the file would be damaged with it.
	if err := w.syncDir(); err != nil {
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
	if err := w.flush(f); err != nil {
		_ = f.Close()
		return err
	}
	if w.file != nil {
		if err := w.file.Close(); err != nil {
			_ = f.Close()
			return err
		}
	}
	if w.direct != nil {
		_ = w.direct.Close() // nothing was handed to it that its fdatasync did not cover
	}
	w.file, w.direct, w.info, w.used = f, openDirect(path), info, 0
	return nil
}

// nextSpare returns the file that is the next segment, and makes it where there is none.
func (w *witness) nextSpare(units uint32) (path string, err error) {
	for len(w.spares) > 0 {
		path = filepath.Join(w.dir, w.spares[len(w.spares)-1])
		w.spares = w.spares[:len(w.spares)-1]
		if usable(path, units) {
			return path, nil
		}
	}
	path = filepath.Join(w.dir, spareName(0))
	if w.spare != nil {
		if err := <-w.spare; err != nil {
			return "", err
		}
		w.spare = nil
		if usable(path, units) {
			return path, nil
		}
	}
	return path, newSegmentFile(path, units, w.sync)
}

// findSpares looks for what an earlier process left.
func (w *witness) findSpares() {
	for i := range maxSpares {
		if usable(filepath.Join(w.dir, spareName(i)), w.slots) {
			w.spares = append(w.spares, spareName(i))
		}
	}
}

// freeSpare returns a name for one more; "": there are enough.
func (w *witness) freeSpare() string {
	for i := range maxSpares {
		if name := spareName(i); !slices.Contains(w.spares, name) && (i > 0 || w.spare == nil) {
			return name
		}
	}
	return ""
}

// openDirect opens a segment for writes past the page cache; nil: its file system does not
// say that units can be written so. Nothing else is lost then: a write and a sync of one
// group take about a third longer.
func openDirect(path string) *os.File {
	var st unix.Statx_t
	if err := unix.Statx(unix.AT_FDCWD, path, 0, unix.STATX_DIOALIGN, &st); err != nil || st.Mask&unix.STATX_DIOALIGN == 0 ||
		st.Dio_offset_align == 0 || unitBytes%st.Dio_offset_align != 0 || st.Dio_mem_align == 0 || os.Getpagesize()%int(st.Dio_mem_align) != 0 {
		return nil
	}
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		return nil
	}
	return f
}

func (w *witness) syncDir() error {
	if !w.sync {
		return nil
	}
	w.syncs.Add(1)
	return syncDir(w.dir)
}

func (w *witness) flush(f *os.File) error {
	if !w.sync {
		return nil
	}
	w.syncs.Add(1)
	return unix.Fdatasync(int(f.Fd()))
}

// prepareSpare makes the next segment's file in the background.
func (w *witness) prepareSpare() {
	if w.spare != nil || len(w.spares) > 0 {
		return
	}
	path, units, sync := filepath.Join(w.dir, spareName(0)), w.slots, w.sync
	ch := make(chan error, 1)
	w.spare = ch
	go func() { ch <- newSegmentFile(path, units, sync) }()
}

// room reports whether n units fit in the current segment.
func (w *witness) room(n uint32) bool { return w.used+n <= w.info.slots }

const (
	// maxKeptBuffer bounds what stays allocated for the next group.
	maxKeptBuffer = 256 << 10
	// maxDirect is the longest group that goes past the page cache: nearly every one.
	maxDirect = 2 << 20
)

// write appends a group and its entries to the current segment, which has room for
// them, and returns when they are durable. alone: one request waits for it, and likely
// nobody has other work meanwhile.
func (w *witness) write(g *loggedGroup, entries []entry, alone bool) error {
	n := 0
	for i := range entries {
		n += entries[i].logged()
	}
	block := int(blockUnits(len(g.named()))) * unitBytes
	g.start, g.units, g.payload = w.used, groupUnits(len(g.named()), n), uint32(n)
	size := int(g.units) * unitBytes
	b, file := w.buffer(size)
	payload := b[block:block]
	for i := range entries {
		payload = entries[i].appendTo(payload)
	}
	clear(b[block+n : size-block])
	g.check = checksum(payload)
	g.encode(b[:block], blockHead, w.m, w.info.number, g.start)
	g.encode(b[size-block:], blockTail, w.m, w.info.number, g.start+g.units-blockUnits(len(g.named())))
	if err := w.put(file, b, alone); err != nil {
		return err
	}
	if cap(w.buf) > maxKeptBuffer {
		w.buf = nil
	}
	w.used += g.units
	if w.used > w.info.slots/2 {
		w.prepareSpare()
	}
	return nil
}

// put makes b durable behind what the segment has.
func (w *witness) put(file *os.File, b []byte, alone bool) error {
	if file == w.direct && w.sync && !alone && !w.noAsync {
		if w.async == nil {
			w.async = newAsyncWrites()
		}
		err := errNoAsync
		if w.async != nil {
			err = w.async.write(file, b, unitOffset(w.used))
		}
		if !errors.Is(err, errNoAsync) {
			w.syncs.Add(1)
			return err
		}
		w.noAsync = true
	}
	if _, err := file.WriteAt(b, unitOffset(w.used)); err != nil {
		return err
	}
	return w.flush(file) // written directly or not: the disk may hold it back
}

// buffer returns memory for a group of the given size, and the file to write it to: the
// one past the page cache, for which the memory has to begin with a page, or the plain one.
func (w *witness) buffer(size int) ([]byte, *os.File) {
	if w.direct != nil && size <= maxDirect {
		if w.pages == nil {
			if b, err := unix.Mmap(-1, 0, maxDirect, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON); err == nil {
				w.pages = b
			}
		}
		if w.pages != nil {
			return w.pages[:size], w.direct
		}
	}
	if cap(w.buf) < size {
		w.buf = make([]byte, size+size/2)
	}
	return w.buf[:size], w.file
}

// logged is what an entry takes in a payload.
func (e *entry) logged() int { return 1 + 2 + 4 + len(e.key) + len(e.value) }

const (
	entrySet    = 0
	entryRemove = 1
)

func (e *entry) appendTo(b []byte) []byte {
	kind := byte(entrySet)
	if e.remove {
		kind = entryRemove
	}
	b = append(b, kind)
	b = binary.BigEndian.AppendUint16(b, uint16(len(e.key)))
	b = binary.BigEndian.AppendUint32(b, uint32(len(e.value)))
	b = append(b, e.key...)
	return append(b, e.value...)
}

// decodeEntries reads a payload; the entries share its memory.
func decodeEntries(b []byte) (out []entry, err error) {
	for len(b) > 0 {
		if len(b) < 7 || b[0] > entryRemove {
			return nil, errDecode
		}
		k, v := int(binary.BigEndian.Uint16(b[1:])), int64(binary.BigEndian.Uint32(b[3:]))
		if k == 0 || int64(len(b)) < 7+int64(k)+v {
			return nil, errDecode
		}
		e := entry{remove: b[0] == entryRemove, key: b[7 : 7+k : 7+k], value: b[7+k : 7+k+int(v) : 7+k+int(v)]}
		out, b = append(out, e), b[7+k+int(v):]
	}
	return out, nil
}

// rotate begins the next segment at position base, with room for n units. settled is
// the last group that is durable in the store.
func (w *witness) rotate(base head, settled uint64, n uint32) error {
	w.kept = append(w.kept, keptSegment{w.info.number, base, w.info.slots})
	return w.begin(segmentInfo{number: w.info.number + 1, store: w.store, slots: max(w.slots, n), prevUsed: w.used, base: base, settled: settled})
}

// minKept is the number of finished segments that are kept in any case: what a
// rollback is recognised by, and can be named from, should reach back some time.
const minKept = 3

// maxFinished is with how many bytes of them the next group makes a checkpoint: large results,
// and a stream without an end above all, fill segments with few events. As many as can be
// spares afterwards.
const maxFinished = (minKept + maxSpares) * (segmentHeader + defaultSlots*unitBytes)

// crowded reports whether the checkpoint keeps segments from being removed, and there are many.
func (w *witness) crowded(checkpoint uint64) bool {
	if !w.retires || len(w.kept) <= minKept || w.kept[0].last.group < checkpoint {
		return false
	}
	n := int64(0)
	for i := range w.kept {
		n += unitOffset(w.kept[i].units)
	}
	return n > w.most
}

// retire removes segments that the store has caught up with and that end before the group of
// the checkpoint; some become spares. By group, since the events of groups that were lost are
// counted again.
func (w *witness) retire(settled, checkpoint uint64) error {
	for w.retires && len(w.kept) > minKept && w.kept[0].last.group <= settled && w.kept[0].last.group < checkpoint {
		path := filepath.Join(w.dir, segmentName(w.kept[0].number))
		var err error
		if name := w.freeSpare(); name != "" && w.kept[0].units == w.slots {
			if err = os.Rename(path, filepath.Join(w.dir, name)); err == nil {
				w.spares = append(w.spares, name)
			}
		} else {
			err = os.Remove(path)
		}
		if err != nil {
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
	if w.async != nil {
		w.async.close()
	}
	if w.pages != nil {
		_ = unix.Munmap(w.pages)
		w.pages = nil
	}
	var err error
	for _, f := range []*os.File{w.direct, w.file} {
		if f != nil {
			err = errors.Join(err, f.Close())
		}
	}
	return err
}
