package dispatch

import (
	"bytes"
	"context"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"waybill/inject"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
	"waybill/routes"
)

// turning is a source whose value changes with every Fetch, or when it is told.
type turning struct {
	n     atomic.Int64
	fixed bool
	doubt atomic.Int64
}

func (s *turning) Kind() string { return "turning" }
func (s *turning) value(n int64) string {
	return fmt.Sprintf("CANARY-turn-%06d", n)
}

func (s *turning) Fetch(ctx context.Context) (inject.Secret, error) {
	m, err := s.FetchRaw(ctx)
	return inject.NewSecret(m.Raw), err
}

func (s *turning) FetchRaw(context.Context) (inject.Material, error) {
	n := s.n.Load()
	if !s.fixed {
		n = s.n.Add(1)
	}
	return inject.Material{Raw: []byte(s.value(n)), Version: "v" + strconv.FormatInt(n, 10), Issue: "i" + strconv.FormatInt(n, 10)}, nil
}

func (s *turning) Suspect(string) { s.doubt.Add(1) }

// fixedSource is a secret of a test.
type fixedSource string

func (s fixedSource) Kind() string { return "fixed" }
func (s fixedSource) Fetch(context.Context) (inject.Secret, error) {
	return inject.NewSecret([]byte(s)), nil
}
func (s fixedSource) FetchRaw(context.Context) (inject.Material, error) {
	return inject.Material{Raw: []byte(s), Version: "v1"}, nil
}

// credentialBench is a pipeline whose routes inject in the given ways, each at its own
// host x0.example.test, x1.example.test, …
func credentialBench(t *testing.T, creds []inject.Credential, change func(r *routes.Route), ways ...[]routes.Injection) (*bench, *bytes.Buffer) {
	t.Helper()
	b := newBench(t)
	var list []routes.Route
	for i, in := range ways {
		r := routes.Route{Name: "x" + strconv.Itoa(i), Match: routes.Match{Hosts: []string{fmt.Sprintf("x%d.example.test", i)}}, Inject: in}
		if change != nil {
			change(&r)
		}
		list = append(list, r)
	}
	snap, err := routes.NewSnapshot(list, routes.Deny, nil)
	if err != nil {
		t.Fatal(err)
	}
	store, err := inject.NewStore(creds)
	if err != nil {
		t.Fatal(err)
	}
	b.Swap(&Binding{Snapshot: snap, Credentials: store})
	log := &bytes.Buffer{}
	b.cfg.Logger = slog.New(slog.NewJSONHandler(&lockedWriter{w: log}, &slog.HandlerOptions{Level: slog.LevelDebug}))
	return b, log
}

type lockedWriter struct {
	mu sync.Mutex
	w  *bytes.Buffer
}

func (w *lockedWriter) Write(p []byte) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.w.Write(p)
}

// recorded is everything that the journal of the bench holds, results apart.
func (b *bench) recorded(t *testing.T) string {
	t.Helper()
	b.j.mu.Lock()
	defer b.j.mu.Unlock()
	text, err := json.Marshal([]any{b.j.events, b.j.records})
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func pairPEM(t *testing.T, host string) string {
	t.Helper()
	certPath, keyPath := testkit.WriteCert(t, testkit.NewCA(t).Client(host))
	var out []byte
	for _, path := range []string{certPath, keyPath} {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, text...)
	}
	return string(out)
}

