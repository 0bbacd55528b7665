package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"syscall"
	"time"

	"waybill/dispatch"
	"waybill/outcome"
)

// adminClient talks to a running proxy over its admin socket.
type adminClient struct {
	path string
	http *http.Client
}

// errNotRunning says that nobody listens on the admin socket.
var errNotRunning = errors.New("no proxy runs")

// dialAdmin connects to the admin socket at path. It returns errNotRunning when
// there is none, or one that a killed process left behind.
func dialAdmin(ctx context.Context, path string) (*adminClient, error) {
	dial := func(ctx context.Context) (net.Conn, error) {
		d := net.Dialer{Timeout: 5 * time.Second}
		return d.DialContext(ctx, "unix", path)
	}
	conn, err := dial(ctx)
	switch {
	case noFile(err), errors.Is(err, syscall.ECONNREFUSED):
		return nil, errNotRunning
	case err != nil:
		return nil, fail(exitUnavailable, "admin socket %s: %w", path, err)
	}
	_ = conn.Close()
	return &adminClient{path: path, http: &http.Client{
		Transport: &http.Transport{
			DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
			DisableCompression: true, // a stored result is given out as it was stored
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}}, nil
}

// do sends one request. The caller closes the body.
func (c *adminClient) do(ctx context.Context, method, path string, query url.Values, body any) (*http.Response, error) {
	u := "http://waybill" + path
	if len(query) > 0 {
		u += "?" + query.Encode()
	}
	var payload io.Reader
	if body != nil {
		data, err := json.Marshal(body)
		if err != nil {
			return nil, err
		}
		payload = bytes.NewReader(data)
	}
	req, err := http.NewRequestWithContext(ctx, method, u, payload)
	if err != nil {
		return nil, err
	}
	if body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, fail(exitUnavailable, "the proxy at %s stopped answering: %w", c.path, err)
	}
	return resp, nil
}

// maxAdminDocument bounds one JSON document from the admin socket.
const maxAdminDocument = 64 << 20

// get decodes the JSON answer of a request into v.
func (c *adminClient) get(ctx context.Context, method, path string, query url.Values, body, v any) error {
	resp, err := c.do(ctx, method, path, query, body)
	if err != nil {
		return err
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAdminDocument))
	if err != nil {
		return fail(exitUnavailable, "the proxy at %s stopped answering: %w", c.path, err)
	}
	if resp.StatusCode >= 300 {
		return adminError(resp.StatusCode, data)
	}
	if v == nil || len(data) == 0 {
		return nil
	}
	if err := json.Unmarshal(data, v); err != nil {
		return fail(exitFailure, "answer of the proxy at %s: %w; is it of another version?", c.path, err)
	}
	return nil
}

// adminError turns a refusal of the admin API into an error with an exit code.
func adminError(status int, body []byte) error {
	var env outcome.Envelope
	if json.Unmarshal(body, &env) == nil && env.Error != nil {
		code := exitFailure
		if env.Error.Code == outcome.CodeActionNotFound {
			code = exitNotFound
		}
		return fail(code, "%s: %s", env.Error.Code, env.Error.Message)
	}
	if status == http.StatusNotFound {
		return fail(exitNotFound, "%s", outcome.CodeActionNotFound)
	}
	return fail(exitFailure, "the proxy answered %d to a reading command; is it of another version?", status)
}

// proxyStatus is GET /v1/status.
type proxyStatus struct {
	Version  string `json:"version"`
	PID      int    `json:"pid"`
	Proxy    string `json:"proxy"`
	ProxyTLS bool   `json:"proxy_tls,omitempty"` // callers of the proxy speak TLS
	SSH      string `json:"ssh,omitempty"`
	Metrics  string `json:"metrics"`
	Data     string `json:"data"`
	Snapshot string `json:"snapshot"`
	Draining bool   `json:"draining,omitempty"`
	moreStatus
}

// proxyURL is the URL of the proxy at which it is reached from this machine.
func (s proxyStatus) proxyURL() string {
	if s.ProxyTLS {
		return "https://" + reachable(s.Proxy)
	}
	return "http://" + reachable(s.Proxy)
}

func (c *adminClient) status(ctx context.Context) (proxyStatus, error) {
	var s proxyStatus
	err := c.get(ctx, http.MethodGet, "/v1/status", nil, nil, &s)
	return s, err
}

// session is what POST /v1/sessions returns. Token is a bearer secret of this
// machine's proxy: it goes into the child's environment and nowhere else.
type session struct {
	ID       string `json:"id"`
	Token    string `json:"token"`
	ProxyURL string `json:"proxy_url"`
}

