package dispatch

import (
	"fmt"
	"testing"

	"waybill/internal/contract"
)

// A guard that is kept is the one of exactly these secrets: lists that read alike when
// joined have guards of their own (C5).
func TestGuardsAreNotMixedUp(t *testing.T) {
	contract.Covers(t, "C5")
	var g guards
	const a, b = "canary-secret-a", "canary-secret-b"
	masks := func(secrets []string, text string) bool {
		_, n := g.of(secrets).MaskString(text)
		return n > 0
	}
	for range 2 {
		if !masks([]string{a}, "x "+a) || masks([]string{a}, "x "+b) || !masks([]string{a, b}, "x "+b) || !masks([]string{a + b}, "x "+a+b) || masks([]string{a + b}, "x "+b) {
			t.Fatal("the guard of another list was used")
		}
	}
	if g.of(nil) != nil {
		t.Error("a guard of nothing")
	}
	if first := g.of([]string{a}); first != g.of([]string{a}) {
		t.Error("it is made again every time")
	}
	for i := range 10 * maxGuards {
		g.of([]string{fmt.Sprint("canary-secret-", i)})
		if len(g.made) > maxGuards {
			t.Fatalf("%d are kept", len(g.made))
		}
	}
	if !masks([]string{b}, b) {
		t.Error("forgotten, and not made again")
	}
	if g.forget(); len(g.made) != 0 {
		t.Error("not forgotten")
	}
}