// TestWaysToInject: each way puts the secret where it belongs, says how in the record,
// keeps it out of every record, log and fingerprint, and finds it in answers (C1, C2, C5, D2).
func TestWaysToInject(t *testing.T) {
	contract.Covers(t, "B1", "C1", "C2", "C5", "D1", "D2")
	const secret = "CANARY+way/of=inject"
	const aws = `{"AccessKeyId":"AKIDEXAMPLE","SecretAccessKey":"CANARY+aws/secret=key","SessionToken":"CANARY-session-token"}`
	b, log := credentialBench(t, []inject.Credential{{ID: "s", Label: "2026", Source: fixedSource(secret)}, {ID: "aws", Source: fixedSource(aws), Multiline: true},
		{ID: "pair", Source: fixedSource(pairPEM(t, "x6.example.test")), Multiline: true}}, nil,
		[]routes.Injection{{Header: "X-Key", Value: "k ${secret}", Credential: "s"}},
		[]routes.Injection{{Kind: routes.InjectCookie, Name: "sid", Value: "${secret}", Credential: "s"}},
		[]routes.Injection{{Kind: routes.InjectQuery, Name: "api key", Value: "${secret}", Credential: "s"}},
		[]routes.Injection{{Kind: routes.InjectBody, Name: "/auth/token", Value: "${secret}", Credential: "s"}},
		[]routes.Injection{{Kind: routes.InjectHMAC, Header: "X-Sig", Value: "v1=${signature}", Credential: "s", HMAC: &routes.HMAC{Canonical: "${timestamp}.${body}", TimestampHeader: "X-Time", NonceHeader: "X-Nonce"}}},
		[]routes.Injection{{Kind: routes.InjectSigV4, Credential: "aws", SigV4: &routes.SigV4{Service: "s3", Region: "eu-west-1"}}},
		[]routes.Injection{{Kind: routes.InjectClientCertificate, Credential: "pair"}},
	)
	modes := []string{"header", "cookie", "query", "body", "hmac", "sigv4", "client_certificate"}
	var prints []string
	for i, mode := range modes {
		host := fmt.Sprintf("x%d.example.test", i)
		send := func() *Reply {
			s := post(host, "/v1/x", `{"amount": 5, "auth": {"user": "u"}}`, "Content-Type", "application/json", "Cookie", "own=1; sid=placeholder", "X-Key", "placeholder", "X-Sig", "placeholder", "Authorization", "placeholder", "Content-Md5", "x")
			s.HasQuery, s.RawQuery = true, "a=1&api%20key=placeholder&b=2"
			return b.Do(t.Context(), s)
		}
		// The origin repeats what it got.
		b.tr.play = func(ctx context.Context, out *Outgoing, sink Sink) Ending {
			return answerWith(200, fmt.Sprint(out.RawQuery, out.Header, b.tr.bodies[len(b.tr.bodies)-1]))(ctx, out, sink)
		}
		r := send()
		if r.Status != 200 {
			t.Fatalf("%s: %+v", mode, r.Envelope)
		}
		answer := readBody(t, r)
		if strings.Contains(answer, "CANARY") {
			t.Errorf("%s: the secret came back: %s", mode, answer)
		}
		out, body := b.tr.sent[len(b.tr.sent)-1], b.tr.bodies[len(b.tr.bodies)-1]
		order := b.tr.orders[len(b.tr.orders)-1]
		if c := r.Record.Credential; c == nil || c.Mode != mode || mode != "sigv4" && mode != "client_certificate" && (c.ID != "s" || c.Version != "2026") {
			t.Errorf("%s: recorded as %+v", mode, c)
		}
		prints = append(prints, r.Record.Bound.Fingerprint)
		if len(out.Header["Authorization"]) > 0 && mode != "sigv4" {
			t.Errorf("%s: the caller's own Authorization went along", mode)
		}
		good := false
		switch mode {
		case "header":
			good = out.Header.Get("X-Key") == "k "+secret && out.RawQuery == "a=1&api%20key=placeholder&b=2"
		case "cookie":
			good = out.Header.Get("Cookie") == "sid="+secret
		case "query":
			good = out.RawQuery == "a=1&b=2&api+key=CANARY%2Bway%2Fof%3Dinject"
		case "body":
			good = body == `{"amount": 5, "auth": {"user": "u","token":"`+secret+`"}}` && out.Length == int64(len(body)) && out.Header.Get("Content-Md5") == ""
		case "hmac":
			mac := hmac.New(sha256.New, []byte(secret))
			mac.Write([]byte(out.Header.Get("X-Time") + "." + body))
			good = out.Header.Get("X-Sig") == "v1="+hex.EncodeToString(mac.Sum(nil)) && len(out.Header.Get("X-Nonce")) > 20
		case "sigv4":
			sum := sha256.Sum256([]byte(body))
			good = strings.HasPrefix(out.Header.Get("Authorization"), "AWS4-HMAC-SHA256 Credential=AKIDEXAMPLE/") && out.Header.Get("X-Amz-Security-Token") == "CANARY-session-token" &&
				out.Header.Get("X-Amz-Content-Sha256") == hex.EncodeToString(sum[:])
		case "client_certificate":
			good = order.Certificate != nil && strings.Contains(order.Identity, "certificate sha256:")
		}
		if mode != "header" && mode != "query" {
			// A parameter that this route does not manage is the caller's.
			good = good && out.RawQuery == "a=1&api%20key=placeholder&b=2"
		}
		if !good {
			t.Errorf("%s: sent %v ?%s %s", mode, out.Header, out.RawQuery, body)
		}
	}
	// What recognises a repeat holds no secret: the rotated one gives the same.
	if len(prints) != len(modes) || prints[2] == prints[1] {
		t.Error("fingerprints")
	}
	for name, text := range map[string]string{"journal": b.recorded(t), "log": log.String()} {
		for _, s := range []string{"CANARY", "way%2Fof", "BEGIN", "AWS4-HMAC"} {
			if strings.Contains(text, s) {
				t.Errorf("%s: %s is in it", name, s)
			}
		}
	}
}

