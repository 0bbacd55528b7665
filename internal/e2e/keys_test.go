package e2e

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/internal/killpoint"
	"waybill/internal/testkit"
	"waybill/outcome"
)

// remote is a service with idempotency keys, of one temper, and its own account of effects.
type remote struct {
	honours bool          // the first answer of a key is given again
	forgets time.Duration // how long a key is kept; 0: for ever

	mu       sync.Mutex
	first    map[string]time.Time
	bodies   map[string]string
	effects  map[string]int // by key
	total    int
	mismatch int
}

func newRemote(honours bool, forgets time.Duration) *remote {
	return &remote{honours: honours, forgets: forgets, first: map[string]time.Time{}, bodies: map[string]string{}, effects: map[string]int{}}
}

// handle applies the effect at once, and answers, cuts the answer or says nothing.
func (r *remote) handle(a testkit.Arrival) []testkit.Step {
	r.mu.Lock()
	defer r.mu.Unlock()
	key, body := strings.Join(a.Values("Idempotency-Key"), ""), string(a.Body)
	at, known := r.first[key]
	if known && r.forgets > 0 && time.Since(at) > r.forgets {
		known = false
	}
	switch {
	case known && r.honours && r.bodies[key] != body:
		r.mismatch++
		return []testkit.Step{testkit.Reply(422, "another request")}
	case known && r.honours:
	default:
		r.first[key], r.bodies[key] = time.Now(), body
		r.effects[key]++
		r.total++
	}
	switch a.N % 5 {
	case 1:
		return []testkit.Step{testkit.Close()}
	case 3:
		return []testkit.Step{testkit.Write("HTTP/1.1 201 Created\r\nContent-Length: 100\r\n\r\n{"), testkit.Close()}
	default:
		return []testkit.Step{testkit.Reply(201, "made "+key)}
	}
}

func keyRoute(name, addr, more string) string {
	host := name + ".example.test"
	return "  - name: " + name + "\n    match: {host: " + host + "}\n    inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: pay}]\n" +
		fmt.Sprintf("    upstream: {roots: roots.pem, resolve: {%s: %q}}\n", host, addr) + more
}

func keyContract(retention, more string) string {
	return "    contract:\n      idempotency: {header: Idempotency-Key, scope: account, retention: " + retention + ", margin: 100ms, in_progress: [409], mismatch: [422], promises: [accepts, compares, keeps, returns], source: test, reviewed: 2026-11-30}\n" + more
}

