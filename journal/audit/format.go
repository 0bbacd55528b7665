package audit

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"crypto/hpke"
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"waybill/dispatch"
	"waybill/internal/control"
)

type digest [sha256.Size]byte

// MarshalText is for reports.
func (d digest) MarshalText() ([]byte, error) {
	return []byte("sha256:" + hex.EncodeToString(d[:])), nil
}

// UnmarshalText reads it back.
func (d *digest) UnmarshalText(b []byte) error {
	rest, ok := bytes.CutPrefix(b, []byte("sha256:"))
	if raw, err := hex.DecodeString(string(rest)); ok && err == nil && len(raw) == len(d) {
		copy(d[:], raw)
		return nil
	}
	return errors.New("not sha256: and 64 hexadecimal digits")
}

type logID [16]byte

const (
	headerBytes   = 256
	segmentMagic  = "WBAUDT\x00\x01"
	recordMagic   = 0x5741
	recordVersion = 1
	// recordHead precedes the body, hashBytes follow it.
	recordHead = 96
	hashBytes  = sha256.Size
	maxRecord  = 1 << 20
	flagLast   = 1
	flagStart  = 2
	encBytes   = 32
)

// Kind says what a record is. The list is closed.
type Kind uint8

// The kinds. Only the body of an event is sealed.
const (
	KindEvent      Kind = 1
	KindGap        Kind = 2 // Gap
	KindCheckpoint Kind = 3 // Checkpoint
	KindCut        Kind = 4 // Cut
)

var kindNames = map[Kind]string{KindEvent: "event", KindGap: "gap", KindCheckpoint: "checkpoint", KindCut: "cut"}

// String returns the name.
func (k Kind) String() string {
	if s := kindNames[k]; s != "" {
		return s
	}
	return fmt.Sprintf("invalid(%d)", uint8(k))
}

// MarshalText returns the name.
func (k Kind) MarshalText() ([]byte, error) { return []byte(k.String()), nil }

// Reasons of a Gap.
const (
	// GapRetention: the journal's retention removed the events before they were read.
	GapRetention = "removed_by_retention"
	// GapMissing: the journal has a hole there; "waybill journal verify" says more.
	GapMissing = "missing_in_the_journal"
	// GapRolledBack: the log has these events, and the journal does not have them any
	// more: an older copy was put back, or its end was lost.
	GapRolledBack = "journal_rolled_back"
	// GapDamaged: the end of a segment of the log itself could not be read at a start.
	GapDamaged = "log_damaged"
)

// Gap is a part of the journal that the log does not have, or has and should not.
type Gap struct {
	Reason string    `json:"reason"`
	From   uint64    `json:"from"` // sequence numbers of the journal
	To     uint64    `json:"to"`
	At     time.Time `json:"at"`
}

// Cut is written before retention removes segments: it tells a removal by retention
// from any other.
type Cut struct {
	Records  uint64    `json:"records"`  // records up to this one go
	Segments uint64    `json:"segments"` // segments up to this number go
	Head     digest    `json:"head"`     // hash of the last record that goes
	At       time.Time `json:"at"`
}

// header is the first part of a segment.
type header struct {
	number  uint64
	log     logID
	first   uint64 // number of its first record
	prev    digest // what it is chained to: the record before it, or the head of an empty segment
	record  digest // hash of the last record before it
	seq     uint64 // the journal's position before it
	frame   digest // and the hash there
	to      []byte // public key that its events are sealed to
	signer  []byte // public key of its checkpoints
	created time.Time
	clock   time.Time // of retention
	hash    digest
}

