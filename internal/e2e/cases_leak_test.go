package e2e

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"testing"

	"waybill/internal/contract"
	"waybill/internal/testkit"
)

// echo answers with the credential that the request carried: in a field, and in a
// body of small chunks whose borders fall into it.
func echo(encode func(secret string) string, kind string) testkit.Turn {
	return testkit.Respond(func(x *testkit.Exchange) error {
		a := x.Arrival()
		secret := strings.TrimPrefix(strings.Join(append(a.Values("Authorization"), a.Values("X-Api-Key")...), ""), "Bearer ")
		body := `{"seen":"Bearer ` + encode(secret) + `","again":"` + encode(secret) + `"}`
		out := "HTTP/1.1 200 OK\r\nContent-Type: " + kind + "\r\nX-Debug: got " + encode(secret) + "\r\nTransfer-Encoding: chunked\r\n\r\n"
		for i := 0; i < len(body); i += 7 {
			if err := testkit.Write(out + chunk(body[i:min(i+7, len(body))]))(x); err != nil {
				return err
			}
			out = ""
		}
		return testkit.WriteLast("0\r\n\r\n")(x)
	})
}

// casesLeaks: a secret that the origin sends back does not reach the caller (C5).
func casesLeaks(t *testing.T, b *bed) {
	spellings := []struct {
		name string
		as   func(string) string
	}{
		{"plain", func(s string) string { return s }},
		{"base64", func(s string) string { return base64.StdEncoding.EncodeToString([]byte(s)) }},
		{"percent", url.QueryEscape},
	}
	t.Run("LK-01", func(t *testing.T) {
		contract.Covers(t, "C5", "C2")
		for _, sp := range spellings {
			for _, c := range []struct{ host, kind string }{{payHost, "application/json"}, {llmHost, "text/event-stream"}} {
				path := "/v1/lk01/" + sp.name
				b.on(c.host, path, echo(sp.as, c.kind))
				resp := b.send(t, http.MethodGet, "https://"+c.host+path, "")
				id := resp.Header.Get("Waybill-Invocation")
				testkit.Eventually(t, func() error {
					if !b.tell(t, id).View.Ended {
						return fmt.Errorf("%s still runs", id)
					}
					return nil
				})
				s := b.tell(t, id)
				secret := sp.as(b.canary.Value())
				length := len(`{"seen":"Bearer `+`","again":"`+`"}`) + 2*len(secret)
				if resp.Status != 200 || len(resp.Body) != length || resp.BodyErr != nil || bytes.Contains(resp.Body, []byte(secret)) || !bytes.HasPrefix(resp.Body, []byte(`{"seen":"Bearer `)) || !bytes.HasSuffix(resp.Body, []byte(`"}`)) {
					t.Errorf("%s %s: %d, %d bytes, want %d", c.host, sp.name, resp.Status, len(resp.Body), length)
				}
				if got := resp.Header.Get("X-Debug"); strings.Contains(got, secret) || len(got) != len("got ")+len(secret) {
					t.Errorf("%s %s: a field is %d bytes long, or holds the secret", c.host, sp.name, len(got))
				}
				// The digest is that of the masked body: with one of the body as it came, secrets
				// could be tried out (C2).
				sum := sha256.Sum256(resp.Body)
				if ev := s.Envelope.Evidence; text(s.Envelope.Facts()) != success || ev.Redacted < 3 || ev.ResponseDigest != "sha256:"+hex.EncodeToString(sum[:]) {
					t.Errorf("%s %s: %s, %d places, digest %s", c.host, sp.name, text(s.Envelope.Facts()), ev.Redacted, ev.ResponseDigest)
				}
				if got := b.hear(b.api(t, "/v1/actions/"+id+"/result")); got.Status != 200 || !bytes.Equal(got.Body, resp.Body) {
					t.Errorf("%s %s: stored %d, %d bytes", c.host, sp.name, got.Status, len(got.Body))
				}
				b.crossings(t, s, want{facts: success, host: c.host, path: path, arrivals: 1})
			}
			path := "/v1/lk01/block/" + sp.name
			b.on(blockHost, path, echo(sp.as, "application/json"))
			resp := b.send(t, http.MethodGet, "https://"+blockHost+path, "")
			s := b.check(t, resp, want{status: 422, facts: "result_delivery committed never RESULT_CONTAINS_SECRET", host: blockHost, path: path, arrivals: 1})
			if got := b.hear(b.api(t, "/v1/actions/"+s.ID+"/result")); got.Status == 200 || bytes.Contains(got.Body, []byte("seen")) {
				t.Errorf("%s: the result is there: %d", sp.name, got.Status)
			}
		}
		// Compressed: searched as it reads, and passed on only where nothing is in it.
		for i, leaks := range []bool{true, false} {
			path := "/v1/lk01/gzip" + strconv.Itoa(i)
			var wire bytes.Buffer
			b.on(payHost, path, testkit.Respond(func(x *testkit.Exchange) error {
				zw := gzip.NewWriter(&wire)
				body := "nothing"
				if leaks {
					body = strings.Join(x.Arrival().Values("Authorization"), "")
				}
				if _, err := io.WriteString(zw, body); err != nil {
					return err
				}
				if err := zw.Close(); err != nil {
					return err
				}
				return testkit.WriteLast(fmt.Sprintf("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n%s", wire.Len(), wire.String()))(x)
			}))
			resp := b.raw(t, b.tunnel(t, payHost), "GET "+path+" HTTP/1.1\r\nHost: "+payHost+"\r\nAccept-Encoding: gzip\r\n\r\n")
			if !leaks {
				b.check(t, resp, want{status: 200, facts: success, relayed: true, host: payHost, path: path, arrivals: 1})
				if !bytes.Equal(resp.Body, wire.Bytes()) {
					t.Error("a compressed body without the secret was changed")
				}
				continue
			}
			body := resp.Body
			if zr, err := gzip.NewReader(bytes.NewReader(body)); err == nil && resp.Header.Get("Content-Encoding") == "gzip" {
				body, _ = io.ReadAll(zr)
			}
			testkit.Search(t, b.canary, testkit.InBytes("body", body))
			s := b.tell(t, resp.Header.Get("Waybill-Invocation"))
			if s.View.Outcome != "committed" || resp.Status != 200 && s.View.Code != "RESULT_CONTAINS_SECRET" {
				t.Errorf("gzip: %d %+v", resp.Status, s.View)
			}
		}
	})
}
