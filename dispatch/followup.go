package dispatch

import (
	"slices"
	"time"

	"waybill/internal/control"
	"waybill/outcome"
)

// LinkKind says why Waybill started an action by itself. The list is closed.
type LinkKind string

// The kinds of links.
const (
	LinkReconcile LinkKind = "reconcile" // a query about the action (K6)
	LinkJob       LinkKind = "job"       // follows the work that the action's submission began (A7)
	LinkPoll      LinkKind = "poll"      // one look at a job
)

// Link ties an action to the one that it was started for.
type Link struct {
	Kind LinkKind `json:"kind"`
	Of   string   `json:"of"` // an action id
}

// Recall is what is kept of a request, before dispatch, for what may follow: the journal
// keeps neither query values nor bodies. It is stored sealed and shown to nobody but the
// administrator.
type Recall struct {
	// Values are those that the route's templates name, by that name.
	Values map[string]string `json:"values,omitempty"`
	// CallerName is what routes' callers lists are matched against.
	CallerName string `json:"caller_name,omitempty"`
	// Marker is what was written into the request (K7); "": nothing was.
	Marker string `json:"marker,omitempty"`
	// Items are the children of a batch (F7).
	Items *ItemList `json:"items,omitempty"`
	// Rule is the pattern of a command that has a confirming one (I8), whose groups are
	// in Values.
	Rule string `json:"rule,omitempty"`
}

// ItemList is what a batch asks for.
type ItemList struct {
	Count int      `json:"count"`
	IDs   []string `json:"ids,omitempty"` // nil: told apart by index
	// Atomic: all of them are applied or none.
	Atomic bool `json:"atomic,omitempty"`
	// Untracked says why the items could not be told apart; then all of them are unknown.
	Untracked string `json:"untracked,omitempty"`
}

// Resolution is a later piece of evidence about an action (CONTRACT K1–K5). It is
// attached beside the attempts and never changes one (K3).
type Resolution struct {
	outcome.Facts
	Source outcome.Source `json:"source"`
	// Covers is the last attempt that it speaks of. One that began afterwards is not
	// resolved by an earlier refusal.
	Covers int `json:"covers,omitempty"`
	// Query is the linked action that asked; Rule which rule took its answer.
	Query  string `json:"query,omitempty"`
	Rule   string `json:"rule,omitempty"`
	Status int    `json:"status,omitempty"`
	// Reason is a fixed token for a query that proved nothing, or an operator's own words (K5).
	Reason   string `json:"reason,omitempty"`
	Operator string `json:"operator,omitempty"`
	// Origin and OriginSeq are the journal that an imported piece comes from, and its
	// place there (K4).
	Origin    string    `json:"origin,omitempty"`
	OriginSeq uint64    `json:"origin_seq,omitempty"`
	At        time.Time `json:"at"`
	Seq       uint64    `json:"seq,omitempty"` // of this journal; set by Apply
}

// conclusive reports whether it resolves anything.
func (r *Resolution) conclusive() bool {
	return r.Outcome == outcome.Committed || r.Outcome == outcome.Rejected
}

// resolutionFacts are the facts of an action that later evidence resolves.
func resolutionFacts(o outcome.Outcome) outcome.Facts {
	switch o {
	case outcome.Committed:
		return outcome.Success()
	case outcome.Rejected:
		return outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Rejected, Retry: outcome.AfterCorrection, Code: outcome.CodeRemoteRejected}
	case outcome.Unknown, outcome.NotAttempted, outcome.OutcomeInvalid:
	}
	return unresolvedFacts(outcome.Reconcile)
}

// JobState says how far the remote side's work is, as far as is known.
type JobState string

// The states of a job.
const (
	JobPending JobState = "pending"
	JobDone    JobState = "done"
	JobLost    JobState = "lost" // not followed to its end
)

