package outcome_test

import (
	"encoding/json"
	"encoding/xml"
	"errors"
	"fmt"
	"math"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"waybill/internal/contract"
	"waybill/outcome"
)

func TestDialectNames(t *testing.T) {
	contract.Covers(t, "A8", "L9")
	want := []string{
		"default", "openai", "anthropic", "google", "stripe", "github", "git", "slack", "discord", "graphql", "notion", "huggingface", "square",
		"kubernetes", "aws-json", "aws-query", "aws-ec2", "aws-rest-xml", "aws-rest-json",
	}
	all := outcome.Dialects()
	if got := names(all); !slices.Equal(got, want) {
		t.Fatalf("%q, want %q", got, want)
	}
	if all[0] != 0 || outcome.DialectDefault != 0 {
		t.Error("the zero value is not the default")
	}
	for _, d := range all {
		b, err := d.MarshalText()
		var back outcome.Dialect
		if err != nil || back.UnmarshalText(b) != nil || back != d || string(b) != d.String() || !d.Valid() {
			t.Errorf("%d: %q, %v, back %d", d, b, err, back)
		}
	}
	for i := len(all); i <= math.MaxUint8; i++ {
		d := outcome.Dialect(i)
		if b, err := d.MarshalText(); !errors.Is(err, outcome.ErrUnknownValue) || d.Valid() || d.String() != fmt.Sprintf("invalid(%d)", i) {
			t.Fatalf("%d: %q, %v, %s", i, b, err, d)
		}
	}
	for _, text := range []string{"", "Default", "OpenAI", "aws", " slack", "invalid(1)", "0", "aws_json"} {
		var d outcome.Dialect
		if err := d.UnmarshalText([]byte(text)); !errors.Is(err, outcome.ErrUnknownValue) {
			t.Errorf("%q is %s, %v", text, d, err)
		}
	}
	// The page for people names them all, and no other.
	page, err := os.ReadFile("../docs/dialects.md")
	if err != nil {
		t.Fatal(err)
	}
	var told []string
	for _, m := range regexp.MustCompile("(?m)^\\| `([a-z0-9-]+)`").FindAllStringSubmatch(string(page), -1) {
		told = append(told, m[1])
	}
	if !slices.Equal(told, want) {
		t.Errorf("docs/dialects.md names %q", told)
	}
}

// factsOf are the facts of a code, with the advice given where its row has several.
func factsOf(t testing.TB, c outcome.Code, r outcome.Retry) outcome.Facts {
	t.Helper()
	for _, f := range outcome.Lookup(c).Facts() {
		if f.Retry == r {
			return f
		}
	}
	t.Fatalf("%s never has the advice %s", c, r)
	return outcome.Facts{}
}

