package journal

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/dgraph-io/badger/v4"
	"github.com/oklog/ulid/v2"

	"waybill/dispatch"
	"waybill/internal/killpoint"
	"waybill/outcome"
)

// Recovery is what Open found and did.
type Recovery struct {
	// Fresh: the journal was made by this Open.
	Fresh bool
	// Quarantined: the store is behind its witness (CONTRACT M5). Reads work, nothing
	// is written or admitted; Reason says what was compared.
	Quarantined bool
	Reason      string
	// Acknowledged: this start left the quarantine, since an operator said so.
	Acknowledged *Acknowledgement
	Boot         string // id of this start; "" when nothing was written

	Seq        uint64 // of the store's last event before this start
	WitnessSeq uint64 // of the witness's
	Walked     int    // events verified, from the checkpoint on

	Unknown      int                 // open actions that were dispatched, closed as unknown (M2, M4)
	NotAttempted int                 // open actions that were not, closed as not_attempted
	Lost         []dispatch.ActionID // actions that only the witness knew; unknown
	Redone       int                 // groups that were made again from the witness
	RemovedFiles int                 // empty files of the store
	Took         time.Duration
}

// Open opens the journal, repairs what a crash left, closes every action that was
// open (CONTRACT M4), and returns when a BOOT event is durable. It refuses a folder
// that another process holds (ErrLocked), an unsuitable file system (ErrFilesystem),
// too little space (ErrNoSpace), a missing or wrong key (ErrKey), a newer format
// (ErrFormat) or an older one (ErrOldFormat), and a damaged store or witness (*CorruptError). It deletes nothing
// but files that never held data. A journal that is behind its witness opens in
// quarantine: see Recovery.
func Open(opt Options) (*Journal, *Recovery, error) {
	opt.withDefaults()
	started := time.Now()
	j := &Journal{
		opt: opt, hooks: opt.Hooks, log: opt.Logger,
		recovery: &Recovery{},
		queue:    make(chan *request, queueLength),
		hurry:    make(chan struct{}, 1),
		budget:   newBudget(),
		closing:  make(chan struct{}),
		poisoned: make(chan struct{}),
		store:    &storeLogger{log: opt.Logger},
	}
	j.c.open = make(map[dispatch.ActionID]*projection)
	if err := j.open(); err != nil {
		if j.finished != nil {
			close(j.closing)
			<-j.finished
		}
		j.background.Wait()
		j.watch.close()
		// A write whose answer nobody waited for may still run; one that hangs keeps what
		// it uses, the lock too.
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			j.c.writers.Wait()
			if j.c.witness != nil {
				_ = j.c.witness.close()
			}
			if j.c.behind != nil {
				j.c.behind.shut()
			}
			if j.db != nil {
				_ = j.db.Close()
			}
			if j.folder != nil {
				_ = j.folder.close()
			}
		}()
		limit := opt.CommitDeadline
		if j.Cause() != nil {
			limit = min(limit, stoppedCloseLimit) // as in Close
		}
		timer := time.NewTimer(limit)
		defer timer.Stop()
		select {
		case <-closed:
		case <-timer.C:
		}
		return nil, nil, err
	}
	j.recovery.Took = time.Since(started)
	r := j.Recovery()
	j.log.Info("journal open", slog.Uint64("seq", j.stats.seq.Load()), slog.Bool("quarantined", r.Quarantined),
		slog.Int("unknown", r.Unknown), slog.Int("not_attempted", r.NotAttempted), slog.Int("lost", len(r.Lost)), slog.Duration("took", r.Took))
	return j, &r, nil
}

