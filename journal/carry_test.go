package journal

import (
	"testing"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/outcome"
)

// A request that does not fit into a group is in the next one as it was: what is stored of
// it is sealed where it was encoded, and that must not have happened before. A caller's
// record is what a reader gets.
func TestCarriedToTheNextGroup(t *testing.T) {
	t.Parallel()
	contract.Covers(t, "M1", "M3")
	hold := heldHooks()
	j := openTest(t, tempDir(t), &hold.Hooks)
	// Each is named four times in the witness: two hundred and fifty-six fill a group.
	rejected := facts(outcome.RemoteExecution, outcome.Rejected, outcome.Backoff, outcome.CodeRemoteRejected)
	events := []dispatch.Event{evAccepted("ci", ""), evBound("f"), evCredential(), evDispatch(1), evResponse(1, 429),
		evResolved(1, rejected), evLease(2), evRepeat(2, 2), evResponse(2, 429), evResolved(2, rejected)}
	hold.hold()
	answers := []<-chan answer{appendAsync(j, toDispatch(newID(), "ci", "", "f"))}
	hold.waitHeld(t)
	before := j.Stats().Groups
	for i := range 400 {
		answers = append(answers, appendAsync(j, dispatch.Batch{Action: newID(), Events: events}))
		waitQueued(t, j, i+1)
	}
	hold.letGo()
	for _, ch := range answers {
		a := <-ch
		if a.err != nil {
			t.Fatal(a.err)
		}
		if got := mustAction(t, j, a.Record.ID); jsonOf(got) != jsonOf(a.Record) {
			t.Fatalf("told %s\nread %s", jsonOf(a.Record), jsonOf(got))
		}
		stored, err := j.Events(bg, a.Record.ID)
		if err != nil || len(stored) != a.Record.Events {
			t.Fatalf("%d events, %v", len(stored), err)
		}
	}
	if n := j.Stats().Groups - before; n != 3 {
		t.Errorf("%d groups: nothing was carried", n)
	}
	mustVerify(t, j)
}
