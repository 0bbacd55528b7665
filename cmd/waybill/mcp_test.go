package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/modelcontextprotocol/go-sdk/mcp"
	"github.com/santhosh-tekuri/jsonschema/v6"

	"waybill/client"
	"waybill/configs"
	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/control"
	"waybill/internal/testkit"
	"waybill/outcome"
)

// newMCPBed is newRunBed whose commands are the binary as it is shipped: the test binary,
// built with -race, starts slowly, and what these tests race against is in this process.
func newMCPBed(t *testing.T) *runBed {
	t.Helper()
	build := testkit.BuildOptions{}
	if control.Tags != "" {
		build.Tags = []string{control.Tags}
	}
	t.Setenv("PATH", filepath.Dir(testkit.BinaryWith(t, build))+string(os.PathListSeparator)+os.Getenv("PATH"))
	return newRunBed(t, "")
}

// ended waits until the action of a request id is on record and has ended.
func (b *runBed) ended(requestID string) {
	b.t.Helper()
	testkit.Eventually(b.t, func() error {
		c, err := dialAdmin(b.t.Context(), filepath.Join(b.dir, "data", "admin.sock"))
		if err != nil {
			return err
		}
		defer func() { _ = c.Close() }()
		for v, err := range c.Actions(b.t.Context(), dispatch.Filter{RequestID: requestID}) {
			if err != nil {
				return err
			}
			if v.Ended {
				return nil
			}
		}
		return errors.New("no record, or not ended")
	})
}

// mcpHost plays an MCP host: the SDK's client, the messages it was sent, and the
// process behind it, if there is one.
type mcpHost struct {
	t        *testing.T
	session  *mcp.ClientSession
	cmd      *exec.Cmd
	stdin    io.WriteCloser
	stdout   io.ReadCloser
	stderr   *bytes.Buffer
	tools    map[string]*mcp.Tool
	mu       sync.Mutex
	progress []string
}

func (h *mcpHost) options() *mcp.ClientOptions {
	return &mcp.ClientOptions{ProgressNotificationHandler: func(_ context.Context, r *mcp.ProgressNotificationClientRequest) {
		h.mu.Lock()
		defer h.mu.Unlock()
		h.progress = append(h.progress, r.Params.Message)
	}}
}

func (h *mcpHost) connect(tr mcp.Transport) {
	h.t.Helper()
	var err error
	if h.session, err = mcp.NewClient(&mcp.Implementation{Name: "host", Version: "1"}, h.options()).Connect(h.t.Context(), tr, nil); err != nil {
		h.t.Fatal(err)
	}
	h.tools = map[string]*mcp.Tool{}
	for tool, err := range h.session.Tools(h.t.Context(), nil) {
		if err != nil {
			h.t.Fatal(err)
		}
		h.tools[tool.Name] = tool
	}
}

// stdio starts "waybill mcp" and connects over its pipes.
func (b *runBed) stdio(args ...string) *mcpHost {
	b.t.Helper()
	h := &mcpHost{t: b.t, stderr: &bytes.Buffer{}}
	h.cmd = b.command(append([]string{"mcp", "--" + allowAnyFilesystem}, args...)...)
	h.cmd.Stderr = h.stderr
	var err error
	if h.stdin, err = h.cmd.StdinPipe(); err != nil {
		b.t.Fatal(err)
	}
	if h.stdout, err = h.cmd.StdoutPipe(); err != nil {
		b.t.Fatal(err)
	}
	if err := h.cmd.Start(); err != nil {
		b.t.Fatal(err)
	}
	h.connect(&mcp.IOTransport{Reader: h.stdout, Writer: h.stdin})
	b.t.Cleanup(func() {
		_ = h.cmd.Process.Kill()
		_ = h.cmd.Wait() // an error where the test has waited already
		if strings.Contains(h.stderr.String(), runSecret) {
			b.t.Error("standard error holds the secret")
		}
	})
	return h
}

// inProcess connects to tools in this process, which go through the running proxy.
func (b *runBed) inProcess(every time.Duration) *mcpHost {
	b.t.Helper()
	a := &app{stdin: strings.NewReader(""), stdout: io.Discard, stderr: io.Discard, environ: b.env}
	data := filepath.Join(b.dir, "data")
	admin, err := a.running(b.t.Context(), data)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { _ = admin.Close() })
	c, err := a.mcpClient(b.t.Context(), &joined{client: admin}, data, "mcp")
	if err != nil {
		b.t.Fatal(err)
	}
	near, far := mcp.NewInMemoryTransports()
	s, err := (&mcpTools{client: c, caller: "mcp", snapshot: a.loadSnapshot, progressEvery: every}).server().Connect(b.t.Context(), far, nil)
	if err != nil {
		b.t.Fatal(err)
	}
	h := &mcpHost{t: b.t}
	h.connect(near)
	b.t.Cleanup(func() { _ = h.session.Close(); _ = s.Wait() })
	return h
}

// called is a tool's result, checked against the tool's own schema.
type called struct {
	failed bool
	text   string
	raw    json.RawMessage
	answer
	envelope  *outcome.Envelope
	requestID string
}

func (h *mcpHost) call(name string, args map[string]any) *called {
	h.t.Helper()
	out, err := h.try(h.t.Context(), name, args)
	if err != nil {
		h.t.Fatalf("%s: %v", name, err)
	}
	return out
}

