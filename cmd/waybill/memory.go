package main

import (
	"bufio"
	"bytes"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"runtime/debug"
	"strconv"
	"strings"

	"waybill/internal/config"
)

// Values of --memory-limit beside a size.
const (
	memoryAuto = "auto"
	memoryOff  = "off"
)

const (
	// heapShare is the part of the memory limit that the Go runtime is told to stay
	// within: the program and the mapped tables of the journal's store are memory, too, but
	// not its. With 128 MiB the store's memtables and table buffers are most of it; with two
	// fifths a request of 64 clients cost up to 2.8 times as much as without a limit.
	heapShare = 0.6
	// leastHeap is below what a proxy at rest needs: a limit under it would make the
	// collector run all the time.
	leastHeap = 24 << 20
	// smallLimit is a sidecar's. There the collector starts early instead of at the limit.
	smallLimit   = 256 << 20
	smallPercent = 50
	// noLimit: cgroup v1 prints a huge number where there is none.
	noLimit = math.MaxInt64 / 4096 * 4096
)

// limitMemory applies --memory-limit. A GOMEMLIMIT of the environment is somebody's
// decision and stays.
func limitMemory(value string, getenv func(string) string, log *slog.Logger) error {
	limit, source := int64(0), "flag"
	switch value {
	case memoryOff:
		return nil
	case memoryAuto:
		if getenv("GOMEMLIMIT") != "" {
			return nil
		}
		if limit, source = cgroupLimit("/"), "cgroup"; limit == 0 {
			return nil
		}
	default:
		n, ok := config.ParseSize(value)
		if !ok || n < 32<<20 {
			return fail(exitUsage, "--memory-limit %s: is a size of at least 32MiB, as 96MiB or 1GiB, or one of auto, off", value)
		}
		limit = n
	}
	heap := max(int64(float64(limit)*heapShare), leastHeap)
	debug.SetMemoryLimit(heap)
	if limit <= smallLimit && getenv("GOGC") == "" {
		debug.SetGCPercent(smallPercent)
	}
	log.Info("memory limit", slog.Int64("bytes", limit), slog.Int64("heap", heap), slog.String("source", source))
	return nil
}

// cgroupLimit returns the smallest memory limit of this process's control group and
// those around it, v2 or v1, in bytes; 0: none. root is where /proc and /sys are.
func cgroupLimit(root string) int64 {
	list, err := os.ReadFile(filepath.Join(root, "proc/self/cgroup"))
	if err != nil {
		return 0
	}
	least := int64(0)
	for line := range strings.Lines(string(list)) {
		// hierarchy:controllers:path (cgroups(7)); v2 has an empty list of controllers.
		f := strings.SplitN(strings.TrimSuffix(line, "\n"), ":", 3)
		if len(f) != 3 {
			continue
		}
		name, mounts := "memory.max", []string{"sys/fs/cgroup", "sys/fs/cgroup/unified"}
		if f[1] != "" {
			if !strings.Contains(","+f[1]+",", ",memory,") {
				continue
			}
			name, mounts = "memory.limit_in_bytes", []string{"sys/fs/cgroup/memory", "sys/fs/cgroup/" + f[1]}
		}
		for _, mount := range mounts {
			// In a container the path may be the host's while the mount shows the group
			// itself as its root: what does not exist is passed over on the way up.
			for dir := filepath.Clean("/" + f[2]); ; dir = filepath.Dir(dir) {
				if n := readLimit(filepath.Join(root, mount, dir, name)); n > 0 && (least == 0 || n < least) {
					least = n
				}
				if dir == "/" {
					break
				}
			}
		}
	}
	return least
}

// readLimit reads one limit; 0: there is none.
func readLimit(path string) int64 {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0
	}
	s := bufio.NewScanner(bytes.NewReader(b))
	if !s.Scan() {
		return 0
	}
	n, err := strconv.ParseInt(strings.TrimSpace(s.Text()), 10, 64)
	if err != nil || n <= 0 || n >= noLimit {
		return 0 // "max", or v1's way to say the same
	}
	return n
}
