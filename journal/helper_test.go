package journal

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"

	"waybill/dispatch"
	"waybill/journal/internal/hooks"
	"waybill/outcome"
)

var bg = context.Background()

func newID() dispatch.ActionID { return dispatch.ActionID(ulid.Make()) }

// Events as the pipeline makes them.

func evAccepted(caller, requestID string) dispatch.Event {
	return dispatch.Event{Type: dispatch.ActionAccepted, At: time.Now(), Accepted: &dispatch.Accepted{
		Caller: caller, RequestID: requestID, Method: "POST", Target: "https://pay.example.test/v1/charges", Protocol: "HTTP/1.1",
	}}
}

func evBound(fingerprint string) dispatch.Event {
	return dispatch.Event{Type: dispatch.PreflightValidated, At: time.Now(), Bound: &dispatch.Bound{Route: "pay", Snapshot: "sha256:aa", Fingerprint: fingerprint, BodyBytes: 3}}
}

func evCredential() dispatch.Event {
	return dispatch.Event{Type: dispatch.CredentialAuthorized, At: time.Now(), Credential: &dispatch.Credential{ID: "pay", Version: "2026-11", Mode: "header:bearer"}}
}

func evDispatch(attempt int) dispatch.Event {
	return dispatch.Event{Type: dispatch.DispatchStarted, Attempt: attempt, At: time.Now(), Dispatch: &dispatch.Dispatch{
		Connection: "c1", Stage: outcome.StageTLSHandshake, Unresolved: outcome.Reconcile,
		Peer: &outcome.Peer{Address: "192.0.2.1:443", ServerName: "pay.example.test", Protocol: "h2"},
	}}
}

// evLease takes a lease that a fast test does not outlive, and evRepeat uses it.
func evLease(generation int) dispatch.Event {
	return dispatch.Event{Type: dispatch.LeaseTaken, At: time.Now(), Lease: &dispatch.Lease{Generation: generation, Process: "p", For: "caller", Until: time.Now().Add(time.Minute)}}
}

func evRepeat(attempt, generation int) dispatch.Event {
	ev := evDispatch(attempt)
	ev.Dispatch.Generation = generation
	return ev
}

func evResponse(attempt, status int) dispatch.Event {
	return dispatch.Event{Type: dispatch.ResponseComplete, Attempt: attempt, At: time.Now(), Response: &dispatch.Response{Status: status, Framing: "content-length"}}
}

func facts(p outcome.Phase, o outcome.Outcome, r outcome.Retry, c outcome.Code) outcome.Facts {
	return outcome.Facts{Phase: p, Outcome: o, Retry: r, Code: c}
}

func evResult(attempt, status, chunks int, body []byte, f outcome.Facts) dispatch.Event {
	sum := sha256.Sum256(body)
	return dispatch.Event{
		Type: dispatch.ResultCommitted, Attempt: attempt, At: time.Now(), Ended: &dispatch.Ended{Facts: f, Source: outcome.RemoteResponse},
		Result: &dispatch.Result{Status: status, Header: map[string][]string{"Content-Type": {"application/json"}}, Bytes: int64(len(body)), Chunks: chunks, Digest: "sha256:" + hex.EncodeToString(sum[:])},
	}
}

func evResolved(attempt int, f outcome.Facts) dispatch.Event {
	return dispatch.Event{Type: dispatch.AttemptResolved, Attempt: attempt, At: time.Now(), Ended: &dispatch.Ended{Facts: f, Source: outcome.TransportObserved}}
}

func evRefused() dispatch.Event {
	return dispatch.Event{Type: dispatch.ActionRefused, At: time.Now(), Ended: &dispatch.Ended{
		Facts: facts(outcome.Validation, outcome.NotAttempted, outcome.AfterCorrection, outcome.CodeInvalidRequest), Field: "request.headers.host",
	}}
}

var (
	committed = facts(outcome.RemoteExecution, outcome.Committed, outcome.Never, outcome.CodeNone)
	unknown   = facts(outcome.RemoteExecution, outcome.Unknown, outcome.Reconcile, outcome.CodeRemoteOutcomeUnknown)
)

