package dispatch

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/metrics"
	"waybill/outcome"
	"waybill/routes"
)

// TestConnectDecision: what names a route is intercepted, also to be refused inside;
// only "default: tunnel" lets anything else pass blindly (V1, V7).
func TestConnectDecision(t *testing.T) {
	contract.Covers(t, "V1", "V7")
	for _, c := range []struct {
		def       routes.Default
		authority string
		want      TunnelDecision
	}{
		{routes.Deny, "pay.example.test:443", TunnelIntercept},
		{routes.Deny, "other.example.test:443", TunnelIntercept},
		{routes.Tunnel, "pay.example.test:443", TunnelIntercept},
		{routes.Tunnel, "admin.example.test:443", TunnelIntercept},
		{routes.Tunnel, "other.example.test:443", TunnelBlind},
		{routes.Tunnel, "other.example.test", TunnelBlind},
		{routes.Tunnel, "other example:443", TunnelRefuse},
		{routes.Deny, "", TunnelRefuse},
		{routes.Deny, "u@h:443", TunnelRefuse},
	} {
		b := newBench(t)
		snap, err := routes.NewSnapshot(testRoutes(), c.def, nil)
		if err != nil {
			t.Fatal(err)
		}
		b.Swap(&Binding{Snapshot: snap, Credentials: b.Binding().Credentials})
		got, r := b.Connect(t.Context(), Caller{ID: "local"}, c.authority)
		if got != c.want || (r != nil) != (c.want == TunnelRefuse) {
			t.Errorf("%v %q: %v, want %v", c.def, c.authority, got, c.want)
		}
		if r != nil && (r.Envelope.Error.Code != outcome.CodeInvalidTarget || b.j.last().Facts.Outcome != outcome.NotAttempted) {
			t.Errorf("%q: %+v", c.authority, r.Envelope)
		}
	}
}

type pipeTransport struct {
	memTransport
	far net.Conn
	err error
}

func (p *pipeTransport) Dial(context.Context, *Order) (net.Conn, error) {
	if p.err != nil {
		return nil, p.err
	}
	near, far := net.Pipe()
	p.far = far
	return near, nil
}

// TestBlindTunnel: recorded before a byte passes, and it claims nothing (V7).
func TestBlindTunnel(t *testing.T) {
	contract.Covers(t, "V7")
	b := newBench(t)
	tr := &pipeTransport{memTransport: memTransport{t: t, trace: &b.log}}
	b.cfg.Transport = tr
	caller, client := net.Pipe()
	done := make(chan *Reply)
	go func() {
		done <- b.Tunnel(context.Background(), Caller{ID: "local"}, "Other.Example.test:8443", func() (net.Conn, error) {
			if got := b.j.last(); got.Tunnel == nil || got.Facts.Outcome != outcome.Unknown {
				t.Errorf("established before its record: %+v", got.Facts)
			}
			go func() {
				buf := make([]byte, 4)
				if _, err := io.ReadFull(tr.far, buf); err != nil || string(buf) != "ping" {
					t.Errorf("%q %v", buf, err)
				}
				_, _ = io.WriteString(tr.far, "pong!")
				_ = tr.far.Close()
			}()
			return client, nil
		})
	}()
	if _, err := io.WriteString(caller, "ping"); err != nil {
		t.Fatal(err)
	}
	if all, err := io.ReadAll(caller); err != nil || string(all) != "pong!" {
		t.Errorf("%q %v", all, err)
	}
	if r := <-done; r != nil {
		t.Fatalf("%+v", r.Envelope)
	}
	rec := b.j.last()
	if tu := rec.Tunnel; tu.Authority != "other.example.test:8443" || tu.BytesOut != 4 || tu.BytesIn != 5 || !rec.Ended {
		t.Errorf("%+v", tu)
	}
	wantFacts(t, rec.Facts, outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteOutcomeUnknown)

	tr.err = &SetupError{Code: outcome.CodeDestinationProhibited, Stage: outcome.StageDNS, Reason: "private_address"}
	r := b.Tunnel(t.Context(), Caller{ID: "local"}, "other.example.test:443", func() (net.Conn, error) {
		t.Error("established after a refusal")
		return nil, errors.New("no")
	})
	wantFacts(t, facts(r), outcome.ConnectionSetup, outcome.NotAttempted, outcome.Never, outcome.CodeDestinationProhibited)
}

// TestMetricsEqualTheJournal: the sum over outcomes is the number of ended actions (P7, S1).
func TestMetricsEqualTheJournal(t *testing.T) {
	contract.Covers(t, "S1", "M6")
	b := newBench(t)
	m := metrics.New("v0", "")
	b.cfg.Metrics, b.j.metrics = m, m
	for i, play := range []func(context.Context, *Outgoing, Sink) Ending{answerWith(200, "ok"), answerWith(500, ""), endWith(outcome.CodeRemoteTimeout), endWith(outcome.CodeRemoteRefused), answerWith(404, "")} {
		b.tr.play = play
		b.Do(t.Context(), post("pay.example.test", "/v1/"+string(rune('a'+i)), "a"))
	}
	b.Do(t.Context(), post("pay.example.test", "/v1/b", "a")) // a suspected duplicate
	b.Do(t.Context(), post("nowhere.example.test", "/", "a"))
	b.j.before = func(batch Batch) error {
		if batch.Events[len(batch.Events)-1].Type == ResultCommitted {
			return ErrNotWritten
		}
		return nil
	}
	b.tr.play = answerWith(200, "ok")
	b.Do(t.Context(), post("pay.example.test", "/v1/z", "a"))
	b.j.before = func(Batch) error { return ErrNotWritten }
	b.Do(t.Context(), post("pay.example.test", "/v1/unrecorded", "a"))

	if err := b.Drain(t.Context()); err != nil { // an attempt is counted out after its answer
		t.Fatal(err)
	}
	families, err := m.Gatherer().Gather()
	if err != nil {
		t.Fatal(err)
	}
	sum, unrecorded, inFlight := 0.0, 0.0, 0.0
	for _, f := range families {
		for _, s := range f.GetMetric() {
			switch f.GetName() {
			case "waybill_actions_total":
				sum += s.GetCounter().GetValue()
				for _, l := range s.GetLabel() {
					if strings.Contains(l.GetValue(), "example") {
						t.Errorf("a host as a label: %v", l)
					}
				}
			case "waybill_unrecorded_refusals_total":
				unrecorded += s.GetCounter().GetValue()
			case "waybill_actions_in_flight":
				inFlight = s.GetGauge().GetValue()
			}
		}
	}
	if int(sum) != len(b.j.order) || unrecorded != 1 || inFlight != 0 {
		t.Errorf("metrics count %v ended actions, the journal has %d; unrecorded %v, in flight %v", sum, len(b.j.order), unrecorded, inFlight)
	}
}