// TestDialectForms is the answer of each family word for word, for one failure of each way.
func TestDialectForms(t *testing.T) {
	contract.Covers(t, "L8", "L9")
	const (
		denied  = "Not sent: correct the request, then send it again. No route matches."
		refused = "Not sent: wait, then send it again. The destination refused the connection."
		unknown = `Outcome unknown: do not repeat; reconcile ` + anID + `. No "answer" <came> & went.`
	)
	inJSON, inXML := strings.ReplaceAll(unknown, `"`, `\"`), strings.NewReplacer(`"`, "&#34;", "<", "&lt;", ">", "&gt;", "&", "&amp;").Replace(unknown)
	const head = `<?xml version="1.0" encoding="UTF-8"?>` + "\n"
	const js, text, amz, txml, axml = "application/json", "text/plain; charset=utf-8", "application/x-amz-json-1.0", "text/xml; charset=utf-8", "application/xml"
	type form struct {
		status int
		body   string
	}
	for _, c := range []struct {
		dialect                 outcome.Dialect
		media                   string
		settled, wait, unknowns form
	}{
		{
			outcome.DialectOpenAI, js,
			form{403, `{"error":{"message":"` + denied + `","type":"invalid_request_error","code":"ROUTE_NOT_FOUND","param":null}}`},
			form{429, `{"error":{"message":"` + refused + `","type":"rate_limit_error","code":"CONNECTION_REFUSED","param":null}}`},
			form{424, `{"error":{"message":"` + inJSON + `","type":"invalid_request_error","code":"REMOTE_TIMEOUT","param":null}}`},
		},
		{
			outcome.DialectAnthropic, js,
			form{403, `{"type":"error","error":{"type":"permission_error","message":"` + denied + `"},"request_id":"` + anID + `"}`},
			form{429, `{"type":"error","error":{"type":"rate_limit_error","message":"` + refused + `"},"request_id":"` + anID + `"}`},
			form{424, `{"type":"error","error":{"type":"invalid_request_error","message":"` + inJSON + `"},"request_id":"` + anID + `"}`},
		},
		{
			outcome.DialectGoogle, js,
			form{403, `{"error":{"code":403,"message":"` + denied + `","status":"PERMISSION_DENIED","details":[{"@type":"type.googleapis.com/google.rpc.ErrorInfo","reason":"ROUTE_NOT_FOUND","domain":"waybill"}]}}`},
			form{429, `{"error":{"code":429,"message":"` + refused + `","status":"RESOURCE_EXHAUSTED","details":[{"@type":"type.googleapis.com/google.rpc.ErrorInfo","reason":"CONNECTION_REFUSED","domain":"waybill"},{"@type":"type.googleapis.com/google.rpc.RetryInfo","retryDelay":"3s"}]}}`},
			form{424, `{"error":{"code":424,"message":"` + inJSON + `","status":"FAILED_PRECONDITION","details":[{"@type":"type.googleapis.com/google.rpc.ErrorInfo","reason":"REMOTE_TIMEOUT","domain":"waybill"}]}}`},
		},
		{
			outcome.DialectStripe, js,
			form{403, `{"error":{"type":"invalid_request_error","code":"ROUTE_NOT_FOUND","message":"` + denied + `"}}`},
			form{503, `{"error":{"type":"api_error","code":"CONNECTION_REFUSED","message":"` + refused + `"}}`},
			form{424, `{"error":{"type":"api_error","code":"REMOTE_TIMEOUT","message":"` + inJSON + `"}}`},
		},
		{
			outcome.DialectGitHub, js,
			form{403, `{"message":"` + denied + `","documentation_url":"http://waybill.internal/v1/actions/` + anID + `"}`},
			form{429, `{"message":"` + refused + `","documentation_url":"http://waybill.internal/v1/actions/` + anID + `"}`},
			form{422, `{"message":"` + inJSON + `","documentation_url":"http://waybill.internal/v1/actions/` + anID + `"}`},
		},
		{
			outcome.DialectGit, text,
			form{403, denied + "\nROUTE_NOT_FOUND " + anID},
			form{503, refused + "\nCONNECTION_REFUSED " + anID},
			form{424, unknown + "\nREMOTE_TIMEOUT " + anID},
		},
		{
			outcome.DialectSlack, js,
			form{200, `{"ok":false,"error":"ROUTE_NOT_FOUND","response_metadata":{"messages":["[ERROR] ` + denied + `"]}}`},
			form{429, `{"ok":false,"error":"ratelimited","response_metadata":{"messages":["[ERROR] ` + refused + `"]}}`},
			form{200, `{"ok":false,"error":"REMOTE_TIMEOUT","response_metadata":{"messages":["[ERROR] ` + inJSON + `"]}}`},
		},
		{
			outcome.DialectDiscord, js,
			form{403, `{"code":0,"message":"` + denied + `"}`},
			form{429, `{"message":"` + refused + `","retry_after":3,"global":false}`},
			form{424, `{"code":0,"message":"` + inJSON + `"}`},
		},
		{
			outcome.DialectGraphQL, js,
			form{200, `{"data":null,"errors":[{"message":"` + denied + `","extensions":{"code":"ROUTE_NOT_FOUND"}}]}`},
			form{429, `{"data":null,"errors":[{"message":"` + refused + `","extensions":{"code":"CONNECTION_REFUSED"}}]}`},
			form{200, `{"data":null,"errors":[{"message":"` + inJSON + `","extensions":{"code":"REMOTE_TIMEOUT"}}]}`},
		},
		{
			outcome.DialectNotion, js,
			form{403, `{"object":"error","status":403,"code":"restricted_resource","message":"` + denied + `","request_id":"` + anID + `"}`},
			form{429, `{"object":"error","status":429,"code":"rate_limited","message":"` + refused + `","request_id":"` + anID + `"}`},
			form{424, `{"object":"error","status":424,"code":"validation_error","message":"` + inJSON + `","request_id":"` + anID + `"}`},
		},
		{
			outcome.DialectHuggingFace, js,
			form{403, `{"error":"` + denied + `"}`},
			form{429, `{"error":"` + refused + `"}`},
			form{424, `{"error":"` + inJSON + `"}`},
		},
		{
			outcome.DialectSquare, js,
			form{403, `{"errors":[{"category":"INVALID_REQUEST_ERROR","code":"ROUTE_NOT_FOUND","detail":"` + denied + `"}]}`},
			form{429, `{"errors":[{"category":"RATE_LIMIT_ERROR","code":"RATE_LIMITED","detail":"` + refused + `"}]}`},
			form{424, `{"errors":[{"category":"INVALID_REQUEST_ERROR","code":"REMOTE_TIMEOUT","detail":"` + inJSON + `"}]}`},
		},
		{
			outcome.DialectKubernetes, js,
			form{403, `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"` + denied + `","reason":"RouteNotFound","code":403}`},
			form{429, `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"` + refused + `","reason":"TooManyRequests","details":{"retryAfterSeconds":3},"code":429}`},
			form{424, `{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"` + inJSON + `","reason":"RemoteTimeout","code":424}`},
		},
		{
			outcome.DialectAWSJSON, amz,
			form{403, `{"__type":"waybill#RouteNotFound","message":"` + denied + `"}`},
			form{503, `{"__type":"waybill#ConnectionRefused","message":"` + refused + `"}`},
			form{400, `{"__type":"waybill#RemoteTimeout","message":"` + inJSON + `"}`},
		},
		{
			outcome.DialectAWSQuery, txml,
			form{403, head + `<ErrorResponse><Error><Type>Sender</Type><Code>RouteNotFound</Code><Message>` + denied + `</Message></Error><RequestId>` + anID + `</RequestId></ErrorResponse>`},
			form{503, head + `<ErrorResponse><Error><Type>Receiver</Type><Code>ConnectionRefused</Code><Message>` + refused + `</Message></Error><RequestId>` + anID + `</RequestId></ErrorResponse>`},
			form{400, head + `<ErrorResponse><Error><Type>Sender</Type><Code>RemoteTimeout</Code><Message>` + inXML + `</Message></Error><RequestId>` + anID + `</RequestId></ErrorResponse>`},
		},
		{
			outcome.DialectAWSEC2, txml,
			form{403, head + `<Response><Errors><Error><Code>RouteNotFound</Code><Message>` + denied + `</Message></Error></Errors><RequestID>` + anID + `</RequestID></Response>`},
			form{503, head + `<Response><Errors><Error><Code>ConnectionRefused</Code><Message>` + refused + `</Message></Error></Errors><RequestID>` + anID + `</RequestID></Response>`},
			form{400, head + `<Response><Errors><Error><Code>RemoteTimeout</Code><Message>` + inXML + `</Message></Error></Errors><RequestID>` + anID + `</RequestID></Response>`},
		},
		{
			outcome.DialectAWSRESTXML, axml,
			form{403, head + `<Error><Code>RouteNotFound</Code><Message>` + denied + `</Message><RequestId>` + anID + `</RequestId></Error>`},
			form{503, head + `<Error><Code>ConnectionRefused</Code><Message>` + refused + `</Message><RequestId>` + anID + `</RequestId></Error>`},
			form{400, head + `<Error><Code>RemoteTimeout</Code><Message>` + inXML + `</Message><RequestId>` + anID + `</RequestId></Error>`},
		},
		{
			outcome.DialectAWSRESTJSON, js,
			form{403, `{"message":"` + denied + `"}`},
			form{503, `{"message":"` + refused + `"}`},
			form{400, `{"message":"` + inJSON + `"}`},
		},
	} {
		for _, w := range []struct {
			want   form
			facts  outcome.Facts
			detail string
		}{
			{c.settled, factsOf(t, outcome.CodeRouteNotFound, outcome.AfterCorrection), "No route matches."},
			{c.wait, factsOf(t, outcome.CodeConnectionRefused, outcome.Backoff), ""},
			{c.unknowns, factsOf(t, outcome.CodeRemoteTimeout, outcome.Reconcile), `No "answer" <came> & went.`},
		} {
			env := outcome.NewEnvelope(anID, w.facts, w.detail, outcome.Evidence{})
			a := env.Answer(outcome.Shape{Method: http.MethodPost, Dialect: c.dialect, RetryAfter: 3 * time.Second})
			if a.Status != w.want.status || a.Header.Get("Content-Type") != c.media || string(a.Body) != w.want.body+"\n" {
				t.Errorf("%s: %d %s\n%swant %d %s\n%s", c.dialect, a.Status, a.Header.Get("Content-Type"), a.Body, w.want.status, c.media, w.want.body)
			}
		}
	}
}

