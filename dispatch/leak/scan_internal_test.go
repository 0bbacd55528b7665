package leak

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"pgregory.net/rapid"
)

// TestHeldIsABeginning: whatever is held back, some continuation makes a secret of it that begins with its first byte. So
// nothing less may be held.
func TestHeldIsABeginning(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		secret := rapid.OneOf(rapid.StringMatching(`[ab%\\/+25u0]{8,12}`), rapid.StringMatching(`[A-Za-z0-9+/]{8,30}`)).Draw(t, "secret")
		guard := New([]byte(secret))
		g, s := guard.open(), guard.Stream()
		in := []byte(rapid.StringMatching(`[ab%\\/+25u0A-Za-z0-9\n&#x;]{0,40}`).Draw(t, "before"))
		p := rapid.SampledFrom(g.patterns).Draw(t, "pattern")
		for _, sym := range p.symbols[:rapid.IntRange(0, len(p.symbols)-1).Draw(t, "symbols")] {
			in = append(in, finish(g, g.sp.roots[sym], rapid.IntRange(0, 1<<20).Draw(t, "spelling"))...)
		}
		out := s.Write(nil, in)
		if len(out)+s.Held() != len(in) {
			t.Fatalf("%d of %d bytes passed, %d held", len(out), len(in), s.Held())
		}
		if s.Held() == 0 {
			return
		}
		held := len(out)
		first := slices.MinFunc(s.open().scan.threads, func(a, b thread) int { return int(a.start - b.start) })
		symbols := g.patterns[first.pattern].symbols
		end := finish(g, first.node, 0)
		for _, sym := range symbols[first.symbol+1:] {
			end = append(end, finish(g, g.sp.roots[sym], 0)...)
		}
		out = s.Flush(s.Write(out, end))
		if tail := out[held : len(in)+len(end)]; !bytes.Equal(tail, bytes.Repeat([]byte("*"), len(tail))) {
			t.Fatalf("%q was held of %q, but with %q it becomes %q", in[held:], in, end, out)
		}
	})
}

// finish returns what completes a spelling from a node on; pick chooses among them.
func finish(g *known, n uint32, pick int) []byte {
	out := []byte{}
	for {
		nd := g.sp.nodes[n]
		if nd.end && (nd.n == 0 || len(out) > 0) {
			return out
		}
		edges := g.sp.edgesOf(n)
		e := edges[pick%len(edges)]
		pick /= 2
		out, n = append(out, e.c), e.to
	}
}

// TestFilterChangesNothing: with the filter and without it the same is found. The texts are made of pieces of all
// spellings, so that the filter is wrong often.
func TestFilterChangesNothing(t *testing.T) {
	r := rand.New(rand.NewPCG(3, 4))
	hits := 0
	for _, secret := range []string{"cAnAry-8", "canary/+=7f3a", `"\%25<canary>&' `, "sk_canary_51H8fJ2eZvKYlo2C0aBcDeFgHiJkLmNoPqRsTuVwXyZ"} {
		g := New([]byte(secret)).open()
		all := *g
		all.filter = &filter{stride: g.filter.stride}
		for i := range all.filter.table {
			all.filter.table[i] = ^uint64(0)
		}
		for range 300 {
			var in []byte
			for len(in) < 400 {
				p := g.patterns[r.IntN(len(g.patterns))]
				from, to := 0, len(p.symbols)
				if r.IntN(3) > 0 {
					from = r.IntN(to)
					to = from + r.IntN(to-from+1)
				}
				for _, sym := range p.symbols[from:to] {
					in = append(in, finish(g, g.sp.roots[sym], r.IntN(1<<20)>>r.IntN(20))...)
				}
				for range r.IntN(30) {
					in = append(in, byte(r.Uint32()))
				}
			}
			var with, without scanner
			with.reset(g)
			without.reset(&all)
			for rest := in; len(rest) > 0; {
				n := min(len(rest), 1+r.IntN(200))
				with.scan(rest[:n])
				without.scan(rest[:n])
				if !slices.Equal(with.spans, without.spans) || with.settled() != without.settled() {
					t.Fatalf("with the filter %v, without %v, in %q", with.spans, without.spans, rest[:n])
				}
				hits += len(with.spans)
				rest = rest[n:]
			}
		}
	}
	if hits < 100 {
		t.Errorf("only %d matches: the texts are no test", hits)
	}
}

// TestLongestSpelling bounds what a Stream may hold back: twelve bytes for a byte of the secret.
func TestLongestSpelling(t *testing.T) {
	for s, root := range spellings().roots {
		if n := longest(spellings(), root); n > 13 || n == 0 {
			t.Errorf("symbol %d is spelled with up to %d bytes", s, n)
		}
	}
}

func longest(sp *spellingTable, n uint32) int {
	out := 0
	for _, e := range sp.edgesOf(n) {
		out = max(out, 1+longest(sp, e.to))
	}
	return out
}