// open is the order of reference journal-durability, section 3. A crash in any of
// its steps costs nothing: each can be repeated.
func (j *Journal) open() error {
	// 1. The lock, the file system, the mode, the space.
	var err error
	j.folder, err = openFolder(j.opt.Dir, !j.opt.ReadOnly, !j.hooks.NoSync)
	if err != nil {
		return err
	}
	if !j.opt.AllowAnyFilesystem {
		if err := checkFilesystem(j.opt.Dir); err != nil {
			return err
		}
	}
	if err := j.space.open(j); err != nil {
		return err
	}
	w, err := j.unlock()
	if err != nil {
		return err
	}

	// 2. What a kill left of files that never held data.
	if j.recovery.RemovedFiles, err = j.folder.removeEmptyStoreFiles(); err != nil {
		return err
	}
	if j.recovery.RemovedFiles > 0 {
		j.log.Warn("journal: removed empty store files", slog.Int("files", j.recovery.RemovedFiles))
	}

	// 3. and 4. The store; log lines that report lost data count as errors.
	if j.db, err = openStore(j.folder.path(nameStore), j.store, j.onFlush); err != nil {
		return err
	}
	onFatal := func() { j.stop(errors.New("journal: the store reports lost data")) }
	j.store.onFatal.Store(&onFatal)
	if j.store.fatal.Load() {
		return &CorruptError{What: "the store reports lost or unreadable data"}
	}

	// 5. and 6. What the store lost, head, witness, chain.
	if err := j.redo(w); err != nil {
		return err
	}
	at, err := j.compare(w)
	if err != nil {
		return err
	}
	ack, err := j.leaveQuarantine(w, &at)
	if err != nil {
		return err
	}
	at.unnamed = w.unnamed(&at)
	if j.restored = j.folder.has(nameRestored); j.restored {
		// The journal that the backup was taken of went on: what was open may have been sent
		// since, an approved request above all (F2, D3).
		at.unnamed = max(at.unnamed, at.head.seq)
	}
	j.unnamed = at.unnamed
	j.c.head, j.c.checkpoint = at.head, at.checkpoint
	j.stats.seq.Store(at.head.seq)
	if !j.recovery.Quarantined && !at.fresh {
		if err := j.checkIDs(); err != nil {
			return err
		}
	}
	if !j.opt.ReadOnly {
		if err := j.loadUnresolved(); err != nil {
			return err
		}
	}
	if j.recovery.Quarantined || j.opt.ReadOnly {
		j.named = at.named
		return j.loadRetention(j.opt.Now())
	}

	// A segment of its own for every start, and the store by itself up to there: groups
	// are made again within one process's segments only.
	if !j.hooks.NoWitness {
		if err := j.settle(at.storeGroup); err != nil {
			return err
		}
		killpoint.At(PointSettled)
		if err := j.beginWitness(w, at); err != nil {
			return fmt.Errorf("journal: witness: %w", err)
		}
	}
	j.boot = bootID(ulid.Make())
	j.bootID = ulid.ULID(j.boot).String()
	j.c.behind = newBehind(func() *badger.Txn { return j.db.NewTransaction(false) })
	if err := j.loadOpen(); err != nil {
		return err
	}
	for id, p := range j.c.open {
		if p.rec.PendingApproval() {
			j.opt.Metrics.Found(&p.rec)
		}
		if p.rec.FirstSeq <= at.unnamed && !p.rec.Dispatched() {
			at.lost = append(at.lost, lostAttempt{id, len(p.rec.Attempts) + 1, false})
		}
	}
	if j.restored {
		if at.repeated, err = j.repeatedSince(); err != nil {
			return err
		}
	}
	open := make([]*projection, 0, len(j.c.open))
	for _, p := range j.c.open {
		open = append(open, p)
	}
	slices.SortFunc(open, func(a, b *projection) int { return cmp.Compare(a.rec.FirstSeq, b.rec.FirstSeq) })
	newest := j.newestEvent()
	j.finished = make(chan struct{})
	j.c.writers.Go(j.storer)
	j.c.writers.Go(j.run)

	// 7. Whoever was under way is closed, by the same function that live code uses.
	if err := j.closeOpen(open, at); err != nil {
		return err
	}
	// 8. The start itself, durable before anybody is served.
	if err := j.recordBoot(at.fresh, ack); err != nil {
		return err
	}
	if ack != nil {
		if err := j.acknowledged(ack); err != nil {
			return err
		}
	}
	// What earlier segments name is on record by now.
	if err := j.between(func() error {
		if j.c.witness == nil {
			return nil
		}
		j.c.witness.retires = true
		return j.c.witness.retire(j.c.settled.Load(), j.c.checkpoint.group)
	}); err != nil {
		return fmt.Errorf("journal: witness: %w", err)
	}
	j.space.fill(j)
	j.background.Go(j.loadAbsence)
	return j.startSweeper(newest)
}

