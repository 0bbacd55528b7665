package journal

import (
	"context"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/dgraph-io/badger/v4"

	"waybill/dispatch"
)

// Sessions are on record as events without an action, like BOOT, and as one row each
// that is written in the same transaction (CONTRACT N4). The row is what lists read;
// the events are the truth, and go with the chain's base.

var _ dispatch.SessionJournal = (*Journal)(nil)

const (
	sessionPrefix = "ses_"
	// sessionForgotten is when a session that was never closed is taken off the list,
	// once its opening is before the base: its token is not valid for that long.
	sessionForgotten = 60 * 24 * time.Hour
)

// keySession is the row's key, or nil for an id that is none.
func keySession(id string) []byte {
	raw, err := hex.DecodeString(strings.TrimPrefix(id, sessionPrefix))
	if err != nil || len(raw) != 8 || !strings.HasPrefix(id, sessionPrefix) {
		return nil
	}
	return append([]byte{famSession}, raw...)
}

// RecordSession implements dispatch.SessionJournal.
func (j *Journal) RecordSession(ctx context.Context, ev dispatch.Event) error {
	if err := j.accepting(); err != nil {
		return err
	}
	s := ev.Session
	if s == nil || ev.Type != dispatch.SessionOpened && ev.Type != dispatch.SessionClosed {
		return fmt.Errorf("%w: not an event of a session", dispatch.ErrNotWritten)
	}
	key := keySession(s.ID)
	if key == nil {
		return fmt.Errorf("%w: not a session id", dispatch.ErrNotWritten)
	}
	j.sessions.Lock()
	defer j.sessions.Unlock()
	old, err := j.session(key)
	switch {
	case err != nil:
		return fmt.Errorf("%w: %w", dispatch.ErrNotWritten, err)
	case ev.Type == dispatch.SessionOpened && old != nil:
		return fmt.Errorf("%w: session is on record", dispatch.ErrIllegalTransition)
	case ev.Type == dispatch.SessionClosed && (old == nil || old.ClosedSeq > 0):
		return fmt.Errorf("%w: session is not open", dispatch.ErrIllegalTransition)
	}
	events, text, err := prepare([]dispatch.Event{ev})
	if err != nil {
		return err
	}
	r := &request{done: make(chan struct{}), entered: time.Now(), boot: true, events: events}
	r.set(text)
	r.also = func(first uint64) []entry {
		row := dispatch.SessionRecord{Session: *events[0].Session, OpenedAt: events[0].At, OpenedSeq: first}
		if old != nil {
			row = *old
			row.Reason, row.ClosedAt, row.ClosedSeq = events[0].Session.Reason, events[0].At, first
		}
		plain, err := json.Marshal(row)
		if err != nil {
			panic("journal: session: " + err.Error()) // texts, times and numbers: cannot fail
		}
		return []entry{{key: key, value: j.seal.seal(key, nil, append([]byte{plainVersion}, plain...))}}
	}
	if err := j.enqueue(ctx, r); err != nil {
		return err
	}
	return r.wait(ctx)
}

func (j *Journal) session(key []byte) (out *dispatch.SessionRecord, err error) {
	err = j.view(func(txn *snapshot) error {
		v, found, err := get(txn, key)
		if err != nil || !found {
			return err
		}
		out, err = j.openSession(key, v)
		return err
	})
	return out, err
}

func (j *Journal) openSession(key, value []byte) (*dispatch.SessionRecord, error) {
	plain, _, ok := j.seal.open(key, value, 0)
	out := new(dispatch.SessionRecord)
	if !ok || len(plain) < 1 || plain[0] != plainVersion || json.Unmarshal(plain[1:], out) != nil {
		return nil, &CorruptError{What: "a session does not open", Key: key}
	}
	return out, nil
}

// Sessions implements dispatch.SessionJournal. In quarantine the error is
// dispatch.ErrQuarantined, with what there is.
func (j *Journal) Sessions(ctx context.Context) (out []dispatch.SessionRecord, err error) {
	err = j.view(func(txn *snapshot) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{famSession}, PrefetchValues: true, PrefetchSize: 64})
		defer it.Close()
		for it.Rewind(); it.Valid(); it.Next() {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			v, err := it.Item().ValueCopy(nil)
			if err != nil {
				return &storeError{"read"}
			}
			s, err := j.openSession(it.Item().KeyCopy(nil), v)
			if err != nil {
				return err
			}
			out = append(out, *s)
		}
		return nil
	})
	slices.SortFunc(out, func(a, b dispatch.SessionRecord) int {
		if a.OpenedSeq < b.OpenedSeq {
			return -1
		}
		return 1
	})
	if err == nil && j.recovery.Quarantined {
		err = dispatch.ErrQuarantined
	}
	return out, err
}

// expireSessions takes sessions off the list whose events are all before the base.
func (j *Journal) expireSessions(base uint64, now time.Time) error {
	return j.removeKeys([]byte{famSession}, func(key, value []byte) (remove, more bool, err error) {
		s, err := j.openSession(key, value)
		if err != nil {
			return false, false, err
		}
		ended := s.ClosedSeq > 0 && s.ClosedSeq <= base
		return ended || s.ClosedSeq == 0 && s.OpenedSeq <= base && now.Sub(s.OpenedAt) > sessionForgotten, true, nil
	})
}
