package routes

import (
	"errors"
	"net/netip"
	"strconv"
	"strings"
	"unicode/utf8"

	"golang.org/x/net/idna"
)

// ErrBadAuthority is wrapped by every error of ParseAuthority, ParseHost and
// ParseHostPattern. It ends as INVALID_TARGET (CONTRACT B1, case ID-04).
var ErrBadAuthority = errors.New("not an acceptable authority")

// AuthorityError says which rule an authority broke. Reason is one of a fixed set
// of tokens that is safe to record and to show; the refused text is never in it,
// since a userinfo part may hold a secret (CONTRACT C2).
type AuthorityError struct {
	Reason string
}

// Error returns a fixed text with the reason token.
func (e *AuthorityError) Error() string { return "not an acceptable authority: " + e.Reason }

// Unwrap returns ErrBadAuthority.
func (e *AuthorityError) Unwrap() error { return ErrBadAuthority }

// One value per reason: the hot path allocates none.
var (
	errAuthEmpty     = &AuthorityError{"empty"}
	errAuthLong      = &AuthorityError{"too_long"}
	errAuthCharacter = &AuthorityError{"forbidden_character"}
	errAuthUserinfo  = &AuthorityError{"userinfo"}
	errAuthBracket   = &AuthorityError{"bad_brackets"}
	errAuthIPv6      = &AuthorityError{"bad_ipv6_literal"}
	errAuthZone      = &AuthorityError{"ipv6_zone"}
	errAuthIPv4      = &AuthorityError{"bad_ipv4_literal"}
	errAuthPort      = &AuthorityError{"bad_port"}
	errAuthNoPort    = &AuthorityError{"port_missing"}
	errAuthHasPort   = &AuthorityError{"port_not_allowed"}
	errAuthLabel     = &AuthorityError{"bad_label"}
	errAuthIDNA      = &AuthorityError{"not_a_clean_u_label"}
	errAuthWildcard  = &AuthorityError{"bad_wildcard"}
)

const (
	maxHostBytes  = 253 // RFC 1035 section 2.3.4, in presentation form without the root dot
	maxLabelBytes = 63
	// maxAuthorityBytes bounds what is looked at: 253 octets of A-labels never come
	// from more than four times as many bytes of U-labels.
	maxAuthorityBytes = 4*maxHostBytes + len("[]:65535")
)

// ParseAuthority reads "host", "host:port", "[ipv6]" or "[ipv6]:port" (RFC 9110
// section 7.2, RFC 3986 section 3.2) and returns the one canonical form that is
// routed, dialled and verified: lower-case ASCII without the root dot, U-labels as
// A-labels, IP literals as net/netip prints them and without brackets. Without a
// port, defaultPort is returned; defaultPort 0 means that a port must be given, as
// in a CONNECT target (RFC 9110 section 9.3.6).
//
// It is stricter than the RFC on purpose (cases ID-01, ID-04, Q14): userinfo,
// percent-encoding, zones, an empty port, leading zeros in ports, IPv4 in any
// spelling but four decimal numbers, and Unicode that is not already in the form
// IDNA would produce are refused, because another parser on the way might read
// another host. Every error is an *AuthorityError.
func ParseAuthority(s string, defaultPort int) (host string, port int, err error) {
	hostPart, portPart, hasPort, err := splitAuthority(s)
	if err != nil {
		return "", 0, err
	}
	if hasPort {
		if port, err = parsePort(portPart); err != nil {
			return "", 0, err
		}
	} else {
		if defaultPort == 0 {
			return "", 0, errAuthNoPort
		}
		port = defaultPort
	}
	if host, err = canonicalHost(hostPart); err != nil {
		return "", 0, err
	}
	return host, port, nil
}

// ParseHost reads a host without a port, such as a TLS server name, by the rules
// of ParseAuthority. IPv6 literals need brackets.
func ParseHost(s string) (string, error) {
	hostPart, _, hasPort, err := splitAuthority(s)
	if err != nil {
		return "", err
	}
	if hasPort {
		return "", errAuthHasPort
	}
	return canonicalHost(hostPart)
}

// ParseHostPattern reads a host as a route names it: what ParseHost takes, an IPv6
// literal without brackets, or "*." and a host name, which stands for exactly one
// whole left-most label. A lone "*" and a "*" anywhere else are refused.
func ParseHostPattern(s string) (string, error) {
	if suffix, ok := strings.CutPrefix(s, "*."); ok {
		h, err := ParseHost(suffix)
		if err != nil {
			return "", err
		}
		if _, ipErr := netip.ParseAddr(h); ipErr == nil || len(h)+2 > maxHostBytes {
			return "", errAuthWildcard
		}
		return "*." + h, nil
	}
	if strings.Contains(s, "*") {
		return "", errAuthWildcard
	}
	if strings.Count(s, ":") > 1 && !strings.HasPrefix(s, "[") {
		s = "[" + s + "]"
	}
	return ParseHost(s)
}

