package vault

import (
	"bytes"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"

	"filippo.io/age"

	"waybill/inject"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

// memKeyring is a keyring in memory.
type memKeyring map[string]string

func (m memKeyring) Get(s, a string) (string, error) {
	if v, ok := m[s+"/"+a]; ok {
		return v, nil
	}
	return "", errors.New("none")
}
func (m memKeyring) Set(s, a, v string) error { m[s+"/"+a] = v; return nil }

func identityFile(t *testing.T) string {
	t.Helper()
	id, err := age.GenerateX25519Identity()
	if err != nil {
		t.Fatal(err)
	}
	return testkit.WriteFile(t, "key.txt", []byte("# a test\n"+id.String()+"\n"))
}

// A vault keeps secrets, shows them to whoever has its key, and nothing to anybody else.
func TestVault(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	workFactor = 10
	t.Cleanup(func() { workFactor = 0 })
	canary := testkit.NewCanary(t)
	ring := memKeyring{}
	id := identityFile(t)
	for name, o := range map[string]InitOptions{"identity": {Identity: id}, "keyring": {Keyring: true}, "passphrase": {Passphrase: "correct horse"}} {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join(t.TempDir(), "vault")
			v := Open(dir, ring)
			if _, err := v.List(); !errors.Is(err, ErrNone) {
				t.Errorf("before init: %v", err)
			}
			if err := v.Init(o); err != nil {
				t.Fatal(err)
			}
			if err := v.Init(o); !errors.Is(err, ErrExists) {
				t.Errorf("a second init: %v", err)
			}
			src := v.Source("stripe")
			var e *inject.Error
			if _, err := src.Fetch(t.Context()); !errors.As(err, &e) || e.Code != outcome.CodeCredentialMissing {
				t.Errorf("a missing secret: %v", err)
			}
			if err := v.Set("stripe", []byte(canary.Value())); err != nil {
				t.Fatal(err)
			}
			if err := src.Replace(t.Context(), []byte(canary.Value()+"2")); err != nil {
				t.Fatal(err)
			}
			// Another process: locked, then open.
			other := Open(dir, ring)
			if _, err := other.Source("stripe").Fetch(t.Context()); !errors.As(err, &e) || e.Code != outcome.CodeVaultLocked {
				t.Errorf("locked: %v", err)
			}
			if err := other.Set("x", []byte("y")); !errors.Is(err, ErrLocked) {
				t.Errorf("a locked one is written: %v", err)
			}
			switch err := other.Unlock("", ""); {
			case name == "passphrase" && !errors.Is(err, ErrLocked), name != "passphrase" && err != nil:
				t.Errorf("by itself: %v", err)
			}
			if name == "passphrase" {
				if err := other.Unlock("battery staple", ""); !errors.Is(err, ErrKey) {
					t.Errorf("a wrong passphrase: %v", err)
				}
				if err := other.Unlock("correct horse", ""); err != nil {
					t.Fatal(err)
				}
			}
			m, err := inject.FetchRaw(t.Context(), other.Source("stripe"))
			if err != nil || string(m.Raw) != canary.Value()+"2" || m.Version != "vault:2" {
				t.Errorf("%v %s", err, m.Version)
			}
			// What one process writes the other reads.
			if err := v.Set("stripe", []byte("third")); err != nil {
				t.Fatal(err)
			}
			if got, serial, err := other.Get("stripe"); err != nil || string(got) != "third" || serial != 3 {
				t.Errorf("%v %d", err, serial)
			}
			if err := other.Remove("stripe"); err != nil {
				t.Fatal(err)
			}
			if err := v.Remove("stripe"); !errors.Is(err, ErrNotFound) {
				t.Errorf("%v", err)
			}
			if err := v.Set("a", []byte(canary.Value())); err != nil {
				t.Fatal(err)
			}
			v.Lock()
			if _, _, err := v.Get("a"); !errors.Is(err, ErrLocked) || !v.Locked() {
				t.Errorf("after locking: %v", err)
			}
			testkit.Search(t, canary, testkit.In(dir))
			_ = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
				if info, ierr := d.Info(); ierr == nil && info.Mode().Perm()&0o077 != 0 {
					t.Errorf("%s has mode %v", path, info.Mode())
				}
				return err
			})
		})
	}
	if _, err := os.Stat(id); err != nil {
		t.Fatal(err)
	}
}

// Writers of several processes lose nothing of each other.
func TestVaultConcurrentWriters(t *testing.T) {
	contract.Covers(t, "C1")
	dir := filepath.Join(t.TempDir(), "vault")
	ring := memKeyring{}
	if err := Open(dir, ring).Init(InitOptions{Keyring: true}); err != nil {
		t.Fatal(err)
	}
	var all sync.WaitGroup
	for i := range 4 {
		all.Go(func() {
			v := Open(dir, ring)
			if err := v.Unlock("", ""); err != nil {
				t.Error(err)
				return
			}
			for j := range 5 {
				if err := v.Set(strconv.Itoa(i)+"-"+strconv.Itoa(j), []byte("value")); err != nil {
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	v := Open(dir, ring)
	if err := v.Unlock("", ""); err != nil {
		t.Fatal(err)
	}
	if list, err := v.List(); err != nil || len(list) != 20 {
		t.Errorf("%d of 20, %v", len(list), err)
	}
}

// A damaged file is told apart from a missing secret, and nothing of it is believed.
func TestVaultDamaged(t *testing.T) {
	contract.Covers(t, "C1")
	id := identityFile(t)
	for _, name := range []string{"secrets.age", "key.age", "vault.json"} {
		for how, change := range map[string]func(b []byte) []byte{
			"flipped": func(b []byte) []byte { b[len(b)/2] ^= 1; return b }, "cut": func(b []byte) []byte { return b[:len(b)/2] }, "empty": func([]byte) []byte { return nil },
		} {
			dir := filepath.Join(t.TempDir(), "vault")
			v := Open(dir, nil)
			if err := v.Init(InitOptions{Identity: id}); err != nil {
				t.Fatal(err)
			}
			if err := v.Set("a", bytes.Repeat([]byte("x"), 100)); err != nil {
				t.Fatal(err)
			}
			text, err := os.ReadFile(filepath.Join(dir, name))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(filepath.Join(dir, name), change(text), 0o600); err != nil {
				t.Fatal(err)
			}
			other := Open(dir, nil)
			if err := other.Unlock("", ""); err == nil {
				t.Errorf("%s %s: opened", name, how)
			}
			if !other.Locked() {
				t.Errorf("%s %s: it counts as open", name, how)
			}
		}
	}
}
