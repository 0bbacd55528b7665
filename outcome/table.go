package outcome

import (
	"errors"
	"fmt"
	"net/http"
	"slices"
)

// ErrFacts is wrapped by the errors of Facts.Validate: the facts do not go with
// the code (CONTRACT section U).
var ErrFacts = errors.New("facts do not go with the code")

// Answering says how the HTTP status of a code is found (the HTTP column of
// CONTRACT section U). The zero value is invalid.
type Answering uint8

// The ways to find a status.
const (
	AnsweringInvalid Answering = iota
	AnswerFixed                // Rule.Status
	AnswerByAdvice             // from the retry advice (L7)
	AnswerRelayed              // the origin's own answer is relayed (G12)
	AnswerNone                 // nobody is there to answer, or the code stands in records only
)

// combination is a set of facts: every phase with every outcome with every retry.
type combination struct {
	phases   []Phase
	outcomes []Outcome
	retries  []Retry
}

// Rule is one row of CONTRACT section U.
type Rule struct {
	Code      Code
	Answering Answering
	// Status is the HTTP status for AnswerFixed, else 0.
	Status int
	// TunnelStatus replaces Status inside an intercepted tunnel; 0: the same.
	TunnelStatus int
	// RetryAfter says that the answer carries Retry-After whatever the advice is
	// ("RA" in the table).
	RetryAfter bool
	// ProxyError is the usual RFC 9209 §2.3 error type; "" for none.
	ProxyError string
	// AlertError is the error type in place of ProxyError when a TLS alert was
	// received; "" where the row has no such alternative.
	AlertError string

	combinations []combination
	// ofAction: the row speaks of an action and shows that action's facts, whatever
	// they are; pending: with FetchResult in place of the advice.
	ofAction, pending bool
}

// Facts returns every valid combination of facts with the row's code, without
// duplicates; only the code for ACTION_NOT_FOUND, which has no facts (CONTRACT M7).
func (r Rule) Facts() []Facts {
	if r.factless() {
		return []Facts{{Code: r.Code}}
	}
	var out []Facts
	add := func(f Facts) {
		f.Code = r.Code
		if r.pending {
			f.Retry = FetchResult
		}
		if !slices.Contains(out, f) {
			out = append(out, f)
		}
	}
	for _, c := range r.combinations {
		c.each(add)
	}
	if r.ofAction {
		for i := range rules {
			if Code(i) == CodeLeaseLost {
				continue // of an attempt, not of an action (A9)
			}
			for _, c := range rules[i].combinations {
				c.each(add)
			}
		}
	}
	return out
}

func (c combination) each(add func(Facts)) {
	for _, p := range c.phases {
		for _, o := range c.outcomes {
			for _, a := range c.retries {
				add(Facts{Phase: p, Outcome: o, Retry: a})
			}
		}
	}
}

func (r Rule) factless() bool { return len(r.combinations) == 0 && !r.ofAction }

// allows reports whether the row allows the facts.
func (r Rule) allows(f Facts) bool { return slices.Contains(r.Facts(), f) }

// Sets that several rows name in words.
var (
	// "where it stopped", before the boundary.
	beforeDispatch = []Phase{Validation, CredentialInjection, ConnectionSetup}
	// "by contract" (I6).
	byContract = []Retry{Backoff, SameIdempotencyKey, Reconcile}
	// "kept": every outcome that can have a complete answer on record. Unknown is
	// one of them: a complete 502 resolves nothing (G10).
	kept = []Outcome{Rejected, Committed, Unknown}
)

func one(p Phase, o Outcome, r Retry) []combination {
	return []combination{{[]Phase{p}, []Outcome{o}, []Retry{r}}}
}

// fixed is a row whose facts and status are fixed and that nothing asks to wait for.
func fixed(p Phase, o Outcome, r Retry, status int, proxyError string) Rule {
	return Rule{Answering: AnswerFixed, Status: status, ProxyError: proxyError, combinations: one(p, o, r)}
}

