package e2e

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"waybill/internal/testkit"
)

// disk is a small file system of its own, on a loop device.
type disk struct {
	t     testing.TB
	image string
	dir   string // where it is mounted
}

// newDisk makes and mounts an ext4 file system of size MiB. Tests that need one
// fail where they cannot have it.
func newDisk(t testing.TB, size int64) *disk {
	t.Helper()
	testkit.RequireTool(t, "mkfs.ext4")
	testkit.RequireTool(t, "mount")
	if os.Getuid() != 0 {
		t.Fatal("this test mounts a file system of its own: run it as root, with loop devices (/dev/loop-control)")
	}
	dir, err := os.MkdirTemp("", "wb")
	if err != nil {
		t.Fatal(err)
	}
	d := &disk{t: t, image: filepath.Join(dir, "img"), dir: filepath.Join(dir, "m")}
	t.Cleanup(func() {
		d.unmount()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	f, err := os.Create(d.image)
	if err == nil {
		err = errors.Join(f.Truncate(size<<20), f.Close(), os.Mkdir(d.dir, 0o700))
	}
	if err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("mkfs.ext4", "-q", "-m", "0", d.image).CombinedOutput(); err != nil {
		t.Fatalf("mkfs.ext4: %v: %s", err, out)
	}
	d.mount()
	return d
}

func (d *disk) mount() {
	d.t.Helper()
	if out, err := exec.Command("mount", "-o", "loop", d.image, d.dir).CombinedOutput(); err != nil {
		d.t.Fatalf("mount -o loop: %v: %s (needs root, loop devices and ext4 in the kernel)", err, out)
	}
}

func (d *disk) mounted() bool {
	b, err := os.ReadFile("/proc/self/mounts")
	return err == nil && strings.Contains(string(b), " "+d.dir+" ")
}

// unmount waits until nothing uses the file system: mounting it again over a busy
// one would show losses that are none.
func (d *disk) unmount() {
	d.t.Helper()
	for range 200 {
		if !d.mounted() || exec.Command("umount", d.dir).Run() == nil {
			return
		}
		time.Sleep(20 * time.Millisecond) // the kernel closes files of a killed process by and by
	}
	d.t.Errorf("%s stays busy", d.dir)
}

// free is what a process without privileges may still allocate.
func (d *disk) free() int64 {
	d.t.Helper()
	var st syscall.Statfs_t
	if err := syscall.Statfs(d.dir, &st); err != nil {
		d.t.Fatal(err)
	}
	return int64(st.Bavail) * st.Bsize
}

// fill leaves no more than left bytes free; what it wrote is removed by empty.
func (d *disk) fill(left int64) {
	d.t.Helper()
	for n := 0; n < 64; n++ {
		size := d.free() - left
		if size < 4096 {
			return
		}
		f, err := os.Create(filepath.Join(d.dir, "filler-"+strconv.Itoa(n)+"-"+strconv.FormatInt(left, 10)))
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

func (d *disk) empty() {
	d.t.Helper()
	m, err := filepath.Glob(filepath.Join(d.dir, "filler-*"))
	if err != nil {
		d.t.Fatal(err)
	}
	for _, name := range m {
		if err := os.Remove(name); err != nil {
			d.t.Fatal(err)
		}
	}
}
