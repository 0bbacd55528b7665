package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"time"

	"waybill/dispatch"
	"waybill/outcome"
)

// demoScenario is one line of the demo: what happens, and what the contract says
// must be known of it afterwards.
type demoScenario struct {
	name    string
	story   string // one line for people
	want    outcome.Facts
	status  int // of the answer to the caller; 0: the caller got none
	effects int // of this line's request at the upstream
	path    string
	play    func(ctx context.Context, d *demo, path string) (*demoStep, error)
}

// demoStep is what playing a scenario gave. Its facts are read from the journal
// afterwards, by id.
type demoStep struct {
	answer   *demoAnswer
	id       string   // of the action that the line is about
	problems []string // what was not as the contract says
}

func (s *demoStep) check(ok bool, format string, args ...any) {
	if !ok {
		s.problems = append(s.problems, fmt.Sprintf(format, args...))
	}
}

const demoPayment = `{"amount":5}`

// once plays one request and takes its answer.
func once(method, host, body string) func(context.Context, *demo, string) (*demoStep, error) {
	return func(ctx context.Context, d *demo, path string) (*demoStep, error) {
		a := d.caller.send(ctx, method, "https://"+host+demoZone+path, body)
		return &demoStep{answer: a, id: a.ID}, nil
	}
}

func facts(p outcome.Phase, o outcome.Outcome, r outcome.Retry, c outcome.Code) outcome.Facts {
	return outcome.Facts{Phase: p, Outcome: o, Retry: r, Code: c}
}

// demoScenarios are played in this order; the last ones kill the proxy.
func demoScenarios() []demoScenario {
	return []demoScenario{
		{
			name: "complete answer 200", story: "the plain case",
			want: outcome.Success(), status: 200, effects: 1,
			path: "/v1/read/ok", play: once(http.MethodGet, "api", ""),
		},
		{
			name: "secret reaches the upstream only", story: "the agent sent a placeholder; the upstream got the secret; nothing the agent read holds it",
			want: outcome.Success(), status: 201, effects: 1,
			path: "/v1/secret/create", play: playSecret,
		},
		{
			name: "complete answer 500", story: "a known result, but not permission to repeat: the payment was made",
			want: facts(outcome.RemoteExecution, outcome.Committed, outcome.Reconcile, outcome.CodeRemoteError), status: 500, effects: 1,
			path: "/v1/error/fail-500", play: once(http.MethodPost, "api", demoPayment),
		},
		{
			name: "complete answer 401", story: "an authoritative refusal, relayed as it came",
			want: facts(outcome.RemoteExecution, outcome.Rejected, outcome.AfterCorrection, outcome.CodeRemoteRejected), status: 401, effects: 0,
			path: "/v1/login/refuse-401", play: once(http.MethodPost, "api", demoPayment),
		},
		{
			name: "complete answer 429 to a POST", story: "refused; without a contract that says when, no advice to repeat",
			want: facts(outcome.RemoteExecution, outcome.Rejected, outcome.Never, outcome.CodeRemoteRejected), status: 429, effects: 0,
			path: "/v1/busy/refuse-429", play: once(http.MethodPost, "api", demoPayment),
		},
		{
			name: "complete answer 502 of a gateway", story: "an intermediary without an answer: the payment was made behind it",
			want: facts(outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteGateway), status: 502, effects: 1,
			path: "/v1/gateway/gateway-502", play: once(http.MethodPost, "api", demoPayment),
		},
		{
			name: "connection refused", story: "nobody listens: nothing can have happened, repeat later",
			want: facts(outcome.ConnectionSetup, outcome.NotAttempted, outcome.Backoff, outcome.CodeConnectionRefused), status: 502, effects: 0,
			path: "/v1/refused/create", play: once(http.MethodPost, "refused", demoPayment),
		},
		{
			name: "expired certificate", story: "stopped in the TLS handshake, the secret stayed here",
			want: facts(outcome.ConnectionSetup, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodeTLSCertificateInvalid), status: 422, effects: 0,
			path: "/v1/expired/create", play: once(http.MethodPost, "expired", demoPayment),
		},
		{
			name: "certificate of another host", story: "stopped in the TLS handshake, the secret stayed here",
			want: facts(outcome.ConnectionSetup, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodeTLSCertificateInvalid), status: 422, effects: 0,
			path: "/v1/wrong/create", play: once(http.MethodPost, "wrong", demoPayment),
		},
		{
			name: "no route", story: "default: deny",
			want: facts(outcome.Validation, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodeRouteNotFound), status: 403, effects: 0,
			path: "/v1/noroute/create", play: once(http.MethodDelete, "api", ""),
		},
		{
			name: "route that denies", story: "a rule says no",
			want: facts(outcome.Validation, outcome.NotAttempted, outcome.Never, outcome.CodePolicyDenied), status: 403, effects: 0,
			path: "/admin/denied/create", play: once(http.MethodPost, "api", demoPayment),
		},
		{
			name: "body over the route's limit", story: "refused before a secret was touched",
			want: facts(outcome.Validation, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodePayloadLimit), status: 413, effects: 0,
			path: "/small/large/create", play: once(http.MethodPost, "api", string(bytes.Repeat([]byte("x"), 4096))),
		},
		{
			name: "secret missing", story: "its file does not exist: nothing was sent without it",
			want: facts(outcome.CredentialInjection, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodeCredentialMissing), status: 403, effects: 0,
			path: "/no-secret/missing/create", play: once(http.MethodPost, "api", demoPayment),
		},
		{
			name: "answer cut in the body", story: "10 of 100 bytes: never shown as a result, the payment was made",
			want: facts(outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteResultIncomplete), status: 424, effects: 1,
			path: "/v1/cut/cut", play: playCut,
		},
		{
			name: "chunked answer cut", story: "no final chunk",
			want: facts(outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteResultIncomplete), status: 424, effects: 1,
			path: "/v1/chunk/cut-chunk", play: once(http.MethodPost, "api", demoPayment),
		},
		{
			name: "read cut in the body", story: "a GET may be repeated: the client is told when",
			want: facts(outcome.RemoteExecution, outcome.Unknown, outcome.Backoff, outcome.CodeRemoteResultIncomplete), status: 502, effects: 1,
			path: "/v1/readcut/cut", play: once(http.MethodGet, "api", ""),
		},
		{
			name: "done, then closed without an answer", story: "\"connection reset\" – and the payment was made",
			want: facts(outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteOutcomeUnknown), status: 424, effects: 1,
			path: demoDroppedPath, play: playDropped,
		},
		{
			name: "timeout", story: "silence after the request – and the payment was made",
			want: facts(outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteTimeout), status: 424, effects: 1,
			path: "/impatient/timeout/silent", play: once(http.MethodPost, "api", demoPayment),
		},
		{
			name: "naive client repeats after the cut", story: "two equal POSTs more, neither is sent: the refusals name the first, the payment was made once",
			want: facts(outcome.Validation, outcome.NotAttempted, outcome.Reconcile, outcome.CodeDuplicateSuspected), status: 424, effects: 0,
			path: demoDroppedPath, play: playNaive,
		},
		{
			name: "repeat that names the first", story: "Waybill-Supersedes: somebody decided, visibly, so it is sent",
			want: outcome.Success(), status: 201, effects: 1,
			path: demoDroppedPath, play: playSupersedes,
		},
		{
			name: "caller hangs up, fetches later", story: "the attempt ran on; its answer was kept and fetched twice, sent once",
			want: facts(outcome.ResultDelivery, outcome.Committed, outcome.FetchResult, outcome.CodeDeliveryFailed), status: 0, effects: 1,
			path: "/v1/hangup/wait", play: playHangUp,
		},
		{
			name: "SIGKILL of the proxy in mid-flight", story: "restarted, it says what its records prove: sent, no answer on record",
			want: facts(outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteOutcomeUnknown), status: 0, effects: 1,
			path: demoKillPath, play: playKill,
		},
		{
			name: "naive client repeats after the restart", story: "the new process knows the old one's action",
			want: facts(outcome.Validation, outcome.NotAttempted, outcome.Reconcile, outcome.CodeDuplicateSuspected), status: 424, effects: 0,
			path: demoKillPath, play: playRepeatAfterKill,
		},
	}
}

