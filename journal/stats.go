package journal

import (
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/dgraph-io/badger/v4"
)

// counters are what Stats reports of this process.
type counters struct {
	seq         atomic.Uint64
	refused     atomic.Uint64
	relaxedLost atomic.Uint64
	syncs       atomic.Uint64 // of the witness; flushes and compactions are Badger's own

	mu       sync.Mutex
	head     head
	open     int
	groups   uint64
	appends  uint64
	events   uint64
	bytes    int64
	maxGroup int
	total    time.Duration
	slowest  time.Duration
	dropped  uint64
	expired  uint64
	base     uint64
}

func (c *counters) committed(g *Group, h head, open, requests int) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.seq.Store(h.seq)
	c.head, c.open = h, open
	c.groups++
	c.appends += uint64(requests)
	c.events += uint64(g.Events)
	c.bytes += g.Bytes
	c.maxGroup = max(c.maxGroup, g.Requests)
	c.total += g.Total
	c.slowest = max(c.slowest, g.Total)
}

// Stats describes the journal. Fields up to FreeBytes are about the folder, the
// others about this process.
type Stats struct {
	Quarantined bool   `json:"quarantined"`
	Stopped     bool   `json:"stopped"`
	Seq         uint64 `json:"seq"`          // of the last event
	OpenActions int    `json:"open_actions"` // not ended; relaxed and tunnels included
	StoreBytes  int64  `json:"store_bytes"`  // tables, about a minute old
	FreeBytes   int64  `json:"free_bytes"`
	FloorBytes  int64  `json:"floor_bytes"`      // below it no new work is admitted
	HardFloor   int64  `json:"hard_floor_bytes"` // below it nothing is written
	Ballast     int64  `json:"ballast_bytes"`    // given up below the hard floor; 0: there is none

	Boot         string        `json:"boot,omitempty"`
	Groups       uint64        `json:"groups"`
	Appends      uint64        `json:"appends"`
	Events       uint64        `json:"events"`
	Bytes        int64         `json:"bytes"` // handed to the store
	Syncs        uint64        `json:"syncs"` // system calls: one for a group, a few for a segment; flushes and compactions are not in it
	LargestGroup int           `json:"largest_group"`
	CommitTime   time.Duration `json:"commit_time_ns"` // sum over groups
	Slowest      time.Duration `json:"slowest_commit_ns"`
	Refused      uint64        `json:"refused"`
	RelaxedLost  uint64        `json:"relaxed_lost"` // relaxed batches that were not written
	Dropped      uint64        `json:"results_dropped"`
	Expired      uint64        `json:"actions_expired"`
	Base         uint64        `json:"base_seq"`       // the chain begins after this event
	KeptBytes    int64         `json:"kept_bytes"`     // written since then, less dropped results: an estimate
	Retention    time.Duration `json:"retention_ns"`   // 0: no limit
	MaxBytes     int64         `json:"max_size_bytes"` // of KeptBytes; 0: no limit
}

// Stats returns the figures of this moment.
func (j *Journal) Stats() Stats {
	c := &j.stats
	c.mu.Lock()
	s := Stats{
		Quarantined: j.recovery.Quarantined, Stopped: j.Cause() != nil, Seq: c.seq.Load(), OpenActions: c.open, Boot: j.bootID,
		Groups: c.groups, Appends: c.appends, Events: c.events, Bytes: c.bytes, Syncs: c.syncs.Load(), LargestGroup: c.maxGroup,
		CommitTime: c.total, Slowest: c.slowest, Refused: c.refused.Load(), RelaxedLost: c.relaxedLost.Load(), Dropped: c.dropped,
		Expired: c.expired, Base: c.base, Retention: j.opt.Retention, MaxBytes: j.opt.MaxBytes,
	}
	c.mu.Unlock()
	if !j.db.IsClosed() {
		lsm, vlog := j.db.Size()
		s.StoreBytes = lsm + vlog
	}
	s.KeptBytes = j.keptBytes()
	s.FreeBytes, _ = j.freeBytes()
	s.FloorBytes, s.HardFloor = j.floor(), j.hardFloor()
	if st, err := os.Stat(j.folder.path(nameBallast)); err == nil {
		s.Ballast = st.Size()
	}
	return s
}

// Counts are sizes that need a walk over the index; see Count.
type Counts struct {
	Actions int `json:"actions"`
	Open    int `json:"open"`
	Results int `json:"results"` // stored, dropped ones included
}

// Count counts actions and results by their keys.
func (j *Journal) Count() (Counts, error) {
	var out Counts
	err := j.view(func(txn *snapshot) error {
		for _, f := range []struct {
			family byte
			n      *int
		}{{famRecord, &out.Actions}, {famOpen, &out.Open}, {famManifest, &out.Results}} {
			it := txn.NewIterator(badger.IteratorOptions{Prefix: []byte{f.family}})
			for it.Rewind(); it.Valid(); it.Next() {
				*f.n++
			}
			it.Close()
		}
		return nil
	})
	return out, err
}
