package dispatch

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"waybill/internal/contract"
	"waybill/outcome"
)

// TestNothingStreamedLooksWhole: an answer that its head alone completes is not streamed,
// and a caller of HTTP/1.0 keeps the length by which it sees an abnormal end.
func TestNothingStreamedLooksWhole(t *testing.T) {
	contract.Covers(t, "H5", "H9")
	b := newBench(t)
	b.tr.play = answerWith(200, "", "Content-Type", sse, "Content-Length", "0")
	r := b.Do(t.Context(), post("llm.example.test", "/v1/m", "{}"))
	if r.Streamed || facts(r) != outcome.Success() || r.Header.Get("Waybill-Outcome") != "committed;phase=remote_execution;retry=never" {
		t.Errorf("length 0: streamed %v, %+v", r.Streamed, facts(r))
	}

	b = newBench(t)
	b.tr.play = answerWith(200, "data: 1\n\n", "Content-Type", sse)
	s := post("llm.example.test", "/v1/m", "{}", "TE", "trailers")
	s.Protocol = "HTTP/1.0"
	if r = b.Do(t.Context(), s); r.Trailer != nil || r.ContentLength != 9 {
		t.Errorf("HTTP/1.0: trailer %v, length %d", r.Trailer, r.ContentLength)
	}
	if got := readBody(t, r); got != "data: 1\n\n" {
		t.Errorf("%q", got)
	}
}

// TestNoLastEventInADeclaredLength: it could fill the body up to its declared end.
func TestNoLastEventInADeclaredLength(t *testing.T) {
	contract.Covers(t, "H5", "H9")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		f := newFeed("Content-Type", sse)
		f.length, f.end.Code = 4096, outcome.CodeRemoteResultIncomplete
		b.tr.play = f.play
		r := b.Do(context.Background(), post("llm.example.test", "/v1/m", "{}"))
		f.pieces <- "data: 1\n\n"
		close(f.pieces)
		got, err := io.ReadAll(r.Body)
		if err == nil || string(got) != "data: 1\n\n" {
			t.Errorf("%q %v", got, err)
		}
		r.HandedOver(err)
	})
}

// TestShortByItsMarker: complete by its end marker, but shorter than the caller was
// told: the record is committed, the caller's answer ends abnormally.
func TestShortByItsMarker(t *testing.T) {
	contract.Covers(t, "G13", "H2", "H5")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		f := newFeed("Content-Type", sse)
		f.length, f.end.Code = 4096, outcome.CodeRemoteResultIncomplete
		b.tr.play = f.play
		r := b.Do(context.Background(), post("marked.example.test", "/v1/m", "{}"))
		f.pieces <- "data: [DONE]\n\n"
		close(f.pieces)
		_, err := io.ReadAll(r.Body)
		if err == nil {
			t.Error("ended cleanly, short of the declared length")
		}
		synctest.Wait()
		r.HandedOver(err)
		synctest.Wait()
		wantFacts(t, b.j.last().Facts, outcome.ResultDelivery, outcome.Committed, outcome.FetchResult, outcome.CodeDeliveryFailed)
	})
}

// TestTrailerBelongsToItsReader: the front looks at the trailer while the answer
// still arrives. The origin's own fields come with Waybill's (G12).
func TestTrailerBelongsToItsReader(t *testing.T) {
	contract.Covers(t, "H9", "G12")
	b := newBench(t)
	b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
		end := answerWith(200, "data: 1\n\n", "Content-Type", sse)(ctx, out, sink)
		end.Trailer = http.Header{"Grpc-Status": {"0"}, "X-Debug": {testSecret}, "Waybill-Outcome": {"rejected"}}
		return end
	}
	s := post("llm.example.test", "/v1/m", "{}")
	s.Protocol = "HTTP/2.0"
	r := b.Do(t.Context(), s)
	for range 100 {
		if len(r.Trailer) != 0 {
			t.Fatal("filled before the end was read")
		}
		time.Sleep(100 * time.Microsecond)
	}
	if _, err := io.ReadAll(r.Body); err != nil {
		t.Fatal(err)
	}
	if r.Trailer.Get("Grpc-Status") != "0" || strings.Contains(r.Trailer.Get("X-Debug"), "CANARY") || len(r.Trailer["Waybill-Outcome"]) != 1 || r.Trailer.Get("Waybill-Outcome") != "committed;phase=remote_execution;retry=never" {
		t.Errorf("%v", r.Trailer)
	}
}