// openStore opens Badger and keeps its error texts inside: they quote paths, keys
// and values.
func openStore(dir string, log *storeLogger, flushed func(version uint64)) (*badger.DB, error) {
	if err := os.Mkdir(dir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
		return nil, fmt.Errorf("journal: %w", err)
	}
	db, err := badger.Open(storeOptions(dir, log, flushed))
	if err != nil {
		if log.fatal.Load() {
			return nil, &CorruptError{What: "the store reports lost or unreadable data"}
		}
		what := "the store does not open"
		if errno := syscall.Errno(0); errors.As(err, &errno) {
			what += " (" + errno.Error() + ")"
		}
		return nil, &CorruptError{What: what}
	}
	return db, nil
}

// unlock finds the data key and the store id, and reads the witness. A key and an id
// are made only where nothing exists yet.
func (j *Journal) unlock() (w *witnessState, err error) {
	wdir := j.folder.path(nameWitness)
	id, found, err := witnessStore(wdir)
	if err != nil {
		return nil, err
	}
	storeExists := false
	if entries, err := os.ReadDir(j.folder.path(nameStore)); err == nil {
		for _, e := range entries {
			if e.Name() == "MANIFEST" {
				storeExists = true
			}
		}
	}
	fresh := !found && !storeExists
	var key []byte
	switch {
	case j.opt.Key != nil:
		if len(j.opt.Key) != KeyBytes {
			return nil, fmt.Errorf("%w: must be %d bytes", ErrKey, KeyBytes)
		}
		key = j.opt.Key
	case j.opt.KeyFile != "":
		key, err = readKey(j.opt.KeyFile)
	default:
		key, err = readKey(j.folder.path(nameKey))
		if errors.Is(err, fs.ErrNotExist) && fresh && !j.opt.ReadOnly {
			key, err = j.folder.createKey()
		}
	}
	if err != nil {
		return nil, err
	}
	// A store without a witness: either that was deleted, or the first start ended
	// before its first segment was durable, and then the store is empty: compare tells.
	if fresh && j.opt.ReadOnly {
		return nil, fmt.Errorf("journal: %s holds no journal: %w", j.opt.Dir, fs.ErrNotExist)
	}
	if !j.opt.ReadOnly {
		if err := os.Mkdir(wdir, 0o700); err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("journal: %w", err)
		}
	}
	if !found {
		id = storeID(ulid.Make())
		if j.hooks.NoWitness {
			id = storeID{1} // no place to keep one
		}
	}
	if j.seal, err = newSealer(key, id); err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	w = &witnessState{}
	if !j.hooks.NoWitness {
		raw, err := listed(wdir)
		if err != nil {
			return nil, fmt.Errorf("journal: witness: %w", err)
		}
		if w, err = scanWitness(raw, j.seal); err != nil {
			if errors.Is(err, ErrCorrupt) {
				err = fmt.Errorf("%w (or the data key is another journal's)", err)
			}
			return nil, err
		}
	}
	return w, nil
}

// position is where store and witness stand after the comparison.
type position struct {
	fresh      bool
	head       head // group: the highest that either had reached
	storeGroup uint64
	checkpoint head
	// lostGroup is the witness's last group, when the store does not have it.
	lostFirst, lostGroup uint64
	// lost are the actions and attempts that lost groups name.
	lost []lostAttempt
	// repeated are those of a restored journal that may have been made since the backup, each
	// of another action.
	repeated []lostAttempt
	// named are the actions of which the witness knows more than the store.
	named map[dispatch.ActionID]lostAttempt
	// unnamed: the witness does not reach back to where a loss begins. What was open in
	// the store up to this event may have been dispatched, named or not.
	unnamed uint64
}

