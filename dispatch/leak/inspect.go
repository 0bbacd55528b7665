package leak

import (
	"bufio"
	"compress/flate"
	"compress/gzip"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/andybalholm/brotli"
	"github.com/klauspost/compress/zstd"
)

// What an Inspector allows a body to decode to. All layers of a list of codings
// count together. Beyond it the Inspector gives up with ErrTooLarge.
const (
	DecodedBytes = 64 << 20 // always
	DecodedRatio = 256      // and so many more for each byte of the body that came by then
)

// maxWindow is the largest window of zstd that is decoded, in bytes (RFC 9659 §3);
// that of brotli is at most 16 MiB (RFC 7932 §9.1), that of deflate 32 KiB.
const maxWindow = 8 << 20

// maxCodings is the longest list of content codings that is decoded.
const maxCodings = 3

// The reasons for which an Inspector cannot say that a body is clean. They hold
// nothing of the body. Such a result is to be blocked (CONTRACT C5).
var (
	// ErrTooLarge: the body decodes to more than DecodedBytes and DecodedRatio allow,
	// or needs a larger window than RFC 9659 does.
	ErrTooLarge = errors.New("leak: decoded body over the limit")
	// ErrUndecodable: the body begins as its coding demands, and then breaks its rules;
	// or it is cut off or foreign, in a coding whose decoder keeps text back then.
	ErrUndecodable = errors.New("leak: body does not decode")
	// ErrCodings: the list of codings is too long.
	ErrCodings = errors.New("leak: too many content codings")
)

// coding is a content coding that is decoded.
type coding uint8

const (
	codingInvalid coding = iota
	codingGzip
	codingDeflate // as RFC 9110 §8.4.1.2 says: in the zlib format
	codingRaw     // as some servers send it: without that format
	codingBrotli
	codingZstd
)

// plain are names in Content-Encoding under which nothing is encoded: the reserved
// one, and those that servers write by mistake.
var plain = map[string]bool{"": true, "identity": true, "none": true, "binary": true, "utf-8": true, "utf8": true,
	"us-ascii": true, "iso-8859-1": true, "7bit": true, "8bit": true}

// ContentEncoding returns the value of the Content-Encoding fields of h as one list,
// and whether a body under it is encoded: it goes through an Inspector then, and
// through a Stream otherwise.
func ContentEncoding(h http.Header) (list string, encoded bool) {
	list = strings.Join(h.Values("Content-Encoding"), ", ")
	codings, opaque, err := parseCodings(list)
	return list, len(codings) > 0 || opaque || err != nil
}

// parseCodings returns the codings in the order in which they are to be undone, as
// far as they are known. opaque says that one of them is not.
func parseCodings(list string) (codings []coding, opaque bool, err error) {
	names := strings.Split(strings.ToLower(list), ",")
	slices.Reverse(names)
	for _, name := range names {
		name = strings.Trim(name, " \t")
		if plain[name] {
			continue
		}
		if len(codings) == maxCodings {
			return nil, false, ErrCodings
		}
		switch name {
		case "gzip", "x-gzip":
			codings = append(codings, codingGzip)
		case "deflate":
			codings = append(codings, codingDeflate)
		case "br":
			codings = append(codings, codingBrotli)
		case "zstd":
			codings = append(codings, codingZstd)
		default:
			return codings, true, nil
		}
	}
	return codings, false, nil
}

// Inspector looks for secrets in an encoded body, which cannot be masked in place:
// it is decoded for the search and passed on as it came (CONTRACT G12), or blocked.
// What is decoded is not kept; memory is bounded by the windows of the codings. The
// body is also searched as it is. An Inspector belongs to one goroutine and must be
// closed. The nil Inspector finds nothing. It prints as [redacted].
type Inspector struct{ open func() *inspector }

type inspector struct {
	raw     scanner
	ways    []*way
	opaque  bool
	written int64
	found   bool
	err     error
	closed  bool
}

