// Package journaltest opens journals for the tests of other packages. They are real
// ones, on the real store, in a temporary folder – but nothing is synced, so an
// Append takes microseconds and proves nothing about power cuts.
package journaltest

import (
	"context"
	"testing"

	"waybill/journal"
	"waybill/journal/internal/hooks"
)

// Open opens a journal in a folder of its own and closes it when the test is over,
// after verifying it: a test that leaves an inconsistent journal fails.
func Open(tb testing.TB) *journal.Journal {
	tb.Helper()
	return OpenOptions(tb, journal.Options{Dir: tb.TempDir() + "/journal"})
}

// OpenOptions is Open with options of the caller's; Dir must be set. A folder can be
// opened again after the journal was closed: that is a restart.
func OpenOptions(tb testing.TB, opt journal.Options) *journal.Journal {
	tb.Helper()
	opt.Hooks = &hooks.Hooks{NoSync: true, CheckCache: true}
	opt.AllowAnyFilesystem = true
	if opt.MinFreeBytes == 0 {
		opt.MinFreeBytes = 32 << 20
	}
	j, _, err := journal.Open(opt)
	if err != nil {
		tb.Fatalf("journaltest: %v", err)
	}
	tb.Cleanup(func() {
		if j.Cause() == nil && !j.Closed() && !j.Recovery().Quarantined {
			if _, err := j.Verify(context.Background()); err != nil {
				tb.Errorf("journaltest: the journal does not verify: %v", err)
			}
		}
		if err := j.Close(); err != nil {
			tb.Errorf("journaltest: close: %v", err)
		}
	})
	return j
}
