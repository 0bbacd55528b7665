package bench

import (
	"fmt"
	"regexp"
	"strconv"
)

// Mode is how a client addresses the proxy.
type Mode string

// The modes.
const (
	// Absolute is `POST http://host/…` to the proxy, as with HTTP_PROXY.
	Absolute Mode = "absolute"
	// Intercepted is CONNECT, then TLS with the proxy's own certificate, as with
	// HTTPS_PROXY.
	Intercepted Mode = "intercepted"
)

// Scenario is one load. The request is always a POST of requestBytes of JSON, each
// one different from all others.
type Scenario struct {
	Mode    Mode
	Bytes   int  // of the answer's body
	Clients int  // each with one request at a time
	NewConn bool // a new connection to the proxy for every request
}

// Name is unique among scenarios, and what BENCH_ONLY is matched against.
func (s Scenario) Name() string {
	conn := "keep-alive"
	if s.NewConn {
		conn = "new-conn"
	}
	return fmt.Sprintf("%s/%s/c%d/%s", s.Mode, sizeName(s.Bytes), s.Clients, conn)
}

func sizeName(n int) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return strconv.Itoa(n>>20) + "MiB"
	case n >= 1<<10 && n%(1<<10) == 0:
		return strconv.Itoa(n>>10) + "KiB"
	}
	return strconv.Itoa(n) + "B"
}

// Size names a selection of scenarios.
type Size string

// The sizes.
const (
	Quick    Size = "quick"    // about three minutes
	Standard Size = "standard" // about twenty minutes
	Full     Size = "full"     // the whole cross product, about three quarters of an hour
)

// Sizes returns every size.
func Sizes() []Size { return []Size{Quick, Standard, Full} }

// Plan returns the scenarios of a size, in the order in which they run.
func Plan(size Size) ([]Scenario, error) {
	const small, middle, large = 1 << 10, 64 << 10, 1 << 20
	type block struct {
		bytes   int
		newConn bool
		clients []int
	}
	var blocks []block
	switch size {
	case Quick:
		blocks = []block{{small, false, []int{1, 16, 64}}, {small, true, []int{16}}}
	case Standard:
		blocks = []block{
			{small, false, []int{1, 16, 64, 256}}, {small, true, []int{16, 64}},
			{middle, false, []int{16, 64}}, {large, false, []int{1, 16}},
		}
	case Full:
		for _, bytes := range []int{small, middle, large} {
			for _, newConn := range []bool{false, true} {
				blocks = append(blocks, block{bytes, newConn, []int{1, 16, 64, 256}})
			}
		}
	default:
		return nil, fmt.Errorf("bench: size %q: is one of %v", size, Sizes())
	}
	var out []Scenario
	for _, b := range blocks {
		for _, m := range []Mode{Intercepted, Absolute} {
			for _, c := range b.clients {
				out = append(out, Scenario{Mode: m, Bytes: b.bytes, Clients: c, NewConn: b.newConn})
			}
		}
	}
	return out, nil
}

// Only keeps the scenarios whose name the expression matches; "" keeps all.
func Only(all []Scenario, expr string) ([]Scenario, error) {
	re, err := regexp.Compile(expr)
	if err != nil {
		return nil, fmt.Errorf("bench: scenarios: %w", err)
	}
	var out []Scenario
	for _, s := range all {
		if re.MatchString(s.Name()) {
			out = append(out, s)
		}
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("bench: no scenario matches %q; the first is called %s", expr, all[0].Name())
	}
	return out, nil
}
