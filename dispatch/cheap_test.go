package dispatch

import (
	"math"
	"net/http"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/net/http/httpguts"
)

// TestIsCanonical holds it to the two functions that it stands for.
func TestIsCanonical(t *testing.T) {
	names := []string{"", "-", "--", "A-", "-A", "-a", "A--B", "A--b", "Www-Authenticate", "WWW-Authenticate", "Etag", "ETag", "X-1a", "X-1A", "X_y", "X y", "X:y", "Ä"}
	for _, base := range []string{"Content-Type", "x", "a-B"} {
		for i := range base {
			for c := range 256 {
				names = append(names, base[:i]+string([]byte{byte(c)})+base[i+1:])
			}
		}
	}
	for _, name := range names {
		if want := httpguts.ValidHeaderFieldName(name) && http.CanonicalHeaderKey(name) == name; isCanonical(name) != want {
			t.Errorf("%q: %v, want %v", name, !want, want)
		}
	}
}

// TestFieldsNumber: a number is what its text would be, wherever the room ends; seals that
// are kept with an approval depend on it (D5).
func TestFieldsNumber(t *testing.T) {
	for _, n := range []int64{0, 7, -1, 443, 1 << 40, math.MaxInt64, math.MinInt64} {
		for before := maxFieldBytes - 48; before <= maxFieldBytes+8; before++ {
			text, number := newFields(), newFields()
			pad := strings.Repeat("x", before)
			text.add(pad, strconv.FormatInt(n, 10), "behind")
			number.add(pad)
			number.number(n)
			number.add("behind")
			if text.sum() != number.sum() {
				t.Fatalf("%d behind %d bytes", n, before)
			}
		}
	}
}

// TestSharedHeader: a field that is added to the one is not in the other.
func TestSharedHeader(t *testing.T) {
	result := http.Header{"A": {"1", "2"}, "Proxy-Status": {"origin"}}
	h := shared(result, 1)
	h["Proxy-Status"] = []string{"origin, waybill"}
	h.Set("Waybill-Outcome", "committed")
	h.Add("A", "3")
	delete(h, "B")
	if len(result) != 2 || len(result["A"]) != 2 || result.Get("Proxy-Status") != "origin" || len(h) != 3 {
		t.Fatal(result, h)
	}
}
