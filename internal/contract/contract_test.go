package contract

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
)

// fakeTB stands for a test whose end the real one decides.
type fakeTB struct {
	testing.TB
	name            string
	failed, skipped bool
	fatal           string
	cleanups        []func()
}

func (f *fakeTB) Helper()                   {}
func (f *fakeTB) Name() string              { return f.name }
func (f *fakeTB) Failed() bool              { return f.failed }
func (f *fakeTB) Skipped() bool             { return f.skipped }
func (f *fakeTB) Cleanup(fn func())         { f.cleanups = append(f.cleanups, fn) }
func (f *fakeTB) Errorf(s string, a ...any) { f.failed, f.fatal = true, fmt.Sprintf(s, a...) }
func (f *fakeTB) Fatal(a ...any)            { f.failed, f.fatal = true, fmt.Sprint(a...); panic(f) }
func (f *fakeTB) end() {
	for _, fn := range slices.Backward(f.cleanups) {
		fn()
	}
}

// run calls Covers as a test that then ends.
func (f *fakeTB) run(rules ...string) {
	defer func() {
		if r := recover(); r != nil && r != any(f) {
			panic(r)
		}
		f.end()
	}()
	Covers(f, rules...)
}

func TestCoversCountsOnlyTestsThatPassed(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(DirEnv, dir)

	(&fakeTB{name: "TestFails"}).runThen(func(f *fakeTB) { f.failed = true }, "F1")
	(&fakeTB{name: "TestSkips"}).runThen(func(f *fakeTB) { f.skipped = true }, "F2")
	if _, err := ReadClaims(dir); err == nil {
		t.Fatal("a failed or skipped test left a claim")
	}
	f := &fakeTB{name: "TestPasses/sub"}
	f.run("F10", "A1")
	claims, err := ReadClaims(dir)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"F10", "A1"}
	if len(claims) != 2 || claims[0].Rule != want[0] || claims[1].Rule != want[1] {
		t.Fatalf("claims %+v, want %v", claims, want)
	}
	if want := "waybill/internal/contract TestPasses/sub"; claims[0].Test != want {
		t.Errorf("the claim is of %q, want %q", claims[0].Test, want)
	}
}

// runThen is run with a change of state between the claim and the end.
func (f *fakeTB) runThen(then func(*fakeTB), rules ...string) {
	Covers(f, rules...)
	then(f)
	f.end()
}

func TestCoversRefusesUnknownRulesAtOnce(t *testing.T) {
	for _, rules := range [][]string{{}, {"F1", "F99"}, {"f1"}, {"F01"}, {"Z1"}, {""}, {" F1"}} {
		t.Run(strings.Join(rules, ","), func(t *testing.T) {
			dir := t.TempDir()
			t.Setenv(DirEnv, dir)
			f := &fakeTB{name: "TestX"}
			f.run(rules...)
			if f.fatal == "" {
				t.Error("Covers accepted it")
			}
			if _, err := ReadClaims(dir); err == nil {
				t.Error("a claim was written")
			}
		})
	}
	t.Run("without a directory", func(t *testing.T) {
		t.Setenv(DirEnv, "")
		f := &fakeTB{name: "TestX"}
		f.run("F99")
		if f.fatal == "" {
			t.Error("Covers accepted it")
		}
	})
}

func TestALostClaimFailsTheTest(t *testing.T) {
	t.Setenv(DirEnv, filepath.Join(t.TempDir(), "absent"))
	f := &fakeTB{name: "TestX"}
	f.run("F1")
	if !strings.Contains(f.fatal, "lost") {
		t.Errorf("the test did not fail for its lost claim: %q", f.fatal)
	}
}

