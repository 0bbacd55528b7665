package metrics

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// featureMetrics are about approvals, leases, budgets, reconciliation and limits.
type featureMetrics struct {
	approvals      *prometheus.CounterVec
	approvalWait   prometheus.Histogram
	waiting        prometheus.Gauge
	oldestWaiting  prometheus.Gauge
	leases         *prometheus.CounterVec
	leasesHeld     prometheus.Gauge
	budgets        *prometheus.CounterVec
	replayed       *prometheus.CounterVec
	reconciliation *prometheus.CounterVec
	jobs           prometheus.Gauge
	limited        *prometheus.CounterVec
	announcements  *prometheus.CounterVec
	decisions      *prometheus.CounterVec

	waitMu sync.Mutex
	asked  map[int64]int // Unix second at which it was asked → approvals that wait
}

// Approval is how an approval ended (CONTRACT D4).
type Approval string

// How approvals end.
const (
	ApprovalApproved Approval = "approved"
	ApprovalDenied   Approval = "denied"
	ApprovalExpired  Approval = "expired"
	ApprovalUnusable Approval = "unusable" // the request or its credential changed (D3)
)

// Approvals returns every way an approval ends.
func Approvals() []Approval {
	return []Approval{ApprovalApproved, ApprovalDenied, ApprovalExpired, ApprovalUnusable}
}

// Lease is what happened to the lease of an action (CONTRACT J1, J2).
type Lease string

// What happens to leases.
const (
	LeaseTaken   Lease = "taken"
	LeaseRefused Lease = "refused" // LEASE_HELD: another attempt is active
	LeaseLost    Lease = "lost"    // LEASE_LOST: a newer generation overtook
)

// Leases returns what happens to leases.
func Leases() []Lease { return []Lease{LeaseTaken, LeaseRefused, LeaseLost} }

// Budget is what was used up (CONTRACT J3, J4).
type Budget string

// The budgets of further attempts.
const (
	BudgetAttempts Budget = "attempts" // of one action
	BudgetTime     Budget = "time"     // of one action, the key's window included (I5)
	BudgetRoute    Budget = "route"    // of all actions of a route
)

// Budgets returns every budget.
func Budgets() []Budget { return []Budget{BudgetAttempts, BudgetTime, BudgetRoute} }

// Reconciliation is what a reconciling query, an attestation or a poll showed (CONTRACT K6, K5, A7).
type Reconciliation string

// What reconciling shows.
const (
	ReconciledCommitted Reconciliation = "committed"
	ReconciledRejected  Reconciliation = "rejected"
	ReconciledUnknown   Reconciliation = "unknown" // it answered, and nothing is resolved
	ReconcileFailed     Reconciliation = "failed"  // no answer that could be read
)

// Reconciliations returns everything that reconciling shows.
func Reconciliations() []Reconciliation {
	return []Reconciliation{ReconciledCommitted, ReconciledRejected, ReconciledUnknown, ReconcileFailed}
}

// Limit is a limit that refused work (section V).
type Limit string

// The limits.
const (
	LimitCallerRate        Limit = "caller_rate"
	LimitCallerConcurrency Limit = "caller_concurrency"
	LimitRouteRate         Limit = "route_rate"
	LimitRouteConcurrency  Limit = "route_concurrency"
)

// Limits returns every limit.
func Limits() []Limit {
	return []Limit{LimitCallerRate, LimitCallerConcurrency, LimitRouteRate, LimitRouteConcurrency}
}

// Announcement is what became of telling the approvals' webhook of a waiting approval.
type Announcement string

// What becomes of announcements.
const (
	AnnounceDelivered Announcement = "delivered" // the endpoint answered 2xx
	AnnounceFailed    Announcement = "failed"    // one try
	AnnounceGivenUp   Announcement = "given_up"  // there will be no further try, though the approval waits
)

// Announcements returns everything that becomes of announcements.
func Announcements() []Announcement {
	return []Announcement{AnnounceDelivered, AnnounceFailed, AnnounceGivenUp}
}

// SignedDecision is how a message to the decisions' endpoint was answered (CONTRACT D4).
type SignedDecision string

// The answers. All but the first refused the message.
const (
	DecisionTaken        SignedDecision = "taken"
	DecisionUnsigned     SignedDecision = "unsigned" // a field of the signature is missing
	DecisionSignature    SignedDecision = "signature"
	DecisionTimestamp    SignedDecision = "timestamp" // too far from this machine's clock
	DecisionNoKey        SignedDecision = "no_key"    // the key cannot be used now
	DecisionTooLarge     SignedDecision = "too_large"
	DecisionBad          SignedDecision = "bad_decision"
	DecisionReplayed     SignedDecision = "replayed"
	DecisionTooMany      SignedDecision = "too_many"
	DecisionNoApproval   SignedDecision = "no_approval"
	DecisionClosed       SignedDecision = "closed"        // decided or expired already
	DecisionOtherRequest SignedDecision = "other_request" // another fingerprint (D3)
	DecisionUnusable     SignedDecision = "unusable"      // the configuration changed (D3)
	DecisionNotRecorded  SignedDecision = "not_recorded"
)

// SignedDecisions returns every answer.
func SignedDecisions() []SignedDecision {
	return []SignedDecision{
		DecisionTaken, DecisionUnsigned, DecisionSignature, DecisionTimestamp, DecisionNoKey, DecisionTooLarge, DecisionBad, DecisionReplayed, DecisionTooMany,
		DecisionNoApproval, DecisionClosed, DecisionOtherRequest, DecisionUnusable, DecisionNotRecorded,
	}
}

