package dispatch

import (
	"context"
	"errors"
	"iter"
	"maps"
	"slices"
	"time"

	"waybill/outcome"
)

// Session is what is recorded of a session's opening and of its end (CONTRACT N4).
// Its token is not in it.
type Session struct {
	ID     string `json:"id"`               // "ses_" + 16 hexadecimal digits
	Name   string `json:"name,omitempty"`   // for people
	Caller string `json:"caller"`           // the caller id of its actions
	Reason string `json:"reason,omitempty"` // of the end: closed, expired
}

// SessionRecord is a session as the journal knows it. Times are for people (M3).
type SessionRecord struct {
	Session
	OpenedAt  time.Time `json:"opened_at"`
	OpenedSeq uint64    `json:"opened_seq"`
	ClosedAt  time.Time `json:"closed_at,omitzero"` // zero: open
	ClosedSeq uint64    `json:"closed_seq,omitempty"`
}

// SessionJournal is what keeps the record of sessions. An implementation is safe for
// concurrent use.
type SessionJournal interface {
	// RecordSession appends SESSION_OPENED or SESSION_CLOSED and returns when it is
	// durable. Errors as those of Journal.Append.
	RecordSession(ctx context.Context, ev Event) error
	// Sessions returns the sessions on record, oldest first.
	Sessions(ctx context.Context) ([]SessionRecord, error)
}

// The states of a SessionView.
const (
	SessionOpen    = "open"
	SessionEnded   = "closed"
	SessionExpired = "expired"
	// NoSession is a caller that came without one: a configured caller, or one on
	// loopback. It has no beginning and no end but its first and last action.
	NoSession = "caller"
)

// SessionView is who was connected, from when to when, and what it did in sum
// (CONTRACT N4).
type SessionView struct {
	ID       string    `json:"id,omitempty"`
	Name     string    `json:"name,omitempty"`
	Caller   string    `json:"caller"`
	State    string    `json:"state"`
	OpenedAt time.Time `json:"opened_at,omitzero"`
	ClosedAt time.Time `json:"closed_at,omitzero"`

	FirstActionAt time.Time      `json:"first_action_at,omitzero"`
	LastActionAt  time.Time      `json:"last_action_at,omitzero"`
	Actions       int            `json:"actions"`
	Running       int            `json:"running"`
	ByOutcome     map[string]int `json:"by_outcome"`
	ByRoute       map[string]int `json:"by_route"`
}

func (v *SessionView) add(rec *Record) {
	if v.ByOutcome == nil {
		v.ByOutcome, v.ByRoute = map[string]int{}, map[string]int{}
	}
	v.Actions++
	if !rec.Ended {
		v.Running++
	}
	v.ByOutcome[rec.Shown().Outcome.String()]++
	if route := rec.View().Route; route != "" {
		v.ByRoute[route]++
	}
	if v.FirstActionAt.IsZero() || rec.AcceptedAt.Before(v.FirstActionAt) {
		v.FirstActionAt = rec.AcceptedAt
	}
	if rec.AcceptedAt.After(v.LastActionAt) {
		v.LastActionAt = rec.AcceptedAt
	}
}

// SessionSource is what SessionViews reads; a Journal that keeps sessions is one.
type SessionSource interface {
	Sessions(ctx context.Context) ([]SessionRecord, error)
	Actions(ctx context.Context, f Filter) iter.Seq2[Record, error]
}

// SessionQuery says which sessions are shown. Zero: all of them, without callers.
type SessionQuery struct {
	Limit   int       // the newest so many; 0: all
	Since   time.Time // opened, or for callers active, since then
	Callers bool      // also callers without a session; reads every action
	// Valid reports whether a session's token is still taken; nil: not known.
	Valid func(id string) bool
}

