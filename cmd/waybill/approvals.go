package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"os/user"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"waybill/dispatch"
	"waybill/outcome"
	"waybill/proxy"
)

// resumeApprovals takes up what an earlier process left open (CONTRACT D4).
func (s *server) resumeApprovals(ctx context.Context) error {
	pending, approved, err := s.pipeline.ResumeApprovals(ctx)
	if err != nil {
		return fail(exitUnavailable, "approvals that wait: %w", err)
	}
	if pending+approved > 0 {
		s.log.Info("approvals taken up", slog.Int("pending", pending), slog.Int("approved", approved))
	}
	return nil
}

// approvalClient returns the running proxy: decisions are its to make.
func approvalClient(ctx context.Context, a *app) (*adminClient, error) {
	data, err := a.dataDir()
	if err != nil {
		return nil, err
	}
	client, err := a.running(ctx, data)
	if errors.Is(err, errNotRunning) {
		return nil, fail(exitUnavailable, "no proxy runs with data folder %s: nothing can be decided; start it with \"waybill serve\", requests that wait are still there", data)
	}
	return client, err
}

func newApprovals(a *app) *cobra.Command {
	var asJSON bool
	cmd := &cobra.Command{
		Use:   "approvals [ID]",
		Short: "List the requests that wait for an approval, or show one",
		Long: `List the requests that wait for a person's approval, newest first. With an ID: show
exactly what would be sent. Secrets are masked; injected fields show which
credential, in which version, will be put in.

Decide with "waybill approve ID" or "waybill deny ID". Needs the running proxy.`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			client, err := approvalClient(cmd.Context(), a)
			if err != nil {
				return err
			}
			defer func() { _ = client.Close() }()
			if len(args) == 1 {
				return showApproval(cmd.Context(), a, client, args[0], asJSON)
			}
			var views []dispatch.ApprovalView
			if err := client.get(cmd.Context(), http.MethodGet, "/v1/approvals", nil, nil, &views); err != nil {
				return err
			}
			if asJSON {
				for i := range views {
					if err := printLine(a.stdout, views[i]); err != nil {
						return err
					}
				}
				return nil
			}
			if len(views) == 0 {
				_, err := fmt.Fprintln(a.stdout, "nothing waits for an approval")
				return err
			}
			t := table{head: []string{"ASKED", "ACTION", "CALLER", "ROUTE", "REQUEST", "BODY", "CREDENTIAL", "EXPIRES IN"}}
			for _, v := range views {
				t.add(approvalCells(&v)...)
			}
			if err := t.print(a.stdout, newStyler(a, a.stdout)); err != nil {
				return err
			}
			_, err = fmt.Fprintln(a.stdout, "\nwaybill approvals ID shows what would be sent; waybill approve ID, waybill deny ID decide")
			return err
		},
	}
	cmd.Flags().BoolVar(&asJSON, "json", false, "print one JSON object a line, or the one that was asked for")
	return cmd
}

func approvalCells(v *dispatch.ApprovalView) []string {
	request := []rune(printable(v.Method + " " + v.Target))
	if len(request) > maxRequestColumn {
		request = append(request[:maxRequestColumn-1], '…')
	}
	return []string{v.AskedAt.Local().Format("01-02 15:04:05"), v.InvocationID, dash(printable(v.Caller)), v.Route, string(request),
		fmt.Sprintf("%d B", v.BodyBytes), credentialText(v.Credential), time.Until(v.ExpiresAt).Round(time.Second).String()}
}

func credentialText(c *dispatch.Credential) string {
	if c == nil {
		return "-"
	}
	return c.ID + "@" + c.Version
}

func showApproval(ctx context.Context, a *app, client *adminClient, id string, asJSON bool) error {
	if _, err := dispatch.ParseActionID(id); err != nil {
		return fail(exitUsage, "%s: %w", id, err)
	}
	var v dispatch.ApprovalView
	if err := client.get(ctx, http.MethodGet, "/v1/approvals/"+id, nil, nil, &v); err != nil {
		return err
	}
	if asJSON {
		return printJSON(a.stdout, v)
	}
	return printApproval(a.stdout, &v)
}

