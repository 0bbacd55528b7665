package proxy

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/dispatch/httpx"
	"waybill/inject"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/journal"
	"waybill/outcome"
	"waybill/routes"
)

// TestWithheldChunks: of a result that was withheld for a secret in it no part is given
// out, also not those that were stored before it came (C5).
func TestWithheldChunks(t *testing.T) {
	contract.Covers(t, "C5", "H4", "H10")
	b := newBed(t)
	id := newID()
	f := outcome.Facts{Phase: outcome.ResultDelivery, Outcome: outcome.Committed, Retry: outcome.Never, Code: outcome.CodeResultContainsSecret}
	events := append(accepted(LocalCaller, ""), dispatched(),
		dispatch.Event{Type: dispatch.ResponseComplete, Attempt: 1, At: time.Now(), Response: &dispatch.Response{Status: 200, Framing: "chunked"}},
		dispatch.Event{Type: dispatch.AttemptResolved, Attempt: 1, At: time.Now(), Ended: &dispatch.Ended{Facts: f}})
	if _, err := b.journal.Append(context.Background(), dispatch.Batch{Action: id, Events: events, Chunks: []dispatch.Chunk{{Attempt: 1, Data: []byte("withheld")}}}); err != nil {
		t.Fatal(err)
	}
	for _, after := range []string{"0", "1", "9"} {
		a := b.as(nil, reaches[0], "GET", "/v1/actions/"+id.String()+"/result?after_chunk="+after)
		if env := a.envelope(t); a.status != 422 || env.Error.Code != outcome.CodeResultContainsSecret || strings.Contains(string(a.body), "held\"") {
			t.Errorf("after %s: %d %s", after, a.status, a.body)
		}
	}
}

// TestNoChunkBehindTheLast: who asks for what is behind the end is not told that it has it all.
func TestNoChunkBehindTheLast(t *testing.T) {
	contract.Covers(t, "H4")
	b := newBed(t)
	id := b.journal.record(LocalCaller, 200, nil, []byte("x")) // one chunk
	for after, want := range map[string]int{"0": 206, "1": 206, "2": 400} {
		if a := b.as(nil, reaches[0], "GET", "/v1/actions/"+id.String()+"/result?after_chunk="+after); a.status != want {
			t.Errorf("after %s: %d", after, a.status)
		}
	}
}

// TestOldCallerSeesABreak: an answer with trailer fields goes to HTTP/1.0 without them and
// with its length, or its abnormal end would look like the end (H5, RFC 9112 §6.3).
func TestOldCallerSeesABreak(t *testing.T) {
	contract.Covers(t, "H5", "G3")
	b := newBed(t)
	for _, streamed := range []bool{false, true} {
		b.pipe.answer = func(context.Context, *seen) *dispatch.Reply {
			r := b.pipe.reply(200, nil, nil)
			r.Body = io.NopCloser(io.MultiReader(strings.NewReader("half"), errReader{io.ErrClosedPipe}))
			r.ContentLength, r.Streamed, r.Trailer = 8, streamed, http.Header{"X-Sum": {"1"}}
			return r
		}
		c := b.dial()
		fmt.Fprintf(c, "GET http://pay.example.test/ HTTP/1.0\r\nHost: pay.example.test\r\n\r\n")
		resp, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err == nil { // else not even a head: abnormal enough
			var body []byte
			if body, err = io.ReadAll(resp.Body); err == nil {
				t.Errorf("streamed %v: half a body ended cleanly: %q %v", streamed, body, resp.Header)
			}
		}
		eventually(t, "the hand-over", func() bool { return len(b.pipe.handovers()) == 1 })
	}
}

