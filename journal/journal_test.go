package journal

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"io"
	"math/rand/v2"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/outcome"
)

func TestAppendAndRead(t *testing.T) {
	contract.Covers(t, "M1", "M2", "M3")
	j := openTest(t, tempDir(t), nil)
	id := newID()
	rc := mustAppend(t, j, toDispatch(id, "ci", "r-1", "sha256:f1"))
	if rc.Record.Facts.Outcome != outcome.Unknown || !rc.Record.Dispatched() || rc.Record.Events != 4 {
		t.Fatalf("after DISPATCH_STARTED: %+v", rc.Record.Facts)
	}
	body := []byte(`{"ok":true}`)
	rc = mustAppend(t, j, toResult(id, body))
	rec := mustAction(t, j, id)
	if rec.Facts != committed || rec.Facts != rc.Record.Facts || !rec.Ended || rec.ResultSeq == 0 {
		t.Fatalf("after RESULT_COMMITTED: %+v", rec)
	}
	events, err := j.Events(bg, id)
	if err != nil || len(events) != 6 {
		t.Fatalf("events: %d, %v", len(events), err)
	}
	for i, ev := range events {
		if ev.Seq != events[0].Seq+uint64(i) || ev.Hash == "" || ev.Boot != j.bootID {
			t.Errorf("event %d: %+v", i, ev)
		}
	}
	if got, err := j.ByRequestID(bg, "ci", "r-1"); err != nil || got != id {
		t.Errorf("ByRequestID: %v, %v", got, err)
	}
	for _, c := range [][2]string{{"other", "r-1"}, {"ci", "r-2"}, {"cir", "-1"}} {
		if _, err := j.ByRequestID(bg, c[0], c[1]); !errors.Is(err, dispatch.ErrActionNotFound) {
			t.Errorf("ByRequestID(%q): %v", c, err)
		}
	}
	res, r, err := j.OpenResult(bg, id)
	if err != nil || res.Status != 200 || res.Header["Content-Type"][0] != "application/json" {
		t.Fatalf("OpenResult: %+v, %v", res, err)
	}
	if got, err := io.ReadAll(r); err != nil || !bytes.Equal(got, body) {
		t.Errorf("result %q, %v", got, err)
	}
	_, err = j.Action(bg, newID())
	wantErr(t, err, dispatch.ErrActionNotFound)
	if errors.Is(err, dispatch.ErrNotWritten) {
		t.Error("an absent action is no permission")
	}
	rep := mustVerify(t, j)
	if rep.Actions != 1 || rep.Events != 7 || rep.Boots != 1 || rep.Results != 1 || rep.OrphanChunks != 0 || rep.WitnessRecords == 0 {
		t.Errorf("report %+v", rep)
	}
}

func TestRestartKeepsEverything(t *testing.T) {
	contract.Covers(t, "M1", "M3", "M4")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	a, b, c, d := newID(), newID(), newID(), newID()
	mustAppend(t, j, toDispatch(a, "ci", "", "f"))
	mustAppend(t, j, toResult(a, []byte("x")))
	mustAppend(t, j, toDispatch(b, "ci", "", "f"))                                                            // dispatched, open
	mustAppend(t, j, dispatch.Batch{Action: c, Events: []dispatch.Event{evAccepted("ci", ""), evBound("f")}}) // not dispatched, open
	mustAppend(t, j, dispatch.Batch{Action: d, Events: []dispatch.Event{evAccepted("ci", ""), evRefused()}})
	before := mustAction(t, j, a)
	seq := j.Stats().Seq
	closeTest(t, j)

	j, rec := openWith(t, testOptions(dir, nil))
	if rec.Unknown != 1 || rec.NotAttempted != 1 || len(rec.Lost) != 0 || rec.Quarantined || rec.Fresh || rec.Seq != seq {
		t.Fatalf("recovery %+v", rec)
	}
	if got := mustAction(t, j, a); got.Facts != before.Facts || got.LastSeq != before.LastSeq {
		t.Errorf("a changed: %+v", got)
	}
	if got := mustAction(t, j, b); !got.Ended || got.Facts.Outcome != outcome.Unknown || !got.Attempts[0].Recovered {
		t.Errorf("b is %+v, want unknown", got.Facts)
	}
	if got := mustAction(t, j, c); !got.Ended || got.Facts.Outcome != outcome.NotAttempted {
		t.Errorf("c is %+v, want not_attempted", got.Facts)
	}
	if got := mustAction(t, j, d); got.Facts.Code != outcome.CodeInvalidRequest {
		t.Errorf("d is %+v", got.Facts)
	}
	mustVerify(t, j)
	closeTest(t, j)
	j, rec = openWith(t, testOptions(dir, nil))
	if rec.Unknown != 0 || rec.NotAttempted != 0 {
		t.Errorf("second start found open actions: %+v", rec)
	}
	mustVerify(t, j)
}

