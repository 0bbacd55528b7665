package outcome_test

import (
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/outcome"
)

// triple is facts without a code.
type triple struct {
	p outcome.Phase
	o outcome.Outcome
	r outcome.Retry
}

func parsed[T any, P interface {
	*T
	UnmarshalText([]byte) error
}](t *testing.T, text string) T {
	t.Helper()
	var v T
	if err := P(&v).UnmarshalText([]byte(text)); err != nil {
		t.Fatalf("%q: %v", text, err)
	}
	return v
}

// cell cuts the notes off a cell: "unknown (F9)" is "unknown".
func cell(s string) string {
	s, _, _ = strings.Cut(s, " (")
	return strings.TrimSpace(s)
}

const theActions = "the action's"

// wanted reads the facts that a row of section U allows. It is written from the
// table's words, apart from the data it is compared with. Rows that show an
// action's facts, whatever they are, come back as second result.
func wanted(t *testing.T, row contract.CodeRow) (out []triple, ofAction bool) {
	t.Helper()
	before := []outcome.Phase{outcome.Validation, outcome.CredentialInjection, outcome.ConnectionSetup}
	after := []outcome.Phase{outcome.RemoteExecution}
	byContract := []outcome.Retry{outcome.Backoff, outcome.SameIdempotencyKey, outcome.Reconcile}
	cross := func(ps []outcome.Phase, os []outcome.Outcome, rs []outcome.Retry) {
		for _, p := range ps {
			for _, o := range os {
				for _, r := range rs {
					out = append(out, triple{p, o, r})
				}
			}
		}
	}
	retries := func(text string) []outcome.Retry {
		switch text {
		case "by contract":
			return byContract
		case "G5":
			return []outcome.Retry{outcome.AfterCorrection, outcome.Backoff, outcome.Never}
		case theActions:
			return outcome.Retries()
		}
		return []outcome.Retry{parsed[outcome.Retry](t, text)}
	}

	phase, result, retry := cell(row.Phase), cell(row.Outcome), cell(row.Retry)
	switch {
	case row.Code == "INTERNAL":
		// "where it stopped", "what the journal proves", "never / reconcile".
		never, both := []outcome.Retry{outcome.Never}, []outcome.Retry{outcome.Never, outcome.Reconcile}
		past := []outcome.Phase{outcome.RemoteExecution, outcome.ResultDelivery}
		cross(before, []outcome.Outcome{outcome.NotAttempted}, never)
		cross(past, []outcome.Outcome{outcome.Rejected, outcome.Committed}, both)
		cross(append(past, outcome.ConnectionSetup), []outcome.Outcome{outcome.Unknown}, []outcome.Retry{outcome.Reconcile})
	case phase == "–":
		if result != "–" || retry != "–" {
			t.Fatalf("%s: %q, %q, %q", row.Code, phase, result, retry)
		}
	case phase == theActions:
		return nil, true
	case phase == "where it stopped":
		first, second, twice := strings.Cut(retry, " / ")
		if !twice {
			second = first
		}
		if !strings.HasPrefix(result, "not_attempted") {
			t.Fatalf("%s: %q", row.Code, result)
		}
		cross(before, []outcome.Outcome{outcome.NotAttempted}, retries(first))
		if strings.Contains(row.Outcome, "unknown after") {
			cross(after, []outcome.Outcome{outcome.Unknown}, retries(second))
		}
	default:
		outcomes := []outcome.Outcome{outcome.Rejected, outcome.Committed, outcome.Unknown}
		if result != "kept" {
			outcomes = nil
			for _, o := range strings.Split(result, " / ") {
				outcomes = append(outcomes, parsed[outcome.Outcome](t, o))
			}
		}
		cross([]outcome.Phase{parsed[outcome.Phase](t, phase)}, outcomes, retries(retry))
	}
	return out, false
}

func sorted(ts []triple) []triple {
	ts = slices.Clone(ts)
	slices.SortFunc(ts, func(a, b triple) int {
		return int(a.p)<<16 + int(a.o)<<8 + int(a.r) - int(b.p)<<16 - int(b.o)<<8 - int(b.r)
	})
	return slices.Compact(ts)
}

