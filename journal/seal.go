package journal

import (
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"hash"
	"sync"

	"golang.org/x/crypto/chacha20poly1305"

	"waybill/dispatch"
)

const (
	// schemaVersion is bound into every sealed value (as additional data) and stored
	// in Boot.Version. A change of what a plaintext means raises it.
	schemaVersion = 2
	// valueVersion is the first byte of every stored value.
	valueVersion = 1
	// KeyBytes is the size of the data key.
	KeyBytes = 32

	nonceBytes   = chacha20poly1305.NonceSizeX
	sealOverhead = 1 + nonceBytes + chacha20poly1305.Overhead
	hashBytes    = sha256.Size
)

type (
	storeID [16]byte
	digest  [hashBytes]byte
)

// sealer holds what is derived from the data key for one store. It is safe for
// concurrent use.
type sealer struct {
	id      storeID
	aead    cipher.AEAD
	index   sync.Pool // of *indexMAC
	data    sync.Pool // of *[]byte: the memory of additional data
	witness []byte
}

// indexMAC is an HMAC-SHA256 for index keys, and the memory of what goes into it.
type indexMAC struct {
	h  hash.Hash
	in []byte
}

func newSealer(key []byte, id storeID) (*sealer, error) {
	derive := func(purpose string) ([]byte, error) {
		return hkdf.Key(sha256.New, key, id[:], "waybill journal "+purpose+" v1", KeyBytes)
	}
	values, err := derive("values")
	if err != nil {
		return nil, err
	}
	aead, err := chacha20poly1305.NewX(values)
	if err != nil {
		return nil, err
	}
	index, err := derive("index")
	if err != nil {
		return nil, err
	}
	witness, err := derive("witness")
	if err != nil {
		return nil, err
	}
	s := &sealer{id: id, aead: aead, witness: witness}
	s.index.New = func() any { return &indexMAC{h: hmac.New(sha256.New, index)} }
	s.data.New = func() any { b := make([]byte, 0, 128); return &b }
	return s, nil
}

// ad appends the additional data of the value under key: key ‖ schema version ‖
// store id ‖ extra.
func (s *sealer) ad(b, key, extra []byte) []byte {
	b = append(b, key...)
	b = binary.BigEndian.AppendUint16(b, schemaVersion)
	b = append(b, s.id[:]...)
	return append(b, extra...)
}

// seal returns version ‖ extra ‖ nonce ‖ ciphertext. The plaintext is given in parts,
// which are put together where they are encrypted. extra is in clear and
// authenticated. Nonces are random: after a rollback the same key is sealed again
// with other contents, so nothing may be derived from it.
func (s *sealer) seal(key, extra []byte, plain ...[]byte) []byte {
	n := 0
	for _, p := range plain {
		n += len(p)
	}
	head := sealHead(len(extra))
	out := make([]byte, head, head+n+chacha20poly1305.Overhead)
	for _, p := range plain {
		out = append(out, p...)
	}
	return s.sealIn(key, extra, out)
}

// sealHead is what stands before the ciphertext of a value.
func sealHead(extra int) int { return 1 + extra + nonceBytes }

// sealIn is seal for a plaintext that is where its ciphertext will be: in value, behind
// sealHead bytes that are not set yet. The plaintext is gone afterwards.
func (s *sealer) sealIn(key, extra, value []byte) []byte {
	head := sealHead(len(extra))
	value[0] = valueVersion
	copy(value[1:], extra)
	nonce := value[1+len(extra) : head]
	_, _ = rand.Read(nonce) // never fails since Go 1.24
	data := s.data.Get().(*[]byte)
	defer s.data.Put(data)
	*data = s.ad((*data)[:0], key, extra)
	// In place: exactly overlapping is allowed (crypto/cipher.AEAD).
	return s.aead.Seal(value[:head], nonce, value[head:], *data)
}

// open reverses seal for a value with extraLen bytes of extra. ok is false when the
// value is not what was sealed under this key.
func (s *sealer) open(key, value []byte, extraLen int) (plain, extra []byte, ok bool) {
	if len(value) < sealOverhead+extraLen || value[0] != valueVersion {
		return nil, nil, false
	}
	extra = value[1 : 1+extraLen]
	nonce := value[1+extraLen:][:nonceBytes]
	data := s.data.Get().(*[]byte)
	defer s.data.Put(data)
	*data = s.ad((*data)[:0], key, extra)
	plain, err := s.aead.Open(nil, nonce, value[1+extraLen+nonceBytes:], *data)
	return plain, extra, err == nil
}

// mac is the keyed hash of index keys: never a caller's name or token in clear. The
// parts are length-prefixed, so that no two lists of parts collide.
func (s *sealer) mac(purpose byte, parts ...string) (out digest) {
	m := s.index.Get().(*indexMAC)
	in := binary.BigEndian.AppendUint64(append(m.in[:0], purpose), uint64(len(parts)))
	for _, p := range parts {
		in = append(binary.BigEndian.AppendUint64(in, uint64(len(p))), p...)
	}
	m.h.Reset()
	m.h.Write(in)
	copy(out[:], m.h.Sum(in[:0]))
	if m.in = in[:0]; cap(in) <= maxKeptScratch {
		s.index.Put(m)
	}
	return out
}

