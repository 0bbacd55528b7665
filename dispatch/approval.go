package dispatch

import (
	"context"
	"crypto/sha256"
	"errors"
	"log/slog"
	"slices"
	"time"

	"waybill/dispatch/leak"
	"waybill/internal/control"
	"waybill/internal/killpoint"
	"waybill/outcome"
)

// The ways Decide can fail besides the journal's errors.
var (
	// ErrNoApproval: nobody was asked about this action.
	ErrNoApproval = errors.New("dispatch: no approval is asked for this action")
	// ErrApprovalClosed: it is decided, expired or ended already; the record says how.
	ErrApprovalClosed = errors.New("dispatch: the approval is closed")
	// ErrApprovalOther: the fingerprint is not that of the request (CONTRACT D3).
	ErrApprovalOther = errors.New("dispatch: the approval is of another request")
	// ErrApprovalUnusable: approved, but what was approved is not what would be sent now;
	// the action has ended with SNAPSHOT_MISMATCH.
	ErrApprovalUnusable = errors.New("dispatch: what was approved has changed")
	// ErrBadDecision: a name or a reason is missing, too long or not plain text.
	ErrBadDecision = errors.New("dispatch: a decision needs a name of up to 128 bytes and a reason of up to 500, in plain text of one line")
)

// card is an approval whose caller still waits.
type card struct{ decided chan struct{} }

// maxHeldBytes bounds a request that waits for an approval: it is kept in the journal.
const maxHeldBytes = 64 << 20

// approve asks a person, where the route wants that, and waits for the decision as
// long as the route allows (CONTRACT C1, D3, D4). It returns nil when the request may
// go on.
func (a *action) approve(ctx context.Context) *Reply {
	if !a.asks {
		return nil
	}
	refused := a.authoriseAny(ctx)
	switch {
	case a.out.Exec != nil && a.out.Exec.Stdin != nil:
		return a.refuse(refusal(outcome.CodeUnsupportedAction, "request.stdin", "stdin_streamed", "A person approves all that will be sent: give the standard input whole, or none."))
	case a.out.Upgrade != "":
		return a.refuse(refusal(outcome.CodeUnsupportedAction, "request.headers.upgrade", "approval_of_upgrade", "A person approves all that will be sent, and what a tunnel will carry is not known."))
	case gone(ctx):
		return a.refuse(a.cancelled(outcome.CredentialInjection))
	case refused != nil:
		return a.refuse(refused)
	}
	used, guard := a.approvable(), a.hides()
	if a.out.Length > maxHeldBytes {
		return a.refuse(refusal(outcome.CodePayloadLimit, "request.body", "held_limit", "A request that waits for an approval has at most 64 MiB."))
	}
	a.approved = a.approvalPrint(used)
	c := &card{decided: make(chan struct{})}
	a.p.mu.Lock()
	a.p.cards[a.id] = c
	a.p.mu.Unlock()
	rec, err := a.ask(ctx, used, guard)
	if err != nil {
		a.p.left(a.id)
		switch {
		case errors.Is(err, ErrIndeterminate):
			// The request is not handed over, and what may be on disk is an open approval:
			// the start that finds it tells.
			a.p.cfg.Logger.Error("approval record is indeterminate", slog.String("action", a.id.String()), slog.Any("err", err))
			f, _ := outcome.Of(outcome.CodeJournalIndeterminate)
			return a.unrecorded(f, "journal_indeterminate")
		case errors.Is(err, ErrRequestIDTaken):
			return a.refuse(a.exists(rec.ID))
		}
		if a.recorded {
			// A part of the request is on record: so is that nothing comes of it (M6).
			f, _ := outcome.Of(outcome.CodeJournalUnavailable)
			f.Phase = outcome.CredentialInjection
			return a.refuse(&Refusal{Facts: f, Reason: "request_not_held"})
		}
		return a.journalUnavailable(outcome.CredentialInjection, err)
	}
	a.asked = true
	killpoint.At("approval-requested")
	a.p.schedule(a.id, rec.Approval.ExpiresAt)
	a.p.notify(&rec)
	return a.awaitDecision(ctx, c)
}