// Inspector returns an Inspector for a body with the given Content-Encoding, a list
// if there are several (RFC 9110 §8.4); ContentEncoding gives both. gzip, x-gzip,
// deflate (with and without the zlib format), br and zstd are decoded, and lists of
// up to three of them; identity and some names that mean as much are ignored.
//
// Under a coding that is not known the body is searched as it is, after the known
// codings around it are undone. Opaque tells so: whoever wants to be sure blocks it.
//
// The error is ErrCodings. The Inspector of the nil Guard is nil.
func (g *Guard) Inspector(contentEncoding string) (*Inspector, error) {
	if g == nil {
		return nil, nil
	}
	codings, opaque, err := parseCodings(contentEncoding)
	if err != nil {
		return nil, err
	}
	i := &inspector{opaque: opaque}
	i.raw.reset(g.open())
	outer := &Inspector{open: func() *inspector { return i }}
	if len(codings) == 0 {
		return outer, nil
	}
	// Clients guess which deflate it is, so both count.
	variants := [][]coding{nil}
	for _, c := range codings {
		n := len(variants)
		for j := range n {
			base := variants[j]
			variants[j] = append(slices.Clip(base), c)
			if c == codingDeflate {
				variants = append(variants, append(slices.Clip(base), codingRaw))
			}
		}
	}
	for _, v := range variants {
		i.ways = append(i.ways, newWay(g.open(), v))
	}
	return outer, nil
}

// Opaque reports whether the body has a coding that is not known, so that only its
// encoded form is searched.
func (i *Inspector) Opaque() bool { return i != nil && i.open().opaque }

// Write takes the next piece of the body and reports whether a secret has been found
// so far, in all that can be decoded by now. The error is ErrTooLarge or
// ErrUndecodable and stays; what is found before an error stays found. p is not
// retained.
func (i *Inspector) Write(p []byte) (found bool, err error) {
	if i == nil {
		return false, nil
	}
	return i.open().write(p)
}

func (i *inspector) write(p []byte) (found bool, err error) {
	if len(p) == 0 || i.found || i.err != nil || i.closed {
		return i.found, i.err
	}
	i.written += int64(len(p))
	i.raw.scan(p)
	i.found = len(i.raw.spans) > 0
	for _, w := range i.ways {
		if !i.found {
			w.feed(p, i.written)
			i.found = w.found
		}
	}
	i.judge()
	return i.found, i.err
}

// Close ends the body. It reports like Write; a body that ends too early within its
// coding (zstd apart) is searched as far as it decodes, and one that does not even
// begin with the mark of gzip, deflate or zstd is searched as it is. It may be called
// twice.
func (i *Inspector) Close() (found bool, err error) {
	if i == nil {
		return false, nil
	}
	return i.open().close()
}

func (i *inspector) close() (found bool, err error) {
	if !i.closed {
		i.closed = true
		for _, w := range i.ways {
			w.end(i.found || i.err != nil)
			i.found = i.found || w.found
		}
		i.judge()
	}
	return i.found, i.err
}

// Safe is the number of bytes of the body, from its first, that may be released
// while the rest is not known yet: those that decode to text which was searched and
// in which no secret has begun. Decoders of gzip and deflate hand text over at a
// flush of the sender, else every 32 KiB; those of br and zstd as early as they can.
// For a list of codings Safe is 0 until Close. It is 0 when a secret was found, or
// after an error.
func (i *Inspector) Safe() int64 {
	if i == nil {
		return 0
	}
	return i.open().safe()
}

func (i *inspector) safe() int64 {
	if i.found || i.err != nil {
		return 0
	}
	if i.closed {
		return i.written
	}
	out := i.raw.settled()
	for _, w := range i.ways {
		out = min(out, w.safe(i.written))
	}
	return out
}

// judge sets err: at once for what is too large; for what does not decode when no
// way of reading it is left.
func (i *inspector) judge() {
	if i.found || i.err != nil {
		return
	}
	bad, good := false, false
	for _, w := range i.ways {
		switch w.verdict {
		case verdictTooLarge:
			i.err = ErrTooLarge
			return
		case verdictUndecodable:
			bad = true
		case verdictClean, verdictOpen:
			good = true
		case verdictForeign:
		}
	}
	if bad && !good {
		i.err = ErrUndecodable
	}
}

// verdict is how the decoding of a body ended, the worse the larger.
type verdict uint8

const (
	verdictOpen        verdict = iota // it has not
	verdictClean                      // decoded to the end, or as far as it goes
	verdictForeign                    // it is not in that coding at all
	verdictUndecodable                // it is, up to a point
	verdictTooLarge
)

var (
	errStopped = errors.New("leak: stopped")
	errForeign = errors.New("leak: not in that coding")
)

