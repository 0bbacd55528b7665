package httpx

import (
	"net/netip"

	"waybill/internal/control"
)

// Ranges that are refused at dial time (CONTRACT V3). special are never reachable
// through a name; private are, where the route says allow_private.
var (
	special = prefixes(
		"0.0.0.0/8",          // "this" network, RFC 1122 §3.2.1.3
		"127.0.0.0/8",        // loopback
		"169.254.0.0/16",     // link-local, cloud metadata
		"192.0.0.0/24",       // IETF protocol assignments
		"192.0.2.0/24",       // documentation
		"198.51.100.0/24",    // documentation
		"203.0.113.0/24",     // documentation
		"198.18.0.0/15",      // benchmarking
		"224.0.0.0/4",        // multicast
		"240.0.0.0/4",        // reserved, broadcast
		"100.100.100.200/32", // metadata of one cloud, inside the shared range
		"168.63.129.16/32",   // host agent of one cloud, a public address that never leaves the machine
		"::/127",             // unspecified and loopback
		"fe80::/10",          // link-local
		"fec0::/10",          // site-local, deprecated
		"ff00::/8",           // multicast
		"2001:db8::/32",      // documentation
		"3fff::/20",          // documentation
		"fd00:ec2::/32",      // metadata and machine credentials of one cloud, inside the unique-local range
		"fd20:ce::254/128",   // metadata of another
		"100::/64",           // discard only
	)
	private = prefixes(
		"10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16",
		"100.64.0.0/10", // shared address space, RFC 6598
		"fc00::/7",      // unique local
	)
	// These embed an IPv4 address in their last 32 bits: the well-known prefix of NAT64
	// (RFC 6052) and the IPv4-translated form (RFC 2765 §2.1).
	nat64  = prefixes("64:ff9b::/96", "::ffff:0:0:0/96")
	sixTo4 = netip.MustParsePrefix("2002::/16") // embeds in bits 16–47
	// tunnelled embed an address where only the network knows: Teredo, and the local NAT64
	// prefix (RFC 8215), under which a translator may use any length of RFC 6052 §2.2.
	tunnelled = prefixes("2001::/32", "64:ff9b:1::/48")
)

func prefixes(s ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(s))
	for i, p := range s {
		out[i] = netip.MustParsePrefix(p)
	}
	return out
}

func in(list []netip.Prefix, a netip.Addr) bool {
	for _, p := range list {
		if p.Contains(a) {
			return true
		}
	}
	return false
}

// addressReason returns "" when a may be dialled, else the fixed token of why not
// (CONTRACT V3). Embedded IPv4 addresses are judged as themselves.
func addressReason(a netip.Addr, allowPrivate bool) string {
	if control.Off("V3-address-policy") {
		return ""
	}
	a = a.WithZone("").Unmap()
	if !a.IsValid() {
		return "invalid_address"
	}
	if a.Is6() {
		b := a.As16()
		var v4 netip.Addr
		switch {
		case in(nat64, a):
			v4 = netip.AddrFrom4([4]byte(b[12:16]))
		case sixTo4.Contains(a):
			v4 = netip.AddrFrom4([4]byte(b[2:6]))
		case in(tunnelled, a):
			return "tunnelled_address"
		case [12]byte(b[:12]) == [12]byte{} && !in(special, a):
			// ::a.b.c.d, the deprecated IPv4-compatible form; :: and ::1 are special.
			v4 = netip.AddrFrom4([4]byte(b[12:16]))
		}
		if v4.IsValid() {
			return addressReason(v4, allowPrivate)
		}
	}
	switch {
	case in(special, a):
		return "special_address"
	case in(private, a) && !allowPrivate:
		return "private_address"
	}
	return ""
}

// pinnedReason judges an address an operator wrote into upstream.resolve: his own
// word permits loopback and private ranges, nothing else of the special ones.
func pinnedReason(a netip.Addr) string {
	if a.Unmap().IsLoopback() {
		return ""
	}
	return addressReason(a, true)
}