// TestDialectStatuses is the status of codes whose usual one needs another look.
func TestDialectStatuses(t *testing.T) {
	contract.Covers(t, "L9")
	all429 := []outcome.Dialect{
		outcome.DialectOpenAI, outcome.DialectAnthropic, outcome.DialectGoogle, outcome.DialectGitHub, outcome.DialectSlack, outcome.DialectDiscord,
		outcome.DialectGraphQL, outcome.DialectNotion, outcome.DialectHuggingFace, outcome.DialectSquare, outcome.DialectKubernetes,
	}
	for _, d := range outcome.Dialects()[1:] {
		wait := 503
		if slices.Contains(all429, d) {
			wait = 429
		}
		settled := func(s int) int {
			switch {
			case d == outcome.DialectSlack || d == outcome.DialectGraphQL:
				return 200
			case d == outcome.DialectGitHub && s == 413:
				return 422
			}
			return s
		}
		for _, c := range []struct {
			code  outcome.Code
			retry outcome.Retry
			shape outcome.Shape
			want  int
		}{
			{outcome.CodeInvalidRequest, outcome.AfterCorrection, outcome.Shape{}, settled(400)},
			{outcome.CodePayloadLimit, outcome.AfterCorrection, outcome.Shape{}, settled(413)},
			{outcome.CodeLoopDetected, outcome.Never, outcome.Shape{}, settled(422)},
			{outcome.CodeResultNotRetained, outcome.Never, outcome.Shape{}, settled(410)},
			{outcome.CodeActionNotFound, outcome.RetryInvalid, outcome.Shape{}, settled(404)},
			{outcome.CodeResultPending, outcome.FetchResult, outcome.Shape{}, settled(422)},
			{outcome.CodeRetryRefused, outcome.Backoff, outcome.Shape{}, settled(422)},
			{outcome.CodeLeaseHeld, outcome.Never, outcome.Shape{}, settled(422)},
			{outcome.CodeLeaseHeld, outcome.Backoff, outcome.Shape{}, wait},
			{outcome.CodeCallerUnauthenticated, outcome.AfterCorrection, outcome.Shape{InsideTunnel: true}, settled(403)},
			{outcome.CodeInvocationInProgress, outcome.Backoff, outcome.Shape{}, wait},
			{outcome.CodeDraining, outcome.Backoff, outcome.Shape{}, wait},
			{outcome.CodeRateLimited, outcome.Backoff, outcome.Shape{}, wait},
			{outcome.CodeDNSTimeout, outcome.Backoff, outcome.Shape{}, wait},
			{outcome.CodeRemoteTimeout, outcome.Backoff, outcome.Shape{}, wait},
			{outcome.CodeRemoteTimeout, outcome.SameIdempotencyKey, outcome.Shape{CallerSentKey: true}, wait},
			// What the dialect has no part in: it is read below the library.
			{outcome.CodeCallerUnauthenticated, outcome.AfterCorrection, outcome.Shape{}, 407},
			{outcome.CodeRouteNotFound, outcome.AfterCorrection, outcome.Shape{Connect: true, Method: http.MethodConnect}, 403},
			{outcome.CodeNone, outcome.Never, outcome.Shape{}, 200},
		} {
			f := factsOf(t, c.code, c.retry)
			env := outcome.NewEnvelope(anID, f, "", outcome.Evidence{ResponseComplete: true})
			s := c.shape
			plain := env.Answer(s)
			s.Dialect = d
			a := env.Answer(s)
			if a.Status != c.want {
				t.Errorf("%s: %s/%s: %d, want %d", d, c.code, c.retry, a.Status, c.want)
			}
			if (s.Connect || c.want == 407 || c.code == outcome.CodeNone) && (string(a.Body) != string(plain.Body) || fmt.Sprint(a.Header) != fmt.Sprint(plain.Header)) {
				t.Errorf("%s: %s is in the dialect", d, c.code)
			}
		}
	}
	// A value from nowhere is the default.
	env := outcome.NewEnvelope(anID, factsOf(t, outcome.CodeRemoteTimeout, outcome.Reconcile), "", outcome.Evidence{})
	if a, b := env.Answer(outcome.Shape{Dialect: 99}), env.Answer(outcome.Shape{}); a.Status != b.Status || string(a.Body) != string(b.Body) {
		t.Errorf("%d %s", a.Status, a.Body)
	}
}

