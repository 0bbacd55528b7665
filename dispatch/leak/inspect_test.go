package leak_test

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/zstd"
	"pgregory.net/rapid"

	"waybill/dispatch/leak"
)

// flusher is what every encoder has.
type flusher interface {
	io.WriteCloser
	Flush() error
}

// encoder returns an encoder for a coding; "raw" is deflate without the zlib format.
func encoder(coding string, w io.Writer) flusher {
	switch coding {
	case "gzip", "x-gzip":
		return gzip.NewWriter(w)
	case "deflate":
		return zlib.NewWriter(w)
	case "raw":
		f, err := flate.NewWriter(w, flate.DefaultCompression)
		if err != nil {
			panic(err)
		}
		return f
	case "br":
		return brotli.NewWriterLevel(w, 3)
	case "zstd":
		z, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
		if err != nil {
			panic(err)
		}
		return z
	}
	panic("no coding " + coding)
}

// encode applies the codings of a list in their order.
func encode(list string, body []byte) []byte {
	for _, coding := range strings.Split(list, ", ") {
		var b bytes.Buffer
		e := encoder(coding, &b)
		if _, err := e.Write(body); err != nil {
			panic(err)
		}
		if err := e.Close(); err != nil {
			panic(err)
		}
		body = b.Bytes()
	}
	return body
}

var codingLists = []string{"gzip", "x-gzip", "deflate", "raw", "br", "zstd", "gzip, br", "zstd, gzip", "deflate, raw", "gzip, gzip, gzip"}

// field is the Content-Encoding for a list.
func field(list string) string { return strings.ReplaceAll(list, "raw", "Deflate") }

// inspect writes a body in pieces of the sizes that step returns.
func inspect(tb interface{ Fatal(...any) }, g *leak.Guard, list string, wire []byte, step func(left int) int) (bool, error) {
	i, err := g.Inspector(field(list))
	if err != nil {
		tb.Fatal(err)
	}
	for len(wire) > 0 {
		n := min(step(len(wire)), len(wire))
		if safe := i.Safe(); safe < 0 {
			tb.Fatal(safe)
		}
		found, err := i.Write(wire[:n])
		if found || err != nil {
			again, errAgain := i.Close()
			if again != found || !errors.Is(errAgain, err) || i.Safe() != 0 {
				tb.Fatal("Close says otherwise", again, errAgain)
			}
			return found, err
		}
		wire = wire[n:]
	}
	return i.Close()
}

// TestInspectorFinds: in every coding and every list, wherever the secret is and wherever the body is cut, it is found, and
// where there is none, none is.
func TestInspectorFinds(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		list := rapid.SampledFrom(codingLists).Draw(t, "codings")
		secrets, g := genSecrets(t)
		var in []byte
		places := 0
		for range rapid.IntRange(1, 3).Draw(t, "bodies") {
			part, _, n := body(t, secrets)
			in = append(in, part...)
			in = append(in, bytes.Repeat([]byte{0, 1, byte(n)}, rapid.IntRange(0, 30_000).Draw(t, "filler"))...)
			in, places = append(in, 0), places+n
		}
		wire := encode(list, in)
		size := rapid.SampledFrom([]int{1, 7, 100, 5000}).Draw(t, "size")
		found, err := inspect(t, g, list, wire, func(left int) int { return rapid.IntRange(1, min(left, size)).Draw(t, "piece") })
		if found != (places > 0) || err != nil {
			t.Fatalf("%s: found %v, %v; there are %d", list, found, err, places)
		}
	})
}