func printApproval(w io.Writer, v *dispatch.ApprovalView) error {
	p := &errWriter{w: w}
	line := func(k, format string, args ...any) {
		p.printf("%-12s %s\n", k, printable(fmt.Sprintf(format, args...)))
	}
	line("action", "%s", v.InvocationID)
	line("state", "%s", v.State)
	line("caller", "%s", v.Caller)
	line("route", "%s", v.Route)
	line("credential", "%s", credentialText(v.Credential))
	line("asked", "%s", v.AskedAt.Local().Format(time.RFC3339))
	line("expires", "%s", v.ExpiresAt.Local().Format(time.RFC3339))
	line("fingerprint", "%s", v.Fingerprint)
	if d := v.Decision; d != nil {
		line("decided", "%s by %s (%s) at %s %s", d.Verdict, d.By, d.Via, v.DecidedAt.Local().Format(time.RFC3339), d.Reason)
	}
	r := v.Request
	if r == nil {
		return p.err
	}
	p.printf("\n%s\n", printable(r.Line))
	for _, f := range r.Fields {
		note := ""
		if f.Injected {
			note = "   ← put in by Waybill"
		}
		p.printf("%s: %s%s\n", printable(f.Name), printable(f.Value), note)
	}
	if b := r.Body; b != nil {
		p.printf("\nbody: %d bytes, %s\n", b.Bytes, b.Digest)
		switch {
		case b.Binary:
			p.printf("(not text)\n")
		case b.Text != "":
			for l := range strings.SplitSeq(strings.TrimSuffix(b.Text, "\n"), "\n") {
				p.printf("  %s\n", printable(l))
			}
		}
		if b.Cut {
			p.printf("  … cut here; the digest covers all of it\n")
		}
	}
	return p.err
}

func newApprove(a *app) *cobra.Command {
	return newDecision(a, "approve", "Approve a request that waits; it is sent once", `Approve a request that waits. It is sent once: for its caller, if that one still
waits, else by Waybill itself, and the caller fetches the result under the action's
id. "waybill approvals ID" shows what will be sent.

An approval is for that one request. When its body, target, fields, credential
version or the configuration changed meanwhile, nothing is sent
(SNAPSHOT_MISMATCH). --fingerprint decides only about the request you saw.`)
}

func newDeny(a *app) *cobra.Command {
	return newDecision(a, "deny", "Deny a request that waits", `Deny a request that waits: it is never sent, and its caller is told APPROVAL_DENIED
and the --reason.`)
}

func newDecision(a *app, verb, short, long string) *cobra.Command {
	var in proxy.DecisionRequest
	var asJSON bool
	cmd := &cobra.Command{
		Use:   verb + " ID",
		Short: short,
		Long:  long,
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if _, err := dispatch.ParseActionID(args[0]); err != nil {
				return fail(exitUsage, "%s: %w", args[0], err)
			}
			if in.By == "" {
				in.By = operator(a)
			}
			client, err := approvalClient(cmd.Context(), a)
			if err != nil {
				return err
			}
			defer func() { _ = client.Close() }()
			ans, err := client.decide(cmd.Context(), args[0], verb, &in)
			if err != nil {
				return err
			}
			if asJSON {
				if err := printJSON(a.stdout, ans); err != nil {
					return err
				}
			}
			if ans.Problem != "" {
				if asJSON {
					return exitWith(exitFailure)
				}
				return fail(exitFailure, "%s: %s", args[0], printable(ans.Message))
			}
			if asJSON {
				return nil
			}
			if verb == "approve" {
				_, err = fmt.Fprintf(a.stdout, "approved %s as %s; what becomes of it: waybill action %s\n", args[0], printable(in.By), args[0])
			} else {
				_, err = fmt.Fprintf(a.stdout, "denied %s as %s; nothing was sent\n", args[0], printable(in.By))
			}
			return err
		},
	}
	f := cmd.Flags()
	f.StringVar(&in.By, "by", "", "your `name`, for the record (default: the user who runs this)")
	f.StringVar(&in.Reason, "reason", "", "why, for the record; the caller is told")
	f.StringVar(&in.Fingerprint, "fingerprint", "", "decide only if this is the request's `sha256:…`")
	f.BoolVar(&asJSON, "json", false, "print JSON")
	return cmd
}

// operator is the name of who runs this command.
func operator(a *app) string {
	if u, err := user.Current(); err == nil && u.Username != "" {
		return u.Username
	}
	return firstOf(a.getenv("USER"), "unknown")
}

// decide posts a decision. A decision that could not be made is an answer, not an error.
func (c *adminClient) decide(ctx context.Context, id, verb string, in *proxy.DecisionRequest) (proxy.DecisionAnswer, error) {
	var ans proxy.DecisionAnswer
	resp, err := c.do(ctx, http.MethodPost, "/v1/approvals/"+id+"/"+verb, nil, in)
	if err != nil {
		return ans, err
	}
	defer func() { _ = resp.Body.Close() }()
	data, err := io.ReadAll(io.LimitReader(resp.Body, maxAdminDocument))
	if err != nil {
		return ans, fail(exitUnavailable, "the proxy at %s stopped answering: %w", c.path, err)
	}
	if json.Unmarshal(data, &ans) == nil && (resp.StatusCode == http.StatusOK || ans.Problem != "") {
		return ans, nil
	}
	if resp.StatusCode == http.StatusNotFound {
		return ans, fail(exitNotFound, "%s: no approval is asked for under this id (%s)", id, outcome.CodeActionNotFound)
	}
	return ans, adminError(resp.StatusCode, data)
}
