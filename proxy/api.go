package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"iter"
	"log/slog"
	"net"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"time"

	"waybill/dispatch"
	"waybill/internal/control"
	"waybill/outcome"
)

// Journal is what the caller API and the admin API need of the journal: reads, and
// the two events that delivery knows. Nothing here can submit or execute (CONTRACT H3).
type Journal interface {
	Append(ctx context.Context, batch dispatch.Batch) (dispatch.Receipt, error)
	Action(ctx context.Context, id dispatch.ActionID) (dispatch.Record, error)
	Events(ctx context.Context, id dispatch.ActionID) ([]dispatch.StoredEvent, error)
	ByRequestID(ctx context.Context, caller, requestID string) (dispatch.ActionID, error)
	Actions(ctx context.Context, f dispatch.Filter) iter.Seq2[dispatch.Record, error]
	OpenResult(ctx context.Context, id dispatch.ActionID) (dispatch.Result, io.ReadCloser, error)
	Chunk(ctx context.Context, id dispatch.ActionID, attempt, index int) ([]byte, error)
	Watch(want func(*dispatch.Record) bool, f func(dispatch.Record)) (stop func())
}

// fieldIncomplete is the trailer of a list that may not be all there is, with the reason.
const fieldIncomplete = "Waybill-Incomplete"

// callerListLimit bounds one list that a caller asks for.
const callerListLimit = 1000

// serveAPI serves the caller API: origin-form on the proxy listener, and
// http://waybill.internal/ through it. A caller sees its own actions only (V4).
func (p *Proxy) serveAPI(w http.ResponseWriter, r *http.Request) {
	x := exchangeOf(r)
	if x.noUpgrade() {
		w.Header().Set("Connection", "close")
	}
	if f := x.fromBrowser(r); f != nil {
		x.unrecorded(x.apiShape(r), f, false)
		return
	}
	a := &api{p: p, w: w, r: r, caller: x.caller.ID}
	a.serve()
}

func (x *exchange) apiShape(r *http.Request) outcome.Shape {
	return outcome.Shape{Method: r.Method, InsideTunnel: true}
}

// fromBrowser refuses what a browser page could send: a page can name any host and
// reach any port of this machine, but it cannot hide its Origin, nor choose a Host
// that is ours without being served from there (CONTRACT V5).
func (x *exchange) fromBrowser(r *http.Request) *dispatch.Refusal {
	deny := func(field, reason, detail string) *dispatch.Refusal {
		f := refusal(outcome.CodePolicyDenied, field, reason, detail)
		f.Retry = outcome.Never
		return f
	}
	if control.Off("V5-host-and-origin") {
		return nil
	}
	host := r.Host
	if x.conn.head != nil {
		host = x.head.host
		if host == "" {
			host = x.head.authority // HTTP/1.0, absolute-form
		}
	}
	local, _ := r.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if !ownHost(host, local) {
		return deny("request.headers.host", "foreign_host", "The Host field does not name Waybill.")
	}
	return browserFields(r.Header, func(h string) bool { return ownHost(h, local) }, deny)
}

func browserFields(h http.Header, own func(host string) bool, deny func(field, reason, detail string) *dispatch.Refusal) *dispatch.Refusal {
	for _, o := range h["Origin"] {
		if u, err := url.Parse(o); err != nil || u.Host == "" || !own(u.Host) {
			return deny("request.headers.origin", "foreign_origin", "Pages of other sites cannot use this API.")
		}
	}
	for _, v := range h["Sec-Fetch-Site"] {
		if v != "same-origin" && v != "none" {
			return deny("request.headers.sec-fetch-site", "foreign_origin", "Pages of other sites cannot use this API.")
		}
	}
	return nil
}