// TestKeysUnderKills: sixteen clients with a key for each operation, against services that
// keep keys, ignore them and forget them, while the proxy is killed (T3, I1-I5, J3).
func TestKeysUnderKills(t *testing.T) {
	contract.Covers(t, "T3", "I1", "I2", "I3", "I5", "I9", "J1", "J3", "F2", "F6")
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0)) //nolint:gosec // moments, not secrets
	ca := testkit.NewCA(t)
	remotes := map[string]*remote{"honours": newRemote(true, 0), "ignores": newRemote(false, 0), "forgets": newRemote(true, 2*time.Second)}
	ledgers := map[string]*testkit.Ledger{}
	y := ""
	for name, rem := range remotes {
		up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(name + ".example.test"), Handler: rem.handle})
		ledgers[name] = up.Ledger
		more := keyContract("1h", "")
		switch name {
		case "forgets":
			more = keyContract("2s", "")
		case "ignores":
			more = "" // no promise, no contract: a key is an ordinary field (I4)
		}
		y += keyRoute(name, up.Addr(), more)
	}
	r := newRig(t, ca, rigOptions{routes: y})
	r.start()
	var addr atomic.Pointer[string]
	at := r.addr // a copy: start writes the field
	addr.Store(&at)
	roots := r.roots()
	rounds := 3
	if long() {
		rounds = 25
	}
	const enough = 12
	stop := make(chan struct{})
	var (
		wg   sync.WaitGroup
		mu   sync.Mutex
		done = map[string]int{} // operations that their client saw finished, by host
		made = map[string]bool{}
	)
	for i := range 16 {
		wg.Go(func() {
			for n := 0; ; n++ {
				select {
				case <-stop:
					return
				default:
				}
				name := []string{"honours", "honours", "ignores", "forgets"}[(i+n)%4]
				key := fmt.Sprintf("%s-%d-%d", name, i, n)
				for tries := 0; tries < 400; tries++ {
					c := testkit.NewClient(t, testkit.ClientConfig{Proxy: *addr.Load(), Roots: roots, NoKeepAlive: true, Timeout: 10 * time.Second})
					resp, err := testkit.TrySend(t, c, http.MethodPost, "https://"+name+".example.test/v1/x", "op="+key, "Idempotency-Key", key)
					c.CloseIdleConnections()
					if err == nil && resp.Status == 201 {
						mu.Lock()
						done[name]++
						made[key] = true
						mu.Unlock()
						if string(resp.Body) != "made "+key {
							t.Errorf("%s got %q", key, resp.Body)
						}
						break
					}
					if err == nil && resp.Status == 424 {
						break // reconcile: a client that obeys stops here
					}
					time.Sleep(20 * time.Millisecond) // a client's own backoff
				}
			}
		})
	}
	for range rounds {
		time.Sleep(time.Duration(150+rnd.IntN(350)) * time.Millisecond) // the moment of the kill is the input of this test
		r.kill()
		r.start()
		at := r.addr
		addr.Store(&at)
	}
	testkit.Eventually(t, func() error { // until the run shows something
		mu.Lock()
		defer mu.Unlock()
		if done["honours"] < enough {
			return fmt.Errorf("%d operations finished", done["honours"])
		}
		return nil
	})
	close(stop)
	wg.Wait()

	dispatched := map[string]int{}
	for _, v := range r.actions() {
		if v.DispatchStarted && v.Outcome == "not_attempted" {
			t.Errorf("F2: %s", v.InvocationID)
		}
		dispatched[v.Route] += v.Attempts
	}
	for name, rem := range remotes {
		rem.mu.Lock()
		arrivals := len(ledgers[name].Arrivals())
		t.Logf("%s: %d effects, %d arrivals, at most %d dispatches, %d operations finished", name, rem.total, arrivals, dispatched[name], done[name])
		if rem.total > dispatched[name] || arrivals > dispatched[name] {
			t.Errorf("%s: %d effects and %d arrivals of %d dispatches (F6)", name, rem.total, arrivals, dispatched[name])
		}
		// Without a contract nothing recognises a client that repeats what was committed and
		// whose answer the kill took from it (O3 guards the unresolved); with one it is the
		// recorded answer (I9).
		once := name != "ignores"
		for key, n := range rem.effects {
			if n > 1 && once {
				t.Errorf("%s: %d effects of one operation", key, n)
			}
		}
		if rem.mismatch > 0 {
			t.Errorf("%s: %d repeats carried another request (I3)", name, rem.mismatch)
		}
		for key := range made {
			if strings.HasPrefix(key, name) && (rem.effects[key] < 1 || once && rem.effects[key] > 1) {
				t.Errorf("%s is finished and has %d effects", key, rem.effects[key])
			}
		}
		rem.mu.Unlock()
	}
	if n := remotes["honours"].total; done["honours"] < enough || n < done["honours"] {
		t.Errorf("%d operations finished, %d effects: this run shows little", done["honours"], n)
	}
	r.verify()
}