// delimiter marks the bytes that end a host for some parser, and those that stand in
// no authority. The last rule on each character is in checkName.
var delimiter = func() (t [256]bool) {
	for c := range byte(' ' + 1) {
		t[c] = true
	}
	for _, c := range []byte("\"#%/:<>?@\\^`{|}\x7f") {
		t[c] = true
	}
	return t
}()

// splitAuthority cuts the port off. The host part keeps its brackets.
func splitAuthority(s string) (host, port string, hasPort bool, err error) {
	if s == "" {
		return "", "", false, errAuthEmpty
	}
	if len(s) > maxAuthorityBytes {
		return "", "", false, errAuthLong
	}
	colon := -1
	for i := 0; i < len(s); i++ {
		c := s[i]
		if !delimiter[c] {
			continue
		}
		switch {
		case c == '@':
			return "", "", false, errAuthUserinfo
		case c == ':':
			if s[0] == '[' {
				continue
			}
			if colon >= 0 { // "::1" or "a:1:2": nobody can tell where the port begins
				return "", "", false, errAuthBracket
			}
			colon = i
		case c == '%' && s[0] == '[':
			return "", "", false, errAuthZone
		default:
			return "", "", false, errAuthCharacter
		}
	}
	if s[0] != '[' {
		if colon < 0 {
			return s, "", false, nil
		}
		return s[:colon], s[colon+1:], true, nil
	}
	end := strings.IndexByte(s, ']')
	if end < 0 {
		return "", "", false, errAuthBracket
	}
	host, rest := s[:end+1], s[end+1:]
	switch {
	case rest == "":
		return host, "", false, nil
	case rest[0] != ':':
		return "", "", false, errAuthBracket
	}
	return host, rest[1:], true, nil
}

// parsePort takes 1 to 65535 in decimal without sign or leading zero.
func parsePort(s string) (int, error) {
	if len(s) == 0 || len(s) > 5 || s[0] == '0' {
		return 0, errAuthPort
	}
	n := 0
	for i := 0; i < len(s); i++ {
		if s[i] < '0' || s[i] > '9' {
			return 0, errAuthPort
		}
		n = n*10 + int(s[i]-'0')
	}
	if n > 65535 {
		return 0, errAuthPort
	}
	return n, nil
}

func canonicalHost(s string) (string, error) {
	if s == "" {
		return "", errAuthEmpty
	}
	if s[0] == '[' {
		addr, err := netip.ParseAddr(s[1 : len(s)-1])
		if err != nil || !addr.Is6() {
			return "", errAuthIPv6
		}
		if addr.Zone() != "" {
			return "", errAuthZone
		}
		return addr.String(), nil
	}
	name := strings.TrimSuffix(s, ".")
	upper, ascii := false, true
	for i := 0; i < len(name); i++ {
		c := name[i]
		upper = upper || 'A' <= c && c <= 'Z'
		ascii = ascii && c < utf8.RuneSelf
	}
	if upper {
		name = lowerASCII(name)
	}
	if !ascii {
		a, err := fromULabels(name)
		if err != nil {
			return "", err
		}
		name = a
	}
	if err := checkName(name); err != nil {
		return "", err
	}
	if endsInNumber(name) {
		// RFC 3986 section 7.4: "127.1", "0x7f.0.0.1" and "2130706433" are IPv4 to some
		// resolvers and names to others. Only the four decimal numbers are the same to all,
		// and only without a root dot.
		addr, err := netip.ParseAddr(name)
		if err != nil || len(name) != len(s) {
			return "", errAuthIPv4
		}
		return addr.String(), nil
	}
	if ascii && strings.Contains(name, "xn--") {
		if err := checkALabels(name); err != nil {
			return "", err
		}
	}
	return name, nil
}

// lowerASCII folds A to Z and nothing else: strings.ToLower would also turn the
// Kelvin sign into "k", and so one host into another.
func lowerASCII(s string) string {
	b := []byte(s)
	for i, c := range b {
		if 'A' <= c && c <= 'Z' {
			b[i] = c + ('a' - 'A')
		}
	}
	return string(b)
}

// checkName takes an ASCII name without root dot: letters, digits, hyphens inside
// labels, and underscores, which are no host name characters but in use.
func checkName(name string) error {
	if name == "" {
		return errAuthEmpty
	}
	if len(name) > maxHostBytes {
		return errAuthLong
	}
	start := 0
	for i := 0; i <= len(name); i++ {
		if i < len(name) && name[i] != '.' {
			c := name[i]
			if !('a' <= c && c <= 'z' || '0' <= c && c <= '9' || c == '-' || c == '_') {
				return errAuthCharacter
			}
			continue
		}
		if i == start || i-start > maxLabelBytes || name[start] == '-' || name[i-1] == '-' {
			return errAuthLabel
		}
		start = i + 1
	}
	return nil
}

