package journal

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"
	"unicode/utf8"

	"waybill/dispatch"
	"waybill/outcome"
)

const (
	// maxBatchEvents bounds the events of one batch.
	maxBatchEvents = 256
	plainVersion   = 1
)

var errDecode = errors.New("not decodable")

// frame is one Append as it is stored: the events of one action, in order, with
// consecutive sequence numbers from the key's on. A frame without an action holds
// one BOOT event.
type frame struct {
	action dispatch.ActionID
	boot   bootID
	events []dispatch.Event
}

type bootID [16]byte

// frameHead is the length of what precedes the events in a frame's plaintext:
// version ‖ action ‖ boot ‖ count(2).
const frameHead = 1 + 16 + 16 + 2

// packed returns a JSON text in the form in which it is stored, and the version byte
// that says which.
func packed(text []byte) (payload []byte, version byte) {
	if out, ok := pack(make([]byte, 0, len(text)/2+64), text); ok {
		return out, packedVersion
	}
	return text, plainVersion
}

// unpacked reverses packed.
func unpacked(version byte, payload []byte) ([]byte, error) {
	switch version {
	case plainVersion:
		return payload, nil
	case packedVersion:
		return unpack(payload)
	}
	return nil, errDecode
}

// encodeFrame returns the plaintext of a frame; events is the JSON array.
func encodeFrame(action dispatch.ActionID, boot bootID, count int, events []byte) []byte {
	payload, version := packed(events)
	return append(appendHead(make([]byte, 0, frameHead+len(payload)), version, action, boot, count), payload...)
}

// appendHead appends what precedes the events.
func appendHead(b []byte, version byte, action dispatch.ActionID, boot bootID, count int) []byte {
	b = append(b, version)
	b = append(b, action[:]...)
	b = append(b, boot[:]...)
	return binary.BigEndian.AppendUint16(b, uint16(count))
}

// eventsOfFrame returns the JSON of a frame's events.
func eventsOfFrame(b []byte) ([]byte, error) {
	if len(b) < frameHead {
		return nil, errDecode
	}
	return unpacked(b[0], b[frameHead:])
}

func decodeFrame(b []byte) (f frame, err error) {
	text, err := eventsOfFrame(b)
	if err != nil {
		return f, errDecode
	}
	copy(f.action[:], b[1:])
	copy(f.boot[:], b[17:])
	n := int(binary.BigEndian.Uint16(b[33:]))
	if err := json.Unmarshal(text, &f.events); err != nil {
		return f, errDecode // the error could quote what was recorded
	}
	if n == 0 || n != len(f.events) {
		return f, errDecode
	}
	for i := range f.events {
		if f.events[i].Type == dispatch.EventInvalid {
			return f, errDecode
		}
	}
	return f, nil
}

// frameCount reads how many events a frame holds without decoding them.
func frameCount(b []byte) (int, dispatch.ActionID, error) {
	var id dispatch.ActionID
	if len(b) < frameHead || b[0] != plainVersion && b[0] != packedVersion {
		return 0, id, errDecode
	}
	copy(id[:], b[1:])
	n := int(binary.BigEndian.Uint16(b[33:]))
	if n == 0 {
		return 0, id, errDecode
	}
	return n, id, nil
}

// projection is what is stored of one action: its record, and where its frames are.
type projection struct {
	rec    dispatch.Record
	frames []uint64 // first sequence number of each frame, ascending
	// brief: only the places of its frames are stored, the record is made from them.
	brief bool
}

const (
	// briefFrames and briefBytes bound the frames of a brief projection, and what one of
	// them holds: reading it stays cheap, and its record fits into a value when it is
	// written at the end.
	briefFrames = 4
	briefBytes  = 8 << 10
)

// shorten decides whether the record is left out of what is stored: of an action with few
// events, whose reader makes it from them. written are the bytes of this append's events.
func (p *projection) shorten(old *projection, written int) {
	p.brief = (old == nil || old.brief) && len(p.frames) <= briefFrames && written <= briefBytes
}

func encodeProjection(p *projection) ([]byte, error) {
	head, rec, err := p.parts()
	return append(head, rec...), err
}

// parts are the two parts of a projection's plaintext: places and record.
func (p *projection) parts() (head, rec []byte, err error) {
	if rec, err = json.Marshal(&p.rec); err != nil {
		return nil, nil, err
	}
	return p.places(nil), rec, nil
}

// places appends the first part, which stands alone in a brief projection.
func (p *projection) places(b []byte) []byte {
	b = append(b, plainVersion)
	b = binary.AppendUvarint(b, uint64(len(p.frames)))
	last := uint64(0)
	for _, s := range p.frames {
		b = binary.AppendUvarint(b, s-last)
		last = s
	}
	return b
}

