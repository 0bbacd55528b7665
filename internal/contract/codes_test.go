package contract_test

import (
	"testing"

	"waybill/internal/contract"
	"waybill/outcome"
)

// TestCodesOfTheContract keeps the enumeration and the table of section U the same
// list in the same order (CONTRACT A8).
func TestCodesOfTheContract(t *testing.T) {
	contract.Covers(t, "A8")
	rows, err := contract.CodeTable()
	if err != nil {
		t.Fatal(err)
	}
	var want, got []string
	for _, r := range rows {
		want = append(want, r.Code)
	}
	for _, c := range outcome.Codes() {
		got = append(got, c.String())
	}
	for i := range max(len(want), len(got)) {
		w, g := "(none)", "(none)"
		if i < len(want) {
			w = want[i]
		}
		if i < len(got) {
			g = got[i]
		}
		if w != g {
			t.Fatalf("code %d: docs/contract.md has %s, package outcome %s", i+1, w, g)
		}
	}
}
