package journal

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"

	"github.com/dgraph-io/badger/v4"

	"waybill/dispatch"
)

// Report is what Verify looked at. With an error it counts what was in order before
// the first broken record.
type Report struct {
	Base           uint64 `json:"base"` // the chain begins after this event; before it there are only actions that never expire
	Seq            uint64 `json:"seq"`  // of the last event
	Head           string `json:"head"` // its hash
	Events         uint64 `json:"events"`
	Actions        int    `json:"actions"`
	Open           int    `json:"open"`
	Boots          int    `json:"boots"`
	SessionEvents  int    `json:"session_events"`
	Results        int    `json:"results"`
	Dropped        int    `json:"dropped"` // of them, by retention
	ResultBytes    int64  `json:"result_bytes"`
	OrphanChunks   int    `json:"orphan_chunks"` // of results that were never committed: garbage
	WitnessRecords int    `json:"witness_records"`
	// Broken is the first broken record; nil: none.
	Broken *CorruptError `json:"broken,omitempty"`
	// Quarantine says why the journal is in quarantine; "": it is not. What is there was
	// found in order.
	Quarantine string `json:"quarantine,omitempty"`
}

// Verify walks the whole journal while it runs: the sequence has no hole, the hash
// chain leads from the first event to the head, everything sealed opens, every
// projection is what dispatch.Apply makes of its events, indexes that decisions rest
// on are there, results match their manifests, and the witness agrees. The error is
// a *CorruptError that names the first broken record. It proves nothing about events
// that were never recorded (CONTRACT N3).
func (j *Journal) Verify(ctx context.Context) (Report, error) {
	v := verifier{j: j, ctx: ctx}
	err := v.run()
	var broken *CorruptError
	if errors.As(err, &broken) {
		v.report.Broken = broken
	}
	if err == nil && j.recovery.Quarantined {
		v.report.Quarantine, err = j.recovery.Reason, dispatch.ErrQuarantined
		if j.recovery.WitnessSeq > j.recovery.Seq {
			v.report.Broken = &CorruptError{What: "the store ends before its witness", Seq: j.recovery.Seq + 1}
			err = fmt.Errorf("%w: %w", dispatch.ErrQuarantined, v.report.Broken)
		}
	}
	return v.report, err
}

// Verify opens the journal in dir for reading, verifies it and closes it. key is the
// data key, or nil to use the key file in dir. It fails with ErrLocked while another
// process holds the journal.
func Verify(ctx context.Context, dir string, key []byte) (Report, error) {
	return verifyOffline(ctx, Options{Dir: dir, Key: key})
}

func verifyOffline(ctx context.Context, opt Options) (Report, error) {
	opt.ReadOnly, opt.AllowAnyFilesystem = true, true
	j, _, err := Open(opt)
	if err != nil {
		var r Report
		errors.As(err, &r.Broken)
		return r, err
	}
	r, err := j.Verify(ctx)
	if cerr := j.Close(); err == nil {
		err = cerr
	}
	return r, err
}

type verifier struct {
	j      *Journal
	ctx    context.Context
	report Report
	head   head
	base   mark // the chain begins after it
	// loose are the events that belong to no action: starts and sessions.
	loose uint64
	// marks are positions that the witness recorded: by sequence.
	marks map[uint64]digest
	// named are the events that the witness names, by sequence.
	named map[uint64]witnessRecord
}

func (v *verifier) run() error {
	j := v.j
	// One view for everything, taken between two groups, so that store and witness
	// are at the same position.
	var txn *snapshot
	var done func()
	var raw []rawSegment
	err := j.between(func() (err error) {
		if err := j.caughtUp(); err != nil {
			return err // stopped: the end of the history would be missing, and nothing say so (M7)
		}
		if txn, done, err = j.storeOnly(); err != nil {
			return err
		}
		if !j.hooks.NoWitness {
			raw, err = loadSegments(j.folder.path(nameWitness))
		}
		return err
	})
	if done != nil {
		defer done()
	}
	if err != nil {
		return err
	}
	var found bool
	if v.head, found, err = j.readHead(txn, keyHead); err != nil {
		return err
	}
	if !found {
		v.head.hash = j.seal.genesis()
	}
	if v.base, err = j.base(txn); err != nil {
		return err
	}
	v.report.Base = v.base.seq
	v.report.Seq, v.report.Head = v.head.seq, hex.EncodeToString(v.head.hash[:])
	if err := v.readWitness(raw); err != nil {
		return err
	}
	if err := v.events(txn); err != nil {
		return err
	}
	if err := v.actions(txn); err != nil {
		return err
	}
	if err := v.strays(txn); err != nil {
		return err
	}
	return v.results(txn)
}

