package dispatch

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand"
	"net/http"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"waybill/internal/contract"
	"waybill/outcome"
)

// feed plays an answer piece by piece: each waits until the test sends it.
type feed struct {
	status int
	header http.Header
	length int64
	pieces chan string // closed: the end
	end    Ending      // of an answer that breaks off; Code none: complete
}

func newFeed(fields ...string) *feed {
	f := &feed{status: 200, header: http.Header{}, length: -1, pieces: make(chan string)}
	for i := 0; i+1 < len(fields); i += 2 {
		f.header.Add(fields[i], fields[i+1])
	}
	return f
}

func (f *feed) play(_ context.Context, _ *Outgoing, sink Sink) Ending {
	end := Ending{Sent: Sent{Headers: true, Complete: true}, Status: f.status, Header: f.header, Code: f.end.Code, Complete: f.end.Code == outcome.CodeNone, Framing: "chunked"}
	if err := sink.Head(f.status, f.header, f.length); err != nil {
		return Ending{SinkErr: err}
	}
	for p := range f.pieces {
		end.Bytes += int64(len(p))
		if err := sink.Body([]byte(p)); err != nil {
			return Ending{Status: f.status, Header: f.header, Code: outcome.CodeResultStoreFailed, SinkErr: err}
		}
	}
	return end
}

const sse = "text/event-stream; charset=utf-8"

// read returns what one Read gives.
func read(t *testing.T, r *Reply) string {
	t.Helper()
	buf := make([]byte, 64<<10)
	n, err := r.Body.Read(buf)
	if err != nil {
		t.Fatalf("%v", err)
	}
	return string(buf[:n])
}

// TestEventsArriveOneByOne: ST-01. The first event is stored and relayed before the
// second exists, and the end waits for the completeness marker.
func TestEventsArriveOneByOne(t *testing.T) {
	contract.Covers(t, "H4", "H5", "H9", "H1")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		f := newFeed("Content-Type", sse)
		b.tr.play = f.play
		s := post("llm.example.test", "/v1/m", "{}")
		s.Protocol = "HTTP/2.0"
		r := b.Do(context.Background(), s)
		if r.Status != 200 || !r.Streamed || r.Envelope != nil || r.Header.Get("Waybill-Outcome") != "unknown;phase=remote_execution;retry=fetch_result" {
			t.Fatalf("%d %v %q", r.Status, r.Streamed, r.Header.Get("Waybill-Outcome"))
		}
		f.pieces <- "data: 1\n\n"
		if got := read(t, r); got != "data: 1\n\n" || !slices.Contains(b.log.lines, "durable chunk 0") {
			t.Errorf("%q, %v", got, b.log.lines)
		}
		if rec := b.j.last(); rec.Ended || rec.Facts.Outcome != outcome.Unknown {
			t.Errorf("while it streams: %+v", rec.Facts)
		}
		release := make(chan struct{})
		b.j.before = func(batch Batch) error {
			if len(batch.Chunks) > 0 && batch.Chunks[0].Index == 1 && len(batch.Chunks[0].Data) > 0 {
				<-release
			}
			return nil
		}
		f.pieces <- "data: 2\n\n"
		got := make(chan string)
		go func() { got <- read(t, r) }()
		synctest.Wait()
		select {
		case early := <-got:
			t.Errorf("relayed before it was durable: %q", early)
		default:
			close(release)
			if e := <-got; e != "data: 2\n\n" {
				t.Errorf("%q", e)
			}
		}
		commit := make(chan struct{})
		b.j.before = func(batch Batch) error {
			if n := len(batch.Events); n > 0 && batch.Events[n-1].Type == ResultCommitted {
				<-commit
			}
			return nil
		}
		close(f.pieces)
		end := make(chan error)
		go func() {
			_, err := r.Body.Read(make([]byte, 1))
			end <- err
		}()
		synctest.Wait()
		select {
		case <-end:
			t.Error("ended before the completeness marker was durable")
		default:
		}
		close(commit)
		if err := <-end; !errors.Is(err, io.EOF) {
			t.Errorf("end %v", err)
		}
		r.HandedOver(nil)
		if o := r.Trailer.Get("Waybill-Outcome"); o != "committed;phase=remote_execution;retry=never" {
			t.Errorf("trailer %q", o)
		}
		synctest.Wait()
		rec := b.j.last()
		if res, body, err := b.j.OpenResult(context.Background(), rec.ID); err != nil || rec.Facts != outcome.Success() || res.Bytes != 18 || res.Chunks != 3 {
			t.Errorf("%+v %+v %v", rec.Facts, res, err)
		} else if all, _ := io.ReadAll(body); string(all) != "data: 1\n\ndata: 2\n\n" {
			t.Errorf("%q", all)
		}
	})
}

