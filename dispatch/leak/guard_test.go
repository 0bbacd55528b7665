package leak_test

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"html"
	"log/slog"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
	"pgregory.net/rapid"

	"waybill/dispatch/leak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const canary = `sk_canary/51H8+fJ2eZ"vK=Y&lo`

// planted is an encoded secret: text[from:to] is what is to be masked.
type planted struct {
	text     string
	from, to int
}

func all(s string) planted { return planted{s, 0, len(s)} }

// quoteJSON is the inside of a JSON string.
func quoteJSON(s string) string {
	b, err := json.Marshal(s)
	if err != nil {
		panic(err)
	}
	return string(b[1 : len(b)-1])
}

// forms are ways in which a secret comes back, each by the usual encoder.
var forms = map[string]func(t *rapid.T, secret string) planted{
	"plain":                func(_ *rapid.T, s string) planted { return all(s) },
	"query":                func(_ *rapid.T, s string) planted { return all(url.QueryEscape(s)) },
	"path":                 func(_ *rapid.T, s string) planted { return all(url.PathEscape(s)) },
	"query in a query":     func(_ *rapid.T, s string) planted { return all(url.QueryEscape(url.QueryEscape(s))) },
	"query, three deep":    func(_ *rapid.T, s string) planted { return all(url.PathEscape(url.PathEscape(url.PathEscape(s)))) },
	"JSON":                 func(_ *rapid.T, s string) planted { return all(quoteJSON(s)) },
	"JSON in JSON":         func(_ *rapid.T, s string) planted { return all(quoteJSON(quoteJSON(s))) },
	"JSON, slashes too":    func(_ *rapid.T, s string) planted { return all(strings.ReplaceAll(quoteJSON(s), "/", `\/`)) },
	"HTML":                 func(_ *rapid.T, s string) planted { return all(html.EscapeString(s)) },
	"hex":                  func(_ *rapid.T, s string) planted { return all(hex.EncodeToString([]byte(s))) },
	"HEX":                  func(_ *rapid.T, s string) planted { return all(strings.ToUpper(hex.EncodeToString([]byte(s)))) },
	"every byte its way":   mixed,
	"base64":               inBase64,
	"base64 in a redirect": func(t *rapid.T, s string) planted { return escaped(inBase64(t, s), url.QueryEscape) },
	"base64 in JSON": func(t *rapid.T, s string) planted {
		return escaped(inBase64(t, s), func(c string) string {
			return map[string]string{"/": `\/`, "+": `\u002B`, "\n": `\n`, "\r": `\r`}[c]
		})
	},
}

// mixed spells each byte in a way of its own.
func mixed(t *rapid.T, s string) planted {
	var b strings.Builder
	for _, c := range []byte(s) {
		switch rapid.IntRange(0, 7).Draw(t, "way") {
		case 0:
			fmt.Fprintf(&b, "%%%02X", c)
		case 1:
			fmt.Fprintf(&b, "%%%02x", c)
		case 2:
			fmt.Fprintf(&b, "%%25%02x", c)
		case 3:
			fmt.Fprintf(&b, `\u%04x`, c)
		case 4:
			fmt.Fprintf(&b, `\\u%04X`, c)
		case 5:
			fmt.Fprintf(&b, `&#%d;`, c)
		case 6:
			fmt.Fprintf(&b, `&#x%x;`, c)
		default:
			b.WriteByte(c)
		}
	}
	return all(b.String())
}

// inBase64 encodes a text with the secret in it. The characters with bits of the
// secret are to be masked.
func inBase64(t *rapid.T, s string) planted {
	before := rapid.StringMatching(`([a-z]{0,9}\x01)?`).Draw(t, "before")
	after := rapid.StringMatching(`(\x01[a-z]{0,9})?`).Draw(t, "after")
	enc := rapid.SampledFrom([]*base64.Encoding{base64.StdEncoding, base64.URLEncoding, base64.RawStdEncoding, base64.RawURLEncoding}).Draw(t, "alphabet")
	text := enc.EncodeToString([]byte(before + s + after))
	from := len(before) * 8 / 6
	last := (8*(len(before)+len(s)) - 1) / 6
	line := rapid.SampledFrom([]int{1 << 20, 1 << 20, 4, 19, 60, 76}).Draw(t, "line")
	end := rapid.SampledFrom([]string{"\n", "\r\n"}).Draw(t, "end of line")
	p := planted{}
	for i := range len(text) {
		if i > 0 && i%line == 0 {
			p.text += end
		}
		if i == from {
			p.from = len(p.text)
		}
		p.text += text[i : i+1]
		if i == last {
			p.to = len(p.text)
		}
	}
	return p
}

