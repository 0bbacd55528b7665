package dispatch

import (
	"bytes"
	"context"
	"errors"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"waybill/inject"
	"waybill/internal/contract"
	"waybill/outcome"
	"waybill/routes"
)

var alice = Decision{Verdict: Approved, By: "alice", Via: "admin"}

// submit starts a submission and returns the channel of its reply, once it waits.
func submit(b *bench, ctx context.Context, s *Submission) chan *Reply {
	done := make(chan *Reply, 1)
	go func() { done <- b.Do(ctx, s) }()
	synctest.Wait()
	return done
}

func (b *bench) onlyApproval(t *testing.T) Record {
	t.Helper()
	list, err := b.Approvals(context.Background())
	if err != nil || len(list) != 1 {
		t.Fatalf("%d approvals, %v", len(list), err)
	}
	return list[0]
}

// rebound is the pipeline of a next process over the same journal.
func (b *bench) rebound(t *testing.T, edit func([]routes.Route) []routes.Route, creds ...inject.Credential) *bench {
	t.Helper()
	rs := testRoutes()
	if edit != nil {
		rs = edit(rs)
	}
	snap, err := routes.NewSnapshot(rs, routes.Deny, nil)
	if err != nil {
		t.Fatal(err)
	}
	store := b.Binding().Credentials
	if len(creds) > 0 {
		if store, err = inject.NewStore(creds); err != nil {
			t.Fatal(err)
		}
	}
	next := &bench{j: b.j, tr: b.tr}
	next.Pipeline = New(Config{Journal: b.j, Transport: b.tr, Binding: &Binding{Snapshot: snap, Credentials: store}, Pseudonym: "waybill-test", SpoolDir: t.TempDir()})
	t.Cleanup(next.runners.dismiss)
	return next
}

func TestApprovedWhileTheCallerWaits(t *testing.T) {
	contract.Covers(t, "D3", "D4", "D5", "C1")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		s := post("ask.example.test", "/v1/pay", `{"to":"bob"}`, "Content-Type", "application/json", "X-Session-Token", "mine")
		s.RawQuery, s.HasQuery = "amount=5&token=hush", true
		done := submit(b, t.Context(), s)
		rec := b.onlyApproval(t)
		if b.tr.count() != 0 || rec.Approval.Credential == nil || rec.Approval.Credential.Version != "2026-11" {
			t.Fatalf("%d sent before the approval; %+v", b.tr.count(), rec.Approval)
		}
		v, err := b.Approval(t.Context(), rec.ID)
		if err != nil || v.Request == nil {
			t.Fatal(v, err)
		}
		if want := "POST https://ask.example.test/v1/pay?amount=5&token=[masked]"; v.Request.Line != want || v.Request.Body.Text != `{"to":"bob"}` {
			t.Errorf("shown %q, body %+v", v.Request.Line, v.Request.Body)
		}
		for _, f := range v.Request.Fields {
			switch {
			case f.Name == "Authorization" && (!f.Injected || !strings.Contains(f.Value, "Bearer ${secret} (credential pay), version 2026-11")):
				t.Errorf("%+v", f)
			case f.Name == "X-Session-Token" && (!f.Masked || strings.Contains(f.Value, "mine")):
				t.Errorf("%+v", f)
			}
		}
		time.Sleep(30 * time.Second)
		if _, err := b.Decide(t.Context(), rec.ID, rec.Approval.Fingerprint, alice); err != nil {
			t.Fatal(err)
		}
		reply := <-done
		if reply.Status != 200 || readBody(t, reply) != "ok" {
			t.Fatalf("%d", reply.Status)
		}
		reply.HandedOver(nil)
		if b.tr.count() != 1 || b.tr.sent[0].Header.Get("Authorization") != "Bearer "+testSecret || b.tr.bodies[0] != `{"to":"bob"}` {
			t.Errorf("%d sent", b.tr.count())
		}
		got := b.j.last()
		if got.ApprovalWord() != "spent" || got.Approval.Decision.By != "alice" || len(b.j.held) != 0 {
			t.Errorf("%s, %+v, %d held", got.ApprovalWord(), got.Approval.Decision, len(b.j.held))
		}
		// Once.
		if _, err := b.Decide(t.Context(), rec.ID, "", alice); !errors.Is(err, ErrApprovalClosed) {
			t.Errorf("a second approval: %v", err)
		}
		synctest.Wait()
		if b.tr.count() != 1 {
			t.Error("sent twice")
		}
	})
}