// waits is fixed with Retry-After.
func waits(p Phase, o Outcome, r Retry, status int, proxyError string) Rule {
	rule := fixed(p, o, r, status, proxyError)
	rule.RetryAfter = true
	return rule
}

// unresolved is a row of an attempt that crossed the boundary and has no complete answer.
func unresolved(how Answering, proxyError string) Rule {
	return Rule{Answering: how, ProxyError: proxyError, combinations: []combination{{[]Phase{RemoteExecution}, []Outcome{Unknown}, byContract}}}
}

// rules is CONTRACT section U as data. The row of CodeNone is what has no code: a
// success, or an action that still runs.
var rules = [...]Rule{
	CodeNone: {Answering: AnswerRelayed, combinations: append(one(RemoteExecution, Committed, Never), []combination{
		{beforeDispatch, []Outcome{NotAttempted}, []Retry{FetchResult}},
		{[]Phase{RemoteExecution}, []Outcome{Unknown}, []Retry{FetchResult}},
	}...)},

	CodeInvalidTarget:     fixed(Validation, NotAttempted, AfterCorrection, http.StatusBadRequest, "http_request_error"),
	CodeInvalidRequest:    fixed(Validation, NotAttempted, AfterCorrection, http.StatusBadRequest, "http_request_error"),
	CodeUnsupportedAction: fixed(Validation, NotAttempted, AfterCorrection, http.StatusUnprocessableEntity, "http_request_error"),
	CodePayloadLimit:      fixed(Validation, NotAttempted, AfterCorrection, http.StatusRequestEntityTooLarge, "http_request_error"),
	CodeHeaderForbidden:   fixed(Validation, NotAttempted, AfterCorrection, http.StatusBadRequest, "http_request_error"),
	CodeRouteNotFound:     fixed(Validation, NotAttempted, AfterCorrection, http.StatusForbidden, "http_request_denied"),
	CodePolicyDenied:      fixed(Validation, NotAttempted, Never, http.StatusForbidden, "http_request_denied"),
	CodeCallerUnauthenticated: {
		Answering: AnswerFixed, Status: http.StatusProxyAuthRequired, TunnelStatus: http.StatusForbidden, ProxyError: "http_request_denied",
		combinations: one(Validation, NotAttempted, AfterCorrection),
	},
	CodeRateLimited: waits(Validation, NotAttempted, Backoff, http.StatusTooManyRequests, "connection_limit_reached"),
	CodeDraining:    waits(Validation, NotAttempted, Backoff, http.StatusServiceUnavailable, "proxy_internal_error"),
	CodeJournalUnavailable: {
		Answering: AnswerFixed, Status: http.StatusServiceUnavailable, RetryAfter: true, ProxyError: "proxy_internal_error",
		combinations: []combination{{beforeDispatch, []Outcome{NotAttempted}, []Retry{Backoff}}},
	},
	CodeJournalIndeterminate: fixed(ConnectionSetup, Unknown, Reconcile, http.StatusFailedDependency, "proxy_internal_error"),
	CodeSnapshotMismatch:     fixed(Validation, NotAttempted, AfterCorrection, http.StatusUnprocessableEntity, "proxy_configuration_error"),
	CodeIdempotencyMismatch:  fixed(Validation, NotAttempted, AfterCorrection, http.StatusUnprocessableEntity, "http_request_error"),
	CodeIdempotencyExpired:   fixed(Validation, NotAttempted, Reconcile, http.StatusFailedDependency, "http_request_error"),
	CodeInvocationInProgress: waits(Validation, NotAttempted, Backoff, http.StatusConflict, "http_request_error"),
	CodeInvocationExists:     fixed(Validation, NotAttempted, FetchResult, http.StatusUnprocessableEntity, "http_request_error"),
	CodeDuplicateSuspected:   fixed(Validation, NotAttempted, Reconcile, http.StatusFailedDependency, "http_request_denied"),
	CodeRedirectCrossOrigin:  fixed(Validation, NotAttempted, AfterCorrection, http.StatusForbidden, "http_request_denied"),
	CodeLoopDetected:         fixed(Validation, NotAttempted, Never, http.StatusLoopDetected, "proxy_loop_detected"),
	// Of an attempt (A9); the advice is the action's.
	CodeLeaseLost: {Answering: AnswerNone, combinations: []combination{
		{beforeDispatch, []Outcome{NotAttempted}, Retries()},
		{[]Phase{RemoteExecution}, []Outcome{Unknown}, Retries()},
	}},

	CodeVaultLocked:           fixed(CredentialInjection, NotAttempted, AfterCorrection, http.StatusForbidden, "proxy_configuration_error"),
	CodeApprovalPending:       fixed(CredentialInjection, NotAttempted, FetchResult, http.StatusForbidden, "http_request_denied"),
	CodeApprovalDenied:        fixed(CredentialInjection, NotAttempted, Never, http.StatusForbidden, "http_request_denied"),
	CodeApprovalExpired:       fixed(CredentialInjection, NotAttempted, AfterCorrection, http.StatusForbidden, "http_request_denied"),
	CodeCredentialMissing:     fixed(CredentialInjection, NotAttempted, AfterCorrection, http.StatusForbidden, "proxy_configuration_error"),
	CodeCredentialInvalid:     fixed(CredentialInjection, NotAttempted, AfterCorrection, http.StatusForbidden, "proxy_configuration_error"),
	CodeCredentialRefused:     fixed(CredentialInjection, NotAttempted, AfterCorrection, http.StatusForbidden, "proxy_configuration_error"),
	CodeCredentialUnavailable: waits(CredentialInjection, NotAttempted, Backoff, http.StatusServiceUnavailable, "proxy_internal_error"),
	CodeInjectionUnsupported:  fixed(CredentialInjection, NotAttempted, AfterCorrection, http.StatusForbidden, "proxy_configuration_error"),

	CodeDNSTimeout:            waits(ConnectionSetup, NotAttempted, Backoff, http.StatusGatewayTimeout, "dns_timeout"),
	CodeDNSError:              waits(ConnectionSetup, NotAttempted, Backoff, http.StatusBadGateway, "dns_error"),
	CodeDNSNoSuchName:         fixed(ConnectionSetup, NotAttempted, AfterCorrection, http.StatusUnprocessableEntity, "dns_error"),
	CodeDestinationProhibited: fixed(ConnectionSetup, NotAttempted, Never, http.StatusForbidden, "destination_ip_prohibited"),
	CodeDestinationUnroutable: waits(ConnectionSetup, NotAttempted, Backoff, http.StatusBadGateway, "destination_ip_unroutable"),
	CodeConnectionRefused:     waits(ConnectionSetup, NotAttempted, Backoff, http.StatusBadGateway, "connection_refused"),
	CodeConnectionTimeout:     waits(ConnectionSetup, NotAttempted, Backoff, http.StatusGatewayTimeout, "connection_timeout"),
	CodeConnectionLost:        waits(ConnectionSetup, NotAttempted, Backoff, http.StatusBadGateway, "connection_terminated"),
	CodeConnectionLimit:       waits(ConnectionSetup, NotAttempted, Backoff, http.StatusTooManyRequests, "connection_limit_reached"),
	CodeTLSHandshakeFailed: {
		Answering: AnswerFixed, Status: http.StatusBadGateway, RetryAfter: true, ProxyError: "tls_protocol_error", AlertError: "tls_alert_received",
		combinations: one(ConnectionSetup, NotAttempted, Backoff),
	},
	CodeTLSCertificateInvalid: fixed(ConnectionSetup, NotAttempted, AfterCorrection, http.StatusUnprocessableEntity, "tls_certificate_error"),
	CodeProxyTunnelFailed:     waits(ConnectionSetup, NotAttempted, Backoff, http.StatusBadGateway, "http_protocol_error"),
	CodeSSHHandshakeFailed:    waits(ConnectionSetup, NotAttempted, Backoff, http.StatusBadGateway, "connection_terminated"),
	CodeSSHHostKeyRejected:    fixed(ConnectionSetup, NotAttempted, AfterCorrection, http.StatusUnprocessableEntity, "tls_certificate_error"),
	CodeSSHAuthFailed:         fixed(ConnectionSetup, NotAttempted, AfterCorrection, http.StatusUnprocessableEntity, "http_request_denied"),
	CodeSSHChannelRefused:     waits(ConnectionSetup, NotAttempted, Backoff, http.StatusBadGateway, "connection_limit_reached"),

	CodeRemoteOutcomeUnknown:   unresolved(AnswerByAdvice, "connection_terminated"),
	CodeRemoteTimeout:          unresolved(AnswerByAdvice, "http_response_timeout"),
	CodeRemoteResultIncomplete: unresolved(AnswerByAdvice, "http_response_incomplete"),
	CodeRemoteProtocolError:    unresolved(AnswerByAdvice, "http_protocol_error"),
	CodeResultLimit:            fixed(RemoteExecution, Unknown, Reconcile, http.StatusFailedDependency, "http_response_body_size"),
	CodeCallerCancelled: {Answering: AnswerNone, combinations: []combination{
		{beforeDispatch, []Outcome{NotAttempted}, []Retry{AfterCorrection}}, // F10
		{[]Phase{RemoteExecution}, []Outcome{Unknown}, byContract},          // F5
	}},
	CodeRemoteGateway:             unresolved(AnswerRelayed, ""),
	CodeRemoteRefused:             waits(RemoteExecution, Rejected, Backoff, http.StatusServiceUnavailable, "http_protocol_error"),
	CodeRemoteInProgress:          {Answering: AnswerRelayed, RetryAfter: true, combinations: one(RemoteExecution, Unknown, SameIdempotencyKey)},
	CodeClientCertificateRequired: fixed(RemoteExecution, Rejected, AfterCorrection, http.StatusUnprocessableEntity, "tls_alert_received"),
	CodeExecRefused:               fixed(RemoteExecution, Rejected, AfterCorrection, http.StatusForbidden, "http_request_denied"),
	CodeRemoteRejected: {Answering: AnswerRelayed, combinations: []combination{
		{[]Phase{RemoteExecution}, []Outcome{Rejected}, []Retry{AfterCorrection, Backoff, Never}}, // G5
	}},
	CodeRemoteError: {Answering: AnswerRelayed, combinations: one(RemoteExecution, Committed, Reconcile)},

	CodeDeliveryFailed: {Answering: AnswerNone, combinations: []combination{
		{[]Phase{ResultDelivery}, []Outcome{Committed, Rejected}, []Retry{FetchResult}},
	}},
	CodeResultStoreFailed: {
		Answering: AnswerFixed, Status: http.StatusFailedDependency, ProxyError: "proxy_internal_error",
		combinations: []combination{{[]Phase{ResultDelivery}, []Outcome{Committed, Unknown}, []Retry{Reconcile}}},
	},
	CodeResultContainsSecret: {
		Answering: AnswerFixed, Status: http.StatusUnprocessableEntity, ProxyError: "proxy_internal_response",
		combinations: []combination{{[]Phase{ResultDelivery}, kept, []Retry{Never}}},
	},
	CodeResultNotRetained: {
		Answering: AnswerFixed, Status: http.StatusGone,
		combinations: []combination{{[]Phase{ResultDelivery}, kept, []Retry{Never}}},
	},
	CodeResultExpired: {
		Answering: AnswerFixed, Status: http.StatusGone,
		combinations: []combination{{[]Phase{ResultDelivery}, kept, []Retry{Never}}},
	},
	CodeResultPending:  {Answering: AnswerFixed, Status: http.StatusAccepted, RetryAfter: true, ofAction: true, pending: true},
	CodeActionNotFound: {Answering: AnswerFixed, Status: http.StatusNotFound},
	CodeRetryRefused:   {Answering: AnswerFixed, Status: http.StatusUnprocessableEntity, ofAction: true},
	CodeLeaseHeld:      {Answering: AnswerFixed, Status: http.StatusConflict, RetryAfter: true, ofAction: true},
	CodeInternal: {
		Answering: AnswerByAdvice, ProxyError: "proxy_internal_error",
		combinations: []combination{
			{beforeDispatch, []Outcome{NotAttempted}, []Retry{Never}},
			{[]Phase{RemoteExecution, ResultDelivery}, []Outcome{Rejected, Committed}, []Retry{Never, Reconcile}},
			{[]Phase{ConnectionSetup, RemoteExecution, ResultDelivery}, []Outcome{Unknown}, []Retry{Reconcile}},
		},
	},
}

