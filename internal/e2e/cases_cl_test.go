package e2e

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

var term = syscall.SIGTERM

// goClientURL makes this test binary an ordinary Go program that fetches a URL with
// net/http as it comes, through the variables of its environment.
const goClientURL = "WAYBILL_E2E_GET"

func TestMain(m *testing.M) {
	if u := os.Getenv(goClientURL); u != "" {
		os.Exit(goClient(u))
	}
	os.Exit(m.Run())
}

func goClient(url string) int {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err == nil {
		var resp *http.Response
		if resp, err = http.DefaultClient.Do(req); err == nil {
			body, _ := io.ReadAll(resp.Body)
			_ = resp.Body.Close()
			fmt.Println(req.URL.Path, resp.Proto, resp.StatusCode, string(body)) //nolint:forbidigo // the output of the program it plays
			return 0
		}
	}
	fmt.Fprintln(os.Stderr, err)
	return 1
}

// nodeGet is a Node program that goes through the proxy of its environment with
// CONNECT, and trusts what NODE_EXTRA_CA_CERTS adds.
const nodeGet = `
const http = require('http'), https = require('https'), u = new URL(process.argv[1]), p = new URL(process.env.HTTPS_PROXY)
const c = http.request({host: p.hostname, port: p.port, method: 'CONNECT', path: u.hostname + ':443',
  headers: p.username ? {'Proxy-Authorization': 'Basic ' + Buffer.from(decodeURIComponent(p.username) + ':' + decodeURIComponent(p.password)).toString('base64')} : {}})
c.on('connect', (r, socket) => {
  if (r.statusCode !== 200) { console.error(r.statusCode, r.statusMessage); process.exit(1) }
  https.get(u, {socket, agent: false}, r => { r.pipe(process.stdout); r.on('end', () => process.exit(r.statusCode === 200 ? 0 : 1)) }).on('error', e => { console.error(e); process.exit(1) })
})
c.on('error', e => { console.error(e); process.exit(1) })
c.end()
`

// casesClients: the programs that agents use get through as they are.
func casesClients(t *testing.T, b *bed) {
	t.Run("CL-03", func(t *testing.T) {
		roots := b.rig.roots()
		const rounds = 400
		for i := range rounds {
			conn, err := net.Dial("tcp", b.addr) //nolint:noctx // a raw client
			if err != nil {
				t.Fatal(err)
			}
			_ = conn.SetDeadline(time.Now().Add(patience))
			// Every second one sends its ClientHello in the segment of CONNECT, the others
			// directly after the 200.
			c := &eager{Conn: conn, head: "CONNECT " + payHost + ":443 HTTP/1.1\r\nHost: " + payHost + ":443\r\n\r\n"}
			if i%2 == 0 {
				if _, err := io.WriteString(conn, c.head); err != nil {
					t.Fatal(err)
				}
				c.head = ""
				if err := c.skip(); err != nil {
					t.Fatalf("%d: %v", i, err)
				}
			}
			tc := tls.Client(c, &tls.Config{RootCAs: roots, ServerName: payHost, MinVersion: tls.VersionTLS12})
			if err := tc.Handshake(); err != nil { //nolint:noctx // bounded by the deadline
				t.Fatalf("%d of %d handshakes: %v", i, rounds, err)
			}
			if i >= 2 {
				_ = conn.Close()
				continue
			}
			// What comes after the handshake is not shifted either.
			path := fmt.Sprintf("/v1/cl03/%d", i)
			if _, err := io.WriteString(tc, "GET "+path+" HTTP/1.1\r\nHost: "+payHost+"\r\nConnection: close\r\n\r\n"); err != nil {
				t.Fatal(err)
			}
			if got, _ := readAll(tc); !strings.HasPrefix(got, "HTTP/1.1 200") || len(b.arrivals(payHost, path)) != 1 {
				t.Errorf("%q", got)
			}
			_ = conn.Close()
		}
	})
	t.Run("CL-05", func(t *testing.T) {
		contract.Covers(t, "V2")
		curl, python, node, git := testkit.RequireTool(t, "curl"), testkit.RequireTool(t, "python3"), testkit.RequireTool(t, "node"), testkit.RequireTool(t, "git")
		sh := testkit.RequireTool(t, "sh")
		code, out, errs := b.cli("env")
		if code != 0 {
			t.Fatalf("waybill env: %d %s", code, errs)
		}
		for _, need := range []string{"http_proxy=", "https_proxy=", "HTTP_PROXY=", "HTTPS_PROXY=", "NODE_USE_ENV_PROXY=", "NODE_EXTRA_CA_CERTS=", "SSL_CERT_FILE=", "REQUESTS_CA_BUNDLE=", "CURL_CA_BUNDLE=", "GIT_SSL_CAINFO=", "NO_PROXY=", "no_proxy="} {
			if !strings.Contains(out, need) {
				t.Errorf("waybill env prints no %s", need)
			}
		}
		url := func(name string) string { return "https://" + payHost + "/v1/cl05/" + name }
		for _, c := range []struct {
			name string
			args []string
			env  []string
		}{
			{"curl", []string{curl, "-sSf", "-m", "20", url("curl")}, nil},
			{"curl-plain", []string{curl, "-sSf", "-m", "20", "http://" + payHost + "/v1/cl05/curl-plain"}, nil},
			{"python", []string{python, "-c", "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=20).read())", url("python")}, nil},
			{"python-plain", []string{python, "-c", "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=20).read())", "http://" + payHost + "/v1/cl05/python-plain"}, nil},
			{"node", []string{node, "-e", nodeGet, url("node")}, nil},
			{"go", []string{os.Args[0]}, []string{goClientURL + "=" + url("go")}},
			{"git", []string{git, "ls-remote", "https://" + payHost + "/v1/cl05/git"}, []string{"GIT_TERMINAL_PROMPT=0"}},
		} {
			path := "/v1/cl05/" + c.name
			if c.name == "git" {
				path += "/info/refs"
				b.on(payHost, path, testkit.Respond(advertisement()))
			}
			code, stdout, stderr := testkit.Run(t, testkit.Command{Path: sh, Args: append([]string{"-c", out + "\nexec \"$@\"", "sh"}, c.args...), Env: append(c.env, "WAYBILL_DATA="+b.data)})
			if code != 0 {
				t.Errorf("%s: %d %s %s", c.name, code, stdout, stderr)
			}
			if n := len(sentTo(b.all(t), path)); n != 1 {
				t.Errorf("%s: the proxy saw %d requests", c.name, n)
			}
			a := b.arrivals(payHost, path)
			if len(a) != 1 || len(fields(a[0], "Authorization")) != 1 {
				t.Errorf("%s: %d arrivals", c.name, len(a))
			}
		}
	})
}

