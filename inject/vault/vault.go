// Package vault is Waybill's own secret store: two age-encrypted files in the data
// folder. It owns their form; it promises that secrets and the key that opens them are
// on disk encrypted only, that a write is whole and durable when it returns, and that
// nothing of them is in an error. It assumes that the data folder is its owner's.
//
//	vault.json   how the key is kept, and the public key; no secret
//	key.age      the vault's own key, encrypted with a passphrase or to an identity;
//	             not there when the operating system's keyring holds the key
//	secrets.age  the secrets, encrypted to the vault's own key
//
// The key of the vault is made once; a passphrase costs a second at unlocking only, and
// what a running proxy stores (a refresh token that rotates) costs no passphrase.
package vault

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"filippo.io/age"

	"waybill/inject"
	"waybill/internal/control"
)

// The ways in which the key is kept.
const (
	MethodPassphrase = "passphrase"
	MethodIdentity   = "identity"
	MethodKeyring    = "keyring"
)

// Errors for callers to branch on.
var (
	ErrNone      = errors.New("vault: there is none; make one with \"waybill vault init\"")
	ErrExists    = errors.New("vault: there is one already")
	ErrLocked    = errors.New("vault: locked")
	ErrKey       = errors.New("vault: the passphrase or identity does not open it")
	ErrNotFound  = errors.New("vault: no secret of that name")
	ErrDamaged   = errors.New("vault: a file cannot be read as one of a vault")
	ErrNoKeyring = errors.New("vault: the keyring does not hold the key")
)

// Keyring keeps the vault's key in the operating system's keyring; its errors hold no key.
type Keyring interface {
	Get(service, account string) (string, error)
	Set(service, account, value string) error
}

// meta is vault.json.
type meta struct {
	Version   int    `json:"version"`
	Method    string `json:"method"`
	Recipient string `json:"recipient"`          // public key of the vault
	Identity  string `json:"identity,omitempty"` // path of the identity file
}

// content is what secrets.age holds.
type content struct {
	Version int              `json:"version"`
	Secrets map[string]entry `json:"secrets"`
}

type entry struct {
	Value   []byte    `json:"value"`
	Changed time.Time `json:"changed"`
	Serial  uint64    `json:"serial"` // counts the values of this name
}

// Item describes one secret without its value.
type Item struct {
	Name    string    `json:"name"`
	Changed time.Time `json:"changed"`
	Serial  uint64    `json:"serial"`
}

// Vault is one vault, locked at first. It is safe for concurrent use, also by several
// processes: each write takes the file's lock and begins with what is on disk.
type Vault struct {
	dir     string
	keyring Keyring // nil: none

	mu       sync.Mutex
	key      *age.X25519Identity // nil: locked
	held     content
	stamp    fileStamp // of the file that held was read from
	haveHeld bool
}

type fileStamp struct {
	modified time.Time
	size     int64
	info     fs.FileInfo
}

// Open returns the vault in dir; nothing is read yet, and dir may not be there.
func Open(dir string, keyring Keyring) *Vault { return &Vault{dir: dir, keyring: keyring} }

// workFactor is age's own (about a second) unless a test has no time for it.
var workFactor int

const keyringService = "waybill-vault"

// InitOptions say how the key of a new vault is kept: exactly one of them.
type InitOptions struct {
	Passphrase string
	Identity   string // path of an age identity file (X25519); the proxy reads it at its start
	Keyring    bool
}

// Init makes an empty vault, unlocked. It returns ErrExists when there is one.
func (v *Vault) Init(o InitOptions) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if err := os.MkdirAll(v.dir, 0o700); err != nil {
		return err
	}
	unlock, err := lockFile(filepath.Join(v.dir, "lock"))
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Lstat(v.path("vault.json")); err == nil {
		return ErrExists
	}
	key, err := age.GenerateX25519Identity()
	if err != nil {
		return err
	}
	m := meta{Version: 1, Recipient: key.Recipient().String()}
	switch {
	case o.Keyring:
		if v.keyring == nil {
			return ErrNoKeyring
		}
		m.Method = MethodKeyring
		if err := v.keyring.Set(keyringService, m.Recipient, key.String()); err != nil {
			return fmt.Errorf("%w: it cannot be written to", ErrNoKeyring)
		}
	case o.Identity != "":
		m.Method, m.Identity = MethodIdentity, o.Identity
		recipients, err := recipientsOf(o.Identity)
		if err != nil {
			return err
		}
		if err := v.seal("key.age", []byte(key.String()), recipients...); err != nil {
			return err
		}
	default:
		m.Method = MethodPassphrase
		r, err := age.NewScryptRecipient(o.Passphrase)
		if err != nil {
			return errors.New("vault: the passphrase is empty")
		}
		if workFactor > 0 {
			r.SetWorkFactor(workFactor)
		}
		if err := v.seal("key.age", []byte(key.String()), r); err != nil {
			return err
		}
	}
	v.key = key
	if err := v.write(content{Version: 1, Secrets: map[string]entry{}}); err != nil {
		return err
	}
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return err
	}
	// Last: a vault without it is none, and is made again.
	return inject.ReplaceFile(v.path("vault.json"), append(text, '\n'))
}

