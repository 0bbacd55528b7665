package dispatch

import (
	"net/http"
	"strconv"
	"time"

	"waybill/outcome"
)

// ActionView is one action as people and programs see it in lists ("waybill
// actions --json", GET /v1/actions). It holds no query values and no secrets.
type ActionView struct {
	InvocationID    string    `json:"invocation_id"`
	RequestID       string    `json:"request_id"`
	Caller          string    `json:"caller"`
	Route           string    `json:"route"`
	Method          string    `json:"method"`
	Target          string    `json:"target"`
	Phase           string    `json:"phase"`
	Outcome         string    `json:"outcome"`
	Retry           string    `json:"retry"`
	Code            string    `json:"code"`
	DispatchStarted bool      `json:"dispatch_started"`
	Attempts        int       `json:"attempts"`
	AcceptedAt      time.Time `json:"accepted_at"`
	EndedAt         time.Time `json:"ended_at,omitzero"`
	Ended           bool      `json:"ended"`
	Delivered       bool      `json:"delivered"`
	Status          int       `json:"status,omitempty"` // of the stored result
	Durability      string    `json:"durability,omitempty"`
	// Link says which action this one was started for, and why.
	Link *Link `json:"link,omitempty"`
}

// View returns the record as it is listed.
func (r *Record) View() ActionView {
	f := r.Shown()
	v := ActionView{Link: r.linkView(), InvocationID: r.ID.String(), RequestID: r.RequestID, Caller: r.Caller, Method: r.Method, Target: r.Target,
		Phase: f.Phase.String(), Outcome: f.Outcome.String(), Retry: f.Retry.String(), Code: f.Code.String(),
		DispatchStarted: r.Dispatched(), Attempts: len(r.Attempts), AcceptedAt: r.AcceptedAt, EndedAt: r.EndedAt, Ended: r.Ended && !r.Pending(), Delivered: r.Delivered}
	v.Route = r.shownRoute()
	if r.Result != nil {
		v.Status = r.Result.Status
	}
	if r.Relaxed {
		v.Durability = "relaxed"
	}
	return v
}

// shownRoute is the route of an action as it is listed.
func (r *Record) shownRoute() string {
	if r.Tunnel != nil {
		return "tunnel"
	}
	return r.routeName()
}

// Shown are the facts as they are told: of an action that still runs, the advice is
// to ask again (RESULT_PENDING), whatever it will be in the end.
func (r *Record) Shown() outcome.Facts {
	if r.Ended || r.Tunnel != nil {
		return r.Facts
	}
	f := r.Facts
	f.Retry, f.Code = outcome.FetchResult, outcome.CodeResultPending
	if r.PendingApproval() {
		f.Code = outcome.CodeApprovalPending
	}
	return f
}

// Evidence returns what the records prove (CONTRACT L3).
func (r *Record) Evidence() outcome.Evidence {
	ev := outcome.Evidence{DispatchStarted: r.Dispatched(), LocalCause: r.LocalCause, Running: !r.Ended && r.Dispatched(), ResultSequence: r.ResultSeq}
	if r.Bound != nil {
		ev.Route, ev.Snapshot, ev.Fingerprint = r.Bound.Route, r.Bound.Snapshot, r.Bound.Fingerprint
	}
	if r.Relaxed {
		ev.Durability = "relaxed"
	}
	r.repeatEvidence(&ev)
	ev.Approval = r.approvalEvidence()
	for i := range r.Attempts {
		a := &r.Attempts[i]
		ev.Attempts = append(ev.Attempts, outcome.Attempt{N: a.N, Stage: a.Stage, Outcome: a.Facts.Outcome, Code: a.Facts.Code})
	}
	if r.Refusal != nil {
		if ev.Route == "" {
			ev.Route = r.Refusal.Route
		}
		ev.Field, ev.Reason, ev.EarlierAction, ev.Stage = r.Refusal.Field, r.Refusal.Reason, r.Refusal.EarlierAction, r.Refusal.Stage
	}
	r.followUp(&ev)
	a := r.Deciding()
	if a == nil {
		return ev
	}
	ev.Attempt, ev.Stage = a.N, a.Stage
	ev.Recovered = a.Recovered
	if d := a.Dispatch; d != nil {
		ev.DispatchSequence, ev.ConnectionID, ev.ConnectionReused, ev.Peer = a.DispatchSeq, d.Connection, d.Reused, d.Peer
	}
	ev.RequestHeadersSent, ev.RequestComplete = a.Sent.Headers, a.Sent.Complete
	if p := a.Response; p != nil {
		n := p.Bytes
		ev.ResponseHeadersReceived, ev.ReceivedStatus, ev.ReceivedBytes, ev.ExpectedBytes = true, p.Status, &n, p.ExpectedBytes
		ev.Redacted = p.Redacted
		ev.Framing, ev.ResponseDigest, ev.Hop, ev.ReceivedProxyStatus = p.Framing, p.Digest, p.Hop, p.ProxyStatus
	}
	if p := a.Response; p != nil && p.Exec != nil {
		p.Exec.show(&ev)
	}
	if u := r.Upgraded; u != nil {
		ev.Carried = &outcome.Carried{BytesOut: u.BytesOut, BytesIn: u.BytesIn}
		ev.Redacted += u.Redacted
	}
	if e := a.End; e != nil && e.Hop != "" {
		ev.Hop, ev.HopStatus, ev.ReceivedProxyStatus = e.Hop, e.HopStatus, e.ProxyStatus
	}
	ev.ResponseComplete = a.Complete
	if e := a.End; e != nil && ev.Source != "" {
		ev.ProtocolProof, ev.StatusLine = e.Proof, e.StatusLine
	} else if e != nil {
		ev.Source, ev.ProtocolProof, ev.StatusLine = e.Source, e.Proof, e.StatusLine
		if ev.Reason == "" {
			ev.Reason = e.Reason
		}
	}
	return ev
}

