package proxy

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/outcome"
)

// reach is one of the ways a caller reaches the caller API.
type reach struct {
	name string
	base func(b *bed) string
	via  bool // through the proxy, not to it
	h2   bool
}

var reaches = []reach{
	{"origin-form", func(b *bed) string { return "http://" + b.addr }, false, false},
	{"waybill.internal", func(*bed) string { return "http://waybill.internal" }, true, false},
	{"https waybill.internal", func(*bed) string { return "https://waybill.internal" }, true, false},
	{"https waybill.internal h2", func(*bed) string { return "https://Waybill.Internal" }, true, true},
}

// as sends a request to the caller API.
func (b *bed) as(user *url.Userinfo, w reach, method, path string, header ...string) answer {
	b.t.Helper()
	req, err := http.NewRequest(method, w.base(b)+path, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	for i := 0; i < len(header); i += 2 {
		req.Header.Set(header[i], header[i+1])
		if header[i] == "Host" {
			req.Host = header[i+1]
		}
	}
	client := b.client(user, w.h2)
	if !w.via {
		tr := &http.Transport{DisableCompression: true}
		b.t.Cleanup(tr.CloseIdleConnections)
		client = &http.Client{Transport: tr, Timeout: 20 * time.Second}
		if user != nil {
			password, _ := user.Password()
			req.SetBasicAuth(user.Username(), password)
		}
	}
	client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	resp, err := client.Do(req)
	if err != nil {
		b.t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		b.t.Fatal(err)
	}
	return answer{resp.StatusCode, resp.Header, body, ""}
}

// callerOf returns the id that credentials get.
func (b *bed) callerOf(user *url.Userinfo) string {
	b.t.Helper()
	password, _ := user.Password()
	c, ok := b.p.callers.Authenticate(user.Username(), password, loopback)
	if !ok {
		b.t.Fatal("not a caller")
	}
	return c.ID
}

// TestFetchResult is case DL-03: same bytes, any number of times, only for its owner,
// and nothing is executed (CONTRACT H3, H10, M7, V4).
func TestFetchResult(t *testing.T) {
	contract.Covers(t, "H3", "H10", "M7", "V4")
	b := newBed(t)
	owner, other := url.UserPassword("agent", "one"), url.UserPassword("agent", "two")
	body := bytes.Repeat([]byte("\x1f\x8bresult"), 40000)
	stored := map[string][]string{
		"Location": {"https://pay.example.test/v1/charges/1"}, "Content-Encoding": {"gzip"}, "Set-Cookie": {"a=1", "b=2"}, "Content-Type": {"application/json"},
		"Transfer-Encoding": {"chunked"}, "Content-Length": {"7"}, "Waybill-Outcome": {"forged"}, "Proxy-Status": {"edge;error=dns_error, waybill;error=connection_refused"}, "Connection": {"close"},
	}
	id := b.journal.record(b.callerOf(owner), http.StatusCreated, stored, body)
	for _, w := range reaches {
		t.Run(w.name, func(t *testing.T) {
			for range 2 {
				a := b.as(owner, w, "GET", "/v1/actions/"+id.String()+"/result")
				if a.status != 201 || !bytes.Equal(a.body, body) {
					t.Fatalf("%d, %d bytes", a.status, len(a.body))
				}
				h := a.header
				if h.Get("Location") != stored["Location"][0] || h.Get("Content-Encoding") != "gzip" || len(h["Set-Cookie"]) != 2 || h.Get("Content-Type") != "application/json" ||
					h.Get("Content-Length") != fmt.Sprint(len(body)) || h.Get("Waybill-Invocation") != id.String() || h.Get("Waybill-Outcome") != outcome.FormatOutcome(outcome.Success()) {
					t.Errorf("%v", h)
				}
				if ps := h.Get("Proxy-Status"); ps != "edge;error=dns_error, waybill;received-status=201" {
					t.Errorf("Proxy-Status %q", ps)
				}
			}
			b.pipe.mu.Lock()
			if n := len(b.pipe.relayed); n < 2 || b.pipe.relayed[n-1] != id {
				t.Errorf("the pipeline was told of %v", b.pipe.relayed)
			}
			b.pipe.mu.Unlock()
			theirs := b.as(other, w, "GET", "/v1/actions/"+id.String()+"/result")
			nobody := b.as(other, w, "GET", "/v1/actions/"+newID().String()+"/result")
			junk := b.as(other, w, "GET", "/v1/actions/act_1/result")
			for _, a := range []answer{theirs, nobody, junk} {
				env := a.envelope(t)
				if a.status != 404 || env.Error.Code != outcome.CodeActionNotFound || env.Error.Outcome == outcome.NotAttempted || !bytes.Equal(a.body, nobody.body) {
					t.Errorf("%d %s", a.status, a.body)
				}
				a.header.Del("Date")
				nobody.header.Del("Date")
				if fmt.Sprint(a.header) != fmt.Sprint(nobody.header) {
					t.Errorf("the answers differ: %v, %v", a.header, nobody.header)
				}
			}
			for _, path := range []string{"", "/events", "/ack"} {
				method := "GET"
				if path == "/ack" {
					method = "POST"
				}
				if a := b.as(other, w, method, "/v1/actions/"+id.String()+path); a.status == 200 {
					t.Errorf("%s of another caller: %s", path, a.body)
				}
			}
		})
	}
	b.journal.dropped[id] = true
	a := b.as(owner, reaches[0], "GET", "/v1/actions/"+id.String()+"/result")
	if env := a.envelope(t); a.status != 410 || env.Error.Code != outcome.CodeResultExpired || env.Error.Phase != outcome.ResultDelivery || env.Error.Outcome != outcome.Committed || env.Error.Retry != outcome.Never {
		t.Errorf("%d %s", a.status, a.body)
	}
	if s := b.pipe.requests(); len(s) != 0 {
		t.Errorf("a fetch was submitted: %+v", s)
	}
}

// TestNoResult: without a complete result a fetch gives the envelope, never a 200.
func TestNoResult(t *testing.T) {
	contract.Covers(t, "H10")
	b := newBed(t)
	add := func(events ...dispatch.Event) dispatch.ActionID {
		id := newID()
		if _, err := b.journal.Append(context.Background(), dispatch.Batch{Action: id, Events: append(accepted(LocalCaller, ""), events...)}); err != nil {
			t.Fatal(err)
		}
		return id
	}
	ended := func(typ dispatch.EventType, f outcome.Facts) dispatch.Event {
		return dispatch.Event{Type: typ, Attempt: 1, At: time.Now(), Ended: &dispatch.Ended{Facts: f}}
	}
	unknown := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteOutcomeUnknown}
	refused, _ := outcome.Of(outcome.CodeConnectionRefused)
	denied, _ := outcome.Of(outcome.CodeRemoteRefused)
	for _, c := range []struct {
		name   string
		id     dispatch.ActionID
		status int
		code   outcome.Code
	}{
		{"running", add(dispatched()), 202, outcome.CodeResultPending},
		{"not yet dispatched", add(), 202, outcome.CodeResultPending},
		{"unknown", add(dispatched(), ended(dispatch.AttemptResolved, unknown)), 424, outcome.CodeRemoteOutcomeUnknown},
		{"never dispatched", add(ended(dispatch.ActionRefused, refused)), 502, outcome.CodeConnectionRefused},
		{"refused by the protocol", add(dispatched(), ended(dispatch.AttemptResolved, denied)), 503, outcome.CodeRemoteRefused},
	} {
		t.Run(c.name, func(t *testing.T) {
			a := b.as(nil, reaches[0], "GET", "/v1/actions/"+c.id.String()+"/result")
			env := a.envelope(t)
			if a.status != c.status || env.Error.Code != c.code || env.InvocationID != c.id.String() {
				t.Errorf("%d %s", a.status, a.body)
			}
			if c.status == 202 && a.header.Get("Retry-After") == "" {
				t.Error("no Retry-After")
			}
			if a := b.as(nil, reaches[0], "POST", "/v1/actions/"+c.id.String()+"/ack"); a.status == 200 {
				t.Errorf("acknowledged: %s", a.body)
			}
		})
	}
}