// TestLeftBeforeTheHead: a caller that left before a streamed answer began has not got it.
func TestLeftBeforeTheHead(t *testing.T) {
	contract.Covers(t, "F5", "H2")
	for _, wait := range []time.Duration{0, time.Second} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			go1 := make(chan struct{})
			b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
				<-go1
				return answerWith(200, "data: 1\n\n", "Content-Type", sse)(ctx, out, sink)
			}
			ctx, cancel := context.WithCancel(context.Background())
			s := post("llm.example.test", "/v1/m", "{}")
			s.Wait = wait
			if wait == 0 {
				go func() { time.Sleep(time.Second); cancel() }()
			}
			b.Do(ctx, s)
			close(go1)
			synctest.Wait()
			cancel()
			rec := b.j.last()
			wantFacts(t, rec.Facts, outcome.ResultDelivery, outcome.Committed, outcome.FetchResult, outcome.CodeDeliveryFailed)
			if rec.LocalCause == "" {
				t.Error("no local cause")
			}
		})
	}
}

// TestPanicWhileStoringAStream ends the attempt, and nothing else.
func TestPanicWhileStoringAStream(t *testing.T) {
	contract.Covers(t, "C2", "H5")
	b := newBench(t)
	b.j.before = func(batch Batch) error {
		if len(batch.Chunks) > 0 && batch.Chunks[0].Index == 1 {
			panic("store " + testSecret)
		}
		return nil
	}
	b.tr.play = answerWith(200, strings.Repeat("x", 2<<20))
	r := b.Do(t.Context(), post("llm.example.test", "/", "{}"))
	if _, err := io.ReadAll(r.Body); err == nil {
		t.Error("ended cleanly")
	}
	if err := b.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	wantFacts(t, b.j.last().Facts, outcome.ResultDelivery, outcome.Unknown, outcome.Reconcile, outcome.CodeResultStoreFailed)
}

// TestEndMarkerAndTheScreen: what the screen holds back counts for the end marker, and a
// marker releases no piece of a secret.
func TestEndMarkerAndTheScreen(t *testing.T) {
	contract.Covers(t, "G13", "C5")
	for _, c := range []struct {
		name, body string
		code       outcome.Code
		committed  bool
	}{
		{"held back within the marker", "data: DONE" + testSecret[:1], outcome.CodeNone, true},
		{"cut in a secret behind the marker's line", "data: 1\n\ndata: DONEC\n\n" + testSecret[:15], outcome.CodeRemoteResultIncomplete, false},
		{"cut in a secret on the marker's line", "data: 1\n\ndata: DONEC " + testSecret[:15], outcome.CodeRemoteResultIncomplete, true},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			f := newFeed("Content-Type", sse)
			f.end.Code = c.code
			b.tr.play = f.play
			r := b.Do(context.Background(), post("ended.example.test", "/v1/m", "{}"))
			f.pieces <- c.body
			close(f.pieces)
			got, err := io.ReadAll(r.Body)
			r.HandedOver(err)
			synctest.Wait()
			rec := b.j.last()
			if (rec.Facts.Outcome == outcome.Committed) != c.committed || (err == nil) != c.committed {
				t.Errorf("%s: %+v, %v", c.name, rec.Facts, err)
			}
			all, _ := json.Marshal(map[string]any{"got": string(got), "chunks": b.j.chunks[rec.ID]})
			for _, chunk := range b.j.chunks[rec.ID] {
				all = append(all, chunk...)
			}
			if strings.Contains(string(all), testSecret[:8]) {
				t.Errorf("%s: a piece of the secret: %s", c.name, all)
			}
		})
	}
	b := newBench(t)
	b.tr.play = answerWith(204, "")
	if r := b.Do(t.Context(), post("ended.example.test", "/v1/m", "{}")); facts(r) != outcome.Success() {
		t.Errorf("204: %+v", facts(r))
	}
}