func TestApprovalPendingThenDetached(t *testing.T) {
	contract.Covers(t, "D4", "C1", "H3")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		big := strings.Repeat("x", 3*MaxChunkBytes+17)
		began := time.Now()
		s := post("ask.example.test", "/v1/pay", big)
		reply := b.Do(t.Context(), s)
		if waited := time.Since(began); waited != time.Minute {
			t.Errorf("held for %s", waited)
		}
		if f := reply.Envelope.Facts(); f.Code != outcome.CodeApprovalPending || f.Retry != outcome.FetchResult || f.Outcome != outcome.NotAttempted || reply.Status != http.StatusForbidden {
			t.Fatalf("%+v, %d", f, reply.Status)
		}
		if a := reply.Envelope.Evidence.Approval; a == nil || a.State != "pending" {
			t.Errorf("%+v", a)
		}
		time.Sleep(20 * time.Minute)
		b.tr.play = answerWith(200, strings.Repeat("y", 5*MaxChunkBytes), "Content-Type", "text/event-stream")
		if _, err := b.Decide(t.Context(), reply.ID, "", alice); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		rec, err := b.j.Action(t.Context(), reply.ID)
		if err != nil || b.tr.count() != 1 || b.tr.bodies[0] != big {
			t.Fatalf("%d sent, %v", b.tr.count(), err)
		}
		if rec.Facts != outcome.Success() || rec.Result == nil || rec.Failed {
			t.Errorf("%+v", rec.Facts)
		}
		if _, body, err := b.j.OpenResult(t.Context(), reply.ID); err != nil {
			t.Error(err)
		} else {
			_ = body.Close()
		}
		if len(b.j.held) != 0 {
			t.Error("the held request was kept")
		}
	})
}

func TestDeniedAndExpired(t *testing.T) {
	contract.Covers(t, "D4", "C1")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		done := submit(b, t.Context(), post("ask.example.test", "/v1/pay", "a"))
		rec := b.onlyApproval(t)
		if _, err := b.Decide(t.Context(), rec.ID, "", Decision{Verdict: Denied, By: "bob", Via: "admin", Reason: "ask finance first"}); err != nil {
			t.Fatal(err)
		}
		reply := <-done
		if f := reply.Envelope.Facts(); f.Code != outcome.CodeApprovalDenied || f.Retry != outcome.Never || f.Outcome != outcome.NotAttempted {
			t.Errorf("%+v", f)
		}
		if !strings.Contains(reply.Envelope.Message, "ask finance first") || strings.Contains(reply.Envelope.Message, "bob") {
			t.Errorf("%q", reply.Envelope.Message)
		}
		// Nobody decides.
		reply = b.Do(t.Context(), post("ask.example.test", "/v1/pay", "b"))
		if reply.Envelope.Facts().Code != outcome.CodeApprovalPending {
			t.Fatalf("%+v", reply.Envelope.Facts())
		}
		time.Sleep(time.Hour)
		synctest.Wait()
		got, err := b.j.Action(t.Context(), reply.ID)
		if err != nil || got.Facts.Code != outcome.CodeApprovalExpired || !got.Ended || got.Facts.Retry != outcome.AfterCorrection {
			t.Errorf("%+v, %v", got.Facts, err)
		}
		if after, err := b.Decide(t.Context(), reply.ID, "", alice); !errors.Is(err, ErrApprovalClosed) || after.ApprovalWord() != "expired" {
			t.Errorf("an approval after its expiry: %v", err)
		}
		synctest.Wait()
		if b.tr.count() != 0 || len(b.j.held) != 0 {
			t.Errorf("%d sent, %d held", b.tr.count(), len(b.j.held))
		}
	})
}

