package bench

import (
	"bufio"
	"bytes"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"net/http"
	"strconv"
	"sync"
	"sync/atomic"
)

const (
	// originHost is the name that Waybill, goproxy and net/http are told an address
	// for. It exists nowhere.
	originHost = "api.bench.test"
	// bodyPath is followed by the number of bytes to answer with.
	bodyPath = "/v1/bytes/"
	// maxBody bounds what the origin answers with.
	maxBody = 8 << 20
)

// Origin is the upstream: HTTP/1.1 over TLS and plain, answering with as many bytes
// of JSON as the path asks for, if the request carries the injected field.
type Origin struct {
	// TLS, Plain and Stats are its addresses. Stats answers GET with OriginStats.
	TLS, Plain, Stats string

	want      []byte // the value that Authorization must have
	listeners []net.Listener
	answers   sync.Map // bytes → []byte
	conns     atomic.Int64
	requests  atomic.Int64
	refused   atomic.Int64
}

// OriginStats counts since the start.
type OriginStats struct {
	Connections int64 `json:"connections"`
	Requests    int64 `json:"requests"`
	Refused     int64 `json:"refused"` // without the injected field
}

// StartOrigin starts an origin on loopback. authorization is the value that a proxy
// must inject.
func StartOrigin(cert tls.Certificate, authorization string) (*Origin, error) {
	o := &Origin{want: []byte(authorization)}
	listen := func(addr string) (net.Listener, error) {
		l, err := net.Listen("tcp", addr)
		if err == nil {
			o.listeners = append(o.listeners, l)
		}
		return l, err
	}
	fail := func(err error) (*Origin, error) {
		o.Close()
		return nil, fmt.Errorf("bench: origin: %w", err)
	}
	cfg := &tls.Config{Certificates: []tls.Certificate{cert}, NextProtos: []string{"http/1.1"}}
	for _, d := range []struct {
		addr *string
		wrap func(net.Conn) net.Conn
	}{
		{&o.TLS, func(c net.Conn) net.Conn { return tls.Server(c, cfg) }},
		{&o.Plain, func(c net.Conn) net.Conn { return c }},
	} {
		l, err := listen("127.0.0.1:0")
		if err != nil {
			return fail(err)
		}
		*d.addr = l.Addr().String()
		go o.accept(l, d.wrap)
		// A proxy that looks "localhost" up itself may try this one first.
		_, port, _ := net.SplitHostPort(*d.addr)
		if l6, err := listen(net.JoinHostPort("::1", port)); err == nil {
			go o.accept(l6, d.wrap)
		}
	}
	l, err := listen("127.0.0.1:0")
	if err != nil {
		return fail(err)
	}
	o.Stats = l.Addr().String()
	go func() {
		_ = http.Serve(l, http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _ = json.NewEncoder(w).Encode(o.Count()) }))
	}()
	return o, nil
}

// Count returns the counters.
func (o *Origin) Count() OriginStats {
	return OriginStats{Connections: o.conns.Load(), Requests: o.requests.Load(), Refused: o.refused.Load()}
}

// Close stops listening. Connections end when their proxy closes them.
func (o *Origin) Close() {
	for _, l := range o.listeners {
		_ = l.Close()
	}
}

func (o *Origin) accept(l net.Listener, wrap func(net.Conn) net.Conn) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		o.conns.Add(1)
		go o.serve(wrap(c))
	}
}

