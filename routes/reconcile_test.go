package routes

import (
	"errors"
	"testing"
	"time"

	"waybill/internal/contract"
)

func fullReconcile() *Reconcile {
	return &Reconcile{
		Get: "/v1/orders/${request.json.id}", Headers: map[string]string{"Accept": "application/json"},
		CommittedWhen: []Condition{{Status: []int{200}, JSON: []JSONTest{{"status", []string{"paid"}}}, Present: []string{"id"}, Empty: []string{"errors"}}},
		RejectedWhen:  []Condition{{Status: []int{200}}}, NotFoundWhen: []Condition{{Status: []int{404}}}, NotFoundRejects: true,
		VisibleAfter: time.Second, Manual: true, Every: 2 * time.Second, MaxEvery: 3 * time.Second, Tries: 4,
	}
}

func fullAsync() *Async {
	return &Async{
		Status: []int{202}, From: []string{FromLocation}, Get: "/v1/jobs/${response.json.id}", JobID: "id",
		PendingWhen: []Condition{{Status: []int{202}}}, CommittedWhen: []Condition{{Status: []int{200}}}, RejectedWhen: []Condition{{Status: []int{410}}},
		AcceptedWhen: []Condition{{Status: []int{201}}}, Headers: map[string]string{"X-Version": "1"},
		Every: 5 * time.Second, MaxEvery: 6 * time.Second, Timeout: 7 * time.Second, Polls: 8,
	}
}

func fullBatch() *Batch {
	return &Batch{
		Lines: true, Items: "requests", ItemID: "id", ResultLines: true, Multistatus: true, Results: "results", ResultID: "id", Status: "status",
		CommittedWhen: []Condition{{JSON: []JSONTest{{"ok", []string{"true"}}}}}, RejectedWhen: []Condition{{Present: []string{"error"}}}, Atomic: true,
	}
}

func fullMarker() *Marker {
	return &Marker{Header: "X-Marker", Query: "marker", JSON: "metadata.waybill", Form: "metadata[waybill]"}
}

// TestValueTemplate: values stay in their place, whatever they hold.
func TestValueTemplate(t *testing.T) {
	contract.Covers(t, "K6")
	tmpl, err := ParseValueTemplate("/v1/o/${request.json.a.b}?q=${marker}&r=x")
	if err != nil {
		t.Fatal(err)
	}
	for in, want := range map[string]string{"a b": "a%20b", "x/../y": "x%2F..%2Fy", "a?b#c": "a%3Fb%23c", "é": "%C3%A9", "%2e": "%252e"} {
		path, query, has, missing := tmpl.Render(func(v Value) (string, bool) {
			if v.From == "marker" {
				return "m&n=1 +", true
			}
			return in, true
		})
		if missing != nil || path != "/v1/o/"+want || query != "q=m%26n%3D1%20%2B&r=x" || !has {
			t.Errorf("%q: %s ? %s", in, path, query)
		}
	}
	for _, bad := range []string{".", "..", ""} {
		if _, _, _, missing := tmpl.Render(func(Value) (string, bool) { return bad, true }); missing == nil {
			t.Errorf("%q was rendered", bad)
		}
	}
	for _, bad := range []string{"v1", "//x", "/a b", "/${", "/${x}", "/${request.json.a[*]}", "/${request.header.Authorization}", "/${request.header.cookie}", "/${request.segment.0}", "https://a/${action}", "/a#${action}"} {
		if _, err := ParseValueTemplate(bad); !errors.Is(err, ErrBadValueTemplate) {
			t.Errorf("%q: %v", bad, err)
		}
	}
}

// FuzzJSONPath: a path that parses finds without a panic.
func FuzzJSONPath(f *testing.F) {
	f.Add(`data[0].id`, `{"data":[{"id":1}]}`)
	f.Add(`["a.b"][*]`, `{"a.b":[1]}`)
	f.Fuzz(func(t *testing.T, path, doc string) {
		p, err := ParseJSONPath(path)
		if err != nil {
			return
		}
		if d := ParseDocument([]byte(doc)); d.OK && p.One() && len(p.Find(d.Value)) > 1 {
			t.Errorf("%q names more than one place in %q", path, doc)
		}
	})
}
