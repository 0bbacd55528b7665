package e2e

import (
	"bufio"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// casesHeads sends each head that two readers could take for different things to the
// running proxy, as it is and inside of an intercepted tunnel: there is one answer, the
// connection is closed, and nothing arrives at any origin.
func casesHeads(t *testing.T, b *bed) {
	contract.Covers(t, "B1", "B2", "L1")
	arrived := func() (n int) {
		for _, l := range b.ledgers {
			n += len(l.Arrivals())
		}
		return n
	}
	arrivals, records := arrived(), len(b.settle(t))
	refused := func(t *testing.T, place string, h testkit.SmugglingHead, c *testkit.Conn, wire string) {
		t.Helper()
		if err := c.SetDeadline(time.Now().Add(patience)); err != nil {
			t.Fatal(err)
		}
		c.Send(t, wire)
		all, err := io.ReadAll(c)
		if err != nil {
			t.Fatalf("%s, %s: the connection is not closed: %v", h.Name, place, err)
		}
		r := bufio.NewReader(strings.NewReader(string(all)))
		resp, err := http.ReadResponse(r, nil)
		if err != nil {
			t.Fatalf("%s, %s: %q: %v", h.Name, place, all, err)
		}
		body, err := io.ReadAll(resp.Body)
		_ = resp.Body.Close()
		rest, _ := io.ReadAll(r)
		if err != nil || len(rest) > 0 || resp.StatusCode < 400 || resp.StatusCode > 499 || !strings.Contains(string(body), `"code":"`+h.Code+`"`) || !strings.Contains(string(body), `"reason":"`+h.Reason+`"`) {
			t.Errorf("%s, %s: %d %s, %v, and then %q", h.Name, place, resp.StatusCode, body, err, rest)
		}
		if f := resp.Header.Get("Waybill-Outcome"); !strings.HasPrefix(f, "not_attempted;phase=validation;") {
			t.Errorf("%s, %s: %s", h.Name, place, f)
		}
	}
	heads := testkit.SmugglingHeads()
	inside := 0
	t.Run("heads", func(t *testing.T) {
		for _, h := range heads {
			wire := strings.Replace(h.Wire, "http://"+payHost+"/", "/", 1)
			tunnelled := wire != h.Wire && !strings.HasPrefix(wire, "CONNECT")
			if tunnelled {
				inside++
			}
			t.Run(h.Name, func(t *testing.T) {
				t.Parallel()
				refused(t, "outside", h, testkit.Dial(t, b.addr), h.Wire)
				if tunnelled {
					refused(t, "inside", h, b.tunnel(t, payHost), wire)
				}
			})
		}
	})
	if len(heads) < 60 || inside < 40 {
		t.Errorf("%d heads, %d inside of a tunnel", len(heads), inside)
	}
	if n := arrived() - arrivals; n != 0 {
		t.Errorf("%d arrivals", n)
	}
	if n := len(b.settle(t)) - records; n != len(heads)+inside {
		t.Errorf("%d records of %d refusals", n, len(heads)+inside)
	}
}