// TestBlockedHeadIsNotStreamed: what is withheld already is not begun.
func TestBlockedHeadIsNotStreamed(t *testing.T) {
	contract.Covers(t, "C5")
	for host, fields := range map[string][]string{"block": {"X-Debug", testSecret}, "llm": {"Content-Encoding", "rot13"}} {
		b := newBench(t)
		b.tr.play = answerWith(200, "data: 1\n\n", append(fields, "Content-Type", sse)...)
		r := b.Do(t.Context(), post(host+".example.test", "/v1/m", "{}"))
		if r.Streamed || r.Status != 422 {
			t.Errorf("%s: streamed %v, %d", host, r.Streamed, r.Status)
		}
	}
}

// TestNoDigestOfASecret: with the rest of a body known, its digest is a way to try secrets
// out on; where one was in it, the digest is that of what is stored, or there is none.
func TestNoDigestOfASecret(t *testing.T) {
	contract.Covers(t, "C2", "C5", "L4")
	for host, want := range map[string]string{"pay": strings.Repeat("*", len(testSecret)), "block": "", "search": testSecret} {
		b := newBench(t)
		b.tr.play = answerWith(200, testSecret)
		b.Do(t.Context(), post(host+".example.test", "/v1/x", "{}"))
		if want != "" {
			h := sha256.New()
			h.Write([]byte(want))
			want = digestText(h)
		}
		last := b.j.last()
		if got := last.Deciding().Response.Digest; got != want {
			t.Errorf("%s: %q, want %q", host, got, want)
		}
	}
}

// TestSecretInProxyStatus: an intermediary's word that holds an encoded secret is no evidence.
func TestSecretInProxyStatus(t *testing.T) {
	contract.Covers(t, "C5", "L4")
	for _, form := range []string{testSecret, base64.StdEncoding.EncodeToString([]byte("xy" + testSecret)), strings.ReplaceAll(testSecret, "-", "%2D"), strings.Repeat("x", 495) + base64.StdEncoding.EncodeToString([]byte(testSecret))} {
		b := newBench(t)
		b.tr.play = answerWith(502, "no", "Proxy-Status", `hop; details="`+form+`"`)
		b.Do(t.Context(), post("pay.example.test", "/v1/x", "{}"))
		last := b.j.last()
		if p := last.Deciding().Response; p.ProxyStatus != "" || p.Hop != "intermediary" {
			t.Errorf("%+v", p)
		}
	}
}

// TestSecretInAnInterimAnswer: masked, and on blocking routes not passed on.
func TestSecretInAnInterimAnswer(t *testing.T) {
	contract.Covers(t, "C5", "G4")
	for host, want := range map[string]int{"pay": 1, "block": 0} {
		b := newBench(t)
		b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
			sink.Informational(103, http.Header{"X-Debug": {testSecret}})
			return answerWith(200, "ok")(ctx, out, sink)
		}
		s := post(host+".example.test", "/v1/x", "{}")
		n := 0
		s.Informational = func(_ int, h http.Header) {
			n++
			if strings.Contains(h.Get("X-Debug"), "CANARY") {
				t.Errorf("%v", h)
			}
		}
		if r := b.Do(t.Context(), s); n != want || facts(r) != outcome.Success() {
			t.Errorf("%s: %d passed on, %+v", host, n, facts(r))
		}
	}
}

