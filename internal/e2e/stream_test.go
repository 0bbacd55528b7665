package e2e

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

const eventHead = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"

func chunk(s string) string { return fmt.Sprintf("%x\r\n%s\r\n", len(s), s) }

// open sends a POST and returns the answer with its body unread.
func (r *rig) open(t *testing.T, h2 bool, url string) *http.Response {
	t.Helper()
	c := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), HTTP2: h2, NoKeepAlive: !h2})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader("{}"))
	if err != nil {
		t.Fatal(err)
	}
	resp, err := c.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = resp.Body.Close() })
	return resp
}

// api reads a resource of the caller API.
func (r *rig) api(t *testing.T, path string) *testkit.Response {
	t.Helper()
	return testkit.Send(t, testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr}), http.MethodGet, "http://waybill.internal"+path, "")
}

// TestEventsArriveOneByOne: ST-01 through the real binary, to HTTP/1.1 and HTTP/2
// callers: an event is here before the next one exists, and a caller that lost its
// place resumes by chunk, during the stream and after it.
func TestEventsArriveOneByOne(t *testing.T) {
	contract.Covers(t, "H4", "H5", "H9", "H10")
	for _, h2 := range []bool{false, true} {
		t.Run("h2="+strconv.FormatBool(h2), func(t *testing.T) {
			ca := testkit.NewCA(t)
			second, end := testkit.NewGate(t), testkit.NewGate(t)
			up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Script: []testkit.Turn{testkit.Respond(
				testkit.Write(eventHead+chunk("data: 1\n\n")), testkit.Hold(second), testkit.Write(chunk("data: 2\n\n")), testkit.Hold(end), testkit.WriteLast("0\r\n\r\n"))}})
			r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: up.Addr()}})
			r.start()
			resp := r.open(t, h2, "https://"+payHost+"/v1/m")
			if o := resp.Header.Get("Waybill-Outcome"); resp.StatusCode != 200 || !strings.HasPrefix(o, "unknown;phase=remote_execution") {
				t.Fatalf("%d %q", resp.StatusCode, o)
			}
			id := resp.Header.Get("Waybill-Invocation")
			events := bufio.NewReader(resp.Body)
			line := func() string {
				s, err := events.ReadString('\n')
				if err != nil {
					t.Fatalf("%q %v", s, err)
				}
				if _, err := events.ReadString('\n'); err != nil {
					t.Fatal(err)
				}
				return s
			}
			if got := line(); got != "data: 1\n" {
				t.Errorf("%q", got)
			}
			during := r.api(t, "/v1/actions/"+id+"/result?after_chunk=0")
			if during.Status != 206 || string(during.Body) != "data: 1\n\n" || during.Header.Get("Waybill-Result") != "incomplete" || during.Header.Get("Waybill-Last-Chunk") != "1" {
				t.Errorf("during the stream: %d %q %v", during.Status, during.Body, during.Header)
			}
			if whole := r.api(t, "/v1/actions/"+id+"/result"); whole.Status != 202 {
				t.Errorf("the whole result during the stream: %d", whole.Status)
			}
			if none := r.api(t, "/v1/actions/"+id+"/result?after_chunk=1"); none.Status != 202 {
				t.Errorf("a chunk that does not exist yet: %d", none.Status)
			}
			second.Open()
			if got := line(); got != "data: 2\n" {
				t.Errorf("%q", got)
			}
			end.Open()
			if rest, err := io.ReadAll(events); err != nil || len(rest) != 0 {
				t.Errorf("%q %v", rest, err)
			}
			if h2 && !strings.HasPrefix(resp.Trailer.Get("Waybill-Outcome"), "committed;") {
				t.Errorf("trailer %v", resp.Trailer)
			}
			testkit.Eventually(t, func() error {
				after := r.api(t, "/v1/actions/"+id+"/result?after_chunk=1")
				if after.Status != 206 || string(after.Body) != "data: 2\n\n" || after.Header.Get("Waybill-Result") != "complete" {
					return fmt.Errorf("after the stream: %d %q %v", after.Status, after.Body, after.Header)
				}
				return nil
			})
			if whole := r.api(t, "/v1/actions/"+id+"/result"); whole.Status != 200 || string(whole.Body) != "data: 1\n\ndata: 2\n\n" {
				t.Errorf("%d %q", whole.Status, whole.Body)
			}
			r.verify()
		})
	}
}

