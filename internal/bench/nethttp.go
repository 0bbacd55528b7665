package bench

import (
	"context"
	"crypto/ecdsa"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"sync"
	"time"
)

// NetHTTPProxy runs the comparison that uses nothing but the standard library, until
// ctx ends: absolute-form and intercepted requests, one Transport, one field set. It
// prints its address. args is proxyArgs as JSON.
func NetHTTPProxy(ctx context.Context, args string, out io.Writer) error {
	var a proxyArgs
	if err := json.Unmarshal([]byte(args), &a); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	pair, err := tls.LoadX509KeyPair(a.CA, a.Key)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	key, ok := pair.PrivateKey.(*ecdsa.PrivateKey)
	if !ok {
		return errors.New("bench: the key is not ECDSA")
	}
	roots := x509.NewCertPool()
	pem, err := os.ReadFile(a.Roots)
	if err != nil || !roots.AppendCertsFromPEM(pem) {
		return fmt.Errorf("bench: %s: no certificate: %w", a.Roots, err)
	}
	leaf, err := (&authority{cert: pair.Leaf, key: key}).leaf(a.Host)
	if err != nil {
		return err
	}
	p := &plainProxy{
		inject: a.Inject,
		server: &tls.Config{Certificates: []tls.Certificate{leaf}, NextProtos: []string{"http/1.1"}},
		transport: &http.Transport{
			DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
				if addr == a.Host+":443" {
					addr = a.Upstream
				}
				var d net.Dialer
				return d.DialContext(ctx, network, addr)
			},
			TLSClientConfig:     &tls.Config{RootCAs: roots, NextProtos: []string{"http/1.1"}},
			MaxIdleConnsPerHost: 256, DisableCompression: true,
		},
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	quiet := log.New(io.Discard, "", 0)
	srv := &http.Server{Handler: p, ErrorLog: quiet}
	inner := &connListener{conns: make(chan net.Conn), addr: l.Addr()}
	p.inner = inner
	intercepted := &http.Server{Handler: p, ErrorLog: quiet}
	go func() { _ = intercepted.Serve(inner) }()
	fmt.Fprintln(out, l.Addr())
	go func() {
		<-ctx.Done()
		_ = srv.Close()
	}()
	if err := srv.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("bench: %w", err)
	}
	return nil
}

type plainProxy struct {
	inject    string
	server    *tls.Config
	transport *http.Transport
	inner     *connListener
}

func (p *plainProxy) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodConnect {
		c, _, err := w.(http.Hijacker).Hijack() // HTTP/1.1 only
		if err != nil {
			return
		}
		if _, err := io.WriteString(c, "HTTP/1.1 200 OK\r\n\r\n"); err != nil {
			_ = c.Close()
			return
		}
		p.inner.conns <- tls.Server(c, p.server)
		return
	}
	out := r.Clone(r.Context())
	out.RequestURI, out.URL.Scheme = "", "https"
	if out.URL.Host == "" {
		out.URL.Host = r.Host
	}
	for _, name := range []string{"Connection", "Proxy-Connection", "Proxy-Authorization", "Te", "Upgrade"} {
		out.Header.Del(name)
	}
	out.Header.Set("Authorization", p.inject)
	resp, err := p.transport.RoundTrip(out)
	if err != nil {
		w.WriteHeader(http.StatusBadGateway)
		return
	}
	defer func() { _ = resp.Body.Close() }()
	for k, v := range resp.Header {
		w.Header()[k] = v
	}
	w.Header().Del("Connection")
	w.WriteHeader(resp.StatusCode)
	buf := buffers.Get().(*[]byte) // its New makes no other
	defer buffers.Put(buf)
	// Behind a plain Writer, or io.CopyBuffer would use the ResponseWriter's ReadFrom
	// and leave the pooled buffer unused.
	_, _ = io.CopyBuffer(struct{ io.Writer }{w}, resp.Body, *buf)
}

var buffers = sync.Pool{New: func() any { b := make([]byte, 32<<10); return &b }}

// connListener hands hijacked connections to a server.
type connListener struct {
	conns chan net.Conn
	addr  net.Addr
}

func (l *connListener) Accept() (net.Conn, error) { return <-l.conns, nil }
func (l *connListener) Close() error              { return nil }
func (l *connListener) Addr() net.Addr            { return l.addr }

// ServeOrigin runs an origin until ctx ends and prints its addresses as one line of
// JSON. cert and key are files, authorization what a proxy must inject.
func ServeOrigin(ctx context.Context, cert, key, authorization string, out io.Writer) error {
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	o, err := StartOrigin(pair, authorization)
	if err != nil {
		return err
	}
	defer o.Close()
	if err := json.NewEncoder(out).Encode(o); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	<-ctx.Done()
	// What is under way may end.
	time.Sleep(10 * time.Millisecond)
	return nil
}
