package telemetry

import (
	"fmt"
	"strings"
	"testing"
)

const (
	exampleTrace = "0af7651916cd43dd8448eb211c80319c"
	exampleSpan  = "b7ad6b7169203331"
	example      = "00-" + exampleTrace + "-" + exampleSpan + "-01"
)

// TestParseParent: what W3C Trace Context §3.2 and §4.3 allow names a span, all else none.
func TestParseParent(t *testing.T) {
	for _, s := range []string{example, "00-" + exampleTrace + "-" + exampleSpan + "-00", "cc" + example[2:], "cc" + example[2:] + "-what-the-future-will-be-like", "01" + example[2:] + "-"} {
		p, ok := ParseParent(s)
		if !ok || fmt.Sprintf("%x", p.Trace) != exampleTrace || fmt.Sprintf("%x", p.Span) != exampleSpan {
			t.Errorf("%q: %x %x %v", s, p.Trace, p.Span, ok)
		}
	}
	for _, s := range []string{
		"", "00", example[:54], example + "-", example + "0", "ff" + example[2:], "cc" + example[2:] + ".what", "0x" + example[2:], strings.ToUpper(example),
		"00-" + strings.Repeat("0", 32) + "-" + exampleSpan + "-01", "00-" + exampleTrace + "-" + strings.Repeat("0", 16) + "-01", strings.Replace(example, "-", "_", 1),
		"00-" + exampleTrace + exampleSpan + "--01", " " + example, example + " ", "00-" + exampleTrace + "-" + exampleSpan + "-0g",
	} {
		if p, ok := ParseParent(s); ok || !p.IsZero() {
			t.Errorf("%q names %x %x", s, p.Trace, p.Span)
		}
	}
}

// FuzzParseParent: no field ends the parser, and one that is taken says what it names.
func FuzzParseParent(f *testing.F) {
	f.Add(example)
	f.Add("cc" + example[2:] + "-more")
	f.Add(strings.Repeat("-", 60))
	f.Fuzz(func(t *testing.T, s string) {
		p, ok := ParseParent(s)
		if ok && !strings.HasPrefix(s[2:], fmt.Sprintf("-%x-%x-", p.Trace, p.Span)) || ok == p.IsZero() {
			t.Errorf("%q: %x %x %v", s, p.Trace, p.Span, ok)
		}
	})
}
