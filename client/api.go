package client

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"log/slog"
	"maps"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"waybill/outcome"
)

// apiHost is the name of the caller API; the connection goes to the proxy itself.
const apiHost = "waybill.internal"

const (
	maxDocumentBytes = 16 << 20
	// Asking again after a loss, and while an action runs: from firstAsk on, doubling.
	firstAsk = 50 * time.Millisecond
	lastAsk  = time.Second
)

// Action is one action of this caller, as the journal has it. It holds no query
// values and no secrets.
type Action struct {
	InvocationID    string          `json:"invocation_id"`
	RequestID       string          `json:"request_id"`
	Route           string          `json:"route"`
	Method          string          `json:"method"`
	Target          string          `json:"target"`
	Phase           outcome.Phase   `json:"phase"`
	Outcome         outcome.Outcome `json:"outcome"`
	Retry           outcome.Retry   `json:"retry"`
	Code            outcome.Code    `json:"code,omitempty"`
	DispatchStarted bool            `json:"dispatch_started"`
	Attempts        int             `json:"attempts"`
	AcceptedAt      time.Time       `json:"accepted_at"`
	EndedAt         time.Time       `json:"ended_at,omitzero"`
	Ended           bool            `json:"ended"`
	Delivered       bool            `json:"delivered"`
	Status          int             `json:"status,omitempty"` // of the stored result
	Durability      string          `json:"durability,omitempty"`
	// Link says which action this one was started for; nil for one of a caller.
	Link *Link `json:"link,omitempty"`

	// Envelope is set where one action is returned, not in lists. Its evidence has the
	// approval, the job and what was found out later (Resolutions).
	Envelope *outcome.Envelope `json:"envelope,omitempty"`
	// Items are the parts of a batch, each with facts of its own (CONTRACT F7); not in lists.
	Items []Item `json:"items,omitempty"`
}

// Link is why an action was started that no caller sent.
type Link struct {
	Kind string `json:"kind"` // reconcile, job or poll
	Of   string `json:"of"`   // the action it was started for
}

// Item is one part of a batch (CONTRACT F7).
type Item struct {
	Index int    `json:"index"` // from 0, in the order of the request
	ID    string `json:"id,omitempty"`
	outcome.Facts
	Status int `json:"status,omitempty"`
}

// Facts returns the facts of the action. Of one that still runs the advice is to ask
// again (RESULT_PENDING).
func (a *Action) Facts() outcome.Facts {
	return outcome.Facts{Phase: a.Phase, Outcome: a.Outcome, Retry: a.Retry, Code: a.Code}
}

// Filter picks actions. The zero value picks all.
type Filter struct {
	RequestID string
	Route     string
	Outcome   outcome.Outcome
	Phase     outcome.Phase
	Code      outcome.Code
	Since     time.Time
	OpenOnly  bool // only those that still run
	Limit     int  // 0: as many as the proxy gives, 1000 at most
}

func (f *Filter) query() url.Values {
	q := url.Values{}
	set := func(name, v string) {
		if v != "" {
			q.Set(name, v)
		}
	}
	set("request_id", f.RequestID)
	set("route", f.Route)
	if f.Outcome != outcome.OutcomeInvalid {
		set("outcome", f.Outcome.String())
	}
	if f.Phase != outcome.PhaseInvalid {
		set("phase", f.Phase.String())
	}
	set("code", f.Code.String())
	if !f.Since.IsZero() {
		set("since", f.Since.UTC().Format(time.RFC3339Nano)) // as "waybill actions" sends it
	}
	if f.OpenOnly {
		set("open", "true")
	}
	if f.Limit > 0 {
		set("limit", strconv.Itoa(f.Limit))
	}
	return q
}

// Action returns one action. For an id that the proxy does not know for this caller
// the error wraps ErrNotFound.
func (c *Client) Action(ctx context.Context, id string) (*Action, error) {
	return c.action(ctx, http.MethodGet, actionPath(id), nil, nil)
}

func actionPath(id string) string { return "/v1/actions/" + url.PathEscape(id) }

// action asks for the document of one action.
func (c *Client) action(ctx context.Context, method, path string, q url.Values, h http.Header) (*Action, error) {
	var doc struct {
		Action   Action           `json:"action"`
		Envelope outcome.Envelope `json:"envelope"`
		Items    []Item           `json:"items"`
	}
	if err := c.document(ctx, method, path, q, h, &doc); err != nil {
		return nil, err
	}
	doc.Action.Envelope, doc.Action.Items = &doc.Envelope, doc.Items
	return &doc.Action, nil
}

// Find returns the action that was submitted under a Waybill-Request-Id. When there is
// none the error wraps ErrNotFound, which is no permission to repeat (CONTRACT M7).
func (c *Client) Find(ctx context.Context, requestID string) (*Action, error) {
	for a, err := range c.Actions(ctx, Filter{RequestID: requestID, Limit: 1}) {
		if err != nil {
			return nil, err
		}
		return c.Action(ctx, a.InvocationID)
	}
	return nil, fmt.Errorf("client: request id %s: %w", requestID, ErrNotFound)
}