// An approval that expired while no process was there to record it is not granted.
func TestApprovalAfterExpiry(t *testing.T) {
	contract.Covers(t, "D4")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		clock := &fixedClock{at: time.Now()}
		b.cfg.Clock = clock
		reply := b.Do(t.Context(), post("ask.example.test", "/v1/pay", "a"))
		clock.at = clock.at.Add(time.Hour + time.Second)
		if rec, err := b.Decide(t.Context(), reply.ID, "", alice); !errors.Is(err, ErrApprovalClosed) || rec.ApprovalWord() != "expired" {
			t.Errorf("%v %s", err, rec.ApprovalWord())
		}
		synctest.Wait()
		if b.tr.count() != 0 {
			t.Error("sent after expiry")
		}
	})
}

func TestTwoApproversRace(t *testing.T) {
	contract.Covers(t, "D3", "D4")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		for range 20 {
			b.tr.mu.Lock()
			b.tr.sent = nil
			b.tr.mu.Unlock()
			reply := b.Do(t.Context(), post("ask.example.test", "/v1/pay", "a", "X-N", time.Now().String()))
			var wg sync.WaitGroup
			var mu sync.Mutex
			won := []string{}
			for _, d := range []Decision{alice, {Verdict: Approved, By: "bob", Via: "webhook"}, {Verdict: Denied, By: "carol", Via: "admin"}} {
				wg.Go(func() {
					if _, err := b.Decide(t.Context(), reply.ID, "", d); err == nil {
						mu.Lock()
						won = append(won, d.By)
						mu.Unlock()
					} else if !errors.Is(err, ErrApprovalClosed) {
						t.Error(err)
					}
				})
			}
			wg.Wait()
			synctest.Wait()
			rec, _ := b.j.Action(t.Context(), reply.ID)
			if len(won) != 1 || rec.Approval.Decision.By != won[0] {
				t.Fatalf("%v won, on record %+v", won, rec.Approval.Decision)
			}
			if want := map[bool]int{true: 1}[won[0] != "carol"]; b.tr.count() != want {
				t.Fatalf("%s won and %d were sent", won[0], b.tr.count())
			}
		}
	})
}

