// Command testreport runs the project's tests and reports on them: a line for each
// package, failures in full, the time per package, the slowest tests and a closing
// line "N passed, N failed". It runs go test itself, so that no pipe hides an exit
// status; its own is 0 only if every test passed and none was skipped.
//
// Usage:
//
//	testreport [-contract] [-controls] [-slowest N] [arguments of go test]
//
// With -contract the tests leave their claims (contract.Covers) in a directory, and
// TestContractCoverage checks them afterwards. With -controls the controls of
// docs/controls.txt are run last.
package main

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"time"

	"waybill/internal/contract"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	stop()
	os.Exit(code)
}

// step is one run of go test.
type step struct {
	title string
	args  []string
	env   []string
}

// run returns the exit status: 0 all passed, 1 something did not, 2 wrong usage.
func run(ctx context.Context, args []string, stdout, stderr io.Writer) int {
	fs := flag.NewFlagSet("testreport", flag.ContinueOnError)
	fs.SetOutput(stderr)
	withContract := fs.Bool("contract", false, "check which rules the tests that passed cover")
	withControls := fs.Bool("controls", false, "run the controls of docs/controls.txt")
	slowest := fs.Int("slowest", 10, "number of slow tests to list")
	if err := fs.Parse(args); err != nil {
		return 2
	}
	steps, cleanup, err := plan(fs.Args(), *withContract, *withControls)
	if err != nil {
		fmt.Fprintln(stderr, "testreport:", err)
		return 2
	}
	defer cleanup()

	rep := newReport(stdout)
	begin := time.Now()
	var times []timing
	for _, s := range steps {
		fmt.Fprintf(stdout, "\n== %s\n", s.title)
		start, before := time.Now(), rep.failed
		err := goTest(ctx, s, rep, stderr)
		rep.finish()
		if err != nil && rep.failed == before {
			rep.failed++ // go test failed and no event says why
			fmt.Fprintf(stdout, "FAIL %s: %v\n", s.title, err)
		}
		times = append(times, timing{name: s.title, took: time.Since(start)})
		if ctx.Err() != nil {
			break
		}
	}
	fmt.Fprintln(stdout, "\nTime per step, builds included:")
	for _, t := range append(times, timing{name: "together", took: time.Since(begin)}) {
		fmt.Fprintf(stdout, "  %7.2fs  %s\n", t.took.Seconds(), t.name)
	}
	rep.summary(*slowest)
	if !rep.ok() {
		return 1
	}
	return 0
}

// plan returns the runs of go test, and what removes their directory.
func plan(args []string, withContract, withControls bool) (steps []step, cleanup func(), err error) {
	cleanup = func() {}
	tests := step{title: "tests", args: args}
	var after []step
	if withContract {
		dir, err := os.MkdirTemp("", "waybill-contract-")
		if err != nil {
			return nil, nil, err
		}
		cleanup = func() { _ = os.RemoveAll(dir) } // a temp folder, of no use to anyone
		tests.env = []string{contract.DirEnv + "=" + dir}
		after = append(after, step{
			title: "rules that executed tests cover",
			args:  []string{"-count=1", "-run=^TestContractCoverage$", "./internal/contract"},
			env:   []string{contract.ExecutedEnv + "=" + dir},
		})
	}
	if withControls {
		after = append(after, step{
			title: "controls",
			args:  []string{"-count=1", "-timeout=15m", "-tags=waybill_controls", "-run=^TestControls$", "./internal/control"},
		})
	}
	return append([]step{tests}, after...), cleanup, nil
}

// goTest runs one step to its end and returns what go test ended with.
func goTest(ctx context.Context, s step, rep *report, stderr io.Writer) error {
	cmd := exec.CommandContext(ctx, "go", append([]string{"test", "-json"}, s.args...)...)
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 20 * time.Second
	cmd.Env = append(os.Environ(), s.env...)
	cmd.Stderr = stderr
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	readErr := rep.read(out)
	if _, err := io.Copy(io.Discard, out); err != nil && readErr == nil {
		readErr = err
	}
	return errors.Join(cmd.Wait(), readErr)
}

// lines calls f for each line of any length.
func lines(in io.Reader, f func([]byte)) error {
	br := bufio.NewReaderSize(in, 64<<10)
	for {
		line, err := br.ReadBytes('\n')
		if line = bytes.TrimRight(line, "\r\n"); len(line) > 0 {
			f(line)
		}
		if errors.Is(err, io.EOF) {
			return nil
		}
		if err != nil {
			return err
		}
	}
}
