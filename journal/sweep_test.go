package journal

import (
	"errors"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
)

// A start drops what has expired: a process that never lives as long as the interval
// keeps nothing for ever (case DL-03).
func TestSweepAtStart(t *testing.T) {
	contract.Covers(t, "H7")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	b := toResult(id, []byte("x"))
	b.Events[1].Result.ExpiresAt = time.Now().Add(-time.Hour)
	mustAppend(t, j, b)
	closeTest(t, j)
	opt := testOptions(dir, nil)
	opt.SweepInterval = time.Hour
	j, _ = openWith(t, opt)
	for range 2000 {
		if _, _, err := j.OpenResult(bg, id); errors.Is(err, dispatch.ErrResultDropped) {
			return
		}
		time.Sleep(5 * time.Millisecond) // nobody announces the end of a sweep
	}
	t.Error("an expired result is still there")
}
