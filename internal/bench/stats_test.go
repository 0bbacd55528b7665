package bench

import (
	"math"
	"slices"
	"testing"
)

func TestMedian(t *testing.T) {
	for _, tc := range []struct {
		in   []float64
		want float64
	}{{[]float64{3}, 3}, {[]float64{9, 1, 5}, 5}, {[]float64{4, 1, 3, 2}, 2.5}} {
		before := slices.Clone(tc.in)
		if got := Median(tc.in); got != tc.want {
			t.Errorf("Median(%v) = %v, want %v", tc.in, got, tc.want)
		}
		if !slices.Equal(before, tc.in) {
			t.Errorf("Median changed its argument: %v", tc.in)
		}
	}
	if !math.IsNaN(Median(nil)) {
		t.Error("the median of nothing is a number")
	}
}

func TestQuantile(t *testing.T) {
	var hundred []int64
	for i := range int64(100) {
		hundred = append(hundred, i+1)
	}
	for _, tc := range []struct {
		q    float64
		want int64
	}{{0, 1}, {0.5, 50}, {0.99, 99}, {1, 100}} {
		if got := Quantile(hundred, tc.q); got != tc.want {
			t.Errorf("Quantile(1..100, %v) = %d, want %d", tc.q, got, tc.want)
		}
	}
	if got := Quantile([]int64{7}, 0.99); got != 7 {
		t.Errorf("of one value: %d", got)
	}
	if got := Quantile(nil, 0.5); got != 0 {
		t.Errorf("of none: %d", got)
	}
}

// TestRatiosPairRounds: a slow moment of the machine that hits both sides of a round
// leaves the ratio as it is.
func TestRatiosPairRounds(t *testing.T) {
	got := Ratios([]float64{50, 5, 40, 7}, []float64{100, 10, 80, 0})
	if !slices.Equal(got, []float64{.5, .5, .5}) {
		t.Errorf("%v, want three times .5; a base of zero gives no ratio", got)
	}
	if got := Ratios([]float64{1, math.NaN()}, []float64{2, 2, 2}); !slices.Equal(got, []float64{.5}) {
		t.Errorf("%v, want [.5]", got)
	}
}

func TestPlans(t *testing.T) {
	for size, want := range map[Size]int{Quick: 8, Standard: 20, Full: 48} {
		plan, err := Plan(size)
		if err != nil {
			t.Fatal(err)
		}
		if len(plan) != want {
			t.Errorf("%s has %d scenarios, want %d", size, len(plan), want)
		}
		names := map[string]bool{}
		for _, s := range plan {
			if names[s.Name()] {
				t.Errorf("%s: %s twice", size, s.Name())
			}
			names[s.Name()] = true
		}
	}
	if _, err := Plan("huge"); err == nil {
		t.Error("an unknown size is accepted")
	}
	plan, _ := Plan(Full)
	got, err := Only(plan, `^intercepted/1KiB/c(1|64)/keep-alive$`)
	if err != nil || len(got) != 2 || got[0].Name() != "intercepted/1KiB/c1/keep-alive" {
		t.Errorf("%v, %v", got, err)
	}
	if _, err := Only(plan, "absent"); err == nil {
		t.Error("a filter that leaves nothing is accepted")
	}
	if _, err := Only(plan, "("); err == nil {
		t.Error("a broken expression is accepted")
	}
}
