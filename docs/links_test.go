package docs_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"unicode"
)

var (
	fence   = regexp.MustCompile("(?ms)^[ ]{0,3}```.*?^[ ]{0,3}```[ ]*$")
	inline  = regexp.MustCompile("`[^`\n]*`")
	link    = regexp.MustCompile(`\]\(([^)\s]+)(?:\s+"[^"]*")?\)`)
	heading = regexp.MustCompile(`(?m)^#{1,6}[ ]+(.+?)[ ]*$`)
	target  = regexp.MustCompile(`\[([^\]]*)\]\([^)]*\)`)
)

// anchors are the fragments of a document's headings, as code hosts make them.
func anchors(text string) map[string]bool {
	out := map[string]bool{}
	for _, m := range heading.FindAllStringSubmatch(fence.ReplaceAllString(text, ""), -1) {
		title := strings.ToLower(target.ReplaceAllString(m[1], "$1"))
		slug := strings.Map(func(r rune) rune {
			switch {
			case r == ' ':
				return '-'
			case r == '-' || r == '_' || unicode.IsLetter(r) || unicode.IsDigit(r):
				return r
			}
			return -1
		}, title)
		out[slug] = true
	}
	return out
}

// TestLinks follows every relative link of every document of the project.
func TestLinks(t *testing.T) {
	root, err := filepath.Abs("..")
	if err != nil {
		t.Fatal(err)
	}
	docs := map[string]string{}
	err = filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		switch {
		case err != nil:
			return err
		case d.IsDir() && (strings.HasPrefix(d.Name(), ".") && path != root || d.Name() == "node_modules" || d.Name() == "testdata"):
			return filepath.SkipDir
		case !d.IsDir() && strings.HasSuffix(path, ".md"):
			data, err := os.ReadFile(path)
			docs[path] = string(data)
			return err
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	links := 0
	for path, text := range docs {
		rel, _ := filepath.Rel(root, path)
		for _, m := range link.FindAllStringSubmatch(inline.ReplaceAllString(fence.ReplaceAllString(text, ""), ""), -1) {
			to := m[1]
			if strings.Contains(to, "://") || strings.HasPrefix(to, "mailto:") {
				continue
			}
			links++
			file, anchor, _ := strings.Cut(to, "#")
			at := path
			if file != "" {
				at = filepath.Join(filepath.Dir(path), file)
				if _, err := os.Stat(at); err != nil {
					t.Errorf("%s: the link %s leads nowhere", rel, to)
					continue
				}
				if inside, err := filepath.Rel(root, at); err != nil || strings.HasPrefix(inside, "..") {
					t.Errorf("%s: the link %s leads out of the project", rel, to)
				}
			}
			if other, ok := docs[at]; ok && anchor != "" && !anchors(other)[anchor] {
				t.Errorf("%s: the link %s names no heading of %s", rel, to, filepath.Base(at))
			}
		}
	}
	if len(docs) < 20 || links < 40 {
		t.Errorf("only %d documents with %d links were found: is this test looking at the right place?", len(docs), links)
	}
}
