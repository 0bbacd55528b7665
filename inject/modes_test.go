package inject_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"waybill/inject"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

func wantError(t *testing.T, err error, code outcome.Code, reason string) {
	t.Helper()
	var e *inject.Error
	if !errors.As(err, &e) || e.Code != code || e.Reason != reason {
		t.Errorf("%v, want %s %s", err, code, reason)
	}
	if err != nil && strings.Contains(err.Error(), "CANARY") {
		t.Errorf("the error tells: %v", err)
	}
}

// SetJSON changes one member and no other byte.
func TestSetJSON(t *testing.T) {
	contract.Covers(t, "C1")
	for _, tc := range []struct{ body, pointer, want string }{
		{`{}`, "/k", `{"k":"v"}`},
		{` { } `, "/k", ` { "k":"v"} `},
		{`{"a":1}`, "/k", `{"a":1,"k":"v"}`},
		{`{"k" :  "old" , "a":1.50}`, "/k", `{"k" :  "v" , "a":1.50}`},
		{`{"k":{"deep":[1,{"k":2}]},"z":"k"}`, "/k", `{"k":"v","z":"k"}`},
		{`{"a":{"b":{"c":null}}}`, "/a/b/c", `{"a":{"b":{"c":"v"}}}`},
		{`{"a":{}}`, "/a/b/c", `{"a":{"b":{"c":"v"}}}`},
		{`{"x":{"a":1}}`, "/a", `{"x":{"a":1},"a":"v"}`},
		{`{"a/b":1,"m~n":2}`, "/a~1b", `{"a/b":"v","m~n":2}`},
		{`{"big":12345678901234567890123,"e":1e400}`, "/k", `{"big":12345678901234567890123,"e":1e400,"k":"v"}`},
	} {
		path, err := inject.ParsePointer(tc.pointer)
		if err != nil {
			t.Fatal(err)
		}
		got, err := inject.SetJSON([]byte(tc.body), path, "v")
		if err != nil || string(got) != tc.want {
			t.Errorf("%s %s: %s %v", tc.body, tc.pointer, got, err)
		}
		if !inject.HasJSON(got, path) {
			t.Errorf("%s: not there", got)
		}
	}
	for _, body := range []string{``, `[]`, `"k"`, `{"k":1,"k":2}`, `{"a":[]}`, `{"a":1}`, `{} {}`, `{"a":{"b":1},"a":{}}`, "{\"\\u0061\":{\"b\":1},\"a\":{}}"} {
		if got, err := inject.SetJSON([]byte(body), []string{"a", "b"}, "v"); err == nil && strings.Count(body, "\"a\"") != 0 {
			t.Errorf("%s: %s", body, got)
		} else if err != nil {
			wantError(t, err, outcome.CodeInjectionUnsupported, inject.ReasonBody)
		}
	}
	for _, p := range []string{"", "k", "/", "/a//b", "/~2", "/a/~"} {
		if _, err := inject.ParsePointer(p); err == nil {
			t.Errorf("%q is a pointer", p)
		}
	}
}

func TestSetJSONProperty(t *testing.T) {
	contract.Covers(t, "C1")
	names := rapid.SampledFrom([]string{"a", "b", "auth", "x/y", "tok~en", "ü", "k\"q"})
	value := rapid.Custom(func(t *rapid.T) any {
		switch rapid.IntRange(0, 4).Draw(t, "kind") {
		case 0:
			return rapid.String().Draw(t, "s")
		case 1:
			return rapid.Float64Range(-1e9, 1e9).Draw(t, "n")
		case 2:
			return nil
		default:
			return rapid.MapOfN(names, rapid.Just[any]("leaf"), 0, 3).Draw(t, "m")
		}
	})
	rapid.Check(t, func(t *rapid.T) {
		doc := rapid.MapOfN(names, value, 0, 4).Draw(t, "doc")
		path := rapid.SliceOfN(names, 1, 3).Draw(t, "path")
		secret := rapid.String().Draw(t, "secret")
		text, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		got, err := inject.SetJSON(text, path, secret)
		blocked := false
		at := any(doc)
		for _, p := range path[:len(path)-1] {
			m, ok := at.(map[string]any)
			if !ok {
				break
			}
			next, there := m[p]
			if _, isMap := next.(map[string]any); there && !isMap {
				blocked = true
			}
			at = next
		}
		if blocked != (err != nil) {
			t.Fatalf("%s %v: %v", text, path, err)
		}
		if err != nil {
			return
		}
		var back map[string]any
		if err := json.Unmarshal(got, &back); err != nil {
			t.Fatalf("%s: %v", got, err)
		}
		at = back
		for _, p := range path {
			at = at.(map[string]any)[p]
		}
		if at != strings.ToValidUTF8(secret, "\ufffd") {
			t.Fatalf("%s holds %q", got, at)
		}
	})
}

