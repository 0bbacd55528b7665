package proxy

import (
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"crypto/subtle"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"waybill/dispatch"
)

// Authenticator says who a caller is (CONTRACT V4). Implementations are safe for
// concurrent use, compare secrets in constant time and never log what was presented.
type Authenticator interface {
	// Authenticate returns the caller behind a pair of Basic credentials, or false.
	// Both are empty when none were presented. remote is the caller's address.
	Authenticate(user, password string, remote net.Addr) (dispatch.Caller, bool)
}

// StaticCaller is one configured caller.
type StaticCaller struct {
	Name string
	// TokenSHA256 is the SHA-256 of the caller's token; the token itself is not kept.
	TokenSHA256 [sha256.Size]byte
	// In place of a token: the SHA-256 of a client certificate, its subject (RFC 2253), or
	// a Kubernetes service account. Zero: not recognised that way.
	CertificateSHA256 *[sha256.Size]byte
	Subject           string
	ServiceAccount    *ServiceAccount
}

// Callers is the Authenticator of the product: session tokens, configured callers,
// and – only while no caller is configured, and only on loopback – callers that do
// not authenticate. Its fields do not change after first use.
type Callers struct {
	// Static callers. When there is one, every caller must authenticate.
	Static []StaticCaller
	// Sessions opened by "waybill run"; may be nil.
	Sessions *Sessions
	// IdentityKey keys the hash that tells callers apart that present credentials
	// nobody configured. It is random per data folder and kept, so that an identity
	// survives a restart; it is no authentication.
	IdentityKey []byte
}

// Required reports whether every caller must present valid credentials.
func (c *Callers) Required() bool { return len(c.Static) > 0 }

// LocalCaller is the id of a caller on loopback that presents nothing.
const LocalCaller = "local"

// Authenticate implements Authenticator. A static caller is recognised by its token;
// the user name is free, since clients insist on one. Credentials that are not known
// are refused wherever a caller is configured, and always when they look like a
// session's: a closed session must not turn into somebody else.
func (c *Callers) Authenticate(user, password string, remote net.Addr) (dispatch.Caller, bool) {
	if c.Sessions != nil {
		for _, token := range []string{password, user} {
			if s, ok := c.Sessions.lookup(token); ok {
				return dispatch.Caller{ID: sessionPrefix + s.ID, Name: s.Name, Session: s.ID}, true
			}
		}
	}
	sum := sha256.Sum256([]byte(password))
	found := -1
	for i := range c.Static {
		// No early exit: the time tells nothing about which caller it was.
		if subtle.ConstantTimeCompare(sum[:], c.Static[i].TokenSHA256[:]) == 1 {
			found = i
		}
	}
	if found >= 0 && password != "" {
		return dispatch.Caller{ID: callerPrefix + c.Static[found].Name, Name: c.Static[found].Name}, true
	}
	for i := range c.Static {
		if a := c.Static[i].ServiceAccount; a != nil && a.accepts(password, time.Now()) {
			return dispatch.Caller{ID: callerPrefix + c.Static[i].Name, Name: c.Static[i].Name}, true
		}
	}
	if c.Required() || !isLoopback(remote) || strings.HasPrefix(password, tokenPrefix) || strings.HasPrefix(user, tokenPrefix) {
		return dispatch.Caller{}, false
	}
	if user == "" && password == "" {
		return dispatch.Caller{ID: LocalCaller}, true
	}
	// Not verified, only kept apart: a program that was given a name of its own sees
	// its own actions.
	mac := hmac.New(sha256.New, c.IdentityKey)
	_, _ = fmt.Fprintf(mac, "%d:%s:%s", len(user), user, password) // a hash never fails
	return dispatch.Caller{ID: "basic:" + hex.EncodeToString(mac.Sum(nil)[:8])}, true
}

// Valid reports whether a caller that authenticated earlier would still be let in: a
// tunnel outlives a session's end and a reload of the configuration.
func (c *Callers) Valid(caller dispatch.Caller) bool {
	switch {
	case caller.Session != "":
		return c.Sessions != nil && c.Sessions.open(caller.Session)
	case strings.HasPrefix(caller.ID, callerPrefix):
		return slices.ContainsFunc(c.Static, func(s StaticCaller) bool { return s.Name == caller.Name })
	default:
		return !c.Required()
	}
}

