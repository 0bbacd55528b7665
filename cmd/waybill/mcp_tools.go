package main

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"waybill/client"
	"waybill/dispatch"
	"waybill/outcome"
	"waybill/routes"
)

// mcpInstructions are shown to the model once.
const mcpInstructions = `Requests go through Waybill, which adds the credentials: never put secrets into a request.
Every failure says in its first sentence what may be done now. "Outcome unknown: do not repeat" means that the request may have taken effect: find out what happened at the other side before anything else. Only an outcome of not_attempted or rejected means that nothing was done. A cancelled call is not undone. reconcile asks the other side, where the route knows how. "Waiting for approval" means that a person was asked: wait with get_action and wait_seconds, and do not send it again. Results stay fetchable by the invocation id; request ids lead to the action when a call was interrupted (get_action).`

// mcpTools are the tools of "waybill mcp". All go through one session's client.
type mcpTools struct {
	client        *client.Client
	caller        string // the session's name, as routes know it
	snapshot      func() (*routes.Snapshot, error)
	progressEvery time.Duration
}

// server returns an MCP server with the tools.
func (m *mcpTools) server() *mcp.Server {
	s := mcp.NewServer(&mcp.Implementation{Name: "waybill", Title: "Waybill", Version: readBuildInfo().Version},
		&mcp.ServerOptions{Instructions: mcpInstructions, Capabilities: &mcp.ServerCapabilities{}})
	yes, no := true, false
	reading := func(title string) *mcp.ToolAnnotations {
		return &mcp.ToolAnnotations{Title: title, ReadOnlyHint: true, IdempotentHint: true, DestructiveHint: &no, OpenWorldHint: &no}
	}
	addTool(s, &mcp.Tool{
		Name: "http_request",
		Description: "Send one HTTP request through the proxy, which adds the credentials of the route. Returns the complete answer, or the envelope that says where it stopped, " +
			"what is known about the remote side, and what may be done now. It repeats by itself only what is safe to repeat. Redirects are not followed.",
		// What a request does is the origin's affair: it may change the world, and to send
		// it twice may do so twice.
		Annotations: &mcp.ToolAnnotations{Title: "Send an HTTP request", DestructiveHint: &yes, OpenWorldHint: &yes},
		InputSchema: requestSchema(), OutputSchema: answerSchema(),
	}, m.httpRequest)
	addTool(s, &mcp.Tool{
		Name: "ssh_exec",
		Description: "Run one command over SSH through the proxy, which holds the key. Returns exit status and output of a command that came to its end, or the envelope that says where it stopped, " +
			"what is known about the remote side, and what may be done now. Only what the route calls repeatable is repeated.",
		Annotations: &mcp.ToolAnnotations{Title: "Run a command over SSH", DestructiveHint: &yes, OpenWorldHint: &yes},
		InputSchema: execSchema(), OutputSchema: execAnswerSchema(),
	}, m.sshExec)
	addTool(s, &mcp.Tool{
		Name: "reconcile",
		Description: "Find out what became of an action whose outcome is unknown: the proxy asks the other side with the query that the route names, and returns the action as it is then, resolved or still unknown. " +
			"It repeats nothing.",
		// It changes what is known, not the world; what it sends is a query.
		Annotations: &mcp.ToolAnnotations{Title: "Ask what became of an action", IdempotentHint: true, DestructiveHint: &no, OpenWorldHint: &yes},
		InputSchema: followUpSchema(), OutputSchema: recordSchema(),
	}, m.reconcile)
	addTool(s, &mcp.Tool{
		Name: "retry_action",
		Description: "Make a further attempt of an action with the request that the proxy kept of it, if its own advice allows one (retry: backoff or same_idempotency_key). Anything else is refused with RETRY_REFUSED; " +
			"then nothing was sent, and the envelope says what the action is.",
		Annotations: &mcp.ToolAnnotations{Title: "Repeat an action where that is safe", DestructiveHint: &yes, OpenWorldHint: &yes},
		InputSchema: followUpSchema(), OutputSchema: recordSchema(),
	}, m.retryAction)
	addTool(s, &mcp.Tool{
		Name: "get_action",
		Description: "What is on record about one action, by its invocation id or by the request id of the call: facts, evidence, and what may be done now. Sends nothing. " +
			"With wait_seconds it waits for the end of one that runs, that a person has to approve, or that follows a job.",
		Annotations: reading("Read an action"), InputSchema: actionSchema(), OutputSchema: recordSchema(),
	}, m.getAction)
	addTool(s, &mcp.Tool{
		Name:        "fetch_result",
		Description: "Fetch the stored answer of an action. It never executes anything and can be repeated. A large body comes in parts: go on from next_offset.",
		Annotations: reading("Fetch a stored result"), InputSchema: fetchSchema(), OutputSchema: fetchedSchema(),
	}, m.fetchResult)
	addTool(s, &mcp.Tool{
		Name:        "list_actions",
		Description: "List this session's actions, newest first. Sends nothing.",
		Annotations: reading("List actions"), InputSchema: listSchema(), OutputSchema: listedSchema(),
	}, m.listActions)
	addTool(s, &mcp.Tool{
		Name:        "explain_route",
		Description: "What the configuration makes of a request, without sending it: the route, the places where something is injected, whether it may be repeated, and the advice for each point at which it could stop.",
		Annotations: reading("Explain a route"), InputSchema: explainSchema(), OutputSchema: explainedSchema(),
	}, m.explainRoute)
	return s
}

