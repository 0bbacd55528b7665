package outcome

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// MaxDetailBytes is the most that NewEnvelope takes of a detail text.
const MaxDetailBytes = 600

// details are the default sentences behind the instruction, for a caller of
// NewEnvelope that has nothing more precise to say. Each says what happened, and
// for what a person can correct, what to do.
var details = [...]string{
	CodeNone: "",

	CodeInvalidTarget:         "The target of the request is not valid, or the names it gives for its destination do not agree.",
	CodeInvalidRequest:        "The request is malformed.",
	CodeUnsupportedAction:     "This method or action is not supported here.",
	CodePayloadLimit:          "The request is larger than its route allows.",
	CodeHeaderForbidden:       "The request sets a header field that callers may not set on this route.",
	CodeRouteNotFound:         "No route matches this request.",
	CodePolicyDenied:          "A rule of this proxy denies the request.",
	CodeCallerUnauthenticated: "This proxy asks callers to authenticate, and no valid credentials for the proxy were given.",
	CodeRateLimited:           "The caller's rate limit at this proxy is reached.",
	CodeDraining:              "The proxy is shutting down and takes no new requests.",
	CodeJournalUnavailable:    "The journal cannot take a record at present, and nothing is sent without one.",
	CodeJournalIndeterminate:  "The journal could not confirm the record of the dispatch, so that it may say after a restart that the request was sent.",
	CodeSnapshotMismatch:      "The request or its configuration changed between the check and the dispatch.",
	CodeIdempotencyMismatch:   "The idempotency key was used before with a different request.",
	CodeIdempotencyExpired:    "The time for which the remote side keeps the idempotency key is over.",
	CodeInvocationInProgress:  "The first submission with this key still runs.",
	CodeInvocationExists:      "An action with this token exists already.",
	CodeDuplicateSuspected:    "An equal request was sent before and its outcome is not resolved; to send this one all the same, name that action in Waybill-Supersedes.",
	CodeRedirectCrossOrigin:   "The request follows a redirect from another origin, and its route does not allow that origin.",
	CodeLoopDetected:          "The request came back to this proxy.",
	CodeLeaseLost:             "Another attempt of the same action took over.",

	CodeVaultLocked:           "The vault is locked; a person has to unlock it.",
	CodeApprovalPending:       "The request waits for a person's approval.",
	CodeApprovalDenied:        "A person denied the approval.",
	CodeApprovalExpired:       "The approval expired before it was used.",
	CodeCredentialMissing:     "The credential that this route needs is missing.",
	CodeCredentialInvalid:     "The credential that this route needs is there, but cannot be used.",
	CodeCredentialRefused:     "The token endpoint refused the credential.",
	CodeCredentialUnavailable: "The store that holds the credential cannot be reached.",
	CodeInjectionUnsupported:  "The credential cannot be attached in the way the route asks for.",

	CodeDNSTimeout:            "The name of the destination could not be resolved in time.",
	CodeDNSError:              "The name of the destination could not be resolved.",
	CodeDNSNoSuchName:         "The name of the destination does not exist.",
	CodeDestinationProhibited: "The destination's address is in a range that this proxy does not connect to.",
	CodeDestinationUnroutable: "There is no network route to the destination.",
	CodeConnectionRefused:     "The destination refused the connection.",
	CodeConnectionTimeout:     "The connection to the destination could not be made in time.",
	CodeConnectionLost:        "The connection to the destination was lost while it was being set up.",
	CodeConnectionLimit:       "The limit of connections to the destination is reached.",
	CodeTLSHandshakeFailed:    "The TLS handshake with the destination failed.",
	CodeTLSCertificateInvalid: "The destination's certificate is not valid for it.",
	CodeProxyTunnelFailed:     "The upstream proxy did not open a tunnel to the destination.",
	CodeSSHHandshakeFailed:    "The SSH handshake with the destination failed.",
	CodeSSHHostKeyRejected:    "The destination's SSH host key is not the expected one.",
	CodeSSHAuthFailed:         "The destination refused the SSH credentials.",
	CodeSSHChannelRefused:     "The destination refused to open an SSH session.",

	CodeRemoteOutcomeUnknown:      "The request was handed over, and the connection ended before a complete response was recorded.",
	CodeRemoteTimeout:             "The request was handed over, and no complete response came in time.",
	CodeRemoteResultIncomplete:    "The request was handed over, and its response broke off.",
	CodeRemoteProtocolError:       "The request was handed over, and the response is not valid.",
	CodeResultLimit:               "The response is larger than its route allows.",
	CodeCallerCancelled:           "The caller left before the response was there.",
	CodeRemoteGateway:             "An intermediary answered that it got no response from the origin.",
	CodeRemoteRefused:             "The remote side refused the request with a proof that it was not processed.",
	CodeRemoteInProgress:          "The remote side still works on an earlier request with the same idempotency key.",
	CodeClientCertificateRequired: "The remote side asks for a client certificate.",
	CodeExecRefused:               "The remote side refused to start the command.",
	CodeRemoteRejected:            "The remote side gave a complete refusal.",
	CodeRemoteError:               "The remote side gave a complete answer that reports an error, which does not say that nothing was done.",

	CodeDeliveryFailed:       "The result is on record, and handing it over failed.",
	CodeResultStoreFailed:    "The response came, and the result could not be stored durably.",
	CodeResultContainsSecret: "The result contains the injected secret and is withheld.",
	CodeResultNotRetained:    "The result was not kept.",
	CodeResultExpired:        "The result was kept until its retention time ended.",
	CodeResultPending:        "There is no complete result yet.",
	CodeActionNotFound:       "No action of this caller has this id.",
	CodeRetryRefused:         "The recorded advice or the fingerprint does not allow to repeat this action.",
	CodeLeaseHeld:            "Another attempt of this action is active.",
	CodeInternal:             "An internal error stopped the action.",
}