// TestSealCoversWhatIsInjected: after the secrets are attached nothing changes unseen,
// whatever way they were attached in (D2).
func TestSealCoversWhatIsInjected(t *testing.T) {
	contract.Covers(t, "D2")
	for i, change := range []func(a *action){
		func(a *action) { a.out.Header.Set("X-Key", "another") },
		func(a *action) { a.out.RawQuery += "x" },
		func(a *action) { a.body.mem[len(a.body.mem)-3] ^= 1 },
		func(a *action) { a.identity = "another" },
	} {
		b, _ := credentialBench(t, []inject.Credential{{ID: "s", Source: fixedSource("CANARY-seal-secret")}}, nil, []routes.Injection{
			{Header: "X-Key", Value: "${secret}", Credential: "s"}, {Kind: routes.InjectQuery, Name: "k", Value: "${secret}", Credential: "s"}, {Kind: routes.InjectBody, Name: "/k", Value: "${secret}", Credential: "s"}})
		a := &action{p: b.Pipeline, s: post("x0.example.test", "/", "{}", "Content-Type", "application/json"), id: b.newID(), start: testTime}
		a.accepted = Accepted{Caller: "local", Method: "POST"}
		if !b.enter() {
			t.Fatal("draining")
		}
		if r := a.prepare(t.Context()); r != nil {
			t.Fatalf("%+v", r.Envelope)
		}
		conn, _ := a.connect(t.Context())
		change(a)
		r := a.record(t.Context(), conn)
		a.close()
		if r == nil || facts(r).Code != outcome.CodeSnapshotMismatch {
			t.Errorf("%d: a changed request was recorded for dispatch", i)
		}
	}
}

// TestOneVersionInAnAction: two injections of one credential never mix two of its
// versions, also while it rotates under 64 requests; the record names the one (D1).
func TestOneVersionInAnAction(t *testing.T) {
	contract.Covers(t, "C1", "D1")
	src := &turning{}
	b, _ := credentialBench(t, []inject.Credential{{ID: "s", Source: src}}, nil, []routes.Injection{
		{Header: "X-One", Value: "${secret}", Credential: "s"}, {Header: "X-Two", Value: "${secret}", Credential: "s"}})
	var all sync.WaitGroup
	for i := range 64 {
		all.Go(func() {
			r := b.Do(t.Context(), post("x0.example.test", "/"+strconv.Itoa(i), "a"))
			if r.Status != 200 || len(strings.Split(r.Record.Credential.Version, ",")) != 2 {
				t.Errorf("%+v", r.Record.Facts)
				return
			}
			one, two, _ := strings.Cut(r.Record.Credential.Version, ",")
			if one != two {
				t.Errorf("recorded %s and %s", one, two)
			}
		})
	}
	all.Wait()
	if b.tr.count() != 64 {
		t.Errorf("%d of 64 sent", b.tr.count())
	}
	seen := map[string]bool{}
	for _, out := range b.tr.sent {
		one := out.Header.Get("X-One")
		if one != out.Header.Get("X-Two") {
			t.Error("two versions in one request")
		}
		seen[one] = true
	}
	if len(seen) != 64 {
		t.Errorf("%d versions used", len(seen))
	}
}

