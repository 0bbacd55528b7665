package dispatch

import (
	"context"
	"errors"
	"io"
	"log/slog"
	"net"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"waybill/outcome"
	"waybill/routes"
)

// connectAction starts the books of a CONNECT that is answered without interception.
func (p *Pipeline) connectAction(c Caller, authority string) *action {
	s := &Submission{Caller: c, Method: "CONNECT", Scheme: "https", Authorities: Authorities{}, Protocol: "HTTP/1.1"}
	a := &action{p: p, s: s, id: p.newID(), start: time.Now(), binding: p.binding.Load()}
	a.mark = a.start
	a.accepted = Accepted{Caller: c.ID, Method: "CONNECT", Target: authority}
	return a
}

// Connect decides what becomes of a CONNECT to authority. The reply is set for
// TunnelRefuse only. A destination that will be refused is intercepted all the same
// wherever that is possible: clients do not show the body of a refused CONNECT.
func (p *Pipeline) Connect(_ context.Context, c Caller, authority string) (TunnelDecision, *Reply) {
	host, port, err := routes.ParseAuthority(authority, 443)
	if err != nil {
		a := p.connectAction(c, "")
		return TunnelRefuse, a.refuseConnect(refusal(outcome.CodeInvalidTarget, "connect.target", "authority", "The target of CONNECT is not host:port."))
	}
	b := p.binding.Load()
	if b.Snapshot.Default() != routes.Tunnel || b.Snapshot.MayIntercept(host, port) {
		return TunnelIntercept, nil
	}
	return TunnelBlind, nil
}

func (a *action) refuseConnect(r *Refusal) *Reply {
	a.p.cfg.Metrics.InFlight(1)
	defer a.p.cfg.Metrics.InFlight(-1)
	return a.refuse(r)
}

// Tunnel carries a blind tunnel (CONTRACT V7). It dials under the address policy,
// records the tunnel, calls established (which answers the CONNECT and returns the
// caller's side), and copies until both sides have ended. The reply is set when the
// tunnel was refused before established was called.
func (p *Pipeline) Tunnel(ctx context.Context, c Caller, authority string, established func() (net.Conn, error)) *Reply {
	a := p.connectAction(c, "")
	p.cfg.Metrics.InFlight(1)
	defer p.cfg.Metrics.InFlight(-1)
	if !p.enter() {
		return a.refuse(refusal(outcome.CodeDraining, "", "draining", ""))
	}
	defer p.running.Done()
	host, port, err := routes.ParseAuthority(authority, 443)
	if err != nil {
		return a.refuse(refusal(outcome.CodeInvalidTarget, "connect.target", "authority", "The target of CONNECT is not host:port."))
	}
	name := net.JoinHostPort(host, strconv.Itoa(port))
	a.accepted.Target = name
	if err := p.cfg.Journal.Admit(); err != nil {
		return a.journalUnavailable(outcome.Validation, err)
	}
	limits := routes.DefaultLimits()
	dctx, cancel := context.WithTimeout(ctx, limits.Connect)
	up, err := p.cfg.Transport.Dial(dctx, &Order{Target: routes.Target{Scheme: "https", Host: host, Port: port}, Upstream: &routes.Upstream{}})
	cancel()
	if err != nil {
		if gone(ctx) {
			return a.refuse(a.cancelled(outcome.ConnectionSetup))
		}
		a.setup = setupError(err)
		return a.refuse(&Refusal{Facts: setupFacts(a.setup), Reason: a.setup.Reason, Stage: a.setup.Stage})
	}
	defer func() { _ = up.Close() }()
	a.add(Event{Type: TunnelOpened, Tunnel: &TunnelInfo{Authority: name}})
	// As for a dispatch: a record that became durable after its caller left would stay open.
	if _, err := a.append(context.WithoutCancel(ctx), false); err != nil {
		if errors.Is(err, ErrNotWritten) && !errors.Is(err, ErrIndeterminate) {
			return a.journalUnavailable(outcome.ConnectionSetup, err)
		}
		f, _ := outcome.Of(outcome.CodeJournalIndeterminate)
		return a.unrecorded(f, "journal_indeterminate")
	}
	a.recorded = true
	info := &TunnelInfo{Authority: name}
	if client, err := established(); err == nil {
		info.BytesOut, info.BytesIn = splice(client, up)
		_ = client.Close()
	}
	a.add(Event{Type: TunnelClosed, Tunnel: info})
	receipt, err := a.append(context.Background(), false)
	if err != nil {
		p.cfg.Logger.Warn("end of tunnel cannot be recorded", slog.String("action", a.id.String()), slog.Any("err", err))
		return nil
	}
	a.log(receipt.Record, 200)
	return nil
}

// splice copies both ways until both have ended, passing half-closes on.
func splice(client, up net.Conn) (out, in int64) {
	var (
		wg   sync.WaitGroup
		o, i atomic.Int64
	)
	one := func(dst, src net.Conn, n *atomic.Int64) {
		m, err := io.Copy(dst, src)
		n.Store(m)
		if half, ok := dst.(interface{ CloseWrite() error }); ok && err == nil {
			_ = half.CloseWrite()
			return
		}
		// Without a half-close, or after an error, the tunnel is over.
		_ = dst.Close()
		_ = src.Close()
	}
	wg.Go(func() { one(up, client, &o) })
	wg.Go(func() { one(client, up, &i) })
	wg.Wait()
	return o.Load(), i.Load()
}