func TestCoversFromManyTestsAtOnce(t *testing.T) {
	dir := t.TempDir()
	t.Setenv(DirEnv, dir)
	var wg sync.WaitGroup
	const tests = 64
	for i := range tests {
		wg.Go(func() { (&fakeTB{name: fmt.Sprintf("Test%d", i)}).run("F1", "F2", "F3") })
	}
	wg.Wait()
	claims, err := ReadClaims(dir)
	if err != nil {
		t.Fatal(err)
	}
	if len(claims) != 3*tests {
		t.Errorf("%d claims, want %d", len(claims), 3*tests)
	}
}

func TestReadClaims(t *testing.T) {
	dir := t.TempDir()
	for name, text := range map[string]string{"1.claims": "F1\tp\tTestA\n", "2.claims": "F2\tp\tTestB\nF3\tp\tTestB\n", "other": "not read"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	claims, err := ReadClaims(dir)
	if err != nil || len(claims) != 3 {
		t.Fatalf("%v %v, want three claims", claims, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "3.claims"), []byte("torn"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ReadClaims(dir); err == nil {
		t.Error("a torn claim was accepted")
	}
}

func TestSourceClaims(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		p := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(p), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("a/a_test.go", "package a\nimport (\"testing\"; \"waybill/internal/contract\")\nfunc TestA(t *testing.T) { contract.Covers(t, \"F1\", \"Q1\"); _ = \"F2\" }\n")
	write("a/b_test.go", "package a\nimport (\"testing\"; \"waybill/internal/contract\")\nvar rules = []string{\"G1\"}\nfunc TestB(t *testing.T) { contract.Covers(t, rules...) }\n")
	write("a/c_test.go", "package a\nimport \"testing\"\nfunc TestC(t *testing.T) { other.Covers(t, \"F3\") }\n")
	write("a/d.go", "package a\nimport \"waybill/internal/contract\"\nvar _ = contract.Covers(nil, \"F5\")\n")
	write("a/testdata/e_test.go", "package a\nimport \"waybill/internal/contract\"\nvar _ = contract.Covers(nil, \"F6\")\n")
	claims, err := SourceClaims(root)
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]Claim{}
	for _, c := range claims {
		got[c.Rule] = c
	}
	if len(got) != 3 || got["F1"].Loose || got["F1"].Test != "a/a_test.go:3" || got["Q1"].Test == "" || !got["G1"].Loose {
		t.Errorf("claims %+v, want F1 and Q1 in a_test.go and a loose G1", claims)
	}
}

func TestCheck(t *testing.T) {
	rules := []Rule{{Number: "A1", Text: "one"}, {Number: "A2", Text: "two"}, {Number: "A3", Text: "three"}}
	unbuilt := map[string]string{"A3": "later"}
	for name, tc := range map[string]struct {
		claims []Claim
		want   []string // parts of the problems, in order
	}{
		"all is well":             {[]Claim{{Rule: "A1"}, {Rule: "A2"}}, nil},
		"a gap":                   {[]Claim{{Rule: "A1"}}, []string{"A2 is covered by no test"}},
		"covered after all":       {[]Claim{{Rule: "A1"}, {Rule: "A2"}, {Rule: "A3", Test: "p TestX"}}, []string{"covered by p TestX"}},
		"an unknown rule":         {[]Claim{{Rule: "A1"}, {Rule: "A2"}, {Rule: "A4", Test: "p TestX"}}, []string{`"A4" is no rule`}},
		"a loose one covers":      {[]Claim{{Rule: "A1", Loose: true}, {Rule: "A2"}}, nil},
		"a loose one accuses not": {[]Claim{{Rule: "A1"}, {Rule: "A2"}, {Rule: "A3", Loose: true}}, nil},
		"nothing ran":             {nil, []string{"A1", "A2"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := Check(rules, unbuilt, tc.claims)
			if len(got) != len(tc.want) {
				t.Fatalf("%q, want %d problems", got, len(tc.want))
			}
			for i, part := range tc.want {
				if !strings.Contains(got[i], part) {
					t.Errorf("%q does not say %q", got[i], part)
				}
			}
		})
	}
}
