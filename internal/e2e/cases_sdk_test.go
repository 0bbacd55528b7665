package e2e

import (
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// sdk is a client library with what its family needs.
type sdk struct {
	name    string // what the driver calls it
	dialect string
	// message is what the library shows of an outcome that is unknown; "": the
	// instruction itself. Those that show a code only are named here.
	message string
	// returns sends again by itself what it may, within the driver's patience.
	returns bool
}

// The libraries of npm (testdata/sdk) and of Go (module goclients).
var (
	npmSDKs = []sdk{
		{name: "openai", dialect: "openai", returns: true}, {name: "vercel", dialect: "openai", returns: true}, {name: "anthropic", dialect: "anthropic", returns: true},
		{name: "google", dialect: "google"}, {name: "stripe", dialect: "stripe", returns: true}, {name: "octokit", dialect: "github", returns: true},
		{name: "slack", dialect: "slack", message: "REMOTE_", returns: true}, {name: "discord", dialect: "discord", returns: true}, {name: "graphql", dialect: "graphql"},
		{name: "notion", dialect: "notion", returns: true}, {name: "huggingface", dialect: "huggingface"}, {name: "square", dialect: "square", returns: true},
		{name: "kubernetes", dialect: "kubernetes"}, {name: "dynamodb", dialect: "aws-json", returns: true}, {name: "sts", dialect: "aws-query", returns: true},
		{name: "ec2", dialect: "aws-ec2", returns: true}, {name: "s3", dialect: "aws-rest-xml", returns: true}, {name: "lambda", dialect: "aws-rest-json", returns: true},
		{name: "axios", dialect: "default"},
	}
	goSDKs = []sdk{
		{name: "openai", dialect: "openai", returns: true}, {name: "anthropic", dialect: "anthropic", returns: true}, {name: "stripe", dialect: "stripe"},
		{name: "github", dialect: "github"}, {name: "slack", dialect: "slack", message: "REMOTE_"}, {name: "google", dialect: "google"}, {name: "kubernetes", dialect: "kubernetes", returns: true},
		{name: "dynamodb", dialect: "aws-json", returns: true}, {name: "sts", dialect: "aws-query", returns: true}, {name: "s3", dialect: "aws-rest-xml", returns: true}, {name: "lambda", dialect: "aws-rest-json", returns: true},
		{name: "retryablehttp", dialect: "default", returns: true},
	}
)

// sdkEnds are the ways in which an origin that applied the effect is not heard of
// again, or says something that libraries take for a reason to come again.
var sdkEnds = map[string]testkit.Turn{
	"lost":  dies(),
	"cut":   testkit.Respond(testkit.Write("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 99\r\n\r\n{"), testkit.Close()),
	"stall": testkit.Respond(testkit.Stall()),
	"502":   testkit.Respond(testkit.Reply(502, "bad gateway")),
	"500":   testkit.Respond(testkit.Reply(500, `{"error":{"message":"no"}}`, "Content-Type", "application/json")),
	"503":   testkit.Respond(testkit.Reply(503, `{"error":{"message":"later"}}`, "Content-Type", "application/json", "Retry-After", "1")),
}

// sdkStreams break off behind their first event.
var sdkStreams = map[string]string{
	"openai":    `data: {"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[{"index":0,"delta":{"role":"assistant","content":"a"}}]}` + "\n\n",
	"anthropic": "event: message_start\n" + `data: {"type":"message_start","message":{"id":"m","type":"message","role":"assistant","content":[],"model":"m","usage":{"input_tokens":1,"output_tokens":1}}}` + "\n\n",
	"google":    `data: {"candidates":[{"content":{"role":"model","parts":[{"text":"a"}]}}]}` + "\n\n",
}

// sdkBed is a proxy with a route for each dialect, all of whose hosts lead to one
// origin: the base path in a request's target says how it ends.
type sdkBed struct {
	*bed
	up *testkit.Upstream
}

// keyedHost keeps idempotency keys, and its route says so.
const keyedHost = "keyed.sdk.example.test"

func sdkHost(dialect string) string { return dialect + ".sdk.example.test" }

var sdkBase = regexp.MustCompile(`/wb-[a-z0-9]+-([a-z0-9]+)-[a-z0-9]+(/|\?|$)`)

func newSDKBed(t *testing.T, dialects []string) *sdkBed {
	ca := testkit.NewCA(t)
	var names []string
	for _, d := range dialects {
		names = append(names, sdkHost(d), "down-"+sdkHost(d))
	}
	names = append(names, keyedHost)
	var came sync.Map // targets under a key, from their first arrival on
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(names...), EarlyHandler: func(a testkit.Arrival) []testkit.Step {
		m := sdkBase.FindStringSubmatch(a.Target)
		if m == nil {
			return []testkit.Step{testkit.ReadBody(), testkit.Reply(404, "no such base")}
		}
		if _, again := came.LoadOrStore(a.Target, true); m[1] == "keyed" && again {
			return []testkit.Step{testkit.ReadBody(), testkit.Reply(200, `{"id":"ch_1","object":"charge"}`, "Content-Type", "application/json")}
		} else if m[1] == "keyed" {
			return []testkit.Step{testkit.ReadBody(), testkit.Close()}
		}
		if event, ok := sdkStreams[m[1]]; ok {
			return []testkit.Step{testkit.ReadBody(), testkit.Write(eventHead + chunk(event)), testkit.Close()}
		}
		return append([]testkit.Step{testkit.ReadBody()}, sdkEnds[m[1]].Steps...)
	}})
	var y strings.Builder
	down := testkit.RefusingAddr(t)
	for _, d := range dialects {
		for _, host := range []string{sdkHost(d), "down-" + sdkHost(d)} {
			addr := up.Addr()
			if strings.HasPrefix(host, "down-") {
				addr = down
			}
			fmt.Fprintf(&y, "  - name: %s\n    match: {host: %s}\n    dialect: %s\n    inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: pay}]\n    limits: {timeout: 1s, tries: 1}\n    upstream: {roots: roots.pem, resolve: {%s: %q}}\n",
				strings.ReplaceAll(host, ".", "-"), host, d, host, addr)
		}
	}
	fmt.Fprintf(&y, "  - name: keyed-stripe\n    match: {host: %s}\n    dialect: stripe\n%s    upstream: {roots: roots.pem, resolve: {%s: %q}}\n", keyedHost, keyContract("1h", ""), keyedHost, up.Addr())
	b := &sdkBed{bed: newBed(t, ca, rigOptions{routes: y.String()}), up: up}
	b.begin()
	return b
}