// failed is the structured content of every failure: the envelope is the error data
// (CONTRACT L6).
type failed struct {
	Envelope  outcome.Envelope `json:"envelope"`
	RequestID string           `json:"request_id,omitempty"`
	// Source says where the envelope is from: body, fields, record or client.
	Source            string `json:"source,omitempty"`
	RetryAfterSeconds int    `json:"retry_after_seconds,omitempty"`
}

// toolAnswer is what a tool returns: structured content, and whether it is a failure.
type toolAnswer struct {
	structured any
	failure    bool
	text       string // what comes first for those who read text only
}

// addTool registers a tool whose arguments are decoded strictly. The SDK's own typed
// tools validate their output after the work is done and would answer a mistake in a
// schema with an error – in place of the result of something that has happened.
func addTool[In any](s *mcp.Server, t *mcp.Tool, f func(context.Context, *mcp.CallToolRequest, In) (*toolAnswer, error)) {
	s.AddTool(t, func(ctx context.Context, req *mcp.CallToolRequest) (*mcp.CallToolResult, error) {
		var in In
		answer, err := (*toolAnswer)(nil), decodeArguments(req.Params.Arguments, &in)
		if err == nil {
			answer, err = f(ctx, req, in)
		}
		if err != nil {
			answer = failure(err)
		}
		raw, err := json.Marshal(answer.structured)
		if err != nil {
			return nil, fmt.Errorf("result: %w", err)
		}
		res := &mcp.CallToolResult{StructuredContent: json.RawMessage(raw), IsError: answer.failure}
		if answer.text != "" {
			res.Content = append(res.Content, &mcp.TextContent{Text: answer.text})
		}
		res.Content = append(res.Content, &mcp.TextContent{Text: string(raw)})
		return res, nil
	})
}

// argumentError is a mistake in a tool's arguments, with the path of the field (CONTRACT B2).
type argumentError struct{ field, detail string }

func (e *argumentError) Error() string { return e.detail }

func badArgument(field, detail string) error { return &argumentError{"arguments." + field, detail} }

func decodeArguments(raw json.RawMessage, in any) error {
	if len(raw) == 0 {
		raw = json.RawMessage("{}")
	}
	dec := json.NewDecoder(bytes.NewReader(raw))
	dec.DisallowUnknownFields()
	err := dec.Decode(in)
	var typed *json.UnmarshalTypeError
	switch {
	case err == nil:
		return nil
	case errors.As(err, &typed):
		return badArgument(typed.Field, "The argument has another type than the tool's schema says.")
	case errors.Is(err, outcome.ErrUnknownValue):
		return &argumentError{"arguments", "An argument has a value that is not in the tool's schema."}
	default:
		return &argumentError{"arguments", "The arguments do not fit the tool's schema; an unknown name is not taken."}
	}
}