func FuzzSetJSON(f *testing.F) {
	for _, s := range []string{`{}`, `{"a":{"b":1}}`, `{"a":1,"a":2}`, `{"\u0061":{}}`, `[`, `{"a" : {"b":"x"} } `} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		got, err := inject.SetJSON(body, []string{"a", "b"}, "v\"\\")
		if err != nil {
			return
		}
		var m struct {
			A struct{ B string }
		}
		dec := map[string]map[string]any{}
		_ = json.Unmarshal(got, &m)
		var top map[string]json.RawMessage
		if json.Unmarshal(got, &top) != nil || json.Unmarshal(top["a"], &dec) == nil && false {
			t.Fatalf("%q", got)
		}
		var a map[string]json.RawMessage
		var b string
		if json.Unmarshal(top["a"], &a) != nil || json.Unmarshal(a["b"], &b) != nil || b != "v\"\\" {
			t.Fatalf("%q from %q", got, body)
		}
	})
}

func TestQueryAndCookies(t *testing.T) {
	contract.Covers(t, "B1", "C1")
	for _, tc := range []struct {
		query, rest string
		found       bool
	}{{"", "", false}, {"a=1&key=x", "a=1", true}, {"k%65y=1&KEY=2&key", "KEY=2", true}, {"keys=1&%zz=2", "keys=1&%zz=2", false}, {"key=1", "", true}, {"a=key&b", "a=key&b", false}} {
		if rest, found := inject.StripQuery(tc.query, "key"); rest != tc.rest || found != tc.found {
			t.Errorf("%q: %q %v", tc.query, rest, found)
		}
	}
	if got := inject.AppendQuery("a=1", "k y", "v+ /&"); got != "a=1&k+y=v%2B%20%2F%26" {
		t.Error(got)
	}
	if got, err := inject.SetCookie([]string{"a=1; sid=old;b=2", "sid=x"}, "sid", "v"); err != nil || got != "a=1; b=2; sid=v" {
		t.Errorf("%q %v", got, err)
	}
	for _, v := range []string{"CANARY v", "CANARY;x", "CANARY,x", `CANARY"x`, `CANARY\x`} {
		_, err := inject.SetCookie(nil, "sid", v)
		wantError(t, err, outcome.CodeCredentialInvalid, inject.ReasonControlByte)
	}
}

