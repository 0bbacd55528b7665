package main

import (
	"errors"
	"net/http"

	"github.com/spf13/cobra"
)

func newRetry(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "retry ID",
		Short: "Repeat an action as a further attempt, if its advice allows one",
		Long: `Add an attempt to an action: with the same request, the same idempotency key and a
generation of its own. The running proxy decides by the action's own advice: only a
repeat that is safe is made, one at a time and within the route's budget.

It needs the request that was kept (contract: {retry: {background: true}}). Of other
actions nothing is kept: whoever sent the request sends it again with
"Waybill-Retry-Of: ID". The exit code is 1 when the repeat was refused.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeIDs(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := parseID(args[0])
			if err != nil {
				return err
			}
			data, err := a.dataDir()
			if err != nil {
				return err
			}
			client, err := a.running(cmd.Context(), data)
			if errors.Is(err, errNotRunning) {
				return fail(exitUnavailable, "retry: no proxy runs; start it with \"waybill serve\"")
			}
			if err != nil {
				return err
			}
			var doc actionDocument
			if err := client.get(cmd.Context(), http.MethodPost, "/v1/actions/"+id.String()+"/retry", nil, nil, &doc); err != nil {
				return err
			}
			if asJSON {
				return printJSON(a.stdout, doc)
			}
			return printAction(a.stdout, newStyler(a, a.stdout), fullAction{actionDocument: doc})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}
