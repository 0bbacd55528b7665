// Package journal is the durable memory of Waybill: it implements
// dispatch.Journal on an embedded Badger store and a second witness beside it.
//
// # What it owns
//
// One folder: a lock, a data key, the store and the witness segments. FORMAT.md
// describes every byte. Nothing else writes there; one process at a time does.
//
// # What it promises
//
//   - An Append that returned nil is durable: the witness's sync has completed (CONTRACT
//     F1). The store follows, and is not read without what it does not have yet (M7).
//   - An Append that failed says whether that is certain (ErrNotWritten) or not
//     (ErrIndeterminate) (F9). After an indeterminate commit nothing is written any
//     more, Poisoned is closed, and the process has to end (M5).
//   - Sequence numbers have no hole; events are chained by hash; every value is
//     sealed under the data key and bound to its place (M1, M3).
//   - The state of an action is what dispatch.Apply makes of its events, never
//     anything else (M1, M2); Verify rebuilds and compares.
//   - A store that is behind its witness is never taken for the whole history: Open
//     goes into quarantine, or refuses (M5). An absent action is never evidence (M7).
//
// # What it assumes
//
// Linux; a local file system that keeps what fdatasync, fsync and msync said it has;
// sectors of 512 bytes that are written whole or not at all. A rollback of the whole
// folder, witness included, is not visible from inside.
package journal
