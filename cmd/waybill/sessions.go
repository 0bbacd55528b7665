package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"waybill/dispatch"
	"waybill/outcome"
)

// defaultSessionLimit is the length of the table when --limit is not given.
const defaultSessionLimit = 50

func newSessions(a *app) *cobra.Command {
	var (
		asJSON, callers bool
		limit           int
		since           string
	)
	cmd := &cobra.Command{
		Use:   "sessions",
		Short: "Show who was connected, from when to when, and what it did in sum",
		Long: `Show the sessions of "waybill run": who was connected, from when to when, and what
it did in sum. --callers adds those that came without a session: configured callers,
and programs on this machine.

"waybill actions --caller CALLER" lists what one of them did, "waybill action ID"
each event of it.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if limit < 0 {
				return fail(exitUsage, "--limit %d: is 0 (all) or more", limit)
			}
			if !cmd.Flags().Changed("limit") && !asJSON {
				limit = defaultSessionLimit
			}
			var at time.Time
			if since != "" {
				var err error
				if at, err = parseSince(since, time.Now()); err != nil {
					return err
				}
			}
			return withReader(cmd.Context(), a, func(r reader) error {
				views, err := r.Sessions(cmd.Context(), dispatch.SessionQuery{Limit: limit, Since: at, Callers: callers})
				if err != nil && !errors.Is(err, errListIncomplete) {
					return err
				}
				if asJSON {
					for i := range views {
						if perr := printLine(a.stdout, views[i]); perr != nil {
							return perr
						}
					}
					return err
				}
				return errors.Join(printSessions(a, views), err)
			})
		},
	}
	f := cmd.Flags()
	f.BoolVar(&callers, "callers", false, "also callers without a session; reads every action")
	f.StringVar(&since, "since", "", "opened since this `time` (RFC 3339) or duration before now (90m, 2d)")
	f.IntVar(&limit, "limit", 0, "at most this many sessions, newest first; 0: all (default 50, with --json all)")
	f.BoolVar(&asJSON, "json", false, "print one JSON object a line")
	return cmd
}

func printSessions(a *app, views []dispatch.SessionView) error {
	if len(views) == 0 {
		_, err := fmt.Fprintln(a.stdout, "no sessions")
		return err
	}
	t := table{head: []string{"SESSION", "NAME", "STATE", "FROM", "TO", "ACTIONS", "OUTCOMES"}}
	at := func(t time.Time) string {
		if t.IsZero() {
			return "-"
		}
		return t.Local().Format("01-02 15:04:05")
	}
	for i := range views {
		v := &views[i]
		who, from, to := v.ID, v.OpenedAt, v.ClosedAt
		if who == "" {
			who, from, to = v.Caller, v.FirstActionAt, v.LastActionAt
		}
		actions := strconv.Itoa(v.Actions)
		if v.Running > 0 {
			actions += fmt.Sprintf(" (%d running)", v.Running)
		}
		t.add(printable(who), dash(v.Name), v.State, at(from), at(to), actions, dash(outcomeCounts(v.ByOutcome)))
	}
	return t.print(a.stdout, newStyler(a, a.stdout))
}

func outcomeCounts(by map[string]int) string {
	var parts []string
	for _, o := range outcome.Outcomes() {
		if n := by[o.String()]; n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", n, o))
		}
	}
	return strings.Join(parts, ", ")
}

// Sessions implements reader.
func (c *adminClient) Sessions(ctx context.Context, q dispatch.SessionQuery) ([]dispatch.SessionView, error) {
	values := url.Values{}
	if q.Limit > 0 {
		values.Set("limit", strconv.Itoa(q.Limit))
	}
	if !q.Since.IsZero() {
		values.Set("since", q.Since.Format(time.RFC3339Nano))
	}
	if q.Callers {
		values.Set("callers", "true")
	}
	resp, err := c.do(ctx, http.MethodGet, "/v1/sessions", values, nil)
	if err != nil {
		return nil, err
	}
	defer func() { _ = resp.Body.Close() }()
	b, err := io.ReadAll(io.LimitReader(resp.Body, maxAdminDocument))
	if err != nil {
		return nil, fail(exitUnavailable, "the proxy at %s stopped answering: %w", c.path, err)
	}
	if resp.StatusCode != http.StatusOK {
		return nil, adminError(resp.StatusCode, b)
	}
	var out []dispatch.SessionView
	if err := json.Unmarshal(b, &out); err != nil {
		return nil, fail(exitFailure, "answer of the proxy at %s: %w; is it of another version?", c.path, err)
	}
	if resp.Header.Get("Waybill-Incomplete") != "" {
		return out, errListIncomplete
	}
	return out, nil
}

// Sessions implements reader. No proxy runs: whether a session that was not closed
// would still be taken is not known.
func (r *journalReader) Sessions(ctx context.Context, q dispatch.SessionQuery) ([]dispatch.SessionView, error) {
	views, err := dispatch.SessionViews(ctx, r.j, q)
	switch {
	case errors.Is(err, dispatch.ErrQuarantined):
		return views, errListIncomplete
	case err != nil:
		return nil, fail(exitFailure, "%w", err)
	}
	return views, nil
}
