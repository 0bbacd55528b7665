package config

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"hash"
	"io"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"time"
	"unicode/utf8"

	"gopkg.in/yaml.v3"

	"waybill/inject"
	"waybill/routes"
)

// Config is one configuration file, checked and complete. It is not changed after
// it was made.
type Config struct {
	// Version is the form of the file; 1 is the only one.
	Version int
	// Listen says where the process listens.
	Listen Listen
	// Journal says how much of the past is kept.
	Journal Journal
	// Audit says whether an audit log is written. It is read at a start.
	Audit Audit
	// Approvals say who is told of them and where signed decisions are taken. Read at a start.
	Approvals Approvals
	// Callers are who may use the proxy. Empty: anybody who reaches a loopback
	// listener (CONTRACT V4).
	Callers []Caller
	// Credentials say where secrets come from, in file order. Nothing was fetched.
	Credentials []inject.Credential
	// Snapshot holds the routes and the default (CONTRACT D1).
	Snapshot *routes.Snapshot
	// Presets says which routes come from a preset, by name of the route.
	Presets map[string]PresetUse
	// Digest is the snapshot's: routes, default, credentials (ids, labels, places) and
	// callers. Listeners are not in it.
	Digest string
	// Warnings are what was probably not meant. They stop nothing.
	Warnings []Problem
	// Path is the file, as it was given to Load or Parse.
	Path string
	// Files are the other files whose content is part of the configuration (roots).
	Files []string
}

// Listen are the addresses of the listeners. A host and a port ("127.0.0.1:7171"),
// or "unix:" and a path for Admin. Port 0 lets the system choose.
type Listen struct {
	Proxy   string // the proxy and the caller API; default 127.0.0.1:7171
	SSH     string // the SSH endpoint; default 127.0.0.1:7172
	Admin   string // administration; "" is unix:<data>/admin.sock (CONTRACT V5)
	Metrics string // /metrics, /livez, /readyz; default 127.0.0.1:7174
	// ProxyTLS is what callers of the proxy speak; nil: plain TCP.
	ProxyTLS *ListenTLS
}

// ListenTLS names the files of a TLS listener. ClientCA verifies callers' certificates;
// "": none are asked for.
type ListenTLS struct{ Certificate, Key, ClientCA string }

// Journal bounds what the journal keeps. Open actions and unknown ones that were not
// resolved are kept in any case.
type Journal struct {
	Retention time.Duration // of the records of ended actions; default 30 days
	MaxSize   int64         // bytes of records and results; default 2 GiB
}

// DefaultJournal returns the bounds of a file that names none.
func DefaultJournal() Journal { return Journal{Retention: 30 * 24 * time.Hour, MaxSize: 2 << 30} }

// Caller is one caller of the proxy. Its token is not in the file.
type Caller struct {
	Name        string
	TokenSHA256 [32]byte
	// Or one of these: of a client certificate, or a Kubernetes service account.
	CertificateSHA256 *[32]byte         `json:",omitempty"`
	Subject           string            `json:",omitempty"`
	Kubernetes        *KubernetesCaller `json:",omitempty"`
}

// DefaultListen returns the listeners of a file that names none (DESIGN section 4).
func DefaultListen() Listen {
	return Listen{Proxy: "127.0.0.1:7171", SSH: "127.0.0.1:7172", Metrics: "127.0.0.1:7174"}
}

// Defaults returns what an empty but valid file ("version: 1") means: the default
// listeners, no caller, no credential, no route, and deny for every request. The
// defaults of a route are the zero value of routes.Route and routes.DefaultLimits.
func Defaults() *Config {
	snapshot, err := routes.NewSnapshot(nil, routes.Deny, extraDigest(nil, nil))
	if err != nil {
		panic(err) // no routes: nothing can be wrong with them
	}
	return &Config{Version: 1, Listen: DefaultListen(), Journal: DefaultJournal(), Snapshot: snapshot, Digest: snapshot.Digest()}
}

// ErrTooLarge is wrapped by Load for a file above 4 MiB.
var ErrTooLarge = errors.New("the file is larger than 4MiB")

// Load reads the file at path. Files it names are read relative to its folder. The
// error is Errors for what stands in the file, else it wraps an error of the file
// system (fs.ErrNotExist and so on) or ErrTooLarge.
func Load(path string) (*Config, error) {
	c, _, err := LoadSources(path)
	return c, err
}

