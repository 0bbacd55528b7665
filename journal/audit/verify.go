package audit

import (
	"crypto/ed25519"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"

	"waybill/internal/control"
)

// ErrBroken is wrapped by what Verify returns for a log that is not as it was written.
var ErrBroken = errors.New("audit: the log is broken")

// Broken names the first record that is not as it was written.
type Broken struct {
	Record  uint64 `json:"record"`  // its number, from 1
	Segment uint64 `json:"segment"` // where it is, or should be
	What    string `json:"what"`
}

// Error implements error.
func (b *Broken) Error() string {
	return fmt.Sprintf("record %d (segment %d): %s", b.Record, b.Segment, b.What)
}

// Is makes it an ErrBroken.
func (b *Broken) Is(target error) bool { return target == ErrBroken }

// Report is what Verify looked at. With an error it counts what was in order before
// the first broken record.
type Report struct {
	Log         string `json:"log"`
	Segments    int    `json:"segments"`
	First       uint64 `json:"first"`   // number of the first record that is there
	Records     uint64 `json:"records"` // of the log, the removed ones included
	Head        digest `json:"head"`
	Seq         uint64 `json:"seq"` // the journal's position at the end
	Events      uint64 `json:"events"`
	Checkpoints int    `json:"checkpoints"`
	Compared    int    `json:"compared"` // checkpoints from elsewhere that were compared
	// Removed are the records before First that retention says it removed.
	Removed uint64 `json:"removed_by_retention"`
	Gaps    []Gap  `json:"gaps,omitempty"`
	// Signers are the keys that signed checkpoints, base64, in order of appearance.
	Signers []string `json:"signers"`
	// Unfinished: a running proxy was writing; what was not complete yet is not counted.
	Unfinished bool    `json:"unfinished,omitempty"`
	Broken     *Broken `json:"broken,omitempty"`
}

// VerifyOptions say what the log is compared with.
type VerifyOptions struct {
	// Checkpoints of the log that were kept elsewhere: only they show that the log was
	// cut at its end, put back to an older state or replaced as a whole.
	Checkpoints []Checkpoint
	Signer      string // base64; every checkpoint must be signed by it; "": by whoever the segment names
}

// Verify walks the log of a folder without any private key. The error wraps ErrBroken
// and names the first altered, missing, reordered or cut off record. What it proves and
// what not is in docs/audit.md (CONTRACT N1, N3).
func Verify(dir string, opt VerifyOptions) (Report, error) {
	return verify(dir, opt, func(*Record) error { return nil })
}

func verify(dir string, opt VerifyOptions, visit func(*Record) error) (rep Report, err error) {
	if _, err := os.Stat(dir); err != nil {
		return rep, fmt.Errorf("audit: %w", err)
	}
	for range 4 {
		w := walker{dir: dir, opt: opt, visit: visit}
		err = w.run()
		rep = w.rep
		// Retention of a running proxy may have taken a segment away in between.
		if !errors.Is(err, fs.ErrNotExist) || len(w.seen) > 0 {
			break
		}
	}
	var b *Broken
	if errors.As(err, &b) {
		rep.Broken = b
	}
	return rep, err
}

// Record is one record as it is handed out.
type Record struct {
	Record  uint64 `json:"record"`
	Segment uint64 `json:"segment"`
	Kind    Kind   `json:"kind"`
	Hash    digest `json:"hash"`
	Seq     uint64 `json:"seq"`
	Gap     *Gap   `json:"gap,omitempty"`
	Cut     *Cut   `json:"cut,omitempty"`
	// Checkpoint is one that is part of the log.
	Checkpoint *Checkpoint `json:"checkpoint,omitempty"`

	raw *record
	log logID
}

type walker struct {
	dir   string
	opt   VerifyOptions
	visit func(*Record) error
	rep   Report

	live  bool // a process writes
	prev  digest
	rec   digest // hash of the last record
	next  uint64 // number of the record that is expected
	heads map[uint64]digest
	wants map[uint64]bool // records whose hashes checkpoints need
	cuts  []Cut
	start header // of the first segment
	good  uint64 // records up to the last checkpoint that was right
	seen  []uint64
}

func (w *walker) broken(n, segment uint64, format string, args ...any) error {
	return &Broken{Record: n, Segment: segment, What: fmt.Sprintf(format, args...)}
}