// readWitness collects what the witness says about the part of the history that the
// view holds. A group that a start found lost is on a branch that was left: it says
// nothing about this chain.
func (v *verifier) readWitness(raw []rawSegment) error {
	v.marks, v.named = make(map[uint64]digest), make(map[uint64]witnessRecord)
	if v.j.hooks.NoWitness {
		return nil
	}
	w, err := scanWitness(raw, v.j.seal)
	if err != nil {
		return err
	}
	if at, _ := w.last(); v.j.Cause() == nil && !v.j.opt.ReadOnly && !v.j.recovery.Quarantined && (at.seq != v.head.seq || at.hash != v.head.hash) {
		return &CorruptError{What: "store and witness are at different positions", Seq: min(at.seq, v.head.seq) + 1}
	}
	for i := range w.segments {
		s := &w.segments[i]
		if s.base.seq > 0 && s.base.seq <= v.head.seq && !w.left(i, s.base.group) && !w.left(i-1, s.base.group) {
			v.marks[s.base.seq] = s.base.hash
		}
		for k := range s.records {
			r := &s.records[k]
			if w.left(i, r.group) {
				continue
			}
			if r.headSeq > v.head.seq || r.group > v.head.group {
				continue // the store does not have it: quarantine, or the next start finds it lost
			}
			v.report.WitnessRecords++
			if r.headSeq > 0 {
				v.marks[r.headSeq] = r.headHash
			}
			if r.kind == kindEvent && r.seq > v.base.seq {
				v.named[r.seq] = *r
			}
		}
	}
	return nil
}

// events walks the chain.
func (v *verifier) events(txn *snapshot) error {
	j := v.j
	it := txn.NewIterator(badger.IteratorOptions{PrefetchValues: true, PrefetchSize: 64, Prefix: []byte{famEvent}})
	defer it.Close()
	at := v.base.head
	if h, ok := v.marks[at.seq]; ok && h != at.hash && !j.hooks.NoChain {
		return &CorruptError{What: "the base of the chain differs from what the witness recorded", Seq: at.seq}
	}
	for it.Rewind(); it.Valid(); it.Next() {
		if err := v.ctx.Err(); err != nil {
			return context.Cause(v.ctx)
		}
		key := it.Item().KeyCopy(nil)
		if len(key) == 9 && binary.BigEndian.Uint64(key[1:]) <= v.base.seq {
			if err := v.kept(it.Item(), key); err != nil {
				return err
			}
			continue
		}
		value, err := it.Item().ValueCopy(nil)
		if err != nil {
			return &CorruptError{What: "event cannot be read", Seq: at.seq + 1}
		}
		var n int
		var plain []byte
		if j.hooks.NoChain {
			var ok bool
			if plain, _, ok = j.seal.open(key, value, hashBytes); !ok {
				return &CorruptError{What: "event does not open: altered", Seq: at.seq + 1}
			}
			at.seq = binary.BigEndian.Uint64(key[1:]) - 1
			n, _, err = frameCount(plain)
		} else {
			n, _, plain, err = j.checkFrame(at, key, value)
		}
		if err != nil {
			return err
		}
		f, err := decodeFrame(plain)
		if err != nil {
			return &CorruptError{What: "event does not decode", Seq: at.seq + 1}
		}
		for i := range f.events {
			seq := at.seq + 1 + uint64(i)
			r, ok := v.named[seq]
			if ok && (r.action != f.action || r.typ != f.events[i].Type || r.attempt != uint32(max(f.events[i].Attempt, 0))) {
				return &CorruptError{What: "event differs from what the witness recorded", Seq: seq, Action: f.action}
			}
			delete(v.named, seq)
		}
		if f.action.IsZero() {
			v.loose += uint64(n)
			if f.events[0].Type == dispatch.Booted {
				v.report.Boots++
			} else {
				v.report.SessionEvents += n
			}
		}
		at.seq, at.hash = at.seq+uint64(n), chain(key, value)
		if h, ok := v.marks[at.seq]; ok && h != at.hash && !j.hooks.NoChain {
			return &CorruptError{What: "the chain differs from what the witness recorded", Seq: at.seq}
		}
		v.report.Events += uint64(n)
	}
	if j.hooks.NoChain {
		return nil
	}
	if at.seq != v.head.seq || at.hash != v.head.hash {
		return &CorruptError{What: "events are missing before the head", Seq: at.seq + 1}
	}
	for seq := range v.named {
		if seq <= v.head.seq {
			return &CorruptError{What: "the witness names an event that is not there", Seq: seq}
		}
	}
	return nil
}

