package bench

import (
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"
)

// Disk is what the disk under the journal does for a program that does nothing else.
type Disk struct {
	// Sync is the median of a 4 KiB write to a preallocated file and its fdatasync.
	Sync    time.Duration `json:"sync_ns"`
	SyncP99 time.Duration `json:"sync_p99_ns"`
	// Rested is the median of the same after 50 ms of rest each, which is what an
	// occasional request pays.
	Rested time.Duration `json:"sync_rested_ns"`
	// Sequential is what is written durably in sequence, 1 MiB at a time, in bytes per second.
	Sequential float64 `json:"sequential_bytes_per_second"`
	// Group is appends per second of a preallocated file with group commit, by waiters.
	Group map[int]float64 `json:"group_appends_per_second"`
}

// groupRecord is the length of an append in Disk.Group: about what one durable step of
// an action takes in the journal.
const groupRecord = 768

// groupWaiters are the waiters that Disk.Group and the journal alone are measured with.
var groupWaiters = []int{1, 16, 64}

func probeDisk(dir string) (*Disk, error) {
	name := filepath.Join(dir, "probe")
	defer func() { _ = os.Remove(name) }()
	const size = 64 << 20
	f, err := preallocated(name, size)
	if err != nil {
		return nil, fmt.Errorf("bench: disk: %w", err)
	}
	defer func() { _ = f.Close() }()
	d := &Disk{Group: make(map[int]float64)}
	block := make([]byte, 1<<20)
	timedWrites := func(n, bytes int, rest time.Duration) ([]int64, error) {
		var took []int64
		for i := range n {
			time.Sleep(rest)
			start := time.Now()
			_, err := f.WriteAt(block[:bytes], int64(i*bytes)%size)
			if err = errors.Join(err, dataSync(f)); err != nil {
				return nil, fmt.Errorf("bench: disk: %w", err)
			}
			took = append(took, int64(time.Since(start)))
		}
		slices.Sort(took)
		return took, nil
	}
	took, err := timedWrites(300, 4<<10, 0)
	if err != nil {
		return nil, err
	}
	d.Sync, d.SyncP99 = time.Duration(Quantile(took, .5)), time.Duration(Quantile(took, .99))
	if took, err = timedWrites(15, 4<<10, 50*time.Millisecond); err != nil {
		return nil, err
	}
	d.Rested = time.Duration(Quantile(took, .5))
	start := time.Now()
	if _, err = timedWrites(size>>20, 1<<20, 0); err != nil {
		return nil, err
	}
	d.Sequential = size / time.Since(start).Seconds()
	for _, n := range groupWaiters {
		if d.Group[n], err = groupCommit(f, size, n, 400*time.Millisecond); err != nil {
			return nil, err
		}
	}
	return d, nil
}

// preallocated makes a file whose blocks are written, so that a write changes data
// only and fdatasync has no metadata to keep.
func preallocated(name string, size int) (*os.File, error) {
	f, err := os.OpenFile(name, os.O_CREATE|os.O_RDWR|os.O_TRUNC, 0o600)
	if err != nil {
		return nil, err
	}
	zero := make([]byte, 1<<20)
	for at := 0; at < size; at += len(zero) {
		if _, err := f.WriteAt(zero, int64(at)); err != nil {
			return nil, errors.Join(err, f.Close())
		}
	}
	if err := f.Sync(); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return f, nil
}

// groupCommit is the least that durability can cost: waiters append records, the first
// one that comes while no sync runs writes and syncs for all.
func groupCommit(f *os.File, size, waiters int, window time.Duration) (float64, error) {
	var (
		mu      sync.Mutex
		cond    = sync.NewCond(&mu)
		buf     []byte
		spare   []byte
		next    uint64 // the group that records join
		durable uint64 // groups below it are on disk
		busy    bool
		at      int64
		failed  error
		done    int64
	)
	next = 1
	record := make([]byte, groupRecord)
	deadline := time.Now().Add(window)
	start := time.Now()
	var wg sync.WaitGroup
	for range waiters {
		wg.Go(func() {
			mu.Lock()
			defer mu.Unlock()
			for failed == nil && time.Now().Before(deadline) {
				mine := next
				buf = append(buf, record...)
				for durable < mine && failed == nil {
					if busy {
						cond.Wait()
						continue
					}
					busy = true
					group, out := next, buf
					next++
					buf = spare[:0]
					if at+int64(len(out)) > int64(size) {
						at = 0
					}
					offset := at
					at += int64(len(out))
					mu.Unlock()
					_, err := f.WriteAt(out, offset)
					err = errors.Join(err, dataSync(f))
					mu.Lock()
					spare, busy, failed = out, false, err
					durable = group
					cond.Broadcast()
				}
				done++
			}
		})
	}
	wg.Wait()
	if failed != nil {
		return 0, fmt.Errorf("bench: disk: %w", failed)
	}
	return float64(done) / time.Since(start).Seconds(), nil
}

