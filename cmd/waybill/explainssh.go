package main

import (
	"fmt"
	"strings"

	"waybill/outcome"
	"waybill/routes"
)

// explainSSHDocument is what "waybill explain --json ssh …" prints.
type explainSSHDocument struct {
	routes.SSHExplanation
	Limits *explainedLimits `json:"limits,omitempty"`
	Advice []advice         `json:"advice,omitempty"`
}

// explainSSH explains a command; args are the target and the command's words, joined as
// ssh does.
func (a *app) explainSSH(s *routes.Snapshot, args []string, caller string, asJSON bool) error {
	if len(args) < 2 {
		return fail(exitUsage, "explain ssh: give the target and the command: waybill explain ssh deploy@host 'command'")
	}
	command := strings.Join(args[1:], " ")
	e, err := s.ExplainSSH(args[0], command)
	if caller != "" {
		e, err = s.ExplainSSHTo(caller, args[0], command)
	}
	if err != nil {
		return fail(exitUsage, "explain ssh: %w (%s); write for example deploy@host:22 'command'", err, outcome.CodeInvalidTarget)
	}
	doc := explainSSHDocument{SSHExplanation: e}
	if r := s.Route(e.Route); e.Decision == "run" && r != nil {
		doc.Limits = explainLimits(&r.Limits)
		doc.Advice = commandAdvice(&e)
	}
	if asJSON {
		err = printJSON(a.stdout, doc)
	} else {
		err = printSSHExplanation(a, &doc)
	}
	if err == nil && e.Decision != "run" {
		return exitWith(exitFailure)
	}
	return err
}

// commandAdvice goes through the points at which a command can stop (CONTRACT E1, F2, G9).
func commandAdvice(e *routes.SSHExplanation) []advice {
	var all []advice
	add := func(at string, f outcome.Facts) { all = append(all, adviceAt(at, f, e.Repeatable)) }
	for _, p := range []struct {
		at   string
		code outcome.Code
	}{
		{"key missing", outcome.CodeCredentialMissing},
		{"name not found", outcome.CodeDNSNoSuchName},
		{"connection refused", outcome.CodeConnectionRefused},
		{"host key not accepted", outcome.CodeSSHHostKeyRejected},
		{"login refused", outcome.CodeSSHAuthFailed},
		{"session refused", outcome.CodeSSHChannelRefused},
		{"command refused by the server", outcome.CodeExecRefused},
	} {
		if f, ok := outcome.Of(p.code); ok {
			add(p.at, f)
		}
	}
	remote := func(at string, o outcome.Outcome, r outcome.Retry, code outcome.Code) {
		add(at, outcome.Facts{Phase: outcome.RemoteExecution, Outcome: o, Retry: r, Code: code})
	}
	unknown := outcome.ByContract(e.Repeatable, false)
	remote("asked for, no answer", outcome.Unknown, unknown, outcome.CodeRemoteOutcomeUnknown)
	remote("no end in time", outcome.Unknown, unknown, outcome.CodeRemoteTimeout)
	remote("connection lost, or no exit status", outcome.Unknown, unknown, outcome.CodeRemoteResultIncomplete)
	if e.ExitAuthoritative {
		add("exit status 0, output left open", outcome.Success())
	} else {
		remote("exit status 0, output left open", outcome.Unknown, unknown, outcome.CodeRemoteResultIncomplete)
	}
	add("exit status 0", outcome.Success())
	remote("another exit status, or a signal", outcome.Committed, outcome.Reconcile, outcome.CodeRemoteError)
	add("output not delivered", outcome.Facts{Phase: outcome.ResultDelivery, Outcome: outcome.Committed, Retry: outcome.FetchResult, Code: outcome.CodeDeliveryFailed})
	return all
}

func printSSHExplanation(a *app, d *explainSSHDocument) error {
	p := &errWriter{w: a.stdout}
	line := func(k, v string) {
		if v != "" {
			p.printf("%-12s %s\n", k, v)
		}
	}
	line("command", "EXEC "+d.Target)
	line("decision", d.Decision)
	line("route", d.Route)
	line("why", d.Reason)
	line("code", d.Code)
	line("field", d.Field)
	if d.Decision == "run" {
		line("pattern", fmt.Sprintf("%s (commands[%d])", d.Pattern, d.Index))
		line("key", d.Key)
		line("jump", d.Jump)
		line("host key", strings.Join(d.HostKeys, ", "))
		env := strings.Join(d.Env, ", ")
		if env == "" {
			env = "none of the caller's"
		}
		if d.Marked {
			env += ", and " + routes.EnvActionID + " by Waybill"
		}
		line("environment", env)
	}
	line("approval", d.Approval)
	line("callers", strings.Join(d.Callers, ", "))
	line("resolve", d.Resolve)
	line("snapshot", d.Snapshot)
	if d.Decision != "run" {
		return p.err
	}
	contract := "not repeatable"
	if d.Repeatable {
		contract = "repeatable"
	}
	if d.ExitAuthoritative {
		contract += ", the exit status is authoritative"
	}
	line("contract", contract+", output may stay open for "+d.Grace)
	if d.Confirm != "" {
		line("if unknown", d.Confirm)
		line("", d.ConfirmWhen)
	}
	p.printf("%-12s output %d bytes, %s; an equal command is a suspected duplicate for %s; results are kept for %s\n\n", "limits", d.Limits.ResponseBytes, d.Limits.Timeout, d.Limits.Duplicates, d.Limits.Retention)
	if p.err != nil {
		return p.err
	}
	return printAdvice(a, d.Advice)
}