// TestBrokenResult: a result that cannot be read to its end never looks whole.
func TestBrokenResult(t *testing.T) {
	b := newBed(t)
	id := b.journal.record(LocalCaller, 200, nil, []byte("0123456789"))
	b.journal.failBody = errors.New("damaged")
	c := b.dial()
	fmt.Fprintf(c, "GET /v1/actions/%s/result HTTP/1.1\r\nHost: %s\r\n\r\n", id, b.addr)
	resp, err := http.ReadResponse(bufio.NewReader(c), nil)
	if err == nil {
		_, err = io.ReadAll(resp.Body)
	}
	if err == nil {
		t.Error("half a result was delivered as a whole one")
	}
	if l := b.log.String(); strings.Contains(l, "panic") {
		t.Errorf("log: %s", l)
	}
}

// TestUnreadableJournal: what cannot be read is not "not found" and not "not attempted".
func TestUnreadableJournal(t *testing.T) {
	contract.Covers(t, "M7")
	b := newBed(t)
	id := b.journal.record(LocalCaller, 200, nil, nil)
	for _, fail := range []error{errors.New("disk"), dispatch.ErrQuarantined} {
		b.journal.fail = fail
		for _, path := range []string{"/v1/actions/" + id.String(), "/v1/actions/" + id.String() + "/result", "/v1/actions"} {
			a := b.as(nil, reaches[0], "GET", path)
			if env := a.envelope(t); a.status != 424 || env.Error.Outcome != outcome.Unknown || env.Error.Retry != outcome.Reconcile {
				t.Errorf("%v %s: %d %s", fail, path, a.status, a.body)
			}
		}
	}
}