// TestRefusedTokenIsRenewed: a 401 makes a source of tokens ask anew, once.
func TestRefusedTokenIsRenewed(t *testing.T) {
	contract.Covers(t, "C1")
	src := &turning{fixed: true}
	b, _ := credentialBench(t, []inject.Credential{{ID: "s", Source: src}}, nil, []routes.Injection{{Header: "Authorization", Value: "Bearer ${secret}", Credential: "s"}})
	for i, status := range []int{200, 403, 401} {
		b.tr.play = answerWith(status, "x")
		b.Do(t.Context(), post("x0.example.test", "/"+strconv.Itoa(i), "a"))
	}
	if n := src.doubt.Load(); n != 1 {
		t.Errorf("%d doubts", n)
	}
}

// TestInjectionRefused: what cannot be attached ends before anything is sent; the
// operator learns which credential it was, the caller does not (B1, B3, C1).
func TestInjectionRefused(t *testing.T) {
	contract.Covers(t, "B1", "B3", "C1", "C2")
	creds := []inject.Credential{{ID: "space", Source: fixedSource("CANARY with spaces")}, {ID: "pem", Source: fixedSource("CANARY-no-pem"), Multiline: true}, {ID: "secret-name-of-it", Source: inject.FileSource("/nowhere/CANARY")}}
	b, log := credentialBench(t, creds, nil,
		[]routes.Injection{{Kind: routes.InjectCookie, Name: "c", Value: "${secret}", Credential: "space"}},
		[]routes.Injection{{Kind: routes.InjectBody, Name: "/k", Value: "${secret}", Credential: "space"}},
		[]routes.Injection{{Kind: routes.InjectClientCertificate, Credential: "pem"}},
		[]routes.Injection{{Kind: routes.InjectSigV4, Credential: "pem", SigV4: &routes.SigV4{Service: "s3", Region: "r"}}},
		[]routes.Injection{{Header: "X-Key", Value: "${secret}", Credential: "secret-name-of-it"}},
		[]routes.Injection{{Kind: routes.InjectHMAC, Header: "X", Value: "${signature}", Credential: "space", HMAC: &routes.HMAC{Canonical: "${body}", Key: "hex"}}},
	)
	for i, tc := range []struct {
		code   outcome.Code
		reason string
		fields []string
		body   string
	}{
		{outcome.CodeCredentialInvalid, inject.ReasonControlByte, nil, "{}"},
		{outcome.CodeInjectionUnsupported, inject.ReasonBody, []string{"Content-Type", "text/plain"}, "{}"},
		{outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil, "{}"},
		{outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil, "{}"},
		{outcome.CodeCredentialMissing, inject.ReasonNotSet, nil, "{}"},
		{outcome.CodeCredentialInvalid, inject.ReasonMalformed, nil, "{}"},
	} {
		r := b.Do(t.Context(), post(fmt.Sprintf("x%d.example.test", i), "/", tc.body, tc.fields...))
		f := facts(r)
		if f.Code != tc.code || f.Phase != outcome.CredentialInjection || f.Outcome != outcome.NotAttempted || r.Record.Refusal.Reason != tc.reason {
			t.Errorf("%d: %+v %+v", i, f, r.Record.Refusal)
		}
		answer := readBody(t, r)
		if strings.Contains(answer, "secret-name-of-it") || strings.Contains(answer, "CANARY") {
			t.Errorf("%d: the caller is told: %s", i, answer)
		}
	}
	for _, bad := range []struct{ fields []string }{{[]string{"Content-Type", "application/json", "Content-Encoding", "gzip"}}, {nil}} {
		if r := b.Do(t.Context(), post("x1.example.test", "/", "{}", bad.fields...)); facts(r).Code != outcome.CodeInjectionUnsupported {
			t.Errorf("%v: %+v", bad.fields, facts(r))
		}
	}
	for _, body := range []string{"", "[]", `{"k":1,"k":2}`, `{"k":`, `"k"`} {
		if r := b.Do(t.Context(), post("x1.example.test", "/", body, "Content-Type", "application/json")); facts(r).Code != outcome.CodeInjectionUnsupported {
			t.Errorf("%q: %+v", body, facts(r))
		}
	}
	if b.tr.tries != 0 {
		t.Errorf("%d connections", b.tr.tries)
	}
	if !strings.Contains(log.String(), `"credential":"secret-name-of-it"`) || !strings.Contains(b.recorded(t), `"credential":"secret-name-of-it"`) {
		t.Error("the operator is not told which credential it was")
	}
	if strings.Contains(log.String(), "CANARY") || strings.Contains(b.recorded(t), "CANARY") {
		t.Error("a secret, or its place, is in the records")
	}
}