// read is what the family's libraries take from an error: its message and, where the
// family has one, its code.
func read(d outcome.Dialect, a outcome.Answer) (message, code string, err error) {
	type text = struct{ Code, Message string }
	var doc struct {
		XMLName xml.Name
		Error   text `xml:"Error"`
		Errors  text `xml:"Errors>Error"`
		text
	}
	switch d {
	case outcome.DialectGit:
		if media, _, _ := strings.Cut(a.Header.Get("Content-Type"), ";"); media != "text/plain" {
			return "", "", fmt.Errorf("git does not show %s", media)
		}
		first, _, _ := strings.Cut(string(a.Body), "\n")
		return first, "", nil
	case outcome.DialectAWSQuery, outcome.DialectAWSEC2, outcome.DialectAWSRESTXML:
		if err := xml.Unmarshal(a.Body, &doc); err != nil {
			return "", "", err
		}
		switch {
		case d == outcome.DialectAWSQuery && doc.XMLName.Local == "ErrorResponse":
			return doc.Error.Message, doc.Error.Code, nil
		case d == outcome.DialectAWSEC2 && doc.XMLName.Local == "Response":
			return doc.Errors.Message, doc.Errors.Code, nil
		case d == outcome.DialectAWSRESTXML && doc.XMLName.Local == "Error":
			return doc.Message, doc.Code, nil
		}
		return "", "", fmt.Errorf("document %s", doc.XMLName.Local)
	}
	var tree map[string]any
	if err := json.Unmarshal(a.Body, &tree); err != nil {
		return "", "", err
	}
	at := func(path string) string {
		var v any = tree
		for step := range strings.SplitSeq(path, ".") {
			if list, ok := v.([]any); ok && len(list) == 1 {
				v = list[0]
			}
			m, _ := v.(map[string]any)
			v = m[step]
		}
		if list, ok := v.([]any); ok && len(list) == 1 {
			v = list[0] // a list of texts
		}
		switch v := v.(type) {
		case string:
			return v
		case float64:
			return strconv.Itoa(int(v))
		}
		return ""
	}
	switch d {
	case outcome.DialectOpenAI, outcome.DialectStripe, outcome.DialectDefault:
		return at("error.message"), at("error.code"), nil
	case outcome.DialectAnthropic:
		return at("error.message"), at("error.type"), nil
	case outcome.DialectGoogle:
		return at("error.message"), at("error.status"), nil
	case outcome.DialectGitHub:
		return at("message"), "", nil
	case outcome.DialectSlack:
		if tree["ok"] != false {
			return "", "", errors.New("it looks like a success")
		}
		// slack-go takes a "message" for the object that it is in answers of chat.*.
		if _, has := tree["message"]; has {
			return "", "", errors.New("it has a message")
		}
		return strings.TrimPrefix(at("response_metadata.messages"), "[ERROR] "), at("error"), nil
	case outcome.DialectGraphQL:
		if data, has := tree["data"]; !has || data != nil {
			return "", "", errors.New("it looks like data")
		}
		return at("errors.message"), at("errors.extensions.code"), nil
	case outcome.DialectDiscord:
		return at("message"), at("code"), nil
	case outcome.DialectNotion:
		if at("object") != "error" || at("status") != strconv.Itoa(a.Status) {
			return "", "", fmt.Errorf("%v is no error with status %d", tree, a.Status)
		}
		return at("message"), at("code"), nil
	case outcome.DialectHuggingFace:
		return at("error"), "", nil
	case outcome.DialectSquare:
		return at("errors.detail"), at("errors.code"), nil
	case outcome.DialectKubernetes:
		if at("kind") != "Status" || at("status") != "Failure" || at("code") != strconv.Itoa(a.Status) {
			return "", "", fmt.Errorf("%v is no Status with %d", tree, a.Status)
		}
		return at("message"), at("reason"), nil
	case outcome.DialectAWSJSON:
		_, code, _ := strings.Cut(at("__type"), "#")
		return at("message"), code, nil
	case outcome.DialectAWSRESTJSON:
		return at("message"), a.Header.Get("X-Amzn-Errortype"), nil
	}
	return "", "", fmt.Errorf("no form for %s", d)
}

