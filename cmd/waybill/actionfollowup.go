package main

import (
	"fmt"

	"waybill/dispatch"
)

// printFollowUp shows what came after the attempts: later evidence, the job, and the
// children of a batch (CONTRACT K1, A7, F7).
func printFollowUp(p *errWriter, s styler, d fullAction) {
	ev := d.Envelope.Evidence
	if ev.LinkedTo != "" {
		p.printf("\nstarted for %s (%s)\n", ev.LinkedTo, ev.LinkKind)
	}
	if len(ev.Resolutions) > 0 {
		p.printf("\nlater evidence\n")
		for _, r := range ev.Resolutions {
			who := r.Query
			switch {
			case r.Operator != "":
				who = r.Operator + ": " + r.Reason
			case r.Origin != "":
				who = fmt.Sprintf("%s, sequence %d there", r.Origin, r.OriginSequence)
			}
			p.printf("  %6d  %-14s %-18s %s\n", r.Sequence, s.paint(outcomeColour(r.Outcome.String()), r.Outcome.String()), r.Source, printable(who))
		}
	}
	if j := ev.Job; j != nil {
		p.printf("\njob %s\n  %-12s %s\n  %-12s %s\n  %-12s %s\n", printable(dash(j.ID)), "state", j.State, "resource", printable(dash(j.Resource)), "followed by", dash(j.Action))
		if j.Reason != "" {
			p.printf("  %-12s %s\n", "reason", j.Reason)
		}
	}
	if ev.Items != nil && ev.Items.Untracked != "" {
		p.printf("\nitems cannot be told apart: %s\n", ev.Items.Untracked)
	}
	if len(d.Items) > 0 {
		p.printf("\nitems\n")
		for _, c := range d.Items {
			name := c.ID
			if name == "" {
				name = fmt.Sprint(c.Index)
			}
			p.printf("  %-24s %-14s retry %-20s %s\n", printable(name), s.paint(outcomeColour(c.Outcome.String()), c.Outcome.String()), c.Retry, dash(c.Code.String()))
		}
	}
}

// followUpDetail is what eventDetail says of these events.
func followUpDetail(e dispatch.Event) []string {
	var parts []string
	if r := e.Resolution; r != nil {
		parts = append(parts, r.Outcome.String(), string(r.Source))
		for _, s := range []string{r.Rule, r.Reason, r.Operator, r.Query} {
			if s != "" {
				parts = append(parts, s)
			}
		}
	}
	if j := e.Job; j != nil {
		parts = append(parts, "job "+dash(j.ID), string(j.State), j.Shown)
	}
	if e.Items != nil {
		parts = append(parts, plural(len(e.Items.List), "item")+" resolved")
	}
	return parts
}
