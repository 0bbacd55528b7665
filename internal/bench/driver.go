package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// Options say what to run. The zero value of a field takes its default.
type Options struct {
	Waybill string // path of the binary under test; required
	Goproxy string // path of the base (module internal/bench/baseline); required
	Self    string // path of this driver, which is also origin and load generator; required
	Dir     string // where the journal of the strict runs lies: on a real disk; default: the system's temporary folder
	Source  string // root of the module, for the journal's own benchmark; "": left out
	// Controls is the path of a build with the tag waybill_controls, by which the leak
	// guard is measured; "": it is not.
	Controls string
	// Compare are further builds of Waybill by name: each runs, strict, as one more
	// system, which is how a change is judged against what was before it.
	Compare map[string]string

	Size      Size
	Scenarios string // expression over names; "": all of the size
	Systems   string // expression over names; "": all. The base always runs
	Rounds    int
	Window    time.Duration
	Warmup    time.Duration
	LogLevel  string // of Waybill; default info, as shipped
	Syncs     bool   // count syncs under strace
	Probe     bool   // measure the disk
	Progress  io.Writer
}

// limitBytes is how large a journal may become before its proxy starts again with an
// empty one.
const limitBytes = 2 << 30

// restBetween is the pause between two measurements.
const restBetween = 60 * time.Millisecond

