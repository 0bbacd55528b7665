package main

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/modelcontextprotocol/go-sdk/mcp"
)

const (
	// minTokenBytes is the shortest token that is taken from a file.
	minTokenBytes = 16
	// mcpIdle ends a session of a host that went away without a word.
	mcpIdle = 24 * time.Hour
)

// mcpHTTP serves streamable HTTP on loopback until ctx ends. Whoever holds the token
// acts as the one session of this command.
func (a *app) mcpHTTP(ctx context.Context, tools *mcpTools, flags *mcpFlags, data string) error {
	path := flags.tokenFile
	if path == "" {
		path = filepath.Join(data, "mcp", "token")
	}
	token, err := mcpToken(path)
	if err != nil {
		return fail(exitConfig, "--token-file %s: %w", path, err)
	}
	l, err := listenTCP("--http", flags.http)
	if err != nil {
		return err
	}
	server := tools.server()
	// A stream that breaks can be taken up again; the result is in the journal anyway.
	streams := mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return server }, &mcp.StreamableHTTPOptions{
		EventStore: mcp.NewMemoryEventStore(nil), SessionTimeout: mcpIdle,
	})
	mux := http.NewServeMux()
	// A page of a browser has no token; a browser that had one would still be refused (CONTRACT V5).
	mux.Handle("/mcp", http.NewCrossOriginProtection().Handler(withToken(token, streams)))
	srv := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 5 * time.Minute}
	p := &errWriter{w: a.stdout}
	p.printf("mcp      http://%s/mcp\n", l.Addr())
	p.printf("token    %s\n", path)
	if p.err != nil {
		return errors.Join(p.err, l.Close())
	}
	unhook := context.AfterFunc(ctx, func() { _ = srv.Close() })
	defer unhook()
	if err := srv.Serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return nil
}

// mcpToken reads the token, or makes one.
func mcpToken(path string) (string, error) {
	raw, err := os.ReadFile(path)
	if noFile(err) {
		token := "wbm_" + rand.Text()
		return token, writePrivate(path, []byte(token+"\n"))
	}
	if err != nil {
		return "", err
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm()&0o077 != 0 {
		return "", errors.New("other users may read it; run: chmod 600")
	}
	token := strings.TrimSpace(string(raw))
	if len(token) < minTokenBytes {
		return "", errors.New("it is shorter than 16 characters")
	}
	return token, nil
}

// withToken lets only holders of the bearer token through.
func withToken(token string, next http.Handler) http.Handler {
	want := sha256.Sum256([]byte("Bearer " + token))
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		got := sha256.Sum256([]byte(r.Header.Get("Authorization")))
		if subtle.ConstantTimeCompare(got[:], want[:]) != 1 {
			w.Header().Set("WWW-Authenticate", `Bearer realm="waybill"`)
			http.Error(w, "the token of \"waybill mcp\" is missing or wrong", http.StatusUnauthorized)
			return
		}
		next.ServeHTTP(w, r)
	})
}
