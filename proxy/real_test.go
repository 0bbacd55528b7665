package proxy

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"waybill/dispatch"
	"waybill/dispatch/httpx"
	"waybill/inject"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/journal"
	"waybill/outcome"
	"waybill/routes"
)

// realBed is a bed with the real pipeline, transport and journal, and one origin,
// pay.example.test, whose route injects a secret.
type realBed struct {
	*bed
	up     *testkit.Upstream
	store  *journal.Journal
	secret *testkit.Canary
	slow   atomic.Pointer[testkit.Gate] // the origin holds its answer here; nil: it does not
}

func newRealBed(t *testing.T, def routes.Default) *realBed {
	t.Helper()
	pki := testkit.NewCA(t)
	r := &realBed{secret: testkit.NewCanary(t)}
	r.up = testkit.NewUpstream(t, testkit.UpstreamConfig{
		TLS: pki.Server("pay.example.test"),
		Handler: func(testkit.Arrival) []testkit.Step {
			charge := testkit.Reply(201, `{"id":"ch"}`, "Location", "/v1/charges/1", "Set-Cookie", "a=1", "Content-Type", "application/json")
			if g := r.slow.Load(); g != nil {
				return []testkit.Step{testkit.Hold(g), charge}
			}
			return []testkit.Step{charge}
		},
	})
	snap, err := routes.NewSnapshot([]routes.Route{{
		Name: "pay", Match: routes.Match{Hosts: []string{"pay.example.test"}, Paths: []string{"/v1/**"}},
		Inject:   []routes.Injection{{Header: "Authorization", Value: "Bearer ${secret}", Credential: "key"}},
		Upstream: routes.Upstream{RootsPEM: pki.PEM(), RootsOnly: true, Resolve: map[string]string{"pay.example.test": r.up.Addr()}},
	}}, def, nil)
	if err != nil {
		t.Fatal(err)
	}
	creds, err := inject.NewStore([]inject.Credential{{ID: "key", Label: "1", Source: inject.FileSource(r.secret.File(t))}})
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "journal")
	store, _, err := journal.Open(journal.Options{Dir: dir, AllowAnyFilesystem: true})
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
	r.store = store
	pipeline := dispatch.New(dispatch.Config{Journal: store, Transport: tr, Binding: &dispatch.Binding{Snapshot: snap, Credentials: creds}})
	r.bed = newBed(t, func(c *Config) { c.Pipeline, c.Journal = pipeline, store })
	return r
}

// last returns the newest record.
func (r *realBed) last(t *testing.T) dispatch.Record {
	t.Helper()
	for rec, err := range r.store.Actions(context.Background(), dispatch.Filter{Limit: 1}) {
		if err != nil {
			t.Fatal(err)
		}
		return rec
	}
	t.Fatal("no action on record")
	return dispatch.Record{}
}

// TestRealRequests carries requests on every way to a real origin: one arrival each,
// with the secret, nothing of the proxy's fields (HD-03), and the stored result is
// fetched again as it was (DL-03).
func TestRealRequests(t *testing.T) {
	contract.Covers(t, "G12", "H3", "V4")
	r := newRealBed(t, routes.Deny)
	user := url.UserPassword("agent", "toktok")
	for i, w := range ways {
		req, _ := http.NewRequest("POST", fmt.Sprintf("%s://pay.example.test/v1/charges?n=%d", w.scheme, i), strings.NewReader("x=1"))
		req.Header.Set("Authorization", "Bearer dummy")
		req.Header.Set("Waybill-Request-Id", fmt.Sprint("job-", i))
		if w.scheme == "https" {
			req.Header.Set("Proxy-Authorization", "Basic inner")
		}
		resp, err := r.client(user, w.h2).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		body, _ := io.ReadAll(resp.Body)
		id := resp.Header.Get("Waybill-Invocation")
		if resp.StatusCode != 201 || string(body) != `{"id":"ch"}` || id == "" || resp.Header.Get("Waybill-Outcome") != outcome.FormatOutcome(outcome.Success()) {
			t.Fatalf("%s: %d %v %s", w.name, resp.StatusCode, resp.Header, body)
		}
		for range 2 {
			a := r.as(user, reaches[1], "GET", "/v1/actions/"+id+"/result")
			if a.status != 201 || !bytes.Equal(a.body, body) || a.header.Get("Location") != "/v1/charges/1" || a.header.Get("Set-Cookie") != "a=1" || a.header.Get("Waybill-Invocation") != id {
				t.Errorf("%s: %+v", w.name, a)
			}
		}
		if a := r.as(nil, reaches[1], "GET", "/v1/actions/"+id+"/result"); a.status != 404 {
			t.Errorf("another caller got %d", a.status)
		}
		if a := r.as(user, reaches[1], "GET", "/v1/actions?request_id=job-"+fmt.Sprint(i)); !strings.Contains(string(a.body), id) {
			t.Errorf("by request id: %s", a.body)
		}
	}
	arrivals := r.up.Arrivals()
	if len(arrivals) != len(ways) {
		t.Fatalf("%d arrivals", len(arrivals))
	}
	for _, a := range arrivals {
		if v := a.Values("Authorization"); len(v) != 1 || v[0] != "Bearer "+r.secret.Value() {
			t.Errorf("%d Authorization fields", len(v))
		}
		for _, f := range a.Fields {
			if n := strings.ToLower(f.Name); strings.HasPrefix(n, "proxy-") || strings.HasPrefix(n, "waybill-") || n == "connection" {
				t.Errorf("%s reached the origin", f.Name)
			}
		}
		if string(a.Body) != "x=1" {
			t.Errorf("body %q", a.Body)
		}
	}
	testkit.Search(t, r.secret, testkit.InString("log", r.log.String()))
	if strings.Contains(r.log.String(), "toktok") {
		t.Error("the token is in the log")
	}
}