// Job is work that the remote side accepted and does later (CONTRACT A7).
type Job struct {
	ID string `json:"id,omitempty"` // as the service calls it
	// Resource is the status resource as a whole URL; it may hold a signature, is stored
	// sealed and only shown without the values of its query.
	Resource string `json:"resource,omitempty"`
	Shown    string `json:"shown,omitempty"`
	// Action follows it; "": nobody does, and Reason says why.
	Action string   `json:"action,omitempty"`
	Reason string   `json:"reason,omitempty"`
	State  JobState `json:"state"`
	Polls  int      `json:"polls,omitempty"`
	// Poll is the linked action that looked last.
	Poll  string    `json:"poll,omitempty"`
	Since time.Time `json:"since,omitzero"`
	Next  time.Time `json:"next,omitzero"`
	// Route and CallerName are those of the submission.
	Route      string `json:"route,omitempty"`
	CallerName string `json:"caller_name,omitempty"`
	From       string `json:"from,omitempty"` // origin that named the resource (R3)
}

// Items are what an answer says of the items of a batch.
type Items struct {
	List []Item `json:"list"`
}

// Item is one child outcome.
type Item struct {
	Index  int           `json:"index"` // from 0, in the order of the request
	Status int           `json:"status,omitempty"`
	Of     int           `json:"of,omitempty"` // the attempt whose answer says so
	Facts  outcome.Facts `json:"facts"`
}

// follows reports whether the action follows a job, and crosses no boundary itself.
func (r *Record) follows() bool { return r.Link != nil && r.Link.Kind == LinkJob }

// Pending reports whether the action follows a job that may still end.
func (r *Record) Pending() bool { return r.follows() && r.Job != nil && r.Job.State == JobPending }

// jobFacts are those of an action that follows a job, without later evidence.
func (r *Record) jobFacts() outcome.Facts {
	if r.Pending() {
		return outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.FetchResult, Code: outcome.CodeResultPending}
	}
	return unresolvedFacts(outcome.Reconcile)
}

// lastOpen is the last attempt that an answer did not settle; 0: none.
func (r *Record) lastOpen() int {
	n := 0
	for i := range r.Attempts {
		if a := &r.Attempts[i]; a.DispatchSeq != 0 && (a.Facts.Outcome == outcome.Unknown || a.Facts.Retry == outcome.Reconcile) {
			n = max(n, a.N)
		}
	}
	return n
}

// lastDispatched is the last attempt that crossed the boundary; 0: none.
func (r *Record) lastDispatched() int {
	n := 0
	for i := range r.Attempts {
		if r.Attempts[i].DispatchSeq != 0 {
			n = max(n, r.Attempts[i].N)
		}
	}
	return n
}

// settlement returns the evidence that resolves the action, or nil. Whoever saw the
// effect is right about the action; who saw none, only about attempts before.
func (r *Record) settlement() *Resolution {
	var best *Resolution
	open := r.lastOpen()
	for i := range r.Resolutions {
		res := &r.Resolutions[i]
		switch {
		case res.Outcome == outcome.Committed:
			return res
		case res.Outcome == outcome.Rejected && res.Covers >= open:
			best = res
		}
	}
	return best
}

// Settled reports whether later evidence resolves the action (K2, O3).
func (r *Record) Settled() bool { return r.settlement() != nil }

// settle puts later evidence on top of what the attempts say.
func (r *Record) settle(f outcome.Facts) outcome.Facts {
	if r.follows() {
		f = r.jobFacts()
	}
	res := r.settlement()
	if res == nil {
		return f
	}
	switch {
	case f.Outcome == outcome.Unknown,
		f.Outcome == outcome.Rejected && res.Outcome == outcome.Committed,
		f.Outcome == outcome.Committed && f.Retry == outcome.Reconcile && res.Outcome == outcome.Committed:
		return res.Facts
	}
	return f
}

