package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"time"

	"waybill/dispatch"
	"waybill/outcome"
)

// Admin is what the admin API tells beyond the journal's actions. Nil functions are
// answered as not available.
type Admin struct {
	// Status returns what GET /v1/status shows, as something that marshals to a JSON object.
	Status func() any
	// JournalStats and JournalVerify return what the journal says of itself.
	JournalStats  func(ctx context.Context) (any, error)
	JournalVerify func(ctx context.Context) (any, error)
	// AuditStatus returns how the audit log gets on (CONTRACT N5).
	AuditStatus func(ctx context.Context) (any, error)
}

// tailBuffer is how many changes a slow reader of /v1/tail may be behind before it
// loses some.
const tailBuffer = 1024

// AdminHandler returns the admin API, for a unix socket that only the owner can open
// (CONTRACT V5). It sees every caller's actions.
func (p *Proxy) AdminHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a := &api{p: p, w: w, r: r, admin: true}
		defer a.recovered()
		if f := adminCheck(r); f != nil {
			a.fail(f)
			return
		}
		switch path := r.URL.EscapedPath(); {
		case path == "/v1/status":
			if a.method(http.MethodGet) {
				a.status()
			}
		case path == "/v1/tail":
			if a.method(http.MethodGet) {
				a.tail()
			}
		case path == "/v1/sessions":
			a.sessions()
		case strings.HasPrefix(path, "/v1/sessions/"):
			if a.method(http.MethodDelete) {
				a.closeSession(strings.TrimPrefix(path, "/v1/sessions/"))
			}
		case path == "/v1/approvals", strings.HasPrefix(path, "/v1/approvals/"):
			a.approvals(path)
		case path == "/v1/journal/stats":
			if a.method(http.MethodGet) {
				a.ask(p.admin.JournalStats)
			}
		case path == "/v1/journal/verify":
			if a.method(http.MethodGet) {
				a.ask(p.admin.JournalVerify)
			}
		case path == "/v1/audit":
			if a.method(http.MethodGet) {
				a.ask(p.admin.AuditStatus)
			}
		case path == "/v1/evidence":
			a.importEvidence()
		default:
			a.serve()
		}
	})
}

// adminCheck keeps browser pages out: they cannot open a unix socket, but the same
// handler may one day stand on TCP, and a forwarded socket is one already.
func adminCheck(r *http.Request) *dispatch.Refusal {
	deny := func(field, reason, detail string) *dispatch.Refusal {
		f := refusal(outcome.CodePolicyDenied, field, reason, detail)
		f.Retry = outcome.Never
		return f
	}
	host := r.Host
	if h, _, err := net.SplitHostPort(host); err == nil {
		host = h
	}
	switch strings.ToLower(host) {
	case "waybill", "localhost", ownName:
	default:
		return deny("request.headers.host", "foreign_host", "The Host field does not name Waybill.")
	}
	return browserFields(r.Header, func(string) bool { return false }, deny)
}

// recovered turns a panic into an envelope, as in the proxy's own handler.
func (a *api) recovered() {
	v := recover()
	if v == nil {
		return
	}
	if err, ok := v.(error); ok && errors.Is(err, http.ErrAbortHandler) {
		panic(http.ErrAbortHandler)
	}
	a.p.log.Error("panic in the admin API")
	f := outcome.Facts{Phase: outcome.Validation, Outcome: outcome.NotAttempted, Retry: outcome.Never, Code: outcome.CodeInternal}
	env := outcome.NewEnvelope("", f, "", outcome.Evidence{})
	a.envelope(&env, 0)
}

func (a *api) unavailable() {
	a.fail(refusal(outcome.CodeUnsupportedAction, "request.target", "not_available", "This is not available here."))
}

func (a *api) status() {
	if a.p.admin.Status == nil {
		a.unavailable()
		return
	}
	a.json(http.StatusOK, a.p.admin.Status())
}

func (a *api) ask(f func(context.Context) (any, error)) {
	if f == nil {
		a.unavailable()
		return
	}
	v, err := f(a.r.Context())
	if err != nil {
		a.unreadable("", err)
		return
	}
	a.json(http.StatusOK, v)
}

// tail writes each action as it changes, until the reader leaves.
func (a *api) tail() {
	ch := make(chan dispatch.Record, tailBuffer)
	stop := a.p.journal.Watch(nil, func(rec dispatch.Record) {
		select {
		case ch <- rec:
		default: // Watch must not block; a slow reader loses lines
		}
	})
	defer stop()
	a.w.Header().Set("Content-Type", "application/x-ndjson")
	a.private()
	a.w.WriteHeader(http.StatusOK)
	rc := http.NewResponseController(a.w)
	enc := json.NewEncoder(a.w)
	if rc.Flush() != nil {
		return
	}
	for {
		select {
		case rec := <-ch:
			if enc.Encode(rec.View()) != nil || rc.Flush() != nil {
				return
			}
		case <-a.r.Context().Done():
			return
		case <-a.p.base.Done():
			return
		}
	}
}

