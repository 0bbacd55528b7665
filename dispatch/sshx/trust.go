package sshx

import (
	"bytes"
	"crypto/hmac"
	"crypto/sha1" //nolint:gosec // the form of hashed known_hosts names
	"encoding/base64"
	"errors"
	"fmt"
	"net"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/crypto/ssh"
)

// Trust is what host keys are verified against. It is immutable.
type Trust struct {
	lines []trustLine
	pins  []string
}

type trustLine struct {
	number    int
	authority bool // @cert-authority
	revoked   bool // @revoked
	hosts     []string
	key       ssh.PublicKey
}

// ErrKnownHosts is wrapped by the errors of ParseTrust.
var ErrKnownHosts = errors.New("not a line of a known_hosts file")

// ParseTrust reads the lines of known_hosts files (sshd(8)) and fingerprints
// ("SHA256:…"). Errors wrap ErrKnownHosts and name the line.
func ParseTrust(knownHosts []byte, pins []string) (*Trust, error) {
	t := &Trust{pins: slices.Clone(pins)}
	number := 0
	for line := range bytes.SplitSeq(knownHosts, []byte("\n")) {
		number++
		line = bytes.TrimSpace(line)
		if len(line) == 0 || line[0] == '#' {
			continue
		}
		marker, hosts, key, _, _, err := ssh.ParseKnownHosts(line)
		if err != nil {
			return nil, fmt.Errorf("%w: line %d", ErrKnownHosts, number)
		}
		l := trustLine{number: number, hosts: hosts, key: key}
		switch marker {
		case "":
		case "cert-authority":
			l.authority = true
		case "revoked":
			l.revoked = true
		default:
			return nil, fmt.Errorf("%w: line %d: unknown marker", ErrKnownHosts, number)
		}
		for _, h := range hosts {
			if strings.HasPrefix(h, "|") && !hashedForm(h) {
				return nil, fmt.Errorf("%w: line %d: a hashed name is malformed", ErrKnownHosts, number)
			}
		}
		t.lines = append(t.lines, l)
	}
	return t, nil
}

// without is the trust for what lies behind a host that showed this key: a pin names no
// host, and a jump host must not pass for the target (CONTRACT G7).
func (t *Trust) without(fingerprint string) *Trust {
	return &Trust{lines: t.lines, pins: slices.DeleteFunc(slices.Clone(t.pins), func(p string) bool { return p == fingerprint })}
}

func hashedForm(h string) bool {
	_, _, ok := splitHashed(h)
	return ok
}

func splitHashed(h string) (salt, sum []byte, ok bool) {
	parts := strings.Split(h, "|")
	if len(parts) != 4 || parts[0] != "" || parts[1] != "1" {
		return nil, nil, false
	}
	salt, err1 := base64.StdEncoding.DecodeString(parts[2])
	sum, err2 := base64.StdEncoding.DecodeString(parts[3])
	return salt, sum, err1 == nil && err2 == nil && len(sum) == sha1.Size
}

// hostName is a host as known_hosts files write it.
func hostName(host string, port int) string {
	if port == 22 {
		return strings.ToLower(host)
	}
	return "[" + strings.ToLower(host) + "]:" + strconv.Itoa(port)
}

// matches reports whether the line is about the host: some pattern takes it, and no
// negated one does.
func (l *trustLine) matches(name string) bool {
	found := false
	for _, p := range l.hosts {
		negated := strings.HasPrefix(p, "!")
		p = strings.TrimPrefix(p, "!")
		hit := false
		if salt, sum, ok := splitHashed(p); ok {
			mac := hmac.New(sha1.New, salt)
			mac.Write([]byte(name))
			hit = hmac.Equal(mac.Sum(nil), sum)
		} else {
			hit = globbed(strings.ToLower(p), name)
		}
		if hit && negated {
			return false
		}
		found = found || hit
	}
	return found
}

// globbed matches "*" and "?" of known_hosts patterns.
func globbed(p, s string) bool {
	star, mark := -1, 0
	i, j := 0, 0
	for j < len(s) {
		switch {
		case i < len(p) && p[i] == '*':
			star, mark = i, j
			i++
		case i < len(p) && (p[i] == '?' || p[i] == s[j]):
			i++
			j++
		case star >= 0:
			mark++
			i, j = star+1, mark
		default:
			return false
		}
	}
	return strings.Trim(p[i:], "*") == ""
}

// hostKeyError refuses a host key. Fingerprints are public.
type hostKeyError struct{ reason, detail string }

func (e *hostKeyError) Error() string { return "ssh host key: " + e.reason }

