package testkit_test

import (
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"waybill/internal/testkit"
)

// fakeT records failures of the helpers under test.
type fakeT struct {
	testing.TB
	log []string
}

func (f *fakeT) Helper()                   {}
func (f *fakeT) Errorf(s string, a ...any) { f.log = append(f.log, fmt.Sprintf(s, a...)) }

func TestCanaryIsFoundInEveryForm(t *testing.T) {
	c := testkit.NewCanary(t)
	v := c.Value()
	if len(v) != 48 || strings.ContainsAny(v, " \r\n\x00") {
		t.Fatal("not a usable secret")
	}
	js, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	forms := map[string]string{
		"raw":      v,
		"hex":      hex.EncodeToString([]byte(v)),
		"HEX":      strings.ToUpper(hex.EncodeToString([]byte(v))),
		"query":    url.QueryEscape(v),
		"path":     url.PathEscape(v),
		"all":      percentAll(v),
		"json":     string(js),
		"quoted":   fmt.Sprintf("%+q", v),
		"base64.0": base64.StdEncoding.EncodeToString([]byte(v)),
		"base64.1": base64.StdEncoding.EncodeToString([]byte(":" + v)),
		"base64.2": base64.StdEncoding.EncodeToString([]byte("u:" + v)),
		"base64.3": base64.URLEncoding.EncodeToString([]byte("usr:" + v)),
		"url.1":    base64.RawURLEncoding.EncodeToString([]byte("~" + v)),
		"url.2":    base64.RawURLEncoding.EncodeToString([]byte("~~" + v)),
	}
	for name, f := range forms {
		// Whole, and cut in two at any place: one of the two pieces is found.
		for cut := 0; cut <= len(f); cut++ {
			ps, err := c.Find(testkit.InString("a", "x\x00"+f[:cut]), testkit.InString("b", f[cut:]+"\x00y"))
			if err != nil || len(ps) == 0 {
				t.Fatalf("%s cut at %d of %d: not found", name, cut, len(f))
			}
			if s := fmt.Sprint(ps); strings.Contains(s, v) {
				t.Fatal("the report holds the value")
			}
		}
	}
	other := testkit.NewCanary(t)
	for name, f := range forms {
		if ps, _ := other.Find(testkit.InString("", f)); len(ps) != 0 {
			t.Errorf("%s: found another canary: %v", name, ps)
		}
	}
	for _, f := range []string{"%v", "%s", "%q", "%x", "%#v", "%+v"} {
		if s := fmt.Sprintf(f, c); s != "[canary]" {
			t.Errorf("%s prints %d bytes", f, len(s))
		}
	}
}

func percentAll(s string) string {
	var b strings.Builder
	for i := range len(s) {
		fmt.Fprintf(&b, "%%%02x", s[i])
	}
	return b.String()
}

func TestSearchFilesAndProcesses(t *testing.T) {
	c := testkit.NewCanary(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "clean"), []byte(strings.Repeat("\x00\xff%2", 9000)), 0o600); err != nil {
		t.Fatal(err)
	}
	testkit.Search(t, c, testkit.In(dir), testkit.In(filepath.Join(dir, "clean")), testkit.InProcess(os.Getpid()))

	sub := filepath.Join(dir, "a", "b")
	if err := os.MkdirAll(sub, 0o700); err != nil {
		t.Fatal(err)
	}
	bad := filepath.Join(sub, "bin")
	if err := os.WriteFile(bad, []byte(strings.Repeat("\x00", 70000)+c.Value()), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(strings.ReplaceAll(c.Value(), "/", "_"), filepath.Join(sub, "link")); err != nil {
		t.Fatal(err)
	}
	f := &fakeT{TB: t}
	testkit.Search(f, c, testkit.In(dir))
	if len(f.log) != 2 || !strings.Contains(f.log[0], bad+" at 70000 (raw)") || strings.Contains(fmt.Sprint(f.log), c.Value()) {
		t.Fatalf("%q", f.log)
	}
	testkit.RequireFound(t, c, testkit.In(bad))
	// A file that was made long beforehand: between holes, at its end, and where its room was
	// allocated and never written.
	for _, at := range []int64{0, 1 << 20, 4<<20 - int64(len(c.Value()))} {
		made := filepath.Join(t.TempDir(), "made")
		f, err := os.OpenFile(made, os.O_CREATE|os.O_WRONLY, 0o600)
		if err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(f.Truncate(4<<20), unix.Fallocate(int(f.Fd()), 0, 0, 2<<20)); err != nil {
			t.Fatal(err)
		}
		testkit.Search(t, c, testkit.In(made))
		if _, err := f.WriteAt([]byte(c.Value()), at); err != nil {
			t.Fatal(err)
		}
		testkit.RequireFound(t, c, testkit.In(made))
		_ = f.Close()
	}

	cmd := exec.CommandContext(t.Context(), testkit.RequireTool(t, "cat"))
	cmd.Env = []string{"S=" + c.Value()}
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	// Its environment is there once it runs: Start returns somewhat earlier.
	if _, err := in.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(out, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	testkit.RequireFound(t, c, testkit.InProcess(cmd.Process.Pid))
	_ = in.Close()
	if err := cmd.Wait(); err != nil {
		t.Fatal(err)
	}
	f = &fakeT{TB: t}
	testkit.Search(f, c, testkit.In(filepath.Join(dir, "missing")))
	testkit.RequireFound(f, c, testkit.InString("empty", ""))
	if len(f.log) != 2 {
		t.Fatalf("%q", f.log)
	}
}
