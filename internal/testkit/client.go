package testkit

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/url"
	"os/exec"
	"strings"
	"testing"
	"time"
)

var discardLog = log.New(io.Discard, "", 0)

// ClientConfig describes a client that goes through a forward proxy.
type ClientConfig struct {
	// Proxy is the proxy's address ("127.0.0.1:7171") or URL; a URL may carry user and
	// password.
	Proxy string
	// Roots are trusted for the TLS inside the tunnel; nil: the system's.
	Roots *x509.CertPool
	// HTTP2 speaks h2 inside the tunnel; else HTTP/1.1.
	HTTP2 bool
	// NoKeepAlive opens a connection for each request. A kept connection makes
	// net/http repeat some requests by itself when it breaks: tests that count
	// arrivals of broken exchanges set this or use a raw connection.
	NoKeepAlive bool
	// ConnectHeader is sent with CONNECT. May be nil.
	ConnectHeader http.Header
	// Timeout of one request; 0 is 60 s.
	Timeout time.Duration
}

// NewClient returns a client through a proxy. Unlike ProxyFromEnvironment it does
// so for loopback names, too. Redirects are not followed.
func NewClient(t testing.TB, cfg ClientConfig) *http.Client {
	t.Helper()
	u, err := url.Parse(proxyURL(cfg.Proxy))
	if err != nil {
		t.Fatal("testkit: proxy URL does not parse")
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = time.Minute
	}
	var protos http.Protocols
	protos.SetHTTP1(true)
	protos.SetHTTP2(cfg.HTTP2)
	tr := &http.Transport{
		Proxy:              http.ProxyURL(u),
		TLSClientConfig:    &tls.Config{RootCAs: cfg.Roots, MinVersion: tls.VersionTLS12},
		Protocols:          &protos,
		DisableKeepAlives:  cfg.NoKeepAlive,
		DisableCompression: true,
		ProxyConnectHeader: cfg.ConnectHeader,
	}
	t.Cleanup(tr.CloseIdleConnections)
	return &http.Client{
		Transport:     tr,
		Timeout:       cfg.Timeout,
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
}

func proxyURL(s string) string {
	if strings.Contains(s, "://") {
		return s
	}
	return "http://" + s
}

// Response is a whole answer.
type Response struct {
	Status  int
	Proto   string
	Header  http.Header
	Trailer http.Header
	Body    []byte
	// BodyErr is why the body ended early, or nil.
	BodyErr error
}

// Send sends a request and reads the whole answer. fields are name, value pairs; a
// "Host" pair sets the Host field. It fails the test if there is no answer.
func Send(t testing.TB, c *http.Client, method, target, body string, fields ...string) *Response {
	t.Helper()
	resp, err := TrySend(t, c, method, target, body, fields...)
	if err != nil {
		t.Fatalf("testkit: %s: %v", method, err)
	}
	return resp
}

// TrySend is Send for requests that may get no answer: the error is the client's.
func TrySend(t testing.TB, c *http.Client, method, target, body string, fields ...string) (*Response, error) {
	t.Helper()
	return SendContext(context.Background(), t, c, method, target, body, fields...)
}

// SendContext is TrySend for a caller that may leave.
func SendContext(ctx context.Context, t testing.TB, c *http.Client, method, target, body string, fields ...string) (*Response, error) {
	t.Helper()
	var r io.Reader
	if body != "" {
		r = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, target, r)
	if err != nil {
		return nil, err
	}
	for i := 0; i+1 < len(fields); i += 2 {
		if strings.EqualFold(fields[i], "Host") {
			req.Host = fields[i+1]
			continue
		}
		req.Header.Add(fields[i], fields[i+1])
	}
	resp, err := c.Do(req)
	if err != nil {
		return nil, err
	}
	return readResponse(resp), nil
}

func readResponse(resp *http.Response) *Response {
	defer func() { _ = resp.Body.Close() }()
	out := &Response{Status: resp.StatusCode, Proto: resp.Proto, Header: resp.Header}
	out.Body, out.BodyErr = io.ReadAll(resp.Body)
	out.Trailer = resp.Trailer
	return out
}

// Conn is a raw connection of a client: what is written is what is sent. Reads and
// writes fail after a minute.
type Conn struct {
	net.Conn
	br *bufio.Reader
}

// Dial opens a raw TCP connection to addr; it is closed when the test ends.
func Dial(t testing.TB, addr string) *Conn {
	t.Helper()
	d := net.Dialer{Timeout: waitLimit}
	c, err := d.DialContext(context.Background(), "tcp", addr)
	if err != nil {
		t.Fatalf("testkit: dial %s: %v", addr, err)
	}
	return wrapConn(t, c)
}

func wrapConn(t testing.TB, c net.Conn) *Conn {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(time.Minute))
	t.Cleanup(func() { _ = c.Close() })
	return &Conn{Conn: c, br: bufio.NewReader(c)}
}

// Read reads through the buffer that ReadResponse uses.
func (c *Conn) Read(p []byte) (int, error) { return c.br.Read(p) }

// Send writes literal bytes.
func (c *Conn) Send(t testing.TB, s string) {
	t.Helper()
	if _, err := io.WriteString(c.Conn, s); err != nil {
		t.Fatalf("testkit: write: %v", err)
	}
}

