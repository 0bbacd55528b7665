package main

import (
	"crypto/rand"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"syscall"
)

// checkDebugSettings refuses GODEBUG settings that print requests: http2debug
// writes header fields, the injected ones included, to standard error (CONTRACT C2).
func checkDebugSettings(godebug string) error {
	for setting := range strings.SplitSeq(godebug, ",") {
		if k, v, _ := strings.Cut(setting, "="); strings.TrimSpace(k) == "http2debug" && v != "0" && v != "" {
			return fail(exitConfig, "GODEBUG has http2debug, which prints header fields, secrets included (CONTRACT C2); take it out")
		}
	}
	return nil
}

// ignoredVariables must not decide where Waybill's own requests go or whom they
// trust (case CL-01): the container's HTTPS_PROXY is often Waybill itself.
var ignoredVariables = []string{
	"HTTP_PROXY", "http_proxy", "HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "NO_PROXY", "no_proxy",
	"SSL_CERT_FILE", "SSL_CERT_DIR", "AWS_CA_BUNDLE",
}

// ignored reports whether a variable is one of those; the endpoints of AWS's services have
// a variable each.
func ignored(name string) bool {
	return slices.Contains(ignoredVariables, name) || strings.HasPrefix(name, "AWS_ENDPOINT_URL")
}

// ignoreEnvironment takes them out of this process's environment, before any
// library reads them. A child of "run" gets its own.
func ignoreEnvironment(l *slog.Logger) {
	var found []string
	for _, kv := range os.Environ() {
		name, value, _ := strings.Cut(kv, "=")
		if !ignored(name) {
			continue
		}
		if value != "" {
			found = append(found, name)
		}
		_ = os.Unsetenv(name)
	}
	slices.Sort(found)
	if len(found) > 0 {
		l.Info("variables of the environment are ignored; the configuration decides", slog.Any("variables", found))
	}
}

// identityKeyBytes is the size of the key that tells unauthenticated callers on
// loopback apart.
const identityKeyBytes = 32

// identityKey reads the key at path, or makes it.
func identityKey(path string) ([]byte, error) {
	key, err := os.ReadFile(path)
	switch {
	case err == nil && len(key) == identityKeyBytes:
		return key, nil
	case err == nil:
		return nil, fmt.Errorf("%s: not %d bytes", path, identityKeyBytes)
	case !errors.Is(err, fs.ErrNotExist):
		return nil, err
	}
	key = make([]byte, identityKeyBytes)
	_, _ = rand.Read(key) // never fails
	return key, writeFile(path, 0o600, key)
}

// spkiDigest is the SHA-256 of a certificate's SubjectPublicKeyInfo.
func spkiDigest(c *x509.Certificate) [sha256.Size]byte {
	return sha256.Sum256(c.RawSubjectPublicKeyInfo)
}

// listenPrivate makes a unix socket that only this user may connect to, from its
// first moment on.
func listenPrivate(path string) (net.Listener, error) {
	old := syscall.Umask(0o177)
	l, err := net.Listen("unix", path)
	syscall.Umask(old)
	return l, err
}