// Lookup returns the row of a code. For an invalid code it returns the row of
// CodeInternal: what is not understood is never relayed or repeated.
func Lookup(c Code) Rule {
	if int(c) >= len(rules) {
		c = CodeInternal
	}
	r := rules[c]
	r.Code = c
	return r
}

// Of returns the facts of a code whose row fixes all three; false for a row whose
// facts depend on the case, for CodeNone and for ACTION_NOT_FOUND.
func Of(c Code) (Facts, bool) {
	if c == CodeNone {
		return Facts{}, false
	}
	all := Lookup(c).Facts()
	if len(all) != 1 || all[0].Code != c || all[0].known() != nil {
		return Facts{}, false
	}
	return all[0], true
}

// Success returns the facts of a complete, authoritative answer that is no
// refusal and no error (CONTRACT A3, section U): it has no code.
func Success() Facts { return Facts{RemoteExecution, Committed, Never, CodeNone} }

// ByContract returns the advice for an unknown outcome (CONTRACT I6, section U).
// Repeatable says that the operation is safe to repeat (G6); keyKept that a
// reviewed contract keeps the request's idempotency key and its window is open
// (I1, I5).
func ByContract(repeatable, keyKept bool) Retry {
	switch {
	case repeatable:
		return Backoff
	case keyKept:
		return SameIdempotencyKey
	default:
		return Reconcile
	}
}

