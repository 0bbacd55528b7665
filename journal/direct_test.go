package journal

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
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
	segment := func(direct, alone bool) []byte {
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
			if err := w.write(g, []entry{{key: keyEvent(n), value: bytes.Repeat([]byte{byte(n)}, size)}}, alone); err != nil {
				t.Fatal(err)
			}
			if got := readAll(t, path); !bytes.Contains(got, bytes.Repeat([]byte{byte(n)}, size)) {
				t.Fatalf("group %d is not in the file", n)
			}
		}
		if direct && w.direct == nil {
			t.Log("this file system takes no direct writes: all are the same")
		} else if direct && (w.async == nil || w.noAsync) != alone {
			t.Errorf("alone: %v, but written %+v", alone, w.async)
		}
		if n := w.syncs.Load(); n != 8 {
			t.Errorf("%d syncs counted", n)
		}
		if err := w.close(); err != nil {
			t.Fatal(err)
		}
		return readAll(t, path)
	}
	plain := segment(false, false)
	for _, alone := range []bool{true, false} {
		if !bytes.Equal(plain, segment(true, alone)) {
			t.Error("the segments differ")
		}
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

// Where a write cannot be handed over it goes the plain way, and stays there.
func TestNoAsyncWrites(t *testing.T) {
	contract.Covers(t, "T5")
	path := filepath.Join(t.TempDir(), "w")
	if err := newSegmentFile(path, 64, true); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	a := newAsyncWrites()
	if a == nil {
		t.Fatal("no asynchronous writes here")
	}
	_, _, _ = unix.Syscall(unix.SYS_IO_DESTROY, a.context, 0, 0) // the kernel knows it no more: EINVAL
	w := &witness{sync: true, syncs: new(atomic.Uint64), file: f, direct: f, async: a}
	for i := range 2 {
		if err := w.put(f, []byte("group"), false); err != nil || !w.noAsync || w.syncs.Load() != uint64(i+1) {
			t.Fatal(i, err, w.noAsync, w.syncs.Load())
		}
	}
	if got := readAll(t, path); !bytes.Equal(got[segmentHeader:segmentHeader+5], []byte("group")) {
		t.Errorf("%q", got[segmentHeader:segmentHeader+5])
	}
}

// What the kernel says of a write that was begun is an error of the group, never a reason
// to write it again.
func TestAsyncWriteFails(t *testing.T) {
	contract.Covers(t, "M5", "F9")
	a := newAsyncWrites()
	if a == nil {
		t.Fatal("no asynchronous writes here")
	}
	defer a.close()
	path := filepath.Join(t.TempDir(), "w")
	if err := newSegmentFile(path, 64, true); err != nil {
		t.Fatal(err)
	}
	good, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	b, err := unix.Mmap(-1, 0, 512, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANON) // not on a stack, which moves
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Munmap(b) }()
	const beyond = 1 << 62 // no file is that long
	for range 3 {          // one that failed does not disturb the next one
		if err := a.write(good, b, beyond); !errors.Is(err, unix.EFBIG) || errors.Is(err, errNoAsync) {
			t.Errorf("beyond any file: %v", err)
		}
		if err := a.write(good, b, 0); err != nil {
			t.Error(err)
		}
	}
	_ = good.Close()
	w := &witness{sync: true, syncs: new(atomic.Uint64), file: good, direct: good, async: a}
	if err := w.put(good, b, false); !errors.Is(err, unix.EBADF) || w.noAsync {
		t.Errorf("to a closed file: %v", err)
	}
}

// An asynchronous write that fails leaves the outcome open for all that shared the group, and
// stops the journal.
func TestAsyncWriteFailsAppend(t *testing.T) {
	contract.Covers(t, "M5", "F9")
	hold := heldHooks()
	hold.NoSync = false
	dir := tempDir(t)
	j := openTest(t, dir, &hold.Hooks)
	if j.c.witness.direct == nil {
		t.Log("this file system takes no direct writes: the group is written as any other")
	}
	path := filepath.Join(dir, nameWitness, segmentName(j.c.witness.info.number))
	readOnly, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	hold.hold()
	first := appendAsync(j, toDispatch(newID(), "ci", "", "f"))
	hold.waitHeld(t)
	go func() {
		_ = j.between(func() error {
			if w := j.c.witness; w.direct != nil {
				_ = w.direct.Close()
				w.direct = readOnly
			} else {
				_ = w.file.Close()
				w.file = readOnly
			}
			return nil
		})
	}()
	waitQueued(t, j, 1)
	a := appendAsync(j, toDispatch(newID(), "ci", "", "f"))
	b := appendAsync(j, toDispatch(newID(), "ci", "", "f"))
	waitQueued(t, j, 3)
	hold.letGo()
	if r := <-first; r.err != nil {
		t.Error(r.err)
	}
	for _, c := range []<-chan answer{a, b} {
		r := <-c
		wantErr(t, r.err, dispatch.ErrIndeterminate)
	}
	if j.Cause() == nil || !errors.Is(j.Cause(), unix.EBADF) {
		t.Errorf("%v", j.Cause())
	}
	wantErr(t, j.Close(), dispatch.ErrIndeterminate)
}

// No error of a disk's cache reaches a test of this machine: that each asynchronous write asks
// for durability is seen in the system calls themselves.
func TestAsyncWritesAreDurable(t *testing.T) {
	contract.Covers(t, "F1", "M5")
	trace := filepath.Join(t.TempDir(), "trace")
	dir, l := tempDir(t), newLedger()
	childRun{wrapper: []string{testkit.RequireTool(t, "strace"), "-f", "-qq", "-e", "trace=io_submit", "-e", "signal=none", "-o", trace}, steps: 200}.run(t, l, dir)
	writes := 0
	for line := range strings.Lines(string(readAll(t, trace))) {
		if !strings.Contains(line, "io_submit(") {
			continue
		}
		writes++
		if !strings.Contains(line, "aio_rw_flags=RWF_DSYNC") {
			t.Errorf("not durable when it ends: %s", line)
		}
	}
	if writes == 0 && asyncHere(t) {
		t.Error("no asynchronous write")
	}
}

// asyncHere reports whether the journal writes so in the tests' folder.
func asyncHere(t *testing.T) bool {
	t.Helper()
	path := filepath.Join(t.TempDir(), "w")
	if err := newSegmentFile(path, 64, false); err != nil {
		t.Fatal(err)
	}
	f := openDirect(path)
	if f == nil {
		t.Log("this file system takes no direct writes")
		return false
	}
	_ = f.Close()
	return true
}
