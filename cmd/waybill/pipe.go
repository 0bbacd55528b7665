package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

// untilReaderGone returns a context that ends when nobody reads the standard output any
// more: "waybill demo | head" must not leave a proxy behind. The signal comes for every
// broken connection of the process, too, so it only says when to look.
func untilReaderGone(parent context.Context) (context.Context, func()) {
	ctx, cancel := context.WithCancel(parent)
	pipes := make(chan os.Signal, 1)
	signal.Notify(pipes, syscall.SIGPIPE)
	go func() {
		for {
			select {
			case <-ctx.Done():
				return
			case <-pipes:
				if outputClosed() {
					cancel()
				}
			}
		}
	}()
	return ctx, func() {
		signal.Stop(pipes)
		cancel()
	}
}