// TestAck is CONTRACT H6: only an explicit acknowledgement records the delivery, once.
func TestAck(t *testing.T) {
	contract.Covers(t, "H6")
	b := newBed(t)
	id := b.journal.record(LocalCaller, 200, nil, []byte("x"))
	path := "/v1/actions/" + id.String()
	delivered := func() bool {
		rec, err := b.journal.Action(context.Background(), id)
		return err == nil && rec.Delivered
	}
	b.as(nil, reaches[0], "GET", path+"/result")
	b.as(nil, reaches[0], "GET", path+"/ack")
	if delivered() {
		t.Fatal("delivered without an acknowledgement")
	}
	before := len(b.journal.events[id])
	b.journal.fail = nil
	for range 2 {
		a := b.as(nil, reaches[0], "POST", path+"/ack")
		var got shown
		if err := json.Unmarshal(a.body, &got); a.status != 200 || err != nil || !got.Action.Delivered || got.Action.InvocationID != id.String() {
			t.Errorf("%d %s %v", a.status, a.body, err)
		}
	}
	if !delivered() || len(b.journal.events[id]) != before+1 {
		t.Errorf("%d events", len(b.journal.events[id])-before)
	}
	if a := b.as(nil, reaches[0], "GET", path+"/result"); a.status != 200 || string(a.body) != "x" {
		t.Errorf("after the acknowledgement: %d %s", a.status, a.body)
	}
}

// failingAppend lets reads through and refuses writes.
type failingAppend struct{ *fakeJournal }

func (failingAppend) Append(context.Context, dispatch.Batch) (dispatch.Receipt, error) {
	return dispatch.Receipt{}, dispatch.ErrNotWritten
}

// TestAckNotRecorded: an acknowledgement that fails does not change what is known.
func TestAckNotRecorded(t *testing.T) {
	b := newBed(t)
	id := b.journal.record(LocalCaller, 200, nil, []byte("x"))
	b.p.journal = failingAppend{b.journal}
	a := b.as(nil, reaches[0], "POST", "/v1/actions/"+id.String()+"/ack")
	if env := a.envelope(t); a.status != 422 || env.Error.Outcome != outcome.Committed || env.Error.Code != outcome.CodeInternal {
		t.Errorf("%d %s", a.status, a.body)
	}
}

