package routes

import (
	"errors"
	"net"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/net/idna"
	"pgregory.net/rapid"

	"waybill/internal/contract"
)

func TestParseAuthority(t *testing.T) {
	contract.Covers(t, "B1")
	long := strings.Repeat("a", 63)
	for _, tc := range []struct {
		in     string
		def    int
		host   string
		port   int
		reason string
	}{
		// ID-04: spelling variants of one host.
		{in: "PAY.Example.TEST", def: 443, host: "pay.example.test", port: 443},
		{in: "pay.example.test.", def: 443, host: "pay.example.test", port: 443},
		{in: "pay.example.test.:443", def: 80, host: "pay.example.test", port: 443},
		{in: "evilpay.example.test", def: 443, host: "evilpay.example.test", port: 443},
		{in: "localhost:8080", host: "localhost", port: 8080},
		{in: "_x.my_bucket.example", def: 443, host: "_x.my_bucket.example", port: 443},
		{in: "r3---sn-a.example", def: 443, host: "r3---sn-a.example", port: 443},
		{in: long + "." + long + "." + long + "." + long[:61], def: 443, host: long + "." + long + "." + long + "." + long[:61], port: 443},
		{in: "127.0.0.1", def: 80, host: "127.0.0.1", port: 80},
		{in: "127.0.0.1:65535", host: "127.0.0.1", port: 65535},
		{in: "[::1]", def: 443, host: "::1", port: 443},
		{in: "[2001:DB8:0:0::1]:8443", host: "2001:db8::1", port: 8443},
		{in: "[::ffff:10.0.0.1]:1", host: "::ffff:10.0.0.1", port: 1},
		{in: "bücher.example", def: 443, host: "xn--bcher-kva.example", port: 443},
		{in: "Bücher.Example:8443", host: "xn--bcher-kva.example", port: 8443}, // ASCII capitals only
		{in: "xn--bcher-kva.example.", def: 443, host: "xn--bcher-kva.example", port: 443},
		{in: "XN--bcher-kva.example", def: 443, host: "xn--bcher-kva.example", port: 443},
		{in: "xn--bcher-kva.bücher", def: 443, host: "xn--bcher-kva.xn--bcher-kva", port: 443},
		{in: "例え.テスト", def: 443, host: "xn--r8jz45g.xn--zckzah", port: 443},

		{in: "", def: 443, reason: "empty"},
		{in: ".", def: 443, reason: "empty"},
		{in: ":443", reason: "empty"},
		{in: "a..", def: 443, reason: "bad_label"},
		{in: "a..b", def: 443, reason: "bad_label"},
		{in: ".a", def: 443, reason: "bad_label"},
		{in: "-a.example", def: 443, reason: "bad_label"},
		{in: "a-.example", def: 443, reason: "bad_label"},
		{in: long + "a.example", def: 443, reason: "bad_label"},
		{in: strings.Repeat("a.", 127) + "aa", def: 443, reason: "too_long"},
		{in: strings.Repeat("a", 5000), def: 443, reason: "too_long"},
		{in: "pay.example.test", reason: "port_missing"},
		{in: "a:", def: 443, reason: "bad_port"},
		{in: "a:0", def: 443, reason: "bad_port"},
		{in: "a:0443", def: 443, reason: "bad_port"},
		{in: "a:+443", def: 443, reason: "bad_port"},
		{in: "a:65536", def: 443, reason: "bad_port"},
		{in: "a:99999999999999999999", def: 443, reason: "bad_port"},
		{in: "a:443:444", def: 443, reason: "bad_brackets"},
		{in: "::1", def: 443, reason: "bad_brackets"},
		{in: "[::1", def: 443, reason: "bad_brackets"},
		{in: "[::1]443", def: 443, reason: "bad_brackets"},
		{in: "[::1]]", def: 443, reason: "bad_brackets"},
		{in: "a]", def: 443, reason: "forbidden_character"},
		{in: "[127.0.0.1]", def: 443, reason: "bad_ipv6_literal"},
		{in: "[a.example]", def: 443, reason: "bad_ipv6_literal"},
		{in: "[]", def: 443, reason: "bad_ipv6_literal"},
		{in: "[fe80::1%25eth0]", def: 443, reason: "ipv6_zone"},
		{in: "user:pass@pay.example.test", def: 443, reason: "userinfo"},
		{in: "pay.example.test@evil.test", def: 443, reason: "userinfo"},
		{in: "pay.example.test/x", def: 443, reason: "forbidden_character"},
		{in: "pay.example.test?x", def: 443, reason: "forbidden_character"},
		{in: "pay.example.test#x", def: 443, reason: "forbidden_character"},
		{in: `evil.test\pay.example.test`, def: 443, reason: "forbidden_character"},
		{in: "pay%2eexample.test", def: 443, reason: "forbidden_character"},
		{in: " a", def: 443, reason: "forbidden_character"},
		{in: "a\r\nb", def: 443, reason: "forbidden_character"},
		{in: "a\x00", def: 443, reason: "forbidden_character"},
		{in: "a\x7f", def: 443, reason: "forbidden_character"},
		{in: "a,b", def: 443, reason: "forbidden_character"},
		{in: "*.example.test", def: 443, reason: "forbidden_character"},
		// Spellings of IPv4 that only some resolvers understand.
		{in: "127.1", def: 443, reason: "bad_ipv4_literal"},
		{in: "2130706433", def: 443, reason: "bad_ipv4_literal"},
		{in: "0x7f000001", def: 443, reason: "bad_ipv4_literal"},
		{in: "0X7F.0.0.1", def: 443, reason: "bad_ipv4_literal"},
		{in: "a.0x", def: 443, reason: "bad_ipv4_literal"},
		{in: "0177.0.0.1", def: 443, reason: "bad_ipv4_literal"},
		{in: "127.0.0.1.", def: 443, reason: "bad_ipv4_literal"},
		{in: "256.0.0.1", def: 443, reason: "bad_ipv4_literal"},
		{in: "a.example.1", def: 443, reason: "bad_ipv4_literal"},
		// Unicode that is not what IDNA would produce (Q14).
		{in: "pay。example。test", def: 443, reason: "not_a_clean_u_label"},
		{in: "ｐａｙ.example.test", def: 443, reason: "not_a_clean_u_label"},
		{in: "１２７.0.0.1", def: 443, reason: "not_a_clean_u_label"},
		{in: "\u212a.example", def: 443, reason: "not_a_clean_u_label"}, // Kelvin sign
		{in: "BÜCHER.example", def: 443, reason: "not_a_clean_u_label"},
		{in: "bu\u0308cher.example", def: 443, reason: "not_a_clean_u_label"}, // not NFC
		{in: "a\u200bb.example", def: 443, reason: "not_a_clean_u_label"},
		{in: "a\u00adb.example", def: 443, reason: "not_a_clean_u_label"},
		{in: "\u202eabc.example", def: 443, reason: "not_a_clean_u_label"},
		{in: "xn--a.example", def: 443, reason: "not_a_clean_u_label"},
		{in: "xn--example-.test", def: 443, reason: "bad_label"},
		{in: "xn--.example", def: 443, reason: "bad_label"},
		{in: "\xff.example", def: 443, reason: "forbidden_character"},
	} {
		host, port, err := ParseAuthority(tc.in, tc.def)
		var ae *AuthorityError
		switch {
		case tc.reason == "":
			if err != nil || host != tc.host || port != tc.port {
				t.Errorf("ParseAuthority(%q, %d) = %q, %d, %v; want %q, %d", tc.in, tc.def, host, port, err, tc.host, tc.port)
			}
		case !errors.As(err, &ae) || !errors.Is(err, ErrBadAuthority):
			t.Errorf("ParseAuthority(%q, %d) = %q, %d, %v; want an AuthorityError (%s)", tc.in, tc.def, host, port, err, tc.reason)
		case ae.Reason != tc.reason:
			t.Errorf("ParseAuthority(%q, %d): reason %q, want %q", tc.in, tc.def, ae.Reason, tc.reason)
		case host != "" || port != 0:
			t.Errorf("ParseAuthority(%q): an error with a result", tc.in)
		}
	}
}

