package metrics

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"waybill/outcome"
)

// credentialMetrics are about sources of secrets. The label is the id of a configured
// credential: what is not configured becomes "other" (CONTRACT S2, B3).
type credentialMetrics struct {
	fetches     *prometheus.CounterVec
	fetchErrors *prometheus.CounterVec
	fetchTime   prometheus.Histogram
	lastFetch   *prometheus.GaugeVec
	changedAt   *prometheus.GaugeVec
	expiresAt   *prometheus.GaugeVec
	refreshes   *prometheus.CounterVec
	vaultLocked prometheus.Gauge

	fetched          series[string, prometheus.Counter]
	fetchedAt, since series[string, prometheus.Gauge]
	expiring         atomic.Bool // there is a series in expiresAt, or was
}

func (m *Metrics) newCredentials() {
	m.fetches = m.counters("waybill_credential_fetches_total", "Fetches of a credential from its source.", "credential")
	m.fetchErrors = m.counters("waybill_credential_errors_total", "Fetches of a credential that failed, by code.", "credential", "code")
	m.fetchTime = m.histogram("waybill_credential_fetch_seconds", "Time of one fetch of a credential from its source, in seconds.", prometheus.ExponentialBuckets(0.00001, 4, 12))
	m.lastFetch = m.gauges("waybill_credential_last_fetch_timestamp_seconds", "Unix time of the last fetch of a credential that succeeded.", "credential")
	m.changedAt = m.gauges("waybill_credential_version_timestamp_seconds", "Unix time of the version of a credential that was used last, where its source tells: its age.", "credential")
	m.expiresAt = m.gauges("waybill_credential_expiry_timestamp_seconds", "Unix time at which a credential expires, where its source tells.", "credential")
	m.refreshes = m.counters("waybill_credential_refreshes_total", "Refreshes of a credential that is issued for a time, by result.", "credential", "result")
	m.vaultLocked = m.gauge("waybill_vault_locked", "1 while the built-in vault is locked; 0 when it is unlocked or not used.")
}

// CredentialFetched counts a fetch: code is CodeNone when it succeeded.
func (m *Metrics) CredentialFetched(id string, code outcome.Code, took time.Duration, at time.Time) {
	if m == nil {
		return
	}
	label := m.credentialNames.label(id)
	m.fetched.of(label, func(id string) prometheus.Counter { return m.fetches.WithLabelValues(id) }).Inc()
	m.fetchTime.Observe(took.Seconds())
	if code != outcome.CodeNone {
		m.fetchErrors.WithLabelValues(label, codeLabel(code)).Inc()
		return
	}
	m.fetchedAt.of(label, func(id string) prometheus.Gauge { return m.lastFetch.WithLabelValues(id) }).Set(float64(at.Unix()))
}

// CredentialVersion says from when the version of a credential is that was used last.
func (m *Metrics) CredentialVersion(id string, at time.Time) {
	if m != nil && !at.IsZero() {
		m.since.of(m.credentialNames.label(id), func(id string) prometheus.Gauge { return m.changedAt.WithLabelValues(id) }).Set(float64(at.Unix()))
	}
}

// CredentialExpires says when a credential expires; zero: nobody knows.
func (m *Metrics) CredentialExpires(id string, at time.Time) {
	if m == nil {
		return
	}
	label := m.credentialNames.label(id)
	if at.IsZero() {
		if m.expiring.Load() {
			m.expiresAt.DeleteLabelValues(label)
		}
		return
	}
	m.expiring.Store(true)
	m.expiresAt.WithLabelValues(label).Set(float64(at.Unix()))
}

// CredentialRefreshed counts a refresh of a credential that is issued for a time.
func (m *Metrics) CredentialRefreshed(id string, ok bool) {
	if m == nil {
		return
	}
	result := "failure"
	if ok {
		result = "success"
	}
	m.refreshes.WithLabelValues(m.credentialNames.label(id), result).Inc()
}

// VaultLocked says whether the built-in vault is locked (CONTRACT C1).
func (m *Metrics) VaultLocked(yes bool) {
	if m != nil {
		m.vaultLocked.Set(truth(yes))
	}
}
