package proxy

import (
	"bytes"
	"context"
	"io"
	"iter"
	"slices"
	"sync"
	"time"

	"waybill/dispatch"
	"waybill/outcome"
)

// fakeJournal keeps events in memory and projects them with dispatch.Apply, as the
// real journal does.
type fakeJournal struct {
	mu       sync.Mutex
	seq      uint64
	order    []dispatch.ActionID
	events   map[dispatch.ActionID][]dispatch.StoredEvent
	records  map[dispatch.ActionID]dispatch.Record
	bodies   map[dispatch.ActionID][]byte
	dropped  map[dispatch.ActionID]bool
	watchers map[int]func(dispatch.Record)
	fail     error // of every read and write
	failBody error // of result bodies, half-way
}

func newFakeJournal() *fakeJournal {
	return &fakeJournal{
		events: map[dispatch.ActionID][]dispatch.StoredEvent{}, records: map[dispatch.ActionID]dispatch.Record{},
		bodies: map[dispatch.ActionID][]byte{}, dropped: map[dispatch.ActionID]bool{}, watchers: map[int]func(dispatch.Record){},
	}
}

func (j *fakeJournal) Append(_ context.Context, b dispatch.Batch) (dispatch.Receipt, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.fail != nil {
		return dispatch.Receipt{}, j.fail
	}
	rec, known := j.records[b.Action]
	rec.ID = b.Action
	for i := range b.Events {
		j.seq++
		next, err := dispatch.Apply(rec, &b.Events[i], j.seq)
		if err != nil {
			return dispatch.Receipt{Record: rec}, err
		}
		rec = next
		j.events[b.Action] = append(j.events[b.Action], dispatch.StoredEvent{Seq: j.seq, Hash: "h", Event: b.Events[i]})
	}
	rec.ID = b.Action
	j.records[b.Action] = rec
	if !known {
		j.order = append(j.order, b.Action)
	}
	for _, c := range b.Chunks {
		j.bodies[b.Action] = append(j.bodies[b.Action], c.Data...)
	}
	for _, w := range j.watchers {
		w(rec)
	}
	return dispatch.Receipt{Record: rec}, nil
}

func (j *fakeJournal) Action(_ context.Context, id dispatch.ActionID) (dispatch.Record, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if j.fail != nil {
		return dispatch.Record{}, j.fail
	}
	rec, ok := j.records[id]
	if !ok {
		return rec, dispatch.ErrActionNotFound
	}
	return rec, nil
}

func (j *fakeJournal) Events(_ context.Context, id dispatch.ActionID) ([]dispatch.StoredEvent, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return slices.Clone(j.events[id]), j.fail
}

func (j *fakeJournal) ByRequestID(_ context.Context, caller, requestID string) (dispatch.ActionID, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	for id, r := range j.records {
		if r.Caller == caller && r.RequestID == requestID {
			return id, nil
		}
	}
	return dispatch.ActionID{}, dispatch.ErrActionNotFound
}

func (j *fakeJournal) Actions(_ context.Context, f dispatch.Filter) iter.Seq2[dispatch.Record, error] {
	j.mu.Lock()
	defer j.mu.Unlock()
	var out []dispatch.Record
	for _, id := range slices.Backward(j.order) {
		r := j.records[id]
		switch {
		case f.Caller != "" && f.Caller != r.Caller, f.RequestID != "" && f.RequestID != r.RequestID,
			f.Outcome != outcome.OutcomeInvalid && f.Outcome != r.Shown().Outcome, f.OpenOnly && r.Ended:
			continue
		}
		if f.Limit == 0 || len(out) < f.Limit {
			out = append(out, r)
		}
	}
	fail := j.fail
	return func(yield func(dispatch.Record, error) bool) {
		if fail != nil {
			yield(dispatch.Record{}, fail)
			return
		}
		for _, r := range out {
			if !yield(r, nil) {
				return
			}
		}
	}
}

// chunkBytes is how the fake journal cuts what it holds.
const chunkBytes = 4

