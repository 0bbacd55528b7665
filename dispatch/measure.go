package dispatch

import (
	"errors"
	"slices"
	"time"

	"waybill/inject"
	"waybill/internal/control"
	"waybill/metrics"
	"waybill/outcome"
)

// Measure counts what one durable step of one action changed. The journal calls it, in
// order of sequence, for everything that became durable and for nothing else: what the
// metrics say of actions is what the records prove, whichever code path wrote them, and
// the sum over outcomes is the number of ended actions in the journal (CONTRACT S1).
// before is the projection ahead of the step, nil for a new action. It keeps nothing.
func Measure(m *metrics.Metrics, before, after *Record, events []Event) {
	if m == nil {
		return
	}
	route := after.routeName()
	blocked := slices.ContainsFunc(events, func(ev Event) bool {
		return ev.Type == AttemptResolved && ev.Ended.Code == outcome.CodeResultContainsSecret
	})
	for i := range events {
		ev := &events[i]
		if ev.Type == ResponseComplete && ev.Response.Redacted > 0 && !blocked {
			m.Leak(route, metrics.LeakMasked)
		}
		measureEvent(m, route, ev)
	}
	measureFeatures(m, route, before, after, events)
	ended := before != nil && before.Ended
	switch {
	case after.Reopened && (before == nil || !before.Reopened):
		m.Reopened(route)
	case after.Ended && !ended && !after.Reopened:
		if after.Refusal != nil && control.Off("S1-refusals-counted") {
			break
		}
		m.Action(route, after.Facts, after.EndedAt.Sub(after.AcceptedAt))
	}
	was := before != nil && before.Unresolved()
	is := after.Unresolved()
	if was {
		m.Unresolved(before.routeName(), before.AcceptedAt, -1)
	}
	if is {
		m.Unresolved(route, after.AcceptedAt, 1)
	}
	if was && !is && after.Ended {
		source := outcome.Source("")
		if a := after.Deciding(); a != nil && a.End != nil {
			source = a.End.Source
		}
		m.Resolved(route, after.Facts.Outcome, source)
	}
}

// MeasureFound counts an action that a start found as it was left: unresolved, following a
// job, or waiting for a person.
func MeasureFound(m *metrics.Metrics, r *Record) {
	if r.Unresolved() {
		m.Unresolved(r.routeName(), r.AcceptedAt, 1)
	}
	if r.Pending() {
		m.JobsOpen(1)
	}
	if r.PendingApproval() {
		m.ApprovalWaits(r.Approval.AskedAt, 1)
	}
}

// routeName is the route of an action, also of one that was refused before it was
// bound; "" when it matched none.
func (r *Record) routeName() string {
	switch {
	case r.Bound != nil:
		return r.Bound.Route
	case r.Refusal != nil:
		return r.Refusal.Route
	}
	return ""
}

func measureEvent(m *metrics.Metrics, route string, ev *Event) {
	m.Event(ev.Type.String())
	switch ev.Type {
	case DispatchStarted:
		m.Attempt(route, ev.Dispatch.Reused)
	case AttemptFailed:
		m.SetupFailed(route, ev.Ended.Code, ev.Ended.Stage)
	case ActionRefused:
		switch ev.Ended.Code { // the others are counted with their action
		case outcome.CodeDuplicateSuspected:
			m.DuplicateSuspected(route)
		case outcome.CodeRedirectCrossOrigin:
			m.Redirect(route, metrics.RedirectRefused)
		}
	case AttemptResolved:
		if ev.Ended.Followed {
			m.Redirect(route, metrics.RedirectFollowed)
		}
		if ev.Ended.Code == outcome.CodeResultContainsSecret {
			m.Leak(route, metrics.LeakBlocked)
		}
	case ResultCommitted:
		if ev.Result.RedirectTo != "" {
			m.Redirect(route, metrics.RedirectRelayed)
		}
	case CallerGone:
		m.CallerGone(route)
	case DeliveryFailed:
		m.Delivery(route, metrics.DeliveryFailed)
	case ResultDelivered:
		m.Delivery(route, metrics.DeliveryAcknowledged)
	case TunnelOpened:
		m.BlindTunnel()
	case TunnelClosed:
		m.BlindTunnelBytes(ev.Tunnel.BytesOut, ev.Tunnel.BytesIn)
	case UpgradeClosed:
		switch {
		case ev.Tunnel.Blocked:
			m.Leak(route, metrics.LeakBlocked)
		case ev.Tunnel.Redacted > 0:
			m.Leak(route, metrics.LeakMasked)
		}
	case ActionAccepted, PreflightValidated, CredentialAuthorized, RequestSent, ResponseStarted, ResponseComplete, AttemptInterrupted, Booted, SessionOpened, SessionClosed,
		LeaseTaken, LeaseRenewed, LeaseEnded, RetryStopped, Reconciled, Attested, EvidenceImported, JobRecorded, JobPolled, JobEnded,
		ItemsResolved, ApprovalRequested, ApprovalDecided:
		// Counted by their type.
	case EventInvalid, eventTypes:
		// Apply refuses them.
	default:
		// A type that is added later is counted by its type.
	}
}

// measureFetch counts what obtaining a credential came to.
func (p *Pipeline) measureFetch(id string, got *inject.Resolved, err error, took time.Duration) {
	code := outcome.CodeNone
	if err != nil {
		code = outcome.CodeCredentialInvalid
		var e *inject.Error
		if errors.As(err, &e) {
			code = e.Code
		}
	}
	p.cfg.Metrics.CredentialFetched(id, code, took, p.cfg.Clock.Now())
	if err == nil {
		p.cfg.Metrics.CredentialExpires(id, got.Expires)
		p.cfg.Metrics.CredentialVersion(id, got.Since)
	}
}
