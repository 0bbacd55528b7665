package leak

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"compress/zlib"
	"io"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/zstd"
)

// Decode undoes the codings of a whole body, for whoever reads what it says: list is
// that of ContentEncoding. Other than the search, which sees what any client might see,
// it takes nothing that is not sound to its end, checksums included. A body without a
// coding is returned as it is.
//
// Errors are ErrCodings for a coding that is not known, ErrTooLarge for more than limit
// bytes, ErrUndecodable.
func Decode(list string, body []byte, limit int) ([]byte, error) {
	codings, opaque, err := parseCodings(list)
	if err != nil || opaque {
		return nil, ErrCodings
	}
	for _, c := range codings {
		if body, err = c.undo(body, limit); err != nil {
			return nil, err
		}
	}
	return body, nil
}

func (c coding) undo(body []byte, limit int) ([]byte, error) {
	var r io.Reader
	var err error
	in := bytes.NewReader(body)
	switch c {
	case codingGzip:
		r, err = gzip.NewReader(in)
	case codingDeflate:
		if r, err = zlib.NewReader(in); err != nil { // some servers leave the format out
			r, err = flate.NewReader(bytes.NewReader(body)), nil
		}
	case codingRaw:
		r = flate.NewReader(in)
	case codingBrotli:
		r = brotli.NewReader(in)
	case codingZstd:
		var d *zstd.Decoder
		if d, err = zstd.NewReader(in, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true), zstd.WithDecoderMaxWindow(maxWindow)); err == nil {
			defer d.Close()
			r = d
		}
	case codingInvalid:
		return nil, ErrCodings
	}
	if err != nil {
		return nil, ErrUndecodable
	}
	out, err := io.ReadAll(io.LimitReader(r, int64(limit)+1))
	switch {
	case len(out) > limit:
		return nil, ErrTooLarge
	case err != nil:
		return nil, ErrUndecodable
	}
	return out, nil
}
