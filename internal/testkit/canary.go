package testkit

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

const (
	canaryLen = 48 // bytes of a canary
	// A canary that was split into two pieces leaves one of at least half its length.
	// Windows of windowLen bytes at every windowStride find any piece of
	// windowLen+windowStride-1 <= canaryLen/2 bytes.
	windowLen    = 12
	windowStride = 12
)

// Canary is a random secret that must appear at the right upstream and nowhere
// else (CONTRACT C2). It is printable ASCII without a space, begins with "CANARY-"
// and holds bytes that percent-encoding and JSON change. It prints as "[canary]".
type Canary struct {
	value    string
	patterns []pattern
}

type pattern struct {
	name  string
	bytes []byte
}

// NewCanary makes a canary.
func NewCanary(t testing.TB) *Canary {
	t.Helper()
	const letters = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/<&"
	b := make([]byte, canaryLen)
	if _, err := rand.Read(b); err != nil {
		t.Fatalf("testkit: canary: %v", err)
	}
	for i := range b {
		b[i] = letters[int(b[i])%len(letters)]
	}
	copy(b, "CANARY-")
	b[15], b[27], b[39] = '+', '/', '&'
	return CanaryOf(string(b))
}

// CanaryOf makes a canary of a given value, of at least 12 bytes.
func CanaryOf(value string) *Canary {
	if len(value) < windowLen {
		panic("testkit: a canary needs at least 12 bytes")
	}
	c := &Canary{value: value}
	for o := 0; ; o += windowStride {
		o = min(o, len(value)-windowLen)
		// The first window would be mostly the same for every canary, and is found
		// where only "CANARY-" and a few bytes more are: that is intended.
		c.addWindow([]byte(value[o : o+windowLen]))
		if o == len(value)-windowLen {
			return c
		}
	}
}

func (c *Canary) addWindow(w []byte) {
	add := func(name string, b string) {
		for _, p := range c.patterns {
			if string(p.bytes) == b {
				return
			}
		}
		c.patterns = append(c.patterns, pattern{name, []byte(b)})
	}
	add("raw", string(w))
	add("hex", hex.EncodeToString(w))
	add("HEX", strings.ToUpper(hex.EncodeToString(w)))
	var reversed []byte
	for i := len(w) - 1; i >= 0; i-- {
		reversed = append(reversed, w[i])
	}
	add("reversed", string(reversed))
	for lead := range 3 {
		// lead bytes of unknown text share the first group: the characters that depend
		// on the window alone begin after it.
		core := w[(3-lead)%3:]
		core = core[:len(core)/3*3]
		add("base64", base64.RawStdEncoding.EncodeToString(core))
		add("base64url", base64.RawURLEncoding.EncodeToString(core))
	}
}

// Value is the secret itself, to be given to the program under test.
func (c *Canary) Value() string { return c.value }

// File writes the value into a file of mode 0600 in the test's temp folder and
// returns its path.
func (c *Canary) File(t testing.TB) string {
	t.Helper()
	return WriteFile(t, "secret", []byte(c.value))
}

// Format keeps the value out of failure messages.
func (c *Canary) Format(s fmt.State, _ rune) { _, _ = s.Write([]byte("[canary]")) }

// Place is where a canary was found. It never holds the value.
type Place struct {
	Where    string // file path, or the name of the text
	Encoding string // raw, hex, base64, …, with "percent " or "escaped " in front
	Offset   int    // in bytes, in the decoded form for percent and escaped
}

// String is "where at offset (encoding)".
func (p Place) String() string {
	return p.Where + " at " + strconv.Itoa(p.Offset) + " (" + p.Encoding + ")"
}

// Where is something to be searched: In, InBytes, InString, InProcess.
type Where struct {
	name string
	data []byte
	path string
	err  error
}

// In searches a file, or every file below a folder: contents, names and the
// targets of symbolic links. A path that does not exist fails the search.
func In(path string) Where { return Where{name: path, path: path} }

// InBytes searches bytes; name is for the report.
func InBytes(name string, data []byte) Where { return Where{name: name, data: data} }

// InString searches a text; name is for the report.
func InString(name, text string) Where { return InBytes(name, []byte(text)) }

// InProcess searches the arguments and the environment of a running process.
func InProcess(pid int) Where {
	w := Where{name: fmt.Sprintf("process %d", pid)}
	for _, f := range []string{"cmdline", "environ"} {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, f))
		if err != nil {
			w.err = err
			return w
		}
		w.data = append(append(w.data, b...), 0)
	}
	return w
}

