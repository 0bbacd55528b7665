package dispatch

import (
	"context"
	"strings"
	"testing"
	"testing/synctest"

	"waybill/internal/contract"
	"waybill/outcome"
	"waybill/routes"
)

// inDialect gives every route of the bench a dialect.
func inDialect(t *testing.T, b *bench, d outcome.Dialect) {
	t.Helper()
	list := testRoutes()
	for i := range list {
		if !list[i].Deny {
			list[i].Dialect = d
		}
	}
	snap, err := routes.NewSnapshot(list, routes.Deny, nil)
	if err != nil {
		t.Fatal(err)
	}
	b.Swap(&Binding{Snapshot: snap, Credentials: b.Binding().Credentials})
}

// TestDialectOfTheRoute: Waybill's own answers have the form of the route, refusals
// before the dispatch included; a relayed answer and one without a route do not.
func TestDialectOfTheRoute(t *testing.T) {
	contract.Covers(t, "L9", "G12")
	synctest.Test(t, func(t *testing.T) {
		b := newBench(t)
		inDialect(t, b, outcome.DialectSlack)
		ask := func(s *Submission, status int, media, begins string, code outcome.Code) {
			t.Helper()
			r := b.Do(context.Background(), s)
			body := readBody(t, r)
			f, err := outcome.ParseOutcome(r.Header.Get("Waybill-Outcome"))
			if r.Status != status || r.Header.Get("Content-Type") != media || !strings.HasPrefix(body, begins) || err != nil || f.Code != code {
				t.Errorf("%d %q %s: %+v, %v", r.Status, r.Header.Get("Content-Type"), body, f, err)
			}
			if r.ContentLength != int64(len(body)) {
				t.Errorf("length %d of %d bytes", r.ContentLength, len(body))
			}
			r.HandedOver(nil)
			synctest.Wait()
		}
		b.tr.play = endWith(outcome.CodeRemoteOutcomeUnknown)
		ask(post("pay.example.test", "/v1/charges", "{}"), 200, "application/json", `{"ok":false,"error":"REMOTE_OUTCOME_UNKNOWN","response_metadata":{"messages":["[ERROR] Outcome unknown: do not repeat; reconcile act_`, outcome.CodeRemoteOutcomeUnknown)
		ask(post("pay.example.test", "/v1/charges", "{}"), 200, "application/json", `{"ok":false,"error":"DUPLICATE_SUSPECTED"`, outcome.CodeDuplicateSuspected)
		ask(post("broken.example.test", "/", "{}"), 200, "application/json", `{"ok":false,"error":"CREDENTIAL_MISSING"`, outcome.CodeCredentialMissing)
		// No route, no dialect; and one that refuses has none.
		ask(post("nowhere.example.test", "/", "{}"), 403, "application/json", `{"invocation_id":"act_`, outcome.CodeRouteNotFound)
		ask(post("admin.example.test", "/", "{}"), 403, "application/json", `{"invocation_id":"act_`, outcome.CodePolicyDenied)
		// What the service says is relayed as it came.
		b.tr.play = answerWith(500, "<p>broken</p>", "Content-Type", "text/html", "Content-Length", "13")
		ask(post("pay.example.test", "/v1/refunds", "{}"), 500, "text/html", "<p>broken</p>", outcome.CodeRemoteError)
	})
}

// TestDialectOfABrokenStream: the last event is in the form that the family's
// libraries look for.
func TestDialectOfABrokenStream(t *testing.T) {
	contract.Covers(t, "L9", "H5")
	for _, c := range []struct {
		dialect outcome.Dialect
		last    string
	}{
		{outcome.DialectOpenAI, `data: {"error":{"message":"Outcome unknown: do not repeat; reconcile act_`},
		{outcome.DialectAnthropic, "event: error\n" + `data: {"type":"error","error":{"type":"invalid_request_error","message":"Outcome unknown: do not repeat; reconcile act_`},
		{outcome.DialectGit, "event: error\n" + `data: {"invocation_id":"act_`},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := newBench(t)
			inDialect(t, b, c.dialect)
			f := newFeed("Content-Type", sse)
			f.end.Code = outcome.CodeRemoteResultIncomplete
			b.tr.play = f.play
			r := b.Do(context.Background(), post("llm.example.test", "/v1/m", "{}"))
			f.pieces <- "data: 1\n\n"
			read(t, r)
			close(f.pieces)
			if got := read(t, r); !strings.HasPrefix(got, c.last) || !strings.HasSuffix(got, "}\n\n") {
				t.Errorf("%s: last event %q", c.dialect, got)
			}
			_, err := r.Body.Read(make([]byte, 1))
			if err == nil {
				t.Errorf("%s: a broken stream goes on", c.dialect)
			}
			r.HandedOver(err)
			synctest.Wait()
		})
	}
}
