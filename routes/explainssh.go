package routes

import (
	"fmt"
	"strings"
)

// SSHExplanation says what a snapshot would do with a command, before any secret or
// network is touched. The command line itself is not in it: it may hold a secret. The
// JSON form is what "waybill explain --json ssh …" prints.
type SSHExplanation struct {
	Snapshot string `json:"snapshot"`
	Target   string `json:"target"` // ssh://user@host:port
	// Decision is "run" or "no_route".
	Decision string `json:"decision"`
	Route    string `json:"route,omitempty"`
	// Pattern is the one that took the command, and Index its place in the route, from 0.
	Pattern string `json:"pattern,omitempty"`
	Index   int    `json:"index"`
	Reason  string `json:"reason,omitempty"` // why the decision is not "run"
	Field   string `json:"field,omitempty"`
	Code    string `json:"code,omitempty"`
	// Key says whose key is used: a credential by name, or an agent. Jump is the host on
	// the way, as user@host:port.
	Key  string `json:"key,omitempty"`
	Jump string `json:"jump,omitempty"`
	// HostKeys says by what the host is verified.
	HostKeys []string `json:"host_keys,omitempty"`
	// Env are the variables that callers may set, as patterns; Marked: WAYBILL_ACTION_ID
	// is set.
	Env      []string `json:"env"`
	Marked   bool     `json:"marked"`
	Callers  []string `json:"callers,omitempty"`
	Approval string   `json:"approval,omitempty"`
	Resolve  string   `json:"resolve,omitempty"`
	// The contract of the command (CONTRACT I8).
	Repeatable        bool   `json:"repeatable"`
	ExitAuthoritative bool   `json:"exit_authoritative"`
	Grace             string `json:"grace,omitempty"`
	// Confirm is the confirming command for an action, whose id stands as ${action_id}.
	Confirm string `json:"confirm,omitempty"`
	// ConfirmWhen says when it is asked, and from when on its rejection counts.
	ConfirmWhen string `json:"confirm_when,omitempty"`
}

// ExplainSSH tells what the snapshot makes of a command at [user@]host[:port]. Errors
// wrap ErrBadAuthority, or say what is wrong with the user or the command.
func (s *Snapshot) ExplainSSH(target, command string) (SSHExplanation, error) {
	return s.explainSSH(target, command, nil)
}

// ExplainSSHTo is ExplainSSH for one caller, by name, as ExplainTo is.
func (s *Snapshot) ExplainSSHTo(caller, target, command string) (SSHExplanation, error) {
	return s.explainSSH(target, command, &caller)
}

func (s *Snapshot) explainSSH(target, command string, caller *string) (SSHExplanation, error) {
	user, authority, ok := strings.Cut(target, "@")
	if !ok || !IsSSHUser(user) {
		return SSHExplanation{}, fmt.Errorf("%w: name the remote user, as in deploy@host", ErrBadAuthority)
	}
	host, port, err := ParseAuthority(authority, DefaultSSHPort)
	if err != nil {
		return SSHExplanation{}, err
	}
	if command == "" || len(command) > MaxCommandBytes || strings.IndexByte(command, 0) >= 0 {
		return SSHExplanation{}, fmt.Errorf("%w: the command is empty, too long, or holds a NUL byte", ErrBadAuthority)
	}
	t := Target{Scheme: "ssh", Host: host, Port: port}
	e := SSHExplanation{Snapshot: s.digest, Target: "ssh://" + user + "@" + t.Authority(), Env: []string{}}
	r, m, miss := s.MatchSSH(t, user, command)
	if r == nil {
		e.Decision, e.Reason, e.Field, e.Code = "no_route", miss.told(caller), miss.Field(), miss.Code().String()
		return e, nil
	}
	if why := r.barred(caller); why != "" {
		e.Decision, e.Route, e.Code, e.Reason, e.Callers = "deny", r.Name, "POLICY_DENIED", why, r.Callers
		return e, nil
	}
	x, rule := r.SSH, m.Rule
	e.Decision, e.Route, e.Pattern, e.Index, e.Callers = "run", r.Name, rule.Pattern(), m.Index, r.Callers
	e.Key = "credential " + x.Key
	if x.Agent != "" {
		e.Key = "agent " + x.Agent + ", " + x.AgentKey
	}
	if j := x.Jump; j != nil {
		e.Jump = fmt.Sprintf("%s@%s (credential %s)", j.User, Target{Host: j.Host, Port: j.Port}.Authority(), j.Key)
	}
	if len(x.KnownHosts) > 0 {
		e.HostKeys = append(e.HostKeys, "known_hosts")
	}
	e.HostKeys = append(e.HostKeys, x.Pins...)
	for _, name := range x.Env {
		if name != EnvActionID {
			e.Env = append(e.Env, name)
		}
	}
	e.Marked, e.Approval, e.Resolve = x.MarksAction(), r.explainApproval("EXEC", ""), r.Upstream.Resolve[host]
	e.Repeatable, e.ExitAuthoritative, e.Grace = rule.Repeatable, rule.ExitAuthoritative, rule.Grace.String()
	if rule.Grace <= 0 {
		e.Grace = DefaultGrace.String()
	}
	if c := rule.Reconcile; c != nil {
		e.Confirm, _ = c.Render("${action_id}", m.Captured())
		q := c.Schedule()
		e.ConfirmWhen = fmt.Sprintf("in the background from %s on, up to %d times", q.Every, q.Tries)
		if q.Manual || e.Approval != "" {
			e.ConfirmWhen = "when asked"
		}
		if c.RejectedWhen != nil {
			e.ConfirmWhen += fmt.Sprintf("; that nothing was done counts %s after the attempt ended", q.VisibleAfter)
		}
	}
	return e, nil
}
