package deploy

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"

	"waybill/internal/testkit"
)

// TestUnit: systemd reads the unit without a complaint, and rates its exposure low.
func TestUnit(t *testing.T) {
	analyze := testkit.RequireTool(t, "systemd-analyze")
	b, err := os.ReadFile("systemd/waybill.service")
	if err != nil {
		t.Fatal(err)
	}
	// What is not installed here is no fault of the unit.
	text := strings.ReplaceAll(string(b), "/usr/local/bin/waybill", "/bin/true")
	text = strings.ReplaceAll(text, "Documentation=man:waybill(1)\n", "")
	unit := filepath.Join(t.TempDir(), "waybill.service")
	if err := os.WriteFile(unit, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command(analyze, "verify", "--man=no", unit).CombinedOutput(); err != nil || strings.Contains(string(out), unit) {
		t.Errorf("%v\n%s", err, out)
	}
	out, err := exec.Command(analyze, "security", "--offline=true", "--no-pager", unit).CombinedOutput()
	m := regexp.MustCompile(`Overall exposure level for \S+: ([0-9.]+)`).FindSubmatch(out)
	if err != nil || m == nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if level, err := strconv.ParseFloat(string(m[1]), 64); err != nil || level > 2 {
		t.Errorf("exposure %s of 10, want at most 2\n%s", m[1], out)
	}
	for _, line := range []string{"RestartPreventExitStatus=3 6", "Restart=on-failure", "StateDirectoryMode=0700", "LimitCORE=0"} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("the unit does not say %s", line)
		}
	}
}

// TestRelease makes the archive of this platform and looks into it.
func TestRelease(t *testing.T) {
	testkit.RequireTool(t, "python3")
	dir := t.TempDir()
	platform := runtime.GOOS + "/" + runtime.GOARCH
	cmd := exec.Command("../scripts/release.sh", "v0.0.1-test", platform)
	cmd.Env = append(os.Environ(), "OUT="+dir)
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	name := "waybill_0.0.1-test_" + strings.ReplaceAll(platform, "/", "_")
	check := exec.Command("sha256sum", "--check", "--strict", "SHA256SUMS")
	check.Dir = dir
	if out, err := check.CombinedOutput(); err != nil || strings.Count(string(out), "OK") != 2 {
		t.Errorf("%v\n%s", err, out)
	}
	files := unpack(t, filepath.Join(dir, name+".tar.gz"), dir)
	for _, want := range []string{"waybill", "LICENSE", "man/waybill.1", "man/waybill-serve.1", "completions/waybill.bash", "completions/waybill.zsh", "completions/waybill.fish", "systemd/waybill.service"} {
		if !slices.Contains(files, name+"/"+want) {
			t.Errorf("no %s in %v", want, files)
		}
	}
	out, err := exec.Command(filepath.Join(dir, name, "waybill"), "version").CombinedOutput()
	if err != nil || !strings.HasPrefix(string(out), "waybill v0.0.1-test ") {
		t.Errorf("%v: %s", err, out)
	}
	page, err := os.ReadFile(filepath.Join(dir, name, "man/waybill-serve.1"))
	if err != nil || !bytes.Contains(page, []byte("--drain")) && !bytes.Contains(page, []byte(`\-\-drain`)) {
		t.Errorf("the page of serve says nothing of --drain: %v", err)
	}
	var sbom struct {
		SpdxVersion   string
		Packages      []struct{ Name, VersionInfo string }
		Relationships []struct{ RelationshipType string }
	}
	b, err := os.ReadFile(filepath.Join(dir, name+".spdx.json"))
	if err = errors.Join(err, json.Unmarshal(b, &sbom)); err != nil {
		t.Fatal(err)
	}
	var modules []string
	for _, p := range sbom.Packages {
		modules = append(modules, p.Name)
		if p.VersionInfo == "" {
			t.Errorf("%s has no version", p.Name)
		}
	}
	if sbom.SpdxVersion != "SPDX-2.3" || !slices.Contains(modules, "github.com/dgraph-io/badger/v4") || !slices.Contains(modules, "stdlib") || len(sbom.Relationships) != len(sbom.Packages) {
		t.Errorf("%+v", sbom)
	}
	if slices.Contains(modules, "k8s.io/api") {
		t.Error("the SBOM names what only tests need")
	}
}

func unpack(t *testing.T, archive, dir string) (names []string) {
	t.Helper()
	f, err := os.Open(archive)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	z, err := gzip.NewReader(f)
	if err != nil {
		t.Fatal(err)
	}
	r := tar.NewReader(z)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return names
		}
		if err != nil {
			t.Fatal(err)
		}
		names = append(names, strings.TrimSuffix(h.Name, "/"))
		if h.Typeflag != tar.TypeReg {
			continue
		}
		path := filepath.Join(dir, h.Name)
		data, rerr := io.ReadAll(r)
		if err := errors.Join(rerr, os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, data, os.FileMode(h.Mode))); err != nil { //nolint:gosec // of this test
			t.Fatal(err)
		}
	}
}

// TestInstall: make install puts binary, manual pages, completions and unit below DESTDIR
// and PREFIX, the unit with the path of the binary that was installed.
func TestInstall(t *testing.T) {
	dest := t.TempDir()
	cmd := exec.Command("make", "install", "DESTDIR="+dest, "PREFIX=/opt/waybill")
	cmd.Dir = ".."
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("make install: %v\n%s", err, out)
	}
	root := filepath.Join(dest, "opt/waybill")
	for _, want := range []string{
		"bin/waybill", "share/man/man1/waybill.1", "share/man/man1/waybill-serve.1", "share/bash-completion/completions/waybill", "share/zsh/site-functions/_waybill",
		"share/fish/vendor_completions.d/waybill.fish", "lib/systemd/system/waybill.service", "lib/sysusers.d/waybill.conf",
	} {
		if st, err := os.Stat(filepath.Join(root, want)); err != nil || st.Size() == 0 {
			t.Errorf("%s: %v", want, err)
		}
	}
	if out, err := exec.Command(filepath.Join(root, "bin/waybill"), "version").CombinedOutput(); err != nil {
		t.Errorf("the installed program: %v\n%s", err, out)
	}
	unit, err := os.ReadFile(filepath.Join(root, "lib/systemd/system/waybill.service"))
	if err != nil || !strings.Contains(string(unit), "ExecStart=/opt/waybill/bin/waybill serve") {
		t.Errorf("%v\n%s", err, unit)
	}
}
