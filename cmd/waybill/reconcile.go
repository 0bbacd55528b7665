package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/user"
	"strings"

	"github.com/spf13/cobra"

	"waybill/dispatch"
	"waybill/outcome"
)

// followUp asks in the background what became of unresolved actions, and follows jobs,
// until the server drains (CONTRACT K6, A7).
func (s *server) followUp() {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go func() {
		<-s.done
		cancel()
	}()
	s.pipeline.Follow(ctx)
}

// withProxy gives f a client of the running proxy: asking and telling need one.
func (a *app) withProxy(ctx context.Context, f func(*adminClient) error) error {
	return a.withProxyOr(ctx, "start it with waybill serve", f)
}

// withProxyOr is withProxy with advice of its own for where none runs.
func (a *app) withProxyOr(ctx context.Context, advice string, f func(*adminClient) error) error {
	data, err := a.dataDir()
	if err != nil {
		return err
	}
	client, err := a.running(ctx, data)
	if errors.Is(err, errNotRunning) {
		return fail(exitUnavailable, "no proxy runs with the data folder %s; %s", data, advice)
	}
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	return f(client)
}

func newReconcile(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "reconcile ID",
		Short: "Ask the remote side what became of an action",
		Long: `Ask the remote side what became of an action, by the reconcile query of its route,
or for a command over SSH by the confirming command of its pattern.

The query is a safe request of its own, recorded and linked to the action. What its
answer proves is added to the action as evidence from a query; the attempt itself
stays as it was observed. The exit code is 0 when the action is resolved, 1 when it
is still unknown.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeIDs(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := parseID(args[0])
			if err != nil {
				return err
			}
			return a.withProxy(cmd.Context(), func(c *adminClient) error {
				var d actionDocument
				if err := c.get(cmd.Context(), http.MethodPost, "/v1/actions/"+id.String()+"/reconcile", nil, nil, &d); err != nil {
					return err
				}
				return a.printResolved(d, asJSON)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) printResolved(d actionDocument, asJSON bool) error {
	var err error
	if asJSON {
		err = printJSON(a.stdout, d)
	} else {
		text := d.Action.InvocationID + " " + d.Action.Outcome
		if src := d.Envelope.Evidence.Source; src != "" {
			text += " (" + string(src) + ")"
		}
		_, err = fmt.Fprintln(a.stdout, text)
	}
	if err == nil && d.Action.Outcome == outcome.Unknown.String() {
		return exitWith(exitFailure)
	}
	return err
}

func newAttest(a *app) *cobra.Command {
	var asJSON bool
	var said, reason, operator string
	cmd := &cobra.Command{
		Use:   "attest ID --outcome committed|rejected --reason TEXT",
		Short: "Record what a person found out about an unresolved action",
		Long: `Record what a person found out about an unresolved action: that the remote side
carried it out (committed), or that it did not and will not (rejected).

The attestation names the operator and the reason and is never shown as an answer
that Waybill received. It lifts the guard against a repeat. What is known already
cannot be taken back: a committed action stays committed, and nothing that was
dispatched becomes not_attempted. The reason must hold no secret.`,
		Example:           `  waybill attest act_01K… --outcome committed --reason "charge ch_123 is in the dashboard"`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeIDs(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := parseID(args[0])
			if err != nil {
				return err
			}
			var o outcome.Outcome
			if o.UnmarshalText([]byte(said)) != nil || o != outcome.Committed && o != outcome.Rejected {
				return fail(exitUsage, "--outcome %q: is one of committed, rejected", said)
			}
			if strings.TrimSpace(reason) == "" {
				return fail(exitUsage, "give --reason TEXT: what was looked at")
			}
			if operator == "" {
				operator = operatorName()
			}
			return a.withProxy(cmd.Context(), func(c *adminClient) error {
				var d actionDocument
				err := c.get(cmd.Context(), http.MethodPost, "/v1/actions/"+id.String()+"/attest", nil, dispatch.Attestation{Outcome: o, Operator: operator, Reason: reason}, &d)
				if err != nil {
					return err
				}
				return a.printResolved(d, asJSON)
			})
		},
	}
	f := cmd.Flags()
	f.StringVar(&said, "outcome", "", "committed or rejected")
	f.StringVar(&reason, "reason", "", "why, up to 1,000 bytes of `text`; recorded")
	f.StringVar(&operator, "operator", "", "`name` of who attests it (default: the user of this session)")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	_ = cmd.RegisterFlagCompletionFunc("outcome", cobra.FixedCompletions([]string{"committed", "rejected"}, cobra.ShellCompDirectiveNoFileComp))
	return cmd
}

// operatorName is who runs this program.
func operatorName() string {
	if u, err := user.Current(); err == nil && u.Username != "" {
		return u.Username
	}
	return fmt.Sprintf("uid %d", os.Getuid())
}

func newJournalEvidence(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "evidence ID",
		Short: "Print what this journal proves of an action, for another journal",
		Long: `Print what this journal proves of an action, as JSON for "waybill journal import"
of another proxy that has the same action as unknown.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeIDs(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := parseID(args[0])
			if err != nil {
				return err
			}
			return a.withProxy(cmd.Context(), func(c *adminClient) error {
				var e dispatch.Evidence
				if err := c.get(cmd.Context(), http.MethodGet, "/v1/actions/"+id.String()+"/evidence", nil, nil, &e); err != nil {
					return err
				}
				return printJSON(a.stdout, e)
			})
		},
	}
}

func newJournalImport(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "import FILE",
		Short: "Take evidence about an action from another journal",
		Long: `Take evidence about an action from another journal, as "waybill journal evidence"
printed it there; FILE - is standard input.

It is added behind what this journal knows, with the other journal's identity and
its sequence number there. It resolves what is unknown here and contradicts nothing.`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			var data []byte
			var err error
			if args[0] == "-" {
				data, err = io.ReadAll(io.LimitReader(a.stdin, 64<<10))
			} else {
				data, err = os.ReadFile(args[0])
			}
			if err != nil {
				return fail(exitUsage, "%w", err)
			}
			var e dispatch.Evidence
			dec := json.NewDecoder(bytes.NewReader(data))
			dec.DisallowUnknownFields()
			if err := dec.Decode(&e); err != nil {
				return fail(exitUsage, "%s: not what waybill journal evidence prints: %w", args[0], err)
			}
			return a.withProxy(cmd.Context(), func(c *adminClient) error {
				var d actionDocument
				if err := c.get(cmd.Context(), http.MethodPost, "/v1/evidence", nil, e, &d); err != nil {
					return err
				}
				return a.printResolved(d, asJSON)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
