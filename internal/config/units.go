package config

import (
	"fmt"
	"math"
	"strconv"
	"strings"
	"time"
)

var sizeUnits = []struct {
	suffix string
	factor int64
}{{"KiB", 1 << 10}, {"MiB", 1 << 20}, {"GiB", 1 << 30}, {"TiB", 1 << 40}, {"B", 1}}

// parseSize reads "32MiB": a whole number and a binary unit.
func parseSize(s string) (int64, bool) {
	for _, u := range sizeUnits {
		digits, ok := strings.CutSuffix(s, u.suffix)
		if !ok {
			continue
		}
		n, err := strconv.ParseInt(digits, 10, 64)
		if err != nil || n < 0 || strconv.FormatInt(n, 10) != digits || n > math.MaxInt64/u.factor {
			return 0, false
		}
		return n * u.factor, true
	}
	return 0, false
}

// ParseSize reads a size as the configuration file writes it.
func ParseSize(s string) (int64, bool) { return parseSize(s) }

// FormatSize prints a size as the configuration file writes it, in the largest unit
// that needs no fraction.
func FormatSize(n int64) string {
	for i := len(sizeUnits) - 2; i >= 0; i-- {
		if u := sizeUnits[i]; n != 0 && n%u.factor == 0 {
			return strconv.FormatInt(n/u.factor, 10) + u.suffix
		}
	}
	return strconv.FormatInt(n, 10) + "B"
}

var durationUnits = []struct {
	suffix string
	factor time.Duration
}{{"ms", time.Millisecond}, {"d", 24 * time.Hour}, {"h", time.Hour}, {"m", time.Minute}, {"s", time.Second}}

// parseDuration reads "10m", "7d", "1h30m": whole numbers with units, each smaller
// than the one before. A day is 24 hours.
func parseDuration(s string) (time.Duration, bool) {
	if s == "" {
		return 0, false
	}
	var total time.Duration
	last := time.Duration(math.MaxInt64)
	for s != "" {
		i := 0
		for i < len(s) && '0' <= s[i] && s[i] <= '9' {
			i++
		}
		n, err := strconv.ParseInt(s[:i], 10, 64)
		if err != nil || i > 1 && s[0] == '0' {
			return 0, false
		}
		s = s[i:]
		var unit time.Duration
		for _, u := range durationUnits {
			if rest, ok := strings.CutPrefix(s, u.suffix); ok {
				unit, s = u.factor, rest
				break
			}
		}
		if unit == 0 || unit >= last || n > int64(math.MaxInt64/unit) {
			return 0, false
		}
		last = unit
		if total += time.Duration(n) * unit; total < 0 {
			return 0, false
		}
	}
	return total, true
}

// FormatDuration prints a duration as the configuration file writes it.
func FormatDuration(d time.Duration) string {
	if d <= 0 {
		return "0s"
	}
	var b strings.Builder
	for _, u := range durationUnits[1:] {
		if n := d / u.factor; n > 0 {
			fmt.Fprintf(&b, "%d%s", n, u.suffix)
			d -= n * u.factor
		}
	}
	if n := d / time.Millisecond; n > 0 {
		fmt.Fprintf(&b, "%dms", n)
	}
	if b.Len() == 0 {
		return d.String() // below what the file can say
	}
	return b.String()
}

func (o *object) size(key string, low, high int64) int64 {
	n, path, ok := o.get(key)
	if !ok {
		return 0
	}
	s, ok := o.r.textOr(n, path, "a size such as 32MiB", "add a unit: B, KiB, MiB or GiB")
	if !ok {
		return 0
	}
	v, ok := parseSize(s)
	switch {
	case !ok:
		o.r.fail(n, path, "is no size", "write a whole number and B, KiB, MiB or GiB, such as 32MiB")
	case v < low || v > high:
		o.r.fail(n, path, "is out of range", fmt.Sprintf("write a size from %s to %s", FormatSize(low), FormatSize(high)))
	default:
		return v
	}
	return 0
}

func (o *object) duration(key string, low, high time.Duration) time.Duration {
	n, path, ok := o.get(key)
	if !ok {
		return 0
	}
	s, ok := o.r.textOr(n, path, "a duration such as 10m", "add a unit: d, h, m, s or ms")
	if !ok {
		return 0
	}
	v, ok := parseDuration(s)
	switch {
	case !ok:
		o.r.fail(n, path, "is no duration", "write whole numbers with d, h, m, s or ms, such as 10m or 1h30m")
	case v < low || v > high:
		o.r.fail(n, path, "is out of range", fmt.Sprintf("write a duration from %s to %s", FormatDuration(low), FormatDuration(high)))
	default:
		return v
	}
	return 0
}