// checkDialect is what holds for the answer to any facts in any dialect: the facts of
// the default form, its text, and a status and hints that go with the advice.
func checkDialect(env outcome.Envelope, s outcome.Shape) error {
	plain, a := s, env.Answer(s)
	plain.Dialect = outcome.DialectDefault
	d, f := env.Answer(plain), env.Facts()
	if a.Status < 200 || slices.Contains([]int{204, 304, 408, 421}, a.Status) {
		return fmt.Errorf("status %d", a.Status)
	}
	for _, name := range []string{"Proxy-Status", "Waybill-Outcome", "Waybill-Invocation", "Cache-Control", "Connection", "Proxy-Authenticate"} {
		if !slices.Equal(a.Header.Values(name), d.Header.Values(name)) {
			return fmt.Errorf("%s: %q, by default %q", name, a.Header.Values(name), d.Header.Values(name))
		}
	}
	if a.Reason != d.Reason {
		return fmt.Errorf("reason %q, by default %q", a.Reason, d.Reason)
	}
	for name, values := range a.Header {
		for _, v := range values {
			if name != http.CanonicalHeaderKey(name) || strings.ContainsFunc(v, func(r rune) bool { return r < ' ' || r > '~' }) {
				return fmt.Errorf("field %q: %q", name, v)
			}
		}
	}
	if s.Method == http.MethodHead {
		if a.Body != nil {
			return errors.New("an answer to HEAD has a body")
		}
		if a.Status == 200 && f.Code != outcome.CodeNone {
			return errors.New("a failure without a body has status 200")
		}
	} else if a.Header.Get("Content-Length") != strconv.Itoa(len(a.Body)) {
		return fmt.Errorf("Content-Length %q, %d bytes", a.Header.Get("Content-Length"), len(a.Body))
	}
	if s.Dialect == outcome.DialectDefault || f.Code == outcome.CodeNone || s.Connect || d.Status == 407 {
		if a.Status != d.Status || string(a.Body) != string(d.Body) || fmt.Sprint(a.Header) != fmt.Sprint(d.Header) {
			return errors.New("it is in a dialect")
		}
		return nil
	}

	ra := a.Header.Values("Retry-After")
	if len(ra) > 1 {
		return fmt.Errorf("Retry-After %q", ra)
	}
	if len(ra) == 1 {
		if n, err := strconv.Atoi(ra[0]); err != nil || n < 1 || n > 60 {
			return fmt.Errorf("Retry-After %q", ra[0])
		}
	}
	stopped := a.Header.Get("x-should-retry") == "false"
	if a.Header.Get("x-should-retry") != a.Header.Get("stripe-should-retry") {
		return errors.New("the hints differ")
	}
	form200 := (s.Dialect == outcome.DialectSlack || s.Dialect == outcome.DialectGraphQL) && s.Method != http.MethodHead
	switch wayOf(f, s) {
	case "wait":
		if a.Status != 429 && a.Status != 503 || len(ra) == 0 || stopped {
			return fmt.Errorf("wait and repeat: status %d, Retry-After %q, stopped %v", a.Status, ra, stopped)
		}
	case "reconcile":
		if !slices.Contains([]int{424, 422, 400}, a.Status) && (!form200 || a.Status != 200) || len(ra) > 0 || !stopped {
			return fmt.Errorf("reconcile first: status %d, Retry-After %q, stopped %v", a.Status, ra, stopped)
		}
	default:
		ok := slices.Contains([]int{400, 403, 404, 410, 413, 422}, a.Status) || form200 && a.Status == 200
		if !ok || len(ra) > 0 || !stopped {
			return fmt.Errorf("nothing to repeat: status %d, Retry-After %q, stopped %v", a.Status, ra, stopped)
		}
	}
	if (a.Status == 200) != form200 && wayOf(f, s) != "wait" {
		return fmt.Errorf("status %d", a.Status)
	}
	if s.Method == http.MethodHead {
		return nil
	}

	// The text for people is the same, and begins with the instruction (L8).
	message, _, err := read(s.Dialect, a)
	if err != nil {
		return fmt.Errorf("%w: %s", err, a.Body)
	}
	if message != env.Message {
		return fmt.Errorf("message %q, by default %q", message, env.Message)
	}
	// Nothing here can be taken for an envelope that says something else.
	var back outcome.Envelope
	if json.Unmarshal(a.Body, &back) == nil && back.Facts() != f {
		return fmt.Errorf("it reads as an envelope: %s", a.Body)
	}
	return nil
}

