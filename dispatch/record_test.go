package dispatch

import (
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"waybill/internal/contract"
	"waybill/outcome"
)

var testTime = time.Date(2026, 11, 30, 12, 0, 0, 0, time.UTC)

// genFacts draws any facts, possible or not.
func genFacts(t *rapid.T) outcome.Facts {
	return outcome.Facts{
		Phase:   rapid.SampledFrom(outcome.Phases()).Draw(t, "phase"),
		Outcome: rapid.SampledFrom(outcome.Outcomes()).Draw(t, "outcome"),
		Retry:   rapid.SampledFrom(outcome.Retries()).Draw(t, "retry"),
		Code:    rapid.SampledFrom(append(outcome.Codes(), outcome.CodeNone)).Draw(t, "code"),
	}
}

// genEvent draws any event, possible or not, with details that may be missing.
func genEvent(t *rapid.T) *Event {
	ev := &Event{Type: rapid.SampledFrom(EventTypes()).Draw(t, "type"), Attempt: rapid.IntRange(0, 4).Draw(t, "attempt"), At: testTime}
	if rapid.IntRange(0, 19).Draw(t, "bare") == 0 {
		return ev
	}
	ended := func() *Ended {
		return &Ended{Facts: genFacts(t), Reason: rapid.SampledFrom([]string{"", "r"}).Draw(t, "reason")}
	}
	switch ev.Type {
	case ActionAccepted:
		ev.Accepted = &Accepted{Caller: "c", Method: "POST", Relaxed: rapid.IntRange(0, 3).Draw(t, "relaxed") == 0, Link: genLink(t)}
	case PreflightValidated:
		ev.Bound = &Bound{Route: "r", Fingerprint: "sha256:x", Recall: genRecall(t)}
	case CredentialAuthorized:
		ev.Credential = &Credential{ID: "k"}
	case AttemptFailed, ActionRefused, AttemptResolved, AttemptInterrupted, CallerGone:
		ev.Ended = ended()
	case DispatchStarted:
		ev.Dispatch = &Dispatch{Connection: "c1", Unresolved: rapid.SampledFrom(outcome.Retries()).Draw(t, "advice")}
	case RequestSent:
		ev.Sent = &Sent{Headers: true}
	case ResponseStarted, ResponseComplete:
		ev.Response = &Response{Status: 200}
	case ResultCommitted:
		ev.Ended, ev.Result = ended(), &Result{Status: 200}
	case TunnelOpened, TunnelClosed:
		ev.Tunnel = &TunnelInfo{Authority: "h:443"}
	case DeliveryFailed, ResultDelivered, Booted, SessionOpened, SessionClosed, EventInvalid, eventTypes:
	default:
		genFollowUp(t, ev)
	}
	return ev
}

// drive applies events of which most are the natural next one, so that deep states
// are reached, and calls check after each.
func drive(t *rapid.T, check func(before, after Record, ev *Event, err error)) Record {
	var r Record
	script := []EventType{ActionAccepted, PreflightValidated, CredentialAuthorized, DispatchStarted, RequestSent, ResponseStarted, ResponseComplete, ResultCommitted}
	n := rapid.IntRange(1, 24).Draw(t, "events")
	for i := range n {
		ev := genEvent(t)
		if i < len(script) && rapid.IntRange(0, 3).Draw(t, "natural") > 0 {
			ev = natural(script[i])
		}
		before := r
		after, err := Apply(r, ev, uint64(i+1))
		check(before, after, ev, err)
		r = after
	}
	return r
}

