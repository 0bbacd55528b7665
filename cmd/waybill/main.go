// Command waybill is a forward HTTP proxy for agents: it attaches the secrets
// that they must not hold, and its journal proves what happened to each request.
//
// main only maps an error to an exit code; run does everything else, so that
// tests can call it. One file holds one subcommand; serve.go is the only place
// where the packages are wired together.
package main

import (
	"context"
	"io"
	"os"
)

func main() {
	err := run(context.Background(), os.Args[1:], os.Stdin, os.Stdout, os.Stderr)
	os.Exit(int(report(os.Stderr, err)))
}

// run executes one command line. It neither exits nor prints the error it
// returns: see report.
func run(ctx context.Context, args []string, stdin io.Reader, stdout, stderr io.Writer) error {
	a := &app{stdin: stdin, stdout: stdout, stderr: stderr, environ: os.Environ()}
	// A command tree that was not entered can only have failed to parse.
	root := newRoot(a)
	root.SetArgs(args)
	err := root.ExecuteContext(ctx)
	if err != nil && !a.entered {
		return usageError(err)
	}
	return err
}
