package main

import (
	"os"
	"syscall"
	"testing"
	"time"
)

// A broken connection of the process is no reason to stop as long as somebody reads the
// output: SIGPIPE comes for both.
func TestReaderIsNotGone(t *testing.T) {
	ctx, stop := untilReaderGone(t.Context())
	defer stop()
	for range 3 {
		if err := syscall.Kill(os.Getpid(), syscall.SIGPIPE); err != nil {
			t.Fatal(err)
		}
	}
	select {
	case <-ctx.Done():
		t.Error("stopped although the output is read")
	case <-time.After(100 * time.Millisecond): // that nothing happens takes a while to see
	}
}
