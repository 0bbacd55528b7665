package e2e

import (
	"bytes"
	"net/http"
	"strconv"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"waybill/internal/testkit"
)

// overH2 sends one request without a body over HTTP/2 with exactly these bytes in
// :path and :authority, and reads the answer.
func overH2(t *testing.T, c *testkit.Conn, method, path, authority string) *testkit.Response {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(patience))
	c.Send(t, http2.ClientPreface)
	fr := http2.NewFramer(c, c)
	fr.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	var block bytes.Buffer
	enc := hpack.NewEncoder(&block)
	for _, f := range [][2]string{{":method", method}, {":scheme", "https"}, {":authority", authority}, {":path", path}} {
		if err := enc.WriteField(hpack.HeaderField{Name: f[0], Value: f[1]}); err != nil {
			t.Fatal(err)
		}
	}
	if err := fr.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	if err := fr.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block.Bytes(), EndHeaders: true, EndStream: true}); err != nil {
		t.Fatal(err)
	}
	resp := &testkit.Response{Proto: "HTTP/2.0", Header: http.Header{}}
	for {
		f, err := fr.ReadFrame()
		if err != nil {
			t.Fatalf("%s %q at %q: no answer: %v (L7)", method, path, authority, err)
		}
		switch f := f.(type) {
		case *http2.SettingsFrame:
			if !f.IsAck() {
				if err := fr.WriteSettingsAck(); err != nil {
					t.Fatal(err)
				}
			}
		case *http2.MetaHeadersFrame:
			for _, h := range f.Fields {
				if h.Name == ":status" {
					resp.Status, _ = strconv.Atoi(h.Value)
					continue
				}
				resp.Header.Add(h.Name, h.Value)
			}
			if f.StreamEnded() {
				return resp
			}
		case *http2.DataFrame:
			resp.Body = append(resp.Body, f.Data()...)
			if f.StreamEnded() {
				return resp
			}
		case *http2.RSTStreamFrame:
			t.Fatalf("%s %q at %q: RST_STREAM %v instead of an answer (L7)", method, path, authority, f.ErrCode)
		case *http2.GoAwayFrame:
			t.Fatalf("%s %q at %q: GOAWAY %v instead of an answer (L7)", method, path, authority, f.ErrCode)
		}
	}
}
