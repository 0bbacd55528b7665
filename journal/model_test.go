package journal

import (
	"encoding/json"
	"fmt"
	"reflect"
	"testing"
	"time"

	"pgregory.net/rapid"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/outcome"
)

// genEvent draws any event of an action, most of them plausible, some with details
// missing or of another type.
func genEvent() *rapid.Generator[dispatch.Event] {
	types := dispatch.EventTypes()
	return rapid.Custom(func(t *rapid.T) dispatch.Event {
		ev := dispatch.Event{
			Type:    rapid.SampledFrom(types).Draw(t, "type"),
			Attempt: rapid.SampledFrom([]int{0, 1, 1, 1, 2, 2, 3}).Draw(t, "attempt"),
			At:      time.Unix(rapid.Int64Range(0, 1<<33).Draw(t, "at"), 0),
		}
		drop := rapid.IntRange(0, 19).Draw(t, "drop") == 0
		f := outcome.Facts{
			Phase:   rapid.SampledFrom(outcome.Phases()).Draw(t, "phase"),
			Outcome: rapid.SampledFrom(outcome.Outcomes()).Draw(t, "outcome"),
			Retry:   rapid.SampledFrom(outcome.Retries()).Draw(t, "retry"),
			Code:    rapid.SampledFrom(outcome.Codes()).Draw(t, "code"),
		}
		switch ev.Type {
		case dispatch.ActionAccepted:
			ev.Accepted = &dispatch.Accepted{
				Caller: rapid.SampledFrom([]string{"a", "b", "c\xff"}).Draw(t, "caller"), RequestID: rapid.SampledFrom([]string{"", "", "", "r1", "r2", "r\xfe"}).Draw(t, "request"),
				Method: "POST", Target: "https://a/b", Relaxed: rapid.IntRange(0, 3).Draw(t, "relaxed") == 0,
			}
		case dispatch.PreflightValidated:
			ev.Bound = &dispatch.Bound{Route: "r", Snapshot: "s", Fingerprint: rapid.SampledFrom([]string{"", "f1", "f2"}).Draw(t, "fp"), Repeatable: rapid.Bool().Draw(t, "repeatable")}
		case dispatch.CredentialAuthorized:
			ev.Credential = &dispatch.Credential{ID: "c", Mode: "header"}
		case dispatch.AttemptFailed, dispatch.ActionRefused:
			if rapid.IntRange(0, 9).Draw(t, "odd") > 0 {
				f.Outcome = outcome.NotAttempted
			}
			ev.Ended = &dispatch.Ended{Facts: f, Stage: outcome.StageDNS}
		case dispatch.AttemptResolved:
			ev.Ended = &dispatch.Ended{Facts: f, Proof: "h2:REFUSED_STREAM", StatusLine: "HTTP/9 \xff"}
		case dispatch.DispatchStarted:
			ev.Dispatch = &dispatch.Dispatch{Connection: "c", Unresolved: f.Retry, Peer: &outcome.Peer{Address: "192.0.2.1:1"}}
		case dispatch.RequestSent:
			ev.Sent = &dispatch.Sent{Headers: true}
		case dispatch.ResponseStarted, dispatch.ResponseComplete:
			n := int64(3)
			ev.Response = &dispatch.Response{Status: 200, ExpectedBytes: &n}
		case dispatch.ResultCommitted:
			ev.Ended = &dispatch.Ended{Facts: f}
			r := evResult(ev.Attempt, 200, 0, nil, f)
			ev.Result = r.Result
			ev.Result.Header = map[string][]string{"A": {"b\xff", "c"}, "D": {}}
		case dispatch.AttemptInterrupted:
			ev.Ended = &dispatch.Ended{Facts: f, Reason: rapid.SampledFrom([]string{"process_ended", "journal_rollback"}).Draw(t, "reason")}
		case dispatch.CallerGone:
			ev.Ended = &dispatch.Ended{Reason: "CALLER_CANCELLED"}
		case dispatch.TunnelOpened, dispatch.TunnelClosed:
			ev.Tunnel = &dispatch.TunnelInfo{Authority: "a:1"}
		case dispatch.DeliveryFailed, dispatch.ResultDelivered, dispatch.Booted, dispatch.SessionOpened, dispatch.SessionClosed, dispatch.EventInvalid:
		}
		if drop {
			ev.Ended, ev.Accepted, ev.Bound, ev.Dispatch, ev.Response = nil, nil, nil, nil, nil
		}
		return ev
	})
}

func jsonOf(v any) string {
	b, err := json.Marshal(v)
	if err != nil {
		return "error: " + err.Error()
	}
	return string(b)
}

