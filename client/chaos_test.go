package client_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"waybill/client"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

// chaosRuns is how many calls TestRetriesNeverExceedTheContract makes.
func chaosRuns() int {
	if long() {
		return 1000
	}
	return 60
}

// chaosCallers is how many make calls at a time.
func chaosCallers() int {
	if long() {
		return 24
	}
	return 12
}

// repeats is what the client of that test may add to a call.
const repeats = 3

// hostile is an origin that has the effect of every request it read whole, and whose
// answers are what the seed says.
func hostile(t testing.TB, ca *testkit.CA, host string, seed uint64) *testkit.Upstream {
	var mu sync.Mutex
	rnd := rand.New(rand.NewPCG(seed, 1))
	return testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(host), Handler: func(a testkit.Arrival) []testkit.Step {
		mu.Lock()
		what, pause := rnd.IntN(14), time.Duration(rnd.IntN(30))*time.Millisecond
		mu.Unlock()
		steps := []testkit.Step{testkit.Do(func(testkit.Arrival) { time.Sleep(pause) })} // so that kills and cuts meet requests on their way
		switch what {
		case 0:
			return append(steps, testkit.Close())
		case 1:
			return append(steps, testkit.Reset())
		case 2:
			return append(steps, testkit.Write("HTTP/1.1 201 Created\r\nContent-Length: 100\r\n\r\n{\"id\":"), testkit.Close())
		case 3:
			return append(steps, testkit.Reply(500, "after the effect"))
		case 4:
			return append(steps, testkit.Reply(429, "slow down", "Retry-After", "1"))
		case 5:
			return append(steps, testkit.Reply(503, "busy", "Retry-After", "1"))
		case 6:
			return append(steps, testkit.Reply(502, "gateway"))
		case 7:
			return append(steps, testkit.Write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"), testkit.CloseNoNotify())
		case 8:
			return append(steps, testkit.Write("HTTP/1.1 2x0 what\r\n\r\n"), testkit.Close())
		default:
			return append(steps, testkit.Reply(201, strings.Repeat("made "+a.Target+" ", 200)))
		}
	}})
}

// told is what one call came to.
type told struct {
	path      string
	safe      bool // on the repeatable route
	resp      *client.Response
	err       error
	bodyErr   error
	requestID string
}

// facts are those that the caller holds in the end.
func (c *told) facts(t testing.TB) (outcome.Facts, string) {
	err := c.err
	if err == nil {
		if err = c.bodyErr; err == nil {
			return c.resp.Facts, c.resp.InvocationID
		}
	}
	var e *client.Error
	if !errors.As(err, &e) {
		t.Errorf("%s: no *client.Error: %v", c.path, err)
		return outcome.Facts{}, ""
	}
	return e.Facts(), e.Envelope.InvocationID
}

// TestRetriesNeverExceedTheContract makes calls while connections break on both sides of
// the proxy and the proxy itself is killed and started again. The origin's ledger is the
// oracle: a request that is not repeatable has one effect at most, and none when its
// caller was told so; and no caller is left without either the outcome or an id to ask
// for it.
func TestRetriesNeverExceedTheContract(t *testing.T) {
	contract.Covers(t, "O5", "T2", "F2")
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	ca := testkit.NewCA(t)
	pay, search := hostile(t, ca, payHost, seed), hostile(t, ca, searchHost, seed+1)
	// The way from the proxy to the origins breaks, too.
	payWire, searchWire := newWire(t, pay.Addr()), newWire(t, search.Addr())
	r := newRig(t, ca, map[string]string{payHost: payWire.addr(), searchHost: searchWire.addr()})
	front := newWire(t, r.addr)

	var rndMu sync.Mutex
	draw := func(n int) int {
		rndMu.Lock()
		defer rndMu.Unlock()
		return rnd.IntN(n)
	}
	stop := make(chan struct{})
	var chaos sync.WaitGroup
	var kills atomic.Int64
	chaos.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(5+draw(40)) * time.Millisecond):
			}
			w := []*wire{front, payWire, searchWire}[draw(3)]
			switch draw(4) {
			case 0:
				w.cutUp.Store(int64(1 + draw(700)))
			case 1:
				w.cutDown.Store(int64(1 + draw(6000)))
			case 2:
				w.cut()
			}
		}
	})
	chaos.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Duration(150+draw(450)) * time.Millisecond):
			}
			r.kill()
			r.start()
			kills.Add(1)
		}
	})

	newClient := func(i int) *client.Client {
		return r.client(func(o *client.Options) {
			o.Proxy, o.Repeats, o.FetchLost, o.AbsoluteForm = "http://"+front.addr(), repeats, i%3 == 0, i%2 == 0
			o.AskFor, o.SettleFor = 15*time.Second, 400*time.Millisecond
		})
	}
	work := make(chan int)
	calls := make([]*told, chaosRuns())
	var workers sync.WaitGroup
	for w := range chaosCallers() {
		workers.Go(func() {
			c := newClient(w)
			for i := range work {
				calls[i] = oneCall(t, c, i, draw)
			}
		})
	}
	for i := range calls {
		work <- i
	}
	close(work)
	workers.Wait()
	close(stop)
	chaos.Wait()

	// Everything is quiet: what the callers were told, against what there was.
	c := r.client(nil)
	effects := map[string]int{}
	for _, up := range []*testkit.Upstream{pay, search} {
		for _, a := range up.Arrivals() {
			effects[a.Target]++ // even one that was cut may have had its effect
		}
	}
	kinds := map[string]int{}
	for _, call := range calls {
		call.check(t, c, effects[call.path], seed, kinds)
	}
	t.Logf("%d calls, %d kills, %d cuts in front, %d and %d behind; %d arrivals; told: %v", len(calls), kills.Load(), front.cuts.Load(), payWire.cuts.Load(), searchWire.cuts.Load(), len(pay.Arrivals())+len(search.Arrivals()), kinds)
	if kills.Load() == 0 || kinds["committed"] == 0 || kinds["unknown"] == 0 {
		t.Error("the faults hit nothing, or everything: this run shows nothing")
	}
}

