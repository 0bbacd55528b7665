package journal

import (
	"context"
	"encoding/binary"
	"fmt"
	"time"

	"github.com/dgraph-io/badger/v4"

	"waybill/dispatch"
	"waybill/internal/control"
)

// maxKept bounds the sealed request that an action may keep, in bytes of plaintext.
const maxKept = 832 << 10

func keyKept(id dispatch.ActionID, index int) []byte {
	return binary.BigEndian.AppendUint32(append(append(make([]byte, 0, 21), famKept), id[:]...), uint32(index))
}

// keyOf is the index entry of an action's idempotency key.
func (j *Journal) keyOf(rec *dispatch.Record) []byte {
	mac := j.seal.mac(macKey, rec.Caller, rec.Bound.Key.Scope+"\x00"+rec.Bound.Key.Key)
	return append(append(make([]byte, 0, 33), famKey), mac[:]...)
}

// takeKey decides who has an idempotency key, in the transaction that would send it for
// the first time (CONTRACT I2, I9): of two actions that want it one is written, and the
// other learns its name. An action that gave the key up is named by the one that takes it.
func (j *Journal) takeKey(txn *snapshot, st *stage, r *request, old *projection, rec *dispatch.Record) error {
	if !rec.HoldsKey() || old != nil && old.rec.HoldsKey() {
		return nil
	}
	key := j.keyOf(rec)
	holder, held := st.taken[string(key)]
	if !held {
		v, found, err := get(txn, key)
		if err != nil {
			return fmt.Errorf("%w: %w", dispatch.ErrNotWritten, err)
		}
		if found {
			if len(v) != len(holder) {
				return fmt.Errorf("%w: %w", dispatch.ErrNotWritten, &CorruptError{What: "index of idempotency keys", Key: key})
			}
			holder, held = dispatch.ActionID(v), true
		}
	}
	if held && holder != r.action && !control.Off("I9-one-action-for-a-key") {
		p, err := j.current(txn, st, holder)
		if err != nil {
			return fmt.Errorf("%w: %w", dispatch.ErrNotWritten, err)
		}
		if p != nil && (rec.Bound.Key.Replaces != holder.String() || !p.rec.Ended || p.rec.Lease != nil && time.Now().Before(p.rec.Lease.Until)) {
			r.earlier = holder
			return dispatch.ErrKeyTaken
		}
	}
	r.key = key
	return nil
}

// keyEntries are the entries of a key that was taken, of a request that is kept, and of
// one that need not be kept any longer.
func (j *Journal) keyEntries(entries []entry, r *request, old, next *projection) []entry {
	if r.key != nil {
		entries = append(entries, entry{key: r.key, value: append([]byte(nil), r.action[:]...)})
	}
	keeps := next.rec.KeepsRequest()
	if old != nil && old.rec.KeepsRequest() && !keeps {
		for i := range (maxKept + dispatch.MaxChunkBytes - 1) / dispatch.MaxChunkBytes {
			entries = append(entries, entry{key: keyKept(r.action, i), remove: true})
		}
	} else if keeps {
		entries = append(entries, r.kept...)
	}
	return entries
}

// sealKept cuts and seals a request. The first byte of each part says whether it is the last.
func (j *Journal) sealKept(id dispatch.ActionID, plain []byte) (out []entry) {
	for i := 0; len(plain) > 0; i++ {
		n := min(len(plain), dispatch.MaxChunkBytes)
		part := make([]byte, 1, 1+n)
		if n == len(plain) {
			part[0] = flagLast
		}
		key := keyKept(id, i)
		out = append(out, entry{key: key, value: j.seal.seal(key, nil, append(part, plain[:n]...))})
		plain = plain[n:]
	}
	return out
}

// KeptRequest implements dispatch.Journal.
func (j *Journal) KeptRequest(_ context.Context, id dispatch.ActionID) (out []byte, err error) {
	err = j.view(func(txn *snapshot) error {
		for i := 0; ; i++ {
			key := keyKept(id, i)
			v, found, err := get(txn, key)
			if err != nil {
				return err
			}
			if !found {
				if i > 0 {
					return &CorruptError{What: "kept request is incomplete", Action: id}
				}
				return dispatch.ErrNoRequest
			}
			plain, _, ok := j.seal.open(key, v, 0)
			if !ok || len(plain) == 0 {
				return &CorruptError{What: "kept request does not open", Action: id}
			}
			out = append(out, plain[1:]...)
			if plain[0]&flagLast != 0 {
				return nil
			}
		}
	})
	if err != nil {
		return nil, err
	}
	return out, nil
}

// KeptActions implements dispatch.Journal.
func (j *Journal) KeptActions(context.Context) (ids []dispatch.ActionID, err error) {
	err = j.view(func(txn *snapshot) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{famKept}})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			key := it.Item().Key()
			if len(key) == 21 && binary.BigEndian.Uint32(key[17:]) == 0 {
				ids = append(ids, dispatch.ActionID(key[1:17]))
			}
		}
		return nil
	})
	return ids, err
}

// Keyed implements dispatch.Journal: the action that holds an idempotency key.
func (j *Journal) Keyed(_ context.Context, caller, scope, key string) (rec dispatch.Record, err error) {
	want := dispatch.Record{Caller: caller, Bound: &dispatch.Bound{Key: &dispatch.Key{Scope: scope, Key: key}}}
	at := j.keyOf(&want)
	err = j.peek(func(txn *snapshot) error {
		v, found, err := get(txn, at)
		if err != nil {
			return err
		}
		if !found {
			return j.absent()
		}
		if len(v) != 16 {
			return &CorruptError{What: "index of idempotency keys", Key: at}
		}
		// The index is a hint: the projection decides.
		p, err := j.readProjection(txn, dispatch.ActionID(v))
		if err != nil {
			return err
		}
		if p == nil || p.rec.Caller != caller || !p.rec.HoldsKey() || p.rec.Bound.Key.Scope != scope || p.rec.Bound.Key.Key != key {
			return &CorruptError{What: "index of idempotency keys", Key: at}
		}
		rec = j.project(p.rec)
		return nil
	})
	return rec, err
}

// verifyKey checks that an action's key is in the index: its absence would be taken for an
// answer. Another action may have taken it over.
func (v *verifier) verifyKey(txn *snapshot, rec *dispatch.Record) error {
	if rec.HoldsKey() {
		value, found, err := get(txn, v.j.keyOf(rec))
		if err != nil {
			return err
		}
		if !found || len(value) != len(rec.ID) {
			return &CorruptError{What: "index of idempotency keys", Action: rec.ID}
		}
	}
	if rec.KeepsRequest() {
		if _, found, err := has(txn, keyKept(rec.ID, 0)); err != nil || !found {
			if err == nil {
				err = &CorruptError{What: "kept request is missing", Action: rec.ID}
			}
			return err
		}
	}
	return nil
}
