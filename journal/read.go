package journal

import (
	"context"
	"encoding/hex"
	"errors"
	"fmt"
	"iter"

	"github.com/dgraph-io/badger/v4"
	"github.com/oklog/ulid/v2"

	"waybill/dispatch"
)

// Action implements dispatch.Journal. An id that is not there is
// dispatch.ErrActionNotFound, which is no permission (CONTRACT M7); in quarantine it
// is dispatch.ErrQuarantined, and so is one that may be behind: still open in the
// store, or named by the witness after the store's end.
func (j *Journal) Action(_ context.Context, id dispatch.ActionID) (dispatch.Record, error) {
	var p *projection
	err := j.peek(func(txn *snapshot) (err error) {
		p, err = j.readProjection(txn, id)
		return err
	})
	if err != nil {
		return dispatch.Record{}, err
	}
	if j.recovery.Quarantined {
		if p == nil {
			return dispatch.Record{}, dispatch.ErrQuarantined
		}
		if _, ahead := j.named[id]; ahead || !p.rec.Ended || j.restored && p.rec.LeftToRepeat() {
			return p.rec, dispatch.ErrQuarantined
		}
		return p.rec.At(j.opt.Now()), nil
	}
	if p == nil {
		if _, lost := j.named[id]; lost && j.opt.ReadOnly {
			return j.project(dispatch.Record{ID: id}), nil
		}
		return dispatch.Record{}, dispatch.ErrActionNotFound
	}
	return j.project(p.rec), nil
}

// absent is the answer for something that is not in this store.
func (j *Journal) absent() error {
	if j.recovery.Quarantined {
		return dispatch.ErrQuarantined
	}
	return dispatch.ErrActionNotFound
}

// Events implements dispatch.Journal. Hash is that of the frame that holds the
// event: events appended together share it.
func (j *Journal) Events(_ context.Context, id dispatch.ActionID) (out []dispatch.StoredEvent, err error) {
	err = j.view(func(txn *snapshot) error {
		p, err := j.readProjection(txn, id)
		if err != nil {
			return err
		}
		if p == nil {
			return j.absent()
		}
		out, err = j.readEvents(txn, id, p)
		return err
	})
	return out, err
}

// readEvents reads and verifies the frames of one action.
func (j *Journal) readEvents(txn *snapshot, id dispatch.ActionID, p *projection) ([]dispatch.StoredEvent, error) {
	out := make([]dispatch.StoredEvent, 0, p.rec.Events)
	for _, first := range p.frames {
		f, v, err := j.frameOf(txn, id, first)
		if err != nil {
			return nil, err
		}
		hash := chain(keyEvent(first), v)
		text := hex.EncodeToString(hash[:])
		for i := range f.events {
			out = append(out, dispatch.StoredEvent{Seq: first + uint64(i), Hash: text, Boot: ulid.ULID(f.boot).String(), Event: f.events[i]})
		}
	}
	if len(out) != p.rec.Events {
		return nil, &CorruptError{What: "the projection counts other events", Action: id}
	}
	return out, nil
}

// frameOf reads and opens one frame of an action; value is what is stored.
func (j *Journal) frameOf(txn *snapshot, id dispatch.ActionID, first uint64) (f frame, value []byte, err error) {
	key := keyEvent(first)
	value, found, err := get(txn, key)
	if err != nil {
		return f, nil, err
	}
	if !found {
		return f, nil, &CorruptError{What: "event is missing", Seq: first, Action: id}
	}
	plain, _, ok := j.seal.open(key, value, hashBytes)
	if !ok {
		return f, nil, &CorruptError{What: "event does not open: altered", Seq: first, Action: id}
	}
	if f, err = decodeFrame(plain); err != nil || f.action != id {
		return f, nil, &CorruptError{What: "event does not decode", Seq: first, Action: id}
	}
	return f, value, nil
}

// ByRequestID implements dispatch.Journal.
func (j *Journal) ByRequestID(_ context.Context, caller, requestID string) (id dispatch.ActionID, err error) {
	key := keyRequest(j.seal.mac(macRequest, caller, requestID))
	err = j.peek(func(txn *snapshot) error {
		v, found, err := get(txn, key)
		if err != nil {
			return err
		}
		if !found {
			return j.absent()
		}
		if len(v) != len(id) {
			return &CorruptError{What: "index of request ids", Key: key}
		}
		// The index is a hint: the projection decides.
		p, err := j.readProjection(txn, dispatch.ActionID(v))
		if err != nil {
			return err
		}
		if p == nil || p.rec.Caller != caller || p.rec.RequestID != requestID {
			return &CorruptError{What: "index of request ids", Key: key}
		}
		id = p.rec.ID
		return nil
	})
	return id, err
}

// Guarding implements dispatch.Journal: the action that ended last of those that
// guard against a repeat (CONTRACT O3). Actions still running are not in the index.
func (j *Journal) Guarding(_ context.Context, caller, fingerprint string) (dispatch.Record, error) {
	if j.noneLatest() {
		return dispatch.Record{}, dispatch.ErrActionNotFound
	}
	return j.latest(famGuard, j.seal.mac(macGuard, caller, fingerprint), func(r *dispatch.Record) bool {
		return r.Caller == caller && r.Bound != nil && r.Bound.Fingerprint == fingerprint && r.GuardsRepeats()
	})
}