// escaped escapes characters for which escape has something, letters and digits
// apart.
func escaped(p planted, escape func(string) string) planted {
	out := planted{}
	for i := range len(p.text) {
		if i == p.from {
			out.from = len(out.text)
		}
		c := p.text[i : i+1]
		if e := escape(c); e != "" && e != c && c != "=" && (c != "\n" && c != "\r" || e[0] == '\\') {
			c = e
		}
		out.text += c
		if i+1 == p.to {
			out.to = len(out.text)
		}
	}
	return out
}

// genSecret draws a secret as inject allows them; some of them repeat themselves, and
// some look like what encodes them.
func genSecret() *rapid.Generator[string] {
	return rapid.OneOf(
		rapid.StringMatching(`[A-Za-z0-9_-]{8,60}`),
		rapid.StringMatching(`[!-~][ -~]{6,40}[!-~]`),
		rapid.StringMatching(`[ab]{8,20}`),
		rapid.StringMatching(`[%\\25u0&#x;/"+=]{8,20}`),
		rapid.StringMatching(`[a-f0-9]{32}`),
	)
}

// body draws a body with secrets in it, and what becomes of it. NUL separates what
// is planted from what looks like it: it is in no spelling of a printable byte.
func body(t *rapid.T, secrets []string) (in, want []byte, places int) {
	for range rapid.IntRange(0, 12).Draw(t, "parts") {
		s := rapid.SampledFrom(secrets).Draw(t, "secret")
		switch rapid.IntRange(0, 5).Draw(t, "part") {
		case 0, 1:
			name := rapid.SampledFrom(formNames).Draw(t, "form")
			p := forms[name](t, s)
			in = append(in, p.text...)
			want = append(want, p.text[:p.from]...)
			want = append(want, bytes.Repeat([]byte("*"), p.to-p.from)...)
			want = append(want, p.text[p.to:]...)
			places++
		case 2: // the beginning of one
			p := forms[rapid.SampledFrom(formNames).Draw(t, "form")](t, s)
			n := rapid.IntRange(0, (p.from+p.to)/2).Draw(t, "cut")
			in, want = append(in, p.text[:n]...), append(want, p.text[:n]...)
		case 3:
			f := rapid.SampledFrom([]string{"%", "%25", `\u00`, `\\`, "&#x", "&", "=\r\n", `{"a":"b\/c"}`, strings.Repeat("a", 90)}).
				Filter(func(f string) bool { // by chance a secret is such a row
					return !slices.ContainsFunc(secrets, func(s string) bool { return strings.Contains(f, s) })
				}).Draw(t, "filler")
			in, want = append(in, f...), append(want, f...)
		default:
			f := rapid.SliceOfN(rapid.Byte(), 0, 40).Draw(t, "bytes")
			in, want = append(in, f...), append(want, f...)
		}
		in, want = append(in, 0), append(want, 0)
	}
	return in, want, places
}

var formNames = func() []string {
	var out []string
	for name := range forms {
		out = append(out, name)
	}
	slices.Sort(out)
	return out
}()

// apart says that no secret is a part of another: which of the two is masked would not be told.
func apart(secrets []string) bool {
	for i, s := range secrets {
		for j, other := range secrets {
			if i != j && strings.Contains(s, other) {
				return false
			}
		}
	}
	return true
}

func genSecrets(t *rapid.T) (secrets []string, g *leak.Guard) {
	secrets = rapid.SliceOfNDistinct(genSecret(), 1, 3, rapid.ID).Filter(apart).Draw(t, "secrets")
	raw := make([][]byte, len(secrets))
	for i, s := range secrets {
		raw[i] = []byte(s)
	}
	g = leak.New(raw...)
	for _, r := range raw {
		clear(r) // it has its own
	}
	return secrets, g
}

