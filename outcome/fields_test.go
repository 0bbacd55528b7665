package outcome

import (
	"testing"

	"github.com/dunglas/httpsfv"
	"pgregory.net/rapid"
)

// TestFieldsAsALibraryWritesThem holds the fields that are put together here against a
// library of RFC 9651.
func TestFieldsAsALibraryWritesThem(t *testing.T) {
	token := func(s string) (string, bool) {
		v, err := httpsfv.Marshal(httpsfv.NewItem(httpsfv.Token(s)))
		return v, err == nil
	}
	for _, p := range Phases() {
		for _, o := range Outcomes() {
			for _, r := range Retries() {
				for _, c := range append(Codes(), CodeNone) {
					item := httpsfv.NewItem(httpsfv.Token(o.String()))
					item.Params.Add("phase", httpsfv.Token(p.String()))
					item.Params.Add("retry", httpsfv.Token(r.String()))
					if c != CodeNone {
						item.Params.Add("code", httpsfv.Token(c.String()))
					}
					if want, err := httpsfv.Marshal(item); err != nil || FormatOutcome(Facts{Phase: p, Outcome: o, Retry: r, Code: c}) != want {
						t.Fatalf("%s: %v", want, err)
					}
				}
			}
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		text := rapid.OneOf(rapid.StringMatching(`[ -~]{0,12}`), rapid.StringN(0, 6, -1), rapid.StringMatching(`[a-z*][!-~]{0,5}`))
		kind := rapid.SampledFrom([]string{"", "dns_error", "tls_alert_received", "connection_refused"}).Draw(t, "kind")
		s := Shape{RCode: text.Draw(t, "rcode"), AlertID: rapid.IntRange(-1, 300).Draw(t, "alert"), AlertName: text.Draw(t, "alert name"), NextHop: text.Draw(t, "next hop"),
			NextProtocol: text.Draw(t, "protocol"), ReceivedStatus: rapid.IntRange(0, 1200).Draw(t, "status"), Details: text.Draw(t, "details")}
		item := httpsfv.NewItem(httpsfv.Token("waybill"))
		add := func(name string, v any) {
			if _, err := httpsfv.Marshal(httpsfv.NewItem(v)); err == nil && v != "" {
				item.Params.Add(name, v)
			}
		}
		tokenOr := func(name, s string, other any) {
			if _, ok := token(s); ok {
				add(name, httpsfv.Token(s))
			} else if s != "" {
				add(name, other)
			}
		}
		tokenOr("error", kind, "")
		switch kind {
		case "dns_error":
			add("rcode", s.RCode)
		case "tls_alert_received":
			if s.AlertID > 0 && s.AlertID <= 255 {
				add("alert-id", int64(s.AlertID))
			}
			tokenOr("alert-message", s.AlertName, s.AlertName)
		}
		add("next-hop", s.NextHop)
		tokenOr("next-protocol", s.NextProtocol, []byte(s.NextProtocol))
		if s.ReceivedStatus >= 100 && s.ReceivedStatus <= 999 {
			add("received-status", int64(s.ReceivedStatus))
		}
		add("details", s.Details)
		want, err := httpsfv.Marshal(item)
		if got := member(kind, s); err != nil || got != want {
			t.Fatalf("%q, want %q, %v", got, want, err)
		}
	})
}
