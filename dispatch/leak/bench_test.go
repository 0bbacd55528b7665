package leak_test

import (
	"bytes"
	"crypto/sha256"
	"encoding/base64"
	"fmt"
	"math/rand/v2"
	"net/http"
	"strings"
	"testing"

	"waybill/dispatch/leak"
)

const benchBytes = 64 << 10

// benchBodies are bodies without a secret, as they come.
func benchBodies() map[string][]byte {
	r := rand.New(rand.NewPCG(1, 2))
	binary := make([]byte, benchBytes)
	for i := range binary {
		binary[i] = byte(r.Uint32())
	}
	var object, page, numbers bytes.Buffer
	for i := 0; object.Len() < benchBytes; i++ {
		fmt.Fprintf(&object, `{"id":"ch_%016x","object":"charge","amount":%d,"currency":"eur","description":"Order \"%d\" of a caf\u00e9","receipt_url":"https:\/\/pay.example.test\/r?x=%%2Fa%%20b"},`,
			r.Uint64(), r.IntN(100000), i)
	}
	for i := 0; page.Len() < benchBytes; i++ {
		fmt.Fprintf(&page, "<li class=\"item\"><a href=\"/orders?id=%d&amp;lang=en\">Order &#39;%d&#39; of today</a></li>\n", i, r.IntN(1000))
	}
	for numbers.Len() < benchBytes {
		fmt.Fprintf(&numbers, "%.4f,%d,%x\n", r.Float64()*100, r.IntN(1000000), r.Uint32())
	}
	return map[string][]byte{
		"json": object.Bytes()[:benchBytes], "html": page.Bytes()[:benchBytes], "numbers": numbers.Bytes()[:benchBytes],
		"binary": binary, "base64": []byte(base64.StdEncoding.EncodeToString(binary))[:benchBytes],
		"hex": []byte(fmt.Sprintf("%x", binary))[:benchBytes], "zeros": make([]byte, benchBytes),
	}
}

// benchSecrets are an API key with the field value made of it, a pair for Basic, and
// the shortest secret.
func benchSecrets() map[string][][]byte {
	const key = "sk_canary_51H8fJ2eZvKYlo2C0aBcDeFgHiJkLmNoPqRsTuVwXyZ"
	basic := base64.StdEncoding.EncodeToString([]byte("canary-user:" + key))
	return map[string][][]byte{
		"key":   {[]byte(key), []byte("Bearer " + key)},
		"basic": {[]byte(key), []byte("canary-user:" + key), []byte("Basic " + basic)},
		"short": {[]byte("cAnAry-8")},
		"jwt":   {[]byte(strings.Repeat("eyJjYW5hcnkiOiJ3ZWIuLi4", 60))},
	}
}

func BenchmarkStream(b *testing.B) {
	for kind, secrets := range benchSecrets() {
		for name, body := range benchBodies() {
			b.Run(kind+"/"+name, func(b *testing.B) {
				g := leak.New(secrets...)
				var out []byte
				b.SetBytes(int64(len(body)))
				for b.Loop() {
					s := g.Stream()
					out = s.Flush(s.Write(out[:0], body))
				}
				if !bytes.Equal(out, body) {
					b.Fatal("the body was changed")
				}
			})
		}
	}
}

// BenchmarkSHA256 is the measure: every body is hashed once on its way.
func BenchmarkSHA256(b *testing.B) {
	body := benchBodies()["json"]
	b.SetBytes(int64(len(body)))
	for b.Loop() {
		sha256.Sum256(body)
	}
}

// BenchmarkAction is what one action costs with a body of 64 KiB, the Guard included.
func BenchmarkAction(b *testing.B) {
	body := benchBodies()["json"]
	h := http.Header{"Content-Type": {"application/json"}, "Date": {"Tue, 15 Nov 1994 08:12:31 GMT"}, "Etag": {`"33a64df551425fcc55e4d42a148795d9f25f89d4"`},
		"Strict-Transport-Security": {"max-age=31556926; includeSubDomains; preload"}, "Request-Id": {"req_0123456789abcdef"}}
	for kind, secrets := range benchSecrets() {
		for _, size := range []int{300, 2 << 10, benchBytes} {
			b.Run(fmt.Sprintf("%s/%d", kind, size), func(b *testing.B) {
				var out []byte
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					g := leak.New(secrets...)
					g.MaskHeader(h)
					s := g.Stream()
					out = s.Flush(s.Write(out[:0], body[:size]))
				}
			})
		}
	}
}

func BenchmarkInspector(b *testing.B) {
	g := leak.New(benchSecrets()["key"]...)
	body := benchBodies()["json"]
	for _, coding := range []string{"gzip", "deflate", "br", "zstd"} {
		b.Run(coding, func(b *testing.B) {
			wire := encode(coding, body)
			b.SetBytes(int64(len(body)))
			for b.Loop() {
				i, err := g.Inspector(coding)
				if err != nil {
					b.Fatal(err)
				}
				if found, err := i.Write(wire); found || err != nil {
					b.Fatal(found, err)
				}
				if found, err := i.Close(); found || err != nil {
					b.Fatal(found, err)
				}
			}
		})
	}
}