// stream sends a body through in pieces cut as drawn.
func stream(t *rapid.T, s *leak.Stream, in []byte) []byte {
	var out []byte
	rest := in
	for len(rest) > 0 {
		n := rapid.IntRange(1, min(len(rest), rapid.SampledFrom([]int{1, 3, 30, 1000}).Draw(t, "size"))).Draw(t, "piece")
		piece := bytes.Clone(rest[:n])
		out = s.Write(out, piece)
		if !bytes.Equal(piece, rest[:n]) {
			t.Fatal("the piece was changed")
		}
		rest = rest[n:]
	}
	return s.Flush(out)
}

// TestMasked: whatever the encoding, the place and the cuts, the secret is masked, the length is kept, and everything else
// stays as it was.
func TestMasked(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		secrets, g := genSecrets(t)
		in, want, places := body(t, secrets)

		whole := bytes.Clone(in)
		if n := g.MaskBytes(whole); !bytes.Equal(whole, want) || n != places {
			t.Fatalf("whole, %d places, want %d:\n%q\n%q\n%q", n, places, in, whole, want)
		}
		s := g.Stream()
		for round := range 2 { // a flushed Stream begins anew
			if got := stream(t, s, in); !bytes.Equal(got, want) || s.Masked() != places*(round+1) || s.Held() != 0 {
				t.Fatalf("in pieces, %d places, want %d:\n%q\n%q\n%q", s.Masked(), places, in, got, want)
			}
		}
		if got, n := g.MaskString(string(in)); got != string(want) || n != places {
			t.Fatalf("string, %d places, want %d:\n%q\n%q\n%q", n, places, in, got, want)
		}
	})
}

// TestForms has one readable line for each form, and one for what is none.
func TestForms(t *testing.T) {
	const secret = "canary/+=7f3a"
	g := leak.New([]byte(secret), []byte("Bearer "+secret))
	stars := func(n int) string { return strings.Repeat("*", n) }
	for in, want := range map[string]string{
		"":                           "",
		"canary":                     "canary",
		"Bearer canary/+=7f3a.":      "Bearer " + stars(13) + ".",
		"canary/+=7f3acanary/+=7f3a": stars(26),
		"canarycanary/+=7f3a7f3a":    "canary" + stars(13) + "7f3a",
		"?k=canary%2F%2b%3D7f3a&x=1": "?k=" + stars(19) + "&x=1",
		"?next=%2Fa%3Fk%3Dcanary%252F%252B%253D7f3a":                      "?next=%2Fa%3Fk%3D" + stars(25),
		`{"a":"canary\/+=7f3a"}`:                                          `{"a":"` + stars(14) + `"}`,
		`{"a":"c\u0061nary/\u002b\u003D7f3a"}`:                            `{"a":"` + stars(28) + `"}`,
		"canary/&#43;&#x3D;7f3a":                                          stars(22),
		"63616e6172792F2b3D37663361":                                      stars(26),
		"Basic " + base64.StdEncoding.EncodeToString([]byte("u:"+secret)): "Basic dT" + stars(18),
		"canary/ +=7f3a":                                                  "canary/ +=7f3a",
		"Canary/+=7f3a":                                                   "Canary/+=7f3a",
		"canary/+=7f3":                                                    "canary/+=7f3",
	} {
		got, n := g.MaskString(in)
		if got != want || (n > 0) != (in != want) {
			t.Errorf("%d %q\n got %q\nwant %q", n, in, got, want)
		}
	}
}

