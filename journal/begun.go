package journal

import (
	"bytes"
	"errors"

	"github.com/dgraph-io/badger/v4"

	"waybill/dispatch"
)

// begun answers, without a look at the store, that nothing is on record under the id of an
// action that begins – which is so for every one, but has to be known and not assumed. The
// time is in front of an id, so that a new one is larger than all but the last few.
//
// Every id on record is at most floor, or one of recent: the store's at the start, of which
// floor is the largest, and what was added since. So "absent" is certain, whatever the
// clock does; an id that waited long, or came after one from the future, costs a look-up.
// It belongs to the committer.
type begun struct {
	ready  bool // the store's ids are in it
	floor  dispatch.ActionID
	recent [2]map[dispatch.ActionID]struct{} // the newer ones first
}

// begunRecent is how many ids each half of recent has: together they are of a second at
// least, and what comes later than that after its id was made waited for something.
const begunRecent = 2048

// add is called before anything can be on record under id.
func (b *begun) add(id dispatch.ActionID) {
	if len(b.recent[0]) >= begunRecent || b.recent[0] == nil {
		old := b.recent[1]
		for id := range old {
			b.raise(id)
		}
		if clear(old); old == nil {
			old = make(map[dispatch.ActionID]struct{}, begunRecent)
		}
		b.recent[0], b.recent[1] = old, b.recent[0]
	}
	b.recent[0][id] = struct{}{}
}

func (b *begun) raise(id dispatch.ActionID) {
	if larger(id, b.floor) {
		b.floor = id
	}
}

func larger(a, b dispatch.ActionID) bool { return bytes.Compare(a[:], b[:]) > 0 }

// absent reports that nothing is on record under id.
func (b *begun) absent(id dispatch.ActionID) bool {
	if !b.ready || !larger(id, b.floor) {
		return false
	}
	for _, ids := range b.recent {
		if _, found := ids[id]; found {
			return false
		}
	}
	return true
}

// loadBegun finds the largest id of the store. The committer calls it before its first
// group, when the store has everything that is on record. Without it the store is asked
// for every action.
func (j *Journal) loadBegun() {
	j.c.begun.ready = j.committing(func(txn *snapshot) error {
		prefix := []byte{famRecord}
		it := txn.NewIterator(badger.IteratorOptions{Prefix: prefix, Reverse: true})
		defer it.Close()
		if it.Seek(last(prefix)); !it.Valid() {
			return nil
		}
		key := it.Item().Key()
		if len(key) != len(keyAction(famRecord, dispatch.ActionID{})) {
			return errors.New("journal: projection under a wrong key")
		}
		j.c.begun.raise(dispatch.ActionID(key[1:]))
		return nil
	}) == nil
}