// TestRealRefusals are the cases that end here: one envelope, one record, no arrival.
func TestRealRefusals(t *testing.T) {
	contract.Covers(t, "B1", "B2", "M6")
	r := newRealBed(t, routes.Deny)
	outside := func(t *testing.T) net.Conn { return r.dial() }
	inside := func(connect, sni string) func(*testing.T) net.Conn {
		return func(t *testing.T) net.Conn { return r.tlsAny(r.connectTo(connect), sni) }
	}
	for _, c := range []struct {
		name, wire    string
		open          func(*testing.T) net.Conn
		fin           bool
		code          outcome.Code
		field, reason string
	}{
		{"ID-01 Host", "GET /v1/x HTTP/1.1\r\nHost: pay.example.test\r\n\r\n", inside("evil.example.test:443", "evil.example.test"), false, outcome.CodeInvalidTarget, "request.headers.host", "authority_mismatch"},
		{"ID-01 mirrored", "GET /v1/x HTTP/1.1\r\nHost: evil.example.test\r\n\r\n", inside("pay.example.test:443", "pay.example.test"), false, outcome.CodeInvalidTarget, "request.headers.host", "authority_mismatch"},
		{"ID-01 SNI", "GET /v1/x HTTP/1.1\r\nHost: pay.example.test\r\n\r\n", inside("pay.example.test:443", "evil.example.test"), false, outcome.CodeInvalidTarget, "tls.server_name", "authority_mismatch"},
		{"ID-03", "GET http://evil.example.test/v1/x HTTP/1.1\r\nHost: pay.example.test\r\n\r\n", outside, false, outcome.CodeInvalidTarget, "request.headers.host", "authority_mismatch"},
		{"ID-03 reversed", "GET http://pay.example.test/v1/x HTTP/1.1\r\nHost: evil.example.test\r\n\r\n", outside, false, outcome.CodeInvalidTarget, "request.headers.host", "authority_mismatch"},
		{"ID-03 port", "GET http://pay.example.test/v1/x HTTP/1.1\r\nHost: pay.example.test:81\r\n\r\n", outside, false, outcome.CodeInvalidTarget, "request.headers.host", "authority_mismatch"},
		{"UP-03 length", "POST http://pay.example.test/v1/x HTTP/1.1\r\n" + h11 + "Content-Length: 100\r\n\r\n{\"a\":1}", outside, true, outcome.CodeInvalidRequest, "request.body", "body_incomplete"},
		{"UP-03 chunked", "POST http://pay.example.test/v1/x HTTP/1.1\r\n" + h11 + "Transfer-Encoding: chunked\r\n\r\n7\r\n{\"a\":1}\r\n", outside, true, outcome.CodeInvalidRequest, "request.body", "body_incomplete"},
		{"UP-03 broken chunk", "POST http://pay.example.test/v1/x HTTP/1.1\r\n" + h11 + "Transfer-Encoding: chunked\r\n\r\nzz\r\n", outside, false, outcome.CodeInvalidRequest, "request.body", "body_incomplete"},
		{"HD-04 TRACE", "TRACE http://pay.example.test/v1/x HTTP/1.1\r\n" + h11 + "\r\n", outside, false, outcome.CodeUnsupportedAction, "request.method", ""},
		{"ST-03", "GET /v1/x HTTP/1.1\r\n" + h11 + "Connection: Upgrade\r\nUpgrade: websocket\r\n\r\n", inside("pay.example.test:443", "pay.example.test"), false, outcome.CodeUnsupportedAction, "request.headers.upgrade", ""},
		{"smuggling", "POST http://pay.example.test/v1/x HTTP/1.1\r\n" + h11 + "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", outside, false, outcome.CodeInvalidRequest, "request.headers.transfer-encoding", "te_and_length"},
		{"timeout field", "GET http://pay.example.test/v1/x HTTP/1.1\r\n" + h11 + "Waybill-Timeout: soon\r\n\r\n", outside, false, outcome.CodeInvalidRequest, "request.headers.waybill-timeout", "bad_timeout"},
		{"no route", "GET http://other.example.test/v1/x HTTP/1.1\r\nHost: other.example.test\r\n\r\n", outside, false, outcome.CodeRouteNotFound, "", ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			conn := c.open(t)
			if _, err := io.WriteString(conn, c.wire); err != nil {
				t.Fatal(err)
			}
			if c.fin {
				_ = conn.(*net.TCPConn).CloseWrite()
			}
			a := readAnswer(t, bufio.NewReader(conn), "GET")
			env := a.envelope(t)
			if env.Error.Code != c.code || env.Error.Phase != outcome.Validation || env.Error.Outcome != outcome.NotAttempted || env.Error.Retry != outcome.AfterCorrection {
				t.Errorf("%s", a.body)
			}
			if c.field != "" && env.Evidence.Field != c.field || c.reason != "" && env.Evidence.Reason != c.reason {
				t.Errorf("field %q, reason %q", env.Evidence.Field, env.Evidence.Reason)
			}
			if rec := r.last(t); rec.ID.String() != env.InvocationID || rec.Facts != env.Error.Facts() || rec.Caller != LocalCaller {
				t.Errorf("on record: %+v", rec)
			}
		})
	}
	if n := len(r.up.Arrivals()); n != 0 {
		t.Errorf("%d arrivals", n)
	}
}

