package proxy

import (
	"crypto/sha256"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"waybill/dispatch"
	"waybill/internal/contract"
)

var (
	loopback = &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1), Port: 1}
	mapped   = &net.TCPAddr{IP: net.ParseIP("::ffff:127.0.0.1"), Port: 1}
	outside  = &net.TCPAddr{IP: net.IPv4(192, 0, 2, 1), Port: 1}
)

// TestAuthenticate is the table of CONTRACT V4: who is let in, and as whom.
func TestAuthenticate(t *testing.T) {
	contract.Covers(t, "V4")
	sessions, _ := OpenSessions("")
	id, token, err := sessions.Open("agent")
	if err != nil {
		t.Fatal(err)
	}
	_, gone, err := sessions.Open("gone")
	if err != nil {
		t.Fatal(err)
	}
	list := sessions.List()
	if err := sessions.Close(list[len(list)-1].ID); err != nil {
		t.Fatal(err)
	}
	open := &Callers{Sessions: sessions, IdentityKey: []byte("k")}
	static := &Callers{Sessions: sessions, IdentityKey: []byte("k"), Static: []StaticCaller{{Name: "ci", TokenSHA256: sha256.Sum256([]byte("tok"))}, {Name: "empty", TokenSHA256: sha256.Sum256(nil)}}}
	for _, c := range []struct {
		name           string
		callers        *Callers
		user, password string
		remote         net.Addr
		want           string // id; "" for refused
	}{
		{"nothing on loopback", open, "", "", loopback, "local"},
		{"nothing on mapped loopback", open, "", "", mapped, "local"},
		{"nothing on a unix socket", open, "", "", &net.UnixAddr{Name: "x", Net: "unix"}, "local"},
		{"nothing from outside", open, "", "", outside, ""},
		{"anything from outside", open, "a", "b", outside, ""},
		{"nobody's address", open, "", "", nil, ""},
		{"session", open, id, token, loopback, "session:" + id},
		{"session from outside", open, "x", token, outside, "session:" + id},
		{"session token as user", open, token, "", loopback, "session:" + id},
		{"closed session", open, "x", gone, loopback, ""},
		{"closed session's token as user", open, gone, "", loopback, ""},
		{"session with configured callers", static, id, token, loopback, "session:" + id},
		{"configured", static, "ci", "tok", outside, "caller:ci"},
		{"configured, any user", static, "whoever", "tok", loopback, "caller:ci"},
		{"configured, wrong", static, "ci", "toK", loopback, ""},
		{"configured, nothing", static, "", "", loopback, ""},
		{"configured, empty password", static, "empty", "", loopback, ""},
	} {
		got, ok := c.callers.Authenticate(c.user, c.password, c.remote)
		if ok != (c.want != "") || got.ID != c.want {
			t.Errorf("%s: %q %v, want %q", c.name, got.ID, ok, c.want)
		}
		if ok && !c.callers.Valid(got) {
			t.Errorf("%s: not valid any more", c.name)
		}
	}
	a, _ := open.Authenticate("agent", "toktok", loopback)
	again, _ := open.Authenticate("agent", "toktok", loopback)
	b, _ := open.Authenticate("agent", "other", loopback)
	moved, _ := open.Authenticate("agentto", "ktok", loopback)
	other, _ := (&Callers{IdentityKey: []byte("l")}).Authenticate("agent", "toktok", loopback)
	if a != again || a.ID == b.ID || a.ID == moved.ID || a.ID == other.ID || !strings.HasPrefix(a.ID, "basic:") || a.Name != "" {
		t.Errorf("%v %v %v %v %v", a, again, b, moved, other)
	}
	reloaded := &Callers{Static: []StaticCaller{{Name: "new"}}}
	for _, gone := range []string{"caller:ci", "local", "session:" + id} {
		c := dispatch.Caller{ID: gone}
		switch gone {
		case "caller:ci":
			c.Name = "ci"
		case "session:" + id:
			c.Session = id
		}
		if reloaded.Valid(c) {
			t.Errorf("%s outlives a reload", gone)
		}
	}
	if open.Required() || !static.Required() {
		t.Error("Required")
	}
}

// TestSessionsOnDisk: a session keeps its identity over a restart; the file holds no token.
func TestSessionsOnDisk(t *testing.T) {
	contract.Covers(t, "C2")
	path := filepath.Join(t.TempDir(), "sessions.json")
	s, err := OpenSessions(path)
	if err != nil {
		t.Fatal(err)
	}
	id, token, err := s.Open("agent")
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(path)
	if err != nil || strings.Contains(string(raw), token) || strings.Contains(string(raw), strings.TrimPrefix(token, tokenPrefix)) {
		t.Fatalf("the file holds the token: %v", err)
	}
	if st, _ := os.Stat(path); st.Mode().Perm() != 0o600 {
		t.Errorf("mode %o", st.Mode().Perm())
	}
	again, err := OpenSessions(path)
	if err != nil {
		t.Fatal(err)
	}
	if got, ok := (&Callers{Sessions: again}).Authenticate("x", token, outside); !ok || got.Session != id || got.Name != "agent" {
		t.Errorf("%+v %v", got, ok)
	}
	if err := again.Close(id); err != nil {
		t.Fatal(err)
	}
	if err := again.Close(id); err == nil {
		t.Error("closed twice")
	}
	third, err := OpenSessions(path)
	if err != nil || len(third.List()) != 0 {
		t.Errorf("%v %v", third.List(), err)
	}
	for _, bad := range []string{"{", `[{"id":"x","token_sha256":"zz"}]`} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		if _, err := OpenSessions(path); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
	if _, err := OpenSessions(t.TempDir()); err == nil {
		t.Error("a folder is accepted")
	}
}

// TestCredentials reads what clients present.
func TestCredentials(t *testing.T) {
	for _, c := range []struct {
		values         []string
		user, password string
		ok             bool
	}{
		{nil, "", "", true},
		{[]string{"Basic YTpiOmM="}, "a", "b:c", true},
		{[]string{"basic  YTo="}, "a", "", true},
		{[]string{"Basic OmI="}, "", "b", true},
		{[]string{"Bearer x y"}, "", "x y", true},
		{[]string{"Basic Og=="}, "", "", false}, // ":" is nobody, not anonymous
		{[]string{"Basic YQ=="}, "", "", false},
		{[]string{"Basic *"}, "", "", false},
		{[]string{"Digest x"}, "", "", false},
		{[]string{""}, "", "", false},
		{[]string{"Basic YTpi", "Basic YTpi"}, "", "", false},
	} {
		user, password, ok := credentials(c.values)
		if ok != c.ok || ok && (user != c.user || password != c.password) {
			t.Errorf("%q: %q %q %v", c.values, user, password, ok)
		}
	}
}
