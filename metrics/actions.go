package metrics

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"waybill/outcome"
)

// actionMetrics count what is on record of actions, attempts and answers.
type actionMetrics struct {
	actions       *prometheus.CounterVec
	ended         series[actionKey, prometheus.Counter] // of actions
	unrecorded    *prometheus.CounterVec
	inFlight      prometheus.Gauge
	duration      *prometheus.HistogramVec
	stages        map[Stage]prometheus.Observer
	attempts      *prometheus.CounterVec
	fresh, reused series[string, prometheus.Counter]  // of attempts, by route
	took          series[string, prometheus.Observer] // of duration
	setupFails    *prometheus.CounterVec
	resolved      *prometheus.CounterVec
	reopened      *prometheus.CounterVec
	recovered     *prometheus.CounterVec
	storeFail     prometheus.Counter
	redirects     *prometheus.CounterVec
	leaks         *prometheus.CounterVec
	duplicates    *prometheus.CounterVec
	deliveries    *prometheus.CounterVec
	leavings      *prometheus.CounterVec
	tunnels       prometheus.Counter
	tunnelBytes   *prometheus.CounterVec
	unresolved    *unresolved
}

type actionKey struct {
	route string
	facts outcome.Facts
}

// Redirect says what became of a redirect (CONTRACT R2, R3).
type Redirect string

// What becomes of redirects.
const (
	RedirectFollowed Redirect = "followed" // within the origin, by a further attempt
	RedirectRelayed  Redirect = "relayed"  // handed to the caller
	RedirectRefused  Redirect = "refused"  // REDIRECT_CROSS_ORIGIN: the caller followed where the route does not
)

// Leak says what became of an answer that held an injected secret (CONTRACT C5).
type Leak string

// What becomes of such answers.
const (
	LeakMasked  Leak = "masked"
	LeakBlocked Leak = "blocked"
)

// Delivery says what is on record of handing a result to its caller (CONTRACT H2, H6).
type Delivery string

// What is recorded of deliveries; one that simply went well is not.
const (
	DeliveryFailed       Delivery = "failed"
	DeliveryAcknowledged Delivery = "acknowledged"
)

func (m *Metrics) newActions() {
	m.actions = m.counters("waybill_actions_total",
		"Actions that ended, by route and by the facts on record when they first did. The sum equals the number of ended actions in the journal.",
		"route", "phase", "outcome", "retry", "code")
	m.unrecorded = m.counters("waybill_unrecorded_refusals_total", "Refusals that left no record: no caller identity, or no journal.", "code")
	m.inFlight = m.gauge("waybill_actions_in_flight", "Actions that have been accepted and have not ended.")
	m.duration = m.histograms("waybill_action_duration_seconds", "Time from accepting an action to its first recorded end, in seconds.",
		[]float64{.005, .025, .1, .25, 1, 2.5, 10, 60, 600}, "route")
	stages := m.histograms("waybill_stage_duration_seconds", "Time an action spent in each stage of its way, in seconds.",
		[]float64{.0001, .00025, .0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300}, "stage")
	m.stages = make(map[Stage]prometheus.Observer)
	for _, s := range Stages() {
		m.stages[s] = stages.WithLabelValues(string(s))
	}
	m.attempts = m.counters("waybill_attempts_total", "Attempts that crossed the dispatch boundary, by the connection that carried them.", "route", "connection")
	m.setupFails = m.counters("waybill_connection_failures_total", "Tries of connection setup that ended before the dispatch boundary, by cause and last completed stage.", "route", "code", "stage")
	m.resolved = m.counters("waybill_resolved_actions_total", "Actions that ended unknown and were resolved later, by what they became and who showed it.", "route", "outcome", "source")
	m.reopened = m.counters("waybill_reopened_actions_total", "Further attempts of actions that had ended.", "route")
	m.recovered = m.counters("waybill_recovered_actions_total", "Actions found open at start-up and closed by what their records prove.", "outcome")
	m.storeFail = m.counter("waybill_result_store_failures_total", "Complete answers that could not be made durable.")
	m.redirects = m.counters("waybill_redirects_total", "Redirects followed within their origin, relayed to the caller, and requests refused because they follow one to another origin.", "route", "result")
	m.leaks = m.counters("waybill_leak_guard_hits_total", "Answers that held an injected secret, masked or blocked.", "route", "result")
	m.duplicates = m.counters("waybill_duplicate_guard_hits_total", "Submissions refused as suspected duplicates of an unresolved action.", "route")
	m.deliveries = m.counters("waybill_deliveries_total", "Deliveries of a stored result on record: failed, or acknowledged by the caller.", "route", "result")
	m.leavings = m.counters("waybill_callers_gone_total", "Callers that left, or whose time was over, after dispatch; the attempt went on.", "route")
	m.tunnels = m.counter("waybill_blind_tunnels_total", "Tunnels that passed without interception.")
	m.tunnelBytes = m.counters("waybill_blind_tunnel_bytes_total", "Bytes through tunnels without interception: out is towards the origin.", "direction")
	for _, o := range outcome.Outcomes() {
		m.recovered.WithLabelValues(o.String())
	}
	for _, c := range []outcome.Code{outcome.CodeCallerUnauthenticated, outcome.CodeJournalUnavailable, outcome.CodeJournalIndeterminate, outcome.CodeDraining} {
		m.unrecorded.WithLabelValues(c.String())
	}
	for _, d := range []string{"out", "in"} {
		m.tunnelBytes.WithLabelValues(d)
	}
	m.unresolved = newUnresolved()
	m.registry.MustRegister(m.unresolved)
}

