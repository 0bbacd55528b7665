package killpoint

import "testing"

func TestParse(t *testing.T) {
	for in, want := range map[string]int64{"a": 1, "a:3": 3, "": 0, "a:0": 0, "a:x": 0, ":2": 0, "a:-1": 0, "b>a": 1, "b>a:3": 3, ">a": 0, "b>": 0} {
		p := parse(in)
		if (p == nil) != (want == 0) || p != nil && (p.name != "a" || p.left.Load() != want) {
			t.Errorf("parse(%q) = %+v, want count %d", in, p, want)
		}
	}
}

func TestStop(t *testing.T) {
	stopped := 0
	old := stop
	stop = func() { stopped++ }
	t.Cleanup(func() { stop = old; armed.Store(nil) })
	armed.Store(parse("stop@here"))
	At("here")
	At("here")
	if stopped != 1 {
		t.Errorf("stopped %d times", stopped)
	}
}

func TestAt(t *testing.T) {
	killed := 0
	old := kill
	kill = func() { killed++ }
	t.Cleanup(func() { kill = old; armed.Store(nil) })

	At("here") // inert when nothing is armed
	armed.Store(parse("here:2"))
	At("elsewhere")
	At("here")
	if killed != 0 {
		t.Fatal("killed before the count was reached")
	}
	At("here")
	At("here")
	if killed != 1 {
		t.Errorf("killed %d times, want once, at the second pass", killed)
	}
}

func TestAtAfter(t *testing.T) {
	killed := 0
	old := kill
	kill = func() { killed++ }
	t.Cleanup(func() { kill = old; armed.Store(nil) })

	armed.Store(parse("first>here"))
	At("here")
	At("here")
	if killed != 0 {
		t.Fatal("killed before the first point was passed")
	}
	At("first")
	At("elsewhere")
	if killed != 0 {
		t.Fatal("killed elsewhere")
	}
	At("here")
	At("here")
	if killed != 1 {
		t.Errorf("killed %d times, want once, at the first pass after", killed)
	}
}

func BenchmarkAtUnset(b *testing.B) {
	for b.Loop() {
		At("here")
	}
}