// ended is a line of a driver.
type ended struct{ Base, End, Message string }

// once has a driver make a call for each end, and holds what came of it to one effect.
func (b *sdkBed) once(t *testing.T, lib sdk, form string, command func(...string) testkit.Command) {
	ends := []string{"lost", "500"}
	if form == lib.dialect {
		ends = slices.Sorted(maps.Keys(sdkEnds))
	}
	base := func(end string) string {
		return "/wb-" + lib.name + "-" + end + "-" + strings.ReplaceAll(form, "-", "")
	}
	const patience = 12 * time.Second // longer than the whole schedule of most
	args := []string{lib.name, sdkHost(form), fmt.Sprint(patience.Milliseconds())}
	for _, end := range ends {
		args = append(args, base(end))
	}
	code, out, errs := testkit.Run(t, command(args...))
	if code != 0 {
		t.Errorf("exit code %d: %s %s", code, out, errs)
	}
	said := make(map[string]ended)
	for line := range strings.Lines(out) {
		var e ended
		if json.Unmarshal([]byte(line), &e) == nil && e.Base != "" {
			said[e.Base] = e
		}
	}
	for _, end := range ends {
		e := said[base(end)]
		if n := len(b.up.Where(func(a testkit.Arrival) bool {
			return strings.Contains(a.Target, base(end))
		})); n != 1 {
			t.Errorf("%s: %d effects: %+v", end, n, e)
		}
		// In a form that is not its own a library may go on trying for longer than
		// anybody waits.
		if own := form == lib.dialect; e.End != "failed" && (own || e.End != "late") {
			t.Errorf("%s: %+v %s", end, e, errs)
		} else if own && slices.Contains([]string{"lost", "cut", "stall"}, end) {
			message := lib.message
			if message == "" {
				message = "do not repeat; reconcile act_"
			}
			if !strings.Contains(e.Message, message) {
				t.Errorf("%s: the library does not show %q: %s", end, message, e.Message)
			}
		}
		t.Logf("%s: %s: %.200s", end, e.End, e.Message)
	}
}

