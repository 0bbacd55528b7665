package testkit

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/godbus/dbus/v5"
)

// VaultStore speaks as much of the HTTP API of HashiCorp Vault and OpenBao as Waybill
// uses, written from its documentation: KV v2 at "secret", a database engine with leases,
// and the logins AppRole (at "approle") and Kubernetes (at "k8s"). Set its fields before
// it is used, afterwards through Change.
type VaultStore struct {
	Token            string // opens it, as tokens of logins do
	RoleID, SecretID string // of AppRole
	Role, JWT        string // of Kubernetes
	Namespace        string // that KV asks for
	// Value is the secret "key" of secret/api at the n-th read, Lease the password of
	// database/creds/ro; n counts both, from 1.
	Value, Lease func(n int) string
	TTL          int // of leases and logins, in seconds
	// Extra are further members of both.
	Extra map[string]string
	// Broken, if set, answers instead where it returns true.
	Broken func(w http.ResponseWriter) bool
	// Refusal is the text of errors: what a store must not be quoted with.
	Refusal string

	Logins, Reads, Renewed int

	mu     sync.Mutex
	tokens map[string]bool
}

// Change runs f while nothing is served.
func (s *VaultStore) Change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// Revoke makes the tokens of all logins invalid. Call it within Change.
func (s *VaultStore) Revoke() { s.tokens = nil }

// ServeHTTP implements http.Handler.
func (s *VaultStore) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	body, _ := io.ReadAll(r.Body)
	if s.Broken != nil && s.Broken(w) {
		return
	}
	answer := func(status int, v any) {
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(v)
	}
	fail := func(status int) { answer(status, map[string]any{"errors": []string{s.Refusal}}) }
	var in map[string]any
	_ = json.Unmarshal(body, &in)
	token := r.Header.Get("X-Vault-Token")
	switch path := r.URL.Path; {
	case s.SecretID != "" && path == "/v1/auth/approle/login" && in["role_id"] == s.RoleID && in["secret_id"] == s.SecretID,
		s.JWT != "" && path == "/v1/auth/k8s/login" && in["role"] == s.Role && in["jwt"] == s.JWT:
		s.Logins++
		made := fmt.Sprintf("%s-login-%d", s.Token, s.Logins)
		if s.tokens == nil {
			s.tokens = map[string]bool{}
		}
		s.tokens[made] = true
		answer(200, map[string]any{"auth": map[string]any{"client_token": made, "lease_duration": s.TTL, "renewable": true}})
	case strings.Contains(path, "/login"):
		fail(400)
	case token != s.Token && !s.tokens[token]:
		fail(403)
	case path == "/v1/secret/data/api" && r.Header.Get("X-Vault-Namespace") == s.Namespace:
		s.Reads++
		answer(200, map[string]any{"data": map[string]any{"data": s.members(map[string]any{"key": s.Value(s.Reads), "n": 5}),
			"metadata": map[string]any{"version": 10 + s.Reads, "created_time": "2026-11-30T12:00:00Z"}}})
	case path == "/v1/secret/data/forbidden":
		fail(403)
	case path == "/v1/database/creds/ro":
		s.Reads++
		answer(200, map[string]any{"lease_id": fmt.Sprintf("database/creds/ro/L%d", s.Reads), "lease_duration": s.TTL, "renewable": true,
			"data": s.members(map[string]any{"username": "u", "password": s.Lease(s.Reads)})})
	case path == "/v1/sys/leases/renew":
		s.Renewed++
		answer(200, map[string]any{"lease_id": in["lease_id"], "lease_duration": s.TTL, "renewable": true})
	default:
		fail(404)
	}
}

func (s *VaultStore) members(m map[string]any) map[string]any {
	for name, value := range s.Extra {
		m[name] = value
	}
	return m
}

// SecretsManager speaks as much of the JSON protocol of AWS Secrets Manager as Waybill
// uses, written from its documentation: GetSecretValue. Secrets are by name; a name that
// is not there is ResourceNotFoundException.
type SecretsManager struct {
	Region  string
	Secrets map[string]string
	// Broken, if set, answers instead where it returns true. It is not called at once
	// with itself.
	Broken func(w http.ResponseWriter) bool

	mu    sync.Mutex
	asked []map[string]string
}

// Change runs f while nothing is served.
func (s *SecretsManager) Change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// Last is the last request, by the names of its members; nil: none came.
func (s *SecretsManager) Last() map[string]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.asked) == 0 {
		return nil
	}
	return s.asked[len(s.asked)-1]
}

