package dispatch

import (
	"slices"

	"waybill/metrics"
	"waybill/outcome"
)

// measureFeatures counts approvals, leases, budgets, queries and jobs: like Measure, by
// what became durable.
func measureFeatures(m *metrics.Metrics, route string, before, after *Record, events []Event) {
	for i := range events {
		switch ev := &events[i]; ev.Type { //nolint:exhaustive // the others are counted elsewhere
		case ApprovalDecided:
			how := metrics.Approval(ev.Decision.Verdict)
			if slices.ContainsFunc(events, func(e Event) bool { return e.Type == ActionRefused && e.Ended.Code == outcome.CodeSnapshotMismatch }) {
				how = metrics.ApprovalUnusable
			}
			m.ApprovalEnded(how, max(ev.At.Sub(after.Approval.AskedAt), 0))
		case LeaseTaken:
			m.Lease(metrics.LeaseTaken)
			if before == nil || before.Lease == nil || before.Lease.Process != ev.Lease.Process {
				m.LeasesHeld(1) // else it follows one of this process that ran out
			}
		case RetryStopped:
			switch ev.Ended.Reason {
			case StoppedBudget:
				what := metrics.BudgetTime
				if b := after.Bound.Budget; b != nil && after.CurrentGeneration() >= b.Attempts {
					what = metrics.BudgetAttempts
				}
				m.BudgetExhausted(route, what)
			case StoppedKey:
				m.BudgetExhausted(route, metrics.BudgetTime)
			}
		case Reconciled, JobEnded:
			m.Reconciled(route, reconciliation(ev.Resolution))
		case JobPolled:
			m.Reconciled(route, metrics.ReconciledUnknown)
		}
	}
	held := before != nil && before.Lease != nil
	if held && after.Lease == nil && !slices.ContainsFunc(events, func(e Event) bool { return e.Type == AttemptInterrupted }) {
		m.LeasesHeld(-1) // what an earlier process held was never counted here
	}
	if was, is := before != nil && before.Pending(), after.Pending(); was != is {
		m.JobsOpen(map[bool]int{true: 1, false: -1}[is])
	}
	was, is := before != nil && before.PendingApproval(), after.PendingApproval()
	switch {
	case is && !was:
		m.ApprovalWaits(after.Approval.AskedAt, 1)
	case was && !is:
		m.ApprovalWaits(before.Approval.AskedAt, -1)
	}
}

func reconciliation(r *Resolution) metrics.Reconciliation {
	switch {
	case r.Outcome == outcome.Committed:
		return metrics.ReconciledCommitted
	case r.Outcome == outcome.Rejected:
		return metrics.ReconciledRejected
	case r.Status == 0:
		return metrics.ReconcileFailed
	}
	return metrics.ReconciledUnknown
}