// ask makes the request for an approval durable, the whole request with it.
func (a *action) ask(ctx context.Context, used *Credential, guard *leak.Guard) (Record, error) {
	held, err := a.holdRequest(used, guard)
	if err != nil {
		return Record{}, err
	}
	ev := Event{Type: ApprovalRequested, Approval: &Approval{Fingerprint: a.approved, Credential: used, ExpiresAt: a.now().Add(a.route.ApprovalExpiry())}}
	if a.body != nil {
		ev.Approval.Held.Digest = "sha256:" + hexOf(a.body.digest[:])
	}
	// As for a dispatch: what became durable after its caller left is an open approval.
	ctx = context.WithoutCancel(ctx)
	for {
		chunk, last, err := held.next()
		if err != nil {
			return Record{}, err
		}
		ev.Approval.Held.Chunks++
		ev.Approval.Held.Bytes += int64(len(chunk.Data))
		if last {
			a.add(ev)
		}
		events := a.events
		if !a.recorded {
			accepted := a.accepted
			events = append([]Event{{Type: ActionAccepted, At: a.start, Accepted: &accepted}}, events...)
		}
		receipt, err := a.p.cfg.Journal.Append(ctx, Batch{Action: a.id, Events: events, Chunks: []Chunk{chunk}})
		if err != nil {
			return Record{ID: receipt.Earlier}, err
		}
		a.events, a.recorded = nil, true
		if last {
			return receipt.Record, nil
		}
	}
}

// approvable is the credential as an approval binds it: its versions without the issue of
// short-lived tokens, which changes by itself.
func (a *action) approvable() *Credential {
	if a.credential == nil {
		return nil
	}
	if a.out.Exec != nil {
		c := *a.credential
		return &c
	}
	c := &Credential{ID: a.credential.ID, Mode: a.credential.Mode}
	for i := range a.route.Inject {
		c.Version = join(c.Version, a.resolvedOf(a.route.Inject[i].Credential).Version)
	}
	return c
}

// hides knows the secrets that will be attached, and lets go of them: while a person
// decides they are not needed.
func (a *action) hides() *leak.Guard {
	var secrets [][]byte
	for _, got := range a.resolved {
		secrets = append(secrets, got.Secret.Expose())
		got.Secret.Zero()
	}
	for _, s := range a.secrets {
		secrets = append(secrets, []byte(s))
	}
	g := leak.New(secrets...)
	for _, s := range secrets {
		clear(s)
	}
	a.resolved, a.signers, a.jumpSigners, a.secrets = nil, nil, nil, nil
	return g
}

// approvalPrint is the fingerprint of D5: everything that will be sent but the secret.
// It is taken before anything is attached, so that the secret is not even in its
// digest, and names the credential instead.
func (a *action) approvalPrint(used *Credential) string {
	if used == nil {
		used = &Credential{}
	}
	var seal [sha256.Size]byte
	if a.out.Exec != nil {
		seal = sealExec(a.out, a.execEnv, a.body, used.ID+"@"+used.Version, a.binding.Snapshot.Digest())
	} else {
		seal = sealOf(a.out, a.body, nil, used.ID+"@"+used.Version, a.binding.Snapshot.Digest())
	}
	f := newFields()
	f.add("waybill approval 1", a.route.Name, used.ID, used.Version, used.Mode, string(seal[:]))
	return f.text()
}

// authoriseAny obtains the secrets of a request or a command.
func (a *action) authoriseAny(ctx context.Context) *Refusal {
	if a.out.Exec != nil {
		return a.authoriseExec(ctx)
	}
	return a.authorise(ctx)
}

