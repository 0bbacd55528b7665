package journal

import (
	"bytes"
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"waybill/dispatch"
	"waybill/internal/contract"
)

func FuzzDecodeFrame(f *testing.F) {
	for _, b := range []dispatch.Batch{toDispatch(newID(), "ci", "r", "f"), toResult(newID(), []byte("x")), {Events: []dispatch.Event{evRefused()}}} {
		_, j, err := prepare(b.Events)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(encodeFrame(b.Action, bootID{1}, len(b.Events), j))
	}
	f.Add([]byte{})
	f.Fuzz(func(t *testing.T, b []byte) {
		fr, err := decodeFrame(b)
		if err != nil {
			return
		}
		if n, id, err := frameCount(b); err != nil || n != len(fr.events) || id != fr.action {
			t.Fatalf("count %d, %v", n, err)
		}
		var r dispatch.Record
		for i := range fr.events {
			next, err := dispatch.Apply(r, &fr.events[i], uint64(i+1))
			if err == nil {
				r = next
			}
			if r.Events > 0 {
				if _, err := checkApply(r, fr.events[i], uint64(i+100)); err != nil && fr.events[i].Ended == nil {
					t.Fatal(err)
				}
			}
		}
		// What decodes can be encoded again, to the same.
		if again, err := json.Marshal(fr.events); err == nil {
			if _, err := decodeFrame(encodeFrame(fr.action, fr.boot, len(fr.events), again)); err != nil {
				t.Fatalf("does not decode again: %v", err)
			}
		}
	})
}

