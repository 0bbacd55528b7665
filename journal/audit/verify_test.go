package audit

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"waybill/internal/contract"
)

// whole is a log of several segments with checkpoints, and the checkpoints that were
// sent elsewhere.
func whole(t testing.TB) (dir string, key *PrivateKey, kept []Checkpoint) {
	t.Helper()
	key, dir = newKey(t), tempDir(t)
	j := openJournal(t, filepath.Join(t.TempDir(), "journal"))
	sent := filepath.Join(t.TempDir(), "sent")
	f := follower(t, j, Options{Dir: dir, Recipient: key.Public(), SegmentBytes: 6 << 10, CheckpointEvery: 10}, FollowOptions{})
	keep := func() {
		if c := f.log.last; c != nil && (len(kept) == 0 || kept[len(kept)-1].Records != c.Records) {
			kept = append(kept, *c)
			if err := (&Destination{File: sent}).send(bg, c); err != nil {
				t.Fatal(err)
			}
		}
	}
	l := f.log
	// At the end a segment with a few records behind which there is a checkpoint.
	for i := 0; i < 12 || l.size > 4<<10 || l.count == l.checkpointed || l.count < l.head.first+4; i++ {
		act(t, j)
		catchUp(t, f)
		keep()
	}
	f.checkpoint()
	keep()
	sameAsJournal(t, j, dir, key)
	closeLog(t, f)
	parsed, err := ParseCheckpoints(string(read(t, sent)))
	if err != nil || len(parsed) != len(kept) || len(kept) < 4 || len(f.log.segments) < 4 {
		t.Fatalf("%d of %d checkpoints, %d segments: %v", len(parsed), len(kept), len(f.log.segments), err)
	}
	return dir, key, parsed
}

// N1: whatever is done to the log without its keys, the first record that it was done
// to is named.
func TestTamper(t *testing.T) {
	contract.Covers(t, "N1")
	dir, _, kept := whole(t)
	rep, err := Verify(dir, VerifyOptions{Checkpoints: kept})
	if err != nil || rep.Compared != len(kept)+1 || rep.Removed != 0 || len(rep.Signers) != 1 {
		t.Fatalf("%v: %+v", err, rep)
	}
	segments, err := listSegments(dir)
	if err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(t.TempDir(), "c")
	path := func(n uint64) string { return filepath.Join(copied, segmentName(n)) }
	// with damages a copy and verifies it.
	copyDir(t, dir, copied)
	with := func(opt VerifyOptions, damage func()) error {
		damage()
		_, err := Verify(copied, opt)
		restore(t, dir, copied)
		return err
	}
	for _, n := range []uint64{segments[0], segments[1], segments[len(segments)-1]} {
		h, pieces := split(t, filepath.Join(dir, segmentName(n)))
		for i, p := range pieces {
			if i > 1 && i < len(pieces)-2 && !long() {
				continue
			}
			// Altered, at any place.
			for _, at := range []int{0, 4, 8, 16, 24, 32, 64, recordHead, recordHead + 40, len(p.raw) - 1} {
				if at >= len(p.raw) {
					continue
				}
				wantBroken(t, with(VerifyOptions{}, func() {
					c := slices.Clone(pieces)
					c[i].raw = bytes.Clone(p.raw)
					c[i].raw[at] ^= 0x10
					join(t, path(n), h, c)
				}), p.index)
			}
			last := n == segments[len(segments)-1] && i == len(pieces)-1
			// Altered, with a hash of its own made right.
			if p.kind == KindEvent && !last {
				wantBroken(t, with(VerifyOptions{}, func() {
					c := slices.Clone(pieces)
					c[i].body = bytes.Clone(p.body)
					c[i].body[encBytes+3] ^= 1
					c[i].raw = c[i].encode(nil)
					join(t, path(n), h, c)
				}), p.index)
			}
			// Removed. Of the log's last record only a checkpoint says that it was there.
			if !last {
				wantBroken(t, with(VerifyOptions{}, func() { join(t, path(n), h, slices.Delete(slices.Clone(pieces), i, i+1)) }), p.index)
			}
			// Reordered.
			if i+1 < len(pieces) {
				msg := wantBroken(t, with(VerifyOptions{}, func() {
					c := slices.Clone(pieces)
					c[i], c[i+1] = c[i+1], c[i]
					join(t, path(n), h, c)
				}), p.index)
				if !strings.Contains(msg, "out of order") {
					t.Errorf("a swap is called %q", msg)
				}
			}
			// Twice.
			wantBroken(t, with(VerifyOptions{}, func() { join(t, path(n), h, slices.Insert(slices.Clone(pieces), i, p)) }), p.index)
			// Cut off within it.
			err := with(VerifyOptions{}, func() {
				c := slices.Clone(pieces[:i+1])
				c[i].raw = p.raw[:len(p.raw)/2]
				join(t, path(n), h, c)
			})
			wantBroken(t, err, p.index)
		}
		// The head of a segment.
		for _, at := range []int{8, 16, 32, 40, 72, 112, 144, 192, 230} {
			first := h.first
			wantBroken(t, with(VerifyOptions{}, func() {
				b := read(t, path(n))
				b[at] ^= 1
				write(t, path(n), b)
			}), first)
		}
		// A whole segment. Of the last one, the folder's own checkpoint tells.
		wantBroken(t, with(VerifyOptions{}, func() {
			if err := os.Remove(path(n)); err != nil {
				t.Fatal(err)
			}
		}), h.first)
	}
	// Everything from a record on made anew, but for the signatures.
	for _, seg := range []int{0, 1, 2} {
		wantBroken(t, with(VerifyOptions{}, func() { forge(t, copied, segments, seg, 2) }), forged(t, dir, segments, seg))
	}
	// Cut off at the end between two records, the folder's checkpoint with it: from
	// inside it cannot be seen; with a checkpoint it can.
	cut := func() {
		n := segments[len(segments)-1]
		h, pieces := split(t, path(n))
		join(t, path(n), h, pieces[:1])
		if err := os.Remove(filepath.Join(copied, nameCheckpoint)); err != nil {
			t.Fatal(err)
		}
	}
	if err := with(VerifyOptions{}, cut); err != nil {
		t.Errorf("%v: then the documentation is wrong", err)
	}
	h, _ := split(t, filepath.Join(dir, segmentName(segments[len(segments)-1])))
	wantBroken(t, with(VerifyOptions{Checkpoints: kept}, cut), h.first+1)
	// Another log in its place.
	other, _, _ := whole(t)
	_, err = Verify(other, VerifyOptions{Checkpoints: kept[:1]})
	wantBroken(t, err, 1)
	// A checkpoint that somebody changed, and one of another signer.
	bad := kept[0]
	bad.Records++
	if _, err := Verify(dir, VerifyOptions{Checkpoints: []Checkpoint{bad}}); !errors.Is(err, ErrCheckpoint) {
		t.Errorf("%v", err)
	}
	if _, err := Verify(dir, VerifyOptions{Signer: "x"}); err == nil {
		t.Error("another signer is taken")
	}
	if _, err := Verify(dir, VerifyOptions{Signer: kept[0].Signer, Checkpoints: kept}); err != nil {
		t.Error(err)
	}
}

