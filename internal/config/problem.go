package config

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Problem is one thing that is wrong (or, as a warning, probably not meant) in a
// file.
type Problem struct {
	File   string // as it was given to Load or Parse
	Line   int    // from 1
	Column int    // from 1, in characters
	Path   string // such as "routes[0].match.host"; "document" for the file as a whole
	What   string // what is wrong
	Fix    string // what to do
}

// String returns "file:line:column path: what; what to do".
func (p Problem) String() string {
	s := fmt.Sprintf("%s:%d:%d %s: %s", p.File, p.Line, p.Column, p.Path, p.What)
	if p.Fix != "" {
		s += "; " + p.Fix
	}
	return s
}

// Errors holds every problem of one file, in the order of the file. A value of this
// type that was returned as an error is never empty.
type Errors []Problem

// Error returns one line for each problem.
func (e Errors) Error() string { return joinProblems(e) }

func joinProblems(list []Problem) string {
	lines := make([]string, len(list))
	for i, p := range list {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

func sortProblems(list []Problem) {
	slices.SortStableFunc(list, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Line, b.Line), cmp.Compare(a.Column, b.Column))
	})
}

// nearestName returns the name a person most likely meant, or "".
func nearestName(got string, names []string) string {
	best, bestDistance := "", 3
	if len(got) <= 4 {
		bestDistance = 2
	}
	if len(got) > 64 {
		return ""
	}
	g := strings.ToLower(strings.ReplaceAll(got, "-", "_"))
	for _, n := range names {
		if d := distance(g, strings.ToLower(n)); d < bestDistance {
			best, bestDistance = n, d
		}
	}
	return best
}

// distance counts insertions, deletions, replacements and swaps of neighbours
// (optimal string alignment).
func distance(a, b string) int {
	prev2, prev, cur := make([]int, len(b)+1), make([]int, len(b)+1), make([]int, len(b)+1)
	for j := range prev {
		prev[j] = j
	}
	for i := 1; i <= len(a); i++ {
		cur[0] = i
		for j := 1; j <= len(b); j++ {
			cost := 1
			if a[i-1] == b[j-1] {
				cost = 0
			}
			cur[j] = min(prev[j]+1, cur[j-1]+1, prev[j-1]+cost)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				cur[j] = min(cur[j], prev2[j-2]+1)
			}
		}
		prev2, prev, cur = prev, cur, prev2
	}
	return prev[len(b)]
}
