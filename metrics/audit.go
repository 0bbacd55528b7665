package metrics

import (
	"slices"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// auditMetrics are about the audit log (CONTRACT N5).
type auditMetrics struct {
	records    prometheus.Counter
	lag        prometheus.Gauge
	gaps       *prometheus.CounterVec
	failing    prometheus.Gauge
	checkpoint prometheus.Gauge
	deliveries *prometheus.CounterVec
}

// AuditGaps are the reasons of gaps in the audit log.
func AuditGaps() []string {
	return []string{"removed_by_retention", "missing_in_the_journal", "journal_rolled_back", "log_damaged"}
}

func (m *Metrics) newAudit() {
	m.audit.records = m.counter("waybill_audit_records_total", "Records that became durable in the audit log.")
	m.audit.lag = m.gauge("waybill_audit_lag_events", "Events of the journal that are not in the audit log yet.")
	m.audit.gaps = m.counters("waybill_audit_gaps_total", "Gaps that are on record in the audit log, by reason.", "reason")
	m.audit.failing = m.gauge("waybill_audit_failing", "1 while the audit log cannot be written, else 0.")
	m.audit.checkpoint = m.gauge("waybill_audit_last_checkpoint_timestamp_seconds", "Unix time of the last signed checkpoint of the audit log.")
	m.audit.deliveries = m.counters("waybill_audit_checkpoint_deliveries_total", "Checkpoints handed to a destination, by result.", "result")
	for _, r := range AuditGaps() {
		m.audit.gaps.WithLabelValues(r)
	}
	for _, r := range []string{"success", "failure"} {
		m.audit.deliveries.WithLabelValues(r)
	}
}

// AuditRecords counts records that became durable.
func (m *Metrics) AuditRecords(n int) {
	if m != nil {
		m.audit.records.Add(float64(n))
	}
}

// AuditLag says how many events are not in the log yet.
func (m *Metrics) AuditLag(events uint64) {
	if m != nil {
		m.audit.lag.Set(float64(events))
	}
}

// AuditGap counts a gap; reason is one of AuditGaps.
func (m *Metrics) AuditGap(reason string) {
	if m != nil {
		if !slices.Contains(AuditGaps(), reason) {
			reason = Other
		}
		m.audit.gaps.WithLabelValues(reason).Inc()
	}
}

// AuditFailing says whether the log cannot be written.
func (m *Metrics) AuditFailing(yes bool) {
	if m == nil {
		return
	}
	v := 0.0
	if yes {
		v = 1
	}
	m.audit.failing.Set(v)
}

// AuditCheckpoint notes the last signed checkpoint.
func (m *Metrics) AuditCheckpoint(at time.Time) {
	if m != nil {
		m.audit.checkpoint.Set(float64(at.Unix()))
	}
}

// AuditDelivery counts a checkpoint that arrived, or did not.
func (m *Metrics) AuditDelivery(ok bool) {
	if m == nil {
		return
	}
	result := "failure"
	if ok {
		result = "success"
	}
	m.audit.deliveries.WithLabelValues(result).Inc()
}
