package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"waybill/dispatch"
	"waybill/outcome"
)

// demo is one run of "waybill demo": the real program as a child process, real
// upstreams on loopback, and an agent.
type demo struct {
	secret    string
	upstreams *demoUpstreams
	proxy     *demoProxy
	caller    *demoCaller
	dropped   *demoAnswer // of the request whose repeats follow
}

// demoLine is one line of "waybill demo --json".
type demoLine struct {
	Scenario        string          `json:"scenario"`
	Phase           outcome.Phase   `json:"phase"`
	Outcome         outcome.Outcome `json:"outcome"`
	Retry           outcome.Retry   `json:"retry"`
	Code            outcome.Code    `json:"code"`
	UpstreamEffects int             `json:"upstream_effects"` // of this request, counted by the upstream
	OK              bool            `json:"ok"`
	HTTPStatus      int             `json:"http_status,omitempty"` // of the answer to the caller
	InvocationID    string          `json:"invocation_id,omitempty"`
	Problems        []string        `json:"problems,omitempty"` // what is not as the contract says

	evidence string
	story    string
}

// demoLimit bounds a whole run.
const demoLimit = 60 * time.Second

func newDemo(a *app) *cobra.Command {
	var asJSON, keep bool
	var meters string
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Show every kind of outcome; no configuration, no network",
		Long: `Show every kind of outcome with the real proxy, as a process of its own, and real
upstreams on loopback. Needs no configuration and no network, and leaves nothing
behind.

UPSTREAM is how often the upstream did what that line's request asked for, by its
own count.
The exit code is 1 when a line is not as the contract says.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, stop := signal.NotifyContext(cmd.Context(), syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP)
			defer stop()
			ctx, unwatch := untilReaderGone(ctx)
			defer unwatch()
			ctx, cancel := context.WithTimeout(ctx, demoLimit)
			defer cancel()
			return a.runDemo(ctx, asJSON, keep, meters)
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().BoolVar(&keep, "keep", false, "keep the folder with journal, configuration and log, and say where it is")
	cmd.Flags().StringVar(&meters, "metrics", "127.0.0.1:0", "`address` of the demo proxy's /metrics, to watch it from a Prometheus")
	return cmd
}

func (a *app) runDemo(ctx context.Context, asJSON, keep bool, meters string) (err error) {
	start := time.Now()
	dir, err := os.MkdirTemp("", "waybill-demo-")
	if err != nil {
		return fail(exitFailure, "demo: %w", err)
	}
	if keep {
		_, _ = fmt.Fprintf(a.stderr, "waybill: the demo's folder is %s\n", dir)
	} else {
		defer func() { _ = os.RemoveAll(dir) }()
	}
	d := &demo{secret: newDemoSecret()}
	if d.upstreams, err = startDemoUpstreams(d.secret); err != nil {
		return fail(exitFailure, "demo: upstreams: %w", err)
	}
	defer d.upstreams.close()
	if err := writeDemoFiles(dir, d.secret, d.upstreams); err != nil {
		return fail(exitFailure, "demo: %w", err)
	}
	d.proxy = &demoProxy{dir: dir, listen: "127.0.0.1:0", meters: meters}
	if err := d.proxy.start(ctx); err != nil {
		return fail(exitFailure, "demo: %w", err)
	}
	defer func() {
		// After an error the proxy has nothing more to finish.
		limit := 5 * time.Second
		if serr := d.proxy.stop(limit); serr != nil && err == nil {
			err = fail(exitFailure, "demo: %w", serr)
		}
	}()
	if d.caller, err = newDemoCaller(d.proxy); err != nil {
		return fail(exitFailure, "demo: %w", err)
	}

	out := &demoPrinter{a: a, s: newStyler(a, a.stdout), asJSON: asJSON}
	out.head()
	scenarios := slices.Insert(demoScenarios(), 1, demoSSHScenarios()...)
	lines := make([]demoLine, 0, len(scenarios))
	for i := range scenarios {
		line, err := d.play(ctx, &scenarios[i])
		if err != nil {
			return fail(exitFailure, "demo: %s: %w", scenarios[i].name, err)
		}
		lines = append(lines, line)
		out.line(line)
	}
	found, err := d.proxy.filesWithSecret(d.secret)
	if err != nil {
		return fail(exitFailure, "demo: searching for the secret: %w", err)
	}
	leaks := len(found) > 0 || d.caller.sawSecret(d.secret)
	return out.finish(lines, leaks, found, time.Since(start))
}

// play runs one scenario and compares: with the contract, with the journal, and
// with the upstream's count.
func (d *demo) play(ctx context.Context, sc *demoScenario) (demoLine, error) {
	ctx, cancel := context.WithTimeout(ctx, demoStartLimit+demoRequestLimit)
	defer cancel()
	before := d.upstreams.applied(sc.path)
	step, err := sc.play(ctx, d, sc.path)
	if err != nil {
		return demoLine{}, err
	}
	line := demoLine{Scenario: sc.name, story: sc.story, InvocationID: step.id}
	if step.id == "" {
		if step.answer != nil && step.answer.Err != nil {
			return demoLine{}, fmt.Errorf("%w: %w", errDemoNoID, step.answer.Err)
		}
		return demoLine{}, errDemoNoID
	}
	id, err := dispatch.ParseActionID(step.id)
	if err != nil {
		return demoLine{}, err
	}
	doc, err := d.proxy.admin.Action(ctx, id)
	if err != nil {
		return demoLine{}, err
	}
	v := doc.Action
	recorded, err := viewFacts(v)
	if err != nil {
		return demoLine{}, err
	}
	line.Phase, line.Outcome, line.Retry, line.Code = recorded.Phase, recorded.Outcome, recorded.Retry, recorded.Code
	line.evidence = evidenceLine(doc.Envelope.Evidence)
	line.UpstreamEffects = d.upstreams.applied(sc.path) - before

	step.check(recorded == sc.want, "the journal says %s, the contract %s", outcome.FormatOutcome(recorded), outcome.FormatOutcome(sc.want))
	step.check(line.UpstreamEffects == sc.effects, "the upstream counted %d effects, not %d", line.UpstreamEffects, sc.effects)
	if a := step.answer; a != nil {
		line.HTTPStatus = a.Status
		step.check(a.Err == nil, "the answer broke off: %v", a.Err)
		step.check(a.Status == sc.status, "the caller got status %d, not %d", a.Status, sc.status)
		step.check(a.Facts == recorded, "the answer says %s, the journal %s", outcome.FormatOutcome(a.Facts), outcome.FormatOutcome(recorded))
		step.problems = append(step.problems, a.hints()...)
	}
	line.Problems = step.problems
	line.OK = len(step.problems) == 0
	return line, nil
}

// viewFacts reads the facts of a view; unknown values are an error (CONTRACT A8).
func viewFacts(v dispatch.ActionView) (f outcome.Facts, err error) {
	err = errors.Join(f.Phase.UnmarshalText([]byte(v.Phase)), f.Outcome.UnmarshalText([]byte(v.Outcome)), f.Retry.UnmarshalText([]byte(v.Retry)), f.Code.UnmarshalText([]byte(v.Code)))
	return f, err
}

// evidenceLine says how Waybill knows, in a few words.
func evidenceLine(ev outcome.Evidence) string {
	var parts []string
	add := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	switch {
	case ev.DispatchSequence != 0:
		add("dispatched, journal sequence %d", ev.DispatchSequence)
	case ev.DispatchStarted:
		add("dispatched")
	default:
		add("not dispatched")
	}
	if ev.Stage != "" && !ev.DispatchStarted {
		add("last completed stage %s", ev.Stage)
	}
	if ev.ReceivedStatus != 0 {
		add("status %d received", ev.ReceivedStatus)
	}
	if ev.ReceivedBytes != nil && ev.ExpectedBytes != nil {
		add("%d of %d bytes", *ev.ReceivedBytes, *ev.ExpectedBytes)
	}
	if ev.DispatchStarted {
		if ev.ResponseComplete {
			add("answer complete")
		} else {
			add("no complete answer")
		}
	}
	if ev.ResultSequence != 0 {
		add("result stored, sequence %d", ev.ResultSequence)
	}
	if ev.LocalCause != "" {
		add("%s", strings.ToLower(strings.ReplaceAll(ev.LocalCause, "_", " ")))
	}
	if ev.EarlierAction != "" {
		add("earlier action %s", ev.EarlierAction)
	}
	if ev.Field != "" {
		add("field %s", printable(ev.Field))
	}
	if ev.Recovered {
		add("recovered at start")
	}
	return strings.Join(parts, ", ")
}

// demoPrinter prints the table line by line, so that a person sees progress.
type demoPrinter struct {
	a      *app
	s      styler
	asJSON bool
}

const demoRow = "%-4s %-40s %4s  %-20s %-13s %-16s %-24s %8s\n"

func (p *demoPrinter) head() {
	if p.asJSON {
		return
	}
	_, _ = fmt.Fprintf(p.a.stdout, "The real proxy, real upstreams on loopback. One request each, and what is known afterwards.\n\n")
	_, _ = fmt.Fprint(p.a.stdout, p.s.paint(bold, fmt.Sprintf(demoRow, "", "SCENARIO", "HTTP", "PHASE", "OUTCOME", "RETRY", "CODE", "UPSTREAM")))
}

func (p *demoPrinter) line(l demoLine) {
	if p.asJSON {
		return
	}
	mark, color := "ok", green
	if !l.OK {
		mark, color = "FAIL", red
	}
	status := "-"
	if l.HTTPStatus != 0 {
		status = fmt.Sprint(l.HTTPStatus)
	}
	row := fmt.Sprintf(demoRow, mark, l.Scenario, status, l.Phase, l.Outcome, l.Retry, dash(l.Code.String()), fmt.Sprintf("%d×", l.UpstreamEffects))
	row = strings.Replace(row, mark, p.s.paint(color, mark), 1)
	row = strings.Replace(row, " "+l.Outcome.String()+" ", " "+p.s.paint(outcomeColour(l.Outcome.String()), l.Outcome.String())+" ", 1)
	_, _ = fmt.Fprint(p.a.stdout, row)
	_, _ = fmt.Fprintf(p.a.stdout, "     %s\n     %s\n", l.story, p.s.paint("2", l.evidence))
	for _, problem := range l.Problems {
		_, _ = fmt.Fprintf(p.a.stdout, "     %s\n", p.s.paint(red, problem))
	}
}

// finish prints the sum, or the JSON, and decides the exit code.
func (p *demoPrinter) finish(lines []demoLine, leaks bool, found []string, took time.Duration) error {
	bad := 0
	for _, l := range lines {
		if !l.OK {
			bad++
		}
	}
	if p.asJSON {
		if err := printJSON(p.a.stdout, lines); err != nil {
			return err
		}
	} else {
		_, _ = fmt.Fprintf(p.a.stdout, "\n%s, %d as the contract says, in %.1f s.\n", plural(len(lines), "scenario"), len(lines)-bad, took.Seconds())
		if !leaks {
			_, _ = fmt.Fprintln(p.a.stdout, "The secret reached the upstream only: not the agent, not the journal's files, not the log at debug level.")
		}
	}
	switch {
	case leaks && len(found) > 0:
		return fail(exitFailure, "demo: the secret was found in %s", strings.Join(found, ", "))
	case leaks:
		return fail(exitFailure, "demo: the secret reached the agent")
	case bad > 0:
		return &codedError{code: exitFailure, err: errors.New("demo: not every line is as the contract says"), quiet: p.asJSON}
	}
	return nil
}
