package outcome

import (
	"net/http"
	"strconv"
	"strings"
	"time"

	"waybill/internal/control"
)

// Names of the fields that carry Waybill's facts and hints, in canonical form.
const (
	HeaderInvocation        = "Waybill-Invocation"
	HeaderOutcome           = "Waybill-Outcome"
	HeaderReplayed          = "Waybill-Replayed"
	HeaderProxyStatus       = "Proxy-Status"
	HeaderShouldRetry       = "X-Should-Retry"
	HeaderStripeShouldRetry = "Stripe-Should-Retry"
)

// Bounds of Retry-After in Waybill's own answers (CONTRACT L7): 0 makes some
// clients repeat a POST at once, and more than a minute makes others ignore it.
const (
	MinRetryAfter = 1 * time.Second
	MaxRetryAfter = 60 * time.Second
)

// MemberFields returns the fields of answers in which only Waybill speaks of
// itself; copies from an upstream are dropped (CONTRACT V6). Proxy-Status is not
// among them: it is a list to which every intermediary adds (G10), and Annotate
// drops from it the members that use Waybill's name.
func MemberFields() []string {
	return []string{HeaderInvocation, HeaderOutcome, HeaderReplayed}
}

// IsMemberField reports whether a field name, in any case, belongs to Waybill
// alone: every name that begins with "Waybill-", those that later versions add
// included (CONTRACT V6).
func IsMemberField(name string) bool {
	const prefix = "waybill-"
	return len(name) >= len(prefix) && strings.EqualFold(name[:len(prefix)], prefix)
}

// Shape is what the form of an answer depends on besides the facts. The zero
// value is a plain request by a caller that sent no idempotency key.
type Shape struct {
	Method string // of the request; "HEAD" gets no body
	// InsideTunnel: the request came through an intercepted tunnel, or was addressed
	// to Waybill itself (origin-form), so that 407 would not be understood.
	InsideTunnel bool
	// Connect: the answer is to a CONNECT.
	Connect bool
	// CallerSentKey: the caller itself sent the idempotency key, so that its library
	// repeats with it (CONTRACT L7).
	CallerSentKey bool

	NextHop        string        // host:port for Proxy-Status; "" leaves it out
	NextProtocol   string        // ALPN name, "h2" or "http/1.1"; "" leaves it out
	ReceivedStatus int           // of the next hop's answer; 0: none, then that of the evidence
	RetryAfter     time.Duration // clamped to MinRetryAfter … MaxRetryAfter; 0: MinRetryAfter
	RCode          string        // DNS response code such as "NXDOMAIN", for dns_error
	AlertID        int           // TLS alert received, for tls_alert_received
	AlertName      string        // its name in the TLS registry; "" with AlertID 0: no alert
	ProxyError     string        // a more precise RFC 9209 error type than the table's; "" for the table's
	Details        string        // Proxy-Status details, printable ASCII; "" leaves it out
	Realm          string        // of Proxy-Authenticate; "" is "waybill"

	// Dialect of the route (CONTRACT L9). It has no part in answers to CONNECT, in 407
	// and in what is no error.
	Dialect Dialect
}

// Answer is an HTTP answer that Waybill makes itself.
type Answer struct {
	Status int
	// Reason is a short reason phrase for HTTP/1 that names the code and the action:
	// many clients show nothing else of a refused CONNECT.
	Reason string
	Header http.Header // complete, Content-Length included
	Body   []byte      // nil for HEAD
}