// failure turns an error into the answer of a tool.
func failure(err error) *toolAnswer {
	var (
		e   *client.Error
		arg *argumentError
	)
	local := func(f outcome.Facts, ev outcome.Evidence, detail string) *toolAnswer {
		env := outcome.NewEnvelope("", f, detail, ev)
		return &toolAnswer{structured: failed{Envelope: env, Source: client.FromClient.String()}, failure: true, text: env.Message}
	}
	invalid, _ := outcome.Of(outcome.CodeInvalidRequest)
	switch {
	case errors.As(err, &e):
		out := failed{Envelope: e.Envelope, RequestID: e.RequestID, Source: e.Source.String(), RetryAfterSeconds: int((e.RetryAfter + time.Second - 1) / time.Second)}
		text := e.Envelope.Message
		switch {
		case e.Envelope.InvocationID == "" && e.RequestID != "":
			text += " Ask for it with get_action and request_id " + e.RequestID + "."
		case e.Facts().Code == outcome.CodeApprovalPending:
			text += approvalHint(e.Envelope.InvocationID)
		}
		if e.Last != nil {
			text += lastRepeat(e.Last)
		}
		return &toolAnswer{structured: out, failure: true, text: text}
	case errors.As(err, &arg):
		return local(invalid, outcome.Evidence{Field: arg.field, Reason: "bad_argument"}, arg.detail)
	case errors.Is(err, client.ErrNotFound):
		return local(outcome.Facts{Code: outcome.CodeActionNotFound}, outcome.Evidence{}, "")
	case errors.Is(err, client.ErrOption), errors.Is(err, client.ErrSupersedes):
		return local(invalid, outcome.Evidence{Reason: "bad_argument"}, err.Error())
	case errors.Is(err, client.ErrUnanswered):
		// Of a reading tool: nothing was asked of any remote side.
		f := outcome.Facts{Phase: outcome.ConnectionSetup, Outcome: outcome.NotAttempted, Retry: outcome.Backoff, Code: outcome.CodeConnectionLost}
		return local(f, outcome.Evidence{Reason: "proxy_unreachable"}, "The proxy does not answer; nothing was read.")
	}
	internal := outcome.Facts{Phase: outcome.Validation, Outcome: outcome.NotAttempted, Retry: outcome.Never, Code: outcome.CodeInternal}
	if errors.Is(err, errNoConfiguration) {
		return local(internal, outcome.Evidence{Reason: "configuration"}, "The configuration cannot be read; \"waybill check\" tells a person why.")
	}
	return local(internal, outcome.Evidence{}, err.Error())
}

// lastRepeat says what the last repeat of a call came to whose outcome is that of an
// earlier request (CONTRACT A9, A10).
func lastRepeat(e *client.Error) string {
	f := e.Facts()
	switch {
	case f.Outcome == outcome.NotAttempted:
		return " The last repeat did nothing: " + f.Code.String() + "."
	case e.Envelope.InvocationID == "":
		return " The last repeat was answered without Waybill, which says nothing of this one."
	case e.Status != 0:
		return fmt.Sprintf(" The last repeat, %s, was refused, which says nothing of this one: %s, status %d.", e.Envelope.InvocationID, f.Code, e.Status)
	default:
		return fmt.Sprintf(" The last repeat, %s, was refused, which says nothing of this one: %s.", e.Envelope.InvocationID, f.Code)
	}
}

// Sizes of bodies in answers, in bytes: the model's context is small, and the rest is
// there to be fetched.
const (
	defaultBodyBytes = 100 << 10
	maxBodyBytes     = 8 << 20
)

// timeoutGrace is how much longer than the proxy this side waits: less than a second, so
// that the proxy is told whole seconds no more than were asked for.
const timeoutGrace = 500 * time.Millisecond

// requestInput are the arguments of http_request.
type requestInput struct {
	Method         string            `json:"method"`
	URL            string            `json:"url"`
	Headers        map[string]string `json:"headers"`
	Body           string            `json:"body"`
	BodyBase64     string            `json:"body_base64"`
	TimeoutSeconds int               `json:"timeout_seconds"`
	RequestID      string            `json:"request_id"`
	MaxBodyBytes   int               `json:"max_body_bytes"`
	UnsafeRepeat   *unsafeRepeat     `json:"unsafe_repeat"`
}

