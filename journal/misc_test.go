package journal

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/dgraph-io/badger/v4/options"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/journal/internal/hooks"
	"waybill/outcome"
)

func testOptionsLogger() *slog.Logger { return slog.New(slog.DiscardHandler) }

type countMetrics struct {
	groups, requests, events, syncs, stopped, dropped, unresolved atomic.Int64
	mu                                                            sync.Mutex
	reasons                                                       map[string]int
}

func (m *countMetrics) Applied(before, after *dispatch.Record, _ []dispatch.Event) {
	was := before != nil && before.Unresolved()
	switch is := after.Unresolved(); {
	case is && !was:
		m.unresolved.Add(1)
	case was && !is:
		m.unresolved.Add(-1)
	}
}
func (m *countMetrics) Found(*dispatch.Record) { m.unresolved.Add(1) }
func (m *countMetrics) GroupCommitted(g Group) {
	m.groups.Add(1)
	m.requests.Add(int64(g.Requests))
	m.events.Add(int64(g.Events))
	m.syncs.Add(int64(g.Syncs))
}

func (m *countMetrics) AppendRefused(reason string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.reasons == nil {
		m.reasons = map[string]int{}
	}
	m.reasons[reason]++
}
func (m *countMetrics) Stopped()               { m.stopped.Add(1) }
func (m *countMetrics) Dropped(n int, _ int64) { m.dropped.Add(int64(n)) }

// durable reports the first protection that a journal lacks.
func durable(j *Journal) error {
	o := j.db.Opts()
	switch {
	case !j.c.witness.sync || !j.folder.sync:
		return errors.New("the witness is not synced")
	case o.ChecksumVerificationMode != options.OnTableRead:
		return errors.New("tables are not verified when opened")
	case o.InMemory:
		return errors.New("in memory")
	}
	return nil
}

// The options are Badger's defaults but for these: each has its reason in the
// reference, and none shows in a test that only kills the process.
func TestStoreOptions(t *testing.T) {
	contract.Covers(t, "F1")
	opt := testOptions(tempDir(t), &hooks.Hooks{})
	j, _ := openWith(t, opt)
	o := j.db.Opts()
	if err := durable(j); err != nil {
		t.Error(err)
	}
	for name, ok := range map[string]bool{
		"SyncWrites":               !o.SyncWrites, // the witness carries it
		"NoLog":                    o.NoLog && o.OnFlush != nil,
		"MemTableSize":             o.MemTableSize == 8<<20,
		"NumMemtables":             o.NumMemtables == 2,
		"ValueThreshold":           o.ValueThreshold == 1<<20,
		"ValueLogFileSize":         o.ValueLogFileSize == 16<<20,
		"BlockCacheSize":           o.BlockCacheSize == 4<<20,
		"IndexCacheSize":           o.IndexCacheSize == 4<<20,
		"NumCompactors":            o.NumCompactors == 2,
		"NumLevelZeroTables":       o.NumLevelZeroTables == 5,
		"NumLevelZeroTablesStall":  o.NumLevelZeroTablesStall == 12,
		"TableSizeMultiplier":      o.TableSizeMultiplier == 1,
		"Compression":              o.Compression == options.None,
		"DetectConflicts":          o.DetectConflicts,
		"NumVersionsToKeep":        o.NumVersionsToKeep == 1,
		"EncryptionKey":            len(o.EncryptionKey) == 0,
		"MetricsEnabled":           !o.MetricsEnabled,
		"ExternalMagicVersion":     o.ExternalMagicVersion == storeMagic,
		"chunk below threshold":    maxStoredValue < 1<<20 && dispatch.MaxChunkBytes+sealOverhead+1 <= maxStoredValue,
		"transaction limit":        maxTxnBytes == 1258291,
		"managed file descriptors": !o.BypassLockGuard && !o.ReadOnly,
	} {
		if !ok {
			t.Errorf("%s is not as it must be", name)
		}
	}
	// The control: what tests of other packages use fails this very check.
	if err := durable(openTest(t, tempDir(t), nil)); err == nil {
		t.Error("the check does not see that syncs are off")
	}
}

