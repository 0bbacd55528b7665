package dispatch

import (
	"context"
	"fmt"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"time"

	"waybill/internal/control"
	"waybill/internal/killpoint"
	"waybill/outcome"
	"waybill/routes"
)

// fieldJob names the action that follows a job, on the answer that accepted it.
const fieldJob = "Waybill-Job"

// acceptJob records the job that a complete answer accepted, and makes the action that
// follows it (CONTRACT A7). That one is on record first: a crash in between leaves an
// unresolved submission and a job that is followed, never a job that nobody knows.
func (a *action) acceptJob(end *Ending, sink *resultSink, facts outcome.Facts) *Job {
	c := a.route.Contract.Async
	if c == nil || !slices.Contains(c.Status, end.Status) || facts.Outcome != outcome.Committed || a.s.Exec != nil {
		return nil
	}
	job := &Job{State: JobPending, Since: a.now(), Route: a.route.Name, CallerName: a.s.Caller.Name, From: a.out.Target.Origin()}
	var doc *routes.Document
	body := func() routes.Document {
		if doc == nil {
			d := routes.Document{}
			if raw, ok := sink.whole(); ok {
				d = routes.ParseDocument(raw)
			}
			doc = &d
		}
		return *doc
	}
	if len(c.AcceptedWhen) > 0 && !routes.AnyHolds(c.AcceptedWhen, end.Status, body()) {
		return nil // complete as it is
	}
	resource, why := a.statusResource(c, end, sink, body)
	if c.JobID != "" {
		job.ID, _ = jsonText(body(), c.JobID)
	} else if resource != "" {
		path, _, _ := strings.Cut(resource, "?")
		job.ID = path[strings.LastIndexByte(path, '/')+1:]
	}
	job.ID = capped(job.ID, 256)
	job.Resource = resource
	job.Shown = shownURL(resource)
	if resource == "" {
		job.State, job.Reason = JobLost, why
		return a.onRecord(job)
	}
	id := a.p.newID()
	job.Action = id.String()
	job.Next = a.now().Add(firstPoll(c, end.Header, a.now()))
	followed := *job
	events := []Event{
		{Type: ActionAccepted, At: a.now(), Accepted: &Accepted{Caller: a.s.Caller.ID, Method: http.MethodGet, Target: job.Shown, Protocol: a.accepted.Protocol,
			Link: &Link{Kind: LinkJob, Of: a.id.String()}}},
		{Type: JobRecorded, At: a.now(), Job: &followed},
	}
	if _, err := a.p.cfg.Journal.Append(context.Background(), Batch{Action: id, Events: events}); err != nil {
		a.p.cfg.Logger.Error("a job cannot be followed", slog.String("action", a.id.String()), slog.Any("err", err))
		job.Action, job.State, job.Reason = "", JobLost, "not_recorded"
	}
	killpoint.At("job-recorded")
	return a.onRecord(job)
}

// onRecord adds the job to the submission's own events.
func (a *action) onRecord(job *Job) *Job {
	a.add(Event{Type: JobRecorded, Attempt: a.tries, Job: job})
	return job
}

// statusResource finds where the state of the job stands; else why it does not.
func (a *action) statusResource(c *routes.Async, end *Ending, sink *resultSink, body func() routes.Document) (resource, why string) {
	if c.Get != "" {
		t, err := routes.ParseValueTemplate(c.Get)
		if err != nil {
			return "", "no_status_resource"
		}
		path, query, hasQuery, missing := t.Render(func(v routes.Value) (string, bool) {
			switch v.From {
			case "action":
				return a.id.String(), true
			case "response.json":
				return jsonText(body(), v.Name)
			case "response.header":
				if h := sink.header[v.Name]; len(h) == 1 {
					return h[0], true
				}
				return "", false
			case "marker":
				if a.recall == nil {
					return "", false
				}
				return a.recall.Marker, a.recall.Marker != ""
			}
			if a.recall == nil {
				return "", false
			}
			s, ok := a.recall.Values[v.String()]
			return s, ok
		})
		if missing != nil {
			return "", "value_not_on_record"
		}
		return a.resolveReference(origin(path, query, hasQuery))
	}
	for _, from := range c.From {
		ref := ""
		if path, ok := strings.CutPrefix(from, routes.FromJSON); ok {
			ref, _ = jsonText(body(), path)
		} else {
			name := http.CanonicalHeaderKey(from)
			raw, masked := end.Header[name], sink.header[name]
			if len(raw) == 1 && (len(masked) != 1 || masked[0] != raw[0]) {
				// A secret was in it: it is not asked for, and not kept (R4, C5).
				return "", "secret_in_status_resource"
			}
			if len(raw) == 1 {
				ref = raw[0]
			}
		}
		if ref != "" {
			return a.resolveReference(ref)
		}
	}
	return "", "no_status_resource"
}

