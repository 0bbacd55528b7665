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
