package audit

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/killpoint"
)

const cutFolder = "WAYBILL_TEST_CUT"

// cutLog is a log whose retention removes several small segments at once.
func cutLog(dir string, recipient *PublicKey, maxBytes int64) (*Log, error) {
	return OpenLog(Options{Dir: dir, Recipient: recipient, SegmentBytes: 2 << 10, MaxBytes: maxBytes, CheckpointEvery: 5})
}

// TestCutChild is the process that TestKillBeforeCut kills; by itself it does nothing.
func TestCutChild(t *testing.T) {
	dir := os.Getenv(cutFolder)
	if dir == "" {
		return
	}
	recipient, err := ParsePublicKey(os.Getenv(cutFolder + "_KEY"))
	if err != nil {
		t.Fatal(err)
	}
	limit, _ := strconv.ParseInt(os.Getenv(cutFolder+"_BYTES"), 10, 64)
	l, err := cutLog(dir, recipient, limit)
	if err != nil {
		t.Fatal(err)
	}
	removed, err := l.retain()
	if err = errors.Join(err, l.Close()); err != nil || removed == 0 {
		t.Fatalf("%d segments removed: %v", removed, err)
	}
}

// TestKillBeforeCut: the process is killed when retention has put its cut on record and
// removed nothing yet, or only the first segments. The log verifies at each of these
// moments: what is still there was cut, and what is gone was, too; the next retention
// removes the rest, and what a stranger removes is told (N1, T2).
func TestKillBeforeCut(t *testing.T) {
	contract.Covers(t, "N1", "T2")
	key, dir := newKey(t), tempDir(t)
	j := openJournal(t, filepath.Join(t.TempDir(), "journal"))
	f := follower(t, j, Options{Dir: dir, Recipient: key.Public(), SegmentBytes: 2 << 10, CheckpointEvery: 5}, FollowOptions{})
	for range 12 {
		act(t, j)
		catchUp(t, f)
	}
	closeLog(t, f)
	before, err := Verify(dir, VerifyOptions{})
	if err != nil || before.Segments < 6 || before.Removed != 0 {
		t.Fatalf("%v %+v", err, before)
	}
	child := func(point string) *os.ProcessState {
		t.Helper()
		cmd := exec.Command(os.Args[0], "-test.run=^TestCutChild$", "-test.count=1")
		cmd.Env = append(os.Environ(), cutFolder+"="+dir, cutFolder+"_KEY="+key.Public().String(), cutFolder+"_BYTES=8192", killpoint.Variable+"="+point)
		out, err := cmd.CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		t.Logf("%q: %v %s", point, cmd.ProcessState, out)
		return cmd.ProcessState
	}
	status, ok := child(PointBeforeCut).Sys().(syscall.WaitStatus)
	if !ok || status.Signal() != syscall.SIGKILL {
		t.Fatalf("%s was not passed: %v", PointBeforeCut, status)
	}
	killed, err := Verify(dir, VerifyOptions{})
	if err != nil || killed.Segments < before.Segments || killed.Records <= before.Records || killed.Seq != before.Seq {
		t.Fatalf("the cut is on record, nothing is removed: %v %+v, before %+v", err, killed, before)
	}
	// As if it had been killed between two removals.
	segments, err := listSegments(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.Remove(filepath.Join(dir, segmentName(segments[0]))); err != nil {
		t.Fatal(err)
	}
	if rep, err := Verify(dir, VerifyOptions{}); err != nil || rep.First == 1 {
		t.Errorf("one of the cut segments is gone: %v %+v", err, rep)
	}
	if state := child(""); !state.Success() {
		t.Fatalf("the next retention: %v", state)
	}
	after, err := Verify(dir, VerifyOptions{})
	if err != nil || after.Segments >= killed.Segments || after.Seq != before.Seq || after.Removed == 0 || after.First != after.Removed+1 {
		t.Errorf("%v %+v", err, after)
	}
	// What no cut covers is missing, not removed.
	if segments, err = listSegments(dir); err != nil {
		t.Fatal(err)
	}
	for _, n := range segments[:len(segments)-1] {
		if err := os.Remove(filepath.Join(dir, segmentName(n))); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := Verify(dir, VerifyOptions{}); err == nil {
		t.Error("segments that no retention removed are not missed")
	}
}
