package e2e

import (
	"fmt"
	"net/http"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// redirect answers with a status and a Location.
func redirect(status int, to string) testkit.Turn {
	return testkit.Respond(testkit.Reply(status, "", "Location", to))
}

// casesRedirects: a redirect is relayed, never followed, and does not carry a
// credential away by way of the caller (R1 to R4).
func casesRedirects(t *testing.T, b *bed) {
	t.Run("RD-01", func(t *testing.T) {
		contract.Covers(t, "R1", "R3", "R4")
		for i, c := range []struct {
			to     string // Location
			follow string // what the caller asks for next
			status int
			facts  string
			host   string
		}{
			{"https://" + evilHost + "/steal", "https://" + evilHost + "/steal", 200, success, evilHost},
			{"//" + evilHost + "/steal2", "https://" + evilHost + "/steal2", 200, success, evilHost},
			{"https://" + msgHost + "/v1/stolen", "https://" + msgHost + "/v1/stolen", 403, crossed, msgHost},
			{"//" + msgHost + "/v1/stolen2?a=b", "https://" + msgHost + "/v1/stolen2?a=b", 403, crossed, msgHost},
			{"https://" + strings.ToUpper(msgHost) + ":443/v1/stolen3", "https://" + msgHost + "/v1/stolen3", 403, crossed, msgHost},
			{"http://" + payHost + "/v1/down", "http://" + payHost + "/v1/down", 403, crossed, payHost},
			{"/v1/rd01/next", "https://" + payHost + "/v1/rd01/next", 200, success, payHost},
			{"next2", "https://" + payHost + "/v1/rd01/next2", 200, success, payHost},
			{"https://nowhere.example.test/x", "https://nowhere.example.test/x", 403, noRoute, ""},
		} {
			path := fmt.Sprintf("/v1/rd01/%d", i)
			b.on(payHost, path, redirect(302, c.to))
			resp := b.send(t, http.MethodGet, "https://"+payHost+path, "")
			b.check(t, resp, want{status: 302, facts: success, relayed: true, host: payHost, path: path, arrivals: 1})
			if got := resp.Header.Get("Location"); got != c.to {
				t.Errorf("Location %q, want %q", got, c.to)
			}
			target := ""
			if c.host != "" {
				_, target, _ = strings.Cut(strings.TrimPrefix(strings.TrimPrefix(c.follow, "https://"), "http://"), "/")
				target, _, _ = strings.Cut("/"+target, "?")
				if n := len(b.arrivals(c.host, target)); n != 0 {
					t.Errorf("%s was followed: %d arrivals", c.to, n)
				}
			}
			follow, err := testkit.TrySend(t, b.client(t, false), http.MethodGet, c.follow, "")
			if err != nil { // a CONNECT that was refused
				if c.host != "" || !strings.Contains(err.Error(), "ROUTE_NOT_FOUND") {
					t.Errorf("%s: %v", c.follow, err)
				}
				continue
			}
			arrivals := 0
			if c.status == 200 {
				arrivals = 1
			}
			b.check(t, b.hear(follow), want{status: c.status, facts: c.facts, relayed: c.status == 200, host: c.host, path: target, arrivals: arrivals})
			if c.host == evilHost && has(b.arrivals(evilHost, target)[0], "Authorization") {
				t.Error("the secret went along")
			}
		}
	})
	t.Run("RD-03", func(t *testing.T) {
		contract.Covers(t, "R1", "R3", "G5")
		for _, status := range []int{301, 302, 303, 307, 308, 300, 305} {
			for j, to := range []string{"https://" + evilHost + "/p", "/v1/charges/7", "https://" + msgHost + "/v1/charges/8"} {
				path := fmt.Sprintf("/api/rd03/%d/%d", status, j)
				b.on(msgHost, path, redirect(status, to))
				resp := b.send(t, http.MethodPost, "https://"+msgHost+path, "x=1")
				b.check(t, resp, want{status: status, facts: success, relayed: true, host: msgHost, path: path, arrivals: 1})
				if got := resp.Header.Get("Location"); got != to {
					t.Errorf("Location %q", got)
				}
			}
		}
		for host, path := range map[string]string{evilHost: "/p", msgHost: "/v1/charges/7"} {
			if n := len(b.arrivals(host, path)); n != 0 {
				t.Errorf("%s%s: %d arrivals", host, path, n)
			}
		}
	})
	t.Run("RD-04", func(t *testing.T) {
		contract.Covers(t, "R3", "C2")
		signed := "https://" + storeHost + "/o?X-Amz-Signature=" + b.query.Value()
		b.on(payHost, "/v1/rd04", redirect(302, signed))
		resp := testkit.Send(t, b.client(t, false), http.MethodGet, "https://"+payHost+"/v1/rd04", "", "Authorization", "Bearer dummy")
		b.check(t, resp, want{status: 302, facts: success, relayed: true, host: payHost, path: "/v1/rd04", arrivals: 1})
		if got := resp.Header.Get("Location"); got != signed {
			t.Errorf("Location %q", got)
		}
		// The client repeats its placeholder there.
		got := b.send(t, http.MethodGet, signed, "", "Authorization", "Bearer dummy")
		s := b.check(t, got, want{status: 200, facts: success, relayed: true, host: storeHost, path: "/o", arrivals: 1})
		a := b.arrivals(storeHost, "/o")[0]
		if has(a, "Authorization") || !strings.HasSuffix(a.Target, b.query.Value()) || strings.Contains(string(a.RawHead), b.canary.Value()) {
			t.Errorf("%v", fieldNames(a))
		}
		if strings.Contains(s.View.Target, "Signature="+b.query.Value()) || s.View.Target == "" {
			t.Errorf("target %q", s.View.Target)
		}
	})
}
