package proxy

import (
	"crypto/sha256"
	"crypto/subtle"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"os"
	"time"

	"waybill/dispatch"
)

// FrontTLS returns the configuration of a TLS listener for callers. The files are read
// for each handshake, so that they can be exchanged. With clientCA a certificate that a
// caller presents is verified against it; without one a caller may still present a token.
func FrontTLS(certificate, key, clientCA string) (*tls.Config, error) {
	load := func() (*tls.Config, error) {
		pair, err := tls.LoadX509KeyPair(certificate, key)
		if err != nil {
			return nil, fmt.Errorf("proxy: certificate of the listener: %w", err)
		}
		cfg := &tls.Config{Certificates: []tls.Certificate{pair}, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"},
			// A resumed session would outlive an exchange of the files.
			SessionTicketsDisabled: true}
		if clientCA != "" {
			text, err := os.ReadFile(clientCA)
			if err != nil {
				return nil, fmt.Errorf("proxy: client CA: %w", err)
			}
			cfg.ClientCAs = x509.NewCertPool()
			if !cfg.ClientCAs.AppendCertsFromPEM(text) {
				return nil, errors.New("proxy: the client CA's file holds no certificate")
			}
			cfg.ClientAuth = tls.VerifyClientCertIfGiven
		}
		return cfg, nil
	}
	cfg, err := load()
	if err != nil {
		return nil, err
	}
	cfg.GetConfigForClient = func(*tls.ClientHelloInfo) (*tls.Config, error) { return load() }
	return cfg, nil
}

// Certificate returns the configured caller of a verified client certificate.
func (c *Callers) Certificate(leaf *x509.Certificate) (dispatch.Caller, bool) {
	sum := sha256.Sum256(leaf.Raw)
	subject := leaf.Subject.String()
	for i := range c.Static {
		s := &c.Static[i]
		if s.CertificateSHA256 != nil && subtle.ConstantTimeCompare(sum[:], s.CertificateSHA256[:]) == 1 || s.Subject != "" && s.Subject == subject {
			return dispatch.Caller{ID: callerPrefix + s.Name, Name: s.Name}, true
		}
	}
	return dispatch.Caller{}, false
}

// certified returns the caller that the connection's own certificate names. It is verified:
// the listener takes no other.
func (p *Proxy) certified(conn *headConn) (dispatch.Caller, bool) {
	who, ok := p.callers.(interface {
		Certificate(leaf *x509.Certificate) (dispatch.Caller, bool)
	})
	secured, isTLS := conn.Conn.(*tls.Conn)
	if !ok || !isTLS || conn.tunnel != nil {
		return dispatch.Caller{}, false
	}
	cs := secured.ConnectionState()
	if !cs.HandshakeComplete || len(cs.VerifiedChains) == 0 || len(cs.PeerCertificates) == 0 || time.Now().After(cs.PeerCertificates[0].NotAfter) {
		// Verified at the handshake; a connection that is kept must not outlive it.
		return dispatch.Caller{}, false
	}
	return who.Certificate(cs.PeerCertificates[0])
}