// Instruction returns the first sentence of every message (CONTRACT L8): what to
// do now. It depends on the facts alone; about is the id of the action that it
// speaks of, "" for none. It holds no full stop but its last character.
func Instruction(f Facts, about string) string {
	if f.Code == CodeActionNotFound {
		// M7: missing evidence is no permission.
		return "Action not found: check the id and do not repeat for this reason."
	}
	return state(f) + ": " + advice(f, about) + "."
}

func state(f Facts) string {
	switch f.Outcome {
	case NotAttempted:
		switch {
		case f.Code == CodeInvocationExists || f.Code == CodeInvocationInProgress || f.Code == CodeDuplicateSuspected:
			return "Not sent again"
		case f.Retry == FetchResult:
			return "Not sent yet"
		default:
			return "Not sent"
		}
	case Unknown:
		if f.Retry == FetchResult {
			return "Still running"
		}
		return "Outcome unknown"
	case Rejected:
		return "Refused by the remote side"
	case Committed:
		return "Answered by the remote side"
	case OutcomeInvalid:
		return "Outcome unknown"
	default:
		return "Outcome unknown"
	}
}

func advice(f Facts, about string) string {
	switch f.Retry {
	case Never:
		return "do not repeat"
	case AfterCorrection:
		switch f.Phase {
		case CredentialInjection:
			return "have the credential set right, then send it again"
		case ConnectionSetup:
			return "have the destination or its set-up corrected, then send it again"
		case Validation, RemoteExecution, ResultDelivery, PhaseInvalid:
			return "correct the request, then send it again"
		default:
			return "correct the request, then send it again"
		}
	case Backoff:
		if f.Outcome == Unknown {
			return "this operation is safe to repeat; wait, then repeat"
		}
		return "wait, then send it again"
	case SameIdempotencyKey:
		return "repeat only with the same idempotency key"
	case FetchResult:
		if about == "" {
			return "do not repeat; fetch the result"
		}
		return "do not repeat; fetch the result of " + about
	case Reconcile, RetryInvalid:
	default:
	}
	if about == "" {
		return "do not repeat; reconcile first"
	}
	return "do not repeat; reconcile " + about
}