func (h *mcpHost) try(ctx context.Context, name string, args map[string]any) (*called, error) {
	h.t.Helper()
	p := &mcp.CallToolParams{Name: name, Arguments: args}
	p.SetProgressToken(name)
	res, err := h.session.CallTool(ctx, p)
	if err != nil {
		return nil, err
	}
	raw, err := json.Marshal(res.StructuredContent)
	if err != nil {
		h.t.Fatal(err)
	}
	validate(h.t, name+" output", h.tools[name].OutputSchema, raw)
	out := &called{failed: res.IsError, raw: raw}
	if err := json.Unmarshal(raw, &out.answer); err != nil {
		h.t.Fatal(err)
	}
	var f failed
	if json.Unmarshal(raw, &f) == nil && len(out.Envelope) > 0 {
		out.envelope = &f.Envelope
		shipped, err := jsonschema.UnmarshalJSON(bytes.NewReader(configs.EnvelopeSchema))
		if err != nil {
			h.t.Fatal(err)
		}
		validate(h.t, "envelope", shipped, out.Envelope)
	}
	out.requestID = f.RequestID
	for _, c := range res.Content {
		if tc, ok := c.(*mcp.TextContent); ok {
			out.text += tc.Text + "\n"
		}
	}
	if strings.Contains(string(raw)+out.text, runSecret) {
		h.t.Errorf("%s: the answer holds the secret", name)
	}
	return out, nil
}

func validate(t *testing.T, what string, schema any, raw []byte) {
	t.Helper()
	doc, err := json.Marshal(schema)
	if err != nil {
		t.Fatal(err)
	}
	parsed, err := jsonschema.UnmarshalJSON(bytes.NewReader(doc))
	if err != nil {
		t.Fatal(err)
	}
	c := jsonschema.NewCompiler()
	if err := c.AddResource("mem://schema", parsed); err != nil {
		t.Fatal(err)
	}
	s, err := c.Compile("mem://schema")
	if err != nil {
		t.Fatalf("%s: schema: %v", what, err)
	}
	v, err := jsonschema.UnmarshalJSON(bytes.NewReader(raw))
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Validate(v); err != nil {
		t.Errorf("%s does not fit its schema: %v\n%s", what, err, raw)
	}
}

// TestMCPTools: every tool, in this process and over stdio with the real binary, with a
// proxy that runs and one that the command starts.
func TestMCPTools(t *testing.T) {
	contract.Covers(t, "L6", "O5", "L8", "C2")
	for _, how := range []string{"in process", "stdio, joined", "stdio, alone"} {
		t.Run(how, func(t *testing.T) {
			b := newMCPBed(t)
			var h *mcpHost
			switch how {
			case "in process":
				b.serve()
				h = b.inProcess(time.Second)
			case "stdio, joined":
				b.serve()
				h = b.stdio()
			default:
				h = b.stdio()
			}
			h.annotations()
			origin := "https://" + runHost

			// An answer of the origin.
			got := h.call("http_request", map[string]any{"method": "POST", "url": origin + "/v1/x", "body": "amount=5", "headers": map[string]any{"X-Extra": "1"}})
			if got.failed || got.Status != 200 || got.Body == nil || *got.Body != "hello" || got.BodyBytes != 5 || got.Outcome != "committed" || got.Retry != "never" || got.InvocationID == "" || got.Submissions != 1 {
				t.Fatalf("%s", got.raw)
			}
			if seen := b.arrivals(); len(seen) != 1 || seen[0] != "POST /v1/x Bearer "+runSecret {
				t.Errorf("the upstream saw %q", seen)
			}
			again := h.call("fetch_result", map[string]any{"invocation_id": got.InvocationID})
			if again.failed || again.Status != 200 || *again.Body != "hello" || again.InvocationID != got.InvocationID {
				t.Errorf("%s", again.raw)
			}
			part := h.call("fetch_result", map[string]any{"invocation_id": got.InvocationID, "offset": 1, "max_body_bytes": 2})
			if part.failed || *part.Body != "el" || part.NextOffset != 3 || part.BodyBytes != 5 || !strings.Contains(part.text, "part of the body") {
				t.Errorf("%s %s", part.raw, part.text)
			}

			// A failure that Waybill answers: the envelope, as it is on record.
			cut := h.call("http_request", map[string]any{"method": "POST", "url": origin + "/cut", "body": "x", "request_id": "mine-1"})
			want := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Reconcile, Code: outcome.CodeRemoteOutcomeUnknown}
			if !cut.failed || cut.envelope == nil || cut.envelope.Facts() != want || cut.requestID != "mine-1" || !strings.HasPrefix(cut.text, "Outcome unknown: do not repeat; reconcile "+cut.envelope.InvocationID) {
				t.Fatalf("%s\n%s", cut.raw, cut.text)
			}
			for _, args := range []map[string]any{{"request_id": "mine-1"}, {"invocation_id": cut.envelope.InvocationID}} {
				rec := h.call("get_action", args)
				if rec.failed || rec.envelope == nil || rec.envelope.Facts() != want || string(rec.Envelope) != string(cut.Envelope) {
					t.Errorf("on record\n%s\nanswered\n%s", rec.Envelope, cut.Envelope)
				}
			}
			dup := h.call("http_request", map[string]any{"method": "POST", "url": origin + "/cut", "body": "x"})
			if !dup.failed || dup.envelope.Facts().Code != outcome.CodeDuplicateSuspected || dup.envelope.Evidence.EarlierAction != cut.envelope.InvocationID {
				t.Errorf("%s", dup.raw)
			}
			if n := len(b.arrivals()); n != 2 {
				t.Errorf("%d arrivals", n)
			}
			unsafe := h.call("http_request", map[string]any{"method": "POST", "url": origin + "/cut", "body": "x", "unsafe_repeat": map[string]any{"invocation_id": cut.envelope.InvocationID, "reason": "looked: nothing there"}})
			if n := len(b.arrivals()); n != 3 || unsafe.envelope.Facts().Code != outcome.CodeRemoteOutcomeUnknown {
				t.Errorf("%d arrivals, %s", n, unsafe.raw)
			}

			// A refusal, and what is no success of the origin's.
			none := h.call("http_request", map[string]any{"url": "https://elsewhere.example.test/"})
			if !none.failed || none.envelope.Facts().Code != outcome.CodeRouteNotFound || none.envelope.Facts().Outcome != outcome.NotAttempted {
				t.Errorf("%s", none.raw)
			}
			if res := h.call("fetch_result", map[string]any{"invocation_id": cut.envelope.InvocationID}); !res.failed || res.envelope.Facts() != want {
				t.Errorf("%s", res.raw)
			}
			for _, name := range []string{"get_action", "fetch_result"} {
				if res := h.call(name, map[string]any{"invocation_id": "act_01JD0000000000000000000000"}); !res.failed || res.envelope.Facts().Code != outcome.CodeActionNotFound {
					t.Errorf("%s", res.raw)
				}
			}

			list := h.call("list_actions", map[string]any{"outcome": "unknown"})
			var listed struct{ Actions []client.Action }
			if err := json.Unmarshal(list.raw, &listed); err != nil || len(listed.Actions) != 2 || listed.Actions[1].InvocationID != cut.envelope.InvocationID {
				t.Errorf("%s", list.raw)
			}

			ex := h.call("explain_route", map[string]any{"method": "post", "url": origin + "/v1/x?token=" + runSecret})
			var doc explainDocument
			if err := json.Unmarshal(ex.raw, &doc); err != nil || ex.failed || doc.Decision != "forward" || doc.Route != "api" || len(doc.Advice) == 0 {
				t.Errorf("%s", ex.raw)
			}
			h.refusals(origin)
			if n := len(b.arrivals()); n != 3 {
				t.Errorf("%d arrivals", n)
			}
			if h.cmd != nil {
				// A signal ends it in good order, with the pipe still open.
				_ = h.cmd.Process.Signal(syscall.SIGTERM)
				if err := h.cmd.Wait(); err != nil {
					t.Errorf("ended with %v\n%s", err, h.stderr)
				}
			}
		})
	}
}

