package httpx

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"waybill/dispatch"
	"waybill/outcome"
	"waybill/routes"
)

// errForbiddenAuthority refuses an origin certificate that Waybill's own CA signed.
var errForbiddenAuthority = errors.New("httpx: certificate signed by the interception CA")

// errPin refuses a verified chain without a pinned key.
var errPin = errors.New("httpx: no pinned key in the verified chain")

func fail(code outcome.Code, stage outcome.Stage, reason string, err error) *dispatch.SetupError {
	return &dispatch.SetupError{Code: code, Stage: stage, Reason: reason, Err: err}
}

// resolve returns the addresses to dial. Every address is judged before any is
// dialled, and a mixed answer is refused as a whole (CONTRACT V3).
func (t *Transport) resolve(ctx context.Context, o *dispatch.Order) ([]netip.AddrPort, error) {
	port := uint16(o.Target.Port) //nolint:gosec // routes.Target ports are 1..65535
	if pin, ok := o.Upstream.Resolve[o.Target.Host]; ok {
		ap, err := fixed(pin, o.Target.Port)
		if err != nil {
			return nil, err
		}
		return []netip.AddrPort{ap}, nil
	}
	var addrs []netip.Addr
	if a, err := netip.ParseAddr(o.Target.Host); err == nil {
		addrs = []netip.Addr{a}
	} else {
		// The trailing dot keeps search domains of resolv.conf out of it.
		addrs, err = t.cfg.Resolver.LookupNetIP(ctx, "ip", o.Target.Host+".")
		if err != nil {
			return nil, dnsError(ctx, err)
		}
	}
	out := make([]netip.AddrPort, 0, len(addrs))
	for _, a := range addrs {
		if reason := addressReason(a, o.Upstream.AllowPrivate); reason != "" {
			return nil, fail(outcome.CodeDestinationProhibited, outcome.StageDNS, reason, nil)
		}
		out = append(out, netip.AddrPortFrom(a.Unmap(), port))
	}
	if len(out) == 0 {
		return nil, fail(outcome.CodeDNSNoSuchName, "", "no_address", nil)
	}
	return out, nil
}

// fixed reads and judges an entry of upstream.resolve.
func fixed(pin string, port int) (netip.AddrPort, error) {
	ap, err := netip.ParseAddrPort(pin)
	if err != nil {
		a, aerr := netip.ParseAddr(strings.Trim(pin, "[]"))
		if aerr != nil {
			return ap, fail(outcome.CodeDNSError, "", "bad_resolve_entry", aerr)
		}
		ap = netip.AddrPortFrom(a, uint16(port)) //nolint:gosec // routes.Target ports are 1..65535
	}
	if reason := pinnedReason(ap.Addr()); reason != "" {
		return ap, fail(outcome.CodeDestinationProhibited, outcome.StageDNS, reason, nil)
	}
	return ap, nil
}

func dnsError(ctx context.Context, err error) error {
	var d *net.DNSError
	switch {
	case errors.As(err, &d) && d.IsNotFound:
		e := fail(outcome.CodeDNSNoSuchName, "", "no_such_name", err)
		e.RCode = "NXDOMAIN"
		return e
	case errors.As(err, &d) && d.IsTimeout, ctx.Err() != nil:
		return fail(outcome.CodeDNSTimeout, "", "dns_timeout", err)
	default:
		return fail(outcome.CodeDNSError, "", "dns_error", err)
	}
}

// dialTCP tries the addresses in order within the context and returns the first
// connection, or the last failure.
func (t *Transport) dialTCP(ctx context.Context, addrs []netip.AddrPort) (net.Conn, error) {
	var last error
	for i, ap := range addrs {
		each := ctx
		cancel := context.CancelFunc(func() {})
		if deadline, ok := ctx.Deadline(); ok && i < len(addrs)-1 {
			// Leave the later addresses a share of the time.
			each, cancel = context.WithTimeout(ctx, time.Until(deadline)/time.Duration(len(addrs)-i))
		}
		c, err := t.cfg.Dial(each, "tcp", ap.String())
		cancel()
		if err == nil {
			return c, nil
		}
		last = tcpError(err)
		if ctx.Err() != nil {
			break
		}
	}
	return nil, last
}

func tcpError(err error) error {
	var ne net.Error
	code, reason := outcome.CodeConnectionLost, "connect_failed"
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		code, reason = outcome.CodeConnectionRefused, "connection_refused"
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTUNREACH), errors.Is(err, syscall.EADDRNOTAVAIL):
		code, reason = outcome.CodeDestinationUnroutable, "unroutable"
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE), errors.Is(err, syscall.ENOBUFS):
		code, reason = outcome.CodeConnectionLimit, "local_limit"
	case errors.As(err, &ne) && ne.Timeout(), errors.Is(err, context.DeadlineExceeded), errors.Is(err, context.Canceled):
		code, reason = outcome.CodeConnectionTimeout, "connect_timeout"
	}
	return fail(code, outcome.StageDNS, reason, err)
}

// tlsConfig is the client configuration of one set of verification requirements.
func (t *Transport) tlsConfig(host string, u *routes.Upstream) (*tls.Config, error) {
	roots, err := t.roots(u)
	if err != nil {
		return nil, err
	}
	return &tls.Config{
		ServerName: host,
		RootCAs:    roots,
		MinVersion: tls.VersionTLS12,
		NextProtos: []string{"h2", "http/1.1"},
		// Runs on full and resumed handshakes alike (E6).
		VerifyConnection: func(cs tls.ConnectionState) error {
			for _, chain := range cs.VerifiedChains {
				for _, c := range chain {
					if t.cfg.OwnCA != nil && sha256.Sum256(c.RawSubjectPublicKeyInfo) == *t.cfg.OwnCA {
						return errForbiddenAuthority
					}
				}
			}
			return checkPins(cs.VerifiedChains, u.Pins)
		},
	}, nil
}

