package bench

import (
	"encoding/json"
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// The figures of a table, per sample.
func rate(s *Sample) float64 { return s.Rate() }
func p50(s *Sample) float64  { return float64(s.P50) }
func p99(s *Sample) float64  { return float64(s.P99) }
func mean(s *Sample) float64 { return float64(s.Mean) }

// cpu is processor time in nanoseconds per request: milliseconds per 1,000 requests
// have the same digits as microseconds per request.
func cpu(s *Sample) float64         { return per(float64(s.CPU), s.Requests) }
func commits(s *Sample) float64     { return per(s.Commits, s.Requests) }
func appends(s *Sample) float64     { return s.Appends / s.Commits }
func connections(s *Sample) float64 { return per(float64(s.Connections), s.Requests) }
func syncsMetric(s *Sample) float64 { return per(s.Syncs, s.Requests) }
func peak(s *Sample) float64        { return float64(s.Peak) }

// JSON writes the whole report.
func (r *Report) JSON(w io.Writer) error {
	e := json.NewEncoder(w)
	e.SetIndent("", "  ")
	if err := e.Encode(r); err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	return nil
}

// scenarios returns the names in the order of the run.
func (r *Report) scenarios() []string {
	var out []string
	for i := range r.Results {
		if !slices.Contains(out, r.Results[i].Name) {
			out = append(out, r.Results[i].Name)
		}
	}
	return out
}

// A table is rows of cells under a head; it is printed for a terminal or as Markdown.
type table struct {
	title string
	head  []string
	rows  [][]string
}

func (t *table) add(cells ...string) { t.rows = append(t.rows, cells) }

func (t *table) text(w io.Writer) {
	fmt.Fprintf(w, "\n%s\n", t.title)
	tw := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	for _, row := range append([][]string{t.head}, t.rows...) {
		fmt.Fprintln(tw, "  "+strings.Join(row, "\t"))
	}
	_ = tw.Flush()
}

func (t *table) markdown(w io.Writer) {
	fmt.Fprintf(w, "\n### %s\n\n| %s |\n|%s\n", t.title, strings.Join(t.head, " | "), strings.Repeat(" --- |", len(t.head)))
	for _, row := range t.rows {
		fmt.Fprintf(w, "| %s |\n", strings.Join(row, " | "))
	}
}

// number prints three significant digits; "–" where there is nothing.
func number(v float64) string {
	switch a := math.Abs(v); {
	case math.IsNaN(v) || math.IsInf(v, 0):
		return "–"
	case a >= 100 || v == 0:
		return fmt.Sprintf("%.0f", v)
	case a >= 10:
		return fmt.Sprintf("%.1f", v)
	case a >= 0.01:
		return fmt.Sprintf("%.2f", v)
	default:
		return fmt.Sprintf("%.4f", v)
	}
}

func millis(ns float64) string { return number(ns / 1e6) }
func mib(b float64) string     { return number(b / (1 << 20)) }

// scenarioTable compares the systems of one scenario.
func (r *Report) scenarioTable(name string) *table {
	t := &table{title: name, head: []string{"system", "× base", "min–max", "p50 ms", "p99 ms", "CPU ms/1000", "CPU × base", "peak MiB", "commits/req", "appends/commit", "syncs/req", "new upstream conn/req", "errors"}}
	for i := range r.Results {
		res := &r.Results[i]
		if res.Name != name {
			continue
		}
		if res.Failed != "" {
			t.add(res.System, "failed: "+res.Failed)
			continue
		}
		base := r.Find(name, Base)
		ratios := Ratios(column(res.Rounds, rate), column(base.Rounds, rate))
		spread := "–"
		if len(ratios) > 0 {
			spread = number(slices.Min(ratios)) + "–" + number(slices.Max(ratios))
		}
		med := func(f func(*Sample) float64) float64 { return Median(column(res.Rounds, f)) }
		var errs int64
		for k := range res.Rounds {
			errs += res.Rounds[k].Errors
		}
		journal := func(f func(*Sample) float64) string {
			v := med(f)
			if !strings.HasPrefix(res.System, "waybill") || v == 0 {
				return "–" // it has no such metric
			}
			return number(v)
		}
		t.add(res.System, number(Median(ratios)), spread, millis(med(p50)), millis(med(p99)), number(med(cpu)/1e3), number(r.Ratio(name, res.System, Base, cpu)),
			mib(med(peak)), journal(commits), journal(appends), journal(syncsMetric), number(med(connections)), fmt.Sprint(errs))
	}
	return t
}

// Target is one figure that Waybill has to reach, and what it reached.
type Target struct {
	What  string  `json:"what"`
	Want  float64 `json:"want"`
	Least bool    `json:"least"` // Want is a floor, else a ceiling
	Got   float64 `json:"got"`   // NaN: not measured in this run
}

// Met reports whether the target is reached; one that was not measured is not.
func (t *Target) Met() bool {
	if t.Least {
		return t.Got >= t.Want
	}
	return t.Got <= t.Want
}

// Targets are the figures the project has set itself, for two cores with everything
// on one machine.
func (r *Report) Targets() []Target {
	const strict, relaxed, ram = "waybill", "waybill-relaxed", "waybill-ram"
	name := func(m Mode, bytes, clients int, newConn bool) string {
		return Scenario{Mode: m, Bytes: bytes, Clients: clients, NewConn: newConn}.Name()
	}
	const k1, k64, m1 = 1 << 10, 64 << 10, 1 << 20
	var out []Target
	add := func(what string, least bool, want, got float64) {
		out = append(out, Target{What: what, Want: want, Least: least, Got: got})
	}
	for _, m := range []Mode{Intercepted, Absolute} {
		floors := map[Mode][3]float64{Intercepted: {.40, .50, .75}, Absolute: {.40, .60, .90}}[m]
		for i, c := range []int{1, 16, 64} {
			n := name(m, k1, c, false)
			add(fmt.Sprintf("%s, 1 KiB, %d clients: strict × base", m, c), true, floors[i], r.Ratio(n, strict, Base, rate))
		}
	}
	for _, m := range []Mode{Intercepted, Absolute} {
		for _, c := range []int{1, 16, 64} {
			n := name(m, k1, c, false)
			add(fmt.Sprintf("%s, 1 KiB, %d clients: journal on a RAM disk × base", m, c), true, 1, r.Ratio(n, ram, Base, rate))
			add(fmt.Sprintf("%s, 1 KiB, %d clients: relaxed × RAM disk", m, c), true, .95, r.Ratio(n, relaxed, ram, rate))
		}
	}
	for i := range r.Syncs {
		s := &r.Syncs[i]
		// Two at one client; a segment of the witness that begins has some of its own.
		want := map[int]float64{1: 2.01, 16: .5, 64: .15}[s.Clients]
		add(fmt.Sprintf("%s, %d clients: syncs per request (strace)", s.Mode, s.Clients), false, want, per(float64(s.Total()), s.Requests))
	}
	for _, m := range []Mode{Intercepted, Absolute} {
		add(fmt.Sprintf("%s, 1 KiB, 16 clients: CPU × base", m), false, 1.8, r.Ratio(name(m, k1, 16, false), strict, Base, cpu))
		add(fmt.Sprintf("%s, 1 KiB, 64 clients: CPU × base", m), false, 1.4, r.Ratio(name(m, k1, 64, false), strict, Base, cpu))
		n := name(m, k1, 1, false)
		if a, b := r.Find(n, strict), r.Find(n, Base); a != nil && b != nil && r.Disk != nil && r.Disk.Sync > 0 {
			added := Median(column(a.Rounds, mean)) - Median(column(b.Rounds, mean))
			add(fmt.Sprintf("%s, 1 KiB, 1 client: added latency in sync latencies", m), false, 4, added/float64(r.Disk.Sync))
		}
		add(fmt.Sprintf("%s, 1 KiB, 16 clients, new connections: strict × base", m), true, .85, r.Ratio(name(m, k1, 16, true), strict, Base, rate))
		if a := r.Find(name(m, k1, 64, false), strict); a != nil {
			add(fmt.Sprintf("%s, 64 clients: new upstream connections per request", m), false, .01, Median(column(a.Rounds, connections)))
		}
		if a := r.Find(name(m, k1, 64, false), sidecar); a != nil {
			add(fmt.Sprintf("%s, 64 clients, --memory-limit=128MiB: peak memory in MiB", m), false, 128, Median(column(a.Rounds, peak))/(1<<20))
		}
		add(fmt.Sprintf("%s, 64 KiB, 16 clients: strict × base", m), true, .6, r.Ratio(name(m, k64, 16, false), strict, Base, rate))
		for _, c := range []int{16, 64} {
			add(fmt.Sprintf("%s, 64 KiB, %d clients: with the leak guard × without it", m, c), true, .9, r.Ratio(name(m, guardBytes, c, false), withGuard, withoutGuard, rate))
		}
		if a := r.Find(name(m, m1, 16, false), strict); a != nil && r.Disk != nil {
			bytes := Median(column(a.Rounds, rate)) * m1
			add(fmt.Sprintf("%s, 1 MiB, 16 clients: share of what the disk writes durably in sequence", m), true, .5, bytes/r.Disk.Sequential)
		}
		if n := name(m, k1, 64, false); r.Find(n, "mitmproxy") != nil {
			add(fmt.Sprintf("%s, 1 KiB, 64 clients: strict × mitmproxy", m), true, 10, r.Ratio(n, strict, "mitmproxy", rate))
		}
	}
	for _, j := range r.Journal {
		want, known := map[int]float64{16: .4, 64: .3}[j.Waiters]
		if known && r.Disk != nil {
			add(fmt.Sprintf("the journal alone, %d waiters: × a bare file with group commit", j.Waiters), true, want, j.Appends/r.Disk.Group[j.Waiters])
		}
	}
	for i := range r.Systems {
		if s := &r.Systems[i]; s.Name == strict {
			add("at rest: resident MiB", false, 64, float64(s.RestRSS)/(1<<20))
		}
	}
	return slices.DeleteFunc(out, func(t Target) bool { return math.IsNaN(t.Got) })
}

func (r *Report) tables() []*table {
	var out []*table
	systems := &table{title: "Systems", head: []string{"name", "at rest MiB", "set-up"}}
	for i := range r.Systems {
		s := &r.Systems[i]
		if s.Absent != "" {
			systems.add(s.Name, "–", "not measured: "+s.Absent)
			continue
		}
		systems.add(s.Name, mib(float64(s.RestRSS)), s.What)
	}
	out = append(out, systems)
	targets := &table{title: "Targets", head: []string{"figure", "target", "found", ""}}
	all := r.Targets()
	for i := range all {
		t := &all[i]
		sign, verdict := "≤ ", "missed"
		if t.Least {
			sign = "≥ "
		}
		if t.Met() {
			verdict = "met"
		}
		targets.add(t.What, sign+number(t.Want), number(t.Got), verdict)
	}
	if len(targets.rows) > 0 {
		out = append(out, targets)
	}
	for _, name := range r.scenarios() {
		out = append(out, r.scenarioTable(name))
	}
	if len(r.Syncs) > 0 {
		t := &table{title: "Syncs per request, strict, 1 KiB (strace, a pass of its own)", head: []string{"mode", "clients", "requests", "syncs/request", "commits/request", "calls"}}
		for i := range r.Syncs {
			s := &r.Syncs[i]
			var calls []string
			for c := range strings.SplitSeq(syncCalls, ",") {
				if n := s.Calls[c]; n > 0 {
					calls = append(calls, fmt.Sprintf("%s %d", c, n))
				}
			}
			t.add(string(s.Mode), fmt.Sprint(s.Clients), fmt.Sprint(s.Requests), number(per(float64(s.Total()), s.Requests)), number(per(s.Commits, s.Requests)), strings.Join(calls, ", "))
		}
		out = append(out, t)
	}
	if d := r.Disk; d != nil {
		t := &table{title: "The disk, without any proxy", head: []string{"what", "found"}}
		t.add("4 KiB write and fdatasync, preallocated file: median", d.Sync.Round(time.Microsecond).String())
		t.add("the same: p99", d.SyncP99.Round(time.Microsecond).String())
		t.add("the same after 50 ms of rest: median", d.Rested.Round(time.Microsecond).String())
		t.add("durable writes in sequence, 1 MiB each", number(d.Sequential/(1<<20))+" MiB/s")
		for _, n := range groupWaiters {
			cell := number(d.Group[n]) + "/s"
			for _, j := range r.Journal {
				if j.Waiters == n {
					cell += fmt.Sprintf("; the journal alone %s/s (× %s), %s syncs per append", number(j.Appends), number(j.Appends/d.Group[n]), number(j.Syncs))
				}
			}
			t.add(fmt.Sprintf("bare file with group commit, %d waiters", n), cell)
		}
		out = append(out, t)
	}
	return out
}

func (r *Report) summary() string {
	return fmt.Sprintf("%d rounds of %v each after %v of warm-up, in turn over all systems; %s; ratios are medians of round by round quotients to %s (× base).",
		r.Rounds, r.Window, r.Warmup, r.Machine.line(), Base)
}

func (m *Machine) line() string {
	return fmt.Sprintf("%s, %d cores, %s GiB, Linux %s, %s, journal on %s, load averages at the start %s",
		m.CPU, m.Cores, number(float64(m.Memory)/(1<<30)), m.Kernel, m.Go, m.Filesystem, m.Load)
}

// Text writes the report for a terminal.
func (r *Report) Text(w io.Writer) {
	fmt.Fprintln(w, r.summary())
	if r.Note != "" {
		fmt.Fprintln(w, r.Note)
	}
	for _, t := range r.tables() {
		t.text(w)
	}
	fmt.Fprintf(w, "\nTook %v.\n", r.Took.Round(time.Second))
}

// Markdown writes the report as docs/benchmarks.md.
func (r *Report) Markdown(w io.Writer) {
	fmt.Fprintf(w, `# Benchmarks

Written by %[1]smake bench WRITE=1%[1]s; do not edit. How it measures: [internal/bench](../internal/bench/doc.go).

Load generator, origin and proxy share the machine, so only quotients of the same run mean anything; every ratio is the
median of round by round quotients to a well-configured bare goproxy. The requests are POSTs of 256 bytes of JSON, each
different; sizes are those of the answers. Upstream connections are TLS with a verified certificate, except where a
system's line says otherwise.

- When: %[2]s, %[3]v in all
- Machine: %[4]s
- Command: %[1]s%[5]s%[1]s
- %[6]d rounds of %[7]v after %[8]v of warm-up, in turn over all systems
`, "`", r.Began.UTC().Format("2006-01-02"), r.Took.Round(time.Second), r.Machine.line(), r.Command, r.Rounds, r.Window, r.Warmup)
	if r.Note != "" {
		fmt.Fprintf(w, "- Note: %s\n", r.Note)
	}
	for _, t := range r.tables() {
		t.markdown(w)
	}
}
