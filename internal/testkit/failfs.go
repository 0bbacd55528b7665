package testkit

import (
	"context"
	"errors"
	"io"
	"log"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/hanwen/go-fuse/v2/fs"
	"github.com/hanwen/go-fuse/v2/fuse"
)

// FailFS is a folder in which the files that a test names fail, alone, as a bad block or a
// broken quota makes them: a FUSE file system over a folder of the disk. What a program maps
// into its memory passes it, too.
//
// The test's own process serves it, and must not touch it: a page fault there stops the Go
// scheduler that would have to answer it. Programs of their own use Dir; what they left is
// looked at in Under.
type FailFS struct {
	// Dir is where it is mounted, Under where its files are.
	Dir, Under string

	t      testing.TB
	dir    string
	server *fuse.Server

	mu    sync.Mutex
	rules []*FailRule
}

// FailRule says which calls fail. Its fields are not changed once it is in force.
type FailRule struct {
	// Name is a pattern of path.Match for the last part of the file's path.
	Name string
	// Ops are the calls: "write", "sync", "read", "open", "create", "allocate", "rename".
	Ops []string
	// Err is what they fail with.
	Err syscall.Errno
	// After is how many succeed first, For how many fail then; 0: all that come.
	After, For int

	seen, failed int
}

// NewFailFS mounts one. It needs root and /dev/fuse; a test that has none fails.
func NewFailFS(t testing.TB) *FailFS {
	t.Helper()
	if _, err := os.Stat("/dev/fuse"); err != nil || os.Getuid() != 0 {
		t.Fatalf("this test mounts a file system of its own: run it as root, with /dev/fuse (%v)", err)
	}
	dir, err := os.MkdirTemp("", "wb")
	if err != nil {
		t.Fatal(err)
	}
	f := &FailFS{t: t, dir: dir, Dir: filepath.Join(dir, "m"), Under: filepath.Join(dir, "u")}
	t.Cleanup(f.close)
	if err := errors.Join(os.Mkdir(f.Dir, 0o700), os.Mkdir(f.Under, 0o700)); err != nil {
		t.Fatal(err)
	}
	root, err := fs.NewLoopbackRoot(f.Under)
	if err != nil {
		t.Fatal(err)
	}
	rd := root.(*fs.LoopbackNode).RootData //nolint:forcetypeassert // what NewLoopbackRoot makes
	node := &failNode{LoopbackNode: fs.LoopbackNode{RootData: rd}, f: f}
	rd.RootNode = node
	f.server, err = fs.Mount(f.Dir, node, &fs.Options{MountOptions: fuse.MountOptions{DirectMountStrict: true, Name: "failfs", MaxWrite: 1 << 20, Logger: log.New(io.Discard, "", 0)}})
	if err != nil {
		t.Fatalf("fuse: %v", err)
	}
	return f
}

// Unmount ends it: what the kernel still holds of its files goes down to Under.
func (f *FailFS) Unmount() {
	for range 500 {
		if f.server == nil || f.server.Unmount() == nil {
			f.server = nil
			return
		}
		time.Sleep(20 * time.Millisecond) // the kernel closes files of a killed process by and by
	}
	f.t.Errorf("%s stays busy", f.Dir)
}

func (f *FailFS) close() {
	f.Unmount()
	if err := os.RemoveAll(f.dir); err != nil {
		f.t.Error(err)
	}
}

// Fail puts a rule in force.
func (f *FailFS) Fail(r *FailRule) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.rules = append(f.rules, r)
}

// Heal takes all rules away, and returns how many calls had failed.
func (f *FailFS) Heal() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	failed := 0
	for _, r := range f.rules {
		failed += r.failed
	}
	f.rules = nil
	return failed
}

