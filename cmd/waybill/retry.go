package main

import (
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
		RunE:              func(cmd *cobra.Command, args []string) error { return a.onAction(cmd, args[0], "retry", asJSON) },
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func newAck(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "ack ID",
		Short: "Record that the caller has the whole result of an action",
		Long: `Record that whoever sent a request has its whole result. Until then the result counts
as not delivered: writing an answer to a connection proves nothing of its arrival. The
outcome does not change, and acknowledging twice changes nothing.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeIDs(a),
		RunE:              func(cmd *cobra.Command, args []string) error { return a.onAction(cmd, args[0], "ack", asJSON) },
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// onAction asks the running proxy to do something with an action and prints what became
// of it.
func (a *app) onAction(cmd *cobra.Command, text, verb string, asJSON bool) error {
	id, err := parseID(text)
	if err != nil {
		return err
	}
	return a.withProxy(cmd.Context(), func(c *adminClient) error {
		var doc actionDocument
		if err := c.get(cmd.Context(), http.MethodPost, "/v1/actions/"+id.String()+"/"+verb, nil, nil, &doc); err != nil {
			return err
		}
		if asJSON {
			return printJSON(a.stdout, doc)
		}
		return printAction(a.stdout, newStyler(a, a.stdout), fullAction{actionDocument: doc})
	})
}
