package audit

import (
	"encoding/json"
	"fmt"

	"waybill/dispatch"
)

// Opened is a record with what was sealed in it.
type Opened struct {
	*Record
	Action string                `json:"action,omitempty"` // of an event; "": of none
	Source string                `json:"source,omitempty"` // of an event: on whose word it rests
	Event  *dispatch.StoredEvent `json:"event,omitempty"`
}

// MarshalJSON writes one flat object.
func (o Opened) MarshalJSON() ([]byte, error) {
	type flat Record // without methods
	return json.Marshal(struct {
		*flat
		Action string                `json:"action,omitempty"`
		Source string                `json:"source,omitempty"`
		Event  *dispatch.StoredEvent `json:"event,omitempty"`
	}{(*flat)(o.Record), o.Action, o.Source, o.Event})
}

// Read verifies the log of a folder as Verify does and calls f with each record, its
// event opened with the private key. It stops at the first broken record: what f got
// before it was in order. ErrOpen when the key is another one's.
func Read(dir string, key *PrivateKey, opt VerifyOptions, f func(Opened) error) (Report, error) {
	o := opener{key: key}
	return verify(dir, opt, func(r *Record) error {
		out := Opened{Record: r}
		if r.Kind == KindEvent {
			s, err := o.open(r.raw, r.log)
			if err != nil {
				return fmt.Errorf("record %d: %w", r.Record, err)
			}
			out.Action, out.Event, out.Source = s.Action, &s.Event, string(s.Event.SourceOf())
		}
		return f(out)
	})
}
