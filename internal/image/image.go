// Package image makes Waybill's container image without an engine: the same layers,
// user and health check as the Dockerfile, on an empty base. For tests and releases.
package image

import (
	"archive/tar"
	"bytes"
	"fmt"
	"io"
	"os"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// User is the user and group of the image: not root, and without a name.
const User = 65532

// Options say what goes into the image.
type Options struct {
	Binary       string // path of a static binary
	Roots        string // path of the CA certificates
	Version      string
	Revision     string
	Architecture string    // as GOARCH
	Created      time.Time // zero: the epoch, so that the same input gives the same image
}

// Build returns the image.
func Build(o Options) (v1.Image, error) {
	roots, err := os.ReadFile(o.Roots)
	if err != nil {
		return nil, fmt.Errorf("image: CA roots: %w", err)
	}
	binary, err := os.ReadFile(o.Binary)
	if err != nil {
		return nil, fmt.Errorf("image: binary: %w", err)
	}
	// Two layers: what seldom changes, and the binary.
	base, err := layer([]entry{
		{name: "etc/", mode: 0o755}, {name: "etc/ssl/", mode: 0o755}, {name: "etc/ssl/certs/", mode: 0o755}, {name: "etc/waybill/", mode: 0o755},
		{name: "etc/ssl/certs/ca-certificates.crt", mode: 0o644, data: roots},
		{name: "var/", mode: 0o755}, {name: "var/lib/", mode: 0o755}, {name: "var/lib/waybill/", mode: 0o700, uid: User},
	}, o.Created)
	if err != nil {
		return nil, err
	}
	program, err := layer([]entry{
		{name: "usr/", mode: 0o755}, {name: "usr/local/", mode: 0o755}, {name: "usr/local/bin/", mode: 0o755},
		{name: "usr/local/bin/waybill", mode: 0o755, data: binary},
	}, o.Created)
	if err != nil {
		return nil, err
	}
	img, err := mutate.AppendLayers(empty.Image, base, program)
	if err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	cfg, err := img.ConfigFile()
	if err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	cfg = cfg.DeepCopy()
	cfg.OS, cfg.Architecture, cfg.Created = "linux", o.Architecture, v1.Time{Time: o.Created}
	cfg.Config = v1.Config{
		User: fmt.Sprintf("%d:%d", User, User), WorkingDir: "/var/lib/waybill", StopSignal: "SIGTERM",
		Env:          []string{"WAYBILL_DATA=/var/lib/waybill", "WAYBILL_CONFIG=/etc/waybill/waybill.yaml", "PATH=/usr/local/bin"},
		Volumes:      map[string]struct{}{"/var/lib/waybill": {}},
		ExposedPorts: map[string]struct{}{"7171/tcp": {}, "7174/tcp": {}},
		Entrypoint:   []string{"/usr/local/bin/waybill"}, Cmd: []string{"serve", "--log-format", "json"},
		Healthcheck: &v1.HealthConfig{Test: []string{"CMD", "/usr/local/bin/waybill", "health"}, Interval: 10 * time.Second, Timeout: 4 * time.Second, StartPeriod: 20 * time.Second},
		Labels: map[string]string{"org.opencontainers.image.title": "waybill", "org.opencontainers.image.version": o.Version, "org.opencontainers.image.revision": o.Revision,
			"org.opencontainers.image.licenses": "Apache-2.0"},
	}
	if img, err = mutate.ConfigFile(img, cfg); err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	return img, nil
}

// Write writes an image as an OCI layout into a folder that must not exist or be empty.
func Write(img v1.Image, dir, name string) error {
	p, err := layout.Write(dir, empty.Index)
	if err == nil {
		err = p.AppendImage(img, layout.WithAnnotations(map[string]string{"org.opencontainers.image.ref.name": name}))
	}
	if err != nil {
		return fmt.Errorf("image: %w", err)
	}
	return nil
}

type entry struct {
	name string // a folder ends with a slash
	mode int64
	uid  int
	data []byte
}

func layer(entries []entry, at time.Time) (v1.Layer, error) {
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, e := range entries {
		h := &tar.Header{Name: e.name, Mode: e.mode, Uid: e.uid, Gid: e.uid, Size: int64(len(e.data)), ModTime: at, Typeflag: tar.TypeReg}
		if e.name[len(e.name)-1] == '/' {
			h.Typeflag = tar.TypeDir
		}
		if err := w.WriteHeader(h); err != nil {
			return nil, fmt.Errorf("image: %w", err)
		}
		if _, err := w.Write(e.data); err != nil {
			return nil, fmt.Errorf("image: %w", err)
		}
	}
	if err := w.Close(); err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	l, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(b.Bytes())), nil }, tarball.WithCompressedCaching)
	if err != nil {
		return nil, fmt.Errorf("image: %w", err)
	}
	return l, nil
}