func FuzzDecodeProjection(f *testing.F) {
	var r dispatch.Record
	for i, ev := range toDispatch(newID(), "ci", "r", "f").Events {
		next, err := dispatch.Apply(r, &ev, uint64(i+1))
		if err != nil {
			f.Fatal(err)
		}
		r = next
	}
	b, err := encodeProjection(&projection{rec: r, frames: []uint64{1, 5, 900}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(b)
	f.Add([]byte{1, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1})
	f.Fuzz(func(t *testing.T, b []byte) {
		p, err := decodeProjection(b)
		if err != nil {
			return
		}
		for i := 1; i < len(p.frames); i++ {
			if p.frames[i] <= p.frames[i-1] {
				t.Fatal("frames are not ascending")
			}
		}
		again, err := encodeProjection(p)
		if err != nil {
			return
		}
		q, err := decodeProjection(again)
		if err != nil || !equalProjection(p, q) {
			t.Fatalf("does not decode again: %v", err)
		}
	})
}

func FuzzDecodeSmall(f *testing.F) {
	f.Add(encodeHead(head{seq: 7, group: 3}))
	f.Add(encodeManifest(&manifest{Bytes: 3, Chunks: 1, Digest: "sha256:00"}))
	f.Fuzz(func(t *testing.T, b []byte) {
		if h, err := decodeHead(b); err == nil && !bytes.Equal(encodeHead(h), b) {
			t.Fatal("head")
		}
		if m, err := decodeManifest(b); err == nil && (m.Bytes < 0 || m.Chunks < 0) {
			t.Fatal("manifest")
		}
	})
}

func FuzzWitness(f *testing.F) {
	seal, err := newSealer(make([]byte, KeyBytes), storeID{1})
	if err != nil {
		f.Fatal(err)
	}
	make1 := func(groups ...int) []byte { return makeSegment(f, seal, 24, groups...) }
	f.Add(make1(1, 2, 3), uint16(0), byte(0))
	f.Add(make1(4, 4), uint16(700), byte(1))
	f.Add(make1(), uint16(1), byte(2))
	f.Fuzz(func(t *testing.T, b []byte, at uint16, x byte) {
		m := newMacer(seal.witness)
		if len(b) > 0 {
			b = bytes.Clone(b)
			b[int(at)%len(b)] ^= x
		}
		s, err := scanSegment(b, m, 1)
		if err != nil {
			return
		}
		for i := 1; i < len(s.groups); i++ {
			if s.groups[i].number <= s.groups[i-1].number {
				t.Fatal("groups go back")
			}
		}
		w, err := scanWitness([]rawSegment{{number: 1, b: b}}, seal)
		if err != nil {
			t.Fatalf("segment is good, witness is not: %v", err)
		}
		w.last()
		w.namedAfter(0, 100)
		w.namedSince(0)
		w.lostAttempts()
	})
}

// makeSegment returns a segment with one group for each number, which names that many
// events and has three units of entries.
func makeSegment(t testing.TB, seal *sealer, units uint32, groups ...int) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "w")
	info := segmentInfo{number: 1, store: seal.id, slots: units}
	w := &witness{m: newMacer(seal.witness), slots: units, info: info, spares: []string{"none"}}
	if err := newSegmentFile(path, units, false); err != nil {
		t.Fatal(err)
	}
	var err error
	if w.file, err = os.OpenFile(path, os.O_RDWR, 0); err != nil {
		t.Fatal(err)
	}
	if _, err := w.file.WriteAt(info.encode(w.m), 0); err != nil {
		t.Fatal(err)
	}
	for i, n := range groups {
		g := &loggedGroup{number: uint64(i + 1), head: head{seq: uint64(i + 1), group: uint64(i + 1)}}
		for range n {
			g.records = append(g.records, witnessRecord{kind: kindEvent, typ: dispatch.DispatchStarted, attempt: 1, seq: uint64(i + 1), action: newID()})
		}
		if err := w.write(g, []entry{{key: keyEvent(uint64(i + 1)), value: bytes.Repeat([]byte{byte(i + 1)}, 1200)}, {key: keyHead, remove: true}}, false); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.close(); err != nil {
		t.Fatal(err)
	}
	return readAll(t, path)
}

// Every pattern of sectors that a crash can leave of the last group is accepted – its
// names as long as one of its blocks is there, its entries when they are whole – and a
// loss before it is not, unless the other block of that group makes up for it.
func TestTornWitness(t *testing.T) {
	contract.Covers(t, "T5")
	seal, err := newSealer(make([]byte, KeyBytes), storeID{1})
	if err != nil {
		t.Fatal(err)
	}
	m := newMacer(seal.witness)
	// Units of the last group: a block of two, three of entries, a block of two.
	base := makeSegment(t, seal, 40, 1, 3, 12)
	whole, err := scanSegment(base, m, 1)
	if err != nil || len(whole.groups) != 3 {
		t.Fatalf("%d groups, %v", len(whole.groups), err)
	}
	last := whole.groups[2]
	if last.units != 7 || !last.intact || len(last.records) != 12 {
		t.Fatalf("%+v", last)
	}
	for pattern := range 1 << last.units {
		b := bytes.Clone(base)
		for i := range last.units {
			if pattern&(1<<i) != 0 {
				// What was there before: nothing, or another segment's.
				off := unitOffset(last.start + i)
				copy(b[off:off+unitBytes], bytes.Repeat([]byte{byte(pattern)}, unitBytes))
			}
		}
		s, err := scanSegment(b, m, 1)
		if err != nil {
			t.Fatalf("pattern %07b: %v", pattern, err)
		}
		named := pattern&0b11 == 0 || pattern&0b1100000 == 0
		got := s.groups[len(s.groups)-1]
		if (got.number == 3) != named || named && (len(got.records) != 12 || got.intact != (pattern&0b11100 == 0)) {
			t.Errorf("pattern %07b ends with group %d, intact %v", pattern, got.number, got.intact)
		}
	}
	for u := range last.start + last.units {
		b := bytes.Clone(base)
		b[unitOffset(u)+40] ^= 1
		s, err := scanSegment(b, m, 1)
		if err != nil || len(s.groups) != 3 {
			t.Errorf("unit %d is damaged: %v; the other block of its group is there", u, err)
			continue
		}
		damaged := 0
		for i := range s.groups {
			if !s.groups[i].intact {
				damaged++
			}
		}
		g := whole.groups[0]
		for i := range whole.groups {
			if whole.groups[i].start <= u {
				g = whole.groups[i]
			}
		}
		block := blockUnits(len(g.named()))
		inPayload := u >= g.start+block && u < g.start+g.units-block
		if (damaged == 1) != inPayload {
			t.Errorf("unit %d: %d groups with damaged entries", u, damaged)
		}
	}
	// Both blocks of a group that is not the last.
	for i := range 2 {
		g := whole.groups[i]
		b := bytes.Clone(base)
		b[unitOffset(g.start)+40] ^= 1
		b[unitOffset(g.start+g.units-1)+40] ^= 1
		if _, err := scanSegment(b, m, 1); !errors.Is(err, ErrCorrupt) {
			t.Errorf("group %d is gone, and nobody says so: %v", g.number, err)
		}
	}
}

func FuzzDecodeEntries(f *testing.F) {
	f.Add([]byte{})
	f.Add((&entry{key: []byte("k"), remove: true}).appendTo((&entry{key: keyHead, value: []byte("v")}).appendTo(nil)))
	f.Fuzz(func(t *testing.T, b []byte) {
		entries, err := decodeEntries(b)
		if err != nil {
			return
		}
		var again []byte
		for i := range entries {
			again = entries[i].appendTo(again)
		}
		// A removal may carry a value, which nothing writes.
		if !bytes.Equal(again, b) {
			t.Fatal("does not encode again")
		}
	})
}
