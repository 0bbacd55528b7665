package main

import (
	"errors"
	"fmt"
	"io"
	"strings"
)

// exitCode is what the process tells its supervisor. The numbers are part of the
// command-line surface (docs/cli.md).
type exitCode int

// The exit codes. "waybill run" passes its child's code on, which is why its own
// failures use the numbers that shells and container tools reserve for wrappers.
const (
	exitOK             exitCode = 0
	exitFailure        exitCode = 1 // could not do it; for demo: a line is not as the contract says
	exitUsage          exitCode = 2 // unknown command or flag, wrong arguments
	exitConfig         exitCode = 3 // configuration or environment refused: do not restart
	exitNotFound       exitCode = 4 // no such action, which is no permission to repeat (CONTRACT M7)
	exitNoResult       exitCode = 5 // the action has no complete result; its envelope was printed (H10)
	exitJournalDamaged exitCode = 6 // verification found damage, or the store is behind its witness (M5): do not restart
	exitUnavailable    exitCode = 7 // neither a running proxy nor a journal that can be opened
	exitJournalStopped exitCode = 8 // indeterminate commit: restart, the journal is read again at start (M5)

	exitRunFailed     exitCode = 125 // waybill run could not prepare the command
	exitCannotExecute exitCode = 126 // the command of waybill run cannot be executed
	exitNoSuchCommand exitCode = 127 // the command of waybill run does not exist
	exitSignalBase    exitCode = 128 // plus the number of the signal that ended the child
)

// codedError carries an exit code to main. quiet: everything was said already.
type codedError struct {
	code  exitCode
	err   error
	quiet bool
}

func (e *codedError) Error() string { return e.err.Error() }
func (e *codedError) Unwrap() error { return e.err }

// fail returns an error with an exit code.
func fail(code exitCode, format string, args ...any) error {
	return &codedError{code: code, err: fmt.Errorf(format, args...)}
}

// exitWith returns an error that only sets the exit code: the command has
// printed what there is to say.
func exitWith(code exitCode) error {
	return &codedError{code: code, err: fmt.Errorf("exit code %d", code), quiet: true}
}

func usageError(err error) error {
	var coded *codedError
	if errors.As(err, &coded) {
		return err
	}
	return &codedError{code: exitUsage, err: fmt.Errorf("%w\nRun \"waybill --help\", or \"waybill COMMAND --help\", for what there is", err)}
}

// report prints err, if there is one to print, and returns the exit code.
func report(stderr io.Writer, err error) exitCode {
	if err == nil {
		return exitOK
	}
	code := exitFailure
	var coded *codedError
	if errors.As(err, &coded) {
		code = coded.code
		if coded.quiet {
			return code
		}
	}
	_, _ = fmt.Fprintf(stderr, "waybill: %s\n", strings.ReplaceAll(err.Error(), "\n", "\n  "))
	return code
}