// What was approved must be what is sent: a change of anything it was bound to makes
// the approval unusable, whoever waits.
func TestApprovalIsOfOneRequest(t *testing.T) {
	contract.Covers(t, "D3", "D5", "D2")
	yes := func(rs []routes.Route) []routes.Route {
		rs[0].Limits.Tries = 2 // any change of the configuration is another snapshot
		return rs
	}
	for name, change := range map[string]func(t *testing.T, b *bench) *bench{
		"snapshot": func(t *testing.T, b *bench) *bench { return b.rebound(t, yes) },
		"credential version": func(t *testing.T, b *bench) *bench {
			return b.rebound(t, nil, inject.Credential{ID: "pay", Label: "2026-12", Source: inject.EnvSource("WAYBILL_TEST_SECRET")})
		},
		"body": func(_ *testing.T, b *bench) *bench {
			for _, chunks := range b.j.held {
				last := chunks[len(chunks)-1]
				last[len(last)-1] ^= 1
			}
			return b
		},
		"host": func(_ *testing.T, b *bench) *bench {
			for _, chunks := range b.j.held {
				chunks[0] = bytes.ReplaceAll(chunks[0], []byte(`"authority":"ask.`), []byte(`"authority":"evl.`))
			}
			return b
		},
		"field": func(_ *testing.T, b *bench) *bench {
			for _, chunks := range b.j.held {
				chunks[0] = bytes.ReplaceAll(chunks[0], []byte(`"X-Amount":["NQ=="]`), []byte(`"X-Amount":["OQ=="]`))
			}
			return b
		},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				reply := b.Do(t.Context(), post("ask.example.test", "/v1/pay", "amount", "X-Amount", "5"))
				if reply.Envelope.Facts().Code != outcome.CodeApprovalPending {
					t.Fatalf("%+v", reply.Envelope.Facts())
				}
				next := change(t, b)
				_, err := next.Decide(t.Context(), reply.ID, "", alice)
				if err != nil && !errors.Is(err, ErrApprovalUnusable) {
					t.Fatal(err)
				}
				synctest.Wait()
				rec, _ := b.j.Action(t.Context(), reply.ID)
				if b.tr.count() != 0 || rec.Facts.Code != outcome.CodeSnapshotMismatch || rec.Facts.Outcome != outcome.NotAttempted || !rec.Ended {
					t.Errorf("%d sent; %+v", b.tr.count(), rec.Facts)
				}
			})
		})
	}
	t.Run("other fingerprint", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			reply := b.Do(t.Context(), post("ask.example.test", "/v1/pay", "amount"))
			if _, err := b.Decide(t.Context(), reply.ID, "sha256:"+strings.Repeat("0", 64), alice); !errors.Is(err, ErrApprovalOther) {
				t.Error(err)
			}
		})
	})
	t.Run("rotated while the caller waits", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			src := &rotating{label: "1"}
			store, err := inject.NewStore([]inject.Credential{{ID: "pay", Source: src}, {ID: "gone", Source: src}})
			if err != nil {
				t.Fatal(err)
			}
			b.Swap(&Binding{Snapshot: b.Binding().Snapshot, Credentials: store})
			done := submit(b, t.Context(), post("ask.example.test", "/v1/pay", "a"))
			rec := b.onlyApproval(t)
			src.turn("2")
			if _, err := b.Decide(t.Context(), rec.ID, "", alice); err != nil {
				t.Fatal(err)
			}
			if f := (<-done).Envelope.Facts(); f.Code != outcome.CodeSnapshotMismatch || b.tr.count() != 0 {
				t.Errorf("%+v, %d sent", f, b.tr.count())
			}
		})
	})
}

// rotating is a credential that rotates.
type rotating struct {
	mu    sync.Mutex
	label string
}

func (s *rotating) turn(label string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.label = label
}

func (s *rotating) Kind() string { return "test" }
func (s *rotating) Fetch(ctx context.Context) (inject.Secret, error) {
	v, _, err := s.FetchVersion(ctx)
	return v, err
}

func (s *rotating) FetchVersion(context.Context) (inject.Secret, string, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	v, err := inject.ParseSecret([]byte("turning-secret-" + s.label))
	return v, "v" + s.label, err
}

