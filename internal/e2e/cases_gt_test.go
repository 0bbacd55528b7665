package e2e

import (
	"bytes"
	"crypto/rand"
	"encoding/base64"
	"net/http"
	"net/http/cgi"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// TestCaseGT01: git clones, fetches and pushes through the proxy with a token that
// it does not have.
func TestCaseGT01(t *testing.T) {
	t.Run("GT-01", func(t *testing.T) {
		contract.Covers(t, "V2", "G2")
		bin := testkit.RequireTool(t, "git")
		home := t.TempDir()
		var proxyEnv []string
		git := func(dir string, args ...string) string {
			t.Helper()
			code, out, errs := testkit.Run(t, testkit.Command{Path: bin, Args: args, Dir: dir, Env: append([]string{"HOME=" + home, "GIT_CONFIG_NOSYSTEM=1", "GIT_TERMINAL_PROMPT=0",
				"GIT_AUTHOR_NAME=a", "GIT_AUTHOR_EMAIL=a@b", "GIT_COMMITTER_NAME=a", "GIT_COMMITTER_EMAIL=a@b"}, proxyEnv...)})
			if code != 0 {
				t.Fatalf("git %v: %d %s %s", args, code, out, errs)
			}
			return strings.TrimSpace(out)
		}
		root := t.TempDir()
		repo := filepath.Join(root, "r.git")
		git(root, "init", "-q", "--bare", "-b", "main", "r.git")
		git(repo, "config", "http.receivepack", "true")
		tree := git(repo, "mktree") // of nothing
		for i := range 60 {
			git(repo, "update-ref", "refs/heads/b"+strconv.Itoa(i), git(repo, "commit-tree", tree, "-m", strconv.Itoa(i)))
		}
		git(repo, "update-ref", "refs/heads/main", "refs/heads/b0")

		ca := testkit.NewCA(t)
		backend := &cgi.Handler{Path: filepath.Join(git(root, "--exec-path"), "git-http-backend"), Dir: root,
			Env: []string{"GIT_PROJECT_ROOT=" + root, "GIT_HTTP_EXPORT_ALL=1", "REMOTE_USER=u", "HOME=" + home}, Stderr: &bytes.Buffer{}}
		var expected atomic.Value // the Authorization field that the origin wants
		var challenged atomic.Int64
		var cut atomic.Bool
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
			if cut.Load() && strings.HasSuffix(r.URL.Path, "/git-receive-pack") && r.ContentLength > 4 {
				whole := httptest.NewRecorder()
				backend.ServeHTTP(whole, r)
				w.Header().Set("Content-Type", whole.Header().Get("Content-Type"))
				w.Header().Set("Content-Length", strconv.Itoa(whole.Body.Len()))
				_, _ = w.Write(whole.Body.Bytes()[:whole.Body.Len()/2])
				_ = http.NewResponseController(w).Flush()
				panic(http.ErrAbortHandler)
			}
			backend.ServeHTTP(w, r)
		})})
		b := newBed(t, ca, rigOptions{origins: map[string]string{gitHost: origin.Addr()}})
		b.ledgers[gitHost] = origin.Ledger
		expected.Store("Basic " + base64.StdEncoding.EncodeToString([]byte("x-access-token:"+b.canary.Value())))
		b.begin()
		proxyEnv = []string{"https_proxy=http://" + b.addr, "GIT_SSL_CAINFO=" + b.roots}

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
		if _, err := rand.Read(big); err != nil {
			t.Fatal(err)
		}
		push := func(branch string, data []byte) (code int, errs string) {
			t.Helper()
			if err := os.WriteFile(filepath.Join(work, "f"), data, 0o600); err != nil {
				t.Fatal(err)
			}
			git(work, "add", "f")
			git(work, "commit", "-q", "-m", branch)
			code, _, errs = testkit.Run(t, testkit.Command{Path: bin, Args: []string{"push", "-q", "origin", "HEAD:" + branch}, Dir: work, Env: append([]string{"HOME=" + home, "GIT_CONFIG_NOSYSTEM=1", "GIT_TERMINAL_PROMPT=0"}, proxyEnv...)})
			return code, errs
		}
		if code, errs := push("pushed", big); code != 0 {
			t.Fatalf("push: %d %s", code, errs)
		}
		if here, there := git(work, "rev-parse", "HEAD"), git(repo, "rev-parse", "refs/heads/pushed"); here != there {
			t.Errorf("pushed %s, there is %s", here, there)
		}
		git(repo, "fsck", "--strict", "refs/heads/pushed")
		// A push is two POSTs: a probe of four bytes, and the pack.
		posts := func(suffix string) []testkit.Arrival {
			return origin.Where(func(a testkit.Arrival) bool {
				return a.Method == http.MethodPost && strings.HasSuffix(a.Target, suffix)
			})
		}
		packs := posts("/git-receive-pack")
		if len(packs) != 2 || packs[0].BodyBytes != 4 || packs[1].BodyBytes < 20_000_000 {
			t.Fatalf("%d POSTs of the push", len(packs))
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
		if len(sent) != 2 || sent[0].Outcome != "committed" || sent[1].Outcome != "committed" {
			t.Errorf("%+v", sent)
		}
		// Cut in the middle of its answer: git fails, and what happened is to be looked up.
		cut.Store(true)
		if code, _ := push("cut", append(big[:2_000_000:2_000_000], 'x')); code == 0 {
			t.Error("git took half an answer for a whole one")
		}
		cut.Store(false)
		v := sentTo(b.settle(t), "/r.git/git-receive-pack")[0]
		if got := text(b.tell(t, v.InvocationID).Envelope.Facts()); got != incomplete {
			t.Errorf("the cut push: %s", got)
		}
		if !strings.Contains(git(root, "ls-remote", url), "refs/heads/cut") {
			t.Error("ls-remote does not tell that the push happened")
		}
		for _, v := range b.settle(t) {
			if v.Code == "DUPLICATE_SUSPECTED" {
				t.Errorf("taken for a duplicate: %+v", v)
			}
		}
		b.finish(t)
	})
}