type lostAttempt struct {
	action  dispatch.ActionID
	attempt int
	// refused: what was lost is ACTION_REFUSED, which proves that nothing was
	// dispatched. It matters only for an action of which nothing else is left.
	refused bool
}

// readHead returns a sealed position of the store, zero when there is none.
func (j *Journal) readHead(txn *snapshot, key []byte) (h head, found bool, err error) {
	v, found, err := get(txn, key)
	if err != nil || !found {
		return h, false, err
	}
	plain, _, ok := j.seal.open(key, v, 0)
	if ok {
		h, err = decodeHead(plain)
	}
	if !ok || err != nil {
		return h, false, &CorruptError{What: "the store's position does not open: damaged, or sealed with another key", Key: key}
	}
	return h, true, nil
}

// compare holds the store's head against the witness's and walks the chain between
// the last checkpoint and the head.
func (j *Journal) compare(w *witnessState) (position, error) {
	var at position
	err := j.view(func(txn *snapshot) error {
		if _, found, err := has(txn, keyHead); err != nil {
			return err
		} else if found && len(w.segments) == 0 && !j.hooks.NoWitness {
			return &CorruptError{What: "the store has events but the witness is missing"}
		}
		stored, found, err := j.readHead(txn, keyHead)
		if err != nil {
			return err
		}
		if !found {
			stored.hash = j.seal.genesis()
		}
		checkpoint, hasCheckpoint, err := j.readHead(txn, keyCheckpoint)
		if err != nil {
			return err
		}
		if !hasCheckpoint {
			checkpoint = head{hash: j.seal.genesis()}
		}
		seen, settled := w.last()
		if seen.seq == 0 {
			seen.hash = j.seal.genesis()
		}
		j.recovery.Seq, j.recovery.WitnessSeq = stored.seq, seen.seq
		at.fresh = !found
		at.head, at.storeGroup, at.checkpoint = stored, stored.group, checkpoint
		at.lost = w.lostAttempts()

		if h, ok := w.at(stored.group); ok && found && (h.seq != stored.seq || h.hash != stored.hash) {
			return &CorruptError{What: "store and witness tell different histories", Seq: min(h.seq, stored.seq) + 1}
		}
		equal := stored.seq == seen.seq && stored.hash == seen.hash
		switch {
		case j.hooks.NoWitness:
			seen = stored
		case equal && stored.group >= settled:
			at.head.group = max(stored.group, seen.group)
			if seen.group > stored.group {
				// Groups without events, the last one torn: nothing of anybody's is lost. That they
				// are not in the store is said here, or the next start would want them whole.
				at.lostFirst, at.lostGroup = stored.group+1, seen.group
			}
		case stored.group+1 == seen.group && stored.group >= settled:
			// The last group was torn and never acknowledged: its actions are unknown.
			at.lostFirst, at.lostGroup = stored.group+1, seen.group
			at.lost = append(at.lost, w.namedAfter(stored.group, seen.group)...)
			at.head.group = seen.group
			// The witness's position is not the store's to check.
			seen = stored
		case stored.group < seen.group || stored.seq < seen.seq:
			j.recovery.Quarantined = true
			j.recovery.Reason = fmt.Sprintf("the store ends at event %d, the witness at %d", stored.seq, seen.seq)
			if equal { // what is missing has no events: chunks, what was removed
				j.recovery.Reason = fmt.Sprintf("the store ends at group %d, and had %d", stored.group, settled)
			}
			at.named = w.namedSince(stored.seq)
			seen = stored
		case stored.group > seen.group+1:
			return &CorruptError{What: "the witness ends before the store", Seq: seen.seq + 1}
		}
		if !j.recovery.Quarantined && j.folder.has(nameRestored) {
			j.recovery.Quarantined = true
			j.recovery.Reason = "restored from a backup: what happened after it is not on record"
		}
		if len(at.lost) > 0 && at.named == nil {
			at.named = make(map[dispatch.ActionID]lostAttempt, len(at.lost))
			for _, l := range at.lost {
				at.named[l.action] = l
			}
		}
		if j.hooks.NoChain {
			return nil
		}
		from := checkpoint
		if seen.seq < from.seq {
			from = seen
		}
		return j.walk(txn, from, stored, checkpoint, seen)
	})
	if j.recovery.Quarantined {
		j.log.Error("journal quarantined", slog.String("reason", j.recovery.Reason))
	}
	return at, err
}