// wayOf is CONTRACT L7 for the dialects, in which the advice alone decides.
func wayOf(f outcome.Facts, s outcome.Shape) string {
	switch {
	case f.Code == outcome.CodeRetryRefused, f.Code == outcome.CodeActionNotFound:
		return "nothing"
	case f.Retry == outcome.Backoff, f.Retry == outcome.SameIdempotencyKey && s.CallerSentKey:
		return "wait"
	case f.Retry == outcome.Reconcile, f.Retry == outcome.SameIdempotencyKey:
		return "reconcile"
	}
	return "nothing"
}

func TestDialectKeepsTheFacts(t *testing.T) {
	contract.Covers(t, "L5", "L7", "L8", "L9", "G11")
	n := 0
	some := []outcome.Shape{{Method: http.MethodPost}, {CallerSentKey: true, RetryAfter: 24 * time.Hour}, {InsideTunnel: true}, {Method: http.MethodHead}, {Method: http.MethodConnect, Connect: true}}
	for _, f := range allFacts() {
		some := some
		switch f.Code {
		case outcome.CodeRetryRefused, outcome.CodeLeaseHeld, outcome.CodeResultPending:
			some = some[:1] // they can have the facts of all others
		}
		for _, s := range some {
			for _, d := range outcome.Dialects() {
				s.Dialect = d
				id := anID
				if f.Code == outcome.CodeActionNotFound {
					id = ""
				}
				if err := checkDialect(outcome.NewEnvelope(id, f, "", outcome.Evidence{}), s); err != nil {
					t.Fatalf("%s: %+v with %+v: %v", d, f, s, err)
				}
				n++
			}
		}
	}
	t.Logf("%d answers", n)
}