// annotations: hosts decide by them whether to ask a person.
func (h *mcpHost) annotations() {
	h.t.Helper()
	var names []string
	for name, tool := range h.tools {
		names = append(names, name)
		a := tool.Annotations
		if a == nil || tool.OutputSchema == nil || tool.Description == "" {
			h.t.Fatalf("%s: %+v", name, tool)
		}
		changes := slices.Contains([]string{"http_request", "retry_action", "ssh_exec"}, name)
		asks := name == "reconcile" // changes what is known, not the world
		if a.ReadOnlyHint == (changes || asks) || *a.DestructiveHint != changes || a.IdempotentHint == changes || *a.OpenWorldHint != (changes || asks) {
			h.t.Errorf("%s: %+v", name, a)
		}
	}
	slices.Sort(names)
	if want := []string{"explain_route", "fetch_result", "get_action", "http_request", "list_actions", "reconcile", "retry_action", "ssh_exec"}; !slices.Equal(names, want) {
		h.t.Errorf("tools %q, want %q", names, want)
	}
}

// refusals: mistakes in arguments are envelopes, too, that name the field (CONTRACT B2).
func (h *mcpHost) refusals(origin string) {
	h.t.Helper()
	for _, c := range []struct {
		tool  string
		args  map[string]any
		field string
	}{
		{"http_request", map[string]any{}, "arguments.url"},
		{"http_request", map[string]any{"url": "nonsense"}, "arguments.url"},
		{"http_request", map[string]any{"url": "https://user:" + runSecret + "@" + runHost + "/"}, "arguments.url"},
		{"http_request", map[string]any{"url": origin + "/", "method": "BAD METHOD"}, "arguments.url"},
		{"http_request", map[string]any{"url": origin + "/", "headers": map[string]any{"host": "x"}}, "arguments.headers.host"},
		{"http_request", map[string]any{"url": origin + "/", "headers": map[string]any{"upgrade": "websocket"}}, "arguments.headers.upgrade"},
		{"http_request", map[string]any{"url": origin + "/", "headers": map[string]any{"Waybill-Supersedes": "x"}}, "arguments.headers.waybill-supersedes"},
		{"http_request", map[string]any{"url": origin + "/", "body": "a", "body_base64": "YQ=="}, "arguments.body_base64"},
		{"http_request", map[string]any{"url": origin + "/", "body_base64": "%"}, "arguments.body_base64"},
		{"http_request", map[string]any{"url": origin + "/", "timeout_seconds": -1}, "arguments.timeout_seconds"},
		{"http_request", map[string]any{"url": origin + "/", "max_body_bytes": maxBodyBytes + 1}, "arguments.max_body_bytes"},
		{"http_request", map[string]any{"url": origin + "/", "timeout": 3}, "arguments"},
		{"http_request", map[string]any{"url": 7}, "arguments.url"},
		{"http_request", map[string]any{"url": origin + "/", "request_id": "a b"}, ""},
		{"http_request", map[string]any{"url": origin + "/", "unsafe_repeat": map[string]any{"invocation_id": "act_1", "reason": "x"}}, ""},
		{"get_action", map[string]any{}, "arguments.invocation_id"},
		{"get_action", map[string]any{"request_id": "x", "wait_seconds": 601}, "arguments.wait_seconds"},
		{"reconcile", map[string]any{}, "arguments.invocation_id"},
		{"retry_action", map[string]any{}, "arguments.invocation_id"},
		{"fetch_result", map[string]any{}, "arguments.invocation_id"},
		{"fetch_result", map[string]any{"invocation_id": "act_1", "offset": -1}, "arguments.offset"},
		{"list_actions", map[string]any{"outcome": "maybe"}, "arguments"},
		{"list_actions", map[string]any{"limit": 9999}, "arguments.limit"},
		{"explain_route", map[string]any{"url": "nonsense"}, "arguments.url"},
	} {
		got := h.call(c.tool, c.args)
		if f, _ := outcome.Of(outcome.CodeInvalidRequest); !got.failed || got.envelope == nil || got.envelope.Facts() != f || got.envelope.Evidence.Field != c.field {
			h.t.Errorf("%s %v: %s", c.tool, c.args, got.raw)
		}
	}
}