func (h *header) encode() []byte {
	b := append(make([]byte, 0, headerBytes), segmentMagic...)
	b = binary.BigEndian.AppendUint64(b, h.number)
	b = append(b, h.log[:]...)
	b = binary.BigEndian.AppendUint64(b, h.first)
	b = append(b, h.prev[:]...)
	b = binary.BigEndian.AppendUint64(b, h.seq)
	b = append(b, h.frame[:]...)
	b = append(b, h.to...)
	b = append(b, h.signer...)
	b = binary.BigEndian.AppendUint64(b, uint64(h.created.UnixMilli()))
	b = binary.BigEndian.AppendUint64(b, uint64(h.clock.UnixMilli()))
	b = append(b, h.record[:]...)
	h.hash = hashOf("segment", b)
	return append(b, h.hash[:]...)
}

func decodeHeader(b []byte) (h header, ok bool) {
	if len(b) < headerBytes || string(b[:8]) != segmentMagic {
		return h, false
	}
	if hashOf("segment", b[:headerBytes-hashBytes]) != digest(b[headerBytes-hashBytes:headerBytes]) {
		return h, false
	}
	h.number = binary.BigEndian.Uint64(b[8:])
	copy(h.log[:], b[16:])
	h.first = binary.BigEndian.Uint64(b[32:])
	copy(h.prev[:], b[40:])
	h.seq = binary.BigEndian.Uint64(b[72:])
	copy(h.frame[:], b[80:])
	h.to, h.signer = bytes.Clone(b[112:144]), bytes.Clone(b[144:176])
	h.created = time.UnixMilli(int64(binary.BigEndian.Uint64(b[176:]))).UTC()
	h.clock = time.UnixMilli(int64(binary.BigEndian.Uint64(b[184:]))).UTC()
	copy(h.record[:], b[192:])
	copy(h.hash[:], b[headerBytes-hashBytes:])
	return h, h.first > 0
}

func hashOf(what string, b []byte) (d digest) {
	h := sha256.New()
	h.Write([]byte("waybill audit " + what + " v1\x00"))
	h.Write(b)
	h.Sum(d[:0])
	return d
}

func genesis(id logID) digest { return hashOf("genesis", id[:]) }

// record is one record as it stands in a segment.
type record struct {
	kind  Kind
	index uint64 // from 1, without a gap
	seq   uint64 // the journal's position: of the event, or after the gap
	last  bool   // of an event: the last of its frame, so that the cursor may stand here
	start bool   // the first of those that were written, and synced, together
	prev  digest
	frame digest // hash of the event's frame in the journal
	body  []byte
	hash  digest
}

// encode appends the record to b, chained to prev, and sets its hash.
func (r *record) encode(b []byte) []byte {
	start := len(b)
	b = binary.BigEndian.AppendUint16(b, recordMagic)
	b = append(b, recordVersion, byte(r.kind))
	b = binary.BigEndian.AppendUint32(b, uint32(recordHead+len(r.body)+hashBytes))
	b = binary.BigEndian.AppendUint64(b, r.index)
	b = binary.BigEndian.AppendUint64(b, r.seq)
	flags := byte(0)
	if r.last {
		flags |= flagLast
	}
	if r.start {
		flags |= flagStart
	}
	b = append(b, flags, 0, 0, 0, 0, 0, 0, 0)
	b = append(b, r.prev[:]...)
	b = append(b, r.frame[:]...)
	b = append(b, r.body...)
	r.hash = hashOf("record", b[start:])
	return append(b, r.hash[:]...)
}

// decodeRecord reads the record at the beginning of b. ok is false for anything that
// is not a whole record whose own hash is right.
func decodeRecord(b []byte) (r record, n int, ok bool) {
	if len(b) < recordHead+hashBytes || binary.BigEndian.Uint16(b) != recordMagic || b[2] != recordVersion {
		return r, 0, false
	}
	n = int(binary.BigEndian.Uint32(b[4:]))
	if n < recordHead+hashBytes || n > maxRecord || n > len(b) {
		return r, 0, false
	}
	r.kind, r.index, r.seq, r.last = Kind(b[3]), binary.BigEndian.Uint64(b[8:]), binary.BigEndian.Uint64(b[16:]), b[24]&flagLast != 0
	r.start = b[24]&flagStart != 0
	copy(r.prev[:], b[32:])
	copy(r.frame[:], b[64:])
	r.body = b[recordHead : n-hashBytes]
	r.hash = digest(b[n-hashBytes : n])
	if hashOf("record", b[:n-hashBytes]) != r.hash && !control.Off("N1-records-hashed") {
		return r, 0, false
	}
	if kindNames[r.kind] == "" || r.kind == KindEvent && len(r.body) < encBytes || b[24] > flagLast|flagStart {
		return r, 0, false
	}
	return r, n, true
}