// ReadResponse reads one response to a request of this method, with its body. The
// error says that the peer closed or sent no HTTP; a body cut short is in BodyErr.
func (c *Conn) ReadResponse(method string) (*Response, error) {
	resp, err := http.ReadResponse(c.br, &http.Request{Method: method})
	if err != nil {
		return nil, err
	}
	return readResponse(resp), nil
}

// Roundtrip sends literal bytes and reads one response; it fails the test if there
// is none.
func (c *Conn) Roundtrip(t testing.TB, request string) *Response {
	t.Helper()
	c.Send(t, request)
	method, _, _ := strings.Cut(request, " ")
	resp, err := c.ReadResponse(method)
	if err != nil {
		t.Fatalf("testkit: no response: %v", err)
	}
	return resp
}

// ReadAll reads until the peer closes and returns what came. reset reports a close
// other than an orderly one.
func (c *Conn) ReadAll() (data []byte, reset bool) {
	data, err := io.ReadAll(c.br)
	return data, err != nil
}

// Reset closes the connection with RST.
func (c *Conn) Reset() {
	if tcp, ok := c.Conn.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0)
	}
	_ = c.Close()
}

// ErrConnectRefused is returned by Connect for a status other than 200.
var ErrConnectRefused = errors.New("CONNECT refused")

// Connect opens a tunnel to authority ("host:port") through the proxy at addr.
// header holds complete field lines ("Proxy-Authorization: Basic …"). For a status
// other than 200 the error is ErrConnectRefused and the response is returned.
func Connect(t testing.TB, addr, authority string, header ...string) (*Conn, *Response, error) {
	t.Helper()
	c := Dial(t, addr)
	var b strings.Builder
	fmt.Fprintf(&b, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n", authority, authority)
	for _, h := range header {
		b.WriteString(h + "\r\n")
	}
	b.WriteString("\r\n")
	if _, err := io.WriteString(c.Conn, b.String()); err != nil {
		return nil, nil, err
	}
	// A 2xx to CONNECT has no body (RFC 9110 §9.3.6): what follows is the tunnel's.
	resp, err := http.ReadResponse(c.br, &http.Request{Method: http.MethodConnect})
	if err != nil {
		return nil, nil, err
	}
	if resp.StatusCode != http.StatusOK {
		return nil, readResponse(resp), fmt.Errorf("%w: %s", ErrConnectRefused, resp.Status)
	}
	return c, &Response{Status: resp.StatusCode, Proto: resp.Proto, Header: resp.Header}, nil
}

// StartTLS makes a TLS client of the connection (a tunnel, as a rule). alpn may be
// empty. The handshake is done when it returns without an error.
func (c *Conn) StartTLS(t testing.TB, serverName string, roots *x509.CertPool, alpn ...string) (*Conn, *tls.ConnectionState, error) {
	t.Helper()
	tc := tls.Client(bufferedConn{c.Conn, c.br}, &tls.Config{ServerName: serverName, RootCAs: roots, NextProtos: alpn, MinVersion: tls.VersionTLS12})
	if err := tc.HandshakeContext(context.Background()); err != nil {
		return nil, nil, err
	}
	st := tc.ConnectionState()
	return &Conn{Conn: tc, br: bufio.NewReader(tc)}, &st, nil
}

// Wrap makes a raw connection of one that the test opened itself.
func Wrap(c net.Conn) *Conn { return &Conn{Conn: c, br: bufio.NewReader(c)} }

type bufferedConn struct {
	net.Conn
	br *bufio.Reader
}

func (c bufferedConn) Read(p []byte) (int, error) { return c.br.Read(p) }

// Tunnel is Connect and StartTLS over HTTP/1.1, for the host of authority; both
// must succeed.
func Tunnel(t testing.TB, addr, authority string, roots *x509.CertPool, header ...string) *Conn {
	t.Helper()
	c, _, err := Connect(t, addr, authority, header...)
	if err != nil {
		t.Fatalf("testkit: CONNECT: %v", err)
	}
	host, _, err := net.SplitHostPort(authority)
	if err != nil {
		t.Fatalf("testkit: authority: %v", err)
	}
	tc, _, err := c.StartTLS(t, host, roots, "http/1.1")
	if err != nil {
		t.Fatalf("testkit: TLS in the tunnel: %v", err)
	}
	return tc
}

// packages names the Debian package of a tool whose package has another name.
var packages = map[string]string{
	"python3": "python3", "node": "nodejs", "ssh": "openssh-client", "sshd": "openssh-server", "ssh-keygen": "openssh-client",
	"nc": "netcat-openbsd", "java": "default-jdk-headless", "javac": "default-jdk-headless", "ab": "apache2-utils", "h2load": "nghttp2-client", "faketime": "faketime", "ip": "iproute2",
	"tc": "iproute2", "mkfs.ext4": "e2fsprogs", "losetup": "util-linux", "mount": "mount", "dbus-daemon": "dbus-daemon", "unshare": "util-linux", "setpriv": "util-linux", "prlimit": "util-linux",
}

// RequireTool returns the path of a program and fails the test, naming the package
// to install, when it is missing. Tests never skip for a missing tool.
func RequireTool(t testing.TB, name string) string {
	t.Helper()
	path, err := exec.LookPath(name)
	if err != nil {
		pkg := packages[name]
		if pkg == "" {
			pkg = name
		}
		t.Fatalf("testkit: %s is missing: install the package %s (apt-get install %s)", name, pkg, pkg)
	}
	return path
}
