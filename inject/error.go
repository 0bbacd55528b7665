package inject

import (
	"strconv"

	"waybill/outcome"
)

// The reasons of an Error: fixed tokens, safe to record and to show.
const (
	ReasonUnknown       = "unknown_credential" // no credential of that id
	ReasonNotSet        = "not_set"            // the environment variable, or the file, is not there
	ReasonUnreadable    = "unreadable"
	ReasonNotAFile      = "not_a_file" // a folder, device, pipe or socket
	ReasonChanging      = "changing"   // rewritten while it was read, again and again
	ReasonEmpty         = "empty"
	ReasonTooLarge      = "too_large"
	ReasonByteOrderMark = "byte_order_mark"
	ReasonControlByte   = "control_byte"
	ReasonNonASCII      = "non_ascii"
	ReasonOuterSpace    = "outer_space"
	ReasonLabel         = "label_holds_secret"
	ReasonTimeout       = "source_timeout"
	ReasonSource        = "source_failed"
	ReasonTemplate      = "bad_template"
	ReasonNoPlaceholder = "no_placeholder" // a template without ${secret} or ${basic:…}
	ReasonPlaceholder   = "unknown_placeholder"
	ReasonHeader        = "bad_header"       // no field name
	ReasonHeaderKept    = "header_forbidden" // a field that belongs to the connection or to Waybill
	ReasonLocked        = "vault_locked"
	ReasonDenied        = "denied" // the store said no
	ReasonUnreachable   = "unreachable"
	ReasonMalformed     = "malformed" // what the store, or the secret, says cannot be read
	ReasonExpired       = "expired"
	ReasonCommand       = "command_failed"
	ReasonNoField       = "no_such_field" // of a secret with several
	ReasonNotStored     = "rotation_not_stored"
	ReasonMode          = "unsupported_mode"
	ReasonBody          = "body_not_json" // a secret cannot be put into this body
	ReasonSigning       = "cannot_be_signed"
)

// Error says why a secret could not be obtained or attached: always
// credential_injection / not_attempted (CONTRACT C1). It holds neither the secret
// nor any byte of it (C2), and for an unknown reference not the reference (B3).
type Error struct {
	Code outcome.Code
	// Reason is one of the Reason constants.
	Reason string
	// ID is the credential; "" where there is none, or none of that name (B3).
	ID string
	// Kind is the kind of its source ("env", "file"), or "".
	Kind string
	// Position is the place of the byte that was refused, from 1; 0: no single one.
	Position int

	cause error // operating system's or source's; not shown
}

// Facts returns the row of Code in CONTRACT section U.
func (e *Error) Facts() outcome.Facts {
	if f, ok := outcome.Of(e.Code); ok && f.Phase == outcome.CredentialInjection {
		return f
	}
	f, _ := outcome.Of(outcome.CodeCredentialInvalid)
	return f
}

// Error is the text for the operator's log: code, credential, reason, position.
func (e *Error) Error() string {
	s := "inject: "
	if e.ID != "" {
		s += "credential " + strconv.Quote(e.ID)
		if e.Kind != "" {
			s += " (" + e.Kind + ")"
		}
		s += ": "
	}
	s += e.Code.String() + ": " + e.Reason
	if e.Position > 0 {
		s += " at byte " + strconv.Itoa(e.Position)
	}
	return s
}

// Unwrap returns the cause for errors.Is: fs.ErrNotExist, context errors. Its text
// may name a path and is not for callers.
func (e *Error) Unwrap() error { return e.cause }

// NewError returns an Error with a cause that errors.Is finds and nobody is shown. Code
// is one of the credential_injection codes.
func NewError(code outcome.Code, reason string, cause error) *Error {
	return &Error{Code: code, Reason: reason, cause: cause}
}

func invalid(reason string, position int) *Error {
	return &Error{Code: outcome.CodeCredentialInvalid, Reason: reason, Position: position}
}