// TestPausedWorker: the process is stopped between taking a lease and the dispatch check,
// for longer than the lease; afterwards it sends nothing under it (T4, J2, LS-01, LS-03a).
func TestPausedWorker(t *testing.T) {
	contract.Covers(t, "T4", "J1", "J2", "A9")
	ca := testkit.NewCA(t)
	rem := newRemote(true, 0)
	answer := atomic.Bool{}
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server("keys.example.test"), Handler: func(a testkit.Arrival) []testkit.Step {
		rem.handle(a)
		if !answer.Load() {
			return []testkit.Step{testkit.Close()}
		}
		return []testkit.Step{testkit.Reply(201, "made")}
	}})
	r := newRig(t, ca, rigOptions{routes: keyRoute("keys", up.Addr(), keyContract("1h", "")+"    limits: {connect: 300ms, tries: 1}\n")})
	r.env = []string{killpoint.Variable + "=stop@lease-taken"}
	r.start()
	c := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), NoKeepAlive: true, Timeout: time.Minute})
	post := func() *testkit.Response {
		return testkit.Send(t, c, http.MethodPost, "https://keys.example.test/v1/x", "x=1", "Idempotency-Key", "k")
	}
	first := post()
	if first.Status != 503 || !strings.Contains(first.Header.Get(outcome.HeaderOutcome), "same_idempotency_key") {
		t.Fatalf("%d %v", first.Status, first.Header)
	}
	answer.Store(true)
	paused := make(chan *testkit.Response)
	go func() { paused <- post() }()
	testkit.Eventually(t, func() error {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", r.p.PID()))
		if err != nil {
			return err
		}
		if rest := string(b[strings.LastIndexByte(string(b), ')')+1:]); !strings.HasPrefix(strings.TrimSpace(rest), "T") {
			return fmt.Errorf("not stopped: %s", rest)
		}
		return nil
	})
	time.Sleep(1500 * time.Millisecond) // longer than the lease, which is what this test is about
	r.p.Signal(t, syscall.SIGCONT)
	late := <-paused
	if late.Status != 503 || up.Ledger.Count("", "") != 1 {
		t.Errorf("the paused worker was answered %d; %d arrivals", late.Status, up.Ledger.Count("", ""))
	}
	id := first.Header.Get(outcome.HeaderInvocation)
	var doc struct{ Envelope outcome.Envelope }
	code, out, errs := r.cli("action", id, "--json")
	if code != 0 || json.Unmarshal([]byte(out), &doc) != nil {
		t.Fatalf("%d %s", code, errs)
	}
	ev := doc.Envelope.Evidence
	if len(ev.Attempts) != 2 || ev.Attempts[1].Code != outcome.CodeLeaseLost || ev.Attempts[1].Outcome != outcome.NotAttempted || doc.Envelope.Error.Outcome != outcome.Unknown {
		t.Errorf("A9: %+v %+v", ev.Attempts, doc.Envelope.Error)
	}
	if again := post(); again.Status != 201 || again.Header.Get(outcome.HeaderInvocation) != id || up.Ledger.Count("", "") != 2 || rem.total != 1 {
		t.Errorf("the next worker: %d, %d arrivals, %d effects", again.Status, up.Ledger.Count("", ""), rem.total)
	}
	r.verify()
}