// LoadSources is Load that also tells what was read, on failure, too.
func LoadSources(path string) (*Config, Sources, error) {
	h := newContentHash()
	data, err := h.read(path, maxFileBytes)
	if err != nil {
		return nil, Sources{[]string{path}, h.sum()}, fmt.Errorf("config: %w", err)
	}
	c, files, err := parse(path, data, func(path string) ([]byte, error) { return h.read(path, maxRootsBytes) })
	return c, Sources{append([]string{path}, files...), h.sum()}, err
}

// Parse reads data as a file called name, whose folder is where relative file names
// start. The error is always Errors.
func Parse(name string, data []byte) (*Config, error) {
	c, _, err := parse(name, data, func(path string) ([]byte, error) { return readBounded(path, maxRootsBytes) })
	return c, err
}

type digest [sha256.Size]byte

// digestFiles digests what LoadSources would read if the files were still the same ones.
func digestFiles(path string, others []string) digest {
	h := newContentHash()
	_, _ = h.read(path, maxFileBytes) // an error counts as content
	for _, f := range others {
		_, _ = h.read(f, maxRootsBytes)
	}
	return h.sum()
}

// contentHash digests files as they are read; one that cannot be read counts by its
// error.
type contentHash struct{ h hash.Hash }

func newContentHash() contentHash { return contentHash{sha256.New()} }

func (c contentHash) read(path string, limit int64) ([]byte, error) {
	data, err := readBounded(path, limit)
	counted := data
	if err != nil {
		counted = []byte(err.Error())
	}
	fmt.Fprintf(c.h, "%d %s %t %d ", len(path), path, err == nil, len(counted))
	c.h.Write(counted)
	return data, err
}

func (c contentHash) sum() (d digest) {
	c.h.Sum(d[:0])
	return d
}

// maxRootsBytes bounds a file of trust anchors: all public roots together need a
// quarter of it.
const maxRootsBytes = 1 << 20

// readBounded reads a regular file (symbolic links are followed). Devices, pipes and
// folders are refused before they are opened for reading: a pipe would block.
func readBounded(path string, limit int64) ([]byte, error) {
	info, err := os.Stat(path)
	if err != nil {
		return nil, err
	}
	if !info.Mode().IsRegular() {
		return nil, &fs.PathError{Op: "read", Path: path, Err: errNotRegular}
	}
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	data, err := io.ReadAll(io.LimitReader(f, limit+1))
	if err != nil {
		return nil, err
	}
	if int64(len(data)) > limit {
		return nil, &fs.PathError{Op: "read", Path: path, Err: ErrTooLarge}
	}
	return data, nil
}

var errNotRegular = errors.New("it is not a regular file")

func parse(name string, data []byte, readFile func(string) ([]byte, error)) (*Config, []string, error) {
	r := &reader{file: name, readFile: readFile}
	var c *Config
	if doc := r.document(data); doc != nil {
		c = r.root(doc)
	}
	if len(r.problems) > 0 {
		sortProblems(r.problems)
		return nil, r.read, Errors(r.problems)
	}
	sortProblems(r.warnings)
	c.Path, c.Warnings, c.Files = name, r.warnings, r.read
	return c, r.read, nil
}

// document decodes the one document of a file, or reports why not.
func (r *reader) document(data []byte) *yaml.Node {
	if len(data) > maxFileBytes {
		r.fail(nil, "", ErrTooLarge.Error(), "split the deployment")
		return nil
	}
	if n, bad := badText(data); bad {
		r.fail(n, "", "the file is not plain UTF-8 text", "remove the control or foreign bytes here")
		return nil
	}
	dec := yaml.NewDecoder(bytes.NewReader(data))
	doc, err := decode(dec)
	switch {
	case errors.Is(err, io.EOF) || err == nil && len(doc.Content) == 1 && doc.Content[0].ShortTag() == "!!null" && doc.Content[0].Value == "":
		r.fail(nil, "", "the file is empty", "begin with version: 1 (a file with only that line refuses every request)")
		return nil
	case err != nil:
		r.syntax(err, data)
		return nil
	}
	second, err := decode(dec)
	switch {
	case errors.Is(err, io.EOF):
	case err != nil:
		r.syntax(err, data)
		return nil
	default:
		r.fail(second, "", "a second document begins here", "remove the --- line; a file is one document")
	}
	return doc.Content[0]
}