// awaitDecision waits for the decision on behalf of the caller. Its reply is nil when the
// request was approved and is still the caller's to follow.
func (a *action) awaitDecision(ctx context.Context, c *card) *Reply {
	limit := a.route.ApprovalHold()
	if a.s.Wait > 0 {
		limit = min(limit, a.s.Wait)
	}
	timer := time.NewTimer(limit)
	defer timer.Stop()
	select {
	case <-c.decided:
	case <-timer.C:
		if a.p.left(a.id) {
			return a.pending()
		}
		<-c.decided
	case <-a.p.drains:
		if a.p.left(a.id) {
			return a.pending()
		}
		<-c.decided
	case <-ctx.Done():
		if a.p.left(a.id) {
			if !gone(ctx) {
				return a.pending()
			}
			return a.refuse(a.cancelled(outcome.CredentialInjection)) // F10
		}
		<-c.decided
	}
	rec, err := a.p.cfg.Journal.Action(context.WithoutCancel(ctx), a.id)
	if err != nil {
		return a.journalUnavailable(outcome.CredentialInjection, err)
	}
	if rec.Ended {
		reply := a.answer(rec, rec.Facts, approvalDetail(&rec))
		a.log(rec, reply.Status)
		return reply
	}
	return a.stillApproved(ctx, &rec)
}

// pending is the answer to a caller whose wait is over while the approval stays open.
func (a *action) pending() *Reply {
	rec, err := a.p.cfg.Journal.Action(context.Background(), a.id)
	if err != nil {
		return a.journalUnavailable(outcome.CredentialInjection, err)
	}
	if !rec.AwaitsApproval() {
		// It was decided, and perhaps sent, while this caller turned away (F2).
		return a.asRecorded("It was decided at this moment: ask GET /v1/actions/" + a.id.String() + "/result for what became of it.")
	}
	return a.stillPending(rec)
}

// stillPending says that the request is held and will be sent once, if a person wants it.
func (a *action) stillPending(rec Record) *Reply {
	f, _ := outcome.Of(outcome.CodeApprovalPending)
	detail := "A person has to approve the request"
	if rec.Approval != nil {
		detail += " until " + rec.Approval.ExpiresAt.UTC().Format(time.RFC3339)
	}
	detail += "; it is sent once when that happens. Do not send it again: ask GET /v1/actions/" + a.id.String() + "/result for what became of it."
	reply := a.answer(rec, f, detail)
	a.log(rec, reply.Status)
	return reply
}

func approvalDetail(rec *Record) string {
	d := rec.Approval
	if d == nil || d.Decision == nil || d.Decision.Reason == "" {
		return ""
	}
	return "The person who decided says: " + d.Decision.Reason
}

// stillApproved checks, last before the secret is attached, that the request that is
// here is the one that was approved, and that nothing it was bound to has changed
// (CONTRACT D3).
func (a *action) stillApproved(ctx context.Context, rec *Record) *Reply {
	mismatch := func(reason, detail string) *Reply {
		return a.refuse(refusal(outcome.CodeSnapshotMismatch, "", reason, detail))
	}
	if control.Off("D3-fingerprint-checked") {
		a.approved = rec.Approval.Fingerprint
		if refused := a.authoriseAny(ctx); refused != nil {
			return a.refuse(refused)
		}
		return nil
	}
	switch d := rec.Approval.Decision; {
	case d == nil || d.Verdict != Approved:
		return mismatch("not_approved", "The request is not approved.")
	case a.now().After(rec.Approval.ExpiresAt):
		f, _ := outcome.Of(outcome.CodeApprovalExpired)
		return a.refuse(&Refusal{Facts: f, Reason: "expired_before_dispatch"})
	case a.p.binding.Load().Snapshot.Digest() != rec.Bound.Snapshot:
		return mismatch("configuration_changed", "The configuration changed after the approval was asked for; send the request again.")
	}
	if refused := a.authoriseAny(ctx); refused != nil {
		if gone(ctx) {
			refused = a.cancelled(outcome.CredentialInjection)
		}
		return a.refuse(refused)
	}
	used := a.approvable() // and what is attached is what was authorised here
	if (used == nil) != (rec.Approval.Credential == nil) || used != nil && *used != *rec.Approval.Credential {
		return mismatch("credential_changed", "The credential changed after the approval was asked for; send the request again.")
	}
	if a.approvalPrint(used) != rec.Approval.Fingerprint || a.body != nil && !a.body.intact() {
		return mismatch("request_changed", "The request is not the one that was approved.")
	}
	a.approved = rec.Approval.Fingerprint
	// An equal request may have ended unresolved while this one waited (O3).
	if refused := a.guard(ctx); refused != nil {
		return a.refuse(refused)
	}
	return nil
}

