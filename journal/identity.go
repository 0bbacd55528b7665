package journal

import "encoding/hex"

// ID names this journal among others: evidence that it gives away carries it (CONTRACT
// K4). It is no secret.
func (j *Journal) ID() string { return "journal:" + hex.EncodeToString(j.seal.id[:]) }
