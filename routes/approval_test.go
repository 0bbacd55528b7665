package routes

import (
	"strings"
	"testing"
	"time"

	"waybill/internal/contract"
)

func TestExplainApproval(t *testing.T) {
	contract.Covers(t, "D3", "L8")
	all, some := route("all", "all.test"), route("some", "some.test")
	all.Approval = Approval{Required: true, Hold: 30 * time.Second, Expiry: 4 * time.Hour}
	some.Approval = Approval{Required: true, When: []ApprovalRule{{Methods: []string{"POST"}, Paths: []string{"/v1/**"}, MinBody: 100}, {Methods: []string{"DELETE"}}}}
	s := mustSnapshot(t, Deny, all, some)
	for _, c := range []struct{ method, url, want string }{
		{"GET", "https://all.test/", "A person approves it first; the caller waits 30s, it may be decided within 4h0m0s."},
		{"POST", "https://some.test/v1/x", "A person approves it first if its body has 100 bytes or more; the caller waits 2m0s, it may be decided within 1h0m0s."},
		{"POST", "https://some.test/v2/x", ""},
		{"DELETE", "https://some.test/v2/x", "A person approves it first; the caller waits 2m0s, it may be decided within 1h0m0s."},
	} {
		e, err := s.Explain(c.method, c.url)
		if err != nil || e.Approval != c.want {
			t.Errorf("%s %s: %q, %v", c.method, c.url, e.Approval, err)
		}
		var b strings.Builder
		if err := e.WriteText(&b); err != nil || strings.Contains(b.String(), "approval") != (c.want != "") {
			t.Errorf("%v\n%s", err, b.String())
		}
	}
}
