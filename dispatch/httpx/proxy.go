package httpx

import (
	"bufio"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"waybill/dispatch"
	"waybill/dispatch/leak"
	"waybill/internal/control"
	"waybill/outcome"
	"waybill/routes"
)

// hopProxy names the upstream proxy in evidence (CONTRACT G10).
const hopProxy = "upstream_proxy"

const (
	// maxTunnelHead bounds the proxy's answer to CONNECT.
	maxTunnelHead = 16 << 10
	// maxTunnelInterim bounds the 1xx answers before it.
	maxTunnelInterim = 5
	// maxProxyStatus bounds what is kept of its Proxy-Status.
	maxProxyStatus = 512
)

// throughProxy returns a tunnel to the origin. Its end proves a path and nothing more
// (CONTRACT G10): what is sent to the proxy is the authority and the proxy's own
// credential, and the origin is verified inside of the tunnel as always (E5, V2).
func (t *Transport) throughProxy(ctx context.Context, o *dispatch.Order) (net.Conn, error) {
	p := o.Upstream.Proxy
	authority, err := tunnelTarget(o)
	if err != nil {
		return nil, err
	}
	addrs, err := t.resolveProxy(ctx, p)
	if err != nil {
		return nil, err
	}
	conn, err := t.dialTCP(ctx, addrs)
	if err != nil {
		return nil, ofProxy(err)
	}
	if p.Scheme == "https" {
		if conn, err = t.proxyTLS(ctx, conn, p); err != nil {
			return nil, err
		}
	}
	if err := openTunnel(ctx, conn, authority, o.ProxyAuthorization); err != nil {
		_ = conn.Close()
		return nil, err
	}
	return conn, nil
}

// tunnelTarget is what the proxy is asked for. A name is resolved by the proxy: only an
// address, from the URL or from upstream.resolve, can be judged here (CONTRACT V3).
func tunnelTarget(o *dispatch.Order) (string, error) {
	t := o.Target
	if t.Scheme != "https" {
		// A secret would pass the proxy in clear; the configuration refuses it, too.
		return "", fail(outcome.CodeDestinationProhibited, "", "plaintext_through_proxy", nil)
	}
	if pin, ok := o.Upstream.Resolve[t.Host]; ok {
		addrs, err := fixed(pin, t.Port)
		if err != nil {
			return "", err
		}
		return addrs.String(), nil
	}
	if a, err := netip.ParseAddr(t.Host); err == nil {
		if reason := addressReason(a, o.Upstream.AllowPrivate); reason != "" {
			return "", fail(outcome.CodeDestinationProhibited, "", reason, nil)
		}
	}
	return t.Authority(), nil
}

// resolveProxy applies the address policy to the proxy itself. An address in the
// configuration is the operator's own word, as in upstream.resolve.
func (t *Transport) resolveProxy(ctx context.Context, p *routes.Proxy) ([]netip.AddrPort, error) {
	port := uint16(p.Port) //nolint:gosec // checked by routes: 1..65535
	if a, err := netip.ParseAddr(p.Host); err == nil {
		if reason := pinnedReason(a); reason != "" {
			return nil, ofProxy(fail(outcome.CodeDestinationProhibited, outcome.StageDNS, reason, nil))
		}
		return []netip.AddrPort{netip.AddrPortFrom(a, port)}, nil
	}
	addrs, err := t.cfg.Resolver.LookupNetIP(ctx, "ip", p.Host+".")
	if err != nil {
		return nil, ofProxy(dnsError(ctx, err))
	}
	out := make([]netip.AddrPort, 0, len(addrs))
	for _, a := range addrs {
		if reason := addressReason(a, p.AllowPrivate); reason != "" {
			return nil, ofProxy(fail(outcome.CodeDestinationProhibited, outcome.StageDNS, reason, nil))
		}
		out = append(out, netip.AddrPortFrom(a.Unmap(), port))
	}
	if len(out) == 0 {
		return nil, ofProxy(fail(outcome.CodeDNSNoSuchName, "", "no_address", nil))
	}
	return out, nil
}

// ofProxy marks a failure on the way to the proxy as one of that hop.
func ofProxy(err error) error {
	var s *dispatch.SetupError
	if errors.As(err, &s) {
		s.Hop, s.Reason = hopProxy, "proxy_"+s.Reason
	}
	return err
}

func tunnelFailed(reason, detail string, err error) *dispatch.SetupError {
	e := fail(outcome.CodeProxyTunnelFailed, outcome.StageTCPConnect, reason, err)
	e.Hop, e.Detail = hopProxy, detail
	return e
}

