package journal

import (
	"maps"
	"reflect"
	"testing"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"

	"waybill/dispatch"
	"waybill/internal/contract"
)

// Copies have memory of their own, whether they were put in one piece or not: nothing of it
// is the caller's or that of another event, and each is as if it had been copied alone.
func TestCopiesShareNothing(t *testing.T) {
	t.Parallel()
	contract.Covers(t, "M1")
	roomy, all := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		all++
		events := make([]dispatch.Event, rapid.IntRange(1, 6).Draw(t, "events"))
		for i := range events {
			arbitrary(t, reflect.ValueOf(&events[i]).Elem(), true)
			oneName(&events[i])
		}
		out, err := copied(events)
		if err != nil {
			t.Fatal(err)
		}
		if m := roomFor(events); m.bound != nil || m.result != nil {
			roomy++
		}
		owners := map[uintptr]int{}
		for i := range events {
			if alone := cloneEvent(&events[i]); !reflect.DeepEqual(out[i], alone) {
				t.Fatalf("%s\nalone %s", jsonOf(out[i]), jsonOf(alone))
			}
			claim(t, reflect.ValueOf(events[i]), owners, -1)
		}
		for i := range out {
			claim(t, reflect.ValueOf(out[i]), owners, i)
		}
	})
	if roomy == 0 && all >= 100 {
		t.Error("no batch had room in one piece: the test looks at nothing")
	}
}

// oneName removes the names that are not UTF-8: which of two that come to the same is kept
// is left to chance.
func oneName(ev *dispatch.Event) {
	if r := ev.Result; r != nil {
		for _, fields := range []map[string][]string{r.Header, r.Trailer} {
			maps.DeleteFunc(fields, func(name string, _ []string) bool { return !utf8.ValidString(name) })
		}
	}
	if b := ev.Bound; b != nil && b.Recall != nil {
		maps.DeleteFunc(b.Recall.Values, func(name, _ string) bool { return !utf8.ValidString(name) })
	}
}

// claim notes what memory v points to, which nobody else may have claimed. The caller, who
// is -1, may have what it likes.
func claim(t *rapid.T, v reflect.Value, owners map[uintptr]int, owner int) {
	switch v.Kind() {
	case reflect.Pointer, reflect.Map, reflect.Slice:
		if v.IsNil() || v.Kind() != reflect.Pointer && v.Len() == 0 {
			return
		}
		if other, taken := owners[v.Pointer()]; taken && owner >= 0 {
			t.Fatalf("event %d has a %s that %d has", owner, v.Type(), other)
		}
		owners[v.Pointer()] = owner
	default:
	}
	switch v.Kind() {
	case reflect.Pointer:
		claim(t, v.Elem(), owners, owner)
	case reflect.Map:
		for _, k := range v.MapKeys() {
			claim(t, v.MapIndex(k), owners, owner)
		}
	case reflect.Slice:
		for i := range v.Len() {
			claim(t, v.Index(i), owners, owner)
		}
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			return
		}
		for i := range v.NumField() {
			claim(t, v.Field(i), owners, owner)
		}
	default:
	}
}
