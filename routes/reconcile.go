package routes

import (
	"errors"
	"maps"
	"slices"
	"time"
)

// Reconcile is a reviewed query that tells what became of an operation (CONTRACT K6):
// a GET to the origin of the operation, and rules that map its complete answer.
// An answer that no rule takes, or two that contradict each other, leaves it unknown.
type Reconcile struct {
	// Get is a template of path and query (ValueTemplate).
	Get string
	// Headers are fixed request fields, such as the API's version.
	Headers       map[string]string `json:",omitempty"`
	CommittedWhen []Condition       `json:",omitempty"`
	RejectedWhen  []Condition       `json:",omitempty"`
	// NotFoundWhen recognises an answer that knows nothing of the operation. It counts
	// only when VisibleAfter has passed since the last attempt ended, and then means
	// unknown, or rejected where NotFoundRejects says so.
	NotFoundWhen    []Condition `json:",omitempty"`
	NotFoundRejects bool
	// VisibleAfter is the longest time from the end of an attempt until its effect shows
	// in the query.
	VisibleAfter time.Duration
	// Manual switches the background off: only asked for.
	Manual bool
	// Every is the first wait of the background, doubling up to MaxEvery; Tries its number.
	Every, MaxEvery time.Duration
	Tries           int
}

// Async says how the service accepts work that it does later (CONTRACT A7).
type Async struct {
	Status []int // that accept; empty: 202
	// From lists where the status resource stands, first found first: "location",
	// "operation-location", "azure-asyncoperation", or "json:PATH". Empty: the three fields.
	From []string `json:",omitempty"`
	// Get is a template of the status resource on the same origin, in place of From.
	Get string `json:",omitempty"`
	// AcceptedWhen are conditions of the accepting answer; empty: Status decides alone. It
	// tells a job from an answer that is complete at once, where both have one status.
	AcceptedWhen []Condition `json:",omitempty"`
	// Headers are fixed request fields of a poll, such as the API's version. They hold no
	// secret: credentials are injected by the route that takes the poll.
	Headers map[string]string `json:",omitempty"`
	// JobID is a path into the accepting body; "": the last segment of the status resource.
	JobID string `json:",omitempty"`
	// Conditions of a poll's complete answer. Without any, the answer decides by the
	// usual forms (see DoneByForm).
	PendingWhen   []Condition   `json:",omitempty"`
	CommittedWhen []Condition   `json:",omitempty"`
	RejectedWhen  []Condition   `json:",omitempty"`
	Every         time.Duration // first wait, doubling up to MaxEvery; Retry-After counts
	MaxEvery      time.Duration
	Timeout       time.Duration // from acceptance; afterwards the job is unknown
	Polls         int
}

// Batch describes requests with several items (CONTRACT F7).
type Batch struct {
	// Lines: request body is JSON lines, one item a line; else Items is a path to the
	// array in the JSON body ("": the body is the array).
	Lines bool
	Items string `json:",omitempty"`
	// ItemID is a path inside an item; "": items are told apart by index.
	ItemID string `json:",omitempty"`
	// ResultLines: the answer is JSON lines; else Results is the path to its array.
	// Multistatus reads a WebDAV 207 (RFC 4918 §13).
	ResultLines bool
	Multistatus bool
	Results     string `json:",omitempty"`
	// ResultID is a path inside a result; "": results stand in the order of the items.
	ResultID string `json:",omitempty"`
	// Status is a path inside a result to a number that is read as an HTTP status.
	Status string `json:",omitempty"`
	// CommittedWhen and RejectedWhen test a result, its JSON only. Where they are
	// written Status does not count.
	CommittedWhen []Condition `json:",omitempty"`
	RejectedWhen  []Condition `json:",omitempty"`
	// Atomic: all items are applied or none.
	Atomic bool
}

// Marker is a place of the request into which Waybill writes the action's id, for a
// reconcile query to search for (CONTRACT K7).
type Marker struct {
	Header string `json:",omitempty"`
	Query  string `json:",omitempty"` // name of a parameter
	JSON   string `json:",omitempty"` // names only: metadata.waybill
	Form   string `json:",omitempty"` // name of a field of a form body
}

// What is not configured.
const (
	DefaultReconcileEvery    = 2 * time.Second
	DefaultReconcileMaxEvery = 5 * time.Minute
	DefaultReconcileTries    = 10
	DefaultPollEvery         = 2 * time.Second
	DefaultPollMaxEvery      = time.Minute
	DefaultPollTimeout       = time.Hour
	DefaultPolls             = 200
)

