package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/internal/killpoint"
	"waybill/internal/testkit"
)

// rotating is a token endpoint that takes each refresh token once and gives the next one.
type rotating struct {
	mu      sync.Mutex
	n       int
	good    string
	canary  *testkit.Canary
	taken   []string // refresh tokens, in the order in which they came
	granted []bool
}

func (s *rotating) refresh(n int) string { return fmt.Sprintf("%s-refresh-%d", s.canary.Value(), n) }

func (s *rotating) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = r.ParseForm()
	came := r.PostForm.Get("refresh_token")
	s.taken, s.granted = append(s.taken, came), append(s.granted, came == s.good)
	w.Header().Set("Content-Type", "application/json")
	if came != s.good {
		w.WriteHeader(http.StatusBadRequest)
		_ = json.NewEncoder(w).Encode(map[string]string{"error": "invalid_grant", "error_description": came})
		return
	}
	s.n++
	s.good = s.refresh(s.n)
	_ = json.NewEncoder(w).Encode(map[string]any{"access_token": fmt.Sprintf("%s-access-%d", s.canary.Value(), s.n), "token_type": "bearer", "expires_in": 3600, "refresh_token": s.good})
}

// TestRotationSurvivesKill: the process is killed when a rotated refresh token has come
// and is not stored, when it is written and has not got its name, and when it is stored.
// After the restart the new one is used – or, where it was lost, the request is refused
// before anything is sent; never is the spent one taken for good (CONTRACT C1, T2).
func TestRotationSurvivesKill(t *testing.T) {
	contract.Covers(t, "C1", "C2", "T2", "M2")
	for _, c := range []struct {
		point, store string
		lost         bool
	}{
		{"oauth-rotated", "file", true}, {"oauth-rotated", "vault", true},
		{"secret-written", "file", true}, {"secret-written", "vault", true},
		{"oauth-stored", "file", false}, {"oauth-stored", "vault", false},
	} {
		t.Run(c.point+" "+c.store, func(t *testing.T) {
			t.Parallel()
			ca := testkit.NewCA(t)
			s := &rotating{canary: testkit.NewCanary(t)}
			s.good = s.refresh(0)
			endpoint := httptest.NewServer(s)
			t.Cleanup(endpoint.Close)
			const host = "turn.example.test"
			up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(host)})
			place := map[string]string{"file": "{file: refresh}", "vault": "{vault: refresh}"}[c.store]
			r := newRig(t, ca, rigOptions{
				top:    "  turn: {from: {oauth: {token_url: \"" + endpoint.URL + "\", client_id: c, refresh_token: " + place + "}}}\n",
				routes: fmt.Sprintf("  - name: turn\n    match: {host: %s}\n    upstream: {roots: roots.pem, resolve: {%s: %q}}\n    inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: turn}]\n", host, host, up.Addr()),
			})
			r.write("key.txt", "AGE-SECRET-KEY-1GFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPYYSJZGFPQ4EGAEX\n")
			store := func(token string) {
				if c.store == "file" {
					r.write("refresh", token)
				} else {
					r.must(token, "vault", "set", "refresh")
				}
			}
			if c.store == "vault" {
				r.must("", "vault", "init", "--identity", filepath.Join(r.dir, "key.txt"))
			}
			store(s.refresh(0))
			point := c.point
			r.env = []string{killpoint.Variable + "=" + point}
			r.start()
			send := func(path string) (*testkit.Response, error) {
				client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), NoKeepAlive: true, Timeout: patience})
				return testkit.TrySend(t, client, http.MethodPost, "https://"+host+path, "a")
			}
			if resp, err := send("/killed"); err == nil {
				t.Fatalf("%s was not passed: %d %s", point, resp.Status, resp.Body)
			}
			r.p.Wait(t, patience)
			r.kill()
			if s.n != 1 {
				t.Fatalf("%d grants before the kill", s.n)
			}
			r.env = nil
			r.start()
			resp, err := send("/after")
			if err != nil {
				t.Fatal(err)
			}
			body := string(resp.Body)
			if c.lost {
				if resp.Status != http.StatusForbidden || !strings.Contains(body, `"CREDENTIAL_REFUSED"`) || !strings.Contains(resp.Header.Get("Waybill-Outcome"), "not_attempted") {
					t.Errorf("the new token is lost: %d %s", resp.Status, body)
				}
				if n := len(up.Arrivals()); n != 0 {
					t.Errorf("%d requests arrived without a token that is good", n)
				}
				store(s.good)                        // a person signed in again
				testkit.Eventually(t, func() error { // a failure is answered for a second
					if resp, err = send("/again"); err != nil || resp.Status != 200 {
						return fmt.Errorf("%w %v", err, resp)
					}
					return nil
				})
			} else if resp.Status != 200 {
				t.Errorf("the new token is stored: %d %s", resp.Status, body)
			}
			r.kill()
			s.mu.Lock()
			defer s.mu.Unlock()
			arrived := up.Arrivals()
			if len(arrived) != 1 || strings.Join(arrived[0].Values("Authorization"), "") != fmt.Sprintf("Bearer %s-access-%d", s.canary.Value(), s.n) || s.n != 2 {
				t.Errorf("%d arrived, %d grants: not with the newest access token", len(arrived), s.n)
			}
			// The spent token was offered to its endpoint at most until that said no.
			spent := 0
			for i, token := range s.taken[1:] {
				if token == s.refresh(0) && !s.granted[i+1] {
					spent++
				}
			}
			if max := map[bool]int{true: 2, false: 0}[c.lost]; spent > max {
				t.Errorf("the spent token was sent %d times", spent)
			}
			// What a kill left beside the file is gone with the next write.
			if c.store == "file" {
				entries, err := os.ReadDir(r.dir)
				if err != nil {
					t.Fatal(err)
				}
				for _, e := range entries {
					if strings.HasPrefix(e.Name(), ".refresh.new-") {
						t.Errorf("%s is left", e.Name())
					}
				}
			}
			for _, v := range r.actions() {
				if strings.HasSuffix(v.Target, "/killed") && (v.DispatchStarted || v.Outcome != "not_attempted") {
					t.Errorf("%+v", v)
				}
			}
			testkit.Search(t, s.canary, testkit.InString("answer", body), testkit.InString("log", r.logs.String()), testkit.In(filepath.Join(r.data, "journal")))
		})
	}
}

