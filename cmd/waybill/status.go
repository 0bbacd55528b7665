package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/spf13/cobra"

	"waybill/journal"
)

// States of the journal of a running proxy.
const (
	journalWritable    = "writable"
	journalRefuses     = "refuses" // new work; what was sent is still ended and recorded
	journalQuarantined = "quarantined"
	journalStopped     = "stopped"
)

// journalHealth is what "status" says of the journal.
type journalHealth struct {
	State  string        `json:"state"`
	Reason string        `json:"reason,omitempty"`
	Stats  journal.Stats `json:"stats"`
}

// moreStatus is what GET /v1/status tells beyond addresses.
type moreStatus struct {
	StartedAt        time.Time       `json:"started_at"`
	UptimeSeconds    int64           `json:"uptime_seconds"`
	Admin            string          `json:"admin"`
	Routes           int             `json:"routes"`
	SecretVariables  []string        `json:"secret_variables"` // names of those that secrets are read from
	Ready            bool            `json:"ready"`
	NotReady         string          `json:"not_ready,omitempty"`
	Unresolved       int             `json:"unresolved"`        // ended, outcome unknown
	ApprovalsWaiting int             `json:"approvals_waiting"` // -1: could not be counted
	JournalHealth    *journalHealth  `json:"journal,omitempty"`
	Audit            json.RawMessage `json:"audit,omitempty"`
}

func (s *server) moreStatus() moreStatus {
	b := s.pipeline.Binding()
	m := moreStatus{
		StartedAt: s.started, UptimeSeconds: int64(time.Since(s.started).Seconds()), Admin: "unix:" + s.adminPath,
		Routes: len(b.Snapshot.Routes()), SecretVariables: append([]string{}, b.Credentials.EnvNames()...), Unresolved: s.metrics.UnresolvedNow(), ApprovalsWaiting: -1,
	}
	err := s.ready()
	if m.Ready = err == nil; err != nil {
		m.NotReady = err.Error()
	}
	h := &journalHealth{State: journalWritable, Stats: s.journal.Stats()}
	admit := s.journal.Admit()
	switch {
	case h.Stats.Stopped:
		h.State = journalStopped
	case h.Stats.Quarantined:
		h.State = journalQuarantined
	case admit != nil:
		h.State = journalRefuses
	}
	if admit != nil {
		h.Reason = admit.Error()
	}
	m.JournalHealth = h
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if waiting, err := s.pipeline.Approvals(ctx); err == nil {
		m.ApprovalsWaiting = len(waiting)
	}
	if a, err := s.auditStatus(ctx); err == nil {
		m.Audit, _ = json.Marshal(a)
	}
	return m
}

// auditHealth is the part of the audit's state that is for people.
type auditHealth struct {
	Enabled bool   `json:"enabled"`
	Failing string `json:"failing"`
}

func (s proxyStatus) audit() auditHealth {
	var h auditHealth
	_ = json.Unmarshal(s.Audit, &h)
	return h
}

// problems are what a running proxy says about itself.
func (s proxyStatus) problems() []finding {
	out := []finding{{Status: findingOK, What: fmt.Sprintf("version %s runs since %s (pid %d)", s.Version, s.StartedAt.Local().Format("2006-01-02 15:04"), s.PID)}}
	add := func(status, fix, format string, args ...any) {
		out = append(out, finding{Status: status, Fix: fix, What: fmt.Sprintf(format, args...)})
	}
	if h := s.JournalHealth; h != nil && h.State != journalWritable {
		fix := map[string]string{
			journalQuarantined: "settle with the remote sides what may have happened, then: waybill journal acknowledge --reason TEXT",
			journalStopped:     "start the proxy again: what is on disk is read then",
		}[h.State]
		add(findingFail, firstOf(fix, "make room where the data folder is"), "the journal is %s: %s", h.State, h.Reason)
	} else if !s.Ready {
		add(findingFail, "wait for the next start", "not ready: %s", s.NotReady)
	}
	if s.Unresolved > 0 {
		add(findingWarn, "waybill actions --outcome unknown; then waybill action ID, reconcile or attest", "%s with unknown outcome", plural(s.Unresolved, "action"))
	}
	if s.ApprovalsWaiting > 0 {
		add(findingWarn, "waybill approvals", "%s for a decision", map[bool]string{true: "1 approval waits", false: fmt.Sprintf("%d approvals wait", s.ApprovalsWaiting)}[s.ApprovalsWaiting == 1])
	}
	if a := s.audit(); a.Failing != "" {
		add(findingFail, "make room, or correct what it says; nothing is lost, the log catches up", "the audit log is behind: %s", a.Failing)
	}
	return out
}

