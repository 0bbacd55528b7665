//go:build !linux

package main

// protectMemory does nothing where there is no such call.
func protectMemory() {}

// noCoreDumps does nothing where there is no such call.
func noCoreDumps() {}

// inForeground is not known here: signals are passed on to the child, which may
// see one twice.
func inForeground() bool { return false }

// outputClosed cannot be told here: a broken pipe counts as the output's.
func outputClosed() bool { return true }