// Redirecting implements dispatch.Journal: the action whose answer sent the caller
// there last (CONTRACT R3).
func (j *Journal) Redirecting(_ context.Context, caller, key string) (dispatch.Record, error) {
	if j.noneLatest() {
		return dispatch.Record{}, dispatch.ErrActionNotFound
	}
	return j.latest(famRedirect, j.seal.mac(macGoto, caller, key), func(r *dispatch.Record) bool {
		return r.Caller == caller && key != "" && r.RedirectKey() == key
	})
}

// noneLatest is latest's answer for everybody, known without a keyed hash, as long as no
// action was of this kind.
func (j *Journal) noneLatest() bool { return !j.db.IsClosed() && j.absence.empty() }

// latest returns the first action downwards from the end of an index for which match
// holds. Index entries are hints: the projection is read, and decides.
func (j *Journal) latest(family byte, mac digest, match func(*dispatch.Record) bool) (rec dispatch.Record, err error) {
	if !j.db.IsClosed() && j.absence.certain(&mac) {
		return rec, dispatch.ErrActionNotFound
	}
	prefix := prefixLatest(family, mac)
	err = j.view(func(txn *snapshot) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: prefix, Reverse: true})
		defer it.Close()
		for it.Seek(last(prefix)); it.Valid(); it.Next() {
			id, ok := trailingID(it.Item().Key())
			if !ok {
				continue
			}
			p, err := j.readProjection(txn, id)
			if err != nil {
				return err
			}
			if p == nil {
				continue
			}
			if r := j.project(p.rec); match(&r) {
				rec = r
				return nil
			}
		}
		return j.absent()
	})
	return rec, err
}

// last is where a reverse iteration over prefix starts.
func last(prefix []byte) []byte {
	b := append(make([]byte, 0, len(prefix)+32), prefix...)
	for range 32 {
		b = append(b, 0xff)
	}
	return b
}

// actionsPortion is how many keys Actions reads in one transaction: a slow consumer
// holds none open.
const actionsPortion = 128

// Actions implements dispatch.Journal. Newest first is by the sequence of the first
// event. In quarantine the last pair is dispatch.ErrQuarantined: the list is not
// known to be complete.
func (j *Journal) Actions(ctx context.Context, f dispatch.Filter) iter.Seq2[dispatch.Record, error] {
	return func(yield func(dispatch.Record, error) bool) {
		prefix := []byte{famTime}
		switch {
		case f.Caller != "" && f.RequestID != "":
			j.oneAction(ctx, f, yield)
			return
		case f.Caller != "":
			prefix = prefixCaller(j.seal.mac(macCaller, f.Caller))
		case f.OpenOnly:
			// By the time in their ids, which is nearly the order of their sequence: a start
			// that asks for what is open does not read everything else.
			prefix = []byte{famOpen}
		case f.Doubtful:
			prefix = []byte{famDoubt}
		}
		from := last(prefix)
		yielded := 0
		for {
			records, next, err := j.portion(prefix, from, &f)
			for i := range records {
				if ctx.Err() != nil {
					yield(dispatch.Record{}, context.Cause(ctx))
					return
				}
				if !yield(records[i], nil) {
					return
				}
				if yielded++; f.Limit > 0 && yielded >= f.Limit {
					return
				}
			}
			if err != nil {
				yield(dispatch.Record{}, err)
				return
			}
			if next == nil {
				break
			}
			if ctx.Err() != nil {
				yield(dispatch.Record{}, context.Cause(ctx))
				return
			}
			from = next
		}
		if j.recovery.Quarantined {
			yield(dispatch.Record{}, dispatch.ErrQuarantined)
		}
	}
}

func (j *Journal) oneAction(ctx context.Context, f dispatch.Filter, yield func(dispatch.Record, error) bool) {
	id, err := j.ByRequestID(ctx, f.Caller, f.RequestID)
	var rec dispatch.Record
	if err == nil {
		rec, err = j.Action(ctx, id)
	}
	switch {
	case errors.Is(err, dispatch.ErrActionNotFound):
	case err != nil:
		yield(dispatch.Record{}, err)
	case matches(&rec, &f):
		yield(rec, nil)
	}
}

// portion reads some index keys downwards from from; next is where to go on, nil at
// the end.
func (j *Journal) portion(prefix, from []byte, f *dispatch.Filter) (out []dispatch.Record, next []byte, err error) {
	err = j.view(func(txn *snapshot) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: prefix, Reverse: true})
		defer it.Close()
		seen := 0
		for it.Seek(from); it.Valid(); it.Next() {
			key := it.Item().KeyCopy(nil)
			if seen++; seen > actionsPortion {
				next = key
				return nil
			}
			id, ok := trailingID(key)
			if !ok {
				continue
			}
			p, err := j.readProjection(txn, id)
			if err != nil {
				return err
			}
			if p == nil {
				continue // a hint without its record
			}
			rec := j.project(p.rec)
			if matches(&rec, f) {
				out = append(out, rec)
			}
		}
		return nil
	})
	if err != nil {
		err = fmt.Errorf("journal: actions: %w", err)
	}
	return out, next, err
}

func matches(r *dispatch.Record, f *dispatch.Filter) bool {
	switch {
	case f.Caller != "" && r.Caller != f.Caller,
		f.RequestID != "" && r.RequestID != f.RequestID,
		f.Route != "" && (r.Bound == nil || r.Bound.Route != f.Route),
		f.Outcome != 0 && r.Facts.Outcome != f.Outcome,
		f.Phase != 0 && r.Facts.Phase != f.Phase,
		f.Code != 0 && r.Facts.Code != f.Code,
		!f.Since.IsZero() && r.AcceptedAt.Before(f.Since),
		f.OpenOnly && r.Ended, f.Doubtful && !r.Doubtful():
		return false
	}
	return true
}
