package journal

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"math"
	"net/http"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"

	"pgregory.net/rapid"

	"waybill/dispatch"
	"waybill/dispatch/httpx"
	"waybill/inject"
	"waybill/internal/contract"
	"waybill/internal/testkit"
	"waybill/outcome"
	"waybill/routes"
)

// sameAsJSON holds what is stored of the events against their JSON, packed. It reports
// whether encoding/json was not needed for it.
func sameAsJSON(t interface{ Fatalf(string, ...any) }, events []dispatch.Event) (direct bool) {
	payload, version, size, err := encodeEvents(events)
	text, jsonErr := json.Marshal(events)
	if (err == nil) != (jsonErr == nil) {
		t.Fatalf("%v, encoding/json: %v", err, jsonErr)
	}
	if err == nil {
		if want, v := packed(text); version != v || size != len(text) || !bytes.Equal(payload, want) {
			t.Fatalf("version %d, text of %d bytes:\n%q\nwant version %d, text of %d bytes:\n%q", version, size, payload, v, len(text), want)
		}
	}
	e := newEncoder()
	defer e.done()
	e.events(events)
	return !e.rare
}

// arbitrary sets v to anything its type can hold. ordinary keeps to what an ordinary request
// has, of kinds and not of texts: otherwise hardly one event in a thousand could be encoded.
func arbitrary(t *rapid.T, v reflect.Value, ordinary bool) {
	switch v.Kind() {
	case reflect.Pointer:
		rare := ordinary && notEncoded[v.Type().Elem()] && rapid.IntRange(0, 50).Draw(t, "rare") > 0
		if rare || rapid.Bool().Draw(t, "nil") {
			return
		}
		v.Set(reflect.New(v.Type().Elem()))
		arbitrary(t, v.Elem(), ordinary)
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[time.Time]() {
			v.Set(reflect.ValueOf(arbitraryTime(ordinary).Draw(t, "time")))
			return
		}
		for i := range v.NumField() {
			arbitrary(t, v.Field(i), ordinary)
		}
	case reflect.Map, reflect.Slice:
		n := rapid.IntRange(-1, 4).Draw(t, "length")
		switch {
		case n < 0: // nil
		case v.Kind() == reflect.Slice:
			v.Set(reflect.MakeSlice(v.Type(), n, n))
			for i := range n {
				arbitrary(t, v.Index(i), ordinary)
			}
		default:
			v.Set(reflect.MakeMap(v.Type()))
			for range n {
				k, e := reflect.New(v.Type().Key()).Elem(), reflect.New(v.Type().Elem()).Elem()
				arbitrary(t, k, ordinary)
				arbitrary(t, e, ordinary)
				v.SetMapIndex(k, e)
			}
		}
	case reflect.String:
		v.SetString(arbitraryText.Draw(t, "text"))
	case reflect.Bool:
		v.SetBool(rapid.Bool().Draw(t, "bool"))
	case reflect.Uint8: // an enumeration
		if ordinary {
			v.SetUint(rapid.Uint64Range(1, 4).Draw(t, "value"))
		} else {
			v.SetUint(rapid.Uint64Range(0, 255).Draw(t, "value"))
		}
	case reflect.Int, reflect.Int64:
		v.SetInt(rapid.OneOf(rapid.SampledFrom([]int64{0, 1, -1, math.MaxInt64, math.MinInt64}), rapid.Int64()).Draw(t, "number"))
	case reflect.Uint64:
		v.SetUint(rapid.Uint64().Draw(t, "number"))
	default:
		t.Fatalf("events have a %s now: say how to make one up", v.Type())
	}
}

var arbitraryText = rapid.OneOf(
	rapid.Just(""), rapid.SampledFrom(packWords[:]), rapid.String(), rapid.StringMatching(`[ -~]{0,40}`), rapid.StringMatching(`sha256:[0-9a-fA-F]{63,65}`),
	rapid.Map(rapid.SliceOf(rapid.Byte()), func(b []byte) string { return string(b) }),
	rapid.SampledFrom([]string{
		"<a href=\"x\">&</a>", "\u2028\u2029\ufffd", "\xff", "caf\xe9", "\xed\xa0\x80", "\x00\x1f\x7f\b\f\n\r\t\\/", "sha256:" + strings.Repeat("0", 64), "sha256:" + strings.Repeat("\xff", 64),
		"2026-11-03T10:20:30Z", "2026-11-03T10:20:30.5Z", "2026-11-03T10:20:30.50Z", "2026-02-30T10:20:30Z", "1699-12-31T23:59:59Z", "2201-01-01T00:00:00Z", "2026-11-03T10:20:30.123456789Z", "\u00e92026-11-0T10:20:30Z",
	}),
)