// sdkFolder is where scripts/test-deps.sh installs what npm has for the long tests.
func sdkFolder(t *testing.T) string {
	t.Helper()
	cache, err := os.UserCacheDir()
	if err != nil {
		t.Fatal(err)
	}
	return filepath.Join(cache, "waybill-testkit", "sdk", "node_modules")
}

// inSDKFolder puts a script beside the installed packages, and returns its path.
func inSDKFolder(t *testing.T, script string) string {
	t.Helper()
	text, err := os.ReadFile(script)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	path := filepath.Join(dir, filepath.Base(script))
	if err := os.WriteFile(path, text, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(sdkFolder(t), filepath.Join(dir, "node_modules")); err != nil {
		t.Fatal(err)
	}
	return path
}

// newNode returns a Node that follows proxy variables: "node24" or "node26". Where npm
// has no binary of it the one in PATH has to be new enough.
func newNode(t *testing.T, version string) string {
	t.Helper()
	arch := runtime.GOARCH
	if arch == "amd64" {
		arch = "x64"
	}
	pkg := strings.TrimSuffix(version, "24") + "-" + runtime.GOOS + "-" + arch
	path := filepath.Join(sdkFolder(t), pkg, "bin", "node")
	if _, err := os.Stat(path); err != nil {
		return testkit.RequireTool(t, "node")
	}
	return path
}

// TestCaseRT04SDK runs client libraries of npm with their default retries against an
// origin that applies the effect and is not heard of again: there is one effect, and
// the library shows what to do. Each runs in its own dialect, and in the default form
// where nobody configured one: then the guard (O3) is what stops those that come again.
// Those that use fetch speak HTTP/2 to the proxy. It runs in make test-long;
// TestLibrariesDoWhatTheyMay has their documented rules.
func TestCaseRT04SDK(t *testing.T) {
	if !long() {
		return
	}
	contract.Covers(t, "L7", "L8", "L9", "O3", "O4")
	script := inSDKFolder(t, filepath.Join("testdata", "sdk", "calls.mjs"))
	streams := []sdk{{name: "openaistream", dialect: "openai"}, {name: "vercelstream", dialect: "openai"}, {name: "anthropicstream", dialect: "anthropic"}, {name: "googlestream", dialect: "google"}}
	runSDKs(t, npmSDKs, streams, testkit.Command{Path: newNode(t, "node26"), Args: []string{script}})
}

// TestCaseRT04GoSDK is the same with libraries of Go.
func TestCaseRT04GoSDK(t *testing.T) {
	if !long() {
		return
	}
	contract.Covers(t, "L7", "L8", "L9", "O3", "O4")
	bin := buildIn(t, "goclients", ".") // takes minutes the first time
	runSDKs(t, goSDKs, []sdk{{name: "openaistream", dialect: "openai"}, {name: "anthropicstream", dialect: "anthropic"}}, testkit.Command{Path: bin})
}

// buildIn builds a program of a module below this folder: what only these tests need
// is in modules of its own. It takes as long as it takes.
func buildIn(t *testing.T, module, pkg string) string {
	t.Helper()
	bin := filepath.Join(t.TempDir(), module)
	build := exec.CommandContext(t.Context(), testkit.RequireTool(t, "go"), "build", "-o", bin, pkg)
	build.Dir = module
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("go build: %v\n%s", err, out)
	}
	return bin
}

