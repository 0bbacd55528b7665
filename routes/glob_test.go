package routes

import (
	"errors"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestGlob(t *testing.T) {
	for _, tc := range []struct {
		pattern string
		yes, no []string
	}{
		{"/", []string{"/", ""}, []string{"/a", "*", "//"}},
		{"/**", []string{"/", "", "/a", "/a/b/", "/a//b"}, []string{"*"}},
		{"/v1/**", []string{"/v1", "/v1/", "/v1/a", "/v1/a/b/c"}, []string{"/", "/v1x", "/v1x/a", "/v", "/V1/a", "/v2/v1/a", "/%761/a"}},
		{"/v1/*", []string{"/v1/", "/v1/a", "/v1/a.b;c"}, []string{"/v1", "/v1/a/", "/v1/a/b"}},
		{"/v1/charges", []string{"/v1/charges"}, []string{"/v1/charges/", "/v1/charge", "/v1/chargesx", "/v1/charges/x", "/v1/Charges"}},
		{"/a/**/b", []string{"/a/b", "/a/x/b", "/a/x/y/b", "/a/b/b", "/a//b"}, []string{"/a", "/a/x/bb", "/a/b/", "/ab"}},
		{"/a/*/b", []string{"/a/x/b", "/a//b"}, []string{"/a/b", "/a/x/y/b"}},
		{"/**/x/**/y", []string{"/x/y", "/a/x/b/y", "/x/x/y/y"}, []string{"/x", "/y", "/y/x"}},
		{"/repos/*/*.git/**", []string{"/repos/a/b.git/info/refs", "/repos/a/.git"}, []string{"/repos/a/b/info", "/repos/a/b.gitx/info"}},
		{"/a*c*e", []string{"/ace", "/abcde", "/acece"}, []string{"/a/c/e", "/acex", "/ec"}},
		{"/@s%2fpkg", []string{"/@s%2fpkg"}, []string{"/@s/pkg", "/@s%2Fpkg"}},
	} {
		g, err := compileGlob(tc.pattern)
		if err != nil {
			t.Fatal(err)
		}
		for _, p := range tc.yes {
			if !g.match(p) {
				t.Errorf("%q does not take %q", tc.pattern, p)
			}
		}
		for _, p := range tc.no {
			if g.match(p) {
				t.Errorf("%q takes %q", tc.pattern, p)
			}
		}
	}
	for _, bad := range []string{"", "v1", "**", "/v1/**x", "/***", "/a**/b", "/../x", "/a?b", "/a b", "//x", "/%zz", "/ä", `/a\b`} {
		if _, err := compileGlob(bad); !errors.Is(err, ErrBadGlob) {
			t.Errorf("compileGlob(%q) = %v", bad, err)
		}
	}
}

// refMatch is the definition of a glob, written down as it is said.
func refMatch(pattern, path []string) bool {
	if len(pattern) == 0 {
		return len(path) == 0
	}
	if pattern[0] == "**" {
		for i := 0; i <= len(path); i++ {
			if refMatch(pattern[1:], path[i:]) {
				return true
			}
		}
		return false
	}
	return len(path) > 0 && refSegment(pattern[0], path[0]) && refMatch(pattern[1:], path[1:])
}

func refSegment(pattern, s string) bool {
	if pattern == "" {
		return s == ""
	}
	if pattern[0] == '*' {
		return refSegment(pattern[1:], s) || s != "" && refSegment(pattern, s[1:])
	}
	return s != "" && s[0] == pattern[0] && refSegment(pattern[1:], s[1:])
}

func globGen() *rapid.Generator[string] {
	seg := rapid.OneOf(rapid.Just("**"), rapid.StringMatching(`[ab]{0,2}\*?[ab]{0,2}`), rapid.StringMatching(`[ab]{0,3}`), rapid.Just("*"))
	return rapid.Custom(func(t *rapid.T) string {
		return "/" + strings.Join(rapid.SliceOfN(seg, 1, 6).Draw(t, "pattern"), "/")
	})
}

func pathGen() *rapid.Generator[string] {
	return rapid.Custom(func(t *rapid.T) string {
		return "/" + strings.Join(rapid.SliceOfN(rapid.StringMatching(`[ab*]{0,3}`), 1, 7).Draw(t, "path"), "/")
	})
}

func TestGlobAgainstReference(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		pattern, path := globGen().Draw(t, "glob"), pathGen().Draw(t, "path")
		g, err := compileGlob(pattern)
		if err != nil {
			return
		}
		if got, want := g.match(path), refMatch(strings.Split(pattern[1:], "/"), strings.Split(path[1:], "/")); got != want {
			t.Fatalf("%q on %q: %v, the definition says %v", pattern, path, got, want)
		}
	})
}

// A pattern said to cover another takes every path that the other takes.
func TestGlobCoversIsSound(t *testing.T) {
	covered := 0
	rapid.Check(t, func(t *rapid.T) {
		a, errA := compileGlob(globGen().Draw(t, "a"))
		b, errB := compileGlob(globGen().Draw(t, "b"))
		if errA != nil || errB != nil || !a.covers(&b) {
			return
		}
		covered++
		for range 20 {
			if p := pathGen().Draw(t, "path"); b.match(p) && !a.match(p) {
				t.Fatalf("%v is said to cover %v, but not %q", a.segments, b.segments, p)
			}
		}
	})
	if covered == 0 {
		t.Fatal("no pair of patterns covered another: the test shows nothing")
	}
}

func FuzzGlob(f *testing.F) {
	f.Add("/v1/**", "/v1/a/b")
	f.Add("/a/**/b*c/*", "/a/x/bxc/d")
	f.Add("/**/**/**/a", "/a/a/a/a/b")
	f.Fuzz(func(t *testing.T, pattern, path string) {
		g, err := compileGlob(pattern)
		if err != nil || len(pattern) > 40 || len(path) > 60 || strings.Count(pattern, "*") > 6 || CheckPath(path) != nil {
			return
		}
		if path == "" {
			path = "/"
		}
		want := path[0] == '/' && refMatch(strings.Split(pattern[1:], "/"), strings.Split(path[1:], "/"))
		if got := g.match(path); got != want {
			t.Fatalf("%q on %q: %v, the definition says %v", pattern, path, got, want)
		}
	})
}