// answer is an origin's complete answer as structured content.
type answer struct {
	InvocationID string          `json:"invocation_id,omitempty"`
	RequestID    string          `json:"request_id,omitempty"`
	Phase        string          `json:"phase,omitempty"`
	Outcome      string          `json:"outcome,omitempty"`
	Retry        string          `json:"retry,omitempty"`
	Code         outcome.Code    `json:"code,omitempty"`
	Status       int             `json:"status"`
	Headers      http.Header     `json:"headers"`
	Body         *string         `json:"body,omitempty"`
	BodyBase64   string          `json:"body_base64,omitempty"`
	BodyBytes    int64           `json:"body_bytes"` // of the whole body
	Offset       int64           `json:"offset,omitempty"`
	NextOffset   int64           `json:"next_offset,omitempty"` // 0: the body ends here
	Job          string          `json:"job,omitempty"`
	Replayed     string          `json:"replayed,omitempty"`
	Submissions  int             `json:"submissions,omitempty"`
	Envelope     json.RawMessage `json:"envelope,omitempty"` // of an answer that is no success
}

func (m *mcpTools) httpRequest(ctx context.Context, call *mcp.CallToolRequest, in requestInput) (*toolAnswer, error) {
	req, opts, err := in.request(ctx)
	if err != nil {
		return nil, err
	}
	if in.TimeoutSeconds > 0 {
		// The client tells the proxy, which ends the waiting with an envelope; this side
		// only makes sure of it.
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(in.TimeoutSeconds)*time.Second+timeoutGrace)
		defer cancel()
		req = req.WithContext(ctx)
	}
	stop := m.progress(ctx, call, "Sending; request id "+in.RequestID, in.RequestID, "")
	defer stop()
	resp, err := m.client.Do(req, opts...)
	if err != nil {
		return nil, m.whole(ctx, err)
	}
	return m.answer(ctx, resp, 0, in.MaxBodyBytes)
}

// newRequestID is the request id of a call whose arguments have none, known before it
// is sent so that its progress can be told.
func newRequestID() string { return "mcp_" + strings.ToLower(randomText()) }

func (in *requestInput) request(ctx context.Context) (*http.Request, []client.CallOption, error) {
	if in.Method == "" {
		in.Method = http.MethodGet
	}
	switch {
	case in.URL == "":
		return nil, nil, badArgument("url", "The URL is missing.")
	case in.Body != "" && in.BodyBase64 != "":
		return nil, nil, badArgument("body_base64", "Give body or body_base64, not both.")
	case in.TimeoutSeconds < 0 || in.TimeoutSeconds > 86400:
		return nil, nil, badArgument("timeout_seconds", "Whole seconds from 1 to 86400.")
	case in.MaxBodyBytes < 0 || in.MaxBodyBytes > maxBodyBytes:
		return nil, nil, badArgument("max_body_bytes", fmt.Sprintf("From 1 to %d.", maxBodyBytes))
	}
	body := []byte(in.Body)
	if in.BodyBase64 != "" {
		var err error
		if body, err = base64.StdEncoding.DecodeString(in.BodyBase64); err != nil {
			return nil, nil, badArgument("body_base64", "It is not base64.")
		}
	}
	var r io.Reader
	if len(body) > 0 {
		r = bytes.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, in.Method, in.URL, r)
	if err != nil || req.URL.Host == "" {
		// The URL is not repeated: its query may hold secrets.
		return nil, nil, badArgument("url", "Method or URL cannot be used; write for example GET and https://host/path.")
	}
	if req.URL.User != nil {
		return nil, nil, badArgument("url", "The URL must not carry a user name or password; Waybill adds credentials.")
	}
	for name, v := range in.Headers {
		switch {
		case strings.EqualFold(name, "Upgrade"):
			return nil, nil, badArgument("headers.upgrade", "This tool carries no protocol upgrades.")
		case strings.EqualFold(name, "Host"):
			return nil, nil, badArgument("headers.host", "The host is that of the URL.")
		case outcome.IsMemberField(name):
			return nil, nil, badArgument("headers."+strings.ToLower(name), "Fields of Waybill's own are arguments of this tool: request_id, timeout_seconds, unsafe_repeat.")
		}
		req.Header.Set(name, v)
	}
	if in.RequestID == "" {
		in.RequestID = newRequestID()
	}
	opts := []client.CallOption{client.RequestID(in.RequestID)}
	if u := in.UnsafeRepeat; u != nil {
		opts = append(opts, client.UnsafeRepeat(u.InvocationID, u.Reason))
	}
	return req, opts, nil
}

