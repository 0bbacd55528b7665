package metrics

import (
	"io"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"pgregory.net/rapid"

	"waybill/internal/contract"
	"waybill/outcome"
)

// TestActionsByFacts: phase and outcome are separate labels (CONTRACT S1).
func TestActionsByFacts(t *testing.T) {
	contract.Covers(t, "S1")
	m := New("v0", "abc")
	m.SetRoutes([]string{"pay"})
	setup := outcome.Facts{Phase: outcome.ConnectionSetup, Outcome: outcome.NotAttempted, Retry: outcome.Backoff, Code: outcome.CodeConnectionRefused}
	lost := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteOutcomeUnknown}
	for range 3 {
		m.Action("pay", setup, time.Second)
	}
	m.Action("pay", lost, time.Second)
	m.Action("", outcome.Success(), time.Second)
	want := `
# HELP waybill_actions_total Actions that ended, by route and by the facts on record when they first did. The sum equals the number of ended actions in the journal.
# TYPE waybill_actions_total counter
waybill_actions_total{code="CONNECTION_REFUSED",outcome="not_attempted",phase="connection_setup",retry="backoff",route="pay"} 3
waybill_actions_total{code="REMOTE_OUTCOME_UNKNOWN",outcome="unknown",phase="remote_execution",retry="reconcile",route="pay"} 1
waybill_actions_total{code="REMOTE_RESULT_INCOMPLETE",outcome="unknown",phase="remote_execution",retry="reconcile",route="pay"} 0
waybill_actions_total{code="REMOTE_TIMEOUT",outcome="unknown",phase="remote_execution",retry="reconcile",route="pay"} 0
waybill_actions_total{code="none",outcome="committed",phase="remote_execution",retry="never",route="none"} 1
waybill_actions_total{code="none",outcome="committed",phase="remote_execution",retry="never",route="pay"} 0
`
	if err := testutil.GatherAndCompare(m.Gatherer(), strings.NewReader(want), "waybill_actions_total"); err != nil {
		t.Error(err)
	}
}

// everything calls every record method once with the given texts.
func everything(m *Metrics, text string) {
	at := time.Now()
	m.Action(text, outcome.Success(), time.Second)
	m.Unrecorded(outcome.CodeJournalUnavailable)
	m.InFlight(1)
	m.Stage(Stage(text), time.Second)
	m.Stage(StageConnect, 3*time.Millisecond)
	m.Attempt(text, true)
	m.SetupFailed(text, outcome.CodeDNSError, outcome.Stage(text))
	m.Resolved(text, outcome.Committed, outcome.Source(text))
	m.Reopened(text)
	m.Recovered(outcome.Unknown, 2)
	m.StoreFailed()
	m.Redirect(text, RedirectRelayed)
	m.Leak(text, LeakMasked)
	m.DuplicateSuspected(text)
	m.Delivery(text, DeliveryFailed)
	m.CallerGone(text)
	m.BlindTunnel()
	m.BlindTunnelBytes(3, 4)
	m.Unresolved(text, at.Add(-2*time.Hour), 1)
	m.ApprovalWaits(at, 1)
	m.ApprovalWaits(at.Add(time.Minute), 2)
	m.ApprovalWaits(at.Add(time.Minute), -1)
	m.ApprovalEnded(Approval(text), time.Second)
	m.Lease(Lease(text))
	m.LeasesHeld(1)
	m.BudgetExhausted(text, Budget(text))
	m.Replayed(text)
	m.Reconciled(text, Reconciliation(text))
	m.JobsOpen(1)
	m.Limited(Limit(text))
	m.Announced(Announcement(text))
	m.SignedDecision(SignedDecision(text))
	m.Commit(time.Millisecond, time.Millisecond, 4, 3, 100)
	m.Event(text)
	m.AppendRefused(text)
	m.Stopped()
	m.Quarantined(true)
	m.Dropped(1, 10)
	m.WatchJournal(func() JournalState { return JournalState{Bytes: 7, Writable: true} })
	m.CallerConnected(Endpoint(text))
	m.AuditRecords(3)
	m.AuditLag(7)
	m.AuditGap(text)
	m.AuditFailing(true)
	m.AuditCheckpoint(at)
	m.AuditDelivery(true)
	m.WatchConnections(func() ConnectionState { return ConnectionState{Callers: 1, Tunnels: 2, Upstream: 3, SSH: 4} })
	m.CredentialFetched(text, outcome.CodeNone, time.Millisecond, at)
	m.CredentialFetched(text, outcome.CodeCredentialUnavailable, time.Millisecond, at)
	m.CredentialVersion(text, at)
	m.CredentialExpires(text, at)
	m.CredentialRefreshed(text, true)
	m.VaultLocked(true)
	m.Reloaded(false, at)
	m.Reloaded(true, time.Unix(1, 0))
	m.Draining(true)
	m.JournalLabels([]string{"BOOT"}, []string{"no_space"})
	m.SetRoutes([]string{"pay"})
	m.SetCredentials([]string{"key"})
}

