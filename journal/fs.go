package journal

import (
	"bytes"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// Names inside the folder.
const (
	nameLock    = "lock"
	nameKey     = "key"
	nameStore   = "store"
	nameWitness = "witness"
)

// folder is the journal's directory, locked.
type folder struct {
	dir  string
	lock *os.File
	sync bool // false only in tests
}

// openFolder creates the folder if create is set, and locks it. The lock goes with
// the process, whatever ends it (case JR-05).
func openFolder(dir string, create, sync bool) (*folder, error) {
	if create {
		err := os.Mkdir(dir, 0o700)
		if err == nil && sync {
			err = syncDir(filepath.Dir(dir)) // the folder itself must not vanish
		}
		if err != nil && !errors.Is(err, fs.ErrExist) {
			return nil, fmt.Errorf("journal: %w", err)
		}
	}
	st, err := os.Stat(dir)
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	if !st.IsDir() {
		return nil, fmt.Errorf("journal: %s is not a directory", dir)
	}
	if st.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("journal: %s has mode %#o: others can enter it; it must be 0700", dir, st.Mode().Perm())
	}
	f, err := os.OpenFile(filepath.Join(dir, nameLock), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("journal: %w", err)
	}
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		holder := "an unknown process"
		if b, rerr := io.ReadAll(io.LimitReader(f, 32)); rerr == nil {
			if pid, perr := strconv.Atoi(strings.TrimSpace(string(b))); perr == nil {
				holder = fmt.Sprintf("process %d", pid)
			}
		}
		_ = f.Close()
		if errors.Is(err, unix.EWOULDBLOCK) {
			return nil, fmt.Errorf("%w: %s is held by %s", ErrLocked, dir, holder)
		}
		return nil, fmt.Errorf("journal: lock: %w", err)
	}
	err = f.Truncate(0)
	if err == nil {
		_, err = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	}
	if err != nil {
		_ = f.Close()
		return nil, fmt.Errorf("journal: lock: %w", err)
	}
	return &folder{dir: dir, lock: f, sync: sync}, nil
}

func (f *folder) path(name string) string { return filepath.Join(f.dir, name) }

// has reports whether there is a file of that name.
func (f *folder) has(name string) bool {
	_, err := os.Lstat(f.path(name))
	return err == nil
}

// put writes a small file: under its name complete and durable, or not at all.
func (f *folder) put(name string, b []byte) error {
	tmp := f.path(name + ".new")
	w, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = w.Write(b)
	if err == nil && f.sync {
		err = w.Sync()
	}
	if cerr := w.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(tmp, f.path(name))
	}
	if err == nil {
		err = f.syncDir(f.dir)
	}
	return err
}