// applyEvidence attaches a later piece of evidence. Whatever would turn a known result
// into less, or into another one, is refused and leaves the record as it was (K2, F2).
func applyEvidence(r *Record, ev *Event, seq uint64) error {
	res := ev.Resolution
	if res == nil {
		return illegal(ev, "no evidence")
	}
	if err := wellFormed(ev.Type, res); err != "" {
		return illegal(ev, err)
	}
	switch {
	case res.Outcome == outcome.NotAttempted && !control.Off("K2-no-regression"):
		return illegal(ev, "nothing that crossed the boundary becomes not_attempted again (F2, K2)")
	case !r.Dispatched():
		return illegal(ev, "nothing was dispatched: there is nothing to find out")
	}
	if !r.Ended && r.running() == nil {
		return illegal(ev, "the action is not over")
	}
	covers := res.Covers
	if covers == 0 {
		covers = r.lastDispatched()
	}
	for i := range r.Attempts {
		if a := &r.Attempts[i]; a.N <= covers && !a.Ended {
			return illegal(ev, "an attempt that it speaks of is active")
		}
	}
	if covers > r.lastDispatched() {
		return illegal(ev, "it speaks of an attempt that was not dispatched")
	}
	if ev.Type == Reconciled {
		r.Asked++
		r.AskedAt = ev.At
	}
	if !res.conclusive() && !(res.Outcome == outcome.NotAttempted && control.Off("K2-no-regression")) {
		return nil
	}
	if why := r.contradicted(res.Outcome); why != "" && !control.Off("K2-no-regression") {
		return illegal(ev, why)
	}
	kept := *res
	kept.Seq, kept.Covers, kept.At = seq, covers, ev.At
	r.Resolutions = append(append([]Resolution(nil), r.Resolutions...), kept)
	if r.follows() && r.Job != nil && r.Job.State == JobPending {
		job := *r.Job
		job.State = JobDone
		r.Job = &job
	}
	r.project()
	return nil
}

// wellFormed says what a piece of evidence lacks; "" for nothing (K1, K4, K5).
func wellFormed(t EventType, res *Resolution) string {
	switch {
	case t == Reconciled, t == JobEnded:
		if res.Source != outcome.RemoteQuery {
			return "a query's evidence is remote_query (K1)"
		}
	case t == Attested:
		if res.Source != outcome.OperatorAttested || res.Operator == "" || res.Reason == "" {
			return "an attestation names its operator and a reason (K5)"
		}
		if res.Outcome == outcome.Unknown {
			return "an attestation says what happened"
		}
	case t == EvidenceImported:
		if res.Origin == "" || res.OriginSeq == 0 {
			return "imported evidence names its journal and its place there (K4)"
		}
		switch res.Source {
		case outcome.TransportObserved, outcome.RemoteResponse, outcome.RemoteQuery, outcome.OperatorAttested:
		default:
			return "imported evidence has a source (K1)"
		}
		if res.Outcome == outcome.Unknown {
			return "imported evidence says what happened"
		}
	default:
		return "not a piece of evidence"
	}
	if res.Outcome == outcome.OutcomeInvalid {
		return "no facts"
	}
	return ""
}

// contradicted says what stands against evidence of this outcome; "" for nothing.
func (r *Record) contradicted(o outcome.Outcome) string {
	now := r.resolved()
	if now.Outcome == o {
		return "" // another observer of the same (K3)
	}
	seen := r.observed()
	if r.follows() {
		seen = r.jobFacts()
	}
	switch {
	case now.Outcome == outcome.Unknown:
		return ""
	case seen.Outcome == outcome.Unknown && now.Outcome == outcome.Rejected && o == outcome.Committed:
		// Somebody saw the effect after all: what is known grows.
		return ""
	case seen.Outcome == outcome.Committed && seen.Retry == outcome.Reconcile && !r.Settled():
		// A complete 5xx: whether there was an effect is still open.
		return ""
	case now.Outcome == outcome.Committed:
		return "the action is committed (K2)"
	default:
		return "a complete refusal is on record (K2)"
	}
}