// decodeProjection reads what is stored; of a brief projection the record is empty.
func decodeProjection(b []byte) (*projection, error) {
	if len(b) < 1 || b[0] != plainVersion {
		return nil, errDecode
	}
	b = b[1:]
	n, w := binary.Uvarint(b)
	if w <= 0 || n > uint64(len(b)) {
		return nil, errDecode
	}
	b = b[w:]
	p := &projection{frames: make([]uint64, 0, n)}
	last := uint64(0)
	for range n {
		d, w := binary.Uvarint(b)
		if w <= 0 || d == 0 || d > math.MaxUint64-last {
			return nil, errDecode
		}
		last += d
		p.frames = append(p.frames, last)
		b = b[w:]
	}
	if len(b) == 0 && n > 0 {
		p.brief = true
		return p, nil
	}
	if json.Unmarshal(b, &p.rec) != nil {
		return nil, errDecode
	}
	return p, nil
}

// manifest counts a stored result (CONTRACT H4). Without it chunks are garbage.
type manifest struct {
	Bytes   int64  `json:"bytes"`
	Chunks  int    `json:"chunks"`
	Digest  string `json:"digest"`
	Expires int64  `json:"expires_ms,omitempty"` // 0: never
	// Dropped is set by retention before it removes the first chunk.
	Dropped bool `json:"dropped,omitempty"`
}

func encodeManifest(m *manifest) []byte {
	e := newEncoder()
	defer e.done()
	return slices.Clone(e.wholeManifest(m))
}

// sealManifest returns the stored form of a manifest.
func (s *sealer) sealManifest(key []byte, m *manifest) []byte {
	e := newEncoder()
	defer e.done()
	return s.seal(key, nil, e.wholeManifest(m))
}

// wholeManifest is valid until done.
func (e *encoder) wholeManifest(m *manifest) []byte {
	e.out = append(e.out, packedVersion)
	e.manifest(m)
	return e.out
}

func decodeManifest(b []byte) (*manifest, error) {
	m := new(manifest)
	if len(b) < 1 {
		return nil, errDecode
	}
	text, err := unpacked(b[0], b[1:])
	if err != nil || json.Unmarshal(text, m) != nil || m.Chunks < 0 || m.Bytes < 0 {
		return nil, errDecode
	}
	return m, nil
}

// head is the position of the store: the last event, its frame's hash, and the
// number of the group that wrote it.
type head struct {
	seq   uint64
	hash  digest
	group uint64
}

func encodeHead(h head) []byte {
	b := append(make([]byte, 0, 1+8+8+hashBytes), plainVersion)
	b = binary.BigEndian.AppendUint64(b, h.seq)
	b = binary.BigEndian.AppendUint64(b, h.group)
	return append(b, h.hash[:]...)
}

func decodeHead(b []byte) (h head, err error) {
	if len(b) != 1+8+8+hashBytes || b[0] != plainVersion {
		return h, errDecode
	}
	h.seq = binary.BigEndian.Uint64(b[1:])
	h.group = binary.BigEndian.Uint64(b[9:])
	copy(h.hash[:], b[17:])
	return h, nil
}

// flagLast marks the last chunk of a result, inside its sealed value.
const flagLast = 1

// sealChunk returns the stored form of a chunk; its number and attempt are in the
// key, which is authenticated.
func (s *sealer) sealChunk(id dispatch.ActionID, c dispatch.Chunk) entry {
	key := keyChunk(id, c.Attempt, c.Index)
	var flags [1]byte
	if c.Last {
		flags[0] = flagLast
	}
	return entry{key: key, value: s.seal(key, nil, flags[:], c.Data)}
}

// chunkBytes is the length of the data in a stored chunk of n bytes.
func chunkBytes(n int64) int64 { return n - sealOverhead - 1 }

// entry is one write of a transaction.
type entry struct {
	key, value []byte
	remove     bool
	// fresh: nothing was under the key. If it is removed before the store was given it, the
	// store need not hear of either.
	fresh bool
}

// bytes is what Badger counts for it in a transaction.
func (e *entry) bytes() int64 { return int64(len(e.key)+len(e.value)) + 2 + 10 }

// copied returns a copy of the events that shares no memory with the caller, in the
// form in which it will be read back – so that the state projected now and the one
// rebuilt from the log are equal.
func copied(in []dispatch.Event) ([]dispatch.Event, error) {
	out := slices.Clone(in)
	m := roomFor(in)
	for i := range out {
		own(&out[i], &m)
		if e := out[i].Ended; e != nil && out[i].Type != dispatch.CallerGone && out[i].Type != dispatch.RetryStopped {
			if err := validFacts(e.Facts); err != nil {
				return nil, fmt.Errorf("%w: %s: %w", dispatch.ErrNotWritten, out[i].Type, err)
			}
		}
	}
	return out, nil
}

