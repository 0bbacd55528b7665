package leak

import (
	"fmt"
	"slices"
	"strings"
	"sync"
)

// symbol is a place in a pattern: one byte of a secret, one character of its base64
// or one digit of its base 16, with all the ways to spell it. The numbers index
// tables that all Guards share.
type symbol uint16

const (
	symText    symbol = 0                // + the byte
	symBase64  symbol = symText + 256    // + the six bits; the first of a pattern
	symHead4   symbol = symBase64 + 64   // + the low four bits; the others belong to what stands before
	symHead2   symbol = symHead4 + 16    // + the low two bits
	symWrapped symbol = symHead2 + 4     // + the six bits; a line may end before it
	symTail2   symbol = symWrapped + 64  // + the high two bits; the others belong to what follows
	symTail4   symbol = symTail2 + 4     // + the high four bits
	symHex     symbol = symTail4 + 16    // + the digit
	symbols           = int(symHex) + 16 // how many there are
)

func textSymbols(secret []byte) []symbol {
	out := make([]symbol, len(secret))
	for i, c := range secret {
		out[i] = symText + symbol(c)
	}
	return out
}

func hexSymbols(secret []byte) []symbol {
	out := make([]symbol, 0, 2*len(secret))
	for _, c := range secret {
		out = append(out, symHex+symbol(c>>4), symHex+symbol(c&15))
	}
	return out
}

// base64Symbols are the characters that hold bits of secret, in the base64 of a text
// in which n bytes, n modulo 3 being the alignment, stand before it. secret has two
// bytes or more.
func base64Symbols(secret []byte, alignment int) []symbol {
	out := make([]symbol, 0, len(secret)*4/3+2)
	bits, have := uint(0), 0 // the low `have` bits of bits are to be written
	rest := secret
	switch alignment {
	case 1: // six of the eight bits before it fill a character, two begin the next
		out = append(out, symHead4+symbol(rest[0]>>4))
		bits, have, rest = uint(rest[0]&15), 4, rest[1:]
	case 2: // twelve of sixteen bits fill two characters, four begin the next
		out = append(out, symHead2+symbol(rest[0]>>6))
		bits, have, rest = uint(rest[0]&63), 6, rest[1:]
	}
	full := func() {
		for have >= 6 {
			v := symbol(bits>>(have-6)) & 63
			if len(out) == 0 {
				out = append(out, symBase64+v)
			} else {
				out = append(out, symWrapped+v)
			}
			have -= 6
		}
	}
	full()
	for _, c := range rest {
		bits, have = bits<<8|uint(c), have+8
		full()
	}
	switch have {
	case 2:
		out = append(out, symTail2+symbol(bits&3))
	case 4:
		out = append(out, symTail4+symbol(bits&15))
	}
	return out
}

// spellingTable holds, for each symbol, its spellings as a trie, and what the filter
// needs to know of them.
type spellingTable struct {
	nodes []node
	edges []edge
	roots [symbols]uint32
	grams [symbols]gramParts
}

// node is a prefix of spellings. Its edges are edges[first:first+n].
type node struct {
	first uint32
	n     uint16
	end   bool // it is a spelling
}

type edge struct {
	c  byte
	to uint32
}

func (t *spellingTable) edgesOf(n uint32) []edge {
	nd := &t.nodes[n]
	return t.edges[nd.first : nd.first+uint32(nd.n)]
}

// gramParts describe the spellings of a symbol by their windows of three bytes.
type gramParts struct {
	inside []uint32 // hashes of windows within a spelling
	last2  []uint32 // the last two bytes of a spelling
	last1  []byte   // the last byte
	first2 []uint32 // the first two bytes
	first1 []byte   // the first byte
	single []byte   // spellings of one byte
}

// spellings returns the table; it is made once.
var spellings = sync.OnceValue(func() *spellingTable {
	t := &spellingTable{}
	put := func(s symbol, words []string) {
		slices.Sort(words)
		words = slices.Compact(words)
		t.roots[s] = t.trie(words, 0)
		t.grams[s] = partsOf(words)
	}
	for c := range 256 {
		put(symText+symbol(c), spellByte(byte(c)))
	}
	wrapped := func(words []string) []string {
		var out []string
		for _, end := range []string{"", "\n", "\r\n", `\n`, `\r\n`} {
			for _, w := range words {
				out = append(out, end+w)
			}
		}
		return out
	}
	// among returns the spellings of the values whose bits are v under mask.
	among := func(v, mask int) []string {
		var out []string
		for x := range 64 {
			if x&mask == v {
				out = append(out, spellBase64(x)...)
			}
		}
		return out
	}
	for v := range 64 {
		put(symBase64+symbol(v), spellBase64(v))
		put(symWrapped+symbol(v), wrapped(spellBase64(v)))
	}
	for v := range 16 {
		put(symHead4+symbol(v), among(v, 15))
		put(symTail4+symbol(v), wrapped(among(v<<2, 15<<2)))
		put(symHex+symbol(v), hexCases("%x", v))
	}
	for v := range 4 {
		put(symHead2+symbol(v), among(v, 3))
		put(symTail2+symbol(v), wrapped(among(v<<4, 3<<4)))
	}
	return t
})

