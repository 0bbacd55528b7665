package outcome_test

import (
	"encoding/json"
	"net/http"
	"reflect"
	"testing"

	"github.com/dunglas/httpsfv"

	"waybill/outcome"
)

// FuzzParseOutcome: whatever is accepted is of the enumerations and survives a
// round trip.
func FuzzParseOutcome(f *testing.F) {
	for _, facts := range allFacts() {
		f.Add(outcome.FormatOutcome(facts))
	}
	for _, s := range []string{"unknown", "unknown;phase", "unknown;phase=:aGk=:;retry=@1", "a;b=%\"x\"", `"x";phase=validation`, "unknown;phase=validation;retry=never;code=\x00", "(a);b"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		facts, err := outcome.ParseOutcome(s)
		if err != nil {
			if facts != (outcome.Facts{}) {
				t.Fatalf("%q: %v with facts %+v", s, err, facts)
			}
			return
		}
		text := outcome.FormatOutcome(facts)
		if back, err := outcome.ParseOutcome(text); err != nil || back != facts {
			t.Fatalf("%q: %+v → %q → %+v, %v", s, facts, text, back, err)
		}
	})
}

// FuzzEnvelope: whatever is accepted can be written again without a change, and
// answers by the rules.
func FuzzEnvelope(f *testing.F) {
	for _, facts := range allFacts() {
		b, err := json.Marshal(outcome.NewEnvelope(anID, facts, "", outcome.Evidence{ResponseComplete: true, EarlierAction: anotherID}))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	for _, s := range []string{`{}`, `null`, `[]`, `{"error":null}`, `{"error":{"code":""}}`, `{"evidence":{"attempts":[{}]},"error":{"code":"INTERNAL","phase":null}}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var env outcome.Envelope
		if err := json.Unmarshal(data, &env); err != nil || reflect.DeepEqual(env, outcome.Envelope{}) {
			return // "null" leaves the value as it is
		}
		for _, s := range []outcome.Shape{{}, {InsideTunnel: true, CallerSentKey: true}, {Connect: true, Method: http.MethodHead}} {
			shown := env
			if shown.Error == nil {
				shown.Evidence.ResponseComplete = true
			}
			a := shown.Answer(s)
			if a.Header.Get("Waybill-Invocation") == "" {
				shown.InvocationID = "" // an id that no field can hold
				a = shown.Answer(s)
			}
			if err := checkAnswer(shown, s, a); err != nil {
				t.Fatalf("%s: %v", data, err)
			}
		}
		b, err := json.Marshal(env)
		if err != nil {
			t.Fatalf("%s: %v", data, err)
		}
		var back outcome.Envelope
		if err := json.Unmarshal(b, &back); err != nil {
			t.Fatalf("%s → %s: %v", data, b, err)
		}
		again, err := json.Marshal(back)
		if err != nil || string(again) != string(b) {
			t.Fatalf("%s → %s → %s, %v", data, b, again, err)
		}
	})
}

// FuzzAnnotate: whatever Proxy-Status an upstream sends, ours is the last of a
// well-formed list, and the only one in our name.
func FuzzAnnotate(f *testing.F) {
	for _, s := range []string{"", "a", "a, b;received-status=200", "waybill;error=dns_error", `"waybill"`, "a,", "(a b)", "a;b=:x:", "a;d=@1", "a;d=%\"x\"", "1", "a\x00", "WAYBILL", "a;b=1.5;c=?0"} {
		f.Add(s, "b", 500)
	}
	f.Fuzz(func(t *testing.T, one, two string, status int) {
		h := http.Header{"Proxy-Status": {one, two}}
		outcome.Annotate(h, anID, outcome.Success(), outcome.Shape{ReceivedStatus: status, NextHop: one, NextProtocol: two}, true)
		list, err := httpsfv.UnmarshalList(h.Values("Proxy-Status"))
		if err != nil || len(list) == 0 || len(h.Values("Proxy-Status")) != 1 {
			t.Fatalf("%q: %v", h.Values("Proxy-Status"), err)
		}
		for i, m := range list {
			own := m.(httpsfv.Item).Value == httpsfv.Token("waybill")
			if own != (i == len(list)-1) {
				t.Fatalf("%q", h.Values("Proxy-Status"))
			}
		}
	})
}
