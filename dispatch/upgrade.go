package dispatch

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"waybill/dispatch/leak"
	"waybill/outcome"
	"waybill/routes"
)

// protocolWebSocket is the one protocol that is carried (RFC 6455 §4.1).
const protocolWebSocket = "websocket"

// wantedUpgrade returns the protocol that a request is forwarded with, or the refusal
// of one that is not carried. "h2c" is left out of the request instead: curl and Java
// offer it on every plain request.
func wantedUpgrade(h http.Header, s *Submission, r *routes.Route) (string, *Refusal) {
	wanted := ""
	for _, line := range h["Upgrade"] {
		for name := range strings.SplitSeq(line, ",") {
			if name = strings.TrimSpace(name); name == "" || strings.EqualFold(name, "h2c") {
				continue
			}
			if wanted != "" || r.Upgrade != routes.UpgradeTunnel || !strings.EqualFold(name, protocolWebSocket) {
				return "", refusal(outcome.CodeUnsupportedAction, "request.headers.upgrade", "upgrade", upgradeHelp(r))
			}
			wanted = protocolWebSocket
		}
	}
	switch {
	case wanted == "":
		return "", nil
	case s.Method != http.MethodGet, s.Protocol != "HTTP/1.1", s.Body != nil:
		// RFC 6455 §4.1: a GET of HTTP/1.1; what followed a body would be read as one.
		return "", refusal(outcome.CodeUnsupportedAction, "request.headers.upgrade", "upgrade_form", "A WebSocket handshake is a GET without a body over HTTP/1.1.")
	case !nominates(h, "upgrade"):
		return "", refusal(outcome.CodeInvalidRequest, "request.headers.connection", "upgrade_form", "A request with Upgrade has Connection: Upgrade, too.")
	}
	return wanted, nil
}

func upgradeHelp(r *routes.Route) string {
	if r.Upgrade == routes.UpgradeTunnel {
		return "Only WebSocket is carried, and it is asked for alone."
	}
	return "Protocol upgrades are not carried on this route."
}

// nominates reports whether Connection names the option (RFC 9110 §7.6.1).
func nominates(h http.Header, option string) bool {
	for _, line := range h["Connection"] {
		for name := range strings.SplitSeq(line, ",") {
			if strings.EqualFold(strings.TrimSpace(name), option) {
				return true
			}
		}
	}
	return false
}

// upgraded makes the outcome of a handshake durable and gives the connection out: a
// complete 101 commits the handshake and says nothing of what follows (CONTRACT G4).
// There is no stored result: a connection cannot be fetched later.
func (a *action) upgraded(end *Ending, sink *resultSink) *Reply {
	facts := outcome.Success()
	a.add(Event{Type: AttemptResolved, Attempt: a.tries, Ended: a.ended(facts, end, outcome.RemoteResponse)})
	a.noteLeaving()
	receipt, err := a.p.cfg.Journal.Append(context.Background(), Batch{Action: a.id, Events: a.events})
	if err != nil {
		return a.storeFailed(end, err)
	}
	rec := a.current(receipt, facts)
	h := sink.header.Clone()
	shape := a.shape(&rec, facts)
	shape.ReceivedStatus = end.Status
	outcome.Annotate(h, a.id.String(), facts, shape, !a.repeatable)
	h["Connection"], h["Upgrade"] = []string{"Upgrade"}, []string{a.out.Upgrade}
	u := &Upgraded{a: a, pipe: end.Pipe, mask: sink.screen.guard.Stream(), block: sink.screen.block, over: make(chan struct{}), done: make(chan struct{})}
	u.touch()
	a.log(rec, end.Status)
	return &Reply{ID: a.id, Record: rec, Status: end.Status, Header: h, Body: bytesBody(nil), Upgraded: u, HandedOver: func(error) {}}
}

// Upgraded is the origin's connection after a 101. Carry uses it, once; Close may be
// called by anybody and ends it.
type Upgraded struct {
	a     *action
	pipe  io.ReadWriteCloser
	mask  *leak.Stream
	block bool

	begun    atomic.Bool // by Carry, or by a Close before it
	out, in  atomic.Int64
	last     atomic.Int64 // when something passed, Unix nanoseconds
	once     sync.Once
	over     chan struct{} // closed when no more is carried
	done     chan struct{} // closed when that is on record
	redacted int           // of the copying goroutine, read after it ended
}

func (u *Upgraded) touch() { u.last.Store(time.Now().UnixNano()) }

// Close ends the connection to the origin. Its error is that of closing.
func (u *Upgraded) Close() error {
	err := u.stop()
	if !u.begun.Swap(true) {
		u.record()
	}
	return err
}

func (u *Upgraded) stop() (err error) {
	u.once.Do(func() {
		err = u.pipe.Close()
		close(u.over)
	})
	return err
}

