package journal

import (
	"path/filepath"
	"testing"

	"waybill/internal/contract"
)

// Many short lives leave no more files behind than a few, though none lasts as long as a
// compactor of the store takes its time: each begins with what the one before left.
func TestShortLives(t *testing.T) {
	contract.Covers(t, "T5")
	dir := tempDir(t)
	for life := range 16 {
		j := openTest(t, dir, nil)
		id := newID()
		mustAppend(t, j, toDispatch(id, "c", "", "f"))
		mustAppend(t, j, toResult(id, []byte("xyz")))
		closeTest(t, j)
		if n := len(glob(t, filepath.Join(dir, nameStore, "*.sst"))); n > 24 {
			t.Fatalf("%d tables after %d lives", n, life+1)
		}
	}
	j := openTest(t, dir, nil)
	mustVerify(t, j)
	closeTest(t, j)
}