func arbitraryTime(ordinary bool) *rapid.Generator[time.Time] {
	often := rapid.OneOf(
		rapid.Custom(func(t *rapid.T) time.Time {
			return time.Unix(rapid.Int64Range(-8520336000, 7289654399).Draw(t, "s"), rapid.OneOf(rapid.Int64Range(0, 999_999_999), rapid.Map(rapid.Int64Range(0, 999), func(ms int64) int64 { return ms * 1e6 })).Draw(t, "ns")).UTC()
		}),
		rapid.SampledFrom([]time.Time{time.Date(1700, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(2200, 12, 31, 23, 59, 59, 999_999_999, time.UTC), time.Unix(0, 0).UTC()}),
	)
	if ordinary {
		return often
	}
	return rapid.OneOf(often, rapid.SampledFrom([]time.Time{
		{}, time.Time{}.Local(), time.Now(), time.Date(1699, 12, 31, 23, 59, 59, 999_999_999, time.UTC), time.Date(2201, 1, 1, 0, 0, 0, 0, time.UTC),
		time.Date(2026, 11, 3, 10, 20, 30, 5000, time.FixedZone("", 3600)), time.Date(2026, 11, 3, 10, 20, 30, 0, time.FixedZone("", 25*3600)), time.Date(2026, 11, 3, 10, 20, 30, 0, time.FixedZone("UTC", 0)),
		time.Date(9999, 12, 31, 23, 59, 59, 0, time.UTC), time.Date(10000, 1, 1, 0, 0, 0, 0, time.UTC), time.Date(-1, 1, 1, 0, 0, 0, 0, time.UTC), time.Unix(1<<40, 0), time.Unix(-1<<40, 0),
	}))
}

// arbitraryEvents compares, as they come and as they are copied. It reports whether the
// copy was encoded directly.
func arbitraryEvents(t *rapid.T) (direct bool) {
	ordinary := rapid.IntRange(0, 3).Draw(t, "ordinary") > 0
	events := make([]dispatch.Event, rapid.IntRange(1, 3).Draw(t, "events"))
	for i := range events {
		arbitrary(t, reflect.ValueOf(&events[i]).Elem(), ordinary)
	}
	sameAsJSON(t, events)
	before := jsonOf(events)
	out, err := copied(events)
	if err != nil {
		return false
	}
	for i := range events {
		if s := shared(reflect.ValueOf(events[i]), reflect.ValueOf(out[i]), ""); s != "" {
			t.Fatalf("the copy shares %s with the caller", s)
		}
	}
	if jsonOf(events) != before {
		t.Fatalf("the caller's events were changed")
	}
	return sameAsJSON(t, out)
}

// What is stored is what encoding/json would have made of it, whatever the events are.
func TestEncodeSame(t *testing.T) {
	contract.Covers(t, "M1")
	direct, all := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		all++
		if arbitraryEvents(t) {
			direct++
		}
	})
	t.Logf("%d of %d without encoding/json", direct, all)
	if all >= 100 && direct < all/10 {
		t.Errorf("%d of %d batches without encoding/json: the test looks at little", direct, all)
	}
}

func FuzzEncodeSame(f *testing.F) {
	f.Fuzz(rapid.MakeFuzz(func(t *rapid.T) { arbitraryEvents(t) }))
}

