package journal

import (
	"slices"
	"time"

	"waybill/dispatch"
	"waybill/outcome"
)

// cloneFollowUp copies what cloneEvent leaves of an event: links, what is kept of a
// request, later evidence, jobs and items.
func cloneFollowUp(ev *dispatch.Event) {
	if a := ev.Accepted; a != nil && a.Link != nil { // a copy already
		l := *a.Link
		l.Kind, l.Of = dispatch.LinkKind(text(string(l.Kind))), text(l.Of)
		a.Link = &l
	}
	if b := ev.Bound; b != nil && b.Recall != nil { // a copy already
		r := *b.Recall
		r.CallerName, r.Marker = text(r.CallerName), text(r.Marker)
		if r.Values != nil {
			values := make(map[string]string, len(r.Values))
			for k, v := range r.Values {
				values[text(k)] = text(v)
			}
			r.Values = values
		}
		if i := clone(r.Items); i != nil {
			i.Untracked = text(i.Untracked)
			i.IDs = slices.Clone(i.IDs)
			for k := range i.IDs {
				i.IDs[k] = text(i.IDs[k])
			}
			r.Items = i
		}
		b.Recall = &r
	}
	if r := clone(ev.Resolution); r != nil {
		r.Source = outcome.Source(text(string(r.Source)))
		r.Query, r.Rule, r.Reason, r.Operator, r.Origin = text(r.Query), text(r.Rule), text(r.Reason), text(r.Operator), text(r.Origin)
		r.At = instantOrZero(r.At)
		ev.Resolution = r
	}
	if j := clone(ev.Job); j != nil {
		j.ID, j.Resource, j.Shown, j.Action, j.Reason = text(j.ID), text(j.Resource), text(j.Shown), text(j.Action), text(j.Reason)
		j.State, j.Poll = dispatch.JobState(text(string(j.State))), text(j.Poll)
		j.Route, j.CallerName, j.From = text(j.Route), text(j.CallerName), text(j.From)
		j.Since, j.Next = instantOrZero(j.Since), instantOrZero(j.Next)
		ev.Job = j
	}
	if i := clone(ev.Items); i != nil {
		i.List = slices.Clone(i.List)
		ev.Items = i
	}
}

func instantOrZero(t time.Time) time.Time {
	if t.IsZero() {
		return t
	}
	return instant(t)
}