// prepare returns such a copy and its JSON, for those that need the text.
func prepare(in []dispatch.Event) ([]dispatch.Event, []byte, error) {
	out, err := copied(in)
	if err != nil {
		return nil, nil, err
	}
	text, err := marshalEvents(out)
	if err != nil {
		return nil, nil, err
	}
	return out, text, nil
}

// validFacts refuses facts that could not be read back (CONTRACT A8).
func validFacts(f outcome.Facts) error {
	if known(phaseTokens, f.Phase) && known(outcomeTokens, f.Outcome) && known(retryTokens, f.Retry) && (f.Code == outcome.CodeNone || known(codeTokens, f.Code)) {
		return nil
	}
	for _, m := range []interface{ MarshalText() ([]byte, error) }{f.Phase, f.Outcome, f.Retry, f.Code} {
		if _, err := m.MarshalText(); err != nil {
			return err
		}
	}
	return nil
}

func text(s string) string {
	if utf8.ValidString(s) {
		return s
	}
	return strings.ToValidUTF8(s, "\uFFFD")
}

func instant(t time.Time) time.Time { return t.Round(0).UTC() }

func clone[T any](p *T) *T {
	if p == nil {
		return nil
	}
	c := *p
	return &c
}

// room is memory in one piece for the copies of what the events of an ordinary append
// have: most of it ends up in the action's record, and goes with that. What finds no room,
// and the zero value has none, gets memory of its own.
type room struct {
	accepted   spare[dispatch.Accepted]
	bound      spare[dispatch.Bound]
	credential spare[dispatch.Credential]
	dispatch   spare[dispatch.Dispatch]
	peer       spare[outcome.Peer]
	sent       spare[dispatch.Sent]
	response   spare[dispatch.Response]
	expected   spare[int64]
	ended      spare[dispatch.Ended]
	result     spare[dispatch.Result]
}

// spare are values that nobody has yet.
type spare[T any] []T

// clone copies p to the next of them.
func (s *spare[T]) clone(p *T) *T {
	if p == nil || len(*s) == 0 {
		return clone(p)
	}
	c := &(*s)[0]
	*s = (*s)[1:]
	*c = *p
	return c
}

// roomFor returns the room for an append that begins an action and crosses the boundary, or
// for one that has its result.
func roomFor(events []dispatch.Event) (m room) {
	if len(events) < 2 {
		return m
	}
	switch last := &events[len(events)-1]; {
	case events[0].Accepted != nil && last.Dispatch != nil:
		all := new(struct {
			accepted   [1]dispatch.Accepted
			bound      [1]dispatch.Bound
			credential [1]dispatch.Credential
			dispatch   [1]dispatch.Dispatch
			peer       [1]outcome.Peer
		})
		m.accepted, m.bound, m.credential, m.dispatch, m.peer = all.accepted[:], all.bound[:], all.credential[:], all.dispatch[:], all.peer[:]
	case last.Result != nil:
		all := new(struct {
			response [2]dispatch.Response
			expected [2]int64
			ended    [1]dispatch.Ended
			result   [1]dispatch.Result
			sent     [1]dispatch.Sent
		})
		m.response, m.expected, m.ended, m.result, m.sent = all.response[:], all.expected[:], all.ended[:], all.result[:], all.sent[:]
	}
	return m
}

func clonePeer(p *outcome.Peer, m *room) *outcome.Peer {
	c := m.peer.clone(p)
	if c != nil {
		for _, s := range []*string{&c.Address, &c.ServerName, &c.Protocol, &c.TLSVersion, &c.LeafDigest, &c.ChainDigest, &c.HostKey} {
			*s = text(*s)
		}
	}
	return c
}

func cloneExec(e *dispatch.ExecEnd) *dispatch.ExecEnd {
	c := e.Clone()
	if c != nil {
		c.ExitSignal, c.SignalMessage = text(c.ExitSignal), text(c.SignalMessage)
		for i, v := range c.RefusedEnv {
			c.RefusedEnv[i] = text(v)
		}
	}
	return c
}

func cloneFields(in map[string][]string) map[string][]string {
	if len(in) == 0 {
		return nil
	}
	n := 0
	for _, v := range in {
		n += len(v)
	}
	all := make([]string, 0, n) // one piece of memory, of which no part can grow into the next
	out := make(map[string][]string, len(in))
	for k, v := range in {
		if v != nil {
			from := len(all)
			all = append(all, v...) // values keep their bytes: Result's JSON carries them
			v = all[from:len(all):len(all)]
		}
		out[text(k)] = v
	}
	return out
}