// Actions iterates over this caller's actions, newest first. It ends after an error.
func (c *Client) Actions(ctx context.Context, f Filter) iter.Seq2[*Action, error] {
	return func(yield func(*Action, error) bool) {
		resp, err := c.api(ctx, http.MethodGet, "/v1/actions", f.query(), nil)
		if err != nil {
			yield(nil, err)
			return
		}
		defer func() { _ = resp.Body.Close() }()
		if resp.StatusCode != http.StatusOK {
			yield(nil, apiFailure(resp))
			return
		}
		in := bufio.NewScanner(resp.Body)
		in.Buffer(nil, maxEnvelopeBytes)
		for in.Scan() {
			a := &Action{}
			if err := json.Unmarshal(in.Bytes(), a); err != nil {
				yield(nil, fmt.Errorf("client: list of actions: %w", err))
				return
			}
			if !yield(a, nil) {
				return
			}
		}
		if err := in.Err(); err != nil {
			yield(nil, fmt.Errorf("client: list of actions: %w: %w", ErrUnanswered, err))
		}
	}
}

// Result fetches the stored answer of an action. It never executes anything and may be
// repeated (CONTRACT H3). Where there is no complete result the error is an *Error with
// the envelope: RESULT_PENDING while the action runs, RESULT_EXPIRED, or what the
// action ended with (H10). When the connection breaks while the body is read, the body
// goes on from the last chunk it had whole, on a new one (H4); its error, other than
// io.EOF, is an *Error whose advice is to fetch again.
func (c *Client) Result(ctx context.Context, id string) (*Response, error) {
	resp, f, err := c.openResult(ctx, id)
	if err != nil {
		return nil, err
	}
	r := &Response{Response: resp, InvocationID: id, Facts: f}
	resp.Body = &resumedBody{ReadCloser: resp.Body, c: c, ctx: ctx, r: r, length: resp.ContentLength}
	return r, nil
}

// openResult begins reading a stored result. What tells it from an envelope are
// Waybill's fields: the status is the origin's own in one case and Waybill's in the other.
func (c *Client) openResult(ctx context.Context, id string) (*http.Response, outcome.Facts, error) {
	resp, err := c.api(ctx, http.MethodGet, actionPath(id)+"/result", nil, nil)
	if err != nil {
		return nil, outcome.Facts{}, err
	}
	f, known, ferr := answerFacts(resp.Header)
	if ferr == nil && known && (relayed(f) || f.Code == outcome.CodeDeliveryFailed) && resp.Header.Get(outcome.HeaderInvocation) == id {
		return resp, f, nil
	}
	defer func() { _ = resp.Body.Close() }()
	return nil, outcome.Facts{}, apiFailure(resp)
}

// Ack confirms that this caller has the whole result of an action (CONTRACT H6). It
// matters for how long the result is kept, not for the outcome. Repeating it changes
// nothing.
func (c *Client) Ack(ctx context.Context, id string) error {
	return c.document(ctx, http.MethodPost, actionPath(id)+"/ack", nil, nil, nil)
}

// api sends one request to the caller API. Its errors wrap ErrUnanswered.
func (c *Client) api(ctx context.Context, method, path string, q url.Values, h http.Header) (*http.Response, error) {
	u := *c.proxy
	u.Path, u.RawPath, u.RawQuery = "", "", q.Encode()
	u.Opaque = ""
	req, err := http.NewRequestWithContext(ctx, method, u.String(), nil)
	if err != nil {
		return nil, fmt.Errorf("client: %w", err)
	}
	// The path as written: url.URL would escape it a second time.
	req.URL.Path, req.URL.RawPath = path, path
	if p, err := url.PathUnescape(path); err == nil {
		req.URL.Path = p
	}
	req.Host = apiHost
	maps.Copy(req.Header, h)
	if c.auth != "" {
		req.Header["Authorization"] = []string{c.auth}
	}
	resp, err := c.direct.RoundTrip(req)
	if err != nil {
		return nil, fmt.Errorf("client: %w: %w", ErrUnanswered, err)
	}
	return resp, nil
}

// document asks for one JSON document.
func (c *Client) document(ctx context.Context, method, path string, q url.Values, h http.Header, v any) error {
	resp, err := c.api(ctx, method, path, q, h)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	if resp.StatusCode != http.StatusOK {
		return apiFailure(resp)
	}
	raw, err := io.ReadAll(io.LimitReader(resp.Body, maxDocumentBytes))
	if err != nil {
		return fmt.Errorf("client: %w: %w", ErrUnanswered, err)
	}
	if v == nil {
		return nil
	}
	if err := json.Unmarshal(raw, v); err != nil {
		return fmt.Errorf("client: the answer is not understood: %w", err)
	}
	return nil
}