func natural(typ EventType) *Event {
	ev := &Event{Type: typ, Attempt: 1, At: testTime}
	switch typ {
	case ActionAccepted:
		ev.Accepted, ev.Attempt = &Accepted{Caller: "c", Method: "POST"}, 0
	case PreflightValidated:
		ev.Bound, ev.Attempt = &Bound{Route: "r", Fingerprint: "sha256:x"}, 0
	case CredentialAuthorized:
		ev.Credential, ev.Attempt = &Credential{ID: "k"}, 0
	case DispatchStarted:
		ev.Dispatch = &Dispatch{Connection: "c1", Unresolved: outcome.Reconcile}
	case RequestSent:
		ev.Sent = &Sent{Headers: true, Complete: true}
	case ResponseStarted, ResponseComplete:
		ev.Response = &Response{Status: 200}
	case ResultCommitted:
		ev.Ended, ev.Result = &Ended{Facts: outcome.Success(), Source: outcome.RemoteResponse}, &Result{Status: 200}
	default:
	}
	return ev
}

// TestOnceDispatchedNeverNotAttempted is the claim of the product: whatever events
// come in whatever order, a record that crossed the boundary never says
// not_attempted again, and committed stays committed.
func TestOnceDispatchedNeverNotAttempted(t *testing.T) {
	contract.Covers(t, "F2", "M2", "A9")
	rapid.Check(t, func(t *rapid.T) {
		drive(t, func(before, after Record, ev *Event, err error) {
			if err != nil {
				if !errors.Is(err, ErrIllegalTransition) {
					t.Fatalf("%v: %v is no ErrIllegalTransition", ev.Type, err)
				}
				if !reflect.DeepEqual(before, after) {
					t.Fatalf("%v was refused and changed the record", ev.Type)
				}
				return
			}
			if after.Dispatched() && after.Facts.Outcome == outcome.NotAttempted {
				t.Fatalf("%v: dispatched and not_attempted: %+v", ev.Type, after)
			}
			if before.Dispatched() && !after.Dispatched() {
				t.Fatalf("%v: the boundary was uncrossed", ev.Type)
			}
			for i := range before.Attempts {
				b, a := before.Attempts[i], after.Attempts[i]
				if b.Facts.Outcome == outcome.Committed && a.Facts.Outcome != outcome.Committed {
					t.Fatalf("%v: committed became %v", ev.Type, a.Facts.Outcome)
				}
				if b.DispatchSeq != 0 && (a.DispatchSeq != b.DispatchSeq || a.Facts.Outcome == outcome.NotAttempted) {
					t.Fatalf("%v: dispatched attempt %d became %+v", ev.Type, b.N, a)
				}
			}
			if after.Facts.Outcome == outcome.Committed {
				if a := after.Deciding(); (a == nil || !a.Complete) && !after.Settled() {
					t.Fatalf("%v: committed without a complete response (G1)", ev.Type)
				}
			}
		})
	})
}

// TestRebuildEqualsLive: a record rebuilt from its events, also through JSON, is the live one.
func TestRebuildEqualsLive(t *testing.T) {
	contract.Covers(t, "M1", "M3")
	rapid.Check(t, func(t *rapid.T) {
		type stored struct {
			Seq uint64
			Ev  Event
		}
		var log []stored
		seq := uint64(0)
		live := drive(t, func(_, _ Record, ev *Event, err error) {
			seq++
			if err == nil {
				log = append(log, stored{seq, *ev})
			}
		})
		data, err := json.Marshal(log)
		if err != nil {
			t.Fatal(err)
		}
		var back []stored
		if err := json.Unmarshal(data, &back); err != nil {
			t.Fatal(err)
		}
		var rebuilt Record
		for _, s := range back {
			if rebuilt, err = Apply(rebuilt, &s.Ev, s.Seq); err != nil {
				t.Fatalf("replay of %v: %v", s.Ev.Type, err)
			}
		}
		a, _ := json.Marshal(live)
		b, _ := json.Marshal(rebuilt)
		if string(a) != string(b) {
			t.Fatalf("live    %s\nrebuilt %s", a, b)
		}
	})
}

