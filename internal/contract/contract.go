// Package contract ties tests to the numbered rules of docs/contract.md.
//
// A test says which rules it goes red for:
//
//	contract.Covers(t, "F1", "F9")
//
// Only tests that ran and passed count: Covers writes its claim when the test is
// over, into the directory that DirEnv names. `make test` sets it, and afterwards
// runs TestContractCoverage with ExecutedEnv on the same directory. Without these
// variables Covers only checks the rule numbers, and TestContractCoverage reads
// the claims from the sources.
//
// The package is imported by tests only; internal/deps sees to it.
package contract

import (
	"fmt"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"testing"
)

const (
	// DirEnv names the directory into which Covers writes its claims, one file a
	// process. Unset or empty: claims are not kept.
	DirEnv = "WAYBILL_CONTRACT_DIR"
	// ExecutedEnv names such a directory to TestContractCoverage, which then asks
	// for claims of tests that ran instead of claims found in the sources.
	ExecutedEnv = "WAYBILL_CONTRACT_EXECUTED"
)

// Covers records that the running test goes red when one of the rules is broken.
// Rules are numbers such as "F1"; an unknown one, or none, fails the test at once.
// The claim counts when the test, with its subtests, has passed. It may be called
// from parallel tests.
func Covers(t testing.TB, rules ...string) {
	t.Helper()
	if err := known(rules); err != nil {
		t.Fatal(err)
	}
	dir, name := os.Getenv(DirEnv), t.Name()
	if dir == "" {
		return
	}
	t.Cleanup(func() {
		if t.Failed() || t.Skipped() {
			return
		}
		if err := record(dir, name, rules); err != nil {
			t.Errorf("contract: the claim of %s is lost: %v", name, err)
		}
	})
}

// known returns an error unless every one of rules is a rule, and there is one.
func known(rules []string) error {
	if len(rules) == 0 {
		return fmt.Errorf("contract: Covers names no rule")
	}
	if _, err := Rules(); err != nil {
		return err
	}
	for _, r := range rules {
		if _, ok := Lookup(r); !ok {
			return fmt.Errorf("contract: %q is no rule of docs/contract.md", r)
		}
	}
	return nil
}

// recording serialises the claims of one process; the files of several are apart.
var recording sync.Mutex

// record appends one line a rule to this process's file, in one write.
func record(dir, test string, rules []string) error {
	var b strings.Builder
	for _, r := range rules {
		fmt.Fprintf(&b, "%s\t%s\t%s\n", r, testPackage(), test)
	}
	recording.Lock()
	defer recording.Unlock()
	f, err := os.OpenFile(filepath.Join(dir, fmt.Sprintf("%d.claims", os.Getpid())), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteString(b.String())
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

// testPackage is the import path of the package under test, as far as the test
// binary knows it. It is for people: failures name it.
var testPackage = sync.OnceValue(func() string {
	if bi, ok := debug.ReadBuildInfo(); ok && bi.Path != "" {
		return strings.TrimSuffix(bi.Path, ".test")
	}
	return strings.TrimSuffix(filepath.Base(os.Args[0]), ".test")
})
