package main

import (
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"waybill/internal/config"
	"waybill/outcome"
	"waybill/proxy"
	"waybill/routes"
)

// advice says what an action would be worth if it stopped at one point.
type advice struct {
	At      string          `json:"at"`
	Phase   outcome.Phase   `json:"phase"`
	Outcome outcome.Outcome `json:"outcome"`
	Retry   outcome.Retry   `json:"retry"`
	Code    outcome.Code    `json:"code,omitempty"`
	// Next is what the retry engine would do (CONTRACT O1).
	Next outcome.Step `json:"next"`
}

// explainDocument is what "waybill explain --json" prints.
type explainDocument struct {
	routes.Explanation
	// Preset says where the settings of the route come from; absent: the file.
	Preset   *config.PresetUse  `json:"preset,omitempty"`
	Contract *explainedContract `json:"contract,omitempty"`
	Limits   *explainedLimits   `json:"limits,omitempty"`
	Advice   []advice           `json:"advice,omitempty"`
}

// explainedContract is the reviewed knowledge that the advice rests on.
type explainedContract struct {
	// Repeatable says where the answer comes from: declared by the route, or by the method (CONTRACT G6).
	Repeatable             bool   `json:"repeatable"`
	From                   string `json:"from"` // "route" or "method"
	RefusedBeforeExecution []int  `json:"refused_before_execution,omitempty"`
	CloseDelimited         bool   `json:"close_delimited,omitempty"`
	Durability             string `json:"durability"`
	// FollowUp says how to find out what became of it (CONTRACT K6, A7, F7, K7).
	FollowUp []string `json:"follow_up,omitempty"`
	// Key is the idempotency contract, with what it lacks before it counts (I10).
	Key *explainedKey `json:"idempotency,omitempty"`
	// Conditional: a precondition makes the request safe to repeat (I7).
	Conditional bool            `json:"conditional,omitempty"`
	Retry       *explainedRetry `json:"retry,omitempty"`
}

type explainedKey struct {
	In       string `json:"in"`
	Scope    string `json:"scope,omitempty"`
	Window   string `json:"window"`
	Counts   bool   `json:"counts"`
	Missing  string `json:"missing,omitempty"`
	Source   string `json:"source,omitempty"`
	Reviewed string `json:"reviewed,omitempty"`
	OnRepeat string `json:"on_repeat"`
}

type explainedRetry struct {
	Attempts   int    `json:"attempts"`
	Total      string `json:"total"`
	Background bool   `json:"background"`
}

// explainedLimits are in bytes and durations such as "10m0s".
type explainedLimits struct {
	RequestBytes  int64  `json:"request_bytes"`
	ResponseBytes int64  `json:"response_bytes"`
	Timeout       string `json:"timeout"`
	Idle          string `json:"idle"`
	Connect       string `json:"connect"`
	Tries         int    `json:"tries"`
	Duplicates    string `json:"duplicates"`
	Retention     string `json:"retention"`
}

func newExplain(a *app) *cobra.Command {
	var asJSON bool
	var caller string
	cmd := &cobra.Command{
		Use:   "explain METHOD URL | ssh USER@HOST[:PORT] COMMAND…",
		Short: "Show route, injection, contract and advice for a request, without sending it",
		Long: `Show what the configuration makes of a request: the route that takes it, the
fields that are injected (names only), what is known of the remote side, and what
automation may do for each point at which the request could stop. With ssh it does
so for a command over SSH, and shows the pattern that takes it.

Reads the configuration file only: no secret, no network. The exit code is 1 when
the request would be refused.`,
		Example: `  waybill explain POST https://api.stripe.com/v1/charges
  waybill explain ssh deploy@box.example.com 'systemctl restart app-web'`,
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) > 0 && args[0] == "ssh" {
				return cobra.MinimumNArgs(1)(cmd, args)
			}
			return cobra.ExactArgs(2)(cmd, args)
		},
		RunE: func(_ *cobra.Command, args []string) error {
			cfg, err := a.loadConfig()
			if err != nil {
				return err
			}
			snapshot := cfg.snapshot
			if caller != "" && !slices.ContainsFunc(cfg.callers, func(c proxy.StaticCaller) bool { return c.Name == caller }) {
				return fail(exitUsage, "explain: --caller %s: callers: of the configuration names no such caller", caller)
			}
			if args[0] == "ssh" {
				return a.explainSSH(snapshot, args[1:], caller, asJSON)
			}
			method := strings.ToUpper(args[0])
			e, err := snapshot.Explain(method, args[1])
			if caller != "" {
				e, err = snapshot.ExplainTo(caller, method, args[1])
			}
			if err != nil {
				// The URL is not repeated: its query may hold secrets.
				return fail(exitUsage, "explain: %w (%s); write for example https://host/path", err, outcome.CodeInvalidTarget)
			}
			doc := explain(snapshot, method, e)
			if u, ok := cfg.presets[e.Route]; ok {
				doc.Preset = &u
			}
			if asJSON {
				err = printJSON(a.stdout, doc)
			} else {
				err = printExplanation(a, doc)
			}
			if err == nil && e.Decision != "forward" && e.Decision != "tunnel" {
				return exitWith(exitFailure)
			}
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	cmd.Flags().StringVar(&caller, "caller", "", "what this caller would be told, by its `name` in callers:")
	return cmd
}