// own makes of a copied event a deep copy. TestCloneEvent fails when a field is added to
// dispatch.Event that it does not copy.
func own(ev *dispatch.Event, m *room) {
	ev.At = instant(ev.At)
	if a := m.accepted.clone(ev.Accepted); a != nil {
		a.Caller, a.RequestID, a.Method, a.Target, a.Protocol = text(a.Caller), text(a.RequestID), text(a.Method), text(a.Target), text(a.Protocol)
		ev.Accepted = a
	}
	if b := m.bound.clone(ev.Bound); b != nil {
		b.Route, b.Snapshot, b.Fingerprint = text(b.Route), text(b.Snapshot), text(b.Fingerprint)
		b.Conditional = text(b.Conditional)
		if k := clone(b.Key); k != nil {
			k.Key, k.In, k.Scope, k.Maker = text(k.Key), text(k.In), text(k.Scope), text(k.Maker)
			k.Source, k.Reviewed, k.Replaces = text(k.Source), text(k.Reviewed), text(k.Replaces)
			k.ExpiresAt = instant(k.ExpiresAt)
			b.Key = k
		}
		if g := clone(b.Budget); g != nil {
			g.Until = instant(g.Until)
			b.Budget = g
		}
		ev.Bound = b
	}
	if c := m.credential.clone(ev.Credential); c != nil {
		c.ID, c.Version, c.Mode = text(c.ID), text(c.Version), text(c.Mode)
		ev.Credential = c
	}
	if e := m.ended.clone(ev.Ended); e != nil {
		e.Peer = clonePeer(e.Peer, m)
		e.Stage, e.Source = outcome.Stage(text(string(e.Stage))), outcome.Source(text(string(e.Source)))
		e.Reason, e.Field, e.Route, e.EarlierAction = text(e.Reason), text(e.Field), text(e.Route), text(e.EarlierAction)
		e.Proof, e.StatusLine = text(e.Proof), text(e.StatusLine)
		ev.Ended = e
	}
	if a := clone(ev.Approval); a != nil {
		a.Fingerprint, a.Held.Digest = text(a.Fingerprint), text(a.Held.Digest)
		a.ExpiresAt = instant(a.ExpiresAt)
		if c := clone(a.Credential); c != nil {
			c.ID, c.Version, c.Mode = text(c.ID), text(c.Version), text(c.Mode)
			a.Credential = c
		}
		ev.Approval = a
	}
	if d := clone(ev.Decision); d != nil {
		d.By, d.Via, d.Reason = text(d.By), text(d.Via), text(d.Reason)
		ev.Decision = d
	}
	if d := m.dispatch.clone(ev.Dispatch); d != nil {
		d.Approved = text(d.Approved)
		d.Peer = clonePeer(d.Peer, m)
		d.Connection, d.Stage = text(d.Connection), outcome.Stage(text(string(d.Stage)))
		if !d.Until.IsZero() {
			d.Until = instant(d.Until)
		}
		if c := clone(d.Credential); c != nil {
			c.ID, c.Version, c.Mode = text(c.ID), text(c.Version), text(c.Mode)
			d.Credential = c
		}
		ev.Dispatch = d
	}
	ev.Sent = m.sent.clone(ev.Sent)
	if r := m.response.clone(ev.Response); r != nil {
		r.ExpectedBytes = m.expected.clone(r.ExpectedBytes)
		r.Exec = cloneExec(r.Exec)
		r.Framing, r.Digest, r.Hop, r.ProxyStatus = text(r.Framing), text(r.Digest), text(r.Hop), text(r.ProxyStatus)
		ev.Response = r
	}
	if r := m.result.clone(ev.Result); r != nil {
		r.Header, r.Trailer = cloneFields(r.Header), cloneFields(r.Trailer)
		r.Exec = cloneExec(r.Exec)
		r.Digest, r.RedirectTo, r.RedirectFrom = text(r.Digest), text(r.RedirectTo), text(r.RedirectFrom)
		if !r.ExpiresAt.IsZero() {
			r.ExpiresAt = instant(r.ExpiresAt)
		}
		ev.Result = r
	}
	if l := clone(ev.Lease); l != nil {
		l.Process, l.For = text(l.Process), text(l.For)
		l.Until = instant(l.Until)
		ev.Lease = l
	}
	if t := clone(ev.Tunnel); t != nil {
		t.Authority = text(t.Authority)
		ev.Tunnel = t
	}
	if b := clone(ev.Boot); b != nil {
		b.ID, b.Build, b.Config = text(b.ID), text(b.Build), text(b.Config)
		ev.Boot = b
	}
	if s := clone(ev.Session); s != nil {
		s.ID, s.Name, s.Caller, s.Reason = text(s.ID), text(s.Name), text(s.Caller), text(s.Reason)
		ev.Session = s
	}
	cloneFollowUp(ev)
}
