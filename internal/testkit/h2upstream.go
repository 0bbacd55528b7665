package testkit

import (
	"bytes"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"testing"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
)

// H2Step is one thing an H2Upstream does on a stream. An error ends the connection.
type H2Step func(x *H2Exchange) error

// H2UpstreamConfig says what an H2Upstream is.
type H2UpstreamConfig struct {
	// TLS is the server's configuration; ALPN h2 is set by NewH2Upstream. Nil is
	// plain TCP with prior knowledge.
	TLS *tls.Config
	// Script gives the steps for the n-th request of the origin, counted over all
	// its connections; the last entry is repeated.
	Script [][]H2Step
	// Handler gives the steps for each request, if Script is nil. Nil answers 200, "ok".
	Handler func(a Arrival) []H2Step
	// Early runs the steps when the request's head has come, not its end.
	Early bool
	// Settings are sent first.
	Settings []http2.Setting
	// Addr is the address to listen on; "" is 127.0.0.1:0.
	Addr string
}

// H2Upstream is a scripted HTTP/2 origin on loopback, made of frames.
type H2Upstream struct {
	*Upstream // its listener, ledger and life; it has no HTTP/1.1 script
	cfg       H2UpstreamConfig
}

// H2Exchange is what an H2Step works on: one stream.
type H2Exchange struct {
	// Stream is the stream id of the request.
	Stream uint32

	c       *h2conn
	arrival *Arrival
	gone    chan struct{} // the peer reset the stream
}

// Arrival returns the request as far as it was read.
func (x *H2Exchange) Arrival() Arrival { return x.c.up.snapshot(x.arrival) }

// Frames runs f with the framer of the connection, alone.
func (x *H2Exchange) Frames(f func(fr *http2.Framer) error) error { return x.c.write(f) }

// H2Refuse resets the stream with REFUSED_STREAM: not processed (RFC 9113 §8.7).
func H2Refuse() H2Step { return H2Reset(http2.ErrCodeRefusedStream) }

// H2Reset resets the stream with a code.
func H2Reset(code http2.ErrCode) H2Step {
	return func(x *H2Exchange) error {
		return x.Frames(func(fr *http2.Framer) error { return fr.WriteRSTStream(x.Stream, code) })
	}
}

// H2GoAwayBelow sends GOAWAY with a last stream id below this stream: not
// processed (RFC 9113 §6.8).
func H2GoAwayBelow(code http2.ErrCode) H2Step { return h2GoAway(-2, code) }

// H2GoAwayIncluding sends GOAWAY with this stream as the last one: it may have
// been processed.
func H2GoAwayIncluding(code http2.ErrCode) H2Step { return h2GoAway(0, code) }

func h2GoAway(offset int64, code http2.ErrCode) H2Step {
	return func(x *H2Exchange) error {
		last := uint32(max(0, int64(x.Stream)+offset))
		return x.Frames(func(fr *http2.Framer) error { return fr.WriteGoAway(last, code, nil) })
	}
}

// H2Head sends a HEADERS frame with a status and fields (name, value pairs, lower
// case). With end, it ends the stream.
func H2Head(status int, end bool, fields ...string) H2Step {
	return func(x *H2Exchange) error {
		return x.headers(end, append([]string{":status", strconv.Itoa(status)}, fields...))
	}
}

// H2Trailers ends the stream with a trailer section.
func H2Trailers(fields ...string) H2Step {
	return func(x *H2Exchange) error { return x.headers(true, fields) }
}

// H2Data sends DATA, within the peer's flow-control windows.
func H2Data(data []byte, end bool) H2Step {
	return func(x *H2Exchange) error { return x.data(data, end) }
}

// H2Reply sends a complete response.
func H2Reply(status int, body string, fields ...string) H2Step {
	return func(x *H2Exchange) error {
		if body == "" || x.Arrival().Method == http.MethodHead {
			return H2Head(status, true, fields...)(x)
		}
		if err := H2Head(status, false, fields...)(x); err != nil {
			return err
		}
		return x.data([]byte(body), true)
	}
}

// H2Hold waits at the gate until the test opens it; other streams go on.
func H2Hold(g *Gate) H2Step {
	return func(x *H2Exchange) error {
		if !g.Pass(x.c.closed) {
			return errStop
		}
		return nil
	}
}

// H2Stall leaves the stream without an answer until the peer resets it or the
// connection ends.
func H2Stall() H2Step {
	return func(x *H2Exchange) error {
		select {
		case <-x.gone:
		case <-x.c.closed:
		}
		return nil
	}
}

// H2Close ends the connection with close_notify (where there is TLS) and FIN. What
// the peer still sends is read, so that nothing sent before is lost to an RST.
func H2Close() H2Step {
	return func(x *H2Exchange) error {
		if c, ok := x.c.conn.(*tls.Conn); ok {
			_ = c.CloseWrite()
		}
		return x.c.tcp.CloseWrite()
	}
}

