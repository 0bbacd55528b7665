package main

import (
	"bufio"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"fmt"
	"io"
	"math/big"
	"net"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"
)

// demoUpstreams are the origin servers of the demo: HTTPS on loopback, spoken
// byte by byte, so that an answer can stop anywhere. They keep their own ledger
// of what they did; the demo counts effects there and nowhere else.
type demoUpstreams struct {
	secret  string // what the injected field must hold
	rootPEM []byte
	addr    map[string]string // host → 127.0.0.1:port
	ssh     demoSSH

	listeners []net.Listener
	conns     sync.WaitGroup
	stop      chan struct{}

	mu      sync.Mutex
	effects map[string]int           // by path
	secrets map[string]int           // by path: requests that held the secret
	seen    map[string]bool          // by path
	arrived map[string]chan struct{} // closed at the first arrival
	release map[string]chan struct{} // an answer that waits for the demo
	open    map[net.Conn]bool
}

// demoZone is reserved (RFC 6761): these names never leave the machine.
const demoZone = ".demo.test"

func startDemoUpstreams(secret string) (*demoUpstreams, error) {
	u := &demoUpstreams{
		secret: secret, addr: map[string]string{}, stop: make(chan struct{}),
		effects: map[string]int{}, secrets: map[string]int{}, seen: map[string]bool{},
		arrived: map[string]chan struct{}{}, release: map[string]chan struct{}{}, open: map[net.Conn]bool{},
	}
	now := time.Now()
	ca, err := newDemoCA(now)
	if err != nil {
		return nil, err
	}
	u.rootPEM = ca.pem
	for _, s := range []struct {
		host, certName string
		notAfter       time.Time
	}{
		{"api" + demoZone, "api" + demoZone, now.Add(24 * time.Hour)},
		{"expired" + demoZone, "expired" + demoZone, now.Add(-24 * time.Hour)},
		{"wrong" + demoZone, "somebody-else" + demoZone, now.Add(24 * time.Hour)},
	} {
		cert, err := ca.leaf(s.certName, s.notAfter)
		if err != nil {
			u.close()
			return nil, err
		}
		if u.addr[s.host], err = u.listen(cert); err != nil {
			u.close()
			return nil, err
		}
	}
	if err := u.startSSH(); err != nil {
		u.close()
		return nil, err
	}
	// A port on which nobody listens: taken once, so that it is free now.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		u.close()
		return nil, err
	}
	u.addr["refused"+demoZone] = l.Addr().String()
	return u, l.Close()
}

func (u *demoUpstreams) listen(cert tls.Certificate) (string, error) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	u.listeners = append(u.listeners, l)
	u.conns.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			u.mu.Lock()
			u.open[c] = true
			u.mu.Unlock()
			u.conns.Go(func() {
				defer func() {
					_ = c.Close()
					u.mu.Lock()
					delete(u.open, c)
					u.mu.Unlock()
				}()
				u.serve(tls.Server(c, &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12}))
			})
		}
	})
	return l.Addr().String(), nil
}

func (u *demoUpstreams) close() {
	close(u.stop)
	for _, l := range u.listeners {
		_ = l.Close()
	}
	u.mu.Lock()
	for c := range u.open {
		_ = c.Close()
	}
	u.mu.Unlock()
	u.conns.Wait()
}

// applied returns how many effects the upstream applied for a path.
func (u *demoUpstreams) applied(path string) int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.effects[path]
}

// sawSecret returns how many requests for a path held the secret.
func (u *demoUpstreams) sawSecret(path string) int {
	u.mu.Lock()
	defer u.mu.Unlock()
	return u.secrets[path]
}

// gate returns the channel of a path in m, making it when needed.
func (u *demoUpstreams) gate(m map[string]chan struct{}, path string) chan struct{} {
	u.mu.Lock()
	defer u.mu.Unlock()
	if m[path] == nil {
		m[path] = make(chan struct{})
	}
	return m[path]
}

