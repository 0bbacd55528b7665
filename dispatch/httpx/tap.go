package httpx

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"
)

// rawConn is the TCP side under TLS. It remembers whether the peer ended the TCP
// stream: crypto/tls reports io.EOF for a bare FIN at a record border as well as
// for close_notify, and only the latter proves completeness (CONTRACT G2).
type rawConn struct {
	net.Conn
	sawEOF atomic.Bool
	// wire is called before every read after the handshake; nil during it.
	wire func()
}

func (c *rawConn) Read(p []byte) (int, error) {
	if c.wire != nil {
		c.wire()
	}
	n, err := c.Conn.Read(p)
	if errors.Is(err, io.EOF) {
		c.sawEOF.Store(true)
	}
	return n, err
}

// errUnsolicited ends a connection whose peer sent bytes while nothing was asked:
// they would be taken for the answer to the next request.
var errUnsolicited = errors.New("httpx: bytes from the origin before any request byte was written")

// HTTP/2 frame types, flags and error codes that the tap reads (RFC 9113 §6, §7).
const (
	frameData      = 0x0
	frameHeaders   = 0x1
	frameRSTStream = 0x3
	frameGoAway    = 0x7

	flagEndStream = 0x1 // of DATA and HEADERS

	errRefusedStream = 0x7

	frameHeaderBytes = 9
)

// tap sits on the plaintext side of a connection. It counts the bytes of the
// current exchange, remembers how each direction ended, and on HTTP/2 reads frame
// headers. It proves; it never changes bytes.
type tap struct {
	net.Conn
	raw *rawConn // nil without TLS
	h2  bool

	// idle is called when HTTP/1's read loop waits for the wire with nothing
	// buffered, in TLS neither: only then is the connection proven to be between
	// messages.
	idle func()

	mu       sync.Mutex
	wrote    int64 // since mark
	read     int64 // since mark
	readErr  error
	writeErr error
	waiting  bool      // between exchanges: no byte is expected from the peer
	inRead   bool      // a read of the wire is going on
	lastSign time.Time // of life, in either direction
	head     headWatch // HTTP/1

	in, out frameParser
	stream  uint32 // our stream of the current exchange
	refused bool   // RST_STREAM(REFUSED_STREAM) on it
	goaway  bool   // GOAWAY whose last stream id is below it
	maxSeen uint32 // last-stream-id of the lowest GOAWAY
	anyAway bool
	headers bool // HEADERS frames arrived on our stream
	ended   bool // the peer ended our stream: END_STREAM
	data    bool // DATA frames arrived on our stream that hold something
}

const maxHeadSample = 512

// mark starts an exchange: counters from zero, bytes from the peer are expected.
func (t *tap) mark() {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.wrote, t.read, t.waiting = 0, 0, false
	t.head.reset()
	t.stream, t.refused, t.goaway, t.headers, t.ended, t.data = 0, false, false, false, false, false
	t.lastSign = time.Now()
}

// rest ends an exchange and reports whether the connection is proven to be
// between messages already. On HTTP/1 that is so once its read loop waits for the
// wire, since it does so only with nothing left in its buffer; until then idle
// will be called. Any byte from here on is unsolicited.
func (t *tap) rest() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.h2 {
		return true
	}
	t.waiting = true
	return t.inRead
}

// wire says that bytes are wanted that are not here yet.
func (t *tap) wire() {
	t.mu.Lock()
	waiting := t.waiting
	t.inRead = true
	t.mu.Unlock()
	if waiting && t.idle != nil {
		t.idle()
	}
}

func (t *tap) Read(p []byte) (int, error) {
	if t.raw == nil {
		t.wire() // under TLS rawConn says it: whole records may be here already
	}
	n, err := t.Conn.Read(p)
	t.mu.Lock()
	defer t.mu.Unlock()
	t.inRead = false
	if n > 0 {
		t.lastSign = time.Now()
		if !t.h2 && (t.waiting || t.wrote == 0) {
			t.readErr = errUnsolicited
			return 0, errUnsolicited
		}
		t.read += int64(n)
		if t.h2 {
			t.in.feed(p[:n], t.frameIn)
		} else {
			t.head.feed(p[:n])
		}
	}
	if err != nil && t.readErr == nil {
		t.readErr = err
	}
	return n, err
}

