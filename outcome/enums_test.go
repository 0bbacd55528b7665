package outcome_test

import (
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"regexp"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"waybill/internal/contract"
	"waybill/outcome"
)

// listed returns the words in back-quotes that a rule of the contract gives for an
// enumeration, without the enumeration's own name and without codes.
func listed(t *testing.T, rule, self string) []string {
	t.Helper()
	r, ok := contract.Lookup(rule)
	if !ok {
		t.Fatalf("no rule %s", rule)
	}
	var out []string
	for _, m := range regexp.MustCompile("`([a-z_]+)`").FindAllStringSubmatch(r.Text, -1) {
		if m[1] != self {
			out = append(out, m[1])
		}
	}
	return out
}

func names[T fmt.Stringer](values []T) []string {
	out := make([]string, len(values))
	for i, v := range values {
		out[i] = v.String()
	}
	return out
}

func TestEnumsAreThoseOfTheContract(t *testing.T) {
	contract.Covers(t, "A2", "A3", "A4", "A6")
	for _, c := range []struct {
		rule, name string
		have       []string
	}{
		{"A2", "phase", names(outcome.Phases())},
		{"A3", "outcome", names(outcome.Outcomes())},
		{"A4", "retry", names(outcome.Retries())},
	} {
		if want := listed(t, c.rule, c.name); !slices.Equal(c.have, want) {
			t.Errorf("%s: %s is %q, contract says %q", c.rule, c.name, c.have, want)
		}
	}
}

func TestCodesAreThoseOfTheContract(t *testing.T) {
	contract.Covers(t, "A8")
	rows, err := contract.CodeTable()
	if err != nil {
		t.Fatal(err)
	}
	var want []string
	for _, r := range rows {
		want = append(want, r.Code)
	}
	have := names(outcome.Codes())
	slices.Sort(want)
	slices.Sort(have)
	if !slices.Equal(have, want) {
		t.Errorf("codes are\n%q\ncontract says\n%q", have, want)
	}
}

// enum is one closed enumeration for the tests below.
type enum struct {
	name   string
	valid  []string
	decode func(text string) (string, error) // to the wire form of what came out
	encode func(i uint8) ([]byte, error)
}

func enumOf[T interface {
	~uint8
	fmt.Stringer
	encoding.TextMarshaler
}, P interface {
	*T
	encoding.TextUnmarshaler
}](name string, values []T) enum {
	return enum{
		name: name, valid: names(values),
		decode: func(text string) (string, error) {
			var v T
			err := P(&v).UnmarshalText([]byte(text))
			return v.String(), err
		},
		encode: func(i uint8) ([]byte, error) { return T(i).MarshalText() },
	}
}

func enums() []enum {
	return []enum{
		enumOf("phase", outcome.Phases()), enumOf("outcome", outcome.Outcomes()), enumOf("retry", outcome.Retries()),
		enumOf("code", outcome.Codes()), enumOf("step", outcome.Steps()),
	}
}

func TestEnumsRoundTrip(t *testing.T) {
	for _, e := range enums() {
		seen := map[string]bool{}
		for i := range len(e.valid) {
			b, err := e.encode(uint8(i + 1))
			if err != nil {
				t.Fatalf("%s %d: %v", e.name, i+1, err)
			}
			back, err := e.decode(string(b))
			if err != nil || back != string(b) || back != e.valid[i] || seen[back] {
				t.Errorf("%s %d: %q → %q, %v", e.name, i+1, b, back, err)
			}
			seen[back] = true
		}
	}
}

func TestUnknownValuesAreRefused(t *testing.T) {
	contract.Covers(t, "A8")
	for _, e := range enums() {
		for i := len(e.valid) + 1; i <= math.MaxUint8; i++ {
			if b, err := e.encode(uint8(i)); !errors.Is(err, outcome.ErrUnknownValue) {
				t.Fatalf("%s %d encodes to %q, %v", e.name, i, b, err)
			}
		}
		for _, text := range []string{"known", "transient", "UNKNOWN ", " never", "Never", "success", "invalid(0)", "invalid(1)", "0", "1", "null", "\x00"} {
			if v, err := e.decode(text); !errors.Is(err, outcome.ErrUnknownValue) {
				t.Errorf("%s: %q decodes to %q, %v", e.name, text, v, err)
			}
		}
		t.Run(e.name, rapid.MakeCheck(func(t *rapid.T) {
			text := rapid.OneOf(rapid.String(), rapid.SampledFrom(append(e.valid, strings.ToUpper(e.valid[0]), e.valid[0]+"_"))).Draw(t, "text")
			v, err := e.decode(text)
			switch {
			case slices.Contains(e.valid, text):
				if err != nil || v != text {
					t.Fatalf("%s %q: %q, %v", e.name, text, v, err)
				}
			case text == "" && e.name == "code":
				if err != nil || v != "" {
					t.Fatalf("no code: %q, %v", v, err)
				}
			case !errors.Is(err, outcome.ErrUnknownValue):
				t.Fatalf("%s %q decodes to %q, %v", e.name, text, v, err)
			}
		}))
	}
}

