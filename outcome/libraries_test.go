package outcome_test

import (
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/outcome"
)

// got is an answer as a client library has it when it decides whether to send the
// request again.
type got struct {
	status int
	header http.Header
	code   string // of the body, in the family's place for it
	body   []byte
}

func (g got) oneOf(statuses ...int) bool { return slices.Contains(statuses, g.status) }

// wait is what Retry-After says; 0 where it says nothing that a library would take.
func (g got) wait() int {
	n, err := strconv.Atoi(g.header.Get("Retry-After"))
	if err != nil {
		return 0
	}
	return n
}

// library is the documented behaviour of a client library with its default settings,
// for a POST: the rules that the versions named here follow.
type library struct {
	name   string
	speaks []outcome.Dialect
	// repeats says that the library sends the request again by itself.
	repeats func(got) bool
	// waits says that it waits before; nil: as long as Retry-After says.
	waits func(got) bool
	// passive libraries leave answers to wait for to their caller.
	passive bool
}

// awsWords are the error codes on which AWS libraries repeat, whatever the status.
var awsWords = []string{
	"RequestTimeout", "RequestTimeoutException", "InternalError", "InternalFailure", "InternalServerError", "Throttling", "ThrottlingException", "ThrottledException",
	"RequestThrottled", "RequestThrottledException", "TooManyRequestsException", "ProvisionedThroughputExceededException", "TransactionInProgressException",
	"RequestLimitExceeded", "BandwidthLimitExceeded", "LimitExceededException", "SlowDown", "PriorRequestNotComplete", "EC2ThrottledException",
	"ServiceUnavailable", "IDPCommunicationError", "RequestExpired", "RequestTimeTooSkewed", "RequestInTheFuture", "InvalidSignatureException",
	"SignatureDoesNotMatch", "AuthFailure", "ExpiredToken", "TimeoutError", "CRC32CheckFailed",
}

