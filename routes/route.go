// Package routes maps a request to a Route. It is pure: no clock, no I/O, no
// global state; a Snapshot never changes after it was made (CONTRACT D1). It
// knows credentials by name only.
package routes

import (
	"errors"
	"strings"
	"time"

	"waybill/outcome"
)

// Route is one reviewed rule: which requests it takes, what is injected, and
// what is known about the remote side. Every field has a conservative default
// (DESIGN section 4). The zero value matches nothing.
type Route struct {
	Name       string
	Match      Match
	Deny       bool // requests that match are refused with POLICY_DENIED
	Inject     []Injection
	Contract   Contract
	Delivery   Delivery
	Durability Durability
	// RejectManaged refuses a request that carries a managed field instead of
	// replacing the field (caller_value: reject, CONTRACT B1).
	RejectManaged bool
	// PassAuthorization lets the caller's own Authorization and Cookie fields
	// through on a route that injects another field.
	PassAuthorization bool
	// PassTrace forwards the caller's W3C trace context (traceparent, tracestate) and
	// baggage; without it they are taken out: they name the caller's own systems.
	PassTrace bool
	// Strip names fields of the caller's request that are never forwarded on this
	// route, in canonical form. It is for routes without injection: a client that
	// follows a redirect to pre-signed storage repeats its placeholder Authorization
	// there and the storage refuses both (case RD-04).
	Strip     []string
	Callers   []string // names; empty: any (V4)
	Redirects Redirects
	Leak      Leak
	// RedirectFrom are origins ("https://api.example.com") whose relayed redirects may
	// be followed to this route with its credential (CONTRACT R3).
	RedirectFrom []string
	// Dialect is the form of Waybill's own answers on this route (CONTRACT L9).
	Dialect outcome.Dialect `json:",omitzero"`
	// Upgrade says what becomes of a request for another protocol on the connection.
	Upgrade  Upgrade
	Approval Approval `json:",omitzero"`
	Upstream Upstream
	Limits   Limits
	// SSH makes the route one for commands over SSH; nil: for HTTP requests.
	SSH *SSH `json:",omitempty"`
}

// Match selects requests. All conditions must hold.
type Match struct {
	Hosts   []string // canonical; exact, or "*.example.com" for exactly one left-most label
	Ports   []int    // empty: the scheme's default port (443, with allow_plaintext 80)
	Methods []string // upper case; empty: every method but TRACE, TRACK and CONNECT
	Paths   []string // globs over the raw path; empty: every path
}

// Contract is reviewed knowledge of the remote side (CONTRACT G5, G6).
type Contract struct {
	// Repeatable is nil when not declared: then GET, HEAD and OPTIONS count as
	// repeatable and nothing else does (G6).
	Repeatable *bool
	// RefusedBeforeExecution lists statuses (429, 503, …) that the service is
	// known to send only before it executes anything (G5).
	RefusedBeforeExecution []int
	// KeyInUse lists statuses that mean "this idempotency key is being worked
	// on" (G5).
	KeyInUse []int
	// CloseDelimited accepts a body that ends with a plain TCP close (G2).
	CloseDelimited bool
	// EndMarker is text that the last line of every complete 2xx body holds, such as
	// "[DONE]"; "": none. A body without it is incomplete however it was framed, and one
	// with it is complete even if the connection broke after it (G13).
	EndMarker string
	// Idempotency is the service's promise about keys; nil: none (CONTRACT I4).
	Idempotency *Idempotency `json:",omitempty"`
	// Conditional declares that a precondition (If-Match, If-None-Match: *) makes a
	// request safe to repeat (CONTRACT I7).
	Conditional bool `json:",omitempty"`
	// Responses override what complete answers mean, in order of status (CONTRACT G5).
	Responses []Response `json:",omitempty"`
	// Retry is the budget of repeats by Waybill itself; nil: none (CONTRACT J4).
	Retry    *Retry   `json:",omitempty"`
	OnRepeat OnRepeat `json:",omitempty"`
	// Reconcile, Async, Batch and Marker say how to find out what became of an
	// operation; nil: not known (CONTRACT K6, A7, F7, K7).
	Reconcile *Reconcile `json:",omitempty"`
	Async     *Async     `json:",omitempty"`
	Batch     *Batch     `json:",omitempty"`
	Marker    *Marker    `json:",omitempty"`
}

// Delivery says how a result reaches the caller (CONTRACT H5). Zero is Auto.
type Delivery uint8

// The deliveries.
const (
	DeliveryAuto Delivery = iota
	DeliveryBuffered
	DeliveryStream
)

// Redirects says what becomes of a redirect within the origin (CONTRACT R2). Zero is
// RedirectsRelay.
type Redirects uint8

// The ways with redirects. One to another origin is always relayed.
const (
	RedirectsRelay Redirects = iota
	RedirectsSameOrigin
)

