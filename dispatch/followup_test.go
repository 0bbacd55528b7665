package dispatch

import (
	"errors"
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"

	"waybill/internal/contract"
	"waybill/outcome"
)

func genLink(t *rapid.T) *Link {
	switch rapid.IntRange(0, 9).Draw(t, "link") {
	case 0:
		return &Link{Kind: LinkReconcile, Of: "act_x"}
	case 1:
		return &Link{Kind: LinkJob, Of: "act_x"}
	default:
		return nil
	}
}

func genRecall(t *rapid.T) *Recall {
	if rapid.Bool().Draw(t, "recall") {
		return nil
	}
	return &Recall{Values: map[string]string{"request.json.id": "7"}, Items: &ItemList{Count: 3, Atomic: rapid.Bool().Draw(t, "atomic")}}
}

func genResolution(t *rapid.T) *Resolution {
	res := &Resolution{
		Facts:  genFacts(t),
		Source: rapid.SampledFrom(outcome.Sources()).Draw(t, "source"),
		Covers: rapid.IntRange(0, 4).Draw(t, "covers"),
		At:     testTime,
	}
	if rapid.IntRange(0, 4).Draw(t, "sound") > 0 {
		res.Facts = resolutionFacts(rapid.SampledFrom([]outcome.Outcome{outcome.Committed, outcome.Rejected, outcome.Unknown}).Draw(t, "end"))
	}
	if rapid.IntRange(0, 4).Draw(t, "named") > 0 {
		res.Operator, res.Reason, res.Origin, res.OriginSeq = "op", "seen", "journal", 7
	}
	return res
}

// genFollowUp gives an event of this file's kinds its details.
func genFollowUp(t *rapid.T, ev *Event) {
	switch ev.Type {
	case Reconciled:
		ev.Resolution = genResolution(t)
		ev.Resolution.Source = outcome.RemoteQuery
	case Attested:
		ev.Resolution = genResolution(t)
		ev.Resolution.Source = outcome.OperatorAttested
	case EvidenceImported:
		ev.Resolution = genResolution(t)
	case JobRecorded, JobPolled:
		ev.Job = &Job{ID: "j", State: JobPending, Polls: 1}
	case JobEnded:
		ev.Job, ev.Resolution = &Job{ID: "j"}, genResolution(t)
	case ItemsResolved:
		ev.Items = &Items{}
		for i := range rapid.IntRange(0, 4).Draw(t, "items") {
			ev.Items.List = append(ev.Items.List, Item{Index: i, Facts: resolutionFacts(rapid.SampledFrom(outcome.Outcomes()).Draw(t, "item"))})
		}
	default:
	}
}

// TestNothingRegresses: no sequence of attempts, answers, queries, attestations and
// imports takes back what is known (CONTRACT K2): committed stays committed, what
// crossed the boundary is never not_attempted, a resolution without a further attempt
// never turns into unknown – and the attempts stay as they were observed (K3).
func TestNothingRegresses(t *testing.T) {
	contract.Covers(t, "K2", "K3", "F2")
	rapid.Check(t, func(t *rapid.T) {
		drive(t, func(before, after Record, ev *Event, err error) {
			if err != nil {
				if !errors.Is(err, ErrIllegalTransition) || !reflect.DeepEqual(before, after) {
					t.Fatalf("%v was refused with %v and changed the record", ev.Type, err)
				}
				return
			}
			was, is := before.Facts.Outcome, after.Facts.Outcome
			if before.Dispatched() && is == outcome.NotAttempted {
				t.Fatalf("%v: dispatched and not_attempted", ev.Type)
			}
			if was == outcome.Committed && is != outcome.Committed {
				t.Fatalf("%v: committed became %v", ev.Type, is)
			}
			if was == outcome.Rejected && is == outcome.Unknown && ev.Type != DispatchStarted && ev.Type != AttemptInterrupted {
				t.Fatalf("%v: rejected became unknown", ev.Type)
			}
			switch ev.Type {
			case Reconciled, Attested, EvidenceImported:
				if !reflect.DeepEqual(before.Attempts, after.Attempts) || !reflect.DeepEqual(before.Result, after.Result) && after.Result != nil {
					t.Fatalf("%v changed an attempt", ev.Type)
				}
				if len(after.Resolutions) < len(before.Resolutions) || !reflect.DeepEqual(before.Resolutions, after.Resolutions[:len(before.Resolutions)]) && len(before.Resolutions) > 0 {
					t.Fatalf("%v changed earlier evidence", ev.Type)
				}
			default:
			}
			for i, c := range before.Children() {
				now := after.Children()
				if c.Outcome == outcome.Committed && before.Items != nil && i < len(now) && now[i].Outcome != outcome.Committed && hasItem(before.Items, i) {
					t.Fatalf("%v: a committed item became %v", ev.Type, now[i].Outcome)
				}
			}
		})
	})
}

func hasItem(items *Items, index int) bool {
	for _, it := range items.List {
		if it.Index == index {
			return true
		}
	}
	return false
}

func unresolvedRecord(t *testing.T) Record {
	t.Helper()
	r := dispatched(t)
	return apply2(t, r, &Event{Type: AttemptResolved, Attempt: 1, At: testTime, Ended: &Ended{Facts: unresolvedFacts(outcome.Reconcile), Source: outcome.TransportObserved}})
}