// lostAttempts returns what earlier starts found lost: their events may not have
// become durable yet, and appending them again is refused by Apply if they have.
func (w *witnessState) lostAttempts() (out []lostAttempt) {
	for i := 1; i < len(w.segments); i++ {
		first, last := w.segments[i].lostFirst, w.segments[i].lost
		if last == 0 {
			continue
		}
		for before := range i {
			for k := range w.segments[before].records {
				out = w.segments[before].records[k].appendLost(out, first, last)
			}
		}
	}
	return out
}

// unnamed returns up to which event of the store actions may have been dispatched in a
// group that was lost and whose names the witness does not hold any more.
func (w *witnessState) unnamed(at *position) (seq uint64) {
	for i := range w.segments {
		s := &w.segments[i]
		if s.lost > 0 && w.segments[0].base.group >= s.lostFirst {
			seq = max(seq, s.base.seq)
		}
	}
	if at.lostGroup > 0 && len(w.segments) > 0 && w.segments[0].base.group >= at.lostFirst {
		seq = max(seq, at.head.seq)
	}
	return seq
}

// appendLost adds the attempt that a record of the groups first..last names.
func (r *witnessRecord) appendLost(out []lostAttempt, first, last uint64) []lostAttempt {
	if r.kind != kindEvent || r.group < first || r.group > last || r.typ == dispatch.TunnelClosed || r.typ == dispatch.AttemptInterrupted {
		return out
	}
	l := lostAttempt{r.action, max(int(r.attempt), 1), r.typ == dispatch.ActionRefused}
	if slices.Contains(out, l) {
		return out
	}
	return append(out, l)
}

// namedAfter returns the attempts that the groups after stored up to last name.
func (w *witnessState) namedAfter(stored, last uint64) (out []lostAttempt) {
	for i := range w.segments {
		for k := range w.segments[i].records {
			out = w.segments[i].records[k].appendLost(out, stored+1, last)
		}
	}
	return out
}

// namedSince returns the actions that the witness names with events after seq.
func (w *witnessState) namedSince(seq uint64) map[dispatch.ActionID]lostAttempt {
	out := make(map[dispatch.ActionID]lostAttempt)
	for i := range w.segments {
		for k := range w.segments[i].records {
			if r := &w.segments[i].records[k]; r.kind == kindEvent && r.seq > seq {
				out[r.action] = lostAttempt{r.action, max(int(r.attempt), 1), r.typ == dispatch.ActionRefused}
			}
		}
	}
	return out
}

// walk verifies the events after from up to the store's head: no hole, every hash
// right, every seal intact, and the given positions on the chain.
func (j *Journal) walk(txn *snapshot, from, to head, marks ...head) error {
	it := txn.NewIterator(badger.IteratorOptions{PrefetchValues: true, PrefetchSize: 64, Prefix: []byte{famEvent}})
	defer it.Close()
	at := from
	onChain := func() error {
		for _, m := range marks {
			if m.seq == at.seq && m.hash != at.hash {
				return &CorruptError{What: "the chain does not lead to a recorded position", Seq: m.seq}
			}
		}
		return nil
	}
	if err := onChain(); err != nil {
		return err
	}
	for it.Seek(keyEvent(from.seq + 1)); it.Valid(); it.Next() {
		item := it.Item()
		key := item.KeyCopy(nil)
		value, err := item.ValueCopy(nil)
		if err != nil {
			return &CorruptError{What: "event cannot be read", Seq: at.seq + 1}
		}
		n, _, _, err := j.checkFrame(at, key, value)
		if err != nil {
			return err
		}
		for _, m := range marks {
			if m.seq > at.seq && m.seq < at.seq+uint64(n) {
				return &CorruptError{What: "the chain does not lead to a recorded position", Seq: m.seq}
			}
		}
		at.seq, at.hash = at.seq+uint64(n), chain(key, value)
		j.recovery.Walked += n
		if err := onChain(); err != nil {
			return err
		}
	}
	if at.seq != to.seq || at.hash != to.hash {
		return &CorruptError{What: "events are missing before the store's head", Seq: at.seq + 1}
	}
	return nil
}