// TestTableIsSectionU compares every row of section U of docs/contract.md with the
// data: the facts, the status, Retry-After and the Proxy-Status error – the last
// three in the answers themselves.
func TestTableIsSectionU(t *testing.T) {
	contract.Covers(t, "A2", "A3", "A4", "A6", "A8", "L5", "L7")
	rows, err := contract.CodeTable()
	if err != nil {
		t.Fatal(err)
	}
	want := map[string][]triple{}
	// What any action can show: a success, an action that runs, and every row that is
	// not itself about another action or a mere attempt.
	anyAction := []triple{{outcome.RemoteExecution, outcome.Committed, outcome.Never}, {outcome.RemoteExecution, outcome.Unknown, outcome.FetchResult}}
	for _, p := range []outcome.Phase{outcome.Validation, outcome.CredentialInjection, outcome.ConnectionSetup} {
		anyAction = append(anyAction, triple{p, outcome.NotAttempted, outcome.FetchResult})
	}
	for _, row := range rows {
		facts, ofAction := wanted(t, row)
		if ofAction {
			continue
		}
		want[row.Code] = facts
		if !strings.HasPrefix(row.Note, "of an attempt") {
			anyAction = append(anyAction, facts...)
		}
	}
	for _, row := range rows {
		code := parsed[outcome.Code](t, row.Code)
		rule := outcome.Lookup(code)
		if rule.Code != code {
			t.Errorf("%s: Lookup returns %s", code, rule.Code)
		}
		facts, ofAction := want[row.Code], false
		if _, fixed := want[row.Code]; !fixed {
			ofAction = true
			facts = slices.Clone(anyAction)
			if r := cell(row.Retry); r != theActions {
				for i := range facts {
					facts[i].r = parsed[outcome.Retry](t, r)
				}
			}
		}
		var have []triple
		for _, f := range rule.Facts() {
			if f.Code != code {
				t.Errorf("%s: facts with code %s", code, f.Code)
			}
			if f.Phase != outcome.PhaseInvalid || f.Outcome != outcome.OutcomeInvalid || f.Retry != outcome.RetryInvalid {
				have = append(have, triple{f.Phase, f.Outcome, f.Retry})
			}
		}
		if h, w := sorted(have), sorted(facts); !slices.Equal(h, w) {
			t.Errorf("%s (of an action: %v): facts are\n%v\nsection U says\n%v", code, ofAction, h, w)
		}
		if _, one := outcome.Of(code); one != (len(sorted(facts)) == 1) {
			t.Errorf("%s: Of says %v for %d combinations", code, one, len(facts))
		}
		for _, f := range rule.Facts() {
			for _, s := range shapes() {
				if err := httpColumn(row, f, s); err != nil {
					t.Fatalf("%+v with %+v: %v", f, s, err)
				}
			}
		}
		checkProxyError(t, row, rule)
	}
}

// httpColumn compares an answer with the HTTP column of its row.
func httpColumn(row contract.CodeRow, f outcome.Facts, s outcome.Shape) error {
	env := outcome.NewEnvelope(anID, f, "", outcome.Evidence{})
	a := env.Answer(s)
	text, ra := strings.CutSuffix(row.HTTP, " RA")
	rule := outcome.Lookup(f.Code)
	var status int
	switch {
	case text == "–" || text == theActions:
		if rule.Answering != outcome.AnswerNone {
			return fmt.Errorf("answering %d", rule.Answering)
		}
		return nil // nobody to answer: whatever TestAnswer holds for every answer
	case strings.HasPrefix(text, "relayed"):
		if rule.Answering != outcome.AnswerRelayed || strings.HasSuffix(text, "RA added") != rule.RetryAfter {
			return fmt.Errorf("answering %d, Retry-After %v", rule.Answering, rule.RetryAfter)
		}
		return nil
	case text == "L7":
		if rule.Answering != outcome.AnswerByAdvice {
			return fmt.Errorf("answering %d", rule.Answering)
		}
		switch {
		case f.Retry == outcome.Backoff && f.Code == outcome.CodeRemoteTimeout:
			status, ra = 504, true
		case f.Retry == outcome.Backoff:
			status, ra = 502, true
		case f.Retry == outcome.SameIdempotencyKey && s.CallerSentKey:
			status, ra = 503, true
		default:
			status = 424
		}
	case text == "422 / 424":
		status = 422
		if f.Retry == outcome.Reconcile {
			status = 424
		}
	case strings.HasPrefix(text, "407, inside a tunnel "):
		status = 407
		if s.InsideTunnel {
			text = strings.TrimPrefix(text, "407, inside a tunnel ")
			status, _ = strconv.Atoi(text)
		}
	default:
		n, err := strconv.Atoi(text)
		if err != nil {
			return fmt.Errorf("HTTP column %q: %w", row.HTTP, err)
		}
		status = n
	}
	if a.Status != status || (a.Header.Get("Retry-After") != "") != ra {
		return fmt.Errorf("status %d, Retry-After %q; section U says %q", a.Status, a.Header.Get("Retry-After"), row.HTTP)
	}
	return nil
}