// checkApply is what must hold for every record and event: the projection is pure
// and total, refuses without a trace, and never takes a crossed boundary back.
func checkApply(r dispatch.Record, ev dispatch.Event, seq uint64) (dispatch.Record, error) {
	before := jsonOf(r)
	next, refused, err := checkFacts(r, ev, seq)
	if jsonOf(r) != before {
		return r, fmt.Errorf("Apply changed its argument: %s -> %s", before, jsonOf(r))
	}
	if refused && jsonOf(next) != before {
		return r, fmt.Errorf("a refused %s changed the record", ev.Type)
	}
	return next, err
}

func checkFacts(r dispatch.Record, ev dispatch.Event, seq uint64) (next dispatch.Record, refused bool, err error) {
	next, err = dispatch.Apply(r, &ev, seq)
	if err != nil {
		return next, true, nil
	}
	return next, false, sound(r, next, ev, seq)
}

// sound is what an accepted event may have done.
func sound(r, next dispatch.Record, ev dispatch.Event, seq uint64) error {
	switch {
	case r.Dispatched() && !next.Dispatched():
		return fmt.Errorf("%s took the boundary back", ev.Type)
	case next.Dispatched() && next.Facts.Outcome == outcome.NotAttempted:
		return fmt.Errorf("after %s a crossed boundary is not_attempted (F2)", ev.Type)
	case next.Dispatched() && next.Facts.Outcome == outcome.OutcomeInvalid:
		return fmt.Errorf("after %s there is no outcome", ev.Type)
	case r.Facts.Outcome == outcome.Committed && next.Facts.Outcome != outcome.Committed:
		return fmt.Errorf("%s turned committed into %s (K2)", ev.Type, next.Facts.Outcome)
	case next.Failed && next.Result == nil:
		return fmt.Errorf("%s leaves a failed delivery of a result that is not there", ev.Type)
	case next.LastSeq != seq || next.Events != r.Events+1:
		return fmt.Errorf("%s is not counted", ev.Type)
	}
	if next.Result != nil {
		if d := next.Deciding(); d == nil || d.N != next.ResultOf {
			return fmt.Errorf("after %s the result is of attempt %d, which does not decide", ev.Type, next.ResultOf)
		}
	}
	running := 0
	for _, a := range next.Attempts {
		if !a.Ended {
			running++
		}
	}
	if running > 1 || running > 0 && next.Ended {
		return fmt.Errorf("after %s %d attempts run, ended %t (J1)", ev.Type, running, next.Ended)
	}
	// Recovery can close whatever is open, and says what M2 says.
	if end, open := dispatch.Interrupt(&next, time.Unix(1, 0)); open {
		closed, err := dispatch.Apply(next, &end, seq+1)
		if err != nil {
			return fmt.Errorf("after %s recovery cannot close the action: %w", ev.Type, err)
		}
		if !closed.Ended || closed.Dispatched() && closed.Facts.Outcome == outcome.NotAttempted ||
			!closed.Dispatched() && closed.Facts.Outcome != outcome.NotAttempted {
			return fmt.Errorf("after %s recovery says %+v (M2)", ev.Type, closed.Facts)
		}
	}
	// A lost DISPATCH_STARTED makes any record unknown or leaves it committed, never not_attempted.
	lost := dispatch.LostAction(9, time.Unix(1, 0))
	after, err := dispatch.Apply(next, &lost, seq+1)
	if err != nil || after.Facts.Outcome == outcome.NotAttempted {
		return fmt.Errorf("after %s a lost attempt gives %w, %+v (M5)", ev.Type, err, after.Facts)
	}
	return nil
}

func TestApplyProperties(t *testing.T) {
	contract.Covers(t, "F2", "M1", "M2")
	rapid.Check(t, func(t *rapid.T) {
		var r dispatch.Record
		events := rapid.SliceOfN(genEvent(), 1, 40).Draw(t, "events")
		// Most random lists die at the first event: begin with a plausible one.
		if rapid.IntRange(0, 3).Draw(t, "head") > 0 {
			events = append([]dispatch.Event{evAccepted("a", ""), evBound("f1"), evCredential(), evDispatch(1)}[:rapid.IntRange(1, 4).Draw(t, "n")], events...)
		}
		for i, ev := range events {
			var err error
			if r, err = checkApply(r, ev, uint64(i+1)); err != nil {
				t.Fatal(err)
			}
		}
	})
}

