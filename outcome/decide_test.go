package outcome_test

import (
	"reflect"
	"testing"

	"waybill/internal/contract"
	"waybill/outcome"
)

// decideTable is CONTRACT O1 worked out by hand: one line for each outcome and
// advice, one column for what else can matter.
var decideTable = []struct {
	o outcome.Outcome
	r outcome.Retry
	// neither idempotent nor the same fingerprint; the same fingerprint only;
	// idempotent only; both
	none, same, idempotent, both outcome.Step
}{
	{outcome.NotAttempted, outcome.Never, stop, stop, stop, stop},
	{outcome.NotAttempted, outcome.AfterCorrection, stop, stop, stop, stop},
	{outcome.NotAttempted, outcome.Backoff, again, again, again, again},
	{outcome.NotAttempted, outcome.SameIdempotencyKey, stop, stop, stop, stop},
	{outcome.NotAttempted, outcome.Reconcile, stop, stop, stop, stop},
	{outcome.NotAttempted, outcome.FetchResult, fetch, fetch, fetch, fetch},
	{outcome.Unknown, outcome.Never, ask, ask, again, again},
	{outcome.Unknown, outcome.AfterCorrection, ask, ask, again, again},
	{outcome.Unknown, outcome.Backoff, ask, ask, again, again},
	{outcome.Unknown, outcome.SameIdempotencyKey, ask, sameKey, again, again},
	{outcome.Unknown, outcome.Reconcile, ask, ask, again, again},
	{outcome.Unknown, outcome.FetchResult, fetch, fetch, fetch, fetch},
	{outcome.Rejected, outcome.Never, recorded, recorded, recorded, recorded},
	{outcome.Rejected, outcome.AfterCorrection, recorded, recorded, recorded, recorded},
	{outcome.Rejected, outcome.Backoff, allowed, allowed, allowed, allowed},
	{outcome.Rejected, outcome.SameIdempotencyKey, recorded, recorded, recorded, recorded},
	{outcome.Rejected, outcome.Reconcile, recorded, recorded, recorded, recorded},
	{outcome.Rejected, outcome.FetchResult, fetch, fetch, fetch, fetch},
	{outcome.Committed, outcome.Never, recorded, recorded, recorded, recorded},
	{outcome.Committed, outcome.AfterCorrection, recorded, recorded, recorded, recorded},
	{outcome.Committed, outcome.Backoff, recorded, recorded, recorded, recorded},
	{outcome.Committed, outcome.SameIdempotencyKey, recorded, recorded, recorded, recorded},
	{outcome.Committed, outcome.Reconcile, recorded, recorded, recorded, recorded},
	{outcome.Committed, outcome.FetchResult, fetch, fetch, fetch, fetch},
}

const (
	fetch    = outcome.StepFetch
	again    = outcome.StepNewAttempt
	stop     = outcome.StepStop
	sameKey  = outcome.StepSameKey
	ask      = outcome.StepReconcile
	allowed  = outcome.StepWhenAllowed
	recorded = outcome.StepReturnRecorded
)

func TestDecideEveryCombination(t *testing.T) {
	contract.Covers(t, "O1", "O2")
	type input struct {
		o outcome.Outcome
		r outcome.Retry
	}
	seen := map[input]bool{}
	for _, line := range decideTable {
		seen[input{line.o, line.r}] = true
		for i, want := range []outcome.Step{line.none, line.same, line.idempotent, line.both} {
			op := outcome.Operation{Idempotent: i >= 2, Fingerprint: "sha256:other"}
			if i%2 == 1 {
				op.Fingerprint = "sha256:same"
			}
			rec := outcome.DecideRecord{InvocationID: anID, Outcome: line.o, Retry: line.r, Fingerprint: "sha256:same"}
			got := outcome.Decide(rec, op)
			wantID := ""
			if want == fetch {
				wantID = anID
			}
			if got.Step != want || got.InvocationID != wantID {
				t.Errorf("%s/%s, idempotent %v, same fingerprint %v: %s %q, want %s", line.o, line.r, i >= 2, i%2 == 1, got.Step, got.InvocationID, want)
			}
			if outcome.Decide(rec, op) != got {
				t.Errorf("%s/%s: two answers", line.o, line.r)
			}
		}
	}
	if want := len(outcome.Outcomes()) * len(outcome.Retries()); len(seen) != want || len(decideTable) != want {
		t.Errorf("the table has %d lines for %d combinations", len(seen), want)
	}
}

