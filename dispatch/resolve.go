package dispatch

import (
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"

	"waybill/outcome"
	"waybill/routes"
)

// longestWait is the longest Retry-After that counts as an adequate time (G5).
const longestWait = 24 * time.Hour

// retryAfter reads Retry-After (RFC 9110 §10.2.3). ok is false when there is none,
// when it is malformed, in the past or too far away.
func retryAfter(h http.Header, now time.Time) (time.Duration, bool) {
	v := strings.TrimSpace(h.Get("Retry-After"))
	if v == "" {
		return 0, false
	}
	var d time.Duration
	if n, err := strconv.ParseUint(v, 10, 31); err == nil {
		d = time.Duration(n) * time.Second
	} else if at, err := http.ParseTime(v); err == nil {
		d = at.Sub(now)
	} else {
		return 0, false
	}
	return d, d > 0 && d <= longestWait
}

// meaning says what a complete answer means for the attempt, and so – where none crossed
// the boundary before – for the action.
func (a *action) meaning(end *Ending) outcome.Facts {
	_, timed := retryAfter(end.Header, a.now())
	c := &a.route.Contract
	if r, ok := c.Response(end.Status); ok {
		return overridden(r, timed, a.advice)
	}
	if a.key != nil && c.Idempotency != nil && slices.Contains(c.Idempotency.InProgress, end.Status) {
		return outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.SameIdempotencyKey, Code: outcome.CodeRemoteInProgress}
	}
	return statusFacts(end.Status, c, a.repeatable, timed, a.advice)
}

// overridden is what the contract says of a status (CONTRACT G5).
func overridden(r routes.Response, timed bool, advice outcome.Retry) outcome.Facts {
	f := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: r.Outcome, Retry: r.Retry}
	switch r.Outcome {
	case outcome.Committed:
		if r.Retry == outcome.Reconcile {
			f.Code = outcome.CodeRemoteError
		}
	case outcome.Rejected:
		f.Code = outcome.CodeRemoteRejected
		if r.Retry == outcome.Backoff && !timed {
			f.Retry = outcome.Never // without a time there is nothing to wait for
		}
	case outcome.Unknown, outcome.NotAttempted, outcome.OutcomeInvalid:
		// Relayed, and resolves nothing. The last two are refused when a contract is checked.
		f.Outcome, f.Retry, f.Code = outcome.Unknown, advice, outcome.CodeRemoteGateway
	}
	return f
}

// said notes what the contract makes of a refusal of a repeat (CONTRACT A10).
func (a *action) said(e *Ended, status int) {
	c := a.route.Contract.Idempotency
	if a.key == nil || c == nil || e.Outcome != outcome.Rejected {
		return
	}
	if slices.Contains(c.Mismatch, status) {
		e.Reason = "remote_key_mismatch"
		return
	}
	// A refusal of who asks or how often, or by a service that is not up to it, says nothing
	// about the key.
	switch status {
	case http.StatusServiceUnavailable, http.StatusUnauthorized, http.StatusForbidden, http.StatusProxyAuthRequired, http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests:
	default:
		e.Speaks = c.RefusalsSpeak
	}
}

// statusFacts says what a complete answer means (CONTRACT G5, G10). timed: it gives
// an adequate time to wait; advice is "by contract" (I6).
func statusFacts(status int, c *routes.Contract, repeatable, timed bool, advice outcome.Retry) outcome.Facts {
	f := outcome.Facts{Phase: outcome.RemoteExecution}
	refusedBefore := repeatable || slices.Contains(c.RefusedBeforeExecution, status)
	switch {
	case slices.Contains(c.KeyInUse, status):
		f.Outcome, f.Retry, f.Code = outcome.Unknown, outcome.SameIdempotencyKey, outcome.CodeRemoteInProgress
	case status < 400:
		f.Outcome, f.Retry = outcome.Committed, outcome.Never
	case status == http.StatusBadGateway, status == http.StatusGatewayTimeout:
		// Its sender says that it has no answer from the origin.
		f.Outcome, f.Retry, f.Code = outcome.Unknown, advice, outcome.CodeRemoteGateway
	case status == http.StatusServiceUnavailable && refusedBefore && timed:
		f.Outcome, f.Retry, f.Code = outcome.Rejected, outcome.Backoff, outcome.CodeRemoteRejected
	case status >= 500: // 6xx to 9xx too: RFC 9110 §15
		f.Outcome, f.Retry, f.Code = outcome.Committed, outcome.Reconcile, outcome.CodeRemoteError
	case status == http.StatusRequestTimeout, status == http.StatusTooEarly, status == http.StatusTooManyRequests:
		f.Outcome, f.Retry, f.Code = outcome.Rejected, outcome.Never, outcome.CodeRemoteRejected
		if refusedBefore && timed {
			f.Retry = outcome.Backoff
		}
	default:
		f.Outcome, f.Retry, f.Code = outcome.Rejected, outcome.AfterCorrection, outcome.CodeRemoteRejected
	}
	return f
}

// endingFacts says what an exchange without a complete answer means (CONTRACT F2, G2, G8).
func endingFacts(end *Ending, advice outcome.Retry) outcome.Facts {
	if f, fixed := outcome.Of(end.Code); fixed && f.Phase == outcome.RemoteExecution && f.Outcome != outcome.Committed {
		return f // REMOTE_REFUSED, CLIENT_CERTIFICATE_REQUIRED, RESULT_LIMIT
	}
	f := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: advice, Code: end.Code}
	if f.Validate() != nil {
		// The boundary is crossed: no code of a transport says otherwise (F2).
		return unresolvedFacts(advice)
	}
	return f
}
