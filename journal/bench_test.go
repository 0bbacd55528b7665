package journal

import (
	"fmt"
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

func benchAppend(b *testing.B, waiters int, whole bool) {
	opt := testOptions(tempDir(b), &hooks.Hooks{})
	opt.Hooks.CheckCache = false
	j, _ := openWith(b, opt)
	body := make([]byte, 1024)
	var left atomic.Int64
	left.Store(int64(b.N))
	start, used := j.Stats(), processorTime(b)
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
				if !whole {
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
	end, used := j.Stats(), processorTime(b)-used
	appends := float64(end.Appends - start.Appends)
	b.ReportMetric(float64(used.Microseconds())/appends, "cpu-µs/append")
	b.ReportMetric(float64(end.Bytes-start.Bytes)/appends, "stored-B/append")
	b.ReportMetric(float64(end.Syncs-start.Syncs)/appends, "syncs/append")
	b.ReportMetric(float64(end.Groups-start.Groups)/appends, "groups/append")
	b.ReportMetric(float64(end.Events-start.Events)/b.Elapsed().Seconds(), "events/s")
	b.ReportMetric(appends/b.Elapsed().Seconds(), "appends/s")
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
	for b.Loop() {
		batch := toDispatch(newID(), "ci", "", "sha256:f")
		batch.Events[0].Accepted.Relaxed, batch.Relaxed = true, true
		if _, err := j.Append(bg, batch); err != nil {
			b.Fatal(err)
		}
	}
}

var _ dispatch.Journal = (*Journal)(nil)
