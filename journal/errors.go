package journal

import (
	"encoding/hex"
	"errors"
	"fmt"

	"waybill/dispatch"
)

var (
	// ErrLocked is returned by Open and Verify when another process holds the
	// folder. The error's text names its pid.
	ErrLocked = errors.New("journal: in use by another process")
	// ErrFilesystem: the folder is on a file system that does not keep what it
	// reports as synced, or is not known to.
	ErrFilesystem = errors.New("journal: unsupported file system")
	// ErrNoSpace wraps dispatch.ErrNotWritten: free space is below the floor (M5).
	ErrNoSpace = fmt.Errorf("%w: not enough free space", dispatch.ErrNotWritten)
	// ErrClosed wraps dispatch.ErrNotWritten: the journal was closed.
	ErrClosed = fmt.Errorf("%w: closed", dispatch.ErrNotWritten)
	// ErrReadOnly wraps dispatch.ErrNotWritten: the journal was opened for reading.
	ErrReadOnly = fmt.Errorf("%w: opened for reading", dispatch.ErrNotWritten)
	// ErrStopped wraps dispatch.ErrNotWritten: an earlier commit was indeterminate, or the
	// store failed, and this request came after it. Nothing of it was written (F9).
	ErrStopped = fmt.Errorf("%w: stopped after an indeterminate commit or a failure of the store", dispatch.ErrNotWritten)
	// errStoreFailed: the store lacks a group whose callers were told of it, and is not
	// read any more. It wraps no promise about what was or was not written (M7).
	errStoreFailed = errors.New("journal: the store has failed: nothing is read before the next start")
	// ErrTooLarge wraps dispatch.ErrNotWritten: a batch does not fit in one transaction.
	ErrTooLarge = fmt.Errorf("%w: batch is larger than a transaction", dispatch.ErrNotWritten)
	// ErrKey: the data key is missing, damaged, readable by others, or another journal's.
	ErrKey = errors.New("journal: data key")
	// ErrCorrupt is wrapped by every *CorruptError.
	ErrCorrupt = errors.New("journal: corrupt")
	// ErrFormat: the folder was written by a newer version.
	ErrFormat = errors.New("journal: format is newer than this program")
	// ErrOldFormat: the folder, or a backup, was written by a version that this one
	// cannot read.
	ErrOldFormat = errors.New("journal: format is older than this program reads: let the program that wrote it end its open actions, keep the folder for reference, and start with a new one")
)

// CorruptError says what is broken and where. Its text holds no recorded data.
type CorruptError struct {
	What   string            // fixed text
	Seq    uint64            // first sequence number affected; 0: not an event
	Action dispatch.ActionID // zero: not one action's
	Key    []byte            // of the store; nil: not a stored value
}

// Error names the first broken record.
func (e *CorruptError) Error() string {
	s := "journal: corrupt: " + e.What
	if e.Seq != 0 {
		s += fmt.Sprintf(", event %d", e.Seq)
	}
	if !e.Action.IsZero() {
		s += ", " + e.Action.String()
	}
	if e.Key != nil {
		s += ", key " + hex.EncodeToString(e.Key)
	}
	return s
}

// Unwrap returns ErrCorrupt.
func (e *CorruptError) Unwrap() error { return ErrCorrupt }

// storeError is an error of Badger without its text, which quotes keys and values
// (reference: journal durability, section 1).
type storeError struct{ op string }

func (e *storeError) Error() string { return "journal: store: " + e.op + " failed" }