// TestApplyAll: several events at once come to what they come to one by one, or to
// nothing, and the record before them stays as it was.
func TestApplyAll(t *testing.T) {
	contract.Covers(t, "M1")
	rapid.Check(t, func(t *rapid.T) {
		var events []Event
		drive(t, func(_, _ Record, ev *Event, err error) {
			if err == nil || rapid.IntRange(0, 9).Draw(t, "illegal") == 0 {
				events = append(events, *ev)
			}
		})
		var one, all Record
		for seq := uint64(1); len(events) > 0; {
			n := rapid.IntRange(1, len(events)).Draw(t, "batch")
			batch, want, wantErr := events[:n], one, error(nil)
			for i := range batch {
				if want, wantErr = Apply(want, &batch[i], seq+uint64(i)); wantErr != nil {
					want = one
					break
				}
			}
			before := all
			before.Attempts = slices.Clone(all.Attempts)
			got, err := ApplyAll(all, batch, seq)
			if !reflect.DeepEqual(got, want) || fmt.Sprint(err) != fmt.Sprint(wantErr) {
				t.Fatalf("at once %+v, %v\none by one %+v, %v", got, err, want, wantErr)
			}
			if !reflect.DeepEqual(all, before) {
				t.Fatalf("the record before was changed: %+v, it was %+v", all, before)
			}
			one, all, events, seq = want, got, events[n:], seq+uint64(n)
		}
	})
}

// TestInterruptClosesEveryOpenRecord: what start-up does to an open action is legal
// and says not_attempted only where no boundary was crossed.
func TestInterruptClosesEveryOpenRecord(t *testing.T) {
	contract.Covers(t, "M2", "M4", "F1")
	rapid.Check(t, func(t *rapid.T) {
		r := drive(t, func(Record, Record, *Event, error) {})
		if r.Events == 0 {
			return
		}
		ev, open := Interrupt(&r, testTime)
		if open == r.Ended {
			t.Fatalf("ended=%v but open=%v", r.Ended, open)
		}
		if !open {
			return
		}
		after, err := Apply(r, &ev, 1000)
		if err != nil {
			t.Fatalf("%+v: %v", r, err)
		}
		want := outcome.NotAttempted
		if r.Dispatched() {
			want = outcome.Unknown
		}
		got := after.Facts.Outcome
		if r.Dispatched() && (got == outcome.Committed || got == outcome.Rejected) {
			// An earlier attempt is resolved on record; the interrupted one is not.
			a := after.Deciding()
			if (a == nil || a.Recovered) && !r.Settled() {
				t.Fatalf("recovered as %v", got)
			}
			return
		}
		if !after.Ended || got != want {
			t.Fatalf("after a crash: %v, want %v (%+v)", got, want, after)
		}
		if _, again := Interrupt(&after, testTime); again {
			t.Fatal("closed twice")
		}
	})
}

func apply2(t *testing.T, r Record, evs ...*Event) Record {
	t.Helper()
	for _, ev := range evs {
		var err error
		if r, err = Apply(r, ev, r.LastSeq+1); err != nil {
			t.Fatal(err)
		}
	}
	return r
}

func dispatched(t *testing.T) Record {
	t.Helper()
	return apply2(t, Record{}, natural(ActionAccepted), natural(PreflightValidated), natural(CredentialAuthorized), natural(DispatchStarted))
}