// way is one way to decode a body. The decoders read, and the body is written: the
// decoding runs as a coroutine that is resumed for each piece and stops when it
// needs the next one.
type way struct {
	known   *known
	codings []coding
	last    *layer // the one that hands over the text
	found   bool
	verdict verdict

	next  func() (struct{}, bool)
	stop  func()
	yield func(struct{}) bool
	buf   []byte // of the piece, what was not read yet
	ended bool

	always  int64 // DecodedBytes
	written int64 // bytes of the body, the piece included
	taken   int64 // bytes of the body that were read
	decoded int64 // bytes that came out of all layers
	emitted bool  // something came out of one
	clean   int64 // taken when all that was read had come out and was searched
}

func newWay(k *known, codings []coding) *way {
	return &way{known: k, codings: codings, always: DecodedBytes}
}

// feed decodes what p adds.
func (w *way) feed(p []byte, written int64) {
	w.written = written
	if w.next == nil {
		w.next, w.stop = iter.Pull(func(yield func(struct{}) bool) {
			w.yield = yield
			w.run()
		})
	}
	if w.verdict == verdictOpen {
		w.buf = p
		w.next()
		w.buf = nil
	}
}

// end decodes what is left, or drops it.
func (w *way) end(drop bool) {
	if w.next == nil {
		w.verdict = verdictClean
		return
	}
	if w.verdict == verdictOpen && !drop {
		w.ended = true
		w.next()
	}
	w.stop()
}

// safe is the way's part of Inspector.Safe.
func (w *way) safe(written int64) int64 {
	switch {
	case w.verdict != verdictOpen:
		return written // the rest is not in the coding
	case len(w.codings) > 1:
		return 0
	case w.lazy():
		return w.clean
	case w.last != nil && w.last.scan.idle():
		w.clean = written
	}
	return w.clean
}

// lazy says that the decoder reads ahead of what it hands over.
func (w *way) lazy() bool { return w.codings[0] < codingBrotli }

// Read reads the body; it is called in the coroutine only.
func (w *way) Read(p []byte) (int, error) {
	if err := w.more(); err != nil {
		return 0, err
	}
	n := copy(p, w.buf)
	w.buf = w.buf[n:]
	w.taken += int64(n)
	return n, nil
}

// ReadByte keeps decoders from reading ahead through a buffer of their own.
func (w *way) ReadByte() (byte, error) {
	if err := w.more(); err != nil {
		return 0, err
	}
	c := w.buf[0]
	w.buf = w.buf[1:]
	w.taken++
	return c, nil
}

func (w *way) more() error {
	for len(w.buf) == 0 {
		if w.ended {
			return io.EOF
		}
		if !w.yield(struct{}{}) {
			return errStopped
		}
	}
	return nil
}

// run decodes the body; the layers search what comes out of them.
func (w *way) run() {
	var r byteReader = w
	layers := make([]*layer, len(w.codings))
	for i, c := range w.codings {
		if i > 0 {
			r = bufio.NewReaderSize(w.last, 4<<10)
		}
		d, closer := c.reader(r)
		if closer != nil {
			defer closer()
		}
		w.last = &layer{w: w, r: d}
		w.last.scan.reset(w.known)
		layers[i] = w.last
	}
	// deflate hands over 32 KiB at most, which leaves room: a full buffer means that there is more.
	buf := make([]byte, 32<<10+1)
	end := verdictClean
	// Where a layer ends before those around it, what they still hold is searched, too.
	for i := len(layers) - 1; i >= 0; {
		n, err := layers[i].Read(buf)
		if n > 0 && n < len(buf) && w.last.scan.idle() && w.lazy() {
			w.clean = w.taken
		}
		if w.found || errors.Is(err, errStopped) {
			return
		}
		if err != nil {
			end = max(end, w.judge(err))
			if end == verdictTooLarge {
				break
			}
			i--
		}
	}
	w.verdict = end
}

func (w *way) judge(err error) verdict {
	is := func(targets ...error) bool {
		return slices.ContainsFunc(targets, func(t error) bool { return errors.Is(err, t) })
	}
	// What gzip and deflate decode to is complete in spite of an error.
	deflated := !slices.Contains(w.codings, codingBrotli) && !slices.Contains(w.codings, codingZstd)
	switch {
	case is(io.EOF, brotliExcess()):
		return verdictClean
	case is(io.ErrUnexpectedEOF) && !slices.Contains(w.codings, codingZstd): // zstd keeps the last block back
		return verdictClean
	case is(ErrTooLarge, zstd.ErrDecoderSizeExceeded, zstd.ErrWindowSizeExceeded):
		return verdictTooLarge
	case is(ErrUndecodable):
		return verdictUndecodable
	case is(errForeign, zstd.ErrMagicMismatch):
		if w.emitted {
			return verdictClean // something else follows the encoded text
		}
		return verdictForeign
	case deflated && !w.emitted:
		return verdictForeign
	}
	return verdictUndecodable
}