// TestMCPSpeaksNoTLS: mcp does not send its token in clear to a proxy whose callers speak TLS,
// running or its own; what else names that proxy says https (CONTRACT V2).
func TestMCPSpeaksNoTLS(t *testing.T) {
	contract.Covers(t, "V2")
	cert, key := testkit.WriteCert(t, testkit.NewCA(t).Leaf("127.0.0.1"))
	b := newRunBed(t, fmt.Sprintf("listen: {proxy_tls: {certificate: %q, key: %q}}\n", cert, key))
	for _, joined := range []bool{true, false} {
		stop := func() {}
		if joined {
			stop = b.serve()
			for _, args := range [][]string{{"status"}, {"env", "--shell", "sh"}} {
				if r := b.waybill(args...); r.code != 0 || !strings.Contains(r.stdout, "https://127.0.0.1:") {
					t.Errorf("%v: %+v", args, r)
				}
			}
		}
		if r := b.waybill("mcp", "--"+allowAnyFilesystem); r.code != int(exitConfig) || !strings.Contains(r.stderr, "listen.proxy_tls") || !strings.Contains(r.stderr, "--data") {
			t.Errorf("joined=%t: %+v", joined, r)
		}
		stop()
	}
	if kept, err := os.ReadDir(filepath.Join(b.dir, "data", "mcp")); err == nil && len(kept) > 0 {
		t.Errorf("a session was opened: %v", kept)
	}
}

// TestMCPExplainsToTheCaller: an agent that asks what would become of a request learns no
// name of a credential, nothing of a route that is others', and nothing of what is wrong in
// the configuration (CONTRACT V4, L8, C2).
func TestMCPExplainsToTheCaller(t *testing.T) {
	contract.Covers(t, "V4", "L8")
	dir := t.TempDir()
	a := &app{configFlag: filepath.Join(dir, "waybill.yaml"), stderr: io.Discard}
	near, far := mcp.NewInMemoryTransports()
	s, err := (&mcpTools{caller: "agent", snapshot: a.loadSnapshot, progressEvery: time.Second}).server().Connect(t.Context(), far, nil)
	if err != nil {
		t.Fatal(err)
	}
	h := &mcpHost{t: t}
	h.connect(near)
	t.Cleanup(func() { _ = h.session.Close(); _ = s.Wait() })

	const text = `version: 1
credentials:
  hidden-id: {from: {env: HIDDEN_VARIABLE}}
routes:
  - name: mine
    match: {host: mine.example.test}
    callers: [agent, hidden-ops]
    inject: [{header: X-Key, value: "Hidden ${secret}", credential: hidden-id}]
    upstream: {resolve: {mine.example.test: "192.0.2.77:443"}}
  - name: far
    match: {host: far.example.test}
    inject: [{header: X-Key, value: "Hidden ${secret}", credential: hidden-id}]
    upstream: {proxy: "http://192.0.2.77:3128"}
  - name: hidden-route
    match: {host: ops.example.test, path: /v1/**}
    callers: [hidden-ops]
    inject: [{header: X-Key, value: "Hidden ${secret}", credential: hidden-id}]
  - name: shut
    match: {host: shut.example.test}
    deny: true
`
	explained := func(config, url string) *called {
		t.Helper()
		put(t, dir, "waybill.yaml", []byte(config))
		got := h.call("explain_route", map[string]any{"url": url})
		for _, private := range []string{"hidden", "Hidden", "HIDDEN", "192.0.2.77", dir} {
			if strings.Contains(string(got.raw)+got.text, private) {
				t.Errorf("%s: the agent is told of %q: %s%s", url, private, got.raw, got.text)
			}
		}
		return got
	}
	for url, want := range map[string]string{
		"https://mine.example.test/x": "forward", "https://far.example.test/x": "forward", "https://ops.example.test/v1/x": "deny",
		"https://ops.example.test/v2/x": "no_route", "https://shut.example.test/": "deny", "https://none.example.test/": "no_route",
	} {
		var doc explainDocument
		got := explained(text, url)
		if err := json.Unmarshal(got.raw, &doc); err != nil || got.failed || doc.Decision != want {
			t.Errorf("%s: %v %s", url, err, got.raw)
		}
		if want == "forward" && (len(doc.Inject) != 1 || doc.Inject[0].Header != "X-Key" || len(doc.Advice) == 0 || doc.Contract == nil) {
			t.Errorf("%s: what the caller may know is missing: %s", url, got.raw)
		}
	}
	if got := explained("version: 1\nhidden: 192.0.2.77\n", "https://mine.example.test/"); !got.failed || !strings.Contains(got.text, "waybill check") {
		t.Errorf("a mistake in the configuration: %s", got.raw)
	}
}

