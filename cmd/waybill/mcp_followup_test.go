package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"waybill/client"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

// followBed is a proxy with a route for everything that goes on after a first answer: an
// approval, a query, a job, a kept request, and a scripted SSH server.
type followBed struct {
	*runBed
	up    *testkit.Upstream
	box   *testkit.SSHServer
	keyed atomic.Int32
	works atomic.Bool // the flaky service answers, and the job is done
}

const followHosts = "ask.example.test flaky.example.test keyed.example.test"

func newFollowBed(t *testing.T) *followBed {
	t.Helper()
	b := &followBed{runBed: newMCPBed(t)}
	ca := testkit.NewCA(t)
	jsonReply := func(status int, body string, fields ...string) []testkit.Step {
		return []testkit.Step{testkit.Reply(status, body, append([]string{"Content-Type", "application/json"}, fields...)...)}
	}
	b.up = testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(append(strings.Fields(followHosts), runHost)...), Handler: func(a testkit.Arrival) []testkit.Step {
		switch {
		case strings.HasPrefix(a.Target, "/v1/orders?"):
			return jsonReply(200, `{"data":[{"state":"paid"}]}`)
		case a.Target == "/v1/orders":
			return []testkit.Step{testkit.Close()}
		case a.Target == "/v1/jobs":
			return jsonReply(202, "{}", "Location", "/v1/jobs/1")
		case a.Target == "/v1/jobs/1" && !b.works.Load():
			return jsonReply(200, `{"status":"running"}`)
		case a.Target == "/v1/jobs/1":
			return jsonReply(200, `{"status":"succeeded"}`)
		case a.Target == "/keyed" && b.keyed.Add(1) == 1:
			return []testkit.Step{testkit.Close()}
		case a.Target == "/flaky" && !b.works.Load():
			return []testkit.Step{testkit.Close()}
		}
		return []testkit.Step{testkit.Reply(201, "made "+a.Target)}
	}})
	key, signer := testkit.SSHKey(t, "")
	b.box = testkit.NewSSHServer(t, testkit.SSHOptions{Authorized: signer.PublicKey()})
	put(t, b.dir, "other.pem", ca.PEM())
	put(t, b.dir, "key", key)
	put(t, b.dir, "known_hosts", []byte(b.box.KnownHosts("box.test", 22)))
	var y strings.Builder
	fmt.Fprintf(&y, "version: 1\ncredentials:\n  api: {from: {env: RUN_TEST_SECRET}, label: test}\n  key: {from: {file: key}}\nroutes:\n")
	route := func(host, more string) {
		fmt.Fprintf(&y, "  - name: %s\n    match: {host: %s}\n    inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: api}]\n    upstream: {roots: %q, resolve: {%s: %q}}\n%s",
			strings.SplitN(host, ".", 2)[0], host, filepath.Join(b.dir, "other.pem"), host, b.up.Addr(), more)
	}
	route(runHost, `    contract:
      marker: {json: metadata.waybill}
      reconcile:
        get: /v1/orders?marker=${marker}
        committed_when: {json: {"data[0].state": [paid]}}
        background: false
      async: {every: 20ms, max_every: 40ms}
`)
	route("ask.example.test", "    approval: {hold: 50ms, expiry: 1h}\n")
	route("flaky.example.test", "    contract: {repeatable: true, retry: {attempts: 3, total: 2h, backoff: 1h, max: 1h, background: true}}\n")
	route("keyed.example.test", "    contract:\n      idempotency: {header: Idempotency-Key, scope: account, retention: 1h, margin: 100ms, in_progress: [409], mismatch: [422], maker: caller_or_waybill, promises: [accepts, compares, keeps, returns], source: test, reviewed: 2026-11-30}\n")
	fmt.Fprintf(&y, `  - name: box
    match: {host: box.test}
    ssh: {users: [deploy], credential: key, known_hosts: known_hosts, env: [LANG], commands: [{regexp: ".*", grace: 500ms}]}
    upstream: {resolve: {box.test: %q}}
`, b.box.Addr)
	put(t, b.dir, "waybill.yaml", []byte(y.String()))
	return b
}

// goClient is the Go client of the session that the host has, too.
func (b *followBed) goClient() *client.Client {
	b.t.Helper()
	a := &app{environ: b.env}
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
	return c
}