// TestBrokenStream: ST-02 (a). What the origin broke off never ends cleanly.
func TestBrokenStream(t *testing.T) {
	contract.Covers(t, "H5", "G3")
	for _, c := range []struct{ sent, last string }{
		{"data: 1\n\n", "event: error\ndata: {"},
		{"data: 1\n\ndata: par", "\nevent: error\ndata: {"},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			f := newFeed("Content-Type", sse)
			f.end.Code = outcome.CodeRemoteResultIncomplete
			b.tr.play = f.play
			r := b.Do(context.Background(), post("llm.example.test", "/v1/m", "{}"))
			f.pieces <- c.sent
			if got := read(t, r); got != c.sent {
				t.Errorf("%q", got)
			}
			close(f.pieces)
			if got := read(t, r); !strings.HasPrefix(got, c.last) || !strings.HasSuffix(got, "}\n\n") || !strings.Contains(got, "REMOTE_RESULT_INCOMPLETE") {
				t.Errorf("last event %q", got)
			}
			_, err := r.Body.Read(make([]byte, 1))
			if err == nil || errors.Is(err, io.EOF) {
				t.Errorf("a broken stream ended with %v", err)
			}
			r.HandedOver(err)
			synctest.Wait()
			rec := b.j.last()
			wantFacts(t, rec.Facts, outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteResultIncomplete)
			if rec.LocalCause != "" || rec.Result != nil {
				t.Errorf("%q %+v", rec.LocalCause, rec.Result)
			}
		})
	}
}

// TestDeclaredLengthWaits: with Content-Length the last byte is what says "whole", so it
// waits for the completeness marker.
func TestDeclaredLengthWaits(t *testing.T) {
	contract.Covers(t, "H9", "H5")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		f := newFeed("Content-Type", sse, "Content-Length", "8")
		f.length = 8
		b.tr.play = f.play
		r := b.Do(context.Background(), post("limited.example.test", "/v1/m", "{}"))
		if r.ContentLength != 8 {
			t.Errorf("length %d", r.ContentLength)
		}
		f.pieces <- "1234"
		if got := read(t, r); got != "1234" {
			t.Errorf("%q", got)
		}
		f.pieces <- "5678"
		got := make(chan string)
		go func() { got <- read(t, r) }()
		synctest.Wait()
		select {
		case early := <-got:
			t.Errorf("the last bytes came before the marker: %q", early)
			close(f.pieces)
		default:
			close(f.pieces)
			if rest := <-got; rest != "5678" {
				t.Errorf("%q", rest)
			}
		}
		if _, err := r.Body.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
			t.Errorf("%v", err)
		}
		r.HandedOver(nil)
	})
}

// TestStreamCallerLeaves: F5, H2 in a stream.
func TestStreamCallerLeaves(t *testing.T) {
	contract.Covers(t, "F5", "H2")
	for _, before := range []bool{true, false} { // the caller leaves before or after the end
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			f := newFeed("Content-Type", sse)
			b.tr.play = f.play
			ctx, cancel := context.WithCancel(context.Background())
			defer cancel()
			r := b.Do(ctx, post("llm.example.test", "/v1/m", "{}"))
			f.pieces <- "data: 1\n\n"
			read(t, r)
			if before {
				cancel()
				if _, err := r.Body.Read(make([]byte, 1)); !errors.Is(err, context.Canceled) {
					t.Errorf("%v", err)
				}
				r.HandedOver(context.Canceled)
			}
			f.pieces <- "data: 2\n\n"
			close(f.pieces)
			synctest.Wait()
			if !before {
				r.HandedOver(errors.New("broken pipe"))
				synctest.Wait()
			}
			rec := b.j.last()
			wantFacts(t, rec.Facts, outcome.ResultDelivery, outcome.Committed, outcome.FetchResult, outcome.CodeDeliveryFailed)
			if rec.Result == nil || rec.Result.Bytes != 18 || before != (rec.LocalCause == "CALLER_CANCELLED") {
				t.Errorf("%+v %q", rec.Result, rec.LocalCause)
			}
		})
	}
}