// encodedFields are the fields that encode.go writes, of every type that it writes: whoever
// adds one here has taught it to encode.go, or to cloneEvent at least.
var encodedFields = map[reflect.Type]string{
	reflect.TypeFor[dispatch.Event]():      "Type Attempt At Accepted Bound Credential Ended Dispatch Sent Response Result Tunnel Boot Session Lease Resolution Job Items Approval Decision",
	reflect.TypeFor[dispatch.Accepted]():   "Caller RequestID Method Target Protocol Relaxed Link",
	reflect.TypeFor[dispatch.Link]():       "Kind Of",
	reflect.TypeFor[dispatch.Bound]():      "Route Snapshot Fingerprint Repeatable BodyBytes Key Budget Conditional Recall Approval",
	reflect.TypeFor[dispatch.Key]():        "Key In Scope Maker ExpiresAt Source Reviewed Replaces",
	reflect.TypeFor[dispatch.Budget]():     "Attempts Until Background",
	reflect.TypeFor[dispatch.Recall]():     "Values CallerName Marker Items Rule",
	reflect.TypeFor[dispatch.Credential](): "ID Version Mode",
	reflect.TypeFor[dispatch.Ended]():      "Facts Stage Reason Field Followed Route Credential EarlierAction Peer Source Proof StatusLine Hop HopStatus ProxyStatus RetryAfter Speaks",
	reflect.TypeFor[outcome.Facts]():       "Phase Outcome Retry Code",
	reflect.TypeFor[outcome.Peer]():        "Address ServerName Protocol TLSVersion LeafDigest ChainDigest HostKey Proxy",
	reflect.TypeFor[dispatch.Dispatch]():   "Connection Reused Stage Peer Unresolved Generation Until Credential Approved",
	reflect.TypeFor[dispatch.Sent]():       "Headers Complete",
	reflect.TypeFor[dispatch.Response]():   "Status Bytes ExpectedBytes Framing Digest Redacted Hop ProxyStatus Exec",
	reflect.TypeFor[dispatch.Result]():     "Status Header Trailer Bytes Chunks Digest RedirectTo RedirectFrom ExpiresAt Exec",
	reflect.TypeFor[dispatch.TunnelInfo](): "Authority BytesOut BytesIn Redacted Blocked",
	reflect.TypeFor[dispatch.Lease]():      "Generation Process For Until",
	reflect.TypeFor[manifest]():            "Bytes Chunks Digest Expires Dropped",
}

// notEncoded are the types of which encoding/json makes the text.
var notEncoded = map[reflect.Type]bool{
	reflect.TypeFor[dispatch.Boot](): true, reflect.TypeFor[dispatch.Session](): true, reflect.TypeFor[dispatch.Resolution](): true, reflect.TypeFor[dispatch.Job](): true,
	reflect.TypeFor[dispatch.Items](): true, reflect.TypeFor[dispatch.Approval](): true, reflect.TypeFor[dispatch.Decision](): true, reflect.TypeFor[dispatch.ItemList](): true,
	reflect.TypeFor[dispatch.ExecEnd](): true,
}