func TestIllegalTransitionLeavesJournalUnchanged(t *testing.T) {
	contract.Covers(t, "F2", "M1", "M2")
	j := openTest(t, tempDir(t), nil)
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	before, seq := mustAction(t, j, id), j.Stats().Seq
	for name, evs := range map[string][]dispatch.Event{
		"refused after dispatch":            {evRefused()},
		"credential after dispatch":         {evCredential()},
		"dispatched twice":                  {evDispatch(1)},
		"second attempt beside the first":   {evDispatch(2)},
		"not attempted":                     {evResolved(1, facts(outcome.ConnectionSetup, outcome.NotAttempted, outcome.Backoff, outcome.CodeConnectionRefused))},
		"result without a response":         {evResult(1, 200, 0, nil, committed)},
		"legal, then illegal":               {evResponse(1, 200), evRefused()},
		"accepted again":                    {evAccepted("ci", "")},
		"boot":                              {{Type: dispatch.Booted, Boot: &dispatch.Boot{}}},
		"attempt that was never dispatched": {evResponse(7, 200)},
	} {
		rc, err := j.Append(bg, dispatch.Batch{Action: id, Events: evs})
		if !errors.Is(err, dispatch.ErrIllegalTransition) || !errors.Is(err, dispatch.ErrNotWritten) {
			t.Errorf("%s: %v", name, err)
		}
		if rc.Record.LastSeq != before.LastSeq {
			t.Errorf("%s: the receipt shows %d, want the unchanged record at %d", name, rc.Record.LastSeq, before.LastSeq)
		}
	}
	_, err := j.Append(bg, dispatch.Batch{Action: newID(), Events: []dispatch.Event{evDispatch(1)}})
	wantErr(t, err, dispatch.ErrIllegalTransition)
	if got := mustAction(t, j, id); got.LastSeq != before.LastSeq || j.Stats().Seq != seq {
		t.Errorf("the journal moved from %d to %d", seq, j.Stats().Seq)
	}
	mustVerify(t, j)
}

func TestNeighboursOfARefusedRequest(t *testing.T) {
	contract.Covers(t, "M1")
	h := heldHooks()
	j := openTest(t, tempDir(t), &h.Hooks)
	good, bad, twin := newID(), newID(), newID()
	h.hold()
	first := appendAsync(j, toDispatch(newID(), "x", "", "f")) // occupies the committer
	h.waitHeld(t)
	a := appendAsync(j, toDispatch(good, "ci", "r", "f"))
	b := appendAsync(j, dispatch.Batch{Action: bad, Events: []dispatch.Event{evDispatch(1)}})
	waitQueued(t, j, 2)
	c := appendAsync(j, toDispatch(twin, "ci", "r", "f")) // same request id, same group
	waitQueued(t, j, 3)
	h.letGo()
	if r := <-first; r.err != nil {
		t.Fatal(r.err)
	}
	if r := <-a; r.err != nil {
		t.Errorf("the good one: %v", r.err)
	}
	if r := <-b; !errors.Is(r.err, dispatch.ErrIllegalTransition) {
		t.Errorf("the bad one: %v", r.err)
	}
	if r := <-c; !errors.Is(r.err, dispatch.ErrRequestIDTaken) || !errors.Is(r.err, dispatch.ErrNotWritten) || r.Earlier != good {
		t.Errorf("the twin: %v, earlier %s, want %s", r.err, r.Earlier, good)
	}
	rc, err := j.Append(bg, toDispatch(newID(), "ci", "r", "f")) // in a later group
	if !errors.Is(err, dispatch.ErrRequestIDTaken) || rc.Earlier != good {
		t.Errorf("later: %v, earlier %s", err, rc.Earlier)
	}
	mustAppend(t, j, toDispatch(newID(), "other", "r", "f")) // another caller's token is another token
	_, err = j.Action(bg, twin)
	wantErr(t, err, dispatch.ErrActionNotFound)
	mustVerify(t, j)
}