// Message returns the text for people (CONTRACT L2, L8): the instruction, then
// the detail, by default the code's own sentence. The detail is cut to
// MaxDetailBytes and its control characters become spaces. Nothing parses it.
func Message(id string, f Facts, detail string, ev Evidence) string {
	about := id
	// A submission that collided with an earlier action speaks of that one.
	if ev.EarlierAction != "" && f.Phase == Validation {
		about = ev.EarlierAction
	}
	detail = tidy(detail)
	if detail == "" {
		detail = defaultDetail(f, ev)
	}
	if detail == "" {
		return Instruction(f, about)
	}
	return Instruction(f, about) + " " + detail
}

func defaultDetail(f Facts, ev Evidence) string {
	if int(f.Code) >= len(details) {
		return details[CodeInternal]
	}
	text := details[f.Code]
	switch {
	case f.Code == CodeRemoteResultIncomplete && ev.ReceivedStatus >= 200 && ev.ReceivedStatus < 300:
		// The remote side has then very probably done the work: what is to be found
		// out is the result, not the fact.
		text = fmt.Sprintf("The response head came with status %d and the body broke off: the work was very probably done, and its result is what is missing.", ev.ReceivedStatus)
	case f.Phase == Validation && ev.Field != "":
		text += " What to correct: " + tidy(ev.Field) // B2
	case f.Phase == ConnectionSetup && f.Outcome == NotAttempted && len(ev.Attempts) > 1:
		text += fmt.Sprintf(" %d tries were made, and none was dispatched.", len(ev.Attempts)) // E8
	case f.Code == CodeCallerCancelled && f.Outcome == NotAttempted:
		text = "The caller left before anything was sent."
	}
	return text
}

// tidy makes one short line of a text and ends it with a full stop.
func tidy(s string) string {
	s = strings.ToValidUTF8(s, "\uFFFD")
	s = strings.Map(func(r rune) rune {
		if unicode.IsControl(r) || r == '\u2028' || r == '\u2029' {
			return ' '
		}
		return r
	}, s)
	s = strings.TrimSpace(s)
	if s == "" {
		return ""
	}
	if len(s) > MaxDetailBytes {
		cut := MaxDetailBytes
		for !utf8.RuneStart(s[cut]) {
			cut--
		}
		s = strings.TrimSpace(s[:cut]) + "…"
	}
	if last, _ := utf8.DecodeLastRuneInString(s); !strings.ContainsRune(".!?…", last) {
		s += "."
	}
	return s
}

// NewEnvelope makes the envelope of an action or refusal (CONTRACT L1). The id is
// empty where no action exists (M6, M7). The detail is what follows the
// instruction; "" takes the code's own sentence. It is for people: no secret, no
// query or header value, no text of a Go error (L2, L4).
//
// Success facts give an envelope without error. Facts without a code that are no
// success are those of an action that still runs: RESULT_PENDING (H10). Facts
// outside the closed enumerations become INTERNAL with an unknown outcome: what is
// not understood is never called not attempted.
func NewEnvelope(id string, f Facts, detail string, ev Evidence) Envelope {
	f = sound(f)
	if f.IsSuccess() {
		return Envelope{InvocationID: id, Evidence: ev}
	}
	msg := Message(id, f, detail, ev)
	return Envelope{
		InvocationID: id,
		Error:        &Error{Code: f.Code, Phase: f.Phase, Outcome: f.Outcome, Retry: f.Retry, Message: msg},
		Message:      msg,
		Evidence:     ev,
	}
}

// sound returns facts that can be shown: f itself wherever possible.
func sound(f Facts) Facts {
	if int(f.Code) < len(rules) && f.Code != CodeNone && rules[f.Code].factless() {
		return Facts{Code: f.Code}
	}
	if f.known() != nil {
		return Facts{RemoteExecution, Unknown, Reconcile, CodeInternal}
	}
	if f.Code == CodeNone && !f.IsSuccess() {
		f.Retry, f.Code = FetchResult, CodeResultPending
	}
	return f
}
