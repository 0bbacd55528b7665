package journal

import (
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/journal/internal/hooks"
)

// TestStart: what a start reads of the history is bounded – by the last checkpoint and
// the last settling – and what it does grows with what was open (M4). The long form
// makes a million actions (WAYBILL_TEST_ACTIONS: another number) and gives it 2 s.
func TestStart(t *testing.T) {
	contract.Covers(t, "M4")
	actions, open := int64(2000), 20
	if os.Getenv("WAYBILL_TEST_LONG") != "" {
		actions = 1_000_000
	}
	if n, err := strconv.ParseInt(os.Getenv("WAYBILL_TEST_ACTIONS"), 10, 64); err == nil {
		actions = n
	}
	dir := tempDir(t)
	opt := testOptions(dir, &hooks.Hooks{NoSync: true})
	opt.Hooks.CheckCache = false
	j, _ := openWith(t, opt)
	var left atomic.Int64
	left.Store(actions)
	var wg sync.WaitGroup
	for range 256 {
		wg.Go(func() {
			for left.Add(-1) >= 0 {
				id := newID()
				if _, err := j.Append(bg, toDispatch(id, "ci", "", "f")); err != nil {
					t.Error(err)
					return
				}
				if _, err := j.Append(bg, toResult(id, nil)); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	wg.Wait()
	for range open {
		mustAppend(t, j, toDispatch(newID(), "ci", "", "f"))
	}
	// As a kill leaves it: what is in memory only is made again.
	crash := filepath.Join(t.TempDir(), "crash")
	copyDir(t, dir, crash)
	closeTest(t, j)
	killed, rec := openWith(t, testOptions(crash, nil))
	t.Logf("after a kill: %d groups made again, %d events walked, %d closed as unknown, in %s", rec.Redone, rec.Walked, rec.Unknown, rec.Took)
	if rec.Unknown != open || rec.Redone == 0 || rec.Walked > 2*checkpointEvery || actions >= 1_000_000 && rec.Took > 2*time.Second {
		t.Errorf("after a kill: %+v", rec)
	}
	if st := killed.Stats(); st.Seq < uint64(actions) { //nolint:gosec // a count
		t.Errorf("after a kill there are %d events of %d actions", st.Seq, actions)
	}
	closeTest(t, killed)
	if err := os.RemoveAll(crash); err != nil {
		t.Fatal(err)
	}
	j, rec = openWith(t, testOptions(dir, nil))
	st := j.Stats()
	t.Logf("%d actions, %d events, folder of %d MiB: %d groups made again, %d events walked, %d closed as unknown, in %s",
		actions, st.Seq, folderSize(t, dir)>>20, rec.Redone, rec.Walked, rec.Unknown, rec.Took)
	if st.Seq < uint64(actions) { //nolint:gosec // a count
		t.Errorf("%d actions and only %d events: this run shows nothing", actions, st.Seq)
	}
	if rec.Unknown != open {
		t.Errorf("%d open actions were closed, not %d", rec.Unknown, open)
	}
	if rec.Walked > 2*checkpointEvery {
		t.Errorf("%d events were walked", rec.Walked)
	}
	if actions >= 1_000_000 && rec.Took > 2*time.Second {
		t.Errorf("the start took %s", rec.Took)
	}
	if _, err := j.Append(bg, toDispatch(newID(), "ci", "", "f")); err != nil {
		t.Error(err)
	}
	if err := j.Admit(); err != nil {
		t.Error(err)
	}
	var one dispatch.Record
	for r, err := range j.Actions(bg, dispatch.Filter{Limit: 1}) {
		if err != nil {
			t.Fatal(err)
		}
		one = r
	}
	if one.ID.IsZero() {
		t.Error("no action is listed")
	}
}

// folderSize is what the files below dir take on disk.
func folderSize(t *testing.T, dir string) (n int64) {
	t.Helper()
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || !e.Type().IsRegular() {
			return err
		}
		var st syscall.Stat_t
		if err := syscall.Stat(path, &st); err != nil {
			return err
		}
		n += st.Blocks * 512
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return n
}

// TestSyncsOfAGroup: one sync a group, whoever waits: sixteen lone appends cost sixteen,
// 65 that wait at the same time two (issue 3.5). Metrics are told the same.
func TestSyncsOfAGroup(t *testing.T) {
	contract.Covers(t, "F1")
	hold := heldHooks()
	hold.NoSync = false
	m := &countMetrics{}
	opt := testOptions(tempDir(t), &hold.Hooks)
	opt.Metrics = m
	j, _ := openWith(t, opt)
	spent := func(f func()) (stats, metric int64) {
		stats, metric = int64(j.Stats().Syncs), m.syncs.Load()
		f()
		if err := j.caughtUp(); err != nil { // a group is measured when the store has it, too
			t.Fatal(err)
		}
		return int64(j.Stats().Syncs) - stats, m.syncs.Load() - metric
	}
	if s, n := spent(func() {
		for range 16 {
			mustAppend(t, j, toDispatch(newID(), "ci", "", "f"))
		}
	}); s != 16 || n != 16 {
		t.Errorf("16 appends one after the other: %d syncs, the metric says %d", s, n)
	}
	if s, n := spent(func() {
		hold.hold()
		all := []<-chan answer{appendAsync(j, toDispatch(newID(), "ci", "", "f"))}
		hold.waitHeld(t)
		for range 64 {
			all = append(all, appendAsync(j, toDispatch(newID(), "ci", "", "f")))
		}
		waitQueued(t, j, 64)
		hold.letGo()
		for _, ch := range all {
			if a := <-ch; a.err != nil {
				t.Error(a.err)
			}
		}
	}); s != 2 || n != 2 {
		t.Errorf("65 appends that wait together: %d syncs, the metric says %d", s, n)
	}
}
