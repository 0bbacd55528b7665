package e2e

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"math/big"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// longHost has 70 characters: more than a common name may have.
var longHost = strings.Repeat("a", 57) + ".example.test"

// More origins of the bed.
const (
	expiredHost    = "expired.example.test"
	selfSignedHost = "selfsigned.example.test"
	wrongNameHost  = "wrongname.example.test"
	ownCAHost      = "ownca.example.test" // its certificate is signed by Waybill's own CA
	sniffHost      = "sniff.example.test" // speaks no TLS
	tlsOnlyHost    = "tlsonly.example.test"
	markedHost     = "marked.example.test" // its streams end with [DONE]
	blockHost      = "block.example.test"  // an answer with the secret is withheld
)

// moreOrigins adds the origins of CA-02, ID-07 and ST-02, and returns their routes.
func (b *bed) moreOrigins(t testing.TB, ca *testkit.CA) string {
	bearer := "    inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: pay}]\n"
	var y strings.Builder
	route := func(host, addr, more, upstream string) {
		name, _, _ := strings.Cut(host, ".")
		fmt.Fprintf(&y, "  - name: %s\n    match: {host: %q}\n%s    limits: {tries: 1}\n    upstream: {roots: roots.pem, resolve: {%q: %q}%s}\n", name, host, more, host, addr, upstream)
	}
	listen := func(host string, cfg *tls.Config) string {
		up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: cfg, EarlyHandler: func(a testkit.Arrival) []testkit.Step {
			return append([]testkit.Step{testkit.ReadBody()}, next(b, b.turns, host, a.Target, testkit.Respond(testkit.Reply(200, "ok"))).Steps...)
		}})
		b.ledgers[host] = up.Ledger
		return up.Addr()
	}
	route(expiredHost, listen(expiredHost, testkit.ServerConfig(ca.Expired(expiredHost))), bearer, "")
	route(selfSignedHost, listen(selfSignedHost, testkit.ServerConfig(ca.SelfSigned(selfSignedHost))), bearer, "")
	route(wrongNameHost, listen(wrongNameHost, ca.Server("other.example.test", "wrongname.example.test.other.test")), bearer, "")
	route(ownCAHost, listen(ownCAHost, &tls.Config{MinVersion: tls.VersionTLS12, GetCertificate: func(*tls.ClientHelloInfo) (*tls.Certificate, error) {
		return ownLeaf(filepath.Join(b.data, "ca"), ownCAHost)
	}}), bearer, "")
	route(tlsOnlyHost, listen(tlsOnlyHost, ca.Server(tlsOnlyHost)), bearer, ", refuse_plaintext: true")
	route(markedHost, listen(markedHost, ca.Server(markedHost)), "    contract: {end_marker: \"[DONE]\"}\n", "")
	route(blockHost, listen(blockHost, ca.Server(blockHost)), bearer+"    leak: block\n", "")
	sniff := testkit.NewUpstream(t, testkit.UpstreamConfig{OnAccept: b.sniff.accept})
	route(sniffHost, sniff.Addr(), bearer, "")
	for name, host := range map[string]string{"literal4": "127.0.0.1", "literal6": "::1", "long": longHost} {
		fmt.Fprintf(&y, "  - name: %s\n    match: {host: %q}\n    upstream: {roots: roots.pem, resolve: {%q: %q}}\n", name, host, host, listen(host, ca.Server(host)))
	}
	return y.String()
}

// ownLeaf issues a certificate with Waybill's own CA, as somebody could who stole it.
func ownLeaf(dir, host string) (*tls.Certificate, error) {
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "ca.pem"), filepath.Join(dir, "ca-key.pem"))
	if err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	tmpl := &x509.Certificate{SerialNumber: big.NewInt(time.Now().UnixNano()), Subject: pkix.Name{CommonName: host}, DNSNames: []string{host},
		NotBefore: time.Now().Add(-time.Hour), NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth}}
	der, err := x509.CreateCertificate(rand.Reader, tmpl, pair.Leaf, &key.PublicKey, pair.PrivateKey)
	if err != nil {
		return nil, err
	}
	return &tls.Certificate{Certificate: [][]byte{der, pair.Certificate[0]}, PrivateKey: key}, nil
}

var extensions = regexp.MustCompile(`X509v3 [^\n]+`)