// genesis is what the first event is chained to.
func (s *sealer) genesis() digest {
	return sha256.Sum256(append([]byte("waybill journal genesis v1\x00"), s.id[:]...))
}

// chain is the hash of a frame: over its key and its sealed value, which holds the
// hash of the frame before. It needs no key to be recomputed.
func chain(key, value []byte) digest {
	h := sha256.New()
	h.Write([]byte("waybill journal chain v1\x00"))
	h.Write(key)
	h.Write(value)
	var out digest
	h.Sum(out[:0])
	return out
}

// Families of keys: the first byte. FORMAT.md has the table.
const (
	famEvent    = 'e' // first seq(8)                          -> frame
	famRecord   = 'p' // action(16)                            -> projection
	famOpen     = 'o' // action(16)                            -> nothing
	famDoubt    = 'u' // action(16)                            -> nothing
	famTime     = 't' // first seq(8) action(16)               -> nothing
	famCaller   = 'c' // HMAC(caller)(16) first seq(8) action(16) -> nothing
	famRequest  = 'k' // HMAC(caller, request id)(32)          -> action(16)
	famGuard    = 'g' // HMAC(caller, fingerprint)(32) seq(8) action(16) -> nothing
	famRedirect = 'd' // HMAC(caller, redirect key)(32) seq(8) action(16) -> nothing
	famChunk    = 'r' // action(16) attempt(4) index(4)        -> chunk, or its place
	famPiece    = 'w' // group(8) number(4)                    -> large chunk
	famManifest = 'R' // action(16) attempt(4)                 -> manifest
	famExpiry   = 'x' // ms(8) action(16) attempt(4)           -> nothing
	famKey      = 'i' // HMAC(caller, scope and key)(32)       -> action(16)
	famKept     = 'q' // action(16) index(4)                   -> part of a sealed request
	famMeta     = 'm' // name
	famSession  = 's' // session id(8)                         -> session
)

// Purposes of mac.
const (
	macCaller  = 1
	macRequest = 2
	macGuard   = 3
	macGoto    = 4
	macKey     = 5
)

var (
	keyHead       = []byte("mhead")
	keyCheckpoint = []byte("mcheckpoint")
	keyStore      = []byte("mstore")
)

func keyEvent(seq uint64) []byte {
	return binary.BigEndian.AppendUint64(append(make([]byte, 0, 9), famEvent), seq)
}

func keyAction(family byte, id dispatch.ActionID) []byte {
	return append(append(make([]byte, 0, 17), family), id[:]...)
}

func keyTime(seq uint64, id dispatch.ActionID) []byte {
	b := binary.BigEndian.AppendUint64(append(make([]byte, 0, 25), famTime), seq)
	return append(b, id[:]...)
}

func prefixCaller(mac digest) []byte {
	return append(append(make([]byte, 0, 41), famCaller), mac[:16]...)
}

func keyCaller(mac digest, seq uint64, id dispatch.ActionID) []byte {
	return append(binary.BigEndian.AppendUint64(prefixCaller(mac), seq), id[:]...)
}

func keyRequest(mac digest) []byte { return append(append(make([]byte, 0, 33), famRequest), mac[:]...) }

// prefixLatest is of the indexes that find the latest action with some property.
func prefixLatest(family byte, mac digest) []byte {
	return append(append(make([]byte, 0, 57), family), mac[:]...)
}

func keyLatest(family byte, mac digest, seq uint64, id dispatch.ActionID) []byte {
	return append(binary.BigEndian.AppendUint64(prefixLatest(family, mac), seq), id[:]...)
}

func prefixChunks(id dispatch.ActionID, attempt int) []byte {
	return binary.BigEndian.AppendUint32(append(append(make([]byte, 0, 25), famChunk), id[:]...), uint32(attempt))
}

func keyChunk(id dispatch.ActionID, attempt, index int) []byte {
	return binary.BigEndian.AppendUint32(prefixChunks(id, attempt), uint32(index))
}

func keyManifest(id dispatch.ActionID, attempt int) []byte {
	return binary.BigEndian.AppendUint32(append(append(make([]byte, 0, 21), famManifest), id[:]...), uint32(attempt))
}

func keyExpiry(ms int64, id dispatch.ActionID, attempt int) []byte {
	b := binary.BigEndian.AppendUint64(append(make([]byte, 0, 29), famExpiry), uint64(ms))
	return binary.BigEndian.AppendUint32(append(b, id[:]...), uint32(attempt))
}

// trailingID returns the action at the end of an index key.
func trailingID(key []byte) (id dispatch.ActionID, ok bool) {
	if len(key) < len(id) {
		return id, false
	}
	copy(id[:], key[len(key)-len(id):])
	return id, true
}