func checkPins(chains [][]*x509.Certificate, pins []string) error {
	if len(pins) == 0 {
		return nil
	}
	for _, chain := range chains {
		for _, c := range chain {
			sum := sha256.Sum256(c.RawSubjectPublicKeyInfo)
			if slices.Contains(pins, "sha256:"+hex.EncodeToString(sum[:])) {
				return nil
			}
		}
	}
	return errPin
}

func (t *Transport) roots(u *routes.Upstream) (*x509.CertPool, error) {
	var pool *x509.CertPool
	switch {
	case u.RootsOnly:
		pool = x509.NewCertPool()
	case t.cfg.SystemRoots != nil:
		pool = t.cfg.SystemRoots.Clone()
	default:
		return nil, fail(outcome.CodeTLSCertificateInvalid, outcome.StageTCPConnect, "no_system_roots", nil)
	}
	if len(u.RootsPEM) > 0 && !pool.AppendCertsFromPEM(u.RootsPEM) {
		return nil, fail(outcome.CodeTLSCertificateInvalid, outcome.StageTCPConnect, "bad_roots", nil)
	}
	return pool, nil
}

// handshake makes and verifies TLS. The peer it returns is the evidence of E6.
func (t *Transport) handshake(ctx context.Context, raw *rawConn, cfg *tls.Config, host string) (*tls.Conn, error) {
	conn := tls.Client(raw, cfg)
	if err := conn.HandshakeContext(ctx); err != nil {
		_ = raw.Close()
		return nil, tlsError(ctx, err, host)
	}
	return conn, nil
}

func tlsError(ctx context.Context, err error, _ string) error {
	const stage = outcome.StageTCPConnect
	var (
		verify *tls.CertificateVerificationError
		record tls.RecordHeaderError
		ne     net.Error
	)
	if id, ok := remoteAlert(err); ok {
		e := fail(outcome.CodeTLSHandshakeFailed, stage, "alert_received", err)
		e.AlertID, e.AlertName = id, alertName(id)
		return e
	}
	switch {
	case errors.As(err, &verify), errors.Is(err, errForbiddenAuthority), errors.Is(err, errPin):
		return fail(outcome.CodeTLSCertificateInvalid, stage, certificateReason(err), err)
	case errors.As(err, &record):
		return fail(outcome.CodeTLSHandshakeFailed, stage, "not_tls", err)
	case ctx.Err() != nil, errors.As(err, &ne) && ne.Timeout():
		return fail(outcome.CodeConnectionTimeout, stage, "handshake_timeout", err)
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return fail(outcome.CodeConnectionLost, stage, "handshake_cut", err)
	default:
		return fail(outcome.CodeTLSHandshakeFailed, stage, "handshake_failed", err)
	}
}

func certificateReason(err error) string {
	var (
		host    x509.HostnameError
		invalid x509.CertificateInvalidError
		unknown x509.UnknownAuthorityError
	)
	switch {
	case errors.Is(err, errForbiddenAuthority):
		return "interception_ca"
	case errors.Is(err, errPin):
		return "pin_mismatch"
	case errors.As(err, &host):
		return "wrong_name"
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return "expired"
	case errors.As(err, &unknown):
		return "unknown_authority"
	default:
		return "certificate_invalid"
	}
}

// remoteAlert finds a TLS alert that the peer sent. crypto/tls keeps its alert
// type to itself, so it is read by kind: text is never matched.
func remoteAlert(err error) (int, bool) {
	var op *net.OpError
	if !errors.As(err, &op) || op.Op != "remote error" || op.Err == nil {
		return 0, false
	}
	if v := reflect.ValueOf(op.Err); v.Kind() == reflect.Uint8 {
		return int(v.Uint()), true //nolint:gosec // eight bits
	}
	return 0, false
}

// TLS alerts that Waybill names (RFC 8446 §6).
const alertCertificateRequired = 116

var alertNames = map[int]string{
	40: "handshake_failure", 42: "bad_certificate", 43: "unsupported_certificate", 44: "certificate_revoked", 45: "certificate_expired",
	46: "certificate_unknown", 48: "unknown_ca", 49: "access_denied", 70: "protocol_version", 71: "insufficient_security",
	80: "internal_error", 112: "unrecognized_name", alertCertificateRequired: "certificate_required", 120: "no_application_protocol",
}

func alertName(id int) string {
	if n, ok := alertNames[id]; ok {
		return n
	}
	return "alert_" + strconv.Itoa(id)
}

func tlsVersion(v uint16) string { return tls.VersionName(v) }

var tls13 = tlsVersion(tls.VersionTLS13)

func peerOf(addr string, cs *tls.ConnectionState) *outcome.Peer {
	p := &outcome.Peer{Address: addr, Protocol: "http/1.1"}
	if cs == nil {
		return p
	}
	p.ServerName, p.TLSVersion = cs.ServerName, tlsVersion(cs.Version)
	if cs.NegotiatedProtocol == "h2" {
		p.Protocol = "h2"
	}
	if len(cs.PeerCertificates) > 0 {
		sum := sha256.Sum256(cs.PeerCertificates[0].Raw)
		p.LeafDigest = "sha256:" + hex.EncodeToString(sum[:])
	}
	if len(cs.VerifiedChains) > 0 {
		h := sha256.New()
		for _, c := range cs.VerifiedChains[0] {
			h.Write(c.Raw)
		}
		p.ChainDigest = "sha256:" + hex.EncodeToString(h.Sum(nil))
	}
	return p
}
