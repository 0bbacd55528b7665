package leak_test

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"io"
	"strings"
	"testing"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/zstd"
)

// flusher is what every encoder has.
type flusher interface {
	io.WriteCloser
	Flush() error
}

// encoder returns an encoder for a coding; "raw" is deflate without the zlib format.
func encoder(tb testing.TB, coding string, w io.Writer) flusher {
	tb.Helper()
	switch coding {
	case "gzip", "x-gzip":
		return gzip.NewWriter(w)
	case "deflate":
		return zlib.NewWriter(w)
	case "raw":
		f, err := flate.NewWriter(w, flate.DefaultCompression)
		if err != nil {
			tb.Fatal(err)
		}
		return f
	case "br":
		return brotli.NewWriterLevel(w, 5)
	case "zstd":
		z, err := zstd.NewWriter(w, zstd.WithEncoderConcurrency(1))
		if err != nil {
			tb.Fatal(err)
		}
		return z
	}
	tb.Fatalf("no coding %q", coding)
	return nil
}

// encode applies the codings of a list in their order.
func encode(tb testing.TB, list string, body []byte) []byte {
	tb.Helper()
	for _, coding := range strings.Split(list, ", ") {
		var b bytes.Buffer
		e := encoder(tb, coding, &b)
		if _, err := e.Write(body); err != nil {
			tb.Fatal(err)
		}
		if err := e.Close(); err != nil {
			tb.Fatal(err)
		}
		body = b.Bytes()
	}
	return body
}