func origin(path, query string, hasQuery bool) string {
	if hasQuery {
		return path + "?" + query
	}
	return path
}

// resolveReference turns a reference of the answer into a whole URL.
func (a *action) resolveReference(ref string) (resource, why string) {
	if len(ref) > 2<<10 || strings.TrimSpace(ref) == "" || a.tells(ref) {
		return "", "no_status_resource"
	}
	t, path, query, hasQuery, same, ok := locationOf(ref, a.out.Target)
	if !ok || t.Scheme == "http" && a.out.Target.Scheme == "https" {
		return "", "no_status_resource" // R4
	}
	if same {
		path, query, hasQuery = relativeTo(ref, a.out.RawPath)
	}
	if path == "*" || routes.CheckPath(path) != nil || !plainQuery(query) {
		return "", "no_status_resource"
	}
	return t.Origin() + origin(path, query, hasQuery), ""
}

// shownURL leaves the values of a query out (LK-03).
func shownURL(u string) string {
	base, query, has := strings.Cut(u, "?")
	if !has {
		return capped(base, maxShown)
	}
	out := &Outgoing{RawQuery: query, HasQuery: true}
	_, names, _ := strings.Cut(wholeTarget(out), "?")
	return capped(base+"?"+names, maxShown)
}

// firstPoll is when a job is first looked at.
func firstPoll(c *routes.Async, h http.Header, now time.Time) time.Duration {
	return nextPoll(c, h, now, 0)
}

// nextPoll is the wait before the next look: what the service asks for, within bounds.
func nextPoll(c *routes.Async, h http.Header, now time.Time, polls int) time.Duration {
	d := backoff(c.Every, c.MaxEvery, polls)
	if asked, ok := retryAfter(h, now); ok {
		d = min(max(asked, c.Every), max(c.MaxEvery, c.Timeout/4))
	}
	return d
}

// poll looks once at a job (CONTRACT A7).
func (p *Pipeline) poll(ctx context.Context, rec Record) (Record, error) {
	job := *rec.Job
	route := p.routeNamed(job.Route)
	c := (*routes.Async)(nil)
	if route != nil {
		c = route.Contract.Async
	}
	if c == nil {
		return p.endJob(ctx, rec, job, answered{reason: "contract_changed"}, outcome.Unknown)
	}
	now := p.cfg.Clock.Now()
	if now.Sub(job.Since) > c.Timeout || job.Polls >= c.Polls {
		return p.endJob(ctx, rec, job, answered{reason: "poll_limit"}, outcome.Unknown)
	}
	scheme, rest, _ := strings.Cut(job.Resource, "://")
	at := strings.IndexByte(rest, '/')
	if at < 0 {
		return p.endJob(ctx, rec, job, answered{reason: "no_status_resource"}, outcome.Unknown)
	}
	path, query, hasQuery := strings.Cut(rest[at:], "?")
	s := &Submission{
		Caller: Caller{ID: rec.Caller, Name: job.CallerName}, Method: http.MethodGet, Scheme: scheme, Authorities: Authorities{Host: rest[:at]},
		RawPath: path, RawQuery: query, HasQuery: hasQuery, Header: http.Header{"Accept": {"application/json"}}, Protocol: "HTTP/1.1",
		Internal: &Internal{Link: Link{Kind: LinkPoll, Of: rec.ID.String()}, From: job.From},
	}
	if strings.HasPrefix(job.Resource, job.From+"/") { // they are words to this service
		for name, value := range c.Headers {
			s.Header.Set(name, value)
		}
	}
	ans := p.ask(ctx, s, route.Limits.Timeout)
	if ans.notMade {
		return rec, fmt.Errorf("%w: %s", ErrNotWritten, ans.reason)
	}
	job.Polls++
	job.Poll = ans.id.String()
	killpoint.At("job-polled")
	switch {
	case ans.final:
		return p.endJob(ctx, rec, job, ans, outcome.Unknown)
	case ans.status == 0 || routes.TellsNothing(ans.status):
	default:
		if o, done := jobOutcome(c, ans); done {
			return p.endJob(ctx, rec, job, ans, o)
		}
	}
	job.Next = p.cfg.Clock.Now().Add(nextPoll(c, ans.header, p.cfg.Clock.Now(), job.Polls))
	receipt, err := p.cfg.Journal.Append(ctx, Batch{Action: rec.ID, Events: []Event{{Type: JobPolled, At: p.cfg.Clock.Now(), Job: &job}}})
	if err != nil {
		return rec, err
	}
	return receipt.Record, nil
}