// progress tells a host that asked for it how a long call stands, until stop. What it
// tells first is how to find the action again, should the pipe break. The action is that
// of an id or, where there is none yet, of a request id.
func (m *mcpTools) progress(ctx context.Context, call *mcp.CallToolRequest, begin, requestID, id string) (stop func()) {
	token := call.Params.GetProgressToken()
	if token == nil {
		return func() {}
	}
	ctx, cancel := context.WithCancel(ctx)
	done := make(chan struct{})
	tell := func(n int, text string) {
		_ = call.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: token, Progress: float64(n), Message: text})
	}
	go func() {
		defer close(done)
		tell(0, begin)
		tick := time.NewTicker(m.progressEvery)
		defer tick.Stop()
		start := time.Now()
		for n := 1; ; n++ {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			tell(n, fmt.Sprintf("%s; %ds", m.standing(ctx, requestID, id), int(time.Since(start).Seconds())))
		}
	}()
	return func() {
		cancel()
		<-done
	}
}

// standing says how an action stands, for progress.
func (m *mcpTools) standing(ctx context.Context, requestID, id string) string {
	var (
		a   *client.Action
		err error
	)
	if id != "" {
		a, err = m.client.Action(ctx, id)
	} else {
		a, err = m.client.Find(ctx, requestID)
	}
	switch {
	case err != nil && id != "":
		return "Under way; action " + id
	case err != nil:
		return "On its way; request id " + requestID
	case a.Facts().Code == outcome.CodeApprovalPending:
		return "Waits for a person's approval; action " + a.InvocationID
	case !a.DispatchStarted:
		return "Not dispatched yet; action " + a.InvocationID
	case a.Ended:
		return "Answered; action " + a.InvocationID
	case a.Link != nil && a.Link.Kind == "job":
		return "The job is not done yet; action " + a.InvocationID
	default:
		return "Dispatched, no answer yet; action " + a.InvocationID
	}
}

// approvalHint tells what to do about an action that waits for a person.
func approvalHint(id string) string {
	return " A person was asked to approve it: get_action with invocation_id " + id + " and wait_seconds waits for the decision, fetch_result has the answer then."
}

// jobHint tells how to follow a job that was accepted.
func jobHint(id string) string {
	return " The work is done later; its outcome is that of action " + id + ": get_action with wait_seconds waits for it, fetch_result has its last state."
}

// whole fills in the evidence of an envelope that came in fields only.
func (m *mcpTools) whole(ctx context.Context, err error) error {
	var e *client.Error
	if errors.As(err, &e) && e.Source == client.FromFields && e.Envelope.InvocationID != "" {
		if a, aerr := m.client.Action(ctx, e.Envelope.InvocationID); aerr == nil && a.Envelope.Facts() == e.Facts() {
			e.Envelope, e.Source = *a.Envelope, client.FromRecord
		}
	}
	return err
}