// IsSuccess reports whether the facts are those of Success.
func (f Facts) IsSuccess() bool { return f == Success() }

// Validate reports whether the three facts may stand together with the code
// (CONTRACT section U). Its errors wrap ErrUnknownValue for a value outside the
// closed enumerations (A8), else ErrFacts.
func (f Facts) Validate() error {
	if int(f.Code) >= len(rules) {
		return fmt.Errorf("outcome: code %d: %w", f.Code, ErrUnknownValue)
	}
	rule := Lookup(f.Code)
	if !rule.factless() {
		if err := f.known(); err != nil {
			return err
		}
	}
	if !rule.allows(f) {
		return fmt.Errorf("outcome: %s/%s/%s with code %q: %w", f.Phase, f.Outcome, f.Retry, f.Code.String(), ErrFacts)
	}
	return nil
}

// known reports whether all three facts and the code are of the closed
// enumerations, in whatever combination.
func (f Facts) known() error {
	if valid(phaseNames[:], int(f.Phase)) && valid(outcomeNames[:], int(f.Outcome)) && valid(retryNames[:], int(f.Retry)) && (f.Code == CodeNone || valid(codeNames[:], int(f.Code))) {
		return nil
	}
	if _, err := f.Phase.MarshalText(); err != nil {
		return err
	}
	if _, err := f.Outcome.MarshalText(); err != nil {
		return err
	}
	if _, err := f.Retry.MarshalText(); err != nil {
		return err
	}
	_, err := f.Code.MarshalText()
	return err
}