// TestListOwn: a list holds the caller's own actions, by request id if asked.
func TestListOwn(t *testing.T) {
	contract.Covers(t, "V4")
	b := newBed(t)
	for _, c := range []string{"job-1", "job-2"} {
		if _, err := b.journal.Append(context.Background(), dispatch.Batch{Action: newID(), Events: accepted(LocalCaller, c)}); err != nil {
			t.Fatal(err)
		}
	}
	b.journal.record("somebody", 200, nil, nil)
	lines := func(path string) []dispatch.ActionView {
		t.Helper()
		a := b.as(nil, reaches[1], "GET", path)
		if a.status != 200 || a.header.Get("Content-Type") != "application/x-ndjson" || a.header.Get("Cache-Control") != "no-store" {
			t.Fatalf("%s: %d %v %s", path, a.status, a.header, a.body)
		}
		var out []dispatch.ActionView
		dec := json.NewDecoder(bytes.NewReader(a.body))
		for dec.More() {
			var v dispatch.ActionView
			if err := dec.Decode(&v); err != nil {
				t.Fatal(err)
			}
			out = append(out, v)
		}
		return out
	}
	if got := lines("/v1/actions"); len(got) != 2 {
		t.Errorf("%+v", got)
	}
	if got := lines("/v1/actions?request_id=job-1"); len(got) != 1 || got[0].RequestID != "job-1" {
		t.Errorf("%+v", got)
	}
	if got := lines("/v1/actions?request_id=nothing"); len(got) != 0 {
		t.Errorf("%+v", got)
	}
	for _, bad := range []string{"?caller=somebody", "?outcome=fine", "?limit=-1", "?request_id=a&request_id=b", "?x=y", "?since=now", "?%zz"} {
		a := b.as(nil, reaches[1], "GET", "/v1/actions"+bad)
		if env := a.envelope(t); a.status != 400 || env.Error.Code != outcome.CodeInvalidRequest {
			t.Errorf("%s: %d %s", bad, a.status, a.body)
		}
	}
}

// TestOtherResources answers what is not there, or not yet, with an envelope.
func TestOtherResources(t *testing.T) {
	b := newBed(t)
	id := b.journal.record(LocalCaller, 200, nil, []byte("x"))
	for _, c := range []struct {
		method, path string
		status       int
	}{
		{"GET", "/", 400}, {"GET", "/v2/actions", 400}, {"GET", "/v1/actionsx", 400}, {"GET", "/v1/actions/", 404}, {"GET", "/v1/actions/a/b/c", 400},
		{"DELETE", "/v1/actions", 422}, {"POST", "/v1/actions/" + id.String(), 422}, {"PUT", "/v1/actions/" + id.String() + "/result", 422},
		{"POST", "/v1/actions/" + id.String() + "/retry", 422}, {"POST", "/v1/actions/" + id.String() + "/reconcile", 422},
		{"GET", "/v1/actions/" + id.String() + "/events", 400}, {"GET", "/v1/actions/" + id.String() + "/result?after_chunk=x", 400},
		{"GET", "/v1/tail", 400}, {"GET", "/v1/status", 400}, {"POST", "/v1/sessions", 400},
	} {
		a := b.as(nil, reaches[0], c.method, c.path)
		if env := a.envelope(t); a.status != c.status || env.InvocationID != "" {
			t.Errorf("%s %s: %d %s", c.method, c.path, a.status, a.body)
		}
	}
	if a := b.as(nil, reaches[0], "HEAD", "/v1/actions/"+id.String()); a.status != 200 || len(a.body) != 0 {
		t.Errorf("HEAD: %+v", a)
	}
	if a := b.as(nil, reaches[0], "HEAD", "/v1/actions/"+id.String()+"/result"); a.status != 200 || a.header.Get("Content-Length") != "1" {
		t.Errorf("HEAD: %+v", a)
	}
	c := b.dial()
	_, _ = io.WriteString(c, "OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n")
	if a := readAnswer(t, bufio.NewReader(c), "OPTIONS"); a.status != 400 {
		t.Errorf("OPTIONS *: %+v", a)
	}
}