func (w *walker) run() error {
	segments, err := listSegments(w.dir)
	if err != nil {
		return err
	}
	if len(segments) == 0 {
		return fmt.Errorf("audit: there is no log in %s", w.dir)
	}
	w.live = isLocked(w.dir)
	all := w.opt.Checkpoints
	if b, err := os.ReadFile(filepath.Join(w.dir, nameCheckpoint)); err == nil {
		own, err := ParseCheckpoints(string(b))
		if err != nil {
			return w.broken(0, 0, "the folder's own last checkpoint is altered: %v", err)
		}
		all = append(slices.Clone(all), own...)
	}
	w.heads, w.wants = map[uint64]digest{}, map[uint64]bool{}
	for i := range all {
		w.wants[all[i].Records] = true
	}
	for i, n := range segments {
		if err := w.segment(i, n, i == len(segments)-1, segments); err != nil {
			return err
		}
	}
	w.rep.Segments, w.rep.Records, w.rep.Head = len(segments), w.next-1, w.prev
	if err := w.beginning(); err != nil {
		return err
	}
	return w.compare(all)
}

func isLocked(dir string) bool {
	f, err := os.Open(filepath.Join(dir, nameLock))
	if err != nil {
		return false
	}
	defer func() { _ = f.Close() }()
	return errors.Is(unix.Flock(int(f.Fd()), unix.LOCK_SH|unix.LOCK_NB), unix.EWOULDBLOCK)
}

func (w *walker) segment(i int, number uint64, last bool, all []uint64) error {
	b, err := os.ReadFile(filepath.Join(w.dir, segmentName(number)))
	if err != nil {
		return fmt.Errorf("audit: %w", err)
	}
	h, ok := decodeHeader(b)
	if !ok && last && len(b) <= headerBytes && i > 0 {
		return nil // begun, and nothing in it: the next start begins it again
	}
	if !ok || h.number != number {
		return w.broken(max(w.next, 1), number, "the head of the segment is altered")
	}
	if i == 0 {
		w.start, w.next, w.prev, w.rec = h, h.first, h.prev, h.record
		w.rep.Log, w.rep.First, w.rep.Seq = fmt.Sprintf("%x", h.log[:]), h.first, h.seq
		if h.first == 1 && h.record != genesis(h.log) {
			return w.broken(1, number, "the log does not begin at its beginning")
		}
	}
	if number != all[0]+uint64(i) {
		return w.broken(w.next, all[0]+uint64(i), "the segment is missing: records %d to %d", w.next, h.first-1)
	}
	switch {
	case h.log != w.start.log:
		return w.broken(w.next, number, "the segment belongs to another log")
	case h.first > w.next:
		return w.broken(w.next, number-1, "records %d to %d are missing at the end of the segment", w.next, h.first-1)
	case h.first < w.next:
		return w.broken(h.first, number, "the record stands twice: the segment begins with it, and the one before has it too")
	case (h.prev != w.prev || h.record != w.rec) && !control.Off("N1-chained"):
		return w.broken(w.next-1, number-1, "the record before the segment is not the one that the segment was chained to")
	}
	w.prev = h.hash
	if w.wants[h.first-1] {
		w.heads[h.first-1] = h.record
	}
	off := headerBytes
	for off < len(b) {
		r, n, ok := decodeRecord(b[off:])
		if !ok {
			return w.damaged(b, off, number, last)
		}
		if err := w.place(&r, b[off+n:], number); err != nil {
			return err
		}
		off += n
		if err := w.record(&r, &h, number); err != nil {
			return err
		}
	}
	return nil
}

// damaged names what is wrong where no whole record is.
func (w *walker) damaged(b []byte, off int, number uint64, last bool) error {
	for at := off + 1; at < len(b); at++ {
		r, _, ok := decodeRecord(b[at:])
		if !ok {
			continue
		}
		switch {
		case r.index == w.next+1:
			return w.broken(w.next, number, "altered")
		case r.index > w.next:
			return w.broken(w.next, number, "records %d to %d are altered or missing", w.next, r.index-1)
		default:
			return w.broken(w.next, number, "something was inserted before the record")
		}
	}
	if last && w.live {
		w.rep.Unfinished = true
		return nil
	}
	if last {
		return w.broken(w.next, number, "altered, or the log was cut off within it (a crash leaves that too, and the next start puts it right)")
	}
	return w.broken(w.next, number, "altered, or cut off, with what followed it in the segment")
}

// place checks that a whole record is the one that is expected.
func (w *walker) place(r *record, rest []byte, number uint64) error {
	if control.Off("N1-chained") {
		w.next = r.index
		return nil
	}
	switch {
	case r.index < w.next:
		return w.broken(r.index, number, "out of order: it stands behind record %d", w.next-1)
	case r.index > w.next:
		for len(rest) > 0 {
			other, n, ok := decodeRecord(rest)
			if !ok {
				break
			}
			if other.index == w.next {
				return w.broken(w.next, number, "out of order: record %d stands before it", r.index)
			}
			rest = rest[n:]
		}
		if r.index == w.next+1 {
			return w.broken(w.next, number, "missing")
		}
		return w.broken(w.next, number, "records %d to %d are missing", w.next, r.index-1)
	case r.prev != w.prev:
		// Either this record or the one before was replaced by one with a hash of its own.
		// The record behind says whether this one is as it was.
		if next, _, ok := decodeRecord(rest); (!ok || next.prev == r.hash) && w.next > w.start.first {
			return w.broken(w.next-1, number, "altered: the record behind it is chained to another")
		}
		return w.broken(w.next, number, "altered: it is chained to another record before it")
	}
	return nil
}

