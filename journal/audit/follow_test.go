package audit

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"encoding/pem"
	"errors"
	"io"
	"log"
	"math/rand/v2"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"waybill/internal/contract"
	"waybill/journal"
)

// N5: it follows while the journal is written, and what was written while it did not
// run is caught up with, once.
func TestFollow(t *testing.T) {
	contract.Covers(t, "N5")
	key, dir := newKey(t), tempDir(t)
	folder := filepath.Join(t.TempDir(), "journal")
	opt := Options{Dir: dir, Recipient: key.Public(), SegmentBytes: 20 << 10, CheckpointEvery: 20}
	j := openJournal(t, folder)
	for round := range 3 {
		f := follower(t, j, opt, FollowOptions{Poll: time.Millisecond})
		ctx, stop := context.WithCancel(bg)
		var running sync.WaitGroup
		running.Go(func() {
			if err := f.Run(ctx); err != nil {
				t.Error(err)
			}
		})
		for range 10 {
			act(t, j)
		}
		stop()
		running.Wait()
		rep := sameAsJournal(t, j, dir, key)
		if rep.Checkpoints == 0 || len(rep.Gaps) > 0 {
			t.Errorf("round %d: %+v", round, rep)
		}
		if s := f.Status(); s.Lag != 0 || s.Seq != rep.Seq || s.Records != rep.Records || s.Last == nil || f.Passed() != s.Seq {
			t.Errorf("round %d: %+v", round, s)
		}
		for range 5 {
			act(t, j) // while nobody follows
		}
		if round == 1 {
			if err := j.Close(); err != nil {
				t.Fatal(err)
			}
			j = openJournal(t, folder)
		}
	}
}

