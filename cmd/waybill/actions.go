package main

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"waybill/dispatch"
	"waybill/outcome"
)

// defaultActionLimit is the length of the table when --limit is not given.
const defaultActionLimit = 50

// actionFlags are the filters of "actions".
type actionFlags struct {
	outcome, phase, code string
	route, caller        string
	requestID            string
	since                string
	open                 bool
	limit                int
	asJSON               bool
}

// filter parses the flags. now is for relative times.
func (f *actionFlags) filter(now time.Time) (dispatch.Filter, error) {
	out := dispatch.Filter{Route: f.route, Caller: f.caller, RequestID: f.requestID, OpenOnly: f.open, Limit: f.limit}
	if f.outcome != "" && out.Outcome.UnmarshalText([]byte(f.outcome)) != nil {
		return out, fail(exitUsage, "--outcome %s: is one of %v", f.outcome, outcome.Outcomes())
	}
	if f.phase != "" && out.Phase.UnmarshalText([]byte(f.phase)) != nil {
		return out, fail(exitUsage, "--phase %s: is one of %v", f.phase, outcome.Phases())
	}
	if f.code != "" && out.Code.UnmarshalText([]byte(f.code)) != nil {
		return out, fail(exitUsage, "--code %s: no such code; docs/contract.md section U lists them", f.code)
	}
	if f.since != "" {
		t, err := parseSince(f.since, now)
		if err != nil {
			return out, err
		}
		out.Since = t
	}
	if f.limit < 0 {
		return out, fail(exitUsage, "--limit %d: 0 is no limit, less is nothing", f.limit)
	}
	return out, nil
}

// parseSince reads an RFC 3339 time, or a duration before now such as 90m or 2d.
func parseSince(s string, now time.Time) (time.Time, error) {
	if t, err := time.Parse(time.RFC3339, s); err == nil {
		return t, nil
	}
	var days int
	if n, err := fmt.Sscanf(s, "%dd", &days); n == 1 && err == nil && s == fmt.Sprintf("%dd", days) && days >= 0 {
		return now.AddDate(0, 0, -days), nil
	}
	if d, err := time.ParseDuration(s); err == nil && d >= 0 {
		return now.Add(-d), nil
	}
	return time.Time{}, fail(exitUsage, "--since %s: neither a time (2026-11-30T12:00:00Z) nor a duration (90m, 2d)", s)
}

