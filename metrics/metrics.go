// Package metrics declares every collector of Waybill once, with typed record
// methods. It is the only importer of client_golang. Labels are enumerations or
// route names, never hosts, paths, ids or error text (CONTRACT S2).
package metrics

import (
	"net/http"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"waybill/outcome"
)

// NoRoute is the route label of actions that matched no route.
const NoRoute = "none"

// Stage names a measured stretch of an action's way.
type Stage string

// The stages, in order.
const (
	StageAccept     Stage = "accept"     // until the body is spooled and bound
	StageCredential Stage = "credential" // until the secret is attached
	StageConnect    Stage = "connect"    // until a verified connection is held
	StageRecord     Stage = "record"     // until DISPATCH_STARTED is durable
	StageRemote     Stage = "remote"     // until the answer is complete
	StageCommit     Stage = "commit"     // until the result is durable
)

// Stages returns every stage.
func Stages() []Stage {
	return []Stage{StageAccept, StageCredential, StageConnect, StageRecord, StageRemote, StageCommit}
}

// Metrics holds the collectors. Its methods are safe for concurrent use; a nil
// *Metrics records nothing.
type Metrics struct {
	registry *prometheus.Registry

	actions    *prometheus.CounterVec
	unrecorded *prometheus.CounterVec
	inFlight   prometheus.Gauge
	stages     map[Stage]prometheus.Observer
	commit     prometheus.Histogram
	group      prometheus.Histogram
	syncs      prometheus.Counter
	recovered  *prometheus.CounterVec
	reloadOK   prometheus.Gauge
	reloadAt   prometheus.Gauge
	reloads    *prometheus.CounterVec
	quarantine prometheus.Gauge
	storeFail  prometheus.Counter
}

// New registers the collectors with a registry of its own. version and revision
// label waybill_build_info.
func New(version, revision string) *Metrics {
	r := prometheus.NewRegistry()
	m := &Metrics{registry: r, stages: make(map[Stage]prometheus.Observer)}
	m.actions = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "waybill_actions_total",
		Help: "Actions that ended, by route and by the facts on record. The sum equals the number of ended actions in the journal."},
		[]string{"route", "phase", "outcome", "retry", "code"})
	m.unrecorded = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "waybill_unrecorded_refusals_total",
		Help: "Refusals that left no record: no caller identity, or no journal."}, []string{"code"})
	m.inFlight = prometheus.NewGauge(prometheus.GaugeOpts{Name: "waybill_actions_in_flight", Help: "Actions that have been accepted and have not ended."})
	stages := prometheus.NewHistogramVec(prometheus.HistogramOpts{Name: "waybill_stage_duration_seconds",
		Help:    "Time an action spent in each stage of its way, in seconds.",
		Buckets: []float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}}, []string{"stage"})
	for _, s := range Stages() {
		m.stages[s] = stages.WithLabelValues(string(s))
	}
	m.commit = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "waybill_journal_commit_seconds", Help: "Time of one durable group commit, in seconds.",
		Buckets: prometheus.ExponentialBuckets(0.0001, 2, 16)})
	m.group = prometheus.NewHistogram(prometheus.HistogramOpts{Name: "waybill_journal_group_requests", Help: "Appends that shared one durable group commit.",
		Buckets: prometheus.ExponentialBuckets(1, 2, 10)})
	m.syncs = prometheus.NewCounter(prometheus.CounterOpts{Name: "waybill_journal_syncs_total", Help: "Sync system calls of durable group commits."})
	m.recovered = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "waybill_recovered_actions_total",
		Help: "Actions found open at start-up and closed by what their records prove."}, []string{"outcome"})
	m.reloadOK = prometheus.NewGauge(prometheus.GaugeOpts{Name: "waybill_config_last_reload_successful", Help: "1 if the last attempt to load the configuration succeeded, else 0."})
	m.reloadAt = prometheus.NewGauge(prometheus.GaugeOpts{Name: "waybill_config_last_reload_success_timestamp_seconds", Help: "Unix time of the last successful load of the configuration."})
	m.reloads = prometheus.NewCounterVec(prometheus.CounterOpts{Name: "waybill_config_reloads_total", Help: "Attempts to reload the configuration, by result."}, []string{"result"})
	m.quarantine = prometheus.NewGauge(prometheus.GaugeOpts{Name: "waybill_journal_quarantined", Help: "1 while the journal is behind its witness and refuses new work, else 0."})
	m.storeFail = prometheus.NewCounter(prometheus.CounterOpts{Name: "waybill_result_store_failures_total", Help: "Complete answers that could not be made durable."})
	info := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "waybill_build_info", Help: "Always 1; the labels name the build."}, []string{"version", "revision"})
	info.WithLabelValues(version, revision).Set(1)
	for _, o := range outcome.Outcomes() {
		m.recovered.WithLabelValues(o.String())
	}
	for _, s := range []string{"success", "failure"} {
		m.reloads.WithLabelValues(s)
	}
	for _, c := range []outcome.Code{outcome.CodeCallerUnauthenticated, outcome.CodeJournalUnavailable, outcome.CodeJournalIndeterminate} {
		m.unrecorded.WithLabelValues(c.String())
	}
	r.MustRegister(m.actions, m.unrecorded, m.inFlight, stages, m.commit, m.group, m.syncs, m.recovered, m.reloadOK, m.reloadAt, m.reloads, m.quarantine, m.storeFail, info,
		collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Handler serves the Prometheus text formats.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{EnableOpenMetrics: true})
}