// record takes a record that is in its place.
func (w *walker) record(r *record, h *header, number uint64) error {
	out := Record{Record: r.index, Segment: number, Kind: r.kind, Hash: r.hash, Seq: r.seq, raw: r, log: h.log}
	var err error
	switch r.kind {
	case KindEvent:
		w.rep.Events++
	case KindGap:
		out.Gap = new(Gap)
		if err = json.Unmarshal(r.body, out.Gap); err == nil {
			w.rep.Gaps = append(w.rep.Gaps, *out.Gap)
		}
	case KindCut:
		out.Cut = new(Cut)
		if err = json.Unmarshal(r.body, out.Cut); err == nil {
			w.cuts = append(w.cuts, *out.Cut)
		}
	case KindCheckpoint:
		out.Checkpoint = new(Checkpoint)
		if err = json.Unmarshal(r.body, out.Checkpoint); err == nil {
			if err := w.checkpoint(out.Checkpoint, r, h, number); err != nil {
				return err
			}
		}
	}
	if err != nil {
		return w.broken(r.index, number, "it does not decode")
	}
	w.prev, w.rec, w.next = r.hash, r.hash, r.index+1
	w.rep.Seq = r.seq
	if w.wants[r.index] {
		w.heads[r.index] = r.hash
	}
	return w.visit(&out)
}

// checkpoint checks one that is part of the log: it speaks of everything before it.
func (w *walker) checkpoint(c *Checkpoint, r *record, h *header, number uint64) error {
	w.rep.Checkpoints++
	signer := base64.StdEncoding.EncodeToString(h.signer)
	if len(h.signer) != ed25519.PublicKeySize || c.Verify() != nil || c.Signer != signer {
		return w.broken(r.index, number, "the checkpoint's signature is wrong")
	}
	if w.opt.Signer != "" && c.Signer != w.opt.Signer {
		return w.broken(r.index, number, "the checkpoint is signed by another key than the expected one")
	}
	if !slices.Contains(w.rep.Signers, signer) {
		w.rep.Signers = append(w.rep.Signers, signer)
	}
	// The first record of a segment follows its head.
	if c.Log != w.rep.Log || c.Records != r.index-1 || c.Head != w.rec {
		return w.broken(w.good+1, number, "the signed checkpoint in record %d speaks of other records: what is between records %d and %d was replaced", r.index, w.good, r.index)
	}
	w.good = r.index
	return nil
}

// beginning tells a log whose first records retention removed from one whose first
// records are missing.
func (w *walker) beginning() error {
	first := w.start.first
	if first == 1 {
		return nil
	}
	if control.Off("N1-cuts-on-record") {
		w.rep.Removed = first - 1
		return nil
	}
	for _, c := range w.cuts {
		if c.Records > first-1 || c.Records == first-1 && c.Head == w.start.record {
			w.rep.Removed = first - 1
			return nil
		}
	}
	return w.broken(1, 1, "records 1 to %d are missing, and retention did not remove them", first-1)
}

// compare holds the log against checkpoints that were kept.
func (w *walker) compare(all []Checkpoint) error {
	for i := range all {
		c := &all[i]
		if err := c.Verify(); err != nil {
			return err
		}
		if w.opt.Signer != "" && c.Signer != w.opt.Signer {
			return fmt.Errorf("%w: of %d records: signed by another key than the expected one", ErrCheckpoint, c.Records)
		}
		switch head, there := w.heads[c.Records]; {
		case c.Log != w.rep.Log:
			return w.broken(1, 1, "this is another log: the checkpoint of %s is of log %s", c.At.Format("2006-01-02T15:04:05Z07:00"), c.Log)
		case c.Records >= w.next:
			return w.broken(w.next, w.start.number+uint64(w.rep.Segments)-1, "records %d to %d are missing at the end: the log was cut off, or put back to an older state, after the checkpoint of %s", w.next, c.Records, c.At.Format("2006-01-02T15:04:05Z07:00"))
		case !there: // before what retention left
			continue
		case head != c.Head:
			return w.broken(c.Records, w.start.number, "the records up to this one are not those of the checkpoint of %s: they were replaced", c.At.Format("2006-01-02T15:04:05Z07:00"))
		}
		w.rep.Compared++
	}
	return nil
}
