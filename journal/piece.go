package journal

import (
	"encoding/binary"

	"github.com/dgraph-io/badger/v4"

	"waybill/dispatch"
)

// The key of a chunk begins with its action, and actions that run at the same time write
// their chunks in between one another. Where the store puts keys in order, that means to
// write what is there again for what comes, and chunks are most of what a journal holds. So
// a large one stands in a family of its own under a key that only grows, that of its group,
// and under the chunk's key stands its place. Its seal binds it to the chunk's key
// nevertheless: a place that leads elsewhere leads to what does not open.

// pieceBytes is the length from which on a chunk's sealed value has a place of its own.
const pieceBytes = 8 << 10

// placeBytes is the length of a place, less than that of any sealed value.
const placeBytes = 1 + 8 + 4 + 4

// place is where a large chunk stands.
type place struct {
	group uint64
	n     uint32 // in the group
	size  uint32 // of the sealed value
}

func (p place) append(b []byte) []byte {
	b = binary.BigEndian.AppendUint64(append(b, plainVersion), p.group)
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint32(b, p.n), p.size)
}

func (p place) key() []byte {
	return binary.BigEndian.AppendUint32(binary.BigEndian.AppendUint64(append(make([]byte, 0, 13), famPiece), p.group), p.n)
}

// placeIn reads what stands under a chunk's key; ok is false for a sealed chunk.
func placeIn(v []byte) (p place, ok bool) {
	if len(v) != placeBytes || v[0] != plainVersion {
		return p, false
	}
	return place{group: binary.BigEndian.Uint64(v[1:]), n: binary.BigEndian.Uint32(v[9:]), size: binary.BigEndian.Uint32(v[13:])}, true
}

// sealedChunk reads the sealed value of a chunk, wherever it stands.
func sealedChunk(txn *snapshot, key []byte) (v []byte, found bool, err error) {
	if v, found, err = get(txn, key); err != nil || !found {
		return nil, false, err
	}
	p, ok := placeIn(v)
	if !ok {
		return v, true, nil
	}
	if v, found, err = get(txn, p.key()); err != nil {
		return nil, false, err
	}
	if !found || len(v) != int(p.size) {
		return nil, true, &CorruptError{What: "chunk is not in its place", Key: key}
	}
	return v, true, nil
}

// chunkSize returns the length of a chunk's sealed value.
func chunkSize(txn *snapshot, key []byte) (size int64, found bool, err error) {
	if size, found, err = has(txn, key); err != nil || !found || size != placeBytes {
		return size, found, err
	}
	v, found, err := get(txn, key)
	if p, ok := placeIn(v); ok {
		return int64(p.size), found, err
	}
	return int64(len(v)), found, err
}

// chunkIn returns what entries of a group have under a chunk's key; nil: nothing.
func chunkIn(entries []entry, key []byte) []byte {
	for i := len(entries) - 1; i >= 0; i-- {
		if e := &entries[i]; string(e.key) == string(key) && !e.remove {
			return e.value
		}
	}
	return nil
}

// chunkSize is that of a chunk in this group.
func (st *stage) chunkSize(key []byte) (size int64, found bool) {
	v := chunkIn(st.entries, key)
	if p, ok := placeIn(v); ok {
		return int64(p.size), true
	}
	return int64(len(v)), v != nil
}

// placed adds a request's chunks, the large ones in places of their own. One that is written
// again, as it was, leaves nothing behind.
func (j *Journal) placed(txn *snapshot, st *stage, entries []entry, r *request) ([]entry, error) {
	for i := range r.chunks {
		e := r.chunks[i]
		// What is held for an approval goes in the transaction that dispatches it, by its key.
		if len(e.value) < pieceBytes || r.parts[i].attempt == dispatch.HeldRequest {
			entries = append(entries, e)
			continue
		}
		before := chunkIn(entries, e.key)
		if before == nil {
			before = chunkIn(st.entries, e.key)
		}
		if before == nil {
			var err error
			if before, _, err = get(txn, e.key); err != nil {
				return nil, err
			}
		}
		if p, ok := placeIn(before); ok {
			entries = append(entries, entry{key: p.key(), remove: true})
		}
		p := place{group: st.head.group, n: uint32(len(st.entries) + len(entries)), size: uint32(len(e.value))}
		entries = append(entries, entry{key: e.key, value: p.append(make([]byte, 0, placeBytes))}, entry{key: p.key(), value: e.value})
	}
	return entries, nil
}

// removal adds what takes the entry of a key away: with a chunk's place what stands there.
func removal(gone []entry, item *badger.Item) ([]entry, error) {
	key := item.KeyCopy(nil)
	gone = append(gone, entry{key: key, remove: true})
	if key[0] != famChunk || item.ValueSize() != placeBytes {
		return gone, nil
	}
	v, err := item.ValueCopy(nil)
	if err != nil {
		return nil, &storeError{"read"}
	}
	if p, ok := placeIn(v); ok {
		gone = append(gone, entry{key: p.key(), remove: true})
	}
	return gone, nil
}