// TestOutgrownBodyIsStreamed: delivery auto, and a reader that comes late: memory stays
// bounded, the bytes are the same.
func TestOutgrownBodyIsStreamed(t *testing.T) {
	contract.Covers(t, "H4", "H5")
	b := newBench(t)
	big := strings.Repeat("0123456789abcdef", 5<<16) // 5 MiB
	b.tr.play = answerWith(200, big)
	r := b.Do(t.Context(), post("llm.example.test", "/", "{}"))
	if !r.Streamed || r.ContentLength != int64(len(big)) {
		t.Fatalf("streamed %v length %d", r.Streamed, r.ContentLength)
	}
	if err := b.Drain(t.Context()); err != nil { // all of it is stored before anything is read
		t.Fatal(err)
	}
	got, err := io.ReadAll(r.Body)
	if err != nil || string(got) != big {
		t.Fatalf("%d bytes, %v", len(got), err)
	}
	st := r.Body.(*streamBody).s
	if st.size > streamCacheBytes+MaxChunkBytes {
		t.Errorf("%d bytes are cached", st.size)
	}
	for _, c := range []struct {
		name string
		mod  func(*Submission)
		play func(context.Context, *Outgoing, Sink) Ending
	}{
		{"buffered route", func(s *Submission) { s.Authorities = post("small.example.test", "/", "").Authorities }, answerWith(200, big)},
		{"not a success", func(*Submission) {}, answerWith(404, big)},
		{"HEAD", func(s *Submission) { s.Method = "HEAD" }, answerWith(200, "", "Content-Type", sse)},
		{"HTTP/1.0 without a length", func(s *Submission) { s.Protocol = "HTTP/1.0" }, func(ctx context.Context, out *Outgoing, sink Sink) Ending {
			f := newFeed("Content-Type", sse)
			go func() { f.pieces <- big[:100_000]; close(f.pieces) }()
			return f.play(ctx, out, sink)
		}},
	} {
		b := newBench(t)
		b.tr.play = c.play
		s := post("llm.example.test", "/", "{}")
		c.mod(s)
		if r := b.Do(t.Context(), s); r.Streamed {
			t.Errorf("%s: streamed", c.name)
		}
	}
}

// TestOutgrownBodyKeepsItsBytes: what a caller reads of an answer that left the buffer, what is
// stored of it and its digest are the same bytes, whatever pieces it came in and whatever the
// screen held back or masked. Buffer, screen and stream hand one memory to each other.
func TestOutgrownBodyKeepsItsBytes(t *testing.T) {
	contract.Covers(t, "C5", "H4", "H5")
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewSource(seed))
	streamed := 0
	for i := range 20 {
		b := newBench(t)
		var sent strings.Builder
		for n := r.Intn(400 << 10); sent.Len() < n; {
			fmt.Fprintf(&sent, "%d-%d;", i, sent.Len())
			switch r.Intn(60) {
			case 0:
				sent.WriteString(testSecret)
			case 1:
				sent.WriteString(testSecret[:1+r.Intn(len(testSecret)-1)])
			}
		}
		raw, most := sent.String(), []int{100, 900, 5000, 32 << 10}[r.Intn(4)]
		want, length := strings.ReplaceAll(raw, testSecret, strings.Repeat("*", len(testSecret))), int64(-1)
		if r.Intn(2) == 0 {
			length = int64(len(raw))
		}
		b.tr.play = func(_ context.Context, _ *Outgoing, sink Sink) Ending {
			h := http.Header{}
			if err := sink.Head(200, h, length); err != nil {
				return Ending{SinkErr: err}
			}
			buf := make([]byte, most) // used again for each, as a transport does
			for rest := raw; rest != ""; {
				n := copy(buf[:1+r.Intn(most)], rest)
				rest = rest[n:]
				if err := sink.Body(buf[:n]); err != nil {
					return Ending{SinkErr: err}
				}
				clear(buf)
			}
			return Ending{Sent: Sent{Headers: true, Complete: true}, Status: 200, Header: h, Complete: true, Code: outcome.CodeNone, Framing: "chunked", Bytes: int64(len(raw))}
		}
		reply := b.Do(t.Context(), post("llm.example.test", "/", "{}"))
		if reply.Streamed {
			streamed++
		}
		got, err := io.ReadAll(reply.Body)
		if err != nil || string(got) != want {
			t.Fatalf("answer %d: %d bytes of %d, equal %v, %v", i, len(got), len(want), string(got) == want, err)
		}
		reply.HandedOver(nil)
		if err := b.Drain(t.Context()); err != nil {
			t.Fatal(err)
		}
		res, body, err := b.j.OpenResult(t.Context(), reply.ID)
		if err != nil {
			t.Fatal(err)
		}
		stored, err := io.ReadAll(body)
		if err != nil || string(stored) != want || res.Bytes != int64(len(want)) || res.Digest != sumText(sha256.Sum256(stored)) {
			t.Fatalf("answer %d: stored are %d bytes of %d, equal %v, %v, digest %s", i, len(stored), len(want), string(stored) == want, err, res.Digest)
		}
	}
	if streamed < 5 {
		t.Errorf("%d of 20 answers are streamed", streamed)
	}
}