func TestResults(t *testing.T) {
	contract.Covers(t, "H1", "H4", "H10")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	rng := rand.New(rand.NewPCG(1, 2))
	for _, size := range []int{0, 1, dispatch.MaxChunkBytes - 1, dispatch.MaxChunkBytes, 3*dispatch.MaxChunkBytes + 7, 20 << 20} {
		data := make([]byte, size)
		for i := range data {
			data[i] = byte(rng.Uint32())
		}
		id := newID()
		mustAppend(t, j, toDispatch(id, "ci", "", "f"))
		_, _, err := j.OpenResult(bg, id)
		wantErr(t, err, dispatch.ErrNoResult)
		n := storeChunks(t, j, id, data)
		_, _, err = j.OpenResult(bg, id)
		wantErr(t, err, dispatch.ErrNoResult) // chunks without the event are garbage (H4)
		mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{evResponse(1, 200), evResult(1, 200, n, data, committed)}})
		_, r, err := j.OpenResult(bg, id)
		if err != nil {
			t.Fatal(err)
		}
		sum := sha256.New()
		if m, err := io.Copy(sum, r); err != nil || m != int64(size) {
			t.Fatalf("size %d: read %d, %v", size, m, err)
		}
		want := sha256.Sum256(data)
		if !bytes.Equal(sum.Sum(nil), want[:]) {
			t.Errorf("size %d: other bytes", size)
		}
		_ = r.Close()
		if _, err := r.Read(make([]byte, 1)); err == nil || errors.Is(err, io.EOF) {
			t.Errorf("read after close: %v", err)
		}
	}
	mustVerify(t, j)
	closeTest(t, j)
	j = openTest(t, dir, nil)
	mustVerify(t, j)
}

func storeChunks(t testing.TB, j *Journal, id dispatch.ActionID, data []byte) (n int) {
	t.Helper()
	for off := 0; off < len(data); off += dispatch.MaxChunkBytes {
		end := min(off+dispatch.MaxChunkBytes, len(data))
		buf := append([]byte(nil), data[off:end]...)
		mustAppend(t, j, dispatch.Batch{Action: id, Chunks: []dispatch.Chunk{{Attempt: 1, Index: n, Last: end == len(data), Data: buf}}})
		clear(buf) // the journal does not keep the slice
		n++
	}
	return n
}

