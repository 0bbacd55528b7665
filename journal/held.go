package journal

import (
	"fmt"

	"waybill/dispatch"
)

// A request that waits for an approval is kept as chunks of attempt 0
// (dispatch.HeldRequest), sealed like every chunk (CONTRACT D4): put down before
// APPROVAL_REQUESTED counts them, and removed in the very transaction that records the
// dispatch or the end of the action. What a crash before APPROVAL_REQUESTED leaves is
// garbage that goes with its action.

// admissibleHeld checks the chunks of a held request, and that all of them are there
// when APPROVAL_REQUESTED counts them.
func (j *Journal) admissibleHeld(txn *snapshot, st *stage, r *request, old *projection, rec *dispatch.Record) error {
	here := make(map[int]part)
	for _, p := range r.parts {
		if p.attempt != dispatch.HeldRequest {
			continue
		}
		if rec.Bound == nil || !rec.Bound.Approval || rec.Ended || old != nil && old.rec.Approval != nil {
			return fmt.Errorf("%w: a held request of an action that waits for no approval", dispatch.ErrIllegalTransition)
		}
		here[p.index] = p
	}
	for i := range r.events {
		ev := &r.events[i]
		if ev.Type != dispatch.ApprovalRequested {
			continue
		}
		total := int64(0)
		for n := range ev.Approval.Held.Chunks {
			if p, ok := here[n]; ok {
				total += int64(p.bytes)
				continue
			}
			key := keyChunk(r.action, dispatch.HeldRequest, n)
			size, found, err := has(txn, key)
			if err != nil {
				return fmt.Errorf("%w: %w", dispatch.ErrNotWritten, err)
			}
			if !found {
				if size, found = st.chunkSize(key); !found {
					return fmt.Errorf("%w: chunk %d of the held request is missing", dispatch.ErrNotWritten, n)
				}
			}
			total += chunkBytes(size)
		}
		if total != ev.Approval.Held.Bytes {
			return fmt.Errorf("%w: the held request has %d bytes, its event counts %d", dispatch.ErrNotWritten, total, ev.Approval.Held.Bytes)
		}
	}
	return nil
}

// releaseHeld removes a held request that nobody needs any more.
func releaseHeld(entries []entry, id dispatch.ActionID, old, next *projection) []entry {
	if old == nil || old.rec.HeldChunks() == 0 || next.rec.HeldChunks() > 0 {
		return entries
	}
	for n := range old.rec.HeldChunks() {
		entries = append(entries, entry{key: keyChunk(id, dispatch.HeldRequest, n), remove: true})
	}
	return entries
}
