package journal

import (
	"bytes"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"waybill/dispatch"
	"waybill/internal/contract"
)

// A segment holds the same whether its groups went past the page cache or through it, and
// also when a group that is too long for the one stands between two that are not.
func TestDirectWrites(t *testing.T) {
	contract.Covers(t, "T5")
	seal, err := newSealer(make([]byte, KeyBytes), storeID{1})
	if err != nil {
		t.Fatal(err)
	}
	const units = 16384
	id := newID()
	segment := func(direct bool) []byte {
		path := filepath.Join(t.TempDir(), "w")
		info := segmentInfo{number: 1, store: seal.id, slots: units}
		w := &witness{m: newMacer(seal.witness), slots: units, info: info, spares: []string{"none"}, sync: true, syncs: new(atomic.Uint64)}
		if err := newSegmentFile(path, units, true); err != nil {
			t.Fatal(err)
		}
		if w.file, err = os.OpenFile(path, os.O_RDWR, 0); err != nil {
			t.Fatal(err)
		}
		if direct {
			w.direct = openDirect(path)
		}
		if _, err := w.file.WriteAt(info.encode(w.m), 0); err != nil {
			t.Fatal(err)
		}
		for i, size := range []int{10, 1200, maxDirect, 700, 100_000, 3, maxDirect + 1, 1} {
			n := uint64(i + 1)
			g := &loggedGroup{number: n, head: head{seq: n, group: n}, records: []witnessRecord{{kind: kindEvent, typ: dispatch.DispatchStarted, attempt: 1, seq: n, action: id}}}
			if err := w.write(g, []entry{{key: keyEvent(n), value: bytes.Repeat([]byte{byte(n)}, size)}}); err != nil {
				t.Fatal(err)
			}
			if got := readAll(t, path); !bytes.Contains(got, bytes.Repeat([]byte{byte(n)}, size)) {
				t.Fatalf("group %d is not in the file", n)
			}
		}
		if direct && w.direct == nil {
			t.Log("this file system takes no direct writes: both are the same")
		}
		if err := w.close(); err != nil {
			t.Fatal(err)
		}
		return readAll(t, path)
	}
	plain := segment(false)
	if !bytes.Equal(plain, segment(true)) {
		t.Error("the segments differ")
	}
	s, err := scanSegment(plain, newMacer(seal.witness), 1)
	if err != nil || len(s.groups) != 8 {
		t.Fatalf("%d groups, %v", len(s.groups), err)
	}
	for i := range s.groups {
		if !s.groups[i].intact {
			t.Errorf("group %d is damaged", i+1)
		}
	}
}
