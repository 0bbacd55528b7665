package outcome

// Code names one kind of ending (CONTRACT section U). The list is closed (A8).
// The zero value, CodeNone, is a success: it has no code and no error.
type Code uint8

// The codes, in the order of section U. New ones are appended; a retired one
// keeps its slot.
const (
	CodeNone Code = iota
	CodeInvalidTarget
	CodeInvalidRequest
	CodeUnsupportedAction
	CodePayloadLimit
	CodeHeaderForbidden
	CodeRouteNotFound
	CodePolicyDenied
	CodeCallerUnauthenticated
	CodeRateLimited
	CodeDraining
	CodeJournalUnavailable
	CodeJournalIndeterminate
	CodeSnapshotMismatch
	CodeIdempotencyMismatch
	CodeIdempotencyExpired
	CodeInvocationInProgress
	CodeInvocationExists
	CodeDuplicateSuspected
	CodeRedirectCrossOrigin
	CodeLoopDetected
	CodeLeaseLost
	CodeVaultLocked
	CodeApprovalPending
	CodeApprovalDenied
	CodeApprovalExpired
	CodeCredentialMissing
	CodeCredentialInvalid
	CodeCredentialRefused
	CodeCredentialUnavailable
	CodeInjectionUnsupported
	CodeDNSTimeout
	CodeDNSError
	CodeDNSNoSuchName
	CodeDestinationProhibited
	CodeDestinationUnroutable
	CodeConnectionRefused
	CodeConnectionTimeout
	CodeConnectionLost
	CodeConnectionLimit
	CodeTLSHandshakeFailed
	CodeTLSCertificateInvalid
	CodeProxyTunnelFailed
	CodeSSHHandshakeFailed
	CodeSSHHostKeyRejected
	CodeSSHAuthFailed
	CodeSSHChannelRefused
	CodeRemoteOutcomeUnknown
	CodeRemoteTimeout
	CodeRemoteResultIncomplete
	CodeRemoteProtocolError
	CodeResultLimit
	CodeCallerCancelled
	CodeRemoteGateway
	CodeRemoteRefused
	CodeRemoteInProgress
	CodeClientCertificateRequired
	CodeExecRefused
	CodeRemoteRejected
	CodeRemoteError
	CodeDeliveryFailed
	CodeResultStoreFailed
	CodeResultContainsSecret
	CodeResultNotRetained
	CodeResultExpired
	CodeResultPending
	CodeActionNotFound
	CodeRetryRefused
	CodeLeaseHeld
	CodeInternal
)

