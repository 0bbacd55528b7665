package journal

import (
	"context"
	"encoding/binary"
	"math"

	"github.com/dgraph-io/badger/v4"
	"github.com/oklog/ulid/v2"

	"waybill/dispatch"
	"waybill/internal/control"
)

// Frame is one append as it stands in the journal.
type Frame struct {
	First, Last uint64            // sequence numbers of its events
	Hash        [hashBytes]byte   // its place in the chain
	Action      dispatch.ActionID // zero: events of no action, BOOT and those of sessions
	Events      []dispatch.StoredEvent
}

// Frames returns, in order of sequence, up to limit frames that begin after the event
// with number after. Only what was acknowledged is returned: whoever follows the
// journal is never ahead of it. Frames before Base are there for some actions only.
// The caller holds nothing up: a request never waits for it (CONTRACT N5).
func (j *Journal) Frames(ctx context.Context, after uint64, limit int) (out []Frame, err error) {
	head := j.stats.seq.Load()
	err = j.view(func(txn *snapshot) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{famEvent}, PrefetchValues: true, PrefetchSize: min(limit, 64)})
		defer it.Close()
		if after == math.MaxUint64 {
			return nil
		}
		for it.Seek(keyEvent(after + 1)); it.Valid() && len(out) < limit; it.Next() {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			key := it.Item().KeyCopy(nil)
			if len(key) != 9 {
				return &CorruptError{What: "event under a wrong key", Key: key}
			}
			first := binary.BigEndian.Uint64(key[1:])
			value, err := it.Item().ValueCopy(nil)
			if err != nil {
				return &CorruptError{What: "event cannot be read", Seq: first}
			}
			f, err := j.readFrame(first, key, value)
			if err != nil {
				return err
			}
			if f.Last > head {
				return nil
			}
			out = append(out, f)
		}
		return nil
	})
	return out, err
}

func (j *Journal) readFrame(first uint64, key, value []byte) (Frame, error) {
	plain, _, ok := j.seal.open(key, value, hashBytes)
	if !ok {
		return Frame{}, &CorruptError{What: "event does not open: altered", Seq: first}
	}
	f, err := decodeFrame(plain)
	if err != nil {
		return Frame{}, &CorruptError{What: "event does not decode", Seq: first}
	}
	out := Frame{First: first, Last: first + uint64(len(f.events)) - 1, Hash: chain(key, value), Action: f.action}
	boot := ulid.ULID(f.boot).String()
	for i := range f.events {
		out.Events = append(out.Events, dispatch.StoredEvent{Seq: first + uint64(i), Boot: boot, Event: f.events[i]})
	}
	return out, nil
}

// Range returns the base of the chain and the last acknowledged event.
func (j *Journal) Range() (base, head uint64, err error) {
	err = j.view(func(txn *snapshot) error {
		m, err := j.base(txn)
		base = m.seq
		return err
	})
	return base, j.stats.seq.Load(), err
}

// HashAt returns the chain's hash after the event seq, if a frame ends there. Before
// the base that says little: only some frames are kept.
func (j *Journal) HashAt(seq uint64) (hash [hashBytes]byte, found bool, err error) {
	err = j.view(func(txn *snapshot) error {
		m, err := j.base(txn)
		if err != nil {
			return err
		}
		if m.seq == seq {
			hash, found = m.hash, true
			return nil
		}
		it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{famEvent}, Reverse: true})
		defer it.Close()
		it.Seek(keyEvent(seq))
		if !it.Valid() {
			return nil
		}
		key := it.Item().KeyCopy(nil)
		value, err := it.Item().ValueCopy(nil)
		if err != nil || len(key) != 9 {
			return &CorruptError{What: "event cannot be read", Seq: seq}
		}
		f, err := j.readFrame(binary.BigEndian.Uint64(key[1:]), key, value)
		if err != nil {
			return err
		}
		hash, found = f.Hash, f.Last == seq
		return nil
	})
	return hash, found, err
}

// Hold makes retention wait for a follower: events after the number that f returns
// stay. By size they go nevertheless when a quarter more than MaxBytes is kept: the
// follower then finds a gap. f must not block.
func (j *Journal) Hold(f func() uint64) { j.hold.Store(&f) }

// held is the last event that retention may remove.
func (j *Journal) held() uint64 {
	if f := j.hold.Load(); f != nil && !control.Off("N5-retention-waits") {
		return (*f)()
	}
	return math.MaxUint64
}

// Room reports whether others may write to the journal's file system: nil, or an error
// that wraps ErrNoSpace when what is free is kept for the ends of running actions.
func (j *Journal) Room() error { return j.space.check(j) }