func playSecret(ctx context.Context, d *demo, path string) (*demoStep, error) {
	a := d.caller.send(ctx, http.MethodPost, "https://api"+demoZone+path, demoPayment)
	s := &demoStep{answer: a, id: a.ID}
	s.check(d.upstreams.sawSecret(path) == 1, "the upstream saw the secret %d times, not once", d.upstreams.sawSecret(path))
	s.check(!d.caller.sawSecret(d.secret), "the agent read the secret")
	return s, nil
}

func playCut(ctx context.Context, d *demo, path string) (*demoStep, error) {
	a := d.caller.send(ctx, http.MethodPost, "https://api"+demoZone+path, demoPayment)
	s := &demoStep{answer: a, id: a.ID}
	ev := a.Envelope.Evidence
	s.check(ev.ReceivedBytes != nil && *ev.ReceivedBytes == 10 && ev.ExpectedBytes != nil && *ev.ExpectedBytes == 100, "the evidence does not say 10 of 100 bytes")
	s.check(!ev.ResponseComplete, "the evidence calls the answer complete")
	// Fetching gives what is known, never ten bytes with status 200 (CONTRACT G3, H10).
	got := d.caller.send(ctx, http.MethodGet, "http://waybill.internal/v1/actions/"+a.ID+"/result", "")
	s.check(got.Status != http.StatusOK && got.Envelope.Error != nil, "fetching the result gave %d", got.Status)
	return s, nil
}

// demoDroppedPath drops the first request after it was done, and answers later ones.
const demoDroppedPath = "/v1/dropped/drop-once"