func libraries() []library {
	ownSchedule := func(got) bool { return true }
	hinted := func(g got) bool { // the generator behind the libraries of OpenAI, Anthropic and Cloudflare
		switch g.header.Get("x-should-retry") {
		case "true":
			return true
		case "false":
			return false
		}
		return g.oneOf(408, 409, 429) || g.status >= 500
	}
	status := func(list ...int) func(got) bool { return func(g got) bool { return g.oneOf(list...) } }
	never := func(got) bool { return false }
	aws := func(list ...int) func(got) bool {
		return func(g got) bool { return g.oneOf(list...) || slices.Contains(awsWords, g.code) || g.code == "" }
	}
	protocols := []outcome.Dialect{outcome.DialectAWSJSON, outcome.DialectAWSQuery, outcome.DialectAWSEC2, outcome.DialectAWSRESTXML, outcome.DialectAWSRESTJSON}
	octokit := func(g got) bool {
		return g.status >= 400 && !g.oneOf(400, 401, 403, 404, 410, 422, 451)
	}
	dialects := func(d ...outcome.Dialect) []outcome.Dialect { return d }
	return []library{
		{name: "OpenAI JS 6.49, Python 3.3, Go 3.99", speaks: dialects(outcome.DialectOpenAI, outcome.DialectDefault), repeats: hinted},
		{name: "Anthropic JS 1.14, Python 0.121, Go 2.15", speaks: dialects(outcome.DialectAnthropic, outcome.DialectDefault), repeats: hinted, waits: func(g got) bool { return g.wait() >= 1 && g.wait() <= 60 }},
		{name: "Vercel AI SDK 6", speaks: dialects(outcome.DialectOpenAI, outcome.DialectAnthropic), repeats: func(g got) bool { return g.oneOf(408, 409, 429) || g.status >= 500 }},
		{name: "OpenRouter JS 1.3", speaks: dialects(outcome.DialectOpenAI), repeats: func(g got) bool { return g.status >= 500 }, passive: true},
		{name: "Mistral JS 2.7", speaks: dialects(outcome.DialectOpenAI), repeats: never, passive: true},
		{name: "Google GenAI JS 2.32, Go 1.77", speaks: dialects(outcome.DialectGoogle), repeats: never, passive: true},
		{name: "Google GenAI with its retries on", speaks: dialects(outcome.DialectGoogle), repeats: func(g got) bool {
			return g.oneOf(408, 429) || g.status >= 500 || slices.Contains([]string{"UNAVAILABLE", "RESOURCE_EXHAUSTED", "ABORTED", "DEADLINE_EXCEEDED", "UNKNOWN", "INTERNAL"}, g.code)
		}, waits: ownSchedule},
		{name: "Stripe JS 23.1, Python 15.3", speaks: dialects(outcome.DialectStripe), repeats: func(g got) bool {
			switch g.header.Get("stripe-should-retry") {
			case "true":
				return true
			case "false":
				return false
			}
			return g.status == 409 || g.status >= 500
		}, waits: ownSchedule},
		{name: "Stripe Go 82.5", speaks: dialects(outcome.DialectStripe), repeats: func(g got) bool {
			var parsed struct{ Error struct{ Type string } }
			if json.Unmarshal(g.body, &parsed) == nil && parsed.Error.Type != "" {
				return g.code == "lock_timeout"
			}
			return g.status == 409 || g.status >= 500
		}, passive: true},
		{name: "Octokit 5", speaks: dialects(outcome.DialectGitHub, outcome.DialectGraphQL), repeats: octokit, waits: ownSchedule},
		{name: "go-github 74", speaks: dialects(outcome.DialectGitHub), repeats: never, passive: true},
		{name: "git", speaks: dialects(outcome.DialectGit), repeats: never, passive: true},
		{name: "Slack web-api 8.2", speaks: dialects(outcome.DialectSlack), repeats: func(g got) bool { return g.status != 200 }, waits: func(g got) bool { return g.status == 429 && g.wait() >= 1 }},
		{name: "slack-go 0.36", speaks: dialects(outcome.DialectSlack), repeats: never, passive: true},
		{name: "Discord rest 2.6", speaks: dialects(outcome.DialectDiscord), repeats: func(g got) bool { return g.status == 429 || g.status >= 500 }, waits: func(g got) bool { return g.status == 429 && g.wait() >= 1 }},
		{name: "Linear 98", speaks: dialects(outcome.DialectGraphQL), repeats: never, passive: true},
		{name: "Notion 5.26", speaks: dialects(outcome.DialectNotion), repeats: func(g got) bool { return g.code == "rate_limited" || g.code == "service_overload" }},
		{name: "Notion 5.26, a GET", speaks: dialects(outcome.DialectNotion), repeats: func(g got) bool {
			return slices.Contains([]string{"rate_limited", "service_overload", "internal_server_error", "service_unavailable"}, g.code)
		}},
		{name: "Hugging Face inference 4.13", speaks: dialects(outcome.DialectHuggingFace), repeats: status(503), waits: never, passive: true},
		{name: "Square JS 46", speaks: dialects(outcome.DialectSquare), repeats: func(g got) bool { return g.oneOf(408, 429) || g.status >= 500 }},
		{name: "client-go", speaks: dialects(outcome.DialectKubernetes), repeats: func(g got) bool {
			return (g.status == 429 || g.status >= 500) && g.header.Get("Retry-After") != ""
		}},
		// It repeats after a conflict or a timeout that the API server itself reports.
		{name: "client-go, RetryOnConflict and OnError", speaks: dialects(outcome.DialectKubernetes), repeats: func(g got) bool {
			return slices.Contains([]string{"Conflict", "AlreadyExists", "ServerTimeout", "Timeout", "InternalError", "ServiceUnavailable"}, g.code) || g.oneOf(409, 500, 503, 504)
		}, passive: true},
		{name: "AWS SDK JS 3", speaks: protocols, repeats: aws(429, 500, 502, 503, 504), waits: ownSchedule},
		{name: "AWS SDK Go v2", speaks: protocols, repeats: aws(500, 502, 503, 504), waits: ownSchedule},
		{name: "botocore 1.43", speaks: protocols, repeats: aws(429, 500, 502, 503, 504, 509), waits: ownSchedule},

		{name: "Cloudflare JS 7.3", speaks: dialects(outcome.DialectDefault), repeats: hinted},
		{name: "Azure core, Go 1.24", speaks: dialects(outcome.DialectDefault), repeats: status(408, 429, 500, 502, 503, 504)},
		{name: "curl --retry", speaks: dialects(outcome.DialectDefault), repeats: status(408, 429, 500, 502, 503, 504)},
		{name: "go-retryablehttp 0.7", speaks: dialects(outcome.DialectDefault), repeats: func(g got) bool { return g.status == 429 || g.status >= 500 && g.status != 501 }, waits: ownSchedule},
		{name: ".NET standard resilience", speaks: dialects(outcome.DialectDefault), repeats: func(g got) bool { return g.oneOf(408, 429) || g.status >= 500 }},
		{name: "OkHttp 3.13", speaks: dialects(outcome.DialectDefault), repeats: func(g got) bool {
			return g.status == 408 && g.wait() == 0 || g.status == 503 && g.header.Get("Retry-After") == "0"
		}, waits: never, passive: true},
		{name: "fetch, Node 24", speaks: dialects(outcome.DialectDefault), repeats: status(421), waits: never, passive: true},
		{name: "got, a PUT", speaks: dialects(outcome.DialectDefault), repeats: status(408, 413, 429, 500, 502, 503, 504, 521, 522, 524)},
		{name: "urllib3, a GET", speaks: dialects(outcome.DialectDefault), repeats: func(g got) bool { return g.oneOf(413, 429, 503) && g.header.Get("Retry-After") != "" }},
	}
}