// TestInspectorAtEveryBorder cuts an encoded body once at each place, and once at all of them.
func TestInspectorAtEveryBorder(t *testing.T) {
	g := leak.New([]byte(canary))
	for _, list := range codingLists {
		for text, want := range map[string]bool{
			`{"authorization":"Bearer ` + quoteJSON(canary) + `"}`: true,
			`{"authorization":"Bearer [redacted]"}`:                false,
			"":                                                     false,
		} {
			wire := encode(list, []byte(text))
			for cut := range len(wire) + 1 {
				found, err := inspect(t, g, list, wire, func(left int) int {
					if left == len(wire) && cut > 0 {
						return cut
					}
					return left
				})
				if found != want || err != nil {
					t.Errorf("%s cut at %d: %v %v", list, cut, found, err)
				}
			}
			if found, err := inspect(t, g, list, wire, func(int) int { return 1 }); found != want || err != nil {
				t.Errorf("%s in bytes: %v %v", list, found, err)
			}
		}
	}
}

// TestInspectorEdges: bodies that are not what their coding says.
func TestInspectorEdges(t *testing.T) {
	g := leak.New([]byte(canary))
	clean := bytes.Repeat([]byte("nothing to see here, "), 40)
	secret := slices.Concat(clean, []byte(canary), clean)
	zip := encode("gzip", clean)
	damaged := func(b []byte, at int) []byte {
		b = bytes.Clone(b)
		b[at] ^= 0xff
		return b
	}
	for name, tc := range map[string]struct {
		field string
		wire  []byte
		found bool
		err   error
	}{
		"not encoded, with":               {"gzip", secret, true, nil},
		"not encoded, without":            {"gzip", clean, false, nil},
		"not encoded, without, zstd":      {"zstd", clean, false, nil},
		"not encoded, deflate":            {"deflate", []byte("{\"plain\":true}"), false, nil},
		"not encoded, br":                 {"br", clean, false, leak.ErrUndecodable},
		"ends too early, br":              {"br", encode("br", clean)[:20], false, nil},
		"ends too early, zstd":            {"zstd", encode("zstd", clean)[:20], false, leak.ErrUndecodable},
		"one coding less than it says":    {"gzip, br", encode("br", secret), true, nil},
		"one coding less, without":        {"gzip, br", encode("br", clean), false, nil},
		"one coding more than it says":    {"br", encode("br, gzip", secret), false, leak.ErrUndecodable},
		"behind the inner end":            {"deflate, br", encode("br", append(encode("raw", clean), canary...)), true, nil},
		"no body":                         {"br", nil, false, nil},
		"no coding, with":                 {"", secret, true, nil},
		"identity, with":                  {"identity", secret, true, nil},
		"identity around":                 {"identity, gzip , ,IDENTITY", encode("gzip", secret), true, nil},
		"a character set, with":           {"utf-8", secret, true, nil},
		"upper case":                      {"GZip", encode("gzip", secret), true, nil},
		"deflate in the zlib format":      {"deflate", encode("deflate", secret), true, nil},
		"deflate without it":              {"deflate", encode("raw", secret), true, nil},
		"second member":                   {"gzip", slices.Concat(zip, encode("gzip", secret)), true, nil},
		"second frame":                    {"zstd", slices.Concat(encode("zstd", clean), encode("zstd", secret)), true, nil},
		"behind a wrong checksum":         {"gzip", slices.Concat(damaged(zip, len(zip)-5), encode("gzip", secret)), true, nil},
		"wrong checksum":                  {"gzip", damaged(zip, len(zip)-5), false, nil},
		"behind a wrong checksum, zstd":   {"zstd", slices.Concat(damaged(encode("zstd", clean), len(encode("zstd", clean))-1), encode("zstd", secret)), true, nil},
		"in the name of the file":         {"gzip", named(canary), true, nil},
		"behind the end":                  {"gzip", slices.Concat(zip, []byte(canary)), true, nil},
		"something behind the end":        {"gzip", slices.Concat(zip, []byte("\r\n\r\n--------")), false, nil},
		"something behind the last frame": {"zstd", slices.Concat(encode("zstd", clean), []byte("\r\n\r\n--------")), false, nil},
		"something behind brotli":         {"br", slices.Concat(encode("br", clean), []byte("\r\n\r\n--------")), false, nil},
		"breaks its rules within":         {"gzip, br", encode("br", broken("gzip")), false, leak.ErrUndecodable},
		"breaks its rules, raw":           {"deflate", broken("raw"), false, leak.ErrUndecodable},
		"breaks its rules, zstd":          {"zstd", broken("zstd"), false, leak.ErrUndecodable},
		"breaks its rules, brotli":        {"br", broken("br"), false, leak.ErrUndecodable},
		"ends too early, with":            {"gzip", encode("gzip", secret)[:len(encode("gzip", secret))-9], true, nil},
		"ends too early, without":         {"gzip", zip[:len(zip)-9], false, nil},
		"only the head":                   {"gzip", zip[:5], false, nil},
		"breaks its rules":                {"gzip", broken("gzip"), false, leak.ErrUndecodable},
		"breaks its rules, deflate":       {"deflate", broken("deflate"), false, leak.ErrUndecodable},
		"an unknown coding, with":         {"x-rot13", secret, true, nil},
		"an unknown coding, without":      {"x-rot13", clean, false, nil},
		"gzip around an unknown, with":    {"x-rot13, gzip", encode("gzip", secret), true, nil},
		"an unknown around gzip":          {"gzip, x-rot13", encode("gzip", secret), false, nil},
		"zstd with a window of 64 MiB":    {"zstd", []byte("\x28\xb5\x2f\xfd\x00\x80\x01\x00\x00"), false, leak.ErrTooLarge},
	} {
		t.Run(name, func(t *testing.T) {
			for _, size := range []int{1, 1 << 20} {
				found, err := inspect(t, g, tc.field, tc.wire, func(int) int { return size })
				if found != tc.found || !errors.Is(err, tc.err) || tc.err == nil && err != nil {
					t.Errorf("in pieces of %d: found %v, %v; want %v, %v", size, found, err, tc.found, tc.err)
				}
				if err != nil && strings.Contains(err.Error(), "canary") {
					t.Error("the error holds the secret")
				}
			}
		})
	}
}

