package main

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"waybill/internal/config"
	"waybill/journal"
	"waybill/journal/audit"
	"waybill/metrics"
)

// auditor writes the audit log beside the proxy: on no request's way (CONTRACT N5).
type auditor struct {
	follower atomic.Pointer[audit.Follower]
	options  audit.Options
	follow   audit.FollowOptions
	metrics  *metrics.Metrics
	log      *slog.Logger
	stop     context.CancelFunc
	done     sync.WaitGroup
}

// auditFolder is where the log is.
func auditFolder(data string, c config.Audit) string {
	if c.Folder != "" {
		return c.Folder
	}
	return filepath.Join(data, "audit")
}

// openAudit starts to follow the journal, if the configuration says so. A journal in
// quarantine has nothing new, and is followed when it is out of it.
func (s *server) openAudit(cfg *loadedConfig) error {
	c := cfg.audit
	if c.Recipient == "" || s.journal.Recovery().Quarantined {
		return nil
	}
	key, err := audit.ParsePublicKey(c.Recipient)
	if err != nil {
		return fail(exitConfig, "audit.recipient: %w", err)
	}
	a := &auditor{metrics: s.metrics, log: s.log}
	a.options = audit.Options{
		Dir: auditFolder(s.data, c), Recipient: key, CheckpointEvery: c.CheckpointEvery, CheckpointInterval: c.CheckpointInterval,
		Retention: c.Retention, MaxBytes: c.MaxSize,
	}
	a.follow = audit.FollowOptions{Source: s.journal, Metrics: s.metrics, Logger: s.log}
	for _, to := range c.To {
		a.follow.To = append(a.follow.To, audit.Destination{File: to.File, Command: to.Command, URL: to.URL, Roots: to.RootsPEM, TokenFile: to.TokenFile})
	}
	l, err := audit.OpenLog(a.options)
	if err != nil && !noRoom(err) {
		return fail(exitConfig, "audit log: %w", err)
	}
	// Nothing that is not in the log yet is removed by retention, also while it cannot
	// be opened.
	s.journal.Hold(a.passed)
	ctx, stop := context.WithCancel(context.Background())
	a.stop = stop
	a.done.Go(func() { a.run(ctx, l) })
	s.audit = a
	s.closers = append(s.closers, func() error { a.close(); return nil })
	return nil
}

// noRoom reports what may be over by itself: then the proxy starts without its log,
// says so, and writes it as soon as it can.
func noRoom(err error) bool {
	return errors.Is(err, syscall.ENOSPC) || errors.Is(err, syscall.EDQUOT) || errors.Is(err, syscall.EIO)
}

// reopenAudit is how long a log that could not be opened is left alone.
const reopenAudit = 10 * time.Second

func (a *auditor) run(ctx context.Context, l *audit.Log) {
	for l == nil {
		a.metrics.AuditFailing(true)
		a.log.Error("the audit log cannot be opened: there is no room; it is tried again")
		timer := time.NewTimer(reopenAudit)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
		var err error
		if l, err = audit.OpenLog(a.options); err != nil {
			l = nil
			continue
		}
		a.metrics.AuditFailing(false)
	}
	f := audit.NewFollower(l, a.follow)
	a.follower.Store(f)
	if err := f.Run(ctx); err != nil {
		a.log.Error("audit log", slog.Any("error", err))
	}
}

// passed is what retention may remove.
func (a *auditor) passed() uint64 {
	if f := a.follower.Load(); f != nil {
		return f.Passed()
	}
	return 0
}

// close ends the following after it has caught up. The journal must still be open.
func (a *auditor) close() {
	if a != nil {
		a.stop()
		a.done.Wait()
	}
}

// auditStatus is what GET /v1/audit tells.
func (s *server) auditStatus(context.Context) (any, error) {
	type status struct {
		Enabled bool `json:"enabled"`
		*audit.Status
	}
	if s.audit == nil {
		return status{}, nil
	}
	f := s.audit.follower.Load()
	if f == nil {
		return status{true, &audit.Status{Failing: "the log cannot be opened: there is no room", Folder: s.audit.options.Dir}}, nil
	}
	st := f.Status()
	return status{true, &st}, nil
}

var _ audit.Source = (*journal.Journal)(nil)
