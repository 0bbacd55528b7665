package testkit

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"
)

// Disk is a small file system of its own, on a loop device.
type Disk struct {
	// Dir is where it is mounted.
	Dir   string
	t     testing.TB
	image string
}

// NewDisk makes and mounts an ext4 file system of size MiB. Tests that need one
// fail where they cannot have it.
func NewDisk(t testing.TB, size int64) *Disk {
	t.Helper()
	RequireTool(t, "mkfs.ext4")
	RequireTool(t, "mount")
	if os.Getuid() != 0 {
		t.Fatal("this test mounts a file system of its own: run it as root, with loop devices (/dev/loop-control)")
	}
	dir, err := os.MkdirTemp("", "wb")
	if err != nil {
		t.Fatal(err)
	}
	d := &Disk{t: t, image: filepath.Join(dir, "img"), Dir: filepath.Join(dir, "m")}
	t.Cleanup(func() {
		d.Unmount()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	f, err := os.Create(d.image)
	if err == nil {
		err = errors.Join(f.Truncate(size<<20), f.Close(), os.Mkdir(d.Dir, 0o700))
	}
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-m", "0", d.image).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	d.Mount()
	return d
}

// Mount mounts it again.
func (d *Disk) Mount() {
	d.t.Helper()
	if out, err := exec.Command("mount", "-o", "loop", d.image, d.Dir).CombinedOutput(); err != nil {
		d.t.Fatalf("mount -o loop: %v: %s (needs root, loop devices and ext4 in the kernel)", err, out)
	}
}

func (d *Disk) mounted() bool {
	b, err := os.ReadFile("/proc/self/mounts")
	return err == nil && strings.Contains(string(b), " "+d.Dir+" ")
}

// Unmount waits until nothing uses the file system: mounting it again over a busy
// one would show losses that are none.
func (d *Disk) Unmount() {
	d.t.Helper()
	for range 200 {
		if !d.mounted() || exec.Command("umount", d.Dir).Run() == nil {
			return
		}
		time.Sleep(20 * time.Millisecond) // the kernel closes files of a killed process by and by
	}
	d.t.Errorf("%s stays busy", d.Dir)
}

// Free is what a process without privileges may still allocate.
func (d *Disk) Free() int64 {
	d.t.Helper()
	var st syscall.Statfs_t
	if err := syscall.Statfs(d.Dir, &st); err != nil {
		d.t.Fatal(err)
	}
	return int64(st.Bavail) * st.Bsize
}

// Fill leaves no more than left bytes free; what it wrote is removed by Empty.
func (d *Disk) Fill(left int64) {
	d.t.Helper()
	for n := 0; n < 64; n++ {
		size := d.Free() - left
		if size < 4096 {
			return
		}
		f, err := os.Create(filepath.Join(d.Dir, "filler-"+strconv.Itoa(n)+"-"+strconv.FormatInt(left, 10)))
		if err != nil {
			return // not even a name fits
		}
		for ; size >= 4096; size /= 2 {
			if syscall.Fallocate(int(f.Fd()), 0, 0, size) == nil {
				break
			}
		}
		if err := f.Close(); err != nil {
			d.t.Fatal(err)
		}
	}
}

// Empty removes what Fill wrote.
func (d *Disk) Empty() {
	d.t.Helper()
	m, err := filepath.Glob(filepath.Join(d.Dir, "filler-*"))
	if err != nil {
		d.t.Fatal(err)
	}
	for _, name := range m {
		if err := os.Remove(name); err != nil {
			d.t.Fatal(err)
		}
	}
}

// CutUnder is Cut while the process stands still, as it does without power: no thread
// gets to say that a sync succeeded which the cut overtook. (ext4 lets such a sync
// return without an error when the conversion of its extents fails after the shutdown;
// a machine without power has nobody left to tell.) The process is left stopped.
func (d *Disk) CutUnder(pid int) {
	d.t.Helper()
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		d.t.Fatal(err)
	}
	Eventually(d.t, func() error {
		tasks, err := filepath.Glob("/proc/" + strconv.Itoa(pid) + "/task/*/stat")
		if err != nil || len(tasks) == 0 {
			return fmt.Errorf("no threads of %d: %w", pid, err)
		}
		for _, task := range tasks {
			b, err := os.ReadFile(task)
			if err != nil {
				continue // it ended
			}
			// pid (name) state …; the name may hold anything.
			state := strings.TrimSpace(string(b[strings.LastIndexByte(string(b), ')')+1:]))
			// A thread in D is inside a system call and stops before it returns from it.
			if !strings.ContainsRune("TtDZX", rune(state[0])) {
				return fmt.Errorf("a thread of %d still runs (%c)", pid, state[0])
			}
		}
		return nil
	})
	d.Cut()
}

// Cut is a power cut: nothing that was not synced reaches the disk any more, and every
// later write fails. Unmount and Mount make the file system of what is left.
func (d *Disk) Cut() {
	d.t.Helper()
	f, err := os.Open(d.Dir)
	if err != nil {
		d.t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	const goingDown = 2<<30 | 4<<16 | 'X'<<8 | 125                                                                         // EXT4_IOC_SHUTDOWN
	flags := uint32(2)                                                                                                     // EXT4_GOING_FLAGS_NOLOGFLUSH
	if _, _, errno := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), goingDown, uintptr(unsafe.Pointer(&flags))); errno != 0 { //nolint:gosec // the kernel reads four bytes
		d.t.Fatalf("the file system cannot be shut down: %v (ext4 of Linux 4.12 or later)", errno)
	}
}