func checkProxyError(t *testing.T, row contract.CodeRow, rule outcome.Rule) {
	t.Helper()
	want := row.ProxyError
	if i := slices.Index([]string{"–", "received-status"}, want); i >= 0 {
		want = ""
	}
	want, rcode := strings.CutSuffix(want, ", rcode")
	want, alert, _ := strings.Cut(want, " / ")
	if rule.ProxyError != want || rule.AlertError != alert {
		t.Errorf("%s: error %q or %q, section U says %q", rule.Code, rule.ProxyError, rule.AlertError, row.ProxyError)
	}
	env := outcome.NewEnvelope(anID, rule.Facts()[0], "", outcome.Evidence{})
	have := env.Answer(outcome.Shape{}).Header.Get("Proxy-Status")
	wantField := "waybill"
	if want != "" {
		wantField += ";error=" + want
	}
	if have != wantField && !strings.HasPrefix(have, wantField+";") {
		t.Errorf("%s: Proxy-Status %q, want %q", rule.Code, have, wantField)
	}
	if rcode != strings.Contains(have, ";rcode=") {
		t.Errorf("%s: Proxy-Status %q, section U says %q", rule.Code, have, row.ProxyError)
	}
	if alert != "" {
		have = env.Answer(outcome.Shape{AlertID: 40, AlertName: "handshake_failure"}).Header.Get("Proxy-Status")
		if want := "waybill;error=" + alert + ";alert-id=40;alert-message=handshake_failure"; have != want {
			t.Errorf("%s: Proxy-Status %q, want %q", rule.Code, have, want)
		}
	}
}

func TestValidateIsTheTable(t *testing.T) {
	all := map[outcome.Facts]bool{}
	for _, f := range allFacts() {
		all[f] = true
	}
	for f := range everyFacts {
		switch err := f.Validate(); {
		case all[f] && err != nil:
			t.Errorf("%+v: %v", f, err)
		case !all[f] && !errors.Is(err, outcome.ErrFacts):
			t.Errorf("%+v: %v", f, err)
		}
	}
	if err := (outcome.Facts{Code: outcome.CodeActionNotFound}).Validate(); err != nil {
		t.Error(err)
	}
	for _, f := range []outcome.Facts{
		{}, {Code: outcome.CodeInternal},
		{Phase: 99, Outcome: outcome.Committed, Retry: outcome.Never},
		{Phase: outcome.RemoteExecution, Outcome: 99, Retry: outcome.Never},
		{Phase: outcome.RemoteExecution, Outcome: outcome.Committed, Retry: 99},
		{Phase: outcome.RemoteExecution, Outcome: outcome.Committed, Retry: outcome.Never, Code: 200},
	} {
		if err := f.Validate(); !errors.Is(err, outcome.ErrUnknownValue) {
			t.Errorf("%+v: %v", f, err)
		}
	}
}

func TestNotAttemptedNeverWithARemoteFact(t *testing.T) {
	contract.Covers(t, "A3")
	for _, f := range allFacts() {
		if f.Outcome == outcome.NotAttempted && (f.Phase == outcome.RemoteExecution || f.Phase == outcome.ResultDelivery) {
			t.Errorf("%+v: the phase says that the boundary was crossed", f)
		}
		if (f.Outcome == outcome.Committed || f.Outcome == outcome.Rejected) && f.Phase != outcome.RemoteExecution && f.Phase != outcome.ResultDelivery {
			t.Errorf("%+v: an answer without a dispatch", f)
		}
	}
}

func TestCommittedIsNotSuccess(t *testing.T) {
	contract.Covers(t, "A5", "A6")
	f, ok := outcome.Of(outcome.CodeRemoteError)
	if !ok || f.Outcome != outcome.Committed || f.IsSuccess() || f.Retry != outcome.Reconcile {
		t.Errorf("a complete 500 is %+v", f)
	}
	env := outcome.NewEnvelope(anID, f, "", outcome.Evidence{ResponseComplete: true})
	if env.Error == nil || env.Error.Outcome != outcome.Committed {
		t.Errorf("a complete 500 has error %+v", env.Error)
	}
	if got := outcome.Lookup(outcome.CodeRemoteRejected).Facts(); slices.ContainsFunc(got, func(f outcome.Facts) bool { return f.Outcome != outcome.Rejected }) {
		t.Errorf("a refusal is %v", got)
	}
	// Facts that differ only in rejected and committed look different everywhere.
	for f := range everyFacts {
		if f.Outcome != outcome.Rejected {
			continue
		}
		g := f
		g.Outcome = outcome.Committed
		if outcome.FormatOutcome(f) == outcome.FormatOutcome(g) || outcome.Instruction(f, anID) == outcome.Instruction(g, anID) && f.Code != outcome.CodeActionNotFound {
			t.Errorf("%+v and %+v look the same", f, g)
		}
	}
}

func TestByContract(t *testing.T) {
	for _, c := range []struct {
		repeatable, kept bool
		want             outcome.Retry
	}{{true, true, outcome.Backoff}, {true, false, outcome.Backoff}, {false, true, outcome.SameIdempotencyKey}, {false, false, outcome.Reconcile}} {
		if got := outcome.ByContract(c.repeatable, c.kept); got != c.want {
			t.Errorf("repeatable %v, kept %v: %s", c.repeatable, c.kept, got)
		}
	}
}

func TestLookupOfAnInvalidCode(t *testing.T) {
	if r := outcome.Lookup(255); r.Code != outcome.CodeInternal {
		t.Errorf("row of %s", r.Code)
	}
	if _, ok := outcome.Of(255); ok {
		t.Error("an invalid code has facts")
	}
	if _, ok := outcome.Of(outcome.CodeNone); ok {
		t.Error("no code has fixed facts")
	}
}
