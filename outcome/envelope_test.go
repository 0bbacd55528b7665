package outcome_test

import (
	"encoding/json"
	"errors"
	"reflect"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"waybill/internal/contract"
	"waybill/outcome"
)

func TestEnvelopeRoundTrip(t *testing.T) {
	contract.Covers(t, "L1")
	rapid.Check(t, func(t *rapid.T) {
		env := genEnvelope().Draw(t, "envelope")
		b, err := json.Marshal(env)
		if err != nil {
			t.Fatal(err)
		}
		var back outcome.Envelope
		if err := json.Unmarshal(b, &back); err != nil {
			t.Fatalf("%s: %v", b, err)
		}
		if !reflect.DeepEqual(back, env) {
			t.Fatalf("%+v\ncame back as\n%+v", env, back)
		}
		if f := back.Facts(); f.Validate() != nil {
			t.Fatalf("%+v: %v", f, f.Validate())
		}
	})
}

func TestEnvelopeShape(t *testing.T) {
	contract.Covers(t, "L1", "L8")
	for _, f := range allFacts() {
		b, err := json.Marshal(outcome.NewEnvelope(anID, f, "", outcome.Evidence{ResponseComplete: true}))
		if err != nil {
			t.Fatal(err)
		}
		var tree struct {
			ID       string            `json:"invocation_id"`
			Error    map[string]string `json:"error"`
			Message  string            `json:"message"`
			Evidence map[string]any    `json:"evidence"`
		}
		if err := json.Unmarshal(b, &tree); err != nil {
			t.Fatalf("%s: %v", b, err)
		}
		if tree.ID != anID {
			t.Errorf("%s", b)
		}
		for _, marker := range []string{"dispatch_started", "request_complete", "response_headers_received", "response_complete"} {
			if _, is := tree.Evidence[marker].(bool); !is {
				t.Errorf("%s: no %s", b, marker)
			}
		}
		switch {
		case f.IsSuccess():
			if tree.Error != nil || tree.Message != "" {
				t.Errorf("a success: %s", b)
			}
			continue
		case f.Code == outcome.CodeActionNotFound:
			if len(tree.Error) != 2 || tree.Error["code"] != "ACTION_NOT_FOUND" {
				t.Errorf("facts of an action that is not known: %s", b)
			}
			continue
		case f.Code == outcome.CodeNone:
			f.Code = outcome.CodeResultPending // it still runs
		}
		want := map[string]string{"code": f.Code.String(), "phase": f.Phase.String(), "outcome": f.Outcome.String(), "retry": f.Retry.String(), "message": tree.Message}
		if tree.Message == "" || !reflect.DeepEqual(tree.Error, want) {
			t.Errorf("%s, want error %v", b, want)
		}
	}
}