// opened answers POST /v1/sessions. It is the one place where a token is shown.
type opened struct {
	ID       string `json:"id"`
	Token    string `json:"token"`
	ProxyURL string `json:"proxy_url"`
}

func (a *api) sessions() {
	if a.p.sessions == nil {
		a.unavailable()
		return
	}
	if a.r.Method == http.MethodGet {
		a.listSessions()
		return
	}
	if !a.method(http.MethodPost) {
		return
	}
	var in struct {
		Name string `json:"name"`
	}
	dec := json.NewDecoder(io.LimitReader(a.r.Body, 64<<10))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&in); err != nil && !errors.Is(err, io.EOF) || len(in.Name) > maxSessionName || in.Name != "" && !visible(in.Name) {
		a.fail(refusal(outcome.CodeInvalidRequest, "request.body.name", "bad_name", "Send {\"name\": …} with a name of up to 64 visible ASCII characters, or none."))
		return
	}
	addr := a.p.Addr()
	if addr == nil {
		a.unavailable()
		return
	}
	id, token, err := a.p.sessions.Open(in.Name)
	if err != nil {
		a.unreadable("", err)
		return
	}
	a.recordSession(dispatch.SessionOpened, dispatch.Session{ID: id, Name: in.Name, Caller: sessionPrefix + id})
	scheme := "http"
	if a.p.tls != nil {
		scheme = "https"
	}
	u := url.URL{Scheme: scheme, User: url.UserPassword(id, token), Host: addr.String()}
	a.json(http.StatusCreated, opened{ID: id, Token: token, ProxyURL: u.String()})
}

// maxSessionName bounds the name of a session.
const maxSessionName = 64

// SessionSummary counts the actions of one session by how they ended (CONTRACT N4).
type SessionSummary struct {
	Route   string          `json:"route"`
	Outcome outcome.Outcome `json:"outcome"`
	Retry   outcome.Retry   `json:"retry"`
	Code    outcome.Code    `json:"code,omitempty"`
	Count   int             `json:"count"`
}

func (a *api) closeSession(id string) {
	if a.p.sessions == nil {
		a.unavailable()
		return
	}
	err := a.p.sessions.Close(id)
	if errors.Is(err, ErrNoSession) {
		a.fail(refusal(outcome.CodeInvalidTarget, "request.target", "no_such_session", "No such session is open."))
		return
	}
	if err != nil {
		a.unreadable("", err)
		return
	}
	a.recordSession(dispatch.SessionClosed, dispatch.Session{ID: id, Caller: sessionPrefix + id, Reason: dispatch.SessionEnded})
	sums := []SessionSummary{}
	index := map[SessionSummary]int{}
	for rec, err := range a.p.journal.Actions(a.r.Context(), dispatch.Filter{Caller: sessionPrefix + id}) {
		if err != nil {
			a.unreadable("", err)
			return
		}
		f, v := rec.Shown(), rec.View()
		key := SessionSummary{Route: v.Route, Outcome: f.Outcome, Retry: f.Retry, Code: f.Code}
		i, ok := index[key]
		if !ok {
			i = len(sums)
			index[key] = i
			sums = append(sums, key)
		}
		sums[i].Count++
	}
	a.json(http.StatusOK, map[string]any{"actions": sums})
}

// HealthHandler serves /metrics, /livez and /readyz for a listener of their own. live
// and ready return nil when all is well, else a short reason that holds no secret;
// nil functions are always well. metrics may be nil.
func HealthHandler(metrics http.Handler, live, ready func() error) http.Handler {
	mux := http.NewServeMux()
	if metrics != nil {
		mux.Handle("GET /metrics", metrics)
	}
	mux.Handle("GET /livez", healthCheck(live))
	mux.Handle("GET /readyz", healthCheck(ready))
	return mux
}

func healthCheck(f func() error) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/plain; charset=utf-8")
		w.Header().Set("Cache-Control", "no-store")
		if f != nil {
			if err := f(); err != nil {
				w.WriteHeader(http.StatusServiceUnavailable)
				_, _ = io.WriteString(w, err.Error()+"\n")
				return
			}
		}
		_, _ = io.WriteString(w, "ok\n")
	})
}

// AdminServer returns an http.Server for the admin socket, with the front's own log
// and time-outs. It has no write time-out: /v1/tail is endless.
func (p *Proxy) AdminServer() *http.Server {
	return &http.Server{
		Handler: p.AdminHandler(), ErrorLog: newServerLog(p.log),
		ReadHeaderTimeout: 10 * time.Second, IdleTimeout: p.limits.IdleTimeout, MaxHeaderBytes: p.limits.HeadBytes,
	}
}