const (
	callerPrefix  = "caller:"
	sessionPrefix = "session:"
)

// isLoopback reports whether the peer is on this machine: a loopback address, or a
// unix socket. A 4-in-6 form counts as the address inside.
func isLoopback(a net.Addr) bool {
	switch a := a.(type) {
	case *net.TCPAddr:
		return a.IP.IsLoopback()
	case *net.UnixAddr:
		return true
	default:
		return false
	}
}

// credentials returns the pair in a Proxy-Authorization (or Authorization) value. ok
// is false when there is a value that cannot be understood. A Bearer token counts
// as a password.
func credentials(values []string) (user, password string, ok bool) {
	switch len(values) {
	case 0:
		return "", "", true
	case 1:
	default:
		return "", "", false
	}
	scheme, rest, _ := strings.Cut(strings.TrimSpace(values[0]), " ")
	rest = strings.TrimSpace(rest)
	switch {
	case strings.EqualFold(scheme, "Basic"):
		raw, err := base64.StdEncoding.DecodeString(rest)
		if err != nil {
			return "", "", false
		}
		user, password, found := strings.Cut(string(raw), ":")
		return user, password, found && user+password != ""
	case strings.EqualFold(scheme, "Bearer") && rest != "":
		return "", rest, true
	default:
		return "", "", false
	}
}

// authenticate says who sent a request on conn, of a listener. Credentials that are
// presented decide; without any, the connection's own certificate does.
func (p *Proxy) authenticate(values []string, conn *headConn) (dispatch.Caller, bool) {
	if len(values) == 0 {
		if caller, ok := p.certified(conn); ok {
			return caller, true
		}
	}
	remote := conn.RemoteAddr()
	user, password, ok := credentials(values)
	if !ok {
		return dispatch.Caller{}, false
	}
	return p.callers.Authenticate(user, password, remote)
}

// takeProxyCredentials removes the proxy's own fields from h: they stop here, on
// every layer (case HD-03).
func takeProxyCredentials(h http.Header) []string {
	values := h["Proxy-Authorization"]
	delete(h, "Proxy-Authorization")
	delete(h, "Proxy-Authenticate")
	delete(h, "Proxy-Authentication-Info")
	return values
}

const (
	tokenPrefix   = "wbs_"
	maxSessions   = 4096
	sessionMaxAge = 30 * 24 * time.Hour
)

// ErrNoSession is returned by Sessions.Close for an id that is not open.
var ErrNoSession = errors.New("proxy: no such session")

// Session is one open session of "waybill run". It never holds the token.
type Session struct {
	ID     string    `json:"id"`
	Name   string    `json:"name,omitempty"`
	Opened time.Time `json:"opened_at"`
}

// storedSession is a Session as it stands in the file.
type storedSession struct {
	Session
	TokenSHA256 string `json:"token_sha256"`
}

// Sessions are the open sessions. They are kept in a file of mode 0600 that holds
// hashes of the tokens only, so that a session – and the actions it owns – survives
// a restart of the proxy. Safe for concurrent use.
type Sessions struct {
	path string // "": in memory only

	mu     sync.Mutex
	byHash map[[sha256.Size]byte]Session
	ids    map[string]struct{} // of byHash
}

// OpenSessions reads the sessions kept at path; "" keeps them in memory only. A file
// that cannot be read or understood is an error: sessions are not silently forgotten.
func OpenSessions(path string) (*Sessions, error) {
	s := &Sessions{path: path, byHash: make(map[[sha256.Size]byte]Session), ids: make(map[string]struct{})}
	if path == "" {
		return s, nil
	}
	raw, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("proxy: sessions: %w", err)
	}
	var stored []storedSession
	if err := json.Unmarshal(raw, &stored); err != nil {
		return nil, fmt.Errorf("proxy: sessions: %w", err)
	}
	for _, st := range stored {
		sum, err := hex.DecodeString(st.TokenSHA256)
		if err != nil || len(sum) != sha256.Size {
			return nil, errors.New("proxy: sessions: a token hash is not 64 hex digits")
		}
		if time.Since(st.Opened) < sessionMaxAge {
			s.byHash[[sha256.Size]byte(sum)] = st.Session
			s.ids[st.ID] = struct{}{}
		}
	}
	return s, nil
}