// Answer maps the envelope to an HTTP answer (CONTRACT L1, L5, L7): the one
// mapping from a failure to what a client sees. It is total: whatever the facts,
// an answer never invites a repeat that its advice does not allow. Shape.Dialect
// changes status and body, and adds fields that belong to the form; all other fields
// are the same in every dialect but for those that say whether to wait (L9).
func (e *Envelope) Answer(s Shape) Answer {
	env := e.presentable()
	f := env.Facts()
	body, err := encodeJSON(&env)
	if err != nil {
		// Only evidence can have failed: the attempts hold enumerations.
		env.Evidence.Attempts = nil
		body, _ = encodeJSON(&env)
	}

	a := Answer{Status: statusOf(f, s), Header: http.Header{}, Reason: f.Code.String()}
	wait := waitsFor(f, a.Status)
	h := a.Header
	h.Set("Content-Type", "application/json")
	if inDialect(f, s, a.Status) {
		w := wayOf(f, s)
		a.Status, wait = s.Dialect.status(w, a.Status, s.Method == http.MethodHead), w == wayWaits
		if b := s.Dialect.form(h, env.said(f, s, a.Status)); b != nil {
			body = b
		}
	}
	h.Set("Content-Length", strconv.Itoa(len(body)))
	// Nothing here may be served again from a cache: 404 and 410 would be, by
	// default (RFC 9111 §4.2.2), and a stored 424 could hide a later resolution.
	h.Set("Cache-Control", "no-store")
	if s.ReceivedStatus == 0 {
		s.ReceivedStatus = env.Evidence.ReceivedStatus
	}
	s = implied(f, s)
	h.Set(HeaderProxyStatus, member(proxyError(f, s), s))
	setFacts(h, env.InvocationID, f)
	if wait {
		h.Set("Retry-After", retryAfter(s.RetryAfter))
	}
	if f.Code != CodeNone && !(wait && mayRepeat(f)) {
		h.Set(HeaderShouldRetry, "false")
		h.Set(HeaderStripeShouldRetry, "false")
	}
	if a.Status == http.StatusProxyAuthRequired {
		// RFC 9110 §15.5.8 requires the challenge; the connection stays open for the
		// second try.
		h.Set("Proxy-Authenticate", `Basic realm="`+realm(s.Realm)+`"`)
	} else if s.Connect || f.Code == CodeDraining {
		h.Set("Connection", "close")
	}
	if id := h.Get(HeaderInvocation); id != "" {
		a.Reason = strings.TrimSpace(a.Reason + " " + id)
	}
	if s.Method != http.MethodHead {
		a.Body = body
	}
	return a
}

// implied fills in what the code itself says of DNS and TLS.
func implied(f Facts, s Shape) Shape {
	switch {
	case f.Code == CodeDNSNoSuchName && s.RCode == "":
		s.RCode = "NXDOMAIN"
	case f.Code == CodeClientCertificateRequired && s.AlertID == 0 && s.AlertName == "":
		s.AlertID, s.AlertName = 116, "certificate_required" // RFC 8446 §6.2
	}
	return s
}

// presentable returns a copy whose facts can be shown.
func (e *Envelope) presentable() Envelope {
	if e.Error == nil {
		return *e
	}
	f := e.Error.Facts()
	if f.Code == CodeNone && f.IsSuccess() {
		// An error without a code says nothing that could be trusted.
		f = Facts{}
	}
	if s := sound(f); s != f {
		return NewEnvelope(e.InvocationID, s, "", e.Evidence)
	}
	return *e
}

// statusOf finds the status: that of the table where the facts are the code's
// own, else – by A9 an action can keep a code with the advice of another attempt –
// that of the advice, which alone decides what a library may do.
func statusOf(f Facts, s Shape) int {
	r := Lookup(f.Code)
	switch {
	case f.Code == CodeNone:
		return http.StatusOK
	case r.Answering == AnswerFixed && (r.ofAction || r.allows(f)):
		if r.TunnelStatus != 0 && s.InsideTunnel {
			return r.TunnelStatus
		}
		return r.Status
	default:
		return adviceStatus(f, s)
	}
}

// adviceStatus is the three-way rule of CONTRACT L7.
func adviceStatus(f Facts, s Shape) int {
	switch f.Retry {
	case Never, AfterCorrection, FetchResult:
		return http.StatusUnprocessableEntity
	case Backoff:
		if f.Outcome != Unknown {
			return http.StatusServiceUnavailable
		}
		// Safe to repeat: as RFC 9209 recommends.
		if f.Code == CodeRemoteTimeout {
			return http.StatusGatewayTimeout
		}
		return http.StatusBadGateway
	case SameIdempotencyKey:
		if s.CallerSentKey {
			return http.StatusServiceUnavailable
		}
		return http.StatusFailedDependency
	case Reconcile, RetryInvalid:
		if control.Off("L7-reconcile-is-424") {
			return http.StatusBadGateway // what RFC 9209 recommends
		}
		return http.StatusFailedDependency
	default:
		return http.StatusFailedDependency
	}
}