// TestLibrariesDoWhatTheyMay lets each library decide on each answer in its family's
// dialect: none repeats what must not be repeated, and those that repeat wait first.
func TestLibrariesDoWhatTheyMay(t *testing.T) {
	covered := map[outcome.Dialect]bool{}
	for _, lib := range libraries() {
		t.Run(lib.name, func(t *testing.T) {
			contract.Covers(t, "L7", "L9", "O4")
			for _, d := range lib.speaks {
				covered[d] = true
				decide(t, lib, d)
			}
		})
	}
	for _, d := range outcome.Dialects() {
		if !covered[d] {
			t.Errorf("no library speaks %s", d)
		}
	}
}

func decide(t *testing.T, lib library, d outcome.Dialect) {
	t.Helper()
	waited, total := 0, 0
	for _, f := range allFacts() {
		// Nobody is there to repeat these, or the caller API asks to come back.
		if f.Code == outcome.CodeNone || f.Code == outcome.CodeResultPending || f.Code == outcome.CodeLeaseHeld {
			continue
		}
		for _, key := range []bool{false, true} {
			s := outcome.Shape{Method: http.MethodPost, InsideTunnel: true, CallerSentKey: key, RetryAfter: 2 * time.Minute, Dialect: d}
			env := outcome.NewEnvelope(anID, f, "", outcome.Evidence{})
			a := env.Answer(s)
			g := got{status: a.Status, header: a.Header, body: a.Body}
			if _, code, err := read(d, a); err != nil {
				t.Fatalf("%s: %v: %s", d, err, a.Body)
			} else {
				g.code = code
			}
			what := fmt.Sprintf("%s: %+v, answered with %d %s", d, f, a.Status, a.Body)
			repeats := lib.repeats(g)
			switch wayOf(f, s) {
			case "reconcile":
				if repeats {
					t.Fatalf("repeats what must be reconciled: %s", what)
				}
			case "wait":
				total++
				switch waits := lib.waits; {
				case !repeats:
				case waits != nil && waits(g), waits == nil && g.wait() >= 1 && g.wait() <= 60:
					waited++
				default:
					t.Fatalf("repeats at once: %s", what)
				}
			default:
				// By default some status is repeated without need where nothing was sent.
				if repeats && !(d == outcome.DialectDefault && f.Outcome == outcome.NotAttempted && (g.status == 413 || g.status == 508)) {
					t.Fatalf("repeats for nothing: %s", what)
				}
			}
		}
	}
	switch {
	case lib.passive && waited > 0:
		t.Errorf("%s: it is said to leave waiting to its caller, and repeated %d of %d", d, waited, total)
	case !lib.passive && d != outcome.DialectDefault && waited != total:
		t.Errorf("%s: of %d answers to wait for it repeated %d", d, total, waited)
	case !lib.passive && waited == 0:
		t.Errorf("%s: nothing to wait for was repeated", d)
	}
}

// TestNoCodeIsAWordToRepeatOn: codes in the spelling of AWS and Kubernetes are none of
// the words on which their libraries repeat.
func TestNoCodeIsAWordToRepeatOn(t *testing.T) {
	contract.Covers(t, "L9", "O4")
	for _, f := range allFacts() {
		if f.Code == outcome.CodeNone {
			continue
		}
		env := outcome.NewEnvelope(anID, f, "", outcome.Evidence{})
		for _, d := range []outcome.Dialect{outcome.DialectAWSJSON, outcome.DialectAWSQuery, outcome.DialectAWSEC2, outcome.DialectAWSRESTXML, outcome.DialectAWSRESTJSON} {
			_, code, err := read(d, env.Answer(outcome.Shape{InsideTunnel: true, Dialect: d}))
			if err != nil || code == "" || slices.Contains(awsWords, code) {
				t.Fatalf("%s: %s is %q, %v", d, f.Code, code, err)
			}
		}
	}
}