func (v *Vault) path(name string) string { return filepath.Join(v.dir, name) }

func (v *Vault) seal(name string, plain []byte, to ...age.Recipient) error {
	var b bytes.Buffer
	w, err := age.Encrypt(&b, to...)
	if err != nil {
		return err
	}
	if _, err := w.Write(plain); err != nil {
		return err
	}
	if err := w.Close(); err != nil {
		return err
	}
	return inject.ReplaceFile(v.path(name), b.Bytes())
}

func identitiesOf(file string) ([]age.Identity, error) {
	f, err := os.Open(file)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	ids, err := age.ParseIdentities(io.LimitReader(f, 1<<20))
	if err != nil {
		return nil, fmt.Errorf("%w: %s holds no age identity", ErrKey, file) // its error may quote a line
	}
	return ids, nil
}

func recipientsOf(file string) ([]age.Recipient, error) {
	ids, err := identitiesOf(file)
	if err != nil {
		return nil, err
	}
	var out []age.Recipient
	for _, id := range ids {
		switch x := id.(type) {
		case *age.X25519Identity:
			out = append(out, x.Recipient())
		case *age.HybridIdentity:
			out = append(out, x.Recipient())
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: %s holds no age identity with a recipient", ErrKey, file)
	}
	return out, nil
}

func (v *Vault) meta() (meta, error) {
	text, err := os.ReadFile(v.path("vault.json"))
	if errors.Is(err, fs.ErrNotExist) {
		return meta{}, ErrNone
	}
	if err != nil {
		return meta{}, err
	}
	var m meta
	if json.Unmarshal(text, &m) != nil || m.Version != 1 {
		return meta{}, fmt.Errorf("%w: vault.json", ErrDamaged)
	}
	return m, nil
}

// Method says how the key is kept, or returns ErrNone.
func (v *Vault) Method() (string, error) {
	m, err := v.meta()
	return m.Method, err
}

// Unlock opens the vault. With neither passphrase nor identity it tries what needs
// nobody: the identity file that Init named, or the keyring. It returns ErrKey when that
// does not fit, ErrLocked when a passphrase is needed.
func (v *Vault) Unlock(passphrase, identity string) error {
	m, err := v.meta()
	if err != nil {
		return err
	}
	text, err := v.keyText(m, passphrase, identity)
	if err != nil {
		return err
	}
	key, err := age.ParseX25519Identity(strings.TrimSpace(string(text)))
	clear(text)
	if err != nil || key.Recipient().String() != m.Recipient {
		return fmt.Errorf("%w: another vault's key", ErrKey)
	}
	v.mu.Lock()
	defer v.mu.Unlock()
	v.key, v.haveHeld = key, false
	if _, err := v.read(); err != nil {
		v.key = nil
		return err
	}
	return nil
}

func (v *Vault) keyText(m meta, passphrase, identity string) ([]byte, error) {
	if m.Method == MethodKeyring {
		if v.keyring == nil {
			return nil, ErrNoKeyring
		}
		s, err := v.keyring.Get(keyringService, m.Recipient)
		if err != nil {
			return nil, ErrNoKeyring
		}
		return []byte(s), nil
	}
	var ids []age.Identity
	switch {
	case m.Method == MethodIdentity:
		file := m.Identity
		if identity != "" {
			file = identity
		}
		var err error
		if ids, err = identitiesOf(file); err != nil {
			return nil, err
		}
	case passphrase == "":
		return nil, ErrLocked
	default:
		id, err := age.NewScryptIdentity(passphrase)
		if err != nil {
			return nil, ErrKey
		}
		ids = []age.Identity{id}
	}
	sealed, err := os.ReadFile(v.path("key.age"))
	if err != nil {
		return nil, err
	}
	text, err := open(sealed, ids...)
	var wrong *age.NoIdentityMatchError
	switch {
	case errors.As(err, &wrong):
		return nil, ErrKey
	case err != nil:
		return nil, fmt.Errorf("%w: key.age", ErrDamaged)
	}
	return text, nil
}

func open(sealed []byte, ids ...age.Identity) ([]byte, error) {
	r, err := age.Decrypt(bytes.NewReader(sealed), ids...)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(r)
}

// Lock forgets the key and what was read.
func (v *Vault) Lock() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if control.Off("C1-vault-locks") {
		return
	}
	v.key = nil
	v.forget()
}