// checkFrame verifies that the frame under key follows at, and returns how many
// events it holds and of which action.
func (j *Journal) checkFrame(at head, key, value []byte) (n int, id dispatch.ActionID, plain []byte, err error) {
	if string(key) != string(keyEvent(at.seq+1)) {
		return 0, id, nil, &CorruptError{What: "event is missing", Seq: at.seq + 1}
	}
	plain, prev, ok := j.seal.open(key, value, hashBytes)
	if !ok {
		return 0, id, nil, &CorruptError{What: "event does not open: altered", Seq: at.seq + 1}
	}
	if digest(prev) != at.hash {
		return 0, id, nil, &CorruptError{What: "event is chained to another history", Seq: at.seq + 1}
	}
	n, id, err = frameCount(plain)
	if err != nil {
		return 0, id, nil, &CorruptError{What: "event does not decode", Seq: at.seq + 1}
	}
	return n, id, plain, nil
}

// checkIDs binds the store to the witness's store id and refuses newer formats.
func (j *Journal) checkIDs() error {
	return j.view(func(txn *snapshot) error {
		v, found, err := get(txn, keyStore)
		if err != nil {
			return err
		}
		if !found {
			return &CorruptError{What: "the store's identity is missing", Key: keyStore}
		}
		plain, _, ok := j.seal.open(keyStore, v, 0)
		if !ok || len(plain) != 3+len(j.seal.id) {
			return &CorruptError{What: "the store's identity does not open", Key: keyStore}
		}
		if int(plain[1])<<8|int(plain[2]) > schemaVersion {
			return ErrFormat
		}
		return nil
	})
}

func (j *Journal) encodeIdentity() []byte {
	return append([]byte{plainVersion, schemaVersion >> 8, schemaVersion & 0xff}, j.seal.id[:]...)
}

// beginWitness starts this process's first segment.
func (j *Journal) beginWitness(w *witnessState, at position) error {
	wit := &witness{
		dir: j.folder.path(nameWitness), sync: !j.hooks.NoSync, store: j.seal.id, m: newMacer(j.seal.witness),
		slots: defaultSlots, most: maxFinished, syncs: &j.stats.syncs,
	}
	if n := j.hooks.SegmentSlots; n > 0 {
		wit.slots = uint32(n)
	}
	info := segmentInfo{number: 1, store: j.seal.id, slots: wit.slots, base: at.head, lostFirst: at.lostFirst, lost: at.lostGroup, settled: at.storeGroup}
	for i := range w.segments {
		s := &w.segments[i]
		last := s.base
		if n := len(s.groups); n > 0 {
			last = s.groups[n-1].head
		}
		wit.kept = append(wit.kept, keptSegment{s.number, last, s.slots})
		info.number, info.prevUsed = s.number+1, s.used
	}
	if len(w.segments) == 0 {
		info.number = max(w.unfinished, 1)
	}
	j.c.witness = wit
	wit.findSpares()
	if err := wit.begin(info); err != nil {
		return err
	}
	if wit.sync {
		return syncDir(j.folder.dir)
	}
	return nil
}

