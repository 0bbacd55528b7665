package main

import (
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

// TestMain makes the test binary act as waybill where a script, or the demo,
// starts it under that name.
func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"waybill": main})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir:                 "testdata/script",
		RequireExplicitExec: true,
		Setup: func(e *testscript.Env) error {
			e.Setenv("HOME", e.WorkDir+"/home")
			e.Setenv("WAYBILL_DATA", e.WorkDir+"/data")
			e.Setenv("NO_COLOR", "1")
			e.Setenv("SHELL", "/bin/sh")
			return os.Mkdir(e.WorkDir+"/home", 0o700)
		},
		Cmds: map[string]func(ts *testscript.TestScript, neg bool, args []string){
			// exit CODE CMD…: runs a command and asserts its exit code.
			"exit": scriptExit,
		},
	})
}
