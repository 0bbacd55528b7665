package inject_test

import (
	"bytes"
	"context"
	"encoding"
	"encoding/base64"
	"encoding/gob"
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"io/fs"
	"log"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"text/template"
	"time"

	"go.uber.org/goleak"
	"gopkg.in/yaml.v3"
	"pgregory.net/rapid"

	"waybill/inject"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

func TestMain(m *testing.M) {
	if v := os.Getenv("WAYBILL_INJECT_PANIC"); v != "" {
		panic(inject.NewSecret([]byte(v)))
	}
	goleak.VerifyTestMain(m)
}

// holder has a secret in every place where a printer might find one.
type holder struct {
	Exported   inject.Secret
	Pointer    *inject.Secret
	unexported inject.Secret
	hidden     *inject.Secret
	Any        any
	Slice      []inject.Secret
	Map        map[string]inject.Secret
	inner      struct{ deep inject.Secret }
	Resolved   inject.Resolved
}

func TestSecretIsRedactedOnEveryPath(t *testing.T) {
	contract.Covers(t, "C3", "C2")
	c := testkit.NewCanary(t)
	s := inject.NewSecret([]byte(c.Value()))
	testkit.RequireFound(t, c, testkit.InBytes("Expose", s.Expose()))
	h := holder{
		Exported: s, Pointer: &s, unexported: s, hidden: &s, Any: s, Slice: []inject.Secret{s},
		Map: map[string]inject.Secret{"k": s}, Resolved: inject.Resolved{ID: "stripe", Version: "v1", Secret: s},
	}
	h.inner.deep = s
	values := map[string]any{"value": s, "pointer": &s, "struct": h, "pointer to struct": &h, "map": h.Map, "slice": h.Slice, "array": [1]inject.Secret{s}, "any": []any{s, &s}}

	// Formats that vet would refuse: too many arguments, a width that is no number, a
	// wrapped value that is no error.
	mistakes := []string{"x", "%*d", "%v %w"}

	// Every verb there is, and some that are not, with flags, width and precision.
	for name, v := range values {
		for verb := '!'; verb <= '~'; verb++ {
			if verb == '%' || verb == '*' || strings.ContainsRune("+-# 0.[123456789", verb) {
				continue
			}
			for _, flags := range []string{"", "+", "#", "-", " ", "0", "+#", "# ", "200", "-200", ".200", ".2", "[1]"} {
				format := "%" + flags + string(verb)
				testkit.Search(t, c, testkit.InString(name+" "+format, fmt.Sprintf(format, v)))
			}
		}
		testkit.Search(t, c,
			testkit.InString(name+" Sprint", fmt.Sprint(v)),
			testkit.InString(name+" Sprintln", fmt.Sprintln(v, v)),
			testkit.InString(name+" extra", fmt.Sprintf(mistakes[0], v)),
			testkit.InString(name+" width", fmt.Sprintf(mistakes[1], v, v)),
			testkit.InString(name+" Errorf", fmt.Errorf(mistakes[2], v, v).Error()),
			testkit.InString(name+" Append", string(fmt.Append(nil, v))),
		)

		if b, err := json.Marshal(v); err != nil {
			t.Errorf("%s: JSON: %v", name, err)
		} else {
			testkit.Search(t, c, testkit.InBytes(name+" JSON", b))
		}
		if b, err := yaml.Marshal(v); err != nil {
			t.Errorf("%s: YAML: %v", name, err)
		} else {
			testkit.Search(t, c, testkit.InBytes(name+" YAML", b))
		}
		var out bytes.Buffer
		log.New(&out, "", 0).Print(v)
		options := &slog.HandlerOptions{Level: slog.LevelDebug, AddSource: true}
		slog.New(slog.NewTextHandler(&out, options)).Debug("m", "k", v, slog.Group("g", "k", v), v)
		slog.New(slog.NewJSONHandler(&out, options)).Debug("m", "k", v, slog.Group("g", "k", v), v)
		if err := template.Must(template.New("").Parse(`{{.}} {{printf "%s" .}}`)).Execute(&out, v); err != nil {
			t.Errorf("%s: template: %v", name, err)
		}
		_ = xml.NewEncoder(&out).Encode(v)
		_ = gob.NewEncoder(&out).Encode(v)
		testkit.Search(t, c, testkit.InBytes(name+" log, slog, template, XML, gob", out.Bytes()))
	}

	// What it looks like, where it is seen.
	for got, want := range map[string]string{
		fmt.Sprintf("%v|%s|%q|%x|%X|%d|%#v|%+v|%5.1s", s, s, s, s, s, s, s, s, s): strings.Repeat("[redacted]|", 8) + "[redacted]",
		fmt.Sprintf("%v %v", struct{ S inject.Secret }{s}, []inject.Secret{s}):    "{[redacted]} [[redacted]]",
		s.String():   "[redacted]",
		s.GoString(): "[redacted]",
	} {
		if got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	for name, marshal := range map[string]func(any) ([]byte, error){"JSON": json.Marshal, "YAML": yaml.Marshal} {
		b, err := marshal(map[string]any{"s": s, "p": &s, "z": inject.Secret{}})
		if err != nil || strings.Count(string(b), "[redacted]") != 3 {
			t.Errorf("%s: %s, %v", name, b, err)
		}
	}
}

// The runtime prints the value of a panic that nobody recovers.
func TestSecretInAPanic(t *testing.T) {
	contract.Covers(t, "C2", "C3")
	c := testkit.NewCanary(t)
	cmd := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^$")
	cmd.Env = append(os.Environ(), "WAYBILL_INJECT_PANIC="+c.Value())
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "panic: ") || !strings.Contains(string(out), "[redacted]") {
		t.Errorf("no panic that shows [redacted]: %v, %d bytes", err, len(out))
	}
	testkit.Search(t, c, testkit.InBytes("the panic", out))
}

func TestSecretHasNoCodec(t *testing.T) {
	contract.Covers(t, "C3")
	c := testkit.NewCanary(t)
	s := inject.NewSecret([]byte(c.Value()))
	var _ encoding.BinaryMarshaler = s
	for name, f := range map[string]func() error{
		"gob":          func() error { return gob.NewEncoder(&bytes.Buffer{}).Encode(s) },
		"gob field":    func() error { return gob.NewEncoder(&bytes.Buffer{}).Encode(struct{ S inject.Secret }{s}) },
		"binary":       func() error { _, err := s.MarshalBinary(); return err },
		"from gob":     func() error { return (inject.Secret{}).GobDecode([]byte("x")) },
		"from binary":  func() error { return (&inject.Secret{}).UnmarshalBinary([]byte("x")) },
		"from text":    func() error { return (&inject.Secret{}).UnmarshalText([]byte("x")) },
		"from JSON":    func() error { return json.Unmarshal([]byte(`"x"`), &inject.Secret{}) },
		"from YAML":    func() error { return yaml.Unmarshal([]byte("x"), &inject.Secret{}) },
		"JSON in JSON": func() error { return json.Unmarshal([]byte(`{"S":"x"}`), &struct{ S inject.Secret }{}) },
	} {
		if err := f(); !errors.Is(err, inject.ErrNoSecretCodec) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestSecretValue(t *testing.T) {
	raw := []byte("value")
	s := inject.NewSecret(raw)
	clear(raw)
	if string(s.Expose()) != "value" || s.IsZero() {
		t.Fatal("the secret shares the caller's bytes")
	}
	clear(s.Expose())
	other := s
	if string(other.Expose()) != "value" {
		t.Fatal("Expose gives the value itself away")
	}
	s.Zero()
	if string(other.Expose()) != "\x00\x00\x00\x00\x00" {
		t.Fatal("Zero leaves the value in memory")
	}
	var zero inject.Secret
	zero.Zero()
	if zero.Expose() != nil || !zero.IsZero() || !inject.NewSecret(nil).IsZero() || zero.String() != "[redacted]" {
		t.Fatal("zero value")
	}
}

// refused checks an error of this package: type, code, reason, position, facts, and
// that it holds nothing of the canary, however it is printed.
func refused(t *testing.T, c *testkit.Canary, err error, code outcome.Code, reason string, position int) {
	t.Helper()
	var e *inject.Error
	if !errors.As(err, &e) {
		t.Fatalf("error is %T: %v", err, err)
	}
	if e.Code != code || e.Reason != reason || e.Position != position {
		t.Errorf("%v %s at %d, want %v %s at %d", e.Code, e.Reason, e.Position, code, reason, position)
	}
	f := e.Facts()
	if f.Code != code || f.Phase != outcome.CredentialInjection || f.Outcome != outcome.NotAttempted {
		t.Errorf("facts %+v", f)
	}
	if want := map[bool]outcome.Retry{true: outcome.Backoff, false: outcome.AfterCorrection}[code == outcome.CodeCredentialUnavailable]; f.Retry != want {
		t.Errorf("retry %v, want %v", f.Retry, want)
	}
	js, _ := json.Marshal(e)
	testkit.Search(t, c, testkit.InString("error", err.Error()), testkit.InString("%+v", fmt.Sprintf("%+v %#v", *e, *e)), testkit.InBytes("JSON", js))
	for u := errors.Unwrap(err); u != nil; u = errors.Unwrap(u) {
		testkit.Search(t, c, testkit.InString("cause", u.Error()))
	}
}

// badSecrets are contents that must be refused; %s stands for a canary.
func badSecrets(v string) map[string]struct {
	raw      string
	reason   string
	position int
} {
	n := len(v)
	half := v[:n/2]
	rest := v[n/2:]
	return map[string]struct {
		raw      string
		reason   string
		position int
	}{
		"empty":            {"", inject.ReasonEmpty, 0},
		"LF alone":         {"\n", inject.ReasonEmpty, 0},
		"CRLF alone":       {"\r\n", inject.ReasonEmpty, 0},
		"two LF":           {v + "\n\n", inject.ReasonControlByte, n + 1},
		"LF CRLF":          {v + "\n\r\n", inject.ReasonControlByte, n + 1},
		"CR":               {v + "\r", inject.ReasonControlByte, n + 1},
		"CR CRLF":          {v + "\r\r\n", inject.ReasonControlByte, n + 1},
		"CR inside":        {half + "\r" + rest, inject.ReasonControlByte, n/2 + 1},
		"LF inside":        {half + "\n" + rest, inject.ReasonControlByte, n/2 + 1},
		"leading LF":       {"\n" + v, inject.ReasonControlByte, 1},
		"NUL inside":       {half + "\x00" + rest, inject.ReasonControlByte, n/2 + 1},
		"NUL at the end":   {v + "\x00", inject.ReasonControlByte, n + 1},
		"tab":              {half + "\t" + rest, inject.ReasonControlByte, n/2 + 1},
		"DEL":              {half + "\x7f" + rest, inject.ReasonControlByte, n/2 + 1},
		"escape":           {"\x1b[31m" + v, inject.ReasonControlByte, 1},
		"UTF-8 BOM":        {"\xef\xbb\xbf" + v, inject.ReasonByteOrderMark, 1},
		"UTF-16 BOM":       {"\xff\xfe" + v, inject.ReasonByteOrderMark, 1},
		"UTF-16 BOM, big":  {"\xfe\xff" + v, inject.ReasonByteOrderMark, 1},
		"non-ASCII":        {half + "é" + rest, inject.ReasonNonASCII, n/2 + 1},
		"Latin-1":          {v + "\xe9", inject.ReasonNonASCII, n + 1},
		"trailing space":   {v + " ", inject.ReasonOuterSpace, n + 1},
		"space before LF":  {v + " \n", inject.ReasonOuterSpace, n + 1},
		"leading space":    {" " + v, inject.ReasonOuterSpace, 1},
		"no-break space":   {v + "\u00a0", inject.ReasonNonASCII, n + 1},
		"one byte too big": {v + strings.Repeat("x", inject.MaxSecretBytes-n+1), inject.ReasonTooLarge, 0},
		"2 MB":             {strings.Repeat(v, 2<<20/n), inject.ReasonTooLarge, 0},
	}
}

// Case LK-02, for both sources.
func TestSourcesRefuseWhatCannotBeSent(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	c := testkit.NewCanary(t)
	for name, tc := range badSecrets(c.Value()) {
		t.Run(name, func(t *testing.T) {
			sources := map[string]inject.Source{"file": inject.FileSource(testkit.WriteFile(t, "s", []byte(tc.raw)))}
			if !strings.Contains(tc.raw, "\x00") && len(tc.raw) < 100<<10 {
				t.Setenv("INJECT_TEST", tc.raw)
				sources["env"] = inject.EnvSource("INJECT_TEST")
			}
			for kind, src := range sources {
				secret, err := src.Fetch(t.Context())
				if !secret.IsZero() {
					t.Error("a secret with an error")
				}
				refused(t, c, err, outcome.CodeCredentialInvalid, tc.reason, tc.position)
				st := store(t, inject.Credential{ID: "pay_key", Source: src})
				r, err := st.Resolve(t.Context(), "pay_key")
				if !r.Secret.IsZero() {
					t.Error("a secret with an error")
				}
				refused(t, c, err, outcome.CodeCredentialInvalid, tc.reason, tc.position)
				if s := err.Error(); !strings.Contains(s, `credential "pay_key" (`+kind+`): CREDENTIAL_INVALID: `+tc.reason) {
					t.Error(s)
				}
				if all := st.Check(t.Context(), nil); len(all) != 1 || all[0].ID != "pay_key" || all[0].Reason != tc.reason {
					t.Errorf("Check: %v", all)
				}
			}
		})
	}
}

func store(t *testing.T, creds ...inject.Credential) *inject.Store {
	t.Helper()
	s, err := inject.NewStore(creds)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func TestSourcesTrimExactlyOneLineEnd(t *testing.T) {
	contract.Covers(t, "C1")
	c := testkit.NewCanary(t)
	for name, tc := range map[string]struct{ raw, want string }{
		"none":         {c.Value(), c.Value()},
		"LF":           {c.Value() + "\n", c.Value()},
		"CRLF":         {c.Value() + "\r\n", c.Value()},
		"inner spaces": {"a b  c\n", "a b  c"},
		"one byte":     {"x", "x"},
		"largest":      {strings.Repeat("x", inject.MaxSecretBytes) + "\r\n", strings.Repeat("x", inject.MaxSecretBytes)},
	} {
		t.Run(name, func(t *testing.T) {
			s, err := inject.FileSource(testkit.WriteFile(t, "s", []byte(tc.raw))).Fetch(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(s.Expose(), []byte(tc.want)) {
				t.Error("another value")
			}
			t.Setenv("INJECT_TEST", tc.raw)
			if s, err = inject.EnvSource("INJECT_TEST").Fetch(t.Context()); err != nil || !bytes.Equal(s.Expose(), []byte(tc.want)) {
				t.Errorf("env: %v", err)
			}
		})
	}
}

// asNobody runs f on a thread whose file accesses are those of an ordinary user:
// root reads files of mode 000.
func asNobody(t *testing.T, f func()) {
	t.Helper()
	if os.Geteuid() != 0 {
		f()
		return
	}
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	const nobody = 65534
	if _, _, errno := syscall.RawSyscall(syscall.SYS_SETFSUID, nobody, 0, 0); errno != 0 {
		t.Fatal(errno)
	}
	defer func() { _, _, _ = syscall.RawSyscall(syscall.SYS_SETFSUID, 0, 0, 0) }()
	f()
}

// Case SC-01.
func TestFileSourceFailsClosed(t *testing.T) {
	contract.Covers(t, "C1")
	c := testkit.NewCanary(t)
	dir := t.TempDir()
	for _, d := range []string{dir, filepath.Dir(dir)} { // for nobody, too
		if err := os.Chmod(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	path := func(name string) string { return filepath.Join(dir, name) }
	write := func(name string, mode fs.FileMode) string {
		if err := os.WriteFile(path(name), []byte(c.Value()), mode); err != nil {
			t.Fatal(err)
		}
		return path(name)
	}
	if err := syscall.Mkfifo(path("pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	ln, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", path("socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	for link, target := range map[string]string{"dangling": path("nothing"), "loop": path("loop")} {
		if err := os.Symlink(target, path(link)); err != nil {
			t.Fatal(err)
		}
	}
	for name, tc := range map[string]struct {
		path   string
		code   outcome.Code
		reason string
	}{
		"missing":             {path("nothing"), outcome.CodeCredentialMissing, inject.ReasonNotSet},
		"missing folder":      {path("no/thing"), outcome.CodeCredentialMissing, inject.ReasonNotSet},
		"below a file":        {filepath.Join(write("plain", 0o600), "s"), outcome.CodeCredentialMissing, inject.ReasonNotSet},
		"dangling link":       {path("dangling"), outcome.CodeCredentialMissing, inject.ReasonNotSet},
		"no path":             {"", outcome.CodeCredentialMissing, inject.ReasonNotSet},
		"unreadable":          {write("secret", 0), outcome.CodeCredentialInvalid, inject.ReasonUnreadable},
		"link to itself":      {path("loop"), outcome.CodeCredentialInvalid, inject.ReasonUnreadable},
		"name too long":       {path(strings.Repeat("n", 300)), outcome.CodeCredentialInvalid, inject.ReasonUnreadable},
		"folder":              {dir, outcome.CodeCredentialInvalid, inject.ReasonNotAFile},
		"pipe without writer": {path("pipe"), outcome.CodeCredentialInvalid, inject.ReasonNotAFile},
		"socket":              {path("socket"), outcome.CodeCredentialInvalid, inject.ReasonNotAFile},
		"device":              {"/dev/zero", outcome.CodeCredentialInvalid, inject.ReasonNotAFile},
	} {
		t.Run(name, func(t *testing.T) {
			var err error
			fetch := func() { _, err = inject.FileSource(tc.path).Fetch(t.Context()) }
			if name == "unreadable" {
				asNobody(t, fetch)
			} else {
				fetch()
			}
			refused(t, c, err, tc.code, tc.reason, 0)
			if strings.Contains(err.Error(), dir) {
				t.Error("the text names the path")
			}
			if tc.reason == inject.ReasonNotSet && !errors.Is(err, fs.ErrNotExist) && !errors.Is(err, syscall.ENOTDIR) {
				t.Errorf("cause: %v", errors.Unwrap(err))
			}
		})
	}
	if err := os.Unsetenv("INJECT_TEST_UNSET"); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"INJECT_TEST_UNSET", "", "a=b", "a\x00b"} {
		_, err := inject.EnvSource(name).Fetch(t.Context())
		refused(t, c, err, outcome.CodeCredentialMissing, inject.ReasonNotSet, 0)
	}
}

// One credential that fails does not touch the others, and a file that comes late
// or is rotated is used from the next request on.
func TestStoreResolves(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	c, next := testkit.NewCanary(t), testkit.NewCanary(t)
	late := filepath.Join(t.TempDir(), "late")
	t.Setenv("INJECT_TEST", c.Value())
	st := store(t,
		inject.Credential{ID: "late", Source: inject.FileSource(late)},
		inject.Credential{ID: "env", Source: inject.EnvSource("INJECT_TEST")},
		inject.Credential{ID: "labelled", Label: "2026-11", Source: inject.EnvSource("INJECT_TEST")},
	)
	if ids := st.IDs(); fmt.Sprint(ids) != "[env labelled late]" {
		t.Error(ids)
	}
	if names := st.EnvNames(); fmt.Sprint(names) != "[INJECT_TEST]" {
		t.Error(names)
	}
	_, err := st.Resolve(t.Context(), "late")
	refused(t, c, err, outcome.CodeCredentialMissing, inject.ReasonNotSet, 0)
	if all := st.Check(t.Context(), nil); len(all) != 1 || all[0].ID != "late" {
		t.Errorf("Check: %v", all)
	}

	write := func(v string, at time.Time) inject.Resolved {
		if err := os.WriteFile(late, []byte(v+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Chtimes(late, at, at); err != nil {
			t.Fatal(err)
		}
		r, err := st.Resolve(t.Context(), "late")
		if err != nil {
			t.Fatal(err)
		}
		if string(r.Secret.Expose()) != v {
			t.Fatal("another value")
		}
		return r
	}
	at := time.Date(2026, 11, 30, 18, 4, 5, 6, time.UTC)
	first := write(c.Value(), at)
	if first.ID != "late" || first.Version != "mtime:20261130T180405.000000006Z" {
		t.Errorf("%+v", first)
	}
	if again := write(next.Value(), at); again.Version != first.Version {
		t.Error("the version depends on the secret")
	}
	if r := write(next.Value(), at.Add(1)); r.Version == first.Version {
		t.Error("rotated, and the same version")
	}
	if r, err := st.Resolve(t.Context(), "labelled"); err != nil || r.Version != "2026-11" {
		t.Errorf("%v %v", r, err)
	}
	if r, err := st.Resolve(t.Context(), "env"); err != nil || !strings.HasPrefix(r.Version, "started:") {
		t.Errorf("%v %v", r, err)
	}
	if all := st.Check(t.Context(), nil); len(all) != 0 {
		t.Errorf("Check: %v", all)
	}
}

func TestUnknownReferenceIsNotEchoed(t *testing.T) {
	contract.Covers(t, "B3")
	c := testkit.NewCanary(t)
	t.Setenv("INJECT_TEST", "x")
	for name, st := range map[string]*inject.Store{
		"nil": nil, "empty": store(t), "other": store(t, inject.Credential{ID: "known", Source: inject.EnvSource("INJECT_TEST")}),
	} {
		_, err := st.Resolve(t.Context(), c.Value())
		refused(t, c, err, outcome.CodeCredentialMissing, inject.ReasonUnknown, 0)
		if strings.Contains(err.Error(), "known\"") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if st := (*inject.Store)(nil); st.IDs() != nil || st.EnvNames() != nil || st.Check(t.Context(), nil) != nil {
		t.Error("nil store")
	}
}

// foreign is a source of another package.
type foreign struct {
	secret []byte
	err    error
}

func (f foreign) Kind() string { return "vault" }
func (f foreign) Fetch(context.Context) (inject.Secret, error) {
	return inject.NewSecret(f.secret), f.err
}

type timeoutError struct{ text string }

func (e timeoutError) Error() string { return e.text }
func (timeoutError) Timeout() bool   { return true }

// A source of another kind is not trusted to check, nor to keep its errors clean.
func TestStoreGuardsForeignSources(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	c := testkit.NewCanary(t)
	leaky := errors.New("cannot parse " + c.Value())
	for name, tc := range map[string]struct {
		source foreign
		code   outcome.Code
		reason string
		pos    int
	}{
		"empty":         {foreign{}, outcome.CodeCredentialInvalid, inject.ReasonEmpty, 0},
		"line end":      {foreign{secret: []byte(c.Value() + "\n")}, outcome.CodeCredentialInvalid, inject.ReasonControlByte, len(c.Value()) + 1},
		"leaky error":   {foreign{err: leaky}, outcome.CodeCredentialInvalid, inject.ReasonSource, 0},
		"both":          {foreign{secret: []byte(c.Value()), err: leaky}, outcome.CodeCredentialInvalid, inject.ReasonSource, 0},
		"leaky timeout": {foreign{err: timeoutError{c.Value()}}, outcome.CodeCredentialUnavailable, inject.ReasonTimeout, 0},
		"deadline":      {foreign{err: fmt.Errorf("%s: %w", c.Value(), context.DeadlineExceeded)}, outcome.CodeCredentialUnavailable, inject.ReasonTimeout, 0},
		"cancelled":     {foreign{err: fmt.Errorf("%s: %w", c.Value(), context.Canceled)}, outcome.CodeCredentialUnavailable, inject.ReasonTimeout, 0},
		"typed":         {foreign{err: fmt.Errorf("%s: %w", c.Value(), &inject.Error{Code: outcome.CodeVaultLocked, Reason: "locked"})}, outcome.CodeVaultLocked, "locked", 0},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := store(t, inject.Credential{ID: "k", Label: "v", Source: tc.source}).Resolve(t.Context(), "k")
			if !r.Secret.IsZero() || r.ID != "" {
				t.Error("a result with an error")
			}
			refused(t, c, err, tc.code, tc.reason, tc.pos)
		})
	}
	r, err := store(t, inject.Credential{ID: "k", Source: foreign{secret: []byte(c.Value())}}).Resolve(t.Context(), "k")
	if err != nil || r.Version != "vault:unversioned" {
		t.Errorf("%v %v", r, err)
	}
	// The secret, or more than it, as its own label.
	for _, label := range []string{c.Value(), "v1 " + c.Value()} {
		_, err := store(t, inject.Credential{ID: "k", Label: label, Source: foreign{secret: []byte(c.Value())}}).Resolve(t.Context(), "k")
		refused(t, c, err, outcome.CodeCredentialInvalid, inject.ReasonLabel, 0)
	}
	if _, err := store(t, inject.Credential{ID: "k", Label: "2026-11", Source: foreign{secret: []byte("6-1")}}).Resolve(t.Context(), "k"); err != nil {
		t.Error(err)
	}
}

func TestNewStoreNamesAllThatIsWrong(t *testing.T) {
	src := inject.EnvSource("X")
	_, err := inject.NewStore([]inject.Credential{
		{ID: "", Source: src},
		{ID: "a b", Source: src},
		{ID: "ok", Source: src},
		{ID: "ok", Source: src},
		{ID: "label", Label: "a,b", Source: src},
		{ID: "none"},
		{ID: strings.Repeat("x", 129), Source: src},
		{ID: "a@b", Source: src},
	})
	if !errors.Is(err, inject.ErrBadCredential) {
		t.Fatal(err)
	}
	for _, i := range []int{0, 1, 3, 4, 5, 6, 7} {
		if !strings.Contains(err.Error(), fmt.Sprintf("credentials[%d]: ", i)) {
			t.Errorf("%d is missing: %v", i, err)
		}
	}
	if strings.Contains(err.Error(), "credentials[2]") {
		t.Error(err)
	}
}

func TestTemplates(t *testing.T) {
	s := inject.NewSecret([]byte("s3cr${secret}et"))
	pair := func(user string) string {
		return base64.StdEncoding.EncodeToString([]byte(user + ":s3cr${secret}et"))
	}
	for in, want := range map[string]struct{ value, mode string }{
		"${secret}":             {"s3cr${secret}et", inject.ModeHeader},
		"Bearer ${secret}":      {"Bearer s3cr${secret}et", inject.ModeBearer},
		"bearer ${secret}":      {"bearer s3cr${secret}et", inject.ModeBearer},
		"Basic ${basic:user}":   {"Basic " + pair("user"), inject.ModeBasic},
		"Basic ${basic:}":       {"Basic " + pair(""), inject.ModeBasic},
		"Basic ${basic:a b@c}":  {"Basic " + pair("a b@c"), inject.ModeBasic},
		"token=${secret}; x=$1": {"token=s3cr${secret}et; x=$1", inject.ModeHeader},
		"$${secret}$":           {"$s3cr${secret}et$", inject.ModeHeader},
		"{secret}${secret}}":    {"{secret}s3cr${secret}et}", inject.ModeHeader},
		"Bearer${secret}":       {"Bearers3cr${secret}et", inject.ModeHeader},
		"${basic:u} ${secret}":  {pair("u") + " s3cr${secret}et", inject.ModeHeader},
	} {
		tmpl, err := inject.ParseTemplate(in)
		if err != nil {
			t.Errorf("%q: %v", in, err)
			continue
		}
		got, err := tmpl.Render(s)
		if err != nil || got != want.value || tmpl.Mode() != want.mode {
			t.Errorf("%q: %q %s %v", in, got, tmpl.Mode(), err)
		}
	}
}

func TestTemplatesRefused(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	c := testkit.NewCanary(t)
	v := strings.Map(func(r rune) rune { // braces aside, a secret written into a template
		if r == '{' || r == '}' {
			return 'x'
		}
		return r
	}, c.Value())
	n := len(v)
	for in, want := range map[string]struct {
		reason   string
		position int
	}{
		"":                             {inject.ReasonNoPlaceholder, 0},
		"Bearer " + v:                  {inject.ReasonNoPlaceholder, 0},
		"Bearer $secret " + v:          {inject.ReasonNoPlaceholder, 0},
		"${" + v + "}":                 {inject.ReasonPlaceholder, 1},
		v + "${}":                      {inject.ReasonPlaceholder, n + 1},
		v + "${Secret}":                {inject.ReasonPlaceholder, n + 1},
		v + "${ secret }":              {inject.ReasonPlaceholder, n + 1},
		v + "${env:HOME}":              {inject.ReasonPlaceholder, n + 1},
		v + "${basic}":                 {inject.ReasonPlaceholder, n + 1},
		v + "${basic:a:b}":             {inject.ReasonPlaceholder, n + 1},
		v + "${basic:${secret}}":       {inject.ReasonPlaceholder, n + 1},
		"${secret}" + v + "${secret":   {inject.ReasonTemplate, n + 10},
		v + "\r\nX: ${secret}":         {inject.ReasonTemplate, n + 1},
		v + "\x00${secret}":            {inject.ReasonTemplate, n + 1},
		v + "\t${secret}":              {inject.ReasonTemplate, n + 1},
		v + "é${secret}":               {inject.ReasonTemplate, n + 1},
		" " + v + "${secret}":          {inject.ReasonOuterSpace, 1},
		v + "${secret} ":               {inject.ReasonOuterSpace, n + 10},
		strings.Repeat("x", 5000) + v:  {inject.ReasonTooLarge, 4097},
		"Bearer ${secret} ${secret:x}": {inject.ReasonPlaceholder, 18},
	} {
		tmpl, err := inject.ParseTemplate(in)
		if tmpl != nil {
			t.Errorf("%d bytes: a template with an error", len(in))
		}
		refused(t, c, err, outcome.CodeInjectionUnsupported, want.reason, want.position)
	}
}

func TestRenderRefusesWhatIsNoFieldValue(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	c := testkit.NewCanary(t)
	tmpl, err := inject.ParseTemplate("Bearer ${secret}")
	if err != nil {
		t.Fatal(err)
	}
	for name, tc := range badSecrets(c.Value()) {
		if strings.HasSuffix(name, "LF alone") || strings.HasSuffix(tc.raw, "\n") {
			continue // those are trimmed before
		}
		v, err := tmpl.Render(inject.NewSecret([]byte(tc.raw)))
		if v != "" {
			t.Errorf("%s: a value with an error", name)
		}
		refused(t, c, err, outcome.CodeCredentialInvalid, tc.reason, tc.position)
	}
	for _, bad := range []*inject.Template{nil, {}} {
		_, err := bad.Render(inject.NewSecret([]byte(c.Value())))
		refused(t, c, err, outcome.CodeInjectionUnsupported, inject.ReasonTemplate, 0)
	}
}

func TestCheckHeader(t *testing.T) {
	contract.Covers(t, "C1")
	c := testkit.NewCanary(t)
	for _, name := range []string{"Authorization", "authorization", "X-Api-Key", "Cookie", "PRIVATE-TOKEN", "api_key", "X-Goog-Api-Key", "x!#$%&'*+.^`|~9", "Hostname", "Waybill", "Proxy"} {
		if err := inject.CheckHeader(name); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, name := range []string{
		"Host", "HOST", "Content-Length", "Transfer-Encoding", "Connection", "Keep-Alive", "TE", "Trailer", "Upgrade", "HTTP2-Settings",
		"Proxy-Connection", "Proxy-Authorization", "proxy-anything", "Waybill-Request-Id", "waybill-x", "Expect", "Via", "Max-Forwards", "Forwarded",
	} {
		refused(t, c, inject.CheckHeader(name), outcome.CodeInjectionUnsupported, inject.ReasonHeaderKept, 0)
	}
	for name, position := range map[string]int{"": 0, ":authority": 1, "X Key": 2, "X-Key:": 6, "X\r\nY": 2, "é": 1, "X\x00": 2, " X": 1, "X ": 2, "(x)": 1, "a/b": 2} {
		refused(t, c, inject.CheckHeader(name), outcome.CodeInjectionUnsupported, inject.ReasonHeader, position)
	}
}

// Every code that an Error of this package may carry keeps the request from being
// dispatched, also one that the package does not know.
func TestFactsAreNeverDispatched(t *testing.T) {
	contract.Covers(t, "C1")
	for _, code := range append(outcome.Codes(), outcome.CodeNone) {
		f := (&inject.Error{Code: code}).Facts()
		if f.Phase != outcome.CredentialInjection || f.Outcome != outcome.NotAttempted {
			t.Errorf("%v: %+v", code, f)
		}
	}
	for code, want := range map[outcome.Code]outcome.Retry{
		outcome.CodeVaultLocked: outcome.AfterCorrection, outcome.CodeApprovalDenied: outcome.Never, outcome.CodeCredentialMissing: outcome.AfterCorrection,
		outcome.CodeCredentialInvalid: outcome.AfterCorrection, outcome.CodeCredentialUnavailable: outcome.Backoff, outcome.CodeInjectionUnsupported: outcome.AfterCorrection,
	} {
		if f := (&inject.Error{Code: code}).Facts(); f.Retry != want || f.Code != code {
			t.Errorf("%v: %+v", code, f)
		}
	}
}

// oneLine is what may stand in a field value as Waybill sends it.
func oneLine(v string) bool {
	for i := range len(v) {
		if v[i] < ' ' || v[i] > '~' {
			return false
		}
	}
	return v != "" && v == strings.Trim(v, " ")
}

// Whatever the file holds, it is either refused or the very bytes are sent.
func TestParseSecretProperty(t *testing.T) {
	contract.Covers(t, "C1")
	anyBytes := rapid.OneOf(
		rapid.SliceOfN(rapid.Byte(), 0, 64),
		rapid.Map(rapid.StringMatching(`[ -~]{0,40}(\r?\n){0,2}`), func(s string) []byte { return []byte(s) }),
	)
	rapid.Check(t, func(t *rapid.T) { checkParse(t, anyBytes.Draw(t, "raw")) })
}

type failer interface {
	Helper()
	Errorf(format string, args ...any)
}

func checkParse(t failer, raw []byte) {
	t.Helper()
	keep := bytes.Clone(raw)
	s, err := inject.ParseSecret(raw)
	if !bytes.Equal(keep, raw) {
		t.Errorf("the input was changed")
	}
	want, cut := strings.CutSuffix(string(raw), "\n")
	if cut {
		want = strings.TrimSuffix(want, "\r")
	}
	if good := oneLine(want) && len(want) <= inject.MaxSecretBytes; good != (err == nil) {
		t.Errorf("accepted: %t, want %t", err == nil, good)
	}
	if err == nil {
		if string(s.Expose()) != want {
			t.Errorf("another value")
		}
		return
	}
	var e *inject.Error
	if !s.IsZero() || !errors.As(err, &e) || e.Code != outcome.CodeCredentialInvalid || e.Position < 0 || e.Position > len(raw) {
		t.Errorf("error %v", err)
	}
}

func FuzzParseSecret(f *testing.F) {
	for _, tc := range badSecrets("CANARY-7f3a-0123456789") {
		if len(tc.raw) < 4096 {
			f.Add([]byte(tc.raw))
		}
	}
	f.Add([]byte("CANARY-7f3a\r\n"))
	f.Fuzz(func(t *testing.T, raw []byte) { checkParse(t, raw) })
}

// A template that parses renders every acceptable secret into one field value that
// holds it: plain, or as the password of a Basic pair.
func TestTemplateProperty(t *testing.T) {
	contract.Covers(t, "C1")
	secrets := rapid.StringMatching(`[!-~]([ -~]{0,30}[!-~])?`)
	texts := rapid.SliceOfN(rapid.OneOf(
		rapid.SampledFrom([]string{"${secret}", "${basic:u}", "${basic:", "}", "${", "$", "Bearer ", "Basic ", "${secret", ":", "\r\n", "é"}),
		rapid.StringMatching(`[ -~]{0,6}`),
	), 0, 6)
	rapid.Check(t, func(t *rapid.T) {
		checkTemplate(t, strings.Join(texts.Draw(t, "template"), ""), secrets.Draw(t, "secret"))
	})
}

func checkTemplate(t failer, text, secret string) {
	t.Helper()
	tmpl, err := inject.ParseTemplate(text)
	if err != nil {
		var e *inject.Error
		if tmpl != nil || !errors.As(err, &e) || e.Code != outcome.CodeInjectionUnsupported || e.Position < 0 || e.Position > len(text)+1 {
			t.Errorf("template %v, error %v", tmpl != nil, err)
		}
		return
	}
	if n := strings.Count(text, "${secret}") + strings.Count(text, "${basic:"); n == 0 {
		t.Errorf("a template without a secret: %q", text)
	}
	v, err := tmpl.Render(inject.NewSecret([]byte(secret)))
	if _, bad := inject.ParseSecret([]byte(secret)); bad != nil || strings.HasSuffix(secret, "\n") {
		if err == nil {
			t.Errorf("a bad secret was rendered")
		}
		return
	}
	if err != nil || !oneLine(v) {
		t.Errorf("no field value: %v", err)
	}
	if strings.Contains(text, "${secret}") && !strings.Contains(v, secret) {
		t.Errorf("the secret is not in the value")
	}
	if _, rest, ok := strings.Cut(text, "${basic:"); ok {
		user, _, _ := strings.Cut(rest, "}")
		if !strings.Contains(v, base64.StdEncoding.EncodeToString([]byte(user+":"+secret))) {
			t.Errorf("the pair is not in the value")
		}
	}
	if m := tmpl.Mode(); m != inject.ModeBearer && m != inject.ModeBasic && m != inject.ModeHeader {
		t.Errorf("mode %q", m)
	}
}

func FuzzTemplate(f *testing.F) {
	for _, s := range []string{"Bearer ${secret}", "Basic ${basic:user}", "${", "${basic:a:b}", "$${secret}", "${secret} ", "x\n${secret}"} {
		f.Add(s, "CANARY-7f3a")
		f.Add(s, "a\nb")
	}
	f.Fuzz(func(t *testing.T, text, secret string) { checkTemplate(t, text, secret) })
}

func FuzzCheckHeader(f *testing.F) {
	for _, s := range []string{"Authorization", "Host", "proxy-x", "X Y", "", "é"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, name string) {
		if inject.CheckHeader(name) != nil {
			return
		}
		if !oneLine(name) || strings.ContainsAny(name, " :()<>@,;\\\"/[]?={}") || strings.HasPrefix(strings.ToLower(name), "waybill-") || strings.HasPrefix(strings.ToLower(name), "proxy-") {
			t.Errorf("accepted %q", name)
		}
	})
}
