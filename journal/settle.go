package journal

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"waybill/internal/control"
	"waybill/internal/killpoint"
)

// The store keeps no log of its own: what it was given since its last table was written is in
// memory, and gone with the process. A group is settled when a durable table has it, and every
// one before it; what is after it only the witness holds. Tables are written as the memtable
// fills, when too much is not settled, at every start and at an orderly end. A start makes the
// groups after the settled one again, in order and whole.

// settled is the last group that is durable in the store itself.
type settled struct {
	atomic.Uint64

	mu    sync.Mutex
	steps []step // what the store was given and may have in memory only, oldest first
	// tables is the store's version up to which tables have all of it.
	tables uint64
}

// step is a transaction of the store: with this version it has everything up to the group.
type step struct{ version, group uint64 }

// stored is told of a step of which the store's reads now show everything.
func (s *settled) stored(version, group uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.steps = append(s.steps, step{version, group})
	s.advance()
}

// flushed is told that tables have everything up to a version: they are durable, and the
// store's manifest names them.
func (s *settled) flushed(version uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.tables = max(s.tables, version)
	s.advance()
}

// onFlush is called by the store when a table holds what its memory held.
func (j *Journal) onFlush(version uint64) {
	killpoint.At(PointFlushed)
	j.c.settled.flushed(version)
}

// advance is called with the lock.
func (s *settled) advance() {
	n := 0
	for n < len(s.steps) && (s.steps[n].version <= s.tables || control.Off("M5-settled-is-in-tables")) {
		s.Store(max(s.Load(), s.steps[n].group))
		n++
	}
	s.steps = s.steps[:copy(s.steps, s.steps[n:])]
}

// reach is told that tables have everything up to a group.
func (s *settled) reach(group uint64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.Store(max(s.Load(), group))
}

// settle makes the store durable up to the given group, which it was given. It waits a while
// at the most; a table that cannot be written is tried again whatever it returns.
func (j *Journal) settle(group uint64) error {
	if err := j.caughtUp(); err != nil {
		return fmt.Errorf("journal: settle: %w", err)
	}
	done := make(chan error, 1)
	j.c.writers.Go(func() { done <- j.db.Flush() })
	deadline := time.NewTimer(max(j.opt.CommitDeadline, defaultCommitDeadline))
	defer deadline.Stop()
	select {
	case err := <-done:
		if err != nil {
			return &storeError{"flush"}
		}
	case <-deadline.C:
		return errors.New("journal: settle: the store writes no table")
	}
	j.c.settled.reach(group)
	return nil
}

// maxUnsettled is how many full segments a start should have to make again at the most. As a
// rule the memtable is full, and in a table, before.
const maxUnsettled = 6

// settleSoon settles in the background when much is not settled; what a running one does not
// cover the next will. That it fails costs nothing yet: the store tries the table again, and
// when it has no room left for what follows its commits hang, up to their deadline.
func (j *Journal) settleSoon(group uint64) {
	unsettled := 0
	for _, s := range j.c.witness.kept {
		if s.last.group > j.c.settled.Load() {
			unsettled++
		}
	}
	if unsettled < maxUnsettled || j.space.write(j) != nil || j.c.settling.Swap(true) {
		return
	}
	j.c.writers.Go(func() {
		defer j.c.settling.Store(false)
		if err := j.settle(group); err != nil {
			j.log.Warn("journal: the store does not settle", slog.Any("error", err))
		}
	})
}

// redo makes the groups again that the store may have lost, from the witness. It may be
// cut short anywhere and is repeated by the next start.
func (j *Journal) redo(w *witnessState) error {
	if j.hooks.NoWitness || len(w.segments) == 0 || control.Off("M5-lost-groups-made-again") {
		return nil
	}
	seen, settled := w.last()
	var stored head
	if err := j.view(func(txn *snapshot) (err error) {
		stored, _, err = j.readHead(txn, keyHead)
		return err
	}); err != nil {
		return err
	}
	// Behind what was settled: rolled back, and not to be made up for from here. Ahead of
	// the witness, or on another branch: compare tells.
	if stored.group < settled || stored.group > seen.group {
		return nil
	}
	if h, ok := w.at(stored.group); ok && stored.group > 0 && (h.seq != stored.seq || h.hash != stored.hash) {
		return nil
	}
	type place struct {
		segment *segment
		group   *loggedGroup
	}
	var todo []place
	next := settled + 1
	for i := range w.segments {
		s := &w.segments[i]
		// A segment that lost its end is noticed by the header after it.
		next = max(next, s.base.group+1)
		for k := range s.groups {
			g := &s.groups[k]
			if g.number <= settled || w.left(i, g.number) {
				continue
			}
			if g.number != next {
				return &CorruptError{What: fmt.Sprintf("group %d is missing in the witness", next), Seq: g.head.seq}
			}
			next++
			todo = append(todo, place{s, g})
		}
	}
	if n := len(todo); n > 0 && !todo[n-1].group.intact {
		// Torn, and then the store never got it: its actions are unknown. Or damaged
		// afterwards: what the store has is walked as far as the chain goes.
		if stored.group == seen.group {
			return nil
		}
		todo = todo[:n-1]
	}
	for _, p := range todo {
		if !p.group.intact {
			return &CorruptError{What: fmt.Sprintf("group %d in the witness is damaged", p.group.number), Seq: p.group.head.seq}
		}
	}
	if len(todo) == 0 {
		return nil
	}
	// In steps of many groups, as the store was to follow.
	sum := newPending(0)
	step := func() error {
		err := j.put(sum.entries)
		sum = newPending(len(sum.entries))
		killpoint.At(PointRedone)
		return err
	}
	var f *os.File
	defer func() {
		if f != nil {
			_ = f.Close()
		}
	}()
	for i, p := range todo {
		if i == 0 || p.segment != todo[i-1].segment {
			if f != nil {
				_ = f.Close()
			}
			var err error
			if f, err = os.Open(filepath.Join(j.folder.path(nameWitness), segmentName(p.segment.number))); err != nil {
				return fmt.Errorf("journal: witness: %w", err)
			}
		}
		entries, err := p.group.entries(f)
		if err != nil {
			return err
		}
		if !sum.empty() && !sum.fits(entries, j.db.MaxBatchSize(), j.db.MaxBatchCount()) {
			if err := step(); err != nil {
				return err
			}
		}
		sum.add(entries, p.group.number)
		if sum.bytes >= behindBytes {
			if err := step(); err != nil {
				return err
			}
		}
		j.recovery.Redone++
	}
	if sum.empty() {
		return nil
	}
	return step()
}

// entries reads the group's entries from its segment's file.
func (g *loggedGroup) entries(f *os.File) ([]entry, error) {
	b := make([]byte, g.payload)
	if _, err := f.ReadAt(b, g.payloadOffset()); err != nil {
		return nil, fmt.Errorf("journal: witness: %w", err)
	}
	entries, err := decodeEntries(b)
	if err != nil || checksum(b) != g.check {
		return nil, &CorruptError{What: fmt.Sprintf("group %d in the witness is damaged", g.number), Seq: g.head.seq}
	}
	return entries, nil
}