// left takes the card away and reports whether its caller was still waiting: whoever
// takes it, the caller or the decision, is the one who goes on.
func (p *Pipeline) left(id ActionID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	_, waiting := p.cards[id]
	delete(p.cards, id)
	return waiting
}

// wake hands a decided approval to its waiting caller, or reports that there is none.
func (p *Pipeline) wake(id ActionID) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	c, waiting := p.cards[id]
	delete(p.cards, id)
	if waiting {
		close(c.decided)
	}
	return waiting
}

// Decide approves or denies (CONTRACT D3, D4). The decision is durable when it
// returns; an approved request is then dispatched once, for its waiting caller or
// detached. fingerprint, if it is not "", must be the request's. The error is
// ErrActionNotFound, ErrNoApproval, ErrApprovalClosed – the record says how it was
// closed –, ErrApprovalOther, ErrApprovalUnusable, ErrBadDecision, or the journal's.
func (p *Pipeline) Decide(ctx context.Context, id ActionID, fingerprint string, d Decision) (Record, error) {
	if d.Verdict != Approved && d.Verdict != Denied || !d.valid() {
		return Record{}, ErrBadDecision
	}
	ctx = context.WithoutCancel(ctx)
	rec, err := p.cfg.Journal.Action(ctx, id)
	if err != nil {
		return rec, err
	}
	now := p.cfg.Clock.Now()
	switch {
	case rec.Approval == nil:
		return rec, ErrNoApproval
	case fingerprint != "" && fingerprint != rec.Approval.Fingerprint:
		return rec, ErrApprovalOther
	case !rec.PendingApproval():
		return rec, ErrApprovalClosed
	case now.After(rec.Approval.ExpiresAt) && !control.Off("D4-expiry-checked"):
		p.expire(id)
		if again, err := p.cfg.Journal.Action(ctx, id); err == nil {
			rec = again
		}
		return rec, ErrApprovalClosed
	}
	events := []Event{{Type: ApprovalDecided, At: now, Decision: &d}}
	var unusable error
	switch {
	case d.Verdict == Denied:
		f, _ := outcome.Of(outcome.CodeApprovalDenied)
		events = append(events, Event{Type: ActionRefused, At: now, Ended: &Ended{Facts: f, Reason: "denied", Route: rec.Bound.Route}})
	case p.binding.Load().Snapshot.Digest() != rec.Bound.Snapshot && !control.Off("D3-fingerprint-checked"):
		f, _ := outcome.Of(outcome.CodeSnapshotMismatch)
		events = append(events, Event{Type: ActionRefused, At: now, Ended: &Ended{Facts: f, Reason: "configuration_changed", Route: rec.Bound.Route}})
		unusable = ErrApprovalUnusable
	}
	receipt, err := p.cfg.Journal.Append(ctx, Batch{Action: id, Events: events})
	switch {
	case errors.Is(err, ErrIllegalTransition):
		// Somebody else was first.
		if again, rerr := p.cfg.Journal.Action(ctx, id); rerr == nil {
			rec = again
		}
		return rec, ErrApprovalClosed
	case err != nil:
		return rec, err
	}
	killpoint.At("approval-decided")
	rec = receipt.Record
	p.cfg.Logger.Info("approval decided", slog.String("action", id.String()), slog.String("verdict", string(d.Verdict)), slog.Any("by", d.By), slog.String("via", d.Via))
	if !p.wake(id) && !rec.Ended {
		go p.dispatchApproved(id)
	}
	return rec, unusable
}