// TestStreamStoreFails: a chunk that cannot be stored is not relayed, and breaks the stream.
func TestStreamStoreFails(t *testing.T) {
	contract.Covers(t, "H4", "H8")
	b := newBench(t)
	b.j.before = func(batch Batch) error {
		if len(batch.Chunks) > 0 && batch.Chunks[0].Index == 1 {
			return ErrNotWritten
		}
		return nil
	}
	b.tr.play = answerWith(200, strings.Repeat("x", 2<<20))
	r := b.Do(t.Context(), post("llm.example.test", "/", "{}"))
	got, err := io.ReadAll(r.Body)
	if err == nil || len(got) > MaxChunkBytes {
		t.Errorf("%d bytes, %v", len(got), err)
	}
	r.HandedOver(err)
	if err := b.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantFacts(t, b.j.last().Facts, outcome.ResultDelivery, outcome.Unknown, outcome.Reconcile, outcome.CodeResultStoreFailed)
}

// TestEndMarker: G13. The contract's marker denies completeness after framing and gives
// it before; without a contract it is text like any other.
func TestEndMarker(t *testing.T) {
	contract.Covers(t, "G13")
	for _, c := range []struct {
		name, host, body, coding string
		code                     outcome.Code // of the exchange
		want                     outcome.Code
	}{
		{"framed and marked", "marked", "data: 1\n\ndata: [DONE]\n\n", "", outcome.CodeNone, outcome.CodeNone},
		{"framed, not marked", "marked", "data: 1\n\ndata: 2\n\n", "", outcome.CodeNone, outcome.CodeRemoteResultIncomplete},
		{"marked in the middle only", "marked", "data: [DONE]\n\ndata: 2\n\n", "", outcome.CodeNone, outcome.CodeRemoteResultIncomplete},
		{"marked, then cut", "marked", "data: 1\n\ndata: [DONE]\n\n", "", outcome.CodeRemoteResultIncomplete, outcome.CodeNone},
		{"cut before the mark", "marked", "data: 1\n\n", "", outcome.CodeRemoteResultIncomplete, outcome.CodeRemoteResultIncomplete},
		{"marked, then too late", "marked", "data: [DONE]\n\n", "", outcome.CodeRemoteTimeout, outcome.CodeRemoteTimeout},
		{"encoded", "marked", "data: [DONE]\n\n", "gzip", outcome.CodeNone, outcome.CodeRemoteResultIncomplete},
		{"no contract", "llm", "data: [DONE]\n\n", "", outcome.CodeRemoteResultIncomplete, outcome.CodeRemoteResultIncomplete},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			f := newFeed("Content-Type", sse)
			if c.coding != "" {
				f.header.Set("Content-Encoding", c.coding)
			}
			f.end.Code = c.code
			b.tr.play = f.play
			r := b.Do(context.Background(), post(c.host+".example.test", "/v1/m", "{}"))
			f.pieces <- c.body[:5]
			f.pieces <- c.body[5:]
			close(f.pieces)
			_, err := io.ReadAll(r.Body)
			if (err == nil) != (c.want == outcome.CodeNone) {
				t.Errorf("%s: the stream ended with %v", c.name, err)
			}
			r.HandedOver(nil)
			synctest.Wait()
			rec := b.j.last()
			if rec.Facts.Code != c.want {
				t.Errorf("%s: %v, want %v", c.name, rec.Facts.Code, c.want)
			}
			if ev := rec.Evidence(); strings.HasPrefix(c.name, "framed, not") && ev.Reason != "end_marker_missing" {
				t.Errorf("%s: reason %q", c.name, ev.Reason)
			}
		})
	}
}