// A restart keeps what waits, sends once what was approved, and nothing again.
func TestApprovalAcrossRestart(t *testing.T) {
	contract.Covers(t, "D4", "M4", "M2")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		waiting := b.Do(t.Context(), post("ask.example.test", "/v1/pay", "a"))
		decided := b.Do(t.Context(), post("ask.example.test", "/v1/pay", "b"))
		late := b.Do(t.Context(), post("ask.example.test", "/v1/pay", "c"))
		for _, id := range []ActionID{waiting.ID, decided.ID} {
			rec, _ := b.j.Action(t.Context(), id)
			if _, open := Interrupt(&rec, time.Now()); open {
				t.Error("a start would end what waits for an approval")
			}
		}
		// Approved on record, and the process ended before anything was sent.
		for _, id := range []ActionID{decided.ID, late.ID} {
			if _, err := b.j.Append(t.Context(), Batch{Action: id, Events: []Event{{Type: ApprovalDecided, At: time.Now(), Decision: &alice}}}); err != nil {
				t.Fatal(err)
			}
		}
		lateRec := b.j.records[late.ID]
		state := *lateRec.Approval
		state.ExpiresAt = time.Now().Add(-time.Second)
		lateRec.Approval = &state
		b.j.records[late.ID] = lateRec
		next := b.rebound(t, nil)
		pending, approved, err := next.ResumeApprovals(t.Context())
		if pending != 1 || approved != 2 || err != nil {
			t.Fatal(pending, approved, err)
		}
		synctest.Wait()
		if b.tr.count() != 1 || b.tr.bodies[0] != "b" {
			t.Fatalf("%d sent", b.tr.count())
		}
		if rec, _ := b.j.Action(t.Context(), late.ID); rec.Facts.Code != outcome.CodeApprovalExpired {
			t.Errorf("approved, and sent too late: %+v", rec.Facts)
		}
		// Sent, and the process ended: never again.
		third := b.rebound(t, nil)
		third.dispatchApproved(decided.ID)
		if _, approved, _ := third.ResumeApprovals(t.Context()); approved != 0 || b.tr.count() != 1 {
			t.Errorf("%d approved, %d sent", approved, b.tr.count())
		}
		if _, err := third.Decide(t.Context(), waiting.ID, "", alice); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if b.tr.count() != 2 || b.tr.bodies[1] != "a" {
			t.Errorf("%d sent", b.tr.count())
		}
	})
}

// What the caller said of a repeat counts when its request is sent, too: the action that it
// supersedes – or the guard would refuse what a person approved – and the precondition by
// which the route may repeat it.
func TestApprovedRepeat(t *testing.T) {
	contract.Covers(t, "O3", "D3", "D4", "I7")
	for name, c := range map[string]struct {
		named bool // the earlier action
		match bool // If-Match, by which the route may repeat
		next  bool // another process sends it
		sent  bool
	}{
		"named":                        {named: true, sent: true},
		"named, after a restart":       {named: true, next: true, sent: true},
		"conditional":                  {match: true, sent: true},
		"conditional, after a restart": {match: true, next: true, sent: true},
		"neither":                      {},
		"neither, after a restart":     {next: true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				conditional := func(rs []routes.Route) []routes.Route {
					for i := range rs {
						rs[i].Contract.Conditional = rs[i].Contract.Conditional || rs[i].Name == "ask"
					}
					return rs
				}
				b := newBench(t).rebound(t, conditional)
				ask := func(supersedes string) *Reply {
					s := post("ask.example.test", "/v1/pay", "amount")
					if c.match {
						s.Header.Set("If-Match", `"v1"`)
					}
					s.Supersedes = supersedes
					r := b.Do(t.Context(), s)
					if f := r.Envelope.Facts(); f.Code != outcome.CodeApprovalPending {
						t.Fatalf("%+v", f)
					}
					return r
				}
				approve := func(b *bench, id ActionID) Record {
					if _, err := b.Decide(t.Context(), id, "", alice); err != nil {
						t.Fatal(err)
					}
					synctest.Wait()
					rec, err := b.j.Action(t.Context(), id)
					if err != nil {
						t.Fatal(err)
					}
					return rec
				}
				b.tr.play = script(lost, answerWith(200, "made"))
				first, second := ask(""), (*Reply)(nil)
				if !c.named {
					second = ask("") // while the first one waits, and is no duplicate yet
				}
				advice := outcome.Reconcile
				if c.match {
					advice = outcome.Backoff
				}
				if rec := approve(b, first.ID); rec.Facts.Outcome != outcome.Unknown || rec.Facts.Retry != advice || b.tr.count() != 1 {
					t.Fatalf("%+v, %d sent", rec.Facts, b.tr.count())
				}
				if c.named {
					second = ask(first.ID.String())
				}
				next := b
				if c.next {
					next = b.rebound(t, conditional)
				}
				rec := approve(next, second.ID)
				want := outcome.CodeDuplicateSuspected
				if c.sent {
					want = outcome.CodeNone
				}
				if rec.Facts.Code != want || (b.tr.count() == 2) != c.sent || !rec.Ended {
					t.Errorf("%+v, %d sent", rec.Facts, b.tr.count())
				}
			})
		})
	}
}