// schedule ends the approval when its time is over.
func (p *Pipeline) schedule(id ActionID, at time.Time) {
	time.AfterFunc(max(at.Sub(p.cfg.Clock.Now()), 0)+time.Millisecond, func() { p.expire(id) })
}

// expire records that nobody decided in time. It changes nothing of an approval that
// is decided: one that was approved in time ends by itself.
func (p *Pipeline) expire(id ActionID) {
	defer p.survive("expiry of an approval", id)
	rec, err := p.cfg.Journal.Action(context.Background(), id)
	if err != nil || !rec.PendingApproval() {
		return
	}
	now := p.cfg.Clock.Now()
	if now.Before(rec.Approval.ExpiresAt) {
		p.schedule(id, rec.Approval.ExpiresAt) // the clock went backwards
		return
	}
	f, _ := outcome.Of(outcome.CodeApprovalExpired)
	_, err = p.cfg.Journal.Append(context.Background(), Batch{Action: id, Events: []Event{
		{Type: ApprovalDecided, At: now, Decision: &Decision{Verdict: Expired, By: "waybill", Via: "clock"}},
		{Type: ActionRefused, At: now, Ended: &Ended{Facts: f, Reason: "expired", Route: rec.Bound.Route}},
	}})
	if err != nil {
		if !errors.Is(err, ErrIllegalTransition) {
			// It stays open on record and cannot be approved any more; the next start ends it.
			p.cfg.Logger.Warn("an expired approval cannot be recorded", slog.String("action", id.String()), slog.Any("err", err))
		}
		return
	}
	p.wake(id)
}

// ResumeApprovals takes up what an earlier process left open: approvals that wait for
// their decision, and requests that were approved and not sent. It is called once, at
// the start, and returns how many of each there were. A request that was sent, or may
// have been, is not among them: its DISPATCH_STARTED is on record (M2, M4).
func (p *Pipeline) ResumeApprovals(ctx context.Context) (pending, approved int, err error) {
	for rec, err := range p.cfg.Journal.Actions(ctx, Filter{OpenOnly: true}) {
		if errors.Is(err, ErrQuarantined) {
			return pending, approved, nil // nothing can be written
		}
		if err != nil {
			return pending, approved, err
		}
		switch {
		case rec.PendingApproval():
			pending++
			p.schedule(rec.ID, rec.Approval.ExpiresAt)
		case rec.AwaitsApproval():
			approved++
			go p.dispatchApproved(rec.ID)
		}
	}
	return pending, approved, nil
}

// Approvals returns the actions that wait for a decision, newest first.
func (p *Pipeline) Approvals(ctx context.Context) ([]Record, error) {
	var out []Record
	for rec, err := range p.cfg.Journal.Actions(ctx, Filter{OpenOnly: true}) {
		if err != nil {
			return out, err
		}
		if rec.PendingApproval() {
			out = append(out, rec)
		}
	}
	slices.SortFunc(out, func(a, b Record) int { return b.AcceptedAt.Compare(a.AcceptedAt) })
	return out, nil
}

