package main

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"time"

	"waybill/dispatch"
	"waybill/inject"
	"waybill/internal/config"
	"waybill/metrics"
	"waybill/proxy"
)

const (
	maxNotifying   = 256 // at once; what comes beyond is not told
	notifyTries    = 12
	notifyFirst    = time.Second
	notifyLongest  = 5 * time.Minute
	maxNotifyReply = 64 << 10
)

// notifier tells an endpoint that a person is asked. It holds nobody up and changes
// nothing: an approval that nobody heard of is still listed, and expires (CONTRACT D4).
type notifier struct {
	cfg     config.Approvals
	key     func() ([]byte, error)
	client  *http.Client
	log     *slog.Logger
	metrics *metrics.Metrics
	slots   chan struct{}
	stop    context.Context //nolint:containedctx // the life of the process, not of a call
	pending func(id string) bool
	pause   func(ctx context.Context, d time.Duration) bool
}

// notification is what is sent, in the form of Standard Webhooks.
type notification struct {
	Type      string                `json:"type"`
	Timestamp time.Time             `json:"timestamp"`
	Data      dispatch.ApprovalView `json:"data"`
}

// webhookKey resolves the key of a webhook at each use, so that it can be rotated.
func (s *server) webhookKey(credential string) func() ([]byte, error) {
	return func() ([]byte, error) {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		got, err := s.pipeline.Binding().Credentials.Resolve(ctx, credential)
		if err != nil {
			return nil, err
		}
		return proxy.WebhookKey(got.Secret.Expose())
	}
}

// newNotifier returns nil where nobody is to be told.
func (s *server) newNotifier(cfg config.Approvals) (*notifier, error) {
	if cfg.URL == "" {
		return nil, nil //nolint:nilnil // none, and no error
	}
	client, err := inject.HTTPClient(cfg.RootsFile, cfg.Timeout)
	if err != nil {
		return nil, fail(exitConfig, "approvals.notify: %w", err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	s.closers = append(s.closers, func() error { cancel(); return nil })
	s.stopNotify = cancel
	return &notifier{cfg: cfg, key: s.webhookKey(cfg.NotifyKey), client: client, log: s.log, metrics: s.metrics, slots: make(chan struct{}, maxNotifying), stop: ctx, pending: s.stillPending, pause: sleep}, nil
}

func (s *server) stillPending(id string) bool {
	action, err := dispatch.ParseActionID(id)
	if err != nil {
		return false
	}
	rec, err := s.journal.Action(context.Background(), action)
	return err != nil || rec.PendingApproval()
}

// tell is dispatch.Config.OnApproval: it runs in a goroutine of its own.
func (n *notifier) tell(v dispatch.ApprovalView) {
	select {
	case n.slots <- struct{}{}:
		defer func() { <-n.slots }()
	default:
		n.metrics.Announced(metrics.AnnounceGivenUp)
		n.log.Warn("approval not announced: too many announcements wait", slog.String("action", v.InvocationID))
		return
	}
	// The same in every try and after a restart, so that a receiver can tell repeats.
	sum := sha256.Sum256([]byte(v.InvocationID + " " + v.Fingerprint))
	id := "wbn_" + hex.EncodeToString(sum[:12])
	wait := notifyFirst
	for try := 1; ; try++ {
		err := n.send(id, v)
		if err == nil {
			n.metrics.Announced(metrics.AnnounceDelivered)
			n.log.Info("approval announced", slog.String("action", v.InvocationID), slog.Int("tries", try))
			return
		}
		n.metrics.Announced(metrics.AnnounceFailed)
		last := try == notifyTries || n.stop.Err() != nil || time.Now().Add(wait).After(v.ExpiresAt)
		n.log.Warn("approval not announced", slog.String("action", v.InvocationID), slog.Int("try", try), slog.Bool("last", last), slog.String("error", err.Error()))
		if last {
			n.metrics.Announced(metrics.AnnounceGivenUp)
		}
		if last || !n.pause(n.stop, wait+rand.N(wait/2)) || !n.pending(v.InvocationID) {
			return
		}
		wait = min(2*wait, notifyLongest)
	}
}

// send makes one try. Its error names no text of the endpoint and no URL.
func (n *notifier) send(id string, v dispatch.ApprovalView) error {
	key, err := n.key()
	if err != nil {
		return fmt.Errorf("the key cannot be used: %w", err)
	}
	now := time.Now()
	body, err := json.Marshal(notification{Type: "approval.requested", Timestamp: v.AskedAt, Data: v})
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(n.stop, http.MethodPost, n.cfg.URL, bytes.NewReader(body))
	if err != nil {
		return errUnreachable
	}
	req.Header.Set("Content-Type", "application/json")
	req.Header.Set("User-Agent", "waybill")
	req.Header.Set(proxy.WebhookID, id)
	req.Header.Set(proxy.WebhookTimestamp, fmt.Sprint(now.Unix()))
	req.Header.Set(proxy.WebhookSignature, proxy.SignWebhook(key, id, now, body))
	resp, err := n.client.Do(req)
	if err != nil {
		return errUnreachable // net/http quotes the URL, which may hold a token
	}
	defer func() { _ = resp.Body.Close() }()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, maxNotifyReply))
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		return fmt.Errorf("the endpoint answered %d", resp.StatusCode)
	}
	return nil
}

var errUnreachable = errors.New("the endpoint cannot be reached")

func sleep(ctx context.Context, d time.Duration) bool {
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-t.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// announceAgain tells of what was pending at the start: the process may have ended
// before the first time arrived.
func (s *server) announceAgain(ctx context.Context) {
	if s.notifier == nil {
		return
	}
	records, err := s.pipeline.Approvals(ctx)
	if err != nil {
		return // reported by whoever reads them next
	}
	for i := range records {
		go s.notifier.tell(records[i].ApprovalView())
	}
}

// listenDecisions opens the endpoint for signed decisions.
func (s *server) listenDecisions(cfg config.Approvals) error {
	if cfg.Listen == "" {
		return nil
	}
	l, err := listenTCP("approvals.decisions.listen", cfg.Listen)
	if err != nil {
		return err
	}
	s.closers = append(s.closers, l.Close)
	s.decisions = s.front.AdminServer() // for its log and time-outs
	s.decisions.Handler = &proxy.Decisions{Key: s.webhookKey(cfg.DecisionKey), Who: s.pipeline, Logger: s.log, Metrics: s.metrics}
	s.decisions.ReadTimeout, s.decisions.WriteTimeout = 30*time.Second, time.Minute
	s.log.Info("decisions are taken", slog.String("address", l.Addr().String()))
	s.serve("decisions", func() error { return s.decisions.Serve(l) })
	return nil
}
