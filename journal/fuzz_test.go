package journal

import (
	"bytes"
	"encoding/json"
	"testing"

	"waybill/dispatch"
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
	make1 := func(groups ...int) []byte {
		m := newMacer(seal.witness)
		info := segmentInfo{number: 1, store: seal.id, slots: 12}
		b := append(info.encode(m), make([]byte, 12*recordBytes)...)
		slot := 0
		for g, n := range groups {
			for i := range n {
				r := witnessRecord{kind: kindEvent, typ: dispatch.DispatchStarted, index: uint16(i), count: uint16(n), group: uint64(g + 1), seq: uint64(slot + 1), headSeq: uint64(slot + 1)}
				off := segmentHeader + slot*recordBytes
				r.encode(b[off:], m, 1, int64(off))
				slot++
			}
		}
		return b
	}
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
		for i := 1; i < len(s.records); i++ {
			if s.records[i].group < s.records[i-1].group {
				t.Fatal("groups go back")
			}
		}
		w, err := scanWitness([]rawSegment{{1, b}}, seal)
		if err != nil {
			t.Fatalf("segment is good, witness is not: %v", err)
		}
		w.last()
		w.namedAfter(0, 100)
		w.namedSince(0)
		w.lostAttempts()
	})
}

// Every pattern of sectors that a crash can leave of the last group is accepted, and
// a lost slot before it is not.
func TestTornWitness(t *testing.T) {
	seal, err := newSealer(make([]byte, KeyBytes), storeID{1})
	if err != nil {
		t.Fatal(err)
	}
	m := newMacer(seal.witness)
	info := segmentInfo{number: 1, store: seal.id, slots: 16}
	base := append(info.encode(m), make([]byte, 16*recordBytes)...)
	slot := 0
	for g, n := range []int{1, 3, 6} {
		for i := range n {
			r := witnessRecord{kind: kindEvent, typ: dispatch.DispatchStarted, index: uint16(i), count: uint16(n), group: uint64(g + 1), headSeq: uint64(g + 1)}
			off := segmentHeader + slot*recordBytes
			r.encode(base[off:], m, 1, int64(off))
			slot++
		}
	}
	for pattern := range 1 << 6 {
		b := bytes.Clone(base)
		for i := range 6 {
			if pattern&(1<<i) != 0 {
				off := segmentHeader + (4+i)*recordBytes
				clear(b[off : off+recordBytes])
			}
		}
		s, err := scanSegment(b, m, 1)
		if err != nil {
			t.Fatalf("pattern %06b: %v", pattern, err)
		}
		want := uint64(3)
		if pattern == 1<<6-1 {
			want = 2
		}
		if got := s.records[len(s.records)-1].group; got != want {
			t.Errorf("pattern %06b ends with group %d, want %d", pattern, got, want)
		}
	}
	for slot := range 4 {
		b := bytes.Clone(base)
		b[segmentHeader+slot*recordBytes+40] ^= 1
		if _, err := scanSegment(b, m, 1); err == nil {
			t.Errorf("slot %d is damaged, and nobody says so", slot)
		}
	}
}
