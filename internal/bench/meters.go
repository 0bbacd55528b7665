package bench

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// maxText bounds what is read from a file or an answer at once.
const maxText = 64 << 20

func readAll(r io.Reader) ([]byte, error) {
	b, err := io.ReadAll(io.LimitReader(r, maxText))
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	return b, nil
}

// parseMetrics reads the Prometheus text format. Samples of one name with different
// labels are added up; comments and what cannot be read are left out.
func parseMetrics(text []byte) map[string]float64 {
	out := make(map[string]float64)
	for line := range bytes.Lines(text) {
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		name, rest := line, []byte(nil)
		if i := bytes.IndexByte(line, '{'); i >= 0 {
			// A label's value may hold a space or a brace, but the value is behind the last.
			j := bytes.LastIndexByte(line, '}')
			if j < i {
				continue
			}
			name, rest = line[:i], line[j+1:]
		} else if i := bytes.IndexByte(line, ' '); i >= 0 {
			name, rest = line[:i], line[i:]
		}
		f := bytes.Fields(rest)
		if len(f) == 0 {
			continue
		}
		v, err := strconv.ParseFloat(string(f[0]), 64)
		if err != nil {
			continue
		}
		out[string(name)] += v
	}
	return out
}

// Usage is what a process and its descendants have used. Processor time of
// descendants that have ended is not in it.
type Usage struct {
	CPU  time.Duration
	RSS  int64 // bytes
	Peak int64 // bytes; the sum of each process's own high-water mark
}

// clockTick is USER_HZ, which is 100 on every Linux that Go runs on.
const clockTick = 10 * time.Millisecond

// ProcessUsage reads /proc; it works on Linux only.
func ProcessUsage(pid int) (Usage, error) {
	family, err := descendants(pid)
	if err != nil {
		return Usage{}, err
	}
	var u Usage
	for i, p := range family {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", p))
		if err != nil {
			if i == 0 {
				return Usage{}, fmt.Errorf("bench: %w", err)
			}
			continue // a helper that ended meanwhile
		}
		_, ticks, err := parseStat(string(text))
		if err != nil {
			return Usage{}, err
		}
		u.CPU += time.Duration(ticks) * clockTick
		status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p))
		if err != nil {
			continue
		}
		u.RSS += statusBytes(string(status), "VmRSS")
		u.Peak += statusBytes(string(status), "VmHWM")
	}
	return u, nil
}

// descendants returns pid and every process below it.
func descendants(pid int) ([]int, error) {
	stats, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil || len(stats) == 0 {
		return nil, errors.Join(errors.New("bench: no process information in /proc"), err)
	}
	children := make(map[int][]int)
	for _, name := range stats {
		p, err := strconv.Atoi(filepath.Base(filepath.Dir(name)))
		if err != nil {
			continue
		}
		text, err := os.ReadFile(name)
		if err != nil {
			continue
		}
		if parent, _, err := parseStat(string(text)); err == nil {
			children[parent] = append(children[parent], p)
		}
	}
	family := []int{pid}
	for i := 0; i < len(family); i++ {
		family = append(family, children[family[i]]...)
	}
	return family, nil
}

// parseStat reads /proc/PID/stat (proc(5)): the parent, and user and system time in
// ticks. The name in parentheses may hold anything, parentheses and spaces included.
func parseStat(text string) (parent int, ticks int64, err error) {
	i := strings.LastIndexByte(text, ')')
	f := strings.Fields(text[i+1:])
	if i < 0 || len(f) < 13 {
		return 0, 0, errors.New("bench: /proc/PID/stat: too short")
	}
	parent, err1 := strconv.Atoi(f[1])
	user, err2 := strconv.ParseInt(f[11], 10, 64)
	system, err3 := strconv.ParseInt(f[12], 10, 64)
	if err := errors.Join(err1, err2, err3); err != nil {
		return 0, 0, fmt.Errorf("bench: /proc/PID/stat: %w", err)
	}
	return parent, user + system, nil
}

// statusBytes reads a line such as "VmRSS:   123 kB"; 0 where there is none.
func statusBytes(text, name string) int64 {
	for line := range strings.Lines(text) {
		rest, ok := strings.CutPrefix(line, name+":")
		if !ok {
			continue
		}
		f := strings.Fields(rest)
		if len(f) == 2 && f[1] == "kB" {
			n, _ := strconv.ParseInt(f[0], 10, 64)
			return n << 10
		}
	}
	return 0
}

// resetPeak lowers VmHWM to what is resident now. Where that is not allowed, the
// mark stays that of the process's life.
func resetPeak(pid int) {
	family, _ := descendants(pid)
	for _, p := range family {
		_ = os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", p), []byte("5"), 0)
	}
}

// syncCalls are the system calls that make data durable; io_submit because the journal asks
// for that with each one (RWF_DSYNC).
const syncCalls = "fsync,fdatasync,io_submit,msync,sync_file_range,syncfs,sync"

// countSyncs counts the calls that a trace (strace -f -ttt) has between two moments,
// by name. Of a call that strace shows in two halves the first counts.
func countSyncs(trace []byte, from, to int64) map[string]int64 {
	out := make(map[string]int64)
	for line := range bytes.Lines(trace) {
		f := bytes.Fields(line)
		// "[pid] 1700000000.123456 fdatasync(7) = 0"; the pid is there with -f.
		for len(f) > 0 && !bytes.ContainsRune(f[0], '.') {
			f = f[1:]
		}
		if len(f) < 2 {
			continue
		}
		at, err := traceTime(string(f[0]))
		if err != nil || at < from || at > to {
			continue
		}
		name, _, ok := bytes.Cut(f[1], []byte("("))
		if !ok {
			continue // "<... resumed>", "+++ exited", "--- SIG"
		}
		for c := range strings.SplitSeq(syncCalls, ",") {
			if string(name) == c {
				out[c]++
			}
		}
	}
	return out
}

// traceTime reads seconds with six decimals as nanoseconds, without the rounding of
// a float.
func traceTime(s string) (int64, error) {
	sec, frac, _ := strings.Cut(s, ".")
	a, err1 := strconv.ParseInt(sec, 10, 64)
	b, err2 := strconv.ParseInt((frac + "000000000")[:9], 10, 64)
	return a*int64(time.Second) + b, errors.Join(err1, err2)
}