// TestRealTunnel: with default: tunnel a destination that may not be dialled is a
// refused CONNECT, with the code in the reason phrase, and no tunnel on record.
func TestRealTunnel(t *testing.T) {
	contract.Covers(t, "V3")
	r := newRealBed(t, routes.Tunnel)
	c := r.dial()
	fmt.Fprintf(c, "CONNECT 127.0.0.1:1 HTTP/1.1\r\nHost: 127.0.0.1:1\r\n\r\n")
	a := readAnswer(t, bufio.NewReader(c), "GET")
	env := a.envelope(t)
	if env.Error.Code != outcome.CodeDestinationProhibited || a.status != 403 || a.reason != "DESTINATION_PROHIBITED "+env.InvocationID || a.header.Get("Connection") != "close" {
		t.Errorf("%+v %s", a, a.body)
	}
	if rec := r.last(t); rec.ID.String() != env.InvocationID || rec.Dispatched() {
		t.Errorf("on record: %+v", rec)
	}
}

// TestRealCallerLeaves is case DL-01: the caller hangs up while the origin works; the
// attempt goes on, the failed delivery is on record, and the result can be fetched.
func TestRealCallerLeaves(t *testing.T) {
	contract.Covers(t, "H2", "F5")
	r := newRealBed(t, routes.Deny)
	gate := testkit.NewGate(t)
	r.slow.Store(gate)
	conn := r.dial()
	fmt.Fprintf(conn, "POST http://pay.example.test/v1/x HTTP/1.1\r\n%sContent-Length: 1\r\n\r\nx", h11)
	gate.Await(t)
	_ = conn.Close()
	eventually(t, "nobody waits for the answer any more", func() bool { return r.p.inFlight.count() == 0 })
	gate.Open()
	eventually(t, "the failed delivery on record", func() bool {
		rec := r.last(t)
		return rec.Ended && rec.Result != nil && rec.Facts.Code == outcome.CodeDeliveryFailed
	})
	rec := r.last(t)
	if rec.LocalCause != "CALLER_CANCELLED" {
		t.Errorf("local cause %q", rec.LocalCause)
	}
	if f := rec.Facts; f.Phase != outcome.ResultDelivery || f.Outcome != outcome.Committed || f.Retry != outcome.FetchResult {
		t.Errorf("%+v", f)
	}
	if a := r.as(nil, reaches[0], "GET", "/v1/actions/"+rec.ID.String()+"/result"); a.status != 201 || string(a.body) != `{"id":"ch"}` {
		t.Errorf("%+v", a)
	}
	r.up.RequireCount(t, 1, "POST", "")
}
