package telemetry

import (
	"net/http"
	"net/http/httptest"
	"os"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"waybill/internal/contract"
)

// The fields for the collector are secrets of the environment: a spelling mistake in them
// is not printed, and a collector cannot send them on (C2, V2).
func TestHeaderVariablesStayHere(t *testing.T) {
	contract.Covers(t, "C2")
	const canary = "CANARY-otlp-key"
	for _, headers := range []string{"Authorization: Bearer " + canary, "api-key=%zz" + canary, "api-key=" + canary} {
		t.Setenv("OTEL_EXPORTER_OTLP_HEADERS", headers)
		var elsewhere, here atomic.Int32
		other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { elsewhere.Add(1) }))
		collector := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			here.Add(1)
			http.Redirect(w, r, other.URL, http.StatusTemporaryRedirect)
		}))
		read, write, err := os.Pipe()
		if err != nil {
			t.Fatal(err)
		}
		stderr := os.Stderr
		os.Stderr = write
		e, err := Start(t.Context(), collector.URL, "v0", func() {})
		if err == nil {
			e.Record(Span{Route: "pay", Start: time.Now(), End: time.Now()})
			_ = e.Close(t.Context())
		}
		os.Stderr = stderr
		_ = write.Close()
		buf := make([]byte, 64<<10)
		n, _ := read.Read(buf)
		if err != nil || here.Load() == 0 {
			t.Errorf("%q: %v, %d exports", headers, err, here.Load())
		}
		if strings.Contains(string(buf[:n]), canary) {
			t.Errorf("printed: %s", buf[:n])
		}
		if elsewhere.Load() != 0 {
			t.Errorf("%q: the collector sent the fields on", headers)
		}
		collector.Close()
		other.Close()
	}
}