func (o *Options) defaults() error {
	if o.Waybill == "" || o.Goproxy == "" || o.Self == "" {
		return errors.New("bench: the paths of waybill, of goproxy and of this program are needed")
	}
	// A child's folder is not this one.
	for _, p := range []*string{&o.Waybill, &o.Goproxy, &o.Self} {
		var err error
		if *p, err = filepath.Abs(*p); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	if o.Controls != "" {
		var err error
		if o.Controls, err = filepath.Abs(o.Controls); err != nil {
			return fmt.Errorf("bench: %w", err)
		}
	}
	compare := make(map[string]string, len(o.Compare))
	for name, path := range o.Compare {
		abs, err := filepath.Abs(path)
		if err != nil {
			return fmt.Errorf("bench: %w", err)
		}
		compare[name] = abs
	}
	o.Compare = compare
	if o.Size == "" {
		o.Size = Standard
	}
	quick := o.Size == Quick
	if o.Rounds == 0 {
		o.Rounds = 5
	}
	if o.Window == 0 {
		o.Window = 800 * time.Millisecond
		if quick {
			o.Window = 400 * time.Millisecond
		}
	}
	if o.Warmup == 0 {
		o.Warmup = o.Window / 4
	}
	if o.LogLevel == "" {
		o.LogLevel = "info"
	}
	if o.Progress == nil {
		o.Progress = io.Discard
	}
	if o.Rounds < 1 || o.Rounds > 1000 || o.Window > time.Minute || o.Warmup > time.Minute {
		return errors.New("bench: rounds or times are out of bounds")
	}
	return nil
}

// Report is everything a run found.
type Report struct {
	Began   time.Time      `json:"began"`
	Took    time.Duration  `json:"took_ns"`
	Command string         `json:"command"`
	Machine Machine        `json:"machine"`
	Size    Size           `json:"size"`
	Rounds  int            `json:"rounds"`
	Window  time.Duration  `json:"window_ns"`
	Warmup  time.Duration  `json:"warmup_ns"`
	Note    string         `json:"note,omitempty"`
	Systems []SystemReport `json:"systems"`
	Results []Result       `json:"results"`
	Syncs   []SyncCount    `json:"syncs,omitempty"`
	Disk    *Disk          `json:"disk,omitempty"`
	Journal []JournalAlone `json:"journal_alone,omitempty"`
}

// SystemReport says what ran.
type SystemReport struct {
	Name   string `json:"name"`
	What   string `json:"what"`
	Absent string `json:"absent,omitempty"` // why it did not run
	// RestRSS is resident after the start, before any request.
	RestRSS int64 `json:"rest_rss_bytes,omitempty"`
}

// Result is one system in one scenario: a sample per round.
type Result struct {
	Scenario Scenario `json:"scenario"`
	Name     string   `json:"name"`
	System   string   `json:"system"`
	Rounds   []Sample `json:"rounds"`
	Failed   string   `json:"failed,omitempty"` // no figures: why
}

// SyncCount is the exact number of syncs per request under strace, which slows the
// proxy down: only the counts mean anything.
type SyncCount struct {
	Mode     Mode             `json:"mode"`
	Clients  int              `json:"clients"`
	Requests int64            `json:"requests"`
	Calls    map[string]int64 `json:"calls"`
	Commits  float64          `json:"journal_commits"`
}

// Total adds the calls up.
func (s *SyncCount) Total() int64 {
	var n int64
	for _, c := range s.Calls {
		n += c
	}
	return n
}

// Run measures. It ends every process that it started.
func Run(ctx context.Context, o Options) (*Report, error) {
	if err := o.defaults(); err != nil {
		return nil, err
	}
	plan, err := Plan(o.Size)
	if err != nil {
		return nil, err
	}
	if plan, err = Only(plan, o.Scenarios); err != nil {
		return nil, err
	}
	d, err := newDriver(ctx, o)
	if err != nil {
		return nil, err
	}
	defer d.close()
	rep := d.report
	if o.Probe {
		d.say("disk: sync latency, sequential writes, a bare file with group commit")
		if rep.Disk, err = probeDisk(d.rig.dir); err != nil {
			return nil, err
		}
	}
	if err := d.startSystems(ctx, o.Systems); err != nil {
		return nil, err
	}
	for i, s := range plan {
		d.say("%d/%d %s", i+1, len(plan), s.Name())
		if err := d.scenario(ctx, s); err != nil {
			return nil, err
		}
	}
	d.stopSystems()
	if o.Syncs {
		if err := d.countSyncs(ctx); err != nil {
			return nil, err
		}
	}
	if o.Probe && o.Source != "" {
		d.say("the journal alone")
		if rep.Journal, err = journalAlone(ctx, o.Source, d.rig.dir); err != nil {
			rep.Note = strings.TrimSpace(rep.Note + " The journal alone was not measured: " + err.Error())
		}
	}
	rep.Took = time.Since(rep.Began)
	return rep, nil
}

type driver struct {
	opt     Options
	rig     *rig
	report  *Report
	origin  *process
	systems []*system
	live    map[string]*running
}

func newDriver(ctx context.Context, o Options) (*driver, error) {
	dir, err := os.MkdirTemp(o.Dir, "wbb")
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	d := &driver{opt: o, live: make(map[string]*running)}
	r, ca, err := newRig(dir)
	if err != nil {
		_ = os.RemoveAll(dir)
		return nil, err
	}
	d.rig = r
	r.waybill, r.compare, r.goproxy, r.self, r.flags = o.Waybill, o.Compare, o.Goproxy, o.Self, []string{"--log-level", o.LogLevel}
	r.controls = o.Controls
	if r.ram, err = os.MkdirTemp("/dev/shm", "wbb"); err != nil {
		r.ram = ""
	}
	d.report = &Report{Began: time.Now(), Machine: describeMachine(dir), Size: o.Size, Rounds: o.Rounds, Window: o.Window, Warmup: o.Warmup}
	if err := d.startOrigin(ctx, ca); err != nil {
		d.close()
		return nil, err
	}
	return d, nil
}

func (d *driver) say(format string, args ...any) { fmt.Fprintf(d.opt.Progress, format+"\n", args...) }

func (d *driver) startOrigin(ctx context.Context, ca *authority) error {
	leaf, err := ca.leaf(originHost, "localhost", "127.0.0.1", "::1")
	if err != nil {
		return err
	}
	cert, key := filepath.Join(d.rig.dir, "origin.pem"), filepath.Join(d.rig.dir, "origin-key.pem")
	if err := writePair(leaf, cert, key); err != nil {
		return err
	}
	var line string
	p, err := startProcess(ctx, filepath.Join(d.rig.dir, "origin.log"), d.rig.dir, childEnv("GOGC=400"), firstLine(&line), d.opt.Self, "origin", cert, key, d.rig.authorization())
	if err != nil {
		return err
	}
	d.origin, d.rig.origin = p, &Origin{}
	if err := json.Unmarshal([]byte(line), d.rig.origin); err != nil {
		return fmt.Errorf("bench: origin: %w", err)
	}
	return nil
}

func (d *driver) close() {
	d.stopSystems()
	if d.origin != nil {
		d.origin.stop()
	}
	_ = os.RemoveAll(d.rig.dir)
	if d.rig.ram != "" {
		_ = os.RemoveAll(d.rig.ram)
	}
}

// startSystems starts all that can run here. They run side by side, idle while
// another one is measured.
func (d *driver) startSystems(ctx context.Context, filter string) error {
	re, err := regexp.Compile(filter)
	if err != nil {
		return fmt.Errorf("bench: systems: %w", err)
	}
	for _, s := range allSystems(d.rig) {
		if s.Name != Base && !re.MatchString(s.Name) {
			continue
		}
		sr := SystemReport{Name: s.Name, What: s.What}
		if sr.Absent = s.absent(); sr.Absent == "" {
			run, err := s.start(ctx, d.rig)
			if err != nil && (s.Name == Base || strings.HasPrefix(s.Name, "waybill")) {
				return err
			}
			if err != nil {
				sr.Absent = "does not start: " + firstOf(err.Error())
				d.say("%v", err)
			} else {
				d.systems = append(d.systems, s)
				d.live[s.Name] = run
				settle(ctx, 300*time.Millisecond)
				if u, err := ProcessUsage(run.measure); err == nil {
					sr.RestRSS = u.RSS
				}
			}
		}
		if sr.Absent != "" {
			d.say("%s does not take part: %s", s.Name, sr.Absent)
		}
		d.report.Systems = append(d.report.Systems, sr)
	}
	return ctx.Err()
}

// firstOf is the first line of a text.
func firstOf(text string) string {
	line, _, _ := strings.Cut(text, "\n")
	return line
}

func (d *driver) stopSystems() {
	for name, run := range d.live {
		run.stop()
		delete(d.live, name)
	}
}

// scenario measures every system in every round, in an order that turns: nobody is
// always the one after the heaviest.
func (d *driver) scenario(ctx context.Context, s Scenario) error {
	systems := slices.DeleteFunc(slices.Clone(d.systems), func(sys *system) bool { return sys.only != nil && !sys.only(s) })
	results := make([]Result, len(systems))
	for i, sys := range systems {
		results[i] = Result{Scenario: s, Name: s.Name(), System: sys.Name}
	}
	for round := range d.opt.Rounds {
		for k := range systems {
			i := (k + round) % len(systems)
			sys, res := systems[i], &results[i]
			if res.Failed != "" {
				continue
			}
			if err := d.renew(ctx, sys); err != nil {
				return err
			}
			sample, err := d.measure(ctx, sys, s)
			if ctx.Err() != nil {
				return ctx.Err()
			}
			if err != nil {
				res.Failed = firstOf(err.Error())
				d.say("  %s: %s", sys.Name, res.Failed)
				if sys.Name == Base {
					return err
				}
				continue
			}
			res.Rounds = append(res.Rounds, *sample)
			settle(ctx, restBetween)
		}
	}
	d.report.Results = append(d.report.Results, results...)
	return nil
}

// renew starts a system again whose process ended or whose folder has grown too large.
func (d *driver) renew(ctx context.Context, sys *system) error {
	run := d.live[sys.Name]
	switch {
	case !run.alive():
		d.report.Note = strings.TrimSpace(d.report.Note + fmt.Sprintf(" %s ended by itself and was started again.", sys.Name))
	case run.data != "" && folderBytes(run.data) > limitBytes:
		run.stop()
	default:
		return nil
	}
	if run.data != "" {
		_ = os.RemoveAll(run.data)
	}
	next, err := sys.start(ctx, d.rig)
	if err != nil {
		return err
	}
	d.live[sys.Name] = next
	return nil
}

// measure runs one load generator as a process of its own.
func (d *driver) measure(ctx context.Context, sys *system, s Scenario) (*Sample, error) {
	run := d.live[sys.Name]
	return d.load(ctx, Load{
		Scenario: s, Proxy: run.proxy, Authority: sys.target(s.Mode, d.rig), RootCA: run.ca, Warmup: d.opt.Warmup, Window: d.opt.Window,
		PID: run.measure, Metrics: run.metrics, Origin: d.rig.origin.Stats,
	})
}

func (d *driver) load(ctx context.Context, l Load) (*Sample, error) {
	spec, err := json.Marshal(l)
	if err != nil {
		return nil, fmt.Errorf("bench: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, l.Warmup+l.Window+2*ioLimit)
	defer cancel()
	cmd := exec.CommandContext(ctx, d.opt.Self, "load", string(spec))
	cmd.Env = childEnv("GOGC=400")
	var text strings.Builder
	cmd.Stderr = &text
	out, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("bench: load generator: %w: %s", err, firstOf(text.String()))
	}
	var sample Sample
	if err := json.Unmarshal(out, &sample); err != nil {
		return nil, fmt.Errorf("bench: load generator: %w", err)
	}
	return &sample, nil
}

// countSyncs runs Waybill (strict) once more under strace, for a number of requests.
func (d *driver) countSyncs(ctx context.Context) error {
	if _, err := exec.LookPath("strace"); err != nil {
		d.report.Note = strings.TrimSpace(d.report.Note + " Syncs were not counted: strace is not installed.")
		return nil
	}
	d.say("syncs per request, under strace")
	trace := filepath.Join(d.rig.dir, "trace")
	run, err := d.rig.startWaybill(ctx, "t", "", false, []string{"strace", "-f", "-ttt", "--seccomp-bpf", "-e", "trace=" + syncCalls, "-o", trace})
	if err != nil {
		d.report.Note = strings.TrimSpace(d.report.Note + " Syncs were not counted: " + firstOf(err.Error()))
		return nil
	}
	var samples []*Sample
	for _, mode := range []Mode{Intercepted, Absolute} {
		for _, clients := range []int{1, 16, 64} {
			target := originHost + ":443"
			if mode == Absolute {
				target = originHost + ":80"
			}
			s, err := d.load(ctx, Load{
				Scenario: Scenario{Mode: mode, Bytes: 1 << 10, Clients: clients}, Proxy: run.proxy, Authority: target, RootCA: run.ca,
				Warmup: 200 * time.Millisecond, Window: 10 * time.Second, Requests: int64(400 + 100*clients), Metrics: run.metrics, Origin: d.rig.origin.Stats,
			})
			if err != nil {
				run.stop()
				return err
			}
			d.report.Syncs = append(d.report.Syncs, SyncCount{Mode: mode, Clients: clients, Requests: s.Requests, Commits: s.Commits})
			samples = append(samples, s)
		}
	}
	run.stop()
	text, err := os.ReadFile(trace)
	if err != nil {
		return fmt.Errorf("bench: %w", err)
	}
	for i, s := range samples {
		d.report.Syncs[i].Calls = countSyncs(text, s.Began, s.Ended)
	}
	return nil
}

// Find returns a system's result in a scenario.
func (r *Report) Find(name, system string) *Result {
	i := slices.IndexFunc(r.Results, func(x Result) bool { return x.Name == name && x.System == system })
	if i < 0 {
		return nil
	}
	return &r.Results[i]
}

// Ratio is the median over rounds of a figure divided by the base's in the same
// round; NaN where either is missing.
func (r *Report) Ratio(name, system, base string, f func(*Sample) float64) float64 {
	a, b := r.Find(name, system), r.Find(name, base)
	if a == nil || b == nil {
		return math.NaN()
	}
	return Median(Ratios(column(a.Rounds, f), column(b.Rounds, f)))
}