func TestEnvelopeDecodingRefuses(t *testing.T) {
	contract.Covers(t, "A8")
	const err = `"code":"REMOTE_TIMEOUT","phase":"remote_execution","outcome":"unknown","retry":"reconcile","message":"m"`
	for text, want := range map[string]error{
		`{}`:                    outcome.ErrNotEnvelope,
		`{"invocation_id":"x"}`: outcome.ErrNotEnvelope,
		`{"error":null,"evidence":{"response_complete":false}}`: outcome.ErrNotEnvelope,
		`{"error":{}}`: outcome.ErrNotEnvelope,
		`{"error":{` + strings.Replace(err, `"code":"REMOTE_TIMEOUT",`, ``, 1) + `}}`:                         outcome.ErrNotEnvelope,
		`{"error":{` + strings.Replace(err, `"phase":"remote_execution",`, ``, 1) + `}}`:                      outcome.ErrUnknownValue,
		`{"error":{` + strings.Replace(err, `"outcome":"unknown",`, ``, 1) + `}}`:                             outcome.ErrUnknownValue,
		`{"error":{` + strings.Replace(err, `"retry":"reconcile",`, ``, 1) + `}}`:                             outcome.ErrUnknownValue,
		`{"error":{` + strings.Replace(err, `reconcile`, `transient`, 1) + `}}`:                               outcome.ErrUnknownValue,
		`{"error":{` + err + `},"evidence":{"attempts":[{"n":1}]}}`:                                           outcome.ErrUnknownValue,
		`{"error":{"code":"ACTION_NOT_FOUND","outcome":"not_attempted","message":"m"}}`:                       outcome.ErrUnknownValue,
		`{"error":{` + err + `},"evidence":{"attempts":[{"n":1,"outcome":"known"}]}}`:                         outcome.ErrUnknownValue,
		`{"error":{` + err + `},"evidence":{"attempts":[{"n":1,"outcome":"unknown","code":"REMOTE_TIMED"}]}}`: outcome.ErrUnknownValue,
	} {
		var env outcome.Envelope
		if got := json.Unmarshal([]byte(text), &env); !errors.Is(got, want) || !reflect.DeepEqual(env, outcome.Envelope{}) {
			t.Errorf("%s: %v, %+v", text, got, env)
		}
	}
	// New evidence fields are no reason to refuse.
	var env outcome.Envelope
	if got := json.Unmarshal([]byte(`{"error":{`+err+`},"evidence":{"exit_status":3}}`), &env); got != nil || env.Error.Code != outcome.CodeRemoteTimeout {
		t.Errorf("%v %+v", got, env)
	}
}

func TestEnvelopeEncodingRefuses(t *testing.T) {
	contract.Covers(t, "A8")
	good := outcome.Error{Code: outcome.CodeRemoteTimeout, Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Message: "m"}
	for name, spoil := range map[string]func(*outcome.Error){
		"no code": func(e *outcome.Error) { e.Code = outcome.CodeNone }, "bad code": func(e *outcome.Error) { e.Code = 250 },
		"no phase": func(e *outcome.Error) { e.Phase = outcome.PhaseInvalid }, "bad phase": func(e *outcome.Error) { e.Phase = 9 },
		"no outcome": func(e *outcome.Error) { e.Outcome = outcome.OutcomeInvalid }, "bad outcome": func(e *outcome.Error) { e.Outcome = 9 },
		"no retry": func(e *outcome.Error) { e.Retry = outcome.RetryInvalid }, "bad retry": func(e *outcome.Error) { e.Retry = 9 },
	} {
		e := good
		spoil(&e)
		if b, err := json.Marshal(outcome.Envelope{Error: &e}); err == nil {
			t.Errorf("%s: %s", name, b)
		}
	}
	if _, err := json.Marshal(outcome.Envelope{Error: &good}); err != nil {
		t.Error(err)
	}
}

// TestEvidenceHasNoRoomForSecrets: evidence is made of fixed, typed fields – there
// is none that could take header fields, a body or anything by name.
func TestEvidenceHasNoRoomForSecrets(t *testing.T) {
	contract.Covers(t, "L4")
	var walk func(path string, typ reflect.Type)
	walk = func(path string, typ reflect.Type) {
		switch typ.Kind() {
		case reflect.Struct:
			for f := range typ.Fields() {
				name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
				if name == "" || name == "-" {
					t.Errorf("%s.%s has no JSON name", path, f.Name)
				}
				for _, word := range []string{"secret", "authorization", "token", "password", "private", "credential", "cookie", "body_text", "header_fields"} {
					if strings.Contains(name, word) {
						t.Errorf("%s.%s", path, name)
					}
				}
				walk(path+"."+name, f.Type)
			}
		case reflect.Pointer:
			walk(path, typ.Elem())
		case reflect.Slice:
			if typ.Elem().Kind() != reflect.Struct {
				t.Errorf("%s is a %s", path, typ)
			}
			walk(path, typ.Elem())
		case reflect.Bool, reflect.Int, reflect.Int64, reflect.Uint64, reflect.Uint8, reflect.String:
		default:
			t.Errorf("%s is a %s", path, typ)
		}
	}
	walk("evidence", reflect.TypeFor[outcome.Evidence]())
}

