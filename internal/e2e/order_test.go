package e2e

import (
	"bufio"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// call is one finished system call of a trace.
type call struct {
	name string
	args string
	ok   bool
}

var (
	callLine   = regexp.MustCompile(`^\d+ +(\w+)\((.*)\) += (-?\d+)`)
	unfinished = regexp.MustCompile(`^(\d+) +(\w+)\((.*) <unfinished \.\.\.>$`)
	resumed    = regexp.MustCompile(`^(\d+) +<\.\.\. (\w+) resumed>(.*)\) += (-?\d+)`)
)

// readTrace puts the calls in order of their ends, writes in order of their starts:
// a sync counts when it is finished, a write as soon as it may have begun.
func readTrace(t *testing.T, path string) []call {
	t.Helper()
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	var calls []call
	begun := make(map[string]string)
	s := bufio.NewScanner(f)
	s.Buffer(nil, 1<<20)
	for s.Scan() {
		line := s.Text()
		if m := unfinished.FindStringSubmatch(line); m != nil {
			begun[m[1]+m[2]] = m[3]
			if strings.HasPrefix(m[2], "write") || strings.HasPrefix(m[2], "send") {
				calls = append(calls, call{m[2], m[3], true})
			}
		} else if m := resumed.FindStringSubmatch(line); m != nil {
			if !strings.HasPrefix(m[2], "write") && !strings.HasPrefix(m[2], "send") {
				calls = append(calls, call{m[2], begun[m[1]+m[2]] + m[3], !strings.HasPrefix(m[4], "-")})
			}
		} else if m := callLine.FindStringSubmatch(line); m != nil {
			calls = append(calls, call{m[1], m[2], !strings.HasPrefix(m[3], "-")})
		}
	}
	return calls
}

// TestSyncBeforeSend: JR-03. In the trace of the real binary every sync of the
// dispatch record has returned before the first byte of the request goes to the
// origin, and every sync of the result before the first byte of the answer.
func TestSyncBeforeSend(t *testing.T) {
	contract.Covers(t, "F1", "H1")
	strace := testkit.RequireTool(t, "strace")
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{Handler: func(testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Reply(201, "made-by-the-origin")}
	}})
	r := newRig(t, ca, rigOptions{origins: map[string]string{plainHost: up.Addr()}})
	trace := filepath.Join(r.dir, "trace")
	r.start(strace, "-f", "-qq", "-s", "96", "-e", "trace=fsync,fdatasync,msync,io_getevents,read,write,writev,sendto,sendmsg", "-e", "signal=none", "-o", trace)
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr})
	const rounds = 3       // a fresh connection to the origin, then a kept one
	for range rounds + 1 { // the end of the last one may be missing in the trace
		if resp := testkit.Send(t, client, http.MethodPost, "http://"+plainHost+"/v1/strace", "amount=5"); resp.Status != 201 {
			t.Fatalf("%d %s", resp.Status, resp.Body)
		}
	}
	r.p.Kill()
	seen, syncs, wrong := 0, 0, ""
	syncsOf := map[string][]int{}
	for _, c := range readTrace(t, trace) {
		switch {
		case c.name == "read" && strings.Contains(c.args, "POST http://"+plainHost):
			syncs, wrong = 0, "the request was sent"
		case c.name == "io_getevents" && strings.Contains(c.args, "res="), // the journal's: such a write is durable when it has ended
			c.ok && (c.name == "fsync" || c.name == "fdatasync" || c.name == "msync" && strings.Contains(c.args, "MS_SYNC")):
			syncs++
		case strings.Contains(c.args, `"POST /v1/strace`):
			syncsOf["send"] = append(syncsOf["send"], syncs)
			if syncs == 0 {
				t.Errorf("%s with no finished sync between its arrival and its hand-over", wrong)
			}
			syncs, wrong = 0, "the answer was given"
			seen++
		case c.name == "write" && strings.Contains(c.args, `"HTTP/1.1 201`):
			syncsOf["answer"] = append(syncsOf["answer"], syncs)
			if syncs == 0 {
				t.Errorf("%s with no finished sync between the origin's answer and ours", wrong)
			}
		}
	}
	if seen < rounds || len(syncsOf["answer"]) < rounds {
		t.Fatalf("the trace shows %d hand-overs and %d answers, not %d", seen, len(syncsOf["answer"]), rounds)
	}
	// One client costs two syncs a request, not more: one before the hand-over, one before
	// the answer (DESIGN 6).
	for what, list := range syncsOf {
		for i, n := range list {
			if n != 1 {
				t.Errorf("request %d: %d syncs before the %s, not one", i, n, what)
			}
		}
	}
}