// SessionViews returns sessions, newest first, then callers by name. With
// ErrQuarantined it returns what there is: it may not be all (M5).
func SessionViews(ctx context.Context, src SessionSource, q SessionQuery) ([]SessionView, error) {
	recs, err := src.Sessions(ctx)
	incomplete := err
	if err != nil && !errors.Is(err, ErrQuarantined) {
		return nil, err
	}
	out := []SessionView{}
	known := make(map[string]bool, len(recs))
	for i := range recs {
		known[recs[i].Caller] = true
	}
	sum := func(v *SessionView) error {
		v.ByOutcome, v.ByRoute = map[string]int{}, map[string]int{}
		for rec, err := range src.Actions(ctx, Filter{Caller: v.Caller}) {
			if errors.Is(err, ErrQuarantined) {
				incomplete = err
				return nil
			}
			if err != nil {
				return err
			}
			v.add(&rec)
		}
		return nil
	}
	for i := len(recs) - 1; i >= 0 && (q.Limit == 0 || len(out) < q.Limit); i-- {
		r := &recs[i]
		if r.OpenedAt.Before(q.Since) {
			continue
		}
		v := SessionView{ID: r.ID, Name: r.Name, Caller: r.Caller, State: SessionOpen, OpenedAt: r.OpenedAt, ClosedAt: r.ClosedAt}
		switch {
		case r.ClosedSeq > 0 && r.Reason != SessionExpired:
			v.State = SessionEnded
		case r.ClosedSeq > 0, q.Valid != nil && !q.Valid(r.ID):
			v.State = SessionExpired
		}
		if err := sum(&v); err != nil {
			return nil, err
		}
		out = append(out, v)
	}
	if !q.Callers {
		return out, incomplete
	}
	callers := map[string]*SessionView{}
	for rec, err := range src.Actions(ctx, Filter{Since: q.Since}) {
		if errors.Is(err, ErrQuarantined) {
			incomplete = err
			break
		}
		if err != nil {
			return nil, err
		}
		if known[rec.Caller] {
			continue
		}
		v := callers[rec.Caller]
		if v == nil {
			v = &SessionView{Caller: rec.Caller, State: NoSession}
			callers[rec.Caller] = v
		}
		v.add(&rec)
	}
	for _, name := range slices.Sorted(maps.Keys(callers)) {
		out = append(out, *callers[name])
	}
	return out, incomplete
}

// The sources of events beside those of evidence (outcome.Sources): who says so.
const (
	// CallerRequested: what the caller asked for, or acknowledged.
	CallerRequested outcome.Source = "caller"
	// Decided: what Waybill itself decided or did.
	Decided outcome.Source = "waybill"
)

// SourceOf says on whose word an event rests (CONTRACT N4, K1).
func (e *Event) SourceOf() outcome.Source {
	if e.Ended != nil && e.Ended.Source != "" {
		return e.Ended.Source
	}
	switch e.Type {
	case ActionAccepted:
		if e.Accepted != nil && e.Accepted.Link != nil {
			return Decided // a query, a job or a look at one: Waybill's own
		}
		return CallerRequested
	case ResultDelivered:
		return CallerRequested
	case RequestSent, CallerGone, DeliveryFailed, TunnelClosed, UpgradeClosed, AttemptFailed, AttemptResolved:
		return outcome.TransportObserved
	case ResponseStarted, ResponseComplete, ResultCommitted, JobRecorded, ItemsResolved:
		return outcome.RemoteResponse
	case PreflightValidated, CredentialAuthorized, ActionRefused, DispatchStarted, AttemptInterrupted, TunnelOpened, Booted, SessionOpened, SessionClosed,
		LeaseTaken, LeaseRenewed, LeaseEnded, RetryStopped, ApprovalRequested:
		return Decided
	case ApprovalDecided:
		if e.Decision != nil && e.Decision.Verdict == Expired {
			return Decided
		}
		return outcome.OperatorAttested
	case Reconciled, JobPolled, JobEnded:
		return outcome.RemoteQuery
	case EvidenceImported:
		if e.Resolution != nil && e.Resolution.Source != "" {
			return e.Resolution.Source // as the journal says that it comes from (K4)
		}
		return outcome.OperatorAttested
	case Attested:
		return outcome.OperatorAttested
	case EventInvalid, eventTypes:
	}
	return ""
}

// ShownEvent is a stored event as it is shown, with its source.
type ShownEvent struct {
	StoredEvent
	From outcome.Source `json:"from"`
}

// ShowEvents adds the sources.
func ShowEvents(events []StoredEvent) []ShownEvent {
	out := make([]ShownEvent, len(events))
	for i := range events {
		out[i] = ShownEvent{events[i], events[i].SourceOf()}
	}
	return out
}
