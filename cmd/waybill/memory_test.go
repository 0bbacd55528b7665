package main

import (
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"runtime/debug"
	"strings"
	"testing"
)

func TestCgroupLimit(t *testing.T) {
	for name, c := range map[string]struct {
		files map[string]string
		want  int64
	}{
		"none": {map[string]string{}, 0},
		"v2":   {map[string]string{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "134217728\n", "sys/fs/cgroup/a/memory.max": "max\n"}, 128 << 20},
		"v2, a group around it has less": {map[string]string{"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n",
			"sys/fs/cgroup/a/memory.max": "67108864\n"}, 64 << 20},
		"v2 in a container":  {map[string]string{"proc/self/cgroup": "0::/kubepods/pod1/c\n", "sys/fs/cgroup/memory.max": "100663296\n"}, 96 << 20},
		"v2 without a limit": {map[string]string{"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/memory.max": "max\n"}, 0},
		"v1": {map[string]string{"proc/self/cgroup": "5:devices:/\n4:memory:/docker/x\n0::/\n", "sys/fs/cgroup/memory/docker/x/memory.limit_in_bytes": "268435456\n",
			"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 256 << 20},
		"v1 without a limit": {map[string]string{"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 0},
		"nonsense":           {map[string]string{"proc/self/cgroup": "x\n0::/a\n", "sys/fs/cgroup/a/memory.max": "-5\n"}, 0},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for path, text := range c.files {
				if err := os.MkdirAll(filepath.Join(root, filepath.Dir(path)), 0o700); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(root, path), []byte(text), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if got := cgroupLimit(root); got != c.want {
				t.Errorf("%d, want %d", got, c.want)
			}
		})
	}
}

func TestMemoryLimit(t *testing.T) {
	before, percent := debug.SetMemoryLimit(-1), debug.SetGCPercent(100)
	defer func() {
		debug.SetMemoryLimit(before)
		debug.SetGCPercent(percent)
	}()
	log := slog.New(slog.NewTextHandler(io.Discard, nil))
	env := func(string) string { return "" }
	for _, bad := range []string{"", "128", "16MiB", "lots", "-1MiB"} {
		if err := limitMemory(bad, env, log); err == nil || !strings.Contains(err.Error(), "--memory-limit") {
			t.Errorf("%q: %v", bad, err)
		}
	}
	if err := limitMemory("128MiB", env, log); err != nil {
		t.Fatal(err)
	}
	if got := debug.SetMemoryLimit(-1); got != 80530636 {
		t.Errorf("heap limit %d", got)
	}
	if got := debug.SetGCPercent(100); got != smallPercent {
		t.Errorf("GOGC %d", got)
	}
	if err := limitMemory(memoryAuto, func(string) string { return "1GiB" }, log); err != nil || debug.SetMemoryLimit(-1) != 80530636 {
		t.Error("a GOMEMLIMIT of the environment was replaced")
	}
}