// error is what a call on a file of that name ends with.
func (f *FailFS) error(op, name string) syscall.Errno {
	f.mu.Lock()
	defer f.mu.Unlock()
	for _, r := range f.rules {
		if ok, err := filepath.Match(r.Name, filepath.Base(name)); err != nil || !ok || !slices.Contains(r.Ops, op) {
			continue
		}
		if r.seen++; r.seen > r.After && (r.For == 0 || r.failed < r.For) {
			r.failed++
			return r.Err
		}
	}
	return 0
}

type failNode struct {
	fs.LoopbackNode
	f *FailFS
}

// WrapChild implements fs.NodeWrapChilder: every node below fails, too.
func (n *failNode) WrapChild(_ context.Context, ops fs.InodeEmbedder) fs.InodeEmbedder {
	return &failNode{LoopbackNode: fs.LoopbackNode{RootData: ops.(*fs.LoopbackNode).RootData}, f: n.f} //nolint:forcetypeassert // LoopbackNode makes nothing else
}

func (n *failNode) wrap(fh fs.FileHandle) fs.FileHandle {
	if lf, ok := fh.(*fs.LoopbackFile); ok {
		return &failFile{LoopbackFile: lf, n: n}
	}
	return fh
}

// name is the file's name of now: files are renamed into place.
func (n *failNode) name() string { return n.Path(n.Root()) }

func (n *failNode) Open(ctx context.Context, flags uint32) (fs.FileHandle, uint32, syscall.Errno) {
	if e := n.f.error("open", n.name()); e != 0 {
		return nil, 0, e
	}
	fh, fl, e := n.LoopbackNode.Open(ctx, flags)
	return n.wrap(fh), fl, e
}

func (n *failNode) Create(ctx context.Context, name string, flags, mode uint32, out *fuse.EntryOut) (*fs.Inode, fs.FileHandle, uint32, syscall.Errno) {
	if e := n.f.error("create", name); e != 0 {
		return nil, nil, 0, e
	}
	inode, fh, fl, e := n.LoopbackNode.Create(ctx, name, flags, mode, out)
	if e != 0 {
		return nil, nil, 0, e
	}
	child, ok := inode.Operations().(*failNode)
	if !ok {
		return inode, fh, fl, 0
	}
	return inode, child.wrap(fh), fl, 0
}

func (n *failNode) Rename(ctx context.Context, name string, parent fs.InodeEmbedder, newName string, flags uint32) syscall.Errno {
	if e := n.f.error("rename", newName); e != 0 {
		return e
	}
	return n.LoopbackNode.Rename(ctx, name, parent, newName, flags)
}

// failFile is an open file.
type failFile struct {
	*fs.LoopbackFile
	n *failNode
}

// PassthroughFd keeps the kernel from going around this file system.
func (f *failFile) PassthroughFd() (int, bool) { return 0, false }

func (f *failFile) Write(ctx context.Context, data []byte, off int64) (uint32, syscall.Errno) {
	if e := f.n.f.error("write", f.n.name()); e != 0 {
		return 0, e
	}
	return f.LoopbackFile.Write(ctx, data, off)
}

func (f *failFile) Writev(ctx context.Context, data [][]byte, off int64) (uint32, syscall.Errno) {
	if e := f.n.f.error("write", f.n.name()); e != 0 {
		return 0, e
	}
	return f.LoopbackFile.Writev(ctx, data, off)
}

func (f *failFile) Read(ctx context.Context, buf []byte, off int64) (fuse.ReadResult, syscall.Errno) {
	if e := f.n.f.error("read", f.n.name()); e != 0 {
		return nil, e
	}
	return f.LoopbackFile.Read(ctx, buf, off)
}

func (f *failFile) Fsync(ctx context.Context, flags uint32) syscall.Errno {
	if e := f.n.f.error("sync", f.n.name()); e != 0 {
		return e
	}
	return f.LoopbackFile.Fsync(ctx, flags)
}

func (f *failFile) Allocate(ctx context.Context, off, size uint64, mode uint32) syscall.Errno {
	if e := f.n.f.error("allocate", f.n.name()); e != 0 {
		return e
	}
	return f.LoopbackFile.Allocate(ctx, off, size, mode)
}
