package main

import (
	"context"
	"fmt"

	"waybill/dispatch"
	"waybill/outcome"
)

// refusedGroup counts a run's requests that ended for the same reason without doing
// anything, so that its last lines say what to repair.
type refusedGroup struct {
	Outcome      string `json:"outcome"` // not_attempted or rejected
	Code         string `json:"code"`
	Route        string `json:"route,omitempty"`
	Retry        string `json:"retry"`
	Count        int    `json:"count"`
	InvocationID string `json:"invocation_id"`        // of one of them
	Credential   string `json:"credential,omitempty"` // that could not be used: for the operator, never for a caller (CONTRACT B3)
}

func (c *account) addRefused(v dispatch.ActionView) {
	if !v.Ended || v.Outcome != outcome.NotAttempted.String() && v.Outcome != outcome.Rejected.String() {
		return
	}
	for i := range c.Refused {
		if g := &c.Refused[i]; g.Outcome == v.Outcome && g.Code == v.Code && g.Route == v.Route && g.Retry == v.Retry {
			g.Count++
			return
		}
	}
	c.Refused = append(c.Refused, refusedGroup{Outcome: v.Outcome, Code: v.Code, Route: v.Route, Retry: v.Retry, Count: 1, InvocationID: v.InvocationID})
}

// nameCredentials finds out which credential was missing or could not be used.
func (c *account) nameCredentials(ctx context.Context, client *adminClient) error {
	for i := range c.Refused {
		g := &c.Refused[i]
		var code outcome.Code
		if code.UnmarshalText([]byte(g.Code)) != nil {
			continue
		}
		if f, ok := outcome.Of(code); !ok || f.Phase != outcome.CredentialInjection {
			continue
		}
		id, err := dispatch.ParseActionID(g.InvocationID)
		if err != nil {
			continue
		}
		events, err := client.Events(ctx, id)
		if err != nil {
			return err
		}
		for _, e := range events {
			if e.Ended != nil && e.Ended.Credential != "" {
				g.Credential = e.Ended.Credential
			}
		}
	}
	return nil
}

func (c *account) printRefused(p *errWriter) {
	for i, g := range c.Refused {
		if i == maxUnresolvedLines {
			p.printf("  … and %d further reasons: waybill actions\n", len(c.Refused)-i)
			return
		}
		what := "refused by the other side"
		if g.Outcome == outcome.NotAttempted.String() {
			what = "not sent"
		}
		where := ""
		if g.Route != "" {
			where = "  route " + printable(g.Route)
		}
		if g.Credential != "" {
			where += fmt.Sprintf(", credential %s (see: waybill check)", printable(g.Credential))
		}
		p.printf("  %d %s  %s%s, retry: %s  e.g. %s\n", g.Count, what, dash(g.Code), where, g.Retry, g.InvocationID)
	}
}