// casesCertificates: Waybill's certificates hold before strict programs, and a wrong
// one of the origin lets nothing of a request out (G7, E1).
func casesCertificates(t *testing.T, b *bed) {
	t.Run("CA-01", func(t *testing.T) {
		openssl, python := testkit.RequireTool(t, "openssl"), testkit.RequireTool(t, "python3")
		caText := func(args ...string) string {
			code, out, errs := testkit.Run(t, testkit.Command{Path: openssl, Args: args})
			if code != 0 {
				t.Fatalf("openssl %v: %d %s %s", args, code, out, errs)
			}
			return out
		}
		authority := caText("x509", "-in", b.roots, "-noout", "-text")
		for _, need := range []string{"X509v3 Basic Constraints: critical", "CA:TRUE", "X509v3 Key Usage: critical", "Certificate Sign", "X509v3 Subject Key Identifier"} {
			if !strings.Contains(authority, need) {
				t.Errorf("the CA has no %q", need)
			}
		}
		for _, c := range []struct{ target, san string }{
			{payHost + ":443", "DNS:" + payHost}, {"127.0.0.1:443", "IP Address:127.0.0.1"}, {"[::1]:443", "IP Address:0:0:0:0:0:0:0:1"}, {longHost + ":443", "DNS:" + longHost},
		} {
			tcp, refused, err := testkit.Connect(t, b.addr, c.target)
			if err != nil {
				t.Fatalf("%s: %v %+v", c.target, err, refused)
			}
			_, state, err := tcp.StartTLS(t, strings.Trim(c.target[:strings.LastIndexByte(c.target, ':')], "[]"), b.rig.roots())
			if err != nil {
				t.Fatalf("%s: %v", c.target, err)
			}
			_ = tcp.Close()
			leaf := testkit.WriteFile(t, "leaf.pem", pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: state.PeerCertificates[0].Raw}))
			if got := caText("verify", "-x509_strict", "-purpose", "sslserver", "-CAfile", b.roots, leaf); !strings.HasSuffix(strings.TrimSpace(got), ": OK") {
				t.Errorf("%s: %s", c.target, got)
			}
			about := caText("x509", "-in", leaf, "-noout", "-text")
			for _, need := range []string{"X509v3 Authority Key Identifier", "X509v3 Subject Key Identifier", "TLS Web Server Authentication", "X509v3 Key Usage: critical", c.san} {
				if !strings.Contains(about, need) {
					t.Errorf("%s: no %q in %v", c.target, need, extensions.FindAllString(about, -1))
				}
			}
			// Python, with what 3.13 made the default.
			host := strings.Trim(c.target[:strings.LastIndexByte(c.target, ':')], "[]")
			code, _, errs := testkit.Run(t, testkit.Command{Path: python, Args: []string{"-c", strictPython, b.addr, c.target, host, b.roots}})
			if code != 0 {
				t.Errorf("%s: python: %s", c.target, errs)
			}
		}
	})
	t.Run("CA-02", func(t *testing.T) {
		contract.Covers(t, "E1", "G7", "V2")
		for _, host := range []string{expiredHost, selfSignedHost, wrongNameHost, ownCAHost} {
			for n, method := range []string{http.MethodPost, http.MethodGet} {
				path := fmt.Sprintf("/v1/ca02/%d", n)
				resp := b.send(t, method, "https://"+host+path, "x=1")
				s := b.check(t, resp, want{status: 422, facts: badCert, host: host, path: path})
				if s.Envelope.Evidence.Stage != "tcp_connect" || len(s.Envelope.Evidence.Attempts) != 1 {
					t.Errorf("%s: %+v", host, s.Envelope.Evidence)
				}
			}
			if len(b.ledgers[host].Conns()) == 0 {
				t.Errorf("%s was not asked: this run shows nothing", host)
			}
			for _, c := range b.ledgers[host].Conns() {
				if c.AppBytes != 0 {
					t.Errorf("%s: %d bytes of a request reached it", host, c.AppBytes)
				}
			}
		}
	})
}

// strictPython makes a TLS connection through the proxy: argv is proxy, CONNECT
// target, host, CA file.
const strictPython = `
import socket, ssl, sys
proxy, target, host, ca = sys.argv[1:]
addr, port = proxy.rsplit(":", 1)
s = socket.create_connection((addr, int(port)), timeout=20)
s.sendall(("CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n" % (target, target)).encode())
head = b""
while b"\r\n\r\n" not in head:
    head += s.recv(4096)
assert b" 200 " in head.split(b"\r\n")[0], head
c = ssl.create_default_context(cafile=ca)
c.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
c.wrap_socket(s, server_hostname=host).close()
`