// applyJob records what the remote side does later (A7).
func applyJob(r *Record, ev *Event, seq uint64) error {
	if ev.Job == nil {
		return illegal(ev, "no job")
	}
	if ev.Type == JobRecorded {
		if r.follows() && r.Job != nil {
			return illegal(ev, "the job is on record")
		}
		if !r.follows() {
			a := r.attempt(ev.Attempt)
			if a == nil || a.DispatchSeq == 0 {
				return illegal(ev, "attempt was not dispatched")
			}
			job := *ev.Job
			r.Job = &job
			return nil
		}
		job := *ev.Job
		job.State = JobPending
		r.Job = &job
		r.Ended, r.EndedAt = true, ev.At
		r.project()
		return nil
	}
	if !r.Pending() {
		return illegal(ev, "no job is followed")
	}
	job := *r.Job
	job.Polls, job.Poll, job.Next = ev.Job.Polls, ev.Job.Poll, ev.Job.Next
	if ev.Type == JobEnded {
		if ev.Resolution == nil {
			return illegal(ev, "no facts")
		}
		if err := wellFormed(ev.Type, ev.Resolution); err != "" {
			return illegal(ev, err)
		}
		if ev.Resolution.Outcome == outcome.NotAttempted {
			return illegal(ev, "a job that was accepted is not not_attempted (F2)")
		}
		job.State = JobLost
		if ev.Resolution.conclusive() {
			job.State = JobDone
			kept := *ev.Resolution
			kept.Seq, kept.At = seq, ev.At
			r.Resolutions = append(append([]Resolution(nil), r.Resolutions...), kept)
		}
		job.Reason = ev.Resolution.Reason
		r.EndedAt = ev.At
	}
	r.Job = &job
	r.project()
	return nil
}

// ofFollower reports whether an event is one of an action that follows a job.
func ofFollower(t EventType) bool {
	return slices.Contains([]EventType{JobRecorded, JobPolled, JobEnded, Attested, EvidenceImported, AttemptInterrupted}, t)
}

// applyItems records what an answer says of the items of a batch (F7).
func applyItems(r *Record, ev *Event) error {
	list := r.itemList()
	if ev.Items == nil || list == nil || list.Untracked != "" {
		return illegal(ev, "no batch")
	}
	a := r.attempt(ev.Attempt)
	if a == nil || a.DispatchSeq == 0 || !a.Complete {
		return illegal(ev, "no complete response (G1)")
	}
	known := make(map[int]Item)
	if r.Items != nil {
		for _, it := range r.Items.List {
			known[it.Index] = it
		}
	}
	seen := make(map[int]bool)
	for _, it := range ev.Items.List {
		switch {
		case it.Index < 0 || it.Index >= list.Count || seen[it.Index]:
			return illegal(ev, "an item that was not asked for, or twice")
		case it.Facts.Outcome != outcome.Committed && it.Facts.Outcome != outcome.Rejected:
			return illegal(ev, "an item is committed or rejected; what is not mentioned stays unknown")
		}
		seen[it.Index] = true
		if was, ok := known[it.Index]; ok && was.Facts.Outcome == outcome.Committed && it.Facts.Outcome != outcome.Committed {
			continue // what was done stays done (K2)
		}
		it.Of = ev.Attempt
		known[it.Index] = it
	}
	out := &Items{}
	for i := range list.Count {
		if it, ok := known[i]; ok {
			out.List = append(out.List, it)
		}
	}
	r.Items = out
	return nil
}

func (r *Record) itemList() *ItemList {
	if r.Bound == nil || r.Bound.Recall == nil {
		return nil
	}
	return r.Bound.Recall.Items
}

// Child is one item of a batch with its own outcome and advice (CONTRACT F7).
type Child struct {
	Index int    `json:"index"`
	ID    string `json:"id,omitempty"`
	outcome.Facts
	Status int `json:"status,omitempty"`
}