// The signature of a request is the one that its reader computes (RFC 2104, RFC 4231 §4.3).
func TestHMAC(t *testing.T) {
	contract.Covers(t, "C1")
	at := time.Date(2026, 11, 30, 12, 0, 0, 5e6, time.UTC)
	r := &inject.Signable{Method: "POST", Scheme: "https", Host: "a.test", Path: "/p", Query: "b=2&a=1", Header: http.Header{"X-A": {"1", "2"}},
		Body: func() (io.Reader, error) { return strings.NewReader("what do ya want for nothing?"), nil }}
	for _, tc := range []struct {
		spec inject.HMACSpec
		key  string
		want string
	}{
		{inject.HMACSpec{Canonical: "${body}", Value: "v1=${signature}"}, "Jefe", "v1=5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
		{inject.HMACSpec{Canonical: "${body}", Value: "${signature}", Key: "hex"}, "4a656665", "5bdcc146bf60754e6a042426089575c75a003f089d2739839dec58b964ec3843"},
		{inject.HMACSpec{Canonical: "${body}", Value: "${signature}", Key: "base64", Encoding: "base64"}, "SmVmZQ==", "W9zBRr9gdU5qBCQmCJV1x1oAPwidJzmDnexYuWTsOEM="},
		{inject.HMACSpec{Canonical: "${body}", Value: "${signature}", Algorithm: "sha1"}, "Jefe", "effcdf6ae5eb2fa2d27416d5f184df9c259a7c79"},
		{inject.HMACSpec{Canonical: "${body}", Value: "t=${timestamp},n=${nonce},s=${signature}", Algorithm: "sha512", Timestamp: "unix_ms"}, "Jefe",
			"t=1796040000005,n=once,s=164b7a7bfcf819e2e395fbe73b56e0a387bd64222e831fd610270cd7ea2505549758bf75c05a994a6d034f65f8f0e6fdcaeab1a34d4a6b4b636e070a38bce737"},
	} {
		s, err := inject.NewSigner(tc.spec)
		if err != nil {
			t.Fatal(err)
		}
		got, err := s.Sign(inject.NewSecret([]byte(tc.key)), r, at, "once")
		if err != nil || got.Value != tc.want {
			t.Errorf("%+v: %s %v", tc.spec, got.Value, err)
		}
	}
	// The canonical form holds what it says, in its order.
	long, err := inject.NewSigner(inject.HMACSpec{Canonical: "${method} ${scheme} ${host} ${path} ${query} ${sorted_query} ${target} ${timestamp} ${nonce} ${header:x-a} ${body_sha256} ${body_md5_base64}", Value: "${signature}", Timestamp: "rfc3339"})
	if err != nil {
		t.Fatal(err)
	}
	plain, err := inject.NewSigner(inject.HMACSpec{Canonical: "${header:C}", Value: "${signature}"})
	if err != nil {
		t.Fatal(err)
	}
	a, err := long.Sign(inject.NewSecret([]byte("k")), r, at, "once")
	if err != nil {
		t.Fatal(err)
	}
	b, err := plain.Sign(inject.NewSecret([]byte("k")), &inject.Signable{Header: http.Header{"C": {"POST https a.test /p b=2&a=1 a=1&b=2 /p?b=2&a=1 2026-11-30T12:00:00Z once 1, 2 b381e7fec653fc3ab9b178272366b8ac87fed8d31cb25ed1d0e1f3318644c89c 0Dy2Wcv5GS3NBmJyJJ+EEg=="}}}, at, "once")
	if err != nil {
		t.Fatal(err)
	}
	if a.Signature != b.Signature {
		t.Error("the canonical form is another one")
	}
	for _, spec := range []inject.HMACSpec{{Canonical: "x", Value: "${signature}"}, {Canonical: "${body}", Value: "x"}, {Canonical: "${secret}", Value: "${signature}"}, {Canonical: "${body", Value: "${signature}"},
		{Canonical: "${body}", Value: "${signature}", Algorithm: "md5"}, {Canonical: "${header:}", Value: "${signature}"}, {Canonical: "${body}", Value: "${signature}\n"}} {
		if _, err := inject.NewSigner(spec); err == nil {
			t.Errorf("%+v is accepted", spec)
		}
	}
}

// A program's output is the secret, once; it gets no secrets of others, and its failures
// are told apart.
func TestCommandSource(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	dir := t.TempDir()
	t.Setenv("OTHER_SECRET", "CANARY-other")
	t.Setenv("PLAIN", "plain")
	count := filepath.Join(dir, "count")
	src := inject.CommandSource([]string{"sh", "-c", `echo x >>` + count + `; echo "CANARY-$PLAIN-$OTHER_SECRET" >&2; echo "got-$PLAIN-$OTHER_SECRET"`}, []string{"OTHER_SECRET"}, inject.CacheOptions{})
	for range 3 {
		s, err := src.Fetch(t.Context())
		if err != nil || string(s.Expose()) != "got-plain-" {
			t.Fatalf("%v", err)
		}
	}
	if runs, err := os.ReadFile(count); err != nil || len(runs) != 2 {
		t.Errorf("it ran %d times (%v)", len(runs)/2, err)
	}
	for name, tc := range map[string]struct {
		argv   []string
		code   outcome.Code
		reason string
	}{
		"missing":   {[]string{filepath.Join(dir, "none")}, outcome.CodeCredentialInvalid, inject.ReasonUnreadable},
		"denied":    {[]string{"sh", "-c", "echo CANARY; echo CANARY >&2; exit 3"}, outcome.CodeCredentialUnavailable, inject.ReasonCommand},
		"slow":      {[]string{"sh", "-c", "echo CANARY; sleep 100 & sleep 100"}, outcome.CodeCredentialUnavailable, inject.ReasonTimeout},
		"malformed": {[]string{"printf", "CANARY\\nlines"}, outcome.CodeCredentialInvalid, inject.ReasonControlByte},
		"large":     {[]string{"sh", "-c", "yes CANARY | head -c 200000"}, outcome.CodeCredentialInvalid, inject.ReasonTooLarge},
		"empty":     {[]string{"true"}, outcome.CodeCredentialInvalid, inject.ReasonEmpty},
	} {
		o := inject.CacheOptions{Timeout: patience}
		if name == "slow" {
			o.Timeout = 50 * time.Millisecond
		}
		start := time.Now()
		_, err := inject.CommandSource(tc.argv, nil, o).Fetch(t.Context())
		wantError(t, err, tc.code, tc.reason)
		if time.Since(start) > patience {
			t.Errorf("%s: it took %v", name, time.Since(start))
		}
	}
}

const patience = 10 * time.Second

// A mounted secret is read through the link that the kubelet swaps; its target is the version.
func TestKubernetesSource(t *testing.T) {
	contract.Covers(t, "C1")
	dir := t.TempDir()
	mount := func(n int, value string) {
		t.Helper()
		data := filepath.Join(dir, "..2026_"+strconv.Itoa(n))
		if err := os.Mkdir(data, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(data, "token"), []byte(value), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(filepath.Base(data), filepath.Join(dir, "..tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(dir, "..tmp"), filepath.Join(dir, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	mount(1, "CANARY-one")
	if err := os.Symlink("..data/token", filepath.Join(dir, "token")); err != nil {
		t.Fatal(err)
	}
	src := inject.KubernetesSource(dir, "token")
	for n, value := range map[int]string{2: "CANARY-two", 3: "CANARY-three"} {
		mount(n, value)
		m, err := inject.FetchRaw(t.Context(), src)
		if err != nil || string(m.Raw) != value || m.Version != "data:2026_"+strconv.Itoa(n) {
			t.Errorf("%v %s", err, m.Version)
		}
	}
	_, err := inject.KubernetesSource(dir, "none").Fetch(t.Context())
	wantError(t, err, outcome.CodeCredentialMissing, inject.ReasonNotSet)
	_, err = inject.KubernetesSource(dir, "..data").Fetch(t.Context())
	wantError(t, err, outcome.CodeCredentialInvalid, inject.ReasonNotAFile)
}

// A reload keeps what a source holds when its definition is the same, and nothing else.
func TestAdopt(t *testing.T) {
	contract.Covers(t, "C1", "D1")
	runs := filepath.Join(t.TempDir(), "runs")
	store := func(label string, argv ...string) *inject.Store {
		t.Helper()
		spec := &inject.Spec{Kind: inject.KindCommand, Command: append([]string{"sh", "-c", "echo x >>" + runs + "; echo CANARY-value"}, argv...)}
		s, err := inject.NewStore([]inject.Credential{{ID: "c", Label: label, Spec: spec, Source: inject.CommandSource(spec.Command, nil, inject.CacheOptions{})}})
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	last := store("1")
	for i, tc := range []struct {
		next *inject.Store
		runs int
	}{{last, 1}, {store("1"), 1}, {store("2"), 2}, {store("2", "more"), 3}, {store("2", "more"), 3}} {
		if tc.next != last {
			tc.next.Adopt(last)
		}
		last = tc.next
		if _, err := last.Resolve(t.Context(), "c"); err != nil {
			t.Fatal(err)
		}
		if b, err := os.ReadFile(runs); err != nil || bytes.Count(b, []byte("x")) != tc.runs {
			t.Errorf("%d: it ran %d times", i, bytes.Count(b, []byte("x")))
		}
	}
}

// A key of several lines is taken where it is wanted, and nowhere else.
func TestMultiline(t *testing.T) {
	contract.Covers(t, "C1")
	certPath, keyPath := testkit.WriteCert(t, testkit.NewCA(t).Client("c"))
	cert, err := os.ReadFile(certPath)
	if err != nil {
		t.Fatal(err)
	}
	key, err := os.ReadFile(keyPath)
	if err != nil {
		t.Fatal(err)
	}
	file := testkit.WriteFile(t, "pair", append(key, cert...))
	for _, multi := range []bool{true, false} {
		s, err := inject.NewStore([]inject.Credential{{ID: "c", Source: inject.FileSource(file), Multiline: multi}})
		if err != nil {
			t.Fatal(err)
		}
		got, err := s.Resolve(context.Background(), "c")
		if !multi {
			wantError(t, err, outcome.CodeCredentialInvalid, inject.ReasonControlByte)
			continue
		}
		if c, cerr := inject.ClientCertificate(got.Secret); err != nil || cerr != nil || len(c.Certificate) == 0 {
			t.Errorf("%v %v", err, cerr)
		}
	}
	for _, bad := range [][]byte{cert, key, []byte("CANARY")} {
		_, err := inject.ClientCertificate(inject.NewSecret(bad))
		wantError(t, err, outcome.CodeCredentialInvalid, inject.ReasonMalformed)
	}
}
