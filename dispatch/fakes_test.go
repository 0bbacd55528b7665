package dispatch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"net"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"waybill/inject"
	"waybill/metrics"
	"waybill/outcome"
	"waybill/routes"
)

// trace is the order of things, as the journal and the transport saw it.
type trace struct {
	mu    sync.Mutex
	lines []string
}

func (t *trace) note(s string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.lines = append(t.lines, s)
}

// memJournal is a Journal in memory: what it took is "durable" when Append
// returns. before runs ahead of each append that is waited for, and may hold it or
// fail it; taken runs when such an append can no longer be stopped. As in the real
// one, a context that ends afterwards gives ErrIndeterminate, and the record is made.
type memJournal struct {
	before func(b Batch) error
	taken  func(b Batch)
	admit  error
	// reading runs ahead of each read of an action.
	reading func(ActionID)
	// lag delays relaxed batches until the next one that is waited for.
	lag bool

	mu      sync.Mutex
	seq     uint64
	records map[ActionID]Record
	events  map[ActionID][]StoredEvent
	chunks  map[ActionID][][]byte
	keys    map[string]ActionID
	kept    map[ActionID][]byte
	held    map[ActionID][][]byte
	ids     map[string]ActionID
	order   []ActionID
	queued  []Batch
	// metrics is told of what became durable, as the real one tells it.
	metrics *metrics.Metrics
	// unreadable is what reads fail with.
	unreadable error
	*trace     // shared with memTransport
}

func newMemJournal(log *trace) *memJournal {
	return &memJournal{records: make(map[ActionID]Record), events: make(map[ActionID][]StoredEvent), chunks: make(map[ActionID][][]byte), ids: make(map[string]ActionID), keys: make(map[string]ActionID), kept: make(map[ActionID][]byte), held: make(map[ActionID][][]byte), trace: log}
}

func (j *memJournal) Append(ctx context.Context, b Batch) (Receipt, error) {
	if j.before != nil && !b.Relaxed {
		if err := j.before(b); err != nil {
			return Receipt{}, err
		}
	}
	if ctx.Err() != nil {
		return Receipt{}, ErrNotWritten
	}
	if j.taken != nil && !b.Relaxed {
		j.taken(b)
	}
	if b.Relaxed && j.lag {
		j.queue(b)
		return Receipt{}, nil
	}
	for _, q := range j.unqueue() {
		if _, err := j.write(q); err != nil {
			return Receipt{}, err
		}
	}
	r, err := j.write(b)
	if err == nil && ctx.Err() != nil {
		return Receipt{}, ErrIndeterminate
	}
	return r, err
}

// queue keeps a relaxed batch, with its own copy of the data.
func (j *memJournal) queue(b Batch) {
	j.mu.Lock()
	defer j.mu.Unlock()
	b.Events = append([]Event(nil), b.Events...)
	b.Chunks = append([]Chunk(nil), b.Chunks...)
	for i := range b.Chunks {
		b.Chunks[i].Data = bytes.Clone(b.Chunks[i].Data)
	}
	j.queued = append(j.queued, b)
}

func (j *memJournal) unqueue() []Batch {
	j.mu.Lock()
	defer j.mu.Unlock()
	q := j.queued
	j.queued = nil
	return q
}