// TestRedirectsAsClientsReadThem: R3. What a client makes of a Location is recognised,
// not only its exact bytes.
func TestRedirectsAsClientsReadThem(t *testing.T) {
	contract.Covers(t, "R3", "R4", "C5")
	for _, c := range []struct {
		name      string
		locations []string
		follow    *Submission
	}{
		{"masked", []string{"https://key.example.test/steal?x=" + testSecret}, get("https", "key.example.test", "/steal", "x="+strings.Repeat("*", len(testSecret)))},
		{"masked, escaped by the client", []string{"https://key.example.test/steal?x=" + testSecret}, get("https", "key.example.test", "/steal", "x="+strings.Repeat("%2A", len(testSecret)))},
		{"dot segments", []string{"https://key.example.test/a/./../steal"}, get("https", "key.example.test", "/steal", "")},
		{"encoded dot segments", []string{"https://key.example.test/a/%2e%2E/steal"}, get("https", "key.example.test", "/steal", "")},
		{"unreserved bytes encoded", []string{"https://key.example.test/st%65al?%78=1"}, get("https", "key.example.test", "/steal", "x=1")},
		{"a blank", []string{"https://key.example.test/st eal?a b"}, get("https", "key.example.test", "/st%20eal", "a%20b")},
		{"outside ASCII", []string{"https://key.example.test/st\u00e9al"}, get("https", "key.example.test", "/st%C3%83%C2%A9al", "")},
		{"an empty query", []string{"https://key.example.test/steal?"}, get("https", "key.example.test", "/steal", "")},
		{"backslashes in the path", []string{`https://key.example.test/a\..\steal`}, get("https", "key.example.test", "/steal", "")},
		{"http, upgraded by the client", []string{"http://key.example.test/steal"}, get("https", "key.example.test", "/steal", "")},
		{"http, upgraded by the route", []string{"http://key.example.test/steal"}, get("http", "key.example.test", "/steal", "")},
		{"one slash", []string{"https:/key.example.test/steal"}, get("https", "key.example.test", "/steal", "")},
		{"three slashes", []string{"https:///key.example.test/steal"}, get("https", "key.example.test", "/steal", "")},
		{"no slashes, another scheme", []string{"http:key.example.test/steal"}, get("https", "key.example.test", "/steal", "")},
		{"three slashes, no scheme", []string{"///key.example.test/steal"}, get("https", "key.example.test", "/steal", "")},
		{"a tab", []string{"https://key.exa\tmple.test/steal"}, get("https", "key.example.test", "/steal", "")},
		{"port with a zero", []string{"https://key.example.test:0443/steal"}, get("https", "key.example.test", "/steal", "")},
		{"no port after the colon", []string{"https://key.example.test:/steal"}, get("https", "key.example.test", "/steal", "")},
		{"encoded host", []string{"https://key%2Eexample.test/steal"}, get("https", "key.example.test", "/steal", "")},
		{"full-width host", []string{"https://\uff4bey\u3002example.test/steal"}, get("https", "key.example.test", "/steal", "")},
		{"several", []string{"https://key.example.test/steal", "https://search.example.test/"}, get("https", "key.example.test", "/steal", "")},
	} {
		b := newBench(t)
		b.tr.play = func(_ context.Context, _ *Outgoing, sink Sink) Ending {
			h := http.Header{"Location": c.locations}
			if err := sink.Head(302, h, 0); err != nil {
				return Ending{SinkErr: err}
			}
			return Ending{Status: 302, Header: h, Complete: true, Framing: "content_length"}
		}
		r := b.Do(t.Context(), get("https", "pay.example.test", "/v1/x", ""))
		if n := len(r.Header["Location"]); n != 1 {
			t.Errorf("%s: %d Location fields", c.name, n)
		}
		b.tr.play = answerWith(200, "ok")
		if r := b.Do(t.Context(), c.follow); facts(r).Code != outcome.CodeRedirectCrossOrigin || b.tr.count() != 1 {
			t.Errorf("%s: the credential left: %+v", c.name, facts(r))
		}
	}
	for host, want := range map[string]string{"0x7f.1": "127.0.0.1", "2130706433": "127.0.0.1", "017700000001": "127.0.0.1", "10.0.0.7:0080": "10.0.0.7:80", "1.2.3.4.5": "1.2.3.4.5", "a.b": "a.b", "[::1]:0": "[::1]", "256.1.1.1": "256.1.1.1", "": ""} {
		if got := mended(host); got != want {
			t.Errorf("%q: %q, want %q", host, got, want)
		}
	}
}

