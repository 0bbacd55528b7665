package config

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"waybill/internal/contract"
	"waybill/routes"
)

func mustParse(t testing.TB, text string) *Config {
	t.Helper()
	c, err := Parse("dir/waybill.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestDefaults(t *testing.T) {
	contract.Covers(t, "V1")
	d, c := Defaults(), mustParse(t, "version: 1\n")
	if d.Digest != c.Digest || d.Listen != c.Listen || d.Version != c.Version || c.Snapshot.Default() != routes.Deny || len(c.Snapshot.Routes()) != 0 {
		t.Errorf("%+v\n%+v", d, c)
	}
	if got := (Listen{Proxy: "127.0.0.1:7171", SSH: "127.0.0.1:7172", Metrics: "127.0.0.1:7174"}); c.Listen != got {
		t.Errorf("%+v", c.Listen)
	}
}

// V2: nothing but the words in the file lets a secret travel in clear, or to an
// address range or host that the route does not name.
func TestConservativeDefaults(t *testing.T) {
	contract.Covers(t, "V2")
	base := "version: 1\ncredentials: {c: {from: {env: C}}}\nroutes:\n- name: a\n  match: {host: a.example.test}\n  inject: [{header: X-Key, value: \"${secret}\", credential: c}]\n"
	c := mustParse(t, base)
	r := c.Snapshot.Route("a")
	if u := r.Upstream; u.AllowPlaintext || u.RefusePlaintext || u.AllowPrivate || u.RootsOnly || u.RootsPEM != nil || u.Pins != nil || u.Resolve != nil {
		t.Errorf("%+v", u)
	}
	if r.Contract.Repeatable != nil || r.Durability != routes.Strict || r.Delivery != routes.DeliveryAuto || r.RejectManaged || r.PassAuthorization || r.Limits != routes.DefaultLimits() {
		t.Errorf("%+v", r)
	}
	if got, _ := c.Snapshot.Match("GET", routes.Target{Scheme: "http", Host: "a.example.test", Port: 8080}, "/"); got != nil {
		t.Error("http on another port matches")
	}
	if len(c.Warnings) != 0 {
		t.Errorf("%v", c.Warnings)
	}
	c = mustParse(t, base+"  upstream: {allow_plaintext: true}\n")
	if !c.Snapshot.Route("a").Upstream.AllowPlaintext || len(c.Warnings) != 1 || !strings.Contains(c.Warnings[0].What, "unencrypted") {
		t.Errorf("a secret in clear is not told: %v", c.Warnings)
	}
}

func TestValues(t *testing.T) {
	c := mustParse(t, `version: 1
callers: [{name: ci, token_sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08}]
credentials:
  f: {from: {file: sub/../c.secret}, label: "1"}
  abs: {from: {file: /run/x}}
  e: {from: {env: E_1}}
routes:
- name: a
  match: {host: a.example.test}
  inject:
  - {header: x-key, value: "${secret}", credential: f}
  - {header: authorization, value: "Basic ${basic:u}", credential: abs}
  - {header: Cookie, value: "k=${secret}", credential: e}
  contract: {repeatable: false, refused_before_execution: [429, 503], close_delimited: true, end_marker: "[DONE]"}
  strip: [x-other]
  callers: [ci]
`)
	if len(c.Callers) != 1 || c.Callers[0].Name != "ci" || c.Callers[0].TokenSHA256 != sha256.Sum256([]byte("test")) {
		t.Errorf("%+v", c.Callers)
	}
	if len(c.Credentials) != 3 || c.Credentials[0].ID != "f" || c.Credentials[0].Label != "1" || c.Credentials[0].Source.Kind() != "file" || c.Credentials[2].Source.Kind() != "env" {
		t.Errorf("%+v", c.Credentials)
	}
	r := c.Snapshot.Route("a")
	if rep := r.Contract.Repeatable; rep == nil || *rep || r.Repeatable("GET") || !r.Contract.CloseDelimited || r.Contract.EndMarker != "[DONE]" || fmt.Sprint(r.Contract.RefusedBeforeExecution) != "[429 503]" {
		t.Errorf("%+v", r.Contract)
	}
	want := []routes.Injection{{Header: "X-Key", Value: "${secret}", Credential: "f"}, {Header: "Authorization", Value: "Basic ${basic:u}", Credential: "abs"}, {Header: "Cookie", Value: "k=${secret}", Credential: "e"}}
	if !slices.Equal(r.Inject, want) || r.Strip[0] != "X-Other" {
		t.Errorf("%+v %v", r.Inject, r.Strip)
	}
}

// D1: what decides beside the routes changes the digest too; what does not, does not.
func TestDigest(t *testing.T) {
	contract.Covers(t, "D1")
	base := `version: 1
listen: {metrics: 127.0.0.1:7174}
callers: [{name: ci, token_sha256: 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08}]
credentials: {c: {from: {env: C}, label: "1"}}
routes: [{name: a, match: {host: a.example.test}, inject: [{header: X-Key, value: "${secret}", credential: c}]}]
default: deny
`
	want := mustParse(t, base).Digest
	for what, change := range map[string][2]string{
		"place": {"env: C}", "env: D}"}, "kind": {"env: C}", "file: C}"}, "label": {`"1"`, `"2"`}, "credential": {"c: {from", "d: {from"},
		"caller": {"name: ci", "name: cj"}, "token": {"9f86", "9f87"}, "default": {"default: deny", "default: tunnel"}, "host": {"a.example", "b.example"},
	} {
		text := strings.Replace(base, change[0], change[1], 1)
		if what == "credential" {
			text = strings.Replace(text, "credential: c", "credential: d", 1)
		}
		if got := mustParse(t, text).Digest; got == want {
			t.Errorf("the %s does not count", what)
		}
	}
	for what, text := range map[string]string{
		"comment": "# c\n" + base, "listener": strings.Replace(base, "7174", "7175", 1), "explicit default": strings.Replace(base, "credential: c}]}", "credential: c}], delivery: auto, limits: {timeout: 10m}}", 1),
		"case of a host": strings.Replace(base, "a.example.test", "A.example.TEST.", 1),
	} {
		if got := mustParse(t, text).Digest; got != want {
			t.Errorf("the %s counts", what)
		}
	}
}

// V4: a listener that others can reach needs callers.
func TestCheckListen(t *testing.T) {
	contract.Covers(t, "V4")
	for addr, loopback := range map[string]bool{
		"127.0.0.1:7171": true, "[::1]:7171": true, "localhost:0": true, "127.9.9.9:1": true, "[::ffff:127.0.0.1]:1": true,
		":7171": false, "0.0.0.0:7171": false, "[::]:7171": false, "10.0.0.1:7171": false, "192.0.2.1:80": false,
	} {
		l := DefaultListen()
		l.Proxy = addr
		if got := len(CheckListen(l, false)) == 0; got != loopback || IsLoopback(addr) != loopback {
			t.Errorf("%s without callers: %v", addr, got)
		}
		if list := CheckListen(l, true); len(list) != 0 {
			t.Errorf("%s with callers: %v", addr, list)
		}
		l = DefaultListen()
		l.SSH = addr
		if got := len(CheckListen(l, false)) == 0; got != loopback {
			t.Errorf("ssh %s without callers: %v", addr, got)
		}
	}
	for _, addr := range []string{"", "7171", "127.0.0.1", "host.example:1", "127.0.0.1:x", "127.0.0.1:65536", "127.0.0.1:-1", "::1:80", "127.0.0.1:01"} {
		l := DefaultListen()
		l.Metrics = addr
		if len(CheckListen(l, true)) != 1 || IsLoopback("x") {
			t.Errorf("%q is taken for an address", addr)
		}
	}
}

func TestUnits(t *testing.T) {
	for in, want := range map[string]int64{
		"1B": 1, "32MiB": 32 << 20, "1KiB": 1024, "2GiB": 2 << 30, "1TiB": 1 << 40, "0B": 0,
		"": -1, "1": -1, "MiB": -1, "1.5MiB": -1, "1MB": -1, "1 MiB": -1, "-1MiB": -1, "01MiB": -1, "+1MiB": -1, "9999999999TiB": -1, "1mib": -1,
	} {
		got, ok := parseSize(in)
		if ok != (want >= 0) || ok && got != want {
			t.Errorf("parseSize(%q) = %d, %v", in, got, ok)
		}
	}
	for in, want := range map[string]time.Duration{
		"10m": 10 * time.Minute, "7d": 168 * time.Hour, "1h30m": 90 * time.Minute, "500ms": 500 * time.Millisecond, "1d1h1m1s1ms": 25*time.Hour + 61*time.Second + time.Millisecond, "0s": 0,
		"": -1, "10": -1, "m": -1, "1.5h": -1, "-1m": -1, "1m1h": -1, "1m1m": -1, "01m": -1, "1w": -1, "1us": -1, "9999999999999d": -1, "99999d99999999999h": -1, "1h 1m": -1,
	} {
		got, ok := parseDuration(in)
		if ok != (want >= 0) || ok && got != want {
			t.Errorf("parseDuration(%q) = %v, %v", in, got, ok)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		d := time.Duration(rapid.Int64Range(0, int64(10000*time.Hour)/int64(time.Millisecond)).Draw(t, "ms")) * time.Millisecond
		if got, ok := parseDuration(FormatDuration(d)); !ok || got != d {
			t.Fatalf("%v: %s: %v", d, FormatDuration(d), got)
		}
		n := rapid.Int64Range(0, 1<<50).Draw(t, "bytes")
		if got, ok := parseSize(FormatSize(n)); !ok || got != n {
			t.Fatalf("%d: %s: %v", n, FormatSize(n), got)
		}
	})
}

func TestNearestName(t *testing.T) {
	names := []string{"methods", "path", "paths", "host", "deny"}
	for in, want := range map[string]string{"mehtods": "methods", "method": "methods", "Path": "path", "hots": "host", "paths_": "paths", "xyz": "", "": "", "de": "", "deny_paths": "", "METHODS": "methods"} {
		if got := nearestName(in, names); got != want {
			t.Errorf("nearestName(%q) = %q, want %q", in, got, want)
		}
	}
}

// A file cannot make the reader work without bound: aliases of aliases, many
// problems, deep nesting.
func TestBounds(t *testing.T) {
	var b strings.Builder
	b.WriteString("version: 1\nroutes:\n- name: r0\n  match: {host: a.test, ports: &p [")
	for i := 1; i < 4000; i++ {
		fmt.Fprintf(&b, "%d,", i)
	}
	b.WriteString("4000]}\n")
	for i := 1; i < 5000; i++ {
		fmt.Fprintf(&b, "- {name: r%d, match: {host: h%d.test, ports: *p}}\n", i, i)
	}
	start := time.Now()
	_, err := Parse("f", []byte(b.String()))
	var list Errors
	if !errors.As(err, &list) || !strings.Contains(err.Error(), "too many values") {
		t.Errorf("an alias bomb: %d problems, %.200v", len(list), err)
	}
	if _, err = Parse("f", []byte("version: 1\nroutes:\n- {name: a, match: {host: a.test, ports: ["+strings.Repeat("1,", 9000)+"]}}")); !errors.As(err, &list) || !strings.Contains(err.Error(), "more than 4096") && len(list) <= maxProblems {
		t.Errorf("a long list: %.200v", err)
	}
	list = nil
	_, err = Parse("f", []byte("version: 1\nroutes:\n"+strings.Repeat("- {nmae: x}\n", 50000)))
	if !errors.As(err, &list) || len(list) != maxProblems+1 {
		t.Errorf("many problems: %d", len(list))
	}
	for _, text := range []string{strings.Repeat("[", 100000), strings.Repeat("{a: ", 50000), "a: &a\n  b: *a\nversion: *a\n", strings.Repeat("- ", 50000), strings.Repeat("? ", 9000)} {
		if _, err := Parse("f", []byte(text)); !errors.As(err, &list) {
			t.Errorf("deep nesting: %v", err)
		}
	}
	if d := time.Since(start); d > 30*time.Second {
		t.Errorf("it took %v", d)
	}
}

func TestManyRoutes(t *testing.T) {
	var b strings.Builder
	b.WriteString("version: 1\nroutes:\n")
	for i := range 3000 {
		fmt.Fprintf(&b, "- {name: r%d, match: {host: h%d.example.test, path: /v1/**}}\n", i, i)
	}
	c := mustParse(t, b.String())
	if r, _ := c.Snapshot.Match("GET", routes.Target{Scheme: "https", Host: "h2999.example.test", Port: 443}, "/v1/x"); r == nil || r.Name != "r2999" {
		t.Error("no match")
	}
}

func TestReport(t *testing.T) {
	c, err := Load("testdata/upstream.good.yaml")
	var text, js bytes.Buffer
	rep := NewReport("upstream.good.yaml", c, err)
	if err := rep.WriteJSON(&js); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{`"ok": true`, `"X-Api-Key (c)"`, `"kind": "file"`, `"what": "no route uses this credential"`, `"line": 2`} {
		if !strings.Contains(js.String(), want) {
			t.Errorf("no %s in\n%s", want, js.String())
		}
	}
	_, err = Load("testdata/version.bad.yaml")
	if err := NewReport("version.bad.yaml", nil, err).WriteText(&text); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(text.String(), "error: testdata/version.bad.yaml:2:10 version: ") || !strings.HasSuffix(text.String(), "version.bad.yaml: not usable, 2 problems\n") {
		t.Errorf("%s", text.String())
	}
	text.Reset()
	_, err = Load("testdata/none.yaml")
	if err := NewReport("testdata/none.yaml", nil, err).WriteText(&text); err != nil || !errors.Is(mustErr(Load("testdata/none.yaml")), fs.ErrNotExist) {
		t.Fatal(err)
	}
	if !strings.HasPrefix(text.String(), "error: testdata/none.yaml: ") {
		t.Errorf("%s", text.String())
	}
}

func mustErr(_ *Config, err error) error { return err }

func FuzzParse(f *testing.F) {
	for _, pattern := range []string{"testdata/*.yaml", "../../configs/*.yaml"} {
		list, err := filepath.Glob(pattern)
		if err != nil {
			f.Fatal(err)
		}
		for _, name := range list {
			data, err := readBounded(name, maxFileBytes)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(data)
		}
	}
	for _, s := range []string{"", "---\n", "- \n? a\n: &b *b", "version: 1\n--- \n", "%YAML 1.1\n---\nversion: 1", "version: 1\nroutes: [{name: a, match: {host: a.b}}]", "&a version: 1\nx: *a", "\xef\xbb\xbfversion: 1"} {
		f.Add([]byte(s))
	}
	pem := []byte("no certificate")
	read := func(string) ([]byte, error) { return pem, nil }
	f.Fuzz(func(t *testing.T, data []byte) {
		c, _, err := parse("f.yaml", data, read)
		if err != nil {
			var list Errors
			if !errors.As(err, &list) || len(list) == 0 || c != nil {
				t.Fatalf("%v, %v", c, err)
			}
			lines := bytes.Count(data, []byte("\n")) + bytes.Count(data, []byte("\r")) + bytes.Count(data, []byte("\u2028")) + bytes.Count(data, []byte("\u2029")) + bytes.Count(data, []byte("\u0085")) + 2
			for _, p := range list {
				if p.Line < 1 || p.Line > lines || p.Column < 1 || p.Path == "" || p.What == "" || p.Fix == "" || strings.ContainsAny(p.String(), "\n\r") {
					t.Fatalf("a problem without a place or advice: %+v", p)
				}
			}
			return
		}
		again, _, err := parse("f.yaml", data, read)
		if err != nil || again.Digest != c.Digest || c.Digest != c.Snapshot.Digest() || c.Version != 1 {
			t.Fatalf("loaded once, but not twice alike: %v", err)
		}
		for _, r := range c.Snapshot.Routes() {
			if r.Name == "" || len(r.Match.Hosts) == 0 || r.Deny && len(r.Inject) > 0 {
				t.Fatalf("%+v", r)
			}
		}
		if len(CheckListen(c.Listen, len(c.Callers) > 0)) != 0 {
			t.Fatalf("%+v", c.Listen)
		}
	})
}
