package routes

import (
	"testing"

	"waybill/internal/contract"
)

// Each setting of an upstream proxy is in the digest, and one that would show it a
// secret, or that names no proxy, is no route (CONTRACT D1, V2).
func TestUpstreamProxyInTheDigest(t *testing.T) {
	contract.Covers(t, "D1", "V2")
	full := Proxy{Scheme: "https", Host: "p.test", Port: 3128, User: "u", Credential: "c", RootsPEM: []byte("pem")}
	of := func(change func(*Route, *Proxy)) (string, error) {
		r, p := route("a", "a.test"), full
		r.Upstream.Proxy = &p
		change(&r, &p)
		s, err := NewSnapshot([]Route{r}, Deny, nil)
		if err != nil {
			return "", err
		}
		p.Host = "later.test" // the caller's copy
		if got := s.routes[0].Upstream.Proxy; got != nil && got.Host == "later.test" {
			t.Error("the snapshot shares its proxy")
		}
		return s.Digest(), nil
	}
	seen := map[string]int{}
	for i, change := range []func(*Route, *Proxy){
		func(*Route, *Proxy) {},
		func(r *Route, _ *Proxy) { r.Upstream.Proxy = nil },
		func(_ *Route, p *Proxy) { p.Scheme = "http" },
		func(_ *Route, p *Proxy) { p.Host = "q.test" },
		func(_ *Route, p *Proxy) { p.Port = 1 },
		func(_ *Route, p *Proxy) { p.User = "v" },
		func(_ *Route, p *Proxy) { p.Credential = "d" },
		func(_ *Route, p *Proxy) { p.RootsPEM = nil },
		func(_ *Route, p *Proxy) { p.AllowPrivate = true },
	} {
		d, err := of(change)
		if err != nil {
			t.Fatal(i, err)
		}
		if j, twice := seen[d]; twice {
			t.Errorf("%d and %d have one digest", i, j)
		}
		seen[d] = i
	}
	for i, change := range []func(*Route, *Proxy){
		func(_ *Route, p *Proxy) { p.Scheme = "socks5" },
		func(_ *Route, p *Proxy) { p.Host = "P.test" },
		func(_ *Route, p *Proxy) { p.Port = 0 },
		func(_ *Route, p *Proxy) { p.User = "" },
		func(_ *Route, p *Proxy) { p.User = "a:b" },
		func(r *Route, _ *Proxy) { r.Upstream.AllowPlaintext = true },
	} {
		if _, err := of(change); err == nil {
			t.Errorf("%d: accepted", i)
		}
	}
}
