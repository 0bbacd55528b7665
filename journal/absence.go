package journal

import (
	"encoding/binary"
	"sync/atomic"

	"github.com/dgraph-io/badger/v4"
)

// absence answers, without a look at the store, that no action guards against a repeat
// (O3) or redirected a caller (R3) – which is so for almost every request. It is a Bloom
// filter over the keyed hashes of these two indexes: it may say "perhaps" of what is not
// there, and never "no" of what is. Its size is fixed; one that is too full costs
// look-ups, not answers.
type absence struct {
	// ready: everything that was on record at the start is in it.
	ready atomic.Bool
	// used: something is in it.
	used atomic.Bool
	bits [absenceWords]atomic.Uint64
}

const absenceWords = 1 << 14 // 128 KiB, a million bits

// places are the bits of a keyed hash, whose bytes are as good as random.
func places(mac *digest) [4]uint32 {
	var out [4]uint32
	for i := range out {
		out[i] = binary.BigEndian.Uint32(mac[4*i:]) % (absenceWords * 64)
	}
	return out
}

// add is called before the entry can be in the store.
func (a *absence) add(mac *digest) {
	if !a.used.Load() { // once, so that readers share the line
		a.used.Store(true)
	}
	for _, p := range places(mac) {
		a.bits[p/64].Or(1 << (p % 64))
	}
}

// empty reports that nothing is under any hash.
func (a *absence) empty() bool { return a.ready.Load() && !a.used.Load() }

// certain reports that nothing is under this hash.
func (a *absence) certain(mac *digest) bool {
	if !a.ready.Load() {
		return false
	}
	for _, p := range places(mac) {
		if a.bits[p/64].Load()&(1<<(p%64)) == 0 {
			return true
		}
	}
	return false
}

// loadAbsence reads the keys of both indexes, beside what is served already: until it
// is through, the store is asked. What is written meanwhile the committer adds.
func (j *Journal) loadAbsence() {
	err := j.view(func(txn *snapshot) error {
		for _, family := range []byte{famGuard, famRedirect} {
			it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{family}})
			for it.Rewind(); it.Valid(); it.Next() {
				select {
				case <-j.closing:
					it.Close()
					return ErrClosed
				default:
				}
				if key := it.Item().Key(); len(key) >= 1+hashBytes {
					j.absence.add((*digest)(key[1:]))
				}
			}
			it.Close()
		}
		return nil
	})
	if err == nil {
		j.absence.ready.Store(true)
	}
}
