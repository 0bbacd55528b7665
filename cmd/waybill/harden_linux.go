package main

import (
	"os"

	"golang.org/x/sys/unix"
)

// protectMemory keeps the process's memory from debuggers and core dumps of the
// same user (CONTRACT C2): secrets pass through it. Children are not affected,
// since exec sets the flag again.
func protectMemory() {
	// It fails on kernels that do not know it, which are older than Go supports.
	_ = unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0)
}

// noCoreDumps forbids core files, for this process and its children.
func noCoreDumps() {
	_ = unix.Setrlimit(unix.RLIMIT_CORE, &unix.Rlimit{})
}

// inForeground reports whether the terminal sends its signals to this process
// group, and so to the child too.
func inForeground() bool {
	tty, err := os.OpenFile("/dev/tty", os.O_RDWR, 0)
	if err != nil {
		return false
	}
	defer func() { _ = tty.Close() }()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}

// outputClosed reports whether the reader of the standard output is gone.
func outputClosed() bool {
	fds := []unix.PollFd{{Fd: 1}}
	n, err := unix.Poll(fds, 0)
	return err == nil && n == 1 && fds[0].Revents&unix.POLLERR != 0
}
