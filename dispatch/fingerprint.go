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

// fieldBuffers are what field puts its parts together in.
var fieldBuffers = sync.Pool{New: func() any { return new([512]byte) }}

// field writes each part behind its length, in pieces as large as the buffer: a hash
// takes one for many parts, and none is copied to the heap.
func field(h hash.Hash, parts ...string) {
	buf := fieldBuffers.Get().(*[512]byte) //nolint:forcetypeassert // the pool holds nothing else
	b := buf[:0]
	for _, p := range parts {
		if len(b)+8+len(p) > cap(b) {
			h.Write(b)
			b = b[:0]
		}
		b = binary.BigEndian.AppendUint64(b, uint64(len(p)))
		for len(p) > cap(b)-len(b) {
			n := copy(b[len(b):cap(b)], p)
			h.Write(b[:cap(b)])
			b, p = b[:0], p[n:]
		}
		b = append(b, p...)
	}
	h.Write(b)
	// What went into a digest may be a secret: it does not wait here for the next one.
	clear(buf[:])
	fieldBuffers.Put(buf)
}

func digestText(h hash.Hash) string { return "sha256:" + hex.EncodeToString(h.Sum(nil)) }

// meaningful are the fields beside the content type that say what a request is, where
// target and body do not (CONTRACT D1): the operation of a protocol that sends them all
// to one path, the source or destination of a copy, the part of an upload. Without them
// an answer to one operation would be taken for that of another.
var meaningful = []string{
	"Soapaction", "X-Amz-Target", "X-Http-Method", "X-Http-Method-Override", "X-Method-Override",
	"Destination", "X-Amz-Copy-Source", "X-Goog-Copy-Source", "X-Ms-Copy-Source",
	"Content-Range", "Upload-Offset",
}

// fingerprint recognises a repeat of the same request (CONTRACT D1, O3): method,
// normalised target, content type without parameters, the meaningful fields, body
// bytes. Other fields are client noise (IK-07).
func fingerprint(out *Outgoing, body *spool) string {
	h := sha256.New()
	media := out.Header.Get("Content-Type")
	if m, _, err := mime.ParseMediaType(media); err == nil {
		media = m
	} else {
		media, _, _ = strings.Cut(media, ";")
	}
	field(h, "waybill fingerprint 1", out.Method, out.Target.Scheme, out.Authority, out.RawPath, queryMark(out), out.RawQuery, media)
	if out.Upgrade != "" {
		field(h, "upgrade", out.Upgrade) // a plain GET of the same target is another request
	}
	for _, name := range meaningful {
		if values := out.Header[name]; len(values) > 0 {
			field(h, name, strconv.Itoa(len(values)))
			field(h, values...)
		}
	}
	if body != nil {
		h.Write(body.digest[:])
	}
	return digestText(h)
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
	h := sha256.New()
	field(h, "waybill seal 2", snapshot, identity, out.Method, out.Target.Scheme, out.Target.Host, strconv.Itoa(out.Target.Port), out.Authority,
		out.RawPath, queryMark(out), out.RawQuery, strconv.FormatInt(out.Length, 10))
	names := make([]string, 0, len(out.Header))
	for name := range out.Header {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		if slices.Contains(injected, name) {
			field(h, name, "injected", strconv.Itoa(len(out.Header[name])))
			continue
		}
		// The number of values keeps them apart from the next field's name.
		field(h, name, "as it came", strconv.Itoa(len(out.Header[name])))
		field(h, out.Header[name]...)
	}
	if body != nil {
		h.Write(body.digest[:])
	}
	return [sha256.Size]byte(h.Sum(nil))
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
	var b strings.Builder
	b.WriteString(out.Target.Scheme)
	b.WriteString("://")
	b.WriteString(out.Authority)
	b.WriteString(out.RawPath)
	if !out.HasQuery {
		return b.String()
	}
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
