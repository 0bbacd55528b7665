package dispatch

import (
	"testing"

	"waybill/internal/contract"
)

// Every event rests on somebody's word (CONTRACT N4).
func TestEveryEventHasASource(t *testing.T) {
	contract.Covers(t, "N4")
	for _, typ := range EventTypes() {
		if e := (Event{Type: typ}); e.SourceOf() == "" {
			t.Errorf("%s has no source", typ)
		}
	}
}