func TestMaskHeader(t *testing.T) {
	g := leak.New([]byte(canary))
	basic := base64.StdEncoding.EncodeToString([]byte("me:" + canary))
	h := http.Header{
		"Location":     {"https://elsewhere.example.test/?k=" + url.QueryEscape(canary)},
		"Set-Cookie":   {"a=b", "k=" + canary + "; HttpOnly"},
		"Proxy-Status": {`cache; details="` + quoteJSON(canary) + `"`},
		"X-Debug":      {"Basic " + basic, "", "ok"},
		"X-" + canary:  {"a name is left alone"},
		"Date":         {"Tue, 15 Nov 1994 08:12:31 GMT"},
	}
	before := h.Clone()
	if n := g.MaskHeader(h); n != 4 {
		t.Errorf("%d places masked, want 4", n)
	}
	for name, values := range before {
		for i, v := range values {
			got := h[name][i]
			if len(got) != len(v) {
				t.Errorf("%s: %q is not as long as %q", name, got, v)
			}
			for j := range v {
				if got[j] != v[j] && got[j] != '*' {
					t.Errorf("%s: %q became %q", name, v, got)
				}
			}
			if strings.Contains(got, "*") != (i == 0 && name == "Location" || i == 1 && name == "Set-Cookie" || name == "Proxy-Status" || i == 0 && name == "X-Debug") {
				t.Errorf("%s: %q became %q", name, v, got)
			}
		}
	}
	if want := "k=" + strings.Repeat("*", len(canary)) + "; HttpOnly"; h["Set-Cookie"][1] != want {
		t.Errorf("%q, want %q", h["Set-Cookie"][1], want)
	}
}

// TestNothingIsHeldWithoutNeed: text that ends where no secret may begin passes at once, as an event of a stream does.
func TestNothingIsHeldWithoutNeed(t *testing.T) {
	s := leak.New([]byte(canary)).Stream()
	var out []byte
	for i := range 100 {
		event := fmt.Sprintf("event: delta\ndata: {\"text\":\"sk_canar%d\"}\n\n", i)
		out = s.Write(out[:0], []byte(event))
		if string(out) != event || s.Held() != 0 {
			t.Fatalf("%q: %q passed, %d bytes held", event, out, s.Held())
		}
	}
	// What is the beginning of a secret waits, and no more than that.
	out = s.Write(nil, []byte(`data: "sk_canary%2`))
	if string(out) != `data: "` || s.Held() != len("sk_canary%2") {
		t.Errorf("%q passed, %d bytes held", out, s.Held())
	}
	if spare := out[:cap(out)]; bytes.Contains(spare, []byte("canary")) {
		t.Error("what is held stays in the caller's buffer")
	}
	if out = s.Write(nil, []byte(`1"`)); string(out) != `sk_canary%21"` || s.Held() != 0 {
		t.Errorf("%q passed, %d bytes held", out, s.Held())
	}
	out = s.Write(nil, []byte("sk_canary"))
	if out = s.Flush(out); string(out) != "sk_canary" {
		t.Errorf("%q at the end", out)
	}
}

// TestSecretOverManyPieces: a secret may come a byte at a time.
func TestSecretOverManyPieces(t *testing.T) {
	s := leak.New([]byte(canary)).Stream()
	var out []byte
	text := "a " + url.QueryEscape(canary) + " b"
	for i := range len(text) {
		out = s.Write(out, []byte(text[i:i+1]))
		if len(out) > 2 && i < len(text)-2 && bytes.Contains(out, []byte("s")) {
			t.Fatalf("%q after %d bytes", out, i+1)
		}
	}
	if want := "a " + strings.Repeat("*", len(text)-4) + " b"; string(s.Flush(out)) != want || s.Masked() != 1 {
		t.Errorf("%q, want %q", out, want)
	}
}

func TestNoSecrets(t *testing.T) {
	for name, g := range map[string]*leak.Guard{
		"nil": nil, "none": leak.New(), "empty": leak.New(nil, []byte{}), "short": leak.New([]byte(canary[:leak.MinSecretBytes-1])),
	} {
		if g != nil {
			t.Errorf("%s: a Guard", name)
		}
	}
	var g *leak.Guard
	h := http.Header{"X": {canary}}
	if n := g.MaskHeader(h); n != 0 || h["X"][0] != canary {
		t.Error("the header was masked")
	}
	if s, n := g.MaskString(canary); n != 0 || s != canary {
		t.Error("the string was masked")
	}
	if n := g.MaskBytes([]byte(canary)); n != 0 {
		t.Error("the bytes were masked")
	}
	s := g.Stream()
	if out := s.Flush(s.Write([]byte("a"), []byte(canary))); string(out) != "a"+canary || s.Held() != 0 || s.Masked() != 0 {
		t.Errorf("%q", out)
	}
	i, err := g.Inspector("gzip")
	if i != nil || err != nil {
		t.Fatal(i, err)
	}
	if found, err := i.Write([]byte(canary)); found || err != nil {
		t.Error(found, err)
	}
	if found, err := i.Close(); found || err != nil || i.Opaque() || i.Safe() != 0 {
		t.Error(found, err)
	}
	if leak.New([]byte(canary[:leak.MinSecretBytes])) == nil {
		t.Error("the shortest secret is not looked for")
	}
}