// kept looks at a frame before the base: it is not chained to anything any more, but
// sealed under its place, and its action's projection counts it.
func (v *verifier) kept(item *badger.Item, key []byte) error {
	seq := binary.BigEndian.Uint64(key[1:])
	value, err := item.ValueCopy(nil)
	if err != nil {
		return &CorruptError{What: "event cannot be read", Seq: seq}
	}
	plain, _, ok := v.j.seal.open(key, value, hashBytes)
	if !ok {
		return &CorruptError{What: "event does not open: altered", Seq: seq}
	}
	n, id, err := frameCount(plain)
	if err != nil {
		return &CorruptError{What: "event does not decode", Seq: seq}
	}
	if id.IsZero() {
		v.loose += uint64(n)
		v.report.Boots++
	}
	v.report.Events += uint64(n)
	return nil
}

// actions rebuilds every projection from its events.
func (v *verifier) actions(txn *snapshot) error {
	j := v.j
	it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{famRecord}})
	defer it.Close()
	counted := v.loose
	for it.Rewind(); it.Valid(); it.Next() {
		if err := v.ctx.Err(); err != nil {
			return context.Cause(v.ctx)
		}
		id, ok := trailingID(it.Item().Key())
		if !ok {
			return &CorruptError{What: "projection under a wrong key", Key: it.Item().KeyCopy(nil)}
		}
		p, err := j.readProjection(txn, id)
		if err != nil {
			return err
		}
		if p == nil {
			return &CorruptError{What: "projection vanished", Action: id}
		}
		events, err := j.readEvents(txn, id, p)
		if err != nil {
			return err
		}
		rebuilt, err := rebuild(id, events)
		if err != nil {
			return err
		}
		again := &projection{rec: rebuilt, frames: p.frames}
		want, errW := encodeProjection(again)
		have, errH := encodeProjection(p)
		if errW != nil || errH != nil || !bytes.Equal(want, have) {
			return &CorruptError{What: "projection differs from its events", Action: id}
		}
		if err := v.hints(txn, &p.rec); err != nil {
			return err
		}
		counted += uint64(len(events))
		v.report.Actions++
		if !p.rec.Ended {
			v.report.Open++
		}
	}
	// Every frame belongs to one action and no two projections share one: then the
	// sums agree only if none is left over.
	if counted != v.report.Events {
		return &CorruptError{What: fmt.Sprintf("%d events belong to no projection", int64(v.report.Events)-int64(counted))}
	}
	return nil
}

// rebuild is the projection of an action's events, by the function that live code
// uses.
func rebuild(id dispatch.ActionID, events []dispatch.StoredEvent) (rec dispatch.Record, err error) {
	for i := range events {
		rec.ID = id
		if rec, err = dispatch.Apply(rec, &events[i].Event, events[i].Seq); err != nil {
			return rec, &CorruptError{What: "event is illegal where it stands", Seq: events[i].Seq, Action: id}
		}
	}
	return rec, nil
}

// hints checks the index entries whose absence would be taken for an answer.
func (v *verifier) hints(txn *snapshot, rec *dispatch.Record) error {
	need := func(what string, key []byte, want bool) error {
		_, found, err := has(txn, key)
		if err == nil && found != want {
			err = &CorruptError{What: "index of " + what, Action: rec.ID}
		}
		return err
	}
	if err := need("open actions", keyAction(famOpen, rec.ID), !rec.Ended); err != nil {
		return err
	}
	if err := need("unresolved actions", keyAction(famDoubt, rec.ID), rec.Doubtful()); err != nil {
		return err
	}
	if err := need("actions by time", keyTime(rec.FirstSeq, rec.ID), true); err != nil {
		return err
	}
	if rec.RequestID != "" {
		key := keyRequest(v.j.seal.mac(macRequest, rec.Caller, rec.RequestID))
		value, found, err := get(txn, key)
		if err != nil {
			return err
		}
		if !found || !bytes.Equal(value, rec.ID[:]) {
			return &CorruptError{What: "index of request ids", Action: rec.ID}
		}
	}
	if err := v.verifyKey(txn, rec); err != nil {
		return err
	}
	if rec.GuardsRepeats() {
		if err := v.listed(txn, rec, "guarding actions", prefixLatest(famGuard, v.j.seal.mac(macGuard, rec.Caller, rec.Bound.Fingerprint))); err != nil {
			return err
		}
	}
	if to := rec.RedirectKey(); to != "" {
		return v.listed(txn, rec, "redirecting actions", prefixLatest(famRedirect, v.j.seal.mac(macGoto, rec.Caller, to)))
	}
	return nil
}