// TestLabelsAreClosed: whatever a caller passes, only configured names and values of
// closed enumerations become labels, and the number of series is bounded (CONTRACT S2).
func TestLabelsAreClosed(t *testing.T) {
	contract.Covers(t, "S2")
	rapid.Check(t, func(rt *rapid.T) {
		m := New("v0", "abc")
		m.SetRoutes([]string{"pay"})
		m.SetCredentials([]string{"key"})
		hostile := rapid.SliceOfN(rapid.OneOf(
			rapid.SampledFrom([]string{"api.example.test", "/v1/charges?id=7", "act_01JDZZZZZZZZZZZZZZZZZZZZZZ", "\xff\xfe", "a\nb", "pay ", "PAY", `x",route="pay`}),
			rapid.String().Filter(func(s string) bool { return s != "" && s != "pay" && s != "key" }),
		), 1, 20).Draw(rt, "texts")
		for _, s := range hostile {
			everything(m, s)
		}
		series := 0
		families, err := m.Gatherer().Gather()
		if err != nil {
			rt.Fatal(err)
		}
		for _, f := range families {
			if !strings.HasPrefix(f.GetName(), "waybill_") || f.GetName() == "waybill_build_info" {
				continue
			}
			series += len(f.GetMetric())
			for _, s := range f.GetMetric() {
				for _, l := range s.GetLabel() {
					if !closedLabel(l.GetName(), l.GetValue()) {
						rt.Fatalf("%s: %s=%q is no value of a closed list", f.GetName(), l.GetName(), l.GetValue())
					}
				}
			}
		}
		if series > 250 {
			rt.Fatalf("%d series from %d texts", series, len(hostile))
		}
	})
	// A configuration that is generated anew all the time is bounded as well.
	m := New("v0", "abc")
	for i := range 3 * maxNames {
		name := "r" + string(rune('a'+i%26)) + strings.Repeat("x", i/26)
		m.SetRoutes([]string{name})
		m.DuplicateSuspected(name)
	}
	if n := testutil.CollectAndCount(m.duplicates); n > maxNames+1 {
		t.Errorf("%d series of routes", n)
	}
}

// closedLabel says which values each label may have.
func closedLabel(name, value string) bool {
	texts := func(list ...string) bool { return slices.Contains(list, value) }
	switch name {
	case "route":
		return texts("pay", NoRoute, Other)
	case "credential":
		return texts("key", NoRoute, Other)
	case "phase":
		return slices.ContainsFunc(outcome.Phases(), func(p outcome.Phase) bool { return p.String() == value })
	case "outcome":
		return slices.ContainsFunc(outcome.Outcomes(), func(o outcome.Outcome) bool { return o.String() == value })
	case "retry":
		return slices.ContainsFunc(outcome.Retries(), func(r outcome.Retry) bool { return r.String() == value })
	case "code":
		return value == NoRoute || slices.ContainsFunc(outcome.Codes(), func(c outcome.Code) bool { return c.String() == value })
	case "stage":
		return texts(NoRoute, Other) || slices.Contains(Stages(), Stage(value)) || slices.Contains(outcome.Stages(), outcome.Stage(value))
	case "source":
		return texts(NoRoute, Other) || slices.Contains(outcome.Sources(), outcome.Source(value))
	case "age":
		return slices.Contains(Ages(), value)
	case "type":
		return texts("BOOT", Other)
	case "reason":
		return texts("no_space", Other) || texts(AuditGaps()...)
	case "decision":
		return value == Other || slices.Contains(Approvals(), Approval(value))
	case "event":
		return value == Other || slices.Contains(Leases(), Lease(value))
	case "budget":
		return value == Other || slices.Contains(Budgets(), Budget(value))
	case "limit":
		return value == Other || slices.Contains(Limits(), Limit(value))
	case "delivery":
		return value == Other || slices.Contains(Announcements(), Announcement(value))
	case "answer":
		return value == Other || slices.Contains(SignedDecisions(), SignedDecision(value))
	case "endpoint":
		return value == Other || slices.Contains(Endpoints(), Endpoint(value))
	case "result":
		return texts(Other, "success", "failure", string(RedirectFollowed), string(RedirectRelayed), string(RedirectRefused), string(LeakMasked), string(LeakBlocked),
			string(DeliveryFailed), string(DeliveryAcknowledged)) || slices.Contains(Reconciliations(), Reconciliation(value))
	case "connection":
		return texts("fresh", "reused")
	case "direction":
		return texts("in", "out")
	case "kind":
		return texts("caller", "tunnel", "upstream_idle", "ssh_session")
	}
	return false
}

