package proxy

import (
	"log"
	"log/slog"
	"strings"
)

// engineLog is goproxy's logger. goproxy formats requests, hosts and errors of
// peers into its lines, so only the line's constant part is kept (CONTRACT C2).
type engineLog struct{ log *slog.Logger }

// Printf implements goproxy.Logger.
func (l engineLog) Printf(format string, _ ...any) {
	l.log.Warn("goproxy", slog.String("event", strings.TrimSpace(format)))
}

// serverLog is the writer behind http.Server.ErrorLog. net/http and its HTTP/2 server
// quote request bytes and peers' errors, so a line is reduced to a kind.
type serverLog struct{ log *slog.Logger }

func newServerLog(l *slog.Logger) *log.Logger { return log.New(serverLog{l}, "", 0) }

// serverLogKinds are the beginnings of net/http's messages that are told apart.
var serverLogKinds = []struct{ prefix, kind string }{
	{"http: Accept error", "accept_error"},
	{"http: panic serving", "panic"},
	{"http: TLS handshake error", "tls_handshake"},
	{"http: superfluous", "superfluous_write_header"},
	{"http: response.Write", "write_on_hijacked"},
	{"http: URL query contains semicolon", "query"},
	{"http2: panic serving", "panic"},
	{"http2: server: error reading preface", "http2_preface"},
	{"http2: received GOAWAY", "http2_goaway"},
	{"http2:", "http2"},
}

// Write takes one line.
func (l serverLog) Write(p []byte) (int, error) {
	kind := "other"
	for _, k := range serverLogKinds {
		if strings.HasPrefix(string(p), k.prefix) {
			kind = k.kind
			break
		}
	}
	l.log.Warn("http server", slog.String("event", kind))
	return len(p), nil
}