// TestManySecrets has more patterns than a word has bits.
func TestManySecrets(t *testing.T) {
	var secrets [][]byte
	for i := range 40 {
		secrets = append(secrets, fmt.Appendf(nil, "canary-%02d-%x", i, i*i*7919))
	}
	g := leak.New(secrets...)
	for i, s := range secrets {
		for _, text := range []string{string(s), hex.EncodeToString(s), base64.StdEncoding.EncodeToString(s)} {
			if got, n := g.MaskString("<" + text + ">"); n != 1 || strings.ContainsAny(got, "c6Y") {
				t.Errorf("%d: %q became %q", i, text, got)
			}
		}
	}
}

// TestRepetition: a secret that repeats itself, in a body that does, is found in time that grows with the body only.
func TestRepetition(t *testing.T) {
	g := leak.New(bytes.Repeat([]byte("a"), 40))
	in := bytes.Repeat([]byte("a"), 32<<10)
	begin := time.Now()
	s := g.Stream()
	out := s.Flush(s.Write(nil, in))
	if !bytes.Equal(out, bytes.Repeat([]byte("*"), len(in))) || s.Masked() != 1 {
		t.Errorf("%d places, %q…", s.Masked(), out[:50])
	}
	if d := time.Since(begin); d > 20*time.Second {
		t.Errorf("it took %s", d)
	}
}

// TestPrintsNothing: whatever holds a secret, or a part of one, prints as [redacted] (CONTRACT C2).
func TestPrintsNothing(t *testing.T) {
	g := leak.New([]byte(canary))
	s := g.Stream()
	s.Write(nil, []byte(canary[:20]))
	i, err := g.Inspector("gzip")
	if err != nil {
		t.Fatal(err)
	}
	defer i.Close()
	if _, err := i.Write([]byte(canary[:20])); err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "g", g, "s", s, "i", i)
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "g", g, "s", s, "i", i)
	for _, v := range []any{g, s, i} {
		for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
			if got := fmt.Sprintf(verb, v); got != "[redacted]" {
				t.Errorf("%T prints as %q", v, got)
			}
			fmt.Fprintf(&log, verb, struct{ v any }{v})
		}
		if b, err := json.Marshal(v); err != nil || string(b) != `"[redacted]"` {
			t.Errorf("%T: %s %v", v, b, err)
		}
	}
	if bytes.Contains(log.Bytes(), []byte("canary")) || bytes.Contains(log.Bytes(), []byte("115 107 95")) {
		t.Errorf("%s", log.Bytes())
	}
}