// TestUnresolvedByAge: a gauge by route and age, without ids (CONTRACT S2).
func TestUnresolvedByAge(t *testing.T) {
	m := New("v0", "abc")
	m.SetRoutes([]string{"pay", "mail"})
	now := time.Unix(1_800_000_000, 0)
	m.unresolved.now = func() time.Time { return now }
	for _, age := range []time.Duration{time.Minute, 2 * time.Minute, 30 * time.Minute, 2 * time.Hour, 8 * 24 * time.Hour} {
		m.Unresolved("pay", now.Add(-age), 1)
	}
	m.Unresolved("mail", now.Add(-time.Hour-time.Minute), 1)
	m.Unresolved("pay", now.Add(-2*time.Hour), -1)
	m.Unresolved("mail", now.Add(-time.Hour-time.Minute), -1)
	want := `
# HELP waybill_oldest_unresolved_timestamp_seconds Unix time, to the minute, at which the oldest unresolved action was accepted; absent while there is none.
# TYPE waybill_oldest_unresolved_timestamp_seconds gauge
waybill_oldest_unresolved_timestamp_seconds{route="pay"} 1.7993088e+09
# HELP waybill_unresolved_actions Ended actions whose outcome is unknown, by route and age since they were accepted: less than the label says, and not less than the one before.
# TYPE waybill_unresolved_actions gauge
waybill_unresolved_actions{age="1d",route="mail"} 0
waybill_unresolved_actions{age="1h",route="mail"} 0
waybill_unresolved_actions{age="5m",route="mail"} 0
waybill_unresolved_actions{age="6h",route="mail"} 0
waybill_unresolved_actions{age="7d",route="mail"} 0
waybill_unresolved_actions{age="older",route="mail"} 0
waybill_unresolved_actions{age="1d",route="pay"} 0
waybill_unresolved_actions{age="1h",route="pay"} 1
waybill_unresolved_actions{age="5m",route="pay"} 2
waybill_unresolved_actions{age="6h",route="pay"} 0
waybill_unresolved_actions{age="7d",route="pay"} 0
waybill_unresolved_actions{age="older",route="pay"} 1
`
	if err := testutil.GatherAndCompare(m.Gatherer(), strings.NewReader(want), "waybill_unresolved_actions", "waybill_oldest_unresolved_timestamp_seconds"); err != nil {
		t.Error(err)
	}
}

// TestHandlerServesEveryFamily: what the dashboards ask for is served, and counts.
func TestHandlerServesEveryFamily(t *testing.T) {
	m := New("v0", "abc")
	m.SetRoutes([]string{"r"})
	m.SetCredentials([]string{"r"})
	everything(m, "r")
	rec := httptest.NewRecorder()
	m.Handler().ServeHTTP(rec, httptest.NewRequest("GET", "/metrics", nil))
	body, err := io.ReadAll(rec.Body)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(string(body), "\n")
	for _, line := range []string{
		`waybill_actions_total{code="none",outcome="committed",phase="remote_execution",retry="never",route="r"} 1`,
		`waybill_stage_duration_seconds_count{stage="connect"} 1`, `waybill_stage_duration_seconds_count{stage="commit"} 0`,
		"waybill_journal_commit_seconds_count 1", "waybill_journal_group_requests_sum 4", "waybill_journal_syncs_total 3", `waybill_recovered_actions_total{outcome="unknown"} 2`,
		`waybill_recovered_actions_total{outcome="not_attempted"} 0`, "waybill_config_last_reload_successful 1", "waybill_config_last_reload_success_timestamp_seconds 1",
		`waybill_config_reloads_total{result="failure"} 1`, "waybill_journal_quarantined 1", "waybill_result_store_failures_total 1", "waybill_actions_in_flight 1",
		`waybill_unrecorded_refusals_total{code="JOURNAL_UNAVAILABLE"} 1`, `waybill_build_info{goversion="go`, "process_open_fds", "go_goroutines",
		`waybill_credential_expiry_timestamp_seconds{credential="r"} `, "waybill_journal_bytes 7", "waybill_journal_writable 1", `waybill_connections_open{kind="upstream_idle"} 3`,
		`waybill_unresolved_actions{age="6h",route="r"} 1`, "waybill_approvals_waiting 2", `waybill_budget_exhausted_total{budget="other",route="r"} 1`,
		`waybill_approval_webhook_deliveries_total{delivery="given_up"} 0`, `waybill_approval_webhook_decisions_total{answer="signature"} 0`,
	} {
		if !slices.ContainsFunc(lines, func(l string) bool { return strings.HasPrefix(l, line) }) {
			t.Errorf("missing: %s", line)
		}
	}
	if problems, err := testutil.GatherAndLint(m.Gatherer()); err != nil {
		t.Error(err)
	} else {
		for _, p := range problems {
			t.Errorf("%s: %s", p.Metric, p.Text)
		}
	}
	everything(nil, "r")
}