// TestMCPFailureIsTheSameEnvelope: what is on record, what the proxy answers, what the Go
// client raises and what MCP carries as error data is one envelope – also where the
// answer is the origin's and Waybill's word on it stands in fields only.
func TestMCPFailureIsTheSameEnvelope(t *testing.T) {
	contract.Covers(t, "L6", "O5")
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(runHost), Handler: func(a testkit.Arrival) []testkit.Step {
		switch a.Target {
		case "/cut":
			return []testkit.Step{testkit.Close()}
		case "/500":
			return []testkit.Step{testkit.Reply(500, "oops")}
		case "/events":
			return []testkit.Step{testkit.WriteLast("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n0\r\n\r\n")}
		default:
			return []testkit.Step{testkit.Reply(200, strings.Repeat("ä", 100)+"\xff")}
		}
	}})
	b := newMCPBed(t)
	b.route(ca, up.Addr())
	b.serve()
	h := b.inProcess(time.Second)
	post := func(path string, more map[string]any) *called {
		t.Helper()
		args := map[string]any{"method": "POST", "url": "https://" + runHost + path, "body": "x"}
		maps.Copy(args, more)
		return h.call("http_request", args)
	}
	cut, broken := post("/cut", nil), post("/500", nil)
	if !broken.failed || broken.Status != 500 || *broken.Body != "oops" || broken.Outcome != "committed" || broken.envelope.Facts().Code != outcome.CodeRemoteError || !strings.HasPrefix(broken.text, "Answered by the remote side: do not repeat; reconcile act_") {
		t.Errorf("%s", broken.raw)
	}
	for _, got := range []*called{cut, broken} {
		r := b.waybill("action", "--json", got.envelope.InvocationID)
		var doc struct {
			Envelope outcome.Envelope `json:"envelope"`
		}
		if err := json.Unmarshal([]byte(r.stdout), &doc); err != nil {
			t.Fatalf("%v: %s%s", err, r.stdout, r.stderr)
		}
		onRecord, err := json.Marshal(doc.Envelope)
		if err != nil {
			t.Fatal(err)
		}
		overMCP, err := json.Marshal(got.envelope)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(onRecord, overMCP) || !got.envelope.Evidence.DispatchStarted || got.envelope.Evidence.DispatchSequence == 0 {
			t.Errorf("on record\n%s\nover MCP\n%s", onRecord, overMCP)
		}
	}

	// A stream is read to its end, and its outcome is that of the end.
	if got := post("/events", nil); got.failed || *got.Body != "data: 1\n\n" || got.Outcome != "committed" {
		t.Errorf("%s", got.raw)
	}
	// What is not text comes in base64, and a part of it ends with a character.
	if got := post("/binary", nil); got.failed || got.Body != nil || len(got.BodyBase64) == 0 || got.BodyBytes != 201 {
		t.Errorf("%s", got.raw)
	}
	if got := post("/part", map[string]any{"max_body_bytes": 3}); got.failed || *got.Body != "ä" || got.NextOffset != 2 || got.BodyBytes != 201 {
		t.Errorf("%s", got.raw)
	}
}

// TestMCPLongCalls: progress tells how to find the action again, and cancelling is no undo.
func TestMCPLongCalls(t *testing.T) {
	contract.Covers(t, "F5", "H2")
	b := newMCPBed(t)
	b.serve()
	h := b.inProcess(20 * time.Millisecond)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := h.try(ctx, "http_request", map[string]any{"method": "POST", "url": "https://" + runHost + "/hold", "body": "x", "request_id": "long-1"})
		done <- err
	}()
	testkit.Eventually(t, func() error {
		h.mu.Lock()
		defer h.mu.Unlock()
		if len(h.progress) < 3 || !strings.Contains(h.progress[0], "long-1") || !strings.HasPrefix(h.progress[len(h.progress)-1], "Dispatched, no answer yet; action act_") {
			return fmt.Errorf("progress %q", h.progress)
		}
		return nil
	})
	if res := h.call("http_request", map[string]any{"url": "https://" + runHost + "/hold", "timeout_seconds": 1}); !res.failed || res.envelope.Facts().Code != outcome.CodeRemoteTimeout {
		t.Errorf("%s", res.raw)
	}
	cancel()
	if err := <-done; !errors.Is(err, context.Canceled) {
		t.Errorf("%v", err)
	}
	rec := h.call("get_action", map[string]any{"request_id": "long-1"})
	if rec.envelope.Facts().Code != outcome.CodeResultPending || !strings.HasPrefix(rec.text, "Still running: do not repeat; fetch the result of act_") {
		t.Errorf("%s", rec.raw)
	}
	if pending := h.call("fetch_result", map[string]any{"invocation_id": rec.envelope.InvocationID}); !pending.failed || pending.envelope.Facts().Code != outcome.CodeResultPending {
		t.Errorf("%s", pending.raw)
	}
	close(b.hold)
	var res *called
	testkit.Eventually(t, func() error {
		if res = h.call("fetch_result", map[string]any{"invocation_id": rec.envelope.InvocationID}); res.failed {
			return errors.New(res.text)
		}
		return nil
	})
	if *res.Body != "hello" {
		t.Errorf("%s", res.raw)
	}
	rec = h.call("get_action", map[string]any{"request_id": "long-1"})
	if rec.envelope.Evidence.LocalCause != "CALLER_CANCELLED" || rec.envelope.Facts().Outcome != outcome.Committed {
		t.Errorf("%s", rec.raw)
	}
}