func (m *Metrics) newFeatures() {
	m.approvals = m.counters("waybill_approvals_total", "Approvals that ended, by how.", "decision")
	m.approvalWait = m.histogram("waybill_approval_wait_seconds", "Time from asking for an approval to its end, in seconds.", []float64{1, 5, 15, 60, 300, 900, 3600, 14400, 86400})
	m.waiting = m.gauge("waybill_approvals_waiting", "Approvals that wait for a decision.")
	m.oldestWaiting = m.gauge("waybill_oldest_waiting_approval_timestamp_seconds", "Unix time at which the oldest waiting approval was asked for; 0 while none waits.")
	m.leases = m.counters("waybill_leases_total", "Leases on actions: taken, refused because another attempt is active, lost to a newer generation.", "event")
	m.leasesHeld = m.gauge("waybill_leases_held", "Leases on actions that are held now.")
	m.budgets = m.counters("waybill_budget_exhausted_total", "Further attempts that were not made because a budget was spent.", "route", "budget")
	m.replayed = m.counters("waybill_replayed_results_total", "Recorded results given in answer to a repeated submission, with nothing dispatched.", "route")
	m.reconciliation = m.counters("waybill_reconciliations_total", "Reconciling queries and polls that ended, by what they showed.", "route", "result")
	m.jobs = m.gauge("waybill_async_jobs_open", "Asynchronous jobs that are followed and have not ended.")
	m.limited = m.counters("waybill_limited_total", "Submissions that a limit refused.", "limit")
	m.announcements = m.counters("waybill_approval_webhook_deliveries_total", "Messages to the approvals' webhook, by what became of them: delivered, a try that failed, or given up while the approval waits.", "delivery")
	m.decisions = m.counters("waybill_approval_webhook_decisions_total", "Messages to the decisions' endpoint, by the answer: taken, or why it was refused.", "answer")
	for _, a := range Announcements() {
		m.announcements.WithLabelValues(string(a))
	}
	for _, d := range SignedDecisions() {
		m.decisions.WithLabelValues(string(d))
	}
	for _, a := range Approvals() {
		m.approvals.WithLabelValues(string(a))
	}
	for _, l := range Leases() {
		m.leases.WithLabelValues(string(l))
	}
	for _, l := range Limits() {
		m.limited.WithLabelValues(string(l))
	}
}

// ApprovalWaits adds delta to the approvals that wait, asked for at that time: the same
// when one is taken out as when it was put in.
func (m *Metrics) ApprovalWaits(asked time.Time, delta int) {
	if m == nil {
		return
	}
	m.waitMu.Lock()
	defer m.waitMu.Unlock()
	if m.asked == nil {
		m.asked = make(map[int64]int)
	}
	at := asked.Unix()
	if m.asked[at] += delta; m.asked[at] == 0 {
		delete(m.asked, at)
	}
	n, oldest := 0, int64(0)
	for at, count := range m.asked {
		n += count
		if oldest == 0 || at < oldest {
			oldest = at
		}
	}
	m.waiting.Set(float64(n))
	m.oldestWaiting.Set(float64(oldest))
}

// ApprovalEnded counts an approval that ended, and how long it was waited for.
func (m *Metrics) ApprovalEnded(a Approval, waited time.Duration) {
	if m != nil {
		m.approvals.WithLabelValues(closed(string(a), Approvals())).Inc()
		m.approvalWait.Observe(waited.Seconds())
	}
}

// Lease counts what happened to a lease.
func (m *Metrics) Lease(l Lease) {
	if m != nil {
		m.leases.WithLabelValues(closed(string(l), Leases())).Inc()
	}
}

// LeasesHeld adds delta to the leases that are held.
func (m *Metrics) LeasesHeld(delta int) {
	if m != nil {
		m.leasesHeld.Add(float64(delta))
	}
}

// BudgetExhausted counts a further attempt that a budget stopped (CONTRACT J4).
func (m *Metrics) BudgetExhausted(route string, b Budget) {
	if m != nil {
		m.budgets.WithLabelValues(m.routes.label(route), closed(string(b), Budgets())).Inc()
	}
}

// Replayed counts a recorded result that answered a repeated submission (CONTRACT I9).
func (m *Metrics) Replayed(route string) {
	if m != nil {
		m.replayed.WithLabelValues(m.routes.label(route)).Inc()
	}
}

// Reconciled counts a reconciling query or poll that ended (CONTRACT K6, A7).
func (m *Metrics) Reconciled(route string, r Reconciliation) {
	if m != nil {
		m.reconciliation.WithLabelValues(m.routes.label(route), closed(string(r), Reconciliations())).Inc()
	}
}

// JobsOpen adds delta to the asynchronous jobs that are followed (CONTRACT A7).
func (m *Metrics) JobsOpen(delta int) {
	if m != nil {
		m.jobs.Add(float64(delta))
	}
}

// Limited counts a submission that a limit refused.
func (m *Metrics) Limited(l Limit) {
	if m != nil {
		m.limited.WithLabelValues(closed(string(l), Limits())).Inc()
	}
}

// Announced counts what became of telling the approvals' webhook.
func (m *Metrics) Announced(a Announcement) {
	if m != nil {
		m.announcements.WithLabelValues(closed(string(a), Announcements())).Inc()
	}
}

// SignedDecision counts a message to the decisions' endpoint by its answer.
func (m *Metrics) SignedDecision(d SignedDecision) {
	if m != nil {
		m.decisions.WithLabelValues(closed(string(d), SignedDecisions())).Inc()
	}
}

// closed returns value if the list has it, else Other (CONTRACT S2).
func closed[T ~string](value string, list []T) string {
	for _, v := range list {
		if string(v) == value {
			return value
		}
	}
	return Other
}