// Search fails the test for every place where the canary, or half of it, is found:
// raw, hex, base64 in all alignments and both alphabets, percent-encoded,
// \u-escaped, reversed. It cannot see through compression or encryption: switch
// compression off where bytes on disk are searched.
func Search(t testing.TB, c *Canary, where ...Where) {
	t.Helper()
	if len(where) == 0 {
		t.Fatal("testkit: Search has nothing to search")
	}
	places, err := c.Find(where...)
	if err != nil {
		t.Errorf("testkit: canary search: %v", err)
	}
	for _, p := range places {
		t.Errorf("testkit: secret found in %s", p)
	}
}

// RequireFound fails the test unless the canary is found in each of the places:
// the control of a Search, and the proof that it reached its upstream.
func RequireFound(t testing.TB, c *Canary, where ...Where) {
	t.Helper()
	for _, w := range where {
		places, err := c.Find(w)
		if err != nil {
			t.Errorf("testkit: canary search: %v", err)
		}
		if len(places) == 0 {
			t.Errorf("testkit: secret not found in %s", w.name)
		}
	}
}

// Find returns the first place per searched file, text and encoding.
func (c *Canary) Find(where ...Where) ([]Place, error) {
	var out []Place
	for _, w := range where {
		if w.err != nil {
			return out, w.err
		}
		if w.path == "" {
			out = append(out, c.find(w.name, w.data)...)
			continue
		}
		err := filepath.WalkDir(w.path, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				if os.IsNotExist(err) && path != w.path {
					return nil // gone meanwhile, as temp files go
				}
				return err
			}
			if path != w.path {
				out = append(out, c.find("the name of "+filepath.Dir(path)+"/…", []byte(d.Name()))...)
			}
			var data []byte
			switch {
			case d.Type()&fs.ModeSymlink != 0:
				target, err := os.Readlink(path)
				if err != nil {
					return nil
				}
				data = []byte(target)
			case d.Type().IsRegular():
				if data, err = readData(path); err != nil {
					if os.IsNotExist(err) {
						return nil
					}
					return err
				}
			default:
				return nil // folders, sockets, pipes
			}
			out = append(out, c.find(path, data)...)
			return nil
		})
		if err != nil {
			return out, err
		}
	}
	return out, nil
}

// readData reads a file without its holes, of which files that are made long beforehand are
// full, and without the zeros at its end.
func readData(path string) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer func() { _ = f.Close() }()
	var out []byte
	for end := int64(0); ; {
		begin, err := f.Seek(end, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) { // nothing but a hole is left
			return trimZeros(out), nil
		}
		if err == nil {
			end, err = f.Seek(begin, unix.SEEK_HOLE)
		}
		if err != nil {
			return nil, err
		}
		at := len(out)
		out = append(out, make([]byte, end-begin)...)
		n, err := f.ReadAt(out[at:], begin)
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		out = append(out[:at+n], 0) // what is behind a hole is no continuation
	}
}

var zeros [4096]byte

func trimZeros(b []byte) []byte {
	for len(b) >= len(zeros) && bytes.Equal(b[len(b)-len(zeros):], zeros[:]) {
		b = b[:len(b)-len(zeros)]
	}
	return bytes.TrimRight(b, "\x00")
}

var (
	percentRun = regexp.MustCompile(`%[0-9A-Fa-f]{2}`)
	escapeRun  = regexp.MustCompile(`\\(u00[0-9A-Fa-f]{2}|x[0-9A-Fa-f]{2}|[/"\\])`)
)

func (c *Canary) find(where string, data []byte) []Place {
	out := c.findIn(where, "", data)
	if bytes.IndexByte(data, '%') >= 0 {
		decoded := percentRun.ReplaceAllFunc(data, func(m []byte) []byte { return unhex(m[1:]) })
		out = append(out, c.findIn(where, "percent ", decoded)...)
	}
	if bytes.IndexByte(data, '\\') >= 0 {
		decoded := escapeRun.ReplaceAllFunc(data, func(m []byte) []byte {
			if m[1] == 'u' || m[1] == 'x' {
				return unhex(m[len(m)-2:])
			}
			return m[1:]
		})
		out = append(out, c.findIn(where, "escaped ", decoded)...)
	}
	return out
}

func unhex(m []byte) []byte {
	b, err := hex.DecodeString(string(m))
	if err != nil {
		return m
	}
	return b
}

func (c *Canary) findIn(where, prefix string, data []byte) []Place {
	var out []Place
	seen := map[string]bool{}
	for _, p := range c.patterns {
		if seen[p.name] {
			continue
		}
		if i := bytes.Index(data, p.bytes); i >= 0 {
			seen[p.name] = true
			out = append(out, Place{where, prefix + p.name, i})
		}
	}
	return out
}
