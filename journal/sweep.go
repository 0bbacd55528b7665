package journal

import (
	"encoding/binary"
	"errors"
	"log/slog"
	"time"

	"github.com/dgraph-io/badger/v4"

	"waybill/dispatch"
)

// Retention drops the chunks of results that have expired. Events, projections and
// manifests stay: the action remains what it was, and its result is said to be gone
// (dispatch.ErrResultDropped), never executed again (CONTRACT H7).

const (
	// sweepChunks bounds the keys that one maintenance step removes.
	sweepChunks = 512
	// sweepGrace bounds what a wrong clock can expire at a start: the retention clock
	// starts no later than this after the newest event, and then follows the
	// monotonic clock (M3, T5).
	sweepGrace = 24 * time.Hour
)

// startSweeper runs Sweep now and then until Close.
func (j *Journal) startSweeper(newest time.Time) error {
	base := j.opt.Now()
	if limit := newest.Add(sweepGrace); !newest.IsZero() && base.After(limit) {
		base = limit
	}
	started := time.Now()
	if err := j.loadRetention(base); err != nil {
		return err
	}
	if j.opt.SweepInterval < 0 {
		return nil
	}
	j.background.Go(j.watchSpace)
	j.background.Go(func() {
		t := time.NewTicker(j.opt.SweepInterval)
		defer t.Stop()
		for {
			// At once, too: a process that never lives as long as the interval keeps nothing
			// for ever.
			if _, err := j.Sweep(base.Add(time.Since(started))); err != nil {
				j.log.Warn("journal: retention", slog.Any("error", err))
			}
			select {
			case <-t.C:
				j.space.fill(j)
				j.retain()
			case <-j.closing:
				return
			case <-j.poisoned:
				return
			}
		}
	})
	return nil
}

func (j *Journal) retain() {
	if _, err := j.Retain(j.retention.now()); err != nil && !errors.Is(err, dispatch.ErrNotWritten) {
		j.log.Error("journal: retention", slog.Any("error", err))
	}
}

// watchSpace looks at the free space while nothing is committed: a flush of the
// store may be under way, and the ballast is there for it.
func (j *Journal) watchSpace() {
	t := time.NewTicker(time.Second)
	defer t.Stop()
	for {
		select {
		case <-t.C:
			_ = j.space.write(j) // gives the ballast up where it has to
			if j.grown() {
				j.retain()
			}
		case <-j.closing:
			return
		case <-j.poisoned:
			return
		}
	}
}

// expired is one result whose time has come.
type expired struct {
	key     []byte // of the expiry index
	id      dispatch.ActionID
	attempt int
}

// Sweep drops every result that expired before now, and returns how many. It works
// in small steps that go through the committer like everything else.
func (j *Journal) Sweep(now time.Time) (dropped int, err error) {
	j.retention.mu.Lock()
	defer j.retention.mu.Unlock()
	for {
		due, err := j.due(now)
		if err != nil || len(due) == 0 {
			return dropped, err
		}
		for _, e := range due {
			bytes, did, err := j.drop(e)
			if err != nil {
				return dropped, err
			}
			if did {
				dropped++
				j.stats.mu.Lock()
				j.stats.dropped++
				j.stats.mu.Unlock()
				j.opt.Metrics.Dropped(1, bytes)
			}
		}
	}
}

// due returns some of the results that expired before now.
func (j *Journal) due(now time.Time) (out []expired, err error) {
	limit := now.UnixMilli()
	err = j.view(func(txn *snapshot) error {
		it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{famExpiry}})
		defer it.Close()
		for it.Rewind(); it.Valid() && len(out) < 64; it.Next() {
			key := it.Item().KeyCopy(nil)
			if len(key) != 29 {
				continue
			}
			if int64(binary.BigEndian.Uint64(key[1:])) >= limit {
				return nil
			}
			out = append(out, expired{key: key, id: dispatch.ActionID(key[9:25]), attempt: int(binary.BigEndian.Uint32(key[25:]))})
		}
		return nil
	})
	return out, err
}

// drop marks the manifest, then removes the chunks, then the index entry. A crash in
// between leaves the entry: the next sweep goes on.
func (j *Journal) drop(e expired) (bytes int64, did bool, err error) {
	var m *manifest
	if err := j.view(func(txn *snapshot) (err error) {
		m, err = j.readManifest(txn, e.id, e.attempt)
		return err
	}); err != nil {
		return 0, false, err
	}
	if m != nil && !m.Dropped {
		bytes, did = m.Bytes, true
		m.Dropped = true
		j.retention.dropped.Add(m.Bytes)
		key := keyManifest(e.id, e.attempt)
		if err := j.maintain([]entry{{key: key, value: j.seal.seal(key, nil, encodeManifest(m))}}); err != nil {
			return 0, false, err
		}
	}
	for {
		var gone []entry
		if err := j.view(func(txn *snapshot) error {
			it := txn.NewIterator(badger.IteratorOptions{Prefix: prefixChunks(e.id, e.attempt)})
			defer it.Close()
			for it.Rewind(); it.Valid() && len(gone) < sweepChunks; it.Next() {
				var err error
				if gone, err = removal(gone, it.Item()); err != nil {
					return err
				}
			}
			return nil
		}); err != nil {
			return 0, false, err
		}
		finished := len(gone) < sweepChunks
		if finished {
			gone = append(gone, entry{key: e.key, remove: true})
		}
		if err := j.maintain(gone); err != nil {
			return 0, false, err
		}
		if finished {
			return bytes, did, nil
		}
	}
}

// maintain writes entries without events, through the committer.
func (j *Journal) maintain(entries []entry) error {
	return j.submitMaintenance(&request{done: make(chan struct{}), entered: time.Now(), maint: entries})
}

func (j *Journal) submitMaintenance(r *request) error {
	if err := j.accepting(); err != nil {
		return err
	}
	j.mu.RLock()
	closed := j.closed
	if !closed {
		j.queue <- r
	}
	j.mu.RUnlock()
	if closed {
		return ErrClosed
	}
	<-r.done
	return r.err
}