// broken is a text in a coding, followed by what cannot follow it there: a block of the reserved type, padding that is not
// zero.
func broken(coding string) []byte {
	var b bytes.Buffer
	e := encoder(coding, &b)
	io.WriteString(e, "nothing to see here")
	e.Flush()
	return append(b.Bytes(), 0xff, 0xff, 0xff, 0xff)
}

// named is a gzip file with a name.
func named(name string) []byte {
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	z.Name = name
	z.Write([]byte("text"))
	z.Close()
	return b.Bytes()
}

// TestBrotliInPieces: a decoder that knows no better takes the end of some sound bodies for too much, if it comes in pieces.
func TestBrotliInPieces(t *testing.T) {
	g := leak.New([]byte(canary))
	var wire bytes.Buffer
	w := brotli.NewWriterLevel(&wire, 0)
	w.Write(append(bytes.Repeat([]byte{0, 1, 0}, 70), 0))
	w.Close()
	for size := 1; size < wire.Len(); size++ {
		for first := 1; first < 10; first++ {
			step := first
			found, err := inspect(t, g, "br", wire.Bytes(), func(int) (n int) { n, step = step, size; return n })
			if found || err != nil {
				t.Fatalf("%d bytes, then %d: found %v, %v", first, size, found, err)
			}
		}
	}
}