// toDispatch is the first durable step of an action.
func toDispatch(id dispatch.ActionID, caller, requestID, fingerprint string) dispatch.Batch {
	return dispatch.Batch{Action: id, Events: []dispatch.Event{evAccepted(caller, requestID), evBound(fingerprint), evCredential(), evDispatch(1)}}
}

// toResult is the second.
func toResult(id dispatch.ActionID, body []byte) dispatch.Batch {
	return dispatch.Batch{
		Action: id, Events: []dispatch.Event{evResponse(1, 200), evResult(1, 200, 1, body, committed)},
		Chunks: []dispatch.Chunk{{Attempt: 1, Index: 0, Last: true, Data: body}},
	}
}

func testOptions(dir string, h *hooks.Hooks) Options {
	if h == nil {
		h = &hooks.Hooks{NoSync: true}
	}
	h.CheckCache = true
	return Options{Dir: dir, Build: "test", Config: "sha256:cc", AllowAnyFilesystem: true, MinFreeBytes: 16 << 20, SweepInterval: -1, Hooks: h}
}

// openTest opens a journal that is not synced.
func openTest(t testing.TB, dir string, h *hooks.Hooks) *Journal {
	t.Helper()
	j, _ := openWith(t, testOptions(dir, h))
	return j
}

func openWith(t testing.TB, opt Options) (*Journal, *Recovery) {
	t.Helper()
	j, r, err := Open(opt)
	if err != nil {
		t.Fatalf("open: %v", err)
	}
	t.Cleanup(func() { _ = j.Close() })
	return j, r
}

func closeTest(t testing.TB, j *Journal) {
	t.Helper()
	if err := j.Close(); err != nil {
		t.Fatalf("close: %v", err)
	}
}

func tempDir(t testing.TB) string { return filepath.Join(t.TempDir(), "journal") }

func mustAppend(t testing.TB, j *Journal, b dispatch.Batch) dispatch.Receipt {
	t.Helper()
	r, err := j.Append(bg, b)
	if err != nil {
		t.Fatalf("append: %v", err)
	}
	// Readers wait for the store by themselves; who copies the folder next does not.
	if err := j.caughtUp(); err != nil {
		t.Fatalf("append: %v", err)
	}
	return r
}

func mustAction(t testing.TB, j *Journal, id dispatch.ActionID) dispatch.Record {
	t.Helper()
	r, err := j.Action(bg, id)
	if err != nil {
		t.Fatalf("action %s: %v", id, err)
	}
	return r
}

func mustVerify(t testing.TB, j *Journal) Report {
	t.Helper()
	r, err := j.Verify(bg)
	if err != nil {
		t.Fatalf("verify: %v", err)
	}
	return r
}

func wantErr(t testing.TB, err error, targets ...error) {
	t.Helper()
	for _, target := range targets {
		if !errors.Is(err, target) {
			t.Fatalf("error is %v, want %v", err, target)
		}
	}
}

func copyDir(t testing.TB, from, to string) {
	t.Helper()
	if err := os.RemoveAll(to); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", "-a", "--sparse=always", from, to).CombinedOutput(); err != nil {
		t.Fatalf("cp: %v: %s", err, out)
	}
}

// settleTest makes the store durable with everything that was appended: a copy of its folder
// has it then.
func settleTest(t testing.TB, j *Journal) {
	t.Helper()
	if err := j.between(func() error { return j.settle(j.c.head.group) }); err != nil {
		t.Fatal(err)
	}
}

// flip inverts one bit.
func flip(t testing.TB, path string, offset int64) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	b := make([]byte, 1)
	if _, err := f.ReadAt(b, offset); err != nil {
		t.Fatal(err)
	}
	b[0] ^= 4
	if _, err := f.WriteAt(b, offset); err != nil {
		t.Fatal(err)
	}
}

func readAll(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func glob(t testing.TB, pattern string) []string {
	t.Helper()
	m, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	return m
}

// usedBytes is the length of a file up to its last byte that is not zero.
func usedBytes(t testing.TB, path string) int64 {
	return int64(len(bytes.TrimRight(readAll(t, path), "\x00")))
}