// One log has one writer; readers do not mind.
func TestOneWriter(t *testing.T) {
	key, dir := newKey(t), tempDir(t)
	l := openLog(t, Options{Dir: dir, Recipient: key.Public()})
	if _, err := OpenLog(Options{Dir: dir, Recipient: key.Public()}); !errors.Is(err, ErrLocked) {
		t.Errorf("a second writer: %v", err)
	}
	if _, err := Verify(dir, VerifyOptions{}); err != nil {
		t.Error(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	// Another recipient: from here on.
	other := newKey(t)
	l = openLog(t, Options{Dir: dir, Recipient: other.Public()})
	if l.head.number != 2 {
		t.Errorf("segment %d", l.head.number)
	}
	if _, err := Verify(dir, VerifyOptions{}); err != nil {
		t.Error(err)
	}
}

// Events that retention took before they were followed are a gap that is on record,
// and so is a journal that was put back to an older state.
func TestGaps(t *testing.T) {
	contract.Covers(t, "N5", "M5")
	key, dir := newKey(t), tempDir(t)
	base := t.TempDir()
	folder, old := filepath.Join(base, "journal"), filepath.Join(base, "old")
	opt := Options{Dir: dir, Recipient: key.Public()}
	open := func() *journal.Journal {
		return openJournal(t, folder)
	}
	j := open()
	act(t, j)
	f := follower(t, j, opt, FollowOptions{})
	catchUp(t, f)
	closeLog(t, f)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	copyTree(t, folder, old)
	j = open()
	for range 3 {
		act(t, j)
	}
	f = follower(t, j, opt, FollowOptions{})
	catchUp(t, f)
	ahead := f.log.at.seq
	closeLog(t, f)
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}

	// The whole folder of the journal put back: the journal itself cannot see that.
	copyTree(t, old, folder)
	j = open()
	act(t, j)
	f = follower(t, j, opt, FollowOptions{})
	catchUp(t, f)
	got, rep := events(t, dir, key)
	if len(rep.Gaps) != 1 || rep.Gaps[0].Reason != GapRolledBack || rep.Gaps[0].To != ahead || f.Status().Gaps != 1 {
		t.Fatalf("%+v", rep.Gaps)
	}
	_, head, err := j.Range()
	if err != nil {
		t.Fatal(err)
	}
	// What the journal has now follows where the two agreed.
	from := rep.Gaps[0].From
	if n := uint64(len(got)); n != ahead+head-from+1 || got[ahead].Seq != from || got[n-1].Seq != head {
		t.Errorf("%d events, from %d, ahead %d, head %d", n, from, ahead, head)
	}
	closeLog(t, f)

	// Retention without a hold.
	if err := j.Close(); err != nil {
		t.Fatal(err)
	}
	j = openJournalRetention(t, folder, time.Hour)
	now := time.Now()
	for i := range 4 {
		act(t, j)
		if _, err := j.Retain(now.Add(time.Duration(i) * time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	act(t, j)
	f = follower(t, j, opt, FollowOptions{})
	catchUp(t, f)
	_, rep = events(t, dir, key)
	b, _, err := j.Range()
	if err != nil {
		t.Fatal(err)
	}
	if len(rep.Gaps) != 2 || rep.Gaps[1].Reason != GapRetention || rep.Gaps[1].From != head+1 || rep.Gaps[1].To != b {
		t.Errorf("%+v, base %d, head %d", rep.Gaps, b, head)
	}
	// With one: none.
	j.Hold(f.Passed)
	for i := range 6 {
		act(t, j)
		if _, err := j.Retain(now.Add(time.Duration(i+10) * time.Hour)); err != nil {
			t.Fatal(err)
		}
	}
	catchUp(t, f)
	if _, rep = events(t, dir, key); len(rep.Gaps) != 2 {
		t.Errorf("retention did not wait: %+v", rep.Gaps)
	}
	closeLog(t, f)
}

// A journal that was put back and has gone on beyond what the log had seen: its length tells
// nothing any more, the hash does.
func TestRolledBackAndGrown(t *testing.T) {
	contract.Covers(t, "N5", "M5")
	key, dir := newKey(t), tempDir(t)
	base := t.TempDir()
	folder, old := filepath.Join(base, "journal"), filepath.Join(base, "old")
	opt := Options{Dir: dir, Recipient: key.Public()}
	closed := func(j *journal.Journal) {
		t.Helper()
		if err := j.Close(); err != nil {
			t.Fatal(err)
		}
	}
	j := openJournal(t, folder)
	act(t, j)
	closed(j)
	copyTree(t, folder, old)
	j = openJournal(t, folder)
	act(t, j)
	f := follower(t, j, opt, FollowOptions{})
	catchUp(t, f)
	ahead := f.log.at.seq
	closeLog(t, f)
	closed(j)
	copyTree(t, old, folder)
	j = openJournal(t, folder)
	for range 4 {
		act(t, j)
	}
	if _, head, err := j.Range(); err != nil || head <= ahead {
		t.Fatal(head, ahead, err)
	}
	f = follower(t, j, opt, FollowOptions{})
	catchUp(t, f)
	if _, rep := events(t, dir, key); len(rep.Gaps) != 1 || rep.Gaps[0].Reason != GapRolledBack || rep.Gaps[0].To != ahead {
		t.Errorf("%+v", rep.Gaps)
	}
	closeLog(t, f)
}

func openJournalRetention(t *testing.T, dir string, d time.Duration) *journal.Journal {
	return openJournalOptions(t, journal.Options{Dir: dir, SweepInterval: -1, Retention: d})
}

// A crash leaves any part of the last write: the next start goes on without a gap
// and without anything twice.
func TestTornWrites(t *testing.T) {
	contract.Covers(t, "N5", "T5")
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	rng := rand.New(rand.NewPCG(seed, 4))
	key, dir := newKey(t), tempDir(t)
	j := openJournal(t, filepath.Join(t.TempDir(), "journal"))
	opt := Options{Dir: dir, Recipient: key.Public(), CheckpointEvery: 1 << 30}
	f := follower(t, j, opt, FollowOptions{})
	act(t, j)
	catchUp(t, f)
	synced := f.log.size
	for range 4 {
		act(t, j)
	}
	catchUp(t, f) // the write that is torn
	path := f.log.path(1)
	closeLog(t, f)
	full := read(t, path)
	torn := filepath.Join(t.TempDir(), "torn")
	for i := range rounds(45, 1500) {
		b := append([]byte(nil), full...)
		switch i % 3 {
		case 0: // cut anywhere
			b = b[:synced+rng.Int64N(int64(len(b))-synced+1)]
		case 1: // any sectors never written, the file as long as it would be
			for at := (synced + 511) &^ 511; at < int64(len(b)); at += 512 {
				if rng.IntN(2) == 0 {
					clear(b[at:min(at+512, int64(len(b)))])
				}
			}
		case 2: // both
			b = b[:synced+rng.Int64N(int64(len(b))-synced+1)]
			at := synced + rng.Int64N(int64(len(b))-synced+1)
			clear(b[at:min(at+700, int64(len(b)))])
		}
		copyDir(t, dir, torn)
		write(t, filepath.Join(torn, segmentName(1)), b)
		o := opt
		o.Dir = torn
		f := follower(t, j, o, FollowOptions{})
		if f.log.at.seq < 7 { // what was synced: a BOOT and an action
			t.Fatalf("case %d: the cursor went back to %d", i, f.log.at.seq)
		}
		catchUp(t, f)
		closeLog(t, f)
		if rep := sameAsJournal(t, j, torn, key); len(rep.Gaps) > 0 || rep.Segments != 1 {
			t.Fatalf("case %d: %+v", i, rep)
		}
	}
	// Damage in what was synced, with a later write behind it, is no crash: it is kept
	// as it is, and found.
	b := append([]byte(nil), full...)
	b[headerBytes+recordHead+40] ^= 1
	copyDir(t, dir, torn)
	write(t, filepath.Join(torn, segmentName(1)), b)
	o := opt
	o.Dir = torn
	f = follower(t, j, o, FollowOptions{})
	catchUp(t, f)
	closeLog(t, f)
	if string(read(t, filepath.Join(torn, segmentName(1)))) != string(b) {
		t.Error("the damaged segment was changed")
	}
	_, err := Verify(torn, VerifyOptions{})
	wantBroken(t, err, 1)
}

// failing is a file system's moment of weakness.
type failing struct {
	Source
	room atomic.Pointer[error]
}

func (f *failing) Room() error {
	if p := f.room.Load(); p != nil {
		return *p
	}
	return f.Source.Room()
}

// A log that cannot be written is told, holds nothing up, and catches up.
func TestFailingLog(t *testing.T) {
	contract.Covers(t, "N5")
	key, dir := newKey(t), tempDir(t)
	j := openJournal(t, filepath.Join(t.TempDir(), "journal"))
	src := &failing{Source: j}
	m := &countedMetrics{}
	f := follower(t, src, Options{Dir: dir, Recipient: key.Public()}, FollowOptions{Metrics: m})
	full := error(errors.New("no room"))
	src.room.Store(&full)
	act(t, j)
	for range 2 {
		_, err := f.step(bg)
		f.failing(err)
	}
	if f.Status().Failing == "" || m.failing.Load() != 1 || f.Status().Lag != 7 {
		t.Errorf("%+v", f.Status())
	}
	src.room.Store(nil)
	// A write that fails half way leaves nothing that stays.
	broken, err := os.Open(f.log.path(1)) // for reading: every write fails
	if err != nil {
		t.Fatal(err)
	}
	whole := f.log.file
	f.log.file = broken
	if _, err := f.step(bg); err == nil {
		t.Fatal("the write did not fail")
	}
	if f.Passed() != 0 {
		t.Error("the cursor moved without a write")
	}
	f.log.file = whole
	_ = broken.Close()
	if _, err := whole.WriteAt(make([]byte, 300), f.log.size); err != nil {
		t.Fatal(err)
	}
	catchUp(t, f)
	f.failing(nil)
	if f.Status().Failing != "" || m.failing.Load() != 0 {
		t.Errorf("%+v", f.Status())
	}
	sameAsJournal(t, j, dir, key)
}

type countedMetrics struct {
	noMetrics
	failing   atomic.Int64
	delivered atomic.Int64
	lost      atomic.Int64
}

func (m *countedMetrics) AuditFailing(yes bool) {
	m.failing.Store(0)
	if yes {
		m.failing.Store(1)
	}
}

func (m *countedMetrics) AuditDelivery(ok bool) {
	if ok {
		m.delivered.Add(1)
	} else {
		m.lost.Add(1)
	}
}

// What retention removes is said in the log before it goes; what anybody else removes
// is missing.
func TestRetentionIsNoRemoval(t *testing.T) {
	contract.Covers(t, "N1")
	key, dir := newKey(t), tempDir(t)
	j := openJournal(t, filepath.Join(t.TempDir(), "journal"))
	f := follower(t, j, Options{Dir: dir, Recipient: key.Public(), SegmentBytes: 4 << 10, MaxBytes: 16 << 10, CheckpointEvery: 5}, FollowOptions{})
	for range 20 {
		act(t, j)
		catchUp(t, f)
	}
	f.checkpoint()
	closeLog(t, f)
	rep, err := Verify(dir, VerifyOptions{})
	if err != nil || rep.Removed == 0 || rep.First != rep.Removed+1 || rep.Segments > 6 {
		t.Fatalf("%v %+v", err, rep)
	}
	segments, err := listSegments(dir)
	if err != nil {
		t.Fatal(err)
	}
	// One more, by hand: where it is not covered by what retention said.
	h, err := readHeader(filepath.Join(dir, segmentName(segments[len(segments)-1])))
	if err != nil {
		t.Fatal(err)
	}
	copied := filepath.Join(t.TempDir(), "c")
	copyDir(t, dir, copied)
	for _, n := range segments[:len(segments)-1] {
		if err := os.Remove(filepath.Join(copied, segmentName(n))); err != nil {
			t.Fatal(err)
		}
	}
	_, err = Verify(copied, VerifyOptions{})
	if msg := wantBroken(t, err, 1); !strings.Contains(msg, "retention did not") || h.first == 1 {
		t.Error(msg)
	}
	// It goes on from there.
	f = follower(t, j, Options{Dir: dir, Recipient: key.Public(), SegmentBytes: 4 << 10, MaxBytes: 16 << 10, CheckpointEvery: 5}, FollowOptions{})
	act(t, j)
	catchUp(t, f)
	closeLog(t, f)
	if rep, err := Verify(dir, VerifyOptions{}); err != nil || rep.Seq != uint64(1+6*21) {
		t.Errorf("%v %+v", err, rep)
	}
}

// A jump of the clock by ten years, in either direction, removes nothing.
func TestClockJump(t *testing.T) {
	contract.Covers(t, "T5")
	key, dir := newKey(t), tempDir(t)
	j := openJournal(t, filepath.Join(t.TempDir(), "journal"))
	now := time.Now()
	opt := Options{Dir: dir, Recipient: key.Public(), SegmentBytes: 1 << 10, Retention: 90 * 24 * time.Hour, CheckpointEvery: 5, Now: func() time.Time { return now }}
	for _, jump := range []time.Duration{0, 87600 * time.Hour, -87600 * time.Hour, 87600 * time.Hour} {
		now = now.Add(jump)
		f := follower(t, j, opt, FollowOptions{})
		for range 3 {
			act(t, j)
			catchUp(t, f)
		}
		closeLog(t, f)
	}
	if rep := sameAsJournal(t, j, dir, key); rep.Removed != 0 || rep.Segments < 10 {
		t.Errorf("%+v", rep)
	}
}

// By age, and checkpoints by the clock: in a bubble.
func TestTimers(t *testing.T) {
	key, dir := newKey(t), tempDir(t)
	src := &emptySource{}
	synctest.Test(t, func(t *testing.T) {
		l := openLog(t, Options{Dir: dir, Recipient: key.Public(), Retention: 72 * time.Hour, CheckpointInterval: time.Hour})
		f := NewFollower(l, FollowOptions{Source: src})
		step := func() {
			t.Helper()
			if _, err := f.step(bg); err != nil {
				t.Fatal(err)
			}
		}
		for range 6 {
			src.head.Add(1)
			step()
			before := l.count
			time.Sleep(59 * time.Minute)
			if step(); l.count != before {
				t.Error("a checkpoint before its time")
			}
			time.Sleep(time.Minute)
			if step(); l.count == before {
				t.Error("no checkpoint in its time")
			}
			after := l.count
			time.Sleep(23 * time.Hour)
			if step(); l.count != after {
				t.Error("a checkpoint of nothing")
			}
		}
		if n := len(l.segments); n < 3 || n > 5 || l.segments[0] == 1 {
			t.Errorf("segments %v", l.segments)
		}
	})
	if rep, err := Verify(dir, VerifyOptions{}); err != nil || rep.Removed == 0 {
		t.Errorf("%v %+v", err, rep)
	}
}

// emptySource has frames of one BOOT each.
type emptySource struct{ head atomic.Uint64 }

func (s *emptySource) Frames(_ context.Context, after uint64, _ int) (out []journal.Frame, err error) {
	for n := after + 1; n <= s.head.Load(); n++ {
		f := journal.Frame{First: n, Last: n, Hash: hashAt(n)}
		f.Events = append(f.Events, bootEvent(n))
		out = append(out, f)
	}
	return out, nil
}

func (s *emptySource) Range() (base, head uint64, err error) { return 0, s.head.Load(), nil }

func (s *emptySource) HashAt(seq uint64) ([32]byte, bool, error) { return hashAt(seq), true, nil }

func (s *emptySource) Room() error { return nil }

// Checkpoints arrive at a file, a command and an HTTPS endpoint; one that does not
// answer gets the newest as soon as it does.
func TestDestinations(t *testing.T) {
	key, dir := newKey(t), tempDir(t)
	j := openJournal(t, filepath.Join(t.TempDir(), "journal"))
	var refusing atomic.Bool
	refusing.Store(true)
	got := make(chan Checkpoint, 16)
	refused := make(chan struct{}, 16)
	srv := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if refusing.Load() {
			w.WriteHeader(http.StatusServiceUnavailable)
			refused <- struct{}{}
			return
		}
		b, err := io.ReadAll(r.Body)
		var c Checkpoint
		if err != nil || json.Unmarshal(b, &c) != nil || r.Header.Get("Authorization") != "Bearer t0ken" || r.Method != http.MethodPost {
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		got <- c
	}))
	srv.Config.ErrorLog = log.New(io.Discard, "", 0)
	srv.TLS = &tls.Config{MinVersion: tls.VersionTLS13}
	srv.StartTLS()
	defer srv.Close()
	base := t.TempDir()
	token, file, out := filepath.Join(base, "token"), filepath.Join(base, "file"), filepath.Join(base, "out")
	write(t, token, []byte("t0ken\n"))
	m := &countedMetrics{}
	f := follower(t, j, Options{Dir: dir, Recipient: key.Public()}, FollowOptions{Poll: time.Millisecond, Metrics: m, To: []Destination{
		{File: file},
		{Command: []string{"sh", "-c", `cat >> "$0"`, out}},
		{URL: srv.URL + "/in", Roots: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: srv.Certificate().Raw}), TokenFile: token},
		{URL: srv.URL + "/in"}, // not trusted
	}})
	act(t, j)
	catchUp(t, f)
	ctx, stop := context.WithCancel(bg)
	var sending sync.WaitGroup
	sending.Go(func() { f.send.run(ctx) })
	f.checkpoint()
	<-refused
	act(t, j)
	catchUp(t, f)
	refusing.Store(false)
	f.checkpoint()
	want := f.log.last
	for c := (Checkpoint{}); c.Records != want.Records; c = <-got {
	}
	// Each destination is sent to by itself, the server may be ahead of the others.
	for end := time.Now().Add(20 * time.Second); f.Status().Delivered[0].Records != want.Records || f.Status().Delivered[1].Records != want.Records; {
		if time.Now().After(end) {
			t.Fatalf("%+v", f.Status().Delivered)
		}
		time.Sleep(time.Millisecond)
	}
	stop()
	sending.Wait()
	for _, path := range []string{file, out} {
		all, err := ParseCheckpoints(string(read(t, path)))
		if err != nil || all[len(all)-1].Records != want.Records {
			t.Errorf("%s: %v %+v", path, err, all)
		}
		if rep, err := Verify(dir, VerifyOptions{Checkpoints: all}); err != nil || rep.Compared < len(all) {
			t.Errorf("%v %+v", err, rep)
		}
	}
	st := f.Status().Delivered
	if st[0].Records != want.Records || st[3].Records != 0 || !strings.Contains(st[3].Failing, "not trusted") || m.lost.Load() == 0 {
		t.Errorf("%+v", st)
	}
}
