package dispatch

import (
	"encoding/json"
	"reflect"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"waybill/internal/contract"
	"waybill/outcome"
	"waybill/routes"
)

func queryAnswer(status int, body string) answered {
	return answered{status: status, doc: routes.ParseDocument([]byte(body))}
}

// TestJudge: what rules make of an answer; whatever is not clear proves nothing.
func TestJudge(t *testing.T) {
	contract.Covers(t, "K6")
	q := &routes.Reconcile{
		CommittedWhen: []routes.Condition{{JSON: []routes.JSONTest{{Path: "data[*].state", Equals: []string{"paid", "7"}}}}},
		RejectedWhen:  []routes.Condition{{JSON: []routes.JSONTest{{Path: "data[0].state", Equals: []string{"refused"}}}}},
		NotFoundWhen:  []routes.Condition{{Empty: []string{"data"}}, {Status: []int{404}}}, NotFoundRejects: true,
	}
	for _, c := range []struct {
		status int
		body   string
		late   bool
		want   outcome.Outcome
	}{
		{200, `{"data":[{"state":"paid"}]}`, false, outcome.Committed},
		{200, `{"data":[{"state":7}]}`, false, outcome.Committed},
		{200, `{"data":[{"state":"refused"}]}`, false, outcome.Rejected},
		{200, `{"data":[{"state":"refused"},{"state":"paid"}]}`, true, outcome.Unknown}, // two rules
		{200, `{"data":[{"state":"new"}]}`, true, outcome.Unknown},
		{200, `{"data":[]}`, false, outcome.Unknown},
		{200, `{"data":[]}`, true, outcome.Rejected},
		{404, `nothing`, true, outcome.Rejected},
		{200, `{}`, true, outcome.Unknown},                           // no array is no empty one
		{200, `{"data":[{"state":"paid"}]}x`, true, outcome.Unknown}, // no JSON document
		{401, `{"data":[]}`, true, outcome.Unknown},                  // about the query
		{429, `{"data":[]}`, true, outcome.Unknown},
		{500, `{"data":[{"state":"paid"}]}`, true, outcome.Unknown},
		{0, ``, true, outcome.Unknown}, // no complete answer
	} {
		res := judge(q, queryAnswer(c.status, c.body), c.late)
		if res.Outcome != c.want || res.Source != outcome.RemoteQuery || res.Facts.Validate() != nil {
			t.Errorf("%d %s late %v: %v (%s %s), want %v", c.status, c.body, c.late, res.Outcome, res.Rule, res.Reason, c.want)
		}
	}
}

// TestNotFoundProvesNothingEarly: neither a clock that jumped nor a fresh process makes an
// operation unseen before its time.
func TestNotFoundProvesNothingEarly(t *testing.T) {
	contract.Covers(t, "K6", "M3")
	synctest.Test(t, func(t *testing.T) {
		q := &routes.Reconcile{VisibleAfter: time.Minute}
		seen := time.Now()
		rec := &Record{EndedAt: seen}
		if late(rec, q, seen.Add(time.Hour), seen) {
			t.Error("the clock jumped an hour ahead, and the operation counts as unseen")
		}
		time.Sleep(time.Minute)
		if late(rec, q, seen.Add(-time.Hour), seen) {
			t.Error("the clock went back, and the operation counts as unseen")
		}
		if !late(rec, q, time.Now(), seen) {
			t.Error("a minute later it does not count")
		}
		if late(rec, q, time.Now(), time.Now()) {
			t.Error("a process that has just begun takes the clock's word")
		}
	})
}

