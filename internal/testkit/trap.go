package testkit

import (
	"bufio"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"
)

// Trap is an endpoint that must not get a secret. It takes whatever comes – TLS where it
// has a certificate, plain HTTP beside it – answers every request, and keeps every byte:
// as it stood on the wire, and decrypted.
type Trap struct {
	ln     net.Listener
	cfg    *tls.Config
	answer string

	mu    sync.Mutex
	conns int
	wire  strings.Builder // of all connections
	plain strings.Builder // application bytes, after TLS where there was TLS
	certs int             // client certificates that were presented
}

// NewTrap starts one on loopback. cfg nil: it speaks no TLS. answer "": an empty 200.
func NewTrap(t testing.TB, cfg *tls.Config, answer string) *Trap {
	t.Helper()
	return NewTrapAt(t, "", cfg, answer)
}

// NewTrapAt starts one at an address.
func NewTrapAt(t testing.TB, addr string, cfg *tls.Config, answer string) *Trap {
	t.Helper()
	if answer == "" {
		answer = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
	}
	if cfg != nil {
		cfg = cfg.Clone()
		cfg.ClientAuth = tls.RequestClientCert
	}
	p := &Trap{ln: listen(t, addr), cfg: cfg, answer: answer}
	var all sync.WaitGroup
	all.Go(func() {
		for {
			c, err := p.ln.Accept()
			if err != nil {
				return
			}
			p.mu.Lock()
			p.conns++
			p.mu.Unlock()
			all.Go(func() { p.serve(c) })
		}
	})
	t.Cleanup(func() { _ = p.ln.Close() })
	return p
}

// Addr is its address.
func (p *Trap) Addr() string { return p.ln.Addr().String() }

// Port is its port.
func (p *Trap) Port() int { return p.ln.Addr().(*net.TCPAddr).Port }

// Conns is how many connections were made to it.
func (p *Trap) Conns() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.conns
}

// Certificates is how often a client presented a certificate.
func (p *Trap) Certificates() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.certs
}

// Got is every application byte.
func (p *Trap) Got() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.plain.String()
}

// Wire is every byte as it came.
func (p *Trap) Wire() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.wire.String()
}

type trapConn struct {
	net.Conn
	r    io.Reader
	p    *Trap
	into *strings.Builder
}

func (c *trapConn) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.p.mu.Lock()
	defer c.p.mu.Unlock()
	c.into.Write(b[:n])
	return n, err
}

func (p *Trap) serve(c net.Conn) {
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(waitLimit))
	wire := bufio.NewReader(&trapConn{c, c, p, &p.wire})
	first, err := wire.Peek(1)
	if err != nil {
		return
	}
	conn := net.Conn(bufferedConn{c, wire})
	if first[0] == 0x16 && p.cfg != nil { // a TLS handshake record
		secure := tls.Server(conn, p.cfg)
		err := secure.Handshake()
		p.mu.Lock()
		p.certs += len(secure.ConnectionState().PeerCertificates)
		p.mu.Unlock()
		if err != nil {
			return
		}
		conn = secure
	}
	if first[0] == 0x16 && p.cfg == nil { // TLS is answered in clear
		_, _ = io.WriteString(conn, p.answer)
	}
	br := bufio.NewReader(&trapConn{conn, conn, p, &p.plain})
	for {
		req, err := http.ReadRequest(br)
		if err != nil {
			_, _ = io.Copy(io.Discard, br) // no HTTP: it is kept all the same
			return
		}
		_, _ = io.Copy(io.Discard, req.Body)
		if _, err := io.WriteString(conn, p.answer); err != nil {
			return
		}
	}
}