func newActions(a *app) *cobra.Command {
	var flags actionFlags
	cmd := &cobra.Command{
		Use:   "actions",
		Short: "List actions, newest first",
		Long: `List actions, newest first: where each stopped (phase), what is known of the
remote side (outcome) and what automation may do now (retry).

Asks the running proxy, or opens the journal when none runs. --json prints one
object a line.`,
		Example: `  waybill actions --outcome unknown
  waybill actions --since 2h --route stripe-write --json`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if !cmd.Flags().Changed("limit") && !flags.asJSON {
				flags.limit = defaultActionLimit
			}
			filter, err := flags.filter(time.Now())
			if err != nil {
				return err
			}
			return withReader(cmd.Context(), a, func(r reader) error {
				return listActions(cmd.Context(), a, r, filter, flags.asJSON)
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&flags.outcome, "outcome", "", "only this outcome: not_attempted, rejected, committed, unknown")
	f.StringVar(&flags.phase, "phase", "", "only this phase")
	f.StringVar(&flags.code, "code", "", "only this code, such as REMOTE_TIMEOUT")
	f.StringVar(&flags.route, "route", "", "only this route")
	f.StringVar(&flags.caller, "caller", "", "only this caller")
	f.StringVar(&flags.requestID, "request-id", "", "only the action with this Waybill-Request-Id")
	f.StringVar(&flags.since, "since", "", "accepted since this `time` (RFC 3339) or duration before now (90m, 2d)")
	f.BoolVar(&flags.open, "open", false, "only actions that still run")
	f.IntVar(&flags.limit, "limit", 0, "at most this many; 0: all (default 50, with --json all)")
	f.BoolVar(&flags.asJSON, "json", false, "print one JSON object a line")
	complete := func(name string, values []string) {
		_ = cmd.RegisterFlagCompletionFunc(name, cobra.FixedCompletions(values, cobra.ShellCompDirectiveNoFileComp))
	}
	complete("outcome", texts(outcome.Outcomes()))
	complete("phase", texts(outcome.Phases()))
	complete("code", texts(outcome.Codes()))
	return cmd
}

func texts[T fmt.Stringer](values []T) []string {
	out := make([]string, len(values))
	for i, v := range values {
		out[i] = v.String()
	}
	return out
}

// errListIncomplete ends a list of a journal in quarantine: what is on record was
// listed before it (CONTRACT M5, M7).
var errListIncomplete = fail(exitJournalDamaged, "the journal is behind its witness, or was restored: what happened after its end is not on record, so this list may not be all; \"waybill journal acknowledge\" is the way on")

func listActions(ctx context.Context, a *app, r reader, filter dispatch.Filter, asJSON bool) error {
	var (
		views      []dispatch.ActionView
		incomplete error
	)
	want := filter.Limit
	if !asJSON && want > 0 {
		filter.Limit++ // to know whether there are more
	}
	for v, err := range r.Actions(ctx, filter) {
		if errors.Is(err, errListIncomplete) {
			incomplete = err
			break
		}
		if err != nil {
			return err
		}
		if asJSON {
			if err := printLine(a.stdout, v); err != nil {
				return err
			}
			continue
		}
		views = append(views, v)
	}
	if asJSON {
		return incomplete
	}
	if len(views) == 0 {
		_, err := fmt.Fprintln(a.stdout, "no actions")
		return errors.Join(err, incomplete)
	}
	more := want > 0 && len(views) > want
	if more {
		views = views[:want]
	}
	if err := printActions(a, views); err != nil {
		return err
	}
	if more {
		if _, err := fmt.Fprintf(a.stdout, "… and more; --limit 0 shows all, --outcome and --since choose\n"); err != nil {
			return err
		}
	}
	return incomplete
}

func printActions(a *app, views []dispatch.ActionView) error {
	t := table{
		head: []string{"ACCEPTED", "ACTION", "ROUTE", "REQUEST", "PHASE", "OUTCOME", "RETRY", "CODE"},
		color: func(row, column int) string {
			if column == 5 {
				return outcomeColour(views[row].Outcome)
			}
			return ""
		},
	}
	for _, v := range views {
		t.add(actionCells(v)...)
	}
	return t.print(a.stdout, newStyler(a, a.stdout))
}

// maxRequestColumn is where a long target is cut in tables.
const maxRequestColumn = 60

func actionCells(v dispatch.ActionView) []string {
	request := printable(v.Method + " " + v.Target)
	if r := []rune(request); len(r) > maxRequestColumn {
		request = string(r[:maxRequestColumn-1]) + "…"
	}
	code := v.Code
	if !v.Ended {
		code = "(running)"
	}
	return []string{v.AcceptedAt.Local().Format("01-02 15:04:05"), v.InvocationID, dash(v.Route), request, v.Phase, v.Outcome, v.Retry, dash(code)}
}

func newTail(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "tail",
		Short: "Show actions as they happen",
		Long: `Show actions as they happen, one line for each change, until interrupted. Needs
a running proxy. --json prints one object a line.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return a.withProxyOr(cmd.Context(), "start one with \"waybill serve\", or read the past with \"waybill actions\"", func(client *adminClient) error {
				s := newStyler(a, a.stdout)
				for v, err := range client.Tail(cmd.Context()) {
					if err != nil {
						return err
					}
					if asJSON {
						err = printLine(a.stdout, v)
					} else {
						c := actionCells(v)
						_, err = fmt.Fprintf(a.stdout, "%s %s %s %s %s\n", time.Now().Format("15:04:05.000"), c[1], s.paint(outcomeColour(v.Outcome), fmt.Sprintf("%-13s", c[5])), c[7], c[3])
					}
					if err != nil {
						return err
					}
				}
				return nil
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object a line")
	return cmd
}