// TestBrowsersKeptOut is CONTRACT V5: a page cannot drive the caller API, whatever
// name it gives to the address.
func TestBrowsersKeptOut(t *testing.T) {
	contract.Covers(t, "V5")
	b := newBed(t)
	id := b.journal.record(LocalCaller, 200, nil, []byte("x"))
	_, port, _ := net.SplitHostPort(b.addr)
	for _, c := range []struct {
		name   string
		header []string
		ok     bool
	}{
		{"plain", nil, true},
		{"localhost", []string{"Host", "localhost:" + port}, true},
		{"internal name", []string{"Host", "WAYBILL.internal."}, true},
		{"own origin", []string{"Origin", "http://" + b.addr, "Sec-Fetch-Site", "same-origin"}, true},
		{"typed in", []string{"Sec-Fetch-Site", "none"}, true},
		{"rebound name", []string{"Host", "evil.example.test"}, false},
		{"rebound name with port", []string{"Host", "evil.example.test:" + port}, false},
		{"other port", []string{"Host", "localhost:1"}, false},
		{"other address", []string{"Host", "127.0.0.2:" + port}, false},
		{"other origin", []string{"Origin", "http://evil.example.test"}, false},
		{"no origin to speak of", []string{"Origin", "null"}, false},
		{"cross-site", []string{"Sec-Fetch-Site", "cross-site"}, false},
		{"same-site", []string{"Sec-Fetch-Site", "same-site"}, false},
		{"suffix", []string{"Host", "waybill.internal.evil.test"}, false},
	} {
		for _, w := range reaches[:2] {
			if w.via && len(c.header) > 0 && c.header[0] == "Host" {
				continue // the name is the target there
			}
			a := b.as(nil, w, "POST", "/v1/actions/"+id.String()+"/ack", c.header...)
			if (a.status == 200) != c.ok {
				t.Errorf("%s, %s: %d %s", c.name, w.name, a.status, a.body)
			}
			if !c.ok {
				if env := a.envelope(t); a.status != 403 || env.Error.Code != outcome.CodePolicyDenied {
					t.Errorf("%s: %d %s", c.name, a.status, a.body)
				}
			}
			for k := range a.header {
				if strings.HasPrefix(k, "Access-Control-") {
					t.Errorf("%s: %s", c.name, k)
				}
			}
		}
	}
}

// TestStoredAnswersAreInert: a page that an origin sent does not run as one of Waybill's own
// when its stored answer is opened in a browser, whatever its fields say (CONTRACT V5).
func TestStoredAnswersAreInert(t *testing.T) {
	contract.Covers(t, "V5")
	b := newBed(t)
	const page = "<script>fetch('/v1/actions')</script>"
	id := b.journal.record(LocalCaller, 200, map[string][]string{
		"Content-Type": {"text/html"}, "content-security-policy": {"sandbox allow-scripts allow-same-origin", "default-src *"}, "X-Content-Type-Options": {"sniff, nosniff"},
	}, []byte(page))
	bare := b.journal.record(LocalCaller, 200, nil, []byte(page))
	admin := b.admin(t)
	check := func(what string, a answer) {
		t.Helper()
		policies := a.header["Content-Security-Policy"]
		if len(policies) == 0 || policies[len(policies)-1] != inertPolicy || strings.Contains(inertPolicy, "allow-") {
			t.Errorf("%s: policies %q", what, policies)
		}
		if got := a.header["X-Content-Type-Options"]; !slices.Equal(got, []string{"nosniff"}) {
			t.Errorf("%s: X-Content-Type-Options %q", what, got)
		}
	}
	for _, id := range []dispatch.ActionID{id, bare} {
		for _, query := range []string{"", "?after_chunk=0"} {
			path := "/v1/actions/" + id.String() + "/result" + query
			for _, w := range reaches {
				a := b.as(nil, w, "GET", path)
				if a.status != 200 && a.status != 206 || len(a.body) == 0 || !strings.HasPrefix(page, string(a.body)) {
					t.Errorf("%s: %d %s", w.name, a.status, a.body)
				}
				check(w.name+" "+path, a)
			}
			check("admin "+path, admin("GET", path, ""))
		}
	}
	// What the origin said of its page is there to be read.
	if got := b.as(nil, reaches[0], "GET", "/v1/actions/"+id.String()+"/result").header["Content-Security-Policy"]; len(got) != 3 {
		t.Errorf("policies %q", got)
	}
}

