package outcome_test

import (
	"net/http"
	"slices"
	"time"

	"pgregory.net/rapid"

	"waybill/outcome"
)

const (
	anID      = "act_01JD8Z5Q0V9Y3T6W7X2K4M8N1P"
	anotherID = "act_01JD8Z5Q0V9Y3T6W7X2K4M8N2Q"
)

// allFacts are all valid facts of all codes, CodeNone included.
func allFacts() []outcome.Facts {
	var out []outcome.Facts
	for _, c := range append([]outcome.Code{outcome.CodeNone}, outcome.Codes()...) {
		out = append(out, outcome.Lookup(c).Facts()...)
	}
	return out
}

// everyFacts are all combinations of the enumerations, valid or not.
func everyFacts(yield func(outcome.Facts) bool) {
	for _, c := range append([]outcome.Code{outcome.CodeNone}, outcome.Codes()...) {
		for _, p := range outcome.Phases() {
			for _, o := range outcome.Outcomes() {
				for _, r := range outcome.Retries() {
					if !yield(outcome.Facts{Phase: p, Outcome: o, Retry: r, Code: c}) {
						return
					}
				}
			}
		}
	}
}

// shapes are all shapes that can change the form of an answer.
func shapes() []outcome.Shape {
	var out []outcome.Shape
	for i := range 8 {
		out = append(out, outcome.Shape{Method: http.MethodPost, InsideTunnel: i&1 != 0, Connect: i&2 != 0, CallerSentKey: i&4 != 0})
	}
	for _, key := range []bool{false, true} {
		out = append(out, outcome.Shape{Method: http.MethodHead, CallerSentKey: key})
		for _, ra := range []time.Duration{-time.Second, 1, 24 * time.Hour} {
			out = append(out, outcome.Shape{Method: http.MethodPost, CallerSentKey: key, RetryAfter: ra})
		}
	}
	return out
}

func genFacts() *rapid.Generator[outcome.Facts] { return rapid.SampledFrom(allFacts()) }

// genSum returns digests and "" alike.
func genSum() *rapid.Generator[string] {
	return rapid.OneOf(rapid.Just(""), rapid.StringMatching(`sha256:[0-9a-f]{64}`))
}

func genID() *rapid.Generator[string] {
	return rapid.StringMatching(`act_[0-7][0-9A-HJKMNP-TV-Z]{25}`)
}