// TestLaterAttempts: an action's outcome is projected from all of its attempts.
func TestLaterAttempts(t *testing.T) {
	contract.Covers(t, "A9", "A10")
	unknown := &Event{Type: AttemptResolved, Attempt: 1, At: testTime, Ended: &Ended{Facts: outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.SameIdempotencyKey, Code: outcome.CodeRemoteTimeout}}}
	refused := outcome.Facts{Phase: outcome.ConnectionSetup, Outcome: outcome.NotAttempted, Retry: outcome.Backoff, Code: outcome.CodeConnectionRefused}
	keyed := natural(PreflightValidated)
	keyed.Bound.Key = &Key{Key: "k", Scope: "s", ExpiresAt: testTime.Add(time.Hour)}
	r := apply2(t, Record{}, natural(ActionAccepted), keyed, natural(CredentialAuthorized), natural(DispatchStarted), unknown)

	later := apply2(t, r, &Event{Type: AttemptFailed, Attempt: 2, At: testTime, Ended: &Ended{Facts: refused}})
	if later.Facts != unknown.Ended.Facts || len(later.Attempts) != 2 || later.Attempts[1].Facts != refused {
		t.Errorf("A9: a later try that never left changed the action: %+v", later.Facts)
	}
	if _, err := Apply(r, &Event{Type: ActionRefused, At: testTime, Ended: &Ended{Facts: refused}}, 9); !errors.Is(err, ErrIllegalTransition) {
		t.Errorf("a dispatched action was refused: %v", err)
	}

	second := natural(DispatchStarted)
	second.Attempt, second.Dispatch.Generation = 2, 2
	r = apply2(t, r, &Event{Type: LeaseTaken, At: testTime, Lease: &Lease{Generation: 2, Process: "p", Until: testTime.Add(time.Minute)}})
	rejected := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Rejected, Retry: outcome.AfterCorrection, Code: outcome.CodeRemoteRejected}
	complete := natural(ResponseComplete)
	complete.Attempt = 2
	later = apply2(t, r, second, complete, &Event{Type: ResultCommitted, Attempt: 2, At: testTime, Ended: &Ended{Facts: rejected}, Result: &Result{Status: 401}})
	if later.Facts != unknown.Ended.Facts || later.Attempts[1].Facts != rejected {
		t.Errorf("A10: the refusal of the repeat resolved the first attempt: %+v", later.Facts)
	}
	later = apply2(t, r, second, complete, &Event{Type: ResultCommitted, Attempt: 2, At: testTime, Ended: &Ended{Facts: outcome.Success()}, Result: &Result{Status: 200}})
	if later.Facts != outcome.Success() || len(later.Attempts) != 2 {
		t.Errorf("a committed repeat is not shown: %+v", later.Facts)
	}
}

// TestDeliveryKeepsTheOutcome: H2 and H6.
func TestDeliveryKeepsTheOutcome(t *testing.T) {
	contract.Covers(t, "H2", "H6")
	r := apply2(t, dispatched(t), natural(RequestSent), natural(ResponseStarted), natural(ResponseComplete), natural(ResultCommitted))
	failed := apply2(t, r, &Event{Type: DeliveryFailed, At: testTime})
	want := outcome.Facts{Phase: outcome.ResultDelivery, Outcome: outcome.Committed, Retry: outcome.FetchResult, Code: outcome.CodeDeliveryFailed}
	if failed.Facts != want {
		t.Errorf("facts %+v, want %+v", failed.Facts, want)
	}
	acked := apply2(t, failed, &Event{Type: ResultDelivered, At: testTime}, &Event{Type: DeliveryFailed, At: testTime})
	if acked.Facts != outcome.Success() || !acked.Delivered {
		t.Errorf("acknowledged: %+v delivered=%v", acked.Facts, acked.Delivered)
	}
	if _, err := Apply(dispatched(t), &Event{Type: ResultDelivered, At: testTime}, 9); err == nil {
		t.Error("delivered without a result")
	}
}

// TestCommittedNeedsCompleteness: G1, at the level of the records.
func TestCommittedNeedsCompleteness(t *testing.T) {
	contract.Covers(t, "G1", "H1")
	for _, typ := range []EventType{ResultCommitted, AttemptResolved} {
		ev := natural(ResultCommitted)
		ev.Type = typ
		if _, err := Apply(apply2(t, dispatched(t), natural(ResponseStarted)), ev, 9); !errors.Is(err, ErrIllegalTransition) {
			t.Errorf("%v before REMOTE_RESPONSE_COMPLETE: %v", typ, err)
		}
	}
}

