package e2e

import (
	"encoding/xml"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"waybill/internal/testkit"
)

// TestH2Spec runs the conformance tests of h2spec (RFC 9113, RFC 7541) against the
// caller's side of an intercepted tunnel and against net/http as it comes: nothing
// fails through Waybill that does not fail there.
func TestH2Spec(t *testing.T) {
	t.Parallel()
	bin := buildIn(t, "h2spec", "github.com/summerwind/h2spec/cmd/h2spec")
	ca := testkit.NewCA(t)
	// Bodies are read, as an application does; some tests need an answer with content.
	answer := http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		_, _ = io.WriteString(w, strings.Repeat("x", 256))
	})
	plain := testkit.NewOrigin(t, testkit.OriginConfig{TLS: ca.Server("localhost"), HTTP2: true, Handler: answer})
	origin := testkit.NewOrigin(t, testkit.OriginConfig{TLS: ca.Server("localhost"), Handler: answer})
	door, err := net.Listen("tcp", "127.0.0.1:0") //nolint:noctx // a door of this test
	if err != nil {
		t.Fatal(err)
	}
	port := door.Addr().(*net.TCPAddr).Port
	route := fmt.Sprintf("  - name: spec\n    match: {host: localhost, ports: [%d]}\n    contract: {repeatable: true}\n    durability: relaxed\n    upstream: {roots: roots.pem, resolve: {localhost: %q}}\n", port, origin.Addr())
	b := newBed(t, ca, rigOptions{routes: route})
	b.begin()
	forward(t, door, b.addr, "localhost:"+strconv.Itoa(port))

	run := func(port int, args ...string) map[string]string {
		report := filepath.Join(t.TempDir(), "report.xml")
		code, out, errs := testkit.Run(t, testkit.Command{Path: bin, Args: append([]string{"-S", "-t", "-k", "-h", "localhost", "-p", strconv.Itoa(port), "-j", report}, args...)})
		text, err := os.ReadFile(report)
		if err != nil {
			t.Fatalf("%d: %v %s %s", code, err, out, errs)
		}
		return failures(t, text)
	}
	var through, direct map[string]string
	var both sync.WaitGroup
	both.Go(func() { through = run(port) })
	both.Go(func() { direct = run(plain.Port()) })
	both.Wait()
	if len(through) < 100 || len(through) != len(direct) {
		t.Fatalf("%d tests through Waybill, %d of net/http", len(through), len(direct))
	}
	for name, failure := range through {
		if failure != "" && direct[name] != "" {
			t.Logf("%s: fails on both: %s", name, failure)
			continue
		}
		// The tests wait for two seconds, which a busy machine may need by itself.
		if failure != "" {
			id, title, _ := strings.Cut(name, " ")
			failure = "not repeated"
			for n, f := range run(port, "-o", "15", id) {
				if strings.HasSuffix(n, " "+title) { // numbered anew
					failure = f
				}
			}
		}
		if failure != "" {
			t.Errorf("%s: fails through Waybill only: %s", name, failure)
		}
	}
	if n := len(b.settle(t)); n < 10 {
		t.Errorf("%d actions: this run shows nothing", n)
	}
	b.verify()
}

// failures reads a report: the text of each test's failure, "" for none.
func failures(t *testing.T, report []byte) map[string]string {
	var doc struct {
		Suites []struct {
			Name  string `xml:"name,attr"`
			Cases []struct {
				Package string `xml:"package,attr"`
				Name    string `xml:"classname,attr"`
				Failure string `xml:"failure"`
				Error   string `xml:"error"`
			} `xml:"testcase"`
		} `xml:"testsuite"`
	}
	if err := xml.Unmarshal(report, &doc); err != nil {
		t.Fatal(err)
	}
	out := make(map[string]string)
	for _, s := range doc.Suites {
		for i, c := range s.Cases {
			out[fmt.Sprintf("%s/%d %s: %s", c.Package, i+1, s.Name, c.Name)] = strings.Join(strings.Fields(c.Failure+c.Error), " ")
		}
	}
	return out
}

// forward is a door without a proxy's manners: what connects to it is carried to
// target through a CONNECT to proxy.
func forward(t *testing.T, door net.Listener, proxy, target string) {
	var wg sync.WaitGroup
	t.Cleanup(func() { _ = door.Close(); wg.Wait() })
	wg.Go(func() {
		for {
			in, err := door.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer func() { _ = in.Close() }()
				conn, err := net.DialTimeout("tcp", proxy, patience)
				if err != nil {
					return
				}
				defer func() { _ = conn.Close() }()
				out := &eager{Conn: conn}
				if _, err := fmt.Fprintf(conn, "CONNECT %s HTTP/1.1\r\nHost: %s\r\n\r\n", target, target); err != nil || out.skip() != nil {
					return
				}
				// Whichever side ends first ends both: h2spec waits for a closed connection.
				done := make(chan struct{}, 2)
				for _, way := range [][2]net.Conn{{out, in}, {in, out}} {
					go func() {
						_, _ = io.Copy(way[0], way[1])
						done <- struct{}{}
					}()
				}
				<-done
				_ = in.SetDeadline(time.Now())
				_ = out.SetDeadline(time.Now())
				<-done
			})
		}
	})
}
