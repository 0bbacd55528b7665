package e2e

import (
	"bytes"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"hash"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// memory follows the memory that the proxy has of its own, without files that are mapped.
type memory struct {
	mu   sync.Mutex
	peak int64
}

func (s *sshRig) memory(stop <-chan struct{}) *memory {
	m := &memory{}
	path := fmt.Sprintf("/proc/%d/status", s.p.PID())
	form := regexp.MustCompile(`RssAnon:\s+(\d+) kB`)
	go func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(20 * time.Millisecond):
			}
			text, _ := os.ReadFile(path)
			if f := form.FindSubmatch(text); f != nil {
				n, _ := strconv.ParseInt(string(f[1]), 10, 64)
				m.mu.Lock()
				m.peak = max(m.peak, n<<10)
				m.mu.Unlock()
			}
		}
	}()
	return m
}

// take returns the peak since the last time, in bytes.
func (m *memory) take() int64 {
	m.mu.Lock()
	defer m.mu.Unlock()
	n := m.peak
	m.peak = 0
	return n
}

// counted is a stream that is not kept.
type counted struct {
	n    int64
	hash hash.Hash
	head bytes.Buffer // its first bytes
}

// Write implements io.Writer.
func (c *counted) Write(p []byte) (int, error) {
	c.n += int64(len(p))
	if left := 4096 - c.head.Len(); left > 0 {
		c.head.Write(p[:min(left, len(p))])
	}
	return c.hash.Write(p)
}

func (c *counted) digest() string { return "sha256:" + hex.EncodeToString(c.hash.Sum(nil)) }

// stream runs ssh with output that is only counted.
func (s *sshRig) stream(host, command string, limit time.Duration) (code int, out, errs *counted, took time.Duration) {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	cmd := exec.CommandContext(ctx, "ssh", "-n", "-F", s.conf, s.user+"@"+host, command)
	cmd.Dir, cmd.Env = s.dir, append(testkit.CleanEnv(), s.environ()...)
	out, errs = &counted{hash: sha256.New()}, &counted{hash: sha256.New()}
	cmd.Stdout, cmd.Stderr = out, errs
	begin := time.Now()
	if err := cmd.Run(); err != nil {
		code = cmd.ProcessState.ExitCode()
	}
	return code, out, errs, time.Since(begin)
}