// trie adds the words, which are sorted, unlike, and agree in their first depth
// bytes.
func (t *spellingTable) trie(words []string, depth int) uint32 {
	id := uint32(len(t.nodes))
	t.nodes = append(t.nodes, node{})
	nd := node{first: uint32(len(t.edges))}
	if len(words[0]) == depth {
		nd.end = true
		words = words[1:]
	}
	var groups [][]string
	for len(words) > 0 {
		c := words[0][depth]
		n := 1
		for n < len(words) && words[n][depth] == c {
			n++
		}
		groups = append(groups, words[:n])
		t.edges = append(t.edges, edge{c: c})
		words = words[n:]
	}
	nd.n = uint16(len(groups))
	t.nodes[id] = nd
	for i, g := range groups {
		to := t.trie(g, depth+1)
		t.edges[nd.first+uint32(i)].to = to
	}
	return id
}

// spellByte are the spellings of a byte in text.
func spellByte(c byte) []string {
	out := []string{string([]byte{c})}
	for _, h := range hexCases("%02x", int(c)) {
		out = append(out, "%"+h, "%25"+h, "%2525"+h)
	}
	if c == ' ' {
		out = append(out, "+", "%2B", "%2b", "%252B", "%252b")
	}
	if c >= 0x80 {
		return out
	}
	for n := 1; n <= 4; n++ {
		slashes := strings.Repeat(`\`, n)
		for _, h := range hexCases("%02x", int(c)) {
			out = append(out, slashes+"u00"+h)
		}
		if strings.IndexByte(`"/'`, c) >= 0 {
			out = append(out, slashes+string(rune(c)))
		}
	}
	if c == '\\' {
		out = append(out, `\\`, `\\\\`, `\\\\\\\\`)
	}
	out = append(out, fmt.Sprintf("&#%d;", c), fmt.Sprintf("&#%02d;", c), fmt.Sprintf("&#%03d;", c))
	for _, h := range hexCases("%02x", int(c)) {
		out = append(out, "&#x"+h+";", "&#X"+h+";")
	}
	switch c {
	case '&':
		out = append(out, "&amp;")
	case '<':
		out = append(out, "&lt;")
	case '>':
		out = append(out, "&gt;")
	case '"':
		out = append(out, "&quot;")
	case '\'':
		out = append(out, "&apos;")
	}
	return out
}

const base64Alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"

// spellBase64 are the spellings of six bits, in both alphabets of RFC 4648.
func spellBase64(v int) []string {
	switch v {
	case 62:
		return append(spellByte('+'), spellByte('-')...)
	case 63:
		return append(spellByte('/'), spellByte('_')...)
	}
	return []string{base64Alphabet[v : v+1]}
}

// hexCases formats v with each hex digit in either case.
func hexCases(format string, v int) []string {
	out := []string{""}
	for _, d := range fmt.Sprintf(format, v) {
		var next []string
		for _, o := range out {
			next = append(next, o+string(d))
			if d >= 'a' {
				next = append(next, o+string(d-'a'+'A'))
			}
		}
		out = next
	}
	return out
}

func partsOf(words []string) gramParts {
	var p gramParts
	for _, w := range words {
		n := len(w)
		p.first1 = append(p.first1, w[0])
		p.last1 = append(p.last1, w[n-1])
		if n == 1 {
			p.single = append(p.single, w[0])
			continue
		}
		p.first2 = append(p.first2, uint32(w[0])|uint32(w[1])<<8)
		p.last2 = append(p.last2, uint32(w[n-2])|uint32(w[n-1])<<8)
		for i := 0; i+3 <= n; i++ {
			p.inside = append(p.inside, hash(uint32(w[i])|uint32(w[i+1])<<8|uint32(w[i+2])<<16))
		}
	}
	p.inside, p.first2, p.last2 = set(p.inside), set(p.first2), set(p.last2)
	p.first1, p.last1, p.single = set(p.first1), set(p.last1), set(p.single)
	return p
}

func set[T uint32 | byte](s []T) []T {
	slices.Sort(s)
	return slices.Clip(slices.Compact(s))
}
