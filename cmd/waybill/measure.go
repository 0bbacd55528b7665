package main

import (
	"waybill/dispatch"
	"waybill/journal"
	"waybill/metrics"
)

// newMetrics declares the collectors, with the names that a configuration gives labels.
func newMetrics(build buildInfo, cfg *loadedConfig) *metrics.Metrics {
	m := metrics.New(build.Version, build.Revision)
	types := make([]string, 0, len(dispatch.EventTypes()))
	for _, t := range dispatch.EventTypes() {
		types = append(types, t.String())
	}
	m.JournalLabels(types, journal.RefusalReasons())
	labelNames(m, cfg)
	return m
}

// labelNames makes the names of a configuration known as labels (CONTRACT S2).
func labelNames(m *metrics.Metrics, cfg *loadedConfig) {
	routes := cfg.snapshot.Routes()
	names := make([]string, 0, len(routes))
	for _, r := range routes {
		names = append(names, r.Name)
	}
	m.SetRoutes(names)
	m.SetCredentials(cfg.credentials.IDs())
}

// journalMetrics passes on what the journal made durable, and its figures.
type journalMetrics struct {
	m *metrics.Metrics
	t *traces
}

func (j journalMetrics) Applied(before, after *dispatch.Record, events []dispatch.Event) {
	dispatch.Measure(j.m, before, after, events)
	j.t.applied(before, after, events)
}
func (j journalMetrics) Found(r *dispatch.Record) { dispatch.MeasureFound(j.m, r) }
func (j journalMetrics) GroupCommitted(g journal.Group) {
	j.m.Commit(g.Total, g.Wait, g.Requests, g.Syncs, g.Bytes)
}
func (j journalMetrics) AppendRefused(reason string)      { j.m.AppendRefused(reason) }
func (j journalMetrics) Stopped()                         { j.m.Stopped() }
func (j journalMetrics) Dropped(results int, bytes int64) { j.m.Dropped(results, bytes) }

// journalState is looked up at every scrape.
func (s *server) journalState() metrics.JournalState {
	st := s.journal.Stats()
	return metrics.JournalState{
		Bytes: st.StoreBytes, FreeBytes: st.FreeBytes, FloorBytes: st.FloorBytes, HardFloorBytes: st.HardFloor,
		KeptBytes: st.KeptBytes, MaxBytes: st.MaxBytes, OpenActions: st.OpenActions, Seq: st.Seq, Writable: s.journal.Admit() == nil,
	}
}

// connectionState is looked up at every scrape.
func (s *server) connectionState() metrics.ConnectionState {
	c := s.front.Connections()
	return metrics.ConnectionState{Callers: c.Callers, Tunnels: c.Tunnels, Upstream: s.transport.Idle(), SSH: c.SSH}
}