// listed checks that an index of the latest actions holds rec.
func (v *verifier) listed(txn *snapshot, rec *dispatch.Record, what string, prefix []byte) error {
	it := txn.NewIterator(badger.IteratorOptions{Prefix: prefix})
	defer it.Close()
	for it.Rewind(); it.Valid(); it.Next() {
		if id, ok := trailingID(it.Item().Key()); ok && id == rec.ID {
			return nil
		}
	}
	return &CorruptError{What: "index of " + what, Action: rec.ID}
}

// strays finds open-index entries without an action: they would be harmless, and
// nothing that works correctly makes them.
func (v *verifier) strays(txn *snapshot) error {
	it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{famOpen}})
	defer it.Close()
	n := 0
	for it.Rewind(); it.Valid(); it.Next() {
		n++
	}
	if n != v.report.Open {
		return &CorruptError{What: "index of open actions has entries without an action"}
	}
	return nil
}

// results reads every stored result whole.
func (v *verifier) results(txn *snapshot) error {
	j := v.j
	it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{famManifest}})
	expected := 0
	for it.Rewind(); it.Valid(); it.Next() {
		if err := v.ctx.Err(); err != nil {
			it.Close()
			return context.Cause(v.ctx)
		}
		key := it.Item().KeyCopy(nil)
		if len(key) != 21 {
			it.Close()
			return &CorruptError{What: "manifest under a wrong key", Key: key}
		}
		id, attempt := dispatch.ActionID(key[1:17]), int(binary.BigEndian.Uint32(key[17:]))
		n, err := v.result(txn, id, attempt)
		if err != nil {
			it.Close()
			return err
		}
		expected += n
	}
	it.Close()

	chunks := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{famChunk}})
	defer chunks.Close()
	have, placed := 0, 0
	for chunks.Rewind(); chunks.Valid(); chunks.Next() {
		if err := v.ctx.Err(); err != nil {
			return context.Cause(v.ctx)
		}
		have++
		if chunks.Item().ValueSize() != placeBytes {
			continue
		}
		// Also those of attempts without a result: they are there to be read (H4).
		key := chunks.Item().KeyCopy(nil)
		if len(key) != 25 {
			return &CorruptError{What: "chunk under a wrong key", Key: key}
		}
		p, err := chunks.Item().ValueCopy(nil)
		if err != nil {
			return &storeError{"read"}
		}
		if at, ok := placeIn(p); ok {
			size, found, err := has(txn, at.key())
			if err != nil {
				return err
			}
			if !found || size != int64(at.size) {
				return &CorruptError{What: "chunk is not in its place", Key: key, Action: dispatch.ActionID(key[1:17])}
			}
			placed++
		}
	}
	pieces := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{famPiece}})
	defer pieces.Close()
	for pieces.Rewind(); pieces.Valid(); pieces.Next() {
		placed--
	}
	v.report.OrphanChunks = have - expected - placed

	// Every record with a result has its manifest.
	records := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{famRecord}})
	defer records.Close()
	for records.Rewind(); records.Valid(); records.Next() {
		id, _ := trailingID(records.Item().Key())
		p, err := j.readProjection(txn, id)
		if err != nil {
			return err
		}
		if p == nil || p.rec.Result == nil {
			continue
		}
		m, err := j.readManifest(txn, id, p.rec.ResultOf)
		if err != nil {
			return err
		}
		if m == nil || m.Bytes != p.rec.Result.Bytes || m.Chunks != p.rec.Result.Chunks || m.Digest != p.rec.Result.Digest {
			return &CorruptError{What: "result without its manifest", Seq: p.rec.ResultSeq, Action: id}
		}
	}
	return nil
}

// result verifies one stored result and returns the number of its chunks.
func (v *verifier) result(txn *snapshot, id dispatch.ActionID, attempt int) (chunks int, err error) {
	m, err := v.j.readManifest(txn, id, attempt)
	if err != nil {
		return 0, err
	}
	if m == nil {
		return 0, &CorruptError{What: "manifest vanished", Action: id}
	}
	v.report.Results++
	if m.Dropped {
		v.report.Dropped++
		return 0, nil
	}
	sum := sha256.New()
	total := int64(0)
	for i := range m.Chunks {
		data, last, found, err := v.j.readChunk(txn, id, attempt, i)
		if err != nil {
			return 0, err
		}
		if !found || last != (i == m.Chunks-1) {
			return 0, &CorruptError{What: fmt.Sprintf("chunk %d of attempt %d is missing or out of place", i, attempt), Action: id}
		}
		sum.Write(data)
		total += int64(len(data))
	}
	if total != m.Bytes || "sha256:"+hex.EncodeToString(sum.Sum(nil)) != m.Digest {
		return 0, &CorruptError{What: "result differs from its digest", Action: id}
	}
	v.report.ResultBytes += total
	return m.Chunks, nil
}