func runSDKs(t *testing.T, list, streams []sdk, driver testkit.Command) {
	dialects := []string{"default"}
	for _, l := range list {
		if !slices.Contains(dialects, l.dialect) {
			dialects = append(dialects, l.dialect)
		}
	}
	b := newSDKBed(t, dialects)
	driver.Env = []string{"HTTPS_PROXY=http://" + b.addr, "NODE_USE_ENV_PROXY=1", "NO_PROXY=", "NODE_EXTRA_CA_CERTS=" + b.roots, "SSL_CERT_FILE=" + b.roots, "NODE_NO_WARNINGS=1"}
	command := func(args ...string) testkit.Command {
		c := driver
		c.Args = append(slices.Clone(driver.Args), args...)
		return c
	}
	t.Run("once", func(t *testing.T) {
		places := make(chan struct{}, 3) // as many at a time
		for _, lib := range list {
			for _, form := range slices.Compact([]string{lib.dialect, "default"}) {
				t.Run(lib.name+"/"+form, func(t *testing.T) {
					t.Parallel()
					places <- struct{}{}
					defer func() { <-places }()
					b.once(t, lib, form, command)
				})
			}
		}
	})
	t.Run("keyed", func(t *testing.T) {
		// Where the service keeps a key the library's own repeat, with its own key, is a
		// further attempt of the action, and ends well.
		contract.Covers(t, "I9", "A9")
		base := "/wb-stripe-keyed-stripe"
		_, out, errs := testkit.Run(t, command("stripe", keyedHost, "12000", base))
		keys := make(map[string]int)
		for _, a := range b.up.Where(func(a testkit.Arrival) bool { return strings.Contains(a.Target, base) }) {
			keys[a.Header.Get("Idempotency-Key")]++
		}
		var views []dispatch.ActionView
		for _, v := range b.all(t) {
			if strings.Contains(v.Target, base) {
				views = append(views, v)
			}
		}
		end, attempts, result := `"end":"done"`, 2, "committed"
		if i := slices.IndexFunc(list, func(l sdk) bool { return l.name == "stripe" }); !list[i].returns {
			end, attempts, result = "repeat only with the same idempotency key", 1, "unknown" // is left to its caller
		}
		if !strings.Contains(out, end) || len(keys) != 1 || len(views) != 1 || views[0].Attempts != attempts || views[0].Outcome != result {
			t.Errorf("%v, %+v: %s %s", keys, views, out, errs)
		}
	})
	t.Run("streams", func(t *testing.T) {
		for _, lib := range streams {
			t.Run(lib.name, func(t *testing.T) {
				t.Parallel()
				base := "/wb-" + lib.name + "-" + lib.dialect + "-stream"
				_, out, errs := testkit.Run(t, command(lib.name, sdkHost(lib.dialect), "12000", base))
				t.Log(out)
				if n := len(b.up.Where(func(a testkit.Arrival) bool { return strings.Contains(a.Target, base) })); n != 1 || !strings.Contains(out, `"end":"failed"`) || !strings.Contains(out, "do not repeat; reconcile act_") {
					t.Errorf("%d effects: %s %s", n, out, errs)
				}
			})
		}
	})
	t.Run("again", func(t *testing.T) {
		// Nothing left: those that come again by themselves may.
		places := make(chan struct{}, 3)
		for _, lib := range list {
			t.Run(lib.name, func(t *testing.T) {
				t.Parallel()
				places <- struct{}{}
				defer func() { <-places }()
				base := "/wb-" + lib.name + "-down"
				_, out, errs := testkit.Run(t, command(lib.name, "down-"+sdkHost(lib.dialect), "12000", base))
				n := 0
				for _, v := range b.all(t) {
					if strings.Contains(v.Target, base) {
						n++
					}
				}
				if lib.returns != (n > 1) {
					t.Errorf("sent %d times where it may come again: %s %s", n, out, errs)
				}
			})
		}
	})
	for _, v := range b.settle(t) {
		if v.Outcome == "not_attempted" && v.DispatchStarted {
			t.Errorf("dispatched and not_attempted: %+v", v)
		}
	}
	b.verify()
	b.kill()
	testkit.Search(t, b.canary, testkit.In(b.data), testkit.InString("log", b.logs.String()))
}