func TestModesAndKey(t *testing.T) {
	contract.Covers(t, "C2")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	closeTest(t, j)
	for path, want := range map[string]os.FileMode{dir: 0o700, filepath.Join(dir, nameKey): 0o600, filepath.Join(dir, nameStore): 0o700, filepath.Join(dir, nameWitness): 0o700, filepath.Join(dir, nameLock): 0o600} {
		st, err := os.Stat(path)
		if err != nil || st.Mode().Perm() != want {
			t.Errorf("%s has mode %v, want %v (%v)", path, st.Mode().Perm(), want, err)
		}
	}
	key := readAll(t, filepath.Join(dir, nameKey))[len(keyMagic):][:KeyBytes]
	elsewhere := filepath.Join(t.TempDir(), "k")
	write := func(b []byte, mode os.FileMode) {
		t.Helper()
		_ = os.Remove(elsewhere)
		if err := os.WriteFile(elsewhere, b, mode); err != nil {
			t.Fatal(err)
		}
	}
	with := func(f func(*Options)) error {
		opt := testOptions(dir, nil)
		f(&opt)
		j, _, err := Open(opt)
		if err != nil {
			return err
		}
		defer func() { _ = j.Close() }()
		_, err = j.Action(bg, id)
		return err
	}
	write([]byte(fmt.Sprintf("%x\n", key)), 0o600)
	if err := with(func(o *Options) { o.KeyFile = elsewhere }); err != nil {
		t.Errorf("hexadecimal key file: %v", err)
	}
	if err := with(func(o *Options) { o.Key = key }); err != nil {
		t.Errorf("key: %v", err)
	}
	write([]byte(fmt.Sprintf("%x\n", key)), 0o644)
	wantErr(t, with(func(o *Options) { o.KeyFile = elsewhere }), ErrKey)
	write([]byte("short"), 0o600)
	wantErr(t, with(func(o *Options) { o.KeyFile = elsewhere }), ErrKey)
	wantErr(t, with(func(o *Options) { o.Key = key[:31] }), ErrKey)
	wantErr(t, with(func(o *Options) { o.Key = bytes.Repeat([]byte{1}, KeyBytes) }), ErrCorrupt) // another journal's
	wantErr(t, with(func(o *Options) { o.KeyFile = filepath.Join(dir, "none") }), ErrKey, os.ErrNotExist)
	if err := os.Remove(filepath.Join(dir, nameKey)); err != nil {
		t.Fatal(err)
	}
	wantErr(t, with(func(*Options) {}), ErrKey) // never a new key beside an old store
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := with(func(o *Options) { o.Key = key }); err == nil || !strings.Contains(err.Error(), "0700") {
		t.Errorf("a folder that others can enter: %v", err)
	}
}

