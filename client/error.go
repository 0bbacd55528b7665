package client

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"waybill/outcome"
)

// Errors that errors.Is finds in an *Error, or that are returned as they are.
var (
	// ErrNotSent: no connection to the proxy that could carry the request came about.
	// Nothing left this process.
	ErrNotSent = errors.New("the request did not leave this process")
	// ErrLost: the connection to the proxy was lost after the request was handed to it.
	ErrLost = errors.New("the connection to the proxy was lost")
	// ErrNotFound: the proxy knows no such action of this caller. That is no permission
	// to repeat anything (CONTRACT M7).
	ErrNotFound = errors.New("no such action")
	// ErrUnanswered: the proxy could not be asked, or not in time.
	ErrUnanswered = errors.New("the proxy does not answer")
	// ErrSupersedes: a request carries Waybill-Supersedes itself. Repeating an action
	// whose outcome is unknown is visible in the code: UnsafeRepeat (CONTRACT O3).
	ErrSupersedes = errors.New("set Waybill-Supersedes with client.UnsafeRepeat(id, reason)")
	// ErrOption: an option of a call, or of the client, has a value that cannot be used.
	ErrOption = errors.New("option cannot be used")
)

// Source says where the envelope of an Error comes from. The zero value is invalid.
type Source uint8

// The sources.
const (
	SourceInvalid Source = iota
	// FromBody: the proxy's answer held the envelope; its fields agree with it.
	FromBody
	// FromFields: from the Waybill-* fields of an answer whose body has another form.
	// What the evidence does not show is not known.
	FromFields
	// FromRecord: the proxy was asked for the action (CONTRACT H3).
	FromRecord
	// FromClient: Waybill said nothing; the facts are what this side knows.
	FromClient
)

var sourceNames = [...]string{FromBody: "body", FromFields: "fields", FromRecord: "record", FromClient: "client"}

// String returns a word for logs.
func (s Source) String() string {
	if s > SourceInvalid && int(s) < len(sourceNames) {
		return sourceNames[s]
	}
	return fmt.Sprintf("invalid(%d)", s)
}

// Error is a failure with everything that is known of it (CONTRACT L6, O5). Decide by
// Facts, never by the text.
type Error struct {
	// Envelope is that of CONTRACT L1. Its InvocationID is empty where there is no
	// action or its id is not known; RequestID is what to ask for then.
	Envelope outcome.Envelope
	Source   Source

	// RequestID is the Waybill-Request-Id of the submission that failed; Client.Find
	// asks for it. "" for a failure of the caller API.
	RequestID string
	// Earlier are the request ids of the submissions before it, of the same call.
	Earlier []string
	// Last is the call's last submission where that one did nothing, or was refused, while
	// this one, before it, may have had an effect (CONTRACT A9, A10); else nil. Of a refusal
	// of the origin it has status, fields and body.
	Last *Error

	// Status, Header and Body are the answer's; 0 and nil where none came. Of a body
	// at most the first MiB is kept.
	Status int
	Header http.Header
	Body   []byte
	// RetryAfter is the time that the answer gave; 0: none.
	RetryAfter time.Duration

	// Err is what happened on this side: ErrNotSent, ErrLost or the context's error,
	// and its cause. nil for an answer.
	Err error
}

// Facts returns the facts of the envelope. They are never those of a success: an action
// of which only the answer was lost is a failed delivery here (CONTRACT H2).
func (e *Error) Facts() outcome.Facts { return e.Envelope.Facts() }

// Error names the code and repeats the envelope's message, whose first sentence is
// the instruction (CONTRACT L8).
func (e *Error) Error() string {
	s := "waybill: "
	if env := e.Envelope.Error; env != nil {
		s += env.Code.String() + ": " + env.Message
	} else {
		s += "no failure on record"
	}
	if e.RequestID != "" && e.Envelope.InvocationID == "" {
		s += " Request id " + e.RequestID + "."
	}
	if e.Err != nil {
		s += " (" + strings.ReplaceAll(e.Err.Error(), "\n", ": ") + ")"
	}
	return s
}

// Unwrap returns Err, and ErrNotFound for an action that the proxy does not know.
func (e *Error) Unwrap() error {
	if e.Err == nil && e.Facts().Code == outcome.CodeActionNotFound {
		return ErrNotFound
	}
	return e.Err
}

// Timeout reports false: libraries that repeat what "timed out" must not do so on
// their own account.
func (e *Error) Timeout() bool { return false }

// Temporary reports false, for the same reason.
func (e *Error) Temporary() bool { return false }

// clientError is a failure about which Waybill said nothing.
func clientError(requestID string, f outcome.Facts, reason, detail string, cause error) *Error {
	return &Error{
		Envelope: outcome.NewEnvelope("", f, detail, outcome.Evidence{Reason: reason, DispatchStarted: f.Outcome != outcome.NotAttempted}),
		Source:   FromClient, RequestID: requestID, Err: cause,
	}
}

// fetchable turns the envelope of an action whose complete answer did not arrive here
// into what that is: a failed delivery, to be fetched (CONTRACT H2). The proxy says so
// itself once it noticed; a process that was killed could not.
func fetchable(env outcome.Envelope) outcome.Envelope {
	f := env.Facts()
	if f.Outcome != outcome.Committed && f.Outcome != outcome.Rejected || !relayed(f) {
		return env
	}
	f = outcome.Facts{Phase: outcome.ResultDelivery, Outcome: f.Outcome, Retry: outcome.FetchResult, Code: outcome.CodeDeliveryFailed}
	return outcome.NewEnvelope(env.InvocationID, f, "", env.Evidence)
}

// relayed reports whether facts are those of an origin's complete answer.
func relayed(f outcome.Facts) bool {
	return outcome.Lookup(f.Code).Answering == outcome.AnswerRelayed
}