// shownPiece is how long the beginning of what may be a secret waits for more: the
// end of a message may look like one, and its reader waits for it.
const shownPiece = 30 * time.Millisecond

// Carry copies both ways until either side has ended or nothing passed for the
// route's idle limit; the route's timeout bounds the handshake alone. What the origin
// sends is searched for the secret (CONTRACT C5). caller is closed at the end.
func (u *Upgraded) Carry(caller io.ReadWriteCloser) {
	if u.begun.Swap(true) {
		_ = caller.Close()
		return
	}
	defer u.record()
	var both sync.WaitGroup
	both.Go(func() {
		defer u.end(caller)
		defer u.survive(caller)
		buf := make([]byte, 32<<10)
		for {
			n, err := caller.Read(buf)
			if n > 0 {
				u.touch()
				if _, werr := u.pipe.Write(buf[:n]); werr != nil {
					return
				}
				u.out.Add(int64(n))
			}
			if err != nil {
				return
			}
		}
	})
	both.Go(func() {
		defer u.end(caller)
		defer u.survive(caller)
		u.relay(caller)
	})
	both.Go(func() { u.watch(caller) })
	both.Wait()
}

func (u *Upgraded) end(caller io.Closer) {
	_ = u.stop()
	_ = caller.Close()
}

// survive keeps a panic – of a library that met what it did not expect – from ending
// every other action; its value may quote what was carried and goes nowhere (C2).
func (u *Upgraded) survive(caller io.Closer) {
	if recover() == nil {
		return
	}
	u.a.p.cfg.Logger.Error("panic in an upgraded connection", slog.String("action", u.a.id.String()), slog.Any("stack", string(debug.Stack())))
	u.end(caller)
}

// watch ends a connection on which nothing passes.
func (u *Upgraded) watch(caller io.Closer) {
	idle := u.a.out.Idle
	if idle <= 0 {
		return
	}
	t := time.NewTimer(idle)
	defer t.Stop()
	for {
		select {
		case <-u.over:
			return
		case <-t.C:
			rest := idle - time.Since(time.Unix(0, u.last.Load()))
			if rest <= 0 {
				u.end(caller)
				return
			}
			t.Reset(rest)
		}
	}
}

// relay carries what the origin sends. A secret in it is masked in place, which keeps
// the framing of the messages. A piece shorter than tellable that began one is let go
// after shownPiece, so that a message that only ends like the beginning of a secret
// arrives; the search goes on behind it.
func (u *Upgraded) relay(caller io.WriteCloser) {
	type piece struct {
		data []byte
		err  error
	}
	pieces := make(chan piece)
	go func() {
		defer close(pieces)
		defer u.survive(caller)
		for {
			buf := make([]byte, 16<<10)
			n, err := u.pipe.Read(buf)
			select {
			case pieces <- piece{buf[:n], err}:
			case <-u.over:
				return
			}
			if err != nil {
				return
			}
		}
	}()
	early := 0 // bytes of the held tail that are out already
	write := func(p []byte) bool {
		if len(p) == 0 {
			return true
		}
		if _, err := caller.Write(p); err != nil {
			return false
		}
		u.in.Add(int64(len(p)))
		return true
	}
	var scratch []byte
	wait := time.NewTimer(time.Hour)
	defer wait.Stop()
	for {
		select {
		case p, ok := <-pieces:
			if !ok {
				return
			}
			if len(p.data) > 0 {
				u.touch()
				scratch = u.mask.Write(scratch[:0], p.data)
				u.redacted = u.mask.Masked()
				if u.redacted > 0 && u.block {
					return
				}
				skip := min(early, len(scratch))
				early -= skip
				if !write(scratch[skip:]) {
					return
				}
			}
			if p.err != nil {
				// What is held back of a stream that ends may be most of a secret; less than
				// that is shown, as above.
				if tail := u.mask.Tail(); len(tail) < tellable {
					_ = write(tail[min(early, len(tail)):])
				}
				return
			}
			wait.Reset(shownPiece)
		case <-wait.C:
			if tail := u.mask.Tail(); len(tail) < tellable && len(tail) > early {
				if !write(tail[early:]) {
					return
				}
				early = len(tail)
			}
		}
	}
}

// record appends what was carried. It is evidence and resolves nothing.
func (u *Upgraded) record() {
	defer close(u.done)
	a := u.a
	ev := Event{Type: UpgradeClosed, At: a.now(), Tunnel: &TunnelInfo{BytesOut: u.out.Load(), BytesIn: u.in.Load(), Redacted: u.redacted, Blocked: u.block && u.redacted > 0}}
	if _, err := a.p.cfg.Journal.Append(context.Background(), Batch{Action: a.id, Events: []Event{ev}, Relaxed: true}); err != nil {
		a.p.cfg.Logger.Warn("end of an upgraded connection cannot be recorded", slog.String("action", a.id.String()), slog.Any("err", err))
	}
}