// TestAmbiguousLocation: one that two clients send to two hosts is not relayed.
func TestAmbiguousLocation(t *testing.T) {
	contract.Covers(t, "R3")
	for loc, kept := range map[string]bool{
		`https://evil.example.test\@key.example.test/steal`: false, `//evil.example.test\a@key.example.test`: false,
		`https://u@key.example.test/a\@b`: true, `https://key.example.test/steal?a=\@b`: true, "/a@b": true, `/a\@b`: true, `\\key.example.test\steal`: true,
	} {
		b := newBench(t)
		b.tr.play = answerWith(302, "", "Location", loc)
		r := b.Do(t.Context(), get("https", "pay.example.test", "/v1/x", ""))
		if got := r.Header["Location"]; r.Status != 302 || (len(got) == 1) != kept {
			t.Errorf("%s: %d %q", loc, r.Status, got)
		}
	}
}

// TestHopRestsAsItsMethodAllows: E3 holds for a hop, too.
func TestHopRestsAsItsMethodAllows(t *testing.T) {
	contract.Covers(t, "E3", "R2")
	for status, want := range map[int]time.Duration{307: restUnsafe, 303: restRepeatable} {
		b := newBench(t)
		b.tr.play = hops(status, "/v1/y")
		b.Do(t.Context(), post("hop.example.test", "/v1/x", "{}"))
		if len(b.tr.orders) != 2 || b.tr.orders[1].MaxRest != want {
			t.Errorf("%d: %+v", status, b.tr.orders)
		}
	}
}

// TestDowngradeIsNoTrap: after a redirect to plain http of its own host the https address
// is still the caller's to use.
func TestDowngradeIsNoTrap(t *testing.T) {
	contract.Covers(t, "R3", "R4")
	b := newBench(t)
	b.tr.play = answerWith(302, "", "Location", "http://pay.example.test/v1/y")
	b.Do(t.Context(), get("https", "pay.example.test", "/v1/x", ""))
	b.tr.play = answerWith(200, "ok")
	if r := b.Do(t.Context(), get("http", "pay.example.test", "/v1/y", "")); facts(r).Code != outcome.CodeRedirectCrossOrigin {
		t.Errorf("%+v", facts(r))
	}
	if r := b.Do(t.Context(), get("https", "pay.example.test", "/v1/y", "")); facts(r) != outcome.Success() {
		t.Errorf("%+v", facts(r))
	}
}

// TestRedirectOfARelaxedRoute: its record is there before the caller can follow it.
func TestRedirectOfARelaxedRoute(t *testing.T) {
	contract.Covers(t, "R3", "F1")
	b := newBench(t)
	b.j.lag = true
	b.tr.play = answerWith(302, "", "Location", "https://key.example.test/steal")
	if r := b.Do(t.Context(), get("https", "relaxed.example.test", "/x", "")); r.Status != 302 {
		t.Fatalf("%d", r.Status)
	}
	b.tr.play = answerWith(200, "ok")
	if r := b.Do(t.Context(), get("https", "key.example.test", "/steal", "")); facts(r).Code != outcome.CodeRedirectCrossOrigin {
		t.Errorf("%+v", facts(r))
	}
}

// TestRelaxedStreamWaitsForItsMarker: also when nothing of it was stored before (H9).
func TestRelaxedStreamWaitsForItsMarker(t *testing.T) {
	contract.Covers(t, "H9", "F1")
	b := newBench(t)
	b.j.lag = true
	b.tr.play = func(_ context.Context, _ *Outgoing, sink Sink) Ending {
		h := http.Header{"Content-Type": {sse}}
		if err := sink.Head(200, h, -1); err != nil {
			return Ending{SinkErr: err}
		}
		return Ending{Status: 200, Header: h, Complete: true, Framing: "chunked"}
	}
	r := b.Do(t.Context(), post("relaxed.example.test", "/x", "{}"))
	if got := readBody(t, r); got != "" || !r.Streamed {
		t.Errorf("%q", got)
	}
	if rec := b.j.last(); rec.Result == nil {
		t.Errorf("the stream ended before its marker was durable: %+v", rec.Facts)
	}
}