// TestMCPFollowUp: what goes on after the first answer – commands, questions, further
// attempts, approvals, jobs – over the tools and with the Go client, against the real binary.
func TestMCPFollowUp(t *testing.T) {
	contract.Covers(t, "L6", "O5", "O3", "K6", "A7", "F8", "C2")
	b := newFollowBed(t)
	b.serve("--ssh", "127.0.0.1:0")
	h := b.inProcess(20 * time.Millisecond)
	c := b.goClient()
	origin := "https://" + runHost
	var doc struct {
		Action   client.Action    `json:"action"`
		Envelope outcome.Envelope `json:"envelope"`
	}
	read := func(res *called) {
		t.Helper()
		doc.Action, doc.Envelope = client.Action{}, outcome.Envelope{}
		if err := json.Unmarshal(res.raw, &doc); err != nil {
			t.Fatalf("%v: %s", err, res.raw)
		}
	}
	var out struct {
		ExitStatus   *int    `json:"exit_status"`
		Stdout       *string `json:"stdout"`
		Stderr       *string `json:"stderr"`
		StdoutBase64 string  `json:"stdout_base64"`
		StdoutBytes  int     `json:"stdout_bytes"`
	}
	exec := func(args map[string]any) *called {
		t.Helper()
		full := map[string]any{"target": "box.test", "user": "deploy"}
		for k, v := range args {
			full[k] = v
		}
		res := h.call("ssh_exec", full)
		out.ExitStatus, out.Stdout, out.Stderr, out.StdoutBase64, out.StdoutBytes = nil, nil, nil, "", 0
		if err := json.Unmarshal(res.raw, &out); err != nil {
			t.Fatal(err)
		}
		return res
	}

	// A command that came to its end; its stored output; one that failed.
	res := exec(map[string]any{"argv": []string{"cat", "x"}, "stdin": "wörds", "request_id": "cmd-1"})
	if res.failed || res.Outcome != "committed" || out.ExitStatus == nil || *out.ExitStatus != 0 || *out.Stdout != "wörds" || res.Submissions != 1 {
		t.Fatalf("%s", res.raw)
	}
	again := h.call("fetch_result", map[string]any{"invocation_id": res.InvocationID, "offset": 3})
	if !strings.Contains(string(again.raw), `"stdout":"rds"`) || !strings.Contains(string(again.raw), `"exit_status":0`) {
		t.Errorf("%s", again.raw)
	}
	if res = exec(map[string]any{"command": "exit 3"}); !res.failed || *out.ExitStatus != 3 || *out.Stdout != "step1 done\n" || *out.Stderr != "failed\n" || res.envelope.Facts().Code != outcome.CodeRemoteError {
		t.Errorf("%s", res.raw)
	}
	if res = exec(map[string]any{"command": "flood 300", "max_output_bytes": 100}); res.failed || out.StdoutBytes != 300 || res.NextOffset != 100 || !strings.Contains(res.text, "offset 100") {
		t.Errorf("%s", res.raw)
	} else if raw, err := base64.StdEncoding.DecodeString(out.StdoutBase64); out.Stdout == nil && (err != nil || len(raw) != 100) {
		t.Errorf("%d bytes, %v", len(raw), err)
	}
	// One whose end is not known, and what is not sent twice.
	cut := exec(map[string]any{"command": "cut"})
	if !cut.failed || cut.envelope.Facts().Outcome != outcome.Unknown || cut.envelope.Facts().Retry != outcome.Reconcile || !strings.HasPrefix(cut.text, "Outcome unknown: do not repeat") {
		t.Fatalf("%s", cut.raw)
	}
	if res = exec(map[string]any{"command": "cut"}); res.envelope == nil || res.envelope.Facts().Code != outcome.CodeDuplicateSuspected || b.box.Ran("cut") != 1 {
		t.Errorf("%s, ran %d times", res.raw, b.box.Ran("cut"))
	}
	if exec(map[string]any{"command": "cut", "unsafe_repeat": map[string]any{"invocation_id": cut.envelope.InvocationID, "reason": "looked"}}); b.box.Ran("cut") != 2 {
		t.Errorf("ran %d times", b.box.Ran("cut"))
	}
	for tool, code := range map[string]outcome.Code{"reconcile": outcome.CodeRetryRefused, "retry_action": outcome.CodeRetryRefused} {
		res := h.call(tool, map[string]any{"invocation_id": cut.envelope.InvocationID})
		if !res.failed || res.envelope == nil || res.envelope.Facts().Code != code || res.envelope.Facts().Outcome != outcome.Unknown || res.envelope.InvocationID != cut.envelope.InvocationID || res.envelope.Evidence.Reason == "" {
			t.Errorf("%s: %s", tool, res.raw)
		}
	}
	for _, args := range []map[string]any{{}, {"command": "x", "argv": []string{"x"}}, {"command": "x", "stdin_base64": "%"}, {"command": "x", "timeout_seconds": -1}, {"command": "x", "max_output_bytes": -1}, {"command": "x", "user": ""}} {
		if res := exec(args); !res.failed || res.envelope.Facts().Code != outcome.CodeInvalidRequest || !strings.HasPrefix(res.envelope.Evidence.Field, "arguments.") {
			t.Errorf("%v: %s", args, res.raw)
		}
	}

	// The Go client over the same commands; output that is too long for the answer.
	r, err := c.SSHExec(t.Context(), client.Command{Target: "box.test", User: "deploy", Command: fmt.Sprintf("flood %d", 6<<20)})
	if err != nil || len(r.Stdout) != 6<<20 || len(r.Stderr) != 6<<20 || r.ExitStatus == nil || r.Err() != nil || r.Envelope.InvocationID != r.InvocationID {
		t.Fatalf("%v", err)
	}
	r, err = c.Output(t.Context(), idOf(t, c, "cmd-1"))
	if err != nil || string(r.Stdout) != "wörds" || *r.ExitStatus != 0 || r.RequestID != "cmd-1" || !r.Facts.IsSuccess() {
		t.Errorf("%+v %v", r, err)
	}

	// A question to the other side settles what an order became.
	lost := h.call("http_request", map[string]any{"method": "POST", "url": origin + "/v1/orders", "body": `{"ref":"a"}`, "headers": map[string]any{"Content-Type": "application/json"}})
	if !lost.failed || lost.envelope.Facts().Outcome != outcome.Unknown {
		t.Fatalf("%s", lost.raw)
	}
	read(h.call("reconcile", map[string]any{"invocation_id": lost.envelope.InvocationID}))
	if doc.Action.Outcome != outcome.Committed || len(doc.Envelope.Evidence.Resolutions) != 1 || doc.Envelope.Evidence.Resolutions[0].Source != outcome.RemoteQuery {
		t.Errorf("%+v %+v", doc.Action, doc.Envelope)
	}
	if a, err := c.Reconcile(t.Context(), lost.envelope.InvocationID); err != nil || a.Outcome != outcome.Committed {
		t.Errorf("asked again: %+v %v", a, err)
	}
	b.up.RequireCount(t, 1, http.MethodPost, "/v1/orders")

	// A further attempt with the request that was kept.
	flaky := h.call("http_request", map[string]any{"method": "POST", "url": "https://flaky.example.test/flaky", "body": "x", "timeout_seconds": 1, "request_id": "flaky-1"})
	if !flaky.failed || flaky.envelope.Facts().Outcome != outcome.Unknown {
		t.Fatalf("%s", flaky.raw)
	}
	b.works.Store(true)
	read(h.call("retry_action", map[string]any{"invocation_id": flaky.envelope.InvocationID}))
	if doc.Action.Outcome != outcome.Committed || doc.Action.Attempts != 2 || doc.Action.InvocationID != flaky.envelope.InvocationID {
		t.Errorf("%+v", doc.Action)
	}
	if got := h.call("fetch_result", map[string]any{"invocation_id": flaky.envelope.InvocationID}); got.Status != 201 || *got.Body != "made /flaky" {
		t.Errorf("%s", got.raw)
	}
	if a, err := c.Retry(t.Context(), flaky.envelope.InvocationID); err == nil {
		t.Errorf("a finished action was repeated: %+v", a)
	}

	// A key that Waybill made: the client repeats as a further attempt, with the same key.
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://keyed.example.test/keyed", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	made, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = made.Body.Close()
	keys := map[string]int{}
	for _, a := range b.up.Where(func(a testkit.Arrival) bool { return a.Target == "/keyed" }) {
		keys[strings.Join(a.Values("Idempotency-Key"), ",")]++
	}
	if a, err := c.Find(t.Context(), made.RequestID); err != nil || made.StatusCode != 201 || made.Submissions != 2 || a.InvocationID != made.InvocationID || a.Attempts != 2 || len(keys) != 1 || keys[""] != 0 {
		t.Errorf("%+v %v, keys %v", a, err, keys)
	}

	// A job: linked, waited for.
	b.works.Store(false)
	job := h.call("http_request", map[string]any{"method": "POST", "url": origin + "/v1/jobs", "body": `{}`})
	if job.failed || job.Status != 202 || job.Job == "" || !strings.Contains(job.text, job.Job) {
		t.Fatalf("%s %s", job.raw, job.text)
	}
	b.works.Store(true)
	if a, err := c.WaitJob(t.Context(), job.InvocationID); err != nil || a.Outcome != outcome.Committed || a.InvocationID != job.Job || a.Link == nil || a.Link.Of != job.InvocationID {
		t.Errorf("%+v %v", a, err)
	}
	read(h.call("get_action", map[string]any{"invocation_id": job.Job, "wait_seconds": 20}))
	if doc.Action.Outcome != outcome.Committed || !doc.Action.Ended {
		t.Errorf("%+v", doc.Action)
	}
	if _, err := c.WaitJob(t.Context(), flaky.envelope.InvocationID); err == nil {
		t.Error("a job where there is none")
	}

	// An approval: the id is told, the wait ends with the decision, nothing is sent twice.
	ask := h.call("http_request", map[string]any{"method": "POST", "url": "https://ask.example.test/pay", "body": "x"})
	if !ask.failed || ask.envelope.Facts().Code != outcome.CodeApprovalPending || ask.envelope.InvocationID == "" || !strings.Contains(ask.text, "get_action with invocation_id "+ask.envelope.InvocationID) {
		t.Fatalf("%s %s", ask.raw, ask.text)
	}
	h.mu.Lock()
	h.progress = nil
	h.mu.Unlock()
	waited := make(chan *called, 1)
	go func() {
		res, err := h.try(context.Background(), "get_action", map[string]any{"invocation_id": ask.envelope.InvocationID, "wait_seconds": 60})
		if err != nil {
			t.Error(err)
		}
		waited <- res
	}()
	testkit.Eventually(t, func() error {
		h.mu.Lock()
		defer h.mu.Unlock()
		if n := len(h.progress); n < 2 || !strings.HasPrefix(h.progress[n-1], "Waits for a person's approval; action "+ask.envelope.InvocationID) {
			return fmt.Errorf("progress %q", h.progress)
		}
		return nil
	})
	if r := b.waybill("approve", ask.envelope.InvocationID, "--by", "alice", "--reason", "ticket 7"); r.code != 0 {
		t.Fatalf("%+v", r)
	}
	if res := <-waited; res != nil {
		read(res)
		if doc.Action.Outcome != outcome.Committed || doc.Action.Status != 201 {
			t.Errorf("%s", res.raw)
		}
	}
	resp, err := c.WaitResult(t.Context(), ask.envelope.InvocationID)
	if err != nil || resp.StatusCode != 201 {
		t.Fatalf("%v", err)
	}
	_ = resp.Body.Close()
	b.up.RequireCount(t, 1, http.MethodPost, "/pay")
}