// TestJobForms: the usual forms of a job's state; what is not understood is pending, and
// what is gone is unknown.
func TestJobForms(t *testing.T) {
	contract.Covers(t, "A7")
	for _, c := range []struct {
		status int
		body   string
		want   outcome.Outcome
		done   bool
	}{
		{200, `{"status":"Succeeded"}`, outcome.Committed, true}, {200, `{"status":"IN_PROGRESS"}`, outcome.Unknown, false},
		{200, `{"properties":{"provisioningState":"Canceled"}}`, outcome.Rejected, true}, {200, `{"state":"frobnicating"}`, outcome.Unknown, false},
		{200, `{"done":false}`, outcome.Unknown, false}, {200, `{"done":true,"error":{"code":3}}`, outcome.Rejected, true}, {200, `{"done":true}`, outcome.Committed, true},
		{202, `{"status":"succeeded"}`, outcome.Unknown, false}, {200, `the report`, outcome.Committed, true}, {303, ``, outcome.Committed, true},
		{404, ``, outcome.Unknown, true}, {400, ``, outcome.Unknown, false},
	} {
		if o, done := jobOutcome(&routes.Async{}, queryAnswer(c.status, c.body)); o != c.want || done != c.done {
			t.Errorf("%d %s: %v %v", c.status, c.body, o, done)
		}
	}
}

// TestMarkJSON: a marker changes nothing of a document but itself, and is found again.
func TestMarkJSON(t *testing.T) {
	contract.Covers(t, "K7")
	for in, want := range map[string]string{
		`{}`:                               `{"metadata":{"waybill":"ID"}}`,
		` { "a" : 1.0 }`:                   ` {"metadata":{"waybill":"ID"}, "a" : 1.0 }`,
		`{"a":1,"metadata": {"x":"y"}}`:    `{"a":1,"metadata": {"waybill":"ID","x":"y"}}`,
		`{"metadata":{}}`:                  `{"metadata":{"waybill":"ID"}}`,
		`{"metadata":null}`:                "", // no place
		`{"metadata":{"waybill":"mine"}}`:  "",
		`{"metadata":{},"metadata":{}}`:    "",
		`[1]`:                              "",
		`{"a":1} x`:                        "",
		`{"b":{"metadata":{"waybill":1}}}`: `{"metadata":{"waybill":"ID"},"b":{"metadata":{"waybill":1}}}`,
	} {
		got, ok := markJSON([]byte(in), "metadata.waybill", "ID")
		if ok != (want != "") || string(got) != want {
			t.Errorf("%s: %s %v, want %s", in, got, ok, want)
		}
	}
	value := rapid.Custom(func(t *rapid.T) any {
		return rapid.OneOf(rapid.Just[any](nil), rapid.Map(rapid.String(), func(s string) any { return s }), rapid.Map(rapid.Int(), func(i int) any { return float64(i % 1000) })).Draw(t, "v")
	})
	rapid.Check(t, func(t *rapid.T) {
		doc := map[string]any{}
		for k, v := range rapid.MapOf(rapid.StringMatching(`[a-c]{1,2}`), value).Draw(t, "doc") {
			doc[k] = v
		}
		if rapid.Bool().Draw(t, "nested") {
			doc["a"] = map[string]any{"x": 1.0}
		}
		raw, err := json.Marshal(doc)
		if err != nil {
			t.Fatal(err)
		}
		marked, ok := markJSON(raw, "a.b", "ID")
		if !ok {
			if inner, is := doc["a"].(map[string]any); doc["a"] == nil && len(doc) > 0 && !hasKey(doc, "a") || is && inner["b"] == nil {
				t.Fatalf("no place in %s", raw)
			}
			return
		}
		var back map[string]any
		if err := json.Unmarshal(marked, &back); err != nil {
			t.Fatalf("%s: %v", marked, err)
		}
		inner, _ := back["a"].(map[string]any)
		if inner["b"] != "ID" {
			t.Fatalf("%s", marked)
		}
		delete(inner, "b")
		if !hasKey(doc, "a") {
			delete(back, "a")
		}
		if !reflect.DeepEqual(back, doc) {
			t.Fatalf("%s became %s", raw, marked)
		}
	})
}

func hasKey(m map[string]any, k string) bool { _, ok := m[k]; return ok }

