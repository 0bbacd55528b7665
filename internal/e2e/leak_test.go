package e2e

import (
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// requests is how many requests TestNoLeak sends: 1,000 in make test, 10,000 in
// make test-long.
func requests() int {
	if long() {
		return 10_000
	}
	return 1000
}

// descriptors counts the open files of the process without those of the journal, whose
// number follows its size.
func (r *rig) descriptors(t testing.TB) int {
	t.Helper()
	dir := "/proc/" + strconv.Itoa(r.p.PID()) + "/fd"
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, e := range entries {
		target, err := os.Readlink(dir + "/" + e.Name())
		if err == nil && !strings.HasPrefix(target, r.data+"/journal") {
			n++
		}
	}
	return n
}

var goroutines = regexp.MustCompile(`(?m)^go_goroutines (\d+)`)

// TestNoLeak: many requests through one intercepted keep-alive connection leave
// goroutines, descriptors and temporary files where they were.
func TestNoLeak(t *testing.T) {
	contract.Covers(t, "G12")
	ca := testkit.NewCA(t)
	origin := testkit.NewOrigin(t, testkit.OriginConfig{TLS: ca.Server(payHost)})
	r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: origin.Addr()}})
	tmp := r.dir + "/tmp"
	if err := os.Mkdir(tmp, 0o700); err != nil {
		t.Fatal(err)
	}
	r.env = []string{"TMPDIR=" + tmp}
	r.start()
	count := func() int {
		m := goroutines.FindStringSubmatch(get(t, r.meters))
		if m == nil {
			t.Fatal("no go_goroutines")
		}
		n, err := strconv.Atoi(m[1])
		if err != nil {
			t.Fatal(err)
		}
		return n
	}
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots()})
	send := func(i int) {
		body := "amount=" + strconv.Itoa(i)
		if i%100 == 0 {
			body = strings.Repeat("x", 2<<20) // spooled to disk
		}
		if resp := testkit.Send(t, client, http.MethodPost, "https://"+payHost+"/v1/x", body); resp.Status != 200 {
			t.Fatalf("%d: %d %s", i, resp.Status, resp.Body)
		}
	}
	for i := range 20 {
		send(i)
	}
	beforeG, beforeF := count(), r.descriptors(t)
	n := requests()
	for i := range n {
		send(i)
	}
	testkit.Settles(t, "goroutines", beforeG+5, count)
	testkit.Settles(t, "file descriptors", beforeF+4, func() int { return r.descriptors(t) })
	for _, f := range testkit.DeletedFiles(t, r.p.PID()) {
		if strings.Contains(f, "body-") {
			t.Errorf("a spooled body is still open: %s", f)
		}
	}
	if left := testkit.Files(t, tmp); len(left) != 0 {
		t.Errorf("left in the temp folder: %v", left)
	}
	if got := origin.Count(http.MethodPost, "/v1/x"); got != n+20 {
		t.Errorf("%d arrivals of %d", got, n+20)
	}
	conns := len(origin.Conns())
	if conns > n/50+5 {
		t.Errorf("%d connections to the origin for %d requests", conns, n)
	}
}
