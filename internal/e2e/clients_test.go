package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// A program of the client matrix, run as it comes: what it needs to know of the proxy
// "waybill run" has to tell it.
type program struct {
	name string
	args []string
	env  []string
	// makes are beginnings of lines that it prints, one a request: the path in front of
	// protocol, status and content, or else reaches has the paths.
	makes, reaches []string
	// anonymous programs cannot send the session's token.
	anonymous bool
}

// matrix runs the programs against an origin behind payHost, and holds each request to
// one arrival with the secret.
func (b *bed) matrix(t *testing.T, programs []program) {
	t.Helper()
	for _, p := range programs {
		t.Run(p.name, func(t *testing.T) {
			code, out, errs := testkit.Run(t, testkit.Command{Path: b.bin, Args: append([]string{"run", "--"}, p.args...), Dir: b.dir,
				Env: append([]string{"WAYBILL_CONFIG=" + b.config, "WAYBILL_DATA=" + b.data, "GIT_TERMINAL_PROMPT=0"}, p.env...)})
			if code != 0 {
				t.Fatalf("exit code %d: %s %s", code, out, errs)
			}
			account := fmt.Sprintf("%d request", len(p.makes))
			if p.anonymous {
				account = "no request came with this session's token"
			}
			if !strings.Contains(errs, account) {
				t.Errorf("the account at the end: %s", errs)
			}
			for i, line := range p.makes {
				if !strings.Contains("\n"+out, "\n"+line) {
					t.Errorf("no %q in %q %s", line, out, errs)
				}
				path, _, _ := strings.Cut(line, " ")
				if len(p.reaches) > 0 {
					path = p.reaches[i]
				}
				sent := sentTo(b.all(t), path)
				if len(sent) != 1 || strings.HasPrefix(sent[0].Caller, "session:") == p.anonymous {
					t.Errorf("%s: %+v", path, sent)
				}
				a := b.arrivals(payHost, path)
				if len(a) != 1 || len(fields(a[0], "Authorization")) != 1 || !strings.Contains(a[0].Header.Get("Authorization"), b.canary.Value()) {
					t.Errorf("%s: %d arrivals, or not with the secret", path, len(a))
				}
			}
		})
	}
}

// TestClientMatrix: "waybill run" tells programs all they need to go through the proxy
// and to trust it, on HTTP/1.1 and HTTP/2, in tunnels and in the absolute form.
// Programs that npm installs are in TestClientMatrixNode.
func TestClientMatrix(t *testing.T) {
	contract.Covers(t, "V2", "V4", "L7")
	curl, git, wget, java := testkit.RequireTool(t, "curl"), testkit.RequireTool(t, "git"), testkit.RequireTool(t, "wget"), testkit.RequireTool(t, "java")
	testkit.RequireTool(t, "javac") // compiles what java is given as a source
	python := "/usr/bin/python3"    // Debian's, which has the packages
	if _, err := os.Stat(python); err != nil {
		python = testkit.RequireTool(t, "python3")
	}
	here, err := filepath.Abs(filepath.Join("testdata", "clients"))
	if err != nil {
		t.Fatal(err)
	}
	b := newBed(t, testkit.NewCA(t), rigOptions{})
	b.begin()
	secure, plain := "https://"+payHost+"/v1/m", "http://"+payHost+"/v1/m"
	for _, way := range []string{"HTTP_1_1", "HTTP_2", "old"} {
		b.on(payHost, "/v1/m/javalost/"+way, dies())
	}
	curlOf := func(name, version string, more ...string) program {
		return program{name: name, makes: []string{"/v1/m/" + name + " " + version + " 200 2"},
			args: append([]string{curl, "-sS", "-m", "20", "-o", os.DevNull, "-w", "/v1/m/" + name + " %{http_version} %{http_code} %{size_download}\n"}, more...)}
	}
	gitOf := func(name, version string) program {
		b.on(payHost, "/v1/m/"+name+"/info/refs", testkit.Respond(advertisement()))
		return program{name: name, args: []string{git, "-c", "http.version=" + version, "ls-remote", secure + "/" + name},
			reaches: []string{"/v1/m/" + name + "/info/refs"}, makes: []string{strings.Repeat("1", 40) + "\trefs/heads/main"}}
	}
	goOf := func(name, debug, version string) program {
		return program{name: name, args: []string{os.Args[0]}, env: []string{goClientURL + "=" + secure + "/" + name, "GODEBUG=" + debug}, makes: []string{"/v1/m/" + name + " " + version + " 200 ok"}}
	}
	t.Run("curl sends once", func(t *testing.T) { curlSendsOnce(t, b, curl) })
	b.matrix(t, []program{
		curlOf("curl1", "1.1", "--http1.1", secure+"/curl1"), curlOf("curl2", "2", secure+"/curl2"), curlOf("curlplain", "1.1", plain+"/curlplain"),
		gitOf("git1", "HTTP/1.1"), gitOf("git2", "HTTP/2"),
		goOf("go1", "http2client=0", "HTTP/1.1"), goOf("go2", "", "HTTP/2.0"),
		{name: "wget", args: []string{wget, "-qO-", "-T", "20", "-t", "1", secure + "/wget"}, reaches: []string{"/v1/m/wget"}, makes: []string{"ok"}},
		{name: "python", args: []string{python, filepath.Join(here, "client.py"), secure + "/py", plain + "/pyplain"}, makes: []string{
			"/v1/m/py/urllib HTTP/1.1 200 ok", "/v1/m/py/requests HTTP/1.1 200 ok", "/v1/m/py/httpx HTTP/1.1 200 ok", "/v1/m/py/httpx2 HTTP/2 200 ok",
			"/v1/m/pyplain/urllib HTTP/1.1 200 ok", "/v1/m/pyplain/requests HTTP/1.1 200 ok", "/v1/m/pyplain/httpx HTTP/1.1 200 ok", "/v1/m/pyplain/httpx2 HTTP/1.1 200 ok",
		}},
		{name: "java", anonymous: true, args: []string{java, filepath.Join(here, "Client.java"), secure + "/java", plain + "/javaplain", secure + "/javalost"}, makes: []string{
			"/v1/m/java/HTTP_1_1 HTTP_1_1 200 ok", "/v1/m/java/HTTP_2 HTTP_2 200 ok", "/v1/m/java/old HTTP_1_1 200 ok",
			"/v1/m/javaplain/HTTP_1_1 HTTP_1_1 200 ok", "/v1/m/javaplain/HTTP_2 HTTP_1_1 200 ok", "/v1/m/javaplain/old HTTP_1_1 200 ok",
			// Without an answer HttpURLConnection would send its POST again.
			"/v1/m/javalost/HTTP_1_1 HTTP_1_1 424 {", "/v1/m/javalost/HTTP_2 HTTP_2 424 {", "/v1/m/javalost/old HTTP_1_1 424 {",
		}},
	})
	b.finish(t)
}