// ServeHTTP implements http.Handler.
func (s *SecretsManager) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var in map[string]string
	if json.NewDecoder(r.Body).Decode(&in) != nil || r.Header.Get("X-Amz-Target") != "secretsmanager.GetSecretValue" ||
		!strings.Contains(r.Header.Get("Authorization"), "/"+s.Region+"/secretsmanager/aws4_request") {
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	s.asked = append(s.asked, in)
	if s.Broken != nil && s.Broken(w) {
		return
	}
	w.Header().Set("Content-Type", "application/x-amz-json-1.1")
	value, ok := s.Secrets[in["SecretId"]]
	if !ok {
		w.Header().Set("X-Amzn-Errortype", "ResourceNotFoundException")
		w.WriteHeader(http.StatusBadRequest)
		return
	}
	_ = json.NewEncoder(w).Encode(map[string]string{"ARN": "arn:x", "Name": in["SecretId"], "VersionId": "11111111-2222", "SecretString": value})
}

// ConnectStore speaks as much of the REST interface of 1Password Connect as Waybill uses,
// written from its documentation: a vault "Automation" (v1) and the item "API" (i1) with
// Fields by label, whose ids are "f-" and the label.
type ConnectStore struct {
	Token  string
	Fields map[string]string
	// Broken, if set, answers instead where it returns true.
	Broken func(w http.ResponseWriter) bool
	// Refusal is the text of errors.
	Refusal string

	mu sync.Mutex
}

// Change runs f while nothing is served.
func (s *ConnectStore) Change(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
}

// ServeHTTP implements http.Handler.
func (s *ConnectStore) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	broken := s.Broken
	s.mu.Unlock()
	if broken != nil && broken(w) {
		return
	}
	if r.Header.Get("Authorization") != "Bearer "+s.Token {
		w.WriteHeader(http.StatusUnauthorized)
		_ = json.NewEncoder(w).Encode(map[string]string{"message": s.Refusal})
		return
	}
	answer := func(v any) { _ = json.NewEncoder(w).Encode(v) }
	type m = map[string]any
	switch filter := r.URL.Query().Get("filter"); {
	case r.URL.Path == "/v1/vaults" && filter == `name eq "Automation"`:
		answer([]m{{"id": "v1", "name": "Automation"}})
	case r.URL.Path == "/v1/vaults" && filter == `name eq "Twice"`:
		answer([]m{{"id": "v1"}, {"id": "v2"}})
	case r.URL.Path == "/v1/vaults/v1/items" && filter == `title eq "API"`:
		answer([]m{{"id": "i1", "title": "API"}})
	case r.URL.Path == "/v1/vaults", r.URL.Path == "/v1/vaults/v1/items":
		answer([]m{})
	case r.URL.Path == "/v1/vaults/v1/items/i1":
		fields := []m{{"id": "f0", "label": "empty"}}
		for label, value := range s.Fields {
			fields = append(fields, m{"id": "f-" + label, "label": label, "value": value})
		}
		answer(m{"id": "i1", "version": 7, "fields": fields})
	default:
		w.WriteHeader(http.StatusNotFound)
		answer(m{"message": s.Refusal})
	}
}

// SecretService is a keyring: the D-Bus interface org.freedesktop.secrets, as much of it
// as a reading client uses, on a message bus of its own. It is written from the
// specification of the Secret Service; no desktop's keyring can be started without a
// session.
type SecretService struct {
	// Env leads a program to it ("DBUS_SESSION_BUS_ADDRESS=…").
	Env string

	mu      sync.Mutex
	entries map[[2]string]string
	locked  bool
	wait    time.Duration
	stop    func()
}

// The names of the specification.
const (
	secretsName       = "org.freedesktop.secrets"
	secretsPath       = dbus.ObjectPath("/org/freedesktop/secrets")
	secretsSession    = secretsPath + "/session/s"
	secretsCollection = secretsPath + "/aliases/default"
	secretsItem       = secretsPath + "/item/i"
)

