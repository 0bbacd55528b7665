package metrics

import (
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Ages are the age buckets of unresolved actions, each with the age below which an
// action is in it and in no earlier one; the last is open. They add up.
var ages = []struct {
	label string
	below time.Duration
}{
	{"5m", 5 * time.Minute}, {"1h", time.Hour}, {"6h", 6 * time.Hour}, {"1d", 24 * time.Hour}, {"7d", 7 * 24 * time.Hour}, {"older", 0},
}

// Ages returns the values of the label age: an action is in the first whose time it
// has not reached.
func Ages() []string {
	out := make([]string, len(ages))
	for i, a := range ages {
		out[i] = a.label
	}
	return out
}

// unresolved counts actions whose outcome is unknown, by route and minute, so that it
// needs no ids and stays small however many there are. It is a collector: ages are
// those of the scrape.
type unresolved struct {
	now    func() time.Time
	count  *prometheus.Desc
	oldest *prometheus.Desc

	mu sync.Mutex
	by map[string]map[int64]int // route → Unix minute of acceptance → actions
}

func newUnresolved() *unresolved {
	return &unresolved{
		now:    time.Now,
		count:  prometheus.NewDesc("waybill_unresolved_actions", "Ended actions whose outcome is unknown, by route and age since they were accepted: less than the label says, and not less than the one before.", []string{"route", "age"}, nil),
		oldest: prometheus.NewDesc("waybill_oldest_unresolved_timestamp_seconds", "Unix time, to the minute, at which the oldest unresolved action was accepted; absent while there is none.", []string{"route"}, nil),
		by:     make(map[string]map[int64]int),
	}
}

func (u *unresolved) add(route string, accepted time.Time, delta int) {
	minute := accepted.Unix() / 60
	u.mu.Lock()
	defer u.mu.Unlock()
	minutes := u.by[route]
	if minutes == nil {
		minutes = make(map[int64]int)
		u.by[route] = minutes
	}
	if minutes[minute] += delta; minutes[minute] == 0 {
		delete(minutes, minute)
	}
}

// Describe implements prometheus.Collector.
func (u *unresolved) Describe(ch chan<- *prometheus.Desc) {
	ch <- u.count
	ch <- u.oldest
}

// Collect implements prometheus.Collector.
func (u *unresolved) Collect(ch chan<- prometheus.Metric) {
	now := u.now()
	u.mu.Lock()
	defer u.mu.Unlock()
	for route, minutes := range u.by {
		counts := make([]int, len(ages))
		oldest := int64(0)
		for minute, n := range minutes {
			counts[bucket(now.Sub(time.Unix(minute*60, 0)))] += n
			if n > 0 && (oldest == 0 || minute < oldest) {
				oldest = minute
			}
		}
		for i, n := range counts {
			ch <- prometheus.MustNewConstMetric(u.count, prometheus.GaugeValue, float64(n), route, ages[i].label)
		}
		if oldest != 0 {
			ch <- prometheus.MustNewConstMetric(u.oldest, prometheus.GaugeValue, float64(oldest*60), route)
		}
	}
}

func bucket(age time.Duration) int {
	for i, a := range ages {
		if age < a.below {
			return i
		}
	}
	return len(ages) - 1
}

// Unresolved adds delta to the ended actions of a route whose outcome is unknown.
// accepted must be the same when an action is taken out as when it was put in.
func (m *Metrics) Unresolved(route string, accepted time.Time, delta int) {
	if m != nil {
		m.unresolved.add(m.routes.label(route), accepted, delta)
	}
}

// UnresolvedNow returns how many ended actions have an unknown outcome now.
func (m *Metrics) UnresolvedNow() int {
	u := m.unresolved
	u.mu.Lock()
	defer u.mu.Unlock()
	n := 0
	for _, minutes := range u.by {
		for _, count := range minutes {
			n += count
		}
	}
	return n
}