// headWatch follows the header section of an HTTP/1 answer as it came (RFC 9112 §2.1),
// past those of 1xx answers. It sees what net/http takes away.
type headWatch struct {
	done   bool   // an empty line ended the final head
	sample []byte // first bytes of the current head, capped
	line   []byte // first bytes of the current line, capped
	lines  int    // of the current head that ended
	coding bool   // it has a Transfer-Encoding field
	spaced bool   // a field that frames the body has whitespace before its colon
}

// maxLineSample is more than the longest name that is looked for, and a colon.
const maxLineSample = 32

func (w *headWatch) reset() {
	*w = headWatch{sample: w.sample[:0], line: w.line[:0]}
}

func (w *headWatch) feed(p []byte) {
	for len(p) > 0 && !w.done {
		n := bytes.IndexByte(p, '\n') + 1
		ended := n > 0
		if !ended {
			n = len(p)
		}
		piece := p[:n]
		p = p[n:]
		w.sample = appendUpTo(w.sample, piece, maxHeadSample)
		w.line = appendUpTo(w.line, piece, maxLineSample)
		if ended {
			w.endLine()
		}
	}
}

func appendUpTo(dst, p []byte, limit int) []byte {
	return append(dst, p[:min(len(p), max(limit-len(dst), 0))]...)
}

// isInterim reports whether a head, as net/http reads its first line, is that of a 1xx
// answer. 101 is final: it ends HTTP on the connection (RFC 9110 §15.2.2).
func isInterim(head []byte) bool {
	line, _, _ := bytes.Cut(head, []byte("\n"))
	_, status, _ := bytes.Cut(bytes.TrimSuffix(line, []byte("\r")), []byte(" "))
	status, _, _ = bytes.Cut(bytes.TrimLeft(status, " "), []byte(" "))
	return len(status) == 3 && status[0] == '1' && string(status) != "101"
}

func (w *headWatch) endLine() {
	defer func() { w.line = w.line[:0] }()
	line := bytes.TrimRight(w.line, "\r\n")
	if len(line) == 0 && w.lines > 0 {
		if isInterim(w.sample) {
			w.reset()
			return
		}
		w.done = true
		return
	}
	w.lines++
	raw, _, found := bytes.Cut(line, []byte(":"))
	if !found || w.lines == 1 {
		return
	}
	name := bytes.Trim(raw, " \t")
	coding := bytes.EqualFold(name, []byte("Transfer-Encoding"))
	w.coding = w.coding || coding
	w.spaced = w.spaced || (coding || bytes.EqualFold(name, []byte("Content-Length"))) && len(name) < len(raw)
}

func (t *tap) Write(p []byte) (int, error) {
	t.mu.Lock()
	// Counted before the call: an ambiguous write counts as handed over (E4).
	t.wrote += int64(len(p))
	t.waiting = false
	if t.h2 {
		t.out.feed(p, t.frameOut)
	}
	broken := t.writeErr
	t.mu.Unlock()
	if broken != nil && !t.h2 {
		return len(p), nil
	}
	n, err := t.Conn.Write(p)
	t.mu.Lock()
	defer t.mu.Unlock()
	if err == nil {
		t.lastSign = time.Now()
		return n, nil
	}
	if t.writeErr == nil {
		t.writeErr = err
	}
	if t.h2 || t.read == 0 && t.wrote == int64(len(p)) {
		return n, err
	}
	// HTTP/1: an origin that answers early and stops reading breaks the upload, not
	// its answer (RFC 9112 §9.5). net/http would throw the answer away on a write
	// error, so the rest of the upload goes nowhere and the read side decides. The
	// error stays on record: the request counts as incomplete (F3).
	return len(p), nil
}

// silence returns how long no byte passed in either direction.
func (t *tap) silence(now time.Time) time.Duration {
	t.mu.Lock()
	defer t.mu.Unlock()
	return now.Sub(t.lastSign)
}

// view is a consistent look at the tap.
type view struct {
	wrote, read       int64
	readErr, writeErr error
	headDone          bool
	coding, spaced    bool // see headWatch
	refused, goaway   bool
	lastStream        uint32
	headers           bool
	ended, data       bool // HTTP/2: END_STREAM, and content, on our stream
	closeNotify       bool // TLS: the peer ended its side with close_notify
	cleanFIN          bool // no TLS: the peer ended its side
}

