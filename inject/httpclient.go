package inject

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/http"
	"os"
	"time"
)

// ErrRoots is returned by HTTPClient for a file that holds no certificate.
var ErrRoots = errors.New("inject: the roots file holds no certificate")

// HTTPClient returns a client for stores and token endpoints: TLS verified against
// rootsFile (PEM; "": the system's), no proxy of the environment, no redirects, nothing
// sent twice by itself on a connection that rested.
func HTTPClient(rootsFile string, timeout time.Duration) (*http.Client, error) {
	cfg := &tls.Config{MinVersion: tls.VersionTLS12}
	if rootsFile != "" {
		text, err := os.ReadFile(rootsFile)
		if err != nil {
			return nil, err
		}
		cfg.RootCAs = x509.NewCertPool()
		if !cfg.RootCAs.AppendCertsFromPEM(text) {
			return nil, ErrRoots
		}
	}
	return &http.Client{
		Timeout: timeout,
		Transport: &http.Transport{
			Proxy: nil, TLSClientConfig: cfg, ForceAttemptHTTP2: true, DisableKeepAlives: true,
			DialContext:         (&net.Dialer{Timeout: 10 * time.Second}).DialContext,
			TLSHandshakeTimeout: 10 * time.Second, MaxResponseHeaderBytes: 64 << 10,
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}, nil
}