// H2CloseNoNotify is H2Close without close_notify.
func H2CloseNoNotify() H2Step {
	return func(x *H2Exchange) error { return x.c.tcp.CloseWrite() }
}

// H2ConnReset ends the TCP connection with RST.
func H2ConnReset() H2Step {
	return func(x *H2Exchange) error {
		_ = x.c.tcp.SetLinger(0)
		_ = x.c.tcp.Close()
		return errStop
	}
}

// NewH2Upstream starts an HTTP/2 origin; it ends with the test.
func NewH2Upstream(t testing.TB, cfg H2UpstreamConfig) *H2Upstream {
	t.Helper()
	if cfg.Script == nil && cfg.Handler == nil {
		cfg.Handler = func(Arrival) []H2Step { return []H2Step{H2Reply(200, "ok")} }
	}
	if cfg.TLS != nil {
		cfg.TLS = cfg.TLS.Clone()
		cfg.TLS.NextProtos = []string{http2.NextProtoTLS}
	}
	h := &H2Upstream{cfg: cfg}
	h.Upstream = &Upstream{
		Ledger: newLedger(), cfg: UpstreamConfig{TLS: cfg.TLS}, ln: listen(t, cfg.Addr),
		done: make(chan struct{}), open: map[net.Conn]struct{}{},
	}
	h.serveConn = h.serveH2
	h.wg.Add(1)
	go h.accept()
	t.Cleanup(h.Close)
	return h
}

// h2conn is one connection. Frames are written under wmu; windows and streams are
// under mu.
type h2conn struct {
	up     *H2Upstream
	conn   net.Conn
	tcp    *net.TCPConn
	fr     *http2.Framer
	closed chan struct{}

	wmu  sync.Mutex
	hbuf bytes.Buffer
	henc *hpack.Encoder

	mu      sync.Mutex
	cond    *sync.Cond
	dead    bool
	window  int64 // of the connection
	initial int64 // SETTINGS_INITIAL_WINDOW_SIZE of the peer
	windows map[uint32]int64
	streams map[uint32]*H2Exchange
}

func (c *h2conn) write(f func(fr *http2.Framer) error) error {
	c.wmu.Lock()
	defer c.wmu.Unlock()
	return f(c.fr)
}

func (x *H2Exchange) headers(end bool, kv []string) error {
	c := x.c
	final := end
	for i := 0; i+1 < len(kv); i += 2 {
		if kv[i] == ":status" && strings.HasPrefix(kv[i+1], "1") {
			final = false
		}
	}
	if final {
		c.up.update(func() { x.arrival.Answered = true })
	}
	err := c.write(func(fr *http2.Framer) error {
		c.hbuf.Reset()
		for i := 0; i+1 < len(kv); i += 2 {
			if err := c.henc.WriteField(hpack.HeaderField{Name: kv[i], Value: kv[i+1]}); err != nil {
				return err
			}
		}
		return fr.WriteHeaders(http2.HeadersFrameParam{StreamID: x.Stream, BlockFragment: c.hbuf.Bytes(), EndHeaders: true, EndStream: end})
	})
	if err != nil && final {
		c.up.update(func() { x.arrival.Answered = false })
	}
	return err
}

func (x *H2Exchange) data(p []byte, end bool) error {
	c := x.c
	for {
		c.mu.Lock()
		for !c.dead && len(p) > 0 && min(c.window, c.windows[x.Stream]) <= 0 {
			c.cond.Wait()
		}
		if c.dead {
			c.mu.Unlock()
			return errStop
		}
		n := min(int64(len(p)), 16<<10, c.window, c.windows[x.Stream])
		if len(p) == 0 {
			n = 0
		}
		c.window -= n
		c.windows[x.Stream] -= n
		c.mu.Unlock()
		last := int(n) == len(p)
		if last && end {
			c.up.update(func() { x.arrival.Answered = true })
		}
		if err := c.write(func(fr *http2.Framer) error { return fr.WriteData(x.Stream, last && end, p[:n]) }); err != nil {
			c.up.update(func() { x.arrival.Answered = false })
			return err
		}
		p = p[n:]
		if last {
			return nil
		}
	}
}

func (h *H2Upstream) steps(a Arrival) []H2Step {
	if h.cfg.Script == nil {
		return h.cfg.Handler(a)
	}
	if len(h.cfg.Script) == 0 {
		return nil
	}
	return h.cfg.Script[min(a.N, len(h.cfg.Script))-1]
}

