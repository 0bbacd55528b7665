package journal

import (
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"waybill/dispatch"
	"waybill/internal/contract"
)

// A packed text comes back byte for byte, whatever JSON it was.
func TestPackRoundTrip(t *testing.T) {
	t.Parallel()
	contract.Covers(t, "M2")
	word := rapid.OneOf(rapid.SampledFrom(packWords[:]), rapid.String(), rapid.StringMatching(`sha256:[0-9a-fA-F]{63,65}`),
		rapid.Custom(func(t *rapid.T) string {
			at := time.Unix(rapid.Int64Range(-1<<40, 1<<40).Draw(t, "s"), rapid.Int64Range(0, 999_999_999).Draw(t, "ns"))
			return at.UTC().Format(rapid.SampledFrom([]string{time.RFC3339Nano, time.RFC3339, "2006-01-02T15:04:05.000000000Z", "2006-01-02T15:04:05.000Z"}).Draw(t, "form"))
		}))
	var value func(depth int) *rapid.Generator[any]
	value = func(depth int) *rapid.Generator[any] {
		leaf := rapid.OneOf(word.AsAny(), rapid.Int64().AsAny(), rapid.Float64().AsAny(), rapid.Bool().AsAny(), rapid.Just[any](nil))
		if depth == 0 {
			return leaf
		}
		return rapid.OneOf(leaf, rapid.SliceOfN(value(depth-1), 0, 4).AsAny(), rapid.MapOfN(word, value(depth-1), 0, 4).AsAny())
	}
	rapid.Check(t, func(t *rapid.T) {
		text, err := json.Marshal(value(3).Draw(t, "value"))
		if err != nil {
			t.Fatal(err)
		}
		prefix := []byte("before")
		out, ok := pack(bytes.Clone(prefix), text)
		if !ok || !bytes.HasPrefix(out, prefix) {
			t.Fatalf("not packed: %q", text)
		}
		again, err := unpack(out[len(prefix):])
		if err != nil || !bytes.Equal(again, text) {
			t.Fatalf("%q came back as %q, %v", text, again, err)
		}
	})
}

// What is no JSON text is stored as it is.
func TestPackRefuses(t *testing.T) {
	t.Parallel()
	for _, text := range []string{"\"open", "[\x01]", "[\x80]", "{\n}", "\"\\"} {
		if out, ok := pack([]byte("x"), []byte(text)); ok || string(out) != "x" {
			t.Errorf("%q was packed", text)
		}
		payload, version := packed([]byte(text))
		if version != plainVersion || string(payload) != text {
			t.Errorf("%q is stored as version %d, %q", text, version, payload)
		}
	}
	for _, b := range []string{"\x01short", "\x02short", "\x03", "\x03\xff", "\"open", "\x04", "\"\\"} {
		if text, err := unpack([]byte(b)); err == nil {
			t.Errorf("%q was read as %q", b, text)
		}
	}
	if _, err := unpacked(packedVersion+1, nil); err == nil {
		t.Error("an unknown version was read")
	}
}

// The words are part of the format. Whoever changes one that is there makes stored
// events unreadable, or worse, readable as something else; append instead, and the sum.
func TestPackWords(t *testing.T) {
	t.Parallel()
	const count, sum = 262, "38eef190307c53bf7d2a843f968c56eaa0e55c756d9289a57cffdf3d471c2141"
	if got := fmt.Sprintf("%x", sha256.Sum256([]byte(strings.Join(packWords[:count], "\x00")))); got != sum {
		t.Errorf("the first %d words have the sum %s, want %s", count, got, sum)
	}
	if len(packWords) != count {
		t.Errorf("%d words, want %d: take the new ones into the sum", len(packWords), count)
	}
	if len(packIndex) != len(packWords) || len(packWords) > packWord+256 {
		t.Errorf("%d words, %d different ones", len(packWords), len(packIndex))
	}
	for _, w := range packWords {
		if b, err := json.Marshal(w); err != nil || string(b) != `"`+w+`"` {
			t.Errorf("%q is another text in JSON: %s", w, b)
		}
		if out, ok := packKnown(nil, w); !ok || len(out) > 2 {
			t.Errorf("%q is not found", w)
		}
	}
}

// Half of a frame's bytes are names, and are not stored.
func TestPackShrinks(t *testing.T) {
	t.Parallel()
	id := newID()
	for _, b := range []dispatch.Batch{toDispatch(id, "ci", "", "f"), toResult(id, []byte("result"))} {
		text, err := json.Marshal(b.Events)
		if err != nil {
			t.Fatal(err)
		}
		if payload, version := packed(text); version != packedVersion || len(payload)*2 > len(text) {
			t.Errorf("%d of %d bytes are stored: %q", len(payload), len(text), payload)
		}
	}
}

func FuzzUnpack(f *testing.F) {
	for _, s := range []string{"", "\x80:\x81", "\x01" + strings.Repeat("x", 32), "\x02\x18\x8a\x00\x00\x00\x00\x00\x00", "\x03\x05", `{"a":"\"b\\"}`} {
		f.Add([]byte(s))
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		text, err := unpack(b)
		if err != nil {
			return
		}
		again, ok := pack(nil, text)
		if !ok {
			t.Fatalf("%q became %q, which is not packed", b, text)
		}
		if back, err := unpack(again); err != nil || !bytes.Equal(back, text) {
			t.Fatalf("%q became %q, then %q, %v", b, text, back, err)
		}
	})
}
