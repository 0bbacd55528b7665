package main

import (
	"io"
	"log"
	"log/slog"
	"regexp"
)

// newLogger writes to w in the given format, "json" or "text".
func newLogger(w io.Writer, level slog.Level, format string) *slog.Logger {
	opts := &slog.HandlerOptions{Level: level}
	if format == "json" {
		return slog.New(slog.NewJSONHandler(w, opts))
	}
	return slog.New(slog.NewTextHandler(w, opts))
}

// redirectStandardLog sends what libraries print through package log into l,
// without its text: a library may quote bytes of a request (CONTRACT C2, DESIGN
// section 3). Who spoke and how much is enough to know that something was said.
func redirectStandardLog(l *slog.Logger) {
	log.SetFlags(0)
	log.SetPrefix("")
	log.SetOutput(&libraryLog{l})
}

type libraryLog struct{ l *slog.Logger }

// speaker is the prefix that Go's libraries put before a message, "http2: server: ".
var speaker = regexp.MustCompile(`^[a-z][a-z0-9/ ]{0,30}:`)

// Write implements io.Writer.
func (w *libraryLog) Write(p []byte) (int, error) {
	w.l.Warn("library message withheld", slog.String("library", string(speaker.Find(p))), slog.Int("bytes", len(p)))
	return len(p), nil
}