func (h *H2Upstream) serveH2(tcp *net.TCPConn, info *ConnInfo) {
	conn, err := h.handshake(tcp, h.Upstream.cfg.TLS, info)
	if err != nil {
		return
	}
	in := counted{conn, h.Ledger, info}
	if _, err := io.ReadFull(in, make([]byte, len(http2.ClientPreface))); err != nil {
		_ = conn.Close()
		return
	}
	c := &h2conn{
		up: h, conn: conn, tcp: tcp, fr: http2.NewFramer(conn, in), closed: make(chan struct{}),
		window: 65535, initial: 65535, windows: map[uint32]int64{}, streams: map[uint32]*H2Exchange{},
	}
	c.cond = sync.NewCond(&c.mu)
	c.henc = hpack.NewEncoder(&c.hbuf)
	c.fr.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	var running sync.WaitGroup
	var end sync.Once
	stop := func() {
		end.Do(func() {
			c.mu.Lock()
			c.dead = true
			c.cond.Broadcast()
			c.mu.Unlock()
			close(c.closed)
			_ = conn.Close()
		})
	}
	defer running.Wait()
	defer stop()

	run := func(x *H2Exchange) {
		running.Add(1)
		go func() {
			defer running.Done()
			for _, s := range h.steps(x.Arrival()) {
				if err := s(x); err != nil {
					stop()
					return
				}
			}
		}()
	}
	if c.write(func(fr *http2.Framer) error { return fr.WriteSettings(h.cfg.Settings...) }) != nil {
		return
	}
	err = c.read(info, run)
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, x := range c.streams {
		h.failed(x.arrival, err)
	}
}

// read handles frames until the connection ends; run starts the steps of a request.
func (c *h2conn) read(info *ConnInfo, run func(*H2Exchange)) error {
	h := c.up
	for {
		f, err := c.fr.ReadFrame()
		if err != nil {
			return err
		}
		id := f.Header().StreamID
		c.mu.Lock()
		x := c.streams[id]
		c.mu.Unlock()
		ended := false
		switch f := f.(type) {
		case *http2.SettingsFrame:
			if f.IsAck() {
				continue
			}
			if v, ok := f.Value(http2.SettingInitialWindowSize); ok {
				c.mu.Lock()
				for id := range c.windows {
					c.windows[id] += int64(v) - c.initial
				}
				c.initial = int64(v)
				c.cond.Broadcast()
				c.mu.Unlock()
			}
			err = c.write(func(fr *http2.Framer) error { return fr.WriteSettingsAck() })
		case *http2.PingFrame:
			if !f.IsAck() {
				err = c.write(func(fr *http2.Framer) error { return fr.WritePing(true, f.Data) })
			}
		case *http2.WindowUpdateFrame:
			c.mu.Lock()
			if id == 0 {
				c.window += int64(f.Increment)
			} else {
				c.windows[id] += int64(f.Increment)
			}
			c.cond.Broadcast()
			c.mu.Unlock()
		case *http2.MetaHeadersFrame:
			if x != nil { // trailers
				trailer := http.Header{}
				for _, hf := range f.RegularFields() {
					trailer.Add(hf.Name, hf.Value)
				}
				h.update(func() { x.arrival.Trailer = trailer })
				ended = f.StreamEnded()
				break
			}
			a := &Arrival{
				Conn: info.N, Stream: id, Protocol: "HTTP/2.0", ServerName: info.ServerName, Alpn: info.Alpn,
				Method: f.PseudoValue("method"), Target: f.PseudoValue("path"), Authority: f.PseudoValue("authority"),
				Header: http.Header{}, HeadComplete: true,
			}
			for _, hf := range f.RegularFields() {
				a.Fields = append(a.Fields, Field{hf.Name, hf.Value})
				a.Header.Add(hf.Name, hf.Value)
			}
			x = &H2Exchange{Stream: id, c: c, arrival: h.add(a), gone: make(chan struct{})}
			c.mu.Lock()
			c.streams[id] = x
			c.windows[id] = c.initial
			c.mu.Unlock()
			ended = f.StreamEnded()
			if h.cfg.Early {
				run(x)
			}
		case *http2.DataFrame:
			if x == nil {
				break
			}
			h.addBody(x.arrival, f.Data())
			ended = f.StreamEnded()
			if k := f.Length; k > 0 {
				err = c.write(func(fr *http2.Framer) error {
					if err := fr.WriteWindowUpdate(0, k); err != nil || ended {
						return err
					}
					return fr.WriteWindowUpdate(id, k)
				})
			}
		case *http2.RSTStreamFrame:
			if x != nil {
				h.failed(x.arrival, errors.New("reset by the client: "+f.ErrCode.String()))
				c.mu.Lock()
				delete(c.streams, id)
				c.mu.Unlock()
				close(x.gone)
			}
		}
		if ended {
			h.complete(x.arrival)
			if !h.cfg.Early {
				run(x)
			}
		}
		// A failed write to a peer that is closing is not the end of reading: what it
		// sent before still counts as arrived.
		_ = err
	}
}
