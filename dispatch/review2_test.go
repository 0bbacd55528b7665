package dispatch

import (
	"bytes"
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"errors"
	"log/slog"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/crypto/ssh"

	"waybill/inject"
	"waybill/internal/contract"
	"waybill/outcome"
	"waybill/routes"
)

// keySource holds a private key, fresh for each test.
type keySource struct{ text []byte }

func (s keySource) Kind() string { return "test" }
func (s keySource) Fetch(context.Context) (inject.Secret, error) {
	return inject.ParseMaterial(s.text)
}
func (s keySource) FetchRaw(context.Context) (inject.Material, error) {
	return inject.Material{Raw: append([]byte(nil), s.text...), Version: "v1"}, nil
}

// TestApprovedCommandDetached: a command whose caller was told APPROVAL_PENDING runs once
// when it is approved, and its end is on record; the proxy goes on (D3, D4).
func TestApprovedCommandDetached(t *testing.T) {
	contract.Covers(t, "D3", "D4", "H3", "O3")
	synctest.Test(t, func(t *testing.T) {
		_, key, err := ed25519.GenerateKey(rand.Reader)
		if err != nil {
			t.Fatal(err)
		}
		block, err := ssh.MarshalPrivateKey(key, "")
		if err != nil {
			t.Fatal(err)
		}
		b := newBench(t)
		rs := append(testRoutes(), routes.Route{Name: "box", Match: routes.Match{Hosts: []string{"box.example.test"}}, Approval: routes.Approval{Required: true, Hold: time.Minute, Expiry: time.Hour},
			SSH: &routes.SSH{Users: []string{"deploy"}, Commands: []routes.Command{{Exact: "restart app"}}, Key: "key", Pins: []string{"SHA256:47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU"}}})
		snap, err := routes.NewSnapshot(rs, routes.Deny, nil)
		if err != nil {
			t.Fatal(err)
		}
		store, err := inject.NewStore([]inject.Credential{
			{ID: "key", Source: keySource{pem.EncodeToMemory(block)}, Multiline: true},
			{ID: "pay", Source: inject.EnvSource("WAYBILL_TEST_SECRET")}, {ID: "gone", Source: inject.EnvSource("WAYBILL_TEST_SECRET_THAT_IS_NOT_SET")},
		})
		if err != nil {
			t.Fatal(err)
		}
		status := 0
		b.tr.play = func(_ context.Context, out *Outgoing, sink Sink) Ending {
			x, ok := sink.(ExecSink)
			if !ok || out.Exec == nil {
				t.Error("no command")
				return Ending{Code: outcome.CodeInternal}
			}
			if err := x.Accepted(); err != nil {
				t.Error(err)
			}
			if err := x.Output(Stdout, []byte("restarted\n")); err != nil {
				t.Error(err)
			}
			return Ending{Sent: Sent{Headers: true, Complete: true}, Complete: true, Framing: "channel_close", Exec: &ExecEnd{Accepted: true, ExitStatus: &status, OutputEnded: true, Closed: true, StdoutBytes: 10}}
		}
		b.Pipeline = New(Config{Journal: b.j, Transport: b.tr, SSH: b.tr, Binding: &Binding{Snapshot: snap, Credentials: store}, Pseudonym: "waybill-test", SpoolDir: t.TempDir()})
		approved := func(supersedes string) Record {
			s := &Submission{Caller: Caller{ID: "local"}, Method: MethodExec, Scheme: "ssh", Protocol: ProtocolSSH, Authorities: Authorities{Connect: "box.example.test:22"},
				Header: http.Header{}, Supersedes: supersedes, Exec: &ExecRequest{User: "deploy", Command: "restart app", Strict: true}}
			reply := b.Do(t.Context(), s)
			if f := reply.Envelope.Facts(); f.Code != outcome.CodeApprovalPending {
				t.Fatalf("%+v", f)
			}
			if _, err := b.Decide(t.Context(), reply.ID, "", alice); err != nil {
				t.Fatal(err)
			}
			synctest.Wait()
			rec, err := b.j.Action(t.Context(), reply.ID)
			if err != nil {
				t.Fatal(err)
			}
			return rec
		}
		if rec := approved(""); b.tr.count() != 1 || rec.Facts != outcome.Success() || rec.Result == nil || rec.Result.Exec == nil {
			t.Errorf("%d sent, %+v", b.tr.count(), rec.Facts)
		}
		// One that is repeated in spite of its outcome is named when it is sent, too (O3).
		runs := b.tr.play
		b.tr.play = lost
		first := approved("")
		if first.Facts.Outcome != outcome.Unknown {
			t.Fatalf("%+v", first.Facts)
		}
		b.tr.play = runs
		if rec := approved(first.ID.String()); b.tr.count() != 3 || rec.Facts != outcome.Success() {
			t.Errorf("%d sent, %+v", b.tr.count(), rec.Facts)
		}
	})
}

