package outcome_test

import (
	"reflect"
	"strings"
	"testing"
	"unicode"

	"pgregory.net/rapid"

	"waybill/internal/contract"
	"waybill/outcome"
)

// firstSentence is all that most agents read.
func firstSentence(message string) string {
	s, _, _ := strings.Cut(message, ". ")
	return strings.TrimSuffix(s, ".")
}

func TestMessageBeginsWithTheInstruction(t *testing.T) {
	contract.Covers(t, "L8")
	exact := map[outcome.Facts]string{
		{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteTimeout}:                 "Outcome unknown: do not repeat; reconcile " + anID,
		{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.SameIdempotencyKey, Code: outcome.CodeRemoteOutcomeUnknown}: "Outcome unknown: repeat only with the same idempotency key",
		{Phase: outcome.ResultDelivery, Outcome: outcome.Committed, Retry: outcome.FetchResult, Code: outcome.CodeDeliveryFailed}:             "Answered by the remote side: do not repeat; fetch the result of " + anID,
		{Phase: outcome.ConnectionSetup, Outcome: outcome.NotAttempted, Retry: outcome.Backoff, Code: outcome.CodeConnectionRefused}:          "Not sent: wait, then send it again",
		{Phase: outcome.Validation, Outcome: outcome.NotAttempted, Retry: outcome.Never, Code: outcome.CodePolicyDenied}:                      "Not sent: do not repeat",
	}
	for f := range everyFacts {
		if f.Code == outcome.CodeNone {
			continue
		}
		env := outcome.NewEnvelope(anID, f, "Something else is said here.", outcome.Evidence{})
		if env.Message != env.Error.Message {
			t.Errorf("%+v: two texts", f)
		}
		first := firstSentence(env.Message)
		if f.Code == outcome.CodeActionNotFound {
			if !strings.Contains(first, "do not repeat") {
				t.Errorf("%s: %q", f.Code, first)
			}
			continue
		}
		if want, ok := exact[f]; ok && first != want {
			t.Errorf("%+v: %q, want %q", f, first, want)
		}
		forbids := strings.Contains(first, "do not repeat")
		switch f.Retry {
		case outcome.Never, outcome.FetchResult, outcome.Reconcile:
			if !forbids {
				t.Errorf("%+v: the first sentence allows a repeat: %q", f, first)
			}
		case outcome.Backoff, outcome.AfterCorrection, outcome.SameIdempotencyKey:
			if forbids {
				t.Errorf("%+v: the first sentence forbids what is allowed: %q", f, first)
			}
		}
		has := func(r outcome.Retry, words string) {
			if (f.Retry == r) != strings.Contains(first, words) {
				t.Errorf("%+v: %q in %q", f, words, first)
			}
		}
		has(outcome.Reconcile, "reconcile "+anID)
		has(outcome.FetchResult, "fetch the result of "+anID)
		has(outcome.SameIdempotencyKey, "only with the same idempotency key")
		has(outcome.Backoff, "wait, then ")
		if (f.Outcome == outcome.NotAttempted) != strings.HasPrefix(first, "Not sent") {
			t.Errorf("%+v: %q", f, first)
		}
		if f.Outcome == outcome.Unknown && !strings.HasPrefix(first, "Outcome unknown") && f.Retry != outcome.FetchResult {
			t.Errorf("%+v: %q", f, first)
		}
	}
}

func TestMessageOfACollision(t *testing.T) {
	contract.Covers(t, "L8")
	for code, want := range map[outcome.Code]string{
		outcome.CodeDuplicateSuspected: "Not sent again: do not repeat; reconcile " + anotherID,
		outcome.CodeInvocationExists:   "Not sent again: do not repeat; fetch the result of " + anotherID,
	} {
		f, _ := outcome.Of(code)
		env := outcome.NewEnvelope(anID, f, "", outcome.Evidence{EarlierAction: anotherID})
		if got := firstSentence(env.Message); got != want {
			t.Errorf("%q, want %q", got, want)
		}
	}
}

func TestMessageIsForPeople(t *testing.T) {
	contract.Covers(t, "L2")
	for _, f := range allFacts() {
		env := outcome.NewEnvelope(anID, f, "", outcome.Evidence{})
		if f.IsSuccess() {
			if env.Error != nil || env.Message != "" {
				t.Errorf("a success says %q", env.Message)
			}
			continue
		}
		if len(env.Message) > 320 || strings.ContainsFunc(env.Message, unicode.IsControl) {
			t.Errorf("%+v: not short: %q", f, env.Message)
		}
		if !strings.Contains(env.Message, ". ") {
			t.Errorf("%+v: no detail: %q", f, env.Message)
		}
		for _, internal := range []string{"EOF", "dial tcp", "net/http", "x509:", "context deadline", "ECONN", "errno", "syscall", "0x", "%!", "nil"} {
			if strings.Contains(env.Message, internal) {
				t.Errorf("%+v: %q holds %q", f, env.Message, internal)
			}
		}
	}
	// Nothing in an envelope has room for a Go error.
	for _, name := range jsonNames(reflect.TypeFor[outcome.Envelope]()) {
		for _, word := range []string{"go_error", "cause_text", "debug", "diagnostic", "stack", "internal"} {
			if strings.Contains(name, word) {
				t.Errorf("an envelope has a field %s", name)
			}
		}
	}
}

func TestMessageDetails(t *testing.T) {
	unknown := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteResultIncomplete}
	invalid, _ := outcome.Of(outcome.CodeInvalidRequest)
	gone := outcome.Facts{Phase: outcome.Validation, Outcome: outcome.NotAttempted, Retry: outcome.AfterCorrection, Code: outcome.CodeCallerCancelled}
	for _, c := range []struct {
		f            outcome.Facts
		detail       string
		ev           outcome.Evidence
		want, absent string
	}{
		{unknown, "", outcome.Evidence{ReceivedStatus: 201}, "head came with status 201 and the body broke off: the work was very probably done", ""},
		{unknown, "", outcome.Evidence{ReceivedStatus: 500}, "its response broke off.", "probably"},
		{invalid, "", outcome.Evidence{Field: "request.headers.host"}, "What to correct: request.headers.host.", ""},
		{invalid, "Two Host fields", outcome.Evidence{}, "then send it again. Two Host fields.", "malformed"},
		{invalid, " a\r\nb\x00c\u2028d ", outcome.Evidence{}, " a  b c d.", ""},
		{gone, "", outcome.Evidence{}, "before anything was sent", ""},
	} {
		got := outcome.NewEnvelope(anID, c.f, c.detail, c.ev).Message
		if !strings.Contains(got, c.want) || c.absent != "" && strings.Contains(got, c.absent) {
			t.Errorf("%q, want %q without %q", got, c.want, c.absent)
		}
	}
}

func TestMessageIsBounded(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := genFacts().Draw(t, "facts")
		detail := strings.Repeat(rapid.String().Draw(t, "detail"), rapid.IntRange(1, 200).Draw(t, "times"))
		got := outcome.Message(anID, f, detail, outcome.Evidence{})
		if len(got) > outcome.MaxDetailBytes+200 || strings.ContainsFunc(got, unicode.IsControl) || strings.ToValidUTF8(got, "") != got {
			t.Fatalf("%d bytes: %q", len(got), got)
		}
	})
}
