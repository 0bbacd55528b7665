package dispatch

import (
	"crypto/sha256"
	"encoding/binary"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// Fingerprints are on record: how they are computed may change, what they are may not.
func TestFieldIsLengthAndPart(t *testing.T) {
	part := rapid.OneOf(rapid.String(), rapid.Map(rapid.IntRange(480, 2100), func(n int) string { return strings.Repeat("x", n) }))
	rapid.Check(t, func(t *rapid.T) {
		parts := rapid.SliceOfN(part, 0, 12).Draw(t, "parts")
		got, want := sha256.New(), sha256.New()
		field(got, parts...)
		for _, p := range parts {
			_ = binary.Write(want, binary.BigEndian, uint64(len(p)))
			want.Write([]byte(p))
		}
		if string(got.Sum(nil)) != string(want.Sum(nil)) {
			t.Fatalf("differs for %d parts", len(parts))
		}
	})
}