// advertisement is what a git server with one branch answers to ls-remote.
func advertisement() testkit.Step {
	line := func(s string) string { return fmt.Sprintf("%04x%s", len(s)+4, s) }
	return testkit.Reply(200, line("# service=git-upload-pack\n")+"0000"+line(strings.Repeat("1", 40)+" refs/heads/main\x00agent=x\n")+"0000",
		"Content-Type", "application/x-git-upload-pack-advertisement")
}

// eager writes a CONNECT head together with the first bytes of TLS, and reads over
// the answer to it.
type eager struct {
	net.Conn
	head    string
	skipped bool
}

func (c *eager) Write(p []byte) (int, error) {
	if c.head == "" {
		return c.Conn.Write(p)
	}
	both := append([]byte(c.head), p...)
	c.head = ""
	if _, err := c.Conn.Write(both); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (c *eager) Read(p []byte) (int, error) {
	if !c.skipped {
		if err := c.skip(); err != nil {
			return 0, err
		}
	}
	return c.Conn.Read(p)
}

// skip reads the head of the answer to CONNECT, byte by byte: what follows is TLS.
func (c *eager) skip() error {
	c.skipped = true
	var head []byte
	for !strings.HasSuffix(string(head), "\r\n\r\n") {
		one := make([]byte, 1)
		if _, err := io.ReadFull(c.Conn, one); err != nil {
			return err
		}
		head = append(head, one...)
	}
	if !strings.HasPrefix(string(head), "HTTP/1.1 200") {
		return errors.New(string(head))
	}
	return nil
}

// TestCaseCL01: what a container sets for everything does not lead the proxy to
// itself, and does not change whom it trusts.
func TestCaseCL01(t *testing.T) {
	t.Run("CL-01", func(t *testing.T) {
		contract.Covers(t, "V2")
		ca := testkit.NewCA(t)
		up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(payHost)})
		r := newRig(t, ca, rigOptions{origins: map[string]string{payHost: up.Addr()}})
		r.start()
		r.p.Signal(t, term) // there is a CA now
		r.p.Wait(t, patience)
		self := "http://" + r.addr
		r.flags = []string{"--proxy", r.addr}
		r.env = []string{"HTTPS_PROXY=" + self, "HTTP_PROXY=" + self, "https_proxy=" + self, "http_proxy=" + self, "ALL_PROXY=" + self, "NO_PROXY=", "SSL_CERT_FILE=" + r.data + "/ca/ca.pem", "SSL_CERT_DIR=" + r.data}
		r.start()
		c := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), NoKeepAlive: true})
		resp := testkit.Send(t, c, http.MethodPost, "https://"+payHost+"/v1/x", "x=1")
		if resp.Status != 200 || string(resp.Body) != "ok" {
			t.Errorf("%d %q", resp.Status, resp.Body)
		}
		if all := r.actions(); len(all) != 1 || all[0].Outcome != "committed" || up.Count("", "") != 1 {
			t.Errorf("%+v, %d arrivals", all, up.Count("", ""))
		}
	})
}