func (j *memJournal) write(b Batch) (Receipt, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	r := j.records[b.Action]
	r.ID = b.Action
	if earlier, err := j.takeKey(r, b); err != nil {
		return Receipt{Earlier: earlier}, err
	}
	for i := range b.Events {
		ev := b.Events[i]
		if ev.Type == ActionAccepted && ev.Accepted.RequestID != "" {
			key := ev.Accepted.Caller + "\x00" + ev.Accepted.RequestID
			if id, ok := j.ids[key]; ok && id != b.Action {
				return Receipt{Earlier: id}, errors.Join(ErrRequestIDTaken, ErrNotWritten)
			}
			j.ids[key] = b.Action
		}
		next, err := Apply(r, &ev, j.seq+1)
		if err != nil {
			return Receipt{Record: j.records[b.Action]}, errors.Join(err, ErrNotWritten)
		}
		j.seq++
		r = next
		j.events[b.Action] = append(j.events[b.Action], StoredEvent{Seq: j.seq, Event: ev})
		j.note("durable " + ev.Type.String())
	}
	for _, c := range b.Chunks {
		if c.Attempt == HeldRequest {
			if c.Index != len(j.held[b.Action]) {
				return Receipt{}, ErrNotWritten
			}
			j.held[b.Action] = append(j.held[b.Action], bytes.Clone(c.Data))
			continue
		}
		if c.Index == 0 {
			j.chunks[b.Action] = nil // of a later attempt
		}
		if len(c.Data) > MaxChunkBytes || c.Index != len(j.chunks[b.Action]) {
			return Receipt{}, ErrNotWritten
		}
		j.chunks[b.Action] = append(j.chunks[b.Action], bytes.Clone(c.Data))
		j.note(fmt.Sprintf("durable chunk %d", c.Index))
	}
	old, known := j.records[b.Action]
	if !known {
		j.order = append(j.order, b.Action)
	}
	j.records[b.Action] = r
	if before := &old; len(b.Events) > 0 {
		if !known {
			before = nil
		}
		Measure(j.metrics, before, &r, b.Events)
	}
	if b.Request != nil {
		j.kept[b.Action] = bytes.Clone(b.Request)
	}
	if !r.KeepsRequest() {
		delete(j.kept, b.Action)
	}
	if r.Approval != nil && r.HeldChunks() == 0 {
		delete(j.held, b.Action)
	}
	if b.Relaxed {
		return Receipt{}, nil
	}
	return Receipt{Record: r}, nil
}

func (j *memJournal) Admit() error { return j.admit }