func TestManifestMustMatchChunks(t *testing.T) {
	contract.Covers(t, "H1", "H4")
	j := openTest(t, tempDir(t), nil)
	data := []byte("0123456789")
	chunk := func(i int, last bool) dispatch.Chunk {
		return dispatch.Chunk{Attempt: 1, Index: i, Last: last, Data: data}
	}
	twice := append(append([]byte(nil), data...), data...)
	for name, b := range map[string]dispatch.Batch{
		"no chunk":       {Events: []dispatch.Event{evResult(1, 200, 1, data, committed)}},
		"one too few":    {Events: []dispatch.Event{evResult(1, 200, 2, twice, committed)}, Chunks: []dispatch.Chunk{chunk(0, false)}},
		"hole":           {Events: []dispatch.Event{evResult(1, 200, 2, twice, committed)}, Chunks: []dispatch.Chunk{chunk(0, false), chunk(2, true)}},
		"no last":        {Events: []dispatch.Event{evResult(1, 200, 1, data, committed)}, Chunks: []dispatch.Chunk{chunk(0, false)}},
		"one too many":   {Events: []dispatch.Event{evResult(1, 200, 1, data, committed)}, Chunks: []dispatch.Chunk{chunk(0, true), chunk(1, true)}},
		"other length":   {Events: []dispatch.Event{evResult(1, 200, 1, twice, committed)}, Chunks: []dispatch.Chunk{chunk(0, true)}},
		"other attempt":  {Events: []dispatch.Event{evResult(1, 200, 1, data, committed)}, Chunks: []dispatch.Chunk{{Attempt: 2, Last: true, Data: data}}},
		"no attempt":     {Events: []dispatch.Event{evResult(1, 200, 1, data, committed)}, Chunks: []dispatch.Chunk{{Last: true, Data: data}}},
		"negative index": {Events: []dispatch.Event{evResult(1, 200, 1, data, committed)}, Chunks: []dispatch.Chunk{{Attempt: 1, Index: -1, Last: true, Data: data}}},
	} {
		id := newID()
		mustAppend(t, j, toDispatch(id, "ci", "", "f"))
		b.Action = id
		b.Events = append([]dispatch.Event{evResponse(1, 200)}, b.Events...)
		if _, err := j.Append(bg, b); !errors.Is(err, dispatch.ErrNotWritten) {
			t.Errorf("%s: %v", name, err)
		}
		if _, _, err := j.OpenResult(bg, id); !errors.Is(err, dispatch.ErrNoResult) {
			t.Errorf("%s: a result is visible: %v", name, err)
		}
	}
	// A wrong digest is found when read: never a clean end (G3).
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	bad := evResult(1, 200, 1, data, committed)
	bad.Result.Digest = "sha256:" + hex.EncodeToString(make([]byte, 32))
	mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{evResponse(1, 200), bad}, Chunks: []dispatch.Chunk{chunk(0, true)}})
	_, r, err := j.OpenResult(bg, id)
	if err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(r); err == nil || len(got) != 0 {
		t.Errorf("a body that does not verify: %d bytes, %v", len(got), err)
	}
	if _, err := j.Verify(bg); !errors.Is(err, ErrCorrupt) {
		t.Errorf("verify: %v", err)
	}
	// Behind a manifest nothing is replaced.
	_, err = j.Append(bg, dispatch.Batch{Action: id, Chunks: []dispatch.Chunk{chunk(0, true)}})
	wantErr(t, err, dispatch.ErrIllegalTransition)
}