// Sources of a status resource.
const (
	FromLocation          = "location"
	FromOperationLocation = "operation-location"
	FromAzure             = "azure-asyncoperation"
	FromJSON              = "json:"
)

// Links reports whether the contract asks for follow-up work on its actions.
func (c *Contract) Links() bool { return c.Reconcile != nil || c.Async != nil || c.Batch != nil }

// cloneFollowUp copies what this file adds to a contract, with its defaults.
func (c *Contract) cloneFollowUp() {
	if c.Reconcile != nil {
		v := *c.Reconcile
		v.Headers = maps.Clone(v.Headers)
		v.CommittedWhen, v.RejectedWhen, v.NotFoundWhen = cloneConditions(v.CommittedWhen), cloneConditions(v.RejectedWhen), cloneConditions(v.NotFoundWhen)
		or(&v.Every, DefaultReconcileEvery)
		or(&v.MaxEvery, DefaultReconcileMaxEvery)
		or(&v.Tries, DefaultReconcileTries)
		c.Reconcile = &v
	}
	if c.Async != nil {
		v := *c.Async
		v.Status, v.From = cloneSlice(v.Status), cloneSlice(v.From)
		if len(v.Status) == 0 {
			v.Status = []int{202}
		}
		if len(v.From) == 0 && v.Get == "" {
			v.From = []string{FromAzure, FromOperationLocation, FromLocation}
		}
		v.Headers = maps.Clone(v.Headers)
		v.AcceptedWhen = cloneConditions(v.AcceptedWhen)
		v.PendingWhen, v.CommittedWhen, v.RejectedWhen = cloneConditions(v.PendingWhen), cloneConditions(v.CommittedWhen), cloneConditions(v.RejectedWhen)
		or(&v.Every, DefaultPollEvery)
		or(&v.MaxEvery, DefaultPollMaxEvery)
		or(&v.Timeout, DefaultPollTimeout)
		or(&v.Polls, DefaultPolls)
		c.Async = &v
	}
	if c.Batch != nil {
		v := *c.Batch
		v.CommittedWhen, v.RejectedWhen = cloneConditions(v.CommittedWhen), cloneConditions(v.RejectedWhen)
		c.Batch = &v
	}
	if c.Marker != nil {
		v := *c.Marker
		c.Marker = &v
	}
}

// checkFollowUp holds what makes these parts safe to act on.
func (c *Contract) checkFollowUp() error {
	if r := c.Reconcile; r != nil {
		t, err := ParseValueTemplate(r.Get)
		if err != nil {
			return err
		}
		if len(t.Values()) == 0 {
			return errors.New("a reconcile query names no recorded value and would ask the same for every action")
		}
		if slices.Contains(t.Values(), Value{From: "marker"}) && c.Marker == nil {
			return errors.New("a reconcile query names a marker that the contract does not set")
		}
		if len(r.CommittedWhen)+len(r.RejectedWhen)+len(r.NotFoundWhen) == 0 {
			return errors.New("a reconcile query has no rule")
		}
		if r.NotFoundRejects && (len(r.NotFoundWhen) == 0 || r.VisibleAfter <= 0) {
			return errors.New("not found means rejected only with a rule and a visibility delay")
		}
		if err := checkConditions(r.CommittedWhen, r.RejectedWhen, r.NotFoundWhen); err != nil {
			return err
		}
		if min(r.VisibleAfter, r.Every, r.MaxEvery) < 0 || r.Tries < 0 {
			return errors.New("a limit is negative")
		}
	}
	if a := c.Async; a != nil {
		if a.Get != "" {
			if _, err := ParseValueTemplate(a.Get); err != nil {
				return err
			}
		}
		if err := checkConditions(a.AcceptedWhen, a.PendingWhen, a.CommittedWhen, a.RejectedWhen); err != nil {
			return err
		}
		for _, p := range append([]string{a.JobID}, jsonSources(a.From)...) {
			if _, err := ParseJSONPath(p); err != nil {
				return err
			}
		}
	}
	if b := c.Batch; b != nil {
		for _, p := range []string{b.Items, b.ItemID, b.Results, b.ResultID, b.Status} {
			if path, err := ParseJSONPath(p); err != nil || !path.One() {
				return ErrBadJSONPath
			}
		}
		return checkConditions(b.CommittedWhen, b.RejectedWhen)
	}
	return nil
}

func jsonSources(from []string) []string {
	var out []string
	for _, f := range from {
		if len(f) > len(FromJSON) && f[:len(FromJSON)] == FromJSON {
			out = append(out, f[len(FromJSON):])
		}
	}
	return out
}
