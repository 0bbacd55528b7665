package audit

import (
	"crypto/ed25519"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"time"
)

// Checkpoint is a signed statement about the log: so many records, and this head. Who
// holds one can tell later whether the log still begins with these records.
type Checkpoint struct {
	Type      string    `json:"type"`
	Log       string    `json:"log"`     // id of the log
	Records   uint64    `json:"records"` // records of the log until then
	Head      digest    `json:"head"`    // hash of the last of them
	Seq       uint64    `json:"seq"`     // the journal's position
	At        time.Time `json:"at"`
	Signer    string    `json:"signer"` // Ed25519 public key, base64
	Signature string    `json:"signature"`
}

const checkpointType = "waybill-audit-checkpoint/1"

// ErrCheckpoint is wrapped by errors about a checkpoint that is not one.
var ErrCheckpoint = errors.New("audit: checkpoint")

func (c *Checkpoint) signed() []byte {
	return fmt.Appendf(nil, "%s\n%s\n%d\n%s\n%d\n%s\n", checkpointType, c.Log, c.Records, hex.EncodeToString(c.Head[:]), c.Seq, c.At.UTC().Format(time.RFC3339Nano))
}

func (c *Checkpoint) sign(key ed25519.PrivateKey) {
	c.Type = checkpointType
	c.Signer = base64.StdEncoding.EncodeToString(key.Public().(ed25519.PublicKey))
	c.Signature = base64.StdEncoding.EncodeToString(ed25519.Sign(key, c.signed()))
}

// Verify checks the signature with the key that the checkpoint names.
func (c *Checkpoint) Verify() error {
	key, err := base64.StdEncoding.DecodeString(c.Signer)
	sig, serr := base64.StdEncoding.DecodeString(c.Signature)
	if c.Type != checkpointType || err != nil || serr != nil || len(key) != ed25519.PublicKeySize || !ed25519.Verify(key, c.signed(), sig) {
		return fmt.Errorf("%w: the signature is wrong", ErrCheckpoint)
	}
	return nil
}

// ParseCheckpoints reads checkpoints, one JSON object after the other, as they are
// sent to a file. Each is verified.
func ParseCheckpoints(s string) ([]Checkpoint, error) {
	var out []Checkpoint
	dec := json.NewDecoder(strings.NewReader(s))
	for dec.More() {
		var c Checkpoint
		if err := dec.Decode(&c); err != nil {
			return out, fmt.Errorf("%w: %d whole ones, then no JSON", ErrCheckpoint, len(out))
		}
		if err := c.Verify(); err != nil {
			return out, err
		}
		out = append(out, c)
	}
	if len(out) == 0 {
		return nil, fmt.Errorf("%w: there is none", ErrCheckpoint)
	}
	return out, nil
}