// No field of an event is forgotten: each, set alone, is in what is stored, and of the
// types that encode.go writes without encoding/json.
func TestEncodeFields(t *testing.T) {
	t.Parallel()
	contract.Covers(t, "M1")
	for typ, want := range encodedFields {
		var got []string
		for i := range typ.NumField() {
			got = append(got, typ.Field(i).Name)
		}
		if s := strings.Join(got, " "); s != want {
			t.Errorf("%s has the fields\n%s, encode.go knows\n%s", typ, s, want)
		}
	}
	// least is the least that can be encoded: times and enumerations have no zero. at is
	// the place of a pointer to follow, from the event on.
	ordinary := time.Date(2026, 11, 3, 10, 20, 30, 0, time.UTC)
	var least func(v reflect.Value, at time.Time)
	least = func(v reflect.Value, at time.Time) {
		switch {
		case v.Type() == reflect.TypeFor[time.Time]():
			v.Set(reflect.ValueOf(at))
		case v.Kind() == reflect.Uint8:
			v.SetUint(1)
		case v.Kind() == reflect.Struct:
			for i := range v.NumField() {
				least(v.Field(i), at)
			}
		}
	}
	leaves := 0
	// visit sets one field after the other of the struct that build returns a new event with.
	var visit func(path string, typ reflect.Type, rare bool, build func(at time.Time) (ev *dispatch.Event, in reflect.Value))
	visit = func(path string, typ reflect.Type, rare bool, build func(time.Time) (*dispatch.Event, reflect.Value)) {
		check := func(path string, rare bool, set func(in reflect.Value)) {
			for _, at := range []time.Time{ordinary, {}} {
				ev, in := build(at)
				set(in)
				direct := sameAsJSON(t, []dispatch.Event{*ev})
				if !at.IsZero() && direct == rare {
					t.Errorf("%s: encoded directly: %t", path, direct)
				}
			}
			leaves++
		}
		check(path, rare, func(reflect.Value) {})
		for i := range typ.NumField() {
			f := typ.Field(i)
			path, at := path+"."+f.Name, func(in reflect.Value) reflect.Value { return in.Field(i) }
			switch {
			case f.Type == reflect.TypeFor[time.Time]():
				check(path, rare, func(in reflect.Value) { at(in).Set(reflect.ValueOf(ordinary.Add(time.Microsecond))) })
			case f.Type.Kind() == reflect.Struct:
				visit(path, f.Type, rare, func(t time.Time) (*dispatch.Event, reflect.Value) { ev, in := build(t); return ev, at(in) })
			case f.Type.Kind() == reflect.Pointer && f.Type.Elem().Kind() == reflect.Struct:
				elem := f.Type.Elem()
				rare := rare || notEncoded[elem]
				if _, listed := encodedFields[elem]; listed == notEncoded[elem] && !rare {
					t.Errorf("%s is a %s: does encode.go write it?", path, elem)
				}
				visit(path, elem, rare, func(t time.Time) (*dispatch.Event, reflect.Value) {
					ev, in := build(t)
					p := at(in)
					p.Set(reflect.New(elem))
					least(p.Elem(), t)
					return ev, p.Elem()
				})
			default:
				n := 1 // an enumeration becomes 2
				check(path, rare, func(in reflect.Value) { fill(at(in), &n); n = 1 })
				if f.Type.Kind() == reflect.Uint8 {
					check(path, rare, func(in reflect.Value) { at(in).SetUint(2) })
				}
			}
		}
	}
	visit("Event", reflect.TypeFor[dispatch.Event](), false, func(at time.Time) (*dispatch.Event, reflect.Value) {
		ev := &dispatch.Event{}
		v := reflect.ValueOf(ev).Elem()
		least(v, at)
		return ev, v
	})
	t.Logf("%d cases", leaves)
}

// What a request can have, and seldom has.
func TestEncodeRare(t *testing.T) {
	t.Parallel()
	at := time.Date(2026, 11, 3, 10, 20, 30, 5000, time.UTC)
	result := func(values ...string) []dispatch.Event {
		return []dispatch.Event{{Type: dispatch.ResultCommitted, At: at, Result: &dispatch.Result{Header: map[string][]string{"Server": values, "Etag": {}, "Vary": nil}, Trailer: map[string][]string{}}}}
	}
	for name, c := range map[string]struct {
		events []dispatch.Event
		direct bool
	}{
		"fields without a value": {result(), true},
		"UTF-8":                  {result("caf\u00e9", "<\u2028>"), true},
		"obs-text":               {result("good", "caf\xe9"), false},
		"obs-text in a target":   {[]dispatch.Event{{Type: dispatch.ActionAccepted, At: at, Accepted: &dispatch.Accepted{Target: "caf\xe9"}}}, true},
		"another zone":           {[]dispatch.Event{{Type: dispatch.DeliveryFailed, At: at.In(time.FixedZone("", 3600))}}, false},
		"no time":                {[]dispatch.Event{{Type: dispatch.DeliveryFailed}}, false},
		"one rare, one not":      {[]dispatch.Event{{Type: dispatch.DeliveryFailed, At: at}, {Type: dispatch.JobEnded, At: at, Job: &dispatch.Job{}}}, false},
	} {
		if direct := sameAsJSON(t, c.events); direct != c.direct {
			t.Errorf("%s: encoded directly: %t", name, direct)
		}
	}
}

// Copied fields are as they were, and what is appended to one is not in another.
func TestCloneFields(t *testing.T) {
	t.Parallel()
	in := map[string][]string{"A": {}, "B": nil, "C": {"1", "2"}, "D": {"3"}, "E": {"4"}}
	out := cloneFields(in)
	if !reflect.DeepEqual(in, out) {
		t.Errorf("%#v became %#v", in, out)
	}
	for k := range out {
		_ = append(out[k], "x")
	}
	if !reflect.DeepEqual(in, out) {
		t.Errorf("%#v became %#v", in, out)
	}
}