// admin sends a request to the admin API over a unix socket.
func (b *bed) admin(t *testing.T) func(method, path, body string, header ...string) answer {
	t.Helper()
	path := filepath.Join(t.TempDir(), "admin.sock")
	ln, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	srv := b.p.AdminServer()
	go func() { _ = srv.Serve(ln) }()
	t.Cleanup(func() { _ = srv.Close() })
	tr := &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) { return net.Dial("unix", path) }}
	t.Cleanup(tr.CloseIdleConnections)
	client := &http.Client{Transport: tr, Timeout: 10 * time.Second}
	return func(method, path, body string, header ...string) answer {
		t.Helper()
		req, err := http.NewRequest(method, "http://waybill"+path, strings.NewReader(body))
		if err != nil {
			t.Fatal(err)
		}
		for i := 0; i < len(header); i += 2 {
			req.Header.Set(header[i], header[i+1])
			if header[i] == "Host" {
				req.Host = header[i+1]
			}
		}
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = resp.Body.Close() }()
		raw, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return answer{resp.StatusCode, resp.Header, raw, ""}
	}
}

// TestAdmin sees every caller's actions, opens and closes sessions, and keeps pages out.
func TestAdmin(t *testing.T) {
	contract.Covers(t, "V5")
	b := newBed(t, func(c *Config) {
		c.Admin = Admin{
			Status:        func() any { return map[string]any{"pid": 1} },
			JournalStats:  func(context.Context) (any, error) { return map[string]any{"sequence": 7}, nil },
			JournalVerify: func(context.Context) (any, error) { return nil, errors.New("damaged") },
		}
	})
	do := b.admin(t)
	mine, theirs := b.journal.record("one", 200, nil, []byte("x")), b.journal.record("two", 500, nil, []byte("y"))
	if a := do("GET", "/v1/actions", ""); strings.Count(string(a.body), "\n") != 2 {
		t.Errorf("%s", a.body)
	}
	if a := do("GET", "/v1/actions?caller=two&outcome=committed&limit=5", ""); !strings.Contains(string(a.body), theirs.String()) || strings.Contains(string(a.body), mine.String()) {
		t.Errorf("%s", a.body)
	}
	if a := do("GET", "/v1/actions/"+mine.String()+"/events", ""); !strings.Contains(string(a.body), "DISPATCH_STARTED") {
		t.Errorf("%s", a.body)
	}
	if a := do("GET", "/v1/actions/"+theirs.String()+"/result", ""); a.status != 500 || string(a.body) != "y" {
		t.Errorf("%d %s", a.status, a.body)
	}
	for path, want := range map[string]int{"/v1/status": 200, "/v1/journal/stats": 200, "/v1/journal/verify": 424, "/v1/nothing": 400, "/v1/sessions/ses_0": 422} {
		if a := do("GET", path, ""); a.status != want {
			t.Errorf("%s: %d %s", path, a.status, a.body)
		}
	}
	for _, h := range [][]string{{"Host", "evil.example.test"}, {"Origin", "http://waybill"}, {"Sec-Fetch-Site", "cross-site"}} {
		if a := do("GET", "/v1/actions", "", h...); a.status != 403 {
			t.Errorf("%v: %d", h, a.status)
		}
	}

	a := do("POST", "/v1/sessions", `{"name":"agent"}`)
	var s opened
	if err := json.Unmarshal(a.body, &s); err != nil || a.status != 201 {
		t.Fatalf("%d %s %v", a.status, a.body, err)
	}
	u, err := url.Parse(s.ProxyURL)
	if err != nil || u.Host != b.addr {
		t.Fatalf("%q %v", s.ProxyURL, err)
	}
	resp, err := b.client(u.User, false).Get("http://pay.example.test/")
	if err != nil || resp.StatusCode != 200 {
		t.Fatalf("%v %v", resp, err)
	}
	if r := b.pipe.requests(); r[0].Caller != (dispatch.Caller{ID: "session:" + s.ID, Name: "agent", Session: s.ID}) {
		t.Errorf("%+v", r[0].Caller)
	}
	b.journal.record("session:"+s.ID, 200, nil, nil)
	b.journal.record("session:"+s.ID, 200, nil, nil)
	inTunnel := b.client(u.User, true)
	if resp, err := inTunnel.Get("https://pay.example.test/"); err != nil || resp.StatusCode != 200 {
		t.Fatalf("%v %v", resp, err)
	}
	if a := do("GET", "/v1/sessions", ""); !strings.Contains(string(a.body), s.ID) || strings.Contains(string(a.body), s.Token) {
		t.Errorf("%s", a.body)
	}
	a = do("DELETE", "/v1/sessions/"+s.ID, "")
	var sum struct{ Actions []SessionSummary }
	if err := json.Unmarshal(a.body, &sum); err != nil || len(sum.Actions) != 1 || sum.Actions[0].Count != 2 || sum.Actions[0].Route != "pay" || sum.Actions[0].Outcome != outcome.Committed {
		t.Errorf("%s %v", a.body, err)
	}
	if resp, err := b.client(u.User, false).Get("http://pay.example.test/"); err != nil || resp.StatusCode != 407 {
		t.Errorf("after the end of the session: %v %v", resp, err)
	}
	b.pipe.requests()
	if resp, err := inTunnel.Get("https://pay.example.test/"); err != nil || resp.StatusCode != 403 || len(b.pipe.requests()) != 0 {
		t.Errorf("a tunnel outlives its session: %v %v", resp, err)
	}
	for _, bad := range []string{`{"name":"a b"}`, `{"nam":"a"}`, `{`, `{"name":"` + strings.Repeat("x", 100) + `"}`} {
		if a := do("POST", "/v1/sessions", bad); a.status != 400 {
			t.Errorf("%s: %d %s", bad, a.status, a.body)
		}
	}
	if a := do("DELETE", "/v1/sessions/"+s.ID, ""); a.status != 400 {
		t.Errorf("closed twice: %d", a.status)
	}
	if strings.Contains(b.log.String(), s.Token) {
		t.Error("the token is in the log")
	}
}

