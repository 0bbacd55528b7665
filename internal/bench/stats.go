package bench

import (
	"math"
	"slices"
)

// Median returns the middle of the values (of two, their mean); NaN of none. The
// values are left as they are.
func Median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	v := slices.Clone(values)
	slices.Sort(v)
	n := len(v) / 2
	if len(v)%2 == 1 {
		return v[n]
	}
	return (v[n-1] + v[n]) / 2
}

// Quantile returns the smallest value that at least the share q of the sorted values
// does not exceed (the nearest rank); 0 of none.
func Quantile(sorted []int64, q float64) int64 {
	if len(sorted) == 0 {
		return 0
	}
	i := int(math.Ceil(q*float64(len(sorted)))) - 1
	return sorted[min(max(i, 0), len(sorted)-1)]
}

// Ratios divides round by round: what a round's machine did to one it did to the
// other. A round that either side lacks, or whose base is zero, is left out.
func Ratios(values, base []float64) []float64 {
	var out []float64
	for i := range min(len(values), len(base)) {
		if r := values[i] / base[i]; !math.IsNaN(r) && !math.IsInf(r, 0) {
			out = append(out, r)
		}
	}
	return out
}

// column reads one figure of every round.
func column(rounds []Sample, f func(*Sample) float64) []float64 {
	out := make([]float64, len(rounds))
	for i := range rounds {
		out[i] = f(&rounds[i])
	}
	return out
}

// per divides, and gives NaN where there is nothing to divide by.
func per(a float64, n int64) float64 {
	if n == 0 {
		return math.NaN()
	}
	return a / float64(n)
}
