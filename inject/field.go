package inject

import (
	"bytes"
	"encoding/json"

	"waybill/outcome"
)

// Field takes one member out of a JSON object, as text; name "": the whole. A text that
// is no object is CREDENTIAL_INVALID, a member that is not there CREDENTIAL_MISSING.
func Field(text []byte, name string) ([]byte, error) {
	if name == "" {
		return bytes.Clone(text), nil
	}
	var m map[string]json.RawMessage
	if json.Unmarshal(text, &m) != nil {
		return nil, NewError(outcome.CodeCredentialInvalid, ReasonMalformed, nil)
	}
	raw, ok := m[name]
	if !ok {
		return nil, NewError(outcome.CodeCredentialMissing, ReasonNoField, nil)
	}
	var s string
	if json.Unmarshal(raw, &s) == nil {
		return []byte(s), nil
	}
	if bytes.Equal(raw, []byte("null")) {
		return nil, NewError(outcome.CodeCredentialMissing, ReasonNoField, nil)
	}
	return bytes.Clone(raw), nil
}