// Every value of an enumeration, and every one that is none.
func TestEncodeEnums(t *testing.T) {
	t.Parallel()
	for i := range 256 {
		at := time.Unix(1, 0).UTC()
		for _, f := range []outcome.Facts{
			{Phase: outcome.Phase(i), Outcome: 1, Retry: 1, Code: 1}, {Phase: 1, Outcome: outcome.Outcome(i), Retry: 1, Code: 1},
			{Phase: 1, Outcome: 1, Retry: outcome.Retry(i), Code: 1}, {Phase: 1, Outcome: 1, Retry: 1, Code: outcome.Code(i)}, {Code: outcome.Code(i)},
		} {
			sameAsJSON(t, []dispatch.Event{{Type: dispatch.AttemptResolved, At: at, Ended: &dispatch.Ended{Facts: f}}})
			_, want := json.Marshal(f)
			if err := validFacts(f); (err == nil) != (want == nil) {
				t.Errorf("%+v: %v, encoding/json: %v", f, err, want)
			}
		}
		sameAsJSON(t, []dispatch.Event{{Type: dispatch.EventType(i), At: at}})
		sameAsJSON(t, []dispatch.Event{{Type: dispatch.DispatchStarted, At: at, Dispatch: &dispatch.Dispatch{Unresolved: outcome.Retry(i)}}})
	}
}

// Texts with every character there is, and every byte at every place of a short text.
func TestEncodeStrings(t *testing.T) {
	t.Parallel()
	check := func(s string) {
		text, err := json.Marshal(s)
		if err != nil {
			t.Fatal(err)
		}
		if got := appendJSONString(nil, s); !bytes.Equal(got, text) {
			t.Fatalf("%q became %s, want %s", s, got, text)
		}
		e := newEncoder()
		defer e.done()
		e.string(s)
		if want, _ := packed(text); !bytes.Equal(e.out, want) || e.text != len(text) {
			t.Fatalf("%q is stored as %q, %d bytes of text, want %q, %d", s, e.out, e.text, want, len(text))
		}
	}
	for r := rune(0); r <= utf8.MaxRune; r++ {
		if r > 0x3000 && r < 0xd700 || r > 0x10100 && r < 0x10ff00 {
			continue // nothing is written differently from there to there
		}
		check("a" + string(r) + "b")
	}
	for c := range 256 {
		for _, s := range []string{"", "x", "\u00e9", "\u2028", "\xe2\x80"} {
			check(s + string([]byte{byte(c)}))
			check(string([]byte{byte(c)}) + s)
			check(s + string([]byte{byte(c)}) + s)
		}
	}
	for _, w := range packWords {
		check(w)
		check(w + " ")
	}
}

func TestEncodeManifest(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var m manifest
		arbitrary(t, reflect.ValueOf(&m).Elem(), true)
		text, err := json.Marshal(&m)
		if err != nil {
			t.Fatal(err)
		}
		payload, version := packed(text)
		if got, want := encodeManifest(&m), append([]byte{version}, payload...); !bytes.Equal(got, want) {
			t.Fatalf("%q, want %q", got, want)
		}
	})
}

// batches is a journal that keeps what it is given.
type batches struct {
	*Journal
	mu  sync.Mutex
	all [][]dispatch.Event
}

func (b *batches) Append(ctx context.Context, batch dispatch.Batch) (dispatch.Receipt, error) {
	if len(batch.Events) > 0 {
		out, err := copied(batch.Events)
		if err != nil {
			return dispatch.Receipt{}, err
		}
		b.mu.Lock()
		b.all = append(b.all, out)
		b.mu.Unlock()
	}
	return b.Journal.Append(ctx, batch)
}