func explain(s *routes.Snapshot, method string, e routes.Explanation) explainDocument {
	doc := explainDocument{Explanation: e}
	r := s.Route(e.Route)
	if e.Decision != "forward" || r == nil {
		return doc
	}
	repeatable := r.Repeatable(method)
	from, durability := "method", "strict"
	if r.Contract.Repeatable != nil {
		from = "route"
	}
	if r.Durability == routes.Relaxed {
		durability = "relaxed"
	}
	doc.Contract = &explainedContract{
		Repeatable: repeatable, From: from, RefusedBeforeExecution: r.Contract.RefusedBeforeExecution,
		CloseDelimited: r.Contract.CloseDelimited, Durability: durability, FollowUp: explainFollowUp(&r.Contract),
	}
	if k := r.Contract.Idempotency; k != nil {
		in := "header " + k.Header
		if k.Field != "" {
			in = "body field " + k.Field
		}
		doc.Contract.Key = &explainedKey{In: in, Scope: k.Scope, Window: k.Window().String(), Counts: k.Configured() && !repeatable, Missing: k.Missing(), Source: k.Source, Reviewed: k.Reviewed,
			OnRepeat: []string{"recorded", "refuse"}[r.Contract.OnRepeat]}
	}
	doc.Contract.Conditional = r.Contract.Conditional
	if b := r.Contract.Retry; b != nil {
		doc.Contract.Retry = &explainedRetry{Attempts: b.Attempts, Total: b.Total.String(), Background: b.Background}
	}
	doc.Limits = explainLimits(&r.Limits)
	doc.Advice = adviceFor(&r.Contract, repeatable, doc.Contract.Key != nil && doc.Contract.Key.Counts, len(r.Inject) > 0)
	return doc
}

func explainLimits(l *routes.Limits) *explainedLimits {
	return &explainedLimits{
		RequestBytes: l.Request, ResponseBytes: l.Response, Timeout: l.Timeout.String(), Idle: l.Idle.String(),
		Connect: l.Connect.String(), Tries: l.Tries, Duplicates: l.Duplicates.String(), Retention: l.Retention.String(),
	}
}

func adviceAt(at string, f outcome.Facts, repeatable bool) advice {
	next := outcome.Decide(outcome.DecideRecord{Outcome: f.Outcome, Retry: f.Retry, Fingerprint: "same"}, outcome.Operation{Idempotent: repeatable, Fingerprint: "same"})
	return advice{At: at, Phase: f.Phase, Outcome: f.Outcome, Retry: f.Retry, Code: f.Code, Next: next.Step}
}

