package main

import (
	"fmt"
	"strings"

	"waybill/routes"
)

// explainFollowUp says in words how Waybill finds out what became of a request.
func explainFollowUp(c *routes.Contract) []string {
	var out []string
	if m := c.Marker; m != nil {
		place := ""
		for name, v := range map[string]string{"field ": m.Header, "query parameter ": m.Query, "JSON member ": m.JSON, "form field ": m.Form} {
			if v != "" {
				place = name + v
			}
		}
		out = append(out, "the action's id goes into the "+place)
	}
	if q := c.Reconcile; q != nil {
		when := fmt.Sprintf("in the background from %s on, up to %d times", q.Every, q.Tries)
		if q.Manual {
			when = "when asked"
		}
		out = append(out, "if unknown: GET "+q.Get+" "+when)
		if q.NotFoundRejects {
			out = append(out, fmt.Sprintf("not found %s after the attempt ended means rejected", q.VisibleAfter))
		}
	}
	if a := c.Async; a != nil {
		where := strings.Join(a.From, ", ")
		if a.Get != "" {
			where = a.Get
		}
		accept := "accept a job"
		if len(a.AcceptedWhen) > 0 {
			accept = "accept a job, where the answer says so"
		}
		out = append(out, fmt.Sprintf("%v %s: its state is at %s, followed for %s", a.Status, accept, where, a.Timeout))
	}
	if b := c.Batch; b != nil {
		how := "each item has its own outcome"
		if b.Atomic {
			how = "all items are applied or none"
		}
		out = append(out, "a batch: "+how)
	}
	return out
}