// curlSendsOnce: curl sends a POST once, whatever it is told about trying again, and
// shows why (RT-04). git is in TestCaseGT01, libraries are in TestCaseRT04SDK.
func curlSendsOnce(t *testing.T, b *bed, curl string) {
	contract.Covers(t, "L7", "L8", "O3", "O4")
	for i, more := range [][]string{nil, {"--retry", "1"}, {"--retry", "1", "--retry-all-errors", "--fail-with-body"}, {"--http1.1"}} {
		for end, turn := range map[string]testkit.Turn{"lost": dies(), "500": testkit.Respond(testkit.Reply(500, "no")), "502": testkit.Respond(testkit.Reply(502, "no"))} {
			path := fmt.Sprintf("/v1/rt04curl/%d/%s", i, end)
			b.on(payHost, path, turn)
			t.Run(path, func(t *testing.T) {
				t.Parallel()
				_, out, errs := testkit.Run(t, testkit.Command{Path: curl, Args: append([]string{"-sS", "-m", "20", "-d", "x=1", "https://" + payHost + path}, more...), Env: []string{"https_proxy=http://" + b.addr, "CURL_CA_BUNDLE=" + b.roots}})
				if n := len(b.arrivals(payHost, path)); n != 1 {
					t.Errorf("%v, %s: %d effects: %s %s", more, end, n, out, errs)
				}
				if end == "lost" && !strings.Contains(out, "Outcome unknown: do not repeat; reconcile act_") {
					t.Errorf("%v: %s %s", more, out, errs)
				}
			})
		}
	}
}

// TestClientMatrixNode is TestClientMatrix with what npm installs, in make test-long:
// versions of Node that follow proxy variables (22 and 24 put http:// into a tunnel to
// port 80), axios and undici.
func TestClientMatrixNode(t *testing.T) {
	if !long() {
		return
	}
	contract.Covers(t, "V2", "V4")
	b := newBed(t, testkit.NewCA(t), rigOptions{})
	b.begin()
	script := inSDKFolder(t, filepath.Join("testdata", "clients", "client.mjs"))
	var programs []program
	for _, v := range []struct{ name, fetch string }{{"node24", "http/1.1"}, {"node26", "h2"}} {
		p := program{name: v.name, args: []string{newNode(t, v.name), script}}
		for _, scheme := range []string{"https", "http"} {
			base := "/v1/" + v.name + "/" + scheme
			p.args = append(p.args, scheme+"://"+payHost+base)
			for _, client := range []string{"fetch", "module", "axios", "env", "agent"} {
				protocol := "http/1.1"
				if client == "fetch" && scheme == "https" {
					protocol = v.fetch
				}
				p.makes = append(p.makes, base+"/"+client+" "+protocol+" 200 ok")
			}
		}
		programs = append(programs, p)
	}
	b.matrix(t, programs)
	b.finish(t)
}