func (v *Vault) forget() {
	for _, e := range v.held.Secrets {
		clear(e.Value)
	}
	v.held, v.haveHeld = content{}, false
}

// Locked reports whether the key is not there.
func (v *Vault) Locked() bool {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.key == nil
}

// read returns what is on disk, from memory when the file is the same. v.mu is held.
func (v *Vault) read() (content, error) {
	if v.key == nil {
		if _, err := os.Lstat(v.path("vault.json")); v.dir != "" && errors.Is(err, fs.ErrNotExist) {
			return content{}, ErrNone
		}
		return content{}, ErrLocked
	}
	info, err := os.Stat(v.path("secrets.age"))
	if errors.Is(err, fs.ErrNotExist) {
		return content{}, ErrNone
	}
	if err != nil {
		return content{}, err
	}
	// Each write makes a new file: name, inode and times together tell them apart.
	if v.haveHeld && os.SameFile(info, v.stamp.info) && info.ModTime().Equal(v.stamp.modified) && info.Size() == v.stamp.size {
		return v.held, nil
	}
	sealed, err := os.ReadFile(v.path("secrets.age"))
	if err != nil {
		return content{}, err
	}
	plain, err := open(sealed, v.key)
	if err != nil {
		return content{}, fmt.Errorf("%w: secrets.age", ErrDamaged)
	}
	defer clear(plain)
	var c content
	if json.Unmarshal(plain, &c) != nil || c.Version != 1 {
		return content{}, fmt.Errorf("%w: secrets.age", ErrDamaged)
	}
	v.forget()
	v.held, v.haveHeld, v.stamp = c, true, fileStamp{info.ModTime(), info.Size(), info}
	return c, nil
}

// write replaces what is on disk. v.mu is held.
func (v *Vault) write(c content) error {
	plain, err := json.Marshal(c)
	if err != nil {
		return err
	}
	defer clear(plain)
	v.haveHeld = false
	return v.seal("secrets.age", plain, v.key.Recipient())
}

// change applies f to what is on disk, under the lock of the file.
func (v *Vault) change(f func(c *content) error) error {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.key == nil {
		if _, err := v.meta(); err != nil {
			return err
		}
		return ErrLocked
	}
	unlock, err := lockFile(v.path("lock"))
	if err != nil {
		return err
	}
	defer unlock()
	v.haveHeld = false
	c, err := v.read()
	if err != nil {
		return err
	}
	if c.Secrets == nil {
		c.Secrets = map[string]entry{}
	}
	if err := f(&c); err != nil {
		return err
	}
	return v.write(c)
}

// Set stores a secret under a name, new or in place of the one that is there.
func (v *Vault) Set(name string, value []byte) error {
	return v.change(func(c *content) error {
		c.Secrets[name] = entry{Value: bytes.Clone(value), Changed: time.Now().UTC().Truncate(time.Millisecond), Serial: c.Secrets[name].Serial + 1}
		return nil
	})
}

// Remove removes a secret, or returns ErrNotFound.
func (v *Vault) Remove(name string) error {
	return v.change(func(c *content) error {
		if _, ok := c.Secrets[name]; !ok {
			return ErrNotFound
		}
		delete(c.Secrets, name)
		return nil
	})
}

// Get returns a copy of a secret and the number of its values so far.
func (v *Vault) Get(name string) (value []byte, serial uint64, err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	c, err := v.read()
	if err != nil {
		return nil, 0, err
	}
	e, ok := c.Secrets[name]
	if !ok {
		return nil, 0, ErrNotFound
	}
	return bytes.Clone(e.Value), e.Serial, nil
}

// List returns the names, sorted.
func (v *Vault) List() ([]Item, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	c, err := v.read()
	if err != nil {
		return nil, err
	}
	out := make([]Item, 0, len(c.Secrets))
	for name, e := range c.Secrets {
		out = append(out, Item{name, e.Changed, e.Serial})
	}
	slices.SortFunc(out, func(a, b Item) int { return strings.Compare(a.Name, b.Name) })
	return out, nil
}