// proxyTLS verifies the proxy by its own name and roots; those of the origin say
// nothing about it.
func (t *Transport) proxyTLS(ctx context.Context, tcp net.Conn, p *routes.Proxy) (net.Conn, error) {
	roots, err := t.roots(&routes.Upstream{RootsPEM: p.RootsPEM})
	if err != nil {
		_ = tcp.Close()
		return nil, ofProxy(err)
	}
	conn := tls.Client(tcp, &tls.Config{ServerName: p.Host, RootCAs: roots, MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}})
	if err := conn.HandshakeContext(ctx); err != nil {
		_ = tcp.Close()
		reason := "proxy_handshake_failed"
		var verify *tls.CertificateVerificationError
		if errors.As(err, &verify) {
			reason = "proxy_" + certificateReason(err)
		}
		e := tunnelFailed(reason, "The TLS handshake with the upstream proxy failed.", err)
		e.Final = verify != nil // the next try meets the same certificate
		return nil, e
	}
	return conn, nil
}

// openTunnel sends CONNECT and reads its answer (RFC 9110 §9.3.6).
func openTunnel(ctx context.Context, conn net.Conn, authority, authorization string) error {
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	head := "CONNECT " + authority + " HTTP/1.1\r\nHost: " + authority + "\r\n"
	if authorization != "" {
		head += "Proxy-Authorization: " + authorization + "\r\n"
	}
	cut := func(err error) error {
		var ne net.Error
		if ctx.Err() != nil || errors.As(err, &ne) && ne.Timeout() {
			return tunnelFailed("proxy_timeout", "The upstream proxy did not answer in time.", err)
		}
		return tunnelFailed("proxy_answer", "The upstream proxy closed the connection, or sent no HTTP answer.", err)
	}
	if _, err := io.WriteString(conn, head+"\r\n"); err != nil {
		return cut(err)
	}
	limited := &io.LimitedReader{R: conn, N: maxTunnelHead}
	br := bufio.NewReader(limited)
	var resp *http.Response
	for i := 0; ; i++ {
		var err error
		if resp, err = http.ReadResponse(br, &http.Request{Method: http.MethodConnect}); err != nil {
			return cut(err)
		}
		if resp.StatusCode >= 200 || i >= maxTunnelInterim {
			break
		}
	}
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return tunnelRefused(resp, authorization)
	}
	if br.Buffered() > 0 {
		// Nobody but the proxy can have written this: the origin has not been spoken to.
		return tunnelFailed("proxy_bytes_after_answer", "The upstream proxy sent bytes of its own into the tunnel.", nil)
	}
	if !stop() {
		return cut(ctx.Err())
	}
	return nil
}

// tunnelRefused is the proxy's own word about its attempt, kept as evidence of that hop.
func tunnelRefused(resp *http.Response, authorization string) error {
	reason, detail := "proxy_status", "The upstream proxy refused to open a tunnel."
	final := false
	switch resp.StatusCode {
	case http.StatusProxyAuthRequired, http.StatusUnauthorized:
		reason, detail, final = "proxy_credentials", "The upstream proxy did not accept the credentials of this route.", true
	case http.StatusForbidden, http.StatusNotFound, http.StatusMethodNotAllowed, http.StatusBadRequest:
		reason, detail, final = "proxy_refused", "The upstream proxy does not allow a tunnel to this destination.", true
	}
	e := tunnelFailed(reason, detail, nil)
	e.HopStatus, e.Final = resp.StatusCode, final
	// It saw the credential and may repeat it (C2).
	if ps := strings.Join(resp.Header["Proxy-Status"], ", "); ps != "" && len(ps) <= maxProxyStatus && !echoes(ps, authorization) {
		e.ProxyStatus = ps
	}
	return e
}

// echoes reports whether text holds a piece of the field value, of eight bytes or all of
// its credentials.
func echoes(text, authorization string) bool {
	if control.Off("C2-proxy-echo") || authorization == "" {
		return false
	}
	_, creds, _ := strings.Cut(authorization, " ")
	for _, secret := range []string{creds, basicPassword(creds)} {
		if secret == "" {
			continue
		}
		if strings.Contains(text, secret) {
			return true
		}
		for i := 0; i+8 <= len(secret); i++ {
			if strings.Contains(text, secret[i:i+8]) {
				return true
			}
		}
		// Whole, in any spelling that answers are searched for.
		if _, found := leak.New([]byte(secret)).MaskString(text); found > 0 {
			return true
		}
	}
	return false
}

func basicPassword(creds string) string {
	r := &http.Request{Header: http.Header{"Authorization": {"Basic " + creds}}}
	_, pass, _ := r.BasicAuth()
	return pass
}

// putProxy makes the proxy part of what a connection may be shared for (CONTRACT E6).
func putProxy(put func([]byte), p *routes.Proxy) {
	if p == nil {
		return
	}
	roots := sha256.Sum256(p.RootsPEM)
	for _, s := range []string{p.Origin(), p.User, p.Credential, string(roots[:])} {
		put([]byte(s))
	}
}