// TestMCPPipeBreaks: the host goes away before dispatch, after it, and when the result
// is there – politely, by closing its ends, or by killing the command – with a proxy
// that runs and with one inside the command. Nothing is sent twice, and the next
// "waybill mcp" finds the action and its result (CONTRACT H2).
func TestMCPPipeBreaks(t *testing.T) {
	contract.Covers(t, "H2", "H3", "F5", "F10", "T1")
	breaks := map[string]func(*mcpHost){
		"closed": func(h *mcpHost) { _ = h.stdin.Close(); _ = h.stdout.Close() },
		"killed": func(h *mcpHost) { _ = h.cmd.Process.Kill() },
	}
	for _, c := range []struct {
		stage   string
		joined  bool
		how     string
		outcome string // on record in the end; "" no record
	}{
		{"before dispatch", true, "closed", "not_attempted"},
		{"before dispatch", true, "killed", "not_attempted"},
		{"before dispatch", false, "closed", "not_attempted"},
		{"before dispatch", false, "killed", ""},
		{"after dispatch", true, "closed", "committed"},
		{"after dispatch", true, "killed", "committed"},
		{"after dispatch", false, "closed", "committed"},
		{"after dispatch", false, "killed", "unknown"},
		{"after result", true, "closed", "committed"},
		{"after result", true, "killed", "committed"},
		{"after result", false, "closed", "committed"},
		{"after result", false, "killed", "committed"},
	} {
		t.Run(fmt.Sprintf("%s, %s, joined=%t", c.stage, c.how, c.joined), func(t *testing.T) {
			ca := testkit.NewCA(t)
			handshake, answers := testkit.NewGate(t), testkit.NewGate(t)
			up := testkit.NewUpstream(t, testkit.UpstreamConfig{
				TLS: ca.Server(runHost),
				OnAccept: func(_ *net.TCPConn, done <-chan struct{}) error {
					handshake.Pass(done)
					return nil
				},
				Handler: func(testkit.Arrival) []testkit.Step {
					return []testkit.Step{testkit.Hold(answers), testkit.Reply(201, "made")}
				},
			})
			b := newMCPBed(t)
			b.route(ca, up.Addr())
			if c.joined {
				b.serve()
			}
			h := b.stdio()
			switch c.stage {
			case "before dispatch":
			case "after dispatch":
				handshake.Open()
			default:
				handshake.Open()
				answers.Open()
			}
			go func() {
				_, _ = h.try(context.Background(), "http_request", map[string]any{"method": "POST", "url": "https://" + runHost + "/v1/x", "body": "x", "request_id": "pipe-1"})
			}()
			switch c.stage {
			case "before dispatch":
				handshake.Await(t)
			case "after dispatch":
				answers.Await(t)
			default:
				// The answer is on record; whether the host has read it is its own affair.
				b.ended("pipe-1")
			}
			breaks[c.how](h)
			ended := make(chan error, 1)
			go func() { ended <- h.cmd.Wait() }()
			wait := func() {
				if err := <-ended; c.how == "closed" && err != nil {
					t.Errorf("ended with %v\n%s", err, h.stderr)
				}
			}
			// What stops the action is the leaving host, and no gate that opens too early.
			switch {
			case c.stage != "before dispatch":
				answers.Open()
				wait()
			case c.joined:
				b.ended("pipe-1")
				wait()
			default:
				wait()
			}
			handshake.Open()

			next := b.stdio()
			var rec *called
			testkit.Eventually(t, func() error {
				rec = next.call("get_action", map[string]any{"request_id": "pipe-1"})
				if rec.envelope.Facts().Code == outcome.CodeResultPending {
					return errors.New("still running")
				}
				return nil
			})
			f := rec.envelope.Facts()
			if c.outcome == "" {
				if f.Code != outcome.CodeActionNotFound {
					t.Errorf("%s", rec.raw)
				}
			} else if f.Outcome.String() != c.outcome {
				t.Errorf("on record: %s, want %s", rec.raw, c.outcome)
			}
			if c.outcome == "committed" {
				res := next.call("fetch_result", map[string]any{"invocation_id": rec.envelope.InvocationID})
				if res.failed || res.Status != 201 || *res.Body != "made" {
					t.Errorf("%s", res.raw)
				}
			}
			want := 1
			if c.stage == "before dispatch" {
				want = 0
			}
			up.RequireCount(t, want, "", "")
		})
	}
}

// route replaces the configuration's upstream.
func (b *runBed) route(ca *testkit.CA, addr string) {
	b.t.Helper()
	put(b.t, b.dir, "other.pem", ca.PEM())
	put(b.t, b.dir, "waybill.yaml", fmt.Appendf(nil, `version: 1
credentials:
  api: {from: {env: RUN_TEST_SECRET}, label: test}
routes:
  - name: api
    match: {host: %s, methods: [GET, POST]}
    inject: [{header: Authorization, value: "Bearer ${secret}", credential: api}]
    upstream: {roots: %q, resolve: {%s: %q}}
`, runHost, filepath.Join(b.dir, "other.pem"), runHost, addr))
}

func TestWholeRunes(t *testing.T) {
	contract.Covers(t, "G3")
	const all = "aä€😀z"
	for n := range len(all) + 1 {
		got := string(wholeRunes([]byte(all[:n])))
		want := all[:n]
		for !utf8.ValidString(want) {
			want = want[:len(want)-1]
		}
		if got != want {
			t.Errorf("%q cut to %q, want %q", all[:n], got, want)
		}
	}
}