var codeNames = [...]string{
	CodeInvalidTarget:             "INVALID_TARGET",
	CodeInvalidRequest:            "INVALID_REQUEST",
	CodeUnsupportedAction:         "UNSUPPORTED_ACTION",
	CodePayloadLimit:              "PAYLOAD_LIMIT",
	CodeHeaderForbidden:           "HEADER_FORBIDDEN",
	CodeRouteNotFound:             "ROUTE_NOT_FOUND",
	CodePolicyDenied:              "POLICY_DENIED",
	CodeCallerUnauthenticated:     "CALLER_UNAUTHENTICATED",
	CodeRateLimited:               "RATE_LIMITED",
	CodeDraining:                  "DRAINING",
	CodeJournalUnavailable:        "JOURNAL_UNAVAILABLE",
	CodeJournalIndeterminate:      "JOURNAL_INDETERMINATE",
	CodeSnapshotMismatch:          "SNAPSHOT_MISMATCH",
	CodeIdempotencyMismatch:       "IDEMPOTENCY_MISMATCH",
	CodeIdempotencyExpired:        "IDEMPOTENCY_EXPIRED",
	CodeInvocationInProgress:      "INVOCATION_IN_PROGRESS",
	CodeInvocationExists:          "INVOCATION_EXISTS",
	CodeDuplicateSuspected:        "DUPLICATE_SUSPECTED",
	CodeRedirectCrossOrigin:       "REDIRECT_CROSS_ORIGIN",
	CodeLoopDetected:              "LOOP_DETECTED",
	CodeLeaseLost:                 "LEASE_LOST",
	CodeVaultLocked:               "VAULT_LOCKED",
	CodeApprovalPending:           "APPROVAL_PENDING",
	CodeApprovalDenied:            "APPROVAL_DENIED",
	CodeApprovalExpired:           "APPROVAL_EXPIRED",
	CodeCredentialMissing:         "CREDENTIAL_MISSING",
	CodeCredentialInvalid:         "CREDENTIAL_INVALID",
	CodeCredentialRefused:         "CREDENTIAL_REFUSED",
	CodeCredentialUnavailable:     "CREDENTIAL_UNAVAILABLE",
	CodeInjectionUnsupported:      "INJECTION_UNSUPPORTED",
	CodeDNSTimeout:                "DNS_TIMEOUT",
	CodeDNSError:                  "DNS_ERROR",
	CodeDNSNoSuchName:             "DNS_NO_SUCH_NAME",
	CodeDestinationProhibited:     "DESTINATION_PROHIBITED",
	CodeDestinationUnroutable:     "DESTINATION_UNROUTABLE",
	CodeConnectionRefused:         "CONNECTION_REFUSED",
	CodeConnectionTimeout:         "CONNECTION_TIMEOUT",
	CodeConnectionLost:            "CONNECTION_LOST",
	CodeConnectionLimit:           "CONNECTION_LIMIT",
	CodeTLSHandshakeFailed:        "TLS_HANDSHAKE_FAILED",
	CodeTLSCertificateInvalid:     "TLS_CERTIFICATE_INVALID",
	CodeProxyTunnelFailed:         "PROXY_TUNNEL_FAILED",
	CodeSSHHandshakeFailed:        "SSH_HANDSHAKE_FAILED",
	CodeSSHHostKeyRejected:        "SSH_HOST_KEY_REJECTED",
	CodeSSHAuthFailed:             "SSH_AUTH_FAILED",
	CodeSSHChannelRefused:         "SSH_CHANNEL_REFUSED",
	CodeRemoteOutcomeUnknown:      "REMOTE_OUTCOME_UNKNOWN",
	CodeRemoteTimeout:             "REMOTE_TIMEOUT",
	CodeRemoteResultIncomplete:    "REMOTE_RESULT_INCOMPLETE",
	CodeRemoteProtocolError:       "REMOTE_PROTOCOL_ERROR",
	CodeResultLimit:               "RESULT_LIMIT",
	CodeCallerCancelled:           "CALLER_CANCELLED",
	CodeRemoteGateway:             "REMOTE_GATEWAY",
	CodeRemoteRefused:             "REMOTE_REFUSED",
	CodeRemoteInProgress:          "REMOTE_IN_PROGRESS",
	CodeClientCertificateRequired: "CLIENT_CERTIFICATE_REQUIRED",
	CodeExecRefused:               "EXEC_REFUSED",
	CodeRemoteRejected:            "REMOTE_REJECTED",
	CodeRemoteError:               "REMOTE_ERROR",
	CodeDeliveryFailed:            "DELIVERY_FAILED",
	CodeResultStoreFailed:         "RESULT_STORE_FAILED",
	CodeResultContainsSecret:      "RESULT_CONTAINS_SECRET",
	CodeResultNotRetained:         "RESULT_NOT_RETAINED",
	CodeResultExpired:             "RESULT_EXPIRED",
	CodeResultPending:             "RESULT_PENDING",
	CodeActionNotFound:            "ACTION_NOT_FOUND",
	CodeRetryRefused:              "RETRY_REFUSED",
	CodeLeaseHeld:                 "LEASE_HELD",
	CodeInternal:                  "INTERNAL",
}

// Codes returns every code of section U, without CodeNone.
func Codes() []Code { return values[Code](len(codeNames)) }

// String returns the wire form; CodeNone is "".
func (c Code) String() string {
	if c == CodeNone {
		return ""
	}
	return name(codeNames[:], int(c))
}

// MarshalText returns "" for CodeNone and refuses an invalid code with
// ErrUnknownValue (CONTRACT A8).
func (c Code) MarshalText() ([]byte, error) {
	if c == CodeNone {
		return []byte{}, nil
	}
	return marshal("code", codeNames[:], int(c))
}

// UnmarshalText refuses unknown text with ErrUnknownValue (CONTRACT A8); the
// empty text is CodeNone.
func (c *Code) UnmarshalText(text []byte) error {
	if len(text) == 0 {
		*c = CodeNone
		return nil
	}
	i, err := parse("code", codeNames[:], text)
	*c = Code(i)
	return err
}
