package main

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"
	"time"
)

// TestExportCAFollowsNoLink: whoever may write to the folder of the bundle decides neither
// where it is written to nor what stays behind.
func TestExportCAFollowsNoLink(t *testing.T) {
	dir, victim := t.TempDir(), filepath.Join(t.TempDir(), "victim")
	bundle := filepath.Join(dir, "bundle.pem")
	ca, err := newDemoCA(time.Now())
	if err != nil {
		t.Fatal(err)
	}
	put(t, filepath.Dir(victim), "victim", []byte("untouched"))
	put(t, dir, "ca.pem", ca.pem)
	for _, name := range []string{bundle, bundle + ".new"} {
		if err := os.Symlink(victim, name); err != nil {
			t.Fatal(err)
		}
	}
	if err := (&app{}).exportCA(filepath.Join(dir, "ca.pem"), bundle, ""); err != nil {
		t.Fatal(err)
	}
	if got, err := os.ReadFile(victim); err != nil || string(got) != "untouched" {
		t.Errorf("the link's target: %q %v", got, err)
	}
	info, err := os.Lstat(bundle)
	if err != nil || info.Mode() != 0o644 {
		t.Errorf("the bundle: %v %v", info.Mode(), err)
	}
	if got, err := os.ReadFile(bundle); err != nil || !bytes.Equal(got, ca.pem) {
		t.Errorf("the bundle: %s %v", got, err)
	}
	// A folder cannot be replaced: nothing is left of the attempt.
	folder := filepath.Join(dir, "folder")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := (&app{}).exportCA(filepath.Join(dir, "ca.pem"), folder, ""); err == nil {
		t.Error("it replaced a folder")
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 4 {
		t.Errorf("left behind: %v %v", left, err)
	}
}
