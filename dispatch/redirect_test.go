package dispatch

import (
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"waybill/internal/contract"
	"waybill/outcome"
	"waybill/routes"
)

// TestCrossOriginRedirect: RD-01, R3, R4. The redirect is relayed as it came; the
// follow-up gets no credential unless its route names the redirecting origin.
func TestCrossOriginRedirect(t *testing.T) {
	contract.Covers(t, "R1", "R3", "R4")
	for _, c := range []struct {
		name, location string
		follow         *Submission
		refused        bool
	}{
		{"another origin", "https://key.example.test/steal?x=1", get("https", "key.example.test", "/steal", "x=1"), true},
		{"scheme-relative", "//key.example.test/steal", get("https", "key.example.test", "/steal", ""), true},
		{"backslashes", `\\key.example.test/steal`, get("https", "key.example.test", "/steal", ""), true},
		{"user info", "https://u:p@KEY.example.test:443/steal#frag", get("https", "key.example.test", "/steal", ""), true},
		{"downgrade", "http://pay.example.test/v1/y", get("http", "pay.example.test", "/v1/y", ""), true},
		{"named in redirect_from", "https://store.example.test/o?sig=1", get("https", "store.example.test", "/o", "sig=1"), false},
		{"a route without a credential", "https://search.example.test/o", get("https", "search.example.test", "/o", ""), false},
		{"same origin", "/v1/y", get("https", "pay.example.test", "/v1/y", ""), false},
		{"same origin, absolute", "https://pay.example.test/v1/y", get("https", "pay.example.test", "/v1/y", ""), false},
		{"another location", "https://key.example.test/steal", get("https", "key.example.test", "/other", ""), false},
		{"another query", "https://key.example.test/steal?x=1", get("https", "key.example.test", "/steal", "x=2"), false},
	} {
		clock := &fixedClock{at: testTime}
		b := newBench(t)
		b.cfg.Clock = clock
		b.tr.play = answerWith(302, "", "Location", c.location)
		r := b.Do(t.Context(), get("https", "pay.example.test", "/v1/x", ""))
		if r.Status != 302 || r.Header.Get("Location") != c.location || facts(r) != outcome.Success() || b.tr.count() != 1 {
			t.Errorf("%s: not relayed as it came: %d %+v, %d sent", c.name, r.Status, facts(r), b.tr.count())
		}
		b.tr.play = answerWith(200, "ok")
		r = b.Do(t.Context(), c.follow)
		if c.refused != (facts(r).Code == outcome.CodeRedirectCrossOrigin) || c.refused != (b.tr.count() == 1) {
			t.Errorf("%s: follow-up %v, %d sent", c.name, facts(r).Code, b.tr.count())
		}
		if !c.refused {
			continue
		}
		wantFacts(t, facts(r), outcome.Validation, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodeRedirectCrossOrigin)
		if b.j.last().Credential != nil || r.Status != 403 || r.Envelope.Evidence.EarlierAction == "" {
			t.Errorf("%s: %d %+v", c.name, r.Status, r.Envelope.Evidence)
		}
		other := *c.follow
		other.Caller.ID = "other"
		if r := b.Do(t.Context(), &other); facts(r).Code == outcome.CodeRedirectCrossOrigin {
			t.Errorf("%s: another caller's own request was refused", c.name)
		}
		clock.at = testTime.Add(10 * 365 * 24 * time.Hour)
		if r := b.Do(t.Context(), c.follow); facts(r).Code != outcome.CodeRedirectCrossOrigin {
			t.Errorf("%s: a clock that jumped let it pass", c.name)
		}
	}
}

// TestRedirectIsRelayedAgain: the window of a redirect to another origin begins anew when its
// stored answer is relayed, and with a process that cannot know; it does end (R3).
func TestRedirectIsRelayedAgain(t *testing.T) {
	contract.Covers(t, "R3", "I9", "H3")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		b.tr.play = answerWith(307, "", "Location", "https://key.example.test/steal")
		first := b.do(t, keyed("keyed", "k", "x"))
		b.tr.play = answerWith(200, "ok")
		follow := func() outcome.Code {
			return facts(b.do(t, get("https", "key.example.test", "/steal", ""))).Code
		}
		step := func(what string, want outcome.Code) {
			t.Helper()
			if got := follow(); got != want {
				t.Errorf("%s: %v", what, got)
			}
		}
		step("at once", outcome.CodeRedirectCrossOrigin)
		time.Sleep(61 * time.Minute)
		step("after the window", outcome.CodeNone)
		if r := b.do(t, keyed("keyed", "k", "x")); r.Status != 307 || r.Header.Get(outcome.HeaderReplayed) != first.ID.String() {
			t.Fatalf("%d %v", r.Status, r.Header)
		}
		step("relayed again", outcome.CodeRedirectCrossOrigin)
		time.Sleep(61 * time.Minute)
		step("after the second window", outcome.CodeNone)
		b.Pipeline = New(b.cfg)
		step("after a restart", outcome.CodeRedirectCrossOrigin)
		time.Sleep(61 * time.Minute)
		step("an hour after it", outcome.CodeNone)
	})
}

func get(scheme, host, path, query string) *Submission {
	s := post(host, path, "")
	s.Method, s.Body, s.Scheme = "GET", nil, scheme
	s.RawQuery, s.HasQuery = query, query != ""
	if scheme == "http" {
		s.Authorities = Authorities{URL: host, Host: host}
	}
	return s
}

func TestLocations(t *testing.T) {
	base := routes.Target{Scheme: "https", Host: "pay.example.test", Port: 443}
	for loc, want := range map[string]string{
		"https://evil.example.test": "https://evil.example.test:443/", "HTTPS://Evil.Example.test:8443/a?b": "https://evil.example.test:8443/a?b",
		"//evil.example.test?x": "https://evil.example.test:443/?x", "http:///nohost": "http://nohost:80/", "javascript:alert(1)": "", "mailto:a@b": "", "https:evil": "",
		"/rel": "same", "rel": "same", "?q": "same", "": "same", "./a:b": "same", "https://bad host/": "",
	} {
		tg, path, query, hasQuery, same, ok := locationOf(loc, base)
		got := ""
		switch {
		case ok && same:
			got = "same"
		case ok:
			got = tg.Scheme + "://" + tg.Authority() + path
			if hasQuery {
				got += "?" + query
			}
		}
		if got != want {
			t.Errorf("%q: %q, want %q", loc, got, want)
		}
	}
}

// TestResolvedPathOfAPlainOne: a path in which there is nothing to resolve is not taken
// apart, and comes to the same.
func TestResolvedPathOfAPlainOne(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		path := rapid.OneOf(rapid.StringMatching(`/[a-c/.%2Ee\\]{0,10}`), rapid.String()).Draw(t, "path")
		if got, want := resolvedPath("/"+path), resolvedPath("/./"+path); got != want {
			t.Fatalf("%q: %q, taken apart %q", path, got, want)
		}
		if got, want := resolvedPath(path), resolvedPath("/./"+path); path != "" && path[0] == '/' && got != want {
			t.Fatalf("%q: %q, taken apart %q", path, got, want)
		}
	})
}