func (t *tap) view() view {
	t.mu.Lock()
	defer t.mu.Unlock()
	v := view{wrote: t.wrote, read: t.read, readErr: t.readErr, writeErr: t.writeErr, headDone: t.head.done,
		coding: t.head.coding, spaced: t.head.spaced, refused: t.refused, goaway: t.goaway, lastStream: t.maxSeen, headers: t.headers,
		ended: t.ended, data: t.data}
	if errors.Is(t.readErr, io.EOF) {
		v.closeNotify = t.raw != nil && !t.raw.sawEOF.Load()
		v.cleanFIN = t.raw == nil
	}
	return v
}

// sample is how the current head begins.
func (t *tap) sample() []byte {
	t.mu.Lock()
	defer t.mu.Unlock()
	return bytes.Clone(t.head.sample)
}

func (t *tap) frameOut(f frame) {
	if f.kind == frameHeaders && t.stream == 0 {
		t.stream = f.stream
		if t.anyAway && t.maxSeen < f.stream {
			t.goaway = true
		}
	}
}

func (t *tap) frameIn(f frame) {
	ours := f.stream == t.stream && f.stream != 0
	payload := f.payload
	switch f.kind {
	case frameData, frameHeaders:
		if ours {
			t.headers = t.headers || f.kind == frameHeaders
			t.data = t.data || f.kind == frameData && f.length > 0
			t.ended = t.ended || f.flags&flagEndStream != 0
		}
	case frameRSTStream:
		if ours && len(payload) >= 4 && binary.BigEndian.Uint32(payload) == errRefusedStream {
			t.refused = true
		}
	case frameGoAway:
		if len(payload) < 8 {
			return
		}
		last := binary.BigEndian.Uint32(payload) & (1<<31 - 1)
		if !t.anyAway || last < t.maxSeen {
			t.anyAway, t.maxSeen = true, last
		}
		if t.stream != 0 && last < t.stream {
			t.goaway = true
		}
	}
}

// preface is what an HTTP/2 client sends first (RFC 9113 §3.4).
const preface = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

// frame is what is kept of one.
type frame struct {
	kind, flags byte
	stream      uint32
	length      int    // of the payload
	payload     []byte // its first bytes, of some kinds
}

// frameParser follows the frames of one direction of an HTTP/2 connection. It
// keeps the first bytes of small payloads only; lengths are trusted, since the
// real parser beside it fails on what is malformed.
type frameParser struct {
	skip int // bytes of a preface or payload still to pass
	head [frameHeaderBytes]byte
	n    int // bytes of head
	kept []byte
	want int // bytes of payload to keep
}

func (f *frameParser) feed(p []byte, emit func(frame)) {
	for len(p) > 0 {
		if f.n == frameHeaderBytes && len(f.kept) < f.want {
			k := min(f.want-len(f.kept), len(p))
			f.kept = append(f.kept, p[:k]...)
			p = p[k:]
			if len(f.kept) == f.want {
				f.done(emit)
			}
			continue
		}
		if f.skip > 0 {
			k := min(f.skip, len(p))
			f.skip -= k
			p = p[k:]
			continue
		}
		k := copy(f.head[f.n:], p)
		f.n += k
		p = p[k:]
		if f.n < frameHeaderBytes {
			return
		}
		length := f.length()
		f.want = 0
		if f.head[3] == frameRSTStream || f.head[3] == frameGoAway {
			f.want = min(length, 8)
		}
		f.skip = length - f.want
		f.kept = f.kept[:0]
		if f.want == 0 {
			f.done(emit)
		}
	}
}

func (f *frameParser) done(emit func(frame)) {
	emit(frame{f.head[3], f.head[4], binary.BigEndian.Uint32(f.head[5:9]) & (1<<31 - 1), f.length(), f.kept})
	f.n = 0
	f.want = 0
	f.kept = f.kept[:0]
}

func (f *frameParser) length() int { return int(f.head[0])<<16 | int(f.head[1])<<8 | int(f.head[2]) }