// TestHundredCallersOneRefresh: a hundred callers of the real binary wait on one expired
// token; it is renewed once, and all of them get the new one.
func TestHundredCallersOneRefresh(t *testing.T) {
	contract.Covers(t, "C1")
	ca := testkit.NewCA(t)
	canary := testkit.NewCanary(t)
	var mu sync.Mutex
	grants := 0
	all := make(chan struct{}) // closed when a hundred requests are on their way
	endpoint := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		grants++
		n, life := grants, 3600
		mu.Unlock()
		if n == 1 {
			life = 1
		} else {
			select {
			case <-all:
			case <-time.After(patience):
			}
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(map[string]any{"access_token": fmt.Sprintf("%s-%d", canary.Value(), n), "token_type": "bearer", "expires_in": life})
	}))
	t.Cleanup(endpoint.Close)
	const host = "turn.example.test"
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(host)})
	r := newRig(t, ca, rigOptions{
		top:    "  turn: {from: {oauth: {token_url: \"" + endpoint.URL + "\", client_id: c, client_secret: {file: secret}}}, timeout: 30s}\n",
		routes: fmt.Sprintf("  - name: turn\n    match: {host: %s}\n    upstream: {roots: roots.pem, resolve: {%s: %q}}\n    inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: turn}]\n", host, host, up.Addr()),
	})
	r.start()
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), Timeout: time.Minute})
	send := func(i int) {
		if resp := testkit.Send(t, client, http.MethodPost, fmt.Sprintf("https://%s/v1/%d", host, i), "a"); resp.Status != 200 {
			t.Errorf("%d: %d %.300s", i, resp.Status, resp.Body)
		}
	}
	send(0)
	time.Sleep(time.Second) // the life of the token
	before := len(up.Arrivals())
	var pool sync.WaitGroup
	for i := range 100 {
		pool.Go(func() { send(i + 1) })
	}
	// All of them wait: they are accepted, and none has arrived.
	testkit.Eventually(t, func() error {
		if n := inFlight(t, r); n < 100 {
			return fmt.Errorf("%d in flight", n)
		}
		return nil
	})
	if n := len(up.Arrivals()); n != before {
		t.Errorf("%d arrived with an expired token", n-before)
	}
	close(all)
	pool.Wait()
	mu.Lock()
	defer mu.Unlock()
	if grants != 2 {
		t.Errorf("%d refreshes for a hundred callers", grants-1)
	}
	for _, a := range up.Arrivals()[before:] {
		if got := strings.Join(a.Values("Authorization"), ""); got != fmt.Sprintf("Bearer %s-2", canary.Value()) {
			t.Errorf("%s came with another token", a.Target)
		}
	}
	if n := len(up.Arrivals()) - before; n != 100 {
		t.Errorf("%d arrived", n)
	}
}