// endJob records how a job ended, unknown where it was not followed to its end.
func (p *Pipeline) endJob(ctx context.Context, rec Record, job Job, ans answered, o outcome.Outcome) (Record, error) {
	now := p.cfg.Clock.Now()
	res := &Resolution{Facts: resolutionFacts(o), Source: outcome.RemoteQuery, Query: job.Poll, Status: ans.status, Reason: ans.reason, At: now}
	receipt, err := p.cfg.Journal.Append(ctx, Batch{Action: rec.ID, Events: []Event{{Type: JobEnded, At: now, Job: &job, Resolution: res}}})
	if err != nil {
		return rec, err
	}
	p.cfg.Logger.Info("job ended", slog.String("action", rec.ID.String()), slog.String("outcome", o.String()), slog.Int("polls", job.Polls), slog.Any("reason", ans.reason))
	return receipt.Record, nil
}

// jobOutcome reads the state of a job from a complete answer; done is false while it is
// pending. What is not understood is pending: the limits end it, as unknown.
func jobOutcome(c *routes.Async, ans answered) (o outcome.Outcome, done bool) {
	if len(c.PendingWhen)+len(c.CommittedWhen)+len(c.RejectedWhen) > 0 {
		pending := routes.AnyHolds(c.PendingWhen, ans.status, ans.doc)
		committed := routes.AnyHolds(c.CommittedWhen, ans.status, ans.doc)
		rejected := routes.AnyHolds(c.RejectedWhen, ans.status, ans.doc)
		switch {
		case pending, committed && rejected:
			return outcome.Unknown, false
		case committed:
			return outcome.Committed, true
		case rejected:
			return outcome.Rejected, true
		}
		if ans.status == http.StatusNotFound || ans.status == http.StatusGone {
			return outcome.Unknown, true
		}
		return outcome.Unknown, false
	}
	return jobByForm(ans)
}

// stateNames are where the usual forms have the state of a job.
var stateNames = []string{"status", "state", "properties.provisioningState", "provisioningState"}

// States by their usual words, in small letters without separators.
var (
	goodStates = []string{"succeeded", "success", "successful", "completed", "complete", "done", "finished", "ready"}
	badStates  = []string{"failed", "failure", "canceled", "cancelled", "expired", "error", "aborted", "rejected"}
)

// jobByForm knows the usual forms: Azure's and others' status words, Google's "done",
// and plain statuses.
func jobByForm(ans answered) (o outcome.Outcome, done bool) {
	switch ans.status {
	case http.StatusNotFound, http.StatusGone:
		return outcome.Unknown, true // what became of it is not told any more
	case http.StatusAccepted:
		return outcome.Unknown, false
	}
	for _, name := range stateNames {
		text, ok := jsonText(ans.doc, name)
		if !ok {
			continue
		}
		text = strings.NewReplacer("_", "", "-", "", " ", "").Replace(strings.ToLower(text))
		switch {
		case slices.Contains(goodStates, text):
			return outcome.Committed, true
		case slices.Contains(badStates, text):
			return outcome.Rejected, true
		}
		return outcome.Unknown, false
	}
	if text, ok := jsonText(ans.doc, "done"); ok {
		if text != "true" {
			return outcome.Unknown, false
		}
		if c := (routes.Condition{Present: []string{"error"}}); c.HoldsFor(ans.doc) {
			return outcome.Rejected, true
		}
		return outcome.Committed, true
	}
	switch ans.status {
	case http.StatusOK, http.StatusCreated, http.StatusNoContent, http.StatusSeeOther:
		return outcome.Committed, true
	}
	return outcome.Unknown, false
}

// guardJob remembers a status resource on another origin like a redirect to it: the
// caller is not led to another origin with a credential either (CONTRACT R3).
func (a *action) guardJob(job *Job, result *Result) {
	if job == nil || job.Resource == "" || result.RedirectTo != "" || control.Off("R3-job-on-another-origin") {
		return
	}
	t, path, query, _, same, ok := locationOf(job.Resource, a.out.Target)
	if ok && !same && t != a.out.Target {
		result.RedirectTo, result.RedirectFrom = redirectKey(t, path, query), a.out.Target.Origin()
	}
}

// annotateJob names the action that follows the job.
func (r *Record) annotateJob(h http.Header) {
	if r.Job != nil && r.Job.Action != "" && !r.follows() {
		h[fieldJob] = []string{r.Job.Action}
	}
}

func (r *Record) linkView() *Link {
	if r.Link == nil {
		return nil
	}
	l := *r.Link
	return &l
}
