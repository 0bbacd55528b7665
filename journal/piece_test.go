package journal

import (
	"bytes"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/journal/internal/hooks"
	"waybill/outcome"
)

// keysIn returns the keys of some families, in order.
func keysIn(t *testing.T, j *Journal, families ...byte) (out [][]byte) {
	t.Helper()
	if err := j.view(func(txn *snapshot) error {
		for _, f := range families {
			it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{f}})
			for it.Rewind(); it.Valid(); it.Next() {
				out = append(out, it.Item().KeyCopy(nil))
			}
			it.Close()
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	return out
}

func large(fill byte) []byte { return bytes.Repeat([]byte{fill}, pieceBytes) }

func mustRead(t *testing.T, j *Journal, id dispatch.ActionID, want []byte) {
	t.Helper()
	_, r, err := j.OpenResult(bg, id)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, want) {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
}

// Large chunks stand apart, and are read, counted and removed as if they did not: before and
// after the store has them, and after a start.
func TestPieces(t *testing.T) {
	contract.Covers(t, "H4", "H7")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	small, one, parts := newID(), newID(), newID()
	for _, id := range []dispatch.ActionID{small, one, parts} {
		mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	}
	mustAppend(t, j, toResult(small, []byte("x")))
	mustAppend(t, j, toResult(one, large('a')))
	mustRead(t, j, one, large('a')) // the store is behind
	// In three appends, of which two come again as an attempt that did not hear of it sends them.
	whole := bytes.Join([][]byte{large('b'), large('c'), []byte("d")}, nil)
	chunk := func(i int, b []byte) dispatch.Chunk {
		return dispatch.Chunk{Attempt: 1, Index: i, Last: i == 2, Data: b}
	}
	for range 2 {
		mustAppend(t, j, dispatch.Batch{Action: parts, Chunks: []dispatch.Chunk{chunk(0, large('b'))}})
		mustAppend(t, j, dispatch.Batch{Action: parts, Chunks: []dispatch.Chunk{chunk(1, large('c'))}})
	}
	// Twice in one batch, and in one group.
	mustAppend(t, j, dispatch.Batch{Action: parts, Chunks: []dispatch.Chunk{chunk(0, large('b')), chunk(0, large('b'))}})
	wrong := dispatch.Batch{Action: parts, Events: []dispatch.Event{evResponse(1, 200), evResult(1, 200, 3, append(whole, 'e'), committed)}, Chunks: []dispatch.Chunk{chunk(2, []byte("d"))}}
	if _, err := j.Append(bg, wrong); !errors.Is(err, dispatch.ErrNotWritten) {
		t.Errorf("a result of one byte more than its chunks: %v", err)
	}
	mustAppend(t, j, dispatch.Batch{Action: parts, Events: []dispatch.Event{evResponse(1, 200), evResult(1, 200, 3, whole, committed)}, Chunks: []dispatch.Chunk{chunk(2, []byte("d"))}})
	check := func(pieces int) {
		t.Helper()
		if got := len(keysIn(t, j, famPiece)); got != pieces {
			t.Errorf("%d pieces, want %d", got, pieces)
		}
		rep, err := j.Verify(bg)
		if err != nil || rep.OrphanChunks != 0 {
			t.Errorf("verify: %+v, %v", rep, err)
		}
	}
	check(3)
	for range 2 {
		mustRead(t, j, small, []byte("x"))
		mustRead(t, j, one, large('a'))
		mustRead(t, j, parts, whole)
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
		// Sealed, wherever they stand.
		if err := filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil || !d.Type().IsRegular() {
				return err
			}
			b, err := os.ReadFile(path)
			if bytes.Contains(b, large('a')[:64]) || bytes.Contains(b, large('b')[:64]) {
				t.Errorf("%s holds a chunk in clear", d.Name())
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		j = openTest(t, dir, nil)
		check(3)
	}
	// A result that is dropped, and an action that is removed, take them along.
	if _, _, err := j.drop(expired{key: keyExpiry(1, one, 1), id: one, attempt: 1}); err != nil {
		t.Fatal(err)
	}
	check(2)
	if _, _, err := j.OpenResult(bg, one); !errors.Is(err, dispatch.ErrResultDropped) {
		t.Errorf("after it was dropped: %v", err)
	}
	if _, err := j.remove([]dispatch.ActionID{parts}, 1<<40, time.Now()); err != nil {
		t.Fatal(err)
	}
	if got := keysIn(t, j, famPiece, famChunk); len(got) != 1 {
		t.Errorf("left: %x", got)
	}
}

// A place that leads to another chunk, or nowhere, is damage, never an answer.
func TestPiecesExchanged(t *testing.T) {
	contract.Covers(t, "H4", "T5")
	j := openTest(t, tempDir(t), nil)
	var ids []dispatch.ActionID
	for i := range 2 {
		id := newID()
		ids = append(ids, id)
		mustAppend(t, j, toDispatch(id, "ci", "", "f"))
		mustAppend(t, j, toResult(id, large(byte('a'+i))))
	}
	pieces := keysIn(t, j, famPiece)
	if len(pieces) != 2 {
		t.Fatalf("%d pieces", len(pieces))
	}
	read := func(key []byte) (v []byte) {
		if err := j.view(func(txn *snapshot) (err error) {
			v, _, err = get(txn, key)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return v
	}
	a, b := keyChunk(ids[0], 1, 0), keyChunk(ids[1], 1, 0)
	placeA, placeB, pieceB := read(a), read(b), read(pieces[1])
	// One that is lost is not made up for by one that is there for nobody.
	stray := place{group: 1 << 40, n: 1}.key()
	for name, change := range map[string]struct{ damage, repair []entry }{
		"places exchanged": {[]entry{{key: a, value: placeB}, {key: b, value: placeA}}, []entry{{key: a, value: placeA}, {key: b, value: placeB}}},
		"piece removed":    {[]entry{{key: pieces[1], remove: true}}, []entry{{key: pieces[1], value: pieceB}}},
		"piece elsewhere":  {[]entry{{key: pieces[1], remove: true}, {key: stray, value: pieceB}}, []entry{{key: pieces[1], value: pieceB}, {key: stray, remove: true}}},
		"piece shortened":  {[]entry{{key: pieces[1], value: pieceB[:100]}}, []entry{{key: pieces[1], value: pieceB}}},
		"place shortened":  {[]entry{{key: b, value: placeB[:placeBytes-1]}}, []entry{{key: b, value: placeB}}},
	} {
		if err := j.maintain(change.damage); err != nil {
			t.Fatal(err)
		}
		_, r, err := j.OpenResult(bg, ids[1])
		if err != nil {
			t.Fatal(err)
		}
		got, err := io.ReadAll(r)
		if !errors.Is(err, errBody) || !errors.Is(err, ErrCorrupt) || len(got) > 0 {
			t.Errorf("%s: %d bytes, %v", name, len(got), err)
		}
		if _, err := j.Verify(bg); !errors.Is(err, ErrCorrupt) {
			t.Errorf("%s: verify: %v", name, err)
		}
		if err := j.maintain(change.repair); err != nil {
			t.Fatal(err)
		}
		if _, err := j.Verify(bg); err != nil {
			t.Errorf("%s, repaired: %v", name, err)
		}
	}
}

// However many actions write large chunks at a time, a table of them is written once: all of
// it goes to the last level, and no compaction has it.
func TestPiecesWrittenOnce(t *testing.T) {
	j := openTest(t, tempDir(t), nil)
	last := len(j.db.Levels()) - 1
	const actions, size = 12, 48 << 10
	var wg sync.WaitGroup
	for range actions {
		wg.Go(func() {
			id, data := newID(), make([]byte, size)
			if _, err := j.Append(bg, toDispatch(id, "ci", "", "f")); err != nil {
				t.Error(err)
			}
			for i := range 50 { // together three times what memory holds
				if _, err := j.Append(bg, dispatch.Batch{Action: id, Chunks: []dispatch.Chunk{{Attempt: 1, Index: i, Data: data}}}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Wait()
	apart := 0
	for _, table := range j.db.Tables() {
		if table.Left[0] == famPiece && table.Right[0] == famPiece {
			if table.Level != last {
				t.Errorf("a table of pieces in level %d", table.Level)
			}
			apart++
		}
	}
	if apart < 2 {
		t.Errorf("%d tables of pieces", apart)
	}
}

// One action that streams without an end, and many with large results, fill the witness with
// few events or none: what the store has of them does not stay there. Nor does it after a
// start that found groups lost, whose events are counted again.
func TestWitnessOfLargeResults(t *testing.T) {
	contract.Covers(t, "M5")
	const slots, finished, limit = 512, 12, 12 + maxUnsettled + 4 // segments of a quarter of a MiB
	h := func() *hooks.Hooks { return &hooks.Hooks{NoSync: true, SegmentSlots: slots} }
	bounded := func(dir string, j *Journal, what string) {
		t.Helper()
		if err := j.between(func() error {
			if j.c.witness.most != maxFinished {
				t.Error(j.c.witness.most)
			}
			j.c.witness.most = int64(finished) * unitOffset(slots)
			return nil
		}); err != nil {
			t.Fatal(err)
		}
		data, most := make([]byte, 64<<10), 0
		segments := func() {
			t.Helper()
			list, err := listSegments(filepath.Join(dir, nameWitness))
			if err != nil {
				t.Fatal(err)
			}
			most = max(most, len(list))
		}
		stream := newID()
		mustAppend(t, j, toDispatch(stream, "ci", "", "f"))
		for i := range 200 { // 65 segments
			mustAppend(t, j, dispatch.Batch{Action: stream, Chunks: []dispatch.Chunk{{Attempt: 1, Index: i, Data: data}}})
			segments()
		}
		if most > limit {
			t.Errorf("%s: %d segments of a stream", what, most)
		}
		most = 0
		for range 200 {
			id := newID()
			mustAppend(t, j, toDispatch(id, "ci", "", "f"))
			mustAppend(t, j, toResult(id, data))
			segments()
		}
		if most > limit {
			t.Errorf("%s: %d segments of large results", what, most)
		}
		mustVerify(t, j)
	}
	dir := tempDir(t)
	j := openTest(t, dir, h())
	bounded(dir, j, "anew")

	dir = tempDir(t)
	j = openTest(t, dir, h())
	mustAppend(t, j, toDispatch(newID(), "ci", "", "f"))
	closeTest(t, j)
	old := filepath.Join(t.TempDir(), "old")
	copyDir(t, filepath.Join(dir, nameStore), old)
	j = openTest(t, dir, h())
	for range 400 {
		id := newID()
		mustAppend(t, j, toDispatch(id, "ci", "", "f"))
		mustAppend(t, j, toResult(id, []byte("lost")))
	}
	closeTest(t, j)
	copyDir(t, old, filepath.Join(dir, nameStore))
	opt := testOptions(dir, h())
	opt.Acknowledge = &Acknowledgement{Reason: "rolled back"}
	j, r := openWith(t, opt)
	if len(r.Lost) == 0 {
		t.Fatal("nothing was lost")
	}
	bounded(dir, j, "after an acknowledgement")
}

// A store from before a settled group is rolled back, also where it ends with the same event.
func TestRollbackOfChunks(t *testing.T) {
	contract.Covers(t, "M5", "H4")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	add := func(i int) {
		mustAppend(t, j, dispatch.Batch{Action: id, Chunks: []dispatch.Chunk{{Attempt: 1, Index: i, Data: make([]byte, 20<<10)}}})
	}
	add(0)
	settleTest(t, j)
	old, cut, torn := filepath.Join(t.TempDir(), "old"), filepath.Join(t.TempDir(), "cut"), filepath.Join(t.TempDir(), "torn")
	copyDir(t, filepath.Join(dir, nameStore), old)
	for i := 1; i < 10; i++ {
		add(i)
	}
	settleTest(t, j)
	add(10) // says what is settled
	copyDir(t, dir, cut)
	copyDir(t, dir, torn)
	if err := os.RemoveAll(filepath.Join(cut, nameStore)); err != nil {
		t.Fatal(err)
	}
	copyDir(t, old, filepath.Join(cut, nameStore))
	opt := testOptions(cut, nil)
	j2, r := openWith(t, opt)
	if !r.Quarantined || !strings.Contains(r.Reason, "group") {
		t.Errorf("%+v", r)
	}
	closeTest(t, j2)
	opt = testOptions(cut, nil)
	opt.Acknowledge = &Acknowledgement{Reason: "rolled back"}
	j2, r = openWith(t, opt)
	if r.Quarantined {
		t.Errorf("acknowledged: %+v", r)
	}
	if rec := mustAction(t, j2, id); rec.Facts.Outcome != outcome.Unknown {
		t.Errorf("%+v", rec.Facts)
	}
	mustVerify(t, j2)
	// The store of the very end, of which memory is gone: nothing is lost.
	j3, r := openWith(t, testOptions(torn, nil))
	if r.Quarantined {
		t.Errorf("%+v", r)
	}
	for i := range 11 {
		if _, err := j3.Chunk(bg, id, 1, i); err != nil {
			t.Errorf("chunk %d: %v", i, err)
		}
	}
}

// Verify finds what an attempt without a result has lost, too, and names it.
func TestPieceOfNoResult(t *testing.T) {
	contract.Covers(t, "H4")
	j := openTest(t, tempDir(t), nil)
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	mustAppend(t, j, dispatch.Batch{Action: id, Chunks: []dispatch.Chunk{{Attempt: 1, Index: 0, Data: large('a')}}})
	piece := keysIn(t, j, famPiece)[0]
	stray := place{group: 1 << 40, n: 1}.key()
	if rep, err := j.Verify(bg); err != nil || rep.OrphanChunks != 1 {
		t.Errorf("%+v, %v", rep, err)
	}
	if err := j.maintain([]entry{{key: piece, remove: true}, {key: stray, value: []byte("x")}}); err != nil {
		t.Fatal(err)
	}
	rep, err := j.Verify(bg)
	if !errors.Is(err, ErrCorrupt) || rep.Broken == nil || rep.Broken.Action != id {
		t.Errorf("%+v, %v", rep.Broken, err)
	}
}
