package bench

import (
	"bufio"
	"maps"
	"os"
	"strings"
	"testing"
)

func TestParseMetrics(t *testing.T) {
	got := parseMetrics([]byte(`# HELP a x
a_total{route="x y}",b="1"} 2
a_total{route="z"} 3 1700000000
plain 1.5e3
# EOF
broken
nan_is_kept NaN
`))
	if got["a_total"] != 5 || got["plain"] != 1500 {
		t.Errorf("%v", got)
	}
	if _, ok := got["broken"]; ok {
		t.Error("a line without a value counts")
	}
}

func TestParseStat(t *testing.T) {
	parent, ticks, err := parseStat("42 (a) b (c) S 7 42 42 0 -1 4194560 1 2 3 4 150 25 9 9 20 0 8 0 100 1 1")
	if err != nil || parent != 7 || ticks != 175 {
		t.Errorf("parent %d, ticks %d, %v; want 7, 175", parent, ticks, err)
	}
	for _, bad := range []string{"", "1 (x) S", "no parentheses at all"} {
		if _, _, err := parseStat(bad); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
	if got := statusBytes("Name:\tx\nVmHWM:\t  2048 kB\nVmRSS:\t    3 kB\n", "VmHWM"); got != 2<<20 {
		t.Errorf("VmHWM %d", got)
	}
}

func TestProcessUsageOfThisProcess(t *testing.T) {
	u, err := ProcessUsage(os.Getpid())
	if err != nil {
		t.Fatal(err)
	}
	if u.RSS < 1<<20 || u.Peak < u.RSS/2 {
		t.Errorf("%+v is not a Go program", u)
	}
	if _, err := ProcessUsage(1 << 30); err == nil {
		t.Error("a process that does not exist has used something")
	}
}

func TestCountSyncs(t *testing.T) {
	trace := `100 1700000000.000001 fdatasync(7) = 0
101 1700000001.500000 msync(0x7f00, 4096, MS_SYNC <unfinished ...>
100 1700000001.600000 fdatasync(7)      = 0
101 1700000001.700000 <... msync resumed>) = 0
100 1700000001.800000 fdatasync(7)      = 0
100 1700000001.900000 write(1, "fsync(", 6) = 6
100 1700000002.000001 fsync(9)          = 0
100 1700000003.000000 +++ exited with 0 +++
`
	got := countSyncs([]byte(trace), 1700000001e9, 1700000002e9)
	if want := map[string]int64{"msync": 1, "fdatasync": 2}; !maps.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	// Without -f there is no pid.
	if got := countSyncs([]byte("1700000001.5 fsync(9) = 0\n"), 1700000001e9, 1700000002e9); got["fsync"] != 1 {
		t.Errorf("%v", got)
	}
}

func TestMessagesOnTheWire(t *testing.T) {
	read := func(text string, untilEnd bool) (int64, fields, error) {
		r := bufio.NewReader(strings.NewReader(text))
		h, err := readFields(r, []byte("Bearer s"))
		if err != nil {
			return 0, h, err
		}
		n, err := h.countBody(r, untilEnd)
		return n, h, err
	}
	for name, tc := range map[string]struct {
		text string
		end  bool
		want int64
		bad  bool
	}{
		"length":     {"Content-Length: 3\r\nAUTHORIZATION: Bearer s\r\n\r\nabcd", false, 3, false},
		"chunks":     {"transfer-encoding: Chunked\r\n\r\n3;x=y\r\nabc\r\na\r\n0123456789\r\n0\r\nT: 1\r\n\r\n", false, 13, false},
		"to the end": {"X: y\r\n\r\nabcde", true, 5, false},
		"no body":    {"X: y\r\n\r\nabcde", false, 0, false},
		"cut":        {"Content-Length: 3\r\n\r\nab", false, 0, true},
		"bad chunk":  {"Transfer-Encoding: chunked\r\n\r\nzz\r\n", false, 0, true},
		"bad length": {"Content-Length: -1\r\n\r\n", false, 0, true},
		"no colon":   {"nonsense\r\n\r\n", false, 0, true},
	} {
		n, h, err := read(tc.text, tc.end)
		if (err != nil) != tc.bad || !tc.bad && n != tc.want {
			t.Errorf("%s: %d, %v", name, n, err)
		}
		if h.authorized != (name == "length") {
			t.Errorf("%s: authorized is %v", name, h.authorized)
		}
	}
	o := &Origin{}
	for _, size := range []int{0, 5, 11, 1024} {
		_, body, _ := strings.Cut(string(o.answer(size)), "\r\n\r\n")
		if len(body) != size || size >= 11 && (!strings.HasPrefix(body, `{"data":"`) || !strings.HasSuffix(body, `"}`)) {
			t.Errorf("answer of %d bytes has %d: %.20q", size, len(body), body)
		}
	}
}