func TestRelaxedIsUnknownFromItsFirstRecord(t *testing.T) {
	contract.Covers(t, "F1")
	ev := natural(ActionAccepted)
	ev.Accepted.Relaxed = true
	r := apply2(t, Record{}, ev)
	if r.Facts.Outcome != outcome.Unknown || !r.Dispatched() {
		t.Fatalf("first record of a relaxed action: %+v", r.Facts)
	}
	closing, _ := Interrupt(&r, testTime)
	if r = apply2(t, r, &closing); r.Facts.Outcome != outcome.Unknown || r.Facts.Retry != outcome.Backoff {
		t.Fatalf("after a crash: %+v", r.Facts)
	}
}

// TestGuardsRepeats: which ended actions make an equal submission suspicious (O3).
func TestGuardsRepeats(t *testing.T) {
	contract.Covers(t, "O3")
	end := func(f outcome.Facts, repeatable bool) Record {
		bound := natural(PreflightValidated)
		bound.Bound.Repeatable = repeatable
		r := apply2(t, Record{}, natural(ActionAccepted), bound, natural(DispatchStarted), natural(ResponseComplete))
		return apply2(t, r, &Event{Type: ResultCommitted, Attempt: 1, At: testTime, Ended: &Ended{Facts: f}, Result: &Result{Status: 200}})
	}
	remote := func(o outcome.Outcome, r outcome.Retry, c outcome.Code) outcome.Facts {
		return outcome.Facts{Phase: outcome.RemoteExecution, Outcome: o, Retry: r, Code: c}
	}
	serverError := remote(outcome.Committed, outcome.Reconcile, outcome.CodeRemoteError)
	for _, c := range []struct {
		name string
		r    Record
		want bool
	}{
		{"gateway", end(remote(outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteGateway), false), true},
		{"5xx", end(serverError, false), true},
		{"5xx, delivery failed", apply2(t, end(serverError, false), &Event{Type: DeliveryFailed, At: testTime}), true},
		{"5xx repeatable", end(serverError, true), false},
		{"success", end(outcome.Success(), false), false},
		{"refusal", end(remote(outcome.Rejected, outcome.AfterCorrection, outcome.CodeRemoteRejected), false), false},
		{"running", dispatched(t), false},
		{"lost to a crash", func() Record {
			r := dispatched(t)
			ev, _ := Interrupt(&r, testTime)
			return apply2(t, r, &ev)
		}(), true},
	} {
		if got := c.r.GuardsRepeats(); got != c.want {
			t.Errorf("%s: %v, want %v", c.name, got, c.want)
		}
	}
}

func TestActionIDRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var id ActionID
		copy(id[:], rapid.SliceOfN(rapid.Byte(), 16, 16).Draw(t, "id"))
		got, err := ParseActionID(id.String())
		if err != nil || got != id {
			t.Fatalf("%v: %v %v", id, got, err)
		}
	})
	for _, bad := range []string{"", "act_", "act_01J", "ACT_01ARZ3NDEKTSV4RRFFQ69G5FAV", "act_01arz3ndektsv4rrffq69g5fav", "act_81ARZ3NDEKTSV4RRFFQ69G5FAVX", "01ARZ3NDEKTSV4RRFFQ69G5FAV"} {
		if _, err := ParseActionID(bad); err == nil {
			t.Errorf("%q was accepted", bad)
		}
	}
}

func FuzzDecodeEvent(f *testing.F) {
	for _, typ := range EventTypes() {
		data, err := json.Marshal(natural(typ))
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		var ev Event
		if json.Unmarshal(data, &ev) != nil {
			return
		}
		for _, r := range []Record{{}, dispatchedRecord()} {
			after, err := Apply(r, &ev, 99)
			if err == nil && after.Dispatched() && after.Facts.Outcome == outcome.NotAttempted {
				t.Fatalf("%s made a dispatched action not_attempted", data)
			}
		}
	})
}

func dispatchedRecord() Record {
	var r Record
	for i, typ := range []EventType{ActionAccepted, PreflightValidated, CredentialAuthorized, DispatchStarted} {
		r, _ = Apply(r, natural(typ), uint64(i+1))
	}
	return r
}