// The commit that makes a dispatch durable is the last guard, whatever path leads to it.
func TestNothingIsDispatchedUnapproved(t *testing.T) {
	contract.Covers(t, "D3")
	print := "sha256:approved"
	cred := &Credential{ID: "pay", Version: "1", Mode: "header"}
	base := []Event{
		{Type: ActionAccepted, Accepted: &Accepted{Caller: "local"}},
		{Type: PreflightValidated, Bound: &Bound{Route: "ask", Approval: true}},
	}
	asked := Event{Type: ApprovalRequested, Approval: &Approval{Fingerprint: print, ExpiresAt: time.Unix(1, 0), Credential: cred, Held: Held{Chunks: 1, Bytes: 1}}}
	yes := Event{Type: ApprovalDecided, Decision: &Decision{Verdict: Approved, By: "a", Via: "admin"}}
	no := Event{Type: ApprovalDecided, Decision: &Decision{Verdict: Denied, By: "a", Via: "admin"}}
	used := Event{Type: CredentialAuthorized, Credential: cred}
	other := Event{Type: CredentialAuthorized, Credential: &Credential{ID: "pay", Version: "2", Mode: "header"}}
	send := func(n int, print string) Event {
		return Event{Type: DispatchStarted, Attempt: n, Dispatch: &Dispatch{Unresolved: outcome.Reconcile, Approved: print}}
	}
	unknown := Event{Type: AttemptResolved, Attempt: 1, Ended: &Ended{Facts: unresolvedFacts(outcome.Reconcile)}}
	for name, c := range map[string]struct {
		events []Event
		ok     bool
	}{
		"approved":                        {[]Event{asked, yes, used, send(1, print)}, true},
		"nobody asked":                    {[]Event{used, send(1, print)}, false},
		"undecided":                       {[]Event{asked, used, send(1, print)}, false},
		"denied":                          {[]Event{asked, no, used, send(1, print)}, false},
		"another request":                 {[]Event{asked, yes, used, send(1, "sha256:other")}, false},
		"another credential":              {[]Event{asked, yes, other, send(1, print)}, false},
		"no credential":                   {[]Event{asked, yes, send(1, print)}, false},
		"twice, the first one unresolved": {[]Event{asked, yes, used, send(1, print), unknown, send(2, print)}, false},
		"decided twice":                   {[]Event{asked, no, yes}, false},
		"asked twice":                     {[]Event{asked, asked}, false},
	} {
		t.Run(name, func(t *testing.T) {
			var rec Record
			var err error
			all := append(append([]Event{}, base...), c.events...)
			for i := range all {
				all[i].At = time.Unix(int64(i), 0)
				if rec, err = Apply(rec, &all[i], uint64(i+1)); err != nil {
					if i != len(all)-1 {
						t.Fatalf("event %d: %v", i, err)
					}
					break
				}
			}
			if (err == nil) != c.ok {
				t.Errorf("%v", err)
			}
			if err == nil && (rec.Approval.Spent != 1 || rec.HeldChunks() != 0) {
				t.Errorf("%+v", rec.Approval)
			}
		})
	}
}

func TestApprovalRules(t *testing.T) {
	contract.Covers(t, "D3")
	for _, c := range []struct {
		method, path, body string
		asks               bool
	}{
		{"POST", "/v1/pay/x", "ab", true}, {"POST", "/v1/pay/x", "a", false}, {"POST", "/v1/other", "ab", false}, {"PUT", "/v1/pay/x", "ab", false},
		// What a lenient server could take for the same is asked about, too.
		{"POST", "/v1/%70ay/x", "ab", true}, {"POST", "/v1//pay/x", "ab", true}, {"POST", "/v1/pay;a=b/x", "ab", true}, {"post", "/v1/pay/x", "ab", true},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			s := post("bare.example.test", c.path, c.body)
			s.Method = c.method
			reply := b.Do(t.Context(), s)
			if asked := b.j.last().Approval != nil; asked != c.asks || (b.tr.count() == 0) != c.asks {
				t.Errorf("%s %s %q: asked %t, %d sent, %d", c.method, c.path, c.body, asked, b.tr.count(), reply.Status)
			}
		})
	}
}