// panicOn panics when it is to log a certain message.
type panicOn struct {
	slog.Handler
	message string
}

func (h panicOn) Handle(ctx context.Context, r slog.Record) error {
	if r.Message == h.message {
		panic("the value quotes " + testSecret)
	}
	return h.Handler.Handle(ctx, r)
}

// A panic in work of its own goroutine ends that work, not the process; its value is shown
// to nobody, and the action stays what its records say.
func TestPanicInTheBackground(t *testing.T) {
	contract.Covers(t, "C2", "M2", "D3")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		var log bytes.Buffer
		lines := slog.NewTextHandler(&log, &slog.HandlerOptions{Level: slog.LevelDebug})
		b.cfg.Logger = slog.New(lines)
		told := 0
		b.cfg.OnApproval = func(ApprovalView) {
			told++
			panic("the value quotes " + testSecret)
		}
		broken := false
		b.j.reading = func(ActionID) {
			if broken {
				panic("the value quotes " + testSecret)
			}
		}
		b.j.taken = func(batch Batch) {
			broken = broken || slices.ContainsFunc(batch.Events, func(ev Event) bool { return ev.Type == ApprovalDecided })
		}
		reply := b.Do(t.Context(), post("ask.example.test", "/v1/pay", "amount=5"))
		if reply.Envelope.Facts().Code != outcome.CodeApprovalPending || told != 1 {
			t.Fatalf("%+v, told %d times", reply.Envelope.Facts(), told)
		}
		if _, err := b.Decide(t.Context(), reply.ID, "", alice); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		if _, err := b.Reconcile(t.Context(), reply.ID); !errors.Is(err, errQueryBroken) {
			t.Errorf("a query that panicked: %v", err)
		}
		b.followOne(t.Context(), reply.ID)
		broken, b.j.taken = false, nil
		rec, err := b.j.Action(t.Context(), reply.ID)
		if err != nil || b.tr.count() != 0 || !rec.AwaitsApproval() || rec.Approval.Decision == nil {
			t.Fatalf("%d sent; %+v, %v", b.tr.count(), rec.Facts, err)
		}
		// The next start sends it, once.
		if _, approved, err := b.ResumeApprovals(t.Context()); err != nil || approved != 1 {
			t.Fatalf("%d, %v", approved, err)
		}
		synctest.Wait()
		if b.tr.count() != 1 {
			t.Errorf("%d sent", b.tr.count())
		}

		// Behind an attempt whose caller has left.
		b.cfg.Logger = slog.New(panicOn{lines, "nobody waits for the answer"})
		release := make(chan struct{})
		b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
			<-release
			return answerWith(200, "done")(ctx, out, sink)
		}
		ctx, cancel := context.WithCancel(t.Context())
		got := make(chan *Reply)
		go func() { got <- b.Do(ctx, post("pay.example.test", "/v1/left", "amount=6")) }()
		synctest.Wait()
		cancel()
		left := <-got
		close(release)
		synctest.Wait()
		if rec, err := b.j.Action(t.Context(), left.ID); err != nil || rec.Facts != outcome.Success() {
			t.Errorf("%+v, %v", rec.Facts, err)
		}
		if n := strings.Count(log.String(), "panic in the background"); n < 5 || strings.Contains(log.String(), testSecret) || strings.Contains(log.String(), "the value quotes") {
			t.Errorf("%d lines about panics:\n%s", n, log.String())
		}
	})
}
