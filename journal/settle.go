package journal

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"waybill/internal/control"
)

// Between two settlings only the witness holds what was acknowledged: the store's logs
// are memory-mapped and not synced. Settling syncs them; from then on the store itself
// has everything up to that group. A start makes the groups after it again, in order and
// whole, whatever the store still has of them: a power cut may keep any pages, so that
// a later group can be there and an earlier one not.

// settle makes the store durable up to the given group, which it was given.
func (j *Journal) settle(group uint64) error {
	if err := j.caughtUp(); err != nil {
		return fmt.Errorf("journal: settle: %w", err)
	}
	if !j.hooks.NoSync {
		// A log that is gone by the time it is opened was flushed, and tables and manifest
		// are synced by Badger before it removes the log.
		logs, err := filepath.Glob(filepath.Join(j.folder.path(nameStore), "*.mem"))
		if err != nil {
			return fmt.Errorf("journal: settle: %w", err)
		}
		for _, path := range logs {
			if err := j.syncFile(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return fmt.Errorf("journal: settle: %w", err)
			}
		}
		j.stats.syncs.Add(1)
		if err := syncDir(j.folder.path(nameStore)); err != nil {
			return fmt.Errorf("journal: settle: %w", err)
		}
	}
	for {
		old := j.c.settled.Load()
		if old >= group || j.c.settled.CompareAndSwap(old, group) {
			return nil
		}
	}
}

func (j *Journal) syncFile(path string) error {
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	j.stats.syncs.Add(1)
	err = unix.Fsync(int(f.Fd()))
	return errors.Join(err, f.Close())
}

// settleSoon settles in the background; what a running one does not cover the next
// will. A failing sync is as indeterminate here as in a commit.
func (j *Journal) settleSoon(group uint64) {
	if j.c.settling.Swap(true) {
		return
	}
	j.c.writers.Go(func() {
		defer j.c.settling.Store(false)
		if err := j.settle(group); err != nil {
			j.stop(err)
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
	for _, p := range todo {
		if err := j.redoGroup(p.segment.number, p.group); err != nil {
			return err
		}
		j.recovery.Redone++
	}
	return nil
}

func (j *Journal) redoGroup(segment uint64, g *loggedGroup) error {
	damaged := &CorruptError{What: fmt.Sprintf("group %d in the witness is damaged", g.number), Seq: g.head.seq}
	f, err := os.Open(filepath.Join(j.folder.path(nameWitness), segmentName(segment)))
	if err != nil {
		return fmt.Errorf("journal: witness: %w", err)
	}
	b := make([]byte, g.payload)
	_, err = f.ReadAt(b, g.payloadOffset())
	if err = errors.Join(err, f.Close()); err != nil {
		return fmt.Errorf("journal: witness: %w", err)
	}
	entries, err := decodeEntries(b)
	if err != nil || checksum(b) != g.check {
		return damaged
	}
	return j.put(entries)
}