// A folder of a newer or an older program is refused as such.
func TestOtherFormats(t *testing.T) {
	contract.Covers(t, "M5")
	dir := tempDir(t)
	closeTest(t, openTest(t, dir, nil))
	for version, want := range map[byte]error{witnessMagic[7] + 1: ErrFormat, 1: ErrOldFormat} {
		for _, f := range glob(t, filepath.Join(dir, nameWitness, "*.wit")) {
			b := readAll(t, f)
			b[7] = version
			if err := os.WriteFile(f, b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		_, _, err := Open(testOptions(dir, nil))
		wantErr(t, err, want)
	}
}

// What is on the disk is sealed: none of what was recorded is there in clear.
func TestNothingInClear(t *testing.T) {
	contract.Covers(t, "C2")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	id := newID()
	mustAppend(t, j, toDispatch(id, "canary-caller", "canary-request", "sha256:canary-fingerprint"))
	mustAppend(t, j, toResult(id, []byte("canary-body")))
	closeTest(t, j)
	for _, pattern := range []string{"*", "store/*", "witness/*"} {
		for _, f := range glob(t, filepath.Join(dir, pattern)) {
			if st, err := os.Stat(f); err != nil || st.IsDir() {
				continue
			}
			b := readAll(t, f)
			for _, canary := range []string{"canary", "example.test", "ACTION_ACCEPTED", "application/json"} {
				if bytes.Contains(b, []byte(canary)) {
					t.Errorf("%s holds %q in clear", filepath.Base(f), canary)
				}
			}
		}
	}
}

func TestEmptyStoreFilesAreRemoved(t *testing.T) {
	contract.Covers(t, "M4")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	mustAppend(t, j, toDispatch(newID(), "ci", "", "f"))
	closeTest(t, j)
	for _, name := range []string{"00099.mem", "000099.vlog"} {
		if err := os.WriteFile(filepath.Join(dir, nameStore, name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	_, rec := openWith(t, testOptions(dir, nil))
	if rec.RemovedFiles != 2 {
		t.Errorf("removed %d", rec.RemovedFiles)
	}
}

func TestFilesystem(t *testing.T) {
	contract.Covers(t, "M5")
	wantErr(t, checkFilesystem("/proc"), ErrFilesystem)
	if err := checkFilesystem(filepath.Join(t.TempDir(), "none")); err == nil {
		t.Error("a folder that is not there")
	}
	opt := testOptions("/proc/self/task", nil)
	if _, _, err := Open(opt); err == nil {
		t.Error("opened in /proc")
	}
}

func TestSpaceGate(t *testing.T) {
	contract.Covers(t, "M5")
	var free atomic.Int64
	free.Store(4 << 20)
	opt := testOptions(tempDir(t), &hooks.Hooks{NoSync: true, FreeBytes: free.Load})
	_, _, err := Open(opt)
	wantErr(t, err, ErrNoSpace, dispatch.ErrNotWritten)
	if entries, _ := os.ReadDir(filepath.Join(opt.Dir, nameStore)); len(entries) != 0 {
		t.Error("the store was opened below the floor")
	}
	free.Store(1 << 30)
	j, _ := openWith(t, opt)
	ballast := filepath.Join(opt.Dir, nameBallast)
	if st, err := os.Stat(ballast); err != nil || st.Size() < 8<<20 {
		t.Errorf("ballast: %v %v", st, err)
	}
	running, waiting := newID(), newID()
	mustAppend(t, j, toDispatch(running, "ci", "", "f"))
	mustAppend(t, j, dispatch.Batch{Action: waiting, Events: []dispatch.Event{evAccepted("ci", ""), evBound("f")}})
	if err := j.Admit(); err != nil {
		t.Fatal(err)
	}
	full := func(left int64) {
		free.Store(left)
		j.space.mu.Lock()
		j.space.checked = time.Time{}
		j.space.mu.Unlock()
	}
	full(12 << 20)
	wantErr(t, j.Admit(), ErrNoSpace, dispatch.ErrNotWritten)
	_, err = j.Append(bg, toDispatch(newID(), "ci", "", "f"))
	wantErr(t, err, ErrNoSpace)
	_, err = j.Append(bg, dispatch.Batch{Action: waiting, Events: []dispatch.Event{evDispatch(1)}})
	wantErr(t, err, ErrNoSpace)
	mustAppend(t, j, toResult(running, []byte("x"))) // what runs can end
	mustAction(t, j, running)

	// Below the hard floor the ballast goes; without it nothing is written.
	full(1 << 20)
	_, err = j.Append(bg, dispatch.Batch{Action: waiting, Events: []dispatch.Event{evRefused()}})
	wantErr(t, err, ErrNoSpace, dispatch.ErrNotWritten)
	if _, err := os.Stat(ballast); !os.IsNotExist(err) {
		t.Errorf("the ballast is still there: %v", err)
	}
	mustAction(t, j, running)
	full(1 << 30)
	j.space.fill(j)
	if _, err := os.Stat(ballast); err != nil {
		t.Error(err)
	}
	if err := j.Admit(); err != nil { // recovers by itself
		t.Error(err)
	}
	mustVerify(t, j)
}

// A watcher is woken for what it wants, and for nothing else.
func TestWatchWanted(t *testing.T) {
	j := openTest(t, tempDir(t), nil)
	got := make(chan dispatch.Record, 8)
	stop := j.Watch(func(r *dispatch.Record) bool { return r.Ended }, func(r dispatch.Record) { got <- r })
	defer stop()
	a, b := newID(), newID()
	mustAppend(t, j, toDispatch(a, "ci", "", "f"))
	mustAppend(t, j, toDispatch(b, "ci", "", "f"))
	mustAppend(t, j, toResult(b, []byte("x")))
	mustAppend(t, j, toResult(a, []byte("x")))
	for _, id := range []dispatch.ActionID{b, a} {
		if r := <-got; r.ID != id || !r.Ended {
			t.Errorf("%s: %+v", id, r.Facts)
		}
	}
	if len(got) > 0 {
		t.Errorf("unwanted: %+v", <-got)
	}
}

func TestConcurrentWriters(t *testing.T) {
	contract.Covers(t, "M1", "M3")
	dir := tempDir(t)
	opt := testOptions(dir, &hooks.Hooks{NoSync: true, SegmentSlots: 400, CheckpointEvery: 100})
	m := &countMetrics{}
	opt.Metrics = m
	j, _ := openWith(t, opt)
	var seen atomic.Int64
	var order atomic.Uint64
	stop := j.Watch(nil, func(r dispatch.Record) {
		if last := order.Swap(r.LastSeq); last >= r.LastSeq {
			t.Errorf("watched %d after %d", r.LastSeq, last)
		}
		seen.Add(1)
	})
	var wg sync.WaitGroup
	for w := range 64 {
		wg.Go(func() {
			for i := range 8 {
				id := newID()
				if _, err := j.Append(bg, toDispatch(id, fmt.Sprint("c", w%4), fmt.Sprint(w, "-", i), "f")); err != nil {
					t.Error(err)
				}
				// Nobody else's step comes between: what was acknowledged is readable at once.
				if r, err := j.Action(bg, id); err != nil || !r.Dispatched() {
					t.Errorf("%v %v", r.Facts, err)
				}
				if _, err := j.Append(bg, toResult(id, []byte(id.String()))); err != nil {
					t.Error(err)
				}
			}
		})
	}
	wg.Add(1)
	go func() { // Verify runs beside the writers
		defer wg.Done()
		for range 3 {
			if _, err := j.Verify(bg); err != nil {
				t.Errorf("verify while writing: %v", err)
			}
		}
	}()
	wg.Wait()
	stop()
	rep := mustVerify(t, j)
	if rep.Actions != 512 || rep.Events != 512*6+1 || rep.Seq != rep.Events {
		t.Errorf("%+v", rep)
	}
	if m.requests.Load() < 1024 || m.groups.Load() >= m.requests.Load() || m.events.Load() != int64(rep.Events) {
		t.Errorf("%d requests in %d groups, %d events", m.requests.Load(), m.groups.Load(), m.events.Load())
	}
	if seen.Load() == 0 {
		t.Error("the watcher saw nothing")
	}
	if n := len(glob(t, filepath.Join(dir, nameWitness, "*.wit"))); n < 2 {
		t.Errorf("%d segments: none was filled", n)
	}
	closeTest(t, j)
	j = openTest(t, dir, nil)
	mustVerify(t, j)
}

// Segments are retired when nothing depends on them.
func TestWitnessRetires(t *testing.T) {
	contract.Covers(t, "M5")
	dir := tempDir(t)
	h := &hooks.Hooks{NoSync: true, SegmentSlots: 64, CheckpointEvery: 50}
	j := openTest(t, dir, h)
	old := newID()
	mustAppend(t, j, toDispatch(old, "ci", "", "f"))
	segments := func() int { return len(glob(t, filepath.Join(dir, nameWitness, "*.wit"))) }
	fill := func(n int) {
		for range n {
			id := newID()
			mustAppend(t, j, toDispatch(id, "ci", "", "f"))
			mustAppend(t, j, toResult(id, []byte{}))
		}
	}
	fill(200)
	settleTest(t, j)
	fill(20)
	if n := segments(); n > minKept+8 {
		t.Errorf("%d segments are kept", n)
	}
	mustAppend(t, j, toResult(old, []byte("x")))
	mustVerify(t, j)
	for range 8 {
		closeTest(t, j)
		j = openTest(t, dir, h)
	}
	if n := segments(); n > minKept+2 {
		t.Errorf("%d segments after restarts", n)
	}
	mustVerify(t, j)
}

func TestRelaxed(t *testing.T) {
	contract.Covers(t, "F1")
	dir := tempDir(t)
	hold := heldHooks()
	j := openTest(t, dir, &hold.Hooks)
	hold.hold()
	strict := appendAsync(j, toDispatch(newID(), "ci", "taken", "f"))
	hold.waitHeld(t)
	id := newID()
	accepted := evAccepted("ci", "")
	accepted.Accepted.Relaxed = true
	bound := evBound("f")
	bound.Bound.Repeatable = true
	// The committer is busy, and nobody waits for it.
	rc := mustAppend(t, j, dispatch.Batch{Action: id, Relaxed: true, Events: []dispatch.Event{accepted}})
	if rc.Record.Facts.Outcome != outcome.Unknown {
		t.Errorf("relaxed from its first record on: %+v (F1)", rc.Record.Facts)
	}
	rc = mustAppend(t, j, dispatch.Batch{Action: id, Relaxed: true, Events: []dispatch.Event{bound, evDispatch(1)}})
	if rc.Record.Events != 3 || !rc.Record.Dispatched() {
		t.Errorf("%+v", rc.Record)
	}
	_, err := j.Append(bg, dispatch.Batch{Action: id, Relaxed: true, Events: []dispatch.Event{evDispatch(1)}})
	wantErr(t, err, dispatch.ErrIllegalTransition)
	b := toResult(id, []byte("relaxed"))
	b.Relaxed = true
	rc = mustAppend(t, j, b)
	if rc.Record.Facts != committed {
		t.Errorf("%+v", rc.Record.Facts)
	}
	_, err = j.Action(bg, id)
	wantErr(t, err, dispatch.ErrActionNotFound) // queued, not written
	hold.letGo()
	if r := <-strict; r.err != nil {
		t.Fatal(r.err)
	}
	rc, err = j.Append(bg, dispatch.Batch{Action: newID(), Relaxed: true, Events: []dispatch.Event{evAccepted("ci", "taken")}})
	if !errors.Is(err, dispatch.ErrRequestIDTaken) || rc.Earlier.IsZero() {
		t.Errorf("a taken request id: %v", err)
	}
	mustAppend(t, j, toDispatch(newID(), "ci", "", "f")) // everything before it is written
	if r := mustAction(t, j, id); r.Facts != committed || r.Events != 5 {
		t.Errorf("%+v", r)
	}
	if len(j.relaxed.actions) != 0 {
		t.Error("states of relaxed actions are kept")
	}
	// One that ends before its dispatch stays unknown on record, and ends.
	other := newID()
	mustAppend(t, j, dispatch.Batch{Action: other, Relaxed: true, Events: []dispatch.Event{accepted, evRefused()}})
	open := newID()
	mustAppend(t, j, dispatch.Batch{Action: open, Relaxed: true, Events: []dispatch.Event{accepted}})
	closeTest(t, j) // drains the queue
	j = openTest(t, dir, nil)
	for _, id := range []dispatch.ActionID{other, open} {
		if r := mustAction(t, j, id); r.Facts.Outcome != outcome.Unknown || !r.Ended {
			t.Errorf("after a restart: %+v", r.Facts)
		}
	}
	mustVerify(t, j)
}

// What became of a relaxed batch is known without reading it back until the action ends,
// whoever adds to it in between.
func TestRelaxedStates(t *testing.T) {
	contract.Covers(t, "F1")
	j := openTest(t, tempDir(t), nil)
	o := &opening{AEAD: j.seal.aead, then: func() { t.Error("it was read back") }}
	j.seal.aead = o
	j.hooks.CheckCache = false // it reads
	kept := func() int {
		j.relaxed.mu.Lock()
		defer j.relaxed.mu.Unlock()
		return len(j.relaxed.actions)
	}
	written := func() {
		t.Helper()
		mustAppend(t, j, toDispatch(newID(), "ci", "", "f"))
	}
	id := newID()
	accepted, bound := evAccepted("ci", ""), evBound("f")
	accepted.Accepted.Relaxed, bound.Bound.Repeatable = true, true
	mustAppend(t, j, dispatch.Batch{Action: id, Relaxed: true, Events: []dispatch.Event{accepted, bound, evDispatch(1)}})
	written()
	o.left.Store(1)
	// Not relaxed: the next relaxed one has to see it.
	mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{{Type: dispatch.RequestSent, Attempt: 1, At: time.Now(), Sent: &dispatch.Sent{Headers: true}}}})
	rc := mustAppend(t, j, dispatch.Batch{Action: id, Relaxed: true, Events: []dispatch.Event{evResponse(1, 200)}})
	if rc.Record.Events != 5 {
		t.Errorf("%d events", rc.Record.Events)
	}
	written()
	b := toResult(id, []byte("x"))
	b.Events, b.Relaxed = b.Events[1:], true
	if rc = mustAppend(t, j, b); rc.Record.Events != 6 || rc.Record.Facts != committed {
		t.Errorf("%+v", rc.Record)
	}
	written()
	o.left.Store(0)
	if kept() != 0 || j.relaxed.some.Load() {
		t.Error("states of ended actions are kept")
	}
	if r := mustAction(t, j, id); r.Facts != committed || r.Events != 6 || r.LastSeq < rc.Record.FirstSeq {
		t.Errorf("%+v", r)
	}
	// Of those that never end only some are kept.
	const more = 10
	for range maxRelaxed + more {
		if n := kept(); n > maxRelaxed+queueLength {
			t.Fatal(n)
		}
		mustAppend(t, j, dispatch.Batch{Action: newID(), Relaxed: true, Events: []dispatch.Event{accepted}})
	}
	written()
	mustAppend(t, j, dispatch.Batch{Action: newID(), Relaxed: true, Events: []dispatch.Event{accepted}})
	written()
	if n := kept(); n > more+1 {
		t.Errorf("%d states are kept", n)
	}
	mustVerify(t, j)
}

func TestGuard(t *testing.T) {
	contract.Covers(t, "O3")
	j := openTest(t, tempDir(t), nil)
	none := func(caller, fp string) {
		t.Helper()
		_, err := j.Guarding(bg, caller, fp)
		wantErr(t, err, dispatch.ErrActionNotFound)
	}
	want := func(id dispatch.ActionID) {
		t.Helper()
		if r, err := j.Guarding(bg, "ci", "f"); err != nil || r.ID != id {
			t.Errorf("guarded by %s, %v; want %s", r.ID, err, id)
		}
	}
	a, b, c := newID(), newID(), newID()
	mustAppend(t, j, toDispatch(a, "ci", "", "f"))
	none("ci", "f") // running
	mustAppend(t, j, toDispatch(b, "ci", "", "f"))
	mustAppend(t, j, dispatch.Batch{Action: b, Events: []dispatch.Event{evResolved(1, unknown)}})
	want(b)
	none("other", "f")
	none("ci", "g")
	mustAppend(t, j, dispatch.Batch{Action: a, Events: []dispatch.Event{evResolved(1, unknown)}})
	want(a) // the one that ended last, not the one that began last
	mustAppend(t, j, toDispatch(c, "ci", "", "f"))
	mustAppend(t, j, toResult(c, []byte("x")))
	want(a) // a success does not guard
	// Late evidence resolves a: the earlier one is found again.
	mustAppend(t, j, toResult(a, []byte("late")))
	want(b)
	mustAppend(t, j, dispatch.Batch{Action: b, Events: []dispatch.Event{evResponse(1, 400), evResolved(1, facts(outcome.RemoteExecution, outcome.Rejected, outcome.AfterCorrection, outcome.CodeRemoteRejected))}})
	none("ci", "f")
	d := newID()
	mustAppend(t, j, toDispatch(d, "ci", "", "f"))
	body := []byte("{}")
	mustAppend(t, j, dispatch.Batch{Action: d, Chunks: []dispatch.Chunk{{Attempt: 1, Last: true, Data: body}}, Events: []dispatch.Event{
		evResponse(1, 500), evResult(1, 500, 1, body, facts(outcome.RemoteExecution, outcome.Committed, outcome.Reconcile, outcome.CodeRemoteError)),
	}})
	want(d) // a complete 500
	mustVerify(t, j)
}

func TestRedirecting(t *testing.T) {
	contract.Covers(t, "R3")
	dir := tempDir(t)
	j := openTest(t, dir, nil)
	redirect := func(to string) dispatch.ActionID {
		id := newID()
		mustAppend(t, j, toDispatch(id, "ci", "", "f"))
		ev := evResult(1, 307, 0, nil, committed)
		ev.Result.RedirectTo, ev.Result.RedirectFrom = to, "https://pay.example.test"
		mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{evResponse(1, 307), ev}})
		return id
	}
	redirect("sha256:k1")
	b := redirect("sha256:k1")
	c := redirect("sha256:k2")
	redirect("")
	for range 2 {
		for key, want := range map[string]dispatch.ActionID{"sha256:k1": b, "sha256:k2": c} {
			r, err := j.Redirecting(bg, "ci", key)
			if err != nil || r.ID != want || r.Result.RedirectFrom != "https://pay.example.test" {
				t.Errorf("%s: %s, %v", key, r.ID, err)
			}
			_, err = j.Redirecting(bg, "other", key)
			wantErr(t, err, dispatch.ErrActionNotFound)
		}
		for _, key := range []string{"", "sha256:k3"} {
			_, err := j.Redirecting(bg, "ci", key)
			wantErr(t, err, dispatch.ErrActionNotFound)
		}
		mustVerify(t, j)
		closeTest(t, j)
		j = openTest(t, dir, nil)
	}
}

func TestFilters(t *testing.T) {
	contract.Covers(t, "M1")
	j := openTest(t, tempDir(t), nil)
	var ids []dispatch.ActionID
	for i := range 300 {
		id := newID()
		ids = append(ids, id)
		mustAppend(t, j, toDispatch(id, fmt.Sprint("c", i%3), fmt.Sprint("r", i), "f"))
		if i%2 == 0 {
			mustAppend(t, j, toResult(id, []byte("x")))
		}
	}
	list := func(f dispatch.Filter) (out []dispatch.ActionID) {
		t.Helper()
		for r, err := range j.Actions(bg, f) {
			if err != nil {
				t.Fatal(err)
			}
			out = append(out, r.ID)
		}
		return out
	}
	all := list(dispatch.Filter{})
	if len(all) != 300 || all[0] != ids[299] || all[299] != ids[0] {
		t.Errorf("%d actions, newest first", len(all))
	}
	for name, c := range map[string]struct {
		f dispatch.Filter
		n int
	}{
		"caller":         {dispatch.Filter{Caller: "c1"}, 100},
		"open":           {dispatch.Filter{OpenOnly: true}, 150},
		"caller, open":   {dispatch.Filter{Caller: "c2", OpenOnly: true}, 50},
		"outcome":        {dispatch.Filter{Outcome: outcome.Committed}, 150},
		"limit":          {dispatch.Filter{Limit: 7}, 7},
		"request":        {dispatch.Filter{Caller: "c1", RequestID: "r1"}, 1},
		"other's":        {dispatch.Filter{Caller: "c2", RequestID: "r1"}, 0},
		"request of any": {dispatch.Filter{RequestID: "r1"}, 1},
		"route":          {dispatch.Filter{Route: "pay"}, 300},
		"no route":       {dispatch.Filter{Route: "x"}, 0},
		"phase":          {dispatch.Filter{Phase: outcome.Validation}, 0},
		"code":           {dispatch.Filter{Code: outcome.CodeRemoteOutcomeUnknown}, 150},
		"doubtful":       {dispatch.Filter{Doubtful: true}, 0},
		"since":          {dispatch.Filter{Since: time.Now().Add(time.Hour)}, 0},
	} {
		if got := len(list(c.f)); got != c.n {
			t.Errorf("%s: %d, want %d", name, got, c.n)
		}
	}
	ctx, cancel := context.WithCancel(bg)
	cancel()
	for _, err := range j.Actions(ctx, dispatch.Filter{}) {
		wantErr(t, err, context.Canceled)
		break
	}
	if c, err := j.Count(); err != nil || c.Actions != 300 || c.Open != 150 || c.Results != 150 {
		t.Errorf("%+v, %v", c, err)
	}
}

func TestRetention(t *testing.T) {
	contract.Covers(t, "H7")
	j := openTest(t, tempDir(t), nil)
	big := bytes.Repeat([]byte("0123456789abcdef"), 3*dispatch.MaxChunkBytes/16)
	put := func(expires time.Time) dispatch.ActionID {
		id := newID()
		mustAppend(t, j, toDispatch(id, "ci", "", "f"))
		n := storeChunks(t, j, id, big)
		ev := evResult(1, 200, n, big, committed)
		ev.Result.ExpiresAt = expires
		mustAppend(t, j, dispatch.Batch{Action: id, Events: []dispatch.Event{evResponse(1, 200), ev}})
		return id
	}
	now := time.Now()
	past, future, never := put(now.Add(-time.Minute)), put(now.Add(time.Hour)), put(time.Time{})
	_, r, err := j.OpenResult(bg, past)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Read(make([]byte, 10)); err != nil {
		t.Fatal(err)
	}
	if n, err := j.Sweep(now); err != nil || n != 1 {
		t.Fatalf("swept %d, %v", n, err)
	}
	if n, err := j.Sweep(now); err != nil || n != 0 {
		t.Fatalf("swept again %d, %v", n, err)
	}
	// A reader in the middle fails; it does not end.
	if _, err := new(bytes.Buffer).ReadFrom(r); !errors.Is(err, dispatch.ErrResultDropped) {
		t.Errorf("a reader in the middle: %v", err)
	}
	res, _, err := j.OpenResult(bg, past)
	wantErr(t, err, dispatch.ErrResultDropped)
	if res.Status != 200 || mustAction(t, j, past).Facts != committed {
		t.Error("the record did not stay")
	}
	for _, id := range []dispatch.ActionID{future, never} {
		if _, _, err := j.OpenResult(bg, id); err != nil {
			t.Error(err)
		}
	}
	rep := mustVerify(t, j)
	if rep.Dropped != 1 || rep.Results != 3 || rep.OrphanChunks != 0 {
		t.Errorf("%+v", rep)
	}
	// It is never stored again (H7).
	_, err = j.Append(bg, dispatch.Batch{Action: past, Chunks: []dispatch.Chunk{{Attempt: 1, Index: 0, Data: []byte("x")}}})
	wantErr(t, err, dispatch.ErrIllegalTransition)
	if j.Stats().Dropped != 1 {
		t.Error("not counted")
	}
}

// A clock that jumps by years between two starts drops nothing.
func TestClockJump(t *testing.T) {
	contract.Covers(t, "M3")
	dir := tempDir(t)
	at := time.Now()
	open := func() *Journal {
		opt := testOptions(dir, nil)
		opt.Now = func() time.Time { return at }
		opt.SweepInterval = 20 * time.Millisecond
		j, rec := openWith(t, opt)
		if rec.Quarantined {
			t.Fatal(rec.Reason)
		}
		return j
	}
	j := open()
	id := newID()
	mustAppend(t, j, toDispatch(id, "ci", "", "f"))
	b := toResult(id, []byte("x"))
	b.Events[1].Result.ExpiresAt = at.Add(7 * 24 * time.Hour)
	mustAppend(t, j, b)
	due := newID()
	mustAppend(t, j, toDispatch(due, "ci", "", "f"))
	b = toResult(due, []byte("x"))
	b.Events[1].Result.ExpiresAt = at.Add(-time.Hour)
	mustAppend(t, j, b)
	closeTest(t, j)
	for _, jump := range []time.Duration{10 * 365 * 24 * time.Hour, -20 * 365 * 24 * time.Hour, 20 * 365 * 24 * time.Hour} {
		at = at.Add(jump)
		j = open()
		open := newID()
		mustAppend(t, j, toDispatch(open, "ci", "", "f"))
		if jump > 0 { // the sweeper runs: wait for what is due
			for range 500 {
				if _, _, err := j.OpenResult(bg, due); errors.Is(err, dispatch.ErrResultDropped) {
					break
				}
				time.Sleep(10 * time.Millisecond)
			}
			if _, _, err := j.OpenResult(bg, due); !errors.Is(err, dispatch.ErrResultDropped) {
				t.Errorf("what was due is there: %v", err)
			}
		}
		if jump == 10*365*24*time.Hour {
			if _, _, err := j.OpenResult(bg, id); err != nil {
				t.Errorf("after a jump: %v", err)
			}
		}
		mustVerify(t, j)
		closeTest(t, j)
	}
}

func TestReadOnly(t *testing.T) {
	contract.Covers(t, "M4")
	dir := tempDir(t)
	opt := testOptions(dir, nil)
	opt.ReadOnly = true
	if _, _, err := Open(opt); err == nil {
		t.Fatal("opened what is not there")
	}
	j := openTest(t, dir, nil)
	open, done := newID(), newID()
	mustAppend(t, j, toDispatch(open, "ci", "", "f"))
	mustAppend(t, j, toDispatch(done, "ci", "", "f"))
	mustAppend(t, j, toResult(done, []byte("x")))
	seq := j.Stats().Seq
	closeTest(t, j)
	for range 2 {
		j, _ := openWith(t, opt)
		if r := mustAction(t, j, open); !r.Ended || r.Facts.Outcome != outcome.Unknown {
			t.Errorf("an open action is shown as %+v, ended %t", r.Facts, r.Ended)
		}
		_, err := j.Append(bg, toDispatch(newID(), "ci", "", "f"))
		wantErr(t, err, ErrReadOnly, dispatch.ErrNotWritten)
		wantErr(t, j.Admit(), ErrReadOnly)
		if j.Stats().Seq != seq {
			t.Error("something was written")
		}
		mustVerify(t, j)
		closeTest(t, j)
	}
}

func TestClose(t *testing.T) {
	contract.Covers(t, "F9")
	before := runtime.NumGoroutine()
	dir := tempDir(t)
	for range 3 {
		j := openTest(t, dir, nil)
		var waits []<-chan answer
		for range 50 {
			waits = append(waits, appendAsync(j, toDispatch(newID(), "ci", "", "f")))
		}
		closeTest(t, j)
		closeTest(t, j)
		for _, w := range waits {
			if r := <-w; r.err != nil && !errors.Is(r.err, ErrClosed) {
				t.Errorf("%v", r.err)
			}
		}
		_, err := j.Append(bg, toDispatch(newID(), "ci", "", "f"))
		wantErr(t, err, ErrClosed, dispatch.ErrNotWritten)
		wantErr(t, j.Admit(), ErrClosed)
		_, err = j.Action(bg, newID())
		wantErr(t, err, ErrClosed)
		j.Watch(nil, func(dispatch.Record) {})()
	}
	for range 200 {
		if runtime.NumGoroutine() <= before+2 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d goroutines, %d before", runtime.NumGoroutine(), before)
}

// Badger's lines must not carry what is stored, and some of them stop the journal.
func TestStoreLogger(t *testing.T) {
	contract.Covers(t, "C2", "M5")
	var out bytes.Buffer
	l := &storeLogger{log: slog.New(slog.NewTextHandler(&out, &slog.HandlerOptions{Level: slog.LevelDebug}))}
	l.Errorf("while deleting file: %s, err: %v", "secret", "secret")
	l.Warningf("something %x", "secret")
	l.Infof("Key: %q", "secret")
	l.Debugf("Key: %q", "secret")
	if l.fatal.Load() {
		t.Error("stopped without a reason")
	}
	l.Errorf("CHECKSUM_MISMATCH: secret bytes")
	if !l.fatal.Load() || strings.Contains(out.String(), "secret") {
		t.Errorf("fatal %t, log %q", l.fatal.Load(), out.String())
	}
	for _, line := range []string{"Ignoring table %s", "Unable to read: Key: %v", "Error while curlf sync: %v\n"} {
		l := &storeLogger{log: testOptionsLogger()}
		told := false
		f := func() { told = true }
		l.onFatal.Store(&f)
		l.Errorf(line, "secret")
		if !told {
			t.Errorf("%q does not stop", line)
		}
	}
	hold := heldHooks()
	j := openTest(t, tempDir(t), &hold.Hooks)
	j.store.Errorf("Ignoring table %s", "x")
	select {
	case <-j.Poisoned():
	case <-time.After(5 * time.Second):
		t.Fatal("not poisoned")
	}
	wantErr(t, j.Close(), dispatch.ErrIndeterminate)
}

// fill sets every field to something, so that a new one cannot be forgotten.
func fill(v reflect.Value, n *int) {
	*n++
	switch v.Kind() {
	case reflect.Pointer:
		v.Set(reflect.New(v.Type().Elem()))
		fill(v.Elem(), n)
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(time.Unix(int64(*n), 5).UTC()))
			return
		}
		for i := range v.NumField() {
			fill(v.Field(i), n)
		}
	case reflect.Map:
		if v.Type().Elem().Kind() == reflect.String {
			v.Set(reflect.ValueOf(map[string]string{fmt.Sprint("k", *n): "a"}))
			return
		}
		v.Set(reflect.ValueOf(map[string][]string{fmt.Sprint("k", *n): {"a", "b"}}))
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), 1, 1))
		fill(v.Index(0), n)
	case reflect.String:
		v.SetString(fmt.Sprint("s", *n))
	case reflect.Bool:
		v.SetBool(true)
	case reflect.Uint8:
		v.SetUint(1)
	default:
		v.Set(reflect.ValueOf(*n).Convert(v.Type()))
	}
}