// FuzzStream: in pieces as in one, nothing but stars is put in, and no plain, base64 or hex form of the secret is left.
func FuzzStream(f *testing.F) {
	f.Add([]byte(canary), []byte("x "+canary+" y"), uint16(5))
	f.Add([]byte("aaaaaaaa"), []byte("aaaa%61aaaaaa\\u0061aaa"), uint16(1))
	f.Add([]byte(`\\\\\\\\`), []byte(`\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\\`), uint16(3))
	f.Add([]byte("%25%2525"), []byte("%25252525%252525%25%25"), uint16(7))
	f.Add([]byte("\x00\xff\x10\x80canary"), []byte(base64.StdEncoding.EncodeToString([]byte("ab\x00\xff\x10\x80canary"))), uint16(9))
	f.Fuzz(func(t *testing.T, secret, in []byte, cut uint16) {
		if len(secret) > 100 || len(in) > 10_000 {
			return
		}
		g := leak.New(secret)
		whole := bytes.Clone(in)
		places := g.MaskBytes(whole)
		s := g.Stream()
		var out []byte
		step := int(cut)%50 + 1
		for rest := in; len(rest) > 0; {
			n := min(step, len(rest))
			out = s.Write(out, rest[:n])
			rest = rest[n:]
		}
		out = s.Flush(out)
		if !bytes.Equal(out, whole) || s.Masked() != places {
			t.Fatalf("%d places in one, %d in pieces:\n%q\n%q", places, s.Masked(), whole, out)
		}
		for i := range in {
			if out[i] != in[i] && out[i] != '*' {
				t.Fatalf("%q became %q", in, out)
			}
		}
		if g == nil || bytes.ContainsRune(secret, '*') {
			return
		}
		for _, form := range []string{string(secret), url.QueryEscape(string(secret)), hex.EncodeToString(secret), base64.RawStdEncoding.EncodeToString(secret)} {
			if bytes.Contains(out, []byte(form)) {
				t.Fatalf("%q is left in %q", form, out)
			}
		}
	})
}

// TestPart: what a part of a text has of a secret at its ends is masked, in any form, wherever it
// was cut and in whatever pieces it comes; two parts never tell the whole together. What is no
// secret is left alone.
func TestPart(t *testing.T) {
	for _, secret := range []string{"CANARY-part/5f0c!a7d41e", "k3y-5f0c!a7d", "pa55/wd!"} {
		g := leak.New([]byte(secret))
		b64 := func(before int) string {
			return base64.StdEncoding.EncodeToString([]byte(strings.Repeat("x", before) + secret + "yy"))
		}
		var percent, json strings.Builder
		for _, c := range []byte(secret) {
			fmt.Fprintf(&percent, "%%25%02X", c)
			fmt.Fprintf(&json, `\\u00%02x`, c)
		}
		part := func(text string, step int) string {
			st := g.Part()
			var out []byte
			for rest := text; rest != ""; {
				n := min(step, len(rest))
				out = st.Write(out, []byte(rest[:n]))
				rest = rest[n:]
			}
			if out = st.FlushPart(out); len(out) != len(text) {
				t.Fatalf("%q became %q", text, out)
			}
			return string(out)
		}
		const before, after = "what came before it ", " and what follows it"
		for form, spelling := range map[string]int{secret: 1, hex.EncodeToString([]byte(secret)): 1, b64(0): 1, b64(1): 1, b64(2): 1, percent.String(): 5, json.String(): 7} {
			told := make([]bool, len(form)) // by any part
			for cut := 1; cut < len(form); cut++ {
				for _, step := range []int{1, 5, 1000} {
					head, tail := part(before+form[:cut], step), part(form[cut:]+after, step)
					if !strings.HasPrefix(head, before) || !strings.HasSuffix(tail, after) {
						t.Fatalf("%q, %q", head, tail)
					}
					for i, c := range []byte(head[len(before):]) {
						told[i] = told[i] || c != '*'
					}
					for i, c := range []byte(tail[:len(tail)-len(after)]) {
						told[cut+i] = told[cut+i] || c != '*'
					}
				}
			}
			hidden := 0
			for _, is := range told {
				if !is {
					hidden++
				}
			}
			// Of the shortest a quarter stays hidden; base64 ends with characters of what follows.
			if hidden < len(form)/4/spelling*spelling {
				t.Errorf("of %q all parts together hide %d of %d", form, hidden, len(form))
			}
		}
		for _, r := range [][2]int{{2, len(secret) - 2}, {1, 4}, {3, 4}} {
			if got := part(secret[r[0]:r[1]], 1000); strings.Trim(got, "*") != "" {
				t.Errorf("within it: %q", got)
			}
		}
		for _, plain := range []string{"", "{", "and no more", "the quick brown fox", "x" + secret[:2], "?? " + secret[1:5] + " ?", "*\n"} {
			if out := part(plain, 3); out != plain {
				t.Errorf("%q became %q", plain, out)
			}
		}
	}
	if (*leak.Guard)(nil).Part() != nil {
		t.Error("a Part of no Guard")
	}
}