func (j *fakeJournal) Chunk(_ context.Context, id dispatch.ActionID, _, index int) ([]byte, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	b := j.bodies[id]
	if index*chunkBytes >= len(b) {
		return nil, dispatch.ErrNoResult
	}
	return b[index*chunkBytes : min(len(b), (index+1)*chunkBytes)], nil
}

func (j *fakeJournal) OpenResult(_ context.Context, id dispatch.ActionID) (dispatch.Result, io.ReadCloser, error) {
	j.mu.Lock()
	defer j.mu.Unlock()
	rec, ok := j.records[id]
	switch {
	case !ok:
		return dispatch.Result{}, nil, dispatch.ErrActionNotFound
	case rec.Result == nil:
		return dispatch.Result{}, nil, dispatch.ErrNoResult
	case j.dropped[id]:
		return dispatch.Result{}, nil, dispatch.ErrResultDropped
	}
	var r io.Reader = bytes.NewReader(j.bodies[id])
	if j.failBody != nil {
		half := j.bodies[id][:len(j.bodies[id])/2]
		r = io.MultiReader(bytes.NewReader(half), errReader{j.failBody})
	}
	return *rec.Result, io.NopCloser(r), nil
}

type errReader struct{ err error }

func (r errReader) Read([]byte) (int, error) { return 0, r.err }

func (j *fakeJournal) Watch(want func(*dispatch.Record) bool, f func(dispatch.Record)) (stop func()) {
	j.mu.Lock()
	defer j.mu.Unlock()
	n := len(j.watchers)
	j.watchers[n] = func(r dispatch.Record) {
		if want == nil || want(&r) {
			f(r)
		}
	}
	return func() {
		j.mu.Lock()
		defer j.mu.Unlock()
		delete(j.watchers, n)
	}
}

func (j *fakeJournal) watching() int {
	j.mu.Lock()
	defer j.mu.Unlock()
	return len(j.watchers)
}

// accepted, dispatched and committed are the events of an ordinary action.
func accepted(caller, requestID string) []dispatch.Event {
	now := time.Now()
	return []dispatch.Event{
		{Type: dispatch.ActionAccepted, At: now, Accepted: &dispatch.Accepted{Caller: caller, RequestID: requestID, Method: "POST", Target: "https://pay.example.test/v1/x"}},
		{Type: dispatch.PreflightValidated, At: now, Bound: &dispatch.Bound{Route: "pay", Snapshot: "sha256:0", Fingerprint: "sha256:1"}},
	}
}

func dispatched() dispatch.Event {
	return dispatch.Event{Type: dispatch.DispatchStarted, Attempt: 1, At: time.Now(), Dispatch: &dispatch.Dispatch{Connection: "c1", Unresolved: outcome.Reconcile}}
}

func committed(status int, h map[string][]string, body []byte, f outcome.Facts) []dispatch.Event {
	resp := &dispatch.Response{Status: status, Bytes: int64(len(body)), Framing: "length"}
	return []dispatch.Event{
		{Type: dispatch.ResponseComplete, Attempt: 1, At: time.Now(), Response: resp},
		{
			Type: dispatch.ResultCommitted, Attempt: 1, At: time.Now(), Ended: &dispatch.Ended{Facts: f},
			Result: &dispatch.Result{Status: status, Header: h, Bytes: int64(len(body)), Chunks: 1, Digest: "sha256:2"},
		},
	}
}

// record puts an action with a stored result into the journal.
func (j *fakeJournal) record(caller string, status int, h map[string][]string, body []byte) dispatch.ActionID {
	id := newID()
	events := append(append(accepted(caller, ""), dispatched()), committed(status, h, body, outcome.Success())...)
	if _, err := j.Append(context.Background(), dispatch.Batch{Action: id, Events: events, Chunks: []dispatch.Chunk{{Attempt: 1, Last: true, Data: body}}}); err != nil {
		panic(err)
	}
	return id
}
