package proxy

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"waybill/dispatch"
	"waybill/outcome"
)

// recordSession puts a session's opening or end on record (CONTRACT N4). A journal
// that takes nothing refuses the session's requests as well; the session itself is
// none of them, and is opened and closed all the same.
func (a *api) recordSession(typ dispatch.EventType, s dispatch.Session) {
	log := a.p.sessionLog()
	if log == nil {
		return
	}
	err := log.RecordSession(context.WithoutCancel(a.r.Context()), dispatch.Event{Type: typ, At: time.Now(), Session: &s})
	if err != nil {
		a.p.log.Warn("a session could not be recorded", slog.String("session", s.ID), slog.String("event", typ.String()), slog.Any("err", err))
	}
}

// sessionLog is the journal, if it keeps sessions.
func (p *Proxy) sessionLog() dispatch.SessionJournal {
	log, _ := p.journal.(dispatch.SessionJournal)
	return log
}

// listSessions answers GET /v1/sessions: who was connected, from when to when, and
// what it did in sum. limit, since and callers=true choose.
func (a *api) listSessions() {
	src, ok := a.p.journal.(dispatch.SessionSource)
	if !ok { // nothing but what is open is known
		a.json(http.StatusOK, a.p.sessions.List())
		return
	}
	q := dispatch.SessionQuery{Valid: a.p.sessions.open}
	values, err := url.ParseQuery(a.r.URL.RawQuery)
	if err == nil {
		for name, v := range values {
			switch {
			case len(v) != 1:
				err = strconv.ErrSyntax
			case name == "limit":
				var n uint64
				n, err = strconv.ParseUint(v[0], 10, 31)
				q.Limit = int(n)
			case name == "since":
				q.Since, err = time.Parse(time.RFC3339, v[0])
			case name == "callers":
				q.Callers, err = strconv.ParseBool(v[0])
			default:
				err = strconv.ErrSyntax
			}
			if err != nil {
				break
			}
		}
	}
	if err != nil {
		a.fail(refusal(outcome.CodeInvalidRequest, "request.query", "bad_parameter", "The parameters here are limit, since (RFC 3339) and callers (true or false)."))
		return
	}
	views, err := dispatch.SessionViews(a.r.Context(), src, q)
	if err != nil && !errors.Is(err, dispatch.ErrQuarantined) {
		a.unreadable("", err)
		return
	}
	if err != nil {
		a.w.Header().Set(fieldIncomplete, "journal_quarantined")
	}
	a.json(http.StatusOK, views)
}
