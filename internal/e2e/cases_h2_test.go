package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"golang.org/x/net/http2"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// casesH2: an origin that says in a frame that it has not processed a request is
// believed, and nothing is sent again on the strength of it (G8, F2, F6).
func casesH2(t *testing.T, b *bed) {
	post := func(path string, more ...string) *testkit.Response {
		return b.send(t, http.MethodPost, "https://"+h2Host+path, "x=1", more...)
	}
	t.Run("H2-01", func(t *testing.T) {
		contract.Covers(t, "G8", "F2", "F6")
		b.onH2("/v1/h201", []testkit.H2Step{testkit.H2Refuse()}, []testkit.H2Step{testkit.H2Refuse()}, []testkit.H2Step{testkit.H2Reply(200, "ok")})
		for n := 1; n <= 2; n++ {
			s := b.check(t, post("/v1/h201"), want{status: 503, facts: refused, host: h2Host, path: "/v1/h201", arrivals: n})
			if p := s.Envelope.Evidence.ProtocolProof; !strings.Contains(p, "REFUSED_STREAM") || !s.Envelope.Evidence.DispatchStarted {
				t.Errorf("proof %q", p)
			}
		}
		// The refusal was authoritative: the repeat is no duplicate.
		b.check(t, post("/v1/h201"), want{status: 200, facts: success, relayed: true, host: h2Host, path: "/v1/h201", arrivals: 3})
		// With a key that HTTP libraries take for permission to repeat it is the same.
		b.onH2("/v1/h201k", []testkit.H2Step{testkit.H2Refuse()})
		b.check(t, post("/v1/h201k", "Idempotency-Key", "k1"), want{status: 503, facts: refused, host: h2Host, path: "/v1/h201k", arrivals: 1})
	})
	t.Run("H2-02", func(t *testing.T) {
		contract.Covers(t, "G8", "F6")
		for i, c := range []struct {
			steps  []testkit.H2Step
			status int
			facts  string
			proof  string
		}{
			{[]testkit.H2Step{testkit.H2GoAwayBelow(http2.ErrCodeNo), testkit.H2Close()}, 503, refused, "GOAWAY"},
			{[]testkit.H2Step{testkit.H2GoAwayIncluding(http2.ErrCodeNo), testkit.H2Close()}, 424, lost, ""},
			{[]testkit.H2Step{testkit.H2GoAwayBelow(http2.ErrCodeEnhanceYourCalm), testkit.H2Close()}, 503, refused, "GOAWAY"},
			{[]testkit.H2Step{testkit.H2Reset(http2.ErrCodeInternal)}, 424, lost, ""},
			{[]testkit.H2Step{testkit.H2Reset(http2.ErrCodeCancel)}, 424, lost, ""},
			{[]testkit.H2Step{testkit.H2Close()}, 424, lost, ""},
			{[]testkit.H2Step{testkit.H2ConnReset()}, 424, lost, ""},
			// What was refused after a part of the answer had come was not refused.
			{[]testkit.H2Step{testkit.H2Head(201, false), testkit.H2Data([]byte("{"), false), testkit.H2Refuse()}, 424, incomplete, ""},
			{[]testkit.H2Step{testkit.H2Head(201, false), testkit.H2Data([]byte("{"), false), testkit.H2GoAwayBelow(http2.ErrCodeNo), testkit.H2Close()}, 424, incomplete, ""},
			{[]testkit.H2Step{testkit.H2Head(201, false, "content-length", "9"), testkit.H2Data([]byte("{"), true)}, 424, incomplete, ""},
		} {
			path := fmt.Sprintf("/v1/h202/%d", i)
			b.onH2(path, c.steps)
			s := b.check(t, post(path), want{status: c.status, facts: c.facts, host: h2Host, path: path, arrivals: 1})
			if !strings.Contains(s.Envelope.Evidence.ProtocolProof, c.proof) || c.proof == "" && s.Envelope.Evidence.ProtocolProof != "" {
				t.Errorf("%d: proof %q, want %q", i, s.Envelope.Evidence.ProtocolProof, c.proof)
			}
		}
	})
}
