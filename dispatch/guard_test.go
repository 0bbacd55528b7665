package dispatch

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"io"
	"net/url"
	"strings"
	"testing"
	"testing/synctest"

	"waybill/internal/contract"
	"waybill/outcome"
)

func gzipped(t *testing.T, s string) string {
	t.Helper()
	var b bytes.Buffer
	w := gzip.NewWriter(&b)
	if _, err := io.WriteString(w, s); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// TestReflectedSecret: LK-01, C5. What the origin echoes is masked at the same length
// before it is stored and delivered; what cannot be masked is withheld, and the
// outcome is kept.
func TestReflectedSecret(t *testing.T) {
	contract.Covers(t, "C5", "R4", "G12")
	b64 := base64.StdEncoding.EncodeToString([]byte("x" + testSecret))
	for _, c := range []struct {
		name, host string
		status     int
		body       string
		fields     []string
		blocked    bool
	}{
		{"clean", "pay", 200, `{"id":1}`, nil, false},
		{"body", "pay", 200, `{"auth":"Bearer ` + testSecret + `"}`, nil, false},
		{"base64", "pay", 200, `{"auth":"` + b64 + `"}`, nil, false},
		{"percent", "pay", 200, "a=" + url.QueryEscape(testSecret) + "&b=" + strings.ReplaceAll(testSecret, "-", "%2D"), nil, false},
		{"header", "pay", 200, "ok", []string{"X-Debug", "got Bearer " + testSecret}, false},
		{"location", "pay", 302, "", []string{"Location", "/v1/y?token=" + testSecret}, false},
		{"verbose refusal", "pay", 401, "bad token " + testSecret, nil, false},
		{"gzip, clean", "pay", 200, gzipped(t, `{"id":1}`), []string{"Content-Encoding", "gzip"}, false},
		{"gzip", "pay", 200, gzipped(t, "Bearer "+testSecret), []string{"Content-Encoding", "gzip"}, true},
		{"unknown coding", "pay", 200, "????", []string{"Content-Encoding", "rot13"}, true},
		{"not what it says", "pay", 200, "plain text, no gzip", []string{"Content-Encoding", "gzip"}, false},
		{"block, clean", "block", 200, `{"id":1}`, nil, false},
		{"block, body", "block", 200, testSecret, nil, true},
		{"block, header", "block", 500, "no", []string{"X-Debug", testSecret}, true},
		{"no secret on the route", "search", 200, "Bearer " + testSecret, nil, false},
	} {
		for _, pieces := range []int{1, 3} { // whole, and cut at every third byte
			b := newBench(t)
			b.tr.play = func(_ context.Context, _ *Outgoing, sink Sink) Ending {
				f := newFeed(c.fields...)
				f.status = c.status
				if err := sink.Head(c.status, f.header, int64(len(c.body))); err != nil {
					return Ending{SinkErr: err}
				}
				step := len(c.body)
				if pieces > 1 {
					step = 3
				}
				for rest := c.body; rest != ""; {
					n := min(step, len(rest))
					if err := sink.Body([]byte(rest[:n])); err != nil {
						return Ending{SinkErr: err}
					}
					rest = rest[n:]
				}
				return Ending{Status: c.status, Header: f.header, Bytes: int64(len(c.body)), Framing: "content_length", Complete: true}
			}
			r := b.Do(t.Context(), post(c.host+".example.test", "/v1/x", "a"))
			body := readBody(t, r)
			rec := b.j.last()
			want := statusFacts(c.status, &b.Binding().Snapshot.Route(c.host).Contract, rec.Repeatable(), false, outcome.Reconcile)
			if c.blocked {
				want = outcome.Facts{Phase: outcome.ResultDelivery, Outcome: want.Outcome, Retry: outcome.Never, Code: outcome.CodeResultContainsSecret}
				if r.Status != 422 || rec.Result != nil || r.Envelope == nil {
					t.Errorf("%s: %d, stored %v", c.name, r.Status, rec.Result != nil)
				}
			} else if r.Status != c.status || len(body) != len(c.body) || rec.Result == nil {
				t.Errorf("%s: %d, %d bytes of %d", c.name, r.Status, len(body), len(c.body))
			}
			if facts(r) != want {
				t.Errorf("%s: %+v, want %+v", c.name, facts(r), want)
			}
			if err := want.Validate(); err != nil {
				t.Errorf("%s: %v", c.name, err)
			}
			seen, err := json.Marshal(map[string]any{"answer": body, "header": r.Header, "records": b.j.records, "events": b.j.events, "chunks": b.j.chunks})
			if err != nil {
				t.Fatal(err)
			}
			if c.host != "search" {
				for _, form := range []string{testSecret, b64, url.QueryEscape(testSecret), strings.ReplaceAll(testSecret, "-", "%2D"), base64.StdEncoding.EncodeToString([]byte(c.body))} {
					if c.name == "clean" || strings.HasSuffix(c.name, ", clean") || form == "" || len(form) < 8 {
						continue
					}
					if form != base64.StdEncoding.EncodeToString([]byte(c.body)) && bytes.Contains(seen, []byte(form)) {
						t.Errorf("%s: the secret is in the answer or on record", c.name)
					}
				}
			}
			if ev := rec.Evidence(); (strings.Contains(body, "*") || strings.Contains(r.Header.Get("X-Debug")+r.Header.Get("Location"), "*")) != (ev.Redacted > 0) && !c.blocked {
				t.Errorf("%s: redacted %d, body %q", c.name, ev.Redacted, body)
			}
		}
	}
}

// TestSecretInParts: a caller that asks for parts of what holds the secret cannot put it together
// (C5): whatever two neighbours it is cut into, no eight bytes of it arrive. What cannot be searched
// by itself is withheld.
func TestSecretInParts(t *testing.T) {
	contract.Covers(t, "C5")
	whole := `{"self":"https://pay.example.test/?api_key=` + testSecret + `","id":7}`
	ask := func(host, body string, fields ...string) (string, *Reply) {
		b := newBench(t)
		b.tr.play = func(_ context.Context, _ *Outgoing, sink Sink) Ending {
			f := newFeed(fields...)
			if err := sink.Head(206, f.header, int64(len(body))); err != nil {
				return Ending{SinkErr: err}
			}
			for _, p := range strings.SplitAfter(body, "a") {
				if err := sink.Body([]byte(p)); err != nil {
					return Ending{SinkErr: err}
				}
			}
			return Ending{Status: 206, Header: f.header, Bytes: int64(len(body)), Framing: "content_length", Complete: true}
		}
		r := b.Do(t.Context(), post(host+".example.test", "/v1/x", "a"))
		return readBody(t, r), r
	}
	part := func(host string, from, to int) (string, *Reply) {
		return ask(host, whole[from:to], "Content-Range", fmt.Sprintf("bytes %d-%d/%d", from, to-1, len(whole)))
	}
	tells := func(s string) bool {
		for i := 0; i+tellable <= len(testSecret); i++ {
			if strings.Contains(s, testSecret[i:i+tellable]) {
				return true
			}
		}
		return false
	}
	at := strings.Index(whole, testSecret)
	for cut := at - 2; cut <= at+len(testSecret)+2; cut++ {
		for _, r := range [][2]int{{0, cut}, {cut, len(whole)}, {max(cut-12, 0), min(cut+12, len(whole))}} {
			if got, reply := part("pay", r[0], r[1]); tells(got) || reply.Status == 206 && len(got) != r[1]-r[0] {
				t.Errorf("bytes %d to %d: %q", r[0], r[1], got)
			}
		}
	}
	// Masked as long as it was: who asks for one byte wants to know the size.
	for _, r := range [][2]int{{at + 2, at + 3}, {at + 3, at + 10}} {
		if got, reply := part("pay", r[0], r[1]); reply.Status != 206 || strings.Trim(got, "*") != "" || len(got) != r[1]-r[0] || reply.Header.Get("Content-Range") == "" {
			t.Errorf("within it: %d %q", reply.Status, got)
		}
	}
	for _, c := range []struct {
		name string
		want bool // it arrives
		body string
		host string
		h    []string
	}{
		{"nothing of it", true, `{"self":"https://p`, "pay", []string{"Content-Range", "bytes 0-17/70"}},
		{"one byte that is none of it", true, "{", "pay", []string{"Content-Range", "bytes 0-0/70"}},
		{"two bytes within it, where it blocks", false, testSecret[3:5], "block", []string{"Content-Range", "bytes 40-41/70"}},
		{"a page of rows, encoded", true, gzipped(t, "clean"), "pay", []string{"Content-Encoding", "gzip", "Content-Range", "rows 0-24/*"}},
		{"a page of rows, encoded, with the secret", false, gzipped(t, whole), "pay", []string{"Content-Encoding", "gzip", "Content-Range", "rows 0-24/*"}},
		{"seven bytes within it, where it blocks", false, testSecret[3:10], "block", []string{"Content-Range", "bytes 40-46/70"}},
		{"its end, where it blocks", false, testSecret[2:] + `"}`, "block", []string{"Content-Range", "bytes 40-70/70"}},
		{"its beginning, where it blocks", false, `{"x":"` + testSecret[:9], "block", []string{"Content-Range", "bytes 0-14/70"}},
		{"several parts", false, "--x\r\n\r\n" + testSecret[:9] + "\r\n--x--", "pay", []string{"Content-Type", "multipart/byteranges; boundary=x"}},
		{"encoded", false, gzipped(t, whole)[10:], "pay", []string{"Content-Encoding", "gzip", "Content-Range", "bytes 10-99/100"}},
		{"all of it, encoded, and clean", true, gzipped(t, "clean"), "pay", []string{"Content-Encoding", "gzip", "Content-Range", fmt.Sprintf("bytes 0-%d/%d", len(gzipped(t, "clean"))-1, len(gzipped(t, "clean")))}},
		{"no secret on the route", true, testSecret[3:10], "search", []string{"Content-Range", "bytes 40-46/70"}},
	} {
		got, r := ask(c.host, c.body, c.h...)
		if arrived := r.Status == 206 && got == c.body; arrived != c.want || !arrived && (r.Envelope == nil || facts(r).Code != outcome.CodeResultContainsSecret) {
			t.Errorf("%s: %d %q", c.name, r.Status, got)
		}
	}
}

// TestReflectedSecretInAStream: nothing is held back without need, a secret cut by a
// chunk border is masked, and what cannot be masked breaks the stream.
func TestReflectedSecretInAStream(t *testing.T) {
	contract.Covers(t, "C5", "H5")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		f := newFeed("Content-Type", sse)
		b.tr.play = f.play
		r := b.Do(context.Background(), post("llm.example.test", "/v1/m", "{}"))
		f.pieces <- "data: 1\n\n"
		if got := read(t, r); got != "data: 1\n\n" {
			t.Errorf("%q", got)
		}
		f.pieces <- "data: Bearer " + testSecret[:9]
		f.pieces <- testSecret[9:] + "\n\n"
		close(f.pieces)
		rest, err := io.ReadAll(r.Body)
		if err != nil || strings.Contains(string(rest), "CANARY") || len(rest) != len("data: Bearer \n\n")+len(testSecret) {
			t.Errorf("%q %v", rest, err)
		}
		r.HandedOver(nil)
	})
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		f := newFeed("Content-Type", sse, "Content-Encoding", "gzip")
		b.tr.play = f.play
		r := b.Do(context.Background(), post("llm.example.test", "/v1/m", "{}"))
		f.pieces <- gzipped(t, "data: 1\n\n"+strings.Repeat("filler ", 10000)+"data: Bearer "+testSecret+"\n\n")
		close(f.pieces)
		if _, err := io.ReadAll(r.Body); err == nil {
			t.Error("a stream with a secret in it ended cleanly")
		}
		r.HandedOver(nil)
		synctest.Wait()
		wantFacts(t, b.j.last().Facts, outcome.ResultDelivery, outcome.Committed, outcome.Never, outcome.CodeResultContainsSecret)
	})
}
