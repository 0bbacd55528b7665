package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"waybill/dispatch"
	"waybill/outcome"
)

// FollowUp is what the APIs need to find out, or to be told, what became of an action
// (CONTRACT K2–K6). dispatch.Pipeline is one.
type FollowUp interface {
	Reconcile(ctx context.Context, id dispatch.ActionID) (dispatch.Record, error)
	Attest(ctx context.Context, id dispatch.ActionID, at dispatch.Attestation) (dispatch.Record, error)
	Import(ctx context.Context, e dispatch.Evidence) (dispatch.Record, error)
}

// serveFollowUp serves what asks or tells about an action; false when the path is no
// such resource.
func (a *api) serveFollowUp(id, what string) bool {
	switch {
	case what == "reconcile":
		if a.method(http.MethodPost) {
			a.withAction(id, a.reconcile)
		}
	case what == "items":
		if a.method(http.MethodGet) {
			a.withAction(id, a.items)
		}
	case what == "attest" && a.admin:
		if a.method(http.MethodPost) {
			a.withAction(id, a.attest)
		}
	case what == "evidence" && a.admin:
		if a.method(http.MethodGet) {
			a.withAction(id, a.evidence)
		}
	default:
		return false
	}
	return true
}

// reconcile asks the remote side and answers with the action as it is then, resolved or
// still unknown (CONTRACT K6).
func (a *api) reconcile(rec dispatch.Record) {
	_, _ = io.Copy(io.Discard, io.LimitReader(a.r.Body, 4<<10))
	if a.p.followUp == nil {
		a.unavailable()
		return
	}
	after, err := a.p.followUp.Reconcile(a.r.Context(), rec.ID)
	switch {
	case err == nil:
		a.action(after)
	case errors.Is(err, dispatch.ErrNothingToReconcile) && rec.Dispatched():
		a.action(rec) // it is resolved: asking again is a read
	default:
		a.refused(&rec, err)
	}
}

// refused answers for an action that could not be asked or told about: with that action's
// own facts, never with others (F2).
func (a *api) refused(rec *dispatch.Record, err error) {
	f := rec.Shown()
	code, reason, detail := outcome.CodeRetryRefused, "", ""
	var incomplete *dispatch.QueryError
	switch {
	case errors.Is(err, dispatch.ErrActionActive):
		code, reason, detail = outcome.CodeLeaseHeld, "attempt_active", "An attempt of this action runs; ask when it has ended."
	case errors.Is(err, dispatch.ErrNoQuery):
		reason, detail = "no_reconcile_query", "The route has no reconcile query; look at the remote side and record what you found with waybill attest."
	case errors.As(err, &incomplete):
		reason, detail = "value_not_on_record", "The reconcile query needs "+incomplete.Value+", which is not on record for this action; use waybill attest."
	case errors.Is(err, dispatch.ErrNothingToReconcile):
		reason, detail = "nothing_dispatched", "Nothing was dispatched: there is nothing to find out."
	case errors.Is(err, dispatch.ErrIllegalTransition):
		reason, detail = "contradicts_record", "What is on record stands: "+illegalWhy(err)
	default:
		a.p.log.Error("evidence could not be recorded", slog.String("action", rec.ID.String()), slog.Any("err", err))
		reason, detail = "not_recorded", "It could not be asked or recorded at present; the action is as it was."
	}
	f.Code = code
	env := outcome.NewEnvelope(rec.ID.String(), f, detail, withReason(rec.Evidence(), reason))
	a.envelope(&env, time.Second)
}

func withReason(ev outcome.Evidence, reason string) outcome.Evidence {
	ev.Reason = reason
	return ev
}

// illegalWhy is the fixed text of a refused transition, without the names of Go's errors (L2).
func illegalWhy(err error) string {
	text := err.Error()
	text = strings.ReplaceAll(text, ": "+dispatch.ErrIllegalTransition.Error(), "")
	text = strings.TrimPrefix(text, dispatch.ErrIllegalTransition.Error()+": ")
	return text + "."
}

// items lists the children of a batch (CONTRACT F7).
func (a *api) items(rec dispatch.Record) {
	list := rec.Children()
	if list == nil {
		list = []dispatch.Child{}
	}
	a.json(http.StatusOK, list)
}

