package e2e

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"fmt"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"waybill/dispatch"
	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// TestCaseGT01: git clones, fetches and pushes under "waybill run" with a token that it
// does not have.
func TestCaseGT01(t *testing.T) {
	t.Run("GT-01", func(t *testing.T) {
		contract.Covers(t, "V2", "G2")
		bin := testkit.RequireTool(t, "git")
		home := t.TempDir()
		var b *bed
		run := func(dir string, args ...string) (code int, out, errs string) {
			c := testkit.Command{Path: bin, Args: args, Dir: dir, Env: []string{"HOME=" + home, "GIT_CONFIG_NOSYSTEM=1", "GIT_TERMINAL_PROMPT=0",
				"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@b", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@b"}}
			if slices.ContainsFunc(args, func(s string) bool { return slices.Contains([]string{"ls-remote", "clone", "fetch", "push"}, s) }) {
				c.Path, c.Args = b.bin, append([]string{"run", "--", bin}, args...)
				c.Env = append(c.Env, "WAYBILL_CONFIG="+b.config, "WAYBILL_DATA="+b.data)
			}
			return testkit.Run(t, c)
		}
		git := func(dir string, args ...string) string {
			t.Helper()
			code, out, errs := run(dir, args...)
			if code != 0 {
				t.Fatalf("git %v: %d %s %s", args, code, out, errs)
			}
			return strings.TrimSpace(out)
		}
		root := t.TempDir()
		repo := filepath.Join(root, "r.git")
		git(root, "init", "-q", "--bare", "-b", "main", "r.git")
		git(repo, "config", "http.receivepack", "true")
		var branches strings.Builder
		for i := range 60 {
			fmt.Fprintf(&branches, "commit refs/heads/b%d\ncommitter a <a@b> 0 +0000\ndata <<end\n%d\nend\n", i, i)
		}
		if code, out, errs := testkit.Run(t, testkit.Command{Path: bin, Args: []string{"fast-import", "--quiet"}, Dir: repo, Env: []string{"HOME=" + home, "GIT_CONFIG_NOSYSTEM=1"},
			Stdin: strings.NewReader(branches.String())}); code != 0 {
			t.Fatalf("git fast-import: %d %s %s", code, out, errs)
		}
		git(repo, "update-ref", "refs/heads/main", "refs/heads/b0")

		ca := testkit.NewCA(t)
		backend := &cgi.Handler{Path: filepath.Join(git(root, "--exec-path"), "git-http-backend"), Dir: root,
			Env: []string{"GIT_PROJECT_ROOT=" + root, "GIT_HTTP_EXPORT_ALL=1", "REMOTE_USER=u", "HOME=" + home}, Stderr: &bytes.Buffer{}}
		var expected atomic.Value // the Authorization field that the origin wants
		var challenged atomic.Int64
		var cut atomic.Int64 // of an answer to a pack half of it, or all; of refs all
		origin := testkit.NewOrigin(t, testkit.OriginConfig{TLS: ca.Server(gitHost), Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if r.Header.Get("Authorization") != expected.Load() {
				challenged.Add(1)
				w.Header().Set("WWW-Authenticate", `Basic realm="g"`)
				w.WriteHeader(http.StatusUnauthorized)
				return
			}
			if v := r.Header.Get("Git-Protocol"); v != "" {
				r.Header.Set("Git-Protocol", v)
			}
			if cut.Load() == 3 && strings.HasSuffix(r.URL.Path, "/info/refs") {
				panic(http.ErrAbortHandler)
			}
			if cut.Load() > 0 && strings.HasSuffix(r.URL.Path, "/git-receive-pack") && r.ContentLength > 4 {
				whole := httptest.NewRecorder()
				backend.ServeHTTP(whole, r)
				if cut.Load() == 2 {
					panic(http.ErrAbortHandler)
				}
				w.Header().Set("Content-Type", whole.Header().Get("Content-Type"))
				w.Header().Set("Content-Length", strconv.Itoa(whole.Body.Len()))
				_, _ = w.Write(whole.Body.Bytes()[:whole.Body.Len()/2])
				_ = http.NewResponseController(w).Flush()
				panic(http.ErrAbortHandler)
			}
			backend.ServeHTTP(w, r)
		})})
		b = newBed(t, ca, rigOptions{origins: map[string]string{gitHost: origin.Addr()}})
		b.ledgers[gitHost] = origin.Ledger
		expected.Store("Basic " + base64.StdEncoding.EncodeToString([]byte("x-access-token:"+b.canary.Value())))
		b.begin()

		url := "https://dummy:token@" + gitHost + "/r.git"
		if n := strings.Count(git(root, "ls-remote", url), "\n"); n < 60 {
			t.Errorf("ls-remote lists %d refs", n+1)
		}
		work := filepath.Join(t.TempDir(), "c")
		git(root, "clone", "-q", "--single-branch", "-b", "main", url, work)
		git(work, "fetch", "-q", "origin", "+refs/heads/*:refs/remotes/origin/*")
		if n := strings.Count(git(work, "for-each-ref", "refs/remotes/origin"), "refs/remotes/origin/b"); n != 60 {
			t.Errorf("%d refs after the fetch", n)
		}
		big := make([]byte, 20_000_000)
		push := func(branch, version string, data []byte) (code int, errs string) {
			t.Helper()
			if err := os.WriteFile(filepath.Join(work, "f"), data, 0o600); err != nil {
				t.Fatal(err)
			}
			git(work, "add", "f")
			git(work, "commit", "-q", "-m", branch)
			code, _, errs = run(work, "-c", "http.version="+version, "push", "-q", "origin", "HEAD:"+branch)
			return code, errs
		}
		// The pack comes in chunks on HTTP/1.1, in frames on HTTP/2.
		for _, p := range []struct {
			branch, version string
			size            int
		}{{"pushed", "HTTP/1.1", 20_000_000}, {"pushed2", "HTTP/2", 3_000_000}} {
			branch := p.branch
			_, _ = rand.Read(big) // nothing that a delta could shorten
			if code, errs := push(branch, p.version, big[:p.size]); code != 0 {
				t.Fatalf("push: %d %s", code, errs)
			}
			if here, there := git(work, "rev-parse", "HEAD"), git(repo, "rev-parse", "refs/heads/"+branch); here != there {
				t.Errorf("pushed %s, there is %s", here, there)
			}
			git(repo, "fsck", "--strict", "refs/heads/"+branch)
		}
		// A push is two POSTs: a probe of four bytes, and the pack.
		posts := func(suffix string) []testkit.Arrival {
			return origin.Where(func(a testkit.Arrival) bool {
				return a.Method == http.MethodPost && strings.HasSuffix(a.Target, suffix)
			})
		}
		packs := posts("/git-receive-pack")
		if len(packs) != 4 || packs[0].BodyBytes != 4 || packs[1].BodyBytes < 20_000_000 || packs[2].BodyBytes != 4 || packs[3].BodyBytes < 3_000_000 {
			t.Fatalf("%d POSTs of the pushes", len(packs))
		}
		gzipped := 0
		for _, a := range posts("/git-upload-pack") {
			if a.Header.Get("Content-Encoding") == "gzip" && bytes.HasPrefix(a.Body, []byte{0x1f, 0x8b}) {
				gzipped++
			}
		}
		if gzipped == 0 {
			t.Error("no gzip'd POST arrived as it was sent: this run shows nothing")
		}
		if n := challenged.Load(); n != 0 {
			t.Errorf("the origin challenged %d requests", n)
		}
		for _, a := range origin.Arrivals() {
			if got := fields(a, "Authorization"); len(got) != 1 || got[0] != expected.Load() {
				t.Error("not exactly one Authorization with the secret")
			}
		}
		sent := sentTo(b.settle(t), "/r.git/git-receive-pack")
		if len(sent) != 4 || slices.ContainsFunc(sent, func(v dispatch.ActionView) bool {
			return v.Outcome != "committed" || !strings.HasPrefix(v.Caller, "session:")
		}) {
			t.Errorf("%+v", sent)
		}
		// The answer is cut in the middle, or does not come: git fails and does not push
		// again. Of a POST it shows the status only; the account of "waybill run" says what
		// to do. Whether the push happened is to be looked up.
		for kind, facts := range map[string]string{"cut": incomplete, "lost": lost} {
			before := len(posts("/git-receive-pack"))
			cut.Store(1)
			if kind == "lost" {
				cut.Store(2)
			}
			_, _ = rand.Read(big[:200_000]) // less than git sends without a probe
			if code, errs := push(kind, "HTTP/2", big[:200_000:200_000]); code == 0 || !strings.Contains(errs, "HTTP 424") || !strings.Contains(errs, ", retry: reconcile") {
				t.Errorf("%s: exit code %d, %s", kind, code, errs)
			}
			cut.Store(0)
			if n := len(posts("/git-receive-pack")) - before; n != 1 {
				t.Errorf("%s: pushed %d times", kind, n)
			}
			v := sentTo(b.settle(t), "/r.git/git-receive-pack")[0]
			if got := text(b.tell(t, v.InvocationID).Envelope.Facts()); got != facts {
				t.Errorf("%s: %s", kind, got)
			}
			if !strings.Contains(git(root, "ls-remote", url), "refs/heads/"+kind) {
				t.Errorf("%s: ls-remote does not tell that the push happened", kind)
			}
		}
		// Of the listing of refs it shows the text.
		cut.Store(3)
		if code, _, errs := run(root, "ls-remote", url); code == 0 || !strings.Contains(errs, "remote: Outcome unknown: ") {
			t.Errorf("refs: exit code %d, %s", code, errs)
		}
		for _, v := range b.settle(t) {
			if v.Code == "DUPLICATE_SUSPECTED" {
				t.Errorf("taken for a duplicate: %+v", v)
			}
		}
		b.finish(t)
	})
}
