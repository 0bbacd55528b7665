package proxy

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"strings"

	"waybill/dispatch"
	"waybill/outcome"
)

// Approver is what decides approvals: dispatch.Pipeline is one (CONTRACT D3, D4).
type Approver interface {
	Approvals(ctx context.Context) ([]dispatch.Record, error)
	Approval(ctx context.Context, id dispatch.ActionID) (dispatch.ApprovalView, error)
	Decide(ctx context.Context, id dispatch.ActionID, fingerprint string, d dispatch.Decision) (dispatch.Record, error)
}

// DecisionRequest is the body of POST /v1/approvals/{id}/approve and …/deny, and what a
// webhook carries.
type DecisionRequest struct {
	By          string `json:"by"`
	Reason      string `json:"reason,omitempty"`
	Fingerprint string `json:"fingerprint,omitempty"`
}

// DecisionAnswer says what became of a decision. Problem is "" when it was recorded,
// else a fixed token: closed, other_request, unusable, bad_decision, no_approval.
type DecisionAnswer struct {
	Problem  string                `json:"problem,omitempty"`
	Message  string                `json:"message,omitempty"`
	Approval dispatch.ApprovalView `json:"approval,omitzero"`
}

const maxDecisionBytes = 16 << 10

func (p *Proxy) approver() Approver {
	a, _ := p.pipeline.(Approver)
	return a
}

// approvals serves /v1/approvals on the admin API.
func (a *api) approvals(path string) {
	who := a.p.approver()
	if who == nil {
		a.unavailable()
		return
	}
	rest := strings.Trim(strings.TrimPrefix(path, "/v1/approvals"), "/")
	if rest == "" {
		if a.method(http.MethodGet) {
			a.listApprovals(who)
		}
		return
	}
	text, verb, _ := strings.Cut(rest, "/")
	id, err := dispatch.ParseActionID(text)
	if err != nil {
		a.notFound()
		return
	}
	switch verb {
	case "":
		if a.method(http.MethodGet) {
			a.showApproval(who, id)
		}
	case "approve", "deny":
		if a.method(http.MethodPost) {
			verdict := dispatch.Approved
			if verb == "deny" {
				verdict = dispatch.Denied
			}
			a.decide(who, id, verdict)
		}
	default:
		a.fail(refusal(outcome.CodeInvalidTarget, "request.target", "no_such_resource", "There is no such resource here."))
	}
}

func (a *api) listApprovals(who Approver) {
	records, err := who.Approvals(a.r.Context())
	if err != nil && !errors.Is(err, dispatch.ErrQuarantined) {
		a.unreadable("", err)
		return
	}
	views := make([]dispatch.ApprovalView, 0, len(records))
	for i := range records {
		views = append(views, records[i].ApprovalView())
	}
	a.json(http.StatusOK, views)
}

func (a *api) showApproval(who Approver, id dispatch.ActionID) {
	v, err := who.Approval(a.r.Context(), id)
	switch {
	case errors.Is(err, dispatch.ErrActionNotFound), errors.Is(err, dispatch.ErrNoApproval):
		a.notFound()
	case errors.Is(err, dispatch.ErrQuarantined):
		a.quarantined(id)
	case err != nil:
		a.unreadable(id.String(), err)
	default:
		a.json(http.StatusOK, v)
	}
}

func (a *api) decide(who Approver, id dispatch.ActionID, verdict dispatch.Verdict) {
	var in DecisionRequest
	dec := json.NewDecoder(io.LimitReader(a.r.Body, maxDecisionBytes))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&in); err != nil {
		a.fail(refusal(outcome.CodeInvalidRequest, "request.body", "bad_decision", "Send {\"by\": \"your name\", \"reason\": …}."))
		return
	}
	rec, err := who.Decide(a.r.Context(), id, in.Fingerprint, dispatch.Decision{Verdict: verdict, By: in.By, Via: "admin", Reason: in.Reason})
	if errors.Is(err, dispatch.ErrQuarantined) {
		a.quarantined(id)
		return
	}
	status, ans := decided(&rec, err)
	switch status {
	case http.StatusNotFound:
		a.notFound()
	case http.StatusInternalServerError:
		a.unreadable(id.String(), err)
	default:
		a.json(status, ans)
	}
}

// decided tells the ways apart in which a decision ends.
func decided(rec *dispatch.Record, err error) (int, DecisionAnswer) {
	ans := DecisionAnswer{Approval: rec.ApprovalView()}
	if err == nil {
		return http.StatusOK, ans
	}
	switch {
	case errors.Is(err, dispatch.ErrActionNotFound), errors.Is(err, dispatch.ErrNoApproval):
		return http.StatusNotFound, ans
	case errors.Is(err, dispatch.ErrApprovalClosed):
		ans.Problem, ans.Message = "closed", "It is closed already: "+closedBy(&ans.Approval)
	case errors.Is(err, dispatch.ErrApprovalOther):
		ans.Problem, ans.Message = "other_request", "The fingerprint is that of another request; nothing was decided."
	case errors.Is(err, dispatch.ErrApprovalUnusable):
		ans.Problem, ans.Message = "unusable", "The configuration changed after the approval was asked for: nothing is sent, and the request has to be made again."
	case errors.Is(err, dispatch.ErrBadDecision):
		ans.Problem, ans.Message = "bad_decision", "A decision needs a name of up to 128 bytes, and has a reason of up to 500, in plain text of one line."
		return http.StatusBadRequest, ans
	default:
		return http.StatusInternalServerError, ans
	}
	return http.StatusConflict, ans
}

func closedBy(v *dispatch.ApprovalView) string {
	s := v.State
	if d := v.Decision; d != nil {
		s = string(d.Verdict)
		if d.Verdict != dispatch.Expired {
			s += " by " + d.By
		}
	}
	if v.Code != "" {
		s += " (" + v.Code + ")"
	}
	return s + "."
}