// endsInNumber is the test of the WHATWG URL standard ("ends in a number"): whether
// some resolver could take the name for an IPv4 address.
func endsInNumber(name string) bool {
	last := name[strings.LastIndexByte(name, '.')+1:]
	digits := true
	for i := 0; i < len(last); i++ {
		digits = digits && '0' <= last[i] && last[i] <= '9'
	}
	if digits {
		return true
	}
	hex, ok := strings.CutPrefix(last, "0x")
	for i := 0; ok && i < len(hex); i++ {
		c := hex[i]
		ok = '0' <= c && c <= '9' || 'a' <= c && c <= 'f'
	}
	return ok
}

// fromULabels turns clean U-labels into A-labels. Clean means that IDNA lookup
// changes nothing else: full-width letters, other dots, capitals beyond ASCII and
// everything that a font shows alike but UTS 46 maps away are refused (Q14).
func fromULabels(name string) (string, error) {
	if !utf8.ValidString(name) {
		return "", errAuthCharacter
	}
	a, err := idna.Lookup.ToASCII(name)
	if err != nil {
		return "", errAuthIDNA
	}
	back, err := idna.Lookup.ToUnicode(a)
	if err != nil {
		return "", errAuthIDNA
	}
	// Labels that were given as A-labels come back as U-labels, so compare by label.
	given, got, want := strings.Split(name, "."), strings.Split(back, "."), strings.Split(a, ".")
	if len(given) != len(got) || len(given) != len(want) {
		return "", errAuthIDNA
	}
	for i := range given {
		if given[i] != got[i] && given[i] != want[i] {
			return "", errAuthIDNA
		}
	}
	if err := checkALabels(a); err != nil {
		return "", err
	}
	return a, nil
}

// checkALabels refuses an "xn--" label that does not decode to a clean U-label
// that encodes to the same A-label again.
func checkALabels(name string) error {
	for label := range strings.SplitSeq(name, ".") {
		if !strings.HasPrefix(label, "xn--") {
			continue
		}
		u, err := idna.Lookup.ToUnicode(label)
		if err != nil || isASCII(u) {
			return errAuthIDNA
		}
		if a, err := idna.Lookup.ToASCII(u); err != nil || a != label {
			return errAuthIDNA
		}
	}
	return nil
}

func isASCII(s string) bool {
	for i := 0; i < len(s); i++ {
		if s[i] >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// Authority returns host:port, with brackets around an IPv6 literal. ParseAuthority
// reads it back to the same values.
func (t Target) Authority() string {
	var room [64]byte // one piece of memory for most
	b := room[:0]
	if strings.IndexByte(t.Host, ':') >= 0 {
		b = append(append(append(b, '['), t.Host...), ']')
	} else {
		b = append(b, t.Host...)
	}
	return string(strconv.AppendInt(append(b, ':'), int64(t.Port), 10))
}

// Origin returns scheme://host[:port], the default port left out (RFC 6454 §6.2).
// ParseOrigin reads it back to the same target.
func (t Target) Origin() string {
	a := t.Authority()
	if t.Port == DefaultPort(t.Scheme) {
		a = a[:strings.LastIndexByte(a, ':')]
	}
	return t.Scheme + "://" + a
}

// ParseOrigin reads an origin such as "https://api.example.com". Errors wrap
// ErrBadAuthority.
func ParseOrigin(s string) (Target, error) {
	scheme, rest, ok := strings.Cut(s, "://")
	if !ok || scheme != "http" && scheme != "https" {
		return Target{}, &AuthorityError{Reason: "scheme"}
	}
	host, port, err := ParseAuthority(rest, DefaultPort(scheme))
	if err != nil {
		return Target{}, err
	}
	return Target{Scheme: scheme, Host: host, Port: port}, nil
}

// DefaultPort returns the port of a scheme: 80 for "http", 443 for "https", 22 for "ssh", 0 else.
func DefaultPort(scheme string) int {
	switch scheme {
	case "https":
		return 443
	case "http":
		return 80
	case "ssh":
		return DefaultSSHPort
	}
	return 0
}

// Upgraded returns the https target of an http target on port 80 (case ID-07): a
// request addressed in clear is carried over TLS to port 443. Every other target,
// http on another port included, is returned as it is: nobody knows where its TLS
// port would be.
func (t Target) Upgraded() Target {
	if t.Scheme == "http" && t.Port == 80 {
		t.Scheme, t.Port = "https", 443
	}
	return t
}