// shared reports a path on which a and b share memory.
func shared(a, b reflect.Value, path string) string {
	switch a.Kind() {
	case reflect.Pointer:
		if a.IsNil() {
			return ""
		}
		if a.Pointer() == b.Pointer() {
			return path
		}
		return shared(a.Elem(), b.Elem(), path)
	case reflect.Map, reflect.Slice:
		if a.Len() > 0 && a.Pointer() == b.Pointer() {
			return path
		}
		if a.Kind() == reflect.Map {
			for _, k := range a.MapKeys() {
				if !b.MapIndex(k).IsValid() {
					continue // a name that is not UTF-8 has another one in the copy
				}
				if s := shared(a.MapIndex(k), b.MapIndex(k), path+"["+k.String()+"]"); s != "" {
					return s
				}
			}
		}
	case reflect.Struct:
		if a.Type() == reflect.TypeFor[time.Time]() {
			return ""
		}
		for i := range a.NumField() {
			if s := shared(a.Field(i), b.Field(i), path+"."+a.Type().Field(i).Name); s != "" {
				return s
			}
		}
	}
	return ""
}

func TestCloneEvent(t *testing.T) {
	contract.Covers(t, "M1")
	var ev dispatch.Event
	n := 0
	fill(reflect.ValueOf(&ev).Elem(), &n)
	c := cloneEvent(&ev)
	if !reflect.DeepEqual(ev, c) {
		t.Errorf("the copy differs:\n%s\n%s", jsonOf(ev), jsonOf(c))
	}
	if s := shared(reflect.ValueOf(ev), reflect.ValueOf(c), ""); s != "" {
		t.Errorf("the copy shares %s with the caller", s)
	}
	// And it comes back from the disk as it is.
	_, b, err := prepare([]dispatch.Event{ev})
	if err != nil {
		t.Fatal(err)
	}
	f, err := decodeFrame(encodeFrame(newID(), bootID{}, 1, b))
	if err != nil {
		t.Fatal(err)
	}
	if !reflect.DeepEqual(f.events[0], ev) {
		t.Errorf("read back:\n%s\n%s", jsonOf(ev), jsonOf(f.events[0]))
	}
}

// A caller may do with its events what it likes once Append has returned.
func TestCallerKeepsItsEvents(t *testing.T) {
	contract.Covers(t, "M1")
	j := openTest(t, tempDir(t), nil)
	id := newID()
	b := toDispatch(id, "ci", "", "f")
	mustAppend(t, j, b)
	b.Events[0].Accepted.Caller = "other"
	b.Events[1].Bound.Fingerprint = "other"
	b.Events[3].Dispatch.Peer.Address = "other"
	rc := mustAppend(t, j, toResult(id, []byte("x")))
	if rc.Record.Caller != "ci" || rc.Record.Bound.Fingerprint != "f" || rc.Record.Attempts[0].Dispatch.Peer.Address == "other" {
		t.Errorf("%s", jsonOf(rc.Record))
	}
	mustVerify(t, j)
}
