package audit

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/oklog/ulid/v2"
	"go.uber.org/goleak"

	"waybill/dispatch"
	"waybill/journal"
	"waybill/journal/journaltest"
	"waybill/outcome"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var bg = context.Background()

func newKey(t testing.TB) *PrivateKey {
	t.Helper()
	k, err := GenerateKey()
	if err != nil {
		t.Fatal(err)
	}
	return k
}

func tempDir(t testing.TB) string { return filepath.Join(t.TempDir(), "audit") }

// openLog opens a log that is not synced; the test closes it.
func openLog(t testing.TB, opt Options) *Log {
	t.Helper()
	opt.NoSync = true
	l, err := OpenLog(opt)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// follower is one over a real journal that is not synced.
func follower(t testing.TB, src Source, opt Options, fo FollowOptions) *Follower {
	t.Helper()
	fo.Source = src
	return NewFollower(openLog(t, opt), fo)
}

// catchUp writes everything that the journal has.
func catchUp(t testing.TB, f *Follower) {
	t.Helper()
	for more := true; more; {
		var err error
		if more, err = f.step(bg); err != nil {
			t.Fatal(err)
		}
	}
}

func closeLog(t testing.TB, f *Follower) {
	t.Helper()
	if err := f.log.Close(); err != nil {
		t.Fatal(err)
	}
}

const target = "https://pay.example.test/v1/charges"

// act puts one whole action into the journal: 6 events in two frames.
func act(t testing.TB, j *journal.Journal) dispatch.ActionID {
	t.Helper()
	id, now := dispatch.ActionID(ulid.Make()), time.Now()
	facts := outcome.Facts{Phase: outcome.RemoteExecution, Outcome: outcome.Committed, Retry: outcome.Never}
	for _, batch := range [][]dispatch.Event{
		{
			{Type: dispatch.ActionAccepted, At: now, Accepted: &dispatch.Accepted{Caller: "ci", Method: "POST", Target: target, Protocol: "HTTP/1.1"}},
			{Type: dispatch.PreflightValidated, At: now, Bound: &dispatch.Bound{Route: "pay", Snapshot: "sha256:aa", Fingerprint: "f"}},
			{Type: dispatch.CredentialAuthorized, At: now, Credential: &dispatch.Credential{ID: "pay", Mode: "header"}},
			{Type: dispatch.DispatchStarted, Attempt: 1, At: now, Dispatch: &dispatch.Dispatch{Connection: "c", Unresolved: outcome.Reconcile}},
		},
		{
			{Type: dispatch.ResponseComplete, Attempt: 1, At: now, Response: &dispatch.Response{Status: 200, Framing: "content-length"}},
			{Type: dispatch.ResultCommitted, Attempt: 1, At: now, Ended: &dispatch.Ended{Facts: facts, Source: outcome.RemoteResponse},
				Result: &dispatch.Result{Status: 200, Header: map[string][]string{"Set-Cookie": {"session=confidential-field"}}, Digest: "sha256:e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"}},
		},
	} {
		if _, err := j.Append(bg, dispatch.Batch{Action: id, Events: batch}); err != nil {
			t.Fatal(err)
		}
	}
	return id
}

func openJournal(t testing.TB, dir string) *journal.Journal {
	t.Helper()
	return journaltest.OpenOptions(t, journal.Options{Dir: dir, SweepInterval: -1})
}

// events returns the events that the log holds, verified, and the report.
func events(t testing.TB, dir string, key *PrivateKey) (out []Opened, rep Report) {
	t.Helper()
	rep, err := Read(dir, key, VerifyOptions{}, func(o Opened) error {
		if o.Event != nil {
			out = append(out, o)
		}
		return nil
	})
	if err != nil {
		t.Fatalf("%v\n%+v", err, rep)
	}
	return out, rep
}

// sameAsJournal checks that the log holds every event of the journal once, in order.
func sameAsJournal(t testing.TB, j *journal.Journal, dir string, key *PrivateKey) Report {
	t.Helper()
	got, rep := events(t, dir, key)
	_, head, err := j.Range()
	if err != nil {
		t.Fatal(err)
	}
	if uint64(len(got)) != head || rep.Seq != head {
		t.Fatalf("%d events in the log, at %d; the journal has %d", len(got), rep.Seq, head)
	}
	for i := range got {
		if got[i].Seq != uint64(i)+1 || got[i].Event.Seq != got[i].Seq {
			t.Fatalf("event %d is number %d, %d", i, got[i].Seq, got[i].Event.Seq)
		}
	}
	return rep
}

func copyDir(t testing.TB, from, to string) {
	t.Helper()
	if err := os.RemoveAll(to); err != nil {
		t.Fatal(err)
	}
	err := os.CopyFS(to, os.DirFS(from))
	if err == nil {
		err = os.Chmod(to, 0o700)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func read(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func write(t testing.TB, path string, b []byte) {
	t.Helper()
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

// piece is one record of a segment as bytes.
type piece struct {
	record
	raw []byte
}

// split takes a segment apart.
func split(t testing.TB, path string) (h header, out []piece) {
	t.Helper()
	b := read(t, path)
	h, ok := decodeHeader(b)
	if !ok {
		t.Fatalf("%s: head", path)
	}
	for off := headerBytes; off < len(b); {
		r, n, ok := decodeRecord(b[off:])
		if !ok {
			t.Fatalf("%s at %d", path, off)
		}
		out = append(out, piece{r, bytes.Clone(b[off : off+n])})
		off += n
	}
	return h, out
}

// join puts a segment together again.
func join(t testing.TB, path string, h header, pieces []piece) {
	t.Helper()
	b := h.encode()
	for i := range pieces {
		b = append(b, pieces[i].raw...)
	}
	write(t, path, b)
}

// rehash gives a changed record a right hash of its own.
func rehash(p *piece, prev digest) {
	p.prev = prev
	p.body = bytes.Clone(p.body)
	p.raw = p.encode(nil)
}

func wantBroken(t testing.TB, err error, n uint64) string {
	t.Helper()
	var b *Broken
	if !errors.As(err, &b) || !errors.Is(err, ErrBroken) {
		t.Fatalf("error is %v, want a broken record", err)
	}
	if b.Record != n {
		t.Fatalf("record %d is named, want %d: %v", b.Record, n, b)
	}
	return fmt.Sprint(b)
}

func hashAt(n uint64) digest { return hashOf("test", []byte{byte(n), byte(n >> 8)}) }

func bootEvent(n uint64) dispatch.StoredEvent {
	return dispatch.StoredEvent{Seq: n, Event: dispatch.Event{Type: dispatch.Booted, Boot: &dispatch.Boot{ID: "b"}}}
}

func openJournalOptions(t testing.TB, opt journal.Options) *journal.Journal {
	t.Helper()
	return journaltest.OpenOptions(t, opt)
}

// copyTree copies a journal's folder, holes and all.
func copyTree(t testing.TB, from, to string) {
	t.Helper()
	if err := os.RemoveAll(to); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("cp", "-a", "--sparse=always", from, to).CombinedOutput(); err != nil {
		t.Fatalf("cp: %v: %s", err, out)
	}
}

// restore undoes what was done to a copy.
func restore(t testing.TB, from, to string) {
	t.Helper()
	names, err := os.ReadDir(from)
	if err != nil {
		t.Fatal(err)
	}
	for _, n := range names {
		want := read(t, filepath.Join(from, n.Name()))
		if have, err := os.ReadFile(filepath.Join(to, n.Name())); err != nil || !bytes.Equal(have, want) {
			write(t, filepath.Join(to, n.Name()), want)
		}
	}
}

// long reports whether the long forms run (make torture).
func long() bool { return os.Getenv("WAYBILL_TEST_LONG") != "" }

// rounds is how often something random is done.
func rounds(short, torture int) int {
	if long() {
		return torture
	}
	return short
}
