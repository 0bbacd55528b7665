// Package hooks holds the switches of the journal that only its own tests and
// package journaltest may touch: being internal to journal/, nothing else can
// build a value of it. A nil *Hooks is the production setting.
package hooks

// Hooks switches protections off or injects faults.
type Hooks struct {
	// NoSync turns the syncs of the witness and the directories off: fast, and worthless
	// after a power cut. Badger syncs its tables all the same.
	NoSync bool
	// NoWitness writes and compares no witness. A control: the tests of the
	// rollback cases must fail with it.
	NoWitness bool
	// NoChain skips the walk of the hash chain at start-up and in Verify. A
	// control: the tests of altered and missing events must fail with it.
	NoChain bool
	// FreeBytes, if not nil, stands for the file system's free space.
	FreeBytes func() int64
	// SegmentSlots is the number of units of a witness segment; 0: the default.
	SegmentSlots int
	// CheckpointEvery is the number of events between checkpoints; 0: the default.
	CheckpointEvery uint64

	// BeforeCommit runs on the committer when a group is complete and nothing of
	// it has been written.
	BeforeCommit func(group uint64)
	// StoreError, if not nil, may fail the store's commit: then nothing is put into it.
	StoreError func(group uint64) error
	// WitnessError may fail the witness's sync in the same way.
	WitnessError func(group uint64) error
	// CheckCache compares the committer's cache of open actions with the store at
	// every use and panics on a difference.
	CheckCache bool
}