// decode turns a panic of the YAML library into an error: it reads text of any kind.
func decode(dec *yaml.Decoder) (doc *yaml.Node, err error) {
	defer func() {
		if p := recover(); p != nil {
			doc, err = nil, errYAMLPanic
		}
	}()
	doc = new(yaml.Node)
	if err := dec.Decode(doc); err != nil {
		return nil, err
	}
	if doc.Kind != yaml.DocumentNode || len(doc.Content) != 1 {
		return nil, errYAMLPanic
	}
	return doc, nil
}

var errYAMLPanic = errors.New("yaml: this text cannot be read as YAML")

var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?(.*)`)

// syntax reports an error of the YAML library, which gives lines in its text only.
func (r *reader) syntax(err error, data []byte) {
	n := &yaml.Node{Line: 1, Column: 1}
	what := "cannot be read as YAML"
	if m := yamlLine.FindStringSubmatch(firstLine(err.Error())); m != nil {
		if l, err := strconv.Atoi(m[1]); err == nil {
			// The library counts from 0 in some messages: never point behind the end.
			n.Line = max(1, min(l, 1+bytes.Count(data, []byte("\n"))))
		}
		if text := m[2]; strings.HasPrefix(text, "unknown anchor") {
			what += ": an alias refers to an anchor that is not there" // the library would quote it
		} else if text != "" {
			what += ": " + text
		}
	}
	if lines := bytes.Split(data, []byte("\n")); n.Line <= len(lines) {
		line := lines[n.Line-1]
		n.Column += len(line) - len(bytes.TrimLeft(line, " "))
	}
	r.fail(n, "", what, "check indentation, quotes and brackets at and above this line")
}

func firstLine(s string) string {
	s, _, _ = strings.Cut(s, "\n")
	return s
}

// badText finds the first byte that is no UTF-8, or a control character other than
// tab and line ends.
func badText(data []byte) (*yaml.Node, bool) {
	line, column := 1, 1
	for i := 0; i < len(data); {
		c, size := utf8.DecodeRune(data[i:])
		if c == utf8.RuneError && size == 1 || c < ' ' && c != '\t' && c != '\n' && c != '\r' || c == 0x7f || 0x80 <= c && c < 0xa0 && c != 0x85 {
			return &yaml.Node{Line: line, Column: column}, true
		}
		column++
		if c == '\n' {
			line, column = line+1, 1
		}
		i += size
	}
	return nil, false
}

var rootSchema = schema{
	keys: []string{"version", "listen", "journal", "audit", "approvals", "callers", "credentials", "routes", "default"},
}

func (r *reader) root(n *yaml.Node) *Config {
	o := r.object(n, "", rootSchema)
	if o == nil {
		return nil
	}
	c := &Config{Version: 1, Listen: DefaultListen(), Journal: DefaultJournal()}
	if v, path, ok := o.get("version"); !ok {
		r.fail(o.node, "version", "is missing", "add version: 1 as the first line")
	} else if v, ok := r.deref(v, path); ok && (v.Kind != yaml.ScalarNode || v.Value != "1" || v.ShortTag() != "!!int") {
		r.fail(v, path, "is no version this program knows", "write version: 1, or use a newer waybill")
	}
	if v, path, ok := o.get("callers"); ok {
		c.Callers = r.callers(v, path)
	}
	if v, path, ok := o.get("listen"); ok {
		c.Listen = r.listen(v, path, c.Callers)
	} else {
		r.certificateCallers(o, nil, c.Callers)
	}
	if v, path, ok := o.get("journal"); ok {
		c.Journal = r.journal(v, path)
	}
	if v, path, ok := o.get("audit"); ok {
		c.Audit = r.audit(v, path)
	}
	var creds *credentials
	if v, path, ok := o.get("credentials"); ok {
		creds = r.credentials(v, path)
	} else {
		creds = &credentials{byID: map[string]*credential{}}
	}
	def := routes.Default(o.enum("default", "deny", "tunnel"))
	var list []routes.Route
	var nodes []*yaml.Node
	var paths []string
	if v, path, ok := o.get("routes"); ok {
		list, nodes, paths = r.routes(v, path, creds, c.Callers)
	}
	if len(list) == 0 && def == routes.Deny {
		r.warn(o.node, "routes", "there are no routes: every request is refused", "add one")
	}
	if v, path, ok := o.get("approvals"); ok {
		c.Approvals = r.approvals(v, path, creds)
	}
	for _, cr := range creds.list {
		if !cr.used {
			r.warn(cr.key, "credentials."+shownKey(cr.ID), "no route uses this credential", "use it in an inject entry, or remove it")
		}
		c.Credentials = append(c.Credentials, cr.Credential)
	}
	if len(r.problems) > 0 {
		return c
	}
	snapshot, err := routes.NewSnapshot(list, def, extraDigest(creds.list, c.Callers))
	if err != nil {
		// Every rule of routes is checked above with a position; this is the net below.
		r.fail(o.node, "routes", err.Error(), "correct the route")
		return c
	}
	r.shadows(snapshot, nodes, paths)
	c.Presets = r.uses
	c.Snapshot, c.Digest = snapshot, snapshot.Digest()
	return c
}

// extraDigest encodes what decides besides the routes: where secrets come from and
// who may ask (CONTRACT D1). No secret is in it.
func extraDigest(creds []*credential, callers []Caller) []byte {
	type cred struct{ ID, Label, Kind, Place string }
	list := make([]cred, 0, len(creds))
	for _, c := range creds {
		list = append(list, cred{c.ID, c.Label, c.Kind(), c.Spec.Place()})
	}
	text, err := json.Marshal(struct {
		Credentials []cred
		Callers     []Caller
	}{list, callers})
	if err != nil {
		panic(err) // strings and byte arrays only
	}
	return text
}

// shadows warns of routes that are never reached (case CF-01 f: two routes that
// match the same request are allowed, the first in the file wins).
func (r *reader) shadows(s *routes.Snapshot, nodes []*yaml.Node, paths []string) {
	for _, sh := range s.Shadows() {
		r.warn(nodes[sh.Index], paths[sh.Index],
			"the route "+quoted(sh.Route.Name)+" is never reached: the earlier route "+quoted(sh.By.Name)+" takes everything it takes",
			"put the narrower route first; the first match wins")
	}
}

var journalSchema = schema{keys: []string{"retention", "max_size"}}

func (r *reader) journal(n *yaml.Node, path string) Journal {
	j := DefaultJournal()
	o := r.object(n, path, journalSchema)
	if o == nil {
		return j
	}
	if d := o.duration("retention", time.Hour, 3650*24*time.Hour); d > 0 {
		j.Retention = d
	}
	if b := o.size("max_size", 64<<20, 1<<40); b > 0 {
		j.MaxSize = b
	}
	return j
}

var listenSchema = schema{keys: []string{"proxy", "proxy_tls", "ssh", "admin", "metrics"}}

func (r *reader) listen(n *yaml.Node, path string, callers []Caller) Listen {
	l := DefaultListen()
	o := r.object(n, path, listenSchema)
	if o == nil {
		return l
	}
	o.listener("proxy", &l.Proxy)
	o.listener("ssh", &l.SSH)
	o.listener("metrics", &l.Metrics)
	if n, path, ok := o.get("proxy_tls"); ok {
		l.ProxyTLS = r.listenTLS(n, path)
	}
	r.certificateCallers(o, l.ProxyTLS, callers)
	if s, ok := o.text("admin", "unix: and a path"); ok {
		n, path, _ := o.get("admin")
		socket, unix := strings.CutPrefix(s, "unix:")
		switch {
		case !unix:
			r.fail(n, path, "administration over TCP is not available in this version", "write unix: and the path of a socket")
		case socket == "" || strings.ContainsAny(socket, "\x00\n") || len(socket) > 100:
			r.fail(n, path, "is no usable socket path", "write unix: and a path of at most 100 bytes")
		default:
			l.Admin = s
		}
	}
	for _, p := range CheckListen(l, len(callers) > 0) {
		n, path, ok := o.get(p.Key)
		if !ok {
			n, path = o.node, o.path
		}
		r.fail(n, path, p.What, p.Fix)
	}
	return l
}

func (o *object) listener(key string, into *string) {
	s, ok := o.text(key, "an address such as "+*into)
	if !ok {
		return
	}
	if wrong := checkListenAddress(s); wrong != "" {
		n, path, _ := o.get(key)
		o.r.fail(n, path, wrong, "write host:port, such as "+*into)
		return
	}
	*into = s
}

func checkListenAddress(s string) string {
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		return "is no host:port"
	}
	if p, err := strconv.Atoi(port); err != nil || p < 0 || p > 65535 || strconv.Itoa(p) != port {
		return "has no port from 0 to 65535"
	}
	if host == "" || host == "localhost" {
		return ""
	}
	if _, err := netip.ParseAddr(host); err != nil {
		return "has a host that is no IP address and not localhost"
	}
	return ""
}

// ListenProblem says why a listener may not be opened.
type ListenProblem struct {
	Key       string // "proxy", "ssh", "metrics"
	What, Fix string
}

// CheckListen applies CONTRACT V4 to a set of listeners, from the file or from
// flags: anything but loopback needs callers that authenticate. Metrics carry no
// action and may be open.
func CheckListen(l Listen, callersConfigured bool) []ListenProblem {
	var out []ListenProblem
	for _, e := range []struct{ key, addr string }{{"proxy", l.Proxy}, {"ssh", l.SSH}, {"metrics", l.Metrics}} {
		if wrong := checkListenAddress(e.addr); wrong != "" {
			out = append(out, ListenProblem{e.key, wrong, "write host:port"})
			continue
		}
		if e.key != "metrics" && !callersConfigured && !IsLoopback(e.addr) {
			out = append(out, ListenProblem{e.key, "is reachable from other machines while no callers are configured", "add callers:, or listen on 127.0.0.1"})
		}
	}
	return out
}

// IsLoopback reports whether a listener address can be reached from this machine
// only. A missing host is every address.
func IsLoopback(addr string) bool {
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		return false
	}
	if host == "localhost" {
		return true
	}
	ip, err := netip.ParseAddr(host)
	return err == nil && ip.Unmap().IsLoopback()
}

var callerSchema = schema{
	keys:  []string{"name", "token_sha256", "certificate", "kubernetes"},
	hints: map[string]string{"token": "write token_sha256: with the SHA-256 of the token in hex; the token itself stays out of this file"},
}

func (r *reader) callers(n *yaml.Node, path string) []Caller {
	var out []Caller
	names, tokens := map[string]bool{}, map[[32]byte]bool{}
	count := 0
	listed := r.items(n, path, "a list of name and token_sha256", func(n *yaml.Node, path string) {
		count++
		o := r.object(n, path, callerSchema)
		if o == nil {
			return
		}
		var c Caller
		name, okName := o.need("name", "a name")
		if okName {
			n, path, _ := o.get("name")
			switch {
			case !isName(name):
				r.fail(n, path, "is no usable name", nameFix)
				okName = false
			case name == anyCaller:
				r.fail(n, path, "is a reserved word", "choose another name")
				okName = false
			case names[name]:
				r.fail(n, path, "is the name of an earlier caller", "choose another name")
				okName = false
			}
			names[name] = true
			c.Name = name
		}
		if o.has("certificate") || o.has("kubernetes") {
			if r.otherCaller(o, &c) && okName {
				out = append(out, c)
			}
			return
		}
		token, ok := o.need("token_sha256", "the SHA-256 of the caller's token, 64 hex digits")
		if !ok {
			return
		}
		n, path, _ = o.get("token_sha256")
		sum, ok := parseHex32(token)
		switch {
		case !ok: // perhaps the token itself: never shown
			r.fail(n, path, "is not 64 hex digits", "write the output of: printf %s \"$TOKEN\" | sha256sum")
			return
		case sum == emptySHA256 || sum == [32]byte{}:
			r.fail(n, path, "is the digest of nothing", "write the digest of a real token")
			return
		case tokens[sum]:
			r.fail(n, path, "is the token of an earlier caller", "give each caller its own token")
			return
		}
		tokens[sum] = true
		c.TokenSHA256 = sum
		if okName {
			out = append(out, c)
		}
	})
	if listed && count == 0 {
		r.fail(n, path, "is an empty list", "name a caller, or remove the key")
	}
	return out
}