// caller is the identity of the session's actions (proxy.Callers).
func (s session) caller() string { return "session:" + s.ID }

func (c *adminClient) openSession(ctx context.Context, name string) (session, error) {
	var s session
	err := c.get(ctx, http.MethodPost, "/v1/sessions", nil, map[string]string{"name": name}, &s)
	return s, err
}

func (c *adminClient) closeSession(ctx context.Context, id string) error {
	return c.get(ctx, http.MethodDelete, "/v1/sessions/"+url.PathEscape(id), nil, nil, nil)
}

// Actions implements reader.
func (c *adminClient) Actions(ctx context.Context, f dispatch.Filter) iter.Seq2[dispatch.ActionView, error] {
	q := url.Values{}
	set := func(name, v string) {
		if v != "" {
			q.Set(name, v)
		}
	}
	set("caller", f.Caller)
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
		set("since", f.Since.Format(time.RFC3339Nano))
	}
	if f.OpenOnly {
		set("open", "1")
	}
	if f.Limit > 0 {
		set("limit", strconv.Itoa(f.Limit))
	}
	return c.lines(ctx, "/v1/actions", q)
}

// Tail implements reader: it ends when ctx ends or the proxy does.
func (c *adminClient) Tail(ctx context.Context) iter.Seq2[dispatch.ActionView, error] {
	return c.lines(ctx, "/v1/tail", nil)
}

// lines reads JSON lines of action views.
func (c *adminClient) lines(ctx context.Context, path string, q url.Values) iter.Seq2[dispatch.ActionView, error] {
	return func(yield func(dispatch.ActionView, error) bool) {
		resp, err := c.do(ctx, http.MethodGet, path, q, nil)
		if err != nil {
			yield(dispatch.ActionView{}, err)
			return
		}
		defer func() { _ = resp.Body.Close() }()
		if resp.StatusCode != http.StatusOK {
			data, _ := io.ReadAll(io.LimitReader(resp.Body, maxAdminDocument))
			yield(dispatch.ActionView{}, adminError(resp.StatusCode, data))
			return
		}
		in := bufio.NewReader(resp.Body)
		for {
			line, err := in.ReadBytes('\n')
			if len(bytes.TrimSpace(line)) > 0 && err == nil {
				var v dispatch.ActionView
				if jerr := json.Unmarshal(line, &v); jerr != nil {
					yield(v, fail(exitFailure, "answer of the proxy at %s: %w; is it of another version?", c.path, jerr))
					return
				}
				if !yield(v, nil) {
					return
				}
			}
			switch {
			case errors.Is(err, io.EOF) && len(line) == 0:
				if resp.Trailer.Get("Waybill-Incomplete") != "" {
					yield(dispatch.ActionView{}, errListIncomplete)
				}
				return
			case err != nil && ctx.Err() != nil:
				return
			case err != nil:
				yield(dispatch.ActionView{}, fail(exitUnavailable, "the proxy at %s stopped answering: %w", c.path, err))
				return
			}
		}
	}
}

// actionDocument is GET /v1/actions/{id}.
type actionDocument struct {
	Action   dispatch.ActionView `json:"action"`
	Envelope outcome.Envelope    `json:"envelope"`
	Items    []dispatch.Child    `json:"items,omitempty"` // children of a batch (F7)
}

// Action implements reader.
func (c *adminClient) Action(ctx context.Context, id dispatch.ActionID) (actionDocument, error) {
	var d actionDocument
	err := c.get(ctx, http.MethodGet, "/v1/actions/"+id.String(), nil, nil, &d)
	return d, err
}

// Events implements reader.
func (c *adminClient) Events(ctx context.Context, id dispatch.ActionID) ([]dispatch.ShownEvent, error) {
	var events []dispatch.ShownEvent
	err := c.get(ctx, http.MethodGet, "/v1/actions/"+id.String()+"/events", nil, nil, &events)
	return events, err
}

// Close implements reader.
func (c *adminClient) Close() error {
	c.http.CloseIdleConnections()
	return nil
}

// storedResult is a complete stored answer of an origin.
type storedResult struct {
	Status int
	Header http.Header
	Body   io.ReadCloser
}

// noResultError says that an action has no complete result to give (CONTRACT
// H10). Envelope is what is known instead.
type noResultError struct {
	Envelope outcome.Envelope
}

func (e *noResultError) Error() string {
	if e.Envelope.Error == nil {
		return "no complete result"
	}
	return fmt.Sprintf("%s: %s", e.Envelope.Error.Code, e.Envelope.Error.Message)
}
