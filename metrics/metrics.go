// Package metrics declares every collector of Waybill once, with typed record
// methods. It is the only importer of client_golang.
//
// Labels are closed and bounded (CONTRACT S2): enumerations of package outcome,
// enumerations of this package, and names of routes and credentials as the
// configuration has them. Never a host, path, key, id or error text: what is none
// of the configured names becomes "other", whoever passes it.
package metrics

import (
	"net/http"
	"runtime"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"waybill/internal/control"
	"waybill/outcome"
)

const (
	// NoRoute is the route label of actions that matched no route, and the code label
	// of those without a code.
	NoRoute = "none"
	// Other is the label of a name that is not configured: a route of a former
	// configuration, met in the journal at the start.
	Other = "other"
	// maxNames bounds the names that one process has labelled series with: a
	// configuration that is generated anew again and again does not grow them for ever.
	maxNames = 2000
)

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

	actionMetrics
	featureMetrics
	journalMetrics
	connectionMetrics
	credentialMetrics
	processMetrics
	audit auditMetrics

	routes          names
	credentialNames names
}

// New registers the collectors with a registry of its own. version and revision
// label waybill_build_info.
func New(version, revision string) *Metrics {
	m := &Metrics{registry: prometheus.NewRegistry()}
	m.newActions()
	m.newFeatures()
	m.newJournal()
	m.newConnections()
	m.newCredentials()
	m.newAudit()
	m.newProcess(version, revision)
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Handler serves the Prometheus text formats, and native histograms to who asks for
// the format that has them.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{EnableOpenMetrics: true})
}

// Gatherer returns the registry, for tests.
func (m *Metrics) Gatherer() prometheus.Gatherer { return m.registry }

// names is a set of configured names, and the only way from a name to a label.
type names struct {
	mu  sync.RWMutex
	all map[string]struct{}
}

// add makes names known; those of earlier configurations stay, since their actions
// may still be on their way.
func (n *names) add(list []string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.all == nil {
		n.all = make(map[string]struct{}, len(list))
	}
	for _, name := range list {
		if len(n.all) < maxNames {
			n.all[name] = struct{}{}
		}
	}
}

// label returns name if it is known, NoRoute for "" and Other for everything else (S2).
func (n *names) label(name string) string {
	if name == "" {
		return NoRoute
	}
	n.mu.RLock()
	_, ok := n.all[name]
	n.mu.RUnlock()
	if ok || control.Off("S2-labels-are-closed") {
		return name
	}
	return Other
}

// series keeps what is counted with each request by its labels, which are of closed lists:
// to look a series up by its labels costs more than to count.
type series[K comparable, T any] struct {
	mu  sync.RWMutex
	all map[K]T
}

