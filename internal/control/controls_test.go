//go:build waybill_controls

package control

import (
	"testing"
	"time"

	"waybill/docs"
)

// TestControls runs every line of docs/controls.txt; `make controls` is
// go test -tags waybill_controls -run '^TestControls$' ./internal/control. It is behind the
// tag since it builds the tests of half the module a second time.
func TestControls(t *testing.T) {
	entries, err := parseEntries(docs.Controls)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) == 0 {
		t.Fatal("docs/controls.txt lists no control")
	}
	r := newRunner("../..", t.TempDir(), 60*time.Second)
	for _, e := range entries {
		t.Run(e.Group+"/"+e.Name, func(t *testing.T) {
			t.Parallel()
			start := time.Now()
			if err := r.Run(t.Context(), e); err != nil {
				t.Errorf("docs/controls.txt:%d: %s: %v", e.Line, e, err)
			}
			t.Logf("%s: %.1fs", e, time.Since(start).Seconds())
		})
	}
}

// TestOffReadsTheVariable is about this build only.
func TestOffReadsTheVariable(t *testing.T) {
	t.Setenv(Env, "F1-a,F2-b")
	if !Off("F1-a") || !Off("F2-b") || Off("F1") || Off("") {
		t.Error("Off does not answer what the variable says")
	}
}
