package testkit

import (
	"bufio"
	"crypto/tls"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
)

// ConnectProxy is an HTTP proxy that tunnels to one address whatever it is asked for,
// or answers CONNECT with a fixed text. It keeps all that it was sent outside of tunnels,
// and the first bytes inside of them.
type ConnectProxy struct {
	ln     net.Listener
	target string
	answer string

	mu    sync.Mutex
	heads []string
	seen  strings.Builder
}

// NewConnectProxy starts one on loopback. cfg nil: it is spoken to over plain TCP;
// answer "": it opens tunnels.
func NewConnectProxy(t testing.TB, cfg *tls.Config, target, answer string) *ConnectProxy {
	t.Helper()
	p := &ConnectProxy{ln: listen(t, "127.0.0.1:0"), target: target, answer: answer}
	if cfg != nil {
		p.ln = tls.NewListener(p.ln, cfg)
	}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := p.ln.Accept()
			if err != nil {
				return
			}
			all.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(func() { _ = p.ln.Close() })
	return p
}

// Addr is its address.
func (p *ConnectProxy) Addr() string { return p.ln.Addr().String() }

// Heads are the request heads that came, in order.
func (p *ConnectProxy) Heads() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return append([]string(nil), p.heads...)
}

// Seen is every byte that passed from the client, heads and tunnels.
func (p *ConnectProxy) Seen() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen.String()
}

// Write keeps what passes.
func (p *ConnectProxy) Write(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.seen.Write(b)
}

func (p *ConnectProxy) serve(c net.Conn) {
	defer func() { _ = c.Close() }()
	br := bufio.NewReader(io.TeeReader(c, p))
	var head strings.Builder
	for {
		line, err := br.ReadString('\n')
		if head.WriteString(line); err != nil || head.Len() > 64<<10 {
			return
		}
		if line == "\r\n" {
			break
		}
	}
	p.mu.Lock()
	p.heads = append(p.heads, head.String())
	p.mu.Unlock()
	if p.answer != "" {
		_, _ = io.WriteString(c, p.answer)
		return
	}
	up, err := net.Dial("tcp", p.target)
	if err != nil {
		_, _ = io.WriteString(c, "HTTP/1.1 502 Bad Gateway\r\nContent-Length: 0\r\n\r\n")
		return
	}
	defer func() { _ = up.Close() }()
	if _, err := io.WriteString(c, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		return
	}
	go func() {
		_, _ = io.Copy(c, up)
		_ = c.Close()
	}()
	_, _ = io.Copy(up, br)
}