// Case SH-03 with a real server and a real client: both streams at once, and what
// outgrows the route's limit. Nothing waits for anything, memory stays bounded, and an
// output that is not whole is never a success (CONTRACT G9, H4, G13).
func TestSSHLarge(t *testing.T) {
	contract.Covers(t, "G9", "H4", "G13", "G3")
	route := func(name, limits string) string {
		return fmt.Sprintf("  - name: %[1]s\n    match: {host: %[1]s.real.test}\n    ssh: {users: [USER], credential: key, known_hosts: known_hosts, commands: [{exact: BIG, exit_status: authoritative}, {regexp: \"(?s).*\"}]}\n    upstream: {resolve: {%[1]s.real.test: \"REAL\"}}\n    limits: %[2]s\n", name, limits)
	}
	beyond, whole := int64(24<<20), int64(12<<20)
	if long() {
		beyond, whole = 1_000_000_000, 256<<20
	}
	const limit, maxMemory = 8 << 20, 320 << 20
	authoritative := fmt.Sprintf("head -c %d /dev/zero; exit 0", beyond)
	s := newSSHRig(t, sshOptions{real: true, env: []string{"GOMEMLIMIT=192MiB"}, more: strings.ReplaceAll(route("small", fmt.Sprintf("{response: %dB}", limit))+route("big", "{response: 2GiB}"), "BIG", strconv.Quote(authoritative))})
	s.sshRun("small.real.test", s.user, "true")
	stop := make(chan struct{})
	defer close(stop)
	mem := s.memory(stop)
	until(t, "memory is known", func() bool { return mem.take() > 0 })
	bounded := func(t *testing.T) {
		t.Helper()
		if n := mem.take(); n > maxMemory {
			t.Errorf("the proxy had %d MiB", n>>20)
		} else {
			t.Logf("the proxy had %d MiB at most", n>>20)
		}
	}

	t.Run("both streams", func(t *testing.T) {
		defer bounded(t)
		const n = 10 << 20
		want := map[string][]byte{"out": make([]byte, n), "err": make([]byte, n)}
		for name, b := range want {
			_, _ = rand.Read(b)
			if err := os.WriteFile(filepath.Join(s.real.Dir, name), b, 0o600); err != nil {
				t.Fatal(err)
			}
		}
		command := fmt.Sprintf("cd %s; cat out & cat err >&2; wait", s.real.Dir)
		g := s.sshRun("real.test", s.user, command)
		if g.code != 0 || g.stdout != string(want["out"]) || g.stderr != string(want["err"]) {
			t.Errorf("exit %d, %d and %d bytes after %v", g.code, len(g.stdout), len(g.stderr), g.took)
		}
		v := s.last()
		ev := s.evidence(v.InvocationID)
		if facts(v) != "remote_execution committed never" || *ev.StdoutBytes != n || *ev.StderrBytes != n || ev.StdoutDigest != digest(want["out"]) || ev.StderrDigest != digest(want["err"]) {
			t.Errorf("%q %+v", facts(v), ev)
		}
		code, out, errs := s.cli("result", v.InvocationID)
		if code != 0 || out != string(want["out"]) || errs != string(want["err"]) {
			t.Errorf("stored: exit %d, %d and %d bytes", code, len(out), len(errs))
		}
		// From any chunk on, at the border of a frame (H4).
		after := func(chunk int) (last int, out, errs []byte) {
			var streams [2]bytes.Buffer
			for last = chunk; ; {
				part := s.api(t, fmt.Sprintf("/v1/actions/%s/result?after_chunk=%d", v.InvocationID, last))
				n, _ := strconv.Atoi(part.Header.Get("Waybill-Last-Chunk"))
				if part.Status != http.StatusPartialContent || n <= last {
					return last, streams[0].Bytes(), streams[1].Bytes()
				}
				if err := dispatch.SplitOutput(bytes.NewReader(part.Body), &streams[0], &streams[1]); err != nil {
					t.Fatal(err)
				}
				last = n
			}
		}
		chunks, o, e := after(0)
		if chunks < 80 || !bytes.Equal(o, want["out"]) || !bytes.Equal(e, want["err"]) {
			t.Errorf("%d chunks, %d and %d bytes", chunks, len(o), len(e))
		}
		if _, o, e := after(chunks / 2); len(o)+len(e) == 0 || len(o)+len(e) >= 2*n || !bytes.HasSuffix(want["out"], o) || !bytes.HasSuffix(want["err"], e) {
			t.Errorf("from chunk %d on: %d and %d bytes", chunks/2, len(o), len(e))
		}
		t.Logf("10 MiB on both streams: %v", g.took)
	})
	t.Run("beyond the limit", func(t *testing.T) {
		defer bounded(t)
		code, out, errs, took := s.stream("small.real.test", fmt.Sprintf("head -c %d /dev/zero", beyond), 5*time.Minute)
		v := s.last()
		ev := s.evidence(v.InvocationID)
		if code != 255 || facts(v) != "remote_execution unknown reconcile RESULT_LIMIT" || out.n > limit || !strings.HasPrefix(errs.head.String(), "waybill: RESULT_LIMIT "+v.InvocationID+": ") {
			t.Errorf("exit %d, %q, %d bytes\n%s", code, facts(v), out.n, errs.head.String())
		}
		if ev.ExitStatus == nil || *ev.ExitStatus != 0 || !ev.Truncated || *ev.StdoutBytes != beyond || ev.OutputComplete == nil || *ev.OutputComplete {
			t.Errorf("%+v", ev)
		}
		if code, out, _ := s.cli("result", v.InvocationID); code == 0 || len(out) > 0 {
			t.Errorf("a part is given out as the result: %d, %d bytes", code, len(out))
		}
		t.Logf("%d bytes beyond a limit of %d: %v", beyond, limit, took)
	})
	t.Run("beyond the limit, status authoritative", func(t *testing.T) {
		defer bounded(t)
		code, out, errs, _ := s.stream("small.real.test", authoritative, 5*time.Minute)
		v := s.last()
		ev := s.evidence(v.InvocationID)
		if code != 0 || facts(v) != "remote_execution committed never" || out.n > limit || ev.OutputComplete == nil || *ev.OutputComplete || !ev.Truncated || !strings.Contains(errs.head.String(), v.InvocationID+": the output above is incomplete") {
			t.Errorf("exit %d, %q, %d bytes %+v\n%s", code, facts(v), out.n, ev, errs.head.String())
		}
	})
	t.Run("whole", func(t *testing.T) {
		defer bounded(t)
		begin := time.Now()
		code, out, errs, took := s.stream("big.real.test", fmt.Sprintf("head -c %d /dev/zero", whole), 10*time.Minute)
		v := s.last()
		zeros := sha256.New()
		_, _ = io.CopyN(zeros, zeroReader{}, whole)
		want := "sha256:" + hex.EncodeToString(zeros.Sum(nil))
		if ev := s.evidence(v.InvocationID); code != 0 || facts(v) != "remote_execution committed never" || out.n != whole || out.digest() != want || ev.StdoutDigest != want {
			t.Errorf("exit %d, %q, %d bytes\n%s", code, facts(v), out.n, errs.head.String())
		}
		t.Logf("%d bytes stored and delivered: %v (%v with the look at it)", whole, took, time.Since(begin))
	})
	s.verify()
}

type zeroReader struct{}

// Read implements io.Reader.
func (zeroReader) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

func digest(b []byte) string {
	sum := sha256.Sum256(b)
	return "sha256:" + hex.EncodeToString(sum[:])
}
