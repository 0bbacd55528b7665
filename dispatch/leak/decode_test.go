package leak

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"errors"
	"io"
	"strings"
	"testing"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/zstd"
	"pgregory.net/rapid"
)

// encoders make a body in each coding, by its name.
var encoders = map[string]func(io.Writer) io.WriteCloser{
	"gzip":    func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
	"x-gzip":  func(w io.Writer) io.WriteCloser { return gzip.NewWriter(w) },
	"deflate": func(w io.Writer) io.WriteCloser { return zlib.NewWriter(w) },
	"br":      func(w io.Writer) io.WriteCloser { return brotli.NewWriter(w) },
	"zstd": func(w io.Writer) io.WriteCloser {
		e, err := zstd.NewWriter(w)
		if err != nil {
			panic(err)
		}
		return e
	},
}

func encoded(t testing.TB, name string, body []byte) []byte {
	t.Helper()
	var b bytes.Buffer
	w := encoders[name](&b)
	if _, err := w.Write(body); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// TestDecode: whole bodies come out as they went in; what was cut, altered, is too large
// or in an unknown coding is not taken.
func TestDecode(t *testing.T) {
	text := []byte(strings.Repeat(`{"id":"job_1"} `, 100))
	var raw bytes.Buffer
	w, err := flate.NewWriter(&raw, 6)
	if err != nil {
		t.Fatal(err)
	}
	_, _ = w.Write(text)
	_ = w.Close()
	if got, err := Decode("deflate", raw.Bytes(), 1<<20); err != nil || !bytes.Equal(got, text) {
		t.Errorf("deflate without its format: %v", err)
	}
	for _, list := range []string{"", "identity"} {
		if got, err := Decode(list, text, 1); err != nil || !bytes.Equal(got, text) {
			t.Errorf("%q: %v", list, err)
		}
	}
	for name := range encoders {
		body := encoded(t, name, text)
		if got, err := Decode(strings.ToUpper(name)+", identity", body, 1<<20); err != nil || !bytes.Equal(got, text) {
			t.Errorf("%s: %v", name, err)
		}
		if got, err := Decode(name+", gzip", encoded(t, "gzip", body), 1<<20); err != nil || !bytes.Equal(got, text) {
			t.Errorf("%s in gzip: %v", name, err)
		}
		if _, err := Decode(name, body, len(text)-1); !errors.Is(err, ErrTooLarge) {
			t.Errorf("%s over the limit: %v", name, err)
		}
		if _, err := Decode(name, body[:len(body)-1], 1<<20); !errors.Is(err, ErrUndecodable) {
			t.Errorf("%s cut: %v", name, err)
		}
		if _, err := Decode(name, text, 1<<20); !errors.Is(err, ErrUndecodable) {
			t.Errorf("%s that is none: %v", name, err)
		}
	}
	for _, list := range []string{"rot13", "gzip, rot13", "gzip, gzip, gzip, gzip, gzip, gzip"} {
		if _, err := Decode(list, text, 1<<20); !errors.Is(err, ErrCodings) {
			t.Errorf("%q: %v", list, err)
		}
	}
	rapid.Check(t, func(rt *rapid.T) { // whatever comes, it ends, within its limit
		name := rapid.SampledFrom([]string{"gzip", "deflate", "br", "zstd", "gzip, br"}).Draw(rt, "coding")
		if got, err := Decode(name, rapid.SliceOfN(rapid.Byte(), 0, 200).Draw(rt, "body"), 1000); err == nil && len(got) > 1000 {
			rt.Fatalf("%d bytes", len(got))
		}
	})
}