// ownHost reports whether a Host value names Waybill: its internal name, localhost or
// the address that was connected to, the latter two with the port that was.
func ownHost(host string, local net.Addr) bool {
	if isOwnName(host) {
		return true
	}
	name, port, err := net.SplitHostPort(host)
	if err != nil {
		name, port = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]"), ""
	}
	t, ok := local.(*net.TCPAddr)
	if !ok {
		return false
	}
	if port != "" && port != strconv.Itoa(t.Port) {
		return false
	}
	if strings.EqualFold(name, "localhost") {
		return t.IP.IsLoopback()
	}
	ip := net.ParseIP(name)
	return ip != nil && ip.Equal(t.IP)
}

// api serves one request about recorded actions. caller is whose actions are seen;
// "" for all (admin).
type api struct {
	p      *Proxy
	w      http.ResponseWriter
	r      *http.Request
	caller string
	admin  bool
}

// serve routes by path. The path is compared as sent: ids need no escaping.
func (a *api) serve() {
	path := a.r.URL.EscapedPath()
	if path == "/v1/ssh/exec" && !a.admin {
		if a.method(http.MethodPost) {
			a.exec()
		}
		return
	}
	rest, ok := strings.CutPrefix(path, "/v1/actions")
	if !ok {
		a.fail(refusal(outcome.CodeInvalidTarget, "request.target", "no_such_resource", "There is no such resource here."))
		return
	}
	parts := strings.Split(strings.Trim(rest, "/"), "/")
	switch {
	case rest == "":
		if a.method(http.MethodGet) {
			a.list()
		}
	case len(parts) == 1 && rest == "/"+parts[0]:
		if a.method(http.MethodGet) {
			a.withAction(parts[0], a.await)
		}
	case len(parts) == 2 && a.serveFollowUp(parts[0], parts[1]):
	case len(parts) == 2 && parts[1] == "result":
		if a.method(http.MethodGet) {
			a.withAction(parts[0], a.result)
		}
	case len(parts) == 2 && parts[1] == "ack":
		if a.method(http.MethodPost) {
			a.withAction(parts[0], a.ack)
		}
	case len(parts) == 2 && parts[1] == "events" && a.admin:
		if a.method(http.MethodGet) {
			a.withAction(parts[0], a.events)
		}
	case len(parts) == 2 && parts[1] == "retry":
		if a.method(http.MethodPost) {
			a.withAction(parts[0], a.retry)
		}
	default:
		a.fail(refusal(outcome.CodeInvalidTarget, "request.target", "no_such_resource", "There is no such resource here."))
	}
}

// method answers other methods than m (and HEAD, where m is GET).
func (a *api) method(m string) bool {
	if a.r.Method == m || m == http.MethodGet && a.r.Method == http.MethodHead {
		return true
	}
	a.fail(refusal(outcome.CodeUnsupportedAction, "request.method", "method", "This resource takes "+m+"."))
	return false
}

// fail answers a request to the API itself that is wrong. No action exists for it, so
// there is no record and no invocation id; nothing here could have been executed.
func (a *api) fail(f *dispatch.Refusal) {
	env := outcome.NewEnvelope("", f.Facts, f.Detail, outcome.Evidence{Field: f.Field, Reason: f.Reason})
	a.envelope(&env, 0)
}

// envelope answers with an envelope and the fields that keep browsers out.
func (a *api) envelope(env *outcome.Envelope, retryAfter time.Duration) {
	ans := env.Answer(outcome.Shape{Method: a.r.Method, InsideTunnel: true, RetryAfter: retryAfter})
	writeAnswer(a.w, ans)
}

func writeAnswer(w http.ResponseWriter, ans outcome.Answer) {
	h := w.Header()
	for k, v := range ans.Header {
		h[k] = v
	}
	h.Set("X-Content-Type-Options", "nosniff")
	w.WriteHeader(ans.Status)
	_, _ = w.Write(ans.Body) // a caller that is gone reads nothing
}

// notFound answers for an id that does not exist and for another caller's alike
// (CONTRACT M7, V4): the same bytes.
func (a *api) notFound() {
	env := outcome.NewEnvelope("", outcome.Facts{Code: outcome.CodeActionNotFound}, "", outcome.Evidence{})
	a.envelope(&env, 0)
}