// forge alters record i of a segment and chains everything behind it anew; it has no
// signing key.
func forge(t *testing.T, dir string, segments []uint64, seg, i int) {
	t.Helper()
	var prev, rec digest
	for k, n := range segments[seg:] {
		path := filepath.Join(dir, segmentName(n))
		h, pieces := split(t, path)
		start := 0
		if k == 0 {
			start = i
			pieces[i].body = bytes.Clone(pieces[i].body)
			pieces[i].body[len(pieces[i].body)-1] ^= 1
			prev = pieces[i].prev
		} else {
			h.prev, h.record = prev, rec
			h.encode()
			prev = h.hash
		}
		for x := start; x < len(pieces); x++ {
			rehash(&pieces[x], prev)
			prev, rec = pieces[x].hash, pieces[x].hash
		}
		join(t, path, h, pieces)
	}
}

// forged is the record that has to be named: the first one behind the last checkpoint
// that is still right.
func forged(t *testing.T, dir string, segments []uint64, seg int) uint64 {
	t.Helper()
	good := uint64(0)
	for k, n := range segments[:seg+1] {
		_, pieces := split(t, filepath.Join(dir, segmentName(n)))
		for x, p := range pieces {
			if k == seg && x >= 2 {
				break
			}
			if p.kind == KindCheckpoint {
				good = p.index
			}
		}
	}
	return good + 1
}