// attest takes an operator's word (CONTRACT K5). It is on the admin API only.
func (a *api) attest(rec dispatch.Record) {
	if a.p.followUp == nil {
		a.unavailable()
		return
	}
	var at dispatch.Attestation
	dec := json.NewDecoder(io.LimitReader(a.r.Body, 64<<10))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&at); err != nil || at.Outcome != outcome.Committed && at.Outcome != outcome.Rejected || strings.TrimSpace(at.Operator) == "" || strings.TrimSpace(at.Reason) == "" {
		a.fail(refusal(outcome.CodeInvalidRequest, "request.body", "bad_attestation", "Send {\"outcome\": \"committed\" or \"rejected\", \"operator\": …, \"reason\": …}."))
		return
	}
	after, err := a.p.followUp.Attest(a.r.Context(), rec.ID, at)
	if err != nil {
		a.refused(&rec, err)
		return
	}
	a.action(after)
}

// evidence gives out what this journal proves of an action, for another one (CONTRACT K4).
func (a *api) evidence(rec dispatch.Record) {
	e, ok := dispatch.ExportEvidence(&rec, a.p.origin)
	if !ok {
		a.refused(&rec, errNothingProved)
		return
	}
	a.json(http.StatusOK, e)
}

var errNothingProved = dispatch.ErrNothingToReconcile

// importEvidence takes what another journal proves (CONTRACT K4).
func (a *api) importEvidence() {
	if !a.method(http.MethodPost) {
		return
	}
	if a.p.followUp == nil {
		a.unavailable()
		return
	}
	var e dispatch.Evidence
	dec := json.NewDecoder(io.LimitReader(a.r.Body, 64<<10))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&e); err != nil || e.Action.IsZero() {
		a.fail(refusal(outcome.CodeInvalidRequest, "request.body", "bad_evidence", "Send what waybill journal evidence wrote."))
		return
	}
	a.withAction(e.Action.String(), func(rec dispatch.Record) {
		after, err := a.p.followUp.Import(a.r.Context(), e)
		if err != nil {
			a.refused(&rec, err)
			return
		}
		a.action(after)
	})
}

// maxWait bounds how long a read of an action waits for its end.
const maxWait = 10 * time.Minute

// await answers a read of an action with ?wait=SECONDS when it has ended, or when the
// time is over (CONTRACT A7).
func (a *api) await(rec dispatch.Record) {
	raw := a.r.URL.RawQuery
	if raw == "" {
		a.action(rec)
		return
	}
	q, err := url.ParseQuery(raw)
	n, nerr := strconv.ParseUint(q.Get("wait"), 10, 16)
	if err != nil || nerr != nil || len(q) != 1 || len(q["wait"]) != 1 {
		a.fail(refusal(outcome.CodeInvalidRequest, "request.query", "bad_parameter", "The only parameter here is wait, in whole seconds."))
		return
	}
	over := func(r *dispatch.Record) bool { return r.Ended && !r.Pending() }
	changed := make(chan dispatch.Record, 1)
	id := rec.ID
	stop := a.p.journal.Watch(func(r *dispatch.Record) bool { return r.ID == id && over(r) }, func(r dispatch.Record) {
		select {
		case changed <- r:
		default:
		}
	})
	defer stop()
	if rec, err = a.p.journal.Action(a.r.Context(), rec.ID); err != nil {
		a.unreadable(rec.ID.String(), err)
		return
	}
	if !over(&rec) {
		t := time.NewTimer(min(time.Duration(n)*time.Second, maxWait))
		defer t.Stop()
		select {
		case rec = <-changed:
		case <-t.C:
		case <-a.r.Context().Done():
		case <-a.p.base.Done():
		}
	}
	a.action(rec)
}

// jobResult gives out the answer in which a job's end was read (CONTRACT A7).
func (a *api) jobResult(rec dispatch.Record) bool {
	if rec.Link == nil || rec.Link.Kind != dispatch.LinkJob || rec.Pending() || rec.Job == nil || rec.Job.Poll == "" || a.r.URL.RawQuery != "" {
		return false
	}
	id, err := dispatch.ParseActionID(rec.Job.Poll)
	if err != nil {
		return false
	}
	last, err := a.p.journal.Action(a.r.Context(), id)
	if err != nil || last.Caller != rec.Caller || last.Result == nil {
		return false
	}
	a.result(last)
	return true
}