// TestMCPOverHTTP: loopback only, with the token only, and not from a web page.
func TestMCPOverHTTP(t *testing.T) {
	contract.Covers(t, "V5", "L6")
	b := newMCPBed(t)
	b.serve()
	if r := b.waybill("mcp", "--http", "0.0.0.0:0"); r.code != int(exitUsage) {
		t.Errorf("%+v", r)
	}
	put(t, b.dir, "short", []byte("abc"))
	if err := os.Chmod(filepath.Join(b.dir, "short"), 0o600); err != nil {
		t.Fatal(err)
	}
	if r := b.waybill("mcp", "--http", "127.0.0.1:0", "--token-file", filepath.Join(b.dir, "short")); r.code != int(exitConfig) {
		t.Errorf("%+v", r)
	}
	p := testkit.Start(t, testkit.Command{Path: b.command().Path, Args: []string{"mcp", "--http", "127.0.0.1:0"}, Dir: b.dir, Env: b.env, ReadyLine: mcpListening})
	m := p.WaitLine(t, mcpListening)
	endpoint, path := m[1], m[2]
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("%v %v", info.Mode(), err)
	}
	token := strings.TrimSpace(string(raw))
	u, err := url.Parse(endpoint)
	if err != nil {
		t.Fatal(err)
	}
	post := func(change func(*http.Request)) int {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, endpoint, strings.NewReader(`{"jsonrpc":"2.0","id":1,"method":"ping"}`))
		if err != nil {
			t.Fatal(err)
		}
		req.Header.Set("Content-Type", "application/json")
		req.Header.Set("Accept", "application/json, text/event-stream")
		req.Header.Set("Authorization", "Bearer "+token)
		change(req)
		resp, err := (&http.Client{Transport: &http.Transport{Proxy: nil, DisableKeepAlives: true}}).Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		return resp.StatusCode
	}
	for name, c := range map[string]struct {
		change func(*http.Request)
		status int
	}{
		"no token":      {func(r *http.Request) { r.Header.Del("Authorization") }, 401},
		"another token": {func(r *http.Request) { r.Header.Set("Authorization", "Bearer "+token+"x") }, 401},
		"a web page":    {func(r *http.Request) { r.Header.Set("Origin", "https://evil.example") }, 403},
		"a cross site":  {func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "cross-site") }, 403},
		"a rebound name": {func(r *http.Request) {
			r.Host = "evil.example:" + u.Port()
		}, 403},
	} {
		if got := post(c.change); got != c.status {
			t.Errorf("%s: %d, want %d", name, got, c.status)
		}
	}

	h := &mcpHost{t: t}
	conns := &dropping{}
	over := func(d *dropping) *mcp.StreamableClientTransport {
		return &mcp.StreamableClientTransport{Endpoint: endpoint, HTTPClient: &http.Client{Transport: bearer{token, &http.Transport{Proxy: nil, DialContext: d.dial}}}}
	}
	h.connect(over(conns))
	h.annotations()
	got := h.call("http_request", map[string]any{"method": "POST", "url": "https://" + runHost + "/v1/x", "body": "x"})
	if got.failed || *got.Body != "hello" {
		t.Errorf("%s", got.raw)
	}
	cut := h.call("http_request", map[string]any{"method": "POST", "url": "https://" + runHost + "/cut", "body": "x"})
	if !cut.failed || cut.envelope.Facts().Retry != outcome.Reconcile {
		t.Errorf("%s", cut.raw)
	}
	// A host whose connections break has not undone anything: the call takes its stream
	// up again, and another session finds the action.
	resumed := make(chan *called, 1)
	go func() {
		res, err := h.try(t.Context(), "http_request", map[string]any{"method": "POST", "url": "https://" + runHost + "/hold", "body": "x", "request_id": "http-1"})
		if err != nil {
			t.Errorf("the stream was not taken up again: %v", err)
		}
		resumed <- res
	}()
	testkit.Eventually(t, func() error {
		if slices.ContainsFunc(b.arrivals(), func(s string) bool { return strings.HasPrefix(s, "POST /hold") }) {
			return nil
		}
		return errors.New("not arrived")
	})
	conns.drop()
	close(b.hold)
	if res := <-resumed; res != nil && (res.failed || *res.Body != "hello") {
		t.Errorf("%s", res.raw)
	}
	second := &mcpHost{t: t}
	second.connect(over(&dropping{}))
	testkit.Eventually(t, func() error {
		rec := second.call("get_action", map[string]any{"request_id": "http-1"})
		if rec.envelope.Facts().Outcome != outcome.Committed {
			return errors.New(rec.text)
		}
		if res := second.call("fetch_result", map[string]any{"invocation_id": rec.envelope.InvocationID}); res.failed || *res.Body != "hello" {
			t.Errorf("%s", res.raw)
		}
		return nil
	})
	if n := len(b.arrivals()); n != 3 {
		t.Errorf("%d arrivals", n)
	}
	_ = second.session.Close()
	_ = h.session.Close()
	p.Signal(t, syscall.SIGTERM)
	if code := p.Wait(t, 20*time.Second); code != 0 {
		t.Errorf("exit code %d\n%s", code, p.Stderr())
	}
	if strings.Contains(p.Stdout()+p.Stderr(), token) || strings.Contains(p.Stderr(), runSecret) {
		t.Error("the token or the secret was printed")
	}
}

// dropping dials, and breaks what it dialled.
type dropping struct {
	mu    sync.Mutex
	conns []net.Conn
}

func (d *dropping) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := (&net.Dialer{}).DialContext(ctx, network, addr)
	if err == nil {
		d.mu.Lock()
		d.conns = append(d.conns, c)
		d.mu.Unlock()
	}
	return c, err
}

func (d *dropping) drop() {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, c := range d.conns {
		_ = c.Close()
	}
}

var mcpListening = regexp.MustCompile(`mcp\s+(http://\S+)\ntoken\s+(\S+)\n`)

// bearer adds the token.
type bearer struct {
	token string
	next  http.RoundTripper
}

func (b bearer) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+b.token)
	return b.next.RoundTrip(r)
}

