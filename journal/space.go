package journal

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"waybill/internal/control"
)

// Free space has three marks (CONTRACT M5, H8). Badger maps a sparse file when it is opened,
// where SIGBUS kills without room, and has to write what it holds in memory: all of them
// are far above zero.
//
//	floor       below it no new work is admitted
//	hard floor  below it nothing is written, not even the end of what runs
//	ballast     a file of allocated blocks. It is given up below the hard floor, so
//	            that what was dispatched can be ended, the journal be closed, and
//	            a start on a full disk be possible, for reading
type spaceGate struct {
	mu      sync.Mutex
	checked time.Time
	free    int64
	gate    error // new work
	room    error // anything

	ballast bool // the file is there
}

const (
	// spaceValid is how long an answer is kept, but by the committer: one look costs a
	// microsecond, less than anything else that a group costs.
	spaceValid = 100 * time.Millisecond
	// spaceReserve is what the store may need before it gives anything back: a table for
	// each memtable, one under way included, as much in the witness until it is settled, and
	// 64 MiB twice.
	spaceReserve = 2*memTableBytes*(numMemtables+1) + 64<<20 + 64<<20
	// spaceHard is what it needs to open, and to write tables of what is not settled.
	spaceHard = 2*memTableBytes*numMemtables + 32<<20
	// spacePerOpen is held back for the end of every action that is open.
	spacePerOpen = 64 << 10

	nameBallast = "ballast"
)

// floor is the free space below which no new work is admitted: the reserve, a share
// of the store, since compactions write before they delete, and what the actions
// under way need to end.
func (j *Journal) floor() int64 {
	j.stats.mu.Lock()
	open := int64(j.stats.open) * spacePerOpen
	j.stats.mu.Unlock()
	if j.opt.MinFreeBytes > 0 {
		return j.opt.MinFreeBytes + open
	}
	size := int64(0)
	if j.db != nil && !j.db.IsClosed() {
		lsm, vlog := j.db.Size()
		size = lsm + vlog
	}
	return spaceReserve + size/16 + open
}

// hardFloor is the free space below which nothing is written.
func (j *Journal) hardFloor() int64 {
	if j.opt.MinFreeBytes > 0 {
		return min(j.opt.MinFreeBytes/2, spaceHard)
	}
	return spaceHard
}

// ballastBytes is half as much again: after one start on a full disk there is still
// room for others.
func (j *Journal) ballastBytes() int64 { return j.hardFloor() * 3 / 2 }

func (j *Journal) freeBytes() (int64, error) {
	if f := j.hooks.FreeBytes; f != nil {
		return f(), nil
	}
	return freeBytes(j.opt.Dir)
}

// freeBytesNow is the committer's, before whose end nobody closes the folder.
func (j *Journal) freeBytesNow() (int64, error) {
	if f := j.hooks.FreeBytes; f != nil {
		return f(), nil
	}
	return j.folder.freeBytes()
}

// check reports whether new work may begin; the answer is at most spaceValid old.
func (g *spaceGate) check(j *Journal) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.measure(j, j.freeBytes)
	return g.gate
}

// write reports whether anything may be written at all.
func (g *spaceGate) write(j *Journal) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.measure(j, j.freeBytes)
	return g.room
}

// renew is called before every group: an answer that is older than the group could
// miss a disk that filled up in between.
func (g *spaceGate) renew(j *Journal) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.checked = time.Time{}
	g.measure(j, j.freeBytesNow)
}

// measure looks at the file system, and gives the ballast up when it has to. g.mu is
// held.
func (g *spaceGate) measure(j *Journal, free func() (int64, error)) {
	if time.Since(g.checked) < spaceValid && !g.checked.IsZero() {
		return
	}
	g.checked = time.Now()
	g.gate, g.room = nil, nil
	var err error
	if g.free, err = free(); err != nil {
		g.gate = fmt.Errorf("%w: %w", ErrNoSpace, err)
		g.room = g.gate
		return
	}
	if floor := j.floor(); g.free < floor && !control.Off("M5-room-for-the-end") {
		g.gate = fmt.Errorf("%w: %d MiB free, %d MiB needed", ErrNoSpace, g.free>>20, floor>>20)
	}
	hard := j.hardFloor()
	if g.free < hard && !j.opt.ReadOnly && g.drop(j) {
		if again, err := free(); err == nil {
			g.free = again
		}
	}
	if g.free < hard && !control.Off("M5-room-for-the-end") {
		g.room = fmt.Errorf("%w to write anything: %d MiB free, %d MiB needed", ErrNoSpace, g.free>>20, hard>>20)
	}
}

// drop gives the ballast up. g.mu is held.
func (g *spaceGate) drop(j *Journal) bool {
	err := os.Remove(j.folder.path(nameBallast))
	g.ballast = false
	if err == nil {
		j.log.Warn("journal: almost no free space; the ballast was given up", slog.Int64("free", g.free))
	}
	return err == nil
}

// open refuses to open the store below the hard floor: it allocates at once.
func (g *spaceGate) open(j *Journal) error { return g.write(j) }

// fill makes the ballast where there is room for it. A file of another size is one
// whose making was cut short.
func (g *spaceGate) fill(j *Journal) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.ballast || j.opt.ReadOnly {
		return
	}
	path, size := j.folder.path(nameBallast), j.ballastBytes()
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err == nil && st.Size == size && st.Blocks*512 >= size {
		g.ballast = true
		return
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return
	}
	if free, err := j.freeBytes(); err != nil || free < j.floor()+size {
		return
	}
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err == nil {
		// Without fallocate there is no ballast: writing it would take seconds.
		err = unix.Fallocate(int(f.Fd()), 0, 0, size)
		if cerr := f.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			_ = os.Remove(path)
		}
	}
	if err != nil {
		j.log.Warn("journal: no ballast", slog.Any("error", err))
		return
	}
	g.ballast = true
}