// of returns the series of key, made by one when it is asked for first.
func (s *series[K, T]) of(key K, one func(K) T) T {
	s.mu.RLock()
	v, ok := s.all[key]
	s.mu.RUnlock()
	if ok {
		return v
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if v, ok = s.all[key]; ok {
		return v
	}
	if s.all == nil {
		s.all = make(map[K]T)
	}
	v = one(key)
	s.all[key] = v
	return v
}

// SetRoutes makes the names of a configuration's routes known as labels. What alerts
// watch begins with 0, or Prometheus would not see the first one as an increase.
func (m *Metrics) SetRoutes(list []string) {
	if m == nil {
		return
	}
	m.routes.add(list)
	for _, r := range list {
		if m.routes.label(r) != r {
			continue
		}
		m.actions.WithLabelValues(r, outcome.RemoteExecution.String(), outcome.Committed.String(), outcome.Never.String(), NoRoute)
		for _, c := range []outcome.Code{outcome.CodeRemoteOutcomeUnknown, outcome.CodeRemoteTimeout, outcome.CodeRemoteResultIncomplete} {
			m.actions.WithLabelValues(r, outcome.RemoteExecution.String(), outcome.Unknown.String(), outcome.Reconcile.String(), c.String())
		}
		for _, l := range []Leak{LeakMasked, LeakBlocked} {
			m.leaks.WithLabelValues(r, string(l))
		}
		for _, c := range []string{"fresh", "reused"} {
			m.attempts.WithLabelValues(r, c)
		}
		m.duplicates.WithLabelValues(r)
	}
}

// SetCredentials makes the ids of a configuration's credentials known as labels.
func (m *Metrics) SetCredentials(list []string) {
	if m == nil {
		return
	}
	m.credentialNames.add(list)
	for _, id := range list {
		if m.credentialNames.label(id) != id {
			continue
		}
		m.fetches.WithLabelValues(id)
		for _, c := range []outcome.Code{outcome.CodeCredentialMissing, outcome.CodeCredentialInvalid, outcome.CodeCredentialUnavailable, outcome.CodeVaultLocked} {
			m.fetchErrors.WithLabelValues(id, c.String())
		}
	}
}

// text is a label of a closed enumeration: "" reads better as none.
func text(s string) string {
	if s == "" {
		return NoRoute
	}
	return s
}

func (m *Metrics) counter(name, help string) prometheus.Counter {
	c := prometheus.NewCounter(prometheus.CounterOpts{Name: name, Help: help})
	m.registry.MustRegister(c)
	return c
}

func (m *Metrics) gauge(name, help string) prometheus.Gauge {
	g := prometheus.NewGauge(prometheus.GaugeOpts{Name: name, Help: help})
	m.registry.MustRegister(g)
	return g
}

func (m *Metrics) counters(name, help string, labels ...string) *prometheus.CounterVec {
	v := prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, labels)
	m.registry.MustRegister(v)
	return v
}

func (m *Metrics) gauges(name, help string, labels ...string) *prometheus.GaugeVec {
	v := prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: name, Help: help}, labels)
	m.registry.MustRegister(v)
	return v
}

// histograms have classic buckets for everyone, and native ones of 10 % width for
// scrapes that ask for them.
func (m *Metrics) histograms(name, help string, buckets []float64, labels ...string) *prometheus.HistogramVec {
	v := prometheus.NewHistogramVec(histogramOpts(name, help, buckets), labels)
	m.registry.MustRegister(v)
	return v
}

func (m *Metrics) histogram(name, help string, buckets []float64) prometheus.Histogram {
	h := prometheus.NewHistogram(histogramOpts(name, help, buckets))
	m.registry.MustRegister(h)
	return h
}

func histogramOpts(name, help string, buckets []float64) prometheus.HistogramOpts {
	return prometheus.HistogramOpts{Name: name, Help: help, Buckets: buckets,
		NativeHistogramBucketFactor: 1.1, NativeHistogramMaxBucketNumber: 160, NativeHistogramMinResetDuration: time.Hour}
}

// processMetrics are about the process and its configuration.
type processMetrics struct {
	reloadOK prometheus.Gauge
	reloadAt prometheus.Gauge
	reloads  *prometheus.CounterVec
	draining prometheus.Gauge
}

func (m *Metrics) newProcess(version, revision string) {
	m.reloadOK = m.gauge("waybill_config_last_reload_successful", "1 if the last attempt to load the configuration succeeded, else 0.")
	m.reloadAt = m.gauge("waybill_config_last_reload_success_timestamp_seconds", "Unix time of the last successful load of the configuration.")
	m.reloads = m.counters("waybill_config_reloads_total", "Attempts to reload the configuration, by result.", "result")
	m.draining = m.gauge("waybill_draining", "1 while the proxy drains and refuses new work, else 0.")
	for _, s := range []string{"success", "failure"} {
		m.reloads.WithLabelValues(s)
	}
	info := m.gauges("waybill_build_info", "Always 1; the labels name the build.", "version", "revision", "goversion")
	info.WithLabelValues(version, revision, runtime.Version()).Set(1)
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

// Draining says whether new work is refused because the process ends.
func (m *Metrics) Draining(yes bool) {
	if m != nil {
		m.draining.Set(truth(yes))
	}
}

func truth(yes bool) float64 {
	if yes {
		return 1
	}
	return 0
}

// codeLabel is the label of a code; CodeNone reads better as none.
func codeLabel(c outcome.Code) string { return text(c.String()) }