// TestRejectedPlaceholders: caller_value: reject holds for parameters, cookies and
// members, too (B1).
func TestRejectedPlaceholders(t *testing.T) {
	contract.Covers(t, "B1", "B2")
	b, _ := credentialBench(t, []inject.Credential{{ID: "s", Source: fixedSource("CANARY-rejecting")}}, func(r *routes.Route) { r.RejectManaged, r.PassAuthorization = true, true },
		[]routes.Injection{{Kind: routes.InjectQuery, Name: "key", Value: "${secret}", Credential: "s"}},
		[]routes.Injection{{Kind: routes.InjectCookie, Name: "sid", Value: "${secret}", Credential: "s"}},
		[]routes.Injection{{Kind: routes.InjectBody, Name: "/k", Value: "${secret}", Credential: "s"}})
	for i, tc := range []struct{ query, cookie, body, field string }{
		{"a=1&ke%79=x", "", "{}", "request.target.query"}, {"", "own=1;sid=x", "{}", "request.headers.cookie"}, {"", "", `{"k":"x"}`, "request.body"},
	} {
		send := func(query, cookie, body string) *Reply {
			s := post(fmt.Sprintf("x%d.example.test", i), "/", body, "Content-Type", "application/json")
			if cookie != "" {
				s.Header.Set("Cookie", cookie)
			}
			s.RawQuery, s.HasQuery = query, query != ""
			return b.Do(t.Context(), s)
		}
		r := send(tc.query, tc.cookie, tc.body)
		if facts(r).Code != outcome.CodeHeaderForbidden || facts(r).Phase != outcome.Validation || r.Record.Refusal.Field != tc.field {
			t.Errorf("%d: %+v %+v", i, facts(r), r.Record.Refusal)
		}
		if r := send("a=1", "own=1", "{}"); r.Status != 200 {
			t.Errorf("%d: without it: %+v", i, r.Envelope)
		}
	}
	if got := b.tr.sent[1].Header.Get("Cookie"); got != "own=1; sid=CANARY-rejecting" {
		t.Errorf("the caller's other cookies: %q", got)
	}
}

// TestShortSecretInParameters: one too short to be looked for is found with its name.
func TestShortSecretInParameters(t *testing.T) {
	contract.Covers(t, "C5")
	b, _ := credentialBench(t, []inject.Credential{{ID: "s", Source: fixedSource("pin123")}}, nil, []routes.Injection{{Kind: routes.InjectQuery, Name: "api_key", Value: "${secret}", Credential: "s"}})
	b.tr.play = answerWith(200, "see /?api_key=pin123&x=1")
	if got := readBody(t, b.Do(t.Context(), post("x0.example.test", "/", "a"))); strings.Contains(got, "pin123") {
		t.Errorf("%q", got)
	}
}