// Upgrade says what becomes of a WebSocket handshake (RFC 6455). Zero is
// UpgradeRefuse.
type Upgrade uint8

// The ways with upgrades. With UpgradeTunnel the handshake is an action like any
// other, and what follows a 101 is carried both ways (CONTRACT G4). Every other
// protocol is refused either way.
const (
	UpgradeRefuse Upgrade = iota
	UpgradeTunnel
)

// Leak says what becomes of an answer that holds the injected secret (CONTRACT C5).
// Zero is LeakRedact.
type Leak uint8

// The ways with leaks. What cannot be masked in place is blocked either way.
const (
	LeakRedact Leak = iota
	LeakBlock
)

// Durability says whether the dispatch record is waited for (CONTRACT F1). Zero is Strict.
type Durability uint8

// The durabilities. Relaxed needs Contract.Repeatable = true.
const (
	Strict Durability = iota
	Relaxed
)

// Upstream says how the origin is reached and verified (CONTRACT E6, V2, V3).
type Upstream struct {
	// AllowPlaintext permits sending to the origin over http, secrets included (V2).
	AllowPlaintext bool
	// RefusePlaintext refuses an http:// request instead of upgrading it.
	RefusePlaintext bool
	// RootsPEM are additional trust anchors; empty: the system's.
	RootsPEM []byte
	// RootsOnly trusts RootsPEM alone.
	RootsOnly bool
	// Pins are "sha256:<hex>" digests of the SubjectPublicKeyInfo of one certificate of
	// the verified chain; empty: no pinning.
	Pins []string
	// Resolve maps a canonical host to "ip" or "ip:port" (an operator's explicit override).
	Resolve map[string]string
	// AllowPrivate permits private address ranges, never link-local ones (V3).
	AllowPrivate bool
	// Proxy tunnels every connection of the route (CONNECT); nil: direct.
	Proxy *Proxy `json:",omitempty"`
}

// Proxy is an upstream HTTP proxy. The origin is verified inside of its tunnel.
type Proxy struct {
	Scheme string // "http" or "https": how the proxy itself is spoken to
	Host   string // canonical, as of a Target
	Port   int
	// User and Credential make Proxy-Authorization: Basic, with the credential as the
	// password; "": none.
	User       string `json:",omitempty"`
	Credential string `json:",omitempty"`
	// RootsPEM are further trust anchors for an https proxy; empty: the system's.
	RootsPEM []byte `json:",omitempty"`
	// AllowPrivate permits private addresses behind the proxy's name (V3).
	AllowPrivate bool `json:",omitzero"`
}

// Origin returns the proxy as "http://proxy.example:3128", without credentials.
func (p *Proxy) Origin() string { return Target{p.Scheme, p.Host, p.Port}.Origin() }

func (p *Proxy) check(u *Upstream) error {
	host, err := ParseHost(bracketed(p.Host))
	switch {
	case p.Scheme != "http" && p.Scheme != "https" || err != nil || host != p.Host || p.Port < 1 || p.Port > 65535:
		return errors.New("an upstream proxy is no origin")
	case (p.User == "") != (p.Credential == "") || strings.ContainsAny(p.User, ":${}") || !printable(p.User):
		return errors.New("an upstream proxy needs user and credential, or neither")
	case u.AllowPlaintext:
		return errors.New("plaintext through an upstream proxy would show it everything")
	}
	return nil
}

// Limits bound one action. Sizes in bytes. Zero means the default.
type Limits struct {
	Request    int64         // request body; default 32 MiB
	Buffer     int64         // held in memory per body; default 1 MiB
	Response   int64         // response body; default 256 MiB
	Timeout    time.Duration // whole attempt after dispatch; default 10m
	Idle       time.Duration // silence of the upstream; default 5m
	Hold       time.Duration // longest wait for an approval or lease; default 2m
	Connect    time.Duration // one try of connection setup; default 10s
	Tries      int           // of connection setup; default 3 (E7)
	Duplicates time.Duration // window of the duplicate guard; default 10m (O3)
	Retention  time.Duration // of the result; default 7d
	// Of one caller on this route; 0: no limit (V4). Rate requests in RatePer, Burst of
	// them at once after a rest (0: one); Concurrent at the same time.
	Rate       int           `json:",omitzero"`
	RatePer    time.Duration `json:",omitzero"`
	Burst      int           `json:",omitzero"`
	Concurrent int           `json:",omitzero"`
}

// Default says what happens to a request that matches no route. Zero is Deny.
type Default uint8

// The defaults (CONTRACT V1).
const (
	Deny Default = iota
	Tunnel
)

// Target is the canonical identity of an origin: the one that is routed, dialled
// and verified. Host is lower-case ASCII without a trailing dot, or an IP literal
// without brackets.
type Target struct {
	Scheme string // "http" or "https"
	Host   string
	Port   int
}
