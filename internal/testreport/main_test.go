package main

import (
	"bytes"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// module writes a module whose packages end in every way go test knows, and makes
// it the working directory.
func module(t *testing.T) {
	t.Helper()
	dir := t.TempDir()
	const head = "\nimport \"testing\"\n"
	for name, text := range map[string]string{
		"go.mod":             "module example.test/m\n\ngo 1.26.0\n",
		"good/good_test.go":  "package good" + head + "func TestA(t *testing.T) { t.Run(\"sub\", func(t *testing.T) { t.Log(\"quiet\") }) }\n",
		"bad/bad_test.go":    "package bad" + head + "func TestGood(t *testing.T) { t.Log(\"not to be seen\") }\nfunc TestBad(t *testing.T) { t.Run(\"sub\", func(t *testing.T) { t.Error(\"the reason\") }) }\n",
		"skip/skip_test.go":  "package skip" + head + "func TestA(t *testing.T) {}\nfunc TestB(t *testing.T) { t.Skip(\"a tool is missing\") }\n",
		"panics/p_test.go":   "package panics" + head + "func TestA(t *testing.T) {}\nfunc TestB(t *testing.T) { c := make(chan int); go func() { panic(\"elsewhere\") }(); <-c }\n",
		"exits/e_test.go":    "package exits\nimport (\"os\"; \"testing\")\nfunc TestMain(m *testing.M) { m.Run(); os.Exit(7) }\nfunc TestA(t *testing.T) {}\n",
		"broken/b_test.go":   "package broken" + head + "func TestA(t *testing.T) { doesNotCompile() }\n",
		"hangs/h_test.go":    "package hangs" + head + "func TestA(t *testing.T) { select {} }\n",
		"notests/notests.go": "package notests\n",
		"vet/vet_test.go":    "package vet\nimport (\"fmt\"; \"testing\")\nfunc TestA(t *testing.T) { fmt.Printf(\"%d\\n\", \"x\") }\n",
		"race/race_test.go":  "package race" + head + "func TestA(t *testing.T) { n := 0; c := make(chan int); go func() { n++; c <- 1 }(); n++; <-c; _ = n }\n",
		"empty/empty_test.go": "package empty" + head +
			"func helper(t *testing.T) {}\nvar _ = helper\n",
	} {
		p := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	t.Chdir(dir)
}

func TestReport(t *testing.T) {
	module(t)
	for _, tc := range []struct {
		name  string
		args  []string
		code  int
		close string // the closing line
		says  []string
		not   []string
	}{
		{"all pass", []string{"./good", "./notests"}, 0, "2 passed, 0 failed", []string{"ok  ", "example.test/m/good", "Time per package:"}, []string{"quiet"}},
		{"a failure is shown, a success is not", []string{"./good", "./bad"}, 1, "3 passed, 2 failed", []string{"the reason", "---- example.test/m/bad TestBad/sub"}, []string{"not to be seen"}},
		{"a skip is no success", []string{"./skip"}, 1, "1 passed, 0 failed, 1 skipped", []string{"example.test/m/skip TestB"}, nil},
		{"a panic outside the test", []string{"./panics"}, 1, "1 passed, 1 failed", []string{"panic: elsewhere", "TestB (did not end)"}, nil},
		{"a failure outside the tests", []string{"./exits"}, 1, "1 passed, 1 failed", []string{"FAIL\texample.test/m/exits"}, nil},
		{"a build that fails", []string{"./good", "./broken"}, 1, "2 passed, 1 failed", []string{"doesNotCompile"}, nil},
		{"vet", []string{"./vet"}, 1, "0 passed, 1 failed", []string{"wrong type string"}, nil},
		{"a time-out", []string{"-timeout=1s", "./hangs"}, 1, "0 passed, 1 failed", []string{"test timed out", "TestA (did not end)"}, nil},
		{"a race", []string{"-race", "./race"}, 1, "0 passed, 1 failed", []string{"DATA RACE"}, nil},
		{"nothing ran", []string{"./empty", "./notests"}, 1, "0 passed, 0 failed", nil, nil},
		{"no such package", []string{"./absent"}, 1, "0 passed, 1 failed", nil, nil},
		{"a wrong flag of go test", []string{"-nosuchflag", "./good"}, 1, "0 passed, 1 failed", nil, nil},
		{"no contract here", []string{"-contract", "./good"}, 1, "2 passed, 1 failed", []string{"== rules that executed tests cover"}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			var out, errs bytes.Buffer
			args := tc.args
			if args[0] != "-contract" {
				args = append([]string{"--"}, args...)
			}
			if code := run(t.Context(), args, &out, &errs); code != tc.code {
				t.Errorf("exit status %d, want %d", code, tc.code)
			}
			text := out.String()
			if !strings.HasSuffix(text, "\n"+tc.close+"\n") {
				t.Errorf("the closing line is not %q", tc.close)
			}
			for _, s := range tc.says {
				if !strings.Contains(text, s) {
					t.Errorf("it does not say %q", s)
				}
			}
			for _, s := range tc.not {
				if strings.Contains(text, s) {
					t.Errorf("it says %q", s)
				}
			}
			if t.Failed() {
				t.Logf("output:\n%s%s", text, errs.String())
			}
		})
	}
}

// TestClaimsReachTheNextStep sees that the tests get a directory for their claims,
// the check afterwards the same one, and that it is gone at the end.
func TestClaimsReachTheNextStep(t *testing.T) {
	steps, cleanup, err := plan([]string{"./x"}, true, true)
	if err != nil {
		t.Fatal(err)
	}
	if len(steps) != 3 || len(steps[0].env) != 1 || len(steps[1].env) != 1 {
		t.Fatalf("%+v", steps)
	}
	dir := regexp.MustCompile(`^WAYBILL_CONTRACT_DIR=(.+)$`).FindStringSubmatch(steps[0].env[0])
	if dir == nil || steps[1].env[0] != "WAYBILL_CONTRACT_EXECUTED="+dir[1] {
		t.Fatalf("the tests get %q, the check %q", steps[0].env, steps[1].env)
	}
	if fi, err := os.Stat(dir[1]); err != nil || !fi.IsDir() {
		t.Errorf("%v", err)
	}
	cleanup()
	if _, err := os.Stat(dir[1]); err == nil {
		t.Error("the directory is left behind")
	}
}
