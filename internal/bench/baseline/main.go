// Command baseline is what Waybill's speed is compared with: goproxy as its own
// documentation says to run it in production, with the same interception and the
// same injected header, and nothing else. It is a module of its own, since in
// Waybill's only package proxy may use goproxy.
//
// Its argument is JSON (proxyArgs of package bench); it prints its address.
package main

import (
	"context"
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

	"github.com/elazarl/goproxy"
)

type args struct {
	CA       string `json:"ca"`
	Key      string `json:"key"`
	Roots    string `json:"roots"`
	Host     string `json:"host"`
	Upstream string `json:"upstream"`
	Inject   string `json:"inject"`
}

// certStore keeps one certificate per host; goproxy's default signs anew for every
// connection.
type certStore struct {
	mu sync.Mutex
	m  map[string]*tls.Certificate
}

func (s *certStore) Fetch(host string, gen func() (*tls.Certificate, error)) (*tls.Certificate, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if c := s.m[host]; c != nil {
		return c, nil
	}
	c, err := gen()
	if err == nil {
		s.m[host] = c
	}
	return c, err
}

func run() error {
	if len(os.Args) != 2 {
		return errors.New("usage: baseline JSON")
	}
	var a args
	if err := json.Unmarshal([]byte(os.Args[1]), &a); err != nil {
		return err
	}
	ca, err := tls.LoadX509KeyPair(a.CA, a.Key)
	if err != nil {
		return err
	}
	pem, err := os.ReadFile(a.Roots)
	if err != nil {
		return err
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(pem) {
		return fmt.Errorf("%s: no certificate", a.Roots)
	}

	p := goproxy.NewProxyHttpServer()
	p.Logger = log.New(io.Discard, "", 0)
	p.CertStore = &certStore{m: make(map[string]*tls.Certificate)}
	// The defaults skip verification, keep two idle connections per host and read
	// proxy variables.
	p.Tr = &http.Transport{
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			if addr == a.Host+":443" {
				addr = a.Upstream
			}
			var d net.Dialer
			return d.DialContext(ctx, network, addr)
		},
		TLSClientConfig:     &tls.Config{RootCAs: roots, NextProtos: []string{"http/1.1"}},
		MaxIdleConnsPerHost: 256,
		IdleConnTimeout:     90 * time.Second,
		DisableCompression:  true,
	}
	mitm := &goproxy.ConnectAction{Action: goproxy.ConnectMitm, TLSConfig: goproxy.TLSConfigFromCA(&ca)}
	p.OnRequest().HandleConnectFunc(func(host string, _ *goproxy.ProxyCtx) (*goproxy.ConnectAction, string) { return mitm, host })
	p.OnRequest().DoFunc(func(r *http.Request, _ *goproxy.ProxyCtx) (*http.Request, *http.Response) {
		// As Waybill does: the secret does not travel in clear.
		r.URL.Scheme = "https"
		r.Header.Set("Authorization", a.Inject)
		return r, nil
	})

	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return err
	}
	fmt.Println(l.Addr())
	return (&http.Server{Handler: p, ErrorLog: p.Logger.(*log.Logger)}).Serve(l)
}

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, "baseline:", err)
		os.Exit(1)
	}
}
