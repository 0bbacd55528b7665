package metrics

import (
	"sync/atomic"

	"github.com/prometheus/client_golang/prometheus"
)

// connectionMetrics are about connections, towards callers and towards origins.
type connectionMetrics struct {
	accepted *prometheus.CounterVec
	open     *connectionState
}

// Endpoint is where callers connect.
type Endpoint string

// The endpoints.
const (
	EndpointProxy Endpoint = "proxy"
	EndpointSSH   Endpoint = "ssh"
)

// Endpoints returns every endpoint.
func Endpoints() []Endpoint { return []Endpoint{EndpointProxy, EndpointSSH} }

// ConnectionState is what is open at the moment of a scrape.
type ConnectionState struct {
	Callers  int // connections of callers, tunnels included
	Tunnels  int // accepted CONNECTs
	Upstream int // connections to origins that rest in the pool
	SSH      int // sessions of the SSH endpoint
}

func (m *Metrics) newConnections() {
	m.accepted = m.counters("waybill_caller_connections_total", "Connections accepted from callers, by endpoint.", "endpoint")
	for _, e := range Endpoints() {
		m.accepted.WithLabelValues(string(e))
	}
	m.open = &connectionState{
		desc: prometheus.NewDesc("waybill_connections_open", "Open connections: of callers, accepted tunnels among them, SSH sessions, and pooled ones to origins.", []string{"kind"}, nil),
	}
	m.registry.MustRegister(m.open)
}

// CallerConnected counts a connection that was accepted from a caller.
func (m *Metrics) CallerConnected(e Endpoint) {
	if m != nil {
		m.accepted.WithLabelValues(closed(string(e), Endpoints())).Inc()
	}
}

// WatchConnections takes what is open from f at every scrape. Several may be given, as
// each front has its own: their figures add up.
func (m *Metrics) WatchConnections(f func() ConnectionState) {
	if m == nil {
		return
	}
	s := m.open
	for {
		old := s.read.Load()
		var list []func() ConnectionState
		if old != nil {
			list = append(list, *old...)
		}
		list = append(list, f)
		if s.read.CompareAndSwap(old, &list) {
			return
		}
	}
}

type connectionState struct {
	desc *prometheus.Desc
	read atomic.Pointer[[]func() ConnectionState]
}

// Describe implements prometheus.Collector.
func (c *connectionState) Describe(ch chan<- *prometheus.Desc) { ch <- c.desc }

// Collect implements prometheus.Collector.
func (c *connectionState) Collect(ch chan<- prometheus.Metric) {
	list := c.read.Load()
	if list == nil {
		return
	}
	var sum ConnectionState
	for _, f := range *list {
		s := f()
		sum.Callers += s.Callers
		sum.Tunnels += s.Tunnels
		sum.Upstream += s.Upstream
		sum.SSH += s.SSH
	}
	for _, k := range []struct {
		label string
		n     int
	}{{"caller", sum.Callers}, {"tunnel", sum.Tunnels}, {"upstream_idle", sum.Upstream}, {"ssh_session", sum.SSH}} {
		ch <- prometheus.MustNewConstMetric(c.desc, prometheus.GaugeValue, float64(k.n), k.label)
	}
}
