package metrics

import (
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// journalMetrics are about durable storage.
type journalMetrics struct {
	commit       prometheus.Histogram
	wait         prometheus.Histogram
	group        prometheus.Histogram
	syncs        prometheus.Counter
	written      prometheus.Counter
	events       *prometheus.CounterVec
	refused      *prometheus.CounterVec
	stopped      prometheus.Gauge
	quarantine   prometheus.Gauge
	dropped      prometheus.Counter
	droppedBytes prometheus.Counter
	state        *journalState
	eventSeries  map[string]prometheus.Counter // fixed by JournalLabels
	eventNames   names
	reasonNames  names
}

// JournalState is what the journal is at the moment of a scrape.
type JournalState struct {
	Bytes, FreeBytes, FloorBytes, HardFloorBytes int64
	KeptBytes, MaxBytes                          int64
	OpenActions                                  int
	Seq                                          uint64
	Writable                                     bool // new work is admitted
}

func (m *Metrics) newJournal() {
	m.commit = m.histogram("waybill_journal_commit_seconds", "Time of one durable group commit, in seconds.", prometheus.ExponentialBuckets(0.0001, 2, 16))
	m.wait = m.histogram("waybill_journal_wait_seconds", "Time the oldest append of a group waited before its commit began, in seconds.", prometheus.ExponentialBuckets(0.0001, 2, 16))
	m.group = m.histogram("waybill_journal_group_requests", "Appends that shared one durable group commit.", prometheus.ExponentialBuckets(1, 2, 10))
	m.syncs = m.counter("waybill_journal_syncs_total", "Sync system calls of durable group commits.")
	m.written = m.counter("waybill_journal_written_bytes_total", "Bytes handed to the store by durable group commits.")
	m.events = m.counters("waybill_journal_events_total", "Events that became durable, by type.", "type")
	m.refused = m.counters("waybill_journal_append_refusals_total", "Appends that were refused before anything was written, by reason.", "reason")
	m.stopped = m.gauge("waybill_journal_stopped", "1 after a commit became indeterminate: the process answers who waits and ends.")
	m.quarantine = m.gauge("waybill_journal_quarantined", "1 while the journal is behind its witness and refuses new work, else 0.")
	m.dropped = m.counter("waybill_journal_dropped_results_total", "Stored results that retention dropped.")
	m.droppedBytes = m.counter("waybill_journal_dropped_bytes_total", "Bytes of stored results that retention dropped.")
	m.state = newJournalState()
	m.registry.MustRegister(m.state)
}

// Commit records one durable group commit: its time, how long its oldest append had
// waited, how many appends shared it, how many sync calls it took and how many bytes it wrote.
func (m *Metrics) Commit(took, waited time.Duration, appends, syncs int, bytes int64) {
	if m != nil {
		m.syncs.Add(float64(syncs))
		m.commit.Observe(took.Seconds())
		m.wait.Observe(waited.Seconds())
		m.group.Observe(float64(appends))
		m.written.Add(float64(max(bytes, 0)))
	}
}

// JournalLabels names the event types of package dispatch and the reasons for refusals
// of package journal: closed lists, of which each begins with 0. It is called once,
// before anything is counted.
func (m *Metrics) JournalLabels(eventTypes, reasons []string) {
	if m == nil {
		return
	}
	m.eventNames.add(eventTypes)
	m.reasonNames.add(reasons)
	m.eventSeries = make(map[string]prometheus.Counter, len(eventTypes))
	for _, t := range eventTypes {
		m.eventSeries[t] = m.events.WithLabelValues(t)
	}
	for _, r := range reasons {
		m.refused.WithLabelValues(r)
	}
}

// Event counts a durable event by the name of its type.
func (m *Metrics) Event(kind string) {
	if m == nil {
		return
	}
	c, ok := m.eventSeries[kind]
	if !ok {
		c = m.events.WithLabelValues(m.eventNames.label(kind))
	}
	c.Inc()
}

// AppendRefused counts an append that was refused before anything was written.
func (m *Metrics) AppendRefused(reason string) {
	if m != nil {
		m.refused.WithLabelValues(m.reasonNames.label(reason)).Inc()
	}
}

// Stopped says that a commit became indeterminate (CONTRACT M5).
func (m *Metrics) Stopped() {
	if m != nil {
		m.stopped.Set(1)
	}
}

// Quarantined says whether the journal refuses new work (CONTRACT M5).
func (m *Metrics) Quarantined(yes bool) {
	if m != nil {
		m.quarantine.Set(truth(yes))
	}
}

// Dropped counts results that retention dropped.
func (m *Metrics) Dropped(results int, bytes int64) {
	if m != nil {
		m.dropped.Add(float64(max(results, 0)))
		m.droppedBytes.Add(float64(max(bytes, 0)))
	}
}

// WatchJournal takes the journal's state from f at every scrape.
func (m *Metrics) WatchJournal(f func() JournalState) {
	if m != nil {
		m.state.read.Store(&f)
	}
}

// journalState is a collector of figures that are looked up when asked for.
type journalState struct {
	read    atomic.Pointer[func() JournalState]
	figures []journalFigure
}

type journalFigure struct {
	desc  *prometheus.Desc
	value func(*JournalState) float64
}

func newJournalState() *journalState {
	c := &journalState{}
	add := func(name, help string, f func(*JournalState) float64) {
		c.figures = append(c.figures, journalFigure{prometheus.NewDesc(name, help, nil, nil), f})
	}
	add("waybill_journal_bytes", "Size of the journal's store on disk, about a minute old.", func(s *JournalState) float64 { return float64(s.Bytes) })
	add("waybill_journal_free_bytes", "Free space of the journal's file system.", func(s *JournalState) float64 { return float64(s.FreeBytes) })
	add("waybill_journal_floor_bytes", "Free space below which no new work is admitted.", func(s *JournalState) float64 { return float64(s.FloorBytes) })
	add("waybill_journal_hard_floor_bytes", "Free space below which nothing is written.", func(s *JournalState) float64 { return float64(s.HardFloorBytes) })
	add("waybill_journal_kept_bytes", "Estimate of what is kept: written and not dropped.", func(s *JournalState) float64 { return float64(s.KeptBytes) })
	add("waybill_journal_max_bytes", "Configured limit of what is kept; 0: none.", func(s *JournalState) float64 { return float64(s.MaxBytes) })
	add("waybill_journal_open_actions", "Actions on record that have not ended; tunnels included.", func(s *JournalState) float64 { return float64(s.OpenActions) })
	add("waybill_journal_last_sequence", "Sequence number of the last durable event.", func(s *JournalState) float64 { return float64(s.Seq) })
	add("waybill_journal_writable", "1 while new work is admitted, 0 in quarantine, without space and after an indeterminate commit.", func(s *JournalState) float64 { return truth(s.Writable) })
	return c
}

// Describe implements prometheus.Collector.
func (c *journalState) Describe(ch chan<- *prometheus.Desc) {
	for _, f := range c.figures {
		ch <- f.desc
	}
}

// Collect implements prometheus.Collector.
func (c *journalState) Collect(ch chan<- prometheus.Metric) {
	read := c.read.Load()
	if read == nil {
		return
	}
	s := (*read)()
	for _, f := range c.figures {
		ch <- prometheus.MustNewConstMetric(f.desc, prometheus.GaugeValue, f.value(&s))
	}
}