// loadOpen reads the open actions. The index is a hint: the projection decides.
func (j *Journal) loadOpen() error {
	return j.eachIn(famOpen, func(id dispatch.ActionID, p *projection) {
		if !p.rec.Ended {
			j.c.open[id] = p
		}
	})
}

// eachIn calls f with the projection of every action that an index names.
func (j *Journal) eachIn(family byte, f func(dispatch.ActionID, *projection)) error {
	return j.view(func(txn *snapshot) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{family}})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			id, ok := trailingID(it.Item().Key())
			if !ok {
				continue
			}
			p, err := j.readProjection(txn, id)
			if err != nil {
				return err
			}
			if p != nil {
				f(id, p)
			}
		}
		return nil
	})
}

// repeatedSince names, in a restored journal, the further attempts that may have been made since
// the backup, by the background or with Waybill-Retry-Of or a key, of what had not happened or had
// been refused, with leave to repeat it (F2, I9, O1). Where an outcome is unknown a repeat is safe
// by its own ground, or not made.
func (j *Journal) repeatedSince() (out []lostAttempt, err error) {
	err = j.eachIn(famTime, func(id dispatch.ActionID, p *projection) {
		if p.rec.LeftToRepeat() {
			n := 0
			for i := range p.rec.Attempts {
				n = max(n, p.rec.Attempts[i].N)
			}
			out = append(out, lostAttempt{id, n + 1, false})
		}
	})
	return out, err
}

// loadUnresolved tells the metrics of the actions about which something may still be
// found out.
func (j *Journal) loadUnresolved() error {
	return j.eachIn(famDoubt, func(_ dispatch.ActionID, p *projection) {
		if p.rec.Doubtful() {
			j.opt.Metrics.Found(&p.rec)
		}
	})
}

// submit hands requests of this package to the committer and waits until the store has them.
func (j *Journal) submit(requests ...*request) error {
	for _, r := range requests {
		j.queue <- r
	}
	j.hurried()
	var first error
	for _, r := range requests {
		<-r.done
		if first == nil {
			first = r.err
		}
	}
	if first == nil {
		first = j.caughtUp()
	}
	return first
}

func (j *Journal) ownRequest(id dispatch.ActionID, ev dispatch.Event) *request {
	r := &request{done: make(chan struct{}), entered: time.Now(), action: id, recovering: true}
	var text []byte
	r.events, text = jsonEvents(ev)
	r.set(text)
	return r
}

// closeOpen appends what a start has to say about actions that were under way, and
// about those that only the witness knows.
func (j *Journal) closeOpen(open []*projection, at position) error {
	now := j.opt.Now()
	lost := make(map[dispatch.ActionID]bool)
	lose := func(batch []lostAttempt) error {
		requests := make([]*request, 0, len(batch))
		for _, l := range batch {
			if l.refused {
				if _, err := j.stored(l.action); err == nil {
					continue
				} else if !errors.Is(err, dispatch.ErrActionNotFound) {
					return err
				}
			}
			requests = append(requests, j.ownRequest(l.action, dispatch.LostAction(l.attempt, now)))
		}
		// Where it is illegal the attempt is on record after all: nothing is lost of it.
		if err := j.submit(requests...); err != nil && !errors.Is(err, dispatch.ErrIllegalTransition) {
			return err
		}
		for _, r := range requests {
			switch {
			case r.err == nil:
				j.recovery.Lost = append(j.recovery.Lost, r.action)
				lost[r.action] = true
			case !errors.Is(r.err, dispatch.ErrIllegalTransition):
				return r.err
			}
		}
		return j.caughtUp()
	}
	// One after the other: the witness may name an action more than once.
	for i := range at.lost {
		if err := lose(at.lost[i : i+1]); err != nil {
			return err
		}
	}
	// In portions, so that they share groups and the queue never fills up.
	for batch := range slices.Chunk(at.repeated, queueLength/4) {
		if err := lose(batch); err != nil {
			return err
		}
	}
	for batch := range slices.Chunk(open, queueLength/4) {
		requests := make([]*request, 0, len(batch))
		for _, p := range batch {
			rec := p.rec
			if lost[rec.ID] {
				again, err := j.stored(rec.ID)
				if err != nil {
					return err
				}
				rec = again.rec
			}
			ev, isOpen := dispatch.Interrupt(&rec, now)
			if !isOpen {
				continue
			}
			requests = append(requests, j.ownRequest(rec.ID, ev))
		}
		if err := j.submit(requests...); err != nil {
			return err
		}
		for _, r := range requests {
			if r.rec.Facts.Outcome == outcome.NotAttempted {
				j.recovery.NotAttempted++
			} else {
				j.recovery.Unknown++
			}
		}
	}
	return nil
}

