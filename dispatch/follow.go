package dispatch

import (
	"context"
	"errors"
	"net/http"
	"slices"
	"strings"

	"waybill/internal/control"
	"waybill/outcome"
	"waybill/routes"
)

// maxFollowed bounds the redirects that one action follows (RFC 9110 §15.4).
const maxFollowed = 5

// describesBody are the fields that go with a body that is no longer sent (WHATWG
// Fetch, HTTP-redirect fetch, step 12).
var describesBody = []string{"Content-Type", "Content-Encoding", "Content-Language", "Content-Location"}

// follow returns the request that a redirect within the origin asks for, or nil when it
// is to be relayed (CONTRACT R2): target, method and route are validated anew, and
// nothing leaves the origin.
func (a *action) follow(out *Outgoing, end *Ending) *Outgoing {
	if a.bound() || a.asks || a.route.Redirects != routes.RedirectsSameOrigin || !end.Complete || a.followed >= maxFollowed || len(end.Header["Location"]) != 1 {
		return nil
	}
	method := out.Method
	switch end.Status {
	case http.StatusMovedPermanently, http.StatusFound:
		if method == http.MethodPost {
			method = http.MethodGet // RFC 9110 §15.4.2, note
		}
	case http.StatusSeeOther:
		if method != http.MethodHead {
			method = http.MethodGet
		}
	case http.StatusTemporaryRedirect, http.StatusPermanentRedirect:
	default:
		return nil
	}
	location := end.Header["Location"][0]
	if strings.TrimSpace(location) == "" {
		return nil // clients relay it to whoever asked
	}
	t, path, query, hasQuery, same, ok := locationOf(location, out.Target)
	if !ok || t != out.Target {
		return nil
	}
	if same {
		path, query, hasQuery = relativeTo(location, out.RawPath)
	}
	if path == "*" || routes.CheckPath(path) != nil || !plainQuery(query) {
		return nil
	}
	if r, _ := a.binding.Snapshot.Match(method, t, path); r != a.route {
		return nil
	}
	next := *out
	next.Header = out.Header.Clone()
	next.Method, next.RawPath, next.RawQuery, next.HasQuery = method, path, query, hasQuery
	if method != out.Method {
		next.Body, next.Length = nil, 0
		for _, name := range describesBody {
			delete(next.Header, name)
		}
	}
	return &next
}

// bound reports whether what is injected belongs to this one request: a signature, a
// parameter, a member of the body.
func (a *action) bound() bool {
	return slices.ContainsFunc(a.route.Inject, func(in routes.Injection) bool {
		return in.Signs() || in.Kind == routes.InjectQuery || in.Kind == routes.InjectBody
	})
}

// relativeTo resolves a reference without an authority against a path (RFC 3986
// §5.2.2). Dot segments are left in: they are refused afterwards.
func relativeTo(ref, base string) (path, query string, hasQuery bool) {
	ref, _, _ = strings.Cut(strings.TrimSpace(ref), "#")
	path, query, hasQuery = strings.Cut(ref, "?")
	switch {
	case path == "":
		path = base
	case path[0] != '/':
		path = base[:strings.LastIndexByte(base, '/')+1] + path
	}
	return path, query, hasQuery
}

// again crosses the boundary once more, to where a redirect within the origin leads:
// an attempt of its own, recorded together with the end of the one before it (R1, R2,
// F1). It returns nil when the redirect is to be relayed after all, since nothing of
// the new attempt was handed over; an error when its record is indeterminate.
//
// Where the method changes, the request that was answered is not made again, but another one
// that asks for what came of it: it was carried out (G5), and no answer to the other one takes
// that back.
func (a *action) again(ctx context.Context, out, next *Outgoing, end *Ending, sink *resultSink) (Conn, error) {
	rest := restUnsafe // as for any other hand-over (E3)
	if a.route.Repeatable(next.Method) {
		rest = restRepeatable
	}
	conn, err := connectWithin(ctx, a.route.Limits.Connect, a.p.cfg.Transport, a.order(next.Target, rest))
	if err != nil {
		s := setupError(err)
		a.late = append(a.late, Event{Type: AttemptFailed, Attempt: a.tries + 1, At: a.now(), Ended: &Ended{Facts: setupFacts(s), Stage: s.Stage, Reason: s.Reason, Source: outcome.TransportObserved, Peer: s.Peer,
			Hop: s.Hop, HopStatus: s.HopStatus, ProxyStatus: s.ProxyStatus}})
		return nil, nil //nolint:nilnil // no connection and no error: relayed
	}
	events := a.events
	a.evidence(end, sink)
	facts := outcome.Success()
	if next.Method != out.Method && !control.Off("R1-redirect-resolves-the-first") {
		facts = outcome.Facts{Phase: outcome.ResultDelivery, Outcome: outcome.Committed, Retry: outcome.Never, Code: outcome.CodeResultNotRetained}
	}
	a.add(Event{Type: AttemptResolved, Attempt: a.tries, Ended: &Ended{Facts: facts, Source: outcome.RemoteResponse, Followed: true}})
	info := conn.Info()
	info.Unresolved = a.advice
	if a.further != nil {
		info.Generation, info.Until = a.generation, a.p.windowNow().Add(a.route.Limits.Timeout)
	}
	a.tries++
	a.followed++
	a.add(Event{Type: DispatchStarted, Attempt: a.tries, Dispatch: &info})
	_, err = a.append(context.WithoutCancel(ctx), a.accepted.Relaxed)
	if err == nil {
		return conn, nil
	}
	conn.Release()
	if errors.Is(err, ErrNotWritten) && !errors.Is(err, ErrIndeterminate) {
		a.tries--
		a.followed--
		a.events = events
		return nil, nil //nolint:nilnil // no connection and no error: relayed
	}
	return nil, err
}
