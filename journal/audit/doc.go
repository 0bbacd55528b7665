// Package audit is a log of every transition of the journal, chained by hashes and
// sealed to a public key: the process that writes it cannot read it back (CONTRACT
// N1, N2). It owns the files of its folder; FORMAT.md in package journal has their
// bytes.
//
// It promises: what is in the log was written after it was durable in the journal, in
// the journal's order, each event once; what it could not write is a gap that is
// named; a record that was altered, removed from the middle or reordered is found
// without any key. A log that was cut at its end, or replaced as a whole, is found by
// whoever holds a checkpoint. It assumes that one process at a time writes, which a
// lock makes sure, and that a completed fsync is on stable storage.
//
// It follows the journal by a cursor that is the end of the log itself, and is on no
// request's way (N5).
package audit