// withAction finds the action of an id and calls f with its record.
func (a *api) withAction(text string, f func(dispatch.Record)) {
	id, err := dispatch.ParseActionID(text)
	if err != nil {
		a.notFound()
		return
	}
	rec, err := a.p.journal.Action(a.r.Context(), id)
	switch {
	case errors.Is(err, dispatch.ErrActionNotFound):
		a.notFound()
	case errors.Is(err, dispatch.ErrQuarantined):
		a.quarantined(id)
	case err != nil:
		a.unreadable(id.String(), err)
	case !a.owns(&rec):
		a.notFound()
	default:
		f(rec)
	}
}

func (a *api) owns(rec *dispatch.Record) bool {
	return a.admin || rec.Caller == a.caller || control.Off("V4-own-actions-only")
}

// quarantined answers for an action of which a store behind its witness may have lost
// the records: it may have been dispatched (CONTRACT M5, F2).
func (a *api) quarantined(id dispatch.ActionID) {
	f := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteOutcomeUnknown}
	env := outcome.NewEnvelope(id.String(), f, "", outcome.Evidence{Reason: "journal_quarantined"})
	a.envelope(&env, 0)
}

// unreadable answers when the journal cannot be read: nothing is known.
func (a *api) unreadable(id string, err error) {
	a.p.log.Error("the journal cannot be read", slog.String("action", id), slog.Any("err", err))
	f := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeInternal}
	env := outcome.NewEnvelope(id, f, "", outcome.Evidence{Reason: "journal_unreadable"})
	a.envelope(&env, 0)
}

// shown is the JSON form of one action.
type shown struct {
	Action   dispatch.ActionView `json:"action"`
	Envelope outcome.Envelope    `json:"envelope"`
	// Items are the children of a batch (CONTRACT F7).
	Items []dispatch.Child `json:"items,omitempty"`
}

func (a *api) action(rec dispatch.Record) {
	a.json(http.StatusOK, shown{rec.View(), rec.Envelope(), rec.Children()})
}

func (a *api) json(status int, v any) {
	raw, err := json.Marshal(v)
	if err != nil {
		a.unreadable("", err)
		return
	}
	raw = append(raw, '\n')
	h := a.w.Header()
	h.Set("Content-Type", "application/json")
	h.Set("Content-Length", strconv.Itoa(len(raw)))
	a.private()
	a.w.WriteHeader(status)
	if a.r.Method != http.MethodHead {
		_, _ = a.w.Write(raw)
	}
}

// private keeps answers out of caches and away from guessing browsers.
func (a *api) private() {
	h := a.w.Header()
	h.Set("Cache-Control", "no-store")
	h.Set("X-Content-Type-Options", "nosniff")
}

// inertPolicy forbids a document everything: it has an origin of its own, runs nothing,
// loads nothing and is in no frame.
const inertPolicy = "sandbox; default-src 'none'; frame-ancestors 'none'"

// Inert makes of what an origin sent a document that can do nothing where Waybill gives
// it out: opened in a browser, its scripts would speak to the API as pages of Waybill's own
// (CONTRACT V5). What the origin says of its page stays, for those who read it. It cannot
// loosen this: of several policies each holds, and of several sandboxes the last.
func Inert(h http.Header) {
	h.Set("X-Content-Type-Options", "nosniff")
	h.Add("Content-Security-Policy", inertPolicy)
}

// list writes the actions that match the query as JSON lines, newest first.
func (a *api) list() {
	f, bad := a.filter()
	if bad != nil {
		a.fail(bad)
		return
	}
	enc := json.NewEncoder(a.w)
	begun := false
	begin := func() {
		if !begun {
			begun = true
			a.w.Header().Set("Content-Type", "application/x-ndjson")
			a.private()
			a.w.WriteHeader(http.StatusOK)
		}
	}
	for rec, err := range a.p.journal.Actions(a.r.Context(), f) {
		if a.admin && errors.Is(err, dispatch.ErrQuarantined) {
			// What is on record is listed; that it may not be all is said behind it (M5).
			begin()
			_ = http.NewResponseController(a.w).Flush() // trailers need the chunked coding
			a.w.Header().Set(http.TrailerPrefix+fieldIncomplete, "journal_quarantined")
			return
		}
		if err != nil {
			if begun {
				// Half a list must not look like a whole one.
				panic(http.ErrAbortHandler)
			}
			a.unreadable("", err)
			return
		}
		if !a.owns(&rec) {
			continue
		}
		begin()
		if enc.Encode(rec.View()) != nil {
			return
		}
	}
	begin()
}