// What the pipeline makes of ordinary requests is encoded without encoding/json: of all
// kinds of events that they have.
func TestEncodePipeline(t *testing.T) {
	contract.Covers(t, "M1")
	store := &batches{Journal: openTest(t, tempDir(t), nil)}
	pki := testkit.NewCA(t)
	up := testkit.NewUpstream(t, testkit.UpstreamConfig{TLS: pki.Server("pay.example.test"), Handler: func(a testkit.Arrival) []testkit.Step {
		switch a.Target {
		case "/v1/cut":
			return []testkit.Step{testkit.Write("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf"), testkit.Close()}
		case "/v1/nothing":
			return []testkit.Step{testkit.Close()}
		}
		return []testkit.Step{testkit.Reply(201, `{"id":"ch"}`, "Content-Type", "application/json", "ETag", `"a<b"`, "Link", "<https://pay.example.test/v1/charges?a=1&b=2>; rel=next",
			"Set-Cookie", "a=1", "Set-Cookie", "b=2", "Retry-After", "3")}
	}})
	secret := testkit.NewCanary(t)
	creds, err := inject.NewStore([]inject.Credential{{ID: "key", Label: "1", Source: inject.FileSource(secret.File(t))}})
	if err != nil {
		t.Fatal(err)
	}
	route := func(name, host, addr string) routes.Route {
		return routes.Route{
			Name: name, Match: routes.Match{Hosts: []string{host}, Paths: []string{"/v1/**"}},
			Inject:   []routes.Injection{{Header: "Authorization", Value: "Bearer ${secret}", Credential: "key"}},
			Upstream: routes.Upstream{RootsPEM: pki.PEM(), RootsOnly: true, Resolve: map[string]string{host: addr}},
		}
	}
	pay := route("pay", "pay.example.test", up.Addr())
	pay.Contract.Idempotency = &routes.Idempotency{
		Header: "Idempotency-Key", Retention: time.Hour, Promises: routes.KeyPromises(), Source: "https://docs.example.test/keys", Reviewed: "2026-01-01",
	}
	snap, err := routes.NewSnapshot([]routes.Route{pay, route("gone", "gone.example.test", "127.0.0.1:1")}, routes.Deny, nil)
	if err != nil {
		t.Fatal(err)
	}
	tr := httpx.New(httpx.Config{})
	defer tr.Close()
	p := dispatch.New(dispatch.Config{Journal: store, Transport: tr, Binding: &dispatch.Binding{Snapshot: snap, Credentials: creds}})
	var handedOver error
	do := func(method, host, path, body string, fields ...string) {
		s := &dispatch.Submission{
			Caller: dispatch.Caller{ID: "local"}, Method: method, Scheme: "https", Protocol: "HTTP/1.1", RawPath: path, Header: http.Header{}, RequestID: "r-" + method + path,
			Authorities: dispatch.Authorities{Connect: host + ":443", SNI: host, Host: host},
		}
		if body != "" {
			s.Body, s.ContentLength = strings.NewReader(body), int64(len(body))
		}
		for i := 0; i+1 < len(fields); i += 2 {
			s.Header.Set(fields[i], fields[i+1])
		}
		r := p.Do(t.Context(), s)
		if r.Body != nil {
			_, _ = io.Copy(io.Discard, r.Body)
			_ = r.Body.Close()
		}
		r.HandedOver(handedOver)
		t.Logf("%s %s%s: %d %+v", method, host, path, r.Status, r.Record.Facts)
	}
	do("POST", "pay.example.test", "/v1/charges", "amount=5")
	do("POST", "pay.example.test", "/v1/charges/2", "amount=6", "Idempotency-Key", "k-1")
	do("GET", "pay.example.test", "/v1/charges/1", "")
	do("POST", "pay.example.test", "/v1/cut", "amount=7")
	do("POST", "pay.example.test", "/v1/nothing", "amount=8")
	do("GET", "gone.example.test", "/v1/x", "")
	do("GET", "other.example.test", "/v1/x", "")
	handedOver = io.ErrClosedPipe
	do("GET", "pay.example.test", "/v1/charges/3", "")
	if err := p.Drain(t.Context()); err != nil {
		t.Fatal(err)
	}
	store.mu.Lock()
	defer store.mu.Unlock()
	seen := make(map[dispatch.EventType]int)
	for _, events := range store.all {
		for i := range events {
			seen[events[i].Type]++
		}
		if !sameAsJSON(t, events) {
			t.Errorf("took the long way: %s", jsonOf(events))
		}
	}
	for _, typ := range []dispatch.EventType{
		dispatch.ActionAccepted, dispatch.PreflightValidated, dispatch.CredentialAuthorized, dispatch.AttemptFailed, dispatch.ActionRefused, dispatch.DispatchStarted,
		dispatch.RequestSent, dispatch.ResponseStarted, dispatch.ResponseComplete, dispatch.ResultCommitted, dispatch.AttemptResolved, dispatch.DeliveryFailed,
	} {
		if seen[typ] == 0 {
			t.Errorf("no %s was seen", typ)
		}
	}
	first, second := usual()
	if !sameAsJSON(t, first) || !sameAsJSON(t, second) {
		t.Error("the benchmark's batches took the long way")
	}
}