// The facts of an attempt that crossed never become not_attempted, by any list of
// events of any length up to three after the dispatch: exhaustively over types.
func TestApplyExhaustive(t *testing.T) {
	contract.Covers(t, "F2", "M2")
	f := []outcome.Facts{committed, unknown,
		facts(outcome.ConnectionSetup, outcome.NotAttempted, outcome.Backoff, outcome.CodeConnectionRefused),
		facts(outcome.RemoteExecution, outcome.Rejected, outcome.Backoff, outcome.CodeRemoteRejected)}
	var all []dispatch.Event
	for _, typ := range dispatch.EventTypes() {
		for attempt := range 3 {
			for _, facts := range f {
				ev := dispatch.Event{
					Type: typ, Attempt: attempt, Accepted: &dispatch.Accepted{Caller: "a"}, Bound: &dispatch.Bound{Fingerprint: "f"}, Credential: &dispatch.Credential{},
					Ended: &dispatch.Ended{Facts: facts, Reason: "x"}, Dispatch: &dispatch.Dispatch{}, Sent: &dispatch.Sent{}, Response: &dispatch.Response{},
					Result: &dispatch.Result{}, Tunnel: &dispatch.TunnelInfo{}, Boot: &dispatch.Boot{},
				}
				all = append(all, ev)
				if typ == dispatch.ActionAccepted {
					ev.Accepted = &dispatch.Accepted{Caller: "a", Relaxed: true}
					all = append(all, ev)
				}
			}
		}
	}
	seen := make(map[string]bool)
	var step func(r dispatch.Record, depth int)
	step = func(r dispatch.Record, depth int) {
		for i := range all {
			next, refused, err := checkFacts(r, all[i], r.LastSeq+1)
			if err != nil {
				t.Fatalf("%v\nfrom %s", err, jsonOf(r))
			}
			if refused || depth == 0 {
				continue
			}
			plain := next
			plain.LastSeq, plain.Events = 0, 1
			if key := jsonOf(plain); !seen[key] {
				seen[key] = true
				step(next, depth-1)
			}
		}
	}
	step(dispatch.Record{}, 7)
	t.Logf("%d states", len(seen))
}

// model is the journal as a map: what it must be equal to, whatever is done.
type model struct {
	records  map[dispatch.ActionID]dispatch.Record
	events   map[dispatch.ActionID][]dispatch.Event
	requests map[string]dispatch.ActionID
	ids      []dispatch.ActionID
	seq      uint64
}

// through is an event as it comes back from the disk.
func through(t *rapid.T, evs []dispatch.Event) []dispatch.Event {
	out, b, err := prepare(evs)
	if err != nil {
		t.Fatal(err)
	}
	var back []dispatch.Event
	if err := json.Unmarshal(b, &back); err != nil {
		t.Fatal(err)
	}
	if a, b := jsonOf(out), jsonOf(back); a != b {
		t.Fatalf("live and stored events differ:\n%s\n%s", a, b)
	}
	return back
}

