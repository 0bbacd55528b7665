package e2e

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"waybill/internal/testkit"
)

// runnable is a shell example that says that it can be run: a fence with "sh run".
var runnable = regexp.MustCompile("(?ms)^```sh run\n(.*?)^```$")

// TestDocumentedCommands runs every shell example of the documents that is marked as
// runnable, each in an empty folder with the real program.
func TestDocumentedCommands(t *testing.T) {
	files, err := filepath.Glob("../../docs/*.md")
	if err != nil {
		t.Fatal(err)
	}
	files = append(files, "../../README.md")
	bin := testkit.Binary(t)
	n := 0
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range runnable.FindAllStringSubmatch(string(text), -1) {
			n++
			dir, err := os.MkdirTemp("", "wb")
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = os.RemoveAll(dir) })
			if err := os.Symlink(bin, filepath.Join(dir, "waybill")); err != nil {
				t.Fatal(err)
			}
			work := filepath.Join(dir, "w")
			if err := os.Mkdir(work, 0o700); err != nil {
				t.Fatal(err)
			}
			code, out, errs := testkit.Run(t, testkit.Command{Path: "/bin/sh", Args: []string{"-eu", "-c", m[1]}, Dir: work,
				Env: []string{"PATH=" + dir + ":" + os.Getenv("PATH"), "HOME=" + dir, "WAYBILL_DATA=" + filepath.Join(dir, "d"), "NO_COLOR=1"}})
			if code != 0 {
				t.Errorf("%s: an example ends with %d:\n%s\n%s\n%s", filepath.Base(file), code, m[1], out, errs)
			}
			// A line "# text …" after a command promises how its output begins.
			for line := range strings.Lines(m[1]) {
				if want, ok := strings.CutPrefix(line, "# "); ok {
					if want = strings.TrimSuffix(strings.TrimSpace(want), " …"); !strings.Contains(out, want) {
						t.Errorf("%s: the output has no %q:\n%s", filepath.Base(file), want, out)
					}
				}
			}
		}
	}
	if n < 3 {
		t.Errorf("only %d examples are marked as runnable", n)
	}
}