// Action counts one action that ended for the first time (CONTRACT S1), and how long it
// took; a negative duration is not observed. Package dispatch calls it for what became
// durable.
func (m *Metrics) Action(route string, f outcome.Facts, took time.Duration) {
	if m == nil {
		return
	}
	key := actionKey{m.routes.label(route), f}
	m.ended.of(key, func(key actionKey) prometheus.Counter {
		f := key.facts
		return m.actions.WithLabelValues(key.route, f.Phase.String(), f.Outcome.String(), f.Retry.String(), codeLabel(f.Code))
	}).Inc()
	if took >= 0 {
		m.took.of(key.route, func(route string) prometheus.Observer { return m.duration.WithLabelValues(route) }).Observe(took.Seconds())
	}
}

// Unrecorded counts a refusal without a record (CONTRACT M6).
func (m *Metrics) Unrecorded(c outcome.Code) {
	if m != nil {
		m.unrecorded.WithLabelValues(codeLabel(c)).Inc()
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
	if m == nil {
		return
	}
	if o, ok := m.stages[s]; ok {
		o.Observe(d.Seconds())
	}
}

// Attempt counts an attempt that crossed the boundary, on a fresh or a reused connection.
func (m *Metrics) Attempt(route string, reused bool) {
	if m == nil {
		return
	}
	s, connection := &m.fresh, "fresh"
	if reused {
		s, connection = &m.reused, "reused"
	}
	s.of(m.routes.label(route), func(route string) prometheus.Counter { return m.attempts.WithLabelValues(route, connection) }).Inc()
}

// SetupFailed counts a try of connection setup that ended before the boundary; stage is
// the last completed one (CONTRACT E2, E7).
func (m *Metrics) SetupFailed(route string, c outcome.Code, stage outcome.Stage) {
	if m != nil {
		m.setupFails.WithLabelValues(m.routes.label(route), codeLabel(c), stageLabel(stage)).Inc()
	}
}

// stageLabel keeps the label closed: a stage is a text.
func stageLabel(s outcome.Stage) string {
	for _, known := range outcome.Stages() {
		if s == known {
			return string(s)
		}
	}
	if s == "" {
		return NoRoute
	}
	return Other
}

// Resolved counts an action that had ended unknown and is so no longer (CONTRACT K2).
func (m *Metrics) Resolved(route string, o outcome.Outcome, source outcome.Source) {
	if m == nil {
		return
	}
	label := Other
	for _, s := range outcome.Sources() {
		if s == source {
			label = string(s)
		}
	}
	if source == "" {
		label = NoRoute
	}
	m.resolved.WithLabelValues(m.routes.label(route), o.String(), label).Inc()
}

// Reopened counts a further attempt of an action that had ended (CONTRACT A9, J1).
func (m *Metrics) Reopened(route string) {
	if m != nil {
		m.reopened.WithLabelValues(m.routes.label(route)).Inc()
	}
}

// Recovered counts actions that start-up closed.
func (m *Metrics) Recovered(o outcome.Outcome, n int) {
	if m != nil && n > 0 {
		m.recovered.WithLabelValues(o.String()).Add(float64(n))
	}
}

// StoreFailed counts a complete answer that could not be made durable (CONTRACT H8).
func (m *Metrics) StoreFailed() {
	if m != nil {
		m.storeFail.Inc()
	}
}

// Redirect counts what became of a redirect.
func (m *Metrics) Redirect(route string, r Redirect) {
	if m != nil {
		m.redirects.WithLabelValues(m.routes.label(route), string(r)).Inc()
	}
}

// Leak counts an answer that held an injected secret.
func (m *Metrics) Leak(route string, l Leak) {
	if m != nil {
		m.leaks.WithLabelValues(m.routes.label(route), string(l)).Inc()
	}
}

// DuplicateSuspected counts a submission that the duplicate guard refused (CONTRACT O3).
func (m *Metrics) DuplicateSuspected(route string) {
	if m != nil {
		m.duplicates.WithLabelValues(m.routes.label(route)).Inc()
	}
}

// Delivery counts what is on record of handing a result over.
func (m *Metrics) Delivery(route string, d Delivery) {
	if m != nil {
		m.deliveries.WithLabelValues(m.routes.label(route), string(d)).Inc()
	}
}

// CallerGone counts a caller that left after dispatch (CONTRACT F5).
func (m *Metrics) CallerGone(route string) {
	if m != nil {
		m.leavings.WithLabelValues(m.routes.label(route)).Inc()
	}
}

// BlindTunnel counts a tunnel that passed without interception (CONTRACT V7).
func (m *Metrics) BlindTunnel() {
	if m != nil {
		m.tunnels.Inc()
	}
}

// BlindTunnelBytes counts what went through one.
func (m *Metrics) BlindTunnelBytes(out, in int64) {
	if m != nil {
		m.tunnelBytes.WithLabelValues("out").Add(float64(max(out, 0)))
		m.tunnelBytes.WithLabelValues("in").Add(float64(max(in, 0)))
	}
}