// TestRealHops: the real journal takes two dispatches in one action, and a real front
// ends what broke off abnormally for every kind of caller.
func TestRealHops(t *testing.T) {
	contract.Covers(t, "R1", "R2", "H5", "H9")
	pki := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: pki.Server("hop.example.test"), Handler: func(a testkit.Arrival) []testkit.Step {
		switch a.Target {
		case "/v1/moved":
			return []testkit.Step{testkit.Reply(303, "see there", "Location", "/v1/here")}
		case "/v1/lost":
			return []testkit.Step{testkit.Reply(307, "", "Location", "/v1/gone")}
		case "/v1/gone":
			return []testkit.Step{testkit.Close()}
		case "/v1/empty":
			return []testkit.Step{testkit.Reply(200, "", "Content-Type", "text/event-stream")}
		case "/v1/cut":
			return []testkit.Step{testkit.Write("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nContent-Length: 900\r\n\r\ndata: 1\n\n"), testkit.Close()}
		}
		return []testkit.Step{testkit.Reply(200, "here")}
	}})
	snap, err := routes.NewSnapshot([]routes.Route{{
		Name: "hop", Match: routes.Match{Hosts: []string{"hop.example.test"}, Paths: []string{"/v1/**"}}, Redirects: routes.RedirectsSameOrigin,
		Upstream: routes.Upstream{RootsPEM: pki.PEM(), RootsOnly: true, Resolve: map[string]string{"hop.example.test": up.Addr()}},
	}}, routes.Deny, nil)
	if err != nil {
		t.Fatal(err)
	}
	creds, err := inject.NewStore(nil)
	if err != nil {
		t.Fatal(err)
	}
	store, _, err := journal.Open(journal.Options{Dir: filepath.Join(t.TempDir(), "journal"), AllowAnyFilesystem: true})
	if err != nil {
		t.Fatal(err)
	}
	tr := httpx.New(httpx.Config{})
	t.Cleanup(func() {
		tr.Close()
		if err := store.Close(); err != nil {
			t.Errorf("journal: %v", err)
		}
	})
	pipeline := dispatch.New(dispatch.Config{Journal: store, Transport: tr, Binding: &dispatch.Binding{Snapshot: snap, Credentials: creds}})
	b := newBed(t, func(c *Config) { c.Pipeline, c.Journal = pipeline, store })
	last := func() (rec dispatch.Record) {
		for rec, err := range store.Actions(context.Background(), dispatch.Filter{Limit: 1}) {
			if err != nil {
				t.Fatal(err)
			}
			return rec
		}
		return rec
	}
	for _, w := range ways {
		for _, c := range []struct {
			path     string
			status   int
			body     string
			attempts int
			outcome  outcome.Outcome
			broken   bool
		}{
			{"/v1/moved", 200, "here", 2, outcome.Committed, false},
			{"/v1/lost", 424, "", 2, outcome.Unknown, false},
			{"/v1/empty", 200, "", 1, outcome.Committed, false},
			{"/v1/cut", 200, "data: 1\n\n", 1, outcome.Unknown, true},
		} {
			resp, err := b.client(nil, w.h2).Post(w.scheme+"://hop.example.test"+c.path, "text/plain", strings.NewReader(fmt.Sprint(w.name)))
			if err != nil {
				t.Fatalf("%s %s: %v", w.name, c.path, err)
			}
			body, err := io.ReadAll(resp.Body)
			rec := last()
			if resp.StatusCode != c.status || (err != nil) != c.broken || c.status == 200 && string(body) != c.body {
				t.Errorf("%s %s: %d %q %v", w.name, c.path, resp.StatusCode, body, err)
			}
			if len(rec.Attempts) != c.attempts || rec.Facts.Outcome != c.outcome {
				t.Errorf("%s %s: %d attempts, %+v", w.name, c.path, len(rec.Attempts), rec.Facts)
			}
			if c.path == "/v1/empty" && !strings.HasPrefix(resp.Header.Get("Waybill-Outcome"), "committed;") {
				t.Errorf("%s: ended before it was committed: %q", w.name, resp.Header.Get("Waybill-Outcome"))
			}
			if c.path == "/v1/cut" {
				// The same once more is another action.
				eventually(t, "the end on record", func() bool { return last().Ended })
			}
		}
	}
	c := b.dial()
	fmt.Fprintf(c, "GET http://hop.example.test/v1/cut HTTP/1.0\r\nHost: hop.example.test\r\nTE: trailers\r\n\r\n")
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err != nil {
		t.Fatal(err)
	}
	if body, err := io.ReadAll(resp.Body); err == nil {
		t.Errorf("HTTP/1.0: a stream that broke off ended cleanly: %q %v", body, resp.Header)
	}
	if _, err := store.Verify(context.Background()); err != nil {
		t.Error(err)
	}
}