// Open opens a session and returns its id and its token. The token is shown once and
// not kept. Name is for people and for routes' callers lists; it may be empty.
func (s *Sessions) Open(name string) (id, token string, err error) {
	var raw [28]byte
	_, _ = rand.Read(raw[:]) // crypto/rand.Read never fails
	id = "ses_" + hex.EncodeToString(raw[:8])
	token = tokenPrefix + hex.EncodeToString(raw[8:])
	sum := sha256.Sum256([]byte(token))

	s.mu.Lock()
	defer s.mu.Unlock()
	for h, old := range s.byHash {
		if time.Since(old.Opened) >= sessionMaxAge {
			delete(s.byHash, h)
			delete(s.ids, old.ID)
		}
	}
	if len(s.byHash) >= maxSessions {
		return "", "", fmt.Errorf("proxy: %d sessions are open already; close some", maxSessions)
	}
	s.byHash[sum] = Session{ID: id, Name: name, Opened: time.Now().UTC()}
	if err := s.save(); err != nil {
		delete(s.byHash, sum)
		return "", "", err
	}
	s.ids[id] = struct{}{}
	return id, token, nil
}

// Close ends a session; its token is worthless from now on. ErrNoSession.
func (s *Sessions) Close(id string) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	for h, old := range s.byHash {
		if old.ID == id {
			delete(s.byHash, h)
			if err := s.save(); err != nil {
				s.byHash[h] = old
				return err
			}
			delete(s.ids, id)
			return nil
		}
	}
	return ErrNoSession
}

// List returns the open sessions, oldest first.
func (s *Sessions) List() []Session {
	s.mu.Lock()
	defer s.mu.Unlock()
	out := make([]Session, 0, len(s.byHash))
	for _, v := range s.byHash {
		out = append(out, v)
	}
	slices.SortFunc(out, func(a, b Session) int { return a.Opened.Compare(b.Opened) })
	return out
}

// lookup finds the session of a token. Looking a hash up tells an attacker nothing:
// no prefix of a token has a hash near the token's.
func (s *Sessions) lookup(token string) (Session, bool) {
	if !strings.HasPrefix(token, tokenPrefix) {
		return Session{}, false
	}
	sum := sha256.Sum256([]byte(token))
	s.mu.Lock()
	defer s.mu.Unlock()
	v, ok := s.byHash[sum]
	if !ok || time.Since(v.Opened) >= sessionMaxAge {
		return Session{}, false
	}
	return v, true
}

// open reports whether the session with this id is open.
func (s *Sessions) open(id string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.ids[id]
	return ok
}

// save writes the file anew; the caller holds mu. A crash leaves the old file or the new one.
func (s *Sessions) save() error {
	if s.path == "" {
		return nil
	}
	stored := make([]storedSession, 0, len(s.byHash))
	for h, v := range s.byHash {
		stored = append(stored, storedSession{Session: v, TokenSHA256: hex.EncodeToString(h[:])})
	}
	slices.SortFunc(stored, func(a, b storedSession) int { return strings.Compare(a.ID, b.ID) })
	raw, err := json.MarshalIndent(stored, "", "  ")
	if err != nil {
		return fmt.Errorf("proxy: sessions: %w", err)
	}
	return writeFile(s.path, append(raw, '\n'), 0o600)
}

// writeFile replaces path by way of a temporary file in the same folder, synced.
func writeFile(path string, data []byte, mode fs.FileMode) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+"-*")
	if err != nil {
		return fmt.Errorf("proxy: %w", err)
	}
	defer func() { _ = os.Remove(f.Name()) }() // gone after the rename
	_, err = f.Write(data)
	if err == nil {
		err = f.Chmod(mode)
	}
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return fmt.Errorf("proxy: %w", err)
	}
	return nil
}
