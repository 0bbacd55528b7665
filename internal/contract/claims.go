package contract

import (
	"bufio"
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
)

// Claim says that a test covers a rule.
type Claim struct {
	Rule string
	Test string // "package TestName", or "file:line" when read from the sources
	// Loose marks a claim read from the sources that is only probable: the rule
	// stands as a literal in a test file that calls Covers with computed arguments.
	Loose bool
}

// ReadClaims reads what Covers wrote into dir. An empty directory is an error: it
// means that no test with a claim ran. Claims of unknown rules are returned too.
func ReadClaims(dir string) ([]Claim, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.claims"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("contract: no claim in %s: no test that calls contract.Covers has passed there", dir)
	}
	var out []Claim
	for _, name := range files {
		f, err := os.Open(name)
		if err != nil {
			return nil, err
		}
		sc := bufio.NewScanner(f)
		for n := 1; sc.Scan(); n++ {
			cells := strings.Split(sc.Text(), "\t")
			if len(cells) != 3 {
				f.Close()
				return nil, fmt.Errorf("contract: %s:%d: not a claim: %q", name, n, sc.Text())
			}
			out = append(out, Claim{Rule: cells[0], Test: cells[1] + " " + cells[2]})
		}
		err = sc.Err()
		f.Close()
		if err != nil {
			return nil, fmt.Errorf("contract: %s: %w", name, err)
		}
	}
	return out, nil
}

// SourceClaims reads the claims from the test files under root without running
// them. It proves less than ReadClaims: a test that is written but does not run, or
// fails, is seen all the same. Folders named testdata are left out.
func SourceClaims(root string) ([]Claim, error) {
	var out []Claim
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && path != root && (d.Name() == "testdata" || strings.HasPrefix(d.Name(), ".") || strings.HasPrefix(d.Name(), "_")):
			return fs.SkipDir
		case d.IsDir() || !strings.HasSuffix(path, "_test.go"):
			return nil
		}
		rel, err := filepath.Rel(root, path)
		if err != nil {
			return err
		}
		claims, err := fileClaims(path, filepath.ToSlash(rel))
		out = append(out, claims...)
		return err
	})
	return out, err
}

func fileClaims(path, name string) ([]Claim, error) {
	fset := token.NewFileSet()
	file, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	imported := false
	for _, imp := range file.Imports {
		if p, err := strconv.Unquote(imp.Path.Value); err == nil && strings.HasSuffix(p, "/internal/contract") && imp.Name == nil {
			imported = true
		}
	}
	if !imported {
		return nil, nil
	}
	var (
		out      []Claim
		direct   = map[*ast.BasicLit]bool{}
		computed bool
	)
	claim := func(lit *ast.BasicLit, rule string, loose bool) {
		out = append(out, Claim{Rule: rule, Test: fmt.Sprintf("%s:%d", name, fset.Position(lit.Pos()).Line), Loose: loose})
	}
	ast.Inspect(file, func(n ast.Node) bool {
		call, ok := n.(*ast.CallExpr)
		if !ok || len(call.Args) == 0 {
			return true
		}
		sel, ok := call.Fun.(*ast.SelectorExpr)
		if !ok || sel.Sel.Name != "Covers" {
			return true
		}
		if x, ok := sel.X.(*ast.Ident); !ok || x.Name != "contract" {
			return true
		}
		for _, arg := range call.Args[1:] {
			lit, ok := arg.(*ast.BasicLit)
			if !ok || lit.Kind != token.STRING {
				computed = true
				continue
			}
			if rule, err := strconv.Unquote(lit.Value); err == nil {
				direct[lit] = true
				claim(lit, rule, false)
			}
		}
		return true
	})
	if !computed {
		return out, nil
	}
	ast.Inspect(file, func(n ast.Node) bool {
		lit, ok := n.(*ast.BasicLit)
		if !ok || lit.Kind != token.STRING || direct[lit] {
			return true
		}
		if rule, err := strconv.Unquote(lit.Value); err == nil {
			if _, known := Lookup(rule); known {
				claim(lit, rule, true)
			}
		}
		return true
	})
	return out, nil
}

// Check compares the claims with the rules and returns what is wrong, one line
// each: a rule neither covered nor unbuilt, an unbuilt rule that is covered after
// all, a claim of a rule that does not exist. Loose claims cover a rule but do not
// accuse one.
func Check(rules []Rule, unbuilt map[string]string, claims []Claim) []string {
	known := make(map[string]bool, len(rules))
	for _, r := range rules {
		known[r.Number] = true
	}
	by := map[string][]string{}
	covered := map[string]bool{}
	for _, c := range claims {
		covered[c.Rule] = true
		if !c.Loose {
			by[c.Rule] = append(by[c.Rule], c.Test)
		}
	}
	var out []string
	for _, r := range rules {
		_, later := unbuilt[r.Number]
		switch {
		case !later && !covered[r.Number]:
			out = append(out, fmt.Sprintf("%s is covered by no test and not listed in docs/contract-unbuilt.txt: %s", r.Number, firstWords(r.Text)))
		case later && len(by[r.Number]) > 0:
			out = append(out, fmt.Sprintf("%s is listed in docs/contract-unbuilt.txt, but covered by %s: remove it from the list", r.Number, by[r.Number][0]))
		}
	}
	var strangers []string
	for rule, tests := range by {
		if !known[rule] {
			strangers = append(strangers, fmt.Sprintf("%q is no rule of docs/contract.md, but %s claims it", rule, tests[0]))
		}
	}
	sort.Strings(strangers)
	return append(out, strangers...)
}

func firstWords(text string) string {
	text, _, _ = strings.Cut(text, "\n")
	if r := []rune(text); len(r) > 80 {
		return string(r[:80]) + "…"
	}
	return text
}
