package dispatch

import (
	"testing"
	"testing/synctest"
	"time"

	"waybill/internal/contract"
	"waybill/metrics"
	"waybill/outcome"
)

// measured returns the value of a metric whose labels have these values, in any order.
func measured(t *testing.T, m *metrics.Metrics, name string, values ...string) float64 {
	t.Helper()
	families, err := m.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum := 0.0
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, s := range f.GetMetric() {
			has := map[string]bool{}
			for _, l := range s.GetLabel() {
				has[l.GetValue()] = true
			}
			fits := true
			for _, v := range values {
				fits = fits && has[v]
			}
			if fits {
				sum += s.GetCounter().GetValue() + s.GetGauge().GetValue() + float64(s.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

// TestFeaturesAreCounted: approvals, limits, leases, budgets, queries and jobs are counted
// by what is on record, and what is held or waits comes back to nothing (S1, S2).
func TestFeaturesAreCounted(t *testing.T) {
	contract.Covers(t, "S1", "S2")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		m := metrics.New("v0", "")
		m.SetRoutes([]string{"ask", "few"})
		b.cfg.Metrics, b.j.metrics = m, m
		asked := time.Now().Unix()
		done := submit(b, t.Context(), post("ask.example.test", "/v1/pay", "1"))
		if n, at := measured(t, m, "waybill_approvals_waiting"), measured(t, m, "waybill_oldest_waiting_approval_timestamp_seconds"); n != 1 || int64(at) != asked {
			t.Errorf("%v wait, since %v", n, at)
		}
		if _, err := b.Decide(t.Context(), b.onlyApproval(t).ID, "", alice); err != nil {
			t.Fatal(err)
		}
		<-done
		b.Do(t.Context(), post("ask.example.test", "/v1/pay", "2")) // pending, then expires
		time.Sleep(2 * time.Hour)
		for range 3 {
			b.Do(t.Context(), post("few.example.test", "/", ""))
		}
		for name, want := range map[string]map[string]float64{
			"waybill_approvals_waiting": {"": 0}, "waybill_oldest_waiting_approval_timestamp_seconds": {"": 0}, "waybill_approval_wait_seconds": {"": 2},
			"waybill_approvals_total": {"approved": 1, "expired": 1, "denied": 0}, "waybill_limited_total": {"caller_rate": 1, "caller_concurrency": 0},
		} {
			for label, v := range want {
				var labels []string
				if label != "" {
					labels = []string{label}
				}
				if got := measured(t, m, name, labels...); got != v {
					t.Errorf("%s %s: %v, want %v", name, label, got, v)
				}
			}
		}
	})

	m := metrics.New("v0", "")
	m.SetRoutes([]string{"r"})
	at := time.Unix(1_800_000_000, 0)
	bound := &Bound{Route: "r", Budget: &Budget{Attempts: 2}}
	lease := func(process string) *Lease { return &Lease{Generation: 2, Process: process} }
	plain, held, spent := &Record{Bound: bound}, &Record{Bound: bound, Lease: lease("p")}, &Record{Bound: bound, Generation: 2}
	job := func(s JobState) *Record {
		return &Record{Link: &Link{Kind: LinkJob}, Job: &Job{State: s}, Bound: &Bound{Route: "r"}}
	}
	seen := func(o outcome.Outcome, status int) *Resolution {
		return &Resolution{Facts: resolutionFacts(o), Status: status}
	}
	for _, c := range []struct {
		before, after *Record
		ev            Event
	}{
		{plain, held, Event{Type: LeaseTaken, Lease: lease("p")}},
		{held, held, Event{Type: LeaseTaken, Lease: lease("p")}}, // the first one ran out
		{held, plain, Event{Type: LeaseEnded, Lease: lease("p")}},
		{held, plain, Event{Type: AttemptInterrupted}}, // of an earlier process
		{spent, spent, Event{Type: RetryStopped, Ended: &Ended{Reason: StoppedBudget}}},
		{plain, plain, Event{Type: RetryStopped, Ended: &Ended{Reason: StoppedBudget}}},
		{plain, plain, Event{Type: RetryStopped, Ended: &Ended{Reason: StoppedKey}}},
		{plain, plain, Event{Type: RetryStopped, Ended: &Ended{Reason: StoppedContract}}},
		{plain, plain, Event{Type: Reconciled, Resolution: seen(outcome.Committed, 200)}},
		{plain, plain, Event{Type: Reconciled, Resolution: seen(outcome.Rejected, 404)}},
		{plain, plain, Event{Type: Reconciled, Resolution: seen(outcome.Unknown, 0)}},
		{nil, job(JobPending), Event{Type: JobRecorded}},
		{nil, job(JobPending), Event{Type: JobRecorded}},
		{job(JobPending), job(JobPending), Event{Type: JobPolled}},
		{job(JobPending), job(JobDone), Event{Type: JobEnded, Resolution: seen(outcome.Committed, 200)}},
	} {
		c.ev.At = at
		measureFeatures(m, "r", c.before, c.after, []Event{c.ev})
	}
	MeasureFound(m, job(JobPending))
	for _, c := range []struct {
		name, label string
		want        float64
	}{
		{"waybill_leases_total", "taken", 2},
		{"waybill_budget_exhausted_total", "attempts", 1}, {"waybill_budget_exhausted_total", "time", 2},
		{"waybill_reconciliations_total", "committed", 2}, {"waybill_reconciliations_total", "rejected", 1}, {"waybill_reconciliations_total", "failed", 1}, {"waybill_reconciliations_total", "unknown", 1},
	} {
		if got := measured(t, m, c.name, c.label); got != c.want {
			t.Errorf("%s %s: %v, want %v", c.name, c.label, got, c.want)
		}
	}
	if leases, jobs := measured(t, m, "waybill_leases_held"), measured(t, m, "waybill_async_jobs_open"); leases != 0 || jobs != 2 {
		t.Errorf("%v leases, %v jobs", leases, jobs)
	}
}