func oneCall(t testing.TB, c *client.Client, i int, draw func(int) int) *told {
	call := &told{path: fmt.Sprintf("/v1/c/%05d", i), safe: i%3 == 2, requestID: fmt.Sprintf("chaos-%05d", i)}
	host := payHost
	if call.safe {
		host = searchHost
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if draw(10) == 0 {
		leave := time.AfterFunc(time.Duration(draw(40))*time.Millisecond, cancel) // a caller that leaves
		defer leave.Stop()
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, "https://"+host+call.path, strings.NewReader("amount="+call.path))
	if err != nil {
		t.Error(err)
		return call
	}
	call.resp, call.err = c.Do(req, client.RequestID(call.requestID))
	if call.err == nil {
		buf := make([]byte, 512)
		for call.bodyErr == nil {
			_, call.bodyErr = call.resp.Body.Read(buf)
		}
		_ = call.resp.Body.Close()
		if errors.Is(call.bodyErr, io.EOF) && !errors.Is(call.bodyErr, client.ErrLost) {
			call.bodyErr = nil
		}
	}
	return call
}

// check holds one call against the ledger and the journal.
func (c *told) check(t testing.TB, api *client.Client, effects int, seed uint64, kinds map[string]int) {
	f, id := c.facts(t)
	kinds[f.Outcome.String()]++
	bad := func(format string, args ...any) {
		t.Errorf("seed %d: %s: told %+v %s: "+format, append([]any{seed, c.path, f, id}, args...)...)
	}
	most := 1
	if c.safe {
		most = 1 + repeats
	}
	switch {
	case effects > most:
		bad("%d effects, %d allowed", effects, most)
	case f.Outcome == outcome.NotAttempted && effects > 0 && !c.safe:
		bad("%d effects of a request that was not attempted", effects)
	case f.Outcome == outcome.Committed && effects == 0:
		bad("no effect of a request that was committed")
	case f.Outcome == outcome.OutcomeInvalid:
		bad("no outcome")
	}
	if c.err == nil && c.resp.InvocationID == "" {
		bad("an answer without an action")
	}
	// Whatever the caller was told, it can ask: by the action's id, or by the request id.
	requestID := c.requestID
	var e *client.Error
	switch {
	case errors.As(c.err, &e) || errors.As(c.bodyErr, &e):
		requestID = e.RequestID
	case c.resp != nil:
		requestID = c.resp.RequestID
	}
	if requestID == "" {
		bad("no request id")
		return
	}
	a, err := api.Find(context.Background(), requestID)
	switch {
	case errors.Is(err, client.ErrNotFound):
		// No record, and so nothing can have arrived under this id (F1); earlier
		// submissions of the call have ids of their own.
		if effects > 0 && !c.safe {
			bad("%d effects, and no record of them", effects)
		}
		if f.Outcome == outcome.Committed || f.Outcome == outcome.Rejected {
			bad("no record of it")
		}
	case err != nil:
		bad("cannot be asked for: %v", err)
	default:
		if id != "" && a.InvocationID != id {
			bad("the request id leads to %s", a.InvocationID)
		}
		if f.Outcome == outcome.Committed && a.Outcome != outcome.Committed || f.Outcome == outcome.Rejected && a.Outcome != outcome.Rejected {
			bad("on record it is %+v", a.Facts())
		}
		if !a.Ended {
			if a, err = api.Wait(context.Background(), a.InvocationID); err != nil {
				bad("never ends: %v", err)
				return
			}
		}
		if f.Outcome == outcome.NotAttempted && a.DispatchStarted {
			bad("on record it was dispatched")
		}
		if a.Outcome == outcome.NotAttempted && effects > 0 && !c.safe {
			bad("%d effects, on record not attempted", effects)
		}
		if f.Retry == outcome.FetchResult && a.Status != 0 {
			res, err := api.Result(context.Background(), a.InvocationID)
			if err != nil {
				bad("its result cannot be fetched: %v", err)
				return
			}
			if raw, err := io.ReadAll(res.Body); err != nil || int64(len(raw)) != res.ContentLength {
				bad("its result is %d bytes of %d: %v", len(raw), res.ContentLength, err)
			}
			_ = res.Body.Close()
		}
	}
}
