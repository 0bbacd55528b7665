package oauth

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"waybill/inject"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
)

// server is a token endpoint written from RFC 6749: it rotates refresh tokens, and takes
// each one once.
type server struct {
	*httptest.Server
	mu      sync.Mutex
	grants  int
	forms   []url.Values
	refresh string // the one that is good
	answer  func(w http.ResponseWriter, n int) bool
	hold    chan struct{}
	life    int
}

func newServer(t *testing.T) *server {
	t.Helper()
	s := &server{refresh: "CANARY-refresh-0", life: 3600}
	s.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.hold != nil {
			<-s.hold
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.grants++
		_ = r.ParseForm()
		if id, secret, ok := r.BasicAuth(); ok {
			r.PostForm.Set("basic", id+":"+secret)
		}
		s.forms = append(s.forms, r.PostForm)
		if s.answer != nil && s.answer(w, s.grants) {
			return
		}
		out := map[string]any{"access_token": fmt.Sprintf("CANARY-access-%d", s.grants), "token_type": "bearer", "expires_in": s.life}
		if r.PostForm.Get("grant_type") == "refresh_token" {
			if r.PostForm.Get("refresh_token") != s.refresh {
				w.WriteHeader(http.StatusBadRequest)
				_, _ = w.Write([]byte(`{"error":"invalid_grant","error_description":"CANARY"}`))
				return
			}
			s.refresh = fmt.Sprintf("CANARY-refresh-%d", s.grants)
			out["refresh_token"] = s.refresh
		}
		w.Header().Set("Content-Type", "application/json")
		_ = json.NewEncoder(w).Encode(out)
	}))
	t.Cleanup(s.Close)
	return s
}