func (j *memJournal) Action(_ context.Context, id ActionID) (Record, error) {
	if j.reading != nil {
		j.reading(id)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.unreadable != nil {
		return Record{}, j.unreadable
	}
	r, ok := j.records[id]
	if !ok {
		return Record{}, ErrActionNotFound
	}
	return r, nil
}

func (j *memJournal) Events(_ context.Context, id ActionID) ([]StoredEvent, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.events[id], nil
}

func (j *memJournal) ByRequestID(_ context.Context, caller, rid string) (ActionID, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if id, ok := j.ids[caller+"\x00"+rid]; ok {
		return id, nil
	}
	return ActionID{}, ErrActionNotFound
}

func (j *memJournal) Guarding(_ context.Context, caller, print string) (Record, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for i := len(j.order) - 1; i >= 0; i-- {
		r := j.records[j.order[i]]
		if r.Caller == caller && r.Bound != nil && r.Bound.Fingerprint == print && r.GuardsRepeats() {
			return r, nil
		}
	}
	return Record{}, ErrActionNotFound
}

// takeKey is what the real journal does in its transaction.
func (j *memJournal) takeKey(r Record, b Batch) (ActionID, error) {
	next := r
	for i := range b.Events {
		var err error
		if next, err = Apply(next, &b.Events[i], j.seq+1); err != nil {
			return ActionID{}, nil //nolint:nilerr // reported by the caller
		}
	}
	if !next.HoldsKey() || r.HoldsKey() {
		return ActionID{}, nil
	}
	k := next.Bound.Key
	at := next.Caller + "\x00" + k.Scope + "\x00" + k.Key
	if id, ok := j.keys[at]; ok && id != b.Action && k.Replaces != id.String() {
		return id, ErrKeyTaken
	}
	j.keys[at] = b.Action
	return ActionID{}, nil
}

func (j *memJournal) Keyed(_ context.Context, caller, scope, key string) (Record, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if id, ok := j.keys[caller+"\x00"+scope+"\x00"+key]; ok {
		return j.records[id], nil
	}
	return Record{}, ErrActionNotFound
}

func (j *memJournal) KeptRequest(_ context.Context, id ActionID) ([]byte, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if b, ok := j.kept[id]; ok {
		return b, nil
	}
	return nil, ErrNoRequest
}

func (j *memJournal) KeptActions(context.Context) (ids []ActionID, err error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for id := range j.kept {
		ids = append(ids, id)
	}
	return ids, nil
}

func (j *memJournal) Redirecting(_ context.Context, caller, key string) (Record, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for i := len(j.order) - 1; i >= 0; i-- {
		if r := j.records[j.order[i]]; r.Caller == caller && r.RedirectKey() == key {
			return r, nil
		}
	}
	return Record{}, ErrActionNotFound
}

func (j *memJournal) Actions(_ context.Context, f Filter) iter.Seq2[Record, error] {
	return func(yield func(Record, error) bool) {
		j.mu.Lock()
		all := make([]Record, 0, len(j.order))
		for _, id := range j.order {
			all = append(all, j.records[id])
		}
		j.mu.Unlock()
		for _, r := range all {
			if (!f.OpenOnly || !r.Ended) && (!f.Doubtful || r.Doubtful()) && !yield(r, nil) {
				return
			}
		}
	}
}

func (j *memJournal) OpenResult(_ context.Context, id ActionID) (Result, io.ReadCloser, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	r := j.records[id]
	if j.unreadable != nil {
		return Result{}, nil, j.unreadable
	}
	if r.Result == nil {
		return Result{}, nil, ErrNoResult
	}
	return *r.Result, io.NopCloser(bytes.NewReader(bytes.Join(j.chunks[id], nil))), nil
}

func (j *memJournal) Chunk(_ context.Context, id ActionID, attempt, index int) ([]byte, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if attempt == HeldRequest {
		if index >= len(j.held[id]) {
			return nil, ErrNoResult
		}
		return j.held[id][index], nil
	}
	if index >= len(j.chunks[id]) {
		return nil, ErrNoResult
	}
	return j.chunks[id][index], nil
}

func (j *memJournal) Watch(func(*Record) bool, func(Record)) func() { return func() {} }

// last returns the newest action.
func (j *memJournal) last() Record {
	j.mu.Lock()
	defer j.mu.Unlock()
	if len(j.order) == 0 {
		return Record{}
	}
	return j.records[j.order[len(j.order)-1]]
}

// memTransport plays endings.
type memTransport struct {
	t testing.TB
	*trace
	connect func(n int) error // nil: connected
	made    func()            // runs when a connection was made
	play    func(ctx context.Context, out *Outgoing, sink Sink) Ending

	mu       sync.Mutex
	tries    int
	sent     []*Outgoing
	bodies   []string
	orders   []*Order
	released int
	held     int
}

func (m *memTransport) Connect(ctx context.Context, o *Order) (Conn, error) {
	m.mu.Lock()
	m.tries++
	n := m.tries
	m.orders = append(m.orders, o)
	m.mu.Unlock()
	if m.connect != nil {
		if err := m.connect(n); err != nil {
			return nil, err
		}
	}
	if ctx.Err() != nil {
		return nil, &SetupError{Code: outcome.CodeConnectionTimeout, Err: ctx.Err()}
	}
	m.mu.Lock()
	m.held++
	m.mu.Unlock()
	if m.made != nil {
		m.made()
	}
	return &memConn{m: m}, nil
}

func (m *memTransport) Dial(context.Context, *Order) (net.Conn, error) {
	return nil, &SetupError{Code: outcome.CodeConnectionRefused, Stage: outcome.StageDNS, Reason: "connection_refused"}
}
func (m *memTransport) CloseIdle() {}

type memConn struct{ m *memTransport }

func (c *memConn) Info() Dispatch {
	return Dispatch{Connection: "c1", Stage: outcome.StageTLSHandshake, Peer: &outcome.Peer{Protocol: "http/1.1", LeafDigest: "sha256:1"}}
}

func (c *memConn) Exchange(ctx context.Context, out *Outgoing, sink Sink) Ending {
	body := ""
	if out.Body != nil {
		r, err := out.Body()
		if err != nil {
			c.m.t.Error(err)
		}
		b, _ := io.ReadAll(r)
		body = string(b)
	}
	c.m.note("sent " + out.Method + " " + out.RawPath)
	c.m.mu.Lock()
	c.m.sent = append(c.m.sent, out)
	c.m.bodies = append(c.m.bodies, body)
	c.m.mu.Unlock()
	if c.m.play == nil {
		return answerWith(200, "ok")(ctx, out, sink)
	}
	return c.m.play(ctx, out, sink)
}

func (c *memConn) Release() {
	c.m.mu.Lock()
	defer c.m.mu.Unlock()
	c.m.held--
	c.m.released++
}

func (m *memTransport) count() int {
	m.mu.Lock()
	defer m.mu.Unlock()
	return len(m.sent)
}

// answerWith plays a complete answer.
func answerWith(status int, body string, fields ...string) func(context.Context, *Outgoing, Sink) Ending {
	return func(_ context.Context, _ *Outgoing, sink Sink) Ending {
		h := http.Header{}
		for i := 0; i+1 < len(fields); i += 2 {
			h.Add(fields[i], fields[i+1])
		}
		if err := sink.Head(status, h, int64(len(body))); err != nil {
			return Ending{SinkErr: err}
		}
		for rest := body; rest != ""; {
			n := min(len(rest), 32<<10)
			if err := sink.Body([]byte(rest[:n])); err != nil {
				return Ending{Status: status, Header: h, Code: outcome.CodeResultStoreFailed, SinkErr: err}
			}
			rest = rest[n:]
		}
		return Ending{Sent: Sent{Headers: true, Complete: true}, Status: status, Header: h, Bytes: int64(len(body)), Framing: "content_length", Complete: true}
	}
}

// endWith plays an ending without a complete answer.
func endWith(code outcome.Code) func(context.Context, *Outgoing, Sink) Ending {
	return func(context.Context, *Outgoing, Sink) Ending {
		return Ending{Sent: Sent{Headers: true, Complete: true}, Code: code}
	}
}

const testSecret = "CANARY-7f3a-dispatch"

// bench is a pipeline with its fakes.
type bench struct {
	*Pipeline
	j   *memJournal
	tr  *memTransport
	log trace
}

type fixedClock struct{ at time.Time }

func (c *fixedClock) Now() time.Time { return c.at }

func testRoutes() []routes.Route {
	yes := true
	inject := []routes.Injection{{Header: "Authorization", Value: "Bearer ${secret}", Credential: "pay"}}
	return append(repeatRoutes(), []routes.Route{
		{Name: "pay", Match: routes.Match{Hosts: []string{"pay.example.test"}, Paths: []string{"/v1/**"}}, Inject: inject},
		{Name: "key", Match: routes.Match{Hosts: []string{"key.example.test"}}, Inject: []routes.Injection{{Header: "X-Api-Key", Value: "${secret}", Credential: "pay"}}},
		{Name: "strict", Match: routes.Match{Hosts: []string{"strict.example.test"}}, Inject: inject, RejectManaged: true},
		{Name: "search", Match: routes.Match{Hosts: []string{"search.example.test"}}, Contract: routes.Contract{Repeatable: &yes}},
		{Name: "relaxed", Match: routes.Match{Hosts: []string{"relaxed.example.test"}}, Contract: routes.Contract{Repeatable: &yes}, Durability: routes.Relaxed},
		{Name: "limited", Match: routes.Match{Hosts: []string{"limited.example.test"}}, Contract: routes.Contract{RefusedBeforeExecution: []int{429, 503}}},
		{Name: "broken", Match: routes.Match{Hosts: []string{"broken.example.test"}}, Inject: []routes.Injection{{Header: "Authorization", Value: "Bearer ${secret}", Credential: "gone"}}},
		{Name: "own", Match: routes.Match{Hosts: []string{"own.example.test"}}, Callers: []string{"alice"}},
		{Name: "admin", Match: routes.Match{Hosts: []string{"admin.example.test"}}, Deny: true},
		{Name: "tiny", Match: routes.Match{Hosts: []string{"tiny.example.test"}}, Limits: routes.Limits{Request: 8}},
		{Name: "small", Match: routes.Match{Hosts: []string{"small.example.test"}}, Delivery: routes.DeliveryBuffered, Limits: routes.Limits{Buffer: 1024, Request: 4 << 20, Response: 8 << 20}},
		{Name: "llm", Match: routes.Match{Hosts: []string{"llm.example.test"}}, Inject: inject, Limits: routes.Limits{Buffer: 1024}},
		{Name: "block", Match: routes.Match{Hosts: []string{"block.example.test"}}, Inject: inject, Leak: routes.LeakBlock},
		{Name: "hop", Match: routes.Match{Hosts: []string{"hop.example.test"}, Paths: []string{"/v1/**"}}, Inject: inject, Redirects: routes.RedirectsSameOrigin},
		{Name: "store", Match: routes.Match{Hosts: []string{"store.example.test"}}, Inject: inject, RedirectFrom: []string{"https://pay.example.test"}},
		{Name: "ended", Match: routes.Match{Hosts: []string{"ended.example.test"}}, Inject: inject, Contract: routes.Contract{EndMarker: "DONEC"}},
		{Name: "ask", Match: routes.Match{Hosts: []string{"ask.example.test"}}, Inject: inject, Approval: routes.Approval{Required: true, Hold: time.Minute, Expiry: time.Hour}},
		{Name: "few", Match: routes.Match{Hosts: []string{"few.example.test"}}, Limits: routes.Limits{Rate: 10, RatePer: time.Minute, Burst: 2, Concurrent: 1}},
		{Name: "bare", Match: routes.Match{Hosts: []string{"bare.example.test"}}, Approval: routes.Approval{Required: true, Hold: time.Minute, When: []routes.ApprovalRule{{Methods: []string{"POST"}, Paths: []string{"/v1/pay/**"}, MinBody: 2}}}},
		{Name: "marked", Match: routes.Match{Hosts: []string{"marked.example.test"}}, Contract: routes.Contract{EndMarker: "[DONE]"}},
	}...)
}

func newBench(t testing.TB) *bench {
	t.Helper()
	t.Setenv("WAYBILL_TEST_SECRET", testSecret)
	snap, err := routes.NewSnapshot(testRoutes(), routes.Deny, nil)
	if err != nil {
		t.Fatal(err)
	}
	store, err := inject.NewStore([]inject.Credential{
		{ID: "pay", Label: "2026-11", Source: inject.EnvSource("WAYBILL_TEST_SECRET")},
		{ID: "gone", Source: inject.EnvSource("WAYBILL_TEST_SECRET_THAT_IS_NOT_SET")},
	})
	if err != nil {
		t.Fatal(err)
	}
	b := &bench{}
	b.j = newMemJournal(&b.log)
	b.tr = &memTransport{t: t, trace: &b.log}
	b.Pipeline = New(Config{Journal: b.j, Transport: b.tr, Binding: &Binding{Snapshot: snap, Credentials: store}, Pseudonym: "waybill-test", SpoolDir: t.TempDir()})
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := b.Drain(ctx); err != nil {
			t.Error(err)
		}
		if b.tr.held != 0 {
			t.Errorf("%d connections were not released", b.tr.held)
		}
	})
	return b
}

// post is a submission to a host over an intercepted tunnel.
func post(host, path, body string, fields ...string) *Submission {
	s := &Submission{Caller: Caller{ID: "local"}, Method: "POST", Scheme: "https", Protocol: "HTTP/1.1",
		Authorities: Authorities{Connect: host + ":443", SNI: host, Host: host}, RawPath: path, Header: http.Header{}, ContentLength: int64(len(body)), Body: strings.NewReader(body)}
	for i := 0; i+1 < len(fields); i += 2 {
		s.Header.Add(fields[i], fields[i+1])
	}
	return s
}

func facts(r *Reply) outcome.Facts { return r.Record.Facts }

func readBody(t testing.TB, r *Reply) string {
	t.Helper()
	b, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Body.Close(); err != nil {
		t.Fatal(err)
	}
	return string(b)
}
