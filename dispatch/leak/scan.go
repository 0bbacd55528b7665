package leak

import (
	"encoding/binary"
	"math/bits"
)

// span is a place in a text, by the offsets of its first byte and of the one behind.
type span struct{ start, end int64 }

// scanner looks for the patterns of a Guard in a text that comes in pieces. Every
// byte is looked at once: what may become a match is carried on as threads, so that
// it does not matter where the text is cut.
type scanner struct {
	known   *known
	pos     int64    // bytes seen
	threads []thread // unlike in their state; all of them can still become a match
	next    []thread // the other buffer
	index   map[state]int32
	spans   []span // found by the last scan
	room    [2][4]thread
	part    bool // the next byte may go on with a match: the text begins within another one
}

// state is a place in a pattern: within the spelling of a symbol.
type state struct {
	pattern uint32
	symbol  uint32
	node    uint32
}

// thread is a beginning of a match: where it began, what it waits for.
type thread struct {
	state
	from  uint32 // the symbol it began with: 0, but at the beginning of a part
	start int64
}

// manyThreads is from where on threads are found by a map. A secret that repeats
// itself has as many of them as it has repeated parts.
const manyThreads = 16

func (sc *scanner) reset(k *known) {
	if sc.threads == nil {
		sc.threads, sc.next = sc.room[0][:], sc.room[1][:] // as many as chance brings about
	}
	sc.known, sc.pos = k, 0
	sc.threads, sc.next, sc.spans = sc.threads[:0], sc.next[:0], sc.spans[:0]
	sc.part = false
}

// within begins the matches that may be under way before the first byte of a part: from every
// place in every pattern, also within a spelling.
func (sc *scanner) within(c byte) {
	sp := sc.known.sp
	for p := range sc.known.patterns {
		for k, symbol := range sc.known.patterns[p].symbols {
			sc.enter(sp, thread{state{uint32(p), uint32(k), sp.roots[symbol]}, uint32(k), 0}, c)
		}
	}
}

func (sc *scanner) enter(sp *spellingTable, t thread, c byte) {
	sc.move(sp, &t, c, 0)
	for _, e := range sp.edgesOf(t.node) {
		next := t
		next.node = e.to
		sc.enter(sp, next, c)
	}
}

// telling is how much of a pattern tells it, in symbols: eight, and of a short one a third, or
// its two ends would tell it together.
func (p *pattern) telling() uint32 { return uint32(min(MinSecretBytes, max(3, len(p.symbols)/3))) }

// told returns where, at the end of a part, a piece of a pattern begins that tells it; -1: nowhere.
// All of the text counts, however short.
func (sc *scanner) told() int64 {
	out := int64(-1)
	for i := range sc.threads {
		t := &sc.threads[i]
		if t.start > 0 && t.symbol-t.from < sc.known.patterns[t.pattern].telling() {
			continue
		}
		if out < 0 || t.start < out {
			out = t.start
		}
	}
	return out
}

// settled is the offset up to which no match can begin any more that is not known.
func (sc *scanner) settled() int64 {
	out := sc.pos
	for i := range sc.threads {
		out = min(out, sc.threads[i].start)
	}
	return out
}

// idle reports whether no match has begun.
func (sc *scanner) idle() bool { return len(sc.threads) == 0 }

// scan reads p and leaves in spans what ends in it.
func (sc *scanner) scan(p []byte) {
	sc.spans = sc.spans[:0]
	if sc.known == nil || len(p) == 0 {
		return
	}
	f := sc.known.filter
	i := 0
	if sc.part {
		sc.step(p[0], sc.pos)
		i = 1
	}
	if !sc.idle() {
		i = sc.run(p, i, i)
	}
	for i < len(p) {
		first, hit := f.skip(p, i)
		least := len(p)
		if hit {
			least = first + f.stride
		}
		i = sc.run(p, first, least)
	}
	sc.pos += int64(len(p))
}

// run reads p from i on: to least, and on until no match has begun, or to the end.
// It returns where it stopped.
func (sc *scanner) run(p []byte, i, least int) int {
	starts := &sc.known.starts
	for i < len(p) {
		if sc.idle() {
			for i < least && starts[p[i]] == 0 {
				i++
			}
			if i >= least {
				return i
			}
		}
		sc.step(p[i], sc.pos+int64(i))
		i++
	}
	return i
}

// step reads one byte, at the offset at.
func (sc *scanner) step(c byte, at int64) {
	sc.next = sc.next[:0]
	if len(sc.index) > 0 {
		clear(sc.index)
	}
	sp := sc.known.sp
	for i := range sc.threads {
		sc.move(sp, &sc.threads[i], c, at)
	}
	for m := sc.known.starts[c]; m != 0; m &= m - 1 {
		for p := bits.TrailingZeros64(m); p < len(sc.known.patterns); p += 64 {
			t := thread{state: state{pattern: uint32(p), node: sp.roots[sc.known.patterns[p].symbols[0]]}, start: at}
			sc.move(sp, &t, c, at)
		}
	}
	if sc.part {
		sc.part = false
		sc.within(c)
	}
	sc.threads, sc.next = sc.next, sc.threads
}

