package routes

import (
	"errors"
	"net/url"
	"path"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"waybill/internal/contract"
)

func TestCheckPath(t *testing.T) {
	contract.Covers(t, "B1")
	for in, reason := range map[string]string{
		"": "", "*": "", "/": "", "/v1/x": "", "/v1/": "", "/.well-known/x": "", "/v1/...": "", "/a.b/c..d": "", "/v1//x": "",
		"/v1/@s%2fpkg": "", "/v1/@s%2Fpkg": "", "/files/a%2Fb%2Ekey/raw": "", "/a%20b": "", "/a%5cb": "", "/a%252Fb": "",
		"/v1/{id}|x": "", "/v1/a;b=c": "", "/%e4%bd%a0": "", "/%C0x": "", "/a%2e%2eb": "", "/100%25": "",
		// ID-06.
		"/v1/../admin": "dot_segment", "/v1/%2e%2e/admin": "dot_segment", "/v1/%252e%252e/admin": "dot_segment",
		"/v1/..;/admin": "dot_segment", `/v1\..\admin`: "backslash", "//admin": "double_slash",
		// and what is like it
		"/.": "dot_segment", "/..": "dot_segment", "/v1/.": "dot_segment", "/./v1": "dot_segment", "/v1/.%2e/x": "dot_segment",
		"/v1/%2E./x": "dot_segment", "/v1/%2e": "dot_segment", "/v1/..;a=b/x": "dot_segment", "/v1/..%3b/x": "dot_segment",
		"/v1/a%2f..%2fx": "dot_segment", "/v1/..%2fx": "dot_segment", "/v1/..%5cx": "dot_segment", "/v1/%2e%2e%5cx": "dot_segment",
		"/v1/.%252e/x": "dot_segment", "/v1/%25252e%25252e/x": "dot_segment", "/v1/%c0%ae%c0%ae/x": "dot_segment",
		"/v1/%c0%ae./x": "dot_segment", "/v1/..%c0%afx": "dot_segment", "/v1/.;/x": "dot_segment",
		"/" + strings.Repeat("%25", 50): "", "/%" + strings.Repeat("25", 50) + "2e": "encoded_too_often",
		"/%zz": "bad_escape", "/%2": "bad_escape", "/%": "bad_escape", "/%u002e": "bad_escape", "/a%00b": "encoded_nul",
		"/a b": "forbidden_character", "/a\tb": "forbidden_character", "/a\r\nX: y": "forbidden_character", "/a\x00": "forbidden_character",
		"/a\x7f": "forbidden_character", "/ä": "forbidden_character", "/a#b": "forbidden_character", "/a?b": "forbidden_character",
		"v1": "not_absolute", "http://x/": "not_absolute", "**": "not_absolute", "//": "double_slash", "///x": "double_slash",
	} {
		err := CheckPath(in)
		var pe *PathError
		switch {
		case reason == "":
			if err != nil {
				t.Errorf("CheckPath(%q) = %v", in, err)
			}
		case !errors.As(err, &pe) || !errors.Is(err, ErrBadPath) || pe.Reason != reason:
			t.Errorf("CheckPath(%q) = %v, want %s", in, err, reason)
		}
	}
}

// checkPath holds what must be true of every accepted path: no number of decodings
// followed by the usual clean-up leads out of the segments it names.
func checkPath(t interface {
	Helper()
	Fatalf(string, ...any)
}, raw string) {
	t.Helper()
	if CheckPath(raw) != nil || raw == "" || raw == "*" {
		return
	}
	u := &url.URL{}
	for p, i := raw, 0; i < 10; i++ {
		slashed := strings.ReplaceAll(p, `\`, "/")
		if c := path.Clean(slashed); len(strings.Split(strings.TrimRight(c, "/"), "/")) < len(nonEmpty(slashed)) {
			t.Fatalf("CheckPath accepts %q, but after %d decodings %q is cleaned to %q", raw, i, p, c)
		}
		next, err := url.PathUnescape(p)
		if err != nil || next == p {
			break
		}
		p = next
	}
	// A client or server built on net/url sees the same bytes.
	var err error
	if u, err = url.ParseRequestURI(raw); err != nil || u.Host != "" || u.RawQuery != "" {
		t.Fatalf("CheckPath accepts %q, net/url: %v, %v", raw, u, err)
	}
}

func nonEmpty(p string) []string {
	var out []string
	for s := range strings.SplitSeq(p, "/") {
		if s != "" {
			out = append(out, s)
		}
	}
	return out
}

func TestCheckPathProperties(t *testing.T) {
	contract.Covers(t, "B1")
	piece := rapid.SampledFrom([]string{"/", "/", "a", "v1", ".", "..", "%2e", "%2E", "%252e", "%25", "%2f", "%5c", `\`, ";", "%3b", "%c0%ae", "%c0%af", "#", "?", " ", "%", "ä", "%00", "*"})
	rapid.Check(t, func(t *rapid.T) {
		checkPath(t, "/"+strings.Join(rapid.SliceOfN(piece, 0, 10).Draw(t, "pieces"), ""))
	})
}

func FuzzCheckPath(f *testing.F) {
	for _, s := range []string{"/", "*", "/v1/../x", "/v1/%2e%2e/x", "/v1/%252e", "/a;b/..;c", "//x", "/@s%2fpkg", "/%c0%ae", "/%", "/a\\b", "/100%25"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) { checkPath(t, s) })
}

func TestReading(t *testing.T) {
	for in, want := range map[string]string{
		"/v1/admin": "/v1/admin", "/v1/%61dmin": "/v1/admin", "/v1//admin": "/v1/admin", "/v1/admin;x=1": "/v1/admin",
		"/v1/admin;x/y": "/v1/admin/y", "/v1%2fadmin": "/v1/admin", "/v1%255cadmin": "/v1/admin", "/v1/": "/v1/", "/": "/",
	} {
		if got := reading(in); got != want {
			t.Errorf("reading(%q) = %q, want %q", in, got, want)
		}
	}
}
