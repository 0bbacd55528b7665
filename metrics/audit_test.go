package metrics

import (
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
)

func TestAudit(t *testing.T) {
	m := New("v", "r")
	m.AuditRecords(3)
	m.AuditLag(7)
	m.AuditGap(AuditGaps()[0])
	m.AuditGap("of the text of an error")
	m.AuditFailing(true)
	m.AuditFailing(false)
	m.AuditCheckpoint(time.Unix(1000, 0))
	m.AuditDelivery(true)
	m.AuditDelivery(false)
	want := `
# HELP waybill_audit_gaps_total Gaps that are on record in the audit log, by reason.
# TYPE waybill_audit_gaps_total counter
waybill_audit_gaps_total{reason="journal_rolled_back"} 0
waybill_audit_gaps_total{reason="log_damaged"} 0
waybill_audit_gaps_total{reason="missing_in_the_journal"} 0
waybill_audit_gaps_total{reason="other"} 1
waybill_audit_gaps_total{reason="removed_by_retention"} 1
# HELP waybill_audit_lag_events Events of the journal that are not in the audit log yet.
# TYPE waybill_audit_lag_events gauge
waybill_audit_lag_events 7
# HELP waybill_audit_failing 1 while the audit log cannot be written, else 0.
# TYPE waybill_audit_failing gauge
waybill_audit_failing 0
`
	if err := testutil.GatherAndCompare(m.Gatherer(), strings.NewReader(want), "waybill_audit_gaps_total", "waybill_audit_lag_events", "waybill_audit_failing"); err != nil {
		t.Error(err)
	}
	var none *Metrics
	none.AuditRecords(1)
	none.AuditLag(1)
	none.AuditGap("x")
	none.AuditFailing(true)
	none.AuditCheckpoint(time.Now())
	none.AuditDelivery(true)
}
