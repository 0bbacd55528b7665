package control

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"path/filepath"
	"sort"
	"strconv"
	"strings"
	"testing"

	"waybill/docs"
	"waybill/internal/contract"
)

// TestControlsAreListed holds docs/controls.txt and the code together without
// running a control (`make controls` does): every group with a built rule has a
// control, every name in the code has a line, every line a name in the code and a
// package that exists.
func TestControlsAreListed(t *testing.T) {
	entries, err := parseEntries(docs.Controls)
	if err != nil {
		t.Fatal(err)
	}
	groups, err := contract.BuiltGroups()
	if err != nil {
		t.Fatal(err)
	}
	used, err := namesInCode("../..")
	if err != nil {
		t.Fatal(err)
	}
	for _, problem := range checkList(entries, groups, used) {
		t.Error(problem)
	}
	for _, e := range entries {
		if fi, err := os.Stat(filepath.Join("../..", e.Package)); err != nil || !fi.IsDir() {
			t.Errorf("docs/controls.txt:%d: there is no package %s", e.Line, e.Package)
		}
	}
}

// checkList returns what does not fit. used maps the names in the code to a place.
func checkList(entries []entry, groups []string, used map[string]string) []string {
	var out []string
	byGroup, byName := map[string]bool{}, map[string]bool{}
	built := map[string]bool{}
	for _, g := range groups {
		built[g] = true
	}
	for _, e := range entries {
		byGroup[e.Group], byName[e.Name] = true, true
		if !built[e.Group] {
			out = append(out, fmt.Sprintf("docs/controls.txt:%d: group %s has no built rule", e.Line, e.Group))
		}
		if _, ok := used[e.Name]; !ok {
			out = append(out, fmt.Sprintf("docs/controls.txt:%d: no code asks control.Off(%q)", e.Line, e.Name))
		}
	}
	for _, g := range groups {
		if !byGroup[g] {
			out = append(out, fmt.Sprintf("rule group %s has no control in docs/controls.txt", g))
		}
	}
	var lost []string
	for name, place := range used {
		if !byName[name] {
			lost = append(lost, fmt.Sprintf("%s: control %q has no line in docs/controls.txt", place, name))
		}
	}
	sort.Strings(lost)
	return append(out, lost...)
}

// namesInCode finds the names given to control.Off in the product's sources, and
// refuses one that is not a literal: a computed name could not be listed.
func namesInCode(root string) (map[string]string, error) {
	out := map[string]string{}
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && (d.Name() == "testdata" || strings.HasPrefix(d.Name(), ".") || strings.HasPrefix(d.Name(), "_")):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, ".go") || strings.HasSuffix(path, "_test.go"):
			return nil
		}
		fset := token.NewFileSet()
		file, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		var bad error
		ast.Inspect(file, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			sel, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || sel.Sel.Name != "Off" || len(call.Args) != 1 {
				return true
			}
			if x, ok := sel.X.(*ast.Ident); !ok || x.Name != "control" {
				return true
			}
			pos := fset.Position(call.Pos())
			rel, err := filepath.Rel(root, pos.Filename)
			if err != nil {
				rel = pos.Filename
			}
			place := fmt.Sprintf("%s:%d", filepath.ToSlash(rel), pos.Line)
			lit, ok := call.Args[0].(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				bad = fmt.Errorf("%s: the name of a control must be a literal", place)
				return true
			}
			if name, err := strconv.Unquote(lit.Value); err == nil {
				out[name] = place
			}
			return true
		})
		return bad
	})
	return out, err
}

func TestCheckList(t *testing.T) {
	entries := []entry{{Group: "F", Name: "F1-a", Line: 1}, {Group: "T", Name: "F1-a", Line: 2}}
	used := map[string]string{"F1-a": "x.go:1"}
	for name, tc := range map[string]struct {
		entries []entry
		groups  []string
		used    map[string]string
		want    string
	}{
		"all is well":                {entries, []string{"F", "T"}, used, ""},
		"a group without a control":  {entries, []string{"F", "T", "M"}, used, "rule group M has no control"},
		"a group without built rule": {entries, []string{"F"}, used, "group T has no built rule"},
		"a name nobody asks for":     {entries[:1], []string{"F"}, nil, `no code asks control.Off("F1-a")`},
		"a name without a line":      {entries, []string{"F", "T"}, map[string]string{"F1-a": "x.go:1", "F2-b": "x.go:2"}, `x.go:2: control "F2-b" has no line`},
	} {
		t.Run(name, func(t *testing.T) {
			got := checkList(tc.entries, tc.groups, tc.used)
			if tc.want == "" {
				if len(got) != 0 {
					t.Errorf("%q", got)
				}
				return
			}
			if len(got) != 1 || !strings.Contains(got[0], tc.want) {
				t.Errorf("%q, want one problem: %q", got, tc.want)
			}
		})
	}
}

func TestNamesInCode(t *testing.T) {
	dir := t.TempDir()
	write := func(text string) {
		t.Helper()
		if err := os.WriteFile(filepath.Join(dir, "x.go"), []byte("package x\n"+text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write(`func f() bool { return control.Off("F1-a") || other.Off("F1-b") }`)
	got, err := namesInCode(dir)
	if err != nil || len(got) != 1 || got["F1-a"] != "x.go:2" {
		t.Errorf("%v %v, want F1-a at x.go:2", got, err)
	}
	write(`func f(n string) bool { return control.Off(n) }`)
	if _, err := namesInCode(dir); err == nil {
		t.Error("a computed name was accepted")
	}
}