func playDropped(ctx context.Context, d *demo, path string) (*demoStep, error) {
	d.dropped = d.caller.send(ctx, http.MethodPost, "https://api"+demoZone+path, demoPayment)
	return &demoStep{answer: d.dropped, id: d.dropped.ID}, nil
}

func playNaive(ctx context.Context, d *demo, path string) (*demoStep, error) {
	s := &demoStep{}
	for range 2 {
		s.answer = d.caller.send(ctx, http.MethodPost, "https://api"+demoZone+path, demoPayment)
		s.check(s.answer.Envelope.Evidence.EarlierAction == d.dropped.ID, "the refusal does not name the first action")
	}
	s.check(d.upstreams.applied(path) == 1, "the upstream counted %d effects in all, not 1", d.upstreams.applied(path))
	s.id = s.answer.ID
	return s, nil
}

func playSupersedes(ctx context.Context, d *demo, path string) (*demoStep, error) {
	a := d.caller.send(ctx, http.MethodPost, "https://api"+demoZone+path, demoPayment, "Waybill-Supersedes", d.dropped.ID)
	return &demoStep{answer: a, id: a.ID}, nil
}

// action waits until the journal has an ended action with a request id.
func (d *demo) action(ctx context.Context, requestID string) (dispatch.ActionView, error) {
	for {
		for v, err := range d.proxy.admin.Actions(ctx, dispatch.Filter{RequestID: requestID, Limit: 1}) {
			if err != nil {
				return v, err
			}
			if v.Ended {
				return v, nil
			}
		}
		select {
		case <-ctx.Done():
			return dispatch.ActionView{}, fmt.Errorf("the action %s did not end: %w", requestID, ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// inFlight sends a request in the background and returns when the upstream has
// it. stop makes the caller hang up; the channel gives what the caller saw.
func (d *demo) inFlight(ctx context.Context, path, requestID string) (stop context.CancelFunc, seen <-chan *demoAnswer, err error) {
	sendCtx, cancel := context.WithCancel(ctx)
	answer := make(chan *demoAnswer, 1)
	go func() {
		answer <- d.caller.send(sendCtx, http.MethodPost, "https://api"+demoZone+path, demoPayment, "Waybill-Request-Id", requestID)
	}()
	select {
	case <-d.upstreams.gate(d.upstreams.arrived, path):
		return cancel, answer, nil
	case a := <-answer:
		cancel()
		return nil, nil, fmt.Errorf("the request ended before it reached the upstream: status %d, %s, %w", a.Status, a.Facts.Code, a.Err)
	case <-ctx.Done():
		cancel()
		return nil, nil, ctx.Err()
	}
}

func playHangUp(ctx context.Context, d *demo, path string) (*demoStep, error) {
	const requestID = "demo-hang-up"
	hangUp, seen, err := d.inFlight(ctx, path, requestID)
	if err != nil {
		return nil, err
	}
	hangUp()
	<-seen
	// The upstream answers only now that nobody waits. The connection is closed; that
	// the proxy has seen it is recorded together with the ending, not before.
	select {
	case <-time.After(demoNotice):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	close(d.upstreams.gate(d.upstreams.release, path))
	v, err := d.action(ctx, requestID)
	if err != nil {
		return nil, err
	}
	s := &demoStep{id: v.InvocationID}
	for range 2 {
		got := d.caller.send(ctx, http.MethodGet, "http://waybill.internal/v1/actions/"+s.id+"/result", "")
		s.check(got.Err == nil && got.Status == http.StatusCreated && string(got.Body) == `{"id":"pay_late"}`, "fetching the result gave %d", got.Status)
	}
	return s, nil
}

// demoNotice is how long the proxy gets to notice that a caller's connection closed.
const demoNotice = 500 * time.Millisecond

const demoKillPath, demoKillID = "/v1/killed/wait", "demo-sigkill"

func playKill(ctx context.Context, d *demo, path string) (*demoStep, error) {
	_, seen, err := d.inFlight(ctx, path, demoKillID)
	if err != nil {
		return nil, err
	}
	if err := d.proxy.kill(); err != nil {
		return nil, fmt.Errorf("SIGKILL: %w", err)
	}
	a := <-seen
	if err := d.proxy.start(ctx); err != nil {
		return nil, err
	}
	v, err := d.action(ctx, demoKillID)
	if err != nil {
		return nil, err
	}
	s := &demoStep{id: v.InvocationID}
	s.check(a.Err != nil, "the caller got an answer of a killed process")
	s.check(v.DispatchStarted, "the record does not say that the request was dispatched")
	return s, nil
}

func playRepeatAfterKill(ctx context.Context, d *demo, path string) (*demoStep, error) {
	before, err := d.action(ctx, demoKillID)
	if err != nil {
		return nil, err
	}
	a := d.caller.send(ctx, http.MethodPost, "https://api"+demoZone+path, demoPayment)
	s := &demoStep{answer: a, id: a.ID}
	s.check(a.Envelope.Evidence.EarlierAction == before.InvocationID, "the refusal does not name the action before the kill")
	return s, nil
}

var errDemoNoID = errors.New("the answer names no action")