func value(t *testing.T, src inject.Source) string {
	t.Helper()
	s, err := src.Fetch(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	return string(s.Expose())
}

func secretFile(t *testing.T, name, v string) (string, inject.Source) {
	t.Helper()
	path := testkit.WriteFile(t, name, []byte(v+"\n"))
	return path, inject.FileSource(path)
}

// A hundred callers who wait on one expired token cause one refresh.
func TestOneRefreshForAll(t *testing.T) {
	contract.Covers(t, "C1")
	s := newServer(t)
	path, refresh := secretFile(t, "refresh", "CANARY-refresh-0")
	src := Source(inject.OAuthSpec{TokenURL: s.URL, ClientID: "c", Rotates: true}, Options{RefreshToken: refresh})
	if got := value(t, src); got != "CANARY-access-1" {
		t.Fatal(got)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "CANARY-refresh-1" {
		t.Errorf("the rotated refresh token is not stored: %v", err)
	}
	m, err := src.FetchRaw(t.Context())
	if err != nil || !strings.HasPrefix(m.Issue, "issued:") || m.Version != "client:c" {
		t.Errorf("%v %q %q", err, m.Issue, m.Version)
	}
	src.Suspect(m.Issue) // the token is no good any more
	s.hold = make(chan struct{})
	var all sync.WaitGroup
	var ready atomic.Int64
	for range 100 {
		all.Go(func() {
			ready.Add(1)
			if got := value(t, src); got != "CANARY-access-2" {
				t.Error("another token")
			}
		})
	}
	testkit.Eventually(t, func() error {
		if ready.Load() < 100 {
			return errors.New("not all wait")
		}
		return nil
	})
	close(s.hold)
	all.Wait()
	if s.grants != 2 {
		t.Errorf("%d grants for 100 callers", s.grants-1)
	}
	if f := s.forms[1]; f.Get("refresh_token") != "CANARY-refresh-1" || f.Get("client_id") != "c" {
		t.Error("the second refresh does not use the rotated token")
	}
}

func TestClientCredentials(t *testing.T) {
	contract.Covers(t, "C1")
	s := newServer(t)
	_, secret := secretFile(t, "secret", "CANARY:se/cret")
	for i, spec := range []inject.OAuthSpec{{ClientID: "my id", Scopes: []string{"a", "b"}, Audience: "https://api"}, {ClientID: "my id", InBody: true}} {
		spec.TokenURL = s.URL
		m, err := Source(spec, Options{ClientSecret: secret}).FetchRaw(t.Context())
		if err != nil || !strings.HasPrefix(m.Version, "mtime:") || time.Until(m.Expires) < 50*time.Minute {
			t.Fatalf("%v %+v", err, m.Version)
		}
		f := s.forms[i]
		if i == 0 && (f.Get("basic") != "my+id:CANARY%3Ase%2Fcret" || f.Get("scope") != "a b" || f.Get("audience") != "https://api") || i == 1 && (f.Get("client_secret") != "CANARY:se/cret" || f.Get("basic") != "") {
			t.Errorf("%d: %v", i, f)
		}
	}
}

// Each way in which a token endpoint fails has its own code, and none tells what it said.
func TestFailures(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	status := func(n int, body string) func(http.ResponseWriter, int) bool {
		return func(w http.ResponseWriter, _ int) bool {
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(n)
			_, _ = w.Write([]byte(body))
			return true
		}
	}
	for name, tc := range map[string]struct {
		answer func(http.ResponseWriter, int) bool
		down   bool
		code   outcome.Code
		reason string
	}{
		"refused":     {status(401, `{"error":"invalid_client","error_description":"CANARY"}`), false, outcome.CodeCredentialRefused, inject.ReasonDenied},
		"denied":      {status(400, `{"error":"invalid_grant"}`), false, outcome.CodeCredentialRefused, inject.ReasonDenied},
		"busy":        {status(429, `CANARY`), false, outcome.CodeCredentialUnavailable, inject.ReasonUnreachable},
		"broken":      {status(503, `CANARY`), false, outcome.CodeCredentialUnavailable, inject.ReasonUnreachable},
		"malformed":   {status(200, `{"access_token": CANARY`), false, outcome.CodeCredentialInvalid, inject.ReasonMalformed},
		"no token":    {status(200, `{"token_type":"bearer","x":"CANARY"}`), false, outcome.CodeCredentialInvalid, inject.ReasonMalformed},
		"moved":       {status(302, `CANARY`), false, outcome.CodeCredentialInvalid, inject.ReasonMalformed},
		"error, 200":  {status(200, `{"error":"invalid_grant","error_description":"CANARY"}`), false, outcome.CodeCredentialInvalid, inject.ReasonMalformed},
		"unreachable": {nil, true, outcome.CodeCredentialUnavailable, inject.ReasonUnreachable},
		"hangs": {func(w http.ResponseWriter, _ int) bool {
			time.Sleep(300 * time.Millisecond)
			return true
		}, false, outcome.CodeCredentialUnavailable, inject.ReasonTimeout},
	} {
		s := newServer(t)
		s.answer = tc.answer
		if tc.down {
			s.Close()
		}
		_, secret := secretFile(t, "secret", "CANARY-secret")
		o := Options{ClientSecret: secret}
		if name == "hangs" {
			o.Cache.Timeout = 50 * time.Millisecond
		}
		_, err := Source(inject.OAuthSpec{TokenURL: s.URL, ClientID: "c"}, o).Fetch(t.Context())
		var e *inject.Error
		if !errors.As(err, &e) || e.Code != tc.code || e.Reason != tc.reason || strings.Contains(fmt.Sprintf("%v %+v", err, errors.Unwrap(err)), "CANARY") {
			t.Errorf("%s: %v", name, err)
		}
		if name == "error, 200" && s.grants != 1 {
			t.Error("it was asked again")
		}
	}
}

// failing is a store that does not take a new value.
type failing struct {
	inject.Source
	mu   sync.Mutex
	fail bool
	kept []string
}

func (f *failing) FetchRaw(ctx context.Context) (inject.Material, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	v := "CANARY-refresh-0"
	if len(f.kept) > 0 {
		v = f.kept[len(f.kept)-1]
	}
	return inject.Material{Raw: []byte(v)}, nil
}

func (f *failing) Replace(_ context.Context, v []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fail {
		return errors.New("CANARY: disk full")
	}
	f.kept = append(f.kept, string(v))
	return nil
}

// A rotated refresh token is stored before the access token is used; when it cannot be,
// nothing is used, and the token is not lost: the next try stores it first.
func TestRotationIsStoredFirst(t *testing.T) {
	contract.Covers(t, "C1", "C2")
	s := newServer(t)
	store := &failing{fail: true}
	src := Source(inject.OAuthSpec{TokenURL: s.URL, ClientID: "c", Rotates: true}, Options{RefreshToken: store, Cache: inject.CacheOptions{Retry: time.Nanosecond}})
	_, err := src.Fetch(t.Context())
	var e *inject.Error
	if !errors.As(err, &e) || e.Code != outcome.CodeCredentialUnavailable || e.Reason != inject.ReasonNotStored || strings.Contains(err.Error(), "CANARY") {
		t.Errorf("an access token whose refresh token is not stored: %v", err)
	}
	if _, err := src.Fetch(t.Context()); err == nil || s.grants != 1 {
		t.Errorf("%v, %d grants: a spent refresh token was used again", err, s.grants)
	}
	store.mu.Lock()
	store.fail = false
	store.mu.Unlock()
	if got := value(t, src); got != "CANARY-access-2" {
		t.Error(got)
	}
	if len(store.kept) != 2 || store.kept[0] != "CANARY-refresh-1" || store.kept[1] != "CANARY-refresh-2" {
		t.Errorf("%d stored", len(store.kept))
	}
}