// TestBrokenStreamIsBroken: ST-02, FR-02. A stream that the origin broke off never
// ends cleanly at the caller, and its chunks are labelled.
func TestBrokenStreamIsBroken(t *testing.T) {
	contract.Covers(t, "H5", "H10", "G3")
	for _, h2 := range []bool{false, true} {
		ca := testkit.NewCA(t)
		up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Script: []testkit.Turn{testkit.Respond(
			testkit.Write(eventHead+chunk("data: 1\n\n")+chunk("data: 2\n\n")), testkit.Close())}})
		r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: up.Addr()}})
		r.start()
		resp := r.open(t, h2, "https://"+payHost+"/v1/m")
		got, err := io.ReadAll(resp.Body)
		if err == nil {
			t.Errorf("h2=%v: a broken stream ended cleanly: %q", h2, got)
		}
		if !bytes.HasPrefix(got, []byte("data: 1\n\ndata: 2\n\nevent: error\ndata: {")) || !bytes.Contains(got, []byte("REMOTE_RESULT_INCOMPLETE")) {
			t.Errorf("h2=%v: %q", h2, got)
		}
		id := resp.Header.Get("Waybill-Invocation")
		if part := r.api(t, "/v1/actions/"+id+"/result?after_chunk=0"); part.Status != 206 || part.Header.Get("Waybill-Result") != "incomplete" || !strings.HasPrefix(part.Header.Get("Waybill-Outcome"), "unknown;") {
			t.Errorf("h2=%v: %d %v", h2, part.Status, part.Header)
		}
		if whole := r.api(t, "/v1/actions/"+id+"/result"); whole.Status != 424 {
			t.Errorf("h2=%v: the whole of a broken result: %d", h2, whole.Status)
		}
	}
}

var anonymous = regexp.MustCompile(`RssAnon:\s+(\d+) kB`)

// TestLargeBodies: a body of 32 MiB (256 MiB in make test-long) goes through, as an
// answer streamed and buffered, and as a request, byte for byte, with bounded memory (JR-07).
func TestLargeBodies(t *testing.T) {
	contract.Covers(t, "H4", "H1")
	size := int64(32 << 20)
	if long() {
		size = 256 << 20
	}
	ca := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost, msgHost), Handler: func(testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Write(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", size)), testkit.Big(size)}
	}})
	up3 := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server("upload.example.test")})
	r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: up.Addr()},
		routes: "  - name: upload\n    match: {host: upload.example.test}\n    limits: {request: 300MiB, timeout: 2m}\n    upstream: {roots: roots.pem, resolve: {upload.example.test: \"" + up3.Addr() + "\"}}\n" +
			"  - name: buffered\n    match: {host: buffered.example.test}\n    delivery: buffered\n    upstream: {roots: roots.pem, resolve: {buffered.example.test: \"" + up.Addr() + "\"}}\n"})
	up2 := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server("buffered.example.test"), Handler: func(testkit.Arrival) []testkit.Step {
		return []testkit.Step{testkit.Write(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n", size)), testkit.Big(size)}
	}})
	conf, err := os.ReadFile(r.config)
	if err != nil {
		t.Fatal(err)
	}
	r.write("c.yaml", strings.ReplaceAll(string(conf), `buffered.example.test: "`+up.Addr(), `buffered.example.test: "`+up2.Addr()))
	r.env = []string{"GOMEMLIMIT=192MiB"} // as in a sidecar
	r.start()
	sampled, most := make(chan struct{}), make(chan int, 1)
	go func() {
		top := 0
		for {
			select {
			case <-sampled:
				most <- top
				return
			case <-time.After(50 * time.Millisecond):
			}
			status, _ := os.ReadFile("/proc/" + strconv.Itoa(r.p.PID()) + "/status")
			if m := anonymous.FindSubmatch(status); m != nil {
				n, _ := strconv.Atoi(string(m[1]))
				top = max(top, n)
			}
		}
	}()
	want := sha256.New()
	if _, err := io.CopyN(want, repeat('a'), size); err != nil {
		t.Fatal(err)
	}
	for _, host := range []string{payHost, "buffered.example.test"} {
		start := time.Now()
		resp := r.open(t, false, "https://"+host+"/v1/big")
		sum := sha256.New()
		n, err := io.Copy(sum, resp.Body)
		if err != nil || n != size || !bytes.Equal(sum.Sum(nil), want.Sum(nil)) {
			t.Errorf("%s: %d bytes, %v", host, n, err)
		}
		t.Logf("%s: %d MiB in %v", host, size>>20, time.Since(start).Round(time.Millisecond))
	}
	// The other way: with a length, and in chunks.
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), Timeout: 2 * time.Minute})
	for i, length := range []int64{size, -1} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, fmt.Sprintf("https://upload.example.test/v1/%d", i), io.LimitReader(repeat('a'), size))
		if err != nil {
			t.Fatal(err)
		}
		req.ContentLength = length
		resp, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = resp.Body.Close()
		a := up3.Where(func(a testkit.Arrival) bool { return a.Target == fmt.Sprintf("/v1/%d", i) })
		if resp.StatusCode != 200 || len(a) != 1 || a[0].BodyBytes != size || a[0].BodySHA256 != hex.EncodeToString(want.Sum(nil)) {
			t.Errorf("upload %d: %d, %d arrivals", i, resp.StatusCode, len(a))
		}
	}
	close(sampled)
	// What the store maps of its files is page cache, which the kernel takes back.
	if top := <-most >> 10; top > 256 || top == 0 {
		t.Errorf("%d MiB of memory", top)
	} else {
		t.Logf("%d MiB of memory at most", top)
	}
}

// repeat is an endless reader of one byte.
type repeat byte

func (r repeat) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = byte(r)
	}
	return len(p), nil
}
