package dispatch

import (
	"crypto/sha256"
	"encoding/binary"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"waybill/internal/contract"
	"waybill/routes"
)

// Fingerprints are on record: how they are computed may change, what they are may not.
func TestFieldIsLengthAndPart(t *testing.T) {
	part := rapid.OneOf(rapid.String(), rapid.Map(rapid.IntRange(1000, 9000), func(n int) string { return strings.Repeat("x", n) }))
	rapid.Check(t, func(t *rapid.T) {
		parts := rapid.SliceOfN(part, 0, 12).Draw(t, "parts")
		sum := sha256.Sum256([]byte("body"))
		got, want := newFields(), sha256.New()
		got.add(parts...)
		got.digest(sum)
		for _, p := range parts {
			_ = binary.Write(want, binary.BigEndian, uint64(len(p)))
			want.Write([]byte(p))
		}
		want.Write(sum[:])
		if got.sum() != [sha256.Size]byte(want.Sum(nil)) {
			t.Fatalf("differs for %d parts", len(parts))
		}
		for range 8 {
			f := newFields()
			if slices.ContainsFunc(f.b[:cap(f.b)], func(c byte) bool { return c != 0 }) {
				t.Fatal("what went into a digest waits for the next one")
			}
			_ = f.sum()
		}
	})
}

// The fingerprint of a command covers all by which two runs differ, and whether its input
// is known: target, user, command, environment, terminal, an input that is given whole
// (CONTRACT D1, D5). The seal adds key and configuration (D2).
func TestExecFingerprint(t *testing.T) {
	contract.Covers(t, "D1", "D2", "D5")
	type run struct {
		out      Outgoing
		exec     Exec
		env      []EnvVar
		stdin    string
		identity string
		snapshot string
	}
	prints := func(change func(r *run)) (print, seal string) {
		r := run{out: Outgoing{Target: routes.Target{Scheme: "ssh", Host: "box.test", Port: 22}}, exec: Exec{User: "deploy", Command: "release 7"}, env: []EnvVar{{"LANG", "C"}}, identity: "key@1", snapshot: "sha256:1"}
		change(&r)
		r.out.Exec = &r.exec
		body := &spool{digest: sha256.Sum256([]byte(r.stdin))}
		sum := sealExec(&r.out, r.env, body, r.identity, r.snapshot)
		return execFingerprint(&r.out, r.env, body), string(sum[:])
	}
	same, sealed := prints(func(*run) {})
	if again, seal := prints(func(*run) {}); again != same || seal != sealed {
		t.Error("two equal commands differ")
	}
	seen := map[string]string{same: "the first"}
	for name, change := range map[string]func(r *run){
		"host":     func(r *run) { r.out.Target.Host = "box2.test" },
		"port":     func(r *run) { r.out.Target.Port = 23 },
		"user":     func(r *run) { r.exec.User = "root" },
		"command":  func(r *run) { r.exec.Command = "release  7" },
		"value":    func(r *run) { r.env[0].Value = "D" },
		"variable": func(r *run) { r.env[0].Name = "LC_ALL" },
		"no env":   func(r *run) { r.env = nil },
		"stdin":    func(r *run) { r.stdin = "7" },
		"streamed": func(r *run) { r.exec.Stdin = strings.NewReader("7") },
		"terminal": func(r *run) { r.exec.Terminal = true },
		"moved":    func(r *run) { r.exec.User, r.exec.Command = "deployrelease", " 7" },
	} {
		print, seal := prints(change)
		if other, ok := seen[print]; ok || seal == sealed {
			t.Errorf("%s is like %s", name, other)
		}
		seen[print] = name
	}
	for name, change := range map[string]func(r *run){"key": func(r *run) { r.identity = "key@2" }, "snapshot": func(r *run) { r.snapshot = "sha256:2" }} {
		if print, seal := prints(change); print != same || seal == sealed {
			t.Errorf("another %s: the fingerprint is the same: %v, the seal: %v", name, print == same, seal == sealed)
		}
	}
}