// TestAtomicBatch: an atomic batch has one outcome for all of its items.
func TestAtomicBatch(t *testing.T) {
	contract.Covers(t, "F7")
	bound := natural(PreflightValidated)
	bound.Bound.Recall = &Recall{Items: &ItemList{Count: 2, Atomic: true}}
	r := apply2(t, Record{}, natural(ActionAccepted), bound, natural(DispatchStarted))
	open := apply2(t, r, &Event{Type: AttemptResolved, Attempt: 1, At: testTime, Ended: &Ended{Facts: unresolvedFacts(outcome.Reconcile), Source: outcome.TransportObserved}})
	for _, c := range open.Children() {
		if c.Outcome != outcome.Unknown || c.Retry != outcome.Reconcile {
			t.Errorf("%+v", c)
		}
	}
	done := apply2(t, r, natural(ResponseComplete), natural(ResultCommitted))
	for _, c := range done.Children() {
		if c.Outcome != outcome.Committed {
			t.Errorf("%+v", c)
		}
	}
	if done.GuardsRepeats() || !open.GuardsRepeats() || len(done.Children()) != 2 {
		t.Error("guards")
	}
	settled := apply2(t, open, evidenceOf(Reconciled, outcome.Committed))
	if c := settled.Children()[1]; c.Outcome != outcome.Committed {
		t.Errorf("%+v", c)
	}
}

// FuzzMarkJSON: whatever the body is, the result is the body with one member more.
func FuzzMarkJSON(f *testing.F) {
	f.Add([]byte(`{"a":{"b":[1,{"a":2}]}}`), "a.c")
	f.Add([]byte("{\"\\u0061\":{}}"), "a.b")
	f.Fuzz(func(t *testing.T, raw []byte, path string) {
		out, ok := markJSON(raw, path, "act_ID")
		if !ok {
			return
		}
		if !json.Valid(out) || !strings.Contains(string(out), "act_ID") || len(out) <= len(raw) {
			t.Errorf("%q at %q: %q", raw, path, out)
		}
	})
}

// What a confirming command tells: only its complete end, only by the rules, and that
// nothing shows only when it would show by now. Everything else leaves the command unknown
// (CONTRACT I8, K6).
func TestConfirmingCommand(t *testing.T) {
	contract.Covers(t, "I8", "K6")
	exit := func(n int) *int { return &n }
	rules := &routes.Confirm{CommittedWhen: &routes.Verdict{ExitStatus: []int{0}, Stdout: "^done "}, RejectedWhen: &routes.Verdict{ExitStatus: []int{0, 1}, Stdout: "^gone"}}
	both := &routes.Confirm{CommittedWhen: &routes.Verdict{ExitStatus: []int{0}}, RejectedWhen: &routes.Verdict{Stdout: "x"}}
	for _, tc := range []struct {
		name         string
		rules        *routes.Confirm
		exit         *int
		stdout       string
		late         bool
		outcome      outcome.Outcome
		rule, reason string
	}{
		{"done", rules, exit(0), "done act_1", false, outcome.Committed, "committed_when", ""},
		{"gone", rules, exit(1), "gone", true, outcome.Rejected, "rejected_when", ""},
		{"gone, too early", rules, exit(1), "gone", false, outcome.Unknown, "rejected_when", "not_visible_yet"},
		{"silence", rules, exit(0), "", true, outcome.Unknown, "", "no_rule"},
		{"another exit status", rules, exit(2), "done act_1", true, outcome.Unknown, "", "no_rule"},
		{"other words", rules, exit(0), "it is done", true, outcome.Unknown, "", "no_rule"},
		{"both rules", both, exit(0), "x", true, outcome.Unknown, "", "no_rule"},
		{"no exit status", rules, nil, "done act_1", true, outcome.Unknown, "", "remote_result_incomplete"},
	} {
		told := toldBy{answered: answered{reason: ""}, exit: tc.exit, stdout: []byte(tc.stdout)}
		if tc.exit == nil {
			told.reason = tc.reason
		}
		res := judgeCommand(tc.rules, told, tc.late)
		if res.Outcome != tc.outcome || res.Rule != tc.rule || res.Reason != tc.reason || res.Source != outcome.RemoteQuery {
			t.Errorf("%s: %+v", tc.name, res)
		}
	}
}