// filter reads the query of a list. Unknown parameters and values are refused: a
// filter that was not understood would show too much.
func (a *api) filter() (dispatch.Filter, *dispatch.Refusal) {
	f := dispatch.Filter{Caller: a.caller}
	if !a.admin {
		f.Limit = callerListLimit
	}
	bad := func(name string) *dispatch.Refusal {
		return refusal(outcome.CodeInvalidRequest, "request.query."+name, "bad_parameter", "The query parameter or its value is not understood.")
	}
	q, err := url.ParseQuery(a.r.URL.RawQuery)
	if err != nil {
		return f, bad("query")
	}
	for _, name := range slices.Sorted(keys(q)) {
		if len(q[name]) != 1 {
			return f, bad(name)
		}
		v := q[name][0]
		var err error
		switch {
		case name == "request_id":
			f.RequestID = v
		case name == "route":
			f.Route = v
		case name == "outcome":
			err = f.Outcome.UnmarshalText([]byte(v))
		case name == "phase":
			err = f.Phase.UnmarshalText([]byte(v))
		case name == "code":
			err = f.Code.UnmarshalText([]byte(v))
		case name == "since":
			f.Since, err = time.Parse(time.RFC3339, v)
		case name == "open":
			f.OpenOnly, err = strconv.ParseBool(v)
		case name == "limit":
			var n uint64
			n, err = strconv.ParseUint(v, 10, 31)
			if limit := int(n); a.admin || limit > 0 && limit < callerListLimit {
				f.Limit = limit
			}
		case name == "caller" && a.admin:
			f.Caller = v
		default:
			// The name is the caller's; only a known one is repeated.
			return f, bad("unknown")
		}
		if err != nil {
			return f, bad(name)
		}
	}
	return f, nil
}

func keys(q url.Values) iter.Seq[string] {
	return func(yield func(string) bool) {
		for k := range q {
			if !yield(k) {
				return
			}
		}
	}
}

func (a *api) events(rec dispatch.Record) {
	events, err := a.p.journal.Events(a.r.Context(), rec.ID)
	if err != nil {
		a.unreadable(rec.ID.String(), err)
		return
	}
	a.json(http.StatusOK, dispatch.ShowEvents(events))
}

// result relays the stored result: its status, its end-to-end fields and its bytes,
// with fresh framing (CONTRACT H3, case DL-03). It never executes anything.
func (a *api) result(rec dispatch.Record) {
	if a.jobResult(rec) {
		return
	}
	if raw := a.r.URL.RawQuery; raw != "" {
		after, ok := strings.CutPrefix(raw, "after_chunk=")
		if !ok {
			a.fail(refusal(outcome.CodeInvalidRequest, "request.query", "bad_parameter", "The only parameter here is after_chunk."))
			return
		}
		a.chunks(rec, after)
		return
	}
	res, body, err := a.p.journal.OpenResult(a.r.Context(), rec.ID)
	if err != nil {
		a.noResult(&rec, err)
		return
	}
	defer func() { _ = body.Close() }()
	a.p.pipeline.Relayed(&rec)
	h := a.w.Header()
	for k, v := range rec.ResultHeader(&res) {
		if !slices.Contains(notForwarded, k) {
			h[k] = v
		}
	}
	if _, ok := h["Content-Type"]; !ok {
		h["Content-Type"] = nil // or net/http would guess one
	}
	Inert(h)
	// The length of what is stored, not of what another method would have returned.
	h.Set("Content-Length", strconv.FormatInt(res.Bytes, 10))
	if len(res.Trailer) > 0 && a.r.ProtoAtLeast(1, 1) {
		// HTTP/1.0 has no trailers, and without a length a body that breaks there looks whole.
		h.Del("Content-Length")
		for k := range res.Trailer {
			h.Add("Trailer", k)
		}
	}
	if res.Status == http.StatusNoContent || res.Status == http.StatusNotModified {
		h.Del("Content-Length")
	}
	a.w.WriteHeader(res.Status)
	if a.r.Method == http.MethodHead {
		return
	}
	if res.Bytes > 0 {
		if _, err := io.Copy(a.w, body); err != nil {
			// The store broke, or the caller is gone: never a short body that looks whole (H10).
			panic(http.ErrAbortHandler)
		}
	}
	for k, v := range res.Trailer {
		h[k] = slices.Clone(v)
	}
}

