package metrics

import (
	"io"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"

	"waybill/internal/contract"
	"waybill/outcome"
)

// TestActionsByFacts: phase and outcome are separate labels (CONTRACT S1).
func TestActionsByFacts(t *testing.T) {
	contract.Covers(t, "S1")
	m := New("v0", "abc")
	setup := outcome.Facts{Phase: outcome.ConnectionSetup, Outcome: outcome.NotAttempted, Retry: outcome.Backoff, Code: outcome.CodeConnectionRefused}
	lost := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteOutcomeUnknown}
	for range 3 {
		m.Action("pay", setup)
	}
	m.Action("pay", lost)
	m.Action("", outcome.Success())
	want := `
# HELP waybill_actions_total Actions that ended, by route and by the facts on record. The sum equals the number of ended actions in the journal.
# TYPE waybill_actions_total counter
waybill_actions_total{code="CONNECTION_REFUSED",outcome="not_attempted",phase="connection_setup",retry="backoff",route="pay"} 3
waybill_actions_total{code="REMOTE_OUTCOME_UNKNOWN",outcome="unknown",phase="remote_execution",retry="reconcile",route="pay"} 1
waybill_actions_total{code="none",outcome="committed",phase="remote_execution",retry="never",route="none"} 1
`
	if err := testutil.GatherAndCompare(m.Gatherer(), strings.NewReader(want), "waybill_actions_total"); err != nil {
		t.Error(err)
	}
}

// TestHandlerServesEveryFamily: what the dashboards will ask for exists from the start.
func TestHandlerServesEveryFamily(t *testing.T) {
	m := New("v0", "abc")
	m.Action("r", outcome.Success())
	m.Stage(StageConnect, 3*time.Millisecond)
	m.Commit(time.Millisecond, 4, 3)
	m.Recovered(outcome.Unknown, 2)
	m.Reloaded(false, time.Now())
	m.Reloaded(true, time.Unix(1, 0))
	m.Quarantined(true)
	m.StoreFailed()
	m.InFlight(1)
	m.Unrecorded(outcome.CodeJournalUnavailable)
	rec := httptest.NewRecorder()
	m.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	body, err := io.ReadAll(rec.Body)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		`waybill_actions_total{code="none",outcome="committed",phase="remote_execution",retry="never",route="r"} 1`,
		`waybill_stage_duration_seconds_count{stage="connect"} 1`, `waybill_stage_duration_seconds_count{stage="commit"} 0`,
		"waybill_journal_commit_seconds_count 1", "waybill_journal_group_requests_sum 4", "waybill_journal_syncs_total 3", `waybill_recovered_actions_total{outcome="unknown"} 2`,
		`waybill_recovered_actions_total{outcome="not_attempted"} 0`, "waybill_config_last_reload_successful 1", "waybill_config_last_reload_success_timestamp_seconds 1",
		`waybill_config_reloads_total{result="failure"} 1`, "waybill_journal_quarantined 1", "waybill_result_store_failures_total 1", "waybill_actions_in_flight 1",
		`waybill_unrecorded_refusals_total{code="JOURNAL_UNAVAILABLE"} 1`, `waybill_build_info{revision="abc",version="v0"} 1`, "process_open_fds", "go_goroutines",
	} {
		if !slices.ContainsFunc(strings.Split(string(body), "\n"), func(l string) bool { return strings.HasPrefix(l, line) }) {
			t.Errorf("missing: %s", line)
		}
	}
	var none *Metrics
	none.Action("r", outcome.Success())
	none.Stage(StageRemote, 1)
	none.Commit(1, 1, 1)
	none.InFlight(1)
}