// ad is what a sealed body is bound to: its record's place.
func (r *record) ad(log logID) []byte {
	b := append(make([]byte, 0, 96), log[:]...)
	b = binary.BigEndian.AppendUint64(b, r.index)
	b = binary.BigEndian.AppendUint64(b, r.seq)
	b = append(b, r.prev[:]...)
	return append(b, r.frame[:]...)
}

// sealed is the plaintext of an event's body.
type sealed struct {
	Action string               `json:"action,omitempty"`
	Event  dispatch.StoredEvent `json:"event"`
}

// batch seals events that are written together. Its key comes from one HPKE
// encapsulation and is forgotten with it: the process keeps nothing that would open
// what it has written (CONTRACT N2).
type batch struct {
	enc []byte
	gcm cipher.AEAD
}

func newBatch(to *PublicKey) (*batch, error) {
	enc, s, err := hpke.NewSender(to.k, kdf(), aead(), sealInfo)
	if err != nil {
		return nil, fmt.Errorf("%w: sealing: %w", ErrKey, err)
	}
	gcm, err := exported(s.Export)
	if err != nil {
		return nil, err
	}
	return &batch{enc, gcm}, nil
}

// exported is the cipher that both sides derive. The key seals one batch only, so
// that a record's number is nonce enough.
func exported(export func(string, int) ([]byte, error)) (cipher.AEAD, error) {
	key, err := export("waybill audit records", 32)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrKey, err)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCM(block)
}

func nonce(index uint64) []byte { return binary.BigEndian.AppendUint64(make([]byte, 4, 12), index) }

func (b *batch) seal(r *record, log logID, plain []byte) {
	r.body = append(make([]byte, 0, encBytes+len(plain)+16), b.enc...)
	if control.Off("N2-sealed") {
		r.body = append(r.body, plain...)
		return
	}
	r.body = b.gcm.Seal(r.body, nonce(r.index), plain, r.ad(log))
}

// opener opens events. The ciphers of the last batch are kept.
type opener struct {
	key *PrivateKey
	enc []byte
	gcm cipher.AEAD
}

// ErrOpen: an event does not open with this key.
var ErrOpen = errors.New("audit: the event does not open with this key")

func (o *opener) open(r *record, log logID) (out sealed, err error) {
	enc := r.body[:encBytes]
	if !bytes.Equal(enc, o.enc) {
		rec, err := hpke.NewRecipient(enc, o.key.k, kdf(), aead(), sealInfo)
		if err != nil {
			return out, ErrOpen
		}
		if o.gcm, err = exported(rec.Export); err != nil {
			return out, err
		}
		o.enc = bytes.Clone(enc)
	}
	plain, err := o.gcm.Open(nil, nonce(r.index), r.body[encBytes:], r.ad(log))
	if err != nil {
		return out, ErrOpen
	}
	if json.Unmarshal(plain, &out) != nil {
		return out, errors.New("audit: the event is of another version")
	}
	return out, nil
}

// strip takes out what an audit has no use for and may be confidential beyond its
// purpose: the field values of stored answers.
func strip(ev *dispatch.StoredEvent) {
	if r := ev.Result; r != nil {
		c := *r
		c.Header, c.Trailer, c.RedirectTo = nil, nil, ""
		ev.Result = &c
	}
}