func (sc *scanner) move(sp *spellingTable, t *thread, c byte, at int64) {
	for _, e := range sp.edgesOf(t.node) {
		if e.c != c {
			continue
		}
		nd := &sp.nodes[e.to]
		if nd.end {
			symbols := sc.known.patterns[t.pattern].symbols
			switch n := t.symbol + 1; {
			case int(n) < len(symbols):
				sc.put(thread{state{t.pattern, n, sp.roots[symbols[n]]}, t.from, t.start})
			case t.from == 0 || n-t.from >= sc.known.patterns[t.pattern].telling():
				sc.spans = append(sc.spans, span{t.start, at + 1})
			}
		}
		if nd.n > 0 {
			sc.put(thread{state{t.pattern, t.symbol, e.to}, t.from, t.start})
		}
		return
	}
}

// put adds a thread. Of two in the same state the one that began first says it all:
// they end alike, and it covers the other.
func (sc *scanner) put(t thread) {
	if len(sc.next) < manyThreads {
		for i := range sc.next {
			if sc.next[i].state == t.state {
				sc.next[i].join(&t)
				return
			}
		}
		sc.next = append(sc.next, t)
		return
	}
	if len(sc.next) == manyThreads {
		if sc.index == nil {
			sc.index = make(map[state]int32, 4*manyThreads)
		}
		for i := range sc.next {
			sc.index[sc.next[i].state] = int32(i)
		}
	}
	if i, ok := sc.index[t.state]; ok {
		sc.next[i].join(&t)
		return
	}
	sc.index[t.state] = int32(len(sc.next))
	sc.next = append(sc.next, t)
}

func (t *thread) join(other *thread) {
	t.start, t.from = min(t.start, other.start), min(t.from, other.from)
}

// filter skips what cannot hold a match. It knows every window of three bytes that
// occurs in the beginning of any spelling of any pattern, that is in its first
// symbols. A match spells each of them with a byte or more; so of `symbols` bytes of
// text one window is enough to say that none begins among the first `stride`; and
// where a match begins, `stride` windows in a row are known.
type filter struct {
	stride int
	table  [1 << 10]uint64 // a set of hashes
}

// filterSymbols is how much of a pattern the filter knows: more of it makes longer
// strides and a fuller table.
const filterSymbols = 16

func newFilter(sp *spellingTable, patterns []pattern) *filter {
	length := filterSymbols
	for _, p := range patterns {
		length = min(length, len(p.symbols))
	}
	f := &filter{stride: length - 2}
	for _, p := range patterns {
		for i := range length {
			g := &sp.grams[p.symbols[i]]
			for _, h := range g.inside {
				f.put(h)
			}
			if i+1 >= length {
				continue
			}
			g1 := &sp.grams[p.symbols[i+1]]
			for _, ab := range g.last2 {
				for _, c := range g1.first1 {
					f.put(hash(ab | uint32(c)<<16))
				}
			}
			for _, a := range g.last1 {
				for _, bc := range g1.first2 {
					f.put(hash(uint32(a) | bc<<8))
				}
			}
			if i+2 >= length {
				continue
			}
			g2 := &sp.grams[p.symbols[i+2]]
			for _, a := range g.last1 {
				for _, b := range g1.single {
					for _, c := range g2.first1 {
						f.put(hash(uint32(a) | uint32(b)<<8 | uint32(c)<<16))
					}
				}
			}
		}
	}
	return f
}

// hash maps a window, its first byte lowest, to a bit of the table.
func hash(w uint32) uint32 { return w * 0x9e3779b1 >> 16 }

func (f *filter) put(h uint32) { f.table[h>>6] |= 1 << (h & 63) }

// has reports whether the window at i may occur in a pattern.
func (f *filter) has(p []byte, i int) bool {
	h := hash(uint32(p[i]) | uint32(p[i+1])<<8 | uint32(p[i+2])<<16)
	return f.table[h>>6]&(1<<(h&63)) != 0
}

// skip returns the first place from i on before which no match begins, and whether
// one may begin there. Otherwise too few bytes are left to tell.
func (f *filter) skip(p []byte, i int) (int, bool) {
	stride, table := f.stride, &f.table
	for i+stride+2 <= len(p) {
		// A match that begins in the stride has the window at its end, which is loaded with the byte before it.
		h := hash(binary.LittleEndian.Uint32(p[i+stride-2:]) >> 8)
		if table[h>>6]&(1<<(h&63)) == 0 {
			i += stride
			continue
		}
		// It has as many windows in a row as the stride is long, this one among them.
		first := i + stride - 1
		next := first + 1
		for first > i && f.has(p, first-1) {
			first--
		}
		for next < first+stride && next+3 <= len(p) && f.has(p, next) {
			next++
		}
		switch {
		case next == first+stride:
			return first, true
		case next+3 > len(p):
			return first, false
		}
		i = next + 1
	}
	return i, false
}