// TestMCPConfig: what "run --mcp-config" prints is what hosts start.
func TestMCPConfig(t *testing.T) {
	contract.Covers(t, "L6")
	b := newMCPBed(t)
	r := b.waybill("run", "--mcp-config")
	var doc struct {
		Servers map[string]struct {
			Command string
			Args    []string
		} `json:"mcpServers"`
	}
	if err := json.Unmarshal([]byte(r.stdout), &doc); err != nil || r.code != 0 {
		t.Fatalf("%+v: %v", r, err)
	}
	s := doc.Servers["waybill"]
	if !filepath.IsAbs(s.Command) || s.Args[0] != "mcp" || !slices.Contains(s.Args, filepath.Join(b.dir, "waybill.yaml")) || !slices.Contains(s.Args, filepath.Join(b.dir, "data")) {
		t.Errorf("%+v", s)
	}
	b.serve()
	cmd := exec.CommandContext(t.Context(), "waybill", s.Args...)
	cmd.Env, cmd.Dir = []string{"HOME=" + b.dir, "PATH=" + os.Getenv("PATH"), "RUN_TEST_SECRET=" + runSecret}, t.TempDir() // a host's own
	h := &mcpHost{t: t}
	h.connect(&mcp.CommandTransport{Command: cmd})
	if got := h.call("explain_route", map[string]any{"url": "https://" + runHost + "/"}); got.failed {
		t.Errorf("%s", got.raw)
	}
	if err := h.session.Close(); err != nil {
		t.Error(err)
	}
}

// TestMCPInspector runs the MCP inspector's command line against the binary, in make
// test-long, which installs it.
func TestMCPInspector(t *testing.T) {
	if os.Getenv("WAYBILL_TEST_LONG") == "" {
		return // a hundred megabytes of a program from npm
	}
	contract.Covers(t, "L6")
	b := newMCPBed(t)
	b.serve()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	inspector := filepath.Join(cache, "waybill-testkit", "mcp-inspector", "node_modules", ".bin", "mcp-inspector")
	run := func(args ...string) map[string]any {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		self, err := exec.LookPath("waybill")
		if err != nil {
			t.Fatal(err)
		}
		full := []string{"--cli"}
		for _, kv := range b.env {
			if strings.HasPrefix(kv, "WAYBILL_") || strings.HasPrefix(kv, "RUN_TEST_") || strings.HasPrefix(kv, "HOME=") {
				full = append(full, "-e", kv)
			}
		}
		cmd := exec.CommandContext(ctx, inspector, append(append(full, self, "mcp"), args...)...)
		cmd.Dir = b.dir
		var errs bytes.Buffer
		cmd.Stderr = &errs
		out, err := cmd.Output()
		if err != nil {
			t.Fatalf("inspector %v: %v\n%s%s\nscripts/test-deps.sh installs it", args, err, out, errs.String())
		}
		var doc map[string]any
		if err := json.Unmarshal(out, &doc); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
		return doc
	}
	if tools, _ := run("--method", "tools/list")["tools"].([]any); len(tools) != 8 {
		t.Errorf("%d tools", len(tools))
	}
	ok := run("--method", "tools/call", "--tool-name", "http_request", "--tool-arg", "method=POST", "--tool-arg", "url=https://"+runHost+"/v1/x", "--tool-arg", "body=x")
	if s, _ := ok["structuredContent"].(map[string]any); ok["isError"] == true || s["body"] != "hello" || s["outcome"] != "committed" {
		t.Errorf("%v", ok)
	}
	cut := run("--method", "tools/call", "--tool-name", "http_request", "--tool-arg", "method=POST", "--tool-arg", "url=https://"+runHost+"/cut", "--tool-arg", "body=x")
	s, _ := cut["structuredContent"].(map[string]any)
	env, _ := s["envelope"].(map[string]any)
	e, _ := env["error"].(map[string]any)
	if cut["isError"] != true || e["retry"] != "reconcile" || e["outcome"] != "unknown" {
		t.Errorf("%v", cut)
	}
	id, _ := env["invocation_id"].(string)
	for _, tool := range []string{"reconcile", "retry_action"} {
		refused := run("--method", "tools/call", "--tool-name", tool, "--tool-arg", "invocation_id="+id)
		s, _ := refused["structuredContent"].(map[string]any)
		env, _ := s["envelope"].(map[string]any)
		e, _ := env["error"].(map[string]any)
		if refused["isError"] != true || e["code"] != "RETRY_REFUSED" || e["outcome"] != "unknown" {
			t.Errorf("%s: %v", tool, refused)
		}
	}
	if n := len(b.arrivals()); n != 2 {
		t.Errorf("%d arrivals", n)
	}
}

// TestLastRepeat: a call whose earlier request is unknown says what the repeat came to, so
// that a refusal of it is not taken for the call's (CONTRACT A9, A10).
func TestLastRepeat(t *testing.T) {
	contract.Covers(t, "A9", "A10", "O5")
	open := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Unknown, Retry: outcome.Backoff, Code: outcome.CodeRemoteTimeout}
	rejected := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Rejected, Retry: outcome.AfterCorrection, Code: outcome.CodeRemoteRejected}
	closed, _ := outcome.Of(outcome.CodeRemoteRefused)
	refused, _ := outcome.Of(outcome.CodeConnectionRefused)
	last := func(id string, f outcome.Facts, status int) *client.Error {
		return &client.Error{Envelope: outcome.NewEnvelope(id, f, "", outcome.Evidence{}), Status: status}
	}
	for _, c := range []struct {
		last *client.Error
		want string
	}{
		{last("act_2", rejected, 404), " The last repeat, act_2, was refused, which says nothing of this one: REMOTE_REJECTED, status 404."},
		{last("act_2", closed, 0), " The last repeat, act_2, was refused, which says nothing of this one: REMOTE_REFUSED."},
		{last("act_2", refused, 502), " The last repeat did nothing: CONNECTION_REFUSED."},
		{last("", outcome.Facts{}, 404), " The last repeat was answered without Waybill, which says nothing of this one."},
	} {
		a := failure(&client.Error{Envelope: outcome.NewEnvelope("act_1", open, "", outcome.Evidence{}), Last: c.last})
		if out, ok := a.structured.(failed); !ok || out.Envelope.Facts() != open || !strings.HasSuffix(a.text, c.want) {
			t.Errorf("%q, want %q", a.text, c.want)
		}
	}
}
