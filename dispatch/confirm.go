package dispatch

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"waybill/internal/control"
	"waybill/outcome"
	"waybill/routes"
)

// recallCommand keeps what the confirming command needs of this one (CONTRACT I8, K6): a
// command line is not on record.
func (a *action) recallCommand(m *routes.CommandMatch) {
	a.recall = &Recall{CallerName: a.s.Caller.Name, Rule: m.Rule.Pattern()}
	for name, value := range m.Captured() {
		if len(value) > maxRecalled {
			continue
		}
		if a.recall.Values == nil {
			a.recall.Values = make(map[string]string)
		}
		a.recall.Values[name] = value
	}
}

// confirmingMatch is the route and rule of a confirming command: those of the command
// that it asks about, in whose rule the operator wrote it. It asks only, so it may be
// made again; its own complete end is what counts, whatever that rule says of ends.
func confirmingMatch(s *routes.Snapshot, in *Internal, t routes.Target, x *ExecRequest) (*routes.Route, *routes.CommandMatch) {
	route, rule := s.Confirming(in.Route, t, x.User, in.Rule)
	if route == nil {
		return nil, nil
	}
	return route, &routes.CommandMatch{Rule: &routes.Command{Exact: x.Command, Repeatable: true, Grace: rule.Grace}}
}

// commandOf reads target and user of an action that is a command.
func commandOf(rec *Record) (t routes.Target, user string, ok bool) {
	rest, ok := strings.CutPrefix(rec.Target, "ssh://")
	if !ok {
		return t, "", false
	}
	place, _, _ := strings.Cut(rest, " ")
	i := strings.LastIndexByte(place, '@')
	if i < 0 {
		return t, "", false
	}
	host, port, err := routes.ParseAuthority(place[i+1:], routes.DefaultSSHPort)
	return routes.Target{Scheme: "ssh", Host: host, Port: port}, place[:i], err == nil
}

// confirming is what asks about a command, by the configuration in force; nil: nothing.
func (p *Pipeline) confirming(rec *Record) (*routes.Route, *routes.Confirm, *Submission) {
	t, user, ok := commandOf(rec)
	if !ok {
		return nil, nil, nil
	}
	recall := rec.Bound.Recall
	route, rule := p.binding.Load().Snapshot.Confirming(rec.Bound.Route, t, user, recall.Rule)
	if route == nil {
		return nil, nil, nil
	}
	return route, rule.Reconcile, &Submission{
		Caller: Caller{ID: rec.Caller, Name: recall.CallerName}, Method: MethodExec, Scheme: "ssh", Protocol: ProtocolSSH,
		Authorities: Authorities{Connect: t.Authority()}, Header: make(http.Header),
		Exec:     &ExecRequest{User: user, Strict: true},
		Internal: &Internal{Link: Link{Kind: LinkReconcile, Of: rec.ID.String()}, Route: route.Name, Rule: recall.Rule},
	}
}

// confirmSchedule is querySchedule for a command. Where a person has to approve each command
// nobody is asked in the background.
func (p *Pipeline) confirmSchedule(rec *Record) *routes.Reconcile {
	route, c, s := p.confirming(rec)
	if c == nil || route.NeedsApproval(s.Method, s.RawPath, 0) {
		return nil
	}
	return c.Schedule()
}

// confirm is reconcile for a command: by its confirming command, an action of its own
// through the pipeline.
func (p *Pipeline) confirm(ctx context.Context, rec *Record) (Record, error) {
	route, c, s := p.confirming(rec)
	if c == nil {
		return *rec, ErrNoQuery
	}
	command, missing := c.Render(rec.ID.String(), rec.Bound.Recall.Values)
	if missing != "" {
		return *rec, &QueryError{Value: missing}
	}
	s.Exec.Command = command
	seen, covers, asked := p.follow.firstSeen(rec.ID), rec.lastDispatched(), p.cfg.Clock.Now()
	ans := p.askCommand(ctx, s, route.Limits.Timeout)
	if ans.notMade {
		return *rec, fmt.Errorf("%w: %s", ErrNotWritten, ans.reason)
	}
	return p.reconciled(ctx, rec, covers, ans.id, judgeCommand(c, ans, late(rec, c.Schedule(), asked, seen)))
}

// toldBy is what came of a confirming command.
type toldBy struct {
	answered
	exit   *int // nil: no complete result
	stdout []byte
}

func (p *Pipeline) askCommand(ctx context.Context, s *Submission, limit time.Duration) toldBy {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	reply := p.Do(ctx, s)
	defer func() {
		_ = reply.Body.Close()
		reply.HandedOver(nil)
	}()
	t := toldBy{answered: answered{id: reply.ID}}
	if env := reply.Envelope; env != nil {
		t.failed(env)
		return t
	}
	res := reply.Record.Result
	switch {
	case res == nil || res.Exec == nil || !res.Exec.OutputEnded || res.Exec.Truncated:
		t.reason = "answer_incomplete" // G9
		return t
	case reply.ContentLength > maxAnswer:
		t.reason = "answer_too_large"
		return t
	}
	var out bytes.Buffer
	if err := SplitOutput(reply.Body, &out, io.Discard); err != nil {
		t.reason = "answer_incomplete"
		return t
	}
	if t.stdout, t.exit = out.Bytes(), res.Exec.ExitStatus; t.exit == nil {
		t.reason = "no_exit_status"
	}
	return t
}

// judgeCommand maps the complete result of a confirming command to an outcome (CONTRACT
// K6, I8). late: what was done shows by now; before, that nothing shows proves nothing.
func judgeCommand(c *routes.Confirm, t toldBy, late bool) Resolution {
	res := Resolution{Facts: unresolvedFacts(outcome.Reconcile), Source: outcome.RemoteQuery, Reason: t.reason}
	if t.exit == nil {
		return res
	}
	switch verdict := c.Judge(*t.exit, t.stdout); {
	case verdict > 0:
		res.Facts, res.Rule = resolutionFacts(outcome.Committed), "committed_when"
	case verdict < 0 && !late && !control.Off("I8-not-yet-proves-nothing"):
		res.Rule, res.Reason = "rejected_when", "not_visible_yet"
	case verdict < 0:
		res.Facts, res.Rule = resolutionFacts(outcome.Rejected), "rejected_when"
	case control.Off("I8-rules-alone-decide") && *t.exit == 0:
		res.Facts = resolutionFacts(outcome.Committed)
	default:
		res.Reason = "no_rule"
	}
	return res
}
