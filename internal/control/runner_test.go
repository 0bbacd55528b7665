package control

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// TestRunner shows that the runner tells a control that works from every way of not
// working: a control that cannot fail would prove nothing.
func TestRunner(t *testing.T) {
	const fixture = "./internal/control/testdata/fixture"
	r := newRunner("../..", t.TempDir(), 4*time.Second)
	for _, tc := range []struct {
		name  string
		entry entry
		want  string // part of the error; empty: none
	}{
		{"a test goes red", entry{Group: "F", Name: "F1-clean", Package: fixture, Run: "^TestClean$"}, ""},
		{"a subtest goes red", entry{Group: "F", Name: "F1-clean", Package: fixture, Run: "^TestCleanInASubtest$"}, ""},
		{"the test panics", entry{Group: "F", Name: "F1-crash", Package: fixture, Run: "^TestCrash$"}, ""},
		{"nothing tests it", entry{Group: "F", Name: "F1-untested", Package: fixture, Run: "^TestUntested$"}, "stay green"},
		{"the code does not ask for it", entry{Group: "F", Name: "F1-misspelt", Package: fixture, Run: "^TestClean$"}, "stay green"},
		{"the red test claims nothing", entry{Group: "F", Name: "F1-clean", Package: fixture, Run: "^(TestCleanWithoutAClaim|TestUntested)$"}, "only TestUntested claim"},
		{"the group is another", entry{Group: "G", Name: "F1-clean", Package: fixture, Run: "^TestClean$"}, "claims a rule of group G"},
		{"no claim at all", entry{Group: "F", Name: "F1-clean", Package: fixture, Run: "^TestCleanWithoutAClaim$"}, "claims a rule of group F"},
		{"it crashes elsewhere", entry{Group: "F", Name: "F1-crash-elsewhere", Package: fixture, Run: "^TestCrashElsewhere$"}, "no test failed"},
		{"it exits", entry{Group: "F", Name: "F1-exit", Package: fixture, Run: "^TestExit$"}, "no test failed"},
		{"it hangs", entry{Group: "F", Name: "F1-hang", Package: fixture, Run: "^TestHang$"}, "hang"},
		{"red with the protection on", entry{Group: "F", Name: "F1-clean", Package: fixture, Run: "^(TestClean|TestAlwaysRed)$"}, "with every protection on: the tests"},
		{"no test", entry{Group: "F", Name: "F1-clean", Package: fixture, Run: "^TestAbsent$"}, "no test of"},
		{"it does not build", entry{Group: "F", Name: "F1-clean", Package: "./internal/control/testdata/broken", Run: "^TestBroken$"}, "do not build"},
		{"no tests in the package", entry{Group: "F", Name: "F1-clean", Package: "./internal/control/testdata/probe", Run: "^TestBroken$"}, "has no tests"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			err := r.Run(t.Context(), tc.entry)
			switch {
			case tc.want == "" && err != nil:
				t.Error(err)
			case tc.want != "" && err == nil:
				t.Error("the runner was content")
			case tc.want != "" && !strings.Contains(err.Error(), tc.want):
				t.Errorf("the error does not say %q:\n%v", tc.want, err)
			}
		})
	}
}

// TestNormalBuildHasNoControls looks for the name of a control in binaries built
// with and without the tag.
func TestNormalBuildHasNoControls(t *testing.T) {
	for tags, want := range map[string]bool{"": false, "waybill_controls": true} {
		out := filepath.Join(t.TempDir(), "probe")
		cmd := exec.CommandContext(t.Context(), "go", "build", "-tags", tags, "-o", out, "./testdata/probe")
		if msg, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%v\n%s", err, msg)
		}
		bin, err := os.ReadFile(out)
		if err != nil {
			t.Fatal(err)
		}
		if got := strings.Contains(string(bin), "F1-name-in-the-binary"); got != want {
			t.Errorf("built with tags %q: the name is in the binary: %v, want %v", tags, got, want)
		}
	}
}

func TestParseEntriesRefuses(t *testing.T) {
	got, err := parseEntries("# comment\n\nF F1-a-b ./dispatch ^TestX$\nT F1-a-b ./cmd/waybill TestY\n")
	if err != nil || len(got) != 2 || got[1] != (entry{Group: "T", Name: "F1-a-b", Package: "./cmd/waybill", Run: "TestY", Line: 4}) {
		t.Fatalf("%v %v", got, err)
	}
	for name, line := range map[string]string{
		"a word missing":   "F F1-a ./dispatch",
		"a group of two":   "FF F1-a ./dispatch T",
		"no words":         "F F1 ./dispatch T",
		"an unknown rule":  "F F99-a ./dispatch T",
		"capitals":         "F F1-A ./dispatch T",
		"a full path":      "F F1-a waybill/dispatch T",
		"upwards":          "F F1-a ./../x T",
		"a bad expression": "F F1-a ./dispatch (",
		"twice":            "F F1-a ./dispatch T\nF F1-a ./dispatch T",
	} {
		if got, err := parseEntries(line); err == nil {
			t.Errorf("%s: accepted as %v", name, got)
		}
	}
}
