package routes

import (
	"errors"
	"fmt"
	"strings"
)

// ErrBadGlob is wrapped by every error of CheckGlob.
var ErrBadGlob = errors.New("not an acceptable path pattern")

// A glob is a path pattern, compared with the raw bytes of a path, segment by
// segment: "**" as a whole segment stands for any number of segments, none
// included ("/v1/**" takes "/v1", "/v1/" and "/v1/a/b"); "*" stands for any run of
// bytes, none included, inside one segment; everything else stands for itself.
// Nothing is decoded and case counts: a pattern for "/@scope%2fpkg" is written
// like that.
type glob struct {
	segments []string
	// prefix is the leading part without wildcards; a path that does not begin with it
	// is refused without looking at segments.
	prefix string
}

// CheckGlob reports whether s is a path pattern: it begins with "/", is itself a
// path that CheckPath takes, and uses "**" only as a whole segment.
func CheckGlob(s string) error {
	if s == "" {
		return fmt.Errorf("%w: it is empty", ErrBadGlob)
	}
	if s[0] != '/' {
		return fmt.Errorf("%w: it does not begin with \"/\"", ErrBadGlob)
	}
	if err := CheckPath(s); err != nil {
		return fmt.Errorf("%w: no request could have this path (%s)", ErrBadGlob, reasonOf(err))
	}
	for seg := range strings.SplitSeq(s[1:], "/") {
		if seg != "**" && strings.Contains(seg, "**") {
			return fmt.Errorf("%w: \"**\" must be a whole segment", ErrBadGlob)
		}
	}
	return nil
}

func reasonOf(err error) string {
	var pe *PathError
	if errors.As(err, &pe) {
		return pe.Reason
	}
	return "unknown"
}

func compileGlob(s string) (glob, error) {
	if err := CheckGlob(s); err != nil {
		return glob{}, err
	}
	g := glob{segments: strings.Split(s[1:], "/"), prefix: s}
	if i := strings.IndexByte(s, '*'); i >= 0 {
		g.prefix = s[:i]
		if strings.HasPrefix(s[i:], "**") {
			g.prefix = s[:i-1] // "/v1/**" also takes "/v1": the slash before "**" may be missing
		}
	}
	return g, nil
}

// match needs time in proportion to the product of the lengths at worst, never
// exponential: only the last "**" is ever tried again, since the earliest match of
// what stands between two of them is as good as any later one.
func (g *glob) match(path string) bool {
	if path == "" {
		path = "/"
	}
	if !strings.HasPrefix(path, g.prefix) || path[0] != '/' {
		return false
	}
	rest, more := path[1:], true // rest begins a segment when more
	gi := 0
	starGlob, starRest, starMore := -1, "", false
	for more || gi < len(g.segments) {
		if gi < len(g.segments) {
			if g.segments[gi] == "**" {
				gi++
				starGlob, starRest, starMore = gi, rest, more
				continue
			}
			if more {
				seg, tail, cut := strings.Cut(rest, "/")
				if matchSegment(g.segments[gi], seg) {
					gi++
					rest, more = tail, cut
					continue
				}
			}
		}
		if starGlob < 0 || !starMore {
			return false
		}
		_, starRest, starMore = strings.Cut(starRest, "/")
		gi, rest, more = starGlob, starRest, starMore
	}
	return true
}

// matchSegment compares one segment, in which each "*" is any run of bytes.
func matchSegment(pattern, seg string) bool {
	if pattern == "*" {
		return true
	}
	pi, si, starP, starS := 0, 0, -1, 0
	for si < len(seg) {
		switch {
		case pi < len(pattern) && pattern[pi] == '*':
			starP, starS = pi, si
			pi++
		case pi < len(pattern) && pattern[pi] == seg[si]:
			pi++
			si++
		case starP >= 0:
			starS++
			pi, si = starP+1, starS
		default:
			return false
		}
	}
	for pi < len(pattern) && pattern[pi] == '*' {
		pi++
	}
	return pi == len(pattern)
}

// covers reports that every path that other takes is taken by g. It may say false
// although it is so, never true although it is not.
func (g *glob) covers(other *glob) bool {
	return coversSegments(g.segments, other.segments)
}

func coversSegments(a, b []string) bool {
	// reach[j] says that the part of a seen so far covers b[:j].
	reach := make([]bool, len(b)+1)
	reach[0] = true
	for _, seg := range a {
		next := make([]bool, len(b)+1)
		if seg == "**" {
			on := false
			for j := range reach {
				on = on || reach[j]
				next[j] = on
			}
		} else {
			for j := range b {
				next[j+1] = reach[j] && coversSegment(seg, b[j])
			}
		}
		reach = next
	}
	return reach[len(b)]
}

func coversSegment(a, b string) bool {
	switch {
	case b == "**":
		return false
	case a == "*" || a == b:
		return true
	case strings.Contains(b, "*"):
		return false
	}
	return matchSegment(a, b)
}