func TestOutcomeFieldRoundTrip(t *testing.T) {
	contract.Covers(t, "L5")
	for f := range everyFacts {
		text := outcome.FormatOutcome(f)
		back, err := outcome.ParseOutcome(text)
		if err != nil || back != f {
			t.Errorf("%+v: %q: %+v, %v", f, text, back, err)
		}
	}
	if got := outcome.FormatOutcome(outcome.Success()); got != "committed;phase=remote_execution;retry=never" {
		t.Errorf("a success is %q", got)
	}
	for _, f := range []outcome.Facts{{}, {Code: outcome.CodeActionNotFound}, {Phase: 9, Outcome: outcome.Committed, Retry: outcome.Never}, {Phase: outcome.Validation, Outcome: outcome.NotAttempted, Retry: outcome.Never, Code: 200}} {
		if got := outcome.FormatOutcome(f); got != "" {
			t.Errorf("%+v is %q", f, got)
		}
	}
}

func TestUnknownOutcomeFieldsAreRefused(t *testing.T) {
	contract.Covers(t, "A8")
	for text, want := range map[string]error{
		"":                                     outcome.ErrOutcomeField,
		"unknown":                              outcome.ErrOutcomeField,
		"unknown;phase=remote_execution":       outcome.ErrOutcomeField,
		"unknown;retry=reconcile":              outcome.ErrOutcomeField,
		"unknown;phase;retry=reconcile":        outcome.ErrOutcomeField,
		"1;phase=remote_execution;retry=never": outcome.ErrOutcomeField,
		`"unknown";phase=remote_execution;retry=never`:                   outcome.ErrOutcomeField,
		`unknown;phase="remote_execution";retry=never`:                   outcome.ErrOutcomeField,
		"unknown;phase=remote_execution;retry=never;code":                outcome.ErrOutcomeField,
		`unknown;phase=remote_execution;retry=never;code="X"`:            outcome.ErrOutcomeField,
		"unknown;phase=remote_execution;retry=never, unknown":            outcome.ErrOutcomeField,
		"known;phase=remote_execution;retry=never":                       outcome.ErrUnknownValue,
		"unknown;phase=remote;retry=never":                               outcome.ErrUnknownValue,
		"unknown;phase=remote_execution;retry=transient":                 outcome.ErrUnknownValue,
		"unknown;phase=remote_execution;retry=never;code=NO_SUCH":        outcome.ErrUnknownValue,
		"unknown;phase=remote_execution;retry=never;code=remote_timeout": outcome.ErrUnknownValue,
	} {
		f, err := outcome.ParseOutcome(text)
		if !errors.Is(err, want) || f != (outcome.Facts{}) {
			t.Errorf("%q: %+v, %v; want %v", text, f, err, want)
		}
	}
	// A parameter that this build does not know is no reason to refuse.
	if f, err := outcome.ParseOutcome("committed; retry=never; phase=remote_execution; generation=3"); err != nil || f != outcome.Success() {
		t.Errorf("%+v, %v", f, err)
	}
}

func TestSourcesAndStages(t *testing.T) {
	if got := listed(t, "E2", ""); !slices.Equal(got, stringsOf(outcome.Stages())) {
		t.Errorf("stages are %q, contract says %q", outcome.Stages(), got)
	}
	if got := listed(t, "K1", ""); !slices.Equal(got, stringsOf(outcome.Sources())) {
		t.Errorf("sources are %q, contract says %q", outcome.Sources(), got)
	}
}

func stringsOf[T ~string](values []T) []string {
	out := make([]string, len(values))
	for i, v := range values {
		out[i] = string(v)
	}
	return out
}