// answer reads the answer to its end – so that what is shown is complete, or said to be
// a part (CONTRACT G3) – and shows limit bytes from offset on.
func (m *mcpTools) answer(ctx context.Context, resp *client.Response, offset int64, limit int) (*toolAnswer, error) {
	defer func() { _ = resp.Body.Close() }()
	if limit == 0 {
		limit = defaultBodyBytes
	}
	out := answer{
		InvocationID: resp.InvocationID, RequestID: resp.RequestID, Status: resp.StatusCode, Headers: resp.Header,
		Replayed: resp.Replayed, Submissions: resp.Submissions, Offset: offset, Job: resp.Job,
	}
	skipped, err := io.CopyN(io.Discard, resp.Body, offset)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	part, err := io.ReadAll(io.LimitReader(resp.Body, int64(limit)))
	if err != nil {
		return nil, err
	}
	rest, err := io.Copy(io.Discard, resp.Body)
	if err != nil {
		return nil, err
	}
	out.BodyBytes = skipped + int64(len(part)) + rest
	if rest > 0 {
		if text := wholeRunes(part); len(text) > 0 {
			part = text
		}
		out.NextOffset = skipped + int64(len(part))
	}
	if utf8.Valid(part) {
		text := string(part)
		out.Body = &text
	} else {
		out.BodyBase64 = base64.StdEncoding.EncodeToString(part)
	}
	f := resp.Final()
	if f.Outcome == outcome.Unknown && f.Code == outcome.CodeNone {
		// A streamed answer without its trailer; the record has what it says (H9).
		if rec, err := m.client.Action(ctx, resp.InvocationID); err == nil {
			f = rec.Facts()
		}
	}
	a := &toolAnswer{}
	if resp.InvocationID != "" {
		out.Phase, out.Outcome, out.Retry, out.Code = f.Phase.String(), f.Outcome.String(), f.Retry.String(), f.Code
	}
	var e *client.Error
	if err := resp.Err(); errors.As(m.whole(ctx, err), &e) {
		if out.Envelope, err = json.Marshal(e.Envelope); err != nil {
			return nil, err
		}
		a.failure, a.text = true, e.Envelope.Message
	}
	a.failure = a.failure || resp.StatusCode >= http.StatusBadRequest
	if resp.Job != "" {
		a.text = strings.TrimSpace(a.text + jobHint(resp.Job))
	}
	if out.NextOffset > 0 {
		a.text = strings.TrimSpace(fmt.Sprintf("%s This is a part of the body: bytes %d to %d of %d. fetch_result with offset %d goes on.", a.text, skipped, out.NextOffset, out.BodyBytes, out.NextOffset))
	}
	a.structured = out
	return a, nil
}

// wholeRunes drops the beginning of a character that a limit cut, so that text stays text.
func wholeRunes(b []byte) []byte {
	for i := 1; i < utf8.UTFMax && i <= len(b); i++ {
		if c := b[len(b)-i]; utf8.RuneStart(c) {
			if i > 1 && !utf8.FullRune(b[len(b)-i:]) || i == 1 && c >= utf8.RuneSelf {
				return b[:len(b)-i]
			}
			break
		}
	}
	return b
}

// actionInput are the arguments of get_action.
type actionInput struct {
	InvocationID string `json:"invocation_id"`
	RequestID    string `json:"request_id"`
	WaitSeconds  int    `json:"wait_seconds"`
}

// recorded is the structured content of tools that return an action.
type recorded struct {
	Action   *client.Action   `json:"action"`
	Envelope outcome.Envelope `json:"envelope"`
	Items    []client.Item    `json:"items,omitempty"`
}

// record shows an action, with what follows from its evidence.
func record(a *client.Action) *toolAnswer {
	shown := *a
	out := recorded{Action: &shown, Envelope: *a.Envelope, Items: a.Items}
	shown.Envelope, shown.Items = nil, nil
	text := out.Envelope.Message
	if a.Facts().Code == outcome.CodeApprovalPending {
		text += approvalHint(a.InvocationID)
	}
	if job := out.Envelope.Evidence.Job; job != nil && job.Action != "" && job.Action != a.InvocationID && job.State == string(dispatch.JobPending) {
		text = strings.TrimSpace(text + jobHint(job.Action))
	}
	return &toolAnswer{structured: out, text: text}
}

func (m *mcpTools) getAction(ctx context.Context, call *mcp.CallToolRequest, in actionInput) (*toolAnswer, error) {
	var (
		a   *client.Action
		err error
	)
	switch {
	case (in.InvocationID == "") == (in.RequestID == ""):
		return nil, badArgument("invocation_id", "Give invocation_id or request_id.")
	case in.WaitSeconds < 0 || in.WaitSeconds > maxWaitSeconds:
		return nil, badArgument("wait_seconds", fmt.Sprintf("From 1 to %d.", maxWaitSeconds))
	case in.InvocationID != "":
		a, err = m.client.Action(ctx, in.InvocationID)
	default:
		a, err = m.client.Find(ctx, in.RequestID)
	}
	if err != nil {
		return nil, err
	}
	if in.WaitSeconds > 0 && !a.Ended {
		stop := m.progress(ctx, call, "Waiting for action "+a.InvocationID, "", a.InvocationID)
		defer stop()
		until, cancel := context.WithTimeout(ctx, time.Duration(in.WaitSeconds)*time.Second)
		defer cancel()
		// That the time is over is no failure: the action is as it is.
		switch waited, err := m.client.Wait(until, a.InvocationID); {
		case waited != nil && (err == nil || until.Err() != nil):
			a = waited
		case err != nil && until.Err() == nil:
			return nil, err
		}
	}
	return record(a), nil
}