// By A9 an action can keep its code with the advice of another attempt.
func TestDialectOfFactsThatDoNotFit(t *testing.T) {
	contract.Covers(t, "L7", "L9")
	n := 0
	for f := range everyFacts {
		if f.Code == outcome.CodeNone || f.Code == outcome.CodeActionNotFound {
			continue
		}
		s := outcome.Shape{Method: http.MethodPost, CallerSentKey: n%2 == 0, Dialect: outcome.Dialects()[n%len(outcome.Dialects())]}
		if err := checkDialect(outcome.NewEnvelope(anID, f, "", outcome.Evidence{}), s); err != nil {
			t.Fatalf("%s: %+v: %v", s.Dialect, f, err)
		}
		n++
	}
}

func TestDialectOfAnything(t *testing.T) {
	contract.Covers(t, "L5", "L7", "L9")
	rapid.Check(t, func(t *rapid.T) {
		env, s := genEnvelope().Draw(t, "envelope"), genShape().Draw(t, "shape")
		s.Dialect = rapid.SampledFrom(outcome.Dialects()).Draw(t, "dialect")
		before, _ := json.Marshal(env)
		if err := checkDialect(env, s); err != nil {
			t.Fatalf("%s: %v", s.Dialect, err)
		}
		if after, _ := json.Marshal(env); string(before) != string(after) {
			t.Fatal("Answer changed the envelope")
		}
	})
}

