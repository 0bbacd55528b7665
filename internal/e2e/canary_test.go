package e2e

import (
	"fmt"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// TestCanary: the secret is sent to the right origin and found nowhere else, and so
// is what a caller puts into a query or presents to the proxy (CONTRACT C2, C3, L4).
func TestCanary(t *testing.T) {
	contract.Covers(t, "C2", "C3", "L4", "V2")
	ca := testkit.NewCA(t)
	pay := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost), Handler: func(a testkit.Arrival) []testkit.Step {
		switch {
		case strings.HasPrefix(a.Target, "/cut"):
			return []testkit.Step{testkit.Write("HTTP/1.1 201 Created\r\nContent-Length: 99\r\n\r\nhalf"), testkit.Close()}
		case strings.HasPrefix(a.Target, "/weird"):
			return []testkit.Step{testkit.Write("HTTP/1.1 1000 " + strings.Join(a.Values("Authorization"), "") + "\r\nContent-Length: 0\r\n\r\n")}
		case strings.HasPrefix(a.Target, "/after"):
			return []testkit.Step{testkit.Write("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"), testkit.Write("debug: " + strings.Join(a.Values("Authorization"), "")), testkit.Stall()}
		case strings.HasPrefix(a.Target, "/header"):
			return []testkit.Step{testkit.Write("HTTP/1.1 200 OK\r\nContent-Length: x" + strings.Join(a.Values("Authorization"), "") + "\r\n\r\nok")}
		default:
			return []testkit.Step{testkit.Reply(200, "ok")}
		}
	}})
	msg := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server("other.example.test")}) // a wrong certificate
	search := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(searchHost)})
	r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: pay.Addr(), msgHost: msg.Addr(), searchHost: search.Addr()}})
	query, token := testkit.NewCanary(t), testkit.NewCanary(t)
	tmp := filepath.Join(r.dir, "tmp")
	if err := os.Mkdir(tmp, 0o700); err != nil {
		t.Fatal(err)
	}
	r.env = []string{"TMPDIR=" + tmp}
	r.start()
	var answers strings.Builder
	for _, h2 := range []bool{false, true} {
		client := testkit.NewClient(t, testkit.ClientConfig{Proxy: "http://" + url.UserPassword("agent", token.Value()).String() + "@" + r.addr, Roots: r.roots(), HTTP2: h2})
		send := func(method, host, path string, fields ...string) {
			resp := testkit.Send(t, client, method, "https://"+host+path+strconv.FormatBool(h2)+"?api_key="+url.QueryEscape(query.Value()), strings.Repeat("b", 3<<20), append(fields, "Authorization", "Bearer placeholder")...)
			answers.WriteString(strconv.Itoa(resp.Status))
			for k, v := range resp.Header {
				answers.WriteString(k + ": " + strings.Join(v, ",") + "\n")
			}
			answers.Write(resp.Body)
		}
		for _, path := range []string{"/ok", "/cut", "/weird", "/after", "/header", "/cut"} {
			send(http.MethodPost, payHost, path)
		}
		send(http.MethodPost, msgHost, "/x")
		send(http.MethodPost, searchHost, "/x")
		send(http.MethodPost, "nowhere.example.test", "/x")
	}
	metrics := get(t, r.meters)
	code, out, errs := r.cli("run", "--", "sh", "-c", "env; cat /proc/self/environ; tr '\\0' ' ' </proc/$PPID/cmdline")
	if code != 0 {
		t.Fatalf("waybill run: %d %s", code, errs)
	}
	_, list, _ := r.cli("actions", "--json")
	cmdline, err := os.ReadFile("/proc/" + strconv.Itoa(r.p.PID()) + "/cmdline")
	if err != nil {
		t.Fatal(err)
	}
	environ, err := os.ReadFile("/proc/" + strconv.Itoa(r.p.PID()) + "/environ")
	if err != nil {
		t.Fatal(err)
	}
	r.kill() // with SIGKILL: the journal is what a crash leaves
	for name, c := range map[string]*testkit.Canary{"secret": r.canary, "query value": query, "proxy token": token} {
		t.Run(name, func(t *testing.T) {
			testkit.Search(t, c, testkit.In(r.data), testkit.In(tmp), testkit.InString("log", r.logs.String()), testkit.InString("answers", answers.String()),
				testkit.InString("metrics", metrics), testkit.InString("child", out+errs), testkit.InString("actions", list),
				testkit.InBytes("cmdline", cmdline), testkit.InBytes("environ", environ))
		})
	}
	// The search finds what is there: the secret at its origin and only there.
	arrived := func(u *testkit.Upstream) string {
		var b strings.Builder
		for _, a := range u.Arrivals() {
			b.Write(a.RawHead)
		}
		return b.String()
	}
	testkit.RequireFound(t, r.canary, testkit.InString("pay", arrived(pay)))
	testkit.RequireFound(t, query, testkit.InString("pay", arrived(pay)))
	testkit.Search(t, r.canary, testkit.InString("msg", arrived(msg)), testkit.InString("search", arrived(search)))
	testkit.Search(t, token, testkit.InString("pay", arrived(pay)), testkit.InString("search", arrived(search)))
	if msg.Count("", "") != 0 {
		t.Error("a request went to an origin with a wrong certificate")
	}
	if n := strings.Count(arrived(pay), "placeholder"); n != 0 {
		t.Errorf("the placeholder went along %d times", n)
	}
}

// TestRunHidesItsOwnEnvironment: variables that are taken away from the child of run are not
// in reach in its parent's /proc either, whether run starts a proxy or joins one (CONTRACT C2).
func TestRunHidesItsOwnEnvironment(t *testing.T) {
	contract.Covers(t, "C2")
	r := newRig(t, testkit.NewCA(t), rigOptions{top: "  hidden: {from: {env: E2E_HIDDEN}}\n"})
	hidden := testkit.NewCanary(t)
	r.env = []string{"E2E_HIDDEN=" + hidden.Value()}
	const script = `tr '\0' '\n' </proc/$PPID/environ; env; tr '\0' ' ' </proc/$PPID/cmdline`
	for _, joined := range []bool{false, true} {
		t.Run(fmt.Sprintf("joined=%t", joined), func(t *testing.T) {
			if joined {
				r.start()
			}
			c := testkit.Command{
				Path: r.bin, Args: []string{"run", "--allow-any-filesystem", "--", "sh", "-c", script}, Dir: r.dir,
				Env: append([]string{"WAYBILL_CONFIG=" + r.config, "WAYBILL_DATA=" + r.data}, r.env...),
			}
			if os.Geteuid() == 0 {
				// With its capabilities root reads every process: without them it is a user as others.
				c.Args = append([]string{"--bounding-set", "-all", "--inh-caps", "-all", c.Path}, c.Args...)
				c.Path = testkit.RequireTool(t, "setpriv")
			}
			code, out, errs := testkit.Run(t, c)
			if code != 0 || !strings.Contains(out, "WAYBILL_SESSION=") || !strings.Contains(out, "allow-any-filesystem") {
				t.Fatalf("waybill run: %d %s %s", code, out, errs)
			}
			testkit.Search(t, hidden, testkit.InString("child", out+errs))
		})
	}
}
