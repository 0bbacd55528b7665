package image

import (
	"archive/tar"
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
	"syscall"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// TestImage builds the image from a static binary, reads it back from its OCI layout,
// checks what an engine would go by, and runs the binary in the unpacked root as the
// image's user. The Dockerfile says the same.
func TestImage(t *testing.T) {
	dir := t.TempDir()
	binary := filepath.Join(dir, "waybill")
	build := exec.Command("go", "build", "-trimpath", "-ldflags", "-s -w -X main.version=v9.8.7", "-o", binary, "waybill/cmd/waybill")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	roots := filepath.Join(dir, "roots.pem")
	if err := os.WriteFile(roots, []byte("-----BEGIN CERTIFICATE-----\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	img, err := Build(Options{Binary: binary, Roots: roots, Version: "v9.8.7", Architecture: runtime.GOARCH})
	if err != nil {
		t.Fatal(err)
	}
	oci := filepath.Join(dir, "oci")
	if err := Write(img, oci, "waybill:v9.8.7"); err != nil {
		t.Fatal(err)
	}
	img = readBack(t, oci)
	cfg, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	c := cfg.Config
	if c.User != "65532:65532" || cfg.OS != "linux" || cfg.Architecture != runtime.GOARCH || c.Labels["org.opencontainers.image.version"] != "v9.8.7" {
		t.Errorf("%+v", cfg)
	}
	if _, ok := c.Volumes["/var/lib/waybill"]; !ok || !slices.Equal(c.Healthcheck.Test, []string{"CMD", "/usr/local/bin/waybill", "health"}) {
		t.Errorf("volume %v, health check %v", c.Volumes, c.Healthcheck)
	}
	files := unpack(t, img, filepath.Join(dir, "root"))
	for name, want := range map[string]string{"usr/local/bin/waybill": "0755 0", "etc/ssl/certs/ca-certificates.crt": "0644 0", "var/lib/waybill": "0700 65532"} {
		if files[name] != want {
			t.Errorf("%s: %q, want %q", name, files[name], want)
		}
	}
	if len(files) > 16 {
		t.Errorf("more than a binary and its roots: %v", files)
	}
	// In a root of its own, as the image's user: nothing of this machine helps it.
	run := exec.Command(c.Entrypoint[0], "version")
	run.Dir, run.Env = "/", c.Env
	run.SysProcAttr = &syscall.SysProcAttr{Chroot: filepath.Join(dir, "root")}
	if os.Getuid() == 0 {
		run.SysProcAttr.Credential = &syscall.Credential{Uid: User, Gid: User}
		if err := openUp(dir); err != nil {
			t.Fatal(err)
		}
	} else {
		run = exec.Command(filepath.Join(dir, "root", c.Entrypoint[0]), "version")
	}
	if out, err := run.CombinedOutput(); err != nil || !strings.HasPrefix(string(out), "waybill v9.8.7") {
		t.Errorf("%v: %s", err, out)
	}
	dockerfileAgrees(t, &c)
}

// TestImageIsWhole: layers, sizes and digests are what the manifest says, and the same input
// gives the same image. It needs no real program, whose 30 MiB take half a minute to pack and
// unpack so often.
func TestImageIsWhole(t *testing.T) {
	dir := t.TempDir()
	opt := Options{Binary: filepath.Join(dir, "waybill"), Roots: filepath.Join(dir, "roots.pem"), Version: "v9.8.7", Architecture: runtime.GOARCH}
	for path, text := range map[string]string{opt.Binary: strings.Repeat("a program\n", 20000), opt.Roots: "-----BEGIN CERTIFICATE-----\n"} {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	var digests []v1.Hash
	for i := range 2 {
		img, err := Build(opt)
		if err != nil {
			t.Fatal(err)
		}
		oci := filepath.Join(dir, strconv.Itoa(i))
		if err := Write(img, oci, "waybill:v9.8.7"); err != nil {
			t.Fatal(err)
		}
		img = readBack(t, oci)
		if err := validate.Image(img); err != nil {
			t.Error(err)
		}
		digest, err := img.Digest()
		if err != nil {
			t.Fatal(err)
		}
		digests = append(digests, digest)
	}
	if digests[0] != digests[1] {
		t.Errorf("the same input gives other images: %v", digests)
	}
}

// openUp lets the image's user through the test's folders.
func openUp(dir string) error {
	for d := dir; d != "/" && d != os.TempDir(); d = filepath.Dir(d) {
		if err := os.Chmod(d, 0o755); err != nil { //nolint:gosec // of this test
			return err
		}
	}
	return nil
}

func readBack(t *testing.T, oci string) v1.Image {
	t.Helper()
	index, err := layout.ImageIndexFromPath(oci)
	if err != nil {
		t.Fatal(err)
	}
	m, err := index.IndexManifest()
	if err != nil || len(m.Manifests) != 1 || m.Manifests[0].Annotations["org.opencontainers.image.ref.name"] != "waybill:v9.8.7" {
		t.Fatalf("%+v %v", m, err)
	}
	img, err := index.Image(m.Manifests[0].Digest)
	if err != nil {
		t.Fatal(err)
	}
	return img
}

// unpack writes the image's files and returns mode and owner of each.
func unpack(t *testing.T, img v1.Image, root string) map[string]string {
	t.Helper()
	rc := mutate.Extract(img)
	defer func() { _ = rc.Close() }()
	out := map[string]string{}
	r := tar.NewReader(rc)
	for {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		name := strings.TrimSuffix(h.Name, "/")
		out[name] = mode(h)
		path := filepath.Join(root, name)
		if h.Typeflag == tar.TypeDir {
			err = os.MkdirAll(path, 0o755) //nolint:gosec // of this test
		} else if err = os.MkdirAll(filepath.Dir(path), 0o755); err == nil { //nolint:gosec // of this test
			data, rerr := io.ReadAll(r)
			err = errors.Join(rerr, os.WriteFile(path, data, os.FileMode(h.Mode))) //nolint:gosec // as the image says
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func mode(h *tar.Header) string {
	digits := "0" + string([]byte{byte('0' + h.Mode>>6&7), byte('0' + h.Mode>>3&7), byte('0' + h.Mode&7)})
	if h.Uid == 0 {
		return digits + " 0"
	}
	if h.Uid == User && h.Gid == User {
		return digits + " 65532"
	}
	return digits + " other"
}

// dockerfileAgrees: the Dockerfile, which no engine builds here, says what was tested.
func dockerfileAgrees(t *testing.T, c *v1.Config) {
	t.Helper()
	b, err := os.ReadFile("../../Dockerfile")
	if err != nil {
		t.Fatal(err)
	}
	text := string(b)
	_, final, ok := strings.Cut(text, "FROM scratch\n")
	if !ok {
		t.Fatal("the last stage is not scratch")
	}
	quoted := func(list []string) string { return `["` + strings.Join(list, `", "`) + `"]` }
	for _, want := range []string{"USER " + c.User, "VOLUME /var/lib/waybill", "ENTRYPOINT " + quoted(c.Entrypoint), "CMD " + quoted(c.Cmd), "CMD " + quoted(c.Healthcheck.Test[1:]), "ENV " + strings.Join(c.Env, " "), "STOPSIGNAL " + c.StopSignal} {
		if !strings.Contains(final, want+"\n") {
			t.Errorf("the Dockerfile has no %q", want)
		}
	}
	if regexp.MustCompile(`(?m)^RUN`).MatchString(final) || !strings.Contains(text, "CGO_ENABLED=0") {
		t.Error("the Dockerfile's binary is not static, or its last stage runs something")
	}
}