// TestUnknownValuesInsideAnEnvelope replaces one enumeration value anywhere in a
// valid envelope by something else.
func TestUnknownValuesInsideAnEnvelope(t *testing.T) {
	contract.Covers(t, "A8")
	rapid.Check(t, func(t *rapid.T) {
		ev := genEvidence().Draw(t, "evidence")
		ev.Attempts = []outcome.Attempt{{N: 1, Outcome: outcome.Unknown, Code: outcome.CodeRemoteTimeout}}
		f := genFacts().Filter(func(f outcome.Facts) bool {
			return f.Code != outcome.CodeNone && f.Code != outcome.CodeActionNotFound
		}).Draw(t, "facts")
		b, err := json.Marshal(outcome.NewEnvelope(anID, f, "", ev))
		if err != nil {
			t.Fatal(err)
		}
		var tree map[string]any
		if err := json.Unmarshal(b, &tree); err != nil {
			t.Fatal(err)
		}
		bad := rapid.SampledFrom([]any{"known", "", "transient", "ROUTE_NOT_FOUND_AT_ALL", nil, 1.0, true}).Draw(t, "bad")
		key := rapid.SampledFrom([]string{"phase", "outcome", "retry", "code", "attempt.outcome", "attempt.code"}).Draw(t, "key")
		if in, ok := strings.CutPrefix(key, "attempt."); ok {
			if bad == nil || bad == "" && in == "code" {
				return // an attempt without a code, or a value that JSON leaves as it is
			}
			tree["evidence"].(map[string]any)["attempts"].([]any)[0].(map[string]any)[in] = bad
		} else {
			tree["error"].(map[string]any)[key] = bad
		}
		b, err = json.Marshal(tree)
		if err != nil {
			t.Fatal(err)
		}
		var back outcome.Envelope
		err = json.Unmarshal(b, &back)
		if err == nil {
			t.Fatalf("%s = %v was taken: %s", key, bad, b)
		}
		if s, ok := bad.(string); ok && s != "" && !errors.Is(err, outcome.ErrUnknownValue) {
			t.Fatalf("%s = %v: %v", key, bad, err)
		}
	})
}

func TestThreeIndependentFacts(t *testing.T) {
	contract.Covers(t, "A1")
	typ := reflect.TypeFor[outcome.Facts]()
	if typ.NumField() != 4 {
		t.Fatalf("facts have %d fields", typ.NumField())
	}
	types := map[reflect.Type]string{}
	for f := range typ.Fields() {
		if other, twice := types[f.Type]; twice {
			t.Errorf("%s and %s share a type", other, f.Name)
		}
		types[f.Type] = f.Name
	}
	// Each of the three is needed: for every two of them there are valid facts that
	// agree in these and differ in the third.
	pairs := map[string]func(a, b outcome.Facts) bool{
		"phase": func(a, b outcome.Facts) bool {
			return a.Outcome == b.Outcome && a.Retry == b.Retry && a.Phase != b.Phase
		},
		"outcome": func(a, b outcome.Facts) bool {
			return a.Phase == b.Phase && a.Retry == b.Retry && a.Outcome != b.Outcome
		},
		"retry": func(a, b outcome.Facts) bool {
			return a.Phase == b.Phase && a.Outcome == b.Outcome && a.Retry != b.Retry
		},
	}
	all := allFacts()
	for name, differ := range pairs {
		found := false
		for _, a := range all {
			found = found || slices.ContainsFunc(all, func(b outcome.Facts) bool { return differ(a, b) })
		}
		if !found {
			t.Errorf("%s follows from the other two", name)
		}
	}
	for _, name := range jsonNames(reflect.TypeFor[outcome.Envelope]()) {
		if strings.Contains(name, "transient") {
			t.Errorf("a field is called %s", name)
		}
	}
}

// jsonNames returns the JSON names of all fields below a type, as paths.
func jsonNames(typ reflect.Type) []string {
	for typ.Kind() == reflect.Pointer || typ.Kind() == reflect.Slice {
		typ = typ.Elem()
	}
	if typ.Kind() != reflect.Struct {
		return nil
	}
	var out []string
	for f := range typ.Fields() {
		name, _, _ := strings.Cut(f.Tag.Get("json"), ",")
		out = append(out, name)
		for _, below := range jsonNames(f.Type) {
			out = append(out, name+"."+below)
		}
	}
	return out
}
