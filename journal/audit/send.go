package audit

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"
)

// Destination is one place that checkpoints are sent to: one of File, Command, URL.
type Destination struct {
	File    string   // a line of JSON is appended, and synced
	Command []string // run without a shell; the line of JSON is its standard input
	URL     string   // https: POST of the line as application/json; a 2xx answer counts
	Roots   []byte   // PEM; nil: the system's
	// TokenFile holds a bearer token for URL; it is read at each try.
	TokenFile string
}

// String says which, without anything secret.
func (d *Destination) String() string {
	switch {
	case d.File != "":
		return "file " + d.File
	case len(d.Command) > 0:
		return "command " + d.Command[0]
	default:
		u, err := url.Parse(d.URL)
		if err != nil {
			return "endpoint"
		}
		return u.Scheme + "://" + u.Host + u.EscapedPath() // what follows could be a key
	}
}

// DeliveredStatus is how one destination gets on.
type DeliveredStatus struct {
	To      string    `json:"to"`
	Records uint64    `json:"records"` // of the last checkpoint that arrived
	At      time.Time `json:"at,omitzero"`
	Failing string    `json:"failing,omitempty"`
}

const (
	sendTimeout = 30 * time.Second
	firstRetry  = time.Second
	maxRetry    = 5 * time.Minute
)

// sender sends the newest checkpoint to every destination, each at its own pace. One
// that fails is tried again; what it missed is in the newest one as well, since that
// speaks of everything before it.
type sender struct {
	outs    []*outlet
	metrics Metrics
	log     *slog.Logger
}

type outlet struct {
	to   Destination
	wake chan struct{}

	mu      sync.Mutex
	next    *Checkpoint
	state   DeliveredStatus
	settled chan struct{} // closed when nothing waits
}

func newSender(to []Destination, m Metrics, log *slog.Logger) *sender {
	s := &sender{metrics: m, log: log}
	for i := range to {
		o := &outlet{to: to[i], wake: make(chan struct{}, 1), state: DeliveredStatus{To: to[i].String()}, settled: make(chan struct{})}
		close(o.settled)
		s.outs = append(s.outs, o)
	}
	return s
}

// offer never blocks.
func (s *sender) offer(c *Checkpoint) {
	if c == nil {
		return
	}
	for _, o := range s.outs {
		o.mu.Lock()
		if o.next == nil {
			o.settled = make(chan struct{})
		}
		o.next = c
		o.mu.Unlock()
		select {
		case o.wake <- struct{}{}:
		default:
		}
	}
}

func (s *sender) status() []DeliveredStatus {
	out := make([]DeliveredStatus, len(s.outs))
	for i, o := range s.outs {
		o.mu.Lock()
		out[i] = o.state
		o.mu.Unlock()
	}
	return out
}

// flush waits until nothing waits any more, or for limit.
func (s *sender) flush(limit time.Duration) {
	timer := time.NewTimer(limit)
	defer timer.Stop()
	for _, o := range s.outs {
		o.mu.Lock()
		settled := o.settled
		o.mu.Unlock()
		select {
		case <-settled:
		case <-timer.C:
			return
		}
	}
}

func (s *sender) run(ctx context.Context) {
	var all sync.WaitGroup
	for _, o := range s.outs {
		all.Go(func() { s.deliver(ctx, o) })
	}
	all.Wait()
}

func (s *sender) deliver(ctx context.Context, o *outlet) {
	retry := time.Duration(0)
	for {
		var again <-chan time.Time
		if retry > 0 {
			t := time.NewTimer(retry)
			defer t.Stop()
			again = t.C
		}
		select {
		case <-o.wake:
		case <-again:
		case <-ctx.Done():
			return
		}
		o.mu.Lock()
		c := o.next
		o.mu.Unlock()
		if c == nil {
			continue
		}
		err := o.to.send(ctx, c)
		s.metrics.AuditDelivery(err == nil)
		o.mu.Lock()
		was := o.state.Failing
		o.state.Failing = ""
		if err == nil {
			o.state.Records, o.state.At = c.Records, time.Now().UTC()
			if o.next == c {
				o.next = nil
				close(o.settled)
			}
			retry = 0
		} else {
			o.state.Failing = err.Error()
			retry = min(max(2*retry, firstRetry), maxRetry)
		}
		o.mu.Unlock()
		if err != nil && was == "" {
			s.log.Warn("audit: a checkpoint did not arrive; it is tried again", slog.String("to", o.to.String()), slog.Any("error", err))
		}
	}
}

// send delivers one checkpoint. Its errors hold nothing that a destination said: that
// could be anything.
func (d *Destination) send(ctx context.Context, c *Checkpoint) error {
	line, err := json.Marshal(c)
	if err != nil {
		return err
	}
	line = append(line, '\n')
	ctx, cancel := context.WithTimeout(ctx, sendTimeout)
	defer cancel()
	switch {
	case d.File != "":
		return appendLine(d.File, line)
	case len(d.Command) > 0:
		cmd := exec.CommandContext(ctx, d.Command[0], d.Command[1:]...)
		cmd.Stdin = bytes.NewReader(line)
		cmd.Env = []string{"PATH=" + os.Getenv("PATH")} // nothing that could hold a secret
		cmd.WaitDelay = time.Second
		if err := cmd.Run(); err != nil {
			return fmt.Errorf("the command failed: %w", err)
		}
		return nil
	default:
		return d.post(ctx, line)
	}
}

func appendLine(path string, line []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_APPEND|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(line)
	if err == nil {
		err = f.Sync()
	}
	if cerr := f.Close(); err == nil {
		err = cerr
	}
	return err
}

var errRedirected = errors.New("it redirects")

func (d *Destination) post(ctx context.Context, line []byte) error {
	conf := &tls.Config{MinVersion: tls.VersionTLS12}
	if d.Roots != nil {
		conf.RootCAs = x509.NewCertPool()
		if !conf.RootCAs.AppendCertsFromPEM(d.Roots) {
			return errors.New("no certificate in its roots")
		}
	}
	tr := &http.Transport{TLSClientConfig: conf, DisableKeepAlives: true, Proxy: nil} // no proxy of the environment
	defer tr.CloseIdleConnections()
	client := &http.Client{Transport: tr, CheckRedirect: func(*http.Request, []*http.Request) error { return errRedirected }}
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, d.URL, bytes.NewReader(line))
	if err != nil {
		return errors.New("its URL is none")
	}
	req.Header.Set("Content-Type", "application/json")
	if d.TokenFile != "" {
		b, err := os.ReadFile(d.TokenFile)
		if err != nil {
			return fmt.Errorf("token: %s: %w", filepath.Base(d.TokenFile), errors.Unwrap(err))
		}
		req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(b)))
	}
	resp, err := client.Do(req)
	if err != nil {
		if errors.Is(err, errRedirected) {
			return errRedirected
		}
		return errors.New("it cannot be reached, or its certificate is not trusted")
	}
	defer func() { _ = resp.Body.Close() }()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 64<<10))
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return fmt.Errorf("it answers %d", resp.StatusCode)
	}
	return nil
}