// brotliExcess is the error of the brotli decoder, which does not export it, when a
// whole text was decoded and something seems to follow. Version 1.3.0 also returns it
// at the end of sound bodies that came in small pieces.
var brotliExcess = sync.OnceValue(func() error {
	_, err := io.ReadAll(brotli.NewReader(strings.NewReader("\x06.")))
	return err
})

type byteReader interface {
	io.Reader
	io.ByteReader
}

// layer undoes one coding. It counts what comes out, and searches it: a body may
// have fewer codings than it says.
type layer struct {
	w    *way
	r    io.Reader
	scan scanner
}

func (l *layer) Read(p []byte) (int, error) {
	n, err := l.decode(p)
	if n > 0 {
		l.w.emitted = true
		if l.scan.scan(p[:n]); len(l.scan.spans) > 0 {
			l.w.found = true
			return n, errStopped
		}
	}
	if l.w.decoded += int64(n); l.w.decoded > l.w.always+DecodedRatio*l.w.written {
		return n, ErrTooLarge
	}
	return n, err
}

// decode reads from the decoder. One that stumbles over hostile bytes ends its body,
// and not the process.
func (l *layer) decode(p []byte) (n int, err error) {
	defer func() {
		if recover() != nil {
			n, err = 0, ErrUndecodable
		}
	}()
	return l.r.Read(p)
}

// reader returns a decoder, and what frees it or nil.
func (c coding) reader(r byteReader) (io.Reader, func()) {
	switch c {
	case codingGzip:
		return &members{r: r}, nil
	case codingDeflate:
		return &zlibReader{r: r}, nil
	case codingRaw:
		return flate.NewReader(r), nil
	case codingBrotli:
		return brotli.NewReader(r), nil
	case codingZstd:
		d, err := zstd.NewReader(r, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
			zstd.WithDecoderMaxWindow(maxWindow), zstd.IgnoreChecksum(true))
		if err != nil {
			return failed{err}, nil
		}
		return d, d.Close
	case codingInvalid:
	}
	return failed{errForeign}, nil
}

type failed struct{ err error }

func (f failed) Read([]byte) (int, error) { return 0, f.err }

// members reads a file of gzip members (RFC 1952 §2.2). A wrong checksum does not
// end it, since clients exist that do not look at it.
type members struct {
	r    byteReader
	z    *gzip.Reader
	open bool
}

func (m *members) Read(p []byte) (int, error) {
	for {
		if !m.open {
			if err := m.begin(); err != nil {
				return 0, err
			}
			m.open = true
		}
		n, err := m.z.Read(p)
		if errors.Is(err, io.EOF) || errors.Is(err, gzip.ErrChecksum) {
			m.open, err = false, nil
		}
		if n > 0 || err != nil {
			return n, err
		}
	}
}

func (m *members) begin() (err error) {
	if m.z == nil {
		m.z, err = gzip.NewReader(m.r)
	} else {
		err = m.z.Reset(m.r)
	}
	if errors.Is(err, gzip.ErrHeader) {
		return errForeign
	}
	if err == nil {
		m.z.Multistream(false)
	}
	return err
}

// zlibReader reads the zlib format (RFC 1950 §2.2). The checksum at the end is not
// looked at.
type zlibReader struct {
	r byteReader
	f io.Reader
}

func (z *zlibReader) Read(p []byte) (int, error) {
	if z.f == nil {
		var head [2]byte
		if _, err := io.ReadFull(z.r, head[:]); err != nil {
			return 0, err
		}
		if head[0]&15 != 8 || (uint(head[0])<<8|uint(head[1]))%31 != 0 {
			return 0, errForeign
		}
		z.f = flate.NewReader(z.r)
	}
	return z.f.Read(p)
}

// Format prints [redacted].
func (i *Inspector) Format(f fmt.State, _ rune) { fmt.Fprint(f, redacted) }

// LogValue is [redacted].
func (i *Inspector) LogValue() slog.Value { return slog.StringValue(redacted) }

// MarshalText is [redacted].
func (i *Inspector) MarshalText() ([]byte, error) { return []byte(redacted), nil }
