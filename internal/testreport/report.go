package main

import (
	"encoding/json"
	"fmt"
	"io"
	"slices"
	"sort"
	"strings"
	"time"
)

// event is one line of `go test -json` (go doc test2json) or of `go build -json`.
type event struct {
	Action      string
	Package     string
	Test        string
	Elapsed     float64 // seconds
	Output      string
	ImportPath  string // of build events
	FailedBuild string // of a package's fail event: the ImportPath whose build failed
}

// report follows the events of one or more runs of go test and counts. It prints a
// line for every package as it ends, failures in full. It is not safe for
// concurrent use.
type report struct {
	w        io.Writer
	failed   int
	passed   int
	skipped  []string // "package Test"
	packages []timing
	tests    []timing
	open     map[string]*pkg
	builds   map[string]*strings.Builder // output by ImportPath
	shown    map[string]bool             // builds whose output was printed
}

// timing is how long something took.
type timing struct {
	name  string
	took  time.Duration
	tests int
}

// pkg is a package whose tests run.
type pkg struct {
	running map[string]*strings.Builder // output by test
	order   []string                    // tests in order of start
	own     strings.Builder             // output of no test
	tests   int
	failed  []failure
}

type failure struct{ test, output string }

func newReport(w io.Writer) *report {
	return &report{w: w, open: map[string]*pkg{}, builds: map[string]*strings.Builder{}, shown: map[string]bool{}}
}

// read takes events until r ends. A line that is no event is printed as it is.
func (r *report) read(in io.Reader) error {
	return lines(in, func(line []byte) {
		var e event
		if err := json.Unmarshal(line, &e); err != nil || e.Action == "" {
			fmt.Fprintf(r.w, "%s\n", line)
			return
		}
		r.add(e)
	})
}

// add takes one event.
func (r *report) add(e event) {
	switch e.Action {
	case "build-output":
		b := r.builds[e.ImportPath]
		if b == nil {
			b = new(strings.Builder)
			r.builds[e.ImportPath] = b
		}
		b.WriteString(e.Output)
		return
	case "build-fail":
		r.showBuild(e.ImportPath)
		return
	}
	if e.Package == "" {
		return
	}
	p := r.open[e.Package]
	if p == nil {
		p = &pkg{running: map[string]*strings.Builder{}}
		r.open[e.Package] = p
	}
	if e.Test == "" {
		r.addPackage(p, e)
		return
	}
	switch e.Action {
	case "run":
		p.running[e.Test] = new(strings.Builder)
		p.order = append(p.order, e.Test)
	case "output":
		if b := p.running[e.Test]; b != nil {
			b.WriteString(e.Output)
		} else {
			p.own.WriteString(e.Output)
		}
	case "pass", "fail", "skip":
		b := p.running[e.Test]
		delete(p.running, e.Test)
		p.tests++
		switch e.Action {
		case "pass":
			r.passed++
		case "skip":
			r.skipped = append(r.skipped, e.Package+" "+e.Test)
		case "fail":
			r.failed++
			out := ""
			if b != nil {
				out = b.String()
			}
			p.failed = append(p.failed, failure{e.Test, out})
		}
		r.tests = append(r.tests, timing{name: e.Package + " " + e.Test, took: seconds(e.Elapsed)})
	}
}

// addPackage takes an event of a package as a whole.
func (r *report) addPackage(p *pkg, e event) {
	switch e.Action {
	case "output":
		p.own.WriteString(e.Output)
		return
	case "pass", "fail", "skip":
	default: // start, and what may come
		return
	}
	delete(r.open, e.Package)
	// A test that began and did not end was ended with its process: a panic, a
	// time-out, os.Exit. Its output, the panic's included, is all there is to go by.
	for _, name := range p.order {
		if b := p.running[name]; b != nil {
			r.failed++
			p.tests++
			p.failed = append(p.failed, failure{name + " (did not end)", b.String()})
		}
	}
	if e.Action == "skip" { // no test files
		return
	}
	r.packages = append(r.packages, timing{e.Package, seconds(e.Elapsed), p.tests})
	verdict := "ok  "
	if e.Action == "fail" {
		verdict = "FAIL"
	}
	fmt.Fprintf(r.w, "%s %7.2fs %5d tests  %s\n", verdict, e.Elapsed, p.tests, e.Package)
	if e.Action == "pass" {
		return
	}
	// In the order of their start, parents before their subtests.
	place := map[string]int{}
	for i, name := range p.order {
		place[name] = i
	}
	slices.SortStableFunc(p.failed, func(a, b failure) int {
		return place[strings.TrimSuffix(a.test, " (did not end)")] - place[strings.TrimSuffix(b.test, " (did not end)")]
	})
	for _, f := range p.failed {
		fmt.Fprintf(r.w, "---- %s %s\n%s", e.Package, f.test, ended(f.output))
	}
	if e.FailedBuild != "" {
		r.failed++
		r.showBuild(e.FailedBuild)
		return
	}
	if len(p.failed) == 0 {
		r.failed++ // the package failed outside its tests
	}
	fmt.Fprintf(r.w, "---- %s\n%s", e.Package, ended(p.own.String()))
}

// showBuild prints the output of a failed build once.
func (r *report) showBuild(path string) {
	b := r.builds[path]
	if b == nil || r.shown[path] {
		return
	}
	r.shown[path] = true
	fmt.Fprintf(r.w, "---- build of %s\n%s", path, ended(b.String()))
}

// finish accounts for packages that began and did not end, which is go test itself
// dying. It is called after each run.
func (r *report) finish() {
	for name, p := range r.open {
		r.failed++
		fmt.Fprintf(r.w, "FAIL  did not end: %s\n%s", name, ended(p.own.String()))
		for _, test := range p.order {
			if b := p.running[test]; b != nil {
				fmt.Fprintf(r.w, "---- %s %s\n%s", name, test, ended(b.String()))
			}
		}
	}
	clear(r.open)
}

// summary prints the time per package, the slowest tests and, last and alone on its
// line, the count.
func (r *report) summary(slowest int) {
	sort.SliceStable(r.packages, func(i, j int) bool { return r.packages[i].took > r.packages[j].took })
	fmt.Fprintln(r.w, "\nTime per package:")
	for _, p := range r.packages {
		fmt.Fprintf(r.w, "  %7.2fs %5d tests  %s\n", p.took.Seconds(), p.tests, p.name)
	}
	sort.SliceStable(r.tests, func(i, j int) bool { return r.tests[i].took > r.tests[j].took })
	if n := min(slowest, len(r.tests)); n > 0 {
		fmt.Fprintln(r.w, "\nSlowest tests:")
		for _, t := range r.tests[:n] {
			fmt.Fprintf(r.w, "  %7.2fs  %s\n", t.took.Seconds(), t.name)
		}
	}
	if len(r.skipped) > 0 {
		fmt.Fprintf(r.w, "\nSkipped, which no test may: what it needs belongs into scripts/test-deps.sh\n  %s\n", strings.Join(r.skipped, "\n  "))
	}
	fmt.Fprintf(r.w, "\n%d passed, %d failed", r.passed, r.failed)
	if len(r.skipped) > 0 {
		fmt.Fprintf(r.w, ", %d skipped", len(r.skipped))
	}
	fmt.Fprintln(r.w)
}

// ok reports whether everything that was seen is well, and that something was.
func (r *report) ok() bool { return r.failed == 0 && len(r.skipped) == 0 && r.passed > 0 }

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// ended returns s with a line end, unless it is empty.
func ended(s string) string {
	if s == "" || strings.HasSuffix(s, "\n") {
		return s
	}
	return s + "\n"
}
