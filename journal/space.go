package journal

import (
	"fmt"
	"sync"
	"time"
)

// spaceGate answers whether there is room for new work (CONTRACT M5). Badger maps
// sparse files: without room it is killed by SIGBUS, so the gate has to be early.
type spaceGate struct {
	mu      sync.Mutex
	checked time.Time
	free    int64
	err     error
}

const (
	// spaceValid is how long an answer is kept.
	spaceValid = 100 * time.Millisecond
	// spaceReserve is what the store may need before it gives anything back: twice
	// its memtables, a flush under way included, and 64 MiB.
	spaceReserve = 2*memTableBytes*(numMemtables+1) + 64<<20 + 64<<20
)

// floor is the free space below which no new work is admitted: the reserve and a
// share of the store, since compactions write before they delete.
func (j *Journal) floor() int64 {
	if j.opt.MinFreeBytes > 0 {
		return j.opt.MinFreeBytes
	}
	size := int64(0)
	if j.db != nil && !j.db.IsClosed() {
		lsm, vlog := j.db.Size()
		size = lsm + vlog
	}
	return spaceReserve + size/16
}

func (g *spaceGate) check(j *Journal) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if time.Since(g.checked) < spaceValid && !g.checked.IsZero() {
		return g.err
	}
	g.checked = time.Now()
	g.free, g.err = freeBytes(j.opt.Dir)
	if g.err != nil {
		g.err = fmt.Errorf("%w: %w", ErrNoSpace, g.err)
		return g.err
	}
	if floor := j.floor(); g.free < floor {
		g.err = fmt.Errorf("%w: %d MiB free, %d MiB needed", ErrNoSpace, g.free>>20, floor>>20)
	}
	return g.err
}

// hardFloor refuses to open the store at all: it allocates at once.
func (g *spaceGate) hardFloor(j *Journal) error {
	free, err := freeBytes(j.opt.Dir)
	if err != nil {
		return fmt.Errorf("journal: %w", err)
	}
	if floor := j.floor() / 2; free < floor {
		return fmt.Errorf("%w to open the store: %d MiB free, %d MiB needed", ErrNoSpace, free>>20, floor>>20)
	}
	return nil
}
