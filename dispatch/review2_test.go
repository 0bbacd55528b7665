package dispatch

import (
	"context"
	"crypto/ed25519"
	"crypto/rand"
	"encoding/pem"
	"net/http"
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
	contract.Covers(t, "D3", "D4", "H3")
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
		s := &Submission{Caller: Caller{ID: "local"}, Method: MethodExec, Scheme: "ssh", Protocol: ProtocolSSH, Authorities: Authorities{Connect: "box.example.test:22"},
			Header: http.Header{}, Exec: &ExecRequest{User: "deploy", Command: "restart app", Strict: true}}
		reply := b.Do(t.Context(), s)
		if f := reply.Envelope.Facts(); f.Code != outcome.CodeApprovalPending {
			t.Fatalf("%+v", f)
		}
		if _, err := b.Decide(t.Context(), reply.ID, "", alice); err != nil {
			t.Fatal(err)
		}
		synctest.Wait()
		rec, err := b.j.Action(t.Context(), reply.ID)
		if err != nil || b.tr.count() != 1 || rec.Facts != outcome.Success() || rec.Result == nil || rec.Result.Exec == nil {
			t.Errorf("%d sent, %+v, %v", b.tr.count(), rec.Facts, err)
		}
	})
}