// inFlight is the gauge of actions that have not ended.
func inFlight(t *testing.T, r *rig) int {
	t.Helper()
	for _, line := range strings.Split(get(t, r.meters), "\n") {
		if v, ok := strings.CutPrefix(line, "waybill_actions_in_flight "); ok {
			n, err := strconv.Atoi(v)
			if err != nil {
				t.Fatal(err)
			}
			return n
		}
	}
	t.Fatal("no gauge of actions in flight")
	return 0
}

// TestExpiredTokenIsNeverUsed: an access token that has ended is not sent, whatever its
// endpoint says: nobody there is CREDENTIAL_UNAVAILABLE, no is CREDENTIAL_REFUSED, and the
// next good answer is used.
func TestExpiredTokenIsNeverUsed(t *testing.T) {
	contract.Covers(t, "C1")
	ca := testkit.NewCA(t)
	canary := testkit.NewCanary(t)
	var mu sync.Mutex
	status, n := http.StatusOK, 0
	endpoint := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(status)
		if status != http.StatusOK {
			_ = json.NewEncoder(w).Encode(map[string]string{"error": "invalid_client", "error_description": canary.Value()})
			return
		}
		n++
		_ = json.NewEncoder(w).Encode(map[string]any{"access_token": fmt.Sprintf("%s-%d", canary.Value(), n), "token_type": "bearer", "expires_in": 1 + 3600*(n-1)})
	}))
	t.Cleanup(endpoint.Close)
	const host = "turn.example.test"
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: ca.Server(host)})
	r := newRig(t, ca, rigOptions{
		top:    "  turn: {from: {oauth: {token_url: \"" + endpoint.URL + "\", client_id: c, client_secret: {file: secret}}}}\n",
		routes: fmt.Sprintf("  - name: turn\n    match: {host: %s}\n    upstream: {roots: roots.pem, resolve: {%s: %q}}\n    inject: [{header: Authorization, value: \"Bearer ${secret}\", credential: turn}]\n", host, host, up.Addr()),
	})
	r.start()
	client := testkit.NewClient(t, testkit.ClientConfig{Proxy: r.addr, Roots: r.roots(), Timeout: patience})
	answers := ""
	send := func(i int) *testkit.Response {
		resp := testkit.Send(t, client, http.MethodPost, fmt.Sprintf("https://%s/v1/%d", host, i), "a")
		answers += fmt.Sprintln(resp.Status, resp.Header, string(resp.Body))
		return resp
	}
	if resp := send(0); resp.Status != 200 {
		t.Fatalf("%d %s", resp.Status, resp.Body)
	}
	time.Sleep(time.Second) // the life of the token
	for i, c := range []struct {
		status int // of the endpoint
		code   string
	}{{http.StatusServiceUnavailable, "CREDENTIAL_UNAVAILABLE"}, {http.StatusUnauthorized, "CREDENTIAL_REFUSED"}} {
		mu.Lock()
		status = c.status
		mu.Unlock()
		testkit.Eventually(t, func() error { // a failure is answered for a second
			if resp := send(10 * (i + 1)); resp.Status == 200 || !strings.Contains(string(resp.Body), c.code) || !strings.Contains(resp.Header.Get("Waybill-Outcome"), "not_attempted") {
				return fmt.Errorf("%d %s", resp.Status, resp.Body)
			}
			return nil
		})
	}
	if n := len(up.Arrivals()); n != 1 {
		t.Errorf("%d arrived with a token that had ended", n-1)
	}
	mu.Lock()
	status = http.StatusOK
	mu.Unlock()
	testkit.Eventually(t, func() error {
		if resp := send(99); resp.Status != 200 {
			return fmt.Errorf("%d %s", resp.Status, resp.Body)
		}
		return nil
	})
	last := up.Arrivals()
	if got := strings.Join(last[len(last)-1].Values("Authorization"), ""); len(last) != 2 || got != fmt.Sprintf("Bearer %s-2", canary.Value()) {
		t.Errorf("%d arrived, the last one not with the new token", len(last))
	}
	r.kill()
	testkit.Search(t, canary, testkit.InString("answers", answers), testkit.InString("log", r.logs.String()))
}
