package journal

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"os"
	"strings"
	"time"
	"unicode"
	"unicode/utf8"
)

// Acknowledgement is an operator's word that a quarantined journal may go on
// (CONTRACT M5): with what is on record, and with what its witness names as unknown.
// It is recorded in the BOOT event of the start that leaves the quarantine.
type Acknowledgement struct {
	// Reason is the operator's, up to 500 bytes of printable text.
	Reason string    `json:"reason"`
	At     time.Time `json:"at"`
	// Seq and WitnessSeq are what was compared: the store's last event, and the
	// witness's. Journal fills them in.
	Seq        uint64 `json:"seq"`
	WitnessSeq uint64 `json:"witness_seq"`
	// Quarantine is Recovery.Reason. Journal fills it in.
	Quarantine string `json:"quarantine"`
}

var (
	// ErrNotQuarantined: there is nothing to acknowledge.
	ErrNotQuarantined = errors.New("journal: not in quarantine")
	// ErrReason: an acknowledgement needs a reason of 1 to 500 bytes of printable text.
	ErrReason = errors.New("journal: give a reason, up to 500 bytes of printable text")
)

const (
	nameAcknowledge = "acknowledge"
	nameRestored    = "restored"
	maxReason       = 500
)

// keyAcknowledge stands in the additional data of the acknowledgement's file.
var keyAcknowledge = []byte("macknowledge")

func checkReason(s string) error {
	if strings.TrimSpace(s) == "" || len(s) > maxReason || !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return !unicode.IsPrint(r) }) {
		return ErrReason
	}
	return nil
}

// Acknowledge writes down, durably, that the next start of this quarantined journal
// may leave the quarantine. It is bound to what was compared: a journal that is
// somewhere else by then stays in quarantine.
func (j *Journal) Acknowledge(reason string) error {
	if err := checkReason(reason); err != nil {
		return err
	}
	if !j.recovery.Quarantined {
		return ErrNotQuarantined
	}
	a := Acknowledgement{Reason: reason, At: j.opt.Now().UTC()}
	j.fillIn(&a)
	if err := j.keep(&a); err != nil {
		return err
	}
	j.log.Warn("journal: quarantine acknowledged; the next start leaves it", slog.String("reason", reason))
	return nil
}

// keep writes the acknowledgement down before anything follows from it, so that no
// crash loses the reason.
func (j *Journal) keep(a *Acknowledgement) error {
	b, err := json.Marshal(a)
	if err == nil {
		err = j.folder.put(nameAcknowledge, j.seal.seal(keyAcknowledge, nil, b))
	}
	if err != nil {
		return fmt.Errorf("journal: acknowledgement: %w", err)
	}
	return nil
}

func (j *Journal) fillIn(a *Acknowledgement) {
	a.Seq, a.WitnessSeq, a.Quarantine = j.recovery.Seq, j.recovery.WitnessSeq, j.recovery.Reason
}

// pending returns the acknowledgement that waits for this start, or nil.
func (j *Journal) pending() (*Acknowledgement, error) {
	if a := j.opt.Acknowledge; a != nil {
		if err := checkReason(a.Reason); err != nil {
			return nil, err
		}
		out := *a
		if out.At.IsZero() {
			out.At = j.opt.Now().UTC()
		}
		j.fillIn(&out)
		return &out, j.keep(&out)
	}
	a, err := j.onFile()
	if a == nil || err != nil {
		return nil, err
	}
	var now Acknowledgement
	j.fillIn(&now)
	if a.Seq != now.Seq || a.WitnessSeq != now.WitnessSeq {
		j.log.Error("journal: the acknowledgement is about another state; it is not used")
		return nil, nil
	}
	return a, nil
}

// onFile reads what keep wrote; nil: nothing.
func (j *Journal) onFile() (*Acknowledgement, error) {
	b, err := os.ReadFile(j.folder.path(nameAcknowledge))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, fmt.Errorf("journal: acknowledgement: %w", err)
	}
	var a Acknowledgement
	plain, _, ok := j.seal.open(keyAcknowledge, b, 0)
	if !ok || json.Unmarshal(plain, &a) != nil {
		return nil, &CorruptError{What: "the acknowledgement does not open"}
	}
	return &a, nil
}

// leaveQuarantine turns a quarantine that was acknowledged into a loss that was
// found: the store's end is the journal's, the groups that only the witness has are
// lost, and the actions that they name are unknown. The new segment's header says so
// before anything else does; a crash afterwards costs nothing.
func (j *Journal) leaveQuarantine(w *witnessState, at *position) (*Acknowledgement, error) {
	if j.opt.ReadOnly {
		return nil, nil
	}
	if !j.recovery.Quarantined {
		// A start that left the quarantine, and ended before its BOOT event was durable:
		// the reason is still to be recorded.
		a, err := j.onFile()
		if a == nil || err != nil || a.Seq != j.recovery.Seq {
			return nil, err
		}
		return a, nil
	}
	a, err := j.pending()
	if a == nil || err != nil {
		return nil, err
	}
	seen, _ := w.last()
	switch {
	case seen.group > at.storeGroup:
		at.lostFirst, at.lostGroup = at.storeGroup+1, seen.group
		at.lost = append(at.lost, w.namedAfter(at.storeGroup, seen.group)...)
		at.head.group = seen.group
	case seen.seq > at.head.seq:
		return nil, &CorruptError{What: "store and witness count their groups differently; this cannot be acknowledged", Seq: at.head.seq + 1}
	}
	at.named = nil
	j.recovery.Quarantined = false
	j.recovery.Acknowledged = a
	if !at.fresh {
		if err := j.checkIDs(); err != nil {
			return nil, err
		}
	}
	j.log.Warn("journal: leaving quarantine", slog.String("reason", a.Reason), slog.Uint64("seq", a.Seq), slog.Uint64("witness_seq", a.WitnessSeq))
	return a, nil
}

// acknowledged removes what this start has used up.
func (j *Journal) acknowledged(*Acknowledgement) error {
	return errors.Join(j.folder.drop(nameAcknowledge), j.folder.drop(nameRestored))
}

// into adds the acknowledgement to the JSON of a BOOT event. Readers that do not know
// the field ignore it.
func (a *Acknowledgement) into(text []byte) []byte {
	if a == nil {
		return text
	}
	b, err := json.Marshal(a)
	if err != nil || len(text) < 3 || text[0] != '[' || text[1] != '{' {
		panic("journal: own event is not JSON")
	}
	out := append([]byte(`[{"acknowledged":`), b...)
	out = append(out, ',')
	return append(out, text[2:]...)
}

// acknowledgementIn reads it back from a frame's plaintext; nil: there is none.
func acknowledgementIn(plain []byte) *Acknowledgement {
	var events []struct {
		Acknowledged *Acknowledgement `json:"acknowledged"`
	}
	text, err := eventsOfFrame(plain)
	if err != nil || json.Unmarshal(text, &events) != nil || len(events) == 0 {
		return nil
	}
	return events[0].Acknowledged
}