func TestContentEncoding(t *testing.T) {
	for _, tc := range []struct {
		fields          []string
		list            string
		encoded, opaque bool
		err             error
	}{
		{nil, "", false, false, nil},
		{[]string{"identity"}, "identity", false, false, nil},
		{[]string{"UTF-8", ""}, "UTF-8, ", false, false, nil},
		{[]string{"gzip"}, "gzip", true, false, nil},
		{[]string{"gzip", "br"}, "gzip, br", true, false, nil},
		{[]string{"compress"}, "compress", true, true, nil},
		{[]string{"dcz, gzip"}, "dcz, gzip", true, true, nil},
		{[]string{"gzip, gzip, gzip, gzip"}, "gzip, gzip, gzip, gzip", true, false, leak.ErrCodings},
	} {
		h := http.Header{"Content-Encoding": tc.fields}
		list, encoded := leak.ContentEncoding(h)
		if list != tc.list || encoded != tc.encoded {
			t.Errorf("%q: %q, %v", tc.fields, list, encoded)
		}
		i, err := leak.New([]byte(canary)).Inspector(list)
		if !errors.Is(err, tc.err) || i.Opaque() != tc.opaque {
			t.Errorf("%q: opaque %v, %v", tc.fields, i.Opaque(), err)
		}
		i.Close()
	}
}

// TestInspectorFollowsAStream: an event that the origin flushes is searched at once and may be released; one that begins a
// secret may not.
func TestInspectorFollowsAStream(t *testing.T) {
	g := leak.New([]byte(canary))
	for _, list := range []string{"gzip", "deflate", "raw", "br", "zstd"} {
		t.Run(list, func(t *testing.T) {
			var wire bytes.Buffer
			e := encoder(list, &wire)
			i, err := g.Inspector(field(list))
			if err != nil {
				t.Fatal(err)
			}
			defer i.Close()
			sent := int64(0)
			send := func(text string) bool {
				t.Helper()
				if _, err := io.WriteString(e, text); err != nil {
					t.Fatal(err)
				}
				if err := e.Flush(); err != nil {
					t.Fatal(err)
				}
				sent += int64(wire.Len())
				found, err := i.Write(wire.Next(wire.Len()))
				if err != nil {
					t.Fatal(err)
				}
				return found
			}
			for n := range 50 {
				if send(fmt.Sprintf("data: {\"n\":%d,\"text\":\"sk_canar\"}\n\n", n)) {
					t.Fatal("found what is not there")
				}
				if i.Safe() != sent {
					t.Fatalf("event %d: %d of %d bytes are safe", n, i.Safe(), sent)
				}
			}
			before := sent
			if send("data: " + canary[:10]) {
				t.Fatal("found half of it")
			}
			if i.Safe() != before {
				t.Errorf("half of it: %d of %d bytes are safe, want %d", i.Safe(), sent, before)
			}
			if !send(canary[10:]+"\n\n") || i.Safe() != 0 {
				t.Error("the secret was not found")
			}
		})
	}
}

// TestSafeMovesOn: a body that is never flushed is released on the way, too.
func TestSafeMovesOn(t *testing.T) {
	g := leak.New([]byte(canary))
	var in []byte
	for n := range 20_000 {
		in = fmt.Appendf(in, "%d: sk_canar, and so on\n", n*n)
	}
	for _, list := range []string{"gzip", "deflate", "raw", "br", "zstd", "gzip, br", "br, gzip"} {
		i, err := g.Inspector(field(list))
		if err != nil {
			t.Fatal(err)
		}
		wire := encode(list, in)
		half := len(wire) / 2
		if found, err := i.Write(wire[:half]); found || err != nil {
			t.Fatal(found, err)
		}
		// Twice what deflate, and a block of what zstd, may take before it hands over text.
		if safe := int(i.Safe()); strings.Contains(list, ",") {
			if safe != 0 {
				t.Errorf("%s: %d of %d bytes are safe, of a list", list, safe, half)
			}
		} else if safe > half || half-safe > len(wire)*(256<<10)/len(in) {
			t.Errorf("%s: %d of %d bytes are safe", list, safe, half)
		}
		if found, err := i.Write(wire[half:]); found || err != nil {
			t.Fatal(found, err)
		}
		if found, err := i.Close(); found || err != nil || i.Safe() != int64(len(wire)) {
			t.Errorf("%s: at the end %v, %v, %d of %d bytes are safe", list, found, err, i.Safe(), len(wire))
		}
	}
}