func (o *Origin) serve(c net.Conn) {
	defer func() { _ = c.Close() }()
	r := bufio.NewReaderSize(c, 4<<10)
	for {
		size, authorized, last, err := o.read(r)
		if err != nil {
			return
		}
		o.requests.Add(1)
		answer := o.answer(size)
		if !authorized {
			o.refused.Add(1)
			answer = []byte("HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
		}
		if _, err := c.Write(answer); err != nil || last {
			return
		}
	}
}

var errOriginRequest = errors.New("bench: not a request of this benchmark")

// read takes in one whole request.
func (o *Origin) read(r *bufio.Reader) (size int, authorized, last bool, err error) {
	line, err := r.ReadSlice('\n')
	if err != nil {
		return 0, false, false, err
	}
	_, rest, _ := bytes.Cut(line, []byte(" "))
	target, _, _ := bytes.Cut(rest, []byte(" "))
	at := bytes.Index(target, []byte(bodyPath)) // a proxy may send the absolute form on
	if at < 0 {
		return 0, false, false, errOriginRequest
	}
	if size, err = strconv.Atoi(string(target[at+len(bodyPath):])); err != nil || size < 0 || size > maxBody {
		return 0, false, false, errOriginRequest
	}
	h, err := readFields(r, o.want)
	if err != nil {
		return 0, false, false, err
	}
	if err := h.skipBody(r, false); err != nil {
		return 0, false, false, err
	}
	return size, h.authorized, h.close, nil
}

// answer returns the whole message, made once per size: text that does not compress
// to nothing, as a real answer would not.
func (o *Origin) answer(size int) []byte {
	if a, ok := o.answers.Load(size); ok {
		return a.([]byte) // only this function stores
	}
	rnd := rand.New(rand.NewPCG(1, uint64(size)))
	raw := make([]byte, size)
	for i := range raw {
		raw[i] = byte(rnd.Uint32())
	}
	text := base64.RawURLEncoding.EncodeToString(raw)
	body := []byte(`{"data":"` + text)
	if size >= len(`{"data":""}`) {
		body = append(body[:size-2], `"}`...)
	} else {
		body = body[:size]
	}
	a := append([]byte("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nDate: Thu, 01 Jan 2026 00:00:00 GMT\r\nContent-Length: "+strconv.Itoa(size)+"\r\n\r\n"), body...)
	o.answers.Store(size, a)
	return a
}

// fields is what both ends need to know of a message's header section.
type fields struct {
	length     int64 // -1: none given
	chunked    bool
	close      bool
	authorized bool
}

// readFields reads up to and with the empty line. want is the value that
// Authorization has to have; nil: any.
func readFields(r *bufio.Reader, want []byte) (fields, error) {
	h := fields{length: -1}
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return h, err
		}
		line = bytes.TrimRight(line, "\r\n")
		if len(line) == 0 {
			return h, nil
		}
		name, value, ok := bytes.Cut(line, []byte(":"))
		if !ok {
			return h, fmt.Errorf("bench: %w: a field without a colon", errOriginRequest)
		}
		value = bytes.TrimSpace(value)
		switch {
		case fold(name, "content-length"):
			if h.length, err = strconv.ParseInt(string(value), 10, 64); err != nil || h.length < 0 {
				return h, fmt.Errorf("bench: Content-Length: %w", errOriginRequest)
			}
		case fold(name, "transfer-encoding"):
			h.chunked = fold(value, "chunked")
		case fold(name, "connection"):
			h.close = fold(value, "close")
		case want != nil && fold(name, "authorization"):
			h.authorized = bytes.Equal(value, want)
		}
	}
}

// fold compares without regard to case; lower must be lower-case ASCII.
func fold(b []byte, lower string) bool {
	if len(b) != len(lower) {
		return false
	}
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			c += 'a' - 'A'
		}
		if c != lower[i] {
			return false
		}
	}
	return true
}

// skipBody reads the body and forgets it. untilEnd: a message without a length goes
// on to the end of the connection (an answer; RFC 9112 §6.3).
func (h *fields) skipBody(r *bufio.Reader, untilEnd bool) error {
	_, err := h.countBody(r, untilEnd)
	return err
}

func (h *fields) countBody(r *bufio.Reader, untilEnd bool) (int64, error) {
	switch {
	case h.chunked:
		return countChunks(r)
	case h.length >= 0:
		n, err := discard(r, h.length)
		return n, err
	case untilEnd:
		h.close = true
		n, err := io.Copy(io.Discard, r)
		return n, err
	}
	return 0, nil
}

func discard(r *bufio.Reader, n int64) (int64, error) {
	got, err := r.Discard(int(n))
	return int64(got), err
}

func countChunks(r *bufio.Reader) (int64, error) {
	var total int64
	for {
		line, err := r.ReadSlice('\n')
		if err != nil {
			return total, err
		}
		digits, _, _ := bytes.Cut(bytes.TrimRight(line, "\r\n"), []byte(";"))
		n, err := strconv.ParseInt(string(digits), 16, 64)
		if err != nil || n < 0 || n > maxBody {
			return total, fmt.Errorf("bench: chunk size: %w", errOriginRequest)
		}
		if n == 0 {
			for { // trailers
				line, err := r.ReadSlice('\n')
				if err != nil || len(bytes.TrimRight(line, "\r\n")) == 0 {
					return total, err
				}
			}
		}
		if _, err := discard(r, n+2); err != nil {
			return total, err
		}
		total += n
	}
}