// TestCaseCL02: a challenge that clients can answer, and a password that is compared
// as the client decoded it.
func TestCaseCL02(t *testing.T) {
	t.Run("CL-02", func(t *testing.T) {
		contract.Covers(t, "V4", "M6", "L7")
		const password = "p@ss%:w/ä and more"
		sum := sha256.Sum256([]byte(password))
		ca := testkit.NewCA(t)
		b := newBed(t, ca, rigOptions{top: "callers:\n  - name: agent\n    token_sha256: " + hex.EncodeToString(sum[:]) + "\n"})
		b.begin()
		auth := "Proxy-Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte("agent:"+password)) + "\r\n"
		wrong := "Proxy-Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte("agent:p%40ss")) + "\r\n"
		connect := "CONNECT " + payHost + ":443 HTTP/1.1\r\nHost: " + payHost + ":443\r\n"
		c := testkit.Dial(t, b.addr)
		for _, lines := range []string{"", wrong, "Proxy-Authorization: Negotiate YII=\r\n", "Proxy-Authorization: Basic !!\r\n", "Authorization: Basic " + base64.StdEncoding.EncodeToString([]byte("agent:"+password)) + "\r\n"} {
			for _, request := range []string{connect, "GET http://" + payHost + "/v1/cl02 HTTP/1.1\r\nHost: " + payHost + "\r\n"} {
				c.Send(t, request+lines+"\r\n")
				resp, err := c.ReadResponse(http.MethodGet) // a refused CONNECT has a body
				if err != nil {
					t.Fatalf("%q: %v", lines, err)
				}
				b.hear(resp)
				if resp.Status != 407 || !strings.HasPrefix(resp.Header.Get("Proxy-Authenticate"), "Basic realm=") || resp.Header.Get("Content-Length") == "" ||
					!strings.HasPrefix(resp.Header.Get("Waybill-Outcome"), "not_attempted;phase=validation;retry=after_correction") || !strings.Contains(string(resp.Body), "CALLER_UNAUTHENTICATED") {
					t.Errorf("%q: %d %v %q", lines, resp.Status, resp.Header, resp.Body)
				}
				if strings.EqualFold(resp.Header.Get("Connection"), "close") {
					c = testkit.Dial(t, b.addr)
				}
			}
		}
		// The same connection answers the challenge. (HEAD: what follows is no body.)
		c.Send(t, connect+auth+"\r\n")
		if resp, err := c.ReadResponse(http.MethodHead); err != nil || resp.Status != 200 {
			t.Fatalf("with the password: %+v %v", resp, err)
		}
		if all := b.all(t); len(all) != 0 {
			t.Errorf("refusals without a caller left records: %+v", all)
		}
		if m := get(t, b.meters); !strings.Contains(m, `code="CALLER_UNAUTHENTICATED"`) {
			t.Error("no counter of refused callers (M6)")
		}
		curl, python, git, node := testkit.RequireTool(t, "curl"), testkit.RequireTool(t, "python3"), testkit.RequireTool(t, "git"), testkit.RequireTool(t, "node")
		b.on(payHost, "/v1/cl02/git/info/refs", testkit.Respond(advertisement()))
		proxy := "http://agent:p%40ss%25%3Aw%2F%C3%A4%20and%20more@" + b.addr
		for _, p := range []struct {
			name string
			args []string
			path string
		}{
			{"curl", []string{curl, "-sSf", "-m", "20", "https://" + payHost + "/v1/cl02/curl"}, "/v1/cl02/curl"},
			{"curl, challenged", []string{curl, "-sSf", "-m", "20", "--proxy-anyauth", "https://" + payHost + "/v1/cl02/any"}, "/v1/cl02/any"},
			{"curl, plain", []string{curl, "-sSf", "-m", "20", "http://" + payHost + "/v1/cl02/plain"}, "/v1/cl02/plain"},
			{"python", []string{python, "-c", "import sys, urllib.request as r; print(r.urlopen(sys.argv[1], timeout=20).read())", "https://" + payHost + "/v1/cl02/python"}, "/v1/cl02/python"},
			{"git", []string{git, "ls-remote", "https://" + payHost + "/v1/cl02/git"}, "/v1/cl02/git/info/refs"},
			{"node", []string{node, "-e", nodeGet, "https://" + payHost + "/v1/cl02/node"}, "/v1/cl02/node"},
		} {
			code, out, errs := testkit.Run(t, testkit.Command{Path: p.args[0], Args: p.args[1:], Env: []string{"HTTPS_PROXY=" + proxy, "https_proxy=" + proxy, "http_proxy=" + proxy,
				"CURL_CA_BUNDLE=" + b.roots, "SSL_CERT_FILE=" + b.roots, "GIT_SSL_CAINFO=" + b.roots, "NODE_EXTRA_CA_CERTS=" + b.roots, "GIT_TERMINAL_PROMPT=0"}})
			if code != 0 {
				t.Errorf("%s: %d %s %s", p.name, code, out, errs)
			}
			all := sentTo(b.all(t), p.path)
			if len(all) != 1 || all[0].Caller != "caller:agent" || all[0].Outcome != "committed" {
				t.Errorf("%s: %+v", p.name, all)
			}
		}
		b.finish(t)
		testkit.Search(t, testkit.CanaryOf(password), testkit.In(b.data), testkit.InString("log", b.logs.String()))
	})
}