// fetchInput are the arguments of fetch_result.
type fetchInput struct {
	InvocationID string `json:"invocation_id"`
	Offset       int64  `json:"offset"`
	MaxBodyBytes int    `json:"max_body_bytes"`
}

func (m *mcpTools) fetchResult(ctx context.Context, _ *mcp.CallToolRequest, in fetchInput) (*toolAnswer, error) {
	switch {
	case in.InvocationID == "":
		return nil, badArgument("invocation_id", "The invocation id is missing.")
	case in.Offset < 0:
		return nil, badArgument("offset", "Not negative.")
	case in.MaxBodyBytes < 0 || in.MaxBodyBytes > maxBodyBytes:
		return nil, badArgument("max_body_bytes", fmt.Sprintf("From 1 to %d.", maxBodyBytes))
	}
	a, err := m.client.Action(ctx, in.InvocationID)
	if err != nil {
		return nil, err
	}
	if a.Method == execMethod && a.Ended {
		r, err := m.client.Output(ctx, in.InvocationID)
		if err != nil {
			return nil, err
		}
		return execResult(r, in.Offset, in.MaxBodyBytes)
	}
	resp, err := m.client.Result(ctx, in.InvocationID)
	if err != nil {
		return nil, err
	}
	return m.answer(ctx, resp, in.Offset, in.MaxBodyBytes)
}

// listInput are the arguments of list_actions. Absent ones pick everything.
type listInput struct {
	Outcome   outcome.Outcome `json:"outcome"`
	Code      outcome.Code    `json:"code"`
	Route     string          `json:"route"`
	RequestID string          `json:"request_id"`
	Since     time.Time       `json:"since"`
	OpenOnly  bool            `json:"open_only"`
	Limit     int             `json:"limit"`
}

// defaultListed is how many actions are listed without a limit.
const defaultListed = 20

func (m *mcpTools) listActions(ctx context.Context, _ *mcp.CallToolRequest, in listInput) (*toolAnswer, error) {
	if in.Limit < 0 || in.Limit > 1000 {
		return nil, badArgument("limit", "From 1 to 1000.")
	}
	if in.Limit == 0 {
		in.Limit = defaultListed
	}
	all := []*client.Action{}
	for a, err := range m.client.Actions(ctx, client.Filter{
		Outcome: in.Outcome, Code: in.Code, Route: in.Route, RequestID: in.RequestID, Since: in.Since, OpenOnly: in.OpenOnly, Limit: in.Limit,
	}) {
		if err != nil {
			return nil, err
		}
		all = append(all, a)
	}
	return &toolAnswer{structured: map[string]any{"actions": all}}, nil
}

// explainInput are the arguments of explain_route.
type explainInput struct {
	Method string `json:"method"`
	URL    string `json:"url"`
}

// errNoConfiguration has no cause: it would quote the configuration, which is no agent's matter.
var errNoConfiguration = errors.New("the configuration cannot be read")

func (m *mcpTools) explainRoute(_ context.Context, _ *mcp.CallToolRequest, in explainInput) (*toolAnswer, error) {
	if in.URL == "" {
		return nil, badArgument("url", "The URL is missing.")
	}
	if in.Method == "" {
		in.Method = http.MethodGet
	}
	s, err := m.snapshot()
	if err != nil {
		return nil, errNoConfiguration
	}
	method := strings.ToUpper(in.Method)
	// An agent asks: what the configuration keeps from callers is not for it (CONTRACT V4).
	e, err := s.ExplainFor(m.caller, method, in.URL)
	if err != nil {
		return nil, badArgument("url", "It is not a URL that a route could take; write for example https://host/path.")
	}
	return &toolAnswer{structured: explain(s, method, e)}, nil
}