// ResultHeader returns the fields of a stored result as they are given out on a fetch:
// the origin's end-to-end fields and Waybill's own, as when it was relayed (CONTRACT
// H3, V6).
func (r *Record) ResultHeader(res *Result) http.Header {
	h := relayedHeader(res.Header)
	received := res.Status
	if res.Exec != nil {
		res.Exec.resultFields(h)
		received = 0 // there was no status but the command's
	}
	outcome.Annotate(h, r.ID.String(), r.Shown(), outcome.Shape{InsideTunnel: true, ReceivedStatus: received}, !r.Repeatable() && (r.Bound == nil || r.Bound.Key == nil))
	r.annotateJob(h)
	return h
}

// Envelope returns the record as the envelope of CONTRACT L1.
func (r *Record) Envelope() outcome.Envelope {
	return outcome.NewEnvelope(r.ID.String(), r.Shown(), "", r.Evidence())
}

// shape collects what shapes an answer's form but not its facts (L5, L7).
func (a *action) shape(rec *Record, f outcome.Facts) outcome.Shape {
	s := outcome.Shape{Method: a.s.Method, InsideTunnel: a.s.Authorities.Connect != "", Dialect: a.dialect(), RetryAfter: a.retryAfter}
	if a.out != nil && a.route != nil && f.Phase != outcome.Validation && f.Phase != outcome.CredentialInjection {
		s.NextHop = a.out.Target.Authority()
	}
	s.CallerSentKey = rec.Bound != nil && rec.Bound.Key != nil && rec.Bound.Key.Maker == "caller" || a.key != nil && a.key.Maker == "caller"
	if d := rec.Deciding(); d != nil {
		if d.End != nil {
			s.RetryAfter = d.End.RetryAfter
		}
		if d.Dispatch != nil && d.Dispatch.Peer != nil {
			s.NextProtocol = d.Dispatch.Peer.Protocol
		}
		if d.Response != nil {
			s.ReceivedStatus = d.Response.Status
		}
	}
	if f.Phase != outcome.ConnectionSetup {
		return s // the attempt may go on while its caller is answered
	}
	if e := a.setup; e != nil {
		s.RCode, s.AlertID, s.AlertName = e.RCode, e.AlertID, e.AlertName
	}
	return s
}

// dialect is that of the action's route, the default while there is none (L9).
func (a *action) dialect() outcome.Dialect {
	if a.route == nil {
		return outcome.DialectDefault
	}
	return a.route.Dialect
}

// answer makes Waybill's own answer from a record (CONTRACT L1, L5, G11).
func (a *action) answer(rec Record, f outcome.Facts, detail string) *Reply {
	if f.IsSuccess() && rec.Ended && rec.Facts.IsSuccess() {
		// Known meanwhile, from another attempt or by later evidence: a 200 of Waybill's own
		// would be taken for the answer (L7).
		return a.recordedReply(rec)
	}
	env := outcome.NewEnvelope(a.id.String(), f, detail, rec.Evidence())
	return ownReply(a.id, rec, env, a.shape(&rec, f))
}

func ownReply(id ActionID, rec Record, env outcome.Envelope, shape outcome.Shape) *Reply {
	ans := env.Answer(shape)
	return &Reply{ID: id, Record: rec, Envelope: &env, Status: ans.Status, Header: ans.Header,
		Body: bytesBody(ans.Body), ContentLength: contentLength(ans), HandedOver: func(error) {}}
}

func contentLength(ans outcome.Answer) int64 {
	if v := ans.Header.Get("Content-Length"); v != "" {
		if n, err := strconv.ParseInt(v, 10, 64); err == nil {
			return n
		}
	}
	return int64(len(ans.Body))
}