// Any one bit, anywhere in any file of the log.
func TestAnyBit(t *testing.T) {
	contract.Covers(t, "N1")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 3))
	dir, key, _ := whole(t)
	copied := filepath.Join(t.TempDir(), "c")
	segments, err := listSegments(dir)
	if err != nil {
		t.Fatal(err)
	}
	copyDir(t, dir, copied)
	for range rounds(40, 2000) {
		restore(t, dir, copied)
		path := filepath.Join(copied, segmentName(segments[rng.IntN(len(segments))]))
		b := read(t, path)
		at, bit := rng.IntN(len(b)), byte(1)<<rng.IntN(8)
		b[at] ^= bit
		write(t, path, b)
		if _, err := Verify(copied, VerifyOptions{}); !errors.Is(err, ErrBroken) {
			t.Fatalf("%s, byte %d, bit %d: %v", filepath.Base(path), at, bit, err)
		}
		if _, err := Read(copied, key, VerifyOptions{}, func(Opened) error { return nil }); err == nil {
			t.Fatalf("%s, byte %d, bit %d: it is read", filepath.Base(path), at, bit)
		}
	}
}

// N2: nothing that was recorded stands in the folder in clear, and another key opens
// nothing.
func TestSealed(t *testing.T) {
	contract.Covers(t, "N2")
	dir, key, _ := whole(t)
	names, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		b := read(t, filepath.Join(dir, n.Name()))
		for _, s := range []string{"pay.example.test", "charges", "ACTION_ACCEPTED", "act_", "header"} {
			if bytes.Contains(b, []byte(s)) {
				t.Errorf("%s holds %q", n.Name(), s)
			}
		}
		if info, err := n.Info(); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v %v", n.Name(), info.Mode(), err)
		}
	}
	got, _ := events(t, dir, key)
	if got[1].Event.Accepted == nil || got[1].Event.Accepted.Target != target || got[1].Source != "caller" || !strings.HasPrefix(got[1].Action, "act_") {
		t.Errorf("%+v", got[1])
	}
	for i := range got {
		if r := got[i].Event.Result; r != nil && len(r.Header) > 0 {
			t.Fatal("field values of answers are in the log")
		}
	}
	if _, err := Read(dir, newKey(t), VerifyOptions{}, func(Opened) error { return nil }); !errors.Is(err, ErrOpen) {
		t.Errorf("another key: %v", err)
	}
}

func TestKeys(t *testing.T) {
	k := newKey(t)
	text, err := k.Secret()
	if err != nil {
		t.Fatal(err)
	}
	again, err := ParsePrivateKey("# a comment\n" + text + "\n")
	if err != nil || again.Public().String() != k.Public().String() {
		t.Fatalf("%v", err)
	}
	pub, err := ParsePublicKey(k.Public().String())
	if err != nil || pub.String() != k.Public().String() {
		t.Fatal(err)
	}
	if s := k.String() + k.GoString(); strings.Contains(s, text[20:30]) {
		t.Error("the private key prints itself")
	}
	for _, bad := range []string{"", text, "wbaudit1_", k.Public().String() + "A", strings.Replace(k.Public().String(), "1_", "2_", 1), k.Public().String()[:40] + "AAAA" + k.Public().String()[44:]} {
		if _, err := ParsePublicKey(bad); !errors.Is(err, ErrKey) || strings.Contains(err.Error(), text[20:30]) {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if _, err := ParsePrivateKey(text + "\n" + text); !errors.Is(err, ErrKey) || strings.Contains(err.Error(), text[20:30]) {
		t.Errorf("%v", err)
	}
}

// Nothing that a file can hold makes Verify or a start panic.
func FuzzSegment(f *testing.F) {
	dir, _, _ := whole(f)
	segments, err := listSegments(dir)
	if err != nil {
		f.Fatal(err)
	}
	for _, n := range segments[:2] {
		f.Add(read(f, filepath.Join(dir, segmentName(n))))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		d := t.TempDir()
		write(t, filepath.Join(d, segmentName(1)), b)
		rep, err := Verify(d, VerifyOptions{})
		if err == nil && rep.Records > uint64(len(b)) {
			t.Errorf("%d records in %d bytes", rep.Records, len(b))
		}
		if h, ok := decodeHeader(b); ok {
			tail(b, &h)
		}
	})
}

// N3: the documentation says what the chain does not prove, and names every gap's
// reason.
func TestDocumentation(t *testing.T) {
	contract.Covers(t, "N3")
	text := string(read(t, "../../docs/audit.md"))
	_, not, ok := strings.Cut(text, "## What it does not prove")
	if !ok {
		t.Fatal("docs/audit.md does not say what is not proved")
	}
	for _, s := range []string{"That every event was recorded", "That the remote side did, or honoured, anything", "were not cut off"} {
		if !strings.Contains(not, s) {
			t.Errorf("it does not say %q", s)
		}
	}
	for _, s := range []string{GapRetention, GapMissing, GapRolledBack, GapDamaged} {
		if !strings.Contains(text, s) {
			t.Errorf("it does not name %s", s)
		}
	}
}