// dispatchApproved sends a request whose caller does not wait any more. The journal
// lets it cross the boundary once (Record.spend): a second call, or one after a crash
// behind the boundary, ends without sending.
func (p *Pipeline) dispatchApproved(id ActionID) {
	if !p.enter() {
		return // draining: the next start takes it up
	}
	defer p.survive("an approved request", id)
	p.cfg.Metrics.InFlight(1)
	a := &action{p: p, id: id, start: time.Now(), over: make(chan struct{}), caller: context.Background(), detached: true, recorded: true, left: true, noted: true, asks: true, asked: true}
	a.mark = a.start
	handed := false
	defer func() {
		if !handed {
			a.close()
		}
	}()
	rec, err := p.cfg.Journal.Action(context.Background(), id)
	if err != nil || !rec.AwaitsApproval() || rec.Approval.Decision == nil {
		return
	}
	if err := a.rebuild(&rec); err != nil {
		var changed *rebuildError
		if errors.As(err, &changed) {
			a.refuse(refusal(outcome.CodeSnapshotMismatch, "", changed.reason, ""))
			return
		}
		p.cfg.Logger.Error("an approved request cannot be read", slog.String("action", id.String()), slog.Any("err", err))
		return // it stays open
	}
	ctx := context.Background()
	if a.stillApproved(ctx, &rec) != nil {
		return
	}
	attach := a.attach
	if a.out.Exec != nil {
		attach = a.attachExec
	}
	if refused := attach(ctx); refused != nil {
		a.refuse(refused)
		return
	}
	conn, r := a.connect(ctx)
	if r != nil {
		return
	}
	if a.record(ctx, conn) != nil {
		return
	}
	handed = true
	a.run(conn)
}

// notify tells whoever wants to know that a person is asked. It never waits.
func (p *Pipeline) notify(rec *Record) {
	if p.cfg.OnApproval == nil {
		return
	}
	v, id := rec.ApprovalView(), rec.ID
	go func() {
		defer p.survive("word of an approval", id)
		p.cfg.OnApproval(v)
	}()
}

// ApprovalView is one approval as people and programs see it. It holds no query
// values, field values or body: that is ApprovalRequest.
type ApprovalView struct {
	InvocationID string      `json:"invocation_id"`
	State        string      `json:"state"`
	Fingerprint  string      `json:"fingerprint"`
	Caller       string      `json:"caller"`
	Route        string      `json:"route"`
	Method       string      `json:"method"`
	Target       string      `json:"target"`
	Snapshot     string      `json:"snapshot"`
	Credential   *Credential `json:"credential,omitempty"`
	BodyBytes    int64       `json:"body_bytes"`
	BodyDigest   string      `json:"body_digest,omitempty"`
	AskedAt      time.Time   `json:"asked_at"`
	ExpiresAt    time.Time   `json:"expires_at"`
	Decision     *Decision   `json:"decision,omitempty"`
	DecidedAt    time.Time   `json:"decided_at,omitzero"`
	Code         string      `json:"code,omitempty"` // of the action
	// Request is what would be sent, where it was asked for and is still held.
	Request *ApprovalRequest `json:"request,omitempty"`
}

// ApprovalView returns the record's approval as it is listed; its zero value where
// nobody was asked.
func (r *Record) ApprovalView() ApprovalView {
	a := r.Approval
	if a == nil {
		return ApprovalView{}
	}
	return ApprovalView{InvocationID: r.ID.String(), State: r.ApprovalWord(), Fingerprint: a.Fingerprint, Caller: r.Caller, Route: r.Bound.Route, Method: r.Method,
		Target: r.Target, Snapshot: r.Bound.Snapshot, Credential: a.Credential, BodyBytes: r.Bound.BodyBytes, BodyDigest: a.Held.Digest,
		AskedAt: a.AskedAt, ExpiresAt: a.ExpiresAt, Decision: a.Decision, DecidedAt: a.DecidedAt, Code: r.Shown().Code.String()}
}

// Approval returns one approval with the request that would be sent, as far as it is
// still held. ErrActionNotFound, ErrNoApproval.
func (p *Pipeline) Approval(ctx context.Context, id ActionID) (ApprovalView, error) {
	rec, err := p.cfg.Journal.Action(ctx, id)
	if err != nil {
		return ApprovalView{}, err
	}
	if rec.Approval == nil {
		return ApprovalView{}, ErrNoApproval
	}
	v := rec.ApprovalView()
	if rec.HeldChunks() > 0 {
		head, _, err := p.openHeld(ctx, &rec)
		if err != nil {
			return v, err
		}
		v.Request = &head.Shown
	}
	return v, nil
}