// waitsFor reports whether an answer with this status carries Retry-After.
func waitsFor(f Facts, status int) bool {
	switch status {
	case http.StatusTooManyRequests, http.StatusBadGateway, http.StatusServiceUnavailable, http.StatusGatewayTimeout:
		return true
	default:
		r := Lookup(f.Code)
		return r.Answering == AnswerFixed && r.RetryAfter && r.Status == status
	}
}

// mayRepeat reports whether the advice lets automation send the operation again.
func mayRepeat(f Facts) bool { return f.Retry == Backoff || f.Retry == SameIdempotencyKey }

// retryAfter is the field value: whole seconds, rounded up, within the bounds.
func retryAfter(d time.Duration) string { return retryAfterText(waitSeconds(d)) }

func retryAfterText(seconds int64) string { return strconv.FormatInt(seconds, 10) }

func waitSeconds(d time.Duration) int64 {
	d = min(max(d, MinRetryAfter), MaxRetryAfter)
	return int64((d + time.Second - 1) / time.Second)
}

// realm makes the content of a quoted-string (RFC 9110 §5.6.4).
func realm(s string) string {
	if s == "" {
		return "waybill"
	}
	var b strings.Builder
	for _, c := range []byte(s) {
		switch {
		case c == '"' || c == '\\':
			b.WriteByte('\\')
			b.WriteByte(c)
		case c >= ' ' && c <= '~':
			b.WriteByte(c)
		}
	}
	return b.String()
}

// setFacts sets the fields that every answer carries (CONTRACT L5).
func setFacts(h http.Header, id string, f Facts) {
	delete(h, HeaderInvocation)
	delete(h, HeaderOutcome)
	if isFieldID(id) {
		h[HeaderInvocation] = []string{id}
	}
	if v := FormatOutcome(f); v != "" && !control.Off("G11-facts-with-the-status") {
		h[HeaderOutcome] = []string{v}
	}
}

// isFieldID reports whether an id can stand in a field and a reason phrase.
func isFieldID(id string) bool {
	for _, c := range []byte(id) {
		if c <= ' ' || c > '~' {
			return false
		}
	}
	return id != ""
}

// Annotate adds Waybill's facts to the relayed answer of a next hop (CONTRACT L5,
// G11, G12): Waybill-Invocation, Waybill-Outcome, and a last Proxy-Status member
// with the received status and no error. Received Proxy-Status members are kept
// (G10); a malformed value is dropped, since nothing can be appended to it, and so
// are members in Waybill's own name (V6).
//
// UnsafeWithoutKey says that the request was not safe to repeat and had no remote
// idempotency key, and that the route did not switch the hints off. For such a
// request, a relayed 408, 409 or 5xx without X-Should-Retry gets the hints that
// keep client libraries from repeating it by themselves (L7). A relayed 429 is a
// definite refusal and stays as it came.
//
// Retry-After is added for REMOTE_IN_PROGRESS where the next hop gave none. Status,
// other fields and body are the next hop's.
func Annotate(h http.Header, id string, f Facts, s Shape, unsafeWithoutKey bool) {
	setFacts(h, id, f)
	own := member("", Shape{NextHop: s.NextHop, NextProtocol: s.NextProtocol, ReceivedStatus: s.ReceivedStatus, Details: s.Details})
	h[HeaderProxyStatus] = []string{appendMember(h[HeaderProxyStatus], own)}

	if unsafeWithoutKey && tempting(s.ReceivedStatus) && len(h.Values(HeaderShouldRetry)) == 0 {
		h.Set(HeaderShouldRetry, "false")
		if len(h.Values(HeaderStripeShouldRetry)) == 0 {
			h.Set(HeaderStripeShouldRetry, "false")
		}
	}
	if f.Code == CodeRemoteInProgress && len(h.Values("Retry-After")) == 0 {
		h.Set("Retry-After", retryAfter(s.RetryAfter))
	}
}

// tempting reports whether common client libraries repeat any request on the status.
func tempting(status int) bool {
	return status == http.StatusRequestTimeout || status == http.StatusConflict || status >= http.StatusInternalServerError
}