// check verifies a host's key (CONTRACT G7). Its error is a *hostKeyError.
func (t *Trust) check(host string, port int, key ssh.PublicKey) error {
	name := hostName(host, port)
	plain := key
	cert, certified := key.(*ssh.Certificate)
	if certified {
		plain = cert.Key
	}
	shown := describe(plain)
	for i := range t.lines {
		l := &t.lines[i]
		if l.revoked && l.matches(name) && (same(l.key, plain) || certified && same(l.key, cert.SignatureKey)) {
			return &hostKeyError{"host_key_revoked", fmt.Sprintf("The host key %s is revoked by line %d of the known hosts.", shown, l.number)}
		}
	}
	if slices.Contains(t.pins, ssh.FingerprintSHA256(plain)) {
		return nil
	}
	if certified {
		for i := range t.lines {
			l := &t.lines[i]
			if !l.authority || !l.matches(name) || !same(l.key, cert.SignatureKey) {
				continue
			}
			c := ssh.CertChecker{IsHostAuthority: func(auth ssh.PublicKey, _ string) bool { return same(auth, l.key) }}
			if err := c.CheckHostKey(net.JoinHostPort(host, strconv.Itoa(port)), nil, key); err != nil {
				return &hostKeyError{"host_certificate_invalid", fmt.Sprintf("The host's certificate is not valid for %s; its authority is that of line %d of the known hosts.", name, l.number)}
			}
			return nil
		}
	}
	var known []string
	changed := false
	for i := range t.lines {
		l := &t.lines[i]
		if l.authority || l.revoked || !l.matches(name) {
			continue
		}
		if same(l.key, plain) {
			return nil
		}
		changed = changed || l.key.Type() == plain.Type()
		known = append(known, fmt.Sprintf("%s (line %d)", describe(l.key), l.number))
	}
	switch {
	case changed:
		return &hostKeyError{"host_key_changed", fmt.Sprintf("The host key changed: the host shows %s, the known hosts say %s.", shown, strings.Join(known, ", "))}
	case len(known) > 0:
		return &hostKeyError{"host_key_other_type", fmt.Sprintf("The host shows %s, the known hosts name keys of other types only: %s.", shown, strings.Join(known, ", "))}
	default:
		return &hostKeyError{"host_key_unknown", fmt.Sprintf("No known host, pin or authority names %s, which shows %s.", name, shown)}
	}
}

func describe(k ssh.PublicKey) string { return k.Type() + " " + ssh.FingerprintSHA256(k) }

func same(a, b ssh.PublicKey) bool { return bytes.Equal(a.Marshal(), b.Marshal()) }

// Host key algorithms that are offered, best first. Those on NIST curves are offered
// only to hosts that are known by such a key alone, or that had no other when nothing but
// a pin says what they have.
var (
	plainAlgorithms = []string{ssh.KeyAlgoED25519, ssh.KeyAlgoRSASHA512, ssh.KeyAlgoRSASHA256}
	certAlgorithms  = []string{ssh.CertAlgoED25519v01, ssh.CertAlgoRSASHA512v01, ssh.CertAlgoRSASHA256v01}
	curveAlgorithms = []string{ssh.KeyAlgoECDSA256, ssh.KeyAlgoECDSA384, ssh.KeyAlgoECDSA521}
)

// algorithms are offered so that a host with several keys shows the one that is known.
// curves: a host of which no key is known by name had none of the better ones.
func (t *Trust) algorithms(host string, port int, curves bool) []string {
	name := hostName(host, port)
	types := map[string]bool{}
	authority := false
	for i := range t.lines {
		l := &t.lines[i]
		switch {
		case l.revoked || !l.matches(name):
		case l.authority:
			authority = true
		default:
			types[l.key.Type()] = true
		}
	}
	var out []string
	if authority {
		out = append(out, certAlgorithms...)
	}
	for _, a := range plainAlgorithms {
		if types[a] || types[ssh.KeyAlgoRSA] && a != ssh.KeyAlgoED25519 {
			out = append(out, a)
		}
	}
	if len(out) == 0 {
		for _, a := range curveAlgorithms {
			if types[a] {
				out = append(out, a)
			}
		}
	}
	if len(out) == 0 || len(t.pins) > 0 {
		// Nothing is known by name: whatever it shows is compared with the pins, or named in
		// the refusal.
		more := plainAlgorithms
		if curves {
			more = slices.Concat(plainAlgorithms, curveAlgorithms)
		}
		for _, a := range more {
			if !slices.Contains(out, a) {
				out = append(out, a)
			}
		}
	}
	return out
}