func TestOversize(t *testing.T) {
	contract.Covers(t, "F9")
	j := openTest(t, tempDir(t), nil)
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	seq := j.Stats().Seq
	big := make([]byte, dispatch.MaxChunkBytes)
	var five []dispatch.Chunk
	for i := range 5 {
		five = append(five, dispatch.Chunk{Attempt: 1, Index: i, Data: big})
	}
	long := evResult(1, 200, 0, nil, committed)
	long.Result.Header = map[string][]string{"X": {string(bytes.Repeat([]byte("x"), maxStoredValue))}}
	many := make([]dispatch.Event, maxBatchEvents+1)
	for i := range many {
		many[i] = evResponse(1, 200)
	}
	for name, b := range map[string]dispatch.Batch{
		"chunk":  {Chunks: []dispatch.Chunk{{Attempt: 1, Data: make([]byte, dispatch.MaxChunkBytes+1)}}},
		"batch":  {Chunks: five},
		"events": {Events: []dispatch.Event{evResponse(1, 200), long}},
		"count":  {Events: many},
	} {
		b.Action = id
		_, err := j.Append(bg, b)
		if !errors.Is(err, ErrTooLarge) || !errors.Is(err, dispatch.ErrNotWritten) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if got := j.Stats().Seq; got != seq {
		t.Errorf("the journal moved from %d to %d", seq, got)
	}
	// Four full chunks fit, and many of them in flight are split into groups.
	var waits []<-chan answer
	for range 12 {
		id := newID()
		mustAppend(t, j, toDispatch(id, "ci", "", "f"))
		waits = append(waits, appendAsync(j, dispatch.Batch{Action: id, Chunks: []dispatch.Chunk{
			{Attempt: 1, Index: 0, Data: big}, {Attempt: 1, Index: 1, Data: big}, {Attempt: 1, Index: 2, Data: big}, {Attempt: 1, Index: 3, Data: big},
		}}))
	}
	for _, w := range waits {
		if r := <-w; r.err != nil {
			t.Error(r.err)
		}
	}
	// A projection may outgrow a value although each step is small.
	id = newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	var err error
	for range 3 {
		ev := evResponse(1, 200)
		ev.Type = dispatch.ResponseStarted
		ev.Response.ProxyStatus = string(bytes.Repeat([]byte("p"), 100<<10))
		gone := dispatch.Event{Type: dispatch.CallerGone, At: time.Now(), Ended: &dispatch.Ended{Reason: string(bytes.Repeat([]byte("r"), 100<<10))}}
		if _, err = j.Append(bg, dispatch.Batch{Action: id, Events: []dispatch.Event{ev, gone}}); err != nil {
			break
		}
	}
	if err != nil && !errors.Is(err, dispatch.ErrNotWritten) {
		t.Errorf("projection: %v", err)
	}
	mustVerify(t, j)
}

func TestBadBatches(t *testing.T) {
	contract.Covers(t, "F9")
	j := openTest(t, tempDir(t), nil)
	id := newID()
	far := evAccepted("ci", "")
	far.At = time.Date(30000, 1, 1, 0, 0, 0, 0, time.UTC)
	half := evRefused()
	half.Ended.Retry = 0
	for name, b := range map[string]dispatch.Batch{
		"no action":       {Events: []dispatch.Event{evAccepted("ci", "")}},
		"empty":           {Action: id},
		"unreadable time": {Action: id, Events: []dispatch.Event{far}},
		"half-set facts":  {Action: id, Events: []dispatch.Event{evAccepted("ci", ""), half}},
		"invalid type":    {Action: id, Events: []dispatch.Event{{}}},
	} {
		if _, err := j.Append(bg, b); !errors.Is(err, dispatch.ErrNotWritten) {
			t.Errorf("%s: %v", name, err)
		}
	}
	ctx, cancel := context.WithCancel(bg)
	cancel()
	_, err := j.Append(ctx, toDispatch(id, "ci", "", "f"))
	wantErr(t, err, dispatch.ErrNotWritten, context.Canceled)
	mustVerify(t, j)
}

// CALLER_GONE has a cause and no facts: it must survive the way to the disk and back.
func TestCallerGone(t *testing.T) {
	contract.Covers(t, "F5")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{{Type: dispatch.CallerGone, At: time.Now(), Ended: &dispatch.Ended{Reason: "CALLER_CANCELLED"}}}})
	closeTest(t, j)
	j = openTest(t, dir, nil)
	if rec := mustAction(t, j, id); rec.LocalCause != "CALLER_CANCELLED" || rec.Facts.Outcome != outcome.Unknown {
		t.Errorf("%+v", rec)
	}
	mustVerify(t, j)
}

// Field values are bytes: what is relayed later is what came (G12).
func TestHeaderBytesSurvive(t *testing.T) {
	contract.Covers(t, "G12")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	ev := evResult(1, 200, 0, nil, committed)
	want := map[string][]string{"X-Latin": {"caf\xe9", "plain"}, "X-Plain": {"a<b>&c", ""}}
	ev.Result.Header = want
	mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{evResponse(1, 200), ev}})
	closeTest(t, j)
	j = openTest(t, dir, nil)
	res, _, err := j.OpenResult(bg, id)
	if err != nil {
		t.Fatal(err)
	}
	for name, values := range want {
		for i := range values {
			if res.Header[name][i] != values[i] {
				t.Errorf("%s[%d] is %q, want %q", name, i, res.Header[name][i], values[i])
			}
		}
	}
	mustVerify(t, j)
}