// B3, C2: a userinfo part may be a secret.
func TestAuthorityErrorsDoNotEcho(t *testing.T) {
	for _, in := range []string{"CANARY:x@a", "CANARY..a", "CANARY%20", "[CANARY]", "CANARY:CANARY", "CANARY.1"} {
		if _, _, err := ParseAuthority(in, 443); err == nil || strings.Contains(err.Error(), "CANARY") {
			t.Errorf("ParseAuthority(%q): %v", in, err)
		}
	}
}

func TestParseHostPattern(t *testing.T) {
	for in, want := range map[string]string{
		"API.example.com.": "api.example.com", "*.Example.com": "*.example.com", "::1": "::1", "[::1]": "::1",
		"10.0.0.7": "10.0.0.7", "*.bücher.example": "*.xn--bcher-kva.example",
		"*": "", "**": "", "*.": "", "*.*.example.com": "", "a.*.example.com": "", "a*.example.com": "", "*example.com": "",
		"*.10.0.0.7": "", "*.1": "", "a:443": "", "[::1]:443": "", "https://a": "", "": "", "*.[::1]": "",
	} {
		got, err := ParseHostPattern(in)
		if got != want || (err == nil) != (want != "") {
			t.Errorf("ParseHostPattern(%q) = %q, %v; want %q", in, got, err, want)
		}
	}
}