// NewSecretService starts a message bus and the keyring on it.
func NewSecretService(t testing.TB) *SecretService {
	t.Helper()
	cmd := exec.Command(RequireTool(t, "dbus-daemon"), "--session", "--nofork", "--nopidfile", "--print-address=1")
	out, err := cmd.StdoutPipe()
	if err == nil {
		err = cmd.Start()
	}
	if err != nil {
		t.Fatalf("testkit: dbus-daemon: %v", err)
	}
	stop := sync.OnceFunc(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	t.Cleanup(stop)
	line := make([]byte, 512)
	n, err := out.Read(line)
	if err != nil {
		t.Fatalf("testkit: dbus-daemon: %v", err)
	}
	addr := strings.TrimSpace(string(line[:n]))
	conn, err := dbus.Connect(addr)
	if err != nil {
		t.Fatalf("testkit: dbus: %v", err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	s := &SecretService{Env: "DBUS_SESSION_BUS_ADDRESS=" + addr, entries: map[[2]string]string{}, stop: stop}
	for path, methods := range map[dbus.ObjectPath]map[string]map[string]any{
		secretsPath: {
			"org.freedesktop.Secret.Service": {"OpenSession": s.openSession, "Unlock": s.unlock},
			"org.freedesktop.DBus.Properties": {"Get": func(string, string) (dbus.Variant, *dbus.Error) {
				return dbus.MakeVariant([]dbus.ObjectPath{}), nil // no collection "login": clients take the default one
			}},
		},
		secretsSession:    {"org.freedesktop.Secret.Session": {"Close": func() *dbus.Error { return nil }}},
		secretsCollection: {"org.freedesktop.Secret.Collection": {"SearchItems": s.search, "CreateItem": s.create}},
	} {
		for iface, table := range methods {
			if err := conn.ExportMethodTable(table, path, iface); err != nil {
				t.Fatalf("testkit: dbus: %v", err)
			}
		}
	}
	// Items are by number: the n-th pair of names that was searched for.
	if err := conn.ExportSubtreeMethodTable(map[string]any{"GetSecret": s.secret}, secretsItem, "org.freedesktop.Secret.Item"); err != nil {
		t.Fatalf("testkit: dbus: %v", err)
	}
	if _, err := conn.RequestName(secretsName, dbus.NameFlagDoNotQueue); err != nil {
		t.Fatalf("testkit: dbus: %v", err)
	}
	return s
}

// Set writes an entry.
func (s *SecretService) Set(service, account, value string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.entries[[2]string{service, account}] = value
}

// Lock makes it refuse to unlock, as when nobody answers the prompt.
func (s *SecretService) Lock(yes bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.locked = yes
}

// Delay makes it wait before it unlocks anything, as a prompt does.
func (s *SecretService) Delay(d time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.wait = d
}

// Stop ends the bus.
func (s *SecretService) Stop() { s.stop() }

func (s *SecretService) openSession(string, dbus.Variant) (dbus.Variant, dbus.ObjectPath, *dbus.Error) {
	return dbus.MakeVariant(""), secretsSession, nil
}

func (s *SecretService) unlock(paths []dbus.ObjectPath) ([]dbus.ObjectPath, dbus.ObjectPath, *dbus.Error) {
	s.mu.Lock()
	wait, locked := s.wait, s.locked
	s.mu.Unlock()
	time.Sleep(wait)
	if locked {
		return nil, "/", dbus.NewError("org.freedesktop.Secret.Error.IsLocked", nil)
	}
	return paths, "/", nil
}

func (s *SecretService) search(attributes map[string]string) ([]dbus.ObjectPath, *dbus.Error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	service, account := attributes["service"], attributes["username"]
	if _, ok := s.entries[[2]string{service, account}]; !ok {
		return []dbus.ObjectPath{}, nil
	}
	return []dbus.ObjectPath{secretsItem + dbus.ObjectPath(fmt.Sprintf("/%x/%x", service, account))}, nil
}

func (s *SecretService) create(properties map[string]dbus.Variant, secret secretStruct, _ bool) (item, prompt dbus.ObjectPath, _ *dbus.Error) {
	attributes, _ := properties["org.freedesktop.Secret.Item.Attributes"].Value().(map[string]string)
	s.Set(attributes["service"], attributes["username"], string(secret.Value))
	return secretsItem + "/new", "/", nil
}

// secretStruct is the structure Secret of the specification.
type secretStruct struct {
	Session     dbus.ObjectPath
	Parameters  []byte
	Value       []byte
	ContentType string
}

func (s *SecretService) secret(msg dbus.Message, session dbus.ObjectPath) (secretStruct, *dbus.Error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	path, _ := msg.Headers[dbus.FieldPath].Value().(dbus.ObjectPath)
	var service, account []byte
	if _, err := fmt.Sscanf(strings.ReplaceAll(strings.TrimPrefix(string(path), string(secretsItem)+"/"), "/", " "), "%x %x", &service, &account); err != nil {
		return secretStruct{}, dbus.NewError("org.freedesktop.Secret.Error.NoSuchObject", nil)
	}
	value, ok := s.entries[[2]string{string(service), string(account)}]
	if !ok || s.locked {
		return secretStruct{}, dbus.NewError("org.freedesktop.Secret.Error.IsLocked", nil)
	}
	return secretStruct{session, []byte{}, []byte(value), "text/plain"}, nil
}

// Hang makes a Broken that says nothing for d, which is longer than the caller waits.
func Hang(d time.Duration) func(http.ResponseWriter) bool {
	return func(http.ResponseWriter) bool { time.Sleep(d); return true }
}