// TestSafe: what may be released before the end never decodes to the secret, nor to most of it.
func TestSafe(t *testing.T) {
	g := leak.New([]byte(canary))
	rapid.Check(t, func(t *rapid.T) {
		coding := rapid.SampledFrom([]string{"gzip", "deflate", "raw", "br", "zstd"}).Draw(t, "coding")
		filler := rapid.SliceOfN(rapid.Byte(), 1, 200).Draw(t, "filler")
		in := bytes.Repeat(filler, rapid.IntRange(0, 1000).Draw(t, "times"))
		in = slices.Concat(in, []byte(canary), bytes.Repeat(filler, rapid.IntRange(0, 50).Draw(t, "times")))
		wire := encode(coding, in)
		i, err := g.Inspector(field(coding))
		if err != nil {
			t.Fatal(err)
		}
		defer i.Close()
		size := max(1, len(wire)/rapid.IntRange(1, 60).Draw(t, "pieces"))
		safe := int64(0)
		for n := 0; n < len(wire); n += size {
			piece := wire[n:min(n+size, len(wire))]
			found, err := i.Write(piece)
			if err != nil {
				t.Fatal(err)
			}
			if found {
				break
			}
			if i.Safe() < safe || i.Safe() > int64(n+len(piece)) {
				t.Fatalf("safe went from %d to %d of %d", safe, i.Safe(), n+len(piece))
			}
			safe = i.Safe()
		}
		if found, err := i.Close(); !found || err != nil {
			t.Fatal(found, err)
		}
		if text := decode(coding, wire[:safe]); bytes.Contains(text, []byte(canary[:12])) {
			t.Fatalf("%s: %d of %d bytes were safe, with %q", coding, safe, len(wire), text[max(0, len(text)-60):])
		}
	})
}

// decode decodes as much as there is.
func decode(coding string, wire []byte) []byte {
	var r io.Reader
	var err error
	switch coding {
	case "gzip":
		r, err = gzip.NewReader(bytes.NewReader(wire))
	case "deflate":
		r, err = zlib.NewReader(bytes.NewReader(wire))
	case "raw":
		r = flate.NewReader(bytes.NewReader(wire))
	case "br":
		r = brotli.NewReader(bytes.NewReader(wire))
	case "zstd":
		var d *zstd.Decoder
		if d, err = zstd.NewReader(bytes.NewReader(wire), zstd.WithDecoderConcurrency(1)); err == nil {
			defer d.Close()
		}
		r = d
	}
	if err != nil {
		return nil
	}
	text, _ := io.ReadAll(r) // it ends too early
	return text
}

// TestBombs: a body that decodes to far more than itself is given up, in bounded memory.
func TestBombs(t *testing.T) {
	g := leak.New([]byte(canary))
	for _, list := range []string{"gzip", "deflate", "raw", "br", "zstd", "gzip, gzip", "gzip, br", "zstd, gzip"} {
		t.Run(list, func(t *testing.T) {
			first, rest, _ := strings.Cut(list, ", ")
			wire := encode(first, make([]byte, 2<<20))
			if rest != "" {
				wire = encode(rest, wire)
			}
			for _, always := range []int64{256 << 10, leak.DecodedBytes} {
				i, err := g.Inspector(field(list))
				if err != nil {
					t.Fatal(err)
				}
				i.Always(always)
				var before, after runtime.MemStats
				runtime.ReadMemStats(&before)
				_, err = i.Write(wire)
				runtime.ReadMemStats(&after)
				found, errClose := i.Close()
				if tooLarge := always < leak.DecodedBytes; found || errors.Is(err, leak.ErrTooLarge) != tooLarge || !errors.Is(errClose, err) || !tooLarge && err != nil {
					t.Errorf("%d bytes, %d allowed: found %v, %v, %v", len(wire), always, found, err, errClose)
				}
				if n := after.TotalAlloc - before.TotalAlloc; n > 6<<20 && first != "zstd" && first != "br" || n > 40<<20 {
					t.Errorf("%d bytes were allocated", n)
				}
			}
		})
	}
}

