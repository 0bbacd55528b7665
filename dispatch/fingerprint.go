package dispatch

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"hash"
	"mime"
	"slices"
	"strconv"
	"strings"
	"sync"
)

// fields collects the parts of one digest, each behind its length.
type fields struct {
	b    []byte
	hash hash.Hash // has taken what did not fit into b; nil: nothing
}

// maxFieldBytes is what is put together before it is hashed: nearly always all there is.
const maxFieldBytes = 4 << 10

var fieldPool = sync.Pool{New: func() any { return &fields{b: make([]byte, 0, maxFieldBytes)} }}

// newFields returns an empty collection. It ends with sum or text.
func newFields() *fields { return fieldPool.Get().(*fields) } //nolint:forcetypeassert // the pool holds nothing else

func (f *fields) add(parts ...string) {
	for _, p := range parts {
		if len(f.b)+8+len(p) > maxFieldBytes {
			f.spill()
		}
		f.b = binary.BigEndian.AppendUint64(f.b, uint64(len(p)))
		for len(p) > maxFieldBytes-len(f.b) {
			n := maxFieldBytes - len(f.b)
			f.b = append(f.b, p[:n]...)
			p = p[n:]
			f.spill()
		}
		f.b = append(f.b, p...)
	}
}

// number adds n as it is written.
func (f *fields) number(n int64) {
	var b [20]byte
	digits := strconv.AppendInt(b[:0], n, 10)
	if len(f.b)+8+len(digits) > maxFieldBytes {
		f.spill()
	}
	f.b = append(binary.BigEndian.AppendUint64(f.b, uint64(len(digits))), digits...)
}

// digest adds a digest as it is.
func (f *fields) digest(sum [sha256.Size]byte) {
	if len(f.b)+len(sum) > maxFieldBytes {
		f.spill()
	}
	f.b = append(f.b, sum[:]...)
}

func (f *fields) spill() {
	if f.hash == nil {
		f.hash = sha256.New()
	}
	f.hash.Write(f.b)
	f.b = f.b[:0]
}

// sum returns the digest, and gives the collection back.
func (f *fields) sum() (sum [sha256.Size]byte) {
	if f.hash == nil {
		sum = sha256.Sum256(f.b)
		clear(f.b)
	} else {
		f.spill()
		sum = [sha256.Size]byte(f.hash.Sum(nil))
		clear(f.b[:cap(f.b)])
	}
	// What went into a digest may be a secret: it does not wait here for the next one.
	f.b, f.hash = f.b[:0], nil
	fieldPool.Put(f)
	return sum
}

// text is sum as it is recorded.
func (f *fields) text() string { return sumText(f.sum()) }

func digestText(h hash.Hash) string { return sumText([sha256.Size]byte(h.Sum(nil))) }

func sumText(sum [sha256.Size]byte) string {
	const prefix = "sha256:"
	var b [len(prefix) + 2*sha256.Size]byte
	copy(b[:], prefix)
	hex.Encode(b[len(prefix):], sum[:])
	return string(b[:])
}

// meaningful are the fields beside the content type that say what a request is, where
// target and body do not (CONTRACT D1): the operation of a protocol that sends them all
// to one path, the source or destination of a copy, the part of an upload, the account or
// project on whose behalf a credential acts. Without them an answer to one operation would
// be taken for that of another.
var meaningful = []string{
	"Stripe-Account", "Stripe-Context", "Openai-Organization", "Openai-Project", "X-Goog-User-Project",
	"Soapaction", "X-Amz-Target", "X-Http-Method", "X-Http-Method-Override", "X-Method-Override",
	"Destination", "X-Amz-Copy-Source", "X-Goog-Copy-Source", "X-Ms-Copy-Source",
	"Content-Range", "Upload-Offset",
}

// fingerprint recognises a repeat of the same request (CONTRACT D1, O3): method,
// normalised target, content type without parameters, the meaningful fields, body
// bytes. Other fields are client noise (IK-07).
func fingerprint(out *Outgoing, body *spool) string {
	f := newFields()
	media := out.Header.Get("Content-Type")
	if m, _, err := mime.ParseMediaType(media); err == nil {
		media = m
	} else {
		media, _, _ = strings.Cut(media, ";")
	}
	f.add("waybill fingerprint 1", out.Method, out.Target.Scheme, out.Authority, out.RawPath, queryMark(out), out.RawQuery, media)
	if out.Upgrade != "" {
		f.add("upgrade", out.Upgrade) // a plain GET of the same target is another request
	}
	for _, name := range meaningful {
		if values := out.Header[name]; len(values) > 0 {
			f.add(name, strconv.Itoa(len(values)))
			f.add(values...)
		}
	}
	if body != nil {
		f.digest(body.digest)
	}
	return f.text()
}

func queryMark(out *Outgoing) string {
	if out.HasQuery {
		return "?"
	}
	return ""
}

// sealOf digests everything that will be sent (CONTRACT D2): target, all fields, body,
// and which credentials are in it. It is compared in memory and recorded nowhere: after
// the secrets are attached it covers them, too. Before that, or with the names of
// injected fields whose values stay out, it is what an approval covers (D5).
func sealOf(out *Outgoing, body *spool, injected []string, identity, snapshot string) [sha256.Size]byte {
	f := newFields()
	f.add("waybill seal 2", snapshot, identity, out.Method, out.Target.Scheme, out.Target.Host)
	f.number(int64(out.Target.Port))
	f.add(out.Authority, out.RawPath, queryMark(out), out.RawQuery)
	f.number(out.Length)
	var room [32]string // as many as most requests have
	names := room[:0]
	for name := range out.Header {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if slices.Contains(injected, name) {
			f.add(name, "injected")
			f.number(int64(len(out.Header[name])))
			continue
		}
		// The number of values keeps them apart from the next field's name.
		values := out.Header[name]
		f.add(name, "as it came")
		f.number(int64(len(values)))
		f.add(values...)
	}
	if body != nil {
		f.digest(body.digest)
	}
	return f.sum()
}

// shownTarget is the target as it may be recorded: names of query parameters stay,
// their values do not (CONTRACT C2, LK-03). It is cut at maxShown: a record that is
// too large for the journal would be refused as if the journal were at fault.
func shownTarget(out *Outgoing) string {
	s := wholeTarget(out)
	if len(s) <= maxShown {
		return s
	}
	return strings.ToValidUTF8(s[:maxShown], "") + "…"
}

const maxShown = 2 << 10

func wholeTarget(out *Outgoing) string {
	path := out.Target.Scheme + "://" + out.Authority + out.RawPath
	if !out.HasQuery {
		return path
	}
	var b strings.Builder
	b.Grow(len(path) + 1 + min(len(out.RawQuery), maxShown))
	b.WriteString(path)
	b.WriteByte('?')
	first := true
	for pair := range strings.SplitSeq(out.RawQuery, "&") {
		name, _, has := strings.Cut(pair, "=")
		if !has || name == "" || len(name) > 64 {
			// A bare word may itself be a token.
			continue
		}
		if !first {
			b.WriteByte('&')
		}
		first = false
		b.WriteString(name)
		b.WriteString("=…")
	}
	return b.String()
}