// adviceFor goes through the points at which a request can stop (CONTRACT C1, E1,
// F2, G5, G10). Codes with one row in table U are looked up there.
func adviceFor(c *routes.Contract, repeatable, keyed, injects bool) []advice {
	var all []advice
	add := func(at string, f outcome.Facts) { all = append(all, adviceAt(at, f, repeatable)) }
	fixed := func(at string, code outcome.Code) {
		if f, ok := outcome.Of(code); ok {
			add(at, f)
		}
	}
	remote := func(at string, o outcome.Outcome, r outcome.Retry, code outcome.Code) {
		add(at, outcome.Facts{Phase: outcome.RemoteExecution, Outcome: o, Retry: r, Code: code})
	}
	if injects {
		fixed("secret missing", outcome.CodeCredentialMissing)
	}
	fixed("name not found", outcome.CodeDNSNoSuchName)
	fixed("connection refused", outcome.CodeConnectionRefused)
	fixed("certificate not accepted", outcome.CodeTLSCertificateInvalid)

	unknown := outcome.ByContract(repeatable, false)
	remote("sent, no answer", outcome.Unknown, unknown, outcome.CodeRemoteOutcomeUnknown)
	remote("sent, no answer in time", outcome.Unknown, unknown, outcome.CodeRemoteTimeout)
	remote("answer cut", outcome.Unknown, unknown, outcome.CodeRemoteResultIncomplete)
	add("complete 2xx or 3xx", outcome.Success())
	remote("complete 4xx", outcome.Rejected, outcome.AfterCorrection, outcome.CodeRemoteRejected)
	before := func(status int) bool { return repeatable || slices.Contains(c.RefusedBeforeExecution, status) }
	for _, status := range []int{http.StatusRequestTimeout, http.StatusTooEarly, http.StatusTooManyRequests} {
		at := fmt.Sprintf("complete %d", status)
		if before(status) {
			remote(at+" with Retry-After", outcome.Rejected, outcome.Backoff, outcome.CodeRemoteRejected)
			at += " without"
		}
		remote(at, outcome.Rejected, outcome.Never, outcome.CodeRemoteRejected)
	}
	if keyed {
		again := func(at string, code outcome.Code) { remote(at, outcome.Unknown, outcome.SameIdempotencyKey, code) }
		again("with a key: sent, no answer", outcome.CodeRemoteOutcomeUnknown)
		again("with a key: answer cut", outcome.CodeRemoteResultIncomplete)
		for _, s := range c.Idempotency.InProgress {
			again(fmt.Sprintf("with a key: complete %d", s), outcome.CodeRemoteInProgress)
		}
		fixed("same key, other request", outcome.CodeIdempotencyMismatch)
		fixed("same key, still running", outcome.CodeInvocationInProgress)
		fixed("same key, window over", outcome.CodeIdempotencyExpired)
	}
	for _, r := range c.Responses {
		f := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: r.Outcome, Retry: r.Retry}
		switch {
		case r.Outcome == outcome.Unknown:
			f.Retry, f.Code = unknown, outcome.CodeRemoteGateway
		case r.Outcome == outcome.Rejected:
			f.Code = outcome.CodeRemoteRejected
		case r.Retry == outcome.Reconcile:
			f.Code = outcome.CodeRemoteError
		}
		add(fmt.Sprintf("complete %d (responses)", r.Status), f)
	}
	remote("complete 500", outcome.Committed, outcome.Reconcile, outcome.CodeRemoteError)
	remote("complete 502 or 504", outcome.Unknown, unknown, outcome.CodeRemoteGateway)
	at := "complete 503"
	if before(http.StatusServiceUnavailable) {
		remote(at+" with Retry-After", outcome.Rejected, outcome.Backoff, outcome.CodeRemoteRejected)
		at += " without"
	}
	remote(at, outcome.Committed, outcome.Reconcile, outcome.CodeRemoteError)
	add("answer not delivered", outcome.Facts{Phase: outcome.ResultDelivery, Outcome: outcome.Committed, Retry: outcome.FetchResult, Code: outcome.CodeDeliveryFailed})
	return all
}

func printExplanation(a *app, d explainDocument) error {
	if err := d.WriteText(a.stdout); err != nil {
		return err
	}
	p := &errWriter{w: a.stdout}
	if d.Preset != nil {
		p.printf("%-12s %s\n", "from", presetLine(d.Preset))
	}
	if d.Contract == nil {
		return p.err
	}
	word := "not repeatable"
	if d.Contract.Repeatable {
		word = "repeatable"
	}
	p.printf("%-12s %s (by %s), durability %s\n", "contract", word, d.Contract.From, d.Contract.Durability)
	if n := d.Contract.RefusedBeforeExecution; len(n) > 0 {
		p.printf("%-12s %v are sent before anything is executed\n", "", n)
	}
	for _, line := range d.Contract.FollowUp {
		p.printf("%-12s %s\n", "", line)
	}
	if k := d.Contract.Key; k != nil {
		if k.Counts {
			p.printf("%-12s key in %s, may be repeated for %s (reviewed %s: %s); on repeat: %s\n", "", k.In, k.Window, k.Reviewed, k.Source, k.OnRepeat)
		} else if k.Missing != "" {
			p.printf("%-12s key in %s does not count: it lacks %s\n", "", k.In, k.Missing)
		}
	}
	if d.Contract.Conditional {
		p.printf("%-12s with If-Match or If-None-Match: * it may be repeated\n", "")
	}
	if b := d.Contract.Retry; b != nil {
		p.printf("%-12s Waybill repeats what is safe: %s within %s, background: %t\n", "", plural(b.Attempts, "attempt"), b.Total, b.Background)
	}
	p.printf("%-12s request %d bytes, answer %d bytes, %s, silence %s, %s of %s each\n", "limits", d.Limits.RequestBytes, d.Limits.ResponseBytes, d.Limits.Timeout, d.Limits.Idle, plural(d.Limits.Tries, "connection attempt"), d.Limits.Connect)
	p.printf("%-12s an equal request is a suspected duplicate for %s; results are kept for %s\n\n", "", d.Limits.Duplicates, d.Limits.Retention)
	if p.err != nil {
		return p.err
	}
	return printAdvice(a, d.Advice)
}

func printAdvice(a *app, list []advice) error {
	t := table{head: []string{"IF IT STOPS AT", "PHASE", "OUTCOME", "RETRY", "CODE", "NEXT"}, color: func(row, column int) string {
		if column == 2 {
			return outcomeColour(list[row].Outcome.String())
		}
		return ""
	}}
	for _, v := range list {
		t.add(v.At, v.Phase.String(), v.Outcome.String(), v.Retry.String(), dash(v.Code.String()), v.Next.String())
	}
	return t.print(a.stdout, newStyler(a, a.stdout))
}
