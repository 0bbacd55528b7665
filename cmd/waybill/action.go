package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"waybill/dispatch"
	"waybill/outcome"
)

// fullAction is what "waybill action ID --json" prints.
type fullAction struct {
	actionDocument
	Events []dispatch.ShownEvent `json:"events"`
}

func newAction(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "action ID",
		Short: "Show one action: facts, attempts and events",
		Long: `Show one action: its facts, the evidence for them, every attempt, and the events
of the journal with their sequence numbers and their source: the caller, waybill
itself, what was observed on the transport, or the remote side.`,
		Args:              cobra.ExactArgs(1),
		ValidArgsFunction: completeIDs(a),
		RunE: func(cmd *cobra.Command, args []string) error {
			id, err := parseID(args[0])
			if err != nil {
				return err
			}
			return withReader(cmd.Context(), a, func(r reader) error {
				doc, err := r.Action(cmd.Context(), id)
				if err != nil {
					return err
				}
				events, err := r.Events(cmd.Context(), id)
				if err != nil {
					return err
				}
				full := fullAction{actionDocument: doc, Events: events}
				if asJSON {
					return printJSON(a.stdout, full)
				}
				return printAction(a.stdout, newStyler(a, a.stdout), full)
			})
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func printAction(w io.Writer, s styler, d fullAction) error {
	v, ev := d.Action, d.Envelope.Evidence
	p := &errWriter{w: w}
	p.printf("%s\n", s.paint(bold, v.InvocationID))
	row := func(name, value string) {
		if value != "" {
			p.printf("  %-12s %s\n", name, value)
		}
	}
	row("request", printable(v.Method+" "+v.Target))
	row("route", printable(v.Route))
	row("caller", printable(v.Caller))
	row("request id", printable(v.RequestID))
	row("accepted", v.AcceptedAt.Local().Format("2006-01-02 15:04:05.000 -0700"))
	p.printf("\n")
	row("phase", v.Phase+"  – where it stopped")
	row("outcome", s.paint(outcomeColour(v.Outcome), v.Outcome)+"  – what is known of the remote side")
	row("retry", v.Retry+"  – what automation may do now")
	row("code", v.Code)
	if !v.Ended {
		row("state", "still running")
	}
	if d.Envelope.Message != "" {
		row("message", printable(d.Envelope.Message))
	}
	p.printf("\n")
	printEvidence(row, ev)
	if len(ev.Attempts) > 0 {
		p.printf("\nattempts\n")
		for _, at := range ev.Attempts {
			p.printf("  %d  %-14s %-24s last stage %s\n", at.N, s.paint(outcomeColour(at.Outcome.String()), at.Outcome.String()), dash(at.Code.String()), dash(string(at.Stage)))
		}
	}
	printFollowUp(p, s, d)
	p.printf("\nevents\n")
	for _, e := range d.Events {
		p.printf("  %6d  %s  %-26s %-19s %s\n", e.Seq, e.At.Local().Format("15:04:05.000"), e.Type, e.From, printable(eventDetail(e.Event)))
	}
	return p.err
}

func printEvidence(row func(name, value string), ev outcome.Evidence) {
	yes := func(name string, b bool) string {
		if b {
			return name
		}
		return ""
	}
	marks := []string{yes("dispatch started", ev.DispatchStarted), yes("request headers sent", ev.RequestHeadersSent), yes("request complete", ev.RequestComplete), yes("response headers received", ev.ResponseHeadersReceived), yes("response complete", ev.ResponseComplete)}
	var have []string
	for _, m := range marks {
		if m != "" {
			have = append(have, m)
		}
	}
	if len(have) == 0 {
		have = []string{"nothing was handed to a transport"}
	}
	row("evidence", strings.Join(have, ", "))
	row("source", string(ev.Source))
	row("stage", stageText(ev))
	if ev.DispatchSequence != 0 {
		row("dispatch", fmt.Sprintf("journal sequence %d", ev.DispatchSequence))
	}
	if ev.ResultSequence != 0 {
		row("result", fmt.Sprintf("journal sequence %d", ev.ResultSequence))
	}
	if ev.ReceivedStatus != 0 {
		row("status", fmt.Sprint(ev.ReceivedStatus))
	}
	if ev.ReceivedBytes != nil {
		of := ""
		if ev.ExpectedBytes != nil {
			of = fmt.Sprintf(" of %d", *ev.ExpectedBytes)
		}
		row("bytes", fmt.Sprintf("%d%s", *ev.ReceivedBytes, of))
	}
	row("framing", ev.Framing)
	if ev.Peer != nil {
		row("peer", printable(strings.TrimSpace(ev.Peer.Address+" "+ev.Peer.ServerName+" "+ev.Peer.Protocol)))
	}
	row("reason", ev.Reason)
	row("field", printable(ev.Field))
	row("local cause", ev.LocalCause)
	row("earlier", ev.EarlierAction)
	if ev.Recovered {
		row("recovered", "found open at a start; the process had ended")
	}
}

// stageText says what a stage is: how far connecting got, not where the action stopped
// (that is the phase).
func stageText(ev outcome.Evidence) string {
	switch {
	case ev.Stage == "":
		return ""
	case ev.DispatchStarted:
		return string(ev.Stage) + "  – the last step of connecting; the request was handed over after it"
	}
	return string(ev.Stage) + "  – the last step of connecting that was completed"
}

// eventDetail is one line for people; --json has everything.
func eventDetail(e dispatch.Event) string {
	var parts []string
	add := func(format string, args ...any) { parts = append(parts, fmt.Sprintf(format, args...)) }
	if e.Attempt > 0 {
		add("attempt %d", e.Attempt)
	}
	if e.Bound != nil {
		add("route %s", e.Bound.Route)
	}
	if e.Credential != nil {
		add("credential %s (%s)", e.Credential.ID, e.Credential.Mode)
	}
	if e.Dispatch != nil && e.Dispatch.Peer != nil {
		add("to %s %s", e.Dispatch.Peer.Address, e.Dispatch.Peer.Protocol)
	}
	if e.Response != nil {
		add("status %d, %d bytes", e.Response.Status, e.Response.Bytes)
		if e.Response.Framing != "" {
			add("%s", e.Response.Framing)
		}
	}
	if e.Result != nil {
		add("%d bytes stored", e.Result.Bytes)
	}
	if e.Ended != nil {
		if e.Ended.Outcome != outcome.OutcomeInvalid {
			add("%s", e.Ended.Outcome)
		}
		if e.Ended.Code != outcome.CodeNone {
			add("%s", e.Ended.Code)
		}
		if e.Ended.Reason != "" {
			add("%s", e.Ended.Reason)
		}
		if e.Ended.Credential != "" {
			add("credential %s", e.Ended.Credential)
		}
	}
	parts = append(parts, followUpDetail(e)...)
	if e.Tunnel != nil {
		add("%s, %d bytes out, %d in", e.Tunnel.Authority, e.Tunnel.BytesOut, e.Tunnel.BytesIn)
	}
	return strings.Join(parts, ", ")
}

// errWriter keeps the first error of a sequence of prints.
type errWriter struct {
	w   io.Writer
	err error
}

func (p *errWriter) printf(format string, args ...any) {
	if p.err == nil {
		_, p.err = fmt.Fprintf(p.w, format, args...)
	}
}

// completeIDs offers the newest ids of a running proxy; it never opens a journal.
func completeIDs(a *app) func(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
	return func(cmd *cobra.Command, args []string, _ string) ([]cobra.Completion, cobra.ShellCompDirective) {
		const none = cobra.ShellCompDirectiveNoFileComp
		if len(args) > 0 {
			return nil, none
		}
		ctx := cmd.Context()
		if ctx == nil {
			ctx = context.Background()
		}
		data, err := a.dataDir()
		if err != nil {
			return nil, none
		}
		client, err := a.running(ctx, data)
		if err != nil {
			return nil, none
		}
		defer func() { _ = client.Close() }()
		var ids []cobra.Completion
		for v, err := range client.Actions(ctx, dispatch.Filter{Limit: defaultActionLimit}) {
			if err != nil {
				break
			}
			ids = append(ids, cobra.CompletionWithDesc(v.InvocationID, printable(v.Outcome+" "+v.Method+" "+v.Target)))
		}
		return ids, none
	}
}