// noResult answers a fetch of an action that has no complete result: with the
// envelope, never with a 200 (CONTRACT H10).
func (a *api) noResult(rec *dispatch.Record, err error) {
	f := rec.Shown()
	with := func(code outcome.Code, phase outcome.Phase, retry outcome.Retry) {
		env := outcome.NewEnvelope(rec.ID.String(), outcome.Facts{Phase: phase, Outcome: f.Outcome, Retry: retry, Code: code}, "", rec.Evidence())
		a.envelope(&env, time.Second)
	}
	switch {
	case errors.Is(err, dispatch.ErrResultDropped):
		with(outcome.CodeResultExpired, outcome.ResultDelivery, outcome.Never)
	case errors.Is(err, dispatch.ErrQuarantined):
		a.quarantined(rec.ID)
	case !errors.Is(err, dispatch.ErrNoResult):
		a.unreadable(rec.ID.String(), err)
	case !rec.Ended:
		with(outcome.CodeResultPending, f.Phase, outcome.FetchResult)
	case f.Outcome == outcome.Committed || f.Outcome == outcome.Rejected:
		if env := rec.Envelope(); env.Error != nil && outcome.Lookup(env.Error.Code).Answering != outcome.AnswerRelayed {
			a.envelope(&env, 0) // its own code says more, e.g. RESULT_CONTAINS_SECRET, REMOTE_REFUSED
			return
		}
		with(outcome.CodeResultNotRetained, outcome.ResultDelivery, outcome.Never)
	default:
		env := rec.Envelope()
		a.envelope(&env, 0)
	}
}

// ack records that the caller has the whole result (CONTRACT H6). Repeating it
// changes nothing.
func (a *api) ack(rec dispatch.Record) {
	_, _ = io.Copy(io.Discard, io.LimitReader(a.r.Body, 4<<10)) // a body is of no interest
	if !rec.Ended || rec.Result == nil {
		a.noResult(&rec, dispatch.ErrNoResult)
		return
	}
	if !rec.Delivered {
		batch := dispatch.Batch{Action: rec.ID, Events: []dispatch.Event{{Type: dispatch.ResultDelivered, At: time.Now()}}}
		receipt, err := a.p.journal.Append(context.WithoutCancel(a.r.Context()), batch)
		if err != nil {
			a.p.log.Error("an acknowledgement could not be recorded", slog.String("action", rec.ID.String()), slog.Any("err", err))
			// The action's own outcome does not change with its acknowledgement.
			retry := outcome.Never
			if rec.Facts.Outcome == outcome.Unknown {
				retry = outcome.Reconcile
			}
			f := outcome.Facts{Phase: outcome.ResultDelivery, Outcome: rec.Facts.Outcome, Retry: retry, Code: outcome.CodeInternal}
			env := outcome.NewEnvelope(rec.ID.String(), f, "The acknowledgement was not recorded; the result stays available.", rec.Evidence())
			a.envelope(&env, 0)
			return
		}
		rec = receipt.Record
	}
	a.action(rec)
}