// serve reads requests from one connection and plays what their path asks for.
// The last element of the path is the behaviour, the one before the scenario.
func (u *demoUpstreams) serve(c net.Conn) {
	r := bufio.NewReader(c)
	for {
		req, err := http.ReadRequest(r)
		if err != nil {
			return
		}
		if _, err := io.Copy(io.Discard, req.Body); err != nil {
			return
		}
		if !u.play(c, req) {
			return
		}
	}
}

// play answers one request and reports whether the connection goes on.
func (u *demoUpstreams) play(c net.Conn, req *http.Request) bool {
	path := req.URL.Path
	behaviour := path[strings.LastIndexByte(path, '/')+1:]
	u.mu.Lock()
	if strings.Contains(req.Header.Get("Authorization"), u.secret) {
		u.secrets[path]++
	}
	// A refusal is no effect; everything else does what it was asked for first, and
	// answers, or fails to, afterwards.
	if behaviour != "refuse-401" && behaviour != "refuse-429" {
		u.effects[path]++
	}
	nth := u.effects[path]
	first := !u.seen[path]
	u.seen[path] = true
	u.mu.Unlock()
	if first {
		close(u.gate(u.arrived, path))
	}

	say := func(text string) bool {
		_, err := io.WriteString(c, text)
		return err == nil
	}
	whole := func(status, extra, body string) bool {
		return say("HTTP/1.1 " + status + "\r\nContent-Type: application/json\r\nContent-Length: " + strconv.Itoa(len(body)) + "\r\n" + extra + "\r\n" + body)
	}
	switch behaviour {
	case "ok":
		return whole("200 OK", "", `{"balance":42}`)
	case "create":
		return whole("201 Created", "", fmt.Sprintf(`{"id":"pay_%d"}`, nth))
	case "refuse-401":
		return whole("401 Unauthorized", "WWW-Authenticate: Bearer\r\n", `{"error":"bad key"}`)
	case "refuse-429":
		return whole("429 Too Many Requests", "Retry-After: 30\r\n", `{"error":"slow down"}`)
	case "fail-500":
		return whole("500 Internal Server Error", "", `{"error":"broke after the payment was made"}`)
	case "gateway-502":
		return whole("502 Bad Gateway", "", `{"error":"no answer from the application"}`)
	case "cut":
		say("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100\r\n\r\n" + `{"id":"pay`)
		return false
	case "cut-chunk":
		say("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\na\r\n" + `{"id":"pay` + "\r\n")
		return false
	case "drop":
		return false
	case "drop-once":
		if nth == 1 {
			return false
		}
		return whole("201 Created", "", fmt.Sprintf(`{"id":"pay_%d"}`, nth))
	case "wait":
		select {
		case <-u.gate(u.release, path):
			return whole("201 Created", "", `{"id":"pay_late"}`)
		case <-u.stop:
			return false
		}
	case "silent":
		// Silence until the other side gives up.
		_, _ = io.Copy(io.Discard, c)
		return false
	default:
		return whole("404 Not Found", "", `{"error":"the demo has no such path"}`)
	}
}

// demoCA signs the upstreams' certificates. It lives in memory only.
type demoCA struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newDemoCA(now time.Time) (*demoCA, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "Waybill demo upstreams"},
		NotBefore: now.Add(-72 * time.Hour), NotAfter: now.Add(72 * time.Hour),
		IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	der, err := x509.CreateCertificate(rand.Reader, t, t, &key.PublicKey, key)
	if err != nil {
		return nil, err
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		return nil, err
	}
	return &demoCA{cert: cert, key: key, pem: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}, nil
}

func (ca *demoCA) leaf(name string, notAfter time.Time) (tls.Certificate, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return tls.Certificate{}, err
	}
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return tls.Certificate{}, err
	}
	der, err := x509.CreateCertificate(rand.Reader, &x509.Certificate{
		SerialNumber: serial, Subject: pkix.Name{CommonName: name}, DNSNames: []string{name},
		NotBefore: notAfter.Add(-48 * time.Hour), NotAfter: notAfter,
		KeyUsage: x509.KeyUsageDigitalSignature, ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth},
	}, ca.cert, &key.PublicKey, ca.key)
	if err != nil {
		return tls.Certificate{}, err
	}
	return tls.Certificate{Certificate: [][]byte{der, ca.cert.Raw}, PrivateKey: key}, nil
}
