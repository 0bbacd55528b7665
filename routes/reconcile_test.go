package routes

import (
	"time"
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