// TestDialectOfABrokenEnvelope: also here nothing is called safe that is not known to be.
func TestDialectOfABrokenEnvelope(t *testing.T) {
	contract.Covers(t, "A3", "L9")
	for _, d := range outcome.Dialects() {
		for i, e := range []*outcome.Error{{}, {Code: 222, Phase: outcome.Validation, Outcome: outcome.NotAttempted, Retry: outcome.Backoff}} {
			env := outcome.Envelope{InvocationID: "not\na field", Error: e}
			a := env.Answer(outcome.Shape{Dialect: d})
			if f, err := outcome.ParseOutcome(a.Header.Get("Waybill-Outcome")); err != nil || f.Retry != outcome.Reconcile || a.Header.Get("X-Should-Retry") != "false" {
				t.Errorf("%s, %d: %+v, %v", d, i, f, err)
			}
			if text, _, err := read(d, a); err != nil || !strings.HasPrefix(text, "Outcome unknown: do not repeat") {
				t.Errorf("%s, %d: %q, %v", d, i, text, err)
			}
		}
		// An envelope put together by hand, without its text.
		f := factsOf(t, outcome.CodeRemoteTimeout, outcome.Reconcile)
		env := outcome.Envelope{InvocationID: anID, Error: &outcome.Error{Code: f.Code, Phase: f.Phase, Outcome: f.Outcome, Retry: f.Retry}}
		if text, _, err := read(d, env.Answer(outcome.Shape{Dialect: d})); d != 0 && (err != nil || !strings.Contains(text, "reconcile "+anID)) {
			t.Errorf("%s: %q, %v", d, text, err)
		}
	}
}

// TestLastEvent: what a reader of events learns of a stream that breaks off (H5, L9).
func TestLastEvent(t *testing.T) {
	contract.Covers(t, "H5", "L9")
	f := factsOf(t, outcome.CodeRemoteResultIncomplete, outcome.Reconcile)
	env := outcome.NewEnvelope(anID, f, "", outcome.Evidence{ReceivedStatus: 200, DispatchStarted: true})
	for _, d := range outcome.Dialects() {
		typ := map[outcome.Dialect]string{outcome.DialectOpenAI: "", outcome.DialectGoogle: "", outcome.DialectHuggingFace: "", outcome.DialectGraphQL: "next"}
		want, special := typ[d]
		if !special {
			want = "error"
		}
		for tail, clean := range map[string]bool{
			"": true, "data: 1\n\n": true, "data: 1\r\n\r\n": true, "data: 1\r\r": true,
			"data: {\"par": false, "event: message\n": false, "data: 1\r\n": false, "data: 1\r": false,
		} {
			got := string(env.LastEvent(outcome.Shape{Dialect: d}, []byte(tail)))
			events := parseEvents(tail + got)
			last := events[len(events)-1]
			if clean {
				if last.typ != want {
					t.Errorf("%s after %q: type %q", d, tail, last.typ)
				}
			} else if last.typ != "next" && last.typ != "error" {
				t.Errorf("%s after %q: the broken event is dispatched as %q", d, tail, last.typ)
			}
			if strings.Contains(got, "\n\n") && !strings.HasSuffix(got, "}\n\n") || strings.Count(got, "data: ") != 1 {
				t.Errorf("%s after %q: %q", d, tail, got)
			}
			if !clean {
				continue
			}
			a := env.Answer(outcome.Shape{Dialect: d})
			as := d
			switch d {
			case outcome.DialectGit, outcome.DialectAWSQuery, outcome.DialectAWSEC2, outcome.DialectAWSRESTXML:
				as = outcome.DialectDefault // these have no form for an event
			}
			a.Body = []byte(last.data)
			if text, _, err := read(as, a); err != nil || text != env.Message {
				t.Errorf("%s: %s: %v", d, last.data, err)
			}
		}
	}
	// Evidence that cannot be encoded costs the event, not the process.
	env.Evidence.Attempts = []outcome.Attempt{{N: 1}}
	if got := env.LastEvent(outcome.Shape{}, nil); got != nil {
		t.Errorf("%s", got)
	}
	if got := env.LastEvent(outcome.Shape{Dialect: outcome.DialectOpenAI}, nil); !strings.Contains(string(got), "REMOTE_RESULT_INCOMPLETE") {
		t.Errorf("%s", got)
	}
}

type event struct{ typ, data string }

// parseEvents reads events as WHATWG HTML §9.2.6 says.
func parseEvents(s string) []event {
	var out []event
	var e event
	var data []string
	for line := range strings.SplitSeq(strings.NewReplacer("\r\n", "\n", "\r", "\n").Replace(s), "\n") {
		name, value, _ := strings.Cut(line, ":")
		value = strings.TrimPrefix(value, " ")
		switch {
		case line == "" && len(data) > 0:
			e.data = strings.Join(data, "\n")
			out = append(out, e)
			e, data = event{}, nil
		case line == "":
			e = event{}
		case name == "event":
			e.typ = value
		case name == "data":
			data = append(data, value)
		}
	}
	return out
}
