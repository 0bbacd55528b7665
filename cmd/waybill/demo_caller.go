package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"waybill/outcome"
)

// demoCaller is the agent of the demo: an ordinary HTTP client that knows the
// proxy's address and trusts its CA. It keeps everything it ever read, to be
// searched for the secret.
type demoCaller struct {
	http  *http.Client
	proxy string

	mu   sync.Mutex
	read bytes.Buffer
}

// demoPlaceholder is what the agent sends in the field that is injected.
const demoPlaceholder = "Bearer waybill-placeholder-not-a-key"

func newDemoCaller(p *demoProxy) (*demoCaller, error) {
	ca, err := os.ReadFile(filepath.Join(p.dir, "data", "ca", "ca.pem"))
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	if !pool.AppendCertsFromPEM(ca) {
		return nil, errors.New("the proxy's CA file holds no certificate")
	}
	c := &demoCaller{proxy: p.listen}
	c.http = &http.Client{
		Transport: &http.Transport{
			Proxy:           http.ProxyURL(&url.URL{Scheme: "http", Host: p.listen}),
			TLSClientConfig: &tls.Config{RootCAs: pool, MinVersion: tls.VersionTLS12},
			// A kept connection could make this client repeat a request by itself.
			DisableKeepAlives: true,
			OnProxyConnectResponse: func(_ context.Context, _ *url.URL, _ *http.Request, resp *http.Response) error {
				if resp.StatusCode == http.StatusOK {
					return nil
				}
				return c.refusedConnect(resp)
			},
		},
		CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
	}
	return c, nil
}

// demoAnswer is what the agent saw.
type demoAnswer struct {
	Status   int
	Header   http.Header
	Body     []byte
	Err      error // a broken connection or body; nil for every complete answer
	Facts    outcome.Facts
	ID       string
	Envelope outcome.Envelope
}

// connectRefused carries the answer of a refused CONNECT through the client.
type connectRefused struct{ answer *demoAnswer }

func (e *connectRefused) Error() string {
	return fmt.Sprintf("CONNECT was answered with %d", e.answer.Status)
}

func (c *demoCaller) refusedConnect(resp *http.Response) error {
	return &connectRefused{c.take(resp)}
}

// take reads an answer whole and what it says about the action.
func (c *demoCaller) take(resp *http.Response) *demoAnswer {
	a := &demoAnswer{Status: resp.StatusCode, Header: resp.Header, ID: resp.Header.Get(outcome.HeaderInvocation)}
	a.Body, a.Err = io.ReadAll(resp.Body)
	_ = resp.Body.Close()
	c.keep(a)
	if field := resp.Header.Get(outcome.HeaderOutcome); field != "" {
		if f, err := outcome.ParseOutcome(field); err == nil {
			a.Facts = f
		} else if a.Err == nil {
			a.Err = fmt.Errorf("Waybill-Outcome field: %w", err)
		}
	}
	// An envelope, if it is one of ours.
	if strings.HasPrefix(resp.Header.Get("Content-Type"), "application/json") && bytes.Contains(a.Body, []byte(`"invocation_id"`)) {
		if err := json.Unmarshal(a.Body, &a.Envelope); err != nil && a.Err == nil {
			a.Err = fmt.Errorf("envelope: %w", err)
		}
	}
	return a
}

func (c *demoCaller) keep(a *demoAnswer) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for name, values := range a.Header {
		for _, v := range values {
			fmt.Fprintf(&c.read, "%s: %s\n", name, v)
		}
	}
	c.read.Write(a.Body)
	c.read.WriteByte('\n')
}

// sawSecret searches everything the agent read.
func (c *demoCaller) sawSecret(secret string) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return holdsSecret(c.read.Bytes(), secret)
}

// send makes one request. fields are name, value pairs.
func (c *demoCaller) send(ctx context.Context, method, target, body string, fields ...string) *demoAnswer {
	var payload io.Reader
	if body != "" {
		payload = strings.NewReader(body)
	}
	req, err := http.NewRequestWithContext(ctx, method, target, payload)
	if err != nil {
		return &demoAnswer{Err: err}
	}
	if body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	req.Header.Set("Authorization", demoPlaceholder)
	for i := 0; i+1 < len(fields); i += 2 {
		req.Header.Set(fields[i], fields[i+1])
	}
	resp, err := c.http.Do(req)
	var refused *connectRefused
	switch {
	case errors.As(err, &refused):
		return refused.answer
	case err != nil:
		return &demoAnswer{Err: err}
	}
	return c.take(resp)
}

// retryAfterOK checks that the hints for client libraries fit the advice
// (CONTRACT L7, O4). Relayed answers keep the origin's own fields.
func (a *demoAnswer) hints() []string {
	if a.Envelope.Error == nil {
		return nil
	}
	var wrong []string
	after, again := a.Header.Get("Retry-After"), a.Header.Get("X-Should-Retry")
	switch a.Facts.Retry {
	case outcome.Backoff:
		if after == "" || after == "0" {
			wrong = append(wrong, "no Retry-After with backoff")
		}
		if again == "false" {
			wrong = append(wrong, "x-should-retry: false with backoff")
		}
	case outcome.Never, outcome.AfterCorrection, outcome.FetchResult, outcome.Reconcile:
		if again != "false" {
			wrong = append(wrong, "no x-should-retry: false")
		}
		if after != "" {
			wrong = append(wrong, "Retry-After on what must not be repeated")
		}
	case outcome.SameIdempotencyKey, outcome.RetryInvalid:
	}
	return wrong
}

// demoRequestLimit bounds each step of the demo.
const demoRequestLimit = 10 * time.Second