func evidenceOf(typ EventType, o outcome.Outcome) *Event {
	res := &Resolution{Facts: resolutionFacts(o), Source: outcome.RemoteQuery}
	if o == outcome.NotAttempted {
		res.Facts = outcome.Facts{Phase: outcome.ConnectionSetup, Outcome: o, Retry: outcome.Backoff, Code: outcome.CodeConnectionRefused}
	}
	switch typ {
	case Attested:
		res.Source, res.Operator, res.Reason = outcome.OperatorAttested, "ada", "seen in the dashboard"
	case EvidenceImported:
		res.Source, res.Origin, res.OriginSeq = outcome.RemoteResponse, "journal 2", 41
	default:
	}
	return &Event{Type: typ, At: testTime, Resolution: res}
}

// TestLaterEvidence: what may become of an unresolved action, and what is refused.
func TestLaterEvidence(t *testing.T) {
	contract.Covers(t, "K1", "K2", "K3", "K4", "K5", "O3")
	for _, typ := range []EventType{Reconciled, Attested, EvidenceImported} {
		for _, o := range []outcome.Outcome{outcome.Committed, outcome.Rejected} {
			r := unresolvedRecord(t)
			if !r.GuardsRepeats() {
				t.Fatal("an unresolved action does not guard")
			}
			attempts := r.Attempts
			r = apply2(t, r, evidenceOf(typ, o))
			if r.Facts.Outcome != o || r.GuardsRepeats() || r.Facts.Validate() != nil {
				t.Errorf("%v %v: %+v, guards %v", typ, o, r.Facts, r.GuardsRepeats())
			}
			if !reflect.DeepEqual(attempts, r.Attempts) || r.Attempts[0].Facts.Outcome != outcome.Unknown {
				t.Errorf("%v rewrote the attempt (K3)", typ)
			}
			ev := r.Evidence()
			if want := evidenceOf(typ, o).Resolution.Source; ev.Source != want || ev.ResponseComplete || len(ev.Resolutions) != 1 {
				t.Errorf("%v: evidence %+v", typ, ev)
			}
			// A second observer of the same is attached; one of the contrary is refused.
			r = apply2(t, r, evidenceOf(Attested, o))
			if len(r.Resolutions) != 2 {
				t.Error("the second observer is lost (K3)")
			}
			if o == outcome.Committed {
				if _, err := Apply(r, evidenceOf(Attested, outcome.Rejected), 99); !errors.Is(err, ErrIllegalTransition) {
					t.Errorf("committed became rejected: %v", err)
				}
			}
			if _, err := Apply(r, evidenceOf(typ, outcome.NotAttempted), 99); !errors.Is(err, ErrIllegalTransition) {
				t.Errorf("%v: not_attempted was taken: %v", typ, err)
			}
		}
	}
	// Nothing was dispatched: nothing to attest.
	r := apply2(t, Record{}, natural(ActionAccepted), natural(PreflightValidated))
	if _, err := Apply(r, evidenceOf(Attested, outcome.Committed), 9); !errors.Is(err, ErrIllegalTransition) {
		t.Errorf("an action that was not dispatched was attested: %v", err)
	}
	// While the attempt runs nobody knows better.
	if _, err := Apply(dispatched(t), evidenceOf(Reconciled, outcome.Rejected), 9); !errors.Is(err, ErrIllegalTransition) {
		t.Errorf("evidence about an active attempt was taken: %v", err)
	}
	// A complete refusal or success stands.
	done := apply2(t, dispatched(t), natural(RequestSent), natural(ResponseComplete), natural(ResultCommitted))
	for _, o := range []outcome.Outcome{outcome.Rejected, outcome.NotAttempted} {
		if _, err := Apply(done, evidenceOf(Attested, o), 9); !errors.Is(err, ErrIllegalTransition) {
			t.Errorf("a complete answer became %v", o)
		}
	}
}

// TestEarlierRefusalDoesNotSpeakForALaterAttempt: a query that found nothing speaks of
// the attempts before it (A9, K2).
func TestEarlierRefusalDoesNotSpeakForALaterAttempt(t *testing.T) {
	contract.Covers(t, "K2", "A10")
	bound := natural(PreflightValidated)
	bound.Bound.Repeatable = true
	r := apply2(t, Record{}, natural(ActionAccepted), bound, natural(DispatchStarted),
		&Event{Type: AttemptResolved, Attempt: 1, At: testTime, Ended: &Ended{Facts: unresolvedFacts(outcome.Backoff), Source: outcome.TransportObserved}},
		&Event{Type: LeaseTaken, At: testTime, Lease: &Lease{Generation: 2, Until: testTime.Add(time.Hour)}})
	again, query := natural(DispatchStarted), evidenceOf(Reconciled, outcome.Rejected)
	again.Attempt, again.Dispatch.Generation = 2, 2
	query.Resolution.Covers = 1 // it was under way
	r = apply2(t, r, again, query, &Event{Type: AttemptResolved, Attempt: 2, At: testTime, Ended: &Ended{Facts: unresolvedFacts(outcome.Reconcile), Source: outcome.TransportObserved}})
	if r.Facts.Outcome != outcome.Unknown || r.Settled() {
		t.Errorf("%+v", r.Facts)
	}
	r = apply2(t, r, evidenceOf(Reconciled, outcome.Committed))
	if r.Facts.Outcome != outcome.Committed {
		t.Errorf("%+v", r.Facts)
	}
}