// usual are the batches of the two appends of one request, as the pipeline makes them
// (TestEncodePipeline).
func usual() (toDispatch, toResult []dispatch.Event) {
	digest := func(s string) string { return "sha256:" + strings.Repeat(s, 32) }
	at := time.Date(2026, 11, 3, 10, 20, 30, 123456789, time.UTC)
	length := int64(1024)
	resp := dispatch.Response{Status: 200, Bytes: 1024, ExpectedBytes: &length, Framing: "content_length"}
	whole := resp
	whole.Digest = digest("3f")
	toDispatch = []dispatch.Event{
		{Type: dispatch.ActionAccepted, At: at, Accepted: &dispatch.Accepted{Caller: "local", RequestID: "order-4711-1", Method: "POST", Target: "https://pay.example.test/v1/charges", Protocol: "HTTP/1.1"}},
		{Type: dispatch.PreflightValidated, At: at, Bound: &dispatch.Bound{Route: "pay", Snapshot: digest("ab"), Fingerprint: digest("0c"), BodyBytes: 312}},
		{Type: dispatch.CredentialAuthorized, At: at, Credential: &dispatch.Credential{ID: "pay-key", Version: "2026-11", Mode: "header:bearer"}},
		{Type: dispatch.DispatchStarted, Attempt: 1, At: at, Dispatch: &dispatch.Dispatch{
			Connection: "c1f", Reused: true, Stage: outcome.StageTLSHandshake, Unresolved: outcome.Reconcile,
			Peer: &outcome.Peer{Address: "192.0.2.1:443", ServerName: "pay.example.test", Protocol: "h2", TLSVersion: "TLS 1.3", LeafDigest: digest("5e"), ChainDigest: digest("77")},
		}},
	}
	toResult = []dispatch.Event{
		{Type: dispatch.RequestSent, Attempt: 1, At: at, Sent: &dispatch.Sent{Headers: true, Complete: true}},
		{Type: dispatch.ResponseStarted, Attempt: 1, At: at, Response: &resp},
		{Type: dispatch.ResponseComplete, Attempt: 1, At: at, Response: &whole},
		{Type: dispatch.ResultCommitted, Attempt: 1, At: at, Ended: &dispatch.Ended{Facts: committed, Source: outcome.RemoteResponse}, Result: &dispatch.Result{
			Status: 200, Bytes: 1024, Chunks: 1, Digest: whole.Digest, ExpiresAt: at.Add(72 * time.Hour),
			Header: map[string][]string{
				"Content-Type": {"application/json"}, "Content-Length": {"1024"}, "Date": {"Tue, 03 Nov 2026 10:20:30 GMT"},
				"Server": {"nginx"}, "Cache-Control": {"no-store"}, "X-Request-Id": {"req_8fb0c2e19a"}, "Vary": {"Accept-Encoding"},
			},
		}},
	}
	return toDispatch, toResult
}

// BenchmarkPrepare is what the copying and encoding of one request costs: two appends.
// json is the way that rarer events take.
func BenchmarkPrepare(b *testing.B) {
	first, second := usual()
	for _, way := range []struct {
		name   string
		encode func([]dispatch.Event) error
	}{
		{"direct", func(events []dispatch.Event) error { _, _, _, err := encodeEvents(events); return err }},
		{"json", func(events []dispatch.Event) error {
			text, err := marshalEvents(events)
			packed(text)
			return err
		}},
	} {
		b.Run(way.name, func(b *testing.B) {
			b.ReportAllocs()
			for b.Loop() {
				for _, events := range [2][]dispatch.Event{first, second} {
					out, err := copied(events)
					if err != nil {
						b.Fatal(err)
					}
					if err := way.encode(out); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
	}
}

// BenchmarkCopied is the copying alone.
func BenchmarkCopied(b *testing.B) {
	first, second := usual()
	b.ReportAllocs()
	for b.Loop() {
		for _, events := range [2][]dispatch.Event{first, second} {
			if _, err := copied(events); err != nil {
				b.Fatal(err)
			}
		}
	}
}