// A caller that leaves while it waits stops the action (F10); one that set its own time
// is told where it stands; a drain tells everybody.
func TestWaitingForApprovalEnds(t *testing.T) {
	contract.Covers(t, "F10", "D4")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		ctx, leave := context.WithCancel(t.Context())
		done := submit(b, ctx, post("ask.example.test", "/v1/pay", "a"))
		rec := b.onlyApproval(t)
		leave()
		if reply := <-done; !reply.Gone || reply.Record.Facts.Code != outcome.CodeCallerCancelled {
			t.Errorf("%+v", reply.Record.Facts)
		}
		if _, err := b.Decide(t.Context(), rec.ID, "", alice); !errors.Is(err, ErrApprovalClosed) {
			t.Errorf("approved although its caller stopped it: %v", err)
		}
		began := time.Now()
		s := post("ask.example.test", "/v1/pay", "b")
		s.Wait = 5 * time.Second
		if f := b.Do(t.Context(), s).Envelope.Facts(); f.Code != outcome.CodeApprovalPending || time.Since(began) != 5*time.Second {
			t.Errorf("%+v after %s", f, time.Since(began))
		}
		done = submit(b, t.Context(), post("ask.example.test", "/v1/pay", "c"))
		if err := b.Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		if f := (<-done).Envelope.Facts(); f.Code != outcome.CodeApprovalPending || b.tr.count() != 0 {
			t.Errorf("%+v, %d sent", f, b.tr.count())
		}
	})
}