// TestFollowWhileTheCallerLeaves is for the race detector, and a try that failed is on
// record however the action ends (E7).
func TestFollowWhileTheCallerLeaves(t *testing.T) {
	contract.Covers(t, "F5", "R2", "E7")
	b := newBench(t)
	b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
		time.Sleep(time.Millisecond)
		return answerWith(307, "", "Location", "/v1/x")(ctx, out, sink)
	}
	for i := range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Duration(i)*500*time.Microsecond)
		s := post("hop.example.test", "/v1/x", "{}")
		s.Method = "PUT"
		b.Do(ctx, s)
		cancel()
	}
	b = newBench(t)
	b.tr.connect = func(n int) error {
		if n == 2 {
			return &SetupError{Code: outcome.CodeConnectionRefused, Stage: outcome.StageDNS, Reason: "connection_refused"}
		}
		return nil
	}
	b.tr.play = answerWith(307, gzipped(t, testSecret), "Location", "/v1/y", "Content-Encoding", "gzip")
	r := b.Do(t.Context(), post("hop.example.test", "/v1/x", "{}"))
	if rec := b.j.last(); rec.Facts.Code != outcome.CodeResultContainsSecret || len(rec.Attempts) != 2 || r.Status != 422 {
		t.Errorf("%+v %+v", rec.Facts, rec.Attempts)
	}
	for _, loc := range []string{"", " "} {
		b = newBench(t)
		b.tr.play = answerWith(307, "", "Location", loc)
		if r := b.Do(t.Context(), post("hop.example.test", "/v1/x", "{}")); r.Status != 307 || b.tr.count() != 1 {
			t.Errorf("Location %q: %d requests", loc, b.tr.count())
		}
	}
}

// TestCrashBetweenHops: what was handed over last decides after a restart (M2, M4), also
// when only the witness knows of it (M5) – unless the redirect had ended the request, and only
// what came of it was asked for (R1, G5).
func TestCrashBetweenHops(t *testing.T) {
	contract.Covers(t, "R1", "M2", "M4", "M5")
	for _, status := range []int{307, 303} {
		b := newBench(t)
		b.tr.play = hops(status, "/v1/y")
		b.Do(t.Context(), post("hop.example.test", "/v1/x", "{}"))
		rec := b.j.last()
		events := b.j.events[rec.ID]
		for n := range events {
			var r Record
			var err error
			started := 0
			for i := range events[:n+1] {
				if r, err = Apply(r, &events[i].Event, events[i].Seq); err != nil {
					t.Fatal(err)
				}
				if events[i].Type == DispatchStarted {
					started++
				}
			}
			if ev, open := Interrupt(&r, testTime); open {
				if r, err = Apply(r, &ev, 1000); err != nil {
					t.Fatalf("after %s: %v", events[n].Type, err)
				}
			}
			want, decides := outcome.NotAttempted, 2
			switch {
			case n == len(events)-1, started == 1 && events[n].Type == AttemptResolved: // not a state on disk: one batch
				want = outcome.Committed
			case started == 2 && status == 303:
				want, decides = outcome.Committed, 1
			case started > 0:
				want = outcome.Unknown
			}
			if r.Facts.Outcome != want || started == 2 && r.Deciding().N != decides {
				t.Errorf("%d, after %s of attempt %d: %v, want %v", status, events[n].Type, events[n].Attempt, r.Facts.Outcome, want)
			}
			if started == 1 && events[n].Type == AttemptResolved {
				lost := LostAction(2, testTime)
				if r, err = Apply(r, &lost, 1001); err != nil || (r.Facts.Outcome != outcome.Unknown || !r.GuardsRepeats()) != (status == 303) {
					t.Errorf("%d, lost: %+v %v", status, r.Facts, err)
				}
			}
		}
	}
}
