package journal

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"io"

	"waybill/dispatch"
)

// errBody is what a reader of a damaged result gets: never a clean end (G3, H10).
var errBody = errors.New("journal: stored result does not verify")

// OpenResult implements dispatch.Journal. The body is read chunk by chunk; its last
// bytes are not given out before the whole of it has verified: number and order of
// the chunks, their seals, the length, and the SHA-256.
func (j *Journal) OpenResult(_ context.Context, id dispatch.ActionID) (dispatch.Result, io.ReadCloser, error) {
	var res dispatch.Result
	var m *manifest
	attempt := 0
	err := j.peek(func(txn *snapshot) error {
		p, err := j.readProjection(txn, id)
		if err != nil {
			return err
		}
		if p == nil {
			return j.absent()
		}
		if p.rec.Result == nil {
			return dispatch.ErrNoResult
		}
		res, attempt = *p.rec.Result, p.rec.ResultOf
		m, err = j.readManifest(txn, id, attempt)
		switch {
		case err != nil:
			return err
		case m == nil:
			return &CorruptError{What: "result without a manifest", Action: id}
		case m.Bytes != res.Bytes || m.Chunks != res.Chunks || m.Digest != res.Digest:
			return &CorruptError{What: "manifest differs from the result event", Action: id}
		}
		return nil
	})
	if err != nil {
		return dispatch.Result{}, nil, err
	}
	if m.Dropped {
		return res, nil, dispatch.ErrResultDropped
	}
	return res, &body{j: j, id: id, attempt: attempt, want: *m, sum: sha256.New()}, nil
}

// readManifest returns nil when there is none.
func (j *Journal) readManifest(txn *snapshot, id dispatch.ActionID, attempt int) (*manifest, error) {
	key := keyManifest(id, attempt)
	v, found, err := get(txn, key)
	if err != nil || !found {
		return nil, err
	}
	plain, _, ok := j.seal.open(key, v, 0)
	if !ok {
		return nil, &CorruptError{What: "manifest does not open", Action: id}
	}
	m, err := decodeManifest(plain)
	if err != nil {
		return nil, &CorruptError{What: "manifest does not decode", Action: id}
	}
	return m, nil
}

// readChunk returns the data of one chunk; found is false when it is not there.
func (j *Journal) readChunk(txn *snapshot, id dispatch.ActionID, attempt, index int) (data []byte, last, found bool, err error) {
	key := keyChunk(id, attempt, index)
	v, found, err := sealedChunk(txn, key)
	if err != nil || !found {
		return nil, false, found, err
	}
	plain, _, ok := j.seal.open(key, v, 0)
	if !ok || len(plain) < 1 || plain[0]&^flagLast != 0 {
		return nil, false, true, &CorruptError{What: fmt.Sprintf("chunk %d of attempt %d does not open", index, attempt), Action: id}
	}
	return plain[1:], plain[0]&flagLast != 0, true, nil
}

// body reads a stored result. It is not safe for concurrent use.
type body struct {
	j       *Journal
	id      dispatch.ActionID
	attempt int
	want    manifest

	next  int    // chunk
	chunk []byte // rest of the current one
	bytes int64
	sum   hash.Hash
	err   error
}

// Read implements io.Reader. io.EOF means that everything was verified.
func (b *body) Read(p []byte) (int, error) {
	for len(b.chunk) == 0 && b.err == nil {
		b.err = b.load()
	}
	if len(b.chunk) == 0 {
		return 0, b.err
	}
	n := copy(p, b.chunk)
	b.chunk = b.chunk[n:]
	return n, nil
}

// WriteTo implements io.WriterTo: one write a chunk.
func (b *body) WriteTo(w io.Writer) (total int64, err error) {
	for {
		for len(b.chunk) == 0 && b.err == nil {
			b.err = b.load()
		}
		if len(b.chunk) == 0 {
			if errors.Is(b.err, io.EOF) {
				return total, nil
			}
			return total, b.err
		}
		n, err := w.Write(b.chunk)
		total += int64(n)
		b.chunk = b.chunk[n:]
		if err != nil {
			return total, err
		}
		if len(b.chunk) > 0 {
			return total, io.ErrShortWrite
		}
	}
}

// load reads and verifies the next chunk, or returns io.EOF after the last.
func (b *body) load() error {
	if b.next >= b.want.Chunks {
		if b.want.Chunks == 0 && (b.want.Bytes != 0 || b.digest() != b.want.Digest) {
			return fmt.Errorf("%w: digest", errBody)
		}
		return io.EOF
	}
	var data []byte
	var last, found bool
	err := b.j.peek(func(txn *snapshot) (err error) {
		if data, last, found, err = b.j.readChunk(txn, b.id, b.attempt, b.next); err != nil || found {
			return err
		}
		// Retention may have come in between.
		if m, err := b.j.readManifest(txn, b.id, b.attempt); err == nil && m != nil && m.Dropped {
			return dispatch.ErrResultDropped
		}
		return &CorruptError{What: fmt.Sprintf("chunk %d of attempt %d is missing", b.next, b.attempt), Action: b.id}
	})
	if err != nil {
		return fmt.Errorf("%w: %w", errBody, err)
	}
	b.next++
	b.bytes += int64(len(data))
	b.sum.Write(data)
	if last != (b.next == b.want.Chunks) {
		return fmt.Errorf("%w: the last chunk is another", errBody)
	}
	if b.next == b.want.Chunks && (b.bytes != b.want.Bytes || b.digest() != b.want.Digest) {
		return fmt.Errorf("%w: length or digest", errBody)
	}
	b.chunk = data
	return nil
}

func (b *body) digest() string { return "sha256:" + hex.EncodeToString(b.sum.Sum(nil)) }

// Close implements io.Closer.
func (b *body) Close() error {
	b.err, b.chunk = errors.New("journal: result is closed"), nil
	return nil
}

// Chunk implements dispatch.Journal: one durable chunk, verified by its own seal. What
// the chunks make together only OpenResult verifies.
func (j *Journal) Chunk(_ context.Context, id dispatch.ActionID, attempt, index int) (data []byte, err error) {
	err = j.peek(func(txn *snapshot) error {
		var found bool
		data, _, found, err = j.readChunk(txn, id, attempt, index)
		if err == nil && !found {
			return dispatch.ErrNoResult
		}
		return err
	})
	return data, err
}