func genEvidence() *rapid.Generator[outcome.Evidence] {
	return rapid.Custom(func(t *rapid.T) outcome.Evidence {
		text := rapid.StringN(0, 12, -1)
		codes := append([]outcome.Code{outcome.CodeNone}, outcome.Codes()...)
		stages := append([]outcome.Stage{""}, outcome.Stages()...)
		sources := append([]outcome.Source{""}, outcome.Sources()...)
		ev := outcome.Evidence{
			Attempt:                 rapid.IntRange(0, 9).Draw(t, "attempt"),
			Source:                  rapid.SampledFrom(sources).Draw(t, "source"),
			DispatchStarted:         rapid.Bool().Draw(t, "dispatch_started"),
			RequestHeadersSent:      rapid.Bool().Draw(t, "headers_sent"),
			RequestComplete:         rapid.Bool().Draw(t, "request_complete"),
			ResponseHeadersReceived: rapid.Bool().Draw(t, "headers_received"),
			ResponseComplete:        rapid.Bool().Draw(t, "response_complete"),
			Stage:                   rapid.SampledFrom(stages).Draw(t, "stage"),
			DispatchSequence:        rapid.Uint64().Draw(t, "dispatch_sequence"),
			ResultSequence:          rapid.Uint64().Draw(t, "result_sequence"),
			ConnectionID:            text.Draw(t, "connection"),
			ConnectionReused:        rapid.Bool().Draw(t, "reused"),
			Fingerprint:             genSum().Draw(t, "fingerprint"),
			Snapshot:                genSum().Draw(t, "snapshot"),
			Route:                   text.Draw(t, "route"),
			ReceivedStatus:          rapid.IntRange(0, 999).Draw(t, "status"),
			StatusLine:              text.Draw(t, "status_line"),
			Framing:                 text.Draw(t, "framing"),
			ResponseDigest:          genSum().Draw(t, "digest"),
			ProtocolProof:           text.Draw(t, "proof"),
			Hop:                     text.Draw(t, "hop"),
			ReceivedProxyStatus:     text.Draw(t, "received_proxy_status"),
			LocalCause:              text.Draw(t, "cause"),
			Field:                   text.Draw(t, "field"),
			Reason:                  text.Draw(t, "reason"),
			Durability:              text.Draw(t, "durability"),
			Recovered:               rapid.Bool().Draw(t, "recovered"),
			Running:                 rapid.Bool().Draw(t, "running"),
		}
		if rapid.Bool().Draw(t, "collided") {
			ev.EarlierAction = genID().Draw(t, "earlier")
		}
		if rapid.Bool().Draw(t, "counted") {
			n := rapid.Int64Min(0).Draw(t, "received")
			ev.ReceivedBytes, ev.ExpectedBytes = &n, &n
		}
		if rapid.Bool().Draw(t, "command") {
			status, yes, n := rapid.IntRange(0, 255).Draw(t, "exit"), rapid.Bool().Draw(t, "whole"), rapid.Int64Min(0).Draw(t, "out")
			ev.ExitStatus, ev.OutputComplete, ev.ChannelClosed, ev.StdoutBytes, ev.StderrBytes = &status, &yes, &yes, &n, &n
			ev.ExitSignal, ev.Truncated, ev.Stdin = text.Draw(t, "signal"), rapid.Bool().Draw(t, "truncated"), text.Draw(t, "stdin")
			ev.StdoutDigest, ev.StderrDigest, ev.StdinDigest = genSum().Draw(t, "1"), genSum().Draw(t, "2"), genSum().Draw(t, "0")
		}
		if rapid.Bool().Draw(t, "has peer") {
			ev.Peer = &outcome.Peer{Address: text.Draw(t, "address"), ServerName: text.Draw(t, "sni"), LeafDigest: genSum().Draw(t, "leaf")}
		}
		if rapid.Bool().Draw(t, "has key") {
			ev.Idempotency = &outcome.Idempotency{Key: text.Draw(t, "key"), Fingerprint: genSum().Draw(t, "key fingerprint"), Maker: text.Draw(t, "maker"), ExpiresAt: text.Draw(t, "expires")}
			ev.RetryBudget = &outcome.RetryBudget{Attempts: rapid.IntRange(0, 9).Draw(t, "budget"), Used: rapid.IntRange(0, 9).Draw(t, "used"), Exhausted: rapid.Bool().Draw(t, "exhausted")}
			ev.Generation, ev.Conditional = rapid.IntRange(0, 9).Draw(t, "generation"), text.Draw(t, "conditional")
		}
		for n := range rapid.IntRange(0, 3).Draw(t, "attempts") {
			ev.Attempts = append(ev.Attempts, outcome.Attempt{
				N: n + 1, Stage: rapid.SampledFrom(stages).Draw(t, "attempt stage"),
				Outcome: rapid.SampledFrom(outcome.Outcomes()).Draw(t, "attempt outcome"), Code: rapid.SampledFrom(codes).Draw(t, "attempt code"),
			})
		}
		return ev
	})
}

func genEnvelope() *rapid.Generator[outcome.Envelope] {
	return rapid.Custom(func(t *rapid.T) outcome.Envelope {
		f, ev := genFacts().Draw(t, "facts"), genEvidence().Draw(t, "evidence")
		if f.IsSuccess() {
			ev.ResponseComplete = true // G1
		}
		id := genID().Draw(t, "id")
		if f.Code == outcome.CodeActionNotFound {
			id = ""
		}
		return outcome.NewEnvelope(id, f, rapid.StringN(0, 40, -1).Draw(t, "detail"), ev)
	})
}

func genShape() *rapid.Generator[outcome.Shape] {
	return rapid.Custom(func(t *rapid.T) outcome.Shape {
		return outcome.Shape{
			Method:       rapid.SampledFrom([]string{"", http.MethodGet, http.MethodHead, http.MethodPost, http.MethodConnect}).Draw(t, "method"),
			InsideTunnel: rapid.Bool().Draw(t, "inside"), Connect: rapid.Bool().Draw(t, "connect"), CallerSentKey: rapid.Bool().Draw(t, "key"),
			NextHop: rapid.String().Draw(t, "next hop"), NextProtocol: rapid.SampledFrom([]string{"", "h2", "http/1.1", "\x00\xff"}).Draw(t, "protocol"),
			ReceivedStatus: rapid.IntRange(-1, 1100).Draw(t, "status"), RetryAfter: time.Duration(rapid.Int64().Draw(t, "retry after")),
			RCode: rapid.String().Draw(t, "rcode"), AlertID: rapid.IntRange(-1, 300).Draw(t, "alert"), AlertName: rapid.String().Draw(t, "alert name"),
			ProxyError: rapid.SampledFrom([]string{"", "connection_write_timeout", "no_such_type", "x;y"}).Draw(t, "error"),
			Details:    rapid.String().Draw(t, "details"), Realm: rapid.String().Draw(t, "realm"),
		}
	})
}

// waitStatus are the statuses on which waiting client libraries repeat.
func waitStatus(status int) bool {
	return slices.Contains([]int{409, 429, 502, 503, 504}, status)
}