// TestLimit: the limit as it is, at which something large in itself is no bomb.
func TestLimit(t *testing.T) {
	g := leak.New([]byte(canary))
	wire := bytes.Repeat(encode("zstd", make([]byte, 8<<20)), leak.DecodedBytes/(8<<20))
	if found, err := inspect(t, g, "zstd", wire, func(left int) int { return left }); found || err != nil {
		t.Errorf("at the limit: found %v, %v", found, err)
	}
	wire = append(wire, encode("zstd", make([]byte, 8<<20))...)
	if found, err := inspect(t, g, "zstd", wire, func(left int) int { return left }); found || !errors.Is(err, leak.ErrTooLarge) {
		t.Errorf("over the limit: found %v, %v", found, err)
	}
	incompressible := make([]byte, 256<<10)
	r := rand.New(rand.NewPCG(5, 6))
	for i := range incompressible {
		incompressible[i] = byte(r.Uint32())
	}
	i, err := g.Inspector("gzip")
	if err != nil {
		t.Fatal(err)
	}
	i.Always(0)
	if found, err := i.Write(encode("gzip", incompressible)); found || err != nil {
		t.Errorf("large in itself: found %v, %v", found, err)
	}
	if found, err := i.Close(); found || err != nil {
		t.Errorf("large in itself: found %v, %v", found, err)
	}
}

// TestInspectorIsLeftEarly: no coroutine stays behind, whenever an Inspector is closed; TestMain looks for them.
func TestInspectorIsLeftEarly(t *testing.T) {
	g := leak.New([]byte(canary))
	for _, list := range codingLists {
		wire := encode(list, bytes.Repeat([]byte("text "), 100))
		for n := range len(wire) {
			i, err := g.Inspector(field(list))
			if err != nil {
				t.Fatal(err)
			}
			if _, err := i.Write(wire[:n]); err != nil {
				t.Fatal(err)
			}
			found, err := i.Close()
			if found || err != nil && !(errors.Is(err, leak.ErrUndecodable) && strings.Contains(list, "zstd")) {
				t.Fatal(list, n, found, err)
			}
			if found, again := i.Close(); found || !errors.Is(again, err) {
				t.Fatal("again", found, again)
			}
			if found, again := i.Write(wire[n:]); found || !errors.Is(again, err) {
				t.Fatal("after Close", found, again)
			}
		}
	}
}

// FuzzInspector: whatever the bytes are, it does not matter where they are cut.
func FuzzInspector(f *testing.F) {
	for _, list := range codingLists {
		f.Add(field(list), encode(list, []byte("text "+canary)), uint16(3))
		f.Add(field(list), encode(list, []byte("text")), uint16(1))
	}
	f.Add("gzip, x-rot13", []byte("text"), uint16(0))
	g := leak.New([]byte(canary))
	f.Fuzz(func(t *testing.T, list string, wire []byte, cut uint16) {
		if i, err := g.Inspector(list); err != nil || len(wire) > 10_000 {
			return
		} else if _, err := i.Close(); err != nil {
			t.Fatal(err)
		}
		one, errOne := inspect(t, g, list, wire, func(left int) int { return left })
		many, errMany := inspect(t, g, list, wire, func(int) int { return int(cut)%100 + 1 })
		if errors.Is(errOne, leak.ErrTooLarge) || errors.Is(errMany, leak.ErrTooLarge) {
			return // that depends on how much of the body is there
		}
		if one != many || !errors.Is(errMany, errOne) {
			t.Fatalf("in one: %v %v; in pieces: %v %v", one, errOne, many, errMany)
		}
	})
}