// Gatherer returns the registry, for tests.
func (m *Metrics) Gatherer() prometheus.Gatherer { return m.registry }

// Action counts one ended action (CONTRACT S1). route must be a configured route's
// name or "" (S2).
func (m *Metrics) Action(route string, f outcome.Facts) {
	if m == nil {
		return
	}
	if route == "" {
		route = NoRoute
	}
	code := f.Code.String()
	if code == "" {
		code = NoRoute
	}
	m.actions.WithLabelValues(route, f.Phase.String(), f.Outcome.String(), f.Retry.String(), code).Inc()
}

// Unrecorded counts a refusal without a record (CONTRACT M6).
func (m *Metrics) Unrecorded(c outcome.Code) {
	if m != nil {
		m.unrecorded.WithLabelValues(c.String()).Inc()
	}
}

// InFlight adds delta to the number of open actions.
func (m *Metrics) InFlight(delta int) {
	if m != nil {
		m.inFlight.Add(float64(delta))
	}
}

// Stage records how long an action spent in a stage.
func (m *Metrics) Stage(s Stage, d time.Duration) {
	if m != nil {
		m.stages[s].Observe(d.Seconds())
	}
}

// Commit records one durable group commit of the journal, how many appends shared it
// and how many sync calls it took.
func (m *Metrics) Commit(d time.Duration, appends, syncs int) {
	if m != nil {
		m.syncs.Add(float64(syncs))
		m.commit.Observe(d.Seconds())
		m.group.Observe(float64(appends))
	}
}

// Recovered counts actions that start-up closed.
func (m *Metrics) Recovered(o outcome.Outcome, n int) {
	if m != nil && n > 0 {
		m.recovered.WithLabelValues(o.String()).Add(float64(n))
	}
}

// Reloaded records an attempt to load the configuration.
func (m *Metrics) Reloaded(ok bool, at time.Time) {
	if m == nil {
		return
	}
	result := "failure"
	if ok {
		result = "success"
		m.reloadOK.Set(1)
		m.reloadAt.Set(float64(at.Unix()))
	} else {
		m.reloadOK.Set(0)
	}
	m.reloads.WithLabelValues(result).Inc()
}

// Quarantined says whether the journal refuses new work (CONTRACT M5).
func (m *Metrics) Quarantined(yes bool) {
	if m == nil {
		return
	}
	v := 0.0
	if yes {
		v = 1
	}
	m.quarantine.Set(v)
}

// StoreFailed counts a complete answer that could not be made durable (CONTRACT H8).
func (m *Metrics) StoreFailed() {
	if m != nil {
		m.storeFail.Inc()
	}
}
