package dispatch

import (
	"testing"

	"waybill/internal/contract"
	"waybill/outcome"
)

// Every event rests on somebody's word (CONTRACT N4).
func TestEveryEventHasASource(t *testing.T) {
	contract.Covers(t, "N4")
	for _, typ := range EventTypes() {
		if e := (Event{Type: typ}); e.SourceOf() == "" {
			t.Errorf("%s has no source", typ)
		}
	}
	for _, c := range []struct {
		e    Event
		want outcome.Source
	}{
		{Event{Type: EvidenceImported, Resolution: &Resolution{Source: outcome.RemoteResponse}}, outcome.RemoteResponse},
		{Event{Type: Attested, Resolution: &Resolution{Source: outcome.OperatorAttested}}, outcome.OperatorAttested},
		{Event{Type: ActionAccepted, Accepted: &Accepted{}}, CallerRequested},
		{Event{Type: ActionAccepted, Accepted: &Accepted{Link: &Link{Kind: LinkPoll}}}, Decided},
	} {
		if got := c.e.SourceOf(); got != c.want {
			t.Errorf("%s: %s, want %s", c.e.Type, got, c.want)
		}
	}
}