// Children are the items of a batch. What no complete answer mentions has the outcome
// of the whole while that is unknown, and is unknown when the answer came.
func (r *Record) Children() []Child {
	list := r.itemList()
	if list == nil || !r.Dispatched() {
		return nil
	}
	f := r.resolved()
	rest := unresolvedFacts(outcome.Reconcile)
	if r.Repeatable() {
		rest = unresolvedFacts(outcome.Backoff)
	}
	switch {
	case f.Outcome == outcome.Rejected, r.Settled():
		// The whole was refused, or somebody found out about the whole.
		rest = f
	case list.Atomic && f.Outcome == outcome.Committed && f.Code == outcome.CodeNone:
		rest = f
	case list.Atomic:
		rest = unresolvedFacts(outcome.Reconcile)
	case f.Outcome == outcome.Unknown && f.Code != outcome.CodeNone && f.Retry != outcome.SameIdempotencyKey && f.Validate() == nil:
		rest.Code = f.Code
		if rest.Validate() != nil {
			rest.Code = outcome.CodeRemoteOutcomeUnknown
		}
	}
	out := make([]Child, list.Count)
	for i := range out {
		out[i] = Child{Index: i, Facts: rest}
		if i < len(list.IDs) {
			out[i].ID = list.IDs[i]
		}
	}
	if r.Items != nil {
		for _, it := range r.Items.List {
			out[it.Index].Facts, out[it.Index].Status = it.Facts, it.Status
		}
	}
	return out
}

// itemsOpen reports whether a complete answer left items of a batch unknown: to send
// the whole again would repeat the others.
func (r *Record) itemsOpen() bool {
	if list := r.itemList(); list == nil || r.observed().Outcome == outcome.Rejected {
		return false
	}
	for _, c := range r.Children() {
		if c.Outcome == outcome.Unknown {
			return true
		}
	}
	return false
}

// followUp adds to the evidence what came after the attempts (K1, A7, F7).
func (r *Record) followUp(ev *outcome.Evidence) {
	for i := range r.Resolutions {
		res := &r.Resolutions[i]
		ev.Resolutions = append(ev.Resolutions, outcome.Resolution{
			Source: res.Source, Outcome: res.Outcome, Sequence: res.Seq, Covers: res.Covers, Query: res.Query, Rule: res.Rule, Status: res.Status,
			Operator: res.Operator, Reason: res.Reason, Origin: res.Origin, OriginSequence: res.OriginSeq, At: res.At.UTC().Format(time.RFC3339Nano),
		})
	}
	if res := r.settlement(); res != nil && r.resolved() == res.Facts {
		// What decides is this, and not the attempt's own end (K1, K5).
		ev.Source = res.Source
	}
	ev.Queries = r.Asked
	if r.Link != nil {
		ev.LinkedTo, ev.LinkKind = r.Link.Of, string(r.Link.Kind)
	}
	if j := r.Job; j != nil {
		ev.Job = &outcome.Job{ID: j.ID, Resource: j.Shown, Action: j.Action, State: string(j.State), Polls: j.Polls, Reason: j.Reason}
	}
	list := r.itemList()
	if list == nil {
		return
	}
	ev.Items = &outcome.Items{Count: list.Count, Atomic: list.Atomic, Untracked: list.Untracked}
	for _, c := range r.Children() {
		switch c.Outcome {
		case outcome.Committed:
			ev.Items.Committed++
		case outcome.Rejected:
			ev.Items.Rejected++
		case outcome.Unknown:
			ev.Items.Unknown++
		case outcome.NotAttempted, outcome.OutcomeInvalid:
		}
	}
}

// knownDone reports whether later evidence saw the effect: then nothing is sent again,
// whatever lease was taken before (K2).
func (r *Record) knownDone() bool {
	res := r.settlement()
	return res != nil && res.Outcome == outcome.Committed
}