// TestRepeatSurfaces: what callers and people see of repeats, through the real binary:
// IK-03, IK-04, IK-05, the API's retry, "waybill retry" and Waybill-Retry-Of.
func TestRepeatSurfaces(t *testing.T) {
	contract.Covers(t, "I9", "O1", "J1", "J3", "M4")
	ca := testkit.NewCA(t)
	gate := testkit.NewGate(t)
	var turns sync.Map // path → []Step of the first arrival
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server("keys.example.test"), Handler: func(a testkit.Arrival) []testkit.Step {
		if steps, ok := turns.LoadAndDelete(a.Target); ok {
			return steps.([]testkit.Step)
		}
		return []testkit.Step{testkit.Reply(201, "made")}
	}})
	r := newRig(t, ca, rigOptions{routes: keyRoute("keys", up.Addr(), keyContract("1h", "      retry: {attempts: 4, total: 1h, backoff: 1h, max: 1h, background: true}\n"))})
	r.start()
	client := func() *http.Client {
		return testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), NoKeepAlive: true, Timeout: time.Minute})
	}
	post := func(path string, fields ...string) *testkit.Response {
		return testkit.Send(t, client(), http.MethodPost, "https://keys.example.test"+path, "x=1", append([]string{"Waybill-Timeout", "1"}, fields...)...)
	}
	// IK-03
	turns.Store("/ik03", []testkit.Step{testkit.Hold(gate), testkit.Reply(201, "made")})
	one := make(chan *testkit.Response)
	go func() {
		one <- testkit.Send(t, client(), http.MethodPost, "https://keys.example.test/ik03", "x=1", "Idempotency-Key", "k2")
	}()
	gate.Await(t)
	for range 2 {
		if resp := post("/ik03", "Idempotency-Key", "k2"); resp.Status != 409 || resp.Header.Get("Retry-After") == "" || !strings.Contains(resp.Header.Get(outcome.HeaderOutcome), "INVOCATION_IN_PROGRESS") {
			t.Errorf("IK-03: %d %v", resp.Status, resp.Header)
		}
	}
	gate.Open()
	if resp := <-one; resp.Status != 201 {
		t.Errorf("IK-03, the one: %d", resp.Status)
	}
	if resp := post("/ik03", "Idempotency-Key", "k2"); resp.Status != 201 || resp.Header.Get(outcome.HeaderReplayed) == "" || string(resp.Body) != "made" || up.Ledger.Count("POST", "/ik03") != 1 {
		t.Errorf("IK-03, afterwards: %d %v", resp.Status, resp.Header)
	}
	// An unknown that its caller does not wait for: kept, repeated by hand, over a restart.
	turns.Store("/ik05", []testkit.Step{testkit.Close()})
	lost := post("/ik05", "Idempotency-Key", "k5")
	id := lost.Header.Get(outcome.HeaderInvocation)
	if !strings.Contains(lost.Header.Get(outcome.HeaderOutcome), "unknown") {
		t.Fatalf("%d %v", lost.Status, lost.Header)
	}
	r.kill()
	r.start()
	turns.Store("/ik05", []testkit.Step{testkit.Reply(409, `{"code":"idempotency_key_in_use"}`)})
	code, out, errs := r.cli("retry", id, "--json")
	var doc struct{ Envelope outcome.Envelope }
	if code != 0 || json.Unmarshal([]byte(out), &doc) != nil || doc.Envelope.Error == nil || doc.Envelope.Error.Retry != outcome.SameIdempotencyKey ||
		len(doc.Envelope.Evidence.Attempts) != 2 || doc.Envelope.Evidence.Attempts[1].Code != outcome.CodeRemoteInProgress {
		t.Fatalf("IK-05: %d %s %s", code, out, errs)
	}
	resp := testkit.Send(t, client(), http.MethodPost, "http://waybill.internal/v1/actions/"+id+"/retry", "")
	if resp.Status != 200 || !strings.Contains(string(resp.Body), `"outcome":"committed"`) {
		t.Errorf("POST retry: %d %s", resp.Status, resp.Body)
	}
	if resp := testkit.Send(t, client(), http.MethodPost, "http://waybill.internal/v1/actions/"+id+"/retry", ""); resp.Status != 422 || !strings.Contains(string(resp.Body), "RETRY_REFUSED") {
		t.Errorf("POST retry of a finished action: %d %s", resp.Status, resp.Body)
	}
	if code, _, errs := r.cli("retry", id); code != 1 || !strings.Contains(errs, "RETRY_REFUSED") {
		t.Errorf("waybill retry of a finished action: %d %s", code, errs)
	}
	if got := up.Ledger.Where(func(a testkit.Arrival) bool { return a.Target == "/ik05" }); len(got) != 3 || strings.Join(got[2].Values("Idempotency-Key"), "") != "k5" || string(got[2].Body) != "x=1" ||
		strings.Join(got[2].Values("Authorization"), "") != "Bearer "+r.canary.Value() {
		t.Errorf("what arrived: %+v", got)
	}
	// Waybill-Retry-Of repeats the same request and no other.
	if resp := post("/other", "Waybill-Retry-Of", id); resp.Status != 422 || !strings.Contains(string(resp.Body), "request_changed") || up.Ledger.Count("", "/other") != 0 {
		t.Errorf("Waybill-Retry-Of with another request: %d %s", resp.Status, resp.Body)
	}
	r.verify()
	r.kill()
	if strings.Contains(r.logs.String(), r.canary.Value()) {
		t.Error("C2: the log holds the secret")
	}
}
