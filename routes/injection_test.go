package routes

import (
	"reflect"
	"slices"
	"testing"

	"waybill/internal/contract"
)

func kinds() []Injection {
	return []Injection{
		{Header: "Authorization", Value: "Bearer ${secret}", Credential: "c"},
		{Kind: InjectCookie, Name: "sid", Value: "${secret}", Credential: "c"},
		{Kind: InjectQuery, Name: "key", Value: "${secret}", Credential: "c"},
		{Kind: InjectBody, Name: "/auth/token", Value: "${secret}", Credential: "c"},
		{Kind: InjectHMAC, Header: "X-Signature", Value: "v1=${signature}", Credential: "c", HMAC: &HMAC{Algorithm: "sha256", Canonical: "${body}", Encoding: "hex", Key: "text", Timestamp: "unix", TimestampHeader: "X-Time", NonceHeader: "X-Nonce"}},
		{Kind: InjectSigV4, Credential: "c", SigV4: &SigV4{Service: "s3", Region: "eu-west-1", Payload: "signed", AccessKeyID: "AKID"}},
		{Kind: InjectClientCertificate, Credential: "c"},
	}
}

// Every field of every kind of injection changes the digest, and none is shared with
// whoever made the route (D1).
func TestInjectionsAreInTheDigest(t *testing.T) {
	contract.Covers(t, "D1")
	digest := func(in Injection) (string, *Snapshot) {
		t.Helper()
		r := route("a", "a.test")
		r.Inject = []Injection{in}
		s, err := NewSnapshot([]Route{r}, Deny, nil)
		if err != nil {
			t.Fatalf("%s: %v", in.Word(), err)
		}
		return s.Digest(), s
	}
	seen := map[string]string{}
	for i := range kinds() {
		in := kinds()[i]
		base, s := digest(in)
		if other, dup := seen[base]; dup {
			t.Errorf("%s has the digest of %s", in.Word(), other)
		}
		seen[base] = in.Word()
		change := func(name string, f func(in *Injection)) {
			next := kinds()[i]
			f(&next)
			d, _ := digest(next)
			if other, dup := seen[d]; dup {
				t.Errorf("%s: changing %s gives the digest of %s", in.Word(), name, other)
			}
			seen[d] = in.Word() + " with another " + name
		}
		change("credential", func(in *Injection) { in.Credential = "d" })
		if in.Name != "" {
			change("name", func(in *Injection) { in.Name += "x" })
		}
		if in.HMAC != nil {
			for f := range reflect.TypeFor[HMAC]().NumField() {
				change(reflect.TypeFor[HMAC]().Field(f).Name, func(in *Injection) { reflect.ValueOf(in.HMAC).Elem().Field(f).SetString("other") })
			}
			in.HMAC.Canonical = "changed afterwards"
		}
		if in.SigV4 != nil {
			for f := range reflect.TypeFor[SigV4]().NumField() {
				change(reflect.TypeFor[SigV4]().Field(f).Name, func(in *Injection) { reflect.ValueOf(in.SigV4).Elem().Field(f).SetString("other") })
			}
			in.SigV4.Region = "changed afterwards"
		}
		got := s.Routes()[0].Inject[0]
		if got.HMAC != nil && got.HMAC.Canonical != "${body}" || got.SigV4 != nil && got.SigV4.Region != "eu-west-1" {
			t.Errorf("%s: a later change reaches the snapshot", in.Word())
		}
	}
}

func TestInjectionsThatExcludeEachOther(t *testing.T) {
	contract.Covers(t, "B1", "C1")
	k := kinds()
	header, cookie, query, body, hmac, aws, cert := k[0], k[1], k[2], k[3], k[4], k[5], k[6]
	whole := Injection{Header: "Cookie", Value: "${secret}", Credential: "c"}
	for name, tc := range map[string]struct {
		list []Injection
		with func(r *Route)
		ok   bool
	}{
		"all that go together":        {[]Injection{header, cookie, query, body, hmac, cert}, nil, true},
		"a field twice":               {[]Injection{header, header}, nil, false},
		"two cookies of one name":     {[]Injection{cookie, cookie}, nil, false},
		"a cookie and the field":      {[]Injection{whole, cookie}, nil, false},
		"two signatures":              {[]Injection{hmac, aws}, nil, false},
		"sigv4 and Authorization":     {[]Injection{header, aws}, nil, false},
		"certificate in clear":        {[]Injection{cert}, func(r *Route) { r.Upstream.AllowPlaintext = true }, false},
		"signature and redirects":     {[]Injection{hmac}, func(r *Route) { r.Redirects = RedirectsSameOrigin }, false},
		"parameter and redirects":     {[]Injection{query}, func(r *Route) { r.Redirects = RedirectsSameOrigin }, false},
		"certificate and redirects":   {[]Injection{cert, cookie}, func(r *Route) { r.Redirects = RedirectsSameOrigin }, true},
		"sigv4, caller's own as well": {[]Injection{aws}, func(r *Route) { r.PassAuthorization = true }, false},
		"no credential":               {[]Injection{{Kind: InjectClientCertificate}}, nil, false},
		"no such kind":                {[]Injection{{Kind: injectionKinds, Credential: "c"}}, nil, false},
		"hmac without its rules":      {[]Injection{{Kind: InjectHMAC, Header: "X", Credential: "c"}}, nil, false},
	} {
		r := route("a", "a.test")
		r.Inject = slices.Clone(tc.list)
		if tc.with != nil {
			tc.with(&r)
		}
		if _, err := NewSnapshot([]Route{r}, Deny, nil); (err == nil) != tc.ok {
			t.Errorf("%s: %v", name, err)
		}
	}
}