// TestDecideWithoutGround: no input outside the enumerations, and no absent
// fingerprint, allows a repeat.
func TestDecideWithoutGround(t *testing.T) {
	contract.Covers(t, "O1", "O2")
	rec := outcome.DecideRecord{Outcome: outcome.Unknown, Retry: outcome.SameIdempotencyKey}
	if got := outcome.Decide(rec, outcome.Operation{}); got.Step != ask {
		t.Errorf("two absent fingerprints are equal: %s", got.Step)
	}
	for o := range 256 {
		for r := range 256 {
			valid := o >= 1 && o <= len(outcome.Outcomes()) && r >= 1 && r <= len(outcome.Retries())
			if valid {
				continue
			}
			for _, idempotent := range []bool{false, true} {
				got := outcome.Decide(outcome.DecideRecord{Outcome: outcome.Outcome(o), Retry: outcome.Retry(r), Fingerprint: "f"}, outcome.Operation{Idempotent: idempotent, Fingerprint: "f"})
				if got.Step.Repeats() || got.Step == outcome.StepInvalid || got.Step == recorded {
					t.Fatalf("outcome %d, retry %d: %s", o, r, got.Step)
				}
			}
		}
	}
}

func TestDecideDoesNotReadThePhase(t *testing.T) {
	contract.Covers(t, "A11")
	phase := reflect.TypeFor[outcome.Phase]()
	fn := reflect.TypeOf(outcome.Decide)
	for i := range fn.NumIn() {
		for f := range fn.In(i).Fields() {
			// Basic kinds only, so that no phase hides further down; and none of them is it.
			if k := f.Type.Kind(); f.Type == phase || k == reflect.Struct || k == reflect.Pointer || k == reflect.Interface || k == reflect.Map || k == reflect.Slice || k == reflect.Func {
				t.Errorf("%s.%s is a %s", fn.In(i), f.Name, f.Type)
			}
			if f.Name == "Code" || f.Name == "Phase" {
				t.Errorf("%s has a %s", fn.In(i), f.Name)
			}
		}
	}
	// The advice itself does not follow from the phase: the same phase comes with
	// different decisions.
	steps := map[outcome.Phase]map[outcome.Step]bool{}
	for _, f := range allFacts() {
		if f.Code == outcome.CodeActionNotFound {
			continue
		}
		if steps[f.Phase] == nil {
			steps[f.Phase] = map[outcome.Step]bool{}
		}
		steps[f.Phase][outcome.Decide(outcome.DecideRecord{Outcome: f.Outcome, Retry: f.Retry}, outcome.Operation{}).Step] = true
	}
	for p, s := range steps {
		if len(s) < 2 {
			t.Errorf("%s has one decision only: %v", p, s)
		}
	}
}

func TestStepNames(t *testing.T) {
	want := []string{"FETCH", "RETRY_NEW_ATTEMPT", "STOP_FOR_CORRECTION", "RETRY_SAME_KEY", "RECONCILE", "RETRY_WHEN_ALLOWED", "RETURN_RECORDED_RESULT"}
	if have := names(outcome.Steps()); !reflect.DeepEqual(have, want) {
		t.Errorf("steps are %q", have)
	}
	repeats := 0
	for _, s := range outcome.Steps() {
		if s.Repeats() {
			repeats++
		}
	}
	if repeats != 3 {
		t.Errorf("%d steps send again", repeats)
	}
}