// drop removes such a file, if it is there.
func (f *folder) drop(name string) error {
	if err := os.Remove(f.path(name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return f.syncDir(f.dir)
}

// close gives the lock back.
func (f *folder) close() error { return f.lock.Close() }

func syncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	err = d.Sync()
	if cerr := d.Close(); err == nil {
		err = cerr
	}
	return err
}

func (f *folder) syncDir(dir string) error {
	if !f.sync {
		return nil
	}
	return syncDir(dir)
}

// refusedFilesystems names the types that are told apart in the message. Only
// those of knownFilesystems are accepted.
var (
	refusedFilesystems = map[int64]string{
		0x01021994: "tmpfs", 0x858458f6: "ramfs", 0x794c7630: "overlayfs", 0x65735546: "FUSE", 0x6969: "NFS",
		0x517b: "SMB", 0xff534d42: "CIFS", 0xfe534d42: "SMB2", 0x01021997: "9p", 0x9123683e: "btrfs", 0x2fc12fc1: "zfs",
	}
	knownFilesystems = map[int64]string{0xef53: "ext4", 0x58465342: "xfs"}
)

// checkFilesystem refuses file systems on which a completed sync is no promise:
// everything but ext4 with a journal, and XFS.
func checkFilesystem(dir string) error {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	magic := int64(uint32(st.Type))
	name, ok := knownFilesystems[magic]
	if !ok {
		other := refusedFilesystems[magic]
		if other == "" {
			other = fmt.Sprintf("type %#x", magic)
		}
		return fmt.Errorf("%w: %s is on %s; use a folder on ext4 or XFS", ErrFilesystem, dir, other)
	}
	if name == "ext4" && !hasExtJournal(dir) {
		return fmt.Errorf("%w: %s is on ext2, or ext4 without a journal", ErrFilesystem, dir)
	}
	return nil
}

// hasExtJournal reports false only when the kernel says that the file system has no
// journal; where it says nothing (a container without /sys), the benefit of the
// doubt is given.
func hasExtJournal(dir string) bool {
	var st unix.Stat_t
	if unix.Stat(dir, &st) != nil {
		return true
	}
	dev, err := os.Readlink(fmt.Sprintf("/sys/dev/block/%d:%d", unix.Major(uint64(st.Dev)), unix.Minor(uint64(st.Dev))))
	if err != nil {
		return true
	}
	info := filepath.Join("/sys/fs/ext4", filepath.Base(dev))
	if _, err := os.Stat(info); err != nil {
		return true
	}
	_, err = os.Stat(filepath.Join(info, "journal_task"))
	return err == nil
}

// freeBytes is what an unprivileged process may still allocate.
func freeBytes(dir string) (int64, error) {
	var st unix.Statfs_t
	if err := unix.Statfs(dir, &st); err != nil {
		return 0, err
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// freeBytes is the same of the folder, without the way there: less than half of what it
// costs. Nobody may close the folder meanwhile.
func (f *folder) freeBytes() (int64, error) {
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(f.lock.Fd()), &st); err != nil {
		return 0, err
	}
	return int64(st.Bavail) * st.Bsize, nil
}

// removeEmptyStoreFiles removes zero-length *.mem and *.vlog: a kill between create
// and resize leaves them, they never hold data, and Badger fails to open with them
// (its issue 2207).
func (f *folder) removeEmptyStoreFiles() (removed int, err error) {
	entries, err := os.ReadDir(f.path(nameStore))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("journal: %w", err)
	}
	for _, e := range entries {
		if ext := filepath.Ext(e.Name()); ext != ".mem" && ext != ".vlog" {
			continue
		}
		info, err := e.Info()
		if err != nil {
			return removed, fmt.Errorf("journal: %w", err)
		}
		if !info.Mode().IsRegular() || info.Size() != 0 {
			continue
		}
		if err := os.Remove(filepath.Join(f.path(nameStore), e.Name())); err != nil {
			return removed, fmt.Errorf("journal: %w", err)
		}
		removed++
	}
	if removed > 0 {
		if err := f.syncDir(f.path(nameStore)); err != nil {
			return removed, fmt.Errorf("journal: %w", err)
		}
	}
	return removed, nil
}

// The key file: magic(8) ‖ key(32) ‖ first 16 bytes of SHA-256 over both. The sum
// tells a damaged key from another journal's.
const (
	keyMagic     = "WBJKEY\x00\x01"
	keyFileBytes = len(keyMagic) + KeyBytes + 16
)

func keySum(b []byte) []byte {
	sum := sha256.Sum256(b)
	return sum[:16]
}

// readKey reads a key file in the form above, or of 64 hexadecimal digits.
func readKey(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	defer func() { _ = f.Close() }()
	st, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	if !st.Mode().IsRegular() || st.Mode().Perm()&0o077 != 0 {
		return nil, fmt.Errorf("%w: %s must be a file that only its owner can read (0600)", ErrKey, path)
	}
	b, err := io.ReadAll(io.LimitReader(f, 256))
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	if len(b) == keyFileBytes && bytes.HasPrefix(b, []byte(keyMagic)) {
		body := b[:len(b)-16]
		if !bytes.Equal(keySum(body), b[len(b)-16:]) {
			return nil, fmt.Errorf("%w: %s is damaged", ErrKey, path)
		}
		return body[len(keyMagic):], nil
	}
	if s := strings.TrimRight(string(b), "\r\n"); len(s) == 2*KeyBytes {
		if key, err := hex.DecodeString(s); err == nil {
			return key, nil
		}
	}
	return nil, fmt.Errorf("%w: %s is damaged, or not a key file", ErrKey, path)
}

// createKey makes <dir>/key. It appears under its name complete and durable, or not
// at all, and never replaces one.
func (f *folder) createKey() ([]byte, error) {
	key := make([]byte, KeyBytes)
	_, _ = rand.Read(key) // never fails since Go 1.24
	b := append([]byte(keyMagic), key...)
	b = append(b, keySum(b)...)
	tmp := f.path(nameKey + ".new")
	if err := os.Remove(tmp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	w, err := os.OpenFile(tmp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	_, err = w.Write(b)
	if err == nil && f.sync {
		err = w.Sync()
	}
	if cerr := w.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Link(tmp, f.path(nameKey)) // unlike rename, fails if there is one
	}
	if err == nil {
		err = os.Remove(tmp)
	}
	if err == nil {
		err = f.syncDir(f.dir)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	return key, nil
}
