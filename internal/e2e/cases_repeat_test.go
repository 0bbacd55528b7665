package e2e

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// quickHost waits for its origin for a tenth of a second only.
const quickHost = "quick.example.test"

// TestCasesLeaveNothing repeats every kind of ending 100 times (1,000 times in make
// test-long): goroutines, descriptors and temporary files are where they were (P6).
func TestCasesLeaveNothing(t *testing.T) {
	contract.Covers(t, "F6")
	repeats := 100
	if long() {
		repeats = 1000
	}
	ca := testkit.NewCA(t)
	quick := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(quickHost), Handler: func(testkit.Arrival) []testkit.Step { return []testkit.Step{testkit.Stall()} }})
	b := newBed(t, ca, rigOptions{routes: "  - name: quick\n    match: {host: " + quickHost + "}\n    limits: {timeout: 100ms}\n    upstream: {roots: roots.pem, resolve: {" + quickHost + ": \"" + quick.Addr() + "\"}}\n"})
	tmp := b.dir + "/tmp"
	if err := os.Mkdir(tmp, 0o700); err != nil {
		t.Fatal(err)
	}
	b.env = []string{"TMPDIR=" + tmp}
	b.begin()
	b.on(payHost, "/v1/n/lost", dies())
	b.on(payHost, "/v1/n/reset", testkit.Respond(testkit.Reset()))
	b.on(payHost, "/v1/n/short", testkit.Respond(testkit.Write("HTTP/1.1 201 Created\r\nContent-Length: 99\r\n\r\nx"), testkit.Close()))
	b.on(payHost, "/v1/n/chunk", testkit.Respond(testkit.Write("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nabcd\r\n"), testkit.Close()))
	b.on(payHost, "/v1/n/status", testkit.Respond(testkit.Write("HTTP/1.1 1000 W\r\nContent-Length: 0\r\n\r\n")))
	b.on(payHost, "/v1/n/flood", testkit.Respond(testkit.Write(strings.Repeat("HTTP/1.1 103 Early Hints\r\n\r\n", 500)), testkit.Stall()))
	b.on(payHost, "/v1/n/early", testkit.Early(testkit.WriteLast("HTTP/1.1 413 Big\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"), testkit.HalfClose()))
	b.on(payHost, "/v1/n/after", testkit.Respond(testkit.WriteLast("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok and more"), testkit.Stall()))
	b.on(payHost, "/v1/n/redirect", redirect(302, "https://"+msgHost+"/v1/n"))
	b.on(payHost, "/v1/n/coding", testkit.Respond(testkit.Reply(200, "?", "Content-Encoding", "unheard-of")))
	b.on(payHost, "/v1/n/500", testkit.Respond(testkit.Reply(500, "no")))
	b.on(llmHost, "/v1/n/stream", testkit.Respond(testkit.Write(eventHead+chunk("data: 1\n\n")), testkit.Close()))
	b.onH2("/v1/n/refused", []testkit.H2Step{testkit.H2Refuse()})
	b.onH2("/v1/n/goaway", []testkit.H2Step{testkit.H2GoAwayIncluding(http2.ErrCodeNo), testkit.H2Close()})
	kinds := []struct{ target, fields string }{
		{payHost + "/v1/n/lost", ""}, {payHost + "/v1/n/reset", ""}, {payHost + "/v1/n/short", ""}, {payHost + "/v1/n/chunk", ""}, {payHost + "/v1/n/status", ""},
		{payHost + "/v1/n/flood", ""}, {payHost + "/v1/n/early", ""}, {payHost + "/v1/n/after", ""}, {payHost + "/v1/n/redirect", ""}, {llmHost + "/v1/n/stream", ""},
		{h2Host + "/v1/n/refused", ""}, {h2Host + "/v1/n/goaway", ""}, {downHost + "/v1/n", ""}, {expiredHost + "/v1/n", ""}, {adminHost + "/v1/n", ""},
		{payHost + "/v1/n/%2e%2e/x", ""}, {payHost + "/v1/n/upgrade", "Upgrade"}, {payHost + "/v1/n/mismatch", "Host"},
		{payHost + "/v1/n/coding", ""}, {payHost + "/v1/n/500", ""}, {quickHost + "/v1/n/stall", ""}, {quickHost + "/v1/n/gone", "Leave"}, {payHost + "/v1/n/head", "Head"},
	}
	roots := b.rig.roots()
	run := func(n int) {
		var wg sync.WaitGroup
		next := make(chan int)
		for range 4 {
			wg.Go(func() {
				clients := map[bool]*http.Client{}
				for _, h2 := range []bool{false, true} {
					clients[h2] = testkit.NewClient(t, testkit.ClientConfig{Proxy: b.addr, Roots: roots, HTTP2: h2, NoKeepAlive: !h2})
				}
				for i := range next {
					for j, k := range kinds {
						var more []string
						switch k.fields {
						case "Upgrade":
							more = []string{"Connection", "Upgrade", "Upgrade", "websocket"}
						case "Host":
							more = []string{"Host", evilHost}
						case "Leave":
							ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
							_, _ = testkit.SendContext(ctx, t, clients[i%2 == 1], http.MethodPost, "https://"+k.target, fmt.Sprintf("n=%d %d %d", n, i, j))
							cancel()
							continue
						case "Head":
							c := testkit.Dial(t, b.addr)
							c.Send(t, "POST http://"+k.target+" HTTP/1.1\r\nHost: "+payHost+"\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nx")
							_, _ = c.ReadAll()
							_ = c.Close()
							continue
						}
						// Bodies differ, or the duplicate guard would answer.
						_, _ = testkit.TrySend(t, clients[i%2 == 1 && k.fields != "Upgrade"], http.MethodPost, "https://"+k.target, fmt.Sprintf("n=%d %d %d", n, i, j), more...)
					}
				}
				for _, c := range clients {
					c.CloseIdleConnections()
				}
			})
		}
		for i := range n {
			next <- i
		}
		close(next)
		wg.Wait()
	}
	count := func() int {
		m := goroutines.FindStringSubmatch(get(t, b.meters))
		if m == nil {
			t.Fatal("no go_goroutines")
		}
		n, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	run(8)
	b.settle(t)
	beforeG, beforeF := count(), b.descriptors(t)
	run(repeats)
	all := b.settle(t)
	// One who leaves early enough leaves no record.
	left := 0
	for i := range all {
		if strings.HasSuffix(all[i].Target, "/v1/n/gone") {
			left++
		}
	}
	if want := (repeats + 8) * (len(kinds) - 1); len(all)-left != want || left < repeats/2 {
		t.Errorf("%d actions of %d requests, and %d of callers who left", len(all)-left, want, left)
	}
	testkit.Settles(t, "goroutines", beforeG+8, count)
	testkit.Settles(t, "file descriptors", beforeF+8, func() int { return b.descriptors(t) })
	if left := testkit.Files(t, tmp); len(left) != 0 {
		t.Errorf("left in the temp folder: %v", left)
	}
	kindsOf := map[string]int{}
	for i := range all {
		kindsOf[all[i].Code]++
	}
	t.Logf("%v", kindsOf)
	if log := b.p.Stderr(); regexp.MustCompile(`panic|fatal error`).MatchString(log) {
		t.Error("the log has a panic")
	}
	if sum := b.metricsSum(t); sum != len(all) {
		t.Errorf("the metrics count %d actions, the journal has %d (P7)", sum, len(all))
	}
}