func TestStateMachine(t *testing.T) {
	contract.Covers(t, "M1", "M2", "M3", "M4")
	dir := tempDir(t)
	open := func() *Journal {
		opt := testOptions(dir, nil)
		opt.Hooks.SegmentSlots, opt.Hooks.CheckpointEvery = 300, 7
		j, _, err := Open(opt)
		if err != nil {
			t.Fatalf("open: %v", err)
		}
		return j
	}
	// One journal for all rounds: opening one costs more than a round. Callers are
	// the round's own.
	j := open()
	defer func() { _ = j.Close() }()
	round := 0
	rapid.Check(t, func(t *rapid.T) {
		round++
		own := func(evs []dispatch.Event) []dispatch.Event {
			for i := range evs {
				if a := evs[i].Accepted; a != nil {
					a.Caller += fmt.Sprint(round)
				}
			}
			return evs
		}
		m := &model{records: map[dispatch.ActionID]dispatch.Record{}, events: map[dispatch.ActionID][]dispatch.Event{}, requests: map[string]dispatch.ActionID{}, seq: j.Stats().Seq}

		apply := func(id dispatch.ActionID, evs []dispatch.Event) (dispatch.Record, bool) {
			r := m.records[id]
			seq := m.seq
			for i := range evs {
				seq++
				r.ID = id
				next, err := dispatch.Apply(r, &evs[i], seq)
				if err != nil {
					return m.records[id], false
				}
				r = next
			}
			return r, true
		}
		var touched []dispatch.ActionID // since the last check
		t.Repeat(map[string]func(*rapid.T){
			"append": func(t *rapid.T) {
				var id dispatch.ActionID
				if len(m.ids) == 0 || rapid.IntRange(0, 3).Draw(t, "new") == 0 {
					id = newID()
				} else {
					id = m.ids[rapid.IntRange(0, len(m.ids)-1).Draw(t, "which")]
				}
				evs := rapid.SliceOfN(genEvent(), 1, 4).Draw(t, "events")
				if m.records[id].Events == 0 && rapid.IntRange(0, 9).Draw(t, "plausible") > 0 {
					req := rapid.SampledFrom([]string{"", "r1"}).Draw(t, "req")
					evs = append([]dispatch.Event{evAccepted("a", req), evBound("f1"), evCredential(), evDispatch(1)}[:rapid.IntRange(1, 4).Draw(t, "n")], evs[:rapid.IntRange(0, len(evs)-1).Draw(t, "rest")]...)
				}
				evs = own(evs)
				touched = append(touched, id)
				rc, err := j.Append(bg, dispatch.Batch{Action: id, Events: evs})
				want, ok := m.records[id], false
				key := ""
				if _, _, perr := prepare(evs); perr == nil {
					stored := through(t, evs)
					want, ok = apply(id, stored)
					if a := stored[0].Accepted; ok && a != nil && a.RequestID != "" {
						key = a.Caller + "\x00" + a.RequestID
						if holder, taken := m.requests[key]; taken {
							if rc.Earlier != holder {
								t.Fatalf("earlier is %s, want %s", rc.Earlier, holder)
							}
							ok = false
						}
					}
					if ok {
						if m.records[id].Events == 0 {
							m.ids = append(m.ids, id)
						}
						m.records[id] = want
						m.events[id] = append(m.events[id], stored...)
						m.seq += uint64(len(stored))
						if key != "" {
							m.requests[key] = id
						}
					}
				}
				if ok != (err == nil) {
					t.Fatalf("append: %v, the model says %t", err, ok)
				}
				if ok && jsonOf(rc.Record) != jsonOf(want) {
					t.Fatalf("receipt\n%s\nmodel\n%s", jsonOf(rc.Record), jsonOf(want))
				}
			},
			"restart": func(t *rapid.T) {
				if rapid.IntRange(0, 40).Draw(t, "really") != 23 {
					return
				}
				if err := j.Close(); err != nil {
					t.Fatal(err)
				}
				j = open()
				// The journal closes in order of first sequence; the model follows the events.
				for _, id := range m.ids {
					got, err := j.Events(bg, id)
					if err != nil {
						t.Fatal(err)
					}
					had := len(m.events[id])
					rec := m.records[id]
					if _, isOpen := dispatch.Interrupt(&rec, time.Now()); isOpen != (len(got) == had+1) {
						t.Fatalf("%s: open %t, %d events before and %d after", id, isOpen, had, len(got))
					}
					for _, ev := range got[had:] {
						next, err := dispatch.Apply(rec, &ev.Event, ev.Seq)
						if err != nil || ev.Type != dispatch.AttemptInterrupted {
							t.Fatalf("%s: %v", ev.Type, err)
						}
						rec = next
						m.events[id] = append(m.events[id], ev.Event)
					}
					m.records[id] = rec
				}
				m.seq = j.Stats().Seq
				touched = m.ids
			},
			"": func(t *rapid.T) {
				if got := j.Stats().Seq; got != m.seq {
					t.Fatalf("sequence %d, model %d", got, m.seq)
				}
				if len(touched) == 0 {
					return
				}
				for _, id := range touched {
					want := m.records[id]
					if want.Events == 0 {
						continue
					}
					// Readers see it as it stands now: a key's window may be over (I5).
					want = want.At(time.Now())
					got, err := j.Action(bg, id)
					if err != nil || jsonOf(got) != jsonOf(want) {
						t.Fatalf("%s: %v\n%s\nmodel\n%s", id, err, jsonOf(got), jsonOf(want))
					}
				}
				touched = nil
				guard := map[string]dispatch.Record{}
				for _, want := range m.records {
					if want.GuardsRepeats() {
						guard[want.Caller+"\x00"+want.Bound.Fingerprint] = want
					}
				}
				for _, caller := range []string{"a", "b", "c\uFFFD"} {
					caller += fmt.Sprint(round)
					for _, fp := range []string{"f1", "f2"} {
						_, err := j.Guarding(bg, caller, fp)
						_, want := guard[caller+"\x00"+fp]
						if (err == nil) != want {
							t.Fatalf("Guarding(%s, %s): %v, model %t", caller, fp, err, want)
						}
					}
				}
			},
		})
		// Live equals rebuilt from the log.
		i := len(m.ids)
		for rec, err := range j.Actions(bg, dispatch.Filter{Limit: len(m.ids)}) {
			if len(m.ids) == 0 {
				break
			}
			i--
			if err != nil || i < 0 || rec.ID != m.ids[i] {
				t.Fatalf("Actions: %v, %s at %d", err, rec.ID, i)
			}
			events, err := j.Events(bg, rec.ID)
			if err != nil {
				t.Fatal(err)
			}
			again, err := rebuild(rec.ID, events)
			if err != nil || !reflect.DeepEqual(jsonOf(again.At(time.Now())), jsonOf(rec)) {
				t.Fatalf("rebuilt: %v\n%s\n%s", err, jsonOf(again), jsonOf(rec))
			}
		}
		if i != 0 {
			t.Fatalf("Actions left out %d", i)
		}
	})
	mustVerify(t, j)
}
