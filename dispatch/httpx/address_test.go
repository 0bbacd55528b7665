package httpx

import (
	"context"
	"crypto/sha256"
	"crypto/x509"
	"errors"
	"net"
	"net/netip"
	"testing"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/outcome"
	"waybill/routes"
)

func spki(c *x509.Certificate) [sha256.Size]byte { return sha256.Sum256(c.RawSubjectPublicKeyInfo) }

// TestAddressPolicy: every family and every embedding (CONTRACT V3, case EG-01).
func TestAddressPolicy(t *testing.T) {
	contract.Covers(t, "V3")
	for addr, want := range map[string][2]string{ // without and with allow_private
		"93.184.216.34":        {"", ""},
		"2606:2800:220:1::1":   {"", ""},
		"10.0.0.1":             {"private_address", ""},
		"172.31.255.255":       {"private_address", ""},
		"192.168.1.1":          {"private_address", ""},
		"100.64.0.1":           {"private_address", ""},
		"fd12::1":              {"private_address", ""},
		"169.254.169.254":      {"special_address", "special_address"},
		"fd00:ec2::254":        {"special_address", "special_address"},
		"100.100.100.200":      {"special_address", "special_address"},
		"127.0.0.1":            {"special_address", "special_address"},
		"0.0.0.0":              {"special_address", "special_address"},
		"255.255.255.255":      {"special_address", "special_address"},
		"224.0.0.1":            {"special_address", "special_address"},
		"198.51.100.1":         {"special_address", "special_address"},
		"::":                   {"special_address", "special_address"},
		"::1":                  {"special_address", "special_address"},
		"fe80::1%eth0":         {"special_address", "special_address"},
		"ff02::1":              {"special_address", "special_address"},
		"::ffff:10.0.0.1":      {"private_address", ""},
		"::ffff:127.0.0.1":     {"special_address", "special_address"},
		"::127.0.0.1":          {"special_address", "special_address"},
		"64:ff9b::a00:1":       {"private_address", ""},
		"64:ff9b::7f00:1":      {"special_address", "special_address"},
		"64:ff9b:1::a9fe:a9fe": {"tunnelled_address", "tunnelled_address"},
		// 169.254.169.254 under a /48 of a local translator, with a public address behind it
		"64:ff9b:1:a9fe:a9:fe00:5db8:d822": {"tunnelled_address", "tunnelled_address"},
		"::ffff:0:a9fe:a9fe":               {"special_address", "special_address"},
		"::ffff:0:a00:1":                   {"private_address", ""},
		"168.63.129.16":                    {"special_address", "special_address"},
		"fd00:ec2::23":                     {"special_address", "special_address"},
		"fd20:ce::254":                     {"special_address", "special_address"},
		"64:ff9b::5db8:d822":               {"", ""},
		"2002:a9fe:a9fe::1":                {"special_address", "special_address"},
		"2002:c0a8:101::1":                 {"private_address", ""},
		"2001:0:4136:e378::5601":           {"tunnelled_address", "tunnelled_address"},
	} {
		a := netip.MustParseAddr(addr)
		for i, allow := range []bool{false, true} {
			if got := addressReason(a, allow); got != want[i] {
				t.Errorf("%s allow_private=%v: %q, want %q", addr, allow, got, want[i])
			}
		}
	}
	if pinnedReason(netip.MustParseAddr("127.0.0.1")) != "" || pinnedReason(netip.MustParseAddr("10.1.1.1")) != "" || pinnedReason(netip.MustParseAddr("169.254.169.254")) == "" {
		t.Error("an operator's own resolve entry opens loopback and private ranges, never metadata")
	}
}

type answers []string

func (a answers) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) {
	if len(a) == 0 {
		return nil, &net.DNSError{Err: "no such host", IsNotFound: true}
	}
	if a[0] == "timeout" {
		return nil, &net.DNSError{Err: "i/o timeout", IsTimeout: true}
	}
	if a[0] == "fail" {
		return nil, &net.DNSError{Err: "server misbehaving"}
	}
	out := make([]netip.Addr, len(a))
	for i := range a {
		out[i] = netip.MustParseAddr(a[i])
	}
	return out, nil
}

// TestAddressIsJudgedBeforeItIsDialled: what the resolver says is judged whole, and
// the address that was judged is the one that is dialled.
func TestAddressIsJudgedBeforeItIsDialled(t *testing.T) {
	contract.Covers(t, "V3", "E2")
	for _, c := range []struct {
		answer answers
		code   outcome.Code
		dialed string
	}{
		{answers{"93.184.216.34"}, outcome.CodeConnectionLost, "93.184.216.34:443"},
		{answers{"93.184.216.34", "127.0.0.1"}, outcome.CodeDestinationProhibited, ""},
		{answers{"10.0.0.1"}, outcome.CodeDestinationProhibited, ""},
		{answers{}, outcome.CodeDNSNoSuchName, ""},
		{answers{"timeout"}, outcome.CodeDNSTimeout, ""},
		{answers{"fail"}, outcome.CodeDNSError, ""},
	} {
		var dialed string
		tr := New(Config{Resolver: c.answer, Dial: func(_ context.Context, _, addr string) (net.Conn, error) {
			dialed = addr
			return nil, errors.New("test")
		}})
		for _, dial := range []func() error{
			func() error {
				_, err := tr.Connect(t.Context(), &dispatch.Order{Target: routes.Target{Scheme: "https", Host: "x.allowed.test", Port: 443}, Upstream: &routes.Upstream{}})
				return err
			},
			func() error {
				_, err := tr.Dial(t.Context(), &dispatch.Order{Target: routes.Target{Scheme: "https", Host: "x.allowed.test", Port: 443}, Upstream: &routes.Upstream{}})
				return err
			},
		} {
			dialed = ""
			err := dial()
			var s *dispatch.SetupError
			if !errors.As(err, &s) || s.Code != c.code || dialed != c.dialed {
				t.Errorf("%v: %v, dialled %q; want %v, %q", c.answer, err, dialed, c.code, c.dialed)
			}
		}
	}
}