func newStatus(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show how the running proxy is: listeners, journal, what waits for somebody",
		Long: `Show how the running proxy of this data folder is: version, uptime, listeners,
configuration, journal, audit log, actions with unknown outcome, and approvals that
wait.

The exit code is 0 when it is ready, 7 when it is not or none runs.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return a.showStatus(cmd.Context(), asJSON) },
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

func (a *app) showStatus(ctx context.Context, asJSON bool) error {
	data, err := a.dataDir()
	if err != nil {
		return err
	}
	client, err := a.running(ctx, data)
	if errors.Is(err, errNotRunning) {
		if asJSON {
			if err := printJSON(a.stdout, map[string]any{"running": false, "data": data}); err != nil {
				return err
			}
		}
		return fail(exitUnavailable, "no proxy runs with the data folder %s; start it with \"waybill serve\"", data)
	}
	if err != nil {
		return err
	}
	defer func() { _ = client.Close() }()
	st, err := client.status(ctx)
	if err != nil {
		return err
	}
	if asJSON {
		err = printJSON(a.stdout, struct {
			Running bool `json:"running"`
			proxyStatus
		}{true, st})
	} else {
		err = st.print(a)
	}
	if err == nil && !st.Ready {
		err = exitWith(exitUnavailable)
	}
	return err
}

func (s proxyStatus) print(a *app) error {
	style := newStyler(a, a.stdout)
	p := &errWriter{w: a.stdout}
	row := func(name, format string, args ...any) {
		p.printf("  %-11s %s\n", name, printable(fmt.Sprintf(format, args...)))
	}
	state := style.paint(green, "ready")
	if !s.Ready {
		state = style.paint(red, "not ready") + ": " + printable(s.NotReady)
	}
	p.printf("waybill %s, %s\n", printable(s.Version), state)
	row("up", "%v, pid %d", (time.Duration(s.UptimeSeconds) * time.Second).String(), s.PID)
	scheme := "http"
	if s.ProxyTLS {
		scheme = "https"
	}
	row("proxy", "%s://%s", scheme, s.Proxy)
	if s.SSH != "" {
		row("ssh", "%s", s.SSH)
	}
	if s.Metrics != "" {
		row("metrics", "http://%s/metrics", s.Metrics)
	}
	row("admin", "%s", s.Admin)
	row("data", "%s", s.Data)
	row("config", "%s, snapshot %s", plural(s.Routes, "route"), s.Snapshot)
	if h := s.JournalHealth; h != nil {
		row("journal", "%s, sequence %d, %s open, %d MiB, %d MiB free", h.State, h.Stats.Seq, plural(h.Stats.OpenActions, "action"), h.Stats.StoreBytes>>20, h.Stats.FreeBytes>>20)
	}
	switch h := s.audit(); {
	case !h.Enabled:
		row("audit", "off")
	case h.Failing != "":
		row("audit", "behind: %s", h.Failing)
	default:
		row("audit", "on")
	}
	row("unknown", "%s without a known outcome", plural(s.Unresolved, "action"))
	row("approvals", "%d waiting", s.ApprovalsWaiting)
	return p.err
}