// apiFailure is an answer of the caller API that is not what was asked for. It comes
// from the proxy itself: its envelope counts without facts in the fields, too, which
// ACTION_NOT_FOUND does not have (CONTRACT M7).
func apiFailure(resp *http.Response) error {
	if _, known, err := answerFacts(resp.Header); known && err == nil {
		return ownAnswer(resp, "")
	}
	body, _ := io.ReadAll(io.LimitReader(resp.Body, maxEnvelopeBytes))
	env, ok := decodeEnvelope(body)
	if !ok || env.Error == nil {
		return fmt.Errorf("client: status %d without an envelope; is it a Waybill proxy?: %w", resp.StatusCode, ErrUnanswered)
	}
	return &Error{Envelope: env, Source: FromBody, Status: resp.StatusCode, Header: resp.Header, Body: body, RetryAfter: retryAfter(resp.Header)}
}

// asking is how the action of a submission is found after a loss: by its request id, or,
// where its id is known, by that.
func (c *Client) asking(requestID, id string) func(context.Context) (*Action, error) {
	return func(ctx context.Context) (*Action, error) {
		if id != "" {
			return c.Action(ctx, id)
		}
		return c.Find(ctx, requestID)
	}
}

// lost finds out what became of a submission whose connection was lost. Nothing is
// sent again; only the stored answer may be fetched (Options.FetchLost). id is the
// action, where it is known.
func (c *Client) lost(ctx context.Context, requestID, id string, cause error) (*Response, *Error) {
	e := c.afterLoss(ctx, requestID, id, cause)
	if f := e.Facts(); !c.o.FetchLost || f.Code != outcome.CodeDeliveryFailed || e.Envelope.InvocationID == "" {
		return nil, e
	}
	r, err := c.Result(ctx, e.Envelope.InvocationID)
	if err != nil {
		return nil, e
	}
	r.RequestID, r.Fetched = requestID, true
	return r, nil
}

// afterLoss asks for the action of a submission. What cannot be found out is unknown:
// the request was handed over.
func (c *Client) afterLoss(ctx context.Context, requestID, id string, cause error) *Error {
	unknown := func(code outcome.Code, reason, detail string, cause error) *Error {
		f := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: code}
		e := clientError(requestID, f, reason, detail, cause)
		if id != "" {
			e.Envelope = outcome.NewEnvelope(id, f, detail, e.Envelope.Evidence)
		}
		return e
	}
	if ctx.Err() != nil {
		// Leaving is no undo (CONTRACT F5): the proxy goes on with what it dispatched.
		return unknown(outcome.CodeCallerCancelled, "caller_gone", "The caller left before the answer came; the proxy goes on with what it has sent.", context.Cause(ctx))
	}
	c.o.Logger.Warn("connection to the proxy lost; asking for the action", slog.String("request_id", requestID), slog.String("action", id))
	a, err := c.ask(ctx, c.asking(requestID, id))
	switch {
	case a != nil:
		return &Error{Envelope: fetchable(*a.Envelope), Source: FromRecord, RequestID: requestID, Err: errors.Join(ErrLost, cause)}
	case errors.Is(err, ErrNotFound):
		return unknown(outcome.CodeRemoteOutcomeUnknown, "action_not_found", "The connection to the proxy was lost, and the proxy has no record of the request; that proves nothing.", errors.Join(ErrLost, ErrNotFound, cause))
	default:
		return unknown(outcome.CodeRemoteOutcomeUnknown, "proxy_unanswered", "The connection to the proxy was lost, and the proxy could not be asked about the request.", errors.Join(ErrLost, ErrUnanswered, cause))
	}
}

// ask looks for an action after a loss. The proxy may be starting again,
// the request may still be on its way to a record, and the action may still run: ask
// waits for each, within AskFor and SettleFor. An action that still runs in the end is
// returned as it is.
func (c *Client) ask(ctx context.Context, look func(context.Context) (*Action, error)) (*Action, error) {
	ctx, cancel := context.WithTimeout(ctx, c.o.AskFor)
	defer cancel()
	var (
		last    *Action
		missing time.Time // since when the proxy answers that it knows no such action
	)
	for delay := firstAsk; ; delay = min(2*delay, lastAsk) {
		a, err := look(ctx)
		switch {
		case err == nil && a.Ended:
			return a, nil
		case err == nil:
			last = a
		case !errors.Is(err, ErrNotFound):
			missing = time.Time{}
		case missing.IsZero():
			missing = time.Now()
		case time.Since(missing) >= c.o.SettleFor:
			return last, err
		}
		if !sleep(ctx, delay) {
			if last == nil && !missing.IsZero() {
				return nil, ErrNotFound
			}
			return last, err
		}
	}
}