func TestUpgraded(t *testing.T) {
	for in, want := range map[Target]Target{
		{"http", "a", 80}:    {"https", "a", 443},
		{"http", "a", 8081}:  {"http", "a", 8081},
		{"http", "a", 443}:   {"http", "a", 443},
		{"https", "a", 80}:   {"https", "a", 80},
		{"https", "a", 443}:  {"https", "a", 443},
		{"https", "a", 8443}: {"https", "a", 8443},
	} {
		if got := in.Upgraded(); got != want {
			t.Errorf("%v.Upgraded() = %v, want %v", in, got, want)
		}
	}
}

// checkAuthority holds what must be true of every accepted authority.
func checkAuthority(t interface {
	Helper()
	Fatalf(string, ...any)
}, s string, def int) {
	t.Helper()
	host, port, err := ParseAuthority(s, def)
	if err != nil {
		if !errors.Is(err, ErrBadAuthority) {
			t.Fatalf("ParseAuthority(%q): foreign error %v", s, err)
		}
		return
	}
	if port < 1 || port > 65535 || host == "" {
		t.Fatalf("ParseAuthority(%q) = %q, %d", s, host, port)
	}
	// The canonical form is a fixed point, with and without the port.
	canonical := Target{Host: host, Port: port}.Authority()
	if h, p, err := ParseAuthority(canonical, 0); err != nil || h != host || p != port {
		t.Fatalf("ParseAuthority(%q) = %q, %d, but its canonical form %q gives %q, %d, %v", s, host, port, canonical, h, p, err)
	}
	if h, err := ParseHost(bracketed(host)); err != nil || h != host {
		t.Fatalf("ParseHost(%q) = %q, %v", host, h, err)
	}
	// No other parser reads another host or port.
	same := func(who, h, p string) {
		h = strings.TrimSuffix(h, ".")
		if a, err := idna.Lookup.ToASCII(h); !isASCII(h) && err == nil {
			h = a
		}
		h = lowerASCII(h)
		if ip := net.ParseIP(h); ip != nil && ip.Equal(net.ParseIP(host)) {
			h = host
		}
		if h != host {
			t.Fatalf("ParseAuthority(%q) = %q, but %s reads %q", s, host, who, h)
		}
		if p != "" && p != strconv.Itoa(port) {
			t.Fatalf("ParseAuthority(%q) = port %d, but %s reads %q", s, port, who, p)
		}
	}
	u, err := url.Parse("https://" + s + "/p")
	if err != nil || u.User != nil || u.Path != "/p" {
		t.Fatalf("ParseAuthority(%q) = %q, but net/url: %v %v", s, host, u, err)
	}
	same("net/url", u.Hostname(), u.Port())
	if h, p, err := net.SplitHostPort(s); err == nil {
		same("net.SplitHostPort", h, p)
	} else if u.Port() != "" {
		t.Fatalf("ParseAuthority(%q) found a port, net.SplitHostPort: %v", s, err)
	}
}

func authorityGen() *rapid.Generator[string] {
	label := rapid.OneOf(
		rapid.StringMatching(`[a-zA-Z0-9_]([a-zA-Z0-9_-]{0,8}[a-zA-Z0-9_])?`),
		rapid.SampledFrom([]string{"bücher", "xn--bcher-kva", "例え", "Ω", "faß", "0x7f", "127", "xn--", "א", "a\u200d"}),
		rapid.StringN(0, 4, -1),
	)
	return rapid.Custom(func(t *rapid.T) string {
		s := strings.Join(rapid.SliceOfN(label, 0, 5).Draw(t, "labels"), rapid.SampledFrom([]string{".", ".", ".", "。", ".."}).Draw(t, "dot"))
		s = rapid.SampledFrom([]string{"", "", "", "u@", "["}).Draw(t, "before") + s
		return s + rapid.SampledFrom([]string{"", ".", ":443", ":8443", ".:80", "]:443", ":", ":0", "/x"}).Draw(t, "after")
	})
}

func TestAuthorityProperties(t *testing.T) {
	contract.Covers(t, "B1")
	rapid.Check(t, func(t *rapid.T) {
		checkAuthority(t, authorityGen().Draw(t, "authority"), rapid.SampledFrom([]int{0, 80, 443}).Draw(t, "default"))
	})
}

func FuzzParseAuthority(f *testing.F) {
	for _, s := range []string{"a.example:443", "[::1]:1", "bücher.example.", "xn--bcher-kva", "a@b", "0x7f.1", "[::ffff:1.2.3.4]", "a\\b", "[fe80::1%25x]:1", "ß", "a.。"} {
		f.Add(s, 443)
		f.Add(s, 0)
	}
	f.Fuzz(func(t *testing.T, s string, def int) {
		if def < 0 || def > 65535 {
			def = 443
		}
		checkAuthority(t, s, def)
	})
}