// JournalAlone is package journal's own benchmark beside a bare file on the same disk.
type JournalAlone struct {
	Waiters int     `json:"waiters"`
	Appends float64 `json:"appends_per_second"`
	Syncs   float64 `json:"syncs_per_append"`
}

// journalAlone runs BenchmarkAppend of package journal, its folder below dir.
func journalAlone(ctx context.Context, source, dir string) ([]JournalAlone, error) {
	ctx, cancel := context.WithTimeout(ctx, 3*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, "go", "test", "-run=^$", "-bench=^BenchmarkAppend$", "-benchtime=0.5s", "./journal")
	cmd.Dir = source
	cmd.Env = append(os.Environ(), "TMPDIR="+dir)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return nil, fmt.Errorf("bench: go test ./journal: %w: %s", err, firstOf(string(out)))
	}
	return parseAppends(string(out)), nil
}

// parseAppends reads lines such as
// "BenchmarkAppend/waiters=16-2  5000  210 ns/op  4700 appends/s  0.15 syncs/append".
func parseAppends(text string) []JournalAlone {
	var out []JournalAlone
	for line := range strings.Lines(text) {
		f := strings.Fields(line)
		if len(f) < 4 {
			continue
		}
		rest, ok := strings.CutPrefix(f[0], "BenchmarkAppend/waiters=")
		if !ok {
			continue
		}
		count, _, _ := strings.Cut(rest, "-")
		n, err := strconv.Atoi(count)
		if err != nil {
			continue
		}
		j := JournalAlone{Waiters: n}
		for i := 2; i+1 < len(f); i += 2 {
			v, err := strconv.ParseFloat(f[i], 64)
			switch {
			case err != nil:
			case f[i+1] == "appends/s":
				j.Appends = v
			case f[i+1] == "syncs/append":
				j.Syncs = v
			}
		}
		out = append(out, j)
	}
	return out
}

// Machine describes where a run took place. It names no path and no account.
type Machine struct {
	CPU        string `json:"cpu"`
	Cores      int    `json:"cores"`
	Memory     int64  `json:"memory_bytes"`
	Kernel     string `json:"kernel"`
	Go         string `json:"go"`
	Filesystem string `json:"filesystem"` // under the strict journal
	Load       string `json:"load"`       // load averages at the start: what else ran
}

func describeMachine(dir string) Machine {
	read := func(name string) string {
		b, err := os.ReadFile(name)
		if err != nil {
			return ""
		}
		return strings.TrimSpace(string(b))
	}
	m := Machine{Cores: runtime.NumCPU(), Go: runtime.Version(), Kernel: read("/proc/sys/kernel/osrelease"), Filesystem: filesystem(read("/proc/self/mounts"), dir)}
	for line := range strings.Lines(read("/proc/cpuinfo")) {
		if k, v, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(k) == "model name" {
			m.CPU = strings.TrimSpace(v)
			break
		}
	}
	m.Memory = statusBytes(read("/proc/meminfo"), "MemTotal")
	if f := strings.Fields(read("/proc/loadavg")); len(f) > 2 {
		m.Load = strings.Join(f[:3], " ")
	}
	return m
}

// filesystem returns the type of the mount that holds dir.
func filesystem(mounts, dir string) string {
	best, kind := "", ""
	for line := range strings.Lines(mounts) {
		f := strings.Fields(line)
		if len(f) < 3 {
			continue
		}
		at := f[1]
		if (dir == at || at == "/" || strings.HasPrefix(dir, at+"/")) && len(at) >= len(best) {
			best, kind = at, f[2]
		}
	}
	return kind
}

// writePair writes a certificate and its key.
func writePair(pair tls.Certificate, cert, key string) error {
	private, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok {
		return errors.New("bench: the key is not ECDSA")
	}
	der, err := x509.MarshalPKCS8PrivateKey(private)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}), 0o600); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	if err := os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der}), 0o600); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return nil
}