// TestTail shows actions as they change, and lets go of the journal when the reader leaves.
func TestTail(t *testing.T) {
	b := newBed(t)
	srv := httptest.NewServer(b.p.AdminHandler())
	t.Cleanup(srv.Close)
	ctx, cancel := context.WithCancel(context.Background())
	req, _ := http.NewRequestWithContext(ctx, "GET", srv.URL+"/v1/tail", nil)
	req.Host = "localhost"
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = resp.Body.Close() }()
	eventually(t, "the watch", func() bool { return b.journal.watching() == 1 })
	id := b.journal.record("one", 200, nil, nil)
	line, err := bufio.NewReader(resp.Body).ReadString('\n')
	if err != nil || !strings.Contains(line, id.String()) {
		t.Errorf("%q %v", line, err)
	}
	cancel()
	eventually(t, "the watch is over", func() bool { return b.journal.watching() == 0 })
}

// TestHealth serves what probes ask.
func TestHealth(t *testing.T) {
	ready := errors.New("journal is behind its witness")
	h := HealthHandler(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "m 1\n") }), nil, func() error { return ready })
	for path, want := range map[string]int{"/livez": 200, "/readyz": 503, "/metrics": 200, "/x": 404} {
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest("GET", path, nil))
		if w.Code != want {
			t.Errorf("%s: %d %s", path, w.Code, w.Body)
		}
	}
}

// breaking is a pipeline whose further attempts panic.
type breaking struct{ *scripted }

func (breaking) RetryKept(context.Context, dispatch.ActionID, time.Duration) *dispatch.Reply {
	panic("secret-in-a-panic")
}

// TestPanicOfAnAttempt: an attempt that panicked may have been dispatched; nobody is told that it
// was not (M2, L7).
func TestPanicOfAnAttempt(t *testing.T) {
	contract.Covers(t, "L7", "M2", "C2")
	b := newBed(t, func(c *Config) { c.Pipeline = breaking{c.Pipeline.(*scripted)} })
	owner := url.UserPassword("agent", "one")
	id := b.journal.record(b.callerOf(owner), http.StatusServiceUnavailable, nil, nil)
	for _, w := range reaches {
		a := b.as(owner, w, "POST", "/v1/actions/"+id.String()+"/retry")
		env := a.envelope(t)
		if a.status != 424 || env.Error.Code != outcome.CodeInternal || env.Error.Outcome != outcome.Unknown || env.Error.Retry != outcome.Reconcile || env.InvocationID != id.String() {
			t.Errorf("%s: %d %s", w.name, a.status, a.body)
		}
	}
	if l := b.log.String(); strings.Contains(l, "secret-in-a-panic") || !strings.Contains(l, "panic in an attempt") {
		t.Errorf("log: %s", l)
	}
}
