package testkit

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// LogDisk is a disk with a volatile cache, as disks have: it remembers the order of what it
// was told – writes, flushes, and what the program under test had acknowledged in between –
// and makes of it the disks that a loss of power may leave. A FUSE file system holds one file,
// which a loop device makes a disk of, with ext4 on it.
type LogDisk struct {
	// Dir is where its file system is mounted.
	Dir string

	t         testing.TB
	dir, base string
	dev       string
	server    *fuse.Server
	size      uint64

	mu      sync.Mutex
	content *os.File // as a disk without a cache would be
	events  []diskEvent
	acks    int
	written uint64
	stopped bool
}

// diskEvent is a write, a flush (neither data nor ack), or an acknowledgement.
type diskEvent struct {
	off  int64
	data []byte
	ack  string
}

// sector is what a disk writes whole, or not at all.
const sector = 512

// NewLogDisk makes a disk of size MiB and mounts it. It needs root, /dev/fuse and loop
// devices; a test that has none fails.
func NewLogDisk(t testing.TB, size int64) *LogDisk {
	t.Helper()
	RequireTool(t, "mkfs.ext4")
	RequireTool(t, "losetup")
	if _, err := os.Stat("/dev/fuse"); err != nil || os.Getuid() != 0 {
		t.Fatalf("this test mounts file systems of its own: run it as root, with /dev/fuse (%v)", err)
	}
	dir, err := os.MkdirTemp("", "wb")
	if err != nil {
		t.Fatal(err)
	}
	d := &LogDisk{t: t, dir: dir, Dir: filepath.Join(dir, "m"), base: filepath.Join(dir, "base"), size: uint64(size) << 20} //nolint:gosec // megabytes of a test
	t.Cleanup(d.close)
	front := filepath.Join(dir, "fuse")
	err = errors.Join(os.Mkdir(d.Dir, 0o700), os.Mkdir(front, 0o700), os.WriteFile(d.base, nil, 0o600), os.Truncate(d.base, size<<20))
	if err != nil {
		t.Fatal(err)
	}
	// Everything is laid out now: what is logged later is what the program did.
	d.run("mkfs.ext4", "-q", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", d.base)
	d.run("cp", "--sparse=always", d.base, d.base+".now")
	if d.content, err = os.OpenFile(d.base+".now", os.O_RDWR, 0); err != nil {
		t.Fatal(err)
	}
	root := &logRoot{d: d}
	d.server, err = fs.Mount(front, root, &fs.Options{MountOptions: fuse.MountOptions{DirectMountStrict: true, Name: "logdisk", MaxWrite: 1 << 20, Logger: log.New(io.Discard, "", 0)}})
	if err != nil {
		t.Fatalf("fuse: %v", err)
	}
	out, err := exec.Command("losetup", "--find", "--show", filepath.Join(front, "disk")).Output()
	if err != nil {
		t.Fatalf("losetup: %v", err)
	}
	d.dev = strings.TrimSpace(string(out))
	d.run("mount", d.dev, d.Dir)
	return d
}

func (d *LogDisk) run(name string, args ...string) {
	d.t.Helper()
	if out, err := exec.Command(name, args...).CombinedOutput(); err != nil {
		d.t.Fatalf("%s %v: %v: %s", name, args, err, out)
	}
}

// Acks opens the file into which the program under test writes what it acknowledges, a line
// a write: it is its standard output, so that the order of lines and writes is the true one.
func (d *LogDisk) Acks() *os.File {
	d.t.Helper()
	f, err := os.OpenFile(filepath.Join(d.dir, "fuse", "ack"), os.O_WRONLY, 0)
	if err != nil {
		d.t.Fatal(err)
	}
	return f
}

// WaitAcks waits until there are n acknowledgements, or done is closed.
func (d *LogDisk) WaitAcks(n int, done <-chan struct{}) {
	for {
		d.mu.Lock()
		enough := d.acks >= n
		d.mu.Unlock()
		select {
		case <-done:
			return
		case <-time.After(2 * time.Millisecond):
			if enough {
				return
			}
		}
	}
}

// Stop ends the log: what is written from now on belongs to no power cut.
func (d *LogDisk) Stop() {
	d.mu.Lock()
	d.stopped = true
	d.mu.Unlock()
}

// Unmount unmounts the file system; the disk stays, and can be cut.
func (d *LogDisk) Unmount() {
	d.t.Helper()
	d.Stop()
	for range 200 {
		if exec.Command("umount", d.Dir).Run() == nil {
			return
		}
		time.Sleep(20 * time.Millisecond) // the kernel closes files of a killed process by and by
	}
	d.t.Errorf("%s stays busy", d.Dir)
}

func (d *LogDisk) close() {
	if d.dev != "" {
		_ = exec.Command("umount", d.Dir).Run()
		_ = exec.Command("losetup", "-d", d.dev).Run()
	}
	if d.server != nil {
		for range 200 {
			if d.server.Unmount() == nil {
				break
			}
			time.Sleep(20 * time.Millisecond)
		}
	}
	if d.content != nil {
		_ = d.content.Close()
	}
	if err := os.RemoveAll(d.dir); err != nil {
		d.t.Error(err)
	}
}

// Events is how many events the log has.
func (d *LogDisk) Events() int { d.mu.Lock(); defer d.mu.Unlock(); return len(d.events) }

// Cut mounts the disk as a loss of power before event p may leave it: everything up to
// the last flush before p, and of the later writes those that pick takes, each whole or
// torn between two sectors. It calls check with the folder and with what had been
// acknowledged before, and returns its error.
func (d *LogDisk) Cut(p int, rng *rand.Rand, check func(dir string, acked []string) error) error {
	d.t.Helper()
	d.mu.Lock()
	events := slices.Clone(d.events[:p])
	d.mu.Unlock()
	image, at := filepath.Join(d.dir, "cut"), filepath.Join(d.dir, "c")
	d.run("cp", "--sparse=always", d.base, image)
	defer func() { _ = os.Remove(image) }()
	f, err := os.OpenFile(image, os.O_RDWR, 0)
	if err != nil {
		d.t.Fatal(err)
	}
	flushed := 0
	for i, e := range events {
		if e.data == nil && e.ack == "" {
			flushed = i
		}
	}
	// How much gets through differs from cut to cut: from nothing to all but a little.
	share := rng.Float64()
	var acked []string
	for i, e := range events {
		switch {
		case e.ack != "":
			acked = append(acked, e.ack)
			continue
		case e.data == nil:
			continue
		case i > flushed && rng.Float64() > share:
			continue
		}
		data := e.data
		if n := len(data) / sector; i > flushed && n > 1 && rng.IntN(3) == 0 {
			cut := sector * (1 + rng.IntN(n-1))
			if rng.IntN(2) == 0 {
				data = data[:cut]
			} else { // the end got there before the beginning
				data, e.off = data[cut:], e.off+int64(cut)
			}
		}
		if _, err := f.WriteAt(data, e.off); err != nil {
			d.t.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		d.t.Fatal(err)
	}
	if err := os.MkdirAll(at, 0o700); err != nil {
		d.t.Fatal(err)
	}
	if exec.Command("mount", "-o", "loop", image, at).Run() != nil {
		// ext4's own superblock has two sectors: torn between them it needs its checker, as on a real disk.
		_ = exec.Command("e2fsck", "-fy", image).Run()
		d.run("mount", "-o", "loop", image, at)
	}
	defer func() {
		for range 200 {
			if exec.Command("umount", at).Run() == nil {
				return
			}
			time.Sleep(20 * time.Millisecond)
		}
		d.t.Errorf("%s stays busy", at)
	}()
	return check(at, acked)
}

type logRoot struct {
	fs.Inode
	d *LogDisk
}

// OnAdd implements fs.NodeOnAdder.
func (r *logRoot) OnAdd(ctx context.Context) {
	r.AddChild("disk", r.NewPersistentInode(ctx, &logFile{d: r.d}, fs.StableAttr{Mode: syscall.S_IFREG}), true)
	r.AddChild("ack", r.NewPersistentInode(ctx, &logFile{d: r.d, ack: true}, fs.StableAttr{Mode: syscall.S_IFREG}), true)
}

// logFile is the disk, or the file of acknowledgements.
type logFile struct {
	fs.Inode
	d   *LogDisk
	ack bool
}

var (
	_ fs.NodeOpener    = (*logFile)(nil)
	_ fs.NodeReader    = (*logFile)(nil)
	_ fs.NodeWriter    = (*logFile)(nil)
	_ fs.NodeFsyncer   = (*logFile)(nil)
	_ fs.NodeGetattrer = (*logFile)(nil)
)

func (f *logFile) Open(context.Context, uint32) (fs.FileHandle, uint32, syscall.Errno) {
	if f.ack {
		return nil, fuse.FOPEN_DIRECT_IO, 0 // at once, never from the page cache
	}
	return nil, 0, 0
}

func (f *logFile) Getattr(_ context.Context, _ fs.FileHandle, out *fuse.AttrOut) syscall.Errno {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	out.Mode, out.Size = syscall.S_IFREG|0o600, f.d.size
	if f.ack {
		out.Size = f.d.written
	}
	return 0
}

func (f *logFile) Read(_ context.Context, _ fs.FileHandle, dest []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	n, err := f.d.content.ReadAt(dest, off)
	if err != nil && !errors.Is(err, io.EOF) || f.ack {
		return nil, syscall.EIO
	}
	return fuse.ReadResultData(dest[:n]), 0
}

func (f *logFile) Write(_ context.Context, _ fs.FileHandle, data []byte, off int64) (uint32, syscall.Errno) {
	d := f.d
	d.mu.Lock()
	defer d.mu.Unlock()
	switch {
	case f.ack:
		d.acks++
		d.written += uint64(len(data))
		if !d.stopped {
			d.events = append(d.events, diskEvent{ack: string(data)})
		}
	default:
		if _, err := d.content.WriteAt(data, off); err != nil {
			return 0, syscall.EIO
		}
		if !d.stopped {
			d.events = append(d.events, diskEvent{off: off, data: slices.Clone(data)})
		}
	}
	return uint32(len(data)), 0 //nolint:gosec // at most MaxWrite
}

func (f *logFile) Fsync(context.Context, fs.FileHandle, uint32) syscall.Errno {
	f.d.mu.Lock()
	defer f.d.mu.Unlock()
	if !f.ack && !f.d.stopped {
		f.d.events = append(f.d.events, diskEvent{})
	}
	return 0
}

// String says how long the log is.
func (d *LogDisk) String() string {
	d.mu.Lock()
	defer d.mu.Unlock()
	writes, flushes, size := 0, 0, 0
	for _, e := range d.events {
		switch {
		case e.data != nil:
			writes++
			size += len(e.data)
		case e.ack == "":
			flushes++
		}
	}
	return fmt.Sprintf("%d writes of %d KiB, %d flushes, %d acknowledgements", writes, size>>10, flushes, d.acks)
}
