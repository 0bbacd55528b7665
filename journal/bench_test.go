package journal

import (
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"waybill/dispatch"
	"waybill/journal/internal/hooks"
)

// BenchmarkAppend is one durable step (four events, up to DISPATCH_STARTED) by N
// callers that each wait for it, synced as in production. syncs/append counts
// system calls: one for each group, and a few where a segment begins. cpu-µs/append is
// the processor time of the whole process, which a busy machine distorts least.
func BenchmarkAppend(b *testing.B) {
	for _, n := range []int{1, 16, 64, 256} {
		b.Run(fmt.Sprintf("waiters=%d", n), func(b *testing.B) { benchAppend(b, n, false) })
	}
}

// BenchmarkAction is a whole action: two appends, the second with a result of 1 KiB.
func BenchmarkAction(b *testing.B) {
	for _, n := range []int{1, 16, 64, 256} {
		b.Run(fmt.Sprintf("waiters=%d", n), func(b *testing.B) { benchAppend(b, n, true) })
	}
}

// BenchmarkResult is one of a larger answer, as is most of what a journal holds by size.
func BenchmarkResult(b *testing.B) {
	for _, n := range []int{1, 16} {
		b.Run(fmt.Sprintf("64KiB/waiters=%d", n), func(b *testing.B) { benchActions(b, n, 64<<10) })
	}
}

func benchAppend(b *testing.B, waiters int, whole bool) {
	if whole {
		benchActions(b, waiters, 1024)
	} else {
		benchActions(b, waiters, -1)
	}
}

// benchActions appends the first batch of b.N actions and, if size is not negative, their
// results of that size.
func benchActions(b *testing.B, waiters, size int) {
	opt := testOptions(tempDir(b), &hooks.Hooks{})
	opt.Hooks.CheckCache = false
	j, _ := openWith(b, opt)
	body := make([]byte, max(size, 0))
	var left atomic.Int64
	left.Store(int64(b.N))
	start, used, written := j.Stats(), processorTime(b), writtenBytes(b)
	b.ReportAllocs()
	b.ResetTimer()
	var wg sync.WaitGroup
	for range waiters {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				id := newID()
				if _, err := j.Append(bg, toDispatch(id, "ci", "", "sha256:f")); err != nil {
					b.Error(err)
					return
				}
				if size < 0 {
					continue
				}
				if _, err := j.Append(bg, toResult(id, body)); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	b.StopTimer()
	end, used, written := j.Stats(), processorTime(b)-used, writtenBytes(b)-written
	appends := float64(end.Appends - start.Appends)
	b.ReportMetric(float64(used.Microseconds())/appends, "cpu-µs/append")
	b.ReportMetric(float64(end.Bytes-start.Bytes)/appends, "stored-B/append")
	b.ReportMetric(float64(written)/appends, "written-B/append")
	b.ReportMetric(float64(end.Syncs-start.Syncs)/appends, "syncs/append")
	b.ReportMetric(float64(end.Groups-start.Groups)/appends, "groups/append")
	b.ReportMetric(float64(end.Events-start.Events)/b.Elapsed().Seconds(), "events/s")
	b.ReportMetric(appends/b.Elapsed().Seconds(), "appends/s")
}

// writtenBytes is what system calls have written so far; not what went through mappings.
func writtenBytes(b *testing.B) (n int64) {
	text, err := os.ReadFile("/proc/self/io")
	if err != nil {
		b.Fatal(err)
	}
	for line := range strings.Lines(string(text)) {
		if _, err := fmt.Sscanf(line, "wchar: %d", &n); err == nil {
			return n
		}
	}
	b.Fatal("no wchar in /proc/self/io")
	return 0
}

func processorTime(b *testing.B) time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// BenchmarkRelaxed is an append that nobody waits for.
func BenchmarkRelaxed(b *testing.B) {
	opt := testOptions(tempDir(b), &hooks.Hooks{})
	opt.Hooks.CheckCache = false
	j, _ := openWith(b, opt)
	b.ReportAllocs()
	defer func() { b.ReportMetric(float64(j.Stats().Groups)/float64(j.Stats().Appends), "groups/append") }()
	for b.Loop() {
		batch := toDispatch(newID(), "ci", "", "sha256:f")
		batch.Events[0].Accepted.Relaxed, batch.Relaxed = true, true
		if _, err := j.Append(bg, batch); err != nil {
			b.Fatal(err)
		}
	}
}

var _ dispatch.Journal = (*Journal)(nil)