// stored reads one projection in a transaction of its own.
func (j *Journal) stored(id dispatch.ActionID) (p *projection, err error) {
	err = j.view(func(txn *snapshot) error {
		p, err = j.readProjection(txn, id)
		return err
	})
	if err == nil && p == nil {
		err = dispatch.ErrActionNotFound
	}
	return p, err
}

// recordBoot appends the BOOT event and, on the first start, the store's identity.
func (j *Journal) recordBoot(fresh bool, ack *Acknowledgement) error {
	r := &request{done: make(chan struct{}), entered: time.Now(), boot: true}
	var text []byte
	r.events, text = jsonEvents(dispatch.Event{
		Type: dispatch.Booted, At: j.opt.Now(),
		Boot: &dispatch.Boot{ID: j.bootID, Build: j.opt.Build, Config: j.opt.Config, Version: schemaVersion},
	})
	r.set(ack.into(text))
	identity := &request{done: make(chan struct{}), entered: time.Now(), maint: []entry{{key: keyStore, value: j.seal.seal(keyStore, nil, j.encodeIdentity())}}}
	requests := []*request{r}
	if fresh {
		requests = []*request{identity, r}
	}
	if err := j.submit(requests...); err != nil {
		return err
	}
	j.recovery.Boot, j.recovery.Fresh = j.bootID, fresh
	return nil
}

// newestEvent is the time of the last event on record; zero when there is none.
func (j *Journal) newestEvent() (at time.Time) {
	_ = j.view(func(txn *snapshot) error {
		it := txn.NewIterator(badger.IteratorOptions{Reverse: true, Prefix: []byte{famEvent}})
		defer it.Close()
		it.Seek(append([]byte{famEvent}, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff))
		if !it.Valid() {
			return nil
		}
		v, err := it.Item().ValueCopy(nil)
		if err != nil {
			return nil
		}
		if plain, _, ok := j.seal.open(it.Item().KeyCopy(nil), v, hashBytes); ok {
			if f, err := decodeFrame(plain); err == nil {
				at = f.events[len(f.events)-1].At
			}
		}
		return nil
	})
	return at
}

// project returns a record as readers see it: advice whose time is over is not given (I5).
// Where nothing can be written – in
// quarantine and when opened for reading – an action found open is shown as a start
// would close it, never as running.
func (j *Journal) project(rec dispatch.Record) dispatch.Record {
	now := j.opt.Now()
	if !j.opt.ReadOnly {
		return rec.At(now)
	}
	seq := j.stats.seq.Load() + 1
	if l, ok := j.named[rec.ID]; ok && (!l.refused || rec.Events == 0) {
		ev := dispatch.LostAction(l.attempt, now)
		if next, err := dispatch.Apply(rec, &ev, seq); err == nil {
			rec = next
		}
	}
	if !rec.Ended && rec.Events > 0 && rec.FirstSeq <= j.unnamed && !rec.Dispatched() {
		ev := dispatch.LostAction(len(rec.Attempts)+1, now)
		if next, err := dispatch.Apply(rec, &ev, seq); err == nil {
			rec = next
		}
	}
	if ev, open := dispatch.Interrupt(&rec, now); open {
		if next, err := dispatch.Apply(rec, &ev, seq); err == nil {
			rec = next
		}
	}
	return rec.At(now)
}