func idOf(t *testing.T, c *client.Client, requestID string) string {
	t.Helper()
	a, err := c.Find(t.Context(), requestID)
	if err != nil {
		t.Fatal(err)
	}
	return a.InvocationID
}

// TestMCPCommandPipeBreaks: the command's pipe is cut or killed while a remote command
// runs. It ran once, goes on, and the next "waybill mcp" has its output (CONTRACT H2).
func TestMCPCommandPipeBreaks(t *testing.T) {
	contract.Covers(t, "H2", "H3", "F5", "G9")
	b := newFollowBed(t)
	b.serve("--ssh", "127.0.0.1:0")
	for n, how := range []string{"killed", "closed"} {
		h := b.stdio()
		token := fmt.Sprintf("pipe-%d", n)
		go func() {
			_, _ = h.try(context.Background(), "ssh_exec", map[string]any{"target": "box.test", "user": "deploy", "command": "wait " + how, "request_id": token})
		}()
		testkit.Eventually(t, func() error {
			if b.box.Ran("wait "+how) != 1 {
				return errors.New("it does not run")
			}
			return nil
		})
		if how == "killed" {
			_ = h.cmd.Process.Kill()
		} else {
			_, _ = h.stdin.Close(), h.stdout.Close()
		}
		_ = h.cmd.Wait()
	}
	b.box.Release()
	next := b.stdio()
	for n, how := range []string{"killed", "closed"} {
		rec := next.call("get_action", map[string]any{"request_id": fmt.Sprintf("pipe-%d", n), "wait_seconds": 30})
		id := rec.envelope.InvocationID
		if f := rec.envelope.Facts(); f.Outcome != outcome.Committed || b.box.Ran("wait "+how) != 1 {
			t.Fatalf("%s: %s, ran %d times", how, rec.raw, b.box.Ran("wait "+how))
		}
		if got := next.call("fetch_result", map[string]any{"invocation_id": id}); !strings.Contains(string(got.raw), `"stdout":"started\ndone\n"`) {
			t.Errorf("%s: %s", how, got.raw)
		}
	}
}