// Whatever a caller who waits for an approval runs into: once the request may be sent by
// somebody else it is not told that nothing was or will be sent.
func TestHeldRequestIsNeverToldAsOver(t *testing.T) {
	contract.Covers(t, "F2", "D4", "M6")
	told := func(t *testing.T, r *Reply) outcome.Facts {
		t.Helper()
		if r.Envelope == nil || r.Envelope.Error == nil || r.Status == 202 {
			t.Fatalf("answered %d, %+v", r.Status, r.Envelope)
		}
		return r.Envelope.Facts()
	}
	// once is a hook that runs what it is given one time, away from the pipeline's own calls.
	once := func(f func()) func() {
		var ran atomic.Bool
		return func() {
			if !ran.Swap(true) {
				f()
			}
		}
	}
	decide := func(b *bench, id ActionID) func() {
		return once(func() {
			if _, err := b.Decide(context.Background(), id, "", alice); err != nil {
				panic(err)
			}
			time.Sleep(time.Second) // it is sent
		})
	}
	t.Run("the caller leaves as it is approved", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			ctx, leave := context.WithCancel(t.Context())
			done := submit(b, ctx, post("ask.example.test", "/v1/pay", "a"))
			approve := decide(b, b.onlyApproval(t).ID)
			b.j.before = func(batch Batch) error {
				if batch.Events[len(batch.Events)-1].Type == ActionRefused {
					approve()
				}
				return nil
			}
			leave()
			r := <-done
			if b.tr.count() != 1 || facts(r).Outcome == outcome.NotAttempted || r.Envelope != nil && r.Envelope.Error != nil && r.Envelope.Error.Outcome == outcome.NotAttempted {
				t.Errorf("%d sent, told %+v", b.tr.count(), facts(r))
			}
		})
	})
	t.Run("the wait ends as it is approved", func(t *testing.T) {
		for _, play := range []func(context.Context, *Outgoing, Sink) Ending{answerWith(201, "made"), lost, nil} {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				if b.tr.play = play; play == nil {
					b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
						time.Sleep(10 * time.Second)
						return answerWith(201, "made")(ctx, out, sink)
					}
				}
				var armed atomic.Pointer[func()]
				b.j.reading = func(ActionID) {
					if approve := armed.Swap(nil); approve != nil {
						(*approve)()
					}
				}
				done := submit(b, t.Context(), post("ask.example.test", "/v1/pay", "a"))
				approve := decide(b, b.onlyApproval(t).ID)
				armed.Store(&approve)
				r := <-done
				if b.tr.count() != 1 || facts(r).Outcome == outcome.NotAttempted || r.Status == 202 || r.Envelope != nil && r.Envelope.Facts().Outcome == outcome.NotAttempted {
					t.Errorf("%d sent, told %d %+v", b.tr.count(), r.Status, facts(r))
				}
				time.Sleep(time.Minute)
			})
		}
	})
	for _, failing := range []EventType{DispatchStarted, ActionRefused} {
		t.Run("approved, and "+failing.String()+" is not written", func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				b := newBench(t)
				if failing == ActionRefused {
					b.tr.connect = func(int) error { return &SetupError{Code: outcome.CodeConnectionRefused, Reason: "connection_refused"} }
				}
				done := submit(b, t.Context(), post("ask.example.test", "/v1/pay", "a"))
				rec := b.onlyApproval(t)
				b.j.before = func(batch Batch) error {
					if batch.Events[len(batch.Events)-1].Type == failing {
						return ErrNotWritten
					}
					return nil
				}
				if _, err := b.Decide(t.Context(), rec.ID, "", alice); err != nil {
					t.Fatal(err)
				}
				if f := told(t, <-done); f.Code != outcome.CodeApprovalPending || f.Retry != outcome.FetchResult {
					t.Errorf("the next start sends it, and the caller is told %+v", f)
				}
				b.j.before, b.tr.connect = nil, nil
				next := b.rebound(t, nil)
				if _, approved, err := next.ResumeApprovals(t.Context()); approved != 1 || err != nil {
					t.Fatal(approved, err)
				}
				synctest.Wait()
				if b.tr.count() != 1 {
					t.Errorf("%d sent", b.tr.count())
				}
			})
		})
	}
	t.Run("decided, and the journal cannot be read", func(t *testing.T) {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			done := submit(b, t.Context(), post("ask.example.test", "/v1/pay", "a"))
			unreadable := func(err error) {
				b.j.mu.Lock()
				b.j.unreadable = err
				b.j.mu.Unlock()
			}
			unreadable(ErrNotWritten)
			if f := told(t, <-done); f.Outcome != outcome.Unknown || f.Retry != outcome.Reconcile {
				t.Errorf("%+v", f)
			}
			unreadable(nil)
		})
	})
}

func TestDecisionsAreNamed(t *testing.T) {
	contract.Covers(t, "D4")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		reply := b.Do(t.Context(), post("ask.example.test", "/v1/pay", "a"))
		for _, d := range []Decision{{Verdict: Approved, Via: "admin"}, {Verdict: "maybe", By: "a", Via: "admin"}, {Verdict: Expired, By: "a", Via: "admin"},
			{Verdict: Approved, By: "a\x1b[2J", Via: "admin"}, {Verdict: Denied, By: "a", Via: "admin", Reason: strings.Repeat("x", 501)}} {
			if _, err := b.Decide(t.Context(), reply.ID, "", d); !errors.Is(err, ErrBadDecision) {
				t.Errorf("%+v: %v", d, err)
			}
		}
		if _, err := b.Decide(t.Context(), ActionID{1}, "", alice); !errors.Is(err, ErrActionNotFound) {
			t.Error(err)
		}
		plain := b.Do(t.Context(), post("search.example.test", "/", "a"))
		if _, err := b.Decide(t.Context(), plain.ID, "", alice); !errors.Is(err, ErrNoApproval) {
			t.Error(err)
		}
	})
}
